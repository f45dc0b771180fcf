"""The slow program of the exercises on profiling: each fault that is left is named, and other right answers pass."""

from __future__ import annotations

import ast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercise_cases import ExerciseTests, hangs
from torch.nn.parallel import DistributedDataParallel

from lessons.profiling import check as profiling
from lessons.profiling import program as profiling_program

pytestmark = pytest.mark.guard(90)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

MINE = "mine = [prepare(text) for text in texts[rank::world_size]]"
LOOP = "for x, y in mine:"
DETACHED = "losses[-1] += part.detach()"
STEP = "optimizer.step()"
RETURN = "return all_losses.tolist()"
FLAT = "dist.all_reduce(flat)"
SAVED = """if rank == 0:
        torch.save(model.state_dict(), f"{folder}/rank0.pt")"""
WRITE = 'torch.save(model.state_dict(), f"{folder}/rank{rank}.pt")'


def all_of_it(model, texts, steps, prepare, folder):
    """Every rank computes the whole batch."""
    data = [prepare(text) for text in texts]
    lines = sum(len(x) for x, _ in data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        parts = [F.mse_loss(model(x), y, reduction="sum") / lines for x, y in data]
        for part in parts:
            part.backward()
        losses.append(sum(part.detach() for part in parts))
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), f"{folder}/rank0.pt")
    return [loss.item() for loss in losses]


WRONG["speed_up"] = {
    "many-collectives": [
        profiling_program.slow,
        f"{FLAT}  ->  for gradient in gradients:\n    dist.all_reduce(gradient)\n"
        "flat = torch.nn.utils.parameters_to_vector(gradients)",
    ],
    "prepare": {MINE: "mine = texts[rank::world_size]", LOOP: "for text in mine:\n    x, y = prepare(text)"},
    "saves": [
        {SAVED: "", STEP: f"{STEP}\n{WRITE}"},
        {SAVED: WRITE},
    ],
    "saves-each-step": {SAVED: "", STEP: f"{STEP}\nif rank == 0:\n    {WRITE}"},
    "unbalanced": "texts[rank::world_size]  ->  texts[2 * rank : 2 * rank + 2]",
    "copies": [
        f"{LOOP}  ->  {LOOP}\n    x = x.clone().double().float()",
        f"{LOOP}  ->  {LOOP}\n    x = x.clone()",
    ],
    "reads": [
        f"{DETACHED}  ->  losses[-1] += part.item()",
        f"{STEP}  ->  {STEP}\nlosses[-1].item()",
    ],
    "prints": [
        f'{STEP}  ->  {STEP}\nprint(f"rank {{rank}}, step {{len(losses)}}")',
        f'{STEP}  ->  {STEP}\nif rank == 0:\n    print(f"step {{len(losses)}}\\nlearning goes on")',
    ],
    "alone": all_of_it,
    "form": [f"{RETURN}  ->  return", f"{RETURN}  ->  {RETURN}[:3]"],
    "losses": [
        "dist.all_reduce(all_losses)  ->  pass",
        f"{FLAT}  ->  {FLAT}\nflat /= world_size",
        '"sum") / lines  ->  "mean")',
    ],
    "weights": f"{STEP}  ->  if len(losses) < steps:\n    {STEP}",
    "no-file": [{SAVED: ""}, "{folder}/rank0.pt  ->  {folder}/rank1.pt"],
    "old-file": {SAVED: "", STEP: f"if rank == 0 and len(losses) == steps:\n    {WRITE}\n{STEP}"},
    "hang": hangs("dist.all_reduce(all_losses)  ->  if rank == 0:\n    dist.all_reduce(all_losses)"),
}


def with_ddp(model, texts, steps, prepare, folder):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = (torch.cat(parts) for parts in zip(*map(prepare, texts[rank::world_size]), strict=True))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = torch.zeros(steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(wrapped(x), y)  # ranks have as many lines each
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach() / world_size
    dist.all_reduce(losses)
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/rank0.pt")
    return losses


def bucket_of_views(model, texts, steps, prepare, folder):
    """Gradients are views of one tensor from the start; each step's loss travels beside them; rows are dealt out."""
    rank = dist.get_rank()
    x, y = (torch.cat(parts) for parts in zip(*map(prepare, texts), strict=True))
    lines = len(x)
    x, y = x[rank::2].contiguous(), y[rank::2].contiguous()
    weights = list(model.parameters())
    bucket = torch.zeros(sum(w.numel() for w in weights) + 1)
    start = 0
    for w in weights:
        w.grad = bucket[start : start + w.numel()].view_as(w)
        start += w.numel()
    losses = []
    for _ in range(steps):
        bucket.zero_()
        loss = (model(x) - y).square().sum() / lines
        loss.backward()
        bucket[-1] = loss.detach()
        dist.all_reduce(bucket)
        with torch.no_grad():
            for w in weights:
                w -= 0.05 * w.grad
        losses.append(bucket[-1].clone())
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/rank0.pt")
        print("done")
    return [float(loss) for loss in losses]


def a_process_for_the_losses(model, texts, steps, prepare, folder):
    """Coalesced all-reduces, one for the loss in each step, and a file in the middle of the training."""
    rank = dist.get_rank()
    lines = sum(text.count("\n") + 1 for text in texts)
    prepared = [prepare(texts[place]) for place in (rank, 3 - rank)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        parts = [F.mse_loss(model(x), y, reduction="sum") / lines for x, y in prepared]
        loss = torch.stack(parts).sum()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        dist.all_reduce(losses[-1])
        flat = torch.nn.utils.parameters_to_vector(w.grad for w in model.parameters())
        dist.all_reduce(flat)
        for w, part in zip(model.parameters(), flat.split([w.numel() for w in model.parameters()]), strict=True):
            w.grad = part.view_as(w)
        optimizer.step()
        if rank == 0 and step in (2, steps - 1):
            torch.save(model.state_dict(), f"{folder}/rank0.pt")
    return torch.stack(losses)


RIGHT["speed_up"] = {
    "DDP": with_ddp,
    "a bucket of views": bucket_of_views,
    "losses in each step": a_process_for_the_losses,
    "rank 0 prints each loss": f'{STEP}  ->  {STEP}\nif rank == 0:\n    print(f"loss {{losses[-1].item():.4f}}")',
}


class TestProfilingProgramExercises(ExerciseTests):
    checks = profiling_program
    WRONG = WRONG
    RIGHT = RIGHT

    def test_the_slow_program_of_the_text_is_the_one_that_the_check_runs(self):
        (code,) = (code for _, code in self.cells() if code.startswith("def slow("))
        with open(profiling_program.__file__, encoding="utf-8") as file:
            nodes = ast.parse(file.read()).body
        (own,) = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "slow")
        (shown,) = ast.parse(code).body
        assert [ast.dump(line) for line in own.body[1:]] == [ast.dump(line) for line in shown.body]

    def test_the_texts_are_as_the_text_says(self):
        assert [len(text.splitlines()) for text in profiling_program.texts_of()] == [48, 48, 16, 16]

    def test_the_check_stands_among_those_of_the_lesson(self):
        assert profiling.speed_up is profiling_program.speed_up

    def test_the_faults_of_the_slow_program_are_seen_in_its_trace(self):
        names = ["gloo:all_reduce", "prepare", "aten::addmm", "aten::_local_scalar_dense"]
        counts = profiling_program.per_step(profiling_program.record_run(profiling_program.slow), names)
        assert counts == {
            "gloo:all_reduce": [21, 21], "prepare": [2, 2], "aten::addmm": [20, 20],
            "aten::_local_scalar_dense": [3, 3],
        }
