"""How many drafts stand when sampling: rejection sampling, what theory allows it, and token match.

    python benchmarks/acceptance.py                        the bundled demo, temperature 0.7, top-p 0.95, top-k 20
    python benchmarks/acceptance.py --model REPO --temp 1

Rejection sampling of a draft from q against p accepts with probability sum(min(p, q)): the mean of that over the drafts that
were judged stands beside what was accepted, with the standard error of that.
"""

import argparse
import math
from unittest import mock

import mlx.core as mx
from mlx_lm import sample_utils
from tqdm import tqdm

import mlx_mtp
from mlx_mtp.checkpoint.load import DEMO
from mlx_mtp.decoding import acceptance, loop
from mlx_mtp.prompts import PYTHON


class Measured(acceptance.RejectionSampling):
    """Keeps, for every draft that was judged, the sum of min(p, q)."""

    def __init__(self, sampler):
        super().__init__(sampler)
        self.sums: list[mx.array] = []

    def judge(self, logprobs, drafts, records):
        verdict = super().judge(logprobs, drafts, records)
        if records:
            log_p = self.sampler.distribution(
                mx.concatenate(logprobs[: len(records)]), mx.concatenate([c for _, c in records])
            )
            log_q = mx.concatenate([q for q, _ in records])
            reached = mx.concatenate([mx.array([True]), mx.cumprod(verdict.stands)[:-1].astype(mx.bool_)])
            sums = mx.minimum(mx.exp(log_p), mx.exp(log_q)).sum(axis=-1)
            self.sums.append(mx.stack([sums * reached, reached.astype(mx.float32)]))
        return verdict


def reached(counts: loop.DraftCounts) -> int:
    """Drafts that were judged: those whose predecessors all stood."""
    return sum(counts.drafted[:1]) + sum(counts.accepted[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Acceptance when sampling.")
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--temp", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    model, tokenizer = mlx_mtp.load(args.model)
    options = dict(temp=args.temp, top_p=args.top_p, top_k=args.top_k)

    def run(depth, sampler, counts):
        for i, prompt in enumerate(tqdm(PYTHON, disable=None, leave=False)):
            mx.random.seed(i)
            steps = mlx_mtp.mtp_generate_step(
                mx.array(tokenizer.encode(prompt)),
                model,
                max_tokens=args.max_tokens,
                num_draft_tokens=depth,
                sampler=sampler,
                counts=counts,
            )
            for _ in steps:
                pass

    print("depth  rejection sampling  sum of min(p, q)  token match   (of the drafts that were judged)")
    for depth in (1, 2, 3, 4):
        measured = Measured(mlx_mtp.make_sampler(**options))
        rejection, match = loop.DraftCounts(), loop.DraftCounts()
        with mock.patch.object(loop, "make_acceptance", return_value=measured):
            run(depth, None, rejection)
        run(depth, sample_utils.make_sampler(**options), match)
        theory, n = (x.item() for x in sum(s.sum(axis=1) for s in measured.sums))
        rate = sum(rejection.accepted) / reached(rejection)
        error = math.sqrt(rate * (1 - rate) / n)
        print(
            f"{depth:5}  {rate:.3f} +- {error:.3f}      {theory / n:16.3f}  {sum(match.accepted) / reached(match):11.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
