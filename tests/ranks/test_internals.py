"""What the course takes from private parts of PyTorch and Python is there and does what it is taken for.

When this fails after a change of version, the new version has changed it: the message names the version and the part.
"""

from __future__ import annotations

import ast
import re

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT

from course_utils import launch, torch_internals
from course_utils.ranks import multiprocessing_internals

pytestmark = pytest.mark.guard(60)
PRIVATE = re.compile(
    r"torch\._C|torch\._guards|torch\._subclasses|torch\.utils\._|distributed_c10d\._(?!_)|_distributed_c10d|"
    r"torch\.testing\._|forkserver\._|\(\)\._config|threading\._\w+\(|atexit\._"
)


def test_private_parts_stand_in_two_files_only():
    homes = {"torch_internals.py", "multiprocessing_internals.py"}
    files = [path for path in (ROOT / "course_utils").rglob("*.py") if path.name not in homes]
    found = {path.name: PRIVATE.findall(ast.unparse(ast.parse(path.read_text(encoding="utf-8")))) for path in files}
    assert {name: parts for name, parts in found.items() if parts} == {}


def test_every_name_is_there():
    for module in (torch_internals, multiprocessing_internals):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


def changed(what: str) -> str:
    return f"torch {torch.__version__} has changed {what}; written for {torch_internals.WRITTEN_FOR}"


def test_memory_modes_and_operators_are_seen():
    x = torch.ones(3)
    storage = x.untyped_storage()
    one = torch_internals.storage_use_count(storage._cdata)
    y = x.view(3)
    assert torch_internals.storage_use_count(storage._cdata) == one + 1, changed("the count of a storage's owners")
    del y
    before = torch_internals.count_modes()
    with torch.device("meta"):
        assert torch_internals.count_modes() == before + 1, changed("the stacks of modes")
    for name in ("allreduce_", "allgather_into_tensor_coalesced_", "reduce_scatter_", "send", "recv_", "broadcast_"):
        names = [argument.name for argument in getattr(torch.ops.c10d, name).default._schema.arguments]
        assert "process_group" in names, changed(f"c10d.{name}")
    keys = torch_internals.keys_after_backend_select()
    assert keys.has(torch._C.DispatchKey.CPU) and not keys.has(torch._C.DispatchKey.BackendSelect)


def test_groups_are_listed_named_and_forgotten():
    def look():
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        names = torch_internals.group_names((0, 1))
        count = len(torch_internals.open_groups())
        known = {first.group_name, second.group_name} <= set(names)
        known &= torch_internals.groups_by_name()[first.group_name] == (first, [0, 1])
        dist.destroy_process_group()
        torch_internals.forget_process_groups()
        return count, known, len(torch_internals.open_groups())

    assert launch(look, world_size=2) == [(3, True, 0)] * 2, changed("the records of process groups")
