"""Prompt cache files with random damage to their token ids, counts, shapes and dtypes.

A damaged file is refused with one sentence, or the text continues as mlx-lm's does after the same tokens. Values of keys and
states stay as they are: a wrong one cannot be recognized.
"""

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mlx_mtp import make_prompt_cache

from .decoding import PROMPT, mtp, plain
from .models import deep_model

VOCAB, N = 32, len(PROMPT) + 9
KV = dict(kv_bits=8, kv_group_size=32, quantized_kv_start=0)
NUMBERS = (-(2**31), -2, -1, 0, 1, N - 2, N - 1, N, N + 1, VOCAB, 255, 256, 257, 4_000_000, 2**31 - 1)
DTYPES = (mx.int32, mx.uint32, mx.uint8, mx.bool_, mx.int64, mx.complex64)


@cache
def the_model():
    return deep_model("qwen3_5")


def reshaped(r: random.Random, x: mx.array) -> mx.array:
    """An array of another shape."""
    if x.ndim == 0:
        return mx.stack([x] * r.randrange(1, 4))
    axis = r.randrange(x.ndim)
    ways = [
        lambda: x[None],
        lambda: x.flatten() if x.ndim > 1 else x[None],
        lambda: mx.concatenate([x, x], axis=axis),
        lambda: mx.take(x, mx.arange(x.shape[axis] // 2), axis=axis),
        lambda: mx.take(x, mx.arange(max(x.shape[axis] - 1, 0)), axis=axis),
    ]
    return r.choice(ways)()


def damaged(r: random.Random, x: mx.array) -> mx.array:
    """An array with other values, if it holds integers, or of another shape or dtype."""
    is_number = x.dtype in (mx.int32, mx.uint32) and x.ndim < 2
    way = r.choice(["value", "shape", "dtype"] if is_number else ["shape", "dtype"])
    if way == "shape":
        return reshaped(r, x)
    if way == "dtype":
        return x.astype(r.choice([d for d in DTYPES if d != x.dtype]))
    number = mx.array(r.choice(NUMBERS)).astype(x.dtype)
    return mx.where(mx.arange(x.size).reshape(x.shape) == r.randrange(max(x.size, 1)), number, x)


def damage(r: random.Random, file: str) -> str:
    """Damage arrays of a file, or its list of classes -> what was done."""
    arrays, metadata = mx.load(file, return_metadata=True)
    done = []
    for _ in range(r.choice([1, 1, 1, 2])):
        if r.random() < 0.1:
            key = r.choice([key for key in metadata if key.startswith("1.")])
            metadata[key] = r.choice(["KVCache", "ArraysCache", "QuantizedKVCache", "RotatingKVCache"])
            done.append(f"{key} is {metadata[key]}")
        elif r.random() < 0.1:
            done.append(f"{(key := r.choice([*arrays]))} is missing")
            del arrays[key]
        else:
            key = r.choice([*arrays])
            arrays[key] = damaged(r, arrays[key])
            done.append(f"{key} is {arrays[key].shape} {arrays[key].dtype} {arrays[key].flatten()[:20].tolist()}")
    mx.save_safetensors(file, arrays, metadata)
    return "; ".join(done)


def goes_on(file: str, **options) -> str | None:
    """What is wrong with how a damaged file goes on, if anything."""
    try:
        prompt_cache = load_prompt_cache(file)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        return None  # mlx-lm's own refusal
    model = the_model()
    try:
        got = mtp([7], model, max_tokens=4, num_draft_tokens=3, copy_drafts=4, prompt_cache=prompt_cache, **options)
    except ValueError as e:
        is_sentence = "prompt cache" in str(e) and str(e).endswith(".") and "\n" not in str(e)
        return None if is_sentence else f"the error is {e}"
    return None if got == wanted(bool(options)) else f"goes on with {got}, not {wanted(bool(options))}"


@cache
def wanted(quantized: bool) -> list[int]:
    """What mlx-lm goes on with."""
    model, options = the_model(), KV if quantized else {}
    theirs = model.make_cache()
    plain(PROMPT, model, max_tokens=9, prompt_cache=theirs, **options)
    return plain([7], model, max_tokens=4, prompt_cache=theirs, **options)


@cache
def sound(quantized: bool) -> bytes:
    """A file as it should be."""
    model = the_model()
    prompt_cache = make_prompt_cache(model)
    mtp(PROMPT, model, max_tokens=9, prompt_cache=prompt_cache, **(KV if quantized else {}))
    with TemporaryDirectory() as folder:
        save_prompt_cache(f"{folder}/sound.safetensors", prompt_cache)
        return Path(f"{folder}/sound.safetensors").read_bytes()


def assert_refused_or_right(quantized: bool, seed: int) -> None:
    """
    Raises:
        AssertionError: Something else came than a refusal or the right text.
    """
    with TemporaryDirectory() as folder:
        file = f"{folder}/damaged.safetensors"
        Path(file).write_bytes(sound(quantized))
        done = damage(random.Random(seed), file)
        problem = goes_on(file, **(KV if quantized else {}))
    assert problem is None, f"{problem}, where {done}"
