"""Measure what a long prompt does to answers that are being generated, and how fast it is prefilled alone.

    python -m benchmarks.long_prompt

Three streams run, then a prompt of 4,000 tokens comes. While it is prefilled: the tokens that each stream gets, their speed
beside that before, and the longest time between two of its tokens. Then the prompt alone, on a server with nothing else to do.
Then a client hangs up while its prompt is prefilled: how long the server goes on. Greedy, without drafts, so that each token
is a step of its own.
"""

import http.client
import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from mlx_lm.utils import load_tokenizer

from benchmarks.timing import seconds, spread
from mlx_mtp.checkpoint import DEMO
from scripts.shared import script_parser
from tests.support.server_process import ROOT, Server, serve

STREAMS = [f"class Tree{i}:\n    def insert(self, key, value={i}):\n" for i in range(3)]
MANY = 8000  # tokens, more than are generated
WARM_UP = 30  # tokens of each stream before its speed is measured
MEASURED = 60  # tokens before the prompt comes


def body(prompt: str, max_tokens: int) -> dict:
    """A request whose text is not likely to end by itself."""
    return {"prompt": prompt, "max_tokens": max_tokens, "logit_bias": {"0": -100}, "num_draft_tokens": 0}


class Stream(threading.Thread):
    """A request, and when each of its tokens has come."""

    def __init__(self, server: Server, prompt: str):
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.events, self.is_over = server.stream("/v1/completions", body(prompt, MANY)), False
        self.start()

    def run(self) -> None:
        for _ in self.events:
            self.times.append(time.perf_counter())
            if self.is_over:
                self.events.close()
                return

    def wait(self, n: int) -> None:
        """Wait for as many tokens."""
        while len(self.times) < n:
            if not self.is_alive():
                raise RuntimeError(f"A stream has ended after {len(self.times)} tokens.")
            time.sleep(0.002)


def alone(server: Server, prompt: str) -> float:
    """Seconds to the first token."""
    took = seconds(lambda: next(server.stream("/v1/completions", body(prompt, 1))))
    server.until_idle()
    return took


def beside(server: Server, prompt: str) -> dict[str, float]:
    """Three streams, and the prompt beside them."""
    streams = [Stream(server, text) for text in STREAMS]
    for stream in streams:
        stream.wait(WARM_UP + MEASURED)
    before = statistics.mean(MEASURED / (s.times[-1] - s.times[-1 - MEASURED]) for s in streams)
    start = time.perf_counter()
    next(server.stream("/v1/completions", body(prompt, 1)))
    end = time.perf_counter()
    for stream in streams:
        stream.wait(len(stream.times) + 1)  # its gap is over
        stream.is_over = True
    got = statistics.mean(sum(start < t < end for t in s.times) for s in streams)
    gaps = [b - a for s in streams for a, b in pairwise(s.times) if start < b and a < end]
    for stream in streams:
        stream.join()
    server.until_idle()
    return {
        "tokens/s of a stream before": before,
        "tokens that each got": got,
        "share of its speed": got / (end - start) / before,
        "longest gap, s": max(gaps),
        "prompt prefilled in, s": end - start,
    }


def hang_up(server: Server, prompt: str, after: float) -> float:
    """Seconds that the server goes on after a client has left."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/completions", json.dumps(body(prompt, 1) | {"stream": True}))
    time.sleep(after)
    connection.close()
    return seconds(server.until_idle)


def prompt_of(tokenizer, n: int, first: str) -> str:
    """A text of about n tokens that no other has begun with: nothing of it is in a prompt cache."""
    source = (ROOT / "src" / "mlx_mtp" / "core" / "caches" / "rows.py").read_text() * (1 + n // 1000)
    return tokenizer.decode(tokenizer.encode(f"# {first}\n{source}")[:n])


def main() -> None:
    parser = script_parser(__doc__, tokens=4000, repeat=3, model=str(DEMO))
    parser.add_argument("flags", nargs="*", help="Further flags of the server, behind --.")
    args = parser.parse_args()
    tokenizer, folder = load_tokenizer(args.model), Path(tempfile.mkdtemp())
    results: dict[str, list[float]] = defaultdict(list)
    for i in range(args.repeat):
        with serve(folder / f"log{i}", "--mtp", "--model", args.model, *args.flags) as server:
            alone(server, "import os\n")
            figures = {"prompt alone, s": alone(server, prompt_of(tokenizer, args.tokens, "alone"))}
            figures |= beside(server, prompt_of(tokenizer, args.tokens, "beside"))
            figures["goes on after a hang-up, s"] = hang_up(server, prompt_of(tokenizer, args.tokens, "left"), 2.0)
        for what, value in figures.items():
            results[what].append(value)
    for what, values in results.items():
        print(f"{what:30} {spread(values)}")


if __name__ == "__main__":
    main()
