"""The page of papers shows what cells of the lessons print, and has every paper of its table."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
NOTEBOOKS = ROOT / "notebooks"
ROW = r"^\| (\d+) (.*)\[\d\d\]\(\.\./(notebooks/\w+\.ipynb)\), section (\d+) \|$"


@cache
def sections(notebook: str) -> dict[str, str]:
    """Code of each section with what it printed, in words with one space between them."""
    here, found = "", defaultdict(str)
    for cell in nbformat.read(ROOT / notebook, as_version=4).cells:
        if cell.cell_type == "markdown":
            here = (re.findall(r"^## (\d+)\.", cell.source, re.M) or [here])[-1]
        else:
            texts = [cell.source, *(output.get("text", "") for output in cell.outputs)]
            found[here] += " ".join(" ".join(texts).split()) + " "
    return found


def test_figures_of_the_table_are_those_that_lessons_print():
    rows = re.findall(ROW, PAGE, re.M)
    assert len(rows) == len(re.findall(r"^\| \d", PAGE, re.M)) > 20
    missing = [
        f"{paper} {text}: {where}, section {number}"
        for paper, said, where, number in rows
        for text in re.findall(r"`(.+?)`", said) or [""]
        if not text or text not in sections(where)[number]
    ]
    assert not missing


def test_figures_of_the_text_are_those_of_a_lesson_that_it_names():
    missing = []
    for part in re.findall(r"^- \*\*.*(?:\n  .*)*", PAGE, re.M):
        numbers = re.findall(r"(?:[Ll]essons?|and)\s+(\d\d)\b", part)
        named = "".join(" ".join(sections(str(path)).values()) for n in numbers for path in NOTEBOOKS.glob(f"{n}_*"))
        missing += [text for text in re.findall(r"`(.+?)`", " ".join(part.split())) if numbers and text not in named]
    assert not missing


def test_there_are_twenty_papers_with_four_parts_each():
    papers = re.findall(r"^### (\d+)\. ", PAGE, re.M)
    assert papers == [str(number) for number in range(1, 21)]
    for part in ("Claims", "In the course", "Leaves out", "In 20 minutes"):
        assert PAGE.count(f"- **{part}.**") == 20
