"""Lesson 00: what its helpers promise of programs for torchrun."""

from __future__ import annotations

import pytest

from course_utils import device
from course_utils.programs import as_program, torchrun

GPUS = """\
import os, torch, torch.distributed as dist
from course_utils import device
now = 0


def set_device(number):
    global now
    now = number


torch.cuda.device_count, torch.cuda.current_device, torch.cuda.set_device = lambda: 2, lambda: now, set_device
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))  # no rank leaves while another still connects to it
dist.get_backend = lambda group=None: "nccl"
print(f"{os.environ['RANK']}: {device()} {device()} {now}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def test_under_torchrun_each_rank_has_a_gpu_of_its_own(tmp_path):
    """With a stand-in for CUDA and NCCL, in processes of torchrun."""
    program = tmp_path / "gpus.py"
    program.write_text(GPUS)
    said = sorted(torchrun(program, ranks=2, gpus=False).splitlines())
    assert said == [f"{rank}: cuda:{rank} cuda:{rank} {rank}" for rank in range(2)]


def test_a_program_needs_a_main_and_says_what_failed(tmp_path):
    with pytest.raises(ValueError, match="called main"):
        as_program(device)
    (tmp_path / "wrong.py").write_text("1 / 0")
    with pytest.raises(RuntimeError, match=r"wrong.py failed:\n(.|\n)*ZeroDivisionError"):
        torchrun(tmp_path / "wrong.py", ranks=1)
