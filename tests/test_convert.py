"""Conversion: the head is kept bit for bit, the folder appears when it is complete, and plain mlx-lm loads it."""

import json
import re
import shutil
import tempfile
from inspect import signature
from itertools import product
from pathlib import Path
from unittest.mock import create_autospec

import huggingface_hub
import mlx.core as mx
import mlx_lm
import pytest
from huggingface_hub import ModelCard
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

import mlx_mtp
from mlx_mtp.checkpoint.originals import head
from mlx_mtp.checkpoint.originals.head import measure_acceptance
from mlx_mtp.checkpoint.storage.hub import fetch
from mlx_mtp.convert import card, conversion, convert
from mlx_mtp.convert.__main__ import main, make_parser
from mlx_mtp.images.tower import PATCH_KERNEL, split_tower
from mlx_mtp.layers.mtp import split_head
from tests.support.checkpoints import BAD, BAD_IDS, configure, copied, full_disk, tensors, write
from tests.support.commands import run_command
from tests.support.decoding import mtp, plain
from tests.support.images import VISION_CONFIG, add_tower, picture
from tests.support.models import DATA, tiny_config, tiny_model

PROMPT = [5, 40, 3, 300, 12, 7, 9]


def expected_head(folder) -> dict[str, mx.array]:
    """A raw checkpoint's head with its norms shifted, in float32 rounded once, and its experts stacked."""
    _, raw = split_head(tensors(folder))
    head, stacks = {}, {}
    for name, w in raw.items():
        if ".experts." not in name:
            head[name] = (w.astype(mx.float32) + 1).astype(w.dtype) if w.ndim == 1 else w
        elif name.endswith("gate_up_proj"):
            half = w.shape[1] // 2
            head["layers.0.mlp.switch_mlp.gate_proj.weight"] = w[:, :half]
            head["layers.0.mlp.switch_mlp.up_proj.weight"] = w[:, half:]
        elif name.endswith("experts.down_proj"):
            head["layers.0.mlp.switch_mlp.down_proj.weight"] = w
        else:
            *_, e, projection, _ = name.split(".")
            stacks.setdefault(projection, {})[int(e)] = w
    for projection, experts in stacks.items():
        head[f"layers.0.mlp.switch_mlp.{projection}.weight"] = mx.stack([experts[e] for e in sorted(experts)])
    return head


FORMATS = {
    "bfloat16": {},
    "4 bit": {"quantize": True, "q_bits": 4, "q_group_size": 32},
    "8 bit": {"quantize": True, "q_bits": 8, "q_group_size": 32},
    "mxfp4": {"quantize": True, "q_mode": "mxfp4"},
    "nvfp4": {"quantize": True, "q_mode": "nvfp4"},
    "mxfp8": {"quantize": True, "q_mode": "mxfp8"},
    "mixed": {"quantize": True, "q_bits": 3, "q_group_size": 32, "quant_predicate": "mixed_3_6"},
}


# Each checkpoint and each way to quantize; moe36 is moe35 but for the layout of its experts.
FEW = {("dense", "bfloat16"), ("dense", "mxfp4"), ("dense", "mixed"), ("moe35", "bfloat16"), ("moe35", "4 bit")}
FEW |= {("moe36", "bfloat16"), ("next", "4 bit"), ("next", "mixed")}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id="-".join(case), marks=() if case in FEW else pytest.mark.slow)
        for case in product(("dense", "moe35", "moe36", "next"), FORMATS)
    ],
)
def converted(request, tmp_path_factory):
    """A conversion of each checkpoint in each format: (its name, the format's, the folder)."""
    name, form = request.param
    out = tmp_path_factory.mktemp(name) / "out"
    convert(str(DATA / name), str(out), **FORMATS[form])
    return name, form, out


def test_head_is_unchanged(converted):
    name, form, out = converted
    backbone, head = split_head(tensors(out))
    want = expected_head(DATA / name)
    assert head.keys() == want.keys()
    for key, w in want.items():
        assert head[key].dtype == w.dtype == mx.bfloat16
        assert mx.array_equal(head[key], w), key
    assert any(key.endswith(".scales") for key in backbone) == (form != "bfloat16")
    config = json.loads((out / "config.json").read_text())
    assert config["mlx_mtp"] == {
        "source": str(DATA / name),
        "revision": None,
        "dtype": "bfloat16",
        "bits": None,
        "norms_shifted": True,
    }
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == tensors(out).keys()


def test_plain_mlx_lm_loads_it_and_generates_the_same(converted):
    """In float32, the only dtype in which MLX's CPU backend runs experts."""
    _, _, out = converted
    stock, ours = mlx_lm.load(str(out))[0], mlx_mtp.load(str(out))[0]
    assert type(stock).__module__.startswith("mlx_lm.")
    for model in (stock, ours):
        model.set_dtype(mx.float32)
    assert mtp(PROMPT, ours, max_tokens=12, num_draft_tokens=3) == plain(PROMPT, stock, max_tokens=12)


def test_converts_a_conversion(tmp_path):
    convert(str(DATA / "dense"), str(tmp_path / "once"))
    convert(str(tmp_path / "once"), str(tmp_path / "twice"), quantize=True)
    _, once = split_head(tensors(tmp_path / "once"))
    _, twice = split_head(tensors(tmp_path / "twice"))
    assert all(mx.array_equal(once[name], twice[name]) for name in once | twice)
    # The origin of the head is still the first source.
    records = [json.loads((tmp_path / name / "config.json").read_text())["mlx_mtp"] for name in ("once", "twice")]
    assert records[0] == records[1]
    assert records[0]["source"] == str(DATA / "dense")


def test_mtp_bits_quantizes_only_the_heads_layer(tmp_path):
    convert(str(DATA / "moe35"), str(tmp_path / "out"), dtype="float32", mtp_bits=8, mtp_group_size=32, skip_check=True)
    _, head = split_head(tensors(tmp_path / "out"))
    assert "fc.scales" not in head
    assert "layers.0.self_attn.q_proj.scales" in head
    assert not any(name.endswith(".scales") for name in split_head(tensors(tmp_path / "out"))[0])

    convert(
        str(DATA / "moe35"), str(tmp_path / "q"), dtype="float32", quantize=True, q_group_size=32, mtp_bits=8,
        mtp_group_size=32, skip_check=True,
    )  # fmt: skip
    model, _ = mlx_mtp.load(str(tmp_path / "q"))
    mlp = model.mtp.layers[0].mlp
    assert not hasattr(model.mtp.fc, "scales")
    assert not hasattr(mlp.gate, "scales")
    assert not hasattr(mlp.shared_expert_gate, "scales")
    assert mlp.switch_mlp.up_proj.bits == 8
    assert not isinstance(mlp.switch_mlp.up_proj, SwitchLinear)
    assert model.layers[0].mlp.gate.bits == 8
    assert model.layers[0].linear_attn.in_proj_z.bits == 4


def test_dtype_casts_the_head(tmp_path):
    convert(str(DATA / "dense"), str(tmp_path / "out"), dtype="float16")
    _, head = split_head(tensors(tmp_path / "out"))
    assert {w.dtype for w in head.values()} == {mx.float16}


def test_converts_without_a_head(tmp_path):
    convert(str(DATA / "dense"), str(tmp_path / "out"), mtp=False)
    assert split_head(tensors(tmp_path / "out"))[1] == {}
    with pytest.raises(ValueError, match="has no MTP head"):
        convert(str(tmp_path / "out"), str(tmp_path / "again"))
    assert not (tmp_path / "again").exists()


# The vision tower


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """The dense checkpoint with a vision tower: (as published, converted to 8 bit)."""
    folder = tmp_path_factory.mktemp("seeing")
    original = add_tower(copied(folder))
    (original / "video_preprocessor_config.json").write_text("{}")
    convert(str(original), str(folder / "out"), quantize=True, q_bits=8, q_group_size=32)
    return original, folder / "out"


def tower_of(folder):
    return split_tower(tensors(folder))[1]


def test_the_tower_is_kept_as_it_was(seeing):
    original, out = seeing
    before, after = tower_of(original), tower_of(out)
    before[PATCH_KERNEL] = before[PATCH_KERNEL].transpose(0, 2, 3, 4, 1)  # channels last, as in MLX
    assert before.keys() == after.keys()
    assert all(w.dtype == mx.bfloat16 and mx.array_equal(w, before[name]) for name, w in after.items())
    assert all(name.startswith("vision_tower.") for name in tensors(out) if "language_model" not in name)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(out).keys()
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in tensors(out).values())
    for name in ("vision_config", "image_token_id", "vision_start_token_id"):
        assert (
            json.loads((out / "config.json").read_text())[name]
            == json.loads((original / "config.json").read_text())[name]
        )
    assert (out / "preprocessor_config.json").read_bytes() == (original / "preprocessor_config.json").read_bytes()
    card = ModelCard.load(out / "README.md")
    assert card.data.pipeline_tag == "image-text-to-text"
    assert f"mlx_mtp generate --mtp --model {out} --image" in card.text


def test_an_image_has_the_same_rows_after_conversions(seeing, tmp_path):
    original, out = seeing
    convert(str(out), str(tmp_path / "again"), dequantize=True)
    rows = []
    for folder in (original, out, tmp_path / "again"):
        images = mlx_mtp.load(str(folder))[0].vision
        rows.append(images.tower(images.processor.preprocess_image(picture())))
    assert mx.array_equal(rows[0], rows[1])
    assert mx.array_equal(rows[0], rows[2])


def test_plain_mlx_lm_loads_a_checkpoint_with_a_tower(seeing):
    stock, ours = mlx_lm.load(str(seeing[1]))[0], mlx_mtp.load(str(seeing[1]))[0]
    assert plain(PROMPT, stock, max_tokens=8) == mtp(PROMPT, ours, max_tokens=8)


@pytest.mark.parametrize("options", [{}, {"mtp": False}], ids=["with a head", "without"])
def test_no_vision_leaves_it_out(seeing, tmp_path, options):
    original, _ = seeing
    convert(str(original), str(tmp_path / "with"), **options)
    convert(str(original), str(tmp_path / "without"), vision=False, **options)
    assert tower_of(tmp_path / "with").keys() == tower_of(original).keys()
    assert tower_of(tmp_path / "without") == {}
    assert "vision_config" not in json.loads((tmp_path / "without" / "config.json").read_text())
    assert not list((tmp_path / "without").glob("*processor_config.json"))
    card = ModelCard.load(tmp_path / "without" / "README.md")
    assert card.data.pipeline_tag == "text-generation"
    assert "--image" not in card.text


def test_the_commands_flags_are_the_functions_arguments():
    args = vars(make_parser().parse_args([]))
    assert args.keys() - {"recipe", "inspect"} == signature(convert).parameters.keys()
    assert args["vision"] is True
    assert vars(make_parser().parse_args(["--no-vision"]))["vision"] is False


def test_a_damaged_tower_leaves_nothing(tmp_path):
    folder = add_tower(copied(tmp_path))
    configure(folder, vision_config=VISION_CONFIG | {"depth": 3, "out_hidden_size": 192})
    with pytest.raises(ValueError, match=r"blocks\.2"):
        convert(str(folder), str(tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    convert(str(folder), str(tmp_path / "out"), vision=False)


def test_rejects_an_existing_target(tmp_path):
    with pytest.raises(ValueError, match="already exists"):
        convert(str(DATA / "dense"), str(tmp_path))


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError("No space left on device")])
def test_failure_leaves_nothing(failure, tmp_path, monkeypatch):
    n_files = 0
    save = mx.save_safetensors

    def fail(file, weights, **kwargs):
        nonlocal n_files
        n_files += 1
        if n_files == 2:
            raise failure
        save(file, weights, **kwargs)

    monkeypatch.setattr(mx, "save_safetensors", fail)
    with pytest.raises((KeyboardInterrupt, OSError)):
        convert(str(DATA / "moe35"), str(tmp_path / "out"))
    assert n_files == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["mkdtemp", "write_text", "save_safetensors"])
def test_errors_name_the_folder_that_the_user_gave(where, tmp_path, monkeypatch):
    """It is written under another name at first."""

    def fail(path="", *_, prefix="", **__):
        if where == "save_safetensors":
            raise RuntimeError(f"cannot open {path}")
        raise PermissionError(13, "Permission denied", str(path) or f"{tmp_path}/{prefix}abc")

    owner = {"mkdtemp": tempfile, "write_text": Path, "save_safetensors": mx}[where]
    monkeypatch.setattr(owner, where, fail)
    with pytest.raises(OSError, match=str(tmp_path / "out")) as error:
        convert(str(DATA / "dense"), str(tmp_path / "out"))
    assert f"{tmp_path}/." not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_truncated_shard_leaves_nothing(tmp_path):
    shutil.copytree(DATA / "moe35", tmp_path / "source")
    shard = tmp_path / "source" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="truncated"):
        convert(str(tmp_path / "source"), str(tmp_path / "out"))
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_next_without_head_names_no_head_file(tmp_path):
    convert(str(DATA / "next"), str(tmp_path / "with"))
    convert(str(tmp_path / "with"), str(tmp_path / "without"), mtp=False)
    config = json.loads((tmp_path / "without" / "config.json").read_text())
    assert not config.keys() & {"mlx_lm_extra_tensors", "mlx_mtp", "mtp_num_hidden_layers"}
    with pytest.raises(ValueError, match="has no MTP head"):
        mlx_mtp.load(str(tmp_path / "without"))
    mlx_lm.load(str(tmp_path / "without"))


@pytest.mark.parametrize("offline", [False, True])
def test_converts_a_repository_with_its_card(offline, tmp_path, hub, monkeypatch):
    source = shutil.copytree(DATA / "dense", tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: apache-2.0\ntags: [chat]\n---\n# The original's own text\n")
    name = f"org/with-card-{offline}"
    commit = hub.publish(name, source)
    if offline:
        fetch(name, None)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    convert(name, str(tmp_path / "out"))
    card = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.base_model, card.data.tags) == ("apache-2.0", name, ["chat", "mlx"])
    assert f"mlx_mtp generate --mtp --model {tmp_path / 'out'}" in card.text
    record = json.loads((tmp_path / "out" / "config.json").read_text())["mlx_mtp"]
    assert (record["source"], record["revision"]) == (name, commit)


@pytest.mark.parametrize("graft", [False, True])
def test_upload_keeps_the_card(graft, tmp_path, monkeypatch):
    api = create_autospec(huggingface_hub.HfApi, instance=True)
    monkeypatch.setattr(card, "HfApi", lambda: api)
    convert(str(DATA / "dense"), str(tmp_path / "bare"), mtp=False)
    options = {"graft_mtp_from": str(DATA / "dense"), "skip_check": True} if graft else {}
    convert(
        str(tmp_path / "bare" if graft else DATA / "dense"), str(tmp_path / "out"), upload_repo="me/mine", **options
    )
    api.create_repo.assert_called_once_with(repo_id="me/mine", exist_ok=True)
    api.upload_folder.assert_called_once_with(repo_id="me/mine", folder_path=tmp_path / "out")
    assert "mlx_mtp generate --mtp --model me/mine" in (tmp_path / "out" / "README.md").read_text()


def test_failed_upload_keeps_the_folder(capsys, tmp_path, hub):
    status, _, err = run(
        capsys, "--hf-path", DATA / "dense", "--mlx-path", tmp_path / "out", "--upload-repo", "me/mine"
    )
    assert status == 2
    assert f"{tmp_path / 'out'} is complete, but could not be uploaded to me/mine" in err.splitlines()[-1]
    assert mlx_mtp.load(str(tmp_path / "out"))


@pytest.mark.parametrize(
    "card", [b"---\nlicense: [mit\n  foo: : bar\n---\n", b"---\n- a\n---\n", "---\nlicense: é\n---\n".encode("latin-1")]
)
def test_ignores_an_unreadable_card(card, tmp_path, caplog):
    folder = copied(tmp_path)
    (folder / "README.md").write_bytes(card)
    convert(str(folder), str(tmp_path / "out"))
    assert "README.md is ignored" in caplog.text
    assert "mlx_mtp generate --mtp" in (tmp_path / "out" / "README.md").read_text()


def test_prints_the_cost_of_mtp_bits(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(conversion, "COST_TOKENS", 12)
    monkeypatch.setattr(head, "PYTHON", head.PYTHON[1:2])
    convert(str(DATA / "dense"), str(tmp_path / "out"), mtp_bits=2, mtp_group_size=32)
    printed = capsys.readouterr().out
    few, full = (measure_acceptance(*mlx_mtp.load(str(p)), 12) for p in (tmp_path / "out", DATA / "dense"))
    assert few != full
    assert f"Drafts accepted: {few:.0%} with the head at 2 bits, {full:.0%} with it in bfloat16" in printed


# The command line


def run(capsys, *args):
    """In this process: (exit status, stdout, stderr)."""
    return run_command(main, capsys, *args)


def test_the_command_ends_with_the_result_and_the_next_command(capsys, tmp_path):
    status, out, _ = run(capsys, "--hf-path", DATA / "dense", "--mlx-path", tmp_path / "my model")
    assert status == 0
    wrote, following = out.splitlines()[-2:]
    assert re.fullmatch(rf"\[INFO\] Wrote {tmp_path}/my model, [\d.]+ MB", wrote)
    assert following == f"[INFO] Next: `mlx_mtp chat --mtp --model '{tmp_path}/my model'`"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [*((bad[0], bad[2]) for bad in BAD), (shutil.rmtree, "is neither a folder nor the name of a repository")],
    ids=[*BAD_IDS, "no folder"],
)
def test_bad_input_is_one_line(spoil, message, capsys, tmp_path):
    folder = copied(tmp_path)
    spoil(folder)
    status, _, err = run(capsys, "--hf-path", folder, "--mlx-path", tmp_path / "new" / "out")
    assert (status, err.count("\n")) == (2, 1), err
    assert re.search(message, err)
    assert "Traceback" not in err
    assert not any(p.name != "model" for p in tmp_path.iterdir())


def test_bad_arguments_are_one_line(capsys, tmp_path):
    model, out = ["--hf-path", DATA / "dense"], ["--mlx-path", tmp_path / "out"]
    for args, message in [
        (out, "--hf-path is required"),
        ([*model, "--mlx-path", tmp_path], "already exists"),
        ([*model, *out, "-q", "-d"], "either quantize or dequantize"),
        ([*model, *out, "--mtp-bits", 4, "--no-mtp"], "either --mtp-bits or --no-mtp"),
        ([*model, *out, "-q", "--q-bits", 7], "7"),
        ([*model, *out, "-q", "--q-mode", "mxfp4", "--quant-predicate", "mixed_3_6"], "only support 'affine'"),
        ([*model, *out, "--graft-mtp-from", DATA / "dense", "-q"], "omit the flags of a conversion"),
        ([*model, *out, "--graft-mtp-from", DATA / "moe35"], "model_type is qwen3_5_moe, not qwen3_5"),
        ([*model, *out, "--graft-mtp-from", "no/such-model"], "the hub has no repository of that name"),
    ]:
        status, _, err = run(capsys, *args)
        assert (status, err.count("\n")) == (2, 1), (args, err)
        assert message in err
        assert list(tmp_path.iterdir()) == []


def test_a_quantization_that_mlx_lacks_is_refused_before_loading(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(conversion, "load", lambda *_, **__: pytest.fail("loaded"))
    model = ["--hf-path", DATA / "dense", "--mlx-path", tmp_path / "out"]
    for flags, message in [
        ("-q --q-group-size 48", "with --q-group-size 48: .* The supported group sizes are 32, 64, and 128"),
        ("-q --q-group-size 0", "--q-group-size must be 1 or more, not 0"),
        ("-q --q-group-size -32", "--q-group-size must be 1 or more, not -32"),
        ("-q --q-bits 7", "with --q-bits 7: .* bits 7 is not supported"),
        ("-q --q-bits 0", "with --q-bits 0: .* bits 0 is not supported"),
        ("-q --q-mode mxfp4 --q-group-size 64", "with --q-group-size 64: .* requires group size 32 but got 64"),
        ("-q --q-mode mxfp8 --q-bits 4", "with --q-bits 4: .* requires bits to be 8 but got 4"),
        ("-q --quant-predicate mixed_3_6 --q-bits 4", "mixed_3_6 has 3 bits or more, not --q-bits 4: omit one"),
        ("--mtp-bits 7", "with --mtp-group-size 64 --mtp-bits 7: "),
        ("--mtp-bits 8 --mtp-group-size 48", "with --mtp-group-size 48 --mtp-bits 8: "),
        ("--mtp-group-size 32", "--mtp-group-size requires --mtp-bits"),
        ("--q-bits 4", "--q-bits requires --quantize"),
        ("--q-group-size 64", "--q-group-size requires --quantize"),
        ("--q-mode mxfp4", "--q-mode requires --quantize"),
        ("--quant-predicate mixed_3_6", "--quant-predicate requires --quantize"),
    ]:
        status, _, err = run(capsys, *model, *flags.split())
        assert (status, err.count("\n")) == (2, 1), (flags, err)
        assert re.search(message, err), (flags, err)
        assert list(tmp_path.iterdir()) == []


def test_a_quantization_that_changes_nothing_is_refused(capsys, tmp_path):
    narrow = dict(tree_flatten(tiny_model("qwen3_5", vocab_size=4096, dtype=mx.bfloat16).parameters()))
    write(tmp_path / "narrow", tiny_config("qwen3_5", vocab_size=4096), narrow)  # its widths are 64
    convert(str(tmp_path / "narrow"), str(tmp_path / "done"), quantize=True, mtp_bits=8, skip_check=True)
    for source, flags, message in [
        ("narrow", "-q --q-group-size 128", "no layer's width is a multiple of --q-group-size 128"),
        ("narrow", "-q --mtp-bits 8 --mtp-group-size 128", "no layer's width is a multiple of --mtp-group-size 128"),
        ("done", "-q --q-bits 8", "it is quantized already, so give the original, or --dequantize first"),
        ("done", "--mtp-bits 4", "it is quantized already, so give the original, or --dequantize first"),
    ]:
        status, _, err = run(capsys, "--hf-path", tmp_path / source, "--mlx-path", tmp_path / "out", *flags.split())
        assert (status, err.splitlines()[-1]) == (2, f"mlx_mtp convert: error: Nothing would be quantized: {message}.")
        assert not (tmp_path / "out").exists()


def test_the_heads_group_size_is_its_own(tmp_path):
    """The backbone's, 64 by default, does not say which layers of the head can be quantized."""
    config = tiny_config("qwen3_5", vocab_size=4096, hidden_size=96)
    model = tiny_model("qwen3_5", vocab_size=4096, hidden_size=96, dtype=mx.bfloat16)
    write(tmp_path / "source", config, dict(tree_flatten(model.parameters())))
    convert(str(tmp_path / "source"), str(tmp_path / "out"), mtp_bits=8, mtp_group_size=32, skip_check=True)
    backbone, head = split_head(tensors(tmp_path / "out"))
    assert {f"layers.0.self_attn.{name}_proj.scales" for name in "qkvo"} <= head.keys()
    assert not any(name.endswith(".scales") for name in backbone)
    assert mlx_mtp.load(str(tmp_path / "out"))[0].mtp.layers[0].self_attn.q_proj.group_size == 32
    mlx_lm.load(str(tmp_path / "out"))


@pytest.mark.parametrize(("what", "limit"), [("weights", 500_000), ("tokenizer", 250_000), ("a grafted head", 500_000)])
def test_full_disk_is_one_line_and_leaves_nothing(what, limit, tmp_path, capsys):
    source, args = DATA / "dense", ["-q"]
    if what == "tokenizer":  # larger than the weights
        weights = dict(tree_flatten(tiny_model("qwen3_5", hidden_size=32, dtype=mx.bfloat16).parameters()))
        source = write(tmp_path / "source", tiny_config("qwen3_5", hidden_size=32), weights)
        shutil.copy(DATA / "dense" / "tokenizer.json", source)
    if what == "a grafted head":
        convert(str(source), str(tmp_path / "bare"), mtp=False)
        source, args = tmp_path / "bare", ["--graft-mtp-from", source, "--skip-check"]
        capsys.readouterr()
    before = sorted(tmp_path.iterdir())
    with full_disk(limit):
        status, _, err = run(capsys, "--hf-path", source, *args, "--mlx-path", tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1), err
    assert "could not be written" in err
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
    assert sorted(tmp_path.iterdir()) == [out] * is_complete
    if is_complete:
        mlx_mtp.load(str(out))


@pytest.mark.parametrize("flag", ["--hf-path", "--mlx-path", "--graft-mtp-from", "--inspect"])
def test_path_not_utf_8_is_one_line(flag, tmp_path, capsys):
    flags = {"--hf-path": DATA / "dense", "--mlx-path": tmp_path / "out", flag: f"{tmp_path}/\udcff"}
    args = [x for pair in flags.items() for x in pair]
    status, _, err = run(capsys, *args)
    assert (status, err.count("\n")) == (2, 1)
    assert "is not UTF-8, and MLX takes no other: rename it" in err
    assert list(tmp_path.iterdir()) == []
