"""Loading: every layout gives the same model, and an error says what is wrong and what fixes it."""

import json
import re

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import load_model

import mlx_mtp
from mlx_mtp.layers.mtp import EXPERT_PROJECTIONS, is_raw
from tests.support.checkpoints import BAD, BAD_IDS, configure, copied, edit, no_head, write
from tests.support.models import DATA, FAMILIES, tiny_config, tiny_model

NORMS = ("norm.weight", "layernorm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")


# Layouts


def unstacked(name, w):
    """A stacked projection of the head's or backbone's experts, one tensor an expert."""
    prefix, _, rest = name.partition("switch_mlp.")
    return {f"{prefix}experts.{e}.{rest}": w[e] for e in range(w.shape[0])}


def published(model, family, raw, fused, prefix):
    """A model's parameters under the names and in the layout of a published checkpoint."""
    weights = {}
    for name, w in tree_flatten(model.parameters()):
        is_head = "mtp." in name
        if raw and is_shifted(name, w):
            w = w - 1
        if raw and "conv1d" in name:
            w = w.moveaxis(1, 2)
        name = name.removeprefix("language_model.")
        stays = (is_head and raw) or family == "qwen3_next" or (name.startswith("lm_head") and raw)
        new = name if stays else prefix + name.removeprefix("model." if prefix.startswith("model.") else "")
        weights[new] = w
    if raw and family != "qwen3_5":
        weights = with_experts(weights, family, fused)
    if raw and family != "qwen3_next":
        weights["model.visual.blocks.0.attn.proj.weight"] = mx.zeros((2, 2))
    return weights


def is_shifted(name, w):
    return w.ndim == 1 and name.endswith(NORMS) and "linear_attn.norm" not in name


def with_experts(weights, family, fused):
    out = dict(weights)
    for name, w in weights.items():
        if "switch_mlp." not in name:
            continue
        del out[name]
        base, _, rest = name.partition("switch_mlp.")
        if family == "qwen3_next" or ("mtp." in name and not fused):
            out.update(unstacked(name, w))
        elif rest == "gate_proj.weight":
            out[f"{base}experts.gate_up_proj"] = mx.concatenate(
                [w, weights[f"{base}switch_mlp.up_proj.weight"]], axis=1
            )
        elif rest == "down_proj.weight":
            out[f"{base}experts.down_proj"] = w
    return out


@pytest.mark.parametrize(
    ("family", "fused"), [*((family, False) for family in FAMILIES[:3]), ("qwen3_5_moe", True)], ids=str
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("raw", "prefix"),
    [(True, "model.language_model."), (True, ""), (False, "language_model."), (False, "")],
    ids=["raw", "raw without prefix", "converted", "converted without prefix"],
)
def test_every_layout_gives_the_same_parameters(family, tied, fused, raw, prefix, tmp_path):
    model = tiny_model(family, 3, tie_word_embeddings=tied)
    config = tiny_config(family, tie_word_embeddings=tied)
    if family == "qwen3_next":
        config.pop("mtp_num_hidden_layers")  # the tensors tell
    weights = published(model, family, raw, fused, prefix)
    assert is_raw(weights) == raw
    loaded, _ = mlx_mtp.load(str(write(tmp_path / "model", config, weights)))
    want, got = dict(tree_flatten(model.parameters())), dict(tree_flatten(loaded.parameters()))
    assert got.keys() == want.keys()
    for name, w in want.items():
        assert np.allclose(got[name], w, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.", "language_model.model.", "model.language_model."])
def test_finds_the_head_under_every_prefix(prefix, tmp_path):
    model = tiny_model("qwen3_5")
    backbone = {n: w for n, w in tree_flatten(model.parameters()) if "mtp." not in n}
    head = dict(tree_flatten(model.mtp.parameters()))
    weights = backbone | {f"{prefix}mtp.{name}": w for name, w in head.items()}
    loaded, _ = mlx_mtp.load(str(write(tmp_path / "model", tiny_config("qwen3_5"), weights)))
    got = dict(tree_flatten(loaded.mtp.parameters()))
    assert got.keys() == head.keys()
    assert all(mx.array_equal(got[name], w) for name, w in head.items())


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_loads_unstacked_experts_of_a_converted_head(family, tmp_path):
    model = tiny_model(family)
    weights = {}
    for name, w in tree_flatten(model.parameters()):
        weights.update(unstacked(name, w) if "mtp." in name and "switch_mlp." in name else {name: w})
    assert not is_raw(weights)
    loaded, _ = mlx_mtp.load(str(write(tmp_path / "model", tiny_config(family), weights)))
    got = dict(tree_flatten(loaded.parameters()))
    assert all(mx.array_equal(got[name], w) for name, w in tree_flatten(model.parameters()))


def test_norm_values_do_not_decide_the_layout(tmp_path):
    """Correct values can be far from 1 in a converted checkpoint and far from 0 in a raw one."""
    model = tiny_model("qwen3_5")
    for value in (-0.4, 0.27, 0.49, 1.0, 3.0):
        for raw in (True, False):
            weights = published(model, "qwen3_5", raw, False, "model.language_model." if raw else "language_model.")
            name = "mtp.pre_fc_norm_hidden.weight" if raw else "language_model.mtp.pre_fc_norm_hidden.weight"
            weights[name] = mx.full(weights[name].shape, value)
            loaded, _ = mlx_mtp.load(str(write(tmp_path / "model", tiny_config("qwen3_5"), weights)))
            assert loaded.mtp.pre_fc_norm_hidden.weight[0].item() == pytest.approx(value + raw)


def test_names_missing_experts(tmp_path):
    model = tiny_model("qwen3_5_moe")
    weights = published(model, "qwen3_5_moe", True, False, "model.language_model.")
    del weights["mtp.layers.0.mlp.experts.2.up_proj.weight"]
    folder = write(tmp_path / "model", tiny_config("qwen3_5_moe"), weights)
    with pytest.raises(ValueError, match=r"lacks mtp\.layers\.0\.mlp\.experts\.2\.up_proj\.weight\.$"):
        mlx_mtp.load(str(folder))
    for projection in EXPERT_PROJECTIONS:
        for e in range(4):
            weights.pop(f"mtp.layers.0.mlp.experts.{e}.{projection}.weight", None)
    with pytest.raises(ValueError, match=r"lacks mtp\.layers\.0\.mlp\.switch_mlp"):
        mlx_mtp.load(str(write(tmp_path / "model", tiny_config("qwen3_5_moe"), weights)))


EXPERTS = "mtp.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("fused", "name", "bad", "good"),
    [
        (False, "2.up_proj.weight", [32, 63], [32, 64]),
        (True, "gate_up_proj", [4, 63, 64], [4, 64, 64]),
        (True, "gate_up_proj", [4], [4, 64, 64]),
    ],
    ids=["one expert", "odd", "flat"],
)
def test_names_experts_of_wrong_shape(fused, name, bad, good, tmp_path):
    weights = published(tiny_model("qwen3_5_moe"), "qwen3_5_moe", True, fused, "model.language_model.")
    assert list(weights[f"{EXPERTS}.{name}"].shape) == good
    weights[f"{EXPERTS}.{name}"] = mx.zeros(bad)
    message = re.escape(f"{EXPERTS}.{name} is {bad}, not {good}")
    with pytest.raises(ValueError, match=message):
        mlx_mtp.load(str(write(tmp_path / "model", tiny_config("qwen3_5_moe"), weights)))


# Errors


@pytest.mark.parametrize(("spoil", "error", "message", "loads_without"), BAD, ids=BAD_IDS)
def test_rejects_bad_checkpoints(spoil, error, message, loads_without, tmp_path):
    folder = copied(tmp_path)
    spoil(folder)
    with pytest.raises(error, match=message) as e:
        mlx_mtp.load(str(folder))
    assert "\n" not in str(e.value)
    if loads_without:
        model, _ = mlx_mtp.load(str(folder), mtp=False)
        assert type(model).__module__ == "mlx_lm.models.qwen3_5"
    else:
        with pytest.raises(Exception):  # noqa: B017, PT011 (mlx-lm's, whatever it is)
            mlx_lm.load(str(folder))
        with pytest.raises(error):
            mlx_mtp.load(str(folder), mtp=False)


@pytest.mark.parametrize("head_file", [False, True])
def test_rejects_a_folder_named_like_a_file(head_file, tmp_path):
    _, folder, _, _ = converted(tmp_path, "qwen3_5")
    name = "mtp.safetensors" if head_file else "model-2.safetensors"
    (folder / name).mkdir()
    configure(folder, mlx_lm_extra_tensors={"mtp_file": "mtp.safetensors"})
    for mtp in {True, head_file}:
        with pytest.raises(ValueError, match=f"{name} is not a safetensors file but a folder: remove or rename it"):
            mlx_mtp.load(str(folder), mtp=mtp)


@pytest.mark.parametrize("text", [None, "{}", "{"])
def test_rejects_a_bad_tokenizer(text, tmp_path):
    folder = copied(tmp_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    if text is not None:
        (folder / "tokenizer.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"The tokenizer of .*model is missing or damaged .*: download its files again"
    ):
        mlx_mtp.load(str(folder))


def test_loads_any_model_without_a_head(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 32,
        "num_attention_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    }  # fmt: skip
    model = llama.Model(llama.ModelArgs.from_dict(config))
    folder = str(write(tmp_path / "model", config, dict(tree_flatten(model.parameters()))))
    with pytest.raises(ValueError, match="Model type llama is not supported"):
        mlx_mtp.load(folder)
    assert type(mlx_mtp.load(folder, mtp=False)[0]) is llama.Model


def test_returns_what_mlx_lm_returns():
    ours = mlx_mtp.load(str(DATA / "dense"), return_config=True)
    theirs = mlx_lm.load(str(DATA / "dense"), return_config=True)
    assert [type(x) for x in ours[1:]] == [type(x) for x in theirs[1:]]
    assert ours[2].items() >= theirs[2].items()


def test_stock_load_model_needs_the_claimed_head(tmp_path):
    folder = copied(tmp_path)
    no_head(folder)
    from mlx_mtp.models import qwen3_5

    with pytest.raises(ValueError, match="The MTP head lacks"):
        load_model(folder, get_model_classes=lambda config: (qwen3_5.Model, qwen3_5.ModelArgs))


# Formats that others publish


def split_off(folder, model, tensors, **config):
    """A drafter: a folder with a head alone, as mlx-vlm writes it."""
    weights = {name.removeprefix("language_model.").removeprefix("mtp."): w for name, w in tensors.items()}
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    source = json.loads((model / "config.json").read_text())
    text = source.get("text_config", source)
    drafter = {"model_type": "qwen3_5_mtp", "text_config": text, "block_size": 3, "tie_word_embeddings": True, **config}
    (folder / "config.json").write_text(json.dumps(drafter))
    return folder


def converted(tmp_path, family, **changes):
    """A converted checkpoint without its head, and the tensors: (model, folder, backbone, head)."""
    model = tiny_model(family, 3, **changes)
    weights = dict(tree_flatten(model.parameters()))
    head = {name: w for name, w in weights.items() if "mtp." in name}
    backbone = {name: w for name, w in weights.items() if "mtp." not in name}
    return model, write(tmp_path / "model", tiny_config(family, **changes), backbone), backbone, head


def quantized(tensors, bits=4):
    """Quantize as mlx-vlm does: matrices in groups of 32, except the router."""
    out = {}
    for name, w in tensors.items():
        if w.ndim < 2 or "gate.weight" in name:
            out[name] = w
        else:
            parts = ("weight", "scales", "biases")
            for part, q in zip(parts, mx.quantize(w, group_size=32, bits=bits)):
                out[name.removesuffix("weight") + part] = q
    return out


def same_head(loaded, model):
    got, want = dict(tree_flatten(loaded.mtp.parameters())), dict(tree_flatten(model.mtp.parameters()))
    assert got.keys() == want.keys()
    atol = 1e-6 if loaded.mtp.fc.weight.dtype == mx.float32 else 2e-3  # a pack's is in float16
    return all(mx.allclose(got[name], w, rtol=0, atol=atol) for name, w in want.items())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("raw", [False, True], ids=["converted", "raw"])
def test_loads_a_drafter(family, raw, tmp_path):
    model, folder, _, head = converted(tmp_path, family)
    drafter = split_off(tmp_path / "drafter", folder, head)
    if raw:  # names tell, as in mlx-vlm
        edit(
            drafter, lambda w: [w.update({f"mtp.{n}": w[n] - 1 if w[n].ndim == 1 else w[n]}) or w.pop(n) for n in [*w]]
        )
    assert same_head(mlx_mtp.load(str(folder), mtp=str(drafter))[0], model)


def test_drafter_beside_a_raw_model_is_not_shifted(tmp_path):
    model, folder, _, head = converted(tmp_path, "qwen3_5")
    drafter = split_off(tmp_path / "drafter", folder, head)
    write(folder, tiny_config("qwen3_5"), published(model, "qwen3_5", True, False, "model.language_model."))
    assert same_head(mlx_mtp.load(str(folder), mtp=str(drafter))[0], model)


@pytest.mark.parametrize("family", FAMILIES[:3])
@pytest.mark.parametrize("where", ["inside", "file", "drafter"])
def test_warns_of_few_bits_with_the_fix(family, where, tmp_path, caplog):
    model, folder, backbone, head = converted(tmp_path, family)
    small = quantized(head)
    mtp, config = True, tiny_config(family)
    if where == "drafter":
        mtp = str(split_off(tmp_path / "drafter", folder, small, quantization={"group_size": 32, "bits": 4}))
    elif where == "inside":
        write(folder, {**config, "quantization": {"group_size": 64, "bits": 8}}, backbone | small)
    else:
        mx.save_safetensors(str(folder / "mtp.safetensors"), small)
        configure(folder, mlx_lm_extra_tensors={"mtp_file": "mtp.safetensors", "mtp_tensor_count": len(small)})
    loaded, _ = mlx_mtp.load(str(folder), mtp=mtp)
    assert {m.bits for _, m in loaded.mtp.named_modules() if hasattr(m, "bits")} == {4}
    assert mx.array_equal(loaded.mtp.fc.scales, mx.quantize(model.mtp.fc.weight, group_size=32, bits=4)[1])
    assert not any(hasattr(m, "bits") for _, m in loaded.model.named_modules())
    [record] = caplog.records
    assert f"--graft-mtp-from ORIGINAL --model {folder}" in record.message


@pytest.mark.parametrize("name", ["mtp.safetensors", "mtp/weights.safetensors"])
@pytest.mark.parametrize("family", FAMILIES[:3])
def test_loads_a_separate_head_file(family, name, tmp_path, hub, caplog):
    model, folder, _, head = converted(tmp_path, family)
    (folder / name).parent.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / name), head)
    configure(folder, mlx_lm_extra_tensors={"mtp_file": name})
    assert same_head(mlx_mtp.load(str(folder))[0], model)
    assert caplog.records == []
    repository = f"org/{family}-{len(name)}"
    hub.publish(repository, folder)
    assert same_head(mlx_mtp.load(repository)[0], model)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_loads_experts_named_like_a_dense_layer(family, bits, tmp_path):
    """``mlp.up_proj.weight`` [E, I, H]."""
    model, folder, _, head = converted(tmp_path, family)
    head = {name.replace("mlp.switch_mlp.", "mlp."): w for name, w in head.items()}
    mx.save_safetensors(str(folder / "mtp.safetensors"), head if bits is None else quantized(head, bits))
    configure(folder, mlx_lm_extra_tensors={"mtp_file": "mtp.safetensors"})
    loaded, _ = mlx_mtp.load(str(folder))
    if bits is None:
        assert same_head(loaded, model)
    assert getattr(loaded.mtp.layers[0].mlp.switch_mlp.up_proj, "bits", None) == bits


def test_head_file_beside_raw_weights_is_raw(tmp_path):
    folder = copied(tmp_path)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(weights)
    want, _ = mlx_mtp.load(str(folder))
    mx.save_safetensors(str(folder / "mtp.safetensors"), {n: w for n, w in weights.items() if n.startswith("mtp.")})
    no_head(folder)
    configure(folder, mlx_lm_extra_tensors={"mtp_file": "mtp.safetensors"})
    assert same_head(mlx_mtp.load(str(folder))[0], want)


@pytest.mark.parametrize("shifted", [True, False])
def test_config_record_decides_the_layout(shifted, tmp_path):
    model, folder, _, head = converted(tmp_path, "qwen3_5")
    weights = {name: w if w.ndim > 1 or shifted else w - 1 for name, w in head.items()}
    mx.save_safetensors(str(folder / "mtp.safetensors"), weights, metadata={"format": "pt"})
    configure(folder, mlx_lm_extra_tensors={"mtp_file": "mtp.safetensors"}, mlx_mtp={"norms_shifted": shifted})
    assert same_head(mlx_mtp.load(str(folder))[0], model)


@pytest.mark.parametrize("sign", ["PyTorch", "experts"])
def test_rejects_a_head_file_of_unknown_layout(sign, tmp_path):
    _, folder, _, head = converted(tmp_path, "qwen3_5_moe")
    if sign == "experts":
        head = {
            n: w for name, t in head.items() for n, w in (unstacked(name, t) if "switch" in name else {name: t}).items()
        }
    mx.save_safetensors(str(folder / "mtp.safetensors"), head, metadata={"format": "pt"} if sign == "PyTorch" else {})
    configure(folder, mlx_lm_extra_tensors={"mtp_file": "mtp.safetensors"})
    with pytest.raises(ValueError, match=r"whether its norms are shifted is unknown\. Graft"):
        mlx_mtp.load(str(folder))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("../mtp.safetensors", "not in its folder"),
        ("/tmp/mtp.safetensors", "not in its folder"),
        (5, "not in its folder"),
        ("gone.safetensors", "lacks gone.safetensors, which its config names"),
    ],
)
def test_rejects_a_bad_head_file_name(extra, message, tmp_path):
    _, folder, _, _ = converted(tmp_path, "qwen3_5")
    configure(folder, mlx_lm_extra_tensors={"mtp_file": extra})
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        mlx_mtp.load(str(folder))


def test_rejects_a_drafter_that_does_not_fit(tmp_path):
    _, folder, _, head = converted(tmp_path, "qwen3_5")
    drafter = split_off(tmp_path / "drafter", folder, head)
    configure(drafter, text_config={"hidden_size": 128})
    with pytest.raises(ValueError, match=r"does not fit .*: hidden_size is 128, not 64"):
        mlx_mtp.load(str(folder), mtp=str(drafter))
    configure(drafter, model_type="llama")
    with pytest.raises(
        ValueError, match=r"is not a drafter: its model type is llama, not qwen3_5_mtp\. .*--graft-mtp-from"
    ):
        mlx_mtp.load(str(folder), mtp=str(drafter))
