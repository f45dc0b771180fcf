"""Cures of the network clinic: changes as data, and what they make of settings and network (private)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lessons.multi_node.hosts import Conditions

from ._network_runs import HOSTS, Work

CURES = {
    "environment": "variables of the environment on both hosts, such as {'NAME': 'value'}; None removes one",
    "hosts_file": "entries of /etc/hosts on both hosts, such as {'node7': '10.0.0.8'}, in place of those for the name",
    "open_ports": "what the firewalls let through besides: a port such as 4000, a range such as '4000-4100', or 'all'",
    "link": "the interfaces eth0 of both hosts: 'up'",
    "folder": "where checkpoints go, from the working folder of a host: such as 'checkpoint' or 'shared/checkpoint'",
}

_OF_ONE_RANK = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "PATH", "PYTHONPATH", "LD_PRELOAD"}


def _are(names: str, values: Callable[[Any], bool], given: Any) -> bool:
    """Whether this is a dictionary with such names, by a regular expression, and such values."""
    pairs = given.items() if isinstance(given, dict) else []
    return bool(pairs) and all(isinstance(name, str) and re.fullmatch(names, name) and values(v) for name, v in pairs)


def _is_address(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(ipaddress.IPv4Address(value))
    except ValueError:
        return False


def _ports(value: Any) -> tuple[int, int] | None:
    """First and last port of what is to be opened."""
    form = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", "1-65535" if value == "all" else str(value))
    first, last = (int(form[1]), int(form[2] or form[1])) if form else (0, 0)
    return (first, last) if 1 <= first <= last <= 65535 else None


_FORMS = {  # what is right, and what is allowed in words
    "environment": (
        lambda given: _are("[A-Z][A-Z0-9_]*", lambda v: v is None or isinstance(v, str), given)
        and not _OF_ONE_RANK & set(given),
        "allowed is a dictionary such as {'NAME': 'value'}, with names of variables that every rank has in common",
    ),
    "hosts_file": (
        lambda given: _are("[a-z][a-z0-9.-]*", _is_address, given),
        "allowed is a dictionary such as {'node7': '10.0.0.8'}; allowed are addresses of IPv4",
    ),
    "open_ports": (_ports, "allowed are a port, a range such as '4000-4100', and 'all'"),
    "link": (lambda given: given == "up", "allowed is 'up'"),
    "folder": (
        lambda given: isinstance(given, str) and re.fullmatch(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*", given),
        "allowed are folders below a host's working folder, such as 'checkpoint' or 'shared/checkpoint'",
    ),
}


def check_cure(cure: Mapping[str, Any]) -> None:
    """Raise ValueError, with what is allowed, for a cure that cannot be applied."""
    for name, value in cure.items():
        right, allowed = _FORMS[name]
        if not right(value):
            raise ValueError(f"{name} is {value!r}; {allowed}")


def cured(work: Work, cure: Mapping[str, Any]) -> Work:
    """What a run needs once a cure has been applied."""
    settings, now = dict(work.settings) | cure.get("environment", {}), work.conditions
    if "folder" in cure:
        settings["CHECKPOINT"] = cure["folder"]
    if "hosts_file" in cure:
        given = cure["hosts_file"]
        kept = tuple(entry for entry in now.names if entry[1] not in given)
        entries = [(host, name, address) for host in range(HOSTS) for name, address in given.items()]
        now = replace(now, names=(*kept, *entries))
    if "open_ports" in cure:
        now = _opened(now, *_ports(cure["open_ports"]))
    return Work(settings, replace(now, down=()) if "link" in cure else now)


def _opened(now: Conditions, first: int, last: int) -> Conditions:
    if (first, last) == (1, 65535):
        return replace(now, dropped=(), allowed=None)
    dropped = tuple(port for port in now.dropped if not first <= int(port) <= last)
    allowed = None if now.allowed is None else (*now.allowed, f"{first}-{last}" if first < last else f"{first}")
    return replace(now, dropped=dropped, allowed=allowed)
