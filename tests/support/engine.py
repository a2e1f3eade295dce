"""The server's engine in this process, without HTTP: what a request reads, and what it is answered."""

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.testclient import TestClient

from mlx_mtp.server.api import completions
from mlx_mtp.server.app import make_app
from mlx_mtp.server.engine.admission import Admission
from mlx_mtp.server.frontend import Frontend
from mlx_mtp.server.request import Delta
from mlx_mtp.server.serve import make_engine

from .requests import options_of
from .scripted_server import choose


@dataclass
class Answered:
    prompt: list[int]
    n_cached: int
    tokens: list[int]
    logprobs: list[float]

    @property
    def n_read(self) -> int:
        return len(self.prompt) - self.n_cached


class Engine(AbstractContextManager):
    """
    Args:
        flags (str): Of ``mlx_mtp server``.
    """

    def __init__(self, *flags: str):
        options = options_of(*flags)
        self.engine = make_engine(options, None)
        self.engine.admission.make_sampler = partial(choose, self.engine.admission, make_sampler=Admission.make_sampler)
        self.frontend = Frontend(options, self.engine)
        try:
            self.engine.loaded.result()
        except BaseException:
            self.engine.stop_and_join()
            raise

    def __exit__(self, *_: Any) -> None:
        self.engine.stop_and_join()

    @property
    def client(self) -> TestClient:
        """A client of the HTTP application."""
        return TestClient(make_app(self.frontend), base_url="http://localhost")

    def ask(self, messages: list[dict[str, Any]], say: str | None = None, **body: Any) -> Answered:
        """Answer a chat; the model says ``say``, where it is given."""
        return self.ask_all([(messages, say)], **body)[0]

    def ask_all(self, chats: list[tuple[list[dict[str, Any]], str | None]], **body: Any) -> list[Answered]:
        """Answer these at once."""

        async def run() -> list[Answered]:
            return await asyncio.gather(*(self.answer(messages, say, **body) for messages, say in chats))

        return asyncio.run(run())

    async def answer(self, messages: list[dict[str, Any]], say: str | None = None, **body: Any) -> Answered:
        content = {"messages": messages, "logprobs": True, **body}
        if say is not None:
            content["chat_template_kwargs"] = {"say": say}
        _, request = completions.ChatBody.read_request(content, self.frontend.options)
        steps = [item async for _, item in self.frontend.generate([request]) if isinstance(item, Delta)]
        tokens, logprobs = [s.token for s in steps], [s.logprobs[0][1] for s in steps if s.logprobs]
        return Answered(request.encoded.tokens, request.n_cached, tokens, logprobs)
