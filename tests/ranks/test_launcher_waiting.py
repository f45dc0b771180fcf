"""Promises about time that passes: a sign of life while a call runs long, and ranks that end when nobody uses them."""

from __future__ import annotations

import os
import re
import time

import pytest
from calls import ended, screen
from kernels import Kernel, Script, left_behind, marked

pytestmark = pytest.mark.guard(90)

SOON = "from course_utils.ranks import status_line\nstatus_line._SILENCE = 0.5  # else three seconds\n"
IMPORTS = "import os, time\nimport torch.distributed as dist\nfrom course_utils import launch\n%load_ext course_utils\n"


@pytest.fixture(scope="module")
def shared():
    with Kernel(COURSE_STATUS="1") as kernel:
        kernel.good(IMPORTS + SOON + "import signal\nfrom course_utils.ranks.processes import server_ids")
        kernel.good("for server in server_ids():\n    os.kill(server, signal.SIGSTOP)")
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


@pytest.fixture(scope="module")
def quiet():
    """A kernel where nothing is said about time, and ranks are soon idle for long."""
    with Kernel(COURSE_STATUS="0", COURSE_IDLE_SECONDS="1") as kernel:
        kernel.good(IMPORTS + SOON)
        yield kernel


# --- a sign of life ------------------------------------------------------------------------------------------------


def test_a_long_call_says_how_long_it_runs_and_on_which_ranks(kernel):
    """It is there while the call runs, without a new line, and gone at its end."""
    cell = kernel.start_until(
        """
def work():
    while dist.get_rank() == 1 and not os.path.exists("go"):
        time.sleep(0.01)
launch(work, world_size=3);
""",
        "\r",
        timeout=60,
    )
    kernel.pump(cell, lambda cell: re.search(r"\b[1-9] ?s", cell.out), timeout=60)
    assert "\n" not in cell.out and not cell.err
    live = [line for line in screen(cell.out) if line]
    assert len(live) == 1 and re.search(r"\brank 1\b", live[0]) and "ranks" not in live[0], live
    (kernel.folder / "go").touch()
    kernel.pump(cell)
    assert "".join(screen(cell.out)) == "" and not cell.err and "\n" not in cell.out


def test_a_call_that_prints_shows_nothing_else(kernel):
    cell = kernel.good("""
status_line._SILENCE = 3.0
def work():
    for step in range(8):
        print("step", step)
        time.sleep(0.5)
launch(work, world_size=2);
status_line._SILENCE = 0.5
""")
    assert cell.out == "".join(f"[ranks 0,1] step {step}\n" for step in range(8))


def test_an_error_stands_alone_after_a_long_call(kernel):
    cell = kernel.run("def work():\n    time.sleep(1.5)\n    raise ValueError('late')\nlaunch(work, world_size=2)")
    assert cell.error_name == "WorkerError" and "ValueError: late" in cell.error
    assert "\r" in cell.out and "".join(screen(cell.out)) == ""


def test_nothing_is_said_where_it_is_switched_off(quiet):
    assert quiet.good("launch(time.sleep, 1.5, world_size=2);").out == ""


def test_nothing_is_said_in_a_plain_script_and_idle_ranks_end_without_a_word():
    with Script(
        f"""
import os, time
from course_utils import launch
{SOON}
first = launch(os.getpid, world_size=3)
launch(time.sleep, 3, world_size=3)
assert launch(os.getpid, world_size=3) == first, "a call that runs for long is not idle"
deadline = time.monotonic() + 15
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


def test_ranks_with_names_of_cells_stay_longer_and_their_end_is_told(quiet):
    cell = quiet.good("%%ranks --world-size 2\nimport os\nx = 5\nos.getpid()")
    pids = [int(pid) for pid in re.findall(r"\] (\d+)", cell.out)]
    others = [int(pid) for pid in re.findall(r"\d+", quiet.good("launch(os.getpid, world_size=2)").value)]
    assert len(pids) == len(others) == 2
    begin = time.monotonic()
    assert ended(others, 6) and all(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert quiet.good("%%ranks\nx").out == "[ranks 0,1] 5\n"
    assert ended(pids, 25) and time.monotonic() - begin > 4
    told, shown = quiet.good("%%ranks\n'x' in globals()").out.splitlines()
    assert shown == "[ranks 0,1] False"
    assert "names" in told and re.search("gone|lost|afresh", told) and "rank" in told, told
    assert quiet.good("%%ranks\nx = 6\nx").out == "[ranks 0,1] 6\n"
