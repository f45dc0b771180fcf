"""The files for Kubernetes and SkyPilot: what they name exists, and a slip is refused where a cluster may drop it."""

import copy
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from torch.distributed import run as distributed_run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "kubernetes"
VALIDATOR = jsonschema.Draft202012Validator(json.loads((FOLDER / "trainjob.schema.json").read_text()))


@pytest.fixture
def job() -> dict:
    return yaml.safe_load((FOLDER / "trainjob.yaml").read_text())


def test_the_training_job_follows_the_schema(job):
    VALIDATOR.check_schema(VALIDATOR.schema)
    assert [error.message for error in VALIDATOR.iter_errors(job)] == []


@pytest.mark.parametrize(("path", "field", "value", "message"), [
    (["spec", "trainer"], "numNode", 2, "'numNode' was unexpected"),
    (["spec", "trainer"], "numNodes", "two", "'two' is not of type 'integer'"),
    (["spec"], "runtimeRef", {}, "'name' is a required property"),
])
def test_a_slip_is_refused(job, path, field, value, message):
    wrong = copy.deepcopy(job)
    place = wrong
    for step in path:
        place = place[step]
    place[field] = value
    assert any(message in error.message for error in VALIDATOR.iter_errors(wrong))


def test_each_node_of_the_job_has_a_copy(job, monkeypatch):
    trainer = job["spec"]["trainer"]
    monkeypatch.setattr(sys, "argv", ["train.py", *trainer["args"]])
    program = runpy.run_path(str(ROOT / "scripts" / "train.py"), run_name="script")
    mesh = program["arguments"](trainer["numNodes"] * trainer["numProcPerNode"]).mesh
    assert mesh == {"replicate": trainer["numNodes"], "shard": trainer["numProcPerNode"], "tp": 1}


def test_volumes_that_are_mounted_exist(job):
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_image_has_the_program_and_the_versions_of_the_course(job):
    lines = [line for line in (FOLDER / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} == {"FROM", "RUN", "COPY", "ENV", "CMD"}
    versions = dict(re.findall(r'"(\w+)==([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    assert f"pytorch/pytorch:{versions['torch']}-" in lines[0] and f"numpy=={versions['numpy']}" in lines[1]
    _, *programs, folder = next(line for line in lines if line.startswith("COPY")).split()
    assert all((ROOT / "scripts" / program).exists() for program in programs)
    assert job["spec"]["trainer"]["command"][1] in [folder + program for program in programs]
    assert tomllib.loads("command = " + next(line for line in lines if line.startswith("CMD"))[4:])["command"]


# --- SkyPilot -----------------------------------------------------------------------------------------------------

SKYPILOT = ROOT / "scripts" / "skypilot"
SKYPILOT_VALIDATOR = jsonschema.Draft202012Validator(json.loads((SKYPILOT / "task.schema.json").read_text()))


@pytest.fixture
def task() -> dict:
    return yaml.safe_load((SKYPILOT / "train.yaml").read_text())


def test_the_skypilot_task_follows_the_schema(task):
    SKYPILOT_VALIDATOR.check_schema(SKYPILOT_VALIDATOR.schema)
    assert [error.message for error in SKYPILOT_VALIDATOR.iter_errors(task)] == []


@pytest.mark.parametrize(("path", "field", "value", "message"), [
    ([], "num_node", 2, "'num_node' was unexpected"),
    (["resources"], "job_recovery", {"max_restarts_on_errors": -1}, "is not valid under any of the given schemas"),
])
def test_a_slip_in_the_skypilot_task_is_refused(task, path, field, value, message):
    place = task
    for step in path:
        place = place[step]
    place[field] = value
    assert any(message in error.message for error in SKYPILOT_VALIDATOR.iter_errors(task))


def test_the_skypilot_task_calls_torchrun_and_the_program_with_flags_that_they_have(task, monkeypatch):
    """Its script is run by bash with SkyPilot's variables of the second node; a function stands for torchrun."""
    variables = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "1",
                 "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "PATH": os.environ["PATH"]}
    script = "set -eu\ntorchrun() { printf '%s\\n' \"$@\"; }\n" + task["run"]
    said = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=True).stdout
    call = distributed_run.get_args_parser().parse_args(said.splitlines())
    assert (call.nnodes, call.nproc_per_node, call.node_rank) == ("2", "8", 1)
    assert (call.master_addr, call.master_port, call.training_script) == ("10.0.0.1", 29500, "/train.py")
    program = runpy.run_path(str(ROOT / "scripts" / "train.py"), run_name="script")
    monkeypatch.setattr(sys, "argv", ["train.py", *call.training_script_args])
    args = program["arguments"](16)
    assert args.mesh == {"replicate": 2, "shard": 8, "tp": 1}, "a copy on each node"
    volume = Path(next(iter(task["volumes"])))
    assert volume in args.out.parents and volume in args.data.parents, "all nodes see both"


def test_both_clusters_use_one_image(job, task):
    assert task["resources"]["image_id"] == "docker:" + job["spec"]["trainer"]["image"]
