"""The server where much is asked of it at once: clients that wait, clients that leave, more caches than places."""

import asyncio
import json
import re
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import mlx.core as mx
import pytest
import uvicorn

from mlx_mtp import make_sampler
from mlx_mtp.errors import MTPError
from mlx_mtp.memory import sizes_of
from mlx_mtp.server import frontend, serve
from mlx_mtp.server.engine import engine as generation
from mlx_mtp.server.engine.admission import Admission, longest_text
from mlx_mtp.server.engine.encode import _errors_of
from mlx_mtp.server.engine.engine import Clients
from mlx_mtp.server.engine.models import Stores
from mlx_mtp.server.frontend import Frontend, in_thread
from mlx_mtp.server.request import STARTED, ApiError, Delta, Metrics, Prompt, Request, Waiting
from tests.support import requests
from tests.support.engine import Engine
from tests.support.models import TRAINED, tiny_model
from tests.support.prompt_store import TEXT, read
from tests.support.requests import client_of, options_of
from tests.support.scripted_server import fail

# Prompt caches


KEY = ("a model", None)


def test_bytes_of_running_requests_count():
    model, options = tiny_model("qwen3_5"), options_of("--mtp")
    caches = Stores(options)
    caches.use(KEY, model, SimpleNamespace(has_chat_template=False), 1 << 30)
    admission, request = Admission(options, None, caches, None, None), request_of()
    request.encoded = Prompt(TEXT)
    admission.batch, admission.max_cache_bytes = SimpleNamespace(prompt_cache_nbytes=0), 1 << 30
    for n in (4, 8):
        admission.keep(request, read(model, TEXT[:n]), TEXT[:n])
    both = caches.nbytes
    admission.max_cache_bytes = 2 * both
    admission.batch.prompt_cache_nbytes = 2 * both - 1
    admission.make_room()
    assert caches.nbytes == 0
    admission.batch.prompt_cache_nbytes = both
    admission.keep(request, read(model, TEXT[:8]), TEXT[:8])
    assert 0 < caches.nbytes <= both


# Requests that are too many, or too large


def test_no_more_than_max_queue_wait():
    arrived, begin = threading.Event(), threading.Event()

    async def generate(request):
        arrived.set()
        await in_thread(begin.wait)
        yield STARTED
        yield Delta([], 1, "stop")

    client, body = client_of(generate, "--max-queue", "1"), {"prompt": "a"}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, requests.TEXT, json=body)
        assert arrived.wait(30)
        answer = client.post(requests.TEXT, json=body)
        begin.set()
        assert waiting.result().status_code == 200
    assert answer.status_code == 429
    assert answer.headers["Retry-After"].isdigit()
    message = "1 requests are waiting: try again later."
    error = dict(message=message, type="rate_limit_error", param=None, code="rate_limit_exceeded")
    assert answer.json()["error"] == error
    assert client.post(requests.TEXT, json=body).status_code == 200


def admission_with(model, *flags):
    """One that has loaded a model."""
    models, nothing = SimpleNamespace(model=model, key=KEY), SimpleNamespace(nbytes=0)
    account = SimpleNamespace(left=1 << 30, buffers=0)
    admission = Admission(options_of("--mtp", *flags), models, nothing, None, account)
    admission.sizes, admission.batch = sizes_of(model), SimpleNamespace(prompt_cache_nbytes=0)
    return admission


def test_who_waits_for_memory_or_for_another_model():
    admission, other = admission_with(tiny_model("qwen3_5")), request_of()
    admission.account.left = admission.need(request_of(), [request_of()])
    assert [admission.fits(request_of(), [request_of()] * n) for n in range(3)] == [True, True, False]
    other.key = ("another", None)
    assert [admission.fits(other, [request_of()] * n) for n in range(2)] == [True, False]


def test_the_longest_text_is_the_longest_that_is_admitted():
    """It is the context that clients are told."""
    admission = admission_with(tiny_model("qwen3_5"))
    for n, context, want in ((511, 9000, 511), (511, 300, 300), (0, 9000, 0)):
        request = request_of()
        request.encoded = Prompt([0] * n)
        admission.account.left = admission.need(request) - (n == 0)
        assert longest_text(admission, context) == want
    assert longest_text(admission, None) is None


@pytest.mark.parametrize("acceptance", ["rejection", "match"])
def test_a_request_with_a_seed_has_coupled_drafts(acceptance):
    """Whatever the server accepts drafts by: a seed gives one text, beside any other request."""
    admission = admission_with(tiny_model("qwen3_5"), "--acceptance", acceptance)
    admission.models.tokenizer = SimpleNamespace(encode=lambda _: [1], eos_token_ids=[2])
    request, given = request_of(), dict(top_p=0.9, min_p=0.1, top_k=5, xtc_probability=0.0, xtc_threshold=0.1)
    request.args.seed, request.args.sampling = 7, SimpleNamespace(temperature=1.0, **given)
    assert admission.make_sampler(request) == make_sampler(1.0, seed=7, xtc_special_tokens=[1, 2], **given)


# Clients that wait


def request_of():
    request = Request("text", "a", [], None, None)
    request.args = SimpleNamespace(model="m", seed=None, sampling=SimpleNamespace(temperature=0.0))
    request.key, request.encoded = KEY, Prompt([0] * 8)
    return request


@pytest.fixture
def encoded(monkeypatch):
    """Every prompt is one token."""
    monkeypatch.setattr(frontend, "encode", lambda *_: Prompt([1]))


def frontend_of(is_alive=True):
    """Without a generation thread."""
    engine = generation.Engine.__new__(generation.Engine)
    engine.clients, engine.metrics = Clients(), Metrics()
    models = SimpleNamespace(drafts=False, resolve=lambda model: KEY, tokenizers={KEY: "a tokenizer"})
    engine.admission = SimpleNamespace(models=models, caches=None, account=None)
    engine.thread, engine.error = SimpleNamespace(is_alive=lambda: is_alive), None
    return Frontend(options_of(), engine)


def test_waiting_client_is_told_by_the_clock(monkeypatch, encoded):
    monkeypatch.setattr(frontend, "KEEP_ALIVE", 0.005)
    f = frontend_of()
    start, step = STARTED, Delta([], 1, "stop")

    async def run():
        """Stands for the generation thread as well, which is at work on another request, then reads, then answers."""
        found = []
        async for _, item in f.generate([request_of()]):
            found.append(item)
            (request,) = f.clients.arriving.queue
            for response in {2: [Waiting(5, 10), Waiting(7, 10)], 3: [start], 5: [step, None]}.get(len(found), []):
                request.send(response)
        return found

    found = asyncio.run(run())
    assert found[:3] == [Waiting(0, 0), Waiting(0, 0), Waiting(7, 10)]  # the latest, once
    assert [item for item in found if not isinstance(item, Waiting)] == [start, step]
    assert not f.clients.open


def test_the_end_of_the_server_has_a_limit(monkeypatch):
    """A disk that does not answer keeps the generation thread, and nobody else."""
    answers, close = threading.Event(), Stores.close
    monkeypatch.setattr(Stores, "close", lambda stores: (answers.wait(60), close(stores)))
    monkeypatch.setattr(generation, "STOP", 0.2)
    with Engine("--model", TRAINED) as engine:
        assert not engine.engine.stop_and_join()
        assert not engine.engine.stop_and_join()
        answers.set()
        engine.engine.thread.join(60)
        assert engine.engine.stop_and_join()


def test_a_generation_thread_that_has_ended_ends_the_waiting(monkeypatch, encoded):
    monkeypatch.setattr(frontend, "POLL", 0.001)
    f = frontend_of(is_alive=False)
    with pytest.raises(ApiError) as e:
        asyncio.run(anext(f.generate([request_of()])))
    assert (e.value.status, f.clients.open) == (503, set())


def test_fail_all_ends_what_is_open(encoded):
    f = frontend_of()

    async def run():
        waiting = [asyncio.ensure_future(anext(f.generate([request_of()]))) for _ in range(3)]
        while len(f.clients.open) < 3:
            await asyncio.sleep(0)
        await in_thread(f.clients.fail_all, ApiError(503, "Rank 1 has died."))
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert [str(e) for e in asyncio.run(run())] == ["Rank 1 has died."] * 3
    assert not f.clients.open


async def wait_and_fail(request):
    for n in (0, 4):
        yield Waiting(n, 9)
    raise ApiError(503, "Rank 1 has died.")


def test_each_api_says_that_it_waits_and_fails():
    """A stream begins before it is known whether there will be an answer: an error is then one of its events."""
    client = client_of(wait_and_fail)
    answer = client.post(requests.TEXT, json={"prompt": "a", "stream": True})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
    comments, event, done = re.fullmatch(r"((?:: .*\n\n)+)data: (.*)\n\ndata: (.*)\n\n", answer.text).groups()
    assert (comments, done) == (": keepalive 0/9\n\n: keepalive 4/9\n\n", "[DONE]")
    assert json.loads(event)["error"]["message"] == "Rank 1 has died."
    # In chats, each line is an event, which has the form of the others.
    answer = client.post(requests.CHAT, json={"messages": requests.ASK, "stream": True})
    *waiting, event, done = re.findall(r"data: (.*)\n\n", answer.text)
    assert "".join(f"data: {x}\n\n" for x in (*waiting, event, done)) == answer.text
    chunks = [json.loads(chunk) for chunk in waiting]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant"}, {}]
    assert [chunk["prompt_progress"] for chunk in chunks] == [{"processed": n, "total": 9} for n in (0, 4)]
    assert ({chunk["object"] for chunk in chunks}, done) == ({"chat.completion.chunk"}, "[DONE]")
    assert json.loads(event)["error"]["message"] == "Rank 1 has died."
    for path, body, waiting, event in (
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, "event: ping", "error"),
        ("/v1/responses", {"input": "a"}, ": keepalive 0/9", "response.failed"),
    ):
        answer = client.post(path, json={**body, "stream": True})
        assert answer.text.startswith(waiting), path
        *_, last = answer.text.strip().split("\n\n")
        assert last.startswith(f"event: {event}\n"), path
        assert "Rank 1 has died." in last, path
    answer = client.post(requests.TEXT, json={"prompt": "a"})  # no byte before the status of one that is no stream
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "Rank 1 has died.")


def test_the_log_and_the_page_are_told_how_much_of_a_prompt_is_processed(caplog):
    seen = []

    async def answer(request):
        health = next(route.endpoint for route in client.app.routes if getattr(route, "path", "") == "/health")
        for item in (Waiting(2_048, 27_900), Delta([], 1, "stop")):
            yield item
            await asyncio.sleep(0.01)
            seen.append(json.loads((await health()).body).get("prompts"))

    client = client_of(answer)
    with caplog.at_level("INFO"):
        client.post(requests.TEXT, json={"prompt": "a"})
        client.get("/health")
    assert seen == [[{"processed": 2_048, "total": 27_900}], None]
    assert re.search(r"Request \d+: 2,048 of 27,900 prompt tokens processed", caplog.text)
    assert not re.search(r"root:.*/health", caplog.text)


# Errors of requests

ERRORS = pytest.mark.parametrize(("error", "status"), [(MTPError("Mend it."), 400), (ValueError("[matmul] no"), 500)])


@ERRORS
def test_a_request_that_the_client_cannot_mend_is_logged(caplog, error, status):
    async def fail(request):
        raise error
        yield

    client = client_of(fail)
    client._transport.raise_server_exceptions = False
    answer = client.post(requests.TEXT, json={"prompt": "a"})
    assert (answer.status_code, str(error) in answer.text) == (status, True)
    assert any(record.exc_info for record in caplog.records) is (status == 500)


@ERRORS
def test_a_prompt_that_the_client_cannot_mend_is_no_400(error, status):
    kind = ApiError if status == 400 else ValueError
    with pytest.raises(kind, match=re.escape(str(error))) as raised, _errors_of(request_of()):
        raise error
    assert getattr(raised.value, "status", 500) == status


@ERRORS
def test_an_answer_that_the_client_cannot_mend_is_logged(caplog, error, status):
    engine, request, said = frontend_of().engine, request_of(), []
    engine.running, request.send, engine.n_failures = {0: request}, said.append, 0
    engine._answer(SimpleNamespace(uid=0, error=error), None, None)
    assert [e.status for e in said] == [status]
    assert any(record.exc_info for record in caplog.records) is (status == 500)


# Clients that leave


def test_a_client_that_leaves_before_its_turn_is_dropped():
    """Whatever runs: its turn may be far away."""
    engine, said = frontend_of().engine, []
    first, second = request_of(), request_of()
    engine.waiting, engine.running = deque([first, second]), {}
    first.send, first.is_gone = said.append, True
    _, gone = engine.clients.changes(engine.waiting, is_idle=False)
    assert gone == {first.number}
    engine._drop(gone)
    assert [*engine.waiting] == [second]
    assert [str(e) for e in said] == ["The client has disconnected."]


def test_an_error_where_a_client_leaves_ends_what_runs_and_not_the_thread():
    engine, said, restarts = frontend_of().engine, [], []

    def remove(*args, **kwargs):
        fail(mx.zeros((1, 8)))

    engine.ranks, engine.waiting, engine.n_failures = None, deque(), 0
    engine.running = {i: request_of() for i in range(2)}
    engine.admission.batch = SimpleNamespace(remove=remove)
    engine.admission.restart = lambda: restarts.append(True)
    for request in engine.running.values():
        request.send = said.append
    with pytest.raises(ValueError, match="This sampler fails") as e:
        engine._drop({engine.running[0].number})
    engine._recover(e.value)
    assert ([e.status for e in said], len(restarts), engine.running) == ([500, 500], 1, {})
    mx.eval(mx.random.uniform())  # the error has left a random state that nothing could be drawn from


# Connections


async def answer_ok(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def test_a_connection_whose_header_is_never_complete_is_closed(monkeypatch):
    """One that has no bytes, one that has some, and one whose second request has some. Idle ones stay."""
    monkeypatch.setattr(serve, "HEADER", 0.2)

    async def main():
        config = uvicorn.Config(answer_ok, http=serve.Protocol, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        with serve.listen("127.0.0.1", 0) as s:
            running, port = asyncio.create_task(server.serve(sockets=[s])), s.getsockname()[1]
            whole, part = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"GET / HTTP/1.1\r\nHo"
            for sent in (b"", part, whole + part):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                data = await asyncio.wait_for(reader.read(), 20)  # up to the end of the connection
                assert data.count(b"200 OK") == sent.count(whole)
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for pause in (0.0, 0.5):
                await asyncio.sleep(pause)
                writer.write(whole)
                assert (await asyncio.wait_for(reader.readuntil(b"ok"), 20)).startswith(b"HTTP/1.1 200")
            writer.close()
            server.should_exit = True
            await running

    asyncio.run(main())
