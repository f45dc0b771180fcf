"""The ward of lesson 17: three servers that went wrong, each as somebody reported. ``clinic()`` opens it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from . import hangs
from ._cases import Case, Cause, Evidence, Finding, Symptom
from ._hangs_lines import SAME_WAY
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


_SAME = {"on": SAME_WAY, "kind": "nothing"}
CAUSES = {
    "own clock": Cause("A rank decides by its own clock what all ranks must decide alike.",
                       {"on": "a condition on the clock of the rank", "kind": "another call", "answers": "none"}),
    "own choice": Cause("Each rank draws the next token for itself, and not all draw the same.",
                        {"on": "a condition on chance", "kind": "another call", "answers": "none"}),
    "own memory": Cause("Each rank counts for itself how many blocks there are, and one has fewer.",
                        {"on": SAME_WAY, "kind": "an error", "answers": "none"}),
    "block given away": Cause("A block is free although a request uses it, and another request writes into it.",
                              _SAME | {"answers": "quite another"}),
    "sums of a batch": Cause("In bf16 a sum depends on the batch, and so may a token that is nearly as likely.",
                             _SAME | {"answers": "the same up to such a token"}),
}


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

CASES = (
    hangs.case(
        drop_late, "own clock", 2, 6, causes=CAUSES, result="2 requests answered",
        facts={"values": "clock", "stands": "rank 0 line 8, rank 1 line 10", "record": "different",
               "differs": "collective #2 (default): rank 1 calls barrier, rank 0 calls all_reduce"},
        complaint="Requests that wait too long are dropped. Since then the server stands still under load.",
        why="b has waited 10 s by the clock of rank 1, and a little less by that of rank 0. Rank 0 computes its step.",
        rule="one rank decides who is dropped, and tells the others before the next step.",
        thread="https://github.com/sgl-project/sglang/issues/27221",
        report="with TP 8 each rank dropped requests by its own clock; within 80 s of overload all stood.",
    ),
    hangs.case(
        fill_cache, "own memory", 2, 12, causes=CAUSES, result="5 blocks filled",
        facts={"values": "cache", "stands": "rank 0 line 7, rank 1 line 6", "record": "different",
               "differs": "a rank failed: IndexError: index 5 is out of bounds for dimension 0 with size 5"},
        complaint="The server is fine in tests. Under load one rank ends with an index error, always the same one.",
        why="rank 0 counted six blocks and planned with them; rank 1 has memory for five.",
        rule="the number of blocks is the minimum over all ranks: one all-reduce at the start.",
        thread="https://github.com/GeeeekExplorer/nano-vllm/pull/275",
        report="2,111 blocks on rank 0, 2,055 on rank 1; the run crashed once rank 1 got a number beyond its own.",
    ),
    hangs.case(
        share_beginning, "block given away", 2, 2, causes=CAUSES, result=[10.0, 14.0],
        facts={"values": "none", "stands": "rank 0 ended, rank 1 ended", "record": "alike", "differs": "nothing"},
        complaint="No error, no hang. Some answers are nonsense, only when others with the same instructions hang up.",
        why="block 0 was b's too. It was given to c, which wrote into it, and b read what c had written.",
        rule="count the users of each block; it is free when the last one has left.",
        thread="https://github.com/sgl-project/sglang/issues/23392",
        report="cancellations under load changed answers of others, 15 times of 15; the thread suspects shared blocks.",
    ),
)


def clinic() -> Clinic:
    """Open the clinic with the three patients."""
    return hangs.clinic(CASES, CAUSES, EVIDENCE)
