"""The command line of ``mlx_mtp.convert``: that of ``mlx_lm.convert``, and the flags of the head."""

import argparse
import sys

from mlx_lm.convert import configure_parser

from ..cli import one_line_errors
from .conversion import convert
from .inspect import inspect
from .recipe import recipe_flags


def make_parser() -> argparse.ArgumentParser:
    """mlx-lm's flags, and those of the head."""
    parser = configure_parser()
    parser.prog = "mlx_mtp.convert"
    parser.description = "Convert Hugging Face model to MLX format, with its MTP head"
    parser.add_argument("--recipe", metavar="FILE", help="A TOML file with these flags; those given beside it win.")
    parser.add_argument("--revision", help="Branch, tag or commit of the Hugging Face repo.")
    parser.add_argument("--no-mtp", dest="mtp", action="store_false", help="Leave the MTP head out.")
    parser.add_argument(
        "--mtp-bits", type=int, help="Quantize the head's decoder layer to this many bits, and print what that costs."
    )
    parser.add_argument("--mtp-group-size", type=int, default=64, help="Group size for that (default: 64).")
    parser.add_argument("--graft-mtp-from", help="Add the MTP head of this original to --model, which has lost it.")
    parser.add_argument("--graft-revision", help="Branch, tag or commit of that original's Hugging Face repo.")
    parser.add_argument(
        "--skip-check",
        action="store_true",
        help="Do not run the model to check the grafted head, or to measure --mtp-bits.",
    )
    parser.add_argument(
        "--inspect",
        metavar="MODEL",
        help="Only say what a model is and whether --mtp can use its head. Weights are not downloaded.",
    )
    return parser


def main() -> None:
    parser = make_parser()
    args = vars(parser.parse_args())
    with one_line_errors(parser.prog):
        if (recipe := args.pop("recipe")) is not None:
            args = vars(parser.parse_args([*recipe_flags(recipe), *sys.argv[1:]]))  # the last of a flag wins
            del args["recipe"]
        if (name := args.pop("inspect")) is not None:
            print(inspect(name, args["revision"]))
            return
        if args["hf_path"] is None:
            raise ValueError("Say what to convert: --hf-path FOLDER_OR_REPO.")
        convert(**args)


if __name__ == "__main__":
    main()
