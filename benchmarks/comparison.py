"""Compare `launch` with other ways to start ranks from a notebook; writes JSON and the figure that the README shows.

    python benchmarks/comparison.py [--quick] [--tools course,ipyparallel] [--store]

Once a year and by hand. Each tool has a virtual environment of its own, made once under `.bench` (or
COURSE_BENCH_ENVS), with the course's own build of torch. Nothing is asserted.
"""

import argparse
import hashlib
import json
import os
import queue
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from string import Template
from subprocess import DEVNULL

import matplotlib
import psutil
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpecManager

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402

# ---- the tools: the cells that a notebook would hold, as their documentation has them ----

WORKLOAD = '''\
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def mark(name):
    """Tell the benchmark that this rank is here: one small file per rank."""
    path = os.path.join(os.environ["COURSE_BENCH_MARKS"], f"{name}.{dist.get_rank()}")
    with open(path + ".new", "w") as file:
        file.write(f"{time.time()} {os.getpid()}")
    os.rename(path + ".new", path)


def odd_one_out():
    return dist.get_rank() == dist.get_world_size() // 2


def allreduce():
    x = torch.full((10,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x[0].item()


def error():
    dist.barrier()
    mark("error")
    if odd_one_out():
        raise ValueError("bad batch")
    return allreduce()


def asleep():
    mark("asleep")
    if odd_one_out():
        time.sleep(600)
    return allreduce()


def hang():
    mark("hang")
    if not odd_one_out():
        dist.all_reduce(torch.ones(10))
    dist.barrier()
'''
IN_GROUP = WORKLOAD + """

def in_group(name):
    dist.init_process_group("gloo", timeout=timedelta(seconds=$limit))
    try:
        return globals()[name]()
    finally:
        dist.destroy_process_group()

"""


@dataclass(frozen=True)
class Tool:
    """How to use one tool from a notebook; in its cells $ranks, $limit (seconds), $port and $name are filled in.

    Attributes
    ----------
    keeps_workers : whether worker processes live on from one call to the next.
    setup : cells to run before the first call: imports, definitions, starting of engines.
    call : a cell that runs the named workload function on every rank and shows the results.
    packages : what is installed next to torch and ipykernel; None: this course's own environment.
    kernel : the module that is the kernel.
    """

    name: str
    keeps_workers: bool
    setup: list[str]
    call: str
    packages: tuple[str, ...] | None = ()
    note: str = ""
    kernel: str = "ipykernel_launcher"


TOOLS = {
    "course": Tool(
        "course_utils.launch", True, ["from course_utils import launch\n\n" + WORKLOAD],
        "launch($name, world_size=$ranks, timeout=$limit)", packages=None,
    ),
    "ipyparallel": Tool(
        "ipyparallel", True, ["""\
import ipyparallel as ipp
cluster = ipp.Cluster(n=$ranks)
rc = cluster.start_and_connect_sync(activate=True)
rc[:].scatter('rank', rc.ids, flatten=True, block=True)""", "%%px\n" + WORKLOAD + """
def group():
    if not dist.is_initialized():
        dist.init_process_group('gloo', init_method='tcp://127.0.0.1:$port', rank=rank,
                                world_size=$ranks, timeout=timedelta(seconds=$limit))
"""],
        "%%px\ngroup()\n$name()", ("ipyparallel==9.2.0",),
        "engines are started by ipp.Cluster and kept; the process group is made in the first call and kept",
    ),
    "nbdistributed": Tool(
        "nbdistributed", True, ["%load_ext nbdistributed", "%dist_init -n $ranks", """%env COURSE_BENCH_WAIT=1
for _ in range(150):
    try:
        get_ipython().find_line_magic("dist_init").__self__._comm_manager.send_to_all("get_status", {}, timeout=0.3)
        break
    except TimeoutError:
        pass
""", WORKLOAD], "$name()", ("nbdistributed==0.1.0",),
        "a cell run before the workers are up is lost (30 s): the benchmark waits for them by a private call, which "
        "favours the tool; every call waits in steps of 0.1 s, gives up after 30 s, and the group has torch's 30 min",
    ),
    "accelerate": Tool(
        "accelerate.notebook_launcher", False,
        ["import socket\n\nfrom accelerate import notebook_launcher\n\n" + IN_GROUP + """
def show(name):
    value = in_group(name)
    print(f"{value}\\n", end="")

def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
"""], "notebook_launcher(show, args=('$name',), num_processes=$ranks, use_port=free_port(), mixed_precision='no')",
        ("accelerate==1.15.0",),
        "forks the kernel; results are printed, since it returns none; each call gets a port of its own, which "
        "favours the tool: with the same one, as by default, calls after a failure often fail",
    ),
    "elastic": Tool(
        "elastic_launch", False,
        ["from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n\n" + IN_GROUP + """
config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=$ranks, run_id='bench', rdzv_backend='c10d',
                      rdzv_endpoint='localhost:0', max_restarts=0, start_method='fork')
"""], "elastic_launch(config, in_group)('$name')", note="start_method='fork', so that functions may come from cells",
    ),
    "torchrunx": Tool(
        "torchrunx", False, ["from torchrunx import Launcher\n\n" + WORKLOAD],
        "Launcher(hostnames=['localhost'], workers_per_host=$ranks, backend='gloo', worker_timeout=$limit)"
        ".run($name).results", ("torchrunx==0.4.0",),
    ),
    "spawn": Tool(
        "torch.multiprocessing.spawn", False, ["%%writefile work.py\n" + IN_GROUP + """
def show(rank, world_size, port, name):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
    value = in_group(name)
    print(f'{value}\\n', end='')
""", "import torch.multiprocessing as mp\nimport work"],
        "mp.spawn(work.show, args=($ranks, '$port', '$name'), nprocs=$ranks)",
        note="functions must be in a file (%%writefile); results are printed, since it returns none",
    ),
    "jupyter-distributed": Tool(
        "jupyter-distributed", True, [WORKLOAD + "dist.init_process_group('gloo', timeout=timedelta(seconds=$limit))"],
        "$name()", ("jupyter-distributed==0.1.1",),
        "the ranks are the kernel: they start with it, before the clock of a first result",
        "jupyter_distributed.kernel",
    ),
}


# ---- a virtual environment for each tool ----

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("COURSE_BENCH_ENVS", ROOT / ".bench"))
INDEX = "https://download.pytorch.org/whl/"


def pins(tool: Tool) -> list[str]:
    """What is installed for a tool; all but its own packages are in the course's versions."""
    return [*(f"{name}=={version(name)}" for name in ("torch", "ipykernel", "numpy")), *(tool.packages or ())]


def python_of(tool: Tool) -> str:
    """The interpreter that has `tool`; its environment is made if it is not there."""
    if tool.packages is None:
        return sys.executable
    wanted = hashlib.sha1(json.dumps([sys.version, pins(tool)]).encode()).hexdigest()
    folder = CACHE / "-".join(["torch", *(package.split("==")[0] for package in tool.packages), wanted[:8]])
    python = str(folder / "bin" / "python")
    if not (folder / "complete").exists():
        say(f"making an environment for {tool.name}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        build = version("torch").partition("+")[2]
        index = ["--extra-index-url", INDEX + build, "--retries", "1", "--timeout", "20"] if build else []
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", *index, pins(tool)[0]], check=True)  # nothing else is looked up there
        subprocess.run([*pip, *pins(tool)], check=True)
        (folder / "complete").touch()
    return python


# ---- a real kernel, with a hard limit for each cell ----

MARKER = "COURSE_BENCH_KERNEL"
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
SETUP_LIMIT = 120.0  # s, for starting engines and the like
CALL_LIMIT = 45.0  # s, for a call that should simply work
TOOL_LIMIT = 60  # s, the limit that each tool is given for a collective, where it has one
AFTER_KILL = 5.0  # s after which processes count as left behind
SETTLE = 0.5  # s, for ranks that have just said where they are to get into the collective


@dataclass
class Cell:
    """What running one cell gave: whether it ended, after how many seconds, all text shown, time of day of its end."""

    ended: bool
    seconds: float
    text: str
    failed: bool
    at: float = 0.0


class Kernel:
    """A running kernel with a tool, whose ranks have a limit in seconds; they leave marks in a folder."""

    def __init__(self, tool: Tool, ranks: int, limit: int, folder: Path):
        self.tool, self.ranks, self.marks, self.token = tool, ranks, folder / "marks", uuid.uuid4().hex
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.filled = {"ranks": ranks, "limit": limit, "port": probe.getsockname()[1]}
        python, spec = python_of(tool), folder / "specs" / "bench"
        spec.mkdir(parents=True)
        self.marks.mkdir()
        described = {"argv": [python, "-m", tool.kernel, "-f", "{connection_file}"], "display_name": "bench",
                     "language": "python", "interrupt_mode": "message" if "." in tool.kernel else "signal"}
        (spec / "kernel.json").write_text(json.dumps(described))
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COURSE_", "VIRTUAL_ENV"))}
        env |= {
            MARKER: self.token, "COURSE_BENCH_MARKS": str(self.marks), "IPYTHONDIR": str(folder / "ipython"),
            "PATH": f"{Path(python).parent}{os.pathsep}{env.get('PATH', '')}", "OMP_NUM_THREADS": "1",
            "JUPYTER_DISTRIBUTED_WORLD_SIZE": str(ranks),  # what its server extension sets
        }
        specs = KernelSpecManager(kernel_dirs=[str(folder / "specs")], ensure_native_kernel=False)
        self.manager = KernelManager(kernel_name="bench", kernel_spec_manager=specs)
        self.manager.start_kernel(env=env, cwd=str(folder), stdout=DEVNULL, stderr=DEVNULL)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def call(self, name: str) -> str:
        """The cell that calls a function of the workload."""
        return Template(self.tool.call).substitute(self.filled, name=name)

    def start(self, source: str) -> str:
        """Send a cell; returns the id to wait for."""
        return self.client.execute(source, allow_stdin=False)

    def wait(self, request: str, limit: float) -> Cell:
        """Wait at most `limit` seconds for the prompt to come back."""
        begin, texts, failed = time.perf_counter(), [], False
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
            elif kind in ("execute_result", "display_data", "update_display_data"):
                texts.append(content["data"].get("text/plain", "") + "\n")
            elif kind == "error":
                failed = True
                texts.append("\n".join(content["traceback"]) + f"\n{content['ename']}: {content['evalue']}\n")
            elif kind == "status" and content["execution_state"] == "idle":
                text, at = ANSI.sub("", "".join(texts)), message["header"]["date"].timestamp()
                return Cell(True, time.perf_counter() - begin, text, failed, at)
        return Cell(False, limit, ANSI.sub("", "".join(texts)), failed)

    def must(self, *sources: str, what: str = "set-up", limit: float = SETUP_LIMIT) -> float:
        """Run cells that should simply work, and return the seconds of them all; raises RuntimeError."""
        begin = time.perf_counter()
        for source in sources:
            cell = self.wait(self.start(source), limit - (time.perf_counter() - begin))
            if not cell.ended or cell.failed or (source == self.call("allreduce") and not self.right(cell)):
                raise RuntimeError(f"{what}: {cell.text.strip()[-300:] or f'no answer after {cell.seconds:.0f} s'}")
        return time.perf_counter() - begin

    def right(self, cell: Cell) -> bool:
        """Whether a call of `allreduce` ended and showed the sum of 1..ranks."""
        return cell.ended and not cell.failed and f"{self.ranks * (self.ranks + 1) / 2}" in cell.text

    def set_up(self) -> list[str]:
        """The cells before the first call."""
        return [Template(source).safe_substitute(self.filled) for source in self.tool.setup]

    def wait_for_marks(self, name: str, ranks: Iterable[int]) -> dict[int, list[str]]:
        """Wait until these ranks have written their marks: {rank: [time, pid]}."""
        end, wanted, marks = time.monotonic() + CALL_LIMIT, set(ranks), {}
        while time.monotonic() < end:
            marks = {int(path.suffix[1:]): path.read_text().split() for path in self.marks.glob(f"{name}.*[0-9]")}
            if wanted <= set(marks):
                return marks
            time.sleep(0.02)
        raise RuntimeError(f"{name}: ranks {sorted(wanted - set(marks))} never came to it")

    def processes(self) -> list[psutil.Process]:
        """Every living process that this kernel started, at any depth and however detached."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARKER) == self.token and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def memory(self) -> float:
        """MB of the kernel and everything it started: what processes share is counted once."""
        total = 0
        for process in self.processes():
            with suppress(psutil.Error, AttributeError):
                total += process.memory_full_info().pss
        return total / 1e6

    def killed(self) -> dict:
        """SIGKILL the kernel process alone; what is still there `AFTER_KILL` seconds later."""
        os.kill(self.manager.provisioner.pid, signal.SIGKILL)
        begin = time.monotonic()
        while (left := self.processes()) and time.monotonic() - begin < AFTER_KILL:
            time.sleep(0.1)
        return {"left": len(left), "seconds": None if left else time.monotonic() - begin}

    def close(self) -> None:
        self.client.stop_channels()
        for _ in range(3):
            for process in self.processes():
                with suppress(psutil.Error):
                    process.kill()
        self.manager.shutdown_kernel(now=True)


@contextmanager
def kernel(tool: Tool, ranks: int, limit: int = TOOL_LIMIT, pause: float | None = None) -> Iterator[Kernel]:
    """A fresh kernel in a folder of its own, set up `pause` seconds ago where one is given; nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        running = Kernel(tool, ranks, limit, Path(folder))
        try:
            if pause is not None:
                running.must(*running.set_up())
                time.sleep(pause)
            yield running
        finally:
            running.close()


# ---- scenarios: each has a kernel of its own ----

KINDS = {
    "error": "error on one rank", "death": "SIGKILL to one rank", "hang": "one rank skips a collective",
    "interrupt": "interrupt",
}
CAUSE = {
    "error": r"ValueError: bad batch", "death": r"SIGKILL|[Ss]ignal 9\b|exit ?code\W{0,8}-9\b",
    "hang": r"all_?reduce", "interrupt": r"KeyboardInterrupt|Interrupted|signal: 2",
}
ON_SLEEP = ("death", "interrupt")  # done to ranks of which one sleeps and the others wait for it
NAMED = r"(?i)(?<!\[)\b(?:local_)?(?:rank|process|engine|worker)[\s:=#]{0,12}(\d+)\b(?![,-]\d)|\[(\d+):\w+\]"
FIRST_CAUSE = r"(?is)(?:root|first) cause.{0,200}?\brank[\s:]{0,12}(\d+)"


@dataclass(frozen=True)
class Effort:
    """How much to measure: repeats of a first result (fewer after `repeat_seconds`), warm calls, limits in seconds.

    `pause` stands between set-up and first call when the tool is to be ready, in seconds.
    """

    repeats: int = 5
    repeat_seconds: float = 15.0
    warm_calls: int = 200
    warm_seconds: float = 8.0
    hang_limit: int = 10
    give_up: float = 35.0
    pause: float = 2.0


QUICK = Effort(repeats=1, warm_calls=20, warm_seconds=1.0, hang_limit=2, give_up=20.0, pause=0.3)


def first_result(tool: Tool, ranks: int, effort: Effort, ready: bool) -> float:
    """Seconds to the first all-reduce: from an idle, empty kernel, or once all has been done that can be before it."""
    times, end = [], time.monotonic() + effort.repeat_seconds
    while len(times) < effort.repeats and (not times or time.monotonic() < end):
        with kernel(tool, ranks, pause=effort.pause if ready else None) as k:
            cells = [k.call("allreduce")] if ready else [*k.set_up(), k.call("allreduce")]
            times.append(k.must(*cells, what="first result"))
    return statistics.median(times)


def warm_calls(tool: Tool, ranks: int, effort: Effort) -> dict:
    """Median time of further calls, each a cell with its way there and back; then the idle kernel is killed."""
    with kernel(tool, ranks, pause=effort.pause) as k:
        times, end = [], time.monotonic() + effort.warm_seconds
        k.must(k.call("allreduce"), what="first result")
        while len(times) < 3 or (len(times) < effort.warm_calls and time.monotonic() < end):
            times.append(k.must(k.call("allreduce"), what="further call", limit=CALL_LIMIT))
        return {"warm_s": statistics.median(times), "warm_calls": len(times), "kernel_killed_idle": k.killed()}


def kernel_killed(tool: Tool, ranks: int, effort: Effort) -> dict:
    """Memory that all processes together add; then the kernel gets SIGKILL in the middle of a call."""
    with kernel(tool, ranks) as k:
        empty = k.memory()
        k.must(*k.set_up())
        time.sleep(effort.pause)
        k.start(k.call("asleep"))
        k.wait_for_marks("asleep", range(ranks))
        time.sleep(SETTLE)
        return {"total_MB": k.memory() - empty, "kernel_killed_busy": k.killed()}


def failure(kind: str, tool: Tool, ranks: int, effort: Effort) -> dict:
    """An error on one rank, SIGKILL to it, a collective that it skips, or an interrupt of the kernel; what follows.

    Times count from the event. If the prompt has not come back after `give_up` seconds the kernel is interrupted, as a
    person would do, before the next call is tried. What the tool said goes to a text file.
    """
    odd, work = ranks // 2, "asleep" if kind in ON_SLEEP else kind
    with kernel(tool, ranks, effort.hang_limit if kind == "hang" else TOOL_LIMIT, effort.pause) as k:
        k.must(k.call("allreduce"), what="the call before the event")
        request = k.start(k.call(work))
        marks = k.wait_for_marks(work, range(ranks) if kind in ON_SLEEP else [odd])
        event = float(marks[odd][0])
        if kind in ON_SLEEP:
            time.sleep(SETTLE)
            event = time.time()
            psutil.Process(int(marks[odd][1])).kill() if kind == "death" else k.manager.interrupt_kernel()
        cell = k.wait(request, effort.give_up)
        if not cell.ended:
            k.manager.interrupt_kernel()
        back = cell.ended or k.wait(request, 10).ended
        following = k.wait(k.start(k.call("allreduce")), effort.give_up) if back else None
    messages = CACHE / "messages"
    messages.mkdir(parents=True, exist_ok=True)
    (messages / f"{tool.name}, {ranks} ranks, {kind}.txt").write_text(cell.text.strip() + "\n")
    return {
        "seconds": cell.at - event if cell.ended else None,
        "gave_up_after_s": None if cell.ended else effort.give_up,
        "back_at_all": back,
        "names_rank": names(kind, cell.text, odd, ranks),
        "names_cause": bool(re.search(CAUSE[kind], cell.text)),
        "next_call_works": following is not None and k.right(following),
        "next_call_s": following.seconds if following else None,
    }


def names(kind: str, text: str, rank: int, ranks: int) -> bool:
    """Whether `text` singles out `rank`: as the root cause, else as the first rank named alone.

    Of a hang it must say what the rank did: every rank may time out, and the first to do so is chance.
    """
    if kind == "hang":
        return bool(re.search(rf"(?i)\brank {rank} (?:called|never|did not|failed to|skipped|is missing)", text))
    cause = re.search(FIRST_CAUSE, text)
    if cause:
        return int(cause.group(1)) == rank
    named = (int(one or other) for one, other in re.findall(NAMED, text))
    return next((n for n in named if n < ranks), None) == rank


# ---- the figure: times, memory and behaviour after failures at the largest number of ranks ----

OURS, OTHERS = "#0072B2", "#9A9A9A"  # Okabe and Ito's blue, and grey
GOOD, PARTLY, BAD, NONE = "#CFE3F1", "#FBE9C6", "#F3C6AE", "#EEEEEE"
PANELS = {
    "first_cold_s": "first result, cold kernel", "first_ready_s": "first result, when ready", "warm_s": "next call",
    "total_MB": "memory, all processes",
}
LEGEND = (
    "Time from the event to the prompt. Blue: rank and cause are named and the next call works. "
    "Yellow: the next call works.\nOrange: the prompt or the next call is lost, or processes are left."
)


def number(value: float, unit: str) -> str:
    """Three digits with the unit; a time below 0.1 s in ms."""
    if unit == "s" and value < 0.1:
        value, unit = value * 1e3, "ms"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def draw(result: dict, path: Path) -> None:
    """Write the figure as PNG."""
    ranks = str(max(result["ranks"]))
    tools = [(t["name"], t["ranks"][ranks]) for t in result["tools"].values() if ranks in t.get("ranks", {})][::-1]
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = plt.figure(figsize=(11, 0.8 * len(tools) + 3), layout="constrained")
        above, below = figure.subfigures(2, 1, height_ratios=[0.32 * len(tools) + 1.2, 0.5 * len(tools) + 1.2])
        dots(above, tools)
        matrix(below, tools)
        cores = result["machine"]["cores"]
        figure.suptitle(f"{ranks} ranks from a Jupyter notebook on {cores} CPU cores (measured)", fontweight="bold")
        figure.savefig(path, dpi=130, metadata={"Software": None})
        plt.close(figure)


def dots(figure, tools: list) -> None:
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for axis, (key, title) in zip(axes, PANELS.items(), strict=True):
        unit, known = key.rpartition("_")[2], [at[key] for _, at in tools if at.get(key)] or [1]
        left = min(known) / 3
        for y, (name, at) in enumerate(tools):
            value, ours = at.get(key), name.startswith("course_utils")
            color = OURS if ours else OTHERS
            axis.hlines(y, left, value or left, color=color, linewidth=1)
            axis.plot(value or left, y, "o" if value else "", color=color, markersize=8 if ours else 6)
            label = number(value, unit) if value else "not measured"
            axis.text(value or left, y, "  " + label, va="center", fontweight="bold" if ours else "normal")
        axis.set(ylim=(-0.6, len(tools) - 0.4), xscale="log", xlim=(left, (max(known) / left) ** 1.5 * left))
        axis.set(xlabel=f"{unit}, log scale", yticks=range(len(tools)), yticklabels=[name for name, _ in tools])
        axis.set_title(title, fontsize=9)
        axis.tick_params(axis="y", length=0)


def after_failure(kind: str, outcome: dict | None) -> tuple[str, str, str]:
    """When the prompt came back, what the message named and whether the next call works, and a colour for it."""
    if outcome is None:
        return "not measured", "", NONE
    gave_up, works = outcome["gave_up_after_s"], outcome["next_call_works"]
    named = [word for word in ("rank", "cause") if outcome["names_" + word]]
    said = "" if kind == "interrupt" else f"names {' and '.join(named) or 'nothing'}\n"
    colour = BAD if gave_up or not works else GOOD if kind == "interrupt" or len(named) == 2 else PARTLY
    back = f"no prompt ({gave_up:.0f} s)" if gave_up else number(outcome["seconds"], "s")
    return back, said + "next call " + ("works" if works else "fails"), colour


def left_behind(at: dict) -> tuple[str, str, str]:
    """How many processes a killed kernel left, idle or in a call, whichever is more, and a colour for it."""
    counts = [at[key]["left"] for key in ("kernel_killed_idle", "kernel_killed_busy") if key in at]
    if not counts:
        return "not measured", "", NONE
    most = max(counts)
    return f"{most} process{'es' * (most > 1)}" if most else "nothing", "", BAD if most else GOOD


def matrix(figure, tools: list) -> None:
    axis = figure.subplots()
    for y, (_, at) in enumerate(tools):
        boxes = [after_failure(kind, at.get("failures", {}).get(kind)) for kind in KINDS]
        for x, (line, below, colour) in enumerate([*boxes, left_behind(at)]):
            axis.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour, linewidth=0))
            axis.text(x, y + (0.2 if below else 0), line, ha="center", va="center", fontsize=8.5)
            axis.text(x, y - 0.17, below, ha="center", va="center", fontsize=6.8, linespacing=1.05)
    heads = [*KINDS.values(), f"left {AFTER_KILL:.0f} s after SIGKILL\nto the kernel"]
    axis.set(xlim=(-0.5, len(heads) - 0.5), ylim=(-0.5, len(tools) - 0.5), xticks=range(len(heads)), xticklabels=heads)
    axis.set(yticks=range(len(tools)), yticklabels=[name for name, _ in tools])
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    figure.supxlabel(LEGEND, fontsize=8)


# ---- the run ----


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def reason(error: Exception) -> str:
    """The error in one line without paths of this machine."""
    text = " ".join(str(error).split())
    for folder, name in ((CACHE, "…"), (ROOT, "."), (Path.home(), "~")):
        text = text.replace(str(folder), name)
    return f"{type(error).__name__}: {text[-300:]}"


def attempt(at: dict, part: str, measure_part: Callable[[], dict]) -> None:
    """Add to `at` what is measured. A scenario that fails is tried three times in all; the reasons are kept."""
    for _ in range(3):
        try:
            at.update(measure_part())
            return
        except Exception as error:
            at.setdefault("failed_attempts", {}).setdefault(part, []).append(reason(error))
            say(f"  {part}: {reason(error)}")
    at.setdefault("unavailable", {})[part] = at["failed_attempts"].pop(part)[-1]


def measure(tool: Tool, ranks: int, effort: Effort) -> dict:
    """All scenarios of one tool at one world size."""
    say(f"{tool.name}, {ranks} ranks")
    at, failures = {}, {}
    for ready in (False, True):
        key = "first_ready_s" if ready else "first_cold_s"
        attempt(at, PANELS[key], lambda key=key, ready=ready: {key: first_result(tool, ranks, effort, ready)})
    attempt(at, "further calls", lambda: warm_calls(tool, ranks, effort))
    attempt(at, "kernel killed", lambda: kernel_killed(tool, ranks, effort))
    for kind, title in KINDS.items():
        attempt(failures, title, lambda kind=kind: {kind: failure(kind, tool, ranks, effort)})
    for key in ("failed_attempts", "unavailable"):
        at[key] = at.get(key, {}) | failures.pop(key, {})
    return at | {"failures": failures}


def measure_all(names: list[str], worlds: list[int], quick: bool) -> dict:
    """Every tool at every world size; before, each is run once, which brings its files into the page cache."""
    tools, effort = {name: TOOLS[name] for name in names}, QUICK if quick else Effort()
    entries = {name: {"name": tool.name, "keeps_workers": tool.keeps_workers, "note": tool.note,
                      "versions": dict(pin.split("==") for pin in pins(tool))} for name, tool in tools.items()}
    for name, tool in tools.items():
        attempt(entries[name], "first run",
                lambda tool=tool: {"first_run_s": first_result(tool, worlds[0], QUICK, ready=False)})
    for name, tool in tools.items():
        if "unavailable" not in entries[name]:
            entries[name]["ranks"] = {str(ranks): measure(tool, ranks, effort) for ranks in worlds}
    machine = {"cores": os.cpu_count(), "torch": version("torch"), "python": sys.version.split()[0]}
    return {"machine": machine, "quick": quick, "ranks": worlds, "tools": rounded(entries)}


def rounded(value):
    """Four significant digits are enough for a stored figure."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2 ranks, one repeat, short limits")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"comma-separated; of {', '.join(TOOLS)}")
    parser.add_argument("--store", action="store_true", help="write docs/benchmark.json and .png, for the README")
    args = parser.parse_args()
    result = measure_all(args.tools.split(","), [2] if args.quick else [2, 4], args.quick)
    output = (ROOT / "docs" if args.store else CACHE) / "benchmark.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    draw(result, output.with_suffix(".png"))
    say(f"{output} and its figure are written")


if __name__ == "__main__":
    main()
