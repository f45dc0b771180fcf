"""Promises about what a learner reads: the cause by name, what to do next, and no more lines than it takes."""

from __future__ import annotations

import importlib
import re
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from calls import all_is_well, failure, says
from conftest import missing
from kernels import Script, namespace

from course_utils import HangError, WorkerError, launch, shutdown
from course_utils.ranks import errors
from course_utils.ranks.call_signature import Passed

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

STUCK = 1.0  # seconds until a hang is called one


# --- exceptions ----------------------------------------------------------------------------------------------------


def alone(n=0):
    return alone(n + 1)  # the learner's line


def test_a_recursion_without_end_is_told_in_few_lines():
    text = str(failure(WorkerError, alone))
    says(text, "RecursionError", "return alone(n + 1)  # the learner's line", re.compile(r"\d{3} more times"))
    assert text.count("\n") < 60


def test_a_deep_traceback_is_told_in_few_lines_with_its_beginning_and_end(tmp_path, monkeypatch):
    lines = [f"def f{i}():\n    return f{i + 1}()\n" for i in range(200)]
    (tmp_path / "deep_down.py").write_text("".join(lines) + "def f200():\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = str(failure(WorkerError, importlib.import_module("deep_down").f0))
    assert "ZeroDivisionError" in text and "return 1 / 0" in text and "return f1()" in text
    assert text.count("\n") < 60


@pytest.mark.parametrize("how", ["breakpoint()", "set_trace"])
def test_a_debugger_on_a_rank_is_told_to_have_no_keyboard(how):
    def work():
        if how == "breakpoint()":
            breakpoint()
        else:
            import pdb

            pdb.set_trace()
        return 1

    text = str(failure(WorkerError, work, world_size=2))
    assert "keyboard" in text


# --- hangs ---------------------------------------------------------------------------------------------------------


def test_tags_that_differ_are_named():
    def work():
        x = torch.ones(3)
        if dist.get_rank() == 0:
            dist.send(x, dst=1, tag=11)
        else:
            dist.recv(x, src=0, tag=22)

    text = str(failure(HangError, work, world_size=2, timeout=STUCK))
    fault = text.split("\n\n")[1]
    assert re.search(r"\btags?\b", fault) and re.search(r"\b11\b", fault) and re.search(r"\b22\b", fault), text


def test_two_groups_of_the_same_ranks_can_be_told_apart():
    def work():
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        for group in (first, second) if dist.get_rank() == 0 else (second, first):
            dist.all_reduce(torch.ones(1), group=group)

    states = failure(HangError, work, timeout=STUCK, world_size=2).states
    names = [re.search(r"all_reduce #1 \((.*), 4 B\)", line)[1] for line in states]
    assert len(set(names)) == 2 and all("0,1" in name for name in names), states


def test_the_table_of_a_hang_says_what_its_numbers_count():
    def work():
        if dist.get_rank():
            dist.barrier()

    text = str(failure(HangError, work, timeout=STUCK))
    table, below = text.split("barrier #1", 1)[1], text.rstrip().splitlines()[-1]
    assert re.search(r"# counts all collectives of a group", table), text
    assert re.search(r"# counts all collectives of a group", below), "the table's last line"


# --- silent mistakes -----------------------------------------------------------------------------------------------


def another_reduction():
    dist.barrier()
    for _ in range(2):
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX if dist.get_rank() == 3 else dist.ReduceOp.SUM)


def another_type_of_the_same_size():
    dist.all_reduce(torch.ones(3, dtype=torch.int32 if dist.get_rank() == 3 else torch.float32))


@pytest.mark.parametrize(("work", "words"), [
    (another_reduction, ["SUM", "MAX"]), (another_type_of_the_same_size, ["int32", "float32"]),
])
def test_a_silent_mistake_is_told_once_after_the_call(work, words, capsys):
    launch(work, world_size=4)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Warning")]
    assert len(told) == 1, told
    says(told[0], "all_reduce", "rank 3", *words)


def test_what_is_alike_or_meant_to_differ_is_not_warned_of(capsys):
    def work():
        rank = dist.get_rank()
        x = torch.ones(4)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
            try:
                dist.all_reduce(x, op=op)
            except (RuntimeError, ValueError):
                continue
        dist.all_reduce(x.to(torch.int32))
        dist.all_reduce(x.to(torch.float64), op=dist.ReduceOp.MIN)
        dist.scatter(x, list(torch.ones(2, 4)) if rank == 0 else None, src=0)
        dist.gather(x, list(torch.ones(2, 4)) if rank == 0 else None, dst=0)
        dist.broadcast(x, src=0)
        dist.all_gather_object([None, None], rank * [3])
        dist.broadcast_object_list([rank])
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        net(torch.ones(1, 2)).sum().backward()

    launch(work, world_size=2)
    assert capsys.readouterr().out == ""


# --- surroundings --------------------------------------------------------------------------------------------------

FEW = """
from course_utils import launch
import torch.distributed as dist
for world_size in (16, 2):
    try:
        print("RESULT", len(launch(dist.get_rank, world_size=world_size, timeout=80)), flush=True)
    except Exception as error:
        print("ERROR", type(error).__name__, error, flush=True)
"""


def test_too_few_files_for_so_many_ranks_is_one_clear_message():
    with Script(FEW, prefix=["bash", "-c", 'ulimit -n 64; exec "$@"', "bash"]) as script:
        out = script.finish()
    assert "Traceback" not in out and "EOFError" not in out, out
    told = out.splitlines()
    assert len(told) == 2 and told[-1] == "RESULT 2", out
    assert told[0].startswith("ERROR RuntimeError") and re.search("Too many open files|ulimit", told[0]), out


def test_a_loopback_interface_that_is_down_is_named():
    prefix = namespace("n", "true") or missing("the right to make a network namespace")
    with Script(FEW.replace("(16, 2)", "(2,)"), prefix=prefix) as script:
        out = script.finish()
    assert out.startswith("ERROR") and "loopback" in out, out
    assert "[c10d]" not in out and "Traceback" not in out, out


def test_an_interface_that_does_not_exist_is_named_with_its_variable(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    shutdown()
    with pytest.raises((WorkerError, RuntimeError)) as caught:
        launch(dist.get_rank, world_size=2)
    assert "GLOO_SOCKET_IFNAME" in str(caught.value) and "eth9" in str(caught.value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    all_is_well(2)


@pytest.mark.parametrize(("reductions", "said"), [
    (("SUM", "MAX"), "all_reduce number 2 with different reductions (rank 0 SUM; rank 1 MAX)"),
    (("SUM", ""), ""),  # the reduction of a call is not always known
    (("SUM", "SUM"), ""),
])
def test_calls_that_differ_are_told_where_they_are_known_to_differ(reductions, said):
    calls = {
        rank: [Passed("all_reduce", "SUM"), Passed("all_reduce", reduction)]
        for rank, reduction in enumerate(reductions)
    }
    text = errors.silent_difference(calls)
    assert said in text and bool(text) == bool(said)
