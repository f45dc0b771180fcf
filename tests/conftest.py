"""What every test may use: a guard that turns a hang into a failure, and clean surroundings for the ranks.

Several workers share the tests by groups, the longest first. ``--thorough`` adds what the default run leaves out.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import weakref
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

# Before anything imports torch, also in kernels: its threads that wait leave the cores to other tests. By default they
# spin, and on a machine with more work than cores a small training then takes five times the processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# One hash seed for all ranks takes one process to fork them from in place of two, in each of many kernels.
os.environ.setdefault("PYTHONHASHSEED", "0")

ROOT = Path(__file__).resolve().parent.parent
for folder in (str(ROOT / "tests"), str(ROOT)):
    if folder not in sys.path:
        sys.path.insert(0, folder)


LONG = (  # what takes a minute or so, in the order in which workers begin it; after it the groups with most tests
    "tests/promises/test_site.py", "tests/promises/test_browser.py", "tests/promises/test_gpu_check.py",
    "tests/ranks/test_launcher_failures.py",
    "tests/tools/test_grade.py", "tests/lessons/test_exercises.py",
    "tests/promises/test_benchmarks.py", "tests/promises/test_notebooks.py", "notebooks/",
    "tests/ranks/test_hangs_clinic.py", "tests/lessons/test_multi_node", "tests/ranks/test_where", "solutions/",
    "tests/lessons/test_ffcv_data_loading_lesson.py", "tests/ranks/test_launcher", "tests/promises/test_b",
    "tests/figures/test_explorers.py", "tests/figures/test_",
)
#: What `--quick` leaves out whole: kernels, browsers, other programs, ranks. Where else ranks are asked for, it skips.
SLOW_PARTS = (
    "tests/ranks/", "tests/tools/", "tests/lessons/", "tests/exercises/",
    "tests/models/test_c_programs.py",
    "tests/models/test_ffcv_fixes.py", "tests/promises/test_benchmarks.py",
    "tests/promises/test_browser.py", "tests/promises/test_build.py",
    "tests/promises/test_core.py::test_the_core_edition_runs",
    "tests/promises/test_environment.py", "tests/promises/test_gpu_check.py", "tests/promises/test_hosted.py",
    "tests/promises/test_loading_benchmark.py", "tests/promises/test_notebooks.py",
    "tests/promises/test_sheets.py", "tests/promises/test_site.py", "tests/promises/test_trace_viewer.py",
)
QUICK_IGNORES = tuple(f"{ROOT.as_posix()}/{part}" for part in SLOW_PARTS)
#: Notebooks whose outputs were measured with an extra that few have.
WITH_EXTRA = {
    "notebooks/08_": "deepspeed", "solutions/08_": "deepspeed", "notebooks/15_": "ffcv", "solutions/15_": "ffcv",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true",
        help="every lesson with 2 and with 3 ranks, its deeper sections too; the ePub; more (half as long again)",
    )
    parser.addoption("--quick", action="store_true", help="only tests that start no rank")


def pytest_configure(config: pytest.Config) -> None:
    text = "guard(seconds): past this time the test fails, past twice the time if workers share the machine"
    for mark in (text, "limit(seconds): of a check in tests/gpu", "lessons: a whole lesson in tests/gpu"):
        config.addinivalue_line("markers", mark)
    from course_utils.ranks import processes

    processes.end_server()  # which began with the import: each module says what ranks are to find imported
    if find_spec("nbval"):
        import nbval.kernel

        nbval.kernel.KernelManager = _kernel_manager


def _kernel_manager(**options: object):
    """What nbval calls for a kernel, whose ports it leaves to Jupyter's choice: the kernel runs in a learner's copy."""
    from jupyter_client import KernelManager
    from notebook_runs import learners_copy

    from tools.author.notebooks import local_sockets

    folder = tempfile.mkdtemp()
    manager = KernelManager(config=local_sockets(folder), **options)
    start = manager.start_kernel
    manager.start_kernel = lambda cwd, **more: start(cwd=str(learners_copy() / Path(cwd).name), **more)
    weakref.finalize(manager, shutil.rmtree, folder, ignore_errors=True)
    return manager


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what `--quick` leaves out."""
    return config.getoption("quick") and collection_path.as_posix().startswith(QUICK_IGNORES) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let a mark on a test count before the mark of its module. Under xdist put the longest groups first."""
    if config.getoption("quick"):
        slow = [item for item in items if item.nodeid.startswith(SLOW_PARTS)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.nodeid.startswith(SLOW_PARTS)]
    for item in items:
        mark = item.get_closest_marker("guard")
        item.guard = (float(mark.args[0]) if mark else 0.0) * (2 if hasattr(config, "workerinput") else 1)
        extra = WITH_EXTRA.get(item.nodeid[: item.nodeid.find("/") + 4])
        if extra and find_spec(extra) is None and not os.environ.get("CI"):
            item.add_marker(pytest.mark.skip(reason=f"what is stored was measured with {extra}: see make {extra}"))
    if hasattr(config, "workerinput"):
        tests = Counter(_group(item.nodeid) for item in items)
        items.sort(key=lambda item: _place(_group(item.nodeid), tests))


def _group(nodeid: str) -> str:
    """What one worker runs in one go: a module, a class, a notebook; of papermill's and of exercises one, or a room."""
    if nodeid.startswith("tests/promises/test_notebooks.py"):
        return nodeid
    if nodeid.startswith("tests/lessons/test_exercises.py"):
        return "tests/lessons/test_exercises.py" + nodeid.partition("[")[2].partition(".")[0]
    return nodeid.rsplit("::", 1)[0]


def _place(group: str, tests: Counter) -> tuple[int, int, str]:
    long = (i for i, beginning in enumerate(LONG) if group.startswith(beginning))
    return next(long, len(LONG)), -tests[group], group


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Hand out groups in the order of collection, which is that of `_place`."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    config.option.loadscopereorder = False
    return ByGroup(config, log)


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
def no_ranks_when_quick(request: pytest.FixtureRequest):
    if not request.config.getoption("quick"):
        return (yield)
    from course_utils.ranks.pool import Pool

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "run", lambda *_: pytest.skip("asks for ranks"))
        yield


_imported: dict[tuple[int, ...], set[str]] = {}  # by the servers that have imported it for their ranks


@pytest.fixture(scope="module", autouse=True)
def what_ranks_find_imported(request: pytest.FixtureRequest):
    """Ranks start by the hundred here: what they need, all find imported, but not what only other modules need."""
    from course_utils.ranks import processes

    slow, wanted = (), ["pytest", "torch._dynamo"]
    if not request.node.nodeid.startswith("tests/ranks/"):
        slow, checks = processes.SLOW, sorted((ROOT / "lessons").glob("*/check.py"))
        wanted += [*slow, *(f"lessons.{path.parent.name}.check" for path in checks)]
    if "deepspeed" in request.node.nodeid or request.node.nodeid == "tests/lessons/test_exercises.py":
        from lessons.deepspeed.deepspeed_tools.runs import PRELOADED

        wanted += PRELOADED
    servers = tuple(processes.server_ids())
    if servers and not {*wanted} <= _imported.get(servers, set()):
        sys.modules["course_utils"].shutdown()
        processes.end_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "SLOW", slow)
        patch.setattr(processes, "_shared", wanted)
        yield
        _imported.setdefault(tuple(processes.server_ids()), {*wanted})


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


def write_lesson(root: Path, name: str, text: str) -> Path:
    """Write the text of a lesson or of its exercises, such as ``90_small_exercises``, into its room below ``root``."""
    room = root / "lessons" / name[3:].removesuffix("_exercises")
    room.mkdir(parents=True, exist_ok=True)
    (room / "__init__.py").write_text(f'"""Lesson {name[:2]}: a test."""\n')
    path = room / ("exercises.py" if name.endswith("_exercises") else "lesson.py")
    path.write_text(text)
    return path
