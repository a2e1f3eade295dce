"""The colors of ``--show-drafts``: where each token of a text came from."""

import sys

# Green, yellow and blue; the model's own tokens have the terminal's color, and a prompt is dim.
CODES = {"head": 32, "copies": 33, "grammar": 34, "prompt": 2}


def paint(text: str, source: str) -> str:
    """A text in its source's color, or as it is where stdout is no terminal."""
    if source not in CODES or not text or not sys.stdout.isatty():
        return text
    return f"\033[{CODES[source]}m{text}\033[0m"
