"""Promises about programs of others: launched twice in one kernel they print what they print under `torchrun`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import missing
from kernels import Kernel, surroundings

pytestmark = pytest.mark.guard(240)

RANKS = 2
SCRIPTS = "accelerate.test_utils.scripts"
SHOWS = {  # in the order of the calls: what the first leaves in a rank would make one process of each rank later
    "test_ops": "DistributedType.NO",  # it settles on one process a rank where there is no GPU
    "test_script": "DistributedType.MULTI_CPU",
    "test_sync": "Test Distributed `no_sync` context manager with multiple forwards",
}
ALWAYS = ("test_ops", "test_script")  # the other with --thorough
ON_CPU = {"ACCELERATE_USE_CPU": "true"}  # as `accelerate launch --cpu` sets it
PROGRAM = """
import contextlib, io, json, runpy
from course_utils import launch

def printed(module):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return text.getvalue()
"""


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest) -> dict[str, list[list[str]]]:
    """Of each program, what every rank has printed in the first call and in the second, others in between."""
    find_spec("accelerate") or missing("accelerate")
    thorough = request.config.getoption("--thorough")
    calls: dict[str, list[list[str]]] = {name: [] for name in SHOWS if thorough or name in ALWAYS}
    with Kernel(**ON_CPU) as kernel:
        kernel.good(PROGRAM)
        for name in [*calls, *calls]:
            launch = f"launch(printed, '{SCRIPTS}.{name}', world_size={RANKS}, init=False, timeout=120)"
            kernel.good(f"texts = {launch}", timeout=180)
            calls[name].append(json.loads(kernel.good("print(json.dumps(texts))").out))
    return calls


def under_torchrun(name: str, folder: Path) -> list[str]:
    """What every rank of the program prints under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [f"--log-dir={folder}", "--redirects=3", "-m", f"{SCRIPTS}.{name}"]
    run = subprocess.run(command, cwd=folder, env=surroundings(**ON_CPU), capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr
    return [log.read_text() for log in sorted(folder.glob("*/attempt_0/*/stdout.log"))]


@pytest.mark.parametrize("name", SHOWS)
def test_a_program_of_accelerate_prints_both_times_what_it_prints_under_torchrun(name, launched, tmp_path):
    if name not in launched:
        pytest.skip("only with --thorough")
    expected = under_torchrun(name, tmp_path)
    assert len(expected) == RANKS and SHOWS[name] in expected[0]
    assert launched[name] == [expected, expected]
