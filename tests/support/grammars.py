"""Grammars over a few tokens."""

from functools import partial

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from mlx_mtp.text.grammar import Beginning, Grammar
from mlx_mtp.text.reasoning import end_of_reasoning


class Letters:
    """A tokenizer of given tokens, of which the first ends a text. It takes the longest that fit."""

    eos_token_id, bos_token_id, special_token_ids = 0, None, (0,)

    def __init__(self, tokens: list[str]):
        self.tokens = [token.encode() for token in tokens]

    def __call__(self, text: bytes) -> list[int]:
        found = []
        while text:
            token = max((t for t in self.tokens if text.startswith(t)), key=len, default=b"")
            if not token:
                break
            found.append(self.tokens.index(token))
            text = text[len(token) :]
        return found


def grammar_of(tokens: list[str], lark: str, after: str = "") -> Grammar:
    tokenizer = LLTokenizer(TokenizerWrapper(Letters(tokens)))
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return Grammar(matcher, Beginning(tokenizer, partial(end_of_reasoning, end=after)) if after else None)
