"""Promises of the network clinic: real symptoms, true evidence, cures that are really tried, and none that hangs."""

from __future__ import annotations

import inspect

import pytest
from conftest import missing

from course_utils.check import CheckFailed
from lessons.debugging_hangs.clinic import Clinic
from lessons.multi_node import answers, check
from lessons.multi_node.clinic import network
from lessons.multi_node.hosts import hosts_available

pytestmark = pytest.mark.guard(90)

NUMBERS = range(1, 9)
RIGHT = answers.diagnoses_and_cures()

#: What the ranks of each patient say, and which of them must say it (None: at least one).
SAID = {
    1: [(0, "1/2 clients joined"), (1, "timed out after 2000ms while trying to connect to (node0, 29500)")],
    2: [(None, "Connection refused, remote=[127.0.1.1]")],
    3: [(0, "Unable to find address for: ib0"), (1, "Unable to find address for: ib0")],
    4: [(rank, "RendezvousConnectionError") for rank in (0, 1)] + [(rank, "(10.0.0.1, 29500)") for rank in (0, 1)],
    5: [(rank, "(says nothing in 3 s)") for rank in (0, 1)],
    6: [(None, "No such file or directory: 'checkpoint/.metadata'")],
    7: [(rank, "timed out after 2000ms while trying to connect to (node1, 29500)") for rank in (0, 1)],
    8: [(0, "1/2 clients joined"), (1, "101 - Network is unreachable")],
}
WRONG = {3: {"environment": {"GLOO_SOCKET_IFNAME": "eth7"}}, 4: {"open_ports": "all"}, 6: {"folder": "other"}}


@pytest.fixture(scope="module")
def clinic() -> Clinic:
    there, sentence = hosts_available()
    if not there:
        missing(sentence)
    clinic = network.clinic()
    clinic.symptoms()  # of all, side by side
    return clinic


# --- patients, without running anything ----------------------------------------------------------------------------


def test_every_sign_of_every_cause_can_be_seen_for_25_minutes():
    """The target on the card of the exercise."""
    minutes = 0
    for case in network.CASES:
        signs = set(network.CAUSES[case.cause].shows)
        minutes += sum(one.minutes for one in network.clinic().evidence.values() if signs & set(one.facts))
    assert minutes <= 25 and len({case.cause for case in network.CASES}) == 8 < len(network.CAUSES)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_patient_shows_its_program_and_a_fact_speaks_against_every_wrong_cause(number):
    case, patient = network.CASES[number - 1], network.clinic()[number]
    assert inspect.getsource(case.program).rstrip() in repr(patient) and case.cause not in repr(patient)
    for name, cause in network.CAUSES.items():
        against = [fact for fact, value in cause.shows.items() if case.facts[fact] != value]
        verdict = patient.diagnose(name)
        assert bool(verdict) == (name == case.cause) == (not against), (name, against)
        assert (case.thread if verdict else "Ask for it") in verdict.text
        assert verdict or case.why not in verdict.text


@pytest.mark.parametrize(("cure", "said"), [
    ({"ports": "all"}, "'open_ports'"), ({"environment": "GLOO_SOCKET_IFNAME=eth0"}, "allowed is a dictionary"),
])
def test_a_cure_that_cannot_be_applied_is_refused_with_what_is_allowed(cure, said):
    with pytest.raises((TypeError, ValueError), match=said):
        network.clinic()[1].treat(**cure)


# --- patients, run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS)
def test_each_rank_says_what_it_should(clinic, number):
    symptom = clinic[number].symptom()
    for rank, text in SAID[number]:
        ended = rank is not None and symptom.said[rank].startswith("KeyboardInterrupt")  # the other one failed first
        assert text in (" ".join(symptom.said) if rank is None or ended else symptom.said[rank]), symptom
    assert not symptom.is_healthy(network.CASES[number - 1].result)
    by_chance = any(rank is None for rank, _ in SAID[number])  # who says it, and what the other one notices of that
    early = any(text.startswith("KeyboardInterrupt") for text in symptom.said)  # and whether both come to say it
    assert by_chance or early or sorted(symptom.said) == sorted(network.CASES[number - 1].recorded)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_evidence_really_shows_the_facts_that_diagnoses_are_judged_by(clinic, number):
    patient, facts = clinic[number], {}
    for name in clinic.evidence:
        facts |= patient.ask(name).facts
    assert facts == dict(network.CASES[number - 1].facts)


@pytest.mark.parametrize("number", WRONG)
def test_a_wrong_cure_does_not_heal(clinic, number):
    """That the right ones do is shown by the solution of the exercise."""
    patient = network.clinic()[number]
    refused = patient.treat(**WRONG[number])
    assert not refused and "After this change the ranks say" in repr(refused) and not patient.healed


def test_a_cure_that_goes_around_the_cause_is_accepted_and_told(clinic):
    verdict = network.clinic()[1].treat(environment={"MASTER_PORT": "29501"})
    assert verdict and "goes around the cause" in verdict.text


# --- where hosts cannot be emulated, and the check -----------------------------------------------------------------


def test_without_hosts_all_is_recorded_and_says_so_and_the_check_judges_causes(monkeypatch, capsys):
    monkeypatch.setattr(network, "hosts_available", lambda: (False, "this system has no network for hosts"))
    clinic = network.clinic()
    assert "Recorded, not run here: it needs two hosts." in repr(clinic[7].symptom())
    assert "0 (recorded)" in repr(clinic.symptoms())
    assert "who listens on the port where the ranks meet: node0" in repr(clinic[7].ask("ports"))
    assert "Your evidence 'ports' speaks against it" in clinic[7].diagnose("nobody hosts the store").text
    verdict = clinic[7].treat(environment={"MASTER_ADDR": "node0"})
    assert not verdict and repr(verdict) == "The treatment was not tried: it needs two hosts."
    check.diagnoses_and_cures(lambda: RIGHT)
    assert "The cures were not tried: it needs two hosts." in capsys.readouterr().out


@pytest.mark.parametrize(("hint", "change"), [
    ("missing", None),
    ("form", {1: "firewall drops the port"}),
    ("name", {1: ("firewall", {"open_ports": "all"})}),
    ("diagnosis", {1: ("wrong address", {"open_ports": "all"})}),
    ("several", {1: ("firewall drops the port", {"open_ports": "all", "link": "up"})}),
    ("cure-form", {1: ("firewall drops the port", {"open_ports": "yes"})}),
])
def test_the_check_says_what_is_wrong(clinic, hint, change):
    given = {} if change is None else RIGHT | change
    with pytest.raises(CheckFailed, match="patient 1") as caught:
        check.diagnoses_and_cures(lambda: given)
    assert caught.value.hint == hint
