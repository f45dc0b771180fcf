"""Usual wrong answers to the exercises on collectives, each with the hint that it must be given."""

from __future__ import annotations

from time import sleep

import torch
import torch.distributed as dist
from exercise_cases import Mutant, register_of
from torch.distributed.device_mesh import init_device_mesh

from course_utils.checks import values

MUTANTS: list[Mutant] = []
mutant = register_of(MUTANTS)


def _place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _exchange(out: torch.Tensor, to: int, into: torch.Tensor, source: int) -> None:
    calls = [dist.P2POp(dist.irecv, into, source), dist.P2POp(dist.isend, out, to)]
    for request in dist.batch_isend_irecv(calls):
        request.wait()


# ------------------------------------------------------------------------------------------------ mean and variance


def _from_sums(count, total, squares):
    return total / count, squares / count - (total / count) ** 2


@mutant("mean_and_variance", "not-distributed")
def each_rank_for_itself(x):
    return x.double().mean(), x.double().var(correction=0)


@mutant("mean_and_variance", "not-distributed")
def other_ranks_data_made_again_from_their_seeds(x):
    n = dist.get_world_size()
    x = torch.cat([2 + (1 + rank) * values(5, seed=rank) for rank in range(n)]).double()
    return x.mean(), x.var(correction=0)


@mutant("mean_and_variance", "average-of-variances")
def average_of_variances(x):
    both = torch.stack([x.double().mean(), x.double().var(correction=0)]) / dist.get_world_size()
    dist.all_reduce(both)
    return both[0], both[1]


@mutant("mean_and_variance", "average-of-variances")
def weighted_average_of_variances(x):
    x = x.double()
    sums = torch.stack([x.new_tensor(len(x)), x.sum(), len(x) * x.var(correction=0)])
    dist.all_reduce(sums)
    return sums[1] / sums[0], sums[2] / sums[0]


@mutant("mean_and_variance", "mean-of-means")
def mean_of_means(x):
    x = x.double()
    means = torch.stack([x.mean(), (x * x).mean()]) / dist.get_world_size()
    dist.all_reduce(means)
    return means[0], means[1] - means[0] ** 2


@mutant("mean_and_variance", "empty-shard")
def local_mean_of_nothing(x):
    x = x.double()
    sums = torch.stack([x.new_tensor(len(x)), x.mean() * len(x), (x * x).mean() * len(x)])
    dist.all_reduce(sums)
    return _from_sums(*sums)


@mutant("mean_and_variance", "two-all-reduces")
def mean_first_then_variance(x):
    x = x.double()
    sums = torch.stack([x.new_tensor(len(x)), x.sum()])
    dist.all_reduce(sums)
    mean = sums[1] / sums[0]
    squares = ((x - mean) ** 2).sum()
    dist.all_reduce(squares)
    return mean, squares / sums[0]


@mutant("mean_and_variance", "float32")
def sums_in_float32(x):
    sums = torch.stack([x.new_tensor(len(x)), x.sum(), (x * x).sum()])
    dist.all_reduce(sums)
    return _from_sums(*sums)


@mutant("mean_and_variance", "not-divided")
def sum_taken_for_the_mean(x):
    x = x.double()
    sums = torch.stack([x.new_tensor(len(x)), x.sum(), (x * x).sum()])
    dist.all_reduce(sums)
    return sums[1], _from_sums(*sums)[1]


@mutant("mean_and_variance", "unbiased")
def divided_by_count_minus_one(x):
    x = x.double()
    sums = torch.stack([x.new_tensor(len(x)), x.sum(), (x * x).sum()])
    dist.all_reduce(sums)
    mean, variance = _from_sums(*sums)
    return mean, variance * sums[0] / (sums[0] - 1)


@mutant("mean_and_variance", "gathers-everything")
def all_data_to_all_ranks(x):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    x = torch.cat(parts).double()
    return x.mean(), x.var(correction=0)


@mutant("mean_and_variance", "hub")
def through_rank_0(x):
    x = x.double()
    sums = torch.stack([x.new_tensor(len(x)), x.sum(), (x * x).sum()])
    dist.reduce(sums, dst=0)
    dist.broadcast(sums, src=0)
    return _from_sums(*sums)


@mutant("mean_and_variance", "too-many-bytes")
def all_squares_in_one_tensor(x):
    x = x.double()
    table = x.new_zeros(3, 100)
    table[0, : len(x)], table[1, : len(x)], table[2, : len(x)] = 1, x, x * x
    dist.all_reduce(table)
    return _from_sums(*table.sum(1))


@mutant("mean_and_variance", "only-two-ranks")
def divided_by_twice_the_own_count(x):
    x = x.double()
    sums = torch.stack([x.new_tensor(len(x)), x.sum(), (x * x).sum()])
    dist.all_reduce(sums)
    count = sums[0] if dist.get_world_size() <= 2 else sums[0].new_tensor(2 * len(x))
    return _from_sums(count, sums[1], sums[2])


@mutant("mean_and_variance", "input-changed")
def centred_in_place(x):
    centre = 1.0
    x.sub_(centre)
    y = x.double()
    sums = torch.stack([y.new_tensor(len(y)), y.sum(), (y * y).sum()])
    dist.all_reduce(sums)
    mean, variance = _from_sums(*sums)
    return mean + centre, variance


@mutant("mean_and_variance", "shape")
def returns_one_tensor_of_three(x):
    x = x.double()
    sums = torch.stack([x.new_tensor(len(x)), x.sum(), (x * x).sum()])
    dist.all_reduce(sums)
    return sums


@mutant("mean_and_variance", "shape")
def returns_python_floats(x):
    x = x.double()
    sums = torch.stack([x.new_tensor(len(x)), x.sum(), (x * x).sum()])
    dist.all_reduce(sums)
    return tuple(float(v) for v in _from_sums(*sums))


@mutant("mean_and_variance", "error")
def a_name_is_missing(x):
    dist.all_reduce(sums)  # noqa: F821
    return sums  # noqa: F821


@mutant("mean_and_variance", "hang", hangs=True)
def rank_0_does_not_take_part(x):
    x = x.double()
    sums = torch.stack([x.new_tensor(len(x)), x.sum(), (x * x).sum()])
    if dist.get_rank() > 0:
        dist.all_reduce(sums)
    return _from_sums(*sums)


# ------------------------------------------------------------------------------------------------ ring shift


@mutant("ring_shift", "hang", hangs=True)
def all_send_first(x):
    rank, n = _place()
    received = torch.empty_like(x)
    dist.send(x, (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    return received


@mutant("ring_shift", "hang", hangs=True)
def all_receive_first(x):
    rank, n = _place()
    received = torch.empty_like(x)
    dist.recv(received, (rank - 1) % n)
    dist.send(x, (rank + 1) % n)
    return received


@mutant("ring_shift", "hang", hangs=True)
def waits_for_the_send_at_once(x):
    rank, n = _place()
    received = torch.empty_like(x)
    dist.isend(x, (rank + 1) % n).wait()
    dist.irecv(received, (rank - 1) % n).wait()
    return received


@mutant("ring_shift", "unwaited", hangs=True)
def never_waits_for_the_send(x):
    rank, n = _place()
    received = torch.empty_like(x)
    if n > 1:
        dist.isend(x, (rank + 1) % n)
        if rank == 1:
            sleep(0.3)  # rank 0 has returned by now
        dist.recv(received, (rank - 1) % n)
    return received if n > 1 else x.clone()


@mutant("ring_shift", "only-two-ranks")
def swap_with_rank_xor_1(x):
    rank = dist.get_rank()
    received = torch.empty_like(x)
    _exchange(x, rank ^ 1, received, rank ^ 1)
    return received


@mutant("ring_shift", "direction")
def to_the_left(x):
    rank, n = _place()
    received = torch.empty_like(x)
    _exchange(x, (rank - 1) % n, received, (rank + 1) % n)
    return received


@mutant("ring_shift", "collective")
def gathers_and_picks(x):
    rank, n = _place()
    parts = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(parts, x)
    return parts[rank - 1]


@mutant("ring_shift", "input-changed")
def receives_into_x(x):
    rank, n = _place()
    if n == 1:
        return x
    _exchange(x.clone(), (rank + 1) % n, x, (rank - 1) % n)
    return x


@mutant("ring_shift", "too-many-bytes")
def sends_to_everybody(x):
    rank, n = _place()
    parts = [torch.empty_like(x) for _ in range(n)]
    for distance in range(1, n):
        _exchange(x, (rank + distance) % n, parts[distance], (rank - distance) % n)
    return parts[1] if n > 1 else x.clone()


@mutant("ring_shift", "one-rank")
def sends_to_itself(x):
    rank, n = _place()
    received = torch.empty_like(x)
    if rank % 2:
        dist.recv(received, (rank - 1) % n)
        dist.send(x, (rank + 1) % n)
    else:
        dist.send(x, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
    return received


@mutant("ring_shift", "not-distributed")
def neighbours_data_made_again(x):
    rank, n = _place()
    return values(5, 2, seed=10 + (rank - 1) % n)


@mutant("ring_shift", "value")
def returns_what_was_not_received(x):
    rank, n = _place()
    _exchange(x, (rank + 1) % n, torch.empty_like(x), (rank - 1) % n)
    return torch.zeros_like(x)


# ------------------------------------------------------------------------------------------------ all-reduce in two


def _padded(x: torch.Tensor, n: int) -> torch.Tensor:
    padded = x.new_zeros(-(-x.numel() // n) * n)
    padded[: x.numel()] = x.flatten()
    return padded


@mutant("all_reduce_in_two", "library-all-reduce")
def the_library_does_it(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


@mutant("all_reduce_in_two", "not-divisible")
def no_padding(x):
    flat = x.flatten()
    shard = flat.new_empty(len(flat) // dist.get_world_size())
    dist.reduce_scatter_single(shard, flat)
    result = torch.empty_like(flat)
    dist.all_gather_single(result, shard)
    return result.reshape(x.shape)


@mutant("all_reduce_in_two", "view")
def view_of_what_is_not_contiguous(x):
    n = dist.get_world_size()
    padded = _padded(x.view(-1), n)
    shard = padded.new_empty(len(padded) // n)
    dist.reduce_scatter_single(shard, padded)
    dist.all_gather_single(padded, shard)
    return padded[: x.numel()].view(x.shape)


@mutant("all_reduce_in_two", "tail")
def the_rest_is_left_out(x):
    n = dist.get_world_size()
    flat, body = x.flatten(), x.numel() // n * n
    result, shard = flat.clone(), flat.new_empty(body // n)
    if body:
        dist.reduce_scatter_single(shard, flat[:body].clone())
        dist.all_gather_single(result[:body], shard)
    return result.reshape(x.shape)


@mutant("all_reduce_in_two", "average")
def mean_not_sum(x):
    n = dist.get_world_size()
    padded = _padded(x, n)
    shard = padded.new_empty(len(padded) // n)
    dist.reduce_scatter_single(shard, padded)
    dist.all_gather_single(padded, shard / n)
    return padded[: x.numel()].reshape(x.shape)


@mutant("all_reduce_in_two", "whole-tensor")
def gathers_whole_tensors(x):
    parts = [torch.empty_like(x).contiguous() for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts).sum(0)


@mutant("all_reduce_in_two", "whole-tensor")
def passes_whole_tensors_round_the_ring(x):
    rank, n = _place()
    total, travelling = x.clone(), x.contiguous()
    for _ in range(n - 1):
        received = torch.empty_like(travelling)
        _exchange(travelling, (rank + 1) % n, received, (rank - 1) % n)
        travelling = received
        total += travelling
    return total


@mutant("all_reduce_in_two", "hub")
def reduce_to_rank_0_and_broadcast(x):
    x = x.clone()
    dist.reduce(x, dst=0)
    dist.broadcast(x, src=0)
    return x


@mutant("all_reduce_in_two", "other-calls")
def shards_by_all_to_all(x):
    n = dist.get_world_size()
    padded = _padded(x, n)
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded)
    dist.all_gather_single(padded, parts.view(n, -1).sum(0))
    return padded[: x.numel()].reshape(x.shape)


@mutant("all_reduce_in_two", "padding")
def pads_to_a_fixed_size(x):
    n = dist.get_world_size()
    padded = x.new_zeros(100 * n)
    padded[: x.numel()] = x.flatten()
    shard = x.new_empty(100)
    dist.reduce_scatter_single(shard, padded)
    dist.all_gather_single(padded, shard)
    return padded[: x.numel()].reshape(x.shape)


@mutant("all_reduce_in_two", "only-two-ranks")
def halves_instead_of_shards(x):
    padded = _padded(x, 2)
    shard = padded.new_empty(len(padded) // 2)
    dist.reduce_scatter_single(shard, padded)
    dist.all_gather_single(padded, shard)
    return padded[: x.numel()].reshape(x.shape)


@mutant("all_reduce_in_two", "not-divisible")
def padding_is_not_cut_off(x):
    n = dist.get_world_size()
    padded = _padded(x, n)
    shard = padded.new_empty(len(padded) // n)
    dist.reduce_scatter_single(shard, padded)
    dist.all_gather_single(padded, shard)
    return padded.reshape(x.shape) if x.numel() == len(padded) else padded


@mutant("all_reduce_in_two", "input-changed")
def result_written_into_x(x):
    n = dist.get_world_size()
    padded = _padded(x, n)
    shard = padded.new_empty(len(padded) // n)
    dist.reduce_scatter_single(shard, padded)
    dist.all_gather_single(padded, shard)
    return x.copy_(padded[: x.numel()].reshape(x.shape)).clone()


@mutant("all_reduce_in_two", "hang", hangs=True)
def halves_in_another_order_on_rank_0(x):
    n = dist.get_world_size()
    padded = _padded(x, n)
    shard = padded.new_empty(len(padded) // n)
    if dist.get_rank() == 0:
        dist.all_gather_single(padded.clone(), shard)
        dist.barrier()
    dist.reduce_scatter_single(shard, padded)
    dist.all_gather_single(padded, shard)
    return padded[: x.numel()].reshape(x.shape)


# ------------------------------------------------------------------------------------------------ ragged all-gather


def _lengths(x: torch.Tensor) -> list[int]:
    lengths = torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_single(lengths, torch.tensor([len(x)]))
    return lengths.tolist()


def _gather_padded(x: torch.Tensor, longest: int) -> list[torch.Tensor]:
    padded = x.new_zeros(longest, x.shape[1])
    padded[: len(x)] = x
    gathered = x.new_empty(dist.get_world_size() * longest, x.shape[1])
    dist.all_gather_single(gathered, padded)
    return list(gathered.view(-1 if longest else dist.get_world_size(), longest, x.shape[1]))


@mutant("ragged_all_gather", "uneven")
def as_if_all_were_as_long(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return parts


@mutant("ragged_all_gather", "uneven")
def lengths_but_no_padding(x):
    parts = [x.new_empty(length, x.shape[1]) for length in _lengths(x)]
    dist.all_gather(parts, x)
    return parts


@mutant("ragged_all_gather", "padding-left")
def padding_stays(x):
    return _gather_padded(x, max(_lengths(x)))


@mutant("ragged_all_gather", "own-length")
def cut_to_the_own_length(x):
    return [part[: len(x)] for part in _gather_padded(x, max(_lengths(x)))]


@mutant("ragged_all_gather", "not-a-list")
def one_long_tensor(x):
    lengths = _lengths(x)
    return torch.cat([part[:k] for part, k in zip(_gather_padded(x, max(lengths)), lengths, strict=True)])


@mutant("ragged_all_gather", "rank-order")
def own_part_first(x):
    rank, n = _place()
    lengths = _lengths(x)
    parts = [part[:k] for part, k in zip(_gather_padded(x, max(lengths)), lengths, strict=True)]
    return [parts[(rank + i) % n] for i in range(n)]


@mutant("ragged_all_gather", "hub")
def rank_0_collects_and_hands_out(x):
    rank, n = _place()
    lengths = _lengths(x)
    everything = x.new_empty(sum(lengths), x.shape[1])
    if rank == 0:
        parts = list(everything.split(lengths))
        parts[0].copy_(x)
        for source in range(1, n):
            dist.recv(parts[source], source)
    else:
        dist.send(x, 0)
    dist.broadcast(everything, src=0)
    return list(everything.split(lengths))


@mutant("ragged_all_gather", "one-call-per-rank")
def a_broadcast_from_every_rank(x):
    rank = dist.get_rank()
    parts = [x.clone() if r == rank else x.new_empty(k, x.shape[1]) for r, k in enumerate(_lengths(x))]
    for source, part in enumerate(parts):
        dist.broadcast(part, src=source)
    return parts


@mutant("ragged_all_gather", "messages")
def messages_between_all_pairs(x):
    rank, n = _place()
    parts = [x.clone() if r == rank else x.new_empty(k, x.shape[1]) for r, k in enumerate(_lengths(x))]
    for distance in range(1, n):
        _exchange(x, (rank + distance) % n, parts[rank - distance], (rank - distance) % n)
    return parts


@mutant("ragged_all_gather", "hang", hangs=True)
def all_send_to_all_and_then_receive(x):
    rank, n = _place()
    parts = [x.clone() if r == rank else x.new_empty(k, x.shape[1]) for r, k in enumerate(_lengths(x))]
    others = [r for r in range(n) if r != rank]
    for r in others:
        dist.send(x, r)
    for r in others:
        dist.recv(parts[r], r)
    return parts


@mutant("ragged_all_gather", "object")
def pickled(x):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return parts


@mutant("ragged_all_gather", "more-than-two")
def maximum_by_a_call_of_its_own(x):
    longest = torch.tensor(len(x))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    lengths = _lengths(x)
    return [part[:k] for part, k in zip(_gather_padded(x, int(longest)), lengths, strict=True)]


@mutant("ragged_all_gather", "too-many-bytes")
def pads_to_a_hundred(x):
    lengths = _lengths(x)
    return [part[:k] for part, k in zip(_gather_padded(x, 100), lengths, strict=True)]


@mutant("ragged_all_gather", "only-two-ranks")
def two_lengths(x):
    lengths = _lengths(x)
    longest = max(lengths[:2])
    if len(x) > longest:
        x = x[:longest]
    return [part[:k] for part, k in zip(_gather_padded(x, longest), lengths[:2] * 2, strict=False)]


@mutant("ragged_all_gather", "not-distributed")
def all_parts_made_again(x):
    return [values(3, 3, seed=60 + rank) for rank in range(dist.get_world_size())]


@mutant("ragged_all_gather", "input-changed")
def scaled_in_place(x):
    lengths = _lengths(x)
    parts = [part[:k].clone() for part, k in zip(_gather_padded(x, max(lengths)), lengths, strict=True)]
    x.zero_()
    return parts


# ------------------------------------------------------------------------------------------------ sums on a mesh


def _sums_in_groups(block, row_group, column_group):
    row_sums, column_sums = block.sum(1), block.sum(0)
    dist.all_reduce(row_sums, group=row_group)
    dist.all_reduce(column_sums, group=column_group)
    return row_sums, column_sums


def _groups(shape: tuple[int, int]):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("row", "col"))
    return mesh.get_group("row"), mesh.get_group("col")


@mutant("row_and_column_sums", "axis")
def group_named_row_for_the_rows(block, rows, cols):
    row, col = _groups((rows, cols))
    return _sums_in_groups(block, row, col)


@mutant("row_and_column_sums", "column-major")
def ranks_numbered_column_by_column(block, rows, cols):
    other_way_row, other_way_col = _groups((cols, rows))
    return _sums_in_groups(block, other_way_row, other_way_col)


@mutant("row_and_column_sums", "two-columns")
def always_two_columns(block, rows, cols):
    row, col = _groups((rows * cols // 2, 2))
    return _sums_in_groups(block, col, row)


@mutant("row_and_column_sums", "whole-world")
def over_all_ranks(block, rows, cols):
    return _sums_in_groups(block, None, None)


@mutant("row_and_column_sums", "whole-world")
def over_all_ranks_with_zeros_elsewhere(block, rows, cols):
    row, col = divmod(dist.get_rank(), cols)
    all_rows, all_cols = block.new_zeros(rows, 1), block.new_zeros(cols, 1)
    result = []
    for table, index, vector in ((all_rows, row, block.sum(1)), (all_cols, col, block.sum(0))):
        sums = torch.empty_like(vector)
        for i in range(len(vector)):
            table.zero_()
            table[index] = vector[i]
            dist.all_reduce(table)
            sums[i] = table[index, 0]
        result.append(sums)
    return tuple(result)


@mutant("row_and_column_sums", "dim")
def local_sums_along_the_other_dimension(block, rows, cols):
    row, col = _groups((rows, cols))
    return _sums_in_groups(block.t(), col, row)


@mutant("row_and_column_sums", "swapped")
def columns_first(block, rows, cols):
    row, col = _groups((rows, cols))
    return _sums_in_groups(block, col, row)[::-1]


@mutant("row_and_column_sums", "gathers-everything")
def all_blocks_to_all_ranks(block, rows, cols):
    row, col = divmod(dist.get_rank(), cols)
    parts = [torch.empty_like(block) for _ in range(rows * cols)]
    dist.all_gather(parts, block)
    return (
        sum(parts[row * cols + c].sum(1) for c in range(cols)),
        sum(parts[r * cols + col].sum(0) for r in range(rows)),
    )


@mutant("row_and_column_sums", "block-sent")
def adds_whole_blocks(block, rows, cols):
    row, col = _groups((rows, cols))
    by_row, by_col = block.clone(), block.clone()
    dist.all_reduce(by_row, group=col)
    dist.all_reduce(by_col, group=row)
    return by_row.sum(1), by_col.sum(0)


@mutant("row_and_column_sums", "not-distributed")
def sums_of_the_own_block(block, rows, cols):
    return block.sum(1), block.sum(0)


@mutant("row_and_column_sums", "hang", hangs=True)
def columns_only_where_the_row_is_0(block, rows, cols):
    row, col = _groups((rows, cols))
    row_sums, column_sums = block.sum(1), block.sum(0)
    dist.all_reduce(row_sums, group=col)
    if dist.get_rank() < cols:
        dist.all_reduce(column_sums, group=row)
    return row_sums, column_sums


@mutant("row_and_column_sums", "hang", hangs=True)
def axes_in_another_order_on_rank_0(block, rows, cols):
    row, col = _groups((rows, cols))
    row_sums, column_sums = block.sum(1), block.sum(0)
    work = [(row_sums, col), (column_sums, row)]
    for vector, group in work if dist.get_rank() in (0, rows * cols - 1) else work[::-1]:
        dist.all_reduce(vector, group=group)
    return row_sums, column_sums


# ------------------------------------------------------------------------------------------------ tree broadcast


@mutant("tree_broadcast", "library-broadcast")
def the_library_broadcasts(x, root):
    dist.broadcast(x, src=root)


@mutant("tree_broadcast", "collective")
def gathers_and_takes_the_root(x, root):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    x.copy_(parts[root])


@mutant("tree_broadcast", "hub")
def root_sends_to_all(x, root):
    rank, n = _place()
    if rank == root:
        for other in range(n):
            if other != root:
                dist.send(x, other)
    else:
        dist.recv(x, root)


@mutant("tree_broadcast", "hub")
def root_starts_all_sends_at_once(x, root):
    rank, n = _place()
    if rank == root:
        for request in [dist.isend(x, other) for other in range(n) if other != root]:
            request.wait()
    else:
        dist.recv(x, root)


@mutant("tree_broadcast", "chain")
def hand_to_hand(x, root):
    rank, n = _place()
    place = (rank - root) % n
    if place:
        dist.recv(x, (rank - 1) % n)
    if place < n - 1:
        dist.send(x, (rank + 1) % n)


@mutant("tree_broadcast", "small-subtree-first")
def nearest_child_first(x, root):
    rank, n = _place()
    place = (rank - root) % n
    low = place & -place if place else 1 << (n - 1).bit_length()
    if place:
        dist.recv(x, (place - low + root) % n)
    distance = 1
    while distance < low:
        if place + distance < n:
            dist.send(x, (place + distance + root) % n)
        distance *= 2


@mutant("tree_broadcast", "root")
def tree_from_rank_0(x, root):
    rank, n = _place()
    have = 1
    while have < n:
        if rank < have and rank + have < n:
            dist.send(x, rank + have)
        elif have <= rank < 2 * have:
            dist.recv(x, rank - have)
        have *= 2


@mutant("tree_broadcast", "root")
def places_not_translated_back(x, root):
    rank, n = _place()
    place, have = (rank - root) % n, 1
    while have < n:
        if place < have and place + have < n:
            dist.send(x, place + have)
        elif have <= place < 2 * have:
            dist.recv(x, place - have)
        have *= 2


@mutant("tree_broadcast", "power-of-two", hangs=True)
def partner_may_not_exist(x, root):
    rank, n = _place()
    place, have = (rank - root) % n, 1
    while have < n:
        if place < have:
            dist.send(x, (place + have + root) % n)
        elif place < 2 * have:
            dist.recv(x, (place - have + root) % n)
        have *= 2


@mutant("tree_broadcast", "only-two-ranks", hangs=True)
def sends_to_the_other_rank(x, root):
    if dist.get_rank() == root:
        dist.send(x, 1 - root if dist.get_world_size() == 2 else root + 1)
    else:
        dist.recv(x, root)


@mutant("tree_broadcast", "sends-too-early")
def only_the_first_step(x, root):
    rank, n = _place()
    place = (rank - root) % n
    if place < n // 2:
        dist.send(x, (place + n // 2 + root) % n)
    else:
        dist.recv(x, (place - n // 2 + root) % n)


@mutant("tree_broadcast", "hang", hangs=True)
def the_root_receives_too(x, root):
    rank, n = _place()
    place = (rank - root) % n
    dist.recv(x, (place // 2 + root + (place == 0)) % n)
    for child in (2 * place + 1, 2 * place + 2):
        if child < n:
            dist.send(x, (child + root) % n)


@mutant("tree_broadcast", "sends-too-early")
def far_partners_first(x, root):
    rank, n = _place()
    place, distance = (rank - root) % n, 1
    received = torch.empty_like(x)
    while distance < n:
        if place + distance < n and place % (2 * distance) < distance:
            dist.send(x, (place + distance + root) % n)
        elif place % (2 * distance) >= distance:
            dist.recv(received, (place - distance + root) % n)
            x.copy_(received)
        distance *= 2


@mutant("tree_broadcast", "too-many-messages")
def both_sides_of_a_pair_exchange(x, root):
    rank, n = _place()
    place, have = (rank - root) % n, 1
    while have < n:
        partner = place + have if place < have else place - have
        if place < 2 * have and partner < n:
            received = torch.empty_like(x)
            _exchange(x, (partner + root) % n, received, (partner + root) % n)
            if place >= have:
                x.copy_(received)
        have *= 2


@mutant("tree_broadcast", "not-in-place")
def returns_a_new_tensor(x, root):
    rank, n = _place()
    place, have, data = (rank - root) % n, 1, x.clone()
    while have < n:
        if place < have and place + have < n:
            dist.send(data, (place + have + root) % n)
        elif have <= place < 2 * have:
            dist.recv(data, (place - have + root) % n)
        have *= 2
    return data


@mutant("tree_broadcast", "not-distributed")
def data_of_the_root_made_again(x, root):
    x.copy_(values(6, seed=200 + 10 * root + dist.get_world_size()))


# ------------------------------------------------------------------------------------------------ two levels


def _levels(nodes: int, per_node: int):
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("node", "local"))
    return mesh.get_group("local"), mesh.get_group("node")


@mutant("two_level_all_reduce", "flat")
def one_all_reduce_over_all(x, nodes, per_node):
    x = x.clone()
    dist.all_reduce(x)
    return x


@mutant("two_level_all_reduce", "whole-tensor-across")
def two_whole_all_reduces(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    x = x.clone()
    dist.all_reduce(x, group=inside)
    dist.all_reduce(x, group=across)
    return x


@mutant("two_level_all_reduce", "leaders")
def one_leader_per_node(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    x = x.clone()
    leader = dist.get_rank() // per_node * per_node
    dist.reduce(x, dst=leader, group=inside)
    if dist.get_rank() == leader:
        dist.all_reduce(x, group=across)
    dist.broadcast(x, src=leader, group=inside)
    return x


@mutant("two_level_all_reduce", "axis")
def groups_exchanged(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    shard, result = x.new_empty(x.numel() // nodes), torch.empty_like(x)
    dist.reduce_scatter_single(shard, x, group=across)
    dist.all_reduce(shard, group=inside)
    dist.all_gather_single(result, shard, group=across)
    return result


@mutant("two_level_all_reduce", "one-level")
def only_inside_the_node(x, nodes, per_node):
    inside, _ = _levels(nodes, per_node)
    shard, result = x.new_empty(x.numel() // per_node), torch.empty_like(x)
    dist.reduce_scatter_single(shard, x, group=inside)
    dist.all_gather_single(result, shard, group=inside)
    return result


@mutant("two_level_all_reduce", "counted-twice")
def second_sum_over_all_ranks(x, nodes, per_node):
    inside, _ = _levels(nodes, per_node)
    x = x.clone()
    dist.all_reduce(x, group=inside)
    dist.all_reduce(x)
    return x


@mutant("two_level_all_reduce", "too-many-bytes")
def whole_all_reduce_inside_first(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    result = x.clone()
    dist.all_reduce(result, group=inside)
    shard = result.chunk(per_node)[dist.get_rank() % per_node].clone()
    dist.all_reduce(shard, group=across)
    dist.all_gather_single(result, shard, group=inside)
    return result


@mutant("two_level_all_reduce", "input-changed")
def works_on_x_itself(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    shard = x.new_empty(x.numel() // per_node)
    dist.reduce_scatter_single(shard, x, group=inside)
    dist.all_reduce(shard, group=across)
    dist.all_gather_single(x, shard, group=inside)
    return x


@mutant("two_level_all_reduce", "not-distributed")
def sum_made_again_from_seeds(x, nodes, per_node):
    return sum(values(12, seed=300 + rank) for rank in range(nodes * per_node))


@mutant("two_level_all_reduce", "hang", hangs=True)
def only_the_first_node_sums_across(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    shard, result = x.new_empty(x.numel() // per_node), torch.empty_like(x)
    dist.reduce_scatter_single(shard, x, group=inside)
    if dist.get_rank() < per_node:
        dist.all_reduce(shard, group=across)
    dist.all_gather_single(result, shard, group=inside)
    return result


# ------------------------------------------------------------------------------------------------ paper problems


@mutant("gradient_all_reduce_seconds", "gigabits")
def bits_taken_for_bytes(p, b, n, link):
    return 2 * (n - 1) / n * p * b / (link * 1e9)


@mutant("gradient_all_reduce_seconds", "gigabits")
def times_eight_not_divided(p, b, n, link):
    return 2 * (n - 1) / n * p * b / (link * 1e9 * 8)


@mutant("gradient_all_reduce_seconds", "gibi")
def powers_of_two(p, b, n, link):
    return 2 * (n - 1) / n * p * b / (link * 2**30 / 8)


@mutant("gradient_all_reduce_seconds", "no-factor")
def size_over_bandwidth(p, b, n, link):
    return p * b / (link * 1e9 / 8)


@mutant("gradient_all_reduce_seconds", "limit")
def twice_the_size(p, b, n, link):
    return 2 * p * b / (link * 1e9 / 8)


@mutant("gradient_all_reduce_seconds", "half")
def only_the_reduce_scatter(p, b, n, link):
    return (n - 1) / n * p * b / (link * 1e9 / 8)


@mutant("gradient_all_reduce_seconds", "whole-tensor")
def whole_tensor_to_every_rank(p, b, n, link):
    return (n - 1) * p * b / (link * 1e9 / 8)


@mutant("gradient_all_reduce_seconds", "whole-tensor")
def whole_tensor_in_every_step(p, b, n, link):
    return 2 * (n - 1) * p * b / (link * 1e9 / 8)


@mutant("gradient_all_reduce_seconds", "typed")
def typed_number(p, b, n, link):
    return 0.525


@mutant("gradient_all_reduce_seconds", "number")
def no_return_statement(p, b, n, link):
    return None


@mutant("gradient_all_reduce_seconds", "numbers")
def milliseconds(p, b, n, link):
    return 2 * (n - 1) / n * p * b / (link * 1e9 / 8) * 1e3


def _bandwidths(op, n, size, seconds):
    share = (n - 1) / n
    factor = {"all_reduce": 2 * share, "broadcast": 1.0, "reduce": 1.0}.get(op, share)
    return size / seconds / 1e9, size / seconds / 1e9 * factor


@mutant("bandwidths", "gigabits")
def bandwidth_in_bits(*case):
    return tuple(8 * b for b in _bandwidths(*case))


@mutant("bandwidths", "gibi")
def bandwidth_in_gib(*case):
    return tuple(b * 1e9 / 2**30 for b in _bandwidths(*case))


@mutant("bandwidths", "bytes-per-second")
def bandwidth_in_bytes(*case):
    return tuple(b * 1e9 for b in _bandwidths(*case))


@mutant("bandwidths", "swapped")
def bus_bandwidth_first(*case):
    return _bandwidths(*case)[::-1]


@mutant("bandwidths", "divided")
def divided_by_the_factor(op, n, size, seconds):
    alg, bus = _bandwidths(op, n, size, seconds)
    return alg, alg * alg / bus


@mutant("bandwidths", "one-factor")
def factor_of_all_reduce_for_all(op, n, size, seconds):
    return _bandwidths("all_reduce", n, size, seconds)


@mutant("bandwidths", "gather-factor")
def factor_of_all_gather_for_all(op, n, size, seconds):
    return _bandwidths("all_gather", n, size, seconds)


@mutant("bandwidths", "no-factor")
def both_the_same(op, n, size, seconds):
    return _bandwidths("broadcast", n, size, seconds)


@mutant("bandwidths", "number")
def only_the_bus_bandwidth(*case):
    return _bandwidths(*case)[1]


@mutant("all_gather_seconds", "directions")
def both_directions_for_one(shard, n, both):
    return (n - 1) * shard / (both * 1e9)


@mutant("all_gather_seconds", "shard")
def shard_taken_for_the_whole(shard, n, both):
    return (n - 1) / n * shard / (both / 2 * 1e9)


@mutant("all_gather_seconds", "shard")
def shard_and_directions(shard, n, both):
    return (n - 1) / n * shard / (both * 1e9)


@mutant("all_gather_seconds", "own-shard")
def own_shard_travels_too(shard, n, both):
    return n * shard / (both / 2 * 1e9)


@mutant("all_gather_seconds", "all-reduce")
def as_for_an_all_reduce(shard, n, both):
    return 2 * (n - 1) * shard / (both / 2 * 1e9)


@mutant("all_gather_seconds", "bits")
def divided_by_eight(shard, n, both):
    return (n - 1) * shard / (both / 2 * 1e9 / 8)


@mutant("half_bandwidth_size", "algbw")
def without_the_factor(n, latency, peak):
    return latency * peak * 1e9


@mutant("half_bandwidth_size", "limit")
def factor_of_many_ranks(n, latency, peak):
    return latency * peak * 1e9 / 2


@mutant("half_bandwidth_size", "upside-down")
def times_the_factor(n, latency, peak):
    return latency * peak * 1e9 * 2 * (n - 1) / n


@mutant("half_bandwidth_size", "gather-factor")
def factor_of_an_all_gather(n, latency, peak):
    return latency * peak * 1e9 * n / (n - 1)


@mutant("half_bandwidth_size", "giga")
def gigabytes(n, latency, peak):
    return latency * peak * n / (2 * (n - 1))


@mutant("half_bandwidth_size", "gibi")
def peak_in_gib(n, latency, peak):
    return latency * peak * 2**30 * n / (2 * (n - 1))


@mutant("half_bandwidth_size", "per-step")
def latency_of_one_step(n, latency, peak):
    return n * latency * peak * 1e9
