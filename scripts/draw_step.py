"""Draw docs/pictures/step.svg: one step of draft, verify, accept and roll back.

python -m scripts.draw_step
"""

from html import escape
from pathlib import Path

FILE = Path(__file__).parents[1] / "docs" / "pictures" / "step.svg"
TEXT = ("with", " open", "(path", ")")  # what the caches hold before the step
DECIDED, DRAFTS = " as", (" f", ":", " return")
CHOICES = (" f", ":", "\\n", "")  # the model's own tokens after the decided one and each draft
N_ACCEPTED = 2

LEFT, TOP, W, H, ROW = 110, 30, 74, 30, 66  # of the first box, in pixels; the distance of two rows
COLORS = {
    "cached": ("#f3f4f6", "#9ca3af"),
    "decided": ("#dbeafe", "#2563eb"),
    "draft": ("#fef3c7", "#d97706"),
    "accepted": ("#dcfce7", "#16a34a"),
    "rejected": ("#fee2e2", "#dc2626"),
}


def box(column: int, row: int, text: str, kind: str, struck: bool = False) -> str:
    fill, line = COLORS[kind]
    x, y = LEFT + column * (W + 8), TOP + row * ROW
    decoration = ' text-decoration="line-through"' if struck else ""
    return (
        f'<rect x="{x}" y="{y}" width="{W}" height="{H}" rx="5" fill="{fill}" stroke="{line}"/>'
        f'<text x="{x + W / 2}" y="{y + 20}" text-anchor="middle" class="token"{decoration}>{escape(text.strip())}</text>'
    )


def label(row: int, title: str, words: str) -> str:
    y = TOP + row * ROW
    return (
        f'<text x="10" y="{y + 20}" class="title">{title}</text>'
        f'<text x="{LEFT}" y="{y + H + 16}" class="words">{escape(words)}</text>'
    )


def cached(row: int) -> list[str]:
    return [box(i, row, token, "cached") for i, token in enumerate(TEXT)]


def draw() -> str:
    n = len(TEXT)
    window = [box(n, 1, DECIDED, "decided"), *(box(n + 1 + i, 1, d, "draft") for i, d in enumerate(DRAFTS))]
    parts = [
        label(0, "draft", "The head guesses the tokens after the last one, one after the other: cheap."),
        *cached(0),
        box(n, 0, DECIDED, "decided"),
        *(box(n + 1 + i, 0, d, "draft") for i, d in enumerate(DRAFTS)),
        label(1, "verify", "One pass of the model over all of them gives its own next token after each."),
        *cached(1),
        *window,
        label(
            2, "accept", "Drafts count up to the first that is not the model's own token, which then takes its place."
        ),
    ]
    for i, (draft, choice) in enumerate(zip(DRAFTS, CHOICES)):
        kind = "accepted" if i < N_ACCEPTED else "rejected"
        parts.append(box(n + 1 + i, 2, draft if i < N_ACCEPTED else choice, "accepted"))
        parts.append(mark(n + 1 + i, kind))
    kept = [DECIDED, *DRAFTS[:N_ACCEPTED]]
    parts += [
        label(
            3, "roll back", "Caches and states keep the accepted tokens: as if the rejected draft had never been read."
        ),
        *cached(3),
        *(box(n + i, 3, token, "cached") for i, token in enumerate(kept)),
        box(n + len(kept), 3, CHOICES[N_ACCEPTED], "decided"),
    ]
    width, height = LEFT + (n + 4) * (W + 8) + 10, TOP + 4 * ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        "<style>.token{font:13px ui-monospace,monospace}.title{font:bold 14px system-ui,sans-serif}"
        ".words{font:12px system-ui,sans-serif;fill:#4b5563}.back{fill:#ffffff}"
        "@media (prefers-color-scheme:dark){.back{fill:#0d1117}.title{fill:#e6edf3}.words{fill:#9ca3af}}</style>"
        f'<rect class="back" width="{width}" height="{height}"/>' + "\n".join(parts) + "</svg>\n"
    )


def mark(column: int, kind: str) -> str:
    """A check mark, or a cross, between a draft and what became of it."""
    x, y = LEFT + column * (W + 8) + W - 12, TOP + 2 * ROW - 2
    sign = "✓" if kind == "accepted" else "✗"
    return f'<text x="{x}" y="{y}" fill="{COLORS[kind][1]}" font-size="16">{sign}</text>'


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
    print(f"written: {FILE}")
