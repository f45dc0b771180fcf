"""Promises of `%%ranks` and of what a notebook says next to cells, in a real kernel; lesson 00 runs the rest."""

from __future__ import annotations

import os
import re
import time

import pytest
from calls import says
from kernels import Kernel

pytestmark = pytest.mark.guard(90)


@pytest.fixture(scope="module")
def shared():
    with Kernel() as kernel:
        kernel.good("%load_ext course_utils")
        kernel.good("import torch\nimport torch.distributed as dist\nfrom course_utils import launch")
        yield kernel


@pytest.fixture
def kernel(shared):
    """Every test starts with fresh ranks."""
    shared.good("%ranks_reset")
    return shared


def shown(cell) -> list[str]:
    """The labelled lines of a cell, whether printed or displayed."""
    text = cell.out + "".join(d.get("text/plain", "") + "\n" for d in cell.displays)
    return [line for line in text.splitlines() if line]


def test_namespace_and_groups_last_between_cells(kernel):
    kernel.good("%%ranks\nimport math\nclass Box:\n    pass\nbox = Box()\nbox.value = rank")
    kernel.good("%%ranks\ndef get():\n    return box.value")
    kernel.good("%%ranks\nbox.value += math.floor(10.5)")
    assert shown(kernel.good("%%ranks\nget()")) == [f"[rank {r}] {r + 10}" for r in range(4)]
    kernel.good("%%ranks\npair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]\nx = torch.tensor(rank)")
    kernel.good("%%ranks\ndist.all_reduce(x, group=pair)")
    assert shown(kernel.good("%%ranks\nx.item()")) == ["[ranks 0,1] 1", "[ranks 2,3] 5"]


def test_world_size_is_chosen_by_the_option(kernel):
    assert shown(kernel.good("%%ranks --world-size 2\n(world_size, dist.get_world_size())")) == ["[ranks 0,1] (2, 2)"]
    other = shown(kernel.good("%%ranks --world-size=3\nworld_size"))
    assert other[-1] == "[ranks 0-2] 3" and "3 ranks instead of 2" in other[0]
    assert shown(kernel.good("%%ranks [0,2] --world-size 3\nrank")) == ["[rank 0] 0", "[rank 2] 2"]


def test_a_hang_of_some_ranks_is_told_and_all_keep_their_state(kernel):
    kernel.good("%%ranks\nx = rank * 2")
    cell = kernel.run("%%ranks [0,1] --timeout 1\ndist.barrier()")
    assert cell.error_name == "HangError" and "afresh" not in cell.out
    says(cell.error, "barrier", re.compile(r"ranks? 2"))
    assert "course_utils" not in cell.error and "site-packages" not in cell.error
    assert shown(kernel.good("%%ranks\nx")) == [f"[rank {r}] {2 * r}" for r in range(4)]
    assert shown(kernel.good("%%ranks\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()")) == ["[ranks 0-3] 4.0"]


AFRESH = r"rank 1\b[^\n]*\bstarts? afresh[^\n]*names"


def test_a_cell_says_which_rank_starts_afresh_without_its_names(kernel):
    kernel.good("%%ranks --world-size 3\nimport sys, time\nx = rank * 2")
    body = "    while True:\n        try: time.sleep(1000)\n        except BaseException: pass"
    cell = kernel.run(f"%%ranks --timeout 1\nif rank == 1:\n{body}\ndist.barrier()")
    assert cell.error_name == "HangError"
    after = kernel.good("%%ranks\nprint(globals().get('x', 'no x'))\nsum = torch.ones(1)\ndist.all_reduce(sum)\nsum")
    told = cell.out + cell.error + after.out
    assert len(re.findall(AFRESH, told)) == 1, told
    assert not re.search(r"ranks? [02]\b[^\n]*afresh", told), told
    for line in ("[rank 0] 0", "[rank 1] no x", "[rank 2] 4", "[ranks 0-2] tensor([3.])"):
        assert line in after.out
    assert "afresh" not in kernel.good("%%ranks\nrank").out


def test_interrupt_returns_to_the_prompt_and_state_is_kept(kernel):
    kernel.good("%%ranks\nx = rank * 2")
    waits = "if rank:\n    meet = dist.barrier(async_op=True)\n    print('ready')\n    meet.wait()"
    cell = kernel.interrupt(kernel.start_until(f"%%ranks\n{waits}", "ready"))
    assert cell.error_name == "Interrupted" and "barrier" in cell.error
    assert shown(kernel.good("%%ranks\nx")) == [f"[rank {r}] {2 * r}" for r in range(4)]
    assert shown(kernel.good("%%ranks\ndist.barrier()\n'fine'")) == ["[ranks 0-3] 'fine'"]


def test_a_cell_on_ranks_can_ask_and_be_examined_and_no_breakpoint_is_left(kernel):
    cell = kernel.talk(
        "%%ranks [1] --world-size 2 --post-mortem\nname = input('name? ')\nbreakpoint()\nx = 7\ny = x / 0",
        "ann", "b 5", "c", "c", "p x, name", "q",
    )
    says(cell.out, "-> x = 7\n", "-> y = x / 0\nrank 1 failed: ZeroDivisionError", "(7, 'ann')")
    assert cell.asked[0] == "[rank 1] name? " and cell.error_name == "WorkerError"
    assert shown(kernel.good("%%ranks [1]\nimport sys\nname, sys.gettrace()")) == ["[rank 1] ('ann', None)"]


def test_launch_and_ranks_do_not_disturb_each_other(kernel):
    kernel.good("%%ranks\nx = torch.tensor(rank)\ntorch.manual_seed(3)\na = torch.rand(1).item()")
    kernel.good("def f():\n    global x\n    x = 'other'\n    dist.destroy_process_group()\nlaunch(f, world_size=4)")
    assert "WorkerError" in kernel.run("def g():\n    raise ValueError\nlaunch(g, world_size=4)").error
    assert shown(kernel.good("%%ranks\ndist.all_reduce(x)\nx.item()")) == ["[ranks 0-3] 6"]
    # the ranks of %%ranks go on drawing where they were; a seed is set once, not per cell
    assert shown(kernel.good("%%ranks\nb = torch.rand(1).item()\na == b")) == ["[ranks 0-3] False"]
    assert kernel.good("launch(lambda: 'x' in globals(), world_size=2)").value == "[False, False]"


def test_a_syntax_error_is_shown_once_and_nothing_hangs(kernel):
    cell = kernel.run("%%ranks\nprint('never')\nx = = 1")
    assert "SyntaxError" in cell.error_name + cell.error
    assert cell.error.count("invalid syntax") <= 2 and "never" not in cell.out
    assert shown(kernel.good("%%ranks\n1")) == ["[ranks 0-3] 1"]


def test_a_bad_magic_line_is_refused_with_the_reason(kernel):
    for line, word in {"[9]": "9", "--world-size many": "many", "--no-such-option": "no-such-option"}.items():
        cell = kernel.run(f"%%ranks {line}\nprint('it ran')")
        text = cell.error + cell.err
        assert word in text and "it ran" not in cell.out and "course_utils/" not in text, text
    assert shown(kernel.good("%%ranks\n1")) == ["[ranks 0-3] 1"]


@pytest.mark.parametrize(("code", "words"), [
    ("model.eval()", "model stands in the notebook; live ranks know what %%ranks cells have defined"),
    ("await nothing()", "Ranks have no event loop"),
    ("!ls", "Magics and shell commands work in the notebook only"),
])
def test_what_only_the_notebook_has_is_told(kernel, code, words):
    kernel.good("model = torch.nn.Linear(1, 1)")
    cell = kernel.run(f"%%ranks --world-size 2\n{code}")
    assert words in cell.error, cell


def test_an_edit_is_told_where_ranks_keep_the_names_of_cells(kernel):
    file = kernel.folder / "lib1.py"
    file.write_text("X = 1\n")
    os.utime(file, (time.time() - 10,) * 2)
    kernel.good("%%ranks --world-size 2\nimport lib1\nkept = 5")
    file.write_text("X = 22\n")
    told, *lines = kernel.good("%%ranks\nlib1.X, kept").out.splitlines()
    assert lines == ["[ranks 0,1] (1, 5)"]
    assert told == "edited since the ranks imported it: lib1.py; %ranks_reset lets them import it again"
    kernel.good("%ranks_reset")
    assert kernel.good("%%ranks --world-size 2\nimport lib1\nlib1.X").out == "[ranks 0,1] 22\n"


def test_with_autoreload_ranks_have_what_the_notebook_has(kernel):
    file = kernel.folder / "auto1.py"
    file.write_text("def answer():\n    return 1\n")
    kernel.good("%load_ext autoreload\n%autoreload 2\nimport auto1")
    assert kernel.good("auto1.answer(), launch(auto1.answer, world_size=2)").value == "(1, [1, 1])"
    file.write_text("def answer():\n    return 22\n")
    os.utime(file, (time.time() + 22,) * 2)
    assert kernel.good("auto1.answer(), launch(auto1.answer, world_size=2)").value == "(22, [22, 22])"
    kernel.good("%autoreload 0")


# --- what the notebook says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "call", "advice"), [
    ("return dist.get_rank() + 5", "f()", "launch(f)"), ("return dist.get_rank() + 5", "launch(f())", "launch(f)"),
    ("print('hi')", "launch(f())", "without brackets"), ("return 1 / 0", "f()", None),
])
def test_a_function_for_ranks_called_in_the_notebook_is_shown_how_and_other_errors_are_left_alone(
    kernel, body, call, advice
):
    kernel.good(f"def f():\n    {body}")
    cell = kernel.run(call)
    said = cell.error + cell.out + cell.err
    assert cell.error_name and (said.count(advice) == 1 if advice else "launch" not in said), cell
