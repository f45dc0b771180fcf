"""Hosts as Linux namespaces: the process that makes and holds them, and how a rank enters one (private).

As a program, which needs the standard library only, this makes a network of its own with a bridge, and hosts on it.
Each host is a process with network, host name and mounts of its own. All of it is anonymous: it lasts as long as these
processes and the ranks in them, and they end with the notebook, however that ends. With ``shell`` as its first argument
the program runs one command line on a host instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)

NEW_MOUNTS, NEW_NAME, NEW_USER, NEW_NETWORK = 0x0002_0000, 0x0400_0000, 0x1000_0000, 0x4000_0000
_NEW_PROCESSES = 0x2000_0000
_OF_A_HOST = NEW_MOUNTS | NEW_NAME | NEW_NETWORK
_BIND, _RECURSIVE, _SLAVE = 0x1000, 0x4000, 0x8_0000  # flags of mount
_PARENT_DEATH_SIGNAL, _AMBIENT, _RAISE = 1, 47, 2  # for prctl
_NET_ADMIN, _SYS_ADMIN = 12, 21
_ALL_CAPABILITIES = (1 << 40) - 1
_STEP = 5.0  # seconds that one command, or the start of one host, may take


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _unshare(flags: int, what: str) -> None:
    _check(_libc.unshare(flags), what)


def _set_capabilities(effective: int, permitted: int, inheritable: int) -> None:
    """Set this process's capabilities, as bits (capabilities(7))."""
    words = [bits >> shift & 0xFFFF_FFFF for shift in (0, 32) for bits in (effective, permitted, inheritable)]
    header, data = struct.pack("Ii", 0x2008_0522, 0), struct.pack("6I", *words)
    _check(_libc.capset(header, data), "capset")


def _own_capabilities() -> int:
    """Which capabilities this process may use."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 16) for line in status if line.startswith("CapPrm"))


def enter(host: int) -> None:
    """Move this process, which must not have started a thread, into the host that the process `host` holds."""
    if _join(host):
        _set_capabilities(0, 0, 0)


def _join(host: int) -> bool:
    """As `enter`; whether it has given this process all rights over the host's network, which it then still has."""
    process = os.pidfd_open(host)
    try:
        own = os.path.samefile("/proc/self/ns/user", f"/proc/{host}/ns/user")
        _check(_libc.setns(process, _OF_A_HOST | (0 if own else NEW_USER)), "setns")
        return not own
    finally:
        os.close(process)


# ---------------------------------------------------------------------------------------------- the process that holds


def _leave_network() -> bool:
    """Begin a network, if this process has the right to it."""
    return _libc.unshare(NEW_NETWORK | NEW_MOUNTS) == 0


def _become_owner() -> None:
    """Begin a network in a user namespace, whose owner has the right to it."""
    user, group = os.geteuid(), os.getegid()
    _unshare(NEW_USER, "a user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError as problem:
            raise OSError(problem.errno, problem.strerror, "a user namespace") from None
    _unshare(NEW_NETWORK | NEW_MOUNTS, "a network namespace")
    _set_capabilities(*[_own_capabilities()] * 3)
    for capability in (_NET_ADMIN, _SYS_ADMIN):  # which the programs that this starts keep
        _check(_libc.prctl(_AMBIENT, _RAISE, capability, 0, 0), "prctl")


def _hold(host: dict, report: int) -> None:
    """Be a host: namespaces of its own, in which this process does nothing."""
    error = ""
    try:
        _check(_libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "prctl")
        _unshare(_OF_A_HOST, "a network namespace")
        socket.sethostname(host["name"])
        _check(_libc.mount(b"none", b"/", None, _RECURSIVE | _SLAVE, None), "mount")
        for place, file in host["files"].items():
            place = os.path.realpath(place)
            if os.path.exists(place):
                _check(_libc.mount(file.encode(), place.encode(), None, _BIND, None), f"mount of {place}")
    except OSError as problem:
        error = json.dumps(_in_words(problem))
    os.write(report, error.encode() or b"\n")
    os.close(report)
    while not error:
        signal.pause()
    os._exit(1)


def _in_words(problem: OSError) -> dict:
    return {"what": problem.filename or "", "errno": problem.errno, "error": problem.strerror or str(problem)}


def _start_host(host: dict) -> int:
    """Start the process of a host and return its id once its namespaces are there."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(read)
        _hold(host, write)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read() if select.select([answer], [], [], _STEP)[0] else ""
    if text != "\n":
        problem = json.loads(text or '{"what": "a host", "errno": 0, "error": "no answer"}')
        raise OSError(problem["errno"], problem["error"], problem["what"])
    return pid


def _run(program: str, commands: list[str], host: int | None = None) -> None:
    """Let ``ip`` or ``tc`` run commands, inside a host if one is given."""
    if not commands:
        return
    inside = None
    if host is not None:
        def inside() -> None:
            _check(_libc.setns(os.pidfd_open(host), NEW_NETWORK), "setns")
    done = subprocess.run(
        [program, "-batch", "-"], input="\n".join(commands) + "\n", capture_output=True, text=True, timeout=_STEP,
        preexec_fn=inside,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "Command failed" not in line]
        number = next((line for line in done.stderr.splitlines() if "Command failed" in line), ":1").rpartition(":")[2]
        command = commands[int(number) - 1] if number.isdigit() and 0 < int(number) <= len(commands) else commands[0]
        name = os.path.basename(program)
        raise OSError(0, said[0] if said else "no reason given", f"`{name} {command}`")


def _make(task: dict) -> list[int]:
    """Make the network; the ids of the processes that are its hosts."""
    if not _leave_network():
        _become_owner()
    pids = [_start_host(host) for host in task["hosts"]]
    _run(task["ip"], [command.format(*pids) for command in task["links"]])
    _run(task["tc"], task["rates"])
    for host, pid in zip(task["hosts"], pids, strict=True):
        _run(task["ip"], host["network"], pid)
        _run(task["tc"], host["rates"], pid)
    return pids


def main() -> None:
    """Make what the task on the first line of standard input says, answer in one line, then wait for the end.

    The end is that of the input or of the process that owns this one: a fork of that may keep the input open. Each
    further line is a command for ``ip`` about the switch, such as that a cable is pulled.
    """
    task = json.loads(sys.stdin.readline())
    ends = select.poll()
    try:
        ends.register(os.pidfd_open(task["owner"]), select.POLLIN)
        answer: dict = {"pids": _make(task)}
    except OSError as problem:
        answer = _in_words(problem)
    except subprocess.SubprocessError as problem:
        answer = {"what": "a command", "errno": 0, "error": str(problem)}
    print(json.dumps(answer), flush=True)
    ends.register(0, select.POLLIN | select.POLLHUP)
    while [number for number, _ in ends.poll()] == [0] and (command := sys.stdin.readline()):
        try:
            _run(task["ip"], [command.strip()])
            print("{}", flush=True)
        except (OSError, subprocess.SubprocessError) as problem:
            print(json.dumps({"what": "a cable", "errno": 0, "error": str(problem)}), flush=True)


# ----------------------------------------------------------------------------------------- a command line on a host


def shell(owner: int, host: int, start: int, command: str) -> None:
    """Run a command line on a host until it ends, or this process does, or the one that owns it.

    Its processes have a namespace of their own, so that all of them end together. SIGTERM is passed on to what the
    shell runs. The exit code is the one that it shows: 128 and the number of a signal that has ended the command.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is somebody to pass it on to
    folder = os.getcwd()
    gained = _join(host)
    os.chdir(folder)  # entering has led to the root
    _unshare(_NEW_PROCESSES | NEW_MOUNTS, "a process namespace")
    first = os.fork()
    if first == 0:
        _first_process(gained, start, command)
    _pass_on(os.kill, first)
    ends = select.poll()
    ends.register(os.pidfd_open(first), select.POLLIN)
    with contextlib.suppress(OSError):  # then its end is that of this process, too
        ends.register(os.pidfd_open(owner), select.POLLIN)
    ends.poll()
    os.kill(first, signal.SIGKILL)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 255)


def _pass_on(kill: Callable[[int, int], None], process: int) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: kill(process, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _first_process(gained: bool, start: int, command: str) -> None:
    """Be process 1 of a namespace, with which all others end: start the command, and wait for its end."""
    _libc.mount(b"proc", b"/proc", b"proc", 0, None)  # else it shows other processes, and little is lost
    if gained:
        _set_capabilities(0, 0, 0)
    _check(_libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "prctl")
    for _ in range(start):  # a host that starts again gives other numbers; torchrun tells its agents apart by them
        if (passed := os.fork()) == 0:
            os._exit(0)
        os.waitpid(passed, 0)
    begun = os.fork()
    if begun == 0:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.execv("/bin/sh", ["sh", "-c", f"trap : TERM\n{command}"])  # the shell waits for what it runs
    _pass_on(os.killpg, begun)
    while (ended := os.wait())[0] != begun:
        pass
    code = os.waitstatus_to_exitcode(ended[1])
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[1:2] == ["shell"]:
        shell(*map(int, sys.argv[2:5]), sys.argv[5])
    else:
        main()
