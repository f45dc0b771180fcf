"""The exercises on NCCL's algorithms: what each rank must find, and the usual mistakes with their hints.

Whole numbers are summed, whose sums in float32 are exact: any order of adding is right.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_utils import record
from course_utils.check import Case, Note, close, exercise, message_steps, paper, sent, show, values
from course_utils.check.traffic import by_node
from course_utils.topology import two_level
from lessons.collectives.collective_algorithms import step_through

from . import answers
from .fabric import emulate

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}


def numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers; those of int64 have more digits than a float."""
    scale = 1e3 if dtype.is_floating_point else 2.0**57
    return (scale * values(*shape, seed=seed)).round().to(dtype) + 1


def from_all(value: Any) -> list:
    """What all ranks hand in, by rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def ran(note: Note, answer: Any, audit: bool, *given: Any) -> tuple[Any, Any, list[list]]:
    """What the answer returns on this rank, its ledger, and those of all ranks.

    Ranks hand in their ledgers in an audit only: a rank that has returned must not wait for one that hangs.
    """
    with record() as ledger:
        got = answer(*given)
    ledgers = from_all(list(ledger)) if audit else []
    note.talks(ledger, dist.get_world_size())
    note.sent(ledger, {"send", "recv"})
    return got, ledger, ledgers


def same(note: Note, got: Any, right: Tensor, what: str = "the result") -> None:
    """The right numbers to the last digit, in the right dtype."""
    note.equal(got, right, what)
    dtype = getattr(got, "dtype", None)
    told = f"{what} is wrong.\n  expected  {show(right)} of {right.dtype}\n  got       {show(got)} of {dtype}"
    note.holds(dtype == right.dtype and torch.equal(got, right), "dtype", told)


def returned(note: Note, answer: Any, audit: bool, x: Tensor, right: Tensor, *given: Any) -> tuple[Any, list[list]]:
    """The answer returns what is right and leaves x alone; the ledgers of this and of all ranks."""
    before = x.clone()
    got, ledger, ledgers = ran(note, answer, audit, x, *given)
    same(note, got, right)
    note.holds(torch.equal(x, before), "input-changed", "the result is right, but the input x was changed.")
    return ledger, ledgers


def with_audits(cases: list[Case]) -> list[Case]:
    """All cases for their results, then once more for their ledgers; on two ranks all algorithms look alike."""
    return [
        Case(case.ranks, case.name, (audit, *case.args), None if audit else case.hint, case.errors)
        for audit in (False, True) for case in cases if not audit or case.ranks > 2
    ]


# --- rings


def ring_cases(twelve: tuple[int, ...], more: list[Case]) -> list[Case]:
    """Shape, rings and dtype; the audits come after all results."""
    cases = []
    for n in (2, 1, 3, 4):
        world = [list(range(n))]
        cases.append(Case(n, "12 numbers", (twelve, world)))
        if n > 1:
            cases += [
                Case(n, "11 numbers", ((11,), world), "not-divisible"),
                Case(n, f"{n - 1} number{'s' * (n > 2)}", ((n - 1,), world), "not-divisible"),
                Case(n, "12 numbers of dtype int64", (twelve, world, torch.int64), "dtype"),
            ]
    return with_audits([*cases, *more])


OTHER_RINGS = [
    Case(3, "ring [2, 0, 1], 11 numbers", ((11,), [[2, 0, 1]]), "ring"),
    Case(4, "ring [3, 0, 2, 1], 3 numbers", ((3,), [[3, 0, 2, 1]]), "ring"),
    Case(4, "rings [0, 2] and [3, 1], 12 numbers", ((12,), [[0, 2], [3, 1]]), "ring"),
]
ONE_NUMBER = Case(2, "a number without dimensions", ((), [[0, 1]]), "shape", "0-d|dims|dimension")


def inputs(shape: tuple, rings: list, dtype: torch.dtype = torch.float32) -> tuple[list[int], int, list[Tensor]]:
    """The ring of this rank, its place there, and what each place holds."""
    rank = dist.get_rank()
    ring = next(ring for ring in rings if rank in ring)
    return ring, ring.index(rank), [numbers(shape, r, dtype) for r in ring]


def in_a_ring(note: Note, ledgers: list[list], ring: list[int], x: Tensor, halves: int, turn: int = -1) -> None:
    """Audit: chunks, in ``halves`` times N-1 steps; -1 turns to the left."""
    if not ledgers:
        return
    rank, n, rounds = dist.get_rank(), len(ring), halves * (len(ring) - 1)
    place, chunk = ring.index(rank), math.ceil(x.numel() / n) * x.itemsize
    peers = [{entry.peer for entry in ledger if entry.op == "send"} for ledger in ledgers]
    hub = any(set().union(*peers[:r], *peers[r + 1 :]) == {r} for r in range(len(peers)))
    note.holds(not hub, "not-a-ring", "all other ranks send to one rank, and to no other.")
    note.sent(ledgers[rank], largest=chunk, too_large="not-a-ring")
    told = f"this rank sends to rank {', '.join(map(str, sorted(peers[rank])))}."
    key = "ring" if ring != sorted(ring) else "not-a-ring"
    note.holds(peers[rank] <= {ring[(place + turn) % n]}, key, told)
    total = sum(sent(ledgers[r]) for r in ring)
    enough = "the ranks of the ring send {number:.0f} bytes; {most} are enough."
    note.at_most("too-many-bytes", total, rounds * n * chunk, enough)
    note.at_most("too-few-bytes", rounds * x.nbytes, total, "the ranks send {most:.0f} bytes; it takes {number}.")
    note.at_most("not-a-ring", message_steps(ledgers), rounds, "the messages need {number} steps; {most} are enough.")


PASSED = "N-1 steps, and (N-1)/N of the tensor sent by each."
PASSED_TWICE = "2(N-1) steps, and 2(N-1)/N of the tensor sent by each."


@exercise("Exercise 1", passed=PASSED, cases=ring_cases((12,), OTHER_RINGS))
def ring_reduce_scatter(note, answer, audit, *case):
    ring, place, data = inputs(*case)
    right = sum(data).tensor_split(len(ring))[place]
    ledger, ledgers = returned(note, answer, audit, data[place], right, ring)
    note.holds(all(entry.end is not None for entry in ledger), "unwaited", "a message was not waited for.")
    in_a_ring(note, ledgers, ring, data[place], halves=1)


@exercise("Exercise 2", passed=PASSED, cases=ring_cases((12,), OTHER_RINGS))
def ring_all_gather(note, answer, audit, *case):
    ring, place, (right, *_) = inputs(*case)
    x = torch.full_like(right, -1000)
    x.tensor_split(len(ring))[place].copy_(right.tensor_split(len(ring))[place])
    got, _, ledgers = ran(note, answer, audit, x, ring)
    filled = close(x, right) or not close(got, right)
    note.holds(filled, "not-in-place", "the chunks are returned, and x is not filled.")
    same(note, x, right, "x after the call")
    in_a_ring(note, ledgers, ring, x, halves=1)


def summed_in_a_ring(note: Note, answer: Any, turn: int, audit: bool, *case: Any) -> None:
    """An all-reduce; the ring that turns to the right is that of all ranks, and not given."""
    ring, place, data = inputs(*case)
    _, ledgers = returned(note, answer, audit, data[place], sum(data), *([ring] if turn < 0 else []))
    in_a_ring(note, ledgers, ring, data[place], 2, turn)


@exercise("Exercise 2", passed=PASSED_TWICE, cases=ring_cases((3, 4), [*OTHER_RINGS, ONE_NUMBER]))
def ring_all_reduce(note, answer, *case):
    summed_in_a_ring(note, answer, -1, *case)


@exercise("Exercise 5", passed=PASSED_TWICE, cases=ring_cases((12,), []))
def mended_ring_all_reduce(note, answer, *case):
    summed_in_a_ring(note, answer, 1, *case)


STARTED = "dist.batch_isend_irecv([send, receive])"
FINISHED = f"for request in {STARTED}:\n            request.wait()"
ISEND = "first = dist.isend(send.tensor, send.peer)\ndist.recv(receive.tensor, receive.peer)\nfirst.wait()"
IRECV = "first = dist.irecv(receive.tensor, receive.peer)\ndist.send(send.tensor, send.peer)\nfirst.wait()"
WAITED = FINISHED.replace("            ", "    ")  # where it begins a new text
ONE_BY_ONE = "(one.op(one.tensor, one.peer) for one in (send, receive){})"
SORTED = "n, place = len(ring)  ->  ring = sorted(ring)\nn, place = len(ring)"
SUM_OF_ONE = """total, received = x.clone(), torch.empty_like(x)
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
"""

RING = {
    "not-divisible": """Here N does not divide the number of elements. There are N chunks all the same, which all take
        part: some are longer, some perhaps empty. torch.chunk and torch.split make other ones.""",
    "ring": "It passed with the ring 0, 1, …, N-1, but not with this one. A place is not a rank: ring[place] is.",
    "not-a-ring": """The result is right, but this is not the ring that was asked for. In every step all ranks at once
        send one chunk, 1/N of the tensor, to the same neighbour, and receive one from the other.""",
    "missing": """Some chunk is not there in the end. Each step of a gathering passes on the chunk that came in the step
        before; the first one sends the chunk that is finished on this rank.""",
    "not-gathered": """This rank has the sum of one chunk only. The second N-1 steps should bring it the others.""",
    "added": """Finished numbers were added once more. Only the N-1 steps of a reduce-scatter add; in those of an
        all-gather, what arrives replaces what was there.""",
    "hang": """With gloo a send returns only once the other side receives. If all ranks of a ring send first, or all
        receive first, none of them gets any further.""",
}


def ring_rows(**edits: Any) -> dict[str, tuple]:
    """The hints of all rings, and of those of a gathering, with the edits of one solution that they are for."""
    known = {key.replace("_", "-"): edit for key, edit in edits.items()}
    return {key: (hint, known[key]) if key in known else (hint,) for key, hint in RING.items()
            if key in known or key in ("hang", "not-divisible", "ring", "not-a-ring")}


MISTAKES["ring_reduce_scatter"] = ring_rows(
    hang=f"{STARTED}  ->  {ONE_BY_ONE.format('')}",
    not_divisible=".tensor_split(n)  ->  .split(len(x) // n)", ring=SORTED,
) | {
    "unwaited": ("A rank returns while one of its own messages is still under way: not every request was waited for.",
            f"{STARTED}  ->  {STARTED}[1:]"),
    "wrong-chunk": ("""This is another chunk than that of this rank's place, which has to arrive there in the last step.
        Which chunk is therefore sent first?""", "range(1, n)  ->  range(n - 1)"),
    "not-added": ("""The numbers of some ranks are missing. A chunk visits all N ranks in N-1 steps: what came in is
        added, and what travels is the sum so far.""", "into += received  ->  into.copy_(received)"),
}
MISTAKES["ring_all_gather"] = ring_rows(
    not_divisible=".tensor_split(n)  ->  .split(len(x) // n)", ring=SORTED,
    not_a_ring=[
        {"chunks = x.tensor_split(n)": "ring, place = ring[::-1], n - 1 - place\nchunks = x.tensor_split(n)[::-1]"},
        f"{STARTED}  ->  {ONE_BY_ONE.format('[:: 1 - place % 2 * 2]')}",
    ],
    missing=["range(n - 1)  ->  range(1, n)", "out, into = chunks[(place + step) % n]  ->  out, into = chunks[place]"],
    added={"irecv, into": "irecv, received := torch.empty_like(into)", FINISHED: f"{WAITED}\ninto += received"},
) | {
    "order": ("All chunks are there, but chunk p of x has to come from place p of the ring.",
            {"chunks = x.tensor_split(n)": "chunks = x.tensor_split(n)\nchunks[0].copy_(chunks[place].clone())",
             "chunks[(place + step) % n], chunks[(place + step + 1) % n]": "chunks[step], chunks[step + 1]"}),
    "not-in-place": ("The function has to fill x itself, and returns nothing.",
            {"chunks = x": "x = x.clone()\nchunks = x", FINISHED: f"{WAITED}\nif step == n - 2:\n    return x"}),
}
GATHER, RESULT = "ring_all_gather(flat, ring)", "flat.reshape(x.shape)"
MISTAKES["ring_all_reduce"] = ring_rows(
    not_divisible={"x.clone().tensor_split(n)": "x.clone().split(len(x) // n)",
                   "flat.tensor_split(len(ring))": "flat.split(len(flat) // len(ring))"},
    ring="flat = x  ->  ring = sorted(ring)\nflat = x",
    not_a_ring=f"flat = x  ->  {SUM_OF_ONE}flat = x",
    not_gathered=f"{GATHER}  ->  pass", missing="range(n - 1)  ->  range(1, n)",
    added=f"{GATHER}  ->  own = flat.clone()\n{GATHER}\nflat += own\nmine /= 2",
) | {"shape": ("The sum has the shape of x, which may have any number of dimensions.",
                [f"{RESULT}  ->  flat", "reshape(x.shape)  ->  reshape(x.shape or (1,))"])}
COPY, LAST = "result = x.clone()", "into.copy_(into + received if step < n - 1 else received)"
BOTH = "dist.batch_isend_irecv([receive, send])"
MISTAKES["mended_ring_all_reduce"] = ring_rows(
    not_divisible="result.tensor_split(n)  ->  result.split(len(x) // n)",
    not_a_ring=f"{BOTH}  ->  {ONE_BY_ONE.format('[:: 1 - rank % 2 * 2]')}",
    not_gathered="range(2 * (n - 1))  ->  range(n - 1)", missing="out, into =  ->  step += step >= n - 1\nout, into =",
    added=f"{LAST}  ->  into += received",
) | {
    "only-two-ranks": ("""With two ranks, the left neighbour is also the right one. Write down for 3 ranks who sends to
        whom, and who receives from whom.""", "received, (rank - 1) % n  ->  received, (rank + 1) % n"),
}

RIGHT["ring_reduce_scatter"] = {
    "receives first": f"{STARTED}  ->  dist.batch_isend_irecv([receive, send])", "isend, recv": {FINISHED: ISEND},
}
RIGHT["ring_all_gather"] = {"isend, recv": {FINISHED: ISEND}, "irecv, send": {FINISHED: IRECV}}
RIGHT["ring_all_reduce"] = {
    "the same ring, begun elsewhere": "flat = x  ->  ring = ring[1:] + ring[:1]\nflat = x",
    "padded to a multiple of the ranks": {
        "x.flatten().clone()": "torch.cat([x.flatten(), x.new_zeros(-x.numel() % len(ring))])",
        RESULT: "flat[: x.numel()].reshape(x.shape)",
    },
}
RIGHT["mended_ring_all_reduce"] = {
    "two loops": {
        "for step in range(2 * (n - 1)):": "for step in [*range(n - 1), *range(n - 1, 2 * n - 2)]:",
        LAST: "if step < n - 1:\n    into += received\nelse:\n    into[:] = received",
    },
    "isend, recv": {f"for request in {BOTH}:\n            request.wait()": ISEND},
}

# --- a tree


def tree_cases(trees: list[tuple[int, int]]) -> list[Case]:
    """Cases of ranks and root."""
    hints = {n: "power-of-two" for n in (3, 5)}
    return [Case(n, f"root {root}", (root, torch.float32), "root" if root else hints.get(n)) for n, root in trees]


@exercise("Exercise 3", passed="2(N-1) messages in 0, 2, 4, 4, 6, 6, 6 steps.", cases=[
    *with_audits(tree_cases([(2, 0), (4, 0)])),
    *with_audits([*tree_cases([(3, 0), (5, 0), (8, 0), (1, 0), (2, 1), (4, 3), (3, 1), (3, 2), (5, 4), (6, 5)]),
                  Case(3, "root 0, x of dtype int64", (0, torch.int64), "dtype")]),
])
def tree_all_reduce(note, answer, audit, root, dtype):
    rank, n = dist.get_rank(), dist.get_world_size()
    data = [numbers(() if n == 8 else (2, 3), r, dtype) for r in range(n)]
    _, ledgers = returned(note, answer, audit, x := data[rank], sum(data), root)
    if not audit:
        return
    sends = [[entry for entry in ledger if entry.op == "send"] for ledger in ledgers]
    levels, messages = math.ceil(math.log2(n)), sum(map(len, sends))
    total, least = sum(entry.bytes for some in sends for entry in some), 2 * (n - 1) * x.nbytes
    note.sent(ledgers[rank], largest=x.nbytes)
    key = "exchange" if messages == n * levels else "too-many-calls"
    note.at_most(key, messages, 2 * (n - 1), "the ranks send {number} messages; {most} are enough.")
    note.at_most("too-few-bytes", least, total, "the ranks send {most} bytes; it takes {number}.")
    hops = {(entry.peer - r) % n for r, some in enumerate(sends) for entry in some}
    key = "hub" if max(map(len, sends)) == n - 1 or hops <= {1, n - 1} else "order"
    note.at_most(key, message_steps(ledgers), 2 * levels, "the messages need {number} steps; {most} are enough.")
    calls = [entry.op for entry in ledgers[rank]]
    note.holds(rank != root or calls == sorted(calls), "root", "the root receives after it has sent.")


PLACES = "x.clone(), torch.empty_like(x)"
GET = "dist.recv(received, (rank + distance) % n)"
UP, ANSWER = "dist.send(total, (rank - distance) % n)", "dist.recv(total, (rank - distance) % n)"
DOWN = "dist.send(total, (rank + distance) % n)"
CALLS, IF_CHILD = (GET, UP, ANSWER, DOWN), "if place + distance < n:\n            "

MISTAKES["tree_all_reduce"] = {
    "not-broadcast": ("The root has the sum; the second half sends it back down, where it replaces what a rank holds.",
            f"{ANSWER}  ->  {ANSWER.replace('total', 'received')}\ntotal += received"),
    "own-sent": ("The numbers of some ranks are missing: a rank passes on the sum of its whole subtree.",
            f"{UP}  ->  {UP.replace('total', 'x')}"),
    "root": ("The partial sums have to meet at the root, whichever rank that is and however many there are.",
            "(rank - root) % n, x  ->  rank, x"),
    "power-of-two": ("Where N is no power of two, some of the last ranks would have partners that do not exist.",
            {f"{IF_CHILD}{call}": f"if True:\n    {call}" for call in (GET, DOWN)}),
    "hub": ("One rank comes after another, which takes 2(N-1) steps. In a tree, pairs add at the same time.",
            f"distance = 1  ->  ring = [root, *(r for r in range(n) if r != root)]\n{SUM_OF_ONE}distance = 1"),
    "order": ("The children of a rank come one after another: up the smallest subtree first, down the largest.",
            {"distance = 1": "distance, children = 1, []",
             f"{GET}\n            total += received": "children.append((rank + distance) % n)",
             "if place:": "for c in children[::-1]:\n    dist.recv(received, c)\n    total += received\nif place:"}),
    "exchange": ("""Both sides of each pair send, which is recursive doubling: every rank sends log2 N tensors. In a
        tree one side of a pair sends on the way up, the other on the way down.""",
            "distance = 1  ->  distance = 1\nwhile distance < n:\n    request = dist.isend(total, rank ^ distance)\n"
            "    dist.recv(received, rank ^ distance)\n    request.wait()\n    total = total + received\n"
            "    distance *= 2\nreturn total"),
    "hang": ("A rank waits for a message that nobody sends, or both sides of a pair send first. Follow one pair.",
            {f"{UP}\n        {ANSWER}": f"{ANSWER}\n{UP}"}),
}
RIGHT["tree_all_reduce"] = {
    "the tree in a mirror": {"(rank - root)": "(root - rank)"} | {
        call: call.replace("rank +", "rank - 1 *").replace("rank - d", "rank + 1 * d") for call in CALLS
    },
    "requests": {call: call.replace("dist.", "dist.i") + ".wait()" for call in CALLS},
}

# --- two levels

INTRA = (3.4e-6, 1 / 450e9)  # alpha in s, beta in s/byte: an NVLink hop of NCCL's ring, NVLink 4 one way
INTER = (14e-6, 1 / 50e9)  # a network hop, one InfiniBand NDR port


@exercise(
    "Exercise 4", passed="few bytes between the nodes, and less emulated time than a flat ring.", cases=with_audits([
        Case(m * g, f"{m} nodes of {g}, {count} numbers", (m, g, count), hint) for m, g, count, hint in (
            (2, 3, 12, None), (2, 2, 11, "not-divisible"), (3, 2, 12, "two-nodes"), (3, 2, 7, "not-divisible"),
            (2, 4, 2**18, None),
        )
    ]),
)
def hierarchical_all_reduce(note, answer, audit, nodes, per_node, count):
    rank, n = dist.get_rank(), dist.get_world_size()
    data = [numbers((count,), r) for r in range(n)]
    _, ledgers = returned(note, answer, audit, x := data[rank], sum(data), nodes, per_node)
    if not audit:
        return
    hops = {(entry.peer - r) % n for r, ledger in enumerate(ledgers) for entry in ledger if entry.op == "send"}
    note.holds(len(hops) > 1, "flat-ring", "every rank sends to one other only, as in one ring.")
    parts = [by_node(ledger, r, per_node) for r, ledger in enumerate(ledgers)]
    inside, across = map(sent, parts[rank])
    shard = math.ceil(count / per_node)
    most = 8 * (nodes - 1) * math.ceil(shard / nodes)
    told = "this rank sends {number:.0f} bytes between nodes; {most} are enough."
    note.at_most("leaders", across, most, told)
    told = "this rank sends {number:.0f} bytes inside its node; {most} are enough."
    note.at_most("too-many-bytes", inside, 8 * (per_node - 1) * shard, told)
    total, least = sum(map(sent, ledgers)), 2 * (n - 1) * x.nbytes
    note.at_most("too-few-bytes", least, total, "all ranks together send {most:.0f} bytes; it takes {number}.")
    if n == 8:
        links, clocks = two_level(nodes, per_node, INTRA, INTER), []
        for run in (lambda: answer(x, nodes, per_node), lambda: [*step_through("all_reduce", x.view(n, -1))]):
            with emulate(links) as clock:
                run()
            clocks.append(1e6 * max(from_all(clock.seconds)))
        took, ring = clocks
        note.holds(took < ring, "slow", f"{took:.4g} µs of emulated time; the flat ring takes {ring:.4g} µs.")


SUM_OF_SHARD = "ring_all_reduce(ring_reduce_scatter(x, inside), across)"
CLUSTER = "list(range(nodes * per_node))"

MISTAKES["hierarchical_all_reduce"] = {
    "not-divisible": ("""Here the ranks of a node, or the nodes, do not divide what they split among them. Chunks need
        not all have the same length.""",
            f"{SUM_OF_SHARD}  ->  ring_reduce_scatter(x, inside)\n"
            "shard = ring_all_reduce(shard[: len(shard) // nodes * nodes], across)"),
    "two-nodes": ("It passed with two nodes, but not with more. The ring across has one rank from each of the m nodes.",
            "[m * per_node + local for m in range(nodes)]  ->  [local, local + per_node]"),
    "one-level": ("The sum covers this node only: the second level is missing.",
            f"{COPY}  ->  return ring_all_reduce(x, inside)\n{COPY}"),
    "counted-twice": ("""Each number is counted several times: the second sum goes over ranks that already hold the
        first.""", f"{COPY}  ->  return ring_all_reduce(ring_all_reduce(x, inside), {CLUSTER})\n{COPY}"),
    "shard-order": ("The sums are right but in the wrong places: a rank's chunk is always number rank % per_node.",
            {"[local].copy_": "[local - 1].copy_", "(result, inside)": "(result, inside[1:] + inside[:1])"}),
    "flat-ring": ("""This is one ring through all ranks. All of its bytes between the nodes pass through one port of
        each, and the other ports are idle.""", f"{COPY}  ->  return ring_all_reduce(x, {CLUSTER})\n{COPY}"),
    "leaders": ("""Some ranks carry too much between the nodes. With g ranks in a node, each carries 1/g of the tensor;
        node i holds the ranks i·g to i·g + g-1, and the heavy part has to stay among them.""",
            [f"{COPY}  ->  return ring_all_reduce(ring_all_reduce(x, inside), across)\n{COPY}",
             f"{COPY}  ->  inside, across, local, per_node = across, inside, node, nodes\n{COPY}"]),
    "slow": ("The bytes are right, but the emulation shows no gain over the flat ring. Are there too many messages?",
            f"{COPY}  ->  if len(x) > 2**14:\n    parts = x.split(2**14)\n    return torch.cat("
            f"[hierarchical_all_reduce(part, nodes, per_node) for part in parts])\n{COPY}"),
}
RIGHT["hierarchical_all_reduce"] = {
    "padded to a multiple of the ranks in a node": {
        COPY: "length = len(x)\nx = torch.cat([x, x.new_zeros(-length % per_node)])\nresult = x.clone()",
        "return result": "return result[:length]",
    },
    "the other way round in the node":
        f"{COPY}  ->  inside, place = inside[::-1], per_node - 1 - local\nlocal = place\n{COPY}",
}

# --- on paper

GIGABITS = ("Gb stands for gigabits: 400 Gb/s carry 50 GB/s.", "8 / (gigabits  ->  1 / (gigabits")
UNITS = {
    "gigabits": GIGABITS,
    "microseconds": ("The latency is given in µs, but the answer should be in seconds or bytes: 1 µs = 10⁻⁶ s.",
            "latency_us * 1e-6  ->  latency_us"),
    "not-rounded": ("A tree of N ranks has ⌈log2 N⌉ levels: for 6 ranks that is 3, not 2.58.",
            "math.ceil(math.log2(ranks))  ->  math.log2(ranks)"),
}
MISTAKES["pick_algorithm"] = UNITS | {
    "slowest": ("That is the slowest of the three.", "min(  ->  max("),
    "half": ("That is half of the time. Numbers have to come in, and the sums have to go out again.",
            {"latency_us * 1e-6": "latency_us * 0.5e-6", "8 / (": "4 / ("}),
    "root-port": ("Rank 0 receives N-1 tensors, one after another, each in α + βS; and it sends as many.",
            "root = 2 * (ranks - 1)  ->  root = 2"),
    "whole-tensor": ("In a ring only S/N travels in each of the 2(N-1) steps.", "size / ranks  ->  size"),
    "no-latency": ("By bytes alone the ring always wins, but every step costs its latency as well.",
            "latency_us * 1e-6  ->  0.0"),
}
TREE_HALF = "The tree is climbed and then descended: that makes 2⌈log2 N⌉ steps, as the ring has 2(N-1)."
MISTAKES["crossover_size"] = UNITS | {
    "limit": ("2·S is what a rank sends in the limit of very many ranks. With N ranks it is a little less.",
            "(ranks - 1) / ranks  ->  1"),
    "whole-tensor": ("In a ring only S/N travels in each step.", "(ranks - 1) / ranks  ->  (ranks - 1)"),
    "half-tree": (TREE_HALF, "math.ceil(math.log2(ranks))  ->  math.ceil(math.log2(ranks)) / 2"),
    "upside-down": ("The latency that the tree saves is divided by the time per byte that it adds.",
            "latencies_saved / bytes_added  ->  bytes_added / latencies_saved"),
}
LOOP = "n, levels = 2 * n, levels + 1"
MISTAKES["crossover_ranks"] = {
    "gigabits": GIGABITS,
    "last-ring": ("With that many ranks the ring is still at least as fast as the tree.",
            "return n  ->  return n // 2"),
    "any-number": ("The docstring asks for a power of two.",
            f"{LOOP}  ->  n, levels = n + 1, math.ceil(math.log2(n + 1))"),
    "same-steps": ("A step of the ring carries S/N, one of the tree all of S; and 1 µs is 10⁻⁶ s.",
            "byte / n  ->  byte"),
    "half-tree": (TREE_HALF, "while levels  ->  while levels / 2"),
}

SIZE = "alpha / beta * latencies_saved / bytes_added"
RIGHT["pick_algorithm"] = {
    "levels by the length of a whole number": "math.ceil(math.log2(ranks))  ->  (ranks - 1).bit_length()",
    "a list": "return min(  ->  return list(min((root, 'root'), (ring, 'ring'), (tree, 'tree')))[::-1]\nreturn min(",
}
RIGHT["crossover_size"] = {
    "a tensor": f"return {SIZE}  ->  return torch.tensor({SIZE})",
    "bytes per second": {"8 / (gigabits * 1e9)": "gigabits * 1e9 / 8", "alpha / beta": "alpha * beta"},
}
RIGHT["crossover_ranks"] = {
    "a search with next": "n, levels = 2, 1  ->  return next(2**k for k in range(1, 40)"
    " if k * (step + byte) < (2**k - 1) * (step + byte / 2**k))\nn, levels = 2, 1",
    "NumPy's whole number": "return n  ->  import numpy as np\n\nreturn np.int64(n)",
}

pick_algorithm = paper(
    "Exercise 6", answers.pick_algorithm, MISTAKES["pick_algorithm"], units=["", "s"], cases=[
        (2**18, 8, 14, 400), (2**20, 8, 14, 400), (2**26, 8, 14, 400), (2**20, 64, 14, 400), (2**24, 64, 14, 400),
        (2**16, 6, 30, 25), (2**10, 2, 30, 25), (2e5, 6, 30, 25),
    ],
)
crossover_size = paper(
    "Exercise 7", answers.crossover_size, MISTAKES["crossover_size"], units=["bytes"],
    cases=[(8, 14, 400), (64, 14, 400), (24, 30, 25), (6, 3.4, 3600)],
)
crossover_ranks = paper(
    "Exercise 7", answers.crossover_ranks, MISTAKES["crossover_ranks"], units=["ranks"],
    cases=[(2**24, 14, 400), (2**20, 14, 400), (2**27, 14, 400), (2**20, 30, 25)],
)
