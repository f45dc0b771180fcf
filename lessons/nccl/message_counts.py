"""Try an all-reduce that is made of messages, on real ranks: is it right, in how many steps, with how many bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from course_utils.check import message_steps
from course_utils.costs import TwoLevelCluster, all_reduce_bytes, all_reduce_steps
from course_utils.ranks import device, launch, record

NUMEL = 840 * 300  # numbers in the counted tensors, float32; 840 divides by every number up to 8


@dataclass(frozen=True)
class Count:
    """What an algorithm needed for one all-reduce."""

    steps: int  # rounds of messages that follow one another: in each, a rank sends one at most and receives one
    sent: tuple[float, ...]  # what each rank sent, as a multiple of S, the bytes of the whole tensor

    @property
    def busiest(self) -> float:
        """What the rank sent that sent most, as a multiple of S."""
        return max(self.sent)

    def __str__(self) -> str:
        return f"{self.steps:2} steps; sent by each rank, in S: " + " ".join(f"{sent:.2f}" for sent in self.sent)


def _trial(all_reduce: Callable[[torch.Tensor], None]):
    """On a rank: run it on whole numbers that differ between ranks, compare with the library; return the ledger."""
    x = torch.randint(-99, 100, (NUMEL,), device=device()).float()
    expected = x.clone()
    dist.all_reduce(expected)
    with record() as ledger:
        all_reduce(x)
    assert torch.equal(x, expected), "the sum is not that of the library's all-reduce"
    return ledger


def count_messages(all_reduce: Callable[[torch.Tensor], None], world_size: int) -> Count:
    """Run an all-reduce on real ranks, compare its result with the library's to the last bit, and count its messages.

    It sums a float32 tensor over all ranks, in place, by messages between two ranks only.
    """
    ledgers = launch(_trial, all_reduce, world_size=world_size)
    return Count(message_steps(ledgers), tuple(ledger.sent / (4 * NUMEL) for ledger in ledgers))


def as_nodes(n: int) -> tuple[int, int]:
    """Nodes, and ranks on each, as which `n` ranks are seen here: two nodes, or `n` nodes where it is odd."""
    return (2, n // 2) if n % 2 == 0 else (n, 1)


def formula(name: str, n: int) -> tuple[int, float]:
    """Return steps, and bytes that the busiest rank sends in multiples of S, from the formulas of `costs`."""
    cluster = TwoLevelCluster(*as_nodes(n), intra=(0.0, 0.0), inter=(0.0, 0.0))
    return all_reduce_steps(name, cluster), all_reduce_bytes(name, cluster, 1.0)
