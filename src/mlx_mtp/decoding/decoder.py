"""The moves of speculative decoding: draft, verify, accept, roll back. There are one or more sequences; each accepts by itself.

A *window* is what one backbone pass verifies: the last decided token of each sequence and its drafts, [B, k + 1]. A *step* is
what it yields: of each sequence the accepted drafts and one more token, the target's own. A window without drafts is not waited
for: the next pass is built while it runs.

A sequence joins with a prompt cache of all its tokens but the last, which is the decided one, and leaves at a decided token,
while the pass over it is in flight. One sequence alone runs in its own prompt cache, in place. Its tokens may be handed over
one by one; the caller may stop at any of them, and the prompt cache is then that of the tokens handed over (``finalize``).
Several run in the rows of ``models/rows.py``. They move between the two where the second joins and where one is left.

This module knows nothing of temperatures, layers and heads, nor of when to stop.
"""

import weakref
from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx

from ..models.prompt_cache import PromptCache, has_head, make_head_cache
from ..models.protocol import MTPModel
from ..models.rows import RowsCache
from ..models.single import KVOptions, SingleCache
from .acceptance import n_leading, rewind
from .choice import choose_at_once, choose_in_order
from .depth import MAX_COPY_TOKENS
from .drafter import HeadDrafter, NoHead
from .exchange import Exchange
from .read import read_chunk, read_head
from .sequence import Sequence
from .step_times import PLAIN_PLAN, Plan
from .window import NO_DRAFTS, Drafts, Step, Token, Window

CLEAR_EVERY = 256  # tokens of a sequence, as mlx-lm


class Decoder:
    """The sequences that generate, and their caches, between two moves.

    Args:
        model (MTPModel): Its backbone verifies, its head drafts.
        p_min (float): The least probability of a draft, of one sequence.
        exact (bool): Verify with the same operations as plain decoding, one sequence alone.
        kv (KVOptions): When and how to quantize keys and values, of one sequence alone.
        exchange (Exchange, optional): Goes with each pass where several ranks run the model.
        stream (Union[mx.Stream, mx.ThreadLocalStream]): Where the caller runs the moves.
    """

    def __init__(
        self,
        model: MTPModel,
        *,
        p_min: float = 0.0,
        exact: bool = False,
        kv: KVOptions = KVOptions(),  # noqa: B008
        exchange: Exchange | None = None,
        stream: mx.Stream | mx.ThreadLocalStream,
    ):
        self.model, self.p_min, self.exact, self.kv, self.exchange = model, p_min, exact, kv, exchange
        self.stream = stream
        self.generation: weakref.ref[Any] | None = None  # the generator that makes the moves
        self.clear()

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def is_alone(self) -> bool:
        """Whether one sequence runs in its own prompt cache."""
        return isinstance(self.cache, SingleCache)

    @property
    def nbytes(self) -> int:
        """The size of the caches."""
        return self.cache.nbytes + self.head.nbytes

    def clear(self) -> None:
        """Let go of all sequences."""
        if self.exchange is not None:
            self.exchange.abandon()  # what went with the window in flight
        self.sequences: list[Sequence] = []
        self.n_tokens: list[int] = []  # that are final in each sequence's caches
        self.cache: SingleCache | RowsCache = RowsCache(self.model)
        self.head: HeadDrafter | NoHead = HeadDrafter(self.model) if has_head(self.model) else NoHead()
        self.decided = mx.zeros((0, 1), mx.uint32)  # each sequence's next token, [B, 1]
        self.window: Window | None = None
        self.step: Step | None = None  # what came of the window, once it was accepted
        self.unread: Step | None = None  # a step whose tokens the host does not know
        # Of one sequence: hidden states [1, T, H], and how many up to that of its last token.
        self.last: tuple[mx.array, int] | None = None
        self.drafts = Drafts(NO_DRAFTS, [], [])  # the next window's
        self.n_since_clear = 0  # tokens of a sequence, since MLX's buffer cache was last cleared

    # Prefill, of one sequence in its own prompt cache

    def open(self, sequence: Sequence) -> None:
        """Begin with one sequence, before its prompt is read."""
        cache = sequence.cache
        self.sequences, self.cache, self.n_tokens = [sequence], SingleCache(cache, self.kv), [cache.n_tokens]
        self.head.join([cache], None)

    def prefill(
        self, prompt: mx.array, embeddings: mx.array | None, chunk: int, progress: Callable[[int, int], Any]
    ) -> None:
        """Read a prompt [T], or its embeddings [T, H], in chunks, and verify a window of its last token alone."""
        (s,), n, done = self.sequences, len(prompt if embeddings is None else embeddings), 0
        s.cache.claim(self.generation)
        progress(0, n)
        if len(prompt) == 0:
            s.skip(n)
        while (size := min(chunk, n - 1 - done)) > 0:
            part = slice(done, done + size)
            s.read(prompt[part].tolist())  # type: ignore[arg-type]
            self._read(prompt[part], None if embeddings is None else embeddings[part])
            done += size
            progress(done, n)
        s.read(prompt[done:].tolist())  # type: ignore[arg-type]
        self._read_last(prompt[done:], None if embeddings is None else embeddings[done:])
        progress(n, n)

    def _read(self, tokens: mx.array, embeddings: mx.array | None) -> None:
        """Read a part [T] of the prompt, or its embeddings [T, H], into all caches."""
        own = self.cache
        assert isinstance(own, SingleCache)
        own.start_pass()
        read_chunk(self.model, own.cache, tokens, embeddings)
        own.quantize()
        mx.eval([c.state for c in own.entries])
        # At once, as in ``roll_back``.
        self.n_tokens, own.before, self.head.n_rows = (
            [self.n_tokens[0] + len(tokens if embeddings is None else embeddings)],
            None,
            own.cache.head.offset,
        )
        mx.clear_cache()

    def _read_last(self, token: mx.array, embeddings: mx.array | None) -> None:
        """Read the prompt's last token [1], or its embedding [1, H], as a window of its own."""
        own = self.cache
        assert isinstance(own, SingleCache)
        if (hidden := own.cache.last_hidden) is not None:
            read_head(self.model, own.cache, hidden, token, embeddings, own.cache.head_positions)
            self.head.n_rows = own.cache.head.offset
        self.sequences[0].start()
        self.head.read(self.sequences[0].tokens)
        self.decided = token[None]
        self.drafts = Drafts(NO_DRAFTS, [], [PLAIN_PLAN])
        self.verify(None if embeddings is None else embeddings[None])
        assert self.window is not None
        # Not the logits: a prompt alone needs none.
        mx.eval(self.window.hidden, own.states, own.cache.head.state)
        self.window.kept, own.before = [1], None

    # Draft

    def room(self, b: int) -> int:
        """The most drafts that sequence b can take: a window yields one more token than it accepts."""
        s, k = self.sequences[b], MAX_COPY_TOKENS
        if s.end is not None or not self.head.can_draft(b):
            return 0
        if s.max_tokens >= 0:
            k = max(min(k, s.max_tokens - s.n_unread - 1), 0)
        if self.kv.kv_bits is not None:
            n = self.n_tokens[b] + (0 if self.step is None else self.step.n_decided(b))
            if n < self.kv.quantized_kv_start:
                k = min(k, self.kv.quantized_kv_start - n - 1)  # mlx-lm quantizes between two tokens: never in a window
        return k

    @property
    def rooms(self) -> list[int]:
        return [self.room(b) for b in range(len(self))]

    def draft(self, plans: list[Plan]) -> None:
        """Draft for the next window, for each sequence what its plan says."""
        self.drafts = Drafts(NO_DRAFTS, [], plans)
        if all(plan.k == 0 for plan in plans):
            return
        limits = [0 if plan.is_free else plan.k for plan in plans]
        tokens, records = mx.zeros((len(plans), 0), mx.uint32), list[list[Any]]([] for _ in plans)
        if max(limits) > 0:
            tokens, records = self.head.propose(self.sequences, limits, self.p_min if len(plans) == 1 else 0.0)
        plans = [plan if plan.is_free else Plan(k) for plan, k in zip(plans, limits)]
        if (n := max(plan.k for plan in plans)) > tokens.shape[1]:
            tokens = mx.pad(tokens, [(0, 0), (0, n - tokens.shape[1])])  # [B, n]
        for b, plan in enumerate(plans):
            if plan.is_free:
                s = self.sequences[b]
                tokens[b, : plan.k], records[b] = s.sources[plan.source].propose(plan.k, s.n_unread)
        self.drafts = Drafts(tokens, records, plans) if n > 0 else Drafts(NO_DRAFTS, [], plans)
        mx.async_eval(self.drafts.tokens)

    # Verify

    def verify(self, embeddings: mx.array | None = None) -> None:
        """Start a pass over the decided tokens and drafts, once ``roll_back`` was called.

        Args:
            embeddings (mx.array, optional): In place of the decided token's, [1, 1, H].
        """
        drafts, tokens = self.drafts.tokens, self.decided
        if drafts.shape[1] > 0:
            tokens = mx.concatenate([tokens, drafts], axis=1)
        options: dict[str, Any] = {"return_hidden": True, "n_confirmed": int(drafts.shape[1] > 0)}
        if self.exact:
            options["exact"] = True  # without drafts, too: as mlx-lm's operations, not compiled ones
        if embeddings is not None:
            options["input_embeddings"] = embeddings
        self.cache.start_pass()
        logits, hidden = self.model(tokens, cache=self.cache.entries, **options)
        sent = [] if self.exchange is None else self.exchange.send(hidden)
        self.step, self.window = None, Window(tokens, *self.drafts, logits, hidden, [0] * len(self))
        # The states as well: nothing may be left to compute on this thread's stream, should another thread close the generator.
        mx.async_eval(logits, hidden, self.cache.states, sent)

    # Accept

    def accept(self) -> Generator[Token, None, Step]:
        """Each sequence accepts or rejects its drafts: all at once, or one after the other where a processor keeps state.

        Without drafts this does not wait for the device. It yields nothing but the accepted drafts of one sequence that accepts
        them one after the other.
        """
        window = self.window
        assert window is not None
        if window.n_drafts > 0 and len(self) == 1 and self.sequences[0].in_order:
            step, accepted, states = yield from choose_in_order(self.sequences[0], window, self.stream)
        else:
            with mx.stream(self.stream):
                step, accepted, states = choose_at_once(self.sequences, window)
        with mx.stream(self.stream):
            self.unread = step
            if window.n_drafts > 0:
                mx.eval(step.choices, accepted, states)
                leading: Any = accepted.tolist()
                step.n_accepted = [n_leading(row[: plan.k]) for row, plan in zip(leading, window.plans)]
                rewind(states, step.n_accepted[0])
                self.wait()
            else:
                mx.async_eval(step.choices)  # apart from the next pass, which it would be waited for with
                if any(s.needs_tokens for s in self.sequences):
                    self.wait()
            self._decide(step)
        return step

    def _decide(self, step: Step) -> None:
        """Go on behind a step."""
        counts = [step.n_decided(b) for b in range(len(self))]
        if step.choices.shape[1] == 1:
            self.decided = step.choices
        elif len(self) == 1:
            self.decided = step.choices[:, counts[0] - 1 : counts[0]]
        else:
            self.decided = mx.take_along_axis(step.choices, mx.array(counts)[:, None] - 1, axis=1)
        for b, s in enumerate(self.sequences):
            s.decide(step.choices, b, counts[b])
        self.n_since_clear += max(counts)
        self.step = step
        # One that has failed has not decided anything.
        pairs = [0 if s.finish_reason == "error" else n for s, n in zip(self.sequences, counts)]
        self.head.extend(step.window.hidden, step.choices, pairs)

    def wait(self) -> None:
        """Take the tokens of the latest step. Without drafts the device runs the next pass meanwhile."""
        step = self.unread
        if step is None:
            return
        choices: Any = step.choices.tolist()
        tokens = [
            [] if has_ended else s.take(chosen[: n + 1], plan, n)
            for s, chosen, plan, n, has_ended in zip(
                step.sequences, choices, step.window.plans, step.n_accepted, step.has_ended
            )
        ]
        every = tokens[0] if len(tokens) == 1 else [token for of_one in tokens for token in of_one]
        if self.exchange is not None:
            self.exchange.receive(every)
        self.head.read(every)
        step.tokens, self.unread = tokens, None

    def hand_over(self) -> None:
        """All tokens that the host knows are handed over: those of the step, or the first of the window in flight."""
        assert self.window is not None
        if self.step is None:
            self.window.kept = [1] * len(self)
            if isinstance(self.cache, SingleCache):
                self.cache.before = None
        else:
            self.window.kept = [self.step.n_decided(b) for b in range(len(self))]

    def hand_over_accepted(self, step: Step) -> Generator[Token, None, None]:
        """Of one sequence: yield the accepted drafts that were not handed over yet, while the device drafts."""
        window = step.window
        if window.kept[0] > step.n_accepted[0]:
            return
        assert step.tokens is not None
        for i, token in enumerate(step.tokens[0][:-1]):
            with mx.stream(self.stream):
                logprobs = step.logprobs_of(0, i)
            window.kept = [2 + i]
            yield token, logprobs, True

    def hand_over_last(self, step: Step) -> Generator[Token, None, None]:
        """Of one sequence: yield the step's last token, which is the first of the window that is being verified."""
        window, cache = self.window, self.cache
        assert step.tokens is not None
        assert window is not None
        assert isinstance(cache, SingleCache)
        token = step.tokens[0][-1]
        with mx.stream(self.stream):
            logprobs = step.logprobs_of(0, len(step.tokens[0]) - 1)
        # From here on the token counts as handed over. No call is in between, at which an interrupt could come.
        window.kept, cache.before = [1], None
        yield token, logprobs, False

    # Roll back

    def roll_back(self) -> None:
        """Take what was rejected, or not handed over, out of the caches."""
        window = self.window
        if window is None:
            return
        cache, kept = self.cache, window.kept
        if isinstance(cache, SingleCache):
            if window.n_drafts > 0:
                cache.roll_back(self.n_tokens[0], kept[0])
            # At once: an interrupt finds all of it done, or to be done again.
            self.n_tokens, self.window, self.last, cache.is_rolling_back = (
                [self.n_tokens[0] + kept[0]],
                None,
                (window.hidden, kept[0]),
                False,
            )
            cache.quantize()  # what the pass has added, as mlx-lm does
        else:
            cache.roll_back(kept)
            self.n_tokens, self.window = [n + new for n, new in zip(self.n_tokens, kept)], None
        self.step = None
        if self.n_since_clear >= CLEAR_EVERY:
            mx.clear_cache()
            self.n_since_clear = 0

    # Sequences come and go

    def join(self, sequences: list[Sequence]) -> None:
        """Add sequences whose prompts are read but for the last token."""
        self.roll_back()
        caches = [s.cache for s in sequences]
        if len(self) == 0 and len(sequences) == 1:
            self.cache, self.n_tokens = SingleCache(caches[0], self.kv), [caches[0].n_tokens]
        else:
            if isinstance(self.cache, SingleCache):
                self.cache = self._rows_of(self.cache.cache.backbone)
            self.cache.join([c.backbone for c in caches], [c.n_tokens for c in caches], [s.shift for s in sequences])
            self.n_tokens = [*self.n_tokens, *(c.n_tokens for c in caches)]
        tokens = mx.array([s.tokens[-1:] for s in sequences], mx.uint32)
        self.head.join(caches, tokens)
        self.decided = mx.concatenate([self.decided, tokens])
        self.sequences = [*self.sequences, *sequences]
        for s in sequences:
            s.start()
            self.head.read(s.tokens)
        if not self.is_alone:
            for s in self.sequences:
                s.cache = PromptCache([None, None], 0)  # its arrays are in the rows

    def _rows_of(self, caches: list[Any]) -> RowsCache:
        rows = RowsCache(self.model)
        rows.join([caches], self.n_tokens, [s.shift for s in self.sequences])
        return rows

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
        self.n_tokens = [self.n_tokens[b] for b in keep]
        self.decided = self.decided[mx.array(keep)]
        self.sequences = [self.sequences[b] for b in keep]
        assert isinstance(self.cache, RowsCache)
        if len(keep) == 1:
            (s,), entries = self.sequences, [*self.cache.extract(keep[0]), *make_head_cache(self.model)]
            s.cache = PromptCache(entries, len(self.model.layers))
            s.cache.images = s.images
            if isinstance(self.head, HeadDrafter):
                entries[-2] = s.cache.head = self.head.cache
                self.head.first_row = self.n_tokens[0] - self.head.cache.offset - self.head.counts[0]
            self.cache = SingleCache(s.cache, self.kv)
        else:
            self.cache.filter(keep)
        self.head.forget(token for s in self.sequences for token in s.tokens)

    def extract(self, sequence: Sequence) -> list[Any]:
        """While a window is in flight: a prompt cache of a sequence's tokens."""
        assert self.window is not None
        b = self.sequences.index(sequence)
        n = self.n_tokens[b] + 1
        backbone = self.cache.extract(n) if isinstance(self.cache, SingleCache) else self.cache.extract(b, 1)
        _, last = make_head_cache(self.model)
        entries = [*backbone, self.head.extract(b), last]
        cache = PromptCache(entries, len(self.model.layers))
        cache.images = sequence.images
        cache.last_hidden = mx.contiguous(self.window.hidden[b : b + 1, :1])
        cache.record(n, sequence.text_of(n))
        mx.async_eval([c.state for c in entries])  # at once: they refer to the caches of all sequences
        return entries

    # Finalize

    def finalize(self) -> None:
        """Of one sequence: keep the tokens handed over, take back all others, and give the head a row for each but the last.

        This may come at any point of the moves above and of itself, after an error or an interrupt, and in any thread. A second
        interrupt does not stop it, since who asks for a cache to be kept presses Ctrl-C twice, too.
        """
        try:
            self._finalize()
        except BaseException:
            self._finalize()
            raise

    def _finalize(self) -> None:
        own = self.cache
        assert isinstance(own, SingleCache)
        with mx.stream(self.stream):
            if own.before is not None:
                own.restore()
                self.window = None
            if self.window is not None:
                # ``accept`` may have told the head of these already: then they come twice, and the second time is ignored.
                n = self.window.kept[0]
                self.head.extend(self.window.hidden, self.window.tokens[:, 1:n], [n - 1])
                self.roll_back()
            own.quantize()  # as mlx-lm does after every pass
            (n,), cache = self.n_tokens, own.cache
            if self.last is not None:
                hidden, i = self.last
                cache.last_hidden = hidden[:, i - 1 : i]
            self.head.finalize(n - 1)
            # Another thread, which goes on from here, cannot evaluate what this one left lazy.
            mx.async_eval([c.state for c in cache.entries])
            if self.exchange is not None:
                mx.synchronize(self.stream)  # collectives of the pass in flight would corrupt those of another stream
            # Last: until here the cache is known to be unfinished.
            cache.record(n, self.sequences[0].text_of(n))
