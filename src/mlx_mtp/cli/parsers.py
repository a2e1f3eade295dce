"""The parsers of the commands, without the imports of what runs."""

import argparse
from pathlib import Path

from ..checkpoint import DEMO
from .flags import LOADING, MODEL_HELP, TEMPLATE_HELP, add_drafting, add_flags, add_sampling
from .parser import extend, finish, json_object

REQUEST = "Write a binary search in Python."  # of the demo


def demo_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_mtp demo",
        description="Generate the same text without and with drafts, and compare: tokens per second, passes of the model, and "
        "where each token came from. Decoding is greedy, the two runs alternate, and the speeds are medians.",
    )
    parser.add_argument("--model", default=str(DEMO), help=MODEL_HELP)
    parser.add_argument("--prompt", help=f"The prompt (default: {REQUEST!r}; the bundled demo completes a class).")
    parser.add_argument("--max-tokens", "-m", type=int, default=128, help="Maximum number of tokens to generate.")
    add_flags(parser, ["--dtype"])
    return finish(parser)


def generate_parser() -> argparse.ArgumentParser:
    from mlx_lm.generate import setup_arg_parser

    parser = extend(setup_arg_parser(), "mlx_mtp generate", "Generate text, with drafts of the model's own MTP head.")
    add = parser.add_argument
    add(
        "--prompt",
        "-p",
        default=parser.get_default("prompt"),
        help=r"Message to be processed by the model ('-' reads from stdin). \n and \t become a line break and a tab, but not "
        "in stdin: use '-' for text as it is, such as LaTeX or Windows paths.",
    )
    add_sampling(parser, are_advised=False)
    add("--chat-template-config", type=json_object, default="{}", help=TEMPLATE_HELP)
    add(
        "--json-schema", metavar="FILE|JSON", help="Generate JSON that follows this schema, or the schema in this file."
    )
    add_drafting(parser)
    add("--draft-model", help="Not supported: use mlx_lm.generate.")
    add(
        "--check",
        action="store_true",
        help="Generate with and without MTP and compare: exit status 1 if a token differs by more than rounding.",
    )
    return finish(parser)


def chat_parser() -> argparse.ArgumentParser:
    from mlx_lm.chat import setup_arg_parser

    parser = extend(setup_arg_parser(), "mlx_mtp chat", "Chat with a model, with drafts of its own MTP head.")
    add_sampling(parser)
    add_drafting(parser)
    parser.set_defaults(model=str(DEMO))
    add_flags(parser, ["--images"])
    parser.add_argument(
        "--thinking", choices=("on", "off"), help="Turn thinking on or off (default: on, if the model supports it)."
    )
    return finish(parser)


def convert_parser() -> argparse.ArgumentParser:
    from mlx_lm.convert import configure_parser

    parser = extend(
        configure_parser(), "mlx_mtp convert", "Convert a Hugging Face model to MLX format, with its MTP head."
    )
    add = parser.add_argument
    # mlx-lm's flags, whose defaults depend on the mode
    add("--q-bits", type=int, metavar="BITS", help="Bits per weight for quantization (default: 4, and 8 for mxfp8).")
    add(
        "--q-group-size",
        type=int,
        metavar="N",
        help="Group size for quantization (default: 64 for affine, 16 for nvfp4, 32 for others).",
    )
    add(
        "--recipe",
        metavar="NAME",
        help="Convert the published model of this name to 4 bits; other flags take precedence.",
    )
    add("--adapter-path", help="Fuse the trained adapter weights in this folder into the model.")
    add("--revision", help="Branch, tag or commit of the Hugging Face repo.")
    add("--no-mtp", dest="mtp", action="store_false", help="Convert without the MTP head.")
    add("--graft-mtp-from", help="Add the MTP head of this original to --model, a conversion without one.")
    add("--graft-vision-from", help="Add the vision encoder of this original to --model, a conversion without one.")
    add("--graft-revision", help="Branch, tag or commit of the base model's Hugging Face repo.")
    add("--no-vision", dest="vision", action="store_false", help="Convert without the vision encoder.")
    add("--skip-check", action="store_true", help="Do not run the model to check the grafted head.")
    add(
        "--inspect",
        metavar="MODEL",
        help="Describe a model and whether --mtp can use its head, without converting it or downloading weights.",
    )
    return finish(parser)


def benchmark_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_mtp benchmark",
        description="Compare the speed of MTP and plain mlx-lm, alternating on the same prompts.",
        conflict_handler="resolve",  # an added flag replaces the flag of the same name
    )
    add = parser.add_argument
    add("--model", help=MODEL_HELP)
    add(
        "--prompts",
        metavar="FILE|KIND",
        help="A file of prompts, separated by lines of three dashes, or a built-in set: nine (kinds of request), copying "
        "(four prompts with answers that repeat them), python (beginnings of Python files). Default: nine, or python for the "
        "demo.",
    )
    add(
        "--context",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="Lengthen each prompt to about N tokens (default: as it is), and measure each of several lengths.",
    )
    add("--max-tokens", "-m", type=int, default=128, help="Maximum number of tokens for each prompt (default: 128).")
    add("--repeat", type=int, default=5, help="The number of rounds (default: 5).")
    add(
        "--compare-depths",
        nargs="?",
        type=int,
        const=4,
        metavar="K",
        help="Also measure the head at each fixed draft length from 1 to K, or to 4 without K.",
    )
    prefill = "Also time the prefill of prompts of N tokens (without N: 2048 and 8192)."
    add("--prefill", type=int, nargs="*", metavar="N", help=prefill)
    tuned = (
        "Measure auto, fixed draft lengths, cheaper drafts and other ways to run passes against plain decoding, and write the "
        "best settings to FILE (default: one in the user's cache folder, where --mtp finds it)."
    )
    add("--tune", nargs="?", const=True, default=False, metavar="FILE", help=tuned)
    add("--json", type=Path, metavar="FILE", help="Write the figures to this file.")
    plot = "Draw speed by draft length into this image; requires --compare-depths."
    add("--plot", type=Path, metavar="FILE", help=plot)
    add(
        "--mtp",
        nargs="?",
        const=True,
        default=True,
        metavar="HEAD",
        help="Use the head in HEAD, a folder or Hugging Face repo with only a head (default: the model's own).",
    )
    add_flags(parser, (*LOADING, "--pipeline"))
    # The head is always measured, without tuned settings by default.
    add("--settings", metavar="FILE", help="Measure with the tuned settings in this file (default: no settings).")
    return finish(parser)


def models_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_mtp models",
        description="List the published models by their names for --model: the size of the weights and the head, the memory "
        "of a context, whether the model fits this machine, and whether it is downloaded.",
    )
    parser.add_argument("--context", type=int, default=32_768, help="Length of the context in tokens.")
    return finish(parser)


def doctor_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_mtp doctor",
        description="Check this machine and a model: chip, memory, versions, tuned settings, caches, and whether the model has "
        "an MTP head whose drafts it accepts. The last line is the verdict.",
    )
    parser.add_argument("--model", help=MODEL_HELP)
    parser.add_argument(
        "--json", action="store_true", help="Print one JSON object, with every figure of the self-test."
    )
    add_flags(parser, ["--dtype"])
    return finish(parser)
