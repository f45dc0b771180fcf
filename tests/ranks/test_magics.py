"""Promises of `%%ranks` and `%ranks_reset`, and of what a notebook says next to cells, in a real kernel."""

from __future__ import annotations

import re
import time

import pytest
import torch
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


def test_a_cell_runs_on_every_rank_and_equal_lines_are_merged(kernel):
    assert shown(kernel.good("%%ranks\nprint('hello')\nprint('I am', rank)")) == [
        "[ranks 0-3] hello",
        "[rank 0] I am 0",
        "[rank 1] I am 1",
        "[rank 2] I am 2",
        "[rank 3] I am 3",
    ]


def test_the_last_expression_is_shown_per_rank_and_merged_when_equal(kernel):
    assert shown(kernel.good("%%ranks\nrank // 2 * 10")) == ["[ranks 0,1] 0", "[ranks 2,3] 10"]
    assert shown(kernel.good("%%ranks\n'same'")) == ["[ranks 0-3] 'same'"]
    assert shown(kernel.good("%%ranks\nx = 1\ntorch.arange(3) * x")) == ["[ranks 0-3] tensor([0, 1, 2])"]
    assert shown(kernel.good("%%ranks\nNone")) == []
    assert shown(kernel.good("%%ranks\nx = 5")) == []


def test_namespace_and_groups_last_between_cells(kernel):
    kernel.good("%%ranks\nimport math\nclass Box:\n    pass\nbox = Box()\nbox.value = rank")
    kernel.good("%%ranks\ndef get():\n    return box.value")
    kernel.good("%%ranks\nbox.value += math.floor(10.5)")
    assert shown(kernel.good("%%ranks\nget()")) == [f"[rank {r}] {r + 10}" for r in range(4)]
    kernel.good("%%ranks\npair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]\nx = torch.tensor(rank)")
    kernel.good("%%ranks\ndist.all_reduce(x, group=pair)")
    assert shown(kernel.good("%%ranks\nx.item()")) == ["[ranks 0,1] 1", "[ranks 2,3] 5"]


def test_a_subset_of_ranks_runs_the_cell_and_the_others_keep_their_state(kernel):
    kernel.good("%%ranks\nx = 0")
    assert shown(kernel.good("%%ranks [0,2]\nx = 1\nprint('here')")) == ["[ranks 0,2] here"]
    assert shown(kernel.good("%%ranks [3]\nx = 2\nx")) == ["[rank 3] 2"]
    assert shown(kernel.good("%%ranks\nx")) == ["[ranks 0,2] 1", "[rank 1] 0", "[rank 3] 2"]


def test_world_size_is_chosen_by_the_option(kernel):
    assert shown(kernel.good("%%ranks --world-size 2\n(world_size, dist.get_world_size())")) == ["[ranks 0,1] (2, 2)"]
    other = shown(kernel.good("%%ranks --world-size=3\nworld_size"))
    assert other[-1] == "[ranks 0-2] 3" and "3 ranks instead of 2" in other[0]
    assert shown(kernel.good("%%ranks [0,2] --world-size 3\nrank")) == ["[rank 0] 0", "[rank 2] 2"]


@pytest.mark.parametrize(("code", "name", "words"), [
    ("\nif rank == 1:\n    raise ValueError('bad batch')  # mine\ndist.barrier()", "WorkerError",
     ["rank 1", "ValueError: bad batch", "raise ValueError('bad batch')  # mine"]),
    (" [0,1] --timeout 1\ndist.barrier()", "HangError", ["barrier", re.compile(r"ranks? 2")]),
], ids=["error", "hang-of-a-subset"])
def test_a_cell_that_fails_is_told_and_all_ranks_keep_their_state(kernel, code, name, words):
    kernel.good("%%ranks\nx = rank * 2")
    cell = kernel.run(f"%%ranks{code}")
    assert cell.error_name == name and "afresh" not in cell.out
    says(cell.error, *words)
    assert "course_utils" not in cell.error and "site-packages" not in cell.error
    assert shown(kernel.good("%%ranks\nx")) == [f"[rank {r}] {2 * r}" for r in range(4)]
    assert shown(kernel.good("%%ranks\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()")) == ["[ranks 0-3] 4.0"]


def test_a_dead_rank_is_told_and_the_next_cell_works(kernel):
    kernel.good("%%ranks\nimport os, signal")
    cell = kernel.run("%%ranks\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert cell.error_name == "WorkerError" and "rank 1" in cell.error and "SIGKILL" in cell.error
    assert shown(kernel.good("%%ranks\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()")) == ["[ranks 0-3] 4.0"]


def test_interrupt_returns_to_the_prompt_and_state_is_kept(kernel):
    kernel.good("%%ranks\nx = rank * 2")
    cell = kernel.start_until("%%ranks\nprint('ready')\nif rank:\n    dist.barrier()", "ready")
    time.sleep(0.3)
    kernel.interrupt(cell)
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


def test_ranks_reset_starts_afresh_and_draws_the_same_numbers_again(kernel):
    first = shown(kernel.good("%%ranks\nx = 1\ntorch.rand(1).item()"))
    kernel.good("%ranks_reset")
    assert shown(kernel.good("%%ranks\ntorch.rand(1).item()")) == first and len(first) == 4
    says(kernel.run("%%ranks\nx").error, "NameError", "'x'")


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


def test_figures_and_the_ledger_work_in_a_cell(kernel):
    cell = kernel.good("%%ranks [0]\nimport matplotlib.pyplot as plt\nplt.plot([0, 1])\nplt.show()")
    assert sum("image/png" in d for d in cell.displays) == 1
    cell = kernel.good("""%%ranks
from course_utils import record
with record() as ledger:
    dist.all_reduce(torch.ones(10))
ledger.count("all_reduce"), ledger.bytes()""")
    assert shown(cell) == ["[ranks 0-3] (1, 40)"]


@pytest.mark.parametrize(("code", "words"), [
    ("model.eval()", "model stands in the notebook; live ranks know what %%ranks cells have defined"),
    ("await nothing()", "Ranks have no event loop"),
    ("!ls", "Magics and shell commands work in the notebook only"),
])
def test_what_only_the_notebook_has_is_told(kernel, code, words):
    kernel.good("model = torch.nn.Linear(1, 1)")
    cell = kernel.run(f"%%ranks --world-size 2\n{code}")
    assert words in cell.error, cell


# --- what the notebook says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["hello()", "launch(hello())"])
def test_a_function_that_needs_ranks_called_in_the_notebook_is_shown_how(kernel, call):
    kernel.good("def hello():\n    return dist.get_rank() + 5")
    cell = kernel.run(call)
    assert cell.error_name
    assert (cell.error + cell.out + cell.err).count("launch(hello)") == 1, cell
    assert kernel.good("launch(hello, world_size=2)").value == "[5, 6]"


def test_a_function_that_needs_no_ranks_called_in_the_notebook_is_shown_how(kernel):
    kernel.good("def greet():\n    print('hi')")
    cell = kernel.run("launch(greet())")
    assert cell.error_name == "TypeError" and re.search(r"launch\(greet\)|without brackets", cell.error), cell


def test_other_errors_of_the_notebook_are_left_alone(kernel):
    kernel.good("def hello():\n    return 1 / 0")
    cell = kernel.run("hello()")
    assert cell.error_name == "ZeroDivisionError" and "launch" not in cell.error + cell.out + cell.err


def test_device_is_a_value_and_a_function_in_a_cell_on_ranks(kernel):
    cell = kernel.good("""%%ranks --world-size 2
x = torch.ones(2, device=device)
y = torch.zeros(2).to(device)
x.device.type, y.device.type, device.type, str(device), device == torch.device("cpu"), device().type, str(device())""")
    gpu = torch.cuda.device_count() >= 2
    if not gpu:
        assert cell.out == "[ranks 0,1] ('cpu', 'cpu', 'cpu', 'cpu', True, 'cpu', 'cpu')\n"
    cell = kernel.good("%%ranks\nfrom course_utils import device\ntorch.ones(2, device=device()).sum().item()")
    assert cell.out == "[ranks 0,1] 2.0\n"
