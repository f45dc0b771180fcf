"""The lists of packages agree, and the README's commands exist."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml
from conftest import missing
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GUIDE = "".join((ROOT / name).read_text() for name in ("README.md", "docs/install.md"))
EXTRAS = PROJECT["optional-dependencies"]
LISTED = [*PROJECT["dependencies"], *EXTRAS["nccl"], *EXTRAS["deepspeed"], *EXTRAS["ray"], *EXTRAS["site"],
          *EXTRAS["test"]]
PINS = [pin for pin in map(Requirement, LISTED) if not pin.marker or pin.marker.evaluate()]


def test_conda_environment_leads_to_the_packages_of_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    assert environment["channels"] == ["conda-forge"]
    assert environment["dependencies"] == ["python" + PROJECT["requires-python"], "pip", {"pip": ["-e ."]}]


def test_every_dependency_is_pinned_and_installed_as_pinned():
    assert [pin.name for pin in PINS if [spec.operator for spec in pin.specifier] != ["=="]] == []
    assert [pin.name for pin in PINS if importlib.metadata.version(pin.name) not in pin.specifier] == []


def test_ffcv_is_pinned_and_installed_where_it_can_be():
    for pin in map(Requirement, EXTRAS["ffcv"]):
        assert [spec.operator for spec in pin.specifier] == ["=="]
        for version, platform, wanted in (("3.11", "linux", True), ("3.12", "linux", False), ("3.11", "darwin", False)):
            assert pin.marker.evaluate({"python_version": version, "sys_platform": platform}) is wanted
        try:
            assert importlib.metadata.version(pin.name) in pin.specifier
        except importlib.metadata.PackageNotFoundError:
            missing("FFCV: make ffcv")


def test_tests_and_builds_install_what_native_programs_are_compiled_with():
    makefile = (ROOT / "Makefile").read_text()
    extras = "--extra test --extra site --extra nccl --extra deepspeed --extra ray --extra-if-possible ffcv"
    assert f"\n\t$(SETUP) {extras}\n" in makefile.partition("\ndev:")[2]
    after_it = set(re.findall(r"^(\w+): dev  ##", makefile, re.MULTILINE))
    assert after_it == {"test", "versions", "notebooks", "lesson", "quick", "lint"}


def test_readme_names_commands_and_subcommands_that_exist():
    named = set(re.findall(r"\bmake ([a-z]+)\b", GUIDE))
    assert {"setup", "lab", "test"} <= named
    assert named <= set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    usage = subprocess.run([sys.executable, "-m", "tools", "--help"], capture_output=True, text=True, check=True)
    commands = re.search(r"\{([a-z,-]+)\}", usage.stdout)[1].split(",")
    assert {*re.findall(r"-m tools ([a-z-]+)", GUIDE)} <= {*commands}


def test_continuous_integration_runs_the_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    assert script.rstrip().endswith("make test")
    for package in ("g++", "libopencv-dev", "libturbojpeg0-dev", "pkg-config", "python3-dev"):
        assert re.search(rf"packages\+=\([^)]*{re.escape(package)}\b", script) or f"packages+=({package})" in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_notebooks_run_in_this_environment_even_if_the_user_has_another_kernel_of_that_name(tmp_path: Path):
    other = tmp_path / "kernels" / "python3"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text(json.dumps({"argv": ["false"], "display_name": "other", "language": "python"}))
    command = [sys.executable, "-m", "jupyter", "kernelspec", "list", "--json"]
    listing = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"JUPYTER_DATA_DIR": str(tmp_path)}
    )
    assert json.loads(listing.stdout)["kernelspecs"]["python3"]["resource_dir"].startswith(sys.prefix)
