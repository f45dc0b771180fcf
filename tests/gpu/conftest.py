"""Each check runs in a process of its own with a time limit, and what it finds goes into a JSON report, `REPORT`.

A check is a test that fills the dictionary `facts`. Its process is forked from this one, which has imported torch and
never uses a GPU, so a check that hangs or takes its process down is reported and the next one runs. The report
is written anew after each::

    schema     1; a change that readers must know of gives another number
    made_by    the command
    on         "gpu", or "cpu": a try of the checks themselves, with small sizes
    complete   whether all checks had their turn
    machine    the facts of the check "machine"
    checks     a list of name, what (a sentence), status (passed, failed, skipped, timed out), reason, seconds, facts

A measurement, wherever it stands below ``facts``, has ``value`` (a number or a list), ``unit`` ("1" for a share),
``how`` it was measured, and of a list what each was measured ``at``, with ``at_unit``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # counting GPUs does not use one: who has used one cannot fork

import pytest  # noqa: E402
import torch  # noqa: E402

from .kit import Setting, scrub  # noqa: E402

REPORT = "gpu_check.json"
ON_CPU = 3  # times as long where few cores do the work of GPUs
report: dict[str, Any] = {
    "schema": 1, "made_by": "python -m tools gpu-check", "complete": False, "machine": {}, "checks": [],
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on", choices=["gpu", "cpu"], default="gpu", help="cpu: small sizes, to try the checks")
    parser.addoption("--out", type=Path, help=f"folder for {REPORT} and a trace")
    parser.addoption("--only", nargs="+", metavar="NAME", help="these checks, such as copies roofline")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "limit(seconds): after which the process of the check is stopped")
    config.addinivalue_line("markers", "lessons: a whole lesson; not run with --out, unless it is named")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose what `--only` names, and always the machine; leave whole lessons to those who ask for them."""
    only = config.getoption("--only", None)
    if not config.getoption("--out", None):
        return
    known = dict.fromkeys(_name(item) for item in items)
    if unknown := [name for name in only or () if name not in known]:
        raise pytest.UsageError(f"there is no check {', '.join(unknown)}; there are {', '.join(known)}")
    wanted = {"machine", *only} if only else {_name(item) for item in items if not item.get_closest_marker("lessons")}
    config.hook.pytest_deselected(items=[item for item in items if _name(item) not in wanted])
    items[:] = [item for item in items if _name(item) in wanted]


def _name(item: pytest.Item) -> str:
    """Of a check: that of its function and its parameter, ``cells_01``."""
    return item.name.removeprefix("test_").replace("[", "_").removesuffix("]")


@pytest.fixture(scope="session")
def setting(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """One rank for each GPU, and two on the CPU."""
    on = pytestconfig.getoption("--on", "gpu")
    folder = pytestconfig.getoption("--out", None) or tmp_path_factory.mktemp("gpu-check")
    gpus = torch.cuda.device_count() if on == "gpu" else 2
    if not gpus:
        pytest.skip("needs a GPU, and PyTorch sees none here")
    if torch.cuda.is_initialized():
        pytest.skip("this process has used a GPU and cannot fork: run python -m tools gpu-check")
    folder.mkdir(parents=True, exist_ok=True)
    return Setting(on, gpus, folder.resolve())


@pytest.fixture
def facts() -> dict[str, Any]:
    """What the check finds, by name: numbers, texts, lists, objects, and measurements."""
    return {}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run a check in a process of its own, and report what it found."""
    setting: Setting = pyfuncitem.funcargs["setting"]
    limit = pyfuncitem.get_closest_marker("limit").args[0] * setting.choose(1, ON_CPU)
    what = pyfuncitem.obj.__doc__.splitlines()[0]
    found = scrub({"name": _name(pyfuncitem), "what": what, **_apart(pyfuncitem, limit)})
    report["checks"].append(found)
    if found["name"] == "machine":
        report["machine"] = found["facts"]
    _write(pyfuncitem.config)
    if found["status"] == "skipped":
        pytest.skip(found["reason"])
    if found["status"] != "passed":
        pytest.fail(found["reason"], pytrace=False)
    return True


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    report["complete"] = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    _write(session.config)


def _write(config: pytest.Config) -> None:
    """In one go: whoever reads finds the old report or the new one."""
    if report["checks"] and (folder := config.getoption("--out", None)):
        text = json.dumps({**report, "on": config.getoption("--on")}, indent=1, allow_nan=False)
        (folder / "partial").write_text(text + "\n", encoding="utf-8")
        (folder / "partial").replace(folder / REPORT)


def _apart(item: pytest.Function, limit: float) -> dict[str, Any]:
    """Status, reason, seconds and facts of a check that runs in a process of its own, of which nothing is left."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        pid = os.fork()
        if pid == 0:
            _child(item, folder)
        try:
            code = None
            while code is None and time.monotonic() < start + limit:
                time.sleep(0.02)
                done, status = os.waitpid(pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if done else None
        finally:
            _end(pid)
            if code is None:
                os.waitpid(pid, 0)
        took = round(time.monotonic() - start, 1)
        if code == 0:
            return {**json.loads((folder / "found").read_text(encoding="utf-8")), "seconds": took}
        said = (folder / "log").read_text(encoding="utf-8", errors="replace") if (folder / "log").exists() else ""
    last = [f"; it printed last: {line[:300]}" for line in said.splitlines() if line.strip()][-1:]
    if code is None:
        how = "timed out", f"stopped after {limit:.0f} s"
    else:
        how = "failed", f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    return {"status": how[0], "reason": "".join([how[1], *last]), "seconds": took, "facts": {}}


def _child(item: pytest.Function, folder: Path) -> None:
    """Call the check, with a file for what is printed, and write what it found; this process ends here."""
    code = 1
    try:
        os.setsid()
        with open(folder / "log", "wb") as log:
            for fd in (1, 2):
                os.dup2(log.fileno(), fd)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        if item.funcargs["setting"].on == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        facts, status, reason = item.funcargs["facts"], "passed", ""
        try:
            item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
        except pytest.skip.Exception as skip:
            status, reason = "skipped", str(skip)
        except Exception as error:
            traceback.print_exc()
            lines = [line.strip()[:300] for line in str(error).splitlines() if line.strip()]
            frames = traceback.extract_tb(error.__traceback__)
            place = [frame for frame in frames if frame.filename.startswith(str(Path(__file__).parent))][-1]
            status = "failed"
            where = f"{Path(place.filename).name}, line {place.lineno}"
            reason = f"{type(error).__name__}: {' | '.join(lines[:4])} ({where})"
        found = json.dumps({"status": status, "reason": reason, "facts": facts})
        (folder / "found").write_text(found, encoding="utf-8")
        code = 0
    except BaseException:  # noqa: BLE001  the process must end here
        traceback.print_exc()
    finally:
        os._exit(code)


def _end(check: int) -> None:
    """Kill what is left of a check: its session, and the processes below it, which may have sessions of their own."""
    below = [*_below(check)]
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(check, signal.SIGKILL)
    for pid in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> Iterator[int]:
    """The processes below one, where the system lists them in /proc."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    waiting = [pid]
    while waiting:
        found = parents.pop(waiting.pop(), [])
        waiting += found
        yield from found
