"""Checks of the exercises on scaling and efficiency.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_utils.check import TIMEOUT, Exercise, checked, load_hints, number, paper_problem, show
from course_utils.check.compare import slip_of
from course_utils.check.training import compare_tensor
from course_utils.costs import bytes_sent

__all__ = [
    "HINTS", "amdahl_and_gustafson", "best_buckets", "cost_of_run", "mfu_and_hfu", "noise_scale", "top_k_mean",
]

HINTS = load_hints(__file__)

# ------------------------------------------------------------------------------------------------ top-k

STEPS = 4
_MATRIX = (6, 10)
_TOP_K = (  # ranks, k, shape, hint if it fails first
    (2, 4, _MATRIX, None), (2, 60, _MATRIX, "whole"), (2, 4, (3, 4, 5), "any-shape"), (2, 4, (60,), "any-shape"),
    (2, 5, (70_000,), "large-indices"), (3, 4, _MATRIX, None), (4, 3, _MATRIX, None), (1, 4, _MATRIX, None),
)  # fmt: skip


def _gradients(rank: int, shape: tuple[int, ...]) -> Tensor:
    """The gradients of all steps of a rank. Some elements are so large that every rank sends them."""
    x = torch.randn(STEPS, *shape, generator=torch.Generator().manual_seed(50 + rank), dtype=torch.float64)
    flat = x.flatten(1)
    flat[::2, 12] += 5
    flat[:, 34] -= 6
    flat[1::2, -1] += 5
    return x


def _compress(x: Tensor, fn: Callable, k: int) -> list[dict]:
    residual, out = torch.zeros_like(x[0]), []
    for gradient in x:
        result = fn(gradient, residual, k)
        result = result.clone() if isinstance(result, Tensor) else result
        out.append({"result": result, "residual": residual.clone()})
    return out


def _one_top_k(total: Tensor, k: int, by: Callable[[Tensor], Tensor] = torch.abs) -> Tensor:
    """``total`` with only its k largest entries."""
    kept = torch.zeros_like(total).flatten()
    chosen = by(total.flatten()).topk(k).indices
    kept[chosen] = total.flatten()[chosen]
    return kept.view_as(total)


def _top_k_traps(totals: list[Tensor], gradients: list[Tensor], k: int, rank: int) -> dict[str, Any]:
    """Hint key to wrong results of a step in which the ranks choose from ``totals``."""
    n, sent = len(totals), [_one_top_k(t, k) for t in totals]
    last = torch.zeros_like(sent[0])
    for part in sent:
        last = torch.where(part != 0, part, last)
    return {
        "not-added": sum(_one_top_k(g, k) for g in gradients) / n,
        "values": sum(_one_top_k(t, k, by=lambda x: x) for t in totals) / n,
        "sum": sum(sent),
        "overwritten": [last / n, last],
        "own-entries": [sent[rank], sent[rank] / n],
    }


@checked
def top_k_mean(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(gradient, residual, k) -> mean``: k values and indices of each rank, the rest kept."""
    exercise = Exercise("Exercise 1", HINTS["top_k_mean"], timeout)
    for n, k, shape, fallback in _TOP_K:
        data = [_gradients(rank, shape) for rank in range(n)]
        whole = data[0][0].nbytes
        case = f"k = {k} of {math.prod(shape)}, shape {shape}"
        outcomes = exercise.run(_compress, data, fn, k, case=case, fallback=fallback, errors="unpack")
        residuals = [torch.zeros(shape, dtype=torch.float64)] * n
        for step in range(STEPS):
            gradients = [x[step] for x in data]
            totals = [r + g for r, g in zip(residuals, gradients, strict=True)]
            for rank, outcome in exercise.each(outcomes, f"step {step + 1}: "):
                exercise.communicates(rank, outcome, n)
                _top_k_step(exercise, rank, outcome.result[step], totals, gradients, k)
            residuals = [t - _one_top_k(t, k) for t in totals]
        for rank, outcome in exercise.each(outcomes):
            exercise.keeps_input(rank, outcome)
            if fallback != "whole":
                one = STEPS * k  # pairs that a rank sends to each other one; 8 bytes of a value, 1 to 8 of an index
                exercise.audit(
                    outcome.ledger, sent=(one * 9, one * 16 * (n - 1)), largest=whole - 1, keys={"too-large": "dense"}
                )
    exercise.passed("k values and k indices of each rank, and nothing is lost.")


def _top_k_step(
    exercise: Exercise, rank: int, got: dict, totals: list[Tensor], gradients: list[Tensor], k: int
) -> None:
    """Compare result and residual of a step in which the ranks choose from ``totals``."""
    n, total, gradient = len(totals), totals[rank], gradients[rank]
    mean, kept = sum(_one_top_k(t, k) for t in totals) / n, total - _one_top_k(total, k)
    slips = _top_k_traps(totals, gradients, k, rank) if n == 2 and not exercise.fallback else {}
    compare_tensor(exercise, got["result"], mean, slips, "the result")
    residuals = {
        "replaced": gradient - _one_top_k(total, k), "all-kept": total, "mean-kept": total - mean,
        "not-kept": total - gradient,
    }  # fmt: skip
    compare_tensor(exercise, got["residual"], kept, {} if exercise.fallback else residuals, "the residual")


# ------------------------------------------------------------------------------------------------ paper problems


SERIAL = "(seconds_n / seconds_1 - 1 / n) / (1 - 1 / n)"
STRONG, WEAK = "1 / (s + (1 - s) / ranks)", "s + (1 - s) * ranks"


@paper_problem(
    "Exercise 2",
    cases=[(0.8, 0.13, 8, 64), (1.2, 0.66, 2, 16), (10, 0.5, 32, 512), (3, 1.1, 3, 50)],
    slips={
        "percent": "return s,  ->  return 100 * s,",
        "parallel": ["return s,  ->  return 1 - s,", "s = (  ->  s = 1 - ("],
        "efficiency": f"{SERIAL}  ->  1 - seconds_1 / (n * seconds_n)",
        "ratio": f"{SERIAL}  ->  seconds_n / seconds_1",
        "same-law": f"{WEAK}  ->  {STRONG}",
        "swapped-parts": f"{WEAK}  ->  s * ranks + 1 - s",
        "linear": f"{WEAK}  ->  ranks",
        "limit": ["1 / s,  ->  1 / (1 - s),", "1 / s,  ->  float('inf'),"],
        "speed-up-order": [
            f"1 / s, {WEAK}  ->  {WEAK}, 1 / s", f"{STRONG}, 1 / s, {WEAK}  ->  {WEAK}, 1 / s, {STRONG}",
        ],
    },
    units=["serial", "× at most by Amdahl", "× in the limit", "× by Gustafson"],
    hints=HINTS["amdahl_and_gustafson"],
    allowed=lambda seconds_1, seconds_n, n, ranks: 1.02 / n < seconds_n / seconds_1 < 1,
)  # fmt: skip
def amdahl_and_gustafson(seconds_1, seconds_n, n, ranks):
    """Check ``fn(seconds_1, seconds_n, n, ranks) -> (serial, speed-up, limit, weak speed-up)``."""
    s = (seconds_n / seconds_1 - 1 / n) / (1 - 1 / n)
    return s, 1 / (s + (1 - s) / ranks), 1 / s, s + (1 - s) * ranks


@paper_problem(
    "Exercise 3",
    cases=[
        (1e11, 40150, 256, 15700 / 40150, 0, 2.5), (1e11, 40150, 256, 15700 / 40150, 0.1, 1.0),
        (1e11, 40150, 8, 1, 0.3, 2.5), (5e9, 3000, 2, 0.95, 0.2, 1.5),
    ],
    slips={
        "no-efficiency": " * efficiency  ->  ",
        "upside-down": "* efficiency  ->  / efficiency",
        "dollars-ideal": "hours * gpus * dollars  ->  hours * gpus * dollars * efficiency",
        "one-gpu": "hours * gpus * dollars  ->  hours * dollars",
        "not-shared": "* gpus * efficiency  ->  * efficiency",
        "seconds": "/ 3600  ->  ",
        "lost-ignored": "/ (1 - lost)  ->  ",
        "lost-added": ["/ (1 - lost)  ->  * (1 + lost)", "/ (1 - lost)  ->  * (1 - lost)"],
        "lost-twice": "hours * gpus * dollars  ->  hours * gpus * dollars / (1 - lost)",
    },
    units=["h", "$"],
    hints=HINTS["cost_of_run"],
)  # fmt: skip
def cost_of_run(tokens, tokens_per_second, gpus, efficiency, lost, dollars):
    """Check ``fn(tokens, tokens_per_second, gpus, efficiency, lost, dollars) -> (hours, dollars)``."""
    hours = tokens / (tokens_per_second * gpus * efficiency) / 3600 / (1 - lost)
    return hours, hours * gpus * dollars


# ------------------------------------------------------------------------------------------------ bucket size


def _all_reduce(
    size: float, ranks: int, latency_us: float, gigabits: float, steps: float = 2, share: bool = True, bits: float = 8
) -> float:
    """Seconds of a ring all-reduce."""
    travels = size / ranks if share else size
    return steps * (ranks - 1) * (latency_us * 1e-6 + travels * bits / (gigabits * 1e9))


def _finish(n: int, backward: float, one: float) -> float:
    """Seconds from the start of backward until the last of n equal buckets, each ``one`` second, is reduced."""
    return backward / n + (n - 1) * max(backward / n, one) + one


_BUCKETS = (
    (2.6e9, 148, 200, 64, 14, 400), (2.6e9, 148, 200, 64, 14, 100), (2.6e9, 148, 500, 8, 14, 400),
    (2e6, 60, 1, 64, 14, 100), (14e9, 290, 900, 256, 14, 400), (2.6e9, 12, 500, 8, 14, 400),
    (2e6, 60, 1, 256, 14, 100),
)  # fmt: skip


@checked
def best_buckets(fn: Callable) -> None:
    """Check ``fn(gradient_bytes, tensors, backward_ms, ranks, latency_us, gigabits) -> (buckets, milliseconds)``."""
    exercise = Exercise("Exercise 4", HINTS["best_buckets"])
    said = []
    for case in _BUCKETS:
        exercise.case = f"arguments {', '.join(f'{v:.6g}' for v in case)}"
        got = exercise.call(fn, *case)
        pair = got.tolist() if isinstance(got, Tensor | np.ndarray) else got
        numbers = [number(v) for v in pair] if isinstance(pair, tuple | list) else []
        exercise.require(len(numbers) == 2 and None not in numbers, "pair", f"the function returned {show(got)}.")
        n, ms = numbers
        exercise.require(n.is_integer() and 1 <= n <= case[1], "pair", f"the function returned {n:g} buckets.")
        said.append(_best_buckets(exercise, int(n), ms, case))
    print(f"Exercise 4 passed: {said[0]}.")


def _best_buckets(exercise: Exercise, n: int, ms: float, case: tuple) -> str:
    size, tensors, backward_ms, ranks, us, gb = case
    backward = backward_ms * 1e-3

    def seconds(buckets: int, finish: Callable = _finish, us: float = us, **slip: Any) -> float:
        return finish(buckets, backward, _all_reduce(size / buckets, ranks, us, gb, **slip))

    right = 1e3 * seconds(n)
    slips = {
        "gigabits": 1e3 * seconds(n, bits=1), "half": 1e3 * seconds(n, steps=1),
        "whole-bucket": 1e3 * seconds(n, share=False), "no-latency": 1e3 * seconds(n, us=0),
        "microseconds": 1e3 * seconds(n, us=1e3 * us), "milliseconds": seconds(n),
        "all-hidden": 1e3 * seconds(n, lambda n, backward, one: max(backward, n * one)),
        "no-start": 1e3 * seconds(n, lambda n, backward, one: max(backward + one, n * one)),
    }  # fmt: skip
    if not math.isclose(ms, right, rel_tol=1e-3):
        key = slip_of(slips, lambda wrong: math.isclose(ms, wrong, rel_tol=1e-3), "time")
        exercise.differs(key, "the time is wrong.", f"{right:.6g} ms for {n} buckets", f"{ms:.6g} ms")
    best = min(range(1, tensors + 1), key=seconds)
    if seconds(n) > 1.001 * seconds(best):
        latency, rest = _all_reduce(0, ranks, us, gb), backward - _all_reduce(size, ranks, 0, gb)
        keeps_up = min(tensors, max(1, rest / latency))
        key = "one-bucket" if n == 1 else "one-per-tensor" if n == tensors else "not-best"
        key = "one-backward" if key != "one-per-tensor" and rest <= 0 and abs(n - keeps_up) <= 1 else key
        what = f"another number is faster.\n  best  {best} buckets, {1e3 * seconds(best):.6g} ms\n"
        exercise.refuse(key, f"{what}  got   {n} buckets, {ms:.6g} ms")
    return f"{n} buckets of {size / n / 1e6:.0f} MB, {ms:.4g} ms"


# ------------------------------------------------------------------------------------------------ utilization


@paper_problem(
    "Exercise 5",
    cases=[
        (175e9, 102_400, 1024, 312, 1), (8e9, 60_000, 8, 989, 0), (70e9, 50_000, 128, 989, 0.5),
        (1.3e9, 200_000, 8, 312, 0.25),
    ],
    slips={
        "percent": "return 6 * rate, hfu,  ->  return 600 * rate, 100 * hfu,",
        "swapped": "return 6 * rate, hfu,  ->  return hfu, 6 * rate,",
        "forward-only": {"(6 + 2 * recomputed)": "(2 + 2 * recomputed)", "return 6 * rate": "return 2 * rate",
                         "hfu / rate / 6": "hfu / rate / 2"},
        "model-counts-again": "return 6 * rate,  ->  return hfu,",
        "backward-again": "(6 + 2 * recomputed)  ->  (6 + 6 * recomputed)",
        "always-repeated": "(6 + 2 * recomputed)  ->  8",
        "one-gpu": "tokens_per_second / gpus  ->  tokens_per_second",
        "tera": "(peak_tflops * 1e12)  ->  peak_tflops",
        "not-faster": "tokens_per_second * hfu / rate / 6  ->  tokens_per_second",
        "slower": "tokens_per_second * hfu / rate / 6  ->  tokens_per_second * rate * 6 / hfu",
    },
    units=["MFU", "HFU", "tokens/s"],
    hints=HINTS["mfu_and_hfu"],
)  # fmt: skip
def mfu_and_hfu(parameters, tokens_per_second, gpus, peak_tflops, recomputed):
    """Check ``fn(parameters, tokens_per_second, gpus, peak_tflops, recomputed) -> (MFU, HFU, tokens per second)``."""
    rate = tokens_per_second / gpus * parameters / (peak_tflops * 1e12)
    hfu = (6 + 2 * recomputed) * rate
    return 6 * rate, hfu, tokens_per_second * hfu / rate / 6


# ------------------------------------------------------------------------------------------------ noise scale

_NOISE = ((2, 4, (6, 10)), (3, 5, (90,)), (4, 1, (3, 4, 5)))  # ranks, samples of each, shape


def _noisy_gradients(n: int, shape: tuple[int, ...]) -> list[Tensor]:
    """The gradients of all ranks: one signal, and noise of their own."""
    def draw(seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    return [draw(500) + draw(600 + rank) for rank in range(n)]


def _noise(own: float, whole: float, n: int, samples: int) -> float:
    return (own - whole) * n * samples / (n * whole - own)


@checked
def noise_scale(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(gradient, samples) -> number``: noise over signal, with one all-reduce of the gradient."""
    exercise = Exercise("Exercise 6", HINTS["noise_scale"], timeout)
    for n, samples, shape in _NOISE:
        data = _noisy_gradients(n, shape)
        mean = sum(data) / n
        squares, whole = [x.square().sum().item() for x in data], mean.square().sum().item()
        own = sum(squares) / n
        right = _noise(own, whole, n, samples)
        norms = (sum(x.norm().item() for x in data) / n) ** 2
        outcomes = exercise.run(fn, data, samples, case=f"{samples} samples a rank, shape {shape}")
        for rank, outcome in exercise.each(outcomes):
            exercise.communicates(rank, outcome, n)
            got = number(outcome.result)
            exercise.require(got is not None, "number", f"the function returned {show(outcome.result)}.", rank)
            slips = {
                "sum": _noise(own, n * n * whole, n, samples), "inverse": 1 / right, "samples": right / samples,
                "biased": (own - whole) * samples / whole, "norms": _noise(norms, whole, n, samples),
                "own-only": _noise(squares[rank], whole, n, samples),
            }  # fmt: skip
            if not math.isclose(got, right, rel_tol=1e-6):
                key = slip_of(slips, lambda wrong, got=got: math.isclose(got, wrong, rel_tol=1e-6), "value")
                exercise.differs(key, "the noise scale is wrong.", f"{right:.6g}", f"{got:.6g}", rank)
            exercise.keeps_input(rank, outcome)
            size = data[0].nbytes
            limits = bytes_sent("all_reduce", n, size), bytes_sent("all_reduce", n, size + 64)
            exercise.audit(outcome.ledger, sent=limits)
    exercise.passed("one all-reduce of the gradient, and one number more.")
