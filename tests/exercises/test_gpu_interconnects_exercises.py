"""The exercises on interconnects: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
import torch
from exercise_cases import ExerciseTests, hangs

from course_utils.check import CheckFailed
from course_utils.topology import REFERENCES, reference
from lessons.gpu_interconnects import check as interconnects

pytestmark = pytest.mark.guard(60)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

# ------------------------------------------------------------------------------------------------ roofline

WRONG["roofline_point"] = {"numbers": "dense / bandwidth,  ->  bandwidth / dense,"}
RIGHT["roofline_point"] = {
    "longer of two times": "min(dense, intensity * bandwidth)  ->  "
    "2 * m * n * k / max(2 * m * n * k / dense, 2 * m * n * k / intensity / bandwidth)",
    "left or right of the ridge": "min(dense, intensity * bandwidth)  ->  "
    "(dense if intensity > dense / bandwidth else intensity * bandwidth)",
}

# ------------------------------------------------------------------------------------------------ fit

MEDIAN = "t = seconds.median(dim=1).values"
WEIGHTED, ONES = "[1 / t, sizes / t]", "torch.ones_like(t)[:, None]"
FOUND = "alpha, beta = torch.linalg.lstsq(relative, torch.ones_like(t)[:, None]).solution.flatten()"
RETURNED = "alpha.item(), beta.item(), alpha + beta * unseen"
UNWEIGHTED = {WEIGHTED: "[torch.ones_like(t), sizes]", ONES: "t[:, None]"}
ALL_TIMES = "t, sizes = seconds.flatten(), sizes.repeat_interleave(seconds.shape[1])"

WRONG["fit_and_predict"] = {
    "absolute": [UNWEIGHTED, {MEDIAN: ALL_TIMES, **UNWEIGHTED}],
    "outliers": "median(dim=1).values  ->  mean(dim=1)",
    "two-sizes": f"{MEDIAN}  ->  t, sizes = seconds.median(dim=1).values[[0, -1]], sizes[[0, -1]]",
    "no-alpha": f"{FOUND}  ->  alpha, beta = torch.tensor(0.0), (t / sizes).median()",
    "bandwidth": "beta.item()  ->  1 / beta.item()",
    "swapped": "alpha.item(), beta.item()  ->  beta.item(), alpha.item()",
    "prediction": "alpha + beta * unseen  ->  beta * unseen",
    "triple": f"{RETURNED}  ->  alpha + beta * unseen",
    "value": "median(dim=1)  ->  median(dim=int(len(sizes) != seconds.shape[1]))",
    "error": "sizes / t]  ->  sizes / seconds]",
}


def reweighted(sizes, seconds, unseen):
    """All measurements, in relative error; what lies far off counts less each time."""
    x, t = np.repeat(sizes.numpy(), seconds.shape[1]), seconds.numpy().ravel()
    weights = np.ones_like(t)
    for _ in range(50):
        w = weights / t
        alpha, beta = np.linalg.lstsq(np.stack([w, x * w], 1), weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(abs(alpha + beta * x - t) / t, 1e-6))
    return torch.tensor(alpha), torch.tensor(beta), alpha + beta * unseen


def pairwise_slopes(sizes, seconds, unseen):
    """The median slope of all pairs of sizes, and the median of what it leaves."""
    t = seconds.median(dim=1).values
    slopes = [(t[j] - t[i]) / (sizes[j] - sizes[i]) for i, j in itertools.combinations(range(len(t)), 2)]
    beta = float(np.median(slopes))
    alpha = float((t - beta * sizes)[: (len(t) + 1) // 2].median())
    return alpha, beta, alpha + beta * unseen


RIGHT["fit_and_predict"] = {
    "any of the best times": [
        f"median(dim=1).values  ->  sort(dim=1).values[:, {place}]" for place in (0, 3)
    ],
    "trimmed mean": "median(dim=1).values  ->  sort(dim=1).values[:, 1:5].mean(dim=1)",
    "squared weights": {WEIGHTED: "[1 / t**2, sizes / t**2]", ONES: "(1 / t)[:, None]"},
    "polyfit": {FOUND: "import numpy as np\nbeta, alpha = np.polyfit(sizes, t, 1, w=1 / t)"},
    "normal equations": f"{FOUND}  ->  alpha, beta = torch.linalg.solve(relative.T @ relative, relative.sum(dim=0))",
    "reweighted": reweighted,
    "pairwise slopes": pairwise_slopes,
}

# ------------------------------------------------------------------------------------------------ ping-pong

TRIP = """if rank == 0:
            dist.send(x, dst=1)
            dist.recv(x, src=1)
        elif rank == 1:
            dist.recv(x, src=0)
            dist.send(x, dst=0)"""
STATED = "rank, times = dist.get_rank(), []"
NOTED = "times.append(clock() - start)"
HALF = "statistics.median(times[1:]) / 2 if rank == 0 else None"

WITH_EVERYBODY = """for other in range(1, dist.get_world_size()):
    if rank == 0:
        dist.send(x, dst=other)
        dist.recv(x, src=other)
    elif rank == other:
        dist.recv(x, src=0)
        dist.send(x, dst=0)"""
IN_PAIRS = {
    "if rank == 0:": "if rank % 2 == 0 and rank + 1 < dist.get_world_size():", "elif rank == 1:": "elif rank % 2:",
    "dst=1": "dst=rank + 1", "src=1": "src=rank + 1", "src=0": "src=rank - 1", "dst=0": "dst=rank - 1",
}  # fmt: skip
AT_ONCE = """if rank < 2:
    both = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, torch.empty_like(x), 1 - rank)]
    for request in dist.batch_isend_irecv(both):
        request.wait()"""


WRONG["ping_pong"] = {
    "hang": hangs("dist.send(x, dst=1)\n            dist.recv(x, src=1)  ->  dist.recv(x, src=1)\ndist.send(x, dst=1)"),
    "not-distributed": {TRIP: "x = x.clone()"},
    "collective": {TRIP: "dist.broadcast(x, src=0)\ndist.broadcast(x, src=1)"},
    "bystander": [{TRIP: WITH_EVERYBODY}, IN_PAIRS],
    "no-echo": {"dist.recv(x, src=1)": "pass", "dist.send(x, dst=0)": "pass"},
    "size": {"recv(x, src=1)": "recv(x[:1, :1], src=1)", "send(x, dst=0)": "send(x[:1, :1], dst=0)"},
    "exchange": {TRIP: AT_ONCE},
    "no-warm-up": {"repeats + 1": "repeats", "times[1:]": "times"},
    "count": {"repeats + 1": "repeats + 2", "times[1:]": "times[2:]"},
    "not-halved": "/ 2 if  ->  if",
    "warm-up-counted": "times[1:]  ->  times",
    "middle": [
        "statistics.median(times[1:])  ->  sorted(times[1:])[repeats // 2]",
        "statistics.median(times[1:])  ->  torch.tensor(times[1:]).median().item()",
    ],
    "mean": "statistics.median  ->  statistics.mean",
    "minimum": "statistics.median  ->  min",
    "send-only": {NOTED: "", "dist.send(x, dst=1)": f"dist.send(x, dst=1)\n{NOTED}"},
    "seconds": [f"return {HALF}  ->  ", "if rank == 0 else None  ->  if rank == 0 else 0.0"],
    "error": {STATED: f"rows, columns = x.shape\n{STATED}"},
    "value": "/ 2 if  ->  / 2 * 1e6 if",
}

POSTED = {
    STATED: f"{STATED}\necho = torch.empty_like(x)",
    "dist.send(x, dst=1)": "dist.isend(x, dst=1).wait()",
    "dist.recv(x, src=1)": "arrival.wait()",
}
RIGHT["ping_pong"] = {
    "receive posted before the clock": {
        **POSTED, "start = clock()": "if rank == 0:\n    arrival = dist.irecv(echo, src=1)\nstart = clock()",
    },
    "receive posted before the send": {
        **POSTED, "if rank == 0:": "if rank == 0:\n    arrival = dist.irecv(echo, src=1)",
    },
    "batches of one": {
        STATED: f"import numpy as np\n{STATED}",
        "dist.send(x, dst=1)": "dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)])[0].wait()",
        "dist.recv(x, src=1)": "dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)])[0].wait()",
        "statistics.median": "np.median",
    },
    "differences of stamps": {
        "start = clock()": "times.append(clock())",
        NOTED: "",
        "recv(x, src=1)": "recv(x)",
        f"return {HALF}": "stamps = torch.tensor([*times, clock()], dtype=torch.float64)\n"
        "return stamps.diff()[1:].quantile(0.5) / 2 if rank == 0 else None",
    },
    "rank 1 answers with its own message": "dist.recv(x, src=0)  ->  dist.recv(torch.empty_like(x), src=0)",
}  # fmt: skip

# ------------------------------------------------------------------------------------------------ widest path

AT_BORDER = "(link[0] in reached_by) != (link[1] in reached_by)"
ONE_WAY = {AT_BORDER: "link[0] in reached_by and link[1] not in reached_by"}
FASTEST = "fastest = max(leaving, key=lambda link: link[2])"
RESULT = "return bandwidth, (a, b)"
IN_CIRCLES = """def widest(here):
    onward = (link for link in links if here in link[:2])
    return float("inf") if here == end else max(min(link[2], widest(link[link[0] == here])) for link in onward)

return widest(start), (start, end)
reached_by = {start: None}"""

WRONG["widest_path"] = {
    "fewest-hops": f"{FASTEST}  ->  fastest = min(leaving, key=lambda link: [x in link for x in reached_by].index(1))",
    "greedy": f"{AT_BORDER}  ->  {AT_BORDER} and list(reached_by)[-1] in link",
    "series": "return bandwidth  ->  return 1 / sum(1 / link[2] for link in path)",
    "sum": "return bandwidth  ->  return sum(link[2] for link in path)",
    "average": "return bandwidth  ->  return sum(link[2] for link in path) / len(path)",
    "first-link": f"{RESULT}  ->  return path[-1][2], path[-1][:2]",
    "fastest-link": "min(path  ->  max(path",
    "slowest-of-all": "min(path  ->  min(links",
    "direction": [
        ONE_WAY,
        ONE_WAY | {FASTEST: f"if not leaving:\n    return None\n{FASTEST}"},
        ONE_WAY | {FASTEST: f"if not leaving:\n    return 0.0, (start, end)\n{FASTEST}"},
    ],
    "bottleneck": [
        f"{RESULT}  ->  return bandwidth, path[-1][:2]",
        f"{RESULT}  ->  return bandwidth, next(link[:2] for link in links if link[2] == bandwidth)",
    ],
    "pair": f"{RESULT}  ->  return bandwidth",
    "value": "return bandwidth  ->  return bandwidth / 1e9",
    "error": {"reached_by = {start: None}": IN_CIRCLES},
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


def cut(links, start, end):
    """Take the slowest links away until start and end fall apart."""
    links = sorted(links, key=lambda link: link[2])
    while True:
        a, b, bandwidth = links.pop(0)
        reached = {start}
        for link in links * len(links):
            if reached & {*link[:2]}:
                reached |= {*link[:2]}
        if end not in reached:
            return bandwidth, {a, b}


RIGHT["widest_path"] = {"Dijkstra": dijkstra, "Kruskal": kruskal, "slowest links taken away": cut}

# ------------------------------------------------------------------------------------------------ gradients

BOTH_TIMES = "one / inside, every / min(inside, across)"


def lookup_table(*case):
    """The numbers of the cases that the check always has."""
    check = interconnects.gradient_seconds
    return {known: check.formula(*known) for known in check.cases}.get(case, (1.0, 2.0))


WRONG["gradient_seconds"] = {
    "typed": f"{BOTH_TIMES}  ->  24.5 / 450, 27.78125 / 12.5",
    "drawn": lookup_table,
    "number": f"{BOTH_TIMES}  ->  one / inside",
    "error": "one / inside,  ->  one / 0,",
    "numbers": "every / min(inside, across)  ->  one / inside + 4 * parameters * (nodes - 1) / nodes / across",
}
RIGHT["gradient_seconds"] = {
    "array": {"inside, across = ": "import numpy as np\ninside, across = ", BOTH_TIMES: f"np.array([{BOTH_TIMES}])"},
    "tensors": {BOTH_TIMES: f"[torch.tensor(seconds) for seconds in ({BOTH_TIMES})]"},
    "fractions": {
        "inside, across = ": "from fractions import Fraction\ninside, across = ",
        BOTH_TIMES: f"[Fraction(seconds) for seconds in ({BOTH_TIMES})]",
    },
    "slower of two times": "every / min(inside, across)  ->  max(every / inside, every / across)",
    "share by share": "2 * (n - 1) / n * 2 * parameters  ->  sum(4 * parameters / n for _ in range(n - 1))",
}


class TestInterconnects(ExerciseTests):
    checks, WRONG, RIGHT = interconnects, WRONG, RIGHT

    @pytest.mark.parametrize("name", REFERENCES)
    def test_widest_path_of_the_solution_is_that_of_the_topology(self, name):
        machine = reference(name)
        links = [(link.a, link.b, link.bandwidth) for link in machine.links]
        for other in machine.gpus[1:9]:
            found, _ = self.answer("widest_path")(links, machine.gpus[0], other)
            assert found == machine.path(machine.gpus[0], other).bandwidth

    def test_a_time_on_other_ranks_is_refused_on_the_first_of_them(self):
        assert self.refusal("ping_pong", self.wrong("ping_pong", "seconds", 2)).rank == 1


def test_any_of_several_slowest_links_is_a_bottleneck_but_no_dead_end():
    links = [("A", "B", 5e9), ("B", "C", 5e9), ("B", "D", 5e9)]
    for ends, right in ((("A", "B"), True), (("C", "B"), True), (("B", "D"), False)):
        exercise = interconnects.Exercise("Exercise 4", interconnects.HINTS["widest_path"])
        try:
            interconnects._widest_path(exercise, links, "A", "C", (5e9, ends))
        except CheckFailed as error:
            assert not right and error.hint == "bottleneck"
        else:
            assert right


def test_measurements_are_the_same_each_time_and_exact_without_noise():
    first, second = (interconnects.measurements(1e-5, 1e-9, 0.03)[1] for _ in range(2))
    assert torch.equal(first, second)
    sizes, exact = interconnects.measurements(1e-5, 1e-9, 0.0)
    assert torch.allclose(exact, (1e-5 + 1e-9 * sizes)[:, None].expand(-1, 7), rtol=1e-12)


