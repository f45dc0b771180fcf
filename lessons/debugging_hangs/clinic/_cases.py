"""What a patient is made of: a program, what is wrong with it, what each look at it shows (private)."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ._tables import Table

__all__ = ["LIMIT", "Case", "Cause", "Detail", "Evidence", "Finding", "Symptom", "Verdict"]

LIMIT = 15.0  # seconds that a run may take


@dataclass(frozen=True)
class Cause:
    """Something that can be wrong.

    Attributes
    ----------
    sentence : str
        What it is.
    shows : mapping of str to str
        What the evidence shows if this is the cause: fact -> value. Another value speaks against it.
    """

    sentence: str
    shows: Mapping[str, str]


@dataclass(frozen=True)
class Finding:
    """What one piece of evidence has shown: the text, and the facts in it."""

    text: str
    facts: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Evidence:
    """Something that the learner can ask for.

    Attributes
    ----------
    sentence : str
        What it is.
    minutes : int
        Its price: what it takes about, on a cluster that one can log in to.
    look : callable
        Of a case, and a function that returns the symptom: makes the `Finding`.
    facts : mapping of str to str
        Facts that it shows, each with what it is about.
    """

    sentence: str
    minutes: int
    look: Callable[[Case, Callable[[], Symptom]], Finding]
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Detail:
    """A part of a diagnosis beside the cause, such as the rank.

    Attributes
    ----------
    accepted : tuple
        Values that are right.
    fact : str
        The fact that speaks against others.
    """

    accepted: tuple[Any, ...]
    fact: str


@dataclass(frozen=True)
class Case:
    """A patient as data.

    Attributes
    ----------
    complaint : str
        What the user says.
    program : callable
        The program, which is run as it is shown.
    settings : mapping of str to str or None
        Variables of the environment that it is started with; None: not set.
    result : object
        What each rank returns once nothing is wrong.
    cause : str
        Name of the cause.
    why : str
        What happened, for who has found it.
    usual : tuple of str
        Cures that remove this cause, by name.
    thread : str
        Address of the public report.
    report : str
        What happened there, in a sentence.
    rule : str
        The rule of thumb to take along.
    facts : mapping of str to str
        What all evidence together shows.
    recorded : tuple of str
        What the ranks said in a run that was recorded, where the program cannot be run.
    conditions : object
        What the program runs under, for those that run it.
    limit : float
        Seconds after which ranks that say nothing are stopped.
    details : mapping of str to Detail
        What a diagnosis must name beside the cause.
    least : int
        How often the ranks communicate, all together, in a program that does what it is for.
    """

    complaint: str
    program: Callable[..., Any]
    settings: Mapping[str, str | None]
    result: Any
    cause: str
    why: str
    usual: tuple[str, ...]
    thread: str
    report: str
    rule: str
    facts: Mapping[str, str]
    recorded: tuple[str, ...]
    conditions: Any = None
    limit: float = LIMIT
    details: Mapping[str, Detail] = field(default_factory=dict)
    least: int = 0

    def shown(self) -> str:
        """Settings and program as text."""
        settings = "\n".join(f"{name}={value}" for name, value in self.settings.items() if value is not None)
        return f"{settings}\n\n{inspect.getsource(self.program).rstrip()}".lstrip("\n")


@dataclass(frozen=True)
class Symptom:
    """What the ranks of a run have said.

    Attributes
    ----------
    said : tuple of str
        One text a rank.
    results : tuple
        What the ranks have returned; None if one has not finished.
    recorded : str
        Why this is a recorded run; empty if it is not.
    log, files : tuple of str
        What each rank has written to standard error, and the files that it left.
    blamed : int, or None
        The rank that the launcher's own error names, if the ranks hang.
    operations : int, or None
        How often the ranks have communicated, all together, if they have finished and that was counted.
    """

    said: tuple[str, ...]
    results: tuple[Any, ...] | None = None
    recorded: str = ""
    log: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    blamed: int | None = None
    operations: int | None = None

    def is_healthy(self, result: Any) -> bool:
        """Whether all ranks have finished with this result."""
        return self.results is not None and all(found == result for found in self.results)

    def _table(self) -> Table:
        title = "recorded" if self.recorded else "says"
        return Table(["rank", title], [[str(rank), text] for rank, text in enumerate(self.said)])

    def __repr__(self) -> str:
        return "\n".join(part for part in (self.recorded, repr(self._table())) if part)

    def _repr_html_(self) -> str:
        return f"{self.recorded}{self._table()._repr_html_()}"


@dataclass(frozen=True)
class Verdict:
    """The answer to a diagnosis or a treatment; true if it was right.

    Attributes
    ----------
    right : bool
        Whether the cause is the right one, or the cure has healed.
    text : str
        The answer.
    after : Symptom, or None
        What the ranks said after a cure that has not healed.
    """

    right: bool
    text: str
    after: Symptom | None = None

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        lines = [
            textwrap.fill(line, 100, break_long_words=False, break_on_hyphens=False) for line in self.text.splitlines()
        ]
        return "\n".join([*lines, *([repr(self.after)] if self.after else [])])
