"""Step through a collective, or an algorithm of all-reduce, on real ranks."""

from __future__ import annotations

import html
import math

import ipywidgets as widgets
import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from ..collective_algorithms import ALGORITHMS, Message, result_slots, schedule, trace
from ..costs import COLLECTIVES
from ..plots import step_picture
from ..ranks import WorkerError, launch
from ._explorer import Explorer, Picture

__all__ = ["all_reduce_stepper", "collective_stepper"]

_START = {
    "broadcast": "rank 0 holds all pieces",
    "scatter": "rank 0 holds all pieces",
    "gather": "rank r holds piece r",
    "all_gather": "rank r holds piece r",
}


def _parse(text: str, count: int) -> list[float]:
    words = text.replace(",", " ").split()
    try:
        numbers = [float(word) for word in words]
    except ValueError as error:
        bad = str(error).partition(":")[2].strip()
        raise ValueError(f"{bad} is not a number; write {count} numbers separated by commas") from None
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{len(numbers)} number(s) given; write {count} finite numbers separated by commas")
    return numbers


def _state(snapshot, op: str, last: bool) -> tuple[list, list]:
    """Return values and contributing ranks by rank and slot; at the end, left-overs keep their value but no colour."""
    n = len(snapshot)
    values = [[value if mask else None for value, mask in rank.tolist()] for rank in snapshot]
    owners = [[[r for r in range(n) if int(mask) >> r & 1] for _, mask in rank.tolist()] for rank in snapshot]
    if last:
        for rank, row in enumerate(owners):
            row[:] = [who if slot in result_slots(op, rank, n) else [] for slot, who in enumerate(row)]
    return values, owners


def _describe(message: Message, n: int) -> str:
    first, *more = message.pieces
    what = "all pieces" if len(more) + 1 == n else f"pieces {first} to {more[-1]}" if more else f"piece {first}"
    return f"rank {message.src} → rank {message.dst}: {what}" + (" (added)" if message.add else "")


def _picture(states: list[tuple], messages: list[Message], titles: tuple[str, str]) -> Figure:
    """Draw a step. A message of some pieces is a thick arrow in the column of one, so that no two lie on each other."""
    n = len(states[0][0])
    drawn = []
    for m in messages:
        column = (m.pieces[m.src % len(m.pieces)],)
        drawn.append(m._replace(pieces=column, into=column) if 1 < len(m.pieces) < n else m)
    figure = step_picture(states, drawn, titles)
    arrows = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch)]
    for arrow, m in zip(arrows, messages, strict=True):
        arrow.set_linewidth(3.5 if len(m.pieces) > 1 else 2)
    return figure


def _summary(n: int, algorithm: str) -> str:
    steps = schedule("all_reduce", n, algorithm)
    busiest = max(sum(len(m.pieces) for step in steps for m in step if m.src == rank) for rank in range(n))
    sent = f"In all {len(steps)} steps; the busiest rank sends {busiest} pieces, {busiest / n:.3g} S."
    return f" {sent} A thick arrow carries several pieces."


def collective_stepper(world_size: int = 4) -> widgets.Widget:
    """Step through a collective on numbers of your choice; the messages are real, sent between `world_size` ranks.

    For 2 to 8 ranks. The picture shows every rank's pieces before and after the chosen step, and the step's messages.
    """
    return _stepper(world_size, options=COLLECTIVES, value="all_reduce", description="collective")


def all_reduce_stepper(world_size: int = 4) -> widgets.Widget:
    """Step through an algorithm of all-reduce, one of `schedules.ALGORITHMS`, as `collective_stepper` does.

    For 2 to 8 ranks. The text tells the steps of the algorithm and what its busiest rank sends.
    """
    return _stepper(world_size, options=ALGORITHMS, value="ring", description="algorithm")


def _stepper(n: int, **options) -> widgets.Widget:
    if n not in range(2, 9):
        raise ValueError(f"world_size must be 2 to 8, got {n}")
    choice = widgets.Dropdown(**options)
    step = widgets.IntSlider(min=1, max=1, description="step", continuous_update=False)
    digits = [", ".join(str((i + 1) * 10**rank) for i in range(n)) for rank in range(n)]
    boxes = [widgets.Text(text, description=f"rank {r}", continuous_update=False) for r, text in enumerate(digits)]
    status, picture = widgets.HTML(), Picture()
    shown: dict = {}

    def draw(_=None) -> None:
        op, algorithm, snapshots = shown["op"], shown["algorithm"], shown["snapshots"]
        messages = schedule(op, n, algorithm)
        now, total = step.value, len(messages)
        states = [_state(snapshots[:, now - 1], op, False), _state(snapshots[:, now], op, now == total)]
        title = f"{algorithm or op}: messages of step {now} of {total}"
        titles = title, "after this step" if now < total else "the result"
        picture.show(_picture(states, messages[now - 1], titles))
        sent = sum(len(m.pieces) for done in messages[:now] for m in done)
        lines = "; ".join(_describe(m, n) for m in messages[now - 1])
        partial = any(len(result_slots(op, rank, n)) < n for rank in range(n))
        left_over = " White cells are left-overs, not part of the result." if partial and now == total else ""
        start = _START.get(op, "every rank holds all pieces")
        status.value = (
            f"{shown['complaint']}At the start {start}. Step {now}: {lines}. "
            f"Sent so far by all ranks together: {sent} pieces of S/{n} bytes.{left_over}"
            f"{_summary(n, algorithm) if algorithm else ''}"
        )

    def run(_=None) -> None:
        try:
            inputs = []
            for rank, box in enumerate(boxes):
                try:
                    inputs.append(_parse(box.value, n))
                except ValueError as error:
                    raise ValueError(f"Rank {rank}: {error}. The picture still shows the last valid input.") from None
            op, algorithm = ("all_reduce", choice.value) if choice.value in ALGORITHMS else (choice.value, None)
            snapshots = launch(trace, op, inputs, algorithm, world_size=n, timeout=20)
        except (ValueError, WorkerError) as error:
            shown["complaint"] = f"<p><b>{html.escape(str(error))}</b></p>"
            if "op" in shown:
                draw()
            else:
                status.value = shown["complaint"]
            return
        shown.update(complaint="", op=op, algorithm=algorithm)
        shown["snapshots"] = torch.stack(snapshots)  # rank, step, slot, (value, mask)
        step.unobserve(draw, "value")
        step.max, step.value = len(schedule(op, n, algorithm)), 1
        step.observe(draw, "value")
        draw()

    for control in (choice, *boxes):
        control.observe(run, "value")
    run()
    return Explorer([[choice, step], boxes[: n // 2], boxes[n // 2 :]], status, picture)
