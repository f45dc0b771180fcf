"""Promises about modules of the learner's own: an edit is seen at the next call, whatever way they are imported."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
from calls import all_is_well
from kernels import Kernel

from course_utils import WorkerError, launch, shutdown

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder to import from, as a notebook's is, and ranks that have imported nothing yet."""
    shutdown()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def write(path: Path, text: str, *, at: float | None = None) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    if at is not None:
        os.utime(path, (at, at))


def ask():
    import mine

    return mine.X


def test_every_edit_is_seen_at_the_next_call_also_one_of_equal_size_in_the_same_second(folder):
    all_is_well(2)
    write(folder / "mine.py", "X = 0\n")  # no call before the edit
    for value in (1, 2, 22):
        write(folder / "mine.py", f"X = {value}\n")
        assert launch(ask, world_size=2) == launch(ask, world_size=2) == [value] * 2
    write(folder / "mine.py", "X = = 2\n")
    with pytest.raises(WorkerError, match="SyntaxError"):
        launch(ask, world_size=2)
    write(folder / "mine.py", "X = 2\n")
    assert launch(ask, world_size=2) == [2, 2]


def test_an_edit_inside_a_package_is_seen(folder):
    write(folder / "package" / "__init__.py", "from . import part\nfrom .part import X\n")
    write(folder / "package" / "part.py", "X = 1\n")

    def ask():
        import package.part

        return package.X, package.part.X

    assert launch(ask, world_size=2) == [(1, 1)] * 2
    write(folder / "package" / "part.py", "X = 22\n")
    assert launch(ask, world_size=2) == [(22, 22)] * 2
    write(folder / "package" / "__init__.py", "from . import part\nX = 'own'\n")
    assert launch(ask, world_size=2) == [("own", 22)] * 2


def test_a_module_that_has_not_changed_is_not_imported_again(folder):
    text = "import os\nwith open(f'imports-{os.getpid()}', 'a') as f:\n    f.write('x')\n"
    write(folder / "counted.py", text, at=time.time() - 10)

    def ask():
        import counted  # noqa: F401

        with open(f"imports-{os.getpid()}") as file:
            return file.read()

    for _ in range(3):
        assert launch(ask, world_size=2) == ["x", "x"]


# --- in a notebook -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel():
    with Kernel() as kernel:
        kernel.good("import time\nfrom course_utils import launch\n%load_ext course_utils")
        yield kernel


def test_an_edit_is_told_where_ranks_keep_the_names_of_cells(kernel):
    file = kernel.folder / "lib1.py"
    write(file, "X = 1\n", at=time.time() - 10)
    kernel.good("%ranks_reset")
    kernel.good("%%ranks --world-size 2\nimport lib1\nkept = 5")
    write(file, "X = 2\n")
    told, *shown = kernel.good("%%ranks\nlib1.X, kept").out.splitlines()
    assert shown == ["[ranks 0,1] (1, 5)"]
    assert told == "edited since the ranks imported it: lib1.py; %ranks_reset lets them import it again"
    kernel.good("%ranks_reset")
    assert kernel.good("%%ranks --world-size 2\nimport lib1\nlib1.X").out == "[ranks 0,1] 2\n"


def test_with_autoreload_ranks_have_what_the_notebook_has(kernel):
    file = kernel.folder / "auto1.py"
    write(file, "def answer():\n    return 1\n")
    kernel.good("%load_ext autoreload\n%autoreload 2\nimport auto1")
    assert kernel.good("auto1.answer(), launch(auto1.answer, world_size=2)").value == "(1, [1, 1])"
    write(file, "def answer():\n    return 22\n", at=time.time() + 22)
    assert kernel.good("auto1.answer(), launch(auto1.answer, world_size=2)").value == "(22, [22, 22])"
