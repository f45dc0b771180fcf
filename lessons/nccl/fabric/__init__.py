"""Emulated links: point-to-point messages between real ranks, timed as the links of a topology would carry them.

The messages are real. Beside them each rank logs what it does (sends and waits), and at the end of a block every rank
replays the logs of all in the order of emulated time. The result therefore depends on the program and the topology
alone, not on the speed of the machine or on which rank came first.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from unittest.mock import patch

import torch.distributed as dist

from course_utils.ranks import interceptor
from course_utils.torch_internals import default_store

from .race import emulated_seconds, slow_motion
from .replay import ARRIVED, SEND, SENT, Replay

__all__ = ["Clock", "emulate", "emulated_seconds", "slow_motion"]


class Clock:
    """What this rank does in a block, and `seconds`: its emulated time at the end of it."""

    def __init__(self):
        self.seconds = 0.0
        self.log: list[tuple] = []  # kind, peer, and what tells a message apart: group, tag, number; bytes of a send
        self._rank, self._counts = dist.get_rank(), Counter()

    def issue(self, kind: int, method, group, tensors, peer: int, tag: int) -> _Request:
        """Hand a send or receive on to PyTorch; what comes back tells this clock when it is waited for."""
        other = dist.get_global_rank(group, peer)
        if other == self._rank:
            raise ValueError(f"rank {other} sends to itself: emulated links join different ranks")
        work = method(group, tensors, peer, tag)
        what = other, group.group_name, tag
        number = self._counts[kind, what]
        self._counts[kind, what] += 1
        if kind == SENT:
            self.log.append((SEND, *what, number, sum(tensor.nbytes for tensor in tensors)))
        return _Request(work, self, (kind, *what, number, 0))


class _Request:
    """A request of PyTorch whose `wait` is logged; the rest is handed on."""

    def __init__(self, work, clock: Clock, what: tuple):
        self._work, self._clock, self._what = work, clock, what

    def wait(self, *args, **kwargs):
        self._clock.log.append(self._what)
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str):
        return getattr(self._work, name)


def _logs_of_all(log: list[tuple]) -> list[list]:
    """The logs of all ranks, exchanged over the store, for messages would be seen by who counts them."""
    store, rank, n = default_store(), dist.get_rank(), dist.get_world_size()
    block = f"lessons.nccl.fabric/{store.add(f'lessons.nccl.fabric/rank {rank}', 1)}"
    store.set(f"{block}/{rank}", json.dumps(log))
    return [json.loads(store.get(f"{block}/{other}")) for other in range(n)]


@contextlib.contextmanager
def emulate(topology) -> Iterator[Clock]:
    """Time the messages inside the block as the links of `topology` would carry them; yields a :class:`Clock`.

    Every rank of the world enters, with the same topology; rank r is ``topology.gpus[r]``. Code inside is
    unchanged: ``send``, ``recv``, ``isend``, ``irecv`` and ``batch_isend_irecv`` of :mod:`torch.distributed`, on
    any group, with gloo, on the CPU. Clocks start at 0. A message may start when the sender's clock has reached the
    call and each link of the path is free in its direction, where it stays for its bytes / bandwidth. It leaves
    within bytes / bandwidth of the slowest link and arrives the path's latency later. A wait moves the clock: the
    sender's to when the last byte has left, the receiver's to the arrival. All else takes no emulated time.
    """
    if unknown := [link for link in topology.links if not link.bandwidth > 0]:
        raise ValueError(f"emulate() needs the bytes/s of every link; for {unknown[0]} it has {unknown[0].bandwidth}")
    interceptor.install()
    clock, group_class, begin = Clock(), dist.ProcessGroup, interceptor._begin
    plain_send, plain_recv = group_class.send, group_class.recv

    def send(group, tensors, peer, tag):
        return clock.issue(SENT, plain_send, group, tensors, peer, tag)

    def recv(group, tensors, peer, tag):
        return clock.issue(ARRIVED, plain_recv, group, tensors, peer, tag)

    def recv_anysource(group, tensors, tag):
        raise ValueError("a receive inside emulate() names its source: recv(tensor, src=...)")

    def refuse(op, *args):
        if op not in ("send", "recv"):
            raise RuntimeError(
                f"{op} inside emulate(): emulated time counts point-to-point messages only. Build it from send, recv, "
                "isend, irecv or batch_isend_irecv, or call it before or after the block."
            )
        return begin(op, *args)

    ours = {"send": send, "recv": recv, "recv_anysource": recv_anysource}
    with patch.multiple(group_class, **ours), patch.object(interceptor, "_begin", refuse):
        yield clock
    clock.seconds = Replay(topology, _logs_of_all(clock.log)).clock[dist.get_rank()]
