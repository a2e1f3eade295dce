"""The command line of ``mlx_mtp generate``: that of ``mlx_lm.generate``, and the flags of MTP."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import setup_arg_parser
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.prompt_cache import open_prompt_cache
from ..checkpoint.config import read_json
from ..checkpoint.hub import fetch
from ..checkpoint.load import DEMO, load
from ..checkpoint.self_test import compiled_differences, report_differences
from ..cli.arguments import (
    check_alone,
    check_drafts_possible,
    check_generation_flags,
    check_model_flags,
    check_prompt_cache_dir,
    head_of,
    load_options,
    open_prompt_store,
    rank_groups,
    sampler_of,
    settle_drafts,
)
from ..cli.display import one_line_errors, prompt_progress
from ..cli.flags import add_drafting
from ..cli.parser import extend, finish, parse
from ..distributed.ranks import from_rank_0
from ..drafts.options import asks_for_copies
from ..extras import require
from ..files import check_source
from ..images.open import size_of
from ..images.prompt import read_images, vision_of
from ..models import MODEL_TYPES
from ..models.mixin import MTPMixin
from ..text.grammar import Grammar, make_grammar
from .check import check
from .inputs import PromptCacheFile, PromptOptions, encode_prompt, load_prompt_cache, template_options
from .stream import print_text

# Flags for one process only. A prompt cache file is for a whole model.
ALONE = ("prompt_cache_file", "prompt_cache_dir", "draft_model", "adapter_path", "image", "quantize_activations")
SHARED_OPTIONS = ("max_tokens", "prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start")
MTP_OPTIONS = ("num_draft_tokens", "copy_drafts", "draft_p_min")


def make_parser() -> argparse.ArgumentParser:
    """mlx-lm's parser, with the flags of MTP added."""
    description = "Generate text, with drafts of the model's own MTP head."
    parser = extend(setup_arg_parser(), "mlx_mtp generate", description)
    add_drafting(parser)
    parser.add_argument(
        "--temp",
        type=float,
        default=0.0,
        help="Sampling temperature (default: 0.0, the most likely token, whatever the model's generation_config.json says)",
    )
    parser.add_argument(
        "--draft-model",
        type=str,
        help="A model to be used for speculative decoding by mlx-lm, without the head; --num-draft-tokens then defaults to 3.",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="Generate with and without MTP and compare: exit status 1 if a token differs by more than rounding.",
    )
    parser.add_argument(
        "--json-schema", metavar="FILE|JSON", help="Generate JSON that follows this schema, or the schema in this file."
    )
    return finish(parser)


def main() -> None:
    with one_line_errors("mlx_mtp generate"):
        run(parse(make_parser()))


def run(args: argparse.Namespace) -> None:
    """Generate as ``mlx_lm.generate`` with these flags."""
    check_flags(args)
    saved = None
    if args.prompt_cache_file is not None:
        saved = load_prompt_cache(args.prompt_cache_file, args.model, args.kv_bits, args.kv_group_size)
    if args.draft_model is not None:
        fetch(args.draft_model, None)
    model, tokenizer, config = load_model(args, saved)
    if saved is not None and isinstance(model, MTPMixin):
        open_prompt_cache(model, saved.caches)  # --check passes it to mlx-lm first, which does not check it
    asked = PromptOptions(
        text=args.prompt,
        images=args.image or (),
        system_prompt=args.system_prompt,
        prefill_response=args.prefill_response,
        ignore_chat_template=args.ignore_chat_template,
        template=template_options(args.chat_template_config),
    )
    prompt, input_embeddings = from_rank_0(
        getattr(model, "ranks", None), lambda: encode_prompt(asked, model, tokenizer, config, saved is not None)
    )
    options = {name: getattr(args, name) for name in (*SHARED_OPTIONS, *MTP_OPTIONS)}
    options |= {"prompt_cache": None if saved is None else saved.caches, "input_embeddings": input_embeddings}
    images = args.image if args.image and isinstance(model, MTPMixin) else ()
    if args.check:
        if images:
            pictured = read_images(vision_of(model), prompt, images)
            prompt, options["input_embeddings"] = pictured.tokens, pictured.embed(model)
            options["prompt_cache"] = pictured.cache(model, options["prompt_cache"])
        result = check(model, mx.array(prompt), stop_tokens=tokenizer.eos_token_ids, **options)
        print(result.report(tokenizer))
        print(report_differences(compiled_differences(model, mx.array(prompt))))
        sys.exit(0 if result.passed else 1)
    with open_prompt_store(args, model) as store, prompt_progress() as progress:
        if args.draft_model is None:  # mlx-lm's speculative decoding has no callback
            options["prompt_progress_callback"] = progress
        text, last = print_text(
            model,
            tokenizer,
            prompt,
            logits_processors=make_processors(args.json_schema, tokenizer, prompt),
            verbose=args.verbose,
            show_drafts=args.show_drafts,
            mtp=args.mtp,
            sampler=sampler_of(args, tokenizer),
            max_kv_size=args.max_kv_size,
            draft_model=load_draft_model(args, tokenizer),
            prompt_store=store,
            images=images,
            **options,
        )
        if not args.verbose:
            print(text, flush=True)
    if last.finish_reason == "length":
        print(f"stopped at {last.generation_tokens} tokens (--max-tokens)", file=sys.stderr)


def check_flags(args: argparse.Namespace) -> None:
    """Raise a ValueError if a flag is out of range or cannot be combined with another."""
    check_generation_flags(args)
    check_prompt_cache_dir(args, "prompt_cache_file", "check")
    check_alone(args, *ALONE)
    if args.prompt == "-" and mx.distributed.init().size() > 1:
        raise ValueError("--prompt - reads standard input, which mlx.launch does not close: give the text instead.")
    for file in args.image or ():
        size_of(file)
    template_options(args.chat_template_config)
    if args.json_schema is not None:
        require("server", "--json-schema")
    if args.json_schema is not None and not is_json(args.json_schema):
        check_source(Path(args.json_schema), "--json-schema")
    if args.check:
        if args.json_schema is not None:
            raise ValueError("--check compares free text and cannot be combined with --json-schema.")
        if args.temp > 0:
            raise ValueError("--check compares greedy tokens and cannot be combined with --temp.")
        if args.settings is not True:
            raise ValueError("--check ignores tuned settings and cannot be combined with --settings.")


def load_model(
    args: argparse.Namespace, saved: PromptCacheFile | None
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """Load the model, its tokenizer and its config, seed MLX's random state, and check the flags against the model."""
    tokenizer_config = {} if saved is None else saved.tokenizer_config
    if args.model is None:
        args.model = str(DEMO) if saved is None else saved.model
    options = load_options(args)
    if args.check:
        options["settings"] = False
    sees = bool(args.image) and _is_ours(args.model)
    if sees:
        options["vision"] = "auto"
    check_drafts_possible(args)
    if args.seed is not None:
        mx.random.seed(args.seed)
    model, tokenizer, config = load(
        args.model,
        mtp=head_of(args),
        copy_drafts=asks_for_copies(args.copy_drafts) or sees or args.prompt_cache_dir is not None,
        adapter_path=args.adapter_path,
        tokenizer_config={**tokenizer_config, "trust_remote_code": args.trust_remote_code},
        model_config={"quantize_activations": args.quantize_activations},
        return_config=True,
        trust_remote_code=args.trust_remote_code,
        **rank_groups(args),
        **options,
    )
    check_model_flags(args, config)
    add_eos_tokens(tokenizer, args.extra_eos_token)
    settle_drafts(args, model)
    return model, tokenizer, config


def _is_ours(model: str) -> bool:
    """Whether this package reads the images; mlx-lm reads them for other families of models."""
    file = fetch(model, None) / "config.json"
    return file.exists() and read_json(file).get("model_type") in MODEL_TYPES


def add_eos_tokens(tokenizer: TokenizerWrapper, tokens: Sequence[str]) -> None:
    """Make these tokens, given as text or as ids, end the generation.

    Raises:
        ValueError: A token is not in the vocabulary; mlx-lm would use the unknown token instead.
    """
    vocab = tokenizer.get_vocab()
    ids = set(vocab.values())
    for token in tokens:
        try:
            is_known = int(token) in ids
        except ValueError:
            is_known = token in vocab
        if not is_known:
            raise ValueError(
                f"--extra-eos-token {token} is not a token of the model: give one of its vocabulary, or its id."
            )
        tokenizer.add_eos_token(token)


def make_processors(schema: str | None, tokenizer: TokenizerWrapper, prompt: list[int]) -> list[Grammar]:
    """The logits processor of ``--json-schema``, which begins after the reasoning.

    Raises:
        ValueError: The value is not a JSON schema.
    """
    if schema is None:
        return []
    text = schema if is_json(schema) else Path(schema).read_text(encoding="utf-8")
    after = ""
    if tokenizer.has_thinking and tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt):
        after = tokenizer.think_end
    try:
        return [make_grammar(tokenizer, json_schema=text, after=after)]
    except ValueError as e:
        raise ValueError(f"--json-schema {schema}: {e}") from e


def is_json(schema: str) -> bool:
    """Whether the value of ``--json-schema`` is a schema and not a file."""
    return schema.lstrip().startswith("{")


def load_draft_model(args: argparse.Namespace, tokenizer: TokenizerWrapper) -> nn.Module | None:
    if args.draft_model is None:
        return None
    model: nn.Module
    model, draft_tokenizer = mlx_lm.load(args.draft_model)
    if draft_tokenizer.vocab_size != tokenizer.vocab_size:
        raise ValueError("Draft model tokenizer does not match model tokenizer.")
    return model


if __name__ == "__main__":
    main()
