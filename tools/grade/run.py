"""Run one hand-in behind a fence, and say which checks it passes."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from .fence import Place
from .hand_ins import HandIn
from .inside import STEPS, TOLD

CHECK = 200.0  # seconds for a check; its own limits are shorter


async def grade_hand_in(hand_in: HandIn, kind: str, timeout: float, limit: float) -> None:
    """Run a hand-in with the course's checks; a cell may take ``timeout`` seconds, and all of it ``limit``.

    A cell that ends Python is left out, and the rest is run anew. An error of the grader or of the machine grades no
    check.
    """
    start, steps = time.monotonic(), _steps(hand_in, timeout)
    left, told = steps, {}
    try:
        async with asyncio.timeout(limit):
            while left and (dead := await _run(hand_in, left, kind, told)):
                told[dead] = {"error": "it ended Python", "hint": "", "message": "Python ended during this check."}
                hand_in.notes.append(f"cell {dead} ended Python; the rest was run without it")
                left = [each for each in left if each["position"] not in (told if each["check"] else [dead])]
    except TimeoutError:
        hand_in.notes.append(f"ended after {limit:g} s")
    except Exception as error:
        hand_in.notes.append(f"not graded: {type(error).__name__}: {error}")
        for verdict in hand_in.verdicts.values():
            verdict.graded = False
    _judge(hand_in, steps, told)
    hand_in.seconds = time.monotonic() - start


def _steps(hand_in: HandIn, timeout: float) -> list[dict[str, Any]]:
    """Cells and checks in order: each check once, as the course has it, where the hand-in has it last or at the end."""
    imports, checks = hand_in.assignment.imports, hand_in.assignment.checks
    names = {source.strip(): name for name, source in checks.items()}
    cells = [(source, names.get(source.strip(), mark if mark in checks else "")) for source, mark in hand_in.cells]
    changed = [check for source, check in cells if check and source.strip() not in names]
    missing = [check for check in checks if check not in [each for _, each in cells]]
    for how, which in (("changed", changed), ("missing", missing)):
        hand_in.notes += [f"check cells {how}: {', '.join(which)}"] if which else []
    cells += [("", check) for check in missing]
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
    home, log, process = folder / "w", folder / "log", None
    home.mkdir(mode=0o700)
    for module in hand_in.path.parent.glob("*.py"):
        if module.is_file() and not module.is_symlink():
            shutil.copyfile(module, home / module.name)
    (home / STEPS).write_text(json.dumps(steps), encoding="utf-8")
    (home / TOLD).touch()
    place = Place(kind, home)
    try:
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *place.command, env=place.environment, cwd=home, stdin=asyncio.subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True,
            )
        await process.wait()
    finally:
        if process and process.returncode is None:
            process.kill()
        await asyncio.to_thread(place.end)
        news = [json.loads(line) for line in (home / TOLD).read_text(encoding="utf-8").splitlines()]
        said = log.read_text(errors="replace")[-2000:].strip()
        shutil.rmtree(folder, ignore_errors=True)
        told |= {entry["ended"]: entry for entry in news if "ended" in entry}
    if not news:
        raise RuntimeError(f"the checks did not start: {said}")
    return news[-1].get("begins")


def _judge(hand_in: HandIn, steps: list[dict[str, Any]], told: dict[int, dict[str, Any]]) -> None:
    """Make verdicts and notes of what came of each step."""
    errors: list[str] = []
    for step in steps:
        news = told.get(step["position"], {})
        error = news.get("error")
        if step["check"]:
            verdict = hand_in.verdicts[step["check"]]
            if news:
                verdict.passed, verdict.hint = not error, news.get("hint", "")
                verdict.graded, verdict.message = verdict.hint != "not-started", news.get("message", "")
            if not verdict.passed:
                verdict.message = "\n\n".join([verdict.message, *errors])
            errors = []
        elif error:
            errors.append(f"cell {step['position']}: {error}")
            own = step["source"].strip() not in hand_in.assignment.sources
            hand_in.notes += errors[-1:] if own and not error.startswith("NotImplementedError") else []
