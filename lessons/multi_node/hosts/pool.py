"""Ranks on emulated hosts: a pool whose ranks start together with their hosts, meet over them, and end with them."""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TypeVar

from course_utils.ranks import errors, processes, serialization
from course_utils.ranks.pool import Call, Pool
from course_utils.ranks.processes import Worker

from .network import Hosts, HostsError
from .plan import PORT

T = TypeVar("T")

#: The native stacks that PyTorch prints below its errors of connections: twenty lines, all of them from its inside.
_LABEL = r"\[ranks? [\d,-]+\]"
_FRAME = r"(?:frame #\d+: |<omitting python frames>|Exception raised from ).*"
_STACK = re.compile(rf"(?:{_LABEL} {_FRAME}\n)+(?:{_LABEL} *\n)?")


def _without_native_stacks(show: Callable[[str | dict], None]) -> Callable[[str | dict], None]:
    def show_rest(item: str | dict) -> None:
        rest = item if isinstance(item, dict) else _STACK.sub("", item)
        if rest:
            show(rest)

    return show_rest


def _nothing() -> None:
    """What ranks run to make their process group."""


class HostPool(Pool):
    """Ranks on the hosts of one plan, kept warm for calls with the same plan; else hosts and ranks are made anew."""

    def __init__(self):
        super().__init__()
        self.hosts: Hosts | None = None
        self.left_host: list[int] = []  # bytes, in the last call

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self.hosts is not None and self.pid == os.getpid():
                self.hosts.close()
                self.hosts = None

    def _end(self, ranks: list[int]) -> None:
        """End all, if any: who is left would have nobody to talk to."""
        super()._end(list(self.workers) if ranks else [])

    def _end_unfit(self, call: Call) -> None:
        super()._end_unfit(call)
        hosts = self.hosts
        same = hosts is not None and hosts.alive and hosts.plan == call.hosts and self.group == call.group
        if not same or len(self.workers) < call.world_size:
            self.close()

    def _start_workers(self, call: Call, missing: list[int]) -> None:
        self.hosts = Hosts(call.hosts, processes.server_folder())
        for rank in missing:
            self.workers[rank] = Worker(rank, self.hosts.pids[call.hosts.host(rank)])

    def _choose_meeting(self) -> None:
        super()._choose_meeting()
        self.port = PORT

    def _run(self, call: Call) -> list:
        try:
            return super()._run(replace(call, show=_without_native_stacks(call.show)))
        except HostsError as error:
            raise errors.refusal(RuntimeError, str(error)) from None

    def _make_group(self, call: Call, ranks: list[int], folder: str) -> None:
        """Make the group before the call, so that what it costs is not counted."""
        if not call.kind.is_program:
            body = serialization.pack_call(_nothing, (), {})
            first = Call(body, call.world_size, call.backend, call.timeout, show=call.show, hosts=call.hosts)
            self._serve(first, ranks, folder)

    def _serve(self, call: Call, ranks: list[int], folder: str) -> dict[int, bytes | None]:
        before = self.hosts.left()
        results = super()._serve(call, ranks, folder)
        if self.hosts is not None:
            self.hosts.settle()
            self.left_host = [now - then for now, then in zip(self.hosts.left(), before, strict=True)]
        return results


launched = HostPool()  # the ranks of ``launch`` that are on hosts
atexit.register(launched.close)
_of_thread = threading.local()


def current() -> HostPool:
    """The pool for a call: that of ``launch``, or this thread's own within `side_by_side`."""
    return getattr(_of_thread, "pool", launched)


def side_by_side(works: Sequence[Callable[[], T]], most: int = 8) -> list[T]:
    """What functions return that start ranks on hosts: `most` at a time, in threads, each with hosts of its own.

    It is for programs that wait more than they compute. An error is raised when all have ended; an interrupt ends all.
    """
    pools: list[HostPool] = []

    def apart(work: Callable[[], T]) -> T:
        _of_thread.pool = HostPool()
        pools.append(_of_thread.pool)
        try:
            return work()
        finally:
            _of_thread.pool.close()

    with ThreadPoolExecutor(most) as threads:
        futures = [threads.submit(apart, work) for work in works]
        try:
            wait(futures)
        except KeyboardInterrupt:
            for future in futures:
                future.cancel()
            while wait(futures, 0.1).not_done:  # a thread notices that its ranks have ended, and tidies up
                for pool in pools:
                    processes.kill(list(pool.workers.values()))
            raise errors.Interrupted([]) from None
        return [future.result() for future in futures]
