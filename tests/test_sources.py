"""A source of drafts that someone adds: it takes its turn with the others, for one sequence and for several."""

import functools

import mlx.core as mx
import pytest

from mlx_mtp import BatchGenerator, DraftCounts, mtp_generate_step
from mlx_mtp.decoding import sources
from tests.support.batches import run
from tests.support.decoding import plain
from tests.support.models import tiny_model

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3]]
N = 24
model_of = functools.cache(tiny_model)


class Oracle:
    """Knows a part of each text: every other four tokens."""

    name = "oracle"
    fixed = None

    def __init__(self, text, truths):
        self.text, self.truths, self.proposed = [*text], truths, []

    def read(self, tokens):
        self.text += tokens

    def acceptance(self, n_unread):
        n = len(self.text) + n_unread
        return [0.99] * (4 - n % 4) if n // 4 % 2 == 0 else []

    def propose(self, k, n_unread):
        truth = next(t for t in self.truths if t[: len(self.text)] == self.text)
        first = len(self.text) + n_unread
        self.proposed.append(k)
        return mx.array(truth[first : first + k], mx.uint32), [None] * k


@pytest.fixture
def oracles(monkeypatch):
    made, truths = [], [p + plain(p, model_of("qwen3_5"), max_tokens=2 * N) for p in PROMPTS]

    def make(options, text, processors):
        made.append(Oracle(text, truths))
        return made[-1]

    monkeypatch.setattr(sources, "SOURCES", [*sources.SOURCES, make])
    return made, truths


@pytest.fixture
def oracle_alone(monkeypatch, oracles):
    monkeypatch.setattr(sources, "SOURCES", sources.SOURCES[-1:])
    return oracles


@pytest.mark.parametrize("number", [0, "auto"])
def test_one_sequence_drafts_from_it(oracle_alone, number):
    (made, truths), counts = oracle_alone, DraftCounts()
    options = dict(max_tokens=N, num_draft_tokens=number, copy_drafts="auto", counts=counts)
    steps = mtp_generate_step(mx.array(PROMPTS[0]), model_of("qwen3_5"), **options)
    assert [token for token, _, _ in steps] == truths[0][len(PROMPTS[0]) :][:N]
    assert sum(made[0].proposed) == sum(counts.others) == sum(counts.others_accepted) > 0


def test_several_sequences_draft_from_theirs(oracles):
    made, truths = oracles
    generator = BatchGenerator(model_of("qwen3_5"), num_draft_tokens=2, copy_drafts="auto")
    generator.insert(PROMPTS, max_tokens=[N] * 3)
    texts = run(generator).values()
    assert [text.last.all_tokens for text in texts] == [t[: len(p) + N] for t, p in zip(truths, PROMPTS)]
    assert all(sum(oracle.proposed) > 0 for oracle in made)
    assert all(text.last.counts.others_accepted == text.last.counts.others for text in texts)
