"""Bytes of training state that one rank holds, tensor by tensor: now, or at every operation of a step (private)."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook as _AFTER_STEP
from torch.optim.optimizer import register_optimizer_step_pre_hook as _BEFORE_STEP

from ..ranks import Entry, interceptor
from ..torch_internals import (
    FakeTensor,
    TorchDispatchMode,
    active_fake_mode,
    is_traceable_wrapper_subclass,
    storage_use_count,
    tree_leaves,
)
from .parts import PARTS, Memory

_PATIENCE = 0.2  # seconds to wait for gloo's threads to drop the tensors of a finished operation

def _storages(tensor: Tensor) -> Iterator[UntypedStorage]:
    """Yield the storages behind a tensor; of a DTensor those of the local shard."""
    if is_traceable_wrapper_subclass(tensor):
        for inner in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(inner, Tensor):
                yield from _storages(inner)
    else:
        yield tensor.untyped_storage()


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def _fsdp_parameters(model: nn.Module) -> list[Any]:
    """Return FSDP2's own record of each parameter it shards, whether gathered at the moment or not."""
    states = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    return [p for state in states for group in state._fsdp_param_groups for p in group.fsdp_params]


def _states(optimizer: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the states of an optimizer and the parameters it steps."""
    optimizer = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer keeps its share in .optim
    if isinstance(optimizer, Optimizer):
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        return _tensors(list(optimizer.state.values())), stepped
    return _tensors(optimizer), []


def _claims(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that live across steps with their part; the first claim to a storage counts."""
    sharded = _fsdp_parameters(model)
    gathered = {id(p._unsharded_param): p for p in sharded if hasattr(p, "_unsharded_param")}
    own = [p.sharded_param for p in sharded] + [p for p in model.parameters() if id(p) not in gathered]
    states, stepped = _states(optimizer)
    yield from (("parameters", p) for p in own)
    gradients = (p.grad for p in (*own, *stepped, *(p._unsharded_param for p in gathered.values())))
    yield from (("gradients", gradient) for gradient in gradients if gradient is not None)
    yield from (("optimizer", tensor) for tensor in (*states, *stepped))
    yield from (("buffers", tensor) for tensor in model.buffers())
    yield from (("buffers", p._unsharded_param) for p in gathered.values())


def held_memory(model: nn.Module, optimizer: Any = None) -> Memory:
    """Return what this rank holds now, tensor by tensor.

    Every storage counts once, with all its bytes: tied weights once, of a sharded parameter the local shard with its
    padding, of a gradient that is a view into a bucket the bucket. A parameter that the optimizer steps and that is not
    one of the model's, such as an fp32 master weight, counts as optimizer. `buffers` are the model's own, and
    parameters that FSDP2 has gathered; activations cannot be seen from here: see `track`.

    Parameters
    ----------
    model : nn.Module
        Plain, or wrapped by DDP or FSDP2.
    optimizer : torch.optim.Optimizer or nest of tensors, optional
        An optimizer, or the states of a hand-written one: a tensor, list or dictionary of them.
    """
    parts, seen = dict.fromkeys(PARTS, 0), set()
    for part, tensor in _claims(model, optimizer):
        for storage in _storages(tensor):
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                parts[part] += storage.nbytes()
    return Memory(**parts)


class Tracker(TorchDispatchMode):
    """Follows every storage that operations make or use, from its first sight to its end; see `track`."""

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        super().__init__()
        self._model, self._optimizer = model, optimizer
        self._fake = active_fake_mode()
        self._parts: list[str] = []  # of each storage met, in order
        self._known: dict[int, tuple[weakref.ref, int]] = {}  # address of a living storage: number
        self._sizes: dict[int, int] = {}  # by number, of living storages
        self._before: list[tuple[int, int]] = []  # storages older than the tracker: number, bytes
        self._events: list[tuple[int, int]] = []  # number, change of its bytes
        self._marks: list[tuple[str, int]] = []  # label, events so far
        self._in_flight: list[tuple[Entry, list[StorageWeakRef]]] = []  # what an operation keeps
        self._open = False
        for part, tensor in _claims(model, optimizer):
            for storage in _storages(tensor):  # an empty parameter is sharded by hand; to fill it is to gather it
                self._follow(storage, part if part != "parameters" or storage.nbytes() else "buffers", old=True)

    @property
    def peak(self) -> Memory:
        """The parts at the moment of the largest total."""
        totals = list(accumulate((change for _, change in self._events), initial=sum(size for _, size in self._before)))
        return self._at(totals.index(max(totals)))

    @property
    def timeline(self) -> list[Memory]:
        """The parts at the beginning and after each change, oldest first."""
        parts, moments = self._at(0).parts(), [self._at(0)]
        for number, change in self._events:
            parts[self._parts[number]] += change
            moments.append(Memory(**parts))
        return moments

    @property
    def history(self) -> list[tuple[str, Memory]]:
        """Label and parts at each mark."""
        return [(label, self._at(events)) for label, events in self._marks]

    def mark(self, label: str) -> Memory:
        """Note the parts at this moment under `label` and return them."""
        if not self._open:
            raise RuntimeError("mark() works inside the `with track(...)` block only")
        self._let_go()
        self._classify()
        self._marks.append((label, len(self._events)))
        return self._at(len(self._events))

    def _at(self, events: int) -> Memory:
        """Return the parts after so many events, every storage under the part it ended up in."""
        parts = dict.fromkeys(PARTS, 0)
        for number, change in (*self._before, *self._events[:events]):
            parts[self._parts[number]] += change
        return Memory(**parts)

    def _follow(self, storage: UntypedStorage, part: str, old: bool = False, inside: bool = False) -> int:
        """Return the number of a storage, met now for the first time or known.

        `inside` marks what a library operation needs for itself, which is not counted: gloo's reduce-scatter sums a
        copy of its whole input and splits it while the rank waits. Other backends have no such copy.
        """
        if (known := self._known.get(storage._cdata)) and known[0]() is not None:
            return known[1]
        number, size = len(self._parts), 0 if inside else storage.nbytes()
        self._parts.append(part)
        self._sizes[number] = size
        (self._before if old else self._events).append((number, size))
        self._known[storage._cdata] = (weakref.ref(storage, partial(self._gone, storage._cdata, number)), number)
        return number

    def _gone(self, address: int, number: int, _: Any) -> None:
        self._events.append((number, -self._sizes.pop(number)))
        if address in self._known and self._known[address][1] == number:
            del self._known[address]

    def _resized(self, storage: UntypedStorage) -> None:
        if known := self._known.get(storage._cdata):
            number, size = known[1], storage.nbytes()
            self._events.append((number, size - self._sizes[number]))
            self._sizes[number] = size

    def _classify(self, *_: Any) -> None:
        """Give gradients and optimizer states, which start as temporaries, their part."""
        for part, tensor in _claims(self._model, self._optimizer):
            for storage in _storages(tensor) if part != "parameters" else ():
                number = self._follow(storage, part, old=True)
                if self._parts[number] in ("activations", "buffers"):
                    self._parts[number] = part

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t is not FakeTensor and issubclass(t, Tensor) and hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # a DTensor turns itself into operations on its shard, and they come here again
        if active_fake_mode() is not self._fake:
            return func(*args, **(kwargs or {}))  # a DTensor asks for shapes
        self._let_go()
        recorded = torch.is_grad_enabled()
        part = "activations" if recorded else "buffers"
        made_now = func is torch.ops.aten.lift_fresh.default  # its argument was made a moment ago, unseen
        copied = func is torch.ops.aten.split.Tensor and not recorded  # an unknown one is gloo's own, see _follow
        used = [storage for tensor in _tensors((args, kwargs)) for storage in _storages(tensor)]
        numbers = [self._follow(storage, part, old=not made_now, inside=copied) for storage in used]
        if func.namespace not in ("c10d", "_c10d_functional"):
            result = func(*args, **(kwargs or {}))
        else:
            before = [storage_use_count(storage._cdata) for storage in used]
            result = func(*args, **(kwargs or {}))
            grown = [StorageWeakRef(s) for s, n in zip(used, before, strict=True) if storage_use_count(s._cdata) > n]
            if grown and interceptor.pending:
                self._in_flight.append((interceptor.pending[-1][0], grown))
            for number in numbers:
                if not recorded and self._parts[number] == "activations":
                    self._parts[number] = "buffers"  # DDP makes its buckets during forward
        for tensor in _tensors(result):
            for storage in _storages(tensor):
                self._follow(storage, part)
        return result

    def _let_go(self) -> None:
        """Wait until finished operations have dropped their tensors: the ledger keeps them, then a thread of gloo."""
        if not self._in_flight:
            return
        # A weak reference keeps the address readable, even if a thread frees the storage in this moment.
        before = {ref: storage_use_count(ref.cdata) for _, refs in self._in_flight for ref in refs}
        interceptor.settle()
        pending = {id(entry) for entry, _ in interceptor.pending}
        over = [ref for entry, refs in self._in_flight if id(entry) not in pending for ref in refs]
        self._in_flight = [flight for flight in self._in_flight if id(flight[0]) in pending]
        until = time.monotonic() + _PATIENCE
        while any(0 < storage_use_count(ref.cdata) == before[ref] for ref in over):
            if time.monotonic() > until:
                break
            time.sleep(1e-5)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with ExitStack() as undo:
            resize, tracker = UntypedStorage.resize_, self

            @wraps(resize)
            def resize_(storage: UntypedStorage, size: int) -> UntypedStorage:
                result = resize(storage, size)
                tracker._resized(storage)
                return result

            UntypedStorage.resize_ = resize_
            undo.callback(setattr, UntypedStorage, "resize_", resize)
            for register in (_BEFORE_STEP, _AFTER_STEP):
                undo.callback(register(self._classify).remove)
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    undo.callback(parameter.register_post_accumulate_grad_hook(self._accumulated).remove)
            undo.callback(self._stop)
            self._open = True
            with self:
                yield
                self._classify()

    def _accumulated(self, parameter: Tensor) -> None:
        """Tell the gradient of a parameter from temporaries before anyone frees it."""
        if parameter.grad is not None:
            for storage in _storages(parameter.grad):
                number = self._follow(storage, "gradients")
                if self._parts[number] in ("activations", "buffers"):
                    self._parts[number] = "gradients"

    def _stop(self) -> None:
        self._open = False
        self._known.clear()  # and with them what would note the end of a storage


@contextmanager
def track(model: nn.Module, optimizer: Any = None) -> Iterator[Tracker]:
    """Follow every tensor that lives on this rank inside the block, by part.

    Operations are watched below autograd, so real and fake tensors, plain modules, DDP and FSDP2 all work. Storages
    count once, as in `held_memory`. Of the rest, what is made while autograd records (forward, and recomputing it) is
    `activations`; anything else is `buffers`, also a parameter that was empty when the block began. A gradient or an
    optimizer state keeps its part for its whole life, also before it was assigned. Tensors that are older than the
    block, such as the batch or the buckets of DDP, count from the beginning once an operation uses them. What an
    operation needs inside itself is not seen.

    Parameters
    ----------
    model : nn.Module
        Plain, or wrapped by DDP or FSDP2.
    optimizer : torch.optim.Optimizer or nest of tensors, optional
        As for `held_memory`.

    Yields
    ------
    Tracker
        With `peak`, `history` and `mark(label)`; also of use after the block, which leaves nothing else behind.
    """
    tracker = Tracker(model, optimizer)
    with tracker._running():
        yield tracker
