"""What the build adds to the text of a notebook: its number, boxes, links to its neighbours, words for pictures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import nbformat
from nbformat import NotebookNode

#: How a paragraph that starts so is framed: line and colour. Text keeps its own colour, which the classes alert-info
#: and so on make too pale to read, above all in JupyterLab's dark theme.
BOXES = {
    "**Predict": "border-left: 6px solid #0072B2; background-color: rgba(0, 114, 178, 0.1)",
    "> **Misconception": "border: 2px dashed #D55E00; background-color: rgba(213, 94, 0, 0.1)",
    "> **What changes on real": "border-left: 8px double #009E73; background-color: rgba(0, 158, 115, 0.1)",
}
BOX = '<div class="alert alert-block" style="{}; padding: 10px 14px 1px">\n\n{}\n\n</div>'
FOLD = '<details style="margin-bottom: 1em"><summary style="cursor: pointer">'
PREDICTION = re.compile(r"(?:\A|[.?!:)][)*_]*\s)(?=\*\*Predict)")


def dress(nb: NotebookNode, folder: str, name: str, lessons: Sequence[str], exercises: Sequence[str]) -> NotebookNode:
    """Number, frame and link a notebook in place.

    Parameters
    ----------
    folder : {"notebooks", "exercises", "solutions"}
        Where the notebook goes.
    name : str
        Its lesson, such as ``01_gpu_interconnects``.
    lessons, exercises : sequence of str
        Names of all lessons, in order, and of those that have exercises.
    """
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = boxed(_spaced(cell.source))
    if not nb.cells or not nb.cells[0].source.startswith("# "):
        return nb
    heading = {"notebooks": "", "exercises": "Exercises ", "solutions": "Solutions "}[folder] + name[:2]
    nb.cells[0].source = re.sub(r"\A# (?:\w+ \d\d · )?", f"# {heading} · ", nb.cells[0].source)
    links = _links(name, lessons)
    if folder == "notebooks":
        if name in exercises:
            _link_to_exercises(nb, links["exercises"])
        return nb
    if folder == "solutions":
        _introduce_solutions(nb, links)
    other = links["solutions" if folder == "exercises" else "exercises"]
    after = f", and the next lesson is {links['next']}" if "next" in links else ""
    nb.cells.append(
        nbformat.v4.new_markdown_cell(f"---\n**Where to go from here:** {other}, back to {links['lesson']}{after}.")
    )
    return nb


def _links(name: str, lessons: Sequence[str]) -> dict[str, str]:
    """Return links to the lesson, its exercises and solutions, and the next lesson where there is one."""

    def lesson(name: str) -> str:
        return f"[{name.replace('_', ' ')}](../notebooks/{name}.ipynb)"

    links = {
        "lesson": f"lesson {lesson(name)}",
        "exercises": f"[the exercises](../exercises/{name}_exercises.ipynb)",
        "solutions": f"[the solutions](../solutions/{name}_solutions.ipynb)",
    }
    following = [other for other in lessons if other > name]
    return links | {"next": lesson(following[0])} if following else links


def _link_to_exercises(nb: NotebookNode, link: str) -> None:
    """Add the link to the paragraph that says what comes before the lesson, or else below the title."""
    sentence = f"**Afterwards:** {link}."
    if not _reworded(nb, r"\*\*(Before this|Prerequisites?)", lambda block: f"{block} {sentence}"):
        nb.cells[0].source += f"\n\n{sentence}"


def _introduce_solutions(nb: NotebookNode, links: dict[str, str]) -> None:
    """Put what a reader of solutions should know in the place of how to work, or else below the title's cell."""
    words = (
        "**These are the solutions.** Every answer is filled in and has passed its check. Write your own in "
        f"{links['exercises']} first; they follow {links['lesson']}."
    )
    if not _reworded(nb, r"\*\*How to work\.\*\*", lambda _: words):
        nb.cells.insert(1, nbformat.v4.new_markdown_cell(words))


def _reworded(nb: NotebookNode, start: str, change: Callable[[str], str]) -> bool:
    """Change the first paragraph of the opening that starts so; return whether there is one."""
    for cell in nb.cells[:4]:
        blocks = list(_blocks(cell.source)) if cell.cell_type == "markdown" else []
        for at, block in enumerate(blocks):
            if re.match(start, block):
                cell.source = "\n\n".join([*blocks[:at], change(block), *blocks[at + 1 :]])
                return True
    return False


def boxed(text: str) -> str:
    """Frame predictions, misconceptions and what changes on real machines, and fold what a prediction is compared with.

    Words before a prediction stay outside; a caption below *Compare* goes into the fold.
    """
    blocks = [*_blocks(text)]
    if blocks and blocks[0].startswith("**Compare.**"):
        inside = 1 + (len(blocks) > 1 and blocks[1].startswith("*The "))
        answer = "\n\n".join(blocks[:inside]).removeprefix("**Compare.**").lstrip()
        blocks[:inside] = [f"{FOLD}Compare</summary>\n\n{answer}\n\n</details>"]
    return "\n\n".join(framed for block in blocks for framed in _framed(block))


def _framed(block: str) -> Iterator[str]:
    if block.startswith(">"):
        style = next((style for start, style in BOXES.items() if block.startswith(start)), None)
        yield BOX.format(style, re.sub(r"^> ?", "", block, flags=re.MULTILINE)) if style else block
        return
    found = None if re.match(r"[|<#]|```|~~~|\$\$|[-*+] |\d+\. ", block) else PREDICTION.search(block)
    if not found:
        yield block
        return
    if before := block[: found.end()].rstrip():
        yield before
    yield BOX.format(BOXES["**Predict"], block[found.end() :])


def _blocks(text: str) -> Iterator[str]:
    """Split text at its blank lines, but not inside fenced code or fold-aways."""
    held: list[str] = []
    fence, depth = "", 0
    for line in [*text.split("\n"), ""]:
        if fence:
            fence = "" if line.strip() == fence else fence
        elif found := re.match(r"\s*(```+|~~~+)", line):
            fence = found[1]
        depth += 0 if fence else line.count("<details") - line.count("</details>")
        if line.strip() or fence or depth > 0:
            held.append(line)
        elif held:
            yield "\n".join(held)
            held = []
    if held:
        yield "\n".join(held)


def _spaced(text: str) -> str:
    """Set each fold-away apart from what follows, and show on it the pointer of what can be clicked."""
    text = re.sub(r"</details>[ \t]*\n(?!\n)", "</details>\n\n", text)
    return re.sub(r"<details>\s*<summary>", FOLD, text)


def alternative_text(following: NotebookNode | None) -> str:
    """Return, in plain words, what the text below a picture says about it: its caption, or else its first paragraph."""
    if following is None or following.cell_type != "markdown" or not following.source.strip():
        return ""
    blocks = [*_blocks(following.source.replace("**", ""))]
    captions = (re.search(r"(?:\A|\n\n)\*(The .*?\S)\*(?=\s|$)", block, re.DOTALL) for block in blocks)
    text = next((caption[1] for caption in captions if caption), re.sub(r"<summary.*?</summary>", "", blocks[0]))
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"[`$]|<[^>]*>|(?<!\w)[*_]|[*_](?!\w)", "", text).split())
