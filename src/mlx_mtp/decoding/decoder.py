"""The moves of speculative decoding: draft, verify, accept, roll back, for any number of sequences.

A *window* has the tokens that one backbone pass verifies: the last decided token of each sequence and its drafts, [B, k + 1]. A
*step* has the tokens that the window yields: the accepted drafts of each sequence and one more token, the target's own. Each
sequence accepts or rejects its own drafts. The host does not wait for a window without drafts: it builds the next pass while
the window runs.

A sequence joins with a prompt cache of all its tokens but the last, which is the decided one. It leaves at a decided token,
while the pass over it is in flight (``extract``). No move changes the keys, values and states of the tokens before its window,
so a ``DecoderState`` can be restored until sequences join or leave.

This module does not depend on samplers, layers or the head's architecture, nor on stop conditions.
"""

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..caches.prompt_cache import PromptCache, has_head, release
from ..caches.rows import KVOptions, Rows, RowsState
from ..layers.compiled import Compiler
from ..models.mixin import MTPModel
from ..pacing.depth import MAX_COPY_TOKENS
from ..pacing.step_times import PLAIN_PLAN, Plan
from ..sampling.acceptance import n_leading
from .exchange import Exchange
from .head import HeadCache, HeadDrafter, HeadState, NoHead, with_drafts
from .sequence import Sequence
from .window import Drafts, Records, Step, Window, choose

CLEAR_EVERY = 256  # tokens of a sequence, as mlx-lm

Hidden = tuple[mx.array, list[int]]  # hidden states [B, T, H], and the column of each sequence


@dataclass(frozen=True)
class DecoderState:
    """The caches of all sequences, without the pass in flight.

    Args:
        rows (RowsState): The backbone's.
        head (HeadState): The head's.
        last (Tuple, optional): The hidden state of each sequence's last token; ``None`` after sequences have joined or left.
    """

    rows: RowsState
    head: HeadState
    last: Hidden | None


class Decoder:
    """The sequences that generate, and their caches, between two moves.

    Args:
        model (MTPModel): Its backbone verifies, its head drafts.
        kv (KVOptions): The quantization of keys and values.
        exchange (Exchange, optional): Sends times and checksums with each pass where several ranks run the model.
        stream (Union[mx.Stream, mx.ThreadLocalStream]): The stream on which the caller runs the moves.
    """

    def __init__(
        self,
        model: MTPModel,
        *,
        kv: KVOptions = KVOptions(),  # noqa: B008
        exchange: Exchange | None = None,
        stream: mx.Stream | mx.ThreadLocalStream,
    ):
        self.model, self.kv, self.exchange, self.stream = model, kv, exchange, stream
        self.clear()

    def __len__(self) -> int:
        return len(self.sequences)

    def clear(self) -> None:
        """Remove all sequences."""
        if self.exchange is not None:
            self.exchange.abandon()  # the messages that went with the window in flight
        self.sequences: list[Sequence] = []
        self.cache, self.compiler = Rows(self.model, self.kv), Compiler()
        self.head = HeadCache(self.model, self.compiler) if has_head(self.model) else NoHead()
        self.drafter = HeadDrafter(self.model, self.head)
        self.decided = mx.zeros((0, 1), mx.uint32)  # the last decided token of each sequence, [B, 1]
        self.drafts: Drafts | None = None  # the drafts of the next window
        self.window: Window | None = None  # the verify pass in flight
        self.step: Step | None = None  # the tokens of that window, once its drafts were accepted or rejected
        self.unobserved: Step | None = None  # a step whose tokens the host does not know yet
        self.last: Hidden | None = None
        self.n_since_clear = 0  # tokens decided since MLX's buffer cache was last cleared

    @property
    def state(self) -> DecoderState:
        return DecoderState(self.cache.state, self.head.state, self.last)

    def restore(self, state: DecoderState) -> None:
        """Restore an earlier state, without a pass in flight. Sequences must not have joined or left since."""
        self.window = self.step = self.drafts = self.unobserved = None
        self.cache.state, self.cache.in_flight = state.rows, 0
        self.head.state, self.last = state.head, state.last

    # Draft

    def draft(self, drafts: Drafts) -> None:
        """Make the drafts of the next window, by the plan of each sequence."""
        self.drafts, plans = drafts, drafts.plans
        if all(plan.k == 0 for plan in plans):
            return
        limits = [0 if plan.skips_head else plan.k for plan in plans]
        tokens, records = mx.zeros((len(plans), 0), mx.uint32), Records([] for _ in plans)
        if max(limits) > 0:
            tokens, records = self.drafter.propose(self.sequences, limits)
        plans = [plan if plan.skips_head else Plan(k) for plan, k in zip(plans, limits)]
        for b, (s, plan) in enumerate(zip(self.sequences, plans)):
            if plan.skips_head:
                own, records[b] = s.sources[plan.source].propose(plan.k, s.n_unobserved)
                plans[b] = Plan(len(own), plan.source)
                tokens = with_drafts(tokens, b, own)
        drafts.plans, drafts.tokens, drafts.records = plans, tokens, records
        mx.async_eval(tokens)

    # Verify

    def verify(self) -> None:
        """Start a pass over the decided tokens and their drafts. Call ``roll_back`` first."""
        drafts, tokens = self.drafts, self.decided
        assert drafts is not None
        if len(drafts) > 0:
            tokens = mx.concatenate([tokens, drafts.tokens], axis=1)
        self.cache.start_pass()
        logits, hidden = self.model(
            tokens,
            cache=self.cache.entries,
            input_embeddings=self._given_embeddings(tokens),
            return_hidden=True,
            n_confirmed=int(len(drafts) > 0),
            compiler=self.compiler,
        )
        self.cache.end_pass(tokens.shape[1])
        sent = [] if self.exchange is None else self.exchange.send(hidden)
        self.window = Window(drafts, tokens, logits, hidden)
        # Evaluate the states as well: another thread that closes the generator cannot evaluate arrays of this thread's stream.
        mx.async_eval(logits, hidden, self.cache.states, sent)

    def _given_embeddings(self, tokens: mx.array) -> mx.array | None:
        """The embeddings of a window [B, T, H], if the last token of a prompt that has just joined was given as one."""
        given = [(b, s) for b, s in enumerate(self.sequences) if s.embeddings is not None]
        if not given:
            return None
        embeddings: mx.array = self.model.model.embed_tokens(tokens)
        for b, s in given:
            embeddings[b, 0], s.embeddings = s.embeddings[0], None  # type: ignore[index]
        return embeddings

    # Accept

    def accept(self) -> Step | None:
        """Accept or reject the drafts of each sequence. A step without drafts does not wait for the device.

        Returns:
            Step: The tokens that the sequences have decided on; ``None`` if no window is in flight.
        """
        window = self.window
        if window is None:
            return None
        drafts, step = window.drafts, choose(window)
        self.unobserved = step
        if len(drafts) > 0:
            mx.eval(step.choices, step.accepted)
            leading: Any = step.accepted.tolist()
            step.n_accepted = [
                0 if has_ended else n_leading(flags[: plan.k])
                for flags, plan, has_ended in zip(leading, drafts.plans, step.has_ended)
            ]
            drafts.records = []  # free them: a record may have an array as large as the vocabulary
            self.wait()
        else:
            # Before the next pass is queued: otherwise the host would wait for both passes to read the choices.
            mx.async_eval(step.choices)
            if any(s.needs_tokens for s in self.sequences):
                self.wait()
        self.decided = step.last_tokens()
        for b, (s, n) in enumerate(zip(self.sequences, step.counts)):
            s.decide(step.choices, b, n)
        self.n_since_clear += max(step.counts)
        self.step = step
        # A sequence that has failed has no decided token to pair with its hidden states.
        pairs = [0 if s.finish_reason == "error" else n for s, n in zip(self.sequences, step.counts)]
        self.head.extend(window.hidden, step.choices, pairs)
        return step

    def wait(self) -> None:
        """Wait for the tokens of the latest step, and let its sequences take them.

        After a step without drafts, the device runs the next pass meanwhile.
        """
        step = self.unobserved
        if step is None:
            return
        choices: Any = step.choices.tolist()
        tokens = []
        for b, (s, plan) in enumerate(zip(step.sequences, step.drafts.plans)):
            n = step.n_accepted[b]
            tokens.append([] if step.has_ended[b] else s.take(choices[b][: n + 1], plan, n))
        every = tokens[0] if len(tokens) == 1 else [token for of_one in tokens for token in of_one]
        if self.exchange is not None:
            self.exchange.receive(every)
        self.drafter.observe(every)
        step.tokens, self.unobserved = tokens, None

    # Roll back

    def roll_back(self) -> None:
        """Remove the rejected tokens of the window in flight from the caches."""
        if self.window is None or self.step is None:
            return
        kept = self.step.counts
        self.cache.commit(kept)
        self.last = self.window.hidden, [n - 1 for n in kept]
        self.window = self.step = None
        if self.n_since_clear >= CLEAR_EVERY:
            mx.clear_cache()
            self.n_since_clear = 0

    # Join and leave

    def join(self, sequences: list[Sequence]) -> None:
        """Add sequences whose prompts are prefilled except for the last token."""
        self.roll_back()
        self.compiler.forget()  # what changed in the model since the other sequences began is seen from here on
        tokens = mx.array([s.tokens[-1:] for s in sequences], mx.uint32)
        self._add(sequences, tokens)
        self.decided = mx.concatenate([self.decided, tokens])

    def begin(self, sequence: Sequence, logits: mx.array, hidden: mx.array) -> None:
        """Begin with one sequence whose whole prompt is prefilled, with the outputs of its last token, each [1, 1, ...]."""
        self._add([sequence], None)
        if self.exchange is not None:
            mx.async_eval(self.exchange.send(hidden))
        drafts = Drafts([sequence], [PLAIN_PLAN], PLAIN_PLAN, None)
        self.window = Window(drafts, mx.zeros((1, 1), mx.uint32), logits, hidden)

    def _add(self, sequences: list[Sequence], tokens: mx.array | None) -> None:
        starts = [math.inf if s.kv.kv_bits is None else s.kv.quantized_kv_start for s in sequences]
        self.cache.join([s.cache for s in sequences], starts)
        self.head.join([s.cache for s in sequences], tokens, [s.embeddings for s in sequences])
        self.last = None
        self.sequences = [*self.sequences, *sequences]
        for s in sequences:
            s.last_hidden = s.cache.last_hidden
            release(s.cache)
            s.start()
            self.drafter.observe(s.tokens)

    def filter(self, sequences: list[Sequence]) -> None:
        """Keep these sequences."""
        keep = [b for b, s in enumerate(self.sequences) if s in sequences]
        if len(keep) == len(self):
            return
        if not keep:
            self.wait()
            self.clear()
            return
        self.roll_back()
        self.head.filter(keep)
        self.cache.filter(keep)
        self.decided, self.last = self.decided[mx.array(keep)], None
        self.sequences = [self.sequences[b] for b in keep]
        self.drafter.forget(token for s in self.sequences for token in s.tokens)

    def extract(self, sequence: Sequence, cache: PromptCache) -> int:
        """Put a sequence's tokens into a prompt cache; with a window in flight, up to its first token. ``record`` completes it.

        Returns:
            int: The number of tokens.
        """
        b, in_flight = self.sequences.index(sequence), self.cache.in_flight > 0
        n = self.cache.n_tokens[b] + in_flight
        cache.entries[:-1] = [*self.cache.extract(b), self.head.extract(b, n)]
        cache.begin(n)
        cache.images, cache.last_hidden = sequence.images, sequence.last_hidden
        if in_flight and self.window is not None:
            cache.last_hidden = mx.contiguous(self.window.hidden[b : b + 1, :1])
        elif self.last is not None:
            hidden, columns = self.last
            cache.last_hidden = mx.contiguous(hidden[b : b + 1, columns[b] : columns[b] + 1])
        # Now: until then they keep the caches of all sequences alive, and another thread cannot evaluate arrays of this one.
        mx.async_eval([c.state for c in cache.entries])
        return n


def draft_limit(decoder: Decoder, b: int) -> int:
    """The most drafts that sequence b can take within its token limit: a window yields one more token than it accepts."""
    s, k = decoder.sequences[b], MAX_COPY_TOKENS
    if s.end is not None or not decoder.head.can_draft(b):
        return 0
    if s.max_tokens >= 0:
        k = max(min(k, s.max_tokens - s.n_unobserved - 1), 0)
    step = decoder.step if decoder.cache.in_flight > 0 else None  # a prompt's last token is in the caches already
    n = decoder.cache.n_tokens[b] + (0 if step is None else step.counts[b])
    if s.kv.kv_bits is not None and n < s.kv.quantized_kv_start:  # quantized after a token, never within a window
        k = min(k, s.kv.quantized_kv_start - n - 1)
    return k
