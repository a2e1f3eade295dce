"""Samplers that can say what distribution they draw from, which rejection sampling needs."""

import mlx.core as mx
from mlx_lm.sample_utils import Sampler as AnySampler
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc, greedy_sampler


class Sampler:
    """mlx-lm's sampler of the same arguments, with ``distribution``. Made by ``make_sampler``."""

    def __init__(
        self, temp, top_p, min_p, min_tokens_to_keep, top_k, xtc_probability, xtc_threshold, xtc_special_tokens
    ):
        self.temp = temp
        self.top_p, self.top_k = top_p, top_k
        self.min_p, self.min_tokens_to_keep = min_p, min_tokens_to_keep
        self.xtc_probability, self.xtc_threshold = xtc_probability, xtc_threshold
        self.xtc_special_tokens = xtc_special_tokens

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Log probabilities [B, V] -> tokens [B], as mlx-lm's samplers."""
        return mx.random.categorical(self.distribution(logprobs, self.coins(logprobs.shape[0])))

    def coins(self, n: int) -> mx.array:
        """What chance adds to n distributions before a token is drawn from them, [n, 1]: whether XTC applies."""
        return mx.random.uniform(shape=(n, 1)) if self.xtc_probability > 0 else mx.zeros((n, 1))

    def distribution(self, logprobs: mx.array, coins: mx.array) -> mx.array:
        """The distribution that a token is drawn from.

        Args:
            logprobs (mx.array): Log probabilities, [B, V].
            coins (mx.array): Of ``coins``, [B, 1].

        Returns:
            mx.array: Log probabilities after all filters and the temperature, float32, [B, V]; -inf where filtered out.
        """
        x = logprobs
        if 0 < self.top_p < 1:
            x = apply_top_p(x, self.top_p)
        if self.min_p != 0:
            x = apply_min_p(x, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability > 0:
            # mlx-lm tosses one coin a call: with a probability of 1 it always applies, and the coin is ours.
            always = apply_xtc(x, 1.0, self.xtc_threshold, self.xtc_special_tokens)
            x = mx.where(coins > self.xtc_probability, x, always)
        if self.top_k > 0:
            x = apply_top_k(x, self.top_k)
        x = x.astype(mx.float32) * (1 / self.temp)
        return x - mx.logsumexp(x, axis=-1, keepdims=True)


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: list[int] | None = None,
) -> AnySampler:
    """
    Make a sampler function, as mlx-lm's ``make_sampler`` of the same arguments, whose drafts stand more often.

    It draws from the same distribution. Since it can also say which that is, drafts go by rejection sampling.

    Returns:
        Sampler: A sampler which takes log-probabilities and returns tokens.

    Raises:
        ValueError: An argument is out of range.
    """
    if temp == 0:
        return greedy_sampler
    # Here, since mlx-lm raises inside compiled functions, which then leave a random state that nothing can be drawn from.
    limits: dict[str, tuple[float, float]] = {"min_p": (min_p, 1), "xtc_probability": (xtc_probability, 1)}
    if xtc_probability > 0:
        limits["xtc_threshold"] = (xtc_threshold, 0.5)
    for name, (value, limit) in limits.items():
        if not 0 <= value <= limit:
            raise ValueError(f"{name} must be from 0 to {limit}, not {value}.")
    return Sampler(
        temp, top_p, min_p, min_tokens_to_keep, top_k, xtc_probability, xtc_threshold, xtc_special_tokens or []
    )
