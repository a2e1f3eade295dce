"""``mlx_mtp.benchmark``: MTP against mlx-lm's own generation, side by side in one run.

For each depth the arms alternate: plain ``mlx_lm`` generation, then MTP, the same prompts, greedy. Beside the ratio of their
speeds it prints what the parts of a step allow. With V(n) the time of a verify pass over n tokens and D that of a pass of
the head, each timed alone, and E the mean number of tokens that a step yields,

    allowed = E / ((V(k+1) + k D) / V(1))        achieved / allowed is the efficiency of the loop
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from tqdm import tqdm

from . import cache as caches
from .errors import one_line_errors
from .load import DEMO, load
from .speculative import MAX_DRAFT_TOKENS, DraftCounts, mtp_generate_step

PROMPTS = (
    'import os\nimport sys\n\n\nclass Queue:\n    """A first in, first out queue."""\n\n    def __init__(self, maxsize=0):\n',
    "def read_config(path):\n    with open(path) as f:\n        data = f.read()\n    for line in data.splitlines():\n",
    'def main(argv=None):\n    parser = argparse.ArgumentParser(description="Copy files")\n    parser.add_argument(',
    "class TestFile(unittest.TestCase):\n    def setUp(self):\n        self.path = tempfile.mkdtemp()\n\n    def test_",
)


@dataclass
class Parts:
    """Seconds, the median of a number of calls, each evaluated before the next begins."""

    verify: list[float]  # V(1), V(2), ...: a backbone pass over n tokens in an open window
    head: float  # D: a pass of the head over one token, its lm_head and argmax included
    rollback: list[float]  # going back to 1, 2, ... of the longest window's tokens


@dataclass
class Depth:
    num_draft_tokens: int
    plain_tps: float
    mtp_tps: float
    ratio: float  # median of the paired ratios
    ratio_low: float
    ratio_high: float
    acceptance: list[float]  # by position
    tokens_per_step: float
    step_over_parts: float  # time of a step / (V(k+1) + k D)
    rejection: float  # mean time of going back after a rejected draft / V(k+1)
    allowed: float
    efficiency: float
    identical: bool


def median_time(call: Callable[[], Any], n: int = 30, after: Callable[[], Any] = lambda: None) -> float:
    """Median seconds of a call that returns arrays, evaluated; ``after`` is not timed."""
    times = []
    for _ in range(n):
        tic = time.perf_counter()
        mx.eval(call())
        times.append(time.perf_counter() - tic)
        after()
    return statistics.median(times)


def time_parts(model, prompt: mx.array, max_draft_tokens: int) -> Parts:
    """Time the parts of a step alone, behind a prompt [T]."""
    prompt_cache = caches.make_prompt_cache(model)
    backbone, head_cache = prompt_cache[: len(model.layers)], prompt_cache[len(model.layers)]
    _, hidden = model(prompt[None], cache=prompt_cache, return_hidden=True)
    model.mtp_forward(hidden, prompt[None], head_cache)
    mx.eval([c.state for c in prompt_cache])
    offset = prompt.size

    verify, rollback = [], []
    for n in range(1, max_draft_tokens + 2):
        window = prompt[None, :n]

        def forward(window=window):
            return model(window, cache=prompt_cache, return_hidden=True, n_confirmed=1)

        def back():
            nonlocal offset
            caches.rollback(backbone, offset, 1)
            offset += 1

        verify.append(median_time(forward, after=back))
    for n in range(1, max_draft_tokens + 1):
        times = []
        for _ in range(10):
            mx.eval(forward(), [c.state for c in backbone])
            tic = time.perf_counter()
            caches.rollback(backbone, offset, n)
            mx.eval([c.state for c in backbone if isinstance(c, caches.ArraysCache)])
            times.append(time.perf_counter() - tic)
            offset += n
        rollback.append(statistics.median(times))

    def head():
        logits, _ = model.mtp_forward(hidden[:, -1:], prompt[None, -1:], head_cache)
        return mx.argmax(logits, axis=-1)

    return Parts(verify, median_time(head, after=lambda: head_cache.trim(1)), rollback)


def run_plain(model, prompt: mx.array, max_tokens: int) -> tuple[list[int], float]:
    """mlx-lm's tokens, and the seconds from the first of them to the last."""
    tokens: list[int] = []
    for token, _ in generate_step(prompt, model, max_tokens=max_tokens):
        if not tokens:
            tic = time.perf_counter()
        tokens.append(token)
    return tokens, time.perf_counter() - tic


def run_mtp(model, prompt: mx.array, max_tokens: int, k: int, counts: DraftCounts) -> tuple[list[int], float]:
    tokens: list[int] = []
    for token, _, _ in mtp_generate_step(prompt, model, max_tokens=max_tokens, num_draft_tokens=k, counts=counts):
        if not tokens:
            tic = time.perf_counter()
        tokens.append(token)
    return tokens, time.perf_counter() - tic


def compare(model, prompts: list[mx.array], k: int, parts: Parts, max_tokens: int, repeat: int) -> Depth:
    """Alternate plain and MTP generation over the prompts, ``repeat`` times."""
    counts, identical = DraftCounts(), True
    plain_times, mtp_times, n_tokens = [], [], 0
    for i in tqdm(range(repeat), desc=f"depth {k}", leave=False, disable=None):
        plain_time = mtp_time = 0.0
        for prompt in prompts:
            want, seconds = run_plain(model, prompt, max_tokens)
            plain_time += seconds
            got, seconds = run_mtp(model, prompt, max_tokens, k, counts if i == 0 else DraftCounts())
            mtp_time += seconds
            identical = identical and got == want
            n_tokens += (len(got) - 1) * (i == 0)
        plain_times.append(plain_time)
        mtp_times.append(mtp_time)

    ratios = sorted(p / m for p, m in zip(plain_times, mtp_times))
    ratio = statistics.median(ratios)
    # The first token of each prompt comes before the clock starts.
    steps = n_tokens - sum(counts.accepted)
    tokens_per_step = n_tokens / steps
    parts_time = parts.verify[k] + k * parts.head
    allowed = tokens_per_step / (parts_time / parts.verify[0])
    # Windows that kept exactly n of their k + 1 tokens, for n = 1 to k.
    kept = [counts.drafted[0], *counts.accepted]
    rejected = [kept[n] - kept[n + 1] for n in range(k)]
    back = sum(n * t for n, t in zip(rejected, parts.rollback)) / max(sum(rejected), 1)
    return Depth(
        num_draft_tokens=k,
        plain_tps=n_tokens / statistics.median(plain_times),
        mtp_tps=n_tokens / statistics.median(mtp_times),
        ratio=ratio,
        ratio_low=ratios[0],
        ratio_high=ratios[-1],
        acceptance=[a / d for a, d in zip(counts.accepted, counts.drafted)],
        tokens_per_step=tokens_per_step,
        step_over_parts=statistics.median(mtp_times) / steps / parts_time,
        rejection=back / parts.verify[k],
        allowed=allowed,
        efficiency=ratio / allowed,
        identical=identical,
    )


def report(parts: Parts, depths: list[Depth]) -> None:
    one = parts.verify[0]
    print(f"Verify pass over 1 token: {one * 1e3:.2f} ms; the head: {parts.head / one:.3f} of it")
    print("Verify pass over n tokens: " + ", ".join(f"{n}: {v / one:.2f}" for n, v in enumerate(parts.verify, 1)))
    longest = parts.verify[-1]
    back = ", ".join(f"{n}: {r / longest:.3f}" for n, r in enumerate(parts.rollback, 1))
    print(f"Going back to n of {len(parts.verify)} tokens, of a pass over all: {back}")
    print()
    columns: list[tuple[str, Callable[[Depth], str]]] = [
        ("depth", lambda d: str(d.num_draft_tokens)),
        ("plain t/s", lambda d: f"{d.plain_tps:.1f}"),
        ("MTP t/s", lambda d: f"{d.mtp_tps:.1f}"),
        ("ratio", lambda d: f"{d.ratio:.2f}"),
        (" low to high", lambda d: f"{d.ratio_low:.2f} to {d.ratio_high:.2f}"),
        ("tokens/step", lambda d: f"{d.tokens_per_step:.2f}"),
        ("step/parts", lambda d: f"{d.step_over_parts:.2f}"),
        ("rejection", lambda d: f"{d.rejection:.3f}"),
        ("allowed", lambda d: f"{d.allowed:.2f}"),
        ("efficiency", lambda d: f"{d.efficiency:.2f}"),
        ("identical", lambda d: "yes" if d.identical else "no"),
        ("accepted", lambda d: " ".join(f"{a:.2f}" for a in d.acceptance)),
    ]
    print("  ".join(name for name, _ in columns))
    for d in depths:
        print("  ".join(f"{show(d):>{len(name)}}" for name, show in columns))


def main() -> None:
    parser = argparse.ArgumentParser(prog="mlx_mtp.benchmark", description="MTP against mlx-lm's plain generation.")
    parser.add_argument("--model", default=str(DEMO), help="Local directory or Hugging Face repo (default: the demo).")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[1, 2, 3, 4], help="Depths to measure.")
    parser.add_argument("--max-tokens", "-m", type=int, default=128, help="Tokens for each prompt (default: 128).")
    parser.add_argument("--repeat", type=int, default=5, help="Times that each arm runs (default: 5).")
    parser.add_argument("--prompts", type=Path, help="A text file of prompts, parted by lines of three dashes.")
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    args = parser.parse_args()
    with one_line_errors("mlx_mtp.benchmark"):
        if not all(1 <= k <= MAX_DRAFT_TOKENS for k in args.num_draft_tokens):
            raise ValueError(f"--num-draft-tokens takes numbers from 1 to {MAX_DRAFT_TOKENS}.")
        model, tokenizer = load(args.model)
        texts = args.prompts.read_text().split("\n---\n") if args.prompts else PROMPTS
    prompts = [mx.array(tokenizer.encode(t)) for t in texts]
    parts = time_parts(model, prompts[0], max(args.num_draft_tokens))
    depths = [compare(model, prompts, k, parts, args.max_tokens, args.repeat) for k in args.num_draft_tokens]
    report(parts, depths)
    if args.json:
        args.json.write_text(
            json.dumps({"parts": asdict(parts), "depths": [asdict(d) for d in depths]}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
