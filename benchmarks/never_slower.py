"""Whether auto is ever slower than plain mlx-lm or the best fixed depth, in cases that are hard for MTP.

    python -m benchmarks.never_slower              on the bundled demo
    python -m benchmarks.never_slower --repeat 9
    python -m benchmarks.never_slower --kinds      on the nine kinds of request, without the fixed depths

What auto does with the head alone comes first: copies hide it where a text repeats itself, and the demo's texts do. The last
column says how much of each text does (``repeated_share``).

In a round all runs generate at once in one process and take turns of 64 tokens, so that drift of the machine affects all alike.
Ratios are taken in each round and their median is printed; the ratio of plain decoding to a second plain run tells how precise
they are. The time to the first token does not count: the prompt is read before.
"""

import argparse
import inspect
import random
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from tqdm import tqdm

import mlx_mtp
from mlx_mtp.benchmark.runs import AUTO, NO_COPIES, PLAIN, Run, in_turn, repeated_share
from mlx_mtp.decoding.loop import plain_generate_step
from mlx_mtp.prompts import PYTHON, nine_kinds
from tests.support.decoding import plain
from tests.support.scripted import Scripted

AGAIN = "plain again"
FIXED = (PLAIN, 0, 1, 2, 3, 4)
BESIDE = (AGAIN, NO_COPIES, AUTO)
TURN = 64  # tokens


def start(run: Run, model: nn.Module, prompt: list[int], depths: dict[Run, mlx_mtp.Depth], options: dict) -> Iterator:
    if run in (PLAIN, AGAIN):
        return plain_generate_step(mx.array(prompt), model, **options)
    copies = "auto" if run == AUTO else "off"
    return mlx_mtp.mtp_generate_step(
        mx.array(prompt), model, num_draft_tokens=depths.get(run, run), copy_drafts=copies, **options
    )


def seconds(
    runs: tuple[Run, ...], model: nn.Module, prompt: list[int], depths: dict[Run, mlx_mtp.Depth], options: dict
) -> dict[Run, float]:
    """The seconds of all tokens but the first, by run."""
    running = {run: start(run, model, prompt, depths, options) for run in runs}
    for steps in running.values():
        next(steps)
    total = dict.fromkeys(runs, 0.0)
    for i in range(-(-options["max_tokens"] // TURN)):
        for run in in_turn(runs, i):
            mx.synchronize(generation_stream)
            began = time.perf_counter()
            for _ in islice(running[run], TURN):
                pass
            mx.synchronize(generation_stream)  # what has begun of the next token is this run's work
            total[run] += time.perf_counter() - began
    return total


def cases(n_tokens: int) -> Iterator[tuple[str, nn.Module, list[int], Callable | None]]:
    """(name, model, prompt, sampler)"""

    def load(dtype=mx.bfloat16):
        model, tokenizer = mlx_mtp.load(str(mlx_mtp.DEMO))
        model.set_dtype(dtype)
        return model, tokenizer

    model, tokenizer = load()
    prompt = tokenizer.encode(PYTHON[0])
    yield "bfloat16", model, prompt, None
    yield "float32", load(mx.float32)[0], prompt, None
    quantized = load()[0]
    nn.quantize(quantized, 64, 4, class_predicate=lambda name, m: hasattr(m, "to_quantized") and "mtp." not in name)
    yield "4-bit backbone", quantized, prompt, None
    truth = prompt + plain(prompt, model, max_tokens=n_tokens + 10)
    half = len(prompt) + n_tokens // 2
    yield "head always wrong", Scripted(model, truth, lambda i: False), prompt, None
    coins = random.Random(0).choices([True, False], k=len(truth))
    yield "head half right", Scripted(model, truth, coins.__getitem__), prompt, None
    yield "head right, then wrong", Scripted(model, truth, lambda i: i < half), prompt, None
    yield "head wrong, then right", Scripted(model, truth, lambda i: i >= half), prompt, None
    yield "temperature 1.5", model, prompt, mlx_mtp.make_sampler(temp=1.5)
    source = tokenizer.encode(inspect.getsource(import_module("argparse"))[:40000])
    yield "prompt of 8 tokens", model, source[:8], None
    yield "prompt of 4000 tokens", model, source[:4000], None


def kinds() -> Iterator[tuple[str, nn.Module, list[int], Callable | None]]:
    model, tokenizer = mlx_mtp.load(str(mlx_mtp.DEMO))
    for name, text in nine_kinds().items():
        yield name, model, tokenizer.encode(text), None


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The speed of auto relative to plain decoding and to the best fixed depth."
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--only", help="Run only the cases whose name contains this.")
    parser.add_argument("--kinds", action="store_true", help="Run the nine kinds of request, in the demo's own words.")
    args = parser.parse_args()
    fixed = (PLAIN,) if args.kinds else FIXED  # the kinds ask about copies alone: half the time
    runs = (*fixed, *BESIDE)
    print(f"{'':26}------ head alone, auto ------    ---- with copies, auto ---    plain   text")
    print(f"{'case':26}to plain  low to high  to best of     to plain   to head alone   again  repeats")
    for name, model, prompt, sampler in kinds() if args.kinds else cases(args.max_tokens):
        if args.only and args.only not in name:
            continue
        options = dict(max_tokens=args.max_tokens, sampler=sampler)
        depths = {
            run: mlx_mtp.Depth(mlx_mtp.MAX_DRAFT_TOKENS) for run in (AUTO, NO_COPIES)
        }  # one text's after another's
        seconds(runs, model, prompt, depths, options | {"max_tokens": TURN})
        rounds = []
        for i in tqdm(range(args.repeat), desc=name, disable=None, leave=False):
            mx.random.seed(i)
            rounds.append(seconds(runs, model, prompt, depths, options))
        repeats = repeated_share(prompt, plain(prompt, model, **options))
        print(f"{name:24}{figures(rounds, fixed)}{repeats:9.0%}", flush=True)


def figures(rounds: list[dict[Run, float]], fixed: tuple[Run, ...]) -> str:
    """What the seconds of the rounds say, in the columns of ``main``."""

    def ratio(a: Run, b: Run) -> float:
        """How many times as fast as a is b."""
        return statistics.median(r[a] / r[b] for r in rounds)

    best = min(fixed, key=lambda run: statistics.median(r[run] for r in rounds))
    alone = [r[PLAIN] / r[NO_COPIES] for r in rounds]
    return (
        f"{ratio(PLAIN, NO_COPIES):10.3f}  {min(alone):.3f}-{max(alone):.3f}{ratio(best, NO_COPIES):9.3f} {best!s:5}"
        f"{ratio(PLAIN, AUTO):11.3f}{ratio(NO_COPIES, AUTO):16.3f}{ratio(PLAIN, AGAIN):8.3f}"
    )


if __name__ == "__main__":
    main()
