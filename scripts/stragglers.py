"""Which rank do the others wait for, and which one computes slowly? From the log of train.py.

    python stragglers.py run/log.jsonl
"""

import json
import pickle
import sys
import time
from pathlib import Path
from statistics import median


def own_ms(seconds: float, steps: int) -> list[float]:
    """On every rank: the time of each rank outside collectives, in ms a step, over the last seconds; rank 0 has it.

    Reads PyTorch's flight record, which has the calls of gloo: CPU ranks.
    """
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1))  # it ends on all ranks at one moment, from which all clocks count
    now = time.time_ns()
    record = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(includeStackTraces=False))
    mine = [
        (e["time_created_ns"] - now, e["process_group"][0], e["collective_seq_id"])
        for e in record.get("entries", ())
        if not e["is_p2p"] and e["time_created_ns"] > now - 1e9 * seconds
    ]
    ranks: list = [None] * dist.get_world_size()
    dist.gather_object(mine, ranks if dist.get_rank() == 0 else None)
    return outside([calls or [] for calls in ranks], steps)


def outside(ranks: list[list[tuple]], steps: int) -> list[float]:
    """Return for each rank how long it was outside of collectives, in ms a step; `ranks` has (ns, group, number).

    A collective lets its ranks go when the last one has come. So a rank that was late because it waited for another
    has no time of its own from that.
    """
    ends: dict[tuple, int] = {}
    for at, *call in (call for calls in ranks for call in calls):
        ends[*call,] = max(at, ends.get((*call,), at))
    own = []
    for calls in ranks:
        total, free = 0, None
        for at, *call in sorted(calls):
            total += max(0, at - free) if free is not None else 0
            free = max(ends[*call,], free if free is not None else at)
        own.append(total / 1e6 / steps)
    return own


def report(lines: list[dict]) -> list[str]:
    """Return a line for each rank, the most suspicious first, and a verdict.

    The time of its own says most: it has nothing of waiting for others, but some of what gloo itself takes, which is
    not the same on equal ranks. Before a step, a rank that comes last waits least: the others waited for it.
    """
    ranks = range(len(lines[0]["wait_ms"]))
    last = [min(ranks, key=line["wait_ms"].__getitem__) for line in lines]
    cost = [max(line["wait_ms"]) - min(line["wait_ms"]) for line in lines]
    product = [median(line["product_ms"][rank] for line in lines) for rank in ranks]
    inside = [line["own_ms"] for line in lines if line.get("own_ms")]
    own = [median(row[rank] for row in inside) if inside else 0.0 for rank in ranks]
    costs = [sum(c for c, who in zip(cost, last, strict=True) if who == rank) / len(lines) for rank in ranks]
    order = sorted(ranks, key=own.__getitem__ if inside else costs.__getitem__, reverse=True)
    found = []
    for rank in order:
        text = f"rank {rank}: {own[rank]:.1f} ms a step of its own, " if inside else f"rank {rank}: "
        text += f"last before {last.count(rank) / len(lines):.0%} of the steps, costs {costs[rank]:.2f} ms a step, "
        found.append(text + f"product x {product[rank] / median(product):.2f}")
    if not inside:
        found.append("who is slow inside the steps is not in this log: record a trace with --profile")
    elif len(order) > 1 and own[order[0]] >= 2 * own[order[1]]:
        found.append(f"rank {order[0]} holds up the others: it takes twice as long as the next one, without the waits")
    else:
        found.append("no rank takes twice as long as the next one, without the waits")
    return found


if __name__ == "__main__":
    print(*report([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]), sep="\n")
