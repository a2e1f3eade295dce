"""The list with the caches of a model and its head.

A prompt cache is mlx-lm's list with two more entries: one cache for each layer of the backbone, the head's ``KVCache``, and
an ``ArraysCache`` with

    the hidden state of the last token, which the head needs once the next token is known
    the number of tokens n in the backbone's caches when it was written; -1 - n while a generation is open
    these tokens, for copy drafts
    the rank that has this part of the caches and the number of ranks, where several run the model
    the fingerprint of the model
    the spans of the text's images

All entries have the names and states of mlx-lm's own classes, so its ``save_prompt_cache`` and ``load_prompt_cache`` work.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import cache as stock

from ...errors import MTPError, NotANumberError
from .fingerprint import SIZE
from .indexed import adopted
from .positions import ImageSpan, Positions, check_images
from .recurrent import RecurrentCache
from .validation import FLOATS, are_arrays, are_keys, check_backbone, misfit

HIDDEN, COUNT, TEXT, PART, FINGERPRINT, IMAGES = range(6)  # the arrays of the last entry
MAX_BYTES = 10**9  # to evaluate at once: macOS stops command buffers that take long


class PromptCache:
    """A view of a prompt cache, a list of ``make_prompt_cache`` that belongs to the caller, with names for its entries."""

    def __init__(self, entries: list[Any], n_layers: int):
        self.entries = entries
        self.n_layers = n_layers

    @property
    def backbone(self) -> list[Any]:
        return self.entries[: self.n_layers]

    @property
    def head(self) -> Any:
        return self.entries[-2]

    @property
    def last_hidden(self) -> mx.array | None:
        """[1, 1, H]"""
        return self.entries[-1][HIDDEN]

    @last_hidden.setter
    def last_hidden(self, hidden: mx.array | None) -> None:
        self.entries[-1][HIDDEN] = hidden

    @property
    def n_tokens(self) -> int:
        """The number of tokens in the backbone's caches."""
        # The states of a pipeline stage without attention do not have their length.
        has_length = any(hasattr(c, "offset") for c in self.backbone)
        return n_tokens(self.backbone) if has_length else max(self.n_recorded, -1 - self.n_recorded)

    @property
    def n_recorded(self) -> int:
        """The number of tokens in the backbone's caches when ``record`` was last called; negative since ``begin``."""
        return _listed(self.entries[-1][COUNT]) or 0

    @property
    def text(self) -> list[int]:
        """The last known tokens of the caches."""
        return _listed(self.entries[-1][TEXT])

    @property
    def fingerprint(self) -> bytes:
        """That of the model that filled the caches; empty if unknown."""
        return bytes(_listed(self.entries[-1][FINGERPRINT]))

    def begin(self, n_tokens: int) -> None:
        """Mark the cache as in use, until ``record``, with so many tokens in the backbone's caches: the last may be drafts."""
        self.entries[-1][COUNT] = mx.array(-1 - n_tokens)

    def record(self, n_tokens: int, text: Sequence[int] = ()) -> None:
        """Mark the cache as complete, with the last known tokens, and the head's keys and values for the same tokens."""
        self.entries[-1][TEXT] = mx.array(list(text), mx.uint32) if len(text) > 0 else None
        self.images = [image for image in self.images if image.start < n_tokens]  # including an image prefilled in part
        self.entries[-1][COUNT] = mx.array(n_tokens)

    @property
    def images(self) -> list[ImageSpan]:
        """The spans of the images in the caches and, during prefill, of the images that follow in the prompt."""
        return [ImageSpan(*span) for span in _listed(self.entries[-1][IMAGES])]

    @images.setter
    def images(self, images: Sequence[ImageSpan]) -> None:
        self.entries[-1][IMAGES] = mx.array([*images], mx.int32) if images else None  # [n, 3]

    @property
    def first_position(self) -> int:
        """The index of the head's first input: 0, unless mlx-lm filled the backbone's caches without the head."""
        return self.n_tokens if self.last_hidden is None else self.n_tokens - 1 - self.head.offset

    def positions(self, start: int = 0) -> Positions | None:
        """The positions of the text from a token on; ``None`` without images. Those of the head begin at ``first_position``."""
        return Positions(tuple(images), start) if (images := self.images) else None


def evaluate(tree: Any) -> None:
    """Evaluate the arrays in lists and dictionaries, in pieces of at most ``MAX_BYTES``, or of one array."""
    leaves: Any = tree_flatten(tree)
    piece, n_bytes = list[mx.array](), 0
    for x in (x for _, x in leaves if isinstance(x, mx.array)):
        if piece and n_bytes + x.nbytes > MAX_BYTES:
            mx.eval(piece)
            piece, n_bytes = [], 0
        piece.append(x)
        n_bytes += x.nbytes
    mx.eval(piece)


def _listed(x: mx.array | None) -> Any:
    """An array as a list or a number; empty for none."""
    return [] if x is None else x.tolist()


def make_prompt_cache(model: nn.Module) -> list[Any]:
    """An empty prompt cache for a model and its MTP head.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``.

    Returns:
        List[Any]: A cache for each layer, then the head's keys and values, then the last token's hidden state; for a model that
        mlx-lm runs without drafts, mlx-lm's.
    """
    if not hasattr(model, "head_layer"):
        return stock.make_prompt_cache(model)
    return model.make_cache() + make_head_cache(model)


def make_head_cache(model: Any, has_fingerprint: bool = True) -> list[Any]:
    """The last two entries of an empty prompt cache. The fingerprint takes some time the first time."""
    last = stock.ArraysCache(IMAGES + 1)
    if part := part_of(model):
        last[PART] = mx.array(part)
    if has_fingerprint:
        last[FINGERPRINT] = mx.array([*model.fingerprint()], mx.uint8)
    return [empty_head(model), last]


def empty_head(model: Any) -> Any:
    """An empty cache of the head's keys and values."""
    layer = model.head_layer
    return stock.KVCache() if layer is None else layer.make_cache()


def open_prompt_cache(model: nn.Module, entries: list[Any] | PromptCache | None) -> PromptCache:
    """Complete a prompt cache in place to one of ``make_prompt_cache``; ``None``: an empty one.

    A cache from mlx-lm has no keys and values of the head, and those of another head are dropped. The head then begins with the
    tokens that follow, since only relative positions matter to it, and its first drafts are worse.

    Raises an MTPError if the cache is damaged, from another model or rank, or in use by a generation.
    """
    n_layers = len(model.layers)
    if isinstance(entries, PromptCache):
        return entries
    if entries is None:
        return PromptCache(model.make_cache() + make_head_cache(model, False), n_layers)
    if len(entries) not in (n_layers, n_layers + 2):
        raise MTPError(
            f"The prompt cache has {len(entries)} entries, and this model needs {n_layers + 2}: make it with "
            "mlx_mtp.make_prompt_cache(model)."
        )
    cache = PromptCache(entries, n_layers)
    if len(entries) == n_layers:
        entries += make_head_cache(model)
    else:
        _check_owner(model, cache)
    entries[:-1] = [adopted(c) for c in entries[:-1]]
    check_backbone(cache.backbone, model.layers)
    for i, c in enumerate(cache.backbone):
        if isinstance(c, stock.ArraysCache) and type(c) is not RecurrentCache:
            entries[i] = RecurrentCache.from_state(c.state)
    n_tokens = cache.n_tokens
    images = cache.images
    if cache.n_recorded > n_tokens:
        raise misfit(n_layers + 1)
    if cache.n_recorded < n_tokens:
        entries[n_layers:] = make_head_cache(model)
    elif cache.fingerprint[SIZE:] not in (b"", model.fingerprint()[SIZE:]) or model.head_layer is None:
        entries[n_layers] = empty_head(model)
    else:
        max_offset = 0 if cache.last_hidden is None else n_tokens - 1
        if not are_keys(cache.head, model.head_layer, may_be_quantized=False) or cache.head.offset > max_offset:
            raise misfit(n_layers)
    entries[-1][FINGERPRINT] = mx.array([*model.fingerprint()], mx.uint8)
    cache.images = images
    evaluate([vars(c) for c in entries])  # Arrays of a file are read now, and not while a pass waits.
    if cache.last_hidden is not None and not mx.isfinite(cache.last_hidden).all():  # it depends on all of the others
        raise NotANumberError
    return cache


def place_images(model: Any, cache: PromptCache, images: Iterable[ImageSpan], are_embedded: bool) -> None:
    """Record the spans of a prompt's images, which may include images in its cache, before prefill."""
    both = sorted({*cache.images, *images})
    if not both:
        return
    check_images(both)
    if model.no_images is not None:
        raise MTPError(model.no_images)
    if model.ranks is not None:
        raise MTPError("Images are processed in one process: omit them on several machines.")
    if both[-1].end > cache.n_tokens and not are_embedded:
        raise MTPError(f"The image at token {both[-1].start} is not prefilled yet: give input_embeddings with its own.")
    cache.images = both


def _check_owner(model: Any, cache: PromptCache) -> None:
    """Raise an MTPError if the cache is from another model or rank, or in use by a generation."""
    last = cache.entries[-1]
    if isinstance(last, stock.ArraysCache) and isinstance(last.cache, list):
        last.cache += [None] * (IMAGES + 1 - len(last.cache))  # an earlier version had fewer
    wanted = {
        HIDDEN: ((1, 1, model.hidden_size), FLOATS),
        COUNT: ((), (mx.int32,)),
        TEXT: ((None,), (mx.uint32,)),
        PART: ((2,), (mx.int32,)),
        FINGERPRINT: ((2 * SIZE,), (mx.uint8,)),
        IMAGES: ((None, 3), (mx.int32,)),
    }
    if not are_arrays(last, *wanted.values()) or max(cache.text, default=0) >= model.vocab_size:
        raise misfit(cache.n_layers + 1)
    try:
        check_images(cache.images)
    except MTPError as e:
        raise misfit(cache.n_layers + 1) from e
    if (part := _listed(last[PART])) != part_of(model):
        raise MTPError(
            f"The prompt cache belongs to {_name(part)} and this is {_name(part_of(model))}: "
            "give each rank its own, on as many ranks as made it."
        )
    if cache.n_recorded < 0:
        raise MTPError(
            "This prompt cache is of a generation that has not ended: close its generator first, copy a cache (copy.deepcopy) "
            "before a generation starts on it, or make a new one with mlx_mtp.make_prompt_cache(model)."
        )
    if cache.fingerprint and cache.fingerprint[:SIZE] != model.fingerprint()[:SIZE]:
        raise MTPError(
            "The prompt cache belongs to another model, or to other weights, settings or adapters of this model. Make a new "
            "one with mlx_mtp.make_prompt_cache(model)."
        )


def part_of(model: Any) -> list[int]:
    """The rank that has this part of the model's caches, and the number of ranks; empty for one process."""
    return [] if model.ranks is None else [model.ranks.rank, model.ranks.size]


def _name(part: list[int]) -> str:
    return f"rank {part[0]} of {part[1]}" if part else "one process"


def n_tokens(caches: list[Any]) -> int:
    """The number of tokens in the caches of a backbone."""
    return max((getattr(c, "offset", 0) for c in caches), default=0)
