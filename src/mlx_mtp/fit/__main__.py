"""The command line of ``mlx_mtp fit``. Flags that mlx-lm has as well have the same names."""

import argparse
import sys
from dataclasses import fields
from shlex import quote

from ..cli.display import one_line_errors
from ..cli.flags import FLAGS
from ..cli.parser import finish, flag_of, parse
from .options import FitOptions


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_mtp fit",
        description="Train a model's MTP head to predict the model's own text. The rest of the model and its text do not "
        "change. Exits with status 1 if the head is not better than before.",
    )
    add = parser.add_argument
    add("--model", required=True, help="The path to the local model directory or Hugging Face repo.")
    add("--mlx-path", required=True, help="Path to save the model with the fitted head.")
    of_corpus = "Files of text like the answers, or .jsonl files of mlx_lm.lora (default: answers to --prompts)."
    add("--corpus", nargs="+", metavar="FILE", help=of_corpus)
    of_prompts = "A file of prompts, separated by lines of three dashes (default: nine built-in prompts)."
    add("--prompts", metavar="FILE", help=of_prompts)
    add("--adapter-path", help="Path to the trained adapter weights and config of the backbone.")
    of_type = "Type of weights that are not quantized, and of the head that is written. auto is the checkpoint's."
    add("--dtype", **FLAGS["--dtype"] | {"help": of_type})
    for option in (f for f in fields(FitOptions) if f.metadata):
        add(flag_of(option.name), type=type(option.default), default=option.default, help=option.metadata["help"])
    add("--cache-path", metavar="FOLDER", help="Keep the recorded states in this folder for another run.")
    return finish(parser)


@one_line_errors("mlx_mtp fit")
def main() -> None:
    from .fitting import fit

    args = vars(parse(make_parser()))
    if not fit(**args).is_better:
        print("The fitted head is not better by more than the uncertainty: nothing was written.", file=sys.stderr)
        sys.exit(1)
    print(f"[INFO] Next: `mlx_mtp chat --mtp --model {quote(args['mlx_path'])}`")


if __name__ == "__main__":
    main()
