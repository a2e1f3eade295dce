"""Turns images into the patches that the vision encoder takes, as transformers' ``Qwen2VLImageProcessorPil``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from .open import open_image, pillow

if TYPE_CHECKING:
    from PIL.Image import Image

Array = np.ndarray[Any, Any]

IMAGE_TOKEN = "<|image_pad|>"
VIDEO_TOKEN = "<|video_pad|>"
PIXEL_BYTES = 4  # of Pillow's images
FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}  # bicubic
PLACEHOLDER = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"


@dataclass(frozen=True)
class Processor:
    """The settings of a checkpoint's preprocessor_config.json; the defaults are the published Qwen3.5's.

    Args:
        min_pixels, max_pixels (int): An image with fewer or more pixels is resized.
        merge_size (int): The side of the square of patches that form a token.
    """

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 65_536
    max_pixels: int = 16_777_216
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255

    def __post_init__(self) -> None:
        for key in ("patch_size", "temporal_patch_size", "merge_size", "min_pixels", "max_pixels"):
            if not isinstance(n := getattr(self, key), int) or n < 1:
                raise ValueError(f"{key} must be a whole number of 1 or more, not {n!r}.")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is larger than max_pixels {self.max_pixels}.")
        if len(self.image_mean) != 3 or len(self.image_std) != 3 or 0 in self.image_std:
            raise ValueError(
                f"image_mean and image_std must be 3 numbers each, not {list(self.image_mean)} and {list(self.image_std)}."
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Processor":
        """
        Args:
            config (Dict[str, Any]): A preprocessor_config.json; keys that it lacks have their default.

        Raises:
            ValueError: A value is not usable.
        """
        for key, value in FIXED.items():
            if config.get(key) not in (None, value):
                raise ValueError(f"{key} must be {value}, not {config[key]}.")
        size = config.get("size") or {}
        settings: dict[str, Any] = {
            "min_pixels": config.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": config.get("max_pixels") or size.get("longest_edge"),
            "image_mean": tuple(map(float, config.get("image_mean") or ())) or None,
            "image_std": tuple(map(float, config.get("image_std") or ())) or None,
        }
        settings |= {key: config.get(key) for key in ("patch_size", "temporal_patch_size", "merge_size")}
        if config.get("rescale_factor") is not None:
            settings["rescale_factor"] = float(config["rescale_factor"])
        return cls(**{k: v for k, v in settings.items() if v is not None})

    @property
    def token_size(self) -> int:
        """The side of an image token, in pixels."""
        return self.patch_size * self.merge_size

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """The rows and columns of image tokens of an image with these sides in pixels."""
        side = self.token_size
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows, columns = max(1, int(height / shrink / side)), max(1, int(width / shrink / side))
        elif rows * columns * side**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows, columns

    def nbytes_of(self, width: int, height: int) -> int:
        """The most bytes that decoding an image of this size takes: the image, its resized copy, and its patches in float32."""
        rows, columns = self.grid(width, height)
        n = rows * columns * self.token_size**2  # pixels
        return PIXEL_BYTES * (2 * width * height + n) + 3 * n * 2 * self.temporal_patch_size * np.float32().nbytes

    def preprocess_image(self, image: "Array | Image") -> mx.array:
        """
        Args:
            image (Union[np.ndarray, PIL.Image.Image]): An image of Pillow, or uint8 values [height, width, 3] in RGB.

        Returns:
            mx.array: [rows, columns, merge_size**2, P] in float32: the grid of its tokens, and the patches of each.

        Raises:
            ValueError: The image is empty, too large or too long, an array of another kind, or Pillow is missing.
        """
        return self.patches_of(open_image(image))

    def patches_of(self, rgb: "Image") -> mx.array:
        """``preprocess_image`` for an image of ``open_image``."""
        rows, columns = self.grid(rgb.width, rgb.height)
        size = (columns * self.token_size, rows * self.token_size)
        resized = rgb.resize(size, pillow().Resampling.BICUBIC)
        return mx.array(self._patches(np.asarray(resized), rows, columns))

    def _patches(self, pixels: Array, rows: int, columns: int) -> Array:
        """uint8 values [h, w, 3] -> float32 patches [rows, columns, m * m, 3 * frames * p * p]."""
        m, p, T = self.merge_size, self.patch_size, self.temporal_patch_size
        patches = pixels.reshape(rows, m, p, columns, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)  # [r, c, m, m, 3, p, p]
        out = np.empty((rows, columns, m, m, 3, T, p, p), np.float32)
        for channel, values in enumerate(self._normalized()):
            out[:, :, :, :, channel] = values[patches[:, :, :, :, channel, None]]  # the frame, T times
        return out.reshape(rows, columns, m * m, -1)

    def _normalized(self) -> Array:
        """The normalized value of each of the 256, [3, 256], with transformers' roundings."""
        scaled = (np.arange(256) * self.rescale_factor).astype(np.float32)
        mean, std = (np.array(a, np.float32)[:, None] for a in (self.image_mean, self.image_std))
        return (scaled - mean) / std
