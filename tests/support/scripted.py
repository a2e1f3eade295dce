"""Models whose drafts are a script's."""

from collections.abc import Callable

import mlx.core as mx

from mlx_mtp.batch.generator import BatchGenerator
from mlx_mtp.decoding import sequence
from mlx_mtp.decoding.copies import CopyDrafter
from mlx_mtp.decoding.depth import MAX_COPY_TOKENS

from .decoding import plain


class Scripted:
    """A model whose draft of token i is ``truth[i]`` where ``right(i)``, and another token elsewhere.

    The head itself runs, so that its cache is filled as ever; only what its lm_head says is the script's.
    """

    def __init__(self, model, truth: list[int], right):
        self._model, self._truth, self._right = model, truth, right
        self._rows = 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, *args, **kwargs):
        return self._model(*args, **kwargs)

    def mtp(self, embeddings, hidden, cache, last_only=False):
        out = self._model.mtp(embeddings, hidden, cache, last_only)
        self._rows = cache.offset
        return out

    def draft_logits(self, hidden):
        logits = self._model.draft_logits(hidden)
        # The last of n rows pairs hidden state n - 1 with token n, and guesses token n + 1.
        i = self._rows + 1
        draft = self._truth[i] if self._right(i) else (self._truth[i] + 1) % logits.shape[-1]
        return 0 * logits + 10 * (mx.arange(logits.shape[-1]) == draft)


def script_copies(monkeypatch, truth: list[int], offer) -> None:
    """Copies are offered where ``offer(i)`` is not None, for the first of them at token i, and right where it is True."""

    class ScriptedCopies(CopyDrafter):
        def odds(self, n_unread):
            return [0.9] * MAX_COPY_TOKENS if offer(len(self.text) + n_unread) is not None else []

        def propose(self, k, n_unread):
            first = len(self.text) + n_unread
            tokens = [truth[i] if offer(i) else (truth[i] + 1) % 32 for i in range(first, first + k)]
            return mx.array(tokens, mx.uint32), [None] * k

    monkeypatch.setattr(sequence, "CopyDrafter", ScriptedCopies)


class ScriptedRows:
    """A model whose draft of token i of a sequence is right where ``right(uid, i)``, and another token elsewhere.

    The head itself runs, so that its keys and values are filled as ever; only what its lm_head says is the script's. Prompts
    must begin with an empty prompt cache.

    Args:
        truth (Dict[int, List[int]]): The text of each sequence, prompt included, by uid.
    """

    def __init__(self, model, truth: dict[int, list[int]], right: Callable[[int, int], bool]):
        self._model, self._truth, self._right = model, truth, right
        self.decoder = None  # set once there is one

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, *args, **kwargs):
        return self._model(*args, **kwargs)

    def draft_logits(self, hidden):
        logits = self._model.draft_logits(hidden)
        V = logits.shape[-1]
        drafts = []
        # A row whose last pair is (hidden state n - 1, token n) guesses token n + 1.
        cache = self.decoder.head.cache
        for s, n in zip(self.decoder.sequences, [cache.offset] if self.decoder.is_alone else cache.rows.lengths):
            truth = self._truth[s.uid]
            token = truth[n + 1] if n + 1 < len(truth) else 0
            drafts.append(token if self._right(s.uid, n + 1) else (token + 1) % V)
        return 0 * logits + 10 * (mx.arange(V) == mx.array(drafts)[:, None, None])


def scripted(model, prompts, max_tokens, right, k, **kwargs) -> tuple[BatchGenerator, list[int]]:
    """A generator with a head that is right where ``right(uid, i)``, of prompts whose texts it makes out first."""
    truth = {uid: p + plain(p, model, max_tokens=n + 10) for uid, (p, n) in enumerate(zip(prompts, max_tokens))}
    wrapped = ScriptedRows(model, truth, right)
    insert = {
        name: kwargs.pop(name) for name in [*kwargs] if name in ("samplers", "logits_processors", "stop_sequences")
    }
    generator = BatchGenerator(wrapped, num_draft_tokens=k, **kwargs)
    wrapped.decoder = generator.decoder
    return generator, generator.insert(prompts, max_tokens=max_tokens, **insert)
