"""A prompt with images: its tokens, the spans of the images, their embeddings, and its key in a prompt store."""

import math
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..core.caches.positions import ImageSpan
from ..core.caches.prompt_cache import make_prompt_cache, open_prompt_cache, place_images
from ..core.models.mixin import MTPModel
from ..errors import MTPError
from .open import is_data_url, size_of
from .tower import Vision

IMAGE_TOKEN = "<|image_pad|>"
VIDEO_TOKEN = "<|video_pad|>"
PLACEHOLDER = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
# Stand for an image, and for a place where a text is cut, until it is tokenized. Clients cannot guess them.
MARK = f"<|image {secrets.token_hex(16)}|>"
CUT = f"cut{secrets.token_hex(16)}"
LEFT_OUT = "[image left out]"  # in place of an image of an earlier turn that cannot be read
# Where to cut a quoted placeholder, so that it is tokenized as ordinary text.
INSIDE_PLACEHOLDER = re.compile(rf"(?<=<\|)(?=(?:image_pad|video_pad|vision_start|vision_end)\|>)|{CUT}")


@dataclass(frozen=True)
class ImagePrompt:
    tokens: list[int]  # with ``<|image_pad|>`` for each token of an image
    images: list[ImageSpan]  # the spans of these tokens
    pixel_values: list[mx.array]  # the patches of each image, from ``Processor.preprocess_image``
    vision: Vision

    def spans(self, n_before: int = 0) -> list[ImageSpan]:
        """The spans of the images in a text that has ``n_before`` tokens before this prompt."""
        return [image._replace(start=image.start + n_before) for image in self.images]

    @cached_property
    def key(self) -> list[int]:
        """The tokens, with a negative number computed from its content for each image token. Equal texts have equal keys."""
        key = self.tokens[:]
        for image, pixels in zip(self.images, self.pixel_values):
            key[image.start : image.end] = [self.vision.key(pixels)] * (image.end - image.start)
        return key

    def embed(self, model: Any, begin: int = 0) -> mx.array:
        """The embeddings of the tokens from index ``begin`` on, [T, H]."""
        embeddings = ImageEmbeddings(self, model, begin)
        embeddings.advance(math.inf)
        return embeddings.array

    def cache(self, model: Any, prompt_cache: list[Any] | None) -> list[Any]:
        """A prompt cache, by default an empty one, with the spans of the images that follow its tokens."""
        cache = open_prompt_cache(model, make_prompt_cache(model) if prompt_cache is None else prompt_cache)
        place_images(model, cache, self.spans(cache.n_tokens), are_embedded=True)
        return cache.entries


class ImageEmbeddings:
    """The embeddings of a prompt from index ``begin`` on, ``array`` [T, H], computed between two steps of running answers."""

    FIRST = 1 << 24  # multiplications of the first piece, before the speed is known
    GROWTH = 1.2  # the most that speed changes between pieces: linear layers are faster than attention
    PIECES = 4  # pieces in the time of a call: more keep the time better, but wait for the device more often

    def __init__(self, prompt: ImagePrompt, model: Any, begin: int = 0):
        self.prompt = prompt
        self.begin = begin
        self.array: mx.array = model.model.embed_tokens(mx.array(prompt.tokens[begin:]))
        self.size = 0.0  # multiplications of the next piece
        self.speed: float | None = None  # multiplications a second
        self.pieces = self._pieces()

    def __len__(self) -> int:
        return len(self.array)

    def advance(self, seconds: float) -> bool:
        """Compute for about this time -> whether the array is complete."""
        now = time.perf_counter()
        end = now + seconds
        share = seconds / self.PIECES
        while seconds == math.inf or now <= end - share:
            self.size = self.FIRST if self.speed is None else self.speed * share
            done = next(self.pieces, None)
            if done is None:
                return True
            start = now
            now = time.perf_counter()
            speed = done / max(now - start, 1e-9)
            self.speed = speed if self.speed is None else min(speed, self.GROWTH * self.speed)
        return False

    def _pieces(self) -> Iterator[int]:
        for image, pixels in zip(self.prompt.images, self.prompt.pixel_values):
            if image.end > self.begin:
                vision = self.prompt.vision
                found = yield from vision.tower.pieces(pixels, lambda: self.size)
                if vision.dtype is not None and not mx.isfinite(found).all():
                    vision.keep_own_type()
                    found = yield from vision.tower.pieces(pixels, lambda: self.size)
                found = found[max(self.begin - image.start, 0) :].astype(self.array.dtype)
                self.array[max(image.start - self.begin, 0) : image.end - self.begin] = found
        mx.eval(self.array)  # here, not in the thread and stream that prefill the prompt


def read_images(vision: Vision, tokens: Sequence[int], images: Sequence[Any]) -> ImagePrompt:
    """Open the images of a prompt, ``tokens`` with ``<|image_pad|>`` once for each, which are repeated for their tokens."""
    return place_pixels(vision, tokens, read_pixels(vision, tokens, images))


def read_pixels(
    vision: Vision,
    tokens: Sequence[int],
    images: Sequence[Any],
    max_tokens: int | None = None,
    max_pixels: int | None = None,
    before_each: Callable[[int], None] = lambda n_bytes: None,
    reading: Callable[[int], AbstractContextManager[Any]] = lambda i: nullcontext(),
) -> list[Any]:
    """The patches of each image of a prompt, ``tokens`` with ``<|image_pad|>`` once for each. All sizes are checked before any
    is decoded, and ``before_each`` gets the most bytes that this takes. An image is read in the context of ``reading`` for its
    index; if that suppresses an error, the image is ``None``.
    """
    placeholder = vision.config["image_token_id"]
    if (video := vision.config.get("video_token_id")) is not None and video in tokens:
        raise MTPError(f"The prompt has {VIDEO_TOKEN}, and videos are not supported: send single images.")
    if (n := list(tokens).count(placeholder)) != len(images):
        raise MTPError(f"The prompt has {n} placeholders {PLACEHOLDER} for {len(images)} images: write one for each.")
    n_tokens = 0
    n_pixels = 0
    sizes = dict[int, tuple[int, int]]()
    for i, image in enumerate(images, 1):
        with reading(i - 1):
            size = sizes[i - 1] = size_of(image, _name(image, i))
            n_tokens = n_tokens + math.prod(vision.processor.grid(*size))
            n_pixels = n_pixels + math.prod(size)
        for count, maximum, unit in ((n_tokens, max_tokens, "tokens"), (n_pixels, max_pixels, "pixels")):
            if maximum is not None and count > maximum:
                many = f"The images up to number {i} have more than {maximum} {unit}"
                raise MTPError(f"{many}: send fewer or smaller ones.")
    pixel_values: list[Any] = [None] * len(images)
    try:
        for i, size in sizes.items():
            before_each(vision.processor.nbytes_of(*size))
            with reading(i):
                pixel_values[i] = vision.processor.preprocess_image(images[i], _name(images[i], i + 1))
    except BaseException:
        pixel_values.clear()  # the traceback would keep them
        mx.clear_cache()
        raise
    return pixel_values


def place_pixels(vision: Vision, tokens: Sequence[int], pixel_values: list[mx.array]) -> ImagePrompt:
    """The prompt with these patches for the images of ``tokens``, which has ``<|image_pad|>`` once for each."""
    expanded = list[int]()
    spans = list[ImageSpan]()
    for token in tokens:
        n = 1
        if token == vision.config["image_token_id"]:
            spans.append(ImageSpan(len(expanded), *pixel_values[len(spans)].shape[:2]))
            n = spans[-1].rows * spans[-1].columns
        expanded += [token] * n
    return ImagePrompt(expanded, spans, pixel_values, vision)


def leave_out(text: str, images: Sequence[Any]) -> str:
    """A text with a ``MARK`` for each image, or ``LEFT_OUT`` if that is ``None``."""
    first, *parts = text.split(MARK)
    return first + "".join((LEFT_OUT if x is None else MARK) + part for x, part in zip([*images, *parts], parts))


def encode_marked(tokenizer: Any, text: str, **kwargs: Any) -> list[int]:
    """The tokens of a text with untrusted parts: ``<|image_pad|>`` once for each ``MARK``. A placeholder that the text quotes
    becomes ordinary tokens of its characters, and so does any other token with a ``CUT`` inside.
    """
    pieces: list[str] = []
    for i, part in enumerate(text.split(MARK)):
        pieces += [PLACEHOLDER] * (i > 0) + INSIDE_PLACEHOLDER.split(part)
    tokens: list[int] = list(tokenizer.encode(pieces[0], **kwargs))
    for piece in pieces[1:]:
        tokens += tokenizer.encode(piece, **kwargs | {"add_special_tokens": False})
    return tokens


def vision_of(model: Any) -> Vision:
    """The vision encoder and the image processor of a model, or an MTPError if it has none or is on several machines."""
    if not isinstance(model, MTPModel):
        raise MTPError(
            "Images require a model of mlx_mtp.load with mtp=True or copy_drafts=True; in `mlx_mtp chat`, use --images."
        )
    if model.no_images is not None:
        raise MTPError(model.no_images)
    if not isinstance(vision := model.vision, Vision):
        raise MTPError(
            "The model takes no images: its checkpoint has no vision encoder. Use its base model's: with --images in mlx_mtp "
            'chat and mlx_mtp server, with vision="auto" in mlx_mtp.load.'
        )
    if model.ranks is not None:
        raise MTPError("Images are processed in one process: omit them on several machines.")
    return vision


def _name(image: Any, i: int) -> str | None:
    return None if isinstance(image, str | Path) and not is_data_url(str(image)) else f"Image {i}"
