"""Layouts that somebody tried, of which many ran out of memory: does the planner foresee it?

The rows lie in ``recordings/layouts_tried.json`` with their source. Nothing in the planner is fitted to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from course_utils.recordings import FOLDER
from course_utils.transformer import TransformerConfig

from .clusters import GpuCluster, own_cluster
from .held import fullest, reserve
from .layout import Layout


@dataclass(frozen=True)
class Tried:
    """A layout as `plan` takes it, and whether it ran."""

    model: TransformerConfig
    cluster: GpuCluster
    layout: Layout
    batch: int
    ran: bool

    @property
    def fits(self) -> bool:
        """Whether the planner says that it fits."""
        held = fullest(self.model, self.layout, self.batch)
        return sum(held) + reserve(self.layout, held) <= self.cluster.card.memory_bytes


@cache
def layouts_tried() -> tuple[Tried, ...]:
    """Return 694 layouts of Llama 13B, 30B and 65B on 32 to 256 A100s (Hagemann et al. 2023, arXiv 2311.05610).

    Our reading, which the source does not say: only its norms are fused, and its loss gathers logits whole.
    """
    stored = json.loads((FOLDER / "layouts_tried.json").read_text(encoding="utf-8"))
    found = []
    for row in (dict(zip(stored["columns"], values, strict=True)) for values in stored["rows"]):
        layers, hidden, heads, ffn = stored["models"][row["model"]]
        model = TransformerConfig(
            layers, heads, hidden, row["length"], stored["vocabulary"], tied=False, mlp_ratio=ffn / hidden, gated=True,
            fused=row["attention"] == "flash", name=row["model"],
        )
        layout = Layout(
            row["tp"], row["pp"], row["dp"], microbatch=row["microbatch"], recompute=row["recompute"],
            sequence_parallel=bool(row["sequence_parallel"]), compiled=False, fused_norms=bool(row["fused"]), parallel_loss=False,
            unequal_stages=True,
        )
        found.append(Tried(model, own_cluster("a100", row["gpus"]), layout, row["batch"], bool(row["ran"])))
    return tuple(found)


@dataclass(frozen=True)
class Foreseen:
    """Shares: of layouts called fitting, that ran; of those out of memory, foreseen; of those that ran, refused."""

    layouts: int
    fitting_ran: float
    foreseen: float
    refused: float


def foreseen(rows: Iterable[Tried]) -> Foreseen:
    """Return how often the planner is right about memory."""
    seen = [(row.fits, row.ran) for row in rows]
    fitting, failed = [ran for fits, ran in seen if fits], [fits for fits, ran in seen if not ran]
    return Foreseen(
        len(seen), sum(fitting) / len(fitting), 1 - sum(failed) / len(failed),
        sum(ran and not fits for fits, ran in seen) / sum(ran for _, ran in seen),
    )
