"""The speed of two versions of this package, side by side: the speed of the new one over that of the old one.

    git worktree add ../old COMMIT
    python -m benchmarks.compare_versions ../old/src src
    python -m benchmarks.compare_versions ../old/src src --at-once 1 2 4 8 30 --num-draft-tokens auto
    python -m benchmarks.compare_versions ../old/src src --in-process --at-once 1 2 4 8

Both serve the same model, and alternate at every run: so many requests at once, with so many drafts a step. Greedy, without
copies. "decoding" compares the times from the first token of a request to its last, "first token" the times to the first, and
"cpu" what the server's process has taken, which a busy machine changes less. A version beside itself (the same folder twice)
tells how precise the figures are.

With ``--in-process`` there is no server: the versions take turns, each in its own process, beside mlx-lm on the same texts.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import psutil

from benchmarks.timing import ratios, spread, take_turns
from mlx_mtp.checkpoint import DEMO
from mlx_mtp.cli.display import table
from mlx_mtp.prompts import PYTHON
from scripts.shared import script_parser
from tests.support.server_process import Server, serve


class Figures(NamedTuple):
    decoding: float  # seconds, the mean of the requests
    first: float
    cpu: float
    texts: list[str]


def ask(server: Server, max_tokens: int, num_draft_tokens: str, number: int) -> tuple[float, float, str]:
    """(seconds from the first token to the last, seconds to the first, text) of a request whose prompt no other has."""
    k = num_draft_tokens if num_draft_tokens == "auto" else int(num_draft_tokens)
    body = {"prompt": f"# {number}\n{PYTHON[number % len(PYTHON)]}", "max_tokens": max_tokens, "num_draft_tokens": k}
    body |= {"copy_drafts": "off", "logit_bias": {"0": -100}}  # the end of the text is not likely
    start, times, text = time.perf_counter(), [], ""
    for event in server.stream("/v1/completions", body):
        times.append(time.perf_counter())
        text += event["choices"][0]["text"]
    return times[-1] - times[0], times[0] - start, text


def run(server: Server, max_tokens: int, at_once: int, num_draft_tokens: str, numbers: count) -> Figures:
    process = psutil.Process(server.process.pid)
    before = process.cpu_times()
    with ThreadPoolExecutor(at_once) as pool:
        answers = [pool.submit(ask, server, max_tokens, num_draft_tokens, next(numbers)) for _ in range(at_once)]
    after = process.cpu_times()
    decoding, first, texts = zip(*(answer.result() for answer in answers))
    return Figures(mean(decoding), mean(first), sum(after[:2]) - sum(before[:2]), list(texts))


def run_in_process(src: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the clock and of the CPU, and texts, by number at once and drafts, of the package in ``src``."""
    paths = os.pathsep.join([str(src.resolve()), str(Path(__file__).parents[1])])
    command = [sys.executable, "-m", "benchmarks.one_version", json.dumps(options)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare_in_process(args: Any) -> list[list[str]]:
    options = {
        "model_name": args.model,
        "at_once": args.at_once,
        "drafts": args.num_draft_tokens,
        "max_tokens": args.max_tokens,
    }
    runs = {i: partial(run_in_process, src, options) for i, src in enumerate(args.src)}
    old, new = take_turns(runs, args.repeat).values()
    rows = [["at once", "drafts", "new / old, clock", "cpu", "new / mlx-lm, clock", "cpu", "texts of old, mlx-lm"]]
    for name in new[0]["seconds"]:
        n, k = name.split()
        seconds = [
            [r["seconds"][own] for r in rounds] for rounds, own in ((old, name), (new, name), (new, f"{n} mlx-lm"))
        ]
        a, b, stock = (list(zip(*own)) for own in seconds)
        figures = [spread(ratios(x, y)) for other in (a, stock) for x, y in zip(other, b)]
        same = [
            all(r["texts"][name] == other for r, other in zip(new, others))
            for others in ([r["texts"][name] for r in old], [r["texts"][f"{n} mlx-lm"] for r in new])
        ]
        rows.append([n, k, *figures, ", ".join("same" if own else "differ" for own in same)])
    return rows


def main() -> None:
    flags = dict(at_once=([1], "Requests at once."), num_draft_tokens=["0", "1", "2", "3", "4", "auto"])
    flags |= dict(max_tokens=(128, "Tokens of a request."), repeat=(5, "Rounds."), model=str(DEMO))
    parser = script_parser(__doc__, **flags)
    parser.add_argument("src", type=Path, nargs=2, help="Two src folders: of the old version, and of the new one.")
    parser.add_argument(
        "--in-process", action="store_true", help="Generate in processes of their own, without a server."
    )
    args = parser.parse_args()
    if args.in_process:
        print("\n".join(table(compare_in_process(args))))
        return
    kinds = [(n, k) for n in args.at_once for k in args.num_draft_tokens]
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        runs: dict[Any, Any] = {}
        for i, src in enumerate(args.src):
            server = serve(log.with_name(str(i)), "--mtp", "--model", args.model, src=src.resolve())
            start = partial(run, stack.enter_context(server), args.max_tokens)
            runs |= {(kind, i): partial(start, *kind, count()) for kind in kinds}
        results = take_turns({(kind, i): runs[kind, i] for kind in kinds for i in (0, 1)}, args.repeat + 1)
    rows = [["at once", "drafts", "decoding, new / old", "first token", "cpu", "same texts"]]
    for kind in kinds:
        old, new = (results[kind, i][1:] for i in (0, 1))  # the first round warms up
        columns = [ratios(a, b) for a, b in list(zip(zip(*old), zip(*new)))[:3]]
        is_same = [a.texts for a in old] == [b.texts for b in new]
        rows.append([str(kind[0]), kind[1], *map(spread, columns), "yes" if is_same else "no"])
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
