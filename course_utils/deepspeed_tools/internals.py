"""All that the course uses of DeepSpeed 0.19.8's private names; a test in tests/models says when one has gone."""

from __future__ import annotations

import importlib
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
    models = {
        "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
        "zero_optimization.offload_param": ("deepspeed.runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
        "zero_optimization.offload_optimizer": (
            "deepspeed.runtime.zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig",
        ),
        "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
        "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    }  # fmt: skip
    for name, (module, model) in models.items():
        fields = getattr(_module(module), model).model_fields
        found[name] = {field.alias or key for key, field in fields.items()} | set(fields)
    return {name: sorted(keys) for name, keys in found.items()}


def record_keys() -> dict[str, Any]:
    """What ``course_utils/recordings/deepspeed_keys.json`` holds, from the version that is installed."""
    return {"version": _module("deepspeed").__version__, "keys": asked_keys(), "removed": removed_keys()}
