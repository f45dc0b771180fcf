"""The solutions of the exercises of lesson 01; what stands between the marks is what a learner writes."""

import statistics
import time

import torch
import torch.distributed as dist


def roofline_point(sheet_tflops, with_sparsity, memory_bandwidth, m, n, k):
    """Place the product of an m × k and a k × n matrix, dense, in bf16, on a GPU's roofline.

    Parameters
    ----------
    sheet_tflops, with_sparsity : float, bool
        Peak in bf16 on the data sheet, in TFLOP/s; does it count 2:4 sparsity, twice the dense one?
    memory_bandwidth : float
        GB/s (10⁹ bytes per second).
    m, n, k : int
        Sizes of the matrices.

    Returns
    -------
    ridge, intensity, attainable : float
        FLOP per byte at the ridge and of this product, and the TFLOP/s it can reach at most.
    """
    ### BEGIN SOLUTION
    dense = sheet_tflops * 1e12 / (2 if with_sparsity else 1)
    bandwidth = memory_bandwidth * 1e9
    intensity = 2 * m * n * k / (2 * (m * k + k * n + m * n))
    return dense / bandwidth, intensity, min(dense, intensity * bandwidth) / 1e12
    ### END SOLUTION


def fit_and_predict(sizes, seconds, unseen):
    """Fit t = alpha + beta · S to measurements, and predict the time of other sizes.

    Parameters
    ----------
    sizes : tensor of shape (n,), float64
        Message sizes in bytes, all different.
    seconds : tensor of shape (n, repeats), float64
        Measured times; a few in each row may be far too long.
    unseen : tensor of shape (m,), float64
        Other sizes, in bytes.

    Returns
    -------
    alpha, beta : float
        Seconds, and seconds per byte.
    predicted : tensor of shape (m,), float64
        Seconds for each of `unseen`.
    """
    ### BEGIN SOLUTION
    t = seconds.median(dim=1).values
    relative = torch.stack([1 / t, sizes / t], dim=1)
    alpha, beta = torch.linalg.lstsq(relative, torch.ones_like(t)[:, None]).solution.flatten()
    return alpha.item(), beta.item(), alpha + beta * unseen
    ### END SOLUTION


def ping_pong(x: torch.Tensor, repeats: int, clock=time.perf_counter) -> float | None:
    """Seconds that a message takes from rank 0 to rank 1, out of round trips. All ranks call it.

    x, of any shape and float32, is the message; rank 1 has a tensor of the same shape. Both may be
    overwritten. `repeats` round trips count; one more goes before them to warm up. Rank 0 returns
    half of the median round trip, all other ranks None.
    """
    ### BEGIN SOLUTION
    rank, times = dist.get_rank(), []
    for _ in range(repeats + 1):
        start = clock()
        if rank == 0:
            dist.send(x, dst=1)
            dist.recv(x, src=1)
        elif rank == 1:
            dist.recv(x, src=0)
            dist.send(x, dst=0)
        times.append(clock() - start)
    return statistics.median(times[1:]) / 2 if rank == 0 else None
    ### END SOLUTION


def widest_path(links, start: str, end: str) -> tuple[float, tuple[str, str]]:
    """Bandwidth of the widest path from start to end, and the link that limits it.

    `links` is a list of (device, device, bandwidth), with circles and never in two pieces. Returns
    the bandwidth and, in any order, the ends of a link of that path with just this bandwidth.
    """
    ### BEGIN SOLUTION
    reached_by = {start: None}
    while end not in reached_by:
        leaving = [link for link in links if (link[0] in reached_by) != (link[1] in reached_by)]
        fastest = max(leaving, key=lambda link: link[2])
        reached_by[fastest[fastest[0] in reached_by]] = fastest  # index 0 or 1: the new device
    path, device = [], end
    while device != start:
        path.append(reached_by[device])
        device = path[-1][path[-1][0] == device]  # the other end
    a, b, bandwidth = min(path, key=lambda link: link[2])
    return bandwidth, (a, b)
    ### END SOLUTION


def gradient_seconds(parameters, nodes, per_node, nvlink_total, ports, port_gigabits):
    """Least time to add up gradients of 2 bytes by rings, on one node and on all nodes.

    Parameters
    ----------
    parameters : float
        Number of parameters; each has one gradient.
    nodes, per_node : int
        Number of nodes, and of GPUs in each.
    nvlink_total : float
        NVLink of one GPU, both directions added, in GB/s.
    ports, port_gigabits : int, float
        Network ports of a node, used side by side, and what each carries one way, in Gb/s.

    Returns
    -------
    one_node, all_nodes : float
        Seconds.
    """
    ### BEGIN SOLUTION
    inside, across = nvlink_total / 2 * 1e9, ports * port_gigabits / 8 * 1e9
    one, every = (2 * (n - 1) / n * 2 * parameters for n in (per_node, nodes * per_node))
    return one / inside, every / min(inside, across)
    ### END SOLUTION
