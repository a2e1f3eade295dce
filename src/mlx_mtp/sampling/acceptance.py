"""The acceptance of drafts, and the token that replaces the first rejected one.

p is the target's distribution and q the draft's. There are three ways, and all emit tokens with exactly the distribution p:

``RejectionSampling``, for a sampler whose distribution is known (Leviathan et al. 2023, arXiv:2211.17192, and Chen et al. 2023,
arXiv:2302.01318): a draft x ~ q is accepted with probability min(1, p(x) / q(x)); a rejected draft is replaced by a token from
the residual, the normalized positive part of p - q.

``Coupled``, for a sampler with a seed (drafter-invariant speculative decoding: Daliri, Musco and Suresh 2024,
arXiv:2408.07978): the target's token is argmax(log p + g) and the draft is argmax(log q + g), with the same Gumbel noise g of
the position. The token does not depend on the draft, so the text depends only on the seed and the prompt.

``TokenMatch``, for any other sampler: it chooses a token at every position, and a draft is accepted if it is that choice.

A copied draft is a proposal with probability one, q(x) = 1: rejection sampling accepts it with probability p(x), and the
residual is p without x.

``draft`` takes the head's log probabilities [1, V], and returns a draft [1] and its record for ``accept``. ``accept`` takes the
target's log probabilities, k + 1 times [1, V], the drafts [k] and their records, ``None`` for a copy. Positions count from the
first generated token. This module does not depend on models or caches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import Sampler as AnySampler
from mlx_lm.sample_utils import greedy_sampler

from .processors import until_error
from .sampler import Sampler, TextSampler, for_one_text, gumbel, uniform


class Verdict(NamedTuple):
    """The tokens of a window with k drafts, and which of the drafts are accepted; fewer where the sampler raises."""

    tokens: mx.array  # [k + 1]: accepted drafts; at the first that is rejected, and after the last, the target's token
    accepted: mx.array  # [k], bool; values after the first False are ignored


class TokenMatch:
    def __init__(self, sampler: AnySampler):
        self.sampler = sampler

    def draft(self, logprobs: mx.array, position: int) -> tuple[mx.array, None]:
        return mx.argmax(logprobs, axis=-1), None

    def accept(self, logprobs: list[mx.array], drafts: mx.array, records: Sequence[None], position: int) -> Verdict:
        tokens = mx.concatenate(until_error(self.sampler, logprobs))  # one at a time, as mlx-lm passes them to samplers
        return Verdict(tokens, tokens[:-1] == drafts[: len(tokens) - 1])


class RejectionSampling:
    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def draft(self, logprobs: mx.array, position: int) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        u = self.sampler.uniforms(1)
        log_q = self.sampler.distribution(logprobs, u)
        return mx.random.categorical(log_q), (log_q, u)

    def accept(
        self,
        logprobs: list[mx.array],
        drafts: mx.array,
        records: Sequence[tuple[mx.array, mx.array] | None],
        position: int,
    ) -> Verdict:
        k = len(drafts)
        # The draft and the verification of a position use the same uniform number.
        uniforms = mx.concatenate([r[1] if r else self.sampler.uniforms(1) for r in [*records, None]])  # [k + 1, 1]
        log_p = self.sampler.distribution(mx.concatenate(logprobs), uniforms)  # [k + 1, V]
        if k == 0:
            return Verdict(mx.random.categorical(log_p), drafts == drafts)
        ids = mx.arange(log_p.shape[-1])
        log_q = mx.concatenate([r[0] if r else mx.log(ids[None] == x) for r, x in zip(records, drafts)])  # [k, V]
        accepted = accept(log_p[:k], log_q, drafts, mx.random.uniform(shape=(k,)))
        others = mx.random.categorical(mx.concatenate([log_residual(log_p[:k], log_q), log_p[k:]]))
        tokens = mx.concatenate([mx.where(accepted, drafts, others[:k]), others[k:]])
        return Verdict(tokens, accepted)


class Coupled:
    def __init__(self, sampler: TextSampler):
        self.sampler, self.start = sampler.sampler, sampler.start

    def draft(self, logprobs: mx.array, position: int) -> tuple[mx.array, mx.array]:
        noise = self._noise(position, logprobs.shape[-1])
        return mx.argmax(self.sampler.distribution(logprobs, self._coins(position, 1)) + noise, axis=-1), noise

    def accept(
        self, logprobs: list[mx.array], drafts: mx.array, records: Sequence[mx.array | None], position: int
    ) -> Verdict:
        n, V = len(logprobs), logprobs[0].shape[-1]
        noise = mx.stack([self._noise(position + t, V) if g is None else g for t, g in enumerate([*records, None])])
        # Both [k + 1, V].
        log_p = self.sampler.distribution(mx.concatenate(logprobs), self._coins(position, n))
        tokens = mx.argmax(log_p + noise, axis=-1)
        return Verdict(tokens, tokens[:-1] == drafts)

    def _noise(self, position: int, size: int) -> mx.array:
        return gumbel(self.sampler.seed, self.start + position, size)

    def _coins(self, position: int, n: int) -> mx.array:
        return mx.array([[uniform(self.sampler.seed, self.start + position + t)] for t in range(n)])  # [n, 1]


Acceptance = TokenMatch | RejectionSampling | Coupled


def accept(log_p: mx.array, log_q: mx.array, drafts: mx.array, u: mx.array) -> mx.array:
    """Accept each draft with probability min(1, p(x) / q(x)) -> [k], bool.

    Args:
        log_p (mx.array): The target's log probabilities, [k, V].
        log_q (mx.array): The draft's log probabilities, [k, V].
        drafts (mx.array): The drafts, drawn from q, [k].
        u (mx.array): Uniform numbers in [0, 1), [k].
    """
    p = mx.exp(mx.take_along_axis(log_p, drafts[:, None], axis=-1)).squeeze(-1)  # [k]
    q = mx.exp(mx.take_along_axis(log_q, drafts[:, None], axis=-1)).squeeze(-1)
    return u * q < p


def log_residual(log_p: mx.array, log_q: mx.array) -> mx.array:
    """The log of the positive part of p - q, [k, V], not normalized; log p if rounding makes it zero."""
    rest = mx.maximum(mx.exp(log_p) - mx.exp(log_q), 0)
    return mx.where(rest.sum(axis=-1, keepdims=True) > 0, mx.log(rest), log_p)


def n_leading(accepted: Sequence[bool]) -> int:
    """The number of accepted drafts: those before the first rejected one."""
    return list(accepted).index(False) if False in accepted else len(accepted)


def make_acceptance(sampler: AnySampler | None) -> Acceptance:
    """Make the acceptance of one text's drafts, or raise a ValueError if the sampler is for a text that has begun."""
    sampler = for_one_text(sampler)
    if isinstance(sampler, TextSampler):
        return Coupled(sampler)
    return RejectionSampling(sampler) if isinstance(sampler, Sampler) else TokenMatch(sampler or greedy_sampler)
