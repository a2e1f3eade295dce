"""Cheaper drafts for a loaded model: fewer bits of its head, and an output layer for drafts alone."""

from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..distributed.ranks import from_rank_0
from ..layers.draft_lm_head import BITS, DraftLMHead, quantize_head
from ..models.protocol import MTPModel
from .vocabulary import DraftVocab, choose_ids


def check_bits(mtp_bits: int | None, draft_head_bits: int | None) -> None:
    """Raise a ValueError if MLX does not quantize to these."""
    for name, bits in (("mtp_bits", mtp_bits), ("draft_head_bits", draft_head_bits)):
        if bits is not None and bits not in BITS:
            raise ValueError(f"{name} is {bits}; MLX quantizes to {', '.join(map(str, BITS))} bits.")


def cheapen_drafts(
    model: MTPModel,
    tokenizer: TokenizerWrapper,
    path: Path,
    draft_vocab: DraftVocab | None,
    mtp_bits: int | None,
    draft_head_bits: int | None,
) -> None:
    """Apply these arguments of ``mlx_mtp.load``; ``path`` is the checkpoint's folder. The model is whole, not sharded yet."""
    check_bits(mtp_bits, draft_head_bits)
    if mtp_bits is not None:
        quantize_head(model.mtp, mtp_bits)
    ids = from_rank_0(model.ranks, lambda: choose_ids(draft_vocab, path, model.vocab_size, tokenizer))
    if ids is not None or draft_head_bits is not None:
        model.drafting.lm_head = DraftLMHead(model.output_layer, ids, draft_head_bits)
