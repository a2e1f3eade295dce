"""The command line of ``mlx_mtp convert``: mlx-lm's flags, those of the head and the vision encoder, and recipes.

A recipe is a model to convert, flags, and the needs of the result. It has a name, or is a file of the user.
"""

import argparse
import sys
import tomllib
from pathlib import Path
from shlex import quote
from typing import Any

from mlx_lm.convert import configure_parser

from ..checkpoint.catalog import published
from ..cli.display import one_line_errors
from ..cli.parser import extend, finish, parse
from ..memory import size
from .conversion import MTP_GROUP_SIZE, convert
from .inspect import inspect

GROUPS = {
    "model": (
        "hf_path", "mlx_path", "recipe", "inspect", "revision", "adapter_path", "dtype", "trust_remote_code", "upload_repo",
    ),
    "head": ("mtp", "mtp_bits", "mtp_group_size", "graft_mtp_from", "graft_revision", "skip_check"),
    "images": ("vision", "graft_vision_from"),
    "quantization": ("quantize", "q_bits", "q_group_size", "q_mode", "quant_predicate", "dequantize"),
}  # fmt: skip
Recipe = dict[str, dict[str, Any]]
CONVERT: dict[str, type] = dict.fromkeys(("hf-path", "mlx-path", "q-mode", "quant-predicate", "dtype"), str)
CONVERT |= {"quantize": bool, "q-bits": int, "q-group-size": int}
NEEDS = {"disk-gb": float, "memory-gb": int}


def make_parser() -> argparse.ArgumentParser:
    """Add the flags of the head to mlx-lm's."""
    description = "Convert a Hugging Face model to MLX format, with its MTP head."
    parser = extend(configure_parser(), "mlx_mtp convert", description)
    add = parser.add_argument
    # mlx-lm's flags, whose defaults depend on the mode
    add("--q-bits", type=int, metavar="BITS", help="Bits per weight for quantization (default: 4, and 8 for mxfp8).")
    group_size = "Group size for quantization (default: 64 for affine, 16 for nvfp4, 32 for others)."
    add("--q-group-size", type=int, metavar="N", help=group_size)
    add(
        "--recipe",
        metavar="NAME|FILE",
        help="The name of a recipe, or a TOML file with these flags; flags on the command line take precedence.",
    )
    add("--adapter-path", help="Fuse the trained adapter weights in this folder into the model.")
    add("--revision", help="Branch, tag or commit of the Hugging Face repo.")
    add("--no-mtp", dest="mtp", action="store_false", help="Convert without the MTP head.")
    add(
        "--mtp-bits",
        type=int,
        metavar="BITS",
        help="Quantize the head's decoder layer to this many bits and print the effect on acceptance (default: not quantized).",
    )
    group_size = f"Group size for --mtp-bits (default: {MTP_GROUP_SIZE})."
    add("--mtp-group-size", type=int, default=MTP_GROUP_SIZE, help=group_size)
    add("--graft-mtp-from", help="Add the MTP head of this original to --model, a conversion without one.")
    add("--graft-vision-from", help="Add the vision encoder of this original to --model, a conversion without one.")
    add("--graft-revision", help="Branch, tag or commit of the base model's Hugging Face repo.")
    add("--no-vision", dest="vision", action="store_false", help="Convert without the vision encoder.")
    skip_check = "Do not run the model to check the grafted head, or to measure --mtp-bits."
    add("--skip-check", action="store_true", help=skip_check)
    add(
        "--inspect",
        metavar="MODEL",
        help="Describe a model and whether --mtp can use its head, without converting it or downloading weights.",
    )
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
            raise ValueError("--hf-path is required: a folder or a Hugging Face repo.")
        convert(**args)
        target = Path(args["mlx_path"])
        n_bytes = sum(file.stat().st_size for file in target.iterdir())
        print(f"[INFO] Wrote {target}, {size(n_bytes)}")
        print(f"[INFO] Next: `mlx_mtp chat {'--mtp ' * args['mtp']}--model {quote(str(target))}`")


# Recipes


def named_recipes() -> dict[str, Recipe]:
    """A recipe for each published model of 4 bits, in the format of a file. Packs are not converted."""
    recipes: dict[str, Recipe] = {}
    for name, model in published().items():
        if not name.endswith("-4bit"):
            continue
        folder = f"{model.original.rpartition('/')[2]}-4bit"
        recipes[name] = {
            "convert": {"hf-path": model.original, "mlx-path": folder, "quantize": True, "q-bits": 4},
            "needs": {"disk-gb": model.disk_gb, "memory-gb": model.memory_gb},
        }
    return recipes


def read_recipe(recipe: str | Path) -> Recipe:
    """Read a recipe, a TOML file or the name of one, and check its keys and types: ``convert`` has flags without their dashes,
    ``needs`` the GB of the weights to be written and of the smallest Mac to run them."""
    file = Path(recipe)
    if not file.is_file():
        recipes = named_recipes()
        if str(recipe) not in recipes:
            raise FileNotFoundError(f"There is no recipe {recipe}: give a TOML file, or one of {', '.join(recipes)}.")
        return recipes[str(recipe)]
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:  # also raised for text that is not UTF-8
        raise ValueError(f"{file} is not TOML: {e}") from e
    _check(file, tables)
    return tables


def _check(file: Path, tables: dict[str, Any]) -> None:
    if tables.keys() != {"convert", "needs"} or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError(f"{file} is not a recipe: it must have the tables [convert] and [needs], and nothing else.")
    for table, key in (("convert", "hf-path"), *(("needs", key) for key in NEEDS)):
        if key not in tables[table]:
            raise ValueError(f"{file} lacks {key} in [{table}].")
    for table, known in (("convert", CONVERT), ("needs", NEEDS)):
        for key, value in tables[table].items():
            if key not in known:
                raise ValueError(f"{file} has an unknown key {key} in [{table}]; known are {', '.join(known)}.")
            if type(value) is not known[key]:
                raise ValueError(f"{file} has {value!r} for {key}, which is not of type {known[key].__name__}.")


def recipe_flags(recipe: str | Path) -> list[str]:
    """Turn a recipe into a command line. Prints the needs of the result."""
    tables = read_recipe(recipe)
    disk, memory = (tables["needs"][key] for key in NEEDS)
    print(f"[INFO] {recipe}: the result takes {disk} GB on disk and a machine with {memory} GB of memory")
    flags = []
    for key, value in tables["convert"].items():
        if value is True:
            flags.append(f"--{key}")
        elif value is not False:
            flags.append(f"--{key}={value}")
    return flags


if __name__ == "__main__":
    main()
