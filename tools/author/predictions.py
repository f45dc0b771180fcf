"""The rule for predictions: nothing in view gives the answer away before the cell that shows it has run.

Below a cell whose text ends with **Predict** stand the cells that show the answer, without ``assert`` and
``expect_error`` (which may stand in a folded one), and then a text that begins with **Compare.**, which is folded.
"""

from __future__ import annotations

import re

from .notebooks import from_text

_ASKS = re.compile(r"(?:\A|\n\n|[.?!:)][)*_]*\s)\*\*Predict")
_GIVES_AWAY = re.compile(r"^\s*(?:assert\b|with expect_error\b|check\()", re.MULTILINE)


def in_view(text: str) -> list[str]:
    """Predictions of a lesson's text whose answer is in view, or which have none: each with what is wrong."""
    cells, found = from_text(text).cells, []
    for i, cell in enumerate(cells):
        asked = _ASKS.search(cell.source) if cell.cell_type == "markdown" else None
        if not asked:
            continue
        end = next((k for k in range(i + 1, len(cells)) if cells[k].cell_type == "markdown"), len(cells))
        shown = [c.source for c in cells[i + 1 : end] if not c.metadata.get("jupyter", {}).get("source_hidden")]
        question = " ".join(cell.source[asked.end() :].split())[:60]
        if "\n\n" in cell.source[asked.end() :].strip():
            found.append(f"{question}: text follows the question in its cell")
        elif not shown:
            found.append(f"{question}: no cell shows the answer")
        elif any(_GIVES_AWAY.search(code) for code in shown):
            found.append(f"{question}: assert or expect_error in view")
        elif end == len(cells) or not cells[end].source.startswith("**Compare.**"):
            found.append(f"{question}: the text below does not begin with **Compare.**")
    return found
