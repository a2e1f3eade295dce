"""The server where much is asked of it at once, clients that wait and clients that leave; and where nothing is asked."""

import asyncio
import gc
import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_mtp.checkpoint.reader import CheckpointReader
from mlx_mtp.errors import MTPError
from mlx_mtp.server import frontend
from mlx_mtp.server.engine import engine as generation
from mlx_mtp.server.engine.admission import Admission, longest_text
from mlx_mtp.server.engine.encode import _errors_of
from mlx_mtp.server.engine.models import Stores
from mlx_mtp.server.frontend import in_thread
from mlx_mtp.server.request import STARTED, ApiError, Delta, Prompt, Waiting
from mlx_mtp.text.tool_calls import Text
from tests.support import profiles, requests
from tests.support.checkpoints import write_tiny
from tests.support.engine import Engine
from tests.support.image_prompts import FOLDER
from tests.support.models import TRAINED, tiny_model
from tests.support.prompt_store import TEXT, read
from tests.support.requests import KEY, admission_with, body_with, client_of, frontend_of, options_of, request_of, text
from tests.test_server_images import TEMPLATE, part, png, user

# Prompt caches


def test_bytes_of_running_requests_count():
    model, request, caches = tiny_model("qwen3_5"), request_of(), Stores(options_of("--mtp"))
    caches.use(KEY, model, SimpleNamespace(has_chat_template=False), 1 << 30)
    admission, request.encoded = Admission(caches.options, None, caches, None, None), Prompt(TEXT)
    admission.batch, admission.max_cache_bytes = SimpleNamespace(prompt_cache_nbytes=0), 1 << 30
    for n in (4, 8):
        admission.keep(request, read(model, TEXT[:n]), TEXT[:n])
    both = caches.nbytes
    admission.max_cache_bytes, admission.batch.prompt_cache_nbytes = 2 * both, 2 * both - 1
    admission.make_room()
    assert caches.nbytes == 0
    admission.batch.prompt_cache_nbytes = both
    admission.keep(request, read(model, TEXT[:8]), TEXT[:8])
    assert 0 < caches.nbytes <= both


# Requests that are too many, or too large


def test_no_more_than_max_queue_wait():
    """The second request comes while the first one waits."""
    arrived, body = [], {"prompt": "a"}

    async def generate(request):
        arrived.append(request)
        if len(arrived) == 1:
            answers.append(await in_thread(lambda: client.post(requests.TEXT, json=body)))
        yield STARTED
        yield Delta([], 1, "stop")

    client, answers = client_of(generate, "--max-queue", "1"), []
    answers += [client.post(requests.TEXT, json=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [429, 200, 200]
    error = dict(type="rate_limit_error", param=None, code="rate_limit_exceeded")
    assert answers[0].json()["error"] == error | {"message": "1 requests are waiting: try again later."}
    assert answers[0].headers["Retry-After"].isdigit()


def test_who_waits_for_memory_or_for_another_model():
    """The longest text that is admitted is the context that clients are told."""
    admission, other = admission_with(tiny_model("qwen3_5")), request_of()
    admission.account.left = admission.need(request_of(), [request_of()])
    assert [admission.fits(request_of(), [request_of()] * n) for n in range(3)] == [True, True, False]
    other.key = ("another", None)
    assert [admission.fits(other, [request_of()] * n) for n in range(2)] == [True, False]
    for n, context, want in ((511, 9000, 511), (511, 300, 300), (0, 9000, 0)):
        admission.account.left = admission.need(request_of(n)) - (n == 0)
        assert longest_text(admission, context) == want
    assert longest_text(admission, None) is None


# Clients that wait


@pytest.fixture
def encoded(monkeypatch):
    """Every prompt is one token."""
    monkeypatch.setattr(frontend, "encode", lambda *_: Prompt([1]))


def test_waiting_client_is_told_by_the_clock(monkeypatch, encoded):
    monkeypatch.setattr(frontend, "KEEP_ALIVE", 0.005)
    f = frontend_of()
    start, step = STARTED, Delta([], 1, "stop")

    async def run():
        """Stands for the generation thread as well, which is at work on another request, then reads, then answers."""
        found = []
        async for _, item in f.generate([request_of()]):
            found.append(item)
            (request,) = f.engine.clients.arriving.queue
            for response in {2: [Waiting(5, 10), Waiting(7, 10)], 3: [start], 5: [step, None]}.get(len(found), []):
                request.send(response)
        return found

    found = asyncio.run(run())
    assert found[:3] == [Waiting(0, 0), Waiting(0, 0), Waiting(7, 10)]  # the latest, once
    assert [item for item in found if not isinstance(item, Waiting)] == [start, step]


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


def test_what_ends_those_that_wait(monkeypatch, encoded):
    """The end of the generation thread, and an error for all of them."""
    monkeypatch.setattr(frontend, "POLL", 0.001)

    async def wait(f):
        waiting = [asyncio.ensure_future(anext(f.generate([request_of()]))) for _ in range(3)]
        while f.engine.is_alive and f.engine.clients.arriving.qsize() < 3:
            await asyncio.sleep(0)
        if f.engine.is_alive:
            await in_thread(f.engine.clients.fail, (), "Rank 1 has died.")
        return await asyncio.gather(*waiting, return_exceptions=True)

    for is_alive, message in ((True, "Rank 1 has died."), (False, "The server is stopping.")):
        f = frontend_of(is_alive=is_alive)
        assert [(e.status, str(e)) for e in asyncio.run(wait(f))] == [(503, message)] * 3


async def wait_and_fail(request):
    for n in (0, 4):
        yield Waiting(n, 9)
    raise ApiError(503, "Rank 1 has died.")


def test_each_api_says_that_it_waits_and_fails():
    """A stream begins before it is known whether there will be an answer: an error is then one of its events."""
    client = client_of(wait_and_fail)

    def events(path):
        answer = client.post(path, json=body_with(path, "a" if path == requests.TEXT else requests.ASK, stream=True))
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
        *found, end = answer.text.split("\n\n")
        assert end == ""
        return found

    *waiting, error, done = events(requests.TEXT)
    assert [*waiting, done] == [": keepalive 0/9", ": keepalive 4/9", "data: [DONE]"]
    *waiting, error_of_chat, done = events(requests.CHAT)  # each line is an event, which has the form of the others
    chunks = [json.loads(chunk.removeprefix("data: ")) for chunk in waiting]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant"}, {}]
    assert [chunk["prompt_progress"] for chunk in chunks] == [{"processed": n, "total": 9} for n in (0, 4)]
    assert ({chunk["object"] for chunk in chunks}, done) == ({"chat.completion.chunk"}, "data: [DONE]")
    for event in (error, error_of_chat):
        assert json.loads(event.removeprefix("data: "))["error"]["message"] == "Rank 1 has died."
    for path, first, name in (
        (requests.MESSAGES, "event: ping", "error"),
        (requests.RESPONSES, ": keepalive 0/9", "response.failed"),
    ):
        waiting, *_, last = events(path)
        assert (waiting.startswith(first), last.startswith(f"event: {name}\n")) == (True, True), path
        assert "Rank 1 has died." in last, path
    answer = client.post(requests.TEXT, json={"prompt": "a"})  # no byte before the status of one that is no stream
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "Rank 1 has died.")


def test_the_log_and_the_page_are_told_how_much_of_a_prompt_is_processed(caplog):
    async def answer(request):
        for item in (Waiting(2_048, 27_900), Delta([], 1, "stop")):
            yield item
            await asyncio.sleep(0.01)
            seen.append((await in_thread(client.get, "/health")).json().get("prompts"))

    client, seen = client_of(answer), []
    with caplog.at_level("INFO"):
        client.post(requests.TEXT, json={"prompt": "a"})
    assert seen == [[{"processed": 2_048, "total": 27_900}], None]
    assert re.search(r"Request \d+: 2,048 of 27,900 prompt tokens processed", caplog.text)
    assert not re.search(r"root:.*/health", caplog.text)


# Errors of requests


@pytest.mark.parametrize(("error", "status"), [(MTPError("Mend it."), 400), (ValueError("[matmul] no"), 500)])
def test_an_error_that_the_client_cannot_mend_is_no_400_and_logged(caplog, error, status):
    """Of a request, of a prompt, and of an answer."""

    async def fail(request):
        raise error
        yield

    def assert_logged():
        assert any(record.exc_info for record in caplog.records) is (status == 500)
        caplog.clear()

    client = client_of(fail)
    answer = client.post(requests.TEXT, json={"prompt": "a"})
    assert (answer.status_code, str(error) in answer.text) == (status, True)
    assert_logged()
    kind = ApiError if status == 400 else ValueError
    with pytest.raises(kind, match=re.escape(str(error))) as raised, _errors_of(request_of()):
        raise error
    assert getattr(raised.value, "status", 500) == status
    engine, request, said = frontend_of().engine, request_of(), []
    engine.running[0], request.send = request, said.append
    engine._answer(SimpleNamespace(uid=0, error=error), None, None)
    assert [e.status for e in said] == [status]
    assert_logged()


async def say_and_fail(request):
    yield STARTED
    yield Delta([Text("a")], 1, None)
    raise OSError("The disk is full.")


@pytest.mark.parametrize("path", [requests.CHAT, requests.TEXT, requests.MESSAGES, requests.RESPONSES])
def test_an_unexpected_error_is_an_answer_like_others(caplog, path):
    """It has the headers for browsers and is counted once; within a stream, it is an event of the API."""
    client, body = client_of(say_and_fail), body_with(path, "a" if path == requests.TEXT else requests.ASK)
    with caplog.at_level("INFO"):
        answer = client.post(path, json=body, headers={"origin": "http://localhost:3000"})
        stream = client.post(path, json=body | {"stream": True})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (500, "http://localhost:3000")
    assert answer.json()["error"]["message"] == "The request failed: The disk is full."
    assert (stream.status_code, stream.headers["x-accel-buffering"]) == (200, "no")
    (event,) = [event for event in stream.text.split("\n\n") if "The disk is full." in event]
    names = {requests.MESSAGES: "event: error\n", requests.RESPONSES: "event: response.failed\n"}
    assert event.startswith(names.get(path, 'data: {"error": '))
    lines = [message for name, _, message in caplog.record_tuples if name == "root" and "POST" in message]
    assert [line.partition(f'"POST {path}" ')[2][:8] for line in lines] == ["500 req_", "200 req_"]
    assert 'mlx_mtp_requests_total{status="500"} 1.0' in client.get("/metrics").text
    assert sum(record.exc_info is not None for record in caplog.records) == 2
    assert "disconnected" not in caplog.text


# Clients that leave


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_error_of_sending_is_a_client_that_leaves(caplog, is_stream):
    left = [{"type": "http.request", "body": json.dumps({"prompt": "a", "stream": is_stream}).encode()}]

    async def answer(request):
        yield STARTED
        yield Delta([Text("a")], 1, "stop")

    async def receive():
        if not left:
            await asyncio.Future()
        return left.pop()

    async def send(message):
        raise OSError("The connection is closed.")

    scope = {"type": "http", "method": "POST", "path": requests.TEXT, "headers": [], "query_string": b""}
    with caplog.at_level("INFO"):
        asyncio.run(client_of(answer).app(scope, receive, send))
    (line,) = caplog.messages
    assert '"POST /v1/completions" 200 req_' in line


def test_a_client_that_leaves_before_its_turn_is_dropped():
    """Whatever runs: its turn may be far away."""
    engine, said = frontend_of().engine, []
    first, second = request_of(), request_of()
    engine.waiting += [first, second]
    first.send, first.is_gone = said.append, True
    _, gone = engine.clients.changes(engine.waiting, is_idle=False)
    assert gone == {first.number}
    engine._drop(gone)
    assert [*engine.waiting] == [second]
    assert [str(e) for e in said] == ["The client has disconnected."]


# Without requests: the model's memory is freed after a while, and the weights are kept warm before

FLAGS = ["--mtp", "--num-draft-tokens", "2", "--unload-after", "60"]
ASKED = [{"role": "user", "content": "def read(path):\n    with open(path) as f:\n        return f.read()\n"}]


@pytest.fixture(scope="module")
def engine():
    with Engine("--model", TRAINED, *FLAGS) as engine:
        yield engine


def rest(engine):
    """Let an hour pass without a request."""
    engine.engine.last_active -= 3600
    deadline = time.monotonic() + 60
    while engine.frontend.models.key is not None or mx.get_cache_memory() > 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_weights_go_and_come_back_and_the_prompts_stay(engine):
    """The same text from the prompt cache, the same limit of caches, and nothing grows; ``--long`` does it twenty times."""
    first = engine.ask(ASKED, max_tokens=8)
    admission, held = engine.engine.admission, []
    loaded, limit = mx.get_active_memory(), admission.max_cache_bytes
    n_objects = sum(isinstance(x, TokenizerWrapper | CheckpointReader) for x in gc.get_objects())
    for _ in range(20 if profiles.LONG else 3):
        rest(engine)
        held.append((mx.get_active_memory(), mx.get_cache_memory(), threading.active_count()))
        again = engine.ask(ASKED, max_tokens=8)
        assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)
        assert again.n_read < 8
    assert {*held[1:]} == {held[1]}
    assert sum(isinstance(x, TokenizerWrapper | CheckpointReader) for x in gc.get_objects()) <= n_objects
    weights = sum(file.stat().st_size for file in Path(TRAINED).glob("*.safetensors"))
    assert loaded - held[0][0] > 0.9 * weights  # beside what other tests of this process hold
    assert admission.max_cache_bytes == pytest.approx(limit, rel=0.05)


def test_other_requests_leave_it_unloaded_and_the_first_event_says_that_it_is_loaded(engine):
    client = engine.client
    messages, most = {"messages": ASKED}, {"max_tokens": 2}
    chunk = {"object": "chat.completion.chunk", "status": "loading"}
    for path, body, first in (
        (requests.CHAT, messages | most, chunk),
        (requests.TEXT, {"prompt": "import os\n"} | most, chunk | {"object": "text_completion"}),
        (requests.MESSAGES, messages | most, {"type": "ping", "status": "loading"}),
        (requests.RESPONSES, {"input": "import", "max_output_tokens": 2}, {"type": "response.created"}),
    ):
        rest(engine)
        for other in ("/health", "/v1/models", "/metrics"):
            assert client.get(other).status_code == 200
        assert client.post("/v1/messages/count_tokens", json=messages).json()["input_tokens"] > 0
        assert client.get("/health").json() == {"status": "ok", "loaded": False}
        streams = []
        for _ in range(2):
            answer = client.post(path, json={**body, "stream": True})
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            streams.append([json.loads(event) for event in events])
        assert client.get("/health").json() == {"status": "ok", "loaded": True}
        assert streams[0][0].items() >= first.items(), path
        assert "loading" not in str(streams[1]), path
    kinds = [[event["type"].partition(".")[2] for event in stream] for stream in streams]  # of Responses
    assert streams[0][0]["response"]["status"] == "queued"
    assert (kinds[0][:3], kinds[1][:2]) == (["created", "queued", "in_progress"], ["created", "in_progress"])
    rest(engine)
    assert client.post(requests.TEXT, json={"prompt": "import os\n", **most}).json()["choices"]


def test_prompts_on_disk_are_read_for_a_model_that_is_not_loaded(tmp_path):
    """Since the server has started, or of another model."""
    other = str(write_tiny(tmp_path / "other", "qwen3_5", vocab_size=4096))
    flags = ["--model", TRAINED, *FLAGS, "--prompt-cache-dir", str(tmp_path / "prompts"), "--serve-model", other]
    with Engine(*flags) as engine:
        for model in ["default_model"] * 3 + [other] * 3:  # what is asked again is worth writing
            engine.ask(ASKED, max_tokens=4, model=model)
    with Engine(*flags) as engine:
        rest(engine)
        assert engine.ask(ASKED, max_tokens=4).n_cached > 0
        assert engine.ask(ASKED, max_tokens=4, model=other).n_cached > 0


def test_a_vision_encoder_is_freed_as_well():
    with Engine("--model", str(FOLDER), *FLAGS, "--chat-template", TEMPLATE) as engine:
        chat = [user(text("look: "), part(png(1)), text("?"))]
        first = engine.ask(chat, max_tokens=4)
        vision = engine.frontend.models.tokenizers[str(FOLDER)].vision
        assert vision.unread_bytes == 0
        rest(engine)
        assert vision.unread_bytes > 0
        assert engine.ask(chat, max_tokens=4).tokens == first.tokens


def test_a_model_that_cannot_be_loaded_again_fails_its_request_alone(tmp_path):
    folder = write_tiny(tmp_path / "model", "qwen3_5")
    with Engine("--model", str(folder), *FLAGS) as engine:
        client = engine.client
        body = {"prompt": [1, 2, 3], "max_tokens": 2}
        assert client.post(requests.TEXT, json=body).status_code == 200
        rest(engine)
        (folder / "config.json").rename(folder / "gone.json")
        answer = client.post(requests.TEXT, json=body)
        assert (answer.status_code, client.get("/health").json()["loaded"]) == (404, False)
        assert "The model could not be loaded: " in answer.json()["error"]["message"]
        (folder / "gone.json").rename(folder / "config.json")
        assert client.post(requests.TEXT, json=body).status_code == 200


def test_weights_are_kept_warm_for_some_seconds():
    with Engine("--model", TRAINED, "--mtp", "--keep-warm", "30") as engine:
        thread = engine.engine
        thread.stop_and_join()  # the rest is called here
        thread.admission.batch = object()
        for seconds, last, is_warmed in ((5, 2, True), (5, 0.5, False), (31, 2, False)):
            thread.warmed = before = time.monotonic() - last
            thread._rest(seconds)
            assert (thread.warmed > before) == is_warmed
