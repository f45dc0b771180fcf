"""Usual wrong answers to the exercises on ZeRO, each with the hint that it must be given."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercise_cases import Mutant, register_of
from torch import nn

MUTANTS: list[Mutant] = []
mutant = register_of(MUTANTS)

# ------------------------------------------------------------------------------------------------ bytes on paper


def _states(
    parameters, stage, ranks, precision, optimizer, cut=lambda stage: (stage > 2, stage > 1, stage > 0), share=None,
    gradient=None, master=None, states=None, state=4,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    p, g, o = (parameters / 1e9 * ((share or (lambda n: 1 / n))(ranks) if c else 1) for c in cut(stage))
    master = (0 if precision == "fp32" else 4) if master is None else master
    gradient = gradient or (2 if precision == "mixed" else 4)
    states = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer] if states is None else states
    return p * (4 if precision == "fp32" else 2), g * gradient, o * (master + state * states)


@mutant("state_bytes", "everything")
def stage_divides_everything(*case):
    return _states(*case, cut=lambda stage: [stage > 0] * 3)


@mutant("state_bytes", "stage-ignored")
def no_stage(*case):
    return _states(*case, cut=lambda stage: [False] * 3)


@mutant("state_bytes", "not-cumulative")
def each_stage_divides_one_part(*case):
    return _states(*case, cut=lambda stage: (stage == 3, stage == 2, stage == 1))


@mutant("state_bytes", "stage-order")
def parameters_first(*case):
    return _states(*case, cut=lambda stage: (stage > 0, stage > 1, stage > 2))


@mutant("state_bytes", "stage-order")
def gradients_first(*case):
    return _states(*case, cut=lambda stage: (stage > 2, stage > 0, stage > 1))


@mutant("state_bytes", "limits")
def what_is_divided_vanishes(*case):
    return _states(*case, share=lambda n: 0)


@mutant("state_bytes", "limits")
def four_and_eight_times_less(parameters, stage, ranks, precision, optimizer):
    factor = (1, 4, 8, ranks)[stage]
    return [x / factor for x in _states(parameters, 0, ranks, precision, optimizer)]


@mutant("state_bytes", "no-master")
def master_weights_forgotten(*case):
    return _states(*case, master=0)


@mutant("state_bytes", "master-whole")
def master_weights_on_every_rank(parameters, stage, ranks, precision, optimizer):
    p, g, o = _states(parameters, stage, ranks, precision, optimizer, master=0)
    return p, g, o + (0 if precision == "fp32" else 4) * parameters / 1e9


@mutant("state_bytes", "master-place")
def master_weights_with_the_parameters(parameters, stage, ranks, precision, optimizer):
    _, g, o = _states(parameters, stage, ranks, precision, optimizer, master=0)
    return (4 if precision == "fp32" else 6) * parameters / 1e9 / (ranks if stage == 3 else 1), g, o


@mutant("state_bytes", "master-in-fp32")
def master_weights_always(*case):
    return _states(*case, master=4)


@mutant("state_bytes", "gradients-half")
def fp32_gradients_forgotten(parameters, stage, ranks, precision, optimizer):
    return _states(parameters, stage, ranks, precision, optimizer, gradient=4 if precision == "fp32" else 2)


@mutant("state_bytes", "gradients-fp32")
def fp32_gradients_always(*case):
    return _states(*case, gradient=4)


@mutant("state_bytes", "states-half")
def states_in_bf16(parameters, stage, ranks, precision, optimizer):
    return _states(parameters, stage, ranks, precision, optimizer, state=4 if precision == "fp32" else 2)


@mutant("state_bytes", "one-state")
def adam_with_one_state(parameters, stage, ranks, precision, optimizer):
    return _states(parameters, stage, ranks, precision, optimizer, states=int(optimizer != "sgd"))


@mutant("state_bytes", "optimizer-ignored")
def always_adam(*case):
    return _states(*case, states=2)


@mutant("state_bytes", "bytes")
def bytes_for_gb(*case):
    return [1e9 * x for x in _states(*case)]


@mutant("state_bytes", "gib")
def gib_for_gb(*case):
    return [1e9 * x / 2**30 for x in _states(*case)]


@mutant("state_bytes", "number")
def only_the_sum(*case):
    return sum(_states(*case))


@mutant("state_bytes", "typed")
def typed_figures(*case):
    return 30, 30, 60 / 64


# ------------------------------------------------------------------------------------------------ ZeRO-1


def _broadcast(module):
    for p in module.parameters():
        dist.broadcast(p.detach(), src=0)


def _trained(module):
    return [p for p in module.parameters() if p.requires_grad]


def _flat(tensors, length):
    flat = torch.cat([t.detach().flatten() for t in tensors])
    return F.pad(flat, (0, length - flat.numel()))


def _gathered(part):
    flat = part.new_empty(dist.get_world_size() * part.numel())
    dist.all_gather_single(flat, part.detach())
    return flat


def _write(flat, tensors):
    start = 0
    for p in tensors:
        p.detach().copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()


def _shard(
    module, make_optimizer, start=_broadcast, trained=_trained, up=True, own=torch.clone, cast=lambda t: t,
    gather=_gathered, write=_write, scale=lambda n: 1, extra=0,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    rank, n = dist.get_rank(), dist.get_world_size()
    start(module)
    parameters = trained(module)
    numel = sum(p.numel() for p in parameters)
    size = (-(-numel // n) if up else numel // n) + extra

    def cut(tensors):
        flat = _flat(tensors, n * size) if up else torch.cat([t.detach().flatten() for t in tensors])
        return own(cast(flat)[rank * size : (rank + 1) * size])

    part = nn.Parameter(cut(parameters))
    optimizer = make_optimizer([part])

    def step():
        part.grad = cut([p.grad for p in parameters]) * scale(n)
        optimizer.step()
        write(gather(part), parameters)

    return step


@mutant("shard_optimizer", "all-states")
def optimizer_state_on_every_rank(module, make_optimizer):
    _broadcast(module)
    optimizer = make_optimizer(_trained(module))

    def step():
        optimizer.step()
        n, rank = dist.get_world_size(), dist.get_rank()
        numel = sum(p.numel() for p in _trained(module))
        flat = _flat(_trained(module), n * -(-numel // n))
        _write(_gathered(flat.chunk(n)[rank].clone()), _trained(module))

    return step


@mutant("shard_optimizer", "all-states")
def no_step_is_cut_at_all(module, make_optimizer):
    _broadcast(module)
    return make_optimizer(_trained(module)).step


@mutant("shard_optimizer", "whole-parameters")
def whole_parameters_dealt_out(module, make_optimizer):
    _broadcast(module)
    n, rank = dist.get_world_size(), dist.get_rank()
    trained = _trained(module)
    optimizer = make_optimizer(trained[rank::n])

    def step():
        optimizer.step()
        for i, p in enumerate(trained):
            dist.broadcast(p.detach(), src=i % n)

    return step


@mutant("shard_optimizer", "not-distributed")
def nothing_sent(module, make_optimizer):
    return _shard(module, make_optimizer, start=lambda _: None, write=lambda *_: None, gather=lambda part: part)


@mutant("shard_optimizer", "no-broadcast")
def no_initial_broadcast(module, make_optimizer):
    return _shard(module, make_optimizer, start=lambda _: None)


@mutant("shard_optimizer", "no-broadcast")
def only_trained_parameters_broadcast(module, make_optimizer):
    def start(module):
        for p in _trained(module):
            dist.broadcast(p.detach(), src=0)

    return _shard(module, make_optimizer, start=start)


@mutant("shard_optimizer", "replaced")
def new_parameters_in_place_of_old_ones(module, make_optimizer):
    def write(flat, parameters):
        _write(flat, parameters)
        for layer in module.modules():
            for name, p in list(layer.named_parameters(recurse=False)):
                setattr(layer, name, nn.Parameter(p.detach().clone(), p.requires_grad))

    return _shard(module, make_optimizer, write=write)


@mutant("shard_optimizer", "step")
def steps_at_once(module, make_optimizer):
    _shard(module, make_optimizer)


@mutant("shard_optimizer", "make-optimizer")
def own_descent(module, make_optimizer):
    class Descent:
        def __init__(self, parameters):
            self.parameters = parameters

        def step(self):
            for p in self.parameters:
                p.detach().sub_(0.2 * p.grad)

    return _shard(module, Descent)


@mutant("shard_optimizer", "make-optimizer")
def one_optimizer_for_each_rank(module, make_optimizer):
    def all_of_them(parameters):
        return [make_optimizer([p.detach().clone().requires_grad_() for p in parameters]) for _ in range(2)][0]

    return _shard(module, all_of_them)


@mutant("shard_optimizer", "new-optimizer")
def new_optimizer_in_each_step(module, make_optimizer):
    steps = [_shard(module, make_optimizer)]

    def step():
        (steps.pop() if steps else _shard(module, make_optimizer))()

    return step


@mutant("shard_optimizer", "not-updated")
def gradient_not_handed_to_the_part(module, make_optimizer):
    _broadcast(module)
    n, rank = dist.get_world_size(), dist.get_rank()
    trained = _trained(module)
    size = -(-sum(p.numel() for p in trained) // n)
    part = nn.Parameter(_flat(trained, n * size)[rank * size : (rank + 1) * size].clone())
    optimizer = make_optimizer([part])

    def step():
        optimizer.step()
        _write(_gathered(part), trained)

    return step


@mutant("shard_optimizer", "not-gathered")
def own_part_updated_and_not_gathered(module, make_optimizer):
    def gather(part):
        n, rank = dist.get_world_size(), dist.get_rank()
        flat = _flat(_trained(module), n * len(part))
        flat[rank * len(part) : (rank + 1) * len(part)] = part.detach()
        return flat

    return _shard(module, make_optimizer, gather=gather)


@mutant("shard_optimizer", "not-gathered")
def gathers_old_weights(module, make_optimizer):
    def gather(part):
        n, rank = dist.get_world_size(), dist.get_rank()
        before = _flat(_trained(module), n * len(part))
        _gathered(part)
        before[rank * len(part) : (rank + 1) * len(part)] = part.detach()
        return before

    return _shard(module, make_optimizer, gather=gather)


@mutant("shard_optimizer", "order")
def parts_in_reverse_order(module, make_optimizer):
    def gather(part):
        return torch.cat(_gathered(part).chunk(dist.get_world_size())[::-1])

    return _shard(module, make_optimizer, gather=gather)


@mutant("shard_optimizer", "order")
def pieces_into_other_parameters(module, make_optimizer):
    return _shard(module, make_optimizer, write=lambda flat, parameters: _write(flat, parameters[::-1]))


@mutant("shard_optimizer", "averaged-again")
def mean_divided_once_more(module, make_optimizer):
    return _shard(module, make_optimizer, scale=lambda n: 1 / n)


@mutant("shard_optimizer", "averaged-again")
def means_added_up(module, make_optimizer):
    return _shard(module, make_optimizer, scale=lambda n: n)


@mutant("shard_optimizer", "whole-copy")
def part_is_a_view_of_the_whole(module, make_optimizer):
    return _shard(module, make_optimizer, own=lambda t: t)


@mutant("shard_optimizer", "other-calls")
def all_reduce_of_zeros_and_the_part(module, make_optimizer):
    def gather(part):
        flat = part.new_zeros(dist.get_world_size() * len(part))
        flat[dist.get_rank() * len(part) :][: len(part)] = part.detach()
        dist.all_reduce(flat)
        return flat

    return _shard(module, make_optimizer, gather=gather)


@mutant("shard_optimizer", "other-calls")
def broadcast_of_each_part(module, make_optimizer):
    def gather(part):
        parts = [
            part.detach() if r == dist.get_rank() else torch.empty_like(part) for r in range(dist.get_world_size())
        ]
        for r, piece in enumerate(parts):
            dist.broadcast(piece.detach(), src=r)
        return torch.cat(parts)

    return _shard(module, make_optimizer, gather=gather)


@mutant("shard_optimizer", "too-many-messages")
def gathered_in_two_halves(module, make_optimizer):
    def gather(part):
        halves = [_gathered(half.contiguous()).chunk(dist.get_world_size()) for half in part.tensor_split(2)]
        return torch.cat([piece for pair in zip(*halves, strict=True) for piece in pair])

    return _shard(module, make_optimizer, gather=gather)


@mutant("shard_optimizer", "too-many-bytes")
def gathers_the_gradient_too(module, make_optimizer):
    def gather(part):
        n = dist.get_world_size()
        both = _gathered(torch.cat([part.detach(), part.grad])).view(n, 2, -1)
        return both[:, 0].flatten()

    return _shard(module, make_optimizer, gather=gather)


@mutant("shard_optimizer", "uneven")
def rest_of_the_elements_dropped(module, make_optimizer):
    return _shard(module, make_optimizer, up=False)


@mutant("shard_optimizer", "uneven")
def whole_number_asserted(module, make_optimizer):
    assert sum(p.numel() for p in _trained(module)) % dist.get_world_size() == 0
    return _shard(module, make_optimizer)


@mutant("shard_optimizer", "uneven")
def last_part_is_shorter(module, make_optimizer):
    def own(part):
        n, rank = dist.get_world_size(), dist.get_rank()
        numel = sum(p.numel() for p in _trained(module))
        return part[: numel - rank * -(-numel // n)].clone()

    return _shard(module, make_optimizer, own=own)


@mutant("shard_optimizer", "frozen")
def frozen_parameters_joined_too(module, make_optimizer):
    return _shard(module, make_optimizer, trained=lambda module: list(module.parameters()))


@mutant("shard_optimizer", "frozen")
def frozen_parameters_with_zero_gradients(module, make_optimizer):
    step = _shard(module, make_optimizer, trained=lambda module: list(module.parameters()))

    def filled():
        for p in module.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        step()

    return filled


@mutant("shard_optimizer", "tied")
def tied_weight_joined_twice(module, make_optimizer):
    def trained(module):
        return [p for _, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]

    return _shard(module, make_optimizer, trained=trained)


@mutant("shard_optimizer", "leftover")
def gradients_add_up_in_the_part(module, make_optimizer):
    total = []

    def own(part):
        total.append(part.clone())
        return sum(total[1:]) if len(total) > 1 else part.clone()

    return _shard(module, make_optimizer, own=own)


@mutant("shard_optimizer", "float32")
def through_float32(module, make_optimizer):
    return _shard(module, make_optimizer, gather=lambda part: _gathered(part.detach().float()).double())


@mutant("shard_optimizer", "only-two-ranks")
def two_parts(module, make_optimizer):
    def gather(part):
        flat = _gathered(part)
        if dist.get_world_size() > 2:
            flat[2 * len(part) :] = 0
        return flat

    return _shard(module, make_optimizer, gather=gather)


@mutant("shard_optimizer", "hang", hangs=True)
def rank_0_steps_alone(module, make_optimizer):
    step = _shard(module, make_optimizer)
    return step if dist.get_rank() == 0 else dist.barrier


# ------------------------------------------------------------------------------------------------ ZeRO-2


def _scatter(flat):
    shard = flat.new_empty(len(flat) // dist.get_world_size())
    dist.reduce_scatter_single(shard, flat)
    return shard


def _reduce(
    module, trained=_trained, up=True, pad=0.0, scale=lambda n: 1 / n, scatter=_scatter, cast=lambda t: t,
    free=True, keep=lambda shard, flat: shard, add=True,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    n, shards = dist.get_world_size(), {}

    def arrive(p):
        size = -(-p.numel() // n) if up else p.numel() // n
        flat = p.grad.flatten()
        flat = F.pad(flat, (0, n * size - p.numel()), value=pad) if up else flat[: n * size].contiguous()
        flat = cast(flat) * scale(n)
        if free:
            p.grad = None
        shard = keep(scatter(flat).to(p.dtype), flat)
        shards[p] = shards[p] + shard if add and p in shards else shard

    for p in trained(module):
        p.register_post_accumulate_grad_hook(arrive)
    return shards


def _all_reduced(flat):
    dist.all_reduce(flat)
    return flat.chunk(dist.get_world_size())[dist.get_rank()].clone()


@mutant("reduce_scatter_gradients", "all-reduce")
def all_reduce_and_cut(module):
    return _reduce(module, scatter=_all_reduced)


@mutant("reduce_scatter_gradients", "other-calls")
def reduce_to_each_rank(module):
    def scatter(flat):
        parts = [part.clone() for part in flat.chunk(dist.get_world_size())]
        for r, part in enumerate(parts):
            dist.reduce(part, dst=r)
        return parts[dist.get_rank()]

    return _reduce(module, scatter=scatter)


@mutant("reduce_scatter_gradients", "other-calls")
def everything_gathered_and_added(module):
    def scatter(flat):
        n = dist.get_world_size()
        return _gathered(flat).view(n, n, -1)[:, dist.get_rank()].sum(0)

    return _reduce(module, scatter=scatter)


@mutant("reduce_scatter_gradients", "not-distributed")
def own_gradient_cut(module):
    return _reduce(module, scatter=lambda flat: flat.chunk(dist.get_world_size())[dist.get_rank()].clone())


@mutant("reduce_scatter_gradients", "own-gradient")
def sum_thrown_away(module):
    def scatter(flat):
        _scatter(flat)
        return flat.chunk(dist.get_world_size())[dist.get_rank()].clone()

    return _reduce(module, scatter=scatter)


@mutant("reduce_scatter_gradients", "shards")
def returns_nothing(module):
    _reduce(module)


@mutant("reduce_scatter_gradients", "shards")
def names_for_keys(module):
    shards, names = {}, {p: name for name, p in module.named_parameters()}
    inner = _reduce(module)

    def rename(p):
        shards[names[p]] = inner.pop(p)

    for p in _trained(module):
        p.register_post_accumulate_grad_hook(rename)
    return shards


@mutant("reduce_scatter_gradients", "sum")
def sum_instead_of_mean(module):
    return _reduce(module, scale=lambda n: 1)


@mutant("reduce_scatter_gradients", "divided-twice")
def divided_before_and_after(module):
    return _reduce(module, scale=lambda n: 1 / n**2)


@mutant("reduce_scatter_gradients", "wrong-part")
def parts_in_reverse_order_reduced(module):
    def scatter(flat):
        return _scatter(torch.cat(flat.chunk(dist.get_world_size())[::-1]))

    return _reduce(module, scatter=scatter)


@mutant("reduce_scatter_gradients", "wrong-part")
def every_nth_element(module):
    return _reduce(module, scatter=lambda flat: _scatter(flat.view(-1, dist.get_world_size()).T.flatten()))


@mutant("reduce_scatter_gradients", "whole")
def whole_mean_kept(module):
    def scatter(flat):
        dist.all_reduce(flat)
        return flat

    return _reduce(module, scatter=scatter)


@mutant("reduce_scatter_gradients", "padding")
def filled_up_with_ones(module):
    return _reduce(module, pad=1.0)


@mutant("reduce_scatter_gradients", "grads-kept")
def gradients_of_other_ranks_parts_kept(module):
    return _reduce(module, free=False)


@mutant("reduce_scatter_gradients", "grads-kept")
def gradients_set_to_zero(module):
    shards = _reduce(module, free=False)

    def clear(p):
        p.grad.zero_()

    for p in _trained(module):
        p.register_post_accumulate_grad_hook(clear)
    return shards


@mutant("reduce_scatter_gradients", "freed-late")
def all_at_the_end_of_backward(module):
    shards, waiting, trained = {}, [], _trained(module)
    n = dist.get_world_size()

    def arrive(p):
        waiting.append(p)
        if len(waiting) == len(trained):
            for q in waiting:
                size = -(-q.numel() // n)
                shard = _scatter(F.pad(q.grad.flatten(), (0, n * size - q.numel())) / n)
                shards[q] = shards[q] + shard if q in shards else shard
                q.grad = None
            waiting.clear()

    for p in trained:
        p.register_post_accumulate_grad_hook(arrive)
    return shards


@mutant("reduce_scatter_gradients", "view")
def part_written_into_the_whole(module):
    def keep(shard, flat):
        part = flat.chunk(dist.get_world_size())[dist.get_rank()]
        return part.copy_(shard)

    return _reduce(module, keep=keep)


@mutant("reduce_scatter_gradients", "accumulate")
def later_pass_replaces_the_earlier(module):
    return _reduce(module, add=False)


@mutant("reduce_scatter_gradients", "accumulate")
def mean_over_the_passes(module):
    shards = _reduce(module)
    seen = {}

    def average(p):
        seen[p] = seen.get(p, 0) + 1 if len(shards) > 1 or p in seen else 1
        if seen[p] == 4:
            shards[p] = shards[p] / 2

    for p in _trained(module):
        p.register_post_accumulate_grad_hook(average)
    return shards


@mutant("reduce_scatter_gradients", "leftover")
def totals_that_are_never_cleared(module):
    shards, totals = _reduce(module), {}

    def total(p):
        totals[p] = shards[p] = totals.get(p, 0) + shards[p]

    for p in _trained(module):
        p.register_post_accumulate_grad_hook(total)
    return shards


@mutant("reduce_scatter_gradients", "uneven")
def end_of_the_gradient_dropped(module):
    return _reduce(module, up=False)


@mutant("reduce_scatter_gradients", "uneven")
def list_of_uneven_chunks(module):
    def scatter(flat):
        parts = list(flat.chunk(dist.get_world_size()))
        shard = torch.empty_like(parts[dist.get_rank()])
        dist.reduce_scatter(shard, parts)
        return shard

    n, shards = dist.get_world_size(), {}

    def arrive(p):
        assert p.numel() % n == 0, "input tensor must be divisible by the number of ranks"
        flat, p.grad = p.grad.flatten() / n, None
        shard = scatter(flat)
        shards[p] = shards[p] + shard if p in shards else shard

    for p in _trained(module):
        p.register_post_accumulate_grad_hook(arrive)
    return shards


@mutant("reduce_scatter_gradients", "frozen")
def hook_on_frozen_parameters(module):
    return _reduce(module, trained=lambda module: list(module.parameters()))


@mutant("reduce_scatter_gradients", "tied")
def hook_twice_on_a_tied_weight(module):
    def trained(module):
        return [p for _, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]

    return _reduce(module, trained=trained)


@mutant("reduce_scatter_gradients", "float32")
def reduced_in_float32(module):
    return _reduce(module, cast=lambda flat: flat.float())


@mutant("reduce_scatter_gradients", "too-many-bytes")
def reduced_twice(module):
    def scatter(flat):
        _scatter(flat)
        return _scatter(flat)

    return _reduce(module, scatter=scatter)


@mutant("reduce_scatter_gradients", "only-two-ranks")
def always_half(module):
    return _reduce(module, scale=lambda n: 1 / min(n, 2))


@mutant("reduce_scatter_gradients", "hang", hangs=True)
def only_rank_0_reduces(module):
    return _reduce(module) if dist.get_rank() == 0 else _reduce(module, scatter=lambda flat: dist.barrier())


# ------------------------------------------------------------------------------------------------ ZeRO-3


def _weight(shard, shape, flat=_gathered):
    return flat(shard)[: math.prod(shape)].view(shape)


def _layer(
    x, shard, shape, weight=_weight, again=_weight, scatter=_scatter, scale=lambda n: 1 / n, save="x", dw=None,
    pad=True, needs=True, cast=lambda t: t, dx=lambda dx: dx, keep=lambda t: None,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, shard):
            w = weight(shard, shape)
            ctx.save_for_backward(x, shard, w if save == "weight" else None)
            return x @ w.T

        @staticmethod
        def backward(ctx, dy):
            x, shard, w = ctx.saved_tensors
            w = again(shard, shape) if w is None else w
            part = None
            if ctx.needs_input_grad[1] or not needs:
                n = dist.get_world_size()
                gradient = dw(dy, x) if dw else dy.flatten(0, -2).T @ x.flatten(0, -2)
                flat = cast(gradient.flatten()) * scale(n)
                flat = F.pad(flat, (0, n * len(shard) - len(flat))) if pad else flat
                part = scatter(flat).to(x.dtype)
                keep(flat)
            return dx(dy @ w), part

    return Layer.apply(x, shard)


@mutant("gathered_layer", "weight-kept")
def weight_saved_for_backward(x, shard, shape):
    return _layer(x, shard, shape, save="weight")


_KEPT: list = []


@mutant("gathered_layer", "weight-kept")
def parameters_never_freed(x, shard, shape):
    def weight(shard, shape):
        _KEPT.append(_weight(shard, shape))
        return _KEPT[-1]

    return _layer(x, shard, shape, weight=weight)


@mutant("gathered_layer", "gradient-kept")
def gradients_never_freed(x, shard, shape):
    return _layer(x, shard, shape, keep=_KEPT.append)


@mutant("gathered_layer", "gradient-kept")
def gradient_is_a_view_of_the_whole(x, shard, shape):
    def scatter(flat):
        return flat.chunk(dist.get_world_size())[dist.get_rank()].copy_(_scatter(flat))

    return _layer(x, shard, shape, scatter=scatter)


@mutant("gathered_layer", "no-gradient")
def left_to_autograd(x, shard, shape):
    return x @ _weight(shard, shape).T


@mutant("gathered_layer", "not-distributed")
def own_part_only(x, shard, shape):
    def flat(shard):
        rank, n = dist.get_rank(), dist.get_world_size()
        return F.pad(shard.detach(), (rank * len(shard), (n - 1 - rank) * len(shard)))

    return x @ _weight(shard, shape, flat).T


@mutant("gathered_layer", "not-gathered-again")
def own_part_in_backward(x, shard, shape):
    def flat(shard):
        rank, n = dist.get_rank(), dist.get_world_size()
        return F.pad(shard.detach(), (rank * len(shard), (n - 1 - rank) * len(shard)))

    return _layer(x, shard, shape, again=lambda shard, shape: _weight(shard, shape, flat))


@mutant("gathered_layer", "input-gradient")
def no_gradient_of_x(x, shard, shape):
    return _layer(x, shard, shape, dx=lambda dx: None)


@mutant("gathered_layer", "input-gradient")
def gradient_of_x_divided(x, shard, shape):
    return _layer(x, shard, shape, dx=lambda dx: dx / dist.get_world_size())


@mutant("gathered_layer", "order")
def gathered_in_reverse_order(x, shard, shape):
    def weight(shard, shape):
        return _weight(shard, shape, lambda shard: torch.cat(_gathered(shard).chunk(dist.get_world_size())[::-1]))

    return _layer(x, shard, shape, weight=weight, again=weight)


@mutant("gathered_layer", "order")
def parts_interleaved(x, shard, shape):
    def weight(shard, shape):
        return _weight(shard, shape, lambda shard: _gathered(shard).view(dist.get_world_size(), -1).T.flatten())

    return _layer(x, shard, shape, weight=weight, again=weight)


@mutant("gathered_layer", "transposed")
def shape_turned_round(x, shard, shape):
    def weight(shard, shape):
        return _weight(shard, shape[::-1]).T

    return _layer(x, shard, shape, weight=weight, again=weight)


@mutant("gathered_layer", "sum")
def gradients_summed(x, shard, shape):
    return _layer(x, shard, shape, scale=lambda n: 1)


@mutant("gathered_layer", "divided-twice")
def gradients_divided_twice(x, shard, shape):
    return _layer(x, shard, shape, scale=lambda n: 1 / n**2)


@mutant("gathered_layer", "own-gradient")
def own_gradient_not_reduced(x, shard, shape):
    def scatter(flat):
        return flat.chunk(dist.get_world_size())[dist.get_rank()].clone()

    return _layer(x, shard, shape, scatter=scatter)


@mutant("gathered_layer", "wrong-part")
def gradient_of_another_part(x, shard, shape):
    def scatter(flat):
        return _scatter(flat.view(dist.get_world_size(), -1).roll(1, 0).flatten())

    return _layer(x, shard, shape, scatter=scatter)


@mutant("gathered_layer", "all-reduce")
def all_reduce_in_backward(x, shard, shape):
    return _layer(x, shard, shape, scatter=_all_reduced)


@mutant("gathered_layer", "other-calls")
def weight_broadcast_part_by_part(x, shard, shape):
    def flat(shard):
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        parts[dist.get_rank()] = shard.detach().clone()
        for r, part in enumerate(parts):
            dist.broadcast(part.detach(), src=r)
        return torch.cat(parts)

    def weight(shard, shape):
        return _weight(shard, shape, flat).detach()

    return _layer(x, shard, shape, weight=weight, again=weight)


@mutant("gathered_layer", "too-many-bytes")
def gathered_twice_in_backward(x, shard, shape):
    def again(shard, shape):
        _gathered(shard)
        return _weight(shard, shape)

    return _layer(x, shard, shape, again=again)


@mutant("gathered_layer", "batch-dims")
def two_dimensions_only(x, shard, shape):
    return _layer(x, shard, shape, dw=lambda dy, x: dy.T @ x)


@mutant("gathered_layer", "batch-dims")
def first_of_the_batch_only(x, shard, shape):
    def dw(dy, x):
        return dy.T @ x if dy.dim() == 2 else dy[0].T @ x[0]

    return _layer(x, shard, shape, dw=dw)


@mutant("gathered_layer", "uneven")
def no_padding_of_the_gradient(x, shard, shape):
    return _layer(x, shard, shape, pad=False)


@mutant("gathered_layer", "uneven")
def padding_in_the_weight(x, shard, shape):
    def weight(shard, shape):
        return _gathered(shard).view(shape)

    return _layer(x, shard, shape, weight=weight, again=weight)


@mutant("gathered_layer", "frozen")
def gradient_of_a_frozen_weight(x, shard, shape):
    return _layer(x, shard, shape, needs=False)


@mutant("gathered_layer", "tied")
def gradient_put_in_place(x, shard, shape):
    def scatter(flat):
        shard.grad = _scatter(flat)
        return None

    class Nothing:
        def to(self, dtype):
            return None

    return _layer(x, shard, shape, scatter=lambda flat: scatter(flat) or Nothing())


@mutant("gathered_layer", "float32")
def gathered_in_float32(x, shard, shape):
    def weight(shard, shape):
        return _weight(shard, shape, lambda shard: _gathered(shard.detach().float()).double())

    return _layer(x, shard, shape, weight=weight, again=weight)


@mutant("gathered_layer", "only-two-ranks")
def half_of_the_sum(x, shard, shape):
    return _layer(x, shard, shape, scale=lambda n: 1 / min(n, 2))


@mutant("gathered_layer", "hang", hangs=True)
def rank_0_does_not_gather_again(x, shard, shape):
    def again(shard, shape):
        return _weight(shard, shape) if dist.get_rank() else shard.new_zeros(shape)

    return _layer(x, shard, shape, again=again, scatter=lambda flat: dist.barrier())


# ------------------------------------------------------------------------------------------------ what fits


def _largest(
    gpu, reserved, ranks, stage, width, vocabulary, cut=lambda stage: (stage > 2, stage > 1, stage > 0), share=None,
    free=lambda gpu, reserved, n: gpu - reserved, gathered=None, table=1, gb=1e9, finish=math.floor,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    layer, embedding = 12 * width**2, vocabulary * width
    share = 1 / ranks if share is None else share
    each = sum(size * (share if c else 1) for size, c in zip((2, 2, 12), cut(stage), strict=True))
    room = gathered(layer, embedding) if gathered else 4 * max(layer, embedding) * (stage == 3)
    fit = (free(gpu, reserved, ranks) * gb - room) / max(each, 1e-9) - table * embedding
    return finish(max(0, fit / layer))


@mutant("largest_model", "round")
def rounded_up(*case):
    return _largest(*case, finish=math.ceil)


@mutant("largest_model", "round")
def rounded_to_the_nearest(*case):
    return _largest(*case, finish=round)


@mutant("largest_model", "whole")
def part_of_a_layer(*case):
    return _largest(*case, finish=float)


@mutant("largest_model", "parameters")
def number_of_parameters(*case):
    *_, width, vocabulary = case
    return _largest(*case, finish=lambda layers: layers * 12 * width**2 + vocabulary * width)


@mutant("largest_model", "reserve-ignored")
def nothing_reserved(*case):
    return _largest(*case, free=lambda gpu, reserved, n: gpu)


@mutant("largest_model", "reserve-divided")
def reserve_divided_by_the_ranks(*case):
    return _largest(*case, free=lambda gpu, reserved, n: gpu - reserved / n)


@mutant("largest_model", "gib")
def gib_of_memory(*case):
    return _largest(*case, gb=2**30)


@mutant("largest_model", "no-table")
def layers_alone(*case):
    return _largest(*case, table=0)


@mutant("largest_model", "no-sharding")
def one_gpu_alone(*case):
    return _largest(*case, cut=lambda stage: [False] * 3)


@mutant("largest_model", "pooled")
def everything_divided_at_once(*case):
    return _largest(*case, cut=lambda stage: [True] * 3)


@mutant("largest_model", "pooled")
def memory_of_all_gpus_together(*case):
    return _largest(*case, free=lambda gpu, reserved, n: n * gpu - reserved, cut=lambda stage: [False] * 3)


@mutant("largest_model", "stage-0")
def optimizer_divided_at_every_stage(*case):
    return _largest(*case, cut=lambda stage: (stage > 2, stage > 1, True))


@mutant("largest_model", "limits")
def divided_parts_for_nothing(*case):
    return _largest(*case, share=0)


@mutant("largest_model", "not-cumulative")
def one_part_a_stage(*case):
    return _largest(*case, cut=lambda stage: (stage == 3, stage == 2, stage == 1))


@mutant("largest_model", "no-gathered")
def nothing_is_gathered(*case):
    return _largest(*case, gathered=lambda layer, embedding: 0)


@mutant("largest_model", "gathered-divided")
def gathered_unit_divided(*case):
    return _largest(*case, gathered=lambda *units: 4 * max(units) / case[2] * (case[3] == 3))


@mutant("largest_model", "gathered-always")
def gathers_at_every_stage(*case):
    return _largest(*case, gathered=lambda *units: 4 * max(units))


@mutant("largest_model", "no-gradient")
def parameters_of_the_unit_only(*case):
    return _largest(*case, gathered=lambda *units: 2 * max(units) * (case[3] == 3))


@mutant("largest_model", "largest-unit")
def layer_taken_for_the_largest_unit(*case):
    return _largest(*case, gathered=lambda layer, embedding: 4 * layer * (case[3] == 3))


@mutant("largest_model", "negative")
def fewer_than_no_layers(gpu, reserved, ranks, stage, width, vocabulary):
    layers = _largest(gpu, reserved, ranks, stage, width, vocabulary)
    if layers:
        return layers
    return math.floor(((gpu - reserved) * 1e9 / 16 - vocabulary * width) / (12 * width**2))


@mutant("largest_model", "typed")
def typed_number(*case):
    return 1147
