"""The server where much is asked of it at once: clients that wait, clients that leave, more caches than places."""

import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import LRUPromptCache

from mlx_mtp.prompt_store import memory
from mlx_mtp.server import api, engine
from mlx_mtp.server.arguments import check, make_parser
from mlx_mtp.server.engine import ResponseGenerator, SingleQueue
from mlx_mtp.server.job import Step
from mlx_mtp.server.metrics import Metrics
from mlx_mtp.server.request import ApiError, Request
from tests.support.models import tiny_model
from tests.support.server_process import serve

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}<|endoftext|>{{ m.role }}\n{{ m.content }}{% endfor %}<|endoftext|>"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
AGENTS = ["You write Python.", "You review code, line by line.", "You answer in one word.", "You name files."]
TURNS = ["Read a file.", "Now a list of files.", "And a dictionary of them, by name."]


# Prompt caches


def test_agents_in_turn_read_only_what_is_new(tmp_path):
    """Ten places, which mlx-lm has, are too few for four agents."""
    dense = Path(__file__).parent / "data" / "dense"
    with serve(tmp_path / "log", "--mtp", "--model", str(dense), "--chat-template", TEMPLATE) as s:
        texts = [[{"role": "system", "content": agent}] for agent in AGENTS]
        seen = [0] * len(AGENTS)  # the length of each one's last prompt
        for turn in TURNS:
            for agent, messages in enumerate(texts):
                messages.append({"role": "user", "content": turn})
                status, answer = s.request(CHAT, {"messages": messages, "max_tokens": 2})
                assert status == 200, answer
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
                usage = answer["usage"]
                # The last token of a prompt is not in its cache: generation begins with it.
                assert usage["prompt_tokens_details"]["cached_tokens"] >= seen[agent] - 1
                seen[agent] = usage["prompt_tokens"]


def generator_of(**attributes):
    g = ResponseGenerator.__new__(ResponseGenerator)
    g.requests, g.open, g.generation_available = Queue(), set(), lambda: True
    vars(g).update(attributes)
    return g


def test_bytes_of_running_requests_count():
    g = generator_of(prompt_cache=LRUPromptCache(), scheduler=SimpleNamespace(nbytes=500), max_cache_bytes=1000)
    g.model_provider = SimpleNamespace(model_key="model")
    for i in range(6):
        g._save([i], [SimpleNamespace(nbytes=100, is_trimmable=lambda: False)], "assistant")
    assert (len(g.prompt_cache), g.prompt_cache.nbytes) == (5, 500)


def test_caches_may_take_half_of_what_models_leave(monkeypatch):
    models = [tiny_model("qwen3_5", seed) for seed in (0, 1)]
    size = sum(w.nbytes for _, w in tree_flatten(models[0].parameters()))
    monkeypatch.setattr(memory, "device_memory", lambda: 10 * size)
    assert [memory.cache_budget(*models[:n]) for n in (1, 2)] == [9 * size // 2, 4 * size]
    monkeypatch.setattr(memory, "device_memory", lambda: size // 2)
    assert memory.cache_budget(models[0]) == 0


def test_device_memory(monkeypatch):
    assert memory.device_memory() > 1 << 28
    for info in ({"max_recommended_working_set_size": 3, "memory_size": 4}, {"total_memory": 3}):
        monkeypatch.setattr(mx, "device_info", lambda info=info: info)
        assert memory.device_memory() == 3


# Clients that wait


def request_of(connection=None, **kwargs):
    return Request("text", "a", [], None, None, connection=connection, copy_drafts=None, **kwargs)


def test_waiting_client_is_told_by_the_clock(monkeypatch):
    monkeypatch.setattr(engine, "KEEP_ALIVE", 0.005)
    g, told, begun = generator_of(), [], []
    tokenizers = {"a key": "a tokenizer"}
    g.model_provider = SimpleNamespace(check=lambda _: None, key_of=lambda _: "a key", tokenizers=tokenizers)
    g._encode = lambda *_: "a prompt"
    times = []

    def progress(*how_far):
        """Stands for the generation thread, which is at work on another request, then reads, then answers."""
        told.append(how_far)
        times.append(len(begun))
        queue, *_ = g.requests.queue[0]
        for response in {2: [(5, 10), (7, 10)], 3: [context]}.get(len(told), []):
            queue.put(response)
        if len(told) == 5:
            queue.put(step)
            queue.put(None)

    context, step = SimpleNamespace(text_sm=None, initial_state="normal"), Step([], 1, 0.0, None, "stop")
    request = request_of(begin=lambda: begun.append(1))
    ctx, responses = g.generate(request, SimpleNamespace(model=SimpleNamespace(model="m"), stop_words=[]), progress)
    assert ctx is context
    assert told[:2] == [(0, 0), (0, 0)]
    assert told[2] == (7, 10)  # the latest, once
    assert list(responses) == [step]
    assert times == [*range(1, len(told) + 1)]  # the headers before each
    assert not g.open


def test_a_generation_thread_that_has_ended_ends_the_waiting(monkeypatch):
    monkeypatch.setattr(engine, "POLL", 0.001)
    g = generator_of(generation_available=lambda: False)
    with pytest.raises(ApiError) as e:
        next(g._submit(request_of(), None, lambda *_: None))
    assert e.value.status == 503
    assert not g.open


def test_fail_all_ends_what_is_open():
    g = generator_of()
    answers = [g._submit(request_of(), None, lambda *_: None) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(next, answer) for answer in answers]
        while len(g.open) < 3:
            pass
        g.fail_all(ApiError(503, "Rank 1 has died."))
        for future in waiting:
            with pytest.raises(ApiError, match="Rank 1"):
                future.result(10)
    assert not g.open


@contextmanager
def http_server(generate):
    """A server over loopback whose generator does this."""
    args = SimpleNamespace(allowed_origins="*", copy_drafts=None, num_draft_tokens=0, mtp=False)
    for name, default in dict(max_tokens=5, temp=0.0, top_p=1.0, top_k=0, min_p=0.0).items():
        setattr(args, name, default)
    generator = SimpleNamespace(is_healthy=True, metrics=Metrics(), cli_args=args, generate=generate)
    with api.Server(("127.0.0.1", 0), partial(api.APIHandler, generator, system_fingerprint="")) as s:
        loop = threading.Thread(target=s.serve_forever, args=(0.01,))
        loop.start()
        try:
            yield s.server_port
        finally:
            s.shutdown()
            loop.join()


def ask(port: int, **body) -> bytes:
    raw = json.dumps({"prompt": "a", **body}).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw))
        answer = b""
        while chunk := s.recv(65536):
            answer += chunk
    return answer


def test_stream_begins_where_a_client_waits():
    """Before it is known whether there will be an answer: an error is then an event of the stream."""

    def generate(request, args, progress_callback):
        for n in (0, 4):
            request.begin()
            progress_callback(n, 9)
        raise ApiError(503, "Rank 1 has died.")

    with http_server(generate) as port:
        answer = ask(port, stream=True)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == b"200"
    assert head.count(b"text/event-stream") == 1
    comments, event, done = re.fullmatch(rb"((?:: .*\n\n)+)data: (.*)\n\ndata: (.*)\n\n", body).groups()
    assert comments == b": keepalive 0/9\n\n: keepalive 4/9\n\n"
    assert json.loads(event)["error"]["message"] == "Rank 1 has died."
    assert done == b"[DONE]"


def test_no_byte_before_the_status_of_an_answer_that_is_no_stream():
    def generate(request, args, progress_callback):
        request.begin()
        progress_callback(4, 9)
        raise ApiError(503, "Rank 1 has died.")

    with http_server(generate) as port:
        head, _, body = ask(port).partition(b"\r\n\r\n")
    assert head.split()[1] == b"503"
    assert json.loads(body)["error"]["message"] == "Rank 1 has died."


# Clients that leave


def test_hang_up_ends_mlx_lms_own_loop():
    ours, theirs = socket.socketpair()
    with ours:
        queue = SingleQueue(Queue(), request_of(ours))
        queue.put((1, 9))
        theirs.close()
        with pytest.raises(ApiError):
            queue.put((5, 9))
    assert queue.queue.qsize() == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-token-gap", "0"], "--max-token-gap"),
        (["--max-token-gap", "nan"], "--max-token-gap"),
        (["--min-decode-share", "1"], "--min-decode-share"),
        (["--min-decode-share", "-0.5"], "--min-decode-share"),
    ],
    ids=str,
)
def test_rejects_invalid_flags(flags, message):
    with pytest.raises(ValueError, match=message):
        check(make_parser().parse_args(flags))
