"""What a rank passes to each operation, and what calls of one operation differ in (private).

The ledger keeps what all ranks must pass alike, for a warning after the call. With ``verify`` it is exact, and written
to a file before the operation begins: that waits for nobody, and is still there when the operation ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..units import decimal_bytes
from .labels import rank_label

_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_SAME_SIZE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")  # on all ranks of a group


class Passed(NamedTuple):
    """What a rank passes to one operation, as far as others have to pass the same; in the order of what is told first.

    ``peer`` is the root, of a message the other side. An exact signature has shapes in place of bytes, and for
    all-to-all the elements that are ``exchanged``: sent to each rank, and expected from it.
    """

    op: str
    reduction: str = ""
    peer: int | None = None
    dtype: str = ""
    bytes: int = 0
    shape: tuple = ()
    exchanged: tuple = ()

    def __str__(self) -> str:
        """In words: ``all_reduce MAX float32 (4)``; of an exact signature."""
        root = "" if self.peer is None or self.op in ("send", "recv") else f"root {self.peer}"
        splits = "sends {}, expects {}".format(*(",".join(map(str, s)) for s in self.exchanged or ((), ())))
        parts = (self.op, self.reduction, root, self.dtype, shapes_text(self.shape), splits if self.exchanged else "")
        return " ".join(part for part in parts if part)


def shapes_text(shapes: tuple) -> str:
    return ", ".join("({})".format(", ".join(map(str, shape))) for shape in shapes)


# ---------------------------------------------------------------------------------------------------------- difference

#: How a field is told: its plural, the verb of one rank and of several, the value.
_WORDS: dict[str, tuple[str, str, str, Callable[[Any], str]]] = {
    "op": ("operations", "calls", "call", str),
    "reduction": ("reductions", "reduces with", "reduce with", str),
    "peer": ("roots", "has", "have", "root {}".format),
    "dtype": ("types", "passes", "pass", str),
    "bytes": ("sizes", "passes", "pass", decimal_bytes),
    "shape": ("shapes", "passes", "pass", lambda s: f"shape{'s' * (len(s) > 1)} {shapes_text(s)}"),
}


@dataclass
class Difference:
    """What calls of one operation differ in: a field, and the ranks by its value."""

    field: str
    ranks: dict[Any, list[int]]

    @property
    def odd(self) -> int:
        """The rank with which the fewest agree; of several the first that differs from the lowest rank."""
        return min(self.ranks.values(), key=lambda ranks: (len(ranks), -ranks[0]))[0]

    @property
    def plural(self) -> str:
        return _WORDS[self.field][0]

    def values(self) -> dict[str, list[int]]:
        """The values in words, with their ranks."""
        return {_WORDS[self.field][3](value): ranks for value, ranks in self.ranks.items()}

    def by_rank(self) -> str:
        """``sizes: rank 0 4 kB, rank 1 8 kB``."""
        said = sorted((rank, value) for value, ranks in self.values().items() for rank in ranks)
        return f"{self.plural}: " + ", ".join(f"rank {rank} {value}" for rank, value in said)

    def sentence(self) -> str:
        """``rank 1 reduces with MAX, ranks 0,2 reduce with SUM``."""
        _, one, many, _ = _WORDS[self.field]
        few_first = sorted(self.values().items(), key=lambda item: (len(item[1]), -item[1][0]))
        return ", ".join(f"{rank_label(ranks)} {one if len(ranks) == 1 else many} {said}" for said, ranks in few_first)


def difference(calls: dict[int, Passed]) -> Difference | None:
    """The first field in which calls of one operation differ. A reduction or type that is empty is not known."""
    for field in _WORDS:
        values: dict[Any, list[int]] = {}
        for rank, call in sorted(calls.items()):
            if (value := getattr(call, field)) != "":
                values.setdefault(value, []).append(rank)
        if len(values) > 1:
            return Difference(field, values)
    return None


# ----------------------------------------------------------------------------------------------------------- on a rank


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


def passed(op: str, reduction: str, peer: int | None, dtype: str, size: int) -> Passed:
    """What is known of every call."""
    return Passed(op, reduction, peer, dtype, size if op in _SAME_SIZE else 0)


def passed_exactly(entry: Any, name: str, args: tuple, reduction: str) -> Passed:
    """What is passed to the operator of c10d with this name."""
    if entry.stream is not None:
        return Passed(entry.op, "", entry.peer, entry.dtype, shape=((next(flatten(args)).numel(),),))
    op = "monitored_barrier" if name == "monitored_barrier_" else entry.op
    if name == "_reduce_scatter_base_" and args[0].device.type == "cpu":  # which gloo does in another way
        op = "reduce_scatter_single"
    shapes = tuple(tuple(tensor.shape) for tensor in flatten(args[_ALIKE[name]])) if name in _ALIKE else ()
    if name in ("allgather_", "reduce_scatter_") and len(set(shapes)) == 1:
        shapes = shapes[:1]
    return Passed(op, reduction, entry.peer, entry.dtype, 0, shapes, _exchanged(name, args, len(entry.ranks)))


#: Which argument has the tensors whose shapes all ranks of a group must pass alike: of one tensor for all, the parts.
_ALIKE = {
    "allreduce_": 0, "allreduce_coalesced_": 0, "broadcast_": 0, "reduce_": 0, "allgather_": 0, "_allgather_base_": 1,
    "allgather_coalesced_": 1, "allgather_into_tensor_coalesced_": 1, "reduce_scatter_": 1, "_reduce_scatter_base_": 0,
    "reduce_scatter_tensor_coalesced_": 0, "gather_": 1, "scatter_": 0,
}


def _exchanged(name: str, args: tuple, size: int) -> tuple:
    """For each rank, the elements that this one sends to it and expects from it; nothing but for all-to-all."""
    if name == "alltoall_base_":
        return _elements(args[1], args[4], size), _elements(args[0], args[3], size)
    if name == "alltoall_":
        return tuple(t.numel() for t in args[1]), tuple(t.numel() for t in args[0])
    return ()


def _elements(tensor: Any, splits: list[int], size: int) -> tuple[int, ...]:
    """How many elements of a tensor each rank gets or gives, where ``splits`` counts rows (none: equal shares)."""
    if not splits:
        return (tensor.numel() // size,) * size
    row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return tuple(rows * row for rows in splits)


class Announcer:
    """Writes a line for each operation, which `verify` reads."""

    def __init__(self, path: str):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, entry: Any, passed: Passed) -> None:
        group, _, tag = entry.stream or (entry.key, None, 0)
        said = tuple(passed), group, entry.group, entry.ranks, tag, entry.where
        os.write(self._file, f"{said}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        os.close(self._file)
