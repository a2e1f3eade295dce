"""Loading: every layout gives the same model, and an error says what is wrong and what fixes it."""

import itertools
import json
import re

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models import llama

import mlx_mtp
from mlx_mtp.checkpoint.resolve import check_family
from mlx_mtp.convert.__main__ import inspect
from mlx_mtp.convert.__main__ import main as convert
from mlx_mtp.core.caches.prompt_cache import n_tokens
from mlx_mtp.core.models import family_of
from mlx_mtp.core.models.family import shapes_of
from mlx_mtp.core.models.head_weights import EXPERT_PROJECTIONS
from tests.support import profiles
from tests.support.bad_checkpoints import BAD
from tests.support.checkpoints import (
    INDEX,
    copied,
    differing,
    loaded,
    parameters,
    split_head,
    tables,
    write,
    write_llama,
)
from tests.support.commands import refused, report, run_command
from tests.support.layouts import with_experts
from tests.support.models import DATA, FLASH, KV_FAMILIES, PACK, QWEN, TRAINED, model_of, tiny_config, tiny_model

NORMS = ("norm.weight", "layernorm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
RAW = "model.language_model."


def as_trained(name, weight, family):
    """A parameter in the layout of a checkpoint as published: norms around 0, but for ``FLASH``, and PyTorch's convolutions."""
    if "conv1d" in name:
        return weight.moveaxis(1, 2)
    is_shifted = weight.ndim == 1 and name.endswith(NORMS) and "linear_attn.norm" not in name and family != FLASH
    return weight - 1 if is_shifted else weight


def published(model, family, raw=True, fused=False, prefix=RAW):
    """A model's parameters under the names and in the layout of a published checkpoint; qwen3_next's have no prefix."""
    weights = {name.removeprefix("language_model."): w for name, w in parameters(model).items()}
    is_next = family == "qwen3_next"
    if not raw:
        return {name if is_next else prefix + name: w for name, w in weights.items()}
    backbone, head = split_head({name: as_trained(name, w, family) for name, w in weights.items()})
    backbone = with_experts(backbone, "each" if is_next else "fused")
    if not is_next:
        backbone = {re.sub(r"^model\.", prefix or "model.", name): w for name, w in backbone.items()}
        backbone["model.visual.blocks.0.attn.proj.weight"] = mx.zeros((2, 2))
    head = with_experts(head, "fused" if fused else "each")
    return backbone | {f"mtp.{name}": w for name, w in head.items()}


FORMS = [*((f, False) for f in QWEN), ("qwen3_5_moe", True), (FLASH, True)]  # fused or not
NAMES = [(True, RAW), (True, ""), (False, "language_model."), (False, "")]  # raw or not, and the prefix
LAYOUTS = [
    (*form, *names, tied)
    for i, (form, names) in enumerate(itertools.product(FORMS, NAMES))
    for tied in ((False, True) if profiles.LONG else (i % 3 == 0,))
]


@pytest.mark.parametrize(("family", "fused", "raw", "prefix", "tied"), LAYOUTS, ids=str)
def test_every_layout_gives_the_same_parameters(family, tied, fused, raw, prefix, tmp_path):
    model = model_of(family, 3, tie_word_embeddings=tied)
    config = tiny_config(family, tie_word_embeddings=tied)
    if family == "qwen3_next":
        config.pop("mtp_num_hidden_layers")  # the tensors tell
    weights = published(model, family, raw, fused, prefix)
    weights |= tables(model, RAW, "shard_") if raw else tables(model)
    assert family_of(family).is_raw(shapes_of(weights)) == raw
    want, got = parameters(model), parameters(loaded(write(tmp_path / "model", config, weights)))
    assert got.keys() == want.keys()
    assert [name for name, w in want.items() if not np.allclose(got[name], w, rtol=0, atol=1e-6)] == []


def test_norm_values_do_not_decide_the_layout(tmp_path):
    """Correct values can be far from 1 in a converted checkpoint and far from 0 in a raw one."""
    model, config = tiny_model("qwen3_5"), tiny_config("qwen3_5")
    for raw, prefix in ((True, ""), (False, "language_model.")):
        weights, name = published(model, "qwen3_5", raw, False, prefix), f"{prefix}mtp.pre_fc_norm_hidden.weight"
        for value in (-0.4, 0.27, 0.49, 1.0, 3.0):
            weights[name] = mx.full(weights[name].shape, value)
            got = loaded(write(tmp_path / "model", config, weights)).mtp.pre_fc_norm_hidden.weight[0].item()
            assert got == pytest.approx(value + raw)


EXPERTS = "mtp.layers.0.mlp.experts"
EVERY = [f"{EXPERTS}.{e}.{projection}.weight" for e in range(4) for projection in EXPERT_PROJECTIONS]


def test_names_bad_experts(tmp_path):
    for fused, names, shape, message in (
        (False, [f"{EXPERTS}.2.up_proj.weight"], [32, 63], f"{EXPERTS}.2.up_proj.weight is [32, 63], not [32, 64]"),
        (True, [f"{EXPERTS}.gate_up_proj"], [4, 63, 64], f"{EXPERTS}.gate_up_proj is [4, 63, 64], not [4, 64, 64]"),
        (True, [f"{EXPERTS}.gate_up_proj"], [4], f"{EXPERTS}.gate_up_proj is [4], not [4, 64, 64]"),
        (False, [f"{EXPERTS}.2.up_proj.weight"], None, f"lacks {EXPERTS}.2.up_proj.weight."),
        (False, EVERY, None, "lacks mtp.layers.0.mlp.switch_mlp"),
    ):
        weights = published(tiny_model("qwen3_5_moe"), "qwen3_5_moe", fused=fused)
        assert weights.keys() >= {*names}
        weights |= {name: mx.zeros(shape or [1]) for name in names}
        weights = {name: w for name, w in weights.items() if shape or name not in names}
        with pytest.raises(ValueError, match=re.escape(message)):
            loaded(write(tmp_path / "model", tiny_config("qwen3_5_moe"), weights))


# Errors


@pytest.mark.parametrize(("spoil", "error", "message", "loads_without"), BAD.values(), ids=BAD)
def test_rejects_bad_checkpoints(spoil, error, message, loads_without, tmp_path, capsys):
    """A conversion says in one line what load does, and leaves nothing; ``--inspect`` says it without the weights."""
    spoil(folder := copied(tmp_path))
    refusal = refused(message, loaded, folder, error=error)
    if loads_without:
        assert type(loaded(folder, mtp=False)).__module__ == "mlx_lm.models.qwen3_5"
    else:
        if not (folder / INDEX).exists():  # which mlx-lm does not read
            with pytest.raises(Exception):  # noqa: B017, PT011 (mlx-lm's, whatever it is)
                mlx_lm.load(str(folder))
        with pytest.raises(error):
            loaded(folder, mtp=False)
    status, _, err = run_command(convert, capsys, "--hf-path", folder, "--mlx-path", tmp_path / "new" / "out")
    assert (status, err.count("\n"), [*tmp_path.iterdir()]) == (2, 1, [folder]), err
    assert re.search(message, err)
    try:
        said = report(inspect(str(folder)))["--mtp"]
    except error as inspecting:
        said = str(inspecting)
    tail = refusal.replace(str(folder), "")[-20:]
    assert tail in said or ("index" in said and "index" in refusal), said


# The files of a model

SHARDS = [f"model-{i}-of-00002.safetensors" for i in ("00001", "00002")]


def sharded(tmp_path, files=SHARDS, others=None, removed=()):
    """A converted model in two files with an index, beside ``others``. Returns (folder, model)."""
    model, folder = tiny_model("qwen3_5", 3), tmp_path / "model"
    tmp_path.mkdir(exist_ok=True)
    weights = dict(sorted(parameters(model).items()))
    write(folder, tiny_config("qwen3_5"), {}).joinpath("model.safetensors").unlink()
    parts = [{name: weights[name] for name in [*weights][i::2]} for i in range(2)]
    weight_map = {name: file for file, part in zip(files, parts) for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for file, tensors in [*zip(files, parts), *(others or {}).items()]:
        (folder / file).parent.mkdir(exist_ok=True)
        mx.save_safetensors(str(folder / file), tensors)
    for file in removed:
        (folder / file).unlink()
    return folder, model


def of_another(part=""):
    return {name: w for name, w in parameters(tiny_model("qwen3_5", 4)).items() if part in name}


READ = {  # the model's files, a file of another one and what it has, and whether a line names it
    "another model's file": (SHARDS, "model.safetensors", "", True),
    "another's head": (SHARDS, "model-mtp.safetensors", "mtp.", True),
    "another's head, which mlx-lm does not load": (SHARDS, "mtp.safetensors", "mtp.", False),
    "other names": (["a/weights.safetensors", "b.safetensors"], "model.safetensors", "", True),
}


@pytest.mark.parametrize(("files", "other", "part", "is_told"), READ.values(), ids=READ)
def test_the_files_that_the_index_names_are_the_models(files, other, part, is_told, tmp_path, caplog):
    """In loading with and without the head, in conversions and in grafts; one line names others."""
    folder, model = sharded(tmp_path, files, {other: of_another(part)})
    want = parameters(model)
    assert not differing(parameters(loaded(folder)), want)
    assert not differing(parameters(loaded(folder, False)), {n: w for n, w in want.items() if "mtp." not in n})
    mlx_mtp.convert(str(folder), str(tmp_path / "out"))
    assert not differing(parameters(loaded(tmp_path / "out")), want)
    mlx_mtp.convert(str(folder), str(tmp_path / "graft"), graft_mtp_from=str(folder), skip_check=True)
    assert not differing(parameters(loaded(tmp_path / "graft")), want)
    told = [record.message for record in caplog.records if "Not read" in record.message]
    assert len(told) == is_told
    line = f"Not read, since the index of .*model does not name them: {other}"
    assert all(re.search(line, message) for message in told)


@pytest.mark.parametrize("mtp", [True, False, "cached"])
def test_all_files_that_are_missing_are_named(mtp, tmp_path):
    """Also beside a complete model if one of its own files is there."""
    for others, removed in (({}, SHARDS), ({"model-mtp.safetensors": of_another("mtp.")}, SHARDS)):
        folder, _ = sharded(tmp_path / str(len(others)), others=others, removed=removed)
        with pytest.raises(FileNotFoundError, match=f"lacks {SHARDS[0]}, {SHARDS[1]}, which its index names"):
            loaded(folder, mtp)
    folder, _ = sharded(tmp_path / "one", others={"model.safetensors": of_another()}, removed=SHARDS[1:])
    with pytest.raises(FileNotFoundError, match=f"lacks {SHARDS[1]}, which its index names"):
        loaded(folder, mtp)


def test_two_models_without_an_index_are_refused(tmp_path):
    for i, other in enumerate((of_another(), published(tiny_model("qwen3_5", 4), "qwen3_5"))):
        folder, _ = sharded(tmp_path / str(i), others={"model.safetensors": other}, removed=[INDEX])
        with pytest.raises(ValueError, match=r"model-.* and model.* of .* both have .*: remove the file of the other"):
            loaded(folder)


@pytest.mark.parametrize("text", [None, "{}", "{"])
def test_rejects_a_bad_tokenizer(text, tmp_path):
    folder = copied(tmp_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    if text is not None:
        (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"The tokenizer of .*model is missing or damaged .*: download its files"):
        loaded(folder)


def name_end(folder, place, end):
    file = folder / ("config.json" if place == "text_config" else f"{place}.json")
    content = json.loads(file.read_text())
    (content["text_config"] if place == "text_config" else content)["eos_token_id"] = end
    file.write_text(json.dumps(content))


ENDS = ("config", "text_config", "generation_config", "tokenizer_config")


def test_every_end_of_text_that_a_file_names_ends_a_text(tmp_path):
    """No id that no token has, such as -1, ends one, nor does it keep a grammar from its end."""
    folder = write(tmp_path / "model", tiny_config("qwen3_5"), parameters(tiny_model("qwen3_5")))
    (folder / "generation_config.json").write_text("{}")
    ends = mlx_mtp.load(str(folder))[1].eos_token_ids  # the tokenizer's own
    for form in ("number", "list"):
        for i, place in enumerate(ENDS):
            named = [20 + i] if form == "number" else [20 + i, 30 + i]
            name_end(folder, place, [*named, -1] if form == "list" else named[0])
            ends |= {*named}
        for mtp in (True, False):
            tokenizer = mlx_mtp.load(str(folder), mtp=mtp)[1]
            assert tokenizer.eos_token_ids == ends
    tokenizer.eos_token_ids |= {-1, 2**40}
    assert mlx_mtp.make_grammar(tokenizer, regex="a")
    # In a conversion, each program finds them.
    mlx_mtp.convert(str(folder), out := str(tmp_path / "out"))
    assert mlx_lm.load(out)[1].eos_token_ids == mlx_mtp.load(out)[1].eos_token_ids == ends


# By the top level, the text, the files
TIES = [*itertools.product((True, False, None), (True, False, None), (True, False))]
MOST = [ties for i, ties in enumerate(TIES) if i % 2 == i // 2 % 2]  # any two of the three
CONTRADICTIONS = [(True, True, True), (True, False, True), (False, False, False), (None, None, False)]


@pytest.mark.parametrize(
    ("family", "bits", "top", "text", "stored"),
    [
        (family, bits, *ties)
        for family, bits in [("qwen3_5", None), ("qwen3_5", 4), ("qwen3_5_moe", None), ("qwen3_next", 4)]
        for ties in (TIES if profiles.LONG else MOST if (family, bits) == ("qwen3_5", None) else CONTRADICTIONS[::2])
    ],
)
def test_a_stored_output_layer_is_used_and_without_one_the_embedding(family, bits, top, text, stored, tmp_path):
    """Whatever the config says."""
    model = tiny_model(family, 3, tie_word_embeddings=not stored)
    if bits is not None:
        nn.quantize(model, 32, bits)
    config = tiny_config(family)
    inner = config.get("text_config", config)
    for part, tie in ((inner, text), (config, top)):
        part.pop("tie_word_embeddings", None)
        part.update({} if tie is None else {"tie_word_embeddings": tie})
    config |= {} if bits is None else {"quantization": {"group_size": 32, "bits": bits}}
    folder = write(tmp_path / "model", config, parameters(model))
    tokens = mx.array([[1, 2, 3]])
    want = model(tokens)
    for mtp in {True, family == "qwen3_next"}:  # mlx-lm's Qwen3-Next refuses a head among the model's tensors
        assert mx.array_equal(loaded(folder, mtp)(tokens), want)
    mlx_mtp.convert(str(folder), str(tmp_path / "out"))
    assert mx.array_equal(mlx_lm.load(str(tmp_path / "out"))[0](tokens), want)


def test_loads_any_model_without_a_head(tmp_path):
    folder, _ = write_llama(tmp_path / "model")
    for options in (dict(mtp=True), dict(mtp="auto", copy_drafts=True)):
        with pytest.raises(ValueError, match=r"Model type llama has no MTP head here .* give --no-mtp"):
            loaded(folder, **options)
    with pytest.raises(ValueError, match="Model type llama has no MTP head"):
        check_family(str(folder))
    with pytest.raises(ValueError, match=r"draft_vocab, .* require the MTP head"):
        loaded(folder, mtp="auto", draft_vocab=16)
    for mtp in (False, "auto", "cached"):
        assert type(loaded(folder, mtp=mtp)) is llama.Model
    model, tokenizer = mlx_mtp.load(str(folder))
    texts = [f(model, tokenizer, prompt=[1, 2, 3], max_tokens=4) for f in (mlx_mtp.generate, mlx_lm.generate)]
    assert texts[0] == texts[1]


def test_a_model_that_mlx_lm_runs_has_its_prompt_caches_and_no_store(tmp_path):
    for folder in (str(write_llama(tmp_path / "model")[0]), TRAINED):
        model, tokenizer = mlx_mtp.load(folder, mtp=False)
        cache = mlx_mtp.make_prompt_cache(model)
        mlx_mtp.generate(model, tokenizer, [1, 2, 3], max_tokens=1, prompt_cache=cache)
        assert (len(cache), n_tokens(cache) >= 3) == (len(model.layers), True)
        refused("A prompt store requires drafts", mlx_mtp.PromptStore, model)


def test_returns_what_mlx_lm_returns():
    ours, theirs = (load(str(DATA / "dense"), return_config=True) for load in (mlx_mtp.load, mlx_lm.load))
    assert [type(x) for x in ours[1:]] == [type(x) for x in theirs[1:]]
    assert ours[2].items() >= theirs[2].items()


# Drafters


def headless(tmp_path, family):
    """A converted checkpoint without its head: (model, folder, the head's tensors)."""
    model = tiny_model(family, 3)
    backbone, head = split_head(parameters(model))
    return model, write(tmp_path / "model", tiny_config(family), backbone | tables(model)), head


def make_drafter(folder, family, head, **config):
    """A head alone, as mlx-vlm writes it."""
    source = tiny_config(family)
    own = {"model_type": family_of(family).drafter, "text_config": source.get("text_config", source)}
    return write(folder, own | {"block_size": 3, "tie_word_embeddings": True} | config, head)


def assert_same_head(got, want):
    got, want = parameters(got.mtp), parameters(want.mtp)
    assert got.keys() == want.keys()
    atol = 1e-6 if got["pre_fc_norm_hidden.weight"].dtype == mx.float32 else 2e-3  # a pack's is in float16
    assert [name for name, w in want.items() if not mx.allclose(got[name], w, rtol=0, atol=atol)] == []


DRAFTERS = [("qwen3_5", False), ("qwen3_5_moe", True), (PACK, False), (FLASH, True)]  # raw or not


@pytest.mark.parametrize(
    ("family", "raw"), itertools.product(KV_FAMILIES, (False, True)) if profiles.LONG else DRAFTERS
)
def test_loads_a_drafter(family, raw, tmp_path):
    model, folder, head = headless(tmp_path, family)
    if raw:  # names tell, as in mlx-vlm
        head = {f"mtp.{name}": w - (w.ndim == 1 and family != FLASH) for name, w in head.items()}
    drafter = make_drafter(tmp_path / "drafter", family, head)
    assert_same_head(loaded(folder, str(drafter)), model)
    if family == "qwen3_5" and not raw:  # beside a raw model it is not shifted either
        write(folder, tiny_config(family), published(model, family))
        assert_same_head(loaded(folder, str(drafter)), model)


def test_rejects_a_drafter_that_does_not_fit(tmp_path):
    _, folder, head = headless(tmp_path, "qwen3_5")
    for config, message in (
        ({"text_config": {"hidden_size": 128}}, "does not fit .*: hidden_size is 128, not 64"),
        ({"model_type": "llama"}, r"is not a drafter: .* is llama, not qwen3_5_mtp\. .*--graft-mtp-from"),
    ):
        drafter = make_drafter(tmp_path / "drafter", "qwen3_5", head, **config)
        with pytest.raises(ValueError, match=message):
            loaded(folder, str(drafter))
