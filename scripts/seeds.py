"""One text for each seed: at every depth, with auto, without MTP, with a draft vocabulary and with a quantized draft lm_head.

    python -m scripts.seeds               200 seeds, six sets of sampling options, a tiny random model
    python -m scripts.seeds --seeds 20    fewer

Exit status 1 if a seed gave two texts. The tests run a sample of this.
"""

import argparse
import sys

import mlx.core as mx
from tqdm import tqdm

from mlx_mtp import make_sampler
from mlx_mtp.models.draft_lm_head import DraftLMHead
from tests.support.decoding import PROMPT, mtp, plain
from tests.support.models import tiny_model

OPTIONS = [
    {"temp": 1.0},
    {"temp": 0.7, "top_p": 0.95, "top_k": 20},
    {"temp": 1.5, "min_p": 0.05},
    {"temp": 0.3},
    {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.2},
    {"temp": 1.0, "top_p": 0.9, "top_k": 10, "min_p": 0.02, "xtc_probability": 0.3},
]


def texts(model, sampler, n: int):
    """(what drafts, the text) for each way to draft, and without drafts."""
    for depth in (0, 1, 4, "auto"):
        yield f"depth {depth}", mtp(PROMPT, model, max_tokens=n, num_draft_tokens=depth, sampler=sampler)
    heads = {
        "draft vocabulary": DraftLMHead(model.output_layer, [*range(10)]),
        "4-bit draft lm_head": DraftLMHead(model.output_layer, None, 4),
    }
    for name, lm_head in heads.items():
        model.drafting.lm_head = lm_head
        yield name, mtp(PROMPT, model, max_tokens=n, num_draft_tokens=2, sampler=sampler)
        model.drafting.lm_head = None
    yield "without MTP", plain(PROMPT, model, max_tokens=n, sampler=sampler.at(0))


def main() -> None:
    parser = argparse.ArgumentParser(description="One text for each seed, whatever drafts.")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args()
    model = tiny_model("qwen3_5")
    n_texts = n_different = 0
    for options in OPTIONS:
        seen = set()
        for seed in tqdm(range(args.seeds), desc=str(options), disable=None, leave=False):
            mx.random.uniform()  # MLX's random state has no part in it
            (_, first), *others = texts(model, make_sampler(**options, seed=seed), args.max_tokens)
            seen.add(tuple(first))
            n_texts += 1 + len(others)
            for name, text in others:
                if text != first:
                    n_different += 1
                    print(f"{options}, seed {seed}: {name} gives another text than depth 0")
        print(f"{options}: {args.seeds} seeds, {len(seen)} texts", flush=True)
    print(f"{n_texts} generations, {n_different} with another text for their seed")
    sys.exit(n_different > 0)


if __name__ == "__main__":
    main()
