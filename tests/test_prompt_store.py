"""The prompt store: what is fetched is bit for bit what was inserted, each part of a text is held once, and texts with it are
those without one."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest.mock import Mock

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import cache as stock
from mlx_lm.sample_utils import make_logits_processors

import mlx_mtp
from mlx_mtp import KVOptions, PromptStore, make_prompt_cache, make_sampler, stream_generate
from mlx_mtp.core.caches import prompt_cache as prompt_cache_module
from mlx_mtp.core.caches import rows
from mlx_mtp.core.caches.prompt_cache import PromptCache, open_prompt_cache
from mlx_mtp.core.caches.recurrent import RecurrentCache
from mlx_mtp.errors import FAILED_PASS
from mlx_mtp.prompt_store import arrays
from mlx_mtp.prompt_store import store as store_module
from mlx_mtp.prompt_store.store import EVERY, LAST, LINE, OPENINGS, choose_cuts, message_ends
from mlx_mtp.prompt_store.tree import score
from tests.support.decoding import interrupt_at, mtp, plain, prefill, text_of
from tests.support.models import FAMILIES, TRAINED, arrays_equal, tiny_model
from tests.support.profiles import LONG, examples
from tests.support.prompt_store import KV, KV_OPTIONS, TEXT, assert_same_next, held, model_of, n_snapshots, names, read


def new_store(model=None, max_bytes=1 << 30, **options):
    return PromptStore(model or model_of("qwen3_5"), max_bytes, **options)


def assert_same(a, b):
    assert names(a) == names(b)
    assert arrays_equal(held(a)[:-1], held(b)[:-1])
    a, b = (PromptCache(c, len(c) - 2) for c in (a, b))
    assert (a.n_tokens, a.n_recorded, a.text) == (b.n_tokens, b.n_recorded, b.text)
    assert a.fingerprint == b.fingerprint
    assert arrays_equal([a.last_hidden, a.entries[-1][3]], [b.last_hidden, b.entries[-1][3]])  # [3]: the rank's part


def test_the_deepest_snapshot_of_the_common_prefix_is_found():
    """And a fetched cache is the caller's own."""
    model, store = model_of("qwen3_5"), new_store()
    fetched, n, handle = store.fetch(TEXT)
    assert (n, handle) == (0, None)
    assert_same(fetched, make_prompt_cache(model))
    assert store.nbytes == 0
    read(model, TEXT, (4, 8), store)
    for asked, n in ((TEXT, 16), (TEXT[:15], 8), (TEXT[:8], 8), (TEXT[:7], 4), ([*TEXT[:6], 0], 4), ([0], 0), ([], 0)):
        assert store.fetch(asked)[1] == n
    assert store.n_common([*TEXT[:6], 0]) == 6
    for _ in range(3):
        more = mtp([7, 7], model, max_tokens=9, prompt_cache=store.fetch(TEXT)[0], num_draft_tokens=3)
        assert more == plain([*TEXT, 7, 7], model, max_tokens=9)


def test_each_part_of_a_text_is_held_once():
    """Without a handle rows are compared, and those that are the same are not held again."""
    model, store, alone = model_of("qwen3_5"), new_store(), new_store()
    head, fork = model.head_layer.self_attn, [*TEXT[:10], 30, 31, 30, 31, 30, 31]
    row = 2 * head.num_key_value_heads * head.head_dim * 4  # of one layer
    prompt_cache = read(model, TEXT, (10,), store)
    before = store.nbytes
    read(model, TEXT, (10,), store)  # the same text again
    assert store.nbytes == before
    read(model, fork, (10,), store)
    read(model, TEXT[10:], store=alone)  # six tokens, a snapshot; the head's row of a first token is missing
    assert store.nbytes == before + alone.nbytes + row
    before = store.nbytes
    prefill(mx.array([30]), model, prompt_cache=prompt_cache)
    store.insert([*TEXT, 30], prompt_cache)
    states = sum(c.nbytes for c in prompt_cache if isinstance(c, RecurrentCache)) + prompt_cache[-1][0].nbytes
    assert store.nbytes - before == states + 3 * row  # two layers and the head


def test_a_text_that_was_read_otherwise_keeps_its_own_rows():
    """No rows of one reading get the states of another."""
    model, store = model_of("qwen3_5"), new_store()
    read(model, TEXT, (8,), store)
    own, other = (read(model, TEXT, (8,)) for _ in range(2))
    keys = next(c for c in other if isinstance(c, stock.KVCache))
    keys.keys = keys.keys.at[:, :, 3].add(1e-6)  # as another cut would round
    for c in (own, other):
        PromptCache(c, len(model.layers)).record(len(TEXT), TEXT)
    store.insert(TEXT, other)
    fetched, n, _ = store.fetch(TEXT)
    assert (n, n_snapshots(store)) == (len(TEXT), 3)
    assert sum(arrays_equal(held(fetched)[:-1], held(c)[:-1]) for c in (own, other)) == 1


@examples(6)
@given(data=st.data())
def test_random_trees(data):
    """Texts that are edited, read on and given up: what comes back is what went in, and is never longer than the prefix."""
    draw = data.draw
    model = model_of(draw(st.sampled_from(FAMILIES)))
    kv = draw(st.sampled_from([None, KV])) if model.family.no_kv_bits is None else None
    store = PromptStore(model, 1 << 30)
    inserted, texts = {}, [[]]
    for _ in range(20 if LONG else 6):
        base = draw(st.sampled_from(texts))
        text = base[: draw(st.integers(0, len(base)))] + draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        prompt_cache, n, handle = store.fetch(text[:-1], kv)
        if n > 0:
            assert_same(prompt_cache, inserted[tuple(text[:n])])
            ends = [node.length for node in handle().path()[1:]]
            assert_same_next(model, prompt_cache, read(model, text[:n], ends, kv=kv), kv)
        n_known = max((i for i in range(1, len(text)) if tuple(text[:i]) in inserted), default=0)
        assert n <= n_known
        cuts = draw(st.lists(st.integers(n + 1, len(text)), max_size=2))
        for cut in sorted({*cuts, len(text)}):
            prefill(mx.array(text[n:cut]), model, prompt_cache=prompt_cache, **(KV_OPTIONS if kv else {}))
            n = cut
            PromptCache(prompt_cache, len(model.layers)).record(n, text[:n])
            if tuple(text[:n]) not in inserted or store.fetch(text[:n], kv)[1] < n:
                inserted[tuple(text[:n])] = copy.deepcopy(prompt_cache)
            handle = store.insert(text[:n], prompt_cache, kv, handle if draw(st.booleans()) else None)
        texts.append(text)
        if draw(st.booleans()):
            store.trim_to(int(store.nbytes * draw(st.floats(0, 1))))
    parts = [part for node in store._forest.nodes() for part in (node.span, node.snapshot)]
    assert store.nbytes == sum(part.nbytes for part in parts if part.in_memory)
    store.trim_to(0)
    assert store.nbytes == 0
    assert list(store._forest.nodes()) == []


def test_limits():
    """Of bytes, which holds after every insert, and of snapshots."""
    model, most = model_of("qwen3_5"), new_store()
    read(model, TEXT, (4, 8), most)
    store = new_store(max_bytes=most.nbytes)
    for first in range(8):
        read(model, [first, *TEXT[1:]], (4, 8), store)
        assert 0 < store.nbytes <= store.max_bytes
    few = new_store(max_snapshots=2)
    read(model, TEXT, (4, 8, 12), few)
    assert n_snapshots(few) == 2
    PromptStore(model, 0).insert(TEXT, read(model, TEXT))  # no space at all
    # MLX's caches grow in steps, and a slice holds all of the array that it is cut from
    text, store, before = [*range(32)] * 17, new_store(), active_memory()
    for n in (len(text), 300):
        store.insert(text[:n], read(model, text[:n]))
    assert n_snapshots(store) == 2
    assert active_memory() - before < 1.1 * store.nbytes


def test_a_common_beginning_outlives_the_texts_that_had_it():
    """However short the memory: it is used again and again, and each text's end once."""
    model, store = model_of("qwen3_5"), new_store()
    for first in range(3):
        read(model, [*TEXT, *11 * [first]], (len(TEXT),), store)
    store.max_bytes = store.nbytes
    for first in range(3, 11):
        read(model, [*TEXT, *11 * [first]], (len(TEXT),), store)
        assert store.fetch([*TEXT, 31])[1] == len(TEXT)
        assert store.fetch([*TEXT, *11 * [first]])[1] == len(TEXT) + 11


def active_memory():
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def test_a_cache_of_mlx_lm_is_kept_without_the_head():
    model, store, theirs = model_of("qwen3_5"), new_store(), stock.make_prompt_cache(model_of("qwen3_5"))
    text, n_entries = [*TEXT, *plain(TEXT, model, max_tokens=1, prompt_cache=theirs)], len(theirs)
    store.insert(text, theirs)
    assert len(theirs) == n_entries
    fetched, n, _ = store.fetch([*text, 7])
    assert n == len(text)
    assert mtp([7], model, max_tokens=9, prompt_cache=fetched) == plain([*text, 7], model, max_tokens=9)
    assert PromptCache(store.fetch(text)[0], n_entries).head.offset == 0
    store.insert(text, read(model, text))  # with the head's rows: these are preferred
    assert PromptCache(store.fetch(text)[0], n_entries).head.offset == len(text) - 1


def test_a_model_without_a_head():
    model = tiny_model("qwen3_5", mtp_num_hidden_layers=0)
    store, history = new_store(model), [*TEXT]
    for _ in range(3):
        prompt_cache, n, handle = store.fetch(history[:-1])
        assert n == (0 if history == TEXT else len(history) - 1)
        answer = mtp(history[n:], model, max_tokens=5, prompt_cache=prompt_cache, copy_drafts="auto")
        assert answer == plain(history, model, max_tokens=5)
        history += answer
        store.insert(history, prompt_cache, handle=handle)
        history.append(7)


def test_what_is_not_quantized_yet_serves_both():
    model, store = model_of("qwen3_5"), new_store()
    read(model, TEXT, (4, 5, 6, 10), store)
    assert store.fetch(TEXT, KV)[1] == 5  # from the 6th token on, keys and values are quantized
    read(model, TEXT, (10,), store, KV)
    assert store.fetch(TEXT, KV)[1] == len(TEXT)
    assert "QuantizedKVCache" in names(store.fetch(TEXT, KV)[0])
    assert "QuantizedKVCache" not in names(store.fetch(TEXT)[0])
    assert store.fetch(TEXT, KVOptions(**{**KV_OPTIONS, "kv_bits": 4}))[1] == 5
    assert store.fetch(TEXT, KVOptions())[1] == store.fetch(TEXT)[1]


def test_refuses_what_is_not_of_these_tokens_or_this_model():
    model, store = model_of("qwen3_5"), new_store()
    quantized = read(model, TEXT, store=new_store(max_bytes=0), kv=KV)
    for text, prompt_cache, message in [
        (TEXT[:-1], read(model, TEXT), "is of 16 tokens, not of these 15"),
        (TEXT, read(model_of("qwen3_5", 1), TEXT), "belongs to another model"),
        (TEXT, quantized, r"8 bits in groups of 32: give kv=mlx_mtp\.KVOptions.*, not None"),
    ]:
        with pytest.raises(ValueError, match=message):
            store.insert(text, prompt_cache)
    assert store.nbytes == 0
    # Other weights begin anew
    model = tiny_model("qwen3_5")
    store = new_store(model)
    read(model, TEXT, store=store)
    model.update(tiny_model("qwen3_5", 1).parameters())
    assert (store.fetch(TEXT)[1], store.nbytes) == (0, 0)
    read(model, TEXT, store=store)
    assert store.fetch(TEXT)[1] == len(TEXT)


def test_threads_fetch_what_others_inserted():
    model, store = model_of("qwen3_5"), new_store()
    want = plain(TEXT, model, max_tokens=3)

    def work(i):
        for _ in range(4):
            prompt_cache = read(model, TEXT[:-1], (i + 1, 8), store)
            assert mtp(TEXT[-1:], model, max_tokens=3, prompt_cache=prompt_cache) == want
            store.trim_to(store.nbytes // 2)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def answer(model, tokenizer, prompt, store, **options):
    return [r.token for r in stream_generate(model, tokenizer, prompt, prompt_store=store, **options)]


def test_a_session_is_that_of_mlx_lm(trained, monkeypatch):
    """Turns that go on, without comparing rows, as handles say where a text was read; one that is edited; the first again."""
    model, tokenizer = trained
    store, text, prompts, compared = PromptStore(model, 1 << 30), "def read_lines(path):\n", [], []
    monkeypatch.setattr(arrays, "are_equal", lambda *_: compared.append(_))
    for turn in ("def write_lines(path):\n", "import os\n", "import re\n"):
        prompts.append(text)
        text += text_of(tokenizer, answer(model, tokenizer, text, store, max_tokens=5)) + turn
    assert store.fetch(tokenizer.encode(prompts[2]))[1] >= len(tokenizer.encode(prompts[1]))
    assert compared == []
    monkeypatch.undo()
    for prompt in [*prompts, prompts[1] + "# another end\n", prompts[0]]:
        tokens, calls = tokenizer.encode(prompt), []
        progress = dict(prompt_progress_callback=lambda *progress, calls=calls: calls.append(progress))
        got = answer(model, tokenizer, prompt, store, max_tokens=5, **progress)
        assert got == plain(tokens, model, max_tokens=5)[: len(got)]
        assert {total for _, total in calls} == {len(tokens)}
        assert sorted(calls) == calls
        assert calls[-1] == (len(tokens), len(tokens))
    assert calls[0] == (len(tokens) - 1, len(tokens))  # the first prompt again: its last token begins the generation


@pytest.mark.parametrize("start", [0, 40, 60, 1000] if LONG else [0, 60])
def test_quantized_texts_do_not_depend_on_what_is_stored(start, trained, monkeypatch):
    """Each prompt is quantized at its own place: keys and values of a text with another one are read anew."""
    model, tokenizer = trained
    monkeypatch.setattr(rows, "EVERY", 64)
    monkeypatch.setattr(store_module, "choose_cuts", lambda _, n, __: [c for c in (20, 30, 70) if c < n])
    store, text = PromptStore(model, 1 << 30), tokenizer.encode("def read_lines(path):\n" * 4)[:30]
    kv = dict(kv_bits=2, kv_group_size=32, quantized_kv_start=start)
    for question in ("", "import os\n" * 6, "import sys\n" * 4):
        text = text + tokenizer.encode(question)
        want = plain(text, model, max_tokens=8, prefill_step_size=64, **kv)
        for _ in range(2):
            assert answer(model, tokenizer, text, store, max_tokens=8, **kv) == want
        text += want
    assert len(text) > 80


@pytest.mark.parametrize(
    ("before", "openings"), [("", OPENINGS[:1] * 4), ("a,", [OPENINGS[i] for i in (1, 2, 4, 3)])], ids=["qwen", "glm"]
)
def test_prompts_are_cut_where_messages_end(trained, before, openings):
    model, tokenizer = trained[0], mlx_mtp.load(TRAINED)[1]
    tokenizer.chat_template = " ".join(openings)
    messages = [f"{opening}import {name}\n" for opening, name in zip(openings, ("os", "sys", "re"))]
    prompt = before + "".join(messages) + openings[-1]
    tokens = tokenizer.encode(prompt)
    ends = [len(tokenizer.encode(before + "".join(messages[: i + 1]))) for i in range(3)]
    store = PromptStore(model, 1 << 30)
    answer(model, tokenizer, prompt, store, max_tokens=3)
    for end in ends[1:]:  # the first is short
        assert store.fetch([*tokens[:end], 1])[1] == end
    assert choose_cuts(ends, len(tokens)) == ends[1:]
    assert n_snapshots(store) == len(ends)


def test_what_is_stopped_is_kept(trained, monkeypatch):
    """An answer, and a prompt as far as it is read: up to a cut and the chunk after it."""
    model, tokenizer = trained
    store, line = PromptStore(model, 1 << 30), tokenizer.encode("def read_lines(path):\n")
    prompt, other = line * 3, [*tokenizer.encode("import os\n"), *line]
    with closing(stream_generate(model, tokenizer, other, prompt_store=store, max_tokens=40)) as responses:
        tokens = [next(responses).token for _ in range(5)]
    assert store.fetch([*other, *tokens])[1] == len(other) + 5
    monkeypatch.setattr(store_module, "choose_cuts", lambda *_: [5])
    options = dict(max_tokens=5, prompt_progress_callback=interrupt_at(9), prefill_step_size=4)
    with pytest.raises(KeyboardInterrupt):
        answer(model, tokenizer, prompt, store, **options)
    assert store.fetch(prompt[:-1])[1] == 9
    assert answer(model, tokenizer, prompt, store, max_tokens=5) == answer(model, tokenizer, prompt, None, max_tokens=5)


def test_nothing_of_a_failed_pass_is_kept(trained, monkeypatch):
    """The GPU's error may come after steps that have computed nothing."""
    model, tokenizer = trained
    store, prompt, n_steps = PromptStore(model, 1 << 30), tokenizer.encode("import os\n" * 9), 0
    fail = Mock(side_effect=RuntimeError(f"[METAL] {FAILED_PASS}"))
    with pytest.raises(RuntimeError, match=FAILED_PASS):
        for _ in stream_generate(model, tokenizer, prompt, prompt_store=store, max_tokens=40):
            n_steps += 1
            monkeypatch.setattr(mx, "async_eval", fail)
    assert n_steps > 0
    assert store.fetch([*prompt, 1])[1] < len(prompt)  # up to the last cut


@pytest.mark.parametrize("sampled", [False, True])
def test_processors_see_the_whole_prompt(sampled, trained):
    model, tokenizer = trained
    store, prompt = PromptStore(model, 1 << 30), tokenizer.encode("import os\nimport sys\nimport os\n")

    def text(store):
        options = dict(max_tokens=5, sampler=make_sampler(temp=1.0, seed=3) if sampled else None)
        options["logits_processors"] = make_logits_processors(repetition_penalty=1.5)
        return answer(model, tokenizer, prompt, store, **options)

    assert text(None) == text(store) == text(store)
    noting = Mock(side_effect=lambda _, logits: logits)  # an object, which may keep state
    tokens = answer(model, tokenizer, prompt, store, max_tokens=4, logits_processors=[noting])
    assert [call.args[0].tolist() for call in noting.call_args_list] == [prompt + tokens[:i] for i in range(4)]


def test_what_does_not_go_with_a_store(trained):
    for of, options, message in [
        (trained[0], dict(prompt_cache=[]), "prompt_store and prompt_cache"),
        (trained[0], dict(input_embeddings=mx.zeros((3, 4))), "prompt_store and input_embeddings"),
        (trained[0], dict(mtp=False), "requires mtp=True or copy_drafts"),
        (model_of("qwen3_5"), {}, "belongs to another model"),
    ]:
        with pytest.raises(ValueError, match=message):
            answer(*trained, [1, 2, 3], PromptStore(of, 0), **options)


@pytest.mark.parametrize("what", ["stored", "given"])
def test_a_prompt_cache_is_evaluated_in_pieces(monkeypatch, what):
    """Of so many bytes, or of one array; the arrays are equal."""
    model, sizes, evaluate = tiny_model("qwen3_5"), [], mx.eval
    prefill(mx.arange(20) % 32, model, prompt_cache=(cache := make_prompt_cache(model)))

    def evaluated():
        if what == "given":
            return open_prompt_cache(model, copy.deepcopy(cache)).entries
        store = PromptStore(model)
        store.insert([*range(20)], copy.deepcopy(cache))
        return store.fetch([*range(20)])[0]

    def note(*trees):
        sizes.append([x.nbytes for _, x in tree_flatten(trees)])
        evaluate(*trees)

    want = evaluated()
    monkeypatch.setattr(prompt_cache_module, "MAX_BYTES", 1000)
    monkeypatch.setattr(mx, "eval", note)
    assert arrays_equal(held(evaluated()), held(want))
    assert all(len(own) <= 1 or sum(own) <= 1000 for own in sizes)
    assert sum(map(sum, sizes)) > 5000


# Where snapshots are made, and which are kept


@given(st.lists(st.integers(1, 30_000)), st.integers(1, 30_000), st.integers(0, 30_000), st.integers(1, 5000))
def test_cuts(ends, n_tokens, n_common, every):
    cuts = choose_cuts(ends, n_tokens, n_common, every)
    known = sorted({end for end in ends if end < n_tokens})
    assert cuts == sorted({*cuts})
    assert all(0 < cut < n_tokens for cut in cuts)
    assert {*known[1:][-LAST:]} <= {*cuts}
    assert all(b - a <= every for a, b in zip([0, *cuts], cuts))
    assert n_tokens == 1 or cuts[-1] >= (known[-1] if known else n_tokens - 1)


def test_cuts_of_a_prompt():
    ends = [6000, 6200, 9000, 9100, 9200, 9300, 9400, 9500]
    assert choose_cuts(ends, 9504) == [EVERY, 6000 - LINE, 9200, 9300, 9400, 9500]
    assert choose_cuts([*ends, 30_000], 30_004)[-4:] == [9500 + EVERY * i for i in (3, 4, 5)] + [30_000]
    assert choose_cuts([], 100) == [99]
    # Where it parts from the texts before
    assert choose_cuts([3000, 3200], 3204, 2800) == [2800 - LINE, 3000 - LINE, 3200]
    for n_common in (5, 2990, 3001, 3203):
        assert choose_cuts([3000, 3200], 3204, n_common) == [3000 - LINE, 3200]
    assert choose_cuts([100, 3200], 3204) == [3200]  # a short one saves little
    assert choose_cuts([], 1) == []
    # The ends of messages, by the tokens that begin one; the text begins with one, too
    tokens = [1, 5, 6, 1, 7, 1, 1, 8]
    for opening, message_starts in (([1], [3, 5, 6]), ([1, 7], [3]), ([1, 5], []), ([], [])):
        assert message_ends(tokens, opening) == message_starts
    # They stay where they are as a text grows, or one that is resumed in the middle would not be read as before
    ends = [6000, *(6000 + 900 * i for i in range(1, 40))]
    long = choose_cuts(ends, ends[-1] + 4)
    for i in range(2, len(ends)):
        cuts = choose_cuts(ends[:i], ends[i - 1] + 4)
        assert [c for c in long if c < cuts[0]] == []
        assert {c for c in cuts if c not in long} <= {*ends[max(i - LAST, 0) : i]}


def test_the_snapshot_that_saves_least_goes_first():
    for snapshots, order in [
        ([(300, 1000, 0), (200, 1000, 0), (400, 1000, 0)], [1, 0, 2]),
        ([(300, 1000, 0), (300, 1000, 5), (300, 1000, 2)], [1, 2, 0]),  # what is older
        ([(300, 1000, 5, 9), (300, 1000, 5)], [1, 0]),  # what was not used
        ([(300, 9000, 0), (300, 1000, 0)], [0, 1]),  # what is larger
        ([(300, 1000, 0, 0, True), (300, 1000, 0)], [0, 1]),  # what is on disk
    ]:
        assert sorted(range(len(snapshots)), key=lambda i: score(*snapshots[i])) == order
