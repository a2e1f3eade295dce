"""The acceptance rate of sampled drafts, by position: rejection sampling, coupled drafts and token match.

    python -m benchmarks.acceptance                        the bundled demo, with and without filters
    python -m benchmarks.acceptance --model REPO --temps 1 --depths 2

The rate of a position counts the drafts whose predecessors were accepted, with its standard error.
"""

import math
from collections import deque
from typing import get_args

import mlx.core as mx
from tqdm import tqdm

import mlx_mtp
from mlx_mtp.core.sampling.sampler import AcceptanceName
from mlx_mtp.prompts import PYTHON
from scripts.shared import script_parser

FILTERS = {"top_p": 0.95, "top_k": 20}


def measure(model, prompts: list[mx.array], depth: int, max_tokens: int, **options) -> mlx_mtp.DraftCounts:
    """Generate from each prompt, with a seed of its own."""
    counts = mlx_mtp.DraftCounts()
    how = {"max_tokens": max_tokens, "num_draft_tokens": depth, "counts": counts}
    for i, prompt in enumerate(tqdm(prompts, disable=None, leave=False)):
        mx.random.seed(i)
        sampler = mlx_mtp.make_sampler(**options, seed=i if options["acceptance"] == "coupled" else None)
        deque(mlx_mtp.mtp_generate_step(prompt, model, sampler=sampler, **how), maxlen=0)
    return counts


def show(counts: mlx_mtp.DraftCounts) -> str:
    """The acceptance rate of each position given that those before it were accepted."""
    cells = []
    for drafted, accepted, before in zip(counts.drafted, counts.accepted, [counts.drafted[0], *counts.accepted]):
        n = min(drafted, before)  # the last step of a text drafts fewer
        rate = accepted / n if n else math.nan
        cells.append(f"{rate:.3f} +- {math.sqrt(rate * (1 - rate) / n) if n else math.nan:.3f}")
    return "  ".join(cells)


def main() -> None:
    depths = ([1, 3], "Drafts in a step.")
    flags = dict(temps=([0.5, 0.7, 1.0], "Temperatures."), depths=depths, max_tokens=(256, "Tokens for each prompt."))
    args = script_parser(__doc__, model=str(mlx_mtp.DEMO), **flags).parse_args()
    model, tokenizer = mlx_mtp.load(args.model)
    prompts = [mx.array(tokenizer.encode(text)) for text in PYTHON]
    print("temp  filters                 depth  acceptance  rate by position")
    for temp in args.temps:
        for filters in ({}, FILTERS):
            words = ", ".join(f"{name} {value}" for name, value in filters.items()) or "none"
            for depth in args.depths:
                for acceptance in get_args(AcceptanceName):
                    options = {"temp": temp, "acceptance": acceptance, **filters}
                    counts = measure(model, prompts, depth, args.max_tokens, **options)
                    print(f"{temp:4}  {words:22}  {depth:5}  {acceptance:10}  {show(counts)}", flush=True)


if __name__ == "__main__":
    main()
