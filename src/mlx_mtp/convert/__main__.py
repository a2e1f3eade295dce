"""The command line of ``mlx_mtp convert``: mlx-lm's flags, those of heads and vision encoders, and recipes of flags."""

import argparse
import sys
from pathlib import Path
from shlex import quote

from mlx_lm.convert import configure_parser

from ..checkpoint.catalog import Published, published
from ..cli.display import one_line_errors
from ..cli.parser import extend, finish, parse
from ..errors import MTPError
from ..memory import size
from .conversion import convert
from .inspect import inspect

GROUPS = {
    "model": (
        "hf_path", "mlx_path", "recipe", "inspect", "revision", "adapter_path", "dtype", "trust_remote_code", "upload_repo",
    ),
    "head": ("mtp", "graft_mtp_from", "graft_revision", "skip_check"),
    "images": ("vision", "graft_vision_from"),
    "quantization": ("quantize", "q_bits", "q_group_size", "q_mode", "quant_predicate", "dequantize"),
}  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    description = "Convert a Hugging Face model to MLX format, with its MTP head."
    parser = extend(configure_parser(), "mlx_mtp convert", description)
    add = parser.add_argument
    # mlx-lm's flags, whose defaults depend on the mode
    add("--q-bits", type=int, metavar="BITS", help="Bits per weight for quantization (default: 4, and 8 for mxfp8).")
    group_size = "Group size for quantization (default: 64 for affine, 16 for nvfp4, 32 for others)."
    add("--q-group-size", type=int, metavar="N", help=group_size)
    recipe = "Convert the published model of this name to 4 bits; other flags take precedence."
    add("--recipe", metavar="NAME", help=recipe)
    add("--adapter-path", help="Fuse the trained adapter weights in this folder into the model.")
    add("--revision", help="Branch, tag or commit of the Hugging Face repo.")
    add("--no-mtp", dest="mtp", action="store_false", help="Convert without the MTP head.")
    add("--graft-mtp-from", help="Add the MTP head of this original to --model, a conversion without one.")
    add("--graft-vision-from", help="Add the vision encoder of this original to --model, a conversion without one.")
    add("--graft-revision", help="Branch, tag or commit of the base model's Hugging Face repo.")
    add("--no-vision", dest="vision", action="store_false", help="Convert without the vision encoder.")
    add("--skip-check", action="store_true", help="Do not run the model to check the grafted head.")
    inspected = "Describe a model and whether --mtp can use its head, without converting it or downloading weights."
    add("--inspect", metavar="MODEL", help=inspected)
    return finish(parser, GROUPS)


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
            raise MTPError("--hf-path is required: a folder or a Hugging Face repo.")
        convert(**args)
        target = Path(args["mlx_path"])
        n_bytes = sum(file.stat().st_size for file in target.iterdir())
        print(f"[INFO] Wrote {target}, {size(n_bytes)}")
        print(f"[INFO] Next: `mlx_mtp chat {'--mtp ' * args['mtp']}--model {quote(str(target))}`")


def recipes() -> dict[str, Published]:
    return {name: model for name, model in published().items() if name.endswith("-4bit")}


def recipe_flags(name: str) -> list[str]:
    if (model := recipes().get(name)) is None:
        raise MTPError(f"There is no recipe {name}: give one of {', '.join(recipes())}.")
    needs = f"{model.disk_gb} GB on disk and a machine with {model.memory_gb} GB of memory"
    print(f"[INFO] {name}: the result takes {needs}")
    folder = f"{model.original.rpartition('/')[2]}-4bit"
    return [f"--hf-path={model.original}", f"--mlx-path={folder}", "--quantize", "--q-bits=4"]


if __name__ == "__main__":
    main()
