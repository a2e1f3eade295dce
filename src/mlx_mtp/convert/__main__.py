"""The command line of ``mlx_mtp convert``: mlx-lm's flags, and those of the head and the vision encoder."""

import argparse
import sys
from pathlib import Path
from shlex import quote

from mlx_lm.convert import configure_parser

from ..cli.errors import one_line_errors
from ..cli.parser import extend, finish, parse
from ..memory.needs import size
from .conversion import convert
from .inspect import inspect
from .quantization import MTP_GROUP_SIZE
from .recipe import recipe_flags

GROUPS = {
    "model": (
        "hf_path", "mlx_path", "recipe", "inspect", "revision", "adapter_path", "dtype", "trust_remote_code", "upload_repo",
    ),
    "head": ("mtp", "mtp_bits", "mtp_group_size", "graft_mtp_from", "graft_revision", "skip_check"),
    "images": ("vision", "graft_vision_from"),
    "quantization": ("quantize", "q_bits", "q_group_size", "q_mode", "quant_predicate", "dequantize"),
}  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """Add the flags of the head to mlx-lm's."""
    description = "Convert a Hugging Face model to MLX format, with its MTP head."
    parser = extend(configure_parser(), "mlx_mtp convert", description)
    _add_quantization(parser)
    parser.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        help="The name of a recipe, or a TOML file with these flags; flags on the command line take precedence.",
    )
    parser.add_argument("--adapter-path", help="Fuse the trained adapter weights in this folder into the model.")
    parser.add_argument("--revision", help="Branch, tag or commit of the Hugging Face repo.")
    parser.add_argument("--no-mtp", dest="mtp", action="store_false", help="Convert without the MTP head.")
    parser.add_argument(
        "--mtp-bits",
        type=int,
        metavar="BITS",
        help="Quantize the head's decoder layer to this many bits and print the effect on acceptance (default: not quantized).",
    )
    parser.add_argument(
        "--mtp-group-size",
        type=int,
        default=MTP_GROUP_SIZE,
        help=f"Group size for --mtp-bits (default: {MTP_GROUP_SIZE}).",
    )
    parser.add_argument(
        "--graft-mtp-from", help="Add the MTP head of this original to --model, a conversion without one."
    )
    parser.add_argument(
        "--graft-vision-from", help="Add the vision encoder of this original to --model, a conversion without one."
    )
    parser.add_argument("--graft-revision", help="Branch, tag or commit of the base model's Hugging Face repo.")
    parser.add_argument("--no-vision", dest="vision", action="store_false", help="Convert without the vision encoder.")
    parser.add_argument(
        "--skip-check",
        action="store_true",
        help="Do not run the model to check the grafted head, or to measure --mtp-bits.",
    )
    parser.add_argument(
        "--inspect",
        metavar="MODEL",
        help="Describe a model and whether --mtp can use its head, without converting it or downloading weights.",
    )
    return finish(parser, GROUPS)


def _add_quantization(parser: argparse.ArgumentParser) -> None:
    """mlx-lm's flags, whose defaults depend on the mode."""
    parser.add_argument(
        "--q-bits", type=int, metavar="BITS", help="Bits per weight for quantization (default: 4, and 8 for mxfp8)."
    )
    parser.add_argument(
        "--q-group-size",
        type=int,
        metavar="N",
        help="Group size for quantization (default: 64 for affine, 16 for nvfp4, 32 for others).",
    )


def main() -> None:
    parser = make_parser()
    with one_line_errors(parser.prog):
        args = vars(parse(parser))
        if (recipe := args.pop("recipe")) is not None:
            # The last occurrence of a flag counts.
            args = vars(parser.parse_args([*recipe_flags(recipe), *sys.argv[1:]]))
            del args["recipe"]
        if (name := args.pop("inspect")) is not None:
            print(inspect(name, args["revision"]))
            return
        if args["hf_path"] is None:
            raise ValueError("--hf-path is required: a folder or a Hugging Face repo.")
        convert(**args)
        target = Path(args["mlx_path"])
        n_bytes = sum(file.stat().st_size for file in target.iterdir())
        print(f"[INFO] Wrote {target}, {size(n_bytes)}")
        print(f"[INFO] Next: `mlx_mtp chat {'--mtp ' * args['mtp']}--model {quote(str(target))}`")


if __name__ == "__main__":
    main()
