"""The exercises on pipelines: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from exercise_cases import ExerciseTests, hangs

from lessons.pipeline_parallel import check as pipeline_parallel
from lessons.pipeline_parallel import pipeline

pytestmark = pytest.mark.guard(60)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

# ------------------------------------------------------------------------------------------------ the order of 1F1B

AHEAD = "ahead = min(microbatches, ranks - rank - 1)"
REST = '[("B", i) for i in range(microbatches - ahead, microbatches)]'
ORDER = f"return order + {REST}"
WRONG["one_f_one_b_order"] = {
    "form": [
        f'{ORDER}  ->  return [(part, i) for kind, i in order + {REST} for part in ("F" if kind == "F" else "IW")]',
        f"{ORDER}  ->  print(order + {REST})",
    ],
    "incomplete": f"{ORDER}  ->  return order",
    "early": '("F", ahead + i), ("B", i)  ->  ("B", i), ("F", ahead + i)',
    "deadlock": f"{AHEAD}  ->  ahead = min(microbatches, rank)",
    "rank-ignored": f"{AHEAD}  ->  ahead = min(microbatches, ranks - 1)",
    "gpipe": f"{AHEAD}  ->  ahead = microbatches",
    "naive": f"{AHEAD}  ->  ahead = 0",
    "peak": f"{AHEAD}  ->  ahead = min(microbatches, ranks - rank)",
    "slow": f"{AHEAD}  ->  ahead = min(microbatches, 1, ranks - rank - 1)",
    "odd": f"{AHEAD}  ->  ahead = min(microbatches, (ranks - 1) ^ rank)",
    "few": f"{AHEAD}  ->  ahead = ranks - rank - 1",
    "one-rank": f"{AHEAD}  ->  ahead = min(microbatches, (ranks - rank - 1) * (ranks - 1) // (ranks - 1))",
}


def order_of_the_package(rank, ranks, microbatches):
    return [(op.kind, op.microbatch) for op in pipeline.one_f_one_b(ranks, microbatches).order[rank]]


def from_the_last_micro_batch_down(rank, ranks, microbatches):
    """The numbers mean nothing."""
    return tuple([kind, microbatches - 1 - i] for kind, i in order_of_the_package(rank, ranks, microbatches))


def back_as_soon_as_it_can(rank, ranks, microbatches):
    order, forwards, backwards = [], 0, 0
    while backwards < microbatches:
        if forwards < microbatches and forwards - backwards < ranks - rank:
            order.append(["F", np.int64(forwards)])
            forwards += 1
        else:
            order.append(["B", np.int64(backwards)])
            backwards += 1
    return order


RIGHT["one_f_one_b_order"] = {
    "of the package": order_of_the_package,
    "from the last micro-batch down": from_the_last_micro_batch_down,
    "back as soon as it can": back_as_soon_as_it_can,
}

# ------------------------------------------------------------------------------------------------ engines

ROLES = "first, last = rank == 0, rank == n - 1"
ARRIVAL = "receive(like, rank - 1)"
BACKWARD = "y.backward(None if last else receive(like, rank + 1))"
OUTPUT = "dist.isend(y.detach(), rank + 1)"
GRADIENT = "dist.isend(x.grad, rank - 1)"
SEND_ON, SEND_BACK = f"sends.append({OUTPUT})", f"sends.append({GRADIENT})"
WAIT = """for send in sends:
        send.wait()"""
RETURN = "return loss if last else None"
OTHER = f"{ROLES}\nother = rank ^ 1 if rank ^ 1 < n else rank - 1"
JOINED = """inputs, targets = ([part[0] if part[0] is None else torch.cat(part)] for part in (inputs, targets))
like, m = torch.cat([like] * m), 1"""
ENGINE = {
    "sum": ") / m  ->  )",
    "divided-twice": ") / m  ->  ) / m**2",
    "one-microbatch": "y.backward(  ->  stage.zero_grad()\ny.backward(",
    "last-stage-only": {
        BACKWARD: "gradient = None if last else receive(like, rank + 1)\nif last:\n    y.backward()",
        "x.grad": "torch.zeros_like(x)",
    },
    "input-gradient": "x.grad  ->  x.grad / 2",
    "no-input": ["if first else receive(  ->  if True else receive(", "if last:  ->  if True:"],
    "requires-grad": ".requires_grad_()  ->  ",
    "not-received": f"{ARRIVAL}  ->  (0 * {ARRIVAL})",
    "neighbours": {
        SEND_ON: "sends += [dist.isend(y.detach(), r) for r in range(rank + 1, n)]",
        ARRIVAL: "[receive(like, r) for r in range(rank)][-1]",
    },
    "error": f"{WAIT}  ->  if last:\n    sends.append(dist.isend(torch.zeros(1), rank + 1))\n{WAIT}",
    "collective": f"{WAIT}  ->  {WAIT}\ndist.all_gather([torch.empty(60) for _ in range(n)], torch.ones(60))",
    "forwards": "y = stage(x)  ->  with torch.no_grad():\n    stage(x)\ny = stage(x)",
    "messages": {
        SEND_ON: f"sends.append(dist.isend(torch.tensor(y.shape), rank + 1))\n{SEND_ON}",
        ARRIVAL: f"(receive(torch.empty(3, dtype=torch.long), rank - 1), {ARRIVAL})[1]",
    },
    "too-many-bytes": {
        OUTPUT: "dist.isend(torch.stack([y.detach(), y.detach()]), rank + 1)",
        ARRIVAL: "receive(torch.stack([like, like]), rank - 1)[0].clone()",
    },
    "not-waited": f"{WAIT}  ->  import time\n\ntime.sleep(0.3)",
    "loss": [f"{RETURN}  ->  return loss * m if last else None", f"{RETURN}  ->  return loss if last else 0"],
    "one-buffer": [
        f"{ARRIVAL}.requires_grad_()  ->  (dist.recv(like, rank - 1), like.detach().requires_grad_())[1]",
        f"{ARRIVAL}  ->  like.copy_({ARRIVAL})",
    ],
    "value": {OUTPUT: "dist.isend(y.detach().float(), rank + 1)", ARRIVAL: "receive(like.float(), rank - 1).double()"},
    "hang": hangs(f"{SEND_BACK}  ->  pass"),
    "only-two-ranks": hangs(
        {
            ROLES: OTHER, "like, rank - 1": "like, other", "like, rank + 1": "like, other",
            "x.grad, rank - 1": "x.grad, other", "y.detach(), rank + 1": "y.detach(), other",
        }
    ),
}

KEPT = "x, y = kept.pop(i)"
START = "kept, sends, loss = {}, [], 0"
WRONG["run_order"] = {
    **ENGINE,
    "whole-batch": {START: f"{START}\n{JOINED}\norder = [('F', 0), ('B', 0)]"},
    "wrong-microbatch": f"{KEPT}  ->  x, y = kept.pop(max(kept))",
    "order": f"{KEPT}  ->  x, y = kept.pop(min(kept))",
    "graph-twice": f"{KEPT}  ->  x, y = kept[max(kept)]",
    "not-distributed": {
        ARRIVAL: "torch.zeros_like(like)", SEND_ON: "pass", "receive(like, rank + 1)": "torch.zeros_like(like)",
        SEND_BACK: "pass",
    },
    "blocking": hangs(
        {SEND_ON: "dist.send(y.detach(), rank + 1)", SEND_BACK: "dist.send(x.grad, rank - 1)"}
    ),
    "kept": [
        f"{KEPT}  ->  x, y = kept[i]",
        {KEPT: "x, y = kept[i]", BACKWARD: BACKWARD[:-1] + ", retain_graph=True)"},
    ],
    "one-rank": f"{ROLES}  ->  {ROLES}\nif n == 1:\n    dist.recv(torch.empty_like(like), 1)",
}

BY_HAND = {
    BACKWARD: "wanted = [*stage.parameters()] + ([] if first else [x])\n"
    "found = torch.autograd.grad(y, wanted, None if last else receive(like, rank + 1))\n"
    "for p, g in zip(stage.parameters(), found):\n    p.grad = g if p.grad is None else p.grad + g",
    "x.grad": "found[-1]",
}


BOUNDED = "if {0} in latest:\n    latest[{0}].wait()\nlatest[{0}] = {1}"
RIGHT["run_order"] = {
    "batched operations": {
        OUTPUT: "dist.batch_isend_irecv([dist.P2POp(dist.isend, y.detach(), rank + 1)])[0]",
        GRADIENT: "dist.batch_isend_irecv([dist.P2POp(dist.isend, x.grad, rank - 1)])[0]",
    },
    "one send under way in each direction": {
        START: f"{START}\nlatest = {{}}", SEND_ON: BOUNDED.format(1, OUTPUT), SEND_BACK: BOUNDED.format(-1, GRADIENT),
        "for send in sends:": "for send in latest.values():",
    },
    "slices of one buffer": {
        START: f"{START}\nbuffer = like.new_empty(m, *like.shape)",
        f"{ARRIVAL}.requires_grad_()": "(dist.recv(buffer[i], rank - 1), buffer[i].detach().requires_grad_())[1]",
    },
    "gradients added by hand": BY_HAND,
    "closures": {
        "kept[i] = x, y": "kept[i] = lambda gradient, x=x, y=y: (y.backward(gradient), x.grad)[1]",
        KEPT: "back = kept.pop(i)\nx = y = None",
        BACKWARD: "gradient = back(None if last else receive(like, rank + 1))\nback = None",
        "x.grad,": "gradient,",
    },
}

# ------------------------------------------------------------------------------------------------ stages of equal cost

CUT = "return best[len(costs)][1]"
FILLED = """sizes, start, mean = [], 0, sum(costs) / stages
for left in range(stages, 1, -1):
    end = start + 1
    while end <= len(costs) - left and sum(costs[start : end + 1]) <= mean:
        end += 1
    sizes.append(end - start)
    start = end
return [*sizes, len(costs) - start]"""
SHARES = """sums = list(itertools.accumulate(costs))
ends = [1 + next(i for i, x in enumerate(sums) if x >= sums[-1] * s / stages) for s in range(1, stages)]
return [b - a for a, b in itertools.pairwise([0, *ends, len(costs)])]"""
LIMITED = """limit = 0.5
while True:
    sizes, load = [0], 0
    for c in costs:
        if sizes[-1] and load + c > limit + 1e-12:
            sizes, load = [*sizes, 0], 0
        sizes[-1] += 1
        load += c
    if max(costs) <= limit and len(sizes) <= stages:
        break
    limit += 0.5
while len(sizes) < stages:
    i = next(i for i, size in enumerate(sizes) if size > 1)
    sizes[i : i + 1] = [1, sizes[i] - 1]
return sizes"""


def cuts(costs, stages):
    for ends in itertools.combinations(range(1, len(costs)), stages - 1):
        yield [b - a for a, b in itertools.pairwise((0, *ends, len(costs)))]


def sums(costs, sizes):
    ends = list(itertools.accumulate(sizes))
    return [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def with_least(score):
    return lambda costs, stages: min(cuts(costs, stages), key=lambda sizes: score(sums(costs, sizes)))


def one_cut_at_a_time(costs, stages):
    """From equal counts on, moves the cut that helps most, until none does."""
    each, rest = divmod(len(costs), stages)
    sizes = [each + (s < rest) for s in range(stages)]
    while True:
        moved = []
        for i, step in itertools.product(range(stages - 1), (-1, 1)):
            other = [size + step * ((s == i) - (s == i + 1)) for s, size in enumerate(sizes)]
            if min(other) > 0:
                moved.append((max(sums(costs, other)), other))
        if not moved or min(moved)[0] >= max(sums(costs, sizes)):
            return sizes
        sizes = min(moved)[1]


WRONG["balance"] = {
    "form": f"{CUT}  ->  return [float(size) for size in best[len(costs)][1]]",
    "missing": f"{CUT}  ->  return best[len(costs) - 1][1]",
    "empty-stage": f"{CUT}  ->  sizes = best[len(costs)][1]\nreturn [0, sum(sizes[:2]), *sizes[2:]]",
    "equal-counts": f"{CUT}  ->  each, rest = divmod(len(costs), stages)\nreturn [each] * (stages - 1) + [each + rest]",
    "greedy": [f"{CUT}  ->  {FILLED}", f"{CUT}  ->  import itertools\n\n{SHARES}", one_cut_at_a_time],
    "most-even": [with_least(lambda loads: sum(x * x for x in loads)), with_least(lambda loads: -min(loads))],
    "not-best": f"{CUT}  ->  {LIMITED}",
}


def last_of_the_best(costs, stages):
    total, best, found = [0, *itertools.accumulate(costs)], float("inf"), None
    for ends in itertools.combinations(range(1, len(costs)), stages - 1):
        places = [0, *ends, len(costs)]
        dearest = max(total[b] - total[a] for a, b in itertools.pairwise(places))
        if dearest <= best + 1e-9:
            best, found = min(best, dearest), [b - a for a, b in itertools.pairwise(places)]
    return found


RIGHT["balance"] = {
    "the last of the best cuts": last_of_the_best,
    "of the package": pipeline.partition,
    "whole numbers of NumPy": f"{CUT}  ->  import numpy as np\n\n"
    "return list(np.diff([0, *np.cumsum(best[len(costs)][1])]))",
    "an array": f"{CUT}  ->  import numpy as np\n\nreturn np.array(best[len(costs)][1])",
}

# ------------------------------------------------------------------------------------------------ on paper


def schedule_of(name, ranks, microbatches, virtual):
    more = (virtual,) if name == "interleaved" else ()
    return pipeline.SCHEDULES[name](ranks, microbatches, *more)


def simulated_bubble(schedule, ranks, microbatches, virtual, gb):
    timeline = pipeline.simulate(schedule_of(schedule, ranks, microbatches, virtual))
    return 100 * timeline.bubble, gb * timeline.peak[0]


BOTH = "return 100 * share, gb * held"
WRONG["bubble"] = {"number": f"{BOTH}  ->  return 100 * share", "typed": f"{BOTH}  ->  return 100 * 7 / 39, 16"}
RIGHT["bubble"] = {
    "simulated": simulated_bubble,
    "an array": f"{BOTH}  ->  return torch.tensor([100 * share, gb * held])",
}

# ------------------------------------------------------------------------------------------------ the puzzle

AHEAD_AND_BEHIND = "((5, 0), (3, 2), (2, 3), (1, 4))"
# Greedy: at every moment I first, then F while fewer than 5 activations are held, then W.
GREEDY = (
    "F0 F1 F2 F3 F4 I0 W0 F5 I1 I2 W1 F6 I3 W2 F7 I4 W3 W4 I5 W5 I6 W6 I7 W7",
    "F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 F5 I3 W2 F6 I4 W3 F7 I5 W4 W5 I6 W6 I7 W7",
    "F0 F1 F2 F3 I0 F4 I1 W0 I2 W1 W2 I3 F5 I4 W3 F6 I5 W4 F7 I6 W5 W6 I7 W7",
    "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 F6 I6 W2 F7 I7 W3 W4 W5 W6 W7",
)
WRONG["own_schedule"] = {
    "form": 'return orders  ->  return [[f"{kind}{i}" for kind, i in order] for order in orders]',
    "incomplete": "return orders  ->  return [[op for op in order if op[0] != 'W'] for order in orders]",
    "early": "return orders  ->  swap = dict(I='W', W='I', F='F')\n"
    "return [[(swap[kind], i) for kind, i in order] for order in orders]",
    "deadlock": f"{AHEAD_AND_BEHIND}  ->  ((1, 4), (2, 3), (3, 2), (4, 1))",
    "memory": f"{AHEAD_AND_BEHIND}  ->  ((7, 0), (5, 2), (3, 4), (1, 6))",
    "unsplit": "return orders  ->  return [one_f_one_b_order(rank, 4, 8) for rank in range(4)]",
    "slow": f"{AHEAD_AND_BEHIND}  ->  ((4, 0), (3, 1), (2, 2), (1, 3))",
}
RIGHT["own_schedule"] = {
    "greedy": lambda: [[(op[0], int(op[1:])) for op in ops.split()] for ops in GREEDY],
    "tuples": "return orders  ->  return tuple(map(tuple, orders))",
}


class TestPipeline(ExerciseTests):
    checks = pipeline_parallel
    WRONG, RIGHT = WRONG, RIGHT

    def test_schedule_says_what_it_reaches(self, capsys):
        pipeline_parallel.own_schedule(self.RIGHT["own_schedule"]["greedy"])
        assert capsys.readouterr().out == "Exercise 5 passed: 59 ms, activations 5, 5, 5, 5.\n"

    def test_table_of_the_puzzle_is_what_the_simulation_says(self):
        for name, seconds, peak in (("1F1B", 66, 4), ("ZB-H1", 60, 4), ("ZB-H2", 57, 7)):
            schedule = pipeline.SCHEDULES[name](pipeline_parallel.RANKS, pipeline_parallel.COUNT)
            timeline = pipeline.simulate(schedule, pipeline_parallel.TARGET)
            assert (timeline.seconds, max(timeline.peak)) == (seconds, peak)

    def test_refusals_name_time_memory_and_who_waits(self):
        def text(exercise, hint, number=1):
            return str(self.refusal(exercise, self.wrong(exercise, hint, number)))

        slow = text("own_schedule", "slow")
        assert "the step takes 60 ms; the target is 59 ms" in slow
        assert re.search(r"rank \d waits \d+ ms for I\d, until \d+ ms", slow)
        assert "rank 0: 7 activations are held at a time; the target is 5." in text("own_schedule", "memory")
        odd = text("one_f_one_b_order", "odd")
        assert "3 ranks, 6 micro-batches: the ranks wait for each other: rank 0 at B0, rank 1 at F3, rank 2 at" in odd
        assert "rank 0: 3 micro-batches are held at a time; the target is 2." in text("one_f_one_b_order", "peak")
        assert "4 micro-batches are in memory at a time; the order needs 2." in text("run_order", "kept", 2)
