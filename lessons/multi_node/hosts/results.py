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
from course_utils.ranks.ledger import Ledger

from .network import Hosts, HostsError, program
from .plan import INTERFACE, Plan

__all__ = ["HostLedger", "HostResults", "as_possible", "hosts_available"]


_made: set[bool] = set()  # trials that have succeeded, without and with latency


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


def _trial(latency: bool) -> str:
    """Why hosts cannot be made, found by making two; empty if they can."""
    if latency in _made:
        return ""
    if missing := _missing():
        return missing
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        try:
            Hosts(Plan(2, 2, "100mbit", "1ms" if latency else None), folder).close()
        except HostsError as error:
            return str(error)
    _made.add(latency)
    return ""


def hosts_available(latency: bool = False) -> tuple[bool, str]:
    """Whether ``launch(hosts=…)`` emulates hosts on this machine, and a sentence that says so, or what is missing and
    the way out.

    It is found by making two hosts; that it works is remembered. Links with ``latency`` need netem in the kernel.
    """
    reason = _trial(latency)
    links = "their link has a rate and a latency" if latency else "their link has a rate"
    return not reason, reason or f"several hosts are emulated by Linux network namespaces; {links}"


def as_possible(wanted: Plan) -> Plan:
    """The plan as far as it can be emulated here; prints what cannot. A fault that would not be there is refused."""
    there, sentence = hosts_available()
    if not there and wanted.fault is not None:
        raise errors.refusal(RuntimeError, f"fault {wanted.fault!r} needs emulated hosts: {sentence}")
    if not there:
        who = "1 host is" if wanted.count == 1 else f"{wanted.count} hosts are"
        print(f"{who} not emulated: {sentence}. The ranks run on the machine itself, and their link has no limit.")
        return replace(wanted, emulated=False)
    if wanted.latency and not hosts_available(latency=True)[0]:
        print(f"latency {wanted.latency} is not emulated: {hosts_available(latency=True)[1]}. The link has no delay.")
        return replace(wanted, latency=None)
    return wanted


# -------------------------------------------------------------------------------------------------------------- results


class HostLedger(Ledger):
    """A ledger whose table ends with the bytes that left each host in the whole call."""

    def __init__(self, ledger: Ledger, left_host: list[int]):
        super().__init__(ledger.entries)
        self.left_host = left_host

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [("", f"left node{host}", INTERFACE, f"{count:,}", "", "") for host, count in enumerate(self.left_host)]
        return super()._rows() + rows


class HostResults(list):
    """What ``launch(hosts=…)`` returns: the results by rank.

    Its attribute ``left_host`` has the bytes that left each host over its interface in the whole call, with headers;
    None where hosts are not emulated. Making the default process group is not counted, unless a program makes its own.
    """

    def __init__(self, results: list, left_host: list[int] | None):
        if left_host is not None:
            results = [HostLedger(r, left_host) if type(r) is Ledger else r for r in results]
        super().__init__(results)
        self.left_host = left_host
