"""Programs of scripts/ where there are GPUs: each rank takes that of its LOCAL_RANK; and their time-outs."""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from course_utils import WorkerError, launch
from course_utils.programs import SCRIPTS, TEXT, run_program

pytestmark = pytest.mark.guard(120)
#: Every program that chooses a GPU, with the flags that it must have.
FLAGS = {"hello": (), "links": (), "busbw": (), "scaling_curve": (), "train_ddp": (), "serve": (),
         "train": ("--out={out}", f"--data={TEXT}"), "train_3d": ("--out={out}", f"--data={TEXT}")}


class Joined(Exception):
    """Raised where the program joins its process group."""


def start(name: str, flags: list[str], seen: int) -> dict:
    """On a rank: run a program that sees so many GPUs, until it joins; return what it has chosen."""
    chosen = {}

    def join(backend, **options):
        chosen.update(backend=backend, timeout=options.get("timeout"))
        raise Joined

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: seen)
        patch.setattr(torch.cuda, "set_device", lambda device: chosen.update(gpu=torch.device(device).index))
        patch.setattr(dist, "init_process_group", join)
        patch.setattr(sys, "argv", [f"{name}.py", *flags])
        with pytest.raises(Joined):
            runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    return chosen


def test_no_other_program_chooses_a_gpu():
    assert {path.stem for path in SCRIPTS.glob("*.py") if "cuda.set_device" in path.read_text()} == {*FLAGS}


@pytest.mark.parametrize("seen", [1, 2], ids=["its own", "all of the host"])
def test_each_rank_takes_the_gpu_of_its_local_rank(seen, tmp_path):
    flags = {name: [flag.format(out=tmp_path) for flag in given] for name, given in FLAGS.items()}
    found = launch(lambda: {name: start(name, flags[name], seen) for name in flags}, world_size=2, init=False)
    for rank, chosen in enumerate(found):
        assert {name: one["gpu"] for name, one in chosen.items()} == dict.fromkeys(FLAGS, rank % seen)
        assert all("nccl" in one["backend"] for one in chosen.values())
        assert chosen["links"]["timeout"] == timedelta(minutes=1)


def hello_on_rank_0(program: str) -> None:
    """On a rank: only rank 0 comes to hello.py, whose minute takes a second."""
    usual = threading.Timer
    threading.Timer = lambda seconds, function: usual(seconds / 60, function)
    if os.environ["RANK"] == "0":
        run_program(program)
    time.sleep(60)


def test_hello_says_where_to_look_when_a_rank_is_not_there(capsys):
    with pytest.raises(WorkerError, match="rank 0 "):
        launch(hello_on_rank_0, str(SCRIPTS / "hello.py"), world_size=2, init=False)
    assert "has not reached all other ranks within a minute. Look first at a host" in capsys.readouterr().out
