"""What checks of exercises are made of: limits on what is sent, failures of ranks, steps, problems for paper, edits."""

from __future__ import annotations

import re
import sys
import threading
from fractions import Fraction

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_utils import Entry
from course_utils.check import (
    CheckFailed,
    Exercise,
    close,
    crosses,
    fault,
    message_steps,
    number,
    paper,
    whole_number,
    whole_numbers,
)
from course_utils.check.edits import EditError, edited
from lessons.collectives import check as collectives

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


def refusal(do, *args, **kwargs) -> CheckFailed:
    with pytest.raises(CheckFailed) as caught:
        do(*args, **kwargs)
    return caught.value


# --- what a ledger says ----------------------------------------------------------------------------------------------


def ledger(*calls: str, ranks: int = 4) -> list[Entry]:
    """Entries from words such as ``all_reduce:80``; each is a call of all ranks, or a message."""
    parts = (call.split(":") for call in calls)
    return [Entry(op, "default", int(size), None, tuple(range(ranks)), 1, 0.0) for op, size in parts]


@pytest.mark.parametrize(
    ("calls", "limits", "hint"),
    [
        ("all_reduce:80 barrier:0", {"ops": {"all_reduce"}}, None),
        ("all_reduce:80 broadcast:8", {"ops": {"all_reduce"}}, "other-calls"),
        ("all_reduce:80 all_reduce:8", {"calls": 1}, "too-many-calls"),
        ("all_reduce:80", {"calls": (2, None)}, "too-few-calls"),
        ("barrier:0", {"calls": (1, None)}, "not-distributed"),
        ("send:8 recv:8 recv:8", {"calls": {"send": 1}}, None),
        ("send:8 recv:8 recv:8", {"calls": {"send": 1, "recv": 1}}, "too-many-calls"),
        ("send:40 recv:40", {"sent": (40, 40)}, None),
        ("send:41 recv:1", {"sent": 40}, "too-many-bytes"),
        ("send:39 recv:60", {"sent": (40, None)}, "too-few-bytes"),
        ("all_reduce:80", {"sent": (120, 120)}, None),
        ("all_reduce:80", {"sent": 118}, "too-many-bytes"),
        ("all_reduce:80 send:8 recv:8", {"carried": (88, 88)}, None),
        ("all_reduce:80 send:8", {"carried": 80}, "too-many-bytes"),
        ("send:8 send:9", {"largest": 8}, "too-large"),
        ("send:8 send:8", {"largest": 8}, None),
    ],
)
def test_what_is_beyond_the_limits_is_found_in_a_ledger(calls, limits, hint):
    assert fault(ledger(*calls.split()), **limits)[0] == (hint or "")


def test_each_finding_gets_the_key_that_it_is_given():
    both, keys = ledger("send:8", "broadcast:8"), {"broadcast": "hub", "send": "messages", "too_many_bytes": "wide"}
    assert fault(both, {"all_reduce"}, **keys)[0] == "hub"
    assert fault(both, {"all_reduce"}, **dict(reversed(keys.items())))[0] == "messages"
    assert fault(ledger("gather:8"), {"all_reduce"}, **keys)[0] == "other-calls"
    assert fault(ledger("all_reduce:8"), carried=7, **keys)[0] == "wide"


def test_entries_between_nodes_are_told_from_those_inside():
    inside, across = Entry("send", "", 8, 1, (), 1, 0.0), Entry("send", "", 8, 2, (), 1, 0.0)
    assert [crosses(entry, 0, 2) for entry in (inside, across)] == [False, True]
    group = [Entry("all_reduce", "", 8, None, ranks, 1, 0.0) for ranks in ((2, 3), (1, 3))]
    assert [crosses(entry, 3, 2) for entry in group] == [False, True]


# --- failures of ranks -----------------------------------------------------------------------------------------------


def test_refusal_names_exercise_ranks_and_both_values():
    with pytest.raises(CheckFailed) as caught:
        collectives.ring_shift(collectives.ring_shift.answer(collectives.MISTAKES["ring_shift"]["direction"][1]))
    text = str(caught.value)
    assert text.startswith("Exercise 2, 3 ranks, x float32 of shape (6, 2), shifted by 1, rank 0: the result is wrong.")
    assert re.search(r"expected  shape \(6, 2\): [-\d.]+, .*\n  got       shape \(6, 2\): [-\d.]+, ", text)


def test_a_message_to_itself_is_laid_to_the_single_rank():
    def answer(x):
        other = (dist.get_rank() + 1) % dist.get_world_size()
        message = dist.isend(x, other)
        dist.recv(torch.empty_like(x), other)
        message.wait()

    exercise = Exercise("Exercise 1", {}, 1.0)
    exercise.run(answer, [torch.ones(2)] * 2)
    assert refusal(exercise.run, answer, [torch.ones(2)]).hint == "one-rank"


def after_two_ranks(answer, fallback: str | None = None, errors: str | None = None) -> str:
    exercise = Exercise("Exercise 1", {"odd-sizes": "Sizes differ."}, 1.0)
    exercise.run(answer, [torch.ones(2)] * 2)
    return refusal(exercise.run, answer, [torch.ones(2)] * 3, fallback=fallback, errors=errors).hint


def fails_with(error: Exception):
    def answer(x):
        if dist.get_world_size() == 3:
            raise error

    return answer


def too_long_a_message(x):
    if dist.get_world_size() == 3:
        dist.send(x.double(), 1) if dist.get_rank() == 0 else dist.recv(x, 0)


def waits_in(call):
    def answer(x):
        if dist.get_world_size() == 3 and dist.get_rank() == 0:
            call(x)

    return answer


@pytest.mark.parametrize(
    ("answer", "usual", "own"),
    [
        (fails_with(IndexError("list index out of range")), "only-two-ranks", "odd-sizes"),
        (fails_with(ValueError("there is no rank 3")), "only-two-ranks", "odd-sizes"),
        (fails_with(RuntimeError("shape '[3, -1]' is invalid for input of size 7")), "only-two-ranks", "odd-sizes"),
        (fails_with(ZeroDivisionError("division by zero")), "error", "error"),
        (too_long_a_message, "only-two-ranks", "odd-sizes"),
        (waits_in(lambda x: dist.recv(x, 1)), "only-two-ranks", "odd-sizes"),
        (waits_in(dist.all_reduce), "hang", "odd-sizes"),
    ],
)
def test_only_failures_about_what_differs_are_laid_to_it(answer, usual, own):
    assert after_two_ranks(answer) == usual
    assert after_two_ranks(answer, "odd-sizes") == own


def test_fallback_of_a_case_explains_the_errors_that_the_case_names():
    absent = AttributeError("'NoneType' object has no attribute 'detach'")
    assert after_two_ranks(fails_with(absent), "odd-sizes") == "error"
    assert after_two_ranks(fails_with(absent), "odd-sizes", "NoneType") == "odd-sizes"
    assert after_two_ranks(fails_with(absent), None, "NoneType") == "error"
    assert after_two_ranks(fails_with(RuntimeError("inputShape[0] is wrong")), "odd-sizes") == "odd-sizes"


# --- steps -----------------------------------------------------------------------------------------------------------


def steps_of(fn, n: int = 2) -> int:
    outcomes = Exercise("Exercise 1", {}).run(fn, [torch.ones(3)] * n)
    return message_steps([outcome.ledger for outcome in outcomes])


def posted_first(x):
    """Three round trips; rank 0 posts each receive before its send."""
    for _ in range(3):
        if dist.get_rank() == 0:
            answer = dist.irecv(torch.empty_like(x), 1)
            dist.send(x, 1)
            answer.wait()
        else:
            dist.recv(x, 0)
            dist.send(x, 0)


def sent_in_a_thread(x):
    """Three exchanges; each sends in a thread and receives meanwhile, or after its receive has ended."""
    other = 1 - dist.get_rank()
    for _ in range(3):
        thread = threading.Thread(target=dist.send, args=(x, other))
        thread.start()
        dist.recv(torch.empty_like(x), other)
        thread.join()


def test_a_send_in_a_thread_waits_for_no_receive_of_its_step():
    assert steps_of(sent_in_a_thread) == 3


def test_a_receive_counts_where_it_is_waited_for():
    assert steps_of(posted_first) == 6


def ledgers(*ranks: str) -> list[list[Entry]]:
    """Ledgers from text: ``s1 r2`` is a send to rank 1, then a receive from rank 2."""
    names = {"s": "send", "r": "recv"}
    return [[Entry(names[word[0]], "default", 8, int(word[1]), (), 1, 0.0) for word in text.split()] for text in ranks]


@pytest.mark.parametrize(
    ("ranks", "steps"),
    [
        (("s1", "r0"), 1),
        (("s1 s2 s3", "r0", "r0", "r0"), 3),  # hub
        (("r1 r2 r3", "s0", "s0", "s0"), 3),  # hub that receives
        (("s1", "r0 s2", "r1 s3", "r2"), 3),  # chain
        (("s1 s2", "r0 s3", "r0", "r1"), 2),  # tree
        (("s1 r1", "r0 s0"), 2),  # there and back
        (("s1 r1", "s0 r0"), 1),  # both at once
    ],
)
def test_steps_are_counted_from_the_order_of_messages(ranks, steps):
    assert message_steps(ledgers(*ranks)) == steps


# --- problems for paper ----------------------------------------------------------------------------------------------


def solution(size, rate):
    """Seconds and bytes."""
    return size / rate, 2 * size


CASES = [(12, 3), (20, 5), (7, 2)]
SLIPS = {"product": ("Divide.", "size / rate  ->  size * rate"), "half": ("Twice.", "2 * size  ->  size")}
problem = paper("Exercise 1", solution, SLIPS, cases=CASES, units=["s", "bytes"])


def test_a_formula_is_the_check_of_itself_with_numbers_of_any_type(capsys):
    problem(solution)
    assert capsys.readouterr().out == "Exercise 1 passed: 4 s, 24 bytes.\n"
    for result in (list, np.array, torch.tensor, lambda pair: (Fraction(pair[0]), np.float32(pair[1]))):
        problem(lambda size, rate, result=result: result([size / rate, 2 * size]))


@pytest.mark.parametrize("result", [None, "4", {}, [1], [1, 2, 3], np.ones((2, 1)), ("a", 1), 1j])
def test_anything_else_is_no_number(result):
    assert refusal(problem, lambda size, rate: result).hint == "number"


def test_wrong_answers_to_a_problem_get_the_hint_of_their_mistake():
    assert refusal(problem, lambda size, rate: (size * rate, 2 * size)).hint == "product"
    assert refusal(problem, lambda size, rate: (size / rate, size)).hint == "half"
    assert refusal(problem, lambda size, rate: (size, size)).hint == "numbers"
    assert refusal(problem, lambda size, rate: (4, 24)).hint == "typed"
    table = {case: solution(*case) for case in CASES}
    assert refusal(problem, lambda *case: table[case]).hint == "error"
    assert refusal(problem, lambda *case: table.get(case, (1, 1))).hint == "drawn"


# --- edits -----------------------------------------------------------------------------------------------------------

PROGRAM = """def mean(x):
    total = x.sum()
    if total:
        total /= 2
    return total
"""


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ("total /= 2  ->  total *= 2", PROGRAM.replace("/=", "*=")),
        ("        total /= 2\n  ->  ", PROGRAM.replace("        total /= 2", "")),
        ({"/= 2": "/= 3", "x.sum()": "x.mean()"}, PROGRAM.replace("/= 2", "/= 3").replace("sum", "mean")),
        ({"total /= 2\n    return total": "return 0"}, PROGRAM.replace("total /= 2\n    return total", "return 0")),
        ({"total /= 2": "a = 1\nb = 2"}, PROGRAM.replace("total /= 2", "a = 1\n        b = 2")),
    ],
)
def test_edit_replaces_the_old_text(edits, expected):
    assert edited(PROGRAM, edits) == expected


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ("total /= 2", "write an edit as"),
        ("total //= 2  ->  pass", "stands in the text 0 times"),
        ("total  ->  sums", "stands in the text 4 times"),
        ("total /= 2  ->  total /= 2", "changes nothing"),
    ],
)
def test_edit_that_does_not_fit_says_why(edits, words):
    with pytest.raises(EditError, match=words):
        edited(PROGRAM, edits)


# --- values ----------------------------------------------------------------------------------------------------------


def test_nan_is_right_where_it_is_expected_and_nowhere_else():
    one, nan = torch.tensor([1.0]), torch.tensor([torch.nan])
    assert [close(a, b) for a in (one, nan) for b in (one, nan)] == [True, False, False, True]


def test_numbers_may_be_of_any_type():
    for half in (0.5, Fraction(1, 2), np.float32(0.5), torch.tensor(0.5), np.array(0.5)):
        assert number(half) == 0.5 and type(number(half)) is float
    assert number(np.int64(3)) == 3.0
    for other in (True, None, "0.5", torch.tensor([0.5]), 1j, torch.tensor(True)):
        assert number(other) is None


def test_whole_numbers_may_be_of_any_type():
    for three in (3, np.int64(3), np.uint8(3), torch.tensor(3), np.array(3)):
        assert whole_number(three) == 3 and type(whole_number(three)) is int
    for other in (3.0, True, None, "3", torch.tensor(3.0), torch.tensor([3]), torch.tensor(True)):
        assert whole_number(other) is None
    for listed in ([1, 2], (1, np.int64(2)), range(1, 3), np.array([1, 2]), torch.tensor([1, 2])):
        assert whole_numbers(listed) == [1, 2]
    for other in ([1, 2.0], 3, "12", {1, 2}, np.ones((2, 2), int), np.array([1.0, 2.0]), None):
        assert whole_numbers(other) is None
