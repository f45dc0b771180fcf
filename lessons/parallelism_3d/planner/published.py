"""Training runs that others published: what was run, on what, how it was divided, and how fast it went.

The rows lie in ``recordings/published_runs.json``, each with the place it was read in. Nothing is in a row that its
source does not say, but for the fields that its `assumed` names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from course_utils.hardware import GPUS
from course_utils.recordings import FOLDER
from course_utils.transformer import TransformerConfig


@dataclass(frozen=True)
class PublishedRun:
    """A published training run. What the source does not say is None, or named in `assumed`."""

    id: str  # table and number of the row
    table: str  # group of rows
    where: str  # line, table or section
    title: str  # of the source
    url: str
    version: str  # its commit, or the date it was read
    role: str  # known: constants may be fitted to it; held_out: it is predicted only; exam: once, at the end
    fitted: bool  # whether they are
    model: TransformerConfig  # for sequences of `length` tokens
    gpu: str  # key of `hardware.GPUS`
    memory_gb: float
    gpus: int
    length: int  # tokens in a sequence
    precision: str  # of matrix products: bf16, fp16, fp8, mxfp8, nvfp4
    tp: int = 1  # tp * pp * cp * dp_shard * dp_replicate are all GPUs
    pp: int = 1
    cp: int = 1
    ep: int = 1  # divides experts among the others' ranks
    dp_shard: int = 1
    dp_replicate: int = 1
    gpus_per_node: int = 8
    network_gbps: float = 0  # Gb/s of each GPU between nodes, in one direction
    memory_bandwidth: float | None = None  # bytes per second, where they are not those of `hardware.GPUS`
    power_w: float | None = None  # watts, where they are not the data sheet's
    microbatch: int | None = None  # sequences
    batch: int | None = None  # sequences of a step
    accumulation: int | None = None  # micro-batches of a GPU or pipeline in a step
    reduce: str | None = None  # data type in which gradients are reduced
    zero: int | None = None  # stage
    virtual: int = 1  # chunks of layers on a pipeline rank
    schedule: str | None = None
    sequence_parallel: bool | None = None
    tp_overlap: bool | None = None
    recompute: str | None = None  # none, selective, full
    recompute_share: float = 1.0  # of the layers
    recompute_detail: str = ""  # what the source means by it
    compile: bool | None = None
    fused_norms: bool | None = None  # whether one kernel does a norm where nothing is compiled
    loss: str | None = None  # whole: fp32 logits and their gradient are stored; compiled: logits stay in bf16
    attention: str | None = None  # kernel: unfused, triton, flash, flash2, flash3, cudnn, ring
    outcome: str = "ran"  # or out_of_memory
    tokens_per_gpu: float | None = None  # a second
    tflops: float | None = None
    mfu: float | None = None  # shares of the GPU's peak
    hfu: float | None = None
    step_seconds: float | None = None
    peak_gib: float | None = None  # on the fullest GPU
    held_gb: float | None = None  # what nvidia-smi shows instead, with what CUDA and the allocator hold
    peak_tflops: float | None = None  # that the source's shares refer to; otherwise the data sheet's for `precision`
    counts_attention: str | None = None  # which FLOPs of attention are in `tflops`, `mfu`, `hfu`: full, causal, none
    counts_recompute: bool | None = None  # whether `tflops` has what is computed again; `hfu` has it, `mfu` never
    parameters: float | None = None  # of the model, as published
    counts_parameters: bool = False  # whether 6 are counted for each parameter; otherwise for each weight in a product
    note: str = ""
    assumed: tuple[str, ...] = ()  # fields that the source does not give

    @property
    def family(self) -> str:
        """moe: mixtures of experts; long_context: sequences of 32,768 tokens or more; 3d: tensor, pipeline or context
        parallelism; fsdp: data parallelism alone, sharded or not."""
        has = {"moe": self.model.experts, "long_context": self.length >= 32_768, "3d": self.tp * self.pp * self.cp > 1}
        return next((name for name, yes in has.items() if yes), "fsdp")

    @property
    def dp(self) -> int:
        """Ranks of data parallelism."""
        return self.dp_shard * self.dp_replicate

    @property
    def name(self) -> str:
        """Model, GPUs and length."""
        length = f"{self.length // 1024}k" if self.length >= 1024 else str(self.length)
        return f"{self.model.name} on {self.gpus} {GPUS[self.gpu].name}, {length}"

    def flops_per_token(self, recompute: bool = False) -> float:
        """Return the FLOPs of a token as the source counts them, with what is computed again or without."""
        model, head = self.model, self.model.vocabulary * self.model.hidden
        weights = model.parameter_count if self.counts_parameters else model.layers * model.layer_weights + head
        scores = {"full": 4, "causal": 2, "none": 0, None: 4}[self.counts_attention]
        attention = scores * self.length * model.hidden * model.layers
        forward, again = 2 * weights + attention, 0.0
        if recompute and self.recompute == "full":
            again = self.recompute_share * (forward - (0 if self.counts_parameters else 2 * head))
        elif recompute and self.recompute == "selective" and self.attention == "unfused":
            again = attention
        return 3 * forward + again

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
        return self.hfu and self.hfu * peak / self.flops_per_token(True)


@cache
def _read() -> tuple[PublishedRun, ...]:
    stored = json.loads((FOLDER / "published_runs.json").read_text(encoding="utf-8"))
    runs = []
    for table in stored["tables"]:
        for number, values in enumerate(table["rows"], 1):
            row: dict[str, Any] = {**table["all"], **dict(zip(table["columns"], values, strict=True))}
            row |= row.pop("more", None) or {}
            machine = stored["machines"][row.pop("machine")]
            assumed = dict.fromkeys((*machine.get("assumed", ()), *row.pop("assumed", ())))
            source = stored["sources"][row.pop("source", table["source"])]
            name, row["assumed"] = row["model"], tuple(assumed)
            model, fused = stored["models"][name], row.get("attention") != "unfused"
            row["model"] = TransformerConfig(**model["shape"], context=row["length"], fused=fused, name=name)
            row |= {"parameters": model.get("parameters"), "id": f"{table['id']}-{number}", "table": table["id"]}
            row["fitted"] = row["id"] in stored["fitted"]
            row["where"] = f"{table['where']}, {row['where']}" if "where" in row else table["where"]
            runs.append(PublishedRun(**{**source, **machine, **row}))
    return tuple(runs)


def published_runs(**wanted: str | bool | Sequence[str] | None) -> tuple[PublishedRun, ...]:
    """Return the published runs of a `family`, `role`, `outcome` ("ran" by default) or `table`, or those that are
    `fitted`: one of each, several of it, or None for all."""
    wanted = {"outcome": "ran"} | wanted
    chosen = {name: (one,) if isinstance(one, str | bool) else one for name, one in wanted.items()}
    return tuple(
        run for run in _read() if all(some is None or getattr(run, name) in some for name, some in chosen.items())
    )
