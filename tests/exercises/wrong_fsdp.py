"""Usual wrong answers to the exercises on FSDP2, each with the hint that it must be given."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercise_cases import Mutant, register_of

MUTANTS: list[Mutant] = []
mutant = register_of(MUTANTS)


def fully_shard(module, **options):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, **options)


def _mesh(rows, columns, order=None):
    from torch.distributed.device_mesh import DeviceMesh

    table = torch.arange(rows * columns).view(rows, columns) if order is None else order
    return DeviceMesh("cpu", table, mesh_dim_names=("replicate", "shard"))


def _adam(model, learning_rate):
    return torch.optim.Adam(model.parameters(), learning_rate)


# ------------------------------------------------------------------------------------------------ units and peak


def _units(model, size, **options):
    blocks = list(model.blocks)
    for i in range(0, len(blocks), size):
        fully_shard(blocks[i : i + size], **options)


@mutant("wrap_under_target", "not-distributed")
def not_sharded(model, learning_rate):
    return _adam(model, learning_rate)


@mutant("wrap_under_target", "no-optimizer")
def returns_the_model(model, learning_rate):
    _units(model, 2)
    return fully_shard(model)


@mutant("wrap_under_target", "no-root")
def root_not_wrapped(model, learning_rate):
    _units(model, 2)
    return _adam(model, learning_rate)


@mutant("wrap_under_target", "only-root")
def only_the_root_wrapped(model, learning_rate):
    fully_shard(model)
    return _adam(model, learning_rate)


@mutant("wrap_under_target", "too-many-gathers")
def every_block_wrapped(model, learning_rate):
    _units(model, 1)
    fully_shard(model)
    return _adam(model, learning_rate)


@mutant("wrap_under_target", "too-many-gathers")
def every_linear_wrapped(model, learning_rate):
    for block in model.blocks:
        for layer in (block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down):
            fully_shard(layer)
    fully_shard(model)
    return _adam(model, learning_rate)


@mutant("wrap_under_target", "too-large")
def four_blocks_a_unit(model, learning_rate):
    _units(model, 4)
    fully_shard(model)
    return _adam(model, learning_rate)


@mutant("wrap_under_target", "too-large")
def every_second_block_left_to_the_root(model, learning_rate):
    for block in model.blocks[::2]:
        fully_shard(block)
    fully_shard(model)
    return _adam(model, learning_rate)


@mutant("wrap_under_target", "kept")
def blocks_never_freed(model, learning_rate):
    _units(model, 1, reshard_after_forward=False)
    fully_shard(model)
    return _adam(model, learning_rate)


@mutant("wrap_under_target", "optimizer-before")
def optimizer_made_before_sharding(model, learning_rate):
    optimizer = _adam(model, learning_rate)
    _units(model, 2)
    fully_shard(model)
    return optimizer


@mutant("wrap_under_target", "precision")
def units_in_bf16(model, learning_rate):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    _units(model, 4, mp_policy=policy)
    fully_shard(model)
    return _adam(model, learning_rate)


@mutant("wrap_under_target", "error")
def root_first(model, learning_rate):
    fully_shard(model)
    _units(model, 2)
    return _adam(model, learning_rate)


# ------------------------------------------------------------------------------------------------ two-level cluster


def _shard_all(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


@mutant("fewest_internode_bytes", "not-distributed")
def nothing_sharded(model, nodes, per_node):
    pass


@mutant("fewest_internode_bytes", "no-root")
def only_the_blocks(model, nodes, per_node):
    for block in model.blocks:
        fully_shard(block, mesh=_mesh(nodes, per_node))


@mutant("fewest_internode_bytes", "full-shard")
def sharded_over_all_ranks(model, nodes, per_node):
    _shard_all(model)


@mutant("fewest_internode_bytes", "full-shard")
def root_without_the_mesh(model, nodes, per_node):
    for block in model.blocks:
        fully_shard(block, mesh=_mesh(nodes, per_node))
    fully_shard(model)


@mutant("fewest_internode_bytes", "transposed")
def transposed_mesh(model, nodes, per_node):
    table = torch.arange(nodes * per_node).view(nodes, per_node).T.contiguous()
    _shard_all(model, mesh=_mesh(0, 0, table))


@mutant("fewest_internode_bytes", "swapped")
def as_many_rows_as_ranks_of_a_node(model, nodes, per_node):
    _shard_all(model, mesh=_mesh(per_node, nodes))


@mutant("fewest_internode_bytes", "wrong-ranks")
def ranks_dealt_out_round_robin(model, nodes, per_node):
    table = torch.arange(nodes * per_node).view(per_node, nodes).T.contiguous()
    _shard_all(model, mesh=_mesh(0, 0, table))


@mutant("fewest_internode_bytes", "replicas")
def replicated_over_all_ranks(model, nodes, per_node):
    _shard_all(model, mesh=_mesh(nodes * per_node, 1))


@mutant("fewest_internode_bytes", "nodes-apart")
def mesh_of_the_node_only(model, nodes, per_node):
    _shard_all(model, mesh=_mesh(nodes, per_node)["shard"])


@mutant("fewest_internode_bytes", "precision")
def gradients_in_bf16(model, nodes, per_node):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    _shard_all(model, mesh=_mesh(nodes, per_node), mp_policy=policy)


@mutant("fewest_internode_bytes", "too-many-bytes")
def gradients_averaged_once_more(model, nodes, per_node):
    _shard_all(model, mesh=_mesh(nodes, per_node))
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: dist.all_reduce(p.grad.to_local().div_(nodes), group=p.device_mesh.get_group("replicate"))
        )


# ------------------------------------------------------------------------------------------------ resharding


def _chunk(rows, ranks, rank):
    size = -(-rows // ranks)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def _wanted(rows, saved, begin, end, read):
    """Rows begin to end, read from the files that have them."""
    pieces = [read(0, 0, 0)]
    for file in range(saved):
        first, last = _chunk(rows, saved, file)
        start, stop = max(begin, first), min(end, last)
        if start < stop:
            pieces.append(read(file, start - first, stop - first))
    return torch.cat(pieces)


def _everything(rows, saved, read):
    return _wanted(rows, saved, 0, rows, read)


@mutant("reshard", "tensor")
def list_of_pieces(rows, saved, rank, ranks, read):
    return [_wanted(rows, saved, *_chunk(rows, ranks, rank), read)]


@mutant("reshard", "dtype")
def copied_into_float32(rows, saved, rank, ranks, read):
    piece = _wanted(rows, saved, *_chunk(rows, ranks, rank), read)
    out = torch.empty(piece.shape)
    out.copy_(piece)
    return out


@mutant("reshard", "dropped")
def equal_shards_and_the_rest_dropped(rows, saved, rank, ranks, read):
    size = rows // ranks
    return _wanted(rows, saved, rank * size, (rank + 1) * size, read)


@mutant("reshard", "dropped")
def smaller_files_dropped(rows, saved, rank, ranks, read):
    begin, end = _chunk(rows, ranks, rank)
    full = rows // -(-rows // saved) * -(-rows // saved)
    return _wanted(rows, saved, begin, min(end, full), read)


@mutant("reshard", "balanced")
def shards_as_equal_as_possible(rows, saved, rank, ranks, read):
    small, more = divmod(rows, ranks)
    begin = rank * small + min(rank, more)
    return _wanted(rows, saved, begin, begin + small + (rank < more), read)


@mutant("reshard", "padding")
def padded_to_equal_shards(rows, saved, rank, ranks, read):
    piece = _wanted(rows, saved, *_chunk(rows, ranks, rank), read)
    return F.pad(piece, (0, 0, 0, -(-rows // ranks) - len(piece)))


@mutant("reshard", "order")
def last_file_first(rows, saved, rank, ranks, read):
    begin, end = _chunk(rows, ranks, rank)
    pieces = [read(0, 0, 0)]
    for file in reversed(range(saved)):
        first, last = _chunk(rows, saved, file)
        start, stop = max(begin, first), min(end, last)
        if start < stop:
            pieces.append(read(file, start - first, stop - first))
    return torch.cat(pieces)


@mutant("reshard", "own-file")
def file_of_the_same_number(rows, saved, rank, ranks, read):
    first, last = _chunk(rows, saved, rank)
    return read(rank, 0, last - first)


@mutant("reshard", "whole")
def whole_tensor_returned(rows, saved, rank, ranks, read):
    return _everything(rows, saved, read)


@mutant("reshard", "no-rows")
def fails_without_rows(rows, saved, rank, ranks, read):
    begin, end = _chunk(rows, ranks, rank)
    files = (f for f in range(saved) if max(begin, _chunk(rows, saved, f)[0]) < min(end, _chunk(rows, saved, f)[1]))
    return torch.cat([_wanted(rows, saved, begin, end, read)] if any(True for _ in files) else [])


@mutant("reshard", "no-rows")
def empty_tensor_without_columns(rows, saved, rank, ranks, read):
    begin, end = _chunk(rows, ranks, rank)
    return _wanted(rows, saved, begin, end, read) if begin < end else torch.empty(0, dtype=torch.bfloat16)


@mutant("reshard", "wrong-rows")
def files_taken_for_equal(rows, saved, rank, ranks, read):
    begin, end = _chunk(rows, ranks, rank)
    size = rows // saved
    pieces = [read(0, 0, 0)]
    while begin < end:
        file, start = divmod(begin, size)
        stop = min(size, start + end - begin)
        pieces.append(read(file, start, stop))
        begin += stop - start
    return torch.cat(pieces)


@mutant("reshard", "past-the-end")
def rows_not_counted_inside_the_file(rows, saved, rank, ranks, read):
    begin, end = _chunk(rows, ranks, rank)
    size = -(-rows // saved)
    files = range(begin // size, -(-end // size))
    return torch.cat([read(0, 0, 0), *(read(f, max(begin, f * size), min(end, f * size + size)) for f in files)])


@mutant("reshard", "every-file")
def whole_tensor_assembled(rows, saved, rank, ranks, read):
    begin, end = _chunk(rows, ranks, rank)
    return _everything(rows, saved, read)[begin:end]


@mutant("reshard", "more-rows")
def whole_files_read(rows, saved, rank, ranks, read):
    begin, end = _chunk(rows, ranks, rank)
    pieces = [read(0, 0, 0)]
    for file in range(saved):
        first, last = _chunk(rows, saved, file)
        start, stop = max(begin, first), min(end, last)
        if start < stop:
            pieces.append(read(file, 0, last - first)[start - first : stop - first])
    return torch.cat(pieces)


@mutant("reshard", "many-reads")
def row_by_row(rows, saved, rank, ranks, read):
    size = -(-rows // saved)
    own = range(*_chunk(rows, ranks, rank))
    return torch.cat([read(0, 0, 0), *(read(row // size, row % size, row % size + 1) for row in own)])


# ------------------------------------------------------------------------------------------------ clipping


def _squares(gradients):
    return sum((g.square().sum() for g in gradients), torch.zeros((), dtype=torch.float64))


def _summed(value, op=dist.ReduceOp.SUM):
    value = value.clone()
    dist.all_reduce(value, op=op)
    return value


def _scale(gradients, max_norm, norm, most=1.0, small=1e-6):
    coefficient = min(most, max_norm / (float(norm) + small))
    for gradient in gradients:
        gradient.mul_(coefficient)
    return norm


def _right_norm(sharded, replicated):
    return (_summed(_squares(sharded)) + _squares(replicated)).sqrt()


@mutant("clip_sharded", "not-distributed")
def local_norm_only(sharded, replicated, max_norm):
    return _scale([*sharded, *replicated], max_norm, _squares([*sharded, *replicated]).sqrt())


@mutant("clip_sharded", "tensor")
def nothing_returned(sharded, replicated, max_norm):
    _scale([*sharded, *replicated], max_norm, _right_norm(sharded, replicated))


@mutant("clip_sharded", "local")
def own_norm_although_summed(sharded, replicated, max_norm):
    squares = _squares([*sharded, *replicated])
    _summed(squares)
    return _scale([*sharded, *replicated], max_norm, squares.sqrt())


@mutant("clip_sharded", "sum-of-norms")
def sum_of_the_norms(sharded, replicated, max_norm):
    norm = _summed(_squares(sharded).sqrt()) + _squares(replicated).sqrt()
    return _scale([*sharded, *replicated], max_norm, norm)


@mutant("clip_sharded", "sum-of-norms")
def norms_of_all_ranks_added(sharded, replicated, max_norm):
    return _scale([*sharded, *replicated], max_norm, _summed(_squares([*sharded, *replicated]).sqrt()))


@mutant("clip_sharded", "no-root")
def sum_of_squares(sharded, replicated, max_norm):
    return _scale([*sharded, *replicated], max_norm, _right_norm(sharded, replicated) ** 2)


@mutant("clip_sharded", "mean")
def mean_of_the_squares(sharded, replicated, max_norm):
    squares = _summed(_squares([*sharded, *replicated])) / dist.get_world_size()
    return _scale([*sharded, *replicated], max_norm, squares.sqrt())


@mutant("clip_sharded", "replicated-twice")
def replicated_counted_on_every_rank(sharded, replicated, max_norm):
    return _scale([*sharded, *replicated], max_norm, _summed(_squares([*sharded, *replicated])).sqrt())


@mutant("clip_sharded", "replicated-forgotten")
def norm_of_the_sharded_only(sharded, replicated, max_norm):
    return _scale([*sharded, *replicated], max_norm, _summed(_squares(sharded)).sqrt())


@mutant("clip_sharded", "norm-after")
def norm_after_clipping(sharded, replicated, max_norm):
    norm = _scale([*sharded, *replicated], max_norm, _right_norm(sharded, replicated))
    return norm.clamp(max=max_norm)


@mutant("clip_sharded", "not-scaled")
def scaled_copies(sharded, replicated, max_norm):
    norm = _right_norm(sharded, replicated)
    sharded[:] = [g * min(1, max_norm / norm) for g in sharded]
    replicated[:] = [g * min(1, max_norm / norm) for g in replicated]
    return norm


@mutant("clip_sharded", "replicated-not-scaled")
def replicated_left_alone(sharded, replicated, max_norm):
    return _scale(sharded, max_norm, _right_norm(sharded, replicated))


@mutant("clip_sharded", "scaled-up")
def always_scaled_to_max_norm(sharded, replicated, max_norm):
    return _scale([*sharded, *replicated], max_norm, _right_norm(sharded, replicated), most=math.inf)


@mutant("clip_sharded", "each-tensor")
def each_by_its_own_norm(sharded, replicated, max_norm):
    norm = _right_norm(sharded, replicated)
    for gradient in (*sharded, *replicated):
        _scale([gradient], max_norm, gradient.norm())
    return norm


@mutant("clip_sharded", "zero")
def divided_by_zero(sharded, replicated, max_norm):
    norm = _right_norm(sharded, replicated)
    for gradient in (*sharded, *replicated):
        gradient.mul_((max_norm / norm).clamp(max=1) if norm else norm / norm)
    return norm


@mutant("clip_sharded", "gathered")
def gradients_gathered(sharded, replicated, max_norm):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sharded)
    squares = sum(_squares(pieces) for pieces in everyone) + _squares(replicated)
    return _scale([*sharded, *replicated], max_norm, squares.sqrt())


@mutant("clip_sharded", "too-many-messages")
def one_message_a_tensor(sharded, replicated, max_norm):
    squares = sum(_summed(g.square().sum()) for g in sharded) + _squares(replicated)
    return _scale([*sharded, *replicated], max_norm, squares.sqrt())


@mutant("clip_sharded", "hang", hangs=True)
def ranks_without_rows_skip(sharded, replicated, max_norm):
    squares = _squares(sharded)
    if any(g.numel() for g in sharded):
        squares = _summed(squares)
    return _scale([*sharded, *replicated], max_norm, (squares + _squares(replicated)).sqrt())


# ------------------------------------------------------------------------------------------------ accumulation


def _add(model, x, y, share):
    (F.mse_loss(model(x), y) * share).backward()


def _shares(batches):
    samples = sum(len(x) for x, _ in batches)
    return [len(x) / samples for x, _ in batches]


def _accumulated(model, batches, shares, synced, **options):
    for (x, y), share, sync in zip(batches, shares, synced, strict=True):
        model.set_requires_gradient_sync(sync, **options)
        _add(model, x, y, share)


def _only_last(batches):
    return [i == len(batches) - 1 for i in range(len(batches))]


@mutant("accumulate", "every-micro-batch")
def synchronised_every_time(model, batches):
    _accumulated(model, batches, _shares(batches), [True] * len(batches))


@mutant("accumulate", "recurse")
def only_the_root_waits(model, batches):
    _accumulated(model, batches, _shares(batches), _only_last(batches), recurse=False)


@mutant("accumulate", "never")
def never_synchronised(model, batches):
    _accumulated(model, batches, _shares(batches), [False] * len(batches))


@mutant("accumulate", "too-early")
def all_but_the_last_synchronised(model, batches):
    _accumulated(model, batches, _shares(batches), [len(batches) == 1 or not last for last in _only_last(batches)])


@mutant("accumulate", "not-scaled")
def sum_of_the_means(model, batches):
    _accumulated(model, batches, [1] * len(batches), _only_last(batches))


@mutant("accumulate", "mean-of-means")
def mean_of_the_means(model, batches):
    _accumulated(model, batches, [1 / len(batches)] * len(batches), _only_last(batches))


@mutant("accumulate", "divided-twice")
def divided_by_the_ranks_as_well(model, batches):
    shares = [share / dist.get_world_size() for share in _shares(batches)]
    _accumulated(model, batches, shares, _only_last(batches))


@mutant("accumulate", "only-last")
def gradients_cleared_for_each(model, batches):
    for (x, y), share in zip(batches, _shares(batches), strict=True):
        model.zero_grad()
        _add(model, x, y, share)


@mutant("accumulate", "one-batch")
def all_at_once(model, batches):
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    _add(model, x, y, 1)


@mutant("accumulate", "one-micro-batch")
def first_and_last_set_apart(model, batches):
    shares = _shares(batches)
    model.set_requires_gradient_sync(False)
    for (x, y), share in zip(batches[:-1], shares[:-1], strict=True):
        _add(model, x, y, share)
    (x, y), share = batches[1:][-1], shares[-1]
    model.set_requires_gradient_sync(True)
    _add(model, x, y, share)


# ------------------------------------------------------------------------------------------------ paper problem


def _traffic(layers, block, around, n, a, b, m, **other):
    got = {
        "gathers": m * (2 * layers + 1), "gathered": m * (2 * layers * block + around), "reduces": layers + 1,
        "reduced": layers * block + around, "share": (n - 1) / n,
    } | other  # fmt: skip
    return got["gathers"], got["reduces"], got["share"] * (got["gathered"] * a + got["reduced"] * b) / 1e9


@mutant("fsdp_traffic", "root-twice")
def root_gathered_twice(layers, block, around, n, a, b, m):
    gathered = 2 * m * (layers * block + around)
    return _traffic(layers, block, around, n, a, b, m, gathers=2 * m * (layers + 1), gathered=gathered)


@mutant("fsdp_traffic", "root-twice")
def bytes_of_the_root_gathered_twice(layers, block, around, n, a, b, m):
    return _traffic(layers, block, around, n, a, b, m, gathered=2 * m * (layers * block + around))


@mutant("fsdp_traffic", "forward-only")
def gathered_in_forward_only(layers, block, around, n, a, b, m):
    gathered = m * (layers * block + around)
    return _traffic(layers, block, around, n, a, b, m, gathers=m * (layers + 1), gathered=gathered)


@mutant("fsdp_traffic", "no-root")
def blocks_only(layers, block, around, n, a, b, m):
    gathers, reduces, size = _traffic(layers, block, 0, n, a, b, m)
    return gathers - m, reduces - 1, size


@mutant("fsdp_traffic", "no-root")
def root_not_reduced(layers, block, around, n, a, b, m):
    return _traffic(layers, block, around, n, a, b, m, reduces=layers, reduced=layers * block)


@mutant("fsdp_traffic", "per-micro-batch")
def reduced_in_every_micro_batch(layers, block, around, n, a, b, m):
    reduced = m * (layers * block + around)
    return _traffic(layers, block, around, n, a, b, m, reduces=m * (layers + 1), reduced=reduced)


@mutant("fsdp_traffic", "gathered-once")
def gathered_in_the_first_micro_batch_only(layers, block, around, n, a, b, m):
    return _traffic(layers, block, around, n, a, b, m, gathers=2 * layers + 1, gathered=2 * layers * block + around)


@mutant("fsdp_traffic", "all-reduce")
def gradients_all_reduced(layers, block, around, n, a, b, m):
    return _traffic(layers, block, around, n, a, 2 * b, m)


@mutant("fsdp_traffic", "share")
def whole_units_sent(layers, block, around, n, a, b, m):
    return _traffic(layers, block, around, n, a, b, m, share=1)


@mutant("fsdp_traffic", "one-dtype")
def all_in_the_precision_of_parameters(layers, block, around, n, a, b, m):
    return _traffic(layers, block, around, n, a, a, m)


@mutant("fsdp_traffic", "elements")
def elements_for_bytes(layers, block, around, n, a, b, m):
    return _traffic(layers, block, around, n, 1, 1, m)


@mutant("fsdp_traffic", "giga")
def bytes_for_gigabytes(layers, block, around, n, a, b, m):
    gathers, reduces, size = _traffic(layers, block, around, n, a, b, m)
    return gathers, reduces, size * 1e9


@mutant("fsdp_traffic", "number")
def one_number(layers, block, around, n, a, b, m):
    return _traffic(layers, block, around, n, a, b, m)[2]


@mutant("fsdp_traffic", "typed")
def typed_from_the_text(layers, block, around, n, a, b, m):
    return _traffic(32, 201_379_840, 214_249_472, 64, 2, 4, 1)
