"""Build the course's site and its ePub with Sphinx, from the notebooks and files as they stand in the repository."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from unittest import mock
from urllib.parse import unquote

import nbformat
from nbformat import NotebookNode

from . import hosted
from .pages import BOXES, FOLD
from .rooms import lessons
from .site_states import show_states

#: What is folded, code and what it shows: the tag for it, and what the fold is called.
FOLDED = {(True, True): ("hide-cell", "the cell"), (True, False): ("hide-input", "the code"),
          (False, True): ("hide-output", "the output")}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sbatch": "bash"}


def settings(root: Path) -> dict[str, str]:
    """The addresses of the ``repository`` and of the ``site``, empty where there is none (``pyproject.toml``)."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["course"]


def build(root: Path, out: Path, epub: bool = True) -> int:
    """Write the site to ``out/html`` and the ePub to ``out/epub``; the exit status is not 0 after a warning."""
    from sphinx.cmd.build import build_main

    for folder in ("source", "html", "epub", "doctrees"):
        shutil.rmtree(out / folder, ignore_errors=True)
    prepare(root, out / "source")
    commit = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=root, capture_output=True, text=True).stdout
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit.strip() or "0")  # the date that the ePub states
    strict = ["-q", "-W", "--keep-going", "-d", str(out / "doctrees"), str(out / "source")]
    status = build_main(["-b", "html", *strict, str(out / "html")])
    if (addresses := settings(root))["repository"]:
        hosted.write(root, out / "html", **addresses)
    if epub:
        status = status or build_main(["-b", "epub", "-t", "epub", *strict, str(out / "epub")])
    for book in (out / "epub").glob("*.epub"):
        _undated(book)
    return status


def _undated(book: Path) -> None:
    """Write an ePub anew without the times of its files, so that the same course is the same book."""
    with zipfile.ZipFile(book) as old:
        parts = [(part, old.read(part)) for part in old.infolist()]
    with zipfile.ZipFile(book, "w") as new:
        for part, content in parts:
            part.date_time = (1980, 1, 1, 0, 0, 0)
            new.writestr(part, content)


def prepare(root: Path, source: Path) -> None:
    """Write what Sphinx reads to ``source``, with the paths of the repository; README.md becomes ``index.md``."""
    shutil.copytree(root / "docs" / "site", source)
    texts = [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "scripts/README.md")]
    programs = [path for path in (root / "scripts").iterdir() if path.suffix == ".py" or path.is_dir()]
    pages = {path: source / path.relative_to(root) for path in [*texts, *root.glob("docs/*.md")]}
    pages |= {path: source / "scripts" / f"{path.stem}.md" for path in programs} | {texts[0]: source / "index.md"}
    contents = {texts[0]: source / "contents.md", texts[3]: source / "scripts.md"}  # that go below a page
    for path, page in pages.items():
        text = _program(path) if path in programs else path.read_text(encoding="utf-8")
        page.parent.mkdir(exist_ok=True)
        page.write_text(_linked(text, root, source, path, pages), encoding="utf-8")
        if path in contents:
            with page.open("a", encoding="utf-8") as file:
                file.write("\n" + contents[path].read_text(encoding="utf-8").format("\n".join(
                    f"{name[:2]} · {name[3:].replace('_', ' ')} <notebooks/{name}>" for name in lessons(root))))
            contents[path].unlink()
    repository = settings(root)["repository"]
    for path in sorted(root.glob("*/[0-9][0-9]_*.ipynb")):
        nb = nbformat.read(path, as_version=4)
        _fold(nb)
        show_states(nb, root, source / "_states")
        for cell in nb.cells:
            if cell.cell_type == "markdown":
                cell.source = _linked(cell.source, root, source, path, pages)
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                if "image/png" in data:  # the words of a picture, where myst-nb looks for them
                    cell.metadata.setdefault("mystnb", {})["image"] = {"alt": output.metadata["image/png"]["alt"]}
                if "text/html" in data:  # a server of the notebook that ran is no more
                    data["text/html"] = re.sub(r'<a href="http://127[^>]*>(.*?)</a>', r"\1", data["text/html"])
        if repository and path.parent.name != "solutions":
            nb.cells[0].source += f"\n\n{hosted.badges(repository, str(path.relative_to(root)))}"
        (source / path.parent.name).mkdir(exist_ok=True)
        (source / path.relative_to(root)).write_text(nbformat.writes(nb), encoding="utf-8")


def _program(path: Path) -> str:
    """The page of a program, or of a folder of files: the flags, and the text."""
    text = [f"# {path.name}"]
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        code = file.read_text(encoding="utf-8")
        text += [] if file == path else [f"## {file.name}"]
        if "argparse" in code:
            text.append(f"## Flags\n\n```text\n{_help(file)}```\n\n## The program")
        text.append(f"[Download {file.name}]({file.relative_to(path.parent)})")
        text.append(f"`````{LANGUAGES.get(file.suffix, 'docker')}\n{code}`````")
    return "\n\n".join(text)


def _help(program: Path) -> str:
    """What a program prints when it is asked for its flags; asked in this process, where torch is imported once."""
    asked, beside = [str(program), "--help"], [str(program.parent), *sys.path]
    with mock.patch.multiple("sys", argv=asked, path=beside), mock.patch.dict(os.environ, COLUMNS="88"), \
            contextlib.redirect_stdout(io.StringIO()) as told, contextlib.suppress(SystemExit):
        runpy.run_path(str(program), run_name="__main__")
    return told.getvalue()


def _linked(text: str, root: Path, source: Path, path: Path, pages: dict[Path, Path]) -> str:
    """Lead links to pages of the site; other files of the repository are copied, and then Sphinx offers them."""

    def target(found: re.Match) -> str:
        name, _, part = found[2].partition("#")
        file = path.parent / name
        if re.match(r"\w+:", name):
            return found[0]
        if name and file.resolve() in pages and not found[1].startswith("[Download"):
            name = os.path.relpath(pages[file.resolve()], source / path.parent.relative_to(root))
        elif name and file.is_file() and file.suffix not in (".md", ".ipynb"):
            copy = source / file.resolve().relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        part = re.sub(r"[^\w-]", "", unquote(part).lower())  # Jupyter keeps dots and capitals in a heading's name
        return f"{found[1]}({name}{'#' * bool(part)}{part})"

    parts = re.split(r"(^ *`{3,}.*?^ *`{3,} *$)", text, flags=re.MULTILINE | re.DOTALL)  # every second one is code
    return "".join(part if i % 2 else re.sub(r"(\[[^\]]*\])\(([^()\s]+)\)", target, part)
                   for i, part in enumerate(parts))


def _fold(nb: NotebookNode) -> None:
    """Fold what answers a question, until its *Compare* has been read, and code that is folded in JupyterLab."""
    asked = False
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            question, answer = cell.source.rfind(BOXES["**Predict"]), cell.source.rfind(f"{FOLD}Compare")
            asked = question > answer if max(question, answer) >= 0 else asked
            continue
        answers = cell.outputs and (asked or ".compare(" in cell.source) and "= predict(" not in cell.source
        if kind := FOLDED.get((bool(cell.metadata.get("jupyter", {}).get("source_hidden")), bool(answers))):
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), kind[0]]
            cell.metadata["mystnb"] = {"code_prompt_show": f"Show {kind[1]}", "code_prompt_hide": f"Hide {kind[1]}"}
