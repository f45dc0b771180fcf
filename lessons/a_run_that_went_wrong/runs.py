"""What our run did on each day: the small GPT trained on ranks, with a fault or without, and the log it wrote."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from course_utils import device
from course_utils.data import Windows
from course_utils.models import GPT, TransformerConfig, build_gpt, loss_of, next_token_loss

CONFIG = TransformerConfig(layers=2, heads=12, hidden=48, context=32)
BATCH, PAD = 12, -1  # windows of a step, of all ranks together; a target that does not count


@dataclass
class Log:
    """Lines of a log, by step: the loss of all ranks, and norms of gradient and weights as rank 0 sees them."""

    lines: dict[int, tuple[float, float, float]] = field(default_factory=dict)

    def add(self, step: int, loss: Tensor, model: nn.Module) -> None:
        """Note a step, after its backward pass."""
        total = loss.detach().clone()
        dist.all_reduce(total)
        norms = [norm_of(p.grad for p in model.parameters() if p.grad is not None), norm_of(model.parameters())]
        self.lines[step] = (total.item() / dist.get_world_size(), *norms)

    def show(self, every: int = 10) -> None:
        """Print each so-and-so-many-th line, and the last one."""
        print("step   loss     |g|      |w|")
        for step, (loss, gradient, weights) in self.lines.items():
            if step % every == 0 or step == max(self.lines):
                print(f"{step:4}{loss:7.2f}{gradient:8.2f}{weights:9.3f}")

    @property
    def losses(self) -> list[float]:
        return [loss for loss, *_ in self.lines.values()]


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The norm of all these tensors together."""
    return torch.stack([t.detach().norm() for t in tensors]).norm().item()


def spread(tensor: Tensor) -> float:
    """How far a tensor differs between ranks: the largest difference of a number."""
    low, high = tensor.detach().clone(), tensor.detach().clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return (high - low).max().item()


def batch(step: int, alike: bool = False) -> tuple[Tensor, Tensor]:
    """This rank's windows of a step and their targets; all windows of the step, if the ranks are to have them alike."""
    rank, ranks = (0, 1) if alike else (dist.get_rank(), dist.get_world_size())
    first = step * BATCH % 2400
    return Windows("train", CONFIG.context).batch(range(first + rank, first + BATCH, ranks), device())


def held_out(model: nn.Module) -> float:
    """Mean loss of windows that nobody trains on."""
    with torch.no_grad():
        return loss_of(model, *Windows("valid", CONFIG.context).batch(range(64), device())).item()


# --- day 1: tensor parallelism


class Piece(nn.Module):
    """A layer of which each rank has a piece: an all-reduce after it, and one of the gradient of its input."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(summed)
        part = self.own(x)
        return part + (summed(part.detach()) - part.detach())


def summed(x: Tensor) -> Tensor:
    """The sum of x over all ranks."""
    total = x.clone()
    dist.all_reduce(total)
    return total


def in_pieces(seed: int) -> GPT:
    """Return the GPT with this rank's piece of every block, drawn by the rank itself with this seed."""
    model, hidden, ranks = build_gpt(CONFIG), CONFIG.hidden, dist.get_world_size()
    torch.manual_seed(seed)
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        attention.heads = CONFIG.heads // ranks
        attention.qkv, attention.out = nn.Linear(hidden, 3 * hidden // ranks), nn.Linear(hidden // ranks, hidden)
        mlp.up, mlp.down = nn.Linear(hidden, 4 * hidden // ranks), nn.Linear(4 * hidden // ranks, hidden)
        for layer in (attention.qkv, mlp.up, attention.out, mlp.down):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        for layer in (attention.out, mlp.down):
            layer.bias.requires_grad_(dist.get_rank() == 0)  # added once
        block.attention, block.mlp = Piece(attention), Piece(mlp)
    return model.to(device())


#: The seed with which a rank draws its pieces, in two copies of the program.
SEEDS: Mapping[str, Callable[[int], int]] = {"A": lambda rank: 1, "B": lambda rank: 1 + rank}


def day_1(copy: str, steps: int) -> tuple[GPT, Log]:
    """Train with tensor parallelism, by one of the two copies."""
    model, log = in_pieces(SEEDS[copy](dist.get_rank())), Log()
    optimizer = adam(model)
    for step in range(steps):
        loss = loss_of(model, *batch(step, alike=True))
        loss.backward()
        log.add(step, loss, model)
        optimizer.step()
        optimizer.zero_grad()
    return model, log


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


# --- day 2: documents of different lengths


def documents(step: int) -> tuple[Tensor, Tensor]:
    """Windows of a step for all ranks, sorted by length: what follows a document's end does not count."""
    x, y = batch(step, alike=True)
    draw = random.Random(step)
    for row, length in enumerate(sorted(draw.choice((4, 6, 8, 24, 32)) for _ in range(BATCH))):
        y[row, length:] = PAD
    return x, y


def token_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The sum of the losses of all tokens that count."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")


def trained(steps: int) -> GPT:
    """The model after so many steps on documents, as one process trains it."""
    model = build_gpt(CONFIG).to(device())
    optimizer = adam(model)
    for step in range(steps):
        x, y = documents(step)
        (token_sum(model, x, y) / (y != PAD).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def gradient(model: nn.Module) -> Tensor:
    """All gradients in one tensor, which are then taken off the model."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return flat


def one_step(model: nn.Module, x: Tensor, y: Tensor, divisor: Callable[[Tensor, Tensor], Any]) -> tuple[Tensor, ...]:
    """Loss and gradient of all ranks together; each micro-batch is divided by ``divisor(its tokens, all ranks')``."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens_of_ranks = torch.stack([(part != PAD).sum() for part in y.chunk(ranks)])
    mine, total = zip(x.chunk(ranks)[rank].chunk(2), y.chunk(ranks)[rank].chunk(2), strict=True), 0
    for xs, ys in mine:
        part = token_sum(model, xs, ys) / divisor((ys != PAD).sum(), tokens_of_ranks)
        part.backward()
        total = total + part.detach()
    mean = summed(torch.cat([total[None], gradient(model)])) / ranks
    return mean[0], mean[1:]


def as_found(tokens: Tensor, tokens_of_ranks: Tensor) -> Tensor:
    return 2 * tokens  # the mean of the micro-batch, and then of two such means


def of_the_rank(tokens: Tensor, tokens_of_ranks: Tensor) -> Tensor:
    return tokens_of_ranks[dist.get_rank()]


def of_all_ranks(tokens: Tensor, tokens_of_ranks: Tensor) -> Tensor:
    return tokens_of_ranks.sum() / dist.get_world_size()  # the mean over ranks divides by their number


def beside_one_process(divisor: Callable[[Tensor, Tensor], Any], learnt: int) -> tuple[float, float, float]:
    """Loss of a step of all ranks, loss of one process with the whole batch, and how far the gradient is off."""
    model, (x, y) = trained(learnt), documents(learnt)
    loss, ours = one_step(model, x, y, divisor)
    right = token_sum(model, x, y) / (y != PAD).sum()
    right.backward()
    truth = gradient(model)
    return loss.item(), right.item(), ((ours - truth).norm() / truth.norm()).item()


# --- day 3: a run that was resumed


def day_3(steps: int, assign: bool = True) -> tuple[GPT, torch.optim.Optimizer, Log]:
    """Train with data parallelism, stop in the middle, resume."""
    log, model = Log(), build_gpt(CONFIG).to(device())
    state = data_parallel(model, adam(model), log, range(steps // 2))
    model = build_gpt(CONFIG).to(device())
    optimizer = adam(model)
    model.load_state_dict(state["model"], assign=assign)  # the tensors of the file, without a copy
    model.tie()
    optimizer.load_state_dict(state["optimizer"])
    data_parallel(model, optimizer, log, range(steps // 2, steps))
    return model, optimizer, log


def data_parallel(model: nn.Module, optimizer: torch.optim.Optimizer, log: Log, steps: Iterable[int]) -> dict[str, Any]:
    """Train under DDP; return a checkpoint."""
    ddp = DDP(model)
    for step in steps:
        loss = loss_of(ddp, *batch(step))
        loss.backward()
        log.add(step, loss, model)
        optimizer.step()
        optimizer.zero_grad()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return torch.load(file, map_location=device())


# --- day 4: less memory


class Repeated(GPT):
    """The GPT with each of its blocks used twice, and computed again in backward."""

    reentrant = True

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[-1], device=tokens.device))
        if not x.requires_grad:
            x.requires_grad_()  # or a reentrant checkpoint would give no gradients
        for block in [*self.blocks, *self.blocks]:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if torch.is_grad_enabled() else block(x)
        return self.head(self.norm(x))


def day_4(steps: int, reentrant: bool = True, frozen: bool = True) -> tuple[GPT, Log]:
    """Train the smaller model with data parallelism."""
    torch.manual_seed(0)
    model, log = Repeated(replace(CONFIG, tied=False)).to(device()), Log()
    model.reentrant = reentrant
    for layer in (model.embedding, model.position):
        layer.requires_grad_(not frozen)
    data_parallel(model, adam(model), log, range(steps))
    return model, log


# --- day 5: a slow node


def day_5(steps: int, slow: int, times: int) -> list[tuple[float, float]]:
    """Train with data parallelism, one rank computing some products again and again; of each step the milliseconds
    outside of collectives, and those of the whole step."""
    model, rank, found = build_gpt(CONFIG).to(device()), dist.get_rank(), []
    for step in range(steps):
        start = time.perf_counter()
        for _ in range(times if rank == slow else 1):
            loss = next_token_loss(model(batch(step)[0]), batch(step)[1])
        loss.backward()
        if loss.is_cuda:
            torch.cuda.synchronize()
        own = time.perf_counter() - start
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        found.append((1e3 * own, 1e3 * (time.perf_counter() - start)))
    return found


#: Lines of BLOOM's log in which a step became slower: iteration, seconds of it, loss, norm of the gradient, TFLOP/s of
#: a GPU (BigScience, chronicles of April 28, 2022, as of commit 9e64ede).
BLOOM = (
    (42780, 105.16, 2.117073, 0.150, 149.10),
    (42781, 105.17, 2.116946, 0.140, 149.09),
    (42782, 106.25, 2.110646, 0.144, 147.58),
    (42783, 110.17, 2.124820, 0.135, 142.32),
    (42784, 111.14, 2.127643, 0.127, 141.09),
)
