"""Training on a mesh of ranks, as lesson 12 builds it: a model in stages, beside one process; what groups send."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed.tensor.parallel as tp
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from course_utils import beside
from course_utils.beside import TOLERANCE
from course_utils.models import SeparateQKVAttention, build_gpt
from course_utils.ranks import Ledger, device, share
from course_utils.transformer import TransformerConfig

share(  # what each rank would import for itself
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)

DIMENSIONS = ("pp", "dp", "tp")

Batch = tuple[Tensor, Tensor]
Clip = Callable[[list[nn.Parameter]], float]


class Stage(nn.Module):
    """A run of blocks of the GPT: tokens (b, T) or activations (b, T, C) in, (b, T, C) or logits out.

    The first stage has the embeddings as well, and the last one the norm and the head. Every parameter has the name and
    the value that it has in the whole model, which is stage 0 of 1.
    """

    def __init__(self, config: TransformerConfig, number: int = 0, of: int = 1) -> None:
        super().__init__()
        model, cut = build_gpt(config), [config.layers * k // of for k in range(of + 1)]
        self.number = number
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(cut[number], cut[number + 1])})
        for block in self.blocks.values():
            block.attention = SeparateQKVAttention(block.attention)
        if number == 0:
            self.embedding, self.position = model.embedding, model.position
        if number == of - 1:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "embedding"):
            x = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)).clone() if hasattr(self, "head") else x  # FSDP2 warns of views


def tensor_plan(stage: Stage) -> dict[str, tp.ParallelStyle]:
    """How tensor parallelism splits what a stage has: every matrix is cut, norms are not, the logits are gathered."""
    ends = {
        "embedding": tp.RowwiseParallel(input_layouts=Replicate()),
        "head": tp.ColwiseParallel(output_layouts=Replicate()),
    }
    plan = {name: style for name, style in ends.items() if hasattr(stage, name)}
    once = tp.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    for i in stage.blocks:
        plan[f"blocks.{i}.attention"] = once  # one all-reduce backward for the three layers
        plan |= {f"blocks.{i}.attention.{name}": tp.ColwiseParallel() for name in "qkv"}
        plan[f"blocks.{i}.attention.out"] = tp.RowwiseParallel()
        plan[f"blocks.{i}.mlp.up"] = tp.ColwiseParallel()
        plan[f"blocks.{i}.mlp.down"] = tp.RowwiseParallel()
    return plan


# --- beside one process


def train(
    step: Callable[[Tensor, Tensor], float | None], stage: Stage, text: Callable[[int], Batch], steps: int = 2,
    clip: Clip | None = None,
) -> MeshRun:
    """On each rank: train a stage with ``step(x, y)``, which leaves the gradients; see `course_utils.beside.train`."""
    return MeshRun(**vars(beside.train(stage, step, text, steps, clip=clip, part=stage.number)))


@dataclass(frozen=True)
class MeshRun(beside.Run):
    """What a rank has found in some steps."""

    @property
    def stage(self) -> int:
        return self.part

    @property
    def states(self) -> float:
        """Bytes that it keeps between steps: its pieces of parameters, gradients and momenta."""
        return self.held.states


def one_process(
    config: TransformerConfig, text: Callable[[int], Batch], steps: int = 2, limit: float = math.inf
) -> MeshRun:
    """On one rank: the same training of the whole model with the whole batches, its gradients clipped at `limit`."""

    def clip(parameters: list[nn.Parameter]) -> float:
        return nn.utils.clip_grad_norm_(parameters, limit).item()

    return MeshRun(**vars(beside.one_process(Stage(config).to(device()), text, steps, clip=clip, part=0)))


def largest_difference(runs: Sequence[MeshRun], reference: MeshRun) -> tuple[float, float]:
    """Return the largest difference between all ranks and one process, of a loss and of a weight."""
    off = beside.differences(runs, reference)
    return off["losses"], off["weights"]


def same_as_one_process(runs: Sequence[MeshRun], reference: MeshRun) -> str:
    """Say that all losses, and all weights at the end, are those of one process; else raise `AssertionError`."""
    loss, weight = largest_difference(runs, reference)
    if max(loss, weight) > TOLERANCE:
        raise AssertionError(f"losses differ by up to {loss:.2g} from one process, weights by up to {weight:.2g}")
    return f"losses and weights after {len(reference.losses)} steps equal to one process"


# --- what groups send


def sent_by_dimension(ledger: Ledger) -> dict[str, float]:
    """Return the bytes that a rank sends, by dimension of the mesh, its collectives as rings."""
    return {name: ledger.bytes_sent(f"mesh_{name}") + ledger.bytes_sent(name) for name in DIMENSIONS}


def expected_bytes(
    config: TransformerConfig, sizes: Mapping[str, int], windows: int, stage: int = 0, gathers: int = 1
) -> dict[str, float]:
    """Return what a rank of a stage sends in a step by formula, by dimension, in float32 and for equal parts.

    Tensor: in a layer four all-reduces of the activations, one more for the embedding and one for the head, and the
    logits gathered. Data: blocks gathered `gathers` times, the rest of the stage once, all gradients reduce-scattered.
    Pipeline: activations to the next stage, their gradients to the one before.
    """
    p, d, t = (sizes[name] for name in DIMENSIONS)
    c, layers, first, last = config.hidden, config.layers / p, stage == 0, stage == p - 1
    numbers = windows / d * config.context * c  # of the activations
    reduced = (4 * layers + first + last) * 2 * (t - 1) / t * numbers
    logits = last * (t - 1) / t * numbers / c * config.vocabulary
    matrices, cut_biases, whole_biases, norms = 12 * c * c, 3 * c + 4 * c, 2 * c, 4 * c  # of a block
    block = (matrices + cut_biases) / t + whole_biases + norms
    table = config.vocabulary * c / t
    rest = first * (table + config.context * c) + last * (table + 2 * c)
    sharded = (d - 1) / d * ((gathers + 1) * layers * block + 2 * rest)
    passed = numbers * ((not first) + (not last))
    return {"pp": 4 * passed, "dp": 4 * sharded, "tp": 4 * (reduced + logits)}


def crossing(ledgers: Sequence[Ledger], node: Sequence[int]) -> float:
    """Return the bytes that all ranks together send from node to node, collectives as rings in the order of ranks."""
    return sum(ledger.bytes_sent(between=node) for ledger in ledgers)
