"""Adapters of peft: the model with one is that with the updated weights, or one sentence says why it cannot be loaded."""

import json
import re

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_unflatten

import mlx_mtp
from mlx_mtp.convert.__main__ import main as convert
from tests.support.checkpoints import differing, loaded, make_adapter, parameters, write, write_llama, write_tiny
from tests.support.commands import refused, run_command
from tests.support.models import PACK, model_of, tiny_config, tiny_model
from tests.support.profiles import LONG

TOKENS = mx.array([[1, 2, 3, 30, 4]])
LAYER = "model.language_model.layers"
ATTENTION, RECURRENT = f"{LAYER}.1.self_attn", f"{LAYER}.0.linear_attn"
EXPERTS, E = f"{LAYER}.0.mlp.experts", 4
EMBEDDING = "model.language_model.embed_tokens"
random = np.random.default_rng(0).standard_normal


class Adapter:
    """Matrices of rank r as peft stores them, and what they add to a model's weights, scaled by alpha / r, in float64."""

    def __init__(self, model, r=4, alpha=6, **config):
        self.config = {"peft_type": "LORA", "r": r, "lora_alpha": alpha, "target_modules": [], **config}
        self.weights = {name: np.array(w.astype(mx.float32), np.float64) for name, w in parameters(model).items()}
        self.tensors, self.r, self.scale = {}, r, alpha / (r**0.5 if config.get("use_rslora") else r)

    def own(self, name):
        """The name of a weight of the model."""
        name = name.replace("model.language_model.", "").removeprefix("model.")
        return next(own for own in self.weights if own.endswith(f"{name}.weight") and "mtp." not in own)

    def add(self, name, own=None, r=None, scale=None, kind="", e=None):
        """Update a layer, or the expert e."""
        own, r, scale = own or self.own(name), r or self.r, self.scale if scale is None else scale
        *_, outputs, inputs = self.weights[own].shape
        if kind:
            outputs, inputs = inputs, outputs
        a, b = self.put(name, (r, inputs), (outputs, r), kind)
        self.weights[own][... if e is None else e] += scale * (b @ a).T if kind else scale * b @ a
        return self

    def put(self, name, a, b, kind=""):
        a, b = 0.3 * random(a), 0.3 * random(b)
        end = "" if kind else ".weight"
        self.tensors |= {f"base_model.model.{name}.lora_{kind}{x}{end}": w for x, w in (("A", a), ("B", b))}
        return a, b

    def add_fused(self, name, parameter, transposed=False):
        """Update a fused tensor of experts; ``transposed`` as by earlier versions of peft."""
        mlp = self.own(f"{LAYER}.0.mlp.switch_mlp.up_proj").removesuffix("up_proj.weight")
        parts = [f"{mlp}{p}_proj.weight" for p in (("gate", "up") if parameter == "gate_up_proj" else ("down",))]
        _, outputs, inputs = self.weights[parts[0]].shape
        x, y = (outputs * len(parts), inputs) if transposed else (inputs, outputs * len(parts))
        a, b = self.put(name, (E * self.r, x), (y, self.r * E))
        a, b = a.reshape(E, self.r, x), b.reshape(y, self.r, E)
        delta = self.scale * np.einsum("ore,eri->eio" if transposed else "ore,eri->eoi", b, a)
        for own, part in zip(parts, np.split(delta, len(parts), axis=1)):
            self.weights[own] += part
        return self

    def save(self, name, own=None):
        """A whole weight, as of ``modules_to_save``."""
        own = own or self.own(name)
        self.tensors[f"base_model.model.{name}.weight"] = self.weights[own] = random(self.weights[own].shape) * 0.3
        return self

    def write(self, folder):
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        tensors = {name: mx.array(w.astype(np.float32)) for name, w in self.tensors.items()}
        mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
        return str(folder)


def several(adapter):
    for name in (f"{ATTENTION}.q_proj", f"{ATTENTION}.o_proj", f"{LAYER}.0.mlp.down_proj", "lm_head"):
        adapter.add(name)
    return adapter.add(f"{RECURRENT}.in_proj_qkv").add(f"{RECURRENT}.in_proj_a").add(f"{RECURRENT}.out_proj")


def patterns(adapter):
    """The first one that matches counts, a whole name or its end."""
    adapter.config |= {"rank_pattern": {"q_proj": 2, "1.self_attn.o_proj": 3}}
    adapter.config |= {"alpha_pattern": {r"layers\.\d+\.self_attn\.q_proj": 5, "q_proj": 7, "proj": 9}}
    adapter.config["target_modules"] = r".*self_attn\.(q|k|o)_proj"
    adapter.add(f"{ATTENTION}.q_proj", r=2, scale=5 / 2).add(f"{ATTENTION}.o_proj", r=3, scale=6 / 3)
    return adapter.add(f"{ATTENTION}.k_proj")


def one_by_one(adapter):
    """Not all experts, and of several scales."""
    adapter.config["alpha_pattern"] = {"experts.2.gate_proj": 3}
    for p, e, scale in (("gate", 0, None), ("gate", 2, 3 / 4), ("up", 1, None), ("down", 3, None)):
        adapter.add(f"{EXPERTS}.{e}.{p}_proj", adapter.own(f"{LAYER}.0.mlp.switch_mlp.{p}_proj"), scale=scale, e=e)
    return adapter.add(f"{LAYER}.0.mlp.gate").add(f"{LAYER}.1.mlp.shared_expert.up_proj")


def fused(adapter, transposed=False):
    adapter.config["target_parameters"] = ["0.mlp.experts.gate_up_proj", "0.mlp.experts.down_proj"]
    adapter.add_fused(f"{EXPERTS}.base_layer", "gate_up_proj", transposed)
    return adapter.add_fused(EXPERTS, "down_proj", transposed)


def one_fused(adapter):
    adapter.config["target_parameters"] = ["0.mlp.experts.down_proj"]
    return adapter.add_fused(EXPERTS, "down_proj")


CASES = {
    "layers": ("qwen3_5", {}, several),
    "rslora": ("qwen3_5", {"use_rslora": True, "fan_in_fan_out": True, "bias": "all"}, several),
    "patterns": ("qwen3_5", {}, patterns),
    "text model": ("qwen3_5", {}, lambda a: a.add("model.layers.1.self_attn.v_proj").add("model.layers.0.mlp.up_proj")),
    "embedding": ("qwen3_5", {}, lambda a: a.add(EMBEDDING, kind="embedding_")),
    "saved": (
        "qwen3_5", {"modules_to_save": ["embed_tokens", "lm_head"]},
        lambda a: a.save(EMBEDDING).save("lm_head").add(f"{ATTENTION}.q_proj")),
    "experts": ("qwen3_5_moe", {}, one_by_one),
    "fused": ("qwen3_5_moe", {}, fused),
    "fused, transposed": ("qwen3_5_moe", {}, lambda a: fused(a, True)),
    "down": ("qwen3_5_moe", {}, one_fused),
    "next": (
        "qwen3_next", {}, lambda a: a.add("model.layers.0.linear_attn.in_proj_qkvz").add("model.layers.1.self_attn.q_proj")),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "config", "make", "bits"),
    [
        pytest.param(*case, bits, id=f"{name}, {bits}")
        for i, (name, case) in enumerate(CASES.items())
        for bits in ((None, 4) if LONG or "saved" in name else (None, 4)[i % 2 :][:1])
    ],
)
def test_a_model_with_an_adapter_of_peft_has_the_updated_weights(family, config, make, bits, tmp_path):
    changes = {"moe_intermediate_size": 96} if family == "qwen3_5_moe" else {}  # no matrix is square
    model, given = tiny_model(family, 3, **changes), tiny_config(family, **changes)
    if bits is not None:
        nn.quantize(model, 32, bits)
        given |= {"quantization": {"group_size": 32, "bits": bits}}
    folder = write(tmp_path / "model", given, parameters(model))
    dense = mlx_lm.utils.dequantize_model(model)
    adapter = make(Adapter(dense, **config))
    path = adapter.write(tmp_path / "adapter")
    dense.update(tree_unflatten([(name, mx.array(w.astype(np.float32))) for name, w in adapter.weights.items()]))
    want, plain = dense(TOKENS), mlx_mtp.load(str(folder))[0](TOKENS)
    assert mx.abs(want - plain).max() > 0.1
    loads = [mlx_mtp.load(str(folder), adapter_path=path)[0]]
    if family != "qwen3_next":  # mlx-lm's refuses a head among the model's tensors
        loads.append(mlx_mtp.load(str(folder), adapter_path=path, mtp=False)[0])
    if bits is not None and "modules_to_save" in config:
        return  # what is saved is quantized
    for got in loads:
        assert mx.allclose(got(TOKENS), want, rtol=0, atol=2e-3)
    mlx_mtp.convert(str(folder), str(tmp_path / "fused"), adapter_path=path, dequantize=bits is not None)
    if bits is None:
        fused = mlx_mtp.load(str(tmp_path / "fused"))[0]
        assert mx.allclose(fused(TOKENS), want, rtol=0, atol=2e-3)
        assert not differing(parameters(fused.mtp), parameters(loads[0].mtp))


def with_layer(name, a=(4, 64), b=(64, 4)):
    return lambda adapter: adapter.put(name, a, b)


def with_tensor(name, shape=(64,)):
    return lambda adapter: adapter.tensors.update({name: random(shape)})


def q_proj(change):
    """An update of q_proj whose tensors are changed."""

    def make(adapter):
        adapter.add(f"{ATTENTION}.q_proj")
        adapter.tensors = change(adapter.tensors)

    return make


def without(part):
    return q_proj(lambda tensors: {name: w for name, w in tensors.items() if part not in name})


ONLY_Q = q_proj(lambda tensors: tensors)
ZERO_B = q_proj(lambda tensors: {name: w * ("lora_B" not in name) for name, w in tensors.items()})
TWICE = q_proj(lambda tensors: tensors | {n.replace(".weight", ".default.weight"): w for n, w in tensors.items()})
NO_PATTERN, OTHER_LAYER = ".*not a regular expression", "which is not a layer of the lang"
REFUSED = {
    "no tensors": ({}, without(""), "changes nothing: it has no tensors"),
    "zero": ({}, ZERO_B, r"changes nothing: .*q_proj.lora_A.weight, .*q_proj.lora_B.weight are zero"),
    "scale zero": ({"lora_alpha": 0}, several, "changes nothing"),
    "no B": ({}, without("lora_B"), "not have two matrices for .*q_proj"),
    "a target lacks": ({"target_modules": ["q_proj", "o_proj"]}, ONLY_Q, r"no tensors for layers\.1\.self_attn\.o_proj, which"),
    "a target of a pattern lacks": (
        {"target_modules": r".*self_attn\.[qk]_proj"}, ONLY_Q, r"no tensors for layers\.1\.self_attn\.k_proj, which"),
    "a saved layer lacks": ({"modules_to_save": ["lm_head"]}, ONLY_Q, "no tensors for lm_head, which its config"),
    "twice": ({}, TWICE, r"has .*q_proj\.lora_[AB]\.weight twice"),
    "alpha pattern": ({"alpha_pattern": {"q_proj(": 3}}, several, rf"alpha_pattern 'q_proj\(' {NO_PATTERN}"),
    "pattern of targets": ({"target_modules": "(q_proj"}, several, rf"target_modules '\(q_proj' {NO_PATTERN}"),
    "DoRA": ({"use_dora": True}, several, "has use_dora, which is not supported: merge it into its model with peft"),
    "more layers": ({"layer_replication": [[0, 1], [0, 1]]}, several, "has layer_replication"),
    "another method": ({"peft_type": "IA3"}, several, "has peft_type IA3"),
    "changed base": ({"init_lora_weights": "pissa_niter_4"}, several, "has init_lora_weights pissa_niter_4"),
    "norm": ({}, with_tensor(f"{LAYER}.0.input_layernorm.weight"), "its tensor .*layernorm.weight is neither"),
    "another layer": ({}, with_layer(f"{LAYER}.9.self_attn.q_proj"), f"9.self_attn.q_proj, {OTHER_LAYER}"),
    "other sizes": ({}, with_layer(f"{LAYER}.0.mlp.up_proj", (4, 63)), r"up_proj, \[4, 63\] and \[64, 4\], do not fit"),
    "convolution": ({}, with_layer(f"{RECURRENT}.conv1d"), "conv1d, which is neither a linear layer nor an emb"),
    "rank": ({"r": 8}, with_layer(f"{LAYER}.0.mlp.up_proj"), "up_proj have rank 4, and its config says 8"),
    "whole, of other sizes": ({}, with_tensor("lm_head.weight", (33, 64)), r"lm_head.weight is \[33, 64\], not \[32, 64\]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model", "qwen3_5")


@pytest.mark.parametrize(("config", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_applied_exactly_is_refused_in_a_sentence(config, change, message, folder, tmp_path, capsys):
    change(adapter := Adapter(model_of("qwen3_5")))
    adapter.config |= config
    path = adapter.write(tmp_path / "adapter")
    flags = ("--hf-path", folder, "--mlx-path", tmp_path / "out", "--adapter-path", path)
    status, _, err = run_command(convert, capsys, *flags)
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(f"The adapter {path} .*{message}", err)
    assert not (tmp_path / "out").exists()


def test_parts_for_the_vision_encoder_and_the_head_are_left_out_with_a_line(folder, tmp_path, caplog):
    """As trainers name them by default; an adapter of these parts alone changes nothing."""
    names = "model.visual.blocks.0.attn.qkv", "visual.merger.linear_fc1", "mtp.layers.0.self_attn.q_proj"
    own, whole, others = (several(Adapter(model_of("qwen3_5"))) for _ in range(3))
    whole.tensors = dict(own.tensors)
    others.tensors.clear()
    for name in names:
        whole.put(name, (4, 64), (64, 4))
        others.put(name, (4, 64), (64, 4))
    plain, changed = (loaded(folder, adapter_path=a.write(tmp_path / n)) for a, n in ((own, "own"), (whole, "whole")))
    assert not differing(parameters(plain), parameters(changed))
    (said,) = [message for message in caplog.messages if "are left out" in message]
    assert all(f"base_model.model.{name}.lora_A.weight" in said for name in names)
    refused("changes nothing", loaded, folder, adapter_path=others.write(tmp_path / "others"))


def lora(change):
    def make(model, folder):
        make_adapter(model, folder)
        file, config = folder / "adapters.safetensors", json.loads((folder / "adapter_config.json").read_text())
        weights = dict(mx.load(str(file)))
        mx.eval(weights)
        change(weights, config)
        mx.save_safetensors(str(file), weights)
        (folder / "adapter_config.json").write_text(json.dumps(config))

    return make


OWN = {
    "no tensors": (lora(lambda w, _: w.clear()), r"lacks .*lora_a, .*lora_b, of layers that its config names"),
    "zero": (lora(lambda w, _: w.update({n: 0 * x for n, x in w.items()})), "changes nothing: .*lora_a, .*lora_b are zero"),
    "scale zero": (lora(lambda _, config: config["lora_parameters"].update(scale=0.0)), "changes nothing"),
    "a layer lacks": (lora(lambda _, config: config.update(num_layers=2)), r"lacks .*layers\.0\.mlp\.down_proj\.lora_a"),
    "no target": (
        lora(lambda w, config: (w.clear(), config["lora_parameters"].update(keys=["other"]))), "it has no tensors"),
    "all of a layer": (lora(lambda _, config: config.update(fine_tune_type="full")), "not an adapter parameter"),
    "magnitudes": (lora(lambda _, config: config.update(fine_tune_type="dora")), r"lacks .*down_proj\.m, of layers"),
    "no file": (lambda *x: (make_adapter(*x) / "adapters.safetensors").unlink(), "has no adapters.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), OWN.values(), ids=OWN)
def test_an_adapter_of_mlx_lm_is_complete_or_refused(make, message, folder, tmp_path):
    """Nothing that it lacks is drawn at random."""
    make(folder, tmp_path / "adapter")
    refused(message, loaded, folder, adapter_path=str(tmp_path / "adapter"), error=(ValueError, FileNotFoundError))


def test_models_that_take_no_adapter_of_peft(folder, tmp_path):
    """In peft, an output layer that is the embedding would stay as it was. Nor are files of PyTorch read."""
    embedding = Adapter(model_of("qwen3_5")).add(EMBEDDING, kind="embedding_").write(tmp_path / "embedding")
    query = Adapter(model_of("qwen3_5")).add(f"{ATTENTION}.q_proj").write(tmp_path / "query")
    tied = write_tiny(tmp_path / "tied", "qwen3_5", tie_word_embeddings=True)
    refused("changes the embedding, which is also the output layer", loaded, tied, adapter_path=embedding)
    packed = write_tiny(tmp_path / "pack", PACK)
    refused(r"the model is packed\. Use its base model", loaded, packed, adapter_path=query)
    (tmp_path / "query" / "adapter_model.safetensors").rename(tmp_path / "query" / "adapter_model.bin")
    lacks = r"has no adapter_model\.safetensors: save it with"
    refused(lacks, loaded, folder, adapter_path=query, error=FileNotFoundError)


def test_an_expert_that_the_model_does_not_have_is_refused(tmp_path):
    folder = write_tiny(tmp_path / "model", "qwen3_5_moe")
    adapter = Adapter(model_of("qwen3_5_moe"))
    for e in range(E + 1):
        adapter.put(f"{EXPERTS}.{e}.up_proj", (4, 64), (32, 4))
    refused("expert 4, and the model's are 0 to 3", loaded, folder, adapter_path=adapter.write(tmp_path / "adapter"))


def test_models_of_mlx_lm_take_them_as_well(tmp_path):
    folder, model = write_llama(tmp_path / "model")
    adapter = Adapter(model).add("model.layers.0.self_attn.q_proj").add("model.layers.0.mlp.down_proj")
    got = mlx_mtp.load(str(folder), adapter_path=adapter.write(tmp_path / "adapter"))[0]
    model.update(tree_unflatten([(name, mx.array(w.astype(np.float32))) for name, w in adapter.weights.items()]))
    assert mx.allclose(got(TOKENS), model(TOKENS), rtol=0, atol=1e-4)
