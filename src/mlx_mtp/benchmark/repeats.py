"""Whether a generated text repeats itself. Drafts are nearly always right in a loop, so its figures hold for loops alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..drafts.prompt_lookup import N_GRAM

LOOPS = 1 / 3  # a larger share of repeated tokens is reported


def repeated_share(prompt: Sequence[int], text: Sequence[int]) -> float:
    """How much of a generated text could be copied from itself, and not from its prompt.

    A token counts where it and the tokens before it, as many as a copy must match, stood in the text before, and nowhere in the
    prompt. This depends on the tokens alone, and not on their source. In a loop, all tokens after the first turn count.
    """
    known, seen, n = set(_n_grams(prompt)), set(), 0
    for n_gram in _n_grams(text):
        n += n_gram in seen and n_gram not in known
        seen.add(n_gram)
    return n / len(text)


def _n_grams(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[i:] for i in range(N_GRAM + 1))))


def repeated_shares(prompts: Mapping[str, mx.array], texts: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """The repeated share of each text, by prompt."""
    shares = {}
    for name, tokens in prompts.items():
        prompt: Any = tokens.tolist()
        shares[name] = repeated_share(prompt, texts[name])
    return shares


def warning(shares: Mapping[str, float]) -> str | None:
    """A line that names the texts that repeat themselves, if some do."""
    loops = [f"{name} {share:.0%}" for name, share in shares.items() if share > LOOPS]
    if not loops:
        return None
    return (
        f"Warning: texts that repeat themselves, and how much of each: {', '.join(loops)}. Their figures hold for loops: "
        "use other prompts."
    )
