"""The solutions of the exercises of lesson 02; what stands between the marks is what a learner writes."""

import torch
import torch.distributed as dist


def mean_and_variance(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of the numbers on all ranks.

    Parameters
    ----------
    x : tensor of shape (n,), float32
        The numbers of this rank; n differs between ranks and may be 0. Must not be changed.

    Returns
    -------
    mean, variance : scalar tensors, float64
        The same on every rank. The variance is divided by the number of all elements, not by
        that minus one.
    """
    ### BEGIN SOLUTION
    x = x.double()
    sums = torch.stack([x.new_tensor(x.numel()), x.sum(), (x * x).sum()])
    dist.all_reduce(sums)
    count, total, squares = sums
    mean = total / count
    return mean, squares / count - mean**2
    ### END SOLUTION


def ring_shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Send x to rank + by and return what rank - by sent; rank 0 follows the last rank.

    Parameters
    ----------
    x : contiguous tensor of any shape and dtype
        The same shape and dtype on every rank. Must not be changed.
    by : int
        The distance, from 1, the same on every rank; it may be N or more.

    Returns
    -------
    tensor: the x of rank - by, or the rank's own if the way round the ring leads back to it
    """
    ### BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    if by % n == 0:
        return x.clone()
    received = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, (rank + by) % n)
    receive = dist.P2POp(dist.irecv, received, (rank - by) % n)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()
    return received
    ### END SOLUTION


def ragged_all_gather(x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, which may differ in their number of rows.

    Parameters
    ----------
    x : tensor of shape (rows, d), float32
        d is the same on every rank, rows is not, and may be 0 on some or all. Must not be changed.

    Returns
    -------
    list of N tensors
        Number r is the x of rank r, of shape (rows of rank r, d).
    """
    ### BEGIN SOLUTION
    n, (rows, d) = dist.get_world_size(), x.shape
    lengths = torch.empty(n, dtype=torch.int64, device=x.device)
    dist.all_gather_single(lengths, torch.tensor([rows], device=x.device))
    longest = int(lengths.max())
    padded = x.new_zeros(longest, d)
    padded[:rows] = x
    gathered = x.new_empty(n * longest, d)
    dist.all_gather_single(gathered, padded)
    parts = gathered.view(n, longest, d)
    return [part[:length] for part, length in zip(parts, lengths.tolist(), strict=True)]
    ### END SOLUTION


def gradient_all_reduce_seconds(
    parameters: float, bytes_per_parameter: float, ranks: int, link_gigabits: float
) -> float:
    """Least time of a ring all-reduce of all gradients, in seconds.

    Parameters
    ----------
    parameters : float
        Number of parameters; each has one gradient.
    bytes_per_parameter : float
        Size of one gradient in bytes.
    ranks : int
        Number of ranks N.
    link_gigabits : float
        What each rank can send, in Gb/s (10⁹ bits per second); it can receive as much meanwhile.
    """
    ### BEGIN SOLUTION
    size = parameters * bytes_per_parameter
    sent = 2 * (ranks - 1) / ranks * size
    return sent / (link_gigabits * 1e9 / 8)
    ### END SOLUTION


def bandwidths(op: str, ranks: int, size: float, seconds: float) -> tuple[float, float]:
    """Algorithm and bus bandwidth of one call, in GB/s (10⁹ bytes per second).

    Parameters
    ----------
    op : str
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or "reduce".
    ranks : int
        Number of ranks N.
    size : float
        Message size S in bytes, as in nccl-tests.
    seconds : float
        Time t of the call.

    Returns
    -------
    algbw, busbw : float
    """
    ### BEGIN SOLUTION
    share = (ranks - 1) / ranks
    factor = {"all_reduce": 2 * share, "broadcast": 1.0, "reduce": 1.0}.get(op, share)
    algbw = size / seconds / 1e9
    return algbw, algbw * factor
    ### END SOLUTION


def all_gather_seconds(shard: float, ranks: int, both_directions: float) -> float:
    """Least time of an all-gather, in seconds.

    Parameters
    ----------
    shard : float
        Bytes that each rank holds before.
    ranks : int
        Number of ranks N.
    both_directions : float
        Bandwidth of a rank's links as on a data sheet, in GB/s: what it can send plus what it can
        receive.
    """
    ### BEGIN SOLUTION
    received = (ranks - 1) * shard
    return received / (both_directions / 2 * 1e9)
    ### END SOLUTION
