"""The MTP head fitted to its backbone: more drafts are accepted, and nothing else changes."""

import itertools
import json
import random
import re
import shutil
from functools import partial
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path

from mlx_mtp import convert, load
from mlx_mtp.core.decoding import planner
from mlx_mtp.core.decoding.counts import DraftCounts
from mlx_mtp.core.layers.mtp import run_head
from mlx_mtp.fit import __main__ as command
from mlx_mtp.fit import fitting, training
from mlx_mtp.fit import texts as texts_of_a_fit
from mlx_mtp.fit.fitting import compare
from mlx_mtp.fit.options import FitOptions
from mlx_mtp.fit.texts import Document, Split, answer_all, prepare, read_corpus, split
from mlx_mtp.fit.training import DraftLoss, iterate_batches, make_trainable, record, train_head
from tests.support.checkpoints import config_of, differing, make_adapter, parameters, quantize_head, write
from tests.support.commands import refusal, run_command
from tests.support.decoding import mtp, plain
from tests.support.models import FLASH, PACK, tiny_config, tiny_model

PROMPT = mx.array([30, 31, 32, 33])


# Training with ``mx.compile`` would run a C++ compiler for each of some 60 kernels on the CPU: 20 s of its time.
pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose head has learned nothing, and 16 prompts.

    The random model says few different tokens and looks little further back than the last: a head can learn it.
    """

    def change(name, p):
        if name.startswith("language_model.model.layers") and re.search(r"(o_proj|out_proj|down_proj)\.weight$", name):
            return 0.3 * p
        return p * (mx.arange(512) < 24)[:, None] if name.endswith("lm_head.weight") else p

    folder = tmp_path_factory.mktemp("fit")
    weights = tree_map_with_path(change, tiny_model("qwen3_5", vocab_size=512).parameters())
    write(folder / "model", tiny_config("qwen3_5", vocab_size=512), dict(tree_flatten(weights)))
    words = itertools.product(["alpha", "beta", "gamma", "delta"], repeat=3)
    (folder / "prompts.txt").write_text("\n---\n".join(map(" ".join, random.Random(0).sample([*words], 16))))
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    return load(str(folder / "model"))


def run(monkeypatch, capsys, folder, name, *flags):
    """``mlx_mtp fit`` in this process, where all steps take as long: what drafts the answers could round them otherwise."""
    monkeypatch.setattr(planner, "perf_counter", itertools.count(0.0).__next__)
    argv = f"--model {folder}/model --mlx-path {folder}/{name} --prompts {folder}/prompts.txt --drafts 2 --answers 1"
    argv += " --temp 0 --max-tokens 12 --batch-size 8 --steps-per-eval 10"
    return run_command(command.main, capsys, *argv.split(), *flags)


def accepted(model, prompts):
    """The share of first drafts that the loop accepts."""
    counts = DraftCounts()
    for prompt in prompts:
        mtp(prompt, model, max_tokens=12, num_draft_tokens=1, counts=counts)
    return counts.accepted[0] / counts.drafted[0]


# The words of the prompts, but none of the prompts
TEXTS = ("delta delta beta beta", "gamma alpha", "beta", "alpha beta gamma delta")


def test_more_drafts_are_accepted_and_nothing_else_changes(folder, loaded, monkeypatch, capsys, tmp_path):
    weights = (folder / "model" / "model.safetensors").read_bytes()
    assert run(monkeypatch, capsys, folder, "fitted", "--iters", 20, "--learning-rate", 1e-2)[0] == 0
    fitted, (before, tokenizer) = folder / "fitted", loaded
    after, prompts = load(str(fitted))[0], [tokenizer.encode(text) for text in TEXTS]
    assert accepted(after, prompts) > accepted(before, prompts) + 0.1
    for prompt in prompts:
        text = plain(prompt, before, max_tokens=12)
        assert plain(prompt, after, max_tokens=12) == mtp(prompt, after, max_tokens=12, num_draft_tokens=3) == text

    assert (fitted / "model.safetensors").samefile(folder / "model" / "model.safetensors")
    assert (fitted / "model.safetensors").read_bytes() == weights
    assert not (folder / "fitted.fit").exists()
    config, card = config_of(fitted), (fitted / "README.md").read_text()
    assert config["mlx_mtp"].items() >= {"source": str(folder / "model"), "dtype": "float32"}.items()
    assert "19 iterations, 2 drafts" in config["mlx_mtp_fit"]["trained_on"]
    assert "tokens per step" in card
    assert f"--graft-mtp-from {folder / 'model'} --model {fitted}" in card

    convert(str(fitted), str(tmp_path / "back"), graft_mtp_from=str(folder / "model"), skip_check=True)
    back = load(str(tmp_path / "back"))[0]
    assert mx.array_equal(back.mtp.fc.weight, before.mtp.fc.weight)
    assert not mx.array_equal(back.mtp.fc.weight, after.mtp.fc.weight)


def test_a_head_that_is_not_better_is_not_written(folder, monkeypatch, capsys):
    """It is ended after the training, and uses the answers and the states again. The log is plain text."""
    flags = ("--iters", 1, "--learning-rate", 1e-9, "--max-tokens", 8)
    with monkeypatch.context() as ended:
        ended.setattr(fitting, "compare", Mock(side_effect=KeyboardInterrupt))
        status, out, err = run(ended, capsys, folder, "same", *flags)
    assert (status, err) == (130, "")
    assert re.search(r"^\[INFO\] Iteration 0: validation loss \d", out, re.M)
    assert "\x1b" not in out
    monkeypatch.setattr(texts_of_a_fit, "continue_text", None)
    monkeypatch.setattr(training, "_top_k", None)
    status, _, err = run(monkeypatch, capsys, folder, "same", *flags)
    line = "The fitted head is not better by more than the uncertainty: nothing was written.\n"
    assert (status, err.endswith(line)) == (1, True)
    assert not [*folder.glob("same*")]


@pytest.mark.slow
def test_a_head_on_top_of_an_adapter(folder, monkeypatch, capsys):
    adapter = str(make_adapter(folder / "model", folder / "tuned"))
    monkeypatch.setattr(fitting, "SURE", 0.0)  # any gain: a surer one takes longer
    flags = ("--adapter-path", adapter, "--learning-rate", 1e-2, "--iters", 26)
    assert run(monkeypatch, capsys, folder, "both", *flags)[0] == 0
    tuned, tokenizer = load(str(folder / "model"), adapter_path=adapter)
    both, _ = load(str(folder / "both"), adapter_path=adapter)
    prompt = tokenizer.encode("alpha beta gamma")
    assert plain(prompt, both, max_tokens=32) == plain(prompt, tuned, max_tokens=32)
    assert accepted(both, [prompt]) > accepted(tuned, [prompt])


def flash_model(**changes):
    """Whose texts do not fill the budget of sparse attention."""
    return tiny_model(FLASH, indexer_budget=64, **changes)


def divergences(model, text, n_drafts):
    """Of each draft at each row that is trained on, made as in decoding, from whole distributions: nats by draft."""
    tokens, found = mx.array([text.tokens]), {d: [] for d in range(1, n_drafts + 1)}
    _, hidden = model(tokens, return_hidden=True)
    target = nn.log_softmax(model.logits(hidden)[0], axis=-1)  # [T, V]
    for i in range(max(text.n_prompt - 1, 0), len(text.tokens) - 1):
        cache = model.head_layer.make_cache()
        out = run_head(model, hidden[:, : i + 1], tokens[:, 1 : i + 2], cache)
        for d in range(1, min(n_drafts, len(text.tokens) - 1 - i) + 1):
            if d > 1:
                out = run_head(model, out, tokens[:, i + d : i + d + 1], cache)
            q = nn.log_softmax(model.draft_logits(out)[0, 0], axis=-1)
            found[d].append((mx.exp(target[i + d]) * (target[i + d] - q)).sum().item())
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("make", "logits_at_once"), [(partial(tiny_model, "qwen3_5"), 1 << 25), (flash_model, 32 * 5)])
def test_the_loss_is_the_weighted_divergence(monkeypatch, tmp_path, tied, make, logits_at_once):
    """Of texts of two lengths, one with a prompt; the vocabulary has as many tokens as are recorded."""
    monkeypatch.setattr(training, "MAX_LOGITS", logits_at_once)
    model = make(tie_word_embeddings=tied)
    texts = [Document("a", [3, 1, 4, 1, 5, 9, 2, 6]), Document("b", [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4], 4)]
    (batch,) = iterate_batches(record(model, texts, tmp_path, "x", 2, 64), 2)
    loss, n_rows = DraftLoss(model.model.embed_tokens, model.output_layer, 3)(model.mtp, *batch)
    a, b = (divergences(model, text, 3) for text in texts)
    weights = {1: 1 / 1.96, 2: 0.6 / 1.96, 3: 0.36 / 1.96}
    expected = sum(weight * np.mean(a[d] + b[d]) for d, weight in weights.items())
    assert loss.item() == pytest.approx(expected, rel=2e-3)  # probabilities are kept in 16 bits
    assert n_rows.item() == 7 + 7


def test_gradients_over_an_output_layer_in_float16_are_those_in_float32():
    """Each of many rows has a small part in a mean, which float16 does not hold."""
    gradients = []
    for dtype in (mx.float16, mx.float32):
        model = tiny_model(PACK)
        layer = model.output_layer
        layer.update({name: layer[name].astype(mx.float16).astype(dtype) for name in ("scales", "biases")})
        tokens = mx.arange(32)[None]
        loss = DraftLoss(model.model.embed_tokens, layer, 1)
        ids, p = mx.broadcast_to(mx.arange(32), (1, 32, 32)), mx.full((1, 32, 32), 1 / 32)
        batch = (tokens, model.model(tokens), ids, p, mx.array([[0, 32]]))
        _, gradient = nn.value_and_grad(model.mtp, lambda mtp, f=loss, b=batch: 1e-6 * f(mtp, *b)[0])(model.mtp)
        gradients.append(gradient["fc"]["weight"])
    assert mx.abs(gradients[0] - gradients[1]).max() < 1e-3 * mx.abs(gradients[1]).max()


@pytest.mark.parametrize("length", [64, 7, 4])
def test_what_is_recorded(tmp_path, length):
    model = tiny_model("qwen3_5", vocab_size=512)
    texts = [Document("a", [3, 1, 4, 1, 5]), Document("b", [2, 7, 1, 8, 2, 8, 1, 8], 2)]
    for text, file in zip(texts, record(model, texts, tmp_path, "x", 2, length)):
        kept, hidden = mx.load(str(file)), model.model(mx.array([text.tokens]))[:, -length:]
        assert kept["tokens"].tolist() == text.tokens[-length:]
        assert kept["n_prompt"].item() == max(text.n_prompt - max(len(text.tokens) - length, 0), 0)
        assert mx.allclose(kept["hidden"], hidden[0], atol=1e-5)
        logits = model.logits(hidden)[0]
        best = mx.argsort(-logits, axis=-1)[:, :32]
        assert mx.array_equal(mx.sort(kept["ids"], axis=-1), mx.sort(best, axis=-1))
        expected = mx.softmax(mx.take_along_axis(logits, kept["ids"], axis=-1), axis=-1)
        assert mx.allclose(kept["probabilities"], expected, atol=1e-3)


def train(folder, model, iters=12, end=0, error=RuntimeError):
    """Train on random texts; ``error`` is raised in place of the ``end``-th computation of a loss."""
    rng = random.Random(0)
    texts = [Document(str(i), rng.choices(range(32), k=24)) for i in range(14)]
    parts = [record(model, part, folder / "states", str(len(part)), 4, 64) for part in (texts[:10], texts[10:])]
    model.freeze()
    make_trainable(model.mtp)
    calls, loss = itertools.count(1), DraftLoss(model.model.embed_tokens, model.output_layer, 2)

    def ending(*args):
        if next(calls) == end:
            raise error("ended")
        return loss(*args)

    return train_head(model.mtp, ending, *parts, FitOptions(iters=iters, learning_rate=1e-2, steps_per_eval=4))


def test_an_interrupt_keeps_the_best(tmp_path, capsys):
    model = tiny_model("qwen3_5")
    trained = train(tmp_path, model, end=10 + 3, error=KeyboardInterrupt)  # two iterations after the best
    assert "Interrupted: the best head so far" in capsys.readouterr().out
    assert min(trained.losses) < trained.losses[0]
    assert 0 < trained.iters < 12
    best = dict(tree_flatten(model.mtp.trainable_parameters()))
    assert not differing(best, {name: trained.weights[name] for name in best})


@pytest.mark.parametrize("family", ["qwen3_5_moe", FLASH])
def test_routers_and_indexers_are_frozen(tmp_path, family):
    model, before = tiny_model(family), parameters(tiny_model(family).mtp)
    train(tmp_path, model, iters=3)
    trained = {name for name, _ in tree_flatten(model.mtp.trainable_parameters())}
    assert any("switch_mlp" in name for name in trained)
    frozen = re.compile(r"layers\.0\.(mlp\.(shared_expert_)?gate|self_attn\.indexer)\.")
    routers = {*filter(frozen.match, before)}
    assert len(routers) == (5 if family == FLASH else 2)
    assert not routers & trained
    changed = differing({name: w for name, w in parameters(model.mtp).items() if name in before}, before)
    assert not routers & changed
    assert "layers.0.mlp.switch_mlp.up_proj.weight" in changed


def test_better_means_by_more_than_the_uncertainty():
    rng = np.random.default_rng(0)
    drafted, before = np.full((40, 1), 50), rng.binomial(50, 0.6, (40, 1))
    noise = rng.integers(-4, 5, (40, 1))
    noise[::2] += 1  # more drafts accepted by 1.3 standard errors
    assert not compare(np.stack([drafted, before]), np.stack([drafted, before + noise])).is_better
    better = compare(np.stack([drafted, before]), np.stack([drafted, np.minimum(before + 3, 50)]))
    assert better.is_better
    assert better.after[0] - better.before[0] == pytest.approx(3 / 50, abs=0.002)
    # The standard error of a mean over texts, from their spread.
    assert better.before_error[0] == pytest.approx((before / 50).std(ddof=1) / 40**0.5, rel=0.1)


# Texts


def test_no_two_parts_share_a_file(tmp_path, loaded):
    tokenizer, files = loaded[1], [tmp_path / f"{i}.py" for i in range(30)]
    for i, file in enumerate(files):
        file.write_text(f"value_{i} = {i}\n" * 40)
    texts = read_corpus(files, tokenizer, 64)
    parts = split(texts, FitOptions(files))
    train, valid, test = ({text.source for text in part} for part in (parts.train, parts.valid, parts.test))
    assert (len(train), len(valid), len(test)) == (23, 3, 4)
    assert len(train | valid | test) == 30
    assert all(len(text.tokens) <= 64 for text in texts)
    assert sum(len(text.tokens) for text in texts) == sum(len(tokenizer.encode(f.read_text())) for f in files)
    assert split(texts, FitOptions(files, seed=1)) != parts
    twice = split([*texts, *(Document(f"copy of {text.source}", text.tokens) for text in texts)], FitOptions(files))
    assert not {tuple(t.tokens) for t in twice.train} & {tuple(t.tokens) for t in twice.test}
    # Lines of text
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"some text number {i}"}) for i in range(3)))
    texts = read_corpus([file], loaded[1], 64)
    assert [text.source for text in texts] == [f"{file}:{i}" for i in (1, 2, 3)]
    assert loaded[1].decode(texts[0].tokens).startswith("some text number 0")
    # No more is recorded than is trained on
    train, valid = [Document(str(i), [1] * 8) for i in range(3)], [Document("d", [1] * 6)]
    how = FitOptions(["x"], iters=2, batch_size=1)
    assert prepare(loaded[0], None, Split(train, valid, valid), how, tmp_path) == Split(train[:2], valid, valid)


def test_an_answer_that_was_cut_short_is_made_again(tmp_path, loaded):
    prompts = [Document(str(i), [40 + i], 1) for i in range(3)]
    how = FitOptions(answers=2, max_tokens=8, temp=1.0)
    whole = answer_all(*loaded, prompts, tmp_path / "a", how)
    lines = (tmp_path / "a").read_text()
    (tmp_path / "b").write_text(lines[: len(lines) // 2])
    assert answer_all(*loaded, prompts, tmp_path / "b", how) == whole
    assert (tmp_path / "b").read_text() == lines
    assert whole[0].tokens != whole[3].tokens  # another answer to the same prompt


FILES = {"few.txt": b"text " * 100, "bytes.txt": b"\xff\xfe\x00", "x.jsonl": b'{"x": 1}'}
FILES |= {"adapter_config.json": b"{}", "fit.json": b"{}"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--corpus few.txt", "There are 1 sources of text, too few"),
        ("--corpus bytes.txt", "bytes.txt cannot be read as a corpus"),
        ("--corpus x.jsonl", "x.jsonl cannot be read as a corpus (Unsupported data format"),
        ("--model quantized", "is quantized: give it the base model's"),
        ("--adapter-path .", "The adapter . has no adapters.safetensors"),
        ("--cache-path .", "was recorded with other arguments"),
        ("--drafts 9", "--drafts must be from 1 to 8, not 9."),
        ("--learning-rate 0", "--learning-rate must be more than 0, not 0.0."),
        ("--learning-rate nan", "--learning-rate must be 0 or more, not nan."),
        ("--corpus few.txt --prompts few.txt", "Choose either --corpus or --prompts, not both."),
        ("--mlx-path .", "already exists"),
    ],
)
def test_errors_are_one_line(folder, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    if "quantized" in flags:
        quantize_head(shutil.copytree(folder / "model", tmp_path / "quantized"), 8)
    capsys.readouterr()
    argv = ["--model", folder / "model", "--mlx-path", "out", *flags.split()]
    assert message in refusal(command.main, capsys, *argv)
    assert not [*tmp_path.glob("out*")]
