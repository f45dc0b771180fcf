"""Real kernels and plain scripts for tests: run a cell, watch its output while it runs, see what is left afterwards."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
MARK = "COURSE_TEST_MARK"  # set for a kernel or script, inherited by all it starts
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def surroundings(temporary: Path | str | None = None, **extra: str) -> dict[str, str]:
    """Environment as a learner has it: nothing of pytest's, an own temporary folder, a mark to find processes by."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COURSE_"))}
    env["PYTHONPATH"] = str(ROOT)
    env["JUPYTER_PLATFORM_DIRS"] = "1"
    env["COURSE_STATUS"] = "0"  # output is compared: no sign of life from slow ranks in it
    env[MARK] = uuid.uuid4().hex
    if temporary is not None:
        env["TMPDIR"] = str(temporary)
    return env | extra


def marked(mark: str) -> list[psutil.Process]:
    """All live processes started, however indirectly, with this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def left_behind(mark: str, folder: Path, seconds: float = 60.0) -> list[str]:
    """What still exists once `seconds` have passed: marked processes, files in `folder`, shared memory of the dead."""
    pids = {p.pid for p in marked(mark)}
    deadline = time.monotonic() + seconds
    while True:
        shared = Path("/dev/shm")
        rest = [f"process {p.pid}" for p in marked(mark)]
        rest += [os.path.join(where, name) for where, folders, files in os.walk(folder) for name in folders + files]
        if shared.is_dir():
            theirs = [p.name for p in shared.iterdir() if pids & set(map(int, re.findall(r"\d+", p.name)))]
            rest += [f"shared memory {name}" for name in theirs]
        if not rest or time.monotonic() > deadline:
            return rest
        time.sleep(0.05)


def sweep(mark: str, folder: Path) -> None:
    """End all that a test left running, and remove its folder."""
    for process in marked(mark):
        try:
            process.kill()
        except psutil.Error:
            pass
    shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Cell:
    """What one cell showed."""

    out: str = ""
    err: str = ""
    result: dict | None = None
    displays: list[dict] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)  # to what it is going to ask; None: the stop button
    asked: list[str] = field(default_factory=list)
    error: str = ""
    error_name: str = ""
    done: bool = False

    @property
    def value(self) -> str:
        return (self.result or {}).get("text/plain", "")


class Kernel:
    """A kernel of this environment, as JupyterLab starts it, with an own temporary folder."""

    def __init__(self, **env: str) -> None:
        from jupyter_client import KernelManager  # here, for ranks import this module too

        from tools.author.notebooks import local_sockets

        self.folder = Path(tempfile.mkdtemp(prefix="kernel-test-"))
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.env = surroundings(self.temporary, **env)
        self.mark = self.env[MARK]
        # the connection file belongs to Jupyter, not to the course
        self.manager = KernelManager(kernel_name="python3", config=local_sockets(self.folder))
        try:
            self.manager.start_kernel(env=self.env, cwd=str(self.folder))
            self._connect()
        except BaseException:
            sweep(self.mark, self.folder)
            raise

    def _connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=180)

    def start(self, code: str, *answers: str | None) -> Cell:
        """Send a cell without waiting for it."""
        cell = Cell(answers=[*answers])
        cell.id = self.client.execute(code, allow_stdin=bool(answers))
        return cell

    def talk(self, code: str, *answers: str | None) -> Cell:
        """Run a cell with somebody at the page, who answers what it asks; None presses the stop button."""
        return self.pump(self.start(code, *answers))

    def _answer(self, cell: Cell) -> None:
        """Answer what has been asked."""
        try:
            cell.asked.append(self.client.get_stdin_msg(timeout=0)["content"]["prompt"])
        except queue.Empty:
            return
        if (answer := cell.answers.pop(0)) is None:
            self.manager.interrupt_kernel()
        else:
            self.client.input(answer)

    def pump(self, cell: Cell, until=lambda cell: cell.done, timeout: float = 120.0) -> Cell:
        """Take in messages until `until(cell)`; fail past `timeout`."""
        deadline = time.monotonic() + timeout
        while not until(cell):
            try:
                message = self.client.get_iopub_msg(timeout=0.05 if cell.answers else 0.2)
            except queue.Empty:
                message = None
            if cell.answers:
                self._answer(cell)
            if message and message["parent_header"].get("msg_id") == cell.id:
                self._take(cell, message["msg_type"], message["content"])
            if cell.done and not until(cell):
                raise AssertionError(f"the cell ended before what was awaited:\n{cell}")
            if time.monotonic() > deadline:
                raise AssertionError(f"hang: nothing awaited came within {timeout:.0f} s\n{cell}")
        return cell

    @staticmethod
    def _take(cell: Cell, kind: str, content: dict) -> None:
        if kind == "stream":
            if content["name"] == "stdout":
                cell.out += content["text"]
            else:
                cell.err += content["text"]
        elif kind == "execute_result":
            cell.result = content["data"]
        elif kind in ("display_data", "update_display_data"):
            cell.displays.append(content["data"])
        elif kind == "error":
            cell.error = ANSI.sub("", "\n".join(content["traceback"]))
            cell.error_name = content["ename"]
        elif kind == "status" and content["execution_state"] == "idle":
            cell.done = True

    def run(self, code: str) -> Cell:
        """Run a cell to its end, whatever that is."""
        return self.pump(self.start(code))

    def good(self, code: str) -> Cell:
        """Run a cell that must not raise."""
        cell = self.run(code)
        assert not cell.error, f"{code}\n{cell.out}{cell.err}\n{cell.error}"
        return cell

    def start_until(self, code: str, text: str) -> Cell:
        """Send a cell and wait until it has shown `text` (while it still runs)."""
        return self.pump(self.start(code), lambda cell: text in cell.out + cell.err)

    def interrupt(self, cell: Cell) -> Cell:
        """Interrupt the running cell as the stop button does, and wait until it has ended."""
        self.manager.interrupt_kernel()
        return self.pump(cell)

    def restart(self) -> None:
        """Restart as the restart button does."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=True)
        self._connect()

    def kill(self) -> None:
        """End the kernel process itself with SIGKILL; what it started is left to itself."""
        os.kill(self.manager.provisioner.pid, signal.SIGKILL)

    def close(self) -> None:
        try:
            self.client.stop_channels()
            if self.manager.has_kernel:
                self.manager.shutdown_kernel(now=True)
            self.manager.cleanup_resources()
        finally:
            sweep(self.mark, self.folder)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Script:
    """A plain Python script in its own process; read its output line by line, with a limit on every wait."""

    def __init__(self, text: str, *, prefix: list[str] | None = None, **env: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="script-test-"))
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        path = self.folder / "script.py"
        path.write_text(text)
        self.env = surroundings(self.temporary, **env)
        self.mark = self.env[MARK]
        self.text, self.position = "", 0
        self.process = subprocess.Popen(
            [*(prefix or []), sys.executable, str(path)],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.set_blocking(self.process.stdout.fileno(), False)

    def read(self, until: str | None, timeout: float = 120.0) -> str:
        """Read on until the text `until` (or, for None, the script's end) and return what came since the last call."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None
            self.text += (self.process.stdout.read() or b"").decode(errors="replace")
            found = self.text.find(until, self.position) if until else -1
            if found >= 0 or (ended and until is None):
                begin, self.position = self.position, found + len(until) if until else len(self.text)
                return self.text[begin : self.position]
            if ended or time.monotonic() > deadline:
                why = "the script ended" if ended else f"hang: {timeout:.0f} s passed"
                raise AssertionError(f"{why} without {until!r}:\n{self.text}")
            time.sleep(0.01)

    def finish(self, timeout: float = 120.0) -> str:
        """Wait for the end, which must be a clean one; return all it printed."""
        self.read(None, timeout)
        assert self.process.returncode == 0, self.text
        return self.text

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exc: object) -> None:
        sweep(self.mark, self.folder)
        self.process.wait()
        self.process.stdout.close()


def namespace(kinds: str, *trial: str) -> list[str] | None:
    """Prefix to run a command in namespaces of its own (letters of `unshare`); None if `trial` fails in them."""
    if shutil.which("unshare"):
        for prefix in (["unshare", f"-{kinds}"], ["unshare", f"-r{kinds}"]):
            if subprocess.run([*prefix, *trial], capture_output=True, timeout=20).returncode == 0:
                return prefix
    return None
