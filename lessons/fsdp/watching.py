"""Watch a training step under `fully_shard`: when each unit is gathered, computes and is reduced, what is held."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from course_utils.ranks import record

__all__ = ["Lanes", "watch"]

#: For each lane its spans: name of the unit, first and last event.
Lanes = dict[str, list[tuple[str, int, int]]]

_LANES = {
    "forward": "forward", "backward": "backward", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
}  # fmt: skip


def watch(model: FSDPModule, run: Callable[[int], Any]) -> tuple[Lanes, list[tuple[int, int]]]:
    """Run two steps on this rank, the first as a warm-up, and return the order of events in the second.

    PyTorch keeps one storage for each whole weight and resizes it to fill and to free it, so the bytes of gathered
    weights can be read off. Besides these an all-gather has a flat result: FSDP2 copies the weights out of it, and in
    forward keeps it until the next unit's copy-out (``FSDPParamGroup.wait_for_unshard``, PyTorch 2.13). Both count, and
    so does a message that is under way, from its start. Moments inside one call of FSDP2 are not seen.

    A message does not say whose weights it brings. The first unit whose storage fills belongs to the first all-gather,
    the first whose gradients are reduced to the first reduce-scatter.
    """
    storages: dict[str, list] = {}
    seen: list[tuple] = []

    def note(what: str, name: str, *_: Any) -> None:
        sizes = {unit: sum(storage.nbytes() for storage in whole) for unit, whole in storages.items()}
        seen.append((time.monotonic(), what, name, sizes, _flat(model)))

    def remember(name: str, unit: nn.Module, _: Any) -> None:
        if name not in storages:  # gathered by FSDP2's own hook, which comes first
            storages[name] = [p.untyped_storage() for p in unit.parameters() if not isinstance(p, DTensor)]

    for name, unit in _units(model).items():
        unit.register_forward_pre_hook(partial(remember, name))
        unit.register_forward_hook(partial(note, "left", name))
    for layer, name in _layers(model).items():
        layer.register_forward_pre_hook(partial(note, "forward", name))
        layer.register_forward_hook(partial(_in_backward, partial(note, "backward", name)))
        for p in layer.parameters(recurse=False):
            p.register_post_accumulate_grad_hook(partial(note, "reduced", name))
    for step in range(2):
        seen.clear()
        with record() as ledger:
            run(step)
    messages = [(entry.start, entry.op, None, entry.bytes, 0) for entry in ledger]
    return _timeline(sorted(seen + messages, key=lambda event: event[0]))


def _units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that `fully_shard` was called on, by name, root first."""
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return {name.replace("blocks.", "block ") or "root": module for name, module in named}


def _layers(model: nn.Module) -> dict[nn.Module, str]:
    """Return each module without children, and the unit whose weights it uses."""
    unit = {module: name for name, top in _units(model).items() for module in top.modules()}
    return {module: name for module, name in unit.items() if not any(module.children())}


def _flat(model: FSDPModule) -> int:
    """Return the bytes of the flat result that FSDP2 keeps of the last all-gather in forward."""
    kept = model._get_fsdp_state()._comm_ctx.all_gather_state
    return kept.all_gather_result.all_gather_output.nbytes if kept else 0


def _in_backward(note: Callable, layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """Take the note when the gradient of this output is there."""
    output.register_hook(note)


def _whose(seen: list[tuple]) -> dict[str, Iterator[str]]:
    """Return the units of the all-gathers, and of the reduce-scatters, in order."""
    filled: list[str] = []
    reduced: list[str] = []
    before: dict[str, int] = {}
    for _, what, name, sizes, _ in (event for event in seen if event[2]):
        filled += [unit for unit in sizes if sizes[unit] and not before.get(unit)]
        reduced += [name] * (what == "reduced")
        before = sizes
    return {"all_gather": iter(filled), "reduce_scatter": iter(dict.fromkeys(reduced))}


def _timeline(seen: list[tuple]) -> tuple[Lanes, list[tuple[int, int]]]:
    """Return spans by lane, and bytes of gathered parameters, over the order of events."""
    unit_of, line = _whose(seen), []
    lanes: Lanes = {lane: [] for lane in _LANES.values()}
    held, coming, flat, last = {}, {}, 0, None
    for _, what, name, size, kept in seen:
        if name is None:
            name = next(unit_of[what])
            coming |= {name: size} if what == "all_gather" else {}
        else:
            held, flat, coming = size, kept, {unit: s for unit, s in coming.items() if not size.get(unit)}
        total = sum(held.values()) + sum(coming.values()) + flat
        if what == "reduced":  # freed before the reduce-scatter
            line[-1] = line[-1][0], total
        elif what in _LANES and (what, name) != last:
            lanes[_LANES[what]].append((name, len(line), len(line) + 1))
            line.append((len(line), total))
            last = what, name
    return lanes, line
