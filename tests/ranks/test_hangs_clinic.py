"""Promises of the hang clinic: real symptoms, true evidence, wrong diagnoses refused, cures that are really tried.

That the right cures heal is shown by the solutions of lesson 14's exercises.
"""

from __future__ import annotations

import pytest

from lessons.debugging_hangs.clinic import hangs
from lessons.debugging_hangs.clinic._hangs_runs import compared

pytestmark = pytest.mark.guard(90)

NUMBERS = range(1, len(hangs.CASES) + 1)
CALLS = ("all_gather", "all_reduce", "backward", "barrier", "broadcast", "irecv", "isend", "recv", "reduce", "send")
SILENT = {9, 12}  # they finish, with a wrong result
FAILING = {7, 15}  # an error ends them
WRONG = {2: {"if rank == 0:": "if False:"}, 9: {"rank == 0": "rank == 1"}}  # others: the mistakes of the exercise


@pytest.fixture(scope="module")
def clinic():
    """One clinic whose patients are looked at once, by all tests."""
    return hangs.clinic()


@pytest.mark.parametrize("number", NUMBERS)
def test_a_patient_is_sick_and_its_evidence_shows_the_facts_that_diagnoses_are_judged_by(clinic, number):
    case, patient = hangs.CASES[number - 1], clinic[number]
    symptom = patient.symptom()
    assert not symptom.is_healthy(case.result)
    assert (symptom.results is not None) == (number in SILENT)
    shown = {}
    for name, evidence in clinic.evidence.items():
        shown |= patient.ask(name).facts if evidence.facts else {}
    if shown["differs"] != case.facts["differs"]:  # on a busy machine a rank may come too late to be told
        compared.cache_clear()
        shown |= hangs.clinic()[number].ask("verify").facts
    assert {fact: shown[fact] for fact in shown.keys() & case.facts} == {
        fact: value for fact, value in case.facts.items() if fact not in ("kind", "on")
    }
    if number in {10, 13} or number not in SILENT | FAILING:  # the launcher's own error names the rank at fault
        guilty = case.details["rank"].accepted
        assert symptom.blamed in guilty, guilty


def test_prints_show_where_the_ranks_part(clinic):
    assert clinic[3].ask("prints").text == (
        "The ranks part at: line 4, for sample in samples:\n"
        "rank 0: then line 5\nrank 1: then line 7\nrank 2: then line 7"
    )
    assert clinic[4].ask("prints").text.endswith("\nrank 1 has caught MemoryError")
    assert clinic[6].ask("prints").text == "nothing: all ranks run the same lines"


@pytest.mark.parametrize("number", NUMBERS)
def test_the_right_diagnosis_is_accepted_and_each_wrong_one_is_refused_by_a_fact(number):
    case, patient = hangs.CASES[number - 1], hangs.clinic()[number]
    accepted = {"cause": (case.cause,)} | {name: detail.accepted for name, detail in case.details.items()}
    right = {name: values[0] for name, values in accepted.items()}
    for name, values in (("cause", hangs.CAUSES), ("rank", range(case.conditions)), ("call", CALLS)):
        for value in values:
            verdict = patient.diagnose(**right | {name: value})
            assert bool(verdict) == (value in accepted[name]), verdict
            if not verdict:
                assert case.why not in verdict.text and repr(value) in verdict.text
                assert "evidence" in verdict.text and "The evidence alone" not in verdict.text, verdict.text
            else:
                assert case.thread in verdict.text


@pytest.mark.parametrize("number", WRONG)
def test_a_wrong_cure_does_not_heal(number):
    patient = hangs.clinic()[number]
    verdict = patient.treat(edit=WRONG[number])
    assert not verdict and not patient.healed
    assert number != 2 or "communicate" in verdict.text  # it returns the result without its work


def test_a_wrong_rank_is_answered_with_evidence_that_the_learner_has():
    patient = hangs.clinic()[2]
    assert "'verify' speaks against it: it shows" in patient.diagnose("one rank only", rank=1, call="all_gather").text
    patient.ask("verify")
    said = patient.diagnose("one rank only", rank=1, call="all_gather").text
    assert said.startswith("Not rank 1. Your evidence 'verify' speaks against it") and "rank 0 calls all_gather" in said
    with pytest.raises(ValueError, match="allowed are rank, call"):
        patient.diagnose("one rank only")
