"""Step through a collective on real ranks."""

from __future__ import annotations

import html
import math

import ipywidgets as widgets
import torch

from ..costs import COLLECTIVES
from ..errors import WorkerError
from ..launcher import launch
from ..plots import step_picture
from ..schedules import Message, result_slots, schedule, trace
from ._common import png

__all__ = ["collective_stepper"]

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


def _describe(message: Message) -> str:
    many = len(message.pieces) > 1
    what = "all pieces" if many else f"piece {message.pieces[0]}"
    return f"rank {message.src} → rank {message.dst}: {what}" + (" (added)" if message.add else "")


def collective_stepper(world_size: int = 4) -> widgets.Widget:
    """Step through a collective on numbers of your choice; the messages are real, sent between `world_size` ranks.

    For 2 to 8 ranks. The picture shows every rank's pieces before and after the chosen step, and the step's messages.
    """
    if world_size not in range(2, 9):
        raise ValueError(f"world_size must be 2 to 8, got {world_size}")
    n = world_size
    choice = widgets.Dropdown(options=COLLECTIVES, value="all_reduce", description="collective")
    step = widgets.IntSlider(min=1, max=1, description="step", continuous_update=False)
    digits = [", ".join(str((i + 1) * 10**rank) for i in range(n)) for rank in range(n)]
    boxes = [widgets.Text(text, description=f"rank {r}", continuous_update=False) for r, text in enumerate(digits)]
    status, picture = widgets.HTML(), widgets.Image(format="png", layout={"max_width": "100%"})
    shown: dict = {}

    def draw(_=None) -> None:
        op, snapshots, messages = shown["op"], shown["snapshots"], schedule(shown["op"], n)
        now, total = step.value, len(messages)
        states = [_state(snapshots[:, now - 1], op, False), _state(snapshots[:, now], op, now == total)]
        titles = f"{op}: messages of step {now} of {total}", "after this step" if now < total else "the result"
        picture.value = png(step_picture(states, messages[now - 1], titles))
        sent = sum(len(m.pieces) for done in messages[:now] for m in done)
        lines = "; ".join(_describe(m) for m in messages[now - 1])
        partial = any(len(result_slots(op, rank, n)) < n for rank in range(n))
        left_over = " White cells are left-overs, not part of the result." if partial and now == total else ""
        start = _START.get(op, "every rank holds all pieces")
        status.value = (
            f"{shown['complaint']}At the start {start}. Step {now}: {lines}. "
            f"Sent so far by all ranks together: {sent} pieces of S/{n} bytes.{left_over}"
        )

    def run(_=None) -> None:
        try:
            inputs = []
            for rank, box in enumerate(boxes):
                try:
                    inputs.append(_parse(box.value, n))
                except ValueError as error:
                    raise ValueError(f"Rank {rank}: {error}. The picture still shows the last valid input.") from None
            snapshots = launch(trace, choice.value, inputs, world_size=n, timeout=20)
        except (ValueError, WorkerError) as error:
            shown["complaint"] = f"<p><b>{html.escape(str(error))}</b></p>"
            if "op" in shown:
                draw()
            else:
                status.value = shown["complaint"]
            return
        shown.update(complaint="", op=choice.value, snapshots=torch.stack(snapshots))  # rank, step, slot, (value, mask)
        step.unobserve(draw, "value")
        step.max, step.value = len(schedule(choice.value, n)), 1
        step.observe(draw, "value")
        draw()

    for control in (choice, *boxes):
        control.observe(run, "value")
    run()
    return widgets.VBox([widgets.HBox([choice, step]), widgets.HBox(boxes[: n // 2]), widgets.HBox(boxes[n // 2 :]),
                         status, picture])  # fmt: skip
