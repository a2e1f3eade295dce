"""The joint distribution of the first tokens, from the loop, against that of plain decoding, computed by enumeration."""

import itertools
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_lm import sample_utils
from mlx_lm.sample_utils import make_logits_processors
from scipy.special import chdtrc  # scipy.stats takes seconds to import

import mlx_mtp
from mlx_mtp import BatchGenerator
from mlx_mtp.text.grammar import ForcedTokens

from .batches import AT_ONCE, run
from .grammars import grammar_of
from .models import tiny_model
from .scripted import Scripted

LEVEL = 1e-4  # of each chi-square test
VOCAB = 6
TOKENS = ["<eos>", "a", "b", "c", "ab", "bc"]  # of grammars
PROMPT = [1, 2]
REPEATS = [1, 2, 3, 4, 5, 0, 2, 1, 2, 3, 4, 5]  # itself: 0, 2, ... would be copied next


def p_value(observed, expected) -> float:
    """The probability of counts as far from the expected ones, [N] each: chi-square."""
    observed, expected = np.asarray(observed, np.float64), np.asarray(expected, np.float64)
    return float(chdtrc(len(expected) - 1, ((observed - expected) ** 2 / expected).sum()))


def independence(a: np.ndarray, b: np.ndarray) -> float:
    """The probability of pairs of integers as far from independent ones, [n] each."""
    table = np.zeros((a.max() + 1, b.max() + 1))
    np.add.at(table, (a, b), 1)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    n_free = (table.shape[0] - 1) * (table.shape[1] - 1)
    return float(chdtrc(n_free, ((table - expected) ** 2 / expected).sum()))


def sigmas(logits: mx.array) -> np.ndarray:
    """How many standard deviations each logit is below the largest of its row, [B, V] each; excluded ones do not count."""
    x = np.array(logits.astype(mx.float32), np.float64)
    deviations = np.nanstd(np.where(np.isinf(x), np.nan, x), axis=-1, keepdims=True)
    return (x.max(axis=-1, keepdims=True) - x) / np.maximum(deviations, 1e-9)


def by_mlx_lm(logprobs: mx.array, xtc_probability: float = 0.0, top_n_sigma: float = 0.0, **options) -> mx.array:
    """What mlx-lm's sampler of these options samples from, [B, V]: its filters behind top-n-sigma, which it lacks, and XTC's
    coin falls both ways.
    """
    if top_n_sigma:
        logprobs = mx.where(mx.array(sigmas(logprobs) > top_n_sigma), -mx.inf, logprobs)
    softmax = lambda x, temp: mx.softmax(x.astype(mx.float32) * (1 / temp), axis=-1)  # noqa: E731
    coins = [(1 - xtc_probability, 0.0), (xtc_probability, 1.0)][: 1 + (xtc_probability > 0)]
    with mock.patch.object(sample_utils, "categorical_sampling", softmax):
        return sum(p * sample_utils.make_sampler(**options, xtc_probability=coin)(logprobs) for p, coin in coins)


@dataclass(frozen=True)
class Case:
    """One way to sample, with one kind of head."""

    depth: int  # of the drafts
    options: dict[str, Any]  # of ``make_sampler``
    head: str = "own"  # of random weights; "right", sure of the likeliest continuation; "adversarial", of another
    acceptance: str = "rejection"  # or "coupled", with another seed each run; "match", with mlx-lm's sampler
    p_min: float = 0.0
    copies: int = 0  # on a prompt that repeats itself; after a rejected copy the head drafts; 0 is "off"
    lark: str = ""  # a grammar over ``TOKENS``; what it forces is drafted, 3 tokens in a step
    n_rows: int = 32  # texts that generate at once
    penalties: dict[str, Any] = field(default_factory=dict)  # of ``make_logits_processors``

    n_tokens: ClassVar[int] = 3

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value)

    @property
    def prompt(self) -> list[int]:
        return REPEATS if self.copies else PROMPT

    def model(self):
        return tiny_model("qwen3_5", vocab_size=VOCAB)

    def processors(self):
        processors = make_logits_processors(**self.penalties)
        if self.lark:
            processors.append(grammar_of(TOKENS, self.lark))
            processors[-1].n_prompt = len(self.prompt)
        return processors

    def expected(self) -> np.ndarray:
        """The probability of each sequence in plain decoding, [VOCAB] * n_tokens."""
        model, joint = self.model(), np.ones([VOCAB] * self.n_tokens)
        for length in range(self.n_tokens):
            for tokens in itertools.product(range(VOCAB), repeat=length):
                text = mx.array(self.prompt + list(tokens))
                logits = model(text[None])[:, -1]
                for processor in self.processors():
                    logits = processor(text, logits)
                logprobs = logits - mx.logsumexp(logits, keepdims=True)
                p = np.array(by_mlx_lm(logprobs, **self.options)[0], np.float64)
                joint[tokens] *= (p / p.sum()).reshape([VOCAB] + [1] * (self.n_tokens - 1 - length))
        return joint

    def drafting_model(self, runs: int):
        model = self.model()
        if self.head == "own":
            return model
        likely = self.prompt.copy()
        for _ in range(self.n_tokens + 10):
            likely.append(int(np.argmax(model(mx.array([likely]))[0, -1])))
        return Scripted(model, dict.fromkeys(range(runs), likely), lambda uid, i: self.head == "right")

    @mock.patch.object(ForcedTokens, "fixed", 3)
    def sampled(self, runs: int) -> Counter:
        model, first = self.drafting_model(runs), zlib.crc32(str(self).encode())
        mx.random.seed(first)
        options = dict(num_draft_tokens=self.depth, copy_drafts=self.copies or "off", draft_p_min=self.p_min)
        options |= dict(completion_batch_size=self.n_rows, return_prompt_caches=False)
        generator = BatchGenerator(model, **options, **AT_ONCE)
        if isinstance(model, Scripted):
            model.decoder = generator.decoder
        seeds = [first + i if self.acceptance == "coupled" else None for i in range(runs)]
        generator.insert(
            [self.prompt] * runs,
            # More tokens than are looked at, so that the window they are in is a full one.
            max_tokens=[self.n_tokens + max(self.depth, self.copies) + 1] * runs,
            samplers=[mlx_mtp.make_sampler(**self.options, acceptance=self.acceptance, seed=seed) for seed in seeds],
            logits_processors=[self.processors() for _ in range(runs)],
        )
        return Counter(tuple(text.tokens[: self.n_tokens]) for text in run(generator).values())

    def p_value(self, runs: int) -> float:
        """Of a chi-square test; cells of which fewer than 5 are expected are taken together."""
        expected, counts = self.expected() * runs, self.sampled(runs)
        observed = np.zeros_like(expected)
        for tokens, n in counts.items():
            observed[tokens] = n
        if observed[expected == 0].any():
            return 0.0  # something that plain decoding never says
        few = expected < 5
        want = np.append(expected[~few], expected[few].sum())
        got = np.append(observed[~few], observed[few].sum())
        want, got = want[want > 0], got[want > 0]
        return p_value(got, want)


ALL = {"temp": 1.0, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "xtc_probability": 0.5, "xtc_threshold": 0.2}
NUCLEUS, XTC = {"temp": 1.0, "top_p": 0.9}, {"temp": 1.0, "xtc_probability": 0.5}
SIGMAS = {"temp": 1.5, "top_n_sigma": 1.0}
BOTH = {"temp": 0.7, "top_p": 0.9, "xtc_probability": 0.5}
PENALTY, GRAMMAR = {"repetition_penalty": 1.5}, "start: /(ab|bc|ca)+/"
COLD, PLAIN, HOT = ({"temp": temp} for temp in (0.7, 1.0, 1.5))
CASES = [
    *(Case(depth, {"temp": temp}) for depth in (1, 2, 3, 4) for temp in (0.3, 0.7, 1.0, 1.5)),
    *(Case(depth, PLAIN, head) for depth in (1, 3) for head in ("right", "adversarial")),
    *(Case(2, COLD | f) for f in ({"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.1}, {"xtc_probability": 0.5})),
    *(Case(3, SIGMAS, acceptance=acceptance) for acceptance in ("rejection", "coupled", "match")),
    Case(3, ALL),
    Case(3, PLAIN | {"min_p": 0.5, "min_tokens_to_keep": 3}),
    *(Case(depth, temp, copies=copies) for depth in (0, 2) for copies in (1, 4, 16) for temp in (COLD, HOT)),
    Case(2, XTC | {"top_p": 0.9, "top_k": 4}, copies=3, penalties=PENALTY),
    Case(2, NUCLEUS, acceptance="match", copies=3, n_rows=1),
    Case(2, XTC, acceptance="coupled", copies=3),
    Case(2, PLAIN | {"top_k": 2}, "adversarial"),
    Case(2, PLAIN, penalties=PENALTY),
    Case(3, COLD, penalties={"logit_bias": {2: 2.0}, "presence_penalty": 0.5, "frequency_penalty": 0.4}),
    Case(3, PLAIN, p_min=0.4),
    *(Case(depth, temp, lark=GRAMMAR) for depth in (0, 1, 3) for temp in (COLD, HOT)),
    Case(2, NUCLEUS, "adversarial", lark=GRAMMAR),
    *(Case(2, PLAIN, acceptance=acceptance, lark=GRAMMAR) for acceptance in ("match", "coupled")),
    *(Case(depth, PLAIN, acceptance="match") for depth in (1, 3)),
    *(Case(2, BOTH, acceptance=acceptance) for acceptance in ("match", "coupled")),
    Case(2, HOT, acceptance="match", penalties=PENALTY),
    *(Case(depth, temp, acceptance="coupled") for depth in (1, 3) for temp in (COLD, HOT)),
    Case(3, NUCLEUS, "adversarial", "coupled"),
    Case(3, PLAIN | {"min_p": 0.1}, acceptance="coupled", penalties=PENALTY),
]
