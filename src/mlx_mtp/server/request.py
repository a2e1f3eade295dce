"""A request on its way through the server, and the error that ends one."""

import time
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from mlx_lm import server as stock

from ..decoding.counts import DraftCounts
from ..decoding.grammar import Grammar
from ..decoding.options import CopyDrafts
from ..images.prompt import ImagePrompt
from ..prompt_store.tree import Handle
from .thinking import Thinking


class ApiError(Exception):
    """An answer in the error format of the client's API.

    Args:
        status (int): HTTP's.
        message (str): What is wrong.
        param (str, optional): The field of the request that it is about.
        code (str, optional): OpenAI's name for the error.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


@dataclass
class Prompt:
    """A tokenized prompt.

    Args:
        tokens (List[int]): All tokens of the prompt.
        segments (List[List[int]]): The same tokens, split where the prompt cache is saved.
        segment_types (List[str]): The prompt cache's name for each segment.
        initial_state (str): Whether the answer begins with reasoning, as mlx-lm names it.
        handle (Handle, optional): Where in a prompt store it is, as far as it is read.
        pictured (ImagePrompt, optional): It again, if it has images.
    """

    tokens: list[int]
    segments: list[list[int]]
    segment_types: list[str]
    initial_state: str
    handle: Handle | None = None
    pictured: ImagePrompt | None = None

    def key_of(self, tokens: list[int]) -> list[int]:
        """What prompt caches know these first tokens of the text by: images are known by their content."""
        if self.pictured is None:
            return tokens
        key = self.pictured.key
        return key[: len(tokens)] + tokens[len(key) :]

    def cut(self, cuts: list[int]) -> None:
        """Split the tokens anew: the prompt cache is saved at these cuts, and not at the prompt's end."""
        self.segments = [self.tokens[i:k] for i, k in zip([0, *cuts], [*cuts, len(self.tokens)])]
        self.segment_types = ["user"] * len(cuts)

    def skip(self, n: int) -> None:
        """Drop the first n tokens, which are cached, from the segments."""
        while n > 0:
            if n >= len(self.segments[0]):
                n -= len(self.segments.pop(0))
                self.segment_types.pop(0)
            else:
                self.segments[0], n = self.segments[0][n:], 0


@dataclass
class Form:
    """What an answer must look like.

    Args:
        param (str): The field of the request that asks for it.
        grammar (Dict[str, Any]): An argument of ``make_grammar``, if it has one.
        calls (List[Dict[str, Any]]): The answer is a call of one of these functions, or several, if there are any.
        is_required (bool): Whether it is nothing but calls. Else it is free up to the first one, and only the arguments of
          functions that are ``strict`` follow their schemas. Default: ``True``.
    """

    param: str
    grammar: dict[str, Any] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    is_required: bool = True


numbers = count()  # of requests


@dataclass
class Request(stock.CompletionRequest):
    """mlx-lm's request, its client, and what has been generated for it."""

    n: int = 1  # answers to each prompt
    more_prompts: list[Any] = field(default_factory=list)  # texts, or the tokens of each
    copy_drafts: CopyDrafts | None = None
    thinking: Thinking = field(default_factory=Thinking)
    form: Form | None = None
    grammar: Grammar | None = None  # the form's, once it is compiled: each text takes a copy
    images: list[str] = field(default_factory=list)  # URLs, in the order of their placeholders
    goes_on: bool = False  # the answer continues a text in the middle of a line
    one_call: bool = False  # the answer ends with its first call
    param: str = "messages"  # the field with the prompt
    is_gone: bool = False  # whether the client has hung up
    number: int = field(default_factory=numbers.__next__)
    arrived: float = field(default_factory=time.perf_counter)
    encoded: Prompt | None = None
    n_tokens: int = 0
    n_accepted: int = 0  # tokens that were drafted
    counts: DraftCounts = field(default_factory=DraftCounts)

    def again(self, prompt: Any) -> "Request":
        """One more request like this one, which has not begun, with a prompt of its own."""
        own: dict[str, Any] = {
            "prompt": prompt,
            "n": 1,
            "more_prompts": [],
            "number": next(numbers),
            "counts": DraftCounts(),
        }
        return replace(self, **own)

    def __getstate__(self) -> dict[str, Any]:
        """For the other ranks, which compile the grammar themselves: the text is tokenized."""
        return vars(self) | {"prompt": "", "more_prompts": [], "messages": [], "images": [], "grammar": None}
