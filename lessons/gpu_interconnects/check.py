"""The exercises on interconnects: what an answer must give, and the usual mistakes with their hints."""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from course_utils import record
from course_utils.check import TIMEOUT, Case, Exercise, answer_with, checked, exercise, paper
from course_utils.check.compare import listed, number, show, values
from course_utils.check.program import hints_of
from course_utils.check.traffic import calls, fault, message_steps
from course_utils.ranks import interceptor
from course_utils.topology import cluster, reference

from . import answers

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

# --- exercise 2: alpha and beta


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


@exercise("Exercise 2", passed=": alpha, beta and four unseen sizes within 10 %, with noise and hiccups.", cases=[
    (0, "two sizes without noise", 1e-5, 1 / 10e9, 0, (10, 20)),
    (0, "ten sizes, 5 % noise", 20e-6, 1 / 50e9, 0.05, range(10, 29, 2)),
    (0, "seven sizes of a slow link, 5 % noise", 1e-3, 1 / 125e6, 0.05, range(8, 27, 3)),
    Case(0, "19 sizes, the first and the last slow", (20e-6, 1 / 50e9, 0.05, range(10, 29), 1.3), "two-sizes"),
])
def fit_and_predict(note, answer, alpha, beta, noise, exponents, ends=1.0):
    """All measurements of the smallest and of the largest size take ``ends`` times as long.

    That moves a fit to all 19 sizes by about 3 %, and an estimate from two sizes by 30 %.
    """
    unseen = torch.tensor([100.0, 3e3, 7e5, 3e8], dtype=torch.float64)
    sizes, seconds = measurements(alpha, beta, noise, exponents)
    seconds[[0, -1]] *= ends
    got = answer(sizes.clone(), seconds.clone(), unseen.clone())
    triple = isinstance(got, tuple | list) and len(got) == 3 and None not in map(number, got[:2])
    triple = triple and isinstance(got[2], torch.Tensor) and got[2].shape == unseen.shape
    if not note.holds(triple, "odd", f"the function returned {show(got)}, not alpha, beta and a tensor."):
        return
    found, line = [number(v) for v in got[:2]], "alpha {:.3g} s, beta {:.3g} s/byte".format
    near = all(math.isclose(f, right, rel_tol=0.1) for f, right in zip(found, (alpha, beta), strict=True))
    what = f"the fit is off by more than 10 %.\n  expected  {line(alpha, beta)}\n  got       {line(*found)}"
    note.holds(near, "value", what, ("fit", line(*found)))
    expected = alpha + beta * unseen
    close = bool(((got[2] - expected).abs() <= 0.1 * expected).all())
    note.holds(close, "prediction", "the predicted times are off by more than 10 %.")


MEDIAN = "t = seconds.median(dim=1).values"
WEIGHTED, ONES = "[1 / t, sizes / t]", "torch.ones_like(t)[:, None]"
FOUND = f"alpha, beta = torch.linalg.lstsq(relative, {ONES}).solution.flatten()"
UNWEIGHTED = {WEIGHTED: "[torch.ones_like(t), sizes]", ONES: "t[:, None]"}

MISTAKES["fit_and_predict"] = {
    "absolute": ("""Least squares on the seconds themselves is dominated by the largest messages: 1 % of their time is
        more than all of alpha.""", [UNWEIGHTED, UNWEIGHTED | {"median(dim=1).values": "mean(dim=1)"},
             UNWEIGHTED | {MEDIAN: "t, sizes = seconds.flatten(), sizes.repeat_interleave(seconds.shape[1])"}]),
    "outliers": ("The few measurements that took ten times as long pull the fit up.",
            "median(dim=1).values  ->  mean(dim=1)"),
    "no-alpha": ("Time divided by size says that an empty message takes no time.",
            [f"{FOUND}  ->  alpha, beta = torch.tensor(0.0), {ratio}"
             for ratio in ("(t / sizes).median()", "(t / sizes).mean()", "t[-1] / sizes[-1]")]),
    "bandwidth": ("beta is seconds per byte, and this is bytes per second.", "beta.item()  ->  1 / beta.item()"),
    "swapped": ("Both numbers are right, but they are in the wrong order.",
            "alpha.item(), beta.item()  ->  beta.item(), alpha.item()"),
    "prediction": ("alpha and beta are right, but the times computed from them for the unseen sizes are not.",
            "alpha + beta * unseen  ->  beta * unseen"),
    "two-sizes": ("""In this case every measurement of the smallest and of the largest size is slow. An estimate that
        rests on one or two sizes is off by as much as they are.""",
            f"{MEDIAN}  ->  t, sizes = seconds.median(dim=1).values[[0, -1]], sizes[[0, -1]]"),
    "value": ("Start with data without noise: two rows are then enough to compute alpha and beta by hand.",),
}
RIGHT["fit_and_predict"] = {
    "the best time": "median(dim=1).values  ->  sort(dim=1).values[:, 0]",
    "squared weights, normal equations": {
        WEIGHTED: "[1 / t**2, sizes / t**2]",
        FOUND: "alpha, beta = torch.linalg.solve(relative.T @ relative, relative.T @ (1 / t))",
    },
}

# --- exercise 3: ping-pong

WARM_UP, HICCUP, TRIP = 0.75, 0.5, 0.004  # seconds on the check's clock


def seconds_of_trips(repeats: int) -> list[float]:
    """Of each round trip on the check's clock; the first is slow, one of the others has a hiccup."""
    usual = [TRIP * (1 + 0.25 * (5 * i % 7)) for i in range(4 * repeats)]
    usual[1] = HICCUP
    return [WARM_UP, *usual]


def with_clock(x: torch.Tensor, fn: Callable, repeats: int) -> Any:
    """Call the answer with a clock that moves when this rank has waited for a message."""
    trips = seconds_of_trips(repeats)

    def clock() -> float:
        under_way = interceptor.unfinished()
        return 100.0 + sum(trips[: sum(e.op == "recv" and all(e is not u for u in under_way) for e in ledger)])

    with record() as ledger:
        return fn(x, repeats, clock)


@checked
def ping_pong(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Each rank's ledger, how the messages of two ranks follow each other, and the time on the check's clock."""
    run = Exercise("Exercise 3", hints_of(MISTAKES["ping_pong"]), timeout)
    for n, repeats, shape in ((2, 5, (50, 2)), (3, 6, ()), (4, 5, (3, 4, 5))):
        data = [values(*shape, seed=400 + rank) for rank in range(n)]
        outcomes = run.run(with_clock, data, fn, repeats, case=f"repeats = {repeats}, x of shape {shape}")
        for rank, outcome in run.each(outcomes):
            limit = (1, None) if rank < 2 else 0
            key, what = fault(outcome.ledger, {"send", "recv"}, calls=limit, too_many_calls="bystander")
            run.require(not key, key, what)
        there, back = (outcome.ledger.count("send") for outcome in outcomes[:2])
        run.require(there == back, "no-echo", f"rank 0 sends {there} messages, rank 1 sends {back}.")
        run.require(there == repeats + 1, "count", f"{there} round trips; {repeats + 1} are asked for.")
        for rank, outcome in enumerate(outcomes[:2]):
            other = {entry.bytes for entry in calls(outcome.ledger)} - {data[0].nbytes}
            run.require(not other, "no-echo", f"messages of {sorted(other)} bytes; x has {data[0].nbytes}.", rank)
        steps = message_steps([outcome.ledger for outcome in outcomes])
        run.require(steps == 2 * there, "exchange", f"the {2 * there} messages are done in {steps} steps.")
        for rank, outcome in run.each(outcomes):
            right = outcome.result is None if rank else number(outcome.result) is not None
            run.require(right, "odd", f"this rank returned {outcome.result!r}.")
        expected = statistics.median(seconds_of_trips(repeats)[1 : repeats + 1]) / 2
        got = number(outcomes[0].result)
        if not math.isclose(got, expected, rel_tol=1e-6):
            key, milliseconds = wrong_time(got, data, repeats), (f"{1e3 * s:.4g} ms" for s in (expected, got))
            run.differs(key, "the time is wrong on the check's clock.", *milliseconds, 0)
    run.passed("repeats + 1 messages each way, half of the median.")


def wrong_time(got: float, data: list, repeats: int) -> str:
    """The mistake that gives this time."""
    for key in ("not-halved", "mean", "count", "send-only"):
        for edit in listed(MISTAKES["ping_pong"][key][1]):
            wrong = answer_with(answers.__name__, "ping_pong", edit)
            seconds = Exercise("", {}).run(with_clock, data, wrong, repeats)[0].result
            if math.isclose(got, number(seconds), rel_tol=1e-6, abs_tol=1e-9):
                return key
    return "value"


GO_AND_RETURN = """if rank == 0:
            dist.send(x, dst=1)
            dist.recv(x, src=1)
        elif rank == 1:
            dist.recv(x, src=0)
            dist.send(x, dst=0)"""
STATED, NOTED = "rank, times = dist.get_rank(), []", "times.append(clock() - start)"
MIDDLE = "statistics.median(times[1:])"

MISTAKES["ping_pong"] = {
    "hang": ("""At least one rank waits for a partner that never comes. Follow one round trip in the report below: while
        one of ranks 0 and 1 sends, what does the other do?""",
            "dist.send(x, dst=1)\n            dist.recv(x, src=1)  ->  dist.recv(x, src=1)\ndist.send(x, dst=1)"),
    "bystander": ("Only ranks 0 and 1 take part. If other ranks sent messages too, they would share the links.",
            {"if rank == 0:": "if rank % 2 == 0 and rank + 1 < dist.get_world_size():",
             "elif rank == 1:": "elif rank % 2:",
             "dst=1": "dst=rank + 1", "src=1": "src=rank + 1", "src=0": "src=rank - 1", "dst=0": "dst=rank - 1"}),
    "no-echo": ("""In a round trip, each message that goes there is answered by one of the same size that comes back.
        That a send has returned does not mean that its message has arrived.""",
            {"dist.recv(x, src=1)": "pass", "dist.send(x, dst=0)": "pass"}),
    "exchange": ("""Messages are under way at the same time. In a round trip the second one starts only when the first
        has arrived.""",
            {GO_AND_RETURN: "if rank < 2:\n    both = [dist.P2POp(dist.isend, x, 1 - rank), "
             "dist.P2POp(dist.irecv, torch.empty_like(x), 1 - rank)]\n"
             "    for request in dist.batch_isend_irecv(both):\n        request.wait()"}),
    "count": ("""Make one round trip to warm up, which opens connections and must not count, and then as many as repeats
        says, no more and no fewer.""", [{"repeats + 1": "repeats", "times[1:]": "times"}, "times[1:]  ->  times"]),
    "not-halved": ("That is the time of a whole round trip, in which two messages follow each other.",
            "/ 2 if  ->  if"),
    "mean": ("""The docstring asks for the median. A single slow round trip pulls up the mean, and the fastest is not
        typical. Of an even number the median lies halfway between the two in the middle; torch.median returns the lower
        one.""", ["statistics.median  ->  statistics.mean", "statistics.median  ->  min",
             f"{MIDDLE}  ->  sorted(times[1:])[repeats // 2]",
             f"{MIDDLE}  ->  torch.tensor(times[1:]).median().item()"]),
    "send-only": ("The clock has not moved between your two looks at it: no message came back in between.",
            {NOTED: "", "dist.send(x, dst=1)": f"dist.send(x, dst=1)\n{NOTED}"}),
}
RIGHT["ping_pong"] = {
    "a receive posted before the clock": {
        STATED: f"{STATED}\necho = torch.empty_like(x)",
        "start = clock()": "if rank == 0:\n    arrival = dist.irecv(echo, src=1)\nstart = clock()",
        "dist.send(x, dst=1)": "dist.isend(x, dst=1).wait()", "dist.recv(x, src=1)": "arrival.wait()",
    },
    "differences of stamps, from any rank": {
        "start = clock()": "times.append(clock())", NOTED: "", "recv(x, src=1)": "recv(x)",
        f"return {MIDDLE} / 2": "stamps = torch.tensor([*times, clock()], dtype=torch.float64)\n"
                                "return stamps.diff()[1:].quantile(0.5) / 2",
    },
}

# --- exercise 4: the widest path

Links = Sequence[tuple[str, str, float]]


def described(machine: Any) -> tuple[list, str, str]:
    return [(link.a, link.b, link.bandwidth) for link in machine.links], machine.gpus[0], machine.gpus[-1]


MACHINES: dict[str, tuple[list, str, str]] = {
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
    "PCIe workstation": described(reference("pcie workstation")),
    "two DGX H100": described(cluster("dgx h100", 2)),
}  # fmt: skip
LARGEST = max(len(links) for links, *_ in MACHINES.values())


def reached(links: Links, start: str) -> set[str]:
    devices = {start}
    while more := {device for link in links if devices & {*link[:2]} for device in link[:2]} - devices:
        devices |= more
    return devices


def limits(links: Links, start: str, end: str, link: tuple) -> bool:
    """Whether some path from start to end uses the link and none that is slower."""
    others = [other for other in links if other is not link and other[2] >= link[2]]
    near, far = reached(others, start), reached(others, end)
    return any(a in near and b in far for a, b in (link[:2], link[1::-1]))


@exercise(
    "Exercise 4", passed=f"on {len(MACHINES)} machines, the largest with {LARGEST} links.", explains=("odd",), cases=[
        Case(0, f"{name}, {start} to {end}", (links, start, end), "direction" if "other way" in name else None)
        for name, (links, start, end) in MACHINES.items()
    ],
)
def widest_path(note, answer, links, start, end):
    """The bandwidth, and the ends of any link of a widest path that has it."""
    got = answer(list(links), start, end)
    pair = isinstance(got, tuple | list) and len(got) == 2 and number(got[0]) is not None
    pair = pair and isinstance(got[1], tuple | list | set | frozenset) and len(got[1]) == 2
    if not note.holds(pair, "odd", f"the function returned {got!r}, not a bandwidth and two devices."):
        return
    expected, bandwidth = answers.widest_path(links, start, end)[0], number(got[0])
    what = f"the bandwidth is wrong.\n  expected  {expected / 1e9:.4g} GB/s\n  got       {bandwidth / 1e9:.4g} GB/s"
    note.holds(math.isclose(bandwidth, expected), "value", what, ("bandwidth", f"{bandwidth:.6g}"))
    right = any(limits(links, start, end, link) for link in links if link[2] == expected and {*link[:2]} == {*got[1]})
    note.holds(right, "bottleneck", f"the bottleneck is not between {' and '.join(map(str, got[1]))}.")


AT_BORDER = "(link[0] in reached_by) != (link[1] in reached_by)"
ONE_WAY = {AT_BORDER: "link[0] in reached_by and link[1] not in reached_by"}
FASTEST, RESULT = "fastest = max(leaving, key=lambda link: link[2])", "return bandwidth, (a, b)"

MISTAKES["widest_path"] = {
    "greedy": ("The fastest link at each device can lead to a slow end.",
            f"{AT_BORDER}  ->  {AT_BORDER} and list(reached_by)[-1] in link"),
    "fewest-hops": ("The path with the fewest links is not the widest.",
            f"{FASTEST}  ->  fastest = min(leaving, key=lambda link: [x in link for x in reached_by].index(1))"),
    "series": ("""Data streams through all links of the path at once, and the slowest sets the pace: times do not add
        up, bandwidths do not add up, and a mean says nothing.""",
            ["return bandwidth  ->  return 1 / sum(1 / link[2] for link in path)",
             "return bandwidth  ->  return sum(link[2] for link in path)",
             "return bandwidth  ->  return sum(link[2] for link in path) / len(path)"]),
    "other-link": ("""That is the bandwidth of the first link of the path, of its fastest, or of the slowest of the
        whole machine. What limits is a link of the path, and any of them may be its slowest.""",
            [f"{RESULT}  ->  return path[-1][2], path[-1][:2]", "min(path  ->  max(path", "min(path  ->  min(links"]),
    "direction": ("A link works both ways, whichever of its devices is named first.", [ONE_WAY,
             ONE_WAY | {FASTEST: f"if not leaving:\n    return None\n{FASTEST}"}]),
    "bottleneck": ("""The bandwidth is right. The second result should name the two ends of a link on such a path whose
        bandwidth is exactly this one.""", [f"{RESULT}  ->  return bandwidth, path[-1][:2]",
             f"{RESULT}  ->  return bandwidth, next(link[:2] for link in links if link[2] == bandwidth)"]),
    "value": ("""Print the links that your function gets in a small case, draw them, and follow its way from start to
        end.""",),
}


def dijkstra(links, start, end):
    heap, seen = [(-float("inf"), start, None)], set()
    while heap:
        width, here, slowest = heapq.heappop(heap)
        if here == end:
            return -width, slowest[:2]
        seen.add(here)
        for link in links:
            other = link[link[0] == here]
            if here in link[:2] and other not in seen:
                heapq.heappush(heap, (max(width, -link[2]), other, link if -link[2] > width else slowest))


def kruskal(links, start, end):
    part = {device: {device} for link in links for device in link[:2]}
    for a, b, bandwidth in sorted(links, key=lambda link: -link[2]):
        joined = part[a] | part[b]
        part.update(dict.fromkeys(joined, joined))
        if end in part[start]:
            return [np.float64(bandwidth), [b, a]]


RIGHT["widest_path"] = {"Dijkstra": dijkstra, "Kruskal": kruskal}

# --- exercises 1 and 5, on paper

MISTAKES["roofline_point"] = {
    "sparsity": ("""A peak with 2:4 sparsity is twice the peak for dense matrices, but not every data sheet counts
        sparsity.""", ["/ (2 if with_sparsity else 1)  ->  ", "(2 if with_sparsity else 1)  ->  2"]),
    "multiply": ("A multiplication with its addition counts as two FLOP.", "2 * m * n * k  ->  m * n * k"),
    "result": ("The result has to be written to memory as well.", "+ m * n)  ->  )"),
    "elements": ("Intensity is FLOP per byte, and this is FLOP per number.", "2 * (m * k  ->  (m * k"),
    "one-limit": ("To the left of the ridge memory is the limit, to the right of it arithmetic.",
            ["min(dense, intensity * bandwidth)  ->  intensity * bandwidth",
             "min(dense, intensity * bandwidth)  ->  dense", "min  ->  max"]),
    "tera": ("The docstring asks for TFLOP/s, and this is FLOP/s.", "bandwidth) / 1e12  ->  bandwidth)"),
}
RIGHT["roofline_point"] = {
    "longer of two times": "min(dense, intensity * bandwidth)  ->  "
        "2 * m * n * k / max(2 * m * n * k / dense, 2 * m * n * k / intensity / bandwidth)",
    "left or right of the ridge": "min(dense, intensity * bandwidth)  ->  "
        "(dense if intensity > dense / bandwidth else intensity * bandwidth)",
}
SLOWER = "every / min(inside, across)"
MISTAKES["gradient_seconds"] = {
    "directions": ("""The data sheet's figure for NVLink adds up both directions. What leaves a GPU can use only one of
        them.""", "nvlink_total / 2  ->  nvlink_total"),
    "gigabits": ("Gb stands for gigabits, GB for gigabytes.", "port_gigabits / 8  ->  port_gigabits"),
    "one-port": ("That is the bandwidth of one port. A node has several, and they work side by side.",
            "ports * port_gigabits  ->  port_gigabits"),
    "fp32": ("Here each gradient has 2 bytes.", "* 2 * parameters  ->  * 4 * parameters"),
    "no-factor": ("""In a ring a GPU does not send S, the size of the gradients, but another amount. And adding up is
        half of the work: the sums then have to come back to all GPUs.""", ["2 * (n - 1) / n  ->  1",
             "2 * (n - 1) / n  ->  (n - 1) / n"]),
    "node-size": ("The ring through all nodes has more GPUs than the ring on one node.",
            "nodes * per_node  ->  per_node"),
    "one-after-another": ("""Data streams through NVLink and the ports at the same time: the slower of the two sets the
        pace, which may be NVLink, and their times do not add up.""",
            [f"{SLOWER}  ->  every / inside + every / across", "min(inside, across)  ->  across"]),
}
RIGHT["gradient_seconds"] = {
    "an array": {"inside, across = ": "import numpy as np\ninside, across = ",
                 f"one / inside, {SLOWER}": f"np.array([one / inside, {SLOWER}])"},
    "share by share, slower of two times": {
        "2 * (n - 1) / n * 2 * parameters": "sum(4 * parameters / n for _ in range(n - 1))",
        SLOWER: "max(every / inside, every / across)"},
}

roofline_point = paper(
    "Exercise 1", answers.roofline_point, MISTAKES["roofline_point"],
    units=["FLOP/byte at the ridge", "FLOP/byte here", "TFLOP/s attainable"], cases=[
        (1979, True, 3350, 8, 4096, 4096), (1979, True, 3350, 4096, 4096, 4096), (312, False, 2039, 64, 8192, 1024),
        (312, False, 2039, 2048, 2048, 2048),
    ],
)
gradient_seconds = paper(
    "Exercise 5", answers.gradient_seconds, MISTAKES["gradient_seconds"],
    units=["s on one node", "s on all nodes"], cases=[
        (7e9, 16, 8, 900, 1, 100), (7e9, 16, 8, 900, 8, 400), (1e9, 2, 4, 600, 2, 200), (13e9, 4, 4, 300, 8, 400),
    ],
)
