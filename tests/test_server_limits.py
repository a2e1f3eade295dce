"""Limits on bodies and web pages: a hostile client costs little."""

import json
import threading
from functools import cache
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from mlx_mtp.server import app as application
from mlx_mtp.server.api import completions
from mlx_mtp.server.api.common import MAX_BIASES
from mlx_mtp.server.app import APIS, make_app, parse_json
from mlx_mtp.server.command_line import check, make_parser
from mlx_mtp.server.request import ApiError, Metrics
from tests.support.models import TRAINED
from tests.support.server_process import serve_here

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"prompt": "import os\n", "max_tokens": 2}
PART = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"  # of a request
ASK = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve_here(tmp_path_factory.mktemp("server") / "log", "--model", TRAINED, "--mtp") as s:
        yield s
        assert s.request(TEXT, GOOD)[0] == 200
        assert "Traceback" not in s.log.read_text()


@cache
def client(origins=None, hosts=()):
    options = check(make_parser().parse_args([]))
    options.allowed_origins, options.allowed_hosts = origins, hosts
    generator = SimpleNamespace(engine=SimpleNamespace(is_alive=True), metrics=Metrics(), options=options)
    return TestClient(make_app(generator), base_url="http://localhost")


# Bodies


def test_a_long_text_is_read():
    for body in ({"prompt": "a" * 2_000_000}, {"prompt": [*range(262_144)]}):
        assert parse_json(json.dumps({**body, "user": None}).encode()) == body


def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(application, "from_json", None)
    for element in ("1", "[]", "{}", '{"a": [1, 2]}'):
        with pytest.raises(ApiError, match=r"^The body has more than ") as e:
            parse_json(f'{{"prompt": [{",".join([element] * 300_002)}]}}'.encode())
        assert e.value.status == 413


def test_a_number_beyond_floats_is_refused_wherever_it_stands():
    for number in ("1e999", "-1e999", '[{"a": [1e999]}]', "1" * 400 + ".0"):
        with pytest.raises(ApiError) as e:
            parse_json(f'{{"tools": {number}}}'.encode())
        assert (e.value.status, e.value.param) == (400, "tools")


BAD = [1] * 50_000
KEYS = {f"x{i}": "y" for i in range(50_000)}


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (CHAT, dict(messages=BAD)),
        (CHAT, dict(messages=[{"role": "user", "content": BAD}])),
        (CHAT, dict(messages=[{"role": "user", "tool_calls": BAD}])),
        (CHAT, dict(messages=ASK, tools=BAD)),
        (CHAT, dict(messages=ASK, stop=BAD)),
        (CHAT, dict(messages=ASK, role_mapping=KEYS)),
        (CHAT, dict(messages=ASK, chat_template_kwargs=KEYS)),
        (TEXT, dict(prompt="a", logit_bias=KEYS)),
        ("/v1/messages", dict(max_tokens=1, messages=BAD)),
        ("/v1/messages", dict(max_tokens=1, messages=[{"role": "user", "content": BAD}])),
        ("/v1/messages", dict(max_tokens=1, messages=ASK, system=BAD, tools=BAD, stop_sequences=BAD)),
        ("/v1/responses", dict(input=BAD)),
        ("/v1/responses", dict(input=[{"role": "user", "content": BAD}], tools=BAD, include=BAD)),
    ],
    ids=lambda x: str(x)[:60],
)
def test_few_errors_are_made_of_many(path, content):
    """pydantic makes one for each element unless it is told to stop."""
    with pytest.raises(ApiError) as e:
        APIS[path].read_request(content, make_parser().parse_args([]))
    assert e.value.status == 400
    assert isinstance(e.value.__cause__, ValidationError)
    assert e.value.__cause__.error_count() < 20


def test_logit_bias_is_bounded():
    flags, biases = make_parser().parse_args([]), {str(i): 1 for i in range(MAX_BIASES)}
    _, request = completions.ChatBody.read_request({"messages": ASK, "logit_bias": biases}, flags)
    assert len(request.args.logits.logit_bias) == MAX_BIASES
    with pytest.raises(ApiError, match=r"^logit_bias: .*10,001 entries, and 10,000 are allowed") as e:
        completions.ChatBody.read_request({"messages": ASK, "logit_bias": {**biases, "a": 1}}, flags)
    assert e.value.param == "logit_bias"


def test_a_large_body_is_parsed_beside_the_event_loop(monkeypatch):
    threads = {}

    def note(raw):
        threads[len(raw) > application.LARGE_BODY] = threading.current_thread()
        raise ApiError(400, "Noted.")

    async def loop(scope, receive, send):
        threads["loop"] = threading.current_thread()
        await app(scope, receive, send)

    monkeypatch.setattr(application, "parse_json", note)
    app = client().app
    with TestClient(loop, base_url="http://localhost") as c:
        c.post(TEXT, content=b"1")
        small = threads.pop("loop")
        c.post(TEXT, content=b" " * (application.LARGE_BODY + 1))
    assert threads[False] is small
    assert threads[True] is not threads["loop"]


def test_a_body_that_never_ends_is_answered(server, monkeypatch):
    monkeypatch.setattr(application, "BODY_TIMEOUT", 0.05)
    answer = server.talk(PART.replace(b"Host", b"Connection: close\r\nHost"), is_complete=True)
    assert answer.startswith(b"HTTP/1.1 408 ")


# Web pages


def test_a_page_whose_name_is_given_this_address_is_refused():
    own = "localhost", "LOCALHOST:8080", "localhost.", "127.0.0.1:8080", "[::1]:8080", "192.168.1.7", "box"
    for host in own:
        assert client(hosts=("Box",)).get("/health", headers={"host": host}).status_code == 200, host
    others = "example.com", "localhost.example.com", "127.0.0.1.example.com:8080", "", "[::1", "box", "a@b"
    for host in others:
        answer = client().get("/health", headers={"host": host})
        assert answer.status_code == 403, host
        assert "--allowed-hosts" in answer.json()["error"]["message"]
        assert client(hosts=("*",)).get("/health", headers={"host": host}).status_code == 200, host
    for method, path in (("get", "/"), ("post", CHAT), ("options", CHAT)):
        assert getattr(client(), method)(path, headers={"host": "example.com"}).status_code == 403, (method, path)
    assert client().post("/v1/messages", headers={"host": "a"}).json()["type"] == "error"  # in the form of the API


@pytest.mark.parametrize(
    ("origins", "origin", "is_allowed"),
    [
        (None, "http://localhost:3000", True),
        (None, "http://127.0.0.1", True),
        (None, "https://[::1]:5173", True),
        (None, "http://box:8080", True),
        (None, "http://box:9090", False),
        (None, "https://example.com", False),
        (None, "http://localhost.example.com", False),
        (None, "http://localhost:3000.example.com", False),
        (None, "null", False),
        (("https://example.com",), "https://example.com", True),
        (("https://example.com",), "http://box:8080", True),
        (("https://example.com",), "http://localhost:3000", False),
        (("",), "http://localhost:3000", False),
        (("*",), "https://example.com", True),
    ],
)
def test_origins_of_pages(origins, origin, is_allowed):
    c, headers = client(origins, ("box",)), {"host": "box:8080", "origin": origin}
    asks = {**headers, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight, answer = c.options(CHAT, headers=asks), c.get("/health", headers=headers)
    if not is_allowed:  # also what a browser would send without asking first
        assert (preflight.status_code, answer.status_code) == (403, 403)
        assert f"--allowed-origins {origin}" in answer.json()["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers
        return
    assert answer.status_code == 200
    if origin != "http://box:8080":  # a browser asks nothing of a page's own server
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] in (origin, "*")
        assert answer.headers["access-control-allow-origin"] in (origin, "*")


def test_flags_of_pages():
    for flags, origins, hosts in (
        ([], None, []),
        (["--allowed-origins", "*"], ["*"], []),
        (["--allowed-origins", "https://a.com, https://b.com"], ["https://a.com", "https://b.com"], []),
        (["--allowed-hosts", "box,box.local"], None, ["box", "box.local"]),
    ):
        args = make_parser().parse_args(flags)
        assert (args.allowed_origins, args.allowed_hosts) == (origins, hosts), flags
