"""Recipes: each states the size that the model's own classes give, and is listed in the README."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

from mlx_mtp.checkpoint.catalog import published
from mlx_mtp.checkpoint.config import read_json
from mlx_mtp.checkpoint.heads.formats import is_head
from mlx_mtp.convert.__main__ import main, recipes
from mlx_mtp.convert.conversion import backbone_predicate
from tests.support.commands import refusal, run_command
from tests.support.models import DATA
from tests.support.published import ARCHITECTURES, model_of

README = Path(__file__).parents[1] / "convert" / "README.md"
MAC_GB = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)


def architecture(recipe) -> str:
    return next(name for name in ARCHITECTURES if f"-{name}" in recipe.original)


published_model = cache(model_of)  # for tests that leave it as it was


@cache
def sizes(name):
    """The GB of a published model converted to 4 bits, of its head, and of its n-gram table, in groups of 32."""
    model, config = model_of(name)
    model, _ = quantize_model(model, config, None, 4, quant_predicate=backbone_predicate(model))
    weights, ngrams = tree_flatten(model.parameters()), model.ngrams
    head = sum(w.nbytes for path, w in weights if is_head(path))
    n_values = 0 if ngrams is None else ngrams.width * sum(own.n_rows for own in ngrams.hashes.values())
    return sum(w.nbytes for _, w in weights) / 1e9, head / 1e9, n_values * (1 / 2 + 4 / 32) / 1e9


@pytest.mark.parametrize("model", published().values(), ids=lambda model: model.name)
def test_the_catalog_has_the_models_sizes(model):
    own, config = published_model(architecture(model))
    text = config.get("text_config", config)
    assert (model.layers, model.hidden_size) == (text["num_hidden_layers"], text["hidden_size"])
    head = sum(w.nbytes for path, w in tree_flatten(own.parameters()) if is_head(path))
    assert model.head_gb == pytest.approx(head / 1e9, abs=0.005)
    layers = own.attention_layers
    assert model.attention_layers == len(layers)
    assert not (model.takes_images and own.family.no_images)
    assert model.row_values == sum(heads * size for heads, size in layers[0].row_sizes.values())
    assert model.needs(1000).caches == 1000 * (len(layers) + 1) * 2 * model.row_values  # with the head's
    assert model.needs(1).weights == pytest.approx(1e9 * (model.disk_gb - model.ngrams_gb - model.head_gb))


def test_readme_lists_every_recipe_with_the_size_of_its_result():
    lines, want = README.read_text().splitlines(), []
    for name, recipe in recipes().items():
        owner, _, model = recipe.original.partition("/")
        assert owner == {"ornith": "ornith-ai", "glm": "zai-org"}.get(name.split("-")[0], "Qwen")
        assert name == f"{model}-4bit".lower()
        held, head, table = sizes(architecture(recipe))
        needs = recipe.disk_gb, recipe.memory_gb, recipe.ngrams_gb
        smallest = next(gb for gb in MAC_GB if 2 / 3 * gb >= held + 2)
        assert needs == (round(held + table, 1), smallest, round(table, 1)), name
        gb = [f"{recipe.disk_gb} GB", f"{head:.2f} GB", f"{recipe.memory_gb} GB"]
        want.append([f"`{name}`", f"`{recipe.original}`", *gb])
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")] == want


def test_a_recipe_is_a_command_line_and_flags_override_it(tmp_path, capsys, monkeypatch):
    assert "give one of qwen3.5-0.8b-4bit, " in refusal(main, capsys, "--recipe", "none.toml")
    model = replace(published()["qwen3.5-0.8b-4bit"], original=str(DATA / "dense"))
    monkeypatch.setitem(recipes.__globals__, "published", lambda: {model.name: model})
    monkeypatch.chdir(tmp_path)
    out = run_command(main, capsys, "--recipe", model.name)[1]
    assert "qwen3.5-0.8b-4bit: the result takes 0.5 GB on disk" in out
    assert "Next: `mlx_mtp chat --mtp --model dense-4bit`" in out
    run_command(main, capsys, "--mlx-path=before", "--q-bits=8", "--recipe", model.name)
    run_command(main, capsys, "--recipe", model.name, "--mlx-path=after", "--q-bits=8")
    for name, bits in (("dense-4bit", 4), ("before", 8), ("after", 8)):
        assert read_json(tmp_path / name / "config.json")["quantization"]["bits"] == bits
