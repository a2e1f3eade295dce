"""Conversion: the head is kept bit for bit, the folder appears whole, and plain mlx-lm loads it too."""

import json
import shutil

import mlx.core as mx
import mlx_lm
import pytest
from helpers import DATA, plain, tensors
from mlx_lm.models.switch_layers import SwitchLinear

import mlx_mtp
from mlx_mtp.convert import convert
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
@pytest.mark.parametrize("bits", [None, 4])
def test_plain_mlx_lm_loads_it_and_generates_the_same(name, bits, tmp_path):
    """In float32, since MLX's CPU backend has no other for experts."""
    options = {} if bits is None else {"quantize": True, "q_bits": bits, "q_group_size": 32}
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


def test_the_heads_layer_is_quantized_where_asked_for_and_nothing_else_of_it(tmp_path):
    convert(str(DATA / "moe35"), str(tmp_path / "out"), dtype="float32", mtp_bits=8, mtp_group_size=32)
    _, head = split_head(tensors(tmp_path / "out"))
    assert "fc.scales" not in head
    assert "layers.0.self_attn.q_proj.scales" in head
    assert not any(name.endswith(".scales") for name in split_head(tensors(tmp_path / "out"))[0])

    convert(
        str(DATA / "moe35"), str(tmp_path / "q"), dtype="float32", quantize=True, q_group_size=32, mtp_bits=8,
        mtp_group_size=32,
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
