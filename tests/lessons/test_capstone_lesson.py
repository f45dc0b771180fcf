"""What lesson 18 promises: faults that a seed draws and checks tell apart, and results that anybody can recompute."""

from __future__ import annotations

import json
import math

import pytest
from conftest import ROOT

from course_utils.check import CheckFailed
from course_utils.ranks import HangError
from lessons.capstone import answers, check, faults, helpers, job, results

pytestmark = pytest.mark.guard(200)
FIRST = {  # of each fault, a seed that draws it; of silent ones, for each rank
    (kind, fault.cause, str(fault.edits) if kind == "silent" else ""): seed
    for seed in range(199, -1, -1) for kind, fault in faults.drawn(seed).items()
}


def cures(seed: int) -> dict[str, tuple[str, dict[str, str]]]:
    """Kind -> cause, and the edits that take it out of the broken program of a seed: a right answer of part 3."""
    found, meant = {}, faults.text()
    for kind, fault in faults.drawn(seed).items():
        undone = {}
        for old, new in fault.edits.items():
            line = meant[meant.rfind("\n", 0, meant.index(old)) + 1 :]
            undone[new.replace("\n", "\n" + " " * (len(line) - len(line.lstrip())))] = old
        found[kind] = fault.cause, undone
    return found


def test_the_program_is_the_training_of_one_process():
    one = helpers.undisturbed(1)
    assert helpers.same(helpers.undisturbed(), one) == "" and len(one.losses[0]) == faults.STEPS


@pytest.mark.parametrize(("kind", "seed"), [
    pytest.param(kind, seed, id=f"{cause}, {seed}") for (kind, cause, _), seed in sorted(FIRST.items())])
def test_each_fault_does_what_its_kind_says(kind: str, seed: int):
    text, meant = faults.broken(seed, (kind,)), helpers.undisturbed()
    if kind == "hang":
        with pytest.raises(HangError):
            helpers.run_text(text)
        return
    seen = helpers.run_text(text)
    assert bool(helpers.same(seen, meant)) == (kind == "silent")
    more, usual = (helpers.counts_of(each.ledgers) for each in (seen, meant))
    dearer = more.sent > usual.sent or more.calls > usual.calls or max(seen.windows) > max(meant.windows)
    assert dearer == (kind == "slow")


def test_200_seeds_are_told_apart():
    """The edits of each mend its own program; of the next seed every cause is another one."""
    assert {fault.cause for seed in range(200) for fault in faults.drawn(seed).values()} == {
        cause for causes in faults.FAULTS.values() for cause in causes}
    for seed in range(200):
        text, mine, theirs = faults.broken(seed), cures(seed), cures(seed + 1)
        for _, edits in mine.values():
            text = faults.mended(text, edits)
        assert text == faults.broken(seed, ())
        assert all(mine[kind][0] != theirs[kind][0] for kind in faults.KINDS)


@pytest.mark.parametrize("seed", [7, 30])
def test_the_check_takes_the_cures_of_a_seed_and_refuses_those_of_its_neighbor(seed: int):
    check.repairs(lambda: cures(seed), seed)
    with pytest.raises(CheckFailed) as caught:
        check.repairs(lambda: cures(seed + 1), seed)
    assert caught.value.hint == "cause"


def test_another_start_may_be_mended_by_a_broadcast():
    """Seed 4 draws that fault; DDP mends it so. A diff with the meant program shows more lines than the three."""
    given, text = cures(4), faults.broken(4)
    cause, _ = given["silent"]
    line = next(line for line in text.splitlines() if "build_gpt(CONFIG" in line)
    spread = f"{line}\n    for p in model.parameters():\n        dist.broadcast(p.data, 0)"
    check.repairs(lambda: given | {"silent": (cause, {line: spread})}, 4)
    assert cause == "another start" and len({*text.splitlines()} - {*faults.text().splitlines()}) > 6


def test_plans_fit_and_are_worth_their_points_for_every_situation():
    for seed in range(6):
        hours, facts = answers.plan_run(job.job(seed).letter)[1], results.facts_of(seed, {"plan_run": answers.plan_run})
        assert results.points_of(facts)["plan"] == 20 and math.isclose(facts["cost"][0], hours, rel_tol=1e-3)


def test_the_reference_results_are_those_of_the_facts_and_no_digit_can_be_changed(tmp_path):
    totals = [results.verify(results.RESULTS / f"reference_level_{n}.json")["total"] for n in (1, 2, 3)]
    assert totals == sorted(totals) and totals[2] == 100 and len(results.table().splitlines()) == 4
    made = json.loads((results.RESULTS / "reference_level_2.json").read_text())
    for change in ({"total": 99.0}, {"points": made["points"] | {"faults": 30.0}}, {"name": "me"}):
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(made | change))
        with pytest.raises(ValueError, match="digest"):
            results.verify(path)
        if "name" not in change:
            path.write_text(json.dumps(forged := made | change | {"digest": results.digest(made | change)}))
            assert forged["digest"] != made["digest"]
            with pytest.raises(ValueError, match="points"):
                results.verify(path)


def test_the_stored_facts_are_those_of_the_solutions():
    """Level 3 anew, without the start, which its own test and the solutions' notebook run."""
    fns = {name: getattr(answers, name) for name in ("plan_run", "repairs", "exchange", "checkpoint")}
    stored = results.verify(results.RESULTS / "reference_level_3.json")["facts"]
    found = json.loads(json.dumps(results.facts_of(job.SEED, fns)))
    assert found.pop("last loss")[0] == pytest.approx(stored.pop("last loss")[0], abs=1e-3)
    assert {name: fact for name, fact in stored.items() if name != "cable, start"} == found


def test_the_room_has_its_size():
    lines = sum(path.read_text().count("\n") for path in (ROOT / "lessons" / "capstone").glob("*.py"))
    assert lines <= 1970
