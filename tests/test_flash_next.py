"""Qwen3.8-Flash-Next: values of transformers, sparse attention, and tables of n-gram embeddings.

What it has in common with other families is tested with theirs: ``FAMILIES`` in ``support/models.py`` has it.
"""

import json
import os
import re
import shutil
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp import load
from mlx_mtp.convert.__main__ import inspect
from mlx_mtp.core.layers.mtp import has_head
from mlx_mtp.core.models.ngrams import NgramHash
from mlx_mtp.core.models.qwen4_exp import TextModelArgs
from mlx_mtp.images.prompt import vision_of
from mlx_mtp.memory import Account, needs_of
from tests.support.checkpoints import (
    config_of,
    configure,
    converted,
    differing,
    edit,
    parameters,
    split_head,
    tensors,
    write_tiny,
)
from tests.support.commands import refused, report
from tests.support.decoding import PROMPT, mtp, plain
from tests.support.hub_stand_in import HEADER_BYTES
from tests.support.layouts import save
from tests.support.models import DATA, FLASH, add_tables, load_reference, tiny_config, tiny_model
from tests.support.profiles import LONG

FOLDER = DATA / "flash_next"
VALUES = np.load(FOLDER / "reference.npz")
PROMPTS = [0, 3, 5, 7]
CHUNKS = (
    [(j, n) for j in PROMPTS for n in (1, 7, 1000)] if LONG else [(0, 1), (0, 1000), (3, 1), (3, 7), (5, 1000), (7, 7)]
)
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def model():
    return load_reference(FOLDER)


def difference(ours: mx.array, name: str) -> float:
    """From the last values of a prompt."""
    theirs = VALUES[name]
    return float(np.abs(np.array(ours)[-len(theirs) :] - theirs).max())


@pytest.mark.parametrize(("j", "chunk"), CHUNKS)
def test_values_of_transformers(model, j, chunk):
    """In chunks, token by token and in one piece; prompts from 36 tokens on select blocks."""
    ids, cache, head = mx.array(VALUES[f"ids{j}"]), model.make_cache(), model.head_layer.make_cache()
    pieces = [model(ids[None, i : i + chunk], cache=cache, return_hidden=True) for i in range(0, ids.size, chunk)]
    logits, hidden = (mx.concatenate(each, axis=1) for each in zip(*pieces))
    assert difference(logits[0], f"logits{j}") <= TOLERANCE
    assert difference(hidden[0], f"hidden{j}") <= TOLERANCE
    after = mx.concatenate([ids[1:], mx.argmax(logits[0, -1:], axis=-1)])[None]
    embeddings = model.model.embed_tokens(after)
    outs = [model.mtp(embeddings[:, i : i + chunk], hidden[:, i : i + chunk], head) for i in range(0, ids.size, chunk)]
    drafts = model.draft_logits(mx.concatenate(outs, axis=1))
    assert difference(drafts[0], f"draft{j}") <= TOLERANCE
    draft = mx.argmax(drafts[:, -1:], axis=-1)
    second = model.draft_logits(model.mtp(model.model.embed_tokens(draft), outs[-1][:, -1:], head))
    assert difference(second[0, 0], f"second{j}") <= TOLERANCE


@pytest.mark.parametrize("j", PROMPTS if LONG else [0, 5])
def test_greedy_tokens(model, j):
    want = VALUES[f"greedy{j}"].tolist()
    for k in range(9) if LONG else (3,):
        options = dict(max_tokens=len(want), num_draft_tokens=k, prefill_step_size=11)
        assert mtp(mx.array(VALUES[f"ids{j}"]), model, **options) == want


WRONG = [
    ("num_experts", 0), ("layer_types", ["linear_attention"]), ("indexer_budget", 9), ("ple_layer_ids", [2]),
    ("ple_layer_ids", [0]), ("ngram_size", 1), ("split_ngram_parts", 0), ("ple_conv_kernel_size", 1), ("eos_token_id", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_a_config_that_cannot_be_run_is_refused(name, value):
    message = f"in its config, {name} (must (be|have) .+|is needed for n-gram embeddings)"
    refused(message, TextModelArgs.from_dict, tiny_config(FLASH, **{name: value})["text_config"])


# Tables of n-gram embeddings


@pytest.mark.parametrize("eos", [5, [5, 9]])
def test_ids_on_the_host_and_on_the_device(eos):
    """The same, also where n-grams would cross the end of a text, for tokens up to the last of a large vocabulary."""
    args = TextModelArgs.from_dict(tiny_config(FLASH, vocab_size=248320, eos_token_id=eos)["text_config"])
    own, tokens = NgramHash(args, 0), np.random.default_rng(0).integers(0, 248320, (3, 40))
    tokens[:, ::7] = 5
    ids = own(tokens)
    assert np.array_equal(np.array(own(mx.array(tokens))), ids)
    assert ids.shape == (3, 38, 4)
    assert ((ids >= own.offsets) & (ids < own.offsets + own.sizes)).all()
    # What is before the end of a text does not count
    other = np.where(np.arange(40) < 6, 7, tokens)
    assert np.array_equal(own(other)[:, 6:], ids[:, 6:])


def table_files(folder, kind, n_rows=184, width=64, n_parts=3):
    """A checkpoint whose table is stored in some way, and the rows."""
    sizes = dict(ple_embed_dim=4 * width)
    write_tiny(folder, FLASH, **sizes)
    rows = mx.random.normal((n_rows, width), key=mx.random.key(1))
    if kind in FLOATS:
        arrays = {"weight": rows.astype(FLOATS[kind])}
        rows = arrays["weight"]
    else:
        how = QUANTIZED[kind]
        arrays = dict(zip(("weight", "scales", "biases"), mx.quantize(rows.astype(mx.bfloat16), **how)))
        rows = mx.dequantize(arrays["weight"], arrays["scales"], arrays.get("biases"), **how)
    edit(folder, lambda weights: [weights.pop(name) for name in [*weights] if "ngram" in name])
    ends = [0, *(n_rows * (j + 1) // n_parts for j in range(n_parts))]
    for j, (begin, end) in enumerate(pairwise(ends)):
        name = f"language_model.model.layers.0.ple.ple_embedding.ngram_embedding.shards.{j}"
        own = {f"{name}.{of}": x[begin:end] for of, x in arrays.items()}
        mx.save_safetensors(str(folder / f"model-part{j}.safetensors"), own)
    return folder, rows


FLOATS = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
QUANTIZED = {
    "4 bits": dict(group_size=32, bits=4), "8 bits": dict(group_size=64, bits=8),
    "nvfp4": dict(group_size=16, bits=4, mode="nvfp4"), "mxfp4": dict(group_size=32, bits=4, mode="mxfp4"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*FLOATS, *QUANTIZED] if LONG else ["bfloat16", "float32", "8 bits", "nvfp4"])
def test_rows_are_those_of_the_files(kind, tmp_path):
    """By row from the files, and in memory: the same text."""
    folder, rows = table_files(tmp_path / "model", kind)
    texts, fingerprints = [], set()
    for in_memory in (False, True):
        model, _ = load(str(folder), mtp=True, ngram_memory=in_memory)
        table, ids = model.ngrams.tables[0], np.array([[[0, 60, 61], [183, 0, 122]]])
        assert (table.nbytes > 0) is in_memory
        assert mx.array_equal(table(mx.array(ids) if in_memory else ids), rows[mx.array(ids)])
        texts.append(mtp(PROMPT, model, max_tokens=6, num_draft_tokens=3))
        fingerprints.add(model.fingerprint())
    assert texts[0] == texts[1] == plain(PROMPT, model, max_tokens=6)
    assert len(fingerprints) == 1
    add_tables(model, 7)
    model.update({})  # the digest is kept until then
    assert model.fingerprint() not in fingerprints


def part(folder, j=1):
    return folder / f"model-part{j}.safetensors"


def cut(folder):
    part(folder).write_bytes(part(folder).read_bytes()[:-64])


def narrow(folder):
    weights = mx.load(str(part(folder)))
    changed = {name: w[:, :-1] if name.endswith("weight") else w for name, w in weights.items()}
    mx.eval(changed)
    mx.save_safetensors(str(part(folder)), changed)


def of_64_numbers(folder):
    """A model whose tables have rows of 64 numbers."""
    configure(folder, text={"ple_embed_dim": 256})
    edit(folder, lambda w: w.update(parameters(tiny_model(FLASH, ple_embed_dim=256))))


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (cut, "model-part1.safetensors of .* is truncated or damaged"),
        (narrow, "has other arrays in part 1 than in part 0"),
        (of_64_numbers, "has rows that are not 64 numbers, quantized or not"),
    ],
)
def test_a_table_that_is_damaged_or_of_another_model_is_refused(spoil, error, tmp_path):
    folder, _ = table_files(tmp_path / "model", "bfloat16", width=32)
    spoil(folder)
    refused(error, load, str(folder), mtp=True)


def in_fp8(folder):
    for file in folder.glob("model-part*.safetensors"):
        ((name, w),) = mx.load(str(file)).items()
        save(folder, {name: mx.to_fp8(w), f"{name}_scale_inv": mx.ones((1, 1))}, file.name)
    configure(folder, quantization_config={"quant_method": "fp8"})


WAYS = ["local", "hub"]
LACKS = [
    (lambda folder: part(folder).unlink(), "lacks a part of the n-gram table of layer 0"),
    (lambda folder: part(folder, 2).unlink(), "has 122 rows, not 184"),
    (in_fp8, "is in F8_E4M3, not in 16 or 32 bits or quantized by MLX"),
]
LACKS = [(*case, way) for i, case in enumerate(LACKS) for way in (WAYS if LONG else WAYS[i % 2 :][:1])]


@pytest.mark.parametrize(("spoil", "error", "where"), LACKS)
def test_inspect_tells_what_a_table_lacks(spoil, error, where, hub, tmp_path):
    """In the line that load prints, with the command that writes the table. The head and the rest are complete."""
    folder, _ = table_files(tmp_path / "model", "bfloat16")
    spoil(folder)
    (folder / "README.md").write_text("---\nbase_model: org/flash\n---\n")
    hub.publish("org/damaged", folder)
    name = str(folder) if where == "local" else "org/damaged"
    said = report(inspect(name))["--mtp"]
    assert error in said
    assert said.endswith("with `mlx_mtp convert --quantize --hf-path org/flash --mlx-path NEW`.")
    for mtp_ in (True, False, "cached"):
        refused(re.escape(said), load, name, mtp=mtp_)
    refused(re.escape(said), converted, name, tmp_path / "out")
    if where == "hub":  # before a weight is downloaded
        assert hub.served["model.safetensors"] <= 8 * HEADER_BYTES


def test_a_file_that_is_cut_later_is_an_error(tmp_path):
    folder, _ = table_files(tmp_path / "model", "float32")
    model, _ = load(str(folder), mtp=True, ngram_memory=False)
    os.truncate(part(folder, 2), 100)
    refused("n-gram table has been cut", model.ngrams.tables[0], np.array([183]))


def test_memory_is_that_of_what_is_held(tmp_path):
    """A table in files takes none. By default it is loaded if the model with it leaves enough."""
    folder, rows = table_files(tmp_path / "model", "float32", n_rows=100_000)
    for max_memory, asked, is_held in ((10**9, None, True), (10**9, False, False), (2 * 10**7, None, False)):
        before, limit = mx.get_active_memory(), Account().held + max_memory
        model, _ = load(str(folder), mtp=True, ngram_memory=asked, max_memory=limit, context=64)
        assert needs_of(model, 100).ngrams == (rows.nbytes if is_held else 0)
        assert (mx.get_active_memory() - before > rows.nbytes) is is_held
        del model
    options = dict(mtp=True, ngram_memory=True, max_memory=Account().held + 2 * 10**7, context=64)
    refused(r"does not fit: it needs .*ngrams 25\.6 MB", load, str(folder), **options)


# Conversions


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = shutil.copytree(FOLDER, tmp_path_factory.mktemp("raw") / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "moe35" / name, folder)
    return folder


def test_a_conversion_keeps_the_head_and_quantizes_the_table(raw, tmp_path):
    """The table in 4 bits in groups of 32, or in less where rows are shorter, and routers in 8 bits."""
    source, _ = table_files(tmp_path / "source", "float32")
    out = converted(source, tmp_path / "out", quantize=True, q_bits=3, q_group_size=32)
    weights, config = tensors(out), config_of(out)
    assert not differing(split_head(weights)[1], split_head(tensors(source))[1])
    name = "language_model.model.layers.0.ple.ple_embedding.ngram_embedding.shards.{}"
    parts = [weights[name.format(j) + ".weight"] for j in range(3)]  # as many as its config has
    assert [len(part) for part in parts] == [62, 61, 61]
    assert all(config["quantization"][name.format(j)]["group_size"] == 32 for j in range(3))
    assert json.loads((out / "model.safetensors.index.json").read_text())["weight_map"].keys() == weights.keys()
    ours, theirs = (load(str(folder), mtp=True)[0] for folder in (out, source))
    ids = np.arange(184)
    want = mx.dequantize(*mx.quantize(theirs.ngrams.tables[0](ids), 32, 4), 32, 4)
    assert mx.array_equal(ours.ngrams.tables[0](ids), want)
    assert (ours.layers[0].mlp.gate.bits, ours.layers[0].linear_attn.in_proj_z.bits) == (8, 3)
    assert mtp(PROMPT, ours, max_tokens=12, num_draft_tokens=3) == plain(PROMPT, ours, max_tokens=12)
    again = load(str(converted(raw, tmp_path / "mlx")), mtp=True)[0]  # other names, other convolutions, no other number
    ids = mx.array(VALUES["ids3"])
    assert difference(again(ids[None])[0], "logits3") <= TOLERANCE


def test_a_head_is_grafted_and_described(raw, tmp_path):
    without = converted(raw, tmp_path / "without", mtp=False)
    grafted = converted(without, tmp_path / "grafted", graft_mtp_from=str(raw), skip_check=True)
    lines = report(inspect(str(grafted)))
    assert (lines["Backbone"], lines["--mtp"]) == ("not quantized (F32), converted", "ready")
    assert lines["N-grams"] == "0.2 MB of that size, read from the files by row"
    assert not differing(parameters(load(str(grafted), mtp=True)[0]), parameters(load(str(raw), mtp=True)[0]))


def test_without_a_head_and_without_images(raw):
    """mlx-lm has no such model: without its head it is loaded here."""
    model, _ = load(str(raw), mtp=False)
    want = VALUES["greedy0"][:8].tolist()
    assert not has_head(model)
    assert plain(mx.array(VALUES["ids0"]), model, max_tokens=8) == want
    assert mtp(mx.array(VALUES["ids0"]), model, max_tokens=8, copy_drafts=3) == want
    refused("qwen4_exp takes text only here", load, str(raw), vision="auto")
    refused("qwen4_exp takes text only here", vision_of, model)
    options = dict(num_draft_tokens=0, input_embeddings=mx.zeros((1, 64)))
    refused("does not support input embeddings", mtp, mx.array([1]), model, **options)
