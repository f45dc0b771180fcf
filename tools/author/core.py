"""The core edition of a lesson: what remains without its sections marked *deeper*, for workshops."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

import nbformat
from nbformat import NotebookNode

from .minutes import MARK, names
from .notebooks import with_ids

DEEPER = "deeper"  # the tag of every cell of such a section
HEADING = re.compile(r"^(##+) (.*)$", re.MULTILINE)


def is_deeper(cell: NotebookNode) -> bool:
    """Whether a cell carries the tag that the core edition leaves out."""
    return DEEPER in cell.metadata.get("tags", [])


def core_faults(nb: NotebookNode) -> list[str]:
    """Say where headings and tags disagree about what is deeper, and which core cell needs a deeper one."""
    return [*_marks(nb), *_names(nb)]


def _marks(nb: NotebookNode) -> list[str]:
    found, section = [], "the opening"
    for number, cell in enumerate(nb.cells, 1):
        text = re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL) if cell.cell_type == "markdown" else ""
        for level, heading in HEADING.findall(text):
            marked = heading.endswith(MARK)
            if not marked and re.search(r"\bdeeper\W*$", heading):
                found.append(f"cell {number}: write {heading!r} with {MARK!r} at its end")
            elif marked and level != "##":
                found.append(f"cell {number}: {heading!r} is a part of a section; only sections (##) can be deeper")
            elif marked and not text.lstrip().startswith(f"## {heading}"):
                found.append(f"cell {number}: {heading!r} begins inside of the cell; begin a cell with it")
            if level == "##":
                section = heading
        if len({heading.endswith(MARK) for level, heading in HEADING.findall(text) if level == "##"}) > 1:
            found.append(f"cell {number} has headings of a deeper section and of another one")
        if is_deeper(cell) != section.endswith(MARK):
            tag, mark = ("is", "is not") if is_deeper(cell) else ("is not", "is")
            found.append(f"cell {number} {tag} tagged {DEEPER!r}, and its section {mark} marked so: {section}")
    return found


def _names(nb: NotebookNode) -> list[str]:
    found: list[str] = []
    made: dict[str, int] = {}  # a name, and the deeper cell that defined it last
    for number, cell in enumerate(nb.cells, 1):
        if cell.cell_type != "code":
            continue
        defined, used = names(re.sub(r"^[%!]", "#", cell.source, flags=re.MULTILINE))
        if is_deeper(cell):
            made |= dict.fromkeys(defined, number)
            continue
        taken = sorted(used & made.keys())
        found += [f"cell {number} takes `{name}` from cell {made[name]}, which is deeper" for name in taken]
        made = {name: at for name, at in made.items() if name not in defined}
    return found


def core_edition(nb: NotebookNode, name: str, whole: str) -> NotebookNode:
    """Return a lesson without its deeper cells; a line in their place names the sections that are left out.

    Links to these sections lead to the whole lesson.

    Parameters
    ----------
    nb : notebook
        As `from_text` and `dress` make it.
    name : str
        Of the lesson, such as ``16_multi_node``.
    whole : str
        Path of the whole lesson, as the core edition links to it.
    """
    nb = nbformat.from_dict(nb)
    cells: list[NotebookNode] = []
    left: list[tuple[NotebookNode, list[str]]] = []  # what stands in the place of deeper cells, and their headings
    for cell, before in zip(nb.cells, [None, *nb.cells], strict=False):
        if not is_deeper(cell):
            cells.append(cell)
            continue
        if before is None or not is_deeper(before):
            left.append((nbformat.v4.new_markdown_cell(), []))
            cells.append(left[-1][0])
        left[-1][1].extend(text.removesuffix(MARK) for level, text in HEADING.findall(cell.source) if level == "##")
    if not left:
        return nb
    lesson, all_left = f"[the whole lesson]({whole})", [text for _, headings in left for text in headings]
    for cell in cells:
        if cell.cell_type == "markdown":
            cell.source = _linked(cell.source, all_left, whole)
    for cell, headings in left:
        titles = "\n".join(f"- {text}" for text in headings)
        cell.source = f"*Left out of this edition, and in {lesson}:*\n\n{titles}"
    numbers = [found[1] for text in all_left if (found := re.match(r"(\d+)\. ", text))]
    which = f"Where the text names section {' or '.join(numbers)}, it" if len(numbers) < 3 else (
        f"Where the text names one of the sections {', '.join(numbers)}, it")
    cells[0].source += f"\n\n**This is the core edition of lesson {name[:2]}.** {which} means {lesson}."
    nb.cells = cells
    return with_ids(nb)


def _linked(text: str, headings: list[str], whole: str) -> str:
    """Let links to the headings lead to the whole lesson."""

    def target(link: re.Match) -> str:
        heading = unquote(link[1]).replace("-", " ").removesuffix(MARK)
        return f"]({whole}#{link[1]})" if heading in {text.replace("-", " ") for text in headings} else link[0]

    return re.sub(r"\]\(#([^)]*)\)", target, text)


def moved_links(nb: NotebookNode, source: Path, target: Path, beside: set[str]) -> NotebookNode:
    """Adapt links to files, in place, to a notebook that moves from the folder `source` to `target`.

    Notebooks of `source` named in `beside` move too.
    """

    def link(found: re.Match) -> str:
        if re.match(r"\w+:", found[1]):
            return found[0]
        path = (source / found[1]).resolve()
        together = path.parent == source.resolve() and path.stem in beside
        return f"]({path.name if together else Path(os.path.relpath(path, target.resolve())).as_posix()}{found[2]})"

    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\(([^)#\s]+)((?:#[^)]*)?)\)", link, cell.source)
    return nb
