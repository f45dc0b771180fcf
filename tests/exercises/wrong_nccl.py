"""Usual wrong answers to the exercises on NCCL's algorithms, each with the hint that it must be given."""

from __future__ import annotations

import math
from time import sleep

import torch
import torch.distributed as dist
from exercise_cases import Mutant, register_of

from course_utils.checks import values

MUTANTS: list[Mutant] = []
mutant = register_of(MUTANTS)


def _place(ring):
    """Number of places, own place, left neighbour, right neighbour."""
    n, place = len(ring), ring.index(dist.get_rank())
    return n, place, ring[place - 1], ring[(place + 1) % n]


def _world():
    return list(range(dist.get_world_size()))


def _swap(out, to, into, source):
    calls = [dist.P2POp(dist.irecv, into, source), dist.P2POp(dist.isend, out, to)]
    for request in dist.batch_isend_irecv(calls):
        request.wait()


def _scatter_in(chunks, ring, first=1, add=torch.add):
    """Reduce-scatter of chunks, in place; place p sends chunk p + first in the first step."""
    n, place, left, right = _place(ring)
    for step in range(first, first + n - 1):
        into = chunks[(place + step + 1) % n]
        received = torch.empty_like(into)
        _swap(chunks[(place + step) % n], left, received, right)
        into.copy_(add(into, received))


def _gather_in(chunks, ring, first=0, rounds=1):
    n, place, left, right = _place(ring)
    for step in range(first, first + rounds * (n - 1)):
        _swap(chunks[(place + step) % n], left, chunks[(place + step + 1) % n], right)


def _scatter(x, ring):
    chunks = x.clone().tensor_split(len(ring))
    _scatter_in(chunks, ring)
    return chunks[ring.index(dist.get_rank())]


def _gather(x, ring):
    _gather_in(x.tensor_split(len(ring)), ring)


def _all(x, ring):
    flat = x.flatten().clone()
    chunks = flat.tensor_split(len(ring))
    _scatter_in(chunks, ring)
    _gather_in(chunks, ring)
    return flat.reshape(x.shape)


# ------------------------------------------------------------------------------------------------ ring reduce-scatter


def _blocking_scatter(x, ring, send_first):
    n, place, left, right = _place(ring)
    chunks = x.clone().tensor_split(n)
    for step in range(1, n):
        out, into = chunks[(place + step) % n], chunks[(place + step + 1) % n]
        received = torch.empty_like(into)
        if send_first(place):
            dist.send(out, left)
            dist.recv(received, right)
        else:
            dist.recv(received, right)
            dist.send(out, left)
        into += received
    return chunks[place]


@mutant("ring_reduce_scatter", "hang", hangs=True)
def all_send_first(x, ring):
    return _blocking_scatter(x, ring, lambda place: True)


@mutant("ring_reduce_scatter", "hang", hangs=True)
def all_receive_first(x, ring):
    return _blocking_scatter(x, ring, lambda place: False)


@mutant("ring_reduce_scatter", "steps")
def odd_places_receive_first(x, ring):
    return _blocking_scatter(x, ring, lambda place: place % 2 == 0)


@mutant("ring_reduce_scatter", "steps")
def one_chunk_after_another(x, ring):
    n, place, left, right = _place(ring)
    chunks = x.clone().tensor_split(n)
    for i, chunk in enumerate(chunks if n > 1 else ()):
        if place != (i - 1) % n:
            received = torch.empty_like(chunk)
            dist.recv(received, right)
            chunk += received
        if place != i:
            dist.send(chunk, left)
    return chunks[place]


@mutant("ring_reduce_scatter", "library")
def all_reduce_and_own_chunk(x, ring):
    x = x.clone()
    dist.all_reduce(x)
    return x.tensor_split(len(ring))[ring.index(dist.get_rank())]


@mutant("ring_reduce_scatter", "not-divisible")
def chunks_rounded_down(x, ring):
    chunks = x.clone().split(len(x) // len(ring))
    _scatter_in(chunks, ring)
    return chunks[ring.index(dist.get_rank())]


@mutant("ring_reduce_scatter", "not-divisible")
def last_number_of_a_chunk_is_left_out(x, ring):
    n, place = len(ring), ring.index(dist.get_rank())
    size = math.ceil(len(x) / n)
    x = x.clone()
    chunks = [x[i * size : (i + 1) * size - (len(x) % n > 0)] for i in range(n)]
    _scatter_in(chunks, ring)
    return chunks[place]


@mutant("ring_reduce_scatter", "small")
def chunks_by_chunk(x, ring):
    chunks = x.clone().chunk(len(ring))
    _scatter_in(chunks, ring)
    return chunks[ring.index(dist.get_rank())]


@mutant("ring_reduce_scatter", "dtype")
def in_float32_and_back(x, ring):
    return _scatter(x.float(), ring).to(x.dtype)


@mutant("ring_reduce_scatter", "dtype")
def result_in_float64(x, ring):
    return _scatter(x.double() if x.dtype == torch.int64 else x, ring)


@mutant("ring_reduce_scatter", "ring")
def always_the_ring_of_all_ranks(x, ring):
    return _scatter(x, _world())


@mutant("ring_reduce_scatter", "whole-tensor")
def whole_tensor_passed_round(x, ring):
    n, place, left, right = _place(ring)
    total, travelling = x.clone(), x
    for _ in range(n - 1):
        received = torch.empty_like(x)
        _swap(travelling, left, received, right)
        travelling = received
        total += received
    return total.tensor_split(n)[place]


@mutant("ring_reduce_scatter", "whole-tensor")
def n_times_the_bytes(x, ring):
    n, place, left, right = _place(ring)
    x = x.clone()
    chunks = x.tensor_split(n)
    for step in range(1, n):
        received = torch.empty_like(x)
        _swap(x, left, received, right)
        chunks[(place + step + 1) % n].add_(received.tensor_split(n)[(place + step + 1) % n])
    return chunks[place]


@mutant("ring_reduce_scatter", "hub")
def through_the_first_place(x, ring):
    n, place, _, _ = _place(ring)
    if place:
        dist.send(x, ring[0])
        chunk = torch.empty_like(x.tensor_split(n)[place])
        dist.recv(chunk, ring[0])
        return chunk
    total, received = x.clone(), torch.empty_like(x)
    for other in ring[1:]:
        dist.recv(received, other)
        total += received
    for i, other in enumerate(ring[1:], 1):
        dist.send(total.tensor_split(n)[i], other)
    return total.tensor_split(n)[0]


@mutant("ring_reduce_scatter", "direction")
def to_the_right(x, ring):
    backwards = ring[::-1]
    chunks = x.clone().tensor_split(len(ring))
    _scatter_in(chunks[::-1], backwards)
    return chunks[ring.index(dist.get_rank())]


@mutant("ring_reduce_scatter", "not-a-ring")
def chunks_sent_straight_to_their_places(x, ring):
    n, place, _, _ = _place(ring)
    chunks = x.clone().tensor_split(n)
    for distance in range(1, n):
        received = torch.empty_like(chunks[place])
        to = (place + distance) % n
        _swap(chunks[to], ring[to], received, ring[place - distance])
        chunks[place].add_(received)
    return chunks[place]


@mutant("ring_reduce_scatter", "average")
def mean_of_the_chunk(x, ring):
    return _scatter(x, ring) / len(ring)


@mutant("ring_reduce_scatter", "unwaited", hangs=True)
def never_waits_for_the_send(x, ring):
    n, place, left, right = _place(ring)
    chunks = x.clone().tensor_split(n)
    received = torch.empty_like(chunks[place])
    dist.isend(chunks[place - 1], left)
    if place:
        sleep(0.3)  # place 0 has returned by now
    dist.recv(received, right)
    return chunks[place] + received


@mutant("ring_reduce_scatter", "not-added")
def adds_before_the_receive_is_complete(x, ring):
    n, place, left, right = _place(ring)
    chunks = x.clone().tensor_split(n)
    for step in range(1, n):
        into = chunks[(place + step + 1) % n]
        received = torch.zeros_like(into)
        sleep(0.5 * place)  # the message comes after the addition
        calls = [
            dist.P2POp(dist.isend, chunks[(place + step) % n], left),
            dist.P2POp(dist.irecv, received, right),
        ]
        requests = dist.batch_isend_irecv(calls)
        into += received
        for request in requests:
            request.wait()
    return chunks[place]


@mutant("ring_reduce_scatter", "not-added")
def stored_instead_of_added(x, ring):
    chunks = x.clone().tensor_split(len(ring))
    _scatter_in(chunks, ring, add=lambda mine, received: received)
    return chunks[ring.index(dist.get_rank())]


@mutant("ring_reduce_scatter", "wrong-chunk")
def ends_with_the_chunk_before(x, ring):
    chunks = x.clone().tensor_split(len(ring))
    _scatter_in(chunks, ring, first=0)
    return chunks[ring.index(dist.get_rank()) - 1]


@mutant("ring_reduce_scatter", "first-chunk")
def starts_with_its_own_chunk(x, ring):
    chunks = x.clone().tensor_split(len(ring))
    _scatter_in(chunks, ring, first=0)
    return chunks[ring.index(dist.get_rank())]


@mutant("ring_reduce_scatter", "whole-result")
def sum_of_all_chunks(x, ring):
    return _all(x, ring)


@mutant("ring_reduce_scatter", "partial")
def sends_own_numbers_in_each_step(x, ring):
    n, place, left, right = _place(ring)
    own, sums = x.tensor_split(n), x.clone().tensor_split(n)
    for step in range(1, n):
        into = sums[(place + step + 1) % n]
        received = torch.empty_like(into)
        _swap(own[(place + step) % n], left, received, right)
        into += received
    return sums[place]


@mutant("ring_reduce_scatter", "not-distributed")
def one_step_too_few(x, ring):
    n, place, left, right = _place(ring)
    chunks = x.clone().tensor_split(n)
    for step in range(1, n - 1):
        received = torch.empty_like(chunks[(place + step + 1) % n])
        _swap(chunks[(place + step) % n], left, received, right)
        chunks[(place + step + 1) % n].add_(received)
    return chunks[place]


@mutant("ring_reduce_scatter", "not-distributed")
def inputs_of_the_others_made_again(x, ring):
    total = sum(values(len(x), seed=400 + rank) for rank in ring)
    return total.tensor_split(len(ring))[ring.index(dist.get_rank())]


@mutant("ring_reduce_scatter", "only-two-ranks")
def swap_with_rank_xor_1(x, ring):
    rank = dist.get_rank()
    chunks = x.clone().tensor_split(2)
    received = torch.empty_like(chunks[rank % 2])
    if len(ring) > 1:
        _swap(chunks[1 - rank % 2], rank ^ 1, received, rank ^ 1)
    return chunks[rank % 2] + received


@mutant("ring_reduce_scatter", "only-two-ranks", hangs=True)
def sends_to_the_left_and_receives_from_the_left(x, ring):
    n, place, left, _ = _place(ring)
    chunks = x.clone().tensor_split(n)
    for step in range(1, n):
        received = torch.empty_like(chunks[(place + step + 1) % n])
        _swap(chunks[(place + step) % n], left, received, left)
        chunks[(place + step + 1) % n].add_(received)
    return chunks[place]


@mutant("ring_reduce_scatter", "too-many-bytes")
def all_reduce_for_one_chunk(x, ring):
    return _all(x, ring).tensor_split(len(ring))[ring.index(dist.get_rank())]


@mutant("ring_reduce_scatter", "input-changed")
def adds_into_x(x, ring):
    chunks = x.tensor_split(len(ring))
    _scatter_in(chunks, ring)
    return chunks[ring.index(dist.get_rank())].clone()


@mutant("ring_reduce_scatter", "one-rank")
def at_least_one_step(x, ring):
    n, place, left, right = _place(ring)
    chunks = x.clone().tensor_split(n)
    for step in range(1, max(n, 2)):
        received = torch.empty_like(chunks[(place + step + 1) % n])
        _swap(chunks[(place + step) % n], left, received, right)
        chunks[(place + step + 1) % n].add_(received)
    return chunks[place]


# ------------------------------------------------------------------------------------------------ ring all-gather


def _blocking_gather(x, ring, send_first):
    n, place, left, right = _place(ring)
    chunks = x.tensor_split(n)
    for step in range(n - 1):
        if send_first(place):
            dist.send(chunks[(place + step) % n], left)
        dist.recv(chunks[(place + step + 1) % n], right)
        if not send_first(place):
            dist.send(chunks[(place + step) % n], left)


@mutant("ring_all_gather", "hang", hangs=True)
def gather_that_sends_first(x, ring):
    _blocking_gather(x, ring, lambda place: True)


@mutant("ring_all_gather", "steps")
def gather_by_turns(x, ring):
    _blocking_gather(x, ring, lambda place: place % 2 == 0)


@mutant("ring_all_gather", "library")
def a_broadcast_from_each_place(x, ring):
    for rank, chunk in zip(ring, x.tensor_split(len(ring)), strict=True):
        dist.broadcast(chunk, src=rank)


@mutant("ring_all_gather", "not-divisible")
def gathers_chunks_rounded_down(x, ring):
    _gather_in(x.split(len(x) // len(ring)), ring)


@mutant("ring_all_gather", "small")
def gathers_chunks_of_chunk(x, ring):
    _gather_in(x.chunk(len(ring)), ring)


@mutant("ring_all_gather", "dtype")
def gathers_in_float32(x, ring):
    y = x.float()
    _gather(y, ring)
    x.copy_(y)


@mutant("ring_all_gather", "ring")
def gathers_from_all_ranks(x, ring):
    _gather(x, _world())


@mutant("ring_all_gather", "whole-tensor")
def whole_tensor_in_each_step(x, ring):
    n, place, left, right = _place(ring)
    for step in range(n - 1):
        received, arriving = torch.empty_like(x), (place + step + 1) % n
        _swap(x, left, received, right)
        x.tensor_split(n)[arriving].copy_(received.tensor_split(n)[arriving])


@mutant("ring_all_gather", "hub")
def collected_and_handed_out_by_the_first_place(x, ring):
    n, place, _, _ = _place(ring)
    chunks = x.tensor_split(n)
    if place:
        dist.send(chunks[place], ring[0])
        dist.recv(x, ring[0])
        return
    for i, other in enumerate(ring[1:], 1):
        dist.recv(chunks[i], other)
    for other in ring[1:]:
        dist.send(x, other)


@mutant("ring_all_gather", "direction")
def gathers_to_the_right(x, ring):
    _gather_in(x.tensor_split(len(ring))[::-1], ring[::-1])


@mutant("ring_all_gather", "not-a-ring")
def own_chunk_straight_to_everybody(x, ring):
    n, place, _, _ = _place(ring)
    chunks = x.tensor_split(n)
    for distance in range(1, n):
        source = (place - distance) % n
        _swap(chunks[place], ring[(place + distance) % n], chunks[source], ring[source])


@mutant("ring_all_gather", "missing")
def starts_with_the_wrong_chunk(x, ring):
    _gather_in(x.tensor_split(len(ring)), ring, first=1)


@mutant("ring_all_gather", "missing")
def receives_into_a_buffer_and_forgets_it(x, ring):
    n, place, left, right = _place(ring)
    travelling = x.tensor_split(n)[place].clone()
    for step in range(n - 1):
        received = torch.empty_like(x.tensor_split(n)[(place + step + 1) % n])
        _swap(travelling, left, received, right)
        travelling = received


@mutant("ring_all_gather", "not-passed-on")
def sends_its_own_chunk_in_each_step(x, ring):
    n, place, left, right = _place(ring)
    chunks = x.tensor_split(n)
    own = chunks[place].clone()
    for step in range(n - 1):
        _swap(own, left, chunks[(place + step + 1) % n], right)


@mutant("ring_all_gather", "order")
def in_the_order_of_arrival(x, ring):
    n, place, left, right = _place(ring)
    parts = [x.tensor_split(n)[place].clone()]
    for step in range(n - 1):
        parts.append(torch.empty_like(x.tensor_split(n)[(place + step + 1) % n]))
        _swap(parts[-2], left, parts[-1], right)
    x.copy_(torch.cat(parts))


@mutant("ring_all_gather", "added")
def adds_what_comes_in(x, ring):
    n, place, left, right = _place(ring)
    travelling = x.tensor_split(n)[place].clone()
    for step in range(n - 1):
        into = x.tensor_split(n)[(place + step + 1) % n]
        received = torch.empty_like(into)
        _swap(travelling, left, received, right)
        into += received
        travelling = received


@mutant("ring_all_gather", "not-in-place")
def returns_a_new_tensor(x, ring):
    x = x.clone()
    _gather(x, ring)
    return x


@mutant("ring_all_gather", "not-distributed")
def chunks_made_again(x, ring):
    for i, rank in enumerate(ring):
        x.tensor_split(len(ring))[i].copy_(values(len(x), seed=500 + rank).tensor_split(len(ring))[i])


@mutant("ring_all_gather", "missing")
def one_step_as_for_two_ranks(x, ring):
    n, place, left, right = _place(ring)
    if n > 1:
        _swap(x.tensor_split(n)[place], left, x.tensor_split(n)[(place + 1) % n], right)


@mutant("ring_all_gather", "only-two-ranks", hangs=True)
def receives_from_the_rank_it_sends_to(x, ring):
    n, place, left, _ = _place(ring)
    chunks = x.tensor_split(n)
    for step in range(n - 1):
        _swap(chunks[(place + step) % n], left, chunks[(place + step + 1) % n], left)


@mutant("ring_all_gather", "too-many-bytes")
def twice_round(x, ring):
    _gather_in(x.tensor_split(len(ring)), ring, rounds=2)


# ------------------------------------------------------------------------------------------------ ring all-reduce


def _split(x, ring, cut):
    flat = x.flatten().clone()
    chunks = cut(flat, len(ring))
    _scatter_in(chunks, ring)
    _gather_in(chunks, ring)
    return flat.reshape(x.shape)


@mutant("mended_ring_all_reduce", "hang", hangs=True)
@mutant("ring_all_reduce", "hang", hangs=True)
def reduces_with_send_then_recv(x, ring=None):
    return _blocking_scatter(x.flatten(), ring or _world(), lambda place: True)


@mutant("mended_ring_all_reduce", "library")
@mutant("ring_all_reduce", "library")
def the_library_does_it(x, ring=None):
    x = x.clone()
    dist.all_reduce(x)
    return x


@mutant("mended_ring_all_reduce", "not-divisible")
@mutant("ring_all_reduce", "not-divisible")
def padding_is_not_cut_off(x, ring=None):
    ring = ring or _world()
    padded = x.new_zeros(math.ceil(x.numel() / len(ring)) * len(ring))
    padded[: x.numel()] = x.flatten()
    total = _all(padded, ring)
    return total.reshape(x.shape) if len(padded) == x.numel() else total


@mutant("mended_ring_all_reduce", "tail")
@mutant("ring_all_reduce", "tail")
def last_chunk_is_missing(x, ring=None):
    return _split(x, ring or _world(), lambda flat, n: flat.split(len(flat) // n))


@mutant("ring_all_reduce", "tail")
def last_numbers_are_zero(x, ring):
    body = x.numel() // len(ring) * len(ring)
    total = torch.zeros_like(x)
    total.view(-1)[:body] = _all(x.flatten()[:body], ring)
    return total


@mutant("mended_ring_all_reduce", "small")
@mutant("ring_all_reduce", "small")
def too_few_chunks(x, ring=None):
    return _split(x, ring or _world(), lambda flat, n: flat.split(math.ceil(len(flat) / n)))


@mutant("mended_ring_all_reduce", "dtype")
@mutant("ring_all_reduce", "dtype")
def sums_in_float32(x, ring=None):
    return _all(x.float(), ring or _world()).to(x.dtype)


@mutant("ring_all_reduce", "ring")
def sum_over_all_ranks(x, ring):
    return _all(x, _world())


@mutant("mended_ring_all_reduce", "whole-tensor")
@mutant("ring_all_reduce", "whole-tensor")
def whole_tensors_passed_round_the_ring(x, ring=None):
    n, _, left, right = _place(ring or _world())
    total, travelling = x.clone(), x
    for _ in range(n - 1):
        received = torch.empty_like(x)
        _swap(travelling, left, received, right)
        travelling = received
        total += received
    return total


@mutant("ring_all_reduce", "whole-tensor")
def right_sum_with_n_times_the_bytes(x, ring):
    n, place, left, right = _place(ring)
    x = x.clone()
    chunks, received = x.view(-1).tensor_split(n), torch.empty_like(x)
    for step in range(1, 2 * n - 1):
        _swap(x, left, received, right)
        arriving = (place + step + 1) % n
        into, new = chunks[arriving], received.view(-1).tensor_split(n)[arriving]
        into.copy_(into + new if step < n else new)
    return x


@mutant("mended_ring_all_reduce", "hub")
@mutant("ring_all_reduce", "hub")
def reduced_and_handed_out_by_one_rank(x, ring=None):
    ring = ring or _world()
    total, received = x.clone(), torch.empty_like(x)
    if dist.get_rank() != ring[0]:
        dist.send(x, ring[0])
        dist.recv(total, ring[0])
        return total
    for other in ring[1:]:
        dist.recv(received, other)
        total += received
    for other in ring[1:]:
        dist.send(total, other)
    return total


@mutant("ring_all_reduce", "direction")
def all_reduce_to_the_right(x, ring):
    return _all(x, ring[::-1])


@mutant("mended_ring_all_reduce", "not-a-ring")
@mutant("ring_all_reduce", "not-a-ring")
def chunks_to_everybody_and_back(x, ring=None):
    ring = ring or _world()
    flat = x.flatten().clone()
    mine = chunks_sent_straight_to_their_places(flat, ring)
    flat.tensor_split(len(ring))[ring.index(dist.get_rank())].copy_(mine)
    own_chunk_straight_to_everybody(flat, ring)
    return flat.reshape(x.shape)


@mutant("ring_all_reduce", "steps")
def all_reduce_by_turns(x, ring):
    flat = x.flatten().clone()
    mine = _blocking_scatter(flat, ring, lambda place: place % 2 == 0)
    flat.tensor_split(len(ring))[ring.index(dist.get_rank())].copy_(mine)
    _blocking_gather(flat, ring, lambda place: place % 2 == 0)
    return flat.reshape(x.shape)


@mutant("mended_ring_all_reduce", "average")
@mutant("ring_all_reduce", "average")
def mean_over_the_ring(x, ring=None):
    ring = ring or _world()
    return _all(x, ring) / len(ring)


@mutant("mended_ring_all_reduce", "not-gathered")
@mutant("ring_all_reduce", "not-gathered")
def only_the_first_half(x, ring=None):
    ring = ring or _world()
    flat = x.flatten().clone()
    _scatter_in(flat.tensor_split(len(ring)), ring)
    return flat.reshape(x.shape)


@mutant("ring_all_reduce", "not-gathered")
def only_the_finished_chunk(x, ring):
    return _scatter(x.flatten(), ring)


@mutant("mended_ring_all_reduce", "missing")
@mutant("ring_all_reduce", "missing")
def gathers_from_the_wrong_chunk_on(x, ring=None):
    ring = ring or _world()
    flat = x.flatten().clone()
    chunks = flat.tensor_split(len(ring))
    _scatter_in(chunks, ring)
    _gather_in(chunks, ring, first=1)
    return flat.reshape(x.shape)


@mutant("mended_ring_all_reduce", "added")
@mutant("ring_all_reduce", "added")
def adds_in_the_second_half_too(x, ring=None):
    ring = ring or _world()
    flat = x.flatten().clone()
    chunks = flat.tensor_split(len(ring))
    _scatter_in(chunks, ring)
    _scatter_in(chunks, ring, first=0)
    return flat.reshape(x.shape)


@mutant("ring_all_reduce", "shape")
def stays_flat(x, ring):
    return _all(x.flatten(), ring)


@mutant("ring_all_reduce", "not-distributed")
def sum_made_again(x, ring):
    return sum(values(x.numel(), seed=600 + rank) for rank in ring).reshape(x.shape)


@mutant("ring_all_reduce", "only-two-ranks", hangs=True)
def second_half_with_one_neighbour(x, ring):
    n, place, left, _ = _place(ring)
    flat = x.flatten().clone()
    chunks = flat.tensor_split(n)
    _scatter_in(chunks, ring)
    for step in range(n - 1):
        _swap(chunks[(place + step) % n], left, chunks[(place + step + 1) % n], left)
    return flat.reshape(x.shape)


@mutant("ring_all_reduce", "too-many-bytes")
def gathers_twice(x, ring):
    flat = x.flatten().clone()
    chunks = flat.tensor_split(len(ring))
    _scatter_in(chunks, ring)
    _gather_in(chunks, ring, rounds=2)
    return flat.reshape(x.shape)


@mutant("ring_all_reduce", "input-changed")
def works_on_x_itself(x, ring):
    chunks = x.view(-1).tensor_split(len(ring))
    _scatter_in(chunks, ring)
    _gather_in(chunks, ring)
    return x.clone()


# ------------------------------------------------------------------------------------------------ the broken ring


def _one_loop(x, cut, source=-1, turn=1):
    rank, n = dist.get_rank(), dist.get_world_size()
    result = x.clone()
    chunks = cut(result, n)
    for step in range(2 * (n - 1)):
        out, into = chunks[(rank - turn * step) % n], chunks[(rank - turn * (step + 1)) % n]
        received = torch.empty_like(into)
        _swap(out, (rank + turn) % n, received, (rank + turn * source) % n)
        into.copy_(into + received if step < n - 1 else received)
    return result


def _down(x, n):
    return x.split(len(x) // n)


@mutant("mended_ring_all_reduce", "tail")
def as_it_was_given(x):
    return _one_loop(x, _down, source=1)


@mutant("mended_ring_all_reduce", "tail")
def first_fault_mended(x):
    return _one_loop(x, _down)


@mutant("mended_ring_all_reduce", "only-two-ranks", hangs=True)
def second_fault_mended(x):
    return _one_loop(x, torch.Tensor.tensor_split, source=1)


@mutant("mended_ring_all_reduce", "small")
def second_fault_half_mended(x):
    return _one_loop(x, torch.Tensor.chunk)


@mutant("mended_ring_all_reduce", "direction")
def turned_round(x):
    return _one_loop(x, torch.Tensor.tensor_split, turn=-1)


@mutant("mended_ring_all_reduce", "steps")
def mended_by_turns(x):
    return all_reduce_by_turns(x, _world()[::-1])


@mutant("mended_ring_all_reduce", "input-changed")
def mended_in_place(x):
    x.copy_(_one_loop(x, torch.Tensor.tensor_split))
    return x.clone()


# ------------------------------------------------------------------------------------------------ tree


def _up(x, root, small_first=True, own=False):
    """Sum up the tree; the partial sum of this rank, and its distance to the parent."""
    rank, n = dist.get_rank(), dist.get_world_size()
    place, total, received, reach = (rank - root) % n, x.clone(), torch.empty_like(x), 1
    while reach < n and place % (2 * reach) == 0:
        reach *= 2
    children = [2**k for k in range(reach.bit_length() - 1) if place + 2**k < n]
    for distance in children if small_first else children[::-1]:
        dist.recv(received, (rank + distance) % n)
        total += received
    if place:
        dist.send(x if own else total, (rank - reach) % n)
    return total, reach


def _hand_down(total, reach, root, add=False, large_first=True):
    rank, n = dist.get_rank(), dist.get_world_size()
    place, received = (rank - root) % n, torch.empty_like(total)
    if place:
        dist.recv(received, (rank - reach) % n)
        total.copy_(total + received if add else received)
    children = [2**k for k in range(reach.bit_length() - 1) if place + 2**k < n]
    for distance in children[::-1] if large_first else children:
        dist.send(total, (rank + distance) % n)
    return total


def _tree(x, root):
    return _hand_down(*_up(x, root), root)


@mutant("tree_all_reduce", "average")
def mean_from_the_tree(x, root):
    return _tree(x, root) / dist.get_world_size()


@mutant("tree_all_reduce", "hang", hangs=True)
def both_sides_of_a_pair_send_first(x, root):
    rank, n = dist.get_rank(), dist.get_world_size()
    total, received, distance = x.clone(), torch.empty_like(x), 1
    while distance < n:
        dist.send(total, rank ^ distance)
        dist.recv(received, rank ^ distance)
        total += received
        distance *= 2
    return total


@mutant("tree_all_reduce", "library")
def reduce_and_broadcast(x, root):
    x = x.clone()
    dist.reduce(x, dst=root)
    dist.broadcast(x, src=root)
    return x


@mutant("tree_all_reduce", "not-broadcast")
def only_up(x, root):
    return _up(x, root)[0]


@mutant("tree_all_reduce", "own-sent")
def own_numbers_go_up(x, root):
    return _hand_down(*_up(x, root, own=True), root)


@mutant("tree_all_reduce", "added")
def adds_on_the_way_down(x, root):
    return _hand_down(*_up(x, root), root, add=True)


@mutant("tree_all_reduce", "root")
def root_is_always_0(x, root):
    return _tree(x, 0)


@mutant("tree_all_reduce", "power-of-two", hangs=True)
def child_may_not_exist(x, root):
    rank, n = dist.get_rank(), dist.get_world_size()
    place, total, received, distance = (rank - root) % n, x.clone(), torch.empty_like(x), 1
    while distance < n and place % (2 * distance) == 0:
        dist.recv(received, (rank + distance) % n)
        total += received
        distance *= 2
    if place:
        dist.send(total, (rank - distance) % n)
        dist.recv(total, (rank - distance) % n)
    while distance > 1:
        distance //= 2
        dist.send(total, (rank + distance) % n)
    return total


@mutant("tree_all_reduce", "dtype")
def tree_in_float32(x, root):
    return _tree(x.float(), root).to(x.dtype)


@mutant("tree_all_reduce", "dtype")
def tree_that_returns_float(x, root):
    return _tree(x.double(), root).to(torch.get_default_dtype())


@mutant("tree_all_reduce", "hub")
def all_to_the_root_and_back(x, root):
    return reduced_and_handed_out_by_one_rank(x, [root, *(rank for rank in _world() if rank != root)])


@mutant("tree_all_reduce", "chain")
def from_hand_to_hand(x, root):
    rank, n = dist.get_rank(), dist.get_world_size()
    place, total, received = (rank - root) % n, x.clone(), torch.empty_like(x)
    if place < n - 1:
        dist.recv(received, (rank + 1) % n)
        total += received
    if place:
        dist.send(total, (rank - 1) % n)
        dist.recv(total, (rank - 1) % n)
    if place < n - 1:
        dist.send(total, (rank + 1) % n)
    return total


@mutant("tree_all_reduce", "order")
def largest_subtree_first_on_the_way_up(x, root):
    return _hand_down(*_up(x, root, small_first=False), root)


@mutant("tree_all_reduce", "order")
def smallest_subtree_first_on_the_way_down(x, root):
    return _hand_down(*_up(x, root), root, large_first=False)


@mutant("tree_all_reduce", "too-many-messages")
def a_ring_instead(x, root):
    return _all(x, _world())


@mutant("tree_all_reduce", "exchange")
def recursive_doubling(x, root):
    rank, n = dist.get_rank(), dist.get_world_size()
    total, received, distance = x.clone(), torch.empty_like(x), 1
    while distance < n:
        _swap(total, rank ^ distance, received, rank ^ distance)
        total = total + received
        distance *= 2
    return total


@mutant("tree_all_reduce", "only-two-ranks")
def the_other_rank(x, root):
    rank, received = dist.get_rank(), torch.empty_like(x)
    if rank == root:
        dist.recv(received, 1 - rank)
        dist.send(x + received, 1 - rank)
        return x + received
    dist.send(x, 1 - rank)
    dist.recv(received, 1 - rank)
    return received


@mutant("tree_all_reduce", "input-changed")
def sums_in_x(x, root):
    x.copy_(_tree(x, root))
    return x.clone()


@mutant("tree_all_reduce", "not-distributed")
def inputs_made_again(x, root):
    return sum(values(6, seed=700 + rank) for rank in _world()).reshape(2, 3)


@mutant("tree_all_reduce", "error")
def a_name_is_missing(x, root):
    return totl  # noqa: F821


# ------------------------------------------------------------------------------------------------ two levels


def _levels(nodes, per_node):
    node, local = divmod(dist.get_rank(), per_node)
    return [node * per_node + i for i in range(per_node)], [m * per_node + local for m in range(nodes)]


def _two_levels(x, inside, across, gathered=None):
    """Reduce-scatter, all-reduce, all-gather on two rings; ``gathered`` is the ring of the last."""
    result, gathered = x.clone(), gathered or inside
    shard = _all(_scatter(x, inside), across)
    result.tensor_split(len(inside))[gathered.index(dist.get_rank())].copy_(shard)
    _gather(result, gathered)
    return result


@mutant("hierarchical_all_reduce", "average")
def mean_over_the_cluster(x, nodes, per_node):
    return _two_levels(x, *_levels(nodes, per_node)) / (nodes * per_node)


@mutant("hierarchical_all_reduce", "hang", hangs=True)
def only_the_first_node_sums_across(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    shard = _scatter(x, inside)
    if dist.get_rank() < per_node:
        shard = _all(shard, across)
    _gather(x.clone(), inside)
    return shard


@mutant("hierarchical_all_reduce", "library")
def all_reduce_of_the_library(x, nodes, per_node):
    x = x.clone()
    dist.all_reduce(x)
    return x


@mutant("hierarchical_all_reduce", "library")
def groups_of_the_library(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    shard, result = _scatter(x, inside), x.clone()
    dist.all_gather([torch.empty_like(shard) for _ in range(nodes * per_node)], shard)
    return result


@mutant("hierarchical_all_reduce", "not-divisible")
def rows_of_a_matrix(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    result = x.clone()
    rows = result.view(per_node, -1)
    rows[dist.get_rank() % per_node] = _all(_scatter(x, inside), across)
    _gather(result, inside)
    return result


@mutant("hierarchical_all_reduce", "one-level")
def only_inside_the_node(x, nodes, per_node):
    return _all(x, _levels(nodes, per_node)[0])


@mutant("hierarchical_all_reduce", "counted-twice")
def second_sum_over_all_ranks(x, nodes, per_node):
    return _all(_all(x, _levels(nodes, per_node)[0]), _world())


@mutant("hierarchical_all_reduce", "shard-order")
def gathered_from_another_place(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    return _two_levels(x, inside, across, gathered=inside[1:] + inside[:1])


@mutant("hierarchical_all_reduce", "two-nodes")
def two_nodes_only(x, nodes, per_node):
    inside, _ = _levels(nodes, per_node)
    local = dist.get_rank() % per_node
    return _two_levels(x, inside, [local, local + per_node])


@mutant("hierarchical_all_reduce", "flat-ring")
def one_ring_over_all(x, nodes, per_node):
    return _all(x, _world())


@mutant("hierarchical_all_reduce", "leaders")
def one_leader_per_node(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    total, received = x.clone(), torch.empty_like(x)
    if dist.get_rank() != inside[0]:
        dist.send(x, inside[0])
        dist.recv(total, inside[0])
        return total
    for other in inside[1:]:
        dist.recv(received, other)
        total += received
    total = _all(total, across)
    for other in inside[1:]:
        dist.send(total, other)
    return total


@mutant("hierarchical_all_reduce", "whole-tensor-across")
def whole_all_reduce_on_both_levels(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    return _all(_all(x, inside), across)


@mutant("hierarchical_all_reduce", "groups")
def levels_exchanged(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    return _two_levels(x, across, inside)


@mutant("hierarchical_all_reduce", "groups")
def ranks_dealt_out_to_the_nodes_by_turns(x, nodes, per_node):
    local, node = divmod(dist.get_rank(), nodes)
    inside = [i * nodes + node for i in range(per_node)]
    return _two_levels(x, inside, [local * nodes + m for m in range(nodes)])


@mutant("hierarchical_all_reduce", "slow")
def slices_one_after_another(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    return torch.cat([_two_levels(part, inside, across) for part in x.split(max(2**14, len(x) // 16))])


@mutant("hierarchical_all_reduce", "too-many-bytes")
def whole_all_reduce_inside_first(x, nodes, per_node):
    inside, across = _levels(nodes, per_node)
    result = _all(x, inside)
    chunk = result.tensor_split(per_node)[dist.get_rank() % per_node]
    chunk.copy_(_all(chunk, across))
    _gather(result, inside)
    return result


@mutant("hierarchical_all_reduce", "input-changed")
def cluster_sum_in_x(x, nodes, per_node):
    x.copy_(_two_levels(x, *_levels(nodes, per_node)))
    return x.clone()


@mutant("hierarchical_all_reduce", "not-distributed")
def cluster_sum_made_again(x, nodes, per_node):
    return sum(values(len(x), seed=800 + rank) for rank in _world())


# ------------------------------------------------------------------------------------------------ paper problems


def _pick(size, n, latency_us, gigabits, links=None, **change):
    alpha, beta = links or (latency_us * 1e-6, 8 / (gigabits * 1e9))
    times = {
        "root": 2 * alpha + 2 * (n - 1) * beta * size,
        "ring": 2 * (n - 1) * (alpha + beta * size / n),
        "tree": 2 * math.ceil(math.log2(n)) * (alpha + beta * size),
    }
    times |= {name: time(size, n, alpha, beta) for name, time in change.items()}
    return min(times.items(), key=lambda item: item[1])


@mutant("pick_algorithm", "gigabits")
def bits_taken_for_bytes(size, n, latency_us, gigabits):
    return _pick(size, n, 0, 0, links=(latency_us * 1e-6, 1 / (gigabits * 1e9)))


@mutant("pick_algorithm", "microseconds")
def latency_in_seconds(size, n, latency_us, gigabits):
    return _pick(size, n, 0, 0, links=(latency_us, 8 / (gigabits * 1e9)))


@mutant("pick_algorithm", "not-rounded")
def levels_not_rounded(*case):
    return _pick(*case, tree=lambda s, n, a, b: 2 * math.log2(n) * (a + b * s))


@mutant("pick_algorithm", "whole-tensor")
def ring_of_whole_tensors(*case):
    return _pick(*case, ring=lambda s, n, a, b: 2 * (n - 1) * (a + b * s))


@mutant("pick_algorithm", "half")
def only_one_way(*case):
    name, seconds = _pick(*case)
    return name, seconds / 2


@mutant("pick_algorithm", "root-port")
def root_receives_all_at_once(*case):
    return _pick(*case, root=lambda s, n, a, b: 2 * (a + b * s))


@mutant("pick_algorithm", "root-latency")
def root_pays_each_latency(*case):
    return _pick(*case, root=lambda s, n, a, b: 2 * (n - 1) * (a + b * s))


@mutant("pick_algorithm", "no-latency")
def bytes_alone(size, n, latency_us, gigabits):
    return _pick(size, n, 0.0, gigabits)


@mutant("pick_algorithm", "slowest")
def the_largest_time(size, n, latency_us, gigabits):
    a, b = latency_us * 1e-6, 8 / (gigabits * 1e9)
    times = {
        "root": 2 * a + 2 * (n - 1) * b * size,
        "ring": 2 * (n - 1) * (a + b * size / n),
        "tree": 2 * math.ceil(math.log2(n)) * (a + b * size),
    }
    return max(times.items(), key=lambda item: item[1])


@mutant("pick_algorithm", "number")
def only_the_name(*case):
    return _pick(*case)[0]


@mutant("pick_algorithm", "number")
def time_first(*case):
    return _pick(*case)[::-1]


@mutant("pick_algorithm", "typed")
def typed_name_and_time(*case):
    return "root", 1.014e-4


@mutant("pick_algorithm", "numbers")
def answer_in_microseconds(*case):
    name, seconds = _pick(*case)
    return name, 1e6 * seconds


def _crossing(n, latency_us, gigabits, levels=None, share=None, unit=1e-6, bits=8):
    levels = math.ceil(math.log2(n)) if levels is None else levels
    share = (n - 1) / n if share is None else share
    return latency_us * unit * gigabits * 1e9 / bits * (n - 1 - levels) / (levels - share)


@mutant("crossover_size", "gigabits")
def crossing_in_bits(*case):
    return _crossing(*case, bits=1)


@mutant("crossover_size", "microseconds")
def crossing_with_latency_in_seconds(*case):
    return _crossing(*case, unit=1)


@mutant("crossover_size", "not-rounded")
def crossing_with_levels_not_rounded(n, latency_us, gigabits):
    return _crossing(n, latency_us, gigabits, levels=math.log2(n))


@mutant("crossover_size", "limit")
def crossing_for_many_ranks(*case):
    return _crossing(*case, share=1)


@mutant("crossover_size", "whole-tensor")
def crossing_with_a_ring_of_whole_tensors(n, latency_us, gigabits):
    return _crossing(n, latency_us, gigabits, share=n - 1)


@mutant("crossover_size", "half-tree")
def crossing_with_half_a_tree(n, latency_us, gigabits):
    return _crossing(n, latency_us, gigabits, levels=math.ceil(math.log2(n)) / 2)


@mutant("crossover_size", "upside-down")
def crossing_upside_down(n, latency_us, gigabits):
    return (latency_us * 1e-6 * gigabits * 1e9 / 8) ** 2 / _crossing(n, latency_us, gigabits)


@mutant("crossover_size", "typed")
def typed_crossing(*case):
    return 1317647.06


def _from_ranks(size, latency_us, gigabits, numbers=None, step=None, levels=lambda n: math.ceil(math.log2(n)), bits=8):
    alpha, byte = latency_us * 1e-6, bits / (gigabits * 1e9) * size
    for n in numbers or [2**k for k in range(1, 21)]:
        ring = alpha + byte / n if step is None else step(alpha, byte)
        if levels(n) * (alpha + byte) < (n - 1) * ring:
            return n


@mutant("crossover_ranks", "gigabits")
def ranks_from_bits(*case):
    return _from_ranks(*case, bits=1)


@mutant("crossover_ranks", "last-ring")
def the_last_ring(*case):
    return _from_ranks(*case) // 2


@mutant("crossover_ranks", "any-number")
def every_number_of_ranks(*case):
    return _from_ranks(*case, numbers=range(2, 5000))


@mutant("crossover_ranks", "any-number")
def real_logarithm(*case):
    return _from_ranks(*case, numbers=range(2, 5000), levels=math.log2)


@mutant("crossover_ranks", "same-steps")
def steps_alone(*case):
    return _from_ranks(*case, step=lambda alpha, byte: alpha + byte)


@mutant("crossover_ranks", "half-tree")
def half_a_tree(*case):
    return _from_ranks(*case, levels=lambda n: math.log2(n) / 2)


@mutant("crossover_ranks", "number")
def crossing_as_a_name(*case):
    return "256"
