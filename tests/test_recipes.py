"""Recipes: each states the size that the model's own classes give, and is listed in the README."""

from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import quantize_model

import mlx_mtp
from mlx_mtp.checkpoint.catalog import HEAD_DIM, published
from mlx_mtp.checkpoint.head_formats import is_head
from mlx_mtp.convert.__main__ import main, make_parser, named_recipes, read_recipe, recipe_flags
from mlx_mtp.convert.conversion import backbone_predicate
from tests.support.commands import refusal, run_command
from tests.support.models import DATA
from tests.support.published import ARCHITECTURES, model_of

README = Path(__file__).parents[1] / "convert" / "README.md"
RECIPES = named_recipes()
MAC_GB = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)


def architecture(convert) -> str:
    return next(name for name in ARCHITECTURES if f"-{name}" in convert["hf-path"])


@cache
def parameters(name):
    """A published model's tensors, by path."""
    return dict(tree_flatten(model_of(name)[0].parameters()))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameter_count_matches_the_models_name(name):
    billions = sum(w.size for path, w in parameters(name).items() if not is_head(path)) / 1e9
    assert billions == pytest.approx(float(name.partition("B")[0]), rel=0.07)


def test_head_of_the_27b_has_the_published_size():
    head = [w.nbytes for path, w in parameters("27B").items() if is_head(path)]
    assert len(head) == 15
    assert round(sum(head) / 2**20) == 810


@cache
def sizes(name, bits):
    """The GB of a published model converted to this many bits, and of its head."""
    model, config = model_of(name)
    model, _ = quantize_model(model, config, None, bits, quant_predicate=backbone_predicate(model))
    weights = tree_flatten(model.parameters())
    return sum(w.nbytes for _, w in weights) / 1e9, sum(w.nbytes for path, w in weights if is_head(path)) / 1e9


@pytest.mark.parametrize("model", published().values(), ids=lambda model: model.name)
def test_the_catalog_has_the_models_sizes(model):
    architecture = next(name for name in ARCHITECTURES if f"-{name}" in model.original)
    _, config = model_of(architecture)
    text = config.get("text_config", config)
    assert (model.layers, model.hidden_size) == (text["num_hidden_layers"], text["hidden_size"])
    assert (model.kv_heads, HEAD_DIM) == (text["num_key_value_heads"], text["head_dim"])
    head = sum(w.nbytes for path, w in parameters(architecture).items() if is_head(path))
    assert model.head_gb == pytest.approx(head / 1e9, abs=0.005)
    cache = [c for c in model_of(architecture)[0].make_cache() if isinstance(c, KVCache)]
    n_layers = len(cache) + 1  # the head's
    assert model.needs(1000).caches == 1000 * n_layers * 2 * 2 * text["num_key_value_heads"] * text["head_dim"]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_states_the_size_of_its_result(name):
    convert, needs = RECIPES[name].values()
    owner, _, model = convert["hf-path"].partition("/")
    assert owner == ("ornith-ai" if name.startswith("ornith") else "Qwen")
    assert convert["mlx-path"] == f"{model}-4bit"
    assert name == f"{model}-4bit".lower()
    disk, _ = sizes(architecture(convert), convert["q-bits"])
    assert needs == {"disk-gb": round(disk, 1), "memory-gb": next(gb for gb in MAC_GB if 2 / 3 * gb >= disk + 2)}


def test_readme_lists_every_recipe():
    lines = README.read_text().splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    want = []
    for name, recipe in RECIPES.items():
        convert, needs = recipe.values()
        _, head = sizes(architecture(convert), convert["q-bits"])
        sizes_in_words = [f"{needs['disk-gb']} GB", f"{head:.2f} GB", f"{needs['memory-gb']} GB"]
        want.append([f"`{name}`", f"`{convert['hf-path']}`", *sizes_in_words])
    assert table == want


def test_named_recipe_is_a_command_line(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3.5-27b-4bit").mkdir()  # a result of that name is not a recipe file
    args = make_parser().parse_args(recipe_flags("qwen3.5-27b-4bit"))
    assert (args.hf_path, args.mlx_path) == ("Qwen/Qwen3.5-27B", "Qwen3.5-27B-4bit")
    assert (args.quantize, args.q_bits, args.mtp, args.mtp_bits) == (True, 4, True, None)
    assert "qwen3.5-27b-4bit: the result takes 16.0 GB on disk" in capsys.readouterr().out


RECIPE = """
[convert]
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


def test_flags_override_the_recipe_file(tmp_path, capsys):
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE.format(source=DATA / "dense", target=tmp_path / "by-recipe"))
    assert f"{file}: the result takes 0.1 GB on disk" in run_command(main, capsys, "--recipe", file)[1]
    run_command(main, capsys, f"--mlx-path={tmp_path / 'before'}", "--q-bits=4", "--recipe", file)
    run_command(main, capsys, "--recipe", file, f"--mlx-path={tmp_path / 'after'}", "--q-bits=4")
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


def test_rejects_a_bad_recipe(tmp_path):
    file = tmp_path / "recipe.toml"
    for text, message in BAD:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ValueError, match=f"recipe.toml .*{message}"):
            read_recipe(file)


@pytest.mark.parametrize("value", ["q-mode = 'int4'", "dtype = 'int8'"])
def test_rejects_a_bad_value_like_the_flag(value, tmp_path, capsys):
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE.replace('dtype = "float16"', value).format(source=DATA / "dense", target=tmp_path / "out"))
    status, _, err = run_command(main, capsys, "--recipe", file)
    assert (status, f"--{value.partition(' ')[0]}: invalid choice" in err) == (2, True)
    assert not (tmp_path / "out").exists()


def test_unknown_recipe_lists_the_known(tmp_path, capsys):
    error = refusal(main, capsys, "--recipe", tmp_path / "none.toml")
    assert "give a TOML file, or one of qwen3.5-0.8b-4bit, " in error
