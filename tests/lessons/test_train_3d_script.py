"""scripts/train_3d.py gives the losses of one process, and goes on from a checkpoint after SIGTERM.

A cell of lesson 12 runs it on a mesh of three dimensions and under torchrun. Here it runs on the ranks of `launch`.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch

from course_utils import launch
from course_utils.programs import SCRIPTS, TEXT, run_program

pytestmark = pytest.mark.guard(200)
SCRIPT = SCRIPTS / "train_3d.py"
SMALL = (f"--data={TEXT}", "--layers=4", "--hidden=32", "--length=16", "--batch=16", "--lr=0.01", "--clip=0.5")
LINE = re.compile(r"step (\d+)  loss (\d+\.\d+)  norm (\d+\.\d+)")


def lines(text: str) -> list[tuple[int, float, float]]:
    return [(int(step), float(loss), float(norm)) for step, loss, norm in LINE.findall(text)]


def run(capsys, out: Path, *flags: str, n: int) -> list[tuple[int, float, float]]:
    """Run the program on n ranks; return step, loss and norm of what it printed."""
    capsys.readouterr()
    assert launch(run_program, SCRIPT, *SMALL, f"--out={out}", *flags, world_size=n, init=False) == [0] * n
    return lines(capsys.readouterr().out)


@cache
def plain(steps: int) -> tuple[tuple[int, float, float], ...]:
    """The same training as a bare loop in one process, with nothing of torch.distributed."""
    script = runpy.run_path(str(SCRIPT), run_name="script")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train_3d.py", "--out=.", *SMALL])
        args = script["arguments"](1)
    model = script["Stage"](args, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data, found = script["np"].fromfile(args.data, dtype="uint8"), []
    for step in range(steps):
        x, y = script["batch_of"](args, data, step, 0)
        loss = script["loss_of"](model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append((step + 1, loss.item(), norm.item()))
    return tuple(found)


def assert_same(found, expected) -> None:
    assert [step for step, *_ in found] == [step for step, *_ in expected]
    for (_, loss, norm), (_, right, right_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(right, abs=2e-4) and norm == pytest.approx(right_norm, abs=2e-4)


@pytest.mark.parametrize(("pp", "dp", "tp"), [(4, 1, 1), (1, 2, 2)])
def test_every_mesh_trains_like_a_bare_loop(pp, dp, tp, tmp_path, capsys):
    found = run(capsys, tmp_path, f"--pp={pp}", f"--tp={tp}", "--steps=3", n=pp * dp * tp)
    assert_same(found, plain(3))


def test_bf16_computes_nearly_the_same_with_weights_in_fp32(tmp_path, capsys):
    found = run(capsys, tmp_path, "--pp=2", "--bf16", "--steps=2", n=2)
    for (_, loss, _), (_, right, _) in zip(found, plain(2), strict=True):
        assert 1e-5 < abs(loss - right) < 0.05


def stopped(out: str, rank: int, step: int) -> int:
    """On a rank: run the program, of which one rank gets SIGTERM in a step; return its exit code."""
    usual, calls = torch.optim.AdamW.step, count(1)

    def noted(optimizer):
        if next(calls) == step and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return usual(optimizer)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", noted)
        try:
            return run_program(SCRIPT, *SMALL, f"--out={out}", "--pp=2", "--steps=400", "--save-every=2")
        finally:
            signal.signal(signal.SIGTERM, before)


def test_all_ranks_stop_at_the_step_in_which_one_is_told(tmp_path, capsys):
    (tmp_path / "step-000005.unfinished").mkdir()  # of an earlier run
    (tmp_path / "step-000005.unfinished" / "__7_0.distcp").touch()
    assert launch(stopped, str(tmp_path), 1, 5, world_size=2, init=False) == [75, 75]
    assert_same(lines(capsys.readouterr().out), plain(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:06}" for step in (2, 4, 5)]
    assert not (tmp_path / "step-000005" / "__7_0.distcp").exists()
    assert_same(run(capsys, tmp_path, "--steps=6", n=1), plain(6)[5:])
    assert run(capsys, tmp_path, "--steps=6", n=1) == []  # all is done


def test_it_uses_nothing_of_the_course():
    assert not re.search(r"^\s*(from|import) course_utils", SCRIPT.read_text(), re.MULTILINE)
