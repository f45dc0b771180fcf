"""All that the course uses of DeepSpeed 0.19.8's private names; a test in tests/models says when one has gone."""

from __future__ import annotations

import enum
import importlib
import types
import typing
from collections import defaultdict
from typing import Any


def _module(name: str) -> Any:
    return importlib.import_module(name)


def forget() -> None:
    """Forget what DeepSpeed has kept of an earlier call on this rank: process groups, backend, and
    the numbers of parameters and modules, on which ranks that took part in different calls would not agree.

    The ranks of `launch` are the same processes at each call, with a new process group. DeepSpeed is written for a
    process that has one group in its life.
    """
    _module("deepspeed.utils.groups")._release_process_group_references(None)
    _module("deepspeed.comm.comm").cdb = None
    _module("deepspeed.runtime.zero.partition_parameters").Init.param_id = 0
    numbering = _module("deepspeed.runtime.zero.parameter_offload").DeepSpeedZeRoOffload._register_deepspeed_module
    numbering.__defaults__[0][0] = 0  # a list as the default of an argument counts modules over all engines
    vars(_module("deepspeed.ops"))["__compatible_ops__"] = defaultdict(bool)  # no C++ extension is to be compiled


#: Sections that DeepSpeed reads key by key, so that an unknown key in them is passed over.
PLAIN_SECTIONS = ("activation_checkpointing", "aio", "checkpoint", "data_types", "flops_profiler", "torch_autocast")
#: Sections that are data models: DeepSpeed checks their keys and values, and drops each "auto".
MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "comms_logger": ("deepspeed.comm.config", "CommsLoggerConfig"),
    "tensorboard": ("deepspeed.monitor.config", "TensorBoardConfig"),
    "wandb": ("deepspeed.monitor.config", "WandbConfig"),
    "csv_monitor": ("deepspeed.monitor.config", "CSVConfig"),
    "comet": ("deepspeed.monitor.config", "CometConfig"),
    "hybrid_engine": ("deepspeed.runtime.config", "HybridEngineConfig"),
    "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
}


class Asked(dict):
    """A dictionary that notes which of its keys somebody has looked for; see section 5 of the lesson."""

    def __init__(self, content: dict, seen: set[str]):
        super().__init__(content)
        self.seen = seen

    def get(self, key, default=None):
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.seen.add(key)
        return super().__contains__(key)

    def keys(self):
        return self  # so that `key in config.keys()` is noted, too


def _kinds(annotation: Any) -> list[str | list]:
    """What a field takes: names of types, the values of an enumeration, a dotted model; "any" for the rest."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return [[member.value for member in annotation]]
    if typing.get_origin(annotation) is typing.Literal:
        return [list(typing.get_args(annotation))]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(annotation) for kind in _kinds(part)]
    plain = typing.get_origin(annotation) or annotation
    if hasattr(plain, "model_fields"):
        return ["section"]
    names = {int: "int", float: "float", bool: "bool", str: "str", list: "list", dict: "dict", type(None): "null"}
    return [names.get(plain, "any")]


def _fields(section: str, model: Any) -> dict[str, dict[str, Any]]:
    """By section, what each key of a data model takes, its limits and its default; models inside it are sections."""
    found: dict[str, Any] = {section: {}}
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        limits = {limit: getattr(part, limit) for part in field.metadata
                  for limit in ("gt", "ge", "lt", "le") if hasattr(part, limit)}  # fmt: skip
        default = default.value if isinstance(default, enum.Enum) else default
        plain = default if isinstance(default, (bool, int, float, str, type(None))) else "..."
        spec = {"takes": _kinds(field.annotation), **limits, "default": plain}
        found[section] |= dict.fromkeys({name, field.alias or name}, spec)
        for part in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(part, type) and hasattr(part, "model_fields"):
                found |= _fields(f"{section}.{field.alias or name}", part)
    return found


def record_keys() -> dict[str, Any]:
    """What ``course_utils/recordings/deepspeed_keys.json`` holds, from the version that is installed.

    DeepSpeed has no list of its top-level keys, which are the section ``""``, so it is given a dictionary that notes
    what it is asked for. What other parts of DeepSpeed read from the dictionary later is added by hand.
    """
    config = _module("deepspeed.runtime.config")
    inside = {f"zero_optimization.{key}": why for key, why in config._REMOVED_ZERO_CONFIG_KEYS.items()}
    removed = config._REMOVED_TOP_LEVEL_CONFIG_KEYS | inside
    models: dict[str, Any] = {}
    for section, (module, model) in MODELS.items():
        models |= _fields(section, getattr(_module(module), model))
    top = {"sequence_parallel_size"}  # in a world only; and what DeepSpeed's launcher reads
    sections: dict[str, set[str]] = {name: set() for name in PLAIN_SECTIONS}
    content = {name: Asked({"enabled": False} if name == "torch_autocast" else {}, sections[name]) for name in sections}
    content |= {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}}
    config.DeepSpeedConfig(Asked(content, top))
    keys = {"": top - removed.keys(), **sections, **models}
    keys |= {"optimizer": {"type", "params", "legacy_fusion"}, "scheduler": {"type", "params"}}
    return {"version": _module("deepspeed").__version__, "keys": {name: sorted(some) for name, some in keys.items()},
            "removed": removed, "types": models}  # fmt: skip
