"""Usual wrong answers to the exercises on scaling, each with the hint that it must be given."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from exercise_cases import Mutant, register_of

MUTANTS: list[Mutant] = []
mutant = register_of(MUTANTS)

# ------------------------------------------------------------------------------------------------ top-k


def _gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def _keep(residual, total, indices, mean, gradient):
    residual.copy_(total.index_fill(0, indices, 0).view_as(residual))


def _top_k(gradient, residual, k, use=True, by=torch.abs, divide=True, add=True, keep=_keep, gather=_gather, extra=0):
    """The right way, with one thing that can be made wrong."""
    total = (gradient + residual if use else gradient.clone()).flatten()
    indices = by(total).topk(k).indices
    values = total[indices]
    sent = torch.cat([values, values.new_zeros(extra)]), torch.cat([indices, indices.new_zeros(extra)])
    all_values, all_indices = gather(sent[0]), gather(sent[1])
    all_values = all_values / (dist.get_world_size() if divide else 1)
    mean = torch.zeros_like(total)
    if add:
        mean.index_add_(0, all_indices, all_values)
    else:
        mean[all_indices] = all_values
    keep(residual, total, indices, mean, gradient.flatten())
    return mean.view_as(gradient)


@mutant("top_k_mean", "not-distributed")
def own_elements_only(gradient, residual, k):
    return _top_k(gradient, residual, k, gather=lambda x: x)


@mutant("top_k_mean", "values")
def largest_values_not_magnitudes(gradient, residual, k):
    return _top_k(gradient, residual, k, by=lambda x: x)


@mutant("top_k_mean", "sum")
def sum_not_mean(gradient, residual, k):
    return _top_k(gradient, residual, k, divide=False)


@mutant("top_k_mean", "overwritten")
def assigned_not_added(gradient, residual, k):
    return _top_k(gradient, residual, k, add=False)


@mutant("top_k_mean", "own-entries")
def gathers_and_returns_its_own(gradient, residual, k):
    def gather(x):
        return _gather(x).chunk(dist.get_world_size())[dist.get_rank()]

    return _top_k(gradient, residual, k, gather=gather)


@mutant("top_k_mean", "dense")
def sends_the_zeros_too(gradient, residual, k):
    total = (gradient + residual).flatten()
    indices = total.abs().topk(k).indices
    mean = torch.zeros_like(total)
    mean[indices] = total[indices] / dist.get_world_size()
    dist.all_reduce(mean)
    _keep(residual, total, indices, mean, gradient)
    return mean.view_as(gradient)


@mutant("top_k_mean", "object")
def pairs_through_pickle(gradient, residual, k):
    def gather(x):
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, x)
        return torch.cat(parts)

    return _top_k(gradient, residual, k, gather=gather)


@mutant("top_k_mean", "too-many-bytes")
def one_zero_more(gradient, residual, k):
    return _top_k(gradient, residual, k, extra=1)


@mutant("top_k_mean", "not-added")
def error_feedback_forgotten(gradient, residual, k):
    return _top_k(gradient, residual, k, use=False, keep=_keep)


@mutant("top_k_mean", "not-kept")
def residual_not_written(gradient, residual, k):
    return _top_k(gradient, residual, k, keep=lambda *_: None)


@mutant("top_k_mean", "not-kept")
def new_residual_under_the_old_name(gradient, residual, k):
    def keep(residual, total, indices, mean, gradient):
        residual = total.index_fill(0, indices, 0).view_as(residual)
        del residual

    return _top_k(gradient, residual, k, keep=keep)


@mutant("top_k_mean", "all-kept")
def sent_elements_kept_as_well(gradient, residual, k):
    return _top_k(gradient, residual, k, keep=lambda residual, total, *_: residual.copy_(total.view_as(residual)))


@mutant("top_k_mean", "mean-kept")
def mean_taken_off_the_residual(gradient, residual, k):
    def keep(residual, total, indices, mean, gradient):
        residual.copy_((total - mean).view_as(residual))

    return _top_k(gradient, residual, k, keep=keep)


@mutant("top_k_mean", "replaced")
def residual_of_this_step_only(gradient, residual, k):
    def keep(residual, total, indices, mean, gradient):
        sent = torch.zeros_like(total)
        sent[indices] = total[indices]
        residual.copy_((gradient - sent).view_as(residual))

    return _top_k(gradient, residual, k, keep=keep)


@mutant("top_k_mean", "float32")
def through_float32(gradient, residual, k):
    def gather(x):
        return _gather(x.float()).double() if x.is_floating_point() else _gather(x)

    return _top_k(gradient, residual, k, gather=gather)


@mutant("top_k_mean", "whole")
def threshold_above_the_element_behind(gradient, residual, k):
    total = (gradient + residual).flatten()
    threshold = total.abs().sort(descending=True).values[k]
    assert (total.abs() > threshold).sum() == k
    return _top_k(gradient, residual, k)


@mutant("top_k_mean", "input-changed")
def residual_added_in_place(gradient, residual, k):
    gradient += residual
    return _top_k(gradient, torch.zeros_like(residual), k, keep=lambda _, *rest: _keep(residual, *rest))


@mutant("top_k_mean", "shape")
def returns_a_flat_tensor(gradient, residual, k):
    return _top_k(gradient, residual, k).flatten()


@mutant("top_k_mean", "hang", hangs=True)
def rank_0_collects_and_keeps_it(gradient, residual, k):
    total = (gradient + residual).flatten()
    if dist.get_rank():
        dist.send(total[total.abs().topk(k).indices], dst=0)
        dist.barrier()
    return _top_k(gradient, residual, k)


# ------------------------------------------------------------------------------------------------ Amdahl


def _serial(t1, tn, n):
    return (tn / t1 - 1 / n) / (1 - 1 / n)


def _laws(s, ranks):
    return s, 1 / (s + (1 - s) / ranks), 1 / s, s + (1 - s) * ranks


@mutant("amdahl_and_gustafson", "percent")
def serial_in_percent(t1, tn, n, ranks):
    s, *others = _laws(_serial(t1, tn, n), ranks)
    return 100 * s, *others


@mutant("amdahl_and_gustafson", "parallel")
def parallel_fraction(t1, tn, n, ranks):
    s, *others = _laws(_serial(t1, tn, n), ranks)
    return 1 - s, *others


@mutant("amdahl_and_gustafson", "parallel")
def parallel_taken_for_serial_throughout(t1, tn, n, ranks):
    return _laws(1 - _serial(t1, tn, n), ranks)


@mutant("amdahl_and_gustafson", "efficiency")
def one_minus_efficiency(t1, tn, n, ranks):
    return _laws(1 - t1 / (n * tn), ranks)


@mutant("amdahl_and_gustafson", "ratio")
def ratio_of_the_times(t1, tn, n, ranks):
    return _laws(tn / t1, ranks)


@mutant("amdahl_and_gustafson", "same-law")
def amdahl_for_both(t1, tn, n, ranks):
    s, strong, limit, _ = _laws(_serial(t1, tn, n), ranks)
    return s, strong, limit, strong


@mutant("amdahl_and_gustafson", "swapped-parts")
def serial_part_multiplied(t1, tn, n, ranks):
    s, strong, limit, _ = _laws(_serial(t1, tn, n), ranks)
    return s, strong, limit, s * ranks + 1 - s


@mutant("amdahl_and_gustafson", "linear")
def weak_scaling_without_loss(t1, tn, n, ranks):
    s, strong, limit, _ = _laws(_serial(t1, tn, n), ranks)
    return s, strong, limit, ranks


@mutant("amdahl_and_gustafson", "limit")
def no_limit(t1, tn, n, ranks):
    s, strong, _, weak = _laws(_serial(t1, tn, n), ranks)
    return s, strong, math.inf, weak


@mutant("amdahl_and_gustafson", "limit")
def limit_by_the_parallel_part(t1, tn, n, ranks):
    s, strong, _, weak = _laws(_serial(t1, tn, n), ranks)
    return s, strong, 1 / (1 - s), weak


@mutant("amdahl_and_gustafson", "speed-up-order")
def limit_last(t1, tn, n, ranks):
    s, strong, limit, weak = _laws(_serial(t1, tn, n), ranks)
    return s, strong, weak, limit


@mutant("amdahl_and_gustafson", "number")
def three_numbers(t1, tn, n, ranks):
    return _laws(_serial(t1, tn, n), ranks)[:3]


@mutant("amdahl_and_gustafson", "typed")
def amdahl_typed(t1, tn, n, ranks):
    return _laws(_serial(0.8, 0.13, 8), 64)


# ------------------------------------------------------------------------------------------------ cost


def _cost(tokens, rate, gpus, efficiency, lost, dollars):
    hours = tokens / (rate * gpus * efficiency) / 3600 / (1 - lost)
    return hours, hours * gpus * dollars


@mutant("cost_of_run", "no-efficiency")
def efficiency_left_out(tokens, rate, gpus, efficiency, lost, dollars):
    return _cost(tokens, rate, gpus, 1, lost, dollars)


@mutant("cost_of_run", "upside-down")
def times_the_efficiency(tokens, rate, gpus, efficiency, lost, dollars):
    return _cost(tokens, rate, gpus, 1 / efficiency, lost, dollars)


@mutant("cost_of_run", "dollars-ideal")
def dollars_of_a_perfect_run(tokens, rate, gpus, efficiency, lost, dollars):
    hours, _ = _cost(tokens, rate, gpus, efficiency, lost, dollars)
    return hours, _cost(tokens, rate, gpus, 1, lost, dollars)[1]


@mutant("cost_of_run", "one-gpu")
def price_of_one_gpu(tokens, rate, gpus, efficiency, lost, dollars):
    hours, paid = _cost(tokens, rate, gpus, efficiency, lost, dollars)
    return hours, paid / gpus


@mutant("cost_of_run", "not-shared")
def each_gpu_sees_all_tokens(tokens, rate, gpus, efficiency, lost, dollars):
    hours, paid = _cost(tokens, rate, gpus, efficiency, lost, dollars)
    return hours * gpus, paid * gpus


@mutant("cost_of_run", "seconds")
def seconds_not_hours(tokens, rate, gpus, efficiency, lost, dollars):
    return tuple(3600 * x for x in _cost(tokens, rate, gpus, efficiency, lost, dollars))


@mutant("cost_of_run", "lost-ignored")
def nothing_lost(tokens, rate, gpus, efficiency, lost, dollars):
    return _cost(tokens, rate, gpus, efficiency, 0, dollars)


@mutant("cost_of_run", "lost-added")
def lost_share_added(tokens, rate, gpus, efficiency, lost, dollars):
    return tuple((1 + lost) * x for x in _cost(tokens, rate, gpus, efficiency, 0, dollars))


@mutant("cost_of_run", "lost-added")
def times_what_is_not_lost(tokens, rate, gpus, efficiency, lost, dollars):
    return tuple((1 - lost) * x for x in _cost(tokens, rate, gpus, efficiency, 0, dollars))


@mutant("cost_of_run", "lost-twice")
def lost_hours_paid_twice(tokens, rate, gpus, efficiency, lost, dollars):
    hours, paid = _cost(tokens, rate, gpus, efficiency, lost, dollars)
    return hours, paid / (1 - lost)


@mutant("cost_of_run", "number")
def only_the_dollars(*case):
    return _cost(*case)[1]


# ------------------------------------------------------------------------------------------------ bucket size


def _one(b, ranks, us, gigabits, steps=2, share=True, bits=8):
    travels = b / ranks if share else b
    return steps * (ranks - 1) * (us * 1e-6 + travels * bits / (gigabits * 1e9))


def _line(n, backward, one):
    return backward / n + (n - 1) * max(backward / n, one) + one


def _best(size, tensors, backward_ms, ranks, us, gigabits, finish=_line, one=_one, n=None, **slip):
    def ms(n):
        return 1e3 * finish(n, backward_ms * 1e-3, one(size / n, ranks, us, gigabits, **slip))

    n = n or min(range(1, tensors + 1), key=ms)
    return n, ms(n)


@mutant("best_buckets", "pair")
def only_the_number(*case):
    return _best(*case)[0]


@mutant("best_buckets", "pair")
def half_a_bucket(*case):
    return _best(*case)[0] + 0.5, _best(*case)[1]


@mutant("best_buckets", "pair")
def size_not_number(size, *case):
    n, ms = _best(size, *case)
    return size / n, ms


@mutant("best_buckets", "gigabits")
def gigabytes_for_gigabits(*case):
    return _best(*case, bits=1)


@mutant("best_buckets", "microseconds")
def latency_in_milliseconds(size, tensors, backward_ms, ranks, us, gigabits):
    return _best(size, tensors, backward_ms, ranks, 1e3 * us, gigabits)


@mutant("best_buckets", "milliseconds")
def time_in_seconds(*case):
    n, ms = _best(*case)
    return n, ms / 1e3


@mutant("best_buckets", "half")
def one_turn_of_the_ring(*case):
    return _best(*case, steps=1)


@mutant("best_buckets", "whole-bucket")
def whole_bucket_in_each_step(*case):
    return _best(*case, share=False)


@mutant("best_buckets", "no-latency")
def bytes_alone(size, tensors, backward_ms, ranks, us, gigabits):
    return _best(size, tensors, backward_ms, ranks, 0, gigabits)


@mutant("best_buckets", "one-bucket")
def all_after_backward(*case):
    return _best(*case, finish=lambda n, backward, one: backward + n * one)


@mutant("best_buckets", "all-hidden")
def larger_of_the_two(*case):
    return _best(*case, finish=lambda n, backward, one: max(backward, n * one))


@mutant("best_buckets", "no-start")
def starts_with_backward(*case):
    return _best(*case, finish=lambda n, backward, one: max(backward + one, n * one))


@mutant("best_buckets", "time")
def every_all_reduce_sticks_out(*case):
    return _best(*case, finish=lambda n, backward, one: backward / n + n * max(backward / n, one))


@mutant("best_buckets", "one-bucket")
def one_bucket(*case):
    return _best(*case, n=1)


@mutant("best_buckets", "one-per-tensor")
def one_bucket_for_each_tensor(*case):
    return _best(*case, n=case[1])


@mutant("best_buckets", "one-backward")
def as_many_as_keep_up_with_backward(size, tensors, backward_ms, ranks, us, gigabits):
    rest = backward_ms * 1e-3 - _one(size, ranks, 0, gigabits)
    n = min(tensors, max(1, int(rest / _one(0, ranks, us, gigabits))))
    return _best(size, tensors, backward_ms, ranks, us, gigabits, n=n)


@mutant("best_buckets", "not-best")
def twenty_five_megabytes(size, *case):
    return _best(size, *case, n=min(case[0], max(1, round(size / 150e6))))


@mutant("best_buckets", "error")
def looks_for_a_zero(*case):
    return next(n for n in range(1, case[1]) if n < 0), 0.0
