"""``mlx_mtp benchmark --tune``: measure settings on this machine, for these prompts.

Plain decoding alternates with auto and fixed draft lengths, then with each cheaper form of the drafts and passes that are not
compiled, and then with a combination of those that gained.
"""

import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.settings import cheapen_drafts
from ..cli.display import alternate, table
from ..core.decoding.counts import DraftCounts
from ..core.drafts.settings import Settings
from ..core.pacing import MAX_DRAFT_TOKENS
from ..core.pacing.depth import Depth
from .measure import NO_COPIES, PLAIN, Generation, Run, generate, speed, sum_counts

OFF = Settings(0)
AUTO = Settings("auto")
FIXED = [Settings(k) for k in (1, 2, 3, 4)]
HEAD_BITS = (8, 4)
DRAFT_VOCAB = 32768  # tokens
P_MIN = (0.3, 0.6)
FIXED_GAIN = 0.05  # required of a fixed draft length over auto, since only auto adapts to other kinds of text


@dataclass
class Measured:
    settings: Settings
    ratios: list[float]  # by round
    counts: DraftCounts = field(default_factory=DraftCounts)
    tps: float = 0.0  # tokens per second after the first token, the median of the rounds

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def beats(a: Measured, b: Measured) -> bool:
    """Whether ``a`` is faster than ``b`` by more than the spread: its lowest ratio is above the highest of ``b``."""
    fixes_auto = a.settings.num_draft_tokens != "auto" and b.settings.num_draft_tokens == "auto"
    return min(a.ratios) > max(b.ratios) * (1 + FIXED_GAIN if fixes_auto else 1)


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
        for name in ("mtp_bits", "draft_head_bits", "draft_vocab", "draft_p_min", "compiled"):
            faster = beats(m, base) and (name not in best or m.ratio > best[name].ratio)
            if getattr(m.settings, name) != getattr(Settings, name) and faster:
                best[name] = m
    values = {name: getattr(m.settings, name) for name, m in best.items()}
    return [replace(base.settings, seconds={}, **values)] if len(values) > 1 else []


def show(measured: Sequence[Measured]) -> str:
    rows = [["settings", "ratio", "lowest", "highest", "tokens/s", "accepted first", "tokens/step"]]
    for m in measured:
        drafted = m.counts.drafted
        accepted = m.counts.accepted
        rows.append([str(m.settings), *(f"{x:.2f}" for x in (m.ratio, min(m.ratios), max(m.ratios))), f"{m.tps:.1f}"])
        if drafted:
            rows[-1] += [f"{accepted[0] / drafted[0]:.2f}", f"{1 + sum(accepted) / drafted[0]:.2f}"]
    lines = table(rows)
    return "\n".join([*lines, f"\nFastest beyond the spread of the rounds: {recommend(measured).settings}"])


def tune(
    model: Any, tokenizer: TokenizerWrapper, prompts: Mapping[str, mx.array], *, max_tokens: int = 128, repeat: int = 5
) -> list[Measured]:
    """Measure settings, the simplest first, as ``measure``. The model was loaded with ``draft_vocab=0, settings=False``."""
    with wired_limit(model, [generation_stream]):
        run = partial(measure, model, tokenizer, prompts, max_tokens=max_tokens, repeat=repeat)
        measured = run([OFF, AUTO, *FIXED])
        best = recommend(measured)
        base = best if best is not measured[0] else measured[1]
        k = base.settings.num_draft_tokens
        measured += run([OFF, *(replace(form, num_draft_tokens=k) for form in cheaper(model))])[1:]
        if combined := combine(base, measured):
            measured += run([OFF, *combined])[1:]
    return measured


def cheaper(model: Any) -> list[Settings]:
    """The forms that drafts of a model can have, and passes that are not compiled."""
    forms = [Settings(compiled=False)]
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
    device = model.device
    draft_settings = model.draft_settings
    layers = model.mtp.leaf_modules()
    # Each auto run begins with the times of the run before, as in normal use.
    depths = {settings: Depth(MAX_DRAFT_TOKENS, times=copy.deepcopy(model.pace.times)) for settings in chosen}

    def one(prompt: str, settings: Settings) -> Generation:
        k = settings.num_draft_tokens
        run: Run = NO_COPIES if k == "auto" else k or PLAIN
        options: dict[str, Any] = {"stop": tokenizer.eos_token_ids, "draft_p_min": settings.draft_p_min}
        try:
            cheapen_drafts(model, tokenizer, settings.draft_vocab, settings.mtp_bits, settings.draft_head_bits)
            lm_head = model.draft_settings.lm_head
            mx.eval(model.mtp.parameters(), [] if lm_head is None else lm_head.layers[0].parameters())
            model.device = replace(device, compiled=device.compiled and settings.compiled)
            return generate(model, prompts[prompt], max_tokens, run, depths[settings], **options)
        finally:
            model.mtp.update_modules(layers)
            model.device = device
            model.draft_settings = draft_settings

    by_length = sorted(prompts, key=lambda prompt: prompts[prompt].size)
    rounds = alternate(chosen, by_length, repeat, one)
    measured = []
    for settings in chosen:
        of_settings, of_plain = ([[r[p, s] for p in prompts] for r in rounds] for s in (settings, chosen[0]))
        speeds = list(map(speed, of_settings))
        ratios = [s / p for s, p in zip(speeds, map(speed, of_plain))]
        counts = sum_counts(generation.counts for made in of_settings for generation in made)
        # Only auto measures times.
        times = depths[settings].times.estimate if settings.num_draft_tokens == "auto" else []
        timed = replace(settings, seconds=dict(enumerate(times)))
        measured.append(Measured(timed, ratios, counts, statistics.median(speeds)))
    return measured
