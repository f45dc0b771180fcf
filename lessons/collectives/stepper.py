"""Step through a collective on real ranks."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from course_utils.costs import COLLECTIVES
from course_utils.draw.controls import choice, steps, text
from course_utils.draw.explorer import Explorer
from course_utils.ranks import WorkerError, launch

from .collective_algorithms import Message, result_slots, schedule, trace
from .figures import step_picture

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["collective_stepper"]

_START = {
    "broadcast": "rank 0 holds all pieces",
    "scatter": "rank 0 holds all pieces",
    "gather": "rank r holds piece r",
    "all_gather": "rank r holds piece r",
}


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


def _describe(message: Message) -> str:
    first, *more = message.pieces
    what = "all pieces" if more else f"piece {first}"
    return f"rank {message.src} → rank {message.dst}: {what}" + (" (added)" if message.add else "")


def _tell(op: str, n: int, now: int) -> str:
    """Return the messages of step `now`, from 1, and what has been sent until then, in words."""
    messages = schedule(op, n)
    sent = sum(len(m.pieces) for done in messages[:now] for m in done)
    lines = "; ".join(_describe(m) for m in messages[now - 1])
    partial = any(len(result_slots(op, rank, n)) < n for rank in range(n))
    left_over = " White cells are left-overs, not part of the result." if partial and now == len(messages) else ""
    return (
        f"At the start {_START.get(op, 'every rank holds all pieces')}. Step {now}: {lines}. "
        f"Sent so far by all ranks together: {sent} pieces of S/{n} bytes.{left_over}"
    )


def collective_stepper(world_size: int = 4) -> Explorer:
    """Step through a collective on numbers of your choice; the messages are real, sent between `world_size` ranks.

    For 2 to 8 ranks. The picture shows every rank's pieces before and after the chosen step, and the step's messages.
    """
    n, chosen = world_size, choice("collective", COLLECTIVES, "all_reduce")
    if n not in range(2, 9):
        raise ValueError(f"world_size must be 2 to 8, got {n}")
    step = steps("step", 1, 1, 1)
    digits = [", ".join(str((i + 1) * 10**rank) for i in range(n)) for rank in range(n)]
    boxes = {f"rank{rank}": text(f"rank {rank}", digits[rank]) for rank in range(n)}

    @lru_cache(maxsize=1)
    def snapshots(name: str, inputs: tuple[str, ...]) -> Tensor:
        """What ranks hold after each step, sent for real: rank, step, slot, (value, mask)."""
        import torch

        numbers = [_parse(rank, words, n) for rank, words in enumerate(inputs)]
        try:
            return torch.stack(launch(trace, name, numbers, world_size=n, timeout=60))
        except WorkerError as error:
            raise ValueError(str(error)) from None

    def adapt(changed: str | None) -> None:
        if changed in (None, "chosen"):
            step.max, step.value = len(schedule(chosen.value, n)), 1

    def render(chosen: str, step: int, **inputs: str) -> tuple[Figure, str]:
        held = snapshots(chosen, tuple(inputs.values()))
        messages = schedule(chosen, n)
        last = step == len(messages)
        states = [_state(held[:, step - 1], chosen, False), _state(held[:, step], chosen, last)]
        title = f"{chosen}: messages of step {step} of {len(messages)}"
        figure = step_picture(states, messages[step - 1], (title, "the result" if last else "after this step"))
        return figure, _tell(chosen, n, step)

    names = list(boxes)
    halves = [{name: boxes[name] for name in half} for half in (names[: n // 2], names[n // 2 :])]
    return Explorer([{"chosen": chosen, "step": step}, *halves], render, adapt)
