"""How much of a prompt is read between two steps, on machines that exist in numbers alone."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, call

import mlx.core as mx
import pytest

from mlx_mtp import BatchGenerator
from mlx_mtp.core.batch import scheduler
from mlx_mtp.core.batch.scheduler import PrefillBudget
from tests.support.batches import run
from tests.support.decoding import plain
from tests.support.models import tiny_model


@dataclass
class Machine:
    """Reads n tokens behind ``n_cached`` others in ``overhead + n * (token + context * n_cached)`` seconds."""

    overhead: float
    token: float
    context: float = 0.0
    step: float = 0.03

    def seconds(self, n: int, n_cached: int) -> float:
        return self.overhead + n * (self.token + self.context * n_cached)


CPU, LAPTOP = Machine(0.01, 1 / 140), Machine(0.15, 1 / 300, 2e-8)
GPU = Machine(0.01, 1 / 12_000, 1e-10, step=0.01)
LONG = Machine(0.02, 1 / 2000, 2e-8)  # half the speed at 25,000 tokens
MACHINES = {"cpu": CPU, "laptop": LAPTOP, "gpu": GPU, "long": LONG}
every_machine = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)


def read(budget, machine, n_prompt, is_running, n_cached=0):
    """Read a prompt as a batch does -> its chunks as (tokens, seconds, seconds of steps behind it)."""
    chunks, end = [], n_cached + n_prompt
    while n_cached < end:
        n = min(budget.next(n_cached, is_running), end - n_cached)
        if n > 0:
            seconds = machine.seconds(n, n_cached)
            budget.record_chunk(n, n_cached, seconds)
            chunks.append([n, seconds, 0.0])
            n_cached += n
        if is_running:
            budget.record_step(machine.step)
            if chunks:  # steps before the first are owed to a prompt before
                chunks[-1][2] += machine.step
    return chunks


def next_chunk(budget, machine, n_cached, is_running):
    while (n := budget.next(n_cached, is_running)) == 0:
        budget.record_step(machine.step)
    return n


def sizes(*args, **kwargs):
    return [n for n, *_ in read(*args, **kwargs)]


@every_machine
def test_gap_and_share_of_running_answers(machine):
    budget = PrefillBudget(2048)
    chunks = read(budget, machine, 60_001, is_running=True)
    least = machine.seconds(budget.sizes[-1], 60_000)
    # A chunk is chosen by the speed of the one before, while the text before it grows.
    longest = 1.1 * max(0.5, least) if machine is not LAPTOP else max(0.5, machine.seconds(64, 0))
    assert max(seconds + machine.step for _, seconds, _ in chunks) <= longest
    assert all(decoding >= 0.49 * seconds for _, seconds, decoding in chunks[:-1])
    reading, decoding = (sum(column) for column in list(zip(*chunks))[1:])
    assert decoding < 0.5 * reading + (len(chunks) + 1) * machine.step  # and no more than it must be
    shapes = {n for n, *_ in chunks[:-1]} | {*sizes(budget, machine, 60_001, is_running=False)[:-1]}
    assert shapes <= {2048 >> i for i in range(8)}  # they repeat


@every_machine
def test_alone_at_full_speed(machine):
    chunks = read(PrefillBudget(2048), machine, 60_000, is_running=False)
    assert max(seconds for _, seconds, _ in chunks) < 0.75
    # Once the speed is known, no chunk is smaller than it must be: twice as long, it would take longer than is allowed.
    n_cached = 0
    for i, (n, *_) in enumerate(chunks[:-1]):
        assert i < 3 or n == 2048 or machine.seconds(2 * n, n_cached) > 0.7 - machine.overhead
        n_cached += n


def test_sizes_of_chunks():
    budget = PrefillBudget(2048)  # on a fast machine, all that is allowed
    assert sizes(budget, GPU, 64 + 3 * 2048, is_running=False) == [64, 2048, 2048, 2048]
    assert sizes(budget, GPU, 3 * 2048, is_running=True) == [2048, 2048, 2048]
    budget = PrefillBudget(512, math.inf, 0.0)  # with no target and no share, as mlx-lm
    for is_running in (True, False):
        assert sizes(budget, CPU, 1200, is_running) == [512, 512, 176]
    for step_size in (1, 8, 48, 100, 2000):
        budget = PrefillBudget(step_size)
        assert budget.sizes[0] == step_size
        assert all(n >= min(16, step_size) for n in budget.sizes)
        assert sum(sizes(budget, CPU, 321, is_running=True)) == 321
    for kwargs, message in [
        (dict(max_token_gap=0), "max_token_gap must be more than 0 seconds, not 0"),
        (dict(max_token_gap=math.nan), "max_token_gap"),
        (dict(min_decode_share=1), "min_decode_share must be from 0 to below 1, not 1"),
        (dict(min_decode_share=-0.1), "min_decode_share"),
    ]:
        with pytest.raises(ValueError, match=message):
            PrefillBudget(2048, **kwargs)


@pytest.mark.parametrize("is_running", [True, False])
def test_slow_moment_is_forgotten(is_running):
    budget = PrefillBudget(2048)
    read(budget, LONG, 4096, is_running)
    before = next_chunk(budget, LONG, 0, is_running)
    budget.record_chunk(before, 0, 30.0)
    n = next_chunk(budget, LONG, before, is_running)
    assert n == 16
    budget.record_chunk(n, before, LONG.seconds(n, before))
    assert before in sizes(budget, LONG, 4096, is_running)[:4]


def test_rest_of_a_prompt_does_not_count_as_slow():
    budget = PrefillBudget(2048)
    read(budget, LAPTOP, 1000, is_running=True)
    before = budget.seconds_per_token
    read(budget, LAPTOP, 3, is_running=True)
    assert budget.seconds_per_token == before
    # Nothing is owed once no answer runs
    budget = PrefillBudget(2048)
    budget.record_chunk(budget.next(0, True), 0, 1.0)
    assert budget.next(64, True) == 0
    assert budget.next(64, False) > 0
    # A much longer text begins with a short chunk
    budget = PrefillBudget(2048)
    slow = Machine(overhead=0.0, token=1e-4, context=1e-8)
    read(budget, slow, 4096, is_running=True)
    assert next_chunk(budget, slow, 4096, is_running=True) == 2048
    chunks = read(budget, slow, 6000, is_running=True, n_cached=200_000)
    assert chunks[0][0] == 64
    assert max(seconds for _, seconds, _ in chunks) <= 0.5


@every_machine
def test_ranks_read_alike(machine):
    """By rank 0's clock, though the others' are wrong; they wait for each other in few of the steps."""
    shared = []
    ranks = SimpleNamespace(broadcast=lambda value: (shared.append(value), value)[1])
    leader = PrefillBudget(2048, ranks=ranks)
    want = read(leader, machine, 4000, is_running=True)
    n_turns = len(want) + sum(round(seconds / machine.step) for *_, seconds in want)
    assert len(shared) < 0.6 * n_turns + 2 * len(want)
    told = iter(shared)
    other = PrefillBudget(2048, ranks=SimpleNamespace(broadcast=lambda value: next(told)))
    clock = Machine(overhead=1.0, token=0.1, step=machine.step)
    assert sizes(other, clock, 4000, is_running=True) == [n for n, *_ in want]
    assert next(told, None) is None


def test_batch_reads_what_the_budget_says():
    model = tiny_model("qwen3_5")
    generator = BatchGenerator(model, num_draft_tokens=0)
    generator.prefill_budget = budget = Mock(next=Mock(side_effect=[2, 0, 5, 0, 0, 9]))
    generator.insert([[1, 2, 3], [5] * 12], max_tokens=[40, 4])
    texts, n_generated = {}, []
    for _ in range(8):
        before = sum(len(text.tokens) for text in texts.values())
        run(generator, texts, 1)
        n_generated.append(sum(len(text.tokens) for text in texts.values()) - before)
    # Turn 0 reads the first prompt's two tokens, so it is ready in turn 1, from which on it waits for no chunk.
    asked = [(0, False), (0, True), (0, True), (5, True), (5, True), (5, True)]
    assert budget.next.call_args_list == [call(*each) for each in asked]
    chunks = [each.args for each in budget.record_chunk.call_args_list]
    assert [chunk[:2] for chunk in chunks] == [(2, 0), (5, 0), (6, 5)]
    assert n_generated[2:] == [1, 1, 1, 1, 1, 2]
    seconds = [each.args[0] for each in budget.record_step.call_args_list]
    assert len(seconds) == 6
    assert min(*seconds, *(chunk[2] for chunk in chunks)) > 0
    assert run(generator, texts)[1].tokens == plain([5] * 12, model, max_tokens=4)


def test_embeddings_are_computed_between_steps():
    model, prompt = tiny_model("qwen3_5"), [4, 5, 6, 7]
    generator, texts = BatchGenerator(model, num_draft_tokens=0, min_decode_share=0.0), {}
    generator.insert([[1] * 5], max_tokens=[30])
    run(generator, texts, 6)
    # Others than the tokens', but for the last one's, which is generated from.
    embeddings = model.model.embed_tokens(mx.array(prompt)) * mx.array([0.9, 0.9, 0.9, 1.0])[:, None]
    n_tokens = []  # of the others, at each piece

    def advance(seconds):
        assert 0 < seconds <= 0.7
        n_tokens.append(sum(len(text.tokens) for text in texts.values()))
        return len(n_tokens) == 5

    pending = MagicMock(array=embeddings, advance=advance, __len__=lambda self: len(prompt))
    generator.insert([prompt], max_tokens=[6], input_embeddings=[pending])
    run(generator, texts)
    # A step of the running sequence is between two pieces.
    assert n_tokens == [*range(n_tokens[0], n_tokens[0] + 5)]
    assert texts[0].tokens == plain([1] * 5, model, max_tokens=30)
    assert texts[1].tokens == plain(prompt, model, max_tokens=6, input_embeddings=embeddings)
    # A sequence can leave before they are complete.
    (uid,) = generator.insert([prompt], max_tokens=[6], input_embeddings=[pending])
    run(generator, texts, 3)
    assert len(generator) == 1
    generator.remove([uid])
    assert len(generator) == 0


def test_on_metal_chunks_that_take_long_are_split(monkeypatch):
    """Of a text alone as well, whose chunks have any length elsewhere."""
    for on_metal, sizes in ((False, [2048] * 4), (True, [2048] + [512] * 12)):
        monkeypatch.setattr(scheduler, "on_metal", lambda on_metal=on_metal: on_metal)
        budget = PrefillBudget(2048, math.inf, 0.0)
        assert [n for n, *_ in read(budget, Machine(0.0, 1 / 300), 8192, is_running=False)] == sizes
