"""Whether auto is ever slower than plain mlx-lm or the best fixed draft length, in cases that are hard for MTP.

    python -m benchmarks.never_slower              on the bundled demo
    python -m benchmarks.never_slower --repeat 9
    python -m benchmarks.never_slower --kinds      on the nine kinds of request, without the fixed draft lengths

What auto does with the head alone comes first: copies hide it where a text repeats itself, and the demo's texts do. The last
column says how much of each text does (``repeated_share``).

In a round all runs generate at once in one process and take turns of 64 tokens. Ratios are taken in each round and their median
is printed; "plain again" tells how precise they are. The time to the first token does not count.
"""

import inspect
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from tqdm import tqdm

import mlx_mtp
from benchmarks.timing import ratios, time_in_turns
from mlx_mtp.benchmark.measure import AUTO, NO_COPIES, PLAIN, Run, repeated_share
from mlx_mtp.prompts import PYTHON, nine_kinds
from scripts.shared import script_parser
from tests.support.decoding import plain
from tests.support.scripted import Scripted

AGAIN = "plain again"
FIXED = (PLAIN, 0, 1, 2, 3, 4)
BESIDE = (AGAIN, NO_COPIES, AUTO)
TURN = 64  # tokens
Case = tuple[str, nn.Module, list[int], Callable | None]  # name, model, prompt, sampler


def generate(run: Run, model: nn.Module, prompt: Sequence[int], num_draft_tokens: Any, **options: Any) -> Iterator:
    """The tokens of a run behind the first."""
    if run in (PLAIN, AGAIN):
        steps: Iterator = generate_step(mx.array(prompt), model, **options)
    else:
        options |= {"num_draft_tokens": num_draft_tokens, "copy_drafts": "auto" if run == AUTO else "off"}
        steps = mlx_mtp.mtp_generate_step(mx.array(prompt), model, **options)
    next(steps)
    return steps


def cases(n_tokens: int) -> Iterator[Case]:
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


def kinds() -> Iterator[Case]:
    model, tokenizer = mlx_mtp.load(str(mlx_mtp.DEMO))
    for name, text in nine_kinds().items():
        yield name, model, tokenizer.encode(text), None


def main() -> None:
    flags = dict(repeat=3, max_tokens=512, only=("", "Run only the cases whose name contains this."))
    args = script_parser(__doc__, kinds=(False, "Run the nine kinds of request."), **flags).parse_args()
    fixed = (PLAIN,) if args.kinds else FIXED  # the kinds ask about copies alone: half the time
    print(f"{'':26}------ head alone, auto ------    ---- with copies, auto ---    plain   text")
    print(f"{'case':26}to plain  low to high  to best of     to plain   to head alone   again  repeats")
    for name, model, prompt, sampler in kinds() if args.kinds else cases(args.max_tokens):
        if args.only not in name:
            continue
        auto = {run: mlx_mtp.Depth(mlx_mtp.MAX_DRAFT_TOKENS) for run in (AUTO, NO_COPIES)}  # from one text to the next
        walls: dict[Run, list[float]] = {run: [] for run in (*fixed, *BESIDE)}
        for i in tqdm(range(args.repeat + 1), desc=name, disable=None, leave=False):
            mx.random.seed(i)
            options = {"max_tokens": args.max_tokens if i else TURN, "sampler": sampler}
            running = {run: generate(run, model, prompt, auto.get(run, run), **options) for run in walls}
            for run, took in time_in_turns(running, TURN, -(-options["max_tokens"] // TURN)).items():
                if i > 0:  # the first round warms up
                    walls[run].append(took.wall)
        repeats = repeated_share(prompt, plain(prompt, model, max_tokens=args.max_tokens, sampler=sampler))
        print(f"{name:24}{figures(walls, fixed)}{repeats:9.0%}", flush=True)


def figures(walls: dict[Run, list[float]], fixed: Sequence[Run]) -> str:
    """What the seconds of the rounds say, in the columns of ``main``."""

    def faster(a: Run, b: Run) -> float:
        """How many times as fast as b a is."""
        return statistics.median(ratios(walls[b], walls[a]))

    best = min(fixed, key=lambda run: statistics.median(walls[run]))
    alone = ratios(walls[PLAIN], walls[NO_COPIES])
    return (
        f"{faster(NO_COPIES, PLAIN):10.3f}  {min(alone):.3f}-{max(alone):.3f}{faster(NO_COPIES, best):9.3f} {best!s:5}"
        f"{faster(AUTO, PLAIN):11.3f}{faster(AUTO, NO_COPIES):16.3f}{faster(AGAIN, PLAIN):8.3f}"
    )


if __name__ == "__main__":
    main()
