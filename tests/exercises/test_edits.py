"""Answers as edits of a solution: an edit fits or says why not, and the tests of a lesson refuse edits that do not."""

from __future__ import annotations

import functools
import inspect

import pytest
from exercise_cases import ExerciseTests, cases, hangs

from course_utils.check.edits import EditError, edited, edited_function
from lessons.ddp import check as ddp

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
        ("total /= 2    ->  pass", PROGRAM.replace("total /= 2", "pass")),
        ("        total /= 2\n  ->  ", PROGRAM.replace("        total /= 2", "")),
        ({"/= 2": "/= 3", "x.sum()": "x.mean()"}, PROGRAM.replace("/= 2", "/= 3").replace("sum", "mean")),
        ({"/= 2": "/= 3", "/= 3": "/= 4"}, PROGRAM.replace("/= 2", "/= 4")),
        ({"total /= 2\n    return total": "return 0"}, PROGRAM.replace("total /= 2\n    return total", "return 0")),
        ({"total /= 2": "a = 1\nb = 2"}, PROGRAM.replace("total /= 2", "a = 1\n        b = 2")),
        ({}, PROGRAM),
    ],
)
def test_edit_replaces_the_old_text(edits, expected):
    assert edited(PROGRAM, edits) == expected


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ("total /= 2", "write an edit as"),
        ("total /= 2 -> pass", "write an edit as"),
        ("a  ->  b  ->  c", "write an edit as"),
        ("total //= 2  ->  pass", "stands in the text 0 times"),
        ("total  ->  sums", "stands in the text 4 times"),
        ("total /= 2  ->  total /= 2", "changes nothing"),
        ({"total /= 2": "pass", "/= 2": "/= 3"}, "'/= 2' stands in the text 0 times"),
    ],
)
def test_edit_that_does_not_fit_says_why(edits, words):
    with pytest.raises(EditError, match=words):
        edited(PROGRAM, edits)


def halved(x, y=2):
    """Half of x."""
    half = x / y
    return half


def test_edited_function_is_the_function_with_another_body():
    assert edited_function(halved, "x / y  ->  x // y")(7, 2) == 3
    assert edited_function(halved, {"half = x / y": "half = y\nhalf += x"})(7, 2) == 9
    assert edited_function(functools.cache(halved), "x / y  ->  x // y")(7, 2) == 3
    with pytest.raises(EditError, match="stands in the text 0 times"):
        edited_function(halved, "Half of x  ->  x")


def test_answers_of_a_lesson_one_by_one():
    named = {"mean": {"a": "x  ->  y", "b": ["x  ->  y", hangs({"x": "y"})], "c": len}}
    found = cases(named)
    assert [str(case) for case in found] == ["mean-a", "mean-b", "mean-b-2", "mean-c"]
    assert [case.hangs for case in found] == [False, False, True, False]
    assert [case.answer for case in found] == ["x  ->  y", "x  ->  y", {"x": "y"}, len]


class Lesson(ExerciseTests):
    checks = ddp


def lesson(wrong=None, right=None):
    return type("Lesson", (Lesson,), {"WRONG": wrong or {}, "RIGHT": right or {}, "__module__": __name__})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ("dist.all_reduce(p.grad)  ->  pass", ""),
        ("dist.all_gather(p.grad)  ->  pass", "stands in the text 0 times"),
        ("p.grad  ->  p.g", "stands in the text 4 times"),
        ("dist.all_reduce(p.grad)  ->  dist.all_reduce(", "was never closed"),
        ("### END SOLUTION  ->  pass", "stands in the text 0 times"),
    ],
)
def test_misfit_is_named_before_any_rank_starts(edit, words):
    for kind in ({"wrong": {"data_parallel": {"sum": edit}}}, {"right": {"data_parallel": {"sum": edit}}}):
        found = list(lesson(**kind).misfits())
        assert len(found) == bool(words)
        assert all("data_parallel-sum" in text and words in text for text in found)


def test_misfits_are_named_all_at_once():
    wrong = {"data_parallel": {"a": ["x()  ->  y", "z()  ->  y"]}, "no_such_exercise": {"b": "x  ->  y"}}
    assert len(list(lesson(wrong).misfits())) == 3


def test_the_same_answer_twice_is_a_misfit():
    wrong = {"data_parallel": {"a": "src=0  ->  src=1", "b": {"dst=0": "dst=1"}, "c": {"src=0": "src=1"}}}
    (twice,) = [text for text in lesson(wrong).misfits() if "the same program" in text]
    assert "data_parallel-c" in twice and "data_parallel-a" in twice


def test_edit_reaches_the_cells_before_but_not_those_behind():
    edit = "request.wait()  ->  print()"
    assert "print()" in Lesson.program("bucketed", edit) and "print()" in Lesson.program("overlapped", edit)
    with pytest.raises(EditError):
        Lesson.program("data_parallel", edit)


def test_edit_is_for_the_exercise_where_other_cells_say_the_same():
    answer = Lesson.program("overlapped", "data_parallel(module)  ->  print()")
    own = answer[answer.index("def overlapped") : answer.index("def accumulate")]
    assert answer.count("print()") == own.count("print()") == 1


def test_answer_knows_what_the_text_imports_and_gives():
    names = Lesson.answer("overlapped", "async_op=True  ->  async_op=False").__globals__
    assert {"torch", "dist", "F", "nn", "DistributedDataParallel", "in_buckets", "look_at_gradients"} <= set(names)
    assert names["__name__"] == "__main__"


def test_lines_of_an_answer_can_be_shown():
    answer = Lesson.answer("data_parallel", "p.grad /= dist.get_world_size()  ->  p.grad /= 7")
    assert "p.grad /= 7" in inspect.getsource(answer)
