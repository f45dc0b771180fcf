"""Promises of `launch` when nothing goes wrong: functions, results, the environment of ranks, their output."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from calls import case
from kernels import Script, left_behind

from course_utils import device, launch

pytestmark = pytest.mark.guard(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

SHOWN: list = []  # functions; the number of ranks, the lines that are shown


# --- functions and results ---------------------------------------------------------------------------------------


def test_closures_lambdas_partials_methods_and_classes_reach_the_ranks():
    offset, double = 10, lambda x: 2 * x

    class Counter:
        """Defined here, so no worker can import it."""

        def __init__(self, start):
            self.value = start

        def up(self, by):
            self.value += by
            return self

        def rank_plus(self, other):
            return dist.get_rank() + self.value + other

    def closure(counter, *rest, epochs=1):
        return double(offset) + counter.up(dist.get_rank()).value, rest, epochs

    assert launch(closure, Counter(5), 7, world_size=2, epochs=2) == [(25, (7,), 2), (26, (7,), 2)]
    assert launch(Counter(1).rank_plus, 2, world_size=2) == [3, 4]
    assert launch(functools.partial(closure, Counter(0)), world_size=2) == [(20, (), 1), (21, (), 1)]
    counters = launch(lambda: Counter(dist.get_rank()), world_size=2)
    assert [c.value for c in counters] == [0, 1]


def test_results_come_back_as_what_they_were_and_tensors_without_the_storage_that_they_view():
    def make():
        weight = torch.full((3,), 2.0, requires_grad=True)
        tied = torch.nn.Parameter(torch.ones(4))
        tensors = source | {"graph": (weight * 2).sum(), "slice": torch.arange(4_000_000.0)[10:14]}
        return tensors, {"embedding": tied, "head": tied}, torch.nn.Linear(3, 2), np.arange(2) + dist.get_rank()

    dtypes = torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64
    source = {str(dtype): torch.arange(12).reshape(3, 4).to(dtype) for dtype in dtypes}
    source |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 7), "strided": torch.arange(20.0)[::3],
               "leaf": torch.ones(3, requires_grad=True), "parameter": torch.nn.Parameter(torch.ones(2, 2))}
    for rank, (tensors, tied, layer, array) in enumerate(launch(make, world_size=2)):
        for name, sent in source.items():
            got = tensors[name]
            assert got.device.type == "cpu" and got.dtype == sent.dtype and torch.equal(got, sent), name
            assert got.requires_grad == sent.requires_grad and type(got) is type(sent), name
        assert tensors["graph"].item() == 12.0 and tensors["slice"].tolist() == [10, 11, 12, 13]
        assert tensors["slice"].untyped_storage().nbytes() == 16
        assert tied["embedding"] is tied["head"]  # memory that tensors share is shared in the result
        assert layer(torch.ones(1, 3)).shape == (1, 2) and array.tolist() == [rank, rank + 1]


def test_large_arguments_and_results_pass_while_all_ranks_print():
    big = torch.arange(4_000_000.0)  # 16 MB

    def work(x):
        print("x" * 200_000)
        return x + dist.get_rank()

    for rank, result in enumerate(launch(work, big, world_size=4)):
        assert torch.equal(result, big + rank)


# --- world size ----------------------------------------------------------------------------------------------------


def test_a_smaller_and_a_larger_world_from_the_same_workers():
    for world_size in (3, 1, 3):
        assert launch(dist.get_world_size, world_size=world_size) == [world_size] * world_size


def test_the_world_size_is_the_argument_else_the_variable_else_the_number_of_gpus_else_four(monkeypatch):
    gpus = torch.cuda.device_count()
    assert launch(dist.get_rank) == list(range(gpus if gpus > 1 else 4))
    monkeypatch.setenv("COURSE_WORLD_SIZE", "3")
    assert launch(dist.get_world_size) == [3, 3, 3]
    assert launch(dist.get_world_size, world_size=2) == [2, 2]
    assert launch(dist.get_world_size, world_size=np.int64(2)) == [2, 2]


# --- the process group and torchrun --------------------------------------------------------------------------------


def test_a_process_group_exists_by_default_and_none_with_init_false():
    def state():
        return dist.is_initialized(), device().type

    assert launch(state, world_size=2, backend="gloo") == [(True, "cpu")] * 2
    assert [initialized for initialized, _ in launch(state, world_size=2, init=False)] == [False, False]
    assert launch(lambda: dist.get_backend(), world_size=2, backend="gloo") == ["gloo"] * 2


# --- what a rank takes over from the notebook ----------------------------------------------------------------------


def test_the_current_environment_reaches_the_ranks_and_no_change_of_theirs_comes_back(monkeypatch):
    launch(dist.get_rank, world_size=2)  # the workers exist before the change

    def look():
        before = os.environ.get("A_SETTING"), os.environ.get("ANOTHER"), os.environ.get("SET_BY_A_RANK")
        os.environ["SET_BY_A_RANK"] = "1"
        return before

    monkeypatch.setenv("A_SETTING", "one")
    assert launch(look, world_size=2) == [("one", None, None)] * 2
    monkeypatch.setenv("A_SETTING", "two")
    monkeypatch.setenv("ANOTHER", "")
    assert launch(look, world_size=2) == [("two", "", None)] * 2
    monkeypatch.delenv("A_SETTING")
    assert launch(look, world_size=2) == [(None, "", None)] * 2
    assert "SET_BY_A_RANK" not in os.environ


def test_every_call_is_seeded_by_rank_and_repeats_exactly_with_one_thread():
    def draw():
        assert torch.get_num_threads() == 1
        return torch.rand(3).tolist(), np.random.rand(2).tolist(), random.random()

    first, second = launch(draw, world_size=4), launch(draw, world_size=4)
    assert first == second
    for kind in range(3):
        assert len({str(result[kind]) for result in first}) == 4
    for rank, (ours, theirs, plain) in enumerate(first):
        assert ours == torch.rand(3, generator=torch.Generator().manual_seed(rank)).tolist()
        assert theirs == np.random.RandomState(rank).rand(2).tolist()
        assert plain == random.Random(rank).random()
    assert launch(draw, world_size=2) == first[:2]


def test_neighbours_have_hash_seeds_of_their_own():
    code = """
from course_utils import launch
def look():
    return hash("a text"), list(set("the order of a set of texts is another in each process".split()))
(first, order), (second, other), (third, _), _ = launch(look, world_size=4)
print(first == second, order == other, first == third)
"""
    with Script(code, PYTHONHASHSEED="random") as script:
        assert script.finish() == "False False True\n"


# --- output --------------------------------------------------------------------------------------------------------


@case(SHOWN, 4, [
    "[ranks 0-3] hello", "[ranks 0,2] even", "[ranks 1,3] odd",
    "[rank 0] I am 0", "[rank 1] I am 1", "[rank 2] I am 2", "[rank 3] I am 3", "[ranks 1,2] only some",
])
def a_line_alike_on_all_ranks_appears_once_others_with_their_ranks():
    rank = dist.get_rank()
    print("hello")
    print("even" if rank % 2 == 0 else "odd")
    print(f"I am {rank}")
    if rank in (1, 2):
        print("only some")


@case(SHOWN, 4, ["[ranks 0-3] a", "[ranks 0-3]", "[ranks 0-3]   b", "[ranks 0-3] no end"])
def empty_lines_and_spaces_are_kept_and_a_line_may_have_no_end():
    print("a\n\n  b  \nno end", end="")


@case(SHOWN, 4, [f"[ranks 0-3] {line}" for line in ("Zürich, 東京, ∑ ✓ 🙂", "日", "broken \ufffd byte", "end")])
def characters_in_pieces_and_broken_bytes():
    print("Zürich, 東京, ∑ ✓ 🙂")
    for byte in "日".encode():
        os.write(1, bytes([byte]))
        time.sleep(0.01)
    os.write(1, b"\nbroken \xff byte\n")
    print("end")


@pytest.mark.parametrize(("work", "world_size", "lines"), SHOWN)
def test_what_ranks_print_is_shown_with_their_labels(work, world_size, lines, capsys):
    for _ in range(2):  # the second call starts afresh
        launch(work, world_size=world_size)
        shown = capsys.readouterr()
        assert [line.rstrip() for line in (shown.out + shown.err).splitlines()] == lines


def test_merged_output_is_the_same_however_ranks_interleave(capsys):
    """Equal lines, lines of pairs, and at the end a different number of lines on every rank."""

    def talk(seed):
        chance = random.Random(seed * 100 + dist.get_rank())
        lines = [line for step in range(4) for line in (f"step {step}", f"pair {dist.get_rank() // 2}, step {step}")]
        for line in [*lines, *(f"more {number}" for number in range(dist.get_rank() + 1))]:
            time.sleep(chance.random() * 0.01)
            print(line, flush=line.startswith("pair"))

    expected = []
    for step in range(4):
        expected += [f"[ranks 0-3] step {step}"]
        expected += [f"[ranks {ranks}] pair {pair}, step {step}" for pair, ranks in enumerate(("0,1", "2,3"))]
    expected += ["[ranks 0-3] more 0", "[ranks 1-3] more 1", "[ranks 2,3] more 2", "[rank 3] more 3"]
    for seed in range(4):
        launch(talk, seed, world_size=4)
        assert capsys.readouterr().out.splitlines() == expected


def test_output_from_below_python_is_caught(capfd):
    def talk():
        rank = dist.get_rank()
        os.write(1, b"by file descriptor\n")
        ctypes.CDLL(None).puts(b"by the C library")
        ctypes.CDLL(None).fflush(None)
        subprocess.run(["echo", "by a child"], check=True)
        subprocess.run(["sh", "-c", "echo to standard error >&2"], check=True)
        print(f"by Python {rank}")

    launch(talk, world_size=2)
    text = "".join(capfd.readouterr())
    for line in ["by file descriptor", "by the C library", "by a child", "to standard error"]:
        assert f"[ranks 0,1] {line}\n" in text or f"[ranks 0-1] {line}\n" in text, text
        assert text.count(line) == 1
    assert "[rank 0] by Python 0\n[rank 1] by Python 1\n" in text


# --- where it can be called from -----------------------------------------------------------------------------------


def test_a_plain_script_runs_once_shows_only_its_own_lines_and_leaves_no_files(tmp_path):
    """No main guard; neither libraries nor the server say a word; torch is imported when it is needed."""
    with Script("""
import os, sys
print("once", flush=True)
from course_utils import HangError, WorkerError, device, expect_error, launch, record, shutdown
assert "torch" not in sys.modules
assert issubclass(HangError, WorkerError) and issubclass(WorkerError, RuntimeError)
assert launch(abs, -3, world_size=2) == [3, 3]
import torch
import torch.distributed as dist

def train():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    mesh = init_device_mesh("cpu", (2,))
    for net in (DistributedDataParallel(torch.nn.Linear(8, 8)), fully_shard(torch.nn.Linear(8, 8), mesh=mesh)):
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(2):
            net(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    dist.all_gather_object([None] * 2, "x")
    dist.barrier()

def work():
    dist.new_group([0, 1])
    dist.barrier()

def own():
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()

def files():
    return sum(len(files) for _, _, files in os.walk(os.environ["TMPDIR"]))

launch(train, world_size=2)
counts = []
for _ in range(3):
    launch(work, world_size=2)
    launch(own, world_size=2, init=False)
    counts.append(files())
assert counts[-1] <= counts[0] + 1, counts
print(launch(lambda: dist.get_rank() + 1, world_size=2), torch.cuda.is_initialized())
""", TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) as script:
        assert script.finish() == "once\n[1, 2] False\n"
        assert sorted(path.name for path in script.folder.iterdir()) == ["script.py", "tmp"]
        assert not left_behind(script.mark, script.temporary)


def test_many_launches_leave_nothing_behind():
    def look():
        x = torch.ones(1)
        dist.all_reduce(x)
        return os.getpid(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def here():
        me = psutil.Process()
        return me.num_fds(), threading.active_count(), len(me.children(recursive=True))

    def settle(count):
        for _ in range(count):
            ranks = launch(look, world_size=4)
        return ranks, here()

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    ranks, mine = settle(10)
    later, after = settle(30)
    assert [pid for pid, *_ in later] == [pid for pid, *_ in ranks]
    for (_, files, threads), (_, later_files, later_threads) in zip(ranks, later, strict=True):
        assert later_files <= files + 3 and later_threads <= threads + 3
    assert all(now <= then + 3 for then, now in zip(mine, after, strict=True))
