"""The set-up does what is missing and no more, the update loses nothing, and what goes wrong is said in sentences."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT

SCRIPT = ROOT / "tools" / "setup.py"
LESSON, EXERCISE = "notebooks/02_small.ipynb", "exercises/02_small_exercises.ipynb"
GIT = {f"GIT_{who}_{what}": "n@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
GIT |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
PYTHON_OF_THE_COURSE = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A course of the set-up, the tools and nothing else, with an environment that claims to be complete."""
    root = tmp_path / "root"
    shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "course_utils", root / "course_utils", ignore=shutil.ignore_patterns("__pycache__", "re*"))
    for name in ("pyproject.toml", "Makefile", ".gitignore"):
        shutil.copy(ROOT / name, root)
    (tmp_path / "bin").mkdir()  # a PATH on which there is neither a compiler nor pkg-config
    (root / ".venv" / "bin").mkdir(parents=True)
    python(root, PYTHON_OF_THE_COURSE)
    claim(root)
    return root


def python(root: Path, script: str) -> None:
    (root / ".venv" / "bin" / "python").write_text(script)
    (root / ".venv" / "bin" / "python").chmod(0o755)


def claim(root: Path, torch: str = "cpu", *extras: str) -> None:
    """Write down that the environment has all of this, and the extra test."""
    digest = hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest()
    stamp = {"root": str(root), "pyproject": digest, "torch": torch, "extras": [*extras, "test"]}
    (root / ".venv" / "course-setup.json").write_text(json.dumps(stamp))


def setup(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, root / "tools" / "setup.py", *arguments]
    environment = os.environ | GIT | {"PATH": str(root.parent / "bin")} | environment
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180)


def test_old_pythons_can_read_the_script_and_it_takes_those_of_pyproject():
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))
    oldest, newest = re.search(r"OLDEST, NEWEST = \(3, (\d+)\), \(3, (\d+)\)", SCRIPT.read_text()).groups()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">=3.{oldest},<3.{int(newest) + 1}"


@pytest.mark.parametrize(("there", "arguments"), [
    ([], ["--extra", "test", "--torch", "cpu"]), (["ffcv"], ["--extra-if-possible", "ffcv"]),
], ids=str)
def test_second_setup_does_nothing_and_keeps_what_is_there(root: Path, there: list[str], arguments: list[str]):
    claim(root, "cpu", *there)
    done = setup(root, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(sys.platform != "linux" or sys.version_info[:2] > (3, 11), reason="FFCV: Linux, Python 3.11")
def test_system_packages_for_ffcv_are_named_and_tests_go_on_without(root: Path):
    stamp = (root / ".venv" / "course-setup.json").read_text()
    done = setup(root, "--extra", "ffcv")
    assert done.returncode == 1 and "then: make ffcv" in done.stderr
    assert "sudo apt install g++ pkg-config libopencv-dev libturbojpeg0-dev" in done.stderr
    done = setup(root, "--extra-if-possible", "ffcv")
    assert (done.returncode, done.stderr) == (0, "") and "without FFCV" in done.stdout
    assert (root / ".venv" / "course-setup.json").read_text() == stamp


def test_cuda_12_keeps_its_own_nccl(root: Path):
    claim(root, "cu126")
    done = setup(root, "--torch", "cu126", "--extra", "nccl")
    assert (done.returncode, done.stderr) == (0, "") and "without the extra nccl" in done.stdout


def test_unknown_build_and_too_old_python_are_told_the_choices(root: Path):
    assert "auto, cpu, cuda, or a CUDA version such as cu126" in setup(root, "--torch", "gpu").stderr
    script = root / "tools" / "setup.py"
    script.write_text(script.read_text().replace("(3, 11), (3, 14)", "(3, 98), (3, 99)"))
    shutil.rmtree(root / ".venv")
    (root.parent / "bin" / "uv").write_text("#!/bin/sh\nexit 1\n")  # a uv that cannot fetch one either
    (root.parent / "bin" / "uv").chmod(0o755)
    done = setup(root)
    assert done.returncode == 1 and "make setup PYTHON=" in done.stderr
    assert "The course needs Python 3.98 to 3.99" in done.stderr


@pytest.mark.guard(300)
def test_without_a_network_the_proxy_is_named_and_how_to_do_without(root: Path):
    shutil.rmtree(root / ".venv")
    dead = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy")}
    pip = {name: "" for name in os.environ if name.startswith("PIP_")} | {"PIP_CONFIG_FILE": os.devnull}
    done = setup(root, "--torch", "cpu", **dead, **pip, PIP_RETRIES="0", no_proxy="", NO_PROXY="")
    assert done.returncode == 1 and "about 300 MB in all, which take 1.3 GB on disk" in done.stdout
    for part in ("export https_proxy=http://HOST:PORT", "pip config set global.proxy", "PIP_CERT", "PIP_FIND_LINKS"):
        assert part in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("uv", [True, False])
@pytest.mark.parametrize("settings", ["", "global.proxy='http://proxy:8080'"])
def test_uv_installs_where_it_is_there_and_pip_has_no_network_of_its_own(root: Path, uv: bool, settings: str):
    """By programs that write down what they are asked for."""
    python(root, f"""#!/bin/sh
        case "$*" in *"config list"*) echo "{settings}";; *install*) echo "pip $@" >> {root}/asked;; esac""")
    if uv:
        (root.parent / "bin" / "uv").write_text(f'#!/bin/sh\necho "uv $@" >> {root}/asked\n')
        (root.parent / "bin" / "uv").chmod(0o755)
    claim(root, "cuda")
    done = setup(root, "--torch", "cpu", "--extra", "deepspeed")
    assert (done.returncode, done.stderr) == (0, "") and "ready: make lab" in done.stdout
    version = re.search(r'"torch==([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    first, second = (root / "asked").read_text().splitlines()
    assert all(line.startswith("uv pip install" if uv and not settings else "pip -m pip") for line in (first, second))
    assert first.endswith(f"--no-deps torch=={version}+cpu --extra-index-url https://download.pytorch.org/whl/cpu")
    assert second.endswith("--editable .[deepspeed,test] " + ("--quiet" if second.startswith("uv") else "-qq"))
    python(root, PYTHON_OF_THE_COURSE)
    assert setup(root, "--extra", "deepspeed").stdout == ""


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", root, *arguments], env=os.environ | GIT, check=True, capture_output=True)


def put(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text, id="text")]), path)


def commit(root: Path, lesson: str, exercise: str) -> None:
    """A new version of the course, with these texts in its notebooks."""
    put(root / LESSON, lesson)
    put(root / EXERCISE, exercise)
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "new version")


def text(path: Path) -> str:
    return nbformat.read(path, as_version=4).cells[0].source


def test_update_brings_the_new_version_and_keeps_answers_or_leaves_all_as_it_was(root: Path, tmp_path: Path):
    clone = tmp_path / "clone"
    git(tmp_path, "init", "--quiet", "--initial-branch=main", str(root))
    commit(root, "# First", "# First")
    git(tmp_path, "clone", "--quiet", str(root), str(clone))
    shutil.copytree(root / ".venv", clone / ".venv")
    claim(clone)
    path = {"PATH": os.environ["PATH"]}
    assert setup(clone, "--copy", **path).returncode == 0
    put(clone / "work" / EXERCISE, "# My answer")
    script = root / "tools" / "setup.py"
    script.write_text(script.read_text().replace("def set_up(given):", 'def set_up(given):\n    say("newer")', 1))
    commit(root, "# Second", "# Second")
    done = setup(clone, "--update", **path)
    assert (done.returncode, done.stderr) == (0, "") and "[setup] newer" in done.stdout
    assert text(clone / "work" / LESSON) == "# Second" and text(clone / "work" / EXERCISE) == "# My answer"
    assert f"{EXERCISE} is yours and stays" in done.stdout

    put(clone / LESSON, "# Mine, in the wrong place")
    commit(root, "# Third", "# Second")
    done = setup(clone, "--update", **path)
    assert done.returncode == 1 and LESSON in done.stderr and "git stash" in done.stderr
    assert text(clone / LESSON) == "# Mine, in the wrong place" and text(clone / "work" / LESSON) == "# Second"
    shutil.rmtree(clone / ".git")
    done = setup(clone, "--update", **path)
    assert done.returncode == 1 and "move your folder work/ into it, and run make lab there" in done.stderr


def test_course_is_opened_restored_and_cleaned_without_the_packages_of_another_python(root: Path):
    python(root, '#!/bin/sh\necho "$@" "$PYTHONPATH"\n')
    environment = os.environ | {"PYTHONPATH": "/somewhere/else"}
    assert setup(root, "--lab", PYTHONPATH="/somewhere/else").stdout == "-m tools lab \n"
    command = ["make", "--silent", "lab", "restore", "L=02 exercises/04_x.ipynb", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "-m tools lab \n-m tools restore 02 exercises/04_x.ipynb \n"
    places = [root / folder / ".ipynb_checkpoints" for folder in ("work/notebooks", "notebooks")]
    for place in places:
        place.mkdir(parents=True)
    subprocess.run(["make", "--silent", "clean"], cwd=root, check=True)
    assert [place.exists() for place in places] == [True, False]


def test_doctor_names_pythonpath_when_another_numpy_comes_from_there(tmp_path: Path):
    (tmp_path / "numpy.py").write_text("")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "tools", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert f"packages in {tmp_path} come before the course's: unset PYTHONPATH" in done.stdout
