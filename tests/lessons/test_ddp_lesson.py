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

from course_utils import WorkerError, launch
from course_utils.data import Windows
from course_utils.models import build_gpt, loss_of
from course_utils.programs import torchrun
from course_utils.traces import breakdown, load, spans
from lessons.ddp import data_parallel

pytestmark = pytest.mark.guard(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

ROOT = Path(__file__).resolve().parents[2]
SMALLEST = ROOT / "lessons" / "ddp" / "smallest.py"
KINDS = ("AfterBackward", "FlatBuckets", "Overlapped")


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


def test_mixed_types_stay_apart_and_keep_their_type():
    def one_step():
        found = []
        for kind in versions:
            module = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=t)) for t in types])
            model = kind(module)
            sum(p.sum() * (2.0 + 4 * dist.get_rank()) for p in module).backward()
            model.finish()
            found += [(p.grad.dtype == p.dtype, p.grad.tolist()) for p in module]
        return found

    types, versions = (torch.bfloat16, torch.float32, torch.bfloat16), [lesson()[kind] for kind in KINDS]
    for found in launch(one_step, world_size=2, backend="gloo"):
        assert found == [(True, [4.0] * 3)] * 9


def test_recorded_jobs_are_as_the_lesson_tells():
    """404 all-reduces, most of them short, in a third of a step in which nothing is computed; and DDP's buckets."""
    slow, ddp = data_parallel.recorded_jobs().values()
    step = max(end for row in slow.lanes.values() for _, end in row)
    begin, end = slow.lanes["all-reduces"][0][0], slow.lanes["all-reduces"][-1][1]
    assert (slow.all_reduces, round(1e3 * begin), round(1e3 * end)) == (404, 182, 305)
    assert 0.33 < (end - begin) / step < 0.4 and 0.5 < slow.idle / slow.lasting < 0.53
    assert slow.lasting - slow.idle - slow.running < 0.1, "nothing is computed"
    bars = slow.lanes["all-reduces"]
    waits = [next_start - end for (_, end), (next_start, _) in pairwise(bars)]
    assert [round(1e6 * median(waits), -1), round(1e6 * median(end - start for start, end in bars))] == [200, 8]

    trace = load("host_bound")[0].of_steps([4])
    backward = next(e for e in trace.events if e.name == "## backward ##")
    buckets = [e for e in trace.events if e.category == "kernel" and "AllReduce" in e.name]
    zero = buckets[0].start - 1e6 * ddp.lanes["all-reduces"][0][0]
    computing = [end for _, end in spans(trace, "compute") if end < backward.end]
    assert all(backward.start < e.start < e.end < backward.end for e in buckets) and ddp.all_reduces == 5
    assert [e.end < max(computing) for e in buckets] == [True] * 4 + [False], "the last one is not hidden"
    assert max(computing) < buckets[-1].start and round((buckets[-1].start - zero) / 1e3) == 184
    sizes = [e.args["In msg nelems"] for e in buckets]
    assert round(sum(sizes) / 1e6, 1) == 25.6 and [round(4e-6 * size) for size in (min(sizes), max(sizes))] == [8, 32]
    assert breakdown(trace)["idle"] > 0.7 * breakdown(trace)["total"], "the GPU waits for the CPU most of the time"


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


def test_adam_hides_a_missing_division():
    def weights(factor: float) -> torch.Tensor:
        model = build_gpt()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for step in range(3):
            optimizer.zero_grad()
            (factor * loss_of(model, *Windows("train").batch(range(4 * step, 4 * step + 4)))).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    start, mean = torch.cat([p.detach().flatten() for p in build_gpt().parameters()]), weights(1.0)
    assert (weights(4.0) - mean).norm() < 0.01 * (mean - start).norm()


class Twice(nn.Module):
    """Uses a layer twice, under checkpointing; perhaps behind another layer."""

    def __init__(self, reentrant: bool, more: bool):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.reentrant = nn.Linear(3, 3) if more else nn.Identity(), nn.Linear(3, 3), reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant).tanh()
        return x


def test_reentrant_checkpointing_of_a_layer_used_twice_fails_or_makes_replicas_differ():
    def gradient(*options: bool) -> list[float]:
        model = DistributedDataParallel(Twice(*options))
        model(torch.full((2, 3), 1.0 + dist.get_rank(), requires_grad=True)).sum().backward()
        return model.module.layer.weight.grad.flatten().tolist()

    on_two = partial(launch, gradient, world_size=2, backend="gloo")
    right, wrong = on_two(False, False), on_two(True, False)
    assert right[0] == right[1] and wrong[0] != wrong[1]
    assert len({*map(tuple, on_two(False, True))}) == 1
    with pytest.raises(WorkerError, match="ready twice"):
        on_two(True, True)


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
    order = [*DistributedSampler(Windows("train"), num_replicas=1, rank=0)]
    for step in range(steps):
        loss = loss_of(model, *Windows("train").batch(order[step * batch : (step + 1) * batch]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        found.append(loss.item())
    return found


def test_script_trains_as_one_process_does_and_resumes_on_other_ranks(tmp_path):
    file = tmp_path / "run.pt"
    checkpoint = f"--checkpoint={file}"
    whole = losses("--steps=6", "--batch=12", n=2)
    assert whole == pytest.approx(one_process(6, 12), abs=1e-4)
    assert losses("--steps=6", "--batch=12", "--micro=3", n=2) == pytest.approx(whole, abs=2e-4)
    assert losses("--steps=4", "--batch=12", checkpoint, n=2) == whole[:4]
    state = torch.load(file)
    assert {*state} == {"model", "optimizer", "scheduler", "scaler", "step", "samples"}
    assert (state["step"], state["samples"], state["scheduler"]["last_epoch"]) == (4, 48, 4)
    assert losses("--steps=6", "--batch=12", checkpoint, n=3) == pytest.approx(whole[4:], abs=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_script_resumes_beyond_an_epoch_with_the_same_losses(tmp_path):
    flags = "--batch=400", f"--checkpoint={tmp_path / 'run.pt'}"
    whole = losses("--steps=8", "--batch=400", n=2)
    assert losses("--steps=7", *flags, n=2) == whole[:7]
    assert losses("--steps=8", *flags, n=4) == pytest.approx(whole[7:], abs=1e-4)


def test_script_learns_the_same_in_16_bits(tmp_path):
    options = "--precision=fp16", f"--checkpoint={tmp_path / 'run.pt'}"
    assert losses("--steps=3", *options, n=2) == pytest.approx(one_process(3, 16), abs=0.03)
    assert "scale" in torch.load(tmp_path / "run.pt")["scaler"]
    assert losses("--steps=3", "--precision=bf16", n=2) == pytest.approx(one_process(3, 16), abs=0.03)


COMPILED = """\
import runpy, torch
from functools import partial
torch.compile = partial(torch.compile, backend="eager")  # graphs, and no compiler
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.guard(300)
def test_script_learns_the_same_compiled(tmp_path):
    program = tmp_path / "compiled.py"
    program.write_text(COMPILED.format(script=str(ROOT / "scripts" / "train_ddp.py")))
    printed = torchrun(program, "--compile", "--micro=2", "--steps=2", "--report=1", "--backend=gloo", ranks=2)
    found = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert found == pytest.approx(one_process(2, 16), abs=2e-4)


def test_script_refuses_a_batch_that_does_not_divide():
    with pytest.raises(WorkerError, match="--batch must be a multiple of 2 ranks times 3 micro-batches: 16"):
        launch(run_script, "--batch=16", "--micro=3", world_size=2, backend="gloo", init=False)
