"""What one rank is doing (private)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import timedelta


@dataclass
class State:
    """What this rank is doing; the main thread writes, the control thread reads."""

    rank: int = -1
    running: bool = False
    asks: bool = False  # waits for what the learner types
    phase: str = "idle"
    call: int = 0
    pid: int = 0
    generation: int | None = None  # of the process group that there is
    store: str = ""  # the file in which ranks meet
    meeting: bool = False  # whether they do so now
    output: object = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    place: tuple[dict, str, list] | None = None  # the notebook's environment, folder and module path
    environment: dict | None = None  # this process's as a call found it
    rendezvous: int = 0
    meeting_limit: timedelta | None = None  # for how long ranks try to meet at MASTER_ADDR; None: they meet in a file


state = State()
