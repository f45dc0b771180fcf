"""Training runs that others published: what was run, on what, how it was divided, and how fast it went.

The rows lie in ``recordings/published_runs.json``, each with the place it was read in. Nothing is in a row that its
source does not say, but for the fields that its `assumed` names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from course_utils.hardware import GPUS
from course_utils.recordings import FOLDER
from course_utils.transformer import TransformerConfig

__all__ = ["FAMILIES", "ROLES", "ModelShape", "PublishedRun", "published_runs"]

#: Kinds of runs: data parallelism alone, sharded or not; tensor, pipeline or context parallelism; sequences of 32,768
#: tokens or more, however divided; mixtures of experts.
FAMILIES = ("fsdp", "3d", "long_context", "moe")
#: What a row may be used for: constants may be fitted to it; it is predicted only; it is predicted once, at the end.
ROLES = ("known", "held_out", "exam")
_LONG = 32_768


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder-only transformer, as its source gives it.

    Attributes
    ----------
    layers, hidden, heads, kv_heads, ffn, vocabulary : int
        `ffn` is the inner width of the MLP, of one expert in a mixture of experts.
    gated : bool
        Whether the MLP has three matrices (SwiGLU).
    biases : bool
        Whether linear layers and norms have biases.
    learnt_positions : bool
        Whether positions have an embedding, as long as the sequence; otherwise they are rotary or none.
    tied : bool
        Whether the head shares the embedding's weight.
    parameters : float or None
        Published number of parameters, at the length of `parameters_at`.
    parameters_at : int
        Tokens in a sequence for which `parameters` is given.
    experts, experts_per_token : int
        Of each layer; 0 without experts.
    where : str
        What the shape was read in.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    gated: bool
    biases: bool
    learnt_positions: bool
    tied: bool
    where: str
    parameters: float | None = None
    parameters_at: int = 0
    experts: int = 0
    experts_per_token: int = 0

    @property
    def _attention(self) -> int:
        return 2 * self.hidden * self.hidden * (self.heads + self.kv_heads) // self.heads

    @property
    def _mlp(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.ffn

    def parameter_count(self, length: int) -> int:
        """Return the number of parameters, by the shape, with positions for `length` tokens if they are learnt."""
        h, kv = self.hidden, self.hidden * self.kv_heads // self.heads
        small = (4 * h + h + 2 * kv + h + self.ffn + h) if self.biases else 2 * h
        experts = max(1, self.experts)
        layer = self._attention + experts * self._mlp + small + (h * self.experts)
        around = self.vocabulary * h * (1 if self.tied else 2) + self.learnt_positions * length * h
        return self.layers * layer + around + (2 * h if self.biases else h)

    @property
    def product_weights(self) -> int:
        """Weights that a token is multiplied with: those of the layers, of its experts only, and of the head."""
        active = self._mlp * max(1, self.experts_per_token) + self.hidden * self.experts
        return self.layers * (self._attention + active) + self.vocabulary * self.hidden

    def config(self, length: int, fused: bool = True) -> TransformerConfig:
        """Return the shape as the planner takes it, for `length` tokens; one expert in place of several."""
        return TransformerConfig(
            self.layers, self.heads, self.hidden, length, self.vocabulary, self.tied,
            queries_per_key=self.heads // self.kv_heads, mlp_ratio=self.ffn / self.hidden, gated=self.gated,
            fused=fused, name=self.name,
        )


@dataclass(frozen=True)
class PublishedRun:
    """A published training run. What the source does not say is None, or named in `assumed`.

    Attributes
    ----------
    id : str
        Table and number of the row.
    table, where, title, url, version : str
        Group of rows; line, table or section; title and address of the source; its commit or the date it was read.
    role : str
        One of `ROLES`.
    outcome : {"ran", "out_of_memory"}
    shape : ModelShape
    gpu : str
        Key of `hardware.GPUS`.
    memory_gb, memory_bandwidth, power_w : float
        Of a GPU: GB, and where the source says other than the data sheet bytes per second and watts.
    gpus, gpus_per_node : int
    network_gbps : float or None
        Gb/s of each GPU between nodes, in one direction.
    length, microbatch, batch, accumulation : int
        Tokens in a sequence; sequences in a micro-batch, in a step, and micro-batches of a GPU or pipeline in a step.
    precision : str
        Of matrix products: bf16, fp16, fp8, mxfp8, nvfp4.
    reduce : str or None
        Data type in which gradients are reduced.
    tp, pp, cp, ep, dp_shard, dp_replicate : int
        Degrees; ``tp * pp * cp * dp_shard * dp_replicate`` is `gpus`. `ep` divides experts among the others' ranks.
    zero, virtual : int
        ZeRO stage, and chunks of layers on a pipeline rank: 1 if not interleaved.
    schedule : str or None
    sequence_parallel, tp_overlap, compile, offload : bool or None
    recompute : {"none", "selective", "full"} or None
    recompute_share : float
        Share of the layers in which this is done.
    recompute_detail : str
        What the source means by it.
    loss : str or None
        "whole": the logits in fp32 and their gradient are stored; "compiled": neither is, the logits stay in bf16.
    attention : str or None
        Kernel: unfused, triton, flash, flash2, flash3, cudnn, ring.
    tokens_per_gpu, tflops, mfu, hfu, step_seconds, peak_gib : float or None
        As published: tokens per second, TFLOP/s, shares of the GPU's peak, seconds, GiB on the fullest GPU.
    held_gb : float or None
        What nvidia-smi shows instead, in the source's GB, with what CUDA and the allocator hold.
    peak_tflops : float or None
        Peak that the source's shares refer to, where it says so; otherwise the data sheet's for `precision`.
    counts_attention : {"full", "causal", "none"} or None
        Which FLOPs of attention are in `tflops`, `mfu` and `hfu`.
    counts_recompute : bool or None
        Whether `tflops` has what is computed a second time; `hfu` has it always, `mfu` never.
    counts_parameters : bool
        Whether the source counts 6 for each parameter, embeddings too; otherwise for each weight in a product.
    note : str
    assumed : tuple of str
        Fields that the source does not give.
    """

    id: str
    table: str
    where: str
    title: str
    url: str
    version: str
    role: str
    shape: ModelShape
    gpu: str
    memory_gb: float
    gpus: int
    length: int
    precision: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    gpus_per_node: int = 8
    network_gbps: float | None = None
    memory_bandwidth: float | None = None
    power_w: float | None = None
    microbatch: int | None = None
    batch: int | None = None
    accumulation: int | None = None
    reduce: str | None = None
    zero: int | None = None
    virtual: int = 1
    schedule: str | None = None
    sequence_parallel: bool | None = None
    tp_overlap: bool | None = None
    recompute: str | None = None
    recompute_share: float = 1.0
    recompute_detail: str = ""
    compile: bool | None = None
    loss: str | None = None
    attention: str | None = None
    offload: bool | None = False
    outcome: str = "ran"
    tokens_per_gpu: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    step_seconds: float | None = None
    peak_gib: float | None = None
    held_gb: float | None = None
    peak_tflops: float | None = None
    counts_attention: str | None = None
    counts_recompute: bool | None = None
    counts_parameters: bool = False
    note: str = ""
    assumed: tuple[str, ...] = field(default=())

    @property
    def family(self) -> str:
        """One of `FAMILIES`."""
        if self.shape.experts:
            return "moe"
        if self.length >= _LONG:
            return "long_context"
        return "3d" if self.tp * self.pp * self.cp > 1 else "fsdp"

    @property
    def source(self) -> str:
        return f"{self.title}, {self.where}, {self.url}"

    @property
    def dp(self) -> int:
        """Ranks of data parallelism."""
        return self.dp_shard * self.dp_replicate

    @property
    def name(self) -> str:
        """Model, GPUs and length."""
        length = f"{self.length // 1024}k" if self.length >= 1024 else str(self.length)
        return f"{self.shape.name} on {self.gpus} {GPUS[self.gpu].name}, {length}"

    def flops_per_token(self, recompute: bool = False) -> float:
        """Return the FLOPs of a token as the source counts them, with what is computed again or without."""
        shape = self.shape
        weights = shape.parameter_count(self.length) if self.counts_parameters else shape.product_weights
        scores = {"full": 4, "causal": 2, "none": 0, None: 4}[self.counts_attention]
        attention = scores * self.length * shape.hidden * shape.layers
        forward, again = 2 * weights + attention, 0.0
        if recompute and self.recompute == "full":
            head = 0 if self.counts_parameters else 2 * shape.vocabulary * shape.hidden
            again = self.recompute_share * (forward - head)
        elif recompute and self.recompute == "selective" and self.attention == "unfused":
            again = attention
        return 3 * forward + again

    @property
    def rate_from(self) -> str | None:
        """Which published figure `rate` comes from."""
        names = ("tokens_per_gpu", "step_seconds", "tflops", "mfu", "hfu")
        return next((name for name in names if getattr(self, name) is not None), None)

    @property
    def rate(self) -> float | None:
        """Tokens per second of each GPU: published, or what follows from the other published figures."""
        if self.tokens_per_gpu is not None:
            return self.tokens_per_gpu
        if self.step_seconds is not None:
            return self.batch * self.length / self.step_seconds / self.gpus
        if self.tflops is not None:
            return self.tflops * 1e12 / self.flops_per_token(bool(self.counts_recompute))
        peak = (self.peak_tflops or GPUS[self.gpu].flops["bf16"] / 1e12) * 1e12
        if self.mfu is not None:
            return self.mfu * peak / self.flops_per_token()
        return None if self.hfu is None else self.hfu * peak / self.flops_per_token(True)


def _chosen(value: object, wanted: object) -> bool:
    if wanted is None:
        return True
    return value in wanted if isinstance(wanted, Iterable) and not isinstance(wanted, str) else value == wanted


@cache
def _read() -> tuple[PublishedRun, ...]:
    stored = json.loads((FOLDER / "published_runs.json").read_text(encoding="utf-8"))
    shapes = {name: ModelShape(name=name, **shape) for name, shape in stored["models"].items()}
    known = {each.name for each in fields(PublishedRun)}
    runs = []
    for table in stored["tables"]:
        for number, values in enumerate(table["rows"], 1):
            row: dict[str, Any] = {**table["all"], **dict(zip(table["columns"], values, strict=True))}
            row |= row.pop("more", None) or {}
            machine: Mapping[str, Any] = stored["machines"][row.pop("machine")]
            assumed = dict.fromkeys((*machine.get("assumed", ()), *row.pop("assumed", ())))
            source = stored["sources"][row.pop("source", table["source"])]
            row = {**source, **machine, **row, "shape": shapes[row["model"]], "assumed": tuple(assumed)}
            del row["model"]
            row["where"] = f"{table['where']}, {row['where']}" if "where" in row else table["where"]
            if row.keys() - known:
                raise ValueError(f"{table['id']}: unknown fields {sorted(row.keys() - known)}")
            runs.append(PublishedRun(id=f"{table['id']}-{number}", table=table["id"], role=row.pop("role"), **row))
    return tuple(runs)


def published_runs(
    family: str | Iterable[str] | None = None, role: str | Iterable[str] | None = None,
    outcome: str | Iterable[str] | None = "ran", table: str | Iterable[str] | None = None,
) -> tuple[PublishedRun, ...]:
    """Return the published runs of these families, roles, outcomes and tables: each one, several, or None for all."""
    wanted = {"family": family, "role": role, "outcome": outcome, "table": table}
    return tuple(run for run in _read() if all(_chosen(getattr(run, name), want) for name, want in wanted.items()))
