"""A sequence: a text that is generated."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ...errors import MTPError
from ..caches.positions import ImageSpan
from ..caches.prompt_cache import PromptCache
from ..caches.rows import KVOptions
from ..drafts.options import TextOptions
from ..drafts.sources import FreeSource, make_free_sources
from ..pacing import MAX_DRAFT_TOKENS
from ..pacing.depth import Offer, Rates
from ..pacing.step_times import HEAD, Plan
from ..sampling.acceptance import make_acceptance
from .counts import DraftCounts


class PendingEmbeddings(Protocol):
    """Embeddings of a prompt that are computed a piece at a time, such as ``images.prompt.ImageEmbeddings``."""

    array: mx.array  # [T, H], complete once ``advance`` has returned ``True``

    def __len__(self) -> int: ...

    def advance(self, seconds: float) -> bool:
        """Compute for about this time -> whether the array is complete."""
        ...


@dataclass(frozen=True)
class Task:
    """What was asked of a sequence."""

    options: TextOptions  # resolved
    kv: KVOptions
    uid: int = 0
    has_tokens: bool = True  # otherwise only embeddings were given, and the prompt's segments have zeros

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens to generate; negative for no limit."""
        assert self.options.max_tokens is not None
        return self.options.max_tokens

    @property
    def needs_tokens(self) -> bool:
        """Whether the host must know the last token before the next can be chosen."""
        return any(getattr(p, "needs_tokens", False) for p in self.options.logits_processors or ())


class TextDrafting:
    """What drafts for a text, and how its drafts are accepted."""

    def __init__(self, options: TextOptions, counts: DraftCounts):
        self.options = options
        self.counts = counts
        self.acceptance = make_acceptance(options.sampler)
        self.rates = Rates(MAX_DRAFT_TOKENS)  # the acceptance rates of the head's drafts
        self.free: dict[str, FreeSource] = {}  # the free sources by name

    def begin(self, text: Sequence[int]) -> None:
        """Make the free sources, for the text so far."""
        self.free = make_free_sources(self.options, text)

    def fixed(self, source: str) -> int | None:
        """The number of drafts of a source; ``None`` if it is chosen at every step."""
        n = self.options.num_draft_tokens if source == HEAD else self.free[source].fixed
        return n if isinstance(n, int) else None

    def offers(self, limit: int, n_unobserved: int) -> Offer:
        rates = {name: source.acceptance_rates(n_unobserved)[:limit] for name, source in self.free.items()}
        rates[HEAD] = self.rates.estimate[:limit][: self.fixed(HEAD)]
        return {name: of_source for name, of_source in rates.items() if of_source}

    def observe(self, tokens: Sequence[int], plan: Plan, n_accepted: int) -> None:
        """Observe a step: its tokens, and how many of its drafts the model accepted."""
        self.counts.add(plan.k, min(n_accepted, len(tokens)), plan.source)
        for source in self.free.values():
            source.observe(tokens)


class TextSequence:
    """A text that is generated, and where it is. The host may not know its last generated tokens yet.

    Args:
        task (Task): What was asked.
        cache (PromptCache): The cache of its tokens, except for those that a pass in flight verifies.
        segments (List[List[int]]): The prompt, not empty.
        counts (DraftCounts): Counts its drafts.
        tokens (List[int]): The tokens in the cache, if they are known.
        embeddings (Union[mx.array, PendingEmbeddings], optional): Those of the prompt, [T, H], in place of the tokens'.
    """

    def __init__(
        self,
        task: Task,
        cache: PromptCache,
        segments: Iterable[list[int]],
        counts: DraftCounts,
        tokens: Sequence[int] = (),
        embeddings: mx.array | PendingEmbeddings | None = None,
    ):
        self.task = task
        self.drafting = TextDrafting(task.options, counts)
        self.is_embedded = embeddings is not None
        self.images = cache.images
        self.embeddings = embeddings if isinstance(embeddings, mx.array) else None  # those of the rest of the prompt
        self.pending = None if isinstance(embeddings, mx.array) else embeddings  # computes ``embeddings``
        self.cached_text = [] if tokens else cache.text  # the known tokens before ``tokens``
        self.text_start = cache.n_tokens - len(self.cached_text) - len(tokens)  # the index of the first known token
        self._wait(cache, segments, tokens)
        self.prompt_end = cache.n_tokens + self.n_prompt  # the index after the prompt
        self.kv = task.kv.of_text(cache.n_tokens, self.n_prompt)

    def _wait(
        self, cache: PromptCache, segments: Iterable[list[int]], tokens: Sequence[int] = (), n_generated: int = 0
    ) -> None:
        """Wait for the prefill of segments, whose last ``n_generated`` tokens were generated, after tokens in the cache."""
        self.cache = cache
        self.tokens = [*tokens]  # the tokens that the host knows: of the prefilled prompt, and generated ones
        *before, last = [segment for segment in segments if segment]
        # The segments of the rest of the prompt. The last one is its last token.
        self.segments = [*before, last[:-1], last[-1:]] if len(last) > 1 else [*before, last]
        self.n_prompt = sum(map(len, self.segments))
        self.n_prefilled = 0
        self.n_generated = self.n_observed = n_generated  # The host knows the latter number of them.
        self.context: mx.array | None = None  # [N], for the logits processors
        # "length", "stop", "removed", or the error of its sampler, of a processor or of a pass
        self.end: str | Exception | None = None
        stops = self.task.options.stop_sequences
        self.stop = None if stops is None else stops.matcher()
        if self.stop is not None and n_generated > 0:
            for token in last[-n_generated:]:
                self.stop.advance(token)

    def begin_again(self, cache: PromptCache, n: int) -> None:
        """Wait again, with an empty cache: the prompt and the first n generated tokens are prefilled anew."""
        n_tokens = len(self.tokens) - self.n_observed + n
        self._wait(cache, [self.tokens[:n_tokens]], n_generated=n)

    @property
    def can_begin_again(self) -> bool:
        """Whether all of the text is known as tokens."""
        return not self.is_embedded and not self.cached_text and self.text_start == 0

    @property
    def n_unobserved(self) -> int:
        """The number of committed tokens that the host does not know yet."""
        return self.n_generated - self.n_observed

    @property
    def is_complete(self) -> bool:
        """Whether its last token is committed, although the host may not know it yet."""
        return 0 <= self.task.max_tokens <= self.n_generated

    @property
    def is_prefilled(self) -> bool:
        """Whether its prompt is prefilled except for the last token."""
        return len(self.segments) <= 1 and self.pending is None

    def take_prompt(self, n: int) -> None:
        """Count the next n tokens of the prompt as prefilled."""
        first, *others = self.segments
        self.segments = [first[n:], *others] if n < len(first) else others
        self.n_prefilled += n
        if self.task.has_tokens:
            self.tokens += first[:n]
        else:
            self.cached_text = []
            self.text_start = self.cache.n_tokens
        if self.embeddings is not None:
            self.embeddings = self.embeddings[n:] if n < len(self.embeddings) else None

    def take_last(self) -> int:
        """Take the token that the sequence joins with: the prompt's last, or the first that was chosen, if any."""
        if self.segments:
            self.tokens += self.segments.pop()
        return self.tokens[-1] if self.tokens else 0

    def start(self) -> None:
        self.drafting.begin(without_images(self.text, self.text_start, self.images))
        if self.task.options.logits_processors:
            self.context = mx.array(self.tokens, mx.uint32)

    @property
    def text(self) -> list[int]:
        """All tokens that the host knows, from index ``text_start`` on."""
        return [*self.cached_text, *self.tokens]

    def text_of(self, n_tokens: int) -> list[int]:
        """The known tokens before an index; none if they are not all known."""
        n = n_tokens - self.text_start
        text = self.text
        return text[:n] if 0 <= n <= len(text) else []

    def process(self, logits: mx.array, drafts: mx.array) -> mx.array:
        """Apply the logits processors to logits [1, V] of the position after drafts [t]."""
        assert self.context is not None
        shape = logits.shape
        tokens = mx.concatenate([self.context, drafts])
        if tokens.size > 0:  # mlx-lm has none either where the prompt was given as embeddings.
            for processor in self.task.options.logits_processors or ():
                logits = processor(tokens, logits)
        if (found := getattr(logits, "shape", None)) != shape:  # drafts would be read and written beyond their end
            raise MTPError(f"A logits processor returned an array of the shape {found}, not {shape}.")
        return logits

    def commit(self, tokens: mx.array, b: int, n: int) -> None:
        """Commit the first n of ``tokens[b]``, of [B, T], which the host may not know yet."""
        self.n_generated += n
        if self.context is not None:
            self.context = mx.concatenate([self.context, tokens[b, :n]])

    def take(self, tokens: Sequence[int], plan: Plan, n_accepted: int) -> list[int]:
        """Add a step's tokens, now that the host knows them -> the tokens up to the one that ends the sequence."""
        n_before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            self.n_observed += 1
            if self.n_observed == self.task.max_tokens:
                self.end = "length"
            if self.stop is not None and self.stop.advance(token):
                self.end = "stop"
            if self.end is not None:
                break
        taken = self.tokens[n_before:]
        self.drafting.observe(taken, plan, n_accepted)
        return taken


def without_images(text: list[int], first: int, images: list[ImageSpan]) -> list[int]:
    """Replace each image token of a text, which begins with token ``first``, by a negative number of its own, in place."""
    for image in images:
        for i in range(max(image.start, first), min(image.end, first + len(text))):
            text[i - first] = -1 - i
    return text
