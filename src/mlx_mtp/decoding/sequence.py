"""A sequence: a text that is generated, with its options, its prompt cache and its tokens so far."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
from mlx_lm.sample_utils import Sampler as AnySampler
from mlx_lm.sample_utils import greedy_sampler

from ..caches.positions import ImageSpan
from ..caches.prompt_cache import PromptCache
from ..caches.rows import KVOptions
from ..drafts.options import TextOptions
from ..drafts.sources import Source, make_sources
from ..pacing.depth import MAX_DRAFT_TOKENS, Offer, Rates
from ..pacing.step_times import HEAD, Plan
from ..sampling.acceptance import TokenMatch, make_acceptance
from ..sampling.processors import restoring_random_state
from ..sampling.sampler import Sampler
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
    """
    Args:
        cache (PromptCache): The prompt cache of its tokens, except for those that a pass in flight verifies.
        options (TextOptions): Its options, resolved. Its logits processors see ``tokens``.
        counts (DraftCounts): Counts its drafts.
        kv (KVOptions): The quantization of its keys and values, of this text: see ``KVOptions.of_text``.
        segments (List[List[int]]): The part of its prompt that is not prefilled yet; the last segment is its last token.
        tokens (List[int]): The tokens that the host knows: the prefilled part of the prompt, and generated tokens.
        embeddings (mx.array, optional): The embeddings of the part of its prompt that is not prefilled yet, [T, H].
          Default: ``None``, the tokens'.
        pending (PendingEmbeddings, optional): The source of ``embeddings`` that are still computed.
          Default: ``None``, they are complete.
        uid (int): Its id in ``BatchGenerator``.

    Attributes:
        max_tokens (int): The number of tokens still to generate; negative for no limit.
        stop (StopSequences.Matcher, optional): Recognizes the last token.
        end (Union[str, Exception], optional): ``"length"``, ``"stop"``, ``"removed"``, or the exception of its sampler or a
          processor; ``None`` while it is running.
        cached_text (List[int]): The tokens of its prompt cache before these, as far back as they are known.
        images (List[ImageSpan]): The images of its text.
        n_generated (int): The number of generated tokens, of which the host may not know the last ones yet.
        n_observed (int): The number of generated tokens that the host knows.
    """

    cache: PromptCache
    options: TextOptions
    counts: DraftCounts
    kv: KVOptions
    segments: list[list[int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    embeddings: mx.array | None = None
    pending: PendingEmbeddings | None = None
    uid: int = 0

    def __post_init__(self) -> None:
        assert self.options.max_tokens is not None
        self.max_tokens = self.options.max_tokens
        self.logits_processors = self.options.logits_processors or ()
        self.stop = None if self.options.stop_sequences is None else self.options.stop_sequences.matcher()
        self.end: str | Exception | None = None
        self.cached_text = [] if self.tokens else self.cache.text
        self.images = self.cache.images
        # The index of the first known token.
        self.text_start = self.cache.n_tokens - len(self.cached_text) - len(self.tokens)
        self.last_hidden: mx.array | None = None  # of the prompt's last token but one, [1, 1, H]
        self.prompt_end = 0  # the index after the prompt, of a sequence that generates alone
        self.n_prefilled, self.n_prompt = 0, sum(map(len, self.segments))
        self.n_generated = self.n_observed = 0
        self.context: mx.array | None = None  # [N], for the logits processors
        self.sample_with(self.options.sampler)
        number = self.options.num_draft_tokens
        self.number = number if isinstance(number, int) else None  # of drafts; ``None`` if it is chosen at every step
        self.rates = Rates(MAX_DRAFT_TOKENS)  # of the head's drafts
        self.sources: dict[str, Source] = {}  # other than the head, by name

    def sample_with(self, sampler: AnySampler | None) -> None:
        """Raise a ValueError if the sampler is for a text that has begun."""
        self.acceptance = make_acceptance(sampler)
        is_greedy = isinstance(self.acceptance, TokenMatch) and self.acceptance.sampler is greedy_sampler
        self.is_greedy = is_greedy and not self.logits_processors  # one argmax serves all greedy sequences
        # Without drafts, sequences of equal samplers are drawn in one call. mlx-lm's samplers are not: all sequences of a call
        # would share XTC's random number.
        self.shared_sampler = sampler if type(sampler) is Sampler and not self.logits_processors else None

    @property
    def needs_tokens(self) -> bool:
        """Whether the host must know its last token before the next can be chosen."""
        return any(getattr(p, "needs_tokens", False) for p in self.logits_processors)

    @property
    def finish_reason(self) -> str | None:
        return "error" if isinstance(self.end, Exception) else self.end

    @property
    def n_unobserved(self) -> int:
        """The number of decided tokens that the host does not know yet."""
        return self.n_generated - self.n_observed

    @contextmanager
    def own_errors(self) -> Iterator[None]:
        """A context for calls of its sampler and processors: an exception ends this sequence, and no other."""
        try:
            with restoring_random_state():
                yield
        except Exception as e:
            self.end = e

    def check(self) -> None:
        """Raise the exception of its sampler or a processor that has ended it, if any."""
        if isinstance(self.end, Exception):
            raise self.end

    def skip(self, n: int) -> None:
        """Skip n positions of the prompt that were given as embeddings, without tokens."""
        self.cached_text, self.text_start = [], self.text_start + len(self.cached_text) + n

    def start(self) -> None:
        """Make its sources of drafts, once the prompt is prefilled."""
        text = without_images([*self.cached_text, *self.tokens], self.text_start, self.images)
        self.sources = make_sources(self.options, text)
        if self.logits_processors:
            self.context = mx.array(self.tokens, mx.uint32)

    def tokens_between(self, n: int, n_generated: int) -> list[int]:
        """The tokens from index n up to a number of generated ones."""
        text = [*self.cached_text, *self.tokens]
        return text[n - self.text_start : self.prompt_end + n_generated - self.text_start]

    def text_of(self, n_tokens: int) -> list[int]:
        """The known tokens at the end of a prompt cache of ``n_tokens`` tokens."""
        n, text = n_tokens - self.text_start, [*self.cached_text, *self.tokens]
        return text[:n] if 0 <= n <= len(text) else []

    def offers(self, limit: int) -> Offer:
        """The acceptance rates of up to ``limit`` drafts of each source that has drafts now."""
        rates = {name: source.acceptance(self.n_unobserved)[:limit] for name, source in self.sources.items()}
        if self.number != 0:
            rates[HEAD] = self.rates.estimate[: limit if self.number is None else min(limit, self.number)]
        return {name: of_each for name, of_each in rates.items() if of_each}

    def logprobs(self, logits: mx.array, drafts: mx.array) -> mx.array:
        """Logits [1, V] of the position after some drafts [t] -> log probabilities [1, V], processed."""
        if self.logits_processors:
            assert self.context is not None
            tokens = mx.concatenate([self.context, drafts])
            if tokens.size > 0:  # as mlx-lm, which has none where the prompt was given as embeddings
                for processor in self.logits_processors:
                    logits = processor(tokens, logits)
        return logits - mx.logsumexp(logits, keepdims=True)

    def decide(self, tokens: mx.array, b: int, n: int) -> None:
        """Decide on the first n of ``tokens[b]``, of [B, T], which the host may not know yet."""
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


def without_images(text: list[int], first: int, images: list[ImageSpan]) -> list[int]:
    """Replace each image token of a text, which begins with token ``first``, by a negative number of its own."""
    text = text[:]
    for image in images:
        for i in range(max(image.start, first), min(image.end, first + len(text))):
            text[i - first] = -1 - i
    return text
