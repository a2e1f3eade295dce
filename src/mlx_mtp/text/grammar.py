"""Structured output: a grammar of llguidance masks the logits, of drafts as well, and the tokens that it forces are drafted.

These are accepted with the probability that the masked target gives them, since another tokenization of the same characters
may be likelier.
"""

import functools
import json
import math
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import ArrayLike, NDArray

from ..core.pacing import MAX_COPY_TOKENS
from ..core.pacing.depth import Rates
from ..errors import MTPError, as_mtp_error, require
from .formats import tags_of
from .reasoning import end_of_reasoning
from .schema import enforceable

T = TypeVar("T")
Tokens = NDArray[np.uint32]  # [N]
NO_TOKENS: Tokens = np.array([], np.uint32)
MAX_CHARACTERS = 1 << 19  # in a grammar in Lark
MAX_MULTIPLE = 100_000  # for the least common multiple of all multipleOf, in units of the last decimal
STACK = 1 << 29  # bytes, enough for a grammar of that size with all rules nested; untouched pages take no memory
STACK_LOCK = threading.Lock()
ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
TOO_LARGE = ("too big", "too large", "symbols.len()")  # in llguidance's messages
SPACE = r"SPACE: /[ \n]{1,3}/"  # a terminal in Lark, for white space after reasoning
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as Python writes JSON


class Beginning:
    """The beginning of a grammar within a text, by a function ``find`` of the text so far, see ``make_grammar``."""

    def __init__(self, tokenizer: Any, find: Callable[[str], int | None]):
        self.tokenizer = tokenizer
        self.find = find
        self._read = NO_TOKENS  # the tokens decoded so far
        self._decoded = b""
        # The number of tokens up to the beginning, and the part of the last of them that is after it.
        self._start: tuple[int, list[int]] | None = None
        self._n_found = 0  # the number of tokens in which it was found

    def tokens_after(self, tokens: Tokens) -> Tokens | None:
        """The tokens of a text after the grammar's beginning, or ``None`` before it. Decodes those that it has not seen."""
        n = n_equal(tokens, self._read)
        if self._start is None or n < self._n_found:
            n_bytes = len(self._decoded) - len(self.tokenizer.decode_bytes(self._read[n:].tolist()))
            self._decoded = self._decoded[:n_bytes] + self.tokenizer.decode_bytes(tokens[n:].tolist())
            self._read = tokens
            self._start = None
            i = self.find(text := self._decoded.decode(errors="surrogateescape"))
            if i is None:
                return None
            start = len(text[:i].encode(errors="surrogateescape"))
            ids = tokens.tolist()
            n = bisect_left(range(len(ids)), start, key=self._size_of(ids))
            self._start = n, self.tokenizer.tokenize_bytes(self._decoded[start : self._size_of(ids)(n)])
            self._n_found = len(tokens)
        n, first = self._start
        return np.append(np.array(first, np.uint32), tokens[n:])

    def _size_of(self, tokens: list[int]) -> Callable[[int], int]:
        return lambda n: len(self.tokenizer.decode_bytes(tokens[:n]))


class Grammar:
    """A logits processor that allows the tokens of a grammar only, from its beginning on: by default the first generated."""

    keeps_state = False
    needs_tokens = True  # the host must know a token before it can allow the next

    def __init__(self, matcher: Any, beginning: Beginning | None = None):
        self.matcher = matcher
        self.beginning = beginning
        self.taken = NO_TOKENS  # the tokens that the matcher has consumed
        self.n_prompt: int | None = None  # known from the first call, which is for the first token

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """The text's tokens [N], logits [1, V] -> logits [1, V]"""
        if self.n_prompt is None:
            self.n_prompt = len(tokens)
        if not self.advance_to(np.array(tokens[self.n_prompt :])):
            return logits
        words = np.frombuffer(self.matcher.compute_bitmask(), np.uint32)
        self._check()  # the mask of a failed matcher would allow the end of the text
        if (first := _first_bit(words)) >= logits.shape[-1]:
            V = logits.shape[-1]
            raise MTPError(f"The grammar allows only tokens from {first} on here, and the model's are 0 to {V - 1}.")
        bits = (mx.array(words)[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1  # [V / 32, 32]
        allowed = bits.reshape(-1)[: logits.shape[-1]] == 1  # with end-of-text tokens where the text may end
        # A model's output layer may be larger than its vocabulary.
        allowed = mx.pad(allowed, (0, logits.shape[-1] - allowed.size))
        # The draft vocabulary may have none of the allowed tokens: any draft will then be rejected.
        return mx.where(allowed, logits, -mx.inf)

    def draft_source(self) -> "ForcedTokens":
        return ForcedTokens(self)

    def copy(self) -> "Grammar":
        beginning = self.beginning and Beginning(self.beginning.tokenizer, self.beginning.find)
        matcher = self.matcher.deep_copy()
        matcher.reset()
        return Grammar(matcher, beginning)

    def forced(self, generated: ArrayLike) -> list[int]:
        """The tokens that must follow the generated ones, as long as the grammar allows one continuation only."""
        tokens: list[int] = self.matcher.compute_ff_tokens() if self.advance_to(generated) else []
        return tokens

    def advance_to(self, generated: ArrayLike) -> bool:
        """Bring the matcher to its state after these tokens. ``False`` before the beginning, and after a wrong draft."""
        all_tokens = np.asarray(generated, np.uint32)
        tokens = all_tokens if self.beginning is None else self.beginning.tokens_after(all_tokens)
        if tokens is None:
            return False
        n = n_equal(tokens, self.taken)
        if n < len(self.taken):
            self.matcher.rollback(len(self.taken) - n)
        n_more = self.matcher.try_consume_tokens(tokens[n:].tolist())
        self._check()
        self.taken = tokens[: n + n_more]
        return len(self.taken) == len(tokens)

    def _check(self) -> None:
        if self.matcher.is_error():
            raise MTPError(f"llguidance aborted: {self.matcher.get_error().splitlines()[0]}")


def _first_bit(words: Tokens) -> int:
    """The index of the first 1 among the bits of words of 32; -1 for none."""
    i = int(np.argmax(words > 0))
    word = int(words[i])
    return 32 * i + (word & -word).bit_length() - 1


def n_equal(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    return int(np.argmin(np.append(a[:n] == b[:n], False)))


class ForcedTokens:
    """The tokens that a grammar forces, as a free source of drafts, see ``sources.FreeSource``."""

    name = "grammar"
    fixed: int | None = None

    def __init__(self, grammar: Grammar):
        self.grammar = grammar
        self.generated = NO_TOKENS
        self.rates = Rates(1)
        self._forced: list[int] | None = None  # the next tokens, once computed

    @property
    def forced(self) -> list[int]:
        if self._forced is None:
            # A failed grammar raises again when it masks the logits, which ends its own sequence only.
            with suppress(ValueError):
                self._forced = self.grammar.forced(self.generated)[:MAX_COPY_TOKENS]
        return self._forced or []

    def observe(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.forced:
                is_forced = self.forced[0] == token
                self.rates.count(0, is_forced)
                self._forced = self.forced[1:] if is_forced else None
            self.generated = np.append(self.generated, np.uint32(token))
            self._forced = self._forced or None

    def acceptance_rates(self, n_unobserved: int) -> list[float]:
        return [] if n_unobserved > 0 else [self.rates.estimate[0]] * len(self.forced)

    def propose(self, k: int, n_unobserved: int) -> mx.array:
        return mx.array(self.forced[:k], mx.uint32)


def make_grammar(
    tokenizer: TokenizerWrapper,
    *,
    json_schema: dict[str, Any] | str | None = None,
    regex: str | None = None,
    lark: str | None = None,
    after: str | Callable[[str], int | None] = "",
) -> Grammar:
    """Make a logits processor for ``logits_processors`` that makes one text follow a grammar.

    Args:
        tokenizer (TokenizerWrapper): The model's tokenizer.
        json_schema (Union[Dict[str, Any], str], optional): The text is JSON that follows this schema; ``{"type": "object"}``
          allows any object.
        regex (str, optional): The text matches this regular expression.
        lark (str, optional): The text follows this grammar in llguidance's Lark syntax.
        after (Union[str, Callable[[str], Optional[int]]]): The grammar begins after this text, such as ``"</think>"``, and some
          white space; quotations of it between backticks or in a fenced code block are ignored. Or a function of the text so
          far that returns the position where the grammar begins, or ``None`` before it begins. Default: ``""``.

    Raises:
        MissingExtra: llguidance is not installed.
        MTPError: None or several of the three are given, or llguidance cannot read the grammar.
    """
    require("server", "A grammar")
    if [json_schema, regex, lark].count(None) != 2:
        raise MTPError("Give one of json_schema, regex and lark.")
    if lark is None:
        rule = rule_of(json_schema, regex)
        lark = f"start: SPACE? answer\n{SPACE}\nanswer: {rule}" if after else f"start: {rule}"
    matcher = _compile(tokenizer, lark).deep_copy()
    if not after:
        return Grammar(matcher)
    find = functools.partial(end_of_reasoning, end=after) if isinstance(after, str) else after
    return Grammar(matcher, Beginning(llguidance_tokenizer(tokenizer), find))


def rule_of(json_schema: dict[str, Any] | str | None = None, regex: str | None = None) -> str:
    """The rule in Lark for a text that matches a regular expression, or for JSON of a schema. This has fixed white space, so
    that more tokens are forced, unless the schema's own ``x-guidance`` says otherwise.
    """
    if regex is not None:
        from llguidance import regex_to_lark

        _check_size(regex)  # converting a long one blocks all other threads
        if (len(regex) - len(regex.rstrip("\\"))) % 2:
            raise MTPError("The regular expression ends with a backslash that escapes nothing.")
        with as_mtp_error("The regular expression cannot be read"):
            return f"/{regex_to_lark(regex, use_ascii='')}/"
    with as_mtp_error("The schema is not JSON", ValueError):
        schema = json.loads(json_schema) if isinstance(json_schema, str) else json_schema
    if not isinstance(schema, dict):
        raise MTPError(f"A JSON schema is an object, not {json.dumps(schema)[:40]}.")
    _check_size(json.dumps(schema))  # before its options are compared, each with each
    own = schema.get("x-guidance")
    if not isinstance(own, dict | None):
        raise MTPError(f"x-guidance is an object, not {json.dumps(own)[:40]}.")
    return f"%json {json.dumps({**enforceable(schema, '#').root, 'x-guidance': {**SEPARATORS, **(own or {})}})}"


@functools.lru_cache(maxsize=16)
def _compile(tokenizer: TokenizerWrapper, lark: str) -> Any:
    from llguidance import LLMatcher

    _check_size(lark)
    with as_mtp_error("The grammar cannot be read", ValueError):
        _check_multiples(lark)
        grammar = LLMatcher.grammar_from_lark(lark)
    vocabulary = llguidance_tokenizer(tokenizer)
    matcher = in_deep_stack(lambda: LLMatcher(vocabulary, grammar, log_level=0))
    if matcher.is_error():
        error = reason(matcher.get_error())
        if any(words in error for words in TOO_LARGE):
            raise MTPError(f"The grammar is too large once it is written out ({error}): simplify it.")
        raise MTPError(f"llguidance cannot read the grammar: {error}")
    return matcher


def reason(error: str) -> str:
    first, *others = error.splitlines()
    reasons = [first.rpartition("JSON schema: ")[2], *(x.removeprefix("error: ") for x in others if "error: " in x)]
    return " ".join(reasons).replace(ONE_OF, "the options of oneOf may have values in common: use anyOf")[:500]


def _check_size(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise MTPError(f"The grammar has {len(text)} characters, and at most {MAX_CHARACTERS} are supported.")


def in_deep_stack(f: Callable[[], T]) -> T:
    """Call a function in a thread with a large stack: about a thousand nested rules would end the process with a usual one."""
    with ThreadPoolExecutor(1) as pool:
        with STACK_LOCK:
            usual = threading.stack_size(STACK)
            try:
                future = pool.submit(f)  # which starts the thread
            finally:
                threading.stack_size(usual)
        return future.result()


def _check_multiples(lark: str) -> None:
    """Limit ``multipleOf``, which llguidance does not: its matcher has as many states as the least common multiple."""
    text = re.sub(r"\\u00([0-7][0-9a-fA-F])", lambda m: chr(int(m[1], 16)), lark)
    found = [float(x) for x in re.findall(r'"multipleOf"\s*:\s*([0-9][0-9.eE+-]{0,400})', text)]
    multiples = [Fraction(repr(x)) for x in found if 0 < x <= MAX_MULTIPLE]  # llguidance refuses 0
    scale = math.lcm(*(x.denominator for x in multiples))
    if max(found, default=0) > MAX_MULTIPLE or math.lcm(*(int(x * scale) for x in multiples)) > MAX_MULTIPLE:
        raise MTPError(f"multipleOf: the least common multiple of all of them must be at most {MAX_MULTIPLE}.")


@functools.lru_cache(maxsize=4)
def llguidance_tokenizer(tokenizer: TokenizerWrapper) -> Any:
    """About a second's work for a vocabulary of 250,000 tokens."""
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    fast = tokenizer._tokenizer
    last = max(fast.get_vocab().values())
    ends = sorted(i for i in tokenizer.eos_token_ids if 0 <= i <= last)  # files and flags may name others
    found = from_tokenizer(fast, eos_token=ends or None)
    return LLTokenizer(TokenizerWrapper(_Vocabulary(fast, found)), eos_token=found.eos_tokens)


class _Vocabulary:
    """A vocabulary for llguidance in which the chat template's marks are text: by itself, it takes them for control tokens."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, found: Any):
        self.tokenizer = tokenizer
        self.eos_token_id = found.eos_token
        # One that is empty is the byte 0xFF alone, which marks control tokens.
        self.tokens = [found.decode_bytes([i]) or b"\xff" for i in range(found.vocab_size)]
        added = tokenizer.added_tokens_decoder
        tags = tags_of(tokenizer)
        self.special_token_ids = [i for i, token in added.items() if token.special and token.content not in tags]

    def __call__(self, text: bytes) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text.decode(), add_special_tokens=False)
        return tokens
