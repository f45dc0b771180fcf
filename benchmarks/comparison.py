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
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
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

import torch
import torch.distributed as dist


def mark(name, value=""):
    """Tell the benchmark that this rank is here: one small file per rank."""
    path = os.path.join(os.environ["COURSE_BENCH_MARKS"], f"{name}.{dist.get_rank()}")
    with open(path + ".new", "w") as file:
        file.write(f"{time.time()} {os.getpid()} {value}")
    os.rename(path + ".new", path)


def odd_one_out():
    return dist.get_rank() == dist.get_world_size() // 2


def allreduce():
    x = torch.full((10,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x[0].item()


def memory():
    total = allreduce()
    dist.barrier()
    with open("/proc/self/smaps_rollup") as file:
        sizes = {line.split()[0]: int(line.split()[1]) for line in file if line.startswith("P")}
    dist.barrier()
    mark("memory", f"{sizes['Pss:']} {sizes['Private_Clean:'] + sizes['Private_Dirty:']}")
    return total


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

IN_GROUP = """
from datetime import timedelta

def in_group(name):
    dist.init_process_group("gloo", timeout=timedelta(seconds={limit}))
    try:
        return globals()[name]()
    finally:
        dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Setting:
    """One situation to measure: number of ranks, the time limit in seconds that the tool is given, a free port."""

    ranks: int
    limit: int
    port: int


@dataclass(frozen=True)
class Tool:
    """How to use one tool from a notebook.

    Attributes
    ----------
    packages : what is installed next to torch and ipykernel; None: this course's own environment.
    keeps_workers : whether worker processes live on from one call to the next.
    starts_ranks_in_setup : whether the ranks are there before the first call.
    setup : cells to run before the first call: imports, definitions, starting of engines.
    call : a cell that runs the named workload function on every rank and shows the results.
    loop : the same as a statement, to be timed inside the kernel.
    proxy : the module that is the kernel where ranks are kernels; a call is a cell, timed with its way there and back.
    """

    name: str
    keeps_workers: bool
    packages: tuple[str, ...] | None
    setup: Callable[[Setting], list[str]]
    call: Callable[[str, Setting], str]
    loop: Callable[[str, Setting], str] | None = None
    starts_ranks_in_setup: bool = False
    note: str = ""
    proxy: str = ""

    def timed(self, name: str, setting: Setting) -> str:
        return (self.loop or self.call)(name, setting)


course = Tool(
    "course_utils.launch",
    True,
    None,
    lambda s: ["from course_utils import launch\n\n" + WORKLOAD],
    lambda name, s: f"launch({name}, world_size={s.ranks}, timeout={s.limit})",
)

ipyparallel = Tool(
    "ipyparallel",
    True,
    ("ipyparallel==9.2.0",),
    lambda s: [
        "import ipyparallel as ipp\n"
        f"cluster = ipp.Cluster(n={s.ranks})\n"
        "rc = cluster.start_and_connect_sync(activate=True)\n"
        "view = rc[:]\n"
        "view.scatter('rank', rc.ids, flatten=True, block=True)",
        "%%px\n" + WORKLOAD + "\nfrom datetime import timedelta\n"
        "def group():\n"
        "    if not dist.is_initialized():\n"
        f"        dist.init_process_group('gloo', init_method='tcp://127.0.0.1:{s.port}', rank=rank,\n"
        f"                                world_size={s.ranks}, timeout=timedelta(seconds={s.limit}))\n",
    ],
    lambda name, s: f"%%px\ngroup()\n{name}()",
    lambda name, s: f"view.apply_sync(ipp.Reference('{name}'))",
    starts_ranks_in_setup=True,
    note="engines are started by ipp.Cluster and kept; the process group is made in the first call and kept",
)

_WAIT_FOR_WORKERS = """%env COURSE_BENCH_WAIT=1
for _ in range(150):
    try:
        get_ipython().find_line_magic("dist_init").__self__._comm_manager.send_to_all("get_status", {}, timeout=0.3)
        break
    except TimeoutError:
        pass
"""

nbdistributed = Tool(
    "nbdistributed",
    True,
    ("nbdistributed==0.1.0",),
    lambda s: ["%load_ext nbdistributed", f"%dist_init -n {s.ranks}", _WAIT_FOR_WORKERS, WORKLOAD],
    lambda name, s: f"{name}()",
    lambda name, s: f"get_ipython().run_cell_magic('distributed', '', '{name}()')",
    starts_ranks_in_setup=True,
    note="a cell run before the workers are up is lost (30 s): the benchmark waits for them by a private call, "
    "which favours the tool; every call waits in steps of 0.1 s, gives up after 30 s, and the group has torch's 30 min",
)

torchrunx = Tool(
    "torchrunx",
    False,
    ("torchrunx==0.4.0",),
    lambda s: ["from torchrunx import Launcher\n\n" + WORKLOAD],
    lambda name, s: (
        f"Launcher(hostnames=['localhost'], workers_per_host={s.ranks}, backend='gloo', "
        f"worker_timeout={s.limit}).run({name}).results"
    ),
)

accelerate = Tool(
    "accelerate.notebook_launcher",
    False,
    ("accelerate==1.15.0",),
    lambda s: [
        "import socket\n\nfrom accelerate import notebook_launcher\n\n"
        + WORKLOAD
        + IN_GROUP.format(limit=s.limit)
        + """
def show(name):
    value = in_group(name)
    print(f"{value}\\n", end="")

def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
"""
    ],
    lambda name, s: (
        f"notebook_launcher(show, args=('{name}',), num_processes={s.ranks}, use_port=free_port(), "
        "mixed_precision='no')"
    ),
    note="forks the kernel; results are printed, since it returns none; each call gets a port of its own, which "
    "favours the tool: with the same one, as by default, calls after a failure often fail",
)

spawn = Tool(
    "torch.multiprocessing.spawn",
    False,
    (),
    lambda s: [
        "%%writefile work.py\n" + WORKLOAD + IN_GROUP.format(limit=s.limit) + "\n"
        "def show(rank, world_size, port, name):\n"
        "    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR='127.0.0.1', MASTER_PORT=port)\n"
        "    value = in_group(name)\n"
        "    print(f'{value}\\n', end='')\n",
        "import torch.multiprocessing as mp\nimport work",
    ],
    lambda name, s: f"mp.spawn(work.show, args=({s.ranks}, '{s.port}', '{name}'), nprocs={s.ranks})",
    note="functions must be in a file (%%writefile); results are printed, since it returns none",
)

elastic = Tool(
    "elastic_launch",
    False,
    (),
    lambda s: [
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n\n"
        + WORKLOAD
        + IN_GROUP.format(limit=s.limit)
        + f"\nconfig = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node={s.ranks}, run_id='bench', "
        "rdzv_backend='c10d', rdzv_endpoint='localhost:0', max_restarts=0, start_method='fork')\n"
    ],
    lambda name, s: f"elastic_launch(config, in_group)('{name}')",
    note="start_method='fork', so that functions may come from cells",
)

jupyter_distributed = Tool(
    "jupyter-distributed",
    True,
    ("jupyter-distributed==0.1.1",),
    lambda s: [
        WORKLOAD + "\nfrom datetime import timedelta\n"
        f"dist.init_process_group('gloo', timeout=timedelta(seconds={s.limit}))"
    ],
    lambda name, s: f"{name}()",
    starts_ranks_in_setup=True,
    note="the ranks are the kernel: they start with it, before the clock of a first result; a call is timed as a cell, "
    "with its way there and back",
    proxy="jupyter_distributed.kernel",
)

TOOLS = {
    "course": course,
    "ipyparallel": ipyparallel,
    "nbdistributed": nbdistributed,
    "accelerate": accelerate,
    "elastic": elastic,
    "torchrunx": torchrunx,
    "spawn": spawn,
    "jupyter-distributed": jupyter_distributed,
}


# ---- a virtual environment for each tool ----

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("COURSE_BENCH_ENVS", ROOT / ".bench"))
INDEX = "https://download.pytorch.org/whl/"
BASE = ("ipykernel", "numpy")  # beside torch and in the course's versions


def python_of(tool: Tool) -> Path:
    """The interpreter that has `tool`; its environment is made if it is not there."""
    if tool.packages is None:
        return Path(sys.executable)
    torch = version("torch")
    pins = [f"torch=={torch}", *(f"{name}=={version(name)}" for name in BASE)]
    wanted = json.dumps([sys.version, pins, tool.packages])
    name = "-".join(["torch", *(package.split("==")[0] for package in tool.packages)])
    folder = CACHE / f"{name}-{hashlib.sha1(wanted.encode()).hexdigest()[:8]}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python

    print(f"making an environment for {tool.name}", file=sys.stderr, flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    constraints = CACHE / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    build = torch.partition("+")[2]
    index = ["--extra-index-url", INDEX + build, "--retries", "1", "--timeout", "20"] if build else []
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install(*pip, "--no-deps", *index, pins[0])
    install(*pip, "-c", str(constraints), *pins[1:], *tool.packages, f"torch=={torch.partition('+')[0]}")
    (folder / "complete").touch()
    return python


def install(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError("pip: " + " / ".join(done.stderr.strip().splitlines()[-3:]))


def versions(python: Path, tool: Tool) -> dict[str, str]:
    """Versions of what is measured, asked of the environment itself."""
    names = ["torch", *BASE, *(package.split("==")[0] for package in tool.packages or ())]
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    return json.loads(subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout)


# ---- a real kernel, with a hard limit for each cell ----

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

    def __init__(self, tool: Tool, python: Path, ranks: int, folder: Path):
        spec = folder / "specs" / "bench"
        spec.mkdir(parents=True)
        argv = [str(python), "-m", tool.proxy or "ipykernel_launcher", "-f", "{connection_file}"]
        described = {"argv": argv, "display_name": "bench", "language": "python"}
        described |= {"interrupt_mode": "message"} if tool.proxy else {}
        (spec / "kernel.json").write_text(json.dumps(described))
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
            "JUPYTER_DISTRIBUTED_WORLD_SIZE": str(ranks),  # what its server extension sets
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
            elif kind in ("execute_result", "display_data", "update_display_data"):
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
def kernel(tool: Tool, python: Path, ranks: int):
    """A fresh kernel in a folder of its own; afterwards nothing of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    running = None
    try:
        running = Kernel(tool, python, ranks, folder)
        yield running
    finally:
        if running is not None:
            running.close()
        shutil.rmtree(folder, ignore_errors=True)


# ---- scenarios: each has a kernel of its own ----

SETUP_LIMIT = 120.0  # s, for starting engines and the like
CALL_LIMIT = 45.0  # s, for a call that should simply work
TOOL_LIMIT = 60  # s, the limit that each tool is given for a collective, where it has one
AFTER_KILL = 5.0  # s after which processes count as left behind
SETTLE = 0.5  # s, for ranks that have just said where they are to get into the collective
MEGA = 1e6

CAUSE = {
    "error": r"ValueError: bad batch",
    "death": r"SIGKILL|[Ss]ignal 9\b|exit ?code\W{0,8}-9\b",
    "hang": r"all_?reduce",
    "interrupt": r"KeyboardInterrupt|Interrupted|signal: 2",
}
ON_SLEEP = ("death", "interrupt")  # done to ranks of which one sleeps and the others wait for it
WORKLOAD_OF = {"error": "error", "death": "asleep", "hang": "hang", "interrupt": "asleep"}
NAMED = r"(?i)(?<!\[)\b(?:local_)?(?:rank|process|engine|worker)[\s:=#]{0,12}(\d+)\b(?![,-]\d)|\[(\d+):\w+\]"
FIRST_CAUSE = r"(?is)(?:root|first) cause.{0,200}?\brank[\s:]{0,12}(\d+)"


@dataclass(frozen=True)
class Effort:
    """How much to measure: repeats of a first result (fewer after `repeat_seconds`), warm calls, limits in seconds.

    `reading_pause` stands between set-up and first call when the tool is to be ready, in seconds.
    """

    repeats: int = 5
    repeat_seconds: float = 15.0
    warm_calls: int = 200
    warm_seconds: float = 8.0
    hang_limit: int = 10
    give_up: float = 35.0
    reading_pause: float = 2.0


QUICK = Effort(repeats=1, warm_calls=20, warm_seconds=1.0, hang_limit=2, give_up=20.0, reading_pause=0.3)


def setting(ranks: int, limit: int = TOOL_LIMIT) -> Setting:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Setting(ranks, limit, probe.getsockname()[1])


def right(cell: Cell, ranks: int) -> bool:
    """Whether a call of `allreduce` ended and showed the sum of 1..ranks."""
    return cell.ended and not cell.failed and f"{ranks * (ranks + 1) / 2}" in cell.text


def must(cell: Cell, what: str, ranks: int = 0) -> Cell:
    if not cell.ended or cell.failed or (ranks and not right(cell, ranks)):
        raise RuntimeError(f"{what}: {cell.text.strip()[-300:] or f'no answer after {cell.seconds:.0f} s'}")
    return cell


def first_result_cold(tool: Tool, python: Path, ranks: int) -> float:
    """Seconds from an idle, empty kernel to the result: imports, starting and the first all-reduce."""
    s = setting(ranks)
    with kernel(tool, python, ranks) as k:
        return must(k.run(*tool.setup(s), tool.call("allreduce", s), limit=SETUP_LIMIT), "first result", ranks).seconds


def ready(k: Kernel, tool: Tool, s: Setting, effort: Effort) -> None:
    must(k.run(*tool.setup(s), limit=SETUP_LIMIT), "set-up")
    time.sleep(effort.reading_pause)


def first_result_ready(tool: Tool, python: Path, ranks: int, effort: Effort) -> float:
    """Seconds to the first result once all that can be done before it has been done."""
    s = setting(ranks)
    with kernel(tool, python, ranks) as k:
        ready(k, tool, s, effort)
        return must(k.run(tool.call("allreduce", s), limit=CALL_LIMIT), "first result", ranks).seconds


def warm_calls(tool: Tool, python: Path, ranks: int, effort: Effort) -> dict:
    """Median time of further calls, taken in the kernel; memory of a rank; then the idle kernel is killed."""
    s = setting(ranks)
    with kernel(tool, python, ranks) as k:
        ready(k, tool, s, effort)
        must(k.run(tool.call("allreduce", s), limit=CALL_LIMIT), "first result", ranks)
        must(k.run(tool.call("memory", s), limit=CALL_LIMIT), "memory", ranks)
        memory = [list(map(float, mark[2:])) for mark in k.wait_for_marks("memory", range(ranks), 5).values()]
        loop = (
            "%env COURSE_BENCH_LOOP=1\n"
            "import time as _time\n"
            f"_times, _failed, _end = [], 0, _time.perf_counter() + {effort.warm_seconds}\n"
            f"while len(_times) + _failed < 3 or (len(_times) < {effort.warm_calls} and _time.perf_counter() < _end):\n"
            "    _start = _time.perf_counter()\n"
            f"    try:\n        {tool.timed('allreduce', s)}\n"
            "    except Exception:\n        _failed += 1\n        continue\n"
            "    _times.append(_time.perf_counter() - _start)\n"
            "open('times.txt', 'w').write(' '.join(map(str, [_failed, *_times])));"
        )
        if tool.proxy:
            failed, times = 0, cells_timed(k, tool.call("allreduce", s), ranks, effort)
        else:
            must(k.run(loop, limit=effort.warm_seconds + 4 * CALL_LIMIT), "further calls")
            failed, *times = map(float, (k.marks.parent / "times.txt").read_text().split())
        left = killed(k)
    return {
        "warm_s": statistics.median(times) if times else None,
        "warm_calls": len(times),
        "warm_calls_failed": int(failed),
        "pss_per_rank_MB": statistics.mean(pss for pss, _ in memory) * 1024 / MEGA,
        "private_per_rank_MB": statistics.mean(private for _, private in memory) * 1024 / MEGA,
        "kernel_killed_idle": left,
    }


def cells_timed(k: Kernel, call: str, ranks: int, effort: Effort) -> list[float]:
    """Seconds of a cell that calls, again and again."""
    times, end = [], time.monotonic() + effort.warm_seconds
    while len(times) < 3 or (len(times) < effort.warm_calls and time.monotonic() < end):
        times.append(must(k.run(call, limit=CALL_LIMIT), "further call", ranks).seconds)
    return times


def killed(k: Kernel) -> dict:
    """SIGKILL the kernel; what is still there `AFTER_KILL` seconds later."""
    k.kill()
    begin = time.monotonic()
    while (left := k.processes()) and time.monotonic() - begin < AFTER_KILL:
        time.sleep(0.1)
    return {"left": len(left), "seconds": None if left else time.monotonic() - begin}


def kernel_killed(tool: Tool, python: Path, ranks: int, effort: Effort) -> dict:
    """Memory of all processes together; then the kernel gets SIGKILL in the middle of a call."""
    s = setting(ranks)
    with kernel(tool, python, ranks) as k:
        empty = total_pss(k)
        ready(k, tool, s, effort)
        without_ranks = empty if tool.starts_ranks_in_setup else total_pss(k)
        k.start(tool.call("asleep", s))
        k.wait_for_marks("asleep", range(ranks), CALL_LIMIT)
        time.sleep(SETTLE)
        total = total_pss(k)
        return {
            "kernel_killed_busy": killed(k),
            "added_per_rank_MB": (total - without_ranks) / ranks / MEGA,
            "total_MB": (total - empty) / MEGA,
        }


def total_pss(k: Kernel) -> int:
    """Proportional set size of the kernel and everything it started, in bytes."""
    total = 0
    for process in k.processes():
        try:
            total += process.memory_full_info().pss
        except (psutil.Error, AttributeError):
            continue
    return total


def failure(kind: str, tool: Tool, python: Path, ranks: int, effort: Effort) -> dict:
    """An error on one rank, SIGKILL to it, a collective that it skips, or an interrupt of the kernel; what follows.

    Times count from the event. If the prompt has not come back after `give_up` seconds the kernel is interrupted, as a
    person would do, before the next call is tried.
    """
    s = setting(ranks, effort.hang_limit if kind == "hang" else TOOL_LIMIT)
    odd = ranks // 2
    with kernel(tool, python, ranks) as k:
        ready(k, tool, s, effort)
        must(k.run(tool.call("allreduce", s), limit=CALL_LIMIT), "the call before the event", ranks)
        request = k.start(tool.call(WORKLOAD_OF[kind], s))
        marks = k.wait_for_marks(WORKLOAD_OF[kind], range(ranks) if kind in ON_SLEEP else [odd], CALL_LIMIT)
        event = float(marks[odd][0])
        if kind in ON_SLEEP:
            time.sleep(SETTLE)
            event = time.time()
            psutil.Process(int(marks[odd][1])).kill() if kind == "death" else k.interrupt()
        cell = k.wait(request, effort.give_up)
        if not cell.ended:
            k.interrupt()
        back = cell.ended or k.wait(request, 10).ended
        following = k.run(tool.call("allreduce", s), limit=effort.give_up) if back else None
    return {
        "seconds": cell.at - event if cell.ended else None,
        "gave_up_after_s": None if cell.ended else effort.give_up,
        "back_at_all": back,
        "names_rank": names(kind, cell.text, odd, ranks),
        "names_cause": bool(re.search(CAUSE[kind], cell.text)),
        "next_call_works": following is not None and right(following, ranks),
        "next_call_s": following.seconds if following else None,
        "text": cell.text.strip(),
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

KINDS = {
    "error": "error on one rank",
    "death": "SIGKILL to one rank",
    "hang": "one rank skips a collective",
    "interrupt": "interrupt",
}
KERNEL_KILLED = ("kernel_killed_idle", "kernel_killed_busy")

def number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "–"
    digits = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {unit}".strip()


def seconds(value: float | None) -> str:
    """A time with its unit, ms below 0.1 s."""
    return number(value * 1e3, "ms") if value is not None and value < 0.1 else number(value, "s")


def after_failure(outcome: dict | None) -> tuple[str, str, str]:
    """When the prompt came back, what the message named, and whether the next call works."""
    if outcome is None:
        return "not measured", "", ""
    gave_up = outcome["gave_up_after_s"]
    back = seconds(outcome["seconds"]) if gave_up is None else f"never (gave up after {gave_up:.0f} s)"
    named = [word for word in ("rank", "cause") if outcome["names_" + word]]
    said = "names " + " and ".join(named) if named else "names nothing"
    return back, said, "next call " + ("works" if outcome["next_call_works"] else "fails")


def left_behind(at: dict) -> str:
    counts = [at[key]["left"] for key in KERNEL_KILLED if key in at]
    if not counts:
        return "not measured"
    return "nothing" if not any(counts) else "1 process" if max(counts) == 1 else f"{max(counts)} processes"


OURS, OTHERS = "#0072B2", "#9A9A9A"  # Okabe and Ito's blue, and grey
SHADES = {"good": "#CFE3F1", "partly": "#FBE9C6", "bad": "#F3C6AE", "none": "#EEEEEE"}
PANELS = (
    ("first_cold_s", "first result, cold kernel", seconds),
    ("first_ready_s", "first result, when ready", seconds),
    ("warm_s", "next call", seconds),
    ("total_MB", "memory, all processes", lambda value: number(value, "MB")),
)
LEGEND = (
    "Time from the event to the prompt. Blue: rank and cause are named and the next call works. "
    "Yellow: the next call works.\nOrange: the prompt or the next call is lost, or processes are left."
)


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
    for axis, (key, title, write) in zip(axes, PANELS, strict=True):
        known = [at[key] for _, at in tools if at.get(key)] or [1]
        left = min(known) / 3
        for y, (name, at) in enumerate(tools):
            value = at.get(key)
            ours = name.startswith("course_utils")
            color = OURS if ours else OTHERS
            axis.hlines(y, left, value or left, color=color, linewidth=1)
            axis.plot(value or left, y, "o" if value else "", color=color, markersize=8 if ours else 6)
            label = write(value) if value else "not measured"
            axis.text(value or left, y, "  " + label, va="center", fontweight="bold" if ours else "normal")
        axis.set_ylim(-0.6, len(tools) - 0.4)
        axis.set_xscale("log")
        axis.set_xlim(left, (max(known) / left) ** 1.5 * left)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("MB, log scale" if key.endswith("MB") else "s, log scale")
        axis.tick_params(axis="y", length=0)
        axis.set_yticks(range(len(tools)), [name for name, _ in tools])


def quality(kind: str, outcome: dict | None) -> str:
    if outcome is None:
        return "none"
    if outcome["gave_up_after_s"] or not outcome["next_call_works"]:
        return "bad"
    return "good" if kind == "interrupt" or (outcome["names_rank"] and outcome["names_cause"]) else "partly"


def matrix(figure, tools: list) -> None:
    axis = figure.subplots()
    for y, (_, at) in enumerate(tools):
        for x, kind in enumerate(KINDS):
            outcome = at.get("failures", {}).get(kind)
            back, said, following = after_failure(outcome)
            below = following if kind == "interrupt" else "\n".join(filter(None, [said, following]))
            back = back.replace("never (gave up after", "no prompt (").replace("( ", "(")
            box(axis, x, y, back, below, quality(kind, outcome))
        left = left_behind(at)
        shade = {"nothing": "good", "not measured": "none"}.get(left, "bad")
        box(axis, len(KINDS), y, left, "", shade)
    heads = [*KINDS.values(), "left 5 s after SIGKILL\nto the kernel"]
    axis.set_xlim(-0.5, len(heads) - 0.5)
    axis.set_ylim(-0.5, len(tools) - 0.5)
    axis.set_xticks(range(len(heads)), heads)
    axis.xaxis.tick_top()
    axis.set_yticks(range(len(tools)), [name for name, _ in tools])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    figure.supxlabel(LEGEND, fontsize=8)


def box(axis, x: int, y: int, line: str, below: str, shade: str) -> None:
    axis.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=SHADES[shade], linewidth=0))
    axis.text(x, y + (0.2 if below else 0), line, ha="center", va="center", fontsize=8.5)
    axis.text(x, y - 0.17, below, ha="center", va="center", fontsize=6.8, linespacing=1.05)


# ---- the run ----

def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2 ranks, one repeat, short limits")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"comma-separated; of {', '.join(TOOLS)}")
    parser.add_argument("--store", action="store_true", help="write docs/benchmark.json and .png, for the README")
    args = parser.parse_args()
    args.tools = args.tools.split(",")
    args.ranks = [2] if args.quick else [2, 4]
    args.output = (ROOT / "docs" if args.store else CACHE) / "benchmark.json"
    return args


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


def measure(tool: Tool, python: Path, ranks: int, effort: Effort) -> dict:
    """All scenarios of one tool at one world size. What the tool said after failures goes to text files."""

    def median(first_result: Callable[..., float], *more) -> float:
        values, end = [], time.monotonic() + effort.repeat_seconds
        while len(values) < effort.repeats and (not values or time.monotonic() < end):
            values.append(first_result(tool, python, ranks, *more))
        return statistics.median(values)

    def after(kind: str) -> dict:
        outcome = failure(kind, tool, python, ranks, effort)
        messages = CACHE / "messages"
        messages.mkdir(parents=True, exist_ok=True)
        (messages / f"{tool.name}, {ranks} ranks, {kind}.txt").write_text(outcome.pop("text") + "\n")
        return {kind: outcome}

    at, failures = {}, {}
    attempt(at, "first result, cold", lambda: {"first_cold_s": median(first_result_cold)})
    attempt(at, "first result, ready", lambda: {"first_ready_s": median(first_result_ready, effort)})
    attempt(at, "further calls", lambda: warm_calls(tool, python, ranks, effort))
    attempt(at, "kernel killed", lambda: kernel_killed(tool, python, ranks, effort))
    for kind, title in KINDS.items():
        attempt(failures, title, lambda kind=kind: after(kind))
    for key in ("failed_attempts", "unavailable"):
        at[key] = at.get(key, {}) | failures.pop(key, {})
    return at | {"failures": failures}


def prepare(keys: list[str], ranks: int, quick: bool) -> tuple[dict[str, dict], dict[str, Path]]:
    """Entries of the report and interpreters; each tool is run once, which brings its files into the page cache.

    For a smoke run only its environment is made.
    """
    entries, pythons = {}, {}
    for key in keys:
        tool, found = TOOLS[key], {}

        def try_out(tool: Tool = tool) -> dict:
            python = python_of(tool)
            if not quick:
                first_result_cold(tool, python, ranks)
            return {"python": python, "versions": versions(python, tool)}

        say(f"{tool.name}: environment and first run")
        attempt(found, "first run", try_out)
        entries[key] = {"name": tool.name, "keeps_workers": tool.keeps_workers, "note": tool.note}
        if "python" in found:
            pythons[key] = found["python"]
            entries[key]["versions"] = found["versions"]
        else:
            entries[key]["unavailable"] = found["unavailable"]["first run"]
    return entries, pythons


def measure_all(args: argparse.Namespace) -> dict:
    effort = QUICK if args.quick else Effort()
    entries, pythons = prepare(args.tools, min(args.ranks), args.quick)
    result = {
        "machine": {"cores": os.cpu_count(), "torch": version("torch"), "python": sys.version.split()[0]},
        "quick": args.quick,
        "ranks": args.ranks,
        "tools": entries,
    }
    for key, python in pythons.items():
        entries[key]["ranks"] = {}
        for ranks in args.ranks:
            say(f"{TOOLS[key].name}, {ranks} ranks")
            entries[key]["ranks"][str(ranks)] = measure(TOOLS[key], python, ranks, effort)
    return rounded(result)


def rounded(value):
    """Four significant digits are enough for a stored figure."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    args = arguments()
    begin = time.monotonic()
    result = measure_all(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    draw(result, args.output.with_suffix(".png"))
    say(f"{args.output} and its figure written after {(time.monotonic() - begin) / 60:.1f} min")


if __name__ == "__main__":
    main()
