"""The ward of lesson 17: three servers that went wrong, each as somebody reported. ``clinic()`` opens it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from . import hangs
from ._cases import Case, Evidence, Finding, Symptom
from ._wards import Clinic


def drop_late():
    clock = torch.tensor(9.9995 + 0.001 * dist.get_rank())  # of this rank; two clocks never quite agree
    came, answers = {"a": 5.0, "b": 0.0}, 0
    for name in came:
        if clock - came[name] > 10.0:
            answers += 1  # "too late", without a step of the model
            continue
        dist.all_reduce(torch.ones(4))
        answers += 1
    dist.barrier()
    return f"{answers} requests answered"


def fill_cache():
    room = [6, 5][dist.get_rank()]  # blocks that fit into what this rank has free
    cache, count = torch.zeros(room, 2), torch.tensor(room)
    dist.broadcast(count, src=0)  # rank 0 plans, and the others take its block numbers
    for block in range(int(count)):
        cache[block] = 1.0
        dist.all_reduce(cache[block].clone())
    return f"{count} blocks filled"


def share_beginning():
    cache, free = torch.tensor([5.0, 6.0, 7.0, 0.0]), [3]
    tables = {"a": [0, 1], "b": [0, 2]}  # both begin with the tokens of block 0
    for block in tables.pop("a"):  # a has hung up
        free.insert(0, block)
    tables["c"] = [free.pop(0), free.pop(0)]
    cache[tables["c"]] = torch.tensor([1.0, 2.0])
    text = cache[tables["b"]]
    dist.all_reduce(text)  # each rank has half of the heads
    return text.tolist()


def _alone(case: Case, symptom: Callable[[], Symptom]) -> Finding:
    results = symptom().results
    if results is None:
        return Finding("there is no answer to compare", {"answers": "none"})
    same = all(result == case.result for result in results)
    return Finding(f"alone {case.result}, here {results[0]}", {"answers": "the same" if same else "quite another"})


EVIDENCE = {name: hangs.EVIDENCE[name] for name in ("stacks", "verify", "flight record", "fingerprint", "prints")} | {
    "alone": Evidence("the same request once more, when nobody else asks", 5, _alone,
                      {"answers": "the answer, beside what the request gets alone"}),
}

CAUSES, CASES = hangs.read("servers", sys.modules[__name__])


def clinic() -> Clinic:
    """Open the clinic with the three patients."""
    return hangs.clinic(CASES, CAUSES, EVIDENCE)
