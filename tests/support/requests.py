"""Requests as the server reads them: no server is needed."""

from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from starlette.testclient import TestClient

from mlx_mtp.server.app import APIS, make_app
from mlx_mtp.server.command_line import Options, check, make_parser
from mlx_mtp.server.engine.engine import Clients
from mlx_mtp.server.frontend import Frontend, Items
from mlx_mtp.server.request import Metrics, Request

ASK = [{"role": "user", "content": "a"}]
CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
FLAGS = SimpleNamespace(max_tokens=5, num_draft_tokens=None, copy_drafts=None)


def options_of(*flags: str) -> Options:
    """The options of a server with these flags."""
    return check(make_parser().parse_args(flags))


def client_of(generate: Any, *flags: str) -> TestClient:
    """A client of an app whose frontend answers by ``generate``."""
    engine, models = SimpleNamespace(is_alive=True), SimpleNamespace(drafts=False, key=None)
    given = dict(engine=engine, options=options_of(*flags), models=models, clients=Clients())
    frontend = SimpleNamespace(metrics=Metrics(), **given)

    async def start(request: Request, items: Items, i: int) -> None:
        async for item in generate(request):
            items.put_nowait((i, item))
        items.put_nowait((i, None))

    async def receive(items: Items, n: int) -> AsyncIterator[tuple[int, Any]]:
        """All items, at once."""
        while n > 0:
            i, item = await items.get()
            if isinstance(item, Exception):
                raise item
            yield i, item
            n -= item is None

    frontend.start, frontend._receive = start, receive
    frontend.generate = partial(Frontend.generate, frontend)
    return TestClient(make_app(frontend), base_url="http://localhost")


def read(path: str, **body: Any) -> Request:
    """What an API makes of a body."""
    return APIS[path].read_request(body, FLAGS)[1]


def body_with(path: str, messages: Any = ASK, **fields: Any) -> dict[str, Any]:
    """A body with these messages, or for a text this prompt."""
    return {APIS[path].NEEDED: messages, **fields}


def tools_of(path: str, *functions: dict[str, Any]) -> list[dict[str, Any]]:
    """Tools of these names, descriptions and parameters, in the form of an API."""
    if path == MESSAGES:
        return [{"input_schema" if name == "parameters" else name: x for name, x in f.items()} for f in functions]
    return [{"type": "function", "function": f} if path == CHAT else {"type": "function", **f} for f in functions]
