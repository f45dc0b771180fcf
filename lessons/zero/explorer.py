"""Choose a model, a precision and a layout; see what one rank needs, part by part, and on which GPU it fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_utils import memory, transformer
from course_utils.draw.bars import PART_COLORS, draw_bars, end_to_end, write_behind
from course_utils.draw.charts import byte_axis
from course_utils.draw.controls import checkbox, choice, integer, slider
from course_utils.draw.explorer import Explorer
from course_utils.draw.style import FAINT, INK, WIDTH, new_figure
from course_utils.hardware import GPU, GPUS
from course_utils.units import decimal_bytes

_OWN = "own shape"
_GPTS = [name for name, config in transformer.PUBLISHED.items() if not config.gated]  # Llama's layers are others
_STAGES = ((0, "0: DDP"), (1, "1: ZeRO-1"), (2, "2: ZeRO-2"), (3, "3: ZeRO-3, FSDP"))
_RANKS = tuple(2**k for k in range(13))
_LENGTHS = tuple(2**k for k in range(7, 18))
_SHAPE = ("layers", "heads", "hidden", "vocabulary")
_NO = "#B33C00"
_NOTE = (
    "Modelled by <code>memory.training_memory</code>. Model states: the formulas of ZeRO (Rajbhandari et al. 2020). "
    "Activations: what each operation of this course's GPT keeps for backward. Buffers: gathered parameters, buckets "
    "and gradients of activations. All at the moment of a step when the most is held. Not counted: the CUDA context, "
    "NCCL, workspaces of kernels, temporaries of the optimizer's step and memory lost between blocks; for these some "
    "memory stays free. Only memory is judged, not whether a GPU computes in that precision. 1 GB is 1e9 bytes, "
    "as on data sheets."
)


@dataclass(frozen=True)
class Verdict:
    """Whether a GPU holds what one rank needs: `reason` is "fits", "tight", "activations" or "states"."""

    gpu: GPU
    reason: str
    words: str


def judge(need: memory.Memory, gpu: GPU, free: float) -> Verdict:
    """Say whether `need` fits on `gpu` when the share `free` of its memory is to stay free, and if not, why."""
    size, total = gpu.memory_bytes, need.total
    of = f"{decimal_bytes(total)} of {decimal_bytes(size)}"
    if total <= (1 - free) * size:
        return Verdict(gpu, "fits", f"fits: {of}")
    if total <= size:
        return Verdict(gpu, "tight", f"tight: {of}, {1 - total / size:.0%} free")
    return Verdict(gpu, "states" if need.states > size else "activations", f"{decimal_bytes(total - size)} too much")


def _tell(verdicts: list[Verdict], free: float) -> str:
    """Return which GPUs fit and why the others do not, in words."""
    heads = {
        "fits": f"Fits with {free:.0%} free on",
        "tight": f"Fits, but leaves less than {free:.0%} free on",
        "activations": "Model states fit, but not with activations and buffers, on",
        "states": "Model states alone are too much for",
    }
    groups = {reason: [v.gpu.name for v in verdicts if v.reason == reason] for reason in heads}
    told = [f"{heads[reason]} <b>{', '.join(names)}</b>." for reason, names in groups.items() if names]
    return " ".join(told if groups["fits"] else ["<b>Fits on none of these GPUs.</b>", *told])


def _changes(config: transformer.TransformerConfig, run: dict, gpu: GPU, free: float) -> list[str]:
    """Return what, changed alone, makes a run fit on `gpu`: of each control the nearest value that does."""
    tried = {
        "checkpointing": [("checkpointing", {"config": replace(config, checkpoint=True)})],
        "buckets": [("gradients as views into the buckets", {"gradient_copy": False})],
        "stage": [(f"stage {stage}", {"stage": stage}) for stage, _ in _STAGES if stage > run["stage"]],
        "ranks": [(f"{n:,} ranks", {"ranks": n}) for n in _RANKS if n > run["ranks"]],
        "batch": [(f"batch {run['batch'] >> k:,}", {"batch": run["batch"] >> k}) for k in range(1, 40)
                  if run["batch"] >> k],
        "length": [(f"sequence {n:,}", {"length": n}) for n in reversed(_LENGTHS) if n < run["length"]],
    }

    def fits(change: dict) -> bool:
        return judge(memory.training_memory(**{"config": config, **run, **change}), gpu, free).reason == "fits"

    nearest = (next((name for name, change in choices if fits(change)), None) for choices in tried.values())
    return [name for name in nearest if name]


def _advise(verdicts: list[Verdict], config: transformer.TransformerConfig, run: dict, free: float) -> str:
    """Return what would help on the largest GPU on which the run does not fit with room, in words."""
    short = [verdict.gpu for verdict in verdicts if verdict.reason != "fits"]
    if not short:
        return ""
    found = _changes(config, run, short[-1], free)
    if not found:
        return f"No single change of one control makes it fit on <b>{short[-1].name}</b>."
    return f"One change that makes it fit on <b>{short[-1].name}</b>: {', or '.join(found)}."


def _draw_parts(ax: Axes, need: memory.Memory) -> None:
    """Draw each part where the one above it ends, and all of them in the last row."""
    spans = end_to_end(need.parts())
    rows = {part: [span for span in spans if span[0] == part] for part in PART_COLORS} | {"total": spans}
    told = [decimal_bytes(size) for size in (*need.parts().values(), need.total)]
    draw_bars(ax, rows, PART_COLORS, "", height=0.7, room=1.4, behind=told, weight="normal")
    for text in (ax.get_yticklabels()[-1], ax.texts[-1]):
        text.set_fontweight("bold")
    byte_axis(ax.xaxis, need.total or 1.0, "memory of one rank")
    ax.set_title("modelled: one rank, part by part")


def _draw_gpus(ax: Axes, need: memory.Memory, verdicts: list[Verdict], free: float) -> None:
    """Draw each GPU's memory as a frame, filled with the parts as far as they go in, with the part to keep free."""
    sizes = np.array([verdict.gpu.memory_bytes for verdict in verdicts])
    spans, largest = end_to_end(need.parts()), max(sizes)
    rows = {verdict.gpu.name: [(part, start, min(end, size)) for part, start, end in spans if start < size]
            for verdict, size in zip(verdicts, sizes, strict=True)}
    draw_bars(ax, rows, PART_COLORS, "", height=0.62)
    ax.barh(range(len(rows)), free * sizes, left=(1 - free) * sizes, height=0.62, color="none", edgecolor=FAINT,
            hatch="////", linewidth=0)
    for y, (verdict, size) in enumerate(zip(verdicts, sizes, strict=True)):
        color, sign = INK if verdict.reason == "fits" else _NO, {"fits": "✓", "tight": "!"}.get(verdict.reason, "✗")
        ax.barh(y, size, height=0.62, color="none", edgecolor=color, linewidth=1.2)
        write_behind(ax, y, f"{sign} {verdict.words}", size, color=color,
                     fontweight="bold" if sign == "✓" else "normal")
    ax.set(xlim=(0, 1.62 * largest), title=f"modelled: where it fits (hatched: {free:.0%} to stay free)")
    byte_axis(ax.xaxis, largest, "memory of one GPU")
    ax.set_xticks([tick for tick in ax.get_xticks() if tick <= largest])


def _draw(need: memory.Memory, verdicts: list[Verdict], free: float, title: str) -> Figure:
    figure, (left, right) = new_figure(1, 2, size=(WIDTH, 3.7), title=title, width_ratios=[1, 1.3])
    _draw_parts(left, need)
    _draw_gpus(right, need, verdicts, free)
    return figure


def _config(model: str, shape: dict[str, int], length: int, checkpoint: bool) -> transformer.TransformerConfig:
    """Return the shape of a published model, or the user's own, which has as many positions as the sequence is long."""
    if model == _OWN:
        return transformer.TransformerConfig(**shape, context=length, checkpoint=checkpoint)
    config = transformer.PUBLISHED[model]
    if length > config.context:
        raise ValueError(
            f"{model} has {config.context:,} positions, no {length:,}; choose a shorter sequence, "
            f"or {_OWN!r}, which has as many as you choose"
        )
    return replace(config, checkpoint=checkpoint)


def _title(model: str, config: transformer.TransformerConfig, run: dict) -> str:
    count, ranks = config.parameter_count, run["ranks"]
    many = f"{count / 1e9:,.1f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"
    own = f" ({config.layers} x {config.hidden}, {config.heads} heads)" if model == _OWN else ""
    return (
        f"{model}{own}, {many} parameters, {run['precision']}, {run['optimizer']}, stage {run['stage']} on "
        f"{ranks:,} {'rank' if ranks == 1 else 'ranks'}, {run['batch']:,} x {run['length']:,} tokens a "
        f"rank{', checkpointing' if config.checkpoint else ''}"
        f"{', buckets apart' if run['gradient_copy'] and run['stage'] < 2 else ''}"
    )


def _render(
    model: str, layers: int, heads: int, hidden: int, vocabulary: int, checkpoint: bool, free: float, **run: Any
) -> tuple[Figure, str]:
    """Draw and tell what a run needs; `run` is what `memory.training_memory` takes besides the shape."""
    shape = {"layers": layers, "heads": heads, "hidden": hidden, "vocabulary": vocabulary}
    config = _config(model, shape, run["length"], checkpoint)
    need = memory.training_memory(config, **run)
    if need.total >= 1e18:
        raise ValueError(f"that is {need.total:.1e} bytes a rank, more than any machine has; choose less")
    verdicts = [judge(need, gpu, free) for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes)]
    parts = ", ".join(f"{part} {decimal_bytes(size)}" for part, size in need.parts().items())
    words = (
        f"<div style='line-height: 1.5'><b>{decimal_bytes(need.total)} on each rank</b>: {parts}. "
        f"{_tell(verdicts, free)} {_advise(verdicts, config, run, free)}</div>"
    )
    return _draw(need, verdicts, free, _title(model, config, run)), words


def memory_calculator() -> Explorer:
    """Work out what training a GPT takes on one rank, by `memory.training_memory`, and which GPUs have room for it.

    A published model has as many positions as its paper gives it; "own shape" starts from the model chosen before and
    has as many as the sequence is long. What cannot be is refused.
    """
    model = choice("model", [*_GPTS, _OWN], "GPT-3 6.7B")
    length = slider("sequence", [(f"{n:,}", n) for n in _LENGTHS], 2048)
    shape = {name: integer(name, 1) for name in _SHAPE}

    def adapt(changed: str | None) -> None:
        published = transformer.PUBLISHED.get(model.value)
        for name, field in shape.items():
            field.disabled = published is not None
            if published:
                field.value = getattr(published, name)
        if published and changed == "model":
            length.value = min(length.value, published.context)

    rows = [
        {
            "model": model, "precision": choice("precision", memory.PRECISIONS, "mixed"),
            "optimizer": choice("optimizer", memory.OPTIMIZERS, "adam"),
        },
        shape,
        {
            "ranks": slider("ranks", [(f"{n:,}", n) for n in _RANKS], 8),
            "stage": choice("stage", [(label, number) for number, label in _STAGES], 3),
            "free": slider("keep free", [(f"{percent} %", percent / 100) for percent in range(0, 55, 5)], 0.1),
        },
        {
            "length": length, "batch": integer("batch of a rank", 1),
            "checkpoint": checkbox("activation checkpointing"),
            "gradient_copy": checkbox("buckets apart from gradients"),
        },
    ]
    return Explorer(rows, _render, adapt, _NOTE)
