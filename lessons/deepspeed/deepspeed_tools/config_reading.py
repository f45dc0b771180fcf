"""Read a DeepSpeed configuration as DeepSpeed does: a file, and what a run would make of it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BATCH", "LEVELS", "Finding", "device", "read_file", "section_of", "stage_of", "truth", "what_runs"]

LEVELS = ("refused", "silent", "note")
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Finding:
    """One thing about a configuration: its level, the dotted key, and what happens and what to write instead.

    Levels are ``"refused"``: DeepSpeed stops with an error. ``"silent"``: it runs, but not as it reads. ``"note"``: a
    default, or a feature, that has surprised others.
    """

    level: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.level:7}  {self.key}: {self.message}"


def read_file(path: str | Path) -> tuple[dict[str, Any], list[Finding]]:
    """Read a configuration as DeepSpeed does, by hjson; return what there is to say about the file, too."""
    said: list[Finding] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = Counter(name for name, _ in items)
        said.extend(Finding("refused", name, "it stands here twice") for name, times in names.items() if times > 1)
        return dict(items)

    text = Path(path).read_text(encoding="utf-8")
    try:
        config = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        what = f"no strict JSON ({error.msg} in line {error.lineno}, column {error.colno})"
        said[:] = [Finding("note", Path(path).name, f"{what}: DeepSpeed reads it by hjson, where others stop")]
        try:
            import hjson
        except ImportError:
            raise ValueError(f"this is {what}; DeepSpeed reads more, by hjson, which is not installed") from None
        config = hjson.loads(text, object_pairs_hook=pairs)
    if not isinstance(config, dict):
        raise ValueError("this is no JSON object: write {...}")
    return config, said


def what_runs(config: dict[str, Any], world_size: int | None = None) -> str:
    """Say in a line what DeepSpeed alone makes of a configuration: stage, precision, offload, clipping and batch."""
    zero = section_of(config, "zero_optimization")
    on = [name for name in ("fp16", "bf16", "bfloat16") if truth(section_of(config, name).get("enabled"))]
    moved = [
        f"{section.removeprefix('offload_')} on {section_of(zero, section)['device']}"
        for section, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,)))
        if device(zero, section) and stage_of(zero) in stages
    ]
    clip = config.get("gradient_clipping", 1.0)
    positive = isinstance(clip, (int, float)) and clip > 0
    whole, micro, steps = sizes_of(config, world_size)
    return "; ".join([
        f"ZeRO stage {stage_of(zero)}" if stage_of(zero) else "no ZeRO (stage 0: plain data parallelism)",
        on[0].replace("bfloat16", "bf16") if on else "fp32",
        ", ".join(moved) or "no offload",
        f"gradients clipped at {clip}" if positive else "no clipping",
        f"batch {whole or '?'} = micro-batch {micro or '?'} x steps {steps or '?'} x ranks {world_size or '?'}",
    ])


def section_of(config: dict, name: str) -> dict:
    content = config.get(name)
    return content if isinstance(content, dict) else {}


def truth(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes", "on", "t", "y")


def stage_of(zero: dict) -> int:
    return int(zero["stage"]) if str(zero.get("stage")) in ("1", "2", "3") else 0


def sizes_of(config: dict, world_size: int | None) -> tuple[int | None, int | None, int | None]:
    """The whole batch, the micro-batch and the steps of accumulation, with what DeepSpeed works out."""
    whole, micro, steps = (size if isinstance(size := config.get(key), int) else None for key in BATCH)
    if not world_size:
        return whole, micro, steps if whole and micro else steps or 1
    if whole and micro:
        return whole, micro, steps or whole // micro // world_size
    steps = steps or 1
    return whole or (micro or 0) * steps * world_size, micro or (whole or 0) // world_size // steps, steps


def device(zero: dict, section: str) -> bool:
    return section_of(zero, section).get("device", "none") not in ("none", None, "auto")
