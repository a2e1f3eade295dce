"""Logits that are no distribution: their text ends with an error, no other does, and no value of theirs is kept."""

import json
import math
import re

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_sampler as make_stock_sampler

from mlx_mtp import DEMO, MTPError, PromptStore, load, make_prompt_cache, make_sampler, stream_generate
from mlx_mtp.errors import NotANumberError
from tests.support.decoding import mtp, plain
from tests.support.engine import Engine
from tests.support.models import model_of, tiny_model
from tests.support.ways import every_way, generate

PROMPT = [3, 1, 4, 1, 5]
ERROR = "The model's output is not a number"
SAMPLERS = {
    "greedy": lambda: None,
    "rejection": lambda: make_sampler(1.0, top_p=0.95),
    "coupled": lambda: make_sampler(1.0, top_k=20, seed=3),
    "mlx-lm's": lambda: make_stock_sampler(1.0, min_p=0.01),
    "a token that is masked": lambda: lambda logprobs: mx.array([7]),
}


def filled(value, n):
    """A processor that gives a value in place of the logits from the n-th generated token on."""
    return lambda tokens, logits: mx.full(logits.shape, value) if tokens.size >= len(PROMPT) + n else logits


@every_way
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_text_ends_at_logits_that_are_no_numbers(way, k, sampler):
    """Behind the tokens that are right, with every sampler; the texts beside it are asserted to go on."""
    model = model_of("qwen3_5")
    values = [(4, math.nan), (0, -math.inf), (5, math.inf)]
    for n, value in values if sampler == "greedy" else values[:1]:
        options = dict(sampler=SAMPLERS[sampler](), num_draft_tokens=k, logits_processors=[filled(value, n)])
        text = generate(way, PROMPT, model, max_tokens=12, fails=NotANumberError, **options)
        assert (text.finish_reason, len(text.tokens)) == ("error", n)
        assert str(text.last.error).startswith(ERROR)
        assert way == "alone" or text.last.prompt_cache is None
        if sampler in ("greedy", "coupled"):
            assert text.tokens == plain(PROMPT, model, max_tokens=12, sampler=SAMPLERS[sampler]())[:n]


def test_logits_of_minus_infinity_are_numbers():
    """If not all are, also where a caller's sampler chooses one of them."""
    processors = [lambda tokens, logits: mx.where(mx.arange(32) == 9, logits, -mx.inf)]
    options = dict(max_tokens=4, logits_processors=processors, num_draft_tokens=2)
    for sampler, token in ((None, 9), (make_sampler(1.0), 9), (SAMPLERS["a token that is masked"](), 7)):
        assert mtp(PROMPT, model_of("qwen3_5"), sampler=sampler, **options) == [token] * 4


@every_way
@pytest.mark.parametrize("k", [0, 2])
def test_a_token_of_a_sampler_that_the_model_does_not_have(way, k):
    for token, shown in ((32, 32), (2**31 - 1, 2**31 - 1), (-1, 2**32 - 1)):
        options = dict(sampler=lambda logprobs, token=token: mx.array([token]), num_draft_tokens=k, fails=MTPError)
        text = generate(way, PROMPT, model_of("qwen3_5"), max_tokens=9, **options)
        assert (text.finish_reason, text.tokens) == ("error", [])
        assert str(text.last.error) == f"The sampler chose the token {shown}, and the model's are 0 to 31."


def nan_in(model, part):
    layer = {"head": model.mtp.layers[0], "layer": model.layers[0]}[part].mlp.down_proj
    weight = layer.weight + 0
    weight[3] = math.nan
    mx.eval(weight)  # here: another thread, which may use it, cannot
    layer.weight = weight
    return model


@pytest.mark.parametrize("sampler", ["greedy", "coupled"])
def test_a_head_whose_drafts_are_no_numbers_changes_no_text(sampler):
    options = dict(max_tokens=12, sampler=SAMPLERS[sampler]())
    model = nan_in(tiny_model("qwen3_5"), "head")
    for p_min in (None, 0.3):
        text = mtp(PROMPT, model, num_draft_tokens=3, draft_p_min=p_min, **options)
        assert text == plain(PROMPT, model_of("qwen3_5"), **options)


def test_nothing_of_it_is_kept():
    """In a prompt store and in a given prompt cache. With ``mtp=False`` there is nothing but the error."""
    model, tokenizer = load(str(DEMO), settings=False)
    store, cache = PromptStore(nan_in(model, "layer"), 1 << 30), make_prompt_cache(model)
    for options in ({"prompt_store": store}, {"mtp": False}, {"prompt_cache": cache}, {"prompt_cache": cache}):
        with pytest.raises(MTPError, match=ERROR):
            list(stream_generate(model, tokenizer, PROMPT, **options))
    assert store.nbytes == 0


def test_an_answer_of_the_server():
    """Status 500, or an event of a stream, beside others that go on."""
    with Engine() as engine:
        client = engine.client
        body = {"prompt": "import os\n", "max_tokens": 6, "logprobs": 2, "repetition_penalty": 1e-45}
        answer = client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert answer.json()["error"]["message"].startswith(f"Generation failed: {ERROR}")
        lines = re.findall("data: (.*)", client.post("/v1/completions", json=body | {"stream": True}).text)
        assert json.loads(lines[-2])["error"]["message"].startswith(f"Generation failed: {ERROR}")
        assert client.post("/v1/completions", json=body | {"repetition_penalty": 1.0}).status_code == 200
        nan_in(engine.engine.admission.models.model, "layer")
        held = []
        for prompt in ("def f(x):\n", "class A:\n"):
            answer = client.post("/v1/completions", json={"prompt": prompt * 9})
            assert (answer.status_code, ERROR in answer.text) == (500, True)
            held.append(engine.engine.admission.caches.nbytes)  # what was kept before is so now
        assert held[0] == held[1]
