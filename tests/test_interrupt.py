"""Ctrl-C at any point of the loop, or the end in another thread: the prompt cache holds exactly what was handed out."""

import contextlib
import copy
import functools
import itertools
import linecache
import sys
from unittest.mock import Mock

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache
from mlx_lm.sample_utils import make_sampler as stock_sampler

from mlx_mtp import make_prompt_cache, make_sampler, mtp_generate_step
from mlx_mtp.core.batch import generate_step, scheduler
from mlx_mtp.core.caches import indexed, rows
from mlx_mtp.core.caches import prompt_cache as prompt_cache_module
from mlx_mtp.core.caches import recurrent as cache
from mlx_mtp.core.caches.prompt_cache import PromptCache
from mlx_mtp.core.decoding import decoder, head, loop, prefill, sequence
from mlx_mtp.core.drafts.settings import DraftLMHead, DraftSettings
from tests.support.decoding import PROMPT, assert_cache_of, assert_head_rows, head_rows, mtp, plain
from tests.support.models import FLASH, deep_model, tiny_model
from tests.support.profiles import LONG
from tests.support.scripted import Scripted, script_copies
from tests.support.ways import close_elsewhere, elsewhere, generate_alone

CACHES = (cache, indexed, prompt_cache_module, rows)
MODULES = (*CACHES, decoder, head, loop, prefill, sequence, scheduler, generate_step)
FILES = {module.__file__ for module in MODULES}


@functools.cache
def may_handle(file: str, line: int) -> bool:
    """Whether signals are handled before a line: not where there is no call before it."""
    return not linecache.getline(file, line).strip().startswith(("yield token", "try:"))


@contextlib.contextmanager
def interrupted(n: int, in_finalize: bool):
    """Ctrl-C at the n-th line of the loop, or of ``finalize`` and what it calls -> the line, unless there are fewer."""
    count, came = itertools.count(1), []

    def call(frame, event, arg):
        if frame.f_code.co_filename not in FILES:
            return None
        outer, is_finalize = frame, False
        while outer is not None and outer.f_code.co_filename != __file__ and not is_finalize:
            is_finalize = outer.f_code.co_name == "finalize" and outer.f_code.co_filename == generate_step.__file__
            outer = outer.f_back
        return line if is_finalize == in_finalize else None

    def line(frame, event, arg):
        if event == "line" and may_handle(frame.f_code.co_filename, frame.f_lineno) and next(count) == n:
            came.append(frame.f_lineno)
            raise KeyboardInterrupt
        return line

    with contextlib.suppress(KeyboardInterrupt):
        sys.settrace(call)
        try:
            yield came
        finally:
            sys.settrace(None)


OPEN = "This prompt cache is of a generation that has not ended.*make a new one"


@functools.cache
def model_and_truth(family="qwen3_5"):
    model = (deep_model if LONG else tiny_model)(family)
    return model, PROMPT.tolist() + plain(PROMPT, model, max_tokens=40)


def begun(prompt_cache, *family, **options):
    """A generation of windows with drafts that are accepted or not."""
    model, truth = model_and_truth(*family)
    options = dict(num_draft_tokens=3, prefill_step_size=6, max_tokens=40) | options
    return mtp_generate_step(PROMPT, Scripted(model, truth, lambda i: i % 3 > 0), prompt_cache=prompt_cache, **options)


@functools.cache
def uninterrupted(n, *family):
    """What follows in a cache of the text's first n tokens, and the head's rows in it."""
    (model, truth), prompt_cache = model_and_truth(*family), make_prompt_cache(model_and_truth(*family)[0])
    if n > 0:
        mtp(truth[:n], model, max_tokens=0, prompt_cache=prompt_cache)
    return plain([*truth[:n], 7, 2], model, max_tokens=4), head_rows(prompt_cache)


def assert_holds(prompt_cache, n, *family):
    model, (want, rows) = model_and_truth(*family)[0], uninterrupted(n, *family)
    if n > 0:
        assert_cache_of(model, prompt_cache, n)
        assert_head_rows(prompt_cache, rows)
    assert mtp([7, 2], model, max_tokens=4, prompt_cache=prompt_cache) == want


@pytest.mark.parametrize("depth", (0, 3) if LONG else (3,))
@pytest.mark.parametrize(("family", "stride"), [("qwen3_5", 41 if LONG else 61), (FLASH, 41 if LONG else 173)])
def test_interrupt_at_any_line_keeps_the_yielded_tokens(family, stride, depth):
    n, came, seen = 1, True, set()
    while came:
        prompt_cache, tokens = make_prompt_cache(model_and_truth(family)[0]), []
        with interrupted(n, in_finalize=False) as came:
            for token, _, _ in begun(prompt_cache, family, max_tokens=12, num_draft_tokens=depth):
                tokens.append(token)
        n_cached = len(PROMPT) + len(tokens)
        if not tokens:
            n_cached = prompt_cache_module.n_tokens(prompt_cache)
            assert n_cached in (0, 6, 10, 11)
        assert_holds(prompt_cache, n_cached, family)
        seen.add(n_cached)
        n += stride  # over the steps, which differ in length, most lines come
    assert n > 500
    assert len(seen) > (3 if stride == 173 else 7)


@pytest.mark.parametrize("n_tokens", range(1, 12) if LONG else (1, 3, 6))
def test_second_interrupt_at_any_line_of_finalize(n_tokens):
    """It is finished all the same."""
    (model, truth), came, n = model_and_truth(), True, 1
    while came:
        prompt_cache = make_prompt_cache(model)
        steps = begun(prompt_cache)
        assert [next(steps)[0] for _ in range(n_tokens)] == truth[len(PROMPT) :][:n_tokens]
        with interrupted(n, in_finalize=True) as came:
            steps.close()
        assert_holds(prompt_cache, len(PROMPT) + n_tokens)
        n += 1 if LONG else 11
    assert n > 50


def refused(*caches):
    for prompt_cache in caches:
        with pytest.raises(ValueError, match=OPEN):
            mtp([7, 2], model_and_truth()[0], prompt_cache=prompt_cache)


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_an_end_that_is_interrupted_twice_is_known_as_such(is_interrupted, monkeypatch, tmp_path):
    """So is a copy of the cache, one from a file, and one that is copied while the generation is open, however that ends."""
    prompt_cache, file = make_prompt_cache(model_and_truth()[0]), str(tmp_path / "turn.safetensors")
    steps = begun(prompt_cache)
    for _ in range(3):
        next(steps)
    earlier = copy.deepcopy(prompt_cache)
    save_prompt_cache(file, prompt_cache)
    refused(prompt_cache, earlier)
    assert next(steps)[0] == model_and_truth()[1][len(PROMPT) + 3]  # it goes on
    if not is_interrupted:
        steps.close()
        refused(earlier)
        assert_holds(prompt_cache, len(PROMPT) + 4)
        return
    with monkeypatch.context() as m:
        m.setattr(generate_step, "finalize", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            steps.close()
    refused(prompt_cache, earlier, copy.deepcopy(prompt_cache), load_prompt_cache(file))


START = PROMPT.tolist()
OPTIONS = {
    "rejection": lambda: dict(sampler=make_sampler(temp=1.0, top_p=0.9)),
    "match": lambda: dict(sampler=stock_sampler(temp=1.0, xtc_probability=0.5)),
    "quantized": lambda: dict(kv_bits=8, kv_group_size=32, quantized_kv_start=len(START) + 3),
}
COPIES, BOTH = dict(num_draft_tokens=0, copy_drafts=16), dict(num_draft_tokens=3, copy_drafts=16)


@functools.cache
def small_model(draft_rows=None):
    model = tiny_model("qwen3_5", 1)
    if draft_rows is not None:
        model.draft_settings = DraftSettings(lm_head=DraftLMHead(model.output_layer, [*range(draft_rows)]))
    return model


# Others, greedy or with a seed or penalties, are closed in another thread in ``test_single_run.py``.
CLOSED = [*((kind, BOTH, None) for kind in OPTIONS), ("rejection", COPIES, 6)]


@pytest.mark.parametrize(("kind", "drafts", "draft_rows"), CLOSED, ids=lambda x: x if isinstance(x, str) else "")
def test_closes_in_another_thread(monkeypatch, kind, drafts, draft_rows):
    stops = range(1, 41) if LONG else (2, 9)
    model, options = small_model(draft_rows), OPTIONS[kind]()
    kv = {name: value for name, value in options.items() if name != "sampler"}
    truth = plain(START, model, max_tokens=max(stops) + 40, **kv)
    script_copies(monkeypatch, [START + truth], lambda i: i % 7 != 0)
    for n in stops:
        prompt_cache = make_prompt_cache(model)
        asked = dict(max_tokens=-1, prompt_cache=prompt_cache, **drafts, **options)
        text = generate_alone(START, model, leaves=n, close=close_elsewhere, **asked)
        assert_cache_of(model, prompt_cache, len(START) + n)
        want = plain([*START, *text.tokens, 7, 2], model, max_tokens=4)
        if kv:  # in mlx-lm's own cache
            theirs = stock.make_prompt_cache(model)
            assert plain(START, model, max_tokens=n, prompt_cache=theirs, **kv) == text.tokens
            want = plain([7, 2], model, max_tokens=4, prompt_cache=theirs, **kv)
        assert elsewhere(mtp, [7, 2], model, max_tokens=4, prompt_cache=copy.deepcopy(prompt_cache), **kv) == want
        assert mtp([7, 2], model, max_tokens=4, prompt_cache=prompt_cache, **kv) == want


@pytest.mark.parametrize("prompt", [[5], [5, 6], START], ids=len)
def test_the_first_token_is_closed_in_another_thread(prompt):
    """Of the last prompt, the head has an input that no pass of this thread has read."""
    model, prompt_cache, text = small_model(), make_prompt_cache(small_model()), []
    for k, own in ((0, prompt), (3, [1]), (0, [2]), (3, prompt)):
        steps = mtp_generate_step(mx.array(own), model, num_draft_tokens=k, prompt_cache=prompt_cache)
        text += [*own, next(steps)[0]]
        close_elsewhere(steps)
        assert_cache_of(model, prompt_cache, len(text))
        assert PromptCache(prompt_cache, len(model.layers)).text == text
        got = mtp([7, 2], model, max_tokens=4, prompt_cache=copy.deepcopy(prompt_cache))
        assert got == plain([*text, 7, 2], model, max_tokens=4)
