"""All that the course uses of DeepSpeed 0.19.8's private names; a test in tests/models says when one has gone."""

from __future__ import annotations

import enum
import importlib
import inspect
import types
import typing
from collections import defaultdict
from typing import Any

#: Module, name in it, and what the course needs it for.
PRIVATE_NAMES = [
    ("deepspeed.utils.groups", "_release_process_group_references", "to forget the process groups of the last call"),
    ("deepspeed.comm.comm", "cdb", "to forget the communication backend of the last call"),
    ("deepspeed.runtime.zero.partition_parameters", "Init", "its counter param_id, which all ranks must agree on"),
    ("deepspeed.runtime.zero.parameter_offload", "DeepSpeedZeRoOffload", "its counter of modules, likewise"),
    ("deepspeed.ops", "_probe_compatible_ops", "fills __compatible_ops__, by trying a compiler, unless that is there"),
    ("deepspeed.runtime.config", "_REMOVED_TOP_LEVEL_CONFIG_KEYS", "top-level keys that are refused, with why"),
    ("deepspeed.runtime.config", "_REMOVED_ZERO_CONFIG_KEYS", "keys of zero_optimization that are refused"),
]


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


def removed_keys() -> dict[str, str]:
    """Keys that DeepSpeed refuses because the feature is gone, dotted, with its own message."""
    config = _module("deepspeed.runtime.config")
    inside = {f"zero_optimization.{key}": why for key, why in config._REMOVED_ZERO_CONFIG_KEYS.items()}
    return {**config._REMOVED_TOP_LEVEL_CONFIG_KEYS, **inside}


class _Asked(dict):
    """A dictionary that notes which of its keys somebody has looked for."""

    def __init__(self, content: dict, asked: set[str]):
        super().__init__(content)
        self.asked = asked

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def keys(self):
        return self  # so that `key in config.keys()` is noted, too

    def __copy__(self):
        return _Asked(self, self.asked)


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
SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
#: Optimizers by the name in a configuration: on the GPU, on the CPU and PyTorch's, of which one is taken.
OPTIMIZERS = {
    "adam": [("deepspeed.ops.adam.fused_adam", "FusedAdam"), ("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
             ("torch.optim", "Adam")],
    "lamb": [("deepspeed.ops.lamb.fused_lamb", "FusedLamb")],
    "lion": [("deepspeed.ops.lion.fused_lion", "FusedLion"), ("deepspeed.ops.lion", "DeepSpeedCPULion")],
    "adagrad": [("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad"), ("torch.optim", "Adagrad")],
}  # fmt: skip


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


def asked_types() -> dict[str, dict[str, dict[str, Any]]]:
    """What each key of the sections that are data models takes, by section."""
    found: dict[str, Any] = {}
    for section, (module, model) in MODELS.items():
        found |= _fields(section, getattr(_module(module), model))
    return found


def asked_arguments() -> dict[str, dict[str, list[str]]]:
    """The parameters that optimizers and schedules take, by their name in a configuration."""
    def names(*classes: tuple[str, str]) -> set[str]:
        taken = (inspect.signature(getattr(_module(module), name).__init__) for module, name in classes)
        return {name for one in taken for name in one.parameters} - {"self", "params", "model_params", "optimizer"}

    optimizers = {name: sorted(names(*classes)) for name, classes in OPTIMIZERS.items()}
    optimizers["adam"] = optimizers["adamw"] = sorted({*optimizers["adam"], "torch_adam", "adam_w_mode"})
    schedules = {name: sorted(names(("deepspeed.runtime.lr_schedules", name))) for name in SCHEDULES}
    return {"optimizer": optimizers, "scheduler": schedules}


def asked_keys() -> dict[str, list[str]]:
    """The keys that DeepSpeed's configuration looks for, by section; the top level is the section ``""``.

    It has no list of top-level keys, so it is given a dictionary that notes what it is asked for. What other parts of
    DeepSpeed read from the dictionary later is added by hand.
    """
    top: set[str] = {"sequence_parallel_size"}  # deepspeed.runtime.config, only in a world; and DeepSpeed's launcher
    sections: dict[str, set[str]] = {name: set() for name in PLAIN_SECTIONS}
    content: dict[str, Any] = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}}
    for name, asked in sections.items():
        content[name] = _Asked({"enabled": False} if name == "torch_autocast" else {}, asked)
    _module("deepspeed.runtime.config").DeepSpeedConfig(_Asked(content, top))
    found = {"": top - set(removed_keys())} | sections
    found |= {"optimizer": {"type", "params", "legacy_fusion"}, "scheduler": {"type", "params"}}
    found |= {name: set(fields) for name, fields in asked_types().items()}
    return {name: sorted(keys) for name, keys in found.items()}


def record_keys() -> dict[str, Any]:
    """What ``course_utils/recordings/deepspeed_keys.json`` holds, from the version that is installed."""
    return {"version": _module("deepspeed").__version__, "keys": asked_keys(), "removed": removed_keys(),
            "types": asked_types(), "arguments": asked_arguments()}  # fmt: skip
