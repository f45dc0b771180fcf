"""The exercises on scaling and efficiency: what is right, and the usual mistakes with their hints."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from course_utils import record
from course_utils.check import Case, exercise, number, paper, show
from course_utils.costs import bytes_sent

from . import answers

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

# --- exercise 1: the k largest entries

STEPS, MATRIX = 4, (6, 10)
TOP_K = [  # ranks, name, k, shape
    (2, f"k = 4 of 60, shape {MATRIX}", 4, MATRIX),
    Case(2, f"k = 60 of 60, shape {MATRIX}", (60, MATRIX), "any-shape", "unpack"),
    Case(2, "k = 4 of 60, shape (3, 4, 5)", (4, (3, 4, 5)), "any-shape", "unpack"),
    Case(2, "k = 4 of 60, shape (60,)", (4, (60,)), "any-shape", "unpack"),
    Case(2, "k = 5 of 70000, shape (70000,)", (5, (70_000,)), "any-shape", "unpack"),
    (3, f"k = 4 of 60, shape {MATRIX}", 4, MATRIX),
    (4, f"k = 3 of 60, shape {MATRIX}", 3, MATRIX),
    (1, f"k = 4 of 60, shape {MATRIX}", 4, MATRIX),
]


def gradients(rank: int, shape: tuple[int, ...]) -> Tensor:
    """The gradients of all steps of a rank. Some elements are so large that every rank sends them."""
    x = torch.randn(STEPS, *shape, generator=torch.Generator().manual_seed(50 + rank), dtype=torch.float64)
    flat = x.flatten(1)
    flat[::2, 12] += 5
    flat[:, 34] -= 6
    flat[1::2, -1] += 5
    return x


def largest(total: Tensor, k: int) -> Tensor:
    """``total`` with only its k largest entries by magnitude."""
    kept, chosen = torch.zeros_like(total).flatten(), total.flatten().abs().topk(k).indices
    kept[chosen] = total.flatten()[chosen]
    return kept.view_as(total)


@cache
def means_and_residuals(n: int, k: int, shape: tuple[int, ...]) -> list[tuple[Tensor, list[Tensor]]]:
    """By step: the mean of what all ranks send, and what each keeps."""
    data, residuals, steps = [gradients(rank, shape) for rank in range(n)], [torch.zeros(shape)] * n, []
    for step in range(STEPS):
        totals = [r + x[step] for r, x in zip(residuals, data, strict=True)]
        residuals = [total - largest(total, k) for total in totals]
        steps.append((sum(largest(total, k) for total in totals) / n, residuals))
    return steps


@exercise("Exercise 1", cases=TOP_K, passed="k values and k indices of each rank, and nothing is lost.")
def top_k_mean(note, answer, k, shape):
    rank, n = dist.get_rank(), dist.get_world_size()
    data, residual = gradients(rank, shape), torch.zeros(shape, dtype=torch.float64)
    with record() as ledger:
        results = []
        for gradient in data.clone():
            result = answer(gradient, residual, k)
            results.append((result.clone() if isinstance(result, Tensor) else result, residual.clone(), gradient))
    note.talks(ledger, n)
    for step, (mean, residuals) in enumerate(means_and_residuals(n, k, shape)):
        got, kept, gradient = results[step]
        note.equal(got, mean, f"step {step + 1}: the result")
        note.equal(kept, residuals[rank], f"step {step + 1}: the residual")
        kept_input = torch.equal(gradient, data[step])
        note.holds(kept_input, "input-changed", "the result is right, but the gradient was changed.")
    if n > 1 and k < math.prod(shape):
        one = STEPS * k  # pairs that a rank sends to each other one; 8 bytes of a value, 1 to 8 of an index
        most = data[0].nbytes - 1
        note.sent(ledger, sent=(one * 9, one * 16 * (n - 1)), largest=most, too_large="dense", object="dense")


MISTAKES["top_k_mean"] = {
    "values": ("""These are the largest values, not the largest magnitudes. A gradient of -6 matters more than one of 2:
        choose by magnitude, and keep the sign.""", "total.abs().topk  ->  total.topk"),
    "sum": ("This is the sum of what the ranks sent. The docstring asks for the mean.",
            "all_values / n  ->  all_values"),
    "overwritten": ("""Two ranks may send the same index. The second value then has to be added to the first, not put in
        its place.""",
            "torch.zeros_like(total).index_add_(0, all_indices, all_values / n)  ->  torch.zeros_like(total)\n"
            "mean[all_indices] = all_values / n"),
    "own-entries": ("It holds the entries of this rank only. Those of the other ranks have to get here too.",
            "all_indices, all_values / n  ->  indices, values / n"),
    "dense": ("Only k values and k indices of each rank have to travel, as tensors: no whole gradient, and no pickles.",
            {"dist.all_gather_single(all_values, values)": "pass",
             "dist.all_gather_single(all_indices, indices)": "pass",
             "all_indices, all_values / n)": "indices, values / n)\n"
             "dist.all_reduce(mean)"}),
    "not-added": ("""The residual is not used. Add it to the gradient before you choose, so that what was not sent
        before gets its turn.""", "(gradient + residual)  ->  gradient"),
    "not-kept": ("""The residual is what this rank has not sent yet: the old residual and the gradient, without the
        entries that were sent. Write it into the tensor that you were given.""",
            ["residual.copy_(total.index_fill(0, indices, 0).view_as(residual))  ->  pass",
             "total.index_fill(0, indices, 0)  ->  total",
             {"residual.copy_(total.index_fill(0, indices, 0).view_as(residual))": "pass",
              "return mean": "residual.copy_((total - mean).view_as(residual))\n"
              "return mean"},
             "total.index_fill(0, indices, 0)  ->  "
             "(gradient.flatten() - torch.zeros_like(total).index_copy_(0, indices, values))"]),
    "any-shape": ("""The docstring allows a gradient of any shape and size, and a k as large as the gradient. Indices go
        up to 69,999 here, which no dtype of 8 or 16 bits can hold exactly.""",
            ["indices = total.abs().topk(k).indices  ->  least = total.abs().sort(descending=True).values[k]\n"
            "indices = (total.abs() > least).nonzero().flatten()",
             "mean.view_as(gradient)  ->  mean.view(gradient.shape[0], gradient.shape[1])",
             {"indices.new_empty(n * k)": "indices.new_empty(n * k, dtype=torch.uint8)",
              "(all_indices, indices)": "(all_indices, indices.to(torch.uint8))",
              "(0, all_indices,": "(0, all_indices.long(),"}]),
}


def sum_of_sparse_tensors(gradient, residual, k):
    total = (gradient + residual).flatten()
    chosen = total.abs().topk(k).indices
    sparse = torch.sparse_coo_tensor(chosen[None], total[chosen], total.shape)
    total[chosen] = 0
    residual.copy_(total.view_as(residual))
    dist.all_reduce(sparse)
    return sparse.to_dense().view_as(gradient) / dist.get_world_size()


RIGHT["top_k_mean"] = {
    "a sum of sparse tensors": sum_of_sparse_tensors,
    "a threshold": "indices = total.abs().topk(k).indices  ->  "
                   "least = total.abs().kthvalue(total.numel() - k + 1).values\n"
                   "indices = (total.abs() >= least).nonzero().flatten()",
}

# --- exercises 2, 3 and 5: on paper

MISTAKES["amdahl_and_gustafson"] = {
    "percent": ("Return the serial part as a fraction: 0.04, not 4.", "return s,  ->  return 100 * s,"),
    "parallel": ("That is the parallel fraction. The serial fraction is the rest of the time.",
            ["return s,  ->  return 1 - s,", "s = (  ->  s = 1 - ("]),
    "efficiency": ("""1 - efficiency is not the serial fraction: while the serial part runs, its time passes on all N
        ranks.""", "(seconds_n / seconds_1 - 1 / n) / (1 - 1 / n)  ->  1 - seconds_1 / (n * seconds_n)"),
    "ratio": ("t_N / t_1 still contains the parallel part, divided by N.",
            "(seconds_n / seconds_1 - 1 / n) / (1 - 1 / n)  ->  seconds_n / seconds_1"),
    "same-law": ("""The last number follows the law for a fixed batch. If the batch grows with the ranks, only the
        parallel work grows: how long would one rank take for it all?""",
            "s + (1 - s) * ranks  ->  1 / (s + (1 - s) / ranks)"),
    "swapped-parts": ("""It is the parallel part that is multiplied by N; the serial part stays as it is, so that
        Gustafson's speed-up is less than N.""", ["s + (1 - s) * ranks  ->  s * ranks + 1 - s",
             "s + (1 - s) * ranks  ->  ranks"]),
    "limit": ("With ever more ranks (1 - s)/N vanishes and s remains.", ["1 / s,  ->  1 / (1 - s),",
             "1 / s,  ->  float('inf'),"]),
    "speed-up-order": ("The speed-ups are right, but not in the order that the docstring names.",
            ["1 / s, s + (1 - s) * ranks  ->  s + (1 - s) * ranks, 1 / s",
             "1 / (s + (1 - s) / ranks), 1 / s, s + (1 - s) * ranks  ->  "
             "s + (1 - s) * ranks, 1 / s, 1 / (s + (1 - s) / ranks)"]),
}


def by_least_squares(seconds_1, seconds_n, n, ranks):
    times = torch.tensor([[seconds_1], [seconds_n]], dtype=torch.float64)
    shares = torch.tensor([[1, 1], [1, 1 / n]], dtype=torch.float64)
    serial, parallel = torch.linalg.lstsq(shares, times).solution.flatten() / seconds_1
    return serial, 1 / (serial + parallel / ranks), 1 / serial, serial + parallel * ranks


RIGHT["amdahl_and_gustafson"] = {
    "by least squares": by_least_squares,
    "a tensor": {"return s, 1 /": "return torch.tensor([s, 1 /", "(1 - s) * ranks": "(1 - s) * ranks])"},
}
amdahl_and_gustafson = paper(
    "Exercise 2", answers.amdahl_and_gustafson, MISTAKES["amdahl_and_gustafson"],
    cases=[(0.8, 0.13, 8, 64), (1.2, 0.66, 2, 16), (10, 0.5, 32, 512), (3, 1.1, 3, 50)],
    units=["serial", "× at most by Amdahl", "× in the limit", "× by Gustafson"],
    allowed=lambda seconds_1, seconds_n, n, ranks: 1.02 / n < seconds_n / seconds_1 < 1,
)

MISTAKES["cost_of_run"] = {
    "no-efficiency": ("""The efficiency is left out. All GPUs together process only gpus · efficiency times as many
        tokens as one alone.""", " * efficiency  ->  "),
    "upside-down": ("A lower efficiency makes the run longer.", "* efficiency  ->  / efficiency"),
    "dollars-ideal": ("""The hours are right, but the price is that of a perfect run. Rented GPUs cost money while they
        wait, too.""", "hours * gpus * dollars  ->  hours * gpus * dollars * efficiency"),
    "one-gpu": ("The price is for one GPU and one hour, and all GPUs have to be paid for.",
            "hours * gpus * dollars  ->  hours * dollars"),
    "not-shared": ("The tokens are shared among all GPUs.", "* gpus * efficiency  ->  * efficiency"),
    "seconds": ("These are seconds, but prices are per hour.", "/ 3600  ->  "),
    "lost-ignored": ("A share of the time is lost to interruptions. It has to be waited for, and paid for.",
            "/ (1 - lost)  ->  "),
    "lost-added": ("""If a share of all hours is lost, the work gets done in the rest: 1 - lost of them. The price is
        that of these hours, with no further surcharge.""", ["/ (1 - lost)  ->  * (1 + lost)",
             "/ (1 - lost)  ->  * (1 - lost)", "hours * gpus * dollars  ->  hours * gpus * dollars / (1 - lost)"]),
}
RIGHT["cost_of_run"] = {
    "dollars without hours": "hours * gpus * dollars  ->  "
                             "tokens / tokens_per_second / 3600 * dollars / efficiency / (1 - lost)",
    "an array": {"return hours": "return torch.tensor([hours", "* dollars": "* dollars])"},
}
cost_of_run = paper(
    "Exercise 3", answers.cost_of_run, MISTAKES["cost_of_run"],
    cases=[
        (1e11, 40150, 256, 15700 / 40150, 0, 2.5), (1e11, 40150, 256, 15700 / 40150, 0.1, 1.0),
        (1e11, 40150, 8, 1, 0.3, 2.5), (5e9, 3000, 2, 0.95, 0.2, 1.5),
    ],
    units=["h", "$"],
)

MISTAKES["mfu_and_hfu"] = {
    "percent": ("Return shares: 0.34, not 34.", "return 6 * rate, hfu,  ->  return 600 * rate, 100 * hfu,"),
    "swapped": ("""MFU counts what the model needs, HFU also what is computed twice. A repeated forward pass is not
        needed by the model, so the first number is the smaller one.""",
            ["return 6 * rate, hfu,  ->  return hfu, 6 * rate,", "return 6 * rate,  ->  return hfu,"]),
    "forward-only": ("Training has a backward pass, which costs twice as much as forward.",
            {"(6 + 2 * recomputed)": "(2 + 2 * recomputed)",
             "return 6 * rate": "return 2 * rate",
             "hfu / rate / 6": "hfu / rate / 2"}),
    "backward-again": ("Only forward is computed again: 2 FLOPs for each parameter and token.",
            "(6 + 2 * recomputed)  ->  (6 + 6 * recomputed)"),
    "always-repeated": ("Not every job repeats its whole forward pass: the argument says which share of it.",
            "(6 + 2 * recomputed)  ->  8"),
    "one-gpu": ("The tokens per second are those of all GPUs together, and the peak is that of one.",
            "tokens_per_second / gpus  ->  tokens_per_second"),
    "tera": ("A TFLOP/s is 10^12 FLOP/s.", "(peak_tflops * 1e12)  ->  peak_tflops"),
    "not-faster": ("""The last number is that of a job that computes nothing twice, at the same HFU. What becomes of the
        FLOPs that are saved: is it faster or slower?""", ["tokens_per_second * hfu / rate / 6  ->  tokens_per_second",
             "tokens_per_second * hfu / rate / 6  ->  tokens_per_second * rate * 6 / hfu"]),
}
RIGHT["mfu_and_hfu"] = {
    "a tensor": {"return 6 * rate": "return torch.tensor([6 * rate", "* hfu / rate / 6": "* hfu / rate / 6])"},
    "by parts": "return 6 * rate, hfu, tokens_per_second * hfu / rate / 6  ->  forward = 2 * rate\n"
                "return forward * 3, forward * (3 + recomputed), tokens_per_second * (3 + recomputed) / 3",
}
mfu_and_hfu = paper(
    "Exercise 5", answers.mfu_and_hfu, MISTAKES["mfu_and_hfu"],
    cases=[
        (175e9, 102_400, 1024, 312, 1), (8e9, 60_000, 8, 989, 0), (70e9, 50_000, 128, 989, 0.5),
        (1.3e9, 200_000, 8, 312, 0.25),
    ],
    units=["MFU", "HFU", "tokens/s"],
)

# --- exercise 4: the size of a bucket

BUCKETS = [
    (2.6e9, 148, 200, 64, 14, 400), (2.6e9, 148, 200, 64, 14, 100), (2.6e9, 148, 500, 8, 14, 400),
    (2e6, 60, 1, 64, 14, 100), (14e9, 290, 900, 256, 14, 400), (2.6e9, 12, 500, 8, 14, 400),
    (2e6, 60, 1, 256, 14, 100),
]


def finish(n: int, size: float, backward_ms: float, ranks: int, latency_us: float, gigabits: float) -> float:
    """Milliseconds until the last of n equal buckets is reduced."""
    piece, one = backward_ms / n, 2e3 * (ranks - 1) * (latency_us * 1e-6 + size / n / ranks * 8 / (gigabits * 1e9))
    return piece + (n - 1) * max(piece, one) + one


def pair_of(value: Any) -> tuple[float, float] | None:
    """Two numbers of any type, or nothing."""
    parts = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    numbers = [number(v) for v in parts] if isinstance(parts, tuple | list) else []
    return tuple(numbers) if len(numbers) == 2 and None not in numbers else None


@exercise("Exercise 4", passed=": {said}.", cases=[
    (0, f"arguments {', '.join(f'{v:.6g}' for v in case)}", *case) for case in BUCKETS
])
def best_buckets(note, answer, size, tensors, *rest):
    """Another number of buckets than the solution's is right if it takes as long."""
    value = answer(size, tensors, *rest)
    pair = pair_of(value)
    if not note.holds(pair is not None, "odd", f"the function returned {show(value)}."):
        return None
    n, ms = pair
    both = ("the pair", torch.tensor(pair))
    if not note.holds(n.is_integer() and 1 <= n <= tensors, "odd", f"the function returned {n:g} buckets.", both):
        return None
    right, times = finish(int(n), size, *rest), [finish(m, size, *rest) for m in range(1, tensors + 1)]
    what = f"the time is wrong.\n  expected  {right:.6g} ms for {n:g} buckets\n  got       {ms:.6g} ms"
    note.holds(math.isclose(ms, right, rel_tol=1e-3), "time", what, both)
    best = f"another number is faster.\n  best  {times.index(min(times)) + 1} buckets, {min(times):.6g} ms\n"
    note.holds(right <= 1.001 * min(times), "not-best", f"{best}  got   {n:g} buckets, {ms:.6g} ms", both)
    return f"{n:g} buckets of {size / n / 1e6:.0f} MB, {ms:.4g} ms"


MISTAKES["best_buckets"] = {
    "microseconds": ("""Gb are bits: 400 Gb/s carry 50 GB/s. The latency is in µs, the time of backward in ms. Work in
        seconds, and return milliseconds.""", ["/ ranks * 8 /  ->  / ranks /",
             "latency_us * 1e-6  ->  latency_us * 1e-3", "return n, finish(n)  ->  return n, finish(n) / 1e3"]),
    "half": ("""A ring all-reduce has 2(N-1) steps, N-1 that add and N-1 that pass on the sums, and in each only 1/N of
        the bucket travels.""", ["2 * (ranks - 1)  ->  (ranks - 1)", "/ n / ranks  ->  / n"]),
    "no-latency": ("""Every bucket pays 2(N-1) latencies, however small it is. Without them the smallest buckets would
        always be best.""", "latency_us * 1e-6 + travels  ->  travels"),
    "all-hidden": ("""The first bucket is complete only after 1/n of backward: until then nothing can be sent. The last
        one is complete when backward ends, and nothing is left to hide its all-reduce behind.""",
            [f"piece + (n - 1) * max(piece, one) + one  ->  max(n * piece{more}, n * one)" for more in ("", " + one")]),
    "time": ("""The time does not belong to that number of buckets. Draw backward as n pieces, and the all-reduces below
        it: each begins when its piece has ended and the all-reduce before it has finished.""",
            "piece + (n - 1) * max(piece, one) + one  ->  piece + n * max(piece, one)"),
    "not-best": ("""Another number of buckets is faster: with one bucket nothing overlaps, as many as tensors pay too
        many latencies, and where the bytes alone take longer than backward, something else than hiding decides. There
        are few enough to try them all.""",
            ["min(range(1, tensors + 1), key=finish)  ->  min(tensors, max(1, round(gradient_bytes / 150e6)))",
             "tensors + 1)  ->  tensors)", "min(range(1, tensors + 1), key=finish)  ->  1",
             "min(range(1, tensors + 1), key=finish)  ->  tensors",
             "n = min(range(1, tensors + 1), key=finish)  ->  "
             "rest = backward_ms * 1e-3 - 2 * (ranks - 1) / ranks * gradient_bytes * 8 / (gigabits * 1e9)\n"
             "n = min(tensors, max(1, int(rest / (2 * (ranks - 1) * latency_us * 1e-6))))"]),
}


def every_bucket_followed(size, tensors, backward_ms, ranks, us, gigabits):
    ends = []
    for n in range(1, tensors + 1):
        one, end = 2e3 * (ranks - 1) * (us * 1e-6 + size / n / ranks * 8 / (gigabits * 1e9)), 0.0
        for bucket in range(1, n + 1):
            end = max(end, bucket * backward_ms / n) + one
        ends.append(end)
    return 1 + np.argmin(ends), min(ends)


RIGHT["best_buckets"] = {
    "every bucket followed, np.int64": every_bucket_followed,
    "the first that is better than the next": "min(range(1, tensors + 1), key=finish)  ->  "
        "next(n for n in range(1, tensors + 1) if n == tensors or finish(n) <= finish(n + 1))",
}

# --- exercise 6: noise and signal

NOISE = [
    (2, "4 samples a rank, shape (6, 10)", 4, (6, 10)), (3, "5 samples a rank, shape (90,)", 5, (90,)),
    (4, "1 samples a rank, shape (3, 4, 5)", 1, (3, 4, 5)),
]


def noisy_gradients(n: int, shape: tuple[int, ...]) -> list[Tensor]:
    """The gradients of all ranks: one signal, and noise of their own."""
    def draw(seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    return [draw(500) + draw(600 + rank) for rank in range(n)]


@exercise("Exercise 6", cases=NOISE, tolerance=1e-6, passed="one all-reduce of the gradient, and one number more.")
def noise_scale(note, answer, samples, shape):
    rank, n = dist.get_rank(), dist.get_world_size()
    data = noisy_gradients(n, shape)
    own, whole = sum(x.square().sum() for x in data) / n, (sum(data) / n).square().sum()
    right = (own - whole) * n * samples / (n * whole - own)
    given = data[rank].clone()
    with record() as ledger:
        result = answer(given, samples)
    note.talks(ledger, n)
    got = number(result)
    if not note.holds(got is not None, "shape", f"the function returned {show(result)}."):
        return
    note.equal(torch.tensor(got, dtype=torch.float64), right, "the noise scale")
    note.holds(torch.equal(given, data[rank]), "input-changed", "the result is right, but the gradient was changed.")
    size = given.nbytes
    note.sent(ledger, sent=(bytes_sent("all_reduce", n, size), bytes_sent("all_reduce", n, size + 64)))


MISTAKES["noise_scale"] = {
    "sum": ("""The length of the *sum* over the ranks was taken, where that of their mean belongs: its square is N^2
        times too large.""", "gradient / n  ->  gradient.clone()"),
    "inverse": ("That is signal over noise. A noisy gradient must give a large number.",
            "noise / signal  ->  signal / noise"),
    "samples": ("That is right for one sample a rank. The gradient of a rank is already the mean of several.",
            "* n * samples  ->  * n"),
    "biased": ("""The mean over N ranks still contains noise, so its length is not that of the signal. Two equations,
        one for each length, have two unknowns.""",
            {"(n * whole - own) / (n - 1)": "whole",
             "(own - whole) * n * samples / (n - 1)": "(own - whole) * samples"}),
    "norms": ("The equations are about squared lengths. The mean of the lengths, squared, is something else.",
            {"gradient.square().sum(),": "gradient.norm(),", "own / n, mean": "(own / n) ** 2, mean"}),
    "own-only": ("Each rank used the length of its own gradient, so each gets another result. Average the squares.",
            "dist.all_reduce(own)  ->  own = own * n"),
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
        "dist.all_reduce(own)":
            "both = torch.cat([own[None], mean.flatten()])\ndist.all_reduce(both)\nown, mean = both[0], both[1:]",
        "dist.all_reduce(mean)": "pass",
    },
}
