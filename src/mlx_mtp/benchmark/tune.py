"""``mlx_mtp benchmark --tune``: measure settings on this machine, for these prompts.

First it measures ways to run passes: compiled, in pieces, and with attention over a window in groups of rows. Then plain
decoding alternates with auto and fixed draft lengths, with each cheaper form of the drafts, and with a combination of the forms
that gained.
"""

import copy
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.settings import cheapen_drafts
from ..cli.display import alternate, table
from ..core.batch.generate_step import prefill
from ..core.caches.prompt_cache import PromptCache, make_prompt_cache
from ..core.caches.rows import KVOptions, Rows
from ..core.decoding.counts import DraftCounts
from ..core.layers.compiled import Compiler
from ..core.layers.drafting import MAX_WINDOW, Settings
from ..core.layers.layer import group_size
from ..core.layers.passes import on_metal
from ..core.pacing.depth import MAX_DRAFT_TOKENS, Depth
from ..core.pacing.step_times import times_of
from .measure import NO_COPIES, PLAIN, Generation, Run, generate, speed, sum_counts

OFF, AUTO = Settings(0), Settings("auto")
FIXED = [Settings(k) for k in (1, 2, 3, 4)]
HEAD_BITS = (8, 4)
DRAFT_VOCAB = 32768  # tokens
P_MIN = (0.3, 0.6)
FIXED_GAIN = 0.05  # required of a fixed draft length over auto, since only auto adapts to other kinds of text
WINDOWS = (1, 4)  # tokens: a plain step, and one with three drafts
PIECES = (4, 8)  # attention layers
CONTEXT = 4096  # tokens before the windows in which attention is timed
N_CALLS = 4  # a round
WAY = ("compiled", "pieces", "attention_rows")  # fields of settings about passes
Seconds = dict[tuple[int, Settings], list[float]]  # of each round, by window and way to run passes


@dataclass
class Measured:
    settings: Settings
    ratios: list[float]  # by round
    counts: DraftCounts = field(default_factory=DraftCounts)
    tps: float = 0.0  # tokens per second after the first token, the median of the rounds

    @property
    def low(self) -> float:
        return min(self.ratios)

    @property
    def high(self) -> float:
        return max(self.ratios)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def beats(a: Measured, b: Measured) -> bool:
    """Whether ``a`` is faster than ``b`` by more than the spread: its lowest ratio is above the highest of ``b``."""
    fixes_auto = a.settings.num_draft_tokens != "auto" and b.settings.num_draft_tokens == "auto"
    return a.low > b.high * (1 + FIXED_GAIN if fixes_auto else 1)


def recommend(measured: Sequence[Measured]) -> Measured:
    """Start with the simplest settings, which are first, and move to the next settings that beat the current ones."""
    best = measured[0]
    while (better := next((m for m in measured if beats(m, best)), None)) is not None:
        best = better
    return best


def combine(base: Measured, measured: Sequence[Measured]) -> list[Settings]:
    """Combine the fastest form of each kind, if two or more kinds have a form that beats ``base``."""
    best: dict[str, Measured] = {}
    for m in measured:
        for name in ("mtp_bits", "draft_head_bits", "draft_vocab", "draft_p_min"):
            faster = beats(m, base) and (name not in best or m.ratio > best[name].ratio)
            if getattr(m.settings, name) and faster:
                best[name] = m
    values = {name: getattr(m.settings, name) for name, m in best.items()}
    return [replace(base.settings, seconds={}, **values)] if len(values) > 1 else []


def show(measured: Sequence[Measured]) -> str:
    rows = [["settings", "ratio", "lowest", "highest", "tokens/s", "accepted first", "tokens/step"]]
    for m in measured:
        drafted, accepted = m.counts.drafted, m.counts.accepted
        rows.append([str(m.settings), *(f"{x:.2f}" for x in (m.ratio, m.low, m.high)), f"{m.tps:.1f}"])
        if drafted:
            rows[-1] += [f"{accepted[0] / drafted[0]:.2f}", f"{1 + sum(accepted) / drafted[0]:.2f}"]
    lines = table(rows)
    return "\n".join([*lines, f"\nFastest beyond the spread of the rounds: {recommend(measured).settings}"])


def tune(
    model: Any, tokenizer: TokenizerWrapper, prompts: Mapping[str, mx.array], *, max_tokens: int = 128, repeat: int = 5
) -> list[Measured]:
    """Measure settings, the simplest first, as ``measure``. The model was loaded with ``draft_vocab=0, settings=False``."""
    with wired_limit(model, [generation_stream]):
        way = fastest_way(model, max(prompts.values(), key=len), repeat)
        run = partial(measure, model, tokenizer, prompts, max_tokens=max_tokens, repeat=repeat)
        fields = {name: getattr(way, name) for name in WAY}
        off, *simple = (replace(settings, **fields) for settings in (OFF, AUTO, *FIXED))
        measured = run([off, *simple])
        best = recommend(measured)
        base = best if best is not measured[0] else measured[1]
        k = base.settings.num_draft_tokens
        measured += run([off, *(replace(form, num_draft_tokens=k, **fields) for form in cheaper(model))])[1:]
        if combined := combine(base, measured):
            measured += run([off, *combined])[1:]
    return measured


def cheaper(model: Any) -> list[Settings]:
    forms = []
    if not any(hasattr(m, "bits") for _, m in model.mtp.named_modules()):
        forms += [Settings(mtp_bits=bits) for bits in HEAD_BITS]
    layer = model.output_layer
    forms += [Settings(draft_head_bits=bits) for bits in HEAD_BITS if bits < getattr(layer, "bits", 16)]
    forms.append(Settings(draft_vocab=min(DRAFT_VOCAB, layer.weight.shape[0] // 4)))
    return forms + [Settings(draft_p_min=p) for p in P_MIN]


def measure(
    model: Any,
    tokenizer: TokenizerWrapper,
    prompts: Mapping[str, mx.array],
    chosen: Sequence[Settings],
    *,
    max_tokens: int,
    repeat: int,
) -> list[Measured]:
    """Measure settings, alternating. The first are those of plain decoding."""
    # Each auto run begins with the times of the run before, as in normal use.
    depths = {settings: Depth(MAX_DRAFT_TOKENS, times=copy.deepcopy(times_of(model))) for settings in chosen}

    def one(prompt: str, settings: Settings) -> Generation:
        k = settings.num_draft_tokens
        run: Run = NO_COPIES if k == "auto" else k or PLAIN
        options: dict[str, Any] = {"stop": tokenizer.eos_token_ids, "draft_p_min": settings.draft_p_min}
        with applied(model, settings, tokenizer):
            return generate(model, prompts[prompt], max_tokens, run, depths[settings], **options)

    by_length = sorted(prompts, key=lambda prompt: prompts[prompt].size)
    rounds = alternate(chosen, by_length, repeat, one)
    measured = []
    for settings in chosen:
        of_settings, of_plain = ([[r[p, s] for p in prompts] for r in rounds] for s in (settings, chosen[0]))
        speeds = list(map(speed, of_settings))
        ratios = [s / p for s, p in zip(speeds, map(speed, of_plain))]
        counts = sum_counts([generation.counts for made in of_settings for generation in made])
        # Only auto measures times.
        times = depths[settings].times.estimate if settings.num_draft_tokens == "auto" else []
        timed = replace(settings, seconds=dict(enumerate(times)))
        measured.append(Measured(timed, ratios, counts, statistics.median(speeds)))
    return measured


@contextmanager
def applied(model: Any, settings: Settings, tokenizer: Any = None) -> Iterator[None]:
    """A context in which the model uses these settings, with a tokenizer for a draft vocabulary."""
    before, layers = copy.copy(model.drafting), model.mtp.leaf_modules()
    try:
        cheapen_drafts(model, tokenizer, settings.draft_vocab, settings.mtp_bits, settings.draft_head_bits)
        lm_head = model.drafting.lm_head
        mx.eval(model.mtp.parameters(), [] if lm_head is None else lm_head.layers[0].parameters())
        for name in WAY:
            setattr(model.drafting, name, getattr(settings, name))
        yield
    finally:
        model.mtp.update_modules(layers)
        for name in ("lm_head", *WAY):
            setattr(model.drafting, name, getattr(before, name))


def fastest_way(model: Any, prompt: mx.array, repeat: int) -> Settings:
    """The fastest way after a prompt [T]: of all over short windows, and on Metal of attention with and without groups."""
    n_attention = sum(not layer.is_linear for layer in model.layers)
    others = [Settings(compiled=False), *(Settings(pieces=n) for n in PIECES if n < n_attention)]
    best = _fastest(model, prompt, WINDOWS, [Settings(), *others], repeat)
    (layer,) = model.mtp.layers
    heads = layer.self_attn
    max_rows = group_size(MAX_WINDOW, heads.num_attention_heads, heads.num_key_value_heads, heads.head_dim)
    if not on_metal() or max_rows == MAX_WINDOW:
        return best
    long_prompt = mx.tile(prompt, -(-CONTEXT // prompt.size))[:CONTEXT]
    return _fastest(model, long_prompt, (max_rows + 1, MAX_WINDOW), [best, replace(best, attention_rows=0)], repeat)


def _fastest(model: Any, prompt: mx.array, windows: Sequence[int], ways: list[Settings], repeat: int) -> Settings:
    """The first way, unless every round of another way was faster than all of its rounds, for all windows."""
    seconds, best = time_ways(model, prompt, windows, ways, repeat), ways[0]
    for way in ways[1:]:
        if all(max(seconds[n, way]) < min(seconds[n, best]) for n in windows):
            best = way
    return best


def time_ways(model: Any, prompt: mx.array, windows: Sequence[int], ways: list[Settings], repeat: int) -> Seconds:
    entries, compiler, rows = make_prompt_cache(model), Compiler(), Rows(model, kv := KVOptions())
    prefill(prompt, model, prompt_cache=entries)
    rows.join([PromptCache(entries, len(model.layers))], [kv])
    del entries  # MLX writes keys and values in place only if nothing else holds them

    def verify(_: int, name: str) -> float:
        n, way = kinds[name]
        window = mx.repeat(prompt[None, -1:], n, axis=1)  # [1, n]
        with applied(model, way):
            start = time.perf_counter()
            mx.eval(rows.run(model, window, return_hidden=True, n_confirmed=1, compiler=compiler))
            return time.perf_counter() - start

    calls, kinds = range(N_CALLS), {f"passes over {n} tokens, {way}": (n, way) for n in windows for way in ways}
    rounds = alternate(list(kinds), calls, repeat, verify)
    return {kind: [statistics.median(made[i, name] for i in calls) for made in rounds] for name, kind in kinds.items()}
