"""What each constant of Depth is worth: its speed on the simulated machines and texts of tests/depth_simulation.py without it.

    python -m scripts.ablate_depth                       all constants, 24 seeds: the table of docs/develop/depth.md
    python -m scripts.ablate_depth --seeds 6 --only FIRST_DEPTHS

Simulated time, so that nothing else on the machine disturbs it. Needs no model.
"""

import statistics
from typing import Any
from unittest.mock import patch

from mlx_mtp.pacing import depth, rates, step_times
from scripts.shared import script_parser
from tests.support.depth_simulation import LONG, cases, ratio

# Each constant at the value at which it does nothing, or next to nothing.
WITHOUT: dict[type, dict[str, Any]] = {
    rates.Rates: dict(FADING=1.0, PRIOR=1.0, WEIGHT=0.01),
    step_times.StepTimes: dict(FOLLOWS=0.0, GUESSED_SLOPE=0.0, STALE=10**9, _shrink=lambda *_: None, BEYOND_NOISE=1e30),
    depth.Depth: dict(FIRST_DEPTHS=(0, 0, 1, 1), PROBING=0.0, MARGIN=0.0, DOUBT=0.0, _trial=lambda *_: []),
}


def measure(n_seeds: int) -> str:
    """A row: auto to plain, worst and mean, to the best fixed depth, worst and mean, and the bounds of the tests missed."""
    to_plain, to_best, n_missed = [], [], 0
    for case in cases():
        seeds = range(n_seeds if case.text.n_tokens == LONG else 3 * n_seeds)
        plain, best = ratio(case, seeds, depth.Depth)
        to_plain.append(plain)
        if case.to_best:
            to_best.append(best)
        n_missed += plain < case.to_plain or best < case.to_best
    columns = [f(ratios) for ratios in (to_plain, to_best) for f in (min, statistics.mean)]
    return "".join(f" {x:.3f} |" for x in columns) + f" {n_missed} |"


def main() -> None:
    only = ("", "Only the constants whose name contains this.")
    args = script_parser(
        __doc__, seeds=(24, "Of a long text; three times as many of a short one."), only=only
    ).parse_args()
    print("| without | value | worst auto/plain | mean | worst auto/best | mean | bounds missed |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print(f"| nothing | |{measure(args.seeds)}", flush=True)
    for owner, name, value in ((owner, *item) for owner, values in WITHOUT.items() for item in values.items()):
        if args.only in name:
            shown = "" if callable(value) else f"{getattr(owner, name)} → {value}"
            with patch.object(owner, name, value):
                print(f"| `{name}` | {shown} |{measure(args.seeds)}", flush=True)


if __name__ == "__main__":
    main()
