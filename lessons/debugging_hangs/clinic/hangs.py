"""The hang clinic of lesson 14: programs whose ranks wait in vain, or are wrong in silence, each as somebody reported.

``clinic()`` opens it. A diagnosis names the fault, the rank and the call; every cure is tried by a run on real ranks.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from course_utils.ranks import share

from . import _hangs_programs
from ._cases import Case, Cause, Detail, Evidence, Symptom, Table
from ._hangs_evidence import EVIDENCE, source_of
from ._hangs_runs import run_program
from ._wards import Clinic

share("torch._dynamo")  # what DDP imports when it is made: not anew on each rank


def read(ward: str, programs: Any) -> tuple[dict[str, Cause], tuple[Case, ...]]:
    """The causes and patients of a ward, from the file of that name; programs are functions of a module."""
    found = tomllib.loads(Path(__file__).with_name(f"{ward}.toml").read_text(encoding="utf-8"))
    causes = {name: Cause(**cause) for name, cause in found["causes"].items()}
    return causes, tuple(_case(causes, programs, **patient) for patient in found["patients"])


def _case(
    causes: Mapping[str, Cause], programs: Any, *, program: str, cause: str, ranks: int, facts: dict[str, str],
    rank: Sequence[int] = (), call: Sequence[str] = (), **parts: Any,
) -> Case:
    named = {name: Detail(tuple(some), "differs") for name, some in (("rank", rank), ("call", call)) if some}
    return Case(
        program=getattr(programs, program), settings={}, cause=cause, facts={**causes[cause].shows, **facts},
        conditions=ranks, usual=("edit",), recorded=(), details=named, **parts,
    )


CAUSES, CASES = read("hangs", _hangs_programs)

CURES = {"edit": "old texts of the program and what stands there instead, such as {'reduce(loss, dst=0)': …}"}


def _check_cure(cure: dict[str, Any]) -> None:
    edit = cure["edit"]
    texts = [text for pair in edit.items() for text in pair] if isinstance(edit, dict) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"edit is {edit!r}; allowed is a dictionary from old text to new text")


def _run(case: Case, cure: dict[str, Any] | None) -> Symptom:
    source, name, ranks = source_of(case)
    for old, new in cure["edit"].items() if cure else ():
        if (count := source.count(old)) != 1:
            raise ValueError(f"{old!r} stands {count} times in the program; allowed are texts that stand once")
        source = source.replace(old, new)
    return run_program(source, name, ranks)


def clinic(
    cases: Sequence[Case] = CASES, causes: Mapping[str, Cause] = CAUSES, evidence: Mapping[str, Evidence] = EVIDENCE
) -> Clinic:
    """Open the clinic: patients on two or three ranks, fifteen by default, none of whom has been looked at."""
    return Clinic(cases, causes, evidence, CURES, _run, _check_cure)


def who_names_it(opened: Clinic) -> Table:
    """Which evidence tells each patient's fault from no fault, by asking for all, which costs: open a clinic for it."""
    rows = []
    for patient in opened:
        asked = ("stacks", "verify", "monitored barrier", "flight record", "fingerprint", "detail")
        shown = {fact: value for name in asked for fact, value in patient.ask(name).facts.items()}
        lines = {place.split(" ", 2)[2] for place in shown["stands"].split(", ")}
        marks = (len(lines) > 1, shown["differs"] != "nothing", shown["absent"].replace(", ", "").isdigit(),
                 shown["record"] == "different", shown["values"] != "none",
                 shown.get("detail", "nothing") not in ("nothing", "a time-out"))
        rows.append([f"{patient.number}", *("yes" if mark else "no" for mark in marks)])
    head = ["stacks differ", "verify", "monitored barrier", "flight records differ", "fingerprints differ", "detail"]
    return Table(["patient", *head], rows)
