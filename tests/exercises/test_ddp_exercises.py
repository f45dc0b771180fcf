"""The exercises on data parallelism: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercise_cases import ExerciseTests, hangs

from lessons.ddp import check as ddp

pytestmark = pytest.mark.guard(60)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

BROADCAST = "dist.broadcast(tensor.detach(), src=0)"
BEYOND_THE_LEDGER = "dist.group.WORLD._get_backend(torch.device('cpu')).allreduce"
UNTIED = """for layer in module.modules():
    for name, p in list(layer.named_parameters(recurse=False)):
        setattr(layer, name, torch.nn.Parameter(p.detach(), p.requires_grad))
"""
WRONG_START = {
    "no-broadcast": f"{BROADCAST}  ->  pass",
    "buffers": "(*module.parameters(), *module.buffers())  ->  module.parameters()",
    "frozen-broadcast": "(*module.parameters(),  ->  (*(p for p in module.parameters() if p.requires_grad),",
    "replaced": f"for tensor in (  ->  {UNTIED}for tensor in (",
}

# ------------------------------------------------------------------------------------------------ data parallel

AVERAGED = """dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()"""
ONE_FLAT_TENSOR = """trained = [p for p in module.parameters() if p.requires_grad]
flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])
dist.all_reduce(flat)
for p, piece in zip(trained, (flat / dist.get_world_size()).split([p.numel() for p in trained]), strict=True):
    p.grad = piece.view_as(p)
return
for p in module.parameters():"""

WRONG["data_parallel"] = {
    **WRONG_START,
    "not-distributed": {BROADCAST: "pass", "return finish": "return lambda: None"},
    "no-broadcast": [
        WRONG_START["no-broadcast"],
        f"{BROADCAST}  ->  dist.all_reduce(tensor.detach())\ntensor.detach().div_(dist.get_world_size())",
    ],
    "finish": "return finish  ->  finish()",
    "sum": "p.grad /= dist.get_world_size()  ->  pass",
    "divided-twice": "p.grad /= dist.get_world_size()  ->  p.grad /= dist.get_world_size() ** 2",
    "own-gradient": "return finish  ->  return lambda: None",
    "frozen": [
        "if p.requires_grad:  ->  if True:",
        {"if p.requires_grad:": "if True:", "if p.grad is None:": "if p.grad is None and p.requires_grad:"},
    ],
    "tied": [
        "for p in module.parameters():  ->  for _, p in module.named_parameters(remove_duplicate=False):",
        "p.grad /= dist.get_world_size()  ->  "
        "for _, q in module.named_parameters(remove_duplicate=False):\n    p.grad /= dist.get_world_size() ** (p is q)",
    ],
    "unused": [
        "p.grad = torch.zeros_like(p)  ->  continue",
        "p.grad = torch.zeros_like(p)  ->  pass",
        "p.grad = torch.zeros_like(p)  ->  dist.all_reduce(torch.zeros_like(p))\ncontinue",
    ],
    "leftover": "def finish():  ->  done = []\n\ndef finish():\n    if done:\n        return\n    done.append(True)",
    "float32": {"dist.all_reduce(p.grad)": "g = p.grad.float()\ndist.all_reduce(g)\np.grad = g.double()"},
    "too-many-bytes": {
        AVERAGED: "for t in (p.grad, p.detach()):\n    dist.all_reduce(t)\n    t /= dist.get_world_size()"
    },
    "too-few-bytes": f"dist.all_reduce(p.grad)  ->  {BEYOND_THE_LEDGER}([p.grad]).wait()",
    "other-calls": "dist.all_reduce(p.grad)  ->  dist.reduce(p.grad, dst=0)\ndist.broadcast(p.grad, src=0)",
    "only-two-ranks": "p.grad /= dist.get_world_size()  ->  p.grad /= min(2, dist.get_world_size())",
}
RIGHT["data_parallel"] = {
    "functional collectives": {
        AVERAGED: "import torch.distributed._functional_collectives as functional\n\n"
        "p.grad = functional.wait_tensor(functional.all_reduce(p.grad, 'avg', dist.group.WORLD))"
    },
    "mean taken by the library": {AVERAGED: "dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)"},
    "divided before": {AVERAGED: "p.grad /= dist.get_world_size()\ndist.all_reduce(p.grad)"},
    "state_dict, a tied weight twice": "(*module.parameters(), *module.buffers())  ->  module.state_dict().values()",
    "gradients replaced": {AVERAGED: "g = p.grad / dist.get_world_size()\ndist.all_reduce(g)\np.grad = g"},
    "one flat tensor": f"for p in module.parameters():  ->  {ONE_FLAT_TENSOR}",
}

# ------------------------------------------------------------------------------------------------ buckets

SIZE = "sum(q.nbytes for q in bucket) + p.nbytes"
WRONG["in_buckets"] = {
    "lists": "return buckets  ->  return [[p.nbytes for p in bucket] for bucket in buckets]",
    "lost": "return buckets  ->  return buckets[:-1]",
    "order": "in parameters:  ->  in sorted(parameters, key=lambda p: p.nbytes):",
    "too-large": f"{SIZE} > bucket_bytes  ->  sum(q.nbytes for q in bucket) >= bucket_bytes",
    "elements": [
        f"{SIZE}  ->  sum(q.numel() for q in bucket) + p.numel()",
        f"{SIZE}  ->  8 * sum(q.numel() for q in [*bucket, p])",
    ],
    "storage": f"{SIZE}  ->  sum(q.untyped_storage().nbytes() for q in [*bucket, p])",
    "large-alone": [
        "bucket = filling.get(p.dtype)  ->  "
        "bucket = filling.setdefault(p.dtype, [])\nif not buckets:\n    buckets.append(bucket)",
        "> bucket_bytes  ->  > bucket_bytes >= p.nbytes",
    ],
    "too-small": "> bucket_bytes  ->  >= bucket_bytes",
    "dtype": {"filling.get(p.dtype)": "filling.get(0)", "filling[p.dtype]": "filling[0]"},
    "input-changed": "return buckets  ->  parameters.clear()\nreturn buckets",
    "error": "return buckets  ->  return [buckets[i] + buckets[i + 1] for i in range(len(buckets))]",
}


def one_bucket_at_a_time(parameters, bucket_bytes):
    buckets, room = [], 0
    for p in parameters:
        if not buckets or p.nbytes > room or p.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(p)
        room -= p.nbytes
    return buckets


RIGHT["in_buckets"] = {
    "a new bucket for another dtype": one_bucket_at_a_time,
    "tuples": "return buckets  ->  return tuple(map(tuple, buckets))",
    "itemsize": f"{SIZE}  ->  sum(q.numel() * q.itemsize for q in [*bucket, p])",
}

# ------------------------------------------------------------------------------------------------ bucketed, overlapped

TRAINED = "[p for p in module.parameters() if p.requires_grad]"
SEND = "request = dist.all_reduce(flat, async_op=True)"
WRONG_BUCKETS = {
    **WRONG_START,
    "sum": " / dist.get_world_size()  ->  ",
    "divided-twice": " / dist.get_world_size()  ->   / dist.get_world_size() ** 2",
    "own-gradient": "p.grad = piece.view_as(p)  ->  pass",
    "write-back": {
        "in zip(bucket, ": "in zip(bucket[::-1], ",
        "flat.split([p.numel() for p in bucket])": "flat.split([p.numel() for p in bucket[::-1]])",
    },
    "frozen": f"{TRAINED}  ->  list(module.parameters())",
    "tied": f"{TRAINED}  ->  [p for _, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]",
    "unused": "p.grad = piece.view_as(p)  ->  if p.grad is not None:\n    p.grad.copy_(piece.view_as(p))",
    "float32": {"(flat, async": "(flat := flat.float(), async", "= piece.view_as(p)": "= piece.view_as(p).double()"},
    "too-many-bytes": "request.wait()  ->  request.wait()\ndist.all_reduce(flat.clone())",
    "too-few-bytes": f"{SEND}  ->  request = {BEYOND_THE_LEDGER}([flat])",
    "other-calls": {
        SEND: SEND.replace("all_reduce(flat", "reduce(flat, 0"),
        "wait()": "wait()\ndist.broadcast(flat, 0)",
    },
    "one-per-parameter": ", bucket_bytes)  ->  , 1)",
    "too-many-messages": ", bucket_bytes)  ->  , min(340, bucket_bytes))",
    "too-large": ", bucket_bytes)  ->  , 10**9)",
}

REDUCED = "[end() for end in [start_bucket(bucket) for bucket in buckets]]"
WRONG["bucketed"] = {
    **WRONG_BUCKETS,
    "not-distributed": {BROADCAST: "pass", REDUCED: "None"},
    "unused": [
        WRONG_BUCKETS["unused"],
        f"{REDUCED}  ->  "
        "[start_bucket(some)() for bucket in buckets if (some := [p for p in bucket if p.grad is not None])]",
    ],
    "finish": f"return lambda: {REDUCED}  ->  return buckets",
    "leftover": {
        "(bucket: list[nn.Parameter])": "(bucket, kept={})",
        "flat = torch.cat(": "flat = kept[bucket[0]] = kept[bucket[0]] if bucket[0] in kept else torch.cat(",
    },
}
PERSISTENT = """flats = [torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype) for bucket in buckets]

def finish():
    for bucket, flat in zip(buckets, flats, strict=True):
        for p, view in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            view.copy_(torch.zeros_like(view) if p.grad is None else p.grad.flatten())
            p.grad = view.view_as(p)
        dist.all_reduce(flat)
        flat /= dist.get_world_size()

return finish"""
RIGHT["bucketed"] = {
    "views of flat tensors that stay": f"return lambda: {REDUCED}  ->  {PERSISTENT}",
    "overlapped": f"return lambda: {REDUCED}  ->  return overlapped(module, bucket_bytes)",
    "filled in forward order": "trained[::-1]  ->  trained",
    "one after the other": f"{REDUCED}  ->  [start_bucket(bucket)() for bucket in buckets]",
    "copied back": "p.grad = piece.view_as(p)  ->  p.grad = torch.zeros_like(p)\np.grad.copy_(piece.view_as(p))",
}

HOOK = "p.register_post_accumulate_grad_hook(arrive)"
START_IN_ORDER = """while len(under_way) < len(buckets) and arrived.issuperset(buckets[len(under_way)]):
            under_way.append(start_bucket(buckets[len(under_way)]))"""
START_WHEN_COMPLETE = """for i, bucket in enumerate(buckets):
    if i not in begun and arrived.issuperset(bucket):
        begun.add(i)
        under_way.append(start_bucket(bucket))"""
WRONG["overlapped"] = {
    **WRONG_BUCKETS,
    "not-distributed": {BROADCAST: "pass", HOOK: "pass", "return finish": "return lambda: None"},
    "finish": "return finish  ->  pass",
    "unused": [WRONG_BUCKETS["unused"], "under_way.append(start_bucket(bucket))  ->  break"],
    "order": {
        "arrived, under_way = set(), []": "arrived, under_way, begun = set(), [], set()",
        START_IN_ORDER: START_WHEN_COMPLETE,
        "in buckets[len(under_way) :]": "in [b for i, b in enumerate(buckets) if i not in begun]",
        "arrived.clear()": "arrived.clear()\nbegun.clear()",
    },
    "leftover": "under_way.clear()  ->  pass",
    "too-early": [
        f"{HOOK}  ->  p.register_hook(lambda gradient, p=p: arrive(p))",
        "arrived.issuperset(  ->  arrived.intersection(",
    ],
    "after-backward": f"{HOOK}  ->  pass",
    "starts-late": "arrived.issuperset(buckets[len(under_way)])  ->  len(arrived) == len(trained)",
    "waits-in-hook": {SEND: "dist.all_reduce(flat)", "request.wait()": "pass"},
}
RIGHT["overlapped"] = {
    "waits in threads": {
        "for end in under_way:\n            end()": "from threading import Thread\n\n"
        "threads = [Thread(target=end) for end in under_way]\nfor thread in threads:\n    thread.start()\n"
        "for thread in threads:\n    thread.join()"
    },
    "futures": "request.wait()  ->  request.get_future().wait()",
    "divided in the end": {" / dist.get_world_size()": "", "flat.split(": "(flat / dist.get_world_size()).split("},
    "last started, first ended": "for end in under_way:  ->  for end in under_way[::-1]:",
}

# ------------------------------------------------------------------------------------------------ accumulation

SCALED = " * len(x) / samples"
ALL_BUT_THE_LAST = """with model.no_sync():
        for x, y in batches[:-1]:
            add(x, y)"""
LAST = "add(*batches[-1])"
WRONG["accumulate"] = {
    "every-micro-batch": "with model.no_sync():  ->  if True:",
    "forward-outside": {
        ALL_BUT_THE_LAST: "for x, y in batches[:-1]:\n"
        f"    loss = F.mse_loss(model(x), y){SCALED}\n    with model.no_sync():\n        loss.backward()"
    },
    "never": f"{LAST}  ->  with model.no_sync():\n    {LAST}",
    "not-scaled": f"{SCALED}  ->  ",
    "mean-of-means": f"{SCALED}  ->  / len(batches)",
    "divided-twice": "/ samples  ->  / samples / dist.get_world_size()",
    "one-batch": {ALL_BUT_THE_LAST: "", LAST: "add(*map(torch.cat, zip(*batches, strict=True)))"},
    "all-graphs": {ALL_BUT_THE_LAST: "", LAST: f"sum(F.mse_loss(model(x), y){SCALED} for x, y in batches).backward()"},
    "only-last": f"{LAST}  ->  model.zero_grad()\n{LAST}",
    "one-micro-batch": "batches[:-1]  ->  [*batches[:-2], batches[-2]]",
    "too-many-bytes": f"{LAST}  ->  {LAST}\np = next(model.parameters())\n"
    "dist.all_reduce(p.grad)\np.grad /= dist.get_world_size()",
}
RIGHT["accumulate"] = {
    "without no_sync, with as few bytes": {
        "model(x)": "model.module(x)",
        "/ samples": "/ samples / dist.get_world_size()",
        "with model.no_sync():": "if True:",
        LAST: f"{LAST}\nfor p in model.parameters():\n    dist.all_reduce(p.grad)",
    },
    "past DDP but for the last": {
        ALL_BUT_THE_LAST: f"for x, y in batches[:-1]:\n    (F.mse_loss(model.module(x), y){SCALED}).backward()"
    },
    "sum of squares": f"F.mse_loss(model(x), y){SCALED}  ->  (model(x) - y).square().sum() / y.shape[1] / samples",
    "a flag in place of no_sync": {
        "with model.no_sync():": "model.require_backward_grad_sync = False\nif True:",
        LAST: f"model.require_backward_grad_sync = True\n{LAST}",
    },
    "predictions without a graph before": f"{ALL_BUT_THE_LAST.splitlines()[0]}  ->  "
    "with torch.no_grad():\n    [model.module(x) for x, _ in batches]\nwith model.no_sync():",
}

# ------------------------------------------------------------------------------------------------ sampler

SHUFFLED = "torch.randperm(samples, generator=generator).tolist()"
DEALT = "return left[rank::ranks]"
PADDED = """while missing > 0:
        left += order[:missing]
        missing -= samples"""
WRONG["epoch_indices"] = {
    "list": f"{DEALT}  ->  return torch.tensor(left[rank::ranks])",
    "no-padding": "while missing > 0:  ->  while False:",
    "cut": "missing = -len(left) % ranks  ->  missing, left = 0, left[: len(left) // ranks * ranks]",
    "padding": "+= order[:missing]  ->  += left[-1:] * missing",
    "short": ["while missing > 0:  ->  if True:", {PADDED: "left += (order * 3)[:missing]"}],
    "overlap": f"{DEALT}  ->  return left",
    "blocks": f"{DEALT}  ->  return left[rank * len(left) // ranks : (rank + 1) * len(left) // ranks]",
    "no-shuffle": f"{SHUFFLED}  ->  list(range(samples))",
    "no-epoch": "seed + epoch  ->  seed",
    "no-seed": "seed + epoch  ->  epoch",
    "rank-seed": ["seed + epoch  ->  seed + epoch + rank", "seed + epoch  ->  seed + rank"],
    "global-generator": {
        "generator = torch.Generator().manual_seed(": "torch.manual_seed(",
        SHUFFLED: "torch.randperm(samples).tolist()",
    },
    "not-resumed": "order[done:]  ->  order[:]",
    "per-rank": [
        {"order[done:]": "order[:]", DEALT: f"{DEALT}[done:]"},
        {"order[done:]": "order[:]", DEALT: f"{DEALT}[done // ranks :]"},
    ],
    "shuffled-again": [
        {
            SHUFFLED: "[done + i for i in torch.randperm(samples - done, generator=generator).tolist()]",
            "[done:]": "[:]",
        },
        "left = order[done:]  ->  left = order[done:]\nif done:\n    generator.manual_seed(seed + epoch)\n"
        "    left = [left[i] for i in torch.randperm(len(left), generator=generator).tolist()]",
    ],
    "resumed-uneven": {"order[done:]": "order[:]", DEALT: "return left[done:][rank::ranks]"},
    "resumed-padding": "order[:missing]  ->  order[done:][:missing]",
    "error": f"{DEALT}  ->  return [left[i] for i in range(rank, len(left) + ranks, ranks)]",
}
RIGHT["epoch_indices"] = {
    "whole numbers of NumPy": f"{DEALT}  ->  import numpy as np\n\nreturn list(np.array(left)[rank::ranks])",
    "a tuple": f"{DEALT}  ->  return tuple(left[rank::ranks])",
    "a cycle": {PADDED: "from itertools import cycle, islice\n\nleft += islice(cycle(order), missing)"},
    "the order as often as there are ranks": {PADDED: "left += (order * ranks)[:missing]"},
}

# ------------------------------------------------------------------------------------------------ uneven inputs

CLEARED = "p.grad = torch.zeros_like(p)"
ONE_EACH = {"samples = len(x)": "samples = 1"}
MEAN = "flat[:-1] / flat[-1]"
TOGETHER = """flat = torch.cat([*(p.grad.flatten() for p in parameters), count])
        dist.all_reduce(flat)
        mean = flat[:-1] / flat[-1]
        for p, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            p.grad = piece.view_as(p)"""
WRONG["uneven_epoch"] = {
    "not-distributed": {"dist.all_reduce(steps, op=dist.ReduceOp.MAX)": "pass", "dist.all_reduce(flat)": "pass"},
    "hang": hangs("dist.all_reduce(steps, op=dist.ReduceOp.MAX)  ->  pass"),
    "mean-of-means": ONE_EACH,
    "divided-by-all": ONE_EACH | {MEAN: "flat[:-1] / dist.get_world_size()"},
    "sum": [f"{MEAN}  ->  flat[:-1]", ONE_EACH | {MEAN: "flat[:-1]"}],
    "stops-early": "ReduceOp.MAX  ->  ReduceOp.MIN",
    "no-samples": "range(int(steps))  ->  range(int(steps) + 1)",
    "ranks-differ": "optimizer.step()  ->  if step < len(batches):\n    optimizer.step()",
    "leftover": [
        f"{CLEARED}  ->  {CLEARED} if step == 0 else p.grad",
        f"{CLEARED}  ->  {CLEARED} if step == 0 or step < len(batches) else p.grad",
    ],
    "too-many-bytes": "dist.all_reduce(flat)  ->  dist.all_reduce(flat)\ndist.all_reduce(flat[:3].clone())",
    "gathers-everything": {
        "dist.all_reduce(flat)": "parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]\n"
        "dist.all_gather(parts, flat)\nflat = sum(parts)"
    },
}


def asks_in_every_step_whether_anybody_goes_on(module, optimizer, batches):
    step = 0
    while True:
        x, y = batches[step] if step < len(batches) else (torch.empty(0, 5), torch.empty(0, 3))
        samples = torch.tensor(float(len(x)), dtype=torch.float64)
        dist.all_reduce(samples)
        if not samples:
            return
        module.zero_grad()
        (F.mse_loss(module(x.double()), y.double(), reduction="sum") / 3 / samples).backward()
        for p in module.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        step += 1


RIGHT["uneven_epoch"] = {
    "asks in every step whether anybody goes on": asks_in_every_step_whether_anybody_goes_on,
    "every parameter by itself": {
        TOGETHER: "dist.all_reduce(count)\nfor p in parameters:\n    dist.all_reduce(p.grad)\n    p.grad /= count"
    },
}


class TestDataParallelism(ExerciseTests):
    checks, WRONG, RIGHT = ddp, WRONG, RIGHT

    def test_refusal_says_where_one_process_and_the_rank_part(self):
        text = str(self.refusal("data_parallel", self.wrong("data_parallel", "sum")))
        assert text.startswith("Exercise 1, 2 ranks, a plain model, rank 0: step 1: the gradient of embedding.weight")
        assert re.search(r"one process  shape \(8, 6\): .*\n  this rank    shape \(8, 6\): ", text)
