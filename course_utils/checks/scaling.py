"""Checks of the exercises on scaling and efficiency.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import TIMEOUT, Exercise, Outcome, checked, close, paper_problem
from .training import as_list, difference, exact

__all__ = ["HINTS", "amdahl_and_gustafson", "best_buckets", "cost_of_run", "top_k_mean"]

HINTS: dict[str, dict[str, str]] = {
    "top_k_mean": {
        "values": "The largest values were taken, not the largest magnitudes. A gradient of -6 matters more than one "
        "of 2: choose by abs(), send with the sign.",
        "sum": "The ranks' entries are added up; the mean is asked for.",
        "overwritten": "Two ranks may send the same index. The second then has to be added to the first, not put in "
        "its place: index_add_ or scatter_add_, not result[indices] = values.",
        "own-entries": "Only this rank's entries are in it. Those of the other ranks have to get here.",
        "dense": "A whole gradient travels, zeros and all. Send k values and k indices.",
        "object": "Values and indices go through pickle. Gather them as tensors.",
        "too-many-bytes": "The result is right, but more than k values and k indices of each rank travel.",
        "not-added": "The residual is not used. Add it to the gradient before you choose: what was not sent before "
        "gets its turn.",
        "not-kept": "The residual stays as it was. Write into the tensor that you were given (copy_), so that the "
        "caller sees it.",
        "all-kept": "The residual still holds what was sent, so that it is sent again in the next step. Set the "
        "entries that were sent to zero.",
        "mean-kept": "The residual is what this rank wanted to send and did not. What came back from the ranks has "
        "no place in it.",
        "replaced": "The residual of earlier steps was lost: what is not sent adds up until it is.",
        "float32": "Right to 7 digits only: somewhere the gradient passes through float32.",
        "whole": "The docstring allows k to be as large as the gradient. Then everything is sent, and nothing is "
        "left.",
    },
    "amdahl_and_gustafson": {
        "percent": "Return the serial fraction as a fraction: 0.04, not 4.",
        "parallel": "That is the parallel fraction. The serial one is what is left to 1.",
        "efficiency": "1 - efficiency is not the serial fraction: on N ranks the serial part takes N times as much "
        "of the ranks' time. Solve t_N / t_1 = s + (1 - s)/N for s.",
        "ratio": "t_N / t_1 holds the parallel part as well, divided by N. Solve t_N / t_1 = s + (1 - s)/N for s.",
        "same-law": "If the batch grows with the ranks, only the parallel work grows. On one rank that work would "
        "take s + (1 - s)·N.",
        "swapped-parts": "The parallel part is multiplied by N, the serial part stays: s + (1 - s)·N.",
        "linear": "Gustafson's speed-up is less than N: the serial part is done once, by all ranks at the same time.",
        "limit": "With ever more ranks (1 - s)/N vanishes, and s remains.",
        "speed-up-order": "The speed-ups are right and in another order. The docstring names it.",
    },
    "cost_of_run": {
        "no-efficiency": "The efficiency is left out. All GPUs together process gpus · efficiency times the tokens "
        "of one.",
        "upside-down": "A lower efficiency makes the run longer. Divide by it.",
        "dollars-ideal": "The hours are right, but the money is that of a perfect run. What is rented is paid while "
        "it waits, too.",
        "one-gpu": "The price is for one GPU and one hour. All of them are paid.",
        "not-shared": "The tokens are shared among all GPUs.",
        "seconds": "These are seconds. Prices go by the hour.",
        "lost-ignored": "A share of the time is lost to interruptions; it has to be paid, and waited for.",
        "lost-added": "If a share is lost of all hours, 1 - lost of them do the work. Divide by it.",
        "lost-twice": "The time lost is in the hours already.",
    },
    "best_buckets": {
        "pair": "Return a pair (buckets, milliseconds); buckets is a whole number from 1 to tensors.",
        "gigabits": "Gb are bits: 400 Gb/s carry 50 GB/s.",
        "microseconds": "The latency is in µs, the backward in ms. Work in seconds, and return milliseconds.",
        "milliseconds": "The time is right, but in seconds. The docstring asks for milliseconds.",
        "half": "A ring all-reduce has 2(N-1) steps: N-1 that add and N-1 that pass on the sums.",
        "whole-bucket": "In each step of a ring only 1/N of the bucket travels.",
        "no-latency": "Every bucket pays 2(N-1) latencies, however small it is. Without them the smallest buckets "
        "would always be best.",
        "all-hidden": "The last bucket is complete when backward ends. Nothing is left to hide its all-reduce behind.",
        "no-start": "The first bucket is complete only after 1/n of backward. Until then nothing is sent.",
        "time": "The time does not belong to that number of buckets. Draw backward as n pieces, and the all-reduces "
        "below it: one begins when its piece has ended and the one before it too.",
        "one-bucket": "With one bucket nothing overlaps. If one is always best by your formula, then it lets the "
        "all-reduces wait for the end of backward.",
        "one-per-tensor": "As many buckets as tensors overlap best, but pay too many latencies. There is a faster "
        "number.",
        "one-backward": "That is the largest number with which communication keeps up with backward, or its "
        "neighbour. If the bytes alone take longer than backward, it does not exist, and something else decides.",
        "not-best": "The time belongs to that number of buckets, but another number is faster. There are few: try "
        "all.",
    },
}  # fmt: skip

# ------------------------------------------------------------------------------------------------ top-k

STEPS, SHAPE = 4, (6, 10)


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
    numel = math.prod(SHAPE)
    for n, k, fallback in ((2, 4, None), (2, numel, "whole"), (3, 4, None), (4, 3, None), (1, 4, None)):
        data = []
        for rank in range(n):
            x = torch.randn(STEPS, *SHAPE, generator=torch.Generator().manual_seed(50 + rank), dtype=torch.float64)
            x[::2, 1, 2] += 5  # every rank will send these
            x[:, 3, 4] -= 6
            data.append(x)
        outcomes = exercise.run(_compress, data, fn, k, case=f"k = {k} of {numel}", fallback=fallback)
        residuals = [torch.zeros(SHAPE, dtype=torch.float64)] * n
        for step in range(STEPS):
            gradients = [x[step] for x in data]
            totals = [r + g for r, g in zip(residuals, gradients, strict=True)]
            for rank, outcome in enumerate(outcomes):
                exercise.communicates(rank, outcome, n)
                _top_k_step(exercise, rank, outcome.result[step], totals, gradients, k, f"step {step + 1}: ")
            residuals = [t - _one_top_k(t, k) for t in totals]
        for rank, outcome in enumerate(outcomes):
            exercise.keeps_input(rank, outcome)
            if n > 1 and k < numel:
                _audit_top_k(exercise, rank, outcome, n, k, data[0][0].nbytes)
    exercise.passed("k values and k indices of each rank, and nothing is lost.")


def _top_k_step(
    exercise: Exercise, rank: int, got: dict, totals: list[Tensor], gradients: list[Tensor], k: int, where: str
) -> None:
    n, total = len(totals), totals[rank]
    mean, kept = sum(_one_top_k(t, k) for t in totals) / n, total - _one_top_k(total, k)
    traps = _top_k_traps(totals, gradients, k, rank) if n == 2 and not exercise.fallback else {}
    _same(exercise, rank, got["result"], mean, traps, f"{where}the result")
    before = total - gradients[rank]
    traps = {
        "replaced": gradients[rank] - _one_top_k(total, k), "all-kept": total, "mean-kept": total - mean,
        "not-kept": before,
    }  # fmt: skip
    if exercise.fallback:
        traps = {}
    _same(exercise, rank, got["residual"], kept, traps, f"{where}the residual")


def _same(exercise: Exercise, rank: int, got: Any, expected: Tensor, traps: dict[str, Any], what: str) -> None:
    """Refuse what is not equal to 1e-12, with the hint of the mistake that makes it."""
    if exact(got, expected):
        return
    alike = (key for key, some in traps.items() for wrong in as_list(some) if close(got, wrong))
    form = isinstance(got, Tensor) and got.shape == expected.shape
    key = "float32" if close(got, expected) else next(alike, "value" if form else "shape")
    exercise.refuse(key, f"{what} is wrong.{difference(got, expected)}", rank)


def _audit_top_k(exercise: Exercise, rank: int, outcome: Outcome, n: int, k: int, whole: int) -> None:
    """Refuse more bytes than k float64 values and k int64 indices of each rank."""
    objects = any("_object" in entry.call_site for entry in outcome.ledger)
    exercise.require(not objects, "object", "the ledger shows an all-gather of objects.", rank)
    largest = max(entry.bytes for entry in outcome.ledger)
    what = f"a call carries {largest} bytes; the whole gradient has {whole}."
    exercise.require(largest < whole, "dense", what, rank)
    size, enough = outcome.ledger.bytes() / STEPS, n * k * 16
    what = f"{size:.0f} bytes travel in a step; {enough} are enough."
    exercise.require(size <= enough, "too-many-bytes", what, rank)


# ------------------------------------------------------------------------------------------------ paper problems


@checked
def amdahl_and_gustafson(fn: Callable) -> None:
    """Check ``fn(seconds_1, seconds_n, n, ranks) -> (serial, speed-up, limit, weak speed-up)``."""

    def serial(t1: float, tn: float, n: int) -> float:
        return (tn / t1 - 1 / n) / (1 - 1 / n)

    def answer(
        fraction: Callable[[float, float, int], float] = serial,
        limit: Callable[[float], float] = lambda s: 1 / s,
        weak: Callable[[float, int], float] = lambda s, n: s + (1 - s) * n,
        shown: Callable[[float], float] = lambda s: s,
    ) -> Callable[..., tuple[float, ...]]:
        def law(t1: float, tn: float, n: int, ranks: int) -> tuple[float, ...]:
            s = fraction(t1, tn, n)
            return shown(s), 1 / (s + (1 - s) / ranks), limit(s), weak(s, ranks)

        return law

    def reordered(*case: Any) -> tuple[float, ...]:
        s, strong, limit, weak = answer()(*case)
        return s, strong, weak, limit

    def mirrored(*case: Any) -> tuple[float, ...]:
        s, strong, limit, weak = answer()(*case)
        return s, weak, limit, strong

    paper_problem(
        "Exercise 2", fn, answer(), [(0.8, 0.13, 8, 64), (1.2, 0.66, 2, 16), (10, 0.5, 32, 512)],
        {
            "percent": answer(shown=lambda s: 100 * s),
            "parallel": [answer(shown=lambda s: 1 - s), answer(lambda *case: 1 - serial(*case))],
            "efficiency": answer(lambda t1, tn, n: 1 - t1 / (n * tn)),
            "ratio": answer(lambda t1, tn, n: tn / t1),
            "same-law": answer(weak=lambda s, n: 1 / (s + (1 - s) / n)),
            "swapped-parts": answer(weak=lambda s, n: s * n + 1 - s),
            "linear": answer(weak=lambda s, n: n),
            "limit": [answer(limit=lambda s: 1 / (1 - s)), answer(limit=lambda s: math.inf)],
            "speed-up-order": [reordered, mirrored],
        },
        HINTS["amdahl_and_gustafson"], ["serial", "× at most by Amdahl", "× in the limit", "× by Gustafson"],
    )  # fmt: skip


@checked
def cost_of_run(fn: Callable) -> None:
    """Check ``fn(tokens, tokens_per_second, gpus, efficiency, lost, dollars) -> (hours, dollars)``."""

    def cost(
        speed: Callable[[int, float], float] = lambda gpus, efficiency: gpus * efficiency,
        longer: Callable[[float], float] = lambda lost: 1 / (1 - lost),
        paid: Callable[[int], float] = lambda gpus: gpus,
        paid_longer: Callable[[float], float] = lambda lost: 1.0,
        hour: float = 3600,
    ) -> Callable[..., tuple[float, float]]:
        def answer(tokens: float, rate: float, gpus: int, efficiency: float, lost: float, dollars: float):
            hours = tokens / (rate * speed(gpus, efficiency)) / hour * longer(lost)
            return hours, hours * paid(gpus) * dollars * paid_longer(lost)

        return answer

    def ideal(tokens: float, rate: float, gpus: int, efficiency: float, lost: float, dollars: float):
        hours, paid = cost()(tokens, rate, gpus, efficiency, lost, dollars)
        return hours, paid * efficiency

    paper_problem(
        "Exercise 3", fn, cost(),
        [
            (1e11, 40150, 256, 15700 / 40150, 0, 2.5), (1e11, 40150, 256, 15700 / 40150, 0.1, 1.0),
            (1e11, 40150, 8, 1, 0.3, 2.5), (5e9, 3000, 2, 0.95, 0.2, 1.5),
        ],
        {
            "no-efficiency": cost(lambda gpus, efficiency: gpus),
            "upside-down": cost(lambda gpus, efficiency: gpus / efficiency),
            "dollars-ideal": ideal,
            "one-gpu": cost(paid=lambda gpus: 1),
            "not-shared": [cost(lambda gpus, efficiency: efficiency)],
            "seconds": cost(hour=1),
            "lost-ignored": cost(longer=lambda lost: 1),
            "lost-added": [cost(longer=lambda lost: 1 + lost), cost(longer=lambda lost: 1 - lost)],
            "lost-twice": cost(paid_longer=lambda lost: 1 / (1 - lost)),
        },
        HINTS["cost_of_run"], ["h", "$"],
    )  # fmt: skip


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


@checked
def best_buckets(fn: Callable) -> None:
    """Check ``fn(gradient_bytes, tensors, backward_ms, ranks, latency_us, gigabits) -> (buckets, milliseconds)``."""
    exercise = Exercise("Exercise 4", HINTS["best_buckets"])
    said = []
    for case in (
        (2.6e9, 148, 200, 64, 14, 400), (2.6e9, 148, 200, 64, 14, 100), (2.6e9, 148, 500, 8, 14, 400),
        (2e6, 60, 1, 64, 14, 100), (14e9, 290, 900, 256, 14, 400),
    ):  # fmt: skip
        exercise.case = f"arguments {', '.join(f'{v:.6g}' for v in case)}"
        got = exercise.call(fn, *case)
        pair = isinstance(got, (tuple, list)) and len(got) == 2 and all(isinstance(v, (int, float)) for v in got)
        pair = pair and float(got[0]).is_integer() and 1 <= got[0] <= case[1]
        exercise.require(pair, "pair", f"the function returned {got!r}.")
        said.append(_best_buckets(exercise, int(got[0]), float(got[1]), case))
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
        key = next((key for key, wrong in slips.items() if math.isclose(ms, wrong, rel_tol=1e-3)), "time")
        what = f"the time is wrong.\n  expected  {right:.6g} ms for {n} buckets\n  got       {ms:.6g} ms"
        exercise.refuse(key, what)
    best = min(range(1, tensors + 1), key=seconds)
    if seconds(n) > 1.001 * seconds(best):
        latency, rest = _all_reduce(0, ranks, us, gb), backward - _all_reduce(size, ranks, 0, gb)
        keeps_up = min(tensors, max(1, rest / latency))
        key = "one-bucket" if n == 1 else "one-per-tensor" if n == tensors else "not-best"
        key = "one-backward" if key != "one-per-tensor" and rest <= 0 and abs(n - keeps_up) <= 1 else key
        what = f"another number is faster.\n  best  {best} buckets, {1e3 * seconds(best):.6g} ms\n"
        exercise.refuse(key, f"{what}  got   {n} buckets, {ms:.6g} ms")
    return f"{n} buckets of {size / n / 1e6:.0f} MB, {ms:.4g} ms"
