"""A Slurm cluster on this machine: the real daemons, one for each emulated host, to run batch jobs as on a cluster.

Debian's Slurm (packages ``slurm-wlm`` and ``munge``) runs in namespaces of its own, made without root where the system
allows it. Each host has a network namespace with an address and a name; a bridge joins them. All processes belong to
one process-id namespace that ends with the object or with the process that made it, whatever happens to that, so
nothing is left behind. Files of the machine are seen by all hosts, like a shared disk; ``/run`` is the cluster's own.
"""

import contextlib
import functools
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

#: Programs that a cluster is made of, and the Debian and Ubuntu packages that bring them.
PROGRAMS = {
    "ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "munged": "munge",
    "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm",
}

#: The daemons' configuration, in which ``{user}`` and ``{last}`` are filled in, and what starts them.
CONFIGURATION, _START = (Path(__file__).with_name(name).read_text() for name in ("slurm.conf", "slurm.sh"))


def missing() -> list[str]:
    """The packages that a cluster needs and this machine lacks, e.g. ``["munge", "slurm-wlm"]``."""
    return sorted({package for program, package in PROGRAMS.items() if not shutil.which(program, path=_path())})


@functools.cache
def available() -> tuple[bool, str]:
    """Whether a cluster can run on this machine; and the version of Slurm, or a sentence that says why it cannot."""
    if lacking := missing():
        return False, (f"Slurm is not installed here (on Debian and Ubuntu the packages {' and '.join(lacking)})."
                       if sys.platform == "linux" else "Slurm runs on Linux only.")

    def output_of(*command: str) -> str | None:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              env={**os.environ, "PATH": _path()})
        return None if done.returncode else done.stdout.strip()

    if output_of(*_namespaces(), "sh", "-c", "mount -t tmpfs tmpfs /run && ip link add br0 type bridge") is None:
        return False, "Slurm is installed, but this system forbids the namespaces that stand for its hosts."
    return True, f"Slurm {(output_of('slurmctld', '-V') or '?').split()[-1]}"


def _namespaces() -> list[str]:
    """The command that enters new namespaces, in which the user may do what root does."""
    root = os.getuid() == 0
    return ["unshare", *([] if root else ["--map-current-user", "--keep-caps"]), "--net", "--mount", "--pid", "--uts",
            "--fork", "--kill-child", "--mount-proc"]


class SlurmCluster:
    """Hosts ``node0``, ``node1``, … with a Slurm daemon each, and the host ``login`` on which commands are typed.

    Use it in a ``with`` statement, or call :meth:`close`. The hosts share the cores of this machine. Its first process
    has the id ``process``. RuntimeError names the way out where packages are missing or namespaces are forbidden.
    """

    def __init__(self, hosts: int = 2):
        if lacking := missing():
            raise RuntimeError(f"Slurm cannot run here without the packages {', '.join(lacking)}: "
                               f"sudo apt-get install --no-install-recommends {' '.join(lacking)}")
        root = os.getuid() == 0
        configuration = CONFIGURATION.format(user=pwd.getpwuid(os.getuid()).pw_name, last=hosts - 1)
        self._environment = {**os.environ, "PATH": _path(), "SLURM_CONF": "/run/slurm/slurm.conf"}
        self._log = tempfile.TemporaryFile("w+")
        self._holder = subprocess.Popen(
            [*_namespaces(), "sh", "-c", _START],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**self._environment, "LAST": str(hosts - 1), "CONFIGURATION": configuration},
        )
        first = self._holder.stdout.readline()
        if first != "ready\n":
            said = first + self._holder.stdout.read()
            self._log.seek(0)
            said += self._log.read()
            self.close()
            raise RuntimeError("Slurm did not start in namespaces on this machine. In a container or on a hardened "
                               f"system, root or user namespaces may be missing. It said:\n{said.strip()}")
        with open(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children") as children:
            self.process = int(children.read())
        self._enter = ["--target", str(self.process), *([] if root else ["--user", "--preserve-credentials"]),
                       "--net", "--mount", "--pid", "--uts"]

    def run(self, command: str, timeout: float = 60, env: Mapping[str, str] | None = None) -> str:
        """Run a command line on the host ``login``, as one types it there, and return what it prints.

        Folder and environment are the caller's; ``env`` adds to it. RuntimeError: it fails, or takes too long.
        """
        try:
            done = subprocess.run(
                ["nsenter", *self._enter, "--wd=.", "sh", "-c", command],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
                env={**self._environment, **(env or {})},
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{command}: no end within {timeout:g} s. {error.output or ''}") from None
        if done.returncode:
            raise RuntimeError(f"{command}: exit status {done.returncode}\n{done.stdout.strip()}")
        return done.stdout

    def submit(self, *arguments: str | os.PathLike, env: Mapping[str, str] | None = None) -> int:
        """Call ``sbatch`` with options, the script and its arguments; return the job's number."""
        return int(self.run(shlex.join(["sbatch", "--parsable", *map(os.fspath, arguments)]), env=env))

    def job(self, number: int) -> dict[str, str]:
        """What ``scontrol show job`` tells of a job: ``JobState``, ``Reason``, ``Restarts``, ``NodeList``, …"""
        shown = self.run(f"scontrol --oneliner show job {number}")
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def wait(self, number: int, timeout: float = 60) -> dict[str, str]:
        """Wait until a job has ended and return what :meth:`job` says then.

        One that was requeued starts at once, which Slurm would have wait for two minutes; but its first run has to be
        over for two seconds, because a host refuses a job that it ended in the same second.
        """
        end, running = time.monotonic() + timeout, rf"^[^Z]\S* +slurmstepd: \[{number}\."
        while (said := self.job(number))["JobState"] in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}:
            if time.monotonic() > end:
                raise RuntimeError(f"Job {number} is {said['JobState']} ({said['Reason']}) after {timeout:g} s.")
            if said["Reason"] == "BeginTime" and not re.search(running, self.run("ps -eo stat=,args="), re.MULTILINE):
                time.sleep(2)
                with contextlib.suppress(RuntimeError):  # it may have started since
                    self.run(f"scontrol update jobid={number} StartTime=now")
            time.sleep(0.2)
        return said

    def close(self) -> None:
        """End all that runs on the cluster. A second call does nothing."""
        if self._holder.stdin and not self._holder.stdin.closed:
            self._holder.stdin.close()
        try:
            self._holder.wait(5)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()
        self._holder.stdout.close()
        self._log.close()

    def __enter__(self) -> "SlurmCluster":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _path() -> str:
    """Where programs are looked for: daemons lie in folders that ordinary users often do not search."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])

