"""Time on a rank: spans beside those of others, parts of a training step, the peak, and what a tool costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median

__all__ = [
    "LateRank", "Span", "StepLog", "all_inside", "longest", "matmul_flops", "side_by_side", "slowdown", "spans_of",
]

#: A name, and its start and end in seconds, on a clock that all ranks of a machine share.
Span = tuple[str, float, float]

_LATER = 0.05  # seconds
_PATIENCE = 30.0  # seconds


def spans_of(*functions: Callable[[], object]) -> list[Span]:
    """On a rank: wait until all ranks are here, call the functions one after the other, and return their spans."""
    import torch.distributed as dist

    dist.barrier()
    spans = []
    for function in functions:
        start = time.monotonic()
        function()
        spans.append((function.__name__, start, time.monotonic()))
    return spans


def _named(runs: Sequence[Sequence[Span]], name: str) -> list[tuple[float, float]]:
    return [(start, end) for spans in runs for label, start, end in spans if label == name]


def all_inside(runs: Sequence[Sequence[Span]], name: str) -> bool:
    """Whether there was a moment at which every rank was inside its span `name`; `runs` has the spans by rank."""
    found = _named(runs, name)
    return max(start for start, _ in found) < min(end for _, end in found)


def longest(runs: Sequence[Sequence[Span]], name: str) -> float:
    """Seconds of the longest span `name` of all ranks."""
    return max(end - start for start, end in _named(runs, name))


def side_by_side(**groups: Sequence[Sequence[Span]]) -> dict[str, list[Span]]:
    """Rows for `draw.lanes.timeline` of runs that were made one after the other, each from its own first moment.

    A group of one rank gives a row of the group's name, a larger one a row for each rank.
    """
    rows = {}
    for group, runs in groups.items():
        zero = min(start for spans in runs for _, start, _ in spans)
        for rank, spans in enumerate(runs):
            name = group if len(runs) == 1 else f"rank {rank}"
            rows[name] = [(label, start - zero, end - zero) for label, start, end in spans]
    return rows


class StepLog:
    """Seconds of the parts of each step, on this rank; the parts are named ranges in a trace, too.

    On a GPU the work runs behind the calls, so that a part has to end in ``torch.cuda.synchronize()``.

    Parameters
    ----------
    synchronize : bool
        Wait for the GPU at the end of each part, where there is one. That ends any overlap of one part with the next.

    Attributes
    ----------
    steps : list of dict of part to seconds
        One for each step that :meth:`end_step` has closed. A part that comes twice in a step is added up.
    spans : list of list of (part, start, end)
        The same steps as spans, on a clock that all ranks of a machine share.
    """

    def __init__(self, synchronize: bool = False) -> None:
        self.steps: list[dict[str, float]] = []
        self.spans: list[list[Span]] = []
        self._synchronize = synchronize
        self._open: list[Span] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what runs inside as part `name` of this step."""
        import torch
        from torch.profiler import record_function

        with record_function(name):
            start = time.monotonic()
            yield
            if self._synchronize and torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self._open.append((name, start, time.monotonic()))

    def end_step(self) -> None:
        """Close the step; the next part belongs to the next."""
        taken: dict[str, float] = {}
        for name, start, end in self._open:
            taken[name] = taken.get(name, 0.0) + end - start
        self.steps.append(taken)
        self.spans.append(self._open)
        self._open = []

    def mean(self, skip: int = 0) -> dict[str, float]:
        """Mean seconds of each part, without the first `skip` steps; empty where no step is left."""
        kept = self.steps[skip:]
        parts = dict.fromkeys(part for step in kept for part in step)
        return {part: sum(step.get(part, 0.0) for step in kept) / len(kept) for part in parts}


def matmul_flops(size: int = 768, rounds: int = 5) -> float:
    """FLOP/s of this rank's fastest product of two square matrices, while all ranks multiply: a peak to compare with.

    Parameters
    ----------
    size : int
        Rows and columns, in float32 on the CPU.
    rounds : int
    """
    import torch
    import torch.distributed as dist

    a, b = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def slowdown(
    step: Callable[[], object], tools: Mapping[str, Callable[[], AbstractContextManager]], rounds: int = 5
) -> dict[str, float]:
    """Return how many times as long `step` takes inside each tool, by name.

    Rounds of two steps without a tool and two with each run in turn, so that a busy machine slows all alike; the second
    of the two counts. The figures are medians of the rounds' ratios. Entering and leaving the tool is not counted.

    Parameters
    ----------
    step : callable
        A training step; on ranks that communicate, all of them have to call this function alike.
    tools : dict of name to callable
        Each makes a context manager.
    rounds : int

    Raises
    ------
    ValueError
        `rounds` is below 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    step()
    plain: list[float] = []
    taken: dict[str, list[float]] = {name: [] for name in tools}

    def timed() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    for _ in range(rounds):
        step()  # ranks leave the last tool at different times
        plain.append(timed())
        for name, tool in tools.items():
            with tool():
                step()  # a tool's first step starts slowly
                taken[name].append(timed())
    return {name: median(a / b for a, b in zip(times, plain, strict=True)) for name, times in taken.items()}


class LateRank:
    """Make one rank late at a step, however fast the ranks are: it waits until all others are at their gradients.

    No rank may communicate between :meth:`hold` and :meth:`reached`, because the late one would not come. DDP does so
    in the forward pass of its second step, where it builds its buckets anew.

    Parameters
    ----------
    folder : str
        An empty folder that all ranks see.
    late : int or None
        The rank; None makes nobody late.
    """

    def __init__(self, folder: str, late: int | None) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.folder, self.late = Path(folder), late

    def hold(self, step: int) -> None:
        """On the late rank, return 50 ms after all others have called :meth:`reached` for this step; elsewhere at once.

        Raises
        ------
        RuntimeError
            Some rank has not called it after 30 s.
        """
        if self.rank != self.late:
            return
        others = {rank: self.folder / f"{step}-{rank}.reached" for rank in range(self.world_size) if rank != self.late}
        deadline = time.monotonic() + _PATIENCE
        while missing := [rank for rank, path in others.items() if not path.exists()]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks {missing} did not reach step {step}; do they wait for the late rank?")
            time.sleep(1e-3)
        time.sleep(_LATER)

    def reached(self, step: int) -> None:
        """Say that this rank is at its gradients."""
        if self.late is not None:
            (self.folder / f"{step}-{self.rank}.reached").touch()
