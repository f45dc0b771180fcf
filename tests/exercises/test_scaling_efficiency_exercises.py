"""The exercises on scaling: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exercise_cases import ExerciseTests, hangs

from lessons.scaling_efficiency import check as scaling

pytestmark = pytest.mark.guard(60)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

# ------------------------------------------------------------------------------------------------ top-k

CHOSEN = "indices = total.abs().topk(k).indices"
KEPT = "residual.copy_(total.index_fill(0, indices, 0).view_as(residual))"
SEND_VALUES, SEND_INDICES = "dist.all_gather_single(all_values, values)", "dist.all_gather_single(all_indices, indices)"
ADDED = "torch.zeros_like(total).index_add_(0, all_indices, all_values / n)"


def as_dtype(dtype):
    """The indices travel as another dtype."""
    return {
        "indices.new_empty(n * k)": f"indices.new_empty(n * k, dtype={dtype})",
        "(all_indices, indices)": f"(all_indices, indices.to({dtype}))",
        "(0, all_indices,": "(0, all_indices.long(),",
    }


def pairs_through_pickle(gradient, residual, k):
    total = (gradient + residual).flatten()
    chosen = total.abs().topk(k).indices
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (total[chosen], chosen))
    mean = torch.zeros_like(total)
    for values, indices in everyone:
        mean.index_add_(0, indices, values / len(everyone))
    residual.copy_(total.index_fill(0, chosen, 0).view_as(residual))
    return mean.view_as(gradient)


WRONG["top_k_mean"] = {
    "not-distributed": {SEND_VALUES: "all_values = values", SEND_INDICES: "all_indices = indices"},
    "values": "total.abs().topk  ->  total.topk",
    "sum": "all_values / n  ->  all_values",
    "overwritten": f"{ADDED}  ->  torch.zeros_like(total)\nmean[all_indices] = all_values / n",
    "own-entries": "all_indices, all_values / n  ->  indices, values / n",
    "dense": {
        SEND_VALUES: "pass",
        SEND_INDICES: "pass",
        "all_indices, all_values / n)": "indices, values / n)\ndist.all_reduce(mean)",
    },
    "object": pairs_through_pickle,
    "too-many-bytes": f"{SEND_VALUES}  ->  {SEND_VALUES}\n{SEND_VALUES}",
    "too-few-bytes": {
        SEND_VALUES: "dist.group.WORLD._get_backend(torch.device('cpu'))._allgather_base(all_values, values).wait()"
    },
    "not-added": "(gradient + residual)  ->  gradient",
    "not-kept": f"{KEPT}  ->  pass",
    "all-kept": "total.index_fill(0, indices, 0)  ->  total",
    "mean-kept": {KEPT: "pass", "return mean": "residual.copy_((total - mean).view_as(residual))\nreturn mean"},
    "replaced": "total.index_fill(0, indices, 0)  ->  "
    "(gradient.flatten() - torch.zeros_like(total).index_copy_(0, indices, values))",
    "float32": "all_values / n  ->  all_values.float().double() / n",
    "whole": f"{CHOSEN}  ->  least = total.abs().sort(descending=True).values[k]\n"
    "indices = (total.abs() > least).nonzero().flatten()",
    "any-shape": [
        "mean.view_as(gradient)  ->  mean.view(gradient.shape[0], gradient.shape[1])",
        {"mean.view_as(gradient)": "mean.view(rows, columns)", "n = dist": "rows, columns = gradient.shape\nn = dist"},
    ],
    "large-indices": [as_dtype("torch.uint8"), as_dtype("torch.float16")],
    "value": f"{ADDED}  ->  {ADDED} * n\n"
    "mean /= torch.zeros_like(mean).index_add_(0, all_indices, torch.ones_like(all_values)).clamp(min=1)",
    "error": as_dtype("torch.int16"),
    "input-changed": "(gradient + residual)  ->  gradient.add_(residual)",
    "shape": "mean.view_as(gradient)  ->  mean",
    "hang": hangs(f"{SEND_VALUES}  ->  if dist.get_rank():\n    dist.send(values, dst=0)\n    dist.barrier()"),
}


def sum_of_sparse_tensors(gradient, residual, k):
    total = (gradient + residual).flatten()
    chosen = total.abs().topk(k).indices
    sparse = torch.sparse_coo_tensor(chosen[None], total[chosen], total.shape)
    total[chosen] = 0
    residual.copy_(total.view_as(residual))
    dist.all_reduce(sparse)
    return sparse.to_dense().view_as(gradient) / dist.get_world_size()


def partitioned_by_numpy(gradient, residual, k):
    total = (gradient + residual).numpy().ravel()
    chosen = np.argpartition(-abs(total), k - 1)[:k]
    n, mean = dist.get_world_size(), np.zeros_like(total)
    own = torch.from_numpy(total[chosen]), torch.from_numpy(chosen.astype(np.int32))
    parts = [[torch.empty_like(x) for _ in range(n)] for x in own]
    requests = [dist.all_gather(*both, async_op=True) for both in zip(parts, own, strict=True)]
    total[chosen] = 0
    residual.copy_(torch.from_numpy(total).view_as(residual))
    for request in requests:
        request.wait()
    for values, indices in zip(*parts, strict=True):
        np.add.at(mean, indices.numpy(), values.numpy() / n)
    return torch.from_numpy(mean).view_as(gradient)


PASSED_ROUND_A_RING = """pairs = [torch.stack([values, indices.double()])]
for _ in range(n - 1):
    request = dist.isend(pairs[-1], (dist.get_rank() + 1) % n)
    pairs.append(torch.empty_like(pairs[-1]))
    dist.recv(pairs[-1], (dist.get_rank() - 1) % n)
    request.wait()
all_values, all_indices = torch.cat(pairs, dim=1)"""
RIGHT["top_k_mean"] = {
    "a sum of sparse tensors": sum_of_sparse_tensors,
    "partitioned by numpy, lists of int32": partitioned_by_numpy,
    "passed round a ring": {
        SEND_VALUES: PASSED_ROUND_A_RING,
        SEND_INDICES: "pass",
        "(0, all_indices,": "(0, all_indices.long(),",
    },
    "indices seen as float64, in one call": {
        "values.new_empty(n * k), indices.new_empty(n * k)": "values.new_empty(n * 2 * k), None",
        "(all_values, values)": "(all_values, torch.cat([values, indices.view(torch.float64)]))",
        SEND_INDICES: "all_values, all_indices = all_values.view(n, 2, k).unbind(1)",
        ADDED: "torch.zeros_like(total).index_add_(0, "
        "all_indices.reshape(-1).view(torch.int64), all_values.reshape(-1) / n)",
    },
    "a threshold": f"{CHOSEN}  ->  least = total.abs().kthvalue(total.numel() - k + 1).values\n"
    "indices = (total.abs() >= least).nonzero().flatten()",
    "other memory for the residual": f"{KEPT}  ->  residual.set_(total.index_fill(0, indices, 0).view_as(residual))",
}

# ------------------------------------------------------------------------------------------------ laws and money

S = "s = (seconds_n / seconds_1 - 1 / n) / (1 - 1 / n)"
LAWS = "return s, 1 / (s + (1 - s) / ranks), 1 / s, s + (1 - s) * ranks"
WRONG["amdahl_and_gustafson"] = {
    "number": f"{LAWS}  ->  return s, 1 / (s + (1 - s) / ranks), 1 / s",
    "typed": f"{S}  ->  seconds_1, seconds_n, n, ranks = 0.8, 0.13, 8, 64\n{S}",
    "numbers": "1 / s,  ->  1 / (s + (1 - s) / 1000),",
}


def by_least_squares(seconds_1, seconds_n, n, ranks):
    times = torch.tensor([[seconds_1], [seconds_n]], dtype=torch.float64)
    shares = torch.tensor([[1, 1], [1, 1 / n]], dtype=torch.float64)
    serial, parallel = torch.linalg.lstsq(shares, times).solution.flatten() / seconds_1
    return serial, 1 / (serial + parallel / ranks), 1 / serial, serial + parallel * ranks


RIGHT["amdahl_and_gustafson"] = {
    "by least squares": by_least_squares,
    "an array": {LAWS: f"import numpy as np\n\n{LAWS.replace('return ', 'return np.array([')}])"},
}
HOURS = "hours = tokens / (tokens_per_second * gpus * efficiency) / 3600 / (1 - lost)"
WRONG["cost_of_run"] = {
    "number": "return hours, hours  ->  return hours",
    "numbers": "return hours, hours  ->  return hours, hours * (1 - lost)",
    "typed": f"{HOURS}  ->  tokens, tokens_per_second, gpus, efficiency = 1e11, 40150, 256, 15700 / 40150\n"
    f"lost, dollars = 0, 2.5\n{HOURS}",
}
RIGHT["cost_of_run"] = {
    "dollars without hours": "hours * gpus * dollars  ->  "
    "tokens / tokens_per_second / 3600 * dollars / efficiency / (1 - lost)",
    "an array": {"return hours": "return torch.tensor([hours", "* dollars": "* dollars])"},
}

# ------------------------------------------------------------------------------------------------ bucket size

BEST = "min(range(1, tensors + 1), key=finish)"
END = "piece + (n - 1) * max(piece, one) + one"
KEEPS_UP = """rest = backward_ms * 1e-3 - 2 * (ranks - 1) / ranks * gradient_bytes * 8 / (gigabits * 1e9)
n = min(tensors, max(1, int(rest / (2 * (ranks - 1) * latency_us * 1e-6))))"""
WRONG["best_buckets"] = {
    "pair": ["return n, finish(n)  ->  return n", "return n, finish(n)  ->  return n + 0.5, finish(n)"],
    "gigabits": "/ ranks * 8 /  ->  / ranks /",
    "microseconds": "latency_us * 1e-6  ->  latency_us * 1e-3",
    "milliseconds": "return n, finish(n)  ->  return n, finish(n) / 1e3",
    "half": "2 * (ranks - 1)  ->  (ranks - 1)",
    "whole-bucket": "/ n / ranks  ->  / n",
    "no-latency": "latency_us * 1e-6 + travels  ->  travels",
    "all-hidden": f"{END}  ->  max(n * piece, n * one)",
    "no-start": f"{END}  ->  max(n * piece + one, n * one)",
    "time": f"{END}  ->  piece + n * max(piece, one)",
    "one-bucket": f"{BEST}  ->  1",
    "one-per-tensor": f"{BEST}  ->  tensors",
    "one-backward": f"n = {BEST}  ->  {KEEPS_UP}",
    "not-best": [f"{BEST}  ->  min(tensors, max(1, round(gradient_bytes / 150e6)))", "tensors + 1)  ->  tensors)"],
    "error": f"{BEST}  ->  next(n for n in range(1, tensors) if n < 0)",
}


def square_root_or_what_keeps_up(size, tensors, backward_ms, ranks, us, gigabits):
    """As the text says below the hints, with the next whole numbers tried."""
    backward, latency = backward_ms * 1e-3, 2 * (ranks - 1) * us * 1e-6
    rest = 2 * (ranks - 1) / ranks * size * 8 / (gigabits * 1e9)

    def finish(n):
        one = latency + rest / n
        return backward / n + (n - 1) * max(backward / n, one) + one

    n = max(math.sqrt(backward / latency), (backward - rest) / latency if rest < backward else 0)
    n = min((min(tensors, max(1, k)) for k in (math.floor(n), math.ceil(n))), key=finish)
    return n, 1e3 * finish(n)


def every_bucket_followed(size, tensors, backward_ms, ranks, us, gigabits):
    ends = []
    for n in range(1, tensors + 1):
        one, end = 2e3 * (ranks - 1) * (us * 1e-6 + size / n / ranks * 8 / (gigabits * 1e9)), 0.0
        for bucket in range(1, n + 1):
            end = max(end, bucket * backward_ms / n) + one
        ends.append(end)
    return 1 + np.argmin(ends), min(ends)


RIGHT["best_buckets"] = {
    "by the formula": square_root_or_what_keeps_up,
    "every bucket followed, np.int64": every_bucket_followed,
    "the first that is better than the next": f"{BEST}  ->  "
    "next(n for n in range(1, tensors + 1) if n == tensors or finish(n) <= finish(n + 1))",
    "a tensor": "return n, finish(n)  ->  return torch.tensor([n, finish(n)], dtype=torch.float64)",
}

# ------------------------------------------------------------------------------------------------ utilization

UTILIZATIONS = "return 6 * rate, hfu, tokens_per_second * hfu / rate / 6"
WRONG["mfu_and_hfu"] = {
    "number": f"{UTILIZATIONS}  ->  return 6 * rate, hfu",
    "numbers": "return 6 * rate, hfu,  ->  return 6.6 * rate, hfu,",
    "typed": "rate = tokens_per_second / gpus * parameters / (peak_tflops * 1e12)  ->  "
    "tokens_per_second, recomputed, rate = 102_400, 1, 102_400 / 1024 * 175e9 / 312e12",
}
RIGHT["mfu_and_hfu"] = {
    "a tensor": {UTILIZATIONS: f"return torch.tensor([{UTILIZATIONS.removeprefix('return ')}], dtype=torch.float64)"},
    "by parts": f"{UTILIZATIONS}  ->  forward = 2 * rate\n"
    "return forward * 3, forward * (3 + recomputed), tokens_per_second * (3 + recomputed) / 3",
}

# ------------------------------------------------------------------------------------------------ noise scale

MEAN, SQUARES = "dist.all_reduce(mean)", "dist.all_reduce(own)"
SIGNAL, NOISE = "(n * whole - own) / (n - 1)", "(own - whole) * n * samples / (n - 1)"
WRONG["noise_scale"] = {
    "not-distributed": {SQUARES: "pass", MEAN: "pass"},
    "sum": "gradient / n  ->  gradient.clone()",
    "inverse": "noise / signal  ->  signal / noise",
    "samples": "* n * samples  ->  * n",
    "biased": {SIGNAL: "whole", NOISE: "(own - whole) * samples"},
    "norms": {"gradient.square().sum(),": "gradient.norm(),", "own / n, mean": "(own / n) ** 2, mean"},
    "own-only": f"{SQUARES}  ->  own = own * n",
    "number": "(noise / signal).item()  ->  noise, signal",
    "too-many-bytes": f"{MEAN}  ->  parts = [torch.empty_like(mean) for _ in range(n)]\n"
    "dist.all_gather(parts, mean)\nmean = sum(parts)",
    "input-changed": "gradient / n  ->  gradient.div_(n)",
    "value": f"{NOISE}  ->  (own - whole) * samples",
}


def from_deviations(gradient, samples):
    n, mean = dist.get_world_size(), gradient.clone()
    dist.all_reduce(mean)
    mean /= n
    apart = (gradient - mean).square().sum()
    dist.all_reduce(apart)
    of_mean = apart / (n - 1) / n
    return samples * n * of_mean / (mean.square().sum() - of_mean)


RIGHT["noise_scale"] = {
    "from deviations, a tensor": from_deviations,
    "in one message": {
        SQUARES: "both = torch.cat([own[None], mean.flatten()])\ndist.all_reduce(both)\nown, mean = both[0], both[1:]",
        MEAN: "pass",
    },
}


class TestScaling(ExerciseTests):
    checks, WRONG, RIGHT = scaling, WRONG, RIGHT
