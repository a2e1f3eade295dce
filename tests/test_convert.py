"""Conversion: the head is kept bit for bit, the folder appears when it is complete, and plain mlx-lm loads it."""

import json
import re
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from unittest.mock import create_autospec

import huggingface_hub
import mlx.core as mx
import mlx_lm
import pytest
from huggingface_hub import ModelCard

import mlx_mtp
from mlx_mtp.checkpoint.hub import fetch
from mlx_mtp.cli.parsers import convert_parser
from mlx_mtp.convert import conversion, convert
from mlx_mtp.convert.__main__ import inspect, main
from mlx_mtp.images.tower import PATCH_KERNEL, split_tower
from mlx_mtp.memory import size
from tests.support.checkpoints import (
    config_of,
    configure,
    converted,
    copied,
    differing,
    full_disk,
    parameters,
    quantize_head,
    split_head,
    tensors,
    write_tiny,
)
from tests.support.commands import report, run_command
from tests.support.decoding import mtp, plain
from tests.support.hub_stand_in import HEADER_BYTES
from tests.support.images import VISION_CONFIG, add_tower
from tests.support.models import DATA, load_reference
from tests.support.profiles import LONG

PROMPT = [5, 40, 3, 300, 12, 7, 9]
DENSE = DATA / "dense"


def head_of(folder):
    return split_head(tensors(folder))[1]


def tower_of(folder):
    return split_tower(tensors(folder))[1]


FORMATS = {
    "bfloat16": {},
    "4 bit": {"quantize": True, "q_bits": 4, "q_group_size": 32},
    "mxfp4": {"quantize": True, "q_mode": "mxfp4"},
    "mixed": {"quantize": True, "q_bits": 3, "q_group_size": 32, "quant_predicate": "mixed_3_6"},
}
# moe36 is moe35 but for the layout of its experts.
CASES = [("dense", "4 bit"), ("dense", "mxfp4"), ("moe35", "4 bit"), ("moe36", "bfloat16"), ("next", "mixed")]
CASES += [("dense", "bfloat16"), ("dense", "mixed"), ("moe35", "bfloat16"), ("next", "4 bit")] * LONG


@pytest.mark.parametrize(("name", "form"), CASES)
def test_the_head_is_unchanged_and_plain_mlx_lm_generates_the_same(name, form, tmp_path):
    """In float32, the only dtype in which MLX's CPU backend runs experts."""
    out = converted(DATA / name, tmp_path / "out", **FORMATS[form])
    backbone, head = split_head(weights := tensors(out))
    reference = parameters(load_reference(DATA / name).mtp)
    assert not differing(head, {name: w.astype(mx.bfloat16) for name, w in reference.items()})
    assert any(name.endswith(".scales") for name in backbone) == (form != "bfloat16")
    record = {"source": str(DATA / name), "revision": None, "dtype": "bfloat16", "bits": None, "norms_shifted": True}
    assert config_of(out)["mlx_mtp"] == record
    assert json.loads((out / "model.safetensors.index.json").read_text())["weight_map"].keys() == weights.keys()

    stock, ours = mlx_lm.load(str(out))[0], mlx_mtp.load(str(out))[0]
    if (name, form) == ("moe35", "4 bit"):
        assert (ours.layers[0].mlp.gate.bits, ours.layers[0].linear_attn.in_proj_z.bits) == (8, 4)
    assert type(stock).__module__.startswith("mlx_lm.")
    for model in (stock, ours):
        model.set_dtype(mx.float32)
    ours.device = replace(ours.device, compiled=False)  # the CPU backend would compile kernels for these sizes
    assert mtp(PROMPT, ours, max_tokens=12, num_draft_tokens=3) == plain(PROMPT, stock, max_tokens=12)


@pytest.mark.parametrize(("name", "dtype"), [("dense", None), ("next", "float16"), *[("dense", "float16")] * LONG])
def test_converts_a_conversion(name, dtype, tmp_path):
    """The origin of the head is still the first source, and a dtype is that of the head, too, and lasts."""
    once = converted(DATA / name, tmp_path / "once", dtype=dtype)
    twice = converted(once, tmp_path / "twice", quantize=True)
    assert not differing(head_of(once), head_of(twice))
    assert config_of(once)["mlx_mtp"] == config_of(twice)["mlx_mtp"]
    assert config_of(once)["mlx_mtp"]["source"] == str(DATA / name)
    for out in (once, twice):
        kinds = {w.dtype for name, w in tensors(out).items() if not name.endswith("A_log")} - {mx.uint32}
        assert kinds == {mx.float16 if dtype else mx.bfloat16}


def test_the_files_of_the_tokenizer_are_copied_as_they_are(tmp_path):
    """Other than transformers would write them, as with some versions' pre-tokenizers."""
    folder = copied(tmp_path)
    names = ["vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja"]
    names += ["chat_template.json", "additional_chat_templates/tools.jinja", "model_code.py"]
    (folder / "additional_chat_templates").mkdir()
    for name in names:
        (folder / name).write_text("{}" if name.endswith("json") else "# as it is")
    own = json.loads((folder / "tokenizer.json").read_text())
    own["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps(own))
    out = converted(folder, tmp_path / "out")
    for name in [*names, "tokenizer.json", "tokenizer_config.json", "generation_config.json"]:
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.parametrize("name", ["dense", "next"])
def test_converts_without_a_head(name, tmp_path):
    out = converted(converted(DATA / name, tmp_path / "with"), tmp_path / "out", mtp=False)
    assert head_of(out) == {}
    assert not config_of(out).keys() & {"mlx_lm_extra_tensors", "mlx_mtp", "mtp_num_hidden_layers"}
    mlx_lm.load(str(out))


# The vision encoder


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """The dense checkpoint with a vision encoder: (as published, converted to 4 bit)."""
    folder = tmp_path_factory.mktemp("seeing")
    original = add_tower(copied(folder))
    (original / "video_preprocessor_config.json").write_text("{}")
    return original, converted(original, folder / "out", **FORMATS["4 bit"])


def test_the_tower_is_kept_as_it_was(seeing, tmp_path):
    original, out = seeing
    before, after, weights = tower_of(original), tower_of(out), tensors(out)
    before[PATCH_KERNEL] = before[PATCH_KERNEL].transpose(0, 2, 3, 4, 1)  # channels last, as in MLX
    assert not differing(before, after)
    assert not differing(after, tower_of(converted(out, tmp_path / "again", dequantize=True)))
    assert all(name.startswith("vision_tower.") for name in weights if "language_model" not in name)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights.values())
    for name in ("vision_config", "image_token_id", "vision_start_token_id"):
        assert config_of(out)[name] == config_of(original)[name]
    assert (out / "preprocessor_config.json").read_bytes() == (original / "preprocessor_config.json").read_bytes()
    card = ModelCard.load(out / "README.md")
    assert card.data.pipeline_tag == "image-text-to-text"
    assert f"mlx_mtp generate --mtp --model {out} --image" in card.text
    stock, ours = mlx_lm.load(str(out))[0], mlx_mtp.load(str(out))[0]
    assert plain(PROMPT, stock, max_tokens=8) == mtp(PROMPT, ours, max_tokens=8)


def test_no_vision_leaves_it_out(seeing, tmp_path):
    """With a head; without one, too, it is kept unless it is left out."""
    assert tower_of(converted(seeing[0], tmp_path / "with", mtp=False)).keys() == tower_of(seeing[0]).keys()
    assert tower_of(converted(seeing[0], tmp_path / "neither", mtp=False, vision=False)) == {}
    without = converted(seeing[0], tmp_path / "without", vision=False)
    assert tower_of(without) == {}
    assert "vision_config" not in config_of(without)
    assert not list(without.glob("*processor_config.json"))
    card = ModelCard.load(without / "README.md")
    assert (card.data.pipeline_tag, "--image" in card.text) == ("text-generation", False)


def test_a_damaged_tower_leaves_nothing(tmp_path):
    folder = add_tower(copied(tmp_path))
    configure(folder, vision_config=VISION_CONFIG | {"depth": 3, "out_hidden_size": 192})
    with pytest.raises(ValueError, match=r"blocks\.2"):
        convert(str(folder), str(tmp_path / "out"))
    assert [*tmp_path.iterdir()] == [folder]
    convert(str(folder), str(tmp_path / "out"), vision=False)


# Failures


@pytest.mark.parametrize("where", ["mkdtemp", "write_text", "save_safetensors"])
def test_errors_name_the_folder_that_the_user_gave(where, tmp_path, monkeypatch):
    def fail(path="", *_, prefix="", **__):
        if where == "save_safetensors":
            raise RuntimeError(f"cannot open {path}")
        raise PermissionError(13, "Permission denied", str(path) or f"{tmp_path}/{prefix}abc")

    monkeypatch.setattr({"mkdtemp": tempfile, "write_text": Path, "save_safetensors": mx}[where], where, fail)
    with pytest.raises(OSError, match=str(tmp_path / "out")) as error:
        convert(str(DENSE), str(tmp_path / "out"))
    assert f"{tmp_path}/." not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("what", "limit"), [("weights", 500_000), ("tokenizer", 250_000), ("a grafted head", 500_000)])
def test_full_disk_is_one_line_and_leaves_nothing(what, limit, tmp_path, capsys):
    source, flags = DENSE, ["-q"]
    if what == "tokenizer":  # larger than the weights
        source = write_tiny(tmp_path / "source", "qwen3_5", dtype=mx.bfloat16, hidden_size=32)
        shutil.copy(DENSE / "tokenizer.json", source)
    if what == "a grafted head":
        source, flags = converted(DENSE, tmp_path / "bare", mtp=False), ["--graft-mtp-from", DENSE, "--skip-check"]
    before = sorted(tmp_path.iterdir())
    capsys.readouterr()
    with full_disk(limit):
        assert "could not be written" in refused(capsys, source, tmp_path / "out", *flags)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("owner", "name", "is_complete"), [(mx, "save_safetensors", False), (Path, "rename", True)], ids=["write", "rename"]
)
def test_an_interrupt_leaves_nothing_or_a_complete_folder(owner, name, is_complete, tmp_path, monkeypatch, capsys):
    """The folder is not there before it is complete, so a kill leaves no half of it (scripts/kill.py)."""
    original, out = getattr(owner, name), tmp_path / "out"

    def interrupted(*args, **kwargs):
        assert not out.exists()
        original(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(owner, name, interrupted)
        assert run(capsys, "--hf-path", DATA / "moe35", "--mlx-path", out)[::2] == (130, "")
    assert [*tmp_path.iterdir()] == [out] * is_complete
    if is_complete:
        mlx_mtp.load(str(out))


# Cards, and the hub


@pytest.mark.parametrize("offline", [False, True])
def test_converts_a_repository_with_its_card(offline, tmp_path, hub, monkeypatch):
    source, name = shutil.copytree(DENSE, tmp_path / "source"), f"org/with-card-{offline}"
    (source / "README.md").write_text("---\nlicense: apache-2.0\ntags: [chat]\n---\n# The original's own text\n")
    commit = hub.publish(name, source)
    if offline:
        fetch(name, None)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    out = converted(name, tmp_path / "out")
    card = ModelCard.load(out / "README.md")
    assert (card.data.license, card.data.base_model, card.data.tags) == ("apache-2.0", name, ["chat", "mlx"])
    assert f"mlx_mtp generate --mtp --model {out}" in card.text
    assert config_of(out)["mlx_mtp"].items() >= {"source": name, "revision": commit}.items()


def test_upload_keeps_the_card_and_the_folder(capsys, tmp_path, hub, monkeypatch):
    status, _, err = run(capsys, "--hf-path", DENSE, "--mlx-path", tmp_path / "out", "--upload-repo", "me/mine")
    assert status == 2
    assert f"{tmp_path / 'out'} is complete, but could not be uploaded to me/mine" in err.splitlines()[-1]
    assert mlx_mtp.load(str(tmp_path / "out"))
    monkeypatch.setattr(conversion, "HfApi", lambda: api)
    bare = converted(DENSE, tmp_path / "bare", mtp=False)
    for source, options in ((DENSE, {}), (bare, {"graft_mtp_from": str(DENSE), "skip_check": True})):
        api = create_autospec(huggingface_hub.HfApi, instance=True)
        out = converted(source, tmp_path / f"of {source.name}", upload_repo="me/mine", **options)
        api.create_repo.assert_called_once_with(repo_id="me/mine", exist_ok=True)
        api.upload_folder.assert_called_once_with(repo_id="me/mine", folder_path=out)
        assert "mlx_mtp generate --mtp --model me/mine" in (out / "README.md").read_text()


def test_ignores_an_unreadable_card(tmp_path, caplog):
    folder = copied(tmp_path)
    texts = b"---\nlicense: [mit\n  foo: : bar\n---\n", b"---\n- a\n---\n", "---\nlicense: é\n---\n".encode("latin-1")
    for i, text in enumerate(texts):
        (folder / "README.md").write_bytes(text)
        out = converted(folder, tmp_path / f"out{i}")
        assert "README.md is ignored" in caplog.text
        assert "mlx_mtp generate --mtp" in (out / "README.md").read_text()
        caplog.clear()


# The command line


run = partial(run_command, main)


def refused(capsys, source, target, *flags):
    status, _, err = run(capsys, "--hf-path", source, "--mlx-path", target, *flags)
    assert (status, err.count("\n")) == (2, 1), err
    return err


def test_the_command_ends_with_the_result_and_the_next_command(capsys, tmp_path):
    status, out, _ = run(capsys, "--hf-path", DENSE, "--mlx-path", tmp_path / "my model")
    assert status == 0
    wrote, following = out.splitlines()[-2:]
    assert re.fullmatch(rf"\[INFO\] Wrote {tmp_path}/my model, [\d.]+ MB", wrote)
    assert following == f"[INFO] Next: `mlx_mtp chat --mtp --model '{tmp_path}/my model'`"
    # Its flags are the function's arguments
    args = vars(convert_parser().parse_args([]))
    assert args.keys() - {"recipe", "inspect"} == signature(convert).parameters.keys()
    assert args["vision"] is True
    assert convert_parser().parse_args(["--no-vision"]).vision is False


def test_bad_arguments_are_refused_before_loading(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(conversion, "load", lambda *_, **__: pytest.fail("loaded"))
    assert "--hf-path is required" in run(capsys, "--mlx-path", tmp_path / "out")[2]
    assert "already exists" in refused(capsys, DENSE, tmp_path)
    assert "is neither a folder nor the name of a repository" in refused(capsys, tmp_path / "none", tmp_path / "out")
    for flags, message in [
        ("-q -d", "either quantize or dequantize"),
        ("-q --q-mode mxfp4 --quant-predicate mixed_3_6", "only support 'affine'"),
        *((f"--graft-mtp-from x {flag}", "omit the flags") for flag in ("-q", "-d", "--no-mtp", "--no-vision")),
        ("--graft-vision-from x --adapter-path x", "A graft converts nothing: omit the flags of a conversion"),
        (f"--graft-mtp-from {DATA}/moe35", "model_type is qwen3_5_moe, not qwen3_5"),
        ("--graft-mtp-from no/such-model", "the hub has no repository of that name"),
        ("-q --q-group-size 48", "with --q-group-size 48: .* The supported group sizes are 32, 64, and 128"),
        ("-q --q-group-size 0", "--q-group-size must be 1 or more, not 0"),
        ("-q --q-bits 7", "with --q-bits 7: .* bits 7 is not supported"),
        ("-q --q-mode mxfp4 --q-group-size 64", "with --q-group-size 64 --q-mode mxfp4: .* requires group size 32"),
        ("-q --quant-predicate mixed_3_6 --q-bits 4", "mixed_3_6 has 3 bits or more, not --q-bits 4: omit one"),
        ("--quant-predicate mixed_3_6", "--quant-predicate requires --quantize"),
        ("-q --mtp-bits 4", "error: The head stays in bfloat16: leave out --mtp-bits"),
        ("-q --mtp-group-size=64", "error: The head stays in bfloat16: leave out --mtp-group-size=64; other commands"),
    ]:
        assert re.search(message, refused(capsys, DENSE, tmp_path / "out", *flags.split())), flags
        assert list(tmp_path.iterdir()) == []
    for flag in ("--hf-path", "--mlx-path", "--graft-mtp-from", "--inspect"):
        error = refused(capsys, DENSE, tmp_path / "out", flag, f"{tmp_path}/\udcff")
        assert "is not UTF-8, and MLX takes no other: rename it" in error, flag
        assert list(tmp_path.iterdir()) == []


def test_a_quantization_that_changes_nothing_is_refused(capsys, tmp_path):
    write_tiny(tmp_path / "narrow", "qwen3_5", dtype=mx.bfloat16, vocab_size=4096)  # its widths are 64
    converted(tmp_path / "narrow", tmp_path / "done", quantize=True)
    for source, flags, message in (
        ("narrow", "-q --q-group-size 128", "no layer's width is a multiple of --q-group-size 128"),
        ("done", "-q --q-bits 8", "it is quantized already, so give the base model, or --dequantize first"),
    ):
        status, _, err = run(capsys, "--hf-path", tmp_path / source, "--mlx-path", tmp_path / "out", *flags.split())
        assert (status, err.splitlines()[-1]) == (2, f"mlx_mtp convert: error: Nothing would be quantized: {message}.")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("width", "flags", "message"),
    [
        (96, "-q", "since 64 does not divide their widths: {}; --q-group-size 32 would quantize them"),
        (48, "-q", "since 64 does not divide their widths: {}; nor does another group size"),
        (80, "-q --q-mode mxfp4", "since 32 does not divide their widths: {}; nor does another group size"),
        (96, "-q --q-group-size 32", None),
    ],
)
def test_modules_that_stay_in_16_bits_are_in_one_line(width, flags, message, capsys, tmp_path):
    write_tiny(tmp_path / "model", "qwen3_5", dtype=mx.bfloat16, intermediate_size=width)
    _, out, _ = run(capsys, "--hf-path", tmp_path / "model", "--mlx-path", tmp_path / "out", *flags.split())
    said = [line for line in out.splitlines() if "Not quantized" in line]
    layer = "language_model.model.layers.*.mlp.down_proj"
    assert said == ([] if message is None else [f"[INFO] Not quantized, {message.format(layer)}"])
    assert (f"{layer.replace('*', '0')}.scales" in tensors(tmp_path / "out")) == (message is None)


# --inspect describes a checkpoint without its weights


def size_of(weights):
    return f"{len(weights)} tensors, {size(sum(w.nbytes for w in weights.values()))}"


@pytest.fixture
def unmeasured(monkeypatch, tmp_path_factory):
    """No acceptance rate is kept of a load in another test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


RAW = [(name, where) for where in ("local", "hub") for name in ("dense", "moe35", "moe36", "next")]


@pytest.mark.parametrize(("name", "where"), RAW if LONG else [RAW[0], RAW[-3]])
def test_describes_a_raw_checkpoint(name, where, hub, unmeasured, capsys):
    folder = DATA / name
    commit, head = hub.publish(f"inspected/{name}", folder), size_of(head_of(folder))
    status, out, err = run(capsys, "--inspect", f"inspected/{name}" if where == "hub" else folder)
    assert (status, err) == (0, "")
    lines = report(out)
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


def test_describes_converted_checkpoints(tmp_path, unmeasured):
    lines = report(inspect(str(converted(DATA / "moe35", tmp_path / "q", **FORMATS["4 bit"]))))
    assert re.fullmatch(r"4 bits in groups of 32 \(affine\).*, converted \(norms shifted\)", lines["Backbone"])
    assert lines["MTP head"].endswith("converted (norms shifted)")
    assert lines["--mtp"] == "ready"
    lines = report(inspect(str(converted(DATA / "next", tmp_path / "next"))))
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


def test_inspects_towers(hub, tmp_path, unmeasured):
    hub.publish("inspected/seeing", folder := add_tower(copied(tmp_path)))
    for name in (str(folder), "inspected/seeing"):
        lines = report(inspect(name))
        assert (lines["Vision"], lines["--mtp"]) == (size_of(tower_of(folder)), "ready")
