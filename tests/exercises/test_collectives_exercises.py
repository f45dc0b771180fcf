"""The exercises on collectives: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist
from exercise_cases import ExerciseTests, hangs

from course_utils.check import message_steps
from course_utils.ranks import Entry
from lessons.collectives import check as collectives

pytestmark = pytest.mark.guard(60)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

BACKEND = "_get_backend(torch.device('cpu'))"  # its calls are not in the ledger
FUNCTIONAL = "import torch.distributed._functional_collectives as functional\n"

# ------------------------------------------------------------------------------------------------ mean and variance

SUMS = "torch.stack([x.new_tensor(x.numel()), x.sum(), (x * x).sum()])"
REDUCE = "dist.all_reduce(sums)"
RESULT = "return mean, squares / count - mean**2"
WRONG["mean_and_variance"] = {
    "not-distributed": f"{REDUCE}  ->  dist.barrier()",
    "average-of-variances": [
        f"{REDUCE}  ->  sums = torch.stack([x.mean(), x.var(correction=0)]) / dist.get_world_size()\n"
        "dist.all_reduce(sums)\nreturn sums[0], sums[1]",
        {"(x * x).sum()": "len(x) * x.var(correction=0)", RESULT: "return mean, squares / count"},
    ],
    "mean-of-means": f"{SUMS}  ->  torch.stack([x.new_tensor(1), x.mean(), (x * x).mean()])",
    "empty-shard": "x.sum(),  ->  x.mean() * len(x),",
    "two-all-reduces": {
        SUMS: "torch.stack([x.new_tensor(x.numel()), x.sum()])",
        "count, total, squares = sums": "count, total = sums",
        RESULT: "squares = ((x - mean) ** 2).sum()\ndist.all_reduce(squares)\nreturn mean, squares / count",
    },
    "float32": "x = x.double()  ->  pass",
    "dtype": f"{RESULT}  ->  return mean.float(), (squares / count - mean**2).float()",
    "not-divided": "return mean,  ->  return total,",
    "unbiased": f"{RESULT}  ->  return mean, (squares / count - mean**2) * count / (count - 1)",
    "gathers-everything": f"{REDUCE}  ->  parts = [torch.empty_like(sums) for _ in range(dist.get_world_size())]\n"
    "dist.all_gather(parts, sums)\nsums = sum(parts)",
    "hub": f"{REDUCE}  ->  dist.reduce(sums, dst=0)\ndist.broadcast(sums, src=0)",
    "too-many-bytes": {
        SUMS: "torch.stack([torch.ones_like(x), x, x * x])",
        REDUCE: "sums = torch.cat([sums, sums.new_zeros(3, 100 - len(x))], dim=1)\ndist.all_reduce(sums)\n"
        "sums = sums.sum(dim=1)",
    },
    "too-few-bytes": f"{REDUCE}  ->  "
    f"dist.group.WORLD.{BACKEND}.allreduce([sums]).wait()\ndist.all_reduce(torch.zeros(1))",
    "only-two-ranks": "count, total, squares = sums  ->  "
    "count, total, squares = sums\nif dist.get_world_size() > 2:\n    count = 2 * x.numel()",
    "input-changed": "x = x.double()  ->  x = x.mul_(2).double() / 2",
    "shape": [
        f"{REDUCE}  ->  {REDUCE}\nreturn sums",
        f"{RESULT}  ->  return float(mean), float(squares / count - mean**2)",
    ],
    "error": f"{REDUCE}  ->  dist.all_reduce(total)",
    "hang": hangs(f"{REDUCE}  ->  if dist.get_rank():\n    {REDUCE}"),
}
RIGHT["mean_and_variance"] = {
    "asynchronous, sums by NumPy": {
        SUMS: "torch.from_numpy(np.array([x.numel(), x.numpy().sum(), (x.numpy() ** 2).sum()]))",
        "x = x.double()": "import numpy as np\n\nx = x.double()",
        REDUCE: "dist.all_reduce(sums, async_op=True).wait()",
    },
    "functional collectives": f"{REDUCE}  ->  {FUNCTIONAL}\n"
    "sums = functional.wait_tensor(functional.all_reduce(sums, 'sum', dist.group.WORLD))",
    "torch.distributed.nn": f"{REDUCE}  ->  "
    "from torch.distributed.nn import functional\n\nsums = functional.all_reduce(sums)",
    "three scalars in one coalesced call": {
        SUMS: "[x.new_tensor(x.numel()), x.sum(), (x * x).sum()]",
        REDUCE: "with dist.distributed_c10d._coalescing_manager():\n    for one in sums:\n        dist.all_reduce(one)",
    },
    "shifted by a constant": {
        "x = x.double()": "x = x.double() - 3000",
        RESULT: "return mean + 3000, squares / count - mean**2",
    },
}

# ------------------------------------------------------------------------------------------------ ring shift

RECEIVED = "received = torch.empty_like(x)"
SHIFT = """send = dist.P2POp(dist.isend, x, (rank + 1) % n)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % n)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()"""
SEND, RECV = "dist.send(x, (rank + 1) % n)", "dist.recv(received, (rank - 1) % n)"
ISEND = "dist.isend(x, (rank + 1) % n)"


def through_the_store(x):
    import pickle

    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    store.set(f"{x.dtype}{rank}", pickle.dumps(x))
    dist.barrier()
    return pickle.loads(store.get(f"{x.dtype}{(rank - 1) % dist.get_world_size()}"))


WRONG["ring_shift"] = {
    "hang": hangs({SHIFT: f"{SEND}\n{RECV}"}),
    "unwaited": hangs({SHIFT: f"{ISEND}\nif rank == 1:\n    __import__('time').sleep(0.3)  # rank 0 returns\n{RECV}"}),
    "only-two-ranks": {"(rank + 1) % n": "rank ^ 1", "(rank - 1) % n": "rank ^ 1"},
    "direction": {"isend, x, (rank + 1)": "isend, x, (rank - 1)", "received, (rank - 1)": "received, (rank + 1)"},
    "collective": {
        SHIFT: "parts = [torch.empty_like(x) for _ in range(n)]\ndist.all_gather(parts, x)\nreceived = parts[rank - 1]"
    },
    "input-changed": {RECEIVED: "received = x", "isend, x": "isend, x.clone()"},
    "too-many-bytes": {
        RECEIVED: "received = torch.stack([x, x])",
        "isend, x": "isend, received.clone()",
        "return received": "return received[0]",
    },
    "too-many-calls": {
        SHIFT: "parts = [torch.empty_like(x) for _ in range(n)]\nrequests = []\nfor distance in range(1, n):\n"
        "    requests.append(dist.isend(x, (rank + distance) % n))\n"
        "    requests.append(dist.irecv(parts[distance], (rank - distance) % n))\n"
        "for request in requests:\n    request.wait()\nreceived = parts[1]"
    },
    "one-rank": {
        "if n == 1:\n        return x.clone()": "",
        SHIFT: f"if rank % 2:\n    {RECV}\n    {SEND}\nelse:\n    {SEND}\n    {RECV}",
    },
    "not-distributed": through_the_store,
    "value": "return received  ->  return torch.zeros_like(x)",
    "any-tensor": [
        f"{RECEIVED}  ->  received = torch.empty(x.shape)",
        f"{RECEIVED}  ->  a, b = x.shape\nreceived = x.new_empty(a, b)",
    ],
    "dtype": "return received  ->  return received.double()",
    "too-few-bytes": {
        "isend, x": "isend, x.float() if x.dtype == torch.float64 else x",
        RECEIVED: "received = torch.empty(x.shape) if x.dtype == torch.float64 else torch.empty_like(x)",
        "return received": "return received.to(x.dtype)",
    },
}
RIGHT["ring_shift"] = {
    "isend, recv, wait": {SHIFT: f"request = {ISEND}\n{RECV}\nrequest.wait()"},
    "even ranks send first": {SHIFT: f"if rank % 2:\n    {RECV}\n    {SEND}\nelse:\n    {SEND}\n    {RECV}"},
    "rank 0 alone receives first": {SHIFT: f"if rank:\n    {SEND}\n    {RECV}\nelse:\n    {RECV}\n    {SEND}"},
    "the send in a thread": {
        SHIFT: "from threading import Thread\n\nthread = Thread(target=dist.send, args=(x, (rank + 1) % n))\n"
        f"thread.start()\n{RECV}\nthread.join()"
    },
}

# ------------------------------------------------------------------------------------------------ ragged all-gather

START = "n, (rows, d) = dist.get_world_size(), x.shape"
LENGTHS = "dist.all_gather_single(lengths, torch.tensor([rows], device=x.device))"
LONGEST = "longest = int(lengths.max())"
ROWS = "dist.all_gather_single(gathered, padded)"
CUT_ROWS = "return [part[:length] for part, length in zip(parts, lengths.tolist(), strict=True)]"
UNPADDED = """rank, sizes = dist.get_rank(), lengths.tolist()
everything = x.new_empty(sum(sizes), d)
parts = list(everything.split(sizes))
parts[rank].copy_(x)
"""
OTHERS = f"{UNPADDED}others = [r for r in range(n) if r != rank]\n"
FILLED = "gathered.zero_().view(n, longest, d)[dist.get_rank()] = padded\n"


def pickled(x):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return parts


WRONG["ragged_all_gather"] = {
    "uneven": f"{START}  ->  {START}\n"
    "parts = [torch.empty_like(x) for _ in range(n)]\ndist.all_gather(parts, x)\nreturn parts",
    "padding-left": f"{CUT_ROWS}  ->  return list(parts)",
    "own-length": "part[:length]  ->  part[:rows]",
    "not-a-list": {"return [": "return torch.cat([", "strict=True)]": "strict=True)])"},
    "rank-order": {
        "return [part": "rank = dist.get_rank()\nparts = [part",
        "strict=True)]": "strict=True)]\nreturn [*parts[rank:], *parts[:rank]]",
    },
    "padding-guessed": [
        f"{CUT_ROWS}  ->  return [part[part.any(dim=1)] for part in parts]",
        {
            "x.new_zeros(longest, d)": "x.new_full((longest, d), torch.nan)",
            CUT_ROWS: "return [part[~part.isnan().any(dim=1)] for part in parts]",
        },
    ],
    "many-rows": {"torch.int64": "torch.uint8", "([rows], device=x.device)": "([rows]).to(torch.uint8)"},
    "error": "x.new_zeros(longest, d)  ->  x.new_zeros(longest, 3)",
    "hub": f"{LONGEST}  ->  {OTHERS}if rank:\n    dist.send(x, 0)\nelse:\n    for r in others:\n"
    "        dist.recv(parts[r], r)\ndist.broadcast(everything, src=0)\nreturn parts",
    "one-call-per-rank": f"{LONGEST}  ->  "
    f"{UNPADDED}for source, part in enumerate(parts):\n    dist.broadcast(part, src=source)\nreturn parts",
    "messages": f"{LONGEST}  ->  {OTHERS}"
    "for request in [dist.isend(x, r) for r in others] + [dist.irecv(parts[r], r) for r in others]:\n"
    "    request.wait()\nreturn parts",
    "hang": hangs(
        f"{LONGEST}  ->  {OTHERS}"
        "for r in others:\n    dist.send(x, r)\nfor r in others:\n    dist.recv(parts[r], r)\nreturn parts"
    ),
    "object": pickled,
    "more-than-two": f"{LONGEST}  ->  longest = torch.tensor(rows)\ndist.all_reduce(longest, op=dist.ReduceOp.MAX)",
    "too-many-bytes": [f"{LONGEST}  ->  longest = 400", f"{ROWS}  ->  {FILLED}dist.all_reduce(gathered)"],
    "too-few-bytes": f"{ROWS}  ->  {FILLED}dist.group.WORLD.{BACKEND}.allreduce([gathered]).wait()",
    "only-two-ranks": {"lengths.tolist()": "lengths.tolist()[:2] * 2", "strict=True": "strict=False"},
    "not-distributed": f"{START}  ->  {START}\nreturn [x] * n",
    "input-changed": f"{CUT_ROWS}  ->  x.zero_()\n{CUT_ROWS}",
}
RIGHT["ragged_all_gather"] = {
    "rows by an all-to-all of uneven parts": f"{LONGEST}  ->  "
    f"{UNPADDED}dist.all_to_all_single(everything, x.repeat(n, 1), sizes, [rows] * n)\nreturn parts",
    "lists of tensors": {
        LENGTHS: "dist.all_gather(list(lengths.split(1)), torch.tensor([rows]))",
        ROWS: "dist.all_gather(list(gathered.view(n, longest, d)), padded)",
        CUT_ROWS: "return tuple(part[:length].clone() for part, length in zip(parts, lengths.tolist(), strict=True))",
    },
    "functional collectives": {
        LENGTHS: f"{FUNCTIONAL}\nlengths = functional.all_gather_tensor(torch.tensor([rows]), 0, dist.group.WORLD)",
    },
    "lengths by an all-reduce": f"{LENGTHS}  ->  "
    "lengths.zero_()\nlengths[dist.get_rank()] = rows\ndist.all_reduce(lengths)",
}

# ------------------------------------------------------------------------------------------------ problems on paper


def with_fractions(parameters, bytes_per_parameter, ranks, link_gigabits):
    from fractions import Fraction

    return Fraction(2 * (ranks - 1), ranks) * Fraction(parameters) * bytes_per_parameter * 8 / link_gigabits / 10**9


SECONDS = "return sent / (link_gigabits * 1e9 / 8)"
BANDWIDTHS = "return algbw, algbw * factor"
WRONG |= {
    "gradient_all_reduce_seconds": {
        "typed": f"{SECONDS}  ->  return 0.525",
        "number": f"{SECONDS}  ->  pass",
        "numbers": "link_gigabits * 1e9  ->  link_gigabits * 1e6",
    },
    "bandwidths": {"number": f"{BANDWIDTHS}  ->  return algbw * factor"},
}
RIGHT |= {
    "gradient_all_reduce_seconds": {
        "fractions": with_fractions,
        "step by step": "sent = 2 * (ranks - 1) / ranks * size  ->  "
        "sent = sum(size / ranks for _ in range(2 * ranks - 2))",
    },
    "bandwidths": {
        "an array": f"{BANDWIDTHS}  ->  import numpy as np\n\nreturn algbw * np.array([1, factor])",
        "a tensor": f"{BANDWIDTHS}  ->  return torch.tensor([algbw, algbw * factor])",
    },
    "all_gather_seconds": {
        "from the whole output": "(ranks - 1) * shard  ->  (ranks - 1) / ranks * (ranks * shard)",
        "a tensor without dimensions": "return received  ->  return torch.tensor(received)",
    },
}


class TestCollectives(ExerciseTests):
    checks, WRONG, RIGHT = collectives, WRONG, RIGHT

    def test_refusal_names_exercise_ranks_and_both_values(self):
        text = str(self.refusal("ring_shift", self.wrong("ring_shift", "direction")))
        assert text.startswith("Exercise 2, 3 ranks, x float32 of shape (6, 2), rank 0: the result is wrong.")
        assert re.search(r"expected  shape \(6, 2\): [-\d.]+, .*\n  got       shape \(6, 2\): [-\d.]+, ", text)


def ledgers(*ranks: str) -> list[list[Entry]]:
    """Ledgers from text: ``s1 r2`` is a send to rank 1, then a receive from rank 2."""
    names = {"s": "send", "r": "recv"}
    return [[Entry(names[word[0]], "default", 8, int(word[1]), (), 1, 0.0) for word in text.split()] for text in ranks]


@pytest.mark.parametrize(
    ("ranks", "steps"),
    [
        (("", ""), 0),
        (("s1", "r0"), 1),
        (("s1 s2 s3", "r0", "r0", "r0"), 3),  # hub
        (("r1 r2 r3", "s0", "s0", "s0"), 3),  # hub that receives
        (("s1", "r0 s2", "r1 s3", "r2"), 3),  # chain
        (("s1 s2", "r0 s3", "r0", "r1"), 2),  # tree
        (("s1 r1", "r0 s0"), 2),  # there and back
        (("s1 r1", "s0 r0"), 1),  # both at once
    ],
)
def test_steps_are_counted_from_the_order_of_messages(ranks, steps):
    assert message_steps(ledgers(*ranks)) == steps
