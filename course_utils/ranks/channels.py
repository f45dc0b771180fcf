"""What a rank and the notebook agree on: the channels between them, and the kinds of calls."""

from __future__ import annotations

from dataclasses import dataclass

MARK = b"\x1e"  # in what a rank prints: starts a record that is not text
STATUS_BYTES = 8192  # of a rank's status file for its last operation; reports of fatal errors follow

IDLE_SECONDS = 900  # after which a rank that has nothing to do ends by itself


@dataclass(frozen=True)
class Kind:
    """What is different about a kind of call."""

    name: str
    is_program: bool = False  # it makes its own process group, on fresh processes, and ends as programs do
    keeps_names: bool = False  # for the next of its kind: its ranks are kept wherever that is possible
    patience: int = 1  # times as long as others its ranks may have nothing to do


FUNCTION = Kind("function")
PROGRAM = Kind("program", is_program=True)
CELL = Kind("cell", keeps_names=True, patience=8)
