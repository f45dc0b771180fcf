"""Tables of the clinic as plain text and as HTML (private)."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence

__all__ = ["Table", "html_table", "text_table"]

_WIDTH = 100  # characters of a cell in text, after which it goes on in the next line


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int = _WIDTH) -> str:
    """A table in columns; a cell that is too long takes several lines."""
    wrapped = [[line for part in cell.split("\n") for line in textwrap.wrap(part, width) or [""]]
               for row in rows for cell in row]
    cells = [wrapped[start : start + len(head)] for start in range(0, len(wrapped), len(head))]
    widths = [max([len(name), *(len(line) for row in cells for line in row[place])]) for place, name in enumerate(head)]
    lines = ["  ".join(name.ljust(size) for name, size in zip(head, widths, strict=True)).rstrip()]
    for row in cells:
        for number in range(max(map(len, row))):
            parts = [cell[number] if number < len(cell) else "" for cell in row]
            lines.append("  ".join(part.ljust(size) for part, size in zip(parts, widths, strict=True)).rstrip())
    return "\n".join(lines)


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same for a notebook."""
    def row_of(cells: Sequence[str], tag: str) -> str:
        style = ' style="text-align: left; vertical-align: top"'
        return "<tr>" + "".join(f"<{tag}{style}>{_lines(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row_of(row, "td") for row in rows)
    return f"<table><thead>{row_of(head, 'th')}</thead><tbody>{body}</tbody></table>"


def _lines(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")


class Table:
    """Something to show as a table.

    Attributes
    ----------
    head : list of str
        Names of the columns.
    rows : list of list of str
        The cells.
    """

    def __init__(self, head: Sequence[str], rows: Sequence[Sequence[str]]):
        self.head, self.rows = list(head), [list(row) for row in rows]

    def __repr__(self) -> str:
        return text_table(self.head, self.rows)

    def _repr_html_(self) -> str:
        return html_table(self.head, self.rows)
