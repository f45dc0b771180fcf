"""The network of emulated hosts: what ``ip`` and ``tc`` have to make for a plan, and the bytes that leave each host."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

from . import namespaces
from .plan import INTERFACE, Conditions, Plan

_BURST = 0.005  # seconds of its rate that a link that was idle may send at once
_SMALLEST_BURST = 10_000  # bytes
_SLOWER = 3  # times, if a link is slow
_QUEUE = 32_000_000  # bytes that may wait for a link before it drops some
_START = 20.0  # seconds that the namespaces have to be made
_QUIET = 0.005  # seconds without a byte after which a link counts as quiet
_DRAIN = 5.0  # seconds to wait for that, at most
_PATH = os.pathsep.join([os.defpath, "/usr/sbin", "/sbin"])  # where others than root do not look for programs
_CONTAINERS = ("/.dockerenv", "/run/.containerenv")  # files of Docker, of Podman
_ENDED = "the emulated hosts have been ended from outside; the next call makes new ones"
_UNANSWERED = {"what": "the process that makes the hosts", "errno": 0, "error": "no answer"}


class HostsError(Exception):
    """Emulated hosts cannot be made here: a sentence that says why, and the way out."""


def _address(host: int) -> str:
    return f"10.0.0.{host + 1}"


def _hardware_address(host: int) -> str:
    return f"02:00:00:00:00:{host + 1:02x}"


def _without_ipv6() -> str:
    """For ``ip link set``: no address of IPv6, with which an interface would send by itself."""
    return "addrgenmode none" if os.path.exists("/proc/net/if_inet6") else ""


def _links(wanted: Plan) -> list[str]:
    """For ``ip``: a bridge, and a cable from it to each host; ``{0}`` stands for the process that holds host 0."""
    commands = ["link add switch type bridge", f"link set switch {_without_ipv6()} up"]
    for host in range(wanted.count):
        commands += [
            f"link add port{host} type veth peer name {INTERFACE} address {_hardware_address(host)} "
            f"netns {{{host}}}",
            f"link set port{host} {_without_ipv6()} master switch up",
        ]
    return commands


def _network(wanted: Plan, host: int) -> list[str]:
    """For ``ip`` inside a host. Neighbors are known, so that nothing but the ranks' own traffic is counted."""
    commands = [
        "link set lo up", f"address add {_address(host)}/24 dev {INTERFACE}",
        f"link set {INTERFACE} {_without_ipv6()} up",
    ]
    for other in set(range(wanted.count)) - {host}:
        commands.append(
            f"neigh replace {_address(other)} lladdr {_hardware_address(other)} dev {INTERFACE} nud permanent"
        )
    firewall = _firewall(wanted.conditions, host)
    if firewall:  # which comes before the rule by which a host takes what is for itself
        commands += ["rule add pref 100 lookup local", "rule del pref 0"]
        commands += [f"rule add pref {10 + number} {rule}" for number, rule in enumerate(firewall)]
    if host in wanted.conditions.down:
        commands.append(f"link set {INTERFACE} down")
    return commands


def _firewall(now: Conditions, host: int) -> list[str]:
    """For ``ip rule``: what the firewall of a host lets through and drops, in this order."""
    coming = f"from all iif {INTERFACE}"
    rules = [f"{coming} ipproto tcp dport {ports} blackhole" for ports in now.dropped if host == 0]
    if now.allowed is not None:
        sides = [(side, ports) for ports in now.allowed for side in ("dport", "sport")]
        rules += [f"{coming} ipproto tcp {side} {ports} lookup local" for side, ports in sides]
        rules.append(f"{coming} blackhole")
    return rules


def _rate(wanted: Plan, device: str, host: int) -> list[str]:
    """For ``tc``: the rate of a host's link in one direction."""
    if wanted.rate is None:
        return []
    rate = wanted.rate / _SLOWER if host in wanted.conditions.slow else wanted.rate
    burst = max(_SMALLEST_BURST, int(rate / 8 * _BURST))
    return [f"qdisc add dev {device} root tbf rate {rate:.0f}bit burst {burst} limit {_QUEUE}"]


def _names(wanted: Plan, host: int) -> str:
    """The file ``/etc/hosts`` of a host."""
    known: dict[str, str | None] = {"localhost": "127.0.0.1"}
    known |= {f"node{other}": _address(other) for other in range(wanted.count)}
    known |= {name: address for place, name, address in wanted.conditions.names if place == host}
    lines = [f"{address} {name}" for name, address in known.items() if address is not None]
    return "\n".join(lines) + "\n"


def _write(folder: str, name: str, text: str) -> str:
    path = os.path.join(folder, name)
    with open(path, "w") as file:
        file.write(text)
    return path


def _task(wanted: Plan, folder: str) -> dict[str, Any]:
    """What the process that holds the hosts is to do."""
    resolver = _write(folder, "resolv.conf", "# no name server: every name is in /etc/hosts\noptions attempts:1\n")
    described = [
        {
            "name": f"node{host}",
            "files": {"/etc/hosts": _write(folder, f"hosts{host}", _names(wanted, host)), "/etc/resolv.conf": resolver},
            "network": _network(wanted, host),
            "rates": _rate(wanted, INTERFACE, host),
        }
        for host in range(wanted.count)
    ]
    ports = [command for host in range(wanted.count) for command in _rate(wanted, f"port{host}", host)]
    return {
        "owner": os.getpid(), "hosts": described, "links": _links(wanted), "rates": ports,
        "ip": program("ip"), "tc": program("tc"),
    }


def program(name: str) -> str | None:
    """Where a program of the system is."""
    return shutil.which(name) or shutil.which(name, path=_PATH)


class Hosts:
    """The hosts of a plan, each held by a process (`pids`), which last until `close` or the end of this process."""

    def __init__(self, wanted: Plan, folder: str):
        """Make the hosts; ``folder`` is a private one for their files. Raises HostsError."""
        self.plan = wanted
        self._folder = tempfile.mkdtemp(prefix="hosts-", dir=folder)
        task = _task(wanted, self._folder)
        self._holder = subprocess.Popen(
            [sys.executable, "-I", "-S", namespaces.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, start_new_session=True, cwd="/",
        )
        try:
            answer = self._ask(json.dumps(task)) or _UNANSWERED
            if "pids" not in answer:
                raise HostsError(_reason(answer))
        except BaseException:  # an interrupt, for example
            self.close()
            raise
        self.pids: list[int] = answer["pids"]

    def _ask(self, line: str) -> dict[str, Any] | None:
        """What the process that holds the hosts answers to a line, empty where all is well; None: nothing."""
        with contextlib.suppress(OSError, ValueError):
            self._holder.stdin.write(line + "\n")
            self._holder.stdin.flush()
            if select.select([self._holder.stdout], [], [], _START)[0]:
                return json.loads(self._holder.stdout.readline())
        return None

    @property
    def alive(self) -> bool:
        return self._holder.poll() is None

    def left(self) -> list[int]:
        """Bytes that have left each host, headers included, as its interface has counted them."""
        return [bytes_left(pid) for pid in self.pids]

    def settle(self) -> None:
        """Wait until nothing leaves any host any more: what ranks have sent may still wait for a slow link."""
        pause = max(_QUIET, 3 * 1514 * 8 / (self.plan.rate or 1e12))  # seconds; a frame leaves in a third of it
        deadline, before = time.monotonic() + _DRAIN, self.left()
        while time.monotonic() < deadline:
            time.sleep(pause)
            now = self.left()
            if now == before:
                return
            before = now

    def plug(self, host: int, there: bool) -> None:
        """Pull the cable of a host out of the switch, or put it back. Raises HostsError if that cannot be done."""
        answer = self._ask(f"link set port{host} {'up' if there else 'down'}")
        if answer is None:
            raise HostsError(_ENDED)
        if answer:
            raise HostsError(_reason(answer))

    def close(self) -> None:
        """End the hosts; ranks in them must have ended before."""
        with contextlib.suppress(OSError):
            self._holder.stdin.close()
        self._holder.stdout.close()
        try:
            self._holder.wait(2.0)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def bytes_left(pid: int | str) -> int:
    """Bytes that have left the host that a process is in. Raises HostsError if it has ended."""
    try:
        with open(f"/proc/{pid}/net/dev") as table:
            line = next(line for line in table if line.strip().startswith(f"{INTERFACE}:"))
    except (OSError, StopIteration):
        raise HostsError(_ENDED) from None
    return int(line.split(":")[1].split()[8])


def _setting(name: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/sys/{name.replace('.', '/', 1)}") as file:
        return file.read().strip()
    return ""


def _reason(answer: dict[str, Any]) -> str:
    """Why hosts could not be made, in words, from what the process that tried has answered."""
    what = f"{answer['what']}: {answer['error']}"
    if answer["errno"]:  # the system has refused, not a program
        if "KUBERNETES_SERVICE_HOST" in os.environ or any(map(os.path.exists, _CONTAINERS)):
            return f"this container may not make the network of emulated hosts ({what}); a Linux machine or WSL may"
        for name, value, cure in (
            ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
            ("kernel.unprivileged_userns_clone", "0", "1"),
            ("user.max_user_namespaces", "0", "10000"),
        ):
            if _setting(name) == value:
                return (
                    f"this system lets only root make the network of emulated hosts ({name} is {value}); "
                    f"the way out: `sudo sysctl {name}={cure}`, which lasts until the next start"
                )
    return f"this system cannot make the network of emulated hosts ({what})"


