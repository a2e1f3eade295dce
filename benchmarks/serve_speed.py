"""Measure the server's speed, as ratios of alternating runs.

    python -m benchmarks.serve_speed

One stream is compared with ``mlx_mtp.stream_generate`` in this process, and eight streams at once with ``mlx_lm.server``. The
cost of a second stream is the longest time between two steps of the first while the second comes and goes, beside the median
before, in steps of plain decoding. Greedy, the demo.
"""

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import mlx_mtp
from benchmarks.timing import ratios, spread, take_turns
from scripts.shared import script_parser
from tests.support.server_process import Server, serve

PROMPTS = [f"class Tree{i}:\n    def insert(self, key, value={i}):\n" for i in range(8)]


def stream(server: Server, n: int, prompt: str) -> list[float]:
    """The time at which each token of a request arrived."""
    events = server.stream("/v1/completions", {"prompt": prompt, "max_tokens": n})
    return [time.perf_counter() for _ in events]


def speed(times: list[float]) -> float:
    """Tokens per second behind the first."""
    return (len(times) - 1) / (times[-1] - times[0])


def together(server: Server, n: int) -> float:
    """Tokens per second of eight streams at once, from the first request to the last token."""
    start = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(partial(stream, server, n), PROMPTS))
    return 8 * n / (time.perf_counter() - start)


def cost_of_second(ours: Server, stock: Server, prompt: str, n: int) -> tuple[float, float]:
    """(the longest step of the first stream while a second comes and goes, its median step before), in plain steps"""
    step = statistics.median(b - a for a, b in pairwise(stream(stock, 64, prompt)))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(stream, ours, n, prompt)
        time.sleep(40 * step)
        start = time.perf_counter()
        stream(ours, 16, "x")
        end = time.perf_counter()
        times = first.result()
    gaps = [(b, b - a) for a, b in pairwise(times) if b - a > step / 2]  # shorter gaps are between tokens of one step
    before = statistics.median(gap for b, gap in gaps if b < start)
    return max(gap for b, gap in gaps if start < b < end + 20 * step) / step, before / step


def main() -> None:
    flags = dict(repeat=(5, "Rounds, up to 8."), max_tokens=256, model=str(mlx_mtp.DEMO))
    args = script_parser(__doc__, **flags).parse_args()
    n, logs = args.max_tokens, Path(tempfile.mkdtemp())
    flags = ("--model", args.model, "--prompt-cache-size", "1")
    model, tokenizer = mlx_mtp.load(args.model)

    def in_process(n: int, prompt: str) -> list[float]:
        return [time.perf_counter() for _ in mlx_mtp.stream_generate(model, tokenizer, prompt, n)]

    with serve(logs / "ours", "--mtp", *flags) as ours, serve(logs / "stock", *flags, module="mlx_lm.server") as stock:
        for warm in (in_process, partial(stream, ours)):
            warm(n, "import os\n")
        one = [speed(stream(ours, n, p)) / speed(in_process(n, p)) for p in PROMPTS[: args.repeat]]
        print(f"one stream, to mlx_mtp.stream_generate: {spread(one)}")
        for server in (ours, stock):
            together(server, 8)
        eight = take_turns({s.port: partial(together, s, n) for s in (ours, stock)}, args.repeat)
        print(f"eight streams, to mlx_lm.server: {spread(ratios(eight[ours.port], eight[stock.port]))}")
        costs = [cost_of_second(ours, stock, prompt, n) for prompt in PROMPTS[: args.repeat]]
        longest, ordinary = (statistics.median(c) for c in zip(*costs))
        print(f"longest step while a second stream comes and goes: {longest:.1f} plain steps; before: {ordinary:.1f}")


if __name__ == "__main__":
    main()
