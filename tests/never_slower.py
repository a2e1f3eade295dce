"""Whether auto is ever slower: its speed to plain mlx-lm's and to that of the best fixed depth, where MTP has a hard time.

    python tests/never_slower.py              on the bundled demo
    python tests/never_slower.py --repeat 9

The arms of a round follow each other in one process, the first of a round changing; ratios are of each round, and their median
is given. Time to the first token is left out: the prompt is read before.
"""

import argparse
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
from helpers import Scripted, plain
from mlx_lm.generate import generate_step
from tqdm import tqdm

import mlx_mtp
from mlx_mtp.benchmark import PROMPTS
from mlx_mtp.load import DEMO

PLAIN, AUTO = "plain", "auto"
ARMS = (PLAIN, AUTO, 1, 2, 3, 4)


def seconds(steps: Iterator) -> float:
    """Of all tokens but the first."""
    next(steps)
    start = time.perf_counter()
    for _ in steps:
        pass
    return time.perf_counter() - start


def run(arm: str | int, model: nn.Module, prompt: list[int], options: dict) -> float:
    mx.random.seed(0)
    if arm == PLAIN:
        return seconds(generate_step(mx.array(prompt), model, **options))
    return seconds(mlx_mtp.mtp_generate_step(mx.array(prompt), model, num_draft_tokens=arm, **options))


def cases(n_tokens: int) -> Iterator[tuple[str, nn.Module, list[int], Callable | None]]:
    """(name, model, prompt, sampler)"""

    def load(dtype=mx.bfloat16):
        model, tokenizer = mlx_mtp.load(str(DEMO))
        model.set_dtype(dtype)
        return model, tokenizer

    model, tokenizer = load()
    prompt = tokenizer.encode(PROMPTS[0])
    yield "bfloat16", model, prompt, None
    yield "float32", load(mx.float32)[0], prompt, None
    quantized = load()[0]
    nn.quantize(quantized, 64, 4, class_predicate=lambda name, m: hasattr(m, "to_quantized") and "mtp." not in name)
    yield "4-bit backbone", quantized, prompt, None
    truth = prompt + plain(prompt, model, max_tokens=n_tokens + 10)
    half = len(prompt) + n_tokens // 2
    yield "head always wrong", Scripted(model, truth, lambda i: False), prompt, None
    yield "head half right", Scripted(model, truth, lambda i: i * i * 7 % 13 < 6), prompt, None
    yield "head right, then wrong", Scripted(model, truth, lambda i: i < half), prompt, None
    yield "head wrong, then right", Scripted(model, truth, lambda i: i >= half), prompt, None
    yield "temperature 1.5", model, prompt, mlx_mtp.make_sampler(temp=1.5)
    source = tokenizer.encode(inspect.getsource(import_module("argparse"))[:40000])
    yield "prompt of 8 tokens", model, source[:8], None
    yield "prompt of 4000 tokens", model, source[:4000], None


def main() -> None:
    parser = argparse.ArgumentParser(description="Auto's speed to plain decoding's and the best fixed depth's.")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--only", help="Only the cases whose name has this.")
    args = parser.parse_args()
    print("case                     auto/plain  auto/best  best depth")
    for name, model, prompt, sampler in cases(args.max_tokens):
        if args.only and args.only not in name:
            continue

        options = dict(max_tokens=args.max_tokens, sampler=sampler)
        for arm in ARMS:
            run(arm, model, prompt, options)
        rounds = []
        for i in tqdm(range(args.repeat), desc=name, disable=None, leave=False):
            order = ARMS[i % len(ARMS) :] + ARMS[: i % len(ARMS)]
            rounds.append({arm: run(arm, model, prompt, options) for arm in order})
        medians = {arm: statistics.median(r[arm] for r in rounds) for arm in ARMS if arm != AUTO}
        best = min(medians, key=medians.__getitem__)
        to_plain, to_best = (statistics.median(r[arm] / r[AUTO] for r in rounds) for arm in (PLAIN, best))
        print(f"{name:24} {to_plain:10.3f} {to_best:10.3f}  {best}", flush=True)


if __name__ == "__main__":
    main()
