"""The course is updated without losing anything, and set up without make; what goes wrong is said in sentences."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT

LESSON, EXERCISE = "notebooks/02_small.ipynb", "exercises/02_small_exercises.ipynb"
IDENTITY = {f"GIT_{who}_{what}": "n@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
GIT = IDENTITY | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, env=os.environ | GIT, check=True, capture_output=True, text=True).stdout


def put(path: Path, text: str) -> None:
    cells = [nbformat.v4.new_markdown_cell(text, id="text"), nbformat.v4.new_code_cell("pass", id="code")]
    path.parent.mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


def commit(root: Path, **texts: str) -> None:
    """A new version of the course, with these texts in its notebooks."""
    for name, text in texts.items():
        put(root / {"lesson": LESSON, "exercise": EXERCISE}[name], text)
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "new version")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small course under git in ``upstream``; in ``clone`` a learner's clone, with a copy and an answer."""
    place = tmp_path_factory.mktemp("made")
    root, clone = place / "upstream", place / "clone"
    unwanted = shutil.ignore_patterns("__pycache__", "checks", "grading", "plots", "widgets")
    shutil.copytree(ROOT / "course_utils", root / "course_utils", ignore=unwanted)
    for name in ("pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, root)
    git(place, "init", "--quiet", "--initial-branch=main", str(root))
    commit(root, lesson="# First", exercise="# First")
    git(place, "clone", "--quiet", str(root), str(clone))
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    claim_to_be_complete(clone)
    done = bootstrap(clone, "--copy")
    assert (done.returncode, done.stderr) == (0, "")
    put(clone / "work" / EXERCISE, "# My answer")
    return place


def claim_to_be_complete(root: Path) -> None:
    """Write what the set-up writes when the environment has all that `root` asks for."""
    digest = hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest()
    stamp = {"root": str(root), "pyproject": digest, "torch": "cpu", "extras": []}
    (root / ".venv" / "course-setup.json").write_text(json.dumps(stamp))


@pytest.fixture
def upstream(made: Path, tmp_path: Path) -> Path:
    """The small course, for one test."""
    return shutil.copytree(made, tmp_path / "own", symlinks=True) / "upstream"


@pytest.fixture
def clone(upstream: Path) -> Path:
    """The clone of it, with an environment that is complete."""
    root = upstream.with_name("clone")
    git(root, "remote", "set-url", "origin", str(upstream))
    claim_to_be_complete(root)
    return root


def bootstrap(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, root / "course_utils" / "bootstrap.py", *arguments]
    environment = os.environ | GIT | {"JUPYTER_DATA_DIR": str(root.parent / "data")} | environment
    return subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment, timeout=300)


def text(path: Path) -> str:
    return nbformat.read(path, as_version=4).cells[0].source


def test_update_brings_the_new_version_and_keeps_answers(upstream: Path, clone: Path):
    script = upstream / "course_utils" / "bootstrap.py"
    script.write_text(script.read_text().replace('"""Make ``.venv`` and install', 'say("newer")\n    """Make', 1))
    commit(upstream, lesson="# Second", exercise="# Second")
    done = bootstrap(clone, "--update")
    assert (done.returncode, done.stderr) == (0, "")
    assert "updated: 3 files of the course are new\n[setup] newer\n" in done.stdout, "the new set-up goes on"
    assert text(clone / "work" / LESSON) == "# Second"
    assert text(clone / "work" / EXERCISE) == "# My answer"
    assert "02_small_exercises.ipynb is yours and stays" in done.stdout
    assert git(clone, "status", "--porcelain") == ""


def test_update_without_a_new_version_still_refreshes_the_copy(clone: Path):
    (clone / "work" / LESSON).unlink()
    done = bootstrap(clone, "--update")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"[setup] this is the newest version\nnew in {clone / 'work'}: {LESSON}\n"


def test_files_changed_on_both_sides_are_named_with_a_way_out_that_works(upstream: Path, clone: Path):
    mine = {LESSON: b"mine", "notebooks/03 my own.ipynb": b"also mine"}
    for name, content in mine.items():
        (clone / name).write_bytes(content)
    put(upstream / "notebooks/03 my own.ipynb", "# Added")
    commit(upstream, lesson="# Second", exercise="# Second")
    done = bootstrap(clone, "--update")
    assert done.returncode == 1 and done.stdout == ""
    assert "these files have changed here and in the new version:\n" in done.stderr
    assert all(f"\n  {name}\n" in done.stderr for name in mine)
    assert {name: (clone / name).read_bytes() for name in mine} == mine
    (way_out,) = [line for line in done.stderr.splitlines() if line.startswith("  git stash push")]
    git(clone, *shlex.split(way_out)[1:])
    assert bootstrap(clone, "--update").returncode == 0
    assert text(clone / "work" / LESSON) == "# Second"
    assert git(clone, "show", f"stash@{{0}}:{LESSON}") == "mine"
    assert git(clone, "show", "stash@{0}^3:notebooks/03 my own.ipynb") == "also mine"


def test_changed_file_that_the_new_version_does_not_touch_stays_changed(upstream: Path, clone: Path):
    put(clone / EXERCISE, "# Mine, in the wrong place")
    commit(upstream, lesson="# Second")
    done = bootstrap(clone, "--update")
    assert (done.returncode, done.stderr) == (0, "")
    assert text(clone / "work" / LESSON) == "# Second" and text(clone / EXERCISE) == "# Mine, in the wrong place"


def refused(done: subprocess.CompletedProcess[str], sentence: str) -> bool:
    """True if the course was left alone for the reason that the sentence gives, without a traceback."""
    return done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr


def test_update_of_a_download_says_how_to_move_on(clone: Path):
    shutil.rmtree(clone / ".git")
    assert refused(bootstrap(clone, "--update"), "move your folder work/ into the new one, and run make lab there")


def test_update_without_a_network_names_the_proxy(upstream: Path, clone: Path):
    upstream.rename(upstream.with_name("gone"))
    assert refused(bootstrap(clone, "--update"), "Behind a proxy:    export https_proxy=http://HOST:PORT")


def test_update_of_a_clone_on_no_branch_says_so(clone: Path):
    git(clone, "switch", "--quiet", "--detach")
    assert refused(bootstrap(clone, "--update"), "on no branch that follows another. Try: git switch main")


def test_update_leaves_a_clone_with_commits_of_its_own(upstream: Path, clone: Path):
    commit(upstream, lesson="# Second")
    commit(clone, exercise="# Own")
    head = git(clone, "rev-parse", "HEAD")
    assert refused(bootstrap(clone, "--update"), "This clone has commits of its own, so it was left as it is.")
    assert git(clone, "rev-parse", "HEAD") == head


def test_one_command_without_make_opens_the_course(clone: Path):
    (clone / ".venv" / "bin" / "python").write_text('#!/bin/sh\necho "$@" "$PYTHONPATH"\n')
    done = bootstrap(clone, "--lab", PYTHONPATH="/somewhere/else")
    assert (done.returncode, done.stdout) == (0, "-m course_utils lab \n")


def test_make_opens_and_restores_without_the_packages_of_another_python(clone: Path):
    shutil.copy(ROOT / "Makefile", clone)
    (clone / ".venv" / "bin" / "python").write_text('#!/bin/sh\necho "$@" "$PYTHONPATH"\n')
    command = ["make", "--silent", "lab", "restore", "L=02 exercises/04_x.ipynb", f"PYTHON={sys.executable}"]
    environment = os.environ | {"PYTHONPATH": "/somewhere/else"}
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    expected = "-m course_utils lab \n-m course_utils restore 02 exercises/04_x.ipynb \n"
    assert done.stdout == expected


def test_cleaning_keeps_the_copy_of_the_learner(clone: Path):
    shutil.copy(ROOT / "Makefile", clone)
    places = [clone / folder / ".ipynb_checkpoints" for folder in ("work/notebooks", "notebooks")]
    for place in places:
        place.mkdir()
    subprocess.run(["make", "--silent", "clean"], cwd=clone, check=True)
    assert [place.exists() for place in places] == [True, False]
    assert text(clone / "work" / EXERCISE) == "# My answer"


@pytest.mark.guard(300)
def test_set_up_behind_a_dead_proxy_names_the_proxy_and_not_the_cuda_build(upstream: Path):
    dead = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy")}
    pip = {name: "" for name in os.environ if name.startswith("PIP_")} | {"PIP_CONFIG_FILE": os.devnull}
    done = bootstrap(upstream, "--torch", "cpu", **dead, **pip, no_proxy="", NO_PROXY="")
    assert done.returncode == 1
    assert "about 300 MB in all, which take 1.3 GB on disk" in done.stdout
    message = done.stderr[done.stderr.index("No packages can be downloaded") :]
    for part in ("https_proxy=http://127.0.0.1:9", "pip config set global.proxy", "PIP_CERT", "PIP_FIND_LINKS"):
        assert part in message
    assert "TORCH=cuda" not in done.stderr and "Traceback" not in message


def test_doctor_names_pythonpath_when_another_numpy_comes_from_there(tmp_path: Path):
    (tmp_path / "numpy.py").write_text("")
    command = [sys.executable, "-m", "course_utils", "doctor"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 1
    assert f"packages in {tmp_path} come before the course's: unset PYTHONPATH" in done.stdout
    assert "imports   failed: " in done.stdout and "Traceback" not in done.stdout + done.stderr
