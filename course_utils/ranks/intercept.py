"""Sees every operation that PyTorch issues on any process group, and notes it in ledgers (private).

All communication of ``torch.distributed`` passes through the operators of the ``c10d`` dispatcher library, whether
Python calls them or DDP and FSDP do from C++. A kernel is put in front of each, at the ``BackendSelect`` key, which is
always active; it notes the call and hands it on unchanged.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator

from .call_signature import Passed, flatten, passed, passed_exactly, reduction_name
from .learner_code import is_learner
from .ledger import Entry, Ledger
from .witnesses import OnStream, Silent, witness

__all__ = ["interceptor", "record"]

_NAMES = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "allgather_": "all_gather",
    "_allgather_base_": "all_gather", "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "alltoall_": "all_to_all", "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast", "reduce_": "reduce", "gather_": "gather", "scatter_": "scatter",
    "barrier": "barrier", "monitored_barrier_": "barrier",
    "send": "send", "recv_": "recv", "recv_any_source_": "recv",
}
_POINT_TO_POINT = ("send", "recv")
_NO_SUCH_RANK = "{op}: there is no rank {peer}, the group has ranks 0 to {last}"  # gloo would hang or crash
_SECOND_ARGUMENT = ("reduce_scatter", "all_to_all")  # the message is their input, which comes second
_GROUPS = "new groups"  # the key of the calls of new_group
_KEEP_PENDING = 64
_KEEP_SIGNATURES = 100_000


@contextlib.contextmanager
def record() -> Iterator[Ledger]:
    """Record what this rank communicates inside the ``with`` block; yields a :class:`Ledger`.

    The ledger is complete when the block ends; asynchronous operations still under way then have ``end`` None until
    they complete. It may be returned from a rank. Blocks can be nested.
    """
    interceptor.install()
    ledger = Ledger()
    interceptor.recorders.append(ledger)
    try:
        yield ledger
    finally:
        interceptor.recorders.remove(ledger)
        interceptor.settle()


class Interceptor:
    """The kernels in front of the c10d operators, and what is known of this rank's communication at any moment."""

    def __init__(self):
        self.library = None
        self.recorders: list[Ledger] = []
        self.status = None  # a memory map that outlives this process, for the parent to read
        self.announce: Callable | None = None  # told what each operation passes, before it begins
        self.reset()

    def reset(self) -> None:
        """Forget the past; called before each function that the launcher runs."""
        self.numbers: dict[str, int] = {}
        self.last: Entry | None = None
        self.latest: dict[str, Entry] = {}
        self.inside: Entry | None = None
        self.pending: deque = deque(maxlen=_KEEP_PENDING)
        # Groups outlive the function that destroys them. If DDP had the last reference, gloo's threads would be joined
        # while Python's lock is held, and a thread that lets go of a barrier's Work waits for that lock for ever.
        self.groups: dict[str, object] = {}
        self.sent = 0
        self.received = 0
        self.streams: dict[tuple, int] = {}  # messages begun, by operation, group, peer and tag
        self.signatures: dict[str, list[Passed]] = {}  # of each group: what all its ranks must pass alike, call by call
        self.digests: dict[str, int] = {}  # the same in one number
        self.aliased = ""  # the first operation of which outputs are the same memory
        if self.status is not None:
            self.status[:4] = bytes(4)

    def install(self) -> None:
        """Put the kernels in place (once per process)."""
        if self.library is not None:
            return
        import torch
        import torch.distributed as dist

        from .. import torch_internals
        self._group = dist.ProcessGroup.unbox
        self._work = torch_internals.unbox_work
        self._ranks = dist.get_process_group_ranks
        self._keys_of = torch_internals.dispatch_keys
        self._after = torch_internals.keys_after_backend_select()
        self._script_object = torch.ScriptObject
        self._capturing = torch.cuda.is_current_stream_capturing
        self.library = torch.library.Library("c10d", "IMPL")
        self._undo = torch_internals.before_each_new_group(self._new_group)
        for name, op in _NAMES.items():
            self.library.impl(name, self._kernel(op, getattr(torch.ops.c10d, name).default), "BackendSelect")

    def uninstall(self) -> None:
        """Take the kernels out again (benchmarks compare with and without)."""
        if self.library is not None:
            self.library._destroy()
            self._undo()
            self.library = None

    def _kernel(self, op: str, operator):
        names = [argument.name for argument in operator._schema.arguments]
        group_at = names.index("process_group")
        peer_at = next((names.index(n) for n in ("root_rank", "dst", "src") if n in names), None)
        message_at = 1 if op in _SECOND_ARGUMENT else 0
        asynchronous_at = names.index("async_op") if "async_op" in names else None
        tag_at = names.index("tag") if "tag" in names else None
        reduces_at = names.index("reduce_op") if "reduce_op" in names else None
        name = operator._schema.name.removeprefix("c10d::")
        shards = op in ("gather", "scatter")

        def kernel(*args):
            tensors = list(flatten(args[1 if op == "gather" else message_at]))
            first = tensors[0] if tensors else next(flatten(args[:2]))
            group = self._group(args[group_at])
            peer = None if peer_at is None else args[peer_at]
            if op in _POINT_TO_POINT and peer is not None and not 0 <= peer < group.size():
                raise ValueError(_NO_SUCH_RANK.format(op=op, peer=peer, last=group.size() - 1))
            size = 0 if op == "barrier" else sum(map(_bytes, tensors))
            dtype = "" if op == "barrier" else str(first.dtype).removeprefix("torch.")
            entry = self._begin(op, group, size * (group.size() if shards else 1), peer, dtype)
            if name in ("allgather_", "gather_", "alltoall_"):  # whose first argument is a list of outputs
                self._look_at_outputs(entry, flatten(args[0]))
            reduction = "" if reduces_at is None else reduction_name(args[reduces_at])
            if tag_at is not None:
                self._count(entry, group.group_name, args[tag_at])
            if self.announce is not None:
                self._sign(entry, passed_exactly(entry, name, args, reduction))
            elif tag_at is None:
                self._sign(entry, passed(op, reduction, entry.peer, dtype, size))
            try:
                result = operator.redispatch(self._keys_of(first) & self._after, *args)
            finally:
                self.inside = None
            work = result[-1] if isinstance(result, tuple) else result
            if first.device.type == "cpu" and isinstance(work, self._script_object):
                self.groups[group.group_name] = group
                asynchronous = asynchronous_at is None or len(args) <= asynchronous_at or args[asynchronous_at]
                self._issued(entry, witness(op, self._work(work), asynchronous))
            else:
                entry.end = time.monotonic()
                if isinstance(work, self._script_object):
                    self._queued(entry, self._work(work), first.device)
            return result

        return kernel

    def _begin(self, op: str, group, size: int, peer: int | None, dtype: str) -> Entry:
        ranks = tuple(self._ranks(group)) if group.size() > 0 else ()
        name, description = group.group_name, group.group_desc
        key = "p2p" if op in _POINT_TO_POINT else f"{name}|{ranks}"
        self.numbers[key] = number = self.numbers.get(key, 0) + 1
        named = "default" if description == "default_pg" else description
        label = "ranks " + ",".join(map(str, ranks)) if named in ("", "undefined") else named
        peer = ranks[peer] if peer is not None and 0 <= peer < len(ranks) else None
        entry = Entry(op, label, size, peer, ranks, number, time.monotonic(), None, self._caller(), key, dtype=dtype,
                      rank=ranks[group.rank()] if ranks else None)
        if op == "send":
            self.sent += 1
        elif op == "recv":
            self.received += 1
        else:
            self.latest[key] = entry
        self.last = self.inside = entry
        for ledger in self.recorders:
            ledger.entries.append(entry)
        if self.status is not None:
            said = op, label, size, peer, ranks, number, entry.where, dtype
            text = json.dumps(said).encode()[: len(self.status) - 4]
            self.status[: 4 + len(text)] = len(text).to_bytes(4, "little") + text
        return entry

    def _new_group(self, ranks: list[int], everybody: tuple[int, ...]) -> None:
        """Note that this rank makes a group; all ranks have to make the same ones, in the same order."""
        number, now = 1 + len(self.signatures.get(_GROUPS, ())), time.monotonic()
        entry = Entry(f"new_group({ranks})", _GROUPS, 0, None, everybody, number, now, now, self._caller(), _GROUPS)
        self._sign(entry, passed(entry.op, "", None, "", 0))

    def made(self) -> list[str]:
        """The groups that this rank has made, in words, the one that it is making included."""
        return [said.op for said in self.signatures.get(_GROUPS, [])]

    def _look_at_outputs(self, entry: Entry, outputs: Iterator) -> None:
        """Note, or with ``verify`` refuse, outputs that are one tensor, as in ``[t] * n``."""
        places = [tensor.data_ptr() if tensor.numel() else 0 for tensor in outputs]
        twice = next((place for place in places if place and places.count(place) > 1), 0)
        if twice and not self.aliased:
            what = f"outputs {', '.join(str(i) for i, place in enumerate(places) if place == twice)}"
            self.aliased = f"{entry.op} #{entry.number}: {what} of rank {{rank}} are the same memory"
            if self.announce is not None:
                raise ValueError(f"{entry.op}: {what} are the same memory, as [t] * n makes them: make one for each")

    def _sign(self, entry: Entry, said: Passed) -> None:
        """Note what the other ranks of the group must pass too. Where they do not, gloo may say nothing."""
        if self.announce is not None:
            self.announce(entry, said)
        calls = self.signatures.setdefault(entry.key, [])
        if entry.is_collective and len(calls) < _KEEP_SIGNATURES:
            calls.append(_shared.setdefault(said, said))
            self.digests[entry.key] = zlib.crc32(repr(said[:-1]).encode(), self.digests.get(entry.key, 0))

    def _count(self, entry: Entry, group: str, tag: int) -> None:
        entry.stream = (group, entry.peer, tag)
        self.streams[entry.op, *entry.stream] = entry.place = self.streams.get((entry.op, *entry.stream), 0) + 1

    def _issued(self, entry: Entry, work) -> None:
        self.settle()
        self.pending.append((entry, work))
        if self.recorders and not isinstance(work, Silent):

            def done(_future) -> None:
                entry.end = time.monotonic()

            with contextlib.suppress(RuntimeError):  # a backend without futures
                work.get_future().add_done_callback(done)

    def _queued(self, entry: Entry, work, device) -> None:
        """Note an operation that is in the queue of a device, and let go of those at the queue's head that are over."""
        while self.pending and self.pending[0][1].is_completed():
            self.pending.popleft()
        if work is None and device.type == "cuda" and not self._capturing():
            work = OnStream(device)
        if work is not None:
            self.pending.append((entry, work))

    def _caller(self) -> tuple[str, int] | None:
        """The learner's line; of the main thread, if this is one of those in which autograd computes on a GPU."""
        for frame in (sys._getframe(), sys._current_frames().get(threading.main_thread().ident)):
            while frame is not None:
                if is_learner(frame.f_code.co_filename):
                    return frame.f_code.co_filename, frame.f_lineno
                frame = frame.f_back
        return None

    def settle(self) -> None:
        """Let go of operations that have completed, and of their tensors; called between operations.

        Of gloo's reduce-scatter it is known only that a synchronous one is over, and that what comes later on its
        group has completed.
        """
        kept, over = [], set()
        for entry, work in reversed(self.pending):
            if work.is_completed():
                entry.end = entry.end or time.monotonic()
            elif not isinstance(work, Silent) or not (work.synchronous or entry.key in over):
                kept.append((entry, work))
                continue
            over.add(entry.key)
        if len(kept) < len(self.pending):
            self.pending = deque(reversed(kept), maxlen=_KEEP_PENDING)

    def unfinished(self) -> list[Entry]:
        """Operations issued and not completed, oldest first."""
        return [entry for entry, work in list(self.pending) if not work.is_completed()]


def _bytes(tensor) -> int:
    """Bytes of a tensor; of a sparse one its values and its indices."""
    return tensor._values().nbytes + tensor._indices().nbytes if tensor.is_sparse else tensor.nbytes


_shared: dict[Passed, Passed] = {}  # equal signatures are one object

interceptor = Interceptor()
