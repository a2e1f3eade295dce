"""Invalid input: each is answered in OpenAI's error format, and a valid request after all of it as one before. Limits."""

import gzip
import http.client
import json
import re
import threading
import zlib
from contextlib import closing
from functools import cache, partial
from itertools import product
from unittest.mock import Mock

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from mlx_mtp.server import app as application
from mlx_mtp.server import serve as command
from mlx_mtp.server.api.common import MAX_BIASES, ThinkingSettings
from mlx_mtp.server.app import APIS, MAX_BODY, decoded, parse_json, zstd
from mlx_mtp.server.engine.encode import BoundedTokenizer
from mlx_mtp.server.request import ApiError
from tests.support.models import TRAINED
from tests.support.requests import CHAT, FLAGS, MESSAGES, RESPONSES, TEXT, client_of, read
from tests.support.server_process import serve, serve_here

GOOD = {"prompt": "import os\n", "max_tokens": 2}
ASK = {"messages": [{"role": "user", "content": "import os\n"}], "max_tokens": 2}
USER = {"role": "user", "content": "a"}
RESULT = {"type": "function_call_output", "call_id": "1"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve_here(tmp_path_factory.mktemp("server") / "log", "--model", TRAINED, "--mtp", "--max-tokens", "16") as s:
        s.good = s.request(TEXT, GOOD)[1]["choices"][0]["text"]
        yield s
        status, content = s.request(TEXT, GOOD)
        assert (status, content["choices"][0]["text"]) == (200, s.good)
        assert "Traceback" not in s.log.read_text()


def assert_error(answer, expected, param=None, of=None, path=TEXT):
    """The answer is an error of this status, in the format of its API, which names the parameter.

    Args:
        of (Any): What it answers, for the message of a failure.
    """
    status, content = answer
    assert status == expected, (of, content)
    error = content["error"]
    if path == MESSAGES:
        assert (content["type"], error["type"]) == ("error", "invalid_request_error"), of
        assert re.search(rf"\b{param}\b", error["message"]), of
    else:
        assert (content.keys(), error.keys()) == ({"error"}, {"message", "type", "param", "code"}), of
        assert error["message"], of
        assert param in (None, error["param"]), of


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


def calls(tool_calls) -> list[dict]:
    return [{"role": "assistant", "content": "a", "tool_calls": tool_calls}]


def schema(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "a", **schema}}


NOT_OF_CLIENTS = "namespace range raise_exception strftime_now padding max_length return_tensors tokenize tools "
NOT_OF_CLIENTS += "documents messages self"
UNSUPPORTED = (
    "allowed_token_ids prompt_logprobs bad_words echo suffix best_of modalities audio web_search_options structured_outputs "
    "guided_choice grammar continue_final_message tool_choice enable_thinking reasoning_effort functions function_call "
    "top_logprobs"
)
INVALID = {
    TEXT: dict(
        prompt=[None, "", 5, [], [""], [[]], ["a", 1], [["a"]], [-1], [10**6], [[1], "a"], ["a"] * 129, {}]
        + [[[1, 2], [3, 10**6]]], model=[5, ["a"]],
        stream=["yes"], stream_options=[True], max_tokens=[0, -5, 1.5, True, "many", 8192, 10**9, 10**12],  # 8192: the context
        max_completion_tokens=[[1]], n=[0, 9], temperature=[-0.1, "hot", 9],
        top_n_sigma=[-2, "a"], top_p=[1.1, -1], top_k=[-2, 10**6, 2.5], min_p=[2],
        repetition_penalty=[-1], repetition_context_size=[-1], presence_penalty=["x"], frequency_penalty=[{}],
        xtc_probability=[7], xtc_threshold=[-1, 0.6], logit_bias=[[1], {"a": 1}, {"-1": 1}, {"99999999": 1}, {"1": "x"}],
        logprobs=["yes", True, 21], seed=["a", -(2**63) - 1, 2**70], stop=[5, [5], ["a"] * 1000], adapters=["/etc"],
        draft_model=["/etc/passwd", "org/name"], min_tokens=[-1, "a", 2**32], ignore_eos=[1],
        stop_token_ids=[5, [-1], ["a"], [1] * 65], n_predict=[0, -2, "a"], json_schema=["a", {"type": "person"}],
        response_format=[{"type": "xml"}, schema({}), schema({"schema": {"type": "person"}})]
        + [{"type": "json_object", "schema": "a"}],
        guided_regex=["(a"], guided_grammar=["start: other"], guided_json=["a"], num_draft_tokens=[99, "some"],
        thinking=[False], reasoning=[{"effort": "none"}], think=[False], reasoning_budget=[0],  # a text has no switches
        **dict.fromkeys(UNSUPPORTED.split(), ("x", {"a": 1}, 2)),
    ),
    CHAT: dict(
        messages=[None, [], "hello", {}, [5], [{}], [{"role": 5, "content": "a"}], calls("f"), calls([{"function": 5}])]
        + [user(5), user([{"type": "text"}]), user([{"type": "text", "text": 5}])]
        + [user([{"type": "image_url", "image_url": {"url": f"{url}/x"}}])
           for url in ("file://", "http://127.0.0.1:1", "data:image/png;base64,")],
        tools=["f", [5], [{}], [{"function": "f"}]], role_mapping=[[1], {"user": "a" * 10_000}],
        chat_template_kwargs=["x", {"a": [1]}, {"a": "a" * 10_000}, {"a": 10**100}, {"a b": 1}]
        + [{f"a{i}": i for i in range(100)}, {"chat_template": "{% for i in range(99999) %}{% endfor %}"}]
        + [{name: 1} for name in NOT_OF_CLIENTS.split()],
    ),
    MESSAGES: dict(
        messages=[[], [{"role": "robot", "content": "a"}]]
        + [user([{"type": "image", "source": source}]) for source in ({}, {"type": "file", "file_id": "1"})], max_tokens=[0],
        temperature=[-1, 9], tool_choice=[{"type": "any"}], output_config=[{"format": {"type": "json_schema"}}],
        output_format=[{"type": "json_schema", "schema": {"type": "person"}}], mcp_servers=[[{"url": "x"}]],
        structured_outputs=[{"choice": ["a"]}], thinking=[{"type": "deep"}], n=[2],
    ),
    RESPONSES: {
        "input": [[], user([{"type": "input_image", "image_url": "x"}]), [{"type": "item_reference"}]],
        "tool_choice": ["required", {"type": "function", "name": "rm"}], "guided_choice": [["a"]], "top_logprobs": [21],
        "text.format": [{"format": {"type": "json_schema"}}], "response_format": [{"type": "json_object"}],
        "previous_response_id": [True, ["x"]], "background": [True], "modalities": [["audio"]], "conversation": ["x"],
    },
}  # fmt: skip
# It changes nothing.
NOTHING = dict(functions=[], reasoning_effort=None, response_format={"type": "text"}, tool_choice="auto")
VALID = {TEXT: GOOD, CHAT: ASK | NOTHING, MESSAGES: ASK, RESPONSES: {"input": "a"}}


@pytest.mark.parametrize("path", INVALID)
def test_rejects_invalid_fields(server, path):
    for field, value in ((field, value) for field, values in INVALID[path].items() for value in values):
        body = {**VALID[path], field.partition(".")[0]: value}
        assert_error(server.request(path, body), 400, field, of=(field, str(value)[:100]), path=path)
    server.until_idle()  # also of other prompts of the request


# Of other servers: values that change nothing, and one that would change the answer
OTHERS = dict(
    chat_template=[None, "{{ x }}"], documents=[[], [{"text": "a"}]], use_beam_search=[False, True], length_penalty=[1.0, 0.5],
    truncate_prompt_tokens=[None, 5], include_stop_str_in_output=[False, True], skip_special_tokens=[True, False],
    return_token_ids=[False, True], mirostat=[0, 2], typical_p=[1, 0.5], dynatemp_range=[0, 0.0, 0.5], lora=[[], [{"id": 0}]],
    dry_multiplier=[0.0, 0.8], samplers=[[], ["top_k"]], t_max_predict_ms=[0, -1, 500], repeat_penalty=[1, 1.1],
    stream_options=[{}, {"include_usage": False}, {"include_usage": True}],
)  # fmt: skip


@pytest.mark.parametrize("path", VALID)
def test_fields_of_other_servers_are_refused_if_they_would_change_the_answer(path):
    for name, (*harmless, wrong) in OTHERS.items():
        for value in harmless:
            application.APIS[path].read_request(parse_json(json.dumps({**VALID[path], name: value}).encode()), FLAGS)
        with pytest.raises(ApiError, match=rf"^{name}\b") as e:
            read(path, **{**VALID[path], name: wrong})
        assert (e.value.status, e.value.param) == (400, name)


def test_the_prompt_of_an_answer_is_either_generated_or_continued():
    messages = [USER, {"role": "assistant", "content": "The answer is"}]
    for goes_on in (True, False):
        fields = {"messages": messages, "continue_final_message": goes_on}
        assert read(CHAT, **fields, add_generation_prompt=not goes_on).begun == "content"
        with pytest.raises(ApiError, match=r"^add_generation_prompt must be the opposite") as e:
            read(CHAT, **fields, add_generation_prompt=goes_on)
        assert (e.value.status, e.value.param) == (400, "add_generation_prompt")


def test_the_reason_of_a_field_of_several_types():
    """That of the type that was sent."""
    for path, body, reason in (
        (TEXT, dict(prompt=""), "prompt: String should have at least 1 character"),
        (TEXT, dict(prompt=["a"] * 129), "prompt: Value should have at most 128 items"),
        (TEXT, dict(prompt=["a", ""]), "prompt[1]: String should have at least 1 character"),
        (RESPONSES, dict(input=[]), "input: List should have at least 1 item"),
        (CHAT, dict(messages=user([{"type": "text", "text": 5}])), "messages[0].content[0].text: Input should be a"),
        *(
            (
                RESPONSES,
                dict(input=[{**RESULT, name: [{"type": "text"}]}]),
                f"input[0].{name}[0].text: Input should be a",
            )
            for name in ("output", "content", "result")
        ),
        (
            MESSAGES,
            dict(messages=user([{"type": "tool_result", "content": [{"type": "text"}]}])),
            "messages[0].content[0].content[0].text: ",
        ),
        (MESSAGES, dict(messages=[USER], system=[{"type": "text", "text": "a"}, {"type": "text"}]), "system[1].text: "),
        (CHAT, dict(num_draft_tokens=99), "num_draft_tokens: Input should be less than or equal to 8"),
        # Or all that may be sent.
        (CHAT, dict(num_draft_tokens=8.5), "num_draft_tokens: Input should be 'auto' or a valid integer"),
        (TEXT, dict(prompt=[1.5]), "prompt[0]: Input should be a valid integer or a valid string or a valid list"),
    ):
        with pytest.raises(ApiError) as e:
            read(path, **{**VALID[path], **body})
        assert e.value.message.startswith(reason)


INTEGERS = [  # the classes of bodies and of their parts, and the fields that may be an integer
    (part, name)
    for part in (ThinkingSettings, *APIS.values())
    for name, schema in part.model_json_schema()["properties"].items()
    if "integer" in (form.get("type") for form in (schema, *schema.get("anyOf", [])))
]


def test_a_whole_float_is_an_integer():
    """As JavaScript, Lua and R write it. Other numbers, texts and booleans are none."""
    for part, name in INTEGERS:
        assign = partial(part.__pydantic_validator__.validate_assignment, part.model_construct(), name)
        assert type(getattr(assign(2.0), name)) is int, name
        for wrong in (2.5, "2", True):
            with pytest.raises(ValidationError):
                assign(wrong)
    assert len(INTEGERS) > 60
    assert read(TEXT, prompt=[1.0, 2]).prompt == [1, 2]
    assert read(CHAT, messages=[USER], stop_token_ids=[3.0]).stop_token_ids == [3]


def test_a_message_of_the_user_is_not_continued():
    """A client may ask for what the server does, and no more."""
    assistant = {"role": "assistant", "content": "The answer is"}
    assert read(CHAT, messages=[USER, assistant], continue_final_message=True).begun == "content"
    for messages in ([USER], [USER, {**assistant, "content": ""}]):
        with pytest.raises(ApiError, match="continue_final_message requires") as e:
            read(CHAT, messages=messages, continue_final_message=True)
        assert e.value.param == "continue_final_message"


def test_a_prompt_beyond_the_context_is_counted(server):
    """The count is that of the error, and of the tokenizer."""
    for n in (3_000, 10_000, 50_000):
        messages = user("import os\n" * n)
        status, counted = server.request(f"{MESSAGES}/count_tokens", {"messages": messages})
        assert status == 200, counted
        _, error = server.request(MESSAGES, {"messages": messages, "max_tokens": 1})
        assert f"prompt is too long: {counted['input_tokens']} tokens > 8192 maximum" in error["error"]["message"]
        assert counted["input_tokens"] == pytest.approx(3 * n, rel=0.01)
        _, same = server.request(f"{RESPONSES}/input_tokens", {"input": messages})
        assert same["input_tokens"] == counted["input_tokens"]


def test_tokenizes_little_of_a_long_prompt(demo):
    _, tokenizer = demo
    counting = Mock(wraps=tokenizer)
    with pytest.raises(ApiError):
        BoundedTokenizer(counting, 4096, 1000).encode("import os\n" * 1_500_000)
    assert 0 < sum(len(call.args[0]) for call in counting.encode.call_args_list) < 100_000
    # A text that fits is not refused, however few tokens it has.
    text = max(map(tokenizer.decode, range(4096)), key=len) * 10_000
    tokens = tokenizer.encode(text)
    assert len(text) > 5 * len(tokens)
    assert BoundedTokenizer(tokenizer, 4096, len(tokens)).encode(text) == tokens


def test_failed_generation_affects_no_other(tmp_path):
    """Two failures of the GPU in a row, after which no pass of a token works, end the process, with status 1 and one line."""
    flags = "--model", TRAINED, "--mtp", "--max-tokens", str(10**6)
    with serve(tmp_path / "log", *flags, module="tests.support.scripted_server") as s:
        for temperature, status in ((1.25, 500), (1, 200), (1.0625, 500), (0, 200)):
            assert s.request(TEXT, {**GOOD, "temperature": temperature})[0] == status
        # The server's own limit on tokens ends with the context; the request did not ask for it.
        assert s.request(TEXT, {"prompt": "import os\n", "stop": "\n"})[0] == 200
        assert_error(s.request(TEXT, {"prompt": "import os\n" * 20000}), 400, "prompt")
        for temperature, status in ((1.0625, 500), (1.0625, 500), (1.0625, 500), (1.03125, 500)):
            failed, error = s.request(TEXT, {**GOOD, "temperature": temperature})
            assert failed == status
            assert "a smaller --prefill-step-size, or a smaller --max-memory" in error["error"]["message"]
        assert s.statuses() == [1]
        assert s.log.read_text().splitlines()[-1].startswith("mlx_mtp server: error: [METAL] ")


NO_JSON = [  # and a number beyond floats, wherever it stands
    b"", b"{", b"null", b"[]", b'"text"', b"5", b'{"prompt": "a", }', b"\x00\x01\x02", b"[" * 100_000, b'{"a":' * 100_000,
    *(b'{"prompt": "a", "temperature": %s}' % number for number in (b"NaN", b"Infinity", b"1e999", b"9" * 10_000)),
    b'{"prompt": "\xff\xfe"}', b'{"prompt": "\0\\ud800"}',
    *(b'{"prompt": "a", "tools": %s}' % n for n in (b"-1e999", b'[{"a": [1e999]}]', b"1" * 400 + b".0")),
]  # fmt: skip


def test_rejects_invalid_json_and_large_bodies(server):
    for raw in NO_JSON:
        assert_error(server.request(TEXT, raw, method="POST"), 400, "tools" if b"tools" in raw else None, of=raw[:50])
    assert_error(server.request(TEXT, b" " * (MAX_BODY + 1)), 413)


# Compressed bodies


CODINGS = {
    "gzip": gzip.compress, "X-Gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress,
    "identity, deflate": partial(zlib.compress, wbits=-zlib.MAX_WBITS),  # without the header of zlib
}  # fmt: skip


def assert_refused(status, message, raw, encoding):
    with pytest.raises(ApiError, match=message) as error:
        decoded(raw, encoding)
    assert error.value.status == status


@pytest.mark.parametrize("encoding", CODINGS)
def test_a_compressed_body_is_decoded_up_to_the_limit(monkeypatch, encoding):
    encode, long = CODINGS[encoding], json.dumps(GOOD).encode() * 20_000
    sent = encode(long)
    assert decoded(sent, encoding) == long
    assert decoded(b"", encoding) == b""
    for damaged in (sent[:-1], b"{}", sent + b"{}"):
        assert_refused(400, "not valid", damaged, encoding)
    monkeypatch.setattr(application, "MAX_BODY", len(long))
    assert decoded(sent, encoding) == long
    monkeypatch.setattr(application, "MAX_BODY", len(long) - 1)
    bomb = encode(bytes(1 << 22))
    assert len(application.CODINGS[re.sub(".* |x-", "", encoding.lower())](bomb)) == len(long)  # and no more of it
    for too_large in (sent, bomb):
        assert_refused(413, "larger than", too_large, encoding)
    if "deflate" not in encoding.lower():  # a body has one stream of it
        assert decoded(encode(b"") * 999 + encode(b"{}"), encoding) == b"{}"
        assert_refused(413, "more than 1,000 streams", encode(b"") * 1001, encoding)  # each of nothing


def test_other_encodings_are_refused_by_their_names():
    for encoding, raw in (("br", b"\x0b\x02\x80{}\x03"), ("gzip, gzip", b""), ("compress", b"a"), ("aws-chunked", b"")):
        answer = client().post(CHAT, content=raw, headers={"Content-Encoding": encoding})
        assert (answer.status_code, answer.headers["Accept-Encoding"]) == (415, "gzip, deflate, zstd")
        assert f"Content-Encoding: {encoding} is not supported" in answer.json()["error"]["message"]
    encoder = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})  # of a window of 128 MiB
    assert_refused(400, r"not valid zstd: .*too much memory", encoder.compress(b"{}" * 100) + encoder.flush(), "zstd")


HALVES = ["\\ud83d", "\\udc00", "\\uD83D\\uD83D", "\\udc00\\ud83d", "\\ud83d\\n\\ude00", "x\\ud83d\\ud83d\\ude00y"]


@pytest.mark.parametrize("half", HALVES)
def test_half_a_character_is_replaced_in_every_string(half):
    """A client that cuts a text may cut an emoji, and sends it again with each turn. Whole ones, and text like them, stay."""
    want = json.loads(f'"{half}"').encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert "\ufffd" in want
    message = f'{{"content": "\\\\ud83d \\ud83d\\ude00 \\\\{half}", "{half}x": "{half}"}}'
    raw = f'{{"{half}": 1, "stop": ["{half}"], "messages": [{message}]}}'
    content = {"content": f"\\ud83d \U0001f600 \\{want}", f"{want}x": want}
    assert parse_json(raw.encode()) == {want: 1, "stop": [want], "messages": [content]}
    in_utf_8 = b'{"a": "\xed\xa0\xbd \xed\xb8\x80 \xf0\x9f\x98\x80"}'
    assert parse_json(in_utf_8) == {"a": "\ufffd \ufffd \U0001f600"}


HOST, POST = b" HTTP/1.1\r\nHost: localhost\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def test_rejects_invalid_requests(server):
    for raw, status in (
        (POST + b"\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400),
        (b"POST /nowhere" + HOST + b"Content-Length: 2\r\n\r\n{}", 404),
        (b"GET /nowhere?/health" + HOST + b"\r\n", 404),
        (b"GET /v1/models/../../etc/passwd" + HOST + b"\r\n", 404),
        (b"GET /v1/completions" + HOST + b"\r\n", 405),
        (b"BREW /v1/models" + HOST + b"\r\n", 405),
    ):
        head, _, body = server.talk(raw).partition(b"\r\n\r\n")
        assert head.split()[1] == str(status).encode(), raw
        assert_error((status, json.loads(body)), status)


def test_slashes_too_many_change_no_path():
    """A base URL may end with one, or a path begin with two. Nothing is redirected: behind a proxy, to an address of http."""
    for path in ("/metrics/", "//metrics", "///metrics//"):
        answer = client().get(f"http://localhost{path}", follow_redirects=False)
        assert (answer.status_code, "mlx_mtp_requests_total" in answer.text) == (200, True), path
    assert client().post(f"http://localhost/{TEXT}/", json={"prompt": 5}).json()["error"]["param"] == "prompt"
    assert client().post(f"{MESSAGES}/", json={}).json()["type"] == "error"
    assert client().get("http://localhost//").headers["content-type"].startswith("text/html")
    answer = client().get("/v1/v1/models")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "There is no /v1/v1/models here.")
    keyed = client_of(None, "--api-key", "a")
    assert [keyed.get(f"http://localhost{x}").status_code for x in ("/health/", "//health", "//metrics")] == [
        200,
        200,
        401,
    ]


def test_heads_query_strings_and_compressed_bodies(server):
    for path in ("/health", "/v1/models", "/metrics", "/nowhere"):
        answer = server.talk(b"HEAD %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path.encode())
        head, _, body = answer.partition(b"\r\n\r\n")
        assert (int(head.split()[1]), body) == (server.request(path)[0], b"")
    assert server.request("/health?verbose")[0] == server.request("/v1/models?limit=20")[0] == 200
    compressed = gzip.compress(json.dumps(GOOD).encode())
    for path, body, headers in ((f"{TEXT}?api-version=1", GOOD, {}), (TEXT, compressed, {"Content-Encoding": "gzip"})):
        assert server.request(path, body, headers)[1]["choices"][0]["text"] == server.good


def test_bytes_that_resemble_http_are_refused_or_end_the_connection(server):
    long, get = b"a" * 70_000, b"GET / HTTP/1.1\r\n"
    lengths = (POST + b"Content-Length: %s\r\n\r\n{}" % n for n in (b"-1", b"0x2", b"", b"2, 3", b"9" * 5000, b"3"))
    for raw in (
        b"\r\n", b"\xff" * 100, long, b"GET", POST[:-20], b"\xff / HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        b"GET /%s" % long + HOST + b"\r\n", b"GET /\xff" + HOST + b"\r\n", b"CONNECT /" + HOST + b"\r\n",
        get + b"no colon\r\n\r\n", get + b"A: \0\r\n\r\n", get + b"A: %s\r\n\r\n" % long, *lengths,
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}", POST + b"Upgrade: websocket\r\nContent-Length: 2\r\n\r\n{}",
    ):  # fmt: skip
        assert re.match(rb"HTTP/1\.1 4\d\d |$", server.talk(raw)), raw[:100]


# Limits: a hostile client costs little


@cache
def client(origins="", hosts=""):
    flags = [f"--allowed-origins={origins}"] * bool(origins) + [f"--allowed-hosts={hosts}"] * bool(hosts)
    return client_of(None, *flags)


def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(monkeypatch):
    for body in ({"prompt": "a" * 2_000_000}, {"prompt": [*range(262_144)]}):
        assert parse_json(json.dumps({**body, "user": None}).encode()) == body
    monkeypatch.setattr(application, "from_json", None)
    for element in ("1", "[]", "{}", '{"a": [1, 2]}'):
        with pytest.raises(ApiError, match=r"^The body has more than ") as e:
            parse_json(f'{{"prompt": [{",".join([element] * 300_002)}]}}'.encode())
        assert e.value.status == 413


def test_a_body_with_too_many_messages_and_parts_is_refused_before_they_are_validated():
    for body in (
        dict(messages=[USER] * 10_002),
        dict(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 2_500}] * 4),
        dict(messages=[{"role": "user", "content": [{"type": "tool_result", "content": [{}] * 9_999}]}]),
        dict(input=[{}] * 5_000, tools=[{"type": "namespace", "tools": [{}] * 5_000}]),
    ):
        with pytest.raises(ApiError, match=r"^The body has more than 10,000 messages, tools and parts") as e:
            parse_json(json.dumps(body).encode())
        assert e.value.status == 413
        fewer = {name: parts[: len(parts) // 2] for name, parts in body.items()}
        fewer = json.dumps(fewer).replace(", {}", "", 5_000).encode()
        assert parse_json(fewer) == json.loads(fewer)


def test_few_errors_are_made_of_many():
    """pydantic makes one for each element unless it is told to stop."""
    bad, keys, counts = [1] * 50_000, {f"x{i}": "y" for i in range(50_000)}, []
    names = ["messages", "input", "stop", "stop_sequences", "tools", "include", "system", "logit_bias"]
    for path, name, value in product(VALID, [*names, "chat_template_kwargs"], (bad, keys, user(bad))):
        try:
            read(path, **VALID[path] | {name: value})
        except ApiError as e:
            counts += [e.__cause__.error_count()] if isinstance(e.__cause__, ValidationError) else []
    assert len(counts) > 40
    assert max(counts) < 20


def test_logit_bias_is_bounded():
    biases = {str(i): 1 for i in range(MAX_BIASES)}
    assert len(read(CHAT, messages=[USER], logit_bias=biases).args.logits.logit_bias) == MAX_BIASES
    with pytest.raises(ApiError, match=r"^logit_bias: .*10,001 entries, and 10,000 are allowed") as e:
        read(CHAT, messages=[USER], logit_bias={**biases, "a": 1})
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
    answer = server.talk(POST + b"Connection: close\r\nContent-Length: 9\r\n\r\n{", is_complete=True)
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_connection_whose_header_is_never_complete_is_closed(server, monkeypatch):
    """One that has no bytes, one that has some, and one whose second request has some. An idle one stays."""
    idle, begun = (http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(2))

    def is_answered(connection):
        connection.request("GET", "/health")
        return b"ok" in connection.getresponse().read()

    with closing(idle), closing(begun):
        assert (is_answered(idle), is_answered(begun)) == (True, True)
        monkeypatch.setattr(command, "HEADER", 0.2)
        assert is_answered(idle)
        begun.sock.sendall(b"GET / HTTP/1.1\r\nHo")
        assert begun.sock.recv(1) == b""
        assert [server.talk(sent, is_complete=True) for sent in (b"", b"GET / HTTP/1.1\r\nHo")] == [b"", b""]
        assert is_answered(idle)


# Web pages


def test_a_page_whose_name_is_given_this_address_is_refused():
    for host in ("localhost", "LOCALHOST:8080", "localhost.", "127.0.0.1:8080", "[::1]:8080", "192.168.1.7", "box"):
        assert client(hosts="Box").get("/health", headers={"host": host}).status_code == 200, host
    others = (
        "example.com localhost.example.com 127.0.0.1.example.com:8080 [::1 box evil.com:8080@localhost localhost/x "
    )
    others += "localhost:abc evil.com[::1] [::1]x localhost?x localhost#"
    for host in ("", *others.split()):
        answer = client().get("/health", headers={"host": host})
        assert answer.status_code == 403, host
        assert "--allowed-hosts" in answer.json()["error"]["message"]
        assert client(hosts="*").get("/health", headers={"host": host}).status_code == 200, host
    for method, path in (("get", "/"), ("post", CHAT), ("options", CHAT)):
        assert getattr(client(), method)(path, headers={"host": "example.com"}).status_code == 403, (method, path)
    keyed = client_of(None, "--api-key", "a", "--allowed-hosts", "*")
    assert keyed.get("/metrics", headers={"host": "localhost/health?"}).status_code == 401  # a host is no path
    assert client().post("/v1/messages", headers={"host": "a"}).json()["type"] == "error"  # in the form of the API


@pytest.mark.parametrize(
    ("origins", "origin", "is_allowed"),
    [
        *(("", origin, True) for origin in (
            "http://localhost:3000", "http://127.0.0.1", "https://[::1]:5173", "http://box:8080")),
        *(("", origin, False) for origin in (
            "http://box:9090", "https://example.com", "http://localhost.example.com", "http://localhost:3000.example.com",
            "null")),
        ("https://a.com, https://example.com", "https://example.com", True), ("https://a.com", "http://box:8080", True),
        ("https://a.com", "http://localhost:3000", False), (",", "http://localhost:3000", False),
        ("*", "https://example.com", True),
    ],
)  # fmt: skip
def test_origins_of_pages(origins, origin, is_allowed):
    c, headers = client(origins, "other,box"), {"host": "box:8080", "origin": origin}
    both = [("host", "box:8080"), ("origin", "http://box:8080"), ("origin", origin)]
    assert c.get("/health", headers=both).status_code == (200 if is_allowed else 403)
    asks = {**headers, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    asks |= {"access-control-request-private-network": "true"}  # Chrome's, of pages outside the local network
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
        assert preflight.headers["access-control-allow-private-network"] == "true"
        assert answer.headers["access-control-allow-origin"] in (origin, "*")
        assert answer.headers["access-control-expose-headers"] == "x-request-id, request-id, retry-after"
