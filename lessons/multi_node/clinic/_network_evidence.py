"""Evidence of the network clinic: what each host says when it is asked, while the patient's program runs (private)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from lessons.debugging_hangs.clinic._cases import Case, Evidence, Finding, Symptom

from ._network_programs import import_first
from ._network_runs import Work, called, folders, launched, set_variables

_OTHER_PORT = 41234  # as good as any that gloo could choose


def _by_host(texts: list[str]) -> str:
    return "\n".join(f"{f'node{host}':<6} {line}" for host, text in enumerate(texts) for line in text.splitlines())


def _says(*command: str) -> str:
    """What a program of the system prints."""
    path = shutil.which(command[0]) or shutil.which(command[0], path="/usr/sbin:/sbin:/usr/bin:/bin") or command[0]
    done = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=10)
    lines = (done.stdout + done.stderr).splitlines()
    return "\n".join(" ".join(re.sub(r"@if\d+", "", line).split()) for line in lines)


def _on_hosts(look: Callable[..., tuple[str, Any]], facts: Callable[[list[Any]], dict[str, str]]) -> Callable:
    """The look at a case: ``look`` gives a text and a value on each host, and ``facts`` says what the values mean."""
    def look_at(case: Case, symptom: Callable[[], Symptom]) -> Finding:
        with folders() as base:
            found = launched(look, base, Work(case.settings, case.conditions), case.program)
        return Finding(_by_host([text for text, _ in found]), facts([value for _, value in found]))

    return look_at


# ------------------------------------------------------------------------------------------ what a host knows of itself


def _addresses(base: str, settings: dict, program: Callable) -> tuple[str, str]:
    set_variables(settings)
    named, text = os.environ.get("GLOO_SOCKET_IFNAME"), _says("ip", "-br", "-4", "address")
    there = [line.split()[0] for line in text.splitlines()]
    value = "not set" if named is None else "there" if named in there else "not there"
    return f"{text}\nGLOO_SOCKET_IFNAME is {named or 'not set'}", value


def _names(base: str, settings: dict, program: Callable) -> tuple[str, bool]:
    lines = []
    for name in dict.fromkeys([socket.gethostname(), "node0", "node1"]):
        lines.append(f"getent ahostsv4 {name}: {(_says('getent', 'ahostsv4', name).splitlines() or ['nothing'])[0]}")
    return "\n".join(lines), ": 127." in lines[0]


def _link(base: str, settings: dict, program: Callable) -> tuple[str, bool]:
    text = _says("ip", "-br", "link", "show", "eth0")
    return text, text.split()[1] == "UP"


# ----------------------------------------------------------------------------------------------- while the program runs


def _listening() -> list[int]:
    """TCP ports on which something on this host listens."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if os.path.exists(table):
            with open(table) as rows:
                cells = [row.split() for row in list(rows)[1:]]
            found |= {int(cell[1].rpartition(":")[2], 16) for cell in cells if cell[3] == "0A"}
    return sorted(found)


def _connect(host: str, port: int) -> str:
    """What a connection to a port says."""
    try:
        with socket.create_connection((host, port), 1.0):
            return "connected"
    except TimeoutError:
        return "timed out"
    except socket.gaierror:
        return "unknown name"
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _endpoint() -> tuple[str, int]:
    """Where the ranks are told to meet."""
    host, _, port = os.environ.get("RDZV_ENDPOINT", "").rpartition(":")
    return (host, int(port)) if host else (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _start(program: Callable[[], Any]) -> int:
    """Run the program in a process of its own, which keeps its sockets when it has failed."""
    process = os.fork()
    if process == 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        try:
            program()
        except Exception as error:  # noqa: F841  whose frames hold the store
            signal.pause()
        os._exit(0)
    return process


def _ports(base: str, settings: dict, program: Callable[[], Any]) -> tuple[str, tuple[bool, str]]:
    os.chdir(f"{base}/node{os.environ['GROUP_RANK']}")
    set_variables(settings)
    host, port = _endpoint()
    import_first(program)
    called(base, "begun", 20.0)
    process = _start(program)
    try:
        end = time.monotonic() + (2.0 if os.environ["RANK"] == "0" else 0.0)
        while port not in _listening() and time.monotonic() < end:
            time.sleep(0.01)
        called(base, "there", 20.0)
        listens, said = port in _listening(), _connect(host, port)
        called(base, "tried", 20.0)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    who = "a process listens" if listens else "no process listens"
    return f"{who} on port {port}\nconnect to {host}:{port}: {said}", (listens, said)


def _of_ports(found: list[tuple[bool, str]]) -> dict[str, str]:
    hosts = [f"node{host}" for host, (listens, _) in enumerate(found) if listens]
    return {"listens": " and ".join(hosts) or "nobody", "store": found[1][1]}


def _other_port(base: str, settings: dict, program: Callable) -> tuple[str, str]:
    other = f"10.0.0.{2 - int(os.environ['RANK'])}"
    with socket.create_server(("0.0.0.0", _OTHER_PORT)):
        called(base, "there", 20.0)
        said = _connect(other, _OTHER_PORT)
        called(base, "tried", 20.0)
    return f"a test process listens on port {_OTHER_PORT}\nconnect to {other}:{_OTHER_PORT}: {said}", said


# --------------------------------------------------------------------------------------------------- what a run leaves


def _look_at_files(case: Case, symptom: Callable[[], Symptom]) -> Finding:
    files = symptom().files
    own = [[line for line in text.splitlines() if line.endswith(".distcp")] for text in files]
    value = "none" if not any(own) else "one folder" if own[0] == own[1] else "two folders"
    return Finding(_by_host(list(files)), {"checkpoint": value})


def _look_at_log(case: Case, symptom: Callable[[], Symptom]) -> Finding:
    return Finding(_by_host(list(symptom().log)))


EVIDENCE = {
    "addresses": Evidence(
        "interfaces and addresses of each host, and the interface that gloo is told to use", 1,
        _on_hosts(_addresses, lambda found: {"interface": found[1]}),
        {"interface": "the interface that GLOO_SOCKET_IFNAME names"},
    ),
    "names": Evidence(
        "for which address each host takes its own name and those of the others", 1,
        _on_hosts(_names, lambda loops: {"own name": "the loopback" if all(loops) else "its own address"}),
        {"own name": "what a host takes its own name for"},
    ),
    "link": Evidence(
        "the state of the interface eth0 on each host", 1,
        _on_hosts(_link, lambda up: {"link": "up" if all(up) else "down"}), {"link": "the interfaces"},
    ),
    "files": Evidence(
        "the files in each host's working folder after a run", 1,
        _look_at_files, {"checkpoint": "the files of a checkpoint"},
    ),
    "ports": Evidence(
        "who listens on the port where the ranks meet, and what a connection to it says", 2,
        _on_hosts(_ports, _of_ports),
        {"listens": "who listens on the port where the ranks meet", "store": "a connection from node1 to that port"},
    ),
    "other port": Evidence(
        "what a connection to another port of the other host says, where a test process listens", 2,
        _on_hosts(_other_port, lambda found: {"other port": found[1]}),
        {"other port": "a connection from node1 to another port of node0"},
    ),
    "log": Evidence("what each rank has written to standard error, and where a silent one stands", 2, _look_at_log),
}
