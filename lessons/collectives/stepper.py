"""Step through a collective, or an algorithm of all-reduce, on real ranks."""

from __future__ import annotations

import math
from functools import lru_cache

import ipywidgets as widgets
import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from course_utils.costs import COLLECTIVES
from course_utils.draw.controls import choice, steps, text
from course_utils.draw.explorer import Explorer
from course_utils.ranks import WorkerError, launch

from .collective_algorithms import ALGORITHMS, Message, result_slots, schedule, trace
from .figures import step_picture

__all__ = ["all_reduce_stepper", "collective_stepper"]

_START = {
    "broadcast": "rank 0 holds all pieces",
    "scatter": "rank 0 holds all pieces",
    "gather": "rank r holds piece r",
    "all_gather": "rank r holds piece r",
}


def _operation(name: str) -> tuple[str, str | None]:
    """Return the collective, and the algorithm if `name` is that of one."""
    return ("all_reduce", name) if name in ALGORITHMS else (name, None)


def _parse(rank: int, line: str, count: int) -> list[float]:
    """Return the numbers that a rank starts with. Raises ValueError unless there are `count` of them."""
    words = line.replace(",", " ").split()
    try:
        numbers = [float(word) for word in words]
    except ValueError as error:
        bad = str(error).partition(":")[2].strip()
        raise ValueError(f"Rank {rank}: {bad} is not a number; write {count} numbers separated by commas") from None
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        given = f"{len(numbers)} number(s) given"
        raise ValueError(f"Rank {rank}: {given}; write {count} finite numbers separated by commas")
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


def _tell(op: str, n: int, algorithm: str | None, now: int) -> str:
    """Return the messages of step `now`, from 1, and what has been sent until then, in words."""
    messages = schedule(op, n, algorithm)
    sent = sum(len(m.pieces) for done in messages[:now] for m in done)
    lines = "; ".join(_describe(m, n) for m in messages[now - 1])
    partial = any(len(result_slots(op, rank, n)) < n for rank in range(n))
    left_over = " White cells are left-overs, not part of the result." if partial and now == len(messages) else ""
    return (
        f"At the start {_START.get(op, 'every rank holds all pieces')}. Step {now}: {lines}. "
        f"Sent so far by all ranks together: {sent} pieces of S/{n} bytes.{left_over}"
        f"{_summary(n, algorithm) if algorithm else ''}"
    )


def collective_stepper(world_size: int = 4) -> Explorer:
    """Step through a collective on numbers of your choice; the messages are real, sent between `world_size` ranks.

    For 2 to 8 ranks. The picture shows every rank's pieces before and after the chosen step, and the step's messages.
    """
    return _stepper(world_size, choice("collective", COLLECTIVES, "all_reduce"))


def all_reduce_stepper(world_size: int = 4) -> Explorer:
    """Step through an algorithm of all-reduce, one of `collective_algorithms.ALGORITHMS`, as `collective_stepper` does.

    For 2 to 8 ranks. The text tells the steps of the algorithm and what its busiest rank sends.
    """
    return _stepper(world_size, choice("algorithm", ALGORITHMS, "ring"))


def _stepper(n: int, chosen: widgets.Dropdown) -> Explorer:
    if n not in range(2, 9):
        raise ValueError(f"world_size must be 2 to 8, got {n}")
    step = steps("step", 1, 1, 1)
    digits = [", ".join(str((i + 1) * 10**rank) for i in range(n)) for rank in range(n)]
    boxes = {f"rank{rank}": text(f"rank {rank}", digits[rank]) for rank in range(n)}

    @lru_cache(maxsize=1)
    def snapshots(name: str, inputs: tuple[str, ...]) -> torch.Tensor:
        """What ranks hold after each step, sent for real: rank, step, slot, (value, mask)."""
        numbers = [_parse(rank, words, n) for rank, words in enumerate(inputs)]
        try:
            op, algorithm = _operation(name)
            return torch.stack(launch(trace, op, numbers, algorithm, world_size=n, timeout=20))
        except WorkerError as error:
            raise ValueError(str(error)) from None

    def adapt(changed: str | None) -> None:
        if changed in (None, "chosen"):
            op, algorithm = _operation(chosen.value)
            step.max, step.value = len(schedule(op, n, algorithm)), 1

    def render(chosen: str, step: int, **inputs: str) -> tuple[Figure, str]:
        op, algorithm = _operation(chosen)
        held = snapshots(chosen, tuple(inputs.values()))
        messages = schedule(op, n, algorithm)
        last = step == len(messages)
        states = [_state(held[:, step - 1], op, False), _state(held[:, step], op, last)]
        title = f"{chosen}: messages of step {step} of {len(messages)}"
        figure = _picture(states, messages[step - 1], (title, "the result" if last else "after this step"))
        return figure, _tell(op, n, algorithm, step)

    names = list(boxes)
    halves = [{name: boxes[name] for name in half} for half in (names[: n // 2], names[n // 2 :])]
    return Explorer([{"chosen": chosen, "step": step}, *halves], render, adapt)
