"""The check of DeepSpeed configurations, and what the course uses of DeepSpeed's insides."""

from __future__ import annotations

import importlib
import json
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


#: Configuration, level and key of the one finding, and a word of what is said of it; beside those of the lesson.
TRAPS = [
    ({**BATCH, "stage": 2}, "silent", "stage", "belongs in 'zero_optimization'"),
    (zero(stage=0, offload_optimizer={"device": "cpu"}), "silent", "zero_optimization.offload_optimizer", "stage 0"),
    ({**BATCH, "train_micro_batch_size_per_gpu": "auto"}, "refused", "train_micro_batch_size_per_gpu", "Transformers"),
    (zero(stage="auto"), "silent", "zero_optimization.stage", "default, 0"),
    ({"train_batch_size": 8, "gradient_clipping": -1}, "silent", "gradient_clipping", "clips nothing"),
    ({**BATCH, "optimizer": {"type": "AdamW", "parms": {"lr": 3e-4}}}, "silent", "optimizer.parms", "'params'"),
    ({**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": "3e-4"}}}, "refused", "optimizer.params.lr", "quotes"),
    ({"gradient_clipping": 0.0}, "refused", "train_batch_size", "train_micro_batch_size_per_gpu"),
]


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


def test_files_are_read_as_deepspeed_reads_them(tmp_path):
    pytest.importorskip("hjson")
    file = tmp_path / "x.json"
    file.write_text("{train_batch_size: 8, // all ranks together\n zero_optimization: {stage: 2},}")
    config, (note,) = read_file(file)
    assert config == {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    assert note.key == "x.json" and "no strict JSON" in note.message
    file.write_text("[1, 2]")
    with pytest.raises(ValueError, match="no JSON object"):
        read_file(file)


#: Values of sections on which DeepSpeed's own reading must agree with ours: refused, or the stage and precision.
SECTIONS: dict[str, list] = {
    "zero_optimization": [
        2, {}, {"stage": 2}, {"stage": "1"}, {"stage": "three"}, {"stage": 5}, {"stage": None}, {"stage": "auto"},
        {"stage": 2, "reduce_bucket_size": 1e9}, {"stage": 2, "reduce_bucket_size": "5e8"},
        {"stage": 2, "reduce_bucket_size": 0}, {"stage": 2, "overlap_comm": "yes"},
        {"stage": 3, "offload_param": {"device": "cpu"}}, {"stage": 3, "offload_param": None},
        {"stage": 3, "offload_param": "cpu"}, {"stage": 2, "offload_optimizer": {"device": "auto"}},
        {"stage": 2, "offload_optimizer": {"device": "cpu", "pinmemory": True}},
        {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 2.0}},
        {"stage": 3, "stage3_param_persistence_threshold": -1}, {"stage": 2, "mics_shard_size": 2},
    ],
    "bf16": [None, {}, {"enabled": True}, {"enabled": "true"}, {"enabled": 1}, {"enabled": "auto"}, {"enable": True}],
    "bfloat16": [{"enabled": True}],
    "fp16": [{"enabled": True, "loss_scale": "dynamic"}, {"enabled": True, "loss_scale": 0}, {"enabled": "auto"}],
    "comms_logger": [{"enable": True}, None, {"enabled": True, "prof_ops": "all_reduce"}],
    "tensorboard": [{"enabled": True, "job_name": 3}],
    "train_batch_size": [8, "8", "auto", 0],
    "amp": [{"enabled": True}], "optimizer": [None], "mixed_precision": ["bf16"],
}


def test_deepspeed_itself_refuses_and_runs_the_same(deepspeed, monkeypatch):
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed.utils.logger.setLevel("CRITICAL")
    wrong = []
    for section, value in ((section, value) for section, values in SECTIONS.items() for value in values):
        name, config = f"{section} {value}", {"train_batch_size": 8, section: value}
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


@pytest.mark.usefixtures("deepspeed")
def test_recorded_keys_are_those_that_deepspeed_knows(monkeypatch):
    from lessons.deepspeed.deepspeed_tools import config_check, internals

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert json.loads(config_check.RECORDED.read_text(encoding="utf-8")) == internals.record_keys()
