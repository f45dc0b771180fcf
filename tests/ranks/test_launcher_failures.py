"""Promises of `launch` when something goes wrong: what the learner is told, and that the next call works."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from calls import all_is_well, case, failure, says
from kernels import Script, left_behind

from course_utils import HangError, WorkerError, expect_error, launch

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

STUCK = 4.0  # seconds until a hang is called one; ranks of a busy machine are where they hang by then
ERRORS: list = []  # functions; the rank that is named, its exception as a pattern, what else is told
HANGS: list = []  # functions; options of the call, what is told


# --- exceptions ----------------------------------------------------------------------------------------------------


def test_an_exception_while_others_block_in_a_collective_names_the_first_cause():
    def work():
        x = torch.ones(4)
        dist.all_reduce(x)
        if dist.get_rank() == 3:
            raise ValueError("bad batch")  # the learner's line
        dist.all_reduce(x)

    error = failure(WorkerError, work)
    assert not isinstance(error, HangError)
    assert (error.rank, error.exception) == (3, "ValueError: bad batch")
    says(error.traceback, 'raise ValueError("bad batch")  # the learner\'s line')
    says(str(error), "rank 3", "ValueError: bad batch", 'raise ValueError("bad batch")')
    says(str(error), "all_reduce")  # where the others stood


def test_a_failure_is_reported_while_another_rank_computes():
    def work():
        if dist.get_rank() == 1:
            raise ValueError("stop")
        sum(range(10**12))

    error = failure(WorkerError, work, timeout=10_000, world_size=2)
    assert (error.rank, error.exception) == (1, "ValueError: stop")


@case(ERRORS, 0, "RuntimeError: everywhere", ["everywhere"])
def all_ranks_raise_alike():
    raise RuntimeError("everywhere")


@case(ERRORS, 3, "ZeroDivisionError: the cause", [])
def others_turn_the_broken_connection_into_exceptions_of_their_own():
    if dist.get_rank() == 3:
        raise ZeroDivisionError("the cause")
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        raise RuntimeError("a consequence") from error


@case(ERRORS, 0, "ValueError: no seed given$", ["KeyError: 'seed'"])
def exceptions_that_are_chained_keep_their_cause():
    try:
        {}["seed"]
    except KeyError as error:
        raise ValueError("no seed given") from error


@case(ERRORS, 0, ".*Holder: holds a lock$", [])
def an_exception_that_cannot_be_pickled():
    class Holder(Exception):
        def __init__(self, text):
            super().__init__(text, threading.Lock())
            self.text = text

        def __str__(self):
            return self.text

    raise Holder("holds a lock")


@case(ERRORS, 1, "SystemExit.*3", [])
def sys_exit_in_a_rank():
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.barrier()


@case(ERRORS, 0, "(?=.*launch).*rank", [])
def a_launch_inside_a_rank_is_refused():
    from course_utils import launch as inner

    return inner(dist.get_rank, world_size=2)


@pytest.mark.parametrize(("work", "rank", "exception", "words"), ERRORS)
def test_an_error_is_told_with_its_rank(work, rank, exception, words):
    error = failure(WorkerError, work)
    assert error.rank == rank
    assert re.match(exception, error.exception), error.exception
    says(str(error), *words)


def test_output_before_the_failure_is_shown(capsys):
    def work():
        print("before")
        if dist.get_rank() == 1:
            print("last words")
            raise ValueError("stop")
        dist.barrier()

    failure(WorkerError, work)
    says(capsys.readouterr().out, "[ranks 0-3] before\n[rank 1] last words\n")


# --- deaths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "ranks", "told"), [
    ("SIGKILL", [2], "SIGKILL"), ("null pointer", [1], "SIGSEGV"), ("exit", [1], re.compile(r"exit.*\b3\b")),
])
def test_a_rank_that_dies_is_named_with_the_signal_or_its_status(how, ranks, told):
    def work():
        dist.barrier()
        if dist.get_rank() in ranks:
            if how == "exit":
                os._exit(3)
            if how == "null pointer":
                ctypes.string_at(0)
            os.kill(os.getpid(), getattr(signal, how))
            time.sleep(60)
        dist.all_reduce(torch.ones(1))

    error = failure(WorkerError, work)
    assert error.rank in ranks and not isinstance(error, HangError)
    says(str(error), f"rank {error.rank}" if len(ranks) == 1 else "rank", told)


def gone(process: psutil.Process) -> None:
    """Wait until a process has ended (without collecting it: that is for its parent) and its parent has had time."""
    deadline = time.monotonic() + 20
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)


def test_a_worker_and_a_fork_server_that_died_between_calls_are_replaced():
    worker = psutil.Process(launch(os.getpid, world_size=4)[1])
    server = worker.parent()
    for process in (worker, server):
        process.kill()
        gone(process)
        all_is_well()


# --- hangs ---------------------------------------------------------------------------------------------------------

TWO = {"world_size": 2}
OWN_GROUP = {"world_size": 2, "init": False, "timeout": 2.0}


def test_a_rank_that_skips_a_collective_is_named_in_a_table_of_all_ranks():
    def work():
        x = torch.ones(1000)
        for _ in range(3):
            dist.all_reduce(x)
        if dist.get_rank() != 2:
            dist.all_reduce(x)  # rank 2 never comes

    error = failure(HangError, work, timeout=STUCK)
    assert error.rank == 2
    says(str(error), re.compile(r"all_reduce number 4\b"), re.compile(r"rank 2 never joined"), "4 kB")
    says(str(error), "dist.all_reduce(x)  # rank 2 never comes", *map(str, range(4)))


@case(HANGS, {"timeout": 30}, ["all_reduce", "rank 1", "4 kB", "8 kB"])
def ranks_that_pass_different_sizes():
    x = torch.ones(1000 if dist.get_rank() != 1 else 2000)
    dist.all_reduce(x)
    dist.barrier()


@case(HANGS, TWO, ["rank 1", "recv", "rank 0", "dist.recv(torch.empty(4), src=0)"])
def a_receive_without_a_send():
    if dist.get_rank() == 1:
        dist.recv(torch.empty(4), src=0)


@case(HANGS, OWN_GROUP, ["rank 1", "init_process_group"])
def a_rank_that_is_missing_at_the_start_of_an_own_process_group():
    if dist.is_initialized() or os.environ["RANK"] == "0":
        return
    dist.init_process_group("gloo")


@pytest.mark.parametrize(("work", "options", "words"), HANGS)
def test_a_hang_is_told_with_its_cause(work, options, words):
    """Ranks that pass different sizes may fail before the time-out."""
    kind = WorkerError if work is ranks_that_pass_different_sizes else HangError
    error = failure(kind, work, **{"timeout": STUCK} | options)
    says(str(error), *words)


def test_a_rank_that_failed_by_itself_is_kept_and_one_that_was_interrupted_is_replaced():
    """What an interrupt may have left half done, an import for example, must not reach the next call."""

    def fails():
        if dist.get_rank() == 1:
            raise ValueError("stop")
        time.sleep(1000) if dist.get_rank() == 2 else dist.barrier()

    def hangs():
        if dist.get_rank() != 1:
            dist.barrier()

    for function, error, options in ((fails, WorkerError, {}), (hangs, HangError, {"timeout": STUCK})):
        before = launch(os.getpid, world_size=4)
        failure(error, function, **options)
        after = launch(os.getpid, world_size=4)
        assert [a == b for a, b in zip(after, before, strict=True)] == [False, True, False, False]
        assert [psutil.pid_exists(pid) for pid in before] == [False, True, False, False]


# --- interrupts and ends of a plain script (a real kernel's are in test_launcher_kernel.py) --------------------------


def test_an_interrupt_of_a_plain_script_stops_the_ranks_and_returns_or_ends_it():
    with Script("""
import time
import torch
import torch.distributed as dist
from course_utils import launch

def skips(time):
    print(time)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))

try:
    launch(skips, "first", world_size=2, timeout=1000)
except KeyboardInterrupt as error:
    print(f"<<{type(error).__name__} {error}>>")
print("next", launch(lambda: dist.get_rank() + 5, world_size=2), flush=True)
launch(skips, "again", world_size=2, timeout=1000)
""") as script:
        script.read("first")
        script.interrupt()
        says(script.read("next [5, 6]"), "<<Interrupted", "rank")
        script.read("again")
        script.interrupt()
        says(script.read(None), re.compile("KeyboardInterrupt|Interrupted"))
        assert script.process.returncode != 0
        assert not left_behind(script.mark, script.temporary)


def test_interrupts_at_any_moment_do_no_harm():
    """Interrupts at random moments of calls that send and bring back much: no other error, and no hang."""
    with Script("""
import os, random, signal, threading, time
import torch
import torch.distributed as dist
from course_utils import launch

def work(x):
    dist.barrier()
    return x

x = torch.ones(1_000_000)
launch(work, x, world_size=2)
chance = random.Random(0)
for round_ in range(8):
    timer = threading.Timer(chance.random() * 0.1, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            launch(work, x, world_size=2)
    except KeyboardInterrupt:
        pass
    assert launch(dist.get_rank, world_size=2) == [0, 1]
print("done")
""") as script:
        assert script.finish() == "done\n"


# --- things that cannot be sent ------------------------------------------------------------------------------------


LOCK = threading.Lock()


@pytest.mark.parametrize(("call", "words"), [
    (lambda: launch(print, 1, world_size=2, guard=LOCK), ["guard", "lock", re.compile("pickle", re.I)]),
    (lambda: launch(lambda: threading.Lock() if dist.get_rank() else 0, world_size=2), ["rank 1", "lock", "return"]),
], ids=["argument", "result"])
def test_what_cannot_be_sent_is_named(call, words):
    with pytest.raises((TypeError, ValueError, WorkerError)) as caught:
        call()
    says(str(caught.value), *words)
    all_is_well()


def test_what_a_function_uses_that_another_calls_is_named():
    lock = threading.Lock()

    def helper():
        return lock.locked()

    def work():
        return helper()

    with pytest.raises(TypeError) as caught:
        launch(work, world_size=2)
    says(str(caught.value), "variable 'lock' used in helper (lock)", "inside the function")
    all_is_well()


# --- refused at the door -------------------------------------------------------------------------------------------


REFUSED = [
    (print, {"world_size": 0}, ["world_size", "1"]), (print, {"world_size": 2.5}, ["world_size", "2.5"]),
    (print, {"timeout": -1}, ["timeout", "-1"]), (3, {}, ["function"]),
    (print, {"backend": "mpi"}, ["backend", "mpi", "gloo", "nccl"]),
]


def test_bad_arguments_and_variables_are_refused_with_the_allowed_values(monkeypatch):
    for function, options, words in REFUSED:
        with pytest.raises((TypeError, ValueError)) as caught:
            launch(function, "never", **options)
        says(str(caught.value), *words)
    for name in ("COURSE_WORLD_SIZE", "COURSE_IDLE_SECONDS"):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"{name}.*0"):
            patch.setenv(name, "0")
            launch(print, "never")
    all_is_well()


def test_more_gpus_than_there_are_is_refused_with_what_exists(capsys):
    gpus = torch.cuda.device_count()
    with pytest.raises(ValueError) as caught:
        launch(print, "never", world_size=gpus + 1, backend="nccl")
    says(str(caught.value), re.compile("nccl", re.I), "gloo", "GPU", re.compile(rf"\b{gpus}\b|\bno\b"), str(gpus + 1))
    assert "never" not in capsys.readouterr().out
    all_is_well()


def test_expect_error_insists_on_the_error():
    with pytest.raises(AssertionError), expect_error():
        pass
    with pytest.raises(ZeroDivisionError), expect_error(HangError):
        1 / 0  # noqa: B018
