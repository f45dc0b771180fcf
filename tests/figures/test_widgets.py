"""The stepper: real steps, clear answers to bad input, a picture that a stored notebook keeps."""

import base64
import io

import numpy as np
import pytest
from figures import REFUSED, Opened
from matplotlib.patches import FancyArrowPatch
from PIL import Image

from course_utils import launch
from course_utils.costs import COLLECTIVES, all_reduce_bytes, all_reduce_steps
from course_utils.draw.controls import checkbox, integer
from course_utils.draw.explorer import TO_USE, Explorer, Picture
from course_utils.draw.style import new_figure, png, png_width
from lessons.collectives import stepper as module
from lessons.collectives.collective_algorithms import ALGORITHMS, schedule
from lessons.collectives.explorer import cost_calculator
from lessons.collectives.stepper import all_reduce_stepper, collective_stepper
from lessons.gpu_interconnects.explorer import topology_explorer
from lessons.long_context_and_experts.explorer import context_explorer
from lessons.nccl.explorer import algorithm_chooser
from lessons.parallelism_3d.explorer import mesh_explorer
from lessons.pipeline_parallel.explorer import schedule_explorer
from lessons.scaling_efficiency.explorer import bits_explorer
from lessons.zero.explorer import memory_calculator

WIDGETS = [
    topology_explorer, cost_calculator, collective_stepper, all_reduce_stepper, algorithm_chooser, bits_explorer,
    memory_calculator, schedule_explorer, context_explorer, mesh_explorer,
]


class Stepper(Opened):
    def __init__(self, world_size, make=collective_stepper):
        super().__init__(make(world_size))
        self.boxes = [self.widget.controls[f"rank{rank}"] for rank in range(world_size)]


@pytest.fixture(scope="module")
def stepper():
    return Stepper(3)


def test_picture_is_there_before_anything_is_moved(stepper):
    assert bytes(stepper.picture.value).startswith(b"\x89PNG")
    assert stepper.chosen.value == "all_reduce"
    assert stepper.step.max == 4


@pytest.mark.parametrize("op", COLLECTIVES)
def test_every_collective_can_be_stepped_to_its_end(stepper, op):
    stepper.chosen.value = op
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
def test_bad_input_is_named_and_the_picture_comes_back(stepper, text, complaint):
    before, old = stepper.shown, stepper.boxes[1].value
    stepper.boxes[1].value = text
    assert stepper.refuses and "Rank 1" in stepper.status.value
    assert complaint in stepper.status.value
    assert stepper.picture.value != before[1]
    assert stepper.boxes[1].value == text  # what was typed stays to be mended
    stepper.boxes[1].value = old
    assert stepper.shown == before


def test_bad_input_is_named_until_it_is_mended_and_stepping_goes_on_from_there(stepper):
    stepper.chosen.value = "all_gather"
    stepper.boxes[2].value = "oops"
    stepper.step.value = 2
    assert stepper.refuses and "oops" in stepper.status.value
    stepper.boxes[2].value = "1, 2, 3"
    assert not stepper.refuses and "Step 2" in stepper.status.value


def test_the_ranks_are_asked_once_for_all_steps(stepper, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "launch", lambda *args, **options: calls.append(args) or launch(*args, **options))
    stepper.chosen.value = "all_to_all"
    for number in range(1, stepper.step.max + 1):
        stepper.step.value = number
    assert len(calls) == 1


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
    algorithms.chosen.value = algorithm
    assert (algorithms.step.value, algorithms.step.max) == (1, all_reduce_steps(algorithm, 4))
    pictures = {bytes(algorithms.picture.value)}
    for number in range(2, algorithms.step.max + 1):
        algorithms.step.value = number
        pictures.add(bytes(algorithms.picture.value))
    assert len(pictures) == algorithms.step.max
    assert "<b>" not in algorithms.status.value


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_steps_and_bytes_of_an_algorithm_are_told(algorithms, algorithm):
    algorithms.chosen.value = algorithm
    sent = all_reduce_bytes(algorithm, 4, 4)
    expected = f"In all {all_reduce_steps(algorithm, 4)} steps; the busiest rank sends {sent:g} pieces, {sent / 4:g} S."
    assert expected in algorithms.status.value


def test_parts_of_a_tensor_are_named_as_such(algorithms):
    algorithms.chosen.value = "halving_doubling"
    assert "rank 0 → rank 2: pieces 2 to 3 (added)" in algorithms.status.value
    algorithms.chosen.value = "tree"
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
    assert [row.layout.flex_flow for row in stepper.widget.rows] == ["row wrap"] * 3
    layout = stepper.picture.layout
    assert (layout.height, layout.max_width, layout.align_self) == ("auto", "100%", "flex-start")
    assert layout.width == f"{png_width(stepper.picture.value)}px"
    assert abs(png_width(stepper.picture.value) - stepper.picture.figure.get_figwidth() * 110) < 1


def square(side, flat):
    if side > 8:
        raise ValueError(f"a side of {side} is too long; <choose> less")
    figure, (ax,) = new_figure(1, 1, size=(3, 1 if flat else 3))
    ax.plot([0, side], [0, side])
    return figure, f"a square of {side}"


def test_an_explorer_draws_once_for_each_change_and_for_all_that_follows_from_it():
    drawn, side, flat = [], integer("side", 2), checkbox("flat")

    def adapt(changed):
        flat.disabled = side.value < 2
        if changed == "flat":
            side.value = 5

    def render(**values):
        drawn.append(values)
        return square(**values)

    explorer = Opened(Explorer([{"side": side}, {"flat": flat}], render, adapt, "a note"))
    explorer.flat.value = True
    explorer.side.value = 1
    assert drawn == [{"side": 2, "flat": False}, {"side": 5, "flat": True}, {"side": 1, "flat": True}]
    assert flat.disabled and "a note" in explorer.note.value and explorer.note in explorer.widget.children


@pytest.mark.parametrize("where", ["render", "adapt"])
def test_what_cannot_be_is_refused_with_its_reason_and_the_picture_turns_pale(where):
    side = integer("side", 2)

    def render(side):
        return square(side if where == "render" else 2, False)

    explorer = Opened(Explorer([{"side": side}], render, lambda _: square(side.value, False)))
    before = explorer.shown
    side.value = 9
    assert explorer.status.value == f"<p><b>a side of 9 is too long; &lt;choose&gt; less.</b> {REFUSED}</p>"
    pale = pixels(explorer.picture.value)
    assert pale.min() > pixels(before[1]).min() and side.value == 9
    side.value = 10
    assert np.array_equal(pixels(explorer.picture.value), pale), "no paler than once"
    side.value = 2
    assert explorer.shown == before


@pytest.mark.parametrize("make", WIDGETS)
def test_all_widgets_behave_alike(make):
    """A change counts when it is finished, labels are whole, and everything that has a value is drawn."""
    explorer = make()
    assert isinstance(explorer, Explorer)
    for name, control in explorer.controls.items():
        assert not getattr(control, "continuous_update", False), name
        if hasattr(control.style, "description_width"):
            room = control.style.description_width or f"{8 * len(control.description) + 40}px"
            assert int(room.removesuffix("px")) >= 8 * len(control.description), name
