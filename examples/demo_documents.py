"""The documents about small functions that the demo is trained on, beside the standard library.

``demo_functions/`` has short documented functions and classes. A document is one of them, or a module of several, with
the imports that it needs. Names of arguments and the first word of docstrings vary, so that the demo learns to use the
names that a prompt has given.
"""

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "demo_functions"
MODULES = 0.3  # of the documents
RENAMED = 0.5  # of the arguments that have other names here
OTHER_NAMES = {
    "path": ("filename", "file_path", "file"),
    "folder": ("directory", "root_folder"),
    "text": ("s", "string", "content"),
    "items": ("values", "sequence", "data"),
    "values": ("numbers", "data", "items"),
    "data": ("mapping", "d", "table"),
    "n": ("number", "count", "k"),
    "day": ("when", "d"),
    "a": ("first", "x", "left"),
    "b": ("second", "y", "right"),
    "seconds": ("duration", "secs"),
    "word": ("term", "pattern"),
    "amount": ("money", "total"),
}
OTHER_VERBS = {"Return ": ("Returns ", "Get ", "Return "), "Print ": ("Prints ",), "Write ": ("Writes ", "Save ")}


@dataclass(frozen=True)
class Definition:
    """A function or a class.

    Args:
        source (str): Its text.
        imports (Tuple[str, ...]): The import lines of its module that it needs.
    """

    source: str
    imports: tuple[str, ...]


@dataclass(frozen=True)
class Module:
    """A file of ``demo_functions/``: its docstring, and its definitions in order."""

    doc: str
    definitions: list[Definition]


def read_modules() -> list[Module]:
    return [_read_module(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.py"))]


def _read_module(text: str) -> Module:
    tree = ast.parse(text)
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    definitions = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            needed = [_line(i, used) for i in imports]
            source = ast.get_source_segment(text, node)
            definitions.append(Definition(source, tuple(line for line in needed if line)))
    return Module(f'"""{ast.get_docstring(tree)}"""\n\n', definitions)


def _line(node: ast.Import | ast.ImportFrom, used: set[str]) -> str:
    """The import of those of the names that are used; empty if none is."""
    names = ", ".join(alias.name for alias in node.names if alias.name in used)
    if not names:
        return ""
    return f"from {node.module} import {names}" if isinstance(node, ast.ImportFrom) else f"import {names}"


def documents(n: int, seed: int) -> Iterator[str]:
    """n documents; the same for the same seed."""
    rng = random.Random(seed)
    modules = read_modules()
    every = [d for module in modules for d in module.definitions]
    for _ in range(n):
        yield _module(rng, rng.choice(modules)) if rng.random() < MODULES else _alone(rng, rng.choice(every))


def _alone(rng: random.Random, definition: Definition) -> str:
    """One definition, half of the time with the imports that it needs."""
    imports = "\n".join(definition.imports)
    head = f"{imports}\n\n\n" if imports and rng.random() < 0.5 else ""
    return f"{head}{vary(rng, definition.source)}\n"


def _module(rng: random.Random, module: Module) -> str:
    """Some definitions of a module, in their order."""
    n = min(rng.randint(3, 8), len(module.definitions))
    chosen = [module.definitions[i] for i in sorted(rng.sample(range(len(module.definitions)), n))]
    imports = sorted({line for d in chosen for line in d.imports}, key=lambda line: (line.startswith("from"), line))
    head = "\n".join(imports) + "\n\n\n" if imports else "\n"
    return module.doc + head + "\n\n\n".join(vary(rng, d.source) for d in chosen) + "\n"


def vary(rng: random.Random, source: str) -> str:
    """A definition with other names for its arguments, and another first word of its docstring."""
    for verb, others in OTHER_VERBS.items():
        if f'"""{verb}' in source and rng.random() < 0.3:
            source = source.replace(f'"""{verb}', f'"""{rng.choice(others)}', 1)
    if 'f"' in source or source.startswith("class"):
        return source  # where a name stands in an f-string is known from Python 3.12 on
    for name in [arg.arg for arg in ast.parse(source).body[0].args.args]:
        if name in OTHER_NAMES and rng.random() < RENAMED:
            new = rng.choice(OTHER_NAMES[name])
            if not re.search(rf"\b{new}\b", source):
                source = rename(source, name, new)
    return source


def rename(source: str, name: str, new: str) -> str:
    """A function with another name for one of its variables."""
    lines = source.splitlines(keepends=True)
    places = []
    for node in ast.walk(ast.parse(source)):
        if (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.arg) and node.arg == name):
            places.append((node.lineno - 1, node.col_offset))
    for i, j in sorted(places, reverse=True):
        lines[i] = lines[i][:j] + new + lines[i][j + len(name) :]
    return "".join(lines)
