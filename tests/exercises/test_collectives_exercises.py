"""The exercises on collectives: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re

import pytest
import wrong_collectives
from exercise_cases import ExerciseTests

from course_utils.checks import collectives as collectives
from course_utils.checks import message_steps
from course_utils.ranks import Entry

pytestmark = pytest.mark.guard(60)


class TestCollectives(ExerciseTests):
    checks, mutants = collectives, wrong_collectives

    def test_refusal_names_exercise_ranks_and_both_values(self):
        wrong = next(m for m in wrong_collectives.MUTANTS if m.answer.__name__ == "mean_not_sum")
        text = str(self.refusal(wrong.exercise, wrong.answer))
        assert text.startswith("Exercise 3, 2 ranks, x of shape (2, 3), rank 0: the result is wrong.")
        assert re.search(r"expected  shape \(2, 3\): [-\d.]+, .*\n  got       shape \(2, 3\): [-\d.]+, ", text)


def ledgers(*ranks: str) -> list[list[Entry]]:
    """Ledgers from text: ``s1 r2`` is a send to rank 1, then a receive from rank 2."""
    names = {"s": "send", "r": "recv"}
    return [[Entry(names[word[0]], "default", 8, int(word[1]), (), 1, 0.0) for word in text.split()] for text in ranks]


@pytest.mark.parametrize(
    ("ranks", "steps"),
    [
        (("", ""), 0),
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
