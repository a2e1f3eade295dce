"""The tokens that sequences choose at the positions of a window, and which of their drafts they accept."""

from collections.abc import Generator
from typing import Any

import mlx.core as mx

from ..sampling.acceptance import Verdict
from .sequence import Sequence
from .window import NO_TOKENS, Step, Token, Window


def choose_at_once(window: Window) -> Step:
    """Choose a token at every position of every sequence; greedy sequences share one argmax over the batch."""
    sequences, drafts = window.drafts.sequences, window.drafts.tokens
    step = Step(window, window.tokens, drafts, n_accepted=[0] * len(sequences))
    own = [b for b, s in enumerate(sequences) if s.end is None and not s.is_greedy]
    k = len(window.drafts)
    if len(sequences) > 1 or not own:
        step.logprobs = window.logits - mx.logsumexp(window.logits, axis=-1, keepdims=True)
        step.choices = mx.argmax(step.logprobs, axis=-1)  # [B, T]
        if k > 0:
            step.accepted = step.choices[:, :-1] == drafts
    elif k > 0:
        step.accepted = mx.zeros(drafts.shape, mx.bool_)
    if len(sequences) > 1 and k == 0:
        own = _draw_in_groups(sequences, own, step)
    for b in own:
        with sequences[b].own_errors():
            verdicts = _verdicts(sequences[b], b, window)
            tokens = mx.concatenate([v.tokens for v, _ in verdicts]).astype(mx.uint32)
            accepted = mx.concatenate([v.accepted for v, _ in verdicts])
            step.own_logprobs[b] = [each for _, logprobs in verdicts for each in logprobs]
            if len(sequences) == 1:
                step.choices, step.accepted = tokens[None], accepted[None]
                step.random_states = verdicts[0][0].random_states
            else:
                step.choices[b, : len(tokens)] = tokens
                step.accepted[b, : len(accepted)] = accepted
    step.has_ended = [s.end is not None for s in sequences]
    return step


def choose_in_order(window: Window, stream: Any) -> Generator[Token, None, Step]:
    """Choose the tokens of one sequence one after the other, for processors and samplers that keep state.

    Each processor and the sampler is called once for each token, in order. Each accepted draft is yielded before the next
    position is chosen.
    """
    ((s,), (plan,)), tokens = (window.drafts.sequences, window.drafts.plans), list[mx.array]()
    s.counts.source = plan.source  # the source of drafts that the caller gets before ``Sequence.take`` counts them
    step = Step(window, window.tokens, window.drafts.tokens, own_logprobs={0: []}, n_accepted=[0])
    for i in range(plan.k + 1):
        with mx.stream(stream), s.own_errors():
            verdict, own_logprobs = _verdict(s, 0, window, i, i + 1)
            is_accepted = i < plan.k and verdict.accepted.item()
        if s.end is not None:
            break
        tokens.append(verdict.tokens.astype(mx.uint32))
        step.own_logprobs[0] += own_logprobs
        if not is_accepted:
            break
        token: Any = verdict.tokens.item()
        logprobs = own_logprobs[0].squeeze(0)
        window.kept = [2 + i]
        yield token, logprobs, True
    if tokens:
        step.choices = mx.concatenate(tokens)[None]
    step.has_ended = [s.end is not None]
    step.accepted = (mx.arange(plan.k) < window.kept[0] - 1)[None]
    return step


def _draw_in_groups(sequences: list[Sequence], own: list[int], step: Step) -> list[int]:
    """Call each distinct sampler once for all sequences that share it, as mlx-lm does.

    Returns:
        List[int]: The sequences that have no shared sampler, whose tokens are still to be chosen.
    """
    groups: dict[Any, list[int]] = {}
    for b in own:
        if (key := sequences[b].shared_sampler) is not None:
            groups.setdefault(key, []).append(b)
    assert step.logprobs is not None
    for sampler, members in groups.items():
        index, first = mx.array(members), sequences[members[0]]
        with first.own_errors():
            step.choices[index] = sampler(step.logprobs[index, 0])[:, None]
        for b in members:
            sequences[b].end = first.end
    return [b for b in own if sequences[b].shared_sampler is None]


def _verdicts(s: Sequence, b: int, window: Window) -> list[tuple[Verdict, list[mx.array]]]:
    """The verdicts on sequence b, which has its own sampler or processors.

    There is one verdict for the whole window, or one for each position where the sequence accepts in order.
    """
    k = window.drafts.plans[b].k
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
    own = window.drafts
    drafts, records = (own.tokens[b, : own.plans[b].k], own.records[b]) if len(own) > 0 else (NO_TOKENS, [])
    # [1, V], as mlx-lm hands it to samplers and processors, and an array of its own, since penalties write into it.
    logprobs = [s.logprobs(window.logits[b : b + 1, t], drafts[:t]) for t in range(i, j)]
    return s.acceptance.accept(logprobs, drafts[i:j], records[i:j], s.n_generated + i), logprobs
