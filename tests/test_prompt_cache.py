"""Prompt caches over turns: exactly what was said, nothing twice, whatever the options and wherever a turn was stopped.

Inside a window, going back gives the state of a forward over the tokens kept, bit for bit.
"""

import copy
import functools
import math
import re
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

import mlx_mtp
from mlx_mtp import MTPError, make_prompt_cache, mtp_generate_step
from mlx_mtp.core.caches import fingerprint
from mlx_mtp.core.caches.fingerprint import SIZE, digest
from mlx_mtp.core.caches.prompt_cache import open_prompt_cache
from mlx_mtp.core.caches.recurrent import RecurrentCache
from mlx_mtp.core.caches.rows import KVOptions, Rows
from mlx_mtp.core.layers.compiled import Compiler
from tests.support.commands import refused
from tests.support.decoding import PROMPT, WINDOW, filled, mtp, one_by_one, plain, rows_of
from tests.support.models import (
    FAMILIES,
    FLASH,
    GLM,
    LATENT,
    PACK,
    ROPE,
    arrays_equal,
    deep_model,
    model_of,
    tiny_model,
)
from tests.support.profiles import LONG, examples
from tests.support.prompt_store import held

TURNS = ([3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8, 9])


@examples(6)
@given(data=st.data())
def test_greedy_turns_match_mlx_lm(data):
    """Two turns in one cache, also through a file, which mlx-lm does in a cache of its own, with the same options in each."""
    draw = data.draw
    model = model_of(draw(st.sampled_from(["qwen3_5", "qwen3_next", PACK, FLASH])), draw(st.integers(0, 2)))
    processors = make_logits_processors(
        logit_bias=draw(st.sampled_from([None, {3: 1.0}])),
        repetition_penalty=draw(st.sampled_from([None, 1.3])),
        frequency_penalty=draw(st.sampled_from([None, 0.3])),
    )
    options = dict(
        prefill_step_size=draw(st.integers(1, 8)),
        logits_processors=processors,
        kv_bits=draw(st.sampled_from([None, 4, 8])),
        kv_group_size=32,
        quantized_kv_start=draw(st.sampled_from([0, 7, 20])),
        sampler=mlx_mtp.make_sampler(temp=1.0, top_p=0.9, seed=3) if draw(st.booleans()) else None,
    )
    ours, theirs = make_prompt_cache(model), stock.make_prompt_cache(model)
    for question in TURNS[:2]:
        options["max_tokens"], depth = draw(st.integers(1, 12)), draw(st.integers(0, 6))
        # mlx-lm quantizes at once what the first turn left, and where its own chunks end.
        want = plain(question, model, prompt_cache=theirs, **options | {"prefill_step_size": 2048})
        assert mtp(question, model, prompt_cache=ours, num_draft_tokens=depth, **options) == want
        assert [type(c).__name__ for c in ours[: len(theirs)]] == [type(c).__name__ for c in theirs]
        if draw(st.booleans()):
            with TemporaryDirectory() as folder:
                stock.save_prompt_cache(f"{folder}/cache.safetensors", ours)
                ours = stock.load_prompt_cache(f"{folder}/cache.safetensors")
    for run in (plain, mtp) * (options["kv_bits"] is None):  # mlx-lm resumes our cache, and we what it leaves
        want = plain([7, 7], model, prompt_cache=theirs, **options)
        assert run([7, 7], model, prompt_cache=ours, **options) == want


def test_copies_are_caches_of_their_own():
    """Those of mlx-lm's LRUPromptCache, which finds the longest prefix, and one of the end of a turn."""
    model, lru = model_of("qwen3_5", 1), stock.LRUPromptCache()
    prompt_cache = make_prompt_cache(model)
    history = TURNS[0] + mtp(TURNS[0], model, max_tokens=9, prompt_cache=prompt_cache)
    lru.insert_cache("model", history, prompt_cache)
    earlier, asked = copy.deepcopy(prompt_cache), history + TURNS[1]
    for _ in range(2):  # a cache that was handed out and used is a copy
        found, rest = lru.fetch_nearest_cache("model", asked)
        assert rest == TURNS[1]
        more = mtp(rest, model, max_tokens=9, prompt_cache=found, num_draft_tokens=3)
        assert more == plain(asked, model, max_tokens=9)
    # Shorter: these layers cannot be trimmed, and none may claim it.
    assert lru.fetch_nearest_cache("model", history[:-3] + [31])[0] is None
    assert not stock.can_trim_prompt_cache(prompt_cache)
    mtp(TURNS[1], model, max_tokens=9, prompt_cache=prompt_cache)
    assert mtp(TURNS[2], model, max_tokens=9, prompt_cache=earlier) == plain(history + TURNS[2], model, max_tokens=9)


def test_each_rank_resumes_its_own_part_alone():
    """Another rank's part has the same shapes: nothing else would tell."""

    def as_rank(*part):
        model = tiny_model("qwen3_5")
        model.ranks = SimpleNamespace(rank=part[0], size=part[1]) if part else None
        return model

    of_one_process = make_prompt_cache(as_rank())
    mtp(TURNS[0], as_rank(), max_tokens=2, prompt_cache=of_one_process)
    for part, other in product([(), (0, 2), (1, 2), (1, 4)], repeat=2):
        prompt_cache = copy.deepcopy(of_one_process)
        prompt_cache[-1][3] = make_prompt_cache(as_rank(*part))[-1][3]
        error = pytest.raises(ValueError, match=r"cache belongs to (rank|one process).* and this is")
        with nullcontext() if other == part else error:
            open_prompt_cache(as_rank(*other), prompt_cache)


# Files: a damaged one, or another model's, is refused with a sentence that says what is wrong with it


deep_model_of = functools.cache(deep_model)  # entries: recurrent, attention, recurrent, attention, the head's, the last
KV = dict(kv_bits=8, kv_group_size=32, quantized_kv_start=0)


@functools.cache
def sound(quantized: bool, family: str = "qwen3_5") -> tuple[bytes, list[int]]:
    """A file as it should be, and what mlx-lm goes on with behind its tokens."""
    model, options = deep_model_of(family), KV if quantized else {}
    prompt_cache, theirs = make_prompt_cache(model), model.make_cache()
    for run, cache in ((mtp, prompt_cache), (plain, theirs)):
        run(PROMPT, model, max_tokens=9, prompt_cache=cache, **options)
    with TemporaryDirectory() as folder:
        save_prompt_cache(f"{folder}/sound.safetensors", prompt_cache)
        data = Path(f"{folder}/sound.safetensors").read_bytes()
    return data, plain([7], model, max_tokens=4, prompt_cache=theirs, **options)


def saved(tmp_path) -> str:
    (file := tmp_path / "cache.safetensors").write_bytes(sound(False)[0])
    return str(file)


MISFIT = (
    r"Entry %s of the prompt cache is damaged, or belongs to another model\. Make a new one with mlx_mtp\.make_.*\."
)


def test_refuses_entries_of_another_kind():
    model = deep_model_of("qwen3_5")
    padded = RecurrentCache(2, left_padding=[1])
    entries = (0, RecurrentCache(3)), (0, padded), (4, RecurrentCache(2)), (5, KVCache()), (5, RecurrentCache(9))
    for i, entry in entries:
        prompt_cache = make_prompt_cache(model)
        prompt_cache[i] = entry
        refused(MISFIT % i, mtp, [7], model, prompt_cache=prompt_cache)
    mixed = [RecurrentCache(2), *filled(model)[1:]]  # states of no token, and keys of some
    refused(MISFIT % 0, mtp, [7], model, prompt_cache=mixed)


# Whose cache it is


OTHER = r"belongs to another model, or to other weights, settings or adapters of this model\. Make a new one"


def goes_on(model, prompt_cache) -> bool:
    return mtp([7], model, max_tokens=4, num_draft_tokens=2, prompt_cache=prompt_cache) == sound(False)[1]


def test_refuses_another_models_file(tmp_path):
    file = saved(tmp_path)
    assert goes_on(deep_model("qwen3_5"), load_prompt_cache(file))  # loaded again
    quantized = deep_model("qwen3_5")
    nn.quantize(quantized, 32, 4)
    ropes = {"rope_theta": 500.0}, {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    changes = [{"rope_parameters": ROPE | rope} for rope in ropes]
    changes += [{"seed": 1}, {"dtype": mx.bfloat16}, {"rms_norm_eps": 1e-3}]
    for other in (quantized, *(deep_model("qwen3_5", **change) for change in changes)):
        with pytest.raises(ValueError, match=OTHER):
            mtp([7], other, prompt_cache=load_prompt_cache(file))


def test_drops_the_rows_of_another_head(tmp_path):
    """As after `mtp_bits` or a fit of the head: the backbone decides the text, and its caches stay."""
    file, model = saved(tmp_path), deep_model("qwen3_5")
    model.mtp.fc.weight = model.mtp.fc.weight + 1
    prompt_cache = load_prompt_cache(file)
    assert goes_on(model, prompt_cache)
    assert prompt_cache[-2].offset == 5  # from the last token of the file on
    save_prompt_cache(file, prompt_cache)
    rows = load_prompt_cache(file)
    mtp([7], model, max_tokens=4, prompt_cache=rows)
    assert rows[-2].offset == 10


def test_resumes_files_without_a_fingerprint(tmp_path):
    """Of an earlier version, which had fewer arrays in the last entry."""
    file, old = saved(tmp_path), str(tmp_path / "old.safetensors")
    for n in (3, 4):
        prompt_cache = load_prompt_cache(file)
        prompt_cache[-1].cache = prompt_cache[-1].cache[:n]
        save_prompt_cache(old, prompt_cache)
        assert goes_on(deep_model_of("qwen3_5"), load_prompt_cache(old))


def test_fingerprint(monkeypatch):
    """It is taken once, for a cache alone. The head's tensors change the second half alone, all others the first."""
    model, taken, original = tiny_model("qwen3_5_moe"), [], fingerprint.fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "fingerprint", lambda model: taken.append(1) or original(model))
        mtp(PROMPT, model, max_tokens=3)
        assert taken == []
        prompt_cache = make_prompt_cache(model)
        for _ in range(3):
            mtp(PROMPT, model, max_tokens=3, prompt_cache=prompt_cache)
            mtp(PROMPT, model, max_tokens=3, prompt_cache=copy.deepcopy(prompt_cache))
        assert taken == [1]
    whole = model.fingerprint()
    for name, p in tree_flatten(model.parameters()):
        model.load_weights([(name, p + (mx.arange(p.size) == 5 * p.size // 8).reshape(p.shape))], strict=False)
        changed, is_head = model.fingerprint(), name.startswith("language_model.mtp.")
        assert [changed[:SIZE] == whole[:SIZE], changed[SIZE:] == whole[SIZE:]] == [is_head, not is_head]
        model.load_weights([(name, p)], strict=False)
    model.head_acceptance_rate = 0.875
    model.load_weights([(name, p)], strict=False)
    assert model.fingerprint() == whole
    for module, is_head in ((model.layers[0].input_layernorm, False), (model.mtp.norm, True)):
        module.eps, eps = 0.5, module.eps  # a number, such as the scale of an adapter
        model.update({})
        changed = model.fingerprint()
        assert [changed[:SIZE] == whole[:SIZE], changed[SIZE:] == whole[SIZE:]] == [is_head, not is_head]
        module.eps = eps


SHAPES = [(), (5,), (64,), (300, 40), (301, 7), (4, 30, 16), (6, 4, 1)]
DTYPES_OF_ROWS = ["uint8", "float16", "bfloat16", "float32", "uint32"]


@pytest.mark.parametrize(("shape", "dtype"), [*product(SHAPES, DTYPES_OF_ROWS)][:: 1 if LONG else 4], ids=str)
def test_a_change_of_any_row_is_another_model(shape, dtype):
    """Of its last bit, and also if another row has its values."""
    kind, n = getattr(mx, dtype), math.prod(shape)
    bits = mx.random.randint(0, 2**31 - 1, (n,), key=mx.random.key(n))
    bits = bits.astype({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[kind.size])
    p = bits.view(kind)
    whole, rows, width = digest([("w", p.reshape(shape))]), n // (shape or (1,))[-1], (shape or (1,))[-1]
    for i in range(0, n, max(n // 50, 1)):
        changed = bits ^ (mx.arange(n) == i).astype(bits.dtype)
        assert digest([("w", changed.view(kind).reshape(shape))]) != whole
    table = p.reshape(rows, width)
    for i in range(0, rows - 1, max(rows // 20, 1)):
        order = mx.arange(rows)
        order[i], order[rows - 1] = rows - 1, i
        if not mx.array_equal(bits.reshape(rows, width)[i], bits.reshape(rows, width)[-1]):
            assert digest([("w", table[order].reshape(shape))]) != whole


# Damage to token ids, counts, shapes and dtypes, not to keys and states: a wrong value cannot be recognized

NUMBERS = (-1, 0, 1, 19, 20, 21, 64, 257, 2**31 - 1)  # of 20 tokens, of which the head has seen 19
REFUSED = MISFIT % r"\d" + r"|This prompt cache is of a generation that has not ended: [^\n]*\."
KINDS = {  # the family, options, and the arrays that are damaged by default
    "": ("qwen3_5", {}, ("0.0", "1.", "4.", "5.0")),
    "quantized": ("qwen3_5", KV, ("1.",)),
    "sparse": (FLASH, {}, ("0.0.3", "1.1.1", "4.1.1")),
}


def damaged(x: mx.array) -> list[mx.array | None]:
    """Other integers, other shapes, other dtypes, and no array."""
    numbers = {(mx.int32, 0): NUMBERS, (mx.uint32, 1): (31, 32)}.get((x.dtype, x.ndim), ())
    shapes = [x[None], *([x[..., :-1], mx.concatenate([x, x])] if x.ndim > 0 else [])]
    if x.ndim > 2:
        shapes += [x[:, :-1], x[:, :, :8], x[:, :, :64], *([x.reshape(1, 2, 256, 16)] if x.size == 256 * 32 else [])]
    types = [x.astype(dtype) for dtype in (mx.float32, mx.complex64)]
    every = [*(mx.full(x.shape, n, x.dtype) for n in numbers), *shapes, *types]
    return [*(y for y in every if not arrays_equal([x], [y])), None]


def is_harmless(name: str, x: mx.array) -> bool:
    """A number as an array, fewer tokens of the head or of all, other tokens for copies, or less space for index keys."""
    most = {"4.2": 19, "5.0.1": 20, "5.0.2": 31}.get(name, -1)
    return x.shape == (1,) or x.max() <= most or (name[1:] == ".1.1" and x.shape[2:] == (64, 32))


@pytest.mark.parametrize(("family", "options", "names"), KINDS.values(), ids=KINDS)
def test_any_damage_is_refused_or_harmless(family, options, names, tmp_path):
    """With one sentence, or the text continues as mlx-lm's does after the same tokens."""
    (data, want), file = sound(bool(options), family), str(tmp_path / "damaged.safetensors")
    Path(file).write_bytes(data)
    arrays, metadata = mx.load(file, return_metadata=True)
    mx.eval(arrays)
    chosen = [(name, x) for name, x in arrays.items() if x.size > 0 and (LONG or name.startswith(names))]
    cases = [{name: y} for name, x in chosen for y in damaged(x)]
    cases.append(dict.fromkeys(("1.2", "3.2", "4.2", "5.0.1"), mx.array(0)))  # keys of no tokens, and states of some
    for case in cases:
        mx.save_safetensors(file, {n: w for n, w in (arrays | case).items() if w is not None}, metadata)
        try:
            prompt_cache = load_prompt_cache(file)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):
            continue  # mlx-lm's own refusal
        error, got, how = "", None, dict(max_tokens=4, num_draft_tokens=3, copy_drafts=4, **options)
        try:
            got = mtp([7], deep_model_of(family), prompt_cache=prompt_cache, **how)
        except ValueError as e:
            error = str(e)
        if not re.fullmatch(REFUSED, error):
            assert (got, [is_harmless(*each) for each in case.items()]) == (want, [True]), case


# Rollback


MOVED = "mlx-lm's recurrent layers compute otherwise, or a window does: core/layers/recurrence.py must follow"
# mlx-lm's latent attention computes one token and several in different orders.
EVERY_FORM = [
    *((family, mx.float32) for family in FAMILIES if family != LATENT),
    (GLM, mx.float32),
    ("qwen3_5", mx.bfloat16),
]


@pytest.mark.parametrize(("family", "dtype"), EVERY_FORM)
@pytest.mark.parametrize("prompt", [[], PROMPT] if LONG else [PROMPT], ids=len)
def test_rollback_gives_the_state_of_a_forward(family, prompt, dtype):
    """Of a window with 1, 2 or all tokens confirmed, after each number of tokens that a rollback can keep."""
    model = deep_model(family, dtype=dtype)
    before, rows = filled(model, prompt=prompt), rows_of(model, prompts=[prompt])
    state = rows.state
    wanted = {}  # after n tokens: their logits, what the cache then holds, the logits of one more
    for n in range(1, 10):
        theirs = copy.deepcopy(before)
        want = model(WINDOW[None, :n], cache=theirs)
        wanted[n] = want, held(theirs), model(mx.array([[7]]), cache=copy.deepcopy(theirs))
    for n_tokens in range(1, 10) if LONG else (1, 2, 3, 6, 9):
        for n_confirmed in sorted({1, min(2, n_tokens), n_tokens}):
            for n in range(n_confirmed, n_tokens + 1):
                rows.state = state
                logits = rows.run(model, WINDOW[None, :n_tokens], n_confirmed=n_confirmed)
                rows.keep([n])
                ours = rows.extract(0, rows.n_tokens[0])
                want, arrays, follow_up = wanted[n]
                assert arrays_equal(held(ours), arrays)
                if dtype == mx.float32:
                    assert mx.array_equal(logits[:, :n], want), MOVED
                    assert mx.array_equal(model(mx.array([[7]]), cache=ours), follow_up)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_compiled", [False, True] if LONG else [True])
def test_rows_roll_back_to_ends_of_their_own(family, is_compiled):
    """The cache of each row is that of a prefill of its tokens, with and without drafts that are kept."""
    model, prompts = deep_model(family), [PROMPT, PROMPT[:3], PROMPT[2:]]
    compiler, window = Compiler() if is_compiled else None, mx.stack([mx.roll(WINDOW[:5], b) for b in range(3)])
    for n_confirmed, *counts in ((1, 1, 1, 1), (1, 1, 3, 5), (1, 4, 4, 4), (2, 2, 2, 2), (2, 2, 5, 3), (5, 5, 5, 5)):
        rows = rows_of(model, prompts=prompts)
        rows.run(model, window, n_confirmed=n_confirmed, compiler=compiler)
        rows.keep(counts)
        for b, (prompt, n) in enumerate(zip(prompts, counts)):
            theirs = filled(model, prompt=mx.concatenate([mx.array(prompt), window[b, :n]]))
            pairs = zip(tree_flatten(held(rows.extract(b, len(prompt) + n))), tree_flatten(held(theirs)))
            assert all(mx.allclose(x, y, rtol=1e-4, atol=1e-4) for (_, x), (_, y) in pairs)


def test_a_rollback_to_the_confirmed_tokens_computes_nothing():
    """Nor does another one, when no pass is in flight; and none goes further back."""
    model = deep_model("qwen3_5")
    rows = rows_of(model)
    mx.eval(rows.run(model, WINDOW[None, :4], n_confirmed=1), rows.snapshots)
    snapshots = rows.snapshots
    for _ in range(2):
        rows.keep([1])
        assert rows.n_tokens == (len(PROMPT) + 1,)
    assert all(own is x for held, arrays in zip(rows.state.recurrent, snapshots) for own, x in zip(held, arrays))
    rows.run(model, WINDOW[None, :4], n_confirmed=2)
    with pytest.raises(MTPError, match="2 tokens of the window are confirmed: they cannot be rolled back to 1"):
        rows.keep([1])


def test_rows_take_the_arrays_of_a_single_prompt_cache_without_a_copy():
    model = model_of("qwen3_5")
    cache = open_prompt_cache(model, None)
    for c, layer in zip(cache.backbone, model.layers):
        if not layer.is_linear:
            shape = (1, layer.self_attn.num_key_value_heads, 8192 + 256, layer.self_attn.head_dim)
            c.keys, c.values, c.offset = mx.ones(shape), mx.ones(shape), 8192
            mx.eval(c.keys, c.values)
    rows = Rows(model, KVOptions())
    rows.join([cache], [KVOptions()])
    del cache, c
    size, before = rows.nbytes, mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        mx.eval(rows.run(model, mx.array([[7]])))
        rows.keep([1])
    assert mx.get_peak_memory() - before < size / 4
    assert rows.extract(0, rows.n_tokens[0])[-1].offset == 8192 + 3


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", FLASH])
def test_window_over_a_quantized_cache(family, bits):
    """MLX has had a ``quantized_matmul`` that was wrong for two rows with several queries to a key-value head."""
    model, close = tiny_model(family, 3, num_attention_heads=8, num_key_value_heads=2), dict(rtol=1e-3, atol=1e-3)
    prompts = PROMPT, PROMPT[:7]
    wants = [one_by_one(model, filled(model, bits, prompt), WINDOW[:9]) for prompt in prompts]
    for n, kept in ((2, (1, 1)), (9, (2, 5)), (9, (7, 7))):
        for B in (1, 2):
            rows = rows_of(model, bits, prompts[:B])
            logits = rows.run(model, mx.broadcast_to(WINDOW[:n], (B, n)), n_confirmed=1)
            rows.keep(kept[:B])
            for b, want in enumerate(wants[:B]):
                assert mx.allclose(logits[b], want[0, :n], **close)
                rest = one_by_one(model, rows.extract(b, rows.n_tokens[b]), WINDOW[kept[b] : 9])
                assert mx.allclose(rest, want[:, kept[b] :], **close)


def test_the_end_of_a_text_runs_no_attention_of_the_head():
    """The keys of its last inputs are added to the prompt cache, while a pass may be in flight."""
    model = model_of("qwen3_5")
    cache = make_prompt_cache(model)
    steps = mtp_generate_step(mx.array(PROMPT), model, num_draft_tokens=1, prompt_cache=cache, max_tokens=5)
    for _ in range(5):
        next(steps)
    with patch.object(type(model.mtp), "last", side_effect=AssertionError):
        assert list(steps) == []
    assert cache[-2].offset == len(PROMPT) + 5 - 1
