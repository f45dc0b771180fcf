"""What a patient is made of: a program, what is wrong with it, what each look at it shows (private)."""

from __future__ import annotations

import html
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

LIMIT = 15.0  # seconds that a run may take
_WIDTH = 100  # characters of a line of text


class Table:
    """Something to show as a table, in text and in a notebook; cells are texts, and may have several lines."""

    def __init__(self, head: Sequence[str], rows: Sequence[Sequence[str]]):
        self.head, self.rows = list(head), [list(row) for row in rows]

    def __repr__(self) -> str:
        cells = [[[line for part in cell.split("\n") for line in textwrap.wrap(part, _WIDTH) or [""]] for cell in row]
                 for row in (self.head, *self.rows)]
        widths = [max(len(line) for cell in column for line in cell) for column in zip(*cells, strict=True)]
        lines = [line for row in cells for line in zip_longest(*row, fillvalue="")]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    def _repr_html_(self) -> str:
        def row_of(cells: Sequence[str], tag: str) -> str:
            style = ' style="text-align: left; vertical-align: top"'
            texts = [html.escape(cell).replace("\n", "<br>") for cell in cells]
            return "<tr>" + "".join(f"<{tag}{style}>{text}</{tag}>" for text in texts) + "</tr>"

        body = "".join(row_of(row, "td") for row in self.rows)
        return f"<table><thead>{row_of(self.head, 'th')}</thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class Cause:
    """Something that can be wrong, and what the evidence then shows: fact -> value; another value speaks against it."""

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
    """Something that the learner can ask for."""

    sentence: str
    minutes: int  # what it takes about, on a cluster that one can log in to
    look: Callable[[Case, Callable[[], Symptom]], Finding]  # given what returns the symptom
    facts: Mapping[str, str] = field(default_factory=dict)  # that it shows, each with what it is about


@dataclass(frozen=True)
class Detail:
    """A part of a diagnosis beside the cause, such as the rank: what is accepted, and the fact against all else."""

    accepted: tuple[Any, ...]
    fact: str


@dataclass(frozen=True)
class Case:
    """A patient as data."""

    complaint: str  # what the user says
    program: Callable[..., Any]  # run as it is shown
    settings: Mapping[str, str | None]  # variables of the environment; None: not set
    result: Any  # what each rank returns once nothing is wrong
    cause: str  # its name
    why: str  # what happened, for who has found it
    usual: tuple[str, ...]  # names of cures that remove this cause
    thread: str  # address of the public report
    report: str  # what happened there, in a sentence
    rule: str  # of thumb, to take along
    facts: Mapping[str, str]  # what all evidence together shows
    recorded: tuple[str, ...]  # what the ranks said, where the program cannot be run
    conditions: Any = None  # what the program runs under, for those that run it
    limit: float = LIMIT  # seconds after which ranks that say nothing are stopped
    details: Mapping[str, Detail] = field(default_factory=dict)  # what a diagnosis must name beside the cause
    least: int = 0  # how often the ranks communicate, all together, in a program that does what it is for

    def shown(self) -> str:
        """Settings and program as text."""
        settings = "\n".join(f"{name}={value}" for name, value in self.settings.items() if value is not None)
        return f"{settings}\n\n{inspect.getsource(self.program).rstrip()}".lstrip("\n")


@dataclass(frozen=True)
class Symptom:
    """What the ranks of a run have said."""

    said: tuple[str, ...]  # one text a rank
    results: tuple[Any, ...] | None = None  # what the ranks have returned; None if one has not finished
    recorded: str = ""  # why this is a recorded run, if it is
    log: tuple[str, ...] = ()  # what each rank has written to standard error, or where it stands
    files: tuple[str, ...] = ()  # that each rank left
    blamed: int | None = None  # the rank that the launcher's own error names, if the ranks hang
    operations: int | None = None  # how often the ranks have communicated, if they have finished and it was counted

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
    """The answer to a diagnosis or a treatment; true if it was right."""

    right: bool
    text: str
    after: Symptom | None = None  # what the ranks said after a cure that has not healed

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        lines = [textwrap.fill(line, _WIDTH, break_long_words=False, break_on_hyphens=False)
                 for line in self.text.splitlines()]
        return "\n".join([*lines, *([repr(self.after)] if self.after else [])])
