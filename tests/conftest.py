"""What every test may use: a guard that turns a hang into a failure, and clean surroundings for the ranks."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
for folder in (str(ROOT / "tests"), str(ROOT)):
    if folder not in sys.path:
        sys.path.insert(0, folder)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "guard(seconds): past this time the test fails, and the run goes on")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a mark on a test count before the mark of its module."""
    for item in items:
        mark = item.get_closest_marker("guard")
        item.guard = float(mark.args[0]) if mark else 0.0


def _guarded(item: pytest.Item, phase: str):
    """Run one phase of a test; past the guard, fail in whatever the main thread waits for."""
    if not getattr(item, "guard", 0) or not hasattr(signal, "setitimer"):
        return (yield)

    def give_up(signum: int, frame: object) -> None:
        pytest.fail(f"hang: the {phase} of this test did not end within {item.guard:.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, item.guard, 5)  # again every 5 s, should something swallow the first
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    return (yield from _guarded(item, "set-up"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    return (yield from _guarded(item, "body"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item):
    return (yield from _guarded(item, "clean-up"))


@pytest.fixture(autouse=True)
def no_world_size_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests state the world size they mean; a variable set in the shell must not change it."""
    monkeypatch.delenv("COURSE_WORLD_SIZE", raising=False)


@pytest.fixture(scope="session", autouse=True)
def workers_stop_after_the_last_test():
    yield
    if "course_utils" in sys.modules:
        sys.modules["course_utils"].shutdown()


def missing(what: str) -> None:
    """Skip a test for want of `what`, but fail under CI, where nothing may be missing."""
    if os.environ.get("CI"):
        pytest.fail(f"missing under CI: {what}")
    pytest.skip(f"needs {what}")
