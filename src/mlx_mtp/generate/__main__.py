"""The command line of ``mlx_mtp generate``: that of ``mlx_lm.generate``, and the flags of MTP."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.models.cache import load_prompt_cache as load_caches
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint import DEMO
from ..cli import arguments
from ..cli.display import one_line_errors, prompt_progress, typed
from ..cli.parser import flag_of, parse
from ..cli.parsers import generate_parser
from ..core.batch.ids import token_ids
from ..core.caches.prompt_cache import open_prompt_cache
from ..core.distributed import from_rank_0
from ..core.models.mixin import MTPModel
from ..errors import MTPError, MTPFileNotFoundError, as_mtp_error, require
from ..files import check_source, read_text
from ..images.open import size_of
from ..images.prompt import IMAGE_TOKEN, PLACEHOLDER, read_images, vision_of
from ..text.answer import ends_in_reasoning, think_marks
from ..text.grammar import Grammar, make_grammar
from .check import check
from .stream import print_text

SIZES = ("prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start")


@one_line_errors("mlx_mtp generate")
def main() -> None:
    args = parse(generate_parser())
    check_flags(args)
    caches, saved_for = load_prompt_cache(args)
    model, tokenizer = load_model(args, saved_for)
    if caches is not None and isinstance(model, MTPModel):
        open_prompt_cache(model, caches)  # --check passes it to mlx-lm first, which does not check it
    ranks = getattr(model, "ranks", None)  # missing in models of plain mlx-lm
    prompt = from_rank_0(ranks, lambda: encode_prompt(args, model, tokenizer, caches is not None))
    options: dict[str, Any] = {name: getattr(args, name) for name in SIZES} | {"prompt_cache": caches}
    if args.check:
        if args.image:
            image_prompt = read_images(vision_of(model), prompt, args.image)
            prompt, options["input_embeddings"] = image_prompt.tokens, image_prompt.embed(model)
            options["prompt_cache"] = image_prompt.cache(model, options["prompt_cache"])
        text_options = arguments.text_options(args)
        stop_tokens = tokenizer.eos_token_ids
        result = check(model, mx.array(prompt), text_options, stop_tokens=stop_tokens, **options)
        print(result.report(tokenizer))
        sys.exit(0 if result.passed else 1)
    with arguments.open_prompt_store(args, model) as store, prompt_progress() as progress:
        text, last = print_text(
            model,
            tokenizer,
            prompt,
            logits_processors=make_processors(args.json_schema, tokenizer, prompt, args.prefill_response or ""),
            verbose=args.verbose,
            show_drafts=args.show_drafts,
            mtp=args.mtp,
            options=arguments.text_options(args),
            sampler=arguments.sampler_of(args, tokenizer),
            max_kv_size=args.max_kv_size,
            prompt_store=store,
            images=args.image or (),
            prompt_progress_callback=progress,
            **options,
        )
        if not args.verbose:
            print(text, flush=True)
    if last.finish_reason == "length":
        print(f"stopped at {last.generation_tokens} tokens (--max-tokens)", file=sys.stderr)


def check_flags(args: argparse.Namespace) -> None:
    if args.draft_model is not None:
        raise MTPError(f"--draft-model runs in mlx-lm's own command: mlx_lm.generate --draft-model {args.draft_model}.")
    arguments.check_generation_flags(args)
    arguments.check_prompt_cache_dir(args, "prompt_cache_file", "check")
    # A prompt cache file is for a whole model.
    arguments.check_alone(
        args, "prompt_cache_file", "prompt_cache_dir", "adapter_path", "image", "quantize_activations"
    )
    if args.prompt == "-" and mx.distributed.init().size() > 1:
        raise MTPError("--prompt - reads standard input, which mlx.launch does not close: give the text instead.")
    for file in args.image or ():
        size_of(file)
    if args.json_schema is not None:
        require("server", "--json-schema")
        if not is_json(args.json_schema):
            check_source(Path(args.json_schema), "--json-schema")
    if args.check:
        if args.json_schema is not None:
            raise MTPError("--check compares free text and cannot be combined with --json-schema.")
        if args.temp > 0:
            raise MTPError("--check compares greedy tokens and cannot be combined with --temp.")
        if args.settings is not True:
            raise MTPError("--check ignores tuned settings and cannot be combined with --settings.")


def load_model(args: argparse.Namespace, saved_for: dict[str, Any]) -> tuple[nn.Module, TokenizerWrapper]:
    """Load the model and its tokenizer, seed MLX's random state, and check the flags against the model."""
    args.model = args.model or saved_for.get("model", str(DEMO))
    options: dict[str, Any] = {"settings": False} if args.check else {}
    if args.image:
        options["vision"] = "auto"
    options["tokenizer_config"] = saved_for.get("tokenizer_config", {})
    options["model_config"] = {"quantize_activations": args.quantize_activations}
    model, tokenizer, config = arguments.load_model(args, args.image is not None, **options)
    arguments.check_model_flags(args, config)
    add_eos_tokens(tokenizer, args.extra_eos_token)
    arguments.settle_drafts(args, model)
    return model, tokenizer


def load_prompt_cache(args: argparse.Namespace) -> tuple[list[Any] | None, dict[str, Any]]:
    """The caches of a file of ``mlx_lm.cache_prompt``, if one is given, and the ``model`` and ``tokenizer_config`` that it was
    made with. As there, its model and quantization must be those of the flags.
    """
    if (file := args.prompt_cache_file) is None:
        return None, {}
    if not Path(file).is_file():
        raise MTPFileNotFoundError(f"There is no prompt cache {file}: write it with `mlx_lm.cache_prompt`.")
    try:
        caches, metadata = load_caches(file, return_metadata=True)
        if missing := {"model", "tokenizer_config"} - metadata.keys():
            raise MTPError(f"its metadata lack {', '.join(sorted(missing))}")
        metadata["tokenizer_config"] = json.loads(metadata["tokenizer_config"])
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as e:  # mlx-lm does not check its content
        raise MTPError(f"{file} is not a prompt cache of `mlx_lm.cache_prompt`: {e}") from e
    for name in ("bits", "group_size") if isinstance(caches[0], QuantizedKVCache) else ():
        if getattr(args, f"kv_{name}") not in (None, getattr(caches[0], name)):
            raise MTPError(f"{flag_of(f'kv_{name}')} does not match the kv cache loaded from --prompt-cache-file.")
    if args.model not in (None, metadata["model"]):
        models = f"({args.model}) than that used to create the prompt cache ({metadata['model']})"
        raise MTPError(f"Providing a different model {models} is an error.")
    return caches, metadata


def encode_prompt(args: argparse.Namespace, model: Any, tokenizer: TokenizerWrapper, is_suffix: bool) -> list[int]:
    """The prompt's token ids; ``is_suffix``: a prompt cache has the beginning of the conversation."""
    text = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    text = typed(sys.stdin.read) if text == "-" else text
    if args.image:
        vision_of(model)  # or an error
        if IMAGE_TOKEN not in text:
            text = PLACEHOLDER * len(args.image) + text
    use_chat_template = not args.ignore_chat_template and tokenizer.has_chat_template
    if use_chat_template:
        given = (("system", args.system_prompt), ("user", text), ("assistant", args.prefill_response))
        messages = [{"role": role, "content": content} for role, content in given if content is not None]
        has_prefill = args.prefill_response is not None
        how = {"tokenize": False, "continue_final_message": has_prefill, "add_generation_prompt": not has_prefill}
        with as_mtp_error(f"The chat template of {args.model} cannot be rendered"):
            text = tokenizer.apply_chat_template(messages, **how, **args.chat_template_config)
            if is_suffix:  # the prefix is in the prompt cache
                messages[-1]["content"] = "<query>"
                text = text[tokenizer.apply_chat_template(messages, **how).index("<query>") :]
    with as_mtp_error("The prompt is not text in UTF-8", UnicodeError):
        text.encode()
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=not use_chat_template)
    if not tokens:
        raise MTPError("The prompt is empty: give --prompt some text.")
    return token_ids(tokens, model)


def add_eos_tokens(tokenizer: TokenizerWrapper, tokens: Sequence[str]) -> None:
    """Make these tokens, given as text or as ids, end the generation; mlx-lm would use the unknown token for others."""
    vocab = tokenizer.get_vocab()
    ids = set(map(str, vocab.values()))
    for token in tokens:
        if token not in vocab and token not in ids:
            raise MTPError(
                f"--extra-eos-token {token} is not a token of the model: give one of its vocabulary, or its id."
            )
        tokenizer.add_eos_token(token)


def make_processors(schema: str | None, tokenizer: TokenizerWrapper, prompt: list[int], prefill: str) -> list[Grammar]:
    """The logits processor of ``--json-schema``, which begins after the reasoning."""
    if schema is None:
        return []
    text = schema if is_json(schema) else read_text(Path(schema))
    in_reasoning = ends_in_reasoning(tokenizer.decode(prompt), think_marks(tokenizer), prefill)
    after = tokenizer.think_end if in_reasoning else ""
    try:
        return [make_grammar(tokenizer, json_schema=text, after=after)]
    except MTPError as e:
        raise MTPError(f"--json-schema {schema}: {e}") from e


def is_json(schema: str) -> bool:
    """Whether the value of ``--json-schema`` is a schema and not a file."""
    return schema.lstrip().startswith("{")


if __name__ == "__main__":
    main()
