"""The facts of a whole job, the points that they give, the certificate, and the table of all results."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from course_utils import launch, record
from course_utils.check import CheckFailed, Exercise, Note, answer_with, hints_of
from course_utils.models import build_gpt

from . import check, faults
from .helpers import Counts, counts_of
from .job import Job, cluster, free_gb, gpu_hours, job

#: Results under version control.
RESULTS = Path(__file__).parent / "results"
#: Points of each part.
POINTS = {"plan": 20, "start": 15, "faults": 30, "exchange": 20, "survival": 10, "report": 5}
PARTS = ("plan_run", "start", "repairs", "exchange", "checkpoint", "report")
Facts = dict[str, Any]


def exchanged(exchange: Callable) -> Any:
    """On a rank: the ledger of one exchange of the program's gradients."""
    parameters = [*build_gpt(faults.program.CONFIG).parameters()]
    inside, across = faults.program.make_groups()
    dist.barrier()
    with record() as ledger:
        exchange([p.detach().clone() for p in parameters], inside, across)
    return ledger


def exchange_counts(exchange: Callable, ranks: int = faults.RANKS) -> Counts:
    """What one exchange of the program's gradients sends, with two ranks on each host."""
    return counts_of(launch(exchanged, exchange, world_size=ranks, backend="gloo"))


def facts_of(seed: int, answers: Mapping[str, Callable]) -> Facts:
    """The facts of a job, by name: (number, unit, how it is known), or a text; parts without an answer are left out.

    The checks must pass first: an answer that a check refuses is an error here.
    """
    given, facts = job(seed), Facts()
    facts |= {"seed": f"{seed}", "model": given.letter.model.name}
    if "plan_run" in answers:
        layout = answers["plan_run"](given.letter)[0]
        facts |= _planned(given, layout)
    if "start" in answers:
        reader = Exercise("the start", hints_of(check.MISTAKES["start"]))
        flags = check.read_start(reader, answers["start"]("OUT", "DATA"))
        facts["cable, start"] = (round(check.started(flags)[0].cable_bytes / 1e6, 3), "MB", "counted")
    if "repairs" in answers:
        facts |= _mended(seed, answers["repairs"]())
    if "exchange" in answers:
        with contextlib.redirect_stdout(io.StringIO()):
            check.exchange(answers["exchange"])
        for name, fn in (("as found", faults.program.mean_gradients), ("now", answers["exchange"])):
            counted = exchange_counts(fn)
            facts[f"cable, step {name}"] = (round(counted.cable_bytes / 1e6, 4), "MB", "counted")
            facts[f"messages, step {name}"] = (counted.messages, "messages", "counted")
            facts[f"exchange {name}"] = (round(1e3 * counted.seconds(given.cable), 2), "ms", "modelled")
    if "checkpoint" in answers:
        seen = check.lives(answers["checkpoint"], faults.RANKS, 1, given.dies_before)
        facts["computed twice"] = (max(0, given.dies_before - min(seen.losses[0])), "steps", "counted")
        facts["last loss"] = (round(seen.losses[0][max(seen.losses[0])], 4), "nats", "measured")
    return facts


def _planned(given: Job, layout: Any) -> Facts:
    letter = given.letter
    sequences = letter.tokens_of_step // letter.model.context
    plan = check.planner.plan(letter.model, cluster(letter), layout, sequences)
    return {"layout": f"{layout}, ZeRO-{layout.zero}", "training step": (round(plan.seconds, 3), "s", "modelled"),
            "free memory": (round(free_gb(letter, plan), 1), "GB", "modelled"),
            "cost": (round(gpu_hours(letter, plan)), "GPU hours", "modelled")}


def _mended(seed: int, repairs: Mapping[str, tuple]) -> Facts:
    """The causes that are right, and whether the program is."""
    drawn, text = faults.drawn(seed), faults.broken(seed)
    facts = Facts({kind: cause for kind, (cause, _) in repairs.items() if cause == drawn[kind].cause})
    try:
        for _, edits in repairs.values():
            text = faults.mended(text, edits)
        if text != faults.text():
            check.judge(Exercise("the program", hints_of(check.MISTAKES["repairs"])), text)
    except (CheckFailed, ValueError):
        return facts | {"program": "not mended"}
    return facts | {"program": "equal to one process"}


def points_of(facts: Facts, reported: bool = False) -> dict[str, float]:
    """Points of each part, from the facts alone."""
    given = job(int(facts["seed"]))
    drawn, every = faults.drawn(given.seed), faults.program.EVERY
    points = dict.fromkeys(POINTS, 0.0)

    def share(name: str, least: float) -> float:
        return min(1.0, least / max(facts[name][0], 1e-9)) if name in facts else 0.0

    points["plan"] = POINTS["plan"] * share("training step", given.best.seconds)
    points["start"] = POINTS["start"] * share("cable, start", check.LEAST / 1e6)
    named = sum(facts.get(kind) == fault.cause for kind, fault in drawn.items())
    points["faults"] = 5.0 * named + 15.0 * (facts.get("program") == "equal to one process")
    points["exchange"] = POINTS["exchange"] * share("exchange now", 1e3 * least_exchange().seconds(given.cable))
    if "computed twice" in facts:
        points["survival"] = POINTS["survival"] * (1 + given.dies_before % every) / (1 + facts["computed twice"][0])
    points["report"] = float(POINTS["report"] * reported)
    return {name: round(number, 1) for name, number in points.items()}


def least_exchange() -> Counts:
    """Of one bucket by hosts, two bytes a number between them: what the third level sends."""
    numbers = 4 * -(-faults.program.CONFIG.parameter_count // 4)
    return Counts(cable_bytes=2 * numbers, messages=2, calls=3, sent=5 * numbers)


def certificate(facts: Facts, page: str = "", name: str = "", out: str | Path | None = None) -> dict[str, Any]:
    """Points, facts and report as one dictionary with a digest of all of it; written as JSON to `out` if it is given.

    The digest shows that nothing was changed by mistake. Who wants to cheat can compute it anew.
    """
    note = Note(1e-12)
    check.judge_report(note, page, facts)
    points = points_of(facts, reported=not note.found)
    made = {"name": name, "points": points, "total": round(sum(points.values()), 1), "facts": facts, "report": page}
    made = json.loads(json.dumps(made))
    made["digest"] = digest(made)
    if out:
        Path(out).write_text(json.dumps(made) + "\n", encoding="utf-8")
    return made


def digest(made: Mapping[str, Any]) -> str:
    """SHA-256 of a certificate without its digest."""
    rest = {name: value for name, value in made.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def verify(path: str | Path) -> dict[str, Any]:
    """Read a certificate.

    Raises
    ------
    ValueError
        The digest is not that of the content, or the points are not those of the facts and the report.
    """
    made = json.loads(Path(path).read_text(encoding="utf-8"))
    if made.get("digest") != digest(made):
        raise ValueError(f"{Path(path).name}: the digest is not that of the content")
    again = certificate(made["facts"], made["report"], made["name"])
    if (again["points"], again["total"]) != (made["points"], made["total"]):
        raise ValueError(f"{Path(path).name}: the points are {made['points']}, and the facts give {again['points']}")
    return made


def table(folder: str | Path = RESULTS) -> str:
    """All results of a folder, best first, each verified; a line for each."""
    made = sorted((verify(path) for path in Path(folder).glob("*.json")), key=lambda one: -one["total"])
    lines = ["  ".join(["total", "seed", *(f"{part:>8}" for part in POINTS), "name"])]
    for one in made:
        parts = (f"{one['points'][part]:8.1f}" for part in POINTS)
        lines.append("  ".join([f"{one['total']:5.1f}", f"{one['facts']['seed']:>4}", *parts, one["name"]]))
    return "\n".join(lines)


#: Level -> part -> the edit of its solution, or another function; level 3 is the solutions as they are.
LEVELS: Mapping[int, Mapping[str, Any]] = {
    1: {"plan_run": check.RIGHT["plan_run"]["level 1"], "exchange": check.RIGHT["exchange"]["level 1"],
        "start": {"--replicate=2": "--replicate=2 --tp=2"},
        "repairs": {"    return {": '    return {kind: fault for kind, fault in {',
                    "{log: \"\"}),\n    }": "{log: \"\"}),\n    }.items() if kind == \"hang\"}"}},
    2: {"plan_run": check.RIGHT["plan_run"]["level 2"], "exchange": check.RIGHT["exchange"]["level 2"],
        "repairs": {"    return {": '    return {kind: fault for kind, fault in {',
                    "{log: \"\"}),\n    }": "{log: \"\"}),\n    }.items() if kind != \"slow\"}"}},
    3: {},
}


def answers_of(level: int) -> dict[str, Callable]:
    """The reference solutions of a level, for the job of the stored notebooks."""
    edits = {part: LEVELS[level].get(part, ()) for part in PARTS}
    return {part: edit if callable(edit) else answer_with("lessons.capstone.answers", part, edit)
            for part, edit in edits.items()}
