"""What ``python -m mlx_mtp.benchmark --tune`` does: find the settings that are fastest on this machine, for these prompts.

Plain decoding takes turns with auto and fixed depths, then with each cheaper form of the drafts, then with those together
that gained. What is recommended beats what is simpler by more than the spread of the rounds.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit
from tqdm import tqdm

from ..checkpoint.drafting import cheapen_drafts
from ..checkpoint.vocabulary import LIST_FILE
from ..decoding.depth import MAX_DRAFT_TOKENS, Depth
from ..decoding.pace import DraftCounts
from ..models.drafting import Settings
from .runs import PLAIN, Generation, check_sizes, generate, in_turn, sum_counts

OFF, AUTO = Settings(0), Settings("auto")
FIXED = [Settings(k) for k in (1, 2, 3, 4)]
BITS = (8, 4)
ROWS = 32768  # of a draft vocabulary
P_MIN = (0.3, 0.6)
FIXED_GAIN = 0.05  # that a fixed depth must have over auto, which alone follows a text of another kind


@dataclass
class Measured:
    """Settings beside plain decoding, on all prompts together."""

    settings: Settings
    ratios: list[float]  # of each round
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
    """Whether settings are faster than others by more than the spread: their lowest ratio above the others' highest."""
    fixed = a.settings.num_draft_tokens != "auto" and b.settings.num_draft_tokens == "auto"
    return a.low > b.high * (1 + FIXED_GAIN if fixed else 1)


def recommend(measured: Sequence[Measured]) -> Measured:
    """From the simplest on, the simplest settings that beat those before, until none do.

    Args:
        measured (Sequence[Measured]): The simplest first.
    """
    best = measured[0]
    while (better := next((m for m in measured if beats(m, best)), None)) is not None:
        best = better
    return best


def cheaper(model, path: Path) -> list[Settings]:
    """Each form of the drafts that is cheaper than the model's own, and fewer; ``path`` is the checkpoint's folder."""
    forms = []
    if not any(hasattr(m, "bits") for _, m in model.mtp.named_modules()):
        forms += [Settings(mtp_bits=bits) for bits in BITS]
    layer = model.output_layer
    forms += [Settings(draft_head_bits=bits) for bits in BITS if bits < getattr(layer, "bits", 16)]
    if not (path / LIST_FILE).exists():  # which is the user's own choice
        forms.append(Settings(draft_vocab=min(ROWS, layer.weight.shape[0] // 4)))
    return forms + [Settings(draft_p_min=p) for p in P_MIN]


def together(base: Measured, measured: Sequence[Measured]) -> list[Settings]:
    """The fastest form of each kind, together, where two or more kinds have one that beats ``base``."""
    best: dict[str, Measured] = {}
    for m in measured:
        for name in ("mtp_bits", "draft_head_bits", "draft_vocab", "draft_p_min"):
            faster = beats(m, base) and (name not in best or m.ratio > best[name].ratio)
            if getattr(m.settings, name) and faster:
                best[name] = m
    values = {name: getattr(m.settings, name) for name, m in best.items()}
    return [replace(base.settings, seconds={}, **values)] if len(values) > 1 else []


def tune(
    model, tokenizer, path: Path, prompts: Mapping[str, mx.array], *, max_tokens: int = 128, repeat: int = 5
) -> list[Measured]:
    """
    Measure settings.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load(..., draft_vocab=0, settings=False)``.
        tokenizer (TokenizerWrapper): Its tokenizer.
        path (Path): The checkpoint's folder.
        prompts (Mapping[str, mx.array]): The tokens of each, [T], by name.
        max_tokens (int): Tokens to generate for each, whatever they are: no token ends a run. Default: ``128``.
        repeat (int): The number of rounds. Default: ``5``.

    Returns:
        List[Measured]: The simplest settings first.
    """
    check_sizes(max_tokens, repeat)

    @contextmanager
    def set_to(settings: Settings) -> Iterator[None]:
        layers = model.mtp.leaf_modules()
        try:
            chosen = (settings.draft_vocab, settings.mtp_bits, settings.draft_head_bits)
            cheapen_drafts(model, tokenizer, path, *chosen)
            mx.eval(
                model.mtp.parameters(),
                [] if model.drafting.lm_head is None else model.drafting.lm_head.layers[0].parameters(),
            )
            yield
        finally:
            model.mtp.update_modules(layers)
            model.drafting.lm_head = None

    def beside_plain(others: list[Settings]) -> list[Measured]:
        arms = [OFF, *others]
        # Auto begins a run with the times of the one before, as it then will.
        depths = [Depth(MAX_DRAFT_TOKENS) for _ in arms]

        def run(arm: int, tokens: mx.array, n: int) -> Generation:
            k = arms[arm].num_draft_tokens
            return generate(model, tokens, n, depths[arm] if k == "auto" else k or PLAIN, arms[arm].draft_p_min)

        rounds: list[list[list[Generation]]] = []  # [round][arm][prompt]
        with tqdm(total=repeat * len(arms) * len(prompts), disable=None) as bar:
            for i in range(-1, repeat):  # the first is to warm up
                runs: list[list[Generation]] = [[] for _ in arms]
                for arm in in_turn(range(len(arms)), i):
                    bar.set_description("warming up" if i < 0 else str(arms[arm]))
                    with set_to(arms[arm]):
                        if i < 0:
                            run(arm, min(prompts.values(), key=len), min(max_tokens, 32))
                            continue
                        for tokens in prompts.values():
                            runs[arm].append(run(arm, tokens, max_tokens))
                            bar.update()
                rounds += [runs] if i >= 0 else []
        plain = [r[0] for r in rounds]
        return [
            measured_of(replace(s, seconds=dict(depths[arm].times.seconds)), plain, [r[arm] for r in rounds])
            for arm, s in enumerate(arms)
        ]

    with wired_limit(model, [generation_stream]):  # type: ignore[list-item]
        measured = beside_plain([AUTO, *FIXED])
        best = recommend(measured)
        base = best if best.settings != OFF else measured[1]
        forms = [replace(form, num_draft_tokens=base.settings.num_draft_tokens) for form in cheaper(model, path)]
        if forms:
            measured += beside_plain(forms)[1:]
        if both := together(base, measured):
            measured += beside_plain(both)[1:]
    return measured


def measured_of(settings: Settings, plain: list[list[Generation]], rounds: list[list[Generation]]) -> Measured:
    """What the rounds say of settings; [round][prompt]."""
    base, seconds = ([sum(g.seconds for g in r) for r in of] for of in (plain, rounds))
    ratios = [p / s for p, s in zip(base, seconds)]
    n_tokens = sum(len(g.tokens) - 1 for g in rounds[0])
    counts = sum_counts([g.counts for r in rounds for g in r])
    return Measured(settings, ratios, counts, n_tokens / statistics.median(seconds))


def show(measured: Sequence[Measured]) -> str:
    """The table as lines for people, and the recommendation."""
    width = max(len(str(m.settings)) for m in measured)
    lines = [f"{'settings':{width}}  ratio   low to high  tokens/s  accepted first  tokens/step"]
    for m in measured:
        drafted, accepted = m.counts.drafted, m.counts.accepted
        first = f"{accepted[0] / drafted[0]:.2f}" if drafted else ""
        per_step = f"{1 + sum(accepted) / drafted[0]:.2f}" if drafted else ""
        spread = f"{m.low:.2f} to {m.high:.2f}"
        lines.append(
            f"{m.settings!s:{width}}  {m.ratio:5.2f}  {spread:>12}  {m.tps:8.1f}  {first:>14}  {per_step:>11}".rstrip()
        )
    lines.append(f"\nRecommended: {recommend(measured).settings}")
    return "\n".join(lines)
