"""What lesson 04 says and no cell of it asserts, and scripts/train_ddp.py: equal to one process, also after a break."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from lesson_cells import definitions
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler

from course_utils import launch
from course_utils.data import Windows
from course_utils.models import build_gpt, loss_of
from course_utils.traces import load, spans
from lessons.ddp import data_parallel

pytestmark = pytest.mark.guard(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

ROOT = Path(__file__).resolve().parents[2]
SMALLEST = ROOT / "lessons" / "ddp" / "smallest.py"


@cache
def lesson() -> dict:
    """Imports and parameters of the lesson's first cell, and every function and class that a cell defines."""
    names = definitions("04")
    for batch in ("my_batch", "whole_batch"):
        names[batch] = partial(getattr(data_parallel, batch), per_rank=names["per_rank"])
    return names


def test_a_version_that_is_wrong_is_told_from_rounding():
    class Sum(lesson()["AfterBackward"]):
        def finish(self):
            for p in self.trained:
                dist.all_reduce(p.grad)

    batches = lesson()["my_batch"], lesson()["whole_batch"]
    with pytest.raises(AssertionError, match="rank 0 ends at other weights than one process"):
        data_parallel.judge(partial(launch, world_size=2, backend="gloo"), *batches, Sum)


def test_recorded_jobs_are_as_the_lesson_tells():
    """404 all-reduces, most of them short, in a third of a step in which nothing is computed; and DDP's buckets."""
    slow, ddp = data_parallel.recorded_jobs().values()
    step = max(end for row in slow.lanes.values() for _, end in row)
    bars = slow.lanes["all-reduces"]
    begin, end = bars[0][0], bars[-1][1]
    assert (slow.all_reduces, round(1e3 * begin), round(1e3 * end)) == (404, 182, 305)
    assert 0.33 < (end - begin) / step < 0.4 and 0.5 < slow.idle / slow.lasting < 0.53
    waits = [next_start - end for (_, end), (next_start, _) in pairwise(bars)]
    assert [round(1e6 * median(waits), -1), round(1e6 * median(end - start for start, end in bars))] == [200, 8]

    trace = load("host_bound")[0].of_steps([4])
    buckets = [e for e in trace.events if e.category == "kernel" and "AllReduce" in e.name]
    sizes = [e.args["In msg nelems"] for e in buckets]
    assert round(sum(sizes) / 1e6, 1) == 25.6 and [round(4e-6 * size) for size in (min(sizes), max(sizes))] == [8, 32]
    backward = next(e for e in trace.events if e.name == "## backward ##")
    last = max(end for _, end in spans(trace, "compute") if end < backward.end)
    assert [e.end < last for e in buckets] == [True] * 4 + [False] and ddp.all_reduces == 5, "the last is not hidden"


def test_the_program_in_the_text_is_the_one_that_runs():
    text = (ROOT / "lessons" / "ddp" / "lesson.py").read_text(encoding="utf-8")
    lines = [line[2:] for line in re.search(r"# ```python\n(# import os.*?)\n# ```", text, re.DOTALL)[1].splitlines()]
    assert lines == SMALLEST.read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line]) <= 30


def test_the_program_without_what_is_new_is_one_for_one_process(tmp_path):
    """Lines marked as new go, and of the others what was there before comes back."""
    lines = [line for line in SMALLEST.read_text(encoding="utf-8").splitlines() if "# new" not in line]
    text = "\n".join(lines).replace("    print", "print").replace("    torch.save", "torch.save")
    for now, was in (
        ("f\"cuda:{os.environ['LOCAL_RANK']}\"", '"cuda"'),
        ("64 // dist.get_world_size(), sampler=sampler", "64, shuffle=True"),
        ("ddp(x.to(device))", "model(x.to(device))"),
    ):
        assert now in text and f"# was {was[:6]}" in text
        text = text.replace(now, was)
    assert not re.search(r"\b(os|dist|ddp|DDP|sampler)\b", text)
    (tmp_path / "one.py").write_text(text)
    done = subprocess.run([sys.executable, "one.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Twice(nn.Module):
    """Uses a layer twice, under checkpointing."""

    def __init__(self, reentrant: bool):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.reentrant = nn.Linear(3, 3), reentrant

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant).tanh()
        return x


def test_reentrant_checkpointing_of_a_layer_used_twice_may_make_replicas_differ():
    """That it may also be refused is tested with lesson 19."""

    def gradient(reentrant: bool) -> list[float]:
        model = DistributedDataParallel(Twice(reentrant))
        model(torch.full((2, 3), 1.0 + dist.get_rank(), requires_grad=True)).sum().backward()
        return model.module.layer.weight.grad.flatten().tolist()

    right, wrong = (launch(gradient, reentrant, world_size=2, backend="gloo") for reentrant in (False, True))
    assert right[0] == right[1] and wrong[0] != wrong[1]


def run_script(*arguments: str) -> str:
    """On a rank: run scripts/train_ddp.py as torchrun does; return what it prints."""
    sys.argv = ["train_ddp.py", *arguments, "--backend=gloo", "--report=1"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(ROOT / "scripts" / "train_ddp.py"), run_name="__main__")
    return printed.getvalue()


def losses(*arguments: str, n: int) -> list[float]:
    printed = launch(run_script, *arguments, world_size=n, backend="gloo", init=False)
    assert not any(printed[1:]), "one rank speaks for all"
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed[0])]


def one_process(steps: int, batch: int) -> list[float]:
    """Losses of the same training without ranks."""
    model, found = build_gpt(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    sampler, order = DistributedSampler(Windows("train"), num_replicas=1, rank=0), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order += sampler
    for step in range(steps):
        loss = loss_of(model, *Windows("train").batch(order[step * batch : (step + 1) * batch]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        found.append(loss.item())
    return found


def test_script_trains_as_one_process_does_and_resumes_on_other_ranks_beyond_an_epoch(tmp_path):
    flags = "--batch=400", f"--checkpoint={tmp_path / 'run.pt'}"
    expected = one_process(8, 400)
    assert losses("--steps=7", "--micro=2", *flags, n=2) == pytest.approx(expected[:7], abs=2e-4)
    state = torch.load(tmp_path / "run.pt")
    assert (state["step"], state["samples"], state["scheduler"]["last_epoch"]) == (7, 2800, 7)
    assert losses("--steps=8", *flags, n=4) == pytest.approx(expected[7:], abs=2e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_script_learns_the_same_in_16_bits(tmp_path):
    options = "--precision=fp16", f"--checkpoint={tmp_path / 'run.pt'}"
    assert losses("--steps=3", *options, n=2) == pytest.approx(one_process(3, 16), abs=0.03)
    assert "scale" in torch.load(tmp_path / "run.pt")["scaler"]
