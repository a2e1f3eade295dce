"""The project's pages and their blocks of code."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "convert/*.md", "examples/*.md")
    for page in sorted(ROOT.glob(pattern))
    if page.name != "measurements.md"  # scripts/measure.py runs those
]
BLOCK = re.compile(r"^(?:<!-- (.*?) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A code block of a page; ``note`` is the comment above it."""

    page: Path
    line: int
    note: str
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.language in ("sh", "python") and not self.note.startswith(("not run: ", "test"))  # .ci/run tests


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, text[: m.start()].count("\n") + 1, m[1] or "", m[2], m[3]) for m in BLOCK.finditer(text)]
