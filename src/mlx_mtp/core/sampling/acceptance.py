"""The acceptance of drafts, and the token that replaces the first rejected one: see docs/develop/sampling.md.

p is the target's distribution and q the draft's. All emit tokens with exactly the distribution p. Texts whose acceptances are
equal are drafted for and accepted in one call: ``draft`` takes the head's logits [G, V] for a draft of each of G texts, and
returns the drafts [G] and the ``Proposal`` for ``accept``, which takes the target's log probabilities [G, T, V], the drafts
[G, T - 1], and the proposals of the head's drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import Sampler as AnySampler
from mlx_lm.sample_utils import greedy_sampler

from .processors import until_error
from .sampler import Sampler, Support, TextSampler, for_one_text, noise_words, uniform


class Drafted(NamedTuple):
    """A text and its drafts in a window."""

    acceptance: "Acceptance"
    position: int  # that of the first draft, counted from the first generated token
    n: int = 1
    are_copies: bool = False  # proposals with probability one, q(x) = 1


# The distributions of a draft of each text, and the uniform numbers of its position for XTC, [G, 1]
Proposal = tuple[Support, mx.array]


class Verdict(NamedTuple):
    """The tokens of each text, and which of its drafts are accepted; for fewer positions if its own sampler raises."""

    tokens: mx.array  # [G, T]: accepted drafts; at the first that is rejected, and after the last, the target's token
    accepted: mx.array  # [G, T - 1], bool; values after the first False are ignored


class TokenMatch:
    """Accept a draft if it is the choice of the text's sampler, which may be any, at the position.

    Equal to no other, since an error of a text's own sampler ends this text alone.
    """

    def __init__(self, sampler: AnySampler):
        self.sampler = sampler

    def draft(self, texts: list[Drafted], logits: mx.array) -> tuple[mx.array, Proposal | None]:
        return mx.argmax(logits, axis=-1), None

    def accept(
        self, texts: list[Drafted], logprobs: mx.array, drafts: mx.array, proposals: Sequence[Proposal | None]
    ) -> Verdict:
        if self.sampler is greedy_sampler:
            tokens = mx.argmax(logprobs, axis=-1)
        else:  # one text, one position at a time, as mlx-lm does
            tokens = mx.stack(until_error(self.sampler, (logprobs[:, t] for t in range(logprobs.shape[1]))), axis=1)
        return Verdict(tokens, tokens[:, :-1] == drafts[:, : tokens.shape[1] - 1])


GREEDY = TokenMatch(greedy_sampler)  # one for all texts


@dataclass(frozen=True)
class RejectionSampling:
    """Accept a draft x ~ q with probability min(1, p(x) / q(x)), or replace it by a token from the positive part of p - q.

    Leviathan et al. 2023, arXiv:2211.17192, and Chen et al. 2023, arXiv:2302.01318.
    """

    sampler: Sampler

    def draft(self, texts: list[Drafted], logits: mx.array) -> tuple[mx.array, Proposal]:
        uniforms = self.sampler.uniforms(len(texts))
        support = self.sampler.support(logits, uniforms, True)
        return support.draw(), (support, uniforms)

    def accept(
        self, texts: list[Drafted], logprobs: mx.array, drafts: mx.array, proposals: Sequence[Proposal]
    ) -> Verdict:
        G, T, V = logprobs.shape
        proposals = proposals[: T - 1]
        # The draft and the verification of a position use the same uniform number.
        more = self.sampler.uniforms(G * (T - len(proposals))).reshape(G, -1)
        uniforms = mx.concatenate([*(u for _, u in proposals), more], axis=1)  # [G, T]
        support = self.sampler.support(logprobs.reshape(-1, V), uniforms.reshape(-1, 1))
        if T == 1:
            return Verdict(support.draw()[:, None], drafts == drafts)
        # The number of drafts of each text, and of those that are copies, each [G, 1].
        n, n_copies = mx.array([[t.n, t.n if t.are_copies else 0] for t in texts]).T[..., None]
        is_draft, is_copy = mx.arange(T) < n, mx.arange(T) < n_copies  # [G, T]
        x = mx.pad(drafts, [(0, 0), (0, 1)]).flatten()  # and the following by position, [G * T, ...]
        # The probabilities of all tokens as drafts of each position that has a draft, else 0, [G * T, V].
        is_sampled = is_draft & ~is_copy
        of_each = [s._replace(p=s.p * is_sampled[:, i, None]).of_all(V) for i, (s, _) in enumerate(proposals)]
        q = mx.stack([*of_each, *[mx.zeros((G, V))] * (T - len(of_each))], axis=1).reshape(-1, V)
        q = q.at[mx.arange(G * T), x].add(is_copy.flatten())
        rest = residual(support.p, q if support.ids is None else mx.take_along_axis(q, support.ids, axis=-1))
        others = support._replace(p=rest).draw()
        bound = uniform(G * T) * Support(None, q).at(x)
        accepted = is_draft.flatten() & (bound < support.at(x))
        return Verdict(mx.where(accepted, x, others).reshape(G, T), accepted.reshape(G, T)[:, :-1])


@dataclass(frozen=True)
class Coupled:
    """Choose the target's token and the draft by the same noise of a seed, so that the text does not depend on drafts.

    Daliri, Musco and Suresh 2024, arXiv:2408.07978. Equal for texts with any seeds.
    """

    sampler: Sampler
    seed: int = field(compare=False)
    start: int = field(compare=False)  # the position of the first generated token in the noise

    def draft(self, texts: list[Drafted], logits: mx.array) -> tuple[mx.array, None]:
        return self.sampler.sample(logits, self._words(texts, 1), are_drafts=True), None

    def accept(self, texts: list[Drafted], logprobs: mx.array, drafts: mx.array, proposals: Sequence[None]) -> Verdict:
        G, T, V = logprobs.shape
        tokens = self.sampler.sample(logprobs.reshape(-1, V), self._words(texts, T)).reshape(G, T)
        return Verdict(tokens, tokens[:, :-1] == drafts)

    def _words(self, texts: list[Drafted], n: int) -> mx.array:
        """The ``noise_words`` of n positions of each text, [G * n, 3]."""
        positions = [(text.acceptance, text.position + t) for text in texts for t in range(n)]
        return mx.array([noise_words(a.seed, a.start + i) for a, i in positions if isinstance(a, Coupled)], mx.uint32)


Acceptance = TokenMatch | RejectionSampling | Coupled


def residual(p: mx.array, q: mx.array) -> mx.array:
    """The positive part of p - q, [..., m], not normalized; p if rounding makes it zero."""
    rest = mx.maximum(p - q, 0)
    return mx.where(rest.sum(axis=-1, keepdims=True) > 0, rest, p)


def n_leading(accepted: Sequence[bool]) -> int:
    """The number of accepted drafts: those before the first rejected one."""
    return list(accepted).index(False) if False in accepted else len(accepted)


def make_acceptance(sampler: AnySampler | None) -> Acceptance:
    """Make the acceptance of one text's drafts, or raise an MTPError if the sampler is for a text that has begun."""
    sampler = for_one_text(sampler)
    if isinstance(sampler, TextSampler):
        return Coupled(sampler.sampler.sampler, sampler.sampler.seed, sampler.start)
    if isinstance(sampler, Sampler):
        return RejectionSampling(sampler)
    return GREEDY if sampler is None or sampler is greedy_sampler else TokenMatch(sampler)
