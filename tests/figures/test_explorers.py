"""Every explorer: all of its settings are drawn or refused with a reason; the numbers that only it computes."""

import re

import ipywidgets as widgets
import pytest
from figures import Opened, inside, readable_throughout

from course_utils import hardware, launch
from course_utils.costs import COLLECTIVES
from course_utils.draw.explorer import Picture
from course_utils.memory import Memory
from lessons.collectives import stepper
from lessons.collectives.collective_algorithms import schedule
from lessons.collectives.explorer import cost_calculator, efficiency
from lessons.collectives.stepper import collective_stepper
from lessons.gpu_interconnects.explorer import topology_explorer
from lessons.long_context_and_experts.explorer import context_explorer
from lessons.nccl.explorer import algorithm_chooser
from lessons.parallelism_3d.explorer import mesh_explorer
from lessons.pipeline_parallel.explorer import _formula, schedule_explorer
from lessons.pipeline_parallel.pipeline import SCHEDULES, Costs, simulate
from lessons.scaling_efficiency.explorer import bits_explorer
from lessons.zero.explorer import judge, memory_calculator

WIDGETS = [
    topology_explorer, cost_calculator, collective_stepper, algorithm_chooser, bits_explorer,
    memory_calculator, schedule_explorer, context_explorer, mesh_explorer,
]


@pytest.fixture(autouse=True)
def figures_only(monkeypatch: pytest.MonkeyPatch):
    """Figures are laid out, but no image is made of them."""
    monkeypatch.setattr(Picture, "_draw", lambda self: None)


def ends(control: widgets.Widget) -> list:
    """The first and the last of what a control can be set to; for a field of any number or text, what is too much."""
    match control:
        case widgets.Dropdown() | widgets.SelectionSlider():
            values = [option[1] if isinstance(option, tuple) else option for option in control.options]
            return [values[0], values[-1]]
        case widgets.IntSlider() | widgets.FloatSlider() | widgets.BoundedFloatText():
            return [control.min, control.max]
        case widgets.IntText():
            return [0, 10**14]
        case widgets.Text():
            return ["2", "x<y"]
    return [False, True]


@pytest.mark.guard(300)
@pytest.mark.parametrize("make", WIDGETS)
def test_every_control_is_drawn_or_refused_at_an_end(make):
    """A change counts when it is finished, labels are whole, and what is put back shows what was there before."""
    explorer = Opened(make())
    if make is memory_calculator:
        explorer.put(stage=1)  # where the buckets count
    readable_throughout(explorer.picture.figure)
    controls = {name: control for name, control in explorer.widget.controls.items() if control.has_trait("value")}
    start, values = explorer.shown, {name: control.value for name, control in controls.items()}
    assert not explorer.refuses
    for name, control in controls.items():
        room = getattr(control.style, "description_width", None) or f"{8 * len(control.description) + 40}px"
        assert int(room.removesuffix("px")) >= 8 * len(control.description), name
        assert not getattr(control, "continuous_update", False), name
        changed = False
        for value in reversed([value for value in ends(control) if value != values[name]]):
            told = explorer.put(**{name: value})
            assert told and "<y" not in told
            changed = explorer.shown != start
            if changed:
                break
        if changed and not explorer.refuses:
            inside(explorer.picture.figure)
        explorer.put(**{name: values[name]})
        explorer.put(**values)
        assert explorer.shown == start, name
        assert changed or control.disabled, f"{name} changes nothing"


def test_costs():
    explorer = Opened(cost_calculator())
    told = explorer.put(kept=95, gpus=2)
    assert "2 GPUs at 95% efficiency" in told and "on demand: 21.9 days, $1,052.63" in told
    assert "One GPU on demand: $1,000.00" in told
    assert "example" in explorer.price.description and "example" in explorer.spot.description
    assert efficiency(1, 0.9) == 1 and efficiency(8, 0.9) == pytest.approx(0.9**3)
    assert "spot: no end, $inf" in explorer.put(rate=1000, gpus=1024), "a job that only restarts"
    assert "$0.00" in explorer.put(price=-1, kept=150) and explorer.kept.value == 100


@pytest.mark.parametrize(("make", "settings", "message"), [
    (topology_explorer, {"machine": "dgx a100", "end": "GPU0"}, "two different devices"),
    (algorithm_chooser, {"nodes": 1, "gpus": 1}, "nothing to reduce"),
    (context_explorer, {"method": "Ulysses", "ranks": 64}, "64 ranks do not divide 32"),
    (memory_calculator, {"length": 4096}, "GPT-3 6.7B has 2,048 positions, no 4,096"),
    (mesh_explorer, {"per_node": 7}, "pp 4 x dp 8 x cp 1 x tp 8 makes 256 ranks, which do not fill nodes of 7"),
    (mesh_explorer, {"batch": 28}, "cannot run so: .*28 sequences do not divide"),
    (mesh_explorer, {"model": "Llama 3 405B"}, "cannot run so: .*the fullest GPU needs"),
    (schedule_explorer, {"name": "interleaved", "microbatches": 9}, "a multiple of 4 micro-batches, got 9"),
    (schedule_explorer, {"name": "ZB-H1", "weight": 2.0}, "formula holds for m ≥ p and W ≤ F only"),
    (schedule_explorer, {"transfer": 0.5}, "the formulas know no transfer times"),
    (collective_stepper, {"rank1": "1, x, 3, 4"}, "Rank 1: .*x.* is not a number"),
    (bits_explorer, {"number": "1,5"}, "comma"),
])
def test_what_cannot_be_is_said(make, settings, message):
    assert re.search(message, Opened(make()).put(**settings))


@pytest.mark.parametrize(("need", "free", "reason", "words"), [
    (Memory(72e9), 0.1, "fits", "72 GB of 80 GB"), (Memory(72.1e9), 0.1, "tight", "72.1 GB of 80 GB"),
    (Memory(79e9, activations=2e9), 0.1, "activations", "1 GB too much"),
    (Memory(81e9), 0.0, "states", "1 GB too much"),
])
def test_what_fits_is_judged_against_the_memory_of_the_gpu(need, free, reason, words):
    verdict = judge(need, hardware.GPUS["h100"], free)
    assert verdict.reason == reason and words in verdict.words


def table(told: str) -> dict[str, list[str]]:
    """The cells of each dimension of a mesh, by its name."""
    rows = re.findall("<tr>(.*?)</tr>", told)
    cells = [[re.sub("<[^>]*>", "", cell) for cell in re.findall("<td[^>]*>(.*?)</td>", row)] for row in rows]
    return {row[0].split()[-1]: row[1:] for row in cells if row}


def test_a_mesh_and_its_groups():
    explorer = Opened(mesh_explorer())
    first = table(explorer.status.value)
    assert first["tp"][:3] == ["72 to 79", "in one node", "NVLink, 450 GB/s"]
    assert first["dp"][:3] == ["69, 77, 85, …, 125", "on 8 nodes", "network, 50 GB/s"]
    assert first["pp"][:3] == ["13, 77, 141, 205", "on 4 nodes", "network, 50 GB/s"]
    assert first["cp"][0] == "77 alone"
    turned = table(explorer.put(order=("tp", "dp", "pp", "cp")))
    assert turned["tp"][1:3] == ["on 8 nodes", "network, 50 GB/s"] and turned["tp"][4] == first["tp"][4]
    assert turned["dp"][1] == "on 4 nodes, 2 on each"
    explorer.put(rank=255, tp=2, pp=2, dp=2)
    assert (explorer.rank.max, explorer.rank.value) == (7, 7)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", [1, 3, 5])
def test_the_formula_of_a_schedule_is_shown_exactly_where_it_holds(name, p):
    """Over a grid: where a formula is shown it is what the simulation gives, where none is shown it is not."""
    paper = {"ZB-H1": lambda f, i, w: (p - 1) * (f + i - w), "ZB-H2": lambda f, i, w: (p - 1) * (f + i - 2 * w)}
    times = [(f, i, w) for f in (1.0, 2.0, 3.0) for i in (0.0, 1.0, 2.0, 4.0) for w in (1.0, 2.0, 3.0)]
    counts = {p, 2 * p} if name == "interleaved" else {p - 1, p, 2 * p - 2, 2 * p - 1, 2 * p + 1}
    for m in sorted(counts - {0}):
        schedule = SCHEDULES[name](p, m)
        for each in times:
            run = simulate(schedule, Costs(*each))
            idle, told = run.period - max(run.busy), _formula(name, p, m, schedule.virtual, Costs(*each))
            if told:
                assert idle == pytest.approx(told[1], abs=1e-9), (m, each)
            else:
                assert abs(idle - paper[name](*each)) > 0.5, (m, each)


def test_every_collective_can_be_stepped_to_its_end(monkeypatch):
    calls = []
    monkeypatch.setattr(stepper, "launch", lambda *args, **more: calls.append(args) or launch(*args, **more))
    explorer = Opened(collective_stepper(4))
    for chosen in COLLECTIVES:
        explorer.put(chosen=chosen)
        steps = schedule(chosen, 4)
        assert (explorer.step.value, explorer.step.max) == (1, len(steps))
        for number in range(1, len(steps) + 1):
            told = explorer.put(step=number)
            assert f"Step {number}:" in told and not explorer.refuses
        assert f"together: {sum(len(m.pieces) for step in steps for m in step)} pieces" in told
    assert len(calls) <= 1 + len(COLLECTIVES), "the ranks are asked once for all steps"


def test_examples_of_numbers():
    explorer = Opened(bits_explorer())
    examples = [control for control in explorer.widget.controls.values() if isinstance(control, widgets.Button)]
    for button in examples:
        button.click()
        assert f"{button.description} is stored as" in explorer.status.value
    explorer.put(number="-1234.5678")
    readable_throughout(explorer.picture.figure)
