"""The solutions of the exercises of lesson 04; what stands between the marks is what a learner writes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def data_parallel(module: nn.Module):
    """Let all ranks train `module` as one.

    Returns
    -------
    finish : callable
        Called without arguments after each backward; leaves in every trained parameter's grad the
        mean over the ranks, also where this rank, but not every rank, has none.
    """
    ### BEGIN SOLUTION
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), src=0)

    def finish():
        for p in module.parameters():
            if p.requires_grad:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    return finish
    ### END SOLUTION


def in_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Group parameters, in the order given, into buckets of at most `bucket_bytes` bytes.

    A parameter larger than that makes a bucket of its own. All parameters of a bucket have the
    same dtype. `parameters` is not changed.
    """
    ### BEGIN SOLUTION
    buckets, filling = [], {}
    for p in parameters:
        bucket = filling.get(p.dtype)
        if bucket is None or sum(q.nbytes for q in bucket) + p.nbytes > bucket_bytes:
            bucket = filling[p.dtype] = []
            buckets.append(bucket)
        bucket.append(p)
    return buckets
    ### END SOLUTION


def start_bucket(bucket: list[nn.Parameter]):
    """Start averaging the gradients of `bucket`; returns a function that waits and writes back."""
    ### BEGIN SOLUTION
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    flat = torch.cat([g.flatten() for g in gradients]) / dist.get_world_size()
    request = dist.all_reduce(flat, async_op=True)

    def end():
        request.wait()
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = piece.view_as(p)

    return end
    ### END SOLUTION


def bucketed(module: nn.Module, bucket_bytes: int):
    """Like `data_parallel`, but `finish` sends buckets of at most `bucket_bytes` bytes."""
    ### BEGIN SOLUTION
    data_parallel(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    buckets = in_buckets(trained[::-1], bucket_bytes)
    return lambda: [end() for end in [start_bucket(bucket) for bucket in buckets]]
    ### END SOLUTION


def overlapped(module: nn.Module, bucket_bytes: int):
    """Like `bucketed`, but the all-reduce of a bucket starts during backward, if it can."""
    ### BEGIN SOLUTION
    data_parallel(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    buckets = in_buckets(trained[::-1], bucket_bytes)
    arrived, under_way = set(), []

    def arrive(p):
        arrived.add(p)
        while len(under_way) < len(buckets) and arrived.issuperset(buckets[len(under_way)]):
            under_way.append(start_bucket(buckets[len(under_way)]))

    def finish():
        for bucket in buckets[len(under_way) :]:
            under_way.append(start_bucket(bucket))
        for end in under_way:
            end()
        arrived.clear()
        under_way.clear()

    for p in trained:
        p.register_post_accumulate_grad_hook(arrive)
    return finish
    ### END SOLUTION


def accumulate(model: DistributedDataParallel, batches: list[tuple[torch.Tensor, torch.Tensor]]):
    """Accumulate the gradient of the mean loss over all samples of all micro-batches and ranks.

    Parameters
    ----------
    model : DistributedDataParallel
        Its gradients are empty.
    batches : list of (x, y)
        This rank's micro-batches, at least one. All ranks have the same sizes; the last
        micro-batch may be smaller than the others.
    """
    ### BEGIN SOLUTION
    samples = sum(len(x) for x, _ in batches)

    def add(x, y):
        (F.mse_loss(model(x), y) * len(x) / samples).backward()

    with model.no_sync():
        for x, y in batches[:-1]:
            add(x, y)
    add(*batches[-1])
    ### END SOLUTION


def epoch_indices(
    samples: int, ranks: int, rank: int, epoch: int, seed: int, done: int = 0
) -> list[int]:
    """Indices of the samples that `rank` still has to take in this epoch, in order.

    Parameters
    ----------
    samples, ranks : int
        Size of the data set, at least 1, and number of ranks.
    epoch, seed : int
        Together they seed the order, which is the same on every rank.
    done : int
        Samples that all ranks together have already taken in this epoch.
    """
    ### BEGIN SOLUTION
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(samples, generator=generator).tolist()
    left = order[done:]
    missing = -len(left) % ranks
    while missing > 0:
        left += order[:missing]
        missing -= samples
    return left[rank::ranks]
    ### END SOLUTION


def uneven_epoch(module: nn.Module, optimizer, batches: list[tuple[torch.Tensor, torch.Tensor]]):
    """One epoch over batches whose number and sizes differ between ranks; `batches` may be empty.

    All ranks begin with the same weights and have to end with the same. All parameters are trained.
    """
    ### BEGIN SOLUTION
    parameters = list(module.parameters())
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    for step in range(int(steps)):
        for p in parameters:
            p.grad = torch.zeros_like(p)
        samples = 0
        if step < len(batches):
            x, y = batches[step]
            samples = len(x)
            (samples * F.mse_loss(module(x), y)).backward()
        count = parameters[0].new_tensor([samples])
        flat = torch.cat([*(p.grad.flatten() for p in parameters), count])
        dist.all_reduce(flat)
        mean = flat[:-1] / flat[-1]
        for p, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            p.grad = piece.view_as(p)
        optimizer.step()
    ### END SOLUTION
