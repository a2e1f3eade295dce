"""A server without requests: it frees the model's memory after a while, and keeps the weights warm before."""

import gc
import json
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from starlette.testclient import TestClient

from mlx_mtp.checkpoint.reader import CheckpointReader
from mlx_mtp.server.app import make_app
from mlx_mtp.server.command_line import check, make_parser
from tests.support import profiles
from tests.support.checkpoints import write_tiny
from tests.support.engine import Engine
from tests.support.image_prompts import FOLDER
from tests.support.models import TRAINED
from tests.test_server_images import TEMPLATE, part, png, text, user

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
    client = TestClient(make_app(engine.frontend), base_url="http://localhost")
    messages, most = {"messages": ASKED}, {"max_tokens": 2}
    for path, body, first in (
        ("/v1/chat/completions", messages | most, {"object": "chat.completion.chunk", "status": "loading"}),
        ("/v1/completions", {"prompt": "import os\n"} | most, {"object": "text_completion", "status": "loading"}),
        ("/v1/messages", messages | most, {"type": "ping", "status": "loading"}),
        ("/v1/responses", {"input": "import", "max_output_tokens": 2}, {"type": "response.created"}),
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
        if path == "/v1/responses":
            kinds = [[event["type"].partition(".")[2] for event in stream] for stream in streams]
            assert streams[0][0]["response"]["status"] == "queued"
            assert (kinds[0][:3], kinds[1][:2]) == (["created", "queued", "in_progress"], ["created", "in_progress"])
    rest(engine)
    assert client.post("/v1/completions", json={"prompt": "import os\n", **most}).json()["choices"]


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
        client = TestClient(make_app(engine.frontend), base_url="http://localhost")
        body = {"prompt": [1, 2, 3], "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200
        rest(engine)
        (folder / "config.json").rename(folder / "gone.json")
        answer = client.post("/v1/completions", json=body)
        assert (answer.status_code, client.get("/health").json()["loaded"]) == (404, False)
        assert "The model could not be loaded: " in answer.json()["error"]["message"]
        (folder / "gone.json").rename(folder / "config.json")
        assert client.post("/v1/completions", json=body).status_code == 200


def test_weights_are_kept_warm_for_some_seconds():
    with Engine("--model", TRAINED, "--mtp", "--keep-warm", "30") as engine:
        thread = engine.engine
        engine.close()  # the rest is called here
        thread.admission.batch = object()
        for seconds, last, is_warmed in ((5, 2, True), (5, 0.5, False), (31, 2, False)):
            thread.warmed = before = time.monotonic() - last
            thread._rest(seconds)
            assert (thread.warmed > before) == is_warmed


def test_flags_are_checked():
    for flag, message in (
        ("--unload-after=0", "0.01 or more"),
        ("--keep-warm=-1", "0 or more"),
        ("--keep-warm=nan", "0 o"),
    ):
        with pytest.raises(ValueError, match=f"{flag.partition('=')[0]} must be {message}"):
            check(make_parser().parse_args([flag]))
