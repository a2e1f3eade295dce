"""Heads in the layouts that others publish: a layout is one choice for each axis, and the axes are independent."""

import json
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
from hypothesis import strategies as st

from mlx_mtp.checkpoint.heads.acceptance import PARTS

from .checkpoints import INDEX, WEIGHTS, configure, split_head

PREFIXES = ("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.", "language_model.model.mtp.")
INSIDE = ("inside", "model-mtp")  # files that mlx-lm loads: their tensors have a prefix
# A file that the config names, files that the index names, files of another index, and files that nothing names.
PLACES = (
    *INSIDE, "config", "index", "index of two", "other index", "mtp.safetensors", "mtp/weights.safetensors",
    "a/b/draft.safetensors", "no index",
)  # fmt: skip
EXPERTS = ("switch_mlp", "each", "numbers last", "fused", "fused in switch_mlp", "stacked", "as dense")
QUANTIZATIONS = (
    None, (4, 64, "affine"), (8, 32, "affine"), (3, 32, "affine"), (4, 32, "mxfp4"), (8, 32, "mxfp8"), "fp8",
)  # fmt: skip
ENCODINGS = [
    lambda value: {"mtplx_mtp_norm_encoding": value},
    lambda value: {"mtp_norm_encoding": value},
    lambda value: {"mtplx_mtp_quantization": {"norm_encoding": value, "bits": 4}},
    lambda value: {"mtplx_mtp_quantization": {"norm_weight_encoding": value}},
]


@dataclass(frozen=True)
class Layout:
    place: str = "inside"
    prefix: str = "language_model.mtp."
    experts: str = "switch_mlp"
    quantization: tuple | str | None = None
    without_one: tuple[str, ...] = ()  # the parts whose norms are stored without 1
    told: dict = field(default_factory=dict)  # what the config tells of it
    told_in: str = "config.json"


VALUES = ["delta", "delta_plus_one", "mlx_delta", " Delta "], ["absolute", "plus_one"]  # without 1, and with it


@st.composite
def layouts(draw):
    """Any layout that is read."""
    place = draw(st.sampled_from(PLACES))
    told = draw(st.one_of(st.none(), st.sampled_from(ENCODINGS)))
    is_delta = told is not None and draw(st.booleans())
    return Layout(
        place,
        draw(st.sampled_from([*PREFIXES, *([] if place in INSIDE else [""])])),
        draw(st.sampled_from(EXPERTS)),
        draw(st.sampled_from(QUANTIZATIONS)),
        PARTS if is_delta else (),
        {"quantization": {"group_size": 64, "bits": 8}}  # of the backbone
        | (told(draw(st.sampled_from(VALUES[not is_delta]))) if told is not None else {"mtp_norm_encoding": "none"}),
        draw(st.sampled_from(["config.json", "mtplx_runtime.json"])),
    )


def write_layout(source: Path, target: Path, layout: Layout) -> Path:
    """Copy a converted checkpoint of one file, with its head in another layout."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    weights = mx.load(str(source / WEIGHTS))
    backbone, head = split_head(weights)
    head = {name: w - 1 if w.ndim == 1 and name.startswith(layout.without_one) else w for name, w in head.items()}
    head = with_experts(quantized(head, layout.quantization), layout.experts)
    head = {layout.prefix + name: w for name, w in head.items()}
    _place(target, backbone, head, layout.place)
    configure(target, mlx_mtp=None)
    if layout.told_in == "config.json":
        configure(target, **layout.told)
    else:
        (target / layout.told_in).write_text(json.dumps(layout.told))
    return target


def quantized(head, how):
    """The matrices but for routers, in ``(bits, group_size, mode)`` or in FP8."""
    out = dict(head)
    for name, w in head.items():
        if how is None or w.ndim < 2 or name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
            continue
        if how == "fp8":
            out[name], out[name + "_scale_inv"] = _fp8(w)
        else:
            bits, group_size, mode = how
            parts = mx.quantize(out.pop(name), group_size, bits, mode)
            out |= {name.removesuffix("weight") + part: x for part, x in zip(("weight", "scales", "biases"), parts)}
    return out


def _fp8(w, block=128):
    """Blocks as in Qwen's: the last ones may be smaller."""
    rows, columns = w.shape[-2:]
    padded = mx.pad(w.astype(mx.float32), [(0, 0)] * (w.ndim - 2) + [(0, -rows % block), (0, -columns % block)])
    blocks = padded.reshape(*w.shape[:-2], -(-rows // block), block, -(-columns // block), block)
    scale = mx.maximum(mx.abs(blocks).max(axis=(-3, -1)), 1e-6) / 448
    whole = mx.repeat(mx.repeat(scale, block, -2), block, -1)[..., :rows, :columns]
    return mx.to_fp8(w / whole), scale


def with_experts(head, how):
    """The experts in one of the forms of ``EXPERTS``."""
    out = {}
    for name, w in head.items():
        mlp, _, rest = name.partition("switch_mlp.")
        projection, _, part = rest.partition(".")
        owner, end = f"{mlp}{'switch_mlp' if 'switch' in how else 'experts'}", f".{part}"
        if how in ("fused", "stacked") and f"{mlp}switch_mlp.{projection}.scales" not in head:
            end = end.removeprefix(".weight")  # as in raw checkpoints
        if how == "switch_mlp" or not rest:
            out[name] = w
        elif how == "as dense":
            out[mlp + rest] = w
        elif how == "each":
            out |= {f"{owner}.{e}.{rest}": w[e] for e in range(len(w))}
        elif how == "numbers last":
            out |= {f"{owner}.{projection}.{e}.{part}": w[e] for e in range(len(w))}
        elif how == "stacked" or projection == "down_proj":
            out[f"{owner}.{projection}{end}"] = w
        elif projection == "gate_proj":
            both = mx.concatenate([w, head[f"{mlp}switch_mlp.up_proj.{part}"]], axis=-2)
            out[f"{owner}.gate_up_proj{end}"] = both
    return out


def _place(folder, backbone, head, place):
    save(folder, backbone | head if place == "inside" else backbone)
    names, files, n = sorted(head), {}, 1 if place == "index" else 2
    if "index" in place:
        files = {f"mtp-{i + 1:05d}-of-{n:05d}.safetensors": names[i::n] for i in range(n)}
    elif place != "inside":
        named = {"model-mtp": "model-mtp.safetensors", "config": "optiq/mtp.safetensors"}
        files = {named.get(place, place): names}
    for file, own in files.items():
        save(folder, {name: head[name] for name in own}, file)
    if place == "config":
        configure(folder, mlx_lm_extra_tensors={"mtp_file": "optiq/mtp.safetensors"})
    if "index" in place and place != "no index":
        weight_map = {name: file for file, own in files.items() for name in own}
        if place != "other index":
            weight_map |= dict.fromkeys(backbone, WEIGHTS)
        index = "mtp.safetensors.index.json" if place == "other index" else INDEX
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def save(folder, tensors, name=WEIGHTS):
    """MLX writes FP8 as bytes, and its type is written over them."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / name), tensors)
    if any(own.endswith("_scale_inv") for own in tensors):
        data = (folder / name).read_bytes()
        n = 8 + struct.unpack("<Q", data[:8])[0]
        header = data[8:n].replace(b'"U8"', b'"F8_E4M3"')
        (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + data[n:])


def write_fp8(source: Path, target: Path, base_model: str) -> Path:
    """A raw checkpoint of one file with the matrices of all layers in FP8, as Qwen publishes them."""
    shutil.copytree(source, target)
    weights = mx.load(str(source / WEIGHTS))
    for name, w in [*weights.items()]:
        if ".layers." in name and w.ndim == 2 and name.endswith("proj.weight"):
            weights[name], weights[name + "_scale_inv"] = _fp8(w)
    save(target, weights)
    how = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    configure(target, quantization_config=how)
    (target / "README.md").write_text(f"---\nbase_model:\n- {base_model}\n---\n")
    return target


ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of the columns in a number of AWQ


def write_awq(source: Path, target: Path) -> Path:
    """A checkpoint of one file with the matrices of all layers in AWQ, [K, N] with eight columns in a number."""
    shutil.copytree(source, target)
    weights = mx.load(str(source / WEIGHTS))
    for name, w in [*split_head(weights)[0].items()]:
        if ".layers." in name and w.ndim == 2 and name.endswith("proj.weight"):
            del weights[name]
            weights |= {name.removesuffix("weight") + part: x for part, x in _awq(w.astype(mx.float32).T).items()}
    mx.save_safetensors(str(target / WEIGHTS), weights)
    how = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    configure(target, text={"dtype": "float16"}, quantization_config=how)
    return target


def _awq(w):
    groups = w.reshape(-1, 32, w.shape[1])  # [K / 32, 32, N]
    low, high = mx.minimum(groups.min(1), 0), mx.maximum(groups.max(1), 1e-3)
    scales = ((high - low) / 15).astype(mx.float16)  # [K / 32, N]
    zeros = mx.round(-low / scales)
    numbers = mx.clip(mx.round(groups / scales[:, None]) + zeros[:, None], 0, 15).reshape(w.shape)

    def packed(x):  # [..., N] -> [..., N / 8]
        columns = x.astype(mx.uint32).reshape(len(x), -1, 8)[..., ORDER]
        return (columns << 4 * mx.arange(8, dtype=mx.uint32)).sum(-1).view(mx.int32)

    return {"qweight": packed(numbers), "qzeros": packed(zeros), "scales": scales}
