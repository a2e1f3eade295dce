"""Requests as the server reads them: no server is needed."""

from types import SimpleNamespace
from typing import Any

from mlx_mtp.server.app import APIS
from mlx_mtp.server.command_line import Options, check, make_parser
from mlx_mtp.server.request import Request

ASK = [{"role": "user", "content": "a"}]
CHAT, TEXT, MESSAGES, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")
)
FLAGS = SimpleNamespace(max_tokens=5, num_draft_tokens=None, copy_drafts=None)


def options_of(*flags: str) -> Options:
    """The options of a server with these flags."""
    return check(make_parser().parse_args(flags))


def read(path: str, **body: Any) -> Request:
    """What an API makes of a body."""
    return APIS[path].read_request(body, FLAGS)[1]
