"""Whether a model accepts the drafts of its head, on built-in text: to tell its own head from another's."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...decoding.counts import DraftCounts
from ...decoding.loop import mtp_generate_step
from ...prompts import PYTHON

# On the built-in prompts a model accepts 0.5 to 0.9 of its own head's drafts. A head that knows nothing of the model is right
# no more often than the model's most frequent token occurs, 0.1 to 0.15 there; random heads and other models' reach 0 to 0.03.
FLOOR = 0.3
CHECK_TOKENS = 32  # after each prompt, to tell the model's head from another


def measure_acceptance(model: nn.Module, tokenizer: TokenizerWrapper, max_tokens: int = CHECK_TOKENS) -> float:
    """The acceptance rate of greedy decoding with one draft a step, over the tokens after each built-in prompt."""
    counts = DraftCounts()
    for prompt in PYTHON:
        tokens = mx.array(tokenizer.encode(prompt))
        for _ in mtp_generate_step(tokens, model, max_tokens=max_tokens, num_draft_tokens=1, counts=counts):
            pass
    return sum(counts.accepted) / max(sum(counts.drafted), 1)
