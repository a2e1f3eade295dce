"""JSON of a schema with drafts: speed relative to plain mlx-lm, which has the same grammar, and what came of the drafts.

    python -m benchmarks.grammar                 the bundled demo
    python -m benchmarks.grammar --model REPO    another model

The demo has not learned JSON, so its values mean nothing; keys, punctuation and types are the grammar's. "free" is the same
prompt without a grammar. All runs take turns, and the time to the first token does not count.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from tqdm import tqdm

import mlx_mtp
from mlx_mtp.benchmark.runs import in_turn
from mlx_mtp.decoding.loop import plain_generate_step

PROMPT = '"""An order."""\nORDER = '
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
        "description": {"type": "string", "maxLength": 40},
        "category": {"enum": ["tools", "books", "food"]},
    },
    "required": ["name", "quantity", "description", "category"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        "items": {"type": "array", "items": ITEM, "minItems": 5, "maxItems": 5},
        "total_quantity": {"type": "integer", "minimum": 5, "maximum": 999},
    },
    "required": ["items", "total_quantity"],
    "additionalProperties": False,
}
PLAIN, FREE_PLAIN = "plain mlx-lm", "free: plain mlx-lm"
HEAD: dict[str, Any] = {"num_draft_tokens": 2, "copy_drafts": "off"}
AUTO: dict[str, Any] = {"num_draft_tokens": "auto", "copy_drafts": "off"}


def main() -> None:
    parser = argparse.ArgumentParser(description="JSON of a schema with drafts.")
    parser.add_argument("--model", default=str(mlx_mtp.DEMO))
    parser.add_argument("--max-tokens", "-m", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5, help="The number of rounds (default: 5).")
    args = parser.parse_args()
    model, tokenizer = mlx_mtp.load(args.model)
    prompt, counts = mx.array(tokenizer.encode(PROMPT)), defaultdict(mlx_mtp.DraftCounts)

    def grammar() -> list[Any]:
        return [mlx_mtp.make_grammar(tokenizer, json_schema=ORDER)]

    def drafting(run: str, options: dict[str, Any], is_free: bool) -> Iterator[tuple[Any, ...]]:
        counts[run] = mlx_mtp.DraftCounts()
        processors = [] if is_free else grammar()
        return mlx_mtp.mtp_generate_step(
            prompt, model, max_tokens=args.max_tokens, logits_processors=processors, counts=counts[run], **options
        )

    runs: dict[str, Callable[[str], Iterator[tuple[Any, ...]]]] = {
        PLAIN: lambda _: plain_generate_step(prompt, model, max_tokens=args.max_tokens, logits_processors=grammar()),
        "head, 2 drafts": lambda run: drafting(run, HEAD, False),
        "auto": lambda run: drafting(run, AUTO, False),
        FREE_PLAIN: lambda _: plain_generate_step(prompt, model, max_tokens=args.max_tokens),
        "free: head, 2 drafts": lambda run: drafting(run, HEAD, True),
        "free: auto": lambda run: drafting(run, AUTO, True),
    }
    speeds, texts = defaultdict(list), {}
    for i in tqdm(range(args.repeat), disable=None):
        for run in in_turn(list(runs), i):
            speed, texts[run] = measure(runs[run](run), tokenizer.eos_token_ids)
            speeds[run].append(speed)
    print(f"{'':22}{'tokens':>7}{'to plain':>10}{'head':>12}{'forced':>12}")
    for run, of_run in speeds.items():
        plain = speeds[FREE_PLAIN if run.startswith("free") else PLAIN]
        ratio, c = statistics.median(a / b for a, b in zip(of_run, plain)), counts[run]
        drafts = f"{sum(c.accepted)}/{sum(c.drafted)}", f"{sum(c.forced_accepted)}/{sum(c.forced)}"
        print(f"{run:22}{len(texts[run]):7}{ratio:10.2f}{drafts[0]:>12}{drafts[1]:>12}")
    same = all(text == texts[FREE_PLAIN if run.startswith("free") else PLAIN] for run, text in texts.items())
    print("The tokens of each run are those of plain mlx-lm." if same else "TOKENS DIFFER.")


def measure(steps: Iterator[tuple[Any, ...]], stop: set[int]) -> tuple[float, list[int]]:
    """(tokens per second behind the first, tokens)"""
    tokens: list[int] = []
    start = 0.0
    for token, *_ in steps:
        start = start or time.perf_counter()
        tokens.append(int(token))
        if tokens[-1] in stop:
            break
    return (len(tokens) - 1) / (time.perf_counter() - start), tokens


if __name__ == "__main__":
    main()
