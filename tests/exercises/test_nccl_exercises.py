"""The exercises on NCCL's algorithms: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exercise_cases import ExerciseTests, hangs

from course_utils.check import message_steps
from course_utils.costs import all_reduce_seconds, flat_cluster
from course_utils.ranks import Entry
from lessons.nccl import check as nccl

pytestmark = pytest.mark.guard(60)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

# ------------------------------------------------------------------------------------------------ rings

STARTED = "dist.batch_isend_irecv([send, receive])"
FINISHED = f"for request in {STARTED}:\n            request.wait()"
WAITED = f"for request in {STARTED}:\n    request.wait()"  # the same as the beginning of a new text
LEFT, RIGHT_OF = "ring[place - 1]", "ring[(place + 1) % n]"
WORLD = "list(range(dist.get_world_size()))"


def one_by_one(messages: str) -> str:
    """Messages in place of those that start together: each is waited for before the next one starts."""
    return f"(message.op(message.tensor, message.peer) for message in {messages})"


def swap(out, to, into, source):
    for request in dist.batch_isend_irecv([dist.P2POp(dist.irecv, into, source), dist.P2POp(dist.isend, out, to)]):
        request.wait()


def summed_by_one_rank(x, ring):
    """All send to the first of the ring, which adds and sends the sum to each."""
    total, received = x.clone(), torch.empty_like(x)
    if dist.get_rank() != ring[0]:
        dist.send(x, ring[0])
        dist.recv(total, ring[0])
        return total
    for other in ring[1:]:
        dist.recv(received, other)
        total += received
    for other in ring[1:]:
        dist.send(total, other)
    return total


def whole_tensors_round_the_ring(x, ring):
    place, total, travelling = ring.index(dist.get_rank()), x.clone(), x
    for _ in ring[1:]:
        received = torch.empty_like(x)
        swap(travelling, ring[place - 1], received, ring[(place + 1) % len(ring)])
        total, travelling = total + received, received
    return total


def world():
    return list(range(dist.get_world_size()))


WRONG_RINGS = {
    "hang": hangs(f"{STARTED}  ->  {one_by_one('(send, receive)')}"),
    "steps": f"{STARTED}  ->  {one_by_one('(send, receive)[:: 1 - place % 2 * 2]')}",
    "ring": "n, place = len(ring)  ->  ring = sorted(ring)\nn, place = len(ring)",
    "only-two-ranks": {LEFT: "ring[place ^ 1]", RIGHT_OF: "ring[place ^ 1]"},
}

# ------------------------------------------------------------------------------------------------ ring reduce-scatter

MIRRORED = "ring, place = ring[::-1], n - 1 - place\nchunks = "
STRAIGHT = {
    "into = chunks[(place + step + 1) % n]": "into = chunks[place]",
    "chunks[(place + step) % n], ring[place - 1]": "chunks[(place + step) % n], ring[(place + step) % n]",
    "received, ring[(place + 1) % n]": "received, ring[place - step]",
}
WRONG["ring_reduce_scatter"] = {
    **WRONG_RINGS,
    "library": "chunks = x.clone()  ->  x = x.clone()\ndist.all_reduce(x)\nreturn x.tensor_split(n)[place]\nchunks = x",
    "not-divisible": ".tensor_split(n)  ->  .split(len(x) // n)",
    "small": ".tensor_split(n)  ->  .chunk(n)",
    "dtype": [
        {"x.clone()": "x.clone().float()", "return chunks[place]": "return chunks[place].to(x.dtype)"},
        "return chunks[place]  ->  return chunks[place] if x.is_floating_point() else chunks[place].double()",
    ],
    "whole-tensor": {
        "chunks = x.clone().tensor_split(n)": "whole = x.clone()\nchunks = whole.tensor_split(n)",
        "torch.empty_like(into)": "torch.empty_like(whole)",
        "isend, chunks[(place + step) % n]": "isend, whole",
        "into += received": "into += received.tensor_split(n)[(place + step + 1) % n]",
    },
    "hub": lambda x, ring: summed_by_one_rank(x, ring).tensor_split(len(ring))[ring.index(dist.get_rank())].clone(),
    "direction": {"chunks = x.clone().tensor_split(n)": f"{MIRRORED}x.clone().tensor_split(n)[::-1]"},
    "not-a-ring": STRAIGHT,
    "average": "return chunks[place]  ->  return chunks[place] / n",
    "unwaited": [
        f"{STARTED}  ->  {STARTED}[1:]",
        hangs(
            {
                FINISHED: "import time\n\ndist.batch_isend_irecv([send])\ntime.sleep(0.3 * place)\n"
                f"dist.recv(received, {RIGHT_OF})"
            }
        ),
    ],
    "not-added": "into += received  ->  into.copy_(received)",
    "wrong-chunk": {"range(1, n)": "range(n - 1)", "return chunks[place]": "return chunks[place - 1]"},
    "first-chunk": "range(1, n)  ->  range(n - 1)",
    "whole-result": {"x.clone()": "(y := x.clone())", "return chunks[place]": "ring_all_gather(y, ring)\nreturn y"},
    "partial": "isend, chunks[(place + step) % n]  ->  isend, x.tensor_split(n)[(place + step) % n]",
    "not-distributed": "range(1, n)  ->  range(1, n - 1)",
    "too-many-bytes": "return chunks[place]  ->  ring_all_gather(x.clone(), ring)\nreturn chunks[place]",
    "input-changed": "x.clone()  ->  x",
    "one-rank": "range(1, n)  ->  range(1, max(n, 2))",
}


def sums_in_new_tensors(x, ring):
    n, place, own = len(ring), ring.index(dist.get_rank()), x.tensor_split(len(ring))
    total = own[(place + 1) % n].clone()
    for step in range(1, n):
        received = torch.empty_like(own[(place + step + 1) % n])
        sending, receiving = dist.isend(total, ring[place - 1]), dist.irecv(received, ring[(place + 1) % n])
        receiving.wait()
        sending.wait()
        total = own[(place + step + 1) % n] + received
    return total


def numpy_buffers(x, ring):
    """Arrays of NumPy, and no message for an empty chunk."""
    n, place = len(ring), ring.index(dist.get_rank())
    chunks = np.array_split(x.numpy().copy(), n)
    for step in range(1, n):
        out, into = chunks[(place + step) % n], chunks[(place + step + 1) % n]
        received = np.empty_like(into)
        sending = dist.isend(torch.from_numpy(out), ring[place - 1]) if len(out) else None
        if len(into):
            dist.recv(torch.from_numpy(received), ring[(place + 1) % n])
        if sending is not None:
            sending.wait()
        into += received
    return torch.from_numpy(chunks[place].copy())


def recursive(x, ring, step=1, chunks=None):
    n, place = len(ring), ring.index(dist.get_rank())
    chunks = chunks or x.clone().tensor_split(n)
    if step >= n:
        return chunks[place]
    into = chunks[(place + step + 1) % n]
    received = torch.empty_like(into)
    swap(chunks[(place + step) % n], ring[place - 1], received, ring[(place + 1) % n])
    into += received
    return recursive(x, ring, step + 1, chunks)


RIGHT["ring_reduce_scatter"] = {
    "sums in new tensors": sums_in_new_tensors,
    "NumPy, empty chunks are not sent": numpy_buffers,
    "receives first": f"{STARTED}  ->  dist.batch_isend_irecv([receive, send])",
    "recursion": recursive,
    "the send in a thread": {
        FINISHED: "from threading import Thread\n\nthread = Thread(target=dist.send, args=(send.tensor, send.peer))\n"
        "thread.start()\ndist.recv(received, receive.peer)\nthread.join()"
    },
}

# ------------------------------------------------------------------------------------------------ ring all-gather

def summed_into_x(x, ring):
    own = torch.zeros_like(x)
    mine, chunk = (t.tensor_split(len(ring))[ring.index(dist.get_rank())] for t in (own, x))
    mine.copy_(chunk)
    x.copy_(summed_by_one_rank(own, ring))


CHUNKS_OUT_IN = "out, into = chunks[(place + step) % n], chunks[(place + step + 1) % n]"
WRONG["ring_all_gather"] = {
    **WRONG_RINGS,
    "library": "chunks = x.tensor_split(n)  ->  "
    "for i, chunk in zip(ring, x.tensor_split(n), strict=True):\n    dist.broadcast(chunk, i)\nreturn\nchunks = x",
    "not-divisible": "x.tensor_split(n)  ->  x.split(len(x) // n)",
    "small": "x.tensor_split(n)  ->  x.chunk(n)",
    "dtype": {
        "x.tensor_split(n)": "(y := x.float().clone()).tensor_split(n)",
        FINISHED: f"{WAITED}\nx.copy_(y)",
    },
    "whole-tensor": {
        "chunks = x": "whole = torch.empty_like(x)\nchunks = x",
        "isend, out": "isend, x",
        "irecv, into": "irecv, whole",
        "request.wait()": "request.wait()\ninto.copy_(whole.tensor_split(n)[(place + step + 1) % n])",
    },
    "hub": summed_into_x,
    "direction": {"chunks = x.tensor_split(n)": f"{MIRRORED}x.tensor_split(n)[::-1]"},
    "not-a-ring": {
        CHUNKS_OUT_IN: "out, into = chunks[place], chunks[place - step - 1]",
        LEFT: "ring[(place + step + 1) % n]",
        RIGHT_OF: "ring[place - step - 1]",
    },
    "missing": "range(n - 1)  ->  range(1, n)",
    "not-passed-on": "out, into = chunks[(place + step) % n]  ->  out, into = chunks[place]",
    "order": {
        "chunks = x.tensor_split(n)": "chunks = x.tensor_split(n)\nchunks[0].copy_(chunks[place].clone())",
        CHUNKS_OUT_IN: "out, into = chunks[step], chunks[step + 1]",
    },
    "added": {
        "irecv, into": "irecv, received := torch.empty_like(into)",
        FINISHED: f"{WAITED}\ninto += received",
    },
    "not-in-place": {
        "chunks = x": "x = x.clone()\nchunks = x",
        FINISHED: f"{WAITED}\nif step == n - 2:\n    return x",
    },
    "not-distributed": "range(n - 1)  ->  range(0)",
    "too-many-bytes": "range(n - 1)  ->  range(2 * (n - 1))",
}


def collected_and_copied(x, ring):
    n, place = len(ring), ring.index(dist.get_rank())
    found = {place: x.tensor_split(n)[place].clone()}
    for step in range(1, n):
        arriving = (place + step) % n
        found[arriving] = torch.empty_like(x.tensor_split(n)[arriving])
        swap(found[(arriving - 1) % n], ring[place - 1], found[arriving], ring[(place + 1) % n])
    x[:] = torch.cat([found[i] for i in range(n)])
    return x


RIGHT["ring_all_gather"] = {
    "isend, recv": {FINISHED: "send = dist.isend(out, ring[place - 1])\ndist.recv(into, receive.peer)\nsend.wait()"},
    "irecv, send": {FINISHED: "receive = dist.irecv(into, receive.peer)\ndist.send(out, send.peer)\nreceive.wait()"},
    "collected, copied at the end, returned": collected_and_copied,
}

# ------------------------------------------------------------------------------------------------ ring all-reduce

MINE = "mine.copy_(ring_reduce_scatter(flat, ring))"
GATHER = "ring_all_gather(flat, ring)"
RESULT = "return flat.reshape(x.shape)"
IN_TWO_PIECES = """for part in flat.tensor_split(2):
    mine = part.tensor_split(len(ring))[ring.index(dist.get_rank())]
    mine.copy_(ring_reduce_scatter(part, ring))
    ring_all_gather(part, ring)"""


def cut(method: str) -> dict[str, str]:
    """Other chunks in both halves; ``n`` stands for their number, ``x`` for the flat tensor."""
    own = method.replace("len(x)", "len(flat)").replace("n)", "len(ring))")
    return {
        "x.clone().tensor_split(n)": f"x.clone().{method}",
        "chunks = x.tensor_split(n)": f"chunks = x.{method}",
        "flat.tensor_split(len(ring))": f"flat.{own}",
    }


WRONG["ring_all_reduce"] = {
    "hang": hangs("receive = dist.P2POp(dist.irecv, received  ->  "
                  "dist.send(into, ring[place - 1])\nreceive = dist.P2POp(dist.irecv, received"),
    "library": f"{GATHER}  ->  dist.all_reduce(flat)",
    "not-divisible": {
        "x.flatten().clone()": "torch.cat([x.flatten(), x.new_zeros(-x.numel() % len(ring))])",
        RESULT: "return flat.reshape(x.shape) if len(flat) == x.numel() else flat",
    },
    "tail": cut("split(len(x) // n)"),
    "small": cut("chunk(n)"),
    "dtype": {"x.flatten().clone()": "x.flatten().clone().float()", RESULT: f"{RESULT}.to(x.dtype)"},
    "ring": "flat = x  ->  ring = sorted(ring)\nflat = x",
    "whole-tensor": whole_tensors_round_the_ring,
    "hub": summed_by_one_rank,
    "direction": "flat = x  ->  ring = ring[::-1]\nflat = x",
    "not-a-ring": STRAIGHT,
    "steps": {f"{MINE}\n    {GATHER}": IN_TWO_PIECES},
    "average": f"{RESULT}  ->  {RESULT} / len(ring)",
    "not-gathered": [f"{GATHER}  ->  pass", {GATHER: "pass", RESULT: "return mine"}],
    "missing": "range(n - 1)  ->  range(1, n)",
    "added": f"{GATHER}  ->  own = flat.clone()\n{GATHER}\nflat += own\nmine /= 2",
    "shape": [f"{RESULT}  ->  return flat", "reshape(x.shape)  ->  reshape(x.shape or (1,))"],
    "differs": f"{RESULT}  ->  if x.is_floating_point() and not dist.get_rank():\n    flat *= 1 + 1e-6\n{RESULT}",
    "not-distributed": {MINE: "pass", GATHER: "pass"},
    "only-two-ranks": hangs("irecv, into, ring[(place + 1) % n]  ->  irecv, into, ring[place - 1]"),
    "too-many-bytes": f"{GATHER}  ->  {GATHER}\n{GATHER}",
    "input-changed": "x.flatten().clone()  ->  x.view(-1)",
}


def one_loop_to_the_left(x, ring):
    """Both halves in one loop, chunks as NumPy cuts them, and all sends waited for at the end of a half."""
    n, place, flat, sends = len(ring), ring.index(dist.get_rank()), x.flatten().clone(), []
    chunks = [torch.from_numpy(chunk) for chunk in np.array_split(flat.numpy(), n)]
    for step in range(1, 2 * n - 1):
        into = chunks[(place + step + 1) % n]
        received = torch.empty_like(into)
        sends.append(dist.isend(chunks[(place + step) % n], ring[place - 1]))
        dist.recv(received, ring[(place + 1) % n])
        into.copy_(into + received if step < n else received)
        if step == n - 1:
            while sends:
                sends.pop().wait()
    for send in sends:
        send.wait()
    return flat.view_as(x)


RIGHT["ring_all_reduce"] = {
    "one loop, NumPy's chunks, sends waited for later": one_loop_to_the_left,
    "the same ring, begun elsewhere": "flat = x  ->  ring = ring[1:] + ring[:1]\nflat = x",
    "padded to a multiple of the ranks": {
        "x.flatten().clone()": "torch.cat([x.flatten(), x.new_zeros(-x.numel() % len(ring))])",
        RESULT: "return flat[: x.numel()].reshape(x.shape)",
    },
}

# ------------------------------------------------------------------------------------------------ the mended ring

PAIR = "dist.batch_isend_irecv([receive, send])"
COPY = "result = x.clone()"
LAST = "into.copy_(into + received if step < n - 1 else received)"
OVER_EXERCISE_3 = {COPY: f"return ring_all_reduce(x, {WORLD})\n{COPY}"}
PAST_THE_LEDGER = "dist.group.WORLD._get_backend(torch.device('cpu')).allreduce([result]).wait()"
WRONG["mended_ring_all_reduce"] = {
    "hang": hangs(f"{PAIR}  ->  {one_by_one('(send, receive)')}"),
    "library": f"{COPY}  ->  {COPY}\ndist.all_reduce(result)\nreturn result",
    "not-divisible": f"{COPY}  ->  result = torch.cat([x, x.new_zeros(-len(x) % n)])",
    "tail": "result.tensor_split(n)  ->  result.split(len(x) // n)",
    "small": "result.tensor_split(n)  ->  result.chunk(n)",
    "dtype": {COPY: "result = x.clone().float()", "return result": "return result.to(x.dtype)"},
    "whole-tensor": {
        "torch.empty_like(into)": "torch.empty_like(result)",
        "isend, out": "isend, result",
        LAST: f"received = received.tensor_split(n)[(rank - step - 1) % n]\n{LAST}",
    },
    "hub": lambda x: summed_by_one_rank(x, world()),
    "direction": OVER_EXERCISE_3,
    "not-a-ring": STRAIGHT | OVER_EXERCISE_3,
    "steps": f"{PAIR}  ->  {one_by_one('(send, receive)[:: 1 - rank % 2 * 2]')}",
    "average": "return result  ->  return result / n",
    "not-gathered": "range(2 * (n - 1))  ->  range(n - 1)",
    "missing": "out, into =  ->  step += step >= n - 1\nout, into =",
    "added": f"{LAST}  ->  into += received",
    "differs": "return result  ->  if x.is_floating_point() and not rank:\n    result *= 1 + 1e-6\nreturn result",
    "only-two-ranks": hangs("irecv, received, (rank - 1) % n  ->  irecv, received, (rank + 1) % n"),
    "input-changed": f"{COPY}  ->  result = x",
    "too-few-bytes": f"chunks = result.tensor_split(n)  ->  {PAST_THE_LEDGER}\nchunks = [result[:0]] * n",
}


def list_of_chunks(x):
    """New tensors in a list, joined at the end; chunks of ⌈len / n⌉, the last ones shorter or empty."""
    rank, n = dist.get_rank(), dist.get_world_size()
    size = -(-len(x) // n)
    chunks = [x[i * size : (i + 1) * size] for i in range(n)]
    for step in range(2 * n - 2):
        arriving = (rank - step - 1) % n
        received = torch.empty_like(chunks[arriving])
        swap(chunks[(rank - step) % n], (rank + 1) % n, received, (rank - 1) % n)
        chunks[arriving] = received + chunks[arriving] if step < n - 1 else received
    return torch.cat(chunks)


RIGHT["mended_ring_all_reduce"] = {
    "a list of new tensors": list_of_chunks,
    "two loops": {
        "for step in range(2 * (n - 1)):": "for step in [*range(n - 1), *range(n - 1, 2 * n - 2)]:",
        LAST: "if step < n - 1:\n    into += received\nelse:\n    into[:] = received",
    },
    "isend and recv": {
        f"for request in {PAIR}:\n            request.wait()": "send = dist.isend(out, send.peer)\n"
        "dist.recv(received, receive.peer)\nsend.wait()"
    },
}

# ------------------------------------------------------------------------------------------------ tree

PLACES = "x.clone(), torch.empty_like(x)"
GET = "dist.recv(received, (rank + distance) % n)"
UP, ANSWER = "dist.send(total, (rank - distance) % n)", "dist.recv(total, (rank - distance) % n)"
DOWN = "dist.send(total, (rank + distance) % n)"
IF_CHILD = "if place + distance < n:\n            "
WAY_UP_IS_OPEN = "while distance < n and place % (2 * distance) == 0:"


def heap(x, root):
    """A binary tree: the children of place p are 2p + 1 and 2p + 2; the smaller subtree comes first on the way up."""
    rank, n = dist.get_rank(), dist.get_world_size()
    place, total, received = (rank - root) % n, x.clone(), torch.empty_like(x)
    children = [(child + root) % n for child in (2 * place + 2, 2 * place + 1) if child < n]
    for child in children:
        dist.recv(received, child)
        total += received
    if place:
        dist.send(total, ((place - 1) // 2 + root) % n)
        dist.recv(total, ((place - 1) // 2 + root) % n)
    for child in children[::-1]:
        dist.send(total, child)
    return total


def recursive_doubling(x, root):
    rank, total, received, distance = dist.get_rank(), x.clone(), torch.empty_like(x), 1
    while distance < dist.get_world_size():
        swap(total, rank ^ distance, received, rank ^ distance)
        total, distance = total + received, 2 * distance
    return total


WRONG["tree_all_reduce"] = {
    "average": "return total  ->  return total / n",
    "hang": hangs({f"{UP}\n        {ANSWER}": f"{ANSWER}\n{UP}"}),
    "library": "distance = 1  ->  dist.reduce(total, root)\ndist.broadcast(total, root)\nreturn total\ndistance = 1",
    "not-broadcast": {ANSWER: "return total", "while distance > 1:": "while False:"},
    "own-sent": f"{UP}  ->  {UP.replace('total', 'x')}",
    "added": f"{ANSWER}  ->  {ANSWER.replace('total', 'received')}\ntotal += received",
    "root": [
        "(rank - root) % n, x  ->  rank, x",
        {"(rank - root) % n, x": "rank ^ root, x"}
        | {call: call.replace("(rank", "(place").replace("% n", "^ root") for call in (GET, UP, ANSWER, DOWN)},
    ],
    "power-of-two": hangs({f"{IF_CHILD}{GET}": f"if True:\n    {GET}", f"{IF_CHILD}{DOWN}": f"if True:\n    {DOWN}"}),
    "dtype": {PLACES: "x.clone().float(), torch.empty_like(x).float()", "return total": "return total.to(x.dtype)"},
    "too-large": {PLACES: "x.double(), torch.empty_like(x).double()", "return total": "return total.to(x.dtype)"},
    "hub": lambda x, root: summed_by_one_rank(x, [root, *(rank for rank in world() if rank != root)]),
    "chain": {
        WAY_UP_IS_OPEN: "while distance < 2:",
        UP: UP.replace("distance", "1"),
        ANSWER: ANSWER.replace("distance", "1"),
    },
    "too-deep": heap,
    "order": {
        "distance = 1": "distance, children = 1, []",
        f"{GET}\n            total += received": "children.append((rank + distance) % n)",
        "if place:": "for c in children[::-1]:\n    dist.recv(received, c)\n    total += received\nif place:",
    },
    "too-many-messages": f"distance = 1  ->  return ring_all_reduce(x, {WORLD})\ndistance = 1",
    "exchange": recursive_doubling,
    "differs": "return total  ->  if x.is_floating_point() and not rank:\n    total *= 1 + 1e-6\nreturn total",
    "only-two-ranks": {UP: "dist.send(total, 1 - rank)", ANSWER: "dist.recv(total, 1 - rank)"},
    "input-changed": f"{PLACES}  ->  x, torch.empty_like(x)",
    "not-distributed": "distance = 1  ->  return total\ndistance = 1",
    "error": "return total  ->  return totl",
}


def halves(x, root):
    """Places in the upper half send to the lower half, and so on; the same backwards."""
    rank, n = dist.get_rank(), dist.get_world_size()
    place, left, children, parent = (rank - root) % n, n, [], None
    while left > 1 and parent is None:
        half = (left + 1) // 2
        if place >= half:
            parent = (rank - half) % n
        elif place + half < left:
            children.append((rank + half) % n)
        left = half
    total, received = x.clone(), torch.empty_like(x)
    for child in children:
        dist.recv(received, child)
        total += received
    if parent is not None:
        dist.send(total, parent)
        dist.recv(total, parent)
    for child in children[::-1]:
        dist.send(total, child)
    return total


def all_receives_posted_first(x, root):
    rank, n = dist.get_rank(), dist.get_world_size()
    place, total, reach = (rank - root) % n, x.clone(), 1
    while reach < n and place % (2 * reach) == 0:
        reach *= 2
    children = [(rank + 2**k) % n for k in range(reach.bit_length() - 1) if place + 2**k < n]
    buffers = [torch.empty_like(x) for _ in children]
    requests = [dist.irecv(buffer, child) for buffer, child in zip(buffers, children, strict=True)]
    for buffer, request in zip(buffers, requests, strict=True):
        request.wait()
        total += buffer
    if place:
        dist.send(total, (rank - reach) % n)
        dist.recv(total, (rank - reach) % n)
    if children:
        for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, total, child) for child in children[::-1]]):
            request.wait()
    return total


RIGHT["tree_all_reduce"] = {"halves of what is left": halves, "all receives posted first": all_receives_posted_first}

# ------------------------------------------------------------------------------------------------ two levels

SUM_OF_SHARD = "ring_all_reduce(ring_reduce_scatter(x, inside), across)"
CLUSTER = "list(range(nodes * per_node))"


def leaders(x, nodes, per_node):
    """One rank of each node sums up its node, then all nodes with the other leaders, and hands the sum out."""
    node = dist.get_rank() // per_node
    inside = [node * per_node + i for i in range(per_node)]
    total, received = x.clone(), torch.empty_like(x)
    if dist.get_rank() != inside[0]:
        dist.send(x, inside[0])
        dist.recv(total, inside[0])
        return total
    for other in inside[1:]:
        dist.recv(received, other)
        total += received
    total = whole_tensors_round_the_ring(total, list(range(0, nodes * per_node, per_node)))
    for other in inside[1:]:
        dist.send(total, other)
    return total


WRONG["hierarchical_all_reduce"] = {
    "average": "return result  ->  return result / nodes / per_node",
    "hang": hangs(
        f"shard = {SUM_OF_SHARD}  ->  "
        "shard = ring_reduce_scatter(x, inside)\nif node == 0:\n    shard = ring_all_reduce(shard, across)"
    ),
    "library": f"{COPY}  ->  {COPY}\ndist.all_reduce(result)\nreturn result",
    "not-divisible": f"shard = {SUM_OF_SHARD}  ->  shard = ring_reduce_scatter(x, inside)\n"
    "shard = ring_all_reduce(shard[: len(shard) // nodes * nodes], across)",
    "two-nodes": "[m * per_node + local for m in range(nodes)]  ->  [local, local + per_node]",
    "one-level": f"{COPY}  ->  return ring_all_reduce(x, inside)\n{COPY}",
    "counted-twice": f"{COPY}  ->  return ring_all_reduce(ring_all_reduce(x, inside), {CLUSTER})\n{COPY}",
    "shard-order": {"[local].copy_": "[local - 1].copy_", "(result, inside)": "(result, inside[1:] + inside[:1])"},
    "flat-ring": f"{COPY}  ->  return ring_all_reduce(x, {CLUSTER})\n{COPY}",
    "leaders": leaders,
    "whole-tensor-across": f"{COPY}  ->  return ring_all_reduce(ring_all_reduce(x, inside), across)\n{COPY}",
    "groups": f"{COPY}  ->  inside, across, local, per_node = across, inside, node, nodes\n{COPY}",
    "slow": f"{COPY}  ->  if len(x) > 2**14:\n    parts = x.split(2**14)\n"
    f"    return torch.cat([hierarchical_all_reduce(part, nodes, per_node) for part in parts])\n{COPY}",
    "differs": "return result  ->  if not dist.get_rank():\n    result *= 1 + 1e-6\nreturn result",
    "too-many-bytes": "ring_reduce_scatter(x, inside), across  ->  "
    "ring_all_reduce(x, inside).tensor_split(per_node)[local], across",
    "too-few-bytes": f"shard = {SUM_OF_SHARD}  ->  {PAST_THE_LEDGER}\nring_reduce_scatter(x, inside)\n"
    "shard = result.tensor_split(per_node)[local].clone()",
    "input-changed": f"{COPY}  ->  result = x",
    "not-distributed": f"{COPY}  ->  return x * nodes * per_node\n{COPY}",
}


def direct_inside(x, nodes, per_node):
    """Inside the node every rank sends each other its chunk straight; across the nodes there is a ring."""
    node, local = divmod(dist.get_rank(), per_node)
    inside = [node * per_node + i for i in range(per_node)]
    result, chunks = torch.empty_like(x), x.tensor_split(per_node)
    shard = chunks[local].clone()
    for i in range(1, per_node):
        received = torch.empty_like(shard)
        swap(chunks[(local + i) % per_node], inside[(local + i) % per_node], received, inside[local - i])
        shard += received
    shard = one_loop_to_the_left(shard, [m * per_node + local for m in range(nodes)])
    result.tensor_split(per_node)[local].copy_(shard)
    for i in range(1, per_node):
        swap(shard, inside[(local + i) % per_node], result.tensor_split(per_node)[local - i], inside[local - i])
    return result


RIGHT["hierarchical_all_reduce"] = {
    "direct exchange inside the node": direct_inside,
    "padded to a multiple of the ranks in a node": {
        COPY: "length = len(x)\nx = torch.cat([x, x.new_zeros(-length % per_node)])\nresult = x.clone()",
        "return result": "return result[:length]",
    },
    "the other way round in the node": f"{COPY}  ->  inside, place = inside[::-1], per_node - 1 - local\n"
    f"local = place\n{COPY}",
}

# ------------------------------------------------------------------------------------------------ paper problems

WRONG["pick_algorithm"] = {
    "number": "return min(  ->  return dict(",
    "typed": "return min(  ->  return 'root', 1.014e-4\nreturn min(",
    "numbers": "latency_us * 1e-6, 8 / (gigabits * 1e9)  ->  latency_us, 8e6 / (gigabits * 1e9)",
}
RIGHT["pick_algorithm"] = {
    "levels by the length of a whole number": "math.ceil(math.log2(ranks))  ->  (ranks - 1).bit_length()",
    "NumPy": "return min(  ->  import numpy as np\n\ntimes = np.array([root, ring, tree])\n"
    "return ['root', 'ring', 'tree'][times.argmin()], times.min()\nreturn min(",
    "a list": "return min(  ->  return list(min((root, 'root'), (ring, 'ring'), (tree, 'tree')))[::-1]\nreturn min(",
}
SIZE = "alpha / beta * latencies_saved / bytes_added"
WRONG["crossover_size"] = {"typed": f"return {SIZE}  ->  return 1317647.06"}
WRONG["crossover_ranks"] = {"number": "return n  ->  return str(n) + ' ranks'"}
RIGHT["crossover_size"] = {
    "a tensor": f"return {SIZE}  ->  return torch.tensor({SIZE})",
    "bytes per second": {"8 / (gigabits * 1e9)": "gigabits * 1e9 / 8", "alpha / beta": "alpha * beta"},
}
RIGHT["crossover_ranks"] = {
    "a search with next": "n, levels = 2, 1  ->  return next(\n    2**k for k in range(1, 40)"
    " if k * (step + byte) < (2**k - 1) * (step + byte / 2**k))\nn, levels = 2, 1",
    "NumPy's whole number": "return n  ->  import numpy as np\n\nreturn np.int64(n)",
}


class TestNccl(ExerciseTests):
    checks, WRONG, RIGHT = nccl, WRONG, RIGHT

    def test_the_given_ring_is_broken_as_the_text_says(self):
        (cell,) = (code for _, code in self.cells() if "def broken_ring_all_reduce(" in code)
        names = dict(self.answer("ring_all_reduce").__globals__)
        exec(cell.split("\n\n\n")[0], names)
        error = self.refusal("mended_ring_all_reduce", names["broken_ring_all_reduce"])
        assert error.hint == "tail"
        assert "2 ranks, 11 numbers" in str(error)

    def test_wrong_whole_numbers_are_shown_in_full(self):
        text = str(self.refusal("ring_reduce_scatter", self.wrong("ring_reduce_scatter", "dtype")))
        assert "12 numbers of dtype int64" in text
        expected, got = re.findall(r"(?:expected|got) +shape \(6,\): (\d{18})", text)
        assert expected != got

    def test_wrong_name_is_refused_with_both_names(self):
        error = self.refusal("pick_algorithm", lambda *case: ("ring", 1.0))
        assert re.search(r"expected  root, [-\d.e]+ s\n  got       ring, 1 s", str(error))

    def test_a_ring_in_another_order_is_told_from_one_that_talks_to_strangers(self):
        error = self.refusal("ring_all_reduce", self.wrong("ring_all_reduce", "ring"))
        assert "4 ranks, ring [3, 0, 2, 1], 3 numbers, rank 3: this rank sends to rank 2" in str(error)


@pytest.mark.parametrize("case", nccl.pick_algorithm.cases)
def test_the_times_on_paper_are_those_of_the_cost_model(case):
    size, n, latency_us, gigabits = case
    cluster = flat_cluster(n, latency_us * 1e-6, 8 / (gigabits * 1e9))
    name, seconds = nccl.pick_algorithm.formula(*case)
    assert seconds == pytest.approx(all_reduce_seconds(name, size, cluster))
    assert seconds == pytest.approx(min(all_reduce_seconds(a, size, cluster) for a in ("root", "ring", "tree")))


@pytest.mark.parametrize(("n", "latency_us", "gigabits"), nccl.crossover_size.cases)
def test_ring_and_tree_cross_in_the_cost_model_where_the_formula_says(n, latency_us, gigabits):
    cluster = flat_cluster(n, latency_us * 1e-6, 8 / (gigabits * 1e9))
    size = nccl.crossover_size.formula(n, latency_us, gigabits)
    assert all_reduce_seconds("ring", size, cluster) == pytest.approx(all_reduce_seconds("tree", size, cluster))


def ledgers(*ranks: str) -> list[list[Entry]]:
    names = {"s": "send", "r": "recv"}
    return [[Entry(names[word[0]], "default", 8, int(word[1]), (), 1, 0.0) for word in text.split()] for text in ranks]


@pytest.mark.parametrize(
    ("ranks", "steps"),
    [
        (("r1 s1", "r0 s0"), 1),  # both started at once, the receive first
        (("r2 s1 r2 s1", "r0 s2 r0 s2", "r1 s0 r1 s0"), 2),  # two turns of a ring
        (("s1 r2 s1 r2", "r0 s2 r0 s2", "r1 s0 r1 s0"), 6),  # really one after another
    ],
)
def test_sends_started_with_a_receive_do_not_wait_for_it(ranks, steps):
    assert message_steps(ledgers(*ranks)) == steps
