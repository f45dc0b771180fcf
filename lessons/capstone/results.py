"""The facts of a whole job, the points that they give, the certificate, and the table of all results."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from course_utils import launch, record
from course_utils.check import CheckFailed, Exercise, hints_of
from course_utils.models import build_gpt

from . import check, faults
from .helpers import Counts, counts_of
from .job import Job, free_gb, gpu_hours, job

#: Results under version control.
RESULTS = Path(__file__).parent / "results"
#: Points of each part.
POINTS = {"plan": 20, "start": 15, "faults": 30, "exchange": 20, "survival": 10, "report": 5}
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
    """The facts of a job by name: (number, unit, how it is known), or a text; refused parts are left out, and named."""
    given = job(seed)
    facts: Facts = {"seed": f"{seed}", "model": given.letter.model.name,
                    "budget": (round(given.letter.gpu_hours), "GPU hours", "given")}
    for number, (part, facts_of_part) in enumerate(_OF_PART.items(), 1):
        try:
            if part in answers:
                run = Exercise(f"Exercise {number}", hints_of(check.MISTAKES[part]))
                facts |= facts_of_part(run, given, answers[part])
        except CheckFailed as refusal:
            print(f"part {number}: {'no answer yet' if refusal.hint == 'empty' else 'refused by its check'}, 0 points")
    return facts


def _planned(run: Exercise, given: Job, fn: Callable) -> Facts:
    letter, plan = given.letter, check.plan_of(run, fn, given.letter)
    layout = plan.layout
    return {"layout": f"{layout}, ZeRO-{layout.zero}", "training step": (round(plan.seconds, 3), "s", "modelled"),
            "free memory": (round(free_gb(letter, plan), 1), "GB", "modelled"),
            "cost": (round(gpu_hours(letter, plan)), "GPU hours", "modelled")}


def _started(run: Exercise, given: Job, fn: Callable) -> Facts:
    return {"cable, start": (round(check.counted_start(run, fn) / 1e6, 3), "MB", "counted")}


def _mended(run: Exercise, given: Job, fn: Callable) -> Facts:
    """The causes that are right, and whether the program is."""
    drawn, text, repairs = faults.drawn(given.seed), faults.broken(given.seed), check.form_of_repairs(run, fn)
    facts: Facts = {kind: cause for kind, (cause, _) in repairs.items() if cause == drawn[kind].cause}
    try:
        for _, edits in repairs.values():
            text = faults.mended(text, edits)
        check.judge(run, text)
    except (AttributeError, CheckFailed, TypeError, ValueError):
        return facts | {"program": "not mended"}
    return facts | {"program": "equal to one process"}


def _exchanged(run: Exercise, given: Job, fn: Callable) -> Facts:
    facts = {}
    with contextlib.redirect_stdout(io.StringIO()):
        check.exchange(fn)
    for name, each in (("as found", faults.program.mean_gradients), ("now", fn)):
        counted = exchange_counts(each)
        facts[f"cable, step {name}"] = (round(counted.cable_bytes / 1e6, 4), "MB", "counted")
        facts[f"messages, step {name}"] = (counted.messages, "message" + "s" * (counted.messages > 1), "counted")
        facts[f"exchange {name}"] = (round(1e3 * counted.seconds(given.cable), 2), "ms", "modelled")
    return facts


def _survived(run: Exercise, given: Job, fn: Callable) -> Facts:
    losses = check.survive(run, fn, given.dies_before).losses[0]
    twice = given.dies_before - min(losses)
    return {"computed twice": (twice, "step" + "s" * (twice != 1), "counted"),
            "last loss": (round(losses[max(losses)], 4), "nats", "measured")}


_OF_PART = {"plan_run": _planned, "start": _started, "repairs": _mended, "exchange": _exchanged,
            "checkpoint": _survived}


def points_of(facts: Facts, reported: bool = False) -> dict[str, float]:
    """Points of each part, from the facts alone."""
    given = job(int(facts["seed"]))
    named = sum(facts.get(kind) == fault.cause for kind, fault in faults.drawn(given.seed).items())

    def share(name: str, least: float) -> float:
        return min(1.0, least / max(facts[name][0], 1e-9)) if name in facts else 0.0

    twice, *_ = facts.get("computed twice", [math.inf])
    shares = {
        "plan": share("training step", given.best.seconds),
        "start": share("cable, start", check.LEAST / 1e6),
        "faults": (named + 3 * (facts.get("program") == "equal to one process")) / 6,
        "exchange": share("exchange now", 1e3 * least_exchange().seconds(given.cable)),
        "survival": (1 + given.dies_before % faults.program.EVERY) / (1 + twice),
        "report": float(reported),
    }
    return {name: round(most * shares[name], 1) for name, most in POINTS.items()}


def least_exchange() -> Counts:
    """Of one bucket by hosts, two bytes a number between them: what the third level sends."""
    numbers = 4 * -(-faults.program.CONFIG.parameter_count // 4)
    return Counts(cable_bytes=2 * numbers, messages=2, calls=3, sent=5 * numbers)


def certificate(facts: Facts, page: str = "", name: str = "", out: str | Path | None = None) -> dict[str, Any]:
    """Points, facts and report as one dictionary with a digest of all of it; written as JSON to `out` if given."""
    points = points_of(facts, reported=not check.page_fault(page, facts)[0])
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
    """Read a certificate; ValueError if its digest or its points are not those of the content."""
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
