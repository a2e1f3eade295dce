"""A test of a model's passes on this device, which ``load`` runs once for each kind of model, chip and version.

A kernel may be wrong on a chip that its authors do not have. So attention alone is compared with simple operations
(``kernels.py``), and passes whose logits must be equal, to within rounding, after a short prompt. What is wrong is not used.
Then the steps that "auto" chooses from are timed, for a few seconds. Other times follow from those, and "auto" measures them
when it drafts as many tokens.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import takewhile
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tqdm import tqdm

from ...core.batch.generate_step import mtp_generate_step
from ...core.caches.prompt_cache import open_prompt_cache
from ...core.caches.rows import KVOptions, Rows
from ...core.caches.validation import GROUP_SIZES
from ...core.layers.attention import FEW, AttentionHeads, group_size
from ...core.layers.compiled import Compiler
from ...core.layers.mtp import has_head, run_head
from ...core.layers.passes import DevicePasses, pass_over
from ...core.pacing import MAX_DRAFT_TOKENS, MAX_WINDOW
from ...core.pacing.depth import Depth
from ...core.pacing.step_times import Pace, Plan, StepTimes, on_lines
from ...errors import NotANumberError
from ...files import keep, kept
from ...memory import TEST_TOKENS
from ..hub import first_line
from ..settings import machine
from . import kernels
from .dtype import Float16Error, dtype_of

# A share of the largest number; wrong kernels miss by more.
ROUNDING = {mx.float32: 0.01, mx.float16: 0.03, mx.bfloat16: 0.1}
OF_QUANTIZED = 3  # as many times that of attention to quantized keys and values, whose sums may be rounded at each term
UNQUANTIZED = "unquantized"
KV_BITS = (8, 4)
WIDTHS = (*range(1, FEW + 2), MAX_WINDOW)  # tokens of windows
ROLLED_BACK = 5  # tokens of a window that is rolled back
HEAD_TOKENS = TEST_TOKENS - 64  # before drafts that may copy the head's keys and values, which grow by 256 tokens
N_DRAFTS = 4
MAX_SECONDS = 3.0  # of all steps and passes that are timed
N_SEQUENCES, ROWS = 2, (12, 16, 24, 32)  # of passes with more rows than one sequence's drafts make
DRAFT_LENGTHS = (*range(MAX_DRAFT_TOKENS + 1), *(n - 1 for n in ROWS))  # of the steps that are timed

log = logging.getLogger(__name__)


@dataclass
class SelfTest:
    """What was found so far. Differences are the largest, as shares of the largest number; 0 for the same bits."""

    rounding: float  # the most that rounding explains
    compiled: float = 0.0  # between logits of compiled passes and others
    grouped: float = 0.0  # between those of a window with attention in groups and of plain decoding
    rolled_back: float = 0.0  # between those after a rollback and of plain decoding
    # Differences between the logits of windows, by their tokens, and those of plain decoding
    windows: dict[str, float] = field(default_factory=dict)
    # Differences of attention alone, by the bits of keys and values that the model can have, and by the number of queries
    attention: dict[str, dict[str, float]] = field(default_factory=dict)
    # Differences of the output and the state of a recurrence, and its seconds, by the kernel and the number of tokens
    recurrence: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    head_copies: int = 0  # copies of the head's keys and values that further drafts in one graph make
    seconds: list[float] = field(default_factory=list)  # of a step at ``DRAFT_LENGTHS``; none without the head
    draft_cost: float = 0.0  # the time in which the head drafts a token, in plain steps
    # What each further token of a text adds to the seconds of a step, by draft length
    key_seconds: dict[str, float] = field(default_factory=dict)

    def _is_wrong(self, difference: float) -> bool:
        return not difference <= self.rounding

    def _queries(self, bits: str) -> int:
        """The most queries to which attention is right."""
        return up_to(self.attention.get(bits, {}), self.rounding * (1 if bits == UNQUANTIZED else OF_QUANTIZED))

    def _uses_native(self, in_prompts: bool) -> bool | None:
        """Whether MLX's own recurrence is right and, on Metal, faster than mlx-lm's kernel; ``None`` as by default."""
        seconds = {}
        for name, by_tokens in self.recurrence.items():
            own = [found for n, found in by_tokens.items() if (int(n) > MAX_WINDOW) is in_prompts]
            if not any(self._is_wrong(difference) for difference, _ in own):
                seconds[name] = sum(s for _, s in own)
        if kernels.OF_MLX_LM not in self.recurrence:
            return None if kernels.NATIVE in seconds or not self.recurrence else False
        return min(seconds, key=seconds.__getitem__, default=kernels.OF_MLX_LM) == kernels.NATIVE

    @property
    def widest(self) -> dict[int | None, int]:
        """As in ``DevicePasses``."""
        of_windows = 1 if self._is_wrong(self.rolled_back) else up_to(self.windows, self.rounding) or 1
        n = min(self._queries(UNQUANTIZED) or MAX_WINDOW, of_windows)
        return {None: n} | {bits: min(self._queries(str(bits)), n) for bits in KV_BITS}

    @property
    def device(self) -> DevicePasses:
        """What was found right so far."""
        return DevicePasses(
            attention_rows=0 if self._is_wrong(self.grouped) else None,
            compiled=not self._is_wrong(self.compiled),
            fused=self._queries(UNQUANTIZED) > 0,
            native_steps=self._uses_native(in_prompts=False),
            native_prompts=self._uses_native(in_prompts=True),
            widest=self.widest,
            same_bits=up_to(self.windows, 0.0),
        )

    def step_times(self, tuned: Mapping[int, float] | None = None) -> StepTimes:
        """The times that "auto" begins with: of steps those of ``--tune``, if any."""
        of_keys = {int(k): seconds for k, seconds in self.key_seconds.items()}
        return StepTimes(tuned or dict(zip(DRAFT_LENGTHS, self.seconds)), self.draft_cost, of_keys)

    @property
    def wrong(self) -> dict[str, str]:
        """What is wrong, and what is done about it."""
        widest = self.widest
        n = widest.pop(None)
        found = {
            "compiled passes": "they are off" if self._is_wrong(self.compiled) else "",
            "groups of queries": "they are off" if self._is_wrong(self.grouped) else "",
            "attention kernels": "" if self._queries(UNQUANTIZED) else "products take their place",
            "rollbacks": "there are no drafts" if self._is_wrong(self.rolled_back) else "",
        }
        if n < MAX_WINDOW and not found["rollbacks"]:
            found[f"passes over more than {n} tokens"] = _at_most(n)
        for bits, own in widest.items():
            if own < n:
                words = f"kv_bits={bits} is refused" if own == 0 else f"{_at_most(own)} once a text is quantized"
                found[f"keys and values of {bits} bits"] = words
        kernels = [name for name, of in self.recurrence.items() if any(self._is_wrong(d) for d, _ in of.values())]
        words = "another takes its place" if len(kernels) == 1 else "plain mlx-lm is wrong, too"
        found |= {f"the recurrence of {name}": words for name in kernels}
        return {name: remedy for name, remedy in found.items() if remedy}

    def __str__(self) -> str:
        names = ("compiled", "grouped", "rolled_back")
        n = self.widest[None]
        attention = (f"{bits} {max(of.values()):.2%}" for bits, of in self.attention.items())
        recurrence = [
            f"{name} {max(d for d, _ in of.values()):.2%}, {', '.join(f'{1e3 * s:.2f} ms of {n}' for n, (_, s) in of.items())}"
            for name, of in self.recurrence.items()
        ]
        if self._uses_native(in_prompts=True):
            recurrence.append("MLX's is used in prompts, whose bits differ from mlx-lm's")
        if kernels.OF_MLX_LM in self.recurrence:
            used = kernels.NATIVE if self._uses_native(in_prompts=False) else kernels.OF_MLX_LM
            recurrence.append(f"{used}'s is used in steps")
        return "\n".join(
            [
                f"wrong: {', '.join(self.wrong)}" if self.wrong else f"within rounding ({self.rounding:.0%})",
                f"differences of logits: {', '.join(f'{name} {getattr(self, name):.2%}' for name in names)}",
                f"windows: the same bits up to {up_to(self.windows, 0.0)} tokens, equal up to rounding up to {n}",
                f"differences of attention: {', '.join(attention)}",
                *(
                    [f"differences and times of the recurrence by tokens: {'; '.join(recurrence)}"]
                    if recurrence
                    else []
                ),
                f"{self.head_copies} copies of the head's cache",
            ]
        )


def up_to(differences: Mapping[str, float], limit: float) -> int:
    """The number up to which the differences, by number, are within a limit; ``MAX_WINDOW`` if all are."""
    right = [int(n) for n, _ in takewhile(lambda item: item[1] <= limit, differences.items())]
    return MAX_WINDOW if len(right) == len(differences) else max(right, default=0)


def _at_most(n_tokens: int) -> str:
    return "there are no drafts" if n_tokens == 1 else f"at most {n_tokens - 1} tokens are drafted at a time"


def ensure_tested(model: Any, name: str, must_pass: bool = False) -> SelfTest | None:
    """The result of a model's test on this machine, made once; ``None`` if it fails. What is wrong is off, or an error."""
    file = "self-test.json"
    key = _key_of(model)
    before = model.device
    try:
        result = SelfTest(**kept(file, key))
    except TypeError:  # none, or that of another version
        try:
            result = run(model)
        except Exception as e:  # MLX's, such as of memory, or of a kernel that this device does not have
            model.device = before
            if must_pass and isinstance(e, NotANumberError):
                raise Float16Error(name, "its logits are not finite") from e
            log.warning(f"[WARNING] The passes of {name} could not be tested on this device: {first_line(e)}")
            return None
        # Otherwise kernels were compiled while steps were timed: the next load has times.
        if result.seconds or not has_head(model) or result.widest[None] == 1:
            keep(file, key, asdict(result))
    if result.wrong and must_pass:
        raise Float16Error(name, f"{', '.join(result.wrong)} are wrong")
    is_compiled = result.device.compiled and before.compiled  # ``--tune`` may turn it off
    model.device = replace(result.device, compiled=is_compiled)
    model.pace = Pace(result.step_times(model.draft_settings.tuned.seconds))
    if result.wrong:
        remedies = "; ".join(f"{what}: {remedy}" for what, remedy in result.wrong.items())
        log.warning(
            f"[WARNING] Some passes of {name} are wrong on this device, and are avoided ({remedies}). Please report it with "
            f"the output of `mlx_mtp doctor --model {name} --json`."
        )
    return result


def _key_of(model: Any) -> str:
    weights: Any = tree_flatten(model.parameters())
    kind = hashlib.sha256(str([(name, w.shape, str(w.dtype)) for name, w in weights]).encode()).hexdigest()[:16]
    return f"{', '.join(machine().values())}, {model.model_type} {kind}"


def run(model: Any) -> SelfTest:
    """Compare and time passes, under a progress bar in a terminal. What is wrong is off in the parts that follow."""
    result = SelfTest(ROUNDING[dtype_of(model)])
    model.device = DevicePasses()
    for part in tqdm((_test_kernels, _test_passes, _test_head), desc="Testing this device", leave=False, disable=None):
        part(model, result)
        model.device = result.device
    return result


def _test_kernels(model: Any, result: SelfTest) -> None:
    rows = pass_over(MAX_WINDOW, model.device, 1, None, None).attention_rows
    heads = _heads_of(model)
    can_quantize = model.family.no_kv_bits is None and heads.size % min(GROUP_SIZES) == 0
    for bits in (None, *KV_BITS) if can_quantize else (None,):
        differences = partial(kernels.attention_differences, heads, dtype_of(model), rows, bits)
        name = str(bits or UNQUANTIZED)
        result.attention[name] = differences()
        if result._queries(name) < MAX_WINDOW:  # of which number?
            result.attention[name] = differences(range(1, FEW + 2))
    for layer in model.recurrent_layers[:1]:
        result.recurrence = kernels.recurrences(layer.heads, dtype_of(model))


def _heads_of(model: Any) -> AttentionHeads:
    heads: AttentionHeads = model.attention_layers[0].heads
    return heads


def _test_passes(model: Any, result: SelfTest) -> None:
    window = (mx.arange(MAX_WINDOW) * 613 + 7)[None] % model.vocab_size  # [1, 17]
    rows = _prefilled(model, _prompt(model)[None])
    each = list[mx.array]()
    state = rows.state
    for t in range(MAX_WINDOW):
        each.append(rows.run(model, window[:, t : t + 1]))
        rows.keep([1])
        mx.eval(each[-1], rows.states)
    alone = mx.concatenate(each, axis=1)  # plain decoding's logits, [1, 17, V]
    if not mx.isfinite(alone).all():
        raise NotANumberError  # by the weights of this model: the result would be kept for others of its kind

    def logits(n: int, compiler: Compiler | None = None) -> mx.array:
        rows.state = state
        rows.in_flight = 0
        return rows.run(model, window[:, :n], n_confirmed=1, compiler=compiler)

    def of_window(n: int, compiler: Compiler | None = None) -> float:
        return kernels.measured(lambda: kernels.difference(logits(n, compiler), alone[:, :n]))

    def compiled_difference(n: int) -> float:
        return kernels.difference(logits(n, Compiler()), logits(n))

    model.device = replace(model.device, attention_rows=0)
    for n in {1, min(ROLLED_BACK, result.widest[None])}:
        result.compiled = max(result.compiled, kernels.measured(partial(compiled_difference, n)))
    n = min(FEW + 1, result.widest[None])
    model.device = replace(model.device, attention_rows=group_size(n, *_heads_of(model)))
    result.grouped = of_window(n)
    model.device = result.device
    compiler = Compiler()
    result.windows = {str(n): of_window(n, compiler) for n in WIDTHS}
    if (n := min(ROLLED_BACK, result.widest[None])) > 1:
        logits(n)
        rows.keep([kept := max(n - 2, 1)])
        after = rows.run(model, window[:, kept : kept + 1])
        result.rolled_back = kernels.difference(after, alone[:, kept : kept + 1])


def _prompt(model: Any) -> mx.array:
    return (mx.arange(12) * 977 + 11) % model.vocab_size


def _prefilled(model: Any, prompts: mx.array) -> Rows:
    """Rows of prompts [B, T]."""
    (B, T), kv = prompts.shape, KVOptions()
    rows = Rows(model, kv)
    rows.join([open_prompt_cache(model, None)] * B, [kv] * B)
    mx.eval(rows.run(model, prompts), rows.states)
    rows.keep([T] * B)
    return rows


def _test_head(model: Any, result: SelfTest) -> None:
    if has_head(model):
        result.head_copies = _head_copies(model)
        result.key_seconds = _key_seconds(model)
        result.seconds, result.draft_cost = _step_seconds(model, _prompt(model))


def _head_copies(model: Any) -> int:
    """How often drafts in one graph copy the head's keys and values, by the peak of memory: see docs/develop/passes.md."""
    norm = model.mtp.pre_fc_norm_hidden.weight
    cache = model.head_layer.make_cache()
    token = mx.zeros((1, 1), mx.uint32)
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


def _key_seconds(model: Any) -> dict[str, float]:
    """As in ``SelfTest``, without drafts and with ``N_DRAFTS``, each of which the head's layer attends for."""
    device = model.device
    n_layers = len(model.attention_layers)
    rows = pass_over(N_DRAFTS + 1, device, 1, None, None).attention_rows
    one, several = kernels.seconds_of_a_key(_heads_of(model), dtype_of(model), rows, device.fused, (1, N_DRAFTS + 1))
    return {"0": n_layers * one, str(N_DRAFTS): n_layers * several + N_DRAFTS * one}


class _EveryLength(Depth):
    """Chooses all draft lengths in turn, and keeps the shortest time of each: others may include a pause."""

    def __init__(self, max_drafts: int):
        super().__init__(max_drafts)
        self.shortest: dict[int, float] = {}
        # The first step of a draft length makes traces and is not timed.
        self.left = [k for k in range(max_drafts + 1) for _ in range(kernels.N_TIMES + 1)]

    def for_text(self) -> "_EveryLength":
        return self

    def next(self, *_: Any, **__: Any) -> Plan:
        return Plan(self.left.pop(0) if self.left else 0)

    def observe(self, plan: Plan, n_accepted: float, seconds: float | None, *_: Any, **__: Any) -> None:
        if seconds is not None:
            self.shortest[plan.k] = min(seconds, self.shortest.get(plan.k, seconds))


def _step_seconds(model: Any, prompt: mx.array) -> tuple[list[float], float]:
    """See ``step_seconds``. None if plain steps, or all others, were not timed in ``MAX_SECONDS``."""
    width = model.device.max_window(None)
    depth = _EveryLength(min(MAX_DRAFT_TOKENS, width - 1))
    end = perf_counter() + MAX_SECONDS
    steps = mtp_generate_step(prompt, model, max_tokens=1000, num_draft_tokens=depth, copy_drafts="off")
    with closing(steps):
        for _ in steps:
            if not depth.left or perf_counter() > end:
                break
    times = sorted(depth.shortest.items())
    passes = dict[int, float]()
    if len(times) < 2 or times[0][0] > 0:
        return [], 0.0
    for rows in (1, 8, 9, *ROWS):
        sequences = N_SEQUENCES if rows % N_SEQUENCES == 0 else 1
        longest = max((seconds * rows / n for n, seconds in passes.items()), default=0.0)
        if rows // sequences <= width and perf_counter() + longest * (kernels.N_TIMES + 1) < end:
            windows = mx.arange(rows).reshape(sequences, -1) % model.vocab_size
            passes[rows] = kernels.shortest(partial(_prefilled(model, windows).run, model, windows, n_confirmed=1))
    return step_seconds(on_lines(times, MAX_DRAFT_TOKENS), passes)


def step_seconds(seconds: Sequence[float], passes: Mapping[int, float]) -> tuple[list[float], float]:
    """The times of steps at ``DRAFT_LENGTHS`` and of a draft, given those of steps with 0 to 8 drafts and of passes by rows."""
    if not {1, 8, 9} <= passes.keys():
        return [*seconds], 0.0  # unknown
    draft = max(seconds[8] - seconds[0] - (passes[9] - passes[1]), 0.0) / 8
    # A pass over fewer rows may have been delayed.
    deeper = [seconds[7] + max(passes[n] - passes[8], 0.0) + (n - 8) * draft for n in ROWS if n in passes]
    return [*seconds, *deeper], draft / seconds[0]
