"""What a batch generator yields, and hooks that raise."""

import itertools
import math
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_mtp.core.batch.generator import BatchGenerator, Response

# Options of a generator that prefills prompts whenever there are some: all run together, on any machine.
AT_ONCE = dict(max_token_gap=math.inf, min_decode_share=0.0)


@dataclass
class Text:
    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)  # of each token
    finish_reason: str | None = None
    last: Response | None = None

    def add(self, r: Response) -> None:
        assert self.finish_reason is None
        if r.logprobs is not None:
            self.tokens.append(r.token)
            self.from_draft.append(r.from_draft)
        self.finish_reason, self.last = r.finish_reason, r


def run(generator: BatchGenerator, texts: dict[int, Text] | None = None, n_steps: int = 100_000) -> dict[int, Text]:
    """The texts of all sequences by uid, after as many steps."""
    texts = {} if texts is None else texts
    for _ in range(n_steps):
        if len(generator) == 0:
            break
        for r in generator.next()[1]:
            texts.setdefault(r.uid, Text()).add(r)
    return dict(sorted(texts.items()))


class Fault(Exception):
    pass


def failing_sampler(n: int):
    """Greedy; raises from its n-th call on."""
    calls = itertools.count(1)

    def sampler(logprobs):
        if next(calls) >= n:
            raise Fault
        return mx.argmax(logprobs, axis=-1)

    return sampler


def faulty(n: float):
    """Allows even tokens after an even number of tokens and odd ones after an odd; raises for the n-th generated token."""
    lengths = []

    def processor(tokens, logits):
        assert logits.shape == (1, logits.shape[-1])
        lengths.append(len(tokens))
        if len(tokens) >= lengths[0] + n:
            raise Fault
        return mx.where(mx.arange(logits.shape[-1]) % 2 == len(tokens) % 2, logits, -mx.inf)

    return processor


class Faulty:
    """``faulty`` as an object, which may keep state."""

    def __init__(self, n: float):
        self.process = faulty(n)

    def __call__(self, tokens, logits):
        return self.process(tokens, logits)
