"""A batch generator as the server uses it, from one sequence to several and back: each token once, every cache right."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors
from scipy.stats import chisquare

from mlx_mtp import BatchGenerator, DraftCounts, make_prompt_cache, make_sampler, mtp_generate_step
from mlx_mtp.server.engine.metrics import Metrics
from tests.support.decoding import plain
from tests.support.models import tiny_model

model_of = cache(tiny_model)


@dataclass(eq=False)
class Text:
    """A sequence, and what came of it.

    Args:
        options (Dict[str, Any]): Of ``BatchGenerator.insert_segments``.
    """

    segments: list[list[int]]
    options: dict[str, Any]
    tokens: list[int] = field(default_factory=list)  # generated
    counts: DraftCounts = field(default_factory=DraftCounts)
    end: str | None = None
    error: Exception | None = None
    prompt_cache: list[Any] | None = None
    in_cache: list[int] = field(default_factory=list)  # the tokens of the prompt cache


class Texts:
    """Those of a batch generator, by uid."""

    def __init__(self, model: Any, on_switch: Callable[[str], None] = lambda to: None):
        # Prompts are read whenever there are some, whatever the clock says.
        self.batch = BatchGenerator(model, prefill_step_size=8, max_token_gap=math.inf, min_decode_share=0.0)
        self.running: dict[int, Text] = {}
        self.shown: list[tuple[Text, int, list[Any], list[int]]] = []  # at the ends of segments: tokens read, the cache
        self.metrics, self.on_switch = Metrics(), on_switch

    def add(self, text: Text) -> None:
        options = {name: [value] for name, value in text.options.items()}
        (uid,) = self.batch.insert_segments([text.segments], counts=[text.counts], **options)
        self.running[uid] = text

    def remove(self, text: Text) -> None:
        (uid,) = [uid for uid, t in self.running.items() if t is text]
        text.prompt_cache, text.in_cache = self.batch.remove([uid], return_prompt_caches=True)[uid]
        text.end = "removed"
        del self.running[uid]

    def step(self) -> None:
        read, generated = self.batch.next()
        self._count_switches()
        for p in read:
            if p.end_of_segment and not p.end_of_prompt:
                prompt_cache, key = self.batch.extract_cache([p.uid])[p.uid]
                self.shown.append((self.running[p.uid], p.progress[0], prompt_cache, key[:]))
        for r in generated:
            text = self.running[r.uid]
            assert text.end is None
            if r.error is None:
                text.tokens.append(r.token)
                if text.options["samplers"] is greedy_sampler:
                    assert r.token == r.logprobs.argmax().item()
            if r.finish_reason is not None:
                text.end, text.error, text.prompt_cache, text.in_cache = (
                    r.finish_reason, r.error, r.prompt_cache, r.all_tokens
                )  # fmt: skip
                del self.running[r.uid]

    def _count_switches(self) -> None:
        before = {to: self._n_switches(to) for to in ("batch", "mtp")}
        self.metrics.count_switches(len(self.batch.decoder))
        for to, n in before.items():
            if self._n_switches(to) > n:
                self.on_switch(to)

    def _n_switches(self, to: str) -> float:
        return self.metrics.registry.get_sample_value("mlx_mtp_mode_switches_total", {"to": to}) or 0.0


def text_of(
    model, prompt, max_tokens=20, stop=(), processors=(), n_segments=1, depth=3, sampler=greedy_sampler
) -> Text:
    cut = len(prompt) // n_segments + 1
    options = dict(
        max_tokens=max_tokens,
        samplers=sampler,
        logits_processors=list(processors),
        stop_sequences=StopSequences([list(s) for s in stop]),
        caches=make_prompt_cache(model),
        num_draft_tokens=depth,
    )
    return Text([prompt[i : i + cut] for i in range(0, len(prompt), cut)], options)


def run(texts, arrivals, removals=None):
    """Add and remove sequences before these steps."""
    removals = removals or {}
    for step in range(10_000):
        for text in arrivals.get(step, ()):
            texts.add(text)
        for text in removals.get(step, ()):
            if text.end is None:
                texts.remove(text)
        if texts.running:
            texts.step()
        elif step > max([*arrivals, *removals]):
            break


def is_cache_of(prompt_cache, tokens, model):
    """What follows these tokens equals what follows them in a cold run, with the head and without it."""
    follow = [7, 3]
    cold = plain([*tokens, *follow], model, max_tokens=4)
    ours = mtp_generate_step(mx.array(follow), model, max_tokens=4, prompt_cache=copy.deepcopy(prompt_cache))
    assert [token for token, *_ in ours] == cold
    assert plain(follow, model, max_tokens=4, prompt_cache=prompt_cache[: len(model.layers)]) == cold


requests = st.lists(
    st.fixed_dictionaries(
        dict(
            prompt=st.lists(st.integers(0, 31), min_size=1, max_size=20),
            max_tokens=st.integers(1, 16),
            arrival=st.integers(0, 24),  # the step before which it arrives
            stay=st.none() | st.integers(1, 20),  # steps after which it is removed
            n_segments=st.integers(1, 3),
            penalty=st.booleans(),
            stop_at=st.none() | st.integers(2, 12),  # where two tokens of its text stop it
            seed=st.none() | st.integers(0, 2**64 - 1),
        )
    ),
    min_size=1,
    max_size=4,
)


def expected(model, request):
    """(how to make its sequence, its text in a single run, why that ends)"""
    sampler = greedy_sampler if request["seed"] is None else make_sampler(1.0, seed=request["seed"])
    processors = (
        make_logits_processors(repetition_penalty=1.3, repetition_context_size=50) if request["penalty"] else []
    )
    text = plain(
        request["prompt"], model, max_tokens=request["max_tokens"], logits_processors=processors, sampler=sampler
    )
    end, stop, stop_at = "length", [], request["stop_at"]
    if stop_at is not None and stop_at <= len(text):
        stop = text[stop_at - 2 : stop_at]
        first = min(i for i in range(2, stop_at + 1) if text[i - 2 : i] == stop)
        text, end = text[:first], "stop"
    how = dict(processors=processors, stop=[stop], n_segments=request["n_segments"], sampler=sampler)
    return how, text, end


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.slow)])
@settings(max_examples=8)
@given(requests=requests, depth=st.integers(0, 8) | st.just("auto"))
def test_each_sequence_equals_its_single_run(family, requests, depth):
    model = model_of(family)
    texts, arrivals, removals, singles = Texts(model), {}, {}, {}
    for r in requests:
        how, tokens, end = expected(model, r)
        text = text_of(model, r["prompt"], r["max_tokens"], depth=depth, **how)
        arrivals.setdefault(r["arrival"], []).append(text)
        if r["stay"] is not None:
            removals.setdefault(r["arrival"] + r["stay"], []).append(text)
        singles[text] = r["prompt"], tokens, end
    run(texts, arrivals, removals)
    for text, (prompt, tokens, end) in singles.items():
        if text.end == "removed":
            assert text.tokens == tokens[: len(text.tokens)]
        else:
            assert (text.tokens, text.end) == (tokens, end)
        assert text.in_cache == (prompt + tokens)[: len(text.in_cache)]
        if text.in_cache:
            is_cache_of(text.prompt_cache, text.in_cache, model)
    for text, n_read, prompt_cache, key in texts.shown:
        prompt, *_ = singles[text]
        assert key == prompt[:n_read]
        is_cache_of(prompt_cache, key, model)


def test_switches_when_a_second_arrives_and_when_one_is_left():
    model, switches = model_of("qwen3_5"), []
    model.drafting.timing = None  # auto then tries drafts, whatever the clock says
    first, second = (text_of(model, [i, 5, 2], n) for i, n in ((1, 40), (2, 8)))
    run(Texts(model, switches.append), {0: [first], 10: [second]})
    assert switches == ["batch", "mtp"]
    assert sum(first.counts.drafted) > 0
    assert sum(second.counts.drafted) > 0  # in the batch


@pytest.mark.parametrize("n_tokens", [2, 14])
def test_a_processor_that_raises_leaves_the_other_alone(n_tokens):
    """While both generate, or once the one that fails is alone: the next to come is not hurt either."""
    model = model_of("qwen3_5")
    texts = Texts(model)

    def failing(tokens, logits):
        if len(tokens) > 3 + n_tokens:
            raise RuntimeError("no")
        return logits

    failing_one, other = text_of(model, [1, 5, 2], 30, processors=[failing]), text_of(model, [2, 5], 9)
    run(texts, {0: [failing_one], 2: [other]})
    assert (failing_one.end, str(failing_one.error)) == ("error", "no")
    assert (other.end, other.tokens) == ("length", plain([2, 5], model, max_tokens=9))
    third = text_of(model, [7, 1], 5)
    run(texts, {0: [third]})
    assert third.tokens == plain([7, 1], model, max_tokens=5)


def test_seed_gives_one_text_across_switches():
    model, switches = model_of("qwen3_5"), []
    want = plain([1, 5, 2], model, max_tokens=40, sampler=make_sampler(1.0, seed=3))
    assert want != plain([1, 5, 2], model, max_tokens=40, sampler=make_sampler(1.0, seed=4))
    for arrivals in ([], [10], [0, 1], [5, 20]):
        first = text_of(model, [1, 5, 2], 40, sampler=make_sampler(1.0, seed=3))
        others = {step: [text_of(model, [2, step], 6, sampler=make_sampler(1.0))] for step in arrivals}
        run(Texts(model, switches.append), {**others, 0: [first, *others.get(0, [])]})
        assert first.tokens == want
    assert switches == ["batch", "mtp"] * 4


def test_sampled_tokens_keep_their_distribution_across_switches():
    """The second token of a sequence of two is drawn at a switch. Chi-square at 1e-4, fixed seed."""
    V = 4
    model = tiny_model("qwen3_5", vocab_size=V, num_hidden_layers=2)
    logits = model(mx.array([[3, 1]]))[0, -1]
    first = mx.softmax(logits).tolist()
    second = [mx.softmax(model(mx.array([[3, 1, i]]))[0, -1]).tolist() for i in range(V)]
    mx.random.seed(0)
    n, observed = 200, Counter()
    for _ in range(n):
        text = text_of(model, [3, 1], 2, sampler=make_sampler(temp=1.0))
        run(Texts(model), {0: [text], 2: [text_of(model, [2], 1)]})
        observed[tuple(text.tokens)] += 1
    pairs = [(n * first[i] * second[i][j], observed[i, j]) for i in range(V) for j in range(V)]
    rare = [pair for pair in pairs if pair[0] < 5]  # these are merged
    pairs = [pair for pair in pairs if pair[0] >= 5] + [tuple(map(sum, zip(*rare)))] * bool(rare)
    want, got = zip(*pairs)
    assert len(want) > 4
    assert chisquare(got, want, sum_check=False).pvalue > 1e-4
