"""The check of DeepSpeed configurations, and what the course uses of DeepSpeed's insides."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, missing

from course_utils import deepspeed_tools
from course_utils.deepspeed_tools import check_config, check_file

EXAMPLES = json.loads(Path(__file__).with_name("deepspeed_examples.json").read_text(encoding="utf-8"))
BATCH = {"train_batch_size": 8, "gradient_clipping": 0.0}


@pytest.fixture
def deepspeed():
    if deepspeed_tools.missing():
        missing(deepspeed_tools.missing())
    return importlib.import_module("deepspeed")


def zero(**keys):
    return {**BATCH, "zero_optimization": keys}


#: Configuration, ranks, level and key of the one finding, and a word of what is to be said of it.
TRAPS = [
    ({**BATCH, "zero_optimisation": {"stage": 1}}, "silent", "zero_optimisation", "'zero_optimization'"),
    ({**BATCH, "gradient_clip": 1.0}, "silent", "gradient_clip", "'gradient_clipping'"),
    ({**BATCH, "gradient_accumulation": 4}, "silent", "gradient_accumulation", "'gradient_accumulation_steps'"),
    ({**BATCH, "stage": 2}, "silent", "stage", "belongs in 'zero_optimization'"),
    ({**BATCH, "activation_checkpointing": {"partition_activation": True}}, "silent",
     "activation_checkpointing.partition_activation", "'partition_activations'"),
    ({**BATCH, "bf16": {}}, "silent", "bf16", "fp32"),
    (zero(overlap_comm=True), "silent", "zero_optimization.stage", "plain data parallelism"),
    (zero(stage=0, offload_optimizer={"device": "cpu"}), "silent", "zero_optimization.offload_optimizer", "stage 0"),
    (zero(stage=2, offload_param={"device": "cpu"}), "silent", "zero_optimization.offload_param", "stage 3"),
    (zero(stage=3), "note", "zero_optimization.stage3_param_persistence_threshold", "100,000"),
    ({"train_batch_size": 8}, "note", "gradient_clipping", "1.0"),
    ({**BATCH, "comms_logger": {"enabled": True}}, "note", "comms_logger", "sums"),
    ({**BATCH, "train_micro_batch_size_per_gpu": "auto"}, "note", "train_micro_batch_size_per_gpu", "Transformers"),
    (zero(stage=2, reduce_bucket=1), "refused", "zero_optimization.reduce_bucket", "'reduce_bucket_size'"),
    (zero(stage=3, stage3_param_persistence_threshold=0, mics_shard_size=2), "refused",
     "zero_optimization.mics_shard_size", "removed"),
    (zero(stage=4), "refused", "zero_optimization.stage", "0, 1, 2, 3"),
    ({**BATCH, "zero_optimization": 2}, "refused", "zero_optimization", "dictionary"),
    ({**BATCH, "amp": {"enabled": True}}, "refused", "amp", "removed"),
    ({**BATCH, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "refused", "fp16", "both"),
    ({**BATCH, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "refused",
     "optimizer.params.max_grad_norm", "gradient_clipping"),
    ({"gradient_clipping": 0.0}, "refused", "train_batch_size", "train_micro_batch_size_per_gpu"),
    ({**BATCH, "train_micro_batch_size_per_gpu": 3}, "refused", "train_batch_size", "8 is not micro-batch 3"),
    ({**BATCH, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}, "refused", "train_batch_size",
     "ranks 2"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "level", "key", "says"), TRAPS)
def test_each_trap_is_named_and_nothing_else(config, level, key, says):
    (found,) = check_config(config, world_size=2)
    assert (found.level, found.key) == (level, key) and says in found.message


#: What is wrong with the public examples, read by hand: the first is passed over, the others are refused since 2026.
TRUE_ALARMS = {"cuda_visible_devices": "silent", "compression_training": "refused", "sparse_attention": "refused",
               "progressive_layer_drop": "refused"}


def test_public_examples_raise_no_false_alarm():
    alarms = {
        name: {finding.key: finding.level for finding in check_config(config) if finding.level != "note"}
        for name, config in EXAMPLES["configurations"].items()
    }
    assert all(found.items() <= TRUE_ALARMS.items() for found in alarms.values()), alarms
    assert len([name for name, found in alarms.items() if not found]) >= 10


def test_command_prints_the_findings_and_fails_on_more_than_notes(tmp_path):
    file = tmp_path / "config.json"
    command = [sys.executable, "-m", "course_utils", "check-deepspeed", str(file)]

    def run(text: str) -> tuple[int, str]:
        file.write_text(text)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert run('{"train_batch_size": 8}')[0] == 0
    status, text = run('{"train_batch_size": 8, "zero_optimisation": {}}')
    assert status == 1 and "did you mean 'zero_optimization'?" in text
    assert run("{")[0] == 2
    file.write_text('{"train_batch_size": 8, "train_batch_size": 4}')
    assert [finding.level for finding in check_file(file)] == ["refused", "note"]


@pytest.mark.usefixtures("deepspeed")
def test_private_names_that_the_course_uses_are_there():
    from course_utils.deepspeed_tools import internals

    for module, name, _ in internals.PRIVATE_NAMES:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    internals.forget()


@pytest.mark.usefixtures("deepspeed")
def test_recorded_keys_are_those_that_deepspeed_knows(monkeypatch):
    from course_utils.deepspeed_tools import config_check, internals

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert json.loads(config_check.RECORDED.read_text(encoding="utf-8")) == internals.record_keys()
