"""What all exercise checks share: run an answer on real ranks, compare it, read its ledger, refuse it with a hint."""

from __future__ import annotations

import functools
import math
import re
import textwrap
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ..ranks import Watch, is_learner, share
from ._limits import COMPUTING, LIMIT, Endless, limited

__all__ = ["CheckFailed", "Exercise", "Outcome", "checked", "message_steps", "paper_problem", "values"]

share("torch._dynamo")  # what optimizers and functional collectives import: no answer has to do it on each of its ranks

BACKEND = "gloo"  # the same on every machine, whatever GPUs it has
TIMEOUT = 5.0  # seconds in which ranks that all wait for each other do nothing at all, after which they hang
RELATIVE, ABSOLUTE = 1e-4, 1e-5  # tolerance of results: the order of a sum is free
_ALONE = re.compile("Connection (closed|reset) by peer")

COMMON_HINTS = {
    "empty": "Write your answer in the cell above in place of the raise, run that cell, then run this check again.",
    "not-distributed": "Nothing was sent: each rank worked alone. What the other ranks hold has to reach this one "
    "through torch.distributed, here and now; nothing about it can be computed locally.",
    "only-two-ranks": "It is right for 2 ranks and wrong for more. Look for a 2, a 1 - rank or a rank ^ 1 where the "
    "world size belongs.",
    "one-rank": "With one rank there is nobody to talk to; the answer must work all the same.",
    "hang": "At least one rank waits for a call that another rank never makes. The table says where each of them "
    "waits.",
    "slow": "No rank waits for another in vain: at least one still computes, or sleeps. Look for a loop that has no "
    "end at the line named below.",
    "endless": "Look at the condition of the loop: what in the loop changes it?",
    "not-started": "This says nothing about your answer. Run the check again; if it stays so, run `python -m "
    "course_utils doctor` in a terminal.",
    "odd": "Return exactly what the docstring promises: this type, and nothing around it.",
    "error": "The function raised an error; the line in your code is named below.",
    "view": "A tensor need not be contiguous: reshape and flatten copy where view cannot.",
    "shape": "Numbers aside, the result has another form than the docstring promises.",
    "value": "Run the function on 2 ranks with launch, and print what each rank holds before and after each "
    "collective.",
    "input-changed": "A collective works in place. Give it a copy (x.clone()) or a new tensor where the caller's "
    "tensor must survive.",
    "too-many-bytes": "The result is right, but more bytes move than needed. record() shows the size of each call.",
}


class CheckFailed(AssertionError):
    """An answer was refused.

    Attributes
    ----------
    hint : str
        Key of the hint that was given.
    rank : int or None
        The rank whose result was refused, if one was.
    """

    def __init__(self, message: str, hint: str, rank: int | None = None):
        super().__init__(message)
        self.hint, self.rank = hint, rank

    def _render_traceback_(self) -> list[str]:
        return [f"CheckFailed: {self}"]


@dataclass
class Outcome:
    """What one rank brings back: the function's result, what it communicated, its input before and after."""

    result: Any
    ledger: Any
    before: Any
    after: Any


def _one_rank(fn: Callable, inputs: Sequence[Any], args: tuple) -> Outcome:
    import torch.distributed as dist

    from course_utils import record

    x = inputs[dist.get_rank()]
    before = x.clone()
    with record() as ledger:
        result = fn(x, *args)
    return Outcome(result, ledger, before, x)


def _is_stub(error: str, answered: bool) -> bool:
    """Whether an error is that of the empty cell, and not one of a function that has answered before."""
    kind, _, message = error.partition(": ")
    return kind == "NotImplementedError" and (message.startswith("Replace this line") or not (message or answered))


def _left_early(states: Sequence[str]) -> bool:
    """Whether some ranks of a ring have returned although all were talking to the right neighbours."""
    n = len(states)
    pairs = [(f"send to rank {(r + 1) % n} ", f"recv from rank {(r - 1) % n} ") for r in range(n)]
    talk = all(any(text in row for text in pair) for row, pair in zip(states, pairs, strict=True))
    return talk and any("returned" in row for row in states)


def checked(check: Callable) -> Callable:
    """Decorate a check: whatever an answer returns, the learner gets CheckFailed and no error of the check's own."""

    @functools.wraps(check)
    def judge(*args: Any, **kwargs: Any) -> None:
        try:
            check(*args, **kwargs)
        except CheckFailed:
            raise
        except Exception as error:
            exercise = Exercise(f"The check {check.__name__}", {})
            what = f"it cannot judge what the function returned ({type(error).__name__}: {error})."
            try:
                exercise.refuse("odd", what)
            except CheckFailed as refusal:
                raise refusal from error

    return judge


@dataclass
class Exercise:
    """One run of a check: which exercise, which case it is at, which hints it knows.

    Parameters
    ----------
    title : str
        Begins every message, such as ``Exercise 3``.
    hints : dict
        Key to text; added to the common ones.
    timeout : float
        Seconds at rest after which ranks that all wait count as hanging, where it cannot be proven at once.
    """

    title: str
    hints: dict[str, str]
    timeout: float = TIMEOUT
    case: str = ""
    fallback: str | None = None
    world_sizes: list[int] = field(default_factory=list)
    answered: bool = False  # whether the function has returned something in this process

    def run(
        self, fn: Callable, inputs: Sequence[torch.Tensor], *args: Any, case: str = "", fallback: str | None = None
    ) -> list[Outcome]:
        """Run ``fn(inputs[rank], *args)`` on ``len(inputs)`` ranks and return the outcomes by rank.

        ``case`` names the inputs in messages. ``fallback`` is the hint for a failure that nothing more exact explains.

        Raises
        ------
        CheckFailed
            The function is not written, raised an error, or did not return in time.
        """
        n = len(inputs)
        self.case = f"{n} rank{'s' * (n > 1)}" + (f", {case}" if case else "")
        seen = max((size for size in self.world_sizes if size != n), default=0)
        usual = "one-rank" if n == 1 < seen else "only-two-ranks" if seen == 2 < n else None
        self.fallback = fallback or usual
        outcomes = self._outcomes(fn, inputs, args, n)
        for rank, outcome in enumerate(outcomes):
            ended = "the function ended its process (sys.exit) instead of returning a result."
            self.require(isinstance(outcome, Outcome), "error", ended, rank)
        self.world_sizes.append(n)
        return outcomes

    def _outcomes(self, fn: Callable, inputs: Sequence[Any], args: tuple, n: int, again: bool = True) -> list[Any]:
        """What the ranks return; a failure is told as what it says about the answer."""
        from .. import HangError, WorkerError, ranks

        watch = Watch(self.timeout, COMPUTING)
        try:
            return ranks.run(_one_rank, (fn, inputs, args), {}, n, LIMIT, BACKEND, watch=watch)
        except WorkerError as error:
            if error.starting:
                return self._not_started(error, fn, inputs, args, n, again)
            if isinstance(error, HangError):
                self._refuse_hang(error)
            if _ALONE.search(error.exception):
                self.refuse("hang", f"some ranks wait for others that have finished.\n\n{error}")
            if _is_stub(error.exception, answered=bool(self.world_sizes)):
                self.refuse("empty", "there is no answer yet.")
            view = "view size is not compatible" in error.exception
            self.refuse("view" if view else "error", f"an error.\n\n{error}", error.rank)
        except RuntimeError as error:  # there are no ranks
            return self._not_started(error, fn, inputs, args, n, again)

    def _not_started(
        self, error: Exception, fn: Callable, inputs: Sequence[Any], args: tuple, n: int, again: bool
    ) -> list[Any]:
        """Try once more with fresh ranks, and then say that the machine is to blame."""
        from .. import shutdown

        shutdown()
        if again:
            return self._outcomes(fn, inputs, args, n, again=False)
        self.refuse("not-started", f"the ranks did not start.\n\n{error}")

    def _refuse_hang(self, error: Any) -> NoReturn:
        if error.kind == "stuck":
            key = "unwaited" if "unwaited" in self.hints and _left_early(error.states) else "hang"
            self.refuse(key, f"the ranks do not finish: each waits for another.\n\n{error}")
        self.refuse("slow", f"the ranks do not finish.\n\n{error}", error.rank)

    def call(self, fn: Callable, *args: Any) -> Any:
        """The result of ``fn`` in this process; refuses an empty stub, an error with the end of its traceback, and what
        does not come to an end."""
        try:
            result = limited(lambda: fn(*args))
        except Endless:
            self.refuse("endless", "the function does not come to an end.")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            if _is_stub(text, self.answered):
                self.refuse("empty", "there is no answer yet.")
            own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_learner(frame.filename)]
            self.refuse("error", f"an error.\n\n{''.join(traceback.format_list(own[-1:]))}{text}")
        self.answered = True
        return result

    def refuse(self, key: str, what: str, rank: int | None = None) -> NoReturn:
        """Raise CheckFailed with the hint ``key``, or the case's fallback if ``key`` explains little."""
        if key in ("hang", "error", "value", "shape") and self.fallback:
            key = self.fallback
        circumstances = [self.case, f"rank {rank}" if rank is not None else ""] if key != "empty" else []
        where = ", ".join(filter(None, [self.title, *circumstances]))
        hint = textwrap.fill("Hint: " + (COMMON_HINTS | self.hints)[key], 100, break_on_hyphens=False)
        what, *evidence = what.split("\n\n", 1)
        raise CheckFailed("\n\n".join([f"{where}: {what}", hint, *evidence]), key, rank) from None

    def require(self, condition: bool, key: str, what: str, rank: int | None = None) -> None:
        """Refuse with the hint ``key`` unless ``condition`` holds."""
        if not condition:
            self.refuse(key, what, rank)

    def communicates(self, rank: int, outcome: Outcome, world_size: int) -> None:
        """Refuse an answer that sends and receives nothing although there are other ranks."""
        self.require(
            world_size == 1 or len(outcome.ledger) > 0, "not-distributed", "the ledger of this rank is empty.", rank
        )

    def keeps_input(self, rank: int, outcome: Outcome) -> None:
        """Refuse an answer that changed its input."""
        same = outcome.before.shape == outcome.after.shape and torch.equal(outcome.before, outcome.after)
        self.require(same, "input-changed", "the result is right, but the input x was changed.", rank)

    def equal(
        self, rank: int, got: Any, expected: torch.Tensor, traps: dict[str, Any] | None = None, what: str = "the result"
    ) -> None:
        """Compare with ``expected``; ``traps``, hint key to wrong result(s), say which hint a wrong one gets."""
        if close(got, expected):
            return
        key = next((key for key, wrongs in (traps or {}).items() if any(close(got, w) for w in _listed(wrongs))), None)
        if key is None:
            key = "value" if isinstance(got, torch.Tensor) and got.shape == expected.shape else "shape"
        start = 0
        if key != "shape" and got.shape == expected.shape:
            start = int((~_alike(got, expected)).flatten().nonzero()[0])
        lines = f"\n  expected  {show(expected, start)}\n  got       {show(got, start)}"
        self.refuse(key, f"{what} is wrong.{lines}", rank)

    def passed(self, text: str) -> None:
        """Say that all cases passed, in one line."""
        sizes = sorted(set(self.world_sizes))
        ranks = f"on {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks: " if len(sizes) > 1 else ""
        print(f"{self.title} passed {ranks}{text}")


def values(*shape: int, seed: int) -> torch.Tensor:
    """Random float32 numbers that depend on ``seed`` only, not on the generators that ranks share."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7919 * (seed + 1)))


def close(got: Any, expected: Any) -> bool:
    """Whether two tensors agree in shape and in value: exactly if whole numbers are expected, else within tolerance."""
    if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor) or got.shape != expected.shape:
        return False
    return bool(_alike(got, expected).all())


def _alike(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    if expected.is_floating_point():
        return torch.isclose(got.double(), expected.double(), RELATIVE, ABSOLUTE)
    return got == expected


def show(value: Any, start: int = 0) -> str:
    """A result in one line: a tensor's shape, and its numbers from the flat index ``start`` on."""
    if isinstance(value, torch.Tensor):
        numbers = value.detach().flatten()[start : start + 6].tolist()
        numbers = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in numbers)
        before, after = "…, " if start else "", ", …" if value.numel() > start + 6 else ""
        return numbers if value.dim() == 0 else f"shape {tuple(value.shape)}: {before}{numbers}{after}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}: " + "; ".join(show(v) for v in value[:4])
    return "None (no return statement?)" if value is None else f"{type(value).__name__} {value!r}"[:100]


def message_steps(ledgers: Sequence[Any]) -> int:
    """Number of steps that the point-to-point messages of all ranks need.

    In one step a rank sends at most one message and receives at most one, and it can pass on only what came in an
    earlier step. Computed from the order of the calls on each rank, not from time: a send waits for the receives before
    it on the same rank, unless all ranks are at a receive; then the sends behind it must have been started with it.

    Parameters
    ----------
    ledgers : sequence of Ledger
        One per rank.
    """
    left = [deque(e for e in ledger if e.op in ("send", "recv")) for ledger in ledgers]
    sent, received = [0] * len(left), [0] * len(left)  # the step of each rank's last message out and in
    under_way: dict[tuple[int, int], deque[int]] = {}

    def send(rank: int, peer: int) -> None:
        sent[rank] = 1 + max(sent[rank], received[rank])
        under_way.setdefault((rank, peer), deque()).append(sent[rank])

    def advance(rank: int, calls: deque) -> bool:
        """Follow one rank up to a receive whose message nobody has sent yet; whether it got on at all."""
        before = len(calls)
        while calls:
            if calls[0].op == "send":
                send(rank, calls[0].peer)
            else:
                sources = range(len(left)) if calls[0].peer is None else [calls[0].peer]
                arriving = [under_way[s, rank] for s in sources if under_way.get((s, rank))]
                if not arriving:
                    break
                received[rank] = max(received[rank] + 1, min(arriving, key=lambda queue: queue[0]).popleft())
            calls.popleft()
        return len(calls) < before

    moved = True
    while moved:
        moved = any([advance(rank, calls) for rank, calls in enumerate(left)])
        if not moved:
            for rank, calls in enumerate(left):
                started = next((call for call in calls if call.op == "send"), None)
                if started is not None:
                    send(rank, started.peer)
                    calls.remove(started)
                    moved = True
    return max(sent + received)


def paper_problem(
    title: str,
    fn: Callable[..., Any],
    right: Callable[..., Any],
    cases: Sequence[tuple],
    traps: dict[str, Callable[..., Any] | list[Callable[..., Any]]],
    hints: dict[str, str],
    units: Sequence[str],
    tolerance: float = 0.01,
) -> None:
    """Check a computed answer on several inputs; one that equals the result of a known slip gets that slip's hint.

    Parameters
    ----------
    fn, right : callable
        The answer and the solution; they return a number, or a tuple with one number for each of ``units``. Where the
        solution has a word instead of a number, so must the answer.
    cases : sequence of tuple
        Arguments. The first are those of the text; the others refuse an answer that was typed, not computed.
    traps : dict
        Hint key to a callable that makes the slip, or several.
    units : sequence of str
        Of each number, for the messages.
    tolerance : float
        Relative.

    Raises
    ------
    CheckFailed
        With the hint of the slip.
    """
    exercise = Exercise(title, _PAPER_HINTS | hints)
    answers = []
    for case in cases:
        exercise.case = f"arguments {_arguments(fn, case)}"
        got, expected = _numbers(exercise.call(fn, *case)), _numbers(right(*case))
        text = _quantities(got or (), units)
        complete = got is not None and len(got) == len(units)
        exercise.require(complete, "number", f"the function returned {text or 'no number'}.")
        words = [(isinstance(g, str), isinstance(e, str)) for g, e in zip(got, expected, strict=True)]
        exercise.require(all(g == e for g, e in words), "number", f"the function returned {text}.")
        answers.append(got)
        if not _agree(got, expected, tolerance):
            slips = ((key, _numbers(slip(*case))) for key, some in traps.items() for slip in _listed(some))
            key = next((key for key, wrong in slips if _agree(got, wrong, tolerance)), "numbers")
            if len(answers) > 1 and got == answers[0]:
                key = "typed"
            exercise.refuse(
                key, f"the answer is wrong.\n  expected  {_quantities(expected, units)}\n  got       {text}"
            )
    print(f"{title} passed: {_quantities(answers[0], units)}.")


_PAPER_HINTS = {
    "number": "Return a number, or as many as the docstring says, in the units it names.",
    "numbers": "Write the units beside every factor and cancel them; then try the formula on 2 ranks by hand.",
    "limit": "2·S is the limit for many ranks. A rank keeps its share: 2(N-1)/N of S.",
    "typed": "The answer does not change with the arguments. Compute it from them.",
}


def _arguments(fn: Callable, case: tuple) -> str:
    """The arguments of a case in words, by the names that the answer gives them."""
    values, code = [v if isinstance(v, str) else f"{v:.6g}" for v in case], getattr(fn, "__code__", None)
    if code and code.co_argcount == len(values):
        values = [f"{name} {value}" for name, value in zip(code.co_varnames, values, strict=False)]
    return ", ".join(values)


def _listed(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def _numbers(value: Any) -> tuple[float | str, ...] | None:
    try:
        listed = value if isinstance(value, (tuple, list)) else (value,)
        return tuple(v if isinstance(v, str) else float(v) for v in listed)
    except (TypeError, ValueError):
        return None


def _agree(got: tuple[float | str, ...], expected: tuple[float | str, ...], tolerance: float) -> bool:
    return len(got) == len(expected) and all(
        g == e if isinstance(e, str) else math.isclose(g, e, rel_tol=tolerance)
        for g, e in zip(got, expected, strict=True)
    )


def _quantities(numbers: Sequence[float | str], units: Sequence[str]) -> str:
    labels = [*units, *[""] * len(numbers)]
    texts = [number if isinstance(number, str) else f"{number:.4g}" for number in numbers]
    return ", ".join(f"{text} {unit}".strip() for text, unit in zip(texts, labels, strict=False))
