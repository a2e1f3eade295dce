"""The tokens that sequences choose at the positions of a window, and which of their drafts they accept."""

from typing import Any

import mlx.core as mx

from ..sampling.acceptance import Verdict
from ..sampling.processors import until_error
from .sequence import Sequence
from .window import NO_TOKENS, Step, Window


def choose(window: Window) -> Step:
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
            (tokens, accepted), step.own_logprobs[b] = _verdict(sequences[b], b, window)
            if len(sequences) == 1:
                step.choices, step.accepted = tokens[None].astype(mx.uint32), accepted[None]
            else:
                step.choices[b, : len(tokens)] = tokens
                step.accepted[b] = mx.pad(accepted, (0, k - len(accepted)))
    step.has_ended = [s.end is not None for s in sequences]
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


def _verdict(s: Sequence, b: int, window: Window) -> tuple[Verdict, list[mx.array]]:
    """The verdict on sequence b, which has its own sampler or processors, and the log probabilities, each [1, V]."""
    own, k = window.drafts, window.drafts.plans[b].k
    drafts, records = (own.tokens[b, :k], own.records[b]) if len(own) > 0 else (NO_TOKENS, [])
    # [1, V], as mlx-lm hands it to samplers and processors, and an array of its own, since penalties write into it.
    logprobs = until_error(lambda t: s.logprobs(window.logits[b : b + 1, t], drafts[:t]), range(k + 1))
    n = len(logprobs) - 1
    return s.acceptance.accept(logprobs, drafts[:n], records[:n], s.n_generated), logprobs
