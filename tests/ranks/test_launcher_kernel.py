"""Promises of `launch` that only a real kernel can show: cells, live streams, figures, interrupt, restart, kill."""

from __future__ import annotations

import re
import time

import pytest
from calls import says
from kernels import Kernel, left_behind, marked

pytestmark = pytest.mark.guard(120)

IMPORTS = """
import os, threading, time
import torch
import torch.distributed as dist
from course_utils import HangError, WorkerError, launch
"""
NEXT = "launch(lambda: dist.get_rank() + 5, world_size=2)"


@pytest.fixture(scope="module")
def kernel():
    with Kernel() as kernel:
        kernel.good(IMPORTS)
        yield kernel


def works(kernel: Kernel) -> None:
    assert kernel.good(NEXT).value == "[5, 6]"


# --- cells ---------------------------------------------------------------------------------------------------------


def test_functions_and_classes_of_other_cells_reach_the_ranks_the_newest_ones_and_come_back(kernel):
    kernel.good("scale = 3\ndef helper(x):\n    return scale * x")
    kernel.good("class Net(torch.nn.Module):\n    def forward(self, x):\n        return helper(x) + dist.get_rank()")
    assert kernel.good("launch(lambda: Net()(torch.ones(1)).item(), world_size=2)").value == "[3.0, 4.0]"
    kernel.good("def helper(x):\n    return -x")
    assert kernel.good("launch(lambda: Net()(torch.ones(1)).item(), world_size=2)").value == "[-1.0, 0.0]"
    kernel.good("from dataclasses import dataclass\n@dataclass\nclass Report:\n    rank: int")
    code = "reports = launch(lambda: Report(dist.get_rank()), world_size=2)\nreports == [Report(0), Report(1)]"
    assert kernel.good(code).value == "True"


def test_a_cell_that_awaits_and_a_thread_can_launch(kernel):
    assert kernel.good(f"import asyncio\nawait asyncio.sleep(0)\n{NEXT}").value == "[5, 6]"
    kernel.good(f"got = []\nthread = threading.Thread(target=lambda: got.append({NEXT}))")
    kernel.good("thread.start()\nthread.join()")
    assert kernel.good("got").value == "[[5, 6]]"


# --- output --------------------------------------------------------------------------------------------------------


def test_output_reaches_the_cell_live_and_merged(kernel):
    """The ranks go on only once their first line has been seen in the cell."""
    cell = kernel.start_until(
        """
def work():
    print("first")
    while not os.path.exists("seen"):
        time.sleep(0.01)
    print("second", dist.get_rank())
launch(work, world_size=2);
""",
        "[ranks 0,1] first\n",
    )
    assert "second" not in cell.out
    (kernel.folder / "seen").touch()
    kernel.pump(cell)
    assert cell.out == "[ranks 0,1] first\n[rank 0] second 0\n[rank 1] second 1\n"
    assert not cell.err


def test_figures_and_displayed_objects_show_in_the_notebook(kernel):
    kernel.good("import matplotlib.pyplot as plt")
    cell = kernel.good("""
def draw():
    from IPython.display import HTML, Markdown, display
    if dist.get_rank() == 0:
        fig, ax = plt.subplots()
        ax.plot([0, 1])
        plt.show()
    display(HTML(f"<b>rank {dist.get_rank()}</b>"))
launch(draw, world_size=2);
""")
    figures = [d for d in cell.displays if "image/png" in d]
    pages = [d["text/html"] for d in cell.displays if "text/html" in d]
    assert len(figures) == 1 and len(figures[0]["image/png"]) > 1000
    assert sorted(pages) == ["<b>rank 0</b>", "<b>rank 1</b>"]
    assert "Figure(" not in cell.out and not cell.err


def test_by_rank_adds_a_fold_for_each_with_its_text_and_figures(kernel):
    cell = kernel.good("""
def work():
    import matplotlib.pyplot as plt
    print("<begin>")
    if dist.get_rank() == 1:
        plt.plot([0, 1])
        plt.show()
    print("end of", dist.get_rank())
launch(work, world_size=2, by_rank=True);
""")
    assert cell.out.startswith("[ranks 0,1] <begin>\n") and cell.out.endswith("[rank 1] end of 1\n")
    zero, one = cell.displays[-1]["text/html"].split("</details>")[:2]
    assert "rank 0: 2 lines" in zero and "&lt;begin&gt;\nend of 0" in zero and "rank 1" not in zero
    assert "rank 1: 3 lines" in one and f'base64,{cell.displays[0]["image/png"]}"' in one and "end of 1" in one


# --- a keyboard for ranks ------------------------------------------------------------------------------------------


def test_breakpoint_stops_in_the_cells_prompt_and_shows_the_learners_frames_only(kernel):
    """To the function's end, which is also the debugger's."""
    cell = kernel.talk(
        """
def work():
    print("before", dist.get_rank())
    x = torch.ones(2)
    if dist.get_rank() == 1:
        breakpoint()
    dist.all_reduce(x)
    return x.tolist()
launch(work, world_size=2)
""",
        "p x * 5", "w", "n", "n", "p x", "n", "n",
    )
    assert cell.value == "[[2.0, 2.0], [2.0, 2.0]]" and set(cell.asked) == {"(Pdb rank 1) "} and not cell.answers[1:]
    stop = r"> cell \[\d+\], line 6, in work\n-> dist.all_reduce\(x\)\n"
    assert re.search(rf"\[rank 1\] before 1\n(.*\n)*{stop}tensor\(\[5., 5.\]\)\n{stop}", cell.out), cell.out
    says(cell.out, "no time-out runs", "tensor([2., 2.])")
    assert not re.search(r"course_utils|multiprocessing|/", cell.out), cell.out


EXAMINED = """
def scaled(x, k):
    return x @ torch.ones(k)
def work():
    name = "a"
    if dist.get_rank() == 1:
        scaled(torch.ones(2, 3), 5)
    dist.barrier()
launch(work, world_size=2, post_mortem=True)
"""


def test_a_rank_that_fails_can_be_examined_where_it_stands_and_then_the_error_comes(kernel):
    cell = kernel.talk(EXAMINED, "p k", "u", "p name", "u", "q")
    says(cell.out, "rank 1 failed: RuntimeError", "-> return x @ torch.ones(k)\n5\n", "'a'", "Oldest frame")
    assert cell.error_name == "WorkerError"
    says(cell.error, "return x @ torch.ones(k)", re.compile(r"0 +waits +barrier"))
    works(kernel)


ASKS = "def work():\n    {asks}\n    dist.barrier()\nlaunch(work, world_size=2)"


@pytest.mark.parametrize(("asks", "answers", "states"), [
    ("breakpoint()", ["p 1", None], ["asks"]), ("if dist.get_rank(): input('name? ')", [None], ["asks", "waits"]),
    ("breakpoint()", ["q", "q"], ["quit"]),
], ids=["stop in pdb", "stop at input", "q"])
def test_the_stop_button_and_q_end_the_call(kernel, asks, answers, states):
    cell = kernel.talk(ASKS.format(asks=asks), *answers)
    assert cell.error_name == "Interrupted"
    says(cell.error, *states)
    works(kernel)


# --- errors as a learner sees them ---------------------------------------------------------------------------------


FAILS = """
def step(x):
    return x.view(7)  # the wrong shape

def train():
    if dist.get_rank() == 1:
        step(torch.ones(3))
    dist.barrier()

launch(train, world_size=2)
"""
HANGS = """
def train():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1000))  # alone
launch(train, world_size=2, timeout=4)
"""


@pytest.mark.parametrize(("code", "name", "words"), [
    (FAILS, "WorkerError", ["rank 1", "return x.view(7)  # the wrong shape", "step(torch.ones(3))", "RuntimeError"]),
    (HANGS, "HangError", ["rank 1", "all_reduce", "dist.all_reduce(torch.ones(1000))  # alone", "4 kB"]),
    ("launch(print, world_size=0)", "ValueError", ["world_size"]),
])
def test_an_error_shows_the_learners_line_and_no_frame_of_the_package(kernel, code, name, words):
    cell = kernel.run(code)
    assert cell.error_name == name
    says(cell.error, *words)
    for foreign in ("course_utils", "site-packages", "/tmp", "ipykernel_", "multiprocessing", "cloudpickle"):
        assert foreign not in cell.error, cell.error
    assert len(cell.error.splitlines()) < 40
    works(kernel)


# --- interrupt -----------------------------------------------------------------------------------------------------

STUCK = {
    "skips": "if dist.get_rank() == 0: dist.all_reduce(torch.ones(1))",
    "floods": 'while dist.get_rank() == 0: os.write(1, b"." * 1000)\n    dist.barrier()',
    "computes": "sum(range(10**12))",
}


@pytest.mark.parametrize(("how", "times"), [("skips", 1), ("floods", 1), ("computes", 3)])
def test_interrupts_stop_the_ranks_and_return_to_the_prompt(kernel, how, times):
    program = f"def stuck():\n    print('ready')\n    {STUCK[how]}\nlaunch(stuck, world_size=2, timeout=1000)"
    cell = kernel.start_until(program, "ready")
    for _ in range(times):
        kernel.manager.interrupt_kernel()
        time.sleep(0.05)
    kernel.pump(cell)
    assert "Interrupt" in cell.error_name and (times > 1 or "rank" in cell.error)
    assert "course_utils" not in cell.error and "site-packages" not in cell.error, cell.error
    time.sleep(0.2)  # the last of them has come
    works(kernel)


def test_an_interrupt_in_any_moment_of_a_cold_start_does_no_harm():
    with Kernel() as fresh:
        for delay in (0.1, 1.0):
            code = "import time\nprint('begin')\nfrom course_utils import launch\nlaunch(time.sleep, 99, timeout=99)"
            cell = fresh.start_until(code, "begin")
            time.sleep(delay)
            fresh.interrupt(cell)
            assert cell.error_name in ("Interrupted", "KeyboardInterrupt")
        fresh.good(IMPORTS)
        works(fresh)


# --- restart, kill --------------------------------------------------------------------------------------------------

BUSY = """
def work():
    print("ready")
    dist.barrier()
    if dist.get_rank() == 0:
        sum(range(10**12))
    elif dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()
launch(work, world_size=3, timeout=1000)
"""


def test_a_kernel_that_is_restarted_or_killed_leaves_nothing_and_a_new_one_works():
    """Restarted while its server starts, and killed in a call. A script that is idle: `test_launcher_leftovers.py`."""
    with Kernel() as kernel:
        kernel.start_until("print('now', flush=True)\nfrom course_utils import launch\nlaunch(print)", "now")
        time.sleep(0.3)
        before = {p.pid for p in marked(kernel.mark)}
        kernel.restart()
        while before & {p.pid for p in marked(kernel.mark)}:
            time.sleep(0.05)
        kernel.good(IMPORTS)
        works(kernel)
        kernel.start_until(BUSY, "ready")
        assert len(marked(kernel.mark)) > 3
        kernel.kill()
        assert not left_behind(kernel.mark, kernel.temporary)
