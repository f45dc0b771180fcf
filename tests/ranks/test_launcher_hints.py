"""Promises about what a learner reads: the cause by name, what to do next, and no more lines than it takes."""

from __future__ import annotations

import re
import sys
import time
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from calls import failure, says

from course_utils import HangError, WorkerError, launch
from course_utils.ranks import collector, pool

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

# --- exceptions ----------------------------------------------------------------------------------------------------


def alone(n=0):
    return alone(n + 1)  # the learner's line


def test_a_recursion_without_end_is_told_in_few_lines():
    text = str(failure(WorkerError, alone))
    says(text, "RecursionError", "return alone(n + 1)  # the learner's line", re.compile(r"\d{3} more times"))
    assert text.count("\n") < 60


@pytest.mark.parametrize("work", [lambda: breakpoint(), lambda: input("name? ")], ids=["breakpoint", "input"])
def test_where_nobody_can_answer_a_rank_is_told_to_have_no_keyboard(work):
    assert "keyboard" in str(failure(WorkerError, work, world_size=2, post_mortem=True))


def test_ranks_that_ask_take_turns_and_the_time_out_stands_still(monkeypatch):
    clock, prompts = [0.0], []

    def answer(prompt):
        prompts.append(prompt)
        clock[0] += 1000  # seconds in which somebody thinks
        return prompt.upper()

    now = SimpleNamespace(monotonic=lambda: time.monotonic() + clock[0], sleep=time.sleep)
    monkeypatch.setattr(collector, "time", now)
    monkeypatch.setattr(collector, "input", answer, raising=False)
    monkeypatch.setattr(pool, "can_answer", lambda: True)
    both = launch(lambda: input("a? ") + input("b? "), world_size=2)
    assert both == [f"[RANK {r}] A? [RANK {r}] B? " for r in (0, 1)]
    own = [[prompt[-3:] for prompt in prompts if f"rank {r}" in prompt] for r in (0, 1)]
    assert own == [["a? ", "b? "]] * 2


# --- hangs ---------------------------------------------------------------------------------------------------------


def test_tags_that_differ_are_named():
    def work():
        x = torch.ones(3)
        if dist.get_rank() == 0:
            dist.send(x, dst=1, tag=11)
        else:
            dist.recv(x, src=0, tag=22)

    text = str(failure(HangError, work, world_size=2, timeout=4))
    fault = text.split("\n\n")[1]
    assert re.search(r"\btags?\b", fault) and re.search(r"\b11\b", fault) and re.search(r"\b22\b", fault), text


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
