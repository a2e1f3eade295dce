"""What the index of copy drafts takes on the host: to build it, and for each token of the answer.

python -m benchmarks.copy_index
"""

import random
import time
from collections.abc import Sequence

from mlx_mtp.drafts.prompt_lookup import PromptLookup

N_TOKENS = 2000  # of the answer


def per_token(copies: PromptLookup, answer: Sequence[int]) -> float:
    start = time.perf_counter()
    for token in answer:
        copies.observe([token])
        copies.acceptance(0)
    return (time.perf_counter() - start) / len(answer)


for n in (1_000, 32_000, 128_000, 256_000):
    rng = random.Random(0)
    text = [rng.randrange(248_000) for _ in range(n)]
    copies = PromptLookup(text)
    start = time.perf_counter()
    copies.acceptance(0)
    build = time.perf_counter() - start
    new = per_token(copies, [rng.randrange(248_000) for _ in range(N_TOKENS)])
    copied = per_token(copies, (text * 2)[100 : 100 + N_TOKENS])
    print(
        f"{n:7,} tokens: built in {build * 1e3:.0f} ms; a new token {new * 1e6:.0f} us, a copied one {copied * 1e6:.0f} us"
    )
