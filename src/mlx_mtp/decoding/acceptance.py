"""Which drafts stand, and what takes the place of the first that does not.

Rejection sampling, for a sampler whose distribution is known (Leviathan et al. 2023, arXiv:2211.17192, and Chen et al. 2023,
arXiv:2302.01318; p is the target's distribution and q the draft's): a draft x ~ q stands with probability
min(1, p(x) / q(x)); in the place of one that does not, a token is drawn from the normalized positive part of p - q.

Token match, for any other sampler: it chooses a token at every position, and a draft stands while it is that choice. The
random state is then put back to what it was after the last choice that counts, so that the tokens are those of plain
decoding with the same seed.

Both emit tokens of exactly the distribution of plain decoding. This module knows nothing of models and caches.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import Sampler as AnySampler
from mlx_lm.sample_utils import greedy_sampler

from .processors import keeps_state
from .sampling import Sampler


class Verdict(NamedTuple):
    """On a window of T positions with k drafts, at the first k of them."""

    tokens: mx.array  # [T]: the drafts that stand; where the first falls, and after the last, the target's
    stands: mx.array  # [k], bool; those after the first False mean nothing
    random_states: list[mx.array]  # after each position's choice, [2]; empty where nothing is to be put back


class TokenMatch:
    def __init__(self, sampler: AnySampler):
        self.sampler = sampler
        self.keeps_state = keeps_state(sampler)

    def draft(self, logprobs: mx.array) -> tuple[mx.array, Any]:
        """Log probabilities [1, V] -> a draft [1], and what ``judge`` needs to know of it."""
        return mx.argmax(logprobs, axis=-1), None

    def judge(self, logprobs: list[mx.array], drafts: mx.array, records: Sequence[Any]) -> Verdict:
        """
        Args:
            logprobs (List[mx.array]): The target's, T times [1, V].
            drafts (mx.array): [k], with k <= T.
            records (Sequence[Any]): What ``draft`` gave with each.
        """
        choices: list[mx.array] = []
        states: list[mx.array] = []
        for row in logprobs:  # one at a time, as mlx-lm hands them to samplers
            choices.append(self.sampler(row))
            if self.sampler is not greedy_sampler:
                states.append(mx.random.state[0])  # type: ignore[index]
        tokens = mx.concatenate(choices)
        return Verdict(tokens, tokens[: len(drafts)] == drafts, states)


class RejectionSampling:
    keeps_state = False

    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def draft(self, logprobs: mx.array) -> tuple[mx.array, Any]:
        """Log probabilities [1, V] -> a draft [1], and what ``judge`` needs to know of it."""
        coin = self.sampler.coins(1)
        log_q = self.sampler.distribution(logprobs, coin)
        return mx.random.categorical(log_q), (log_q, coin)

    def judge(self, logprobs: list[mx.array], drafts: mx.array, records: Sequence[Any]) -> Verdict:
        """
        Args:
            logprobs (List[mx.array]): The target's, T times [1, V].
            drafts (mx.array): [k], with k <= T.
            records (Sequence[Any]): What ``draft`` gave with each.
        """
        k, T = len(drafts), len(logprobs)
        # A position's coin is the same for its draft and for its verification.
        coins = mx.concatenate([coin for _, coin in records] + [self.sampler.coins(T - k)])  # [T, 1]
        log_p = self.sampler.distribution(mx.concatenate(logprobs), coins)  # [T, V]
        if k == 0:
            return Verdict(mx.random.categorical(log_p), drafts == drafts, [])
        log_q = mx.concatenate([log_q for log_q, _ in records])  # [k, V]
        stands = accept(log_p[:k], log_q, drafts, mx.random.uniform(shape=(k,)))
        others = mx.random.categorical(mx.concatenate([log_residual(log_p[:k], log_q), log_p[k:]]))  # [T]
        tokens = mx.concatenate([mx.where(stands, drafts, others[:k]), others[k:]])
        return Verdict(tokens, stands, [])


def accept(log_p: mx.array, log_q: mx.array, drafts: mx.array, u: mx.array) -> mx.array:
    """Whether each draft stands, with probability min(1, p(x) / q(x)).

    Args:
        log_p (mx.array): The target's log probabilities, [k, V].
        log_q (mx.array): The draft's, [k, V].
        drafts (mx.array): Drawn from q, [k].
        u (mx.array): Uniform in [0, 1), [k].

    Returns:
        mx.array: [k], bool.
    """
    p = mx.exp(mx.take_along_axis(log_p, drafts[:, None], axis=-1)).squeeze(-1)  # [k]
    q = mx.exp(mx.take_along_axis(log_q, drafts[:, None], axis=-1)).squeeze(-1)
    return u * q < p


def log_residual(log_p: mx.array, log_q: mx.array) -> mx.array:
    """The log of the positive part of p - q, [k, V], not normalized; log p where rounding leaves nothing of it."""
    rest = mx.maximum(mx.exp(log_p) - mx.exp(log_q), 0)
    return mx.where(rest.sum(axis=-1, keepdims=True) > 0, mx.log(rest), log_p)


def n_leading(stands: Sequence[bool]) -> int:
    """The number of drafts that stand: those before the first that does not."""
    return list(stands).index(False) if False in stands else len(stands)


def rewind(random_states: Sequence[mx.array], n: int) -> None:
    """Put MLX's random state back to what it was after position n, where ``Verdict`` has recorded it."""
    if random_states:
        high, low = np.array(random_states[n]).tolist()
        mx.random.seed(high << 32 | low)  # which sets the state to just these two words


def make_acceptance(sampler: AnySampler | None) -> TokenMatch | RejectionSampling:
    return RejectionSampling(sampler) if isinstance(sampler, Sampler) else TokenMatch(sampler or greedy_sampler)
