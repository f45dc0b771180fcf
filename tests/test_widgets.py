"""The stepper: real steps, clear answers to bad input, a picture that a stored notebook keeps."""

import pytest

from course_utils.costs import COLLECTIVES
from course_utils.schedules import schedule
from course_utils.widgets import collective_stepper


class Stepper:
    def __init__(self, world_size):
        self.widget = collective_stepper(world_size)
        top, first, second, self.status, self.picture = self.widget.children
        (self.choice, self.step), self.boxes = top.children, first.children + second.children


@pytest.fixture(scope="module")
def stepper():
    return Stepper(3)


def test_picture_is_there_before_anything_is_moved(stepper):
    assert bytes(stepper.picture.value).startswith(b"\x89PNG")
    assert stepper.choice.value == "all_reduce"
    assert stepper.step.max == 4


@pytest.mark.parametrize("op", COLLECTIVES)
def test_every_collective_can_be_stepped_to_its_end(stepper, op):
    stepper.choice.value = op
    assert (stepper.step.value, stepper.step.max) == (1, len(schedule(op, 3)))
    pictures = {bytes(stepper.picture.value)}
    for number in range(2, stepper.step.max + 1):
        stepper.step.value = number
        pictures.add(bytes(stepper.picture.value))
    assert len(pictures) == stepper.step.max
    assert "<b>" not in stepper.status.value
    sent = sum(len(message.pieces) for step in schedule(op, 3) for message in step)
    assert f"together: {sent} pieces" in stepper.status.value


def test_other_numbers_make_another_picture(stepper):
    earlier = stepper.picture.value
    stepper.boxes[0].value = "7, 8.5 -9"
    assert stepper.picture.value != earlier


@pytest.mark.parametrize(
    "text, complaint", [("1, x, 3", "x"), ("1, 2", "2 number"), ("", "0 number"), ("1 2 inf", "finite")]
)
def test_bad_input_is_named_and_nothing_is_lost(stepper, text, complaint):
    picture, old = stepper.picture.value, stepper.boxes[1].value
    stepper.boxes[1].value = text
    assert "Rank 1" in stepper.status.value
    assert complaint in stepper.status.value
    assert stepper.picture.value == picture
    assert stepper.boxes[1].value == text  # what was typed stays to be mended
    stepper.boxes[1].value = old
    assert "Rank 1" not in stepper.status.value


def test_stepping_still_works_after_bad_input(stepper):
    stepper.choice.value = "all_gather"
    stepper.boxes[2].value = "oops"
    earlier = stepper.picture.value
    stepper.step.value = 2
    assert stepper.picture.value != earlier
    assert "Step 2" in stepper.status.value
    assert "oops" in stepper.status.value  # until it is mended
    stepper.boxes[2].value = "1, 2, 3"
    assert "oops" not in stepper.status.value


def test_world_sizes_that_do_not_fit_are_refused():
    for world_size in (1, 9):
        with pytest.raises(ValueError, match="2 to 8"):
            collective_stepper(world_size)
