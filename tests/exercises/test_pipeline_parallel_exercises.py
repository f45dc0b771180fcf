"""The exercises on pipelines: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exercise_cases import ExerciseTests, hangs

from course_utils import pipeline
from course_utils.checks import pipeline_parallel

pytestmark = pytest.mark.guard(60)

# ------------------------------------------------------------------------------------------------ the order of 1F1B

AHEAD = "ahead = min(microbatches, ranks - rank - 1)"
REST = '[("B", i) for i in range(microbatches - ahead, microbatches)]'
ORDER = f"return order + {REST}"
ONE_F_ONE_B_ORDER = {
    "form": [
        f'{ORDER}  ->  return [f"{{kind}}{{i}}" for kind, i in order + {REST}]',
        f'{ORDER}  ->  return [(part, i) for kind, i in order + {REST} for part in ("F" if kind == "F" else "IW")]',
        f"{ORDER}  ->  print(order + {REST})",
    ],
    "incomplete": [f"{ORDER}  ->  return order", f"{ORDER}  ->  return [(kind, i + 1) for kind, i in order + {REST}]"],
    "early": '("F", ahead + i), ("B", i)  ->  ("B", i), ("F", ahead + i)',
    "deadlock": f"{AHEAD}  ->  ahead = min(microbatches, rank)",
    "rank-ignored": f"{AHEAD}  ->  ahead = min(microbatches, ranks - 1)",
    "gpipe": f"{AHEAD}  ->  ahead = microbatches",
    "naive": f"{AHEAD}  ->  ahead = 0",
    "peak": [
        f"{AHEAD}  ->  ahead = min(microbatches, ranks - rank)",
        f"{AHEAD}  ->  ahead = min(microbatches, 2 * (ranks - rank - 1))",
    ],
    "slow": f"{AHEAD}  ->  ahead = min(microbatches, 1, ranks - rank - 1)",
    "odd": [
        f"{AHEAD}  ->  ahead = min(microbatches, (ranks - 1) ^ rank)",
        f"{AHEAD}  ->  ahead = min(microbatches, max(0, ranks // 2 * 2 - rank - 1))",
        f"{AHEAD}  ->  ahead = min(microbatches, ranks - rank - 1 - (rank == 0) * (microbatches % 2))",
    ],
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
    "input-gradient": ["x.grad  ->  x.detach()", "x.grad  ->  x.grad / 2"],
    "requires-grad": [".requires_grad_()  ->  ", ".requires_grad_()  ->  .requires_grad_() * 1"],
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
    "not-waited": [
        f"{WAIT}  ->  import time\n\ntime.sleep(0.3)",
        f"{WAIT}  ->  import time\n\nfor send in sends[: len(sends) // 2]:\n    send.wait()\ntime.sleep(0.3)",
    ],
    "loss": [
        f"{RETURN}  ->  return y.detach() * m if last else None",
        f"{RETURN}  ->  return loss * m if last else None",
        f"{RETURN}  ->  return [loss] if last else None",
        f"{RETURN}  ->  return loss if last else 0",
    ],
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

PAIRS = "for x, y in pairs:"
THERE_AND_BACK = f"""        pairs.append((x, y))
    {PAIRS}
"""
ZIPPED = "zip(inputs, targets, strict=True)"


def outputs_by_broadcast(stage, inputs, targets, loss_fn, like):
    rank, n, m = dist.get_rank(), dist.get_world_size(), len(inputs)

    def passed(tensor, source):
        tensor = tensor.detach().clone() if rank == source else torch.empty_like(like)
        dist.broadcast(tensor, source)
        return tensor

    pairs, losses, came, y = [], [], None, None
    for i in range(m):
        for r in range(n):
            if r == rank:
                x = inputs[i] if r == 0 else came.requires_grad_()
                y = stage(x)
                if r == n - 1:
                    y = loss_fn(y, targets[i]) / m
                    losses.append(y.detach())
                pairs.append((x, y))
            if r < n - 1:
                came = passed(y, r)
    for x, y in pairs:
        for r in reversed(range(n)):
            if r == rank:
                y.backward(None if r == n - 1 else came)
            if r:
                came = passed(x.grad, r)
    return sum(losses) if rank == n - 1 else None


RUN_GPIPE = {
    **ENGINE,
    "collective": [ENGINE["collective"], outputs_by_broadcast],
    "whole-batch": f"pairs, sends, loss = [], [], 0  ->  pairs, sends, loss = [], [], 0\n{JOINED}",
    "wrong-microbatch": f"{PAIRS}  ->  for x, y in pairs[::-1] if last else pairs:",
    "graph-twice": f"{PAIRS}  ->  for x, y in pairs[-1:] * m:",
    "naive": {THERE_AND_BACK: ""},
    "waits-for-all": [
        {
            ZIPPED: f"zip(inputs if first else [{ARRIVAL} for _ in inputs], targets, strict=True)",
            f"x if first else {ARRIVAL}.requires_grad_()": "x if first else x.requires_grad_()",
        },
        {
            SEND_ON: "pass",
            PAIRS: f"if not last:\n    sends += [{OUTPUT} for _, y in pairs]\n{PAIRS}",
        },
        {
            PAIRS: "gradients = [None if last else receive(like, rank + 1) for _ in pairs][::-1]\n" + PAIRS,
            BACKWARD: "y.backward(gradients.pop())",
        },
        {SEND_BACK: "pass", WAIT: f"if not first:\n    sends += [{GRADIENT} for x, _ in pairs]\n{WAIT}"},
    ],
    "not-distributed": {
        ARRIVAL: "torch.zeros_like(like)", SEND_ON: "pass", "receive(like, rank + 1)": "torch.zeros_like(like)",
        SEND_BACK: "pass",
    },
}

KEPT = "x, y = kept.pop(i)"
START = "kept, sends, loss = {}, [], 0"
RUN_ORDER = {
    **ENGINE,
    "whole-batch": {START: f"{START}\n{JOINED}\norder = [('F', 0), ('B', 0)]"},
    "wrong-microbatch": f"{KEPT}  ->  x, y = kept.pop(max(kept))",
    "order": [
        f"{KEPT}  ->  x, y = kept.pop(min(kept))",
        "for kind, i in order:  ->  for kind, i in sorted(order, key=lambda op: op[0] == 'B'):",
        "for kind, i in order:  ->  early = [k for k, _ in order[:2]] == ['F', 'F']\n"
        "for kind, i in sorted(order, key=lambda op: early and op[0] == 'B'):",
    ],
    "graph-twice": f"{KEPT}  ->  x, y = kept[max(kept)]",
    "blocking": hangs(
        {SEND_ON: "dist.send(y.detach(), rank + 1)", SEND_BACK: "dist.send(x.grad, rank - 1)"}
    ),
    "kept": [
        f"{KEPT}  ->  x, y = kept[i]",
        {KEPT: "x, y = kept[i]", BACKWARD: BACKWARD[:-1] + ", retain_graph=True)"},
        {BACKWARD: BACKWARD[:-1] + ", retain_graph=True)"},
    ],
    "one-rank": f"{ROLES}  ->  {ROLES}\nif n == 1:\n    dist.recv(torch.empty_like(like), 1)",
}

BY_HAND = {
    BACKWARD: "wanted = [*stage.parameters()] + ([] if first else [x])\n"
    "found = torch.autograd.grad(y, wanted, None if last else receive(like, rank + 1))\n"
    "for p, g in zip(stage.parameters(), found):\n    p.grad = g if p.grad is None else p.grad + g",
    "x.grad": "found[-1]",
}


def one_backward_for_all_losses(stage, inputs, targets, loss_fn, like):
    """With receives posted ahead."""
    rank, n = dist.get_rank(), dist.get_world_size()
    xs, ys, works, loss = list(inputs), [], [], None
    if rank:
        xs = [torch.empty_like(like) for _ in inputs]
        receives = [dist.irecv(x, rank - 1) for x in xs]
    for i, x in enumerate(xs):
        if rank:
            receives[i].wait()
            x.requires_grad_()
        ys.append(stage(x))
        if rank < n - 1:
            works.append(dist.isend(ys[-1], rank + 1))
    if rank == n - 1:
        loss = torch.stack([loss_fn(y, target) for y, target in zip(ys, targets, strict=True)]).mean()
        loss.backward()
    for x, y in zip(xs, ys, strict=True):
        if rank < n - 1:
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
            torch.autograd.backward([y], [gradient])
        if rank:
            works.append(dist.isend(x.grad, rank - 1))
    for work in works:
        work.wait()
    return None if loss is None else loss.item()


RUN_GPIPE_RIGHT = {
    "one backward for all losses": one_backward_for_all_losses,
    "back as soon as it can": f"{ROLES}  ->  order = one_f_one_b_order(rank, n, m)\n"
    f"return run_order(stage, order, inputs, targets, loss_fn, like)\n{ROLES}",
    "slices of one buffer": {
        ROLES: f"{ROLES}\nbuffer = like.new_empty(m, *like.shape)\nif first:\n    inputs = torch.stack(inputs)",
        f"{ARRIVAL}.requires_grad_()": "(dist.recv(buffer[len(pairs)], rank - 1), "
        "buffer[len(pairs)].detach().requires_grad_())[1]",
    },
    "last in, first out": f"{PAIRS}  ->  for x, y in pairs[::-1]:",
    "gradients added by hand": BY_HAND,
    "receives one ahead": {
        ROLES: f"{ROLES}\nboxes = [torch.empty_like(like) for _ in inputs]\n"
        "post = lambda i: dist.irecv(boxes[i], rank - 1) if i < m and not first else None\ncoming = post(0)",
        "x = x if first else receive(like, rank - 1).requires_grad_()": "if not first:\n    coming.wait()\n"
        "    x, coming = boxes[len(pairs)].requires_grad_(), post(len(pairs) + 1)",
    },
}


def batched_operations(stage, order, inputs, targets, loss_fn, like):
    rank, n, m = dist.get_rank(), dist.get_world_size(), len(inputs)
    kept, works, total = {}, [], 0.0

    def start(op, tensor, peer):
        return dist.batch_isend_irecv([dist.P2POp(op, tensor, peer)])

    def received(peer):
        tensor = torch.empty_like(like)
        for work in start(dist.irecv, tensor, peer):
            work.wait()
        return tensor

    for kind, i in order:
        if kind == "F":
            x = inputs[i] if rank == 0 else received(rank - 1).requires_grad_()
            y = stage(x)
            if rank == n - 1:
                y = loss_fn(y, targets[i]) / m
                total += y.item()
            else:
                works += start(dist.isend, y.detach(), rank + 1)
            kept[i] = [x, y]
        else:
            y = kept[i].pop()
            y.backward(received(rank + 1) if rank < n - 1 else None)
            if rank:
                works += start(dist.isend, kept[i][0].grad, rank - 1)
            del kept[i]
    for work in works:
        work.wait()
    return total if rank == n - 1 else None


BOUNDED = "if {0} in latest:\n    latest[{0}].wait()\nlatest[{0}] = {1}"
RUN_ORDER_RIGHT = {
    "batched operations": batched_operations,
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
DEAREST = "(max(best[k][0], sum(costs[k:n])), "
FILLED = """sizes, start, mean = [], 0, sum(costs) / stages
for left in range(stages, 1, -1):
    end = start + 1
    while end <= len(costs) - left and {}:
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


def by_halves(costs, stages):
    """Right if a half of the stages may be cut by itself."""
    if stages % 2:
        return with_least(max)(costs, stages)
    (middle, _) = with_least(max)(costs, 2)
    middle = min(max(middle, stages // 2), len(costs) - stages // 2)
    return by_halves(costs[:middle], stages // 2) + by_halves(costs[middle:], stages // 2)


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


def filled(condition):
    return f"{CUT}  ->  {FILLED.format(condition)}"


BALANCE = {
    "form": [
        f"{CUT}  ->  import itertools\n\nreturn list(itertools.accumulate(best[len(costs)][1]))[:-1]",
        f"{CUT}  ->  return [float(size) for size in best[len(costs)][1]]",
    ],
    "missing": [
        lambda costs, stages: list(map(int, sums(costs, with_least(max)(costs, stages)))),
        f"{CUT}  ->  return best[len(costs) - 1][1]",
    ],
    "empty-stage": f"{CUT}  ->  sizes = best[len(costs)][1]\nreturn [0, sum(sizes[:2]), *sizes[2:]]",
    "equal-counts": [
        f"{CUT}  ->  each, rest = divmod(len(costs), stages)\nreturn [each + (s < rest) for s in range(stages)]",
        f"{CUT}  ->  each, rest = divmod(len(costs), stages)\nreturn [each] * (stages - 1) + [each + rest]",
    ],
    "greedy": [
        filled("sum(costs[start : end + 1]) <= mean"),
        filled("sum(costs[start:end]) < mean"),
        f"{CUT}  ->  import itertools\n\n{SHARES}",
        one_cut_at_a_time,
    ],
    "most-even": [
        with_least(lambda loads: sum(x * x for x in loads)), with_least(lambda loads: -min(loads)), by_halves,
    ],
    "not-best": [with_least(lambda loads: -max(loads)), f"{CUT}  ->  {LIMITED}"],
}


def last_of_the_best(costs, stages):
    total, best, found = [0, *itertools.accumulate(costs)], float("inf"), None
    for ends in itertools.combinations(range(1, len(costs)), stages - 1):
        places = [0, *ends, len(costs)]
        dearest = max(total[b] - total[a] for a, b in itertools.pairwise(places))
        if dearest <= best + 1e-9:
            best, found = min(best, dearest), [b - a for a, b in itertools.pairwise(places)]
    return found


def smallest_limit(costs, stages):
    """Of all sums of neighbours the smallest with which a greedy filling needs no more stages."""
    runs = sorted(sum(costs[a:b]) for a, b in itertools.combinations(range(len(costs) + 1), 2))
    for limit in runs:
        sizes, load = [0], 0.0
        for i, cost in enumerate(costs):
            must = len(costs) - i == stages - len(sizes)
            if sizes[-1] and (load + cost > limit + 1e-9 or must):
                sizes, load = [*sizes, 0], 0.0
            sizes[-1] += 1
            load += cost
        if len(sizes) == stages and max(sums(costs, sizes)) <= limit + 1e-9:
            return tuple(sizes)
    return None


BALANCE_RIGHT = {
    "the last of the best cuts": last_of_the_best,
    "of the package": pipeline.partition,
    "whole numbers of NumPy": f"{CUT}  ->  import numpy as np\n\n"
    "return list(np.diff([0, *np.cumsum(best[len(costs)][1])]))",
    "an array": f"{CUT}  ->  import numpy as np\n\nreturn np.array(best[len(costs)][1])",
    "the smallest limit": smallest_limit,
}

# ------------------------------------------------------------------------------------------------ on paper


def schedule_of(name, ranks, microbatches, virtual):
    more = (virtual,) if name == "interleaved" else ()
    return pipeline.SCHEDULES[name](ranks, microbatches, *more)


def simulated_bubble(schedule, ranks, microbatches, virtual, gb):
    timeline = pipeline.simulate(schedule_of(schedule, ranks, microbatches, virtual))
    return 100 * timeline.bubble, gb * timeline.peak[0]


def simulated_number(ranks, virtual, percent):
    step, name = (ranks, "interleaved") if virtual > 1 else (1, "1F1B")

    def enough(steps):
        return 100 * pipeline.simulate(schedule_of(name, ranks, steps * step, virtual)).bubble <= percent + 1e-9

    steps = max(1, round((ranks - 1) * (100 / percent - 1) / virtual / step))  # from here up or down
    while not enough(steps):
        steps += 1
    while steps > 1 and enough(steps - 1):
        steps -= 1
    return steps * step


COUNTED = "count = step = ranks if virtual > 1 else 1"
IN_CLOSED_FORM = """import math

need = (ranks - 1) * (100 / percent - 1) / virtual
return max(count, math.ceil(need / step - 1e-9) * step)"""

# ------------------------------------------------------------------------------------------------ the puzzle

AHEAD_AND_BEHIND = "((5, 0), (3, 2), (2, 3), (1, 4))"
# Greedy: at every moment I first, then F while fewer than 5 activations are held, then W.
GREEDY = (
    "F0 F1 F2 F3 F4 I0 W0 F5 I1 I2 W1 F6 I3 W2 F7 I4 W3 W4 I5 W5 I6 W6 I7 W7",
    "F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 F5 I3 W2 F6 I4 W3 F7 I5 W4 W5 I6 W6 I7 W7",
    "F0 F1 F2 F3 I0 F4 I1 W0 I2 W1 W2 I3 F5 I4 W3 F6 I5 W4 F7 I6 W5 W6 I7 W7",
    "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 F6 I6 W2 F7 I7 W3 W4 W5 W6 W7",
)
OWN_SCHEDULE = {
    "form": [
        "return orders  ->  return orders[0]",
        'return orders  ->  return [[f"{kind}{i}" for kind, i in order] for order in orders]',
    ],
    "incomplete": "return orders  ->  return [[op for op in order if op[0] != 'W'] for order in orders]",
    "early": "return orders  ->  swap = dict(I='W', W='I', F='F')\n"
    "return [[(swap[kind], i) for kind, i in order] for order in orders]",
    "deadlock": f"{AHEAD_AND_BEHIND}  ->  ((1, 4), (2, 3), (3, 2), (4, 1))",
    "memory": [
        f"{AHEAD_AND_BEHIND}  ->  ((7, 0), (5, 2), (3, 4), (1, 6))",
        f"{AHEAD_AND_BEHIND}  ->  ((4, 8), (3, 8), (2, 8), (1, 8))",
    ],
    "unsplit": "return orders  ->  return [one_f_one_b_order(rank, 4, 8) for rank in range(4)]",
    "slow": [
        f"{AHEAD_AND_BEHIND}  ->  ((4, 0), (3, 1), (2, 2), (1, 3))",
        f"{AHEAD_AND_BEHIND}  ->  ((4, 0), (3, 0), (2, 0), (1, 0))",
    ],
}


class TestPipeline(ExerciseTests):
    checks = pipeline_parallel
    WRONG = {
        "one_f_one_b_order": ONE_F_ONE_B_ORDER,
        "run_gpipe": RUN_GPIPE,
        "run_order": RUN_ORDER,
        "balance": BALANCE,
        "bubble": {
            "number": "return 100 * share, gb * held  ->  return 100 * share",
            "typed": "return 100 * share, gb * held  ->  return 100 * 7 / 39, 16",
        },
        "enough_microbatches": {"typed": "return count  ->  return 227", "border": "> percent:  ->  >= percent:"},
        "own_schedule": OWN_SCHEDULE,
    }
    RIGHT = {
        "one_f_one_b_order": {
            "of the package": order_of_the_package,
            "from the last micro-batch down": from_the_last_micro_batch_down,
            "back as soon as it can": back_as_soon_as_it_can,
        },
        "run_gpipe": RUN_GPIPE_RIGHT,
        "run_order": RUN_ORDER_RIGHT,
        "balance": BALANCE_RIGHT,
        "bubble": {
            "simulated": simulated_bubble,
            "an array": "return 100 * share, gb * held  ->  return torch.tensor([100 * share, gb * held])",
        },
        "enough_microbatches": {
            "simulated": simulated_number,
            "in closed form": f"{COUNTED}  ->  {COUNTED}\n{IN_CLOSED_FORM}",
        },
        "own_schedule": {
            "greedy": lambda: [[(op[0], int(op[1:])) for op in ops.split()] for ops in GREEDY],
            "tuples": "return orders  ->  return tuple(map(tuple, orders))",
        },
    }

    def test_schedule_says_what_it_reaches(self, capsys):
        pipeline_parallel.own_schedule(self.RIGHT["own_schedule"]["greedy"])
        assert capsys.readouterr().out == "Exercise 7 passed: 59 ms, activations 5, 5, 5, 5.\n"

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
        late = text("run_gpipe", "waits-for-all", 2)
        assert "2 ranks, 4 micro-batches, rank 0: no output had gone before the last forward." in late
