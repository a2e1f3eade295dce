"""One text, generated alone, a token at a time, or in a batch between two others."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import make_logits_processors

from mlx_mtp import DraftCounts, make_prompt_cache, make_sampler, mtp_generate_step
from mlx_mtp.core.batch.generator import BatchGenerator, Response

from .batches import Text, faulty, run
from .decoding import assert_cache_of, plain
from .scripted import Scripted

every_way = pytest.mark.parametrize("way", ["alone", "batch of three"])

# Those beside the text: one ends soon, the other has a seed, a penalty and a processor.
PROCESSORS = [*make_logits_processors(repetition_penalty=1.3), faulty(math.inf)]
COMPANY: list[dict[str, Any]] = [
    dict(prompt=[9, 2, 6, 5], max_tokens=5, num_draft_tokens=1),
    dict(prompt=[8], max_tokens=16, sampler=make_sampler(1.0, seed=5), logits_processors=PROCESSORS),
]


_truths: dict[int, Any] = {}  # by model, which is kept so that its id is


def company_of(model) -> list[list[int]]:
    """Of those beside the text: what the model says, prompts included, and more than they generate."""
    if id(model) not in _truths:
        texts = []
        for c in COMPANY:
            options = {name: c[name] for name in ("sampler", "logits_processors") if name in c}
            texts.append(c["prompt"] + plain(c["prompt"], model, max_tokens=c["max_tokens"] + 20, **options))
        _truths[id(model)] = model, texts
    return _truths[id(model)][1]


def generate(way: str, prompt, model, *, text=None, right=None, fails=(), **options) -> Text:
    """The text, with its prompt cache and counts in ``last``. Those beside it are asserted to be those of plain decoding.

    Args:
        way (str): One of those of ``every_way``.
        text (List[int], optional): The text, prompt included, of a head that is right where ``right(i)``, as in ``Scripted``.
        fails (Type[Exception]): What the text may end with; it is then in ``last.error``.
        options: Those of ``mtp_generate_step``, ``max_tokens`` among them; in a batch also ``stop_sequences``.
    """
    prompt = mx.array(prompt).tolist()
    uid, others = (0, []) if way == "alone" else (1, company_of(model))
    if right is not None:
        texts = {uid: text, **{2 * i: t for i, t in enumerate(others)}}
        model = Scripted(model, texts, lambda u, i: right(i) if u == uid else i % 3 > 0)
    if way == "alone":
        return generate_alone(prompt, model, fails, **options)
    own = ("num_draft_tokens", "copy_drafts", "draft_p_min", "prefill_step_size")
    generator = BatchGenerator(model, **{name: options[name] for name in own if name in options})
    if isinstance(model, Scripted):
        model.decoder = generator.decoder
    asked = [COMPANY[0], dict(prompt=prompt, **options), COMPANY[1]]
    generator.insert(
        [a["prompt"] for a in asked],
        max_tokens=[a["max_tokens"] for a in asked],
        caches=[a.get("prompt_cache") for a in asked],
        samplers=[a.get("sampler") for a in asked],
        logits_processors=[a.get("logits_processors", []) for a in asked],
        stop_sequences=[a.get("stop_sequences") or StopSequences() for a in asked],
        num_draft_tokens=[a.get("num_draft_tokens") for a in asked],
    )
    texts = run(generator)
    for beside, truth, text in zip(COMPANY, others, (texts[0], texts[2])):
        n = len(beside["prompt"]) + beside["max_tokens"]
        assert text.last.all_tokens == truth[:n]
        assert_cache_of(model, text.last.prompt_cache, n)
    error = texts[uid].last.error
    if error is not None and not isinstance(error, fails):
        raise error
    return texts[uid]


def generate_alone(prompt, model, fails=(), *, prompt_cache=None, leaves=None, close=None, **options) -> Text:
    """The text up to ``leaves`` tokens, where it is closed by ``close``."""
    cache = prompt_cache or make_prompt_cache(model)
    text, counts, error = Text(finish_reason="length"), DraftCounts(), None
    steps = mtp_generate_step(mx.array(prompt), model, prompt_cache=cache, counts=counts, **options)
    try:
        for token, _, from_draft in steps:
            text.tokens.append(token)
            text.from_draft.append(from_draft)
            if len(text.tokens) == leaves:
                close(steps)
                break
    except fails as e:
        text.finish_reason, error = "error", e
    text.last = Response(0, -1, None, text.finish_reason, cache, prompt + text.tokens, False, counts, error)
    return text


def elsewhere(function, *args, **kwargs):
    """The result of a call in another thread."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function, *args, **kwargs).result()


def close_elsewhere(steps):
    elsewhere(steps.close)
