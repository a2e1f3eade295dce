"""Greedy decoding with MTP against mlx-lm's own, at full length: what the tests sample.

    python -m scripts.sweep                            the bundled demo
    python -m scripts.sweep --model tests/data/dense   another checkpoint

For each precision and prompt: depths 1 to 8 with the model's own head, then heads that are always right, always wrong and
right at random. Ends with exit status 1 if any token differed.
"""

import argparse
import inspect
import random
import sys
import types
from collections.abc import Iterator
from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
from tqdm import tqdm

import mlx_mtp
from mlx_mtp.checkpoint.load import DEMO
from tests.support.decoding import plain
from tests.support.scripted import Scripted

MODULES = [
    "abc",
    "argparse",
    "ast",
    "bisect",
    "calendar",
    "cmd",
    "codecs",
    "collections",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "difflib",
    "enum",
    "functools",
    "glob",
    "heapq",
    "json",
    "logging",
]
LENGTHS = (1, 2, 255, 256, 257)
PREFILL = (64, 100, 2048)


def load(path: str, precision: str):
    """float32, bfloat16, or 4bit: a bfloat16 model whose backbone is quantized and whose head is not."""
    model, tokenizer = mlx_mtp.load(path)
    model.set_dtype(mx.float32 if precision == "float32" else mx.bfloat16)
    if precision == "4bit":
        nn.quantize(model, 64, 4, class_predicate=lambda name, m: hasattr(m, "to_quantized") and "mtp." not in name)
    return model, tokenizer


def heads(model, prompt: list[int], truth: list[int], seed: int) -> Iterator[tuple[str, types.SimpleNamespace]]:
    coin = random.Random(seed)
    tosses = [coin.random() < 0.7 for _ in range(len(prompt) + len(truth) + 1)]
    for name, right in (("right", lambda i: True), ("wrong", lambda i: False), ("random", lambda i: tosses[i])):
        yield name, Scripted(model, prompt + truth, right)


def main() -> None:
    parser = argparse.ArgumentParser(description="MTP's greedy tokens against mlx-lm's, at full length.")
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16", "4bit"])
    parser.add_argument("--depths", nargs="+", type=int, default=list(range(1, 9)))
    parser.add_argument("--prompts", type=int, default=len(MODULES), help=f"How many of the {len(MODULES)} prompts.")
    parser.add_argument("--max-tokens", type=int, default=300)
    args = parser.parse_args()

    runs = differences = 0

    def check(what: str, want: list[int], prompt, model, depth, **options) -> None:
        nonlocal runs, differences
        steps = mlx_mtp.mtp_generate_step(
            mx.array(prompt), model, max_tokens=len(want), num_draft_tokens=depth, **options
        )
        got = [token for token, _, _ in steps]
        runs += 1
        if got != want:
            differences += 1
            at = next(i for i, (a, b) in enumerate(zip(got, want)) if a != b)
            print(f"{what}, depth {depth}: token {at} is {got[at]}, not {want[at]}", flush=True)

    for precision in args.precisions:
        model, tokenizer = load(args.model, precision)
        for i, name in enumerate(tqdm(MODULES[: args.prompts], desc=precision, disable=None)):
            source = tokenizer.encode(inspect.getsource(import_module(name)))
            prompt = source[: 40 + 12 * i]
            want = plain(prompt, model, max_tokens=args.max_tokens)
            for depth in args.depths:
                check(f"{precision}, {name}", want, prompt, model, depth)
            extended = want + [0] * 10
            for depth, (kind, head) in zip((3, 5, 8), heads(model, prompt, extended, i)):
                check(f"{precision}, {name}, {kind} head", want, prompt, head, depth)
        for length in LENGTHS:
            want = plain(source[:length], model, max_tokens=40)
            for step in PREFILL:
                check(
                    f"{precision}, {length} tokens by {step}", want, source[:length], model, 3, prefill_step_size=step
                )
        print(f"{precision}: {runs} runs so far, {differences} with a difference", flush=True)
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
