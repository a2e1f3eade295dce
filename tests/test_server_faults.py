"""Bad input of all kinds: each is answered in OpenAI's error form, and a good request after it as ever."""

import contextlib
import json
import random
import socket
import time

import pytest
from server_process import serve

GOOD = {"prompt": "import os\n", "max_tokens": 4}
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("server") / "log", "--mtp") as s:
        s.good = s.request(TEXT, GOOD)[1]["choices"][0]["text"]
        yield s
        assert "Traceback" not in s.log.read_text()


@pytest.fixture(autouse=True)
def answers_a_good_request_afterwards(server):
    yield
    status, content = server.request(TEXT, GOOD)
    assert (status, content["choices"][0]["text"]) == (200, server.good)


def assert_error(status, content, expected, param=None):
    assert status == expected, content
    assert set(content) == {"error"}
    error = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param


FIELDS = [
    ("model", 5),
    ("model", ["a"]),
    ("stream", "yes"),
    ("stream_options", True),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", "many"),
    ("max_tokens", 10**12),
    ("max_tokens", 10**9),
    ("max_completion_tokens", [1]),
    ("n", 2),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", 1e30),
    ("top_p", 1.1),
    ("top_p", -1),
    ("top_k", -1),
    ("top_k", 10**6),
    ("top_k", 2.5),
    ("min_p", 2),
    ("repetition_penalty", -1),
    ("repetition_context_size", -1),
    ("presence_penalty", "x"),
    ("frequency_penalty", {}),
    ("xtc_probability", 7),
    ("xtc_threshold", -1),
    ("xtc_threshold", 0.6),
    ("logit_bias", [1]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"99999999": 1}),
    ("logit_bias", {"1": "x"}),
    ("logprobs", "yes"),
    ("top_logprobs", 12),
    ("top_logprobs", -3),
    ("seed", "a"),
    ("seed", -1),
    ("seed", 2**70),
    ("stop", 5),
    ("stop", [5]),
    ("stop", ["a"] * 1000),
    ("adapters", "/etc"),
    ("draft_model", "/etc/passwd"),
    ("num_draft_tokens", 99),
    ("num_draft_tokens", "some"),
    ("chat_template_kwargs", "x"),
    ("role_mapping", [1]),
]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda x: str(x)[:30])
def test_a_field_that_is_wrong(server, field, value):
    path, body = (CHAT, {"messages": [{"role": "user", "content": "a"}]}) if "ole" in field else (TEXT, GOOD)
    assert_error(*server.request(path, {**body, field: value}), 400, field)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        {},
        [5],
        [{}],
        [{"role": 5, "content": "a"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}],
        [{"role": "assistant", "content": "a", "tool_calls": "f"}],
        [{"role": "assistant", "content": "a", "tool_calls": [{"function": 5}]}],
    ],
    ids=lambda x: str(x)[:40],
)
def test_messages_that_are_none(server, messages):
    assert_error(*server.request(CHAT, {"messages": messages}), 400, "messages")


@pytest.mark.parametrize("tools", ["f", [5], [{}], [{"function": "f"}]], ids=str)
def test_tools_that_are_none(server, tools):
    assert_error(*server.request(CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": tools}), 400, "tools")


@pytest.mark.parametrize("prompt", [None, "", 5, ["a"], [1, 2, 3], {}], ids=str)
def test_a_prompt_that_is_none(server, prompt):
    assert_error(*server.request(TEXT, {"prompt": prompt}), 400, "prompt")


@pytest.mark.parametrize("model", ["other", "../demo", "/etc/passwd", "org/name", "", "file:///etc/passwd", "x" * 5000])
def test_a_model_that_is_not_served(server, model):
    status, content = server.request(TEXT, {**GOOD, "model": model})
    assert_error(status, content, 404, "model")
    assert content["error"]["code"] == "model_not_found"


def test_more_tokens_than_the_context_has(server):
    status, content = server.request(TEXT, {"prompt": "import os\n" * 20000, "max_tokens": 5})
    assert_error(status, content, 400, "prompt")
    assert content["error"]["code"] == "context_length_exceeded"
    assert_error(*server.request(TEXT, {**GOOD, "max_tokens": 10**6}), 400, "max_tokens")


def test_the_servers_own_limit_ends_with_the_context(tmp_path):
    """It is not what a request asks for."""
    with serve(tmp_path / "log", "--mtp", "--max-tokens", str(10**6)) as s:
        assert s.request(TEXT, {"prompt": "import os\n", "stop": "\n"})[0] == 200
        body = {"prompt": "import os\n" * 20000}
        assert_error(*s.request(TEXT, body), 400, "prompt")


def test_a_generation_that_fails_spoils_no_other(tmp_path):
    with serve(tmp_path / "log", "--mtp", module="failing_server") as s:
        assert_error(*s.request(TEXT, {**GOOD, "temperature": 1.25}), 500)
        for temperature in (1, 0):
            assert s.request(TEXT, {**GOOD, "temperature": temperature})[0] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"5",
        b'{"prompt": "a", }',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 10000 + b"}",
        b'{"prompt": "\xff\xfe"}',
        b"\x00\x01\x02",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda x: str(x[:30]),
)
def test_a_body_that_is_no_json(server, raw):
    assert_error(*server.request(TEXT, raw, method="POST"), 400)


def test_a_body_that_is_too_large(server):
    assert_error(*server.request(TEXT, b" " * (17 << 20)), 413)


def talk(server, raw: bytes, *, then_close=True) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
        s.sendall(raw)
        if then_close:
            s.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := s.recv(65536):
            answer += chunk
        return answer


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\n\r\n", 411),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 411),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1e3\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{}", 400),
        (b"POST /nowhere HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 404),
        (b"GET /nowhere HTTP/1.1\r\n\r\n", 404),
        (b"GET /v1/models/../../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET /v1/completions HTTP/1.1\r\n\r\n", 404),
        (b"DELETE /v1/models HTTP/1.1\r\n\r\n", 501),
        (b"BREW /v1/models HTTP/1.1\r\n\r\n", 501),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"GET / HTTP/x\r\n\r\n", 400),
        (b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 70000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"A: a\r\n" * 200 + b"\r\n", 431),
    ],
    ids=lambda x: str(x)[:50],
)
def test_a_request_that_is_hardly_http(server, raw, status):
    head, _, body = talk(server, raw).partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode()
    assert_error(status, json.loads(body), status)


@pytest.mark.parametrize("raw", [b"", b"\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n", b"GET"], ids=str)
def test_what_is_no_http_at_all(server, raw):
    talk(server, raw)


def stream_request(max_tokens: int) -> bytes:
    body = json.dumps({"prompt": "import os\n", "max_tokens": max_tokens, "stream": True}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def test_clients_that_hang_up_at_any_moment(server):
    rng = random.Random(0)
    raw = stream_request(200)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
            s.sendall(raw[: rng.choice([len(raw), rng.randrange(len(raw))])])
            if rng.random() < 0.7:
                s.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    s.recv(rng.randint(1, 2000))
            if rng.random() < 0.5:  # with a reset
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    server.until_idle()


def test_a_reader_that_is_slow_holds_up_nobody(server):
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        s.settimeout(60)
        s.connect(("127.0.0.1", server.port))
        s.sendall(stream_request(1000))
        time.sleep(0.5)
        assert server.request(TEXT, GOOD)[1]["choices"][0]["text"] == server.good
        answer = b""
        while chunk := s.recv(512):
            answer += chunk
    assert answer.endswith(b"data: [DONE]\n\n")
    assert answer.count(b'"text":') >= 1000 or b'"stop"' in answer
