"""Read a DeepSpeed configuration before a run does: what is refused, and what is passed over without a word."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["Finding", "check_config", "check_file", "report"]

RECORDED = Path(__file__).parent.parent / "recordings" / "deepspeed_keys.json"
LEVELS = ("refused", "silent", "note")
PERSISTENT = 100_000  # elements: stage3_param_persistence_threshold of 0.19.8
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_ALSO_KNOWN = {"bfloat16": "bf16"}  # read under its old name


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


@cache
def _known() -> tuple[dict[str, list[str]], dict[str, str]]:
    """Keys that DeepSpeed knows by section, and those it refuses with its reason.

    They are recorded for the version of the course; another version that is installed is asked itself.
    """
    stored = json.loads(RECORDED.read_text(encoding="utf-8"))
    try:
        other = importlib.metadata.version("deepspeed") != stored["version"]
    except importlib.metadata.PackageNotFoundError:
        other = False
    if other:
        from . import internals

        return internals.asked_keys(), internals.removed_keys()
    return stored["keys"], stored["removed"]


def check_config(config: dict[str, Any], world_size: int | None = None) -> list[Finding]:
    """Return what there is to say about a configuration, the worst first.

    Parameters
    ----------
    config : dict
        As it is given to ``deepspeed.initialize``.
    world_size : int, optional
        Number of ranks that share the batch, to check the product of the batch sizes.
    """
    found = [*_unknown(config), *_batch(config, world_size), *_zero(config), *_precision(config), *_rest(config)]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def check_file(path: str | Path, world_size: int | None = None) -> list[Finding]:
    """Check a JSON file; a key that stands in it twice is refused, as DeepSpeed does."""
    twice: list[Finding] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in items]
        twice.extend(Finding("refused", name, "it stands here twice") for name in {*names} if names.count(name) > 1)
        return dict(items)

    config = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=pairs)
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object")
    return twice + check_config(config, world_size)


def report(findings: list[Finding]) -> str:
    """The findings as text, a line each."""
    return "\n".join(map(str, findings)) or "nothing to say"


def _nearest(key: str, section: str) -> str:
    """Say which key may have been meant, and where."""
    known, _ = _known()
    close = difflib.get_close_matches(key, known[section], 1, 0.75)
    if close:
        return f"did you mean {close[0]!r}?"
    elsewhere = [name for name, keys in known.items() if key in keys and name != section]
    if elsewhere:
        return f"it belongs in {elsewhere[0]!r}" if elsewhere[0] else "it belongs at the top level"
    longer = [name for name in known[section] if key in name]
    return f"did you mean {longer[0]!r}?" if longer else "DeepSpeed does not know it"


def _unknown(config: dict) -> Iterator[Finding]:
    """Keys that DeepSpeed does not know, or does not know any more, at the top and in sections."""
    known, removed = _known()
    for key in config:
        if key in removed:
            yield Finding("refused", key, removed[key].partition(" See http")[0])
        elif key not in known[""] and key not in _ALSO_KNOWN:
            yield Finding("silent", key, f"passed over, as unknown keys at the top level are; {_nearest(key, '')}")
    for section in filter(None, known):
        content: Any = config
        for part in section.split("."):
            content = content.get(part) if isinstance(content, dict) else None
        if not isinstance(content, dict):
            continue
        strict = section.partition(".")[0] in ("zero_optimization", "fp16", "bf16")
        for key in content:
            dotted = f"{section}.{key}"
            if dotted in removed:
                yield Finding("refused", dotted, removed[dotted].partition(" See http")[0])
            elif key not in known[section]:
                what = "refused, as unknown keys in this section are" if strict else "passed over"
                yield Finding("refused" if strict else "silent", dotted, f"{what}; {_nearest(key, section)}")


def _batch(config: dict, world_size: int | None) -> Iterator[Finding]:
    """The three batch sizes, of which DeepSpeed works out what is missing."""
    whole, micro, steps = (config.get(key) for key in _BATCH)
    if whole is None and micro is None:
        yield Finding("refused", _BATCH[0], f"either this or {_BATCH[1]} must be given")
    sizes = [size for size in (whole, micro, steps) if size is not None]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        if "auto" not in sizes:
            yield Finding("refused", _BATCH[0], "batch sizes must be integers above 0")
        return
    each = (micro or 1) * (steps or 1) * (world_size or 1)
    if whole and (whole % each or (world_size and micro and steps and whole != each)):
        parts = f"micro-batch {micro or '?'} x steps {steps or '?'} x ranks {world_size or '?'}"
        yield Finding("refused", _BATCH[0], f"{whole} is not {parts}")


def _zero(config: dict) -> Iterator[Finding]:
    """What the section zero_optimization says, and what it leaves to defaults."""
    zero = config.get("zero_optimization")
    if isinstance(zero, bool) or zero is None:
        return
    if not isinstance(zero, dict):
        yield Finding("refused", "zero_optimization", 'it must be a dictionary, such as {"stage": 2}')
        return
    if "stage" not in zero:
        yield Finding("silent", "zero_optimization.stage", "without it the stage is 0: plain data parallelism")
    stage = zero.get("stage", 0)
    stage = int(stage) if str(stage).isdigit() else stage
    if stage not in (0, 1, 2, 3):
        yield Finding("refused", "zero_optimization.stage", f"{stage!r} is none of 0, 1, 2, 3")
        return
    if stage == 0 and _device(zero, "offload_optimizer"):
        yield Finding("silent", "zero_optimization.offload_optimizer", "nothing is offloaded at stage 0")
    if stage != 3 and _device(zero, "offload_param"):
        yield Finding("silent", "zero_optimization.offload_param", f"only stage 3 offloads parameters, this is {stage}")
    threshold = "stage3_param_persistence_threshold"
    if stage == 3 and not {threshold, threshold.removeprefix("stage3_")} & zero.keys():
        text = f"by default parameters of up to {PERSISTENT:,} elements stay whole on every rank"
        yield Finding("note", f"zero_optimization.{threshold}", text)


def _device(zero: dict, section: str) -> bool:
    content = zero.get(section)
    return isinstance(content, dict) and content.get("device", "none") not in ("none", None)


def _precision(config: dict) -> Iterator[Finding]:
    """The sections of precision: both at once, or a section that switches nothing on."""
    sections = {name: config.get(name) for name in ("fp16", "bf16", "bfloat16") if name in config}
    for name, content in sections.items():
        if not isinstance(content, dict):
            yield Finding("refused", name, 'it must be a dictionary, such as {"enabled": true}')
        elif "enabled" not in content:
            yield Finding("silent", name, 'without "enabled": true the section does nothing; training stays in fp32')
    on = [name for name, content in sections.items() if isinstance(content, dict) and content.get("enabled") is True]
    if "fp16" in on and len(on) > 1:
        yield Finding("refused", "fp16", "fp16 and bf16 are both enabled")


def _rest(config: dict) -> Iterator[Finding]:
    """Clipping, parameters of the optimizer, "auto", and the communication logger."""
    if "gradient_clipping" not in config:
        text = "by default gradients are clipped at norm 1.0 (0.19.8; off before); 0.0 switches it off"
        yield Finding("note", "gradient_clipping", text)
    optimizer = config.get("optimizer")
    parameters = optimizer.get("params") if isinstance(optimizer, dict) else None
    if isinstance(parameters, dict) and "max_grad_norm" in parameters:
        yield Finding("refused", "optimizer.params.max_grad_norm", "write gradient_clipping at the top level instead")
    autos = list(_autos(config))
    if autos:
        text = f'"auto" ({len(autos)} of them) is filled in by Transformers or Accelerate, not by DeepSpeed alone'
        yield Finding("note", autos[0], text)
    logger = config.get("comms_logger")
    if isinstance(logger, dict) and logger.get("enabled"):
        yield Finding("note", "comms_logger", "its latencies are running sums in 0.19.8: too large from the second on")


def _autos(config: dict, above: str = "") -> Iterator[str]:
    for key, value in config.items():
        if value == "auto":
            yield above + key
        elif isinstance(value, dict):
            yield from _autos(value, f"{above}{key}.")
