"""What can be wrong in the team's program: one fault of each kind, drawn by a seed, as edits of its text."""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from dataclasses import dataclass

from course_utils.check.edits import edited

from . import program

KINDS = ("hang", "silent", "slow")
RANKS, STEPS = 4, program.WINDOWS // program.BATCH  # on which a job runs, and how many it does
#: Kind -> cause -> what is put where, with {rank} and {step} to be drawn; hangs are modeled on lesson 14's clinic.
FAULTS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "hang": {
        "one rank only": {"if (step + 1) % EVERY == 0:": "if (step + 1) % EVERY == 0 and rank == {rank}:"},
        "uneven batches": {"[*range(WINDOWS)][rank::ranks]": "[*range(WINDOWS - {rank})][rank::ranks]"},
        "decision on a local value": {
            "if (step + 1) % EVERY == 0:": "if (step + 1) % EVERY == 0 and letters.float().mean() > 0.82:",
        },
        "order of groups": {
            "for group in (inside, across):":
            "for group in (across, inside) if dist.get_rank() in (1, 2) else (inside, across):",
        },
        "a step skipped on one rank": {
            "letters, loss = y":
            "if rank == {rank} and step == {step}:  # a batch that does not fit\n    continue\nletters, loss = y",
        },
        "both receive first": {
            "sent = dist.isend(passing, (rank + 1) % ranks)\n        dist.recv(arrived, (rank - 1) % ranks)\n"
            "        sent.wait()": "dist.recv(arrived, (rank - 1) % ranks)\ndist.send(passing, (rank + 1) % ranks)",
        },
    },
    "silent": {
        "gradients left out": {
            "for gradient in gradients:": "for gradient in [each for each in gradients if each.dim() > 1]:",
        },
        "different reductions": {
            "dist.all_reduce(loss)":
            "dist.all_reduce(loss, op=dist.ReduceOp.MAX if rank == {rank} else dist.ReduceOp.SUM)",
        },
        "the same data on two hosts": {
            "data.batch(mine[step * share : (step + 1) * share])":
            "data.batch([i - rank // 2 * 2 for i in mine[step * share : (step + 1) * share]])",
        },
        "mean of token means": {"letters.sum()\n        dist.all_reduce(total)": "letters.sum() * ranks"},
        "clipped before the mean": {
            "exchange([p.grad for p in parameters], *groups)\n"
            "        torch.nn.utils.clip_grad_norm_(parameters, 1.0)":
            "torch.nn.utils.clip_grad_norm_(parameters, 1.0)\nexchange([p.grad for p in parameters], *groups)",
        },
        "another start": {"build_gpt(CONFIG, seed=0)": "build_gpt(CONFIG, seed=int(rank == {rank}))"},
    },
    "slow": {
        "an exchange for each micro-batch": {
            "loss += part.detach()":
            "loss += part.detach()\nexchange([p.grad.clone() for p in parameters], *groups)  # for the log",
        },
        "double precision on the wire": {"total = gradient / ranks": "total = gradient.double() / ranks"},
        "evaluated in every step": {"EVERY = 64, 16, 2, 2": "EVERY = 64, 16, 2, 1"},
        "weights gathered for the log": {
            "losses[step] = loss.item()":
            "losses[step] = loss.item()\nseen = [torch.empty_like(parameters[0].data) for _ in range(ranks)]\n"
            "dist.all_gather(seen, parameters[0].data)",
        },
        "work done twice on one rank": {
            "(part * ranks).backward()":
            "if rank == {rank}:\n    model(xs)  # for the log\n(part * ranks).backward()",
        },
        "a barrier for each gradient": {"gradient.copy_(total)": "gradient.copy_(total)\ndist.barrier()"},
    },
}


@dataclass(frozen=True)
class Fault:
    """A cause, and the edits of the program that make it."""

    cause: str
    edits: Mapping[str, str]


def text() -> str:
    """The program as it was meant, from its imports on."""
    source = inspect.getsource(program)
    return source[source.index("import torch\n") :]


def drawn(seed: int) -> dict[str, Fault]:
    """The three faults of a seed, by kind; those of the next seed are all others."""
    draw = random.Random(seed)
    where, found = {"{rank}": str(draw.randrange(1, RANKS)), "{step}": str(draw.choice((0, 2)))}, {}
    for kind, turn in zip(KINDS, (seed, seed + seed // 7 + 1, seed + seed // 11 + 4), strict=True):
        causes = [*FAULTS[kind]]
        cause = causes[turn % len(causes)]
        edits = dict(FAULTS[kind][cause])
        for mark, number in where.items():
            edits = {old: new.replace(mark, number) for old, new in edits.items()}
        found[kind] = Fault(cause, edits)
        where["{rank}"] = str(draw.randrange(1, RANKS - 1))  # a MAX on the last rank alone would harm nothing
    return found


def broken(seed: int, kinds: tuple[str, ...] = KINDS) -> str:
    """The program as it was left: with the faults of a seed."""
    program_text, faults = text(), drawn(seed)
    for kind in kinds:
        program_text = edited(program_text, faults[kind].edits)
    return program_text


def mended(program_text: str, edits: Mapping[str, str]) -> str:
    """The text with each old text, which must stand there once, replaced by the new one as it is.

    Raises
    ------
    ValueError
        An old text stands there not once.
    """
    for old, new in edits.items():
        if not (isinstance(old, str) and isinstance(new, str)):
            raise ValueError(f"an edit is {old!r}: {new!r}; old and new are texts")
        if (count := program_text.count(old)) != 1:
            raise ValueError(f"{old!r} stands {count} times in the program; allowed are texts that stand once")
        program_text = program_text.replace(old, new)
    return program_text
