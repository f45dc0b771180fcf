"""Where a hand-in runs: it may write into one folder of its own, and no process of it stays."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tools import ROOT, ToolError

KINDS = ("bubblewrap", "user", "none")
TOKEN = "COURSE_HAND_IN"
SEEN = [str(ROOT / name) for name in ("course_utils", "lessons", "native", "scripts", "tools")]
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/sys/devices/system/cpu",
           "/sys/devices/system/node")
_SETTINGS = ("alternatives", "fonts", "group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
             "localtime", "nsswitch.conf", "passwd", "ssl")
_KEPT = ("LANG", "LC_", "TZ", "COURSE_", "OMP_", "MKL_", "LD_LIBRARY_PATH")
_AS_RANKS_START = "import course_utils, subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
_users = itertools.count(64000)  # numbers that no distribution gives to people or services

HELP = """\
Hand-ins are programs, and this system gives no way to fence them in ({why}).
  Linux:      sudo apt install bubblewrap   (or dnf, pacman; then try again)
  container:  run the same command in one, as root: each hand-in then runs as a user of its own (docs/teaching.md)
  otherwise:  --no-sandbox runs them with all your rights; do that only in an account made for it"""


def choose(kind: str | None = None) -> str:
    """The fence to use, one of `KINDS`: bubblewrap where the system allows it, else for root another user.

    Raises
    ------
    ToolError
        Neither is possible, or not the one asked for; the message says what to install.
    """
    complaints = []
    for each in (kind,) if kind else KINDS[:2]:
        if not (complaint := _complaint(each)):
            return each
        complaints.append(complaint)
    raise ToolError(HELP.format(why="; ".join(complaints)))


class Place:
    """A folder for one run of a hand-in, behind a fence of some kind."""

    def __init__(self, kind: str, home: Path) -> None:
        self._token, user = secrets.token_hex(8), next(_users)
        self._user = user if kind == "user" else None
        self.command = [*_fence(kind, home, user), sys.executable, "-P", "-m", "tools.grade.inside"]
        kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
        path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
        self.environment = kept | {
            TOKEN: self._token, "HOME": str(home), "PATH": path, "IPYTHONDIR": f"{home}/.ipython", "MPLBACKEND": "agg",
            "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1",
        }
        if kind != "bubblewrap":  # that has a /tmp of its own
            self.environment["TMPDIR"] = str(home)
        if kind == "user":
            for each in (home, *home.iterdir()):
                os.chown(each, user, user)

    def end(self) -> None:
        """Kill every process of this run."""
        until = time.monotonic() + 10
        while (left := [*filter(self._is_own, psutil.process_iter())]) and time.monotonic() < until:
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)

    def _is_own(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error, OSError):
            own = process.uids().real == self._user or process.environ().get(TOKEN) == self._token
            return own and process.status() != psutil.STATUS_ZOMBIE
        return False


def _fence(kind: str, home: Path | None, user: int) -> list[str]:
    """The command in front of Python's."""
    if kind == "none":
        return []
    if kind == "user":
        return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs",
                "--pdeathsig=KILL", "--"]
    fence = ["bwrap", "--unshare-all", "--uid", "1000", "--gid", "1000", "--die-with-parent", "--new-session",
             "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    python = {sys.base_prefix, sys.prefix, str(Path(sys.executable).resolve().parent.parent)}
    seen = [*(f"/etc/{name}" for name in _SETTINGS), *SEEN, *sorted(python)]
    for place in _SYSTEM:
        if os.path.islink(place):  # /bin is usr/bin
            fence += ["--symlink", os.readlink(place), place]
        else:
            seen.insert(0, place)
    for place in seen:
        fence += ["--ro-bind-try", place, place]
    return [*fence, *(["--bind", str(home), str(home), "--chdir", str(home)] if home else []), "--"]


def _complaint(kind: str) -> str:
    """Why this kind of fence is not possible here, tried by what ranks do; empty if it is."""
    if kind == "none":
        return ""
    program = {"bubblewrap": "bwrap", "user": "setpriv"}[kind]
    if kind == "user" and os.geteuid() != 0:
        return "only root can run them as another user"
    if not shutil.which(program):
        return f"no {program}"
    told = subprocess.run([*_fence(kind, None, next(_users)), sys.executable, "-P", "-c", _AS_RANKS_START],
                          capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
                          cwd="/", check=False)
    if not told.returncode:
        return ""
    why = (told.stderr.strip().splitlines() or [f"exit code {told.returncode}"])[-1]
    python = Path(sys.executable).resolve()
    closed = [str(place) for place in python.parents if not place.stat().st_mode & stat.S_IXOTH]
    if kind == "user" and closed:
        why += f"; another user cannot run {python}: `chmod o+x {closed[-1]}`, or make .venv with a Python in /usr"
    return f"{program}: {why}"
