"""The speed of two versions of this package, served side by side: the speed of the new one over that of the old one.

    git worktree add ../old COMMIT
    python -m benchmarks.compare_versions ../old/src src
    python -m benchmarks.compare_versions ../old/src src --at-once 1 2 4 8 30 --num-draft-tokens auto

Both serve the same model, and alternate at every run: so many requests at once, with so many drafts a step. Greedy, without
copies. "decoding" compares the times from the first token of a request to its last, "first token" the times to the first, and
"cpu" what the server's process has taken, which a busy machine changes less. A version beside itself (the same folder twice)
tells how precise the figures are.
"""

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
from mlx_mtp.checkpoint.load import DEMO
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


def main() -> None:
    flags = dict(at_once=([1], "Requests at once."), num_draft_tokens=["0", "1", "2", "3", "4", "auto"])
    flags |= dict(max_tokens=(128, "Tokens of a request."), repeat=(5, "Rounds."), model=str(DEMO))
    parser = script_parser(__doc__, **flags)
    parser.add_argument("src", type=Path, nargs=2, help="Two src folders: of the old version, and of the new one.")
    args = parser.parse_args()
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
