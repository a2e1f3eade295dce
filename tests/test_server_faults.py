"""Invalid input: each is answered in OpenAI's error format, and a valid request after all of it as one before."""

import contextlib
import json
import random
import socket
from types import SimpleNamespace

import pytest

from mlx_mtp.server.api import chat_completions
from mlx_mtp.server.engine.encode import BoundedTokenizer
from mlx_mtp.server.http.bodies import MAX_BODY, parse_json
from mlx_mtp.server.request import ApiError
from tests.support.hostile_requests import attack
from tests.support.models import TRAINED
from tests.support.profiles import LONG
from tests.support.scripted_server import serve_scripted
from tests.support.server_process import serve_here

GOOD = {"prompt": "import os\n", "max_tokens": 2}
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "import os\n"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve_here(tmp_path_factory.mktemp("server") / "log", "--model", TRAINED, "--mtp", "--max-tokens", "16") as s:
        s.good = s.request(TEXT, GOOD)[1]["choices"][0]["text"]
        yield s
        status, content = s.request(TEXT, GOOD)
        assert (status, content["choices"][0]["text"]) == (200, s.good)
        assert "Traceback" not in s.log.read_text()


def read(body):
    flags = SimpleNamespace(max_tokens=5, has_max_tokens=False, num_draft_tokens=None, copy_drafts=None)
    return chat_completions.read_request(parse_json(json.dumps(body).encode()), flags)


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
    ("n", 0),
    ("n", 9),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", 9),
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
    ("logprobs", True),
    ("logprobs", 21),
    ("top_logprobs", 2),
    ("seed", "a"),
    ("seed", -(2**63) - 1),
    ("seed", 2**70),
    ("stop", 5),
    ("stop", [5]),
    ("stop", ["a"] * 1000),
    ("adapters", "/etc"),
    ("draft_model", "/etc/passwd"),
    ("draft_model", "org/name"),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "person"}}}),
    ("guided_regex", "(a"),
    ("guided_grammar", "start: other"),
    ("guided_json", "a"),
    ("response_format", {"type": "json_object", "schema": "a"}),
    ("echo", True),
    ("suffix", "a"),
    ("best_of", 2),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "alloy"}),
    ("web_search_options", {}),
    ("structured_outputs", {"choice": ["a"]}),
    ("guided_choice", ["a"]),
    ("grammar", "root ::= a"),
    ("continue_final_message", True),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("enable_thinking", False),
    ("reasoning_effort", "low"),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("num_draft_tokens", 99),
    ("num_draft_tokens", "some"),
    ("role_mapping", [1]),
    ("role_mapping", {"user": "a" * 10_000}),
    ("chat_template_kwargs", "x"),
    ("chat_template_kwargs", {"a": [1]}),
    ("chat_template_kwargs", {"a": "a" * 10_000}),
    ("chat_template_kwargs", {"a": 10**100}),
    ("chat_template_kwargs", {"a b": 1}),
    ("chat_template_kwargs", {f"a{i}": i for i in range(100)}),
    ("chat_template_kwargs", {"chat_template": "{% for i in range(99999) %}{% endfor %}"}),
    *[
        ("chat_template_kwargs", {name: 1})
        for name in ("padding", "max_length", "return_tensors", "tokenize", "tools", "documents", "messages", "self")
    ],
]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda x: str(x)[:30])
def test_rejects_invalid_fields(server, field, value):
    path, body = (CHAT, ASK) if field in ("role_mapping", "chat_template_kwargs") else (TEXT, GOOD)
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
def test_rejects_invalid_messages(server, messages):
    assert_error(*server.request(CHAT, {"messages": messages}), 400, "messages")


@pytest.mark.parametrize(
    "changes",
    [
        {"response_format": {"type": "text"}},
        {"tool_choice": "auto"},
        {"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"functions": []},
        {"reasoning_effort": None, "response_format": None},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=str,
)
def test_accepts_fields_that_change_nothing(changes):
    _, request = read({**ASK, **changes})
    assert (request.messages, request.tools) == (ASK["messages"], None)


@pytest.mark.parametrize("kind", ["video_url", "input_audio", "file"])
def test_a_part_that_is_neither_text_nor_image_is_refused_by_name(kind):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]}]
    with pytest.raises(ApiError) as e:
        read({"messages": messages})
    assert (e.value.status, e.value.param) == (400, "messages")
    assert e.value.message == f"messages[0].content: {kind} is not supported: send text or images."


@pytest.mark.parametrize("tools", ["f", [5], [{}], [{"function": "f"}]], ids=str)
def test_rejects_invalid_tools(server, tools):
    assert_error(*server.request(CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": tools}), 400, "tools")


@pytest.mark.parametrize(
    "prompt",
    [None, "", 5, [], [""], [[]], ["a", 1], [["a"]], [-1], [10**6], [[1], "a"], ["a"] * 129, {}],
    ids=lambda x: str(x)[:20],
)
def test_rejects_invalid_prompts(server, prompt):
    assert_error(*server.request(TEXT, {"prompt": prompt}), 400, "prompt")


@pytest.mark.parametrize("model", ["other", "../demo", "/etc/passwd", "org/name", "", "file:///etc/passwd", "x" * 5000])
def test_no_name_of_a_client_is_loaded(server, model):
    """Where one model is served, any name means it."""
    n_loaded = server.log.read_text().count("Prompt caches: up to")
    texts = [server.request(TEXT, {**GOOD, **change})[1]["choices"][0]["text"] for change in ({}, {"model": model})]
    assert texts[0] == texts[1]
    assert server.log.read_text().count("Prompt caches: up to") == n_loaded


@pytest.mark.parametrize("repeat", [20_000, 1_500_000])
def test_rejects_more_tokens_than_the_context(server, repeat):
    text = "import os\n" * repeat
    messages = [{"role": "user", "content": text}]
    for param, request in (("prompt", (TEXT, {"prompt": text})), ("messages", (CHAT, {"messages": messages}))):
        status, content = server.request(*request)
        assert_error(status, content, 400, param)
        assert content["error"]["code"] == "context_length_exceeded"
    assert_error(*server.request(TEXT, {**GOOD, "max_tokens": 10**6}), 400, "max_tokens")


def test_tokenizes_little_of_a_long_prompt(demo):
    _, tokenizer = demo

    class Counting:
        n = 0

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def encode(self, text, **kwargs):
            self.n += len(text)
            return tokenizer.encode(text, **kwargs)

    counting = Counting()
    bounded = BoundedTokenizer(counting, 1000)
    with pytest.raises(ApiError):
        bounded.encode("import os\n" * 1_500_000)
    assert counting.n < 100_000
    # A text that fits is not refused, however few tokens it has.
    text = max(map(tokenizer.decode, range(4096)), key=len) * 10_000
    tokens = tokenizer.encode(text)
    assert len(text) > 5 * len(tokens)
    assert BoundedTokenizer(tokenizer, len(tokens)).encode(text) == tokens


def test_failed_generation_affects_no_other(tmp_path):
    with serve_scripted(tmp_path / "log", "--model", TRAINED, "--mtp", "--max-tokens", str(10**6)) as s:
        assert_error(*s.request(TEXT, {**GOOD, "temperature": 1.25}), 500)
        for temperature in (1, 0):
            assert s.request(TEXT, {**GOOD, "temperature": temperature})[0] == 200
        # The server's own limit on tokens ends with the context; the request did not ask for it.
        assert s.request(TEXT, {"prompt": "import os\n", "stop": "\n"})[0] == 200
        assert_error(*s.request(TEXT, {"prompt": "import os\n" * 20000}), 400, "prompt")


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
        b'{"prompt": "a", "stop": "\\ud800"}',
        b'{"prompt": "a\\udfff"}',
        b'{"prompt": "a", "user": {"\\ud800": 1}}',
        b'{"prompt": "a", "user": [{"b": 1e999}]}',
        b"\x00\x01\x02",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda x: str(x[:30]),
)
def test_rejects_invalid_json(server, raw):
    assert_error(*server.request(TEXT, raw, method="POST"), 400)


def test_rejects_large_bodies(server):
    assert_error(*server.request(TEXT, b" " * (MAX_BODY + 1)), 413)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
            400,
        ),
        (b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}", 404),
        (b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /v1/models/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /nowhere?/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"BREW /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    ],
    ids=lambda x: str(x)[:50],
)
def test_rejects_invalid_requests(server, raw, status):
    head, _, body = server.talk(raw).partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode()
    assert_error(status, json.loads(body), status)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET / HTTP/x\r\n\r\n",
        *[
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %s\r\n\r\n{}" % length
            for length in (b"-5", b"x", b"1e3", b"2, 3", b"9" * 5000)
        ],
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: identity\r\n\r\n{}",
    ],
    ids=lambda x: str(x)[:50],
)
def test_rejects_what_is_not_http(server, raw):
    """By the HTTP library, before anything of ours sees it."""
    head, *_ = server.talk(raw).partition(b"\r\n")
    assert head.split()[1] in (b"400", b"501")


@pytest.mark.parametrize("raw", [b"", b"\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n", b"GET"], ids=str)
def test_survives_bytes_that_are_not_http(server, raw):
    server.talk(raw)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/nowhere"])
def test_head_has_no_body(server, path):
    answer, want = (
        server.talk(b"HEAD %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path.encode()),
        server.request(path)[0],
    )
    head, _, body = answer.partition(b"\r\n\r\n")
    assert (int(head.split()[1]), body) == (want, b"")


def test_ignores_query_strings(server):
    assert server.request("/health?verbose")[0] == server.request("/v1/models?limit=20")[0] == 200
    assert server.request(TEXT + "?api-version=1", GOOD)[1]["choices"][0]["text"] == server.good


def test_attack(server):
    assert attack(server, 3000 if LONG else 60) == []


def stream_request(max_tokens: int) -> bytes:
    body = json.dumps({"prompt": "import os\n", "max_tokens": max_tokens, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def test_survives_clients_that_hang_up(server):
    rng = random.Random(0)
    raw = stream_request(200)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
            s.sendall(raw[: rng.choice([len(raw), rng.randrange(len(raw))])])
            if rng.random() < 0.7:
                s.settimeout(0.1)
                with contextlib.suppress(TimeoutError):
                    s.recv(rng.randint(1, 2000))
            if rng.random() < 0.5:  # with a reset
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    server.until_idle()


def test_slow_reader_delays_nobody(server):
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        s.settimeout(60)
        s.connect(("127.0.0.1", server.port))
        s.sendall(stream_request(100))
        assert server.request(TEXT, GOOD)[1]["choices"][0]["text"] == server.good
        answer = b""
        while chunk := s.recv(512):
            answer += chunk
    assert b"data: [DONE]\n\n" in answer
    assert answer.count(b'"text":') >= 100 or b'"stop"' in answer
