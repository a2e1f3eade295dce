"""The hub: what is downloaded, and the errors where something cannot be. The tests run a stand-in on this machine."""

import json
import os
import struct
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

import mlx_mtp
from mlx_mtp.checkpoint.hub import fetch
from mlx_mtp.checkpoint.reader import CheckpointReader
from mlx_mtp.convert.__main__ import main as convert
from tests.support.checkpoints import copied
from tests.support.commands import refusal, refused
from tests.support.hub_stand_in import TOKEN
from tests.support.images import add_tower, picture
from tests.support.models import DATA


def test_loads_a_repository_like_its_folder(hub, tmp_path):
    """With the tower and the settings of its images."""
    commit = hub.publish("org/dense", folder := add_tower(copied(tmp_path)))
    remote, _, config = mlx_mtp.load("org/dense", return_config=True)
    local, _, want = mlx_mtp.load(str(folder), return_config=True)
    assert config == want
    assert (remote.mtp.fc.weight == local.mtp.fc.weight).all()
    pixels, same = (model.vision.processor.preprocess_image(picture()) for model in (local, remote))
    assert (pixels == same).all()
    assert (remote.vision.tower(pixels) == local.vision.tower(pixels)).all()
    assert fetch("org/dense", None).name == commit
    assert hub.served["reference.npz"] == hub.served["tokenizer.model"] == 0
    assert hub.served["model.safetensors"] == (DATA / "dense" / "model.safetensors").stat().st_size
    hub.reset_counts()
    mlx_mtp.load("org/dense", mtp=False)
    assert hub.served["model.safetensors"] == 0


def test_fetches_a_revision(hub, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    hub.publish("org/revised", DATA / "dense")
    commit = hub.publish("org/revised", tmp_path, revision="v2")
    assert fetch("org/revised", "v2").name == fetch("org/revised", commit).name == commit
    assert CheckpointReader("org/revised", "v2").revision == commit
    with pytest.raises(FileNotFoundError, match=r"^org/revised has no revision v3\.$"):
        fetch("org/revised", "v3")


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
    message = "^org/never is not a folder, and HF_HUB_OFFLINE is set"
    refused(message, mlx_mtp.load, "org/never", error=FileNotFoundError)
    assert hub.requests == []


NOWHERE = {"ENDPOINT": "http://127.0.0.1:9"}
UNREACHABLE = [
    (NOWHERE, None, "there is no connection to the Hugging Face hub"),
    ({"HF_HUB_OFFLINE": True}, None, "HF_HUB_OFFLINE is set"),
    *(({}, status, f"the Hugging Face hub answers {status} ") for status in (403, 429, 500, 503)),
]


@pytest.mark.parametrize(("constants", "status", "reason"), UNREACHABLE)
def test_without_the_hub_the_cache_must_have_what_is_needed(hub, tmp_path, monkeypatch, constants, status, reason):
    """Not the model card, which mlx-lm does not download. An error has the file that is missing, and the hub's status."""
    (folder := copied(tmp_path)).joinpath("README.md").write_text("# A model")
    hub.publish("org/of_mlx_lm", folder)
    huggingface_hub.snapshot_download("org/of_mlx_lm", allow_patterns=DEFAULT_ALLOW_PATTERNS)
    hub.publish("org/part", DATA / "moe35")
    fetch("org/part", None, weights=["model-00001-of-00002.safetensors"])
    hub.status = status
    for name, value in constants.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    assert mlx_mtp.load("org/of_mlx_lm", lazy=True)[0].mtp is not None
    message = f"^org/part .*the cache lacks model-00002-of-00002.safetensors, and {reason}"
    refused(message, fetch, "org/part", None, error=FileNotFoundError)
    for read in (partial(fetch, revision=None), CheckpointReader):
        refused(f"^org/model is not a folder, and {reason}.*In the cache: ", read, "org/model", error=FileNotFoundError)


def test_a_hub_that_is_silent_is_not_waited_for_forever_and_a_line_says_so(hub, monkeypatch, caplog):
    hub.publish("org/silent", DATA / "dense")
    folder = fetch("org/silent", None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
    with hub.silence():
        assert CheckpointReader("org/silent").folder == folder
    reason = "there is no connection to the Hugging Face hub"
    assert caplog.messages == [f"[WARNING] org/silent is read from the cache: {reason}."]


@pytest.mark.parametrize("name", ["qwen3.6-27B-Q4_K_M", "some-model"])
def test_gguf_is_refused_by_name(hub, tmp_path, name):
    (folder := tmp_path / name).mkdir()
    (folder / f"{name}.gguf").write_bytes(b"GGUF")
    hub.publish(f"org/{name}.gguf", folder)
    for asked in (f"{folder}/{name}.gguf", str(folder), f"org/{name}.gguf", f"{name}.gguf"):
        said = refused("GGUF is not supported", mlx_mtp.load, asked)
        assert ("--model qwen3.6-27b" in said) == ("27B" in name)
        assert sum(hub.served.values()) == hub.served["api"]


def test_a_missing_repository_is_one_line(hub):
    def assert_refused(name, message, *reads):
        for read in reads:
            refused(f"^{name} is {message}", read, name, error=FileNotFoundError)

    loads = mlx_mtp.load, partial(mlx_mtp.load, mtp=False)
    unseen = "not a folder, and the hub has no repository of that name or you may not see it"
    assert_refused("org/missing", unseen, *loads)
    for name in ("/no/such/folder", "no/such/folder"):
        assert_refused(name, "neither a folder nor the name of a repository", *loads)


def test_a_read_that_broke_off_is_tried_again(hub):
    hub.publish("org/parts", DATA / "moe35")
    remote, local = CheckpointReader("org/parts"), CheckpointReader(str(DATA / "moe35"))
    hub.break_after = 1000
    part = ("model-00001-of-00002.safetensors", 5000, 90000)
    assert remote.read(*part) == local.read(*part)


# Hostile servers, and damaged files


def tensor(start, stop, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": [*shape], "data_offsets": [start, stop]}


HEADERS = {
    "overlap": {"a": tensor(0, 4), "b": tensor(2, 6), "c": tensor(4, 8)},
    "not all bytes": {"a": tensor(0, 4)},
    "beyond the end": {"a": tensor(0, 8, (2,)), "b": tensor(8, 12)},
    "reversed": {"a": tensor(8, 0, (2,))},
    "text": {"a": tensor("0", "8", (2,))},
    "three offsets": {"a": {**tensor(0, 8, (2,)), "data_offsets": [0, 4, 8]}},
    "negative shape": {"a": tensor(0, 8, (-2, -1))},
    "huge shape": {"a": tensor(0, 8, (1 << 40, 1 << 40))},
    "unknown dtype": {"a": tensor(0, 8, (2,), "X9")},
    "metadata": {"__metadata__": ["format"], "a": tensor(0, 8, (2,))},
    "a list": [tensor(0, 8, (2,))],
    "deep": b'{"a":' + 50_000 * b"[" + 50_000 * b"]" + b"}",
    "no JSON": b"\xff\xfe{}",
    "longer than the file": b"",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_lies_is_one_line(header, tmp_path, hub, capsys):
    """Offsets, shapes, types and metadata are checked in one place, before anything is done with them."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = struct.pack("<Q", len(text) or 1 << 40) + text + bytes(8)
    (folder := copied(tmp_path)).joinpath("model.safetensors").write_bytes(data)
    hub.publish("org/liar", folder)
    new = ["--hf-path", DATA / "dense", "--mlx-path", tmp_path / "out", "--skip-check"]
    for flags in (["--inspect", "org/liar"], ["--inspect", folder], ["--graft-mtp-from", folder, *new]):
        error = refusal(convert, capsys, *flags)
        assert "model.safetensors" in error
        assert "is truncated or damaged" in error
    assert not (tmp_path / "out").exists()


def test_another_range_than_asked_is_refused(hub, monkeypatch):
    hub.publish("org/shifted", DATA / "moe35")
    remote, part = CheckpointReader("org/shifted"), ("model-00001-of-00002.safetensors", 8, 16)
    for other in ("bytes 0-7/100000", "bytes 8-14/100000", "bytes 8-15/*", "8-15", ""):
        monkeypatch.setitem(hub.headers, "Content-Range", other)
        with pytest.raises(FileNotFoundError, match=r"org/shifted .* sent other bytes of model-00001-of-00002"):
            remote.read(*part)


def test_a_server_without_ranges_sends_no_whole_file(hub, tmp_path, monkeypatch):
    """Of 600 MB, say, of which 100 kB were asked for."""
    (folder := tmp_path / "model").mkdir()
    (folder / "model.safetensors").touch()
    os.truncate(folder / "model.safetensors", size := 64 << 20)
    hub.publish("org/mirror", folder)
    monkeypatch.setattr(hub, "gives_parts", False)
    with pytest.raises(FileNotFoundError, match=r"its server does not support range requests\.$"):
        CheckpointReader("org/mirror").header("model.safetensors")
    assert hub.served["model.safetensors"] < size // 4  # what the connection holds


def test_an_answer_of_another_server_is_one_line(hub):
    for answer in (
        b"<html>Log in to the proxy</html>",
        b"{}",
        b'{"id": "org/odd", "sha": "a", "siblings": 5}',
        b'{"id": "org/odd", "sha": "a", "siblings": [{"rfilename": 5}]}',
        b'{"id": "org/odd", "sha": "a", "siblings": [{"rfilename": "../../model.safetensors"}]}',
        b'{"id": "org/odd", "sha": "../a", "siblings": [{"rfilename": "config.json"}]}',
    ):
        hub.publish("org/odd", DATA / "dense")
        hub.answers["org/odd"] = answer
        for read in (partial(fetch, revision=None), CheckpointReader):
            refused("^org/odd .*: the answer of http.* is not the hub's", read, "org/odd", error=FileNotFoundError)


@pytest.mark.parametrize("etag", ['"../../../../evil"', "..", '"a/b"', 'W/"a\\b"', '""'])
def test_an_etag_that_is_a_path_is_refused_before_the_download(hub, etag):
    """huggingface_hub stores a file under its ETag."""
    hub.publish("org/evil", DATA / "dense")
    hub.headers["ETag"] = etag
    with pytest.raises(FileNotFoundError, match=r"org/evil .* ETag"):
        fetch("org/evil", None)
    assert not hub.served["config.json"]
    home = Path(huggingface_hub.constants.HF_HOME)
    assert not [*home.rglob("evil*")] + [*home.parent.glob("evil*")]
