"""The time of a sampled step relative to a greedy one, with the calls of samplers and the primitives of its graph.

    python -m benchmarks.sampling              the demo's backbone with an output layer of 248,320 tokens and random weights
    python -m benchmarks.sampling --texts 16   with 16 texts at once

In a round all samplers generate at once in one process and take turns of some steps. Top-p without top-k needs the logits in
order, so its time is also given relative to a greedy step with one sort of the window. Calls are those of samplers in a step;
primitives are those of the choice of tokens and of the drafts that the greedy step does not have.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx

import mlx_mtp
from benchmarks.synthetic import synthetic_model
from benchmarks.timing import ratios, spread, time_in_turns
from mlx_mtp.core.decoding import loop
from mlx_mtp.core.decoding.head import HeadDrafter
from mlx_mtp.core.sampling.sampler import Sampler
from scripts.shared import script_parser
from tests.support.graphs import operations

VOCAB = 248_320
TURN = 4  # steps
CHAT = {"temp": 0.7, "top_p": 0.95, "top_k": 20}
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {}, "top-k, top-p": CHAT, "with seeds": {**CHAT, "seed": 0}, "top-p": {"temp": 0.7, "top_p": 0.95},
    "min-p": {"temp": 0.7, "min_p": 0.05}, "temperature": {"temp": 0.7}, "seeds": {"temp": 0.7, "seed": 0},
}  # fmt: skip


def steps_of(model: Any, options: dict[str, Any], n_texts: int, depth: int) -> Iterator[Any]:
    """The steps of a batch whose prompts are prefilled."""
    generator = mlx_mtp.BatchGenerator(model, num_draft_tokens=depth, copy_drafts="off", return_prompt_caches=False)
    prompts = [[(7919 * i + 13 * j) % VOCAB for j in range(40)] for i in range(n_texts)]
    own = [options | ({"seed": i} if "seed" in options else {}) for i in range(n_texts)]
    samplers = [mlx_mtp.make_sampler(**o) for o in own]
    generator.insert(prompts, max_tokens=[10**6] * n_texts, samplers=samplers)
    while len({r.uid for r in generator.next()[1]}) < n_texts:
        pass

    def steps() -> Iterator[Any]:
        try:
            while True:
                yield generator.next_generated()
        finally:
            generator.close()

    return steps()


def cpu_seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def work_of_a_step(steps: Iterator[Any]) -> Counter[str]:
    """The calls of samplers, and the primitives of the graphs of drafts and of the choice of tokens."""
    counts: Counter[str] = Counter()
    choose, propose, call = loop.choose, HeadDrafter.propose, Sampler.support

    def counted_choose(window: Any) -> Any:
        mx.eval(window.logits, window.drafts.tokens)
        choice = choose(window)
        counts["choice"] += len(operations(choice.tokens, choice.accepted))
        return choice

    def counted_propose(self: Any, *args: Any) -> Any:
        drafts = propose(self, *args)
        counts["drafts"] += len(operations(drafts[0]))
        return drafts

    def counted_call(self: Any, *args: Any) -> Any:
        counts["calls"] += 1
        return call(self, *args)

    next(steps)
    with (
        patch.object(loop, "choose", counted_choose),
        patch.object(HeadDrafter, "propose", counted_propose),
        patch.object(Sampler, "support", counted_call),
    ):
        next(steps)
    return counts


def main() -> None:
    flags = dict(repeat=(5, "Rounds."), texts=([1, 4], "Texts at once."), drafts=([0, 3], "Drafts in a step."))
    parser = script_parser(__doc__, **flags)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=[*SAMPLERS], help="Default: all.")
    args = parser.parse_args()
    config = json.loads((Path(mlx_mtp.DEMO) / "config.json").read_text())["text_config"]
    model = synthetic_model({**config, "model_type": "qwen3_5", "vocab_size": VOCAB})
    model.output_layer.weight *= 3  # logits with the spread of a trained model's
    samplers = {name: SAMPLERS[name] for name in ("greedy", *args.samplers)}
    print(f"{mx.default_device()}; times relative to greedy")
    print(f"texts  drafts  sampler       {'wall':22}  {'CPU':22}  calls  primitives")
    for n in args.texts:
        for k in args.drafts:
            running = {name: steps_of(model, options, n, k) for name, options in samplers.items()}
            work = {name: work_of_a_step(steps) for name, steps in running.items()}
            time_in_turns(running, TURN, 1)
            rounds = [time_in_turns(running, TURN, 1) for _ in range(args.repeat)]
            logits = mx.random.normal((n * (k + 1), VOCAB)).astype(mx.bfloat16)
            mx.eval(logits)
            sort = min(cpu_seconds(lambda: mx.eval(mx.sort(logits, axis=-1))) for _ in range(5))  # noqa: B023
            times = {name: list(zip(*(r[name] for r in rounds))) for name in samplers}  # (wall, CPU) of each
            ms = [1e3 / TURN * min(t) for t in times["greedy"]]
            print(
                f"{n:5} {k:7}  greedy        {ms[0]:.1f} ms a step, {ms[1]:.1f} of CPU; the sort {1e3 * sort:.1f} of CPU"
            )
            for name in [*samplers][1:]:
                figures = [spread(ratios(a, b)) for a, b in zip(times[name], times["greedy"])]
                more = [work[name][part] - work["greedy"][part] for part in ("choice", "drafts")]
                row = "  ".join([*figures, f"{work[name]['calls']:5}", f"{more[0]:6} + {more[1]}"])
                with_sort = [t + TURN * sort for t in times["greedy"][1]]
                note = f"  {spread(ratios(times[name][1], with_sort))} of greedy with a sort" if name == "top-p" else ""
                print(f"{'':13}  {name:12}  {row}{note}", flush=True)
            for steps in running.values():
                steps.close()


if __name__ == "__main__":
    main()
