"""Usual wrong answers to the exercises on interconnects, each with the hint that it must be given."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from exercise_cases import Mutant, register_of

MUTANTS: list[Mutant] = []
mutant = register_of(MUTANTS)

# ------------------------------------------------------------------------------------------------ data sheets


@mutant("copy_seconds", "gigabits")
def bits_taken_for_bytes(size, ports, gigabits, nvlink, pcie):
    return size / (ports * gigabits * 1e9), size / (nvlink / 2 * 1e9), size / (pcie * 1e9)


@mutant("copy_seconds", "gigabits")
def times_eight_not_divided(size, ports, gigabits, nvlink, pcie):
    return size / (ports * gigabits * 8e9), size / (nvlink / 2 * 1e9), size / (pcie * 1e9)


@mutant("copy_seconds", "one-port")
def a_single_port(size, ports, gigabits, nvlink, pcie):
    return size / (gigabits / 8 * 1e9), size / (nvlink / 2 * 1e9), size / (pcie * 1e9)


@mutant("copy_seconds", "directions")
def both_directions_for_one(size, ports, gigabits, nvlink, pcie):
    return size / (ports * gigabits / 8 * 1e9), size / (nvlink * 1e9), size / (pcie * 1e9)


@mutant("copy_seconds", "pcie")
def everything_halved(size, ports, gigabits, nvlink, pcie):
    return size / (ports * gigabits / 8 * 1e9), size / (nvlink / 2 * 1e9), size / (pcie / 2 * 1e9)


@mutant("copy_seconds", "gibi")
def powers_of_two(size, ports, gigabits, nvlink, pcie):
    return tuple(size / (rate * 2**30) for rate in (ports * gigabits / 8, nvlink / 2, pcie))


@mutant("copy_seconds", "typed")
def typed_numbers(size, ports, gigabits, nvlink, pcie):
    return 14 / 400, 14 / 450, 14 / 63


@mutant("copy_seconds", "number")
def only_the_network(size, ports, gigabits, nvlink, pcie):
    return size / (ports * gigabits / 8 * 1e9)


@mutant("copy_seconds", "numbers")
def milliseconds(size, ports, gigabits, nvlink, pcie):
    return tuple(size / (rate * 1e6) for rate in (ports * gigabits / 8, nvlink / 2, pcie))


# ------------------------------------------------------------------------------------------------ roofline


def _point(dense, bandwidth, flop, moved, roof=min):
    return dense / bandwidth, flop / moved, roof(dense, flop / moved * bandwidth) / 1e12


def _dense(sheet, sparse):
    return sheet * 1e12 / (2 if sparse else 1)


def _moved(m, n, k):
    return 2 * (m * k + k * n + m * n)


@mutant("roofline_point", "sparsity")
def peak_with_sparsity(sheet, sparse, bandwidth, m, n, k):
    return _point(sheet * 1e12, bandwidth * 1e9, 2 * m * n * k, _moved(m, n, k))


@mutant("roofline_point", "sparsity")
def always_halved(sheet, sparse, bandwidth, m, n, k):
    return _point(sheet * 1e12 / 2, bandwidth * 1e9, 2 * m * n * k, _moved(m, n, k))


@mutant("roofline_point", "multiply")
def additions_not_counted(sheet, sparse, bandwidth, m, n, k):
    return _point(_dense(sheet, sparse), bandwidth * 1e9, m * n * k, _moved(m, n, k))


@mutant("roofline_point", "result")
def result_not_written(sheet, sparse, bandwidth, m, n, k):
    return _point(_dense(sheet, sparse), bandwidth * 1e9, 2 * m * n * k, 2 * (m * k + k * n))


@mutant("roofline_point", "elements")
def numbers_for_bytes(sheet, sparse, bandwidth, m, n, k):
    return _point(_dense(sheet, sparse), bandwidth * 1e9, 2 * m * n * k, _moved(m, n, k) / 2)


@mutant("roofline_point", "peak-only")
def higher_of_two_roofs(sheet, sparse, bandwidth, m, n, k):
    return _point(_dense(sheet, sparse), bandwidth * 1e9, 2 * m * n * k, _moved(m, n, k), max)


@mutant("roofline_point", "memory-only")
def memory_roof_alone(sheet, sparse, bandwidth, m, n, k):
    return _point(_dense(sheet, sparse), bandwidth * 1e9, 2 * m * n * k, _moved(m, n, k), lambda peak, memory: memory)


@mutant("roofline_point", "tera")
def flop_per_second(sheet, sparse, bandwidth, m, n, k):
    *place, attainable = _point(_dense(sheet, sparse), bandwidth * 1e9, 2 * m * n * k, _moved(m, n, k))
    return *place, attainable * 1e12


@mutant("roofline_point", "numbers")
def ridge_upside_down(sheet, sparse, bandwidth, m, n, k):
    ridge, *rest = _point(_dense(sheet, sparse), bandwidth * 1e9, 2 * m * n * k, _moved(m, n, k))
    return 1 / ridge, *rest


# ------------------------------------------------------------------------------------------------ fit


def _fit(sizes, times, weights):
    columns = torch.stack([weights, sizes * weights], dim=1)
    return torch.linalg.lstsq(columns, (times * weights)[:, None]).solution.flatten().tolist()


def _predicted(alpha, beta, unseen):
    return alpha, beta, alpha + beta * unseen


@mutant("fit_and_predict", "absolute")
def least_squares_of_medians(sizes, seconds, unseen):
    times = seconds.median(dim=1).values
    return _predicted(*_fit(sizes, times, torch.ones_like(times)), unseen)


@mutant("fit_and_predict", "absolute")
def least_squares_of_everything(sizes, seconds, unseen):
    sizes, times = sizes.repeat_interleave(seconds.shape[1]), seconds.flatten()
    return _predicted(*_fit(sizes, times, torch.ones_like(times)), unseen)


@mutant("fit_and_predict", "outliers")
def mean_of_each_row(sizes, seconds, unseen):
    times = seconds.mean(dim=1)
    return _predicted(*_fit(sizes, times, 1 / times), unseen)


def _through_the_ends(sizes, times, unseen):
    beta = ((times[-1] - times[0]) / (sizes[-1] - sizes[0])).item()
    return _predicted(times[0].item() - beta * sizes[0].item(), beta, unseen)


@mutant("fit_and_predict", "two-sizes")
def line_through_the_medians_of_smallest_and_largest(sizes, seconds, unseen):
    return _through_the_ends(sizes, seconds.median(dim=1).values, unseen)


@mutant("fit_and_predict", "two-sizes")
def line_through_the_best_of_smallest_and_largest(sizes, seconds, unseen):
    return _through_the_ends(sizes, seconds.min(dim=1).values, unseen)


@mutant("fit_and_predict", "no-alpha")
def bandwidth_alone(sizes, seconds, unseen):
    return _predicted(0.0, (seconds.median(dim=1).values / sizes).median().item(), unseen)


@mutant("fit_and_predict", "bandwidth")
def bytes_per_second(sizes, seconds, unseen):
    times = seconds.median(dim=1).values
    alpha, beta = _fit(sizes, times, 1 / times)
    return alpha, 1 / beta, alpha + beta * unseen


@mutant("fit_and_predict", "swapped")
def beta_first(sizes, seconds, unseen):
    times = seconds.median(dim=1).values
    alpha, beta = _fit(sizes, times, 1 / times)
    return beta, alpha, alpha + beta * unseen


@mutant("fit_and_predict", "prediction")
def alpha_forgotten_in_the_end(sizes, seconds, unseen):
    times = seconds.median(dim=1).values
    alpha, beta = _fit(sizes, times, 1 / times)
    return alpha, beta, beta * unseen


@mutant("fit_and_predict", "triple")
def only_the_prediction(sizes, seconds, unseen):
    times = seconds.median(dim=1).values
    return _predicted(*_fit(sizes, times, 1 / times), unseen)[2]


@mutant("fit_and_predict", "value")
def kibibytes(sizes, seconds, unseen):
    times = seconds.median(dim=1).values
    return _predicted(*_fit(sizes / 1024, times, 1 / times), unseen / 1024)


@mutant("fit_and_predict", "error")
def a_shape_that_does_not_fit(sizes, seconds, unseen):
    return _predicted(*_fit(sizes, seconds, 1 / seconds), unseen)


# ------------------------------------------------------------------------------------------------ ping-pong


def _round_trip(x):
    if dist.get_rank() == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    elif dist.get_rank() == 1:
        dist.recv(x, 0)
        dist.send(x, 0)


def _times(x, trips, clock, play=_round_trip):
    times = []
    for _ in range(trips):
        start = clock()
        play(x)
        times.append(clock() - start)
    return times


@mutant("ping_pong", "not-halved")
def whole_round_trip(x, repeats, clock):
    return statistics.median(_times(x, repeats + 1, clock)[1:])


@mutant("ping_pong", "warm-up-counted")
def median_with_the_first(x, repeats, clock):
    return statistics.median(_times(x, repeats + 1, clock)) / 2


@mutant("ping_pong", "no-warm-up")
def as_many_round_trips_as_repeats(x, repeats, clock):
    return statistics.median(_times(x, repeats, clock)) / 2


@mutant("ping_pong", "count")
def two_to_warm_up(x, repeats, clock):
    return statistics.median(_times(x, repeats + 2, clock)[2:]) / 2


@mutant("ping_pong", "mean")
def mean_of_round_trips(x, repeats, clock):
    return statistics.mean(_times(x, repeats + 1, clock)[1:]) / 2


@mutant("ping_pong", "mean")
def one_look_before_and_one_after_all(x, repeats, clock):
    _round_trip(x)
    start = clock()
    for _ in range(repeats):
        _round_trip(x)
    return (clock() - start) / repeats / 2


@mutant("ping_pong", "minimum")
def fastest_round_trip(x, repeats, clock):
    return min(_times(x, repeats + 1, clock)[1:]) / 2


@mutant("ping_pong", "send-only")
def only_the_send_is_timed(x, repeats, clock):
    times = []
    for _ in range(repeats + 1):
        start = clock()
        if dist.get_rank() == 0:
            dist.send(x, 1)
        times.append(clock() - start)
        if dist.get_rank() == 0:
            dist.recv(x, 1)
        elif dist.get_rank() == 1:
            dist.recv(x, 0)
            dist.send(x, 0)
    return statistics.median(times[1:])


@mutant("ping_pong", "no-echo")
def nothing_comes_back(x, repeats, clock):
    def one_way(x):
        if dist.get_rank() == 0:
            dist.send(x, 1)
        elif dist.get_rank() == 1:
            dist.recv(x, 0)

    return statistics.median(_times(x, repeats + 1, clock, one_way)[1:])


@mutant("ping_pong", "size")
def a_short_answer(x, repeats, clock):
    def echo_of_one(x):
        if dist.get_rank() == 0:
            dist.send(x, 1)
            dist.recv(x[:1, :1], 1)
        elif dist.get_rank() == 1:
            dist.recv(x, 0)
            dist.send(x[:1, :1], 0)

    return statistics.median(_times(x, repeats + 1, clock, echo_of_one)[1:]) / 2


@mutant("ping_pong", "exchange")
def both_at_once(x, repeats, clock):
    def exchange(x):
        other = 1 - dist.get_rank()
        if other >= 0:
            received = torch.empty_like(x)
            calls = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, received, other)]
            for request in dist.batch_isend_irecv(calls):
                request.wait()

    return statistics.median(_times(x, repeats + 1, clock, exchange)[1:]) / 2


@mutant("ping_pong", "collective")
def broadcasts_there_and_back(x, repeats, clock):
    def two_broadcasts(x):
        dist.broadcast(x, src=0)
        dist.broadcast(x, src=1)

    return statistics.median(_times(x, repeats + 1, clock, two_broadcasts)[1:]) / 2


@mutant("ping_pong", "bystander")
def rank_0_plays_with_everybody(x, repeats, clock):
    times = []
    for _ in range(repeats + 1):
        for other in range(1, dist.get_world_size()):
            start = clock()
            if dist.get_rank() == 0:
                dist.send(x, other)
                dist.recv(x, other)
            elif dist.get_rank() == other:
                dist.recv(x, 0)
                dist.send(x, 0)
            times.append(clock() - start)
    return statistics.median(times[dist.get_world_size() - 1 :]) / 2


@mutant("ping_pong", "not-distributed")
def no_message_at_all(x, repeats, clock):
    return statistics.median(_times(x, repeats + 1, clock, lambda x: x.clone())[1:]) / 2


@mutant("ping_pong", "seconds")
def no_return_statement(x, repeats, clock):
    _times(x, repeats + 1, clock)


@mutant("ping_pong", "value")
def microseconds(x, repeats, clock):
    return statistics.median(_times(x, repeats + 1, clock)[1:]) / 2 * 1e6


@mutant("ping_pong", "hang", hangs=True)
def both_receive_first(x, repeats, clock):
    def waits(x):
        other = 1 - dist.get_rank()
        if other >= 0:
            dist.recv(x, other)
            dist.send(x, other)

    return statistics.median(_times(x, repeats + 1, clock, waits)[1:]) / 2


# ------------------------------------------------------------------------------------------------ widest path


def _neighbours(links):
    found = {}
    for a, b, bandwidth in links:
        found.setdefault(a, []).append((b, bandwidth, (a, b)))
        found.setdefault(b, []).append((a, bandwidth, (a, b)))
    return found


def _all_paths(neighbours, here, end, seen=()):
    """Every path as a list of (bandwidth, link); for small graphs, or the first few thousand."""
    if here == end:
        yield []
        return
    for other, bandwidth, link in neighbours[here]:
        if other not in seen and other != here:
            for rest in _all_paths(neighbours, other, end, (*seen, here)):
                yield [(bandwidth, link), *rest]


def _widest(links, start, end):
    paths = _all_paths(_neighbours(links), start, end)
    return max(paths, key=lambda path: (min(path)[0], -len(path)))


@mutant("widest_path", "fewest-hops")
def fewest_links(links, start, end):
    path = min(_all_paths(_neighbours(links), start, end), key=len)
    return min(path)


@mutant("widest_path", "series")
def seconds_added_up(links, start, end):
    path = _widest(links, start, end)
    return 1 / sum(1 / bandwidth for bandwidth, _ in path), min(path)[1]


@mutant("widest_path", "sum")
def bandwidths_added_up(links, start, end):
    path = _widest(links, start, end)
    return sum(bandwidth for bandwidth, _ in path), min(path)[1]


@mutant("widest_path", "average")
def mean_of_the_links(links, start, end):
    path = _widest(links, start, end)
    return sum(bandwidth for bandwidth, _ in path) / len(path), min(path)[1]


@mutant("widest_path", "first-link")
def link_that_leaves_the_start(links, start, end):
    return _widest(links, start, end)[0]


@mutant("widest_path", "fastest-link")
def fastest_link_of_the_path(links, start, end):
    return max(_widest(links, start, end))


@mutant("widest_path", "slowest-of-all")
def slowest_link_anywhere(links, start, end):
    a, b, bandwidth = min(links, key=lambda link: link[2])
    return bandwidth, (a, b)


@mutant("widest_path", "greedy")
def fastest_link_at_each_device(links, start, end):
    neighbours, here, seen, taken = _neighbours(links), start, {start}, []
    while here != end:
        bandwidth, here, link = max((b, o, link) for o, b, link in neighbours[here] if o not in seen)
        seen.add(here)
        taken.append((bandwidth, link))
    return min(taken)


@mutant("widest_path", "direction")
def links_as_one_way_streets(links, start, end):
    onward = {}
    for a, b, bandwidth in links:
        onward.setdefault(a, []).append((b, bandwidth, (a, b)))
    for device in {b for _, b, _ in links}:
        onward.setdefault(device, [])
    path = max(_all_paths(onward, start, end), key=min)
    return min(path)


@mutant("widest_path", "direction")
def no_path_by_one_way_streets(links, start, end):
    width = {start: float("inf")}
    came = {}
    for _ in links:
        for a, b, bandwidth in links:
            if a in width and min(width[a], bandwidth) > width.get(b, 0):
                width[b] = min(width[a], bandwidth)
                came[b] = (a, b) if bandwidth <= width[a] else came[a]
    return (width[end], came[end]) if end in width else None


@mutant("widest_path", "bottleneck")
def last_link_named(links, start, end):
    path = _widest(links, start, end)
    return min(path)[0], path[0][1]


@mutant("widest_path", "pair")
def only_the_bandwidth(links, start, end):
    return min(_widest(links, start, end))[0]


@mutant("widest_path", "value")
def gigabytes(links, start, end):
    bandwidth, link = min(_widest(links, start, end))
    return bandwidth / 1e9, link


@mutant("widest_path", "error")
def circles_are_walked_for_ever(links, start, end):
    neighbours = _neighbours(links)

    def widest(here):
        return float("inf") if here == end else max(min(b, widest(other)) for other, b, _ in neighbours[here])

    return widest(start), (start, end)


# ------------------------------------------------------------------------------------------------ gradients


def _sent(n, parameters, width=2):
    return 2 * (n - 1) / n * width * parameters


def _speeds(nvlink, ports, gigabits):
    return nvlink / 2 * 1e9, ports * gigabits / 8 * 1e9


@mutant("gradient_seconds", "directions")
def nvlink_both_ways(p, nodes, per_node, nvlink, ports, gigabits):
    inside, across = _speeds(2 * nvlink, ports, gigabits)
    return _sent(per_node, p) / inside, _sent(nodes * per_node, p) / min(inside, across)


@mutant("gradient_seconds", "gigabits")
def network_in_bits(p, nodes, per_node, nvlink, ports, gigabits):
    inside, across = _speeds(nvlink, ports, 8 * gigabits)
    return _sent(per_node, p) / inside, _sent(nodes * per_node, p) / min(inside, across)


@mutant("gradient_seconds", "one-port")
def one_port_of_the_node(p, nodes, per_node, nvlink, ports, gigabits):
    inside, across = _speeds(nvlink, 1, gigabits)
    return _sent(per_node, p) / inside, _sent(nodes * per_node, p) / min(inside, across)


@mutant("gradient_seconds", "fp32")
def four_bytes_each(p, nodes, per_node, nvlink, ports, gigabits):
    inside, across = _speeds(nvlink, ports, gigabits)
    return _sent(per_node, p, 4) / inside, _sent(nodes * per_node, p, 4) / min(inside, across)


@mutant("gradient_seconds", "no-factor")
def size_over_bandwidth(p, nodes, per_node, nvlink, ports, gigabits):
    inside, across = _speeds(nvlink, ports, gigabits)
    return 2 * p / inside, 2 * p / min(inside, across)


@mutant("gradient_seconds", "half")
def one_way_only(p, nodes, per_node, nvlink, ports, gigabits):
    inside, across = _speeds(nvlink, ports, gigabits)
    return _sent(per_node, p) / 2 / inside, _sent(nodes * per_node, p) / 2 / min(inside, across)


@mutant("gradient_seconds", "limit")
def twice_the_size(p, nodes, per_node, nvlink, ports, gigabits):
    inside, across = _speeds(nvlink, ports, gigabits)
    return 4 * p / inside, 4 * p / min(inside, across)


@mutant("gradient_seconds", "node-size")
def gpus_of_one_node(p, nodes, per_node, nvlink, ports, gigabits):
    inside, across = _speeds(nvlink, ports, gigabits)
    return _sent(per_node, p) / inside, _sent(per_node, p) / min(inside, across)


@mutant("gradient_seconds", "one-after-another")
def times_added_up(p, nodes, per_node, nvlink, ports, gigabits):
    inside, across = _speeds(nvlink, ports, gigabits)
    every = _sent(nodes * per_node, p)
    return _sent(per_node, p) / inside, every / inside + every / across


@mutant("gradient_seconds", "fastest")
def faster_of_the_two(p, nodes, per_node, nvlink, ports, gigabits):
    inside, across = _speeds(nvlink, ports, gigabits)
    return _sent(per_node, p) / inside, _sent(nodes * per_node, p) / max(inside, across)


@mutant("gradient_seconds", "network-only")
def ports_alone(p, nodes, per_node, nvlink, ports, gigabits):
    inside, across = _speeds(nvlink, ports, gigabits)
    return _sent(per_node, p) / inside, _sent(nodes * per_node, p) / across
