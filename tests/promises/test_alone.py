"""A failure that comes only beside other tests does not fail the run and is told; every other one fails it."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

CONFTEST = """
import sys
sys.path.insert(0, {folder!r})

def pytest_configure(config):
    if not hasattr(config, "workerinput") and config.getoption("numprocesses"):
        from alone import Alone
        config.pluginmanager.register(Alone(config))
"""
UNSTABLE = "import os\n\ndef test_unstable(): assert 'PYTEST_XDIST_WORKER' not in os.environ\n"
BROKEN = "def test_broken(): assert False\n"
MANY = "".join(f"def test_{i}(): assert 'PYTEST_XDIST_WORKER' not in os.environ\n" for i in range(4))


@pytest.mark.parametrize(
    ("tests", "code", "told"),
    [
        ("def test_good(): pass\n", 0, []),
        (UNSTABLE, 0, ["passes alone: test_them.py::test_unstable"]),
        (UNSTABLE + BROKEN, 1, ["passes alone: test_them.py::test_unstable", "FAILS alone: test_them.py::test_broken"]),
        (UNSTABLE + MANY, 1, []),
    ],
    ids=["good", "unstable", "broken", "many"],
)
def test_what_failed_beside_others_runs_once_more_alone(tmp_path, tests, code, told):
    (tmp_path / "conftest.py").write_text(CONFTEST.format(folder=str(ROOT / "tests")))
    (tmp_path / "test_them.py").write_text(tests)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "test_them.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if " alone: " in line] == told
