"""The MTP head as a draft model for mlx-lm's own speculative loop; docs/develop/design.md has an example.

That loop makes the target's cache and then the draft's, prefills the draft model before the target, gives it tokens but no
hidden states, and rolls back rejected drafts by trimming both caches. So the target is an adapter around the model, whose
passes leave their hidden states in the draft's cache. A pass with a token that the draft model was not given (the last draft is
never fed back) is a verify pass. Its first token is confirmed: a recurrent layer's cache can be trimmed within it, and while it
is empty.

So a cache is for one generation: mlx-lm refuses a second one, since the cache cannot be trimmed then.
"""

import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from ...errors import MTPError
from ..caches.recurrent import RecurrentCache, rewound
from ..layers.drafting import draft_logits
from ..layers.mtp import run_head


class TrimmableCache(RecurrentCache):
    """A recurrent layer's cache that can be trimmed within the target's last window."""

    def __init__(self, draft: "DraftCache", size: int):
        super().__init__(size)
        self.draft = draft

    def is_trimmable(self) -> bool:
        return self.empty() or self.split is not None

    def trim(self, n: int) -> int:
        """Remove the last ``n`` tokens of the open window, and close it; an MTPError if they are not in it."""
        if self.empty():
            return 0
        n_tokens = 0 if self.split is None else self.split.n_tokens
        if self.split is None or n >= n_tokens:
            raise MTPError(f"Cannot keep {n_tokens - n} tokens of a window of {n_tokens}: keep at least one.")
        if n > 0:
            (self.cache,) = rewound([self.split], [n_tokens - n])
        self.split = None
        self.draft.n_tokens = self.draft.n_final + n_tokens - n
        return n


TrimmableCache.__name__ = RecurrentCache.__name__


class DraftCache(stock._BaseCache):
    """The draft model's state: the head's keys and values, and the tokens and hidden states of the head's next inputs.

    Input i of the head is token i with the target's hidden state of token i - 1, so token 0 has none.
    """

    def __init__(self, kv: stock.KVCache):
        self.kv = kv
        self.n_verified = 0  # keys and values made from the target's hidden states; drafts have later ones
        self.tokens = mx.array([], mx.uint32)  # from n_verified + 1 on
        self.n_seen = 0  # tokens given to the draft model
        self.hidden: mx.array | None = None  # the target's hidden states from n_verified on, [1, N, H]
        self.n_final = 0  # tokens in the target's cache before its last pass
        self.n_tokens = 0  # tokens in it after that pass, without rejected ones
        self.last: mx.array | None = None  # the head's output for its last row, [1, 1, H]
        self.verified = False  # whether the target's last pass was over drafts, which can be trimmed now

    @property
    def state(self) -> Any:
        return self.kv.state

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    def empty(self) -> bool:
        return self.n_seen == 0

    def is_trimmable(self) -> bool:
        return self.empty() or self.verified

    def trim(self, n: int) -> int:
        n_drafts = self.tokens.size if self.verified else 0
        if n > n_drafts:
            raise MTPError(f"The draft model can trim its last {n_drafts} tokens, not {n}.")
        self.verified = False
        self.tokens = self.tokens[: self.tokens.size - n]
        self.n_seen -= n
        return n

    def see(self, tokens: mx.array) -> None:
        """Add tokens [N] that the draft model was given."""
        self.tokens = mx.concatenate([self.tokens, tokens if self.n_seen > 0 else tokens[1:]])
        self.n_seen += tokens.size

    def record(self, model: Any, hidden: mx.array, verifies: bool) -> None:
        """Call after a pass of the target, with its hidden states [1, T, H]."""
        if self.hidden is not None:
            hidden = mx.concatenate([self.hidden[:, : self.n_tokens - self.n_verified], hidden], axis=1)
        self.hidden = hidden
        self.n_final, self.n_tokens = self.n_tokens, self.n_verified + hidden.shape[1]
        self.verified = verifies
        if not verifies:
            # Now, so that the hidden states of a long prompt are freed.
            self.catch_up(model)
            mx.async_eval(self.kv.state, self.hidden)

    def catch_up(self, model: Any) -> None:
        """Run the head over the inputs whose token and hidden state are both known."""
        n = min(self.n_tokens, self.n_seen - 1) - self.n_verified
        if n > 0:
            assert self.hidden is not None
            self.kv.trim(self.kv.offset - self.n_verified)
            self.last = run_head(model, self.hidden[:, :n], self.tokens[None, :n], self.kv)
            # A copy, since a slice pins the array that it is cut from.
            self.tokens, self.hidden = self.tokens[n:], mx.contiguous(self.hidden[:, n:])
            self.n_verified += n


class Target(nn.Module):
    """A model with the interface of the target in mlx-lm's speculative loop."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self._waiting: weakref.ref[DraftCache] | None = None  # of the latest cache, for the draft model

    @property
    def layers(self) -> Any:
        return self.model.layers

    def make_cache(self) -> list[Any]:
        draft, caches = DraftCache(self.model.head_layer.make_cache()), self.model.make_cache()
        self._waiting = weakref.ref(draft)
        return [TrimmableCache(draft, len(c.cache)) if isinstance(c, RecurrentCache) else c for c in caches]

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Token ids [1, T] -> logits [1, T, V]"""
        draft = next((c.draft for c in cache or [] if isinstance(c, TrimmableCache)), None)
        if draft is None or draft.empty():
            return self.model(inputs, cache=cache)
        verifies = draft.n_tokens + inputs.shape[1] > draft.n_seen  # otherwise a chunk of the prompt
        logits, hidden = self.model(inputs, cache=cache, return_hidden=True, n_confirmed=int(verifies))
        draft.record(self.model, hidden, verifies)
        return logits


class DraftModel:
    """The head of a model as a draft model for mlx-lm's speculative loop, which takes ``target`` as the model."""

    def __init__(self, model: Any):
        self.model, self.target = model, Target(model)

    def make_cache(self) -> list[Any]:
        """Raises an MTPError if no cache of the target is waiting for one of the draft model."""
        waiting, self.target._waiting = self.target._waiting, None
        if waiting is None or (draft := waiting()) is None:
            raise MTPError(
                "Make the target's cache first: call target.make_cache() before each draft_model.make_cache()."
            )
        return [draft]

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Token ids [1, T] -> the logits of the token after the last, [1, 1, V].

        Zeros for a chunk of the prompt, and after the first token of a text, which has no hidden state before it.
        """
        if not cache or not isinstance(cache[0], DraftCache):
            raise MTPError("The draft model needs its cache: append draft_model.make_cache() to target.make_cache().")
        c, model = cache[0], self.model
        c.see(inputs[0])
        c.catch_up(model)
        if c.last is not None and c.n_verified < c.n_seen - 1 and c.kv.offset == c.n_seen - 2:
            c.last = run_head(model, c.last, inputs[:, -1:], c.kv)
        if c.last is None or c.kv.offset != c.n_seen - 1:
            return mx.zeros((1, 1, model.vocab_size))
        return draft_logits(model, model.drafting.lm_head, c.last)[None]
