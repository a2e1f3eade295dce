"""GLM's families, whose head is one more layer of the checkpoint: values of transformers, texts of mlx-lm, files.

What they have in common with other families is tested with theirs: ``FAMILIES`` in ``support/models.py`` has the Lite model.
"""

import shutil
from unittest.mock import Mock

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

import mlx_mtp
from mlx_mtp import DEMO, MTPError, make_prompt_cache
from mlx_mtp.checkpoint import load as load_module
from mlx_mtp.checkpoint.heads import acceptance
from mlx_mtp.checkpoint.reader import CheckpointReader, n_bytes
from mlx_mtp.convert.__main__ import inspect
from mlx_mtp.core.layers.mtp import run_head
from mlx_mtp.prompts import built_in_tokens
from tests.support.checkpoints import accepting, config_of, converted, drop, edit, parameters, tensors, write
from tests.support.commands import refused, report
from tests.support.decoding import PROMPT, difference, mtp, plain
from tests.support.hub_stand_in import HEADER_BYTES
from tests.support.models import DATA, GLM, LATENT, TRAINED, arrays_equal, load_reference

TOLERANCE = {GLM: 1e-4, LATENT: 5e-4}  # of logits; the Lite model's own order of operations is another
HEAD = "model.layers.4."
IN_MLX_VLM = (
    ("pre_fc_norm_embedding.", "model.enorm."), ("pre_fc_norm_hidden.", "model.hnorm."), ("fc.", "model.eh_proj."),
    ("norm.", "model.shared_head_norm."), ("layers.0.", "model.mtp_block."),
)  # fmt: skip


@pytest.fixture(scope="module", params=[GLM, LATENT])
def case(request):
    """A family, its reference values, and the model."""
    return request.param, np.load(DATA / request.param / "reference.npz"), load_reference(DATA / request.param)


@pytest.fixture(params=[GLM, LATENT])
def folder(request, tmp_path, monkeypatch):
    """A checkpoint as published, whose model was never trained on the built-in text."""
    accepting(monkeypatch, 0.8)
    return with_tokenizer(shutil.copytree(DATA / request.param, tmp_path / "published"))


def with_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


def test_backbone_head_and_further_drafts_have_the_values_of_transformers(case):
    family, values, model = case
    for j in range(4):
        ids = mx.array(values[f"ids{j}"])[None]
        logits, hidden = model(ids, return_hidden=True)
        next_tokens = mx.concatenate([ids[:, 1:], mx.argmax(logits[:, -1:], axis=-1)], axis=1)
        cache = model.head_layer.make_cache()
        out = model.mtp(model.model.embed_tokens(next_tokens), hidden, cache)
        drafts = model.draft_logits(out)
        assert mx.array_equal(out, model.mtp(model.model.embed_tokens(next_tokens), hidden))  # without a cache
        second = model.draft_logits(run_head(model, out[:, -1:], mx.argmax(drafts[:, -1:], axis=-1), cache))
        n = len(values[f"logits{j}"])
        for name, got in {"logits": logits, "hidden": hidden, "draft": drafts}.items():
            assert difference(got[0, -n:], values[f"{name}{j}"]) <= TOLERANCE[family], (name, j)
        assert difference(second[0, 0], values[f"second{j}"]) <= TOLERANCE[family]
        assert mtp(ids[0], model, max_tokens=24, num_draft_tokens=j) == values[f"greedy{j}"].tolist()


def test_a_window_changes_no_row_and_is_what_single_tokens_are(case):
    """A rollback is a trim: the confirmed tokens of a pass change nothing."""
    _, values, model = case
    prompt, window = mx.array(values["ids1"]), mx.array(values["greedy1"][:5])
    plain_cache, split = (make_prompt_cache(model) for _ in range(2))
    for cache in (plain_cache, split):
        model(prompt[None], cache=cache)
    one_by_one = [model(window[None, t : t + 1], cache=plain_cache) for t in range(5)]
    together = model(window[None], cache=split, n_confirmed=2)
    assert difference(together[0], np.array(mx.concatenate(one_by_one, axis=1)[0])) < 1e-5


def test_quantized_keys_are_those_of_mlx_lm_or_refused(case):
    family, _, model = case
    options = dict(max_tokens=16, kv_bits=8, kv_group_size=32, quantized_kv_start=8)
    if family == LATENT:
        refused("kv_bits=8 is refused: latent attention", mtp, PROMPT, model, **options)
    else:
        assert mtp(PROMPT, model, num_draft_tokens=2, **options) == plain(PROMPT, model, **options)


def test_a_conversion_keeps_the_head_and_loads_in_mlx_lm(folder, tmp_path):
    """In 4 bits, with the head in 16 and under its published names, but for the copies."""
    out = converted(folder, tmp_path / "out", quantize=True, q_bits=4, q_group_size=32, dtype="bfloat16")
    stored = tensors(out)
    assert {HEAD + name for name in ("eh_proj.weight", "enorm.weight", "shared_head.norm.weight")} <= stored.keys()
    assert not {HEAD + "embed_tokens.weight", HEAD + "shared_head.head.weight"} & stored.keys()
    assert {w.dtype for name, w in stored.items() if name.startswith(HEAD)} <= {mx.bfloat16, mx.float32}
    assert any(name.endswith("layers.1.self_attn.o_proj.scales") for name in stored)
    (ours, _), (stock, _) = mlx_mtp.load(str(out)), mlx_lm.load(str(out))
    for model in (ours, stock):
        model.set_dtype(mx.float32)  # MLX's CPU backend multiplies gathered matrices in nothing else
    text = plain(PROMPT, stock, max_tokens=12)
    assert mtp(PROMPT, ours, max_tokens=12, num_draft_tokens=2) == text
    assert report(inspect(str(out)))["--mtp"].startswith("ready")


def test_the_head_alone_is_fetched_from_the_original_and_grafted(folder, hub, tmp_path):
    hub.publish("org/original", folder)
    bare = converted(folder, tmp_path / "bare", mtp=False, quantize=True, q_bits=4, q_group_size=32)
    assert config_of(bare).get("mlx_mtp") is None
    (bare / "README.md").write_text("---\nbase_model: org/original\n---\n")
    model, _ = mlx_mtp.load(str(bare), mtp="auto")
    weights = [n for file, n in hub.served.items() if file.endswith(".safetensors")]
    n_head = n_bytes(CheckpointReader(str(folder)).head())
    n_compared = 4 * (1 << 20)  # the two copies and what they are copies of
    assert n_head <= sum(weights) <= n_head + n_compared + 2 * HEADER_BYTES * len(weights)
    assert model.fetched_head.source == "org/original"
    graft = converted(bare, tmp_path / "graft", graft_mtp_from=str(folder), skip_check=True)
    assert arrays_equal(model.mtp.parameters(), mlx_mtp.load(str(graft))[0].mtp.parameters())
    assert mlx_lm.load(str(graft))


@pytest.mark.parametrize("folder", [LATENT], indirect=True)
def test_a_drafter_of_mlx_vlm_is_a_head(folder, tmp_path):
    """Its layer has a name of its own, and the copies have those of the model's tensors."""
    want = parameters(mlx_mtp.load(str(folder))[0].mtp)
    head = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), mx.zeros((8, 8)))
    for name, w in want.items():
        ours, theirs = next(pair for pair in IN_MLX_VLM if name.startswith(pair[0]))
        head[theirs + name.removeprefix(ours)] = w
    config = {"model_type": f"{LATENT}_mtp", "text_config": config_of(folder)}
    drafter = write(tmp_path / "drafter", config, head)
    model, _ = mlx_mtp.load(str(folder), mtp=str(drafter))
    assert arrays_equal(parameters(model.mtp), want)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "shared_head.head.weight"])
def test_copies_that_differ_are_refused(folder, name):
    edit(folder, lambda weights: weights.update({HEAD + name: weights[HEAD + name] + 1e-3}))
    refused(f"has its own {HEAD}{name}, other than the model's", mlx_mtp.load, str(folder))


@pytest.mark.parametrize("name", ["eh_proj.weight", "mlp.experts.3.up_proj.weight", "self_attn.o_proj.weight"])
def test_an_error_has_the_name_of_a_tensor_in_the_files(folder, name):
    edit(folder, lambda weights: weights.update({HEAD + name: mx.zeros((2, 3))}))
    refused(rf"does not fit this model: {HEAD}{name} is \[2, 3\], not", mlx_mtp.load, str(folder), error=MTPError)
    drop(folder, lambda stored: stored == HEAD + name)
    refused(rf"The MTP head lacks {HEAD}{name}\.", mlx_mtp.load, str(folder), error=MTPError)


@pytest.mark.parametrize("folder", [LATENT], indirect=True)
@pytest.mark.parametrize("added", [{"weight": mx.zeros((7, 31))}, {"scales": mx.zeros((2, 1))}])
def test_latent_weights_that_cannot_be_divided_are_refused(folder, added):
    """Of another shape, and quantized without biases."""
    edit(folder, lambda weights: weights.update({f"{HEAD}self_attn.kv_b_proj.{part}": w for part, w in added.items()}))
    refused("does not fit this model: its kv_b_proj", mlx_mtp.load, str(folder), error=MTPError)


def test_a_checkpoint_without_a_head_loads_as_in_mlx_lm(folder, tmp_path, hub, caplog):
    bare = converted(folder, tmp_path / "bare", mtp=False)
    (bare / "README.md").unlink()
    model, _ = mlx_mtp.load(str(bare))
    assert "generates without drafts" in caplog.text
    assert type(model).__module__.startswith("mlx_lm.")


# What a further draft is fed


def second_drafts(model, tokenizer, is_normed):
    """The acceptance of second drafts on the built-in text, by a pass of the head for each draft."""
    tokens = built_in_tokens(tokenizer, model.vocab_size, acceptance.N_TOKENS)
    logits, hidden = model(tokens, return_hidden=True)
    choices, cache = mx.argmax(logits[0], axis=-1).tolist(), model.head_layer.make_cache()
    text, found = tokens[0].tolist(), []
    model.mtp.is_fed_normed = is_normed
    for i in range(len(text) - 2):
        out = run_head(model, hidden[:, i : i + 1], mx.array([[text[i + 1]]]), cache)
        draft = mx.argmax(model.draft_logits(out), axis=-1)
        out = run_head(model, out, draft, cache)
        cache.trim(1)
        if draft.item() == text[i + 2]:
            found.append(mx.argmax(model.draft_logits(out)).item() == choices[i + 2])
    return np.mean(found)


def test_both_inputs_of_second_drafts_are_measured(monkeypatch):
    """Of a trained model whose head has the same pattern, and a norm that matters."""
    model, tokenizer = mlx_mtp.load(TRAINED)
    norm = model.mtp.norm
    norm.weight = norm.weight * (1 + 0.9 * mx.sin(mx.arange(norm.weight.size)))
    monkeypatch.setattr(acceptance, "N_TOKENS", 96)
    want = {is_normed: second_drafts(model, tokenizer, is_normed) for is_normed in (True, False)}
    model.mtp.is_fed_normed = True
    assert acceptance.measure_feeding(model, tokenizer) == pytest.approx(want, abs=0.02)
    assert want[True] != want[False]
    assert model.mtp.is_fed_normed


@pytest.mark.parametrize(("rates", "is_normed"), [({True: 0.2, False: 0.5}, False), ({True: 0.5, False: 0.5}, True)])
def test_the_first_use_keeps_the_better_input(folder, monkeypatch, rates, is_normed):
    """Later uses know it. The text is the same."""
    monkeypatch.setattr(load_module, "ensure_tested", Mock())
    texts = []
    for measure in (lambda *_: rates, None):
        monkeypatch.setattr(acceptance, "measure_feeding", measure)
        model, _ = mlx_mtp.load(str(folder))
        model.set_dtype(mx.float32)
        assert model.mtp.is_fed_normed is is_normed
        texts.append(mtp(PROMPT, model, max_tokens=12, num_draft_tokens=3))
    assert texts == [plain(PROMPT, model, max_tokens=12)] * 2
