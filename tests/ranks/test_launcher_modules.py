"""Promises about modules of the learner's own: an edit is seen at the next call, whatever way they are imported."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
import torch.distributed as dist
from calls import all_is_well, failure

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
    path.parent.mkdir(parents=True, exist_ok=True)
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


HALF = """
import os, time
import halfway.part
open(f"begun-{os.getpid()}", "w").close()
while not os.path.exists("gate"):
    time.sleep(0.01)
value = halfway.part.value
"""


def test_a_rank_stopped_in_the_middle_of_an_import_can_import_afterwards(folder, monkeypatch):
    """A second attempt finds a sub-module imported, but not as its attribute: as with sympy and torch._dynamo."""
    write(folder / "site-packages" / "halfway" / "part.py", "value = 7\n")
    write(folder / "site-packages" / "halfway" / "__init__.py", HALF)
    monkeypatch.syspath_prepend(folder / "site-packages")

    def use():
        import halfway

        return halfway.value

    def stops():
        if dist.get_rank() == 2:
            while len([name for name in os.listdir() if name.startswith("begun-")]) < 3:
                time.sleep(0.01)
            raise ValueError("my bug")
        use()

    assert failure(WorkerError, stops).rank == 2
    (folder / "gate").touch()
    assert launch(use, world_size=4) == launch(use, world_size=4) == [7] * 4
