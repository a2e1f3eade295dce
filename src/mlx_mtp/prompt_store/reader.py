"""Prefill with a store: from the longest stored prefix on, with snapshots where later prompts may part from it."""

from collections.abc import Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.single import KVOptions
from .cuts import choose_cuts, message_ends, opening_of
from .store import Prefix, PromptStore
from .tree import Handle


class Reader:
    """Reads the prompts of one model, in the library and in the server.

    The store knows a prompt by a key: its tokens, with a number below 0 in place of each that stands for a part of an image.
    The tokens of the answer follow.

    Args:
        store (PromptStore): The model's.
        tokenizer (TokenizerWrapper): The model's; its chat template tells where messages end.
        kv (KVOptions): How keys and values are quantized.
    """

    def __init__(self, store: PromptStore, tokenizer: TokenizerWrapper, kv: KVOptions):
        self.store, self.kv = store, kv
        self._opening = opening_of(tokenizer)

    def fetch(self, key: Sequence[int], n_most: int | None = None) -> Prefix:
        """The longest stored prefix of a prompt.

        Args:
            key (Sequence[int]): Of the whole prompt.
            n_most (int, optional): The most tokens of the prefix. Default: ``None``, all but the last one, which generation
              begins with.
        """
        return self.store.fetch(key[: len(key) - 1 if n_most is None else n_most], self.kv)

    def cuts(self, tokens: Sequence[int], n_common: int) -> list[int]:
        """The numbers of tokens, in order, after which a prompt's cache is to be inserted.

        Args:
            tokens (Sequence[int]): The whole prompt.
            n_common (int): How many of them the store knows, of whatever text: its ``n_common``.
        """
        return choose_cuts(message_ends(tokens, self._opening), len(tokens), n_common)

    def insert(self, key: Sequence[int], prompt_cache: list[Any], handle: Handle | None) -> Handle | None:
        """Keep a prompt cache.

        Args:
            key (Sequence[int]): Of all tokens in it.
            prompt_cache (List[Any]): With no generation open on it. It is left as it is.
            handle (Handle, optional): The last one of this text, of ``fetch`` or ``insert``.

        Returns:
            Optional[Handle]: For the next call.
        """
        return self.store.insert(key, prompt_cache, self.kv, handle)
