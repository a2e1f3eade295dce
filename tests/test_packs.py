"""Bonsai 2's packs: mlx-lm's logits and tokens in float16, with the base model's head, which is found, grafted and fitted.

What all families have in common is tested with the others': ``FAMILIES`` in ``support/models.py`` has a pack.
"""

import re
import shutil

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

import mlx_mtp
from mlx_mtp.checkpoint.catalog import originals_like, published
from mlx_mtp.checkpoint.config import skeleton
from mlx_mtp.checkpoint.part import own_weights
from mlx_mtp.convert.__main__ import inspect, main
from mlx_mtp.core.models.shard import check_shard
from mlx_mtp.fit.fitting import fit
from tests.support.checkpoints import accepting, config_of, configure, converted, edit, parameters, tensors, write_tiny
from tests.support.commands import report, run_command
from tests.support.decoding import PROMPT
from tests.support.models import PACK, WIDE, arrays_equal, tiny_config
from tests.support.published import ARCHITECTURES

VOCAB = {"vocab_size": 512}  # of the tokenizer


# The CPU backend would compile 45 kernels in float16, which no other test has: those are in ``test_layers.py``.
pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("original") / "Qwen3.8-tiny", "qwen3_5", mx.bfloat16, **WIDE, **VOCAB)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Its pack, without a head, as packs are published."""
    folder = write_tiny(tmp_path_factory.mktemp("bare") / "Ternary-Bonsai-tiny", PACK, mx.float16, **VOCAB)
    edit(folder, lambda w: [w.pop(name) for name in [*w] if "mtp." in name])
    return folder


@pytest.fixture(scope="module")
def grafted(original, bare, tmp_path_factory):
    return converted(bare, tmp_path_factory.mktemp("grafted") / "out", graft_mtp_from=str(original), skip_check=True)


@pytest.fixture(scope="module")
def models(grafted):
    """(ours, mlx-lm's)"""
    return mlx_mtp.load(str(grafted))[0], mlx_lm.load(str(grafted))[0]


@pytest.fixture
def pack(hub, original, bare, tmp_path, monkeypatch):
    """The pack, whose card names its base model. The model is random."""
    accepting(monkeypatch, 0.8)
    hub.publish("Qwen/original", original)
    folder = shutil.copytree(bare, tmp_path / "pack")
    (folder / "README.md").write_text("---\nbase_model: Qwen/original\n---\n")
    return folder


def test_logits_have_mlx_lms_bits(models):
    """Those of a prompt, and of single tokens."""
    seen = []
    for model in models:
        cache = stock_prompt_cache(model)
        seen.append([model(tokens[None], cache=cache) for tokens in (PROMPT, *mx.split(PROMPT[:3], 3))])
    assert seen[0][0].dtype == mx.float16
    assert arrays_equal(*seen)
    # All but states and signs is in float16
    dtypes = {name: p.dtype for name, p in parameters(models[0]).items()}
    assert {dtypes.pop(n) for n in [*dtypes] if n.endswith((".signs", ".A_log"))} == {mx.float32}
    assert {dtypes.pop(n) for n in [*dtypes] if n[:-6] + "scales" in dtypes and n.endswith("weight")} == {mx.uint32}
    assert set(dtypes.values()) == {mx.float16}


def test_the_head_is_found_by_the_card(pack, bare, models):
    model = mlx_mtp.load(str(pack), mtp="auto")[0]
    assert model.fetched_head.source == "Qwen/original"
    named = mlx_mtp.load(str(bare), mtp=str(model.fetched_head.folder))[0]  # --mtp HEAD
    for one in (model, named):
        assert arrays_equal(one.mtp.parameters(), models[0].mtp.parameters())


def test_the_catalog_has_the_base_and_the_size_of_the_published_pack():
    for name in ("prism-ml/Ternary-Bonsai-2-27B-mlx-2bit", "me/bonsai-2-27b", "Bonsai_2_27B-chat"):
        sizes = {"num_hidden_layers": 64, "hidden_size": 5120}
        assert originals_like(name, {"text_config": sizes}) == ["Qwen/Qwen3.8-27B"]
    _, text = ARCHITECTURES["27B"]
    config = tiny_config(PACK, **text)
    assert len(config["modules"]) == 402  # as published
    weights = tree_flatten(skeleton(config, "pack").parameters())
    packed = (".signs", ".scales", ".biases")  # in their own dtype here, and all else in float32
    n_bytes = sum(w.nbytes if w.dtype == mx.uint32 or n.endswith(packed) else 2 * w.size for n, w in weights)
    assert published()["bonsai-2-27b-2bit"].disk_gb == round(n_bytes / 1e9, 1)


@pytest.mark.slow
def test_fit(pack, tmp_path, capsys):
    # In float32 MLX's CPU backend takes a tenth of the time.
    edit(pack, lambda w: w.update({n: x.astype(mx.float32) for n, x in w.items() if x.dtype == mx.float16}))
    (tmp_path / "prompts").write_text("\n---\n".join(f"prompt {i}" for i in range(10)))
    options = dict(drafts=1, answers=1, max_tokens=3, temp=0.0, iters=6, steps_per_eval=6, learning_rate=1e-2)
    fit(str(pack), str(tmp_path / "out"), prompts=tmp_path / "prompts", **options)
    first, lowest = map(float, re.search(r"validation loss ([\d.]+) -> ([\d.]+)", capsys.readouterr().out).groups())
    assert lowest < first - 0.1


# What is refused


def test_what_needs_other_heads_parts_of_layers_or_fewer_bits(models, bare, grafted, tmp_path):
    other = write_tiny(tmp_path / "other", "qwen3_5", mx.bfloat16, **WIDE | VOCAB | {"intermediate_size": 256})
    with pytest.raises(ValueError, match="intermediate_size is 256, not 128"):
        converted(bare, tmp_path / "out", graft_mtp_from=str(other), skip_check=True)
    with pytest.raises(ValueError, match=rf"type {PACK} cannot be split among processes.* use .*\(--pipeline\)"):
        check_shard(models[0], 2)  # a rank can have layers of its own, but no parts of layers
    with pytest.raises(ValueError, match="draft_head_bits must be less than the 2 bits of the model's lm_head, not 2"):
        mlx_mtp.load(str(grafted), draft_head_bits=2)


def test_nothing_of_a_pack_is_converted(bare, grafted, tmp_path, capsys):
    cases = [(grafted, flags) for flags in ("-q", "--dequantize", "--dtype bfloat16", "--no-mtp")]
    for model, flags in [(bare, ""), *cases]:
        command = ("--hf-path", model, "--mlx-path", tmp_path / "out", *flags.split())
        status, _, err = run_command(main, capsys, *command)
        message = f"{model} is packed, and nothing in a model of type {PACK} can be converted"
        assert (status, err.count("\n"), message in err) == (2, 1, True), (flags, err)
        assert not (tmp_path / "out").exists()


SIGNS = "language_model.model.layers.0.mlp.up_proj.signs"


def test_a_pack_that_mlx_lm_refuses_is_refused_with_its_reason(grafted, tmp_path):
    damaged, later = (shutil.copytree(grafted, tmp_path / name) for name in ("damaged", "later"))
    (damaged / "model.safetensors.index.json").unlink()
    edit(damaged, lambda w: w.update({SIGNS: 2 * w[SIGNS]}))
    with pytest.raises(ValueError, match="signs must contain only -1 and \\+1"):
        mlx_mtp.load(str(damaged))
    configure(later, schema_version=3)
    message = "Unsupported Hadamard pack: schema 3"
    assert message in report(inspect(str(later)))["--mtp"]
    with pytest.raises(ValueError, match=f"later could not be loaded: .*{message}"):
        mlx_mtp.load(str(later))


def test_a_stage_of_a_pipeline_needs_the_signs_of_its_layers_alone(grafted):
    model = skeleton(config_of(grafted), "pack")
    weights = own_weights(tensors(grafted), range(1, 2), model)
    assert SIGNS not in weights
    assert model.sanitize(dict(weights)).keys() >= {name for name in weights if "layers.1." in name}
    del weights[SIGNS.replace("layers.0", "layers.1")]
    with pytest.raises(ValueError, match=r"Missing Hadamard sign vector: .*layers\.1"):
        model.sanitize(weights)
