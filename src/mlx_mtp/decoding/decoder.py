"""The moves of speculative decoding on one prompt cache: prefill, verify, judge, draft, settle, rest.

This module knows nothing of temperatures or layers, nor of when to stop.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.sample_utils import LogitsProcessor

from ..models.cache import first_row, go_back, n_tokens, positions, rollback
from ..models.draft_lm_head import draft_logits
from .acceptance import RejectionSampling, TokenMatch, Verdict, n_leading
from .processors import for_drafts

MAX_UNSEEN = 512  # positions that steps without drafts leave to the head for later


class Decoder:
    """A prompt cache between two moves.

    Args:
        model (nn.Module): A model with a head.
        prompt_cache (List[Any]): Of ``make_prompt_cache``, updated in place.
        acceptance: Says which drafts stand.
        logits_processors (List[LogitsProcessor]): As of mlx-lm.
        kv_options (Tuple): ``quantized_kv_start``, ``kv_group_size`` and ``kv_bits``.
        exact (bool): Verify with the very operations of plain decoding.
        draft_p_min (float): Stop drafting where the head gives no token this probability.
    """

    def __init__(
        self,
        model: nn.Module,
        prompt_cache: list[Any],
        acceptance: TokenMatch | RejectionSampling,
        logits_processors: list[LogitsProcessor],
        kv_options: tuple,
        exact: bool,
        draft_p_min: float,
    ):
        self.model, self.prompt_cache = model, prompt_cache
        self.acceptance, self.logits_processors = acceptance, logits_processors
        self.kv_options, self.exact, self.draft_p_min = kv_options, exact, draft_p_min
        self.n_layers = len(model.layers)
        self.head_cache, self.last = prompt_cache[self.n_layers :]
        self.draft_head = model.drafting.lm_head  # with the text's own tokens, as it grows
        self.n_cached = n_tokens(prompt_cache[: self.n_layers])  # tokens that are final
        self.first_row = first_row(prompt_cache, self.n_layers)

        self.seen = mx.array([], mx.uint32)  # final tokens that the logits processors have been shown
        # The window that is not settled: its tokens [T], hidden states [1, T, H], drafts [k], and what is known of each.
        self.window: Any = None
        self.n_given = 0  # the window's leading tokens that are the prompt's or were handed out
        self.settling = False
        # Where the caches were, until a pass is done and the first of its tokens handed out. Of keys and values that is a
        # number; a recurrent layer's arrays are held, which costs their memory and, as measured, no time.
        self.before: Any = None
        self.hidden: Any = None
        self.drafts = self.seen
        self.n_asked = 0  # drafts that were asked for; the head may have been unsure of the last ones
        self.records: list[Any] = []
        # Positions that the head has not seen: hidden states [1, t, H], and the tokens [t] after them.
        self.unseen: list[tuple[mx.array, mx.array]] = []

    def _backbone(self, tokens, embeddings=None, n_confirmed=0):
        """tokens [T] -> logits [1, T, V], hidden [1, T, H]"""
        kwargs = {} if embeddings is None else {"input_embeddings": embeddings[None]}
        kwargs |= {"return_hidden": True, "n_confirmed": n_confirmed, "exact": self.exact and n_confirmed > 0}
        return self.model(tokens[None], cache=self.prompt_cache, **kwargs)

    def _head(self, hidden, tokens, embeddings=None):
        """hidden [1, T, H] and the tokens [T] after each -> the head's hidden for the last, [1, 1, H]"""
        embeddings = self.model.model.embed_tokens(tokens[None]) if embeddings is None else embeddings[None]
        return self.model.mtp(embeddings, hidden, self.head_cache, last_only=True)

    def see(self, tokens: list[int]) -> None:
        """Let drafts be chosen from these tokens of the text, too."""
        if self.draft_head is not None:
            self.draft_head = self.draft_head.with_tokens(tokens)

    def _quantize(self):
        caches = self.prompt_cache[: self.n_layers]
        maybe_quantize_kv_cache(caches, *self.kv_options)
        self.prompt_cache[: self.n_layers] = caches

    def prefill(self, tokens: mx.array, embeddings: mx.array | None) -> None:
        """Tokens [T] of the prompt, or their embeddings [T, H], which are final, into all caches."""
        self.before = positions(self.prompt_cache)
        _, hidden = self._backbone(tokens, embeddings)
        # A token's row is fed the hidden state before it: that of the first waits from an earlier call, if there was one.
        previous = hidden[:, :-1]
        if not self.last.empty():
            previous = mx.concatenate([self.last[0], previous], axis=1)
        if (n := previous.shape[1]) > 0:
            self._head(previous, tokens[-n:], None if embeddings is None else embeddings[-n:])
        self.last[0] = mx.contiguous(hidden[:, -1:])
        if self.logits_processors:
            self.seen = mx.concatenate([self.seen, tokens])
        self._quantize()
        mx.eval([c.state for c in self.prompt_cache])
        self.n_cached, self.before = self.n_cached + hidden.shape[1], None
        mx.clear_cache()

    def verify_prompt(self, token: mx.array, embedding: mx.array | None) -> mx.array:
        """Open the first window, over the prompt's last token [1] or its embedding [1, H] -> logits [1, 1, V]"""
        self.before = positions(self.prompt_cache)
        if not self.last.empty():
            self._head(self.last[0], token, embedding)
        logits = self._verify(token, embedding)
        self.n_given, self.before = 1, None
        return logits

    def verify(self, token: mx.array) -> mx.array:
        """Open a window: the confirmed token [1] and the k drafts -> logits [1, k + 1, V]"""
        self._quantize()  # what the pass before has added, as mlx-lm does
        self.before = positions(self.prompt_cache)
        self.n_given = 0
        return self._verify(mx.concatenate([token, self.drafts]) if len(self.drafts) > 0 else token)

    def _verify(self, tokens, embeddings=None):
        logits, self.hidden = self._backbone(tokens, embeddings, n_confirmed=int(len(tokens) > 1))
        self.window = tokens
        return logits

    def judge(self, logits: mx.array, i: int, j: int) -> tuple[Verdict, list[mx.array]]:
        """Logits [1, T, V] -> the verdict on positions i to j of the window, and their log probabilities, each [V]"""
        rows = []
        for t in range(i, j):
            # [1, V], as mlx-lm hands it to samplers and processors, and an array of its own, since penalties write into it.
            row = logits[:, t]
            if len(self.window) > 0:
                for processor in self.logits_processors:
                    row = processor(mx.concatenate([self.seen, self.window[: t + 1]]), row)
            rows.append(row - mx.logsumexp(row, keepdims=True))
        verdict = self.acceptance.judge(rows, self.drafts[i:j], self.records[i:j])
        return verdict, [row.squeeze(0) for row in rows]

    def draft(self, choices: mx.array, k: int) -> None:
        """Draft up to k tokens after the window's first n, which stand: the drafts of the next window.

        Args:
            choices (mx.array): The tokens after each of those n, [n].
            k (int): With 0, the head is left for later.
        """
        n = len(choices)
        self.unseen.append((self.hidden[:, :n], choices))
        self.drafts, self.records, self.n_asked = self.seen[:0], [], k
        if k == 0:
            if len(self.unseen) == MAX_UNSEEN:
                self._catch_up()
                mx.async_eval(self.head_cache.state)
            return
        asked, rolled_back = for_drafts(self.logits_processors)
        tokens = [self.seen, self.window[:1], choices] if asked else []
        drafts: list[mx.array] = []
        sure: list[mx.array] = []
        out = self._catch_up()  # [1, 1, H]
        for i in range(k):
            if i > 0:
                out = self._head(out, drafts[-1])
            logits = draft_logits(self.model, self.draft_head, out)  # [1, V]
            for processor in asked:
                logits = processor(mx.concatenate([*tokens, *drafts]), logits)
            logprobs = logits - mx.logsumexp(logits, keepdims=True)
            token, record = self.acceptance.draft(logprobs)
            drafts.append(token)  # [1]
            # By the likeliest token, not by the one drafted: to drop a draft for what it is would change the distribution.
            sure.append(mx.exp(logprobs.max(axis=-1)) >= self.draft_p_min)
            self.records.append(record)
        for processor in rolled_back:
            processor.rollback(k)
        self.head_cache.trim(k - 1)
        n_sure = n_leading(mx.concatenate(sure).tolist()) if self.draft_p_min > 0 else k  # type: ignore[arg-type]
        self.records = self.records[:n_sure]
        if n_sure > 0:
            self.drafts = mx.concatenate(drafts[:n_sure])

    def _catch_up(self, n: int | None = None):
        """Show the head the first n positions that it has not seen, and forget the others -> its last hidden, [1, 1, H]"""
        hidden = mx.concatenate([h for h, _ in self.unseen], axis=1)
        tokens = mx.concatenate([t for _, t in self.unseen])
        out = self._head(hidden[:, :n], tokens[:n])
        self.unseen.clear()
        return out

    def settle(self) -> None:
        """Close the window: its tokens that were handed out are final, the others never were."""
        n = self.n_given
        if len(self.window) > 1:
            again, self.settling = self.settling, True
            rollback(self.prompt_cache[: self.n_layers], self.n_cached, n, again)
        self.last[0] = self.hidden[:, n - 1 : n]
        if self.logits_processors:
            self.seen = mx.concatenate([self.seen, self.window[:n]])
        # At once: an interrupt finds all of it done, or to be done again.
        self.n_cached, self.window, self.settling = self.n_cached + n, None, False

    def rest(self) -> None:
        """Keep the tokens that were handed out, take back all others, and give the head a row for each but the last.

        This may come at any point of the moves above, after an error or an interrupt.
        """
        if self.before is not None:
            go_back(self.prompt_cache, self.before)
            self.window = None
        if self.window is not None:
            # Where the head was left these by a draft, they stand before, and the same once more behind changes nothing.
            self.unseen.append((self.hidden[:, : self.n_given - 1], self.window[1 : self.n_given]))
            self.settle()
        self._quantize()  # as mlx-lm does after every pass
        self.last[1] = mx.array(self.n_cached)
        n_missing = max(self.n_cached - 1 - self.first_row, 0) - self.head_cache.offset
        if n_missing > 0:
            self._catch_up(n_missing)
        else:
            self.head_cache.trim(-n_missing)
