"""Slides of a lesson by reveal.js, in one HTML file that needs no network, and the same text as a handout to print."""

from __future__ import annotations

import base64
import html
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbconvert.filters import Highlight2HTML, markdown2html, strip_ansi
from nbformat import NotebookNode
from tornado.template import Loader

from course_utils.doctor import chromium
from tools import ToolError
from tools.author.minutes import MARK
from tools.author.rooms import lesson_of

_DETAILS = re.compile(r"<details.*?</details>", re.DOTALL)
_BOX = re.compile(r'<div class="alert alert-block"[^>]*>\n\n(.*?)\n\n</div>', re.DOTALL)
_SENTENCE = re.compile(r"(.{40,}?[.?!:]\*{0,2})\s+(?=[A-Z`*(\[])", re.DOTALL)


def write(root: Path, lesson: str, folder: Path, core: bool = False, pdf: bool = False) -> list[Path]:
    """Write the slides of a lesson as it is stored, and with ``pdf`` a handout; returns the files."""
    name = lesson_of(lesson, root)
    nb = nbformat.read(root / "notebooks" / f"{name}.ipynb", as_version=4)
    found = importlib.util.find_spec("sphinx_revealjs")
    if not found or not found.submodule_search_locations:
        raise ToolError("slides need the packages of the site: python tools/setup.py --extra site")
    reveal = Path(found.submodule_search_locations[0]) / "_static" / "revealjs" / "dist"
    page = Loader(str(Path(__file__).parent / "pages"), autoescape=None).load("slides.html").generate(
        title=html.escape(name.replace("_", " ")), columns=columns(nb, root / "notebooks", core),
        style=(reveal / "reveal.css").read_text("utf-8"), script=(reveal / "reveal.js").read_text("utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    slides, handout = folder / f"{name}_slides.html", folder / f"{name}_handout.pdf"
    slides.write_bytes(page)
    if not pdf:
        return [slides]
    browser = chromium()
    if not browser:
        raise ToolError(f"wrote {slides}, but a handout needs Chromium or Chrome")
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        command += ["--no-pdf-header-footer", f"--print-to-pdf={handout.resolve()}"]
        subprocess.run([*command, f"{slides.resolve().as_uri()}?handout"], capture_output=True, timeout=300, check=True)
    return [slides, handout]


def columns(nb: NotebookNode, folder: Path, core: bool) -> list[list[tuple[str, str]]]:
    """A column of slides a section: its blocks in their order, each of a kind, and HTML."""
    made: list[list[tuple[str, str]]] = []
    for cell in nb.cells:
        if core and "deeper" in cell.metadata.get("tags", []):
            continue
        if cell.cell_type == "markdown":
            for part in re.split(r"^(?=##? )", cell.source, flags=re.MULTILINE):
                if part.startswith("#") or not made:
                    made.append([])
                made[-1] += _texts(part, folder)
        elif "parameters" not in cell.metadata.get("tags", []):
            made[-1] += _code(cell)
        elif len(made[-1][-1][1].split()) < 12:  # the words that lead to it
            del made[-1][-1]
    return [column for column in made if column]


def _texts(text: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Blocks of a markdown cell: what answers a prediction is unfolded, other folds are left out."""
    text = _DETAILS.sub(lambda fold: f"\n\n<<{_inside(fold[0])}>>\n\n" if ">Compare<" in fold[0] else "", text)
    for part in re.split(r"(<<.*?>>|<div class=\"alert.*?\n</div>)", text, flags=re.DOTALL):
        if part.startswith("<<"):
            yield "answer", _html(part[2:-2], folder)
        elif box := _BOX.match(part):
            yield "ask" if box[1].startswith("**Predict") else "box", _html(box[1], folder)
        else:
            for block in re.split(r"\n\s*\n(?![^`]*```\s*$)", part.strip()):
                if block.startswith("#"):
                    title, _, block = block.partition("\n")
                    yield "title", _html(title.removesuffix(MARK), folder)
                if block.strip():
                    yield "text", _html(_shortened(block), folder)


def _inside(fold: str) -> str:
    return re.sub(r"<details.*?</summary>|</details>", "", fold, flags=re.DOTALL).strip()


def _shortened(block: str) -> str:
    """A long paragraph with its rest after the first sentence marked: the handout has it, slides have not."""
    first = _SENTENCE.match(block) if re.match(r"[^|*#\-<$\d>!]", block) and len(block.split()) > 30 else None
    whole = first and all(first[1].count(mark) % 2 == 0 for mark in ("`", "*", "$")) and "[" not in first[1]
    return f"{first[1]} <span class=\"rest\">{block[first.end():]}</span>" if first and whole else block


def _html(text: str, folder: Path) -> str:
    from latex2mathml.converter import convert

    def formula(found: re.Match) -> str:
        return convert(found[1] or found[2], display="block" if found[1] else "inline")

    kept = re.split(r"(```.*?```|`[^`\n]+`)", text, flags=re.DOTALL)  # every second one is code
    text = "".join(part if i % 2 else re.sub(r"\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+)\$", formula, part, flags=re.DOTALL)
                   for i, part in enumerate(kept))
    made = re.sub(r'<a class="anchor-link".*?</a>', "", markdown2html(text))
    made = re.sub(r"<a [^>]*>(.*?)</a>", r"\1", made)  # links lead out of the slides

    def inlined(found: re.Match) -> str:
        file = folder / found[1]
        kind = "svg+xml" if file.suffix == ".svg" else file.suffix[1:]
        return f'src="data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"'

    return re.sub(r'src="(?!data:|https?:)([^"]+)"', inlined, made)


def _code(cell: NotebookNode) -> Iterator[tuple[str, str]]:
    """Blocks of a code cell: no folded code, and of a prediction only what it asks for."""
    asks, hidden = "= predict(" in cell.source, cell.metadata.get("jupyter", {}).get("source_hidden")
    if not hidden and not asks:
        yield "code", Highlight2HTML()(cell.source, metadata=None)
    for output in cell.get("outputs", []):
        data, text = output.get("data", {}), output.get("text", "")
        if "image/png" in data:
            words = html.escape(output.metadata.get("image/png", {}).get("alt", ""))
            yield "figure", f'<img alt="{words}" src="data:image/png;base64,{data["image/png"]}">'
        elif "text/html" in data:
            yield "out", "".join(data["text/html"])
        elif "text/markdown" not in data:
            words = strip_ansi("".join(text or data.get("text/plain", ""))).strip("\n")
            kind = "ask" if asks else "answer" if ".compare(" in cell.source else "out"
            yield kind, f"<pre>{html.escape(words)}</pre>"
