"""What ``launch(hosts=…)`` may ask for: the division of ranks among hosts, their link, and the faults (private)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from course_utils.ranks import errors

INTERFACE = "eth0"
PORT = 29500  # of the store; in a network of their own it is always free
_MAX_HOSTS = 16
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Conditions:
    """What differs from a network in order: each fault of `launch` is one, and others can be put together."""

    names: tuple[tuple[int, str, str | None], ...] = ()  # host, name, its address in /etc/hosts there; None: no entry
    dropped: tuple[str, ...] = ()  # TCP ports, or ranges such as "4000-4100", that the firewall of node0 drops
    allowed: tuple[str, ...] | None = None  # the only ports that the firewall of every host lets through; None: all
    down: tuple[int, ...] = ()  # hosts whose interface is down
    slow: tuple[int, ...] = ()  # hosts whose link has a third of the rate
    master: int = 0  # the host that MASTER_ADDR names
    interface: str | None = INTERFACE  # what GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name; None: they are not set


def _faults(count: int) -> dict[str, Conditions]:
    """What ``launch(fault=…)`` may break on so many hosts."""
    hosts = range(count)
    # Debian and Ubuntu write such a name for the host itself into /etc/hosts.
    loopback = tuple((host, f"node{host}", "127.0.1.1") for host in hosts)
    return {
        "cable pulled": Conditions(down=(count - 1,)),
        "port closed": Conditions(dropped=(str(PORT),)),
        "only one port open": Conditions(allowed=(str(PORT),)),
        "wrong name": Conditions(names=loopback, interface=None),
        "unknown name": Conditions(names=tuple((host, "node0", None) for host in hosts[1:])),
        "wrong address": Conditions(master=count - 1),  # where nobody listens
        "wrong interface": Conditions(interface="ib0"),
        "slow cable": Conditions(slow=(max(1, count - 2),)),
    }


FAULTS = tuple(_faults(2))


def conditions_of(fault: str | Conditions | None, count: int) -> Conditions:
    """What a fault is on so many hosts."""
    return fault if isinstance(fault, Conditions) else _faults(count).get(fault or "", Conditions())


@dataclass(frozen=True)
class Plan:
    """Hosts for the ranks of one call: the same number of ranks on each, in order."""

    count: int
    world_size: int
    link: str | None = None
    fault: str | Conditions | None = None
    emulated: bool = True  # else the ranks run on one host and are only told that they do not

    def host(self, rank: int) -> int:
        return rank * self.count // self.world_size

    def name(self, rank: int) -> str:
        return f"node{self.host(rank)}"

    @property
    def rate(self) -> float | None:
        """Bits a second of the link, None if it has no limit."""
        return _rate(self.link)

    @property
    def conditions(self) -> Conditions:
        """What is wrong between the hosts, or in what the ranks are told of them."""
        return conditions_of(self.fault, self.count)

    @property
    def environment(self) -> dict[str, Any]:
        """What tells ranks where they are: hosts, the address of the first, the interface (None: none is named)."""
        if not self.emulated:
            return {"network": False, "count": self.count, "address": "127.0.0.1"}
        told = {"address": f"node{self.conditions.master}", "interface": self.conditions.interface}
        return {"network": True, "count": self.count, **told}


def divide(hosts: Any, world_size: int, link: Any = None, fault: Any = None) -> Plan:
    """Check what was asked for. Raises TypeError or ValueError with the allowed values."""
    if isinstance(hosts, bool) or not isinstance(hosts, Integral):
        raise errors.refusal(TypeError, f"hosts is a whole number of hosts, not {type(hosts).__name__}: {hosts!r}")
    allowed = [count for count in range(1, _MAX_HOSTS + 1) if world_size % count == 0]
    hosts = int(hosts)
    if hosts not in allowed:
        raise errors.refusal(
            ValueError,
            f"hosts is {hosts}; {world_size} ranks can be divided equally among {_listed(allowed)} hosts. "
            "Choose one of these, or another world_size",
        )
    rate = _rate(link)
    if rate is not None and not 1e5 <= rate <= 1e11:
        raise errors.refusal(ValueError, f"link is {link!r}; allowed are rates from 100kbit to 100gbit")
    if fault is not None and not isinstance(fault, Conditions) and fault not in FAULTS:
        raise errors.refusal(ValueError, f"fault is {fault!r}; allowed are {_listed([repr(name) for name in FAULTS])}")
    if conditions_of(fault, hosts).slow and rate is None:
        raise errors.refusal(ValueError, f"fault {fault!r} needs a rate to be slower than: give link=")
    if fault is not None and hosts == 1:
        raise errors.refusal(ValueError, "hosts is 1; a fault between hosts needs 2 or more")
    return Plan(hosts, world_size, link, fault)


def _listed(words: list) -> str:
    *first, last = map(str, words)
    return f"{', '.join(first)} or {last}" if first else last


def _rate(link: Any) -> float | None:
    """The bits a second that a text like ``100mbit`` stands for."""
    if link is None:
        return None
    form = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(_UNITS)})", link) if isinstance(link, str) else None
    if form is None or float(form[1]) == 0:
        kind = ValueError if isinstance(link, str) else TypeError
        allowed = f"a number above 0 and a unit ({_listed(list(_UNITS))}), such as '100mbit'"
        raise errors.refusal(kind, f"link is {link!r}; allowed are {allowed}")
    return float(form[1]) * _UNITS[form[2]]
