"""Cures of the network clinic: changes as data, and what they make of settings and network (private)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lessons.multi_node.hosts import Conditions

from ._network_runs import HOSTS, Work

__all__ = ["CURES", "check_cure", "cured"]

CURES = {
    "environment": "variables of the environment on both hosts, such as {'NAME': 'value'}; None removes one",
    "hosts_file": "entries of /etc/hosts on both hosts, such as {'node7': '10.0.0.8'}, in place of those for the name",
    "open_ports": "what the firewalls let through besides: a port such as 4000, a range such as '4000-4100', or 'all'",
    "link": "the interfaces eth0 of both hosts: 'up'",
    "folder": "where checkpoints go, from the working folder of a host: such as 'checkpoint' or 'shared/checkpoint'",
}

_REFUSED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "PATH", "PYTHONPATH", "LD_PRELOAD"}


def check_cure(cure: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError, with what is allowed, for a cure that cannot be applied."""
    for name, value in cure.items():
        {"environment": _check_environment, "hosts_file": _check_hosts_file, "open_ports": _ports, "link": _check_link,
         "folder": _check_folder}[name](value)


def _check_environment(value: Any) -> None:
    if not isinstance(value, dict) or not value:
        raise TypeError(f"environment is {value!r}; allowed is a dictionary such as {{'NAME': 'value'}}")
    for name, text in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Z][A-Z0-9_]*", name) or name in _REFUSED:
            raise ValueError(f"environment sets {name!r}; allowed are names of variables that every rank has in common")
        if text is not None and not isinstance(text, str):
            raise TypeError(f"environment sets {name} to {text!r}; allowed are texts, and None, which removes it")


def _check_hosts_file(value: Any) -> None:
    if not isinstance(value, dict) or not value:
        raise TypeError(f"hosts_file is {value!r}; allowed is a dictionary such as {{'node7': '10.0.0.8'}}")
    for name, address in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9.-]*", name):
            raise ValueError(f"hosts_file names {name!r}; allowed are host names such as 'node7'")
        try:
            ipaddress.IPv4Address(address if isinstance(address, str) else "")
        except ValueError:
            allowed = "addresses of IPv4 such as '10.0.0.8'"
            raise ValueError(f"hosts_file gives {name} the address {address!r}; allowed are {allowed}") from None


def _ports(value: Any) -> tuple[int, int]:
    """First and last port of what is to be opened."""
    if value == "all":
        return 1, 65535
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"open_ports is {value!r}; allowed are a port, a range such as '4000-4100', and 'all'")
    form = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", str(value))
    first, last = (int(form[1]), int(form[2] or form[1])) if form else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise ValueError(f"open_ports is {value!r}; allowed are a port, a range such as '4000-4100', and 'all'")
    return first, last


def _check_link(value: Any) -> None:
    if value != "up":
        raise ValueError(f"link is {value!r}; allowed is 'up'")


def _check_folder(value: Any) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"(shared/)?[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*", value):
        raise ValueError(
            f"folder is {value!r}; allowed are folders below a host's working folder, such as 'checkpoint' or "
            "'shared/checkpoint'"
        )


def cured(work: Work, cure: Mapping[str, Any]) -> Work:
    """What a run needs once a cure has been applied."""
    settings, now = dict(work.settings), work.conditions
    settings |= cure.get("environment", {})
    if "folder" in cure:
        settings["CHECKPOINT"] = cure["folder"]
    if "hosts_file" in cure:
        given = cure["hosts_file"]
        kept = tuple(entry for entry in now.names if entry[1] not in given)
        entries = [(host, name, address) for host in range(HOSTS) for name, address in given.items()]
        now = replace(now, names=(*kept, *entries))
    if "open_ports" in cure:
        now = _opened(now, *_ports(cure["open_ports"]))
    if "link" in cure:
        now = replace(now, down=())
    return Work(settings, now)


def _opened(now: Conditions, first: int, last: int) -> Conditions:
    if (first, last) == (1, 65535):
        return replace(now, dropped=(), allowed=None)
    dropped = tuple(port for port in now.dropped if not first <= int(port) <= last)
    allowed = None if now.allowed is None else (*now.allowed, f"{first}-{last}" if first < last else f"{first}")
    return replace(now, dropped=dropped, allowed=allowed)
