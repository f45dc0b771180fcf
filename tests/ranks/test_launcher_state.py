"""Promises about settings: what one function changes in its process does not reach the next call."""

from __future__ import annotations

import contextlib
import decimal
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from calls import all_is_well

from course_utils import launch, shutdown

pytestmark = pytest.mark.guard(60)


def settings() -> dict[str, tuple]:
    """Settings by name; all functions are local, so that ranks need not import this module."""

    def summed() -> float:
        x = torch.ones(1)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.all_reduce(x)
        return x.item()

    def mask() -> int:
        now = os.umask(0)
        os.umask(now)
        return now

    def broken(*args, **kwargs):
        raise RuntimeError("replaced by an earlier call")

    def level(name: str | None = None) -> int:
        return logging.getLogger(name).level

    def block():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])

    c10d, nofile = "torch.distributed", resource.RLIMIT_NOFILE
    set_limit, limit = resource.setrlimit, resource.getrlimit
    return {  # name: (what changes it, what shows it)
        "default device": (lambda: torch.set_default_device("meta"), lambda: torch.ones(1).device.type),
        "deterministic algorithms": (
            lambda: torch.use_deterministic_algorithms(True), torch.are_deterministic_algorithms_enabled),
        "anomaly mode": (lambda: torch.autograd.set_detect_anomaly(True) and None, torch.is_anomaly_enabled),
        "default dtype": (lambda: torch.set_default_dtype(torch.float64), lambda: str(torch.ones(1).dtype)),
        "grad mode": (lambda: torch.set_grad_enabled(False) and None, torch.is_grad_enabled),
        "threads": (lambda: torch.set_num_threads(2), torch.get_num_threads),
        "all_reduce": (lambda: setattr(dist, "all_reduce", broken), summed),
        "umask": (lambda: os.umask(0o777) and None, mask),
        "soft limit": (lambda: set_limit(nofile, (100, limit(nofile)[1])), lambda: limit(nofile)),
        "niceness": (lambda: os.nice(3) and None, lambda: os.nice(0)),
        "start method": (
            lambda: multiprocessing.set_start_method("spawn", force=True), multiprocessing.get_start_method),
        "root level": (lambda: logging.getLogger().setLevel(5), level),
        "level of a logger": (lambda: logging.getLogger(c10d).setLevel(5), lambda: level(c10d)),
        "logging.disable": (lambda: logging.disable(50), lambda: logging.root.manager.disable),
        "logging handlers": (lambda: logging.basicConfig(filename="/dev/null"), lambda: len(logging.root.handlers)),
        "recursion limit": (lambda: sys.setrecursionlimit(400), sys.getrecursionlimit),
        "warnings filters": (lambda: warnings.simplefilter("error"), lambda: [str(f) for f in warnings.filters]),
        "handler of SIGTERM": (
            lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN) and None, lambda: str(signal.getsignal(15))),
        "handler of SIGUSR2": (
            lambda: signal.signal(signal.SIGUSR2, lambda *_: None) and None,
            lambda: str(signal.getsignal(signal.SIGUSR2))),
        "blocked signals": (block, lambda: sorted(map(str, signal.pthread_sigmask(signal.SIG_BLOCK, [])))),
        "autocast": (lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.is_autocast_enabled("cpu")),
        "TF32 by its newer name": (
            lambda: setattr(torch.backends, "fp32_precision", "tf32"), lambda: torch.backends.fp32_precision),
        "decimal": (lambda: setattr(decimal.getcontext(), "prec", 3), lambda: decimal.getcontext().prec),
        "print options": (lambda: np.set_printoptions(precision=1), lambda: np.get_printoptions()["precision"]),
        "argv": (lambda: sys.argv.append("left"), lambda: "left" in sys.argv),
        "handler of a logger": (
            lambda: logging.getLogger("train").addHandler(logging.NullHandler()),
            lambda: len(logging.getLogger("train").handlers)),
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


@pytest.mark.parametrize("name", settings())
def test_a_setting_does_not_reach_the_next_call(name):
    change, show = settings()[name]
    with contained():
        before = launch(show, world_size=2)
        launch(change, world_size=2)
        assert launch(show, world_size=2) == before
        all_is_well(2)


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


@pytest.mark.parametrize("how", ["alarm", "setitimer"])
def test_an_alarm_does_not_go_off_in_a_later_call(how):
    def sets():
        if how == "alarm":
            signal.alarm(1)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.5, 0.2)

    with contained():
        launch(sets, world_size=2)
        assert launch(lambda: time.sleep(1.3) or dist.get_rank(), world_size=2) == [0, 1]


# --- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["communicates", "prints without end"])
def test_a_thread_that_outlives_its_call_does_not_disturb_later_ones(what, capsys):
    def leaves():
        def later():
            time.sleep(0.3)
            while True:
                if what != "communicates":
                    print("ghost")
                    os.write(1, b"ghost\n")
                if what != "prints without end":
                    break
                time.sleep(0.001)
            if what == "communicates":
                dist.all_reduce(torch.ones(1) if dist.get_rank() else torch.ones(3))

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
        for _ in range(4):
            launch(work, world_size=2, timeout=60)
            assert capsys.readouterr().out == "[ranks 0,1] mine\n"
