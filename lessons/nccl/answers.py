"""The solutions of the exercises of lesson 03; what stands between the marks is what a learner writes."""

import math

import torch
import torch.distributed as dist


def ring_reduce_scatter(x: torch.Tensor, ring: list[int]) -> torch.Tensor:
    """Chunk p of the sum of x over the ring, on the rank at place p.

    Parameters
    ----------
    x : tensor of shape (n,), any dtype
        The same n on every rank; n may be smaller than the ring. Must not be changed.
    ring : list of N ranks
        In the order of the ring; the calling rank is one of them. N may be 1.
    """
    ### BEGIN SOLUTION
    n, place = len(ring), ring.index(dist.get_rank())
    chunks = x.clone().tensor_split(n)
    for step in range(1, n):
        into = chunks[(place + step + 1) % n]
        received = torch.empty_like(into)
        send = dist.P2POp(dist.isend, chunks[(place + step) % n], ring[place - 1])
        receive = dist.P2POp(dist.irecv, received, ring[(place + 1) % n])
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()
        into += received
    return chunks[place]
    ### END SOLUTION


def ring_all_gather(x: torch.Tensor, ring: list[int]) -> None:
    """Fill x, in place, with the chunks of all ranks of the ring.

    Parameters
    ----------
    x : contiguous tensor of shape (n,), any dtype
        The same n on every rank; n may be smaller than the ring. At place p only chunk p of
        x.tensor_split(N) is valid before the call; afterwards all of x is, and it is the same on
        every rank.
    ring : list of N ranks
        In the order of the ring; the calling rank is one of them. N may be 1.
    """
    ### BEGIN SOLUTION
    n, place = len(ring), ring.index(dist.get_rank())
    chunks = x.tensor_split(n)
    for step in range(n - 1):
        out, into = chunks[(place + step) % n], chunks[(place + step + 1) % n]
        send = dist.P2POp(dist.isend, out, ring[place - 1])
        receive = dist.P2POp(dist.irecv, into, ring[(place + 1) % n])
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()
    ### END SOLUTION


def ring_all_reduce(x: torch.Tensor, ring: list[int]) -> torch.Tensor:
    """Sum of x over the ring, the same on each of its ranks.

    Parameters
    ----------
    x : contiguous tensor of any shape and dtype
        The same shape on every rank; it may have fewer elements than the ring has ranks. Must not
        be changed.
    ring : list of N ranks
        In the order of the ring; the calling rank is one of them. N may be 1.
    """
    ### BEGIN SOLUTION
    flat = x.flatten().clone()
    mine = flat.tensor_split(len(ring))[ring.index(dist.get_rank())]
    mine.copy_(ring_reduce_scatter(flat, ring))
    ring_all_gather(flat, ring)
    return flat.reshape(x.shape)
    ### END SOLUTION


def tree_all_reduce(x: torch.Tensor, root: int) -> torch.Tensor:
    """Sum of x over all ranks, the same on each; the partial sums meet at the rank `root`.

    x is contiguous, of any shape and dtype, the same on every rank. It must not be changed.
    """
    ### BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    place, total, received = (rank - root) % n, x.clone(), torch.empty_like(x)
    distance = 1
    while distance < n and place % (2 * distance) == 0:  # up: the smallest subtree comes first
        if place + distance < n:
            dist.recv(received, (rank + distance) % n)
            total += received
        distance *= 2
    if place:
        dist.send(total, (rank - distance) % n)
        dist.recv(total, (rank - distance) % n)
    while distance > 1:  # down: the largest comes first
        distance //= 2
        if place + distance < n:
            dist.send(total, (rank + distance) % n)
    return total
    ### END SOLUTION


def hierarchical_all_reduce(x: torch.Tensor, nodes: int, per_node: int) -> torch.Tensor:
    """Sum of x over all ranks, the same on each, with little traffic between nodes.

    Parameters
    ----------
    x : contiguous tensor of shape (n,), float32
        The same n on every rank, not always a multiple of per_node. Must not be changed.
    nodes, per_node : int
        m nodes with g ranks each; rank // per_node is the node.
    """
    ### BEGIN SOLUTION
    node, local = divmod(dist.get_rank(), per_node)
    inside = [node * per_node + i for i in range(per_node)]
    across = [m * per_node + local for m in range(nodes)]
    result = x.clone()
    shard = ring_all_reduce(ring_reduce_scatter(x, inside), across)
    result.tensor_split(per_node)[local].copy_(shard)
    ring_all_gather(result, inside)
    return result
    ### END SOLUTION


def mended_ring_all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Sum of x over all ranks, the same on each.

    Parameters
    ----------
    x : tensor of shape (n,), any dtype
        The same n on every rank; n may be smaller than the world. Must not be changed.
    """
    ### BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    result = x.clone()
    chunks = result.tensor_split(n)  # always n of them
    for step in range(2 * (n - 1)):
        out, into = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        received = torch.empty_like(into)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % n)  # from the left
        send = dist.P2POp(dist.isend, out, (rank + 1) % n)
        for request in dist.batch_isend_irecv([receive, send]):
            request.wait()
        into.copy_(into + received if step < n - 1 else received)
    return result
    ### END SOLUTION


def pick_algorithm(
    size: float, ranks: int, latency_us: float, gigabits: float
) -> tuple[str, float]:
    """The fastest all-reduce, "root", "ring" or "tree", and its time in seconds.

    Parameters
    ----------
    size : float
        Bytes of the tensor.
    ranks : int
        Number of ranks N, not always a power of two.
    latency_us, gigabits : float
        Of every link: α in µs, bandwidth in Gb/s each way.
    """
    ### BEGIN SOLUTION
    alpha, beta = latency_us * 1e-6, 8 / (gigabits * 1e9)
    levels = math.ceil(math.log2(ranks))
    root = 2 * (ranks - 1) * (alpha + beta * size)
    ring = 2 * (ranks - 1) * (alpha + beta * size / ranks)
    tree = 2 * levels * (alpha + beta * size)
    return min([("root", root), ("ring", ring), ("tree", tree)], key=lambda pair: pair[1])
    ### END SOLUTION


def crossover_size(ranks: int, latency_us: float, gigabits: float) -> float:
    """Size in bytes at which ring and tree all-reduce take the same time.

    Parameters
    ----------
    ranks : int
        Number of ranks N, 5 or more, not always a power of two.
    latency_us, gigabits : float
        Of every link: α in µs, bandwidth in Gb/s each way.
    """
    ### BEGIN SOLUTION
    alpha, beta = latency_us * 1e-6, 8 / (gigabits * 1e9)
    levels = math.ceil(math.log2(ranks))
    latencies_saved = ranks - 1 - levels
    bytes_added = levels - (ranks - 1) / ranks
    return alpha / beta * latencies_saved / bytes_added
    ### END SOLUTION


def crossover_ranks(size: float, latency_us: float, gigabits: float) -> int:
    """The smallest power of two N at which a tree all-reduce takes less time than a ring.

    Parameters
    ----------
    size : float
        Bytes of the tensor.
    latency_us, gigabits : float
        Of every link: α in µs, bandwidth in Gb/s each way.
    """
    ### BEGIN SOLUTION
    step, byte = latency_us * 1e-6, 8 / (gigabits * 1e9) * size
    n, levels = 2, 1
    while levels * (step + byte) >= (n - 1) * (step + byte / n):
        n, levels = 2 * n, levels + 1
    return n
    ### END SOLUTION
