"""The vision encoder of Qwen3.5, 3.6 and 3.8, which turns an image's patches into the embeddings of its tokens, and its files.

    patches ── patch_embed + pos_embed ── blocks: full attention with axial RoPE ── merger: 4 patches -> 1 embedding

Names are those of the published checkpoints, and layouts those of MLX conversions: the kernel of ``patch_embed`` has its
channels last. Roundings are transformers': norms, RoPE and GELU are computed in float32 and rounded once.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.base import BaseModelArgs

from ..core.caches.fingerprint import digest
from ..core.models.rope import rotate
from ..errors import MTPError, require
from ..memory import nbytes_of
from .open import Processor

T = TypeVar("T")
Size = Callable[[], float]  # the multiplications of the next piece

PREFIX = "vision_tower."  # prefix of its tensors in MLX conversions
RAW_PREFIX = "model.visual."  # prefix in Hugging Face checkpoints
PATCH_KERNEL = "patch_embed.proj.weight"
FUSED_HEAD_DIMS = (64, 80, 128)  # head dimensions of MLX's fused attention on Metal
SCORE_BYTES = 1 << 27  # of a piece of attention where it is not fused
MAX_PATCHES = 65_536  # of the processor's largest image: 16.8 megapixels, 16,384 tokens
CONFIG_FILES = ("processor_config.json", "preprocessor_config.json")  # the first is newer
TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")  # keys of config.json
log = logging.getLogger(__name__)


@dataclass
class VisionArgs(BaseModelArgs):
    """The ``vision_config`` of a config.json."""

    depth: int = 27
    hidden_size: int = 1152
    hidden_act: str = "gelu_pytorch_tanh"
    intermediate_size: int = 4304
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304
    rope_parameters: dict[str, Any] | None = None
    deepstack_visual_indexes: list[int] | None = None

    def __post_init__(self) -> None:
        if self.deepstack_visual_indexes:
            raise MTPError(f"deepstack_visual_indexes must be empty, not {self.deepstack_visual_indexes}.")
        if self.hidden_act != "gelu_pytorch_tanh":
            raise MTPError(f"The vision encoder's hidden_act must be gelu_pytorch_tanh, not {self.hidden_act}.")
        if self.hidden_size % (4 * self.num_heads):
            raise MTPError(
                f"The vision encoder's hidden_size {self.hidden_size} must be a multiple of 4 * num_heads ({self.num_heads})."
            )
        self.head_dim = self.hidden_size // self.num_heads
        self.rope_theta = (self.rope_parameters or {}).get("rope_theta", 10000.0)
        self.patch_dim = self.in_channels * self.temporal_patch_size * self.patch_size**2


class LayerNorm(nn.LayerNorm):
    """A layer norm in float32, rounded once."""

    def __call__(self, x: mx.array) -> mx.array:
        f = mx.float32
        return mx.fast.layer_norm(x.astype(f), self.weight.astype(f), self.bias.astype(f), self.eps).astype(x.dtype)


class Attention(nn.Module):
    def __init__(self, args: VisionArgs):
        super().__init__()
        self.num_heads = args.num_heads
        self.head_dim = args.head_dim
        self.qkv = nn.Linear(args.hidden_size, 3 * args.hidden_size)
        self.proj = nn.Linear(args.hidden_size, args.hidden_size)

    def heads(self, qkv: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys and values of N patches, [N, 3 D] -> [1, H, N, d] each, padded to a width of MLX's fused attention"""
        q, k, v = qkv.reshape(1, len(qkv), 3, self.num_heads, self.head_dim).transpose(2, 0, 3, 1, 4)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        if (fused := next((d for d in FUSED_HEAD_DIMS if d >= self.head_dim), self.head_dim)) > self.head_dim:
            zeros = [(0, 0)] * 3 + [(0, fused - self.head_dim)]
            q, k, v = (mx.pad(a, zeros) for a in (q, k, v))  # changes neither scores nor sums
        return q, k, v

    def __call__(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """Attention of some queries [1, H, n, d] to all keys and values -> [n, D]"""
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.head_dim**-0.5)[..., : self.head_dim]
        return self.proj(out.transpose(0, 2, 1, 3).reshape(q.shape[2], -1))


class MLP(nn.Module):
    """Two linear layers around an activation in float32, rounded once: [N, I] -> [N, O]"""

    def __init__(self, I: int, H: int, O: int, gelu: Callable[[mx.array], mx.array]):
        super().__init__()
        self.gelu = gelu
        self.linear_fc1 = nn.Linear(I, H)
        self.linear_fc2 = nn.Linear(H, O)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.linear_fc1(x)
        return self.linear_fc2(self.gelu(x.astype(mx.float32)).astype(x.dtype))


class Block(nn.Module):
    def __init__(self, args: VisionArgs):
        super().__init__()
        self.norm1 = LayerNorm(args.hidden_size, eps=1e-6)
        self.norm2 = LayerNorm(args.hidden_size, eps=1e-6)
        self.attn = Attention(args)
        self.mlp = MLP(args.hidden_size, args.intermediate_size, args.hidden_size, nn.gelu_approx)

    def pieces(self, x: mx.array, cos: mx.array, sin: mx.array, size: Size) -> Generator[int, None, mx.array]:
        """``VisionTower.pieces`` for this block: x [N, D] -> x [N, D]"""
        N, D = x.shape
        qkv = yield from _in_pieces(N, size, 3 * D * D, lambda i: self.attn.qkv(self.norm1(x[i])))  # [N, 3 D]
        q, k, v = self.attn.heads(qkv, cos, sin)
        mx.eval(q, k, v)

        def rest(i: slice) -> mx.array:
            y = x[i] + self.attn(q[:, :, i], k, v)
            return y + self.mlp(self.norm2(y))

        I = self.mlp.linear_fc1.weight.shape[0]
        max_size = max(1, SCORE_BYTES // (4 * self.attn.num_heads * N))
        return (yield from _in_pieces(N, size, 2 * N * D + D * D + 2 * D * I, rest, max_size))


class VisionTower(nn.Module):
    def __init__(self, args: VisionArgs):
        super().__init__()
        self.args = args
        kernel = (args.temporal_patch_size, args.patch_size, args.patch_size)
        self.patch_embed = {"proj": nn.Conv3d(args.in_channels, args.hidden_size, kernel, stride=kernel)}
        self.pos_embed = nn.Embedding(args.num_position_embeddings, args.hidden_size)
        self.blocks = [Block(args) for _ in range(args.depth)]
        self.merged = args.hidden_size * args.spatial_merge_size**2  # values of a token's patches, which are joined
        self.merger = MLP(self.merged, self.merged, args.out_hidden_size, nn.gelu)
        self.merger.norm = LayerNorm(args.hidden_size, eps=1e-6)

    def __call__(self, pixel_values: mx.array) -> mx.array:
        """[rows, columns, m * m, P] -> [rows * columns, H of the language model], see ``pieces``"""
        pieces = self.pieces(pixel_values, lambda: math.inf)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                return end.value

    def pieces(self, pixel_values: mx.array, size: Size) -> Generator[int, None, mx.array]:
        """The embeddings of one image in pieces of about ``size`` multiplications, each yielded, so that other work can run in
        between: a grid of image tokens, the patches of each in its block of m x m, and their values, channels * frames * height
        * width, [rows, columns, m * m, P] -> [rows * columns, H of the language model], evaluated.
        """
        rows, columns = self._check(pixel_values)
        m = self.args.spatial_merge_size
        y = mx.arange(rows * m, dtype=mx.float32)
        x = mx.arange(columns * m, dtype=mx.float32)
        grid = mx.broadcast_arrays(y.reshape(rows, 1, m, 1), x.reshape(1, columns, 1, m))
        y, x = (positions.flatten() for positions in grid)  # of each patch, token by token
        patches = pixel_values.reshape(-1, self.args.patch_dim)
        D = self.args.hidden_size
        cost = self.args.patch_dim * D
        h = yield from _in_pieces(len(patches), size, cost, lambda i: self._embed(patches[i]))  # [N, D]
        h = h + self._position_embeddings(y, x, rows, columns).astype(h.dtype)
        cos, sin = self._angles(y, x)
        for block in self.blocks:
            h = yield from block.pieces(h, cos, sin, size)
        tokens = h.reshape(rows * columns, -1, D)
        cost = self.merged * (self.merged + self.args.out_hidden_size)
        return (yield from _in_pieces(len(tokens), size, cost, lambda i: self._merge(tokens[i])))

    def _embed(self, x: mx.array) -> mx.array:
        """[N, C T h w] -> [N, D]; the kernel covers a patch, so it is a linear layer."""
        proj = self.patch_embed["proj"]
        weight = proj.weight.transpose(0, 4, 1, 2, 3).flatten(1)  # [D, C T h w]
        return mx.addmm(proj.bias, x.astype(weight.dtype), weight.T)

    def _merge(self, x: mx.array) -> mx.array:
        """The patches of n tokens, [n, m * m, D] -> [n, H of the language model]"""
        return self.merger(self.merger.norm(x).reshape(-1, self.merged))

    def _check(self, pixel_values: mx.array) -> tuple[int, int]:
        shape = pixel_values.shape
        merged = self.args.spatial_merge_size**2
        if len(shape) != 4 or shape[2:] != (merged, self.args.patch_dim) or 0 in shape:
            raise MTPError(f"An image must be [rows, columns, {merged}, {self.args.patch_dim}], not {list(shape)}.")
        if (n := shape[0] * shape[1] * merged) > MAX_PATCHES:
            pixels = self.args.patch_size**2
            raise MTPError(
                f"An image of {n * pixels:,} pixels is larger than the {MAX_PATCHES * pixels:,} that the vision encoder takes: "
                "make it smaller."
            )
        return shape[0], shape[1]

    def _position_embeddings(self, y: mx.array, x: mx.array, rows: int, columns: int) -> mx.array:
        """The square position table at each patch, bilinear between its corners and an image's: [N, D] in float32."""
        m = self.args.spatial_merge_size
        side = math.isqrt(self.args.num_position_embeddings)
        total: Any = 0
        for i, wy in _taps(y, rows * m, side):
            for j, wx in _taps(x, columns * m, side):
                total = total + self.pos_embed(i * side + j) * (wy * wx)[:, None]
        return total

    def _angles(self, y: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
        """Cosines and sines of axial RoPE, [N, d / 2]: the first half by row, the other by column."""
        half = self.args.head_dim // 2
        frequencies = 1 / self.args.rope_theta ** (mx.arange(0, half, 2, dtype=mx.float32) / half)
        angles = mx.concatenate([y[:, None] * frequencies, x[:, None] * frequencies], axis=-1)
        return mx.cos(angles), mx.sin(angles)


def _in_pieces(
    n: int, size: Size, cost: int, compute: Callable[[slice], mx.array], max_size: int = MAX_PATCHES
) -> Generator[int, None, mx.array]:
    """Compute n rows, which take ``cost`` multiplications each, some at a time -> all of them, [n, ...]"""
    out = []
    i = 0
    while i < n:
        k = min(n, i + max_size, i + max(int(min(size() / cost, n)), 1))
        out.append(compute(slice(i, k)))
        mx.eval(out[-1])
        yield cost * (k - i)
        i = k
    return mx.concatenate(out) if len(out) > 1 else out[0]


def _taps(position: mx.array, size: int, side: int) -> list[tuple[mx.array, mx.array]]:
    """The two neighbours in a table of ``side`` of positions among ``size``, and their weights."""
    at = position * (side - 1) / max(size - 1, 1)
    low = mx.floor(at)
    index = low.astype(mx.int32)
    return [(index, 1 - (at - low)), (mx.minimum(index + 1, side - 1), at - low)]


def split_tower(weights: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Separate a checkpoint's tensors into the language model's and the tower's, whose names lose their prefix."""
    of_tower = {name: name.removeprefix(p) for p in (PREFIX, RAW_PREFIX) for name in weights if name.startswith(p)}
    language = {name: w for name, w in weights.items() if name not in of_tower}
    return language, {own: weights[name] for name, own in of_tower.items()}


def make_tower(args: VisionArgs, weights: Mapping[str, mx.array]) -> VisionTower:
    """A tower with these tensors, in either layout, which are read when they are used; an MTPError if they do not fit."""
    tower = VisionTower(args)
    tensors = dict(weights)
    if any(name.endswith(".scales") for name in tensors):
        raise MTPError("The vision encoder is quantized: graft the base model's, in bfloat16.")
    channels_first = (args.in_channels, args.temporal_patch_size, args.patch_size, args.patch_size)
    if PATCH_KERNEL in tensors and tensors[PATCH_KERNEL].shape[1:] == channels_first:
        tensors[PATCH_KERNEL] = tensors[PATCH_KERNEL].transpose(0, 2, 3, 4, 1)  # [D, T, h, w, C]
    try:
        tower.load_weights(list(tensors.items()))
    except ValueError as e:  # mlx's message has a line for each tensor that differs
        raise MTPError(f"The vision encoder does not match its vision_config: {' '.join(str(e).split())[:200]}") from e
    return tower


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("vision_config", *TOKENS) if key in config}


class Vision:
    """The images of a model, ``model.vision``: of a checkpoint's folder, config.json and files with the tower's tensors."""

    def __init__(self, folder: Path, config: Mapping[str, Any], files: Sequence[str]):
        self.folder = folder
        self.config = config
        self.files = files
        self.dtype: mx.Dtype | None = None  # that of the model, if it has 16 bits; None: as the tower is stored

    @cached_property
    def processor(self) -> Processor:
        require("image", "An image")
        args = self._args
        own = {"patch_size": args.patch_size, "merge_size": args.spatial_merge_size}
        own["temporal_patch_size"] = args.temporal_patch_size
        try:
            processor = Processor(own | self._settings())
        except (AttributeError, LookupError, TypeError, ValueError) as e:  # an object in place of a number, or not JSON
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
            args = VisionArgs.from_dict(self.config["vision_config"])
            n = self.config["text_config"]["hidden_size"]
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
                settings = json.loads(file.read_bytes())
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
