"""The check of DeepSpeed configurations, and what the course uses of DeepSpeed's insides."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, missing

from lessons.deepspeed import deepspeed_tools
from lessons.deepspeed.deepspeed_tools import check_config, check_file, read_file, what_runs

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
    ({**BATCH, "stage": 2}, "silent", "stage", "belongs in 'zero_optimization'"),
    ({**BATCH, "bf16": {}}, "silent", "bf16", "fp32"),
    (zero(overlap_comm=True), "silent", "zero_optimization.stage", "plain data parallelism"),
    (zero(stage=0, offload_optimizer={"device": "cpu"}), "silent", "zero_optimization.offload_optimizer", "stage 0"),
    (zero(stage=2, offload_param={"device": "cpu"}), "silent", "zero_optimization.offload_param", "stage 3"),
    (zero(stage=3), "note", "zero_optimization.stage3_param_persistence_threshold", "100,000"),
    ({"train_batch_size": 8}, "note", "gradient_clipping", "1.0"),
    ({**BATCH, "comms_logger": {"enabled": True}}, "note", "comms_logger", "sums"),
    ({**BATCH, "train_micro_batch_size_per_gpu": "auto"}, "refused", "train_micro_batch_size_per_gpu", "Transformers"),
    ({**BATCH, "bf16": {"enabled": "auto"}}, "silent", "bf16.enabled", "fp32"),
    (zero(stage="auto"), "silent", "zero_optimization.stage", "default, 0"),
    (zero(stage=2, reduce_bucket_size="auto"), "note", "zero_optimization.reduce_bucket_size", "500000000"),
    ({**BATCH, "train_batch_size": "$GLOBAL"}, "refused", "train_batch_size", "shell variable"),
    ({**BATCH, "train_batch_size": "8"}, "refused", "train_batch_size", "without quotes"),
    ({"train_batch_size": 8, "gradient_clipping": -1}, "silent", "gradient_clipping", "clips nothing"),
    (zero(stage=2, reduce_bucket_size="5e8"), "refused", "zero_optimization.reduce_bucket_size", "is not int > 0"),
    (zero(stage=2, offload_optimizer={"device": "gpu"}), "refused",
     "zero_optimization.offload_optimizer.device", "nvme"),
    ({**BATCH, "optimizer": {"type": "AdamW", "parms": {"lr": 3e-4}}}, "silent", "optimizer.parms", "'params'"),
    ({**BATCH, "optimizer": {"type": "AdamW", "params": {"learning_rate": 1.0}}}, "refused",
     "optimizer.params.learning_rate", "'lr'"),
    ({**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": "3e-4"}}}, "refused", "optimizer.params.lr", "quotes"),
    ({**BATCH, "scheduler": {"type": "WarmupLr"}}, "refused", "scheduler.type", "'WarmupLR'"),
    ({**BATCH, "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 9}}}, "refused",
     "scheduler.params.warmup_steps", "'warmup_num_steps'"),
    ({**BATCH, "zero_stage": 3}, "silent", "zero_stage", "it is zero_optimization.stage"),
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


def test_each_trap_is_named_and_nothing_else():
    for config, level, key, says in TRAPS:
        found = check_config(config, world_size=2)
        assert [(each.level, each.key) for each in found] == [(level, key)], config
        assert says in found[0].message


#: What is wrong with the public examples, read by hand: the first is passed over, the others are refused since 2026.
TRUE_ALARMS = {"cuda_visible_devices": "silent", "compression_training": "refused", "sparse_attention": "refused",
               "progressive_layer_drop": "refused"}


def test_public_examples_raise_no_false_alarm():
    alarms = {
        name: {finding.key: finding.level for finding in check_config(config, filled=True) if finding.level != "note"}
        for name, config in EXAMPLES["configurations"].items()
    }
    assert all(found.items() <= TRUE_ALARMS.items() for found in alarms.values()), alarms
    assert len([name for name, found in alarms.items() if not found]) >= 10


def test_command_prints_the_findings_and_fails_on_more_than_notes(tmp_path):
    file = tmp_path / "config.json"
    command = [sys.executable, "-m", "tools", "check-deepspeed", str(file)]

    def run(text: str) -> tuple[int, str]:
        file.write_text(text)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert run('{"train_batch_size": 8}')[0] == 0
    status, text = run('{"train_batch_size": 8, "zero_optimisation": {}}')
    assert status == 1 and "did you mean 'zero_optimization'?" in text
    assert text.splitlines()[-1].startswith("it runs no ZeRO (stage 0: plain data parallelism); fp32; no offload; ")
    status, text = run('{"train_batch_size": 8, "bf16": {"enabled": "auto"}}')
    assert status == 1 and "training stays in fp32" in text
    assert run("{")[0] == 2
    file.write_text('{"train_batch_size": 8, "train_batch_size": 4}')
    assert [finding.level for finding in check_file(file)] == ["refused", "note"]


def test_the_last_line_says_what_runs():
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": offload, "bf16": {"enabled": True}}
    assert what_runs(config, world_size=8) == (
        "ZeRO stage 3; bf16; optimizer on cpu, param on nvme; gradients clipped at 1.0; "
        "batch 32 = micro-batch 4 x steps 1 x ranks 8"
    )
    config |= {"gradient_clipping": 0.0, "zero_optimization": {**offload, "stage": "auto"}, "bf16": {"enabled": "auto"}}
    assert what_runs(config) == (
        "no ZeRO (stage 0: plain data parallelism); fp32; no offload; no clipping; "
        "batch ? = micro-batch 4 x steps 1 x ranks ?"
    )


#: Text of a file, and what is said where it is no configuration.
NO_JSON = {
    "yaml": ("deepspeed_config:\n  zero_stage: 3\n", "this is no JSON object, but YAML"),
    "empty": (" \n", "the file is empty"),
    "a log": ("[2026-11-28 10:00] INFO start", "it begins with '[2026"),
}


@pytest.mark.parametrize(("text", "says"), NO_JSON.values(), ids=NO_JSON)
def test_what_is_no_json_is_told_as_what_it_is(tmp_path, text, says):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)):
        check_file(tmp_path / "x.json")


#: What is no strict JSON, but DeepSpeed reads it.
HJSON = {
    "comment": '{"train_batch_size": 8, // all ranks together\n "zero_optimization": {"stage": 2}}',
    "comma too many": '{"train_batch_size": 8, "zero_optimization": {"stage": 2,},}',
    "no comma at the end of a line": '{"train_batch_size": 8\n "zero_optimization": {"stage": 2}\n}',
    "bare keys": "{train_batch_size: 8, zero_optimization: {stage: 2}}",
}


@pytest.mark.parametrize("text", HJSON.values(), ids=HJSON)
def test_files_are_read_as_deepspeed_reads_them(tmp_path, text):
    pytest.importorskip("hjson")
    (tmp_path / "x.json").write_text(text)
    config, (note,) = read_file(tmp_path / "x.json")
    assert config == {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    assert note.key == "x.json" and "no strict JSON" in note.message
    assert {finding.level for finding in check_file(tmp_path / "x.json")} == {"note"}


#: Configurations on which DeepSpeed's own reading must agree with the linter's: refused, or the stage and precision.
def configurations() -> dict[str, dict]:
    plain = {"train_batch_size": 8}
    sections: dict[str, list] = {
        "zero_optimization": [
            None, True, 2, {}, {"stage": 2}, {"stage": "1"}, {"stage": 1.0}, {"stage": True}, {"stage": "three"},
            {"stage": 5}, {"stage": None}, {"stage": "auto"}, {"stage": "$STAGE"},
            {"stage": 2, "reduce_bucket_size": 1e9},
            {"stage": 2, "reduce_bucket_size": "5e8"}, {"stage": 2, "reduce_bucket_size": "500"},
            {"stage": 2, "reduce_bucket_size": 1.5}, {"stage": 2, "reduce_bucket_size": 0},
            {"stage": 2, "reduce_bucket_size": "auto"}, {"stage": 2, "reduce_bucket_size": None},
            {"stage": 2, "overlap_comm": None}, {"stage": 2, "overlap_comm": "yes"}, {"stage": 2, "overlap_comm": 2},
            {"stage": 2, "overlap_comm": "$X"}, {"stage": 3, "offload_param": {"device": "cpu"}},
            {"stage": 3, "offload_param": {"device": "gpu"}}, {"stage": 3, "offload_param": None},
            {"stage": 3, "offload_param": "cpu"}, {"stage": 2, "offload_optimizer": {"device": "auto"}},
            {"stage": 2, "offload_optimizer": {"device": "cpu", "pinmemory": True}},
            {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 2.0}},
            {"stage": 2, "round_robin_gradients": 1},
            {"stage": 3, "stage3_prefetch_bucket_size": "auto"}, {"stage": 3, "stage3_prefetch_bucketsize": 1},
            {"stage": 3, "stage3_max_live_parameters": 1e9}, {"stage": 3, "stage3_param_persistence_threshold": -1},
            {"stage": 2, "mics_shard_size": 2}, {"stage ": 2}, {"stage": 2, "cpu_offload": True},
        ],
        "bf16": [None, {}, {"enabled": True}, {"enabled": "true"}, {"enabled": 1}, {"enabled": "$BF16"},
                 {"enabled": "auto"}, {"enabled": None}, {"enable": True}, True],
        "fp16": [None, {"enabled": True}, {"enabled": True, "loss_scale": "dynamic"},
                 {"enabled": True, "loss_scale": 0},
                 {"enabled": "auto", "loss_scale": 128}, {"enabled": True, "initial_scale_power": "16"}],
        "comms_logger": [{"enable": True}, {"enabled": True}, None, {"enabled": True, "prof_ops": "all_reduce"}],
        "tensorboard": [{"enabled": True, "job_name": 3}, {"enabled": "false"}, {"output": "x"}],
        "compile": [{"deepcompile": "maybe"}, {"deepcompile": False}],
        "hybrid_engine": [{"max_out_tokens": 0}, {"max_out_tokens": 5}],
    }  # fmt: skip
    found = {f"{section} {json.dumps(value)}": plain | {section: value} for section, values in sections.items()
             for value in values}  # fmt: skip
    more: list[dict] = [
        {}, {"train_batch_size": 8}, {"train_batch_size": "8"}, {"train_batch_size": "$GLOBAL"},
        {"train_batch_size": "auto"}, {"train_batch_size": 0}, {"train_batch_size": -8},
        {"train_micro_batch_size_per_gpu": "2"}, {"train_micro_batch_size_per_gpu": 2},
        {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"},
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3},
        plain | {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        plain | {"bfloat16": {"enabled": True}}, plain | {"zero_stage": 3, "bf16:enabled": True},
        plain | {"optimizer": {"type": "AdamW", "parms": {"lr": 1.0}}}, plain | {"amp": {"enabled": True}},
        plain | {"optimizer": None}, plain | {"scheduler": {"type": "WarmupLR"}}, plain | {"mixed_precision": "bf16"},
    ]  # fmt: skip
    return found | {json.dumps(config): config for config in more}


def test_deepspeed_itself_refuses_and_runs_the_same(deepspeed, monkeypatch):
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed.utils.logger.setLevel("CRITICAL")
    wrong = []
    for name, config in configurations().items():
        refused = [finding for finding in check_config(config, world_size=1) if finding.level == "refused"]
        try:
            read = DeepSpeedConfig(json.loads(json.dumps(config)))
        except Exception as error:
            if not refused:
                wrong.append(f"{name}: not refused, but {type(error).__name__} {error}"[:300])
            continue
        if refused:
            wrong.append(f"{name}: {refused[0]}, but DeepSpeed reads it")
        said = what_runs(config, world_size=1).split("; ")
        stage = int(read.zero_optimization_stage)
        precision = "fp16" if read.float16_config.enabled else "bf16" if read.bfloat16_config.enabled else "fp32"
        if not said[0].startswith(f"ZeRO stage {stage}" if stage else "no ZeRO") or said[1] != precision:
            wrong.append(f"{name}: {said[:2]}, but DeepSpeed: stage {stage}, {precision}")
    assert not wrong, "\n".join(wrong)
    assert len(configurations()) > 80


@pytest.mark.usefixtures("deepspeed")
def test_private_names_that_the_course_uses_are_there():
    from lessons.deepspeed.deepspeed_tools import internals

    for module, name, _ in internals.PRIVATE_NAMES:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    internals.forget()


@pytest.mark.usefixtures("deepspeed")
def test_recorded_keys_are_those_that_deepspeed_knows(monkeypatch):
    from lessons.deepspeed.deepspeed_tools import config_check, internals

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert json.loads(config_check.RECORDED.read_text(encoding="utf-8")) == internals.record_keys()
