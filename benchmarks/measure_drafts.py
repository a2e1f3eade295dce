"""What a draft vocabulary gains, and what it costs in acceptance.

    python -m benchmarks.measure_drafts                      the cost of a draft, at published shapes, random weights
    python -m benchmarks.measure_drafts --acceptance FILES   acceptance of the bundled demo's first draft, by vocabulary

The cost is the time of one pass of the head over one token, with its output layer and argmax. The two vocabularies alternate;
each figure is a median. The corpus is ranked as by ``mlx_mtp draft_vocab``.
"""

import statistics
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache

import mlx_mtp
from benchmarks.fit_cost import model_of
from benchmarks.timing import ratios, seconds, take_turns
from mlx_mtp.benchmark.synthetic import SHAPES
from mlx_mtp.checkpoint.vocabulary import always_in, select
from mlx_mtp.draft_vocab import count_tokens, rank
from mlx_mtp.layers.draft_lm_head import DraftLMHead, quantize_head
from mlx_mtp.prompts import PYTHON
from scripts.shared import script_parser

SIZES = {"0.8B": "0.8b-bf16", "4B": "4b-4bit", "27B": "27b-4bit"}  # of SHAPES
ROWS = 32768
# bits of (the output layer, the head's decoder layer)
PRECISIONS = ((16, 16), (4, 16), (4, 4))


def random_like(p: mx.array) -> mx.array:
    if p.dtype == mx.uint32:
        return mx.random.randint(0, 1 << 31, p.shape, dtype=mx.uint32)
    return (0.02 * mx.random.normal(p.shape)).astype(mx.bfloat16)


def output_layer(vocab_size: int, dims: int, bits: int) -> nn.Module:
    layer = nn.Linear(dims, vocab_size, bias=False)
    if bits < 16:
        layer = nn.QuantizedLinear(dims, vocab_size, bias=False, bits=bits, group_size=64)
    layer.update(tree_map(random_like, layer.parameters()))
    mx.eval(layer.parameters())
    return layer


def measure_cost(name: str, bits: int, mtp_bits: int, n_rows: int, repeat: int) -> None:
    """The time of a draft from all rows of an output layer, and from some of them."""
    model = model_of({**SHAPES[SIZES[name]], "tie_word_embeddings": True})
    vocab_size, dims = model.model.embed_tokens.weight.shape
    mtp = model.mtp
    mtp.update(tree_map(random_like, mtp.parameters()))
    if mtp_bits < 16:
        quantize_head(mtp, mtp_bits)
    full = DraftLMHead(output_layer(vocab_size, dims, bits), None)
    trimmed = DraftLMHead(full.layers[0], list(range(0, vocab_size, vocab_size // n_rows))[:n_rows])
    x, cache = mx.random.normal((1, 128, dims)).astype(mx.bfloat16), KVCache()
    mx.eval(mtp.parameters(), trimmed.layers[0].parameters(), mtp(x, x, cache))

    def draft(head: DraftLMHead) -> float:
        took = seconds(lambda: mx.eval(mx.argmax(head(mtp(x[:, :1], x[:, :1], cache))[:, -1], axis=-1)))
        cache.trim(1)
        return 1e3 * took

    times = take_turns({"full": lambda: draft(full), "trimmed": lambda: draft(trimmed)}, repeat + 2)
    a, b = (of[2:] for of in times.values())  # two rounds warm up
    medians = [statistics.median(x) for x in (a, b, ratios(a, b))]
    print("{:>5} {:>14} {:>10} {:>9.2f} ms {:>9.2f} ms {:>8.2f}".format(name, bits, mtp_bits, *medians))


def measure_acceptance(files: list[Path], max_tokens: int) -> None:
    model, tokenizer = mlx_mtp.load(str(mlx_mtp.DEMO), draft_vocab=0)
    vocab_size = model.output_layer.weight.shape[0]
    always, ranked = always_in(tokenizer, vocab_size), rank(count_tokens(tokenizer, files), vocab_size)
    hits: dict[str, list[int]] = {}
    for prompt in PYTHON:
        tokens = tokenizer.encode(prompt)
        steps = mlx_lm.stream_generate(model, tokenizer, tokens, max_tokens)
        text = tokens + [r.token for r in steps]
        _, hidden = model(mx.array([text]), return_hidden=True)
        # Row i is fed token i + 1 and guesses token i + 2; those within the prompt do not count.
        out = model.mtp(model.model.embed_tokens(mx.array([text[1:-1]])), hidden[:, :-2], KVCache())
        for size in (vocab_size, vocab_size // 2, vocab_size // 4, vocab_size // 8):
            orders = {"first ids": range(vocab_size), "ranked": ranked, "ranked, and the text's": ranked}
            for name, order in orders.items():
                head = DraftLMHead(model.output_layer, select(order, size, always))
                hit = hits.setdefault(f"{size:>5} {name}", [])
                for i in range(len(tokens) - 1, len(text) - 2):
                    if name.endswith("text's"):
                        head = head.with_tokens(text[: i + 2] if i < len(tokens) else text[i + 1 : i + 2])
                    hit.append(head.ids[mx.argmax(head(out[:, i : i + 1]))].item() == text[i + 2])
    print("acceptance rate of the first draft, by the token ids that it is chosen from")
    for name, hit in hits.items():
        print(f"{sum(hit) / len(hit):.3f} of {len(hit)} {name}")


def main() -> None:
    flags = dict(max_tokens=(256, "Tokens of each text."), rows=(ROWS, "Size of the draft vocabulary."))
    parser = script_parser(__doc__, repeat=(10, "Drafts with each vocabulary."), **flags)
    parser.add_argument("--acceptance", nargs="+", type=Path, metavar="FILE", help="The corpus to rank by.")
    parser.add_argument("--shapes", nargs="+", choices=SIZES, default=["0.8B"], help="Models (default: 0.8B).")
    args = parser.parse_args()
    if args.acceptance:
        measure_acceptance(args.acceptance, args.max_tokens)
        return
    print(f"model  lm_head, bits  head, bits    all rows  {args.rows} rows    ratio")
    for name in args.shapes:
        for bits, mtp_bits in PRECISIONS:
            measure_cost(name, bits, mtp_bits, args.rows, args.repeat)
            mx.clear_cache()


if __name__ == "__main__":
    main()
