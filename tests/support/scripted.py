"""Models that say what they are told, and drafts that are right or wrong at will."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_mtp.core.batch.generator import BatchGenerator
from mlx_mtp.core.caches.prompt_cache import n_tokens
from mlx_mtp.core.drafts import sources
from mlx_mtp.core.drafts.sources import PromptLookup
from mlx_mtp.core.pacing import MAX_COPY_TOKENS

from .decoding import plain


class Scripted:
    """A model whose head drafts right or wrong at will, and which says what it is told, for one sequence or for several.

    Backbone and head run, so that their caches are filled as ever; only their logits are the script's. Where a text has ended,
    the script's token is 0.

    Args:
        model (nn.Module): Does the work.
        texts (List[int] | Dict[int, List[int]]): The text, prompt included; of several sequences by uid.
        right (Callable[..., bool], optional): Whether the draft of token i is right: ``right(i)``, of several sequences
          ``right(uid, i)``. Default: ``None``, the head drafts by itself.
        says (bool): Whether the model says the texts, whatever it would say itself.
    """

    def __init__(
        self,
        model: Any,
        texts: list[int] | dict[int, list[int]],
        right: Callable[..., bool] | None = None,
        says: bool = False,
    ):
        is_one = not isinstance(texts, dict)
        self.texts = {0: texts} if is_one else texts
        self.decoder: Any = None  # of several sequences
        self._model, self._says = model, says
        self.mtp = _Head(getattr(model, "mtp", None))
        self._right = (lambda _, i: right(i)) if is_one and right is not None else right

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, inputs: mx.array, cache: Any = None, **kwargs: Any) -> Any:
        if not self._says:
            return self._model(inputs, cache=cache, **kwargs)
        ends = self._ends(cache[: len(self._model.layers)])
        out = self._model(inputs, cache=cache, **kwargs)
        logits, *hidden = out if isinstance(out, tuple) else (out,)
        T = logits.shape[1]
        logits = _sure(logits, [[self._token(uid, n + 1 + t) for t in range(T)] for uid, n in ends])
        return (logits, *hidden) if hidden else logits

    def draft_logits(self, hidden: mx.array, lm_head: Any = None) -> mx.array:
        logits = self._model.draft_logits(hidden, lm_head)
        if self._right is None or (lm_head is not None and lm_head.ids is not None):
            return logits
        # A row whose last pair is (hidden state n - 1, token n) guesses token n + 1.
        ends = self._ends([self.mtp.cache], self.mtp.T)
        return _sure(logits, [[self._draft(uid, n + 1, logits.shape[-1])] for uid, n in ends])

    def _ends(self, caches: list[Any], T: int = 0) -> list[tuple[int, int]]:
        """(uid, number of tokens) of each row of the caches, with the T tokens of their last pass."""
        ends = next((c.ends for c in caches if hasattr(c, "ends")), None)
        uids = [0] if self.decoder is None else [s.task.uid for s in self.decoder.sequences]
        if ends is not None:
            return list(zip(uids, (n + T for n in ends.lengths)))
        return [((uids or [-1])[0], n_tokens(caches))]  # of a prompt that is being read nothing is asked

    def _token(self, uid: int, i: int) -> int:
        text = self.texts.get(uid, [])
        return text[i] if i < len(text) else 0

    def _draft(self, uid: int, i: int, V: int) -> int:
        has_ended = i >= len(self.texts.get(uid, []))
        return 0 if has_ended else (self._token(uid, i) + (not self._right(uid, i))) % V


class _Head:
    """A head, and the cache and the number of tokens of its last pass."""

    def __init__(self, head: Any):
        self._head, self.cache, self.T = head, None, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def last(self, embeddings: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        self.cache, self.T = cache, hidden.shape[1]
        return self._head.last(embeddings, hidden, cache)

    def decode(self, x: mx.array, cache: Any) -> mx.array:
        self.cache, self.T = cache, x.shape[1]
        return self._head.decode(x, cache)


def _sure(logits: mx.array, tokens: list[list[int]]) -> mx.array:
    """Logits like these [B, T, V], of models that are sure of the tokens [B, T]."""
    return 0 * logits + 10 * (mx.arange(logits.shape[-1]) == mx.array(tokens)[..., None])


def scripted(model, prompts, max_tokens, right, k, **kwargs) -> tuple[BatchGenerator, list[int]]:
    """A generator with a head that is right where ``right(uid, i)``, of prompts whose texts it makes out first."""
    texts = {uid: p + plain(p, model, max_tokens=n + 10) for uid, (p, n) in enumerate(zip(prompts, max_tokens))}
    generator = BatchGenerator(Scripted(model, texts, right), num_draft_tokens=k, **kwargs)
    generator.model.decoder = generator.decoder
    return generator, generator.insert(prompts, max_tokens=max_tokens)


def script_copies(monkeypatch, texts: list[list[int]], offer: Callable[[int], bool | None]) -> None:
    """Copies of these texts are offered where ``offer(i)`` is not None, for the first of them at token i, and right where True.

    Each text, prompt included, is found by what has been said of it. One that has left them all is offered the first.
    """

    class ScriptedCopies(PromptLookup):
        def acceptance_rates(self, n_unobserved):
            return [0.9] * MAX_COPY_TOKENS if offer(len(self.text) + n_unobserved) is not None else []

        def propose(self, k, n_unobserved):
            text = next((t for t in texts if t[: len(self.text)] == self.text), texts[0])
            first = len(self.text) + n_unobserved
            # The first text may be shorter than the one that has left them all.
            tokens = [(text[i % len(text)] + (not offer(i))) % 32 for i in range(first, first + k)]
            return mx.array(tokens, mx.uint32)

    monkeypatch.setattr(sources, "PromptLookup", ScriptedCopies)
