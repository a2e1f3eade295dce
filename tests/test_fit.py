"""The MTP head fitted to its backbone: more drafts are accepted, and nothing else changes."""

import itertools
import json
import random
import re
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.cache import KVCache
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_mtp import convert, load, mtp_generate_step
from mlx_mtp.cli import display
from mlx_mtp.decoding import clock
from mlx_mtp.decoding.counts import DraftCounts
from mlx_mtp.fit import __main__ as command
from mlx_mtp.fit import comparison as measuring
from mlx_mtp.fit import fitting
from mlx_mtp.fit import loss as losses
from mlx_mtp.fit.comparison import TextCounts, compare, measure
from mlx_mtp.fit.lora import Lora
from mlx_mtp.fit.loss import DraftKVCache, DraftLoss
from mlx_mtp.fit.recording import read, record
from mlx_mtp.fit.texts import Text, answer_all, read_corpus, split
from mlx_mtp.fit.training import Schedule, iterate_batches, make_trainable, train_head
from mlx_mtp.layers.mtp import run_head
from tests.support.checkpoints import tensors, write
from tests.support.commands import assert_refused
from tests.support.decoding import plain
from tests.support.models import PACK, tiny_config, tiny_model

LAYERS = "language_model.model.layers"
PROMPT = mx.array([30, 31, 32, 33])


def predictable_model(family="qwen3_5"):
    """A random model that says few different tokens and looks little further back than the last: a head can learn it."""
    model = tiny_model(family, vocab_size=512)

    def change(name, p):
        if name.startswith(LAYERS) and name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            return 0.3 * p
        return p * (mx.arange(512) < 24)[:, None] if name.endswith("lm_head.weight") else p

    model.update(tree_map_with_path(change, model.parameters()))
    return model


@pytest.fixture(scope="module", autouse=True)
def plain_steps():
    """Training without ``mx.compile``, which on the CPU runs a C++ compiler for each of some 60 kernels: 20 s of its time."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture
def compiled():
    mx.enable_compile()
    yield
    mx.disable_compile()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose head has learned nothing, and 36 prompts."""
    folder = tmp_path_factory.mktemp("fit")
    weights = dict(tree_flatten(predictable_model().parameters()))
    write(folder / "model", tiny_config("qwen3_5", vocab_size=512), weights)
    shutil.copy(folder / "model" / "model.safetensors", folder / "before.safetensors")
    rng = random.Random(0)
    prompts = (" ".join(rng.choices(["alpha", "beta", "gamma", "delta"], k=3)) for _ in range(36))
    (folder / "prompts.txt").write_text("\n---\n".join(prompts))
    return folder


def run(monkeypatch, folder, name, *flags):
    """``mlx_mtp fit`` in this process, where all steps take as long: what drafts the answers could round them otherwise."""
    monkeypatch.setattr(clock, "perf_counter", itertools.count(0.0).__next__)
    argv = [
        "--model",
        folder / "model",
        "--mlx-path",
        folder / name,
        "--prompts",
        folder / "prompts.txt",
        "--drafts",
        2,
    ]
    argv += ["--answers", 1, "--temp", 0, "--max-tokens", 12, "--batch-size", 8, "--steps-per-eval", 10, *flags]
    monkeypatch.setattr(sys, "argv", ["mlx_mtp.fit", *map(str, argv)])
    command.main()


@pytest.fixture(scope="module")
def fitted(folder):
    with pytest.MonkeyPatch.context() as monkeypatch:
        run(monkeypatch, folder, "fitted", "--iters", 20, "--learning-rate", 1e-2)
    return folder / "fitted"


def accepted(model, prompts):
    """The share of first drafts that the loop accepts."""
    counts = DraftCounts()
    for prompt in prompts:
        for _ in mtp_generate_step(mx.array(prompt), model, max_tokens=24, num_draft_tokens=1, counts=counts):
            pass
    return counts.accepted[0] / counts.drafted[0]


def test_more_drafts_are_accepted_and_the_text_is_the_same(folder, fitted):
    before, tokenizer = load(str(folder / "model"))
    after, _ = load(str(fitted))
    # The words of the prompts, but none of the prompts.
    prompts = [tokenizer.encode(text) for text in ("delta delta beta", "gamma alpha", "beta", "alpha beta gamma delta")]
    assert accepted(after, prompts) > accepted(before, prompts) + 0.1
    for prompt in prompts:
        text = plain(prompt, before, max_tokens=24)
        assert plain(prompt, after, max_tokens=24) == text
        assert [t for t, *_ in mtp_generate_step(mx.array(prompt), after, max_tokens=24, num_draft_tokens=3)] == text


def test_the_weights_of_the_backbone_are_linked_and_unchanged(folder, fitted):
    assert (fitted / "model.safetensors").stat().st_ino == (folder / "model" / "model.safetensors").stat().st_ino
    assert (fitted / "model.safetensors").read_bytes() == (folder / "before.safetensors").read_bytes()
    assert not (folder / "fitted.fit").exists()


def test_the_head_keeps_its_dtype_and_its_origin(folder, fitted):
    config = json.loads((fitted / "config.json").read_text())
    assert config["mlx_mtp"]["source"] == str(folder / "model")
    assert config["mlx_mtp"]["dtype"] == "float32"
    assert "19 iterations, 2 drafts" in config["mlx_mtp_fit"]["trained_on"]
    card = (fitted / "README.md").read_text()
    assert "tokens per step" in card
    assert f"--graft-mtp-from {folder / 'model'} --model {fitted}" in card


def test_grafting_brings_the_unfitted_head_back(folder, fitted, tmp_path):
    convert(str(fitted), str(tmp_path / "back"), graft_mtp_from=str(folder / "model"), skip_check=True)
    before, back, after = (load(str(path))[0].mtp.fc.weight for path in (folder / "model", tmp_path / "back", fitted))
    assert mx.array_equal(before, back)
    assert not mx.array_equal(before, after)


def test_a_head_that_is_not_better_is_not_written(folder, monkeypatch, capsys):
    """It is resumed after the training, and does not measure the head as it was again. The log is plain text."""
    flags = ("--iters", 1, "--learning-rate", 1e-9, "--max-tokens", 8)
    n_measured = 0

    def count(*args):
        nonlocal n_measured
        n_measured += 1
        return measure(*args)

    def end(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "measure", count)
    with monkeypatch.context() as ended, pytest.raises(SystemExit):
        ended.setattr(fitting, "measure", end)
        run(ended, folder, "same", *flags)
    out, err = capsys.readouterr()
    assert n_measured == 1
    parts = ("Answering: 0 of ", "Measuring: 0 of ", "Recording train: 0 of", "Training: 0 of 1 iterations")
    assert [part for part in parts if f"[INFO] {part}" not in err] == []
    assert re.search(r"^\[INFO\] Training: 1 of 1 iterations, [\d:]+ elapsed, [\d:]+ left$", err, re.M)
    assert "train_loss" in out
    assert "\x1b" not in out
    with pytest.raises(SystemExit) as status:
        run(monkeypatch, folder, "same", *flags)
    assert n_measured == 1
    assert status.value.code == 1
    out, err = capsys.readouterr()
    assert "[INFO] It was measured by the run before" in out
    assert err.endswith("The fitted head is not better by more than the uncertainty: nothing was written.\n")
    assert not (folder / "same").exists()
    assert not (folder / "same.fit").exists()


def test_the_next_command_uses_what_was_written():
    args = {"model": "org/model", "mlx_path": "my model", "iters": 1}
    assert command.next_command(**args) == "mlx_mtp chat --mtp --model 'my model'"
    assert command.next_command(**args, lora_rank=8) == "mlx_mtp chat --mtp --model org/model --adapter-path 'my model'"


@pytest.mark.slow
def test_an_adapter_in_place_of_a_checkpoint(folder, monkeypatch):
    run(monkeypatch, folder, "adapter", "--iters", 21, "--learning-rate", 1e-2, "--lora-rank", 8)
    before, tokenizer = load(str(folder / "model"))
    after, _ = load(str(folder / "model"), adapter_path=str(folder / "adapter"))
    prompts = [tokenizer.encode(text) for text in ("delta delta beta", "gamma alpha", "beta", "alpha beta gamma delta")]
    assert accepted(after, prompts) > accepted(before, prompts) + 0.05
    assert {name.rpartition(".")[2] for name in tensors(folder / "adapter")} == {"lora_a", "lora_b"}


def backbone_adapter(folder: Path, rank=4):
    """An adapter as ``mlx_lm.lora`` writes it, of random numbers."""
    folder.mkdir()
    model, _ = load(str(folder.parent / "model"))
    parameters = {"rank": rank, "scale": 10.0, "dropout": 0.0}
    model.freeze()
    linear_to_lora_layers(model, 1, parameters)
    keys = iter(mx.random.split(mx.random.key(0), 100))
    trained = tree_map_with_path(
        lambda _, p: 0.05 * mx.random.normal(p.shape, key=next(keys)), model.trainable_parameters()
    )
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(tree_flatten(trained)))
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.slow
def test_an_adapter_of_the_backbone_and_one_of_the_head_in_one(folder, monkeypatch):
    adapter = backbone_adapter(folder / "tuned")
    tuned, _ = load(str(folder / "model"), adapter_path=adapter)
    monkeypatch.setattr(measuring, "SURE", 0.0)  # any gain: a surer one takes longer
    flags = ("--adapter-path", adapter, "--learning-rate", 1e-2)
    run(monkeypatch, folder, "both", *flags, "--iters", 26, "--lora-rank", 4)
    both, tokenizer = load(str(folder / "model"), adapter_path=str(folder / "both"))
    prompt = tokenizer.encode("alpha beta gamma")
    assert plain(prompt, both, max_tokens=32) == plain(prompt, tuned, max_tokens=32)
    assert accepted(both, [prompt]) > accepted(tuned, [prompt])
    with pytest.raises(ValueError, match=r"--lora-rank must be that of .*, 4, not 8"):
        _ = Lora(8, adapter).scale


def test_convert_fuses_an_adapter_and_keeps_the_head(folder):
    adapter = backbone_adapter(folder / "to_fuse")
    convert(str(folder / "model"), str(folder / "fused"), adapter_path=adapter)
    tuned, _ = load(str(folder / "model"), adapter_path=adapter)
    fused, _ = load(str(folder / "fused"))
    base, _ = load(str(folder / "model"))
    assert mx.allclose(fused(PROMPT[None]), tuned(PROMPT[None]), rtol=1e-4, atol=1e-4)
    assert not mx.allclose(fused(PROMPT[None]), base(PROMPT[None]), rtol=1e-2, atol=1e-2)
    assert mx.array_equal(fused.mtp.fc.weight, base.mtp.fc.weight)
    with pytest.raises(ValueError, match="--graft-mtp-from adds a head and converts nothing"):
        convert(str(folder / "model"), str(folder / "x"), adapter_path=adapter, graft_mtp_from=str(folder / "model"))


# The loss


def test_drafts_in_training_are_those_of_decoding():
    model = tiny_model("qwen3_5")
    tokens = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
    hidden = model.model(tokens)
    cache, out, drafts = DraftKVCache(), hidden, []
    for d in range(1, 5):
        out = model.mtp(model.model.embed_tokens(mx.roll(tokens, -d, 1)), out, cache)
        drafts.append(out)
    for i in range(8):
        own = KVCache()
        out = run_head(model, hidden[:, : i + 1], tokens[:, 1 : i + 2], own)
        for d in range(1, 5):
            if d > 1:
                out = run_head(model, out, tokens[:, i + d : i + d + 1], own)
            assert mx.allclose(drafts[d - 1][:, i], out[:, 0], atol=1e-5), (i, d)


def divergences(model, tokens, n_drafts):
    """Of each draft at each row, from whole distributions: {(draft, row): nats}"""
    hidden = model.model(tokens)
    target = nn.log_softmax(model.logits(hidden)[0], axis=-1)  # [T, V]
    cache, out, found = DraftKVCache(), hidden, {}
    for d in range(1, n_drafts + 1):
        out = model.mtp(model.model.embed_tokens(mx.roll(tokens, -d, 1)), out, cache)
        q = nn.log_softmax(model.logits(out)[0], axis=-1)
        for i in range(tokens.shape[1] - d):
            found[d, i] = (mx.exp(target[i + d]) * (target[i + d] - q[i])).sum().item()
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("logits_at_once", [1 << 25, 32 * 5])
def test_the_loss_is_the_weighted_divergence(monkeypatch, tmp_path, tied, logits_at_once):
    """Of texts of two lengths, one with a prompt; the vocabulary has as many tokens as are recorded."""
    monkeypatch.setattr(losses, "LOGITS", logits_at_once)
    model = tiny_model("qwen3_5", tie_word_embeddings=tied)
    texts = [Text("a", [3, 1, 4, 1, 5, 9, 2, 6]), Text("b", [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4], 4)]
    files = record(model, texts, tmp_path, "x", 2, 64)
    (batch,) = iterate_batches(files, 2)
    loss, n_rows = DraftLoss(model.model.embed_tokens, model.output_layer, 3)(model.mtp, *batch)
    a, b = (divergences(model, mx.array([text.tokens]), 3) for text in texts)
    expected = 0.0
    for d, weight in zip((1, 2, 3), (1 / 1.96, 0.6 / 1.96, 0.36 / 1.96)):
        rows = [x for (k, _), x in a.items() if k == d] + [x for (k, i), x in b.items() if k == d and i >= 3]
        expected += weight * np.mean(rows)
    assert loss.item() == pytest.approx(expected, rel=2e-3)  # probabilities are kept in 16 bits
    assert n_rows.item() == 7 + 7


def test_gradients_over_an_output_layer_in_float16_are_those_in_float32(tmp_path):
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
    texts = [Text("a", [3, 1, 4, 1, 5]), Text("b", [2, 7, 1, 8, 2, 8, 1, 8], 2)]
    for text, file in zip(texts, record(model, texts, tmp_path, "x", 2, length)):
        kept, hidden = read(file), model.model(mx.array([text.tokens]))[:, -length:]
        assert kept["tokens"].tolist() == text.tokens[-length:]
        assert kept["n_prompt"].item() == max(text.n_prompt - max(len(text.tokens) - length, 0), 0)
        assert mx.allclose(kept["hidden"], hidden[0], atol=1e-5)
        logits = model.logits(hidden)[0]
        best = mx.argsort(-logits, axis=-1)[:, :32]
        assert mx.array_equal(mx.sort(kept["ids"], axis=-1), mx.sort(best, axis=-1))
        expected = mx.softmax(mx.take_along_axis(logits, kept["ids"], axis=-1), axis=-1)
        assert mx.allclose(kept["probabilities"], expected, atol=1e-3)


# Training


def train(folder, model, iters=12, loss=DraftLoss, **kwargs):
    rng = random.Random(0)
    texts = [Text(str(i), rng.choices(range(32), k=24)) for i in range(14)]
    train_files = record(model, texts[:10], folder / "states", "train", 4, 64)
    valid_files = record(model, texts[10:], folder / "states", "valid", 4, 64)
    make_trainable(model.mtp, kwargs.pop("lora", None), 0)
    how = Schedule(iters, 4, 1e-2, 4, 0)
    draft_loss = loss(model.model.embed_tokens, model.output_layer, 2)
    return train_head(model.mtp, draft_loss, train_files, valid_files, how, folder / "training.safetensors")


class Ends(DraftLoss):
    """A loss that ends the training after the third validation, in iteration 8: each of them is a call."""

    error: type[BaseException] = RuntimeError
    last, calls = 8 + 3, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == self.last:
            raise self.error("ended")
        return super().__call__(*args)


class EndsCompiled(Ends):
    last = 1 + 3 + 1  # a compiled step calls it once, and so does the fourth validation


def frozen_model(family="qwen3_5"):
    model = tiny_model(family)
    model.freeze()
    return model


def goes_on_where_it_was_ended(tmp_path, loss):
    whole = frozen_model()
    train(tmp_path / "whole", whole)
    ended, resumed = frozen_model(), frozen_model()
    with pytest.raises(RuntimeError, match="ended"):
        train(tmp_path / "ended", ended, loss=loss)
    trained = train(tmp_path / "ended", resumed)
    assert trained.start > 0
    for (name, a), (_, b) in zip(tree_flatten(whole.mtp.parameters()), tree_flatten(resumed.mtp.parameters())):
        assert mx.allclose(a, b, atol=1e-4), name


def test_training_goes_on_where_it_was_ended(tmp_path):
    goes_on_where_it_was_ended(tmp_path, Ends)


@pytest.mark.slow
def test_compiled_training_goes_on_where_it_was_ended(tmp_path, compiled):
    goes_on_where_it_was_ended(tmp_path, EndsCompiled)


def test_an_interrupt_keeps_the_best(tmp_path, capsys):
    class Interrupted(Ends):
        error = KeyboardInterrupt

    model = frozen_model()
    trained = train(tmp_path, model, loss=Interrupted)
    assert "Interrupted: the best head so far" in capsys.readouterr().out
    assert trained.losses[1] < trained.losses[0]
    assert 0 < trained.best_iters < 12
    for name, w in tree_flatten(model.mtp.trainable_parameters()):
        assert mx.array_equal(w, trained.best[name])


@pytest.mark.parametrize("lora", [None, Lora(2, None)], ids=["whole", "LoRA"])
def test_the_routers_of_a_mixture_of_experts_are_frozen(tmp_path, lora):
    before, model = tiny_model("qwen3_5_moe"), frozen_model("qwen3_5_moe")
    train(tmp_path, model, iters=3, lora=lora)
    changed = {name for name, _ in tree_flatten(model.mtp.trainable_parameters())}
    assert any("switch_mlp" in name for name in changed)
    assert not any(name.startswith(("layers.0.mlp.gate.", "layers.0.mlp.shared_expert_gate.")) for name in changed)
    mlp, old = model.mtp.layers[0].mlp, before.mtp.layers[0].mlp
    assert mx.array_equal(mlp.gate.weight, old.gate.weight)
    assert mx.array_equal(mlp.shared_expert_gate.weight, old.shared_expert_gate.weight)
    if lora is None:
        assert not mx.array_equal(mlp.switch_mlp.up_proj.weight, old.switch_mlp.up_proj.weight)


# Progress


def test_progress_in_a_log_is_a_line_now_and_then(monkeypatch, capsys):
    for seconds, expected in ((0, [0, 1, 2]), (30, [0, 2])):
        monkeypatch.setattr(display, "SECONDS", seconds)
        with display.bar("Answering", "answer", 2) as bar:
            for _ in range(2):
                bar.update()
        err = capsys.readouterr().err
        line = r"\[INFO\] Answering: (\d) of 2 answers, [\d:]+ elapsed, (?:\?|[\d:]+) left"
        assert [int(re.fullmatch(line, text)[1]) for text in err.splitlines()] == expected


def test_progress_in_a_terminal_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with display.bar("Answering", "answer", 2) as bar:
        bar.update(2)
    assert re.search(r"\rAnswering: +0%\|.*\rAnswering: 100%\|", capsys.readouterr().err, re.S)
    with display.bar("Answering", "answer", 0):
        pass
    assert capsys.readouterr().err == ""


# Measuring


def test_measured_counts_are_those_of_the_loop(folder):
    model, tokenizer = load(str(folder / "model"))
    prompts = [[30, 31, 32], [40, 41]]
    measured = measure(model, tokenizer, prompts, 3, 24)
    for i, prompt in enumerate(prompts):
        counts = DraftCounts()
        list(mtp_generate_step(mx.array(prompt), model, max_tokens=24, num_draft_tokens=3, counts=counts))
        assert measured.drafted[i].tolist() == counts.drafted
        assert measured.accepted[i].tolist() == counts.accepted


def test_better_means_by_more_than_the_uncertainty():
    rng = np.random.default_rng(0)
    drafted = np.full((40, 1), 50)
    before = rng.binomial(50, 0.6, (40, 1))
    noise = rng.integers(-4, 5, (40, 1))
    comparison = compare(
        TextCounts(drafted, before), TextCounts(drafted, before + noise - noise.mean().round().astype(int))
    )
    assert not comparison.is_better
    better = compare(TextCounts(drafted, before), TextCounts(drafted, np.minimum(before + 3, 50)))
    assert better.is_better
    assert better.after[0] - better.before[0] == pytest.approx(3 / 50, abs=0.002)
    # The standard error of a mean over texts, from their spread.
    assert better.before_error[0] == pytest.approx((before / 50).std(ddof=1) / 40**0.5, rel=0.1)


# Texts


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load(str(folder / "model"))[1]


def test_no_two_parts_share_a_file(tmp_path, tokenizer):
    files = [tmp_path / f"{i}.py" for i in range(30)]
    for i, file in enumerate(files):
        file.write_text(f"value_{i} = {i}\n" * 40)
    texts = read_corpus(files, tokenizer, 64)
    parts = split(texts, 32, seed=0)
    sources = [{text.source for text in part} for part in (parts.train, parts.valid, parts.test)]
    assert [len(s) for s in sources] == [23, 3, 4]
    assert not sources[0] & sources[1]
    assert not (sources[0] | sources[1]) & sources[2]
    assert all(len(text.tokens) <= 64 for text in texts)
    assert sum(len(text.tokens) for text in texts) == sum(len(tokenizer.encode(f.read_text())) for f in files)
    assert split(texts, 32, seed=1) != parts
    copies = [Text(f"copy of {text.source}", text.tokens) for text in texts]
    twice = split([*texts, *copies], 32, seed=0)
    assert not {tuple(t.tokens) for t in twice.train} & {tuple(t.tokens) for t in twice.test}


def test_lines_of_text(tmp_path, tokenizer):
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"some text number {i}"}) for i in range(3)))
    texts = read_corpus([file], tokenizer, 64)
    assert [text.source for text in texts] == [f"{file}:{i}" for i in (1, 2, 3)]
    assert tokenizer.decode(texts[0].tokens).startswith("some text number 0")


def test_an_answer_that_was_cut_short_is_made_again(tmp_path, folder):
    model, tokenizer = load(str(folder / "model"))
    prompts = [Text(str(i), [40 + i], 1) for i in range(3)]
    options = {"answers": 2, "max_tokens": 8, "temp": 1.0, "seed": 0}
    whole = answer_all(model, tokenizer, prompts, tmp_path / "a", **options)
    lines = (tmp_path / "a").read_text()
    (tmp_path / "b").write_text(lines[: len(lines) // 2])
    assert answer_all(model, tokenizer, prompts, tmp_path / "b", **options) == whole
    assert (tmp_path / "b").read_text() == lines
    assert whole[0].tokens != whole[3].tokens  # another answer to the same prompt


def few_texts(folder, tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    return ["--corpus", tmp_path / "a.txt"]


def not_text(folder, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    return ["--corpus", tmp_path / "a.txt"]


def no_format(folder, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}')
    return ["--corpus", tmp_path / "a.jsonl"]


def quantized_head(folder, tmp_path):
    convert(str(folder / "model"), str(tmp_path / "quantized"), mtp_bits=8, mtp_group_size=32, skip_check=True)
    return ["--model", tmp_path / "quantized"]


def no_adapter(folder, tmp_path):
    return ["--adapter-path", tmp_path / "none"]


def damaged_adapter(folder, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    return ["--adapter-path", tmp_path]


def other_arguments(folder, tmp_path):
    (tmp_path / "fit.json").write_text("{}")
    return ["--cache-path", tmp_path]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (few_texts, "There are 1 sources of text, too few"),
        (not_text, "a.txt cannot be read as a corpus"),
        (no_format, "a.jsonl cannot be read as a corpus (Unsupported data format"),
        (quantized_head, "is quantized: give it the original's"),
        (no_adapter, "--adapter-path: there is no folder"),
        (damaged_adapter, "could not be loaded (AttributeError"),
        (other_arguments, "was recorded with other arguments"),
        (lambda *_: ["--drafts", 9], "--drafts must be from 1 to 8, not 9."),
        (lambda *_: ["--iters", 0], "--iters must be 1 or more, not 0."),
        (lambda *_: ["--steps-per-eval", 0], "--steps-per-eval must be 1 or more, not 0."),
        (lambda *_: ["--cache-gb", 0], "--cache-gb must be more than 0, not 0.0."),
        (lambda *_: ["--lora-rank", 0], "--lora-rank must be 1 or more, not 0."),
        (lambda *_: ["--corpus", __file__, "--prompts", __file__], "Choose either --corpus or --prompts, not both."),
        (lambda *_: ["--corpus", "nope.md"], "error: --corpus: there is no file nope.md."),
        (lambda *_: ["--prompts", "nope.md"], "error: --prompts: there is no file nope.md."),
        (lambda _, tmp_path: ["--corpus", tmp_path], "is not a file."),
        (lambda folder, _: ["--mlx-path", folder / "model"], "already exists"),
    ],
)
def test_errors_are_one_line(folder, tmp_path, capsys, flags, message):
    argv = ["--model", folder / "model", "--mlx-path", tmp_path / "out", *flags(folder, tmp_path)]
    capsys.readouterr()
    assert_refused(command.main, capsys, *argv, message=message)
    assert not (tmp_path / "out").exists()
