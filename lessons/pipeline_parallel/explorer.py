"""Choose a pipeline's stages, micro-batches, schedule and times; see it, its bubble and its activations."""

from __future__ import annotations

from matplotlib.figure import Figure

from course_utils.draw.controls import choice, decimal, steps
from course_utils.draw.explorer import Explorer

from .figures import schedule_picture
from .pipeline import SCHEDULES, Costs, Timeline, simulate


def _formula(name: str, p: int, m: int, v: int, costs: Costs) -> tuple[str, float] | None:
    """What the papers say that a rank idles in a step, in words and as a number; None where it does not hold.

    The zero-bubble formulas hold exactly where there are micro-batches for all forwards ahead and W is no longer than
    F, in ZB-H2 nor than the mean of F and I; a test compares them with the simulation over a grid.
    """
    f, i, w = costs.forward, costs.input, costs.weight
    h1, h2 = m >= p and w <= f, m >= 2 * p - 1 and w <= min(f, (f + i) / 2)
    formulas = {
        "naive": ("m(p − 1)(F + I + W)", m * (p - 1) * (f + i + w), True),
        "GPipe": ("(p − 1)(F + I + W)", (p - 1) * (f + i + w), True),
        "1F1B": ("(p − 1)(F + I + W)", (p - 1) * (f + i + w), True),
        "interleaved": ("(p − 1)(F + I + W)/v", (p - 1) * (f + i + w) / v, True),
        "ZB-H1": ("(p − 1)(F + I − W)", (p - 1) * (f + i - w), p == 1 or h1),
        "ZB-H2": ("(p − 1)(F + I − 2W)", (p - 1) * (f + i - 2 * w), p == 1 or h2),
    }
    words, value, holds = formulas[name]
    return (words, value) if holds and not costs.transfer else None


def _without_formula(name: str, costs: Costs) -> str:
    """Say what the formula of a schedule asks for that a setting does not have."""
    if costs.transfer:
        return "the formulas know no transfer times"
    most = {"ZB-H1": "m ≥ p and W ≤ F", "ZB-H2": "m ≥ 2p − 1, W ≤ F and 2W ≤ F + I"}
    return f"the paper's formula holds for {most[name]} only"


def _describe(run: Timeline, costs: Costs) -> str:
    schedule = run.schedule
    p, m, v = schedule.ranks, schedule.microbatches, schedule.virtual
    idle = run.period - max(run.busy)
    told = _formula(schedule.name, p, m, v, costs)
    by_formula = f"the formula says {told[0]} = {told[1]:g}" if told else _without_formula(schedule.name, costs)
    messages = 2 * m * (p * v - 1) if p > 1 else 0
    return (
        f"{schedule.name}, {p} ranks, {m} micro-batches: a step takes {run.period:g}, of which a rank idles {idle:g} "
        f"({run.bubble:.1%}); {by_formula}. Activations of at most {max(run.peak):.3g} micro-batches on a rank. "
        f"{messages} messages in a step."
    )


def _render(
    microbatches: int, ranks: int, name: str, virtual: int, transfer: float, forward: float, input: float, weight: float
) -> tuple[Figure, str]:
    costs, more = Costs(forward, input, weight, transfer), [virtual] if name == "interleaved" else []
    run = simulate(SCHEDULES[name](ranks, microbatches, *more), costs)
    return schedule_picture(run, "modelled"), _describe(run, costs)


def schedule_explorer() -> Explorer:
    """Look at any pipeline schedule of `pipeline`, simulated with times of your choice."""
    name, virtual = choice("schedule", SCHEDULES, "1F1B"), steps("stages/rank v", 2, 1, 4)

    def adapt(_: str | None) -> None:
        virtual.disabled = name.value != "interleaved"

    rows = [
        {"microbatches": steps("micro-batches", 8, 1, 32), "ranks": steps("ranks p", 4, 1, 12), "name": name},
        {"virtual": virtual, "transfer": decimal("transfer", 0.0, 0.0, 3.0, step=0.25)},
        {
            time: decimal(label, 1.0, 0.25, 3.0, step=0.25)
            for time, label in {"forward": "F", "input": "I", "weight": "W"}.items()
        },
    ]
    return Explorer(rows, _render, adapt)
