"""All that the course takes from private parts of PyTorch, for the version in `WRITTEN_FOR`, and what for.

Public ways do not exist for it: seeing what C++ code sends, ending a process group that hangs, knowing who holds a
tensor's memory. When a new version changes a name, `tests/ranks/test_internals.py` says which; mend it here.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

__all__ = [
    "C10D_FILE", "WRITTEN_FOR", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "abort_process_groups",
    "active_fake_mode", "before_each_new_group", "c10d", "count_modes", "default_store", "dispatch_keys", "fake_store",
    "flight_record",
    "forget_process_groups", "group_names", "groups_by_name", "is_traceable_wrapper_subclass",
    "keys_after_backend_select", "open_groups", "replace_rendezvous", "storage_use_count", "tree_leaves",
    "unbox_work",
]

WRITTEN_FOR = "2.13"

if not hasattr(torch.distributed, "all_gather_single"):  # before 2.13, as in hosted notebooks
    torch.distributed.all_gather_single = torch.distributed.all_gather_into_tensor
    torch.distributed.reduce_scatter_single = torch.distributed.reduce_scatter_tensor

#: The file of the functions that learners call, to tell its frames from others.
C10D_FILE = c10d.__file__

# --- the dispatcher: one kernel before every collective (ranks.ledger)

#: The `dist.Work` behind the object that an operator of c10d returns.
unbox_work = torch._C._distributed_c10d.Work.unbox
#: The dispatch keys of a tensor.
dispatch_keys = torch._C._dispatch_keys


def keys_after_backend_select() -> Any:
    """The dispatch keys that come after the one at which the ledger listens."""
    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def count_modes() -> int:
    """How many modes that change what operators do are on (``with torch.device("meta")`` is one)."""
    return torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()


# --- memory: who holds a storage, and tensors without data (memory)

#: How many tensors and other owners hold the storage at an address (``storage._cdata``).
storage_use_count = torch._C._storage_Use_Count


def fake_store() -> Any:
    """A store for a process group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


# --- process groups: meeting, ending, and what is left of them (ranks, fabric)


def replace_rendezvous(
    meet: Callable[..., Any], barrier_after_init: Callable[[Callable[[], int]], int]
) -> None:
    """Let ``init_process_group`` of ``env://`` meet by `meet`.

    ``barrier_after_init(usual)`` says whether it ends with a barrier, where ``usual()`` is PyTorch's own answer.
    """
    sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers["env"] = meet
    usual = c10d._is_barrier_after_init
    c10d._is_barrier_after_init = lambda: barrier_after_init(usual)


def before_each_new_group(tell: Callable[[list[int], tuple[int, ...]], None]) -> Callable[[], None]:
    """Call ``tell(ranks, all ranks)`` before a group is made that all have to make; returns what undoes it."""
    usual = c10d._new_group_with_tag

    def new_group(ranks=None, *args, use_local_synchronization=False, **named):
        if not use_local_synchronization:
            everybody = tuple(range(c10d.get_world_size()))
            tell(sorted(everybody if ranks is None else ranks), everybody)
        return usual(ranks, *args, use_local_synchronization=use_local_synchronization, **named)

    c10d._new_group_with_tag = new_group
    return lambda: setattr(c10d, "_new_group_with_tag", usual)


def open_groups() -> list[Any]:
    """The process groups that there are."""
    return [*c10d._world.pg_map]


def group_names(ranks: tuple[int, ...]) -> list[str]:
    """PyTorch's names of the groups with these ranks, oldest first."""
    world = c10d._world
    return [world.pg_names[group] for group, members in world.pg_group_ranks.items() if tuple(members) == ranks]


def groups_by_name() -> dict[str, tuple[Any, list[int]]]:
    """The process groups that this rank is in, by PyTorch's names, with their ranks in order."""
    world = c10d._world
    return {world.pg_names[group]: (group, sorted(world.pg_group_ranks[group])) for group in world.pg_map}


def flight_record() -> dict[str, Any]:
    """The flight record of this process, without stacks."""
    return pickle.loads(torch._C._distributed_c10d._dump_fr_trace(includeStackTraces=False))


def default_store() -> Any:
    """The store through which the ranks of the default group met."""
    return c10d._get_default_store()


def abort_process_groups() -> None:
    """End all groups at once, without waiting for other ranks."""
    c10d._abort_process_group()


def forget_process_groups() -> None:
    """Clear what PyTorch remembers of groups, also of half-made ones: an initialisation that failed leaves names."""
    c10d._world.group_count = 0
    for memory in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(c10d._world, memory).clear()
    c10d._unregister_all_process_groups()
    if tensor := sys.modules.get("torch.distributed.tensor"):  # its caches hold meshes whose groups are gone
        # What `torch.distributed.tensor.debug` has for it comes with the compiler, whose import takes half a second.
        tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
