"""A sequence in a batch: what it asks for, and how far it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import LogitsProcessor, greedy_sampler
from mlx_lm.sample_utils import Sampler as AnySampler

from ..decoding.acceptance import TokenMatch, make_acceptance, rewind
from ..decoding.copies import CopyDrafter
from ..decoding.counts import DraftCounts
from ..decoding.depth import MAX_DRAFT_TOKENS, expected_tokens
from ..decoding.options import CopyDrafts
from ..decoding.processors import keeps_state
from ..decoding.rates import Rates
from ..decoding.sampling import Sampler


@dataclass(eq=False)
class Row:
    """
    Args:
        uid (int): Of the sequence.
        tokens (List[int]): All tokens known so far: those of the prompt and those handed over.
        max_tokens (int): The number of tokens still to generate.
        sampler (Sampler): As in mlx-lm, or one of ``mlx_mtp.make_sampler``.
        logits_processors (Sequence[LogitsProcessor]): As in mlx-lm; they see all tokens.
        stop (StopSequences.Matcher): Recognizes the last token.
        max_drafts (int): The most drafts of the head in a step.
        copy_drafts (Union[int, str]): The most drafts to copy from the text in a step, ``"auto"``, as many as the window has
          room for, or ``"off"``.
    """

    uid: int
    tokens: list[int]
    max_tokens: int
    sampler: AnySampler
    logits_processors: list[LogitsProcessor]
    stop: StopSequences.Matcher
    max_drafts: int = MAX_DRAFT_TOKENS
    copy_drafts: CopyDrafts = "off"
    before: list[int] = field(default_factory=list)  # tokens of its prompt cache that are not among these
    counts: DraftCounts = field(default_factory=DraftCounts)
    n_decided: int = 0  # generated tokens, handed over or not
    n_taken: int = 0  # of these, those that the host knows
    is_copying: bool = False  # whether the latest window's drafts were copied
    finish_reason: str | None = None
    error: Exception | None = None  # of a sampler or a processor
    prompt_cache: list[Any] | None = None  # where that ended it
    is_out: bool = False  # its end was handed over, or it was removed
    context: mx.array | None = None  # the prompt and the decided tokens [N], for the logits processors

    def __post_init__(self) -> None:
        self.acceptance = make_acceptance(self.sampler)
        self.rates = Rates(MAX_DRAFT_TOKENS)
        self.copies: CopyDrafter | None = None
        self.in_order = self.acceptance.keeps_state or any(keeps_state(p) for p in self.logits_processors)
        is_greedy = isinstance(self.acceptance, TokenMatch) and self.sampler is greedy_sampler
        self.is_plain = is_greedy and not self.logits_processors  # chosen together with other such rows
        # Rows of equal samplers are drawn together where there are no drafts. A sampler of mlx-lm may not: all rows of a
        # call share XTC's coin.
        is_own = type(self.sampler) is Sampler and not self.logits_processors
        self.drawn_with = self.sampler if is_own else None

    @contextmanager
    def own_errors(self) -> Iterator[None]:
        """What the row's sampler or processors raise inside is its ``error``, and no other row's."""
        random_state = mx.random.state[0]  # type: ignore[index]
        try:
            yield
        except Exception as e:
            self.error = e
            rewind([random_state], 0)  # an error in a compiled sampler leaves one that nothing can be drawn from

    @property
    def n_unread(self) -> int:
        """The number of decided tokens that the host does not know yet."""
        return self.n_decided - self.n_taken

    @property
    def acceptance_rates(self) -> list[float]:
        """The probability that each draft of the better source is accepted, given that those before it were, [K]."""
        n_copies = self.copy_drafts if isinstance(self.copy_drafts, int) else MAX_DRAFT_TOKENS
        n_drafts, n_copies = self.max_drafts, min(n_copies, MAX_DRAFT_TOKENS)
        is_better = self.copies_better(n_copies, n_drafts)
        rates, n = (self._copy_odds(), n_copies) if is_better else (self.rates.estimate, n_drafts)
        return [a if i < n else 0.0 for i, a in enumerate(rates[:MAX_DRAFT_TOKENS])]

    def _copy_odds(self) -> list[float]:
        """The same for copies, [MAX_COPY_TOKENS]; empty where nothing can be copied."""
        return [] if self.copies is None else self.copies.odds(self.n_unread)

    @property
    def most_drafts(self) -> int:
        """The most drafts that it can use in a window, but for a number of copies of its own."""
        return MAX_DRAFT_TOKENS if self.copy_drafts == "auto" and self._copy_odds() else self.max_drafts

    def copies_better(self, n_copies: int, n_drafts: int) -> bool:
        """Whether so many copies are expected to yield more tokens than so many drafts of the head."""
        odds = self._copy_odds()
        return bool(odds) and expected_tokens(odds)[n_copies] > expected_tokens(self.rates.estimate)[n_drafts]

    def begin(self) -> None:
        """The prompt is read, but for its last token."""
        if self.copy_drafts != "off":
            self.copies = CopyDrafter(text=[*self.before, *self.tokens])
        if self.logits_processors:
            self.context = mx.array(self.tokens, mx.uint32)

    def logprobs(self, logits: mx.array, drafts: mx.array, processors: list[LogitsProcessor] | None = None) -> mx.array:
        """Logits [1, V] of the position after some drafts [t] -> log probabilities [1, V], processed."""
        for processor in self.logits_processors if processors is None else processors:
            assert self.context is not None
            logits = processor(mx.concatenate([self.context, drafts]), logits)
        return logits - mx.logsumexp(logits, keepdims=True)

    def decide(self, tokens: mx.array) -> None:
        """Go on behind decided tokens [n], which the host may not know yet."""
        self.n_decided += len(tokens)
        if self.context is not None:
            self.context = mx.concatenate([self.context, tokens])

    def take(self, tokens: list[int], n_drafted: int, n_accepted: int) -> list[int]:
        """Take a step's tokens -> these, up to the one that ends the sequence."""
        self.counts.add(n_drafted, n_accepted, self.is_copying)
        if n_drafted > 0 and not self.is_copying:
            self.rates.count_window(n_drafted, n_accepted)
        taken = []
        for token in tokens:
            taken.append(token)
            self.max_tokens -= 1
            if self.max_tokens == 0:
                self.finish_reason = "length"
            if self.stop.advance(token):
                self.finish_reason = "stop"
            if self.finish_reason is not None:
                break
        self.tokens += taken
        self.n_taken += len(taken)
        if self.copies is not None:
            self.copies.read(taken)
        return taken
