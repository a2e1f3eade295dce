"""Fuzz the loop: random models, prompts, depths, options, patterns of right drafts and ways to end.

    python -m scripts.attack.loop --count 500 --seed 1

Each case is compared with mlx-lm's own generation, token by token, and the prompt cache that it leaves with one that mlx-lm
fills with the same tokens: both must go on alike. Exit status 1 and the case's own seed where they do not.
"""

import random
import threading

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from mlx_mtp import make_prompt_cache, make_sampler, mtp_generate_step
from mlx_mtp.decoding.head_cache import HeadCache
from mlx_mtp.models.draft_lm_head import DraftLMHead
from scripts.attack import driver
from tests.support.decoding import assert_cache_of, mtp, plain
from tests.support.models import tiny_model
from tests.support.scripted import Scripted

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
VOCAB = 32


class Interrupted(Exception):
    pass


def close(steps) -> None:
    steps.close()


def close_elsewhere(steps) -> None:
    """In another thread."""
    thread = threading.Thread(target=steps.close)
    thread.start()
    thread.join()


def interrupt_twice(steps) -> None:
    """Close, and interrupt that."""
    original = HeadCache.finalize

    def interrupted(self, n_tokens):
        HeadCache.finalize = original
        original(self, n_tokens)
        raise Interrupted

    HeadCache.finalize = interrupted
    try:
        steps.close()
    except Interrupted:
        pass
    finally:
        HeadCache.finalize = original


ENDS = {"close": close, "close elsewhere": close_elsewhere, "interrupt twice": interrupt_twice}


def random_case(r: random.Random) -> dict:
    """What a case does, as keyword arguments of ``run_case``."""
    return dict(
        family=r.choice(FAMILIES),
        model_seed=r.randrange(3),
        n_layers=r.choice([2, 4]),
        prompt=[r.randrange(VOCAB) for _ in range(r.choice([1, 2, 3, 7, 20, 63, 64, 65]))],
        max_tokens=r.randint(1, 40),
        depth=r.choice([0, 1, 2, 3, 4, 8, "auto"]),
        copies=r.choice(["off", "off", "auto", 4, 16]),
        prefill_step_size=r.choice([1, 2, 5, 16, 64, 2048]),
        exact=r.random() < 0.15,
        draft_p_min=r.choice([0.0, 0.0, 0.0, 0.2, 0.9]),
        right=[r.random() < r.choice([0.1, 0.5, 0.9]) for _ in range(r.randint(1, 12))],
        penalties=r.choice([{}, {}, {"repetition_penalty": 1.3}, {"logit_bias": {3: 2.0}, "presence_penalty": 0.4}]),
        seed=r.choice([None, None, r.randrange(2**64)]),
        draft_rows=r.choice([None, None, 6, 20]),
        kv_bits=r.choice([None, None, None, 8]),
        end=r.choice(["run", "close", "close elsewhere", "interrupt twice", "raise"]),
        n_before_end=r.randint(0, 20),
    )


def run_case(
    family, model_seed, n_layers, prompt, max_tokens, depth, copies, prefill_step_size, exact, draft_p_min, right, penalties,
    seed, draft_rows, kv_bits, end, n_before_end,
):  # fmt: skip
    """
    Raises:
        AssertionError: A token or the cache differs from mlx-lm's.
    """
    model = tiny_model(family, model_seed, num_hidden_layers=n_layers)
    options = dict(prefill_step_size=prefill_step_size)
    if kv_bits is not None:
        options |= dict(kv_bits=kv_bits, kv_group_size=32, quantized_kv_start=len(prompt) + 5)
    sampler = None if seed is None else make_sampler(temp=1.0, top_p=0.9, seed=seed)

    def reference(tokens, n, position=0, **more):
        at = None if sampler is None else sampler.at(position)
        return plain(
            tokens, model, max_tokens=n, sampler=at, logits_processors=make_logits_processors(**penalties), **more
        )

    want = reference(prompt, max_tokens, **options)
    ours = Scripted(model, prompt + want + [0] * 20, lambda i: right[i % len(right)])
    if draft_rows is not None:
        model.drafting.lm_head = DraftLMHead(model.output_layer, [*range(draft_rows)])
    cache = make_prompt_cache(model)

    def raises(tokens, logits):
        if end == "raise" and len(tokens) > len(prompt) + n_before_end:
            raise Interrupted
        return logits

    steps = mtp_generate_step(
        mx.array(prompt), ours, max_tokens=max_tokens, num_draft_tokens=depth, copy_drafts=copies, exact=exact,
        draft_p_min=draft_p_min, sampler=sampler, logits_processors=[*make_logits_processors(**penalties), raises],
        prompt_cache=cache, **options,
    )  # fmt: skip
    got = []
    try:
        for token, _, _ in steps:
            got.append(token)
            if end in ENDS and len(got) > n_before_end:
                break
    except Interrupted:
        pass
    ENDS.get(end, close)(steps)
    assert got == want[: len(got)], (got, want)
    assert end != "run" or len(got) == max_tokens
    if got and kv_bits is None and not penalties:
        assert_cache_of(model, cache, len(prompt) + len(got))
        again = mtp([5], model, max_tokens=4, num_draft_tokens=2, prompt_cache=cache)
        assert again == plain([*prompt, *got, 5], model, max_tokens=4), "the cache goes on differently"


if __name__ == "__main__":
    driver.main("Fuzz the loop against mlx-lm's own generation.", random_case, run_case, count=500)
