"""Measure what the pages quote, and write docs/develop/measurements.md and its pictures.

    python -m scripts.measure                     each section whose kept output is not of today's demo and commands
    python -m scripts.measure --only batches fit  these sections
    python -m scripts.measure --only fit --again  even if its output is of today's demo and commands
    python -m scripts.measure --write             the page and the pictures, from the outputs that are kept

The output of a section is kept in docs/develop/measurements/NAME.txt, below the machine, date, commit, versions and commands.
An output of another demo checkpoint stays, and the page says so. After a new output, write its ``result`` in measurements.toml.
Close other programs first: all of it takes 35 minutes on two cores of an AMD EPYC.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx

from mlx_mtp import DEMO, __version__
from mlx_mtp.cli.display import one_line_errors
from scripts.draw_measurements import draw_all
from scripts.shared import script_parser

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "develop" / "measurements.md"
KEPT = ROOT / "docs" / "develop" / "measurements"
WORK = ROOT / "build" / "measure"  # what the commands write, emptied before each section


@dataclass(frozen=True)
class Section:
    """A row of the page: a table of measurements.toml, which says what its entries mean."""

    name: str
    title: str
    says: str
    minutes: float = 0
    commands: Sequence[str] = ()
    result: str = ""
    optional: bool = False
    requires: str | None = None
    prepare: str | None = None
    demo: bool = True
    statuses: Sequence[int] = (0,)

    @property
    def file(self) -> Path:
        return KEPT / f"{self.name}.txt"

    def is_of_demo(self, facts: Mapping[str, str]) -> bool:
        """Whether an output's figures are those of today's demo, or of any."""
        return not self.demo or facts["demo"] == demo_digest()

    def is_current(self) -> bool:
        """Whether the kept output is of today's demo and commands."""
        if not self.file.exists():
            return False
        facts, commands, _ = read_kept(self.file)
        return self.is_of_demo(facts) and commands == [*self.commands]


def read_sections() -> list[Section]:
    tables = tomllib.loads((ROOT / "scripts" / "measurements.toml").read_text(encoding="utf-8"))
    return [Section(name, **{**table, "says": " ".join(table["says"].split())}) for name, table in tables.items()]


def write_texts() -> None:
    """Write texts for ``fit``: the beginnings of the descriptions of installed packages, one half to change the backbone."""
    packages = sorted(importlib.metadata.distributions(), key=lambda d: d.name.lower())
    metadata = [package.metadata for package in packages if package.name != "mlx-mtp"]
    texts = [str(m.get_payload() or m["Description"] or "").strip()[:500] for m in metadata]
    texts = [text for text in texts if len(text) == 500]
    # mlx_lm.lora cuts off what is longer than its sequences.
    pieces = [text[i : i + 125] for text in texts[::2] for i in range(0, 500, 125)]
    data = WORK / "data"
    data.mkdir(parents=True)
    for name, part in {"train": pieces[4:], "valid": pieces[:4], "fit": texts[1::2]}.items():
        lines = [json.dumps({"text": text}) for text in part]
        (data / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


PREPARE = {f.__name__: f for f in (write_texts,)}


def demo_digest() -> str:
    return hashlib.sha256((DEMO / "model.safetensors").read_bytes()).hexdigest()[:12]


def header(commands: Sequence[str]) -> str:
    """What an output is of: one line for each fact."""
    chip, memory = mx.device_info()["device_name"], os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{os.cpu_count()} cores, {memory:.0f} GB, {platform.system()} {platform.release()}"
    mlx, mlx_lm = map(importlib.metadata.version, ("mlx", "mlx-lm"))
    facts = {
        "machine": f"{chip}, {system}, MLX on the {mx.default_device().type.name.upper()}",
        "date": date.today().isoformat(),
        "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip(),
        "versions": f"mlx {mlx}, mlx-lm {mlx_lm}, mlx-mtp {__version__}",
        "demo": demo_digest(),
    }
    return "\n".join([*(f"{key}: {value}" for key, value in facts.items()), *(f"command: {c}" for c in commands)])


def read_kept(file: Path) -> tuple[dict[str, str], list[str], str]:
    """(facts, commands, output) of a kept file."""
    head, _, output = file.read_text(encoding="utf-8").partition("\n\n")
    lines = [line.partition(": ") for line in head.splitlines()]
    facts = {key: value for key, _, value in lines if key != "command"}
    return facts, [value for key, _, value in lines if key == "command"], output


def measure(section: Section) -> None:
    """Run a section's commands and keep what they print; a ValueError where one of them fails."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    if section.prepare is not None:
        PREPARE[section.prepare]()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "COLUMNS": "160"}  # tables in one piece
    outputs: list[str] = []
    for command in section.commands:
        done = subprocess.run(command, shell=True, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        if done.returncode not in section.statuses:
            raise ValueError(f"{section.name}: exit status {done.returncode} of `{command}`.")
        if command.split()[0] == section.commands[-1].split()[0]:
            outputs.append(done.stdout.strip("\n"))
    output = join(outputs)
    KEPT.mkdir(exist_ok=True)
    section.file.write_text(f"{header(section.commands)}\n\n{output}\n", encoding="utf-8")


def join(outputs: Sequence[str]) -> str:
    """Outputs one below the other, with the head of their tables once."""
    lines: list[str] = []
    for output in outputs:
        new = output.splitlines()
        n_same = sum(a == b for a, b in zip(lines[:2], new[:2]))
        lines += new[n_same:]
    return "\n".join(lines)


def write_page() -> str:
    """The page, of the outputs that are kept."""
    head = "| measurement | result | date |\n| --- | --- | --- |"
    return "\n".join([INTRODUCTION, "", head, *(row(s) for s in read_sections() if s.file.exists())]) + "\n"


def row(section: Section) -> str:
    facts, _, _ = read_kept(section.file)
    machine, _, _ = facts["machine"].partition(", ")  # the rest is in the file
    other = "" if machine == USUAL else f"{machine}; "
    of = "" if section.is_of_demo(facts) else ", an earlier demo"
    title = f"[{section.title}](measurements/{section.file.name})"
    return f"| {title}: {section.says} | {section.result} | {other}{facts['date']}{of} |"


USUAL = "AMD EPYC"
INTRODUCTION = f"""# Measurements

The figures behind the other pages. Each file has its command, machine, versions and output. `scripts/measure.py` runs the
commands, keeps their output and writes this page. Figures of one small model on a CPU say nothing about your model on an Apple
GPU: [measure that](../speed.md), and [add it](../results.md).

Runs alternate in one process, and a ratio is taken in each round; the median is shown, with the lowest and the highest.
Unless a row says otherwise, speeds are relative to plain mlx-lm, the prompt is not counted, and the machine is an {USUAL} with
2 cores."""


def main() -> None:
    sections = [s for s in read_sections() if s.commands]
    names, again = [s.name for s in sections], (False, "Also what was measured with this demo and commands.")
    parser = script_parser(__doc__, again=again, write=(False, "Write from the kept outputs alone."))
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"Sections: {', '.join(names)}.")
    args = parser.parse_args()
    chosen = [s for s in sections if (s.name in args.only if args.only else not s.optional)]
    with one_line_errors("measure.py"):
        failed = [] if args.write else measure_all(chosen, args.again)
        PAGE.write_text(write_page(), encoding="utf-8")
        draw_all()
        if failed:
            raise ValueError(" ".join(failed))


def measure_all(sections: Sequence[Section], again: bool) -> list[str]:
    """Measure what is to be measured; a section that fails does not keep the others from it -> the errors"""
    errors = []
    for section in sections:
        if section.is_current() and not again:
            continue
        if section.requires is not None and find_spec(section.requires) is None:
            print(f"{section.name}: left out, since {section.requires} is not installed", flush=True)
            continue
        print(f"{section.name}: about {section.minutes:g} minutes", flush=True)
        start = time.perf_counter()
        try:
            measure(section)
        except ValueError as e:
            errors.append(str(e))
        print(f"{section.name}: {(time.perf_counter() - start) / 60:.1f} minutes", flush=True)
    return errors


if __name__ == "__main__":
    main()
