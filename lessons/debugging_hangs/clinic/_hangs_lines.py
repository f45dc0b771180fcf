"""Which way a rank takes through a patient's program, what it holds in the end, and where the ranks part (private)."""

from __future__ import annotations

import ast
import contextlib
import copy
import hashlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["SAME_WAY", "Way", "ground", "parting", "watched"]

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


@contextlib.contextmanager
def watched(way: Way) -> Iterator[None]:
    """Follow what runs inside."""
    before = sys.gettrace()
    sys.settrace(way.trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _checksums(names: dict[str, Any]) -> dict[str, str]:
    import torch

    found = {}
    for name, value in names.items():
        if isinstance(value, torch.Tensor):
            found[name] = _checksum([value])
        elif isinstance(value, torch.nn.Module):
            found[name] = _checksum(list(value.parameters()))
    return found


def _checksum(tensors: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str(tensor.detach().tolist()).encode())
    return digest.hexdigest()[:6]


def parting(ways: Sequence[dict[str, Any]]) -> int:
    """The last line that all ranks have run together, before the first one in which they differ; 0 if there is none."""
    first, *others = (way["lines"] for way in ways)
    places = [next((n for n, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), None) for other in others]
    met = [place for place in places if place]
    return first[min(met) - 1] if met else 0


def ground(source: str, ways: Sequence[dict[str, Any]]) -> str:
    """What decides which way a rank takes."""
    line = parting(ways)
    if not line:
        return SAME_WAY
    if any(way["caught"] for way in ways):
        return "an error that is caught"
    tree = ast.parse(source)
    node = next((n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno == line), None)
    if isinstance(node, ast.For):
        return "the number of rounds of a for loop"
    if isinstance(node, ast.While):
        return "the condition of a while loop"
    test = ast.unparse(node.test) if isinstance(node, ast.If) else ""
    names = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)} if isinstance(node, ast.If) else set()
    if "rand" in test:
        return "a condition on chance"
    if names & _communicated(tree, line):
        return "a condition on a value that a collective has left"
    return "a condition on the rank" if "rank" in test else "a condition on data of the rank"


def _communicated(tree: ast.AST, line: int) -> set[str]:
    """Names that a function of torch.distributed was given before a line."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and n.lineno < line]
    calls = [n for n in calls if ast.unparse(n.func).startswith("dist.") and "get_" not in ast.unparse(n.func)]
    return {arg.id for call in calls for arg in call.args if isinstance(arg, ast.Name)}
