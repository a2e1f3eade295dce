"""The speed of several sequences at once, with MTP and without, beside ``mlx_lm.batch_generate``.

    python -m benchmarks.batch              1, 2, 4 and 8 prompts on the bundled demo
    python -m benchmarks.batch --wrong      with a head that is always wrong
    python -m benchmarks.batch --temp 0.7   sampling; --seeded gives each prompt a seed of its own

In a round all runs generate at once in one process and take turns of 16 tokens a prompt, so that drift of the machine affects
all alike. Ratios are taken in each round and their median is printed, by wall and by CPU time; "plain again" tells how precise
they are. The time to the first token does not count: the prompts are read before.
"""

import argparse
import inspect
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator as StockGenerator
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm

import mlx_mtp
from tests.support.scripted import Scripted

TURN = 16  # tokens of each prompt
SPARE = 512  # more tokens of each than are measured
MODULES = ["argparse", "ast", "bisect", "calendar", "cmd", "configparser", "difflib", "functools"]


AGAIN = "plain again"


class Running:
    """A generator with prompts that are read, and the time that their tokens take.

    Args:
        generator (BatchGenerator): Ours or mlx-lm's.
        prompts (List[List[int]]): All of them generate from the beginning.
        max_tokens (int): Of each.
        samplers (List[Sampler]): Of each.
        compiled (bool): Whether passes are compiled; mlx-lm's own model has none that are.
    """

    def __init__(self, generator: Any, prompts: list[list[int]], max_tokens: int, samplers: list[Any], compiled: bool):
        self.generator, self.most, self.compiled = generator, max_tokens * len(prompts), compiled
        # None ends while others are measured: the first to be read would, and a smaller batch is slower.
        self.generator.insert(prompts, max_tokens=[max_tokens + SPARE] * len(prompts), samplers=samplers)
        self.n_tokens, self.wall, self.cpu, self.is_done = 0, 0.0, 0.0, False
        seen: set[int] = set()
        while len(seen) < len(prompts):
            seen |= {r.uid for r in self.generator.next()[1]}
        mx.synchronize(generation_stream)

    def take_turn(self, n: int) -> None:
        """Generate at least n tokens, if there are as many."""
        self.generator.model.drafting.compiled = self.compiled
        wall, cpu, end = time.perf_counter(), time.process_time(), self.n_tokens + n
        while self.n_tokens < end and not self.is_done:
            responses = self.generator.next_generated()
            self.n_tokens += len(responses)
            self.is_done = self.n_tokens >= self.most
        mx.synchronize(generation_stream)  # what has begun of the next tokens is this run's work
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu


def speeds(runs: dict[Any, Callable[[], Running]], turn: int, order: int) -> dict[Any, tuple[float, float]]:
    """(tokens per second of wall time, of CPU time) of each run"""
    running = {name: start() for name, start in runs.items()}
    while not all(r.is_done for r in running.values()):
        for r in [*running.values()][:: 1 if order % 2 else -1]:
            if not r.is_done:
                r.take_turn(turn)
        order += 1
    for r in running.values():
        r.generator.close()
    return {name: (r.n_tokens / r.wall, r.n_tokens / r.cpu) for name, r in running.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Several sequences at once, with MTP and in mlx-lm.")
    parser.add_argument("--repeat", type=int, default=9, help="Rounds (default: 9).")
    parser.add_argument("--max-tokens", type=int, default=128, help="Tokens of each prompt (default: 128).")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8], help="Sizes of the batch.")
    parser.add_argument("--num-draft-tokens", nargs="+", default=["0", "1", "2", "auto"])
    parser.add_argument("--wrong", action="store_true", help="Use a head that is always wrong.")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--seeded", action="store_true", help="Give each prompt a seed of its own; requires --temp.")
    parser.add_argument("--model", default=str(mlx_mtp.DEMO))
    args = parser.parse_args()
    model, tokenizer = mlx_mtp.load(args.model)
    drafting: Any = Scripted(model, [], lambda i: False) if args.wrong else model
    depths = [d if d == "auto" else int(d) for d in args.num_draft_tokens]
    print("batch  drafts       tokens/s of mlx-lm  ratio: wall  low to high   CPU")
    for B in args.batch:
        texts = [inspect.getsource(import_module(name)) for name in (MODULES * B)[:B]]
        prompts = [
            tokenizer.encode(text[(start := i % 8 * 500) : start + 150 + 40 * i]) for i, text in enumerate(texts)
        ]
        stock, shared = [make_sampler(args.temp)] * B, [mlx_mtp.make_sampler(args.temp)] * B
        seeded = [mlx_mtp.make_sampler(args.temp, seed=i) for i in range(B)]

        def plain(n: int = args.max_tokens) -> Running:
            return Running(StockGenerator(model), prompts, n, stock, False)  # noqa: B023

        def ours(depth: Any, n: int = args.max_tokens) -> Running:
            generator = mlx_mtp.BatchGenerator(drafting, num_draft_tokens=depth, return_prompt_caches=False)
            return Running(generator, prompts, n, seeded if args.seeded else shared, True)  # noqa: B023

        runs = {"plain": plain, AGAIN: plain, **{depth: partial(ours, depth) for depth in depths}}
        speeds({name: partial(run, n=32) for name, run in runs.items()}, TURN * B, 0)  # warm
        rounds = [
            speeds(runs, TURN * B, i) for i in tqdm(range(args.repeat), desc=f"batch of {B}", disable=None, leave=False)
        ]
        tokens_per_second = statistics.median(r["plain"][0] for r in rounds)
        for name in [AGAIN, *depths]:
            wall, cpu = ([r[name][i] / r["plain"][i] for r in rounds] for i in (0, 1))
            print(
                f"{B:5}  {name!s:11}  {tokens_per_second:18.0f}  {statistics.median(wall):11.3f}"
                f"  {min(wall):.2f} to {max(wall):.2f}  {statistics.median(cpu):.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
