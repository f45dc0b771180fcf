"""Layouts that somebody tried: did they fit, and what was the peak? Rows and sources lie in ``recordings``.

Fitted to every second row are `held.FRAGMENTS` (to `layouts_tried`) and `matmul_blackwell` (to `layouts_measured`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from course_utils.recordings import FOLDER
from course_utils.transformer import TransformerConfig

from .clusters import CLUSTERS, GpuCluster, cluster, own_cluster
from .held import fits, fragments, fullest
from .layout import Layout
from .rates import CONSTANTS
from .step_time import StepModel


@dataclass(frozen=True)
class Tried:
    """A layout as `plan` takes it, whether it ran, and what was measured: bytes on the fullest GPU, without CUDA's and
    NCCL's, or tokens per second of each GPU."""

    model: TransformerConfig
    cluster: GpuCluster
    layout: Layout
    batch: int
    ran: bool = True
    peak: float = 0.0
    rate: float = 0.0
    where: str = ""
    fitted = False

    @property
    def family(self) -> str:
        """moe, pipeline, tensor, fsdp or one GPU: the first that the layout has."""
        one = self.layout
        has = {"moe": self.model.experts, "pipeline": one.pp > 1, "tensor": one.tp > 1, "fsdp": one.gpus > 1}
        return next((name for name, yes in has.items() if yes), "one GPU")

    @property
    def error(self) -> float:
        """Planned over measured, less one."""
        held = fullest(self.model, self.layout, self.batch)
        if self.peak:
            return (sum(held) + fragments(self.layout, held)) / self.peak - 1
        found = StepModel(self.model, self.cluster, CONSTANTS).step(self.layout, self.batch, held)
        return found.tokens_per_gpu / self.rate - 1

    @property
    def share(self) -> float:
        """Measured share of the GPU's memory, or of its peak in the format of the products."""
        card = self.cluster.card
        once = self.rate * self.model.flops_per_token("none") / card.flops[self.layout.products]
        return self.peak / card.memory_bytes or once


@cache
def layouts_tried() -> tuple[Tried, ...]:
    """Return 694 layouts of Llama 13B, 30B and 65B on 32 to 256 A100s (Hagemann et al. 2023, arXiv 2311.05610).

    As in their later code (https://github.com/Aleph-Alpha/scaling), at most norms are fused, and the loss gathers
    logits whole.
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
            sequence_parallel=bool(row["sequence_parallel"]), compiled=False, fused_norms=bool(row["fused"]),
            parallel_loss=False, unequal_stages=True,
        )
        found.append(Tried(model, own_cluster("a100", row["gpus"]), layout, row["batch"], bool(row["ran"])))
    return tuple(found)


@cache
def layouts_measured(unit: str) -> tuple[Tried, ...]:
    """Return 76 peaks of memory of six projects ("GB"), or 109 rates of NVIDIA's pages ("tokens/s")."""
    stored = json.loads((FOLDER / "layouts_measured.json").read_text(encoding="utf-8"))
    kinds, found = {gpu: name for name, (_, gpu) in CLUSTERS.items()}, []
    for row in (dict(zip(stored["columns"], values, strict=True)) for values in stored["rows"]):
        if row["unit"] == unit:
            shape = {name: tuple(of) if name == "latent" else of for name, of in stored["models"][row["model"]].items()}
            layout = Layout(**row["layout"], unequal_stages=True, copied_kv=True)
            one = Tried(
                TransformerConfig(**shape, context=row["length"]), cluster(kinds[row["gpu"]], row["gpus"]), layout,
                row["batch"], where=row["where"],
            )
            found.append(replace(one, peak=1e9 * row["value"]) if unit == "GB" else replace(one, rate=row["value"]))
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
    seen = [(fits(row.model, row.cluster, row.layout, row.batch), row.ran) for row in rows]
    fitting, failed = [ran for yes, ran in seen if yes], [yes for yes, ran in seen if not ran]
    return Foreseen(
        len(seen), sum(fitting) / len(fitting), 1 - sum(failed) / len(failed),
        sum(ran and not yes for yes, ran in seen) / sum(ran for _, ran in seen),
    )
