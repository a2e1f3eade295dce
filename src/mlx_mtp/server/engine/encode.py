"""Encoding of texts, messages and images as tokens. A prompt beyond the context is refused before it is fully tokenized."""

import logging
from dataclasses import asdict
from typing import Any

from mlx_lm.server import GenerationArguments, convert_chat
from mlx_lm.tool_parsers import json_tools, qwen3_coder

from ...checkpoint.settings import Sampling
from ...images.open import MAX_BYTES, decode_url
from ...images.prompt import ImagePrompt, encode_marked, read_images
from ...images.vision import Vision
from ...memory import Account, size
from ...text.answer import ends_in_reasoning, think_marks
from ...text.grammar import llguidance_tokenizer
from ..request import NO_LIMIT, NO_MEMORY, ApiError, Options, Prompt, Request
from ..structured_output import make_output_grammar

QWEN_PARSERS = qwen3_coder.parse_tool_call, json_tools.parse_tool_call
CONTEXT = "This model's maximum context length is {} tokens"
CHARS = 4  # per token; longer texts are counted before they are tokenized
PIECE = 1 << 16  # characters that are counted at a time
SLACK = 16  # tokens that a cut between two pieces may add
MAX_PIXELS = 1 << 28  # of all images of a request; 22 photos of 12 megapixels


class BoundedTokenizer:
    """mlx-lm's tokenizer for prompts: it checks lengths, and reads the marks of images.

    Args:
        context_length (int, optional): The model's maximum number of tokens, if its config has it.
        vision (Vision, optional): The vision encoder. Default: ``None``, images are refused.
        sampling (Sampling): The model's default sampling parameters. Default: mlx-lm's.
    """

    def __init__(
        self,
        tokenizer: Any,
        context_length: int | None,
        vision: Vision | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008 (it is frozen)
    ):
        self.tokenizer, self.sampling = tokenizer, sampling
        self.context_length, self.vision = context_length, vision
        self.n_ids = 1 + max(tokenizer.get_vocab().values())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str | list[int], **kwargs: Any) -> list[int]:
        """The tokens of a text, or tokens sent by the client. ``images.prompt.MARK`` stands for an image."""
        if isinstance(text, str):
            self._check_length(text)
            return encode_marked(self.tokenizer, text, **kwargs)
        if (most := max(text)) >= self.n_ids:
            raise ApiError(400, f"The prompt has the token {most}, beyond the vocabulary of {self.n_ids}.")
        return text

    def _check_length(self, text: str) -> None:
        """Count a long text's tokens piece by piece until they exceed the context."""
        most = self.context_length
        if most is None or len(text) <= CHARS * most:
            return
        n = 0
        for i in range(0, len(text), PIECE):
            n += len(self.tokenizer.encode(text[i : i + PIECE], add_special_tokens=False)) - SLACK
            if n > most:
                raise ApiError(400, f"{CONTEXT.format(most)}, but the prompt has more.", code="context_length_exceeded")

    def complete(self, n_prompt: int, args: GenerationArguments, default_max_tokens: int, param: str) -> None:
        """Fill in the model's sampling parameters where the request sets none, and reduce the server's limit of tokens to the
        context. An ApiError if the request does not fit the model; ``param`` is the field with the prompt.
        """
        for field, value in asdict(self.sampling).items():
            if getattr(args.sampling, field) is None:
                setattr(args.sampling, field, value)
        if n_prompt == 0:
            raise ApiError(400, "The prompt is empty.", param=param)
        most = self.context_length
        if most is not None and n_prompt + args.max_tokens > most:
            if n_prompt >= most or args.max_tokens not in (default_max_tokens, NO_LIMIT):
                message = f"{CONTEXT.format(most)}, but the prompt has {n_prompt} and max_tokens is {args.max_tokens}."
                wrong = "max_tokens" if n_prompt < most else param
                raise ApiError(400, message, param=wrong, code="context_length_exceeded")
            args.max_tokens = most - n_prompt
        if args.sampling.top_k >= self.n_ids:
            raise ApiError(400, f"top_k must be below the vocabulary's size of {self.n_ids}.", param="top_k")
        if any(token >= self.n_ids for token in args.logits.logit_bias or ()):
            message = f"logit_bias names a token beyond the vocabulary of {self.n_ids}."
            raise ApiError(400, message, param="logit_bias")


def encode(tokenizer: BoundedTokenizer, request: Request, options: Options, account: Account) -> Prompt:
    """Encode the prompt of a request, which may take seconds; an ApiError if the request does not fit the model."""
    try:
        tokens, in_reasoning = _tokenize(tokenizer, request, options.chat_template_args)
        pictured = _read_images(tokenizer, request, tokens, account) if request.images else None
    except ApiError as e:
        e.param = e.param or request.param
        raise
    except Exception as e:
        raise ApiError(400, f"The prompt cannot be read: {e}", param=request.param) from e
    tokens = tokens if pictured is None else pictured.tokens
    tokenizer.complete(len(tokens), request.args, options.max_tokens, request.param)
    # What takes long is made here, not in the generation thread.
    make_output_grammar(tokenizer.tokenizer, request, in_reasoning)
    if request.args.logprobs:
        llguidance_tokenizer(tokenizer.tokenizer)
    return Prompt(tokens, in_reasoning, pictured=pictured)


def _tokenize(
    tokenizer: BoundedTokenizer, request: Request, template_args: dict[str, Any]
) -> tuple[list[int], bool | None]:
    """The tokens, and whether they end within reasoning, see ``ends_in_reasoning``."""
    if request.request_type == "text":
        return tokenizer.encode(request.prompt), None
    if not tokenizer.has_chat_template:
        if request.goes_on:  # only a template leaves a message open
            message = "A last message of the assistant cannot be continued without a chat template"
            raise ApiError(400, f"{message}: send it to /v1/completions.")
        return tokenizer.encode(convert_chat(request.messages, request.role_mapping)), None
    if request.tools and not tokenizer.has_tool_calling:
        logging.warning("The request has tools, but the model's chat template does not support them.")
    elif request.tools and tokenizer.tool_parser not in QWEN_PARSERS:
        raise ApiError(400, "The model does not write tool calls in Qwen's formats: use mlx_lm.server.", param="tools")
    ending = "continue_final_message" if request.goes_on else "add_generation_prompt"
    text: str = tokenizer.apply_chat_template(
        [{**message, "content": message.get("content") or ""} for message in request.messages],
        tools=request.tools,
        tokenize=False,
        **{ending: True},
        **{**template_args, **(request.args.chat_template_kwargs or {})},
    )
    prefill = request.messages[-1]["content"] if request.goes_on else ""
    return tokenizer.encode(text, add_special_tokens=False), ends_in_reasoning(text, think_marks(tokenizer), prefill)


def _read_images(tokenizer: BoundedTokenizer, request: Request, tokens: list[int], account: Account) -> ImagePrompt:
    if tokenizer.vision is None:
        raise ApiError(400, "The model takes no images: send text, or start the server with --images.")

    def before_each(n_bytes: int) -> None:
        check_client(request)
        if n_bytes > (left := account.left):
            needs = f"An image needs {size(n_bytes)} of memory, and {size(max(left, 0))} are left"
            raise ApiError(507, f"{needs}: send a smaller one.", code=NO_MEMORY)

    images = decode_all(request)
    return read_images(tokenizer.vision, tokens, images, tokenizer.context_length, MAX_PIXELS, before_each)


def decode_all(request: Request) -> list[bytes]:
    """Decode the images of a request, and drop their URLs; a ValueError if they are no data URLs, invalid or too large."""
    images: list[bytes] = []
    for i, url in enumerate(request.images, 1):
        check_client(request)
        images.append(decode_url(url, f"Image {i}"))
        if i > 1 and sum(map(len, images)) > MAX_BYTES:
            many = f"The images up to number {i} have more than {MAX_BYTES:,} bytes"
            raise ValueError(f"{many}: send fewer or smaller ones.")
    request.images = []
    return images


def check_client(request: Request) -> None:
    if request.is_gone:
        raise ApiError(400, "The client has disconnected.")
