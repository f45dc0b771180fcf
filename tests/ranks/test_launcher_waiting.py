"""Promises about time that passes: a sign of life while a call runs long, and ranks that end when nobody uses them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from calls import ended, screen
from kernels import Kernel, Script, left_behind, marked

from course_utils.ranks import status_line
from course_utils.ranks.channels import CELL, FUNCTION

pytestmark = pytest.mark.guard(90)

SOON = "from course_utils.ranks import status_line\nstatus_line._SILENCE = 0.5  # else three seconds\n"


@pytest.fixture(scope="module")
def shared():
    with Kernel(COURSE_STATUS="1") as kernel:
        kernel.good("import os, signal, time\nimport torch.distributed as dist\n%load_ext course_utils\n" + SOON + """
from course_utils import launch
from course_utils.ranks.processes import server_ids
for server in server_ids():
    os.kill(server, signal.SIGSTOP)""")
        cell = kernel.start_until("launch(dist.get_rank, world_size=3)", "ranks 0-2 are importing PyTorch")
        for process in marked(kernel.mark):
            process.resume()
        kernel.pump(cell)
        yield kernel


@pytest.fixture
def kernel(shared):
    """No test leaves a cell running, nor the file that its ranks wait for."""
    yield shared
    (shared.folder / "go").touch()
    shared.good("os.remove('go')")


# --- a sign of life ------------------------------------------------------------------------------------------------


WAITS = """
def work():
    while dist.get_rank() == 1 and not os.path.exists("go"):
        time.sleep(0.01)
launch(work, world_size=3);
"""


def test_a_long_call_says_how_long_it_runs_and_on_which_ranks(kernel):
    """It is there while the call runs, without a new line, and gone at its end."""
    cell = kernel.start_until(WAITS, "\r")
    kernel.pump(cell, lambda cell: re.search(r"\b[1-9]\d* s", cell.out))
    assert "\n" not in cell.out and not cell.err
    live = [line for line in screen(cell.out) if line]
    assert len(live) == 1 and re.search(r"\brank 1\b", live[0]) and "ranks" not in live[0], live
    (kernel.folder / "go").touch()
    kernel.pump(cell)
    assert "".join(screen(cell.out)) == "" and not cell.err and "\n" not in cell.out


def test_a_call_that_prints_shows_nothing_else(monkeypatch):
    clock, shown = [0.0], []
    monkeypatch.setattr(status_line, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    status = status_line.Status(shown.append, enabled=True)
    for step in range(8):
        clock[0] += 2.0
        status.update([0, 1], None)
        status.show(f"step {step}\n")
    assert shown == [f"step {step}\n" for step in range(8)]
    clock[0] += 3.0
    status.update([1], None)
    assert shown[8:] == ["\r… 19 s: rank 1 is running"]


def test_nothing_is_said_where_it_is_switched_off(kernel):
    kernel.good("os.environ['COURSE_STATUS'] = '0'")
    assert kernel.good("launch(time.sleep, 1.5, world_size=2);").out == ""
    kernel.good("os.environ['COURSE_STATUS'] = '1'")


def test_nothing_is_said_in_a_plain_script_and_idle_ranks_end_without_a_word():
    with Script(
        f"""
import os, time
from course_utils import launch
{SOON}
first = launch(os.getpid, world_size=3)
launch(time.sleep, 3, world_size=3)
assert launch(os.getpid, world_size=3) == first, "a call that runs for long is not idle"
deadline = time.monotonic() + 60
while any(os.path.exists("/proc/%d" % pid) for pid in first) and time.monotonic() < deadline:
    time.sleep(0.05)
assert not any(os.path.exists("/proc/%d" % pid) for pid in first), "idle for long, and still there"
second = launch(os.getpid, world_size=3)
assert not set(first) & set(second)
assert launch(os.getpid, world_size=3) == second
print("end")
""",
        COURSE_IDLE_SECONDS="2",
        COURSE_STATUS="1",
    ) as script:
        assert script.finish() == "end\n"
        assert not left_behind(script.mark, script.temporary)


# --- idle ranks ----------------------------------------------------------------------------------------------------


def test_ranks_with_names_of_cells_stay_longer_and_their_end_is_told(kernel):
    assert CELL.patience > FUNCTION.patience
    kernel.good("os.environ['COURSE_IDLE_SECONDS'] = '1'")
    cell = kernel.good("%%ranks --world-size 2\nimport os\nx = 5\nos.getpid()")
    pids = [int(pid) for pid in re.findall(r"\] (\d+)", cell.out)]
    assert len(pids) == 2 and ended(pids)
    told, shown = kernel.good("%%ranks\n'x' in globals()").out.splitlines()
    assert shown == "[ranks 0,1] False"
    assert "names" in told and re.search("gone|lost|afresh", told) and "rank" in told, told
    kernel.good("del os.environ['COURSE_IDLE_SECONDS']")
