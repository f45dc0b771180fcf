"""The stepper: real steps, clear answers to bad input, a picture that a stored notebook keeps."""

import base64
import io

import numpy as np
import pytest
from matplotlib.patches import FancyArrowPatch
from PIL import Image

from course_utils.collective_algorithms import ALGORITHMS, schedule
from course_utils.costs import COLLECTIVES, all_reduce_bytes, all_reduce_steps
from course_utils.plots._style import png, png_width
from course_utils.widgets import all_reduce_stepper, collective_stepper
from course_utils.widgets import stepper as module
from course_utils.widgets._explorer import TO_USE, Explorer, Picture


class Stepper:
    def __init__(self, world_size, make=collective_stepper):
        self.widget = make(world_size)
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


@pytest.mark.parametrize("make", [collective_stepper, all_reduce_stepper])
def test_world_sizes_that_do_not_fit_are_refused(make):
    for world_size in (1, 9):
        with pytest.raises(ValueError, match="2 to 8"):
            make(world_size)


@pytest.fixture(scope="module")
def algorithms():
    return Stepper(4, all_reduce_stepper)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_can_be_stepped_to_its_end(algorithms, algorithm):
    algorithms.choice.value = algorithm
    assert (algorithms.step.value, algorithms.step.max) == (1, all_reduce_steps(algorithm, 4))
    pictures = {bytes(algorithms.picture.value)}
    for number in range(2, algorithms.step.max + 1):
        algorithms.step.value = number
        pictures.add(bytes(algorithms.picture.value))
    assert len(pictures) == algorithms.step.max
    assert "<b>" not in algorithms.status.value


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_steps_and_bytes_of_an_algorithm_are_told(algorithms, algorithm):
    algorithms.choice.value = algorithm
    sent = all_reduce_bytes(algorithm, 4, 4)
    expected = f"In all {all_reduce_steps(algorithm, 4)} steps; the busiest rank sends {sent:g} pieces, {sent / 4:g} S."
    assert expected in algorithms.status.value


def test_parts_of_a_tensor_are_named_as_such(algorithms):
    algorithms.choice.value = "halving_doubling"
    assert "rank 0 → rank 2: pieces 2 to 3 (added)" in algorithms.status.value
    algorithms.choice.value = "tree"
    assert "rank 2 → rank 0: all pieces (added)" in algorithms.status.value


@pytest.mark.parametrize("n", [4, 7])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_arrow_lies_on_another(algorithm, n):
    state = ([[None] * n] * n, [[[]] * n] * n)
    for step in schedule("all_reduce", n, algorithm):
        figure = module._picture([state, state], step, ("before", "after"))
        arrows = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch)]
        assert [arrow.get_linewidth() > 3 for arrow in arrows] == [len(m.pieces) > 1 for m in step]
        places = []
        for arrow in arrows:
            (x, y), (_, end) = arrow._posA_posB
            places.append((x, *sorted((y, end))))
        for i, (column, low, high) in enumerate(places):
            assert not [c for c, a, b in places[:i] if c == column and a < high and low < b]


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("L"))


def test_a_viewer_without_widgets_gets_the_picture_and_what_to_do(stepper):
    bundle, look = stepper.widget._repr_mimebundle_()
    assert bundle["text/plain"] == TO_USE
    assert "application/vnd.jupyter.widget-view+json" in bundle
    stored, live = pixels(base64.b64decode(bundle["image/png"])), pixels(stepper.picture.value)
    assert look == {"image/png": {"width": stored.shape[1] // 2}}
    line = len(stored) - len(live)
    assert line > 20 and stored[:line].min() < 100  # words above the picture
    assert np.abs(stored[line:].astype(int) - live).mean() < 1  # with fewer colours


def test_a_refused_choice_fades_the_picture_and_the_next_one_brings_it_back():
    picture = Picture()
    picture.fade()
    assert not picture.value
    figure = module._picture([([[1.0] * 2] * 2, [[[0]] * 2] * 2)] * 2, [], ("before", "after"))
    picture.show(figure)
    before = picture.value
    picture.fade()
    assert pixels(picture.value).min() > 150 > pixels(before).min()
    picture.show(figure)
    assert picture.value == before == png(figure, small=False)


def test_rows_wrap_and_the_picture_keeps_its_own_size(stepper):
    assert isinstance(stepper.widget, Explorer)
    rows = stepper.widget.children[:3]
    assert [row.layout.flex_flow for row in rows] == ["row wrap"] * 3
    layout = stepper.picture.layout
    assert (layout.height, layout.max_width, layout.align_self) == ("auto", "100%", "flex-start")
    assert layout.width == f"{png_width(stepper.picture.value)}px"
    assert abs(png_width(stepper.picture.value) - stepper.picture.figure.get_figwidth() * 110) < 1
