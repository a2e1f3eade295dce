"""The tokens that an answer's text is made of, and the bytes of each, for ``logprobs`` of the APIs.

The text comes without the reasoning, the calls, the line breaks of the template and the stop word, and later than its tokens
where a few characters are held back. So its characters are followed, each with the tokens that it came from.
"""

import re
from collections.abc import Sequence
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of SentencePiece
BYTES = {char: byte for byte, char in bytes_to_unicode().items()}  # as BPE tokenizers write them


class TextTokens:
    """The tokens of an answer, by the characters of its text."""

    def __init__(self) -> None:
        self._n_tokens = 0
        self._first_silent = 0  # the first of the last tokens, whose characters are not complete
        self._n_told = 0  # the tokens up to the last one that was told of
        # What the model has said since the last text or since anything else: characters, and the tokens of each.
        self._said, self._owners = "", list[range]()
        self._begin = 0  # the position of the last token in it
        self._has_left = False  # whether it begins with something that is not text
        self._text: list[range] = []  # the tokens of each character of the text that has not been given yet

    def read(self, text: str, is_end: bool) -> None:
        """The next token.

        Args:
            text (str): The characters that it completes.
            is_end (bool): Whether it ends the answer, and is no part of it.
        """
        tokens = range(self._first_silent, self._n_tokens + (not is_end))
        self._n_tokens += 1
        if text:
            self._first_silent = self._n_tokens
        self._begin = len(self._said)
        self._said += text
        self._owners += [tokens] * len(text)

    def find(self, text: str, n: int) -> None:
        """A reader has found text in what was said: right behind the text before, or behind something else.

        Args:
            text (str): The text.
            n (int): The characters at its end that are the answer's.
        """
        follows = not self._has_left and self._said.startswith(text)
        start = 0 if follows else self._said.rfind(text)
        self._has_left = False
        owners = self._owners[start : start + len(text)] if start >= 0 else [range(0)] * len(text)
        self._text += owners[len(text) - n :]
        self._forget(start + len(text) if start >= 0 else self._begin)

    def leave(self) -> None:
        """Drop everything before the last token: it is not text."""
        self._has_left = True
        self._forget(self._begin)

    def _forget(self, n: int) -> None:
        self._said, self._owners, self._begin = self._said[n:], self._owners[n:], max(self._begin - n, 0)

    def drop(self) -> None:
        """The text that has not been given is none."""
        self._text.clear()

    def take(self, n: int) -> list[int]:
        """The tokens of the next n characters, by index; a token that goes on behind them is not told of again."""
        owners, self._text = self._text[:n], self._text[n:]
        found = [i for tokens in dict.fromkeys(owners) for i in tokens if i >= self._n_told]
        self._n_told = max([self._n_told, *(i + 1 for i in found)])
        return found


class Pieces:
    """The bytes of a tokenizer's tokens, which may end within a character."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.added = {i: str(token).encode() for i, token in tokenizer.added_tokens_decoder.items()}
        self.is_byte_level = isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer)

    def of(self, tokens: Sequence[int]) -> list[bytes]:
        names = self.tokenizer.convert_ids_to_tokens(list(tokens))
        return [self.added[i] if i in self.added else self._bytes(name or "") for i, name in zip(tokens, names)]

    def _bytes(self, name: str) -> bytes:
        if self.is_byte_level:
            return b"".join(bytes([BYTES[c]]) if c in BYTES else c.encode() for c in name)
        if match := BYTE.fullmatch(name):
            return bytes([int(match[1], 16)])
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
