"""The solutions of the exercises of lesson 05; what stands between the marks is what a learner writes."""

import torch
import torch.distributed as dist


def top_k_mean(gradient: torch.Tensor, residual: torch.Tensor, k: int) -> torch.Tensor:
    """Mean over the ranks of the k largest elements of gradient + residual.

    Parameters
    ----------
    gradient : tensor of any shape, float64
        The same shape on every rank. Must not be changed.
    residual : tensor of the same shape and dtype
        What this rank has not sent so far; overwritten with what it has not sent now.
    k : int
        From 1 to the number of elements.
    """
    ### BEGIN SOLUTION
    total = (gradient + residual).flatten()
    indices = total.abs().topk(k).indices
    values = total[indices]
    residual.copy_(total.index_fill(0, indices, 0).view_as(residual))
    n = dist.get_world_size()
    all_values, all_indices = values.new_empty(n * k), indices.new_empty(n * k)
    dist.all_gather_single(all_values, values)
    dist.all_gather_single(all_indices, indices)
    mean = torch.zeros_like(total).index_add_(0, all_indices, all_values / n)
    return mean.view_as(gradient)
    ### END SOLUTION


def amdahl_and_gustafson(
    seconds_1: float, seconds_n: float, n: int, ranks: int
) -> tuple[float, float, float, float]:
    """Serial fraction and speed-ups out of two measured times of one step with the same batch.

    Parameters
    ----------
    seconds_1, seconds_n : float
        On 1 and on n ranks.
    ranks : int
        Number of ranks to predict for.

    Returns
    -------
    serial, strong, limit, weak : float
        Serial fraction; speed-up on `ranks` and on infinitely many ranks with the same batch;
        speed-up on `ranks` with a batch that grows in proportion.
    """
    ### BEGIN SOLUTION
    s = (seconds_n / seconds_1 - 1 / n) / (1 - 1 / n)
    return s, 1 / (s + (1 - s) / ranks), 1 / s, s + (1 - s) * ranks
    ### END SOLUTION


def cost_of_run(
    tokens: float,
    tokens_per_second: float,
    gpus: int,
    efficiency: float,
    lost: float,
    dollars: float,
) -> tuple[float, float]:
    """Hours and dollars of a training run.

    Parameters
    ----------
    tokens, tokens_per_second : float
        Of the whole run; of one GPU at efficiency 1.
    gpus, efficiency : int, float
        Number of GPUs; each works at `efficiency` times `tokens_per_second`.
    lost : float
        Share of all hours in which nothing is gained, 0 to 1.
    dollars : float
        Price of one GPU for one hour.
    """
    ### BEGIN SOLUTION
    hours = tokens / (tokens_per_second * gpus * efficiency) / 3600 / (1 - lost)
    return hours, hours * gpus * dollars
    ### END SOLUTION


def best_buckets(
    gradient_bytes: float,
    tensors: int,
    backward_ms: float,
    ranks: int,
    latency_us: float,
    gigabits: float,
) -> tuple[int, float]:
    """Number of buckets, 1 to `tensors`, with which the last all-reduce ends first; and when.

    The time is in milliseconds from the start of backward.
    """

    ### BEGIN SOLUTION
    def finish(n):
        piece = backward_ms * 1e-3 / n
        travels = gradient_bytes / n / ranks * 8 / (gigabits * 1e9)
        one = 2 * (ranks - 1) * (latency_us * 1e-6 + travels)
        return 1e3 * (piece + (n - 1) * max(piece, one) + one)

    n = min(range(1, tensors + 1), key=finish)
    return n, finish(n)
    ### END SOLUTION


def mfu_and_hfu(
    parameters: float, tokens_per_second: float, gpus: int, peak_tflops: float, recomputed: float
) -> tuple[float, float, float]:
    """Utilizations of a training job.

    Parameters
    ----------
    tokens_per_second : float
        Of all GPUs together.
    peak_tflops : float
        Dense TFLOP/s that one GPU could do.
    recomputed : float
        Share of the forward pass that is computed a second time, 0 to 1.

    Returns
    -------
    mfu, hfu, faster : float
        Two shares, 0 to 1; tokens per second at the same HFU with nothing computed a second time.
    """
    ### BEGIN SOLUTION
    rate = tokens_per_second / gpus * parameters / (peak_tflops * 1e12)
    hfu = (6 + 2 * recomputed) * rate
    return 6 * rate, hfu, tokens_per_second * hfu / rate / 6
    ### END SOLUTION


def noise_scale(gradient: torch.Tensor, samples: int) -> float:
    """Noise scale of the gradients, in samples; the same number on every rank.

    Parameters
    ----------
    gradient : tensor of any shape, float64
        Mean gradient of this rank's samples. Must not be changed.
    samples : int
        Samples of each rank. There are at least two ranks.
    """
    ### BEGIN SOLUTION
    n = dist.get_world_size()
    own, mean = gradient.square().sum(), gradient / n
    dist.all_reduce(own)
    dist.all_reduce(mean)
    own, whole = own / n, mean.square().sum()
    signal = (n * whole - own) / (n - 1)
    noise = (own - whole) * n * samples / (n - 1)
    return (noise / signal).item()
    ### END SOLUTION
