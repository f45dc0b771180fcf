"""The exercises on collectives: what a refusal says, and how many steps messages need."""

from __future__ import annotations

import re

import pytest

from course_utils.check import CheckFailed, message_steps
from course_utils.ranks import Entry
from lessons.collectives import check as collectives

pytestmark = pytest.mark.guard(60)


def test_refusal_names_exercise_ranks_and_both_values():
    with pytest.raises(CheckFailed) as caught:
        collectives.ring_shift(collectives.ring_shift.answer(collectives.MISTAKES["ring_shift"]["direction"][1]))
    text = str(caught.value)
    assert text.startswith("Exercise 2, 3 ranks, x float32 of shape (6, 2), rank 0: the result is wrong.")
    assert re.search(r"expected  shape \(6, 2\): [-\d.]+, .*\n  got       shape \(6, 2\): [-\d.]+, ", text)


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
