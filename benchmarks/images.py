"""The head's drafts behind images: how many are accepted, and how many where the head has not seen the images.

    python examples/captions.py captions
    python -m benchmarks.images --model captions --images tests/data/captions

For each picture the model writes a caption, greedily, with plain mlx-lm and with drafts, which must be the same. The head takes
an image's rows of the tower as embeddings, as in vLLM; "not seen" leaves its rows of the image out, as llama.cpp does.
"""

import json
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from tqdm import tqdm

import mlx_mtp
from mlx_mtp.core.caches.prompt_cache import PromptCache
from mlx_mtp.images.prompt import PLACEHOLDER, ImagePrompt, read_images
from scripts.shared import script_parser
from tests.support.decoding import prefill

NOT_SEEN = "images not seen"
RUNS = ("images seen", NOT_SEEN)


def main() -> None:
    parser = script_parser(__doc__, num_draft_tokens=2, max_tokens=24)
    parser.add_argument("--model", required=True, help="A checkpoint with a vision encoder.")
    parser.add_argument("--images", required=True, type=Path, help="Pictures, with captions.json.")
    args = parser.parse_args()
    model, tokenizer = mlx_mtp.load(args.model)
    captions = json.loads((args.images / "captions.json").read_text())  # the prompt, and what each picture shows
    counts: defaultdict[str, mlx_mtp.DraftCounts] = defaultdict(mlx_mtp.DraftCounts)
    n_right = n_same = 0
    for one in tqdm(captions["one"], disable=None):
        tokens = tokenizer.encode(PLACEHOLDER + captions["prompt"])
        prompt = read_images(model.vision, tokens, [args.images / one["file"]])
        want = plain(model, prompt, tokenizer.eos_token_ids, args.max_tokens)
        n_right += tokenizer.decode(want).partition(captions["prompt"])[0] == one["caption"]
        how = {"max_tokens": len(want), "num_draft_tokens": args.num_draft_tokens}
        n_same += all(drafted(model, prompt, run, counts=counts[run], **how) == want for run in RUNS)
    n = len(captions["one"])
    print(f"{n} pictures: {n_right} captions right, {n_same} the same with drafts as without")
    for run in RUNS:
        rates = " ".join(f"{a / d:.2f}" for a, d in zip(counts[run].accepted, counts[run].drafted))
        print(f"{run:16} accepted {sum(counts[run].accepted)} of {sum(counts[run].drafted)}, by position {rates}")


def plain(model: Any, prompt: ImagePrompt, ends: Collection[int], max_tokens: int) -> list[int]:
    """The tokens of an answer, the one that ends it included."""
    cache, embeddings = prompt.cache(model, None), prompt.embed(model)
    options = {"max_tokens": max_tokens, "prompt_cache": cache, "input_embeddings": embeddings}
    steps, tokens = generate_step(mx.array(prompt.tokens), model, **options), []
    for token, _ in steps:
        tokens.append(token)
        if token in ends:
            break
    return tokens


def drafted(model: Any, prompt: ImagePrompt, run: str, **options: Any) -> list[int]:
    tokens, embeddings, cache = mx.array(prompt.tokens), prompt.embed(model), prompt.cache(model, None)
    prefill(tokens[:-1], model, prompt_cache=cache, input_embeddings=embeddings[:-1])
    if run == NOT_SEEN:
        forget_images(PromptCache(cache, len(model.layers)))
    return [token for token, *_ in mlx_mtp.mtp_generate_step(tokens[-1:], model, prompt_cache=cache, **options)]


def forget_images(cache: PromptCache) -> None:
    """Drop the head's rows whose embedding is an image's: row i has that of token i + 1."""
    kept = [i for i in range(cache.head.offset) if not any(a.start <= i + 1 < a.end for a in cache.images)]
    rows = mx.array(kept)
    cache.head.keys, cache.head.values = (x[:, :, rows] for x in (cache.head.keys, cache.head.values))
    cache.head.offset = len(kept)


if __name__ == "__main__":
    main()
