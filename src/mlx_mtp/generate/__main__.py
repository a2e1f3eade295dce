"""The command line of ``mlx_mtp.generate``: that of ``mlx_lm.generate``, and the flags of MTP."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm import sample_utils
from mlx_lm.generate import setup_arg_parser
from mlx_lm.models.cache import QuantizedKVCache, load_prompt_cache

from .. import cli
from ..checkpoint.load import DEMO, load
from ..decoding import sampling
from ..decoding.depth import MAX_DRAFT_TOKENS
from .check import check
from .stream import generate


def make_parser():
    """mlx-lm's flags, and those of MTP."""
    parser = setup_arg_parser()
    parser.prog = "mlx_mtp.generate"
    parser.description = "LLM inference script, with the model's own MTP head"
    parser.add_argument(
        "--mtp",
        nargs="?",
        const=True,
        default=False,
        metavar="DRAFTER",
        help="Draft with the model's own multi-token-prediction head, or with that of a drafter folder or repo (qwen3_5_mtp).",
    )
    parser.add_argument(
        "--draft-p-min",
        type=float,
        help="Stop drafting where the head gives no token this probability (default: that of the settings, or 0.0).",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="Verify with the very operations of plain decoding: its tokens also where two logits are nearly equal, "
        "for the price of a pass for each token.",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="Generate with and without MTP and compare: exit status 1 if a token differs by more than rounding.",
    )
    cli.add_arguments(parser)
    for action in parser._actions:
        if action.dest == "model":
            action.help = "The path to the local model directory or Hugging Face repo (default: the bundled demo)."
        if action.dest == "num_draft_tokens":
            action.help = (
                "Number of tokens to draft when using speculative decoding (default: 3; with --mtp that of the settings, or "
                f"auto: chosen at every step for speed; up to {MAX_DRAFT_TOKENS})."
            )
            action.default, action.type = None, cli.auto_or_number
    return parser


def main() -> None:
    args = make_parser().parse_args()
    with cli.one_line_errors("mlx_mtp.generate"):
        run(args)


def run(args) -> None:
    """mlx-lm's ``mlx_lm.generate``, flag by flag."""
    cli.check_generation_flags(args)
    for flag in ("exact", "check", "draft_p_min"):
        if getattr(args, flag) and not args.mtp:
            raise ValueError(f"--{flag.replace('_', '-')} is of --mtp: give both, or neither.")
    if args.check and args.temp > 0:
        raise ValueError("--check compares the most likely tokens: leave out --temp.")
    if args.check and args.settings is not True:
        raise ValueError("--check is of what is drafted, with the head as it is: leave out --settings.")
    if args.check and args.max_kv_size is not None:
        raise ValueError("--check is of MTP, whose caches do not rotate: leave out --max-kv-size.")
    if args.seed is not None:
        mx.random.seed(args.seed)

    model_path, prompt_cache, tokenizer_config = args.model, None, {}
    if args.prompt_cache_file is not None:
        prompt_cache, metadata = _load_prompt_cache(args)
        model_path = metadata["model"]
        tokenizer_config = json.loads(metadata["tokenizer_config"])
    model_path = model_path or str(DEMO)

    options = cli.options(args)
    if args.check:
        options["settings"] = False
    model, tokenizer, config = load(
        model_path,
        adapter_path=args.adapter_path,
        tokenizer_config={**tokenizer_config, "trust_remote_code": args.trust_remote_code},
        model_config={"quantize_activations": args.quantize_activations},
        return_config=True,
        trust_remote_code=args.trust_remote_code,
        mtp=args.mtp,
        **options,
    )
    cli.check_model_flags(args, config)
    if args.mtp and model.drafting.tuned is not None:
        given = {name: getattr(args, name) for name in ("num_draft_tokens", "draft_p_min")}
        used = replace(model.drafting.tuned, **{name: value for name, value in given.items() if value is not None})
        print(f"Settings that --tune has found best here: {used} (--settings off does without)", file=sys.stderr)
    for eos_token in args.extra_eos_token:
        tokenizer.add_eos_token(eos_token)

    prompt, input_embeddings = _encode_prompt(args, model_path, model, tokenizer, config, prompt_cache is not None)
    if not prompt:
        raise ValueError("The prompt is empty: give --prompt some text.")

    draft_model = None
    if args.draft_model is not None:
        draft_model, draft_tokenizer = mlx_lm.load(args.draft_model)
        if draft_tokenizer.vocab_size != tokenizer.vocab_size:
            raise ValueError("Draft model tokenizer does not match model tokenizer.")
    make_sampler = sampling.make_sampler if args.mtp else sample_utils.make_sampler
    sampler = make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        top_k=args.top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )
    if args.check:
        result = check(
            model,
            mx.array(prompt),
            max_tokens=args.max_tokens,
            num_draft_tokens=args.num_draft_tokens,
            draft_p_min=args.draft_p_min,
            exact=args.exact,
            stop_tokens=tokenizer.eos_token_ids,
            prompt_cache=prompt_cache,
            input_embeddings=input_embeddings,
            prefill_step_size=args.prefill_step_size,
            kv_bits=args.kv_bits,
            kv_group_size=args.kv_group_size,
            quantized_kv_start=args.quantized_kv_start,
        )
        print(result.report(tokenizer))
        sys.exit(0 if result.passed else 1)
    response = generate(
        model,
        tokenizer,
        prompt,
        verbose=args.verbose,
        mtp=bool(args.mtp),
        draft_p_min=args.draft_p_min,
        exact=args.exact,
        max_tokens=args.max_tokens,
        sampler=sampler,
        max_kv_size=args.max_kv_size,
        prefill_step_size=args.prefill_step_size,
        prompt_cache=prompt_cache,
        kv_bits=args.kv_bits,
        kv_group_size=args.kv_group_size,
        quantized_kv_start=args.quantized_kv_start,
        draft_model=draft_model,
        num_draft_tokens=args.num_draft_tokens,
        input_embeddings=input_embeddings,
    )
    if not args.verbose:
        print(response)


def _load_prompt_cache(args) -> tuple[list[Any], dict[str, str]]:
    file = args.prompt_cache_file
    if not Path(file).is_file():
        raise FileNotFoundError(f"There is no prompt cache {file}: write it with `mlx_lm.cache_prompt`.")
    try:
        prompt_cache, metadata = load_prompt_cache(file, return_metadata=True)
        if missing := {"model", "tokenizer_config"} - metadata.keys():
            raise ValueError(f"its metadata lack {', '.join(sorted(missing))}")
    except (RuntimeError, ValueError, KeyError) as e:
        raise ValueError(f"{file} is not a prompt cache that `mlx_lm.cache_prompt` has written: {e}") from e
    if isinstance(prompt_cache[0], QuantizedKVCache):
        if args.kv_bits is not None and args.kv_bits != prompt_cache[0].bits:
            raise ValueError("--kv-bits does not match the kv cache loaded from --prompt-cache-file.")
        if args.kv_group_size != prompt_cache[0].group_size:
            raise ValueError("--kv-group-size does not match the kv cache loaded from --prompt-cache-file.")
    if args.model not in (None, metadata["model"]):
        raise ValueError(
            f"Providing a different model ({args.model}) than that used to create the prompt cache "
            f"({metadata['model']}) is an error."
        )
    return prompt_cache, metadata


def _encode_prompt(
    args, model_path: str, model, tokenizer, config, is_suffix: bool
) -> tuple[list[int], mx.array | None]:
    """The prompt's token ids, through the chat template where there is one, and its embeddings where it has images."""
    prompt = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    prompt = sys.stdin.read() if prompt == "-" else prompt
    try:
        prompt.encode()
    except UnicodeEncodeError as e:
        raise ValueError("The prompt is not text in UTF-8.") from e
    use_chat_template = not args.ignore_chat_template and tokenizer.has_chat_template
    if use_chat_template:
        messages = [] if args.system_prompt is None else [{"role": "system", "content": args.system_prompt}]
        messages.append({"role": "user", "content": prompt})
        has_prefill = args.prefill_response is not None
        if has_prefill:
            messages.append({"role": "assistant", "content": args.prefill_response})

        def render(**template_kwargs) -> str:
            return tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                continue_final_message=has_prefill,
                add_generation_prompt=not has_prefill,
                **template_kwargs,
            )

        prompt = render(**json.loads(args.chat_template_config or "{}"))
        if is_suffix:
            # The prefix is in the prompt cache.
            messages[-1]["content"] = "<query>"
            prompt = prompt[render().index("<query>") :]

    if not args.image:
        return tokenizer.encode(prompt, add_special_tokens=not use_chat_template), None

    from mlx_lm.processors import load_processor
    from PIL import Image

    processor = load_processor(model, config)
    if processor is None:
        raise ValueError(f"The model {model_path} does not take images.")
    images = [np.asarray(Image.open(f).convert("RGB")) for f in args.image]
    prompt, pixel_values = processor(prompt, images=images)
    tokens = tokenizer.encode(prompt, add_special_tokens=not use_chat_template)
    embeddings = model.embed_inputs(mx.array(tokens), pixel_values=pixel_values)
    mx.eval(embeddings)  # on this stream, before the prefill on another
    return tokens, embeddings


if __name__ == "__main__":
    main()
