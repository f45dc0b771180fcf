"""What can be wrong in the team's program: one fault of each kind, drawn by a seed, as edits of its text."""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from typing import NamedTuple

from course_utils.check.edits import edited

from . import program

KINDS = ("hang", "silent", "slow")
RANKS, STEPS = 4, program.WINDOWS // program.BATCH  # on which a job runs, and how many it does
#: Kind -> cause -> what is put where, with {rank} and {window} to be drawn; hangs are modeled on lesson 14's clinic.
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
            "if {window} in mine[step * share :][:share]:\n    continue\nletters, loss = y",
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
        "another start": {"build_gpt(CONFIG, seed=0)": "build_gpt(CONFIG, seed=rank // 2)"},
    },
    "slow": {
        "an exchange for each micro-batch": {
            "loss += part.detach()":
            "loss += part.detach()\nseen = [p.grad.clone() for p in parameters]\nexchange(seen, *groups)",
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
            "if rank == {rank}:\n    right = (model(xs).argmax(-1) == ys).sum()\n(part * ranks).backward()",
        },
        "a barrier for each gradient": {"gradient.copy_(total)": "gradient.copy_(total)\ndist.barrier()"},
    },
}
#: Rewritten without harm: five of these are in each text, so that a diff shows more than the faults.
HARMLESS: Mapping[str, str] = {
    "for _ in range(ranks - 1):": "for _ in range(1, ranks):",
    "total, passing = total + arrived, arrived": "total += arrived\npassing = arrived",
    "for i in range(rank, number, ranks)]": "for i in range(number)[rank::ranks]]",
    "torch.stack(losses).double().sum()": "torch.stack(losses).sum(dtype=torch.float64)",
    "parameters = [*model.parameters()]":
    "torch.manual_seed(rank)\nparameters = [p for p in model.parameters() if p.requires_grad]",
    "BATCH // ranks": "BATCH // dist.get_world_size()",
    "(each * kept.flatten()).sum() / total": "each[kept.flatten()].sum() / total",
    "optimizer.zero_grad()": "optimizer.zero_grad(set_to_none=rank == 0)",
}


class Fault(NamedTuple):
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
    rank, found = draw.randrange(1, RANKS), {}
    where = {"{rank}": str(rank), "{window}": str(rank + draw.choice((0, 2)) * program.BATCH + 2 * RANKS)}
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
    """The program as it was left: rewritten in places, and with the faults of a seed."""
    program_text, faults = text(), drawn(seed)
    harmless = random.Random(seed).sample([*HARMLESS.items()], 5)
    for edits in (dict(harmless), *(faults[kind].edits for kind in kinds)):
        program_text = edited(program_text, edits)
    return program_text


def mended(program_text: str, edits: Mapping[str, str]) -> str:
    """The text with each old text replaced as it is by the new one; ValueError unless it stands there once."""
    for old, new in edits.items():
        if (count := program_text.count(old)) != 1:
            raise ValueError(f"{old!r} stands {count} times in the program; allowed are texts that stand once")
        program_text = program_text.replace(old, new)
    return program_text
