"""One run of an exercise check: an answer on real ranks or in the notebook, compared, audited, refused with a hint."""

from __future__ import annotations

import contextlib
import functools
import re
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ..classroom import telling
from ..ranks import Watch, is_learner, share
from .hints import COMMON_HINTS
from .limits import COMPUTING, LIMIT, Endless, limited

__all__ = ["BACKEND", "COMMON_HINTS", "TIMEOUT", "CheckFailed", "Exercise", "Outcome", "checked"]

BACKEND = "gloo"  # the same on every machine, whatever GPUs it has
TIMEOUT = 5.0  # seconds in which ranks that all wait for each other do nothing at all, after which they hang
_ALONE = re.compile("Connection (closed|reset) by peer")
_RANKS = re.compile(  # errors that the number of ranks may explain: an index, a rank, a size, which gloo checks itself
    r"\A(IndexError|KeyError)|\b(rank|peer|index|not in (list|tuple)|not connected)\b|shapes?\b|Check failed"
    r"|\b(sizes?|length|numel|elements?|divisible|split\w*|SIGABRT)\b",
    re.IGNORECASE,
)


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


def _one_rank(fn: Callable, inputs: list[Any], args: tuple) -> Outcome:
    import torch.distributed as dist

    from course_utils import record

    x, inputs[:] = inputs[dist.get_rank()], []  # what other ranks hold has to be sent
    before = x.clone()
    with record() as ledger:
        result = fn(x, *args)
    return Outcome(result, ledger, before, x)


def _is_stub(error: str, answered: bool) -> bool:
    """Whether an error is that of the empty cell, and not one of a function that has answered before."""
    kind, _, message = error.partition(": ")
    return kind == "NotImplementedError" and (message.startswith("Replace this line") or not (message or answered))


def _in_short(error: str) -> str:
    """The first line of an error's text as the end of a sentence."""
    return textwrap.shorten(error.strip().split("\n")[0], 100, placeholder=" …").rstrip(".:") + "."


def _left_early(states: Sequence[str]) -> bool:
    """Whether some ranks of a ring have returned although all were talking to the right neighbours."""
    n = len(states)
    pairs = [(f"send to rank {(r + 1) % n} ", f"recv from rank {(r - 1) % n} ") for r in range(n)]
    talk = all(any(text in row for text in pair) for row, pair in zip(states, pairs, strict=True))
    return talk and any("returned" in row for row in states)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch computes in one thread: with tensors as small as those of the checks, several wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def checked(check: Callable) -> Callable:
    """Decorate a check: whatever an answer returns, the learner gets CheckFailed and no error of the check's own.

    Its ranks find its module imported. One whose ranks train shares ``torch._dynamo`` too, which optimizers import.
    """
    if check.__module__.startswith("lessons."):
        share(check.__module__)

    @functools.wraps(check)
    @telling(check)
    def judge(*args: Any, **kwargs: Any) -> None:
        try:
            with _one_thread():
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
    program : callable
        What each rank runs, given the answer, the inputs of all ranks and the other arguments; it returns an `Outcome`.
    options : mapping
        More arguments of `ranks.run` from the next case on, such as ``{"hosts": {"hosts": 2}}``.
    explained : mapping
        Patterns in the text of a hang or an error, to the hint of its own that it has.
    """

    title: str
    hints: dict[str, str]
    timeout: float = TIMEOUT
    program: Callable[..., Outcome] = _one_rank
    options: Mapping[str, Any] = field(default_factory=dict)
    explained: Mapping[str, str] = field(default_factory=dict)
    case: str = ""
    fallback: str | None = None
    world_sizes: list[int] = field(default_factory=list)
    answered: bool = False  # whether the function has returned something in this process
    rank: int | None = None  # the rank that refusals are about, if they name no other
    own_fallback: bool = False  # whether the case brought `fallback`, and not the number of ranks
    case_errors: str | None = None  # pattern of more errors that the case's own fallback explains

    def run(
        self,
        fn: Callable,
        inputs: Sequence[torch.Tensor],
        *args: Any,
        case: str = "",
        fallback: str | None = None,
        errors: str | None = None,
    ) -> list[Outcome]:
        """Run ``fn(inputs[rank], *args)`` on ``len(inputs)`` ranks and return the outcomes by rank.

        ``case`` names the inputs in messages. ``fallback`` is the hint for a failure that nothing more exact explains:
        a wrong value or shape, ranks that wait for each other, and an error about an index, a rank or a size, or one
        whose type and message the regular expression ``errors`` matches. Without one, a failure on more ranks than 2
        after 2 ranks have passed is *only-two-ranks*, if it is a wrong value or shape, an error about an index, a rank
        or a size, or ranks that wait in a send or receive.

        On a rank ``inputs`` is empty when ``fn`` is called: an answer cannot look up what other ranks were given.

        Raises
        ------
        CheckFailed
            The function is not written, raised an error, or did not return in time.
        """
        n = len(inputs)
        self.case, self.rank = f"{n} rank{'s' * (n > 1)}" + (f", {case}" if case else ""), None
        seen = max((size for size in self.world_sizes if size != n), default=0)
        usual = "one-rank" if n == 1 < seen else "only-two-ranks" if seen == 2 < n else None
        self.fallback, self.own_fallback, self.case_errors = fallback or usual, fallback is not None, errors
        outcomes = self._outcomes(fn, list(inputs), args, n)
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
            return ranks.run(self.program, (fn, inputs, args), {}, n, LIMIT, BACKEND, watch=watch, **self.options)
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
            ended = f"the function did not return a result: {_in_short(error.exception)}"
            self.refuse("view" if view else self._error(error.exception), f"{ended}\n\n{error}", error.rank)
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
            messages = any(re.search(r"\b(send|recv)\b", state) for state in error.states)
            explained = next((hint for words, hint in self.explained.items() if re.search(words, str(error))), None)
            explained = explained or (self.fallback if self.own_fallback or messages else None)
            key = "unwaited" if "unwaited" in self.hints and _left_early(error.states) else explained or "hang"
            self.refuse(key, f"the ranks do not finish: at least one waits in vain.\n\n{error}")
        self.refuse("slow", f"the ranks do not finish.\n\n{error}", error.rank)

    def call(self, fn: Callable, *args: Any, **named: Any) -> Any:
        """The result of ``fn`` in this process; refuses an empty stub, an error with the end of its traceback, and what
        does not come to an end."""
        try:
            result = limited(lambda: fn(*args, **named))
        except Endless:
            self.refuse("endless", "the function does not come to an end.")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            if _is_stub(text, self.answered):
                self.refuse("empty", "there is no answer yet.")
            own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_learner(frame.filename)]
            ended = f"the function did not return a result: {_in_short(text)}"
            self.refuse(self.fallback or "error", f"{ended}\n\n{''.join(traceback.format_list(own[-1:]))}{text}")
        self.answered = True
        return result

    def _error(self, text: str) -> str:
        """The hint for an error of the answer's: the fallback where it is about what differs in this case."""
        named = self.own_fallback and self.case_errors and re.search(self.case_errors, text)
        told = named or self.fallback == "one-rank" or _RANKS.search(text)
        return self.fallback if self.fallback and told else "error"

    def each(self, outcomes: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Pairs of rank and outcome; what is refused in the body of the loop over them is refused on that rank."""
        before = self.rank
        try:
            for self.rank, outcome in enumerate(outcomes):
                yield self.rank, outcome
        finally:
            self.rank = before

    def refuse(self, key: str, what: str, rank: int | None = None) -> NoReturn:
        """Raise CheckFailed with the hint ``key``, or the case's fallback if ``key`` explains little.

        ``what`` is a sentence; what follows its first empty line stands behind the hint. ``rank`` is by default that of
        `each`.
        """
        rank = self.rank if rank is None else rank
        if key in ("value", "shape") and self.fallback:
            key = self.fallback
        if key in ("hang", "error"):
            key = next((hint for words, hint in self.explained.items() if re.search(words, what)), key)
        circumstances = [self.case, f"rank {rank}" if rank is not None else ""] if key != "empty" else []
        where = ", ".join(filter(None, [self.title, *circumstances]))
        hint = textwrap.fill("Hint: " + (COMMON_HINTS | self.hints)[key], 100, break_on_hyphens=False)
        what, *evidence = what.split("\n\n", 1)
        raise CheckFailed("\n\n".join([f"{where}: {what}", hint, *evidence]), key, rank) from None

    def differs(self, key: str, what: str, expected: Any, got: Any, rank: int | None = None) -> NoReturn:
        """Refuse with two lines below the sentence ``what``: what was expected, and what the answer gave."""
        self.refuse(key, f"{what}\n  expected  {expected}\n  got       {got}", rank)

    def require(self, condition: bool, key: str, what: str, rank: int | None = None) -> None:
        """Refuse with the hint ``key`` unless ``condition`` holds."""
        if not condition:
            self.refuse(key, what, rank)

    def passed(self, text: str) -> None:
        """Say that all cases passed, in one line; a text without ranks before it may begin with a colon."""
        sizes = sorted(set(self.world_sizes))
        ranks = f" on {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks:" if len(sizes) > 1 else ""
        print(f"{self.title} passed{ranks}{'' if text.startswith(':') else ' '}{text}")
