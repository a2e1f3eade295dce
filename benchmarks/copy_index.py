"""What the index of copy drafts takes on the host: to build it, and for each token of the answer.

python -m benchmarks.copy_index
"""

import random
from collections.abc import Sequence
from functools import partial

from benchmarks.timing import seconds
from mlx_mtp.drafts.sources import PromptLookup

N_TOKENS = 2000  # of the answer


def follow(copies: PromptLookup, answer: Sequence[int]) -> None:
    for token in answer:
        copies.observe([token])
        copies.acceptance(0)


for n in (1_000, 32_000, 128_000, 256_000):
    rng = random.Random(0)
    text = [rng.randrange(248_000) for _ in range(n)]
    copies = PromptLookup(text)
    build = 1e3 * seconds(lambda index=copies: index.acceptance(0))
    answers = [rng.randrange(248_000) for _ in range(N_TOKENS)], (text * 2)[100 : 100 + N_TOKENS]
    new, copied = (1e6 * seconds(partial(follow, copies, answer)) / N_TOKENS for answer in answers)
    print(f"{n:7,} tokens: built in {build:.0f} ms; a new token {new:.0f} us, a copied one {copied:.0f} us")
