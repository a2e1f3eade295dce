"""The prompt of the command line: its tokens, and the prompt cache before it."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.models.cache import load_prompt_cache as load_caches
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..extras import require
from ..images.prompt import vision_of
from ..images.vision import IMAGE_TOKEN, PLACEHOLDER
from ..models.mixin import MTPModel


@dataclass
class PromptCacheFile:
    """A file of ``mlx_lm.cache_prompt``."""

    model: str
    caches: list[Any]
    tokenizer_config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptOptions:
    """The flags of a prompt.

    Args:
        text (str): The text of ``--prompt``; ``-`` is standard input.
        images (Sequence[str]): The files of images.
        system_prompt (str, optional): The text before it, with a chat template.
        prefill_response (str, optional): The beginning of the answer, with a chat template.
        ignore_chat_template (bool): Whether to use the text without the chat template.
        template (Mapping[str, Any]): Arguments of ``apply_chat_template``.
    """

    text: str
    images: Sequence[str]
    system_prompt: str | None
    prefill_response: str | None
    ignore_chat_template: bool
    template: Mapping[str, Any]


def load_prompt_cache(file: str, model: str | None, kv_bits: int | None, kv_group_size: int) -> PromptCacheFile:
    """Read a file of ``mlx_lm.cache_prompt``.

    As in ``mlx_lm.generate``, it is refused if its model or quantization differs from the flags.
    """
    if not Path(file).is_file():
        raise FileNotFoundError(f"There is no prompt cache {file}: write it with `mlx_lm.cache_prompt`.")
    try:
        caches, metadata = load_caches(file, return_metadata=True)
        if missing := {"model", "tokenizer_config"} - metadata.keys():
            raise ValueError(f"its metadata lack {', '.join(sorted(missing))}")
        saved = PromptCacheFile(metadata["model"], caches, json.loads(metadata["tokenizer_config"]))
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as e:  # mlx-lm does not check its content
        raise ValueError(f"{file} is not a prompt cache of `mlx_lm.cache_prompt`: {e}") from e
    first = saved.caches[0]
    if isinstance(first, QuantizedKVCache):
        if kv_bits is not None and kv_bits != first.bits:
            raise ValueError("--kv-bits does not match the kv cache loaded from --prompt-cache-file.")
        if kv_group_size != first.group_size:
            raise ValueError("--kv-group-size does not match the kv cache loaded from --prompt-cache-file.")
    if model not in (None, saved.model):
        raise ValueError(
            f"Providing a different model ({model}) than that used to create the prompt cache ({saved.model}) is an error."
        )
    return saved


def template_options(text: str | None) -> dict[str, Any]:
    """The arguments of ``apply_chat_template`` in ``--chat-template-config``."""
    try:
        config = json.loads(text or "{}")
    except json.JSONDecodeError as e:
        raise ValueError(f"--chat-template-config is not JSON: {e}.") from e
    if not isinstance(config, dict):
        raise ValueError(f"--chat-template-config must be a JSON object, not {text}.")
    return config


def encode_prompt(
    options: PromptOptions,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    config: dict[str, Any],
    is_suffix: bool,
) -> tuple[list[int], mx.array | None]:
    """The prompt's token ids, and the embeddings [T, H] of a prompt with images of another family of models.

    Args:
        is_suffix (bool): Whether a prompt cache has the beginning of the conversation.

    Raises:
        ValueError: The prompt is empty or is not text, or the model does not take images.
    """
    text = _read_text(options.text)
    is_ours = isinstance(model, MTPModel)
    if options.images and is_ours:
        vision_of(model)  # or an error
        if IMAGE_TOKEN not in text:
            text = PLACEHOLDER * len(options.images) + text
    use_chat_template = not options.ignore_chat_template and tokenizer.has_chat_template
    if use_chat_template:
        text = _apply_chat_template(options, tokenizer, text, is_suffix)
    pixel_values = None
    if options.images and not is_ours:
        text, pixel_values = _process_images(options.images, model, config, text)
    tokens = tokenizer.encode(text, add_special_tokens=not use_chat_template)
    if not tokens:
        raise ValueError("The prompt is empty: give --prompt some text.")
    if pixel_values is None:
        return tokens, None
    embeddings = model.embed_inputs(mx.array(tokens), pixel_values=pixel_values)
    mx.eval(embeddings)  # prefill runs on another stream
    return tokens, embeddings


def _read_text(text: str) -> str:
    text = text.replace("\\n", "\n").replace("\\t", "\t")
    text = sys.stdin.read() if text == "-" else text
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError("The prompt is not text in UTF-8.") from e
    return text


def _apply_chat_template(options: PromptOptions, tokenizer: TokenizerWrapper, text: str, is_suffix: bool) -> str:
    messages = [] if options.system_prompt is None else [{"role": "system", "content": options.system_prompt}]
    messages.append({"role": "user", "content": text})
    has_prefill = options.prefill_response is not None
    if options.prefill_response is not None:
        messages.append({"role": "assistant", "content": options.prefill_response})

    def render(**variables: Any) -> str:
        rendered: str = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            continue_final_message=has_prefill,
            add_generation_prompt=not has_prefill,
            **variables,
        )
        return rendered

    text = render(**options.template)
    if is_suffix:
        # The prefix is in the prompt cache.
        messages[-1]["content"] = "<query>"
        text = text[render().index("<query>") :]
    return text


def _process_images(files: Sequence[str], model: nn.Module, config: dict[str, Any], text: str) -> tuple[str, Any]:
    """The prompt with its image placeholders expanded, and the pixels."""
    from mlx_lm.processors import load_processor

    processor = load_processor(model, config)
    if processor is None:
        raise ValueError(
            f"--image: mlx-lm {version('mlx-lm')} has no image processor for model type {config.get('model_type')}. "
            "For a Qwen3.5, add --mtp."
        )
    require("image", "--image")
    from PIL import Image

    text, pixel_values = processor(text, images=[np.asarray(Image.open(f).convert("RGB")) for f in files])
    return text, pixel_values
