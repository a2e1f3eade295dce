"""Ctrl-C at any point of the loop: the prompt cache holds exactly what was handed out."""

import linecache
import sys

import pytest
from helpers import PROMPT, Scripted, assert_cache_of, deep_model, mtp, plain

from mlx_mtp import make_prompt_cache, mtp_generate_step
from mlx_mtp.decoding import decoder, drafter, loop
from mlx_mtp.models import cache
from mlx_mtp.models import prompt_cache as prompt_cache_module

FILES = {module.__file__ for module in (cache, prompt_cache_module, decoder, drafter, loop)}


def interrupted_at(n: int, steps) -> tuple[list[int], bool]:
    """The tokens of a generator that Ctrl-C stops at the n-th line of the loop, and whether it came so far."""
    count = 0

    def call(frame, event, arg):
        inside, outer = frame.f_code.co_filename in FILES, frame
        while inside and outer is not None:
            inside = outer.f_code.co_name != "finalize"  # what comes after
            outer = outer.f_back
        return line if inside else None

    def line(frame, event, arg):
        nonlocal count
        # Between the line before and that of a yield there is no call, and so none of the points where signals are handled.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith(("yield token", "decoder.finalize()")):
            count += 1
            if count == n:
                raise KeyboardInterrupt
        return line

    tokens = []
    sys.settrace(call)
    try:
        for token, _, _ in steps:
            tokens.append(token)
    except KeyboardInterrupt:
        return tokens, True
    finally:
        sys.settrace(None)
    return tokens, False


@pytest.mark.parametrize(
    ("depth", "exact"),
    [pytest.param(0, False, marks=pytest.mark.slow), (3, False), pytest.param(2, True, marks=pytest.mark.slow)],
)
def test_interrupt_at_any_line_keeps_the_yielded_tokens(depth, exact):
    model = deep_model("qwen3_5")
    truth = PROMPT.tolist() + plain(PROMPT, model, max_tokens=40)
    head = Scripted(model, truth, lambda i: i % 3 > 0)
    after = {}
    n, came = 1, True
    while came:
        prompt_cache = make_prompt_cache(model)
        options = dict(
            max_tokens=8, num_draft_tokens=depth, exact=exact, prefill_step_size=6, prompt_cache=prompt_cache
        )
        tokens, came = interrupted_at(n, mtp_generate_step(PROMPT, head, **options))
        n_cached = len(PROMPT) + len(tokens)
        if not tokens:
            n_cached = prompt_cache_module.n_tokens(prompt_cache)
            assert n_cached in (0, 6, 10, 11)
        if n_cached > 0:
            assert_cache_of(model, prompt_cache, n_cached)
        if n_cached not in after:
            after[n_cached] = plain([*truth[:n_cached], 7, 2], model, max_tokens=4)
        assert mtp([7, 2], model, max_tokens=4, prompt_cache=prompt_cache) == after[n_cached]
        n += 17  # over the steps, which differ in length, most lines come
    assert n > 500
    assert len(after) > 8
