"""Generation and other threads: what one thread began, another may close, and go on from its cache."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock

from mlx_mtp import make_prompt_cache, make_sampler, mtp_generate_step
from mlx_mtp.layers.drafting import DraftLMHead
from tests.support.decoding import assert_cache_of, mtp, plain
from tests.support.models import tiny_model
from tests.support.scripted import script_copies

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


OPTIONS = {
    "rejection": lambda: dict(sampler=make_sampler(temp=1.0, top_p=0.9)),
    "quantized": lambda: dict(kv_bits=8, kv_group_size=32, quantized_kv_start=len(PROMPT) + 3),
}
COPIES, BOTH = dict(num_draft_tokens=0, copy_drafts=16), dict(num_draft_tokens=3, copy_drafts=16)


@cache
def model_of(draft_rows=None):
    model = tiny_model("qwen3_5", 1)
    if draft_rows is not None:
        model.drafting.lm_head = DraftLMHead(model.output_layer, [*range(draft_rows)])
    return model


def elsewhere(function, *args, **kwargs):
    """What a function returns or raises in a thread of its own, which then ends."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function, *args, **kwargs).result()


def after(model, tokens, kv):
    """The next tokens of mlx-lm's generation in a cache of the prompt and its own tokens, or of these."""
    if not kv:
        return plain([*tokens, 7, 2], model, max_tokens=4)
    theirs = stock.make_prompt_cache(model)
    own = plain(PROMPT, model, max_tokens=len(tokens) - len(PROMPT), prompt_cache=theirs, **kv)
    assert own == tokens[len(PROMPT) :]
    return plain([7, 2], model, max_tokens=4, prompt_cache=theirs, **kv)


# Others, greedy or with a seed or penalties, are closed in another thread in ``test_single_run.py``.
CASES = [*((kind, BOTH, None) for kind in OPTIONS), ("rejection", COPIES, 6)]


@pytest.mark.parametrize(
    "stops", [pytest.param((2, 9), id="some stops"), pytest.param(range(1, 41), marks=pytest.mark.slow, id="all stops")]
)
@pytest.mark.parametrize(("kind", "drafts", "draft_rows"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_closes_in_another_thread(monkeypatch, kind, drafts, draft_rows, stops):
    model, options = model_of(draft_rows), OPTIONS[kind]()
    own = {name: value for name, value in options.items() if name != "sampler"}
    truth = plain(PROMPT, model, max_tokens=max(stops) + 40, **own)
    script_copies(monkeypatch, [PROMPT + truth], lambda i: i % 7 != 0)
    kv = {name: value for name, value in options.items() if "kv" in name}
    for n in stops:
        prompt_cache = make_prompt_cache(model)
        asked = dict(max_tokens=-1, prompt_cache=prompt_cache, **drafts, **options)
        steps = mtp_generate_step(mx.array(PROMPT), model, **asked)
        tokens = PROMPT + [next(steps)[0] for _ in range(n)]
        elsewhere(steps.close)
        assert_cache_of(model, prompt_cache, len(tokens))
        want = after(model, tokens, kv)
        assert mtp([7, 2], model, max_tokens=4, prompt_cache=copy.deepcopy(prompt_cache), **kv) == want
        assert mtp([7, 2], model, max_tokens=4, prompt_cache=prompt_cache, **kv) == want


@pytest.mark.parametrize(
    ("drafts", "n"),
    [({}, 1), ({}, 9), (COPIES, 9), (BOTH, 9), (dict(num_draft_tokens=3), 9), (dict(num_draft_tokens=0), 9)],
    ids=str,
)
def test_a_turn_goes_on_in_another_thread(drafts, n):
    model, prompt_cache = model_of(), make_prompt_cache(model_of())
    tokens = PROMPT + elsewhere(mtp, PROMPT, model, max_tokens=n, prompt_cache=prompt_cache, **drafts)
    got = elsewhere(mtp, [7, 2], model, max_tokens=4, prompt_cache=prompt_cache, **drafts)
    assert got == after(model, tokens, {})
