"""JSON of a schema with drafts: speed relative to plain mlx-lm, which has the same grammar, and what came of the drafts.

    python -m benchmarks.grammar                 the bundled demo
    python -m benchmarks.grammar --model REPO    another model

The demo has not learned JSON, so its values mean nothing; keys, punctuation and types are the grammar's. "free" is the same
prompt without a grammar. All runs alternate, and the time to the first token does not count.
"""

import statistics
import time
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

import mlx_mtp
from benchmarks.timing import take_turns
from scripts.shared import script_parser

PROMPT = '"""An order."""\nORDER = '


def schema_of(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


ITEM = schema_of(
    name={"type": "string", "maxLength": 20},
    quantity={"type": "integer", "minimum": 1, "maximum": 99},
    description={"type": "string", "maxLength": 40},
    category={"enum": ["tools", "books", "food"]},
)
ORDER = schema_of(
    items={"type": "array", "items": ITEM, "minItems": 5, "maxItems": 5},
    total_quantity={"type": "integer", "minimum": 5, "maximum": 999},
)
DRAFTS: dict[str, int | str] = {"head, 2 drafts": 2, "auto": "auto"}
PLAIN = "plain mlx-lm"
FREE = "free: "


def main() -> None:
    args = script_parser(__doc__, model=str(mlx_mtp.DEMO), max_tokens=256, repeat=(5, "Rounds.")).parse_args()
    model, tokenizer = mlx_mtp.load(args.model)
    prompt, counts = mx.array(tokenizer.encode(PROMPT)), {}

    def generate(run: str) -> tuple[list[int], float]:
        """(tokens, tokens per second behind the first)"""
        processors = [] if run.startswith(FREE) else [mlx_mtp.make_grammar(tokenizer, json_schema=ORDER)]
        options: dict[str, Any] = {"max_tokens": args.max_tokens, "logits_processors": processors}
        counts[run] = mlx_mtp.DraftCounts()
        if (k := DRAFTS.get(run.removeprefix(FREE))) is None:
            steps = generate_step(prompt, model, **options)
        else:
            drafts = {"num_draft_tokens": k, "copy_drafts": "off", "counts": counts[run]}
            steps = mlx_mtp.mtp_generate_step(prompt, model, **drafts, **options)
        tokens, start = [], 0.0
        for token, *_ in steps:
            start = start or time.perf_counter()
            tokens.append(token)
            if token in tokenizer.eos_token_ids:
                break
        return tokens, (len(tokens) - 1) / (time.perf_counter() - start)

    names = [free + run for free in ("", FREE) for run in (PLAIN, *DRAFTS)]
    results = take_turns({run: partial(generate, run) for run in names}, args.repeat)
    print(f"{'':22}{'tokens':>7}{'to plain':>10}{'head':>12}{'forced':>12}")
    is_same = True
    for run, rounds in results.items():
        plain, c = results[FREE + PLAIN if run.startswith(FREE) else PLAIN], counts[run]
        is_same &= rounds[0][0] == plain[0][0]
        ratio = statistics.median(ours / theirs for (_, ours), (_, theirs) in zip(rounds, plain))
        drafts = [f"{sum(c.of(source).accepted)}/{sum(c.of(source).drafted)}" for source in ("head", "grammar")]
        print(f"{run:22}{len(rounds[0][0]):7}{ratio:10.2f}{drafts[0]:>12}{drafts[1]:>12}")
    print("The tokens of each run are those of plain mlx-lm." if is_same else "TOKENS DIFFER.")


if __name__ == "__main__":
    main()
