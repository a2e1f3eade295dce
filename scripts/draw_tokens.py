"""Draw docs/pictures/tokens.svg: a text of the bundled demo, each token coloured by its source.

python -m scripts.draw_tokens
"""

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from mlx_mtp import DEMO, load, stream_generate

FILE = Path(__file__).parents[1] / "docs" / "pictures" / "tokens.svg"
PROMPT = '''class Queue:
    def __init__(self):
        self.items = []


class Stack:
    """A stack of items."""

'''
OPTIONS = {"max_tokens": 47, "num_draft_tokens": 3, "copy_drafts": 4}  # fixed numbers, so that each run draws the same

CHAR, LINE, MARGIN = 8.4, 20, 16  # of the font, and around the text, in pixels
SOURCES = {"model": "the model", "head": "drafted by the MTP head", "copies": "copied from the text"}
STYLE = """
.back{fill:#ffffff}text{font:14px ui-monospace,Menlo,monospace;white-space:pre}
.prompt{fill:#8b949e}.model{fill:#1f2328}.head{fill:#1a7f37}.copies{fill:#9a6700}
rect.head{fill:#dafbe1}rect.copies{fill:#fff1c2}rect.model{fill:#eaeef2}
@media (prefers-color-scheme:dark){.back{fill:#0d1117}.model{fill:#e6edf3}.head{fill:#56d364}.copies{fill:#e3b341}
rect.head{fill:#12351f}rect.copies{fill:#3b2e0a}rect.model{fill:#21262d}}
"""


def generate() -> list[tuple[str, str]]:
    """(text, source) of each token that the demo generates."""
    model, tokenizer = load(str(DEMO), settings=False)
    responses = stream_generate(model, tokenizer, PROMPT, **OPTIONS)
    # r.text loses the space that a text begins with.
    return [(tokenizer.decode([r.token]), r.source) for r in responses]


def pieces(tokens: Iterable[tuple[str, str]]) -> Iterator[tuple[int, int, str, str]]:
    """(line, column, text, source) of the parts of tokens that are on one line."""
    line = column = 0
    for text, source in tokens:
        for i, part in enumerate(text.split("\n")):
            if i > 0:
                line, column = line + 1, 0
            if part:
                yield line, column, part, source
            column += len(part)


def draw(tokens: list[tuple[str, str]]) -> str:
    """The prompt in grey and the tokens that ``generate`` returns in the colours of their sources, as SVG."""
    placed = list(pieces([(PROMPT, "prompt"), *tokens]))
    n_lines = placed[-1][0] + 1
    width, height = 640, 2 * MARGIN + LINE * (n_lines + 2)
    size, box_of_all = f'width="{width}" height="{height}"', f'viewBox="0 0 {width} {height}"'
    title = f"<title>Generated tokens by source</title><style>{STYLE}</style>"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {box_of_all} {size} role="img">{title}']
    parts.append(f'<rect class="back" {size}/>')
    for line, column, text, source in placed:
        if text.strip():
            parts.append(box(MARGIN + CHAR * column, MARGIN + LINE * line, text, source))
    x, counts = float(MARGIN), {name: sum(source == name for _, source in tokens) for name in SOURCES}
    for name, words in SOURCES.items():
        words = f"{words}: {counts[name]}"
        parts.append(box(x, MARGIN + LINE * (n_lines + 1), words, name))
        x += CHAR * (len(words) + 2)
    return "\n".join(parts) + "\n</svg>\n"


def box(x: float, y: float, text: str, source: str) -> str:
    """A text without the white space around it, on a background of its source."""
    bare = text.strip()
    x += CHAR * (len(text) - len(text.lstrip()))
    back = f'<rect class="{source}" x="{x:.1f}" y="{y}" width="{CHAR * len(bare) - 1:.1f}" height="{LINE - 2}" rx="3"/>'
    words = f'<text class="{source}" x="{x:.1f}" y="{y + 14}" textLength="{CHAR * len(bare):.1f}">{escape(bare)}</text>'
    return words if source == "prompt" else back + words


if __name__ == "__main__":
    FILE.write_text(draw(generate()), encoding="utf-8")
    print(f"written: {FILE}")
