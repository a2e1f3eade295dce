"""Every published layout of a head is read, each axis on its own; what cannot be read ends no run that did not ask for it."""

import json
import math
import re
import shutil
from unittest.mock import Mock

import mlx.core as mx
import mlx_lm
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.checkpoint import load as loading
from mlx_mtp.checkpoint.heads import acceptance
from mlx_mtp.checkpoint.heads.acceptance import PARTS
from mlx_mtp.convert.__main__ import inspect
from mlx_mtp.convert.__main__ import main as convert
from mlx_mtp.fit.fitting import fit
from mlx_mtp.generate.__main__ import main as generate
from tests.support import profiles
from tests.support.bad_checkpoints import configured
from tests.support.checkpoints import (
    config_of,
    configure,
    converted,
    differing,
    edit,
    loaded,
    parameters,
    write,
    write_tiny,
)
from tests.support.commands import refusal, report, run_command
from tests.support.hub_stand_in import HEADER_BYTES
from tests.support.layouts import PLACES, PREFIXES, Layout, layouts, quantized, write_awq, write_fp8, write_layout
from tests.support.models import DATA, QWEN

HEAD, DELTA = "language_model.mtp.", {"without_one": PARTS}
STEP = 1 if profiles.LONG else 6
WIDER = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "vocab_size": 512}  # for groups of 64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A converted checkpoint of each family, with random weights."""
    folder = tmp_path_factory.mktemp("tiny")
    return {family: write_tiny(folder / family, family, **WIDER) for family in QWEN}


@pytest.fixture(scope="module")
def heads(tiny):
    return {family: parameters(loaded(folder).mtp) for family, folder in tiny.items()}


def head_of(source, folder, layout, **options):
    model = loaded(write_layout(source, folder, layout), **options)
    return parameters(model.mtp)


@pytest.mark.parametrize(
    ("prefix", "place"),
    [(prefix, place) for i, prefix in enumerate(["", *PREFIXES]) for place in PLACES[i % STEP :: STEP]],
)
def test_a_head_is_read_from_any_file_under_any_prefix(place, prefix, tiny, heads, tmp_path, hub, caplog):
    """Also from the hub, where no other file is downloaded, and ``--inspect`` names the file."""
    layout = Layout(place, prefix or (PREFIXES[0] if place in ("inside", "model-mtp") else ""))
    want = heads["qwen3_5"]
    folder = write_layout(tiny["qwen3_5"], tmp_path / "model", layout)
    mx.save_safetensors(str(folder / "adapters.safetensors"), {"layers.0.lora_a": mx.zeros((200, 200))})
    assert not differing(parameters(loaded(folder).mtp), want)
    hub.publish(name := f"org/{PLACES.index(place)}-{len(prefix)}", folder)
    lines = report(inspect(name))
    assert lines["--mtp"] == "ready"
    files = {*re.findall(r"[\w/-]+\.safetensors", lines["MTP head"])}
    others = [file for file in folder.rglob("*.safetensors") if not file.name.startswith(("model", "adapters"))]
    assert files == {file.relative_to(folder).as_posix() for file in others}
    assert not differing(parameters(loaded(name).mtp), want)
    assert hub.served["adapters.safetensors"] <= 2 * HEADER_BYTES
    assert caplog.records == []
    hub.reset_counts()
    assert hasattr(loaded(name, "cached"), "mtp")
    assert not [file for file in hub.served if file.endswith("safetensors") and file != "adapters.safetensors"]


@profiles.examples(20)
@given(family=st.sampled_from(QWEN), layout=layouts())
def test_any_combination_is_read(family, layout, tiny, heads, tmp_path_factory):
    """A head keeps its bits, whatever the backbone's are."""
    folder, given = tmp_path_factory.mktemp("layout"), heads[family]
    plain = Layout(prefix="language_model.mtp.", quantization=layout.quantization)
    want, got = (head_of(tiny[family], folder / name, own) for name, own in (("plain", plain), ("other", layout)))
    assert got.keys() == want.keys()
    for name, w in want.items():
        assert mx.array_equal(got[name], w) or (w.ndim == 1 and mx.allclose(got[name], w, rtol=0, atol=1e-6)), name
    if layout.quantization == "fp8":
        assert all(mx.allclose(want[name], w, rtol=0.08, atol=0.02) for name, w in given.items())
    else:
        assert not differing(want, quantized(given, layout.quantization))
    if layout.place == "config":
        assert ("raw" in report(inspect(str(folder / "other")))["MTP head"]) == bool(layout.without_one)


def test_of_two_copies_the_first_is_used(tiny, heads, tmp_path):
    """That in the file which the config names; otherwise the model's own, that of an index, and one named like a head."""
    folder = write_layout(tiny["qwen3_5"], tmp_path / "model", Layout("config", "mtp."))
    want = heads["qwen3_5"]
    other = {f"mtp.{name}": mx.zeros_like(w) for name, w in want.items()}
    for name in ("model-a.safetensors", "mtp.safetensors", "heads/draft.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        mx.save_safetensors(str(folder / name), other)
    assert not differing(parameters(loaded(folder).mtp), want)
    (folder / "model-a.safetensors").unlink()
    configured(mlx_lm_extra_tensors=None)(folder)
    shutil.move(folder / "optiq" / "mtp.safetensors", folder / "model-head.safetensors")
    assert not differing(parameters(loaded(folder).mtp), want)
    shutil.move(folder / "model-head.safetensors", folder / "a-mtp.safetensors")
    assert not differing(parameters(loaded(folder).mtp), want)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("tie", [True, False])
def test_a_head_may_repeat_the_models_embedding_and_output_layer(tie, bits, tmp_path):
    """Whatever its config says: they are left out."""
    write_tiny(folder := tmp_path / "model", "qwen3_5", tie_word_embeddings=tie)
    if bits is not None:
        folder = converted(folder, tmp_path / "quantized", quantize=True, q_bits=bits, q_group_size=32)
    want = parameters(loaded(folder).mtp)

    def repeat(weights):
        own = {name.rpartition("model.")[2]: w for name, w in weights.items() if "mtp." not in name}
        parts = ("weight", "scales", "biases") if bits else ("weight",)
        for part in parts:
            embedding = own[f"embed_tokens.{part}"]
            weights[f"mtp.embed_tokens.{part}"] = embedding
            weights[f"mtp.lm_head.{part}"] = own.get(f"lm_head.{part}", embedding)

    edit(folder, repeat)
    configure(folder, text={"mtp_use_dedicated_embeddings": True})
    assert not differing(parameters(loaded(folder).mtp), want)


def test_a_record_decides_the_layout_and_without_one_the_backbone(tiny, heads, tmp_path):
    raw, shifted = ({"mlx_mtp": {"norms_shifted": is_shifted}} for is_shifted in (False, True))
    # They would be taken for the other layout.
    for family, how in (("qwen3_5", dict(told=raw, **DELTA)), ("qwen3_5_moe", dict(told=shifted, experts="each"))):
        got = head_of(tiny[family], tmp_path / family, Layout("config", **how))
        assert all(mx.allclose(got[name], w, rtol=0, atol=1e-6) for name, w in heads[family].items())
    got = head_of(DATA / "dense", tmp_path / "raw", Layout("config", "mtp."))
    assert not differing(got, parameters(loaded(DATA / "dense").mtp))


# Model types


@pytest.mark.parametrize("model_type", ["qwen3_8", "qwen3_8_moe", "qwen3_8_text", "qwen3_5_text", "qwen3_8_moe_text"])
def test_model_types_of_qwen38_are_those_of_qwen35(model_type, tiny, heads, tmp_path, hub):
    """With the head, without it, and with a drafter; a conversion has the type that mlx-lm knows."""
    family = "qwen3_5_moe" if "moe" in model_type else "qwen3_5"
    folder = shutil.copytree(tiny[family], tmp_path / "model")
    text = config_of(folder)["text_config"] | {"model_type": model_type.removesuffix("_text") + "_text"}
    config = text if model_type.endswith("_text") else {"text_config": text}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    want = parameters(loaded(tiny[family]))
    assert not differing(parameters(loaded(folder)), want)
    plain = loaded(folder, mtp=False)
    assert type(plain).__module__ == f"mlx_lm.models.{family}"
    assert report(inspect(str(folder)))["--mtp"] == "ready"
    head = {name.removeprefix("language_model.mtp."): w for name, w in want.items() if "mtp." in name}
    drafter = write(tmp_path / "drafter", {"model_type": "qwen3_8_mtp", "text_config": text}, head)
    assert not differing(parameters(loaded(folder, str(drafter)).mtp), heads[family])
    if not model_type.endswith("_text"):
        out = converted(folder, tmp_path / "out")
        assert config_of(out)["model_type"] == family
        assert type(mlx_lm.load(str(out))[0]).__module__ == f"mlx_lm.models.{family}"


# A head that cannot be used


# As many scales as for other groups
WRONG_BITS = dict(zip(("fc.weight", "fc.scales", "fc.biases"), mx.quantize(mx.zeros((64, 96)), 32, 4)))


def added(tensors):
    return lambda folder: edit(folder, lambda w: w.update({HEAD + name: x for name, x in tensors.items()}))


def moved(name, content):
    """The head is in a file of this content alone."""

    def spoil(folder):
        (folder / name).write_bytes(content)
        edit(folder, lambda w: [w.pop(name) for name in [*w] if "mtp." in name])

    return spoil


def named(file):
    return configured(mlx_lm_extra_tensors={"mtp_file": file})


INDEX_OF_A_HEAD = b'{"weight_map": {"mtp.pre_fc_norm_hidden.weight": "mtp-1.safetensors"}}'
UNUSABLE = {
    "unknown tensor": (added({"layers.0.bias": mx.zeros(3)}), "does not fit this model: .*layers.0.bias"),
    "wrong bits": (added(WRONG_BITS), "does not fit this model: .*fc"),
    "missing file": (named("gone/mtp.safetensors"), "lacks gone/mtp.safetensors, which its config names"),
    "missing in index": (
        moved("mtp.safetensors.index.json", INDEX_OF_A_HEAD),
        "lacks mtp-1.safetensors, which its mtp.safetensors.index.json names",
    ),
    "damaged": (moved("mtp.safetensors", b"\x08" + bytes(30)), "mtp.safetensors of .* is truncated or damaged"),
    "outside": (named("/tmp/mtp.safetensors"), "names the file '/tmp/mtp.safetensors', which is not in its folder"),
}


@pytest.mark.parametrize(("spoil", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_head_that_cannot_be_used_ends_no_run_that_did_not_ask_for_it(spoil, message, tiny, tmp_path, capsys, caplog):
    spoil(folder := shutil.copytree(tiny["qwen3_5"], tmp_path / "model"))
    prompt = ["--model", folder, "--prompt", "a", "--ignore-chat-template", "--max-tokens", 3]
    assert run_command(generate, capsys, *prompt, "--no-mtp")[0] == 0
    assert caplog.records == []
    for flags in ([], ["--copy-drafts", "auto"]):
        caplog.clear()
        assert run_command(generate, capsys, *prompt, *flags)[0] == 0
        [record] = caplog.records
        assert re.search(f"generates without drafts: .*{message}", record.message)
    status, _, err = run_command(generate, capsys, *prompt, "--mtp")
    assert status == 2
    assert re.search(message, err)
    assert re.search(message, report(inspect(str(folder)))["--mtp"])


# Measured acceptance


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return converted(DATA / "dense", tmp_path_factory.mktemp("trained") / "dense")


@pytest.fixture
def measures(monkeypatch, tmp_path):
    """Every load measures, as where the test of the device ran; nothing was measured before. The models that were measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "ensure_tested", lambda *_: "ran")
    monkeypatch.setattr(acceptance, "MAX_SECONDS", math.inf)
    monkeypatch.setattr(acceptance, "N_TOKENS", 64)
    measured, original = [], acceptance.measure_readings
    monkeypatch.setattr(acceptance, "measure_readings", lambda *args: measured.append(args[0]) or original(*args))
    return measured


READINGS = [
    Layout("inside", "mtp.", **DELTA),
    Layout("model-mtp", "model.language_model.mtp.", **DELTA),
    Layout("mtp.safetensors", "", quantization=(4, 64, "affine"), **DELTA),
    Layout("config", "mtp.", told={"mtp_norm_encoding": "absolute"}, **DELTA),  # which is wrong
    Layout("config", "mtp.", told={"mtp_norm_encoding": "delta"}),
    Layout("inside", "mtp.", without_one=("layers.",)),
    Layout("inside", "mtp.", without_one=("norm.", "pre_fc_norm_")),
]


@pytest.mark.parametrize("layout", READINGS if profiles.LONG else READINGS[::4], ids=str)
def test_the_norms_are_read_so_that_drafts_are_accepted(layout, trained, measures, tmp_path, caplog):
    """One line tells it at the first use, with the command that writes a head without doubt."""
    want = loaded(trained, lazy=True)
    folder = write_layout(trained, tmp_path / "model", layout)
    models = [loaded(folder) for _ in range(2)] + [loaded(folder, lazy=True)]
    assert len(measures) == 1
    [record] = caplog.records
    command = f"`mlx_mtp convert --graft-mtp-from {folder} --model {folder} --mlx-path NEW`"
    assert command in record.message
    for model in models:
        norms = {n: w for n, w in parameters(model.mtp).items() if w.ndim == 1 and n != "norm.weight"}
        assert all(mx.allclose(w, parameters(want.mtp)[n], rtol=0.01, atol=0.01) for n, w in norms.items())
    assert models[0].head_acceptance_rate > 0.4
    if layout is not READINGS[0] and not profiles.LONG:
        return
    converted(folder, tmp_path / "repaired", graft_mtp_from=str(folder))
    caplog.clear()
    assert loaded(tmp_path / "repaired").head_acceptance_rate == models[0].head_acceptance_rate
    assert caplog.records == []
    lines = report(inspect(str(tmp_path / "repaired")))
    assert re.fullmatch(r"ready, \d\d% of drafts accepted on built-in text", lines["--mtp"])
    assert (tmp_path / "repaired" / "model.safetensors").samefile(folder / "model.safetensors")


def test_a_head_whose_drafts_are_rejected_is_told(trained, measures, tmp_path, caplog):
    folder = shutil.copytree(trained, tmp_path / "model")
    edit(folder, lambda w: w.update({n: mx.flip(x, 0) for n, x in w.items() if n.endswith("mtp.fc.weight")}))
    rates = {loaded(folder).head_acceptance_rate for _ in range(2)}
    assert len(measures) == len(rates) == 1
    assert max(rates) < 0.1
    assert len(caplog.records) == 2
    assert f"accepts {max(rates):.0%} of the drafts from its MTP head" in caplog.records[0].message


def test_a_model_that_cannot_be_run_is_loaded(trained, measures, monkeypatch, caplog):
    """Such as a mixture of experts in bfloat16 on MLX's CPU backend."""

    error = RuntimeError("[GatherMM] Only real float32 is supported\non the CPU")
    monkeypatch.setattr(acceptance, "measure_readings", Mock(side_effect=error))
    assert loaded(trained).head_acceptance_rate is None
    [record] = caplog.records
    assert record.message.endswith("could not be tested: [GatherMM] Only real float32 is supported")


# Quantizations by other programs


NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
NF4 = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}
UE8M0 = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
AWQ, OF_GPTQ = {"qweight": (192, 64), "scales": (6, 512)}, {"g_idx": (192,)}
CONTAINERS = {  # the method, and tensors of a layer with their shapes
    "compressed-tensors (nvfp4-pack-quantized)": (NVFP4, {"up_proj.weight_packed": (3,)}),
    "bitsandbytes (nf4)": (NF4, {"up_proj.weight.absmax": (3,)}),
    "modelopt (NVFP4)": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"up_proj.weight_scale_2": (3,)}),
    "gptq": ({"quant_method": "gptq", "bits": 4}, {"up_proj.qweight": (24, 512), "up_proj.scales": (6, 512)}),
    "gptq (gptq)": (
        {"quant_method": "gptq", "format": "gptq"}, {f"up_proj.{name}": x for name, x in (AWQ | OF_GPTQ).items()}),
    "awq": ({"quant_method": "awq"}, {f"experts.0.up_proj.{name}": x for name, x in AWQ.items()}),
    "FP8": (UE8M0, {"up_proj.weight_scale_inv": (3,)}),
}  # fmt: skip


def test_another_quantization_is_refused_before_the_weights_are_downloaded(hub, tmp_path, capsys):
    """Told by the config, or by that of the text model. The base model's name is the card's or, without one, the model's."""
    for i, (name, (how, added)) in enumerate(CONTAINERS.items()):
        folder = shutil.copytree(DATA / "dense", tmp_path / f"model-{i}")
        others = {f"model.language_model.layers.0.mlp.{n}": mx.zeros(shape) for n, shape in added.items()}
        edit(folder, lambda w, others=others: w.update(others))
        told = {"quantization_config": how}
        configured(**told if i % 2 else {"text": told})(folder)
        if i == 0:
            (folder / "README.md").write_text("---\nbase_model:\n- org/base\n---\n")
        hub.publish(model := f"org/tiny-{i}-AWQ-int4", folder)
        base = f"org/tiny-{i}" if i else "org/base"
        message = (
            f"{model} is in {name}, which mlx-lm does not load: use {base}, which has 16 bits, or a conversion of it."
        )
        for mtp in (True, False, "auto", "cached"):
            with pytest.raises(ValueError, match=re.escape(message)):
                loaded(model, mtp)
        assert message in refusal(convert, capsys, "--hf-path", model, "--mlx-path", tmp_path / "out")
        assert report(inspect(model))["--mtp"].startswith(message)
        with pytest.raises(ValueError, match=re.escape(message)):
            fit(model, str(tmp_path / "out"), drafts=1)
    assert hub.served["model.safetensors"] <= 9 * len(CONTAINERS) * HEADER_BYTES


def test_a_model_in_awq_is_loaded_as_by_mlx_lm(trained, tmp_path):
    """Its head stays as it is, also a quantized one. Converted, it is the same model."""
    folder = write_awq(DATA / "dense", tmp_path / "model")
    model, want = loaded(folder), parameters(loaded(trained).mtp)
    assert not differing(parameters(model.mtp), {n: w.astype(mx.float16) for n, w in want.items()})
    by_mlx_lm = parameters(mlx_lm.load(str(folder))[0])
    backbone = {name: w for name, w in parameters(model).items() if ".mtp." not in name}
    assert not differing(backbone, by_mlx_lm)
    assert any(name.endswith(".scales") for name in backbone)
    assert not differing(parameters(loaded(converted(folder, tmp_path / "out"))), parameters(model))
    assert not differing(parameters(mlx_lm.load(str(tmp_path / "out"))[0]), by_mlx_lm)
    text = config_of(folder)["text_config"]
    want = quantized({name: w.astype(mx.float16) for name, w in want.items()}, (4, 64, "affine"))
    drafter = write(tmp_path / "drafter", {"model_type": "qwen3_5_mtp", "text_config": text}, want)
    model = loaded(folder, str(drafter))
    assert not differing(parameters(model.mtp), want)
    assert not differing({name: w for name, w in parameters(model).items() if ".mtp." not in name}, by_mlx_lm)


def test_a_head_in_fp8_is_grafted_and_fetched(hub, trained, measures, tmp_path):
    hub.publish("org/tiny-FP8", write_fp8(DATA / "dense", tmp_path / "fp8", "org/tiny"))
    bare = converted(trained, tmp_path / "bare", mtp=False)
    graft = converted(bare, tmp_path / "graft", graft_mtp_from="org/tiny-FP8", skip_check=True)
    (bare / "README.md").write_text("---\nbase_model: org/tiny-FP8\n---\n")
    plain, models = loaded(trained), (loaded(graft), loaded(bare, "auto"))
    assert not differing(*(parameters(model.mtp) for model in models))
    for model in models:
        assert model.head_acceptance_rate > plain.head_acceptance_rate - 0.05
        assert {w.dtype for w in parameters(model.mtp).values()} == {mx.bfloat16}
