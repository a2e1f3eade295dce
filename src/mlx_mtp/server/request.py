"""A request on its way through the server, and the error that ends one."""

import time
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any, Literal

from mlx_lm.server import GenerationArguments

from ..decoding.counts import DraftCounts
from ..drafts.options import CopyDrafts
from ..images.prompt import ImagePrompt
from ..prompt_store.tree import Handle
from ..text.grammar import Grammar
from ..text.tokens import Pieces
from .answers.answer import Answer

NO_MEMORY = "insufficient_memory"  # the code of an error 507
ModelKey = tuple[str, str | None]  # paths or repos of a model and of its adapters
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
NO_THINKING = ("none", "minimal")
BUDGETS = {"low": 1024, "medium": 8192}  # tokens; the others have no limit
VARIABLE = "reasoning_effort"  # of a chat template that knows of it


class ApiError(Exception):
    """An answer in the error format of the client's API.

    Args:
        status (int): HTTP's.
        message (str): The error in a sentence.
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
        in_reasoning (bool): Whether the answer begins with reasoning. Default: ``False``.
        cuts (List[int]): The numbers of tokens after which the prompt is yet to be cached, in order.
        n_cached (int): The number of cached tokens.
        handle (Handle, optional): The place of its prefilled part in a prompt store.
        pictured (ImagePrompt, optional): The prompt with its images, if it has any.
    """

    tokens: list[int]
    in_reasoning: bool = False
    cuts: list[int] = field(default_factory=list)
    n_cached: int = 0
    handle: Handle | None = None
    pictured: ImagePrompt | None = None

    def key_of(self, tokens: list[int]) -> list[int]:
        """The key of these first tokens in prompt caches, in which images are numbers made of their content."""
        if self.pictured is None:
            return tokens
        key = self.pictured.key
        return key[: len(tokens)] + tokens[len(key) :]

    @property
    def segments(self) -> list[list[int]]:
        """The tokens that are not cached, split at the cuts."""
        bounds = [self.n_cached, *self.cuts, len(self.tokens)]
        return [self.tokens[i:k] for i, k in pairwise(bounds)]


@dataclass
class StructuredOutput:
    """The structured output that a request asks for: a grammar, or calls.

    Args:
        param (str): The field of the request that asks for it.
        grammar (Dict[str, Any]): An argument of ``make_grammar``.
        calls (List[Dict[str, Any]]): The functions that the answer calls.
        is_required (bool): Whether the answer is calls alone. Otherwise it is free up to the first call, and the arguments of
          ``strict`` functions alone follow their schemas. Default: ``True``.
    """

    param: str
    grammar: dict[str, Any] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    is_required: bool = True


@dataclass(frozen=True)
class Thinking:
    """A request's fields for thinking; ``None`` where they are absent.

    Args:
        enabled (bool, optional): Whether to think.
        effort (str, optional): How much, by OpenAI's names.
        budget (int, optional): After how many tokens of reasoning its end is forced.
    """

    enabled: bool | None = None
    effort: Effort | None = None
    budget: int | None = None

    def variables(self) -> dict[str, Any]:
        """Of the chat template."""
        enabled = self.enabled
        if enabled is None and self.effort is not None:
            enabled = self.effort not in NO_THINKING
        if enabled is None and self.budget is not None:
            enabled = self.budget > 0
        effort = {VARIABLE: self.effort} if self.effort is not None and enabled else {}
        return effort | ({} if enabled is None else {"enable_thinking": enabled})

    def limit(self, tokenizer: Any) -> int | None:
        """The tokens of reasoning after which its end is forced; those of an effort only where no template knows of it."""
        if not tokenizer.has_thinking:
            return None
        if self.budget is None and VARIABLE not in str(tokenizer.chat_template):
            return BUDGETS.get(self.effort or "")
        return self.budget


class Client:
    """Takes a request's items from the engine: ``Started``, ``Waiting``, ``Delta``, ``ApiError``, and ``None`` at the end.

    This one drops them: a rank that serves no clients has it.
    """

    def put(self, item: Any) -> None:
        pass


@dataclass(frozen=True)
class Started:
    """Prefill has begun, behind the cached tokens."""


@dataclass(frozen=True)
class Waiting:
    """The progress of prefill, in tokens that were not cached."""

    n_read: int
    n_prompt: int


numbers = count()  # of requests


@dataclass(eq=False)
class Request:
    """A request from its arrival to the end of its answer. A body makes it; the frontend and the engine add to it.

    Args:
        request_type (str): "chat" or "text".
        prompt (Union[str, List[int]]): The prompt of a text, or its tokens.
        messages (List[Any]): The messages of a chat, as chat templates take them.
        tools (List[Any], optional): The tools of a chat, in OpenAI's form.
        role_mapping (Dict[str, Any], optional): mlx-lm's, for a model without a chat template.
        n (int): Answers to each prompt.
        more_prompts (List[Any]): Texts, or the tokens of each.
        copy_drafts (Union[int, str], optional): As in ``mtp_generate_step``.
        thinking (Thinking): How long to think.
        structured_output (StructuredOutput, optional): The structured output that it asks for.
        grammar (Grammar, optional): The compiled grammar of that: each text takes a copy.
        images (List[str]): URLs, in the order of their placeholders; empty once they are read.
        goes_on (bool): Whether the answer continues a text in the middle of a line.
        one_call (bool): Whether the answer ends with its first call.
        param (str): The field of the body with the prompt.

    Attributes:
        args (GenerationArguments): mlx-lm's: samplers, limits and the like.
        key (ModelKey): The model that generates it.
        encoded (Prompt, optional): The prompt's tokens.
        client (Client): Takes the answer.
        is_gone (bool): Whether its client has disconnected.
        n_cached (int): Cached tokens of the prompt.
        answer (Answer): Takes the text apart.
        detokenizer (StreamingDetokenizer): mlx-lm's; makes the text.
        pieces (Pieces, optional): The bytes of each token, where log probabilities are asked for.
        first_token (float, optional): The time of the first token.
        n_tokens (int): Tokens of the answer.
        n_accepted (int): Accepted drafts among them.
        counts (DraftCounts): Of its drafts.
    """

    request_type: Literal["chat", "text"]
    prompt: str | list[int]
    messages: list[Any]
    tools: list[Any] | None
    role_mapping: dict[str, Any] | None
    n: int = 1
    more_prompts: list[Any] = field(default_factory=list)
    copy_drafts: CopyDrafts | None = None
    thinking: Thinking = field(default_factory=Thinking)
    structured_output: StructuredOutput | None = None
    grammar: Grammar | None = None
    images: list[str] = field(default_factory=list)
    goes_on: bool = False
    one_call: bool = False
    param: str = "messages"
    number: int = field(default_factory=numbers.__next__)
    arrived: float = field(default_factory=time.perf_counter)

    args: GenerationArguments = field(init=False)
    key: ModelKey = field(init=False)
    encoded: Prompt | None = field(init=False, default=None)
    client: Client = field(init=False, default_factory=Client)
    is_gone: bool = field(init=False, default=False)

    n_cached: int = field(init=False, default=0)
    answer: Answer = field(init=False)
    detokenizer: Any = field(init=False)
    pieces: Pieces | None = field(init=False, default=None)
    first_token: float | None = field(init=False, default=None)
    n_tokens: int = field(init=False, default=0)
    n_accepted: int = field(init=False, default=0)
    counts: DraftCounts = field(init=False, default_factory=DraftCounts)

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt; 0 before they are known."""
        return 0 if self.encoded is None else len(self.encoded.tokens)

    @property
    def tokens_per_second(self) -> float | None:
        """After the first token; ``None`` if there is no second."""
        n = self.n_tokens - 1
        return n / (time.perf_counter() - self.first_token) if self.first_token is not None and n > 0 else None

    def choices(self) -> "list[Request]":
        """A request for each answer, ``n`` to each prompt, this one first. Number i has the request's seed plus i."""
        prompts = [prompt for prompt in (self.prompt, *self.more_prompts) for _ in range(self.n)]
        again = [replace(self, prompt=p, n=1, more_prompts=[], number=next(numbers)) for p in prompts[1:]]
        args, seed = self.args, self.args.seed
        for i, choice in enumerate([self, *again]):
            choice.args = replace(args, seed=None if seed is None else (seed + i) % 2**64)
        return [self, *again]

    def __getstate__(self) -> dict[str, Any]:
        """For the other ranks, which compile the grammar themselves: the prompt's tokens, not its text, and no client."""
        unsent: dict[str, Any] = {
            "prompt": "",
            "more_prompts": [],
            "messages": [],
            "images": [],
            "grammar": None,
            "client": Client(),
        }
        return vars(self) | unsent
