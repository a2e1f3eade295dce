"""The type of a model's weights: what ``dtype`` and "auto" choose, what float16 cannot hold, and that types never mix."""

import gc
import logging
import shutil
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mtp import about, load
from mlx_mtp.__main__ import COMMANDS
from mlx_mtp.checkpoint import load as loading
from mlx_mtp.checkpoint.checks import dtype as dtypes
from mlx_mtp.checkpoint.checks import self_test
from mlx_mtp.checkpoint.checks.self_test import SelfTest
from mlx_mtp.checkpoint.part import evaluate
from mlx_mtp.core.distributed import any_rank
from mlx_mtp.core.layers.mtp import run_head
from mlx_mtp.fit import fitting
from mlx_mtp.images.prompt import ImagePrompt
from tests.support.checkpoints import DATA, accepting, converted, edit, make_adapter, parameters, tensors, write_tiny
from tests.support.commands import refusal, report, run_command
from tests.support.decoding import PROMPT
from tests.support.graphs import traced
from tests.support.image_prompts import FOLDER as IMAGES
from tests.support.image_prompts import image_prompt
from tests.support.launch import launch
from tests.support.models import FAMILIES, FLASH, LATENT, PACK, tiny_model
from tests.support.profiles import LONG

VOCAB = {"vocab_size": 512}  # of the tokenizer
F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32
M1, M2, M3 = "applegpu_g13s", "applegpu_g14d", "applegpu_g15g"

# The CPU backend would compile the kernels of fused operations in float16.
pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture
def chip(monkeypatch):
    """A function that gives the GPU another architecture."""
    info = mx.device_info()
    return lambda architecture: monkeypatch.setattr(mx, "device_info", lambda: info | {"architecture": architecture})


def types(module) -> set:
    """The types of the floating-point weights, but for the decay of recurrences, which is in float32."""
    floats = [(name, p) for name, p in parameters(module).items() if mx.issubdtype(p.dtype, mx.floating)]
    return {p.dtype for name, p in floats if not name.endswith("A_log")}


@pytest.fixture(scope="module")
def in_bfloat16(tmp_path_factory):
    """A checkpoint."""
    return str(write_tiny(tmp_path_factory.mktemp("bfloat16") / "model", "qwen3_5", BF16, **VOCAB))


@pytest.fixture(scope="module")
def in_float32(tmp_path_factory):
    """A checkpoint."""
    return str(write_tiny(tmp_path_factory.mktemp("float32") / "model", "qwen3_5", **VOCAB))


@pytest.fixture(scope="module")
def in_4_bits(in_bfloat16, tmp_path_factory):
    """The checkpoint in bfloat16, quantized."""
    return str(converted(in_bfloat16, tmp_path_factory.mktemp("4") / "model", quantize=True, q_bits=4, q_group_size=32))


CHOICES = [  # an architecture, options of load, and the type; and whether the checkpoint is quantized, by default
    (M1, {}, F16, True),
    (M2, {}, F16, False),
    (M3, {}, BF16, True),
    ("x86_64", {}, BF16, False),
    (M1, {"mtp": False}, F16, True),
    (M1, {"dtype": "bfloat16"}, BF16, False),
    (M3, {"dtype": "float16", "mtp": False}, F16, True),
    (M1, {"lazy": True}, BF16, True),  # nothing is read, so no value is looked at
    (M3, {"lazy": True, "dtype": "float16"}, F16, False),
]
if LONG:
    CHOICES = [(*choice, is_quantized) for *choice, _ in CHOICES for is_quantized in (True, False)]


@pytest.mark.parametrize(("architecture", "options", "want", "is_quantized"), CHOICES)
def test_all_weights_have_one_type(chip, in_bfloat16, in_4_bits, architecture, options, want, is_quantized):
    chip(architecture)

    model, _ = load(in_4_bits if is_quantized else in_bfloat16, **options)

    assert types(model) == {want}


@pytest.mark.parametrize(("is_quantized", "bits"), [(False, 4), (True, 3)])
def test_the_drafts_output_layer_has_the_type(chip, in_bfloat16, in_4_bits, is_quantized, bits):
    chip(M1)

    model, _ = load(in_4_bits if is_quantized else in_bfloat16, draft_vocab=100, draft_head_bits=bits, mtp_bits=4)

    lm_head = model.draft_settings.lm_head
    assert types(model) == types(lm_head.layers[0]) == {F16}
    assert model.draft_logits(mx.zeros((1, 1, model.hidden_size), F16), lm_head).dtype == F16


def test_a_checkpoint_in_float32_stays_so(chip, in_float32):
    chip(M1)

    assert types(load(in_float32)[0]) == {F32}


@pytest.mark.parametrize("options", [{}, {"mtp": False}])
def test_a_checkpoint_in_float32_is_cast_if_asked(chip, in_float32, options):
    """mlx-lm's predicate keeps the decay."""
    chip(M1)

    model, _ = load(in_float32, dtype="float16", **options)

    assert types(model) == {F16}
    assert {p.dtype for name, p in parameters(model).items() if name.endswith("A_log")} == {F32}


@pytest.mark.parametrize("dtype", ["float32", "half", "", 16])
def test_nothing_else_is_cast_to(in_float32, dtype):
    with pytest.raises(ValueError, match="dtype must be one of auto, bfloat16, float16, not "):
        load(in_float32, dtype=dtype)


def in_type_where(folder, dtype, is_meant):
    """Cast the tensors of a checkpoint for whose name and array ``is_meant``."""
    edit(folder, lambda w: w.update({name: x.astype(dtype) for name, x in w.items() if is_meant(name, x)}))


def test_float32_beside_bfloat16_stays(chip, in_bfloat16, tmp_path):
    chip(M1)
    folder = shutil.copytree(in_bfloat16, tmp_path / "model")
    in_type_where(folder, F32, lambda name, _: name.endswith("dt_bias"))

    model, _ = load(str(folder))

    in_float32 = {name.rpartition(".")[2] for name, p in parameters(model).items() if p.dtype == F32}
    assert in_float32 == {"A_log", "dt_bias"}


def test_a_decay_in_bfloat16_is_cast_with_the_others(chip, in_bfloat16, tmp_path):
    chip(M1)
    folder = shutil.copytree(in_bfloat16, tmp_path / "model")
    in_type_where(folder, BF16, lambda _, x: x.dtype == F32)

    model, _ = load(str(folder))

    assert {p.dtype for p in parameters(model).values()} == {F16}


@pytest.fixture(scope="module")
def adapter(in_bfloat16, tmp_path_factory):
    """An adapter in bfloat16."""
    folder = make_adapter(in_bfloat16, tmp_path_factory.mktemp("adapter") / "adapter")
    file = str(folder / "adapters.safetensors")
    mx.save_safetensors(file, {name: w.astype(BF16) for name, w in mx.load(file).items()})
    return str(folder)


@pytest.mark.parametrize("options", [{}, {"mtp": False}])
def test_an_adapter_has_the_type_of_its_model(chip, in_bfloat16, adapter, options):
    chip(M1)

    model, _ = load(in_bfloat16, adapter_path=adapter, **options)

    assert any("lora_a" in name for name in parameters(model))
    assert types(model) == {F16}


# What float16 cannot hold


def enlarged(checkpoint, tmp_path, name, factor):
    """A copy of a checkpoint with one tensor times a factor."""
    folder = shutil.copytree(checkpoint, tmp_path / "enlarged")
    edit(folder, lambda weights: weights.update({name: weights[name] * factor}))
    return str(folder)


HUGE = "language_model.model.layers.1.mlp.down_proj.weight", 1e7
HUGE_HEAD = "language_model.mtp.fc.weight", 1e7
HOT = "language_model.model.layers.1.mlp.up_proj.weight", 5e4  # these values fit, activations do not
HOT_HEAD = "language_model.mtp.layers.0.mlp.up_proj.weight", 5e4
OF_VALUES, OF_ACTIVATIONS = "values beyond 65,504", "not finite"


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (HUGE, {}, OF_VALUES), (HUGE, {"mtp": False}, OF_VALUES), (HUGE_HEAD, {}, OF_VALUES),
        (HOT, {}, OF_ACTIVATIONS), (HOT, {"mtp": False}, OF_ACTIVATIONS), (HOT_HEAD, {}, OF_ACTIVATIONS),
    ],
)  # fmt: skip
def test_what_float16_cannot_hold_stays_in_bfloat16(chip, in_bfloat16, tmp_path, caplog, change, options, reason):
    chip(M1)
    folder = enlarged(in_bfloat16, tmp_path, *change)
    want = parameters(load(folder, dtype="bfloat16", **options)[0])
    assert caplog.text == ""

    model, _ = load(folder, **options)

    found = parameters(model)
    assert all(mx.array_equal(found[name], w) and found[name].dtype == w.dtype for name, w in want.items())
    assert types(model) == {BF16}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.message
    assert record.message.endswith("use --dtype bfloat16. It is loaded in bfloat16 now.")
    with pytest.raises(ValueError, match=f"does not run in float16.*{reason}.*use --dtype bfloat16"):
        load(folder, dtype="float16", **options)


@pytest.mark.parametrize("change", [HUGE_HEAD, HOT_HEAD])
def test_a_head_that_is_not_loaded_is_no_reason(chip, in_bfloat16, tmp_path, change):
    """As plain mlx-lm, which drops the head."""
    chip(M1)

    model, _ = load(enlarged(in_bfloat16, tmp_path, *change), mtp=False)

    assert types(model) == {F16}


@pytest.mark.parametrize("options", [{}, {"mtp": False}])
def test_what_failed_in_float16_is_not_tried_again(chip, in_bfloat16, tmp_path, monkeypatch, caplog, options):
    """On this machine, until the checkpoint changes."""
    folder, check, tried = enlarged(in_bfloat16, tmp_path, *HUGE), dtypes.check_float16, []
    monkeypatch.setattr(dtypes, "check_float16", lambda *args: tried.append(args) or check(*args))

    def load_on(architecture, **dtype):
        """The types of the model, what the log says, and how often float16 was tried, all told."""
        chip(architecture)
        caplog.clear()
        model, _ = load(folder, **options, **dtype)
        return types(model), OF_VALUES in caplog.text, len(tried)

    assert load_on(M1) == ({BF16}, True, 1)
    assert load_on(M1) == ({BF16}, True, 1)
    with pytest.raises(ValueError, match=OF_VALUES):
        load_on(M1, dtype="float16")
    n_tried = len(tried)
    assert load_on(M2) == ({BF16}, True, n_tried + 1)
    edit(Path(folder), lambda weights: weights.update({HUGE[0]: weights[HUGE[0]] / HUGE[1]}))
    assert load_on(M2) == ({F16}, False, n_tried + 2)
    assert (n_tried, caplog.text) == (2, "")


@pytest.fixture
def wrong_in_float16(chip, tmp_path, monkeypatch):
    """A device whose compiled passes are wrong in float16 alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loading, "ensure_tested", self_test.ensure_tested)
    accepting(monkeypatch, 0.9)
    differences = {F16: float("nan"), BF16: 0.0}
    monkeypatch.setattr(self_test, "run", lambda model: SelfTest(0.03, compiled=differences[model.layers[0].dtype]))
    chip(M1)


def test_passes_that_differ_in_float16_alone_are_a_reason_for_bfloat16(wrong_in_float16, in_bfloat16, caplog):
    for _ in range(2):  # the second time the result is known
        caplog.clear()

        model, _ = load(in_bfloat16)

        assert (types(model), model.device.compiled) == ({BF16}, True)
        (record,) = caplog.records
        assert "does not run in float16 (compiled passes are wrong)" in record.message


def test_passes_that_differ_in_a_type_that_is_asked_for_are_a_warning(wrong_in_float16, in_bfloat16, caplog):
    model, _ = load(in_bfloat16, dtype="float16")

    assert (types(model), model.device.compiled) == ({F16}, False)
    assert "are wrong on this device" in caplog.text


def test_the_first_model_is_freed(chip, in_bfloat16, tmp_path):
    folder = enlarged(in_bfloat16, tmp_path, *HUGE)
    chip(M1)
    gc.collect()
    before = mx.get_active_memory()
    model, _ = load(folder)
    n_bytes = sum(p.nbytes for p in parameters(model).values())
    assert n_bytes <= mx.get_active_memory() - before < 1.1 * n_bytes


def test_the_cast_holds_one_layer_twice():
    folder = str(DATA / "dense")
    model, _ = load(folder, dtype="bfloat16")
    sizes = [sum(p.nbytes for p in parameters(layer).values()) for layer in model.layers]
    others = [p.nbytes for name, p in parameters(model).items() if "layers." not in name]
    total = sum(p.nbytes for p in parameters(model).values())
    del model
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model, _ = load(folder, dtype="float16", lazy=True)
    evaluate(model)
    assert mx.get_peak_memory() - before < total + max(*sizes, *others) + 1e5


def test_ranks_decide_together():
    """A rank on an M1 is reason enough; each broadcasts what it found."""
    found = [False, True, False]
    for rank, own in enumerate(found):
        ranks = SimpleNamespace(size=3, broadcast=lambda value, root, own=own, rank=rank: found[root])
        assert any_rank(ranks, own)
    assert [any_rank(None, own) for own in found] == found


@pytest.mark.slow
def test_an_m1_among_ranks_is_enough(tmp_path):
    """A weight beyond float16 on one rank is a reason for all, even if it is of a stage that others do not have."""
    heads = dict(num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4)
    two = {"num_hidden_layers": 2, **heads, **VOCAB}
    fits = write_tiny(tmp_path / "fits", "qwen3_5", BF16, **two)
    folders = [str(fits), enlarged(fits, tmp_path, *HUGE)]
    facts, other = launch(2, "types", *folders, timeout=300)
    assert facts == other
    assert [*facts.values()] == [["mlx.core.float16"]] * 2 + [["mlx.core.bfloat16"]] * 2


# Types never mix

PRODUCTS = {
    "Matmul", "AddMM", "QuantizedMatmul", "GatherMM", "GatherQMM", "Gather", "GatherAxis", "Convolution", "Concatenate",
    "ScaledDotProductAttention", "Softmax", "RoPE",
}  # fmt: skip


def one_pass(model):
    """Trace a verify pass and a draft after a prompt -> operations, and the types of hidden states, logits and caches."""
    tokens, outputs = mx.array([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]), {}

    def run(tokens):
        caches, head = model.make_cache(), model.head_layer.make_cache()
        logits, hidden = model(tokens, cache=caches, return_hidden=True)
        logits, hidden = model(tokens[:, :3], cache=caches, return_hidden=True, n_confirmed=1)
        out = run_head(model, hidden, tokens[:, 1:4], head)
        out = run_head(model, out, tokens[:, :1], head)
        drafts = model.draft_logits(out)
        arrays = {"logits": logits, "hidden": hidden, "out": out, "drafts": drafts, "head": head.state}
        arrays |= {f"cache {i}": [x for x in cache.state if x is not None] for i, cache in enumerate(caches)}
        flat = [(name, x) for name, x in tree_flatten(arrays) if isinstance(x, mx.array)]
        outputs.update({name: x for name, x in flat if mx.issubdtype(x.dtype, mx.floating)})
        return [x for _, x in flat]

    operations = traced(run, tokens)
    states = {(1, *layer.states[1].shape) for layer in model.recurrent_layers}  # of recurrences
    return operations, {name: x.dtype for name, x in outputs.items() if x.shape not in states}


def in_type(family, dtype, how):
    model = tiny_model(family, dtype=dtype)
    if family == FLASH:
        for table in model.ngrams.tables.values():
            table.load()
    if how != "plain" and family != PACK:
        part = "mtp." if how == "quantized head" else ""
        fits = lambda path, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0 and part in path  # noqa: E731
        nn.quantize(model, group_size=32, class_predicate=fits)
    return model


HOW = {
    "qwen3_5": ["plain", "quantized head"], "qwen3_5_moe": ["quantized"], "qwen3_next": ["plain", "quantized head"],
    PACK: ["quantized"], FLASH: ["plain", "quantized head"], LATENT: ["quantized"],
}  # fmt: skip
EVERY_WAY = product(FAMILIES, ["plain", "quantized", "quantized head"])


@pytest.mark.parametrize(
    ("family", "how"), EVERY_WAY if LONG else [(f, how) for f, ways in HOW.items() for how in ways]
)
def test_one_pass_has_one_type(family, how):
    """A head in bfloat16 beside a backbone in float16 is cast: no product, no cache and no logits are in float32."""
    model = in_type(family, F16, how)
    model.mtp.set_dtype(BF16)
    operations, outputs = one_pass(model)
    assert F32 in {dtype for name, _, dtype in operations if name in PRODUCTS}  # the walk finds it
    assert outputs["drafts"] == F32

    dtypes.set_dtype(model, "auto", False)
    operations, outputs = one_pass(model)
    assert {*outputs.values()} == {F16}
    found = {(name, shape) for name, shape, dtype in operations if name in PRODUCTS and dtype in (F32, BF16)}
    # The outputs of the recurrence over drafts and over a window; those of a prompt are mlx-lm's, unless it has no such model.
    for layer in model.recurrent_layers[:1]:
        for T in (2, 3, *([13] if family == FLASH else [])):
            found.remove(("Concatenate", (1, T, layer.heads.values, layer.heads.value_size)))
    if family == FLASH:  # rows of tables as they are stored, and an indexer's scores of 4 blocks, as in transformers
        assert {shape for name, shape in found if name == "Matmul"} == {(1, 2, 3, 4)}
        found = {(name, shape) for name, shape in found if shape[-1] not in (4, model.ngrams.width)}
    if family == LATENT:  # mlx-lm's weights of the experts that a router chooses
        found = {(name, shape) for name, shape in found if (name, shape[-1]) != ("GatherAxis", 2)}
    assert found == set()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tables_in_files_serve_any_type(tmp_path, dtype):
    """CPUs multiply experts in float32 only, so nothing is evaluated but the rows of the tokens."""
    folder = write_tiny(tmp_path / "model", FLASH, **VOCAB)
    model, _ = load(str(folder), dtype=dtype, ngram_memory=False)
    assert types(model) == {dtypes.DTYPES[dtype]}
    logits, hidden = model(PROMPT[None], return_hidden=True)
    assert {logits.dtype, hidden.dtype} == {dtypes.DTYPES[dtype]}


def test_a_pack_stays_in_float16(tmp_path):
    folder = str(write_tiny(tmp_path / "pack", PACK, F16, **VOCAB))
    assert types(load(folder)[0].mtp) == {F16}
    with pytest.raises(ValueError, match="computes in float16 only: leave --dtype out"):
        load(folder, dtype="bfloat16")


# Images


def embeddings(model):
    """Those of a text with two images."""
    tokens, spans = image_prompt(1).tokens.tolist(), image_prompt(1).images
    args = model.vision.lazy_tower().args
    shape = args.spatial_merge_size**2, args.patch_dim
    pixels = [mx.random.normal((s.rows, s.columns, *shape), key=mx.random.key(i)) for i, s in enumerate(spans)]
    return ImagePrompt(tokens, spans, pixels, model.vision).embed(model)


def test_the_vision_encoder_has_the_type_of_the_model(chip, caplog):
    chip(M1)
    folder = str(IMAGES)
    model, _ = load(folder, copy_drafts=True)
    assert types(model.vision.tower) == types(model) == {F16}
    assert (embeddings(model).dtype, caplog.text) == (F16, "")
    assert types(load(folder, copy_drafts=True, dtype="bfloat16")[0].vision.tower) == {BF16}


def test_a_vision_encoder_beyond_float16_keeps_its_type(chip, tmp_path, caplog):
    chip(M1)
    folder = shutil.copytree(IMAGES, tmp_path / "model")
    first = next(name for name in tensors(folder) if name.endswith("blocks.0.mlp.linear_fc2.weight"))
    edit(folder, lambda weights: weights.update({first: weights[first] * 1e8}))
    model, _ = load(str(folder), copy_drafts=True)
    for _ in range(2):
        assert bool(mx.isfinite(embeddings(model)).all())
    assert (types(model.vision.tower), types(model)) == ({BF16}, {F16})
    (record,) = caplog.records
    assert "The vision encoder" in record.message


# The command line


def test_a_head_is_fitted_in_it(in_bfloat16, tmp_path, monkeypatch, capsys):
    """Also the head that is written, which load casts to the backbone's. A model that float16 cannot hold is refused."""
    monkeypatch.setattr(fitting.Comparison, "is_better", True)
    prompts, flags = tmp_path / "prompts.txt", "--iters 1 --answers 1 --max-tokens 4 --drafts 1 --dtype float16"
    prompts.write_text("\n---\n".join(f"prompt {i}" for i in range(12)))
    argv = ["--prompts", prompts, *flags.split()]
    main = resolve_name(COMMANDS["fit"][0])
    status, _, err = run_command(main, capsys, "--model", in_bfloat16, "--mlx-path", tmp_path / "fitted", *argv)
    assert (status, err) == (0, "")
    assert {w.dtype for w in mx.load(str(tmp_path / "fitted" / "mtp.safetensors")).values()} == {F16}
    assert types(load(str(tmp_path / "fitted"))[0]) == {BF16}
    huge = enlarged(in_bfloat16, tmp_path, *HUGE)
    assert "does not run in float16" in refusal(main, capsys, "--model", huge, "--mlx-path", tmp_path / "no", *argv)


def test_doctor_tells_the_type(in_bfloat16, monkeypatch, capsys):
    monkeypatch.setattr(about, "ensure_tested", lambda *_: None)
    _, out, _ = run_command(about.doctor, capsys, "--model", in_bfloat16, "--dtype", "float16")
    assert report(out)["Type"] == "float16"
