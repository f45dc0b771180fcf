"""Checks of the exercises on collectives.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ..costs import busbw_factor, bytes_sent
from . import TIMEOUT, Exercise, Outcome, checked, message_steps, paper_problem, values

__all__ = [
    "HINTS", "all_gather_seconds", "all_reduce_in_two", "bandwidths", "gradient_all_reduce_seconds",
    "half_bandwidth_size", "mean_and_variance", "ragged_all_gather", "ring_shift", "row_and_column_sums",
    "tree_broadcast", "two_level_all_reduce",
]  # fmt: skip

HINTS: dict[str, dict[str, str]] = {
    "mean_and_variance": {
        "gathers-everything": "Every rank receives all the data and then works alone. Three sums describe it as well: "
        "count, sum of x, sum of x².",
        "hub": "Everything passes through one rank, which becomes the bottleneck; and two collectives do the work of "
        "one.",
        "two-all-reduces": "Sums that do not need each other fit into one tensor. Which sums give the variance and "
        "need no mean before?",
        "average-of-variances": "The average of the ranks' variances leaves out how far their means lie apart. Sum x "
        "and x² over all ranks, and compute the variance from those sums.",
        "mean-of-means": "Ranks hold different numbers of elements, so they do not weigh the same. Sum the counts as "
        "well.",
        "not-divided": "all_reduce sums; dividing by the number of elements on all ranks is left to you.",
        "unbiased": "The docstring asks for the variance of all numbers divided by their count, not by count - 1.",
        "empty-shard": "A rank may hold no numbers at all. The mean of nothing is nan, the sum of nothing is 0.",
        "float32": "Right for small numbers, wrong near 3000: x² then needs more digits than float32 has. Convert x "
        "to float64 before you square it.",
        "too-many-bytes": "Three float64 numbers are 24 bytes. What else is in the tensor you reduce?",
    },
    "ring_shift": {
        "hang": "With gloo a send returns only once the other side receives. Follow one pair in the table: who of the "
        "two receives first? Start send and receive together with batch_isend_irecv, or let one of each pair receive "
        "first.",
        "unwaited": "A rank returns while a message of its own is still under way. Wait for every request before you "
        "return.",
        "collective": "A shift needs one message out and one in on each rank; a collective moves more. Use send and "
        "recv, or isend and irecv.",
        "direction": "This is the tensor of the right neighbour. Rank r sends to r + 1 and receives from r - 1.",
        "value": "Is the receive into a tensor of its own, and do you wait for it before you return it?",
    },
    "all_reduce_in_two": {
        "library-all-reduce": "dist.all_reduce is what you are to build. Use reduce_scatter_single and "
        "all_gather_single.",
        "not-divisible": "Right while N divides the number of elements. Pad the flat tensor with zeros up to the next "
        "multiple of N, and cut the result back.",
        "tail": "The last elements, those beyond the largest multiple of N, were not summed. Pad up, do not cut down.",
        "average": "all_reduce sums by default. Do not divide by N.",
        "whole-tensor": "A rank sends its whole tensor to every other, N - 1 times the tensor in all. After a "
        "reduce-scatter each rank has one finished shard; only shards need to travel.",
        "hub": "One rank collects and hands out everything: it alone moves (N - 1)·S each way. Let every rank finish "
        "one shard.",
        "other-calls": "One reduce-scatter and one all-gather are enough, and nothing else.",
        "padding": "Pad to the next multiple of N only: fewer than N extra elements.",
    },
    "ragged_all_gather": {
        "hang": "If every rank first sends to all others and receives afterwards, nobody receives. Collectives need "
        "no such order.",
        "uneven": "Right while all ranks hold as many rows. gloo's all_gather wants equal shapes: exchange the "
        "lengths first, then pad to the longest.",
        "not-a-list": "Return a list with one tensor per rank, in the order of the ranks.",
        "padding-left": "The padding is still there. Cut part i back to the length that rank i told you.",
        "own-length": "Every part was cut to this rank's own length. Cut part i to the length of rank i.",
        "rank-order": "The parts are all there, but part i has to come from rank i on every rank.",
        "hub": "Everything passes through rank 0. An all-gather lets all links work at once.",
        "one-call-per-rank": "N broadcasts wait for each other: N times the latency. Pad, and one all-gather does it.",
        "messages": "Each rank sends its rows N - 1 times in messages of its own. Two collectives do it.",
        "object": "all_gather_object turns tensors into pickles: more bytes, a copy through the CPU, and no GPU path. "
        "Gather the lengths as a tensor of integers.",
        "more-than-two": "One collective for the lengths, one for the rows. Lengths from all ranks also tell the "
        "maximum.",
        "too-many-bytes": "Pad to the longest tensor that there is, not to a size that is always enough.",
    },
    "row_and_column_sums": {
        "axis": "Rows and columns of the mesh are exchanged. Row sums add blocks that lie side by side: ranks of the "
        "same mesh row, which differ in their column. In a DeviceMesh with dimensions (row, col) that is "
        "get_group('col').",
        "column-major": "The ranks are numbered row by row: rank = row · cols + column.",
        "two-columns": "Right for a mesh with 2 columns only. Use cols.",
        "whole-world": "The sum goes over all ranks. Each of the two sums needs a group of its own.",
        "dim": "sum(dim=0) adds up the rows of a block and leaves one number per column. Row sums are sum(dim=1).",
        "swapped": "Both are right, but in the other order: row sums come first.",
        "gathers-everything": "Two all-reduces are enough; no rank needs to see another's block.",
        "block-sent": "Sum inside the block first: then m + n numbers travel instead of m · n.",
    },
    "tree_broadcast": {
        "hang": "Somebody waits for a message that nobody sends, or both sides of a pair send (or receive) first. The "
        "root never receives; every other rank receives exactly once before it sends.",
        "library-broadcast": "dist.broadcast is what you are to build. Use dist.send and dist.recv.",
        "collective": "Only point-to-point calls are allowed: send, recv, isend, irecv, batch_isend_irecv.",
        "sends-too-early": "A rank passes x on before it has received it: what it sends are its own old numbers.",
        "hub": "The root sends all N - 1 messages one after another. A rank that has the data can help: after k steps "
        "2^k ranks have it.",
        "chain": "Each rank passes the data to one other only, so that it takes N - 1 steps. All ranks that have the "
        "data can send in the same step.",
        "small-subtree-first": "The tree is right, but somebody far away waits too long. A rank first serves the "
        "child with the largest subtree below it; it has the longest way to go.",
        "too-many-messages": "Every rank but the root needs the data once: N - 1 messages.",
        "power-of-two": "Right while N is a power of two. The partner of the last ranks may not exist: compare with N "
        "before you send.",
        "root": "Right for root 0 only. Number the ranks from the root, place = (rank - root) % N, and translate "
        "places back to ranks for send and recv.",
        "not-in-place": "Like dist.broadcast, the function writes into x and returns nothing. Receive into x.",
    },
    "two_level_all_reduce": {
        "flat": "A collective over all ranks pays no heed to nodes. Use one group per node, and one group for each "
        "local rank across the nodes.",
        "leaders": "One rank per node carries the whole tensor between nodes, while the links of the others are idle. "
        "Let every local rank carry 1/G of it: reduce-scatter inside the node comes first.",
        "whole-tensor-across": "Every rank carries the whole tensor between nodes, the slow way. Reduce-scatter "
        "inside the node first, so that only 1/G of it is left.",
        "axis": "The result is right, but the heavy part runs between the nodes and the light one inside. Exchange "
        "the two groups.",
        "one-level": "The sum goes over this node only; the second level is missing.",
        "counted-twice": "Each number is counted several times: the second sum goes over ranks that already hold the "
        "first.",
        "too-many-bytes": "Inside a node one reduce-scatter and one all-gather are enough.",
    },
    "gradient_all_reduce_seconds": {
        "gigabits": "Gb are bits, GB are bytes: 400 Gb/s carry 50 GB/s.",
        "gibi": "Link speeds count in powers of ten: 1 Gb = 10⁹ bits.",
        "no-factor": "S / bandwidth is the time to send the tensor once. In a ring each rank sends 2(N-1)/N of it.",
        "half": "That is the reduce-scatter. The all-gather costs as much again.",
        "whole-tensor": "In a ring only shards travel, 1/N of the tensor in each of the 2(N-1) steps.",
    },
    "bandwidths": {
        "gigabits": "GB/s are bytes: no factor of 8 is needed.",
        "gibi": "nccl-tests reports GB/s with 10⁹ bytes, although its sizes are powers of two.",
        "bytes-per-second": "The docstring asks for GB/s.",
        "swapped": "The algorithm bandwidth S/t comes first, the bus bandwidth second.",
        "divided": "busbw = algbw × factor. For an all-reduce of 8 ranks it is the larger of the two.",
        "one-factor": "2(n-1)/n belongs to the all-reduce. The others send once: (n-1)/n, and 1 for broadcast and "
        "reduce.",
        "gather-factor": "(n-1)/n belongs to all-gather, reduce-scatter and all-to-all. An all-reduce does two of "
        "these.",
        "no-factor": "The bus bandwidth corrects S/t by the bytes that a rank really has to send.",
    },
    "all_gather_seconds": {
        "directions": "The figure on the data sheet adds both directions. What a rank receives comes through one: "
        "half of it.",
        "shard": "shard is what one rank holds; S, the whole output, is N times that.",
        "own-shard": "A rank has its own shard already: N - 1 of them travel to it.",
        "all-reduce": "2(N-1)/N belongs to the all-reduce. An all-gather is its second half.",
        "bits": "NVLink's figure is in bytes already.",
    },
    "half_bandwidth_size": {
        "algbw": "That is where S/t reaches half the peak. The peak given is a bus bandwidth: S must be multiplied by "
        "2(N-1)/N first.",
        "upside-down": "The factor 2(N-1)/N multiplies S on the left-hand side; solving for S divides by it.",
        "gather-factor": "The factor of an all-reduce is 2(N-1)/N.",
        "giga": "The bandwidth is given in GB/s, the answer is wanted in bytes.",
        "gibi": "1 GB/s is 10⁹ bytes per second.",
        "per-step": "The latency given is that of the whole call, all 2(N-1) steps together.",
    },
}

_THROUGH_ROOT = {"reduce", "broadcast", "gather", "scatter"}


def _used(outcome: Outcome) -> Counter:
    """Kinds of operation in the ledger with their number; barriers, which making a group may issue, do not count."""
    return Counter(entry.op for entry in outcome.ledger if entry.op != "barrier")


def _listing(used: Counter) -> str:
    return ", ".join(f"{count} {op}" for op, count in sorted(used.items())) or "nothing"


# ------------------------------------------------------------------------------------------------ mean and variance


@checked
def mean_and_variance(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x) -> (mean, variance)``: one all-reduce of 24 bytes."""
    exercise = Exercise("Exercise 1", HINTS["mean_and_variance"], timeout)
    for n in (2, 3, 4, 1):
        equal, ragged = [
            [2 + (1 + rank) * values(length(rank), seed=rank) for rank in range(n)]
            for length in (lambda rank: 5, lambda rank: 4 + 3 * rank)
        ]
        _mean_and_variance(exercise, fn, equal, "as many numbers on every rank")
        _mean_and_variance(exercise, fn, ragged, "other counts on every rank")
        if n > 1:
            _mean_and_variance(exercise, fn, [*ragged[:-1], ragged[-1][:0]], "none on the last rank", "empty-shard")
        _mean_and_variance(exercise, fn, [3000 + x for x in ragged], "numbers near 3000", "float32")
    exercise.passed("1 all-reduce of 24 bytes.")


def _mean_and_variance(exercise: Exercise, fn: Callable, data: list, case: str, fallback: str | None = None) -> None:
    n, everything = len(data), torch.cat(data).double()
    mean, variance = everything.mean(), everything.var(correction=0)
    filled = [x.double() for x in data if len(x) > 1]
    mean_traps = {"mean-of-means": torch.stack([x.mean() for x in filled]).mean(), "not-divided": everything.sum()}
    within = [torch.stack([x.var(correction=c) for x in filled]).mean() for c in (0, 1)]
    within.append(sum(len(x) * x.var(correction=0) for x in filled) / len(everything))
    variance_traps = {"unbiased": everything.var(), "average-of-variances": within}
    for rank, outcome in enumerate(exercise.run(fn, data, case=case, fallback=fallback)):
        exercise.communicates(rank, outcome, n)
        used = _used(outcome)
        listing = f"the ledger shows {_listing(used)}."
        exercise.require(n == 1 or not set(used) <= _THROUGH_ROOT, "hub", listing, rank)
        exercise.require(not set(used) - {"all_reduce"}, "gathers-everything", listing, rank)
        pair = isinstance(outcome.result, (tuple, list)) and len(outcome.result) == 2
        exercise.require(pair, "shape", "expected a pair (mean, variance) of scalar tensors.", rank)
        got = [v.squeeze() if isinstance(v, torch.Tensor) else v for v in outcome.result]
        exercise.equal(rank, got[0], mean, mean_traps, "the mean")
        exercise.equal(rank, got[1], variance, variance_traps, "the variance")
        exercise.require(used["all_reduce"] <= 1, "two-all-reduces", f"{used['all_reduce']} all-reduces.", rank)
        size = outcome.ledger.bytes()
        exercise.require(size <= 24, "too-many-bytes", f"the all-reduce carries {size} bytes; 24 are enough.", rank)
        exercise.keeps_input(rank, outcome)


# ------------------------------------------------------------------------------------------------ ring shift


@checked
def ring_shift(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x) -> tensor of the left neighbour``: one message out, one in."""
    exercise = Exercise("Exercise 2", HINTS["ring_shift"], timeout)
    for n in (2, 3, 4, 1):
        data = [values(5, 2, seed=10 + rank) for rank in range(n)]
        size = data[0].nbytes
        for rank, outcome in enumerate(exercise.run(fn, data)):
            exercise.communicates(rank, outcome, n)
            used = _used(outcome)
            only = set(used) <= {"send", "recv"}
            exercise.require(only, "collective", f"the ledger shows {_listing(used)}.", rank)
            exercise.equal(rank, outcome.result, data[rank - 1], {"direction": data[(rank + 1) % n]} if n > 2 else {})
            sent = outcome.ledger.sent
            exercise.require(sent <= size, "too-many-bytes", f"this rank sends {sent} bytes; {size} are enough.", rank)
            exercise.keeps_input(rank, outcome)
    exercise.passed("1 message out and 1 in on every rank.")


# ------------------------------------------------------------------------------------------------ all-reduce in two


@checked
def all_reduce_in_two(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x) -> sum over ranks``: one reduce-scatter and one all-gather of the padded size."""
    exercise = Exercise("Exercise 3", HINTS["all_reduce_in_two"], timeout)
    for n in (2, 3, 4, 1):
        for number, shape in enumerate([(n, 3), (7,), (), (3, 5)]):
            data = [values(*shape, seed=20 + 5 * rank + number) for rank in range(n)]
            if number == 3:
                data = [x.t() for x in data]
            uneven = data[0].numel() % n > 0
            case = f"x of shape {tuple(data[0].shape)}" + ", not contiguous" * (number == 3)
            outcomes = exercise.run(fn, data, case=case, fallback="not-divisible" if uneven and n == 2 else None)
            _all_reduce_in_two(exercise, data, outcomes)
    exercise.passed("1 reduce-scatter and 1 all-gather, which need 2(N-1)/N of the padded size.")


def _all_reduce_in_two(exercise: Exercise, data: list, outcomes: list[Outcome]) -> None:
    n, total = len(data), torch.stack(data).sum(0)
    item, size = data[0].element_size(), data[0].nbytes
    padded = math.ceil(data[0].numel() / n) * n * item
    body = data[0].numel() // n * n  # elements that N divides
    for rank, outcome in enumerate(outcomes):
        exercise.communicates(rank, outcome, n)
        used, listing = _used(outcome), f"the ledger shows {_listing(_used(outcome))}."
        exercise.require("all_reduce" not in used, "library-all-reduce", listing, rank)
        summed = total.flatten()[:body]
        own = data[rank].flatten()[body:]
        tails = [torch.cat([summed, tail]).reshape(total.shape) for tail in (0 * own, own)]
        exercise.equal(rank, outcome.result, total, {"tail": tails, "average": total / n})
        if n == 1:
            exercise.keeps_input(rank, outcome)
            continue
        whole = "reduce_scatter" not in used and any(
            e.op == "send" and e.bytes >= size or e.op == "all_gather" and e.bytes >= n * size > padded
            for e in outcome.ledger
        )
        exercise.require(not whole, "whole-tensor", f"every rank sends its whole tensor: {_listing(used)}.", rank)
        exercise.require(not set(used) & _THROUGH_ROOT, "hub", listing, rank)
        exercise.require(used == Counter(reduce_scatter=1, all_gather=1), "other-calls", listing, rank)
        largest = max(entry.bytes for entry in outcome.ledger)
        what = f"a call carries {largest} bytes; padded to a multiple of {n} numbers, {size} bytes become {padded}."
        exercise.require(largest <= padded, "padding", what, rank)
        exercise.keeps_input(rank, outcome)


# ------------------------------------------------------------------------------------------------ ragged all-gather


@checked
def ragged_all_gather(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x) -> list of all ranks' tensors``: two collectives, the second padded to the longest."""
    exercise = Exercise("Exercise 4", HINTS["ragged_all_gather"], timeout)
    for n in (2, 3, 4, 1):
        for name, lengths in {
            "as many rows on every rank": [3] * n,
            "other numbers of rows": [(3 * rank + 2) % 8 for rank in range(n)],
            "rank 0 without rows": [0] + [5 - rank for rank in range(1, n)],
            "no rows anywhere": [0] * n,
        }.items():
            data = [values(length, 3, seed=60 + rank) for rank, length in enumerate(lengths)]
            case = f"{name} ({', '.join(map(str, lengths))})"
            fallback = "uneven" if len(set(lengths)) > 1 and n == 2 else None
            _ragged_all_gather(exercise, data, exercise.run(fn, data, case=case, fallback=fallback))
    exercise.passed("2 collectives, the second no larger than N times the longest.")


def _ragged_all_gather(exercise: Exercise, data: list, outcomes: list[Outcome]) -> None:
    n, longest = len(data), max(map(len, data))
    enough = 8 * n + n * longest * 3 * data[0].element_size()
    for rank, outcome in enumerate(outcomes):
        exercise.communicates(rank, outcome, n)
        got, used = outcome.result, _used(outcome)
        is_list = isinstance(got, (list, tuple)) and len(got) == n and all(isinstance(p, torch.Tensor) for p in got)
        found = f"{len(got)} parts" if isinstance(got, (list, tuple)) else type(got).__name__
        exercise.require(is_list, "not-a-list", f"expected a list of {n} tensors, got {found}.", rank)
        lengths = [len(part) if part.dim() else -1 for part in got]
        if lengths != [len(x) for x in data]:
            what = f"the parts have {lengths} rows, expected {[len(x) for x in data]}."
            padded = min(lengths) >= longest and max(lengths) > min(map(len, data))
            own = set(lengths) == {len(data[rank])}
            exercise.refuse("padding-left" if padded else "own-length" if own else "shape", what, rank)
        for i, part in enumerate(got):
            exercise.equal(rank, part, data[i], {"rank-order": [x for x in data if len(x)]}, f"part {i}")
        if n == 1:
            continue
        listing = f"the ledger shows {_listing(used)}."
        through_root = "gather" in used or "broadcast" in used and {"send", "recv"} & set(used)
        exercise.require(not through_root, "hub", listing, rank)
        exercise.require("broadcast" not in used, "one-call-per-rank", listing, rank)
        exercise.require(not {"send", "recv"} & set(used), "messages", listing, rank)
        objects = any("_object" in entry.call_site for entry in outcome.ledger)
        exercise.require(not objects, "object", "the rows go through pickle.", rank)
        exercise.require(used.total() <= 2, "more-than-two", listing, rank)
        size = outcome.ledger.bytes()
        exercise.require(size <= enough, "too-many-bytes", f"the calls carry {size} bytes; {enough} are enough.", rank)
        exercise.keeps_input(rank, outcome)


# ------------------------------------------------------------------------------------------------ sums on a mesh


@checked
def row_and_column_sums(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(block, rows, cols) -> (row sums, column sums)``: two all-reduces in sub-groups, after local sums."""
    exercise = Exercise("Exercise 5", HINTS["row_and_column_sums"], timeout)
    for rows, cols in ((2, 3), (3, 2), (2, 2), (1, 2)):
        data = [values(4, 5, seed=100 + rank) for rank in range(rows * cols)]
        outcomes = exercise.run(fn, data, rows, cols, case=f"mesh of {rows} × {cols}")
        for rank, outcome in enumerate(outcomes):
            _row_and_column_sums(exercise, data, rows, cols, rank, outcome)
    exercise.passed("2 all-reduces in sub-groups, of 16 and 20 bytes.")


def _row_and_column_sums(exercise: Exercise, data: list, rows: int, cols: int, rank: int, outcome: Outcome) -> None:
    n = rows * cols
    row, col = divmod(rank, cols)

    def sums(row_ranks: Sequence[int], col_ranks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return sum(data[r].sum(1) for r in row_ranks), sum(data[r].sum(0) for r in col_ranks)

    same_row, same_col = [row * cols + c for c in range(cols)], [r * cols + col for r in range(rows)]
    right = sums(same_row, same_col)
    exercise.communicates(rank, outcome, n)
    got, used = outcome.result, _used(outcome)
    pair = isinstance(got, (tuple, list)) and len(got) == 2
    exercise.require(pair, "shape", "expected a pair (row sums, column sums).", rank)
    wrong = {
        "axis": sums(same_col, same_row),
        "whole-world": sums(range(n), range(n)),
        "column-major": sums(range(rank % rows, n, rows), range(rank // rows * rows, (rank // rows + 1) * rows)),
        "two-columns": sums(range(rank // 2 * 2, rank // 2 * 2 + 2), range(rank % 2, n, 2)),
        "dim": (sum(data[r].sum(0) for r in same_row), sum(data[r].sum(1) for r in same_col)),
        "swapped": right[::-1],
    }  # fmt: skip
    for i, what in enumerate(("the vector of row sums", "the vector of column sums")):
        exercise.equal(rank, got[i], right[i], {key: pair[i] for key, pair in wrong.items()}, what)
    listing = f"the ledger shows {_listing(used)}."
    exercise.require(not set(used) - {"all_reduce"}, "gathers-everything", listing, rank)
    strangers = [e for e in outcome.ledger if not (set(e.ranks) <= set(same_row) or set(e.ranks) <= set(same_col))]
    exercise.require(not strangers, "whole-world", "an all-reduce goes beyond this rank's row or column.", rank)
    enough = sum(part.nbytes for part in right)
    size = outcome.ledger.bytes("all_reduce")
    exercise.require(size <= enough, "block-sent", f"the all-reduces carry {size} bytes; {enough} are enough.", rank)
    exercise.keeps_input(rank, outcome)


# ------------------------------------------------------------------------------------------------ tree broadcast


@checked
def tree_broadcast(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, root)``, in place: N-1 messages in ⌈log2 N⌉ steps."""
    exercise = Exercise("Exercise 6", HINTS["tree_broadcast"], timeout)
    steps = {}
    for n, root in ((2, 0), (4, 0), (8, 0), (3, 0), (5, 0), (1, 0), (2, 1), (4, 3), (5, 2)):
        data = [values(6, seed=200 + 10 * rank + n) for rank in range(n)]
        fallback = "root" if root else "power-of-two" if n in (3, 5) else None
        outcomes = exercise.run(fn, data, root, case=f"root {root}", fallback=fallback)
        _tree_broadcast(exercise, data, root, outcomes)
        steps[n] = message_steps([outcome.ledger for outcome in outcomes])
    exercise.passed(f"N-1 messages in {', '.join(str(steps[n]) for n in sorted(steps))} steps.")


def _tree_broadcast(exercise: Exercise, data: list, root: int, outcomes: list[Outcome]) -> None:
    n = len(data)
    for rank, outcome in enumerate(outcomes):
        exercise.communicates(rank, outcome, n)
        used = _used(outcome)
        listing = f"the ledger shows {_listing(used)}."
        exercise.require("broadcast" not in used, "library-broadcast", listing, rank)
        exercise.require(not set(used) - {"send", "recv"}, "collective", listing, rank)
        first = next(iter(outcome.ledger), None)
        early = rank != root and first is not None and first.op == "send"
        key = "root" if root else "sends-too-early"
        exercise.require(not early, key, "this rank sends before it has received.", rank)
    for rank, outcome in enumerate(outcomes):
        returned = isinstance(outcome.result, torch.Tensor) and torch.equal(outcome.result, data[root])
        if returned and rank != root and torch.equal(outcome.after, data[rank]):
            exercise.refuse("not-in-place", "x still holds this rank's own numbers.", rank)
        exercise.equal(rank, outcome.after, data[root], what="x after the call")
    ledgers = [outcome.ledger for outcome in outcomes]
    messages, steps = sum(ledger.messages for ledger in ledgers), message_steps(ledgers)
    exercise.require(messages <= n - 1, "too-many-messages", f"{messages} messages; {n - 1} are enough.")
    allowed, most = math.ceil(math.log2(n)), max(ledger.messages for ledger in ledgers)
    key = "hub" if most == n - 1 else "chain" if most == 1 else "small-subtree-first"
    exercise.require(steps <= allowed, key, f"the messages need {steps} steps; {allowed} are enough.")


# ------------------------------------------------------------------------------------------------ two levels


@checked
def two_level_all_reduce(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, nodes, per_node) -> sum over ranks``: between nodes only 1/per_node of the tensor a rank."""
    exercise = Exercise("Exercise 7", HINTS["two_level_all_reduce"], timeout)
    for nodes, per_node in ((2, 2), (2, 3), (3, 2)):
        data = [values(12, seed=300 + rank) for rank in range(nodes * per_node)]
        outcomes = exercise.run(fn, data, nodes, per_node, case=f"{nodes} nodes of {per_node}")
        _two_level_all_reduce(exercise, data, nodes, per_node, outcomes)
    exercise.passed("2(M-1)/M · S/G bytes per rank between nodes.")


def _two_level_all_reduce(exercise: Exercise, data: list, nodes: int, per_node: int, outcomes: list[Outcome]) -> None:
    total, size = sum(data), data[0].nbytes
    across_limit = bytes_sent("all_reduce", nodes, size / per_node)
    inside_limit = bytes_sent("all_reduce", per_node, size)
    traffic = []  # by rank: bytes (inside a node, between nodes)
    for rank, outcome in enumerate(outcomes):
        exercise.communicates(rank, outcome, nodes * per_node)
        first = rank // per_node * per_node
        node = sum(data[first : first + per_node])
        traps = {"one-level": node, "counted-twice": [per_node * total, nodes * total]}
        exercise.equal(rank, outcome.result, total, traps)
        moved = {True: 0.0, False: 0.0}
        for e in outcome.ledger:
            ends = set(e.ranks) if e.is_collective else {rank, e.peer}
            flat = e.is_collective and len(e.ranks) == nodes * per_node and e.op != "barrier"
            exercise.require(not flat, "flat", f"{e.op} over all {nodes * per_node} ranks.", rank)
            moved[len({r // per_node for r in ends}) == 1] += (
                bytes_sent(e.op, len(e.ranks), e.bytes) if e.op not in ("recv", "barrier") else 0
            )
        traffic.append((moved[True], moved[False]))
        exercise.keeps_input(rank, outcome)
    idle = any(across == 0 for _, across in traffic)
    for rank, (inside, across) in enumerate(traffic):
        light = inside <= bytes_sent("all_reduce", per_node, size / nodes) + 0.5
        key = "leaders" if idle else "axis" if light else "whole-tensor-across"
        what = f"this rank sends {across:.0f} bytes between nodes; {across_limit:.0f} are enough."
        exercise.require(across <= across_limit + 0.5, key, what, rank)
        what = f"this rank sends {inside:.0f} bytes inside its node; {inside_limit:.0f} are enough."
        exercise.require(inside <= inside_limit + 0.5, "too-many-bytes", what, rank)


# ------------------------------------------------------------------------------------------------ paper problems


@checked
def gradient_all_reduce_seconds(fn: Callable) -> None:
    """Check ``fn(parameters, bytes_per_parameter, ranks, link_gigabits) -> seconds``."""

    def seconds(factor: Callable[[int], float], per_second: float = 1e9 / 8) -> Callable:
        return lambda parameters, item, n, link: factor(n) * parameters * item / (link * per_second)

    def ring(n: int) -> float:
        return 2 * (n - 1) / n

    paper_problem(
        "Exercise 8", fn, seconds(ring), [(7e9, 2, 16, 400), (70e9, 2, 64, 800), (1e9, 4, 2, 100)],
        {
            "gigabits": [seconds(ring, 1e9), seconds(ring, 8e9)],
            "gibi": seconds(ring, 2**30 / 8),
            "no-factor": seconds(lambda n: 1),
            "limit": seconds(lambda n: 2),
            "half": seconds(lambda n: (n - 1) / n),
            "whole-tensor": [seconds(lambda n: n - 1), seconds(lambda n: 2 * (n - 1))],
        },
        HINTS["gradient_all_reduce_seconds"], ["s"],
    )  # fmt: skip


@checked
def bandwidths(fn: Callable) -> None:
    """Check ``fn(op, ranks, size, seconds) -> (algbw, busbw)`` in GB/s."""

    def answer(op: str, n: int, size: float, seconds: float, unit: float = 1e9) -> tuple[float, float]:
        return size / seconds / unit, size / seconds / unit * busbw_factor(op, n)

    def divided(op: str, n: int, size: float, seconds: float) -> tuple[float, float]:
        return answer(op, n, size, seconds)[0], answer(op, n, size, seconds)[0] / busbw_factor(op, n)

    paper_problem(
        "Exercise 9", fn, answer,
        [
            ("all_reduce", 8, 2**30, 8203.9e-6), ("all_reduce", 2, 2**20, 1e-4), ("all_gather", 4, 2**24, 1e-3),
            ("reduce_scatter", 8, 2**24, 1e-3), ("all_to_all", 3, 2**24, 1e-3), ("broadcast", 8, 2**24, 1e-3),
            ("reduce", 4, 2**24, 1e-3),
        ],
        {
            "gigabits": lambda *case: answer(*case, unit=1e9 / 8),
            "gibi": lambda *case: answer(*case, unit=2**30),
            "bytes-per-second": lambda *case: answer(*case, unit=1),
            "swapped": lambda *case: answer(*case)[::-1],
            "divided": divided,
            "one-factor": lambda op, *case: answer("all_reduce", *case),
            "gather-factor": lambda op, *case: answer("all_gather", *case),
            "no-factor": lambda op, *case: answer("broadcast", *case),
        },
        HINTS["bandwidths"], ["GB/s algbw", "GB/s busbw"],
    )  # fmt: skip


@checked
def all_gather_seconds(fn: Callable) -> None:
    """Check ``fn(shard, ranks, both_directions) -> seconds``."""

    def seconds(factor: Callable[[int], float], one_way: float = 0.5) -> Callable:
        return lambda shard, n, both: factor(n) * shard / (both * one_way * 1e9)

    paper_problem(
        "Exercise 10", fn, seconds(lambda n: n - 1), [(2e9, 8, 900), (1e9, 4, 600), (5e8, 16, 1800)],
        {
            "directions": seconds(lambda n: n - 1, 1),
            "shard": [seconds(lambda n: (n - 1) / n, one_way) for one_way in (0.5, 1)],
            "own-shard": seconds(lambda n: n),
            "all-reduce": seconds(lambda n: 2 * (n - 1)),
            "bits": seconds(lambda n: n - 1, 0.5 / 8),
        },
        HINTS["all_gather_seconds"], ["s"],
    )  # fmt: skip


@checked
def half_bandwidth_size(fn: Callable) -> None:
    """Check ``fn(ranks, latency, peak_busbw) -> bytes``."""

    def size(factor: Callable[[int], float], giga: float = 1e9) -> Callable:
        return lambda n, latency, peak: latency * peak * giga * factor(n)

    paper_problem(
        "Exercise 11", fn, size(lambda n: n / (2 * (n - 1))),
        [(8, 43.83e-6, 234.89), (4, 2e-5, 300), (64, 1e-4, 48)],
        {
            "algbw": size(lambda n: 1),
            "limit": size(lambda n: 1 / 2),
            "upside-down": size(lambda n: 2 * (n - 1) / n),
            "gather-factor": size(lambda n: n / (n - 1)),
            "giga": size(lambda n: n / (2 * (n - 1)), 1),
            "gibi": size(lambda n: n / (2 * (n - 1)), 2**30),
            "per-step": size(lambda n: n),
        },
        HINTS["half_bandwidth_size"], ["bytes"],
    )  # fmt: skip
