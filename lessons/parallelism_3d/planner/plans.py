"""What a layout costs: seconds by part, messages hidden and exposed, bytes, and everything that was assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from textwrap import fill

from course_utils import memory
from course_utils.transformer import TransformerConfig

from .clusters import GpuCluster
from .held import reserve
from .layout import Layout
from .rates import StepTimeConstants

#: Where the seconds of a step go, in the order of tables and figures.
PARTS = ("compute", "tensor", "context", "expert", "pipeline", "data", "bubble")


@dataclass(frozen=True)
class Plan:
    """What a layout costs: bytes on the fullest GPU, and seconds of a step on the GPU with the most work.

    `compute` has the optimizer in it; `tensor` to `data` are what communication adds, by not being hidden or by slowing
    the computing that hides it; the bubble is waiting for other pipeline stages.
    """

    model: TransformerConfig
    cluster: GpuCluster
    layout: Layout
    batch: int
    memory: memory.Memory
    compute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float
    bubble: float
    hidden: Mapping[str, float]  # seconds of communication that take no time of their own, by part
    constants: StepTimeConstants

    @property
    def reserve(self) -> float:
        """Bytes that the fullest GPU holds beside: CUDA, NCCL, and what the allocator cannot give out again."""
        return reserve(self.layout, tuple(self.memory.parts().values()))

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Seconds by name, in the order of `PARTS`."""
        return {part: getattr(self, part) for part in PARTS}

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens per second of each GPU."""
        return self.batch * self.model.context / self.seconds / self.cluster.gpus

    @property
    def tflops(self) -> float:
        """TFLOP/s of each GPU, with what is computed a second time, as Megatron-LM counts."""
        once, all_again = (self.model.flops_per_token(how) for how in ("none", self.layout.recompute))
        return self.tokens_per_gpu * (once + self.layout.recompute_share * (all_again - once)) / 1e12

    @property
    def model_tflops(self) -> float:
        """TFLOP/s of each GPU, every operation counted once, as Llama 3 counts."""
        return self.tokens_per_gpu * self.model.flops_per_token("none") / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: `model_tflops` as a share of the peak (Chowdhery et al. 2022, arXiv 2204.02311)."""
        return self.model_tflops * 1e12 / self.cluster.card.flops["bf16"]

    def __str__(self) -> str:
        held, rate = f"{self.memory.total / 1e9:.1f} GB", f"{self.model_tflops:.0f} model TFLOP/s a GPU"
        how = f"ZeRO-{self.layout.zero}, recompute {self.layout.recompute}"
        return f"{self.model.name} as {self.layout}, {how}: {self.seconds:.3g} s a step, {rate}, {held}"

    def report(self) -> str:
        """The plan in words: time with what is hidden, memory, and everything that it assumes."""
        lines = [str(self), f"  {self.tokens_per_gpu:,.0f} tokens/s a GPU", "", f"  {'time':10}   exposed    hidden"]
        for part, seconds in self.parts().items():
            behind = f"{self.hidden[part]:8.3f} s" if part in self.hidden else ""
            lines.append(f"  {part:10}{seconds:8.3f} s{behind}")
        lines += ["", "  memory of the fullest GPU"]
        lines += [f"  {part:12}{size / 1e9:8.1f} GB" for part, size in self.memory.parts().items()]
        lines.append(f"  {'reserve':12}{self.reserve / 1e9:8.1f} GB")
        look = {"width": 100, "initial_indent": "  - ", "subsequent_indent": "    "}
        return "\n".join([*lines, "", "  assumed", *(fill(text, **look) for text in self._assumptions())])

    def _assumptions(self) -> list[str]:
        """Machine, software, and constants."""
        machine, one, card = self.cluster, self.layout, self.cluster.card
        links = {
            "in a node": (machine.intra[1], machine.reached[0], self.constants.nvlink),
            "between nodes, each GPU": (machine.inter[1], machine.reached[1], self.constants.network),
        }
        told = [f"{machine.gpus} {card.name} in nodes of {machine.per_node}, {card.memory_bytes / 1e9:.0f} GB each"]
        for name, (beta, reached, share) in links.items():
            how = f"measured {reached / 1e9:.0f}" if reached else f"{share} of it reached"
            told.append(f"{name}: {1 / beta / 1e9:.0f} GB/s one way, {how}")
        told.append(f"sequences of {self.model.context:,}, {self.batch} in a step, micro-batches of {one.microbatch}")
        if self.model.vocabulary % (128 * one.tp):
            told.append(f"a vocabulary of {self.model.vocabulary:,}, not padded to a multiple of 128 x TP")
        if one.copied_kv and one.tp > self.model.kv_heads:
            told.append(f"each key-value head is on {one.tp // self.model.kv_heads} tensor ranks")
        counts = ("tp", "pp", "dp", "cp", "ep", "replicas", "microbatch")
        told += [
            ", ".join(f"{each.name} {getattr(some, each.name)}" for each in fields(some) if each.name not in counts)
            for some in (one, self.constants)
        ]
        told.append("no input, logging, checkpoint or failure takes time; no other job uses the network")
        return told
