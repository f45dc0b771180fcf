"""Promises of the emulated links: exact times on a virtual clock, unchanged programs, nothing left behind."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT

from course_utils import HangError, WorkerError, launch, record
from course_utils.topology import from_matrix, two_level
from lessons.nccl.fabric import emulate, emulated_seconds, slow_motion
from lessons.nccl.fabric.replay import ARRIVED, LEAVE, RECORD, SEND, SENT, Replay

pytestmark = pytest.mark.guard(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

ALPHA, BETA = 3e-6, 1 / 25e9
SIZE = 1_200_000  # bytes; a multiple of 4 bytes for every number of ranks below
MESSAGE = ALPHA + BETA * SIZE


def flat(n: int):
    return two_level(1, n, (ALPHA, BETA), (ALPHA, BETA))


def exactly(seconds):
    return pytest.approx(seconds, rel=1e-12, abs=1e-18)


def clocks(work, topology, *, world_size: int | None = None, slowdown: float = 0.0, timeout: float = 30.0) -> list:
    """Emulated seconds of every rank at the end of `work`."""

    def timed():
        with emulate(topology, slowdown) as clock:
            work()
        return clock.seconds

    return launch(timed, world_size=world_size or len(topology.gpus), backend="gloo", timeout=timeout)


def tensor(size: int = SIZE) -> torch.Tensor:
    return torch.ones(size // 4)


def ring(x: torch.Tensor) -> None:
    """All-reduce in 2(n-1) steps."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = x.view(n, -1)
    for step in range(2 * (n - 1)):
        give, take = (rank - step) % n, (rank - step - 1) % n
        sent, got = dist.isend(pieces[give], (rank + 1) % n), torch.empty_like(pieces[take])
        dist.recv(got, (rank - 1) % n)
        sent.wait()
        pieces[take] = pieces[take] + got if step < n - 1 else got


# --- exact times ---------------------------------------------------------------------------------------------------


def test_a_message_costs_alpha_plus_beta_s_and_the_sender_its_bytes():
    def ping():
        if dist.get_rank() == 0:
            dist.send(tensor(), 1)
        else:
            dist.recv(tensor(), 0)

    assert clocks(ping, flat(2)) == exactly([BETA * SIZE, MESSAGE])


def test_ring_all_reduce_takes_its_formula():
    def reduce():
        rank, n = dist.get_rank(), dist.get_world_size()
        x = torch.full((SIZE // 4,), float(rank))
        ring(x)
        assert (x == n * (n - 1) / 2).all()

    for n in (1, 2, 3, 5):
        assert clocks(reduce, flat(n)) == exactly([2 * (n - 1) * (ALPHA + BETA * SIZE / n)] * n)


def test_messages_to_one_rank_arrive_one_after_the_other():
    def gather():
        if dist.get_rank():
            dist.send(tensor(), 0)
        else:
            for src in (3, 1, 2):
                dist.recv(tensor(), src)

    root, *others = clocks(gather, flat(4))
    assert root == exactly(ALPHA + 3 * BETA * SIZE)
    assert others == exactly([BETA * SIZE, 2 * BETA * SIZE, 3 * BETA * SIZE])  # asked at one moment: in order of rank


def test_messages_of_one_rank_leave_one_after_the_other():
    def scatter():
        if dist.get_rank():
            dist.recv(tensor(), 0)
        else:
            for request in [dist.isend(tensor(), dst) for dst in (1, 2, 3)]:
                request.wait()

    expected = [3 * BETA * SIZE, *(ALPHA + k * BETA * SIZE for k in (1, 2, 3))]
    assert clocks(scatter, flat(4)) == exactly(expected)


def test_both_directions_go_at_once():
    def exchange():
        other = 1 - dist.get_rank()
        ops = [dist.P2POp(dist.isend, tensor(), other), dist.P2POp(dist.irecv, tensor(), other)]
        for request in dist.batch_isend_irecv(ops):
            request.wait()

    assert clocks(exchange, flat(2)) == exactly([MESSAGE] * 2)


@pytest.mark.parametrize(("nics", "times"), [("gpu", [1, 1]), ("node", [1, 2])])
def test_flows_over_one_network_card_share_it(nics, times):
    inter = (5e-6, 1 / 10e9)

    def across():
        rank = dist.get_rank()
        if rank < 2:
            dist.send(tensor(), rank + 2)
        else:
            dist.recv(tensor(), rank - 2)

    sent = [k * inter[1] * SIZE for k in times]
    expected = exactly([*sent, *(inter[0] + t for t in sent)])
    assert clocks(across, two_level(2, 2, (ALPHA, BETA), inter, nics=nics)) == expected


def test_a_late_receiver_does_not_wait_for_what_is_there():
    def late():
        rank = dist.get_rank()
        if rank == 0:
            dist.send(tensor(4), 1)
            dist.send(tensor(), 2)
        elif rank == 1:
            dist.recv(tensor(), 2)
            dist.recv(tensor(4), 0)
        else:
            dist.send(tensor(), 1)
            dist.recv(tensor(), 0)

    _, middle, _ = clocks(late, flat(3))
    assert middle == exactly(MESSAGE + BETA * 4)  # the small message was first through the port


# --- the machine's speed does not matter ----------------------------------------------------------------------------


def test_real_delays_do_not_change_the_clock():
    topology = two_level(2, 2, (ALPHA, BETA), (5e-6, 1 / 10e9), nics="node")

    def everyone_to_everyone():
        rank, n = dist.get_rank(), dist.get_world_size()
        for round_ in range(3):
            time.sleep(random.random() * 0.02)
            sends = [dist.isend(tensor(4000 * (1 + (rank + round_) % 3)), (rank + d) % n) for d in range(1, n)]
            for d in range(1, n):
                time.sleep(random.random() * 0.01)
                src = (rank - d) % n
                dist.recv(tensor(4000 * (1 + (src + round_) % 3)), src)
            for request in sends:
                request.wait()

    first = clocks(everyone_to_everyone, topology)
    assert len(set(first)) > 1
    for _ in range(3):
        assert clocks(everyone_to_everyone, topology) == first
    assert clocks(everyone_to_everyone, topology, slowdown=10) == first


def logs(program: list[list[tuple]]) -> list[list[bytes]]:
    """What ranks log that follow `program`: (what, peer, bytes) for each rank."""
    result = []
    for rank, steps in enumerate(program):
        mine, count = [], {}
        for what, peer, size in steps:
            kind = ARRIVED if what == "recv" else SENT
            number = count[kind, peer] = count.get((kind, peer), -1) + 1
            if kind == SENT:
                mine.append(RECORD.pack(SEND, rank, peer, 0, number, 0, size))
            if what != "isend":
                mine.append(RECORD.pack(kind, rank, peer, 0, number, 0, 0))
        result.append([*mine, RECORD.pack(LEAVE, rank, 0, 0, 0, 0, 0)])
    return result


def replay(topology, program, order: random.Random) -> list[float]:
    """Clocks after logs that arrive in random order, looked at in between."""
    found, left = Replay(topology, len(program)), logs(program)
    while any(left):
        mine = order.choice([log for log in left if log])
        found.add(mine.pop(0))
        if order.random() < 0.5:
            found.advance()
    found.advance()
    assert not any(found.todo)
    return found.clock


def random_program(seed: int):
    """A topology, and what its ranks send and receive."""
    choose = random.Random(seed)
    n, per_node = choose.choice([2, 3, 4, 6]), choose.choice([1, 2, 3])
    topology = two_level(-(-n // per_node), per_node, (1e-6, 1e-11), (5e-6, 1e-10), nics=choose.choice(["gpu", "node"]))
    program: list[list[tuple]] = [[] for _ in range(n)]
    for _ in range(choose.randrange(1, 40)):
        src, dst = choose.sample(range(n), 2)
        program[src].append((choose.choice(["send", "isend"]), dst, choose.choice([0, 1000, 1_000_000])))
        program[dst].append(("recv", src, 0))
    return topology, program


def test_the_order_in_which_ranks_log_does_not_change_the_clock():
    for seed in range(60):
        topology, program = random_program(seed)
        first = replay(topology, program, random.Random(0))
        assert all(replay(topology, program, random.Random(k)) == first for k in range(1, 8)), f"seed {seed}"


# --- programs run unchanged -----------------------------------------------------------------------------------------


def test_functions_imported_by_name_are_timed():
    from torch.distributed import batch_isend_irecv, irecv, isend, recv, send

    def exchange():
        other = 1 - dist.get_rank()
        requests = batch_isend_irecv([dist.P2POp(isend, tensor(), other), dist.P2POp(irecv, tensor(), other)])
        requests += [isend(tensor(), other), irecv(tensor(), other)]
        for request in requests:
            request.wait()
        if other:
            send(tensor(), other)
        else:
            assert recv(tensor(), other) == other

    assert clocks(exchange, flat(2))[1] == exactly(2 * ALPHA + 3 * BETA * SIZE)


def test_sub_groups_and_their_ranks():
    def work():
        odd, even = dist.new_group([1, 3]), dist.new_group([2, 0])
        mine = odd if dist.get_rank() % 2 else even
        with emulate(flat(4)) as clock:
            if dist.get_rank() < 2:
                dist.send(tensor(), dist.get_rank() + 2, group=mine)
                dist.send(tensor(), group=mine, group_dst=1 - mine.rank())
            else:
                assert dist.recv(tensor(), dist.get_rank() - 2, group=mine) == dist.get_rank() - 2
                assert dist.recv(tensor(), group=mine, group_src=1 - mine.rank()) == dist.get_rank() - 2
        return clock.seconds

    expected = [2 * BETA * SIZE] * 2 + [ALPHA + 2 * BETA * SIZE] * 2
    assert launch(work, world_size=4, backend="gloo") == exactly(expected)


def test_a_group_made_inside_brings_its_ranks_together():
    def work():
        rank = dist.get_rank()
        if rank == 0:
            dist.send(tensor(), 2)
        if rank == 2:
            dist.recv(tensor(), 0)
        pair = dist.new_group([1, 2])
        if rank == 1:
            dist.send(tensor(), 2, group=pair)
        if rank == 2:
            dist.recv(tensor(), 1, group=pair)

    expected = exactly([BETA * SIZE, MESSAGE + BETA * SIZE, 2 * MESSAGE])
    assert clocks(work, flat(3)) == expected
    assert clocks(work, flat(3), slowdown=10) == expected


def test_tags_are_told_apart():
    def work():
        small, large = tensor(4), tensor()
        if dist.get_rank() == 0:
            for request in [dist.isend(large, 1, tag=7), dist.isend(small, 1, tag=8)]:
                request.wait()
        else:
            dist.recv(small, 0, tag=8)
            dist.recv(large, 0, tag=7)

    assert clocks(work, flat(2))[1] == exactly(ALPHA + BETA * (SIZE + 4))


def test_bytes_follow_the_element_type():
    types = [torch.float64, torch.bfloat16, torch.uint8, torch.bool, torch.complex64]

    def work():
        for dtype in types:
            x = torch.ones(1000, dtype=dtype)
            if dist.get_rank() == 0:
                dist.send(x, 1)
            else:
                y = torch.zeros_like(x)
                dist.recv(y, 0)
                assert torch.equal(x, y)

    size = 1000 * sum(dtype.itemsize for dtype in types)
    assert clocks(work, flat(2))[0] == exactly(BETA * size)


def test_requests_answer_as_without_emulation():
    def work():
        other = 1 - dist.get_rank()
        requests = [dist.isend(tensor(), other), dist.irecv(tensor(), other)]
        assert all(request.wait() for request in requests)
        assert all(request.is_completed() for request in requests)

    assert clocks(work, flat(2)) == exactly([MESSAGE] * 2)


def test_the_ledger_counts_as_usual():
    def work(inside: bool):
        rank, n = dist.get_rank(), dist.get_world_size()
        with record() as ledger:
            if inside:
                with emulate(flat(n)):
                    ring(tensor())
            else:
                ring(tensor())
        return [(e.op, e.bytes, e.peer, e.call_site) for e in ledger], ledger.sent, rank

    for ours, plain in zip(
        *(launch(work, inside, world_size=3, backend="gloo") for inside in (True, False)), strict=True
    ):
        assert ours == plain
        assert ours[1] == 4 * SIZE // 3


def test_the_clock_can_be_read_on_the_way_and_returned():
    def work():
        with emulate(flat(2)) as clock:
            before = clock.seconds
            ring(tensor())
            middle = clock.seconds
            ring(tensor())
        return before, middle, clock

    for before, middle, clock in launch(work, world_size=2, backend="gloo"):
        assert before == 0 and 2 * middle == exactly(clock.seconds) and clock.wall > 0
        assert clock.seconds == exactly(4 * (ALPHA + BETA * SIZE / 2))


def test_slowed_down_waits_last_as_long_as_they_say():
    def work():
        with emulate(flat(2), slowdown=1000) as clock:
            ring(tensor())
        return clock.wall, clock.seconds

    for wall, seconds in launch(work, world_size=2, backend="gloo"):
        assert wall >= seconds > 0


PROGRAM = """
import torch, torch.distributed as dist
from course_utils.topology import two_level
from lessons.nccl.fabric import emulate

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
with emulate(two_level(1, n, (1e-6, 1e-9), (1e-6, 1e-9))) as clock:
    for _ in range(3):
        request = dist.isend(torch.ones(1000), (rank + 1) % n)
        dist.recv(torch.ones(1000), (rank - 1) % n)
        request.wait()
print(f"rank {rank}: {clock.seconds * 1e6:.3f} us", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_works_under_torchrun_and_leaves_no_file(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d: [\d.]+ us", done.stdout)) == [f"rank {rank}: 15.000 us" for rank in range(3)]
    assert not list(folder.glob("fabric-*"))


# --- errors ---------------------------------------------------------------------------------------------------------


def of_all_collectives():
    import torch.distributed._functional_collectives as functional

    x, parts = torch.ones(4), [torch.ones(4), torch.ones(4)]
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "barrier": lambda: dist.barrier(),
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather(parts, x),
        "all_gather of objects": lambda: dist.all_gather_object([None, None], 1),
        "reduce_scatter": lambda: dist.reduce_scatter(x, parts),
        "all_to_all": lambda: dist.all_to_all_single(torch.ones(4), x),
        "gather": lambda: dist.gather(x, parts if dist.get_rank() == 0 else None, 0),
        "scatter": lambda: dist.scatter(x, parts if dist.get_rank() == 0 else None, 0),
        "all_reduce of other libraries": lambda: functional.all_reduce(x, "sum", dist.group.WORLD),
    }


def test_collectives_are_refused_by_name_before_they_are_issued():
    def work():
        answers = {}
        with record() as ledger, emulate(flat(2)) as clock:
            for name, collective in of_all_collectives().items():
                try:
                    collective()
                except RuntimeError as error:
                    answers[name] = str(error)
            ring(tensor())
        dist.all_reduce(torch.ones(1))
        return answers, clock.seconds, len(ledger)

    for answers, seconds, entries in launch(work, world_size=2, backend="gloo"):
        assert set(answers) == set(of_all_collectives())
        for name, text in answers.items():
            assert text.startswith(f"{name.split()[0]} inside emulate()") and "batch_isend_irecv" in text
        assert seconds == exactly(2 * (ALPHA + BETA * SIZE / 2))
        assert entries == 4


def refused(work, error: type[Exception], *, world_size: int = 2, **options) -> str:
    def attempt():
        try:
            work()
        except error as caught:
            return str(caught)

    return launch(attempt, world_size=world_size, backend="gloo", **options)[0]


def inside(topology, work, **options):
    with emulate(topology, **options):
        return work()


def test_what_cannot_be_emulated_is_refused():
    x = torch.ones(1)
    assert "sends to itself" in refused(lambda: inside(flat(2), lambda: dist.isend(x, dist.get_rank())), ValueError)
    text = refused(lambda: inside(flat(2), lambda: dist.send(x, dist.get_rank())), ValueError)
    assert "destination rank should not be the same" in text  # PyTorch's own words
    assert "names its source" in refused(lambda: inside(flat(2), lambda: dist.recv(x)), ValueError)
    assert "fewer than 2 ranks" in refused(lambda: inside(flat(1), lambda: None), ValueError)
    assert "from 0" in refused(lambda: inside(flat(2), lambda: None, slowdown=-1), ValueError)
    assert "one block before" in refused(lambda: inside(flat(2), lambda: inside(flat(2), lambda: None)), RuntimeError)
    assert "launch(backend='gloo')" in refused(lambda: inside(flat(2), lambda: None), RuntimeError, init=False)


def test_links_of_unknown_bandwidth_are_named():
    machine = from_matrix("GPU0 GPU1\nGPU0 X PHB\nGPU1 PHB X\n")
    text = refused(lambda: inside(machine, lambda: dist.send(torch.ones(1), 1 - dist.get_rank())), ValueError)
    assert "bytes/s of every link" in text


def test_everything_is_restored_after_an_error():
    def work():
        before = [vars(dist.ProcessGroup)[name] for name in ("send", "recv", "recv_anysource")]
        helper = dist.distributed_c10d._new_process_group_helper
        try:
            with emulate(flat(2)):
                raise KeyError("left early")
        except KeyError:
            pass
        after = [vars(dist.ProcessGroup)[name] for name in ("send", "recv", "recv_anysource")]
        dist.all_reduce(torch.ones(1))
        ring(tensor())
        with emulate(flat(2)) as clock:
            ring(tensor())
        return before == after and helper is dist.distributed_c10d._new_process_group_helper, clock.seconds

    expected = exactly(2 * (ALPHA + BETA * SIZE / 2))
    assert all(same and seconds == expected for same, seconds in launch(work, world_size=2, backend="gloo"))


def test_a_rank_that_leaves_early_is_not_waited_for():
    def work():
        with emulate(flat(3)) as clock:
            if dist.get_rank() < 2:
                for _ in range(3):
                    (dist.send if dist.get_rank() else dist.recv)(tensor(), 1 - dist.get_rank())
        return clock.seconds

    first, second, idle = launch(work, world_size=3, backend="gloo")
    assert (first, second, idle) == exactly((ALPHA + 3 * BETA * SIZE, 3 * BETA * SIZE, 0.0))


def test_an_error_on_one_rank_ends_as_without_emulation():
    def work(slowdown: float):
        with emulate(flat(3), slowdown) as clock:
            if dist.get_rank() == 1:
                raise LookupError("rank 1 gives up")
            dist.recv(tensor(), 1)
        return clock.seconds

    for slowdown in (0.0, 100.0):
        with pytest.raises(WorkerError, match="rank 1 gives up"):
            launch(work, slowdown, world_size=3, backend="gloo", timeout=80)
    assert clocks(lambda: ring(tensor()), flat(3)) == exactly([4 * (ALPHA + BETA * SIZE / 3)] * 3)  # the same processes


def test_a_deadlock_is_told_by_the_launcher():
    with pytest.raises(HangError, match="recv"):
        clocks(lambda: dist.recv(tensor(), 1 - dist.get_rank()), flat(2), timeout=2)


def test_all_reduces_are_timed_one_by_one_at_every_size():
    found = emulated_seconds({"once": ring, "again": ring}, flat(3), [SIZE, 2 * SIZE])
    assert found["once"] == found["again"] == exactly([4 * (ALPHA + BETA * size / 3) for size in (SIZE, 2 * SIZE)])


def test_slow_motion_tells_the_emulated_time(capsys):
    slow_motion({"ring": ring}, flat(3), SIZE, slowdown=10.0)
    told = re.fullmatch(r"ring +([\d.]+) µs emulated; you waited [\d.]+ s\n", capsys.readouterr().out)
    assert float(told[1]) == pytest.approx(1e6 * 4 * (ALPHA + BETA * SIZE / 3), abs=0.06)
