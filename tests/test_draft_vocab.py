"""Cheaper drafts: their output layer has the model's rows for the draft vocabulary, and verification is unchanged."""

import json

import mlx.core as mx
import pytest
from mlx_lm.tuner.lora import LoRALinear

import mlx_mtp
from mlx_mtp.checkpoint.settings import cheapen_drafts
from mlx_mtp.core.caches.validation import BITS
from mlx_mtp.core.layers.drafting import DraftLMHead
from tests.support.checkpoints import copied, differing, parameters, quantize_head
from tests.support.models import DATA, arrays_equal

CHECKPOINTS = ["dense", "moe35", "next"]  # the first ties its embeddings
FORMATS = {
    "bfloat16": None,
    "4 bit": {"group_size": 64, "bits": 4},
    "4 bit float32": {"group_size": 32, "bits": 4},
    "mxfp4": {"mode": "mxfp4"},
}


def load(name, dtype=None, **options):
    model, tokenizer = mlx_mtp.load(str(DATA / name), **options)
    if dtype is not None:
        model.set_dtype(dtype)
    return model, tokenizer


def set_output_layer(model, layer):
    text = getattr(model, "language_model", model)
    if text.args.tie_word_embeddings:
        text.model.embed_tokens = layer
    else:
        text.lm_head = layer


def hidden_states(model, n_tokens):
    norm = model.model.norm.weight
    return mx.random.normal((1, n_tokens, norm.size), key=mx.random.key(0)).astype(norm.dtype)


def ids_of(folder, **options):
    head = mlx_mtp.load(str(folder), **options)[0].drafting.lm_head
    return None if head is None else head.ids.tolist()


@pytest.mark.parametrize("name", ["dense", "next"])
@pytest.mark.parametrize("form", FORMATS)
def test_draft_logits_are_the_models_rows(name, form):
    model, _ = load(name, mx.float32 if "float32" in form else None)
    if FORMATS[form]:
        set_output_layer(model, model.output_layer.to_quantized(**FORMATS[form]))
    size = model.output_layer.weight.shape[0]
    model.drafting.lm_head = DraftLMHead(model.output_layer, [0, *range(3, size, 5), size - 1])
    for n_tokens in (1, 2, 5):
        logits = model.draft_logits(hidden := hidden_states(model, n_tokens))
        assert arrays_equal(logits, model.logits(hidden)[..., model.drafting.lm_head.ids])

    # Those of the text are added.
    head = DraftLMHead(model.output_layer, [0, 5, 9])
    more = head.with_tokens([9, 300, 2, 300, 0])
    most = more.with_tokens([2, 7]).with_tokens([300])
    assert more.with_tokens([300, 9]) is more
    hidden = hidden_states(model, 2)
    for h, ids in ((head, [0, 5, 9]), (more, [0, 5, 9, 300, 2]), (most, [0, 5, 9, 300, 2, 7])):
        assert (h.ids.tolist(), h.ids.dtype) == (ids, mx.uint32)
        assert arrays_equal(h(hidden), model.logits(hidden)[..., h.ids])
    whole = DraftLMHead(model.output_layer, None)
    assert whole.with_tokens([300]) is whole
    for i in range(100, 200):  # one at a time, as a text is written
        most = most.with_tokens([i])
    assert len(most.layers) <= 2 + 7  # each is larger than the next
    assert arrays_equal(most(hidden), model.logits(hidden)[..., most.ids])
    assert sorted(most.ids.tolist()) == sorted({0, 5, 9, 300, 2, 7, *range(100, 200)})


def in_bits(weight, bits):
    """The weights that are left of those."""
    return mx.dequantize(*mx.quantize(weight, 64, bits), 64, bits)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_draft_head_bits_quantizes_a_copy(name):
    model, tokenizer = load(name, mx.float32)
    weight, hidden, before = model.output_layer.weight, hidden_states(model, 2), parameters(model)
    for bits in BITS:
        cheapen_drafts(model, tokenizer, 4, None, bits)
        rows = in_bits(weight[model.drafting.lm_head.ids], bits)
        assert mx.allclose(model.draft_logits(hidden), hidden @ rows.T, atol=1e-4)
        cheapen_drafts(model, tokenizer, 0, None, bits)
        assert model.drafting.lm_head.ids is None
        assert model.draft_logits(hidden).shape == model.logits(hidden).shape
        rows = DraftLMHead(model.output_layer, [0, 1, 2, 5], bits)
        assert arrays_equal(model.draft_logits(hidden)[..., rows.ids], rows(hidden))
    assert model.output_layer.weight is weight
    assert not differing(parameters(model), before)  # the drafts' output layer is no parameter


def test_other_output_layers():
    model, tokenizer = load("dense", mx.float32)
    layer = model.output_layer.to_quantized(group_size=64, bits=8)
    set_output_layer(model, layer)
    cheapen_drafts(model, tokenizer, None, None, 4)
    weight, hidden = mx.dequantize(layer.weight, layer.scales, layer.biases, 64, 8), hidden_states(model, 2)
    assert mx.allclose(model.draft_logits(hidden), hidden @ in_bits(weight, 4).T, atol=1e-4)
    of_4_bits = model.drafting.lm_head.layers[0]
    for own, n, bits in ((layer, 8, 8), (of_4_bits, 4, 6)):
        set_output_layer(model, own)
        with pytest.raises(ValueError, match=f"draft_head_bits must be less than the {n} bits"):
            cheapen_drafts(model, tokenizer, None, None, bits)
    # Tokens that are added are quantized, too
    model, _ = load("dense")
    hidden = hidden_states(model, 2)
    one_by_one = DraftLMHead(model.output_layer, [0, 5, 9], 4).with_tokens([300]).with_tokens([12])
    at_once = DraftLMHead(model.output_layer, [0, 5, 9, 12, 300], 4)
    assert arrays_equal(one_by_one(hidden)[..., mx.argsort(one_by_one.ids)], at_once(hidden))
    assert one_by_one.layers[1].bits == 4
    # An adapter of the output layer is included
    model, _ = load("next", mx.float32)
    adapted = LoRALinear.from_base(model.lm_head)
    adapted.lora_b = mx.random.normal(adapted.lora_b.shape, key=mx.random.key(1))
    rows, hidden = [1, 4, 9], hidden_states(model, 2)
    head = DraftLMHead(adapted, rows, None)
    assert mx.allclose(head(hidden), adapted(hidden)[..., rows], rtol=1e-4, atol=1e-4)
    assert not mx.allclose(head(hidden), model.lm_head(hidden)[..., rows], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_mtp_bits_spares_fc_and_routers(name):
    model, tokenizer = load(name)
    before = parameters(model)
    cheapen_drafts(model, tokenizer, None, 4, None)
    quantized = {path for path, m in model.mtp.named_modules() if hasattr(m, "bits")}
    mlps = ["mlp"] if name == "dense" else ["mlp.shared_expert", "mlp.switch_mlp"]
    layers = [f"self_attn.{p}_proj" for p in "qkvo"]
    layers += [f"{mlp}.{p}_proj" for mlp in mlps for p in ("gate", "up", "down")]
    assert quantized == {f"layers.0.{layer}" for layer in layers}
    changed = {path.partition("mtp.")[2].rpartition(".")[0] for path in differing(before, parameters(model))}
    assert changed == quantized


def test_special_and_stop_tokens_are_included(tmp_path):
    """Of a checkpoint (special tokens 0, 1, 2) with two added tokens, one of them special, and two stop tokens."""
    folder, always = copied(tmp_path), {0, 1, 2, 7, 4000, 4001, 4095}
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    form = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    by_id = {i: token for token, i in tokenizer["model"]["vocab"].items()}
    for i, special in ((4000, False), (4095, True)):
        tokenizer["added_tokens"].append({"id": i, "content": by_id[i], "special": special, **form})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 4001]}))

    model, tokenizer = mlx_mtp.load(str(folder), draft_vocab=100)
    assert {7, 4001} <= set(tokenizer.eos_token_ids)
    assert model.drafting.lm_head.ids.tolist() == [*range(97), 4000, 4001, 4095]
    assert model.drafting.lm_head.ids.dtype == mx.uint32
    for size in (len(always), len(always) + 1, 4096):
        ids = ids_of(folder, draft_vocab=size)
        assert (len(ids), always - {*ids}) == (size, set())
    with pytest.raises(ValueError, match="its 7 special and stop tokens are always included"):
        ids_of(folder, draft_vocab=len(always) - 1)
    assert ids_of(folder, draft_vocab=0) is None


def test_load_rejects_bad_arguments():
    for options, message in (
        ({"draft_vocab": 513}, "draft vocabulary of 513 token ids is not possible: this model has 512"),
        *(({"draft_vocab": x}, "draft vocabulary of .* token ids is not possible") for x in (-1, True, [1, 2])),
        ({"draft_head_bits": 16}, "draft_head_bits is 16; MLX quantizes to"),
        *(({"mtp": False, n: 64}, "require the MTP head") for n in ("draft_vocab", "mtp_bits", "draft_head_bits")),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
            load("next", **options)
        assert "\n" not in str(error.value)


def test_load_rejects_mtp_bits_for_a_quantized_head(tmp_path):
    folder = quantize_head(copied(tmp_path), 4)
    with pytest.raises(ValueError, match="already quantized: mtp_bits requires one in 16 bits"):
        mlx_mtp.load(str(folder), mtp_bits=4)
