"""The tools compared: for each, the cells that a notebook would hold, as its documentation has them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WORKLOAD = (Path(__file__).parent / "workload.py").read_text().split('"""', 2)[2].lstrip()

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
    """

    name: str
    keeps_workers: bool
    packages: tuple[str, ...] | None
    setup: Callable[[Setting], list[str]]
    call: Callable[[str, Setting], str]
    loop: Callable[[str, Setting], str] | None = None
    starts_ranks_in_setup: bool = False
    note: str = ""

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

TOOLS = {
    "course": course,
    "ipyparallel": ipyparallel,
    "nbdistributed": nbdistributed,
    "accelerate": accelerate,
    "elastic": elastic,
    "torchrunx": torchrunx,
    "spawn": spawn,
}
