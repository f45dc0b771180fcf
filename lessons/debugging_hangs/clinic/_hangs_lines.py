"""Which way a rank takes through a patient's program, and what it holds in the end (private)."""

from __future__ import annotations

import copy
import hashlib
import linecache
import sys
from typing import Any

_MOST = 2000  # lines that are kept
SAME_WAY = "nothing: all ranks run the same lines"


class Way:
    """Of one rank: the lines that it has run, whether it caught an error, and checksums of its tensors at the end."""

    def __init__(self, file: str, name: str):
        self.lines: list[int] = []
        self.caught = ""
        self.values: dict[str, str] = {}
        self._seen: dict[str, str] = {}  # by `now`, for when an interrupt comes upon `trace`
        self._file, self._name, self._error = file, name, ""

    def trace(self, frame: Any, event: str, arg: Any) -> Any:
        """For ``sys.settrace``."""
        if frame.f_code.co_filename != self._file:
            return None
        if event == "line" and len(self.lines) < _MOST:
            self.lines.append(frame.f_lineno)
            if not linecache.getline(self._file, frame.f_lineno).lstrip().startswith("except"):  # it may be another's
                self.caught, self._error = self.caught or self._error, ""
        elif event == "exception" and not issubclass(arg[0], StopIteration):
            self._error = arg[0].__name__
        elif event == "return" and frame.f_code.co_name == self._name:
            self.values = _checksums(frame.f_locals)
        return self.trace

    def now(self, thread: int) -> Way:
        """A copy, with the tensors that the program holds while it runs in a thread."""
        frame = sys._current_frames().get(thread)
        while frame and not self._is_program(frame):
            frame = frame.f_back
        found = copy.copy(self)  # after the look: a program that has ended since has left its values
        if frame:
            self._seen = found.values = _checksums(dict(frame.f_locals))
        return found

    def _is_program(self, frame: Any) -> bool:
        return (frame.f_code.co_filename, frame.f_code.co_name) == (self._file, self._name)

    def told(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"lines": [*self.lines], "caught": self.caught, "values": self.values or self._seen}


def _checksums(names: dict[str, Any]) -> dict[str, str]:
    """Of tensors, and of the parameters of modules, by name."""
    import torch

    found = {}
    for name, value in names.items():
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            tensors = [value] if isinstance(value, torch.Tensor) else value.parameters()
            text = "".join(str(tensor.detach().tolist()) for tensor in tensors)
            found[name] = hashlib.sha256(text.encode()).hexdigest()[:6]
    return found
