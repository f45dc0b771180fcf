"""scripts/train.py gives the same losses on every mesh, stops and goes on without a trace, and refuses what cannot be.

The program runs as it stands, on the ranks of `launch`, which find the variables that torchrun sets; two tests call
torchrun itself. Where a rank has to misbehave, a function of a library that the program calls once a step does it.
"""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch.distributed.checkpoint import FileSystemReader

from course_utils import WorkerError, launch
from course_utils.programs import TEXT, read_log, run_program, torchrun
from course_utils.traces import load, numbered
from course_utils.transformer import TransformerConfig

pytestmark = pytest.mark.guard(240)
SCRIPT = ROOT / "scripts" / "train.py"
SMALL = ("--layers=2", "--hidden=32", "--length=16", "--batch=8", "--warmup=2", "--log-every=1", "--clip=0.8")
STEPS = 6


def misbehave(how: str, out: str) -> None:
    """On the rank that has a fault, in the middle of a step: die, be told to stop, fail, or stand still for long."""
    if how == "kill":
        while not Path(out, "step-000000003").exists():  # rank 0 publishes it while it waits for this rank
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "full":  # no file of this rank may grow beyond a kilobyte, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    elif how == "fail":
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"{out}/error"  # where torchrun reads what has happened
        raise RuntimeError("this rank has a fault")
    elif how == "stand still":  # so that somebody starts the run again, on one rank, and that one goes on to its end
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "0"}
        subprocess.run([sys.executable, SCRIPT, *sys.argv[1:]], env={**os.environ, **one}, check=True)


def program(out: str, *flags: str, mishap: tuple[int, str, set[int]] | None = None) -> int:
    """On a rank: run the program as torchrun does; return its exit code. `mishap` is (rank, what, at which calls)."""
    calls, clip = 0, torch.nn.utils.clip_grad_norm_

    def clip_or_worse(parameters, *arguments):
        nonlocal calls
        calls, parameters = calls + 1, list(parameters)
        if mishap and int(os.environ["RANK"]) == mishap[0] and calls in mishap[2]:
            if mishap[1] == "spoil":
                parameters[0].grad.to_local().fill_(math.nan)
            misbehave(mishap[1], out)
        return clip(parameters, *arguments)

    before, limits = signal.getsignal(signal.SIGTERM), resource.getrlimit(resource.RLIMIT_FSIZE)
    torch.nn.utils.clip_grad_norm_ = clip_or_worse
    sys.path.insert(0, str(SCRIPT.parent))  # as Python does for a program
    try:
        return run_program(SCRIPT, f"--out={out}", f"--data={TEXT}", *SMALL, *flags)
    finally:
        sys.path.remove(str(SCRIPT.parent))
        gc.enable()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        torch.nn.utils.clip_grad_norm_ = clip
        signal.signal(signal.SIGTERM, before)


def run(out: Path, *flags: str, n: int, mishap=None) -> set[int]:
    """Run the program on n ranks; return their exit codes."""
    flags = (f"--steps={STEPS}", *flags)
    return set(launch(program, str(out), *flags, mishap=mishap, world_size=n, backend="gloo", init=False))


def call(program: str, *flags: str | Path) -> int:
    """Run a program of scripts/ in this process; return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, *map(str, flags)])
        try:
            runpy.run_path(str(SCRIPT.with_name(program)), run_name="__main__")
        except SystemExit as end:
            return end.code or 0
    return 0


def log(out: Path) -> dict[int, dict]:
    """The line of each step; of those that were done twice, the second."""
    return {line["step"]: line for line in read_log(out)}


def steps_of(out: Path) -> list[int]:
    """The steps in the order in which they were done; also those that were done twice."""
    return [line["step"] for line in read_log(out)]


def figures(out: Path, *names: str) -> list[float]:
    return [line[name] for _, line in sorted(log(out).items()) for name in names or ("loss", "norm")]


def copy_of(run: Path, folder: Path) -> Path:
    return shutil.copytree(run, folder / "out", ignore=shutil.ignore_patterns("flight"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Folders of runs that nobody disturbs, by number of ranks and flags; each is made once."""
    made: dict = {}

    def of(n: int, *flags: str) -> Path:
        if (n, flags) not in made:
            made[n, flags] = tmp_path_factory.mktemp(f"ranks{n}") / "out"
            assert run(made[n, flags], *flags, n=n) == {0}
        return made[n, flags]

    return of


# --- the same training on every mesh ----------------------------------------------------------------------------------


def plain_losses() -> list[float]:
    """Losses and norms of the same training as a bare loop in one process, with nothing of torch.distributed."""
    script = runpy.run_path(str(SCRIPT), run_name="script")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "--out=.", "--data=.", *SMALL, f"--steps={STEPS}"])
        args = script["arguments"](1)
    model = script["GPT"](args)
    with torch.no_grad():
        for number, (name, p) in enumerate(model.named_parameters()):
            if p.dim() > 1:
                std = 0.02 / math.sqrt(2 * args.layers) if re.search(r"(out|down)\.weight", name) else 0.02
                p.normal_(0, std, generator=torch.Generator().manual_seed(number))
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    text = np.fromfile(TEXT, dtype=np.uint8)
    order = np.random.default_rng([0, 0]).permutation((len(text) - 1) // 16)
    found = []
    for step in range(STEPS):
        rows = [text[16 * i : 16 * i + 17] for i in order[8 * step : 8 * step + 8]]
        loss = model(torch.from_numpy(np.stack(rows)).long())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        for group in optimizer.param_groups:
            group["lr"] = script["learning_rate"](args, step)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), norm.item()]
    return found


def test_one_rank_trains_as_a_bare_loop_does(undisturbed):
    expected = plain_losses()
    assert max(expected[1::2]) > 0.8, "some step is clipped"
    assert figures(undisturbed(1)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("n", "flags"),
    [
        pytest.param(2, (), id="fsdp"),
        pytest.param(8, ("--replicate=2", "--tp=2", "--micro=2", "--recompute"), id="hsdp x tp, recomputing"),
    ],
)
def test_losses_and_norms_are_the_same_on_every_mesh(undisturbed, n, flags):
    assert figures(undisturbed(n, *flags)) == pytest.approx(figures(undisturbed(1)), abs=1e-5)


def test_bf16_stays_near(undisturbed, tmp_path):
    assert run(tmp_path, "--bf16", n=2) == {0}
    assert figures(tmp_path, "loss") != figures(undisturbed(2), "loss")
    assert figures(tmp_path, "loss") == pytest.approx(figures(undisturbed(2), "loss"), abs=2e-2)


# --- stop and go on ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A run of 2 ranks, one of which was killed in step 5, after a checkpoint of step 3; and a torn checkpoint."""
    out = tmp_path_factory.mktemp("killed") / "out"
    with pytest.raises(WorkerError, match="SIGKILL"):
        run(out, "--save-every=3", n=2, mishap=(1, "kill", {5}))
    assert [*log(out)] == [1, 2, 3, 4]
    shutil.copytree(out / "step-000000003", out / "step-000000004.tmp")  # as a kill while a checkpoint is written
    (out / "step-000000004.tmp" / ".metadata").unlink()
    return out


def test_after_a_kill_it_goes_on_from_the_last_complete_checkpoint_on_another_mesh(killed, undisturbed, tmp_path):
    out = copy_of(killed, tmp_path)
    assert run(out, "--save-every=3", "--tp=2", n=4) == {0}
    assert steps_of(out) == [1, 2, 3, 4, 4, 5, 6], "step 4 was done again, steps 1 to 3 were not"
    assert figures(out) == pytest.approx(figures(undisturbed(2)), abs=1e-5)
    assert sorted(path.name for path in out.glob("step-*")) == ["step-000000003", "step-000000006"]


def traced_steps(folder: Path, n: int) -> list[list[int]]:
    traces = load(folder)
    assert [trace.rank for trace in traces] == [*range(n)]
    for trace in traces:
        names = [event.name for event in trace.events if event.category == "user_annotation"]
        assert names.count("forward") == names.count("backward") == len(trace.steps)
        assert numbered(trace), "collectives are in it"
    return [trace.steps for trace in traces]


def test_sigterm_to_one_rank_stops_all_after_the_same_step_and_nothing_is_lost(undisturbed, tmp_path):
    traces = tmp_path / "traces"
    flags = ("--dropout=0.1", "--save-every=1", "--keep=1", f"--profile={traces}")
    assert run(tmp_path, *flags, n=2, mishap=(1, "terminate", {3})) == {75}
    assert [*log(tmp_path)] == [1, 2, 3, 4], "the step in which it comes, and the one in which all learn of it"
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000004"]
    assert traced_steps(traces, 2) == [[3, 4]] * 2, "those that there are of 3 to 5"
    assert run(tmp_path, *flags, "--profile-steps", "1", "1", n=2) == {0}
    assert figures(tmp_path) == figures(undisturbed(2, "--dropout=0.1"))
    assert figures(tmp_path, "loss") != figures(undisturbed(2), "loss"), "dropout drops"
    assert traced_steps(traces, 2) == [[1]] * 2, "steps count from the call's first"


def test_ranks_that_were_given_up_and_go_on_all_the_same_end_and_change_nothing(undisturbed, tmp_path):
    with pytest.raises(WorkerError, match="these ranks end: newer ones have started to write"):
        run(tmp_path, "--save-every=2", n=2, mishap=(1, "stand still", {3}))
    newer = ["step-000000004", "step-000000006"]
    late = "step-000000004.*.tmp/**/*"
    assert sorted(path.name for path in tmp_path.glob("step-" + 9 * "[0-9]")) == newer and any(tmp_path.glob(late))
    assert [line["loss"] for line in log(tmp_path).values()] == pytest.approx(figures(undisturbed(1), "loss"), abs=1e-5)
    assert run(tmp_path, "--save-every=2", n=1) == {0}
    assert sorted(path.name for path in tmp_path.glob("step-*")) == newer, "what they had written in vain is gone"


def test_under_torchrun_it_goes_on_and_ends_well(undisturbed, killed, tmp_path, capsys):
    out = copy_of(killed, tmp_path)
    flags = [f"--out={out}", f"--data={TEXT}", *SMALL, f"--steps={STEPS}"]
    flags += [f"--profile={tmp_path / 'traces'}", "--profile-steps", "2", "2"]
    said = torchrun(SCRIPT, *flags, ranks=2, gpus=False)
    assert re.findall(r"^step (\d+)", said, re.M) == ["4", "5", "6"], "one rank speaks for all"
    assert figures(out) == figures(undisturbed(2))
    assert traced_steps(tmp_path / "traces", 2) == [[2], [2]]
    capsys.readouterr()
    assert call("stragglers.py", out / "log.jsonl") == 0
    assert sorted(line.split(":")[0] for line in capsys.readouterr().out.splitlines()[:-1]) == ["rank 0", "rank 1"]


def test_under_a_torchrun_that_may_restart_it_stops_for_good(tmp_path):
    out = tmp_path / "out"
    flags = [f"--out={out}", f"--data={TEXT}", *SMALL, "--steps=1000000", "--save-every=1000000"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, SCRIPT, *flags], env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL) as agent:
        while not (out / "log.jsonl").exists():
            assert agent.poll() is None
            time.sleep(0.1)
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        rank1 = next(pid for pid in ranks if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(int(rank1), signal.SIGTERM)
        said = agent.communicate(timeout=120)[0]
    assert agent.returncode == 1, "torchrun turns 75 into 1"
    steps = steps_of(out)
    assert steps == [*range(1, len(steps) + 1)], "the ranks were not started again"
    assert [path.name for path in out.glob("step-*")] == [f"step-{len(steps):09}"]
    assert f"told to stop: checkpoint step-{len(steps):09} is complete" in said


def test_settings_that_changed_are_told_and_hold_and_another_run_is_refused(undisturbed, tmp_path, capfd):
    out = copy_of(undisturbed(1), tmp_path)
    owner = (out / "world").read_text()
    with pytest.raises(WorkerError, match="holds another run: seed 0 -> 1"):
        run(out, "--seed=1", n=1)
    assert (out / "world").read_text() == owner, "what is refused takes nothing over"
    capfd.readouterr()
    assert run(out, "--steps=7", "--lr=0.5", "--betas", "0.5", "0.6", n=1) == {0}
    said = capfd.readouterr().out
    assert "changed since the last call: steps 6 -> 7, lr 0.001 -> 0.5, betas [0.9, 0.95] -> [0.5, 0.6]" in said
    assert log(out)[7]["lr"] > 0.04


def test_an_epoch_ends_and_the_next_has_another_order(tmp_path):
    """The data are 10 windows, a step is 8: the second step goes on in the second epoch, also after a stop."""
    order = runpy.run_path(str(SCRIPT), run_name="script")["order"]
    assert sorted(order(10, 0, 0)) == sorted(order(10, 0, 1)) and [*order(10, 0, 0)] != [*order(10, 0, 1)]
    np.arange(161, dtype=np.uint16).tofile(tmp_path / "tokens")
    flags = (f"--data={tmp_path / 'tokens'}", "--token-type=uint16")
    assert run(tmp_path / "whole", *flags, n=1) == {0}
    assert run(tmp_path / "parts", *flags, n=1, mishap=(0, "terminate", {2})) == {75}
    assert run(tmp_path / "parts", *flags, n=2) == {0}
    assert figures(tmp_path / "parts") == pytest.approx(figures(tmp_path / "whole"), abs=1e-5)


# --- checkpoints that are damaged, and saves that fail ----------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run of 2 ranks with the checkpoints of steps 2 and 4."""
    out = tmp_path_factory.mktemp("saved") / "out"
    assert run(out, "--steps=4", "--save-every=2", n=2) == {0}
    return out


def harm(path: Path) -> str:
    """Change a byte inside a tensor of a checkpoint; return the name of the file."""
    metadata = FileSystemReader(path).read_metadata()
    place = next(p for index, p in metadata.storage_data.items() if index.fqn == "model.embedding.weight")
    data, at = bytearray((path / place.relative_path).read_bytes()), place.offset + place.length // 2
    data[at] ^= 255
    (path / place.relative_path).write_bytes(data)
    return place.relative_path


def test_a_damaged_checkpoint_is_named_and_all_ranks_go_back_to_the_one_before(saved, tmp_path, capfd):
    out = copy_of(saved, tmp_path)
    file = harm(out / "step-000000004")
    capfd.readouterr()
    assert run(out, "--save-every=2", n=2) == {0}
    assert f"step-000000004/{file} is not as it was written" in capfd.readouterr().out
    assert steps_of(out) == [1, 2, 3, 4, 3, 4, 5, 6]
    assert figures(out)[:8] == figures(saved), "step 3 and 4 again, with the same values"
    names = sorted(path.name for path in out.glob("step-*"))
    assert [name for name in names if not name.endswith(".bad")] == ["step-000000004", "step-000000006"]
    assert [name for name in names if re.fullmatch(r"step-000000004\.[0-9a-f]{8}\.bad", name)]


def test_if_no_checkpoint_is_whole_nothing_is_done(saved, tmp_path):
    out = copy_of(saved, tmp_path)
    (out / "step-000000002" / "__1_0.distcp").unlink()
    os.truncate(out / "step-000000004" / "__1_0.distcp", 1000)
    with pytest.raises(WorkerError, match="no checkpoint in .* is whole"):
        run(out, n=2)
    assert sorted(path.name for path in out.glob("step-*")) == ["step-000000002", "step-000000004"]


def test_verify_names_the_damaged_files(saved, tmp_path, capsys):
    path = shutil.copytree(saved / "step-000000004", tmp_path / "step-000000004")
    assert call("verify.py", path) == 0
    file = harm(path)
    capsys.readouterr()
    assert call("verify.py", path) == 1 and capsys.readouterr().out.endswith(f"/{file} is not as it was written\n")


def test_a_save_that_fails_ends_all_ranks_before_the_next_one(tmp_path):
    with pytest.raises(WorkerError, match="File too large"):
        run(tmp_path, "--steps=200", "--save-every=20", n=2, mishap=(1, "full", {3}))
    assert 20 <= len(log(tmp_path)) <= 40
    assert not [path for path in tmp_path.glob("step-*") if not path.name.endswith(".tmp")]


# --- when something goes wrong ----------------------------------------------------------------------------------------


def test_a_step_without_finite_gradients_is_passed_over_by_all_ranks_and_four_end_the_run(undisturbed, tmp_path):
    with pytest.raises(WorkerError, match="no finite gradients in the last 4 steps, up to step 7"):
        run(tmp_path, "--steps=20", n=2, mishap=(1, "spoil", {2, 3, 5, 6, 7, 8}))
    assert figures(tmp_path, "skipped") == [0, 1, 2, 0, 1, 2, 3]
    assert figures(tmp_path, "loss")[:2] == figures(undisturbed(2), "loss")[:2]
    assert all(map(math.isfinite, figures(tmp_path, "loss"))) and not [*tmp_path.glob("step-*")]


def test_a_rank_that_fails_leaves_its_traceback_and_last_collectives_and_a_restart_keeps_them(tmp_path):
    with pytest.raises(WorkerError, match="this rank has a fault"):
        run(tmp_path, n=2, mishap=(1, "fail", {3}))
    assert "this rank has a fault" in json.loads((tmp_path / "error").read_text())["message"]["message"]
    flight, world = tmp_path / "flight", (tmp_path / "world").read_text()
    entries = pickle.loads((flight / "cpu_1").read_bytes())["entries"]
    assert {"gloo:all_reduce", "gloo:all_gather"} <= {entry["profiling_name"] for entry in entries}
    kept = (flight / "cpu_1").read_bytes()
    assert run(tmp_path, n=2) == {0}
    assert (flight / world / "cpu_1").read_bytes() == kept and not (flight / "cpu_1").exists()
    assert (flight / world / "stack_0").exists() and (flight / "stack_0").exists()


def test_what_does_not_fit_is_refused_before_any_rank_connects(monkeypatch):
    script = runpy.run_path(str(SCRIPT), run_name="script")
    monkeypatch.setattr(sys, "argv", ["train.py", "--out=.", "--data=.", *SMALL, "--shard=2", "--vocabulary=100"])
    with pytest.raises(SystemExit, match=r"mesh {'replicate': 1, 'shard': 2, 'tp': 1} does not multiply to 4 ranks"):
        script["arguments"](4)
    with pytest.raises(SystemExit, match="--data holds token 2[0-9]+, --vocabulary is 100"):
        script["read_windows"](script["arguments"](2), np.arange(256, dtype=np.uint8), range(15))


# --- what it notes ----------------------------------------------------------------------------------------------------


def time_outs(out: str, *flags: str) -> list[float]:
    """On a rank: train, and return the time-outs that its groups get."""
    c10d = torch.distributed.distributed_c10d
    usual, seen = c10d._set_pg_timeout, []
    c10d._set_pg_timeout = lambda timeout, group: (seen.append(timeout.total_seconds()), usual(timeout, group))
    try:
        program(out, *flags, "--timeout=90", "--step-timeout=40")
    finally:
        c10d._set_pg_timeout = usual
    return seen


def test_log_has_speed_parts_and_slow_ranks_and_collectives_have_less_time_after_the_first_step(undisturbed, tmp_path):
    """With tensor parallelism alone, which trains alike."""
    flags = ("--tp=2", "--steps=6", "--peak-tflops=0.5", "--log-every=3")
    seen = launch(time_outs, str(tmp_path), *flags, world_size=2, init=False, timeout=120)
    groups = seen[0].count(90)
    assert groups and seen == [groups * [90] + groups * [40]] * 2
    assert [*log(tmp_path)] == [3, 6]
    assert figures(tmp_path, "norm") == pytest.approx(figures(undisturbed(1), "norm")[2::3], abs=1e-5)
    for line in log(tmp_path).values():
        flops = TransformerConfig(layers=2, hidden=32, heads=4, vocabulary=256, context=16).flops_per_token()
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * flops / (2 * 0.5e12))
        assert [*line["ms"]] == ["data", "wait", "forward", "backward", "optimizer", "checkpoint"]
        assert all(ms > 0 for part, ms in line["ms"].items() if part != "checkpoint")
        assert line["last"] in (0, 1) and line["slowest"] in (0, 1) and line["slowest_by"] >= 1
    assert [line["ms"]["checkpoint"] > 0 for line in log(tmp_path).values()] == [False, True]


def test_straggler_report_names_the_rank_that_the_others_wait_for():
    report = runpy.run_path(str(SCRIPT.with_name("stragglers.py")), run_name="script")["report"]
    lines = [{"wait_ms": [9.0, 1.0, 7.0], "product_ms": [1.0, 1.0, 3.0]}] * 3
    lines += [{"wait_ms": [2.0, 6.0, 4.0], "product_ms": [5.0, 1.0, 3.0]}]  # once, rank 0 had other things to do
    assert report(lines) == [
        "rank 1: last before 75% of the steps, costs 6.00 ms a step, product x 1.00",
        "rank 0: last before 25% of the steps, costs 1.00 ms a step, product x 1.00",
        "rank 2: last before 0% of the steps, costs 0.00 ms a step, product x 3.00",
        "who is slow inside the steps is not in this log: record a trace with --profile",
    ]
    inside = report([line | {"own_ms": [40.0, 30.0, 90.0]} for line in lines])
    assert inside[0].startswith("rank 2: 90.0 ms a step of its own, ") and inside[-1].startswith("rank 2 holds up")
    assert report([line | {"own_ms": [40.0, 30.0, 60.0]} for line in lines])[-1].startswith("no rank takes twice")


def test_time_of_its_own_has_nothing_of_waiting_for_others():
    """HSDP 2 x TP 2: rank 3 is 50 ms late in tp, rank 2 waits for it, and then both are late in dp."""
    outside = runpy.run_path(str(SCRIPT.with_name("stragglers.py")), run_name="script")["outside"]
    ms, group = 10**6, {0: ("a", "c"), 1: ("a", "d"), 2: ("b", "c"), 3: ("b", "d")}
    ranks = []
    for rank, (tp, dp) in group.items():
        late = 50 if rank == 3 else 0
        left = 60 if rank > 1 else 10
        ranks.append([(0, "world", 1), ((10 + late) * ms, tp, 1), ((left + 5) * ms, dp, 1), (66 * ms, "world", 2)])
    assert outside(ranks, steps=1) == [16, 16, 16, 66]


def test_readme_lists_every_flag_as_the_program_explains_it(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="script")["arguments"](1)
    one_line_each = re.sub(r"\n {10,}", "  ", capsys.readouterr().out)
    flags = dict(re.findall(r"^  (--[a-z0-9-]+).*?  +(\S.*)$", one_line_each, re.M))
    table = re.findall(r"^\| `(--[a-z0-9-]+)` \| .+? \| (.+) \|$", (ROOT / "scripts" / "README.md").read_text(), re.M)
    assert dict(table) == flags and len(table) == len(flags) > 20


def test_program_is_plain_pytorch_and_fits_on_few_pages():
    lines = SCRIPT.read_text().splitlines()
    assert len(lines) <= 450 and max(map(len, lines)) <= 100
    assert "course_utils" not in SCRIPT.read_text()
