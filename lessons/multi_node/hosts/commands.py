"""Run command lines such as ``torchrun …`` on emulated hosts, and let hosts fail when a line is printed."""

from __future__ import annotations

import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from course_utils.ranks import errors, launcher, processes
from course_utils.ranks.labels import tells_place

from . import namespaces
from .network import Hosts, HostsError
from .plan import INTERFACE, Plan, divide
from .results import hosts_available as _available
from .transcript import Transcript, clean, label, load, store

#: What ``run_on_hosts(when=…)`` may do to a host, and how the transcript says that it was done.
ACTIONS = {
    "kill": "killed: SIGKILL to all its processes", "terminate": "terminated: SIGTERM to what its command runs",
    "unplug": "unplugged: its cable is out", "plug": "plugged in: its cable is back", "start": "started",
}
_ENDED = 10.0  # seconds that processes have to disappear after SIGKILL
_MOST = 16  # hosts
_LAST = 20  # lines of each host that an error shows


def run_on_hosts(
    command: str | Sequence[str],
    hosts: int = 2,
    timeout: float = 180.0,
    *,
    when: Sequence[tuple[str, str]] = (),
    env: Mapping[str, str] | None = None,
    recorded: str | None = None,
) -> Transcript:
    """Run a command line on each of several emulated hosts, as if typed there, and return when all have ended.

    The hosts are those of :func:`launch`, and have the files of this machine like a shared disk. ``torchrun`` and
    ``python`` are those of this environment, and run on the CPU.

    Parameters
    ----------
    command : str or sequence of str
        A command line for ``sh``, the same for all hosts or one for each. ``{host}`` stands for the host's number.
    timeout : float
        Seconds after which all processes are killed and RuntimeError is raised, with the last lines of each host.
    when : sequence of (str, str)
        What happens to hosts, one after another: once a line such as ``node1 | step 5`` matches the regular expression,
        the action is done, and only then the next expression is looked for. Actions are ``"kill node1"`` (SIGKILL to
        all its processes at once), ``"terminate node1"`` (SIGTERM to what its command runs), ``"unplug node1"``,
        ``"plug node1"`` (its cable) and ``"start node1"`` (its command runs again). They are lines, too, and so is the
        end of a command. A host that is started before anything ends it joins late.
    env : mapping, optional
        Variables that are set besides those of this process.
    recorded : str, optional
        Where hosts cannot be emulated, return the result that is stored under this name. It is labelled as recorded.
        With the variable ``COURSE_RECORD=1`` the result of this run is stored.
    """
    if isinstance(hosts, bool) or not isinstance(hosts, Integral) or not 1 <= hosts <= _MOST:
        raise errors.refusal(ValueError, f"hosts is {hosts!r}; allowed are whole numbers from 1 to {_MOST}")
    plan = divide(hosts, hosts)
    commands, actions = _commands(command, plan.count), _actions(when, plan.count)
    limit = launcher.seconds(timeout)
    there, sentence = _available()
    if not there:
        stored = load(recorded) if recorded else None
        if stored is None:
            raise errors.refusal(RuntimeError, f"this command needs emulated hosts: {sentence}")
        return stored
    if launcher.on_a_rank():
        raise errors.refusal(RuntimeError, "run_on_hosts was called on a rank; call it from the notebook")
    try:
        processes.start_server()  # unless it runs
        place = processes.server_folder()  # which goes when this process does
        with tempfile.TemporaryDirectory(prefix="commands-", dir=place) as folder:
            with _Run(plan, commands, env, folder) as run:
                run.until_all_have_ended(actions, limit)
            result = Transcript(run.said, [run.codes[host] for host in range(plan.count)])
    except HostsError as error:
        raise errors.refusal(RuntimeError, str(error)) from None
    except KeyboardInterrupt:
        raise errors.Interrupted([]) from None
    if recorded and os.environ.get("COURSE_RECORD"):
        store(recorded, result)
    return result


def _commands(command: Any, count: int) -> list[str]:
    lines = [command] * count if isinstance(command, str) else list(command)
    if not all(isinstance(line, str) for line in lines):
        raise errors.refusal(TypeError, "command is a string, or a list of one string for each host")
    if len(lines) != count:
        raise errors.refusal(ValueError, f"{len(lines)} command lines for {count} hosts; give one, or one for each")
    return [line.replace("{host}", str(host)) for host, line in enumerate(lines)]


def _actions(when: Any, count: int) -> list[tuple[re.Pattern, str, int]]:
    """What shall happen: expressions, actions and hosts."""
    found = []
    for pair in when:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise errors.refusal(TypeError, f"when is a list of (text to wait for, action), and has {pair!r}")
        form = re.fullmatch(rf"({'|'.join(ACTIONS)}) node(\d+)", pair[1])
        if form is None or int(form[2]) >= count:
            allowed = ", ".join(f"'{action} node{count - 1}'" for action in ACTIONS)
            raise errors.refusal(ValueError, f"when asks for {pair[1]!r}; allowed are {allowed} and other hosts")
        found.append((re.compile(pair[0]), form[1], int(form[2])))
    return found


class _Run:
    """Commands that run on hosts, and what they have said. Leaving its ``with`` block ends them all."""

    def __init__(self, plan: Plan, commands: list[str], env: Mapping[str, str] | None, folder: str):
        self.commands, self.environment = commands, _environment(env, folder)
        self.said: list[tuple[str, str]] = []
        self.codes: dict[int, int] = {}
        self._starts = [0] * plan.count
        self._running: dict[int, subprocess.Popen] = {}
        self._rest: dict[int, bytes] = {}  # of a line that has not ended
        self._reading = selectors.DefaultSelector()
        self.hosts = Hosts(plan, folder)

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            for process in self._running.values():
                process.kill()
            deadline = time.monotonic() + _ENDED
            while self._running and time.monotonic() < deadline:
                self._read(deadline, quiet=True)
        finally:
            self._reading.close()
            self.hosts.close()

    def start(self, host: int) -> None:
        if host in self._running:
            raise errors.refusal(RuntimeError, f"node{host} cannot be started, because its command still runs")
        program = [sys.executable, "-I", "-S", namespaces.__file__, "shell"]
        numbers = [str(number) for number in (os.getpid(), self.hosts.pids[host], self._starts[host])]
        self._running[host] = process = subprocess.Popen(
            [*program, *numbers, self.commands[host]], env=self.environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        self._starts[host] += 1
        self._rest[host] = b""
        self._reading.register(process.stdout, selectors.EVENT_READ, host)

    def until_all_have_ended(self, actions: list[tuple[re.Pattern, str, int]], limit: float) -> None:
        deadline, seen = time.monotonic() + limit, 0
        late = _late(actions)
        for host in range(len(self.commands)):
            if host not in late:
                self.start(host)
        while True:
            while actions and seen < len(self.said):
                seen += 1
                if actions[0][0].search(label(self.said[seen - 1])):
                    (_, action, host), *actions = actions
                    self._do(action, host)
            if not self._running:
                break
            if time.monotonic() >= deadline:
                raise self._failure(f"no end within {limit:g} seconds")
            self._read(deadline)
        if actions:
            raise self._failure(f"no line had {actions[0][0].pattern!r}, for which {actions[0][1]} waited")

    def _do(self, action: str, host: int) -> None:
        if action == "start":
            self.start(host)
        elif action in ("plug", "unplug"):
            self.hosts.plug(host, action == "plug")
        elif host in self._running:
            self._running[host].send_signal(signal.SIGKILL if action == "kill" else signal.SIGTERM)
        self.said.append(("", f"node{host} {ACTIONS[action]}"))

    def _read(self, deadline: float, quiet: bool = False) -> None:
        """Read what has come, and wait for it if nothing has."""
        for key, _ in self._reading.select(max(0.0, deadline - time.monotonic())):
            host, piece = key.data, os.read(key.fd, 1 << 16)
            *lines, self._rest[host] = (self._rest[host] + piece).split(b"\n")
            if not piece and self._rest[host]:
                lines.append(self._rest[host])
            self.said += [(f"node{host}", clean(line.decode(errors="replace"))) for line in lines]
            if not piece:
                self._end(host, quiet)

    def _end(self, host: int, quiet: bool) -> None:
        process = self._running.pop(host)
        self._reading.unregister(process.stdout)
        process.stdout.close()
        code = process.wait()
        self.codes[host] = code if code >= 0 else 128 - code
        if not quiet:
            self.said.append(("", f"node{host} ended with exit code {self.codes[host]}"))

    def _failure(self, reason: str) -> Exception:
        parts = [f"{reason}. The last lines of each host:"]
        for host in range(len(self.commands)):
            own = [line for line in map(label, self.said) if re.match(rf"(-- )?node{host}\b", line)]
            parts.append("\n".join(own[-_LAST:]) or f"node{host} | (it has printed nothing)")
        return errors.refusal(RuntimeError, "\n\n".join(parts))


def _late(actions: list[tuple[re.Pattern, str, int]]) -> set[int]:
    """Hosts that are started before anything has ended them."""
    first = {}
    for _, action, host in actions:
        if action in ("kill", "terminate", "start"):
            first.setdefault(host, action)
    return {host for host, action in first.items() if action == "start"}


def _environment(more: Mapping[str, str] | None, folder: str) -> dict[str, str]:
    """The variables of a command: those of this process, without its own place among ranks."""
    programs = os.path.join(folder, "bin")
    os.mkdir(programs)
    for name, module in (("python", ""), ("python3", ""), ("torchrun", " -m torch.distributed.run")):
        path = os.path.join(programs, name)
        with open(path, "w") as file:
            file.write(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{module} "$@"\n')
        os.chmod(path, 0o755)
    inherited = {name: value for name, value in os.environ.items() if not tells_place(name)}
    return {
        **inherited, "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]), "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": INTERFACE, **(more or {}),
    }
