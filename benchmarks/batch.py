"""The speed of several sequences at once, with MTP and without, beside ``mlx_lm.batch_generate``.

    python -m benchmarks.batch              1, 2, 4 and 8 prompts on the bundled demo
    python -m benchmarks.batch --wrong      with a head that is always wrong
    python -m benchmarks.batch --temp 0.7   sampling; --seeded gives each prompt a seed of its own

In a round all runs generate at once in one process and take turns of 16 tokens a prompt. "plain again" tells how precise the
figures are. The time to the first token does not count: the prompts are prefilled before.
"""

import statistics
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

from mlx_lm.generate import BatchGenerator as StockGenerator
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm

import mlx_mtp
from benchmarks.timing import Seconds, ratios, time_in_turns
from scripts.shared import SOURCES, script_parser
from tests.support.scripted import Scripted

TURN = 16  # tokens of each prompt
SPARE = 512  # more tokens of each than are measured
PLAIN, AGAIN = "plain", "plain again"


def start(generator: Any, prompts: list[list[int]], max_tokens: int, samplers: list[Any]) -> Iterator:
    """The tokens of a batch, whose prompts are prefilled."""
    # None ends while others are measured: a smaller batch is slower.
    generator.insert(prompts, max_tokens=[max_tokens + SPARE] * len(prompts), samplers=samplers)
    seen: set[int] = set()
    while len(seen) < len(prompts):
        seen |= {r.uid for r in generator.next()[1]}

    def tokens() -> Iterator:
        try:
            while True:
                yield from generator.next_generated()
        finally:
            generator.close()

    return tokens()


def measure(runs: dict[Any, Callable[[], Iterator]], batch: int, max_tokens: int) -> dict[Any, Seconds]:
    running = {name: begin() for name, begin in runs.items()}
    total = time_in_turns(running, TURN * batch, -(-max_tokens // TURN))
    for tokens in running.values():
        tokens.close()
    return total


def main() -> None:
    flags = dict(repeat=(9, "Rounds."), max_tokens=(128, "Tokens of each prompt."), temp=0.0, model=str(mlx_mtp.DEMO))
    flags |= dict(batch=([1, 2, 4, 8], "Sizes of the batch."), num_draft_tokens=["0", "1", "2", "auto"])
    flags |= dict(wrong=(False, "Use a head that is always wrong."), seeded=(False, "Give each prompt its own seed."))
    args = script_parser(__doc__, **flags).parse_args()
    model, tokenizer = mlx_mtp.load(args.model)
    drafting: Any = Scripted(model, [], lambda i: False) if args.wrong else model
    depths = [d if d == "auto" else int(d) for d in args.num_draft_tokens]
    print("batch  drafts       tokens/s of mlx-lm  ratio: wall  low to high   CPU")
    for B in args.batch:
        texts = islice(cycle(SOURCES.values()), B)
        starts = (text[i % 8 * 500 :][: 150 + 40 * i] for i, text in enumerate(texts))
        prompts = [tokenizer.encode(text) for text in starts]
        shared = [mlx_mtp.make_sampler(args.temp)] * B
        own = [mlx_mtp.make_sampler(args.temp, seed=i) for i in range(B)] if args.seeded else shared

        def generate(depth: Any) -> Iterator:
            if depth in (PLAIN, AGAIN):
                return start(StockGenerator(model), prompts, args.max_tokens, [make_sampler(args.temp)] * B)  # noqa: B023
            generator = mlx_mtp.BatchGenerator(drafting, num_draft_tokens=depth, return_prompt_caches=False)
            return start(generator, prompts, args.max_tokens, own)  # noqa: B023

        runs = {depth: lambda depth=depth: generate(depth) for depth in (PLAIN, AGAIN, *depths)}
        measure(runs, B, 2 * TURN)  # compiles
        bar = tqdm(range(args.repeat), desc=f"batch of {B}", disable=None, leave=False)
        rounds = [measure(runs, B, args.max_tokens) for _ in bar]
        plain = [r[PLAIN] for r in rounds]
        speed = statistics.median(B * args.max_tokens / s.wall for s in plain)
        for depth in (AGAIN, *depths):
            wall, cpu = (ratios(a, b) for a, b in zip(zip(*plain), zip(*(r[depth] for r in rounds))))
            low_to_high = f"{min(wall):.2f} to {max(wall):.2f}"
            ours, of_cpu = statistics.median(wall), statistics.median(cpu)
            print(f"{B:5}  {depth!s:11}  {speed:18.0f}  {ours:11.3f}  {low_to_high}  {of_cpu:.3f}", flush=True)


if __name__ == "__main__":
    main()
