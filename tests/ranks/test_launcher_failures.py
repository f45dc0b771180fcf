"""Promises of `launch` when something goes wrong: what the learner is told, and that the next call works."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from calls import all_is_well
from conftest import missing
from kernels import Script, left_behind, namespace

from course_utils import HangError, WorkerError, expect_error, launch, shutdown

pytestmark = pytest.mark.guard(60)

STUCK = 2.0  # seconds until a hang is called one


def failure(kind: type[WorkerError], function, *args, world_size: int = 4, **options) -> WorkerError:
    """The error that `launch` raises, after the checks that hold for every one of them."""
    with pytest.raises(kind) as caught:
        launch(function, *args, world_size=world_size, **options)
    error = caught.value
    all_is_well(world_size)
    text = str(error)
    assert "course_utils" not in text and "site-packages" not in text, text
    assert not re.search(r"\bpid\b|0x[0-9a-f]{6,}", text), text
    assert not re.search(r"(?<![\w.<:/])/(?:home|tmp|usr|work|root|var|opt|Users|private)/", text), text
    assert "Connection closed by peer" not in text and "Connection reset by peer" not in text, text
    return error


# --- exceptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_an_exception_while_others_block_in_a_collective_names_the_first_cause(culprit):
    def work():
        x = torch.ones(4)
        dist.all_reduce(x)
        if dist.get_rank() == culprit:
            raise ValueError("bad batch")  # the learner's line
        dist.all_reduce(x)

    error = failure(WorkerError, work)
    assert not isinstance(error, HangError)
    assert error.rank == culprit
    assert error.exception == "ValueError: bad batch"
    assert 'raise ValueError("bad batch")  # the learner\'s line' in error.traceback
    assert f"rank {culprit}" in str(error) and "ValueError: bad batch" in str(error)
    assert "all_reduce" in str(error)  # where the others stood
    assert 'raise ValueError("bad batch")' in str(error)


def test_the_states_hold_one_standing_for_each_rank():
    def fails():
        if dist.get_rank() == 1:
            raise ValueError("stop")
        dist.barrier()

    def hangs():
        if dist.get_rank() == 1:
            dist.barrier()

    for error in (failure(WorkerError, fails), failure(HangError, hangs, timeout=STUCK)):
        assert len(error.states) == 4


def test_the_first_cause_is_the_same_every_time():
    def work():
        if dist.get_rank() == 2:
            raise KeyError("lr")
        dist.barrier()
        dist.all_reduce(torch.ones(1))

    texts = set()
    for _ in range(6):
        error = failure(WorkerError, work)
        assert (error.rank, error.exception) == (2, "KeyError: 'lr'")
        texts.add(str(error))
    assert len(texts) == 1


def test_a_rank_that_fails_because_another_did_is_not_the_cause():
    """Ranks 0 and 1 turn the broken connection into exceptions of their own."""

    def work():
        if dist.get_rank() == 3:
            raise ZeroDivisionError("the cause")
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            raise RuntimeError("a consequence") from error

    error = failure(WorkerError, work)
    assert (error.rank, error.exception) == (3, "ZeroDivisionError: the cause")


@pytest.mark.parametrize("others", ["asleep", "busy", "done"])
def test_a_failure_is_reported_while_other_ranks_do_something_else(others):
    def work():
        if dist.get_rank() == 1:
            raise ValueError("stop")
        if others == "asleep":
            time.sleep(10_000)
        if others == "busy":
            sum(range(10**12))

    error = failure(WorkerError, work, timeout=10_000, world_size=2)
    assert (error.rank, error.exception) == (1, "ValueError: stop")


def test_the_traceback_holds_the_learners_frames_only():
    def inner(x):
        return x.view(7)  # does not fit

    def outer():
        return inner(torch.ones(3))

    error = failure(WorkerError, outer)
    assert error.rank == 0
    assert "return x.view(7)  # does not fit" in error.traceback and "return inner(torch.ones(3))" in error.traceback
    for foreign in ("course_utils", "site-packages", "cloudpickle", "multiprocessing"):
        assert foreign not in error.traceback
    assert error.traceback.index("return inner(torch") < error.traceback.index("return x.view(7)")


def test_an_error_inside_torch_ends_at_the_learners_line():
    def work():
        return torch.nn.Linear(3, 2)(torch.ones(5, 4))  # shapes differ

    error = failure(WorkerError, work)
    assert error.exception.startswith("RuntimeError: ")
    assert "torch.nn.Linear(3, 2)(torch.ones(5, 4))  # shapes differ" in str(error)


def test_exceptions_chained_by_the_learner_keep_their_cause():
    def work():
        try:
            {}["seed"]
        except KeyError as error:
            raise ValueError("no seed given") from error

    error = failure(WorkerError, work)
    assert error.exception == "ValueError: no seed given"
    assert "KeyError: 'seed'" in error.traceback


def test_all_ranks_failing_alike_are_told_as_one():
    def work():
        raise RuntimeError("everywhere")

    texts = {str(failure(WorkerError, work)) for _ in range(3)}
    assert len(texts) == 1
    assert "everywhere" in texts.pop()


def test_exception_classes_from_a_cell_are_told_by_name():
    class LossIsNaN(ArithmeticError):
        def __init__(self, step, loss):
            super().__init__(f"step {step}: {loss}")

    def work():
        raise LossIsNaN(3, float("nan"))

    error = failure(WorkerError, work)
    assert error.exception.endswith("LossIsNaN: step 3: nan")
    assert "<locals>" not in error.exception


def test_exceptions_that_cannot_be_pickled_are_told_all_the_same():
    class Holder(Exception):
        def __init__(self, text):
            super().__init__(text, threading.Lock())
            self.text = text

        def __str__(self):
            return self.text

    class Mute(Exception):
        def __str__(self):
            raise TypeError("no words")

    def work(which):
        raise {"lock": Holder, "mute": Mute}[which]("holds a lock")

    assert failure(WorkerError, work, "lock").exception.endswith("Holder: holds a lock")
    assert "Mute" in failure(WorkerError, work, "mute").exception


def test_an_exception_group_and_a_multi_line_message_are_told():
    def group():
        raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])

    def lines():
        raise ValueError("first line\nsecond line")

    text = str(failure(WorkerError, group))
    assert "several" in text and "ValueError: one" in text and "TypeError: two" in text
    text = str(failure(WorkerError, lines))
    assert "first line" in text and "second line" in text


def test_output_before_the_failure_is_shown(capsys):
    def work():
        print("before")
        if dist.get_rank() == 1:
            print("last words")
            raise ValueError("stop")
        dist.barrier()

    failure(WorkerError, work)
    assert "[ranks 0-3] before\n[rank 1] last words\n" in capsys.readouterr().out


def test_sys_exit_in_a_rank_is_told():
    def work():
        if dist.get_rank() == 1:
            sys.exit(3)
        dist.barrier()

    error = failure(WorkerError, work)
    assert error.rank == 1 and "SystemExit" in error.exception and "3" in error.exception


def test_a_keyboard_interrupt_raised_by_the_function_is_told():
    def work():
        if dist.get_rank() == 1:
            raise KeyboardInterrupt
        dist.barrier()

    error = failure(WorkerError, work)
    assert error.rank == 1 and "KeyboardInterrupt" in error.exception


def test_memory_and_recursion_errors_are_told():
    def deep(n=0):
        return deep(n + 1)

    def large():
        torch.empty(2**60)

    assert failure(WorkerError, deep).exception.startswith("RecursionError")
    assert "RuntimeError" in failure(WorkerError, large).exception


# --- deaths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGABRT"])
def test_a_rank_killed_by_a_signal_is_named_with_it(name):
    def work():
        dist.barrier()
        if dist.get_rank() == 2:
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(60)
        dist.all_reduce(torch.ones(1))

    error = failure(WorkerError, work)
    assert error.rank == 2
    assert "rank 2" in str(error) and name in str(error)
    assert not isinstance(error, HangError)


def test_a_rank_that_exits_is_named_with_its_status():
    def work():
        if dist.get_rank() == 1:
            os._exit(3)
        dist.barrier()

    error = failure(WorkerError, work)
    assert error.rank == 1
    assert re.search(r"rank 1\b.*exit.*\b3\b", str(error), re.DOTALL), str(error)


def test_a_segmentation_fault_is_named():
    def work():
        if dist.get_rank() == 1:
            ctypes.string_at(0)
        dist.barrier()

    error = failure(WorkerError, work)
    assert error.rank == 1 and "SIGSEGV" in str(error)


def test_all_ranks_dying_at_once_is_told():
    def work():
        os.kill(os.getpid(), signal.SIGKILL)

    assert "SIGKILL" in str(failure(WorkerError, work))


def gone(process: psutil.Process) -> None:
    """Wait until a process has ended (without collecting it: that is for its parent) and its parent has had time."""
    deadline = time.monotonic() + 20
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_worker_that_died_between_calls_is_replaced(name):
    worker = psutil.Process(launch(os.getpid, world_size=4)[1])
    worker.send_signal(getattr(signal, name))
    gone(worker)
    all_is_well()


def test_a_worker_that_dies_as_a_call_begins_is_named_or_replaced():
    for _ in range(3):
        os.kill(launch(os.getpid, world_size=4)[1], signal.SIGKILL)
        try:
            all_is_well()
        except WorkerError as error:
            assert "rank 1" in str(error) and "SIGKILL" in str(error)
        all_is_well()


def fork_server() -> psutil.Process:
    parent = psutil.Process(launch(os.getpid, world_size=4)[0]).parent()
    if parent.pid == os.getpid():
        pytest.skip("workers are spawned on this platform: there is no fork server")
    return parent


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_fork_server_that_died_between_calls_is_replaced(name):
    server = fork_server()
    server.send_signal(getattr(signal, name))
    if name == "SIGKILL":
        gone(server)
    else:
        time.sleep(0.3)  # it may ignore this signal
    all_is_well()
    all_is_well(6)


def test_a_fork_server_that_dies_as_a_call_begins_is_told_or_replaced():
    server = fork_server()
    server.kill()
    try:
        all_is_well()
    except WorkerError as error:
        assert "rank" in str(error)
    gone(server)
    all_is_well()


def test_a_fork_server_killed_during_a_call_is_told_and_replaced():
    server = fork_server().pid

    def work():
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(server, signal.SIGKILL)
        time.sleep(1000)

    failure(WorkerError, work, timeout=10_000)


# --- hangs ---------------------------------------------------------------------------------------------------------


def test_a_rank_that_skips_a_collective_is_named():
    def work():
        x = torch.ones(1000)
        for _ in range(3):
            dist.all_reduce(x)
        if dist.get_rank() != 2:
            dist.all_reduce(x)  # rank 2 never comes

    error = failure(HangError, work, timeout=STUCK)
    text = str(error)
    assert "rank 2" in text and "all_reduce" in text
    assert re.search(r"all_reduce number 4\b", text) and re.search(r"rank 2 never joined", text), text
    assert "dist.all_reduce(x)  # rank 2 never comes" in text
    for rank in range(4):
        assert re.search(rf"\b{rank}\b", text)
    assert "4 kB" in text  # bytes of the collective
    assert error.rank == 2


def test_a_hang_reads_the_same_every_time():
    def work():
        if dist.get_rank() == 1:
            dist.barrier()
        dist.all_reduce(torch.ones(1))

    assert len({str(failure(HangError, work, timeout=STUCK)) for _ in range(2)}) == 1


def test_a_rank_that_skips_a_collective_and_works_on_is_named():
    def work():
        if dist.get_rank() == 1:
            while True:
                time.sleep(0.01)  # something else
        dist.broadcast(torch.ones(1), src=0)
        dist.barrier()

    text = str(failure(HangError, work, timeout=STUCK))
    assert "rank 1" in text and "barrier" in text
    assert "time.sleep(0.01)  # something else" in text


def test_ranks_that_call_different_collectives_are_named():
    def work():
        x = torch.ones(1000)
        if dist.get_rank() == 3:
            dist.all_gather([torch.empty(1000) for _ in range(4)], x)
        else:
            dist.all_reduce(x)
        dist.barrier()

    text = str(failure(WorkerError, work, timeout=STUCK))
    assert "all_gather" in text and "all_reduce" in text
    assert "rank 3" in text


def test_ranks_that_pass_different_sizes_are_named():
    def work():
        x = torch.ones(1000 if dist.get_rank() != 1 else 2000)
        dist.all_reduce(x)
        dist.barrier()

    text = str(failure(WorkerError, work, timeout=STUCK))
    assert "all_reduce" in text and "rank 1" in text
    assert "4 kB" in text and "8 kB" in text


def test_a_receive_without_a_send_is_named():
    def work():
        if dist.get_rank() == 1:
            dist.recv(torch.empty(4), src=0)

    text = str(failure(HangError, work, timeout=STUCK, world_size=2))
    assert "rank 1" in text and "recv" in text and "rank 0" in text
    assert "dist.recv(torch.empty(4), src=0)" in text


def test_a_receive_is_named_although_a_send_before_it_was_not_waited_for():
    def work():
        x, rank = torch.ones(4), dist.get_rank()
        request = dist.isend(x, 1 - rank)
        dist.recv(torch.empty(4), 1 - rank)
        if rank == 0:
            dist.recv(torch.empty(4), 1)
        request.wait()

    error = failure(HangError, work, world_size=2, timeout=STUCK)
    assert "rank 0 waits in recv from rank 1" in str(error) and "rank 1 never sends it" in str(error)


def test_two_ranks_that_both_send_first_are_named():
    def work():
        x = torch.ones(8_000_000)
        other = 1 - dist.get_rank()
        dist.send(x, dst=other)
        dist.recv(x, src=other)

    text = str(failure(HangError, work, timeout=STUCK, world_size=2))
    assert text.count("send") >= 2 and "rank 0" in text and "rank 1" in text


def test_collectives_in_different_order_on_two_groups_are_told():
    def work():
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        for group in (first, second) if dist.get_rank() == 0 else (second, first):
            dist.all_reduce(torch.ones(1), group=group)

    text = str(failure(HangError, work, timeout=STUCK, world_size=2))
    assert "all_reduce" in text and "rank 0" in text and "rank 1" in text


def test_a_rank_asleep_is_named_with_its_line():
    def work():
        if dist.get_rank() == 0:
            time.sleep(10_000)  # no collective at all
        dist.barrier()

    text = str(failure(HangError, work, timeout=STUCK))
    assert "rank 0" in text and "time.sleep(10_000)  # no collective at all" in text and "barrier" in text


def test_a_rank_that_holds_the_interpreter_is_named():
    def work():
        if dist.get_rank() == 1:
            sum(range(10**12))
        dist.barrier()

    text = str(failure(HangError, work, timeout=STUCK, world_size=2))
    assert "rank 1" in text and "barrier" in text


def test_a_stopped_rank_is_named():
    def work():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    text = str(failure(HangError, work, timeout=STUCK, world_size=2))
    assert "rank 1" in text


def test_a_rank_that_ignores_interrupts_is_ended():
    def work():
        while True:
            try:
                dist.barrier()
                time.sleep(1000)
            except BaseException:
                pass

    failure(HangError, work, timeout=STUCK, world_size=2)


def test_a_rank_that_prints_without_end_is_ended(capsys):
    def work():
        if dist.get_rank() == 0:
            while True:
                print("again")
        dist.barrier()

    text = str(failure(HangError, work, timeout=STUCK / 2, world_size=2))
    assert "rank 0" in text and "barrier" in text


def test_a_hang_in_an_own_process_group_is_told():
    def program():
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        else:
            time.sleep(1000)

    text = str(failure(HangError, program, timeout=STUCK, world_size=2, init=False))
    assert "rank 0" in text and "all_reduce" in text and "time.sleep(1000)" in text


def test_a_rank_missing_at_the_start_of_an_own_process_group_is_told():
    def program():
        if dist.is_initialized() or os.environ["RANK"] == "0":
            return
        dist.init_process_group("gloo")

    text = str(failure(HangError, program, timeout=STUCK, world_size=2, init=False))
    assert "rank 1" in text and "init_process_group" in text


def test_a_hang_in_backward_of_ddp_is_told():
    def work(who):
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        loss = net(torch.ones(2, 4)).sum()
        if dist.get_rank() in who:
            loss.backward()  # rank 1 does not
            dist.barrier()

    launch(work, [0, 1], world_size=2)  # the first use of DDP imports for longer than the time-out below
    text = str(failure(WorkerError, work, [0], timeout=STUCK, world_size=2))
    assert "all_reduce" in text and "rank 1" in text


def test_a_rank_that_failed_by_itself_is_kept_and_one_that_was_interrupted_is_replaced():
    """What an interrupt may have left half done, an import for example, must not reach the next call."""

    def fails():
        if dist.get_rank() == 1:
            raise ValueError("stop")
        dist.barrier()

    def hangs():
        if dist.get_rank() == 1:
            return
        dist.barrier()

    for function, error, options in ((fails, WorkerError, {}), (hangs, HangError, {"timeout": STUCK})):
        before = launch(os.getpid, world_size=4)
        failure(error, function, **options)
        after = launch(os.getpid, world_size=4)
        assert [a == b for a, b in zip(after, before, strict=True)] == [False, True, False, False]


def test_twenty_failures_in_a_row_leave_nothing_behind():
    def fails():
        if dist.get_rank() == 1:
            raise ValueError("stop")
        dist.all_reduce(torch.ones(1))

    def count():
        me = psutil.Process()
        return me.num_fds(), threading.active_count(), len(me.children(recursive=True))

    for round_ in range(22):
        with pytest.raises(WorkerError):
            launch(fails, world_size=4)
        if round_ == 1:
            before = count()
    assert all(now <= then + 2 for then, now in zip(before, count(), strict=True))
    all_is_well()


# --- interrupts (a real kernel's are in test_launcher_kernel.py) ---------------------------------------------------


def test_an_interrupt_of_a_plain_script_stops_the_ranks_and_returns():
    with Script("""
import time
import torch
import torch.distributed as dist
from course_utils import launch

def skips():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))

def sleeps():
    time.sleep(1000)

def computes():
    sum(range(10**12))

def receives():
    dist.recv(torch.ones(1), src=1 - dist.get_rank())

def start(f):
    print("at", f.__name__)
    f()

for f in (skips, sleeps, computes, receives):
    try:
        launch(start, f, world_size=2, timeout=1000)
    except KeyboardInterrupt as error:
        print(f"<<{type(error).__name__} {error}>>")
    print("next", launch(lambda: dist.get_rank() + 5, world_size=2), flush=True)
""") as script:
        for name in ("skips", "sleeps", "computes", "receives"):
            script.read(f"at {name}")
            time.sleep(0.3)  # let the ranks arrive where they hang
            script.interrupt()
            text = script.read("next [5, 6]")
            assert "<<Interrupted" in text and "rank" in text
            if name == "skips":
                assert "all_reduce" in text
            if name == "sleeps":
                assert "time.sleep(1000)" in text
        script.finish()
        assert not left_behind(script.mark, script.temporary)


def test_an_uncaught_interrupt_ends_a_script_and_leaves_nothing():
    with Script("""
import time
from course_utils import launch

def work():
    print("started")
    time.sleep(1000)

launch(work, world_size=2, timeout=1000)
""") as script:
        script.read("started")
        script.interrupt()
        script.read(None)
        assert script.process.returncode != 0
        assert "KeyboardInterrupt" in script.text or "Interrupted" in script.text
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
for round_ in range(25):
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


def test_a_stopped_worker_is_named_even_if_much_is_sent_to_it():
    worker = psutil.Process(launch(os.getpid, world_size=2)[1])
    worker.suspend()
    error = failure(HangError, torch.sum, torch.ones(4_000_000), timeout=STUCK, world_size=2)
    assert "rank 1" in str(error)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "os._exit", "exception", "normal"])
def test_when_a_script_ends_nothing_is_left(how):
    body = {"os._exit": "os._exit(0)", "exception": "raise SystemError('stop')", "normal": ""}
    with Script(f"""
import os, threading, time
from course_utils import launch

launch(os.getpid, world_size=4)
def work():
    print("working")
    time.sleep(1000)
if {how.startswith("SIG")}:
    launch(work, world_size=4, timeout=1000)
print("ends", flush=True)
{body.get(how, "")}
""") as script:
        if how.startswith("SIG"):
            script.read("working")
            os.kill(script.process.pid, getattr(signal, how))
        script.read(None)
        assert not left_behind(script.mark, script.temporary)


# --- things that cannot be sent ------------------------------------------------------------------------------------


def test_an_argument_that_cannot_be_sent_is_named():
    for launch_it in (
        lambda: launch(print, threading.Lock(), world_size=2),
        lambda: launch(print, 1, world_size=2, guard=threading.Lock()),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            launch_it()
        text = str(caught.value)
        assert "lock" in text and "pickle" in text.lower()
        assert len(text) > 60, "says what to do"
        all_is_well()
    assert "guard" in text


def test_a_closure_that_cannot_be_sent_is_named():
    lock = threading.Lock()

    def work():
        with lock:
            return dist.get_rank()

    with pytest.raises((TypeError, ValueError)) as caught:
        launch(work, world_size=2)
    assert "lock" in str(caught.value) and "work" in str(caught.value)
    all_is_well()


def test_a_result_that_cannot_be_sent_is_named_with_its_rank():
    def work():
        return {"step": 1, "lock": threading.Lock()} if dist.get_rank() == 1 else 0

    with pytest.raises((WorkerError, TypeError)) as caught:
        launch(work, world_size=2)
    text = str(caught.value)
    assert "rank 1" in text and "lock" in text and "return" in text
    all_is_well()


def test_a_generator_as_result_is_named():
    with pytest.raises((WorkerError, TypeError)) as caught:
        launch(lambda: (i for i in range(3)), world_size=2)
    assert "generator" in str(caught.value)
    all_is_well()


def test_a_result_that_fails_to_load_is_named_with_its_rank():
    def explode():
        raise LookupError("cannot be rebuilt here")

    class Bomb:
        def __reduce__(self):
            return explode, ()

    with pytest.raises((WorkerError, TypeError)) as caught:
        launch(lambda: Bomb() if dist.get_rank() == 1 else 0, world_size=2)
    assert "rank 1" in str(caught.value) and "cannot be rebuilt here" in str(caught.value)
    all_is_well()


def test_an_argument_that_fails_to_load_is_told():
    def explode():
        raise LookupError("cannot be rebuilt there")

    class Bomb:
        def __reduce__(self):
            return explode, ()

    with pytest.raises((WorkerError, TypeError)) as caught:
        launch(print, Bomb(), world_size=2)
    assert "cannot be rebuilt there" in str(caught.value)
    all_is_well()


# --- refused at the door -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "kind", "words"), [
    ({"world_size": 0}, ValueError, ["world_size", "1"]),
    ({"world_size": -2}, ValueError, ["world_size", "-2"]),
    ({"world_size": 2.5}, (TypeError, ValueError), ["world_size", "2.5"]),
    ({"world_size": "4"}, (TypeError, ValueError), ["world_size", "4"]),
    ({"timeout": 0}, ValueError, ["timeout", "0"]),
    ({"timeout": -1}, ValueError, ["timeout", "-1"]),
    ({"timeout": float("nan")}, ValueError, ["timeout", "nan"]),
    ({"timeout": "soon"}, (TypeError, ValueError), ["timeout", "soon"]),
    ({"backend": "carrier pigeon"}, ValueError, ["backend", "carrier pigeon", "gloo", "nccl"]),
    ({"backend": 3}, (TypeError, ValueError), ["backend", "3"]),
])
def test_a_bad_option_is_refused_with_the_allowed_values(options, kind, words):
    with pytest.raises(kind) as caught:
        launch(print, "never", **options)
    for word in words:
        assert word in str(caught.value)
    all_is_well()


@pytest.mark.parametrize("function", [None, 3, "train", [print]])
def test_something_that_cannot_be_called_is_refused(function):
    with pytest.raises(TypeError, match="function|callable"):
        launch(function, world_size=2)
    all_is_well()


@pytest.mark.parametrize("name", ["COURSE_WORLD_SIZE", "COURSE_IDLE_SECONDS"])
@pytest.mark.parametrize("value", ["many", "0", "-1", "2.5"])
def test_a_bad_variable_of_the_environment_is_refused_by_name(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name) as caught:
        launch(print, "never")
    assert value in str(caught.value)
    monkeypatch.delenv(name)
    all_is_well()


def test_more_gpus_than_there_are_is_refused_with_what_exists(capsys):
    gpus = torch.cuda.device_count()
    with pytest.raises(ValueError) as caught:
        launch(print, "never", world_size=gpus + 1, backend="nccl")
    text = str(caught.value)
    assert "nccl" in text.lower() and "gloo" in text and "GPU" in text
    assert re.search(rf"\b{gpus}\b|\bno\b", text) and str(gpus + 1) in text
    assert "never" not in capsys.readouterr().out
    all_is_well()


def test_a_launch_inside_a_rank_is_refused():
    def nested():
        from course_utils import launch as inner

        return inner(dist.get_rank, world_size=2)

    error = failure(WorkerError, nested, world_size=2)
    assert "launch" in error.exception and "rank" in error.exception


def test_expect_error_shows_the_error_and_insists_on_it(capsys):
    def work():
        raise ValueError("as told")

    with expect_error(WorkerError):
        launch(work, world_size=2)
    shown = capsys.readouterr()
    assert "ValueError: as told" in shown.out + shown.err and "course_utils" not in shown.out + shown.err
    with expect_error():
        launch(work, world_size=2)
    assert capsys.readouterr().out == shown.out
    with pytest.raises(AssertionError):
        with expect_error():
            pass
    with pytest.raises(ZeroDivisionError):
        with expect_error(HangError):
            1 / 0  # noqa: B018


# --- a machine that is full ----------------------------------------------------------------------------------------


FULL = """
import os, subprocess, sys, tempfile
from pathlib import Path

folder = Path({folder!r})
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k,nr_inodes=40", "none", str(folder)], check=True)
tempfile.gettempdir()  # as in a kernel: the temporary folder was chosen while there was space

def fill():
    for i in range(100):
        try:
            with open(folder / f"filler{{i}}", "wb", buffering=0) as file:
                while file.write(b"x" * 512):
                    pass
        except OSError:
            continue

def free():
    for path in folder.glob("filler*"):
        path.unlink()

import torch
import torch.distributed as dist
{before}
from course_utils import launch
{warm}
fill()

def work():
    x = torch.full((1_000_000,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x

for attempt in range(2):
    try:
        print("RESULT", [t.sum().item() for t in launch(work, world_size=2)])
    except Exception as error:
        print("ERROR", type(error).__name__, str(error).replace("\\n", " "))
free()
print("NEXT", launch(lambda: dist.get_rank() + 5, world_size=2))
"""


def may_mount(folder: Path) -> list[str]:
    return namespace("m", "mount", "-t", "tmpfs", "none", str(folder)) or missing("the right to mount a small tmpfs")


@pytest.mark.parametrize("when", ["before the first call", "after the first call"])
@pytest.mark.parametrize("where", ["shared memory", "temporary folder"])
def test_a_full_disk_is_told_or_not_needed(where, when, tmp_path):
    if where == "shared memory" and not Path("/dev/shm").is_dir():
        pytest.skip("this platform has no /dev/shm")
    prefix = may_mount(tmp_path)
    folder = "/dev/shm" if where == "shared memory" else str(tmp_path)
    early = when == "before the first call"
    text = FULL.format(
        folder=folder, before="fill()" if early else "", warm="" if early else "launch(dist.get_rank, world_size=2)"
    )
    extra = {} if where == "shared memory" else {"TMPDIR": folder}
    with Script(text, prefix=prefix, **extra) as script:
        out = script.finish()
    told = [line for line in out.splitlines() if line.startswith(("RESULT", "ERROR"))]
    assert len(told) == 2
    for line in told:
        if line.startswith("ERROR"):
            assert re.search(r"space|full", line) and (folder in line or where in line), line
        else:
            assert line == "RESULT [3000000.0, 3000000.0]"
    assert out.splitlines()[-1] == "NEXT [5, 6]"


def test_a_data_loader_without_shared_memory_fails_clearly(tmp_path):
    if not Path("/dev/shm").is_dir():
        pytest.skip("this platform has no /dev/shm")
    prefix = may_mount(tmp_path)
    with Script(
        """
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", "/dev/shm"], check=True)
import torch
import torch.distributed as dist
from course_utils import launch, WorkerError

def load():
    return len(list(torch.utils.data.DataLoader(torch.ones(8, 1_000_000), num_workers=1)))

try:
    print("RESULT", launch(load, world_size=2))
except WorkerError as error:
    print("ERROR", error.exception)
print("NEXT", launch(dist.get_rank, world_size=2))
""",
        prefix=prefix,
    ) as script:
        out = script.finish()
    assert out.startswith("ERROR RuntimeError") and re.search(r"shared memory|shm|No space|[Bb]us error", out), out
    assert out.splitlines()[-1] == "NEXT [0, 1]"


def test_the_tests_end_with_working_ranks_and_shutdown_ends_all():
    all_is_well()
    pids = launch(os.getpid, world_size=4)
    shutdown()
    gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    assert not alive


def test_a_copy_of_the_package_in_a_subprocess_is_not_disturbed():
    """A notebook's own child process may launch for itself."""
    pids = launch(os.getpid, world_size=2)
    code = "from course_utils import launch\nimport torch.distributed as dist\n"
    code += "print(launch(dist.get_rank, world_size=2))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert run.stdout == "[0, 1]\n", run.stderr
    assert launch(os.getpid, world_size=2) == pids
