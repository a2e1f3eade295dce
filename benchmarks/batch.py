"""The speed of several sequences at once, with MTP and without, beside ``mlx_lm.batch_generate``.

    python benchmarks/batch.py              1, 2, 4 and 8 prompts on the bundled demo
    python benchmarks/batch.py --wrong      with a head that is always wrong
    python benchmarks/batch.py --temp 0.7   sampling; --seeded gives each prompt a seed of its own

Runs alternate in one process, and each ratio is taken inside a round; the median of the rounds is printed, by wall time and by
CPU time. The time counts from the first token of all to the last, so prompts are read before; ``whole`` is the ratio of the
calls' wall times, prompts included.
"""

import argparse
import inspect
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import BatchGenerator as StockGenerator
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm

import mlx_mtp

MODULES = ["argparse", "ast", "bisect", "calendar", "cmd", "configparser", "difflib", "functools"]


class Wrong:
    """A model whose head drafts a token that is never right."""

    def __init__(self, model: Any):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def draft_logits(self, hidden: mx.array) -> mx.array:
        # The end of a text, which no test here reaches, costs what every other draft does.
        logits = self._model.draft_logits(hidden)
        return mx.where(mx.arange(logits.shape[-1]) == 0, logits.max() + 1, logits)


class Speed(NamedTuple):
    wall: float  # tokens a second
    cpu: float
    whole: float


def speed(make: Callable[[], Any], prompts: list[list[int]], n: int, samplers: list[Any]) -> Speed:
    start, generator = time.perf_counter(), make()
    generator.insert(prompts, max_tokens=[n] * len(prompts), samplers=samplers)
    seen: set[int] = set()
    while len(seen) < len(prompts):
        seen |= {r.uid for r in generator.next()[1]}
    wall, cpu, n_tokens = time.perf_counter(), time.process_time(), 0
    while responses := generator.next_generated():
        n_tokens += len(responses)
    mx.synchronize(generation_stream)
    end = time.perf_counter()
    generator.close()
    return Speed(n_tokens / (end - wall), n_tokens / (time.process_time() - cpu), len(prompts) * n / (end - start))


def main() -> None:
    parser = argparse.ArgumentParser(description="Several sequences at once, with MTP and in mlx-lm.")
    parser.add_argument("--repeat", type=int, default=9, help="Rounds (default: 9).")
    parser.add_argument("--max-tokens", type=int, default=128, help="Tokens of each sequence (default: 128).")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8], help="Sizes of the batch.")
    parser.add_argument("--num-draft-tokens", nargs="+", default=["0", "1", "2", "auto"])
    parser.add_argument("--wrong", action="store_true", help="Use a head that is always wrong.")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--seeded", action="store_true", help="Give each prompt a seed of its own; requires --temp.")
    parser.add_argument("--model", default=str(mlx_mtp.DEMO))
    args = parser.parse_args()
    model, tokenizer = mlx_mtp.load(args.model)
    drafting: Any = Wrong(model) if args.wrong else model
    depths = [d if d == "auto" else int(d) for d in args.num_draft_tokens]
    print("batch  drafts  tokens/s of mlx-lm  MTP/mlx-lm: wall  low to high    CPU  whole")
    for B in args.batch:
        texts = [inspect.getsource(import_module(name)) for name in (MODULES * B)[:B]]
        prompts = [tokenizer.encode(text[i * 500 : i * 500 + 150 + 40 * i]) for i, text in enumerate(texts)]
        runs: dict[Any, Callable[[], Any]] = {"mlx-lm": lambda: StockGenerator(model)}
        for depth in depths:
            runs[depth] = lambda depth=depth: mlx_mtp.BatchGenerator(
                drafting, num_draft_tokens=depth, return_prompt_caches=False
            )
        stock = [make_sampler(args.temp)] * B
        shared = [mlx_mtp.make_sampler(args.temp)] * B
        seeded = [mlx_mtp.make_sampler(args.temp, seed=i) for i in range(B)]
        samplers = {name: seeded if args.seeded else shared for name in runs} | {"mlx-lm": stock}
        for name, make in runs.items():
            speed(make, prompts, 24, samplers[name])  # warm
        rounds = []
        for i in tqdm(range(args.repeat), desc=f"batch of {B}", disable=None, leave=False):
            order = [*runs] if i % 2 else [*runs][::-1]
            rounds.append({name: speed(runs[name], prompts, args.max_tokens, samplers[name]) for name in order})
        plain = statistics.median(r["mlx-lm"].wall for r in rounds)
        for depth in depths:
            wall, cpu, whole = ([r[depth][i] / r["mlx-lm"][i] for r in rounds] for i in range(3))
            print(
                f"{B:5}  {depth!s:6}  {plain:18.0f}  {statistics.median(wall):16.2f}  {min(wall):4.2f} to {max(wall):4.2f}"
                f"  {statistics.median(cpu):5.2f}  {statistics.median(whole):5.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
