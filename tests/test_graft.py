"""Graft: an original's head beside the weights of a conversion without one, and no other model's."""

import json
import os
import re
import shutil

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.checkpoint.load import DEMO
from mlx_mtp.checkpoint.originals import head
from mlx_mtp.checkpoint.originals.head import CHECK_TOKENS, FLOOR
from mlx_mtp.convert import convert
from mlx_mtp.convert import graft as grafting
from mlx_mtp.fit.checkpoint import write_checkpoint
from mlx_mtp.layers.mtp import split_head
from mlx_mtp.prompts import PYTHON
from tests.support.checkpoints import configure, copied, tensors
from tests.support.decoding import mtp
from tests.support.hub_stand_in import HEADER_BYTES
from tests.support.images import VISION_CONFIG, add_tower, picture
from tests.support.models import DATA

FAMILIES = ["dense", "moe35", "moe36", "next"]
FOUR_BITS = {"quantize": True, "q_bits": 4, "q_group_size": 32}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """A checkpoint converted to 4 bit with its head, and without: (the original, with, without)."""
    folder = tmp_path_factory.mktemp(request.param)
    convert(str(DATA / request.param), str(folder / "with"), **FOUR_BITS)
    convert(str(DATA / request.param), str(folder / "without"), mtp=False, **FOUR_BITS)
    return DATA / request.param, folder / "with", folder / "without"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The dense checkpoint converted without its head."""
    folder = tmp_path_factory.mktemp("dense") / "bare"
    convert(str(DATA / "dense"), str(folder), mtp=False)
    return folder


def assert_same_tensors(a, b):
    a, b = tensors(a), tensors(b)
    assert a.keys() == b.keys()
    for name, w in a.items():
        assert w.dtype == b[name].dtype
        assert mx.array_equal(w, b[name]), name


def graft(source, model, target, **options):
    convert(str(model), str(target), graft_mtp_from=str(source), **options)


def test_grafts_and_checks_the_demos_head(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grafting, "CHECK_TOKENS", 8)
    convert(str(DEMO), str(tmp_path / "with"))
    convert(str(DEMO), str(tmp_path / "without"), mtp=False)
    graft(DEMO, tmp_path / "without", tmp_path / "out")
    assert_same_tensors(tmp_path / "out", tmp_path / "with")
    rate = re.search(r"Drafts accepted on built-in text: (\d+)%", capsys.readouterr().out)
    assert int(rate[1]) > 100 * FLOOR


def test_graft_equals_a_conversion_with_the_head(pair, tmp_path):
    source, full, bare = pair
    graft(source, bare, tmp_path / "out", skip_check=True)
    assert_same_tensors(tmp_path / "out", full)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(tmp_path / "out").keys()
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in tensors(tmp_path / "out").values())
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", full))
    assert ours.pop("mlx_lm_extra_tensors") == {"mtp_file": "mtp.safetensors"}
    theirs.pop("mlx_lm_extra_tensors", None)
    assert ours == theirs
    mlx_mtp.load(str(tmp_path / "out"))
    convert(str(tmp_path / "out"), str(tmp_path / "again"))
    assert_same_tensors(tmp_path / "again", full)


def test_replaces_a_separate_head(bare, tmp_path):
    graft(DATA / "dense", bare, tmp_path / "once", dtype="float16", skip_check=True)
    graft(DATA / "dense", tmp_path / "once", tmp_path / "twice", skip_check=True)
    mlx_mtp.load(str(tmp_path / "twice"))
    assert {w.dtype for w in split_head(tensors(tmp_path / "twice"))[1].values()} == {mx.bfloat16}


def test_downloads_only_the_heads_bytes(pair, tmp_path, hub):
    source, full, bare = pair
    commit = hub.publish(f"org/{source.name}", source)
    graft(f"org/{source.name}", bare, tmp_path / "out", skip_check=True)
    assert_same_tensors(tmp_path / "out", full)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["mlx_mtp"]["source"], config["mlx_mtp"]["revision"]) == (f"org/{source.name}", commit)
    head = sum(w.nbytes for w in split_head(tensors(source))[1].values())
    shards = list(source.glob("*.safetensors"))
    headers = (HEADER_BYTES + 8) * len(shards)
    assert sum(hub.served[shard.name] for shard in shards) <= head + headers
    text = sum(hub.served[name] for name in ("api", "config.json", "model.safetensors.index.json"))
    assert sum(hub.served.values()) <= head + headers + text


def test_links_or_copies_the_backbone(bare, tmp_path, monkeypatch):
    before = (bare / "model.safetensors").read_bytes()
    graft(DATA / "dense", bare, tmp_path / "linked", skip_check=True)
    assert (tmp_path / "linked" / "model.safetensors").samefile(bare / "model.safetensors")
    assert not (tmp_path / "linked" / "config.json").samefile(bare / "config.json")

    def refuse(*_):
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    graft(DATA / "dense", bare, tmp_path / "copied", skip_check=True)
    assert not (tmp_path / "copied" / "model.safetensors").samefile(bare / "model.safetensors")
    for folder in (bare, tmp_path / "linked", tmp_path / "copied"):
        assert (folder / "model.safetensors").read_bytes() == before


def test_keeps_the_vision_config(bare, tmp_path):
    shutil.copytree(bare, tmp_path / "bare")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    (tmp_path / "bare" / "config.json").write_text(json.dumps({**config, "vision_config": {"depth": 3}}))
    graft(DATA / "dense", tmp_path / "bare", tmp_path / "out", skip_check=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vision_config"] == {"depth": 3}


# The vision tower


@pytest.fixture(scope="module")
def blind(tmp_path_factory):
    """(An original with a vision tower, converted with it, without it, without it and the head)."""
    folder = tmp_path_factory.mktemp("blind")
    original = add_tower(copied(folder))
    convert(str(original), str(folder / "with"))
    convert(str(original), str(folder / "without"), vision=False)
    convert(str(original), str(folder / "bare"), vision=False, mtp=False)
    return original, folder / "with", folder / "without", folder / "bare"


def graft_vision(source, model, target, **options):
    convert(str(model), str(target), graft_vision_from=str(source), **options)


def assert_same_images(a, b):
    for name in ("preprocessor_config.json", "generation_config.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
    ours, theirs = (mlx_mtp.load(str(folder))[0].vision for folder in (a, b))
    pixels = ours.processor.preprocess_image(picture())
    assert mx.array_equal(ours.tower(pixels), theirs.tower(pixels))


def test_grafts_a_tower(blind, tmp_path):
    original, full, without, _ = blind
    graft_vision(original, without, tmp_path / "out")
    assert_same_tensors(tmp_path / "out", full)
    assert_same_images(tmp_path / "out", full)
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", full))
    assert ours == theirs
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(full).keys()
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in tensors(full).values())
    assert (tmp_path / "out" / "model.safetensors").samefile(without / "model.safetensors")
    assert f"--model {tmp_path / 'out'} --image" in (tmp_path / "out" / "README.md").read_text()
    convert(str(tmp_path / "out"), str(tmp_path / "again"))
    assert_same_tensors(tmp_path / "again", full)


def test_grafts_a_head_and_a_tower_at_once(blind, tmp_path):
    original, full, _, bare = blind
    graft_vision(original, bare, tmp_path / "out", graft_mtp_from=str(original), skip_check=True)
    assert_same_tensors(tmp_path / "out", full)
    assert_same_images(tmp_path / "out", full)


def test_a_grafted_head_leaves_the_tower_and_the_other_way_round(blind, tmp_path):
    original, full, _, bare = blind
    graft_vision(original, bare, tmp_path / "tower")
    graft(original, tmp_path / "tower", tmp_path / "tower and head", skip_check=True)
    graft(original, bare, tmp_path / "head", skip_check=True)
    graft_vision(original, tmp_path / "head", tmp_path / "head and tower")
    for name in ("tower and head", "head and tower"):
        assert_same_tensors(tmp_path / name, full)
        assert_same_images(tmp_path / name, full)


def test_a_fitted_head_leaves_the_tower(blind, tmp_path):
    _, full, _, _ = blind
    model, _ = mlx_mtp.load(str(full))
    record = {"trained_on": "texts", "measured_on": "others"}
    write_checkpoint(tmp_path / "out", full, model, str(full), None, record, "table")
    assert_same_tensors(tmp_path / "out", full)
    assert_same_images(tmp_path / "out", full)


def test_downloads_only_the_towers_bytes(blind, tmp_path, hub):
    original, full, without, _ = blind
    hub.publish("org/seeing", original)
    graft_vision("org/seeing", without, tmp_path / "out")
    assert_same_tensors(tmp_path / "out", full)
    assert_same_images(tmp_path / "out", full)
    assert hub.served["model.safetensors"] <= HEADER_BYTES + 8


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "model-tower.safetensors").unlink(), "has no vision tower to graft: name the original"),
        (lambda f: configure(f, vision_config=None), "has no vision tower to graft: name the original"),
        (
            lambda f: configure(f, vision_config=VISION_CONFIG | {"out_hidden_size": 8}),
            "makes embeddings of 8, its model takes 192",
        ),
        (lambda f: configure(f, vision_config=VISION_CONFIG | {"depth": 3, "out_hidden_size": 192}), r"blocks\.2"),
        (
            lambda f: configure(f, vision_config=VISION_CONFIG | {"hidden_size": "a"}),
            "vision_config of .* is not usable",
        ),
        (lambda f: (f / "preprocessor_config.json").write_text("{"), "image settings of .*out are not usable"),
        (
            lambda f: configure(f, text_config={"hidden_size": 191}),
            "does not fit .*without: hidden_size is 191, not 192",
        ),
    ],
)
def test_rejects_a_tower_that_does_not_fit(spoil, message, blind, tmp_path):
    original, _, without, _ = blind
    spoil(donor := shutil.copytree(original, tmp_path / "donor"))
    with pytest.raises(ValueError, match=message):
        graft_vision(donor, without, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["donor"]


def test_rejects_a_second_tower(blind, tmp_path):
    original, full, _, _ = blind
    with pytest.raises(ValueError, match="with has a vision tower already"):
        graft_vision(original, full, tmp_path / "out")


def test_fixes_a_head_of_few_bits(tmp_path, caplog):
    """The head is inside the conversion's own files, which are not changed."""
    convert(str(DATA / "moe35"), str(tmp_path / "few"), mtp_bits=4, mtp_group_size=32, skip_check=True, **FOUR_BITS)
    mlx_mtp.load(str(tmp_path / "few"))
    assert len(caplog.records) == 1
    graft(DATA / "moe35", tmp_path / "few", tmp_path / "out", skip_check=True)
    caplog.clear()
    fixed, _ = mlx_mtp.load(str(tmp_path / "out"))
    assert caplog.records == []
    original, _ = mlx_mtp.load(str(DATA / "moe35"))
    want = dict(tree_flatten(original.mtp.parameters()))
    got = dict(tree_flatten(fixed.mtp.parameters()))
    assert got.keys() == want.keys()
    assert all(mx.array_equal(got[name], w) for name, w in want.items())


def test_dtype_casts_the_head(tmp_path):
    convert(str(DATA / "dense"), str(tmp_path / "bare"), mtp=False, dtype="float16")
    graft(DATA / "dense", tmp_path / "bare", tmp_path / "out", dtype="float16", skip_check=True)
    assert {w.dtype for w in tensors(tmp_path / "out").values() if w.ndim > 1} == {mx.float16}


# Other models' heads


def change_head(source, folder, change):
    """A copy of a checkpoint of one file whose head's tensors are changed, by ``change(name, w)``."""
    shutil.copytree(source, folder)
    weights = mx.load(str(folder / "model.safetensors"))
    weights = {name: change(name, w) if name.startswith("mtp.") else w for name, w in weights.items()}
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    return folder


def of_another_run(size):
    """A head with the hidden dimensions permuted, as another run of the same training might have learned it."""
    order = mx.array(np.random.default_rng(0).permutation(size))

    def permute(name, w):
        if name == "mtp.fc.weight":
            return mx.concatenate([half[order][:, order] for half in mx.split(w, 2, axis=1)], axis=1)
        if w.ndim == 1:
            return w[order] if w.size == size else w
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        return w[order] if writes else w[:, order]

    return permute


def random_like(name, w):
    w32 = w.astype(mx.float32)
    return (mx.random.normal(w.shape) * w32.var().sqrt() + w32.mean()).astype(w.dtype)


@pytest.mark.parametrize("change", [of_another_run(192), random_like], ids=["another run", "random"])
def test_rejects_another_models_head(change, bare, tmp_path, monkeypatch):
    mx.random.seed(0)
    monkeypatch.setattr(grafting, "CHECK_TOKENS", 12)
    monkeypatch.setattr(head, "PYTHON", PYTHON[:2])
    other = change_head(DATA / "dense", tmp_path / "other", change)
    with pytest.raises(ValueError, match=r"accepts [0-9]% of the drafts .* nothing was written") as e:
        graft(other, bare, tmp_path / "out")
    assert "\n" not in str(e.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other"]
    graft(other, bare, tmp_path / "out", skip_check=True)
    assert (tmp_path / "out" / "config.json").exists()


def test_a_damaged_model_is_named_as_the_user_did(bare, tmp_path):
    """The check loads the result from a folder of another name, which is removed."""
    damaged = shutil.copytree(bare, tmp_path / "damaged")
    (damaged / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=re.escape(f"The tokenizer of {damaged} is missing or damaged")):
        graft(DATA / "dense", damaged, tmp_path / "out")
    assert os.listdir(tmp_path) == ["damaged"]


def test_floor_separates_the_models_head_from_others(trained):
    model, tokenizer = trained
    counts, tokens = mlx_mtp.DraftCounts(), []
    for prompt in PYTHON:  # as measure_acceptance does
        tokens += mtp(tokenizer.encode(prompt), model, max_tokens=CHECK_TOKENS, num_draft_tokens=1, counts=counts)
    assert sum(counts.accepted) / sum(counts.drafted) > 1.5 * FLOOR
    most_frequent = max(tokens.count(t) for t in set(tokens)) / len(tokens)
    assert most_frequent < FLOOR / 2


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    text = {**config["text_config"], **changes}
    (folder / "config.json").write_text(json.dumps({**config, "text_config": text}))


def spoil_sizes(donor):
    edit_config(donor, vocab_size=5000, hidden_size=256)


def spoil_rows(donor):
    rewrite(donor, lambda name, w: w[:-1] if name.endswith("embed_tokens.weight") else w)


def spoil_shape(donor):
    rewrite(donor, lambda name, w: w[:, :-1] if name == "mtp.fc.weight" else w)


def spoil_head(donor):
    rewrite(donor, lambda name, w: None if name.startswith("mtp.") else w)


def spoil_type(donor):
    config = json.loads((donor / "config.json").read_text())
    (donor / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_5_moe"}))


def quantize_head(donor):
    convert(str(DATA / "dense"), str(donor / "q"), mtp_bits=8, mtp_group_size=32, skip_check=True)
    for file in (donor / "q").iterdir():
        shutil.copy(file, donor)
    shutil.rmtree(donor / "q")


def rewrite(folder, change):
    weights = mx.load(str(folder / "model.safetensors"))
    weights = {name: w for name, old in weights.items() if (w := change(name, old)) is not None}
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_sizes, r"does not fit .*: vocab_size is 5000, not 4096\.$"),
        (spoil_rows, r"does not fit .*: its vocabulary has 4095 rows, not 4096\.$"),
        (spoil_shape, r"mtp\.fc\.weight is \[192, 383\], not \[192, 384\]"),
        (spoil_head, "donor has no MTP head to graft: name the original"),
        (spoil_type, r"does not fit .*: model_type is qwen3_5_moe, not qwen3_5\.$"),
        (quantize_head, "is quantized: graft the original's"),
        (lambda donor: (donor / "config.json").unlink(), "has no config.json"),
        (lambda donor: (donor / "model.safetensors").write_bytes(b"12345678"), "truncated or damaged"),
        (lambda donor: (donor / "model.safetensors").unlink(), "No safetensors"),
    ],
)
@pytest.mark.parametrize("remote", [False, True], ids=["local", "hub"])
def test_rejects_a_head_that_does_not_fit(spoil, message, remote, bare, tmp_path, hub):
    spoil(donor := shutil.copytree(DATA / "dense", tmp_path / "donor"))
    hub.publish("org/donor", donor)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        graft("org/donor" if remote else donor, bare, tmp_path / "out", skip_check=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["donor"]


def test_rejects_flags_of_a_conversion(tmp_path):
    for options in ({"quantize": True}, {"mtp_bits": 8}, {"mtp": False}, {"dequantize": True}, {"vision": False}):
        with pytest.raises(ValueError, match=r"--graft-mtp-from adds a head and .* omit the flags of a conversion"):
            graft(DATA / "dense", DATA / "dense", tmp_path / "out", **options)
        with pytest.raises(ValueError, match=r"--graft-vision-from adds a tower and .* omit the flags of a conversion"):
            graft_vision(DATA / "dense", DATA / "dense", tmp_path / "out", **options)
    with pytest.raises(ValueError, match="already exists"):
        graft(DATA / "dense", DATA / "dense", tmp_path)
