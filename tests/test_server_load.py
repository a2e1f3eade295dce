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
from tests.support.models import TRAINED, model_of
from tests.support.prompt_store import TEXT, read
from tests.support.requests import KEY, admission_with, body_with, client_of, frontend_of, options_of, request_of, text
from tests.test_server_images import TEMPLATE, part, png, user

PROMPT = {"prompt": "a"}


def body_of(path, **fields):
    """A body of an API with a question, or for a text a prompt."""
    return body_with(path, "a" if path == requests.TEXT else requests.ASK, **fields)


# Prompt caches


@pytest.fixture
def keeping():
    """An admission that keeps prompts in a store, beside a batch whose bytes a test gives."""
    caches = Stores(options_of("--mtp"))
    caches.use(KEY, model_of("qwen3_5"), SimpleNamespace(has_chat_template=False), 1 << 30)
    admission = Admission(caches.options, None, caches, None, None)
    admission.batch = SimpleNamespace(prompt_cache_nbytes=0)
    admission.max_cache_bytes = 1 << 30
    return admission


def keep(admission, n):
    """Keep the prompt cache of a request for the first n tokens of a text."""
    request = request_of()
    request.encoded = Prompt(TEXT)
    admission.keep(request, read(model_of("qwen3_5"), TEXT[:n]), TEXT[:n])


def test_bytes_of_running_requests_count(keeping):
    keep(keeping, 4)
    keep(keeping, 8)
    both, kept = keeping.caches.nbytes, []

    for left in (both, both - 1, 1):
        keeping.batch.prompt_cache_nbytes = keeping.max_cache_bytes - left
        keeping.make_room()
        kept.append(keeping.caches.nbytes)

    assert both == kept[0] > kept[1] > kept[2] == 0


def test_a_prompt_is_kept_where_running_requests_leave_room(keeping):
    keep(keeping, 8)
    needed = keeping.caches.nbytes
    keeping.caches.trim_to(0)

    for left, kept in ((needed - 1, 0), (needed, needed)):
        keeping.batch.prompt_cache_nbytes = keeping.max_cache_bytes - left
        keep(keeping, 8)

        assert keeping.caches.nbytes == kept


# Requests that are too many, or too large


def test_no_more_than_max_queue_wait():
    """The second request comes while the first one waits."""
    arrived, refused = [], []

    def ask():
        return client.post(requests.TEXT, json=PROMPT)

    async def generate(request):
        arrived.append(request)
        if len(arrived) == 1:
            refused.append(await in_thread(ask))
        yield STARTED
        yield Delta([], 1, "stop")

    client = client_of(generate, "--max-queue", "1")

    answered = [ask(), ask()]

    assert [answer.status_code for answer in refused + answered] == [429, 200, 200]
    assert refused[0].json()["error"] == {
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
        "message": "1 requests are waiting: try again later.",
    }
    assert refused[0].headers["Retry-After"].isdigit()


def test_who_waits_for_memory_or_for_another_model():
    admission = admission_with(model_of("qwen3_5"))
    admission.account.left = admission.need(request_of(), [request_of()])
    of_another_model = request_of()
    of_another_model.key = ("another", None)

    assert [admission.fits(request_of(), [request_of()] * n) for n in range(3)] == [True, True, False]
    assert [admission.fits(of_another_model, [request_of()] * n) for n in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("room", "context", "told"), [(511, 9000, 511), (511, 300, 300), (0, 9000, 0), (511, None, None)]
)
def test_the_longest_text_that_is_admitted_is_the_context_that_clients_are_told(room, context, told):
    admission = admission_with(model_of("qwen3_5"))
    admission.account.left = admission.need(request_of(room)) - (room == 0)

    assert longest_text(admission, context) == told


# Clients that wait


@pytest.fixture
def one_token(monkeypatch):
    """Every prompt is one token."""
    monkeypatch.setattr(frontend, "encode", lambda *_: Prompt([1]))


def test_waiting_client_is_told_by_the_clock(monkeypatch, one_token):
    monkeypatch.setattr(frontend, "KEEP_ALIVE", 0.005)
    end = Delta([], 1, "stop")
    sent = {2: [Waiting(5, 10), Waiting(7, 10)], 3: [STARTED], 5: [end, None]}  # behind so many received items

    async def receive(server):
        """Stands for the generation thread as well, which is at work on another request, then reads, then answers."""
        received = []
        async for _, item in server.generate([request_of()]):
            received.append(item)
            (request,) = server.engine.clients.arriving.queue
            for response in sent.get(len(received), []):
                request.send(response)
        return received

    received = asyncio.run(receive(frontend_of()))

    assert received[:3] == [Waiting(0, 0), Waiting(0, 0), Waiting(7, 10)]  # the latest, once
    assert [item for item in received if not isinstance(item, Waiting)] == [STARTED, end]


def test_the_end_of_the_server_has_a_limit(monkeypatch):
    """A disk that does not answer keeps the generation thread, and nobody else."""
    disk_answers = threading.Event()
    close = Stores.close
    monkeypatch.setattr(Stores, "close", lambda stores: (disk_answers.wait(60), close(stores)))
    monkeypatch.setattr(generation, "STOP", 0.2)
    with Engine("--model", TRAINED) as engine:
        stopped = [engine.engine.stop_and_join() for _ in range(2)]
        disk_answers.set()
        engine.engine.thread.join(60)
        stopped.append(engine.engine.stop_and_join())

    assert stopped == [False, False, True]


@pytest.mark.parametrize(("is_alive", "message"), [(True, "Rank 1 has died."), (False, "The server is stopping.")])
def test_what_ends_those_that_wait(monkeypatch, one_token, is_alive, message):
    """The end of the generation thread, and an error for all of them."""
    monkeypatch.setattr(frontend, "POLL", 0.001)

    async def wait(server):
        waiting = [asyncio.ensure_future(anext(server.generate([request_of()]))) for _ in range(3)]
        if is_alive:
            while server.engine.clients.arriving.qsize() < 3:
                await asyncio.sleep(0)
            await in_thread(server.engine.clients.fail, (), message)
        return await asyncio.gather(*waiting, return_exceptions=True)

    errors = asyncio.run(wait(frontend_of(is_alive=is_alive)))

    assert [(error.status, str(error)) for error in errors] == [(503, message)] * 3


@pytest.fixture
def failing():
    """A client of a server that waits, and then fails."""

    async def wait_and_fail(request):
        for n in (0, 4):
            yield Waiting(n, 9)
        raise ApiError(503, "Rank 1 has died.")

    return client_of(wait_and_fail)


def events_of(client, path):
    """Those of a stream, which begins before it is known whether there will be an answer."""
    answer = client.post(path, json=body_of(path, stream=True))
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
    *events, end = answer.text.split("\n\n")
    assert end == ""
    return events


def data_of(event):
    return json.loads(event.removeprefix("data: "))


def test_a_stream_of_completions_waits_and_fails(failing):
    *waiting, error, done = events_of(failing, requests.TEXT)

    assert [*waiting, done] == [": keepalive 0/9", ": keepalive 4/9", "data: [DONE]"]
    assert data_of(error)["error"]["message"] == "Rank 1 has died."


def test_a_stream_of_chat_waits_and_fails(failing):
    """Each line is an event, which has the form of the others."""
    *waiting, error, done = events_of(failing, requests.CHAT)

    chunks = [data_of(event) for event in waiting]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant"}, {}]
    assert [chunk["prompt_progress"] for chunk in chunks] == [{"processed": n, "total": 9} for n in (0, 4)]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert data_of(error)["error"]["message"] == "Rank 1 has died."
    assert done == "data: [DONE]"


@pytest.mark.parametrize(
    ("path", "begin", "end"),
    [
        (requests.MESSAGES, "event: ping", "event: error\n"),
        (requests.RESPONSES, ": keepalive 0/9", "event: response.failed\n"),
    ],
)
def test_a_stream_of_other_apis_waits_and_fails(failing, path, begin, end):
    first, *_, last = events_of(failing, path)

    assert first.startswith(begin)
    assert last.startswith(end)
    assert "Rank 1 has died." in last


def test_an_answer_that_is_no_stream_has_no_byte_before_its_status(failing):
    answer = failing.post(requests.TEXT, json=PROMPT)

    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "Rank 1 has died.")


def test_the_log_and_the_page_are_told_how_much_of_a_prompt_is_processed(caplog):
    seen = []

    async def generate(request):
        for item in (Waiting(2_048, 27_900), Delta([], 1, "stop")):
            yield item
            await asyncio.sleep(0.01)
            health = await in_thread(client.get, "/health")
            seen.append(health.json().get("prompts"))

    client = client_of(generate)

    with caplog.at_level("INFO"):
        client.post(requests.TEXT, json=PROMPT)

    assert seen == [[{"processed": 2_048, "total": 27_900}], None]
    assert re.search(r"Request \d+: 2,048 of 27,900 prompt tokens processed", caplog.text)
    assert not re.search(r"root:.*/health", caplog.text)


# Errors of requests


cannot_mend = pytest.mark.parametrize(
    ("error", "status"), [(MTPError("Mend it."), 400), (ValueError("[matmul] no"), 500)]
)


def assert_logged(caplog, status):
    """An error that the client cannot mend is logged with its traceback, and no other is."""
    assert any(record.exc_info for record in caplog.records) is (status == 500)


@cannot_mend
def test_an_error_of_a_request_that_the_client_cannot_mend_is_no_400(caplog, error, status):
    async def fail(request):
        raise error
        yield

    answer = client_of(fail).post(requests.TEXT, json=PROMPT)

    assert (answer.status_code, str(error) in answer.text) == (status, True)
    assert_logged(caplog, status)


@cannot_mend
def test_an_error_of_a_prompt_that_the_client_cannot_mend_is_no_400(error, status):
    kind = ApiError if status == 400 else ValueError

    with pytest.raises(kind, match=re.escape(str(error))) as raised, _errors_of(request_of()):
        raise error

    assert getattr(raised.value, "status", 500) == status


@cannot_mend
def test_an_error_of_an_answer_that_the_client_cannot_mend_is_no_400(caplog, error, status):
    engine, request, said = frontend_of().engine, request_of(), []
    request.send = said.append
    engine.running[0] = request

    engine._answer(SimpleNamespace(uid=0, error=error), None, None)

    assert [error.status for error in said] == [status]
    assert_logged(caplog, status)


async def say_and_fail(request):
    yield STARTED
    yield Delta([Text("a")], 1, None)
    raise OSError("The disk is full.")


ERROR_EVENTS = {
    requests.CHAT: 'data: {"error": ', requests.TEXT: 'data: {"error": ', requests.MESSAGES: "event: error\n",
    requests.RESPONSES: "event: response.failed\n",
}  # fmt: skip


@pytest.mark.parametrize("path", ERROR_EVENTS)
def test_an_unexpected_error_is_an_answer_like_others(caplog, path):
    """It has the headers for browsers and is counted once; within a stream, it is an event of the API."""
    client = client_of(say_and_fail)

    with caplog.at_level("INFO"):
        answer = client.post(path, json=body_of(path), headers={"origin": "http://localhost:3000"})
        stream = client.post(path, json=body_of(path, stream=True))

    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (500, "http://localhost:3000")
    assert answer.json()["error"]["message"] == "The request failed: The disk is full."
    assert (stream.status_code, stream.headers["x-accel-buffering"]) == (200, "no")
    (event,) = [event for event in stream.text.split("\n\n") if "The disk is full." in event]
    assert event.startswith(ERROR_EVENTS[path])
    lines = [message for name, _, message in caplog.record_tuples if name == "root" and "POST" in message]
    assert [line.partition(f'"POST {path}" ')[2][:8] for line in lines] == ["500 req_", "200 req_"]
    assert 'mlx_mtp_requests_total{status="500"} 1.0' in client.get("/metrics").text
    assert sum(record.exc_info is not None for record in caplog.records) == 2
    assert "disconnected" not in caplog.text


# Clients that leave


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_error_of_sending_is_a_client_that_leaves(caplog, is_stream):
    received = [{"type": "http.request", "body": json.dumps(PROMPT | {"stream": is_stream}).encode()}]

    async def answer(request):
        yield STARTED
        yield Delta([Text("a")], 1, "stop")

    async def receive():
        if not received:
            await asyncio.Future()
        return received.pop()

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
    leaving, other = request_of(), request_of()
    engine.waiting += [leaving, other]
    leaving.send = said.append
    leaving.is_gone = True

    _, gone = engine.clients.changes(engine.waiting, is_idle=False)
    engine._drop(gone)

    assert gone == {leaving.number}
    assert [*engine.waiting] == [other]
    assert [str(error) for error in said] == ["The client has disconnected."]


# Without requests: the model's memory is freed after a while, and the weights are kept warm before

FLAGS = ["--mtp", "--num-draft-tokens", "2", "--unload-after", "60"]
ASKED = [{"role": "user", "content": "def read(path):\n    with open(path) as f:\n        return f.read()\n"}]


@pytest.fixture(scope="module")
def unloading():
    """An engine that frees its model after a minute without requests."""
    with Engine("--model", TRAINED, *FLAGS) as engine:
        yield engine


def rest(engine):
    """Let an hour pass without a request, unless nothing is loaded."""
    if engine.frontend.models.key is None:
        return
    engine.engine.last_active -= 3600
    deadline = time.monotonic() + 60
    while engine.frontend.models.key is not None or mx.get_cache_memory() > 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def n_objects():
    """The number of objects that belong to a loaded model."""
    return sum(isinstance(x, TokenizerWrapper | CheckpointReader) for x in gc.get_objects())


def test_the_weights_go_and_come_back_and_the_prompts_stay(unloading):
    """The same text from the prompt cache, the same limit of caches, and nothing grows; ``--long`` does it twenty times."""
    first = unloading.ask(ASKED, max_tokens=8)
    admission = unloading.engine.admission
    loaded, limit, n_loaded = mx.get_active_memory(), admission.max_cache_bytes, n_objects()
    answers, at_rest = [], []

    for _ in range(20 if profiles.LONG else 3):
        rest(unloading)
        at_rest.append((mx.get_active_memory(), mx.get_cache_memory(), threading.active_count()))
        answers.append(unloading.ask(ASKED, max_tokens=8))

    for answer in answers:
        assert (answer.tokens, answer.logprobs) == (first.tokens, first.logprobs)
        assert answer.n_read < 8
    assert {*at_rest[1:]} == {at_rest[1]}
    assert n_objects() <= n_loaded
    weights = sum(file.stat().st_size for file in Path(TRAINED).glob("*.safetensors"))
    assert loaded - at_rest[0][0] > 0.9 * weights  # beside what other tests of this process hold
    assert admission.max_cache_bytes == pytest.approx(limit, rel=0.05)


def is_loaded(client):
    health = client.get("/health").json()
    assert health["status"] == "ok"
    return health["loaded"]


def test_other_requests_leave_it_unloaded(unloading):
    client = unloading.client
    rest(unloading)

    statuses = [client.get(path).status_code for path in ("/health", "/v1/models", "/metrics")]
    count = client.post("/v1/messages/count_tokens", json={"messages": ASKED}).json()

    assert statuses == [200] * 3
    assert count["input_tokens"] > 0
    assert not is_loaded(client)


def test_an_answer_that_is_no_stream_loads_it(unloading):
    rest(unloading)

    answer = unloading.client.post(requests.TEXT, json=PROMPT | {"max_tokens": 2})

    assert answer.json()["choices"]
    assert is_loaded(unloading.client)


def stream_of(client, path, body):
    """The events of a stream, parsed."""
    answer = client.post(path, json=body | {"stream": True})
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


CHAT = {"messages": ASKED, "max_tokens": 2}
LOADING = {"object": "chat.completion.chunk", "status": "loading"}


@pytest.mark.parametrize(
    ("path", "body", "first"),
    [
        (requests.CHAT, CHAT, LOADING),
        (requests.TEXT, PROMPT | {"max_tokens": 2}, LOADING | {"object": "text_completion"}),
        (requests.MESSAGES, CHAT, {"type": "ping", "status": "loading"}),
    ],
)
def test_the_first_event_says_that_it_is_loaded(unloading, path, body, first):
    rest(unloading)

    of_unloaded, of_loaded = (stream_of(unloading.client, path, body) for _ in range(2))

    assert of_unloaded[0].items() >= first.items()
    assert "loading" not in str(of_loaded)
    assert is_loaded(unloading.client)


def test_a_response_is_queued_while_it_is_loaded(unloading):
    rest(unloading)
    body = {"input": "import", "max_output_tokens": 2}

    of_unloaded, of_loaded = (stream_of(unloading.client, requests.RESPONSES, body) for _ in range(2))

    assert [event["type"] for event in of_unloaded[:3]] == [
        f"response.{x}" for x in ("created", "queued", "in_progress")
    ]
    assert of_unloaded[0]["response"]["status"] == "queued"
    assert [event["type"] for event in of_loaded[:2]] == ["response.created", "response.in_progress"]
    assert "loading" not in str(of_loaded)
    assert is_loaded(unloading.client)


def test_prompts_on_disk_are_read_for_a_model_that_is_not_loaded(tmp_path):
    """Since the server has started, or of another model."""
    other = str(write_tiny(tmp_path / "other", "qwen3_5", vocab_size=4096))
    flags = ["--model", TRAINED, *FLAGS, "--prompt-cache-dir", str(tmp_path / "prompts"), "--serve-model", other]
    with Engine(*flags) as engine:
        for model in ["default_model"] * 3 + [other] * 3:  # what is asked again is worth writing
            engine.ask(ASKED, max_tokens=4, model=model)

    with Engine(*flags) as engine:
        rest(engine)
        n_cached = [engine.ask(ASKED, max_tokens=4, model=model).n_cached for model in ("default_model", other)]

    assert min(n_cached) > 0


def test_a_vision_encoder_is_freed_as_well():
    chat = [user(text("look: "), part(png(1)), text("?"))]
    with Engine("--model", str(FOLDER), *FLAGS, "--chat-template", TEMPLATE) as engine:
        first = engine.ask(chat, max_tokens=4)
        vision = engine.frontend.models.tokenizers[str(FOLDER)].vision
        unread = [vision.unread_bytes]

        rest(engine)
        unread.append(vision.unread_bytes)
        again = engine.ask(chat, max_tokens=4)

    assert unread[0] == 0 < unread[1]
    assert again.tokens == first.tokens


def test_a_model_that_cannot_be_loaded_again_fails_its_request_alone(tmp_path):
    folder = write_tiny(tmp_path / "model", "qwen3_5")
    body = {"prompt": [1, 2, 3], "max_tokens": 2}
    with Engine("--model", str(folder), *FLAGS) as engine:
        client = engine.client
        before = client.post(requests.TEXT, json=body)
        rest(engine)

        (folder / "config.json").rename(folder / "gone.json")
        failed = client.post(requests.TEXT, json=body)
        loaded = is_loaded(client)
        (folder / "gone.json").rename(folder / "config.json")
        after = client.post(requests.TEXT, json=body)

    assert [answer.status_code for answer in (before, failed, after)] == [200, 404, 200]
    assert "The model could not be loaded: " in failed.json()["error"]["message"]
    assert not loaded


@pytest.fixture(scope="module")
def idle():
    """An engine that keeps weights warm for 30 seconds, whose thread has ended: tests call what it does while it is idle."""
    with Engine("--model", TRAINED, "--mtp", "--keep-warm", "30") as engine:
        engine.engine.stop_and_join()
        engine.engine.admission.batch = object()
        yield engine.engine


@pytest.mark.parametrize(("seconds", "since_warmed", "is_warmed"), [(5, 2, True), (5, 0.5, False), (31, 2, False)])
def test_weights_are_kept_warm_for_some_seconds(idle, monkeypatch, seconds, since_warmed, is_warmed):
    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: 1000.0))

    warmed = generation.rest(idle.admission, seconds, 1000.0 - since_warmed)

    assert (warmed == 1000.0) == is_warmed
