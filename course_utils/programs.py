"""Programs beside the ranks of a lesson: those of ``scripts/``, and cells as files; how to run one and read its log."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from .ranks import Status, tells_place
from .recordings import real_or_recorded

__all__ = [
    "ROOT", "SCRIPTS", "TEXT", "as_program", "examine", "excerpt", "folded", "read_log", "run_program", "torchrun",
    "torchrun_job", "wait_for_step",
]

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
#: The text that the lessons' models learn, one byte a character.
TEXT = Path(str(files(__package__) / "text" / "alice.txt"))


def run_program(path: str | os.PathLike, *arguments: str | os.PathLike, silent: bool = False) -> int:
    """On a rank of ``launch(init=False)``: run a Python program as torchrun does, and return its exit code.

    The program sees no GPU, because ranks on emulated hosts talk through gloo. If `silent`, what it prints is lost.

    Raises
    ------
    RuntimeError
        If the program ends with a sentence in place of a code.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.argv = [str(path), *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(io.StringIO() if silent else sys.stdout):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            raise RuntimeError(end.code) from None
        return end.code or 0
    return 0


def read_log(out: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the lines of ``log.jsonl`` in the folder that ``train.py`` got as ``--out``: step, loss and more."""
    log = Path(out, "log.jsonl")
    complete = log.read_text().rpartition("\n")[0] if log.exists() else ""  # the last line may be half written
    return [json.loads(line) for line in complete.splitlines()]


def wait_for_step(out: str | os.PathLike, step: int, timeout: float = 60) -> None:
    """Wait until the log of a run of ``train.py`` has reached a step.

    Raises
    ------
    TimeoutError
        If it has not after `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while not any(line["step"] >= step for line in read_log(out)):
        if time.monotonic() > end:
            raise TimeoutError(f"{Path(out).name} has not reached step {step} after {timeout:g} s")
        time.sleep(0.05)


_PROGRAM = """\
import torch
import torch.distributed as dist

from course_utils import device


{functions}


if __name__ == "__main__":
    main()
"""


def as_program(*functions: Callable) -> str:
    """Return the text of a program with the source of some functions, one of them ``main``, that calls ``main``.

    Of other names, the functions may use ``torch``, ``dist`` and the course's ``device`` only.

    Raises
    ------
    ValueError
        None of the functions is called ``main``.
    """
    if "main" not in [function.__name__ for function in functions]:
        raise ValueError("one of the functions must be called main")
    sources = (textwrap.dedent(inspect.getsource(function)).strip() for function in functions)
    return _PROGRAM.format(functions="\n\n\n".join(sources))


def torchrun(script: str | os.PathLike, *arguments: object, ranks: int, gpus: bool = True) -> str:
    """Run a program with so many ranks on this machine, as ``torchrun --standalone`` in a terminal does.

    Each rank has one thread, and gloo stays on the loopback interface.

    Parameters
    ----------
    script : str or path
        A file of ``scripts/`` by its name, or any other by its path.
    *arguments : object
        Of the program, as text.
    ranks : int
        Number of processes.
    gpus : bool
        Whether the program may see the GPUs of this machine.

    Returns
    -------
    str
        What it printed.

    Raises
    ------
    RuntimeError
        If it fails, with what it wrote to standard error.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = {name: value for name, value in os.environ.items() if not tells_place(name)}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    if not gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [*command, str(SCRIPTS / script), *map(str, arguments)]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    status = Status(lambda line: print(line, end="", flush=True))
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, errors = process.communicate(timeout=0.5)
                break
            status.update([*range(ranks)], None, "running under torchrun")
    finally:
        status.erase()
        if process.poll() is None:  # interrupted: torchrun ends its ranks
            process.terminate()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"{Path(script).name} failed:\n{errors}")
    return re.sub(r"^\[Gloo\] Rank .*\n+", "", output, flags=re.MULTILINE)  # which PyTorch 2.10 says of each group


_JOB = """\
import sys
sys.path.insert(0, {scripts!r})
import where
where.listen({folder!r})
import torch
import torch.distributed as dist


{function}

torch.set_num_threads(1)
dist.init_process_group("gloo")
dist.barrier()
open({folder!r} + "/began-" + str(dist.get_rank()), "w").close()
{name}()
"""


@contextlib.contextmanager
def torchrun_job(function: Callable[[], Any], world_size: int, timeout: float = 60) -> Iterator[int]:
    """Run a function on CPU ranks under plain ``torchrun``, as a job that ``where.py`` can examine.

    Parameters
    ----------
    function : callable
        Without arguments; of the names around it, it may use ``torch`` and ``dist`` only.
    world_size : int
        Number of ranks.
    timeout : float
        Seconds until every rank must have begun with the function.

    Yields
    ------
    int
        PID of torchrun. The job is ended with the block.

    Raises
    ------
    RuntimeError
        If the job ends, or has not begun after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True) as folder:
        source = textwrap.dedent(inspect.getsource(function))
        program = Path(folder, "job.py")
        program.write_text(_JOB.format(scripts=str(SCRIPTS), folder=folder, function=source, name=function.__name__))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        log = Path(folder, "log")
        with log.open("w") as file:
            agent = subprocess.Popen([*command, str(program)], stdout=file, stderr=file, env=environment,
                                     start_new_session=True)
        try:
            end = time.monotonic() + timeout
            while len([*Path(folder).glob("began-*")]) < world_size:
                if agent.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the job did not begin:\n{log.read_text()[-2000:]}")
                time.sleep(0.05)
            yield agent.pid
        finally:
            _end(agent)


def _end(agent: subprocess.Popen) -> None:
    """End torchrun and its ranks, which are in sessions of their own."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
    agent.wait()


def examine(pid: int, timeout: float = 30) -> str:
    """What ``scripts/where.py`` says of a job, once two looks one after the other say the same, without the PIDs.

    It needs Linux; elsewhere this says so, and returns what it said of the job of lesson 14.

    Raises
    ------
    RuntimeError
        If it fails, or every look differs from the last one for `timeout` seconds.
    """
    there, made_with = sys.platform == "linux", f"torch {version('torch').partition('+')[0]} on Linux"
    available = there, made_with if there else "where.py needs Linux."
    return real_or_recorded("where", partial(_examine, pid, timeout), available)


def _examine(pid: int, timeout: float) -> str:
    command = [sys.executable, str(SCRIPTS / "where.py"), "--pause=1", str(pid)]
    said, end = "", time.monotonic() + timeout
    while time.monotonic() < end:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        if done.stdout == said:
            return re.sub(r"pid \d+  ", "", said)
        said = done.stdout
        time.sleep(0.3)
    raise RuntimeError(f"the ranks go on:\n{said}")


def folded(summary: str, *parts: Callable | type | str | os.PathLike, language: str = "python") -> Any:
    """Return code as a notebook shows it behind one line that opens at a click.

    Parameters
    ----------
    summary : str
        The line.
    parts : function, class, code or path
        The sources of functions and classes, code as it is, or the text of a file.
    language : str
        Whose colours the code gets.
    """
    from IPython.display import Markdown

    def source(part: Callable | type | str | os.PathLike) -> str:
        if isinstance(part, os.PathLike):
            return Path(part).read_text(encoding="utf-8")
        return part if isinstance(part, str) else inspect.getsource(part)

    code = "\n\n".join(source(part).strip("\n") + "\n" for part in parts)
    return Markdown(f"<details><summary>{summary}</summary>\n\n```{language}\n{code}```\n\n</details>")


def excerpt(path: str | os.PathLike, first: str, last: str) -> str:
    """Return the lines of a program from the first that has one text to the next that has the other, without indent.

    Raises
    ------
    ValueError
        If there are no such lines.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    begin = next((i for i, line in enumerate(lines) if first in line), None)
    end = next((i for i, line in enumerate(lines) if last in line and i >= (begin or 0)), None)
    if begin is None or end is None:
        raise ValueError(f"{Path(path).name} has no lines from {first!r} to {last!r}")
    return textwrap.dedent("\n".join(lines[begin : end + 1]))
