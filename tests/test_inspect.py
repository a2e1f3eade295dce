"""``--inspect`` describes a checkpoint without its weights, and reports the error that loading it would raise."""

import re
import shutil

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.convert.__main__ import main
from mlx_mtp.convert.inspect import inspect
from mlx_mtp.core.models.head_weights import split_head
from mlx_mtp.images.tower import split_tower
from mlx_mtp.memory import size
from tests.support.bad_checkpoints import BAD
from tests.support.checkpoints import config_of, configure, converted, copied, quantize_head, tensors
from tests.support.commands import refusal, report, run_command
from tests.support.hub_stand_in import HEADER_BYTES
from tests.support.images import add_tower
from tests.support.models import DATA


def size_of(weights):
    return f"{len(weights)} tensors, {size(sum(w.nbytes for w in weights.values()))}"


@pytest.mark.parametrize("name", ["dense", "moe35", "moe36", "next"])
@pytest.mark.parametrize("where", ["local", "hub"])
def test_describes_a_raw_checkpoint(name, where, hub):
    folder = DATA / name
    commit, head = hub.publish(f"inspected/{name}", folder), size_of(split_head(tensors(folder))[1])
    lines = report(inspect(f"inspected/{name}" if where == "hub" else str(folder)))
    assert lines.pop("Memory").startswith(f"{head.partition(', ')[2]} for the head")
    expected = {
        "Model": f"inspected/{name} at {commit}" if where == "hub" else str(folder),
        "Model type": config_of(folder)["model_type"],
        "Backbone": "not quantized (BF16), raw (norms to be shifted)",
        "MTP head": f"{head}, raw (norms to be shifted)",
        "Vision": "none",
        "--mtp": "ready",
    }
    assert lines.items() >= expected.items()
    if where == "hub":
        shards = list(folder.glob("*.safetensors"))
        assert sum(hub.served[file.name] for file in shards) <= HEADER_BYTES * len(shards)


def test_describes_converted_checkpoints(tmp_path):
    options = {"quantize": True, "q_group_size": 32}
    lines = report(inspect(str(converted(DATA / "moe35", tmp_path / "q", **options))))
    assert re.fullmatch(r"4 bits in groups of 32 \(affine\).*, converted \(norms shifted\)", lines["Backbone"])
    assert lines["MTP head"].endswith("converted (norms shifted)")
    assert lines["--mtp"] == "ready"
    lines = report(inspect(str(converted(DATA / "next", tmp_path / "next", **options))))
    assert " tensors in mtp.safetensors, " in lines["MTP head"]
    lines = report(inspect(str(quantize_head(copied(tmp_path), 3))))
    assert lines["--mtp"] == "ready"
    assert ", quantized, raw (norms to be shifted)" in lines["MTP head"]
    # A head in a file of its own may have either layout: PyTorch's files suggest that of the base model
    folder = converted(DATA / "dense", tmp_path / "unknown", mtp=False)
    head = {n: w for n, w in tensors(DATA / "dense").items() if n.startswith("mtp.")}
    mx.save_safetensors(str(folder / "mtp.safetensors"), head, metadata={"format": "pt"})
    configure(folder, mlx_lm_extra_tensors={"mtp_file": "mtp.safetensors"})
    lines = report(inspect(str(folder)))
    assert lines["MTP head"].endswith("raw (norms to be shifted)")
    assert lines["--mtp"] == "ready"


@pytest.mark.parametrize("spoil", [bad[0] for bad in BAD.values()], ids=BAD)
def test_reports_the_error_of_loading(spoil, tmp_path):
    spoil(folder := copied(tmp_path))
    with pytest.raises((ValueError, FileNotFoundError)) as loading:
        mlx_mtp.load(str(folder), mtp=True)
    try:
        said = report(inspect(str(folder)))["--mtp"]
    except (ValueError, FileNotFoundError) as e:
        said = str(e)
    tail = str(loading.value).replace(str(folder), "")[-20:]
    assert tail in said or ("index" in said and "index" in str(loading.value)), said


def test_command(capsys, hub, tmp_path):
    status, out, err = run_command(main, capsys, "--inspect", DATA / "dense")
    assert (status, err, report(out)["--mtp"]) == (0, "", "ready")
    hub_has_none = "no/such-model is not a folder, and the hub has no repository"
    assert hub_has_none in refusal(main, capsys, "--inspect", "no/such-model")
    shutil.copy(DATA / "dense" / "config.json", tmp_path)
    assert "No safetensors found" in refusal(main, capsys, "--inspect", tmp_path)
    # The bytes of the tower are told
    hub.publish("inspected/seeing", folder := add_tower(copied(tmp_path)))
    for name in (str(folder), "inspected/seeing"):
        lines = report(inspect(name))
        assert (lines["Vision"], lines["--mtp"]) == (size_of(split_tower(tensors(folder))[1]), "ready")
