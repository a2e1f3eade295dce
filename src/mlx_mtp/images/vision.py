"""The vision encoder and the image processor of a checkpoint. No file is read before the first image.

The processor turns images into the patches that the tower takes, as transformers' ``Qwen2VLImageProcessorPil``.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..caches.validation import digest
from ..memory import nbytes_of
from .open import open_image, pillow
from .tower import VisionArgs, VisionTower, make_tower, split_tower

if TYPE_CHECKING:
    from PIL.Image import Image

Array = np.ndarray[Any, Any]

CONFIG_FILES = ("processor_config.json", "preprocessor_config.json")  # the first is newer
TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")  # keys of config.json
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


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config.json about images."""
    return {key: config[key] for key in ("vision_config", *TOKENS) if key in config}


class Vision:
    """The images of a model: ``model.vision`` of ``mlx_mtp.load``, or ``None`` where the checkpoint has no tower.

    Args:
        folder (Path): The checkpoint.
        config (Mapping[str, Any]): Its config.json.
        files (List[str]): The files with the tower's tensors.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], files: Sequence[str]):
        self.folder, self.config, self.files = folder, config, files

    @cached_property
    def processor(self) -> Processor:
        """
        Raises:
            ValueError: The checkpoint's file is damaged, or for another kind of processor.
        """
        args = self._args
        own = {
            "patch_size": args.patch_size,
            "temporal_patch_size": args.temporal_patch_size,
            "merge_size": args.spatial_merge_size,
        }
        try:
            processor = Processor.from_config({**own, **self._settings()})
        except (AttributeError, TypeError, ValueError) as e:  # an object in place of a number, or not JSON
            raise ValueError(f"The image settings of {self.folder} are not usable: {e}") from e
        for key, n in own.items():
            if getattr(processor, key) != n:
                raise ValueError(
                    f"The image settings of {self.folder} have {key} {getattr(processor, key)}, its vision encoder {n}."
                )
        return processor

    @cached_property
    def tower(self) -> VisionTower:
        """
        Raises:
            ValueError: Its tensors are damaged, or do not fit the config.
        """
        tower = self.lazy_tower()
        mx.eval(tower.parameters())
        return tower

    @property
    def unread_bytes(self) -> int:
        """The size of the tower's tensors before the tower is loaded; 0 afterwards."""
        if "tower" in vars(self):
            return 0
        return nbytes_of(self.lazy_tower())

    def lazy_tower(self) -> VisionTower:
        """A tower of which each tensor is read when it is used."""
        tensors: dict[str, mx.array] = {}
        try:
            for file in self.files:
                weights: Any = mx.load(str(self.folder / file))
                tensors |= split_tower(weights)[1]
            return make_tower(self._args, tensors)
        except (RuntimeError, ValueError) as e:  # mlx raises a RuntimeError for an unreadable file
            raise ValueError(f"The images of {self.folder} cannot be used: {e}") from e

    @cached_property
    def _args(self) -> VisionArgs:
        try:
            args, n = VisionArgs.from_dict(self.config["vision_config"]), self.config["text_config"]["hidden_size"]
        except (KeyError, TypeError) as e:  # text in place of a number
            raise ValueError(
                f"The vision_config of {self.folder} is not usable ({e!r}): is it as it was published?"
            ) from e
        if args.out_hidden_size != n:
            raise ValueError(
                f"The vision encoder of {self.folder} makes embeddings of {args.out_hidden_size}, its model takes {n}."
            )
        return args

    def _settings(self) -> dict[str, Any]:
        for name in CONFIG_FILES:
            if (file := self.folder / name).exists():
                settings = json.loads(file.read_text(encoding="utf-8"))
                settings = settings.get("image_processor") if name == CONFIG_FILES[0] else settings
                if settings is not None:
                    return dict(settings)
        return {}

    @cached_property
    def fingerprint(self) -> bytes:
        """The digest of this tower's tensors and settings, see ``caches/validation.py``."""
        parameters: Any = tree_flatten(self.tower.parameters())
        return digest(parameters)

    def key(self, pixel_values: mx.array) -> int:
        """A negative number of 60 bits in place of an image's tokens. It depends on the patches and on the tower."""
        sha = hashlib.sha256(self.fingerprint + str(pixel_values.shape).encode())
        sha.update(np.ascontiguousarray(pixel_values).data)
        return -1 - int(sha.hexdigest()[:15], 16)
