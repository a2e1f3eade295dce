"""Measure what a long prompt does to answers that are being generated, and how fast it is read alone.

    git archive COMMIT src | tar x -C /tmp/before
    python -m benchmarks.long_prompt --before /tmp/before/src

Three streams run, then a prompt of 4,000 tokens comes. While it is read: the tokens that each stream gets, their speed beside
that before, and the longest time between two of its tokens. Then the prompt alone, on a server with nothing else to do. Then a
client hangs up while its prompt is read: how long the server goes on. With ``--before`` another version does the same, in turn
with this one. Greedy, without drafts in the streams, so that each token is a step of its own.
"""

import argparse
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from mlx_lm.utils import load_tokenizer

from mlx_mtp.checkpoint.load import DEMO
from tests.support.server_process import ROOT, Server, serve

STREAMS = [f"class Tree{i}:\n    def insert(self, key, value={i}):\n" for i in range(3)]
MANY = 8000  # tokens, more than are generated
WARM_UP = 30  # tokens of each stream before its speed is measured
MEASURED = 60  # tokens before the prompt comes


class Stream(threading.Thread):
    """A request, and when each of its tokens has come."""

    def __init__(self, server: Server, prompt: str, max_tokens: int):
        super().__init__(daemon=True)
        self.times: list[float] = []
        # The end of the text is not likely, so that a stream goes on.
        options = {"stream": True, "logit_bias": {"0": -100}, "num_draft_tokens": 0}
        raw = json.dumps({"prompt": prompt, "max_tokens": max_tokens, **options}).encode()
        self.start_time = time.perf_counter()
        self.socket = socket.create_connection(("127.0.0.1", server.port))
        self.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw)
        )
        self.start()

    def run(self) -> None:
        with self.socket.makefile("rb") as lines, suppress(OSError):
            for line in lines:
                if line.startswith(b"data: {"):
                    self.times.append(time.perf_counter())

    def wait(self, n: int) -> float:
        """Wait for as many tokens -> when the last of them came."""
        while len(self.times) < n:
            if not self.is_alive():
                raise RuntimeError(f"A stream has ended after {len(self.times)} tokens.")
            time.sleep(0.002)
        return self.times[n - 1]

    def hang_up(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.join()
        self.socket.close()


def beside(server: Server, prompt: str) -> dict[str, float]:
    """Three streams, and the prompt beside them."""
    streams = [Stream(server, text, MANY) for text in STREAMS]
    for stream in streams:
        stream.wait(WARM_UP + MEASURED)
    before = statistics.mean(MEASURED / (s.times[-1] - s.times[-1 - MEASURED]) for s in streams)
    long = Stream(server, prompt, 1)
    start, end = long.start_time, long.wait(1)
    for stream in streams:
        stream.wait(len(stream.times) + 1)  # its gap is over
    got = [sum(start < t < end for t in s.times) for s in streams]
    gaps = [b - a for s in streams for a, b in pairwise(s.times) if start < b and a < end]
    for stream in (*streams, long):
        stream.hang_up()
    server.until_idle()
    seconds = end - start
    return {
        "tokens/s of a stream before": before,
        "tokens that each got": statistics.mean(got),
        "share of its speed": statistics.mean(got) / seconds / before,
        "longest gap, s": max(gaps),
        "prompt read in, s": seconds,
    }


def alone(server: Server, prompt: str) -> float:
    """Seconds to the first token."""
    stream = Stream(server, prompt, 1)
    seconds = stream.wait(1) - stream.start_time
    server.until_idle()
    return seconds


def hang_up(server: Server, prompt: str, after: float) -> float:
    """Seconds that the server goes on after a client has left."""
    stream = Stream(server, prompt, 1)
    time.sleep(after)
    stream.hang_up()
    start = time.perf_counter()
    server.until_idle()
    return time.perf_counter() - start


def prompt_of(tokenizer, n: int, first: str) -> str:
    """A text of about n tokens that no other has begun with: nothing of it is in a prompt cache."""
    source = (ROOT / "src" / "mlx_mtp" / "caches" / "rows.py").read_text() * (1 + n // 1000)
    return tokenizer.decode(tokenizer.encode(f"# {first}\n{source}")[:n])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a long prompt does to running answers.")
    parser.add_argument("--before", type=Path, help="The source of another version, to compare.")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("flags", nargs="*", help="Further flags of both servers, behind --.")
    args = parser.parse_args()
    versions = {"before": args.before, "now": None} if args.before else {"now": None}
    tokenizer, logs = load_tokenizer(args.model), Path(tempfile.mkdtemp())
    results: dict[tuple[str, str], list[float]] = defaultdict(list)
    for i in range(args.repeat):
        for name in [*versions][:: 1 if i % 2 == 0 else -1]:
            flags = ("--mtp", "--model", args.model, *args.flags)
            with serve(
                logs / f"{name}{i}", *flags, src=versions[name]
            ) as server:  # one at a time: an idle one costs nothing
                alone(server, "import os\n")
                results[name, "prompt alone, s"].append(alone(server, prompt_of(tokenizer, args.tokens, "alone")))
                for what, value in beside(server, prompt_of(tokenizer, args.tokens, "beside")).items():
                    results[name, what].append(value)
                left = hang_up(server, prompt_of(tokenizer, args.tokens, "left"), 2.0)
                results[name, "goes on after a hang-up, s"].append(left)
            print(
                f"round {i + 1}, {name}: {', '.join(f'{w} {v[-1]:.2f}' for (n, w), v in results.items() if n == name)}"
            )
            sys.stdout.flush()
    for what in dict.fromkeys(what for _, what in results):
        for name in versions:
            values = results[name, what]
            print(f"{what:30} {name:7} {statistics.median(values):8.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
