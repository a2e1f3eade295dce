"""Copy drafts on the four kinds of request whose answers copy from the prompt, beside the head, plain mlx-lm and Rapid-MLX.

    python -m benchmarks.copying                      the bundled demo, which is made to say the answers in benchmarks/answers
    python -m benchmarks.copying --model REPO         a model in its own words
    python -m benchmarks.copying --bits 4             the backbone quantized

The demo is too small to follow a request. So its logits are replaced by those of the given answer: verify passes and the
drafts of its head cost what they cost, and a draft is right where it is the answer's token. Its head, which knows Python only,
guesses such text less well than the heads of published models do; ``--acceptance 0.8`` makes its drafts right as often as that.

Rapid-MLX drafts with its own copy of the head, 4 tokens, and with its prompt lookup, if it is installed:

    pip install rapid-mlx && pip install --no-deps --upgrade 'mlx-lm>=0.32.2,<0.33' && pip install --no-deps -e .

In a round all runs generate at once in one process and take turns of 64 tokens. The time to the first token does not count.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, generation_stream
from tqdm import tqdm

import mlx_mtp
from mlx_mtp import prompts
from mlx_mtp.benchmark.runs import in_turn
from mlx_mtp.pacing.depth import MAX_DRAFT_TOKENS
from tests.support.scripted import Scripted

try:
    from rapid_mlx.spec_decode.mtp import generator as rapid
    from rapid_mlx.spec_decode.mtp.qwen3_5_inject import inject_mtp_support
except ImportError:
    rapid = None

ANSWERS = Path(__file__).parent / "answers"
PLAIN, MTP_4, MTP_4_COPIES, RAPID = "mlx-lm", "mtp 4", "mtp 4, copies", "Rapid-MLX lookup"
AUTO, COPIES = "mtp auto", "mtp auto, copies"
TURN = 64  # tokens


def reciting(model: Any, text: list[int], acceptance: float | None) -> Scripted:
    """A model that says a prompt and its answer. Its head is right that often, or as its own guesses are."""
    coins = None if acceptance is None else [random.Random(i).random() < acceptance for i in range(len(text))]
    return Scripted(model, text, coins and coins.__getitem__, says=True)


def runs_of(model: Any, rapid_model: Any) -> dict[str, Callable[..., Iterator[tuple[Any, ...]]]]:
    """Each starts a generation: (prompt [T], options) -> tokens with whether they were drafted last."""
    depths = {run: mlx_mtp.Depth(MAX_DRAFT_TOKENS) for run in (AUTO, COPIES)}

    def mtp(depth: Any, copy_drafts: str) -> Callable[..., Iterator[tuple[Any, ...]]]:
        return lambda wrap, prompt, n: mlx_mtp.mtp_generate_step(
            prompt, wrap(model), max_tokens=n, num_draft_tokens=depth, copy_drafts=copy_drafts
        )

    runs = {
        PLAIN: lambda wrap, prompt, n: ((*t, False) for t in generate_step(prompt, wrap(model), max_tokens=n)),
        MTP_4: mtp(4, "off"),
        MTP_4_COPIES: mtp(4, "auto"),
        AUTO: mtp(depths[AUTO], "off"),
        COPIES: mtp(depths[COPIES], "auto"),
    }
    if rapid_model is not None:
        runs[RAPID] = lambda wrap, prompt, n: rapid.mtp_generate_step(
            prompt, wrap(rapid_model), max_tokens=n, max_k=4, prompt_lookup_enabled=True
        )
    return runs


def measure(
    runs: dict[str, Any], wrap: Callable[[Any], Any], prompt: mx.array, n: int
) -> dict[str, tuple[float, float]]:
    """The seconds of all tokens but the first and the tokens a step, by run."""
    running = {run: start(wrap, prompt, n) for run, start in runs.items()}
    for steps in running.values():
        next(steps)
    seconds, drafted = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, 0)
    for i in range(-(-n // TURN)):
        for run in in_turn(list(runs), i):
            mx.synchronize(generation_stream)
            began = time.perf_counter()
            drafted[run] += sum(from_draft for *_, from_draft in islice(running[run], TURN))
            mx.synchronize(generation_stream)  # what has begun of the next token is this run's work
            seconds[run] += time.perf_counter() - began
    return {run: (seconds[run], (n - 1) / (n - 1 - drafted[run])) for run in runs}


def load(name: str, bits: int | None, dtype: mx.Dtype | None) -> tuple[Any, Any, Any]:
    """The model, its tokenizer, and Rapid-MLX's model of the same weights and the same head, or ``None``."""
    model, tokenizer = mlx_mtp.load(name, settings=False)
    models = [model]
    if rapid is not None:
        models.append(mlx_lm.load(name)[0])
    for m in models:
        if dtype is not None:
            m.set_dtype(dtype)
        if bits is not None:
            nn.quantize(m, 64, bits, class_predicate=lambda path, l: hasattr(l, "to_quantized") and "mtp." not in path)
    if rapid is None:
        return model, tokenizer, None
    with tempfile.TemporaryDirectory() as folder:
        mx.save_safetensors(f"{folder}/model-mtp.safetensors", dict(tree_flatten(model.mtp.parameters())))
        injected = inject_mtp_support(models[1], folder)
    return model, tokenizer, models[1].language_model if injected else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy drafts beside other ways to draft, on answers that copy.")
    parser.add_argument("--model", help="Local directory or repo (default: the demo, reciting).")
    parser.add_argument("--acceptance", type=float, help="With the demo: how often its head's drafts are right.")
    parser.add_argument("--bits", type=int, help="Quantize the backbone to this many bits.")
    parser.add_argument("--max-tokens", "-m", type=int, default=512, help="Tokens for each prompt (default: 512).")
    parser.add_argument("--repeat", type=int, default=3, help="Rounds (default: 3).")
    parser.add_argument("--only", help="Run only the prompts whose name contains this.")
    args = parser.parse_args()
    model, tokenizer, rapid_model = load(
        args.model or str(mlx_mtp.DEMO), args.bits, None if args.model else mx.bfloat16
    )
    runs = runs_of(model, rapid_model)
    print(f"{'prompt':17} {'run':17} tokens/step  tokens/s  to mlx-lm   low to high  to mtp auto")
    for name, text in prompts.copying_kinds().items():
        if args.only and args.only not in name:
            continue
        prompt, n, wrap = prompts.encode(tokenizer, text), args.max_tokens, lambda m: m
        if args.model is None:
            answer = tokenizer.encode("\n\n" + (ANSWERS / f"{name}.txt").read_text(encoding="utf-8"))
            n = min(n, len(answer))
            text_tokens = [*prompt.tolist(), *answer]
            wrap = lambda m, t=text_tokens: reciting(m, t, args.acceptance)  # noqa: E731
        measure(runs, wrap, prompt[:TURN], min(n, TURN))  # compiles; reading a long prompt takes long
        rounds = [
            measure(runs, wrap, prompt, n) for _ in tqdm(range(args.repeat), desc=name, disable=None, leave=False)
        ]
        for run in runs:
            ratios = [r[PLAIN][0] / r[run][0] for r in rounds]
            to_auto = statistics.median(r[AUTO][0] / r[run][0] for r in rounds)
            seconds, per_step = (statistics.median(column) for column in zip(*(r[run] for r in rounds)))
            print(
                f"{name:17} {run:17} {per_step:10.2f} {(n - 1) / seconds:9.1f} {statistics.median(ratios):10.2f}"
                f"   {min(ratios):.2f} to {max(ratios):.2f} {to_auto:11.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
