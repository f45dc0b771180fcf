"""Measure what scripts/train.py costs over a bare loop: the same model, split in the same way, and nothing else.

    python benchmarks/train_overhead.py [--quick] [--output FILE]

Steps of both take turns in one run: the program calls its learning-rate schedule once a step, and there a step of the
bare loop is slipped in and timed. Prints a table with the goal beside; nothing is asserted.
"""

import argparse
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import main, table

from course_utils import launch

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.02  # overhead of all but the writing of checkpoints
WARM_UP = 3


def clocks() -> torch.Tensor:
    """Seconds by the wall's clock, and those that all threads of this process have computed."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


def take_turns(out: str, steps: int, flags: list[str]) -> dict:
    """On a rank: seconds and CPU seconds of each step of the program and of the bare loop; which steps saved."""
    sys.argv = ["train.py", f"--out={out}", f"--data={ROOT / 'course_utils' / 'text' / 'alice.txt'}",
                f"--steps={steps}", *flags]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    script = runpy.run_path(str(ROOT / "scripts" / "train.py"), run_name="script")
    names, schedule = script["train"].__globals__, script["learning_rate"]
    args = script["arguments"](int(os.environ["WORLD_SIZE"]))
    device, mesh = script["connect"](args)
    model = script["build"](args, device, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    share = args.batch // dist.get_world_size()
    windows = torch.randint(0, args.vocabulary, (share, args.length + 1))
    found: dict = {"program": [], "bare": []}
    since = clocks()

    def bare_step() -> None:
        model(windows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()

    def slip_in(args: argparse.Namespace, step: int) -> float:
        nonlocal since
        if len(found["bare"]) == step:  # asked for each group of parameters
            found["program"].append(clocks() - since)
            dist.barrier()
            begin = clocks()
            bare_step()
            found["bare"].append(clocks() - begin)
            dist.barrier()
            since = clocks()
        return schedule(args, step)

    names["learning_rate"] = slip_in
    script["train"](args, device, mesh)
    dist.destroy_process_group()
    saved = [step % args.save_every == 0 for step in range(steps)]  # the time of step s ends in step s + 1
    return {name: torch.stack(seconds[WARM_UP:]) for name, seconds in found.items()} | {"saved": saved[WARM_UP:]}


def measure(quick: bool) -> dict:
    """Ratio of the program's step to the bare one beside it, and what a checkpoint adds to its step."""
    ranks, steps = 2, 10 if quick else 60
    shape = ["--layers=2", "--hidden=32", "--length=16", "--batch=4"] if quick else ["--hidden=256", "--batch=8"]
    flags = [*shape, "--log-every=1", f"--save-every={max(5, steps // 4)}"]
    with tempfile.TemporaryDirectory() as out:
        by_rank = launch(take_turns, out, steps, flags, world_size=ranks, backend="gloo", init=False, timeout=600)
    saved = torch.tensor(by_rank[0]["saved"])
    program, bare = (torch.stack([rank[name] for rank in by_rank]).amax(0) for name in ("program", "bare"))
    ratios = (program / bare - 1)[~saved].quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=0)
    step = bare.median(0).values
    return {
        "torch": torch.__version__, "ranks": ranks, "steps": steps, "bare_s": step[0].item(),
        "overhead": ratios[:, 0].tolist(), "overhead_cpu": ratios[:, 1].tolist(),
        "checkpoint_s": (program[saved] - step).median(0).values[0].item(),
    }


def markdown(result: dict) -> str:
    """What was measured, with the goal."""
    wall, cpu = (
        f"{median:.1%} ({low:.1%} to {high:.1%})" for low, median, high in (result["overhead"], result["overhead_cpu"])
    )
    row = [f"{result['bare_s'] * 1e3:.0f} ms", wall, cpu, f"{GOAL:.0%}", f"{result['checkpoint_s'] * 1e3:.0f} ms"]
    heads = ["step of the bare loop", "the program adds (quartiles)", "in CPU time", "goal", "a checkpoint adds"]
    return "\n\n".join([
        f"## Overhead of scripts/train.py on {result['ranks']} ranks",
        table(heads, [row]),
        f"Medians of {result['steps']} steps of each, in turns, at the slowest rank; the log is written at each step. "
        f"A checkpoint adds the copy of the state to its step, and is written meanwhile. torch {result['torch']}.",
    ])


if __name__ == "__main__":
    main(measure, markdown)
