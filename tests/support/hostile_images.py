"""Random images: sound ones of every mode, format and orientation, damaged files, headers that lie, other files, odd shapes.

A sound image becomes the patches that transformers makes of it. Any other is opened, or refused with one sentence, and memory
grows by no more than 1 GB.
"""

import io
import random
import resource
import struct
import sys
import zlib
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mlx_mtp.images.open import MAX_RATIO, open_image
from mlx_mtp.images.processor import Processor

from .images import PREPROCESSOR

# What each format keeps without loss, or is decoded in one way only
MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "GIF": ("1", "L", "P", "RGB", "RGBA"),
    "BMP": ("1", "L", "P", "RGB"),
    "TIFF": ("1", "L", "P", "RGB", "RGBA", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "JPEG": ("L", "RGB", "CMYK"),
    "AVIF": ("RGB", "RGBA"),
}
MAX_GROWTH = 1 << 30  # bytes
MAX_VALUES = 2 * 3 * PREPROCESSOR["size"]["longest_edge"]  # each frame twice
WAYS = ("sound", "sound", "cut", "flipped", "spliced", "noise", "header", "text", "shape")


def encoded(r: random.Random, width: int, height: int) -> bytes:
    """A file of random pixels, upright or not, with one frame or more."""
    format = r.choice([*MODES])
    mode = r.choice(MODES[format])
    pixels = np.random.default_rng(r.getrandbits(32)).integers(0, 256, (height, width, 4), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image = image.convert("RGB").convert(mode) if mode in ("P", "CMYK") else image.convert(mode)
    options: dict[str, Any] = {}
    if format in ("PNG", "JPEG", "WEBP", "TIFF") and r.random() < 0.4:
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = r.randrange(1, 9)
    if format in ("GIF", "PNG", "WEBP") and r.random() < 0.2:
        options |= {"save_all": True, "append_images": [image.rotate(180)]}
    if format == "WEBP":
        options["lossless"] = True
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def png(r: random.Random) -> bytes:
    """A PNG whose header claims random sizes, depths and colors, with sound checksums."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    sizes = (0, 1, 2, 31, 4000, 8000, 65_535, 2**31 - 1, 2**32 - 1)
    header = struct.pack(
        ">IIBBBBB",
        r.choice(sizes),
        r.choice(sizes),
        r.choice((1, 2, 4, 8, 16)),
        r.choice((0, 2, 3, 4, 6)),
        0,
        0,
        r.choice((0, 1)),
    )
    data = zlib.compress(bytes(r.choice((0, 100, 10_000_000))))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def damaged(r: random.Random, way: str, data: bytes) -> bytes:
    """Another file in place of a sound one."""
    if way == "cut":
        return data[: r.randrange(len(data))]
    if way == "flipped":
        changed = bytearray(data)
        for _ in range(r.choice((1, 3, 30))):
            changed[r.randrange(r.choice((64, len(changed))) if len(changed) > 64 else len(changed))] = r.randrange(256)
        return bytes(changed)
    if way == "spliced":
        i, j = sorted((r.randrange(len(data)), r.randrange(len(data))))
        return data[:i] + r.choice((b"", data[i:j] * 3, r.randbytes(50))) + data[j:]
    if way == "noise":
        magic = (b"", data[:12], b"\xff\xd8\xff\xe0", b"II*\0", b"GIF89a", b"BM", b"RIFF\0\0\0\0WEBPVP8 ")
        return r.choice(magic) + r.randbytes(r.choice((0, 10, 5000)))
    if way == "header":
        return png(r)
    return r.choice(
        (b"%!PS\n/a 1 def\n", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"P6 99999 99999 255\n", b"8BPS\0\1")
    )


def assert_refused_or_right(way: str, seed: int) -> None:
    """
    Raises:
        AssertionError: The patches are wrong, the error is no sentence, or it took too much memory.
    """
    peak_before = peak()
    r = random.Random(seed)
    small = (r.randrange(1, 90), r.randrange(1, 90))
    long = r.choice(((1, 1), (1, 200), (1, 201), (10_000, 10), (3, 700)))
    data = encoded(r, *(long if way == "shape" else small))
    is_sound = way in ("sound", "shape")
    data = data if is_sound else damaged(r, way, data)
    ours, error = patches(data)
    if ours is None:
        assert error.startswith("picture 7 "), f"the error is {error!r}"
        assert "\n" not in error, f"the error is {error!r}"
        is_long = way == "shape" and max(long) > MAX_RATIO * min(long)
        assert not is_sound or is_long, f"a sound image is refused: {error}"
    else:
        assert np.isfinite(ours).all()
        assert ours.size <= MAX_VALUES
        assert not is_sound or np.array_equal(ours.reshape(-1, ours.shape[-1]), theirs(data)), "other patches"
    assert peak() - peak_before < MAX_GROWTH, f"memory grew by {(peak() - peak_before) / 1e6:.0f} MB"


def patches(data: bytes) -> tuple[np.ndarray | None, str]:
    """Those of an image, or the error."""
    try:
        return np.asarray(Processor.from_config(PREPROCESSOR).preprocess_image(open_image(data, "picture 7"))), ""
    except ValueError as e:
        return None, str(e)


def theirs(data: bytes) -> np.ndarray:
    """transformers' patches."""
    rgb = convert_to_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), return_numpy=True)
    return reference()(images=[Image.fromarray(rgb)], return_tensors="np")["pixel_values"]


@cache
def reference() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(**PREPROCESSOR)


def peak() -> int:
    """The most memory that the process ever had, in bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
