"""Requests as the server reads them: no server is needed."""

from collections import deque
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from starlette.testclient import TestClient

from mlx_mtp.memory import sizes_of
from mlx_mtp.server.app import APIS, make_app
from mlx_mtp.server.command_line import make_parser
from mlx_mtp.server.engine.admission import Admission
from mlx_mtp.server.engine.engine import Clients, Engine
from mlx_mtp.server.frontend import Frontend, Items
from mlx_mtp.server.options import Options, check
from mlx_mtp.server.request import Metrics, Prompt, Request

ASK = [{"role": "user", "content": "a"}]
CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
KEY = ("a model", None)
FLAGS = SimpleNamespace(max_tokens=5, num_draft_tokens=None, copy_drafts=None)


def options_of(*flags: str) -> Options:
    """The options of a server with these flags."""
    return check(make_parser().parse_args(flags))


def request_of(n: int = 8) -> Request:
    """One of so many tokens."""
    request = Request("text", "a", [], None, None)
    request.args = SimpleNamespace(model="m", seed=None, sampling=SimpleNamespace(temperature=0.0))
    request.key, request.encoded = KEY, Prompt([0] * n)
    return request


def admission_with(model: Any, *flags: str) -> Admission:
    """One that has loaded a model."""
    models, nothing = SimpleNamespace(model=model, key=KEY), SimpleNamespace(nbytes=0)
    account = SimpleNamespace(left=1 << 30, buffers=0, release=lambda: None)
    admission = Admission(options_of("--mtp", *flags), models, nothing, None, account)
    admission.sizes, admission.batch = sizes_of(model), SimpleNamespace(prompt_cache_nbytes=0)
    return admission


def frontend_of(*flags: str, is_alive: bool = True) -> Frontend:
    """Without a generation thread."""
    engine = Engine.__new__(Engine)
    engine.clients, engine.metrics, engine.n_failures = Clients(), Metrics(), 0
    engine.waiting, engine.running = deque(), {}
    models = SimpleNamespace(drafts=False, key=None, resolve=lambda model: KEY, tokenizers={KEY: "a tokenizer"})
    engine.admission = SimpleNamespace(models=models, caches=None, account=None)
    engine.thread, engine.error = SimpleNamespace(is_alive=lambda: is_alive), None
    return Frontend(options_of(*flags), engine)


def client_of(generate: Any, *flags: str) -> TestClient:
    """A client of an app whose frontend answers by ``generate``."""
    frontend = frontend_of(*flags)

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
    return TestClient(make_app(frontend), base_url="http://localhost")


def read(path: str, **body: Any) -> Request:
    """What an API makes of a body."""
    return APIS[path].read_request(body, FLAGS)[1]


def text(content: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": content}


def body_with(path: str, messages: Any = ASK, **fields: Any) -> dict[str, Any]:
    """A body with these messages, or for a text this prompt."""
    return {APIS[path].NEEDED: messages, **fields}


def tools_of(path: str, *functions: dict[str, Any]) -> list[dict[str, Any]]:
    """Tools of these names, descriptions and parameters, in the form of an API."""
    if path == MESSAGES:
        return [{"input_schema" if name == "parameters" else name: x for name, x in f.items()} for f in functions]
    return [{"type": "function", "function": f} if path == CHAT else {"type": "function", **f} for f in functions]
