"""scripts/train_3d.py gives the losses of one process on every mesh, goes on from a checkpoint on another, and refuses.

The program runs as it stands, on the ranks of `launch`, which find the variables that torchrun sets; one test calls
torchrun itself.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch

from course_utils import launch, record
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


MESHES = [(2, 2, 2), (4, 1, 1), (1, 2, 2)]


@pytest.mark.parametrize(("pp", "dp", "tp"), MESHES)
def test_every_mesh_trains_like_a_bare_loop(pp, dp, tp, tmp_path, capsys):
    found = run(capsys, tmp_path, f"--pp={pp}", f"--tp={tp}", "--steps=3", n=pp * dp * tp)
    assert_same(found, plain(3))


def test_a_run_goes_on_from_its_checkpoint_on_other_meshes(tmp_path, capsys):
    found = run(capsys, tmp_path, "--pp=2", "--tp=2", "--steps=2", n=8)
    found += run(capsys, tmp_path, "--steps=4", "--micro=2", n=2)
    found += run(capsys, tmp_path, "--pp=2", "--steps=5", n=2)
    assert_same(found, plain(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:06}" for step in (2, 4, 5)]
    assert run(capsys, tmp_path, "--steps=5", n=1) == []  # all is done


def test_bf16_computes_nearly_the_same_with_weights_in_fp32(tmp_path, capsys):
    found = run(capsys, tmp_path, "--pp=2", "--tp=2", "--bf16", "--steps=2", n=4)
    for (_, loss, _), (_, right, _) in zip(found, plain(2), strict=True):
        assert 1e-5 < abs(loss - right) < 0.05


def test_weights_do_not_depend_on_the_stage_that_holds_them(monkeypatch):
    script = runpy.run_path(str(SCRIPT), run_name="script")
    stages = {}
    for pp in (1, 2, 4):
        monkeypatch.setattr(sys, "argv", ["train_3d.py", "--out=.", *SMALL, f"--pp={pp}"])
        args = script["arguments"](pp)
        stages[pp] = {k: w for i in range(pp) for k, w in script["Stage"](args, i).state_dict().items()}
    assert all(torch.equal(stages[1][k], stages[pp][k]) for pp in (2, 4) for k in stages[1])
    assert not torch.equal(stages[1]["blocks.0.up.weight"], stages[1]["blocks.1.up.weight"])


REFUSED = [
    (("--pp=2",), 3, "PP 2 x TP 1 does not divide 3 ranks"),
    (("--pp=3",), 3, "--layers must be a multiple of 3 here: 4"),
    (("--micro=3",), 2, "--batch must be a multiple of 6 here: 16"),
    (("--pp=4", "--micro=2"), 4, "--micro must be at least PP 4: 2"),
]


@pytest.mark.parametrize(("flags", "ranks", "sentence"), REFUSED, ids=lambda value: str(value))
def test_what_does_not_fit_is_refused_in_a_sentence(flags, ranks, sentence, monkeypatch):
    script = runpy.run_path(str(SCRIPT), run_name="script")
    monkeypatch.setattr(sys, "argv", ["train_3d.py", "--out=.", *SMALL, *flags])
    with pytest.raises(SystemExit, match=re.escape(sentence)):
        script["arguments"](ranks)


def clip_twice(out: str, *flags: str) -> tuple[float, float, list[tuple[str, str]]]:
    """On a rank: clip gradients that are equal to the weights; return the norms before and after, and what was sent."""
    script = runpy.run_path(str(SCRIPT), run_name="script")
    sys.argv = ["train_3d.py", f"--out={out}", *SMALL, *flags]
    args = script["arguments"](int(os.environ["WORLD_SIZE"]))
    device, mesh = script["connect"](args)
    stage = script["build"](args, device, mesh)
    for p in stage.parameters():
        p.grad = p.detach().clone()
    with record() as ledger:
        before = script["clip"](stage, mesh, args.clip).item()
    return before, script["clip"](stage, mesh, args.clip).item(), [(e.op, e.group) for e in ledger]


def test_clipping_makes_one_all_reduce_for_each_dimension_of_the_mesh(tmp_path):
    found = launch(clip_twice, str(tmp_path), "--pp=2", "--tp=2", world_size=8, init=False)
    script = runpy.run_path(str(SCRIPT), run_name="script")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train_3d.py", "--out=.", *SMALL])
        whole = script["Stage"](script["arguments"](1), 0)
    norm = torch.nn.utils.get_total_norm([*whole.parameters()]).item()
    for before, after, sent in found:
        assert (before, after) == pytest.approx((norm, 0.5), rel=1e-5)
        assert sent == [("all_reduce", f"mesh_{name}") for name in ("tp", "dp", "pp")]


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


def test_torchrun_told_to_stop_leaves_a_checkpoint_to_go_on_from(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(SCRIPT), *SMALL, f"--out={tmp_path}", "--pp=2", "--steps"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen([*command, "400"], env=environment, stdout=subprocess.PIPE, text=True) as agent:
        said = ""
        while "step 5 " not in said:
            assert (line := agent.stdout.readline()), "the program ends before step 5"
            said += line
        agent.terminate()
        said += agent.stdout.read()
    assert agent.returncode != 0
    *_, (last, _, _) = lines(said)
    assert 5 <= last < 400 and [path.name for path in tmp_path.iterdir()] == [f"step-{last:06}"]
    done = subprocess.run([*command, f"{last + 2}"], env=environment, capture_output=True, text=True, check=True)
    assert_same(lines(done.stdout), plain(last + 2)[last:])


def test_it_uses_nothing_of_the_course():
    assert not re.search(r"^\s*(from|import) course_utils", SCRIPT.read_text(), re.MULTILINE)
