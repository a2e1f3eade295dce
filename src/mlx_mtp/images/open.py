"""Open an image from any source with bounded memory, or raise an MTPError with one line about the problem; and its patches."""

import base64
import binascii
import re
import warnings
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import mlx.core as mx
import numpy as np

from ..errors import MTPError, MTPFileNotFoundError, require

if TYPE_CHECKING:
    from PIL.Image import Image

    Source = str | Path | bytes | np.ndarray[Any, Any] | Image

MAX_BYTES = 256 << 20  # the largest file, in bytes
MAX_PIXELS = 1 << 26  # 67 megapixels: each copy takes 268 MB
MAX_RATIO = 200  # the greatest ratio of the longer side to the shorter, as in transformers
# Pillow supports more formats, some of which run other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")

PIXEL_BYTES = 4  # of Pillow's images
PUBLISHED: dict[str, Any] = {
    "patch_size": 16,
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}

# The part of a data URL before its base64. Clients put it before a URL that has it already.
HEAD = re.compile(r"(?:\s*data:[^,]*?;\s*base64\s*,)+", re.IGNORECASE)

# One image at a time: memory is bounded, and filters of warnings apply to the whole process.
_opening = Lock()


def open_image(source: "Source", name: str | None = None) -> "Image":
    """Open an image as a viewer shows it: upright, in RGB, its first frame, transparent parts on white. ``source`` is a file, a
    ``data:`` URL, bytes, uint8 values [height, width, 3] in RGB, or an image of Pillow, and ``name`` its name in errors.
    """
    with _opening, warnings.catch_warnings(action="ignore"):  # about metadata and sizes
        image, name = _open(source, name)
        from PIL import Image, ImageOps

        try:
            image = image.copy() if image is source else image
            ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I;16"):
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))  # Pillow would clip at 255
            elif image.mode in ("I", "F"):
                raise MTPError("its pixels are 32-bit numbers, of which black and white are unknown")
            if image.has_transparency_data:  # becomes white, as in transformers
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return image.convert("RGB")
        except Exception as e:
            raise _unreadable(name, e) from e


def size_of(source: "Source", name: str | None = None) -> tuple[int, int]:
    """The width and height of an image as stored, before it is turned upright, without reading its pixels."""
    with _opening, warnings.catch_warnings(action="ignore"):
        image, _ = _open(source, name)
        size = image.size
        if image is not source:
            image.close()
        return size


def _open(source: "Source", name: str | None) -> "tuple[Image, str]":
    """An image whose pixels have not been read, and its name in errors."""
    require("image", "An image")
    from PIL import Image, UnidentifiedImageError

    if isinstance(source, str) and is_data_url(source):
        source = decode_url(source, name or "The image")
    elif isinstance(source, str | Path):
        name = name or str(source)[:200]
        file = Path(source)
        if not file.exists():
            raise MTPFileNotFoundError(f"There is no image {name}.")
        if not file.is_file():
            raise MTPError(f"{name} is not a file.")
        _check_bytes(file.stat().st_size, name)
        source = file.read_bytes()
    elif isinstance(source, np.ndarray):
        if source.ndim != 3 or source.shape[-1] != 3 or 0 in source.shape or source.dtype != np.uint8:
            raise MTPError(f"An image must be uint8 [height, width, 3], not {source.dtype} {list(source.shape)}.")
        source = Image.fromarray(source)
    name = name or "The image"
    if not isinstance(source, bytes | Image.Image):
        raise MTPError(f"{name} must be a file, bytes or an image of Pillow, not {type(source).__name__}.")
    if isinstance(source, bytes):
        _check_bytes(len(source), name)
    try:
        image = Image.open(BytesIO(source), formats=FORMATS) if isinstance(source, bytes) else source
    except UnidentifiedImageError as e:
        raise MTPError(f"{name} is not an image of a known format ({', '.join(FORMATS)}).") from e
    except Image.DecompressionBombError as e:
        raise MTPError(f"{name} has more than {MAX_PIXELS:,} pixels: make it smaller.") from e
    except Exception as e:  # its plugins raise nearly anything
        raise _unreadable(name, e) from e
    check_size(image.width, image.height, name)
    return image, name


def _check_bytes(n: int, name: str) -> None:
    if n > MAX_BYTES:
        raise MTPError(f"{name} has {n:,} bytes, more than {MAX_BYTES:,}: make it smaller.")


def _unreadable(name: str, error: Exception) -> MTPError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return MTPError(f"{name} cannot be read as an image ({reason}): save it again, for example as PNG.")


def check_size(width: int, height: int, name: str) -> None:
    if min(width, height) < 1:
        raise MTPError(f"{name} is empty: it has {width} x {height} pixels.")
    if width * height > MAX_PIXELS:
        many = f"{width} x {height} = {width * height:,} pixels"
        raise MTPError(f"{name} has {many}, more than {MAX_PIXELS:,}: make it smaller.")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise MTPError(
            f"{name} has {width} x {height} pixels: one side may be at most {MAX_RATIO} times as long as the other, so cut it."
        )


def is_data_url(url: str) -> bool:
    """Whether a text is a ``data:`` URL: also in capitals, after white space and percent-encoded."""
    return unquote(url.lstrip()[: len("data%3A")]).lower().startswith("data:")


def decode_url(url: str, name: str = "The image") -> bytes:
    """The bytes of a ``data:`` URL in base64 of either alphabet, with or without padding and percent-encoding. An MTPError if
    it is another kind of URL, not base64, or too large.
    """
    text = unquote(url) if "%" in url else url
    if not is_data_url(url) or "," not in text:
        raise MTPError(f"{name} is not a data URL (data:image/png;base64,...): it begins with {url[:20]!r}.")
    if (head := HEAD.match(text)) is None:
        raise MTPError(f"{name} is a data URL without ;base64, and only base64 is read.")
    data = "".join(text[head.end() :].split()).rstrip("=")
    _check_bytes(len(data) * 3 // 4, name)
    try:
        return base64.b64decode(data.replace("-", "+").replace("_", "/") + "=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError) as e:  # the latter where it is not ASCII
        raise MTPError(f"{name} is not valid base64: {e}.") from e


class Processor:
    """transformers' image processor, by the settings of a preprocessor_config.json and the published Qwen3.5's."""

    def __init__(self, settings: Mapping[str, Any]):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

        given = {key: value for key, value in settings.items() if value is not None}
        self._smart_resize, self._theirs = smart_resize, Qwen2VLImageProcessorPil.from_dict(PUBLISHED | given)
        self.patch_size = self._theirs.patch_size
        self.merge_size = self._theirs.merge_size
        self.temporal_patch_size = self._theirs.temporal_patch_size
        try:
            with np.errstate(all="ignore"):
                patches = self.preprocess_image(np.zeros((1, 1, 3), np.uint8))
            if not self._theirs.do_resize or not bool(mx.isfinite(patches).all()):
                raise MTPError("images are not resized, or divided by zero")
        except Exception as e:  # whatever a setting leads to
            raise MTPError(f"they are not those of a Qwen2VLImageProcessor ({e!r})") from e

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """The rows and columns of image tokens of an image with these sides in pixels."""
        side = self.patch_size * self.merge_size
        size = self._theirs.size
        h, w = self._smart_resize(height, width, side, size.shortest_edge, size.longest_edge)
        return h // side, w // side

    def nbytes_of(self, width: int, height: int) -> int:
        """The most bytes that decoding an image of this size takes."""
        rows, columns = self.grid(width, height)
        n = rows * columns * (self.patch_size * self.merge_size) ** 2  # pixels
        # The image, its resized copy, this in float32 before and after it is normalized, its patches in NumPy and in MLX
        return PIXEL_BYTES * (2 * width * height + n) + 3 * n * (2 + 2 * self.temporal_patch_size) * np.float32().nbytes

    def preprocess_image(self, image: Any, name: str | None = None) -> mx.array:
        """Any image of ``open_image`` -> the grid of its tokens and the patches of each, [rows, columns, merge_size**2, P]"""
        rgb = open_image(image, name)
        rows, columns = self.grid(rgb.width, rgb.height)
        patches = self._theirs(images=[rgb], return_tensors="np")["pixel_values"]  # [N, P]
        return mx.array(patches.reshape(rows, columns, self.merge_size**2, -1))  # evaluated: another thread uses it
