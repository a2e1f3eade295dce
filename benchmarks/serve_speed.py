"""Measure the server's speed, as ratios of alternating runs.

    python -m benchmarks.serve_speed
    git archive COMMIT src | tar x -C /tmp/before
    python -m benchmarks.serve_speed --before /tmp/before/src

One stream is compared with ``mlx_mtp.stream_generate`` in its own process, and eight streams at once with ``mlx_lm.server``.
The cost of a second stream is the longest time between two steps of the first while the second comes and goes, beside the
median before, in steps of plain decoding. With ``--before`` another version serves beside this one, and they take turns at
what HTTP costs: requests of four tokens a second, from one client and from thirty at once, each on its own connection; what
they take of the server's CPU, which also a busy machine tells; and the time from a connection to the first byte of a stream's
first token. Greedy, the demo.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice, pairwise
from pathlib import Path

from mlx_mtp.checkpoint.load import DEMO
from tests.support.server_process import Server, serve

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
    """The time at which each token arrived."""
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
    """Tokens per second of eight streams at once, from the first request to the last token."""
    start = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda prompt: stream(server, prompt, n), PROMPTS))
    return 8 * n / (time.perf_counter() - start)


def short(server: Server, number: int) -> None:
    """A request of four tokens, whose prompt no other has."""
    status, _ = server.request("/v1/completions", {"prompt": f"x{number} =", "max_tokens": 4})
    if status != 200:
        raise RuntimeError(f"A request ended with status {status}.")


def first_byte(server: Server, number: int) -> float:
    """Milliseconds from the connection to the first token of a stream."""
    start = time.perf_counter()
    return (stream(server, f"y{number} =", 1)[0] - start) * 1e3


def cpu_seconds(server: Server) -> float:
    """That the server's process has taken, on Linux."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare_versions(ours: Server, before: Server, repeat: int) -> None:
    """Print the figures of both, and the ratios of alternating rounds."""
    numbers, figures = count(), defaultdict(list)
    for i in range(repeat + 1):
        for server in (ours, before) if i % 2 else (before, ours):
            for n_clients, n in ((1, 30), (30, 120)):
                what = f"{n_clients} client{'s' * (n_clients > 1)}"
                start, cpu = time.perf_counter(), cpu_seconds(server)
                with ThreadPoolExecutor(n_clients) as pool:
                    list(pool.map(short, [server] * n, islice(numbers, n)))
                figures[f"{what}: requests a second", server.port].append(n / (time.perf_counter() - start))
                figures[f"{what}: CPU ms of a request", server.port].append((cpu_seconds(server) - cpu) / n * 1e3)
            times = [first_byte(server, next(numbers)) for _ in range(30)]
            figures["first byte, ms", server.port].append(statistics.median(times))
    for what in dict.fromkeys(what for what, _ in figures):
        new, old = (figures[what, server.port][1:] for server in (ours, before))  # the first round warms up
        ratios = [a / b for a, b in zip(new, old)]
        report(f"{what}: {statistics.median(new):.1f}, before {statistics.median(old):.1f}, ratio", ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the server's speed.")
    parser.add_argument("--before", type=Path, help="The source of another version, to compare.")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--model", default=str(DEMO))
    args = parser.parse_args()
    n, logs = args.max_tokens, Path(tempfile.mkdtemp())
    flags = ("--model", args.model, "--prompt-cache-size", "1")
    if args.before:
        with (
            serve(logs / "ours", "--mtp", *flags) as ours,
            serve(logs / "before", "--mtp", *flags, src=args.before) as before,
        ):
            compare_versions(ours, before, args.repeat)
        return
    command = [sys.executable, "-c", IN_PROCESS, args.model]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def in_process(prompt: str) -> float:
        print(repr((prompt, n)), file=worker.stdin, flush=True)
        return float(worker.stdout.readline())

    def served(prompt: str) -> float:
        times = stream(ours, prompt, n)
        return (len(times) - 1) / (times[-1] - times[0])

    with (
        serve(logs / "ours", "--mtp", *flags) as ours,
        serve(logs / "stock", *flags, module="mlx_lm.server") as stock,
    ):
        for warm in (in_process, served):
            warm("import os\n")
        one = [served(p) / in_process(p) for p in PROMPTS[: args.repeat]]
        report("one stream, to mlx_mtp.stream_generate", one)
        report("eight streams, to mlx_lm.server", compare_together(ours, stock, n, args.repeat))
        costs = [cost_of_second(ours, stock, prompt, n) for prompt in PROMPTS[: args.repeat]]
        longest, ordinary = (statistics.median(c) for c in zip(*costs))
        print(f"longest step while a second stream comes and goes: {longest:.1f} plain steps; before: {ordinary:.1f}")
    worker.kill()


def report(what: str, ratios: list[float]) -> None:
    print(f"{what}: {statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})")


def compare_together(ours: Server, stock: Server, n: int, repeat: int) -> list[float]:
    """The ratio of speeds of eight streams at once, for each round."""
    for warm in (ours, stock):
        together(warm, 8)
    ratios = []
    for i in range(repeat):
        runs = [ours, stock] if i % 2 else [stock, ours]
        speed = {server.port: together(server, n) for server in runs}
        ratios.append(speed[ours.port] / speed[stock.port])
    return ratios


def cost_of_second(ours: Server, stock: Server, prompt: str, n: int) -> tuple[float, float]:
    """(the longest step of the first stream while a second comes and goes, its median step before), in plain steps"""
    step = statistics.median(b - a for a, b in pairwise(stream(stock, prompt, 64)))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(stream, ours, prompt, n)
        time.sleep(40 * step)
        start = time.perf_counter()
        stream(ours, "x", 16)
        end = time.perf_counter()
        times = first.result()
    gaps = [(b, b - a) for a, b in pairwise(times) if b - a > step / 2]  # shorter gaps are between tokens of one step
    before = statistics.median(gap for b, gap in gaps if b < start)
    return max(gap for b, gap in gaps if start < b < end + 20 * step) / step, before / step


if __name__ == "__main__":
    main()
