"""The server as its clients see it: OpenAI's own client, plain sockets, and what mlx-lm alone says to the same prompts."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import openai
import pytest
from helpers import plain
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.server import convert_chat
from openai import OpenAI
from server_process import SRC, Server, serve

import mlx_mtp
from mlx_mtp.checkpoint.load import DEMO
from mlx_mtp.server.__main__ import make_parser

PROMPT = 'def read_lines(path):\n    """Return the lines of a file."""\n'
PROMPTS = [f"class Tree{i}:\n    def insert(self, key, value={i}):\n" for i in range(8)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # At a fixed depth: whether auto drafts in so short a text hangs on the machine's load.
    with serve(tmp_path_factory.mktemp("server") / "log", "--mtp", "--num-draft-tokens", "3") as s:
        yield s
        assert "Traceback" not in s.log.read_text()


@pytest.fixture
def client(server):
    return OpenAI(base_url=server.url, api_key="none", max_retries=0)


@cache
def demo():
    return mlx_mtp.load(str(DEMO))


@cache
def alone(prompt: str, max_tokens: int, chat: bool = False) -> str:
    """The text of mlx-lm's own single run."""
    model, tokenizer = demo()
    prompt = convert_chat([{"role": "user", "content": prompt}]) if chat else prompt  # the demo has no template
    return text_of(plain(tokenizer.encode(prompt), model, max_tokens=max_tokens))


def text_of(tokens: list[int]) -> str:
    _, tokenizer = demo()
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        if token in tokenizer.eos_token_ids:
            break
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


def complete(client, prompt=PROMPT, max_tokens=24, **kwargs):
    return client.completions.create(model="default_model", prompt=prompt, max_tokens=max_tokens, **kwargs)


def chat(client, messages, max_tokens=24, **kwargs):
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return client.chat.completions.create(model="default_model", messages=messages, max_tokens=max_tokens, **kwargs)


# What it says


def test_completions_are_mlx_lms(client):
    response = complete(client, max_tokens=40)
    assert response.choices[0].text == alone(PROMPT, 40)
    assert response.choices[0].finish_reason == "length"
    usage = response.usage
    assert (usage.completion_tokens, usage.total_tokens) == (40, 40 + usage.prompt_tokens)
    details = usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens < 40
    assert details.rejected_prediction_tokens >= 0


def test_chats_are_mlx_lms(client):
    response = chat(client, "Sort a list.", max_tokens=30)
    assert response.choices[0].message.content == alone("Sort a list.", 30, chat=True)


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_a_stream_says_the_same(client, prompt):
    chunks = list(complete(client, prompt, 40, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == alone(prompt, 40)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 40
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 0
    chunks = list(chat(client, prompt, 40, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == alone(prompt, 40, chat=True)


@pytest.mark.parametrize("word", ["return", "    if path", "ath)", "s.startswith(os.s", ":", "no such word"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_word_ends_the_text_before_it_however_it_is_tokenized(client, word, stream):
    text, _, rest = alone(PROMPT, 60).partition(word)
    if stream:
        chunks = list(complete(client, max_tokens=60, stop=[word], stream=True))
        assert "".join(c.choices[0].text for c in chunks) == text
        response = chunks[-1]
    else:
        response = complete(client, max_tokens=60, stop=[word])
        assert response.choices[0].text == text
        assert (response.usage.completion_tokens < 60) == bool(rest)
    assert response.choices[0].finish_reason == ("stop" if rest else "length")


def test_logprobs_are_those_of_the_tokens(client):
    extra = {"extra_body": {"logprobs": True, "top_logprobs": 2}}
    response = complete(client, max_tokens=12, **extra)
    content = response.choices[0].logprobs.content
    assert len(content) == 12
    for token in content:
        assert token["logprob"] == max(other["logprob"] for other in token["top_logprobs"]) <= 0


def test_greedy_penalties_are_mlx_lms(client):
    model, tokenizer = demo()
    want = plain(
        tokenizer.encode(PROMPT), model, max_tokens=30, logits_processors=make_logits_processors({5: 2.0}, 1.3, 20)
    )
    body = {"logit_bias": {"5": 2.0}, "extra_body": {"repetition_penalty": 1.3}}
    assert complete(client, max_tokens=30, **body).choices[0].text == text_of(want)


def test_a_seed_gives_the_same_text_whatever_runs_beside_it(server, client, tmp_path):
    def seeded(seed):
        return complete(client, max_tokens=30, temperature=1.0, seed=seed).choices[0].text

    first = seeded(7)
    assert seeded(8) != first
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(complete, client, prompt, 30, temperature=1.0) for prompt in PROMPTS[:3]]
        again = pool.submit(seeded, 7)
        assert again.result() == first
        assert all(o.result().usage.completion_tokens <= 30 for o in others)
    with serve(tmp_path / "log", "--model", str(DEMO), module="mlx_lm.server") as stock:
        body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 1.0, "seed": 7}
        assert stock.request("/v1/completions", body)[1]["choices"][0]["text"] == first


def test_the_readmes_examples(server):
    readme = (SRC.parent / "README.md").read_text()
    (_, shell), (_, python) = re.findall(r"<!-- server -->\n```(\w+)\n(.*?)```", readme, re.DOTALL)
    shell, python = (text.replace(":8080", f":{server.port}") for text in (shell, python))
    r = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    assert json.loads(r.stdout)["choices"][0]["text"] == alone("def read_lines(path):", 40)
    r = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, check=True)
    assert r.stdout == alone("Write a binary search in Python.", 40, chat=True)


# Several at once, and turns


def test_requests_side_by_side_say_what_they_say_alone(server, client):
    def ask(i):
        time.sleep(0.05 * i)
        return complete(client, PROMPTS[i], 30 + 10 * i).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(8)))
    assert texts == [alone(PROMPTS[i], 30 + 10 * i) for i in range(8)]
    metrics = server.metrics()
    assert metrics['mlx_mtp_mode_switches_total{to="batch"}'] > 0
    assert metrics["mlx_mtp_requests_in_flight"] == metrics["mlx_mtp_queue_length"] == 0


def test_turns_of_a_chat_go_on_from_the_cache(client):
    messages, cached = [{"role": "system", "content": "You write Python."}], []
    for turn in ("Read a file.", "Now a list.", "And a dictionary."):
        messages.append({"role": "user", "content": turn})
        response = chat(client, messages, 20)
        cached.append(response.usage.prompt_tokens_details.cached_tokens)
        model, tokenizer = demo()
        text = response.choices[0].message.content or ""
        assert text == text_of(plain(tokenizer.encode(convert_chat(messages)), model, max_tokens=20))
        messages.append({"role": "assistant", "content": text})
    assert 0 < cached[1] < cached[2]


def test_a_client_that_goes_away_stops_its_generation(server):
    before = server.metrics()["mlx_mtp_generated_tokens_total"]
    for stream in (True, False):
        with socket.create_connection(("127.0.0.1", server.port)) as s:
            body = json.dumps({"prompt": PROMPT, "max_tokens": 5000, "stream": stream}).encode()
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            deadline = time.monotonic() + 20
            while server.metrics()["mlx_mtp_requests_in_flight"] == 0:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        server.until_idle()
    assert server.metrics()["mlx_mtp_generated_tokens_total"] < before + 5000


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stream", [True, False])
def test_an_interrupt_ends_open_answers_properly(tmp_path, how, stream):
    with serve(tmp_path / "log", "--mtp") as s:
        with ThreadPoolExecutor(1) as pool:
            body = {"prompt": PROMPT, "max_tokens": 8000, "stream": stream}
            answer = pool.submit(s.request, "/v1/completions", body)
            while s.metrics()["mlx_mtp_generated_tokens_total"] == 0:
                time.sleep(0.02)
            assert s.stop(how) == 0
            status, content = answer.result()
        assert status == 200
        if stream:
            *_, last, done = re.findall(r"^data: (.*)$", content, re.MULTILINE)
            assert done == "[DONE]"
            content = json.loads(last)
        assert content["choices"][0]["finish_reason"] == "length"
        assert "Traceback" not in s.log.read_text()


# Who may ask, and for what


def test_the_flags_are_those_of_mlx_lms_server():
    text = subprocess.run([sys.executable, "-m", "mlx_lm.server", "--help"], capture_output=True, text=True).stdout
    flags = set(re.findall(r"--[a-z-]+", text)) - {"--help"}
    actions = {flag: a for a in make_parser()._actions for flag in a.option_strings}
    assert flags <= actions.keys()
    for block in re.split(r"\n  (?=--)", text)[1:]:
        flag = block.split()[0]
        if (
            default := re.search(r"\(default: ([^),]+)", block)
        ) and flag != "--num-draft-tokens":  # which is that of --mtp
            assert str(actions[flag].default) == default[1]


def test_the_models_are_listed(server, client):
    assert [m.id for m in client.models.list()] == [str(DEMO)]
    assert client.models.retrieve(str(DEMO)).id == str(DEMO)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert server.request("/health") == (200, {"status": "ok"})


def test_a_key_is_asked_for(tmp_path):
    file = tmp_path / "key"
    file.write_text("sesame\n")
    with serve(tmp_path / "log", "--mtp", "--api-key-file", str(file)) as s:
        assert complete(OpenAI(base_url=s.url, api_key="sesame"), max_tokens=2).usage.completion_tokens == 2
        for key in ("", "sesam", "sesame2", "sésame"):
            headers = {"Authorization": f"Bearer {key}".encode()}
            status, content = s.request("/v1/completions", {"prompt": "a"}, headers)
            assert (status, content["error"]["type"]) == (401, "authentication_error")
        assert s.request("/v1/models")[0] == s.request("/metrics")[0] == 401
        assert s.request("/health")[0] == 200


def test_another_model_is_served_where_the_operator_says_so(tmp_path):
    other = Path(__file__).parent / "data" / "dense"
    with serve(tmp_path / "log", "--mtp", "--serve-model", str(other)) as s:
        client = OpenAI(base_url=s.url, api_key="none")
        assert [m.id for m in client.models.list()] == [str(DEMO), str(other)]
        for name in (str(other), "default_model", str(other)):
            body = {"model": name, "prompt": PROMPT, "max_tokens": 5}
            assert s.request("/v1/completions", body)[0] == 200
        # The file of a model that is not served is not read, though it is there.
        body["model"] = str(other.parent / "moe_fused")
        assert s.request("/v1/completions", body)[0] == 404


def test_any_model_can_be_named_where_the_operator_says_so(tmp_path, monkeypatch):
    other = str(Path(__file__).parent / "data" / "dense")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    with serve(tmp_path / "log", "--mtp", "--allow-any-model") as s:
        assert [m["id"] for m in s.request("/v1/models")[1]["data"]] == [str(DEMO)]
        assert s.request("/v1/completions", {"model": other, "prompt": PROMPT, "max_tokens": 5})[0] == 200
        status, content = s.request("/v1/completions", {"model": "/nowhere", "prompt": PROMPT})
        assert (status, content["error"]["code"]) == (404, "model_not_found")
        response = s.request("/v1/completions", {"prompt": PROMPT, "max_tokens": 30})[1]
        assert response["choices"][0]["text"] == alone(PROMPT, 30)


def test_quantized_keys_are_served_one_at_a_time(tmp_path):
    model, tokenizer = demo()
    options = dict(kv_bits=8, kv_group_size=32, quantized_kv_start=10)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with serve(tmp_path / "log", "--mtp", *flags) as s, ThreadPoolExecutor(3) as pool:
        bodies = [{"prompt": p, "max_tokens": 30} for p in PROMPTS[:3]]
        answers = list(pool.map(lambda body: s.request("/v1/completions", body)[1], bodies))
        assert not any("mode_switches_total{" in name for name in s.metrics())
    for prompt, answer in zip(PROMPTS, answers):
        want = plain(tokenizer.encode(prompt), model, max_tokens=30, **options)
        assert answer["choices"][0]["text"] == text_of(want)


def test_without_mtp_it_is_mlx_lms_server(tmp_path):
    with serve(tmp_path / "log") as s, ThreadPoolExecutor(3) as pool:
        bodies = [{"prompt": p, "max_tokens": 20} for p in PROMPTS[:3]]
        answers = list(pool.map(lambda body: s.request("/v1/completions", body)[1], bodies))
        assert [a["choices"][0]["text"] for a in answers] == [alone(p, 20) for p in PROMPTS[:3]]
        assert "completion_tokens_details" not in answers[0]["usage"]
        seeded = {"prompt": PROMPT, "max_tokens": 20, "temperature": 1, "seed": 3}
        texts = {s.request("/v1/completions", seeded)[1]["choices"][0]["text"] for _ in range(2)}
        assert len(texts) == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--mtp", "--draft-model", "x"], "leave out one"),
        (["--num-draft-tokens", "9", "--mtp"], "from 0 to 8"),
        (["--num-draft-tokens", "auto"], "--mtp"),
        (["--port", "99999999"], "--port"),
        (["--pipeline"], "--pipeline"),
        (["--api-key", ""], "empty"),
        (["--mtp", "--model", "/nowhere"], "/nowhere"),
        (["--api-key-file", "/nowhere"], "/nowhere"),
    ],
)
def test_flags_that_cannot_be_served_are_one_line(flags, says):
    command = [sys.executable, "-m", "mlx_mtp.server", *flags]
    r = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(SRC)})
    assert r.returncode == 2
    assert says in r.stderr
    assert len([line for line in r.stderr.splitlines() if line.startswith("mlx_mtp.server: error: ")]) == 1
    assert "Traceback" not in r.stderr


def test_a_port_that_is_taken_is_one_line(server):
    command = [sys.executable, "-m", "mlx_mtp.server", "--mtp", "--port", str(server.port)]
    r = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(SRC)})
    assert r.returncode == 2
    assert "in use" in r.stderr


def test_threads_do_not_pile_up(server: Server):
    for _ in range(3):
        server.request("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
    time.sleep(0.3)
    n = len(list(Path(f"/proc/{server.process.pid}/task").iterdir()))
    threads = [threading.Thread(target=server.request, args=("/health",)) for _ in range(20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    time.sleep(0.3)
    assert len(list(Path(f"/proc/{server.process.pid}/task").iterdir())) <= n
