"""Lesson 00: what its helpers promise, cells as a program for torchrun above all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from course_utils import device
from course_utils.programs import as_program, torchrun


def total():
    ranks = torch.tensor([dist.get_rank() + 1.0], device=device())
    dist.all_reduce(ranks)
    return ranks.item()


def main():
    dist.init_process_group("gloo")
    result = total()
    if dist.get_rank() == 0:
        print("the sum is", result)
    dist.destroy_process_group()


def test_functions_become_a_program_that_torchrun_starts(tmp_path):
    program = as_program(total, main)
    assert program.count("def ") == 2 and program.endswith('if __name__ == "__main__":\n    main()\n')
    (tmp_path / "total.py").write_text(program)
    assert torchrun(tmp_path / "total.py", ranks=2) == "the sum is 3.0\n"


GPUS = """\
import os, torch, torch.distributed as dist
from course_utils import device
now = 0


def set_device(number):
    global now
    now = number


torch.cuda.device_count, torch.cuda.current_device, torch.cuda.set_device = lambda: {seen}, lambda: now, set_device
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))  # no rank leaves while another still connects to it
dist.get_backend = lambda group=None: "nccl"
{first}
print(f"{{os.environ['RANK']}}: {{device()}} {{device()}} {{now}}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("seen", "first", "gpus"), [
    (2, "", [0, 1]),
    (4, "set_device(3 - dist.get_rank())", [3, 2]),  # the program has chosen
], ids=["all", "chosen"])
def test_under_torchrun_each_rank_has_a_gpu_of_its_own(seen, first, gpus, tmp_path):
    """With a stand-in for CUDA and NCCL, in processes of torchrun."""
    program = tmp_path / "gpus.py"
    program.write_text(GPUS.format(seen=seen, first=first))
    said = sorted(torchrun(program, ranks=2, gpus=False).splitlines())
    assert said == [f"{rank}: cuda:{gpu} cuda:{gpu} {gpu}" for rank, gpu in enumerate(gpus)]


def test_a_program_needs_a_main_and_says_what_failed(tmp_path):
    with pytest.raises(ValueError, match="called main"):
        as_program(total)
    (tmp_path / "wrong.py").write_text("1 / 0")
    with pytest.raises(RuntimeError, match=r"wrong.py failed:\n(.|\n)*ZeroDivisionError"):
        torchrun(tmp_path / "wrong.py", ranks=1)
