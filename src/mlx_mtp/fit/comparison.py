"""The acceptance of drafts in the decoding loop on held-out texts, with standard errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tqdm import tqdm

from ..cli.display import table
from ..core.decoding.counts import DraftCounts
from .texts import continue_text

RESAMPLES = 2000  # resamplings of the texts, for the standard errors
SURE = 2.0  # standard errors that a gain must exceed, about 95 %


@dataclass(frozen=True)
class TextCounts:
    """Drafts at K positions in the continuations of n texts, and those accepted with all before them, [n, K]."""

    drafted: np.ndarray
    accepted: np.ndarray

    def rates(self, texts: np.ndarray) -> np.ndarray:
        """The acceptance by position and the tokens per step, over these texts [..., n] -> [..., K + 1]"""
        drafted, accepted = (x[texts].sum(axis=-2) for x in (self.drafted, self.accepted))  # [..., K]
        per_step = 1 + accepted.sum(axis=-1) / np.maximum(drafted[..., 0], 1)
        return np.concatenate([accepted / np.maximum(drafted, 1), per_step[..., None]], axis=-1)


def measure(
    model: Any, tokenizer: TokenizerWrapper, prompts: Sequence[list[int]], n_drafts: int, max_tokens: int
) -> TextCounts:
    drafted, accepted = (np.zeros((len(prompts), n_drafts), int) for _ in range(2))
    for i, prompt in enumerate(tqdm(prompts, desc="Measuring", unit="text", disable=None)):
        counts = DraftCounts()
        how: Any = {"max_tokens": max_tokens, "num_draft_tokens": n_drafts, "draft_p_min": 0.0, "counts": counts}
        continue_text(model, tokenizer, prompt, **how)
        drafted[i, : len(counts.drafted)] = counts.drafted
        accepted[i, : len(counts.accepted)] = counts.accepted
    return TextCounts(drafted, accepted)


@dataclass(frozen=True)
class Comparison:
    """A head before and after, on the same texts: acceptance by position, and the tokens per step last, [K + 1] each."""

    before: np.ndarray
    after: np.ndarray
    before_error: np.ndarray  # standard errors
    after_error: np.ndarray
    gain_error: np.ndarray  # of after - before, smaller since the texts are the same

    @property
    def is_better(self) -> bool:
        return bool(self.after[-1] - self.before[-1] > SURE * self.gain_error[-1])

    def table(self) -> str:
        names = [*(f"draft {i}" for i in range(1, len(self.before))), "tokens per step"]
        columns = zip(self.before, self.before_error, self.after, self.after_error, self.gain_error)
        figures = [
            [f"{b:.3f} ± {be:.3f}", f"{a:.3f} ± {ae:.3f}", f"{a - b:+.3f} ± {ge:.3f}"] for b, be, a, ae, ge in columns
        ]
        return "\n".join(table([["", "before", "after", "gain"], *([name, *row] for name, row in zip(names, figures))]))


def compare(before: TextCounts, after: TextCounts, seed: int = 0) -> Comparison:
    """Compare two heads on the same texts, with standard errors by resampling the texts (the bootstrap)."""
    n = len(before.drafted)
    unbiased = (n / (n - 1)) ** 0.5
    samples = np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))
    b, a = before.rates(samples), after.rates(samples)  # [RESAMPLES, K + 1]
    everything = np.arange(n)
    errors = (unbiased * x.std(axis=0) for x in (b, a, a - b))
    return Comparison(before.rates(everything), after.rates(everything), *errors)
