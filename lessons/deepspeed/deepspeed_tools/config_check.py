"""Read a DeepSpeed configuration before a run does: what is refused, and what is passed over without a word."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from course_utils.recordings import FOLDER as RECORDINGS

from .config_reading import BATCH, LEVELS, Finding, device, read_file, section_of, stage_of, truth

__all__ = ["check_config", "check_file", "report"]

RECORDED = RECORDINGS / "deepspeed_keys.json"
PERSISTENT = 100_000  # elements: stage3_param_persistence_threshold of 0.19.8
_ALONE = "DeepSpeed alone stops with a TypeError at the latest in the first step"
_MARKS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
#: Keys of Accelerate's own configuration, and where they belong in DeepSpeed's.
_ACCELERATE = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "mixed_precision": "bf16.enabled or fp16.enabled",
}


@cache
def _recorded() -> dict[str, Any]:
    """What DeepSpeed knows: keys by section, what each takes, and keys it refuses with its reason.

    `internals.record_keys` has made it with the version of the course.
    """
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def check_config(config: dict[str, Any], world_size: int | None = None, filled: bool = False) -> list[Finding]:
    """Return what there is to say about a configuration, the worst first.

    Parameters
    ----------
    config : dict
        As it is given to ``deepspeed.initialize``.
    world_size : int, optional
        Number of ranks that share the batch, to check the product of the batch sizes.
    filled : bool
        Transformers or Accelerate fill in each ``"auto"`` before DeepSpeed sees it.
    """
    checks = (_unknown(config), _batch(config, world_size), _values(config), _zero(config), _precision(config),
              _autos(config, filled), _parameters(config), _rest(config))  # fmt: skip
    found = {(finding.level, finding.key): finding for check in checks for finding in check}  # one for a key
    return sorted(found.values(), key=lambda finding: LEVELS.index(finding.level))


def check_file(path: str | Path, world_size: int | None = None, filled: bool = False) -> list[Finding]:
    """Check a file, see :func:`check_config`; a key that stands in it twice is refused, as DeepSpeed does."""
    config, said = read_file(path)
    return said + check_config(config, world_size, filled)


def report(findings: list[Finding]) -> str:
    """The findings as text, a line each."""
    return "\n".join(map(str, findings)) or "nothing to say"


def _content(config: dict, section: str) -> Any:
    """What stands in a section; the top level is the section ``""``."""
    content: Any = config
    for part in filter(None, section.split(".")):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _unknown(config: dict) -> Iterator[Finding]:
    """Keys that DeepSpeed does not know, or does not know any more, at the top and in sections."""
    removed = _recorded()["removed"]
    for section, known in _recorded()["keys"].items():
        content = _content(config, section)
        level = "refused" if section in _recorded()["types"] else "silent"
        what = "refused, as unknown keys in this section are" if level == "refused" else "passed over"
        what = what if section else "passed over, as unknown keys at the top level are"
        for key in content if isinstance(content, dict) else ():
            dotted = f"{section}.{key}" if section else key
            if dotted in removed:
                yield Finding("refused", dotted, removed[dotted].partition(" See http")[0])
            elif key not in known:
                yield Finding(level, dotted, f"{what}; {_meant(key, section)}")


def _meant(key: str, section: str) -> str:
    """Say which key may have been meant, and where."""
    known = _recorded()["keys"]
    if key in _ACCELERATE:
        return f"this is Accelerate's; in DeepSpeed's file it is {_ACCELERATE[key]}"
    if close := difflib.get_close_matches(key, known[section], 1, 0.75):
        return f"did you mean {close[0]!r}?"
    if elsewhere := [name for name, keys in known.items() if key in keys and name != section]:
        return f"it belongs in {elsewhere[0]!r}" if elsewhere[0] else "it belongs at the top level"
    longer = [name for name in known[section] if key in name]
    return f"did you mean {longer[0]!r}?" if longer else "DeepSpeed does not know it"


def _batch(config: dict, world_size: int | None) -> Iterator[Finding]:
    """The three batch sizes, of which DeepSpeed works out what is missing."""
    whole, micro, steps = sizes = [config.get(key) for key in BATCH]
    if whole is None and micro is None:
        yield Finding("refused", BATCH[0], f"either this or {BATCH[1]} must be given")
    wrong = {key: size for key, size in zip(BATCH, sizes, strict=True)
             if size is not None and not (isinstance(size, int) and size > 0)}
    for key, size in wrong.items():
        if size != "auto":
            yield Finding("refused", key, f"{size!r} is no integer above 0{_hint(size)}")
    each = 0 if wrong else (micro or 1) * (steps or 1) * (world_size or 1)
    if each and whole and (whole % each or (world_size and micro and steps and whole != each)):
        parts = f"micro-batch {micro or '?'} x steps {steps or '?'} x ranks {world_size or '?'}"
        yield Finding("refused", BATCH[0], f"{whole} is not {parts}")


def _hint(value: Any) -> str:
    return ": a text, write it without quotes" if isinstance(value, str) else ""


def _is(value: Any, kind: str | list, spec: dict[str, Any]) -> bool:
    """Whether a value is of a kind; like pydantic this reads numbers and switches in texts, too."""
    if isinstance(kind, list):
        return value in kind or str(value) in [str(one) for one in kind if not isinstance(one, str)]
    if kind == "bool":
        return value in (0, 1) or str(value).lower() in ("true", "false", "yes", "no", "on", "off", *"tfyn01")
    if kind in ("int", "float") and isinstance(value, (int, float, str)):
        try:
            read = float(value)
        except ValueError:
            return False
        written = kind == "float" or not isinstance(value, str) or value.strip().isdecimal()  # "5e8" is no integer
        return (written and (kind == "float" or read.is_integer())
                and spec.get("gt", -math.inf) < read < spec.get("lt", math.inf)
                and spec.get("ge", -math.inf) <= read <= spec.get("le", math.inf))  # fmt: skip
    types = {"str": str, "list": (list, tuple), "dict": dict, "section": dict, "null": type(None)}
    return kind == "any" or (kind in types and isinstance(value, types[kind]))


def _values(config: dict) -> Iterator[Finding]:
    """Values in data models that are of another type, or out of bounds; and sections that are no dictionary."""
    for section, fields in _recorded()["types"].items():
        content = _content(config, section)
        if section in config and not isinstance(content, dict) and (section, content) != ("bf16", None):
            yield Finding("refused", section, f"it must be a dictionary, not {content!r}")
        for key, value in content.items() if isinstance(content, dict) else ():
            spec = fields.get(key, {"takes": ["any"]})
            if value != "auto" and not any(_is(value, kind, spec) for kind in spec["takes"]):
                kinds = [kind if isinstance(kind, str) else f"one of {kind}" for kind in spec["takes"]]
                limits = "".join(f" {mark} {spec[name]}" for name, mark in _MARKS.items() if name in spec)
                wanted = " or ".join(kinds).replace("section", "dictionary") + limits
                yield Finding("refused", f"{section}.{key}", f"{value!r:.60} is not {wanted}{_hint(value)}")


def _autos(config: dict, filled: bool) -> Iterator[Finding]:
    """Each "auto": in data models it is dropped, elsewhere it stays a text, with which nothing can be computed."""
    found = list(_auto_keys(config))
    if filled and found:
        text = f'"auto" ({len(found)} of them) is filled in by Transformers or Accelerate, not by DeepSpeed alone'
        yield Finding("note", ".".join(found[0]), text)
        return
    for *above, key in found:
        section, dotted = ".".join(above), ".".join([*above, key])
        if fields := _recorded()["types"].get(section):
            default = json.dumps(fields.get(key, {}).get("default"))
            text = f'DeepSpeed alone drops "auto" without a word and takes its default, {default}'
            text += "; training stays in fp32" if key == "enabled" and "16" in section else ""
            yield Finding("silent" if key in ("stage", "enabled", "device") else "note", dotted, text)
        elif section in ("", "optimizer.params", "scheduler.params"):
            yield Finding("refused", dotted, f'"auto" is for Transformers or Accelerate; {_ALONE}')


def _auto_keys(content: dict, *above: str) -> Iterator[tuple[str, ...]]:
    for key, value in content.items():
        if value == "auto":
            yield (*above, key)
        elif isinstance(value, dict):
            yield from _auto_keys(value, *above, key)


def _parameters(config: dict) -> Iterator[Finding]:
    """Parameters of optimizer and schedule, which DeepSpeed hands on as they are when training begins."""
    for section in ("optimizer", "scheduler"):
        if not isinstance(config.get(section, {}), dict):
            yield Finding("refused", section, "it must be a dictionary")
        for key, value in section_of(section_of(config, section), "params").items():
            if key == "max_grad_norm" and section == "optimizer":
                yield Finding("refused", f"{section}.params.{key}", "write gradient_clipping at the top level instead")
            elif isinstance(value, str) and re.search(r"\d", value):
                yield Finding("refused", f"{section}.params.{key}", f"{value!r} is no number{_hint(value)}")


def _zero(config: dict) -> Iterator[Finding]:
    """What the section zero_optimization says, and what it leaves to defaults."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    if "stage" not in zero:
        yield Finding("silent", "zero_optimization.stage", "without it the stage is 0: plain data parallelism")
    stage = stage_of(zero)
    if stage == 0 and device(zero, "offload_optimizer"):
        yield Finding("silent", "zero_optimization.offload_optimizer", "nothing is offloaded at stage 0")
    if stage != 3 and device(zero, "offload_param"):
        yield Finding("silent", "zero_optimization.offload_param", f"only stage 3 offloads parameters, this is {stage}")
    threshold = "stage3_param_persistence_threshold"
    if stage == 3 and not {threshold, threshold.removeprefix("stage3_")} & zero.keys():
        text = f"by default parameters of up to {PERSISTENT:,} elements stay whole on every rank"
        yield Finding("note", f"zero_optimization.{threshold}", text)


def _precision(config: dict) -> Iterator[Finding]:
    """The sections of precision: both at once, or a section that switches nothing on."""
    sections = {name: config[name] for name in ("fp16", "bf16", "bfloat16") if isinstance(config.get(name), dict)}
    for name, content in sections.items():
        if "enabled" not in content:
            yield Finding("silent", name, 'without "enabled": true the section does nothing; training stays in fp32')
    on = [name for name, content in sections.items() if truth(content.get("enabled"))]
    if "fp16" in on and len(on) > 1:
        yield Finding("refused", "fp16", "fp16 and bf16 are both enabled")


def _rest(config: dict) -> Iterator[Finding]:
    """Clipping, and the communication logger."""
    clip = config.get("gradient_clipping")
    if "gradient_clipping" not in config:
        text = "by default gradients are clipped at norm 1.0 (since 0.19.3; off before); 0.0 switches it off"
        yield Finding("note", "gradient_clipping", text)
    elif clip != "auto" and not isinstance(clip, (int, float)):
        yield Finding("refused", "gradient_clipping", f"{clip!r} is no number{_hint(clip)}; {_ALONE}")
    elif clip != "auto" and not 0 <= clip < math.inf:
        yield Finding("silent", "gradient_clipping", f"{clip} clips nothing; 0.0 says so")
    if truth(section_of(config, "comms_logger").get("enabled")):
        yield Finding("note", "comms_logger", "its latencies are running sums in 0.19.8: too large from the second on")
