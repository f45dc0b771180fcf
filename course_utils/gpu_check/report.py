"""The JSON of ``gpu-check``: what stands in it, how it is checked, and that it names no person, host or folder.

The report is one object::

    schema     1; a change that readers must know of gives another number
    made_by    the command
    on         "gpu", or "cpu": a try of the kit itself, with small sizes
    complete   whether all checks had their turn; the file is written anew after each
    machine    what `machine.describe` found: GPUs, driver, versions of torch, NCCL, CUDA and Python, cores, memory
    checks     list, in the order in which they ran

and each check::

    name       as in `catalogue`
    what       one sentence
    status     "passed", "failed", "skipped" or "timed out"
    reason     why it did not pass, else empty
    seconds    that it took, with the start of Python and of torch
    facts      what it found, by name: numbers, texts, lists, objects, and measurements

and a measurement, wherever it stands below ``facts``::

    value      a number, or a list of numbers
    unit       such as "GB/s" (10**9 bytes a second), "s", "TFLOP/s", "bytes", "1" for a share
    how        how it was measured
    at         of a list: what each was measured at, with ``at_unit``
"""

from __future__ import annotations

import getpass
import json
import math
import os
import re
import socket
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["FAILED", "PASSED", "SCHEMA", "SKIPPED", "STATUSES", "TIMED_OUT", "faults", "measured", "scrub", "write"]

SCHEMA = 1
PASSED, FAILED, SKIPPED, TIMED_OUT = STATUSES = ("passed", "failed", "skipped", "timed out")
_KEYS = {"schema": int, "made_by": str, "on": str, "complete": bool, "machine": dict, "checks": list}
_CHECK_KEYS = {"name": str, "what": str, "status": str, "reason": str, "seconds": float, "facts": dict}
_PATH = re.compile(r"(?<![\w.:/<])/(?:home|root|Users|tmp|var|opt|usr|work|mnt|data|scratch|workspace)/[\w.@+/-]*")


def measured(
    value: float | Sequence[float], unit: str, how: str, at: Sequence[float] | None = None, at_unit: str = ""
) -> dict[str, Any]:
    """Return a measurement as the report has it; numbers keep four digits.

    Raises
    ------
    ValueError
        If ``at`` is not as long as ``value``.
    """
    if at is None and not isinstance(value, Sequence):
        return {"value": _short(value), "unit": unit, "how": how}
    if at is None or not isinstance(value, Sequence) or len(at) != len(value):
        raise ValueError("a list of values needs as many places, at=")
    return {"value": [_short(v) for v in value], "unit": unit, "how": how, "at": list(at), "at_unit": at_unit}


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")


def scrub(value: Any) -> Any:
    """Return the value with the names of host and user, and folders, taken out of all its texts."""
    if isinstance(value, dict):
        return {scrub(key): scrub(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(each) for each in value]
    if not isinstance(value, str):
        return value
    for folder, name in _folders():
        value = value.replace(folder, name)
    value = _PATH.sub("<path>", value)
    for name in _names():
        value = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<name>", value)
    return value


@cache
def _folders() -> list[tuple[str, str]]:
    here = str(Path(__file__).resolve().parents[2])
    return [(here, "<course>"), *([(home, "<home>")] if len(home := os.path.expanduser("~")) > 1 else [])]


@cache
def _names() -> list[str]:
    """Of this host and this user, where they are not everybody's."""
    host, found = socket.gethostname(), []
    try:
        found.append(getpass.getuser())
    except (KeyError, OSError):
        pass
    found += [host, host.split(".")[0]]
    return [name for name in found if len(name) > 2 and name not in ("root", "localhost", "user", "ubuntu")]


def write(report: dict[str, Any], path: Path) -> None:
    """Write the report in one go: whoever reads, or an interruption, finds the old file or the new one."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def faults(report: Any) -> list[str]:
    """Say where a report is not as this module describes it; empty if it is."""
    if not isinstance(report, dict):
        return ["the report is no object"]
    found = _types("the report", report, _KEYS)
    if found:
        return found
    if report["schema"] != SCHEMA:
        found.append(f"schema is {report['schema']!r}, not {SCHEMA}")
    if report["on"] not in ("gpu", "cpu"):
        found.append(f"on is {report['on']!r}")
    for number, check in enumerate(report["checks"]):
        place = f"check {number}"
        wrong = _types(place, check, _CHECK_KEYS) if isinstance(check, dict) else [f"{place} is no object"]
        found += wrong
        if wrong:
            continue
        if check["status"] not in STATUSES:
            found.append(f"{place}: status is {check['status']!r}")
        if bool(check["reason"]) == (check["status"] == PASSED):
            found.append(f"{place}: a reason is for those that did not pass, and for all of them")
        found += [f"{place}: {fault}" for fault in _measurements(check["facts"], "facts")]
    if scrub(report) != report:
        found.append("it names a host, a user or a folder")
    return found


def _types(place: str, given: dict, wanted: dict[str, type]) -> list[str]:
    found = [f"{place} has {key!r}, which the schema has not" for key in given if key not in wanted]
    for key, kind in wanted.items():
        if not isinstance(given.get(key), kind):
            found.append(f"{place}: {key} is {given.get(key)!r}, not of type {kind.__name__}")
    return found


def _measurements(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, dict) and "value" in value:
        numbers = value["value"] if isinstance(value["value"], list) else [value["value"]]
        if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
            yield f"{place}: its value is no number"
        if not value.get("unit") or not value.get("how"):
            yield f"{place}: a measurement without unit or how"
        if isinstance(value["value"], list) and len(value.get("at", [])) != len(numbers):
            yield f"{place}: a list of values without as many places"
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _measurements(each, f"{place}.{key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _measurements(each, f"{place}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{place}: {value} is no number"
