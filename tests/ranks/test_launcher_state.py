"""Promises about settings: what one function changes in its process does not reach the next call."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from course_utils import launch, shutdown

pytestmark = pytest.mark.guard(60)


def settings() -> dict[str, tuple]:
    """By name: what changes a setting, and what shows it. All are local, so that ranks need not import this module."""

    def summed() -> float:
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    def broken(*args, **kwargs):
        raise RuntimeError("replaced by an earlier call")

    return {
        "default device": (lambda: torch.set_default_device("meta"), lambda: torch.ones(1).device.type),
        "default dtype": (lambda: torch.set_default_dtype(torch.float64), lambda: str(torch.ones(1).dtype)),
        "deterministic": (lambda: torch.use_deterministic_algorithms(True), torch.are_deterministic_algorithms_enabled),
        "grad mode": (lambda: torch.set_grad_enabled(False) and None, torch.is_grad_enabled),
        "all_reduce": (lambda: setattr(dist, "all_reduce", broken), summed),
        "start method": (
            lambda: multiprocessing.set_start_method("spawn", force=True), multiprocessing.get_start_method),
        "warnings filters": (lambda: warnings.simplefilter("error"), lambda: [str(f) for f in warnings.filters]),
        "handler of a signal": (
            lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN) and None, lambda: str(signal.getsignal(15))),
        "standard output": (lambda: setattr(sys, "stdout", open(os.devnull, "w")), lambda: sys.stdout.name),
        "environment": (lambda: os.environ.update(LEFT="here"), lambda: os.environ.get("LEFT")),
    }


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """If the block fails, let other tests have other ranks."""
    try:
        yield
    except BaseException:
        shutdown()
        raise


def test_what_one_call_sets_does_not_reach_the_next():
    changes, shows = (dict(zip(settings(), each, strict=True)) for each in zip(*settings().values(), strict=True))

    def show():
        return {name: show() for name, show in shows.items()}

    with contained():
        before = launch(show, world_size=2)
        for name, change in changes.items():
            launch(change, world_size=2)
            assert launch(show, world_size=2) == before, name


def test_ordinary_work_keeps_its_ranks(tmp_path):
    """What PyTorch sets by itself when it is used is not taken for a setting of the function."""

    def train():
        import torch.distributed.checkpoint

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=2, num_workers=1):
            with torch.autocast("cpu", torch.bfloat16):
                model(batch).sum().backward()
            optimizer.step()
        torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=tmp_path)
        warnings.simplefilter("ignore")
        return os.getpid()

    with contained():
        assert launch(train, world_size=2) == launch(train, world_size=2) == launch(os.getpid, world_size=2)


# --- threads -------------------------------------------------------------------------------------------------------


def test_a_thread_that_outlives_its_call_does_not_disturb_later_ones(capsys):
    def leaves():
        def later():
            time.sleep(0.3)
            while True:
                print("ghost")
                os.write(1, b"ghost\n")
                time.sleep(0.001)

        threading.Thread(target=later).start()
        return "left"

    def work():
        for _ in range(20):
            time.sleep(0.01)
            x = torch.ones(1)
            dist.all_reduce(x)
            assert x.item() == 2.0
        print("mine")

    with contained():
        assert launch(leaves, world_size=2) == ["left"] * 2
        capsys.readouterr()
        for _ in range(3):
            launch(work, world_size=2, timeout=60)
            assert capsys.readouterr().out == "[ranks 0,1] mine\n"
