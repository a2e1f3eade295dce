"""Recipes: TOML files that say what to convert and how, and what the outcome needs."""

import tomllib
from pathlib import Path
from typing import Any

CONVERT = {
    "hf-path": str,
    "mlx-path": str,
    "quantize": bool,
    "q-bits": int,
    "q-group-size": int,
    "q-mode": str,
    "quant-predicate": str,
    "dtype": str,
}
NEEDS = {"disk-gb": float, "memory-gb": int}


def read_recipe(file: str | Path) -> dict[str, dict[str, Any]]:
    """Read a recipe and check its keys and the types of their values.

    Returns:
        Dict[str, Dict[str, Any]]: Under ``convert`` the flags of ``mlx_mtp.convert`` without their dashes; under ``needs``
        the size of the weights to be written, in GB of 10^9 bytes, and the memory of the smallest Mac to run them, in GB.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not TOML, or a table or key is unknown, missing or of the wrong type.
    """
    try:
        recipe = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as e:  # text that is not UTF-8, too
        raise ValueError(f"{file} is not TOML: {e}") from e
    if recipe.keys() != {"convert", "needs"} or not all(isinstance(table, dict) for table in recipe.values()):
        raise ValueError(f"{file} is not a recipe: it must have the tables [convert] and [needs], and nothing else.")
    for table, key in (("convert", "hf-path"), *(("needs", key) for key in NEEDS)):
        if key not in recipe[table]:
            raise ValueError(f"{file} lacks {key} in [{table}].")
    for table, known in (("convert", CONVERT), ("needs", NEEDS)):
        for key, value in recipe[table].items():
            if key not in known:
                raise ValueError(f"{file} has an unknown key {key} in [{table}]; known are {', '.join(known)}.")
            if type(value) is not known[key]:
                raise ValueError(f"{file} has {value!r} for {key}, which is not of type {known[key].__name__}.")
    return recipe


def recipe_flags(file: str | Path) -> list[str]:
    """The command line that a recipe stands for. What it needs is printed."""
    recipe = read_recipe(file)
    disk, memory = (recipe["needs"][key] for key in NEEDS)
    print(f"[INFO] By {file}, the outcome takes {disk} GB on disk and a machine with {memory} GB of memory")
    flags = []
    for key, value in recipe["convert"].items():
        if value is True:
            flags.append(f"--{key}")
        elif value is not False:
            flags.append(f"--{key}={value}")
    return flags
