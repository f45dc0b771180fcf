"""What lesson 07 holds sharded training against: losses, padded bytes, rings between nodes, whole states, the clock."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FSDPModule

from course_utils.ranks import Ledger
from course_utils.traces import Trace, spans

__all__ = [
    "Elsewhere", "KilledWriter", "SlowLink", "compute_and_messages", "equal_states", "padded_bytes", "ring_traffic",
    "same_losses", "time_steps", "whole_state",
]

Spans = list[tuple[str, float, float]]


def same_losses(losses: Sequence[float], reference: Sequence[float], tolerance: float = 1e-4) -> str:
    """Say that the losses of the first steps, two at least, are those of one process; else raise `AssertionError`."""
    pairs = [*zip(losses, reference, strict=False)]
    if not 2 <= len(losses) <= len(reference) or any(abs(a - b) >= tolerance for a, b in pairs):
        raise AssertionError(f"losses {losses}, of one process {reference}")
    return f"losses equal to one process, to {tolerance:g}"


def padded_bytes(model: nn.Module, world_size: int) -> int:
    """Bytes of a model's float32 parameters, their rows padded to a multiple of the ranks, as FSDP2 gathers them."""
    return sum(4 * world_size * -(-p.shape[0] // world_size) * p[0].numel() for p in model.parameters())


def ring_traffic(ledgers: Sequence[Ledger], node: Mapping[int, int]) -> tuple[float, float]:
    """Bytes that all ranks together send inside and between nodes, their collectives as rings."""
    ledgers = [Ledger([replace(entry, rank=rank) for entry in ledger]) for rank, ledger in enumerate(ledgers)]
    between = sum(ledger.bytes_sent(between=node) for ledger in ledgers)
    return sum(ledger.bytes_sent() for ledger in ledgers) - between, between


# States and checkpoints


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """On all ranks: parameters and optimizer states as whole tensors on the CPU of rank 0, copied; empty elsewhere."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    tensors, rest = get_state_dict(model, optimizer, options=options)
    for name, state in rest.get("state", {}).items():
        tensors |= {f"{name}, {kind}": value for kind, value in state.items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def equal_states(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two states have the same names and are equal to the last bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class KilledWriter(dcp.FileSystemWriter):
    """Writes a checkpoint as usual, but the last rank is killed before its own file, when the others have theirs."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(1)
            signal.raise_signal(signal.SIGKILL)
        return super().write_data(plan, planner)


# The clock: compute that leaves the CPU free, as a GPU's does


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: _Block) -> Tensor:
        ctx.block = block
        block.wait(block.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.block.wait(2 * ctx.block.seconds)
        return gradient, None


class _Block(nn.Module):
    def __init__(self, name: str, seconds: float, spans: Spans, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, 1024))
        self.name, self.seconds, self.spans = name, seconds, spans

    def wait(self, seconds: float) -> None:
        begin = time.monotonic()
        time.sleep(seconds)
        self.spans.append((self.name, begin, time.monotonic()))

    def forward(self, x: Tensor) -> Tensor:
        return _Wait.apply(x * self.weight[0, 0], self)


class Elsewhere(nn.Module):
    """A model whose blocks compute elsewhere: the CPU waits, `seconds` in forward and twice that in backward.

    Each has `rows` times 1,024 weights; `computed` lists (block, start, end) on the monotonic clock.
    """

    def __init__(self, blocks: int = 4, seconds: float = 0.025, rows: int = 64) -> None:
        super().__init__()
        self.computed: Spans = []
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.Sequential(*(_Block(f"block {i}", seconds, self.computed, rows) for i in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x * self.scale)


class _Message(dist.Work):
    """An all-gather that is under way until a moment, and no shorter than it really takes."""

    def __init__(self, work: dist.Work, begin: float, seconds: float) -> None:
        super().__init__()
        self.work, self.begin, self.until = work, begin, begin + seconds
        self.asked = begin  # when somebody began to wait for it

    def wait(self, *_: Any) -> bool:
        self.asked = time.monotonic()
        self.work.wait()
        if time.monotonic() - self.asked > 1e-3:  # it was not there yet
            self.until = max(self.until, time.monotonic())
        time.sleep(max(0.0, self.until - time.monotonic()))
        return True


class SlowLink:
    """FSDP2's all-gathers over an emulated link, on which each takes so many seconds; the weights really travel.

    With `beside` messages run beside the computation, as in a GPU's stream of their own; without it each is waited for
    where it is issued, as FSDP2 does on gloo.
    """

    def __init__(self, model: FSDPModule, beside: bool, seconds: float = 0.02) -> None:
        self.beside, self.seconds = beside, seconds
        self.messages: list[_Message] = []
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_custom_all_gather(self)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        begin = time.monotonic()
        work = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        self.messages.append(_Message(work, begin, self.seconds))
        if self.beside:
            return self.messages[-1]
        self.messages[-1].wait()
        return None


def time_steps(model: FSDPModule, link: SlowLink, steps: int = 8) -> dict[str, Any]:
    """On all ranks: the fastest step of a sharded `Elsewhere`: its lanes, its seconds, and how many gathers hid."""
    taken = [_timed(model, link) for _ in range(steps)][2:]
    return min(taken, key=lambda step: step["seconds"])


def _timed(model: FSDPModule, link: SlowLink) -> dict[str, Any]:
    model.computed.clear()
    link.messages.clear()
    model.zero_grad()
    dist.barrier()
    begin = time.monotonic()
    model(torch.ones(8)).sum().backward()
    end = time.monotonic()
    blocks = [name for name, *_ in model.computed[: len(model.blocks)]]
    units = ["root", *blocks, *reversed(blocks)]  # the root stays
    messages = [(unit, m.begin, m.until) for unit, m in zip(units, link.messages, strict=True)]
    rows = {"compute": model.computed, "all-gather": messages}
    lanes = {lane: [(unit, a - begin, b - begin) for unit, a, b in row] for lane, row in rows.items()}
    beside = sum(any(m.begin <= a and b <= m.asked for _, a, b in model.computed) for m in link.messages)
    return {"lanes": lanes, "seconds": end - begin, "beside": beside}


def compute_and_messages(trace: Trace, step: int) -> dict[str, Spans]:
    """When a recorded GPU computed and communicated in a step, in seconds from its beginning; rows as for a figure."""
    part = trace.of_steps([step])
    kinds = ("compute", "communication")
    zero = min(spans(part, kind)[0][0] for kind in kinds)
    return {kind: [(kind, (a - zero) / 1e6, (b - zero) / 1e6) for a, b in spans(part, kind)] for kind in kinds}
