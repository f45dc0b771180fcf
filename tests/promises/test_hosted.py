"""Notebooks as a badge opens them: their first cell gets the course, ranks start, and it says what is missing."""

from __future__ import annotations

import glob
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import nbformat
import papermill
import pytest
from conftest import ROOT

from tools.author import hosted
from tools.author.core import is_deeper
from tools.author.notebooks import local_sockets
from tools.author.site import settings

REPOSITORY, SITE = "https://github.com/someone/course", "https://someone.github.io/course"
pytestmark = pytest.mark.guard(300)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    hosted.write(ROOT, folder, REPOSITORY, SITE)
    return folder / "hosted"


@pytest.fixture(scope="module")
def first(copies: Path) -> str:
    """The code of the first cell."""
    return next(cell.source for cell in core(copies, "00") if cell.cell_type == "code")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with our packages and without the course, whose git finds the repository here; its home folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    (packages,) = (tmp_path / "bare").glob("lib/*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))  # without what .pth files there add: the course
    add_kernel(tmp_path, "bare", tmp_path / "bare" / "bin" / "python")
    return prepare(tmp_path, monkeypatch)


def add_kernel(folder: Path, name: str, python: Path) -> None:
    """Let Jupyter know the Python of another environment under a name, once JUPYTER_PATH leads to the folder."""
    spec = {"argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": name}
    (folder / "kernels" / name).mkdir(parents=True)
    (folder / "kernels" / name / "kernel.json").write_text(json.dumps(spec | {"language": "python"}))


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Surroundings of kernels: the kernels of the folder, a new home, and git's way to the repository."""
    (folder / "home").mkdir()
    git = {"COUNT": "1", "KEY_0": f"url.file://{ROOT}.insteadOf", "VALUE_0": REPOSITORY}
    for name, value in {f"GIT_CONFIG_{name}": value for name, value in git.items()}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JUPYTER_PATH", str(folder))
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("COURSE_STATUS", "0")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder / "home"


def run(cells: list, kernel: str, folder: Path) -> list[str]:
    """Run cells in a kernel far from the course; what each of them prints. Raises papermill's error."""
    (folder / "elsewhere").mkdir(exist_ok=True)
    codes = [nbformat.v4.new_code_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    path, config = folder / "elsewhere" / "opened.ipynb", local_sockets(folder)
    nbformat.write(nbformat.v4.new_notebook(cells=codes), path)
    ran = papermill.execute_notebook(path, path, kernel_name=kernel, cwd=path.parent, progress_bar=False,
                                     execution_timeout=300, start_timeout=180, config=config)
    return ["".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in ran.cells]


def core(copies: Path, number: str) -> list:
    (path,) = copies.glob(f"notebooks/{number}_*.ipynb")
    return [cell for cell in nbformat.read(path, as_version=4).cells if not is_deeper(cell)]


def test_copies_hold_a_first_cell_whole_addresses_and_no_outputs(copies: Path):
    names = [path.relative_to(ROOT) for kind in ("notebooks", "exercises")
             for path in ROOT.glob(f"{kind}/[0-9]*.ipynb")]
    assert {path.relative_to(copies) for path in copies.rglob("*.ipynb")} == {*names}
    for name in names:
        nb = nbformat.read(copies / name, as_version=4)
        nbformat.validate(nb)
        code = [cell for cell in nb.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code)
        assert "@title" in code[0].source and REPOSITORY in code[0].source and "NAME" not in code[0].source
        assert len(lines := code[0].source.splitlines()) <= 25 and max(map(len, lines)) <= 100
        for cell in code:
            folded = cell.metadata.get("jupyter", {}).get("source_hidden", False)
            assert (cell.metadata.get("cellView") == "form") == cell.metadata.get("_kg_hide-input", False) == folded
        links = [link for cell in nb.cells if cell.cell_type == "markdown"
                 for link in re.findall(r"\]\((\S+?)\)", re.sub(r"`[^`]*`", "", cell.source))]
        assert not [link for link in links if not re.match(r"https?://|#", link)]
        for link in links:
            if link.startswith(SITE):
                assert (ROOT / link.removeprefix(f"{SITE}/").partition("#")[0]).with_suffix(".ipynb").exists()
            elif link.startswith(REPOSITORY):
                assert (ROOT / link.removeprefix(f"{REPOSITORY}/blob/main/").partition("#")[0]).exists()


def test_from_the_badge_to_the_first_launch(first: str, host: Path):
    ranks = "from course_utils import launch\nprint(launch(lambda: 7, world_size=2))"
    program = "import sys, course_utils; print('found')"
    outside = f"print(subprocess.check_output([sys.executable, '-c', {program!r}], text=True))"
    told = run([first, ranks, "print(os.getcwd())", outside, first], "bare", host.parent)
    assert told[0].startswith(f"The course is in {host / 'course'}; Python 3.") and told[0].count("\n") == 1
    assert told[1:] == ["[7, 7]\n", f"{host / 'course' / 'notebooks'}\n", "found\n\n", ""]


def test_without_a_network_a_data_set_has_the_course(first: str, host: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{host / 'nowhere'}.insteadOf")
    with pytest.raises(papermill.PapermillExecutionError, match="turn on internet.*data set"):
        run([first], "bare", host.parent)
    for name in ("course_utils", "notebooks"):
        (host / "input" / "zip" / "course-main" / name).mkdir(parents=True)
    (host / "input" / "zip" / "course-main" / "course_utils" / "__init__.py").touch()
    given = first.replace("/kaggle/input", str(host / "input"))
    told = run([given, "import course_utils\nprint(course_utils.__file__)"], "bare", host.parent)
    assert told[1] == f"{host / 'course' / 'course_utils' / '__init__.py'}\n"


def test_a_torch_that_is_too_old_is_named(first: str, host: Path, monkeypatch: pytest.MonkeyPatch):
    (host / "torch-2.9.1.dist-info").mkdir()
    (host / "torch-2.9.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")
    monkeypatch.setenv("PYTHONPATH", str(host))
    with pytest.raises(papermill.PapermillExecutionError, match=r"torch 2\.10 or later; here: .* torch 2\.9\.1"):
        run([first], "bare", host.parent)


def test_badges_stand_in_the_readme_as_the_address_wants_it():
    assert hosted.update_readme(ROOT / "README.md", settings(ROOT)["repository"]) == []
    text = "# A\n<!-- badges -->\nold\n<!-- end -->\nB\n"
    assert hosted.badged(text, "") == hosted.badged(text, "https://git.example.org/course")
    assert hosted.badged(text, "") == "# A\n<!-- badges -->\n\n<!-- end -->\nB\n"
    for service in hosted.BADGES:
        assert f"[{service}](https://" in hosted.badged(text, REPOSITORY)


def test_widgets_import_no_torch():
    modules = [path.removesuffix(".py").replace("/", ".") for name in ("explorer", "stepper")
               for path in glob.glob(f"lessons/*/{name}.py", root_dir=ROOT)]
    hidden = f"import sys; sys.modules['torch'] = None; import {', '.join(modules)}, course_utils.predictions"
    subprocess.run([sys.executable, "-c", hidden], check=True, cwd=ROOT)
