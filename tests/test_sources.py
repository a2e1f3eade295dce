"""A source of drafts that someone adds: it takes its turn with the others, for one sequence and for several."""

import mlx.core as mx
import pytest

from mlx_mtp.drafts import sources
from tests.support.decoding import plain
from tests.support.models import model_of
from tests.support.ways import company_of, every_way, generate

PROMPT = [3, 1, 4, 1, 5]
N = 24
SOURCES = [*sources.SOURCES]


class Oracle:
    """Knows a part of each text: every other four tokens."""

    name = "oracle"
    fixed = None
    most = 16  # that it gives at a time, whatever it offers

    def __init__(self, text, truths):
        self.text, self.truths, self.proposed = [*text], truths, []

    def observe(self, tokens):
        self.text += tokens

    def acceptance(self, n_unobserved):
        n = len(self.text) + n_unobserved
        return [0.99] * (4 - n % 4) if n // 4 % 2 == 0 else []

    def propose(self, k, n_unobserved):
        truth = next(t for t in self.truths if t[: len(self.text)] == self.text)
        first = len(self.text) + n_unobserved
        k = min(k, self.most)
        self.proposed.append(k)
        return mx.array(truth[first : first + k], mx.uint32), [None] * k


@pytest.fixture
def oracles(monkeypatch, equal_steps):
    model = model_of("qwen3_5")
    made, truths = [], [PROMPT + plain(PROMPT, model, max_tokens=2 * N), *company_of(model)]

    def make(options, text):
        made.append(Oracle(text, truths))
        return made[-1]

    monkeypatch.setattr(sources, "SOURCES", [make])
    return made, truths[0]


def counts_of(oracles, way, **options):
    """The counts of the text, which is right, and the drafts that the source gave."""
    made, truth = oracles
    text = generate(way, PROMPT, model_of("qwen3_5"), max_tokens=N, copy_drafts="auto", **options)
    assert text.last.all_tokens == truth[: len(PROMPT) + N]
    return text.last.counts, next(o for o in made if o.text[: len(PROMPT)] == PROMPT).proposed


@every_way
@pytest.mark.parametrize("number", [0, "auto"])
def test_sequences_draft_from_it(oracles, way, number):
    counts, proposed = counts_of(oracles, way, num_draft_tokens=number)
    assert sum(proposed) == sum(counts.of("oracle")[0]) == sum(counts.of("oracle")[1]) > 0


@every_way
@pytest.mark.parametrize("most", [0, 1, 2])
def test_may_give_fewer_than_it_offers(oracles, way, most, monkeypatch):
    monkeypatch.setattr(Oracle, "fixed", 4)
    monkeypatch.setattr(Oracle, "most", most)
    counts, proposed = counts_of(oracles, way, num_draft_tokens=0)
    assert sum(proposed) == sum(counts.of("oracle")[0]) == sum(counts.of("oracle")[1])
    assert len(counts.of("oracle")[0]) == most


@every_way
def test_takes_its_turn_with_the_others(oracles, way, monkeypatch):
    monkeypatch.setattr(sources, "SOURCES", [*SOURCES, *sources.SOURCES])
    counts, proposed = counts_of(oracles, way, num_draft_tokens=2)
    assert sum(proposed) > 0
    assert counts.of("oracle")[1] == counts.of("oracle")[0]
