"""Whatever an answer does, its check says something about the answer, and the next check works."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from course_utils import launch, shutdown
from course_utils.check import CheckFailed, runs
from course_utils.check import limits as _limits
from lessons.collectives import check as collectives
from lessons.gpu_interconnects import check as interconnects

pytestmark = pytest.mark.guard(120)


def refusal(check, answer) -> CheckFailed:
    """What the check says, once it is known that the next right answer passes: on ranks, or on paper."""
    with pytest.raises(CheckFailed) as caught:
        check(answer)
    right = check.answer() if hasattr(check, "answer") else check.formula
    check(right)
    text = str(caught.value)
    assert "course_utils" not in text and "site-packages" not in text, text
    return caught.value


# --- hanging, slow and endless are three things ----------------------------------------------------------------------


def test_ranks_that_wait_for_each_other_hang_without_a_wait_for_the_clock():
    def only_rank_0(x):
        if dist.get_rank() == 0:
            dist.all_reduce(x)
        return x.mean(), x.var()

    error = refusal(collectives.mean_and_variance, only_rank_0)
    assert error.hint == "hang" and "never joined it" in str(error)


def test_a_loop_without_end_on_a_rank_is_endless_and_no_hang(monkeypatch):
    monkeypatch.setattr(runs, "COMPUTING", 2.0)

    def endless(x):
        while dist.get_rank() == 0:
            pass
        dist.barrier()

    error = refusal(collectives.mean_and_variance, endless)
    assert error.hint == "slow" and "a rank computes without end" in str(error) and "while dist" in str(error)


def test_an_answer_that_sleeps_is_slow_and_no_hang(monkeypatch):
    monkeypatch.setattr(runs, "LIMIT", 4.0)

    def sleeps(x):
        if dist.get_rank() == 0:
            time.sleep(1000)
        dist.barrier()

    error = refusal(collectives.mean_and_variance, sleeps)
    assert error.hint == "slow" and "time.sleep(1000)" in str(error)


def test_a_right_answer_that_takes_its_time_passes(capsys):
    right = collectives.mean_and_variance.answer()

    def late(x):
        if (dist.get_rank(), dist.get_world_size()) == (0, 2) and x.mean() > 1000:  # one case of many
            time.sleep(6)  # longer than ranks may rest that all wait
        return right(x)

    collectives.mean_and_variance(late)
    assert "Exercise 1 passed" in capsys.readouterr().out


def test_a_loop_without_end_in_the_notebook_is_ended(monkeypatch):
    monkeypatch.setattr(_limits, "COMPUTING", 1.0)

    def endless(*_arguments):
        while True:
            pass

    assert refusal(interconnects.roofline_point, endless).hint == "endless"


# --- odd answers -----------------------------------------------------------------------------------------------------


def divides_by_zero(*_arguments):
    return 1 / 0


def takes_too_few():
    return 1.0


def leaves(*_arguments):
    sys.exit(0)


@pytest.mark.parametrize("answer", [divides_by_zero, takes_too_few, leaves, 3, None])
def test_a_paper_answer_that_fails_is_refused_with_its_error(answer):
    error = refusal(interconnects.roofline_point, answer)
    assert error.hint == "error"


class Odd:
    def __eq__(self, other):
        raise RuntimeError("not comparable")

    def __float__(self):
        raise RuntimeError("no number")

    shape = property(lambda self: divides_by_zero())


ODD = [Odd(), [Odd()] * 3, {}, "text", torch.ones(2, device="meta"), float("nan"), (None,) * 3]


@pytest.mark.parametrize("result", ODD)
def test_an_odd_result_is_refused_and_never_an_error_of_the_check(result):
    refusal(interconnects.roofline_point, lambda *_arguments: result)


def test_an_odd_result_of_ranks_is_refused_and_never_an_error_of_the_check():
    refusal(collectives.mean_and_variance, lambda x: torch.empty(2, device="meta"))
    refusal(collectives.mean_and_variance, lambda x: ("odd", {}))


def test_an_answer_that_ends_its_process_is_refused():
    for leave in (lambda x: sys.exit(0), lambda x: sys.exit("enough"), lambda x: os._exit(3)):
        assert refusal(collectives.mean_and_variance, leave).hint == "error"


@pytest.mark.parametrize("given_up", ["", "\"sum\" not implemented for 'Half'"])
def test_an_answer_that_gives_up_later_is_not_called_empty(given_up):
    right = collectives.mean_and_variance.answer()

    def two_only(x):
        if dist.get_world_size() > 2 or given_up:
            raise NotImplementedError(given_up)
        return right(x)

    assert refusal(collectives.mean_and_variance, two_only).hint != "empty"


# --- what an answer leaves behind ------------------------------------------------------------------------------------


def test_a_replaced_function_does_not_reach_the_next_check():
    def patch(x):
        dist.all_reduce = lambda *args, **kwargs: None
        dist.Work.wait = lambda *args: None
        return x.mean(), x.var()

    refusal(collectives.mean_and_variance, patch)


def test_ranks_that_do_not_start_are_no_fault_of_the_answer(monkeypatch):
    shutdown()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    with pytest.raises(CheckFailed) as caught:
        collectives.mean_and_variance(collectives.mean_and_variance.answer())
    assert caught.value.hint == "not-started" and "eth9" in str(caught.value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert launch(dist.get_rank, world_size=2) == [0, 1]
    collectives.mean_and_variance(collectives.mean_and_variance.answer())


def test_a_long_line_of_the_learners_is_cut_in_the_table():
    answer = eval("lambda x: (dist.barrier() if dist.get_rank() else None, " + " + ".join(["x"] * 200) + ")")
    text = str(refusal(collectives.mean_and_variance, answer))
    assert max(map(len, text.splitlines())) < 220
