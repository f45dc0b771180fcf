"""The solutions of the exercises of lesson 17; what stands between the marks is what a learner writes."""

import torch
import torch.distributed as dist

from lessons.serving.helpers import cache_bytes


def cache_plan(layers, kv_heads, head_size, element, weights, gpus, memory, length) -> tuple:
    """kB of a token in the cache, GB of a sequence on each GPU, and sequences that fit."""
    ### BEGIN SOLUTION
    token = 2 * layers * kv_heads * head_size * element
    sequence = token * length / min(gpus, kv_heads)
    room = (memory - weights / gpus) * 1e9
    return token / 1e3, sequence / 1e9, int(room // sequence)
    ### END SOLUTION


def split_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one token to the tokens of all ranks: (heads, size), the same on each."""
    ### BEGIN SOLUTION
    heads, size = q.shape
    if len(k):
        scores = torch.einsum("hd,thd->ht", q, k) * size**-0.5
        m = scores.amax(1, keepdim=True)
        p = torch.exp(scores - m)
        own = torch.cat([torch.einsum("ht,thd->hd", p, v), p.sum(1, keepdim=True), m], 1)
    else:
        own = q.new_zeros(heads, size + 2)
        own[:, -1] = -torch.inf
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    o, sums, m = torch.stack(parts).split([size, 1, 1], -1)
    factor = torch.exp(m - m.amax(0))
    return (factor * o).sum(0) / (factor * sums).sum(0)
    ### END SOLUTION


def update_tables(cache, what: str, name: str, other: str = ""):
    """Keep the tables for one event; what has to be copied, "full", or None."""
    ### BEGIN SOLUTION
    users, free, copied = cache.users, cache.free, None
    if what == "end":
        for block in cache.tables.pop(name):
            users[block] -= 1
        free[:] = [block for block in range(cache.count) if users[block] == 0]
    elif what == "fork":
        cache.tables[other] = list(cache.tables[name])
        for block in cache.tables[other]:
            users[block] += 1
    else:
        table, length = cache.tables.get(name, []), cache.lengths.get(name, 0)
        if length % cache.size == 0 or users[table[-1]] > 1:
            if not free:
                return "full"
            users[free[-1]] = 1
            if length % cache.size > 0:
                users[table[-1]] -= 1
                copied = (table.pop(), free[-1])
            table.append(free.pop())
        cache.tables[name] = table
    return copied
    ### END SOLUTION


def plan(running: list, waiting: list, budget: int, most: int, free: int, size: int) -> list:
    """What the next step computes: (name, tokens) of each job, in the order of the turns."""
    ### BEGIN SOLUTION
    batch, places = [], most - len(running)
    decoding = [request for request in running if request.left == 1]
    prefilling = [request for request in running if request.left > 1]
    for request in decoding + prefilling + waiting:
        new = request in waiting
        room = (request.blocks + free) * size - request.done
        count = min(request.left, budget, room)
        if new and (count < 1 or places < 1):
            break
        if count < 1:
            continue
        free -= max(0, -(-(request.done + count) // size) - request.blocks)
        budget, places = budget - count, places - new
        batch.append((request.name, count))
    return batch
    ### END SOLUTION


def deployment(model, machine, length: int, limit: float) -> tuple:
    """GPUs that share the layers, and tokens a second of all eight, or (0, 0)."""
    ### BEGIN SOLUTION
    best = (0, 0.0)
    for t in (1, 2, 4, 8):
        weights, cache = 2 * model.parameter_count / t, length * cache_bytes(model) / t
        for b in range(1, int((machine.memory * 1e9 - weights) // cache) + 1):
            reading = (weights + b * cache) / (machine.reads * 1e9)
            computing = b * weights / (machine.tflops * 1e12)
            message = 2 * (t - 1) / t * b * model.hidden * 2 / (machine.link * 1e9)
            messages = 2 * model.layers * (machine.latency * 1e-6 + message) if t > 1 else 0
            step = max(reading, computing) + messages
            rate = 8 // t * b / step
            if step <= limit / 1e3 and rate > best[1]:
                best = (t, rate)
    return best
    ### END SOLUTION


def three_patients() -> dict:
    """The cause of each patient, and the edit that heals it."""
    ### BEGIN SOLUTION
    return {
        1: ("own clock", {"came, answers =": "dist.broadcast(clock, src=0)\n    came, answers ="}),
        2: ("own memory", {"broadcast(count, src=0)": "all_reduce(count, op=dist.ReduceOp.MIN)"}),
        3: ("block given away", {"free.insert(0, block)": "if not any(block in table for table in"
            " tables.values()): free.insert(0, block)"}),
    }
    ### END SOLUTION
