"""Promises of `launch` when nothing goes wrong: functions, results, the environment of ranks, their output."""

from __future__ import annotations

import collections
import ctypes
import functools
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from kernels import Script, left_behind, surroundings

from course_utils import device, launch, shutdown

pytestmark = pytest.mark.guard(90)

TORCHRUN_NAMES = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


# --- functions and results ---------------------------------------------------------------------------------------


def test_results_come_by_rank():
    assert launch(lambda: dist.get_rank() ** 2, world_size=4) == [0, 1, 4, 9]


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

    def closure(counter):
        return double(offset) + counter.up(dist.get_rank()).value

    assert launch(closure, Counter(5), world_size=2) == [25, 26]
    assert launch(Counter(1).rank_plus, 2, world_size=2) == [3, 4]
    assert launch(functools.partial(closure, Counter(0)), world_size=2) == [20, 21]
    counters = launch(lambda: Counter(dist.get_rank()), world_size=2)
    assert [c.value for c in counters] == [0, 1]


def test_recursive_functions_and_default_arguments_survive_the_journey():
    def factorial(n, one=1):
        return one if n <= 1 else n * factorial(n - 1)

    assert launch(lambda: factorial(5 + dist.get_rank()), world_size=2) == [120, 720]


def test_arguments_by_position_and_by_name_reach_the_function():
    def echo(a, b, *rest, c, **named):
        return a, b, rest, c, named

    results = launch(echo, 1, [2], 3, 4, world_size=2, c={"k": 5}, epochs=2)
    assert results == [(1, [2], (3, 4), {"k": 5}, {"epochs": 2})] * 2


def test_an_argument_changed_by_a_rank_stays_the_notebooks_own():
    mine = {"values": [1], "tensor": torch.zeros(2)}

    def change(theirs):
        theirs["values"].append(dist.get_rank())
        theirs["tensor"] += 1
        return theirs["values"], theirs["tensor"].tolist()

    assert launch(change, mine, world_size=2) == [([1, 0], [1.0, 1.0]), ([1, 1], [1.0, 1.0])]
    assert mine["values"] == [1] and mine["tensor"].tolist() == [0, 0]


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    names = ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64"]
    kinds = {name: torch.randn(3, 4).to(getattr(torch, name)) for name in names}
    kinds["scalar"] = torch.tensor(3.5)
    kinds["empty"] = torch.empty(0, 7)
    kinds["transposed"] = torch.arange(12.0).reshape(3, 4).t()
    kinds["strided"] = torch.arange(20.0)[::3]
    kinds["expanded"] = torch.ones(1).expand(1000)
    kinds["leaf"] = torch.ones(3, requires_grad=True)
    kinds["parameter"] = torch.nn.Parameter(torch.ones(2, 2))
    kinds["conjugate"] = torch.tensor([1 + 2j]).conj()
    return kinds


def test_tensors_of_every_kind_come_back_equal_and_on_the_cpu():
    source = tensors()

    def make():
        return source

    for result in launch(make, world_size=2):
        assert result.keys() == source.keys()
        for name, sent in source.items():
            got = result[name]
            assert got.device.type == "cpu" and got.dtype == sent.dtype and got.shape == sent.shape, name
            assert torch.equal(got, sent), name
            assert got.requires_grad == sent.requires_grad, name
            assert type(got) is type(sent), name


def test_a_result_with_a_graph_behind_it_comes_back():
    def loss():
        weight = torch.full((3,), 2.0, requires_grad=True)
        return (weight * (dist.get_rank() + 1)).sum()

    first, second = launch(loss, world_size=2)
    assert (first.item(), second.item()) == (6.0, 12.0)


def test_a_view_does_not_drag_its_storage_along():
    def views():
        big = torch.arange(4_000_000.0)
        return {"slice": big[10:14], "row": big.reshape(2000, 2000)[7], "grad": big.clone().requires_grad_()[:2]}

    for result in launch(views, world_size=2):
        assert result["slice"].tolist() == [10, 11, 12, 13]
        assert result["row"].tolist() == list(range(14000, 16000))
        for name, tensor in result.items():
            assert tensor.untyped_storage().nbytes() <= 4 * 2000, name


def test_modules_state_dicts_and_arrays_come_back():
    def make():
        net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        others = torch.Size([1, 2]), torch.float16, torch.device("cpu")
        return net, net.state_dict(), np.arange(3) + dist.get_rank(), others

    for rank, (net, state, array, others) in enumerate(launch(make, world_size=2)):
        assert torch.equal(net[0].weight, state["0.weight"])
        assert net(torch.ones(1, 3)).shape == (1, 2)
        assert array.tolist() == [rank, rank + 1, rank + 2]
        assert others == (torch.Size([1, 2]), torch.float16, torch.device("cpu"))


def test_tensors_that_share_memory_still_share_it_in_the_result():
    def tied():
        weight = torch.nn.Parameter(torch.ones(4))
        return {"embedding": weight, "head": weight}

    result = launch(tied, world_size=1)[0]
    assert result["embedding"] is result["head"]


def test_large_arguments_and_results_pass_while_all_ranks_print():
    big = torch.arange(4_000_000.0)  # 16 MB

    def work(x):
        print("x" * 200_000)
        return x + dist.get_rank()

    for rank, result in enumerate(launch(work, big, world_size=4)):
        assert torch.equal(result, big + rank)


def test_sequences_and_named_tuples_keep_their_type():
    Point = collections.namedtuple("Point", "x y")
    result = launch(lambda: (Point(1, torch.ones(2)), {1, 2}, collections.OrderedDict(a=1)), world_size=1)[0]
    assert (result[0].x, result[0].y.tolist()) == (1, [1, 1]) and type(result[0]).__name__ == "Point"
    assert result[1:] == ({1, 2}, collections.OrderedDict(a=1))


# --- world size ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3, 32])
def test_world_size(world_size):
    def total():
        x = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(x)
        return dist.get_world_size(), x.item()

    try:
        assert launch(total, world_size=world_size) == [(world_size, world_size * (world_size + 1) / 2)] * world_size
        # a smaller and the same world again, from the same workers
        assert launch(dist.get_world_size, world_size=1) == [1]
        assert launch(dist.get_world_size, world_size=world_size) == [world_size] * world_size
    finally:
        if world_size > 8:
            shutdown()


def test_the_default_world_size_is_the_number_of_gpus_if_several_else_four():
    gpus = torch.cuda.device_count()
    assert len(launch(dist.get_rank)) == (gpus if gpus > 1 else 4)


def test_course_world_size_overrides_the_default_and_an_argument_overrides_both(monkeypatch):
    monkeypatch.setenv("COURSE_WORLD_SIZE", "3")
    assert launch(dist.get_world_size) == [3, 3, 3]
    assert launch(dist.get_world_size, world_size=2) == [2, 2]


# --- the process group and torchrun --------------------------------------------------------------------------------


@pytest.mark.parametrize("init", [True, False])
def test_the_environment_of_a_rank_is_that_of_torchrun(init):
    def environment():
        return {name: os.environ[name] for name in TORCHRUN_NAMES}

    ranks = launch(environment, world_size=3, init=init)
    for rank, env in enumerate(ranks):
        assert env["RANK"] == env["LOCAL_RANK"] == str(rank)
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "3"
        assert int(env["MASTER_PORT"]) > 0
    assert len({env["MASTER_PORT"] for env in ranks}) == len({env["MASTER_ADDR"] for env in ranks}) == 1


def test_a_process_group_exists_by_default_and_none_with_init_false():
    def state():
        return dist.is_initialized(), device().type

    assert launch(state, world_size=2, backend="gloo") == [(True, "cpu")] * 2
    assert [initialized for initialized, _ in launch(state, world_size=2, init=False)] == [False, False]
    assert launch(lambda: dist.get_backend(), world_size=2, backend="gloo") == ["gloo"] * 2


def torchrun_program() -> str:
    return """
import json, os, sys
import torch
import torch.distributed as dist


def main(folder=None):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    net = torch.nn.Linear(4, 1)
    for step in range(3):
        loss = net(torch.full((2, 4), float(rank + step))).square().mean()
        net.zero_grad()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.data -= 0.01 * p.grad / dist.get_world_size()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (rank, int(os.environ["LOCAL_RANK"])))
    dist.barrier()
    dist.destroy_process_group()
    result = {"weights": net.weight.flatten().tolist(), "gathered": [list(g) for g in gathered], "loss": loss.item()}
    if folder:
        with open(os.path.join(folder, f"rank{rank}.json"), "w") as file:
            json.dump(result, file)
    return result


if __name__ == "__main__":
    main(sys.argv[1])
"""


def test_an_unchanged_torchrun_program_runs_and_equals_torchrun(tmp_path, monkeypatch):
    (tmp_path / "a_program.py").write_text(torchrun_program())
    monkeypatch.syspath_prepend(str(tmp_path))
    import a_program

    ours = launch(a_program.main, world_size=2, init=False)
    assert launch(a_program.main, world_size=2, init=False) == ours  # twice in a row
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = surroundings() | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, str(tmp_path / "a_program.py"), str(tmp_path)], env=env, capture_output=True, text=True, timeout=80
    )
    assert run.returncode == 0, run.stderr
    theirs = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ours == theirs


def test_programs_with_and_without_an_own_process_group_alternate():
    def own():
        dist.init_process_group(backend="gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.destroy_process_group()
        return x.item()

    def given():
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    for _ in range(2):
        assert launch(own, world_size=2, init=False) == [2, 2]
        assert launch(given, world_size=2) == [2, 2]
        assert launch(own, world_size=3, init=False) == [3, 3, 3]


def test_init_twice_within_one_program():
    def twice():
        sums = []
        for _ in range(2):
            dist.init_process_group(backend="gloo")
            x = torch.ones(1)
            dist.all_reduce(x)
            sums.append(x.item())
            dist.barrier()
            dist.destroy_process_group()
        return sums

    assert launch(twice, world_size=2, init=False) == [[2, 2], [2, 2]]


def test_a_program_that_forgets_to_destroy_its_group_does_not_disturb_the_next():
    def forgets():
        dist.init_process_group(backend="gloo")
        dist.barrier()
        return dist.get_rank()

    assert launch(forgets, world_size=2, init=False) == [0, 1]
    assert launch(forgets, world_size=2, init=False) == [0, 1]
    assert launch(dist.get_rank, world_size=2) == [0, 1]


def test_a_group_ends_after_the_function_and_not_where_ddp_lets_go_of_it():
    """Else its threads are joined while Python's lock is held, which one of them may want: once in some fifty runs."""

    def gloo_threads():
        tasks = Path("/proc/self/task").glob("*/comm")
        return sum("gloo_runloop" in task.read_text() for task in tasks)

    def trains():
        dist.init_process_group(backend="gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        dist.barrier()
        dist.destroy_process_group()
        before = gloo_threads()
        del model
        return before, gloo_threads()

    for _ in range(2):
        for before, after in launch(trains, world_size=2, init=False):
            assert before == after > 0 or not Path("/proc/self/task").exists()
    assert launch(gloo_threads, world_size=2, init=False) == [0, 0]


def test_a_function_may_destroy_the_process_group_it_was_given():
    def destroys():
        dist.barrier()
        dist.destroy_process_group()
        return dist.is_initialized()

    for _ in range(2):
        assert launch(destroys, world_size=4) == [False] * 4
        assert launch(dist.get_rank, world_size=4) == [0, 1, 2, 3]


def test_sub_groups_work_call_after_call():
    def pairs():
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=groups[dist.get_rank() // 2])
        return x.item()

    for _ in range(3):
        assert launch(pairs, world_size=4) == [1, 1, 5, 5]


def test_a_device_mesh_works_call_after_call():
    def rows_and_columns():
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        sums = []
        for name in ("row", "column"):
            x = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(x, group=mesh.get_group(name))
            sums.append(x.item())
        return sums

    for _ in range(2):
        assert launch(rows_and_columns, world_size=4) == [[2, 1], [4, 1], [2, 5], [4, 5]]


def test_a_data_loader_with_workers_of_its_own_runs_in_a_rank():
    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, i):
            return torch.tensor(i * i)

    def load():
        data = Squares()
        sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
        loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler, num_workers=2)
        return torch.cat(list(loader)).tolist()

    assert launch(load, world_size=2) == [[i * i for i in range(rank, 16, 2)] for rank in range(2)]
    assert launch(dist.get_rank, world_size=2) == [0, 1]


def test_subprocesses_and_threads_run_in_a_rank():
    def work():
        import multiprocessing
        import threading

        with multiprocessing.get_context("fork").Pool(2) as pool:
            squares = pool.map(abs, [-1, -2])
        seen = []
        thread = threading.Thread(target=lambda: seen.append(dist.get_rank()))
        thread.start()
        thread.join()
        return squares, seen

    assert launch(work, world_size=2) == [([1, 2], [0]), ([1, 2], [1])]


# --- what a rank takes over from the notebook ----------------------------------------------------------------------


def test_the_current_environment_reaches_the_ranks(monkeypatch):
    launch(dist.get_rank, world_size=2)  # the workers exist before the change

    def look():
        return os.environ.get("A_SETTING"), os.environ.get("ANOTHER")

    monkeypatch.setenv("A_SETTING", "one")
    assert launch(look, world_size=2) == [("one", None)] * 2
    monkeypatch.setenv("A_SETTING", "two")
    monkeypatch.setenv("ANOTHER", "")
    assert launch(look, world_size=2) == [("two", "")] * 2
    monkeypatch.delenv("A_SETTING")
    assert launch(look, world_size=2) == [(None, "")] * 2


def test_what_a_rank_sets_in_its_environment_stays_in_that_call():
    def change():
        os.environ["SET_BY_A_RANK"] = "1"

    launch(change, world_size=2)
    assert "SET_BY_A_RANK" not in os.environ
    assert launch(lambda: os.environ.get("SET_BY_A_RANK"), world_size=2) == [None, None]


def test_the_current_folder_reaches_the_ranks(tmp_path, monkeypatch):
    launch(dist.get_rank, world_size=2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.txt").write_text("here")
    assert launch(lambda: (os.getcwd(), Path("data.txt").read_text()), world_size=2) == [(str(tmp_path), "here")] * 2
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    assert launch(os.getcwd, world_size=2) == [str(inner)] * 2


def test_the_current_import_path_reaches_the_ranks(tmp_path, monkeypatch):
    launch(dist.get_rank, world_size=2)
    (tmp_path / "a_helper_beside_the_notebook.py").write_text("def triple(x):\n    return 3 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import a_helper_beside_the_notebook

    def use():
        import a_helper_beside_the_notebook as helper

        return helper.triple(dist.get_rank())

    assert launch(use, world_size=2) == [0, 3]
    assert launch(a_helper_beside_the_notebook.triple, 2, world_size=2) == [6, 6]


def test_every_call_is_seeded_by_rank_and_repeats_exactly():
    def draw():
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


def test_the_notebooks_own_random_state_is_left_alone():
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.Generator().manual_seed(1), random.Random(1)
    launch(dist.get_rank, world_size=2)
    assert torch.rand(1).item() == torch.rand(1, generator=expected[0]).item()
    assert random.random() == expected[1].random()


def test_a_rank_computes_with_one_thread():
    def threads(then):
        before = torch.get_num_threads()
        torch.set_num_threads(then)
        return before

    for _ in range(2):
        assert launch(threads, 3, world_size=2) == [1, 1]


def test_the_environment_threads_can_still_be_chosen_inside_a_call():
    def more():
        torch.set_num_threads(2)
        return torch.get_num_threads()

    assert launch(more, world_size=2) == [2, 2]


def test_workers_stay_warm_between_calls_and_shutdown_ends_them():
    first = launch(os.getpid, world_size=4)
    assert launch(os.getpid, world_size=4) == first
    assert len(set(first)) == 4 and os.getpid() not in first
    shutdown()
    psutil.wait_procs([psutil.Process(pid) for pid in first if psutil.pid_exists(pid)], timeout=20)
    assert not any(psutil.pid_exists(pid) for pid in first)
    assert not set(first) & set(launch(os.getpid, world_size=4))
    shutdown()
    shutdown()


# --- output --------------------------------------------------------------------------------------------------------


def test_a_line_alike_on_all_ranks_appears_once_others_with_their_ranks(capsys):
    def talk():
        rank = dist.get_rank()
        print("hello")
        print("even" if rank % 2 == 0 else "odd")
        print(f"I am {rank}")
        if rank in (1, 2):
            print("only some")

    launch(talk, world_size=4)
    assert capsys.readouterr().out.splitlines() == [
        "[ranks 0-3] hello",
        "[ranks 0,2] even",
        "[ranks 1,3] odd",
        "[rank 0] I am 0",
        "[rank 1] I am 1",
        "[rank 2] I am 2",
        "[rank 3] I am 3",
        "[ranks 1,2] only some",
    ]


def test_one_rank_alone_is_labelled_too(capsys):
    launch(lambda: print("alone"), world_size=1)
    assert capsys.readouterr().out == "[rank 0] alone\n"


def test_merged_output_is_the_same_however_ranks_interleave(capsys):
    def talk(seed):
        chance = random.Random(seed * 100 + dist.get_rank())
        for step in range(4):
            time.sleep(chance.random() * 0.01)
            print(f"step {step}")
            time.sleep(chance.random() * 0.01)
            print(f"pair {dist.get_rank() // 2}, step {step}")
            sys.stdout.flush()

    expected = []
    for step in range(4):
        expected += [f"[ranks 0-3] step {step}"]
        expected += [f"[ranks {ranks}] pair {pair}, step {step}" for pair, ranks in enumerate(("0,1", "2,3"))]
    for seed in range(12):
        launch(talk, seed, world_size=4)
        assert capsys.readouterr().out.splitlines() == expected


def test_ranks_that_print_different_numbers_of_lines_merge_deterministically(capsys):
    def talk(seed):
        chance = random.Random(seed * 100 + dist.get_rank())
        for line in range(dist.get_rank() + 1):
            time.sleep(chance.random() * 0.01)
            print(f"line {line}")

    for seed in range(6):
        launch(talk, seed, world_size=4)
        assert capsys.readouterr().out.splitlines() == [
            "[ranks 0-3] line 0",
            "[ranks 1-3] line 1",
            "[ranks 2,3] line 2",
            "[rank 3] line 3",
        ]


def test_output_is_live(tmp_path):
    """The first line is on the screen while the function still runs: the ranks wait until we have seen it."""
    with Script(f"""
import time
from pathlib import Path
from course_utils import launch

def work():
    print("first")
    while not Path({str(tmp_path / "seen")!r}).exists():
        time.sleep(0.01)
    print("second")

launch(work, world_size=2)
""") as script:
        script.read("[ranks 0,1] first")
        (tmp_path / "seen").touch()
        script.read("[ranks 0,1] second")
        script.finish()


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


def test_c_output_still_buffered_at_the_end_is_not_lost(capsys):
    launch(lambda: ctypes.CDLL(None).printf(b"in a C buffer\n") and None, world_size=2)
    assert "in a C buffer" in capsys.readouterr().out


def test_standard_error_is_labelled_too(capsys):
    launch(lambda: print("a note", file=sys.stderr), world_size=4)
    captured = capsys.readouterr()
    assert "[ranks 0-3] a note\n" in captured.out + captured.err


def test_a_line_without_an_end_is_shown_and_the_next_call_starts_afresh(capsys):
    for text in ("no end", "second call"):
        launch(lambda text=text: print(text, end=""), world_size=4)
    assert capsys.readouterr().out.splitlines() == ["[ranks 0-3] no end", "[ranks 0-3] second call"]


def test_a_line_written_in_pieces_stays_one_line(capsys):
    def talk():
        for piece in "one line":
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()

    launch(talk, world_size=4)
    assert capsys.readouterr().out == "[ranks 0-3] one line\n"


def test_progress_bars_end_in_their_last_state(capsys):
    def bar():
        for percent in range(0, 101, 5):
            sys.stderr.write(f"\r{percent:3d} %|{'#' * (percent // 5)}")
            sys.stderr.flush()
        sys.stderr.write("\n")
        print("done")

    texts = []
    for _ in range(3):
        launch(bar, world_size=2)
        captured = capsys.readouterr()
        texts.append(captured.out + captured.err)
    shown = [line.split("\r")[-1].rstrip() for line in texts[0].splitlines()]
    assert any("100 %|####################" in line for line in shown)
    assert any(line.endswith("done") for line in shown)
    assert texts[0].count("\n") <= 25
    assert texts == texts[:1] * 3


def test_very_long_output_is_complete_and_in_order(capsys):
    lines = 9_000

    def talk():
        for i in range(lines):
            print(i)
        print("y" * 1_000_000)
        print(f"rank {dist.get_rank()} done")

    launch(talk, world_size=2)
    out = capsys.readouterr().out.splitlines()
    labels = {line.split("]")[0] for line in out[:lines]}
    assert len(labels) == 1
    assert [line.split("] ")[1] for line in out[:lines]] == [str(i) for i in range(lines)]
    assert out[lines].endswith("y" * 10_000 + " … (990,000 more characters)")
    assert out[lines + 1 :] == ["[rank 0] rank 0 done", "[rank 1] rank 1 done"]


def test_unicode_and_broken_bytes_in_output(capsys):
    def talk():
        print("Zürich, 東京, ∑ ✓ 🙂")
        for byte in "日".encode():
            os.write(1, bytes([byte]))
            time.sleep(0.01)
        os.write(1, b"\n")
        os.write(1, b"broken \xff byte\n")
        print("end")

    launch(talk, world_size=4)
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["[ranks 0-3] Zürich, 東京, ∑ ✓ 🙂", "[ranks 0-3] 日"]
    assert out[2].startswith("[ranks 0-3] broken ") and out[3] == "[ranks 0-3] end"


def test_bytes_that_look_like_control_records_are_shown_as_text(capsys):
    def talk():
        os.write(1, b"\x1eDnot a record\n\x1e\n")
        os.write(1, bytes(set(range(256)) - set(b"\r\n")) + b"\n")
        print("the end")

    launch(talk, world_size=2)
    out = capsys.readouterr().out
    assert "not a record" in out and out.endswith("[ranks 0,1] the end\n")


def test_empty_lines_and_spaces_are_kept(capsys):
    launch(lambda: print("a\n\n  b  \n"), world_size=4)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "[ranks 0-3] a",
        "[ranks 0-3]",
        "[ranks 0-3]   b",
        "[ranks 0-3]",
    ]


def test_a_learners_own_warning_is_shown(capsys):
    launch(lambda: warnings.warn("mind the gap", stacklevel=1), world_size=2)
    captured = capsys.readouterr()
    assert "mind the gap" in captured.out + captured.err


def test_reading_standard_input_in_a_rank_fails_at_once():
    def ask():
        try:
            return input("name? ")
        except (EOFError, OSError) as error:
            return type(error).__name__

    assert set(launch(ask, world_size=2)) <= {"EOFError", "OSError"}


def test_dependencies_do_not_litter():
    """A fresh process trains with DDP and FSDP2, runs a program with an own group, and prints its own line only."""
    with Script("""
import torch
import torch.distributed as dist
from course_utils import launch

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

def own():
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()

launch(train, world_size=2)
launch(own, world_size=2, init=False)
print("the end")
""") as script:
        assert script.finish() == "the end\n"


# --- where it can be called from -----------------------------------------------------------------------------------


def test_a_plain_script_without_a_main_guard_runs_once():
    with Script("""
print("once")
import torch.distributed as dist
from course_utils import launch
print(launch(lambda: dist.get_rank() + 1, world_size=2))
""") as script:
        assert script.finish() == "once\n[1, 2]\n"


@pytest.mark.parametrize("imported", [False, True])
def test_what_is_slow_to_import_is_there_if_the_notebook_has_it(imported):
    with Script(f"""
{"import torch.distributed.fsdp" if imported else ""}
import sys
from course_utils import launch
print(launch(lambda: "torch.distributed.fsdp" in sys.modules, world_size=2))
""") as script:
        assert script.finish() == f"{[imported] * 2}\n"


@pytest.mark.parametrize(("then", "shared"), [("", False), ("import course_utils.models", True)])
def test_what_optimizers_import_is_there_for_who_has_models(then, shared):
    """The module that every optimizer imports; the server that the launcher has started gives way to one with it."""
    with Script(f"""
import sys
from course_utils import launch
{then}
print(launch(lambda: "torch._dynamo" in sys.modules, world_size=2))
""") as script:
        assert script.finish() == f"{[shared] * 2}\n"
        assert not [*script.temporary.glob("course-*")]


def test_ranks_that_run_are_not_disturbed_by_what_later_ones_would_share():
    with Script("""
import os, sys
from course_utils import launch
first = launch(os.getpid, world_size=2)
import course_utils.models
print(launch(os.getpid, world_size=2) == first, launch(lambda: "torch._dynamo" in sys.modules, world_size=2))
""") as script:
        assert script.finish() == "True [False, False]\n"


def test_a_thread_may_launch():
    got = []
    thread = threading.Thread(target=lambda: got.append(launch(dist.get_rank, world_size=2)))
    thread.start()
    thread.join(60)
    assert got == [[0, 1]]
    assert launch(dist.get_rank, world_size=2) == [0, 1]


def test_threads_that_launch_at_once_take_turns_or_are_told():
    got: list = []

    def call(base):
        try:
            got.append((base, launch(lambda: base + dist.get_rank(), world_size=2)))
        except RuntimeError as error:
            got.append(("told", str(error)))

    threads = [threading.Thread(target=call, args=(base,)) for base in (0, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) == 3
    for base, result in got:
        assert result == [base, base + 1] if base != "told" else "launch" in result
    assert launch(dist.get_rank, world_size=2) == [0, 1]


def test_a_notebook_may_fork_and_its_fork_is_told_to_leave_the_ranks_alone():
    import multiprocessing

    pids = launch(os.getpid, world_size=2)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def child():
        try:
            theirs.send(launch(os.getpid, world_size=2))
        except RuntimeError as error:
            theirs.send(str(error))

    process = fork.Process(target=child)
    process.start()
    assert ours.poll(60)
    answer = ours.recv()
    process.join(30)
    assert "fork" in answer if isinstance(answer, str) else not set(answer) & set(pids)
    loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=4, num_workers=2)
    assert torch.cat(list(loader)).tolist() == list(range(8))
    assert launch(os.getpid, world_size=2) == pids


def test_two_hundred_launches_leave_nothing_behind():
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
    ranks, mine = settle(20)
    later, after = settle(200)
    assert [pid for pid, *_ in later] == [pid for pid, *_ in ranks]
    for (_, files, threads), (_, later_files, later_threads) in zip(ranks, later, strict=True):
        assert later_files <= files + 3 and later_threads <= threads + 3
    assert all(now <= then + 3 for then, now in zip(mine, after, strict=True))


def test_files_stay_in_the_temporary_folder_do_not_grow_and_go():
    with Script("""
import os
import torch.distributed as dist
from course_utils import launch

def work():
    dist.new_group([0, 1])
    dist.barrier()

def own():
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()

def files():
    return sum(len(files) for _, _, files in os.walk(os.environ["TMPDIR"]))

counts = []
for _ in range(10):
    launch(work, world_size=2)
    launch(own, world_size=2, init=False)
    counts.append(files())
print(counts[-1] <= counts[0] + 1)
""") as script:
        assert script.finish() == "True\n", "files in the temporary folder grow with calls"
        assert sorted(path.name for path in script.folder.iterdir()) == ["script.py", "tmp"]
        assert not left_behind(script.mark, script.temporary)


def test_import_does_not_import_torch_and_the_doc_names_are_there():
    code = (
        "import sys, course_utils; print('torch' in sys.modules); "
        "from course_utils import launch, WorkerError, HangError, record, device, shutdown, expect_error; "
        "print(issubclass(HangError, WorkerError), issubclass(WorkerError, RuntimeError))"
    )
    run = subprocess.run([sys.executable, "-c", code], env=surroundings(), capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["False", "True", "True"], run.stderr
    assert not re.search(r"warn|error", run.stderr, re.IGNORECASE), run.stderr
