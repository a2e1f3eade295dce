"""The vision encoder and the image processor of a checkpoint. No file is read before the first image."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..core.caches.fingerprint import digest
from ..errors import MTPError, require
from ..memory import nbytes_of
from .open import open_image
from .tower import VisionArgs, VisionTower, make_tower, split_tower

CONFIG_FILES = ("processor_config.json", "preprocessor_config.json")  # the first is newer
TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")  # keys of config.json
IMAGE_TOKEN = "<|image_pad|>"
VIDEO_TOKEN = "<|video_pad|>"
PIXEL_BYTES = 4  # of Pillow's images
SIZES = ("patch_size", "temporal_patch_size", "merge_size")
PUBLISHED: dict[str, Any] = {
    "patch_size": 16,
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
PLACEHOLDER = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
log = logging.getLogger(__name__)


class Processor:
    """transformers' image processor, by the settings of a preprocessor_config.json and the published Qwen3.5's."""

    def __init__(self, settings: Mapping[str, Any]):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

        given = {key: value for key, value in settings.items() if value is not None}
        self._smart_resize, self._theirs = smart_resize, Qwen2VLImageProcessorPil.from_dict(PUBLISHED | given)
        self.patch_size, self.merge_size = self._theirs.patch_size, self._theirs.merge_size
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
        side, size = self.patch_size * self.merge_size, self._theirs.size
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


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("vision_config", *TOKENS) if key in config}


class Vision:
    """The images of a model, ``model.vision``: of a checkpoint's folder, config.json and files with the tower's tensors."""

    def __init__(self, folder: Path, config: Mapping[str, Any], files: Sequence[str]):
        self.folder, self.config, self.files = folder, config, files
        self.dtype: mx.Dtype | None = None  # that of the model, if it has 16 bits; None: as the tower is stored

    @cached_property
    def processor(self) -> Processor:
        require("image", "An image")
        args = self._args
        own = dict(zip(SIZES, (args.patch_size, args.temporal_patch_size, args.spatial_merge_size)))
        try:
            processor = Processor(own | self._settings())
        except (AttributeError, TypeError, ValueError) as e:  # an object in place of a number, or not JSON
            raise MTPError(f"The image settings of {self.folder} are not usable: {e}") from e
        for key, n in own.items():
            if getattr(processor, key) != n:
                raise MTPError(
                    f"The image settings of {self.folder} have {key} {getattr(processor, key)}, its vision encoder {n}."
                )
        return processor

    @cached_property
    def tower(self) -> VisionTower:
        tower = self.lazy_tower()
        if self.dtype is not None:
            tower.set_dtype(self.dtype)
        mx.eval(tower.parameters())
        return tower

    def keep_own_type(self) -> None:
        """Load the tower again as it is stored, for the next image."""
        log.warning(f"[WARNING] The vision encoder of {self.folder} overflows in the model's type: it keeps its own.")
        self.dtype = None
        self.free()

    def free(self) -> None:
        vars(self).pop("tower", None)

    @property
    def unread_bytes(self) -> int:
        """The size of the tower's tensors before the tower is loaded; 0 afterwards."""
        return 0 if "tower" in vars(self) else nbytes_of(self.lazy_tower())

    def lazy_tower(self) -> VisionTower:
        """A tower of which each tensor is read when it is used."""
        tensors: dict[str, mx.array] = {}
        try:
            for file in self.files:
                weights: Any = mx.load(str(self.folder / file))
                tensors |= split_tower(weights)[1]
            return make_tower(self._args, tensors)
        except (RuntimeError, ValueError) as e:  # mlx raises a RuntimeError for an unreadable file
            raise MTPError(f"The images of {self.folder} cannot be used: {e}") from e

    @cached_property
    def _args(self) -> VisionArgs:
        try:
            args, n = VisionArgs.from_dict(self.config["vision_config"]), self.config["text_config"]["hidden_size"]
        except (KeyError, TypeError) as e:  # text in place of a number
            raise MTPError(f"The vision_config of {self.folder} is not usable ({e!r}): is it as published?") from e
        if args.out_hidden_size != n:
            raise MTPError(
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
        """The digest of this tower's tensors and settings, see ``core/caches/fingerprint.py``."""
        parameters: Any = tree_flatten(self.tower.parameters())
        return digest(parameters)

    def key(self, pixel_values: mx.array) -> int:
        """A negative number of 60 bits in place of an image's tokens. It depends on the patches and on the tower."""
        sha = hashlib.sha256(self.fingerprint + str(pixel_values.shape).encode())
        sha.update(np.ascontiguousarray(pixel_values).data)
        return -1 - int(sha.hexdigest()[:15], 16)
