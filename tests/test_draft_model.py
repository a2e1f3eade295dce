"""The head as a draft model in mlx-lm's own speculative loop; and cheaper drafts, whose output layer has fewer rows or bits."""

import copy
import gc
import json
import weakref

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache
from mlx_lm.models.cache import make_prompt_cache as stock_make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tuner.lora import LoRALinear

import mlx_mtp
from mlx_mtp.checkpoint.settings import cheapen_drafts
from mlx_mtp.core.caches.indexed import names_of
from mlx_mtp.core.caches.recurrent import RecurrentCache
from mlx_mtp.core.caches.validation import BITS
from mlx_mtp.core.layers.drafting import DraftLMHead
from tests.support.batches import Fault, failing_sampler
from tests.support.checkpoints import copied, differing, parameters, quantize_head
from tests.support.commands import refused
from tests.support.decoding import mtp, plain
from tests.support.models import DATA, FAMILIES, arrays_equal, model_of, tiny_model
from tests.support.profiles import LONG, examples

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
CODE = "class Queue:\n    def __init__(self, maxsize=0):\n"  # a text that goes on


def steps(prompt, model, **kwargs):
    draft_model = model.make_draft_model()
    return list(speculative_generate_step(mx.array(prompt), draft_model.target, draft_model, **kwargs))


def speculative(prompt, model, **kwargs):
    return [token for token, _, _ in steps(prompt, model, **kwargs)]


def make_caches(draft_model):
    return stock_make_prompt_cache(draft_model.target) + stock_make_prompt_cache(draft_model)


def read(draft_model, tokens, target, draft):
    """Both models read tokens -> the draft model's logits."""
    logits = draft_model(mx.array([tokens]), cache=draft)
    draft_model.target(mx.array([tokens]), cache=target)
    return logits


@examples(5)
@given(
    family=st.sampled_from(FAMILIES),
    prompt=st.lists(st.integers(0, 31), min_size=1, max_size=40),
    depth=st.integers(0, 8),
    prefill=st.integers(1, 50),
    max_tokens=st.integers(1, 40 if LONG else 20),
)
def test_greedy_tokens_match_plain_decoding(family, prompt, depth, prefill, max_tokens):
    model = model_of(family)
    options = dict(max_tokens=max_tokens, prefill_step_size=prefill)
    assert speculative(prompt, model, num_draft_tokens=depth, **options) == plain(prompt, model, **options)


def test_as_many_drafts_are_accepted_as_in_our_own_loop(trained):
    """But for the first and the last window, which differ."""
    (model, tokenizer), options = trained, dict(max_tokens=32, num_draft_tokens=2)
    prompt = tokenizer.encode(CODE)
    own = mlx_mtp.mtp_generate_step(mx.array(prompt), model, **options)
    n, n_own = (sum(from_draft for *_, from_draft in every) for every in (steps(prompt, model, **options), own))
    assert n > 8
    assert abs(n - n_own) <= 4


def test_options_of_mlx_lms_loop_and_failures_come_through():
    model = model_of("qwen3_5")
    # Not penalties: mlx-lm's speculative loop does not show its processors the prompt, so they differ with any draft model.
    for options in (
        dict(logits_processors=make_logits_processors(logit_bias={5: 1.5})),
        dict(kv_bits=8, kv_group_size=32, quantized_kv_start=0),
        dict(sampler=make_sampler(temp=0.0)),
    ):
        options["max_tokens"] = 20
        assert speculative(PROMPT, model, num_draft_tokens=3, **options) == plain(PROMPT, model, **options)
    for n_calls in range(1, 9):
        with pytest.raises(Fault):
            speculative(PROMPT, model, sampler=failing_sampler(n_calls), num_draft_tokens=2)
    assert speculative(PROMPT, model, max_tokens=9) == plain(PROMPT, model, max_tokens=9)


def test_drafts_come_from_the_draft_vocabulary():
    model, n = tiny_model("qwen3_5"), 12
    model.drafting.lm_head = DraftLMHead(model.output_layer, list(range(n)))
    got = steps(PROMPT, model, max_tokens=40, num_draft_tokens=3)
    assert [token for token, _, _ in got] == plain(PROMPT, model, max_tokens=40)
    assert any(token < n for token, _, _ in got)
    assert all(token < n for token, _, from_draft in got if from_draft)
    draft_model = model.make_draft_model()
    *target, draft = make_caches(draft_model)
    read(draft_model, PROMPT[:-1], target, [draft])
    logits = draft_model(mx.array([PROMPT[-1:]]), cache=[draft])
    assert logits.shape == (1, 1, 32)
    assert mx.isfinite(logits[0, 0]).tolist() == [i < n for i in range(32)]


@pytest.mark.parametrize("family", FAMILIES if LONG else FAMILIES[::2])
def test_head_rows_come_from_verified_hidden_states(family):
    model = model_of(family)
    prompt_cache = make_caches(model.make_draft_model())
    tokens = speculative(PROMPT, model, max_tokens=30, num_draft_tokens=3, prompt_cache=prompt_cache)
    assert not can_trim_prompt_cache(prompt_cache[:-1])  # it is for one generation
    draft, text = prompt_cache[-1], mx.array([PROMPT + tokens])
    n, rows = draft.n_verified, mlx_mtp.make_prompt_cache(model)[-2]
    assert len(PROMPT) < n < text.size
    _, hidden = model(text[:, :n], cache=model.make_cache(), return_hidden=True)
    model.mtp(model.model.embed_tokens(text[:, 1 : n + 1]), hidden, rows)
    for a, b in zip(*([getattr(c, name) for name in names_of(rows)] for c in (draft.kv, rows))):
        assert mx.allclose(a[..., :n, :], b[..., :n, :], atol=1e-4)
    # And the target's cache is that of the tokens yielded but the last.
    n_tokens, fresh = text.size - 1, model.make_cache()
    assert {c.offset for c in prompt_cache[:-1] if not isinstance(c, RecurrentCache)} == {n_tokens}
    model(text[:, :n_tokens], cache=fresh)
    for a, b in zip(prompt_cache, fresh):
        if isinstance(a, RecurrentCache):
            assert a.split is None
            assert all(mx.allclose(x, y, atol=1e-4) for x, y in zip(a.cache, b.cache))


def test_trimming():
    """The target's cache is trimmed while it is empty, and inside its window; the model's own, never."""
    model = model_of("qwen3_5")
    draft_model, own = model.make_draft_model(), model.make_cache()
    assert not can_trim_prompt_cache(own)
    plain(PROMPT, model, max_tokens=3, prompt_cache=own)
    assert not can_trim_prompt_cache(own)
    other = speculative_generate_step(mx.array(PROMPT), model, model_of("qwen3_next"))  # as in mlx-lm
    refused("requires a trimmable prompt cache", next, other)
    *target, draft = make_caches(draft_model)
    assert can_trim_prompt_cache(target)
    assert trim_prompt_cache(target, 5) == 0
    read(draft_model, PROMPT, target, [draft])
    assert not can_trim_prompt_cache(target)
    for token in (7, 8):
        draft_model(mx.array([[token]]), cache=[draft])
    refused("can trim its last 0 tokens, not 1", draft.trim, 1)
    draft_model.target(mx.array([[7, 8, 9]]), cache=target)
    assert can_trim_prompt_cache(target)
    before = [c.offset for c in target if not isinstance(c, RecurrentCache)]
    for n in (3, 10):
        refused("Cannot keep", trim_prompt_cache, target, n)
    assert [c.offset for c in target if not isinstance(c, RecurrentCache)] == before
    refused("can trim its last 1 tokens, not 2", trim_prompt_cache, [draft], 2)


@pytest.mark.parametrize("n", [1, 2, 4, 7, 11])
def test_resumes_without_the_draft_model(n):
    """In plain generation, and in our own loop, which takes a cache that is still empty."""
    model = model_of("qwen3_5")
    draft_model = model.make_draft_model()
    cache = make_caches(draft_model)
    options = dict(max_tokens=50, num_draft_tokens=3, prompt_cache=cache)
    loop = speculative_generate_step(mx.array(PROMPT), draft_model.target, draft_model, **options)
    text = PROMPT + [next(loop)[0] for _ in range(n)]
    loop.close()
    n_cached = cache[1].offset
    assert len(text) - 1 <= n_cached <= len(text)
    more, last, options = [*text[n_cached:], 7, 2], text[n_cached:] or [7], dict(max_tokens=8)
    fresh = [copy.deepcopy(cache)[:-1] for _ in range(2)]
    got = plain(more, model, prompt_cache=fresh[0], prefill_step_size=2, **options)
    assert got == plain(text[:n_cached] + more, model, **options)
    assert not can_trim_prompt_cache(fresh[0])
    got = mtp(last, model, num_draft_tokens=3, prompt_cache=fresh[1], **options)
    assert got == plain(text[:n_cached] + last, model, **options)
    empty = make_caches(draft_model)[:-1]
    assert mtp(PROMPT, model, prompt_cache=empty, **options) == plain(PROMPT, model, **options)


NO_CACHE = r"call target\.make_cache\(\) before each"


def test_rejects_what_cannot_draft():
    refused("no MTP head", tiny_model("qwen3_5", mtp_num_hidden_layers=0).make_draft_model)
    draft_model = tiny_model("qwen3_5").make_draft_model()
    refused("needs its cache", draft_model, mx.array([[1]]))
    refused(NO_CACHE, draft_model.make_cache)
    cache = make_caches(draft_model)
    refused(NO_CACHE, draft_model.make_cache)
    assert len(cache) == len(draft_model.target.layers) + 1
    # It keeps no cache alive.
    kept, cache = weakref.ref(draft_model.target.make_cache()[0]), None
    gc.collect()
    assert kept() is None
    refused(NO_CACHE, draft_model.make_cache)


def test_drops_the_hidden_states_of_a_long_prompt():
    model = model_of("qwen3_5")
    options = dict(max_tokens=1, num_draft_tokens=2, prefill_step_size=100)
    cache = make_caches(model.make_draft_model())
    speculative([i % 32 for i in range(600)], model, prompt_cache=cache, **options)
    assert cache[-1].hidden.shape[1] <= 4
    assert cache[-1].tokens.size <= 4


# Cheaper drafts: the model's rows for the draft vocabulary, and verification is unchanged

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
        refused(f"draft_head_bits must be less than the {n} bits", cheapen_drafts, model, tokenizer, None, None, bits)
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

    model, tokenizer = mlx_mtp.load(str(folder), draft_vocab=0)
    assert model.drafting.lm_head is None
    assert {7, 4001} <= set(tokenizer.eos_token_ids)
    for size in (len(always), 100, 4096):
        cheapen_drafts(model, tokenizer, size, None, None)
        ids = model.drafting.lm_head.ids
        assert (ids.dtype, ids.size, always - {*ids.tolist()}) == (mx.uint32, size, set())
        assert size != 100 or ids.tolist() == [*range(97), 4000, 4001, 4095]
    message = "its 7 special and stop tokens are always included"
    refused(message, cheapen_drafts, model, tokenizer, len(always) - 1, None, None)


def test_load_rejects_bad_arguments(tmp_path):
    for options, message in (
        ({"draft_vocab": 513}, "draft vocabulary of 513 token ids is not possible: this model has 512"),
        *(({"draft_vocab": x}, "draft vocabulary of .* token ids is not possible") for x in (-1, True, [1, 2])),
        ({"draft_head_bits": 16}, "draft_head_bits is 16; MLX quantizes to"),
        *(({"mtp": False, n: 64}, "require the MTP head") for n in ("draft_vocab", "mtp_bits", "draft_head_bits")),
    ):
        refused(message, load, "next", **options, error=(ValueError, FileNotFoundError))
    folder = quantize_head(copied(tmp_path), 4)
    refused("already quantized: mtp_bits requires one in 16 bits", mlx_mtp.load, str(folder), mtp_bits=4)
