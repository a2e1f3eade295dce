"""Recipes: each is valid, says the size that the model's own classes give, and stands in the table."""

import sys
from pathlib import Path

import mlx.core as mx
import pytest
from helpers import DATA
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model
from published import ARCHITECTURES, model_of

import mlx_mtp
from mlx_mtp.checkpoint.head_formats import is_head
from mlx_mtp.convert.__main__ import main, make_parser
from mlx_mtp.convert.conversion import _compose
from mlx_mtp.convert.recipe import read_recipe, recipe_flags

FOLDER = Path(__file__).parents[1] / "convert"
RECIPES = sorted(FOLDER.glob("*.toml"))
MAC_GB = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)


def architecture(said) -> str:
    return next(name for name in ARCHITECTURES if f"-{name}" in said["hf-path"])


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
