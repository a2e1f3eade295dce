"""Conversion: the head is kept bit for bit, the folder appears whole, and plain mlx-lm loads it too."""

import json
import re
import shutil
import subprocess
import sys
import time
from unittest.mock import create_autospec

import huggingface_hub
import mlx.core as mx
import mlx_lm
import pytest
from checkpoints import BAD, BAD_IDS, copied, write
from helpers import DATA, plain, tensors, tiny_config, tiny_model
from kill import start_conversion
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

import mlx_mtp
from mlx_mtp.checkpoint.hub import fetch
from mlx_mtp.convert import convert, output
from mlx_mtp.convert.__main__ import main
from mlx_mtp.convert.graft import measure_acceptance
from mlx_mtp.models.mtp import split_head

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


QUANTIZED = [
    pytest.param({}, id="bfloat16"),
    pytest.param({"quantize": True, "q_bits": 4, "q_group_size": 32}, id="4 bit"),
    pytest.param({"quantize": True, "q_bits": 8, "q_group_size": 32}, id="8 bit"),
    pytest.param({"quantize": True, "q_mode": "mxfp4"}, id="mxfp4"),
    pytest.param({"quantize": True, "q_mode": "nvfp4"}, id="nvfp4"),
    pytest.param({"quantize": True, "q_mode": "mxfp8"}, id="mxfp8"),
    pytest.param({"quantize": True, "q_bits": 3, "q_group_size": 32, "quant_predicate": "mixed_3_6"}, id="mixed"),
]


@pytest.mark.parametrize("name", ["dense", "moe35", "moe36", "next"])
@pytest.mark.parametrize("options", QUANTIZED)
def test_the_head_is_the_sources_bit_for_bit(name, options, tmp_path):
    convert(str(DATA / name), str(tmp_path / "out"), **options)
    backbone, head = split_head(tensors(tmp_path / "out"))
    want = expected_head(DATA / name)
    assert head.keys() == want.keys()
    for key, w in want.items():
        assert head[key].dtype == w.dtype == mx.bfloat16
        assert mx.array_equal(head[key], w), key
    assert any(key.endswith(".scales") for key in backbone) == ("quantize" in options)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["mlx_mtp"] == {
        "source": str(DATA / name),
        "revision": None,
        "dtype": "bfloat16",
        "bits": None,
        "norms_shifted": True,
    }
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == tensors(tmp_path / "out").keys()


@pytest.mark.parametrize("name", ["dense", "moe35", "moe36", "next"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"q_bits": 4, "q_group_size": 32},
        {"q_bits": 8, "q_group_size": 32},
        {"q_mode": "mxfp4"},
        {"q_mode": "nvfp4"},
        {"q_mode": "mxfp8"},
    ],
    ids=["not quantized", "4 bit", "8 bit", "mxfp4", "nvfp4", "mxfp8"],
)
def test_plain_mlx_lm_loads_it_and_generates_the_same(name, options, tmp_path):
    """In float32, since MLX's CPU backend has no other for experts."""
    options = {"quantize": True, **options} if options else {}
    convert(str(DATA / name), str(tmp_path / "out"), dtype="float32", **options)
    stock, _ = mlx_lm.load(str(tmp_path / "out"))
    assert type(stock).__module__.startswith("mlx_lm.")
    ours, _ = mlx_mtp.load(str(tmp_path / "out"))
    want = plain(PROMPT, stock, max_tokens=30)
    assert plain(PROMPT, ours, max_tokens=30) == want
    steps = mlx_mtp.mtp_generate_step(mx.array(PROMPT), ours, max_tokens=30, num_draft_tokens=3)
    assert [token for token, _, _ in steps] == want


def test_a_converted_checkpoint_can_be_converted_again(tmp_path):
    convert(str(DATA / "dense"), str(tmp_path / "once"))
    convert(str(tmp_path / "once"), str(tmp_path / "twice"), quantize=True)
    _, once = split_head(tensors(tmp_path / "once"))
    _, twice = split_head(tensors(tmp_path / "twice"))
    assert all(mx.array_equal(once[name], twice[name]) for name in once | twice)
    # The head still comes from where it came from.
    records = [json.loads((tmp_path / name / "config.json").read_text())["mlx_mtp"] for name in ("once", "twice")]
    assert records[0] == records[1]
    assert records[0]["source"] == str(DATA / "dense")


def test_the_heads_layer_is_quantized_where_asked_for_and_nothing_else_of_it(tmp_path):
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


def test_float16_is_for_the_head_too(tmp_path):
    convert(str(DATA / "dense"), str(tmp_path / "out"), dtype="float16")
    _, head = split_head(tensors(tmp_path / "out"))
    assert {w.dtype for w in head.values()} == {mx.float16}


def test_without_a_head(tmp_path):
    convert(str(DATA / "dense"), str(tmp_path / "out"), mtp=False)
    assert split_head(tensors(tmp_path / "out"))[1] == {}
    with pytest.raises(ValueError, match="has no MTP head"):
        convert(str(tmp_path / "out"), str(tmp_path / "again"))
    assert not (tmp_path / "again").exists()


def test_an_existing_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match="already exists"):
        convert(str(DATA / "dense"), str(tmp_path))


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError("No space left on device")])
def test_a_conversion_that_ends_early_leaves_nothing(failure, tmp_path, monkeypatch):
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


def test_a_shard_cut_short_leaves_nothing(tmp_path):
    shutil.copytree(DATA / "moe35", tmp_path / "source")
    shard = tmp_path / "source" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="cut short"):
        convert(str(tmp_path / "source"), str(tmp_path / "out"))
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_converted_next_without_its_head_names_no_file_of_it(tmp_path):
    convert(str(DATA / "next"), str(tmp_path / "with"))
    convert(str(tmp_path / "with"), str(tmp_path / "without"), mtp=False)
    config = json.loads((tmp_path / "without" / "config.json").read_text())
    assert not config.keys() & {"mlx_lm_extra_tensors", "mlx_mtp", "mtp_num_hidden_layers"}
    with pytest.raises(ValueError, match="has no MTP head"):
        mlx_mtp.load(str(tmp_path / "without"))
    mlx_lm.load(str(tmp_path / "without"))


@pytest.mark.parametrize("offline", [False, True])
def test_a_repository_is_converted_with_its_card(offline, tmp_path, hub, monkeypatch):
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
    assert f"mlx_mtp.generate --mtp --model {tmp_path / 'out'}" in card.text
    record = json.loads((tmp_path / "out" / "config.json").read_text())["mlx_mtp"]
    assert (record["source"], record["revision"]) == (name, commit)


@pytest.mark.parametrize("graft", [False, True])
def test_an_upload_keeps_what_the_card_says_of_the_head(graft, tmp_path, monkeypatch):
    api = create_autospec(huggingface_hub.HfApi, instance=True)
    monkeypatch.setattr(output, "HfApi", lambda: api)
    convert(str(DATA / "dense"), str(tmp_path / "bare"), mtp=False)
    options = {"graft_mtp_from": str(DATA / "dense"), "skip_check": True} if graft else {}
    convert(
        str(tmp_path / "bare" if graft else DATA / "dense"), str(tmp_path / "out"), upload_repo="me/mine", **options
    )
    api.create_repo.assert_called_once_with(repo_id="me/mine", exist_ok=True)
    api.upload_folder.assert_called_once_with(repo_id="me/mine", folder_path=tmp_path / "out")
    assert "mlx_mtp.generate --mtp --model me/mine" in (tmp_path / "out" / "README.md").read_text()


def test_an_upload_that_fails_says_that_the_folder_is_complete(monkeypatch, capsys, tmp_path, hub):
    status, _, err = run(
        monkeypatch, capsys, "--hf-path", DATA / "dense", "--mlx-path", tmp_path / "out", "--upload-repo", "me/mine"
    )
    assert status == 2
    assert f"{tmp_path / 'out'} is complete, but could not be uploaded to me/mine" in err.splitlines()[-1]
    assert mlx_mtp.load(str(tmp_path / "out"))


@pytest.mark.parametrize(
    "card", [b"---\nlicense: [mit\n  foo: : bar\n---\n", b"---\n- a\n---\n", "---\nlicense: é\n---\n".encode("latin-1")]
)
def test_a_card_that_cannot_be_read_is_left_aside(card, tmp_path, caplog):
    folder = copied(tmp_path)
    (folder / "README.md").write_bytes(card)
    convert(str(folder), str(tmp_path / "out"))
    assert "README.md is left aside" in caplog.text
    assert "mlx_mtp.generate --mtp" in (tmp_path / "out" / "README.md").read_text()


def test_what_the_quantization_of_the_head_costs_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["mlx_mtp.convert"], "COST_TOKENS", 12)
    convert(str(DATA / "dense"), str(tmp_path / "out"), mtp_bits=2, mtp_group_size=32)
    printed = capsys.readouterr().out
    few, whole = (measure_acceptance(*mlx_mtp.load(str(p)), 12) for p in (tmp_path / "out", DATA / "dense"))
    assert few != whole
    assert f"Drafts accepted: {few:.0%} with the head at 2 bits, {whole:.0%} with it in bfloat16" in printed


# The command line


def run(monkeypatch, capsys, *args):
    """In this process: (exit status, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["mlx_mtp.convert", *map(str, args)])
    try:
        main()
        status = 0
    except SystemExit as e:
        status = e.code
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    ("spoil", "message"),
    [*((bad[0], bad[2]) for bad in BAD), (shutil.rmtree, "and not the name of a repository")],
    ids=[*BAD_IDS, "no folder"],
)
def test_bad_input_is_one_line_and_status_2(spoil, message, monkeypatch, capsys, tmp_path):
    folder = copied(tmp_path)
    spoil(folder)
    status, _, err = run(monkeypatch, capsys, "--hf-path", folder, "--mlx-path", tmp_path / "new" / "out")
    assert (status, err.count("\n")) == (2, 1), err
    assert re.search(message, err)
    assert "Traceback" not in err
    assert not any(p.name != "model" for p in tmp_path.iterdir())


def test_bad_arguments_are_one_line_and_status_2(monkeypatch, capsys, tmp_path):
    model, out = ["--hf-path", DATA / "dense"], ["--mlx-path", tmp_path / "out"]
    for args, message in [
        (out, "Say what to convert"),
        ([*model, "--mlx-path", tmp_path], "already exists"),
        ([*model, *out, "-q", "-d"], "either quantize or dequantize"),
        ([*model, *out, "--mtp-bits", 4, "--no-mtp"], "either --mtp-bits or --no-mtp"),
        ([*model, *out, "-q", "--q-bits", 7], "7"),
        ([*model, *out, "-q", "--q-mode", "mxfp4", "--quant-predicate", "mixed_3_6"], "only support 'affine'"),
        ([*model, *out, "--graft-mtp-from", DATA / "dense", "-q"], "leave out the other flags"),
        ([*model, *out, "--graft-mtp-from", DATA / "moe35"], "model_type is qwen3_5_moe, not qwen3_5"),
        ([*model, *out, "--graft-mtp-from", "no/such-model"], "the hub has no repository of that name"),
    ]:
        status, _, err = run(monkeypatch, capsys, *args)
        assert (status, err.count("\n")) == (2, 1), (args, err)
        assert message in err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("what", "limit"), [("weights", 500_000), ("tokenizer", 250_000), ("a grafted head", 500_000)])
def test_a_full_disk_is_one_line_and_leaves_nothing(what, limit, tmp_path):
    """A limit on the size of files, which fails their writing as a full disk does."""
    source, args = DATA / "dense", ["-q"]
    if what == "tokenizer":  # larger than the weights
        weights = dict(tree_flatten(tiny_model("qwen3_5", hidden_size=32, dtype=mx.bfloat16).parameters()))
        source = write(tmp_path / "source", tiny_config("qwen3_5", hidden_size=32), weights)
        shutil.copy(DATA / "dense" / "tokenizer.json", source)
    if what == "a grafted head":
        convert(str(source), str(tmp_path / "bare"), mtp=False)
        source, args = tmp_path / "bare", ["--graft-mtp-from", source, "--skip-check"]
    program = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from mlx_mtp.convert.__main__ import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit},) * 2); main()"
    )
    command = [sys.executable, "-c", program, "--hf-path", source, *args, "--mlx-path", tmp_path / "out"]
    before = sorted(tmp_path.iterdir())
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "could not be written" in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_kill_leaves_nothing_or_the_whole(tmp_path):
    """scripts/kill.py has more moments, at random."""
    tic = time.perf_counter()
    start_conversion(DATA / "moe35", tmp_path / "undisturbed").wait()
    took = time.perf_counter() - tic
    mlx_mtp.load(str(tmp_path / "undisturbed"))
    for moment in (0.5, 0.7, 0.9):
        process = start_conversion(DATA / "moe35", tmp_path / "out")
        time.sleep(moment * took)
        process.kill()
        process.wait()
        if (tmp_path / "out").exists():
            mlx_mtp.load(str(tmp_path / "out"))
            shutil.rmtree(tmp_path / "out")
