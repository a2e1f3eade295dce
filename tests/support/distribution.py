"""The joint distribution of the first tokens, from the loop, against that of plain decoding, computed by enumeration."""

import itertools
import zlib
from collections import Counter
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


def independence(table) -> float:
    """The probability of a table [M, N] as far from that of two independent numbers."""
    table = np.asarray(table, np.float64)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    n_free = (table.shape[0] - 1) * (table.shape[1] - 1)
    return float(chdtrc(n_free, ((table - expected) ** 2 / expected).sum()))


class Case:
    """One way to sample, with one kind of head.

    Args:
        depth (int): Of the drafts.
        head (str): ``own``, random weights; ``right``, sure of the likeliest continuation; ``adversarial``, of another.
        acceptance (str): ``rejection``; ``coupled``, with another seed each run; ``match``, with mlx-lm's sampler.
        p_min (float): ``draft_p_min``.
        copies (int): ``copy_drafts``, on a prompt that repeats itself; after a rejected copy the head drafts. 0 is ``"off"``.
        lark (str): A grammar over ``TOKENS``; what it forces is drafted, 3 tokens in a step. Empty for none.
        n_rows (int): The number of texts that generate at once.
        penalties (dict): Of ``make_logits_processors``.
        options (dict): Of ``make_sampler``.
    """

    n_tokens = 3

    def __init__(
        self,
        depth=2,
        head="own",
        acceptance="rejection",
        p_min=0.0,
        copies=0,
        lark="",
        n_rows=32,
        penalties=None,
        **options,
    ):
        self.p_min, self.copies, self.lark, self.n_rows = p_min, copies, lark, n_rows
        self.prompt = REPEATS if copies else PROMPT
        self.depth, self.acceptance, self.head = depth, acceptance, head
        self.penalties, self.options = penalties or {}, options
        settings = [f"{k}={v}" for k, v in {**options, **self.penalties, "p_min": p_min}.items()]
        settings += [f"{copies} copies"] * bool(copies) + [lark] * bool(lark)
        self.name = f"depth {depth}, {head} head, {acceptance}, {', '.join(settings)}"

    def model(self):
        return tiny_model("qwen3_5", vocab_size=VOCAB)

    def processors(self):
        processors = make_logits_processors(**self.penalties)
        if self.lark:
            processors.append(grammar_of(TOKENS, self.lark))
            processors[-1].n_prompt = len(self.prompt)
        return processors

    def next_token(self, model, tokens: list[int]) -> np.ndarray:
        """Plain decoding's distribution of the token after ``tokens``, from mlx-lm's filters: XTC's coin falls both ways."""
        logits = model(mx.array([tokens]))[:, -1]
        for processor in self.processors():
            logits = processor(mx.array(tokens), logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        options = {"min_tokens_to_keep": 1, "top_p": 0, "min_p": 0, "top_k": 0, "xtc_probability": 0, **self.options}
        mean = np.zeros(VOCAB)
        for applies, weight in ((True, options["xtc_probability"]), (False, 1 - options["xtc_probability"])):
            x = logprobs
            if 0 < options["top_p"] < 1:
                x = sample_utils.apply_top_p(x, options["top_p"])
            if options["min_p"]:
                x = sample_utils.apply_min_p(x, options["min_p"], options["min_tokens_to_keep"])
            if applies and weight:
                x = sample_utils.apply_xtc(x, 1.0, options.get("xtc_threshold", 0.1), [])
            if options["top_k"]:
                x = sample_utils.apply_top_k(x, options["top_k"])
            x = np.array(x[0], np.float64) / options["temp"]
            p = np.exp(x - x.max())
            mean += weight * p / p.sum()
        return mean

    def expected(self) -> np.ndarray:
        """The probability of each sequence, [VOCAB] * n_tokens."""
        model, joint = self.model(), np.ones([VOCAB] * self.n_tokens)
        for length in range(self.n_tokens):
            for tokens in itertools.product(range(VOCAB), repeat=length):
                p = self.next_token(model, self.prompt + list(tokens))
                joint[tokens] *= p.reshape([VOCAB] + [1] * (self.n_tokens - 1 - length))
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
        model, first = self.drafting_model(runs), zlib.crc32(self.name.encode())
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


CASES = [
    *(Case(depth, temp=temp) for depth in (1, 2, 3, 4) for temp in (0.3, 0.7, 1.0, 1.5)),
    *(Case(depth, head, temp=1.0) for depth in (1, 3) for head in ("right", "adversarial")),
    *(Case(2, temp=0.7, **f) for f in ({"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.1}, {"xtc_probability": 0.5})),
    Case(3, temp=1.0, top_p=0.9, top_k=4, min_p=0.1, xtc_probability=0.5, xtc_threshold=0.2),
    Case(3, temp=1.0, min_p=0.5, min_tokens_to_keep=3),
    *(Case(depth, copies=copies, temp=temp) for depth in (0, 2) for copies in (1, 4, 16) for temp in (0.7, 1.5)),
    Case(2, copies=3, temp=1.0, top_p=0.9, top_k=4, xtc_probability=0.5, penalties={"repetition_penalty": 1.5}),
    Case(2, acceptance="match", copies=3, n_rows=1, temp=1.0, top_p=0.9),
    Case(2, acceptance="coupled", copies=3, temp=1.0, xtc_probability=0.5),
    Case(2, "adversarial", temp=1.0, top_k=2),
    Case(2, temp=1.0, penalties={"repetition_penalty": 1.5}),
    Case(3, temp=0.7, penalties={"logit_bias": {2: 2.0}, "presence_penalty": 0.5, "frequency_penalty": 0.4}),
    Case(3, temp=1.0, p_min=0.4),
    *(Case(depth, lark="start: /(ab|bc|ca)+/", temp=temp) for depth in (0, 1, 3) for temp in (0.7, 1.5)),
    Case(2, "adversarial", lark="start: /(ab|bc|ca)+/", temp=1.0, top_p=0.9),
    Case(2, acceptance="match", lark="start: /(ab|bc|ca)+/", temp=1.0),
    Case(2, acceptance="coupled", lark="start: /(ab|bc|ca)+/", temp=1.0),
    *(Case(depth, acceptance="match", temp=1.0) for depth in (1, 3)),
    Case(2, acceptance="match", temp=0.7, top_p=0.9, xtc_probability=0.5),
    Case(2, acceptance="match", temp=1.5, penalties={"repetition_penalty": 1.5}),
    *(Case(depth, acceptance="coupled", temp=temp) for depth in (1, 3) for temp in (0.7, 1.5)),
    Case(3, "adversarial", acceptance="coupled", temp=1.0, top_p=0.9),
    Case(2, acceptance="coupled", temp=0.7, top_p=0.9, xtc_probability=0.5),
    Case(3, acceptance="coupled", temp=1.0, min_p=0.1, penalties={"repetition_penalty": 1.5}),
]
