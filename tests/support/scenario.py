"""Scenarios: sequences that join and leave, their options, and faults; and the proof that each text is that of a single run.

A scenario is run in one of several ways (``WAYS``). Whatever the way, each text equals mlx-lm's own generation of its prompt
alone, up to where it ends, and its prompt cache holds exactly the tokens of the prompt and the text.
"""

import itertools
import math
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest
from hypothesis import strategies as st
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import make_logits_processors

from mlx_mtp import BatchGenerator, DraftCounts, make_prompt_cache, make_sampler, mtp_generate_step
from mlx_mtp.decoding import clock
from mlx_mtp.decoding.head_cache import HeadCache
from mlx_mtp.layers.draft_lm_head import DraftLMHead

from .batches import Fault, Faulty, Text
from .decoding import assert_goes_on, plain
from .models import FAMILIES, tiny_model
from .scripted import Scripted, script_copies

VOCAB, MAX_STEPS = 32, 2000
DRAFTS = [None, "auto", 0, 1, 2, 3, 5, 8]
COPIES = [None, "auto", "off", 1, 2, 8, 16]
PENALTIES: list[dict[str, Any]] = [
    {},
    {},
    {"repetition_penalty": 1.3},
    {"logit_bias": {3: 2.0}, "presence_penalty": 0.4, "frequency_penalty": 0.2},
]
# Calls of ``insert`` that are refused.
REFUSED: list[dict[str, Any]] = [
    *({"num_draft_tokens": [n]} for n in (-1, 9, 99, 1.5, "off", "4")),
    *({"copy_drafts": [n]} for n in (-1, 0, 17, 2.0, "4")),
    *({"max_tokens": [n]} for n in (0, -1, 2.5)),
    {"num_draft_tokens": 0},
    {"copy_drafts": "auto"},
    {"samplers": [None, None]},
    {"caches": [[1]]},
]


@dataclass(frozen=True)
class Ask:
    """What a sequence asks for.

    Args:
        right (Tuple[bool]): Whether the head's draft of token i is right, over and over.
        fault (Tuple, optional): The arguments of ``Faulty``, a processor of which one hook raises.
        arrives (int): The step before which it joins; in a batch.
        leaves (int, optional): The number of tokens after which it is removed or closed. Default: ``None``, it goes on.
        seen (int, optional): The number of tokens after which its prompt cache is looked at, while it goes on; in a batch.
        stop_at (int, optional): The position behind the two tokens of its text that stop it, wherever they are; in a batch.
        n_segments (int): Of the prompt; in a batch.
    """

    prompt: list[int]
    max_tokens: int
    right: list[bool]
    num_draft_tokens: int | str | None = None
    copy_drafts: int | str | None = None
    seed: int | None = None
    penalties: dict[str, Any] | None = None
    fault: tuple[str, int, tuple[str, ...]] | None = None
    arrives: int = 0
    leaves: int | None = None
    seen: int | None = None
    stop_at: int | None = None
    n_segments: int = 1

    @property
    def segments(self) -> list[list[int]]:
        n = -(-len(self.prompt) // self.n_segments)
        return [self.prompt[i : i + n] for i in range(0, len(self.prompt), n)]

    def stop(self, text: list[int]) -> list[int]:
        """What stops it."""
        return [] if self.stop_at is None or self.stop_at > len(text) else text[self.stop_at - 2 : self.stop_at]

    @property
    def sampler(self) -> Any:
        return None if self.seed is None else make_sampler(temp=1.0, top_p=0.9, seed=self.seed)

    def processors(self, fails: bool) -> list[Any]:
        """Those of mlx-lm, and the one that ``fails``, or allows the same tokens."""
        own = [] if self.fault is None else [Faulty(*self.fault) if fails else Faulty("none", 0)]
        return [*make_logits_processors(**(self.penalties or {})), *own]

    @property
    def drafts(self) -> dict[str, Any]:
        return dict(num_draft_tokens=self.num_draft_tokens, copy_drafts=self.copy_drafts)


@dataclass(frozen=True)
class Scenario:
    """
    Args:
        asks (List[Ask]): The sequences.
        refused (Dict[int, Dict[str, Any]]): Calls of ``insert`` that are refused, by step; in a batch.
        close (str): How a sequence that leaves is closed, one of ``CLOSES``; alone.
        alone (Dict[str, Any]): Options of ``mtp_generate_step`` that several sequences do not have.
        draft_rows (int, optional): The number of tokens in the draft vocabulary.
        copies (List[Optional[bool]], optional): Whether the copy of token i is right, over and over; ``None`` where none is
          offered. Default: ``None``, the texts decide.
    """

    family: str
    seed: int
    n_layers: int
    asks: list[Ask]
    prefill_step_size: int
    completion_batch_size: int
    refused: dict[int, dict[str, Any]]
    close: str
    alone: dict[str, Any]
    draft_rows: int | None
    copies: list[bool | None] | None

    @property
    def model(self) -> Any:
        return _model(self.family, self.seed, self.n_layers)


@cache
def _model(family: str, seed: int, n_layers: int) -> Any:
    return tiny_model(family, seed, num_hidden_layers=n_layers)


# Closing a generation of one sequence


class Interrupted(Exception):
    pass


def _close_elsewhere(steps: Any) -> None:
    """In another thread."""
    thread = threading.Thread(target=steps.close)
    thread.start()
    thread.join()


def _interrupt_twice(steps: Any) -> None:
    """Close, and interrupt that."""
    finalize = HeadCache.finalize

    def interrupted(self: HeadCache, n: int) -> None:
        HeadCache.finalize = finalize  # type: ignore[method-assign]
        finalize(self, n)
        raise Interrupted

    with suppress(Interrupted), mock.patch.object(HeadCache, "finalize", interrupted):
        steps.close()


CLOSES: dict[str, Callable[[Any], None]] = {
    "close": lambda steps: steps.close(),
    "close in another thread": _close_elsewhere,
    "interrupt the closing": _interrupt_twice,
}


# The strategy


def _asks() -> st.SearchStrategy[Ask]:
    prompts = st.builds(
        lambda tokens, n: tokens * n,  # some can be copied from
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
        st.sampled_from([1, 1, 3]),
    )
    hooks = st.sampled_from([("call", ()), ("call", ("copy",)), ("copy", ("copy",)), ("rollback", ("rollback",))])
    return st.builds(
        Ask,
        prompt=prompts,
        max_tokens=st.integers(1, 30),
        right=st.lists(st.booleans(), min_size=1, max_size=12),
        num_draft_tokens=st.sampled_from(DRAFTS),
        copy_drafts=st.sampled_from(COPIES),
        seed=st.none() | st.integers(0, 2**64 - 1),
        penalties=st.sampled_from(PENALTIES),
        fault=st.none() | st.builds(lambda hook, n: (hook[0], n, hook[1]), hooks, st.integers(0, 12)),
        arrives=st.integers(0, 20),
        leaves=st.none() | st.none() | st.integers(1, 20),
        seen=st.none() | st.integers(1, 20),
        stop_at=st.none() | st.integers(2, 12),
        n_segments=st.integers(1, 3),
    ).filter(lambda ask: (ask.num_draft_tokens, ask.copy_drafts) != (0, "off"))


ALONE = st.fixed_dictionaries(
    {}, optional={"exact": st.just(True), "draft_p_min": st.sampled_from([0.2, 0.9]), "kv_bits": st.just(8)}
)


def scenarios() -> st.SearchStrategy[Scenario]:
    return st.builds(
        Scenario,
        family=st.sampled_from(FAMILIES),
        seed=st.integers(0, 2),
        n_layers=st.sampled_from([2, 4]),
        asks=st.lists(_asks(), min_size=1, max_size=5),
        prefill_step_size=st.sampled_from([1, 2, 5, 16, 2048]),
        completion_batch_size=st.sampled_from([1, 2, 32]),
        refused=st.dictionaries(st.integers(0, 20), st.sampled_from(REFUSED), max_size=3),
        close=st.sampled_from([*CLOSES]),
        alone=ALONE,
        draft_rows=st.sampled_from([None, None, 6, 20]),
        copies=st.none() | st.lists(st.sampled_from([True, True, False, None]), min_size=1, max_size=12),
    )


# The proof


def assert_single_run(way: str, scenario: Scenario) -> None:
    """Each text of the scenario, generated this way, is that of a single run of mlx-lm, and so is its prompt cache.

    Raises:
        AssertionError: A text, its end or its cache differs.
    """
    with _drafting(scenario) as truths:
        WAYS[way](scenario, truths)


@contextmanager
def _drafting(scenario: Scenario) -> Any:
    """Yields a list for the texts that are known so far, each with its prompt: what copies are made of."""
    model, copies, truths = scenario.model, scenario.copies, []
    if scenario.draft_rows is not None:
        model.drafting.lm_head = DraftLMHead(model.output_layer, [*range(scenario.draft_rows)])
    try:
        with pytest.MonkeyPatch.context() as patch:
            if copies is not None:
                script_copies(patch, truths, lambda i: copies[i % len(copies)])
            patch.setattr(clock, "perf_counter", itertools.count(0.0).__next__)  # a failure comes again
            yield truths
    finally:
        model.drafting.lm_head = None


def _single_run(scenario: Scenario, ask: Ask, **options: Any) -> list[int]:
    return plain(
        ask.prompt,
        scenario.model,
        max_tokens=ask.max_tokens,
        sampler=ask.sampler,
        logits_processors=ask.processors(fails=False),
        **options,
    )


def _run_alone(scenario: Scenario, truths: list[list[int]]) -> None:
    """One sequence after the other, a token at a time."""
    model = scenario.model
    for ask in scenario.asks:
        alone, kv = dict(scenario.alone), {}
        if "kv_bits" in alone:
            kv = dict(kv_bits=alone.pop("kv_bits"), kv_group_size=32, quantized_kv_start=len(ask.prompt) + 5)
        want = _single_run(scenario, ask, prefill_step_size=scenario.prefill_step_size, **kv)
        truths.append(ask.prompt + want + [0] * 40)
        scripted = Scripted(model, truths[-1], lambda i, right=ask.right: right[i % len(right)])
        prompt_cache, counts, tokens, fault = make_prompt_cache(model), DraftCounts(), [], None
        steps = mtp_generate_step(
            mx.array(ask.prompt),
            scripted,
            max_tokens=ask.max_tokens,
            sampler=ask.sampler,
            logits_processors=ask.processors(fails=True),
            prompt_cache=prompt_cache,
            prefill_step_size=scenario.prefill_step_size,
            counts=counts,
            **ask.drafts,
            **alone,
            **kv,
        )
        try:
            for token, _, _ in steps:
                tokens.append(token)
                if len(tokens) == ask.leaves:
                    CLOSES[scenario.close](steps)
                    break
        except Fault as e:
            fault = e
        n = len(tokens)
        assert tokens == want[:n]
        if fault is not None:
            assert ask.fault is not None
            assert str(fault) == ask.fault[0]
        else:
            assert n == min(ask.max_tokens, ask.leaves or ask.max_tokens)
        _check_counts(ask, counts)
        if n > 0 and not kv:
            assert_goes_on(model, prompt_cache, ask.prompt + tokens)


def _run_batch(scenario: Scenario, truths: list[list[int]]) -> None:
    """All in a batch, which they join and leave while it generates."""
    model, asks, texts, wants, removed = scenario.model, {}, {}, {}, {}
    scripted = Scripted(model, {}, lambda uid, i: asks[uid].right[i % len(asks[uid].right)])
    generator = BatchGenerator(
        scripted,
        completion_batch_size=scenario.completion_batch_size,
        prefill_step_size=scenario.prefill_step_size,
        max_token_gap=math.inf,  # prompts are read whenever there are some
        min_decode_share=0.0,
        return_prompt_caches=True,
    )
    scripted.decoder = generator.decoder
    for step in range(MAX_STEPS):
        if step in scenario.refused:
            _insert_refused(generator, scenario.refused[step])
        for ask in (ask for ask in scenario.asks if ask.arrives == step):
            want = _single_run(scenario, ask)
            truths.append(ask.prompt + want + [0] * 40)
            uid = _insert(generator, ask, want)
            scripted.texts[uid] = ask.prompt + want
            asks[uid], wants[uid], texts[uid] = ask, want, Text()
        for uid, ask in asks.items():
            if ask.leaves is not None and len(texts[uid].tokens) >= ask.leaves and not texts[uid].finish_reason:
                removed |= generator.remove([uid], return_prompt_caches=True)
                texts[uid].finish_reason = "removed"
            if len(texts[uid].tokens) == ask.seen and not texts[uid].finish_reason:
                prompt_cache, tokens = generator.extract_cache([uid])[uid]
                assert tokens == ask.prompt + texts[uid].tokens
                assert_goes_on(model, prompt_cache, tokens)
        read, generated = generator.next()
        for p in read:
            if p.end_of_segment and not p.end_of_prompt:
                prompt_cache, tokens = generator.extract_cache([p.uid])[p.uid]
                assert tokens == asks[p.uid].prompt[: p.progress[0]]
                assert_goes_on(model, prompt_cache, tokens)
        for r in generated:
            texts[r.uid].add(r)
        if len(generator) == 0 and step > 20:
            break
    assert len(generator) == len(generator.decoder) == 0, "it never ends"
    assert len(texts) == len(scenario.asks)
    for uid, ask in asks.items():
        _check_text(model, ask, wants[uid], texts[uid], removed.get(uid))


def _insert(generator: BatchGenerator, ask: Ask, want: list[int]) -> int:
    (uid,) = generator.insert_segments(
        [ask.segments],
        max_tokens=[ask.max_tokens],
        samplers=[ask.sampler],
        logits_processors=[ask.processors(fails=True)],
        stop_sequences=[StopSequences([ask.stop(want)])],
        **{name: [value] for name, value in ask.drafts.items()},
    )
    return uid


def _insert_refused(generator: BatchGenerator, options: dict[str, Any]) -> None:
    n = len(generator)
    try:
        generator.insert([[1, 2]], **options)
    except ValueError:
        assert len(generator) == n, f"half of {options} was inserted"
    else:
        raise AssertionError(f"{options} was not refused")


def _check_text(model: Any, ask: Ask, want: list[int], text: Text, removed: Any) -> None:
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
            assert str(last.error) == ask.fault[0], "the error of another sequence"
        else:
            stop = ask.stop(want)
            n_want = next((i for i in range(2, n + 1) if want[i - 2 : i] == stop), ask.max_tokens)
            assert (text.finish_reason, n, last.error) == ("stop" if stop else "length", n_want, None)
    if last is not None:
        _check_counts(ask, last.counts)
    if tokens:
        assert_goes_on(model, prompt_cache, tokens)


def _check_counts(ask: Ask, counts: DraftCounts) -> None:
    most, copies = ask.num_draft_tokens, ask.copy_drafts
    assert len(counts.drafted) <= (most if isinstance(most, int) else 8)
    assert copies is None or len(counts.copied) <= {"auto": 16, "off": 0}.get(copies, copies)


WAYS: dict[str, Callable[[Scenario, list[list[int]]], None]] = {"alone": _run_alone, "batch": _run_batch}
