"""Checkpoints in folders, good and bad, for the tests."""

import json
import re
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from mlx_mtp.models import MODEL_TYPES

from .models import DATA


def write(folder, config, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "moe35" / name, folder)
    return folder


def tensors(folder: Path) -> dict[str, mx.array]:
    """All of a checkpoint's tensors."""
    weights: dict[str, mx.array] = {}
    for file in folder.glob("*.safetensors"):
        weights.update(mx.load(str(file)))
    return weights


@contextmanager
def full_disk(n_bytes):
    """Files cannot grow beyond ``n_bytes``, and writing them fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def copied(tmp_path, name="dense"):
    return shutil.copytree(DATA / name, tmp_path / "model")


def edit(folder, change):
    """Rewrite a one-file checkpoint's tensors."""
    weights = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def configure(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def no_head(folder):
    edit(folder, lambda w: [w.pop(name) for name in list(w) if name.startswith("mtp.")])


def no_head_no_claim(folder):
    no_head(folder)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    configure(folder, text_config={**text, "mtp_num_hidden_layers": 0})


def part_of_a_head(folder):
    edit(folder, lambda w: [w.pop(name) for name in ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight")])


def wrong_shape(folder):
    edit(folder, lambda w: w.update({"mtp.fc.weight": w["mtp.fc.weight"][:, :-1]}))


def own_embeddings(folder):
    text = json.loads((folder / "config.json").read_text())["text_config"]
    configure(folder, text_config={**text, "mtp_use_dedicated_embeddings": True})


def size_not_a_number(folder):
    text = json.loads((folder / "config.json").read_text())["text_config"]
    configure(folder, text_config={**text, "hidden_size": "192"})


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def damaged_header(folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[20:40] = b"\xff" * 20
    file.write_bytes(data)


def missing_shard(folder):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def missing_tensor(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": "model.safetensors"}}))


def index_of(text):
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


# What makes a checkpoint bad, the error and its message, and whether plain mlx-lm loads it all the same
BAD = [
    (no_head, ValueError, r"config of .*model claims .* `mlx_mtp convert .*, or generate without --mtp", True),
    (no_head_no_claim, ValueError, r"model has no MTP head: .*convert.*, or generate without --mtp", True),
    (part_of_a_head, ValueError, r"lacks mtp\.(fc|layers\.0\.self_attn\.q_proj)\.weight, mtp\.", True),
    (wrong_shape, ValueError, r"mtp\.fc\.weight is \[192, 383\], not \[192, 384\]", True),
    (own_embeddings, ValueError, "its own embeddings", True),
    (cut_short, ValueError, "truncated or damaged", False),
    (damaged_header, ValueError, "truncated or damaged", False),
    (missing_shard, FileNotFoundError, "model-00002-of-00002.safetensors, which its index names", True),
    (missing_tensor, ValueError, "lacks the tensor a.weight", True),
    (lambda folder: configure(folder, model_type="llama"), ValueError, ", ".join(MODEL_TYPES), False),
    (
        lambda folder: configure(folder, model_type="qwen4_exp"),
        ValueError,
        "qwen4_exp is supported neither here nor by mlx-lm",
        False,
    ),
    (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, "no config.json", False),
    (lambda folder: (folder / "config.json").write_text("{"), ValueError, "is not JSON", False),
    (lambda folder: (folder / "config.json").write_text("[]"), ValueError, r"config\.json", False),
    (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{}"), ValueError, r"config\.json", False),
    (lambda folder: (folder / "model.safetensors").unlink(), FileNotFoundError, "No safetensors", False),
    (
        lambda folder: (folder / "config.json").write_text("{}"),
        ValueError,
        "Model type None is supported neither",
        False,
    ),
    (lambda folder: configure(folder, text_config=None), ValueError, "text_config of .* is not an object", False),
    (size_not_a_number, ValueError, r"model could not be loaded \(TypeError.*is its config\.json", False),
    (index_of("{"), ValueError, r"model\.safetensors\.index\.json", True),
    (index_of("[]"), ValueError, r"model\.safetensors\.index\.json", True),
    (index_of("{}"), ValueError, r"model\.safetensors\.index\.json", True),
    (index_of('{"weight_map": {"a": ["x"]}}'), ValueError, r"model\.safetensors\.index\.json", True),
]
BAD_IDS = [
    "no head", "no head, no claim", "part of a head", "wrong shape", "own embeddings", "cut short", "damaged header",
    "missing shard", "missing tensor", "llama", "qwen4_exp", "no config", "config cut short", "config a list",
    "config not text", "no weights", "config empty", "no text config", "size not a number",
    "index cut short", "index a list", "index without weight_map", "index of no files",
]  # fmt: skip


def first_layers(folder, n):
    """Keep the first n layers of a copy of the demo: the same text model, faster."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    configure(folder, text_config=text | {"num_hidden_layers": n, "layer_types": text["layer_types"][:n]})
    layer = re.compile(r"model\.language_model\.layers\.(\d+)\.")

    def drop(weights):
        for name in [*weights]:
            if (found := layer.match(name)) and int(found[1]) >= n:
                del weights[name]

    edit(folder, drop)
