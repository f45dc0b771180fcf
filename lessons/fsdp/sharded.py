"""What lesson 07 holds sharded training against: losses, padded bytes, rings between nodes, states, a GPU's queues."""

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

__all__ = [
    "EmulatedGPU", "KilledWriter", "OnEmulatedGPU", "emulated_step", "equal_states", "padded_bytes", "ring_traffic",
    "same_losses", "whole_state",
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


# Two queues of a GPU, under a real step of FSDP2


class EmulatedGPU:
    """What a GPU would do with the work of a step under FSDP2: computing and messages are two queues, side by side.

    FSDP2 really runs and its weights really travel, so the order of its calls is its own; their times are modelled.
    Each queue takes its entries in order. A block starts when its weights have come. A message starts when the CPU has
    issued it, and when earlier weights have been copied out of their messages: in backward the last ones, in forward
    those before the last (``FSDPParamGroup.wait_for_unshard``, PyTorch 2.13). The CPU takes `issue` seconds a block.
    With `waits` it waits in forward until each block has finished, as for the value of a tensor.
    """

    def __init__(self, waits: bool = False, message: float = 0.02, issue: float = 0.001) -> None:
        self.waits, self.message, self.issue = waits, message, issue
        self.clear()

    def clear(self) -> None:
        """Begin a step, at time 0."""
        self.backward = False
        self.issued = self.computed = self.travelled = 0.0  # when the CPU, and each queue, has done all so far
        self.copied = [0.0, 0.0]  # when the weights of each unit were copied out of their message
        self.blocks: Spans = []
        self.messages: list[tuple[float, float]] = []

    def compute(self, block: str, seconds: float) -> None:
        """Put a block's work into the queue of computing."""
        self.issued += self.issue
        start = max(self.issued, self.computed)
        self.computed = start + seconds
        self.blocks.append((block, start, self.computed))
        if self.waits and not self.backward:
            self.issued = self.computed

    def gather(self) -> float:
        """Put an all-gather into the queue of messages; return when it has come."""
        start = max(self.issued, self.travelled, self.copied[-1 if self.backward else -2])
        self.travelled = start + self.message
        self.messages.append((start, self.travelled))
        return self.travelled

    def copy_out(self, come: float) -> None:
        """Let the queue of computing wait for a message."""
        self.computed = max(self.computed, come)
        self.copied.append(self.computed)


class _Message(dist.Work):
    def __init__(self, gpu: EmulatedGPU) -> None:
        super().__init__()
        self.gpu, self.come = gpu, gpu.gather()

    def wait(self, *_: Any) -> bool:
        self.gpu.copy_out(self.come)
        return True


class _AllGather:
    """FSDP2's all-gathers, which also go into the queue of an emulated GPU."""

    def __init__(self, gpu: EmulatedGPU) -> None:
        self.gpu = gpu

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        dist.all_gather_single(output_tensor, input_tensor, group=group)
        return _Message(self.gpu)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gpu: EmulatedGPU, name: str, seconds: float) -> Tensor:
        ctx.gpu, ctx.name, ctx.seconds = gpu, name, seconds
        gpu.compute(name, seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.gpu.compute(ctx.name, 2 * ctx.seconds)
        return gradient, None, None, None


class _Block(nn.Module):
    def __init__(self, gpu: EmulatedGPU, name: str, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.work = gpu, name, seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Compute.apply(x * self.weight[0], *self.work)


class OnEmulatedGPU(nn.Module):
    """A model whose blocks compute on an emulated GPU, `seconds` in forward and twice that in backward."""

    def __init__(self, gpu: EmulatedGPU, blocks: int = 4, seconds: float = 0.025) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.Sequential(*(_Block(gpu, f"block {i}", seconds) for i in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x * self.scale)


def emulated_step(model: FSDPModule, gpu: EmulatedGPU) -> dict[str, Any]:
    """On all ranks: the second step of a sharded `OnEmulatedGPU`: its lanes, its seconds, its hidden all-gathers.

    Hidden is an all-gather during nine tenths of which a block computes.
    """
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_custom_all_gather(_AllGather(gpu))
    for _ in range(2):
        model.zero_grad()
        gpu.clear()
        loss = model(torch.ones(8)).sum()
        gpu.backward = True
        loss.backward()
    blocks = [name for name, *_ in gpu.blocks[: len(model.blocks)]]
    units = ["root", *blocks, *reversed(blocks)]  # the root stays
    messages = [(unit, *span) for unit, span in zip(units, gpu.messages, strict=True)]
    hidden = sum(_beside(gpu.blocks, *span) > 0.9 for span in gpu.messages)
    return {"lanes": {"compute": gpu.blocks, "all-gather": messages}, "seconds": gpu.computed, "hidden": hidden}


def _beside(spans: Spans, start: float, end: float) -> float:
    """Share of the time from start to end in which a span is under way; spans do not overlap."""
    return sum(max(0.0, min(end, stop) - max(start, begin)) for _, begin, stop in spans) / (end - start)
