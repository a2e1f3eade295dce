"""Encoding of texts, messages and images as tokens. A prompt beyond the context is refused before it is fully tokenized."""

import logging
import math
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from mlx_lm.server import convert_chat

from ...core.models.mixin import check_ids
from ...core.sampling import Sampling
from ...errors import MTPError, as_mtp_error
from ...images.open import size_of
from ...images.prompt import CUT, LEFT_OUT, MARK, encode_marked, leave_out, place_pixels, read_pixels
from ...images.tower import Vision
from ...memory import Account, size
from ...text.answer import ends_in_reasoning, think_marks
from ...text.formats import format_of, tags_of
from ...text.grammar import llguidance_tokenizer
from ...text.schema import Json
from ..request import NO_MEMORY, ApiError, Options, Prompt, Request, too_long
from ..structured_output import make_output_grammar

CHARS = 4  # per token; longer texts are counted before they are tokenized
PIECE = 1 << 16  # characters that are counted at a time
LINES = re.compile(r".*\n(?=\S)", re.DOTALL)  # up to a line that begins with no white space, where tokens end
SLACK = 16  # tokens that a cut within a line may add
FAR = 8  # times the context: the tokens of longer texts are estimated
MAX_PIXELS = 1 << 28  # of all images of a request; 22 photos of 12 megapixels

# Stand for texts while a chat template is rendered. Qwen's refuse conversations without a question, and trim the text that the
# answer continues.
QUERY = f"query{secrets.token_hex(16)}"
PREFILL = f"prefill{secrets.token_hex(16)}"
OPENING = "<|im_start|>"
QUERY_TURN = re.compile(rf"<\|im_start\|>user\s+{QUERY}\s*<\|im_end\|>\n?")
LAST_WORD = re.compile(r"(.*\w(?=\W)|.)", re.DOTALL)
RESPONSE = "<tool_response>", "</tool_response>"


class BoundedTokenizer:
    """mlx-lm's tokenizer for prompts of at most ``context_length`` tokens, with the marks of images."""

    def __init__(
        self,
        tokenizer: Any,
        n_ids: int,  # of the model
        context_length: int | None,
        vision: Vision | None = None,
        sampling: Sampling | None = None,
    ):
        self.tokenizer = tokenizer
        self.n_ids = n_ids
        self.context_length, self.sampling = context_length, sampling or Sampling()
        self.vision = vision
        self.max_tokens: int | None = context_length  # of a text that memory has room for

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str | list[int], **kwargs: Any) -> list[int]:
        """The tokens of a text, or tokens sent by the client. ``images.prompt.MARK`` stands for an image."""
        max_context = self.context_length
        if isinstance(text, str):
            if max_context is not None and len(text) > CHARS * max_context and (n := self.count(text)) > max_context:
                raise too_long(n, max_context)
            return encode_marked(self.tokenizer, text, **kwargs)
        return text

    def count(self, text: str) -> int:
        """The number of tokens of a text, counted piece by piece. Far beyond the context, it is an estimate."""
        n = start = 0
        while (left := len(text) - start) > 0:
            lines = None if left <= PIECE else LINES.match(text, start, start + PIECE + 1)
            piece = text[start : lines.end() if lines else start + PIECE]
            slack = 0 if left <= PIECE or lines else SLACK
            n += len(encode_marked(self.tokenizer, piece, add_special_tokens=False)) - slack
            start += len(piece)
            if self.context_length is not None and n > FAR * self.context_length:
                return round(n * len(text) / start)
        return n

    @cached_property
    def marks(self) -> dict[bool, list[str]]:
        """The tokens that are cut where a message quotes them, by whether it is the assistant's: control tokens, and in others'
        the tags of the chat template, such as ``<think>``. The assistant's text has the tags that it was generated with.
        """
        added = self.tokenizer.added_tokens_decoder.values()
        template = str(self.tokenizer.chat_template)
        pairs = tags_of(self.tokenizer)
        control = [t.content for t in added if (t.special or t.content.startswith("<|")) and len(t.content) > 1]
        control = [mark for mark in control if mark not in pairs]
        tags = [t.content for t in added if t.content in pairs or (not t.special and t.content.startswith("<"))]
        return {True: control, False: [*control, *(tag for tag in tags if tag in template)]}

    def complete(self, prompt: list[int], request: Request) -> None:
        """Check the token ids of a request, fill in the model's sampling parameters where it sets none, and reduce the limit of
        tokens to the rest.
        """
        args = request.args
        max_context = self.context_length
        n_prompt = len(prompt)
        given = {"stop_token_ids": request.stop_token_ids, "logit_bias": args.logits.logit_bias or ()}
        for param, ids in {request.param: prompt, **given}.items():
            try:
                check_ids(ids, self.n_ids, param)
            except MTPError as e:
                raise ApiError(400, str(e), param=param) from e
        args.sampling = replace(self.sampling, **args.sampling)
        if n_prompt == 0:
            raise ApiError(400, "The prompt is empty.", param=request.param)
        if max_context is not None and n_prompt + args.max_tokens > max_context:
            error = too_long(n_prompt, max_context, request.param)
            if n_prompt >= max_context:
                raise error
            if request.limit is not None:
                message = f"{error.message[:-1]}, and {request.limit} is {args.max_tokens}."
                raise ApiError(400, message, param=request.limit, code=error.code)
            args.max_tokens = max_context - n_prompt
        if args.sampling.top_k >= self.n_ids:
            raise ApiError(400, f"top_k must be below the vocabulary's size of {self.n_ids}.", param="top_k")


def encode(tokenizer: BoundedTokenizer, request: Request, options: Options, account: Account) -> Prompt:
    """Encode the prompt of a request; an ApiError if the request does not fit the model."""
    with _errors_of(request):
        is_chat = request.request_type == "chat"
        text, in_reasoning = _render(tokenizer, request, options) if is_chat else (request.prompt, None)
        special = {"add_special_tokens": False} if is_chat and tokenizer.has_chat_template else {}
        tokens = tokenizer.encode(text, **special)
        image_prompt = None
        if request.images:
            found = _read_images(tokenizer, request, tokens, account)
            pixel_values = [x for x in found if x is not None]
            if len(pixel_values) < len(found):
                tokens = tokenizer.encode(leave_out(str(text), found), **special)
            if pixel_values:
                image_prompt = place_pixels(_vision_of(tokenizer), tokens, pixel_values)
                tokens = image_prompt.tokens
    tokenizer.complete(tokens, request)
    make_output_grammar(tokenizer.tokenizer, request, in_reasoning)  # what takes long is made here, and then kept
    if request.args.logprobs:
        llguidance_tokenizer(tokenizer.tokenizer)
    return Prompt(tokens, in_reasoning, is_chat and request.begun is not None, image_prompt=image_prompt)


def count_tokens(tokenizer: BoundedTokenizer, request: Request, options: Options) -> int:
    """The number of tokens of a chat's prompt, which may be longer than the context."""
    with _errors_of(request):
        text, _ = _render(tokenizer, request, options)
        grids: list[Any] = [None] * len(request.images)
        for i, image in enumerate(request.images):
            with _reading(request, i):
                grids[i] = _vision_of(tokenizer).processor.grid(*size_of(image, f"Image {i + 1}"))
        return tokenizer.count(leave_out(text, grids)) + sum(math.prod(grid) - 1 for grid in filter(None, grids))


@contextmanager
def _errors_of(request: Request) -> Iterator[None]:
    try:
        yield
    except ApiError as e:
        e.param = e.param or request.param
        raise
    except MTPError as e:
        raise ApiError(400, f"The prompt cannot be read: {e}", param=request.param) from e


def _render(tokenizer: BoundedTokenizer, request: Request, options: Options) -> tuple[str, bool | None]:
    """The text of a chat's prompt, and whether it ends within reasoning, see ``ends_in_reasoning``."""
    messages = _messages_of(tokenizer, request)
    begun = request.begun
    if not tokenizer.has_chat_template:
        if begun:  # only a template leaves a message open
            message = "A last message of the assistant cannot be continued without a chat template"
            raise ApiError(400, f"{message}: send it to /v1/completions.")
        return convert_chat(messages, request.role_mapping), None
    if request.tools and not tokenizer.has_tool_calling:
        logging.warning("The request has tools, but the model's chat template does not support them.")
    elif request.tools and format_of(tokenizer) is None:
        message = "The model writes tool calls neither in Qwen's formats nor in GLM's: use mlx_lm.server."
        raise ApiError(400, message, param="tools")
    prefill = ""
    marks = tokenizer.marks[False]
    variables = {**options.chat_template_args, **_cut(request.args.chat_template_kwargs or {}, marks)}
    if begun == "reasoning_content" and variables.get("enable_thinking") is False:
        raise ApiError(400, "The answer would continue the last message, which is reasoning alone: turn thinking on.")
    if begun:
        prefill = messages[-1][begun]
        messages[-1][begun] = PREFILL
    with as_mtp_error("the chat template does not take these messages"):
        text: str = tokenizer.apply_chat_template(
            _with_query(messages) if OPENING in str(tokenizer.chat_template) else messages,
            tools=_cut(request.shown_tools, marks),
            tokenize=False,
            add_generation_prompt=not begun,
            **variables,
        )
        text = QUERY_TURN.sub("", text).replace(QUERY, "")
    if begun:
        if PREFILL not in text:
            raise ApiError(400, f"The answer would continue the last message, but the chat template has no {begun}.")
        text = text[: text.rindex(PREFILL)] + prefill
    return text, ends_in_reasoning(text, think_marks(tokenizer), prefill)


def _messages_of(tokenizer: BoundedTokenizer, request: Request) -> list[Json]:
    """The messages for the chat template. Control tokens that a client quotes are cut, and so become ordinary tokens."""
    messages = [_cut(m, tokenizer.marks[m["role"] == "assistant"]) for m in request.messages]
    for message in messages:
        message["content"] = message.get("content") or ""
    if request.images and tokenizer.vision is None and "user" not in request.askers:
        logging.warning("The model takes no images: marks stand for those of the history.")
        request.images = []
        for message in messages:
            message["content"] = message["content"].replace(MARK, LEFT_OUT)
    return messages


def _with_query(messages: list[Json]) -> list[Json]:
    """Put ``QUERY`` before a conversation that has no question, or begins with a tool's result."""
    n = int(bool(messages) and messages[0]["role"] == "system")
    texts = [m["content"].strip() for m in messages if m["role"] == "user"]
    has_question = not all(text.startswith(RESPONSE[0]) and text.endswith(RESPONSE[1]) for text in texts)
    if has_question and messages[n]["role"] != "tool":
        return messages
    return [*messages[:n], {"role": "user", "content": QUERY}, *messages[n:]]


def _cut(value: Any, marks: list[str]) -> Any:
    """The value with these marks cut in its strings: before the punctuation at their end, as a tokenizer splits them."""
    if isinstance(value, str):
        for mark in marks:
            if mark in value:
                value = value.replace(mark, LAST_WORD.sub(rf"\1{CUT}", mark, count=1))
        return value
    if isinstance(value, dict):
        return {_cut(name, marks): _cut(x, marks) for name, x in value.items()}
    return [_cut(x, marks) for x in value] if isinstance(value, list) else value


def _read_images(tokenizer: BoundedTokenizer, request: Request, tokens: list[int], account: Account) -> list[Any]:
    """The patches of each image, see ``read_pixels``, or ``None`` if it is left out. The URLs are dropped."""

    def before_each(n_bytes: int) -> None:
        if n_bytes > (left := account.left):
            needs = f"An image needs {size(n_bytes)} of memory, and {size(max(left, 0))} are left"
            raise ApiError(507, f"{needs}: send a smaller one.", code=NO_MEMORY)

    vision = _vision_of(tokenizer)
    context = tokenizer.context_length
    images = request.images
    request.images = []
    return read_pixels(vision, tokens, images, context, MAX_PIXELS, before_each, partial(_reading, request))


@contextmanager
def _reading(request: Request, i: int) -> Iterator[None]:
    """Read image i, unless the client has gone. One with an answer may be broken: a mark stands for it."""
    if request.is_gone:
        raise ApiError(400, "The client has disconnected.")
    try:
        yield
    except MTPError as e:
        if request.askers[i]:
            raise
        logging.warning(f"A mark stands for an image: {e}")


def _vision_of(tokenizer: BoundedTokenizer) -> Vision:
    if tokenizer.vision is None:
        raise ApiError(400, "The model takes no images: send text, or start the server with --images.")
    return tokenizer.vision
