"""Text of a given form: a grammar masks the logits, and what it forces is drafted.

The tokens that a grammar allows next are a function of the text before, so any position of a window can be asked, in any order,
and a rejected draft leaves nothing behind. The head's drafts are masked as the target's choices are. Where the grammar leaves
one way to go on, as at the keys and the punctuation of JSON, the tokens are known without a pass of a model: ``ForcedTokens``
offers them as drafts, which are accepted with the probability that the masked target gives them (another tokenization of the
same characters may be likelier).

Grammars are those of llguidance (github.com/guidance-ai/llguidance): JSON schemas, regular expressions, Lark.
"""

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .depth import MAX_COPY_TOKENS
from .rates import Rates

SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as Python writes JSON


class Grammar:
    """A logits processor that leaves the tokens that a grammar allows. Make it with ``make_grammar``, one for each text.

    Args:
        matcher (llguidance.LLMatcher): Of the grammar.
        after (Sequence[int]): Tokens behind which it begins; before them anything is allowed. None: it begins at once.
    """

    keeps_state = False

    def __init__(self, matcher: Any, after: Sequence[int] = ()):
        self.matcher, self.after = matcher, list(after)
        self.taken: list[int] = []  # the tokens that the matcher was given
        self.n_prompt: int | None = None  # the first call is for the first token

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """The text's tokens [N], logits [1, V] -> logits [1, V]"""
        if self.n_prompt is None:
            self.n_prompt = len(tokens)
        generated: Any = tokens[self.n_prompt :].tolist()
        if not self._go_to(generated):
            return logits
        masked = mx.where(self._allowed(logits.shape[-1]), logits, -mx.inf)
        # The draft vocabulary may have none of the allowed tokens. Then the draft is a wrong one, and not drawn from nothing.
        return mx.where(masked.max(axis=-1, keepdims=True) == -mx.inf, logits, masked)

    def forced(self, generated: list[int]) -> list[int]:
        """The tokens that follow generated ones, as far as the grammar leaves one way to go on."""
        tokens: list[int] = self.matcher.compute_ff_tokens() if self._go_to(generated) else []
        return tokens

    def _go_to(self, generated: list[int]) -> bool:
        """Have the matcher stand behind these tokens -> whether it does: not before its beginning, nor behind a wrong draft.

        Raises:
            ValueError: The grammar is too complex to go on.
        """
        start = _end_of(self.after, generated)
        if start is None:
            return False
        tokens = generated[start:]
        n = next((i for i, (a, b) in enumerate(zip(tokens, self.taken)) if a != b), min(len(tokens), len(self.taken)))
        if n < len(self.taken):
            self.matcher.rollback(len(self.taken) - n)
            del self.taken[n:]
        n_more = self.matcher.try_consume_tokens(tokens[n:])
        if self.matcher.is_error():
            raise ValueError(f"llguidance gave the grammar up: {self.matcher.get_error().splitlines()[0]}")
        self.taken += tokens[n : n + n_more]
        return len(self.taken) == len(tokens)

    def _allowed(self, size: int) -> mx.array:
        """The tokens that may come next, [V], bool; also those that end the text, where it may end."""
        words = mx.array(np.frombuffer(self.matcher.compute_bitmask(), np.uint32))
        bits = (words[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1  # [V / 32, 32]
        allowed = bits.reshape(-1)[:size] == 1
        # A model's output layer may be larger than its vocabulary.
        return mx.pad(allowed, (0, size - allowed.size))


def _end_of(part: list[int], tokens: list[int]) -> int | None:
    """The position behind the first occurrence of a part, if any."""
    n, end = len(part), len(part)
    while n > 0 and tokens[end - n : end] != part:
        try:
            end = tokens.index(part[-1], end) + 1  # a thought may have thousands of tokens
        except ValueError:
            return None
    return end


class ForcedTokens:
    """What a grammar forces, as a source of drafts, see ``sources.Source``."""

    name = "grammar"
    fixed: int | None = None

    def __init__(self, grammar: Grammar):
        self.grammar = grammar
        self.generated: list[int] = []
        self.rates = Rates(1)
        self._forced: list[int] | None = None  # from here on, once asked for

    @property
    def forced(self) -> list[int]:
        if self._forced is None:
            self._forced = self.grammar.forced(self.generated)[:MAX_COPY_TOKENS]
        return self._forced

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.forced:
                is_forced = self.forced[0] == token
                self.rates.count(0, is_forced)
                self._forced = self.forced[1:] if is_forced else None
            self.generated.append(token)
            self._forced = self._forced or None

    def acceptance(self, n_unread: int) -> list[float]:
        return [] if n_unread > 0 else [self.rates.estimate[0]] * len(self.forced)

    def propose(self, k: int, n_unread: int) -> tuple[mx.array, list[Any]]:
        return mx.array(self.forced[:k], mx.uint32), [None] * k


def make_grammar(
    tokenizer: TokenizerWrapper,
    *,
    json_schema: dict[str, Any] | str | None = None,
    regex: str | None = None,
    lark: str | None = None,
    after: str = "",
) -> Grammar:
    """Make a logits processor for ``logits_processors``, which has one text follow a grammar.

    Args:
        tokenizer (TokenizerWrapper): Of the model.
        json_schema (Union[Dict[str, Any], str], optional): The text is JSON of this schema; ``{"type": "object"}`` for any
          object.
        regex (str, optional): The text matches this regular expression.
        lark (str, optional): The text is of this grammar in llguidance's Lark syntax.
        after (str): The text may begin with anything up to this, such as ``"</think>"``, and some white space. Default: ``""``.

    Raises:
        ValueError: Not one of the three is given, or llguidance cannot read it.
    """
    rules = []
    if json_schema is not None:
        rules.append(f"%json {_with_separators(json_schema)}")
    if regex is not None:
        rules.append("/" + re.sub(r"(?<!\\)/", r"\\/", regex) + "/")
    grammars = [
        f"start: SPACE? answer\nSPACE: /[ \\n]{{1,3}}/\nanswer: {rule}" if after else f"start: {rule}" for rule in rules
    ]
    if lark is not None:
        grammars.append(lark)
    if len(grammars) != 1:
        raise ValueError("Give one of json_schema, regex and lark.")
    return Grammar(
        _compile(tokenizer, grammars[0]).deep_copy(), tokenizer.encode(after, add_special_tokens=False) if after else ()
    )


def _with_separators(schema: dict[str, Any] | str) -> str:
    """Without a choice of white space there is more that is forced. A schema's own ``x-guidance`` comes first."""
    schema = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(schema, dict):
        raise ValueError(f"A JSON schema is an object, not {json.dumps(schema)[:40]}.")
    return json.dumps({**schema, "x-guidance": {**SEPARATORS, **schema.get("x-guidance", {})}})


@functools.lru_cache(maxsize=16)
def _compile(tokenizer: TokenizerWrapper, lark: str) -> Any:
    """A matcher at the beginning. A large schema takes a second, and an agent sends the same one in every request.

    Raises:
        ValueError: llguidance cannot read the grammar.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(_llguidance_tokenizer(tokenizer), LLMatcher.grammar_from_lark(lark), log_level=0)
    if matcher.is_error():
        raise ValueError(f"llguidance cannot read the grammar: {matcher.get_error().splitlines()[0]}")
    return matcher


@functools.lru_cache(maxsize=4)
def _llguidance_tokenizer(tokenizer: TokenizerWrapper) -> Any:
    """About a second's work for a vocabulary of 250,000 tokens."""
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer._tokenizer, eos_token=sorted(tokenizer.eos_token_ids))
