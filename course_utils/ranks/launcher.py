"""Run a function on every rank, from a notebook cell, and get the results by rank."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from . import errors
from .channels import FUNCTION, PROGRAM

__all__ = ["device", "launch", "shutdown"]

worker = sys.modules.get("course_utils.ranks.worker")
if (worker and worker.state.rank >= 0) or "COURSE_UTILS_FOLDER" in os.environ:  # on a rank, or in the fork server
    pool = None
else:
    from . import cell_advice, pool, processes

    _launched = pool.Pool()
    atexit.register(_launched.close)
    if "RANK" not in os.environ and os.environ.get("COURSE_ON") != "ray":
        with contextlib.suppress(OSError):  # told when ranks are asked for
            processes.start_server()

    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()) is not None:
        cell_advice.install(shell)

_DEFAULT_WORLD_SIZE = 4
_MAX_WORLD_SIZE = 128
_EMULATION = "lessons.multi_node.hosts"  # loaded when `hosts` is given
_announced: set[tuple[int, int]] = set()


def launch(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int | None = None,
    timeout: float = 60.0,
    backend: str | None = None,
    init: bool = True,
    hosts: int | None = None,
    link: str | None = None,
    fault: str | None = None,
    verify: bool = False,
    post_mortem: bool = False,
    by_rank: bool = False,
    on: str | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ``world_size`` ranks and return the results, index = rank.

    Each rank is a process of its own, kept warm between calls. Random generators are seeded with the rank each time.

    Parameters
    ----------
    fn : callable
        Any function, also one defined in a cell, with closures and classes.
    world_size : int, optional
        Number of ranks. Default: environment variable ``COURSE_WORLD_SIZE``, else the number of GPUs if there are
        several, else 4.
    timeout : float
        Seconds after which the ranks are stopped and :class:`HangError` is raised.
    backend : {"gloo", "nccl"}, optional
        Default: ``nccl`` if there is a GPU for every rank, else ``gloo`` on the CPU.
    init : bool
        Whether a default process group exists when ``fn`` runs. If False only the variables are set by which
        ``torchrun`` tells a program its place, ``fn`` calls ``init_process_group`` itself, and the ranks are fresh
        processes that end as programs do: threads are waited for, exit functions run. Unlike there, random numbers
        are seeded with the rank.
    hosts : int, optional
        Divide the ranks among so many emulated hosts, equally and in order. A host has a name (``node0``, ``node1``, …)
        and a network interface ``eth0`` of its own; LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE are
        what ``torchrun`` sets. Ranks meet at MASTER_ADDR ``node0``, MASTER_PORT 29500; they use gloo and reach nothing
        but each other. They are kept warm for calls with the same hosts, link and fault. Where hosts cannot be
        emulated (see :func:`hosts_available`) the ranks run on one host with the same variables, and a printed line
        says so.
    link : str, optional
        Rate of each host's link in each direction, such as ``"100mbit"`` (kbit, mbit or gbit). Default: no limit.
    fault : str, optional
        What is broken between the hosts: ``"cable pulled"``, ``"port closed"``, ``"only one port open"``,
        ``"wrong name"``, ``"unknown name"``, ``"wrong address"``, ``"wrong interface"`` or ``"slow cable"``, a third
        of ``link``. The ranks have half of
        ``timeout`` to make their process group, so that PyTorch's error comes before :class:`HangError`; with
        ``init=False`` the time-out is that of the program.
    verify : bool
        Compare what the ranks of a group pass to each operation: its name, reduction, root, dtype, shapes and tag, in
        the group's order, and refuse the first difference, also one that gloo and NCCL do not notice. Ranks that can
        never go on are told at once. It costs some microseconds an operation.
    post_mortem : bool
        When a rank raises an exception, open pdb there in the cell's prompt, with the variables of its functions. The
        other ranks stand where they are. ``q`` goes on to the :class:`WorkerError`. Where nobody can answer, as under
        papermill, pdb does not open.
    by_rank : bool
        Show what the ranks print as always, and then a fold for each rank with all its own text, figures and tables.
    on : {"ray", "here"}, optional
        With ``"ray"`` the ranks run on the nodes of a Ray cluster that there is, found by ``RAY_ADDRESS`` or on this
        machine: one CPU a rank, with NCCL one GPU, as few nodes as possible, LOCAL_RANK and the like as ``torchrun``
        sets them, 4 ranks if nothing says how many. They keep their places while they are warm. Default: environment
        variable ``COURSE_ON``, else the notebook's own machine. ``hosts``, ``verify`` and ``%%ranks`` are only there.

    ``breakpoint()`` and ``input()`` ask in the cell's prompt too, which names the rank. No time-out runs meanwhile; the
    stop button ends the call.
    A function cannot have keyword arguments with these names; ``launch`` takes them for its own.
    Ranks with an even number share one hash seed, the others another, and both change from kernel to kernel, so what
    relies on the order of a set goes wrong as it does under ``torchrun``. ``PYTHONHASHSEED`` gives all ranks one.

    Returns
    -------
    list
        Results by rank; tensors are on the CPU. With ``hosts`` its attribute ``left_host`` has the bytes that left each
        host.

    Raises
    ------
    WorkerError
        A rank raised an exception or died: the first cause, and where the others stood.
    HangError
        No result in time: where each rank waits, and the likely fault.
    MismatchError
        With ``verify``: ranks passed different things to one operation, or one rank left it out.
    TypeError, ValueError
        Arguments that cannot be sent or make no sense; nothing has run then.
    RuntimeError
        A fault was asked for where hosts cannot be emulated.
    """
    wanted = {"hosts": hosts, "link": link, "fault": fault}
    flags = {"verify": verify, "post_mortem": post_mortem, "by_rank": by_rank}
    return run(fn, args, kwargs, world_size, timeout, backend, init, hosts=wanted, on=on, **flags)


def run(
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    world_size: int | None = None,
    timeout: float = 60.0,
    backend: str | None = None,
    init: bool = True,
    watch: Any = None,
    hosts: dict[str, Any] | None = None,
    on: str | None = None,
    **flags: bool,
) -> list[Any]:
    """As :func:`launch`, with what concerns hosts in one dictionary, and ``verify``, ``post_mortem``, ``by_rank``.

    With a ``watch`` (see `watch`) ranks that cannot finish are told before the time-out.
    """
    from . import serialization

    if pool is None:
        raise errors.refusal(
            RuntimeError, "launch was called on a rank; ranks cannot start ranks. Call it from the notebook."
        )
    if not callable(fn):
        raise errors.refusal(
            TypeError,
            f"launch takes a function to run on every rank, not {type(fn).__name__}: write launch(fn, *args), "
            "without brackets behind fn",
        )
    for name, value in ({"init": init} | flags).items():
        if not isinstance(value, bool):
            raise errors.refusal(TypeError, f"{name} is True or False, not {value!r}")
    asked = {name: value for name, value in (hosts or {}).items() if value is not None}
    cluster = cluster_ranks(on, [*asked, *["verify"] * flags.get("verify", False)])
    if cluster and world_size is None and not os.environ.get("COURSE_WORLD_SIZE"):
        world_size = _DEFAULT_WORLD_SIZE  # a cluster's GPUs are not all for one notebook
    world_size, backend = settle(world_size, backend or "gloo" if asked else backend, cluster and cluster.gpu_count())
    try:
        plan = _plan_of_hosts(asked, world_size, backend) if asked else None
        body = serialization.pack_call(fn, args, kwargs)
        kind = FUNCTION if init else PROGRAM
        call = pool.Call(body, world_size, backend, seconds(timeout), kind, show=show, watch=watch, hosts=plan,
                         **flags)
        return _run_on_hosts(call) if plan is not None else (cluster or _launched).run(call)
    except KeyboardInterrupt as error:
        if isinstance(error, errors.Interrupted):
            raise
        raise errors.Interrupted([]) from None


def cluster_ranks(on: str | None, here: list[str]) -> Any:
    """The ranks of a cluster if the call is to run there, else None. What the list names needs this machine."""
    if on is None and os.environ.get("COURSE_ON", "here") == "here":
        return None
    from . import on_ray

    return on_ray.pool_for(on, here)


def emulation() -> Any:
    """What emulates hosts: its code lives with lesson 16."""
    return importlib.import_module(_EMULATION)


def _plan_of_hosts(asked: dict[str, Any], world_size: int, backend: str) -> Any:
    """How ranks are divided among hosts, as far as that can be emulated here."""
    if "hosts" not in asked:
        raise errors.refusal(ValueError, f"{next(iter(asked))} is about the link between hosts; say how many: hosts=2")
    if backend == "nccl":
        raise errors.refusal(ValueError, "emulated hosts use gloo on the CPU: leave out backend, or use backend='gloo'")
    hosts = emulation()
    return hosts.as_possible(hosts.divide(world_size=world_size, **asked))


def _run_on_hosts(call: Any) -> list[Any]:
    hosts = emulation()
    if not call.hosts.emulated:
        return hosts.HostResults(_launched.run(call), None)
    ranks = hosts.current()
    return hosts.HostResults(ranks.run(call), ranks.left_host)


def on_a_rank() -> bool:
    """Whether this process is a rank, which cannot start ranks."""
    return pool is None


def shutdown() -> None:
    """Stop all ranks that ``launch`` keeps warm. The next call starts new ones."""
    if pool is not None:
        _launched.stop()
        for elsewhere in (f"{_EMULATION}.pool", f"{__package__}.ray_pool"):
            if elsewhere in sys.modules:
                sys.modules[elsewhere].launched.stop()


def device():
    """The device of this rank: its GPU under NCCL, else the CPU.

    Under ``torchrun`` a rank that has chosen no GPU takes the one of its LOCAL_RANK, among those that it sees.
    """
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl"):
        return torch.device("cpu")
    if torch.cuda.current_device() == 0:  # as every process begins; with launch, a rank is on its GPU already
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def gpu_count() -> int:
    """Number of GPUs that PyTorch can use, found without initialising CUDA."""
    if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return 0
    import torch

    return torch.cuda.device_count()


def settle(world_size: int | None, backend: str | None, gpus: int | None = None) -> tuple[int, str]:
    """Check and complete world size and backend, for so many ``gpus`` or those of this machine.

    Raises ValueError or TypeError with the allowed values.
    """
    gpus = gpu_count() if gpus is None else gpus
    source = "world_size"
    if world_size is None:
        text = os.environ.get("COURSE_WORLD_SIZE")
        source = "COURSE_WORLD_SIZE" if text else source
        if text and not text.strip().isdigit():
            raise errors.refusal(
                ValueError, f"COURSE_WORLD_SIZE is {text!r}; allowed are whole numbers from 1 to {_MAX_WORLD_SIZE}"
            )
        world_size = int(text) if text else (gpus if gpus > 1 else _DEFAULT_WORLD_SIZE)
    if isinstance(world_size, bool) or not isinstance(world_size, Integral):
        raise errors.refusal(
            TypeError, f"world_size is a whole number of ranks, not {type(world_size).__name__}: {world_size!r}"
        )
    world_size = int(world_size)
    if not 1 <= world_size <= _MAX_WORLD_SIZE:
        raise errors.refusal(ValueError, f"{source} is {world_size}; allowed are 1 to {_MAX_WORLD_SIZE} ranks")
    if backend not in (None, "gloo", "nccl"):
        raise errors.refusal(
            ValueError, f"backend is {backend!r}; allowed are 'gloo' (CPU), 'nccl' (one GPU a rank) and None (choose)"
        )
    if backend == "nccl" and world_size > gpus:
        there = "no GPU" if gpus == 0 else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        raise errors.refusal(
            ValueError,
            f"NCCL needs one GPU for each of {world_size} ranks, and there {'are' if gpus > 1 else 'is'} {there}. "
            f"Use backend='gloo'{f' or world_size <= {gpus}' if gpus else ''}.",
        )
    if backend is None:
        backend = "nccl" if gpus >= world_size else "gloo"
        if 0 < gpus < world_size and (world_size, gpus) not in _announced:
            _announced.add((world_size, gpus))
            there = f"{gpus} GPU{'s' * (gpus > 1)}"
            print(f"{world_size} ranks and {there}: too few for NCCL, so the ranks use gloo on the CPU")
    return world_size, backend


def seconds(timeout: float) -> float:
    """Check a timeout. Raises TypeError or ValueError."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise errors.refusal(TypeError, f"timeout is a number of seconds, not {type(timeout).__name__}: {timeout!r}")
    if not 0 < timeout < 86400:
        raise errors.refusal(ValueError, f"timeout is {timeout!r}; allowed are seconds above 0 and below one day")
    return float(timeout)


def show(item: str | dict) -> None:
    """Show merged output of the ranks: text, or a MIME bundle where there is a notebook."""
    if isinstance(item, str):
        print(item, end="", flush=True)
    elif "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        from IPython.display import display

        display(item, raw=True)
    else:
        print(item["text/plain"], flush=True)
