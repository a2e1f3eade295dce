"""How often a model accepts the drafts of its head, on built-in text: to tell its own head from another's."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.load import load
from ..checkpoint.output import dtype_name, naming
from ..decoding.counts import DraftCounts
from ..decoding.loop import mtp_generate_step
from ..prompts import PYTHON

# On the built-in prompts a model accepts 0.5 to 0.9 of its own head's drafts. A head that knows nothing of the model is right
# no more often than the model's most frequent token occurs, 0.1 to 0.15 there; random heads and other models' reach 0 to 0.03.
FLOOR = 0.3
CHECK_TOKENS = 32  # after each prompt, to tell the model's head from another
COST_TOKENS = 128  # after each prompt, to measure what quantization costs


def measure_acceptance(model: nn.Module, tokenizer: TokenizerWrapper, max_tokens: int) -> float:
    """The acceptance rate of greedy decoding with one draft a step, over the tokens after each built-in prompt."""
    counts = DraftCounts()
    for prompt in PYTHON:
        tokens = mx.array(tokenizer.encode(prompt))
        for _ in mtp_generate_step(tokens, model, max_tokens=max_tokens, num_draft_tokens=1, counts=counts):
            pass
    return sum(counts.accepted) / max(sum(counts.drafted), 1)


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
    print("[INFO] Measuring what the quantization of the head costs, on built-in text")
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
