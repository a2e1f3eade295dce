"""Comparison of the logits of compiled and ordinary passes: the fused operations of a device may round differently."""

import copy
from typing import Any

import mlx.core as mx

from ..layers.compiled import Compiler
from ..layers.passes import MOST_TOKENS

LENGTHS = (1, 2, 5, MOST_TOKENS)  # tokens of a pass


def compiled_differences(model: Any, prompt: mx.array) -> dict[int, float]:
    """The largest difference in any logit between compiled and other passes over n tokens, after a prompt [T]."""
    caches, compiled = model.make_cache(), {"compiler": Compiler()}
    mx.eval(model(prompt[None], cache=caches), [c.state for c in caches])
    differences = {}
    for n in LENGTHS:
        window = mx.repeat(prompt[None, -1:], n, axis=1)
        ours, others = (
            model(window, cache=copy.deepcopy(caches), n_confirmed=int(n > 1), **options).astype(mx.float32)
            for options in (compiled, {})
        )
        differences[n] = float(mx.abs(ours - others).max())
    return differences


def report(differences: dict[int, float]) -> str:
    """The result, in one line."""
    if not any(differences.values()):
        return f"Compiled passes over {', '.join(map(str, differences))} tokens give the same bits as uncompiled ones."
    different = ", ".join(f"{n}: {d:.3g}" for n, d in differences.items())
    return f"Compiled passes round differently here. The largest difference in a logit, by the tokens of a pass: {different}."
