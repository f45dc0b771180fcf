"""Emulated links: point-to-point messages between real ranks, timed as the links of a topology would carry them.

The messages are real. Beside them each rank logs what it does (sends and waits) in a small file that all share, and
whoever asks for the time replays the logs in the order of emulated time. The result therefore depends on the program
and the topology alone, not on the speed of the machine or on which rank came first.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator

import torch.distributed as dist

from course_utils.ranks import interceptor
from course_utils.torch_internals import default_store

from .race import emulated_seconds, slow_motion
from .replay import ARRIVED, LEAVE, RECORD, SEND, SENT, Replay

__all__ = ["Clock", "emulate", "emulated_seconds", "slow_motion"]

_PAUSES = 20e-6, 2e-3  # shortest and longest, in seconds, between two looks at the shared file


class Clock:
    """Emulated time of this rank."""

    def __init__(self, topology, slowdown: float):
        self._slowdown = slowdown
        self._rank, n = dist.get_rank(), dist.get_world_size()
        self._file = _shared_file(self._rank, n)
        self._close = weakref.finalize(self, os.close, self._file)
        self._replay = Replay(topology, n)
        self._read, self._seconds = 0, 0.0
        self._counts: Counter = Counter()
        self._begin, self._left, self._ended = time.monotonic(), False, False

    @property
    def seconds(self) -> float:
        """Emulated seconds at which this rank got where it is in its program.

        Asking may wait for ranks that lag behind in real time, since what they send may yet compete for a link.
        """
        if not self._close.alive:
            return self._seconds
        pause, longest = _PAUSES
        while not self._catch_up():
            time.sleep(pause)
            pause = min(2 * pause, longest)
        self._seconds = self._replay.clock[self._rank]
        if self._ended:
            self._close()
        return self._seconds

    def _catch_up(self) -> bool:
        """Replay what has been logged; whether that tells this rank's time, all of it."""
        while whole := len(block := os.pread(self._file, 2048 * RECORD.size, self._read)) // RECORD.size:
            for i in range(whole):
                self._replay.add(block[i * RECORD.size : (i + 1) * RECORD.size])
            self._read += whole * RECORD.size
        self._replay.advance()
        return not self._replay.todo[self._rank]

    def _log(self, kind: int, peer: int = 0, channel: int = 0, number: int = 0, tag: int = 0, size: int = 0):
        if not self._ended:  # each write appends all of its bytes at once, also where others write
            os.write(self._file, RECORD.pack(kind, self._rank, peer, channel, number, tag, size))

    def _leave(self) -> None:
        if not self._left:
            self._left = True
            self._log(LEAVE)

    def _stop(self) -> None:
        self._leave()
        self._ended = True

    def _pace(self, whole: bool = False) -> None:
        """Sleep up to the emulated time known so far; only the end is `whole`, for there no rank waits for this one."""
        if self._slowdown and not self._ended:
            self._catch_up()
            seconds = self.seconds if whole else self._replay.clock[self._rank]
            time.sleep(max(0.0, self._begin + seconds * self._slowdown - time.monotonic()))

    def _issue(self, kind: int, method, group, tensors, peer: int, tag: int) -> _Request:
        """Hand a send or receive on to PyTorch; what comes back tells this clock when it is waited for."""
        other = dist.get_global_rank(group, peer)
        if other == self._rank:
            raise ValueError(f"rank {other} sends to itself: emulated links join different ranks")
        work = method(group, tensors, peer, tag)
        channel = zlib.crc32(group.group_name.encode())
        number = self._counts[kind, other, channel, tag]
        self._counts[kind, other, channel, tag] += 1
        if kind == SENT:
            self._log(SEND, other, channel, number, tag, sum(tensor.nbytes for tensor in tensors))
        return _Request(work, self, (kind, other, channel, number, tag))


class _Request:
    """A request of PyTorch whose `wait` moves the clock; the rest is handed on."""

    def __init__(self, work, clock: Clock, what: tuple):
        self._work, self._clock, self._what = work, clock, what

    def wait(self, *args, **kwargs):
        self._clock._log(*self._what)
        result = self._work.wait(*args, **kwargs)
        self._clock._pace()
        return result

    def __getattr__(self, name: str):
        return getattr(self._work, name)


def _shared_file(rank: int, n: int) -> int:
    """Open the file of this block, which rank 0 makes and the last rank to open it unlinks."""
    store = default_store()
    name = f"lessons.nccl.fabric/block {store.add(f'lessons.nccl.fabric/rank {rank}', 1)}"
    if rank == 0:
        made, path = tempfile.mkstemp(prefix="fabric-")
        os.close(made)
        store.set(name, path)
    path = store.get(name).decode()
    file = os.open(path, os.O_RDWR | os.O_APPEND)
    if store.add(f"{name}/open", 1) == n:
        os.unlink(path)
    return file


@contextlib.contextmanager
def emulate(topology, slowdown: float = 0.0) -> Iterator[Clock]:
    """Time the messages inside the block as the links of `topology` would carry them; yields a :class:`Clock`.

    Every rank of the world enters, with the same topology; rank r is ``topology.gpus[r]``. Code inside is
    unchanged: ``send``, ``recv``, ``isend``, ``irecv`` and ``batch_isend_irecv`` of :mod:`torch.distributed`, on
    any group, with gloo, on the CPU. Clocks start at 0. A message may start when the sender's clock has reached the
    call and each link of the path is free in its direction, where it stays for its bytes / bandwidth. It leaves
    within bytes / bandwidth of the slowest link and arrives the path's latency later. A wait moves the clock: the
    sender's to when the last byte has left, the receiver's to the arrival. All else takes no emulated time. With a
    `slowdown` above 0 waits and the end of the block also sleep, so that an emulated second lasts at least so many
    real ones.
    """
    if unknown := [link for link in topology.links if not link.bandwidth > 0]:
        raise ValueError(f"emulate() needs the bytes/s of every link; for {unknown[0]} it has {unknown[0].bandwidth}")
    clock = Clock(topology, slowdown)
    interceptor.install()
    put_back = _listen(clock)
    try:
        yield clock
        clock._leave()
        clock._pace(whole=True)
    finally:
        try:
            put_back()
        finally:  # the launcher may interrupt the first attempt
            put_back()


def _listen(clock: Clock) -> Callable[[], None]:
    """Let `clock` see the messages of this process; return how to undo that, as often as one likes."""
    group_class = dist.ProcessGroup
    plain_send, plain_recv, begin = group_class.send, group_class.recv, interceptor._begin

    def send(group, tensors, peer, tag):
        return clock._issue(SENT, plain_send, group, tensors, peer, tag)

    def recv(group, tensors, peer, tag):
        return clock._issue(ARRIVED, plain_recv, group, tensors, peer, tag)

    def recv_anysource(group, tensors, tag):
        raise ValueError("a receive inside emulate() names its source: recv(tensor, src=...)")

    def refuse(op, *args):
        if op not in ("send", "recv"):
            raise RuntimeError(
                f"{op} inside emulate(): emulated time counts point-to-point messages only. Build it from send, recv, "
                "isend, irecv or batch_isend_irecv, or call it before or after the block."
            )
        return begin(op, *args)

    ours = [(group_class, method.__name__, method) for method in (send, recv, recv_anysource)]
    ours.append((interceptor, "_begin", refuse))
    before = [(place, name, vars(place).get(name, begin)) for place, name, _ in ours]

    def put_back() -> None:
        for place, name, value in before:
            setattr(place, name, value)
        clock._stop()

    for place, name, value in ours:
        setattr(place, name, value)
    return put_back
