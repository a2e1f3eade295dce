"""Log probabilities of an answer's tokens, as OpenAI's APIs write them."""

import codecs
from collections.abc import Sequence
from typing import Annotated

from annotated_types import Ge, Le

from ...text.schema import Json
from ..engine.delta import Delta, Likely

MAX_TOP = 20
LEAST = -9999.0  # OpenAI's, in place of minus infinity
TopLogprobs = Annotated[int, Ge(0), Le(MAX_TOP)]


def logprob_of(step: Delta) -> Json:
    """A token as chat completions and Responses write it, with the likeliest ones in its place."""
    assert step.likely is not None
    return {**_token(step.likely), "top_logprobs": [_token(t) for t in step.top]}


def _token(t: Likely) -> Json:
    return {"token": t.piece.decode(errors="replace"), "bytes": [*t.piece], "logprob": max(t.logprob, LEAST)}


class TextLogprobs:
    """The tokens of a text as completions write them, in lists."""

    def __init__(self) -> None:
        self.n_chars = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, steps: Sequence[Delta]) -> Json:
        """The next tokens. ``text_offset`` counts characters from the beginning of the text."""
        offsets = []
        for step in steps:
            assert step.likely is not None
            offsets.append(self.n_chars)
            self.n_chars += len(self.decoder.decode(step.likely.piece))
        own = [step.likely for step in steps if step.likely is not None]
        return {
            "tokens": [_name(t) for t in own],
            "token_logprobs": [max(t.logprob, LEAST) for t in own],
            "top_logprobs": [{_name(t): max(t.logprob, LEAST) for t in (*s.top, s.likely) if t} for s in steps],
            "text_offset": offsets,
        }


def _name(t: Likely) -> str:
    """A token's text; of one that has a part of a character its bytes, as OpenAI writes them."""
    try:
        return t.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in t.piece)
