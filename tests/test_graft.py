"""Graft: a base model's head beside the weights of a conversion without one, and no other model's."""

import json
import os
import re
import shutil
from functools import partial
from unittest.mock import Mock

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.checkpoint import output
from mlx_mtp.checkpoint.heads import acceptance
from mlx_mtp.checkpoint.heads.acceptance import FLOOR, N_TOKENS
from mlx_mtp.checkpoint.reader import CheckpointReader
from mlx_mtp.fit.fitting import write_checkpoint
from tests.support.bad_checkpoints import configured, no_head, removed, written
from tests.support.checkpoints import (
    INDEX,
    WEIGHTS,
    config_of,
    converted,
    differing,
    edit,
    quantize_head,
    split_head,
    tensors,
)
from tests.support.commands import refused
from tests.support.images import VISION_CONFIG, add_tower, picture
from tests.support.models import DATA
from tests.support.profiles import LONG

DENSE = DATA / "dense"
FOUR_BITS = {"quantize": True, "q_bits": 4, "q_group_size": 32}


def graft(source, model, target, **options):
    return converted(model, target, graft_mtp_from=str(source), **{"skip_check": True} | options)


def graft_vision(source, model, target, **options):
    return converted(model, target, graft_vision_from=str(source), **options)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return converted(DENSE, tmp_path_factory.mktemp("dense") / "bare", mtp=False)


def assert_is(folder, want, images=False):
    """All tensors of a conversion are those of another one, and so is what an image is embedded to."""
    assert not differing(tensors(folder), tensors(want))
    if images:
        for name in ("preprocessor_config.json", "generation_config.json"):
            assert (folder / name).read_bytes() == (want / name).read_bytes()
        ours, theirs = (mlx_mtp.load(str(f))[0].vision for f in (folder, want))
        pixels = ours.processor.preprocess_image(picture())
        assert mx.array_equal(ours.tower(pixels), theirs.tower(pixels))


def assert_indexed(folder):
    index, weights = json.loads((folder / INDEX).read_text()), tensors(folder)
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights.values())


def test_grafts_and_checks_a_head(bare, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(acceptance, "N_TOKENS", N_TOKENS // 4)
    assert_is(graft(DENSE, bare, tmp_path / "out", skip_check=False), converted(DENSE, tmp_path / "with"))
    rate = re.search(r"Drafts accepted on built-in text: (\d+)%", capsys.readouterr().out)
    assert int(rate[1]) > 100 * FLOOR


@pytest.mark.parametrize("name", ["moe35", "dense", "moe36", "next"][not LONG :])
def test_graft_equals_a_conversion_with_the_head(name, tmp_path):
    source, ways = DATA / name, {"with": True, "without": False}
    full, bare = (converted(source, tmp_path / way, mtp=mtp, **FOUR_BITS) for way, mtp in ways.items())
    assert_is(out := graft(source, bare, tmp_path / "out"), full)
    assert_indexed(out)
    ours, theirs = config_of(out), config_of(full)
    assert ours.pop("mlx_lm_extra_tensors") == {"mtp_file": "mtp.safetensors"}
    theirs.pop("mlx_lm_extra_tensors", None)
    assert ours == theirs
    mlx_mtp.load(str(out))
    assert_is(converted(out, tmp_path / "again"), full)
    # The index does not count a replaced head, whose file is linked whole
    out = graft(source, full, tmp_path / "replaced")
    index = json.loads((out / INDEX).read_text())
    named = {name: mx.load(str(out / file))[name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in named.values())


def test_clones_links_or_copies_the_backbone(bare, tmp_path, monkeypatch, caplog):
    """Where the file system has no copy on write, a line says that files are shared."""
    before, said = (bare / WEIGHTS).read_bytes(), "The weights are hard links"

    def made(name, command=output.CLONE):
        monkeypatch.setattr(output, "CLONE", command)
        output.warn_once.cache_clear()
        caplog.clear()
        folder = graft(DENSE, bare, tmp_path / name)
        is_linked = (folder / WEIGHTS).samefile(bare / WEIGHTS)
        assert is_linked == (said in caplog.text)
        assert (folder / WEIGHTS).read_bytes() == before
        assert not (folder / "config.json").samefile(bare / "config.json")
        return is_linked

    made("here")
    assert made("linked", ["false"])
    assert not made("cloned", ["cp"])
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError("Invalid cross-device link")))
    assert not made("copied", ["false"])
    # A head in a file of its own is replaced
    once = graft(DENSE, bare, tmp_path / "once", dtype="float16")
    twice = graft(DENSE, once, tmp_path / "twice")
    mlx_mtp.load(str(twice))
    dtypes = [{w.dtype for w in split_head(tensors(folder))[1].values()} for folder in (once, twice)]
    assert dtypes == [{mx.float16}, {mx.bfloat16}]


# The vision encoder


@pytest.fixture(scope="module")
def blind(tmp_path_factory):
    """(An original with a vision encoder, converted with it, without it and the head)."""
    folder = tmp_path_factory.mktemp("blind")
    original = add_tower(shutil.copytree(DENSE, folder / "model"))
    bare = converted(original, folder / "bare", vision=False, mtp=False)
    return original, converted(original, folder / "with"), bare


def test_grafts_a_head_and_a_tower_in_any_order(blind, tmp_path):
    original, full, bare = blind
    tower, head = graft_vision(original, bare, tmp_path / "tower"), graft(original, bare, tmp_path / "head")
    for out in (
        graft(original, tower, tmp_path / "tower and head"),
        graft_vision(original, head, tmp_path / "head and tower"),
        graft_vision(original, bare, tmp_path / "both", graft_mtp_from=str(original), skip_check=True),
    ):
        assert_is(out, full, images=True)
        assert_indexed(out)
        assert config_of(out) == config_of(full) | {"mlx_lm_extra_tensors": {"mtp_file": "mtp.safetensors"}}
    assert (tower / WEIGHTS).samefile(bare / WEIGHTS)
    assert f"--model {tower} --image" in (tower / "README.md").read_text()
    assert_is(converted(out, tmp_path / "again"), full)
    # A fitted head leaves the tower
    record = {"trained_on": "texts", "measured_on": "others"}
    write_checkpoint(tmp_path / "out", CheckpointReader(str(full)), mlx_mtp.load(str(full))[0], None, record, "table")
    assert_is(tmp_path / "out", full, images=True)


def vision(**changes):
    return configured(vision_config=VISION_CONFIG | {"out_hidden_size": 192} | changes)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (removed("model-tower.safetensors"), "has no vision encoder: the base model of .* has"),
        (configured(vision_config=None), "has no vision encoder: the base model of .* has"),
        (vision(out_hidden_size=8), "makes embeddings of 8, its model takes 192"),
        (vision(depth=3), r"blocks\.2"),
        (vision(hidden_size="a"), "vision_config of .* is not usable"),
        (written("preprocessor_config.json", b"{"), "image settings of .*out are not usable"),
        (configured(text={"hidden_size": 191}), "does not fit .*bare: hidden_size is 191, not 192"),
        (None, "with has a vision encoder already"),
    ],
)
def test_rejects_a_tower_that_does_not_fit(spoil, message, blind, tmp_path):
    donor = shutil.copytree(blind[0], tmp_path / "donor")
    if spoil is not None:
        spoil(donor)
    refused(message, graft_vision, donor, blind[1 if spoil is None else 2], tmp_path / "out")
    assert [*tmp_path.iterdir()] == [donor]


# Other models' heads


def test_rejects_another_models_head(bare, tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "N_TOKENS", N_TOKENS // 4)
    other = shutil.copytree(DENSE, tmp_path / "other")
    edit(other, lambda w: w.update({"mtp.fc.weight": w["mtp.fc.weight"][:, ::-1]}))
    message = r"accepts [0-9]% of the drafts .* nothing was written"
    refused(message, graft, other, bare, tmp_path / "out", skip_check=False)
    assert [*tmp_path.iterdir()] == [other]
    assert (graft(other, bare, tmp_path / "out") / "config.json").exists()


def test_a_damaged_model_is_named_as_the_user_did(bare, tmp_path):
    """The check loads the result from a folder of another name, which is removed."""
    damaged = shutil.copytree(bare, tmp_path / "damaged")
    (damaged / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=re.escape(f"The tokenizer of {damaged} is missing or damaged")):
        graft(DENSE, damaged, tmp_path / "out", skip_check=False)
    assert os.listdir(tmp_path) == ["damaged"]


def fewer_rows(donor):
    edit(donor, lambda w: w.update({name: w[name][:-1] for name in w if name.endswith("embed_tokens.weight")}))


MISFITS = [
    (configured(text={"vocab_size": 5000, "hidden_size": 256}), r"fit .*: vocab_size is 5000, not 4096\.$"),
    (fewer_rows, r"does not fit .*: its vocabulary has 4095 rows, not 4096\.$"),
    (no_head, "donor has no MTP head: the base model of .* has"),
    (partial(quantize_head, bits=8), "is quantized: the base model.s"),
]
MISFITS = [(*case, r) for i, case in enumerate(MISFITS) for r in ((False, True) if LONG else (i % 2 > 0,))]


@pytest.mark.parametrize(("spoil", "message", "remote"), MISFITS)
def test_rejects_a_head_that_does_not_fit(spoil, message, remote, bare, tmp_path, hub):
    spoil(donor := shutil.copytree(DENSE, tmp_path / "donor"))
    hub.publish("org/donor", donor)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        graft("org/donor" if remote else donor, bare, tmp_path / "out")
    assert [*tmp_path.iterdir()] == [donor]
