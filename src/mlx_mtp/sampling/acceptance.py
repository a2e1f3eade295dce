"""The acceptance of drafts, and the token that replaces the first rejected one.

p is the target's distribution and q the draft's. There are three ways, and all emit tokens with exactly the distribution p:

``RejectionSampling``, for a sampler whose distribution is known (Leviathan et al. 2023, arXiv:2211.17192, and Chen et al. 2023,
arXiv:2302.01318): a draft x ~ q is accepted with probability min(1, p(x) / q(x)); a rejected draft is replaced by a token from
the residual, the normalized positive part of p - q.

``Coupled``, for a sampler with a seed (drafter-invariant speculative decoding: Daliri, Musco and Suresh 2024,
arXiv:2408.07978): the target's token is argmax(p / e) and the draft is argmax(q / e), with the same exponential noise e of the
position. The token does not depend on the draft, so the text depends only on the seed and the prompt.

``TokenMatch``, for any other sampler: it chooses a token at every position, and a draft is accepted if it is that choice.

A copied draft is a proposal with probability one, q(x) = 1: rejection sampling accepts it with probability p(x), and the
residual is p without x.

Texts whose acceptances are equal are drafted for and accepted in one call. ``draft`` takes the head's logits [G, V] for a draft
of each of G texts, and returns the drafts [G] and the ``Proposal`` for ``accept``. ``accept`` takes the target's log
probabilities [G, T, V], the drafts [G, T - 1], and the proposals of the head's drafts. This module does not depend on models or
caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import Sampler as AnySampler
from mlx_lm.sample_utils import greedy_sampler

from .processors import until_error
from .sampler import Sampler, Support, TextSampler, for_one_text, noise_words, sample


class Drafted(NamedTuple):
    """A text and its drafts in a window.

    Args:
        acceptance: That of the text.
        position: The position of the first draft, counted from the first generated token.
        n: The number of drafts.
        are_copies: Whether they are proposals with probability one.
    """

    acceptance: "Acceptance"
    position: int
    n: int = 1
    are_copies: bool = False


class Proposal(NamedTuple):
    """The distributions of a draft of each text.

    Args:
        support: The tokens that each draft may be, and their probabilities, [G, m].
        uniforms: The uniform numbers of the position, for XTC, [G, 1].
    """

    support: Support
    uniforms: mx.array


class Verdict(NamedTuple):
    """The tokens of each text, and which of its drafts are accepted; for fewer positions if its own sampler raises."""

    tokens: mx.array  # [G, T]: accepted drafts; at the first that is rejected, and after the last, the target's token
    accepted: mx.array  # [G, T - 1], bool; values after the first False are ignored


class TokenMatch:
    """Equal to no other, since an error of a text's own sampler ends this text alone."""

    def __init__(self, sampler: AnySampler):
        self.sampler = sampler

    def draft(self, texts: list[Drafted], logits: mx.array) -> tuple[mx.array, Proposal | None]:
        return mx.argmax(logits, axis=-1), None

    def accept(
        self, texts: list[Drafted], logprobs: mx.array, drafts: mx.array, proposals: Sequence[Proposal | None]
    ) -> Verdict:
        tokens = self._choose(logprobs)
        return Verdict(tokens, tokens[:, :-1] == drafts[:, : tokens.shape[1] - 1])

    def _choose(self, logprobs: mx.array) -> mx.array:
        """[1, T, V] -> [1, T], one position at a time, as mlx-lm passes them to samplers."""
        return mx.stack(until_error(self.sampler, (logprobs[:, t] for t in range(logprobs.shape[1]))), axis=1)


class Greedy(TokenMatch):
    def __init__(self) -> None:
        super().__init__(greedy_sampler)

    def _choose(self, logprobs: mx.array) -> mx.array:
        return mx.argmax(logprobs, axis=-1)


GREEDY = Greedy()  # of all texts


@dataclass(frozen=True)
class RejectionSampling:
    sampler: Sampler

    def draft(self, texts: list[Drafted], logits: mx.array) -> tuple[mx.array, Proposal]:
        uniforms = self.sampler.uniforms(len(texts))
        support = self.sampler.for_drafts(logits.shape[-1]).support(logits, uniforms)
        return support.tokens(sample(support.p, mx.random.uniform(shape=support.p.shape))), Proposal(support, uniforms)

    def accept(
        self, texts: list[Drafted], logprobs: mx.array, drafts: mx.array, proposals: Sequence[Proposal]
    ) -> Verdict:
        G, T, V = logprobs.shape
        proposals = proposals[: T - 1]
        # The draft and the verification of a position use the same uniform number.
        more = self.sampler.uniforms(G * (T - len(proposals))).reshape(G, -1)
        uniforms = mx.concatenate([*(p.uniforms for p in proposals), more], axis=1)  # [G, T]
        support = self.sampler.support(logprobs.reshape(-1, V), uniforms.reshape(-1, 1))
        u = mx.random.uniform(shape=support.p.shape)
        if T == 1:
            return Verdict(support.tokens(sample(support.p, u))[:, None], drafts == drafts)
        p = support.p.reshape(G, T, -1)
        ids = None if support.ids is None else support.ids.reshape(G, T, -1)
        # The number of drafts of each text, and of those that have a proposal, each [G, 1].
        n, n_proposed = mx.array([[t.n, 0 if t.are_copies else t.n] for t in texts]).T[..., None]
        is_draft, is_proposed = mx.arange(T) < n, mx.arange(T) < n_proposed  # [G, T]
        x = mx.where(is_draft, mx.pad(drafts, [(0, 0), (0, 1)]), V)  # V is no token
        is_x = (mx.arange(V) if ids is None else ids) == x[..., None]  # [G, T, m]
        q = mx.where(is_proposed[..., None], _probabilities(proposals, ids, T, V), is_x)
        accepted = mx.random.uniform(shape=(G, T)) * (q * is_x).sum(axis=-1) < (p * is_x).sum(axis=-1)
        others = support.tokens(sample(residual(p, q).reshape(support.p.shape), u))
        tokens = mx.where(accepted, x, others.reshape(G, T))
        return Verdict(tokens, accepted[:, :-1])


@dataclass(frozen=True)
class Coupled:
    """Equal for texts with any seeds.

    Args:
        sampler: The filters and the temperature.
        seed: The seed of the text.
        start: The position of the first generated token in the noise of the seed.
    """

    sampler: Sampler
    seed: int = field(compare=False)
    start: int = field(compare=False)

    def draft(self, texts: list[Drafted], logits: mx.array) -> tuple[mx.array, None]:
        return self.sampler.for_drafts(logits.shape[-1]).sample(logits, self._words(texts, 1)), None

    def accept(self, texts: list[Drafted], logprobs: mx.array, drafts: mx.array, proposals: Sequence[None]) -> Verdict:
        G, T, V = logprobs.shape
        tokens = self.sampler.sample(logprobs.reshape(-1, V), self._words(texts, T)).reshape(G, T)
        return Verdict(tokens, tokens[:, :-1] == drafts)

    def _words(self, texts: list[Drafted], n: int) -> mx.array:
        """Of n positions of each text, [G * n, 3]."""
        own = [(text.acceptance, text.position + t) for text in texts for t in range(n)]
        return mx.array([noise_words(a.seed, a.start + i) for a, i in own if isinstance(a, Coupled)], mx.uint32)


Acceptance = TokenMatch | RejectionSampling | Coupled


def _probabilities(proposals: Sequence[Proposal], ids: mx.array | None, T: int, V: int) -> mx.array:
    """The probabilities of tokens [G, T, m] as drafts, all tokens if ``None``; 0 at the positions without proposals."""
    if not proposals:
        return mx.zeros((1, T, 1))
    n, supports = len(proposals), [proposal.support for proposal in proposals]
    q = mx.stack([support.p for support in supports], axis=1)  # [G, n, m]
    if supports[0].ids is not None:
        proposed = mx.stack([support.ids for support in supports if support.ids is not None], axis=1)
        q = mx.put_along_axis(mx.zeros((len(q), n, V)), proposed, q, axis=-1)
    if ids is not None:
        q = mx.take_along_axis(q, ids[:, :n], axis=-1)
    return mx.pad(q, [(0, 0), (0, T - n), (0, 0)])


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
