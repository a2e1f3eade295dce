"""Recipes: each is valid, says the size that the model's own classes give, and stands in the table."""

import sys
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import pytest
from helpers import DATA
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

import mlx_mtp
from mlx_mtp.convert import _compose, is_head, main, make_parser
from mlx_mtp.recipe import read_recipe, recipe_flags

FOLDER = Path(__file__).parents[1] / "convert"
RECIPES = sorted(FOLDER.glob("*.toml"))
MAC_GB = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)

# From the checkpoints' config.json
QWEN35 = {
    "vocab_size": 248320, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
NEXT = {
    **QWEN35, "vocab_size": 151936, "rope_theta": 1e7, "partial_rotary_factor": 0.25, "max_position_embeddings": 262144,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "intermediate_size": 5632,
}  # fmt: skip
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "linear_num_value_heads")
DENSE, MOE = ("intermediate_size",), ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def dense(*sizes, tied=False):
    return "qwen3_5", {**QWEN35, **dict(zip(SIZES + DENSE, sizes)), "tie_word_embeddings": tied}


def moe(*sizes, family="qwen3_5_moe", base=QWEN35):
    return family, {**base, **dict(zip(SIZES + MOE, sizes)), "shared_expert_intermediate_size": sizes[-1]}


ARCHITECTURES = {
    "0.8B": dense(1024, 24, 8, 2, 16, 3584, tied=True),
    "2B": dense(2048, 24, 8, 2, 16, 6144, tied=True),
    "4B": dense(2560, 32, 16, 4, 32, 9216, tied=True),
    "9B": dense(4096, 32, 16, 4, 32, 12288),
    "27B": dense(5120, 64, 24, 4, 48, 17408),
    "35B-A3B": moe(2048, 40, 16, 2, 32, 256, 8, 512),
    "122B-A10B": moe(3072, 48, 32, 2, 64, 256, 8, 1024),
    "397B-A17B": moe(4096, 60, 32, 2, 64, 512, 10, 1024),
    "80B-A3B": moe(2048, 48, 16, 2, 32, 512, 10, 512, family="qwen3_next", base=NEXT),
}


def architecture(said) -> str:
    return next(name for name in ARCHITECTURES if f"-{name}" in said["hf-path"])


def model_of(name):
    """A published model without its weights (none is ever evaluated), and its config."""
    family, text = ARCHITECTURES[name]
    text = {**text, "model_type": family, "mtp_num_hidden_layers": 1}
    config = text if family == "qwen3_next" else {"model_type": family, "text_config": text}
    module = import_module(f"mlx_mtp.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    return model, config


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_sizes_are_those_of_the_models_name(name):
    parameters = tree_flatten(model_of(name)[0].parameters())
    billions = sum(w.size for path, w in parameters if not is_head(path)) / 1e9
    assert billions == pytest.approx(float(name.partition("B")[0]), rel=0.07)


def test_the_head_of_the_27b_has_the_size_of_the_published_one():
    head = [w.nbytes for path, w in tree_flatten(model_of("27B")[0].parameters()) if is_head(path)]
    assert len(head) == 15
    assert round(sum(head) / 2**20) == 810


@pytest.mark.parametrize("file", RECIPES, ids=lambda f: f.stem)
def test_a_recipe_says_what_it_makes(file):
    said, needs = read_recipe(file).values()
    owner, _, name = said["hf-path"].partition("/")
    assert owner == "Qwen"
    assert said["mlx-path"] == f"{name}-{said['q-bits']}bit"
    assert file.name == f"{said['mlx-path'].lower()}.toml"

    args = make_parser().parse_args(recipe_flags(file))
    assert (args.hf_path, args.mlx_path) == (said["hf-path"], said["mlx-path"])
    assert (args.quantize, args.q_bits, args.mtp, args.mtp_bits) == (True, said["q-bits"], True, None)

    model, config = model_of(architecture(said))
    predicate = _compose(model, None, None, 64)
    model, _ = quantize_model(model, config, args.q_group_size, args.q_bits, args.q_mode, quant_predicate=predicate)
    disk = sum(w.nbytes for _, w in tree_flatten(model.parameters())) / 1e9
    assert needs["disk-gb"] == round(disk, 1)
    assert needs["memory-gb"] == next(gb for gb in MAC_GB if 2 / 3 * gb >= disk + 2)


def test_the_table_has_every_recipe():
    lines = (FOLDER / "README.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| [")]
    want = []
    for file in RECIPES:
        said, needs = read_recipe(file).values()
        head = sum(w.nbytes for path, w in tree_flatten(model_of(architecture(said))[0].parameters()) if is_head(path))
        row = f"[`{file.name}`]({file.name}) `{said['hf-path']}` {said['q-bits']} bit"
        want.append(f"{row} {needs['disk-gb']} GB {head / 1e9:.2f} GB {needs['memory-gb']} GB")
    assert sorted(" ".join(row) for row in table) == sorted(want)


RECIPE = """[convert]
hf-path = "{source}"
mlx-path = "{target}"
quantize = true
q-bits = 8
q-group-size = 32
dtype = "float16"

[needs]
disk-gb = 0.1
memory-gb = 8
"""


def run(monkeypatch, *flags) -> None:
    monkeypatch.setattr(sys, "argv", ["mlx_mtp.convert", *map(str, flags)])
    main()


def test_a_recipe_is_run_and_the_flags_given_beside_it_win(tmp_path, monkeypatch, capsys):
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE.format(source=DATA / "dense", target=tmp_path / "by-recipe"))
    run(monkeypatch, "--recipe", file)
    assert f"By {file}, the outcome takes 0.1 GB on disk" in capsys.readouterr().out
    run(monkeypatch, f"--mlx-path={tmp_path / 'before'}", "--q-bits=4", "--recipe", file)
    run(monkeypatch, "--recipe", file, f"--mlx-path={tmp_path / 'after'}", "--q-bits=4")
    for name, bits in (("by-recipe", 8), ("before", 4), ("after", 4)):
        model, _, config = mlx_mtp.load(str(tmp_path / name), return_config=True)
        assert (config["quantization"]["bits"], config["quantization"]["group_size"]) == (bits, 32)
        assert model.mtp.fc.weight.dtype == mx.float16


BAD = [
    ("[convert", "is not TOML"),
    (b"\xff\xfe", "is not TOML"),
    ("", "must have the tables"),
    ("convert = 1\nneeds = 2", "must have the tables"),
    (RECIPE + "[other]", "must have the tables"),
    (RECIPE.replace("hf-path", "repo"), r"lacks hf-path in \[convert\]"),
    (RECIPE.replace("memory-gb = 8", ""), r"lacks memory-gb in \[needs\]"),
    (RECIPE.replace("q-bits", "q_bits"), r"unknown key q_bits in \[convert\]; known are hf-path"),
    (RECIPE.replace("memory-gb", "cores = 2\nmemory-gb"), r"unknown key cores in \[needs\]"),
    (RECIPE.replace("q-bits = 8", 'q-bits = "8"'), "has '8' for q-bits, which is not of type int"),
    (RECIPE.replace("q-bits = 8", "q-bits = true"), "has True for q-bits, which is not of type int"),
    (RECIPE.replace("disk-gb = 0.1", "disk-gb = 1"), "has 1 for disk-gb, which is not of type float"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_what_is_wrong_with_a_recipe_is_said(text, message, tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"recipe.toml .*{message}"):
        read_recipe(file)


@pytest.mark.parametrize("value", ["q-mode = 'int4'", "dtype = 'int8'"])
def test_a_value_that_the_flag_does_not_take_is_an_error_of_the_flag(value, tmp_path, monkeypatch, capsys):
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE.replace('dtype = "float16"', value).format(source=DATA / "dense", target=tmp_path / "out"))
    with pytest.raises(SystemExit) as exit:
        run(monkeypatch, "--recipe", file)
    assert exit.value.code == 2
    assert f"--{value.partition(' ')[0]}: invalid choice" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_such_recipe(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit:
        run(monkeypatch, "--recipe", tmp_path / "none.toml")
    assert exit.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
