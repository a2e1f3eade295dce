"""Two versions of this package side by side: speed relative to plain mlx-lm, by depth, and the one's time over the other's.

    git worktree add ../old COMMIT
    python -m benchmarks.compare_versions ../old/src src

Each version runs in a child process of its own, and the two take turns at every generation, so that drift of the machine
affects both alike. Greedy, the bundled demo in bfloat16, its Python prompts; a round is every run on every prompt.

A version against itself (the same folder twice) tells how precise the figures are on a machine. Only what both versions have
is used: ``mlx_mtp.load``, ``mtp_generate_step``, and mlx-lm's ``generate_step`` on the loaded model, which a version that
compiles its passes runs compiled: compare ``time, new / old``, not the ratios to plain.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

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
        self.step = mlx_mtp.mtp_generate_step

    def describe(self) -> dict[str, Any]:
        import mlx_mtp

        return {"folder": str(Path(mlx_mtp.__file__).parent), "n_prompts": len(self.prompts)}

    def generate(self, run: str | int, prompt: int, max_tokens: int) -> dict[str, Any]:
        """Time one generation, from its first token to its last."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        tokens, first = [], 0.0
        ids = mx.array(self.prompts[prompt])
        if run == PLAIN:
            steps = generate_step(ids, self.model, max_tokens=max_tokens)
        else:
            steps = self.step(ids, self.model, max_tokens=max_tokens, num_draft_tokens=run)
        for token, *_ in steps:
            first = first or time.perf_counter()
            tokens.append(int(token))
        return {"seconds": time.perf_counter() - first, "tokens": tokens}


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

    def add(self, run: str | int, answer: dict[str, Any]) -> None:
        self.seconds[run][-1] += answer["seconds"]
        self.tokens[run].append(answer["tokens"])

    def ratios(self, run: str | int) -> list[float]:
        return [plain / mtp for plain, mtp in zip(self.seconds[PLAIN], self.seconds[run])]


def measure(children: Sequence[Child], runs: Sequence[str | int], max_tokens: int, repeat: int) -> list[Figures]:
    """Every round, the versions take turns at each run on each prompt."""
    figures = [Figures() for _ in children]
    versions = list(zip(children, figures))
    n_prompts = children[0].ask("describe")["n_prompts"]
    for run in runs:
        for child in children:
            child.ask("generate", run=run, prompt=0, max_tokens=min(max_tokens, 32))
    for i in range(repeat):
        print(f"round {i + 1} of {repeat}", file=sys.stderr)
        for f in figures:
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
    rows = [["run", "ratio, old", "ratio, new", "time, new / old", "same tokens"]]
    for run in runs:
        time_ratio = spread([b / a for a, b in zip(old.seconds[run], new.seconds[run])])
        same = "yes" if old.tokens[run] == new.tokens[run] == new.tokens[PLAIN] else "no"
        ratios = [spread(f.ratios(run)) if run != PLAIN else "" for f in (old, new)]
        rows.append([str(run), *ratios, time_ratio, same])
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
