"""The hub: what is fetched of it, and what is said where something cannot be had. It is a stand-in on this machine."""

import os
import subprocess
import sys

import huggingface_hub
import pytest
from helpers import DATA
from hub_stand_in import TOKEN

import mlx_mtp
from mlx_mtp.checkpoint.hub import Checkpoint, fetch


def run(*args, **env):
    """A command of ours: its exit status and what it prints."""
    command = [sys.executable, "-m", *args]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})
    return done.returncode, done.stdout, done.stderr


def test_a_repository_is_loaded_as_its_folder(hub):
    commit = hub.publish("org/dense", DATA / "dense")
    remote, _, config = mlx_mtp.load("org/dense", return_config=True)
    local, _, want = mlx_mtp.load(str(DATA / "dense"), return_config=True)
    assert config == want
    assert (remote.mtp.fc.weight == local.mtp.fc.weight).all()
    assert fetch("org/dense", None).name == commit
    assert hub.served["reference.npz"] == hub.served["tokenizer.model"] == 0
    assert hub.served["model.safetensors"] == (DATA / "dense" / "model.safetensors").stat().st_size
    hub.count_anew()
    mlx_mtp.load("org/dense", mtp=False)
    assert hub.served["model.safetensors"] == 0


def test_a_revision(hub, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    hub.publish("org/revised", DATA / "dense")
    commit = hub.publish("org/revised", tmp_path, revision="v2")
    assert fetch("org/revised", "v2").name == fetch("org/revised", commit).name == commit
    assert Checkpoint("org/revised", "v2").revision == commit
    with pytest.raises(FileNotFoundError, match=r"^org/revised has no revision v3\.$"):
        fetch("org/revised", "v3")


def test_a_download_that_broke_off_is_resumed(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", chunk := 1 << 20)
    size = (DATA / "dense" / "model.safetensors").stat().st_size
    hub.publish("org/broken", DATA / "dense")
    hub.break_after = size // 2
    folder = fetch("org/broken", None)
    assert (folder / "model.safetensors").read_bytes() == (DATA / "dense" / "model.safetensors").read_bytes()
    assert hub.served["model.safetensors"] < size + chunk
    assert any(asked == f"bytes={size // 2 // chunk * chunk}-" for _, _, asked in hub.requests)


def test_a_token_opens_a_gated_repository(hub, monkeypatch):
    hub.publish("org/gated", DATA / "dense", gated=True)
    with pytest.raises(FileNotFoundError, match=r"^org/gated is gated: .*hf auth login"):
        fetch("org/gated", None)
    with pytest.raises(FileNotFoundError, match=r"^org/gated is gated: "):
        Checkpoint("org/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (fetch("org/gated", None) / "config.json").exists()
    assert Checkpoint("org/gated").config["model_type"] == "qwen3_5"


def test_offline_the_cache_serves(hub, monkeypatch):
    hub.publish("org/cached", DATA / "dense")
    fetch("org/cached", None)
    hub.count_anew()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert mlx_mtp.load("org/cached")[0].mtp is not None
    assert Checkpoint("org/cached").folder == fetch("org/cached", None)
    with pytest.raises(FileNotFoundError, match=r"^org/never is no folder, and HF_HUB_OFFLINE is set"):
        mlx_mtp.load("org/never")
    assert hub.requests == []


@pytest.mark.parametrize("mtp", [True, False])
def test_what_cannot_be_had_is_said_in_one_line(mtp, hub, monkeypatch):
    for name, message in [
        ("org/missing", "is no folder, and the hub has no repository of that name or you may not see it"),
        ("/no/such/folder", "is no folder, and not the name of a repository"),
        ("no/such/folder", "is no folder, and not the name of a repository"),
    ]:
        with pytest.raises(FileNotFoundError, match=f"^{name} {message}") as e:
            mlx_mtp.load(name, mtp=mtp)
        assert "\n" not in str(e.value)


def test_a_hub_that_is_down_is_said_in_one_line():
    status, _, err = run("mlx_mtp.convert", "--hf-path", "org/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert status == 2
    assert err.splitlines()[-1].startswith(
        "mlx_mtp.convert: error: org/model is no folder, and it could not be downloaded: "
    )
    assert "Traceback" not in err


def test_parts_of_a_checkpoint_are_read_alone(hub):
    hub.publish("org/parts", DATA / "moe35")
    remote, local = Checkpoint("org/parts"), Checkpoint(str(DATA / "moe35"))
    assert remote.config == local.config
    names = remote.weight_map()
    assert names == local.weight_map()
    head = [name for name in names if name.startswith("mtp.")]
    hub.count_anew()
    assert remote.tensors(head, names) == local.tensors(head, names)
    tensor = remote.tensors(head, names)["mtp.fc.weight"]
    assert remote.read(tensor.file, tensor.start, tensor.stop) == local.read(tensor.file, tensor.start, tensor.stop)
    files = {names[name] for name in head}
    headers = sum(8 + int.from_bytes((DATA / "moe35" / f).read_bytes()[:8], "little") for f in files)
    assert sum(hub.served[f] for f in files) == headers + tensor.nbytes


def test_a_part_that_broke_off_is_asked_for_again(hub):
    hub.publish("org/broken-part", DATA / "moe35")
    remote, local = Checkpoint("org/broken-part"), Checkpoint(str(DATA / "moe35"))
    tensor = local.header("model-00001-of-00002.safetensors")[0]["model.language_model.embed_tokens.weight"]
    hub.break_after = 1000
    assert remote.read(tensor.file, tensor.start, tensor.stop) == local.read(tensor.file, tensor.start, tensor.stop)


def test_a_server_without_parts_is_said(hub, monkeypatch):
    hub.publish("org/whole", DATA / "moe35")
    monkeypatch.setattr(hub, "gives_parts", False)
    with pytest.raises(FileNotFoundError, match=r"its server does not give parts of files\.$"):
        Checkpoint("org/whole").header("model-00001-of-00002.safetensors")
