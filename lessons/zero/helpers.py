"""Train versions of data parallelism side by side: their losses, the bytes that a rank holds, and what it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_utils.data import Windows
from course_utils.memory import Memory, held_memory, track
from course_utils.models import TransformerConfig, build_gpt, loss_of
from course_utils.ranks import Ledger, device, record

__all__ = ["MasterAdam", "Run", "train"]

_SMALL = TransformerConfig()


class MasterAdam(torch.optim.Adam):
    """Adam on fp32 master weights, for parameters of any type.

    Parameters
    ----------
    parameters : iterable of nn.Parameter
        What the model computes with.
    lr : float
    place : device, optional
        Where master weights and moments live; by default with the parameters. "cpu" is offload.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3, place: str | None = None) -> None:
        self.trained = [*parameters]
        self.masters = [p.detach().to(place or p.device, torch.float32, copy=True) for p in self.trained]
        super().__init__(self.masters, lr=lr)

    @torch.no_grad()
    def step(self) -> None:
        """Step the masters with the parameters' gradients, and copy them back."""
        for master, p in zip(self.masters, self.trained, strict=True):
            master.grad = p.grad.to(master.device, torch.float32)
        super().step()
        for master, p in zip(self.masters, self.trained, strict=True):
            p.copy_(master)
            master.grad = None

    def zero_grad(self) -> None:
        """Let go of the parameters' gradients."""
        for p in self.trained:
            p.grad = None


@dataclass(frozen=True)
class Run:
    """What one rank saw of a training run; memory at the end of the last backward, and at the last step's peak."""

    losses: list[float]  # of each step, the mean over all ranks
    held: Memory  # model states
    ended: Memory  # everything
    peak: Memory
    ledger: Ledger
    parameter_bytes: int
    ranks: int

    @property
    def bytes_sent(self) -> float:
        return self.ledger.bytes_sent()

    @property
    def psi_sent(self) -> float:
        """The same in multiples of Ψ numbers, times (N - 1)/N: a rank's own part never travels."""
        return self.bytes_sent / (self.parameter_bytes * (self.ranks - 1) / self.ranks)

    def same_losses_as(self, reference: Run, atol: float = 1e-4) -> bool:
        """Whether two runs have the same losses to rounding: sums over ranks may be taken in another order."""
        pairs = zip(self.losses, reference.losses, strict=True)
        return max(abs(a - b) for a, b in pairs) < atol

    def __str__(self) -> str:
        """Calls and bytes by collective, the multiple of Ψ, and on a second line the model states held."""
        ops = sorted({entry.op for entry in self.ledger}, reverse=True)
        calls = [f"{self.ledger.count(op)} {op} of {self.ledger.bytes(op):,} bytes in all" for op in ops]
        parts = [f"{part} {size:,.0f}" for part, size in self.held.parts().items() if size]
        return f"{', '.join(calls)}: {self.psi_sent:.2f} Ψ\n  holds {', '.join(parts)}"


def train(
    version: Callable[..., nn.Module], make_optimizer: Callable[..., torch.optim.Optimizer], *, steps: int = 4,
    per_rank: int = 4, micro: int = 1, config: TransformerConfig = _SMALL,
) -> Run:
    """On a rank: train the GPT with ``version(model, make_optimizer)``, from another seed on each rank.

    A version has an `optimizer` and a method `step`, which is called after the backward passes of all micro-batches.
    """
    rank, ranks, windows = dist.get_rank(), dist.get_world_size(), Windows("train", config.context)
    whole = build_gpt(config, seed=rank).to(device())
    size = sum(p.nbytes for p in whole.parameters())
    model, losses = version(whole, make_optimizer), []
    for step in range(steps):
        total, first = torch.zeros((), device=device()), (step * ranks + rank) * per_rank
        with record() as ledger, track(model, model.optimizer) as tracker:
            for part in torch.arange(first, first + per_rank).chunk(micro):
                total += _backward(model, windows.batch(part.tolist(), device()), micro)
            held, ended = held_memory(model, model.optimizer), tracker.mark("backward")
            model.step()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    return Run(losses, held, ended, tracker.peak, ledger, size, ranks)


def _backward(model: nn.Module, batch: Sequence[Tensor], micro: int) -> Tensor:
    loss = loss_of(model, *batch) / micro
    loss.backward()
    return loss.detach()

