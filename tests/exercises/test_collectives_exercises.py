"""The exercises on collectives: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from exercise_cases import ExerciseTests, hangs

from course_utils.checks import collectives, message_steps
from course_utils.ranks import Entry

pytestmark = pytest.mark.guard(60)

BACKEND = "_get_backend(torch.device('cpu'))"  # its calls are not in the ledger
FUNCTIONAL = "import torch.distributed._functional_collectives as functional\n"

# ------------------------------------------------------------------------------------------------ mean and variance

SUMS = "torch.stack([x.new_tensor(x.numel()), x.sum(), (x * x).sum()])"
REDUCE = "dist.all_reduce(sums)"
RESULT = "return mean, squares / count - mean**2"
MEAN_AND_VARIANCE = {
    "not-distributed": [
        f"{REDUCE}  ->  pass",
        f"{REDUCE}  ->  dist.barrier()",
        f"{REDUCE}  ->  dist.group.WORLD.{BACKEND}.allreduce([sums]).wait()",
    ],
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
    "gathers-everything": [
        f"{REDUCE}  ->  parts = [None] * dist.get_world_size()\ndist.all_gather_object(parts, x)\n"
        "x = torch.cat(parts)\nreturn x.mean(), x.var(correction=0)",
        f"{REDUCE}  ->  parts = [torch.empty_like(sums) for _ in range(dist.get_world_size())]\n"
        "dist.all_gather(parts, sums)\nsums = sum(parts)",
    ],
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
MEAN_AND_VARIANCE_RIGHT = {
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
ISEND, IRECV = "dist.isend(x, (rank + 1) % n)", "dist.irecv(received, (rank - 1) % n)"


def through_the_store(x):
    import pickle

    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    store.set(f"{x.dtype}{rank}", pickle.dumps(x))
    dist.barrier()
    return pickle.loads(store.get(f"{x.dtype}{(rank - 1) % dist.get_world_size()}"))


RING_SHIFT = {
    "hang": [
        hangs({SHIFT: f"{SEND}\n{RECV}"}),
        hangs({SHIFT: f"{RECV}\n{SEND}"}),
        hangs({SHIFT: f"{ISEND}.wait()\n{IRECV}.wait()"}),
    ],
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
    "not-distributed": [{SHIFT: "received.fill_(7)"}, through_the_store],
    "value": "return received  ->  return torch.zeros_like(x)",
    "any-tensor": [
        f"{RECEIVED}  ->  received = torch.empty(x.shape)",
        f"{RECEIVED}  ->  received = x.new_empty(x.shape[:2])",
        f"{RECEIVED}  ->  a, b = x.shape\nreceived = x.new_empty(a, b)",
    ],
    "dtype": "return received  ->  return received.double()",
    "too-few-bytes": {
        "isend, x": "isend, x.float() if x.dtype == torch.float64 else x",
        RECEIVED: "received = torch.empty(x.shape) if x.dtype == torch.float64 else torch.empty_like(x)",
        "return received": "return received.to(x.dtype)",
    },
}
RING_SHIFT_RIGHT = {
    "isend, recv, wait": {SHIFT: f"request = {ISEND}\n{RECV}\nrequest.wait()"},
    "even ranks send first": {SHIFT: f"if rank % 2:\n    {RECV}\n    {SEND}\nelse:\n    {SEND}\n    {RECV}"},
    "rank 0 alone receives first": {SHIFT: f"if rank:\n    {SEND}\n    {RECV}\nelse:\n    {RECV}\n    {SEND}"},
    "the send in a thread": {
        SHIFT: "from threading import Thread\n\nthread = Thread(target=dist.send, args=(x, (rank + 1) % n))\n"
        f"thread.start()\n{RECV}\nthread.join()"
    },
}

# ------------------------------------------------------------------------------------------------ all-reduce in two

SCATTER, GATHER = "dist.reduce_scatter_single(shard, padded)", "dist.all_gather_single(padded, shard)"
TWO = f"{SCATTER}\n    {GATHER}"
CUT = "return padded[: x.numel()].reshape(x.shape)"


def without_padding(x):
    flat = x.flatten()
    shard = flat.new_empty(len(flat) // dist.get_world_size())
    dist.reduce_scatter_single(shard, flat)
    result = torch.empty_like(flat)
    dist.all_gather_single(result, shard)
    return result.reshape(x.shape)


def the_rest_is_left_out(x):
    n = dist.get_world_size()
    flat, body = x.flatten(), x.numel() // n * n
    result, shard = flat.clone(), flat.new_empty(body // n)
    if body:
        dist.reduce_scatter_single(shard, flat[:body].clone())
        dist.all_gather_single(result[:body], shard)
    return result.reshape(x.shape)


WHOLE_TENSORS_ROUND_THE_RING = """rank, total, travelling = dist.get_rank(), x.clone(), x.contiguous()
for _ in range(n - 1):
    received = torch.empty_like(travelling)
    requests = dist.isend(travelling, (rank + 1) % n), dist.irecv(received, (rank - 1) % n)
    for request in requests:
        request.wait()
    travelling = received
    total += travelling
return total"""
ALL_REDUCE_IN_TWO = {
    "library-all-reduce": {TWO: "dist.all_reduce(padded)"},
    "not-divisible": [
        without_padding,
        f"{CUT}  ->  return padded.reshape(x.shape) if x.numel() == len(padded) else padded",
    ],
    "shape": f"{CUT}  ->  return padded[: x.numel()].reshape(x.shape or (1,))",
    "view": "x.flatten()  ->  x.view(-1)",
    "tail": the_rest_is_left_out,
    "average": f"{SCATTER}  ->  {SCATTER}\nshard /= n",
    "value": f"{SCATTER}  ->  dist.reduce_scatter_single(shard, padded, op=dist.ReduceOp.MAX)",
    "whole-tensor": [
        {
            TWO: "parts = [torch.empty_like(padded) for _ in range(n)]\n"
            "dist.all_gather(parts, padded)\npadded = sum(parts)"
        },
        {TWO: WHOLE_TENSORS_ROUND_THE_RING},
    ],
    "hub": {TWO: "dist.reduce(padded, dst=0)\ndist.broadcast(padded, src=0)"},
    "other-calls": [
        f"{SCATTER}  ->  "
        "parts = torch.empty_like(padded)\ndist.all_to_all_single(parts, padded)\nshard = parts.view(n, -1).sum(0)",
        {TWO: f"dist.all_gather_single(padded.clone(), shard)\n{SCATTER}\n{GATHER}"},
        f"{GATHER}  ->  dist.group.WORLD.{BACKEND}.allgather([list(padded.split(shard_length))], [shard]).wait()",
    ],
    "padding": "-(-x.numel() // n)  ->  -(-x.numel() // n) + 1",
    "too-few-bytes": {
        TWO: f"dist.group.WORLD.{BACKEND}.allreduce([padded]).wait()\nzeros = padded.new_zeros(n)\n"
        "dist.reduce_scatter_single(shard[:1].clone(), zeros)\ndist.all_gather_single(zeros, zeros[:1].clone())"
    },
    "only-two-ranks": "n = dist.get_world_size()  ->  n = 2",
    "input-changed": f"{CUT}  ->  return x.copy_(padded[: x.numel()].reshape(x.shape)).clone()",
    "hang": hangs(f"{GATHER}  ->  if dist.get_rank():\n    {GATHER}"),
}
ALL_REDUCE_IN_TWO_RIGHT = {
    "lists of tensors": {
        SCATTER: "dist.reduce_scatter(shard, list(padded.split(shard_length)))",
        GATHER: "dist.all_gather(list(padded.split(shard_length)), shard)",
    },
    "functional collectives": {
        TWO: f"{FUNCTIONAL}\nshard = functional.reduce_scatter_tensor(padded, 'sum', 0, dist.group.WORLD)\n"
        "padded = functional.wait_tensor(functional.all_gather_tensor(shard, 0, dist.group.WORLD))"
    },
    "asynchronous, the shard a part of the result": {
        "shard = x.new_empty(shard_length)": "result = torch.empty_like(padded)\n"
        "shard = result[dist.get_rank() * shard_length :][:shard_length]",
        SCATTER: "dist.reduce_scatter_single(shard, padded, async_op=True).wait()",
        GATHER: "dist.all_gather_single(result, shard, async_op=True).wait()",
        CUT: CUT.replace("padded", "result"),
    },
    "in the order of memory": {
        "x.flatten()": "x.as_strided((x.numel(),), (1,))",
        CUT: "result = torch.empty_like(x)\n"
        "result.as_strided((x.numel(),), (1,)).copy_(padded[: x.numel()])\nreturn result",
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


RAGGED_ALL_GATHER = {
    "uneven": [
        f"{START}  ->  {START}\n"
        "parts = [torch.empty_like(x) for _ in range(n)]\ndist.all_gather(parts, x)\nreturn parts",
        f"{LONGEST}  ->  "
        "parts = [x.new_empty(length, d) for length in lengths.tolist()]\ndist.all_gather(parts, x)\nreturn parts",
    ],
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
RAGGED_ALL_GATHER_RIGHT = {
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

# ------------------------------------------------------------------------------------------------ sums on a mesh

MESH = 'mesh = init_device_mesh(block.device.type, (rows, cols), mesh_dim_names=("row", "col"))'
LOCAL = "block.sum(dim=1), block.sum(dim=0)"
ROW_SUMS = 'dist.all_reduce(row_sums, group=mesh.get_group("col"))'
COLUMN_SUMS = 'dist.all_reduce(column_sums, group=mesh.get_group("row"))'
BOTH_SUMS = f"{ROW_SUMS}\n    {COLUMN_SUMS}"
BOTH_RETURNED = "return row_sums, column_sums"
MY_PLACE = "row, col = divmod(dist.get_rank(), cols)\n"
IN_ANOTHER_ORDER = "if dist.get_rank() in (0, rows * cols - 1)"
ALONE = ", use_local_synchronization=True"
OWN_GROUPS = f"""{MY_PLACE}across = dist.new_group(range(row * cols, row * cols + cols){ALONE})
down = dist.new_group(range(col, rows * cols, cols){ALONE})"""
OWN_NAMES = {'mesh.get_group("col")': "across", 'mesh.get_group("row")': "down"}


def over_the_world(sums: str, place: str, places: str) -> str:
    table = f"table = {sums}.new_zeros({places}, len({sums}))\ntable[{place}] = {sums}\n"
    return f"{MY_PLACE}{table}dist.all_reduce(table)\n{sums} = table[{place}]"


ROW_AND_COLUMN_SUMS = {
    "axis": '("row", "col")  ->  ("col", "row")',
    "column-major": '(rows, cols), mesh_dim_names=("row", "col")  ->  (cols, rows), mesh_dim_names=("col", "row")',
    "two-columns": "(rows, cols), mesh  ->  (rows * cols // 2, 2), mesh",
    "whole-world": [
        {'mesh.get_group("col")': "None", 'mesh.get_group("row")': "None"},
        {
            ROW_SUMS: over_the_world("row_sums", "row", "rows"),
            COLUMN_SUMS: over_the_world("column_sums", "col", "cols"),
        },
    ],
    "dim": f"{LOCAL}  ->  block.sum(dim=0), block.sum(dim=1)",
    "swapped": f"{BOTH_RETURNED}  ->  return column_sums, row_sums",
    "gathers-everything": [
        f"{MESH}  ->  {MY_PLACE}parts = [torch.empty_like(block) for _ in range(rows * cols)]\n"
        "dist.all_gather(parts, block)\n"
        "return sum(b.sum(1) for b in parts[row * cols :][:cols]), sum(b.sum(0) for b in parts[col::cols])",
        f"{ROW_SUMS}  ->  first = dist.get_rank() // cols * cols\n"
        'dist.reduce(row_sums, dst=first, group=mesh.get_group("col"))\n'
        'dist.broadcast(row_sums, src=first, group=mesh.get_group("col"))',
    ],
    "too-many-calls": "dist.all_reduce(row_sums,  ->  for row_sum in row_sums:\n    dist.all_reduce(row_sum,",
    "block-sent": [
        {LOCAL: "block.clone(), block.clone()", BOTH_RETURNED: "return row_sums.sum(1), column_sums.sum(0)"},
        f"{LOCAL}  ->  block.double().sum(dim=1), block.double().sum(dim=0)",
    ],
    "too-few-bytes": f'{ROW_SUMS}  ->  mesh.get_group("col").{BACKEND}.allreduce([row_sums]).wait()',
    "not-distributed": {BOTH_SUMS: "pass"},
    "hang": [
        hangs(f"{COLUMN_SUMS}  ->  if dist.get_rank() < cols:\n    {COLUMN_SUMS}"),
        hangs({BOTH_SUMS: f"{IN_ANOTHER_ORDER}:\n    {BOTH_SUMS}\nelse:\n    {COLUMN_SUMS}\n    {ROW_SUMS}"}),
        hangs({MESH: OWN_GROUPS.replace(ALONE, ""), **OWN_NAMES}),
    ],
}
EVERY_GROUP = f"""{MY_PLACE}across = [dist.new_group(range(r * cols, r * cols + cols)) for r in range(rows)][row]
down = [dist.new_group(range(c, rows * cols, cols)) for c in range(cols)][col]"""
ENUMERATED = """ranks = torch.arange(rows * cols).view(rows, cols)
across, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
down, _ = dist.new_subgroups_by_enumeration(ranks.t().tolist())"""
ROW_AND_COLUMN_SUMS_RIGHT = {
    "every group by hand": {MESH: EVERY_GROUP, **OWN_NAMES},
    "own groups with local synchronization": {MESH: OWN_GROUPS, **OWN_NAMES},
    "enumerated subgroups, sums by NumPy, a list": {
        MESH: ENUMERATED,
        **OWN_NAMES,
        LOCAL: "torch.from_numpy(block.numpy().sum(1)), torch.from_numpy(block.numpy().sum(0))",
        BOTH_RETURNED: "return [row_sums, column_sums]",
    },
    "functional collectives": {
        BOTH_SUMS: f"{FUNCTIONAL}\nrow_sums = functional.all_reduce(row_sums, 'sum', (mesh, 1))\n"
        "column_sums = functional.all_reduce(column_sums, 'sum', (mesh, 0))\n"
        "row_sums, column_sums = map(functional.wait_tensor, (row_sums, column_sums))"
    },
    "distributed tensors": {
        BOTH_SUMS: "from torch.distributed.tensor import DTensor, Partial, Replicate\n\n"
        "row_sums, column_sums = (\n"
        "    DTensor.from_local(sums, mesh[dim], [Partial()]).redistribute(placements=[Replicate()]).to_local()\n"
        "    for sums, dim in ((row_sums, 'col'), (column_sums, 'row'))\n)"
    },
}

# ------------------------------------------------------------------------------------------------ tree broadcast

PLACES = "rank, n = dist.get_rank(), dist.get_world_size()"
SENDS, RECEIVES = "if place < have and place + have < n:", "elif have <= place < 2 * have:"
OUT, IN = "dist.send(x, dst=(place + have + root) % n)", "dist.recv(x, src=(place - have + root) % n)"
TREE = f"""while have < n:
        {SENDS}
            {OUT}
        {RECEIVES}
            {IN}
        have *= 2"""
HALVES = "for half in x.chunk(2) if x.dim() else [x]:\n    "


def nearest_child_first(x, root):
    rank, n = dist.get_rank(), dist.get_world_size()
    place = (rank - root) % n
    low = place & -place if place else 1 << (n - 1).bit_length()
    if place:
        dist.recv(x, (place - low + root) % n)
    distance = 1
    while distance < low:
        if place + distance < n:
            dist.send(x, (place + distance + root) % n)
        distance *= 2


def shaped_like_a_heap(x, root):
    rank, n = dist.get_rank(), dist.get_world_size()
    place = (rank - root) % n
    if place:
        dist.recv(x, ((place - 1) // 2 + root) % n)
    for child in (2 * place + 1, 2 * place + 2):
        if child < n:
            dist.send(x, (child + root) % n)


TREE_BROADCAST = {
    "library-broadcast": {TREE: "dist.broadcast(x, src=root)"},
    "collective": {
        TREE: "parts = [torch.empty_like(x) for _ in range(n)]\ndist.all_gather(parts, x)\nx.copy_(parts[root])"
    },
    "hub": [
        {SENDS: "if place == 0:", RECEIVES: "elif place == have:", "have *= 2": "have += 1"},
        {
            TREE: "if rank != root:\n    return dist.recv(x, root)\n"
            "for request in [dist.isend(x, r) for r in range(n) if r != root]:\n    request.wait()"
        },
    ],
    "chain": {TREE: "if place:\n    dist.recv(x, (rank - 1) % n)\nif place < n - 1:\n    dist.send(x, (rank + 1) % n)"},
    "small-subtree-first": [nearest_child_first, shaped_like_a_heap],
    "root": [
        "place = (rank - root) % n  ->  place, root = rank, 0",
        {"(place + have + root) % n": "place + have", "(place - have + root) % n": "place - have"},
        {
            "place = (rank - root) % n": "place = rank ^ root",
            "(place + have + root) % n": "(place + have) ^ root",
            "(place - have + root) % n": "(place - have) ^ root",
        },
    ],
    "power-of-two": hangs({SENDS: "if place < have:"}),
    "only-two-ranks": hangs(
        {SENDS: "if place == 0:", RECEIVES: "elif have <= place:", "while have < n": "while have < 2"}
    ),
    "sends-too-early": [
        {"have = 1 ": "have = n // 2 ", TREE: TREE.replace("while have < n:", "if n > 1:")},
        {
            "have = 1 ": "have = 1 << (n - 1).bit_length() >> 1 ",
            TREE: TREE.replace("while have < n:", "while have:").replace("have *= 2", "have //= 2"),
        },
    ],
    "hang": hangs("while have < n:  ->  if n > 1 and rank == root:\n    dist.recv(x, (rank + 1) % n)\nwhile have < n:"),
    "too-many-messages": [
        {OUT: f"{OUT}\n{OUT}", IN: f"{IN}\n{IN}"},
        {OUT: HALVES + OUT.replace("(x", "(half"), IN: HALVES + IN.replace("(x", "(half")},
    ],
    "too-many-bytes": {
        OUT: OUT.replace("(x", "(torch.stack([x, x])"),
        IN: f"both = torch.stack([x, x])\n{IN.replace('(x', '(both')}\nx.copy_(both[0])",
    },
    "not-in-place": {PLACES: f"{PLACES}\nx = x.clone()", TREE: f"{TREE}\nreturn x"},
    "not-distributed": {TREE: "pass"},
    "any-tensor": {IN: f"received = torch.empty(x.shape)\n{IN.replace('(x', '(received')}\nx.copy_(received)"},
}


def halves_of_a_range(x, root):
    rank, n = dist.get_rank(), dist.get_world_size()
    place, first, last, requests = (rank - root) % n, 0, n, []
    while last - first > 1:
        middle = (first + last + 1) // 2
        if place == first:
            requests.append(dist.isend(x, (middle + root) % n))
        elif place == middle:
            dist.recv(x, (first + root) % n)
        first, last = (first, middle) if place < middle else (middle, last)
    for request in requests:
        request.wait()


def by_the_lowest_bit(x, root):
    rank, n = dist.get_rank(), dist.get_world_size()
    place = (rank - root) % n
    distance = place & -place if place else 1 << n.bit_length()
    if place:
        dist.recv(x)  # from whoever sends
    while distance := distance // 2:
        if place + distance < n:
            (request,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, (place + distance + root) % n)])
            request.wait()


TREE_BROADCAST_RIGHT = {
    "halves of a range": halves_of_a_range,
    "by the lowest bit, from any source": by_the_lowest_bit,
    "rank 0 and root exchange places": {
        "place = (rank - root) % n": "at = list(range(n))\nat[0], at[root] = root, 0\nplace = at[rank]",
        "(place + have + root) % n": "at[place + have]",
        "(place - have + root) % n": "at[place - have]",
    },
}

# ------------------------------------------------------------------------------------------------ two levels

INSIDE = "dist.reduce_scatter_single(shard, x, group=inside)"
ACROSS = "dist.all_reduce(shard, group=across)"
BACK = "dist.all_gather_single(result, shard, group=inside)"
BOTH_GROUPS = 'inside, across = mesh.get_group("local"), mesh.get_group("node")'
THREE = f"{INSIDE}\n    {ACROSS}\n    {BACK}"


def through_leaders(local: str) -> dict[str, str]:
    return {
        THREE: f"result.copy_(x)\nleader = dist.get_rank() // per_node * per_node + {local}\n"
        "dist.reduce(result, dst=leader, group=inside)\nif dist.get_rank() == leader:\n"
        "    dist.all_reduce(result, group=across)\ndist.broadcast(result, src=leader, group=inside)"
    }


TWO_LEVEL_ALL_REDUCE = {
    "flat": {THREE: "result.copy_(x)\ndist.all_reduce(result)"},
    "whole-tensor-across": [
        {THREE: "result.copy_(x)\ndist.all_reduce(result, group=inside)\ndist.all_reduce(result, group=across)"},
        f"{ACROSS}  ->  parts = [torch.empty_like(shard) for _ in range(nodes)]\n"
        "dist.all_gather(parts, shard, group=across)\nshard = sum(parts)",
    ],
    "leaders": [through_leaders("0"), through_leaders("per_node - 1")],
    "axis": {'("node", "local")': '("local", "node")', "// per_node)": "// nodes)"},
    "one-level": f"{ACROSS}  ->  pass",
    "counted-twice": {THREE: "result.copy_(x)\ndist.all_reduce(result, group=inside)\ndist.all_reduce(result)"},
    "too-many-bytes": [
        f"{INSIDE}  ->  result.copy_(x)\ndist.all_reduce(result, group=inside)\n"
        "shard = result.chunk(per_node)[dist.get_rank() % per_node].clone()",
        f"{INSIDE}  ->  first = dist.get_rank() // per_node * per_node\n"
        "pieces = [piece.clone() for piece in x.chunk(per_node)]\nfor i, piece in enumerate(pieces):\n"
        "    dist.reduce(piece, dst=first + i, group=inside)\nshard = pieces[dist.get_rank() - first]",
    ],
    "too-few-bytes": f"{ACROSS}  ->  across.{BACKEND}.allreduce([shard]).wait()",
    "uneven": f"{ACROSS}  ->  piece = shard.new_empty(len(shard) // nodes)\n"
    "dist.reduce_scatter_single(piece, shard, group=across)\ndist.all_gather_single(shard, piece, group=across)",
    "input-changed": "torch.empty_like(x)  ->  x",
    "not-distributed": {THREE: "result.copy_(x)"},
    "hang": hangs(f"{ACROSS}  ->  if dist.get_rank() < per_node:\n    {ACROSS}"),
}
TWO_LEVEL_ALL_REDUCE_RIGHT = {
    "all-to-all and a sum, lists of tensors": {
        INSIDE: "parts = torch.empty_like(x)\ndist.all_to_all_single(parts, x, group=inside)\n"
        "shard = parts.view(per_node, -1).sum(0)",
        BACK: "dist.all_gather(list(result.chunk(per_node)), shard, group=inside)",
    },
    "functional collectives": {
        THREE: f"{FUNCTIONAL}\nshard = functional.reduce_scatter_tensor(x, 'sum', 0, inside)\n"
        "shard = functional.all_reduce(shard, 'sum', across)\n"
        "result = functional.wait_tensor(functional.all_gather_tensor(shard, 0, inside))"
    },
    "own groups with local synchronization, asynchronous": {
        BOTH_GROUPS: "node, local = divmod(dist.get_rank(), per_node)\n"
        "inside = dist.new_group(range(node * per_node, (node + 1) * per_node), use_local_synchronization=True)\n"
        "across = dist.new_group(range(local, nodes * per_node, per_node), use_local_synchronization=True)",
        ACROSS: "dist.all_reduce(shard, group=across, async_op=True).wait()",
    },
    "the shard padded and reduced in two": f"{ACROSS}  ->  "
    "padded = torch.cat([shard, shard.new_zeros(-len(shard) % nodes)])\n"
    "piece = padded.new_empty(len(padded) // nodes)\n"
    "dist.reduce_scatter_single(piece, padded, group=across)\ndist.all_gather_single(padded, piece, group=across)\n"
    "shard.copy_(padded[: len(shard)])",
}

# ------------------------------------------------------------------------------------------------ problems on paper


def with_fractions(parameters, bytes_per_parameter, ranks, link_gigabits):
    from fractions import Fraction

    return Fraction(2 * (ranks - 1), ranks) * Fraction(parameters) * bytes_per_parameter * 8 / link_gigabits / 10**9


SECONDS = "return sent / (link_gigabits * 1e9 / 8)"
BANDWIDTHS = "return algbw, algbw * factor"
PAPER = {
    "gradient_all_reduce_seconds": {
        "typed": f"{SECONDS}  ->  return 0.525",
        "number": f"{SECONDS}  ->  pass",
        "numbers": "link_gigabits * 1e9  ->  link_gigabits * 1e6",
    },
    "bandwidths": {"number": f"{BANDWIDTHS}  ->  return algbw * factor"},
}
PAPER_RIGHT = {
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
    "half_bandwidth_size": {
        "solved in another order": "return latency * peak_busbw * 1e9 / factor  ->  "
        "return 1 / (factor / (latency * peak_busbw * 1e9))",
        "a number of NumPy": "return latency  ->  import numpy as np\n\nreturn np.float64(latency)",
    },
}


class TestCollectives(ExerciseTests):
    checks = collectives
    WRONG = {
        "mean_and_variance": MEAN_AND_VARIANCE,
        "ring_shift": RING_SHIFT,
        "all_reduce_in_two": ALL_REDUCE_IN_TWO,
        "ragged_all_gather": RAGGED_ALL_GATHER,
        "row_and_column_sums": ROW_AND_COLUMN_SUMS,
        "tree_broadcast": TREE_BROADCAST,
        "two_level_all_reduce": TWO_LEVEL_ALL_REDUCE,
        **PAPER,
    }
    RIGHT = {
        "mean_and_variance": MEAN_AND_VARIANCE_RIGHT,
        "ring_shift": RING_SHIFT_RIGHT,
        "all_reduce_in_two": ALL_REDUCE_IN_TWO_RIGHT,
        "ragged_all_gather": RAGGED_ALL_GATHER_RIGHT,
        "row_and_column_sums": ROW_AND_COLUMN_SUMS_RIGHT,
        "tree_broadcast": TREE_BROADCAST_RIGHT,
        "two_level_all_reduce": TWO_LEVEL_ALL_REDUCE_RIGHT,
        **PAPER_RIGHT,
    }

    def test_refusal_names_exercise_ranks_and_both_values(self):
        text = str(self.refusal("all_reduce_in_two", self.wrong("all_reduce_in_two", "average")))
        assert text.startswith("Exercise 3, 2 ranks, x of shape (2, 3), rank 0: the result is wrong.")
        assert re.search(r"expected  shape \(2, 3\): [-\d.]+, .*\n  got       shape \(2, 3\): [-\d.]+, ", text)


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
