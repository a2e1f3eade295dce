"""Two versions of this package side by side: speed relative to plain mlx-lm, and efficiency, by depth.

    git worktree add ../old COMMIT
    python -m benchmarks.compare_versions ../old/src src

Each version runs in a child process of its own, and the two take turns at every generation, so that drift of the machine
affects both alike. Greedy, the bundled demo in bfloat16, its Python prompts; a round is every run on every prompt.

A version against itself (the same folder twice) tells how precise the figures are on a machine.

Efficiency is as in ``mlx_mtp.benchmark``: the measured ratio over the one that the parts of a step allow. Only what both
versions have is used: ``mlx_mtp.load``, ``mtp_generate_step``, ``DraftCounts`` and the models' ``mtp_forward``.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

N_CALLS = 4  # of each part in a round
PLAIN, AUTO = "plain", "auto"


# The child: one version


class Version:
    """The package that this process imports, asked by lines of JSON."""

    def __init__(self) -> None:
        import mlx_mtp
        from mlx_mtp.prompts import PYTHON

        folder = Path(mlx_mtp.__file__).parent
        self.model, tokenizer = mlx_mtp.load(str(folder / "demo"))
        self.prompts = [tokenizer.encode(text) for text in PYTHON]
        self.step, self.counts = mlx_mtp.mtp_generate_step, find_draft_counts()

    def describe(self) -> dict[str, Any]:
        import mlx_mtp

        return {"folder": str(Path(mlx_mtp.__file__).parent), "n_prompts": len(self.prompts)}

    def generate(self, run: str | int, prompt: int, max_tokens: int) -> dict[str, Any]:
        """Time one generation, from its first token to its last."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        tokens, counts, first = [], self.counts(), 0.0
        ids = mx.array(self.prompts[prompt])
        if run == PLAIN:
            steps = generate_step(ids, self.model, max_tokens=max_tokens)
        else:
            steps = self.step(ids, self.model, max_tokens=max_tokens, num_draft_tokens=run, counts=counts)
        for token, *_ in steps:
            first = first or time.perf_counter()
            tokens.append(int(token))
        seconds = time.perf_counter() - first
        return {"seconds": seconds, "tokens": tokens, "drafted": counts.drafted, "accepted": counts.accepted}

    def parts(self, max_drafts: int) -> dict[str, Any]:
        """Time a verify pass over 1, 2, ... tokens, and a pass of the head over one."""
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache

        model, ids = self.model, mx.array([self.prompts[0]])
        cache, head_cache = model.make_cache(), KVCache()
        _, hidden = model(ids, cache=cache, return_hidden=True)
        _, out = model.mtp_forward(hidden[:, :-1], ids[:, 1:], head_cache)
        mx.eval(out, [c.state for c in cache], head_cache.state)
        windows = [mx.repeat(ids[:, -1:], n, axis=1) for n in range(1, max_drafts + 2)]

        def verify(window: mx.array) -> float:
            caches = copy.deepcopy(cache)
            mx.eval([c.state for c in caches])
            return timed(lambda: mx.eval(model(window, cache=caches, return_hidden=True, n_confirmed=1)))

        def head() -> float:
            def call() -> None:
                logits, _ = model.mtp_forward(hidden[:, -1:], ids[:, -1:], head_cache)
                mx.eval(mx.argmax(logits, axis=-1))

            seconds = timed(call)
            head_cache.trim(1)
            return seconds

        turns = [([verify(window) for window in windows], head()) for _ in range(N_CALLS + 1)][1:]  # the first compiles
        return {"verify": [list(column) for column in zip(*(v for v, _ in turns))], "head": [d for _, d in turns]}


def find_draft_counts() -> Any:
    import mlx_mtp

    if hasattr(mlx_mtp, "DraftCounts"):
        return mlx_mtp.DraftCounts
    from mlx_mtp.speculative import DraftCounts  # before it was public

    return DraftCounts


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def serve() -> None:
    """Answer requests of the form {method: arguments}, one a line."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what the package prints is no answer
    version = Version()
    for line in sys.stdin:
        ((method, arguments),) = json.loads(line).items()
        print(json.dumps(getattr(version, method)(**arguments)), file=answers, flush=True)


# The parent: both versions, in turns


class Child:
    """A process with the package of a ``src`` folder."""

    def __init__(self, src: Path):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(src)},
        )
        folder = Path(self.ask("describe")["folder"])
        if folder.parent != src:
            self.close()
            raise ValueError(f"{src} has no package mlx_mtp: {folder} was imported.")

    def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({method: arguments}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise ChildProcessError("A version ended early: its error is above.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Figures:
    """What a version's rounds gave."""

    def __init__(self) -> None:
        self.seconds: dict[str | int, list[float]] = defaultdict(list)  # of each round, by run
        self.tokens: dict[str | int, list[list[int]]] = defaultdict(list)
        self.drafted: dict[str | int, list[int]] = defaultdict(list)
        self.accepted: dict[str | int, list[int]] = defaultdict(list)
        self.verify: dict[int, list[float]] = defaultdict(list)  # by the number of drafts
        self.head: list[float] = []

    def add(self, run: str | int, answer: dict[str, Any]) -> None:
        self.seconds[run][-1] += answer["seconds"]
        self.tokens[run].append(answer["tokens"])
        for total, new in ((self.drafted[run], answer["drafted"]), (self.accepted[run], answer["accepted"])):
            total += [0] * (len(new) - len(total))
            total[: len(new)] = [a + b for a, b in zip(total, new)]

    def add_parts(self, answer: dict[str, Any]) -> None:
        for k, seconds in enumerate(answer["verify"]):
            self.verify[k] += seconds
        self.head += answer["head"]

    def ratios(self, run: str | int) -> list[float]:
        return [plain / mtp for plain, mtp in zip(self.seconds[PLAIN], self.seconds[run])]

    def efficiency(self, run: str | int) -> float:
        """The median ratio over the one that the parts of a step allow, as ``mlx_mtp.benchmark`` has it."""
        verify, head = [statistics.median(self.verify[k]) for k in sorted(self.verify)], statistics.median(self.head)
        drafted, n_tokens = self.drafted[run], sum(len(tokens) - 1 for tokens in self.tokens[run])
        n_plain = n_tokens - sum(self.accepted[run]) - (drafted[0] if drafted else 0)
        n_steps = [n_plain, *(n - m for n, m in zip(drafted, [*drafted[1:], 0]))]  # that drafted 0, 1, ...
        seconds = sum(n * (verify[k] + k * head) for k, n in enumerate(n_steps))
        return statistics.median(self.ratios(run)) * seconds / (n_tokens * verify[0])


def measure(children: Sequence[Child], runs: Sequence[str | int], max_tokens: int, repeat: int) -> list[Figures]:
    """Every round: each version times its parts, then they take turns at each run on each prompt."""
    max_drafts = max(8 if run == AUTO else int(run) for run in runs if run != PLAIN)
    figures = [Figures() for _ in children]
    versions = list(zip(children, figures))
    n_prompts = children[0].ask("describe")["n_prompts"]
    for run in runs:
        for child in children:
            child.ask("generate", run=run, prompt=0, max_tokens=min(max_tokens, 32))
    for i in range(repeat):
        print(f"round {i + 1} of {repeat}", file=sys.stderr)
        for child, f in versions[:: 1 if i % 2 else -1]:
            f.add_parts(child.ask("parts", max_drafts=max_drafts))
            for run in runs:
                f.seconds[run].append(0.0)
        for prompt in range(n_prompts):
            turn = (i + prompt) % len(runs)
            for run in [*runs[turn:], *runs[:turn]]:
                # Either version goes first in every other round, prompt and run.
                for child, f in versions[:: 1 if (i + prompt + runs.index(run)) % 2 else -1]:
                    f.add(run, child.ask("generate", run=run, prompt=prompt, max_tokens=max_tokens))
    return figures


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def show(old: Figures, new: Figures, runs: Sequence[str | int]) -> str:
    rows = [["run", "ratio, old", "ratio, new", "efficiency, old", "new", "time, new / old", "same tokens"]]
    for run in runs:
        time_ratio = spread([b / a for a, b in zip(old.seconds[run], new.seconds[run])])
        same = "yes" if old.tokens[run] == new.tokens[run] == new.tokens[PLAIN] else "no"
        ratios = [spread(f.ratios(run)) if run != PLAIN else "" for f in (old, new)]
        efficiency = [f"{f.efficiency(run):.3f}" if run != PLAIN else "" for f in (old, new)]
        rows.append([str(run), *ratios, *efficiency, time_ratio, same])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    parser = argparse.ArgumentParser(description="Compare the speed of two versions of mlx_mtp.")
    parser.add_argument("old", type=Path, help="A src folder.")
    parser.add_argument("new", type=Path, help="Another.")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4], help="Fixed depths (default: 1 2 3 4).")
    parser.add_argument("--max-tokens", "-m", type=int, default=128, help="Tokens for each prompt (default: 128).")
    parser.add_argument("--repeat", type=int, default=5, help="The number of rounds (default: 5).")
    args = parser.parse_args()
    runs = [PLAIN, AUTO, *args.depths]
    with ExitStack() as stack:
        children = [stack.enter_context(closing(Child(src.resolve()))) for src in (args.old, args.new)]
        old, new = measure(children, runs, args.max_tokens, args.repeat)
    print(show(old, new, runs))


if __name__ == "__main__":
    main()
