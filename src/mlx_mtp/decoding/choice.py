"""The tokens that sequences choose at the positions of a window, and which of their drafts they accept."""

from collections.abc import Generator
from typing import Any, NamedTuple

import mlx.core as mx

from .acceptance import Verdict
from .sequence import Sequence
from .window import NO_TOKENS, Step, Token, Window


class Choice(NamedTuple):
    """What was chosen.

    Args:
        step (Step): Its tokens and log probabilities.
        accepted (mx.array): Which drafts each sequence accepts, [B, T - 1], bool; those after the first False mean nothing.
        states (List[mx.array]): Random states to go back to, as in ``Verdict``.
    """

    step: Step
    accepted: mx.array
    states: list[mx.array]


def choose_at_once(sequences: list[Sequence], window: Window) -> Choice:
    """All positions of all sequences in one go: those without a sampler or processors of their own together."""
    step = Step(sequences, window, window.tokens, None, {}, [], [0] * len(sequences))
    own = [b for b, s in enumerate(sequences) if s.end is None and not s.is_greedy]
    accepted, states = window.drafts, []
    if len(sequences) > 1 or not own:
        step.logprobs = window.logits - mx.logsumexp(window.logits, axis=-1, keepdims=True)
        step.choices = mx.argmax(step.logprobs, axis=-1)  # [B, T]
        if window.n_drafts > 0:
            accepted = step.choices[:, :-1] == window.drafts
    elif window.n_drafts > 0:
        accepted = mx.zeros(window.drafts.shape, mx.bool_)
    if len(sequences) > 1 and window.n_drafts == 0:
        own = _draw_together(sequences, own, step)
    for b in own:
        with sequences[b].own_errors():
            verdicts = _verdicts(sequences[b], b, window)
            tokens = mx.concatenate([v.tokens for v, _ in verdicts]).astype(mx.uint32)
            of_drafts = mx.concatenate([v.accepted for v, _ in verdicts])
            step.own_logprobs[b] = [row for _, rows in verdicts for row in rows]
            if len(sequences) == 1:
                step.choices, accepted, states = tokens[None], of_drafts[None], verdicts[0][0].random_states
            else:
                step.choices[b, : len(tokens)] = tokens
                accepted[b, : len(of_drafts)] = of_drafts
    step.has_ended = [s.end is not None for s in sequences]
    return Choice(step, accepted, states)


def choose_in_order(s: Sequence, window: Window, stream: Any) -> Generator[Token, None, Choice]:
    """Of one sequence: call each processor and the sampler once a token, and yield each accepted draft before the next."""
    k, tokens = window.plans[0].k, []  # type: tuple[int, list[mx.array]]
    s.counts.source = window.plans[0].source  # of the drafts that are handed over before they are counted
    step = Step([s], window, window.tokens, None, {0: []}, [], [0])
    for i in range(k + 1):
        with mx.stream(stream), s.own_errors():
            verdict, rows = _verdict(s, 0, window, i, i + 1)
            is_accepted = i < k and verdict.accepted.item()
        if s.end is not None:
            break
        tokens.append(verdict.tokens.astype(mx.uint32))
        step.own_logprobs[0] += rows
        if not is_accepted:
            break
        token: Any = verdict.tokens.item()
        logprobs = rows[0].squeeze(0)
        window.kept = [2 + i]
        yield token, logprobs, True
    if tokens:
        step.choices = mx.concatenate(tokens)[None]
    step.has_ended = [s.end is not None]
    n_accepted = window.kept[0] - 1
    return Choice(step, (mx.arange(k) < n_accepted)[None], [])


def _draw_together(sequences: list[Sequence], own: list[int], step: Step) -> list[int]:
    """Choose the tokens [B, 1] of sequences with equal samplers in one call of each, as mlx-lm does -> the others."""
    groups: dict[Any, list[int]] = {}
    for b in own:
        if (key := sequences[b].drawn_with) is not None:
            groups.setdefault(key, []).append(b)
    assert step.logprobs is not None
    for sampler, members in groups.items():
        index, first = mx.array(members), sequences[members[0]]
        with first.own_errors():
            step.choices[index] = sampler(step.logprobs[index, 0])[:, None]
        for b in members:
            sequences[b].end = first.end
    return [b for b in own if sequences[b].drawn_with is None]


def _verdicts(s: Sequence, b: int, window: Window) -> list[tuple[Verdict, list[mx.array]]]:
    """On sequence b, with a sampler or processors of its own; one for each position where it accepts in order."""
    k = window.plans[b].k
    if not s.in_order:
        return [_verdict(s, b, window, 0, k + 1)]
    verdicts = []
    for i in range(k + 1):
        verdicts.append(_verdict(s, b, window, i, i + 1))
        if i < k and not verdicts[-1][0].accepted.item():
            break
    return verdicts


def _verdict(s: Sequence, b: int, window: Window, i: int, j: int) -> tuple[Verdict, list[mx.array]]:
    """The verdict on positions i to j of sequence b, and their log probabilities, each [1, V]"""
    k = window.plans[b].k
    drafts, records = (window.drafts[b, :k], window.records[b]) if window.n_drafts > 0 else (NO_TOKENS, [])
    # [1, V], as mlx-lm hands it to samplers and processors, and an array of its own, since penalties write into it.
    rows = [s.logprobs(window.logits[b : b + 1, t], drafts[:t]) for t in range(i, j)]
    return s.acceptance.accept(rows, drafts[i:j], records[i:j], s.n_decided + i), rows
