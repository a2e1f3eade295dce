"""Recipes: a model to convert, flags, and the needs of the result. A recipe has a name, or is a file of the user."""

import tomllib
from pathlib import Path
from typing import Any

from ..checkpoint.catalog import published

Recipe = dict[str, dict[str, Any]]
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


def named_recipes() -> dict[str, Recipe]:
    """A recipe for each published model of 4 bits, in the format of a file. Packs are not converted."""
    recipes: dict[str, Recipe] = {}
    for name, model in published().items():
        if not name.endswith("-4bit"):
            continue
        folder = f"{model.original.rpartition('/')[2]}-4bit"
        convert: dict[str, Any] = {"hf-path": model.original, "mlx-path": folder, "quantize": True, "q-bits": 4}
        needs: dict[str, Any] = {"disk-gb": model.disk_gb, "memory-gb": model.memory_gb}
        recipes[name] = {"convert": convert, "needs": needs}
    return recipes


def read_recipe(recipe: str | Path) -> Recipe:
    """Read a recipe, and check its keys and types.

    Args:
        recipe (Union[str, Path]): The name of a recipe, or a TOML file. A file takes precedence.

    Returns:
        Dict[str, Dict[str, Any]]: Under ``convert`` the flags of ``mlx_mtp convert`` without their dashes; under ``needs``
        the size of the weights to be written, in GB of 10^9 bytes, and the memory of the smallest Mac to run them, in GB.

    Raises:
        FileNotFoundError: There is no such file or recipe.
        ValueError: The file is not TOML, or a table or key is unknown, missing or of the wrong type.
    """
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
