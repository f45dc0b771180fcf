"""Usual wrong answers to the exercises on data parallelism, each with the hint that it must be given."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercise_cases import Mutant, register_of
from torch import nn

MUTANTS: list[Mutant] = []
mutant = register_of(MUTANTS)

# ------------------------------------------------------------------------------------------------ data parallel


def _same_start(module):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), src=0)


def _trained(module):
    return [p for p in module.parameters() if p.requires_grad]


def _fill(parameters):
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)


def _mean(p):
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


def _average(module):
    _fill(_trained(module))
    for p in _trained(module):
        _mean(p)


@mutant("data_parallel", "not-distributed")
def nothing_at_all(module):
    return lambda: None


@mutant("data_parallel", "no-broadcast")
def no_initial_broadcast(module):
    return lambda: _average(module)


@mutant("data_parallel", "no-broadcast")
def mean_of_the_initial_weights(module):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.all_reduce(tensor.detach())
        tensor.detach().div_(dist.get_world_size())
    return lambda: _average(module)


@mutant("data_parallel", "buffers")
def parameters_without_buffers(module):
    for p in module.parameters():
        dist.broadcast(p.detach(), src=0)
    return lambda: _average(module)


@mutant("data_parallel", "frozen-broadcast")
def only_trained_parameters_broadcast(module):
    for tensor in (*_trained(module), *module.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    return lambda: _average(module)


@mutant("data_parallel", "replaced")
def new_parameters_in_place_of_old_ones(module):
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)
    for layer in module.modules():
        for name, p in list(layer.named_parameters(recurse=False)):
            value = p.detach().clone()
            dist.broadcast(value, src=0)
            setattr(layer, name, nn.Parameter(value, p.requires_grad))
    return lambda: _average(module)


@mutant("data_parallel", "finish")
def averages_at_once(module):
    _same_start(module)
    _average(module)


@mutant("data_parallel", "sum")
def sum_instead_of_mean(module):
    _same_start(module)

    def finish():
        _fill(_trained(module))
        for p in _trained(module):
            dist.all_reduce(p.grad)

    return finish


@mutant("data_parallel", "divided-twice")
def divided_before_and_after(module):
    _same_start(module)

    def finish():
        _fill(_trained(module))
        for p in _trained(module):
            p.grad /= dist.get_world_size()
            _mean(p)

    return finish


@mutant("data_parallel", "own-gradient")
def mean_of_a_copy(module):
    _same_start(module)

    def finish():
        _fill(_trained(module))
        for p in _trained(module):
            gradient = p.grad.clone()
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()

    return finish


@mutant("data_parallel", "own-gradient")
def only_the_start_is_shared(module):
    _same_start(module)
    return lambda: None


@mutant("data_parallel", "frozen")
def frozen_layers_averaged_too(module):
    _same_start(module)

    def finish():
        for p in module.parameters():
            _mean(p)

    return finish


@mutant("data_parallel", "frozen")
def zeros_sent_for_frozen_layers(module):
    _same_start(module)

    def finish():
        _fill(list(module.parameters()))
        for p in module.parameters():
            _mean(p)

    return finish


@mutant("data_parallel", "tied")
def tied_weight_averaged_twice(module):
    _same_start(module)

    def finish():
        for _, p in module.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                _fill([p])
                _mean(p)

    return finish


@mutant("data_parallel", "tied")
def tied_weight_divided_twice(module):
    _same_start(module)

    def finish():
        _fill(_trained(module))
        for p in _trained(module):
            dist.all_reduce(p.grad)
        for layer in module.modules():
            for p in layer.parameters(recurse=False):
                if p.requires_grad:
                    p.grad /= dist.get_world_size()

    return finish


@mutant("data_parallel", "unused")
def skips_parameters_without_gradient(module):
    _same_start(module)

    def finish():
        for p in reversed(_trained(module)):
            if p.grad is not None and p.numel():
                _mean(p)
        dist.barrier()

    return finish


@mutant("data_parallel", "unused")
def gradient_of_none(module):
    _same_start(module)

    def finish():
        for p in _trained(module):
            _mean(p)

    return finish


@mutant("data_parallel", "unused")
def mean_kept_from_ranks_without_gradient(module):
    _same_start(module)

    def finish():
        for p in _trained(module):
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()

    return finish


@mutant("data_parallel", "leftover")
def averages_only_once(module):
    _same_start(module)
    done = []

    def finish():
        if not done:
            _average(module)
        done.append(True)

    return finish


@mutant("data_parallel", "leftover")
def adds_to_a_buffer_that_is_never_cleared(module):
    _same_start(module)
    totals = {p: torch.zeros_like(p) for p in _trained(module)}

    def finish():
        _average(module)
        for p, total in totals.items():
            total += p.grad
            p.grad = total.clone()

    return finish


@mutant("data_parallel", "float32")
def through_float32(module):
    _same_start(module)

    def finish():
        _fill(_trained(module))
        for p in _trained(module):
            gradient = p.grad.float()
            dist.all_reduce(gradient)
            p.grad = gradient.double() / dist.get_world_size()

    return finish


@mutant("data_parallel", "too-many-bytes")
def averages_the_weights_as_well(module):
    _same_start(module)

    def finish():
        _average(module)
        for p in _trained(module):
            dist.all_reduce(p.detach())
            p.detach().div_(dist.get_world_size())

    return finish


@mutant("data_parallel", "other-calls")
def gathers_all_gradients(module):
    _same_start(module)

    def finish():
        _fill(_trained(module))
        for p in _trained(module):
            parts = [torch.empty_like(p) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, p.grad)
            p.grad = sum(parts) / len(parts)

    return finish


@mutant("data_parallel", "other-calls")
def through_rank_0(module):
    _same_start(module)

    def finish():
        _fill(_trained(module))
        for p in _trained(module):
            dist.reduce(p.grad, dst=0)
            p.grad /= dist.get_world_size()
            dist.broadcast(p.grad, src=0)

    return finish


@mutant("data_parallel", "only-two-ranks")
def always_half(module):
    _same_start(module)

    def finish():
        _fill(_trained(module))
        for p in _trained(module):
            dist.all_reduce(p.grad)
            p.grad /= min(2, dist.get_world_size())

    return finish


# ------------------------------------------------------------------------------------------------ buckets


def _buckets(parameters, cap, size=lambda p: p.nbytes, full=lambda total, cap: total > cap):
    buckets, filling = [], {}
    for p in parameters:
        bucket = filling.get(p.dtype)
        if bucket is None or full(sum(map(size, bucket)) + size(p), cap):
            bucket = filling[p.dtype] = []
            buckets.append(bucket)
        bucket.append(p)
    return buckets


@mutant("in_buckets", "lists")
def names_not_parameters(parameters, cap):
    return [[p.nbytes for p in bucket] for bucket in _buckets(parameters, cap)]


@mutant("in_buckets", "lists")
def one_flat_list(parameters, cap):
    return list(parameters)


@mutant("in_buckets", "lost")
def forgets_the_last_bucket(parameters, cap):
    buckets, bucket = [], []
    for p in parameters:
        if bucket and sum(q.nbytes for q in bucket) + p.nbytes > cap:
            buckets.append(bucket)
            bucket = []
        bucket.append(p)
    return buckets


@mutant("in_buckets", "order")
def sorted_by_size(parameters, cap):
    return _buckets(sorted(parameters, key=lambda p: p.nbytes), cap)


@mutant("in_buckets", "order")
def reversed_once_more(parameters, cap):
    return _buckets(parameters[::-1], cap)


@mutant("in_buckets", "too-large")
def closed_once_full_as_in_ddp(parameters, cap):
    buckets, bucket = [], []
    for p in parameters:
        bucket.append(p)
        if sum(q.nbytes for q in bucket) >= cap:
            buckets.append(bucket)
            bucket = []
    return buckets + [bucket] * bool(bucket)


@mutant("in_buckets", "elements")
def counts_elements(parameters, cap):
    return _buckets(parameters, cap, size=lambda p: p.numel())


@mutant("in_buckets", "elements")
def always_eight_bytes(parameters, cap):
    return _buckets(parameters, cap, size=lambda p: 8 * p.numel())


@mutant("in_buckets", "elements")
def always_four_bytes(parameters, cap):
    return _buckets(parameters, cap, size=lambda p: 4 * p.numel())


@mutant("in_buckets", "large-alone")
def empty_bucket_before_a_large_parameter(parameters, cap):
    buckets, filling = [[]], {}
    for p in parameters:
        filling.setdefault(p.dtype, buckets[-1])
        if sum(q.nbytes for q in filling[p.dtype]) + p.nbytes > cap:
            filling[p.dtype] = []
            buckets.append(filling[p.dtype])
        filling[p.dtype].append(p)
    return buckets


@mutant("in_buckets", "large-alone")
def large_parameter_added_to_the_bucket(parameters, cap):
    buckets = [[]]
    for p in parameters:
        if p.nbytes <= cap and sum(q.nbytes for q in buckets[-1]) + p.nbytes > cap:
            buckets.append([])
        buckets[-1].append(p)
    return buckets


@mutant("in_buckets", "too-small")
def exact_fit_refused(parameters, cap):
    return _buckets(parameters, cap, full=lambda total, cap: total >= cap)


@mutant("in_buckets", "too-small")
def one_bucket_each(parameters, cap):
    return [[p] for p in parameters]


@mutant("in_buckets", "dtype")
def dtypes_mixed(parameters, cap):
    buckets, total = [[]], 0
    for p in parameters:
        if buckets[-1] and total + p.nbytes > cap:
            buckets.append([])
            total = 0
        buckets[-1].append(p)
        total += p.nbytes
    return buckets


@mutant("in_buckets", "input-changed")
def takes_from_the_list(parameters, cap):
    given, parameters[:] = list(parameters), []
    return _buckets(given, cap)


@mutant("in_buckets", "error")
def looks_behind_the_end(parameters, cap):
    return [[parameters[i], parameters[i + 1]] for i in range(len(parameters))]


# ------------------------------------------------------------------------------------------------ bucketed


def _flat(bucket):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])


def _write(bucket, flat):
    for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
        p.grad = piece.view_as(p)


def _reduce(bucket, divisor=None, fill=_flat, write=_write):
    flat = fill(bucket)
    dist.all_reduce(flat)
    write(bucket, flat / (divisor or dist.get_world_size()))


def _made(module, cap, parameters=None):
    return _buckets((_trained(module) if parameters is None else parameters)[::-1], cap)


def _bucketed(module, cap, **how):
    _same_start(module)
    buckets = _made(module, cap)

    def finish():
        for bucket in buckets:
            _reduce(bucket, **how)

    return finish


@mutant("bucketed", "not-distributed")
def no_bucket_is_ever_sent(module, cap):
    return lambda: None


@mutant("bucketed", "no-broadcast")
def buckets_without_broadcast(module, cap):
    return lambda: [_reduce(bucket) for bucket in _made(module, cap)]


@mutant("bucketed", "buffers")
def buckets_without_buffers(module, cap):
    for p in module.parameters():
        dist.broadcast(p.detach(), src=0)
    return lambda: [_reduce(bucket) for bucket in _made(module, cap)]


@mutant("bucketed", "frozen-broadcast")
def buckets_broadcast_only_trained(module, cap):
    for tensor in (*_trained(module), *module.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    return lambda: [_reduce(bucket) for bucket in _made(module, cap)]


@mutant("bucketed", "replaced")
def broadcast_unties(module, cap):
    new_parameters_in_place_of_old_ones(module)
    return lambda: [_reduce(bucket) for bucket in _made(module, cap)]


@mutant("bucketed", "finish")
def returns_the_buckets(module, cap):
    _same_start(module)
    return _made(module, cap)


@mutant("bucketed", "sum")
def buckets_summed(module, cap):
    return _bucketed(module, cap, divisor=1)


@mutant("bucketed", "divided-twice")
def buckets_divided_twice(module, cap):
    return _bucketed(module, cap, divisor=dist.get_world_size() ** 2)


@mutant("bucketed", "own-gradient")
def never_written_back(module, cap):
    return _bucketed(module, cap, write=lambda bucket, flat: _fill(bucket))


@mutant("bucketed", "write-back")
def written_back_in_the_other_order(module, cap):
    return _bucketed(module, cap, write=lambda bucket, flat: _write(bucket[::-1], flat))


@mutant("bucketed", "write-back")
def written_back_from_the_beginning_each_time(module, cap):
    def write(bucket, flat):
        for p in bucket:
            p.grad = flat[: p.numel()].view_as(p)

    return _bucketed(module, cap, write=write)


@mutant("bucketed", "frozen")
def frozen_parameters_in_buckets(module, cap):
    _same_start(module)
    return lambda: [_reduce(bucket) for bucket in _made(module, cap, list(module.parameters()))]


@mutant("bucketed", "tied")
def tied_weight_in_two_buckets(module, cap):
    _same_start(module)
    named = [p for _, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
    return lambda: [_reduce(bucket) for bucket in _made(module, cap, named)]


@mutant("bucketed", "unused")
def none_in_a_bucket(module, cap):
    return _bucketed(module, cap, fill=lambda bucket: torch.cat([p.grad.flatten() for p in bucket]))


@mutant("bucketed", "unused")
def buckets_of_those_with_a_gradient(module, cap):
    _same_start(module)

    def finish():
        for bucket in _made(module, cap, [p for p in _trained(module) if p.grad is not None]):
            _reduce(bucket)

    return finish


@mutant("bucketed", "unused")
def no_mean_for_parameters_without_gradient(module, cap):
    def write(bucket, flat):
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            if p.grad is not None:
                p.grad.copy_(piece.view_as(p))

    return _bucketed(module, cap, write=write)


@mutant("bucketed", "leftover")
def buckets_filled_once_and_for_all(module, cap):
    _same_start(module)
    kept = []

    def finish():
        if not kept:
            kept.extend((bucket, _flat(bucket)) for bucket in _made(module, cap))
        for bucket, flat in kept:
            total = flat.clone()
            dist.all_reduce(total)
            _write(bucket, total / dist.get_world_size())

    return finish


@mutant("bucketed", "float32")
def flat_buffer_of_the_default_dtype(module, cap):
    def fill(bucket):
        flat = torch.zeros(sum(p.numel() for p in bucket))
        return flat.copy_(_flat(bucket))

    def write(bucket, flat):
        _write(bucket, flat.double())

    return _bucketed(module, cap, fill=fill, write=write)


@mutant("bucketed", "too-many-bytes")
def buckets_padded_to_their_full_size(module, cap):
    def fill(bucket):
        flat = _flat(bucket)
        return torch.cat([flat, flat.new_zeros(max(0, cap // 8 - len(flat)))])

    def write(bucket, flat):
        _write(bucket, flat[: sum(p.numel() for p in bucket)])

    return _bucketed(module, cap, fill=fill, write=write)


@mutant("bucketed", "other-calls")
def buckets_gathered(module, cap):
    _same_start(module)

    def finish():
        for bucket in _made(module, cap):
            flat = _flat(bucket)
            parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, flat)
            _write(bucket, sum(parts) / len(parts))

    return finish


@mutant("bucketed", "one-per-parameter")
def one_all_reduce_for_each_parameter(module, cap):
    _same_start(module)
    return lambda: _average(module)


@mutant("bucketed", "too-many-messages")
def smaller_buckets_than_allowed(module, cap):
    return _bucketed(module, 340 if cap == 700 else cap)


@mutant("bucketed", "too-large")
def one_bucket_for_all(module, cap):
    return _bucketed(module, 10**9)


# ------------------------------------------------------------------------------------------------ overlapped


def _start(bucket, fill=_flat, write=_write, divisor=None):
    flat = fill(bucket)
    request = dist.all_reduce(flat, async_op=True)

    def end():
        request.wait()
        write(bucket, flat / (divisor or dist.get_world_size()))

    return end


def _overlapped(
    module, cap, same_start=_same_start, parameters=None, order=-1, start=_start, in_order=True, clear=True, needed=None
):
    """The right way, with one thing that can be made wrong."""
    same_start(module)
    parameters = _trained(module) if parameters is None else parameters
    buckets = _buckets(parameters[::order], cap)
    arrived, ends = set(), {}

    def ready(i):
        return i not in ends and len(arrived.intersection(buckets[i])) >= (needed or len(set(buckets[i])))

    def arrive(p):
        arrived.add(p)
        for i in range(len(buckets)):
            if ready(i):
                ends[i] = start(buckets[i])
            elif in_order and i not in ends:
                break

    def finish():
        for i, bucket in enumerate(buckets):
            if i not in ends:
                ends[i] = start(bucket)
        for end in ends.values():
            end()
        if clear:
            ends.clear()
        arrived.clear()

    for p in parameters:
        p.register_post_accumulate_grad_hook(arrive)
    return finish


@mutant("overlapped", "not-distributed")
def hooks_that_send_nothing(module, cap):
    return lambda: None


@mutant("overlapped", "no-broadcast")
def overlap_without_broadcast(module, cap):
    return _overlapped(module, cap, same_start=lambda module: None)


@mutant("overlapped", "buffers")
def overlap_without_buffers(module, cap):
    return _overlapped(module, cap, lambda module: [dist.broadcast(p.detach(), src=0) for p in module.parameters()])


@mutant("overlapped", "frozen-broadcast")
def overlap_broadcasts_only_trained(module, cap):
    def same_start(module):
        for tensor in (*_trained(module), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    return _overlapped(module, cap, same_start)


@mutant("overlapped", "replaced")
def overlap_unties(module, cap):
    return _overlapped(module, cap, new_parameters_in_place_of_old_ones)


@mutant("overlapped", "finish")
def forgets_to_return_finish(module, cap):
    _overlapped(module, cap)


@mutant("overlapped", "sum")
def overlapped_sum(module, cap):
    return _overlapped(module, cap, start=lambda bucket: _start(bucket, divisor=1))


@mutant("overlapped", "divided-twice")
def overlapped_divided_twice(module, cap):
    def start(bucket):
        return _start(bucket, fill=lambda bucket: _flat(bucket) / dist.get_world_size())

    return _overlapped(module, cap, start=start)


@mutant("overlapped", "own-gradient")
def overlapped_not_written_back(module, cap):
    return _overlapped(module, cap, start=lambda bucket: _start(bucket, write=lambda bucket, flat: _fill(bucket)))


@mutant("overlapped", "write-back")
def overlapped_written_back_in_the_other_order(module, cap):
    def write(bucket, flat):
        _write(bucket[::-1], flat)

    return _overlapped(module, cap, start=lambda bucket: _start(bucket, write=write))


@mutant("overlapped", "frozen")
def hook_on_a_frozen_parameter(module, cap):
    return _overlapped(module, cap, parameters=list(module.parameters()))


@mutant("overlapped", "tied")
def hooks_on_tied_weights_fire_twice(module, cap):
    _same_start(module)
    buckets = _made(module, cap)
    home = {p: i for i, bucket in enumerate(buckets) for p in bucket}
    missing, ends = list(map(len, buckets)), []

    def arrive(p):
        missing[home[p]] -= 1
        if missing[home[p]] <= 0:
            ends.append(_start(buckets[home[p]]))

    def finish():
        for end in ends:
            end()
        ends.clear()
        missing[:] = map(len, buckets)

    for layer in module.modules():
        for p in layer.parameters(recurse=False):
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(arrive)
    return finish


@mutant("overlapped", "tied")
def tied_weight_twice_in_the_buckets(module, cap):
    named = [p for _, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
    return _overlapped(module, cap, parameters=named)


@mutant("overlapped", "unused")
def bucket_that_is_never_complete_is_never_sent(module, cap):
    _same_start(module)
    buckets = _made(module, cap)
    arrived, ends = set(), []

    def arrive(p):
        arrived.add(p)
        while len(ends) < len(buckets) and arrived.issuperset(buckets[len(ends)]):
            ends.append(_start(buckets[len(ends)]))

    def finish():
        for end in ends:
            end()
        ends.clear()
        arrived.clear()

    for p in _trained(module):
        p.register_post_accumulate_grad_hook(arrive)
    return finish


@mutant("overlapped", "unused")
def none_in_an_overlapped_bucket(module, cap):
    def fill(bucket):
        return torch.cat([p.grad.flatten() for p in bucket])

    return _overlapped(module, cap, start=lambda bucket: _start(bucket, fill=fill))


@mutant("overlapped", "order")
def complete_buckets_do_not_wait_for_those_before(module, cap):
    return _overlapped(module, cap, in_order=False)


@mutant("overlapped", "leftover")
def under_way_is_never_cleared(module, cap):
    return _overlapped(module, cap, clear=False)


@mutant("overlapped", "float32")
def overlapped_in_float32(module, cap):
    def start(bucket):
        return _start(bucket, lambda bucket: _flat(bucket).float(), lambda bucket, flat: _write(bucket, flat.double()))

    return _overlapped(module, cap, start=start)


@mutant("overlapped", "too-early")
def tensor_hook_runs_before_the_gradient_is_there(module, cap):
    _same_start(module)
    buckets, arrived, ends = _made(module, cap), set(), []

    def arrive(p):
        arrived.add(p)
        while len(ends) < len(buckets) and arrived.issuperset(buckets[len(ends)]):
            ends.append(_start(buckets[len(ends)]))

    def finish():
        ends.extend(_start(bucket) for bucket in buckets[len(ends) :])
        for end in ends:
            end()
        ends.clear()
        arrived.clear()

    for p in _trained(module):
        p.register_hook(lambda gradient, p=p: arrive(p))
    return finish


@mutant("overlapped", "too-early")
def bucket_starts_with_its_first_gradient(module, cap):
    return _overlapped(module, cap, needed=1)


@mutant("overlapped", "too-many-bytes")
def every_bucket_sent_again_in_finish(module, cap):
    _same_start(module)
    right, buckets = _overlapped(module, cap), _made(module, cap)

    def finish():
        right()
        for bucket in buckets:
            _reduce(bucket)

    return finish


@mutant("overlapped", "other-calls")
def overlapped_gather(module, cap):
    def start(bucket):
        flat = _flat(bucket)
        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        request = dist.all_gather(parts, flat, async_op=True)

        def end():
            request.wait()
            _write(bucket, sum(parts) / len(parts))

        return end

    return _overlapped(module, cap, start=start)


@mutant("overlapped", "one-per-parameter")
def one_overlapped_all_reduce_for_each_parameter(module, cap):
    return _overlapped(module, 1)


@mutant("overlapped", "too-many-messages")
def smaller_overlapped_buckets_than_allowed(module, cap):
    return _overlapped(module, 340 if cap == 700 else cap)


@mutant("overlapped", "too-large")
def one_overlapped_bucket(module, cap):
    return _overlapped(module, 10**9)


@mutant("overlapped", "after-backward")
def bucketed_without_hooks(module, cap):
    return _bucketed(module, cap)


@mutant("overlapped", "after-backward")
def last_bucket_left_for_finish(module, cap):
    _same_start(module)
    buckets, arrived, ends = _made(module, cap), set(), []

    def arrive(p):
        arrived.add(p)
        while len(ends) < len(buckets) - 1 and arrived.issuperset(buckets[len(ends)]):
            ends.append(_start(buckets[len(ends)]))

    def finish():
        ends.extend(_start(bucket) for bucket in buckets[len(ends) :])
        for end in ends:
            end()
        ends.clear()
        arrived.clear()

    for p in _trained(module):
        p.register_post_accumulate_grad_hook(arrive)
    return finish


@mutant("overlapped", "starts-late")
def all_start_with_the_last_gradient(module, cap):
    _same_start(module)
    buckets, arrived, ends = _made(module, cap), set(), []

    def arrive(p):
        arrived.add(p)
        if len(arrived) == sum(map(len, buckets)):
            ends.extend(_start(bucket) for bucket in buckets)

    def finish():
        ends.extend(_start(bucket) for bucket in buckets[len(ends) :])
        for end in ends:
            end()
        ends.clear()
        arrived.clear()

    for p in _trained(module):
        p.register_post_accumulate_grad_hook(arrive)
    return finish


@mutant("overlapped", "starts-late")
def buckets_in_forward_order(module, cap):
    return _overlapped(module, cap, order=1)


@mutant("overlapped", "waits-in-hook")
def blocking_all_reduce_in_the_hook(module, cap):
    def start(bucket):
        _reduce(bucket)
        return lambda: None

    return _overlapped(module, cap, start=start)


@mutant("overlapped", "waits-in-hook")
def waits_at_once_for_an_asynchronous_one(module, cap):
    def start(bucket):
        flat = _flat(bucket)
        dist.all_reduce(flat, async_op=True).wait()
        return lambda: _write(bucket, flat / dist.get_world_size())

    return _overlapped(module, cap, start=start)


# ------------------------------------------------------------------------------------------------ accumulation


def _accumulated(model, batches, scale, held=True, last=True):
    for i, (x, y) in enumerate(batches):
        model.require_backward_grad_sync = not held or (last and i == len(batches) - 1)
        (F.mse_loss(model(x), y) * scale(x)).backward()
    model.require_backward_grad_sync = True


def _share(batches):
    return lambda x: len(x) / sum(len(x) for x, _ in batches)


@mutant("accumulate", "every-micro-batch")
def all_reduce_at_every_micro_batch(model, batches):
    _accumulated(model, batches, _share(batches), held=False)


@mutant("accumulate", "forward-outside")
def forward_outside_no_sync(model, batches):
    share = _share(batches)
    for x, y in batches[:-1]:
        loss = F.mse_loss(model(x), y) * share(x)
        with model.no_sync():
            loss.backward()
    x, y = batches[-1]
    (F.mse_loss(model(x), y) * share(x)).backward()


@mutant("accumulate", "never")
def all_inside_no_sync(model, batches):
    with model.no_sync():
        for x, y in batches:
            (F.mse_loss(model(x), y) * _share(batches)(x)).backward()


@mutant("accumulate", "never")
def past_ddp_without_averaging(model, batches):
    for x, y in batches:
        (F.mse_loss(model.module(x), y) / len(batches)).backward()


@mutant("accumulate", "not-scaled")
def losses_not_scaled(model, batches):
    _accumulated(model, batches, lambda x: 1)


@mutant("accumulate", "mean-of-means")
def every_micro_batch_weighs_the_same(model, batches):
    _accumulated(model, batches, lambda x: 1 / len(batches))


@mutant("accumulate", "divided-twice")
def divided_by_the_ranks_once_more(model, batches):
    share = _share(batches)
    _accumulated(model, batches, lambda x: share(x) / dist.get_world_size())


@mutant("accumulate", "one-batch")
def all_micro_batches_at_once(model, batches):
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    F.mse_loss(model(x), y).backward()


@mutant("accumulate", "only-last")
def gradients_cleared_in_between(model, batches):
    for i, (x, y) in enumerate(batches):
        model.zero_grad()
        model.require_backward_grad_sync = i == len(batches) - 1
        (F.mse_loss(model(x), y) * _share(batches)(x)).backward()
    model.require_backward_grad_sync = True


@mutant("accumulate", "one-micro-batch")
def last_two_taken_for_granted(model, batches):
    share = _share(batches)
    with model.no_sync():
        for x, y in [*batches[:-2], batches[-2]]:
            (F.mse_loss(model(x), y) * share(x)).backward()
    x, y = batches[-1]
    (F.mse_loss(model(x), y) * share(x)).backward()


@mutant("accumulate", "too-many-bytes")
def averaged_once_more(model, batches):
    _accumulated(model, batches, _share(batches))
    p = next(model.parameters())
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


@mutant("accumulate", "every-micro-batch")
def averaged_once_more_in_full(model, batches):
    _accumulated(model, batches, _share(batches))
    for _ in batches[1:]:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


# ------------------------------------------------------------------------------------------------ sampler


def _order(samples, seed):
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()


def _fit(left, source, ranks):
    missing = -len(left) % ranks
    return left + (source * (missing + 1))[:missing]


@mutant("epoch_indices", "list")
def a_tensor(samples, ranks, rank, epoch, seed, done=0):
    order = _order(samples, seed + epoch)
    return torch.tensor(_fit(order[done:], order, ranks)[rank::ranks])


@mutant("epoch_indices", "no-padding")
def no_padding(samples, ranks, rank, epoch, seed, done=0):
    return _order(samples, seed + epoch)[done:][rank::ranks]


@mutant("epoch_indices", "cut")
def rest_cut_off(samples, ranks, rank, epoch, seed, done=0):
    left = _order(samples, seed + epoch)[done:]
    return left[: len(left) // ranks * ranks][rank::ranks]


@mutant("epoch_indices", "padding")
def padded_with_the_last_sample(samples, ranks, rank, epoch, seed, done=0):
    left = _order(samples, seed + epoch)[done:]
    return (left + left[-1:] * (-len(left) % ranks))[rank::ranks]


@mutant("epoch_indices", "short")
def padded_only_once(samples, ranks, rank, epoch, seed, done=0):
    order = _order(samples, seed + epoch)
    left = order[done:]
    return (left + order[: -len(left) % ranks])[rank::ranks]


@mutant("epoch_indices", "overlap")
def same_samples_on_all_ranks(samples, ranks, rank, epoch, seed, done=0):
    return _order(samples, seed + epoch)[done:]


@mutant("epoch_indices", "blocks")
def one_block_for_each_rank(samples, ranks, rank, epoch, seed, done=0):
    order = _order(samples, seed + epoch)
    left = _fit(order[done:], order, ranks)
    length = len(left) // ranks
    return left[rank * length : (rank + 1) * length]


@mutant("epoch_indices", "no-shuffle")
def without_shuffling(samples, ranks, rank, epoch, seed, done=0):
    order = list(range(samples))
    return _fit(order[done:], order, ranks)[rank::ranks]


@mutant("epoch_indices", "no-epoch")
def same_order_in_every_epoch(samples, ranks, rank, epoch, seed, done=0):
    order = _order(samples, seed)
    return _fit(order[done:], order, ranks)[rank::ranks]


@mutant("epoch_indices", "no-seed")
def seed_not_used(samples, ranks, rank, epoch, seed, done=0):
    order = _order(samples, epoch)
    return _fit(order[done:], order, ranks)[rank::ranks]


@mutant("epoch_indices", "rank-seed")
def each_rank_shuffles_for_itself(samples, ranks, rank, epoch, seed, done=0):
    order = _order(samples, seed + epoch + rank)
    return _fit(order[done:], order, ranks)[rank::ranks]


@mutant("epoch_indices", "global-generator")
def global_generator_seeded(samples, ranks, rank, epoch, seed, done=0):
    torch.manual_seed(seed + epoch)
    order = torch.randperm(samples).tolist()
    return _fit(order[done:], order, ranks)[rank::ranks]


@mutant("epoch_indices", "not-resumed")
def epoch_begins_again(samples, ranks, rank, epoch, seed, done=0):
    order = _order(samples, seed + epoch)
    return _fit(order, order, ranks)[rank::ranks]


@mutant("epoch_indices", "per-rank")
def cuts_its_own_share(samples, ranks, rank, epoch, seed, done=0):
    order = _order(samples, seed + epoch)
    return _fit(order, order, ranks)[rank::ranks][done:]


@mutant("epoch_indices", "per-rank")
def cuts_its_own_share_by_its_part(samples, ranks, rank, epoch, seed, done=0):
    order = _order(samples, seed + epoch)
    return _fit(order, order, ranks)[rank::ranks][done // ranks :]


@mutant("epoch_indices", "shuffled-again")
def rest_shuffled_anew(samples, ranks, rank, epoch, seed, done=0):
    left = list(range(samples))[done:]
    left = [left[i] for i in _order(len(left), seed + epoch)]
    return _fit(left, left, ranks)[rank::ranks]


@mutant("epoch_indices", "resumed-uneven")
def whole_epoch_padded_then_cut(samples, ranks, rank, epoch, seed, done=0):
    order = _order(samples, seed + epoch)
    return _fit(order, order, ranks)[done:][rank::ranks]


@mutant("epoch_indices", "resumed-padding")
def padded_from_the_rest(samples, ranks, rank, epoch, seed, done=0):
    left = _order(samples, seed + epoch)[done:]
    return _fit(left, left, ranks)[rank::ranks] if left else []


@mutant("epoch_indices", "error")
def takes_from_an_empty_list(samples, ranks, rank, epoch, seed, done=0):
    order = _order(samples, seed + epoch)
    left = _fit(order[done:], order, ranks)
    return [left[-1]] * 0 + left[rank::ranks]


# ------------------------------------------------------------------------------------------------ uneven inputs


def _steps(batches, op=dist.ReduceOp.MAX):
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=op)
    return int(steps)


def _sums(module, batches, step, clear=True):
    """Gradient of the sum of the losses, and the number of samples."""
    if clear:
        module.zero_grad()
    samples = 0
    if step < len(batches):
        x, y = batches[step]
        samples = len(x)
        (samples * F.mse_loss(module(x), y)).backward()
    _fill(module.parameters())
    return samples


def _together(module, samples, divide=True):
    parameters = list(module.parameters())
    flat = torch.cat([_flat(parameters), parameters[0].new_tensor([samples])])
    dist.all_reduce(flat)
    _write(parameters, flat[:-1] / (flat[-1] if divide else 1))


@mutant("uneven_epoch", "not-distributed")
def each_rank_for_itself(module, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        optimizer.step()


@mutant("uneven_epoch", "hang", hangs=True)
def one_all_reduce_for_each_own_batch(module, optimizer, batches):
    for step in range(len(batches)):
        _together(module, _sums(module, batches, step))
        optimizer.step()


@mutant("uneven_epoch", "mean-of-means")
def mean_of_the_gradients(module, optimizer, batches):
    for step in range(_steps(batches)):
        module.zero_grad()
        present = step < len(batches)
        if present:
            x, y = batches[step]
            F.mse_loss(module(x), y).backward()
        _together(module, int(present))
        optimizer.step()


@mutant("uneven_epoch", "divided-by-all")
def mean_over_all_ranks(module, optimizer, batches):
    for step in range(_steps(batches)):
        module.zero_grad()
        if step < len(batches):
            x, y = batches[step]
            F.mse_loss(module(x), y).backward()
        _fill(module.parameters())
        for p in module.parameters():
            _mean(p)
        optimizer.step()


@mutant("uneven_epoch", "sum")
def sum_of_the_gradients(module, optimizer, batches):
    for step in range(_steps(batches)):
        module.zero_grad()
        if step < len(batches):
            x, y = batches[step]
            F.mse_loss(module(x), y).backward()
        _together(module, 1, divide=False)
        optimizer.step()


@mutant("uneven_epoch", "sum")
def sum_over_the_samples(module, optimizer, batches):
    for step in range(_steps(batches)):
        _together(module, _sums(module, batches, step), divide=False)
        optimizer.step()


@mutant("uneven_epoch", "stops-early")
def as_many_steps_as_the_shortest(module, optimizer, batches):
    for step in range(_steps(batches, dist.ReduceOp.MIN)):
        _together(module, _sums(module, batches, step))
        optimizer.step()


@mutant("uneven_epoch", "no-samples")
def one_step_too_many(module, optimizer, batches):
    for step in range(_steps(batches) + 1):
        _together(module, _sums(module, batches, step))
        optimizer.step()


@mutant("uneven_epoch", "ranks-differ")
def no_step_without_a_batch(module, optimizer, batches):
    for step in range(_steps(batches)):
        _together(module, _sums(module, batches, step))
        if step < len(batches):
            optimizer.step()


@mutant("uneven_epoch", "leftover")
def gradients_never_cleared(module, optimizer, batches):
    for step in range(_steps(batches)):
        _together(module, _sums(module, batches, step, clear=False))
        optimizer.step()


@mutant("uneven_epoch", "leftover")
def gradients_cleared_only_with_a_batch(module, optimizer, batches):
    for step in range(_steps(batches)):
        _together(module, _sums(module, batches, step, clear=step < len(batches)))
        optimizer.step()


@mutant("uneven_epoch", "too-many-bytes")
def one_step_more_to_find_the_end(module, optimizer, batches):
    step, going = 0, True
    while going:
        samples = _sums(module, batches, step)
        parameters = list(module.parameters())
        flat = torch.cat([_flat(parameters), parameters[0].new_tensor([samples])])
        dist.all_reduce(flat)
        going = bool(flat[-1] > 0)
        if going:
            _write(parameters, flat[:-1] / flat[-1])
            optimizer.step()
        step += 1


@mutant("uneven_epoch", "gathers-everything")
def all_batches_to_all_ranks(module, optimizer, batches):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, batches)
    for step in range(max(map(len, everyone))):
        there = [own[step] for own in everyone if step < len(own)]
        x, y = (torch.cat(parts) for parts in zip(*there, strict=True))
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        optimizer.step()
