"""Where a hand-in runs: it may write into one folder of its own, and no process of it stays."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil

__all__ = ["KINDS", "Sandbox", "SandboxMissing"]

KINDS = ("bubblewrap", "user", "none")
PACKAGE = Path(__file__).resolve().parent.parent
TOKEN = "COURSE_HAND_IN"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/sys/devices/system/cpu",
           "/sys/devices/system/node")
_SETTINGS = ("alternatives", "fonts", "group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
             "localtime", "nsswitch.conf", "passwd", "ssl")
_KEPT = ("LANG", "LC_", "TZ", "COURSE_", "OMP_", "MKL_", "LD_LIBRARY_PATH")
_FIRST_USER, _USERS = 64000, 1000  # numbers that no distribution gives to people or services

_AS_RANKS_START = "import course_utils, subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"

HELP = """\
Hand-ins are programs, and this system gives no way to fence them in{why}.
  Linux:      sudo apt install bubblewrap   (or dnf, pacman; then try again)
  container:  run the same command in one, as root: each hand-in then runs as a user of its own (docs/teaching.md)
  otherwise:  --no-sandbox runs them with all your rights; do that only in an account made for it"""


class SandboxMissing(RuntimeError):
    """There is no way to fence hand-ins in; the message says what to install."""


class Sandbox:
    """A way to run one hand-in at a time, of one of the `KINDS`.

    ``bubblewrap``: namespaces of its own for files, processes and network; of the course it sees the package only.
    ``user``: another user, number by number; needs root. ``none``: the rights of whoever grades.

    Parameters
    ----------
    kind : str, optional
        Default: ``bubblewrap`` where the system allows it, else ``user`` for root.

    Raises
    ------
    SandboxMissing
        Neither is possible, or the one asked for is not.
    """

    def __init__(self, kind: str | None = None) -> None:
        complaints = []
        for each in (kind,) if kind else KINDS[:2]:
            if complaint := _complaint(each):
                complaints.append(complaint)
            else:
                self.kind = each
                return
        raise SandboxMissing(HELP.format(why=f" ({'; '.join(complaints)})"))

    def room(self, home: Path) -> Room:
        """A place for one run of a hand-in, in a folder that exists."""
        return Room(self.kind, home)


class Room:
    """One run's folder, its user where it has one, and the mark by which its processes are found again."""

    def __init__(self, kind: str, home: Path) -> None:
        self.kind, self.home = kind, home
        self.token = secrets.token_hex(8)
        self.user = _free_user() if kind == "user" else None
        if self.user is not None:
            for path in (home, *home.rglob("*")):
                os.chown(path, self.user, self.user)

    def command(self, arguments: list[str]) -> list[str]:
        """The command that runs ``python arguments`` in this place."""
        return [*_fence(self.kind, self.home, self.user), sys.executable, "-P", *arguments]

    def environment(self) -> dict[str, str]:
        """Variables for it: nothing of the grader's but language, threads and the course's own settings."""
        kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
        home = str(self.home)
        own = {TOKEN: self.token, "HOME": home, "IPYTHONDIR": f"{home}/.ipython"}
        own |= {"PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])}
        own |= {"PYTHONPATH": str(PACKAGE.parent), "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
        own |= {"JUPYTER_PREFER_ENV_PATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if self.kind != "bubblewrap":  # that has a /tmp of its own
            own |= {"TMPDIR": home}
        return kept | own

    def end(self) -> list[str]:
        """Kill every process of this run; return the commands of those that the hand-in had left behind."""
        left: list[str] = []
        until = time.monotonic() + 10
        while (found := self._processes()) and time.monotonic() < until:
            for process, command in found:
                own = any(word in command for word in ("multiprocessing", "course_utils.grading", "<defunct>"))
                if command and not own and command not in left:
                    left.append(command)
                try:
                    process.kill()
                except psutil.Error:
                    pass
            time.sleep(0.05)  # psutil's own waiting would take a child's exit status from asyncio
        return left

    def _processes(self) -> list[tuple[psutil.Process, str]]:
        """Processes of this run and their commands; none that has ended and only waits to be collected."""
        found = []
        for process in psutil.process_iter():
            try:
                own = self.user is not None and process.uids().real == self.user
                if own or process.environ().get(TOKEN) == self.token:
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append((process, " ".join(process.cmdline())))
            except (psutil.Error, OSError):
                continue
        return found


def _fence(kind: str, home: Path, user: int | None) -> list[str]:
    """The command in front of Python's."""
    if kind == "user":
        return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs",
                "--pdeathsig=KILL", "--"]
    if kind == "none":
        return []
    fence = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--uid", "1000", "--gid", "1000"]
    fence += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    fence += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    seen = [*_SYSTEM, *(f"/etc/{name}" for name in _SETTINGS)]
    for place in _SYSTEM:
        if os.path.islink(place):  # /bin is usr/bin
            fence += ["--symlink", os.readlink(place), place]
            seen.remove(place)
    python = {sys.base_prefix, sys.prefix, str(Path(sys.executable).resolve().parent.parent)}
    seen += sorted(place for place in python if not place.startswith(_SYSTEM)) + [str(PACKAGE)]
    for place in seen:
        fence += ["--ro-bind-try", place, place]
    return [*fence, "--bind", str(home), str(home), "--chdir", str(home), "--"]


def _complaint(kind: str) -> str:
    """Why this kind of sandbox is not possible here; empty if it is."""
    if kind == "none":
        return ""
    program = {"bubblewrap": "bwrap", "user": "setpriv"}[kind]
    if kind == "user" and os.geteuid() != 0:
        return "only root can run them as another user"
    if not shutil.which(program):
        return f"no {program}"
    fence = _fence(kind, Path("/usr"), _FIRST_USER)
    if kind == "bubblewrap":  # the last --bind would make /usr writable
        fence = fence[: fence.index("--chdir") - 3] + ["--"]
    test = [*fence, sys.executable, "-P", "-c", _AS_RANKS_START]
    told = subprocess.run(
        test, capture_output=True, text=True, env={"PYTHONPATH": str(PACKAGE.parent)}, cwd="/", check=False
    )
    if not told.returncode:
        return ""
    why = (told.stderr.strip().splitlines() or [f"exit code {told.returncode}"])[-1]
    python = Path(sys.executable).resolve()
    closed = [str(place) for place in python.parents if not place.stat().st_mode & stat.S_IXOTH]
    if kind == "user" and closed:
        why += f"; another user cannot run {python}: `chmod o+x {closed[-1]}`, or make .venv with a Python in /usr"
    return f"{program}: {why}"


_used: set[int] = set()


def _free_user() -> int:
    """A user number without a name and without a process; each is given once."""
    busy = {entry.pw_uid for entry in pwd.getpwall()} | {
        process.info["uids"].real for process in psutil.process_iter(["uids"]) if process.info["uids"]
    }
    free = (_FIRST_USER + i for i in range(_USERS) if _FIRST_USER + i not in busy | _used)
    number = next(free, None)
    if number is None:
        raise SandboxMissing(f"no free user number from {_FIRST_USER} to {_FIRST_USER + _USERS - 1}")
    _used.add(number)
    return number
