"""Host time: how long Python takes to build a pass, and MLX to evaluate its many small operations, by number of layers.

    python -m benchmarks.host_time

Models of tiny widths, with the layers of published ones and 4-bit weights, so that the device has nearly nothing to compute. A
plain pass, a verify pass over four tokens, a rollback to two of them, and three drafts of the head, compiled and not.
Building is the CPU time of this thread; evaluating is that of the whole process. MLX's CPU backend computes the recurrence in
many operations, where Metal has one kernel: ``--one-kernel`` puts a few operations in its place.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn

from benchmarks.synthetic import COMMON, model_of
from mlx_mtp.core.caches.prompt_cache import PromptCache, make_prompt_cache
from mlx_mtp.core.caches.rows import KVOptions, Rows
from mlx_mtp.core.layers.compiled import Compiler
from mlx_mtp.core.layers.mtp import run_head
from mlx_mtp.core.traces import n_traces
from scripts.shared import script_parser

TINY = {
    **COMMON, "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip
LAYERS = {"4B": (32, {}), "27B": (64, {}), "35B-A3B": (40, EXPERTS)}
PROMPT, WINDOW, KEPT, DRAFTS = 40, 4, 2, 3  # tokens
PARTS = ("plain", "verify", "rollback", "drafts")


def one_kernel(native: bool, inputs: Any, state: Any, mask: Any = None) -> Any:
    """As many operations as the recurrence has on Metal, of the same shapes."""
    _, _, v, g, beta = inputs
    return v * beta[..., None] * g[..., None].astype(v.dtype), state * 1


def tiny(n_layers: int, experts: dict[str, Any]) -> Any:
    family = "qwen3_5_moe" if experts else "qwen3_5"
    model = model_of({**TINY, **experts, "model_type": family, "num_hidden_layers": n_layers})
    nn.quantize(model, 64, 4)
    model.eval()
    mx.eval(model.parameters())
    return model


class Passes:
    """A model behind a prompt, and the CPU time of building and evaluating what a step consists of."""

    def __init__(self, model: Any):
        self.model, self.ids, self.compiler = model, mx.arange(PROMPT)[None], Compiler()
        entries = make_prompt_cache(model)
        logits, self.hidden = model(self.ids, cache=entries, return_hidden=True)
        run_head(model, self.hidden[:, :-1], self.ids[:, 1:], entries[len(model.layers)])
        mx.eval(logits, self.hidden, [c.state for c in entries])
        self.cache, self.rows = PromptCache(entries, len(model.layers)), Rows(model, KVOptions())
        self.rows.join([self.cache], [KVOptions()])

    def step(self) -> dict[str, tuple[float, float]]:
        """(building, evaluating) of each of ``PARTS``."""
        times = {"plain": self._time(lambda: self._pass(1))}
        self.rows.keep([1])
        times["verify"] = self._time(lambda: self._pass(WINDOW, return_hidden=True, n_confirmed=1))
        times["rollback"] = self._time(lambda: self.rows.keep([KEPT]))
        times["drafts"] = self._time(self._draft)
        self.cache.head.trim(DRAFTS)
        return times

    def _pass(self, n: int, **options: Any) -> Any:
        return self.rows.run(self.model, self.ids[:, :n], compiler=self.compiler, **options)

    def _draft(self) -> mx.array:
        out, token, tokens = self.hidden[:, -1:], self.ids[:, :1], []
        for _ in range(DRAFTS):
            out = run_head(self.model, out, token, self.cache.head, compiler=self.compiler)
            token = mx.argmax(self.model.draft_logits(out), axis=-1)
            tokens.append(token)
        return mx.concatenate(tokens, axis=1)

    def _time(self, build: Callable[[], Any]) -> tuple[float, float]:
        start = time.thread_time()
        out = build()
        built = time.thread_time() - start
        start = time.process_time()
        mx.eval([] if out is None else out, self.rows.states, self.rows.state.recurrent)
        return built, time.process_time() - start


def measure(model: Any, repeat: int) -> tuple[dict[tuple[str, bool], list[tuple[float, float]]], float, int]:
    """The times of each part, compiled and not; and the longest first step, in seconds of wall time, with its traces."""
    passes, times, longest, before = Passes(model), defaultdict(list), 0.0, n_traces()
    for i in range(repeat + 2):
        for compiled in (True, False):
            model.device = replace(model.device, compiled=compiled)
            start = time.perf_counter()
            step = passes.step()
            if compiled:
                longest = max(longest, time.perf_counter() - start)
            for part, seconds in step.items():
                if i > 1:
                    times[part, compiled].append(seconds)
    return times, longest, n_traces() - before


def main() -> None:
    flag = (False, "Replace the recurrence by as few operations as on Metal.")
    args = script_parser(__doc__, repeat=(20, "Steps that are timed."), one_kernel=flag).parse_args()
    if args.one_kernel:
        for module in ("core.layers.recurrence", "core.caches.recurrent"):
            patch(f"mlx_mtp.{module}.recur", one_kernel).start()
        patch("mlx_lm.models.gated_delta.gated_delta_ops", lambda *x: one_kernel(False, x[:5], *x[5:])).start()
    recurrence = "as few operations as on Metal" if args.one_kernel else "as it is computed here"
    print(f"{mx.default_device()}, the recurrence {recurrence}; ms of CPU time: compiled / not compiled = ratio")
    for name, (n_layers, experts) in LAYERS.items():
        times, longest, n = measure(tiny(n_layers, experts), args.repeat)
        print(f"{name}, {n_layers} layers: {n} traces, the longest step {1e3 * longest:.0f} ms of wall time")
        for part in PARTS:
            figures = []
            for i, what in enumerate(("building", "evaluating")):
                a, b = (1e3 * statistics.median(t[i] for t in times[part, compiled]) for compiled in (True, False))
                figures.append(f"{what} {a:.2f} / {b:.2f} = {a / b:.2f}")
            print(f"  {part:8}  {'   '.join(figures)}")


if __name__ == "__main__":
    main()
