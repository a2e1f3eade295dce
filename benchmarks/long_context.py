"""The speed of decoding after long prompts, beside mlx-lm's, and the memory beyond mlx-lm's.

    python -m benchmarks.long_context
    python -m benchmarks.long_context --shape wide      random weights, head dimension 256, four key-value heads

The keys and values of a prompt of 256 tokens are repeated up to each length, for mlx-lm and for us, so that no long prompt is
processed. Greedy, without copies. All runs of a length take turns in one process. "kept" is the speed relative to mlx-lm beside
that after the shortest prompt, and "drafted" the share of the tokens that were drafts. "memory beyond" is the peak less that of
mlx-lm and less the head's own cache, relative to mlx-lm's, with the weights. The times of attention are those of the keys
alone, as the test of the device measures them.
"""

import copy
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream

from benchmarks.synthetic import COMMON, synthetic_model
from benchmarks.timing import ratios, spread, take_turns
from mlx_mtp import DEMO, load, make_prompt_cache, mtp_generate_step
from mlx_mtp.checkpoint.checks.dtype import dtype_of
from mlx_mtp.checkpoint.checks.kernels import seconds_of_a_key
from mlx_mtp.cli.display import table
from mlx_mtp.core.caches.prompt_cache import PromptCache
from mlx_mtp.prompts import encode, python_beginnings
from scripts.shared import script_parser
from tests.support.decoding import prefill

WIDE = {
    **COMMON, "model_type": "qwen3_5", "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 8,
    "linear_num_value_heads": 16, "tie_word_embeddings": True,
}  # fmt: skip
BASE = 256  # tokens of the prompt that is repeated
PLAIN = "mlx-lm"
QUERIES = (1, 2, 4)


def repeated(model: Any, cache: list[Any], tokens: list[int], n: int) -> None:
    """Enlarge a prompt cache of ``BASE`` tokens to n, by its own keys and values."""
    own = PromptCache(cache, len(model.layers))
    for entry in (*own.backbone, own.head):
        if hasattr(entry, "offset"):
            size, times = n - (BASE - entry.offset), -(-n // entry.offset)  # the head's cache has one row less
            for name in ("keys", "values"):
                held = getattr(entry, name)[..., : entry.offset, :]
                setattr(entry, name, mx.contiguous(mx.tile(held, (1, 1, times, 1))[..., :size, :]))
            entry.offset = size
    own.record(n, (tokens * (-(-n // BASE)))[:n])
    mx.eval([c.state for c in cache])


def run(model: Any, cache: list[Any], drafts: str, token: int, max_tokens: int) -> tuple[float, int, list[int], float]:
    """Milliseconds a token from the second on, the peak of memory in bytes, the tokens, and the share of accepted drafts."""
    mx.clear_cache()
    own, prompt = copy.deepcopy(cache), mx.array([token])
    mx.eval([c.state for c in own])
    mx.synchronize(generation_stream)
    mx.reset_peak_memory()
    if drafts == PLAIN:
        steps: Iterator[Any] = generate_step(
            prompt, model, max_tokens=max_tokens, prompt_cache=own[: len(model.layers)]
        )
    else:
        k: Any = drafts if drafts == "auto" else int(drafts)
        options = {"num_draft_tokens": k, "copy_drafts": "off", "prompt_cache": own}
        steps = mtp_generate_step(prompt, model, max_tokens=max_tokens, **options)
    del own
    tokens = [int(next(steps)[0])]
    start = time.perf_counter()
    others = [(int(found), more[-1] is True) for found, *more in steps]  # without log probabilities, which take memory
    seconds, drafted = time.perf_counter() - start, sum(is_draft for _, is_draft in others)
    tokens += [found for found, _ in others]
    return 1e3 * seconds / len(others), mx.get_peak_memory(), tokens, drafted / len(others)


def main() -> None:
    flags = dict(lengths=([1000, 8000, 32000], "Tokens of the prompts."), drafts=["0", "1", "3", "auto"])
    flags |= dict(max_tokens=(48, "Tokens of each text."), repeat=(5, "Rounds."), shape=("demo", "demo or wide."))
    args = script_parser(__doc__, **flags).parse_args()
    model, tokenizer = load(str(DEMO), settings=False)
    tokens = encode(tokenizer, next(iter(python_beginnings().values())), BASE + 1).tolist()[: BASE + 1]
    if args.shape == "wide":
        model = synthetic_model(WIDE)
    cache = make_prompt_cache(model)
    prefill(mx.array(tokens[:BASE]), model, prompt_cache=cache)
    rows = [["tokens", "drafts", "ms a token", "to mlx-lm", "kept", "drafted", "memory beyond", "same tokens"]]
    first: dict[str, float] = {}
    layers = [layer.self_attn for layer in model.layers if not layer.is_linear]
    of_keys = dict(zip(QUERIES, seconds_of_a_key(layers[0], dtype_of(model), 0, True, QUERIES)))
    for n in args.lengths:
        own = copy.deepcopy(cache)
        repeated(model, own, tokens[:BASE], n)
        head = own[-2].nbytes
        runs = {k: partial(run, model, own, k, tokens[BASE], args.max_tokens) for k in (PLAIN, *args.drafts)}
        found = take_turns(runs, args.repeat + 1)
        times = {k: [ms for ms, *_ in rounds[1:]] for k, rounds in found.items()}  # the first round compiles
        peaks = {k: max(peak for _, peak, *_ in rounds) for k, rounds in found.items()}
        for k in runs:
            speeds = ratios(times[PLAIN], times[k])
            kept = median(speeds) / first.setdefault(k, median(speeds))
            beyond = peaks[k] - peaks[PLAIN] - (k != PLAIN) * head
            is_same = "yes" if found[k][0][2] == found[PLAIN][0][2] else "no"
            drafted = median(share for *_, share in found[k])
            figures = (
                f"{median(times[k]):.1f}",
                spread(speeds),
                f"{kept:.2f}",
                f"{drafted:.0%}",
                f"{beyond / peaks[PLAIN]:.1%}",
            )
            rows.append([f"{n:,}", k, *figures, is_same])
        attention = ", ".join(f"{1e3 * n * len(layers) * seconds:.1f} ms of {T}" for T, seconds in of_keys.items())
        print(f"{n:,} tokens: mlx-lm's peak {peaks[PLAIN] / 1e6:.1f} MB, the head's cache {head / 1e6:.1f} MB")
        print(f"  attention in a pass over 1, 2 and 4 tokens: {attention}", flush=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
