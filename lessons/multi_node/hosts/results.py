"""Emulated hosts: whether this machine has what they need, and what ``launch(hosts=…)`` returns.

The interfaces, the bytes on them, the link's rate and the faults are real; only the machine is the same.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from dataclasses import replace

from course_utils.ranks import errors

from .network import Hosts, HostsError, program
from .plan import Plan

_made: set[bool] = set()  # the trial, once it has succeeded
_said: set[str] = set()  # why there are no hosts, once it has been printed


def _missing() -> str:
    """What of the system is missing for emulated hosts; empty if nothing is."""
    if sys.platform != "linux":
        return f"emulated hosts need the network namespaces of Linux, which {platform.system()} does not have"
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if release and (int(release[1]), int(release[2])) < (5, 8):
        return f"emulated hosts need Linux 5.8 or newer, and this is {os.uname().release}"
    for name in ("ip", "tc"):
        if program(name) is None:
            return f"emulated hosts need the program `{name}`; the way out: `sudo apt-get install iproute2`"
    return ""


def _trial() -> str:
    """Why hosts cannot be made, found by making two; empty if they can."""
    if _made:
        return ""
    if missing := _missing():
        return missing
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        try:
            Hosts(Plan(2, 2, "100mbit"), folder).close()
        except HostsError as error:
            return str(error)
    _made.add(True)
    return ""


def hosts_available() -> tuple[bool, str]:
    """Whether hosts are emulated on this machine, found by making two, and a sentence: that, or what is missing."""
    reason = _trial()
    return not reason, reason or "several hosts are emulated by Linux network namespaces; their link has a rate"


def as_possible(wanted: Plan) -> Plan:
    """The plan as far as it can be emulated here; prints what cannot. A fault that would not be there is refused."""
    there, sentence = hosts_available()
    if not there and wanted.fault is not None:
        raise errors.refusal(RuntimeError, f"fault {wanted.fault!r} needs emulated hosts: {sentence}")
    if not there:
        who = "1 host is" if wanted.count == 1 else f"{wanted.count} hosts are"
        why = "" if sentence in _said else f": {sentence}"  # once is enough for a notebook
        _said.add(sentence)
        print(f"{who} not emulated{why}. The ranks run on the machine itself, and their link has no limit.")
        return replace(wanted, emulated=False)
    return wanted


# -------------------------------------------------------------------------------------------------------------- results


class HostResults(list):
    """What ``launch(hosts=…)`` returns: the results by rank, and in ``left_host`` the bytes that left each host over
    its interface, with headers but without making the default process group; None where hosts are not emulated."""

    def __init__(self, results: list, left_host: list[int] | None):
        super().__init__(results)
        self.left_host = left_host
