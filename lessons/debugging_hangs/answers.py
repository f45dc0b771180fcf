"""The solutions of the exercises of lesson 14; what stands between the marks is what a learner writes."""

import hashlib
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist


def checked_all_reduce(tensor: torch.Tensor, op: dist.ReduceOp) -> None:
    """Reduce in place over all ranks, or raise ValueError("ranks [1, 2] differ") on all of them.

    tensor: any shape and dtype; where calls differ, also between the ranks.
    """
    ### BEGIN SOLUTION
    call = f"{op} {tensor.dtype} {tuple(tensor.shape)}"
    digest = hashlib.sha256(call.encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    calls = [bytes(one.tolist()) for one in theirs]
    usual = Counter(calls).most_common(1)[0][0]
    odd = [rank for rank, one in enumerate(calls) if one != usual]
    if odd:
        raise ValueError(f"ranks {odd} differ")
    dist.all_reduce(tensor, op=op)
    ### END SOLUTION


def skip_together(compute: Callable, apply: Callable, batches: list[torch.Tensor]) -> int:
    """Train on all batches; return how many were skipped.

    compute: batch -> gradient of this rank with the weights of now, which apply changes, float64;
        raises MemoryError if the batch does not fit. It sends nothing.
    apply: takes the mean of all ranks' gradients and updates the weights.
    batches: of this rank; all ranks have equally many.
    """
    ### BEGIN SOLUTION
    skipped = 0
    for batch in batches:
        full = torch.zeros(1)
        try:
            gradient = compute(batch)
        except MemoryError:
            full += 1
        dist.all_reduce(full, op=dist.ReduceOp.MAX)
        if full.item() > 0:
            skipped += 1
            continue
        dist.all_reduce(gradient)
        apply(gradient / dist.get_world_size())
    return skipped
    ### END SOLUTION


def diagnoses_and_cures() -> dict[int, tuple[str, int, str, dict[str, str]]]:
    """For patients 1 to 9: cause, rank, call, and the edit that heals it: old text -> new text."""
    ### BEGIN SOLUTION
    receive, send = "    dist.recv(other, src=peer)\n", "    dist.send(mine, dst=peer)\n"
    ahead = f"    sent = dist.isend(mine, dst=peer)\n{receive}    sent.wait()\n"
    longest = {"lengths[dist.get_rank()]": "max(lengths)"}
    full = 'raise MemoryError("a long batch")'
    take_part = "dist.all_reduce(torch.zeros(1))\n                continue"
    max_by_all = {"dist.ReduceOp.SUM": "dist.ReduceOp.MAX"}
    return {
        1: ("decision on a local value", 1, "reduce", {"reduce(loss, dst=0)": "all_reduce(loss)"}),
        2: ("one rank only", 0, "all_gather", {"if rank == 0:": "if True:"}),
        3: ("uneven batches", 0, "all_reduce", {"list(range(7))": "list(range(6))"}),
        4: ("error caught on one rank", 1, "all_reduce", {full: take_part}),
        5: ("generation of different lengths", 0, "all_gather", longest),
        6: ("both receive first", 0, "recv", {receive + send: ahead}),
        7: ("group rank for global rank", 1, "broadcast", {"src=0": "src=1"}),
        8: ("order of groups", 1, "all_reduce", {"[second, first] if": "[first, second] if"}),
        9: ("different reductions", 1, "all_reduce", max_by_all),
    }
    ### END SOLUTION


def second_ward() -> dict[int, tuple[str, int, str, dict[str, str]]]:
    """For patients 10 to 15: cause, rank, call, and the edit: old text -> new text."""
    ### BEGIN SOLUTION
    both = {"if rank == 0:": "if True:", "dist.isend, mine, 1)": "dist.isend, mine, 1 - rank)"}
    wrap = "model = torch.nn.parallel.DistributedDataParallel(layer, process_group=group)"
    used = {"return self.layer(x)": "return self.layer(x) + 0 * self.head(x)"}
    again = {"()\n    model(": f"()\n    {wrap}\n    model("}
    return {
        10: ("message without its other side", 1, "isend", both),
        11: ("expert without tokens", 1, "all_reduce", {"if expert in routed:": "if True:"}),
        12: ("unused parameters", 0, "backward", used),
        13: ("different roots", 2, "reduce", {"dst=rank // 2": "dst=0"}),
        14: ("seeds that differ", 1, "all_reduce", {"5 + dist.get_rank()": "5"}),
        15: ("group that is no more", 0, "backward", again),
    }
    ### END SOLUTION
