"""--check: the comparison with plain decoding tells rounding from a fault."""

import copy
import re
from importlib import import_module
from itertools import product

import mlx.core as mx
import pytest

from mlx_mtp import DEMO, TextOptions, make_prompt_cache
from mlx_mtp.core.caches import rows
from mlx_mtp.core.caches.recurrent import RecurrentCache
from mlx_mtp.core.layers.passes import DevicePasses
from mlx_mtp.generate.__main__ import main
from mlx_mtp.generate.check import Check, check
from tests.support.commands import run_command
from tests.support.decoding import PROMPT, mtp, plain
from tests.support.models import FLASH, KV_FAMILIES, LATENT, TRAINED, arrays_equal, model_of, round_otherwise
from tests.support.profiles import LONG


def skip_rollback(monkeypatch):
    """A fault: after a rejected draft the recurrent state remains that of the whole window."""
    states_of = rows.rewound
    monkeypatch.setattr(rows, "rewound", lambda splits, kept: states_of(splits, [splits[0].n_tokens] * len(kept)))


KV_8 = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 16}
KV_2 = {"kv_bits": 2, "kv_group_size": 32, "quantized_kv_start": 0, "prefill_step_size": 3}
SHORT = [("qwen3_5", {}), ("qwen3_5_moe", KV_8), ("qwen3_next", KV_2), (FLASH, {}), (LATENT, {})]
EVERY = [*product(KV_FAMILIES, ({}, KV_8, KV_2)), (LATENT, {})]


@pytest.mark.parametrize(("family", "options"), EVERY if LONG else SHORT, ids=str)
def test_equal_tokens_pass(family, options):
    assert check(model_of(family), PROMPT, TextOptions(18, num_draft_tokens=3), **options) == Check(18)


def test_a_near_tie_is_within_rounding(monkeypatch):
    """The first model of which MTP chooses a token otherwise because of rounding alone."""
    round_otherwise(monkeypatch, 0.01)
    models = (model_of("qwen3_5", seed) for seed in range(8))
    texts = ((m, plain(PROMPT, m, max_tokens=32), mtp(PROMPT, m, max_tokens=32, num_draft_tokens=3)) for m in models)
    model, want, got = next(text for text in texts if text[1] != text[2])
    at = next(i for i in range(32) if want[i] != got[i])
    result = check(model, PROMPT, TextOptions(32, num_draft_tokens=3))
    assert (result.n_tokens, result.pair) == (at, (want[at], got[at]))
    logits = model(mx.array([PROMPT.tolist() + want[:at]]))[0, -1]
    assert 0 < result.gap <= 2 * result.rounding < (logits.max() - logits.min()).item() / 2
    assert result.top_gap <= result.gap
    assert result.passed
    # A token that is not the runner-up is not excused by a runner-up that is near
    assert Check(0, (1, 2), top_gap=0.1, gap=0.2, rounding=0.1).passed
    assert not Check(0, (1, 2), top_gap=0.1, gap=0.3, rounding=0.1).passed


@pytest.mark.parametrize("amount", [0, 1e-4])
def test_a_fault_is_not_within_rounding(monkeypatch, amount):
    round_otherwise(monkeypatch, amount)
    skip_rollback(monkeypatch)
    for seed in range(4 if LONG else 2):
        model = model_of("qwen3_5", seed)
        want = plain(PROMPT, model, max_tokens=50)
        result = check(model, PROMPT, TextOptions(50, num_draft_tokens=3))
        assert result.pair[0] == want[result.n_tokens] != result.pair[1]
        assert result.gap > 2 * result.rounding
        assert (result.rounding > 0) == (amount > 0)
        assert not result.passed


def test_a_fault_in_the_first_token_is_not_within_rounding(monkeypatch):
    """It comes from the same pass in both: nothing may differ."""
    model = model_of("qwen3_5")
    right = plain(PROMPT, model, max_tokens=1)[0]
    wrong = ((token, None, False) for token in [(right + 1) % 32])
    monkeypatch.setattr(import_module("mlx_mtp.generate.check"), "mtp_generate_step", lambda *_, **__: wrong)
    result = check(model, PROMPT)
    assert (result.n_tokens, result.pair, result.rounding) == (0, (right, (right + 1) % 32), 0)
    assert not result.passed


def test_a_prompt_cache_is_left_unchanged():
    model = model_of("qwen3_5")
    prompt_cache = make_prompt_cache(model)
    tokens = mtp(PROMPT, model, max_tokens=7, prompt_cache=prompt_cache)
    before = copy.deepcopy(prompt_cache)
    want = plain([*PROMPT.tolist(), *tokens, 7, 2], model, max_tokens=20)
    result = check(model, mx.array([7, 2]), TextOptions(20), prompt_cache=prompt_cache, stop_tokens=want[19:])
    assert result == Check(want.index(want[19]) + 1)
    assert [getattr(c, "offset", None) for c in prompt_cache] == [getattr(c, "offset", None) for c in before]
    assert arrays_equal(
        *([c.cache for c in cache if isinstance(c, RecurrentCache)] for cache in (prompt_cache, before))
    )


def run(capsys, *flags):
    flags = ("--mtp", "--check", "--model", TRAINED, "--prompt", "-", "-m", 10, *flags)
    return run_command(main, capsys, *flags, stdin="class Queue:\n    def __init__(self, maxsize=0):\n")


def test_command_exits_0_for_equal_tokens_or_rounding_and_1_for_a_fault(monkeypatch, capsys):
    assert run(capsys) == (0, "Identical: plain decoding and MTP generated the same 10 tokens.\n", "")
    with monkeypatch.context() as patch:
        round_otherwise(patch, 0.1)
        found = lambda model, *_: setattr(model, "device", DevicePasses(same_bits=4))  # noqa: E731
        patch.setattr("mlx_mtp.checkpoint.load.ensure_tested", found)
        status, out, _ = run(capsys, "--num-draft-tokens", 4)
        said = "The difference is within rounding.\nOn this device, windows have the same bits as plain decoding up to 4 tokens"
        assert (status, said in out) == (0, True)
    skip_rollback(monkeypatch)
    status, out, _ = run(capsys, "--num-draft-tokens", 4, "--model", DEMO)  # whose drafts are rejected sooner
    assert status == 1
    assert re.match(r"Different at token \d+, after \d+ equal tokens: plain \d+ \('.*'\), MTP \d+ \('.*'\)\.\n", out)
    assert "NOT within rounding: a bug" in out
