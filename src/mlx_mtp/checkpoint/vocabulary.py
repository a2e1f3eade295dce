"""Cheaper drafts of a loaded model: a draft vocabulary (the first n ids, a list in a file, or all), and fewer bits."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..distributed.ranks import from_rank_0
from ..layers.draft_lm_head import BITS, DraftLMHead, quantize_head
from ..models.protocol import MTPModel

FIX = "write it with `mlx_mtp draft_vocab --model MODEL --corpus FILES --size N`."
LIST_FILE = "draft_vocab.json"  # in a checkpoint's folder

DraftVocab = int | str | Path | Sequence[int]


def choose_ids(
    draft_vocab: DraftVocab | None, path: Path, vocab_size: int, tokenizer: TokenizerWrapper
) -> list[int] | None:
    """The ids of a draft vocabulary, in ascending order, including special and stop tokens; ``None`` for all.

    Args:
        draft_vocab (Union[int, str, Path, Sequence[int]], optional): As in ``mlx_mtp.load``.
        path (Path): The checkpoint's folder.
        vocab_size (int): The number of rows of the output layer.
    """
    if draft_vocab is None and (path / LIST_FILE).exists():
        draft_vocab = path / LIST_FILE
    if draft_vocab is None or (type(draft_vocab) is int and draft_vocab == 0):
        return None
    always = always_in(tokenizer, vocab_size)
    if type(draft_vocab) is int:
        check_size(draft_vocab, vocab_size, always)
        return select(range(vocab_size), draft_vocab, always)
    if isinstance(draft_vocab, str | Path):
        return sorted(always.union(read_list(Path(draft_vocab), vocab_size)))
    return sorted(always.union(check_ids(draft_vocab, vocab_size, "draft_vocab")))


def always_in(tokenizer: TokenizerWrapper, vocab_size: int) -> set[int]:
    """The ids of special, added and stop tokens, which are rare in text and frequent in answers."""
    ids = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), *tokenizer.eos_token_ids}
    return {i for i in ids if i < vocab_size}


def check_size(size: int, vocab_size: int, always: set[int]) -> None:
    if not max(len(always), 1) <= size <= vocab_size:
        raise ValueError(
            f"A draft vocabulary of {size} token ids is not possible: this model has {vocab_size}, "
            f"and its {len(always)} special and stop tokens are always included."
        )


def select(ranked: Iterable[int], size: int, always: set[int]) -> list[int]:
    """Select ``size`` ids, in ascending order: the ids that are always included, then the first of the ranking."""
    ids = set(always)
    for i in ranked:
        if len(ids) == size:
            break
        ids.add(i)
    return sorted(ids)


def read_list(file: Path, vocab_size: int) -> list[int]:
    """Read the ids in a file of ``mlx_mtp draft_vocab``.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is not a draft vocabulary, or it is for another vocabulary.
    """
    ids, made_for = check_list(file)
    if made_for != vocab_size:
        raise ValueError(f"{file} is for a vocabulary of {made_for} ids, and this model has {vocab_size}: {FIX}")
    return check_ids(ids, vocab_size, str(file))


def check_list(file: Path) -> tuple[Any, Any]:
    """Read a file of ``mlx_mtp draft_vocab``: the ids, and the size of the full vocabulary.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: It is not a draft vocabulary.
    """
    if not file.is_file():
        raise FileNotFoundError(f"There is no draft vocabulary {file}: {FIX}")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        return value["ids"], value["vocab_size"]
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"{file} is not a draft vocabulary: {FIX}") from e


def check_ids(ids: object, vocab_size: int, name: str) -> list[int]:
    """Return the ids as a list, or raise a ValueError if they are not in this vocabulary."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(values, Sequence) or not values or not all(type(i) is int for i in values):
        raise ValueError(f"{name} has no list of token ids.")
    for i in values:
        if not 0 <= i < vocab_size:
            raise ValueError(f"{name} has the token id {i}, and this model has {vocab_size}.")
    return list(values)


def check_bits(mtp_bits: int | None, draft_head_bits: int | None) -> None:
    """Raise a ValueError if MLX does not quantize to this number of bits."""
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
    """Apply these arguments of ``mlx_mtp.load`` to a model that is not sharded yet; ``path`` is the checkpoint's folder."""
    check_bits(mtp_bits, draft_head_bits)
    if mtp_bits is not None:
        quantize_head(model.mtp, mtp_bits)
    ids = from_rank_0(model.ranks, lambda: choose_ids(draft_vocab, path, model.vocab_size, tokenizer))
    if ids is not None or draft_head_bits is not None:
        model.drafting.lm_head = DraftLMHead(model.output_layer, ids, draft_head_bits)
