"""Whatever comes and goes beside it, and whatever fails, each text is that of a single run of mlx-lm.

A scenario has sequences that join and leave, their options, and faults, and is run alone or in a batch. Each text equals that
of mlx-lm for its prompt alone, up to where it ends, and its prompt cache holds exactly the tokens of the prompt and the text.

``pytest --long tests/test_single_run.py`` tests 50 times as many scenarios, the demo at every depth and more seeds.
"""

import inspect
import itertools
import math
from dataclasses import dataclass
from importlib import import_module
from types import GeneratorType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import make_logits_processors

import mlx_mtp
from mlx_mtp import BatchGenerator, TextOptions, make_prompt_cache, make_sampler
from mlx_mtp.core.decoding import planner
from mlx_mtp.core.drafts.settings import DraftLMHead, DraftSettings
from tests.support.batches import AT_ONCE, Fault, Faulty, Text, faulty
from tests.support.decoding import assert_goes_on, mtp, plain, prefill
from tests.support.models import FAMILIES, KV_FAMILIES, TRAINED, model_of
from tests.support.profiles import LONG, examples
from tests.support.scripted import Scripted, script_copies
from tests.support.ways import close_elsewhere, generate_alone

PENALTIES = [
    {},
    {},
    dict(repetition_penalty=1.3),
    dict(logit_bias={3: 2.0}, presence_penalty=0.4, frequency_penalty=0.2),
]


@dataclass(frozen=True)
class Ask:
    """What a sequence asks for."""

    prompt: list[int]
    max_tokens: int
    right: list[bool]  # whether the head's draft of token i is right, over and over
    num_draft_tokens: int | str | None = None
    copy_drafts: int | str | None = None
    seed: int | None = None
    penalties: dict[str, Any] | None = None
    fault: tuple[Any, float] | None = None  # ``faulty`` or ``Faulty``, and the number of the token for which it raises
    arrives: int = 0  # the step before which it joins; in a batch
    leaves: int | None = None  # the number of tokens after which it is removed or closed; ``None``: it goes on
    # In a batch: the number of tokens after which its prompt cache is looked at, while it goes on
    seen: int | None = None
    # In a batch: the position behind the two tokens of its text that stop it, wherever they are
    stop_at: int | None = None
    n_segments: int = 1  # of the prompt; alone, all but the last are in the prompt cache

    @property
    def segments(self):
        n = -(-len(self.prompt) // self.n_segments)
        return [self.prompt[i : i + n] for i in range(0, len(self.prompt), n)]

    def stop(self, text):
        return [] if self.stop_at is None or self.stop_at > len(text) else text[self.stop_at - 2 : self.stop_at]

    def options(self, fails):
        """Its options, with mlx-lm's processors, and the one that ``fails``, or allows the same tokens."""
        own = [] if self.fault is None else [self.fault[0](self.fault[1] if fails else math.inf)]
        return dict(
            max_tokens=self.max_tokens,
            sampler=None if self.seed is None else make_sampler(temp=1.0, top_p=0.9, seed=self.seed),
            logits_processors=[*make_logits_processors(**(self.penalties or {})), *own],
            num_draft_tokens=self.num_draft_tokens,
            copy_drafts=self.copy_drafts,
        )

    def single_run(self, model, **kv):
        options = self.options(fails=False)
        del options["num_draft_tokens"], options["copy_drafts"]
        return plain(self.prompt, model, **options, **kv)

    def check_counts(self, counts):
        most, copies = self.num_draft_tokens, self.copy_drafts
        assert len(counts.drafted) <= (most if isinstance(most, int) else 8)
        assert copies is None or len(counts.of("copies").drafted) <= {"auto": 16, "off": 0}.get(copies, copies)


# Options of ``mtp_generate_step`` that several sequences do not have
ALONE = dict(draft_p_min=st.sampled_from([0.2, 0.9]), kv_bits=st.just(8))
ASKS = st.builds(
    Ask,
    prompt=st.builds(
        lambda tokens, n: tokens * n,  # some can be copied from
        st.lists(st.integers(0, 31), min_size=1, max_size=20 if LONG else 9),
        st.sampled_from([1, 1, 3]),
    ),
    max_tokens=st.integers(1, 20),
    right=st.lists(st.booleans(), min_size=1, max_size=12),
    num_draft_tokens=st.sampled_from([None, "auto", 0, 1, 2, 3, 5, 8]),
    copy_drafts=st.sampled_from([None, "auto", "off", 1, 2, 8, 16]),
    seed=st.none() | st.integers(0, 2**64 - 1),
    penalties=st.sampled_from(PENALTIES),
    fault=st.none() | st.tuples(st.sampled_from([faulty, faulty, Faulty]), st.integers(0, 12)),
    arrives=st.integers(0, 20),
    leaves=st.none() | st.none() | st.integers(1, 20),
    seen=st.none() | st.integers(1, 20),
    stop_at=st.none() | st.integers(2, 12),
    n_segments=st.integers(1, 3),
).filter(lambda ask: (ask.num_draft_tokens, ask.copy_drafts) != (0, "off"))
SCENARIOS = st.builds(
    SimpleNamespace,
    family=st.sampled_from(FAMILIES),
    seed=st.integers(0, 2),
    num_hidden_layers=st.sampled_from([2, 4]),
    asks=st.lists(ASKS, min_size=1, max_size=5),
    prefill_step_size=st.sampled_from([1, 2, 5, 16, 2048]),
    completion_batch_size=st.sampled_from([1, 2, 32]),
    close=st.sampled_from([GeneratorType.close, close_elsewhere]),  # how a sequence leaves; alone
    alone=st.fixed_dictionaries({}, optional=ALONE),
    draft_rows=st.sampled_from([None, None, 6, 20]),  # the number of tokens in the draft vocabulary
    # Whether the copy of token i is right, over and over; ``None`` where none is offered. If ``None``, the texts decide.
    copies=st.none() | st.lists(st.sampled_from([True, True, False, None]), min_size=1, max_size=12),
).filter(lambda scenario: scenario.family in KV_FAMILIES or "kv_bits" not in scenario.alone)
# Texts that end within a window of right drafts, of which the last ones are not handed over, or behind it, or fail there.
ENDS = [dict(leaves=3), dict(leaves=5), dict(leaves=6), dict(leaves=8, seen=5), dict(fault=(faulty, 3), arrives=20)]
WITHIN_A_WINDOW = [
    Ask([3, 1, 4], 30, [True], num_draft_tokens=4, copy_drafts="off", n_segments=2, **end) for end in ENDS
]
# Texts that join and leave where the head keeps one input of some and several of others.
JOINS = [([False], 0), ([False], 3), ([True], 5)]
WITH_ONE_INPUT = [Ask([3, 1, 4], 12, right, num_draft_tokens=2, copy_drafts="off", arrives=n) for right, n in JOINS]


def scenario_of(asks):
    return SimpleNamespace(
        family="qwen3_5", seed=0, num_hidden_layers=2, prefill_step_size=2048, completion_batch_size=32, alone={},
        close=GeneratorType.close, draft_rows=None, copies=None, asks=asks,
    )  # fmt: skip


def run_alone(scenario, model, truths):
    for ask in scenario.asks:
        own, kv, n = dict(scenario.alone), {}, len(ask.prompt) - len(ask.segments[-1])
        if "kv_bits" in own:
            n, kv = 0, dict(kv_bits=own.pop("kv_bits"), kv_group_size=32, quantized_kv_start=len(ask.prompt) + 5)
        kv["prefill_step_size"] = scenario.prefill_step_size
        want, prompt_cache = ask.single_run(model, **kv), make_prompt_cache(model)
        truths.append(ask.prompt + want + [0] * 40)
        scripted = Scripted(model, truths[-1], lambda i, right=ask.right: right[i % len(right)])
        if n > 0:
            prefill(mx.array(ask.prompt[:n]), model, prompt_cache=prompt_cache)
        own |= dict(prompt_cache=prompt_cache, all_tokens=ask.prompt[:n], leaves=ask.leaves, close=scenario.close)
        text = generate_alone(ask.prompt[n:], scripted, Fault, **own, **kv, **ask.options(fails=True))
        n = len(text.tokens)
        assert text.tokens == want[:n]
        most = min(ask.max_tokens, ask.leaves or ask.max_tokens)
        assert n == (most if ask.fault is None else min(most, ask.fault[1])), "a token before the fault was not yielded"
        assert (text.last.error is None) == (n == most)
        ask.check_counts(text.last.counts)
        if n > 0 and "kv_bits" not in kv:
            assert_goes_on(model, prompt_cache, ask.prompt + text.tokens)


def run_batch(scenario, model, truths):
    """All in a batch, which they join and leave while it generates."""
    asks, texts, wants, removed = {}, {}, {}, {}
    scripted = Scripted(model, {}, lambda uid, i: asks[uid].right[i % len(asks[uid].right)])
    sizes = dict(completion_batch_size=scenario.completion_batch_size, prefill_step_size=scenario.prefill_step_size)
    generator = BatchGenerator(scripted, **sizes, **AT_ONCE)
    scripted.decoder = generator.decoder

    def extracted(uid):
        prompt_cache, tokens = generator.extract_cache([uid])[uid]
        assert_goes_on(model, prompt_cache, tokens)
        return tokens

    for step in range(2000):
        for ask in (ask for ask in scenario.asks if ask.arrives == step):
            want = ask.single_run(model)
            truths.append(ask.prompt + want + [0] * 40)
            options = TextOptions(stop_sequences=StopSequences([ask.stop(want)]), **ask.options(fails=True))
            (uid,) = generator.insert_segments([ask.segments], options=[options])
            scripted.texts[uid] = ask.prompt + want
            asks[uid], wants[uid], texts[uid] = ask, want, Text()
        for uid, ask in asks.items():
            text = texts[uid]
            if ask.leaves is not None and len(text.tokens) >= ask.leaves and not text.finish_reason:
                removed |= generator.remove([uid], return_prompt_caches=True)
                text.finish_reason = "removed"
            if len(text.tokens) == ask.seen and not text.finish_reason:
                assert extracted(uid) == ask.prompt + text.tokens
        read, generated = generator.next()
        for p in read:
            if p.end_of_segment and not p.end_of_prompt:
                assert extracted(p.uid) == asks[p.uid].prompt[: p.progress[0]]
        for r in generated:
            texts[r.uid].add(r)
        if len(generator) == 0 and step > 20:
            break
    assert len(generator) == len(generator.decoder) == 0, "it never ends"
    assert len(texts) == len(scenario.asks)
    for uid, ask in asks.items():
        check_text(model, ask, wants[uid], texts[uid], removed.get(uid))


def check_text(model, ask, want, text, removed):
    """One text of a batch: its tokens, its end, its counts and its cache."""
    n, last = len(text.tokens), text.last
    assert text.tokens == want[:n]
    if text.finish_reason == "removed":
        prompt_cache, tokens = removed or (None, [])
        assert tokens == (ask.prompt + want)[: len(tokens)]
    else:
        prompt_cache, tokens = last.prompt_cache, ask.prompt + text.tokens
        assert last.all_tokens == tokens
        if text.finish_reason == "error":
            assert isinstance(last.error, Fault), last.error
            assert (ask.fault or "the error of another sequence")[1] == n
        else:
            stop = ask.stop(want)
            n_want = next((i for i in range(2, n + 1) if want[i - 2 : i] == stop), ask.max_tokens)
            assert (text.finish_reason, n, last.error) == ("stop" if stop else "length", n_want, None)
    if last is not None:
        ask.check_counts(last.counts)
    if tokens:
        assert_goes_on(model, prompt_cache, tokens)


@pytest.mark.parametrize("run", [run_alone, run_batch], ids=["alone", "batch"])
@examples(6)
@example(scenario=scenario_of(WITHIN_A_WINDOW))
@example(scenario=scenario_of(WITH_ONE_INPUT))
@given(scenario=SCENARIOS)
def test_each_text_is_that_of_a_single_run(run, scenario):
    model = model_of(scenario.family, scenario.seed, num_hidden_layers=scenario.num_hidden_layers)
    copies, truths = scenario.copies, []  # the texts that are known so far, prompts included: what copies are made of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "perf_counter", itertools.count(0.0).__next__)  # a failure comes again
        if scenario.draft_rows is not None:
            patch.setattr(
                model,
                "draft_settings",
                DraftSettings(lm_head=DraftLMHead(model.output_layer, [*range(scenario.draft_rows)])),
            )
        if copies is not None:
            script_copies(patch, truths, lambda i: copies[i % len(copies)])
        run(scenario, model, truths)


MODULES = ["abc", "bisect", "calendar", "cmd", "codecs", "copy", "csv", "glob", "heapq", "json"][: 10 if LONG else 1]
MAX_TOKENS = 300 if LONG else 10
DEPTHS = range(1, 9) if LONG else [3]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "4-bit"] if LONG else ["float32"])
def test_a_trained_model_at_every_depth(precision):
    """With the head that it has, and with one that is right, wrong, or right most of the time."""
    model, tokenizer = mlx_mtp.load(str(mlx_mtp.DEMO) if LONG else TRAINED)
    model.set_dtype(mx.float32 if precision == "float32" else mx.bfloat16)
    if precision == "4-bit":
        nn.quantize(model, 64, 4, class_predicate=lambda name, m: hasattr(m, "to_quantized") and "mtp." not in name)
    for i, name in enumerate(MODULES):
        prompt = tokenizer.encode(inspect.getsource(import_module(name)))[: 40 + 12 * i]
        want = plain(prompt, model, max_tokens=MAX_TOKENS)
        for depth in DEPTHS:
            assert mtp(prompt, model, max_tokens=MAX_TOKENS, num_draft_tokens=depth) == want
        for depth, right in zip((3, 5, 8), (lambda i: True, lambda i: False, lambda i: i % 10 < 7)):
            scripted = Scripted(model, prompt + want + [0] * 10, right)
            assert mtp(prompt, scripted, max_tokens=MAX_TOKENS, num_draft_tokens=depth) == want
