"""Read a DeepSpeed configuration as DeepSpeed does: a file, and what a run would make of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BATCH", "LEVELS", "Finding", "device", "read_file", "stage_of", "truth", "what_runs"]

LEVELS = ("refused", "silent", "note")
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Finding:
    """One thing about a configuration.

    Attributes
    ----------
    level : str
        ``"refused"``: DeepSpeed stops with an error. ``"silent"``: it runs, but not as it reads. ``"note"``: a default,
        or a feature, that has surprised others.
    key : str
        The key, dotted, such as ``zero_optimization.stage``.
    message : str
        What happens, and what to write instead.
    """

    level: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.level:7}  {self.key}: {self.message}"


def read_file(path: str | Path) -> tuple[dict[str, Any], list[Finding]]:
    """Read a configuration as DeepSpeed does, by hjson; return what there is to say about the file, too.

    Raises
    ------
    ValueError
        It is no JSON; the message says what it looks like.
    """
    twice: list[Finding] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = Counter(name for name, _ in items)
        twice.extend(Finding("refused", name, "it stands here twice") for name, times in names.items() if times > 1)
        return dict(items)

    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError("this is no text") from None
    if not text.strip():
        raise ValueError("the file is empty")
    start = re.sub(r"\A(\s|\ufeff|//.*|#.*|/\*(?s:.*?)\*/)*", "", text)[:30]
    if not start.startswith("{"):
        looks = "YAML" if re.match(r"---|[\w-]+:(\s|$)", start) else f"begins with {start!r}"
        raise ValueError(f"this is no JSON object, {'but ' if looks == 'YAML' else 'it '}{looks}: write {{...}}")
    try:
        try:
            return json.loads(text, object_pairs_hook=pairs), twice
        except json.JSONDecodeError as error:
            config, said = _by_hjson(text, pairs, error), f"{error.msg} in line {error.lineno}, column {error.colno}"
            note = f"no strict JSON ({said}): DeepSpeed reads it all the same, by hjson, where others stop"
            return config, [*twice, Finding("note", Path(path).name, note)]
    except RecursionError:
        raise ValueError("it is nested too deeply, for DeepSpeed, too") from None


def _by_hjson(text: str, pairs: Any, error: json.JSONDecodeError) -> dict[str, Any]:
    """Read what is no strict JSON: comments, commas too many or too few, bare keys."""
    try:
        import hjson
    except ImportError:
        raise ValueError(f"this is no strict JSON: {error}; DeepSpeed reads more, by hjson (not installed)") from None
    try:
        return hjson.loads(text, object_pairs_hook=pairs)
    except hjson.HjsonDecodeError as other:
        raise ValueError(f"this is no JSON, and DeepSpeed's hjson cannot read it either: {other}") from None


def what_runs(config: dict[str, Any], world_size: int | None = None) -> str:
    """Say in a line what DeepSpeed alone makes of a configuration: stage, precision, offload, clipping and batch."""
    zero = {"stage": 1} if config.get("zero_optimization") is True else section_of(config, "zero_optimization")
    on = [name for name in ("fp16", "bf16", "bfloat16") if truth(section_of(config, name).get("enabled"))]
    moved = [
        f"{section.removeprefix('offload_')} on {section_of(zero, section)['device']}"
        for section, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,)))
        if device(zero, section) and stage_of(zero) in stages
    ]
    clip = config.get("gradient_clipping", 1.0)
    whole, micro, steps = sizes_of(config, world_size)
    parts = [f"ZeRO stage {stage_of(zero)}" if stage_of(zero) else "no ZeRO (stage 0: plain data parallelism)"]
    parts += [on[0].replace("bfloat16", "bf16") if on else "fp32", ", ".join(moved) or "no offload"]
    positive = isinstance(clip, (int, float)) and clip > 0
    parts += [f"gradients clipped at {clip}" if positive else "no clipping"]
    batch = f"batch {whole or '?'} = micro-batch {micro or '?'} x steps {steps or '?'} x ranks {world_size or '?'}"
    return "; ".join([*parts, batch])


def section_of(config: dict, name: str) -> dict:
    content = config.get(name)
    return content if isinstance(content, dict) else {}


def truth(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "1.0", "yes", "on", "t", "y")


def stage_of(zero: dict) -> int:
    stage = zero.get("stage", 0)
    return int(float(stage)) if re.fullmatch(r"[0-3](\.0)?", str(stage)) else 1 if stage is True else 0


def sizes_of(config: dict, world_size: int | None) -> list[int | None]:
    """The whole batch, the micro-batch and the steps of accumulation, with what DeepSpeed works out."""
    sizes = [size if isinstance(size := config.get(key), int) and size > 0 else None for key in BATCH]
    whole, micro, steps = sizes
    if whole is None and micro:
        steps = steps or 1
        whole = micro * steps * world_size if world_size else None
    elif whole and not micro:
        steps = steps or 1
        micro = whole // world_size // steps if world_size else None
    elif whole and micro and not steps and world_size:
        steps = whole // micro // world_size
    return [whole, micro, steps]


def device(zero: dict, section: str) -> bool:
    content = zero.get(section)
    return isinstance(content, dict) and content.get("device", "none") not in ("none", None, "auto")
