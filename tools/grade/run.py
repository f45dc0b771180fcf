"""Run one hand-in behind a fence, and say which checks it passes."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .fence import Place
from .hand_ins import HandIn
from .inside import STEPS, TOLD

CHECK = 200.0  # seconds for a check; its own limits are shorter
_LARGEST = 1_000_000  # bytes of a module beside the notebook that is taken along


@dataclass
class Verdict:
    """What one check said; where it is not graded the machine is at fault, and it takes no points."""

    name: str
    points: int
    passed: bool = False
    hint: str = ""
    message: str = "The check was not reached."
    graded: bool = True


@dataclass
class Result:
    """What became of a hand-in: a verdict for each check of its notebook."""

    hand_in: HandIn
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.hand_in.assignment:
            self.verdicts = {name: Verdict(name, points) for name, points in self.hand_in.assignment.points.items()}


async def grade_hand_in(hand_in: HandIn, kind: str, timeout: float, limit: float) -> Result:
    """Run a hand-in with the course's checks; a cell may take ``timeout`` seconds, and all of it ``limit``.

    A cell that ends Python is left out, and the rest is run anew. An error of the grader or of the machine grades no
    check that has not passed.
    """
    result, start = Result(hand_in), time.monotonic()
    steps = left = _steps(hand_in, timeout, result.notes) if hand_in.gradable else []
    told: dict[int, dict[str, Any]] = {}
    try:
        async with asyncio.timeout(limit):
            while left and (dead := await _run(hand_in, left, kind, told)):
                told[dead] = {"error": "it ended Python", "hint": "", "message": "Python ended during this check."}
                result.notes.append(f"cell {dead} ended Python; the rest was run without it")
                left = [each for each in left if each["position"] not in (told if each["check"] else [dead])]
    except TimeoutError:
        result.notes.append(f"ended after {limit:g} s")
    except Exception as error:
        result.notes.append(f"not graded: {type(error).__name__}: {error}")
        for verdict in result.verdicts.values():
            verdict.graded = False
    _judge(steps, told, result)
    result.seconds = time.monotonic() - start
    return result


def _steps(hand_in: HandIn, timeout: float, notes: list[str]) -> list[dict[str, Any]]:
    """Cells and checks in order: each check once, as the course has it, where the hand-in has it last or at the end."""
    imports, checks = hand_in.assignment.imports, hand_in.assignment.checks
    names = {source.strip(): name for name, source in checks.items()}
    cells = [(source, names.get(source.strip(), mark if mark in checks else "")) for source, mark in hand_in.cells]
    edited = [check for source, check in cells if check and source.strip() not in names]
    lost = [check for check in checks if check not in [each for _, each in cells]]
    changes = {"changed": edited, "missing": lost}
    notes += [f"check cells {how}: {', '.join(which)}" for how, which in changes.items() if which]
    cells += [("", check) for check in lost]
    last = {check: position for position, (_, check) in enumerate(cells, 1)}
    return [
        {"position": position, "check": check, "source": imports + checks[check] if check else source,
         "seconds": max(timeout, CHECK) if check else timeout}
        for position, (source, check) in enumerate(cells, 1)
        if (last[check] == position if check else source.strip())
    ]


async def _run(hand_in: HandIn, steps: list[dict[str, Any]], kind: str, told: dict[int, dict[str, Any]]) -> int | None:
    """Run steps in a folder of their own, and note in ``told`` what came of each; return the one that ended Python."""
    folder = Path(tempfile.mkdtemp(prefix="course-grade-"))
    folder.chmod(0o711)
    home = folder / "w"
    home.mkdir(mode=0o700)
    process, place, begun = None, None, None
    try:
        for module in hand_in.path.parent.glob("*.py") if hand_in.in_folder else ():
            if module.is_file() and not module.is_symlink() and module.stat().st_size < _LARGEST:
                shutil.copyfile(module, home / module.name)
        (home / STEPS).write_text(json.dumps(steps), encoding="utf-8")
        (home / TOLD).touch()
        place = Place(kind, home)
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *place.command, env=place.environment, cwd=home, stdin=asyncio.subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )
        await process.wait()
    finally:
        if process and process.returncode is None:
            process.kill()
        if place:
            await asyncio.to_thread(place.end)
        news = (home / TOLD).read_text(encoding="utf-8", errors="replace") if (home / TOLD).exists() else ""
        log = (folder / "log").read_text(errors="replace")[-2000:] if (folder / "log").exists() else ""
        shutil.rmtree(folder, ignore_errors=True)
        for line in news.splitlines():
            entry = json.loads(line)
            begun = entry.get("begins", begun)
            if "ended" in entry:
                told[entry["ended"]], begun = entry, None
    if not news:
        raise RuntimeError(f"the checks did not start: {log.strip()}")
    return begun


def _judge(steps: list[dict[str, Any]], told: dict[int, dict[str, Any]], result: Result) -> None:
    """Make verdicts and notes of what came of each step."""
    errors: list[str] = []
    known = result.hand_in.assignment.sources if result.hand_in.assignment else ()
    for step in steps:
        news = told.get(step["position"])
        error = news and news.get("error")
        if not step["check"] and error:
            errors.append(f"cell {step['position']}: {error}")
            if step["source"].strip() not in known and not error.startswith("NotImplementedError"):
                result.notes.append(errors[-1])
        elif step["check"]:
            verdict = result.verdicts[step["check"]]
            if news:
                verdict.passed, verdict.hint = not error, news.get("hint", "")
                verdict.graded = verdict.hint != "not-started"
                verdict.message = news.get("message", "")
            if not verdict.passed:
                verdict.message = "\n\n".join([verdict.message, *errors])
            errors = []
