"""The text of tokens that follow a prompt, piece by piece, by mlx-lm's detokenizers."""

from typing import Any

from mlx_lm.tokenizer_utils import StreamingDetokenizer


def make_detokenizer(tokenizer: Any) -> StreamingDetokenizer:
    """A detokenizer for the continuation of a text: mlx-lm's drops a space at the beginning, so it has another text before."""
    detokenizer: StreamingDetokenizer = tokenizer.detokenizer
    for token in tokenizer.encode("a", add_special_tokens=False):
        detokenizer.add_token(token)
    detokenizer.last_segment  # noqa: B018 (drop this text)
    return detokenizer


def next_text(detokenizer: StreamingDetokenizer, token: int, finish_reason: str | None) -> str:
    """The characters that a token completes. One that ends the text, with the reason "stop", has none of its own."""
    if finish_reason != "stop":
        detokenizer.add_token(token)
    if finish_reason is not None:
        detokenizer.finalize()
    return detokenizer.last_segment
