"""The exercises of lesson 19: what each answer must find, and the usual mistakes with their hints."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_utils import record
from course_utils.check import Case, exercise
from course_utils.check.compare import values

from .answers import PAD

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

SHAPES = {"embedding": (40, 8), "up": (16, 8), "gate": (16, 8), "norm": (64,), "down": (8, 16), "scale": (64,)}
SPLIT = {"up", "gate", "down"}


@exercise("Exercise 1", passed="copies are equal, pieces are not, and nothing is sent.", cases=[
    (2, "two tensor-parallel ranks", 2, 1), (3, "three, another seed", 3, 7), (2, "two replicas", 1, 0),
    (4, "a mesh of two times two", 2, 1),
])
def draw_weights(note, answer, tp, seed):
    rank, n = dist.get_rank(), dist.get_world_size()
    place = {"dp_rank": rank // tp, "tp_rank": rank % tp}
    with record() as ledger:
        got = answer(dict(SHAPES), set(SPLIT), seed, **place)
    fits = isinstance(got, dict) and {k: tuple(getattr(v, "shape", ())) for k, v in got.items()} == SHAPES
    if not note.holds(fits, "odd", "the function returned not a tensor of each name in its shape."):
        return
    note.holds(len(ledger) == 0, "sent", "something was sent.")
    flat = torch.cat([got[name].flatten() for name in SHAPES]).float()
    off = abs(flat.std().item() - 0.02)
    note.holds(off < 0.004, "std", f"the standard deviation of all numbers is {flat.std():.3f}.")
    again = answer(dict(SHAPES), set(SPLIT), seed + 1, **place)
    note.holds(not any(torch.equal(got[k], again[k]) for k in SHAPES), "seed", f"seeds {seed} and {seed + 1} agree.")
    for one, other in (("up", "gate"), ("norm", "scale")):
        note.holds(not torch.equal(got[one], got[other]), "reseeded", f"{one} and {other} are equal.")
    everywhere = [torch.empty_like(flat) for _ in range(n)]
    dist.all_gather(everywhere, flat)
    for other, theirs in enumerate(everywhere):
        for name, part in zip(SHAPES, theirs.split([got[name].numel() for name in SHAPES]), strict=True):
            same, copies = torch.equal(part, got[name].flatten()), name not in SPLIT or other % tp == rank % tp
            who = f"{name} of rank {rank} (tp {rank % tp}) and rank {other} (tp {other % tp})"
            key = "pieces" if not copies else "whole" if name not in SPLIT else "replicas"
            what = f"{who} is {'the same' if same else 'different'}."
            if other != rank and not note.holds(same == copies, key, what):
                return


MISTAKES["draw_weights"] = {
    "pieces": ("Pieces of one matrix are equal, so tensor-parallel ranks will compute the same features for ever.",
            "1000 * (seed + 1) + tp_rank  ->  seed + 1"),
    "whole": ("What every rank has whole must start the same on all of them.",
            ["manual_seed(seed)  ->  manual_seed(seed + tp_rank)", "manual_seed(seed)  ->  manual_seed(seed + dp_rank)",
             "own if name in split else common  ->  own"]),
    "replicas": ("Data-parallel copies of the same piece differ. A rank's number in the whole job is not its place "
                 "among the tensor-parallel ranks.",
            "1000 * (seed + 1) + tp_rank  ->  1000 * (seed + 1) + tp_rank + 10 * dp_rank"),
    "reseeded": ("Two tensors of a rank are the same. A generator that is set back for each tensor draws the same "
                 "numbers again.",
            {"own if name in split else common":
             "torch.Generator().manual_seed(seed + (tp_rank + 1) * (name in split))"}),
    "std": ("The numbers are not as large as the docstring says.", "0.02 * torch.randn  ->  torch.randn"),
    "seed": ("Another seed must draw other weights, whole ones and pieces.",
            ["manual_seed(seed)  ->  manual_seed(0)", "1000 * (seed + 1) + tp_rank  ->  1000 + tp_rank"]),
    "sent": ("Nothing has to be sent: ranks that use the same seed in the same order draw the same.",
            {"return weights": "for name in sorted(shapes.keys() - split):\n"
             "    dist.broadcast(weights[name], src=0)\nreturn weights"}),
}
RIGHT["draw_weights"] = {
    "in float64": "0.02 * torch.randn(shape, generator=generator)  ->  torch.randn(shape, generator=generator) * 2e-2",
    "all pieces drawn": {
        "own = torch.Generator().manual_seed(1000 * (seed + 1) + tp_rank)":
        "own = torch.Generator().manual_seed(seed + 10**6)\nfor _ in range(tp_rank):\n"
        "    for name, shape in shapes.items():\n        torch.randn(shape, generator=own)",
    },
}


class Words(nn.Module):
    """Two layers over single tokens, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)
        for i, p in enumerate(self.parameters()):
            p.data = values(*p.shape, seed=i).double()
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(tokens)))


def batches(ranks: int, micro: int, lengths: str) -> list[list[tuple]]:
    """Micro-batches of each rank: documents of the lengths that the digits say, one after the other."""
    draw, found, number = torch.Generator().manual_seed(3), [], 0
    for _ in range(ranks):
        found.append([])
        for _ in range(micro):
            tokens, targets = torch.randint(7, (2, 2, 9), generator=draw)
            for row in targets:
                row[int(lengths[number % len(lengths)]) :] = PAD
                number += 1
            found[-1].append((tokens, targets))
    return found


@exercise("Exercise 2", passed="the gradient of one process to 1e-12.", cases=[
    (2, "one micro-batch, full documents", 1, "9"), (1, "two micro-batches on one rank", 2, "9231"),
    (2, "two micro-batches on each rank", 2, "99215193"),
    (3, "three micro-batches of different lengths", 3, "19385274"),
    Case(2, "a micro-batch in which nothing counts", (2, "90002199"), "empty"),
    Case(2, "a rank on which nothing counts", (2, "00009531"), "empty"),
])
def token_step(note, answer, micro, lengths):
    rank, n, model, truth = dist.get_rank(), dist.get_world_size(), Words(), Words()
    everything = batches(n, micro, lengths)
    tokens, targets = (torch.cat([pair[k] for one in everything for pair in one]) for k in (0, 1))
    right = F.cross_entropy(truth(tokens).flatten(0, 1), targets.flatten(), ignore_index=PAD)
    right.backward()
    with record() as ledger:
        loss = answer(model, everything[rank])
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    if not note.holds(not missing, "no-gradient", f"{', '.join(missing)} has no gradient."):
        return
    note.equal({k: p.grad for k, p in model.named_parameters()}, {k: p.grad for k, p in truth.named_parameters()},
               "the gradient")
    what = f"the loss is wrong.\n  expected  {right.item():.6f}\n  got       {float(loss):.6f}"
    note.holds(abs(float(loss) - right.item()) < 1e-5, "value", what, ("", round(float(loss), 5)))
    if n > 1:
        size = sum(p.nbytes for p in model.parameters())
        note.sent(ledger, carried=(size, size + 64), too_many_bytes="each-micro-batch")


DIVIDED = "part = each / total"
MISTAKES["token_step"] = {
    "micro": ("This is a mean of the means of micro-batches: tokens of short documents count more than others.",
            f"{DIVIDED}  ->  part = each / (targets != PAD).sum() / len(micro_batches) / dist.get_world_size()"),
    "rank": ("Each rank divides by its own tokens, and the mean of these means is taken: a rank with few tokens counts "
             "as much as one with many.",
            {"dist.all_reduce(total)": "total = total * dist.get_world_size()"}),
    "padding": ("Padding does not count, neither in the sum nor in the number of tokens.",
            "(targets != PAD).sum() for  ->  torch.tensor(targets.numel()) for"),
    "twice": ("It is right but for a factor: the number of ranks. Divided by the tokens of all ranks, gradients are "
              "added, not averaged.",
            [f"{DIVIDED}  ->  part = each / total / dist.get_world_size()",
             f"{DIVIDED}  ->  part = each / total * dist.get_world_size()"]),
    "not-summed": ("That is the gradient of this rank's tokens alone.", "dist.all_reduce(p.grad)  ->  pass"),
    "loss": ("The loss that is returned is not that of all ranks.", "dist.all_reduce(loss)  ->  pass"),
    "empty": ("Nothing may count in a micro-batch, or on a rank: its sum is 0, its mean would be NaN, and it still has "
              "to take part.",
            f"{DIVIDED}  ->  part = each / (targets != PAD).sum() * (targets != PAD).sum() / total"),
    "each-micro-batch": ("Gradients are sent for each micro-batch. They add up on the rank; send them at the end.",
            {"loss = loss + part.detach()": "loss = loss + part.detach()\nfor p in model.parameters():\n"
             "    dist.all_reduce(p.grad.clone())"}),
}
RIGHT["token_step"] = {
    "sums first": {DIVIDED: "part = each", "dist.all_reduce(p.grad)": "dist.all_reduce(p.grad)\np.grad /= total",
                   "return loss": "return loss / total"},
    "one flat tensor": {
        "for p in model.parameters():\n        dist.all_reduce(p.grad)\n    dist.all_reduce(loss)":
        "flat = torch.cat([loss[None], *(p.grad.flatten() for p in model.parameters())])\ndist.all_reduce(flat)\n"
        "loss, rest = flat[0], flat[1:]\nfor p in model.parameters():\n    p.grad.copy_(rest[: p.numel()].view_as(p))\n"
        "    rest = rest[p.numel() :]",
    },
}


def permute(p: torch.Tensor) -> None:
    p.copy_(p.roll(1, 0))


def one_bit(p: torch.Tensor) -> None:
    first = p.view(-1)[:1]
    first.copy_(torch.nextafter(first, first + 1))


def one_number(p: torch.Tensor) -> None:
    p.view(-1)[-1] += 0.5


CHANGES = {"": lambda p: None, "one number": one_number, "moved": permute, "one bit": one_bit}


@exercise("Exercise 3", passed="every drift is found, on every rank, with at most 300 bytes for each tensor.", cases=[
    (2, "equal replicas", {}), (2, "one number on the last rank", {"0.weight": "one number"}),
    (3, "one number on the last of three", {"0.bias": "one number", "2.weight": "one number"}),
    (2, "rows in another order", {"2.weight": "moved"}), (2, "one bit", {"0.weight": "one bit"}),
    (2, "a frozen layer", {"1.weight": "one number"}), (1, "one rank", {}),
])
def drifted(note, answer, changed):
    rank, n = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20, bias=False), nn.Linear(20, 50)).requires_grad_()
    model[1].requires_grad_(False).bfloat16()
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            p.copy_(values(*p.shape, seed=i))
            if rank == n - 1:
                CHANGES[changed.get(name, "")](p)
    before = [p.detach().clone() for p in model.parameters()]
    with record() as ledger:
        got = answer(model)
    got, expected = list(got) if isinstance(got, list | tuple | set) else got, sorted(changed)
    kept = all(map(torch.equal, before, model.parameters()))
    note.holds(kept, "changed", "the function has changed the model.")
    if not note.holds(isinstance(got, list), "odd", f"the function returned {got!r}."):
        return
    what = f"the list is wrong.\n  expected  {expected}\n  got       {got}"
    if not note.holds(sorted(got) == expected, "value", what, ("", sorted(got))):
        return
    note.talks(ledger, n)
    note.sent(ledger, carried=300 * len(before), too_many_bytes="weights")


MISTAKES["drifted"] = {
    "sum": ("Different numbers can have the same sum, or the same norm: rows that changed places, or changes that "
            "cancel. Use a checksum that depends on the place of each bit.",
            {"sums.append(zlib.crc32(numbers))": "sums.append(p.detach().double().sum().item())",
             "torch.tensor(sums)": "torch.tensor(sums, dtype=torch.float64)"}),
    "tolerance": ("A difference of one bit is a difference. Replicas that do the same are equal to the last one.",
            "numbers = p.detach().cpu()  ->  numbers = (1e3 * p.detach().cpu()).round()"),
    "frozen": ("Frozen parameters can differ, too: nobody updates them, and nobody mends them.",
            {"if not equal]": "if not equal and model.get_parameter(name).requires_grad]"}),
    "own-view": ("The list is not the same on every rank. A rank that compares itself with one other, or with the "
                 "largest, learns of its own difference only.",
            ["dist.all_reduce(low, op=dist.ReduceOp.MIN)  ->  pass",
             {"dist.all_reduce(low, op=dist.ReduceOp.MIN)": "dist.broadcast(high, src=0)",
              "dist.all_reduce(high, op=dist.ReduceOp.MAX)": "pass"}]),
    "weights": ("Far more is sent than one short checksum of each tensor. On a real model the tensors are a step's "
                "traffic or more.",
            {"low = torch.tensor(sums)": "for p in model.parameters():\n"
             "    dist.all_reduce(p.detach().clone())\nlow = torch.tensor(sums)"}),
    "changed": ("Looking must not change anything: an all-reduce works in place.",
            {"low = torch.tensor(sums)": "dist.broadcast(next(model.parameters()).detach(), src=0)\n"
             "next(model.parameters()).data.view(-1)[0] += 1\nlow = torch.tensor(sums)"}),
}
RIGHT["drifted"] = {
    "adler32": "zlib.crc32(numbers)  ->  zlib.adler32(numbers)",
    "gathered": {
        "high = low.clone()\n    dist.all_reduce(low, op=dist.ReduceOp.MIN)\n"
        "    dist.all_reduce(high, op=dist.ReduceOp.MAX)\n    same = (low == high).tolist()":
        "every = [torch.empty_like(low) for _ in range(dist.get_world_size())]\ndist.all_gather(every, low)\n"
        "same = [len(set(column)) == 1 for column in torch.stack(every).T.tolist()]",
    },
}
