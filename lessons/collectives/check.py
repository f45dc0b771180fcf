"""The exercises on collectives: what each rank must find, and the usual mistakes with their hints."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_utils import record
from course_utils.check import Case, close, exercise, paper, values
from course_utils.costs import bytes_sent

from . import answers

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

WORLD_SIZES = (2, 3, 4, 1)


def kept(note, x: Tensor, before: Tensor) -> None:
    """The answer has left its input alone."""
    note.holds(close(x, before), "input-changed", "the result is right, but the input x was changed.")


# --- exercise 1: mean and variance


def shards(n: int, more: int, filled: int, shift: int) -> list[Tensor]:
    """Numbers of each rank: each has ``more`` times 3 more than the one before; only the first ``filled`` have any."""
    data = [shift + 2 + (1 + rank) * values(5 + more * (3 * rank - 1), seed=rank) for rank in range(n)]
    return [x if rank < filled else x[:0] for rank, x in enumerate(data)]


@exercise("Exercise 1", tolerance=1e-4, passed="1 all-reduce of 24 bytes.", cases=[
    case for n in WORLD_SIZES for case in (
        (n, "as many numbers on every rank", 0, n, 0),
        (n, "other counts on every rank", 1, n, 0),
        Case(n, "none on the last rank", (1, max(1, n - 1), 0), "empty-shard"),
        Case(n, "numbers near 3000", (1, n, 3000), "float32"),
    )
])
def mean_and_variance(note, answer, more, filled, shift):
    n, data = dist.get_world_size(), shards(dist.get_world_size(), more, filled, shift)
    everything, before = torch.cat(data).double(), data[dist.get_rank()]
    x = before.clone()
    with record() as ledger:
        got = answer(x)
    note.talks(ledger, n)
    if n > 1:
        note.sent(ledger, {"all_reduce"}, other_calls="hub")
    pair = isinstance(got, (tuple, list)) and len(got) == 2
    if not note.holds(pair, "odd", "expected a pair (mean, variance) of scalar tensors."):
        return
    mean, variance = [v.squeeze() if isinstance(v, Tensor) else v for v in got]
    note.equal(mean, everything.mean(), "the mean")
    note.equal(variance, everything.var(correction=0), "the variance")
    if shift:  # where sums in float32 have been told from right ones
        found = [getattr(v, "dtype", None) for v in (mean, variance)]
        note.holds(found == [torch.float64] * 2, "dtype", f"mean and variance are {found}; they should be float64.")
    if n > 1:
        sizes = bytes_sent("all_reduce", n, 3 * 4), bytes_sent("all_reduce", n, 3 * 8)
        note.sent(ledger, calls=1, sent=sizes, too_many_calls="two-all-reduces")
    kept(note, x, before)


SUMS = "torch.stack([x.new_tensor(x.numel()), x.sum(), (x * x).sum()])"
REDUCE = "dist.all_reduce(sums)"
VARIANCE = "squares / count - mean**2"

MISTAKES["mean_and_variance"] = {
    "empty-shard": ("A rank may hold no numbers at all. The mean of nothing is nan, the sum of nothing is 0.",
            "x.sum(),  ->  x.mean() * len(x),"),
    "hub": ("""One call without a root is enough, because some quantities can be added on the way. An all-gather brings
        all numbers to every rank, and calls with a root make the link of one rank the bottleneck.""",
            [f"{REDUCE}  ->  parts = [torch.empty_like(sums) for _ in range(dist.get_world_size())]\n"
            "dist.all_gather(parts, sums)\nsums = sum(parts)",
             f"{REDUCE}  ->  dist.reduce(sums, dst=0)\ndist.broadcast(sums, src=0)"]),
    "two-all-reduces": ("What the later calls add up could have travelled with the first.",
            {SUMS: "torch.stack([x.new_tensor(x.numel()), x.sum()])", "total, squares = sums": "total = sums",
             f"return mean, {VARIANCE}": "squares = ((x - mean) ** 2).sum()\ndist.all_reduce(squares)\n"
             "return mean, squares / count"}),
    "average-of-variances": ("The average of the ranks' variances leaves out how far apart their means are.",
            [{"(x * x).sum()": f"x.var(correction={c})", VARIANCE: "squares / dist.get_world_size()"} for c in (0, 1)]
            + [{"(x * x).sum()": "len(x) * x.var(correction=0)", VARIANCE: "squares / count"}]),
    "mean-of-means": ("The ranks hold different numbers of elements, so their means should not count equally.",
            f"{SUMS}  ->  torch.stack([x.new_tensor(1), x.mean(), (x * x).mean()])"),
    "not-divided": ("This is the sum over all ranks, not yet the mean.", "return mean,  ->  return total,"),
    "unbiased": ("The docstring asks for the variance of all numbers divided by their count, not by count - 1.",
            f"{VARIANCE}  ->  ({VARIANCE}) * count / (count - 1)"),
    "float32": ("It is right for small numbers and wrong near 3000, where x² needs more digits than float32 has.",
            "x = x.double()  ->  pass"),
}
RIGHT["mean_and_variance"] = {
    "shifted by a constant": {
        "x = x.double()": "x = x.double() - 3000", f"mean, {VARIANCE}": f"mean + 3000, {VARIANCE}",
    },
    "three scalars in one coalesced call": {
        SUMS: "[x.new_tensor(x.numel()), x.sum(), (x * x).sum()]",
        REDUCE: "with dist.distributed_c10d._coalescing_manager():\n    for one in sums:\n        dist.all_reduce(one)",
    },
}

# --- exercise 2: a ring shift

TENSORS = {  # how to make one of a seed; what works for the first may fail for the others
    "float32 of shape (6, 2)": lambda seed: values(6, 2, seed=seed),
    "int32 of shape (2, 3, 2)": lambda seed: (1e8 * values(2, 3, 2, seed=seed)).int(),
    "float64 of shape ()": lambda seed: values(seed=seed).double(),
}


def shift_case(n: int, kind: str, by: int) -> Case:
    name = f"x {kind}, shifted by {by}"
    if by % n == 0:
        return Case(n, name, (kind, by), "alone", "rank|connect")
    return Case(n, name, (kind, by), "any-tensor" if n == 2 and by > 1 else None, "unpack|dim|dtype")


@exercise("Exercise 2", passed="1 message out and 1 in on every rank.", cases=[
    shift_case(n, kind, by) for n in WORLD_SIZES
    for kind, by in zip([*TENSORS, "float32 of shape (6, 2)"], (1, 3, 5, 2), strict=True)
])
def ring_shift(note, answer, kind, by):
    rank, n = dist.get_rank(), dist.get_world_size()
    alone = by % n == 0  # the way leads back to the rank itself
    x, before, right = (TENSORS[kind](10 + r) for r in (rank, rank, (rank - by) % n))
    with record() as ledger:
        got = answer(x, by)
    note.talks(ledger, 1 if alone else n)
    if not alone:
        note.sent(ledger, {"send", "recv"}, other_calls="collective", object="too-many-calls")
    note.equal(got, right, "the result")
    dtype = getattr(got, "dtype", None)
    note.holds(dtype == x.dtype, "dtype", f"the result is {dtype}; the docstring promises {x.dtype}.")
    if not alone:
        size = before.nbytes
        note.sent(ledger, calls={"send": (1, 1), "recv": (1, 1)}, sent=(size, size), object="too-many-calls")
    kept(note, x, before)


RECEIVED = "received = torch.empty_like(x)"
SHIFT = """send = dist.P2POp(dist.isend, x, (rank + by) % n)
    receive = dist.P2POp(dist.irecv, received, (rank - by) % n)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()"""
SEND, RECV = "dist.send(x, (rank + by) % n)", "dist.recv(received, (rank - by) % n)"


def taking_turns(receives_first: str) -> dict[str, str]:
    return {SHIFT: f"if {receives_first}:\n    {RECV}\n    {SEND}\nelse:\n    {SEND}\n    {RECV}"}


MISTAKES["ring_shift"] = {
    "collective": ("Build the shift from messages alone: one from each rank to its right neighbour, and no collective.",
            {SHIFT: "parts = [torch.empty_like(x) for _ in range(n)]\ndist.all_gather(parts, x)\n"
             "received = parts[(rank - by) % n]"}),
    "direction": ("This is the tensor of another rank. Rank r sends to r + by and receives from r - by.",
            {"isend, x, (rank + by)": "isend, x, (rank - by)", "received, (rank - by)": "received, (rank + by)"}),
    "alone": ("Here the way round the ring leads back to the rank itself, and a rank cannot send to itself.",
            "if by % n == 0  ->  if n == 1"),
    "any-tensor": ("""It passed with a table of float32 numbers. Here x has another shape and another dtype, and
        whatever a rank receives into must have both.""", [f"{RECEIVED}  ->  received = torch.empty(x.shape)",
             f"{RECEIVED}  ->  a, b = x.shape\nreceived = x.new_empty(a, b)"]),
    "value": ("Does the receive write into a tensor of its own, and has it finished before you return that tensor?",
            "return received  ->  return torch.zeros_like(x)"),
    "hang": ("""With gloo a send returns only once the other side receives. Follow one pair of ranks in the report
        below: which of the two receives first?""", [{SHIFT: f"{SEND}\n{RECV}"}, taking_turns("rank % 2")]),
    "unwaited": ("A rank returns while one of its own messages is still under way.",
            {SHIFT: "dist.isend(x, (rank + by) % n)\nif rank == 1:\n    __import__('time').sleep(0.3)\n" + RECV}),
}
RIGHT["ring_shift"] = {
    "isend, recv, wait": {SHIFT: f"request = dist.isend(x, (rank + by) % n)\n{RECV}\nrequest.wait()"},
    "whoever sends to a lower rank receives first": taking_turns("(rank + by) % n < rank"),
}

# --- exercise 3: an all-gather of other numbers of rows


def row_cases(n: int) -> list[Case]:
    """Rows of each rank, columns, and whether a row of zeros and one of nan are among them."""
    uneven = [(3 * rank + 1) % 8 for rank in range(n)]
    return [
        Case(n, f"{name} ({', '.join(map(str, rows))})", (rows, columns, odd), hint if n == 2 else None)
        for name, rows, columns, odd, hint in (
            ("as many rows on every rank", [3] * n, 2, False, None),
            ("other numbers of rows", uneven, 3, False, "uneven"),
            ("rank 0 without rows", [0, *range(4, 4 - n + 1, -1)], 3, False, "uneven"),
            ("no rows anywhere", [0] * n, 1, False, None),
            ("a last row of zeros, one of nan", uneven, 2, True, "padding-guessed"),
            ("many rows", [300, *uneven[1:]], 1, False, "many-rows"),
        )
    ]


@exercise("Exercise 3", passed="2 collectives, the second no larger than N times the longest.",
          cases=[case for n in WORLD_SIZES for case in row_cases(n)])
def ragged_all_gather(note, answer, rows, columns, odd):
    rank, n = dist.get_rank(), dist.get_world_size()
    data = [values(length, columns, seed=60 + r) for r, length in enumerate(rows)]
    if odd:
        data[0][-1], data[-1][-1] = 0, torch.nan
    x = data[rank].clone()
    with record() as ledger:
        got = answer(x)
    note.talks(ledger, n)
    parts = isinstance(got, (list, tuple)) and len(got) == n and all(isinstance(part, Tensor) for part in got)
    if not note.holds(parts, "odd", f"expected a list of {n} tensors, one per rank in the order of the ranks."):
        return
    found = [len(part) if part.dim() else -1 for part in got]
    padded = min(found) >= max(rows) and max(found) > min(rows)
    key = "padding-left" if padded else "own-length" if set(found) == {rows[rank]} else "shape"
    if not note.holds(found == rows, key, f"the parts have {found} rows, expected {rows}.", ("rows", found)):
        return
    for i, part in enumerate(got):
        elsewhere = any(close(part, other) for other in data if len(other))
        note.equal(part, data[i], f"part {i}", "rank-order" if elsewhere else "value")
    if n > 1:
        longest = max(t.nbytes for t in data)
        pickles = any(entry.dtype == "uint8" for entry in ledger)
        most = bytes_sent("all_reduce", n, 8 * n) + bytes_sent("all_gather", n, n * longest)
        note.sent(
            ledger, {"all_gather", "all_to_all", "all_reduce"}, calls=2, carried=8 * n + n * longest,
            sent=((n - 1) * data[rank].nbytes, most), other_calls="more-than-two", too_many_calls="more-than-two",
            too_many_bytes="object" if pickles else "too-many-bytes",
        )
    kept(note, x, data[rank])


START = "n, (rows, d) = dist.get_world_size(), x.shape"
LENGTHS = "dist.all_gather_single(lengths, torch.tensor([rows], device=x.device))"
LONGEST = "longest = int(lengths.max())"
ROWS = "dist.all_gather_single(gathered, padded)"
CUT_ROWS = "return [part[:length] for part, length in zip(parts, lengths.tolist(), strict=True)]"
UNPADDED = """rank, sizes = dist.get_rank(), lengths.tolist()
everything = x.new_empty(sum(sizes), d)
parts = list(everything.split(sizes))
parts[rank].copy_(x)
others = [r for r in range(n) if r != rank]
"""

MISTAKES["ragged_all_gather"] = {
    "padding-left": ("The padding has not been cut off.", f"{CUT_ROWS}  ->  return list(parts)"),
    "own-length": ("Every part has as many rows as this rank holds; part i should have as many as rank i.",
            "part[:length]  ->  part[:rows]"),
    "rank-order": ("This part belongs to another rank: part i has to come from rank i, on every rank.",
            {"return [part": "rank = dist.get_rank()\nparts = [part",
             "strict=True)]": "strict=True)]\nreturn [*parts[rank:], *parts[:rank]]"}),
    "object": ("""Calls for objects turn tensors into pickles. That takes more bytes and, on GPUs, a detour through the
        CPU.""",
            f"{START}  ->  parts = [None] * dist.get_world_size()\ndist.all_gather_object(parts, x)\n"
            f"return parts\n{START}"),
    "more-than-two": ("""One collective for the lengths and one for the rows are enough. Each further call or message
        pays a latency, and collecting everything on one rank makes its link the bottleneck.""",
            [f"{LONGEST}  ->  {UNPADDED}for source, part in enumerate(parts):\n"
            "    dist.broadcast(part, src=source)\nreturn parts",
             f"{LONGEST}  ->  {UNPADDED}for request in [dist.isend(x, r) for r in others] + "
             "[dist.irecv(parts[r], r) for r in others]:\n    request.wait()\nreturn parts",
             f"{LONGEST}  ->  longest = torch.tensor(rows)\ndist.all_reduce(longest, op=dist.ReduceOp.MAX)"]),
    "uneven": ("Some ranks hold fewer rows here than others, or none at all. gloo's all_gather wants equal shapes.",
            f"{START}  ->  {START}\nparts = [torch.empty_like(x) for _ in range(n)]\ndist.all_gather(parts, x)\n"
            "return parts"),
    "padding-guessed": ("""A row may hold any numbers, even zeros or nan. Nothing in a row tells whether it is padding;
        only the number of rows does.""", [f"{CUT_ROWS}  ->  return [part[part.any(dim=1)] for part in parts]",
             {"x.new_zeros(longest, d)": "x.new_full((longest, d), torch.nan)",
              CUT_ROWS: "return [part[~part.isnan().any(dim=1)] for part in parts]"}]),
    "many-rows": ("""It is right for a few rows. Does the dtype in which you keep the numbers of rows have room for
        every one of them?""", {"torch.int64": "torch.uint8", "([rows], device=x.device)": "([rows]).to(torch.uint8)"}),
}
RIGHT["ragged_all_gather"] = {
    "rows by an all-to-all of uneven parts": f"{LONGEST}  ->  {UNPADDED}"
        "dist.all_to_all_single(everything, x.repeat(n, 1), sizes, [rows] * n)\nreturn parts",
    "lists of tensors": {
        LENGTHS: "dist.all_gather(list(lengths.split(1)), torch.tensor([rows]))",
        ROWS: "dist.all_gather(list(gathered.view(n, longest, d)), padded)",
        CUT_ROWS: "return tuple(part[:length].clone() for part, length in zip(parts, lengths.tolist(), strict=True))",
    },
}

# --- on paper

MISTAKES["gradient_all_reduce_seconds"] = {
    "gigabits": ("Gb stands for gigabits, GB for gigabytes.", ["1e9 / 8  ->  1e9", "1e9 / 8  ->  1e9 * 8"]),
    "gibi": ("Link speeds count in powers of ten: 1 Gb = 10⁹ bits.", "1e9  ->  2**30"),
    "no-factor": ("""In a ring each rank sends more than S, and a little less than 2·S, which is the limit of very many
        ranks: how much?""", [f"2 * (ranks - 1) / ranks  ->  {factor}" for factor in (1, 2)]),
    "half": ("That is the reduce-scatter alone. The all-gather takes as long again.",
            "2 * (ranks - 1) / ranks  ->  (ranks - 1) / ranks"),
    "whole-tensor": ("In a ring only shards travel, 1/N of the tensor in each of the 2(N-1) steps.",
            ["2 * (ranks - 1) / ranks  ->  (ranks - 1)", "(ranks - 1) / ranks  ->  (ranks - 1)"]),
}
MISTAKES["bandwidths"] = {
    "gigabits": ("GB/s count bytes, and these numbers count bits.", "1e9  ->  (1e9 / 8)"),
    "gibi": ("In the bandwidths of nccl-tests a GB is 10⁹ bytes, although the sizes are powers of two.",
            "1e9  ->  2**30"),
    "bytes-per-second": ("The docstring asks for GB/s.", "1e9  ->  1"),
    "swapped": ("The algorithm bandwidth S/t comes first, the bus bandwidth second.",
            "algbw, algbw * factor  ->  algbw * factor, algbw"),
    "divided": ("For an all-reduce of 8 ranks, the bus bandwidth is the larger of the two.",
            "algbw * factor  ->  algbw / factor"),
    "one-factor": ("""2(N-1)/N belongs to the all-reduce, (N-1)/N to all-gather, reduce-scatter and all-to-all. Not
        every collective is of one kind.""",
            ["get(op, share)  ->  get('all_reduce')", "get(op, share)  ->  get('all_gather', share)"]),
    "no-factor": ("The bus bandwidth corrects S/t by the bytes that a rank really has to send.",
            "get(op, share)  ->  get('broadcast')"),
}
MISTAKES["all_gather_seconds"] = {
    "directions": ("""The figure on the data sheet adds up both directions. What a rank receives comes in through one of
        them.""", "both_directions / 2  ->  both_directions"),
    "shard": ("The argument shard is what one rank holds. S, the size of the whole output, is N times that.",
            ["(ranks - 1)  ->  (ranks - 1) / ranks",
             {"(ranks - 1)": "(ranks - 1) / ranks", "both_directions / 2": "both_directions"}]),
    "own-shard": ("A rank already has its own shard.", "(ranks - 1)  ->  ranks"),
    "all-reduce": ("2(N-1)/N belongs to the all-reduce. An all-gather is its second half.",
            "(ranks - 1)  ->  2 * (ranks - 1)"),
    "bits": ("NVLink's figure is already in bytes.", "both_directions / 2  ->  both_directions / 2 / 8"),
}


def with_fractions(parameters, bytes_per_parameter, ranks, link_gigabits):
    return Fraction(2 * (ranks - 1), ranks) * Fraction(parameters) * bytes_per_parameter * 8 / link_gigabits / 10**9


RIGHT["gradient_all_reduce_seconds"] = {
    "fractions": with_fractions,
    "step by step": "2 * (ranks - 1) / ranks * size  ->  sum(size / ranks for _ in range(2 * ranks - 2))",
}
RIGHT["bandwidths"] = {
    "a list": "algbw, algbw * factor  ->  [algbw, algbw * factor]",
    "a tensor": "return algbw, algbw * factor  ->  return torch.tensor([algbw, algbw * factor])",
}
RIGHT["all_gather_seconds"] = {
    "from the whole output": "(ranks - 1) * shard  ->  (ranks - 1) / ranks * (ranks * shard)",
    "a tensor without dimensions": "return received  ->  return torch.tensor(received)",
}

gradient_all_reduce_seconds = paper(
    "Exercise 4", answers.gradient_all_reduce_seconds, MISTAKES["gradient_all_reduce_seconds"],
    cases=[(7e9, 2, 16, 400), (70e9, 2, 64, 800), (1e9, 4, 2, 100)], units=["s"],
)
bandwidths = paper(
    "Exercise 5", answers.bandwidths, MISTAKES["bandwidths"], units=["GB/s algbw", "GB/s busbw"], cases=[
        ("all_reduce", 8, 2**30, 8203.9e-6), ("all_reduce", 2, 2**20, 1e-4), ("all_gather", 4, 2**24, 1e-3),
        ("reduce_scatter", 8, 2**24, 1e-3), ("all_to_all", 3, 2**24, 1e-3), ("broadcast", 8, 2**24, 1e-3),
        ("reduce", 4, 2**24, 1e-3),
    ],
)
all_gather_seconds = paper(
    "Exercise 6", answers.all_gather_seconds, MISTAKES["all_gather_seconds"],
    cases=[(2e9, 8, 900), (1e9, 4, 600), (5e8, 16, 1800)], units=["s"],
)
