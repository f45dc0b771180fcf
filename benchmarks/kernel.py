"""A real Jupyter kernel in some environment: run cells with a hard limit, and find every process that it started."""

import json
import os
import queue
import re
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

import psutil
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpecManager

MARKER = "COURSE_BENCH_KERNEL"
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass
class Cell:
    """What running one cell gave: whether it ended, after how many seconds, all text shown, time of day of its end."""

    ended: bool
    seconds: float
    text: str
    failed: bool
    at: float = 0.0


class Kernel:
    """One running kernel. `marks` is a folder that its ranks write into."""

    def __init__(self, python: Path, folder: Path):
        spec = folder / "specs" / "bench"
        spec.mkdir(parents=True)
        argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "bench", "language": "python"}))
        self.marks = folder / "marks"
        self.marks.mkdir()
        self.token = uuid.uuid4().hex
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COURSE_", "VIRTUAL_ENV"))}
        env |= {
            MARKER: self.token,
            "COURSE_BENCH_MARKS": str(self.marks),
            "PATH": f"{python.parent}{os.pathsep}{env.get('PATH', '')}",
            "IPYTHONDIR": str(folder / "ipython"),
            "OMP_NUM_THREADS": "1",
        }
        specs = KernelSpecManager(kernel_dirs=[str(folder / "specs")], ensure_native_kernel=False)
        self.manager = KernelManager(kernel_name="bench", kernel_spec_manager=specs)
        self.manager.start_kernel(env=env, cwd=str(folder), stdout=DEVNULL, stderr=DEVNULL)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def start(self, source: str) -> str:
        """Send a cell; returns the id to wait for."""
        return self.client.execute(source, allow_stdin=False)

    def wait(self, request: str, limit: float) -> Cell:
        """Wait at most `limit` seconds for the prompt to come back."""
        begin = time.perf_counter()
        texts, failed = [], False
        while (left := limit - (time.perf_counter() - begin)) > 0:
            try:
                message = self.client.get_iopub_msg(timeout=min(left, 0.5))
            except queue.Empty:
                if not self.manager.is_alive():
                    return Cell(False, time.perf_counter() - begin, "".join(texts) + "\nthe kernel died", True)
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                texts.append(content["text"])
            elif kind in ("execute_result", "display_data"):
                texts.append(content["data"].get("text/plain", "") + "\n")
            elif kind == "error":
                failed = True
                texts.append("\n".join(content["traceback"]) + f"\n{content['ename']}: {content['evalue']}\n")
            elif kind == "status" and content["execution_state"] == "idle":
                text, at = ANSI.sub("", "".join(texts)), message["header"]["date"].timestamp()
                return Cell(True, time.perf_counter() - begin, text, failed, at)
        return Cell(False, limit, ANSI.sub("", "".join(texts)), failed)

    def run(self, *sources: str, limit: float = 90.0) -> Cell:
        """Run cells one after the other, as one measurement; stops at the first that fails or does not end."""
        texts, begin = [], time.perf_counter()
        for source in sources:
            cell = self.wait(self.start(source), limit - (time.perf_counter() - begin))
            texts.append(cell.text)
            if cell.failed or not cell.ended:
                break
        return Cell(cell.ended, time.perf_counter() - begin, "".join(texts), cell.failed)

    def wait_for_marks(self, name: str, ranks: Iterable[int], limit: float = 90.0) -> dict[int, list[str]]:
        """Wait until these ranks have written their marks: {rank: [time, pid, value...]}.

        Raises
        ------
        RuntimeError
            If one has not when the limit has passed.
        """
        end, wanted, marks = time.monotonic() + limit, set(ranks), {}
        while time.monotonic() < end:
            marks = {int(path.suffix[1:]): path.read_text().split() for path in self.marks.glob(f"{name}.*[0-9]")}
            if wanted <= set(marks):
                return marks
            time.sleep(0.02)
        raise RuntimeError(f"{name}: ranks {sorted(wanted - set(marks))} never came to it")

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid

    def kill(self) -> None:
        """SIGKILL to the kernel process alone."""
        os.kill(self.pid, signal.SIGKILL)

    def processes(self) -> list[psutil.Process]:
        """Every living process that this kernel started, at any depth and however detached."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARKER) == self.token and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def close(self) -> None:
        self.client.stop_channels()
        for _ in range(3):
            for process in self.processes():
                try:
                    process.kill()
                except psutil.Error:
                    continue
        self.manager.shutdown_kernel(now=True)


@contextmanager
def kernel(python: Path):
    """A fresh kernel in a folder of its own; afterwards nothing of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    running = None
    try:
        running = Kernel(python, folder)
        yield running
    finally:
        if running is not None:
            running.close()
        shutil.rmtree(folder, ignore_errors=True)
