"""A sequence: a text that is generated, with its options, its prompt cache and its tokens so far."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from ..caches.positions import ImageSpan
from ..caches.prompt_cache import PromptCache
from ..caches.rows import KVOptions
from ..drafts.options import TextOptions
from ..drafts.sources import Source, make_sources
from ..pacing.depth import MAX_DRAFT_TOKENS, Offer, Rates
from ..pacing.step_times import HEAD, Plan
from ..sampling.acceptance import make_acceptance
from ..sampling.processors import restoring_random_state
from .counts import DraftCounts


class PendingEmbeddings(Protocol):
    """Embeddings of a prompt that are computed a piece at a time, such as ``images.prompt.ImageEmbeddings``."""

    array: mx.array  # [T, H], complete once ``advance`` has returned ``True``

    def __len__(self) -> int: ...

    def advance(self, seconds: float) -> bool:
        """Compute for about this time -> whether the array is complete."""
        ...


@dataclass(eq=False)
class Sequence:
    """A text that is generated. The host may not know its last generated tokens yet."""

    cache: PromptCache  # of its tokens, except for those that a pass in flight verifies
    options: TextOptions  # resolved
    counts: DraftCounts
    kv: KVOptions  # of ``KVOptions.of_text``
    segments: list[list[int]] = field(default_factory=list)  # of the prompt that is left; the last is its last token
    tokens: list[int] = field(default_factory=list)  # that the host knows: of the prefilled prompt, and generated ones
    embeddings: mx.array | None = None  # [T, H], of the prompt that is left, in place of the tokens'
    pending: PendingEmbeddings | None = None  # computes ``embeddings``
    uid: int = 0
    has_tokens: bool = True  # otherwise only embeddings were given, and ``segments`` has zeros

    def __post_init__(self) -> None:
        assert self.options.max_tokens is not None
        self.max_tokens = self.options.max_tokens  # still to generate; negative for no limit
        self.logits_processors = self.options.logits_processors or ()
        self.stop = None if self.options.stop_sequences is None else self.options.stop_sequences.matcher()
        # "length", "stop", "removed", or the error of its sampler or a processor
        self.end: str | Exception | None = None
        self.cached_text = [] if self.tokens else self.cache.text  # before ``tokens``
        self.images = self.cache.images
        # The index of the first known token.
        self.text_start = self.cache.n_tokens - len(self.cached_text) - len(self.tokens)
        self.n_prefilled, self.n_prompt = 0, sum(map(len, self.segments))
        self.prompt_end = self.cache.n_tokens + self.n_prompt  # the index after the prompt
        self.n_generated = self.n_observed = 0
        self.context: mx.array | None = None  # [N], for the logits processors
        self.acceptance = make_acceptance(self.options.sampler)
        number = self.options.num_draft_tokens
        self.number = number if isinstance(number, int) else None  # of drafts; ``None`` if it is chosen at every step
        self.rates = Rates(MAX_DRAFT_TOKENS)  # of the head's drafts
        self.sources: dict[str, Source] = {}  # other than the head, by name

    @property
    def needs_tokens(self) -> bool:
        """Whether the host must know its last token before the next can be chosen."""
        return any(getattr(p, "needs_tokens", False) for p in self.logits_processors)

    @property
    def finish_reason(self) -> str | None:
        return "error" if isinstance(self.end, Exception) else self.end

    @property
    def n_unobserved(self) -> int:
        """The number of committed tokens that the host does not know yet."""
        return self.n_generated - self.n_observed

    def check(self) -> None:
        if isinstance(self.end, Exception):
            raise self.end

    @property
    def is_prefilled(self) -> bool:
        """Whether its prompt is prefilled except for the last token."""
        return len(self.segments) == 1 and self.pending is None

    @property
    def ends_with_image(self) -> bool:
        return bool(self.images) and self.images[-1].end >= self.prompt_end

    def take_prompt(self, n: int) -> None:
        segment, self.n_prefilled = self.segments[0], self.n_prefilled + n
        if self.has_tokens:
            self.tokens += segment[:n]
        else:
            self.cached_text, self.text_start = [], self.cache.n_tokens
        self.segments = [segment[n:], *self.segments[1:]] if n < len(segment) else self.segments[1:]
        if self.embeddings is not None:
            self.embeddings = self.embeddings[n:] if n < len(self.embeddings) else None

    def take_last(self) -> int:
        """Take the prompt's last token, with which the sequence joins. Return 0 in place of one that is not known."""
        own = self.segments.pop() if self.segments else self.tokens[-1:]
        if not self.has_tokens:
            self.cached_text, self.text_start = [], self.prompt_end
        elif self.n_generated == 0:
            self.tokens += own
        return own[0]

    def start(self) -> None:
        text = without_images([*self.cached_text, *self.tokens], self.text_start, self.images)
        self.sources = make_sources(self.options, text)
        if self.logits_processors:
            self.context = mx.array(self.tokens, mx.uint32)

    def tokens_between(self, n: int, n_generated: int) -> list[int]:
        """The tokens from index n up to a number of generated ones."""
        text = [*self.cached_text, *self.tokens][: self.prompt_end + n_generated - self.text_start]
        unknown = [0] * max(self.text_start - n, 0)
        return unknown + text[max(n - self.text_start, 0) :]

    def text_of(self, n_tokens: int) -> list[int]:
        n, text = n_tokens - self.text_start, [*self.cached_text, *self.tokens]
        return text[:n] if 0 <= n <= len(text) else []

    def offers(self, limit: int) -> Offer:
        rates = {name: source.acceptance(self.n_unobserved)[:limit] for name, source in self.sources.items()}
        if self.number != 0:
            rates[HEAD] = self.rates.estimate[: limit if self.number is None else min(limit, self.number)]
        return {name: of_each for name, of_each in rates.items() if of_each}

    def process(self, logits: mx.array, drafts: mx.array) -> mx.array:
        """Apply the logits processors to logits [1, V] of the position after drafts [t]."""
        assert self.context is not None
        tokens = mx.concatenate([self.context, drafts])
        if tokens.size > 0:  # as mlx-lm, which has none where the prompt was given as embeddings
            for processor in self.logits_processors:
                logits = processor(tokens, logits)
        return logits

    def commit(self, tokens: mx.array, b: int, n: int) -> None:
        """Commit the first n of ``tokens[b]``, of [B, T], which the host may not know yet."""
        self.n_generated += n
        if self.context is not None:
            self.context = mx.concatenate([self.context, tokens[b, :n]])

    def take(self, tokens: list[int], plan: Plan, n_accepted: int) -> list[int]:
        """Add a step's tokens, now that the host knows them -> the tokens up to the one that ends the sequence."""
        self.counts.add(plan.k, n_accepted, plan.source)
        taken = tokens
        for i, token in enumerate(tokens, 1):
            self.max_tokens -= 1
            if self.max_tokens == 0:
                self.end = "length"
            if self.stop is not None and self.stop.advance(token):
                self.end = "stop"
            if self.end in ("length", "stop"):
                taken = tokens[:i]
                break
        self.n_observed += len(taken)
        for source in self.sources.values():
            source.observe(taken)
        self.tokens += taken
        return taken


@contextmanager
def own_errors(sequences: list[Sequence]) -> Iterator[None]:
    """A context for calls of samplers and processors: an exception ends these sequences, and no other."""
    try:
        with restoring_random_state():
            yield
    except Exception as e:
        for s in sequences:
            s.end = e


def without_images(text: list[int], first: int, images: list[ImageSpan]) -> list[int]:
    """Replace each image token of a text, which begins with token ``first``, by a negative number of its own."""
    text = text[:]
    for image in images:
        for i in range(max(image.start, first), min(image.end, first + len(text))):
            text[i - first] = -1 - i
    return text
