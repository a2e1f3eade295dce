"""The server's speed, as ratios of runs that take turns.

    python benchmarks/serve_speed.py

One stream through the server against ``mlx_mtp.stream_generate`` in a process of its own; eight streams at once against
``mlx_lm.server``, asked in the same way; and what it costs the first stream when a second comes and goes: the longest time
between two of its steps then, and the median before, in steps of plain decoding. Greedy, the demo.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from server_process import SRC, Server, serve

from mlx_mtp.checkpoint.load import DEMO

PROMPTS = [f"class Tree{i}:\n    def insert(self, key, value={i}):\n" for i in range(8)]
IN_PROCESS = """
import sys, time, mlx_mtp
model, tokenizer = mlx_mtp.load(sys.argv[1])
for line in sys.stdin:
    prompt, n = eval(line)
    times = [time.perf_counter() for _ in mlx_mtp.stream_generate(model, tokenizer, prompt, n)]
    print((n - 1) / (times[-1] - times[0]), flush=True)
"""


def stream(server: Server, prompt: str, n: int) -> list[float]:
    """When each token's line came."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    body = {"prompt": prompt, "max_tokens": n, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    times = []
    while line := response.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    connection.close()
    return times


def together(server: Server, n: int) -> float:
    """Tokens per second of eight at once, from the first request to the last token."""
    start = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda prompt: stream(server, prompt, n), PROMPTS))
    return 8 * n / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description="The server's speed beside others'.")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--model", default=str(DEMO))
    args = parser.parse_args()
    n, logs = args.max_tokens, Path(tempfile.mkdtemp())
    command = [sys.executable, "-c", IN_PROCESS, args.model]
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(SRC)}
    )

    def in_process(prompt: str) -> float:
        print(repr((prompt, n)), file=worker.stdin, flush=True)
        return float(worker.stdout.readline())

    def served(prompt: str) -> float:
        times = stream(ours, prompt, n)
        return (len(times) - 1) / (times[-1] - times[0])

    flags = ("--model", args.model, "--prompt-cache-size", "1")
    with (
        serve(logs / "ours", "--mtp", *flags) as ours,
        serve(logs / "stock", *flags, module="mlx_lm.server") as stock,
    ):
        for warm in (in_process, served):
            warm("import os\n")
        one = [served(p) / in_process(p) for p in PROMPTS[: args.repeat]]
        print(
            f"one stream, to mlx_mtp.stream_generate: {statistics.median(one):.3f} ({min(one):.2f} to {max(one):.2f})"
        )
        for warm in (ours, stock):
            together(warm, 8)
        eight = []
        for i in range(args.repeat):
            arms = [ours, stock] if i % 2 else [stock, ours]
            speed = {server.port: together(server, n) for server in arms}
            eight.append(speed[ours.port] / speed[stock.port])
        print(f"eight streams, to mlx_lm.server: {statistics.median(eight):.3f} ({min(eight):.2f} to {max(eight):.2f})")
        costs = []
        for prompt in PROMPTS[: args.repeat]:
            times = stream(stock, prompt, 64)
            step = statistics.median(b - a for a, b in pairwise(times))
            with ThreadPoolExecutor(1) as pool:
                first = pool.submit(stream, ours, prompt, n)
                time.sleep(40 * step)
                start = time.perf_counter()
                stream(ours, "x", 16)
                end = time.perf_counter()
                times = first.result()
            gaps = [(b, b - a) for a, b in pairwise(times) if b - a > step / 2]  # the others are drafts of one step
            before = statistics.median(gap for b, gap in gaps if b < start)
            costs.append((max(gap for b, gap in gaps if start < b < end + 20 * step) / step, before / step))
        longest, ordinary = (statistics.median(c) for c in zip(*costs))
        print(
            f"longest wait while a second stream comes and goes: {longest:.1f} plain steps; before it came: {ordinary:.1f}"
        )
    worker.kill()


if __name__ == "__main__":
    main()
