"""Which token ids drafts are chosen from: a number of them, a list in a file, or all."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

LIST_FILE = "draft_vocab.json"  # beside a checkpoint: the ids of its draft vocabulary

DraftVocab = int | str | Path | Sequence[int]


def choose_ids(draft_vocab: DraftVocab | None, path: Path, vocab_size: int, tokenizer) -> list[int] | None:
    """The ids of a draft vocabulary in ascending order, special and stop tokens among them, or ``None`` for all.

    Args:
        draft_vocab (Union[int, str, Path, Sequence[int]], optional): As in ``mlx_mtp.load``.
        path (Path): The checkpoint's folder.
        vocab_size (int): The number of rows of the output layer.
        tokenizer (TokenizerWrapper): It tells the special and stop tokens.
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


def always_in(tokenizer, vocab_size: int) -> set[int]:
    """The ids of special, added and stop tokens, which text holds few of and answers many."""
    ids = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), *tokenizer.eos_token_ids}
    return {i for i in ids if i < vocab_size}


def check_size(size: int, vocab_size: int, always: set[int]) -> None:
    if not max(len(always), 1) <= size <= vocab_size:
        raise ValueError(
            f"A draft vocabulary of {size} token ids is not possible: this model has {vocab_size}, "
            f"and its {len(always)} special and stop tokens are always in."
        )


def select(ranked: Iterable[int], size: int, always: set[int]) -> list[int]:
    """``size`` ids in ascending order: those that are always in, and the first of the ranked ones."""
    ids = set(always)
    for i in ranked:
        if len(ids) == size:
            break
        ids.add(i)
    return sorted(ids)


def read_list(file: Path, vocab_size: int) -> list[int]:
    """The ids in a file that ``mlx_mtp.draft_vocab`` has written.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not such a file, or that of another vocabulary.
    """
    mend = "write it with `python -m mlx_mtp.draft_vocab --model MODEL --corpus FILES --size N`."
    if not file.exists():
        raise FileNotFoundError(f"There is no draft vocabulary {file}: {mend}")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        ids, made_for = value["ids"], value["vocab_size"]
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"{file} is not a draft vocabulary: {mend}") from e
    if made_for != vocab_size:
        raise ValueError(f"{file} is of a vocabulary of {made_for} ids, and this model has {vocab_size}: {mend}")
    return check_ids(ids, vocab_size, str(file))


def check_ids(ids: Any, vocab_size: int, name: str) -> list[int]:
    """The ids as a list, or a ValueError if they are not ids of this vocabulary."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(values, Sequence) or not values or not all(type(i) is int for i in values):
        raise ValueError(f"{name} has no list of token ids.")
    for i in values:
        if not 0 <= i < vocab_size:
            raise ValueError(f"{name} has the token id {i}, and this model has {vocab_size}.")
    return list(values)
