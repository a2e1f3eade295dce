"""The server as its clients see it, against plain mlx-lm on the same prompts."""

import json
import logging
import os
import re
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import openai
import pytest
from mlx_lm import server as stock
from mlx_lm.server import convert_chat
from openai import OpenAI

from mlx_mtp.checkpoint import DEMO, hub
from mlx_mtp.errors import MTPError
from mlx_mtp.memory import Account
from mlx_mtp.server import serve as command
from mlx_mtp.server.command_line import make_parser
from tests.support.checkpoints import configure
from tests.support.commands import run_command
from tests.support.decoding import text_alone
from tests.support.models import DATA, TRAINED
from tests.support.requests import TEXT, options_of
from tests.support.server_process import Server, serve, serve_here, server_of

# A text that goes on.
PROMPT = (
    "class TestFile(unittest.TestCase):\n    def setUp(self):\n        self.path = tempfile.mkdtemp()\n\n    def test_"
)
OTHER = str(DATA / "images")
# At a fixed depth: whether auto drafts in so short a text depends on the machine's load.
server = server_of(lambda _: ["--model", TRAINED, "--mtp", "--num-draft-tokens", "3", "--acceptance", "match"])
without_mtp = server_of(lambda _: ["--model", TRAINED, "--no-mtp", "--copy-drafts", "6"])


@pytest.fixture(scope="module")
def alone(trained):
    return partial(text_alone, *trained)


def answer_of(server: Server, **body) -> dict:
    return server.complete(**{"prompt": PROMPT, "max_tokens": 24, **body})


def text_from(server: Server, **body) -> str:
    return answer_of(server, **body)["choices"][0]["text"]


# Answers


def test_answers_equal_mlx_lm(client, alone):
    """Completions and chats, whole and streamed, and with penalties."""
    ask = dict(model="m", prompt=PROMPT, max_tokens=24)
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    choices = [c.choices[0] for c in chunks if c.choices]
    assert whole.choices[0].text == "".join(c.text for c in choices) == alone(PROMPT, 24)
    assert whole.choices[0].finish_reason == choices[-1].finish_reason == "length"
    for usage in (whole.usage, chunks[-1].usage):
        assert (usage.completion_tokens, usage.total_tokens) == (24, 24 + usage.prompt_tokens)
        assert 0 < usage.completion_tokens_details.accepted_prediction_tokens < 24
        assert usage.completion_tokens_details.rejected_prediction_tokens >= 0
    want = alone(PROMPT, 24, logit_bias={5: 2.0}, repetition_penalty=1.3)
    body = {"logit_bias": {"5": 2.0}, "extra_body": {"repetition_penalty": 1.3}}
    assert client.completions.create(**ask, **body).choices[0].text == want
    messages = [{"role": "user", "content": "Sort a list."}]
    ask = dict(model="m", messages=messages, max_tokens=24)
    whole, chunks = client.chat.completions.create(**ask), client.chat.completions.create(**ask, stream=True)
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert whole.choices[0].message.content == streamed == alone(convert_chat(messages), 24)  # it has no template


# Several requests


def test_seed_gives_one_text(server, without_mtp, alone):
    """Whatever the server accepts drafts by."""
    seeded = {"temperature": 1.0, "seed": 7, "max_tokens": 16}
    want = alone(PROMPT, **seeded)
    assert text_from(server, **seeded) == text_from(without_mtp, **seeded) == want
    assert text_from(server, **seeded | {"seed": 8}) != want
    # Beside others, one of which hangs up.
    with server.begin(PROMPT) as other, ThreadPoolExecutor(3) as pool:
        assert text_from(server, **seeded) == want
        again = [pool.submit(text_from, server, **seeded) for _ in range(2)]
        beside = pool.submit(text_from, server, prompt="class Tree:", temperature=1.0, max_tokens=16)
        other.close()
        assert [answer.result() for answer in again] == [want, want]
        beside.result()
    metrics = server.metrics()
    assert metrics['mlx_mtp_steps_total{requests="2"}'] > 0
    assert 'mlx_mtp_steps_total{requests="0"}' not in metrics  # an answer's last step has it, too


REPEATS = (PROMPT + "read(self):\n        self.assertEqual(1, 1)\n\n\n") * 3


def test_copies_equal_mlx_lm(server, without_mtp, alone):
    """Also in the next turn, whose prompt is in the cache, and without a head."""
    before, prompt = server.metrics(), REPEATS
    for _ in range(2):
        answer = answer_of(server, prompt=prompt, copy_drafts=6)
        text, usage = answer["choices"][0]["text"], answer["usage"]
        assert text == alone(prompt, 24)
        details = usage["completion_tokens_details"]
        assert 0 < details["accepted_copied_tokens"] <= details["copied_tokens"]
        assert details["accepted_copied_tokens"] <= details["accepted_prediction_tokens"]
        prompt += text
    assert usage["prompt_tokens_details"]["cached_tokens"] > 24
    after = server.metrics()
    for name in ("drafted", "accepted"):
        name = f'mlx_mtp_{name}_tokens_total{{position="1",source="copies"}}'
        assert after[name] > before.get(name, 0)
    details = answer_of(server, prompt=REPEATS)["usage"]["completion_tokens_details"]
    assert details["copied_tokens"] == 0  # --num-draft-tokens 3 means just these
    for copies in ({}, {"copy_drafts": "off"}):
        answer = answer_of(without_mtp, prompt=REPEATS, **copies)
        assert answer["choices"][0]["text"] == alone(REPEATS, 24)
        assert (answer["usage"]["completion_tokens_details"]["copied_tokens"] > 0) == (not copies)


def test_hang_up_stops_generation(server):
    before = server.metrics()["mlx_mtp_generated_tokens_total"]
    for stream in (True, False):
        server.begin(PROMPT, stream=stream).close()
        server.until_idle()
    assert server.metrics()["mlx_mtp_generated_tokens_total"] < before + 5000


def test_a_request_whose_prompt_is_not_read_yet_is_one_that_waits(server, monkeypatch):
    monkeypatch.setattr(server.engine.engine.admission.batch, "completion_batch_size", 1)
    with server.begin(PROMPT), server.begin(PROMPT), server.begin(PROMPT):
        deadline = time.monotonic() + 60
        while len(server.engine.engine.running) < 3:
            assert time.monotonic() < deadline
        metrics = server.metrics()
        assert [metrics[f"mlx_mtp_{name}"] for name in ("requests_in_flight", "queue_length")] == [1, 2]
    server.until_idle()


@pytest.mark.parametrize(
    ("how", "streams"), [pytest.param(signal.SIGINT, [True], marks=pytest.mark.slow), (signal.SIGTERM, [False, True])]
)
def test_a_process_from_its_first_lines_to_its_end(tmp_path, how, streams):
    """A signal completes the open answers. A chat template that takes for ever delays neither them nor the end."""
    for_ever = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = '{% if messages[0].content == "slow" %}' + for_ever + "{% endif %}{{ messages[0].content }}"
    flags = "--model", TRAINED, "--mtp", "--chat-template", template
    with serve(tmp_path / "log", *flags, module="tests.support.scripted_server") as s:
        log, url = s.log.read_text(), f"http://127.0.0.1:{s.port}"
        assert log.count("Model: dense, with drafts, context of 8192 tokens\n") == 1
        assert re.search(r"Memory: [\d.]+ [MG]B used of [\d.]+ GB\n", log)
        assert log.count(f"Open {url} to chat. Clients use {url}/v1 and the model dense\n") == 1
        assert "--api-key-file" not in log  # only this machine reaches it
        connections = [socket.create_connection(("127.0.0.1", s.port), timeout=60) for _ in range(500)]
        for c in connections:
            c.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for c in connections:
            with c:
                assert c.recv(12) == b"HTTP/1.1 200"
        with ThreadPoolExecutor(3) as pool:
            slow = pool.submit(s.request, "/v1/chat/completions", {"messages": [{"role": "user", "content": "slow"}]})
            bodies = [{"prompt": PROMPT, "max_tokens": 200, "stream": stream} for stream in streams]
            answers = [pool.submit(s.request, TEXT, body) for body in bodies]
            while s.metrics()["mlx_mtp_time_to_first_token_seconds_count"] < len(bodies):
                time.sleep(0.02)
            assert not slow.done()
            assert s.stop(how) == 0
            assert slow.result()[0] == 503
            for answer, stream in zip(answers, streams):
                status, content = answer.result()
                assert status == 200
                if stream:
                    *_, last, done = re.findall(r"^data: (.*)$", content, re.MULTILINE)
                    assert done == "[DONE]"
                    content = json.loads(last)
                assert content["choices"][0]["finish_reason"] == "length"
        assert "Exception in ASGI application" not in s.log.read_text()


# Flags and models


def test_flags_are_those_of_mlx_lm(capsys):
    _, text, _ = run_command(stock.main, capsys, "--help")
    actions = {flag: a for a in make_parser()._actions for flag in a.option_strings}
    assert set(re.findall(r"--[a-z-]+", text)) - {"--help"} <= actions.keys()
    assert actions["--model"].default == str(DEMO)
    defaults = re.findall(r"\n  (--[a-z-]+)(?:(?!\n  --).)*?\(default: ([^),]+)", text, re.DOTALL)
    assert len(defaults) > 10
    own = {"--num-draft-tokens", "--allowed-origins", "--max-tokens"}  # --mtp's, of fewer pages, the context
    own |= {"--temp", "--top-p", "--top-k", "--min-p"}  # the model's
    theirs = [(flag, default) for flag, default in defaults if flag not in own]
    assert [(flag, str(actions[flag].default)) for flag, _ in theirs] == theirs


def test_requires_the_key_and_serves_another_model(tmp_path):
    (tmp_path / "key").write_text("sesame\n")
    flags = "--model", TRAINED, "--mtp", "--api-key-file", str(tmp_path / "key"), "--serve-model", OTHER
    with serve_here(tmp_path / "log", *flags) as s:
        with OpenAI(base_url=s.url, api_key="sesame") as client:
            assert [m.id for m in client.models.list()] == ["dense", OTHER]  # the folder's name
            for name in ("dense", TRAINED, "default_model"):
                model = client.models.retrieve(name)
                assert (model.id, model.max_model_len) == (name, 8192)
        for key in ("", "sesam", "sesame2", "sésame"):
            for headers in ({"Authorization": f"Bearer {key}".encode()}, {"x-api-key": key.encode()}):
                status, content = s.request(TEXT, {"prompt": "a"}, headers)
                assert (status, content["error"]["type"]) == (401, "authentication_error")
        with OpenAI(base_url=s.url, api_key="none") as other, pytest.raises(openai.AuthenticationError) as e:
            other.models.list()
        assert e.value.response.headers["WWW-Authenticate"] == "Bearer"
        assert s.request("/v1/models", headers={"anthropic-version": "2023-06-01"})[1]["type"] == "error"
        assert s.request("/v1/models")[0] == s.request("/metrics")[0] == 401
        assert s.request("/health")[0] == s.request("/v1/models", headers={"x-api-key": "sesame"})[0] == 200
        headers = {"Authorization": "bearer sesame"}  # the scheme's case does not matter
        for name, status in (("default_model", 200), (OTHER, 200), (str(DATA / "moe36"), 404)):  # it exists
            body = {"model": name, "prompt": PROMPT, "max_tokens": 5}
            assert s.request(TEXT, body, headers)[0] == status


@mock.patch.object(logging.root, "handlers", [])  # it logs to no file of another server
def test_any_model_where_allowed(tmp_path, monkeypatch, alone):
    cache, cut = tmp_path / "hub", shutil.copytree(TRAINED, tmp_path / "cut")
    os.truncate(cut / "model.safetensors", 5000)
    for name, kind, files in (
        ("good", "qwen3_5", {"model.safetensors": Path(TRAINED, "model.safetensors").read_bytes()}),
        ("small", "qwen3_5", {}),
        ("other", "llama", {"model.safetensors": Path(TRAINED, "model.safetensors").read_bytes()}),
        ("half", "qwen3_5", {"model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors"}}'}),
    ):
        folder = cache / f"models--org--{name}" / "snapshots" / "0"
        folder.mkdir(parents=True)
        for file, content in {"config.json": Path(TRAINED, "config.json").read_bytes(), **files}.items():
            (folder / file).write_bytes(content)
        configure(folder, model_type=kind)
    # The environment names the hub's cache once, when huggingface_hub is imported.
    monkeypatch.setattr(hub.hf, "scan_cache_dir", partial(hub.hf.scan_cache_dir, cache))
    with serve_here(tmp_path / "log", "--model", TRAINED, "--mtp", "--allow-any-model") as s:
        assert [m["id"] for m in s.request("/v1/models")[1]["data"]] == ["dense", "org/good"]
        assert [s.request(f"/v1/models/{name}")[0] for name in ("dense", "org/good", "org/small")] == [200, 200, 404]
        text_from(s, model=OTHER, max_tokens=5)
        for name in ("/nowhere", str(cut), str(cache)):
            status, content = s.request(TEXT, {"model": name, "prompt": PROMPT})
            assert (status, content["error"]["code"]) == (404, "model_not_found")
            assert s.engine.frontend.models.key == OTHER  # it stays loaded
        assert text_from(s) == text_from(s, model="dense") == alone(PROMPT, 24)


# The error names the flag or the argument of the library, or says this.
INVALID = [
    "--max-tokens 0", "--kv-bits 7", "--temp inf", "--prefill-step-size 0", "--decode-concurrency 0", "--prompt-concurrency -1",
    "--prompt-cache-size -1", "--port 99999999", "--max-token-gap 0", "--max-token-gap nan",
    "--min-decode-share 1", "--min-decode-share -0.5", "--draft-model x --mtp",
    ("--draft-model x", "mlx_lm.server --draft-model x"),
    ("--num-draft-tokens 9 --mtp", "from 0 to 8"),
    ("--num-draft-tokens auto --no-mtp", "an MTP head"), "--kv-group-size 48 --kv-bits 4",
    ('--chat-template-args {"tokenize":false}', "tokenize"), ("--pipeline", "mlx.launch"), ("--api-key=", "empty"),
    ("--api-key sésame", "ASCII"), ("--api-key=a\nb", "ASCII"), "--api-key-file b --api-key a", ("--api-key-file /no", "/no"),
    ("--prompt-cache-disk-bytes 1GB", "--prompt-cache-disk-bytes requires --prompt-cache-dir"),
    ("--unload-after=0", "--unload-after must be 0.01 or more"), ("--keep-warm=-1", "--keep-warm must be 0 or more"),
    ("--keep-warm=nan", "--keep-warm must be 0 o"),
]  # fmt: skip


@pytest.mark.parametrize("case", INVALID, ids=str)
def test_rejects_invalid_flags(case):
    flags, message = case if isinstance(case, tuple) else (case, case.partition(" ")[0])
    argument = message.removeprefix("--").replace("-", "_")  # in errors of the library
    with pytest.raises((ValueError, OSError), match=f"{re.escape(message)}|{re.escape(argument)} must be"):
        options_of(*flags.split(" "))


def test_each_request_is_one_line_of_the_log(server):
    """Its tokens, times and drafts, and no other line; a path cannot begin a line of its own."""
    server.request("/v1/models")  # after it no line of the start comes
    before = len(server.log.read_text())
    for _ in range(2):
        server.request(TEXT, {"prompt": "import a_module_of_the_log", "max_tokens": 13})
    server.request("/nowhere%0Ax")
    # It is written when the response is sent.
    while not re.search(r'%0Ax" 404 req_\w+\n', log := server.log.read_text()[before:]):
        time.sleep(0.01)
    # A line of an earlier request may come late: those of this test have 13 tokens, and all are whole.
    whole = re.compile(r'127\.0\.0\.1 - "[A-Z]+ [^"]+" \d{3} req_[0-9a-f]{32}(: |$)')
    assert [line for line in log.splitlines() if not whole.match(line)] == []
    figures = r"(\d+) prompt tokens \((\d+) cached\), 13 output tokens, [\d.]+ s, [\d.]+ tokens/s"
    figures += r"(?:, \d+ of \d+ drafts accepted)?"
    found = re.findall(rf'127\.0\.0\.1 - "POST /v1/completions" 200 req_\w+: {figures}\n', log)
    assert [(n, int(cached) > 0) for n, cached in found] == [(found[0][0], False), (found[0][0], True)]
    assert log.count("/nowhere") == 1


def test_what_to_open_in_words_and_who_is_warned(monkeypatch, caplog):
    """A server that everybody reaches without a key warns once."""
    names = dict.fromkeys(("0.0.0.0", "::", ""), "localhost") | {"127.0.0.1": "127.0.0.1", "::1": "[::1]", "box": "box"}
    monkeypatch.setattr(command, "Server", lambda *_: SimpleNamespace(run=lambda sockets: None))
    tokenizers = {options_of().model: SimpleNamespace(context_length=None)}
    models = SimpleNamespace(name="a", drafts=True, tokenizers=tokenizers)
    engine = SimpleNamespace(admission=SimpleNamespace(models=models, account=Account()))
    for (address, name), key in product(names.items(), [(), ("--api-key", "a")]):
        caplog.clear()
        options = options_of("--host", address, *key)
        options.log = None  # as without launch
        with caplog.at_level("INFO"):
            listening = {"box": "192.168.1.7", "": "::"}.get(address, address)
            command.serve(options, engine, [SimpleNamespace(getsockname=lambda at=listening: (at, 80))])
        assert f"Open http://{name}:80 to chat." in caplog.text
        warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert len(warnings) == (address not in ("127.0.0.1", "::1") and not key), (address, key)
        assert all("--api-key-file" in w for w in warnings)


BOTH = [(socket.AF_INET6, *(None,) * 3, ("::1", 0, 0, 0)), (socket.AF_INET, *(None,) * 3, ("127.0.0.1", 0))]


def test_a_host_is_all_of_its_addresses(monkeypatch):
    """At one port; those that the machine lacks do not count, unless they are all."""

    def assert_reached(host):
        with command.listen(host, 0) as sockets:
            (port,) = {s.getsockname()[1] for s in sockets}
            for family, at in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
                with socket.socket(family) as s:
                    s.connect((at, port))

    assert_reached("::")
    assert_reached("")
    lacking = (socket.AF_INET, *(None,) * 3, ("192.0.2.77", 0))  # of no machine
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [lacking, *BOTH, BOTH[0]])
    assert_reached("localhost")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [lacking])
    with pytest.raises(MTPError, match="cannot listen at --host box"), command.listen("box", 0):
        pass
    monkeypatch.undo()
    with command.listen("127.0.0.1", 0) as (s,), pytest.raises(MTPError, match="is in use"):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: BOTH)
        with command.listen("localhost", s.getsockname()[1]):
            pass


@mock.patch.object(logging.root, "handlers", [])  # it logs to no file of another server
def test_start_fails_in_one_line(server, tmp_path, capsys):
    shutil.copy(Path(TRAINED) / "config.json", tmp_path)
    (tmp_path / "model.safetensors").symlink_to(Path(TRAINED) / "model.safetensors")
    configure(tmp_path, model_type="llama")
    for flags, message in (
        (["--mtp", "--model", "/nowhere"], "/nowhere"),
        (["--mtp", "--top-k", "4096"], "--top-k"),
        (["--mtp", "--port", str(server.port), "--model", "/nowhere"], "in use"),  # before the model is looked for
        (["--mtp", "--model", str(tmp_path)], "llama"),
        (["--model", str(tmp_path)], "mlx_lm.server"),
    ):
        status, _, err = run_command(command.main, capsys, "--port", "0", "--model", TRAINED, *flags)
        assert (status, "Traceback" in err) == (2, False)
        (line,) = [line for line in err.splitlines() if ": error: " in line]
        assert message in line
