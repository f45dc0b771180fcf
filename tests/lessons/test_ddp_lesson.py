"""What lesson 04 says and no cell of it asserts, and scripts/train_ddp.py: equal to one process, also after a break."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from functools import cache, partial
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from lesson_cells import definitions
from torch import nn
from torch.utils.data import DistributedSampler

from course_utils import WorkerError, launch
from course_utils.data import Windows
from course_utils.models import build_gpt, loss_of
from course_utils.programs import torchrun
from lessons.ddp import data_parallel

pytestmark = pytest.mark.guard(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

ROOT = Path(__file__).resolve().parents[2]
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


def test_overlapped_refuses_a_second_backward_before_finish():
    def twice():
        model = overlapped(nn.Linear(2, 2))
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    overlapped = lesson()["Overlapped"]
    with pytest.raises(WorkerError, match="came twice"):
        launch(twice, world_size=2, backend="gloo")


def test_recorded_jobs_are_as_the_lesson_tells():
    """404 all-reduces in a third of a step, in which nothing else is computed."""
    slow, ddp = data_parallel.recorded_jobs()[0].values()
    begin, end = slow["all-reduces"][0][0], slow["all-reduces"][-1][1]
    assert round(1e3 * begin) == 182 and round(1e3 * end) == 305
    step = max(end for row in slow.values() for _, end in row)
    assert 0.33 < (end - begin) / step < 0.4
    busy = sum(min(b, end) - max(a, begin) for a, b in slow["compute"] if b > begin and a < end)
    assert busy < 0.02 * (end - begin)
    assert sum(b - a for a, b in ddp["all-reduces"]) > 0.01


def test_the_loop_in_the_text_is_that_of_the_program():
    text = (ROOT / "lessons" / "ddp" / "lesson.py").read_text(encoding="utf-8")
    shown = re.search(r"# ```python\n(# for micro in .*?)# ```", text, re.DOTALL)[1]
    lines = [line.removeprefix("# ") for line in shown.splitlines()]
    program = (ROOT / "scripts" / "train_ddp.py").read_text(encoding="utf-8")
    assert "\n".join(" " * 8 + line for line in lines) in program


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
    assert losses("--steps=5", "--batch=12", checkpoint, n=2) == pytest.approx(whole[4:5], abs=1e-4)
    assert losses("--steps=6", "--batch=12", checkpoint, n=3) == pytest.approx(whole[5:], abs=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_script_resumes_beyond_an_epoch_with_the_same_losses(tmp_path):
    flags = "--batch=400", f"--checkpoint={tmp_path / 'run.pt'}"
    whole = losses("--steps=8", "--batch=400", n=2)
    assert losses("--steps=6", *flags, n=2) == whole[:6]
    assert losses("--steps=7", *flags, n=2) == whole[6:7]
    assert losses("--steps=8", *flags, n=4) == pytest.approx(whole[7:], abs=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_script_learns_the_same_in_16_bits(precision, tmp_path):
    options = f"--precision={precision}", f"--checkpoint={tmp_path / 'run.pt'}"
    assert losses("--steps=3", *options, n=2) == pytest.approx(one_process(3, 16), abs=0.03)
    assert losses("--steps=4", *options, n=2) == pytest.approx(one_process(4, 16)[3:], abs=0.03)
    assert ("scale" in torch.load(tmp_path / "run.pt")["scaler"]) == (precision == "fp16")


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
