"""Whatever comes and goes beside it, and whatever fails, each text is that of a single run of mlx-lm.

``pytest --long tests/test_single_run.py`` tests 50 times as many scenarios, the demo at every depth and more seeds.
"""

import inspect
from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import example, given

import mlx_mtp
from tests.support.decoding import mtp, plain
from tests.support.models import TRAINED
from tests.support.profiles import LONG, examples
from tests.support.scenario import WAYS, Ask, Scenario, assert_single_run, scenarios
from tests.support.scripted import Scripted

# Texts that end within a window of right drafts, of which the last ones are not handed over.
WITHIN_A_WINDOW = Scenario(
    family="qwen3_5",
    seed=0,
    n_layers=2,
    asks=[Ask([3, 1, 4], 30, [True], num_draft_tokens=4, copy_drafts="off", leaves=n) for n in (3, 5, 8)],
    prefill_step_size=2048,
    completion_batch_size=32,
    refused={},
    close="close",
    alone={},
    draft_rows=None,
    copies=None,
)


@pytest.mark.parametrize("way", WAYS)
@examples(10)
@example(scenario=WITHIN_A_WINDOW)
@given(scenario=scenarios())
def test_each_text_is_that_of_a_single_run(way, scenario):
    assert_single_run(way, scenario)


MODULES = ["abc", "bisect", "calendar", "cmd", "codecs", "copy", "csv", "glob", "heapq", "json"][: 10 if LONG else 1]
MAX_TOKENS = 300 if LONG else 10
DEPTHS = range(1, 9) if LONG else [3]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "4-bit"] if LONG else ["float32"])
def test_a_trained_model_at_every_depth(precision):
    """With the head that it has, and with one that is right, wrong, or right most of the time."""
    model, tokenizer = mlx_mtp.load(str(mlx_mtp.DEMO) if LONG else TRAINED)
    model.set_dtype(mx.float32 if precision == "float32" else mx.bfloat16)
    if precision == "4-bit":
        nn.quantize(model, 64, 4, class_predicate=lambda name, m: hasattr(m, "to_quantized") and "mtp." not in name)
    for i, name in enumerate(MODULES):
        prompt = tokenizer.encode(inspect.getsource(import_module(name)))[: 40 + 12 * i]
        want = plain(prompt, model, max_tokens=MAX_TOKENS)
        heads = [lambda i: True, lambda i: False, lambda i: i % 10 < 7]
        for depth in DEPTHS:
            assert mtp(prompt, model, max_tokens=MAX_TOKENS, num_draft_tokens=depth) == want
        for depth, right in zip((3, 5, 8), heads):
            scripted = Scripted(model, prompt + want + [0] * 10, right)
            assert mtp(prompt, scripted, max_tokens=MAX_TOKENS, num_draft_tokens=depth) == want
