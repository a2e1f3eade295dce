"""``--inspect`` describes a checkpoint without its weights, and reports the error that loading it would raise."""

import json
import shutil

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.convert import convert
from mlx_mtp.convert.__main__ import main
from mlx_mtp.convert.inspect import inspect
from mlx_mtp.images.tower import split_tower
from mlx_mtp.layers.mtp import split_head
from tests.support.checkpoints import BAD, BAD_IDS, configure, copied, tensors
from tests.support.commands import run_command
from tests.support.hub_stand_in import HEADER_BYTES
from tests.support.images import add_tower
from tests.support.models import DATA


def report(text) -> dict[str, str]:
    return {key: value.strip() for key, colon, value in (line.partition(":") for line in text.splitlines()) if colon}


@pytest.mark.parametrize("name", ["dense", "moe35", "moe36", "next"])
@pytest.mark.parametrize("where", ["local", "hub"])
def test_describes_a_raw_checkpoint(name, where, hub):
    commit = hub.publish(f"inspected/{name}", DATA / name)
    lines = report(inspect(f"inspected/{name}" if where == "hub" else str(DATA / name)))
    config = json.loads((DATA / name / "config.json").read_text())
    head = split_head(tensors(DATA / name))[1]
    n_bytes = sum(w.nbytes for w in head.values())
    assert lines["Model"] == (f"inspected/{name} at {commit}" if where == "hub" else str(DATA / name))
    assert lines["Model type"] == config["model_type"]
    assert lines["Backbone"] == "not quantized (BF16), raw (norms to be shifted)"
    assert lines["MTP head"] == f"{len(head)} tensors, {n_bytes / 1e6:.2f} MB, raw (norms to be shifted)"
    assert lines["--mtp"] == "ready"
    assert lines["Memory"].startswith(f"{n_bytes / 1e6:.2f} MB for the head")
    if where == "hub":
        shards = list((DATA / name).glob("*.safetensors"))
        assert sum(hub.served[file.name] for file in shards) <= HEADER_BYTES * len(shards)


@pytest.mark.parametrize("where", ["local", "hub"])
def test_tells_the_bytes_of_the_tower(where, tmp_path, hub):
    assert report(inspect(str(DATA / "dense")))["Vision"] == "none"
    folder = add_tower(copied(tmp_path))
    hub.publish("inspected/seeing", folder)
    tower = split_tower(tensors(folder))[1]
    n_bytes = sum(w.nbytes for w in tower.values())
    lines = report(inspect("inspected/seeing" if where == "hub" else str(folder)))
    assert lines["Vision"] == f"{len(tower)} tensors, {n_bytes / 1e6:.2f} MB"
    assert lines["--mtp"] == "ready"


def test_lists_tensors_and_groups_experts():
    text = inspect(str(DATA / "moe35"))
    head = {name: w for name, w in tensors(DATA / "moe35").items() if name.startswith("mtp.")}
    for name, w in head.items():
        if ".experts." not in name:
            assert any(
                line.split()[:1] == [name]
                and line.endswith(f" {list(w.shape)}")
                and f" {w.nbytes / 1e3:.2f} kB " in line
                for line in text.splitlines()
            )
    assert text.count("experts.*.") == 3
    assert "[64, 32] x 8" in text


def test_describes_converted_checkpoints(tmp_path):
    convert(str(DATA / "moe35"), str(tmp_path / "q"), quantize=True, q_group_size=32)
    lines = report(inspect(str(tmp_path / "q")))
    assert lines["Backbone"].startswith("4 bits in groups of 32 (affine)")
    assert lines["Backbone"].endswith(", converted (norms shifted)")
    assert lines["MTP head"].endswith("converted (norms shifted)")
    assert lines["--mtp"] == "ready"
    convert(
        str(DATA / "next"), str(tmp_path / "few"), quantize=True, q_group_size=32, mtp_bits=3, mtp_group_size=32,
        skip_check=True,
    )  # fmt: skip
    lines = report(inspect(str(tmp_path / "few")))
    assert " tensors in mtp.safetensors, " in lines["MTP head"]
    assert lines["--mtp"].startswith("ready, but the MTP head of")
    assert "quantized to 3 bits" in lines["--mtp"]


def test_unknown_layout_of_a_head_file(tmp_path):
    convert(str(DATA / "dense"), str(tmp_path / "model"), mtp=False)
    head = {n: w for n, w in tensors(DATA / "dense").items() if n.startswith("mtp.")}
    mx.save_safetensors(str(tmp_path / "model" / "mtp.safetensors"), head, metadata={"format": "pt"})
    configure(tmp_path / "model", mlx_lm_extra_tensors={"mtp_file": "mtp.safetensors"})
    lines = report(inspect(str(tmp_path / "model")))
    assert lines["MTP head"].endswith("raw or converted, which is unknown")
    assert "whether its norms are shifted is unknown" in lines["--mtp"]


@pytest.mark.parametrize("spoil", [bad[0] for bad in BAD], ids=BAD_IDS)
def test_reports_the_error_of_loading(spoil, tmp_path):
    folder = copied(tmp_path)
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as loading:
        mlx_mtp.load(str(folder))
    try:
        said = report(inspect(str(folder)))["--mtp"]
    except (ValueError, FileNotFoundError) as e:
        said = str(e)
    tail = str(loading.value).replace(str(folder), "")[-20:]
    assert tail in said or ("index" in said and "index" in str(loading.value)), said


def test_command(capsys, hub, tmp_path):
    shutil.copy(DATA / "dense" / "config.json", tmp_path)
    for args, want in [
        (["--inspect", str(DATA / "dense")], None),
        (["--inspect", "no/such-model"], "no/such-model is not a folder, and the hub has no repository"),
        (["--inspect", str(tmp_path)], "No safetensors found"),
    ]:
        status, out, err = run_command(main, capsys, *args)
        if want is None:
            assert (status, err, report(out)["--mtp"]) == (0, "", "ready")
        else:
            assert (status, out, err.count("\n")) == (2, "", 1)
            assert want in err
