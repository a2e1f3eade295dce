"""The server on two ranks gives the answers of plain mlx-lm in one process, whatever its clients do."""

import json
import pickle
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from shutil import copytree
from types import SimpleNamespace

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.checkpoint import DEMO
from mlx_mtp.core.distributed import LOST
from mlx_mtp.server.engine.engine import Clients
from mlx_mtp.server.request import Request, drop
from tests.support import checkpoints
from tests.support.decoding import text_alone
from tests.support.requests import options_of
from tests.support.server_process import Server, serve

PROMPTS = [f"class Tree{i}:\n" for i in range(5)]
LONG = "".join(f"def add_{i}(a, b):\n    return a + b + {i}\n\n\n" for i in range(5))
FLAGS = ["--mtp", "--prefill-step-size", "48", "--prompt-cache-bytes", "12MB"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The first layers of the demo, in float32, in which ranks compute the numbers of one process."""
    folder = copytree(DEMO, tmp_path_factory.mktemp("float32") / "demo")
    checkpoints.first_layers(folder, 4)
    checkpoints.edit(folder, lambda weights: weights.update({n: w.astype(mx.float32) for n, w in weights.items()}))
    return str(folder)


@pytest.fixture(scope="module")
def alone(checkpoint):
    return partial(text_alone, *mlx_mtp.load(checkpoint))


def text_from(server: Server, prompt: str, max_tokens: int = 12, **body) -> str:
    return server.complete(prompt, max_tokens, **body)["choices"][0]["text"]


def several_at_once(server, alone):
    """One of them is sampled."""
    options = [{}, {"temperature": 0.8, "seed": 2}]

    def answer(i: int) -> str:
        return text_from(server, PROMPTS[i], 4 * i + 8, **options[i])

    with server.begin(PROMPTS[0]), ThreadPoolExecutor(2) as pool:  # both beside this one, at least
        assert list(pool.map(answer, range(2))) == [alone(PROMPTS[i], 4 * i + 8, **options[i]) for i in range(2)]
    server.until_idle()
    metrics = server.metrics()
    assert metrics['mlx_mtp_steps_total{requests="2"}'] > 0
    assert metrics["mlx_mtp_requests_in_flight"] == metrics["mlx_mtp_queue_length"] == 0


def a_long_prompt_beside_an_answer(server, alone):
    with ThreadPoolExecutor(2) as pool:
        short = pool.submit(text_from, server, PROMPTS[1], 24)
        long = pool.submit(text_from, server, LONG, 4)
        assert (short.result(), long.result()) == (alone(PROMPTS[1], 24), alone(LONG, 4))


def the_next_turn_reuses_the_cache(server, alone):
    answer = text_from(server, PROMPTS[3])
    assert answer == alone(PROMPTS[3])
    before = server.metrics()["mlx_mtp_cached_prompt_tokens_total"]
    assert text_from(server, PROMPTS[3] + answer) == alone(PROMPTS[3] + answer)
    assert server.metrics()["mlx_mtp_cached_prompt_tokens_total"] > before


def a_hang_up_ends_the_request_alone(server, alone):
    before = server.metrics()["mlx_mtp_generated_tokens_total"]
    with ThreadPoolExecutor(1) as pool, server.begin(PROMPTS[0]) as s:
        other = pool.submit(text_from, server, PROMPTS[2], 20)
        s.close()
        assert other.result() == alone(PROMPTS[2], 20)
    server.until_idle()
    assert server.metrics()["mlx_mtp_generated_tokens_total"] < before + 5000


def a_failing_request_fails_alone(server, alone):
    for _ in range(2):
        assert server.request("/v1/completions", {"prompt": "a", "max_tokens": 4, "temperature": 1.25})[0] == 500
        sampled = {"temperature": 0.8, "seed": 3}
        assert text_from(server, PROMPTS[4], 4, **sampled) == alone(PROMPTS[4], 4, **sampled)
    assert server.request("/v1/completions", {"prompt": "a", "max_tokens": 4, "temperature": 1.0})[0] == 200


@pytest.mark.parametrize(
    ("flags", "rank"), [([], 0), pytest.param(["--pipeline"], 1, marks=pytest.mark.slow)], ids=["tensor", "pipeline"]
)
def test_two_ranks_answer_as_one_process(tmp_path, checkpoint, alone, flags, rank):
    """One server, since a rank that waits for the other spins; a signal to any rank lets an open answer end."""
    scripted = "tests.support.scripted_server"
    with serve(tmp_path / "log", "--model", checkpoint, *FLAGS, *flags, module=scripted, ranks=2) as s:
        several_at_once(s, alone)
        a_long_prompt_beside_an_answer(s, alone)
        the_next_turn_reuses_the_cache(s, alone)
        a_hang_up_ends_the_request_alone(s, alone)
        a_failing_request_fails_alone(s, alone)
        with s.begin(PROMPTS[0], 150) as unfinished:
            s.processes[rank].send_signal(signal.SIGTERM)
            answer = unfinished.makefile("rb").read()
        body, end = b"data: [DONE]\n\n\r\n", b"0\r\n\r\n"  # the last chunk, and the end of a chunked answer
        assert answer.endswith(body + end)
        assert s.statuses() == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--pipeline"]], ids=["tensor", "pipeline"])
def test_a_restart(tmp_path, checkpoint, alone, flags):
    """Each rank has its part on disk. Where one has lost it, all of them read the prompt again."""
    flags = ["--model", checkpoint, *FLAGS, *flags, "--prompt-cache-dir", str(tmp_path / "prompts")]
    n_cached = []
    for i in range(3):
        if i == 2:
            shutil.rmtree(tmp_path / "prompts" / "rank1")
        with serve(tmp_path / "log", *flags, ranks=2) as s:
            assert text_from(s, LONG) == alone(LONG)
            n_cached.append(s.metrics()["mlx_mtp_cached_prompt_tokens_total"])
            s.stop()
            assert s.statuses() == [0, 0]
    assert n_cached[0] == n_cached[2] == 0 < n_cached[1]


@pytest.fixture
def rank_1(monkeypatch):
    """What rank 1 of 2 knows of the clients, while a request runs; and what each rank's numbers at the exchanges are."""
    request = Request("text", "a prompt", [], None, None)
    request.send = lambda item: None
    ranks = SimpleNamespace(rank=1, group=None, broadcast=lambda _: pickle.loads(pickle.dumps(([request], {5}))))
    clients = Clients(ranks)
    clients.checksum = 7
    clients.numbers, clients.n_exchanges = [[0, 0, 7], [0, 0, 7]], 0

    def all_gather(mine, group):
        assert mine.shape == (1, 3)
        clients.n_exchanges += 1
        return mx.array(clients.numbers, mx.uint32)

    monkeypatch.setattr(mx.distributed, "all_gather", all_gather)
    return clients


def turns(clients, n):
    return [clients.changes([], is_idle=False) for _ in range(n)]


def test_one_exchange_in_four_turns_and_one_behind_a_part_of_a_prompt(rank_1):
    assert not any(map(any, turns(rank_1, 40)))
    assert rank_1.n_exchanges == 10
    rank_1.numbers[0][0] = 1
    *others, last = turns(rank_1, 4)
    assert not any(map(any, others))
    (request,), gone = last
    assert gone == {5}
    assert (request.request_type, request.prompt) == ("text", "")  # its tokens are sent, not its text
    assert request.send is drop
    rank_1.after_step([SimpleNamespace(uid=0)], [])
    first, second = turns(rank_1, 2)
    assert first[1] == {5}
    assert not any(second)


def test_any_rank_stops_all(rank_1):
    rank_1.numbers[0][1] = 1
    assert turns(rank_1, 4)[3] is None


def test_names_the_rank_that_differs(rank_1):
    """By what has been generated."""
    other, same = Clients(rank_1.ranks), Clients(rank_1.ranks)
    for clients, token in ((rank_1, 3), (same, 3), (other, 4)):
        clients.checksum = 0
        clients.after_step([], [SimpleNamespace(uid=0, token=token)])
    assert rank_1.checksum == same.checksum != other.checksum
    rank_1.numbers = [[0, 0, rank_1.checksum], [0, 0, other.checksum]]
    with pytest.raises(RuntimeError, match="Ranks 1 have"):
        turns(rank_1, 4)


@pytest.mark.parametrize("flags", ["--draft-model x", "--serve-model x", "--allow-any-model"])
def test_refuses_what_ranks_cannot_serve(monkeypatch, flags):
    monkeypatch.setattr(mx.distributed, "init", lambda: SimpleNamespace(size=lambda: 2, rank=lambda: 0))
    with pytest.raises(ValueError, match=flags.split()[0]):
        options_of(*flags.split())


@pytest.mark.slow
def test_no_answer_looks_whole_where_a_rank_dies(tmp_path, checkpoint):
    with serve(tmp_path / "log", "--model", checkpoint, *FLAGS, ranks=2) as s, ThreadPoolExecutor(1) as pool:
        with s.begin(PROMPTS[0]) as unfinished:
            assert unfinished.recv(4) == b"HTTP"
            whole = pool.submit(s.request, "/v1/completions", {"prompt": PROMPTS[1], "max_tokens": 5000})
            while s.metrics()["mlx_mtp_requests_in_flight"] < 2:
                time.sleep(0.02)
            s.processes[1].kill()
            answer = unfinished.makefile("rb").read()
        *_, last, done = re.findall(rb"^data: (.*)$", answer, re.MULTILINE)
        assert done == b"[DONE]"
        assert json.loads(last)["error"]["type"] == "server_error"
        status, content = whole.result()
        assert status >= 500
        assert content["error"]["type"] == "server_error"
        assert 0 not in s.statuses()
        assert LOST in s.log.read_text()
