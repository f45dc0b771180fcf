"""Checks of the exercises on interconnects.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from course_utils.check import (
    TIMEOUT,
    Exercise,
    Outcome,
    checked,
    load_hints,
    message_steps,
    number,
    paper_problem,
    show,
    values,
)
from course_utils.check.compare import slip_of
from course_utils.check.traffic import calls

__all__ = [
    "HINTS", "fit_and_predict", "gradient_seconds", "measurements", "ping_pong", "roofline_point", "widest_path",
]  # fmt: skip

HINTS = load_hints(__file__)


def _near(got: float, expected: float, tolerance: float, zero: float = 0.0) -> bool:
    """Whether two numbers agree relative to the larger one, or differ by ``zero`` at most."""
    return math.isclose(got, expected, rel_tol=tolerance, abs_tol=zero)


# ------------------------------------------------------------------------------------------------ fit


def measurements(
    alpha: float, beta: float, noise: float, exponents: Sequence[int] = range(10, 29, 2), seed: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sizes of shape (n,) in bytes and seconds of shape (n, 7): alpha + beta · S with relative noise and hiccups.

    With noise, two of seven measurements in every second row took ten times as long.
    """
    sizes = torch.tensor([2.0**k for k in exponents], dtype=torch.float64)
    factors = 1 + noise * values(len(sizes), 7, seed=seed).double().clamp(-2, 2)
    if noise:
        factors[::2, 1] *= 10
        factors[::2, 4] *= 10
    return sizes, (alpha + beta * sizes)[:, None] * factors


def _line(sizes: torch.Tensor, times: torch.Tensor, weights: torch.Tensor) -> tuple[float, float]:
    """Alpha and beta by least squares, every row multiplied by its weight."""
    columns = torch.stack([weights, sizes * weights], dim=1)
    alpha, beta = torch.linalg.lstsq(columns, (times * weights)[:, None]).solution.flatten().tolist()
    return alpha, beta


def _fit_traps(sizes: torch.Tensor, seconds: torch.Tensor) -> dict[str, list[tuple[float, float]]]:
    """Hint key to the (alpha, beta) that usual slips give."""
    median, mean = seconds.median(dim=1).values, seconds.mean(dim=1)
    one = torch.ones_like(sizes)
    all_sizes, all_times = sizes.repeat_interleave(seconds.shape[1]), seconds.flatten()
    alpha, beta = _line(sizes, median, 1 / median)
    proportional = [float((median / sizes).median()), float((median / sizes).mean()), float(median[-1] / sizes[-1])]
    return {
        "absolute": [
            _line(sizes, median, one), _line(sizes, mean, one),
            _line(all_sizes, all_times, torch.ones_like(all_times)),
        ],
        "outliers": [_line(sizes, mean, 1 / mean)],
        "no-alpha": [(0.0, ratio) for ratio in proportional],
        "bandwidth": [(alpha, 1 / beta)],
        "swapped": [(beta, alpha)],
    }  # fmt: skip


@checked
def fit_and_predict(fn: Callable) -> None:
    """Check ``fn(sizes, seconds, unseen) -> (alpha, beta, predicted)``: within 10 % in spite of noise and hiccups.

    In the last case all measurements of the smallest and of the largest size took 1.3 times as long, which moves a fit
    to all 19 sizes by about 3 %, and an estimate from two sizes by 30 %.
    """
    exercise = Exercise("Exercise 2", HINTS["fit_and_predict"])
    unseen = torch.tensor([100.0, 3e3, 7e5, 3e8], dtype=torch.float64)
    for case, alpha, beta, noise, exponents, ends in (
        ("two sizes without noise", 1e-5, 1 / 10e9, 0, (10, 20), 1.0),
        ("ten sizes, 5 % noise", 20e-6, 1 / 50e9, 0.05, range(10, 29, 2), 1.0),
        ("seven sizes of a slow link, 5 % noise", 1e-3, 1 / 125e6, 0.05, range(8, 27, 3), 1.0),
        ("19 sizes, the first and the last slow", 20e-6, 1 / 50e9, 0.05, range(10, 29), 1.3),
    ):
        exercise.case, exercise.fallback = case, "two-sizes" if ends > 1 else None
        sizes, seconds = measurements(alpha, beta, noise, exponents)
        seconds[[0, -1]] *= ends
        got = exercise.call(fn, sizes.clone(), seconds.clone(), unseen.clone())
        triple = isinstance(got, (tuple, list)) and len(got) == 3 and None not in map(number, got[:2])
        triple = triple and isinstance(got[2], torch.Tensor) and got[2].shape == unseen.shape
        exercise.require(triple, "triple", f"got {show(got)}, expected alpha, beta and a tensor.")
        right, found = (alpha, beta), (number(got[0]), number(got[1]))
        if not _both_near(found, right, 0.1):
            same = partial(_both_near, found, tolerance=1e-3, zero=1e-15)
            key = slip_of(_fit_traps(sizes, seconds), same, "value")
            line = "alpha {:.3g} s, beta {:.3g} s/byte".format
            exercise.differs(key, "the fit is off by more than 10 %.", line(*right), line(*found))
        expected = alpha + beta * unseen
        close = bool(((got[2] - expected).abs() <= 0.1 * expected).all())
        exercise.require(close, "prediction", "the predicted times are off by more than 10 %.")
    print("Exercise 2 passed: alpha, beta and four unseen sizes within 10 %, with noise and hiccups.")


def _both_near(found: Sequence[float], right: Sequence[float], tolerance: float, zero: float = 0.0) -> bool:
    return all(_near(f, w, tolerance, zero) for f, w in zip(found, right, strict=True))


# ------------------------------------------------------------------------------------------------ ping-pong

_WARM_UP, _HICCUP, _TRIP = 0.75, 0.5, 0.004  # seconds on the check's clock


def _trips(repeats: int) -> list[float]:
    """Seconds of each round trip on the check's clock; the first is slow, one of the others has a hiccup."""
    usual = [_TRIP * (1 + 0.25 * (5 * i % 7)) for i in range(4 * repeats)]
    usual[1] = _HICCUP
    return [_WARM_UP, *usual]


def _with_clock(x: torch.Tensor, fn: Callable, repeats: int) -> Any:
    """Call the answer with a clock that moves when this rank has waited for a message."""
    from course_utils import record
    from course_utils.ranks import interceptor

    trips = _trips(repeats)

    def clock() -> float:
        under_way = interceptor.unfinished()
        return 100.0 + sum(trips[: sum(e.op == "recv" and all(e is not u for u in under_way) for e in ledger)])

    with record() as ledger:
        return fn(x, repeats, clock)


@checked
def ping_pong(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, repeats, clock) -> seconds``: repeats + 1 messages of full size each way, one after the other."""
    exercise = Exercise("Exercise 3", HINTS["ping_pong"], timeout)
    for n, repeats, shape in ((2, 5, (50, 2)), (3, 6, ()), (4, 5, (3, 4, 5))):
        data = [values(*shape, seed=400 + rank) for rank in range(n)]
        case = f"repeats = {repeats}, x of shape {shape}"
        outcomes = exercise.run(_with_clock, data, fn, repeats, case=case)
        _ping_pong(exercise, data[0].nbytes, repeats, outcomes)
    for rank, outcome in exercise.each(outcomes):
        exercise.require(rank == 0 or outcome.result is None, "seconds", f"this rank returned {outcome.result!r}.")
    exercise.passed("repeats + 1 messages each way, half of the median.")


def _ping_pong(exercise: Exercise, size: int, repeats: int, outcomes: list[Outcome]) -> None:
    for rank, outcome in exercise.each(outcomes):
        limits, keys = ((1, None), {}) if rank < 2 else (0, {"too-many-calls": "bystander"})
        exercise.audit(outcome.ledger, {"send", "recv"}, calls=limits, keys={"other-calls": "collective", **keys})
    there, back = (outcome.ledger.count("send") for outcome in outcomes[:2])
    exercise.require(there == back, "no-echo", f"rank 0 sends {there} messages, rank 1 sends {back}.")
    what = f"{there} round trips; {repeats + 1} are asked for."
    exercise.require(there != repeats, "no-warm-up", what)
    exercise.require(there == repeats + 1, "count", what)
    for rank, outcome in enumerate(outcomes[:2]):
        other = {entry.bytes for entry in calls(outcome.ledger)} - {size}
        exercise.require(not other, "size", f"messages of {sorted(other)} bytes; x has {size}.", rank)
    steps = message_steps([outcome.ledger for outcome in outcomes])
    exercise.require(steps == 2 * there, "exchange", f"the {2 * there} messages are done in {steps} steps.")
    trips = _trips(repeats)[: repeats + 1]
    expected = statistics.median(trips[1:]) / 2
    got = number(outcomes[0].result)
    exercise.require(got is not None, "seconds", f"rank 0 returned {outcomes[0].result!r}.", 0)
    if _near(got, expected, 1e-6):
        return
    slips = {
        "not-halved": [statistics.median(trips[1:])],
        "middle": [statistics.median_low(trips[1:]) / 2, statistics.median_high(trips[1:]) / 2],
        "warm-up-counted": [statistics.median(trips) / 2, statistics.median(trips)],
        "mean": [f * total for total in (sum(trips[1:]) / repeats, sum(trips) / (repeats + 1)) for f in (1, 0.5)],
        "minimum": [min(trips) / 2, min(trips)],
        "send-only": [0.0],
    }
    key = slip_of(slips, lambda wrong: _near(got, wrong, 1e-6, zero=1e-9), "value")
    expected, got = (f"{1e3 * seconds:.4g} ms" for seconds in (expected, got))
    exercise.differs(key, "the time is wrong on the check's clock.", expected, got, 0)


# ------------------------------------------------------------------------------------------------ widest path

Links = list[tuple[str, str, float]]

_SMALL: dict[str, tuple[Links, str, str]] = {
    "a slow straight link and a detour": (
        [("A", "B", 10e9), ("A", "C", 45e9), ("C", "D", 60e9), ("D", "B", 40e9), ("B", "E", 2e9)], "A", "B",
    ),
    "the fastest first link leads to a slow end": (
        [("A", "B", 90e9), ("B", "E", 5e9), ("A", "C", 30e9), ("C", "D", 20e9), ("D", "E", 60e9), ("E", "F", 1e9)],
        "A", "E",
    ),
    "the same links, listed the other way round": (
        [("E", "B", 5e9), ("E", "D", 60e9), ("D", "C", 20e9), ("C", "A", 30e9), ("B", "A", 90e9), ("F", "E", 1e9)],
        "A", "E",
    ),
    "a dead end as slow as the way": ([("A", "D", 5e9), ("A", "B", 5e9), ("B", "C", 9e9)], "A", "C"),
    "a circle": (
        [("A", "B", 8e9), ("B", "C", 7e9), ("C", "A", 9e9), ("C", "D", 3e9), ("D", "E", 6e9), ("B", "D", 4e9)],
        "A", "E",
    ),
}  # fmt: skip


def _reference_cases() -> dict[str, tuple[Links, str, str]]:
    from course_utils.topology import cluster, reference

    machines = {"PCIe workstation": reference("pcie workstation"), "two DGX H100": cluster("dgx h100", 2)}
    return {
        name: ([(link.a, link.b, link.bandwidth) for link in machine.links], machine.gpus[0], machine.gpus[-1])
        for name, machine in machines.items()
    }


def _neighbours(links: Links) -> dict[str, list[tuple[str, float]]]:
    found: dict[str, list[tuple[str, float]]] = {}
    for a, b, bandwidth in links:
        found.setdefault(a, []).append((b, bandwidth))
        found.setdefault(b, []).append((a, bandwidth))
    return found


def _shortest(links: Links, start: str) -> dict[str, list[float]]:
    """Bandwidths along a path with the fewest links to each device that can be reached."""
    neighbours, paths, todo = _neighbours(links), {start: []}, [start]
    while todo:
        here = todo.pop(0)
        for other, bandwidth in sorted(neighbours.get(here, []), key=lambda link: -link[1]):
            if other not in paths:
                paths[other] = [*paths[here], bandwidth]
                todo.append(other)
    return paths


def _at_least(links: Links, width: float) -> Links:
    return [link for link in links if link[2] >= width]


def _widest(links: Links, start: str, end: str) -> float:
    return max(width for width in {link[2] for link in links} if end in _shortest(_at_least(links, width), start))


def _greedy(links: Links, start: str, end: str) -> list[float]:
    """Bandwidths along the path that takes the fastest link to a new device each time, as far as it leads."""
    neighbours, here, seen, taken = _neighbours(links), start, {start}, []
    while here != end:
        onward = [(bandwidth, other) for other, bandwidth in neighbours[here] if other not in seen]
        if not onward:
            return [0.0]
        bandwidth, here = max(onward)
        seen.add(here)
        taken.append(bandwidth)
    return taken


@checked
def widest_path(fn: Callable) -> None:
    """Check ``fn(links, start, end) -> (bandwidth, (device, device))`` on small graphs and reference machines."""
    exercise = Exercise("Exercise 4", HINTS["widest_path"])
    cases = _SMALL | _reference_cases()
    for name, (links, start, end) in cases.items():
        exercise.case = f"{name}, {start} to {end}"
        exercise.fallback = "direction" if "other way" in name else None
        _widest_path(exercise, links, start, end, exercise.call(fn, list(links), start, end))
    print(
        f"Exercise 4 passed on {len(cases)} machines, the largest with {max(len(c[0]) for c in cases.values())} links."
    )


def _widest_path(exercise: Exercise, links: Links, start: str, end: str, got: Any) -> None:
    pair = isinstance(got, (tuple, list)) and len(got) == 2 and number(got[0]) is not None
    pair = pair and isinstance(got[1], (tuple, list, set, frozenset)) and len(got[1]) == 2
    exercise.require(pair, exercise.fallback or "pair", f"the function returned {got!r}.")
    expected, bandwidth, ends = _widest(links, start, end), number(got[0]), got[1]
    if not _near(bandwidth, expected, 1e-9):
        path = _shortest(_at_least(links, expected), start)[end]  # a shortest of the widest
        slips = {
            "slowest-of-all": min(link[2] for link in links),
            "greedy": min(_greedy(links, start, end)),
            "fewest-hops": min(_shortest(links, start)[end]),
            "series": 1 / sum(1 / b for b in path),
            "sum": sum(path),
            "average": sum(path) / len(path),
            "first-link": path[0],
            "fastest-link": max(path),
        }
        key = slip_of(slips, lambda wrong: _near(bandwidth, wrong, 1e-9), "value")
        right, found = (f"{b / 1e9:.4g} GB/s" for b in (expected, bandwidth))
        exercise.differs(key, "the bandwidth is wrong.", right, found)
    text = " and ".join(map(str, ends))
    right = any(_limits(links, start, end, link) for link in links if link[2] == expected and {*link[:2]} == {*ends})
    exercise.require(right, "bottleneck", f"the bottleneck is not between {text}.")


def _limits(links: Links, start: str, end: str, link: tuple[str, str, float]) -> bool:
    """Whether some path from start to end uses the link and none that is slower."""
    a, b, bandwidth = link
    others = _at_least([other for other in links if other is not link], bandwidth)
    near, far = (_shortest(others, device) for device in (start, end))
    return (a in near and b in far) or (b in near and a in far)


# ------------------------------------------------------------------------------------------------ paper problems


@paper_problem(
    "Exercise 1",
    cases=[
        (1979, True, 3350, 8, 4096, 4096),
        (1979, True, 3350, 4096, 4096, 4096),
        (312, False, 2039, 64, 8192, 1024),
        (312, False, 2039, 2048, 2048, 2048),
    ],
    slips={
        "sparsity": ["/ (2 if with_sparsity else 1)  ->  ", "(2 if with_sparsity else 1)  ->  2"],
        "multiply": "2 * m * n * k  ->  m * n * k",
        "result": "+ m * n)  ->  )",
        "elements": "2 * (m * k  ->  (m * k",
        "memory-only": "min(dense, intensity * bandwidth)  ->  intensity * bandwidth",
        "peak-only": ["min(dense, intensity * bandwidth)  ->  dense", "min  ->  max"],
        "tera": "bandwidth) / 1e12  ->  bandwidth)",
    },
    units=["FLOP/byte at the ridge", "FLOP/byte here", "TFLOP/s attainable"],
    hints=HINTS["roofline_point"],
)
def roofline_point(sheet_tflops, with_sparsity, memory_bandwidth, m, n, k):
    """Check ``fn(sheet_tflops, with_sparsity, memory_bandwidth, m, n, k) -> (ridge, intensity, attainable)``."""
    dense = sheet_tflops * 1e12 / (2 if with_sparsity else 1)
    bandwidth = memory_bandwidth * 1e9
    intensity = 2 * m * n * k / (2 * (m * k + k * n + m * n))
    return dense / bandwidth, intensity, min(dense, intensity * bandwidth) / 1e12


@paper_problem(
    "Exercise 5",
    cases=[
        (7e9, 16, 8, 900, 1, 100), (7e9, 16, 8, 900, 8, 400), (1e9, 2, 4, 600, 2, 200), (13e9, 4, 4, 300, 8, 400),
    ],
    slips={
        "directions": "nvlink_total / 2  ->  nvlink_total",
        "gigabits": "port_gigabits / 8  ->  port_gigabits",
        "one-port": "ports * port_gigabits  ->  port_gigabits",
        "fp32": "size = 2  ->  size = 4",
        "no-factor": "2 * (n - 1) / n  ->  1",
        "node-size": "nodes * per_node  ->  per_node",
        "one-after-another": "every / min(inside, across)  ->  every / inside + every / across",
        "network-only": "min(inside, across)  ->  across",
        "fastest": "min  ->  max",
        "half": "2 * (n - 1) / n  ->  (n - 1) / n",
        "limit": "2 * (n - 1) / n  ->  2",
    },
    units=["s on one node", "s on all nodes"],
    hints=HINTS["gradient_seconds"],
)
def gradient_seconds(parameters, nodes, per_node, nvlink_total, ports, port_gigabits):
    """Check ``fn(parameters, nodes, per_node, nvlink_total, ports, port_gigabits) -> (one node, all nodes)``."""
    inside, across = nvlink_total / 2 * 1e9, ports * port_gigabits / 8 * 1e9
    size = 2 * parameters
    one, every = (2 * (n - 1) / n * size for n in (per_node, nodes * per_node))
    return one / inside, every / min(inside, across)
