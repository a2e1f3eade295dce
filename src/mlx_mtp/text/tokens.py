"""The tokens of an answer's text, and the bytes of each token, for ``logprobs`` of the APIs.

Reasoning, calls, the template's line breaks and the stop word are not part of the text, and some of its characters are sent
later than their tokens arrive. So each character is kept with the tokens that it came from.
"""

import re
from collections.abc import Sequence
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte in SentencePiece
BYTES = {char: byte for byte, char in bytes_to_unicode().items()}  # as BPE tokenizers write them


class TextTokens:
    """The tokens of an answer, by the characters of its text."""

    def __init__(self) -> None:
        self._n_tokens = 0
        self._first_incomplete = 0  # the first of the last tokens whose characters are incomplete
        self._n_reported = 0  # the number of tokens up to the last one that ``take`` returned
        # The output since the last part of the text or anything else: its characters, and the tokens of each.
        self._output, self._owners = "", list[range]()
        self._begin = 0  # the position of the last token in the output
        self._has_left = False  # whether the output begins with something other than text
        self._text: list[range] = []  # the tokens of each character of the text that ``take`` has not returned yet

    def read(self, text: str, is_end: bool) -> None:
        """Add the next token.

        Args:
            text (str): The characters that it completes.
            is_end (bool): Whether it ends the answer; then it is not part of the answer.
        """
        tokens = range(self._first_incomplete, self._n_tokens + (not is_end))
        self._n_tokens += 1
        if text:
            self._first_incomplete = self._n_tokens
        self._begin = len(self._output)
        self._output += text
        self._owners += [tokens] * len(text)

    def find(self, text: str, n: int) -> None:
        """Find a part of the text in the output: right after the part before, or after something else.

        Args:
            text (str): The text.
            n (int): The number of characters at its end that belong to the answer.
        """
        follows = not self._has_left and self._output.startswith(text)
        start = 0 if follows else self._output.rfind(text)
        self._has_left = False
        owners = self._owners[start : start + len(text)] if start >= 0 else [range(0)] * len(text)
        self._text += owners[len(text) - n :]
        self._forget(start + len(text) if start >= 0 else self._begin)

    def leave(self) -> None:
        """Drop the output before the last token: it is not text."""
        self._has_left = True
        self._forget(self._begin)

    def _forget(self, n: int) -> None:
        self._output, self._owners, self._begin = self._output[n:], self._owners[n:], max(self._begin - n, 0)

    def drop(self) -> None:
        """Drop the characters that ``take`` has not returned."""
        self._text.clear()

    def take(self, n: int) -> list[int]:
        """The indices of the tokens of the next n characters. Each token is returned once, with its first character."""
        owners, self._text = self._text[:n], self._text[n:]
        found = [i for tokens in dict.fromkeys(owners) for i in tokens if i >= self._n_reported]
        self._n_reported = max([self._n_reported, *(i + 1 for i in found)])
        return found


class Pieces:
    """The bytes of a tokenizer's tokens; a token may end within a character."""

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
