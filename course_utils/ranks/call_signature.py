"""What each operation of a rank passes, written down for the notebook to compare (``launch(..., verify=True)``).

The record goes to a file before the operation begins: writing to it never waits for anybody, and it is still there
when the operation ends the process.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Announcer", "flatten", "reduction_name"]

_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


def reduction_name(reduce_op: Any) -> str:
    """The name of the reduction that an operator of c10d is called with, whoever calls it."""
    number = reduce_op.op()
    return _REDUCTIONS[number] if number < len(_REDUCTIONS) else f"number {number}"


def flatten(value: Any) -> Iterator[Any]:
    """The tensors in lists of lists."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flatten(item)
    elif hasattr(type(value), "nbytes"):
        yield value


def _shapes(tensors: Any) -> tuple:
    """The shape of each tensor; one shape where all have the same, as the parts of one tensor have."""
    shapes = tuple(tuple(tensor.shape) for tensor in flatten(tensors))
    return shapes[:1] if len(set(shapes)) == 1 else shapes


def _every_shape(tensors: Any) -> tuple:
    return tuple(tuple(tensor.shape) for tensor in flatten(tensors))


#: The tensors whose shapes all ranks of a group must pass alike. Where a call has lists of parts, their shapes count;
#: where it has one tensor for them all, that of a part.
_ALIKE: dict[str, Callable[[tuple], tuple]] = {
    "allreduce_": lambda args: _every_shape(args[0]),
    "allreduce_coalesced_": lambda args: _every_shape(args[0]),
    "broadcast_": lambda args: _every_shape(args[0]),
    "reduce_": lambda args: _every_shape(args[0]),
    "allgather_": lambda args: _shapes(args[0]),
    "_allgather_base_": lambda args: _every_shape(args[1]),
    "allgather_coalesced_": lambda args: _every_shape(args[1]),
    "allgather_into_tensor_coalesced_": lambda args: _every_shape(args[1]),
    "reduce_scatter_": lambda args: _shapes(args[1]),
    "_reduce_scatter_base_": lambda args: _every_shape(args[0]),
    "reduce_scatter_tensor_coalesced_": lambda args: _every_shape(args[0]),
    "gather_": lambda args: _every_shape(args[1]),
    "scatter_": lambda args: _every_shape(args[0]),
}


def _elements(tensor: Any, splits: list[int], size: int) -> tuple[int, ...]:
    """How many elements of a tensor each rank gets or gives, where ``splits`` counts rows (none: equal shares)."""
    if not splits:
        return (tensor.numel() // size,) * size
    row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return tuple(rows * row for rows in splits)


def _exchanged(name: str, args: tuple, size: int) -> tuple:
    """For each rank, the elements that this one sends to it and expects from it; nothing but for all-to-all."""
    if name == "alltoall_base_":
        return _elements(args[1], args[4], size), _elements(args[0], args[3], size)
    if name == "alltoall_":
        return tuple(t.numel() for t in args[1]), tuple(t.numel() for t in args[0])
    return ()


class Announcer:
    """Writes a line for each operation: what it passes, or the number of an earlier line that said the same."""

    def __init__(self, path: str):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._known: dict[tuple, int] = {}
        self._lock = threading.Lock()

    def __call__(self, entry: Any, name: str, args: tuple, reduction: str) -> None:
        """Note an operation; `name` is that of its operator in c10d."""
        first = next(flatten(args[1] if name in ("gather_", "alltoall_", "alltoall_base_") else args[:2]), None)
        dtype = "" if first is None or entry.op == "barrier" else str(first.dtype).removeprefix("torch.")
        if entry.stream is not None:
            group, peer, tag = entry.stream
            record: tuple = ("message", entry.op, group, entry.group, peer, tag, dtype, first.numel(), entry.where)
        else:
            op = "monitored_barrier" if name == "monitored_barrier_" else entry.op
            if name == "_reduce_scatter_base_" and first.device.type == "cpu":  # which gloo does in another way
                op = "reduce_scatter_single"
            shape = _ALIKE[name](args) if name in _ALIKE else ()
            exchanged = _exchanged(name, args, len(entry.ranks))
            record = ("collective", op, entry.key, entry.group, entry.ranks, reduction, entry.peer, dtype, shape,
                      exchanged, entry.where)
        with self._lock:
            known = self._known.get(record)
            if known is None:
                self._known[record] = len(self._known)
            os.write(self._file, (json.dumps(record) if known is None else str(known)).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)
