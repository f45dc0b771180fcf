"""Read a DeepSpeed configuration before a run does: what is refused, and what is passed over without a word."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from course_utils.recordings import FOLDER as RECORDINGS

from .config_reading import BATCH, LEVELS, Finding, device, read_file, stage_of, truth

__all__ = ["check_config", "check_file", "report"]

RECORDED = RECORDINGS / "deepspeed_keys.json"
PERSISTENT = 100_000  # elements: stage3_param_persistence_threshold of 0.19.8
_ALSO_KNOWN = {"bfloat16": "bf16"}  # read under its old name
_MANY = 20  # unknown keys of a section that are told one by one
_ALONE = "DeepSpeed alone stops with a TypeError at the latest in the first step"
_MARKS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_ALIASES = {"learning_rate": "lr", "warmup_steps": "warmup_num_steps", "total_steps": "total_num_steps",
            "max_lr": "warmup_max_lr", "min_lr": "warmup_min_lr"}  # fmt: skip
#: Keys of Accelerate's own configuration, and where they belong in DeepSpeed's.
_ACCELERATE = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero3_init_flag": "no key at all: the program decides it, by deepspeed.zero.Init",
    "mixed_precision": "bf16.enabled or fp16.enabled",
}


@cache
def _recorded() -> dict[str, Any]:
    """What DeepSpeed knows: keys by section, what each takes, keys it refuses with its reason, and parameters.

    It is recorded for the version of the course; another version that is installed is asked itself.
    """
    stored = json.loads(RECORDED.read_text(encoding="utf-8"))
    try:
        other = importlib.metadata.version("deepspeed") != stored["version"]
    except importlib.metadata.PackageNotFoundError:
        other = False
    if other:
        from . import internals

        return internals.record_keys()
    return stored


def _known() -> tuple[dict[str, list[str]], dict[str, str]]:
    return _recorded()["keys"], _recorded()["removed"]


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
    checks = (_unknown(config), _batch(config, world_size, filled), _values(config), _zero(config), _precision(config),
              _autos(config, filled), _parameters(config), _rest(config))  # fmt: skip
    found = {(finding.level, finding.key): finding for check in checks for finding in check}  # one for a key
    return sorted(found.values(), key=lambda finding: LEVELS.index(finding.level))


def check_file(path: str | Path, world_size: int | None = None, filled: bool = False) -> list[Finding]:
    """Check a file, see :func:`check_config`; a key that stands in it twice is refused, as DeepSpeed does."""
    config, twice = read_file(path)
    return twice + check_config(config, world_size, filled)


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


def _content(config: dict, section: str) -> Any:
    content: Any = config
    for part in section.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _unknown(config: dict) -> Iterator[Finding]:
    """Keys that DeepSpeed does not know, or does not know any more, at the top and in sections."""
    known, removed = _known()
    for section in known:
        content = _content(config, section) if section else config
        if not isinstance(content, dict):
            continue
        level = "refused" if section in _recorded()["types"] else "silent"
        what = "refused, as unknown keys in this section are" if level == "refused" else "passed over"
        what = what if section else "passed over, as unknown keys at the top level are"
        strangers = 0
        for key in content:
            dotted = f"{section}.{key}" if section else key
            if dotted in removed:
                yield Finding("refused", dotted, removed[dotted].partition(" See http")[0])
            elif key not in known[section] and (section or key not in _ALSO_KNOWN):
                strangers += 1
                if strangers <= _MANY:  # to look for the nearest takes time
                    yield Finding(level, dotted, f"{what}; {_place(key) or _nearest(key, section)}")
        if strangers > _MANY:
            more = f"{strangers - _MANY:,} more keys that DeepSpeed does not know"
            yield Finding(level, section or "top level", more)


def _place(key: str) -> str:
    """Where a key of Accelerate's, or one with a colon or a dot for a section, belongs."""
    if key in _ACCELERATE:
        return f"this is Accelerate's; in DeepSpeed's file it is {_ACCELERATE[key]}"
    section, mark, rest = key.replace(":", ".").partition(".")
    return f"write {section!r}: {{{rest!r}: ...}}".replace("'", '"') if mark and section in _known()[0] else ""


def _batch(config: dict, world_size: int | None, filled: bool) -> Iterator[Finding]:
    """The three batch sizes, of which DeepSpeed works out what is missing."""
    whole, micro, steps = (config.get(key) for key in BATCH)
    if whole is None and micro is None:
        yield Finding("refused", BATCH[0], f"either this or {BATCH[1]} must be given")
    wrong = False
    for key, size in zip(BATCH, (whole, micro, steps), strict=True):
        if size is None or (isinstance(size, int) and size > 0):
            continue
        wrong = True
        if size != "auto":
            yield Finding("refused", key, f"{size!r} is no integer above 0{_hint(size)}")
    each = 0 if wrong else (micro or 1) * (steps or 1) * (world_size or 1)
    if each and whole and (whole % each or (world_size and micro and steps and whole != each)):
        parts = f"micro-batch {micro or '?'} x steps {steps or '?'} x ranks {world_size or '?'}"
        yield Finding("refused", BATCH[0], f"{whole} is not {parts}")


def _hint(value: Any) -> str:
    """What a text where a number should be is."""
    if not isinstance(value, str):
        return ""
    return ": a shell variable, which nobody replaces here" if "$" in value else ": a text, write it without quotes"


def _takes(value: Any, spec: dict[str, Any]) -> bool:
    """Whether a data model takes a value; like pydantic it reads numbers and switches in texts, too."""

    def one(kind: str | list) -> bool:
        if isinstance(kind, list):
            return value in kind or str(value) in [str(one) for one in kind if not isinstance(one, str)]
        if kind == "bool":
            return value in (0, 1) or str(value).lower() in ("true", "false", "yes", "no", "on", "off", *"tfyn01")
        if kind in ("int", "float") and isinstance(value, (int, float, str)):
            try:
                number = float(value)
            except (ValueError, OverflowError):
                return False
            whole = not isinstance(value, str) or re.fullmatch(r"\s*[+-]?\d[\d_]*(\.0*)?\s*", value)
            limits = (number > spec.get("gt", -math.inf) and number >= spec.get("ge", -math.inf)
                      and number < spec.get("lt", math.inf) and number <= spec.get("le", math.inf))  # fmt: skip
            limited = spec.keys() & {"gt", "ge", "lt", "le"}
            return (limits or not limited) and (kind == "float" or bool(whole and number.is_integer()))
        types = {"str": str, "list": (list, tuple), "dict": dict, "section": dict, "null": type(None)}
        return kind == "any" or (kind in types and isinstance(value, types[kind]))

    return any(one(kind) for kind in spec["takes"])


def _values(config: dict) -> Iterator[Finding]:
    """Values in data models that are of another type, or out of bounds; and sections that are no dictionary."""
    for section, fields in _recorded()["types"].items():
        content = _content(config, section)
        if not isinstance(content, dict):
            if section in config and section not in ("fp16", "bf16", "zero_optimization"):
                yield Finding("refused", section, f"{content!r} is no dictionary")
            continue
        for key, value in content.items():
            if key in fields and value != "auto" and not _takes(value, fields[key]):
                kinds = [kind if isinstance(kind, str) else f"one of {kind}" for kind in fields[key]["takes"]]
                limits = "".join(f" {mark} {fields[key][name]}" for name, mark in _MARKS.items() if name in fields[key])
                wanted = " or ".join(kinds).replace("section", "dictionary") + limits
                yield Finding("refused", f"{section}.{key}", f"{value!r:.60} is not {wanted}{_hint(value)}")


def _autos(config: dict, filled: bool) -> Iterator[Finding]:
    """Each "auto": in data models it is dropped, elsewhere it stays a text, with which nothing can be computed."""
    found = list(_auto_keys(config))
    if not found:
        return
    if filled:
        text = f'"auto" ({len(found)} of them) is filled in by Transformers or Accelerate, not by DeepSpeed alone'
        yield Finding("note", ".".join(found[0]), text)
        return
    for path in found:
        *above, key = path
        section = ".".join(above)
        fields = _recorded()["types"].get({"bfloat16": "bf16"}.get(section, section))
        dotted = ".".join(path)
        if fields is not None:
            level = "silent" if key in ("stage", "enabled", "device") else "note"
            default = fields.get(key, {}).get("default")
            text = f'DeepSpeed alone drops "auto" without a word and takes its default, {json.dumps(default)}'
            text += "; training stays in fp32" if key == "enabled" and "16" in section else ""
            yield Finding(level, dotted, text)
        elif section in ("", "optimizer.params", "scheduler.params"):
            yield Finding("refused", dotted, f'"auto" is for Transformers or Accelerate; {_ALONE}')


def _auto_keys(config: dict) -> Iterator[tuple[str, ...]]:
    inside: list[tuple[tuple[str, ...], dict]] = [((), config)]
    for above, content in inside:  # grows while it is read
        for key, value in content.items():
            if value == "auto":
                yield (*above, str(key))
            elif isinstance(value, dict):
                inside.append(((*above, str(key)), value))


def _parameters(config: dict) -> Iterator[Finding]:
    """Parameters of optimizer and schedule, which DeepSpeed hands on as they are when training begins."""
    for section in ("optimizer", "scheduler"):
        content = config.get(section)
        if section in config and not isinstance(content, dict):
            yield Finding("refused", section, "it must be a dictionary")
        if not isinstance(content, dict):
            continue
        known, name = _recorded()["arguments"][section], content.get("type")
        taken = known.get(str(name).lower() if section == "optimizer" else str(name))
        close = difflib.get_close_matches(str(name), known, 1, 0.75)
        if taken is None and section == "scheduler" and name is not None and close:
            yield Finding("refused", "scheduler.type", f"there is no {name!r}; did you mean {close[0]!r}?")
        parameters = content.get("params")
        for key, value in parameters.items() if isinstance(parameters, dict) else ():
            dotted = f"{section}.params.{key}"
            if key == "max_grad_norm" and section == "optimizer":
                yield Finding("refused", dotted, "write gradient_clipping at the top level instead")
            elif taken and key not in taken:
                meant = _ALIASES.get(key) or next(iter(difflib.get_close_matches(key, taken, 1, 0.6)), "")
                text = f"{name} takes no such parameter" + (f"; did you mean {meant!r}?" if meant else "")
                yield Finding("refused", dotted, text)
            elif isinstance(value, str) and value != "auto" and re.search(r"\d|\$", value):
                yield Finding("refused", dotted, f"{value!r} is no number{_hint(value)}")


def _zero(config: dict) -> Iterator[Finding]:
    """What the section zero_optimization says, and what it leaves to defaults."""
    zero = config.get("zero_optimization")
    if isinstance(zero, bool) or "zero_optimization" not in config:
        return
    if not isinstance(zero, dict):
        yield Finding("refused", "zero_optimization", 'it must be a dictionary, such as {"stage": 2}')
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
    sections = {name: config[name] for name in ("fp16", "bf16", "bfloat16") if name in config}
    if sections.get("bf16", ()) is None:  # it is read as if it were not there
        del sections["bf16"]
    for name, content in sections.items():
        if not isinstance(content, dict):
            yield Finding("refused", name, 'it must be a dictionary, such as {"enabled": true}')
        elif "enabled" not in content:
            yield Finding("silent", name, 'without "enabled": true the section does nothing; training stays in fp32')
    on = [name for name, content in sections.items() if isinstance(content, dict) and truth(content.get("enabled"))]
    if "fp16" in on and len(on) > 1:
        yield Finding("refused", "fp16", "fp16 and bf16 are both enabled")


def _rest(config: dict) -> Iterator[Finding]:
    """Clipping, shell variables, and the communication logger."""
    clip = config.get("gradient_clipping", 0.0)
    if "gradient_clipping" not in config:
        text = "by default gradients are clipped at norm 1.0 (0.19.8; off before); 0.0 switches it off"
        yield Finding("note", "gradient_clipping", text)
    elif clip != "auto" and not isinstance(clip, (int, float)):
        yield Finding("refused", "gradient_clipping", f"{clip!r} is no number{_hint(clip)}; {_ALONE}")
    elif clip != "auto" and not 0 <= clip < math.inf:
        yield Finding("silent", "gradient_clipping", f"{clip} clips nothing; 0.0 says so")
    for key, value in config.items():
        if isinstance(value, str) and "$" in value and key not in BATCH:
            yield Finding("silent", key, f"{value!r} is a shell variable, which nobody replaces here")
    logger = config.get("comms_logger")
    if isinstance(logger, dict) and logger.get("enabled"):
        yield Finding("note", "comms_logger", "its latencies are running sums in 0.19.8: too large from the second on")
