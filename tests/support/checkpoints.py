"""Checkpoints in folders, good and bad."""

import json
import re
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_mtp import convert, load
from mlx_mtp.checkpoint.heads import acceptance
from mlx_mtp.core.models.family import HeadNames
from mlx_mtp.core.models.head_weights import in_files

from .models import DATA, model_of, tiny_config

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
split_head = HeadNames().split  # with the names of Qwen's heads


def write(folder, config, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / WEIGHTS), weights)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "moe35" / name, folder)
    return folder


def write_tiny(folder, family, dtype=mx.float32, **changes):
    model = model_of(family, dtype=dtype, **changes)
    return write(folder, tiny_config(family, **changes), stored(model) | tables(model))


def write_llama(folder):
    """A model of mlx-lm alone -> (folder, model)."""
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 32,
        "num_attention_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    }  # fmt: skip
    model = llama.Model(llama.ModelArgs.from_dict(config))
    return write(folder, config, parameters(model)), model


def converted(source, target, **options):
    convert(str(source), str(target), **options)
    return target


def loaded(folder, mtp=True, **options):
    return load(str(folder), mtp=mtp, **options)[0]


def make_adapter(model: Path, folder: Path) -> Path:
    """An adapter as ``mlx_lm.lora`` writes it, of random numbers."""
    folder.mkdir()
    backbone, options = load(str(model))[0], {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["mlp.down_proj"]}
    backbone.freeze()
    linear_to_lora_layers(backbone, 1, options)
    trained = tree_flatten(backbone.trainable_parameters())
    keys = mx.random.split(mx.random.key(0), len(trained))
    weights = {name: 0.05 * mx.random.normal(p.shape, key=key) for key, (name, p) in zip(keys, trained)}
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": options}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def accepting(monkeypatch, rate: float) -> list:
    """All models accept this share of the drafts of any head. Return the list of those that are measured."""
    measured = []
    readings = lambda model, tokenizer, norms, told: measured.append(model) or {told: rate}  # noqa: E731
    monkeypatch.setattr(acceptance, "measure_readings", readings)
    return measured


def stored(model) -> dict[str, mx.array]:
    """A model's parameters by the names that they have in files."""
    own = parameters(model)
    head = {
        name.removeprefix(model.head_prefix): own.pop(name) for name in [*own] if name.startswith(model.head_prefix)
    }
    return own | in_files(model, head)


def parameters(module) -> dict[str, mx.array]:
    return dict(tree_flatten(module.parameters()))


def tables(model, prefix="language_model.model.", part="shards.") -> dict[str, mx.array]:
    """The tensors of a model's tables of n-gram embeddings in three parts, if it has any."""
    found = {}
    for i, table in (model.ngrams.tables if model.ngrams else {}).items():
        for j, rows in enumerate(np.array_split(table.rows.array, 3)):
            found[f"{prefix}layers.{i}.ple.ple_embedding.ngram_embedding.{part}{j}.weight"] = mx.array(rows)
    return found


def tensors(folder: Path) -> dict[str, mx.array]:
    return {name: w for file in folder.glob("*.safetensors") for name, w in mx.load(str(file)).items()}


def differing(a: dict[str, mx.array], b: dict[str, mx.array]) -> set[str]:
    """The names of the tensors that are not the same in both, bit for bit."""
    both = a.keys() & b.keys()
    return (a.keys() ^ b.keys()) | {n for n in both if a[n].dtype != b[n].dtype or not mx.array_equal(a[n], b[n])}


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
    weights = mx.load(str(folder / WEIGHTS))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(folder / WEIGHTS), weights)


def drop(folder, match):
    edit(folder, lambda weights: [weights.pop(name) for name in list(weights) if match(name)])


def quantize_head(folder, bits, group_size=32):
    """Quantize the matrices of the layer of a one-file checkpoint's head, as some conversions do."""

    def change(weights):
        for name in [n for n, w in weights.items() if "mtp.layers." in n and w.ndim > 1 and "gate.weight" not in n]:
            parts = mx.quantize(weights.pop(name), group_size, bits)
            weights.update(zip((name, name.replace("weight", "scales"), name.replace("weight", "biases")), parts))

    edit(folder, change)
    configure(folder, quantization={"group_size": group_size, "bits": bits})
    return folder


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def configure(folder, text=None, **changes):
    """Change a config.json; ``text`` changes the text model's."""
    config = config_of(folder)
    if text is not None:
        changes["text_config"] = config["text_config"] | text
    (folder / "config.json").write_text(json.dumps(config | changes))


def no_head(folder):
    drop(folder, lambda name: name.startswith("mtp."))


def first_layers(folder, n):
    """Keep the first n layers of a copy of the demo: the same text model, faster."""
    text = config_of(folder)["text_config"]
    configure(folder, text={"num_hidden_layers": n, "layer_types": text["layer_types"][:n]})
    layer = re.compile(r"model\.language_model\.layers\.(\d+)\.")
    drop(folder, lambda name: (found := layer.match(name)) and int(found[1]) >= n)
