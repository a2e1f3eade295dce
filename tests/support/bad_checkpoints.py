"""What spoils a checkpoint, and the errors that follow."""

import json
import re

import mlx.core as mx

from mlx_mtp.core.models import MODEL_TYPES

from .checkpoints import INDEX, WEIGHTS, configure, drop, edit, no_head


def configured(**changes):
    return lambda folder: configure(folder, **changes)


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def removed(name):
    return lambda folder: (folder / name).unlink()


def dropped(*names):
    return lambda folder: drop(folder, names.__contains__)


def lost(folder):
    """Tensors of the index, which the file no longer has: those of a layer."""
    index = dict.fromkeys(mx.load(str(folder / WEIGHTS)), WEIGHTS)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    drop(folder, lambda name: ".layers.1." in name)


def narrow_fc(folder):
    edit(folder, lambda w: w.update({"mtp.fc.weight": w["mtp.fc.weight"][:, :-1]}))


def no_head_no_claim(folder):
    no_head(folder)
    configure(folder, text={"mtp_num_hidden_layers": 0})


def own_embeddings(folder):
    embedding = "model.language_model.embed_tokens.weight"
    edit(folder, lambda weights: weights.update({"mtp.embed_tokens.weight": weights[embedding] + 1}))


def cut_short(folder):
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


PART = dropped("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight")
TWO_SHARDS = b'{"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}'
NO_JSON, MISSING = r"config\.json", FileNotFoundError
# What makes a checkpoint bad, the error and its message, and whether it loads without the head all the same
BAD = {
    "no head": (no_head, ValueError, "config of .*model claims .* `mlx_mtp convert .*, or generate with --no-mtp", True),
    "no head, no claim": (no_head_no_claim, ValueError, "model has no MTP head: .*convert.*, or generate with --no-mtp", True),
    "part of a head": (PART, ValueError, r"lacks mtp\.(fc|layers\.0\.self_attn\.q_proj)\.weight, mtp\.", True),
    "wrong shape": (narrow_fc, ValueError, r"mtp\.fc\.weight is \[192, 383\], not \[192, 384\]", True),
    "own embeddings": (own_embeddings, ValueError, r"its own mtp\.embed_tokens\.weight, other than the model's", True),
    "cut short": (cut_short, ValueError, "truncated or damaged", False),
    "folder": (lambda folder: (folder / "model-2.safetensors").mkdir(), ValueError, "model-2.* but a folder: remove or", False),
    "missing shard": (written(INDEX, TWO_SHARDS), MISSING, "lacks model-00002-of-00002.s.*, or delete the index", False),
    "missing tensor": (lost, ValueError, "lacks the tensor model.*layers.1.*, or delete the index", False),
    "llama": (configured(model_type="llama"), ValueError, ", ".join(MODEL_TYPES), False),
    "unknown": (configured(model_type="qwen9"), ValueError, "qwen9 is supported neither here nor by mlx-lm", False),
    "no config": (removed("config.json"), MISSING, "no config.json", False),
    "config cut short": (written("config.json", b"{"), ValueError, "is not JSON", False),
    "config not text": (written("config.json", b"\xff\xfe{}"), ValueError, NO_JSON, False),
    "no weights": (removed(WEIGHTS), MISSING, "No safetensors", False),
    "config empty": (written("config.json", b"{}"), ValueError, "Model type None is supported neither", False),
    "no text config": (configured(text_config=None), ValueError, "text_config of .* is not an object", False),
    "size not a number": (
        configured(text={"hidden_size": "192"}), ValueError, r"model could not be loaded \(TypeError.*is its config\.j", False),
    "index cut short": (written(INDEX, b"{"), ValueError, re.escape(INDEX), False),
    "index of no files": (written(INDEX, b'{"weight_map": {"a": ["x"]}}'), ValueError, re.escape(INDEX), False),
}  # fmt: skip
