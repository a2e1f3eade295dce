"""One round of ``compare_versions --in-process``: prints the times and texts of the package that is first on the path, as JSON.

It uses public names only, so that any version of the package can be measured.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generate_step

import mlx_mtp
from mlx_mtp.prompts import PYTHON

N_TEXTS = 2  # of each kind, in a process; a further one warms up


def runs_of(model_name: str, at_once: list[int], drafts: list[str], max_tokens: int) -> dict[str, Callable[[int], Any]]:
    """By name, what generates the texts of some prompts, given the number of the first -> their tokens or texts."""
    model, tokenizer = mlx_mtp.load(model_name, settings=False)
    stock, _ = mlx_lm.load(model_name)
    lengths = [len(tokenizer.encode(text)) for text in PYTHON]
    encoded = [tokenizer.encode(text)[: min(lengths)] for text in PYTHON]

    def alone(step: Any, model: Any, i: int, **options: Any) -> list[int]:
        prompt = mx.array(encoded[i % len(encoded)])
        return [int(token) for token, *_ in step(prompt, model, max_tokens=max_tokens, **options)]

    def together(generate: Any, model: Any, i: int, n: int, **options: Any) -> list[str]:
        prompts = [encoded[(i + j) % len(encoded)] for j in range(n)]
        return list(generate(model, tokenizer, prompts, max_tokens=max_tokens, **options).texts)

    runs: dict[str, Callable[[int], Any]] = {}
    for n in at_once:
        if n == 1:
            runs["1 mlx-lm"] = lambda i: alone(generate_step, stock, i)
        else:
            runs[f"{n} mlx-lm"] = lambda i, n=n: together(mlx_lm.batch_generate, stock, i, n)  # type: ignore[misc]
        for k in drafts:
            options: dict[str, Any] = {"num_draft_tokens": k if k == "auto" else int(k), "copy_drafts": "off"}
            if n == 1:
                runs[f"1 {k}"] = lambda i, o=options: alone(mlx_mtp.mtp_generate_step, model, i, **o)  # type: ignore[misc]
            else:
                runs[f"{n} {k}"] = lambda i, n=n, o=options: together(mlx_mtp.batch_generate, model, i, n, **o)  # type: ignore[misc]
    return runs


def main() -> None:
    options = json.loads(sys.argv[1])
    runs = runs_of(**options)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    texts: dict[str, list[Any]] = {name: [] for name in runs}
    for i in range(1 + N_TEXTS):
        for name, run in runs.items():
            start = time.perf_counter(), time.process_time()
            text = run(i)
            if i > 0:  # the first compiles
                times[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
                texts[name].append(text)
    figures = {name: [sum(seconds) for seconds in zip(*own)] for name, own in times.items()}
    print(json.dumps({"seconds": figures, "texts": texts}))


if __name__ == "__main__":
    main()
