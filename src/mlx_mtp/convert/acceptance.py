"""Trying a head that was grafted or quantized, on built-in text."""

from pathlib import Path

import mlx.nn as nn

from ..checkpoint.load import load
from ..checkpoint.originals.acceptance import CHECK_TOKENS, FLOOR, measure_acceptance
from ..checkpoint.storage.output import dtype_name, naming

COST_TOKENS = 128  # after each prompt, to measure what quantization costs


def check_acceptance(folder: Path, mtp_from: str, model: str) -> None:
    """Raise a ValueError if the model rejects nearly all drafts of the head that was grafted onto it."""
    print("[INFO] Checking the head on built-in text")
    try:
        with naming(folder, model):
            loaded, tokenizer = load(str(folder))
        acceptance = measure_acceptance(loaded, tokenizer, CHECK_TOKENS)
    except RuntimeError as e:
        raise ValueError(f"{model} cannot be run here ({e}): --skip-check skips the check of its head.") from e
    if acceptance < FLOOR:
        raise ValueError(
            f"The model accepts {acceptance:.0%} of the drafts of the head of {mtp_from} on built-in text, and at least "
            f"{FLOOR:.0%} of its own head's: nothing was written. Graft from the original that {model} was converted from."
        )
    print(f"[INFO] Drafts accepted on built-in text: {acceptance:.0%}")


def print_cost(target: Path, head: nn.Module, bits: int) -> None:
    """Print the acceptance rate with the quantized head, and with the head as it was."""
    print("[INFO] Measuring the cost of the head's quantization, on built-in text")
    try:
        model, tokenizer = load(str(target))
        quantized = measure_acceptance(model, tokenizer, COST_TOKENS)
        getattr(model, "language_model", model).mtp = head
        before = measure_acceptance(model, tokenizer, COST_TOKENS)
    except RuntimeError as e:
        print(f"[INFO] It cannot be measured here: {e}")
        return
    dtype = dtype_name(head.fc.weight.dtype)
    print(f"[INFO] Drafts accepted: {quantized:.0%} with the head at {bits} bits, {before:.0%} with it in {dtype}")
