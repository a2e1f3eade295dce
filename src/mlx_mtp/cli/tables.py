"""Tables for the terminal."""

import shutil
from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns no wider than the terminal: the first left, the others right.

    Columns that do not fit come below, beside the first again. A row may end early.
    """
    columns = range(max(map(len, rows)))
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in columns]
    parts, used = [[0]], widths[0]
    for i in columns[1:]:
        used += 2 + widths[i]
        if used > shutil.get_terminal_size().columns and parts[-1] != [0]:
            parts.append([0])
            used = widths[0] + 2 + widths[i]
        parts[-1].append(i)
    lines = []
    for part in parts:
        lines += [""] * (part is not parts[0])
        for row in rows:
            cells = [f"{row[i]:>{widths[i]}}" for i in part[1:] if i < len(row)]
            lines.append("  ".join([f"{row[0]:<{widths[0]}}", *cells]).rstrip())
    return lines
