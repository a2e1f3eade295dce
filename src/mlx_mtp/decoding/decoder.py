"""The moves of speculative decoding on one prompt cache: prefill, draft, verify, accept, roll back, finalize.

A *window* is what one backbone pass verifies: the last decided token and the drafts after it. A *step* is what it yields: the
accepted drafts and one more token, the target's own. A step's tokens are *handed over* one by one; the caller may stop at any
of them, and the prompt cache is then that of the tokens handed over.

This module knows nothing of temperatures, layers and heads, nor of when to stop.
"""

import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.sample_utils import LogitsProcessor

from ..models.cache import recurrent_states, restore, rollback, snapshot, trim
from ..models.prompt_cache import PromptCache
from ..models.protocol import MTPModel
from .acceptance import Acceptance, Verdict, n_leading, rewind
from .copies import CopyDrafter
from .depth import MAX_COPY_TOKENS
from .drafter import NO_DRAFTS, Drafter
from .exchange import Exchange
from .processors import keeps_state
from .step_times import Plan

CLEAR_EVERY = 256  # tokens, as mlx-lm

Token = tuple[int, mx.array, bool]  # a token, its log probabilities [V], and whether it was drafted

P = ParamSpec("P")
R = TypeVar("R")


def on_stream(move: "Callable[Concatenate[Decoder, P], R]") -> "Callable[Concatenate[Decoder, P], R]":
    """Run a move on the decoder's stream, as mlx-lm does: what the caller does between two tokens stays on its own."""

    @wraps(move)
    def wrapped(self: "Decoder", *args: P.args, **kwargs: P.kwargs) -> R:
        with mx.stream(self.stream):
            return move(self, *args, **kwargs)

    return cast("Callable[Concatenate[Decoder, P], R]", wrapped)


class KVOptions(NamedTuple):
    """When and how to quantize keys and values, as in mlx-lm's ``maybe_quantize_kv_cache``."""

    quantized_kv_start: int
    kv_group_size: int
    kv_bits: int | None


@dataclass
class Step:
    """What a window yielded."""

    tokens: mx.array  # [n + 1]: n accepted drafts, and the target's token after them
    logprobs: list[mx.array]  # n + 1 times [V]
    n_drafted: int

    @property
    def n_accepted(self) -> int:
        return len(self.tokens) - 1


class Decoder:
    """A prompt cache between two moves.

    Args:
        model (MTPModel): Its backbone verifies.
        cache (PromptCache): Updated in place.
        head (Drafter): Proposes drafts.
        copies (CopyDrafter, optional): Proposes others, where the text repeats itself.
        acceptance (Acceptance): Says which are accepted.
        logits_processors (List[LogitsProcessor]): As in mlx-lm.
        kv (KVOptions): When and how to quantize keys and values.
        exact (bool): Verify with the same operations as plain decoding.
        stream (Union[mx.Stream, mx.ThreadLocalStream]): Where the moves run.
        exchange (Exchange, optional): Goes with each pass where several ranks run the model.
    """

    def __init__(
        self,
        model: MTPModel,
        cache: PromptCache,
        head: Drafter,
        copies: CopyDrafter | None,
        acceptance: Acceptance,
        logits_processors: list[LogitsProcessor],
        kv: KVOptions,
        exact: bool,
        stream: mx.Stream | mx.ThreadLocalStream,
        exchange: Exchange | None = None,
    ):
        self.exchange = exchange
        self.generation: weakref.ref[Any] | None = None  # the generator that makes the moves
        self.told: list[mx.array] = []  # the exchange of the pass
        self.model, self.cache, self.head, self.copies = model, cache, head, copies
        self.acceptance, self.logits_processors, self.kv, self.exact = acceptance, logits_processors, kv, exact
        self.stream = stream
        self.in_order = acceptance.keeps_state or any(keeps_state(p) for p in logits_processors)

        self.n_cached = cache.n_tokens  # tokens that are final
        self.history = NO_DRAFTS.tokens  # final tokens that the logits processors are shown, [N]
        self.n_decided = 0  # generated tokens, handed over or not
        self.n_cleared = 0  # of these, when MLX's buffer cache was last cleared

        # The window, from ``verify`` until the next one: its tokens [T] and hidden states [1, T, H], its drafts, its outcome.
        self.window: mx.array | None = None
        self.hidden: mx.array = NO_DRAFTS.tokens
        self.logits: mx.array = NO_DRAFTS.tokens  # [1, T, V]
        self.drafts = NO_DRAFTS
        self.next_drafts = NO_DRAFTS
        self.step: Step | None = None
        self.tokens: list[int] | None = None  # the step's, once the host knows them
        self.n_kept = 0  # the window's leading tokens that are the prompt's or were handed over
        self.is_committing = False
        # Where the caches were, until a pass is done and the first of its tokens handed over. Of keys and values that is a
        # number; a recurrent layer's arrays are held, which costs their memory and, as measured, no time.
        self.before: list[Any] | None = None

    # Prefill

    @on_stream
    def prefill(
        self, prompt: mx.array, embeddings: mx.array | None, step_size: int, progress: Callable[[int, int], Any]
    ) -> None:
        """Read a prompt [T], or its embeddings [T, H], in chunks, and verify a window of its last token alone."""
        self.cache.begin(self.generation)
        n_prompt, done = len(prompt if embeddings is None else embeddings), 0
        progress(0, n_prompt)
        if self.copies is not None and len(prompt) == 0:
            self.copies.skip(n_prompt)
        while (n := min(step_size, n_prompt - 1 - done)) > 0:
            self._read(prompt[done : done + n], None if embeddings is None else embeddings[done : done + n])
            done += n
            progress(done, n_prompt)
        last = None if embeddings is None else embeddings[done:]
        self._show(prompt[done:])
        self.before = snapshot(self.cache.entries)
        self.head.prefill(self.cache.last_hidden, prompt[done:], last)
        self._verify(prompt[done:], last)
        # Not the logits: a prompt alone needs none.
        mx.eval(self.hidden, recurrent_states(self.cache.backbone), self.cache.head.state, self.told)
        self.n_kept, self.before = 1, None
        progress(n_prompt, n_prompt)

    def _read(self, tokens: mx.array, embeddings: mx.array | None) -> None:
        """Read a chunk [T] of the prompt, which is final, into all caches."""
        self._show(tokens)
        self.before = snapshot(self.cache.entries)
        _, hidden = self._backbone(tokens, embeddings)
        # A token's row of the head is fed the hidden state before it. That of the first is from an earlier call, if any.
        previous, last = hidden[:, :-1], self.cache.last_hidden
        self.head.prefill(previous if last is None else mx.concatenate([last, previous], axis=1), tokens, embeddings)
        self.cache.last_hidden = mx.contiguous(hidden[:, -1:])
        if self.logits_processors:
            self.history = mx.concatenate([self.history, tokens])
        self._quantize()
        mx.eval([c.state for c in self.cache.entries])
        self.n_cached, self.before = self.n_cached + hidden.shape[1], None
        mx.clear_cache()

    def _show(self, tokens: mx.array) -> None:
        """Show tokens [T] of the prompt to who drafts, before they are in the caches."""
        prompt: Any = tokens.tolist()
        self.head.read(prompt)
        if self.copies is not None:
            self.copies.prefill(prompt)

    # Draft

    @on_stream
    def draft(self, plan: Plan) -> None:
        """Tell the head what the step decided, and draft for the next window."""
        assert self.step is not None
        self.head.extend(self.hidden, self.step.tokens)
        self.next_drafts = self.head.propose(0 if plan.copies else plan.k, self.n_decided)
        if plan.copies and self.copies is not None:
            self.next_drafts = self.copies.propose(plan.k, self._n_unread)
        if len(self.next_drafts) > 0:
            mx.async_eval(self.next_drafts.tokens)

    def copy_odds(self) -> list[float]:
        """How likely each draft that can be copied is accepted, given that those before it are; empty if there is none."""
        return [] if self.copies is None else self.copies.odds(self._n_unread)

    @property
    def _n_unread(self) -> int:
        """The number of decided tokens that the host does not know yet."""
        assert self.step is not None
        return len(self.step.tokens) if self.tokens is None else 0

    def max_drafts(self, n_left: int | None) -> int:
        """The most drafts for the next window, when ``n_left`` tokens may follow the step; ``None`` for any number."""
        assert self.step is not None
        k = MAX_COPY_TOKENS
        if n_left is not None:
            k = min(k, max(n_left - 1, 0))  # a window yields one more token than it accepts
        n_cached = self.n_cached + len(self.step.tokens)
        if self.kv.kv_bits is not None and n_cached < self.kv.quantized_kv_start:
            k = min(
                k, self.kv.quantized_kv_start - n_cached - 1
            )  # mlx-lm quantizes between two tokens: never in a window
        return k

    # Verify

    @on_stream
    def verify(self) -> None:
        """Commit the tokens handed over, and start a pass over the step's last token and the next drafts."""
        assert self.step is not None
        token = self.step.tokens[-1:]
        self._commit()
        self.drafts, self.next_drafts = self.next_drafts, NO_DRAFTS
        self._quantize()  # what the pass before has added, as mlx-lm does
        self.before = snapshot(self.cache.entries)
        self.n_kept = 0
        self._verify(mx.concatenate([token, self.drafts.tokens]) if len(self.drafts) > 0 else token)
        # The states as well: nothing may be left to compute on this thread's stream, should another thread close the generator.
        mx.async_eval(self.logits, self.hidden, recurrent_states(self.cache.backbone), self.told)

    def _verify(self, tokens: mx.array, embeddings: mx.array | None = None) -> None:
        self.logits, self.hidden = self._backbone(tokens, embeddings, n_confirmed=int(len(tokens) > 1))
        self.window = tokens
        if self.exchange is not None:
            self.told = self.exchange.send(self.hidden)

    def _backbone(
        self, tokens: mx.array, embeddings: mx.array | None = None, n_confirmed: int = 0
    ) -> tuple[mx.array, mx.array]:
        """tokens [T] -> logits [1, T, V], hidden [1, T, H]"""
        kwargs: dict[str, Any] = {} if embeddings is None else {"input_embeddings": embeddings[None]}
        kwargs |= {"return_hidden": True, "n_confirmed": n_confirmed, "exact": self.exact and n_confirmed > 0}
        logits, hidden = self.model(tokens[None], cache=self.cache.entries, **kwargs)
        return logits, hidden

    def _quantize(self) -> None:
        caches = self.cache.backbone
        maybe_quantize_kv_cache(caches, *self.kv)
        self.cache.backbone = caches

    # Accept

    def accept(self) -> Generator[Token, None, Step]:
        """Accept or reject the window's drafts: all at once, or one after the other where a processor keeps state."""
        if self.in_order and len(self.drafts) > 0:
            step = yield from self._accept_in_order()
        else:
            step = self._accept_at_once()
        self.step, self.tokens = step, None
        self.n_decided += len(step.tokens)
        if step.n_drafted > 0:
            self.wait()  # for what the host knows by now, or all but the last token of it
        return step

    @on_stream
    def _accept_at_once(self) -> Step:
        """Without drafts this does not wait for the device."""
        k, n = len(self.drafts), 0
        (tokens, accepted, random_states), logprobs = self._verdict(0, k + 1)
        if k > 0:
            mx.eval(tokens, accepted, random_states)
            n = n_leading(accepted.tolist())  # type: ignore[arg-type]
            rewind(random_states, n)
        else:
            mx.async_eval(tokens)  # apart from the next pass, which it would be waited for with
        return Step(tokens[: n + 1], logprobs[: n + 1], k)

    def _accept_in_order(self) -> Generator[Token, None, Step]:
        """Call each processor and the sampler once a token, in order. Hands over each accepted draft."""
        k = len(self.drafts)
        tokens: list[mx.array] = []
        logprobs: list[mx.array] = []
        for i in range(k + 1):
            verdict, (row,) = self._verdict(i, i + 1)
            tokens.append(verdict.tokens)
            logprobs.append(row)
            if i == k or not verdict.accepted.item():
                break
            token: Any = verdict.tokens.item()
            self.n_kept = 2 + i
            yield token, row, True
        return Step(mx.concatenate(tokens), logprobs, k)

    @on_stream
    def _verdict(self, i: int, j: int) -> tuple[Verdict, list[mx.array]]:
        """The verdict on positions i to j of the window, and their log probabilities, each [V]"""
        assert self.window is not None
        rows = []
        for t in range(i, j):
            # [1, V], as mlx-lm hands it to samplers and processors, and an array of its own, since penalties write into it.
            row = self.logits[:, t]
            if len(self.window) > 0:
                for processor in self.logits_processors:
                    row = processor(mx.concatenate([self.history, self.window[: t + 1]]), row)
            rows.append(row - mx.logsumexp(row, keepdims=True))
        verdict = self.acceptance.accept(rows, self.drafts.tokens[i:j], self.drafts.records[i:j], self.n_decided + i)
        return verdict, [row.squeeze(0) for row in rows]

    # Hand over

    def hand_over_accepted(self) -> Generator[Token, None, None]:
        """Yield the accepted drafts that were not handed over yet, while the device drafts."""
        step = self.step
        assert step is not None
        if self.n_kept > step.n_accepted:
            return
        assert self.tokens is not None
        for i, token in enumerate(self.tokens[:-1]):
            self.n_kept = 2 + i
            yield token, step.logprobs[i], True

    def wait(self) -> None:
        """Wait for the step's tokens. Without drafts the device runs the next pass meanwhile."""
        assert self.step is not None
        if self.tokens is None:
            tokens: Any = self.step.tokens.tolist()
            if self.exchange is not None:
                self.exchange.receive(tokens)
            self.tokens = tokens
            self.head.read(tokens)
            if self.copies is not None:
                self.copies.read(tokens)

    def hand_over_last(self) -> Generator[Token, None, None]:
        """Yield the step's last token, which is the first of the window that is being verified."""
        assert self.step is not None
        assert self.tokens is not None
        token, logprobs = self.tokens[-1], self.step.logprobs[-1]
        # From here on the token counts as handed over. No call is in between, at which an interrupt could come.
        self.n_kept, self.before = 1, None
        yield token, logprobs, False

    # Roll back

    def roll_back(self) -> None:
        """Take the rejected drafts out of the backbone's keys and values.

        The recurrent layers are rolled back in ``verify``: the head's next drafts need nothing of them, and so reach the device
        first; and a caller who stops at an accepted draft leaves fewer to keep.
        """
        assert self.step is not None
        if self.step.n_drafted > 0:
            trim(self.cache.backbone, self.n_cached + len(self.step.tokens))

    def _commit(self) -> None:
        """Make the tokens handed over final, and roll the caches back to them."""
        assert self.window is not None
        n = self.n_kept
        if len(self.window) > 1:
            again, self.is_committing = self.is_committing, True
            rollback(self.cache.backbone, self.n_cached, n, again)
        self.cache.last_hidden = self.hidden[:, n - 1 : n]
        if self.logits_processors:
            self.history = mx.concatenate([self.history, self.window[:n]])
        # At once: an interrupt finds all of it done, or to be done again.
        self.n_cached, self.window, self.is_committing = self.n_cached + n, None, False
        if self.n_decided - self.n_cleared >= CLEAR_EVERY:
            mx.clear_cache()
            self.n_cleared = self.n_decided

    # Finalize

    def finalize(self) -> None:
        """Keep the tokens handed over, take back all others, and give the head a row for each but the last.

        This may come at any point of the moves above and of itself, after an error or an interrupt, and in any thread. A second
        interrupt does not stop it, since who asks for a cache to be kept presses Ctrl-C twice, too.
        """
        try:
            self._finalize()
        except BaseException:
            self._finalize()
            raise

    @on_stream
    def _finalize(self) -> None:
        if self.before is not None:
            restore(self.cache.entries, self.before)
            self.window = None
        if self.window is not None:
            # ``draft`` may have told the head of these already: then they come twice, and the second time is ignored.
            self.head.extend(self.hidden, self.window[1 : self.n_kept])
            self._commit()
        self._quantize()  # as mlx-lm does after every pass
        self.head.finalize(self.n_cached)
        # Another thread, which goes on from here, cannot evaluate what this one left lazy.
        mx.async_eval([c.state for c in self.cache.entries])
        if self.exchange is not None:
            mx.synchronize(self.stream)  # collectives of the pass in flight would corrupt those of another stream
        # Last: until here the cache is known to be unfinished.
        self.cache.record(self.n_cached, () if self.copies is None else self.copies.text_of(self.n_cached))
