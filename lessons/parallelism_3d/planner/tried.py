"""Layouts that somebody tried: did they fit, and what was the peak? Rows and sources lie in ``recordings``.

Fitted to every second row are `held.FRAGMENTS` (to what "ran") and `matmul_blackwell` (to dense rates).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from course_utils.recordings import FOLDER
from course_utils.transformer import TransformerConfig

from .clusters import CLUSTERS, GpuCluster, cluster
from .held import fits, fragments, fullest
from .layout import Layout
from .rates import CONSTANTS
from .step_time import StepModel


@dataclass(frozen=True)
class Tried:
    """A layout as `plan` takes it, and what was measured: whether it "ran", "GB" on its fullest GPU without CUDA and
    NCCL, "tokens/s" of each GPU, or "seconds" of a step."""

    model: TransformerConfig
    cluster: GpuCluster
    layout: Layout
    batch: int
    unit: str
    value: float
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
        if self.unit == "GB":
            return (sum(held) + fragments(self.layout, held)) / self.value / 1e9 - 1
        found = StepModel(self.model, self.cluster, CONSTANTS).step(self.layout, self.batch, held)
        return (found.tokens_per_gpu if self.unit == "tokens/s" else found.seconds) / self.value - 1

    @property
    def share(self) -> float:
        """Measured share of the GPU's memory, or of its peak in the format of the products."""
        card = self.cluster.card
        if self.unit == "GB":
            return self.value * 1e9 / card.memory_bytes
        return self.value * self.model.flops_per_token("none") / card.flops[self.layout.products]


@cache
def layouts_measured(unit: str) -> tuple[Tried, ...]:
    """Return the rows of a unit: 76 peaks of memory of six projects ("GB"), 109 rates of NVIDIA's pages ("tokens/s"),
    or whether 694 layouts of Llama on 32 to 256 A100s "ran" (Hagemann et al. 2023, arXiv 2311.05610)."""
    stored = json.loads((FOLDER / "layouts_measured.json").read_text(encoding="utf-8"))
    kinds, found = {gpu: name for name, (gpu, *_) in CLUSTERS.items()}, []
    for row in (dict(zip(stored["columns"], values, strict=True)) for values in stored["rows"]):
        if row["unit"] == unit:
            shape = {name: tuple(of) if name == "latent" else of for name, of in stored["models"][row["model"]].items()}
            model, machine = TransformerConfig(**shape, context=row["length"]), cluster(kinds[row["gpu"]], row["gpus"])
            layout = Layout(**row["layout"], unequal_stages=True, copied_kv=True)
            found.append(Tried(model, machine, layout, row["batch"], unit, row["value"], row["where"]))
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
    seen = [(fits(row.model, row.cluster, row.layout, row.batch), bool(row.value)) for row in rows]
    fitting, failed = [ran for yes, ran in seen if yes], [yes for yes, ran in seen if not ran]
    return Foreseen(
        len(seen), sum(fitting) / len(fitting), 1 - sum(failed) / len(failed),
        sum(ran and not yes for yes, ran in seen) / sum(ran for _, ran in seen),
    )
