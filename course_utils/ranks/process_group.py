"""The process group of a rank: how it meets the others, and what must be true before each call."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist

from ..torch_internals import forget_process_groups, open_groups, replace_rendezvous
from .intercept import interceptor
from .state import state

_NEVER = timedelta(days=1)  # it is the launcher that watches the time


def install() -> None:
    """Let this rank meet others in the way of `_rendezvous`."""
    replace_rendezvous(_rendezvous, _barrier_after_init)


def _rendezvous(url: str, timeout: timedelta = timedelta(minutes=30), **_ignored):
    """``env://`` as PyTorch defines it, but meeting in a file of the private folder.

    A TCP store would listen where other users can reach it, and each of its clients has the name server look up
    127.0.0.1 for a line in its log, which takes 5 s where none answers.
    """
    state.rendezvous += 1
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        dist.set_debug_level_from_env()
    state.meeting = True
    if state.meeting_limit is not None:
        yield from _meet_over_hosts(url, timeout)
        return
    file = dist.FileStore(state.store, -1)
    file.set_timeout(timeout)
    store = dist.PrefixStore(f"call {state.call}.{state.rendezvous}", file)
    yield store, *_place(url)
    raise RuntimeError("this rendezvous is over")


def _place(url: str) -> tuple[int, int]:
    """Rank and world size: what ``init_process_group`` was given comes before the variables."""
    given = dict(parse_qsl(urlsplit(url).query))
    return int(given.get("rank", os.environ["RANK"])), int(given.get("world_size", os.environ["WORLD_SIZE"]))


def _meet_over_hosts(url: str, timeout: timedelta):
    """Meet as without this course, in a TCP store of rank 0's: whether hosts reach each other is the question."""
    rank, world_size = _place(url)
    url = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}?rank={rank}&world_size={world_size}"
    yield from dist.rendezvous(url, timeout=min(timeout, state.meeting_limit))


def _barrier_after_init(usual: Callable[[], int]) -> int:
    """Let all ranks leave ``init_process_group`` together if they have met in the file: one that went on and left would
    break the connection that another is still making. ``new_group`` asks too, and there the learner's setting counts.
    """
    meeting, state.meeting = state.meeting, False
    return int(meeting) or usual()


def drop() -> None:
    """Destroy all process groups, also half-made ones, and what libraries remember of them.

    NCCL's end by all ranks together, with nothing under way: the notebook sees to it (`Pool`).
    """
    state.generation = None
    groups = open_groups()  # noqa: F841  whose end comes last, without Python's lock
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_process_groups()


def settled() -> bool:
    """Whether nothing is under way in any group, and the GPU still serves this process."""
    interceptor.settle()
    end = time.monotonic() + 1
    while torch.cuda.is_initialized() and interceptor.unfinished() and time.monotonic() < end:
        time.sleep(0.001)  # a GPU is behind the function that has returned
    if torch.cuda.is_initialized() and not interceptor.unfinished():
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # after an illegal address, say, every call fails, until the process ends
            return False
    return not interceptor.unfinished()


def _torchrun_names(world_size: int, port: int, program: bool, hosts: dict | None) -> dict[str, str]:
    """The variables that ``torchrun`` sets, all of them for a program that calls ``init_process_group`` itself."""
    rank, size = str(state.rank), str(world_size)
    count, address = (hosts["count"], hosts["address"]) if hosts else (1, "127.0.0.1")
    if hosts and "places" in hosts:  # on a cluster, where nodes may have different numbers of ranks
        group, local, each = hosts["places"][state.rank]
    else:
        each = world_size // count
        group, local = divmod(state.rank, each)
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(each)}
    names |= {"GROUP_RANK": str(group), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    names |= {"GROUP_WORLD_SIZE": str(count)}
    if program:
        names |= {"ROLE_RANK": rank, "ROLE_WORLD_SIZE": size, "ROLE_NAME": "default"}
        names |= {f"TORCHELASTIC_{what}": value for what, value in (
            ("RUN_ID", "none"), ("RESTART_COUNT", "0"), ("MAX_RESTARTS", "0"))}
    return names


def _name_interface(interface: str | None) -> None:
    """Tell gloo and NCCL which interface to use, or leave it to them."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if interface is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = interface


def prepare(header: dict) -> None:
    """Set the variables of the environment and the GPU, and make the default group anew if it has to be."""
    world_size = header["world_size"]
    program = header["kind"].is_program
    if program:
        multiprocessing.set_start_method(None, force=True)  # as in a process of its own: not chosen yet
    hosts = header["hosts"]
    os.environ.update(_torchrun_names(world_size, header["port"], program, hosts))
    state.meeting_limit = None
    if hosts and "interface" in hosts:
        _name_interface(hosts["interface"])
    if hosts and hosts["network"]:
        # half the time: where ranks cannot meet, PyTorch's own error comes before the launcher's
        state.meeting_limit = _NEVER if program else timedelta(seconds=header["timeout"] / 2)
    state.store, state.meeting = header["store"], False
    if header["backend"] == "nccl":
        torch.cuda.set_device(gpu := int(os.environ["LOCAL_RANK"]))
    elif not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not program and state.generation == header["generation"] and dist.is_initialized():
        return
    drop()
    if not program:
        device = torch.device("cuda", gpu) if header["backend"] == "nccl" else None
        dist.init_process_group(header["backend"], timeout=_NEVER, device_id=device)
        state.generation = header["generation"]
