"""The server where much is asked of it at once: clients that wait, clients that leave, more caches than places."""

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import GenerationContext
from starlette.testclient import TestClient

from mlx_mtp import make_prompt_cache
from mlx_mtp.decoding.loop import prefill
from mlx_mtp.prompt_store import memory
from mlx_mtp.server import engine
from mlx_mtp.server import memory as memory_of
from mlx_mtp.server.__main__ import make_generator
from mlx_mtp.server.app import make_app
from mlx_mtp.server.arguments import check, make_parser
from mlx_mtp.server.caches import WholeCaches
from mlx_mtp.server.engine import ResponseGenerator, SingleQueue, Waiting, in_thread
from mlx_mtp.server.job import Delta
from mlx_mtp.server.metrics import Metrics
from mlx_mtp.server.request import ApiError, Prompt, Request
from tests.support.models import tiny_model
from tests.support.server_process import serve_here

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
    with serve_here(tmp_path / "log", "--mtp", "--model", str(dense), "--chat-template", TEMPLATE) as s:
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
    caches = WholeCaches(LRUPromptCache())
    caches.use(("model", None, None), None, None, 1000)
    g = generator_of(caches=caches, scheduler=SimpleNamespace(nbytes=500), max_cache_bytes=1000)
    job = SimpleNamespace(request=SimpleNamespace(encoded=Prompt([], [], [], "")))
    for i in range(6):
        g._save(job, [i], [SimpleNamespace(nbytes=100, is_trimmable=lambda: False)], "assistant")
    assert (len(caches.lru), caches.lru.nbytes) == (5, 500)


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


# Requests that are too many, or too large


def test_no_more_than_max_queue_wait():
    arrived, begin = threading.Event(), threading.Event()

    async def generate(request, args):
        arrived.set()
        await in_thread(begin.wait)
        yield GenerationContext(False, False, None, None, "normal", [1])
        yield Delta([], 1, 0.0, (), "stop")

    client, body = client_of(generate, max_queue=1), {"prompt": "a"}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, "/v1/completions", json=body)
        assert arrived.wait(30)
        answer = client.post("/v1/completions", json=body)
        begin.set()
        assert waiting.result().status_code == 200
    assert answer.status_code == 429
    assert answer.headers["Retry-After"].isdigit()
    assert answer.json()["error"] == {
        "message": "1 requests are waiting: try again later.",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_bytes_of_a_prompt(kind, kv_bits):
    """As its caches have them, whose keys and values come in blocks of 256 tokens."""
    model = tiny_model(kind, head_dim=64)
    cache = make_prompt_cache(model)
    options = {"kv_bits": kv_bits, "kv_group_size": 32}
    prefill(mx.zeros(256, mx.uint32), model, prompt_cache=cache, quantized_kv_start=0, **options)
    own = [*cache[:-2], cache[-2]]
    assert sum(c.nbytes for c in own) == memory_of.cache_bytes(model, 256, **options)
    assert memory_of.cache_bytes(SimpleNamespace(layers=[object()]), 256) == 0  # of another family


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_read(monkeypatch):
    memory_of.check_fits(8, 1000, 1000, "prompt")
    with pytest.raises(ApiError, match=r"^The prompt of 8 tokens takes 1000 bytes, and the model leaves 999: ") as e:
        memory_of.check_fits(8, 1000, 999, "prompt")
    assert (e.value.status, e.value.param) == (507, "prompt")
    monkeypatch.setattr(engine, "memory_left", lambda *models: 1000)
    args = make_parser().parse_args(["--mtp"])
    check(args)
    generator = make_generator(args, None)
    try:
        client = TestClient(make_app(generator, None, ["*"]))
        answer = client.post("/v1/completions", json={"prompt": "import os"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_memory")
        assert generator.metrics.text().count(b"mlx_mtp_prompt_tokens_total 0.0") == 1
    finally:
        generator.stop_and_join()


def test_a_prompt_that_fits_alone_waits_for_memory():
    model = tiny_model("qwen3_5")
    need = memory_of.cache_bytes(model, 8)
    g = generator_of(is_exclusive=False, scheduled="key", acceptance="coupled", memory_left=2 * need)
    g.model_provider = SimpleNamespace(
        model=model, key_of=lambda _: "key", cli_args=SimpleNamespace(kv_bits=None, kv_group_size=64)
    )
    entry = None, request_of(encoded=SimpleNamespace(tokens=[0] * 8)), SimpleNamespace(model=None, seed=None)
    g.jobs = {}
    for n_running, fits in ((0, True), (1, True), (2, False)):
        g.jobs = {i: SimpleNamespace(request=entry[1]) for i in range(n_running)}
        assert g._fits(entry) == fits


# Clients that wait


def request_of(**kwargs):
    return Request("text", "a", [], None, None, **kwargs)


def test_waiting_client_is_told_by_the_clock(monkeypatch):
    monkeypatch.setattr(engine, "KEEP_ALIVE", 0.005)
    g, told = generator_of(), []
    g.model_provider = SimpleNamespace(
        resolve=lambda model: model,
        key_of=lambda _: "a key",
        tokenizers={"a key": "a tokenizer"},
        cli_args=SimpleNamespace(prompt_cache_dir=None),
    )
    g._encode = lambda *_: "a prompt"
    context, step = GenerationContext(False, False, None, None, "normal", [1]), Delta([], 1, 0.0, (), "stop")

    async def run():
        """Stands for the generation thread as well, which is at work on another request, then reads, then answers."""
        found = []
        async for item in g.generate(request_of(), SimpleNamespace(model="m", stop_words=[])):
            found.append(item)
            told.append(item) if isinstance(item, Waiting) else None
            mailbox, *_ = g.requests.queue[0]
            for response in {2: [(5, 10), (7, 10)], 3: [context], 5: [step, None]}.get(len(found), []):
                mailbox.put(response)
        return found

    found = asyncio.run(run())
    assert found[:3] == [Waiting(0, 0), Waiting(0, 0), Waiting(7, 10)]  # the latest, once
    assert [item for item in found if not isinstance(item, Waiting)] == [context, step]
    assert not g.open


async def first_of(answers):
    return await anext(answers)


def test_a_generation_thread_that_has_ended_ends_the_waiting(monkeypatch):
    monkeypatch.setattr(engine, "POLL", 0.001)
    g = generator_of(generation_available=lambda: False)
    with pytest.raises(ApiError) as e:
        asyncio.run(first_of(g._submit(request_of(), None)))
    assert e.value.status == 503
    assert not g.open


def test_fail_all_ends_what_is_open():
    g = generator_of()

    async def run():
        waiting = [asyncio.create_task(first_of(g._submit(request_of(), None))) for _ in range(3)]
        while len(g.open) < 3:
            await asyncio.sleep(0)
        await in_thread(g.fail_all, ApiError(503, "Rank 1 has died."))
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert [str(e) for e in asyncio.run(run())] == ["Rank 1 has died."] * 3
    assert not g.open


def client_of(generate, max_queue=None):
    """A client of a server whose generator does this."""
    args = SimpleNamespace(copy_drafts=None, num_draft_tokens=0, mtp=False, max_queue=max_queue)
    for name, default in dict(max_tokens=5, has_max_tokens=False, temp=0.0, top_p=1.0, top_k=0, min_p=0.0).items():
        setattr(args, name, default)
    generator = SimpleNamespace(is_healthy=True, metrics=Metrics(), cli_args=args, generate=generate)
    return TestClient(make_app(generator, None, ["*"]))


async def wait_and_fail(request, args):
    for n in (0, 4):
        yield Waiting(n, 9)
    raise ApiError(503, "Rank 1 has died.")


def test_stream_begins_where_a_client_waits():
    """Before it is known whether there will be an answer: an error is then an event of the stream."""
    answer = client_of(wait_and_fail).post("/v1/completions", json={"prompt": "a", "stream": True})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
    comments, event, done = re.fullmatch(r"((?:: .*\n\n)+)data: (.*)\n\ndata: (.*)\n\n", answer.text).groups()
    assert comments == ": keepalive 0/9\n\n: keepalive 4/9\n\n"
    assert json.loads(event)["error"]["message"] == "Rank 1 has died."
    assert done == "[DONE]"


@pytest.mark.parametrize(
    ("path", "body", "waiting", "event"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, "event: ping", "error"),
        ("/v1/responses", {"input": "a"}, ": keepalive 0/9", "response.failed"),
    ],
)
def test_each_api_says_that_it_waits_and_fails(path, body, waiting, event):
    answer = client_of(wait_and_fail).post(path, json={**body, "stream": True})
    assert answer.text.startswith(waiting)
    *_, last = answer.text.strip().split("\n\n")
    assert last.startswith(f"event: {event}\n")
    assert "Rank 1 has died." in last


def test_no_byte_before_the_status_of_an_answer_that_is_no_stream():
    answer = client_of(wait_and_fail).post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "Rank 1 has died."


# Clients that leave


def test_hang_up_ends_mlx_lms_own_loop():
    request = request_of()
    queue = SingleQueue(Queue(), request)
    queue.put((1, 9))
    request.is_gone = True
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
