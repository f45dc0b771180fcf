"""The lists of packages agree, the README's commands exist, and a second set-up does nothing."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import missing
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LISTED = [*PROJECT["dependencies"], *EXTRAS["nccl"], *EXTRAS["deepspeed"], *EXTRAS["test"]]
PINS = [pin for pin in map(Requirement, LISTED) if not pin.marker or pin.marker.evaluate()]
SCRIPT = ROOT / "course_utils" / "bootstrap.py"


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_conda_environment_leads_to_the_packages_of_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    assert environment["channels"] == ["conda-forge"]
    assert environment["dependencies"] == ["python" + PROJECT["requires-python"], "pip", {"pip": ["-e ."]}]


def test_setup_accepts_the_pythons_of_pyproject():
    oldest, newest = re.search(r"OLDEST, NEWEST = \(3, (\d+)\), \(3, (\d+)\)", SCRIPT.read_text()).groups()
    assert PROJECT["requires-python"] == f">=3.{oldest},<3.{int(newest) + 1}"


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
def test_every_dependency_is_pinned_and_installed_as_pinned(pin: Requirement):
    assert [spec.operator for spec in pin.specifier] == ["=="]
    assert importlib.metadata.version(pin.name) in pin.specifier


@pytest.mark.parametrize("pin", [*map(Requirement, EXTRAS["ffcv"])], ids=lambda pin: pin.name)
def test_ffcv_is_pinned_and_installed_where_it_can_be(pin: Requirement):
    assert [spec.operator for spec in pin.specifier] == ["=="]
    for version, platform, wanted in (("3.11", "linux", True), ("3.12", "linux", False), ("3.11", "darwin", False)):
        assert pin.marker.evaluate({"python_version": version, "sys_platform": platform}) is wanted
    try:
        assert importlib.metadata.version(pin.name) in pin.specifier
    except importlib.metadata.PackageNotFoundError:
        missing("FFCV: make ffcv")


def test_tests_and_builds_install_what_native_programs_are_compiled_with():
    makefile = (ROOT / "Makefile").read_text()
    extras = "--extra test --extra nccl --extra deepspeed --extra-if-possible ffcv"
    assert f"\n\t$(SETUP) {extras}\n" in makefile.partition("\ndev:")[2]
    after_it = set(re.findall(r"^(\w+): dev  ##", makefile, re.MULTILINE))
    assert after_it == {"test", "notebooks", "lesson", "quick", "lint"}


def test_readme_names_commands_that_exist():
    named = set(re.findall(r"\bmake ([a-z]+)\b", (ROOT / "README.md").read_text()))
    assert {"setup", "lab", "test"} <= named
    assert named <= targets()


def test_readme_names_subcommands_that_exist():
    named = set(re.findall(r"-m course_utils ([a-z-]+)", (ROOT / "README.md").read_text()))
    usage = subprocess.run(
        [sys.executable, "-m", "course_utils", "--help"], capture_output=True, text=True, check=True
    )
    assert named <= set(re.search(r"\{([a-z,-]+)\}", usage.stdout)[1].split(","))


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


def test_setup_script_can_be_read_by_an_old_python():
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the set-up needs, with an environment that claims to be complete."""
    (tmp_path / "course_utils").mkdir()
    shutil.copy(SCRIPT, tmp_path / "course_utils")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "bin").mkdir()  # a PATH on which there is neither a compiler nor pkg-config
    claim(tmp_path)
    return tmp_path


def claim(root: Path, torch: str = "cpu", *extras: str) -> None:
    """Write down that the environment has all of this, and the extra test."""
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamp = {"root": str(root), "pyproject": digest, "torch": torch, "extras": [*extras, "test"]}
    (root / ".venv" / "course-setup.json").write_text(json.dumps(stamp))


def setup(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, root / "course_utils" / "bootstrap.py", *arguments]
    environment = os.environ | {"PATH": str(root / "bin")} | environment
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180)


@pytest.mark.parametrize(
    ("there", "arguments"),
    [
        ([], []), ([], ["--extra", "test"]), ([], ["--torch", "cpu"]),
        (["ffcv"], ["--extra", "ffcv"]), (["ffcv"], ["--extra-if-possible", "ffcv"]), (["ffcv"], []),
    ],
    ids=str,
)
def test_second_setup_does_nothing_and_keeps_what_is_there(copy: Path, there: list[str], arguments: list[str]):
    claim(copy, "cpu", *there)
    done = setup(copy, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_cuda_12_keeps_its_own_nccl(copy: Path):
    claim(copy, "cu126")
    done = setup(copy, "--torch", "cu126", "--extra", "nccl")
    assert (done.returncode, done.stderr) == (0, "")
    assert "without the extra nccl" in done.stdout


FOR_FFCV = pytest.mark.skipif(
    sys.platform != "linux" or sys.version_info[:2] > (3, 11), reason="FFCV is for Linux, Python 3.11"
)


@FOR_FFCV
def test_system_packages_for_ffcv_are_named(copy: Path):
    before = (copy / ".venv" / "course-setup.json").read_text()
    done = setup(copy, "--extra", "ffcv")
    assert done.returncode != 0
    assert "sudo apt install g++ pkg-config libopencv-dev libturbojpeg0-dev" in done.stderr
    assert "then: make ffcv" in done.stderr
    assert (copy / ".venv" / "course-setup.json").read_text() == before


@FOR_FFCV
def test_tests_go_on_without_ffcv(copy: Path):
    done = setup(copy, "--extra", "test", "--extra-if-possible", "ffcv")
    assert (done.returncode, done.stderr) == (0, "")
    assert "without FFCV" in done.stdout and "make ffcv" in done.stdout


def test_newer_python_is_told_which_one_ffcv_needs(copy: Path):
    script = copy / "course_utils" / "bootstrap.py"
    script.write_text(script.read_text().replace("FFCV_PYTHON = (3, 11)", "FFCV_PYTHON = (3, 9)"))
    done = setup(copy, "--extra", "ffcv")
    assert done.returncode != 0
    if sys.platform == "linux":
        assert "FFCV 1.0.2 needs Python 3.9, .venv has" in done.stderr
        assert "make clean ffcv" in done.stderr


def test_unknown_build_of_torch_is_refused_with_the_choices(copy: Path):
    done = setup(copy, "--torch", "gpu")
    assert done.returncode != 0
    assert "auto, cpu, cuda, or a CUDA version such as cu126" in done.stderr


def test_too_old_python_is_told_what_to_install(copy: Path):
    script = copy / "course_utils" / "bootstrap.py"
    script.write_text(script.read_text().replace("(3, 11), (3, 14)", "(3, 98), (3, 99)"))
    shutil.rmtree(copy / ".venv")
    (copy / "bin" / "uv").write_text("#!/bin/sh\nexit 1\n")  # a uv that cannot fetch one either
    (copy / "bin" / "uv").chmod(0o755)
    done = setup(copy, PATH=f"{copy}/bin:/usr/bin:/bin")
    assert done.returncode != 0
    assert "The course needs Python 3.98 to 3.99" in done.stderr
    assert "make setup PYTHON=" in done.stderr


AFTER_TORCH = """
import gc
{before}
from course_utils.quick_import import install
install(), install()
from importlib.util import find_spec
print(find_spec("torch").name, find_spec("not_there"))
import torch, sys
made = [[]]
made[0].append(made)
print(gc.get_freeze_count() > 100_000, gc.isenabled(), any(each is made for each in gc.get_objects()))
print(find_spec("torch").loader is not None, "TorchFinder" in str(sys.meta_path), torch.ones(2).sum().item())
"""


@pytest.mark.parametrize(("before", "searches"), [("", True), ("gc.disable()", False)])
def test_torch_is_imported_without_a_search_for_garbage_and_what_follows_is_searched(before, searches):
    code = AFTER_TORCH.format(before=before)
    done = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path += {sys.path!r}\n{code}"],
                          capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["torch None", f"True {searches} True", "True False 2.0"]


def test_python_in_the_environment_of_the_course_does_so():
    if not (Path(sysconfig.get_path("purelib")) / "course_start.pth").exists():
        missing("what makes programs start and end quickly: make dev")
    code = "import torch, gc; print(gc.get_freeze_count() > 100_000, gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"
