"""Usual wrong answers to the exercises on pipelines, each with the hint that it must be given."""

from __future__ import annotations

import itertools
import math
import time

import torch
import torch.distributed as dist
from exercise_cases import Mutant, register_of

MUTANTS: list[Mutant] = []
mutant = register_of(MUTANTS)

# ------------------------------------------------------------------------------------------------ the order of 1F1B


def _order(rank, ranks, m, ahead=lambda rank, ranks, m: min(m, ranks - rank - 1)):
    """The right way, with one thing that can be made wrong."""
    warm = ahead(rank, ranks, m)
    order = [("F", i) for i in range(warm)]
    for i in range(m - warm):
        order += [("F", warm + i), ("B", i)]
    return order + [("B", i) for i in range(m - warm, m)]


@mutant("one_f_one_b_order", "form")
def words_for_pairs(*case):
    return [f"{kind}{i}" for kind, i in _order(*case)]


@mutant("one_f_one_b_order", "form")
def halves_of_backward(*case):
    return [op for kind, i in _order(*case) for op in ([("F", i)] if kind == "F" else [("I", i), ("W", i)])]


@mutant("one_f_one_b_order", "form")
def printed_only(*case):
    _order(*case)


@mutant("one_f_one_b_order", "incomplete")
def last_backwards_forgotten(rank, ranks, m):
    return _order(rank, ranks, m)[: 2 * m - min(m, ranks - rank - 1)]


@mutant("one_f_one_b_order", "incomplete")
def counted_from_one(*case):
    return [(kind, i + 1) for kind, i in _order(*case)]


@mutant("one_f_one_b_order", "early")
def backward_first_in_each_pair(rank, ranks, m):
    warm = min(m, ranks - rank - 1)
    order = [("F", i) for i in range(warm)]
    for i in range(m - warm):
        order += [("B", i), ("F", warm + i)]
    return order + [("B", i) for i in range(m - warm, m)]


@mutant("one_f_one_b_order", "deadlock")
def later_ranks_run_ahead(*case):
    return _order(*case, ahead=lambda rank, ranks, m: min(m, rank))


@mutant("one_f_one_b_order", "rank-ignored")
def first_rank_everywhere(rank, ranks, m):
    return _order(0, ranks, m)


@mutant("one_f_one_b_order", "gpipe")
def all_forwards_first(rank, ranks, m):
    return [(kind, i) for kind in "FB" for i in range(m)]


@mutant("one_f_one_b_order", "naive")
def one_at_a_time(rank, ranks, m):
    return [(kind, i) for i in range(m) for kind in "FB"]


@mutant("one_f_one_b_order", "peak")
def one_forward_too_many(*case):
    return _order(*case, ahead=lambda rank, ranks, m: min(m, ranks - rank))


@mutant("one_f_one_b_order", "peak")
def twice_as_far_ahead(*case):
    return _order(*case, ahead=lambda rank, ranks, m: min(m, 2 * (ranks - rank - 1)))


@mutant("one_f_one_b_order", "slow")
def one_forward_ahead(*case):
    return _order(*case, ahead=lambda rank, ranks, m: min(m, 1, ranks - rank - 1))


@mutant("one_f_one_b_order", "odd")
def deadlock_for_odd_stages(*case):
    """Counts the ranks behind with an exclusive or: right for powers of two."""
    return _order(*case, ahead=lambda rank, ranks, m: min(m, (ranks - 1) ^ rank))


@mutant("one_f_one_b_order", "odd")
def ranks_in_pairs(*case):
    return _order(*case, ahead=lambda rank, ranks, m: min(m, max(0, ranks // 2 * 2 - rank - 1)))


@mutant("one_f_one_b_order", "few")
def as_many_ahead_as_ranks(*case):
    return _order(*case, ahead=lambda rank, ranks, m: ranks - rank - 1)


@mutant("one_f_one_b_order", "one-rank")
def divides_by_the_ranks_behind(rank, ranks, m):
    assert ranks > 1 and 1 / (ranks - 1)
    return _order(rank, ranks, m)


# ------------------------------------------------------------------------------------------------ engines


def _receive(like, source):
    tensor = torch.empty_like(like)
    dist.recv(tensor, source)
    return tensor


def _finish(sends):
    for send in sends:
        send.wait()


def _divided(loss, m):
    return loss / m


def _engine(
    stage, order, inputs, targets, loss_fn, like, receive=_receive, leaf=torch.Tensor.requires_grad_, scale=_divided,
    send=dist.isend, back=lambda x, y: x.grad, take=lambda kept, i: kept.pop(i), backward=torch.Tensor.backward,
    finish=_finish, forward=lambda stage, x: stage(x), total=sum, output=torch.Tensor.detach,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    rank, n, m = dist.get_rank(), dist.get_world_size(), len(inputs)
    kept, sends, losses = {}, [], []
    for kind, i in order:
        if kind == "F":
            x = inputs[i] if rank == 0 else leaf(receive(like, rank - 1))
            y = forward(stage, x)
            if rank == n - 1:
                y = scale(loss_fn(y, targets[i]), m)
                losses.append(y.detach())
            else:
                sends.append(send(output(y), rank + 1))
            kept[i] = x, y
        else:
            x, y = take(kept, i)
            backward(y, None if rank == n - 1 else receive(like, rank + 1))
            if rank:
                sends.append(send(back(x, y), rank - 1))
    finish([work for work in sends if work is not None])
    return total(losses) if rank == n - 1 else None


def _all_then_all(m):
    return [(kind, i) for kind in "FB" for i in range(m)]


def _gpipe(stage, inputs, *rest, **wrong):
    return _engine(stage, _all_then_all(len(inputs)), inputs, *rest, **wrong)


def both(hint, **options):
    """Register a slip of the engine as a wrong answer to both exercises."""

    def register(slips):
        def run_gpipe(*case):
            return _gpipe(*case, **slips())

        def run_order(*case):
            return _engine(*case, **slips())

        for exercise, answer in (("run_gpipe", run_gpipe), ("run_order", run_order)):
            answer.__name__ = slips.__name__
            mutant(exercise, hint, **options)(answer)
        return slips

    return register


@both("sum")
def loss_not_divided():
    return {"scale": lambda loss, m: loss}


@both("divided-twice")
def loss_and_gradients_divided():
    return {"scale": lambda loss, m: loss / m**2, "total": lambda losses: sum(losses) * len(losses)}


@both("one-microbatch")
def gradients_overwritten():
    stages = []

    def forward(stage, x):
        stages[:] = [stage]
        return stage(x)

    def backward(y, gradient):
        stages[0].zero_grad()
        y.backward(gradient)

    return {"forward": forward, "backward": backward}


@both("last-stage-only")
def gradients_of_the_last_stage_only():
    def backward(y, gradient):
        if gradient is None:
            y.backward()

    return {"backward": backward, "back": lambda x, y: torch.zeros_like(x)}


@both("input-gradient")
def input_sent_back_for_its_gradient():
    return {"back": lambda x, y: x.detach()}


@both("input-gradient")
def gradients_halved_on_their_way():
    return {"back": lambda x, y: x.grad / 2}


@both("requires-grad")
def requires_grad_forgotten():
    return {"leaf": lambda x: x}


@both("requires-grad")
def gradient_of_no_leaf():
    return {"leaf": lambda x: x.requires_grad_() * 1}


@both("not-received")
def used_before_it_has_arrived():
    works = []

    def receive(like, source):
        if source > dist.get_rank():
            return _receive(like, source)
        tensor = torch.empty_like(like)
        used = torch.zeros_like(like)  # what was there before the message
        works.append((dist.irecv(tensor, source), tensor))
        return used

    def finish(sends):
        _finish(sends)
        _finish(work for work, _ in works)

    return {"receive": receive, "finish": finish}


@both("neighbours")
def output_sent_to_all_ranks_behind():
    def send(tensor, peer):
        works = [dist.isend(tensor, r) for r in range(dist.get_world_size()) if r > peer > dist.get_rank()]
        extra.extend(works)
        return dist.isend(tensor, peer)

    def receive(like, source):
        rank, n = dist.get_rank(), dist.get_world_size()
        for r in range(source) if source < rank else ():
            extra.append(dist.irecv(torch.empty_like(like), r))
        return _receive(like, source) if n else None

    def finish(sends):
        _finish([*sends, *extra])

    extra = []
    return {"send": send, "receive": receive, "finish": finish}


@both("error")
def first_rank_behind_the_last():
    """A ring: the rank before rank 0 is rank -1."""

    def send(tensor, peer):
        return dist.isend(tensor, peer)

    def finish(sends):
        rank, n = dist.get_rank(), dist.get_world_size()
        if rank == n - 1:
            sends.append(dist.isend(torch.zeros(1), rank + 1))
        _finish(sends)

    return {"send": send, "finish": finish}


@both("collective")
def outputs_to_everyone_as_well():
    def finish(sends):
        _finish(sends)
        dist.all_gather([torch.empty(60) for _ in range(dist.get_world_size())], torch.ones(60))

    return {"finish": finish}


@mutant("run_gpipe", "collective")
def outputs_by_broadcast(stage, inputs, targets, loss_fn, like):
    rank, n, m = dist.get_rank(), dist.get_world_size(), len(inputs)

    def passed(tensor, source):
        tensor = tensor.detach().clone() if rank == source else torch.empty_like(like)
        dist.broadcast(tensor, source)
        return tensor

    pairs, losses, came, y = [], [], None, None
    for i in range(m):
        for r in range(n):
            if r == rank:
                x = inputs[i] if r == 0 else came.requires_grad_()
                y = stage(x)
                if r == n - 1:
                    y = loss_fn(y, targets[i]) / m
                    losses.append(y.detach())
                pairs.append((x, y))
            if r < n - 1:
                came = passed(y, r)
    for x, y in pairs:
        for r in reversed(range(n)):
            if r == rank:
                y.backward(None if r == n - 1 else came)
            if r:
                came = passed(x.grad, r)
    return sum(losses) if rank == n - 1 else None


@mutant("run_gpipe", "whole-batch")
def no_microbatches(stage, inputs, targets, loss_fn, like):
    """Joins the micro-batches: one forward, one backward, one message in each direction."""
    m = len(inputs)
    inputs = [None if inputs[0] is None else torch.cat(inputs)]
    targets = [None if targets[0] is None else torch.cat(targets)]
    return _gpipe(stage, inputs, targets, loss_fn, torch.cat([like] * m))


@mutant("run_order", "whole-batch")
def order_without_microbatches(stage, order, *rest):
    return no_microbatches(stage, *rest)


@both("forwards")
def forward_again_for_backward():
    def forward(stage, x):
        with torch.no_grad():
            stage(x)
        return stage(x)

    return {"forward": forward}


@both("messages")
def shape_sent_before_each_activation():
    shapes = []

    def send(tensor, peer):
        shapes.append(dist.isend(torch.tensor(tensor.shape), peer))
        return dist.isend(tensor, peer)

    def receive(like, source):
        dist.recv(torch.empty(like.dim(), dtype=torch.long), source)
        return _receive(like, source)

    return {"send": send, "receive": receive, "finish": lambda sends: _finish(sends + shapes)}


@both("too-many-bytes")
def activation_and_zeros():
    def send(tensor, peer):
        return dist.isend(torch.stack([tensor, torch.zeros_like(tensor)]), peer)

    return {"send": send, "receive": lambda like, source: _receive(torch.stack([like, like]), source)[0].clone()}


@both("not-waited")
def sends_never_waited_for():
    kept = []

    def finish(sends):
        kept.extend(sends)
        time.sleep(0.3)

    return {"finish": finish}


@both("loss")
def loss_of_the_last_microbatch():
    return {"total": lambda losses: losses[-1] * len(losses)}


@both("loss")
def sum_of_the_losses():
    return {"total": lambda losses: sum(losses) * len(losses)}


@both("loss")
def list_of_losses():
    return {"total": list}


@mutant("run_gpipe", "one-buffer")
def all_received_into_one_tensor(stage, inputs, targets, loss_fn, like):
    def receive(_, source):
        if source > dist.get_rank():
            return _receive(like, source)
        dist.recv(buffer, source)
        return buffer.detach()

    buffer = torch.empty_like(like)
    return _gpipe(stage, inputs, targets, loss_fn, like, receive=receive)


@mutant("run_order", "one-buffer")
def order_received_into_one_tensor(stage, order, inputs, targets, loss_fn, like):
    def receive(_, source):
        if source > dist.get_rank():
            return _receive(like, source)
        dist.recv(buffer, source)
        return buffer.detach()

    buffer = torch.empty_like(like)
    return _engine(stage, order, inputs, targets, loss_fn, like, receive=receive)


@mutant("run_gpipe", "wrong-microbatch")
def back_from_the_last_to_the_first_on_some_ranks(stage, inputs, *rest):
    order = _all_then_all(len(inputs))
    half, last = len(inputs), dist.get_rank() == dist.get_world_size() - 1
    return _engine(stage, order[:half] + (order[: half - 1 : -1] if last else order[half:]), inputs, *rest)


@mutant("run_order", "wrong-microbatch")
def newest_first_whatever_the_order(*case):
    return _engine(*case, take=lambda kept, i: kept.pop(max(kept)))


@mutant("run_order", "order")
def oldest_first_whatever_the_order(*case):
    return _engine(*case, take=lambda kept, i: kept.pop(min(kept)))


@both("graph-twice")
def only_the_last_output_kept():
    return {"take": lambda kept, i: kept[max(kept)]}


@mutant("run_gpipe", "naive")
def each_comes_back_before_the_next(stage, inputs, *rest):
    return _engine(stage, [(kind, i) for i in range(len(inputs)) for kind in "FB"], inputs, *rest)


@mutant("run_gpipe", "not-distributed")
def stages_alone(stage, inputs, targets, loss_fn, like):
    for i, x in enumerate(inputs):
        y = stage(like.zero_() if x is None else x)
        (y.sum() if targets[i] is None else loss_fn(y, targets[i]) / len(inputs)).backward()


@mutant("run_order", "order")
def forwards_first_whatever_the_order(stage, order, inputs, *rest):
    return _gpipe(stage, inputs, *rest)


@mutant("run_order", "blocking", hangs=True)
def blocking_sends(*case):
    return _engine(*case, send=dist.send)


@mutant("run_order", "kept")
def graphs_kept(*case):
    graphs = []

    def backward(y, gradient):
        graphs.append(y)
        y.backward(gradient, retain_graph=True)

    return _engine(*case, backward=backward)


@mutant("run_order", "kept")
def inputs_kept(*case):
    kept = []

    def back(x, y):
        kept.append(x)
        return x.grad

    return _engine(*case, back=back)


@both("hang", hangs=True)
def last_rank_sends_no_gradient():
    def send(tensor, peer):
        return None if peer < dist.get_rank() else dist.isend(tensor, peer)

    return {"send": send}


@both("only-two-ranks", hangs=True)
def neighbour_by_exclusive_or():
    def partner():
        rank = dist.get_rank()
        return rank ^ 1 if rank ^ 1 < dist.get_world_size() else rank - 1

    return {
        "send": lambda tensor, _: dist.isend(tensor, partner()),
        "receive": lambda like, _: _receive(like, partner()),
    }


@mutant("run_order", "one-rank")
def always_a_neighbour(stage, order, inputs, *rest):
    if dist.get_world_size() == 1:
        dist.recv(torch.empty_like(rest[-1]), 1)
    return _engine(stage, order, inputs, *rest)


@mutant("run_gpipe", "error")
def names_a_variable_that_is_not_there(*case):
    return undefined  # noqa: F821


# ------------------------------------------------------------------------------------------------ stages of equal cost


def _cuts(costs, stages):
    for ends in itertools.combinations(range(1, len(costs)), stages - 1):
        yield [b - a for a, b in itertools.pairwise((0, *ends, len(costs)))]


def _sums(costs, sizes):
    ends = list(itertools.accumulate(sizes))
    return [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _best(costs, stages, score=max):
    return min(_cuts(costs, stages), key=lambda sizes: score(_sums(costs, sizes)))


@mutant("balance", "missing")
def costs_of_the_stages(costs, stages):
    return _sums(costs, _best(costs, stages))


@mutant("balance", "form")
def places_of_the_cuts(costs, stages):
    return list(itertools.accumulate(_best(costs, stages)))[:-1]


@mutant("balance", "missing")
def last_layer_forgotten(costs, stages):
    return _best(costs[:-1], stages)


@mutant("balance", "empty-stage")
def nothing_on_the_first_stage(costs, stages):
    return [0, *_best(costs, stages - 1)]


@mutant("balance", "equal-counts")
def equal_numbers_of_layers(costs, stages):
    each, rest = divmod(len(costs), stages)
    return [each + (s < rest) for s in range(stages)]


@mutant("balance", "equal-counts")
def rest_on_the_last_stage(costs, stages):
    each, rest = divmod(len(costs), stages)
    return [each] * (stages - 1) + [each + rest]


@mutant("balance", "greedy")
def filled_up_to_the_mean(costs, stages):
    sizes, start, mean = [], 0, sum(costs) / stages
    for left in range(stages, 1, -1):
        end = start + 1
        while end <= len(costs) - left and sum(costs[start : end + 1]) <= mean:
            end += 1
        sizes.append(end - start)
        start = end
    return [*sizes, len(costs) - start]


@mutant("balance", "greedy")
def filled_until_the_mean_is_passed(costs, stages):
    sizes, start, mean = [], 0, sum(costs) / stages
    for left in range(stages, 1, -1):
        end = start + 1
        while end <= len(costs) - left and sum(costs[start:end]) < mean:
            end += 1
        sizes.append(end - start)
        start = end
    return [*sizes, len(costs) - start]


@mutant("balance", "greedy")
def cut_at_each_share_of_the_total(costs, stages):
    sums = list(itertools.accumulate(costs))
    ends = [1 + next(i for i, x in enumerate(sums) if x >= sums[-1] * s / stages) for s in range(1, stages)]
    return [b - a for a, b in itertools.pairwise([0, *ends, len(costs)])]


@mutant("balance", "most-even")
def smallest_squares(costs, stages):
    return _best(costs, stages, lambda sums: sum(x * x for x in sums))


@mutant("balance", "most-even")
def dearest_cheapest_stage(costs, stages):
    return _best(costs, stages, lambda sums: -min(sums))


@mutant("balance", "not-best")
def dearest_stage_as_dear_as_can_be(costs, stages):
    return _best(costs, stages, lambda sums: -max(sums))


# ------------------------------------------------------------------------------------------------ on paper


def _bubble(
    schedule, ranks, m, virtual, gb, share=lambda p, m, v: (p - 1) / (v * m + p - 1), all_of=lambda p, m: m,
    plain=lambda p, m: min(p, m), mixed=lambda p, m, v: min(m, p + (p - 1) / v), percent=100,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    held = {"GPipe": all_of(ranks, m), "1F1B": plain(ranks, m), "interleaved": mixed(ranks, m, virtual)}
    return percent * share(ranks, m, virtual), gb * held[schedule]


@mutant("bubble", "of-ideal")
def share_of_the_ideal_time(*case):
    return _bubble(*case, share=lambda p, m, v: (p - 1) / (v * m))


@mutant("bubble", "virtual-ignored")
def bubble_of_plain_stages(*case):
    return _bubble(*case, share=lambda p, m, v: (p - 1) / (m + p - 1))


@mutant("bubble", "ranks")
def as_many_steps_as_ranks(*case):
    return _bubble(*case, share=lambda p, m, v: p / (v * m + p))


@mutant("bubble", "work")
def share_of_work(*case):
    return _bubble(*case, share=lambda p, m, v: 1 - (p - 1) / (v * m + p - 1))


@mutant("bubble", "fraction")
def fraction_for_per_cent(*case):
    return _bubble(*case, percent=1)


@mutant("bubble", "gpipe-memory")
def gpipe_as_little_as_1f1b(*case):
    return _bubble(*case, all_of=min)


@mutant("bubble", "1f1b-memory")
def everything_in_flight(*case):
    return _bubble(*case, plain=lambda p, m: m)


@mutant("bubble", "few")
def more_than_there_are(*case):
    return _bubble(*case, plain=lambda p, m: p, mixed=lambda p, m, v: p + (p - 1) / v)


@mutant("bubble", "interleaved-memory")
def interleaved_as_little_as_1f1b(*case):
    return _bubble(*case, mixed=lambda p, m, v: min(p, m))


@mutant("bubble", "pieces")
def pieces_as_large_as_all_layers(*case):
    return _bubble(*case, mixed=lambda p, m, v: min(v * p + p - 1, v * m))


@mutant("bubble", "divided")
def memory_divided_by_the_stages(*case):
    return _bubble(*case, mixed=lambda p, m, v: min(p, m) / v)


@mutant("bubble", "number")
def bubble_alone(*case):
    return _bubble(*case)[0]


@mutant("bubble", "typed")
def typed_numbers(*case):
    return 100 * 7 / 39, 16


def _enough(
    p, v, percent, need=lambda p, v, x: (p - 1) * (1 - x) / (v * x), finish=math.ceil,
    group=lambda p, v: p if v > 1 else 1, least=1,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    count, step = finish(need(p, v, percent / 100)), group(p, v)
    return max(least, count if step == 1 else step * finish(count / step))


@mutant("enough_microbatches", "of-ideal")
def ideal_time_for_all_the_time(*case):
    return _enough(*case, need=lambda p, v, x: (p - 1) / (v * x))


@mutant("enough_microbatches", "virtual-ignored")
def plain_stages(*case):
    return _enough(*case, need=lambda p, v, x: (p - 1) * (1 - x) / x)


@mutant("enough_microbatches", "ranks")
def all_ranks_for_those_behind(*case):
    return _enough(*case, need=lambda p, v, x: p * (1 - x) / (v * x))


@mutant("enough_microbatches", "round")
def rounded_down(*case):
    return _enough(*case, finish=math.floor)


@mutant("enough_microbatches", "round")
def not_rounded(*case):
    return _enough(*case, finish=float)


@mutant("enough_microbatches", "multiple")
def any_number(*case):
    return _enough(*case, group=lambda p, v: 1)


@mutant("enough_microbatches", "multiple-always")
def always_a_multiple(*case):
    return _enough(*case, group=lambda p, v: p)


@mutant("enough_microbatches", "nothing")
def none_for_one_rank(*case):
    return _enough(*case, least=0)


@mutant("enough_microbatches", "typed")
def typed_number(*case):
    return 227


# ------------------------------------------------------------------------------------------------ the puzzle


def _own(aheads=(5, 3, 2, 1), behinds=(0, 2, 3, 4), m=8):
    """The right way: forwards before the first I, and how much later W comes, by rank."""
    orders = []
    for ahead, behind in zip(aheads, behinds, strict=True):
        order = [("F", i) for i in range(ahead)]
        for i in range(m):
            order += [("I", i)]
            order += [("W", i - behind)] if i >= behind else []
            order += [("F", i + ahead)] if i + ahead < m else []
        orders.append(order + [("W", i) for i in range(m - behind, m)])
    return orders


@mutant("own_schedule", "form")
def one_rank_only():
    return _own()[0]


@mutant("own_schedule", "form")
def texts_for_pairs():
    return [[f"{kind}{i}" for kind, i in order] for order in _own()]


@mutant("own_schedule", "incomplete")
def weights_without_gradients():
    return [[op for op in order if op[0] != "W"] for order in _own()]


@mutant("own_schedule", "early")
def weights_before_inputs():
    swap = {"I": "W", "W": "I", "F": "F"}
    return [[(swap[kind], i) for kind, i in order] for order in _own()]


@mutant("own_schedule", "deadlock")
def first_ranks_not_far_enough_ahead():
    return _own((1, 2, 3, 4), (4, 3, 2, 1))


@mutant("own_schedule", "memory")
def zero_bubble_h2():
    return _own((7, 5, 3, 1), (0, 2, 4, 6))


@mutant("own_schedule", "memory")
def weights_all_at_the_end():
    return _own((4, 3, 2, 1), (8, 8, 8, 8))


@mutant("own_schedule", "unsplit")
def one_f_one_b():
    return [_order(rank, 4, 8) for rank in range(4)]


@mutant("own_schedule", "slow")
def zero_bubble_h1():
    return _own((4, 3, 2, 1), (0, 1, 2, 3))


@mutant("own_schedule", "slow")
def halves_without_a_gap():
    return _own((4, 3, 2, 1), (0, 0, 0, 0))
