"""The exercises on hangs: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from exercise_cases import ExerciseTests, hangs

from lessons.debugging_hangs import check as checks

pytestmark = pytest.mark.guard(120)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

# ------------------------------------------------------------------------------------------------ calls compared

CALL = 'call = f"{op} {tensor.dtype} {tuple(tensor.shape)}"'
RAISE = 'raise ValueError(f"ranks {odd} differ")'


def with_objects(tensor, op):
    calls = [None] * dist.get_world_size()
    dist.all_gather_object(calls, f"{op} {tensor.dtype} {tuple(tensor.shape)}")
    usual = Counter(calls).most_common(1)[0][0]
    odd = [rank for rank, one in enumerate(calls) if one != usual]
    if odd:
        raise ValueError(f"ranks {odd} differ")
    dist.all_reduce(tensor, op=op)


WRONG["checked_all_reduce"] = {
    "silent": [
        {CALL: 'call = f"{tensor.dtype} {tuple(tensor.shape)}"'}, {CALL: 'call = f"{op} {tuple(tensor.shape)}"'},
        {CALL: 'call = f"{op} {tensor.dtype} {tensor.nbytes}"'},
    ],
    "form": {RAISE: 'raise ValueError(f"ranks {odd} pass another call")'},
    "majority": ["usual = Counter(calls).most_common(1)[0][0]  ->  usual = calls[0]",
                 "usual = Counter(calls).most_common(1)[0][0]  ->  usual = calls[dist.get_rank()]"],
    "changed": {"if odd:": "if odd:\n    tensor.zero_()"},
    "false-alarm": [{CALL: 'call = f"{op} {tensor}"'}, "if one != usual  ->  if one == usual"],
    "hash": {"mine = torch.tensor(list(digest), dtype=torch.uint8)": "mine = torch.tensor([hash(call)])",
             "bytes(one.tolist())": "one.item()"},
    "not-reduced": {"dist.all_reduce(tensor, op=op)": "dist.all_reduce(tensor.clone(), op=op)"},
    "object": with_objects,
    "hang": hangs({"if odd:": "if odd and dist.get_rank() == 0:"}),
    "too-many-bytes": {"mine = torch.tensor(list(digest), dtype=torch.uint8)":
                       "mine = torch.tensor(list(digest) * 20, dtype=torch.uint8)"},
    "other-op": {"dist.all_reduce(tensor, op=op)": "dist.all_reduce(tensor)"},
    "error": 'call.encode()  ->  call',
}


def through_the_store(tensor, op):
    """No collective at all: the calls go through the store of the group."""
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"round/{dist.get_rank()}", 1)
    store.set(f"{number}/{dist.get_rank()}", f"{op} {tensor.dtype} {tuple(tensor.shape)}")
    calls = [store.get(f"{number}/{rank}") for rank in range(dist.get_world_size())]
    usual = max(calls, key=calls.count)
    odd = [rank for rank, one in enumerate(calls) if one != usual]
    if odd:
        raise ValueError(f"ranks {odd} differ")
    dist.all_reduce(tensor, op=op)


def as_one_row(tensor, op):
    """Characters in a row of fixed length, gathered into one tensor, and an asynchronous reduction."""
    text = f"{op}{tensor.dtype}{list(tensor.shape)}".ljust(96)[:96]
    n = dist.get_world_size()
    rows = torch.empty(n * 96, dtype=torch.uint8)
    dist.all_gather_into_tensor(rows, torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8))
    rows = [tuple(row) for row in rows.view(n, 96).tolist()]
    usual = max(rows, key=rows.count)
    if any(row != usual for row in rows):
        raise ValueError(f"ranks {[rank for rank in range(n) if rows[rank] != usual]} differ")
    dist.all_reduce(tensor, op=op, async_op=True).wait()


RIGHT["checked_all_reduce"] = {"store": through_the_store, "one row": as_one_row}

# ------------------------------------------------------------------------------------------------ a skip by all

AGREE = "dist.all_reduce(full, op=dist.ReduceOp.MAX)"


def gradient_and_flag(compute, apply, batches):
    """The flag travels with the gradient."""
    skipped = 0
    for batch in batches:
        try:
            both = torch.cat([compute(batch), torch.zeros(1, dtype=torch.float64)])
        except MemoryError:
            both = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
        dist.all_reduce(both)
        if both[-1] > 0:
            skipped += 1
        else:
            apply(both[:-1] / dist.get_world_size())
    return skipped


def all_ahead(compute, apply, batches):
    def computed(batch):
        try:
            return compute(batch)
        except MemoryError:
            return None

    gradients, skipped = [computed(batch) for batch in batches], 0
    for gradient in gradients:
        full = torch.tensor(float(gradient is None))
        dist.all_reduce(full)
        if full > 0:
            skipped += 1
        else:
            dist.all_reduce(gradient)
            apply(gradient / dist.get_world_size())
    return skipped


WRONG["skip_together"] = {
    "every-batch": "continue  ->  break",
    "local-skip": {"if full.item() > 0:": "if False:", "full += 1": "full += 1\ngradient = batch * 0"},
    "too-many-skips": {"if full.item() > 0:": "if skipped == 0:"},
    "out-of-step": {AGREE: "pass"},
    "mean": "apply(gradient / dist.get_world_size())  ->  apply(gradient)",
    "ahead": all_ahead,
    "count": ["return skipped  ->  return len(batches)", "return skipped  ->  return None"],
    "gradient-sent": {"skipped += 1": "dist.all_reduce(batch * 0)\nskipped += 1"},
    "too-many-calls": {AGREE: f"{AGREE}\n{AGREE}"},
    "swallowed": "except MemoryError:  ->  except Exception:",
}


def with_a_sum(compute, apply, batches):
    skipped, n = 0, dist.get_world_size()
    for batch in batches:
        gradient = None
        try:
            gradient = compute(batch)
        except MemoryError:
            pass
        flags = [torch.zeros(1, dtype=torch.uint8) for _ in range(n)]
        dist.all_gather(flags, torch.tensor([gradient is None], dtype=torch.uint8))
        if torch.cat(flags).any():
            skipped += 1
        else:
            dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
            apply(gradient.div(n))
    return skipped


RIGHT["skip_together"] = {
    "gather": with_a_sum,
    "minimum of done": {
        "full = torch.zeros(1)": "done = torch.ones(1)", "full += 1": "done -= 1",
        AGREE: "dist.all_reduce(done, op=dist.ReduceOp.MIN)", "if full.item() > 0:": "if not done.item():",
    },
}

# ------------------------------------------------------------------------------------------------ the clinic

WRONG["diagnoses_and_cures"] = {
    "missing": {"        9: (\"different reductions\", 1, \"all_reduce\", max_by_all),\n": ""},
    "form": {"\"reduce\", {\"reduce(loss, dst=0)\": \"all_reduce(loss)\"}": "\"reduce\""},
    "name": "\"decision on a local value\"  ->  \"a bad value\"",
    "diagnosis": ["\"decision on a local value\", 1,  ->  \"decision on a local value\", 0,",
                  "1: (\"decision on a local value\"  ->  1: (\"one rank only\"",
                  "\"different reductions\", 1,  ->  \"different reductions\", 0,"],
    "cure-form": "\"reduce(loss, dst=0)\"  ->  \"reduce(loss, dst=1)\"",
    "cure": "\"if True:\"  ->  \"if rank < 2:\"",
}
RIGHT["diagnoses_and_cures"] = {
    "all reduce zeros": {"[first, second] if": "(first, second) if"},
    "the other rank": {"6: (\"both receive first\", 0": "6: (\"both receive first\", 1",
                       "reductions\", 1,": "reductions\", 2,"},
}

WRONG["second_ward"] = {
    "missing": "        10: (  ->  16: (",
    "form": "\"isend\", both),  ->  \"isend\"),",
    "name": "\"message without its other side\"  ->  \"a bad message\"",
    "diagnosis": ["\"message without its other side\", 1,  ->  \"message without its other side\", 0,",
                  "\"message without its other side\"  ->  \"both receive first\""],
    "cure-form": "\"if rank == 0:\"  ->  \"if rank == 2:\"",
    "cure": "\"dist.isend, mine, 1 - rank)\"  ->  \"dist.isend, mine, 1)\"",
}
RIGHT["second_ward"] = {
    "find unused": {"used = {\"return self.layer(x)\": \"return self.layer(x) + 0 * self.head(x)\"}":
                    "used = {\"Parallel(Model())\": \"Parallel(Model(), find_unused_parameters=True)\"}"},
    "other ranks": {"\"unused parameters\", 0": "\"unused parameters\", 1",
                    "\"seeds that differ\", 1": "\"seeds that differ\", 0"},
}


class TestHangs(ExerciseTests):
    checks = checks
    WRONG, RIGHT = WRONG, RIGHT
