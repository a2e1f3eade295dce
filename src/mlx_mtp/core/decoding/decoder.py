"""The moves of a step of speculative decoding (``loop.py``), for any number of sequences.

No move changes the keys, values and states of the tokens before the window, so a ``DecoderState`` can be restored until
sequences join or leave. The moves do not depend on samplers, layers, the head's architecture or stop conditions.
"""

from itertools import chain
from typing import Any

import mlx.core as mx

from ...errors import MTPError, NotANumberError
from ..caches.prompt_cache import PromptCache, empty_head
from ..caches.rows import KVOptions, Rows, RowsState
from ..layers.compiled import Compiler
from ..models.mixin import MTPModel
from ..pacing import MAX_COPY_TOKENS, MAX_WINDOW
from ..pacing.step_times import PLAIN_PLAN, Plan
from ..sampling.acceptance import n_leading
from .exchange import Exchange
from .head import HeadDrafter, HeadState, columns_of
from .prefill import prefill_part
from .sequence import TextSequence
from .window import NO_NUMBER, Choice, Drafts, Step, Stepped, Window, WindowPlan, choose, with_rows

CLEAR_EVERY = 256  # tokens of a sequence, as mlx-lm
# Hidden states [B, T, H], and the row and the column of the token before the last; ``None`` for a text's first token, [B]
Hidden = tuple[tuple[mx.array, int, int] | None, ...]
# The caches of all sequences, without the pass in flight, and their last tokens [B, 1], which the next pass begins with
DecoderState = tuple[RowsState, HeadState, mx.array, Hidden]


class Decoder:
    """The sequences that generate, and their caches, between two moves. Call all moves on one stream."""

    def __init__(self, model: MTPModel, kv: KVOptions, exchange: Exchange | None):
        if kv.kv_bits is not None and model.family.no_kv_bits is not None:
            raise MTPError(f"kv_bits={kv.kv_bits} is refused: {model.family.no_kv_bits}. Omit it.")
        if kv.kv_bits is not None and model.device.max_window(kv.kv_bits) == 0:
            raise MTPError(
                f"kv_bits={kv.kv_bits} is refused: attention to quantized keys and values is wrong on this device. Omit it."
            )
        self.model = model
        self.kv = kv
        self.exchange = exchange
        self.clear()

    def __len__(self) -> int:
        return len(self.sequences)

    def clear(self) -> None:
        if self.exchange is not None:
            self.exchange.abandon()  # the messages that went with the window in flight
        self._reset()

    def _reset(self) -> None:
        self.sequences: list[TextSequence] = []
        self.cache = Rows(self.model, self.kv)
        self.compiler = Compiler()
        self.drafter = HeadDrafter(self.model, self.compiler)
        self.tokens = mx.zeros((0, 1), mx.uint32)
        self.hidden: Hidden = ()
        self.window: Window | None = None  # the verify pass in flight
        # The number of tokens of the window that each sequence keeps, once its drafts are accepted or rejected
        self.kept: list[int] | None = None
        self.n_since_clear = 0  # tokens committed since MLX's buffer cache was last cleared

    @property
    def state(self) -> DecoderState:
        return self.cache.state, self.drafter.state, self.tokens, self.hidden

    def restore(self, state: DecoderState) -> None:
        """Restore an earlier state, without a pass in flight, if no sequence has joined or left since."""
        self.window = self.kept = None
        self.cache.in_flight = 0
        self.cache.state, self.drafter.state, self.tokens, self.hidden = state

    # Accept

    def read(self, choice: Choice) -> Step:
        """Wait for the tokens that the target model has chosen, and let the sequences take them."""
        sequences, made = choice.window.plan.sequences, choice.window.drafts.made
        if len(choice.window.drafts) > 0:
            mx.eval(choice.chosen, choice.accepted)
        chosen: Any = choice.chosen.tolist()
        flags: Any = choice.accepted.tolist()
        n_accepted, tokens = list[int](), list[list[int]]()
        for b, (s, plan) in enumerate(zip(sequences, made)):
            if s.end is None and (token := chosen[b][0]) >= (n := self.model.vocab_size):
                wrong = f"The sampler chose the token {token}, and the model's are 0 to {n - 1}."
                s.end = NotANumberError() if token == NO_NUMBER else MTPError(wrong)
            is_running = s.end is None
            n_accepted.append(n_leading(flags[b][: plan.k]) if is_running else 0)
            tokens.append(s.take(chosen[b][: n_accepted[b] + 1], plan, n_accepted[b]) if is_running else [])
        every = [*chain(*tokens)]
        if self.exchange is not None:
            self.exchange.receive(every)
        self.drafter.observe(every)
        return Step(choice, n_accepted, tokens)

    def accept(self, choice: Choice, step: Step | None) -> None:
        """Commit the tokens of each sequence: those of the step, or the target's first where the host does not know them."""
        counts = [1] * len(self) if step is None else step.counts
        if step is None:
            # The choice is queued before the next pass: otherwise the host would wait for both passes to read it.
            mx.async_eval(choice.chosen)
        for b, (s, n) in enumerate(zip(self.sequences, counts)):
            s.commit(choice.tokens, b, n)
        self.drafter.extend(choice.window.hidden, choice.tokens, counts)
        columns = [n - 1 for n in counts]
        self.tokens = columns_of(choice.tokens, columns)
        self.hidden = tuple((choice.window.hidden, b, column) for b, column in enumerate(columns))
        self.n_since_clear += max(counts)
        self.kept = counts

    def begin(self, s: TextSequence) -> list[Stepped]:
        """Choose the first token by a pass over the prompt's last position, before the sequence joins."""
        logits, hidden = prefill_part(self.model, s, 1)
        if self.exchange is not None:
            self.exchange.send(hidden)
        s.start()
        plan = WindowPlan([s], (PLAIN_PLAN,), PLAIN_PLAN, False)
        choice = choose(Window(plan, Drafts(plan.of_each), logits, hidden))
        stepped = self.read(choice).tokens_of_each()
        s.commit(choice.tokens, 0, 1)
        return stepped

    # Draft

    def draft(self, plan: WindowPlan) -> Drafts:
        if plan.whole.k == 0:
            return Drafts(plan.of_each)
        limits = [0 if each.skips_head else each.k for each in plan.of_each]
        tokens, proposals = mx.zeros((len(limits), 0), mx.uint32), list[list[Any]]()
        if max(limits) > 0:
            tokens, proposals, limits = self.drafter.propose(self.sequences, limits)
        made = [Plan(k) for k in limits]
        for b, (s, each) in enumerate(zip(self.sequences, plan.of_each)):
            if each.skips_head:
                made[b] = each
                # Any token may be drafted, but only those that the model has can be read.
                drafts = s.drafting.free[each.source].propose(each.k, s.n_unobserved).astype(mx.uint32)
                drafts = mx.minimum(drafts, self.model.vocab_size - 1)
                if (n_more := each.k - tokens.shape[1]) > 0:
                    tokens = mx.pad(tokens, [(0, 0), (0, n_more)])
                tokens = with_rows(tokens, [b], drafts[None])
        mx.async_eval(tokens)
        return Drafts(tuple(made), tokens, proposals)

    # Roll back

    def roll_back(self) -> None:
        """Remove the rejected tokens of the window in flight from the caches."""
        if self.kept is None:
            return
        self.cache.keep(self.kept)
        self.window = self.kept = None
        if self.n_since_clear >= CLEAR_EVERY:
            mx.clear_cache()
            self.n_since_clear = 0

    # Verify

    def verify(self, plan: WindowPlan, drafts: Drafts) -> None:
        """Start a pass over the last committed tokens and their drafts. Call ``roll_back`` first."""
        tokens = self.tokens if len(drafts) == 0 else mx.concatenate([self.tokens, drafts.tokens], axis=1)
        options = {"return_hidden": True, "compiler": self.compiler}
        logits, hidden = self.cache.run(self.model, tokens, n_confirmed=1, **options)
        self.window = Window(plan, drafts, logits, hidden)
        sent = [] if self.exchange is None else self.exchange.send(hidden)
        # Evaluate the states as well: another thread that closes the generator cannot evaluate arrays of this thread's stream.
        mx.async_eval(logits, hidden, self.cache.states, self.cache.snapshots, self.drafter.states, sent)

    # Join and leave

    def join(self, sequences: list[TextSequence]) -> None:
        self.roll_back()
        self.compiler.forget()  # From here on, changes in the model since the other sequences began are seen.
        tokens = mx.array([[s.take_last()] for s in sequences], mx.uint32)  # [B, 1]
        self.cache.join([s.cache for s in sequences], [s.kv for s in sequences])
        self.drafter.join([s.cache for s in sequences], tokens)
        hidden = [None if s.cache.last_hidden is None else (s.cache.last_hidden, 0, 0) for s in sequences]
        self.tokens = mx.concatenate([self.tokens, tokens])
        self.hidden = (*self.hidden, *hidden)
        self.sequences = [*self.sequences, *sequences]
        for s in sequences:
            # MLX writes in place only if nobody else holds an array.
            s.cache.begin(s.cache.n_tokens)
            s.cache.entries[:-1] = [*self.model.make_cache(), empty_head(self.model)]
            s.start()
            self.drafter.observe(s.text)

    def filter(self, sequences: list[TextSequence]) -> None:
        keep = [b for b, s in enumerate(self.sequences) if s in sequences]
        if len(keep) == len(self):
            return
        if not keep:
            self._reset()
            return
        self.roll_back()
        self.drafter.filter(keep)
        self.cache.filter(keep)
        self.tokens = self.tokens[mx.array(keep)]
        self.hidden = tuple(self.hidden[b] for b in keep)
        self.sequences = [self.sequences[b] for b in keep]
        self.drafter.forget(token for s in self.sequences for token in s.text)

    def extract(self, sequence: TextSequence, cache: PromptCache, n: int) -> int:
        """Put up to n tokens of a sequence into a prompt cache -> their number. The last one may be the first of the window in
        flight, which the target model has chosen.
        """
        b = self.sequences.index(sequence)
        n_tokens = self.cache.n_tokens[b]
        last = self.hidden[b]
        if self.cache.in_flight > 0 and n > n_tokens and self.window is not None:
            n_tokens += 1
            last = self.window.hidden, b, 0
        cache.entries[:-1] = [*self.cache.extract(b, n_tokens), self.drafter.extract(b, n_tokens)]
        cache.begin(n_tokens)
        cache.images = sequence.images
        if last is not None:
            hidden, row, column = last
            cache.last_hidden = mx.contiguous(hidden[row : row + 1, column : column + 1])
        # Until they are evaluated, they keep the caches of all sequences alive, and no other thread can evaluate them.
        mx.async_eval([c.state for c in cache.entries])
        return n_tokens


def draft_limits(decoder: Decoder) -> list[int]:
    """The most drafts that each sequence can take within its token limit: a window yields one more token than it accepts.

    No window is wider than those that the test of the device found right for any row: all rows have the columns of the longest.
    """
    cache = decoder.cache
    device = decoder.model.device
    n_tokens = cache.n_tokens if decoder.kept is None else cache.state.ends.plus(decoder.kept).lengths
    most = MAX_COPY_TOKENS
    if min(device.widest.values()) < MAX_WINDOW:
        of_each = zip(decoder.sequences, n_tokens, cache.bits)
        bits = [bits or s.kv.at(n).get("kv_bits") for s, n, bits in of_each]
        most = max(min(map(device.max_window, bits), default=1) - 1, 0)
    limits = []
    for b, (s, n) in enumerate(zip(decoder.sequences, n_tokens)):
        # The first token of a text alone comes sooner without drafts, and from the pass that mlx-lm runs.
        is_first = len(decoder) == 1 and s.n_generated == 0
        has_input = not decoder.drafter.has_head or decoder.drafter.state.counts[b] > 0
        k = most if s.end is None and has_input and not is_first else 0
        if s.task.max_tokens >= 0:
            k = max(min(k, s.task.max_tokens - s.n_generated - 1), 0)
        # A text is quantized after a token, never in a window.
        if s.kv.kv_bits is not None and n < s.kv.quantized_kv_start:
            k = min(k, s.kv.quantized_kv_start - n - 1)
        limits.append(k)
    return limits
