"""The moves of speculative decoding: draft, verify, accept, roll back, for one sequence or several.

A *window* has the tokens that one backbone pass verifies: the last decided token of each sequence and its drafts, [B, k + 1]. A
*step* has the tokens that the window yields: the accepted drafts of each sequence and one more token, the target's own. Each
sequence accepts or rejects its own drafts. The host does not wait for a window without drafts: it builds the next pass while
the window runs.

A sequence joins with a prompt cache of all its tokens but the last, which is the decided one, and leaves at a decided token,
while the pass over it is in flight. A single sequence runs in its own prompt cache, in place. Its tokens may be handed over one
by one. The caller may stop at any of them, and the prompt cache then has exactly the tokens handed over (``finalize``). Several
sequences run in the rows of ``caches/rows.py``. The first sequence moves into the rows when the second joins, and the last one
moves back into a prompt cache of its own.

This module does not depend on samplers, layers or the head's architecture, nor on stop conditions.
"""

import weakref
from typing import Any

import mlx.core as mx

from ..caches.prompt_cache import PromptCache, has_head, make_head_cache
from ..caches.rows import RowsCache
from ..caches.single import KVOptions, SingleCache
from ..distributed.ranks import synchronize
from ..layers.compiled import Compiler
from ..models.protocol import MTPModel, PassCaches
from ..pacing.depth import MAX_COPY_TOKENS
from ..pacing.step_times import Plan
from ..sampling.acceptance import n_leading
from .exchange import Exchange
from .head import HeadCache, HeadDrafter, NoHead, with_drafts
from .sequence import Sequence
from .window import Drafts, Records, Step, Window, choose

CLEAR_EVERY = 256  # tokens of a sequence, as mlx-lm


class Decoder:
    """The sequences that generate, and their caches, between two moves.

    Args:
        model (MTPModel): Its backbone verifies, its head drafts.
        kv (KVOptions): The quantization of keys and values. For a single sequence.
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
        self.model, self.kv, self.exchange = model, kv, exchange
        self.stream = stream
        self.generation: weakref.ref[Any] | None = None  # the generator that makes the moves
        self.clear()

    def __len__(self) -> int:
        return len(self.sequences)

    def clear(self) -> None:
        """Remove all sequences."""
        if self.exchange is not None:
            self.exchange.abandon()  # the messages that went with the window in flight
        self.sequences: list[Sequence] = []
        self.rows = RowsCache(self.model)  # the caches of several sequences
        self.cache: PassCaches = self.rows  # or the ``SingleCache`` of a single sequence
        self.compiler = Compiler()
        self.head = HeadCache(self.model, self.compiler) if has_head(self.model) else NoHead()
        self.drafter = HeadDrafter(self.model, self.head)
        self.decided = mx.zeros((0, 1), mx.uint32)  # the last decided token of each sequence, [B, 1]
        self.drafts: Drafts | None = None  # the drafts of the next window
        self.window: Window | None = None  # the verify pass in flight
        self.step: Step | None = None  # the tokens of that window, once its drafts were accepted or rejected
        self.unobserved: Step | None = None  # a step whose tokens the host does not know yet
        # For one sequence: the hidden states of the last window [1, T, H], and the number of them up to the last final token.
        self.last: tuple[mx.array, int] | None = None
        self.n_since_clear = 0  # tokens decided since MLX's buffer cache was last cleared

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

    def verify(self, embeddings: mx.array | None = None) -> Window:
        """Start a pass over the decided tokens and their drafts. Call ``roll_back`` first.

        Args:
            embeddings (mx.array, optional): The embedding to use in place of the decided token's, [1, 1, H].

        Returns:
            Window: The pass in flight.
        """
        drafts, tokens = self.drafts, self.decided
        assert drafts is not None
        if len(drafts) > 0:
            tokens = mx.concatenate([tokens, drafts.tokens], axis=1)
        options: dict[str, Any] = {
            "return_hidden": True,
            "n_confirmed": int(len(drafts) > 0),
            "compiler": self.compiler,
        }
        if embeddings is not None:
            options["input_embeddings"] = embeddings
        self.cache.start_pass(len(drafts) + 1)
        logits, hidden = self.model(tokens, cache=self.cache.entries, **options)
        sent = [] if self.exchange is None else self.exchange.send(hidden)
        self.step, self.window = None, Window(drafts, tokens, logits, hidden, [0] * len(self))
        # Evaluate the states as well: another thread that closes the generator cannot evaluate arrays of this thread's stream.
        mx.async_eval(logits, hidden, self.cache.states, sent)
        return self.window

    # Accept

    def accept(self) -> Step:
        """Accept or reject the drafts of each sequence. A step without drafts does not wait for the device.

        Returns:
            Step: The tokens that the sequences have decided on.
        """
        window = self.window
        assert window is not None
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
        counts = [step.n_decided(b) for b in range(len(self))]
        for b, s in enumerate(self.sequences):
            s.decide(step.choices, b, counts[b])
        self.n_since_clear += max(counts)
        self.step = step
        # A sequence that has failed has no decided token to pair with its hidden states.
        pairs = [0 if s.finish_reason == "error" else n for s, n in zip(self.sequences, counts)]
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

    # Hand over. The loop of one sequence does so token by token.

    def keep_accepted(self, step: Step) -> None:
        """Mark all accepted drafts of a step as final."""
        assert self.window is not None
        self.window.kept = [step.n_decided(b) for b in range(len(self))]

    def keep_last(self) -> None:
        """Mark the last token of the step, which is the first of the window in flight, as final."""
        assert self.window is not None
        self.window.kept, self.cache.before_pass = [1] * len(self), None

    # Roll back

    def roll_back(self) -> None:
        """Remove the tokens that were rejected or not handed over from the caches. May be called again after an interrupt."""
        window = self.window
        if window is None:
            return
        self.last = window.hidden, window.kept[0]
        self.cache.roll_back(window.kept)
        self.window = self.step = None
        if self.n_since_clear >= CLEAR_EVERY:
            mx.clear_cache()
            self.n_since_clear = 0

    # Join and leave

    def open(self, sequence: Sequence) -> None:
        """Begin with one sequence, before its prompt is prefilled (``prefill_prompt``)."""
        self.sequences, self.cache = [sequence], SingleCache(sequence.cache, self.kv)
        self.head.join([sequence.cache], None)

    def join(self, sequences: list[Sequence]) -> None:
        """Add sequences whose prompts are prefilled except for the last token."""
        self.roll_back()
        self.compiler.forget()  # what changed in the model since the other sequences began is seen from here on
        caches, held = [s.cache for s in sequences], [s.cache for s in self.sequences]
        if len(held) + len(caches) == 1:
            self.cache = SingleCache(caches[0], self.kv)
        else:
            self.rows.join(caches if self.cache is self.rows else [*held, *caches])
            self.cache = self.rows
        tokens = mx.array([s.tokens[-1:] for s in sequences], mx.uint32)
        self.head.join(caches, tokens)
        self.decided = mx.concatenate([self.decided, tokens])
        self.sequences = [*self.sequences, *sequences]
        for s in sequences:
            s.start()
            self.drafter.observe(s.tokens)
        if len(self) > 1:
            for s in self.sequences:
                s.cache = PromptCache([None, None], 0)  # its arrays are in the rows

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
        self.decided = self.decided[mx.array(keep)]
        self.sequences = [self.sequences[b] for b in keep]
        if len(keep) == 1:
            (s,), entries = self.sequences, [*self.rows.extract(keep[0]), *make_head_cache(self.model)]
            s.cache = PromptCache(entries, len(self.model.layers))
            s.cache.images = s.images
            self.head.move_to(s.cache)
            self.cache, self.rows = SingleCache(s.cache, self.kv), RowsCache(self.model)
        else:
            self.rows.filter(keep)
        self.drafter.forget(token for s in self.sequences for token in s.tokens)

    def extract(self, sequence: Sequence) -> list[Any]:
        """Copy a sequence's caches into a prompt cache of its tokens, while a window is in flight."""
        assert self.window is not None
        b = self.sequences.index(sequence)
        n = self.cache.n_tokens[b] + 1
        _, last = make_head_cache(self.model)
        entries = [*self.cache.extract(b), self.head.extract(b), last]
        cache = PromptCache(entries, len(self.model.layers))
        cache.images = sequence.images
        cache.last_hidden = mx.contiguous(self.window.hidden[b : b + 1, :1])
        cache.record(n, sequence.text_of(n))
        mx.async_eval([c.state for c in entries])  # now, since until then they keep the caches of all sequences alive
        return entries

    # Finalize

    def finalize(self) -> None:
        """End the generation of one sequence: its prompt cache holds exactly the tokens handed over.

        All other tokens are removed, and the head has keys and values for each token but the last. May be called after an error
        or an interrupt at any line of the moves above or of this method, and in any thread. It survives one more interrupt:
        users press Ctrl-C twice, and still expect the cache to be kept.
        """
        try:
            finalize(self)
        except BaseException:
            finalize(self)
            raise


def finalize(decoder: Decoder) -> None:
    """``Decoder.finalize`` without the second attempt. A second call completes a first one that was interrupted."""
    own = decoder.cache
    assert isinstance(own, SingleCache)
    with mx.stream(decoder.stream):
        if own.restore():
            decoder.window = None
        if (window := decoder.window) is not None:
            # ``accept`` may have given the head these pairs already. They then come twice, and ``HeadCache.finalize`` drops the
            # second ones by number.
            n = window.kept[0]
            decoder.sequences[0].take_accepted(own.n_tokens[0] + n, window.tokens[0, :n])
            decoder.head.extend(window.hidden, window.tokens[:, 1:n], [n - 1])
            decoder.roll_back()
        own.quantize()
        (n,), cache = own.n_tokens, own.cache
        if decoder.last is not None:
            hidden, i = decoder.last
            cache.last_hidden = hidden[:, i - 1 : i]
        decoder.head.finalize(n - 1)
        # A thread that continues this text cannot evaluate lazy arrays of this thread.
        mx.async_eval([c.state for c in cache.entries])
        if decoder.exchange is not None:
            synchronize(decoder.stream)  # collectives of the pass in flight would corrupt those of another stream
        # Last: until here the cache is marked as unfinished.
        cache.record(n, decoder.sequences[0].text_of(n))


def draft_limit(decoder: Decoder, b: int) -> int:
    """The most drafts that sequence b can take within its token limit: a window yields one more token than it accepts."""
    s, k, kv = decoder.sequences[b], MAX_COPY_TOKENS, decoder.kv
    if s.end is not None or not decoder.head.can_draft(b):
        return 0
    if s.max_tokens >= 0:
        k = max(min(k, s.max_tokens - s.n_unobserved - 1), 0)
    if kv.kv_bits is not None:
        n = decoder.cache.n_tokens[b] + (0 if decoder.step is None else decoder.step.n_decided(b))
        if n < kv.quantized_kv_start:
            k = min(k, kv.quantized_kv_start - n - 1)  # mlx-lm quantizes between two tokens, never within a window
    return k
