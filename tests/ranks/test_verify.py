"""Promises of ``launch(..., verify=True)``: what ranks pass differently is named, and right programs run as they do."""

from __future__ import annotations

import re
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from calls import case

from course_utils import HangError, MismatchError, WorkerError, launch

pytestmark = pytest.mark.guard(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

WRONG: list = []  # programs on three ranks; the rank to blame, what the error says of it, a part of its line
RIGHT: list = []  # programs on four ranks


def refused(function, *args, world_size: int = 3, **options) -> MismatchError:
    with pytest.raises(MismatchError) as caught:
        launch(function, *args, world_size=world_size, verify=True, **options)
    return caught.value


# --- what gloo and NCCL accept in silence ----------------------------------------------------------------------------


@case(WRONG, 1, "all_reduce #2 (default): rank 1 reduces with MAX, ranks 0,2 reduce with SUM", "op=dist.ReduceOp.MAX")
def another_reduction():
    x = torch.ones(4)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    else:
        dist.all_reduce(x)


@case(WRONG, 2, "all_reduce #1 (default): rank 2 passes int32, ranks 0,1 pass float32", "dist.all_reduce(x)")
def another_dtype_of_the_same_size():
    x = torch.ones(4, dtype=torch.int32 if dist.get_rank() == 2 else torch.float32)
    dist.all_reduce(x)


@case(WRONG, 1, "broadcast #1 (default): rank 1 has root 1, ranks 0,2 have root 0", "src=dist.get_rank() % 2")
def another_root():
    dist.broadcast(torch.ones(2), src=dist.get_rank() % 2)


@case(WRONG, 1, "message #1 from rank 0 to rank 1: rank 0 sends 2 elements of float32, rank 1 receives 3", "dist.recv(")
def a_larger_message_expected():
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)
    if dist.get_rank() == 1:
        dist.recv(torch.ones(3), 0)


# --- what would hang, or end a process --------------------------------------------------------------------------------


@case(WRONG, 0, "collective #1 (default): rank 0 calls barrier, ranks 1,2 call all_reduce", "dist.barrier()")
def another_operation():
    if dist.get_rank() == 0:
        dist.barrier()
    dist.all_reduce(torch.ones(2))
    dist.barrier()


@case(WRONG, 1, "all_reduce #3 (default): ranks 0,2 call it, rank 1 returned after 2 collectives of this group", "")
def a_call_left_out():
    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            continue
        dist.all_reduce(torch.ones(1))


@case(WRONG, 1, "all_reduce #1 (default): rank 1 passes shape (4), ranks 0,2 pass shape (2)", "dist.all_reduce(")
def another_size_which_ends_a_process_under_gloo():
    dist.all_reduce(torch.ones(4 if dist.get_rank() == 1 else 2))


@case(WRONG, 1, "all_to_all #1 (default): rank 1 sends 2 elements to rank 0, which expects 1", "dist.all_to_all_")
def splits_that_do_not_fit():
    out, given = [1, 1, 1], [2, 1, 1] if dist.get_rank() == 1 else [1, 1, 1]
    dist.all_to_all_single(torch.empty(3), torch.ones(sum(given)), out, given)


@pytest.mark.parametrize(("work", "rank", "said", "line"), WRONG)
def test_what_differs_is_named_with_its_rank_and_line(work, rank: int, said: str, line: str):
    error = refused(work)
    if "returned after it" not in said:
        assert error.rank == rank
    assert said in str(error), error
    mine = [state for state in error.states if re.match(rf"{rank}\b", state)]
    if line:
        assert line in error.traceback and re.search(r"test_verify\.py, line \d+: ", mine[0]), error
    assert all(re.search(r"test_verify\.py, line \d+: ", state) for state in error.states)


def test_groups_in_another_order_are_told_without_the_time_out():
    def work():
        first, second = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
        for group in (second, first) if dist.get_rank() == 1 else (first, second):
            dist.all_reduce(torch.ones(1), group=group)

    with pytest.raises(HangError, match="never finish") as caught:
        launch(work, world_size=3, verify=True, timeout=3600)
    text = str(caught.value)
    assert caught.value.kind == "stuck" and "collectives of different groups in different order" in text
    assert re.search(r"ranks 0,2 call all_reduce #1 .* first, rank 1 calls all_reduce #1 .* first", text), text


def test_rings_that_wait_for_each_other_are_told_without_the_time_out():
    def work():
        rank, n = dist.get_rank(), dist.get_world_size()
        dist.recv(torch.empty(1), (rank - 1) % n)
        dist.send(torch.ones(1), (rank + 1) % n)

    with pytest.raises(HangError, match="in a circle"):
        launch(work, world_size=3, verify=True, timeout=3600)


def test_a_difference_comes_before_the_error_that_follows_from_it():
    def work():
        x = torch.ones(1)
        dist.all_reduce(x, op=dist.ReduceOp.MAX if dist.get_rank() == 2 else dist.ReduceOp.SUM)
        assert x.item() == 1, "the wrong result was noticed"

    assert "rank 2 reduces with MAX" in str(refused(work))


# --- right programs ----------------------------------------------------------------------------------------------


@case(RIGHT)
def every_collective_with_its_variants():
    n, rank = dist.get_world_size(), dist.get_rank()
    x, whole = torch.ones(10), torch.ones(10 * n)
    parts = [torch.ones(10) for _ in range(n)]
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        dist.all_reduce(torch.ones(3, dtype=dtype))
    dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])
    dist.broadcast(x, src=1)
    dist.reduce(x, dst=2)
    dist.all_gather(parts, x)
    if rank % 2:  # two ways to call the same
        dist.all_gather_single(whole, x)
    else:
        dist.all_gather(parts, x)
    dist.reduce_scatter(x, parts)
    dist.reduce_scatter_single(x, whole)
    dist.gather(x, parts if rank == 1 else None, dst=1)
    dist.scatter(x, parts if rank == 3 else None, src=3)
    dist.all_to_all(parts, [torch.ones(10) for _ in range(n)])
    dist.all_to_all_single(torch.empty(10 * n), whole)
    dist.barrier()
    dist.monitored_barrier()


@case(RIGHT)
def object_collectives():
    rank, n = dist.get_rank(), dist.get_world_size()
    found = [None] * n
    dist.all_gather_object(found, "x" * 10**rank)
    dist.gather_object("y" * 10**rank, [None] * n if rank == 1 else None, dst=1)
    things = [{"a": list(range(1000))}] if rank == 2 else [None]
    dist.broadcast_object_list(things, src=2)
    dist.scatter_object_list([None], ["z" * 10**r for r in range(n)] if rank == 0 else [None] * n, src=0)
    if rank == 0:
        dist.send_object_list(["some text"], dst=1)
    if rank == 1:
        dist.recv_object_list([None], src=0)


@case(RIGHT)
def sub_groups_and_their_roots():
    rank = dist.get_rank()
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    mine = odd if rank % 2 else even
    dist.broadcast(torch.ones(2), src=2 + rank % 2, group=mine)
    dist.broadcast(torch.ones(2), group_src=1, group=mine)
    dist.reduce(torch.ones(2), group_dst=0, group=mine)
    dist.all_reduce(torch.ones(2 + rank % 2), op=dist.ReduceOp.MAX if rank % 2 else dist.ReduceOp.SUM, group=mine)
    if rank % 2:
        dist.barrier(group=odd)
    (dist.send if rank > 1 else dist.recv)(torch.ones(2), group=mine, **{
        "group_dst" if rank > 1 else "group_src": 0 if rank > 1 else 1
    })


@case(RIGHT)
def messages_in_many_forms():
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    operations = [dist.P2POp(dist.isend, torch.ones(2, 3), right), dist.P2POp(dist.irecv, torch.ones(6), left)]
    for work in dist.batch_isend_irecv(operations if rank % 2 else operations[::-1]):
        work.wait()
    works = [dist.isend(torch.ones(tag + 1), right, tag=tag) for tag in range(3)]
    works += [dist.irecv(torch.ones(tag + 1), left, tag=tag) for tag in (2, 0, 1)]
    for work in works:
        work.wait()
    if rank == 0:
        for _ in range(n - 1):
            dist.recv(torch.empty(5))
    else:
        dist.send(torch.ones(5), dst=0)


@case(RIGHT)
def data_parallelism_with_uneven_batches():
    from torch.distributed.algorithms.join import Join

    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    for _ in range(2):
        ddp(torch.ones(4, 8)).sum().backward()
    with ddp.no_sync():
        ddp(torch.ones(4, 8)).sum().backward()
    plain = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    with Join([plain]):
        for _ in range(2 + dist.get_rank() % 2):
            plain(torch.ones(2, 8)).sum().backward()


@case(RIGHT)
def fsdp_on_a_mesh_with_a_checkpoint_of_its_state():
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 3))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.ones(2, 8)).sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor()
        optimizer.step()
    get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


@pytest.mark.parametrize("work", RIGHT)
def test_right_programs_pass(work, capfd):
    launch(work, world_size=4, verify=True)
    assert "Warning: the ranks" not in capfd.readouterr().out


# --- groups and outputs -----------------------------------------------------------------------------------------------


def other_order():
    r = dist.get_rank()
    for ranks in ([0, 1], [2, 3])[:: 1 if r < 2 else -1]:
        dist.new_group(ranks)
    dist.barrier()


def test_groups_that_ranks_make_differently_are_told():
    words = "ranks 0,1", "new_group([0, 1])", "ranks 2,3", "new_group([2, 3])"
    with pytest.raises(MismatchError) as caught:
        launch(other_order, world_size=4, verify=True)
    assert all(word in str(caught.value) for word in words), caught.value


def aliased():
    out = [torch.zeros(4)] * dist.get_world_size()
    dist.all_gather(out, torch.full((4,), float(dist.get_rank())))


def test_outputs_that_are_one_tensor_are_told(capsys):
    with pytest.raises(WorkerError, match=r"all_gather: outputs 0, 1, 2 are the same memory"):
        launch(aliased, world_size=3, verify=True)
    launch(aliased, world_size=3)
    assert "Warning: all_gather #1: outputs 0, 1, 2 of rank 0 are the same memory" in capsys.readouterr().out
