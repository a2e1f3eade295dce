"""Cheaper drafts: fewer rows and fewer bits of what only drafts go through.

A draft is a guess that the whole model verifies, so none of this changes the text: it changes what a draft costs and how
often it stands. Most of a draft's cost is the output layer, with a row for each of some 250,000 tokens.
"""

import argparse
import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

LIST_FILE = "draft_vocab.json"  # beside a checkpoint: the ids of its draft vocabulary
BITS = (2, 3, 4, 5, 6, 8)
ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")

DraftVocab = int | str | Path | Sequence[int]


class DraftHead:
    """An output layer of the drafts' own.

    No ``nn.Module``: its arrays are made from the model's at load time and are no parameters of it.

    Args:
        layer (nn.Module): The model's ``lm_head``, or its embedding where they are tied; quantized or not.
        ids (List[int], optional): The rows to copy from it, in ascending order, so that of equal logits the first is that
          of the whole layer. Default: ``None``, which is all.
        bits (int, optional): Quantize the copy to this many bits. Default: ``None``, which is as they are.
    """

    def __init__(self, layer: nn.Module, ids: list[int] | None, bits: int | None = None):
        self._whole = layer.fuse() if hasattr(layer, "fuse") else layer  # of a LoRA adapter's, with it
        self._bits = bits
        self._known = frozenset(ids or ())
        self._more: tuple[int, ...] = ()
        self.ids = None if ids is None else mx.array(ids, mx.uint32)  # [n]
        self.layers = [self._rows(self.ids)]

    def __call__(self, hidden: mx.array) -> mx.array:
        """[B, T, H] -> logits of ``ids`` [B, T, n]"""
        logits = [(layer.as_linear if hasattr(layer, "as_linear") else layer)(hidden) for layer in self.layers]
        return logits[0] if len(logits) == 1 else mx.concatenate(logits, axis=-1)

    def with_tokens(self, tokens: Iterable[int]) -> "DraftHead":
        """A head with the rows of these tokens, too: a text repeats its own words, rare as they may be in others.

        Args:
            tokens (Iterable[int]): Of the prompt, or those that have been added to it.

        Returns:
            DraftHead: This one, where it has them all. The tokens that it had not come last in ``ids``.
        """
        new = tuple(i for i in dict.fromkeys(tokens) if i not in self._known and i not in self._more)
        if self.ids is None or not new:
            return self
        head = copy.copy(self)
        head._more = self._more + new
        more = mx.array(head._more, mx.uint32)
        head.ids = mx.concatenate([self.ids[: len(self._known)], more])
        head.layers = [self.layers[0], self._rows(more)]
        return head

    def _rows(self, ids: mx.array | None) -> nn.Module:
        layer = self._whole
        if ids is not None:
            layer = copy.copy(layer)
            for name in ("weight", "scales", "biases", "bias"):
                if layer.get(name) is not None:
                    layer[name] = layer[name][ids]
        return layer if self._bits is None else _quantized(layer, self._bits)


def draft_logits(model: Any, draft_head: DraftHead | None, hidden: mx.array) -> mx.array:
    """The head's hidden state [1, 1, H] -> logits [1, V], of the draft vocabulary alone: the others are -inf."""
    if draft_head is None or draft_head.ids is None:
        return model.draft_logits(hidden)[:, -1]
    logits = draft_head(hidden)[:, -1]  # [1, n]
    others = mx.full((1, model.output_layer.weight.shape[0]), -mx.inf, logits.dtype)
    return mx.put_along_axis(others, draft_head.ids[None], logits, axis=-1)


def _quantized(layer: nn.Module, bits: int) -> nn.Module:
    if "scales" in layer:
        if bits >= layer.bits:
            raise ValueError(f"The model's lm_head has {layer.bits} bits: leave out draft_head_bits, or give it fewer.")
        weight = mx.dequantize(
            layer.weight, layer.scales, layer.get("biases"), layer.group_size, layer.bits, mode=layer.mode
        )
        layer = nn.Linear(1, 1, bias=False)
        layer.weight = weight
    return layer.to_quantized(**_parameters(layer, bits))


def quantize_head(mtp: nn.Module, bits: int) -> None:
    """Quantize the decoder layer of an MTP head in place; never ``fc`` nor a router."""
    if any(hasattr(m, "bits") for _, m in mtp.named_modules()):
        raise ValueError("The MTP head of this checkpoint is quantized already: leave out mtp_bits.")

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not path.startswith("layers.") or path.endswith(ROUTERS) or not hasattr(module, "to_quantized"):
            return False
        return _parameters(module, bits)

    nn.quantize(mtp, class_predicate=predicate)


def _parameters(module: nn.Module, bits: int) -> dict[str, Any]:
    return {"group_size": 64 if module.weight.shape[-1] % 64 == 0 else 32, "bits": bits, "mode": "affine"}


def cheapen_drafts(
    model: nn.Module,
    tokenizer,
    path: Path,
    draft_vocab: DraftVocab | None,
    mtp_bits: int | None,
    draft_head_bits: int | None,
) -> None:
    """What ``mlx_mtp.load`` does with these arguments; ``path`` is the checkpoint's folder."""
    for name, bits in (("mtp_bits", mtp_bits), ("draft_head_bits", draft_head_bits)):
        if bits is not None and bits not in BITS:
            raise ValueError(f"{name} is {bits}; MLX quantizes to {', '.join(map(str, BITS))} bits.")
    if mtp_bits is not None:
        quantize_head(model.mtp, mtp_bits)
    ids = choose_ids(draft_vocab, path, model.output_layer.weight.shape[0], tokenizer)
    if ids is not None or draft_head_bits is not None:
        model.draft_head = DraftHead(model.output_layer, ids, draft_head_bits)


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a command line that loads a model to draft with."""
    parser.add_argument(
        "--draft-vocab",
        metavar="N|FILE",
        type=lambda x: int(x) if x.isdecimal() else x,
        help="Draft from the first N token ids, or from those in a file of mlx_mtp.draft_vocab; verification is from all. "
        f"0 is all. Defaults to {LIST_FILE} beside the checkpoint, or else to all.",
    )
    parser.add_argument(
        "--mtp-bits", type=int, help="Quantize the head's decoder layer when it is loaded. Defaults to no quantization."
    )
    parser.add_argument(
        "--draft-head-bits", type=int, help="Quantize a copy of lm_head for the drafts alone. Defaults to no copy."
    )
    parser.add_argument(
        "--settings",
        default=True,
        metavar="FILE|off",
        type=lambda x: False if x == "off" else x,
        help="What `python -m mlx_mtp.benchmark --tune` has written, if anything; off is to do without. Defaults to a file in "
        "the user's cache folder. One of the three flags before is enough for it to be left aside.",
    )


def auto_or_number(text: str) -> str | int:
    """The argument of ``--num-draft-tokens``."""
    return text if text == "auto" else int(text)


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``mlx_mtp.load`` that these flags stand for."""
    return {name: getattr(args, name) for name in ("draft_vocab", "mtp_bits", "draft_head_bits", "settings")}
