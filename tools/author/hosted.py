"""Copies of the notebooks for Colab and Kaggle, whose first cell gets the course, and the badges that open them.

In the notebooks themselves a cell more would shift the numbers of all stored outputs. The copies have no outputs, so no
answer is in view. They lie beside the site, on the branch that publishes it: nobody has to commit or compare them.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

from .builder import targets
from .notebooks import with_ids

BADGES = {
    "Open in Colab": "https://colab.research.google.com/github/{name}/blob/gh-pages/hosted/{path}",
    "Kaggle": "https://kaggle.com/kernels/welcome?src=https://github.com/{name}/blob/gh-pages/hosted/{path}",
    "Binder": "https://mybinder.org/v2/gh/{name}/HEAD?urlpath=lab/tree/{path}",
    "Codespaces": "https://codespaces.new/{name}",
}
FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form", "_kg_hide-input": True}  # JupyterLab, Colab, Kaggle
FIRST = '''\
# @title Get the course: run this cell first
# Where it is not installed, it is fetched, or taken from a Kaggle data set. No package changes.
import importlib.util, os, shutil, subprocess, sys
from importlib.metadata import packages_distributions, version
from pathlib import Path

if not importlib.util.find_spec("course_utils"):
    have = {name.lower() for names in packages_distributions().values() for name in names}
    if lacking := {"cloudpickle", "ipywidgets", "matplotlib", "psutil", "pyyaml", "torch"} - have:
        raise ImportError(f"missing packages; install them: %pip install {' '.join(lacking)}")
    here = f"Python {sys.version.split()[0]}, torch {version('torch')}"
    if sys.version_info < (3, 11) or [*map(int, version("torch").split(".")[:2])] < [2, 10]:
        raise ImportError(f"the course needs Python 3.11 and torch 2.10 or later; here: {here}")
    course = Path.home() / "NAME"
    clone = ["git", "clone", "--quiet", "--depth=1", "REPOSITORY", course]
    data = next(Path("/kaggle/input").rglob("course_utils/__init__.py"), None)
    if data and not course.exists():
        shutil.copytree(data.parents[1], course)
    elif not course.exists() and subprocess.run(clone).returncode:
        raise OSError("no course here. On Kaggle: turn on internet, or add a data set with it")
    sys.path.insert(0, str(course))
    others = os.environ.get("PYTHONPATH", course)  # programs that cells start find the course, too
    os.environ["PYTHONPATH"] = f"{course}{os.pathsep}{others}"
    os.chdir(course / "notebooks")
    print(f"The course is in {course}; {here}")
'''


def badges(repository: str, path: str) -> str:
    """Links that open a notebook, in Markdown; empty where the repository has no address on GitHub."""
    name = repository.removeprefix("https://github.com/")
    links = [f"[{text}]({url.format(name=name, path=path)})" for text, url in BADGES.items()]
    return " · ".join(links) if name != repository else ""


def badged(readme: str, repository: str) -> str:
    """README.md with the badges that its address gives, where it has a place for them."""
    links = badges(repository, "notebooks/00_start_here.ipynb")
    place = f"<!-- badges -->\n{links}\n<!-- end -->"
    return re.sub(r"<!-- badges -->.*?<!-- end -->", lambda _: place, readme, flags=re.DOTALL)


def update_readme(path: Path, repository: str, write: bool = False) -> list[str]:
    """Say whether a README.md has other badges than the address gives; with ``write`` they are put right."""
    text = path.read_text(encoding="utf-8")
    if write:
        path.write_text(badged(text, repository), encoding="utf-8")
    return [f"{path.name}: its badges are not those of the address"] if badged(text, repository) != text else []


def write(root: Path, published: Path, repository: str, site: str) -> None:
    """Write the lessons and exercises as Colab and Kaggle open them into the folder that is published."""

    def address(link: re.Match) -> str:
        path = (folder / link[1]).resolve().relative_to(root)
        page = site and path.suffix == ".ipynb"
        return f"]({site.rstrip('/')}/{path.with_suffix('.html')}" if page else f"]({repository}/blob/main/{path}"

    (published / ".nojekyll").touch()  # GitHub Pages else leaves out folders such as _static
    first = FIRST.replace("REPOSITORY", repository).replace("NAME", repository.rsplit("/", 1)[-1])
    for path, nb in targets(root).items():
        folder = path.parent
        if folder.name == "solutions":
            continue
        for cell in nb.cells:
            if cell.cell_type == "markdown":
                cell.source = re.sub(r"\]\((\.\./[^)#\s]+|[\w.-]+\.ipynb)", address, cell.source)
            elif cell.metadata.get("jupyter", {}).get("source_hidden"):
                cell.metadata |= FOLDED
        nb.cells.insert(1, nbformat.v4.new_code_cell(first, metadata=FOLDED))
        file = published / "hosted" / path.relative_to(root)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(nbformat.writes(with_ids(nb)) + "\n", encoding="utf-8")
