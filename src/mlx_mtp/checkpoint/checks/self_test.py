"""A test of a model's passes on this device, which ``load`` runs once for each kind of model, chip and version.

A kernel may be wrong on a chip that its authors do not have. So passes whose logits must be equal, to within rounding, are
compared over a short window. The steps that "auto" chooses from are timed as well, for a few seconds. Other times follow from
those, and "auto" measures them when it drafts as many tokens.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from tqdm import tqdm

from ...core.batch.generate_step import mtp_generate_step
from ...core.caches.prompt_cache import open_prompt_cache
from ...core.caches.rows import KVOptions, Rows
from ...core.layers.compiled import Compiler
from ...core.layers.drafting import Settings
from ...core.layers.layer import FEW, group_size
from ...core.layers.mtp import has_head, run_head
from ...core.pacing.depth import MAX_DRAFT_TOKENS, Depth
from ...core.pacing.step_times import Plan, StepTimes, on_lines
from ...files import keep, kept
from ...memory import TEST_TOKENS
from ..hub import first_line
from ..settings import machine
from .dtype import Float16Error

# A share of the largest logit; wrong kernels miss by more.
ROUNDING = {mx.float32: 0.01, mx.float16: 0.03, mx.bfloat16: 0.1}
HEAD_TOKENS = TEST_TOKENS - 64  # before drafts that may copy the head's keys and values, which grow by 256 tokens
N_DRAFTS = 4
N_TIMES = 3  # of each step
MAX_SECONDS = 3.0  # of all steps and passes that are timed
N_SEQUENCES, ROWS = 2, (12, 16, 24, 32)  # of passes with more rows than one sequence's drafts make
N_PARTS = 4  # three comparisons and the times
DRAFT_LENGTHS = (*range(MAX_DRAFT_TOKENS + 1), *(n - 1 for n in ROWS))  # of the steps that are timed

log = logging.getLogger(__name__)


class SelfTest(NamedTuple):
    """The largest differences in a logit, as shares of the largest logit, by what may be wrong. 0 for the same bits."""

    compiled: float  # compiled passes and others
    grouped: float  # attention in groups and over whole windows
    rolled_back: float  # a pass after a rollback and after a prefill of the same tokens
    rounding: float  # the most that rounding explains
    head_copies: int  # copies of the head's keys and values that further drafts in one graph make
    seconds: list[float]  # of a step at ``DRAFT_LENGTHS``; none without the head
    draft_cost: float  # the time in which the head drafts a token, in plain steps

    @property
    def wrong(self) -> list[str]:
        return [name for name, n in zip(self._fields[:3], self[:3]) if not n <= self.rounding]

    def __str__(self) -> str:
        differences = ", ".join(f"{name} {n:.2%}" for name, n in zip(self._fields[:3], self[:3]))
        verdict = f"wrong: {', '.join(self.wrong)}" if self.wrong else f"within rounding ({self.rounding:.0%})"
        return f"{verdict}; differences of logits: {differences}; {self.head_copies} copies of the head's cache"


def ensure_tested(model: Any, name: str, must_pass: bool = False) -> SelfTest | None:
    """The result of a model's test on this machine, made once; ``None`` if it fails. What is wrong is off, or an error."""
    file, key = "self-test.json", _key_of(model)
    try:
        result = SelfTest(*kept(file, key))
    except TypeError:  # none, or that of another version
        try:
            result = run(model)
        except Exception as e:  # MLX's, such as of memory, or of a kernel that this device does not have
            log.warning(f"[WARNING] The passes of {name} could not be tested on this device: {first_line(e)}")
            return None
        if result.seconds or not has_head(model):  # otherwise kernels were compiled: the next load has times
            keep(file, key, result)
    if result.wrong and must_pass:
        raise Float16Error(name, f"{', '.join(result.wrong)} passes are wrong")
    tuned = (model.drafting.tuned or Settings()).seconds
    model.drafting.times = StepTimes(tuned or dict(zip(DRAFT_LENGTHS, result.seconds)), result.draft_cost)
    if "compiled" in result.wrong:
        model.drafting.compiled = False
    if "grouped" in result.wrong:
        model.drafting.attention_rows = 0
    if result.wrong:
        remedy = "use --no-mtp" if "rolled_back" in result.wrong else "they are off"
        log.warning(
            f"[WARNING] Passes of {name} are wrong on this device ({', '.join(result.wrong)}): {remedy}. Please report it with "
            f"the output of `mlx_mtp doctor --model {name}`."
        )
    return result


def _key_of(model: Any) -> str:
    weights: Any = tree_flatten(model.parameters())
    kind = hashlib.sha256(str([(name, w.shape, str(w.dtype)) for name, w in weights]).encode()).hexdigest()[:16]
    return f"{', '.join(machine().values())}, {model.model_type} {kind}"


def run(model: Any) -> SelfTest:
    """Compare and time passes after a short prompt, under a progress bar in a terminal."""
    with tqdm(total=N_PARTS, desc="Testing this device", leave=False, disable=None) as bar:
        return _run(model, bar)


def _run(model: Any, bar: Any) -> SelfTest:
    prompt = (mx.arange(12) * 977 + 11) % model.vocab_size
    window = (mx.arange(FEW + 1) * 613 + 7)[None] % model.vocab_size  # [1, 9]: longer than a group
    rows, kept, before = _prefilled(model, prompt[None]), 3, model.drafting.attention_rows
    heads = next(layer.self_attn for layer in model.layers if not layer.is_linear)
    try:
        model.drafting.attention_rows = 0
        whole = rows.run(model, window, n_confirmed=1)
        mx.eval(whole)
        bar.update()
        compiled = max(_compiled_difference(model, rows, window[:, :n]) for n in (1, kept + 2))
        sizes = heads.num_attention_heads, heads.num_key_value_heads, heads.head_dim
        model.drafting.attention_rows = group_size(window.size, *sizes)
        grouped = rows.run(model, window, n_confirmed=1)
        mx.eval(grouped)
        bar.update()
        model.drafting.attention_rows = 0
        rows.run(model, window[:, : kept + 2], n_confirmed=1)
        rows.commit([kept])
        prefilled = _prefilled(model, mx.concatenate([prompt[None], window[:, :kept]], axis=1))
        after, fresh = (each.run(model, window[:, kept : kept + 1]) for each in (rows, prefilled))
        mx.eval(after, fresh)
    finally:
        model.drafting.attention_rows = before
    bar.update()
    largest = float(mx.abs(whole).max())
    return SelfTest(
        compiled / largest,
        _difference(whole, grouped) / largest,
        _difference(after, fresh) / largest,
        ROUNDING[whole.dtype],
        _head_copies(model) if has_head(model) else 0,
        *(_step_seconds(model, prompt) if has_head(model) else ([], 0.0)),
    )


def _compiled_difference(model: Any, rows: Rows, window: mx.array) -> float:
    return _difference(*(rows.run(model, window, n_confirmed=1, compiler=c) for c in (Compiler(), None)))


def _difference(a: mx.array, b: mx.array) -> float:
    return float(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max())


def _prefilled(model: Any, prompts: mx.array) -> Rows:
    """Rows of prompts [B, T]."""
    (B, T), kv = prompts.shape, KVOptions()
    rows = Rows(model, kv)
    rows.join([open_prompt_cache(model, None)] * B, [kv] * B)
    mx.eval(rows.run(model, prompts), rows.states)
    rows.commit([T] * B)
    return rows


def _head_copies(model: Any) -> int:
    """How often drafts in one graph copy the head's keys and values, by the peak of memory. The design page says why."""
    norm, cache, token = model.mtp.pre_fc_norm_hidden.weight, model.head_layer.make_cache(), mx.zeros((1, 1), mx.uint32)
    hidden = run_head(model, mx.zeros((1, 1, norm.size), norm.dtype), token, cache)
    sizes = model.head_layer.row_sizes.values()
    cache.update_and_fetch(*(mx.zeros((1, H, HEAD_TOKENS, D), cache.keys.dtype) for H, D in sizes))
    mx.eval(cache.state, hidden)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(N_DRAFTS):
        hidden = run_head(model, hidden, token, cache)  # [1, 1, H]
        token = mx.argmax(model.draft_logits(hidden), axis=-1)  # [1, 1]
    mx.eval(token, cache.state)
    return round((mx.get_peak_memory() - before) / cache.nbytes)


class _EveryLength(Depth):
    """Chooses all draft lengths in turn, and keeps the shortest time of each: others may include a pause."""

    def __init__(self, max_drafts: int):
        super().__init__(max_drafts)
        self.shortest: dict[int, float] = {}
        # The first step of a draft length makes traces and is not timed.
        self.left = [k for k in range(max_drafts + 1) for _ in range(N_TIMES + 1)]

    def for_text(self) -> "_EveryLength":
        return self

    def next(self, *_: Any, **__: Any) -> Plan:
        return Plan(self.left.pop(0) if self.left else 0)

    def observe(self, plan: Plan, n_accepted: float, seconds: float | None, *_: Any, **__: Any) -> None:
        if seconds is not None:
            self.shortest[plan.k] = min(seconds, self.shortest.get(plan.k, seconds))


def _step_seconds(model: Any, prompt: mx.array) -> tuple[list[float], float]:
    """See ``step_seconds``. None if plain steps, or all others, were not timed in ``MAX_SECONDS``."""
    depth, end = _EveryLength(MAX_DRAFT_TOKENS), perf_counter() + MAX_SECONDS
    steps = mtp_generate_step(prompt, model, max_tokens=1000, num_draft_tokens=depth, copy_drafts="off")
    with closing(steps):
        for _ in steps:
            if not depth.left or perf_counter() > end:
                break
    times, passes = sorted(depth.shortest.items()), dict[int, float]()
    if len(times) < 2 or times[0][0] > 0:
        return [], 0.0
    for rows in (1, 8, 9, *ROWS):
        sequences = N_SEQUENCES if rows % N_SEQUENCES == 0 else 1
        longest = max((seconds * rows / n for n, seconds in passes.items()), default=0.0)
        if perf_counter() + longest * (N_TIMES + 1) < end:
            passes[rows] = _pass_seconds(model, sequences, rows // sequences)
    return step_seconds(on_lines(times, MAX_DRAFT_TOKENS), passes)


def step_seconds(seconds: Sequence[float], passes: Mapping[int, float]) -> tuple[list[float], float]:
    """The times of steps at ``DRAFT_LENGTHS`` and of a draft, given those of steps with 0 to 8 drafts and of passes by rows."""
    if not {1, 8, 9} <= passes.keys():
        return [*seconds], 0.0  # unknown
    draft = max(seconds[8] - seconds[0] - (passes[9] - passes[1]), 0.0) / 8
    # A pass over fewer rows may have been delayed.
    deeper = [seconds[7] + max(passes[n] - passes[8], 0.0) + (n - 8) * draft for n in ROWS if n in passes]
    return [*seconds, *deeper], draft / seconds[0]


def _pass_seconds(model: Any, B: int, n: int) -> float:
    """The shortest of several times of a pass over n tokens of each of B sequences."""
    windows, times = mx.arange(B * n).reshape(B, n) % model.vocab_size, []
    rows = _prefilled(model, windows)
    for _ in range(N_TIMES):
        before = perf_counter()
        mx.eval(rows.run(model, windows, n_confirmed=1))
        times.append(perf_counter() - before)
    return min(times)
