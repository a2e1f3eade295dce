"""The hub: what is downloaded, and the errors where something cannot be. The tests run a stand-in on this machine."""

from functools import partial

import huggingface_hub
import pytest

import mlx_mtp
from mlx_mtp.checkpoint.storage.hub import fetch
from mlx_mtp.checkpoint.storage.reader import CheckpointReader
from tests.support.checkpoints import copied
from tests.support.hub_stand_in import HEADER_BYTES, TOKEN
from tests.support.images import add_tower, picture
from tests.support.models import DATA


def test_loads_a_repository_like_its_folder(hub):
    commit = hub.publish("org/dense", DATA / "dense")
    remote, _, config = mlx_mtp.load("org/dense", return_config=True)
    local, _, want = mlx_mtp.load(str(DATA / "dense"), return_config=True)
    assert config == want
    assert (remote.mtp.fc.weight == local.mtp.fc.weight).all()
    assert fetch("org/dense", None).name == commit
    assert hub.served["reference.npz"] == hub.served["tokenizer.model"] == 0
    assert hub.served["model.safetensors"] == (DATA / "dense" / "model.safetensors").stat().st_size
    hub.reset_counts()
    mlx_mtp.load("org/dense", mtp=False)
    assert hub.served["model.safetensors"] == 0


def test_fetches_the_tower_and_the_settings_of_its_images(hub, tmp_path):
    folder = add_tower(copied(tmp_path))
    hub.publish("org/seeing", folder)
    remote, local = (mlx_mtp.load(name)[0].vision for name in ("org/seeing", str(folder)))
    assert remote.processor == local.processor
    pixels = local.processor.preprocess_image(picture())
    assert (remote.tower(pixels) == local.tower(pixels)).all()


def test_fetches_a_revision(hub, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    hub.publish("org/revised", DATA / "dense")
    commit = hub.publish("org/revised", tmp_path, revision="v2")
    assert fetch("org/revised", "v2").name == fetch("org/revised", commit).name == commit
    assert CheckpointReader("org/revised", "v2").revision == commit
    with pytest.raises(FileNotFoundError, match=r"^org/revised has no revision v3\.$"):
        fetch("org/revised", "v3")


def test_resumes_a_broken_download(hub, monkeypatch):
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
        CheckpointReader("org/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (fetch("org/gated", None) / "config.json").exists()
    assert CheckpointReader("org/gated").config["model_type"] == "qwen3_5"


def test_offline_uses_the_cache(hub, monkeypatch):
    hub.publish("org/cached", DATA / "dense")
    fetch("org/cached", None)
    hub.reset_counts()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert mlx_mtp.load("org/cached")[0].mtp is not None
    assert CheckpointReader("org/cached").folder == fetch("org/cached", None)
    with pytest.raises(FileNotFoundError, match=r"^org/never is not a folder, and HF_HUB_OFFLINE is set"):
        mlx_mtp.load("org/never")
    assert hub.requests == []


def test_missing_repository_and_unreachable_hub_are_one_line(hub, monkeypatch):
    def assert_refused(name, message, *reads):
        for read in reads:
            with pytest.raises(FileNotFoundError, match=f"^{name} is {message}") as e:
                read(name)
            assert "\n" not in str(e.value)

    loads = mlx_mtp.load, partial(mlx_mtp.load, mtp=False)
    unseen = "not a folder, and the hub has no repository of that name or you may not see it"
    assert_refused("org/missing", unseen, *loads)
    for name in ("/no/such/folder", "no/such/folder"):
        assert_refused(name, "neither a folder nor the name of a repository", *loads)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    unreachable = "not a folder, and it could not be downloaded: "
    assert_refused("org/model", unreachable, partial(fetch, revision=None), CheckpointReader)


def test_reads_single_tensors(hub):
    hub.publish("org/parts", DATA / "moe35")
    remote, local = CheckpointReader("org/parts"), CheckpointReader(str(DATA / "moe35"))
    assert remote.config == local.config
    assert remote.weight_map == local.weight_map
    hub.reset_counts()
    assert remote.head() == local.head()
    files = {remote.weight_map[name] for name in remote.head()}
    assert sum(hub.served[file] for file in files) <= HEADER_BYTES * len(files)
    hub.reset_counts()
    assert remote.read("config.json", 10, 50) == local.read("config.json", 10, 50)
    assert hub.served == {"config.json": 40}


def test_retries_a_broken_range_request(hub):
    hub.publish("org/broken-part", DATA / "moe35")
    remote, local = CheckpointReader("org/broken-part"), CheckpointReader(str(DATA / "moe35"))
    hub.break_after = 1000
    part = ("model-00001-of-00002.safetensors", 5000, 90000)
    assert remote.read(*part) == local.read(*part)


def test_names_a_server_without_range_requests(hub, monkeypatch):
    hub.publish("org/no-ranges", DATA / "moe35")
    monkeypatch.setattr(hub, "gives_parts", False)
    with pytest.raises(FileNotFoundError, match=r"its server does not support range requests\.$"):
        CheckpointReader("org/no-ranges").read("model-00001-of-00002.safetensors", 0, 8)
