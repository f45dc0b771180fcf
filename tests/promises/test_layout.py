"""The package keeps its layout: who may import what, and which parts start no process."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "course_utils"
FOLDERS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
FORMULAS = ("collective_algorithms", "context_parallel", "costs", "experts", "hardware", "memory", "nccl_tuner",
            "pipeline", "planner", "recorded", "topology", "traces", "transformer")
USERS = [*ROOT.glob("sources/*.py"), *ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/*.py")]


def imports(file: Path) -> Iterator[tuple[str, str | None]]:
    """What a file imports of the course: the module, and the name if one is taken from it."""
    package = list(file.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == PACKAGE.name)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module.split(".")[0] == PACKAGE.name:
                yield from ((module, alias.name) for alias in node.names)


def is_module(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def inside(module: str, name: str | None) -> list[str]:
    """The sub-package whose inside an import reaches into, if it does."""
    public = name in getattr(importlib.import_module(module), "__all__", ())
    full = f"{module}.{name}" if name and not public and is_module(f"{module}.{name}") else module
    parts = full.split(".")
    return parts[1:2] if len(parts) > 2 and parts[1] in FOLDERS else []


@pytest.mark.parametrize("folder", ["", *sorted(FOLDERS)])
def test_nobody_imports_from_inside_another_sub_package(folder: str):
    files = (PACKAGE / folder).rglob("*.py") if folder else PACKAGE.glob("*.py")
    reached = {
        f"{file.relative_to(ROOT)}: {module}.{name}"
        for file in files
        for module, name in imports(file)
        if inside(module, name) not in ([], [folder])
    }
    assert reached == set()


def test_lessons_programs_and_benchmarks_import_public_names_only():
    """A lesson's checks are public, each a module of `checks`."""
    wrong = []
    for file in USERS:
        for module, name in imports(file):
            exercise = module.startswith("course_utils.checks.")
            found = importlib.import_module(module)
            public = name is None or name in getattr(found, "__all__", ()) or is_module(f"{module}.{name}")
            hidden = any(part.startswith("_") for part in f"{module}.{name or ''}".split("."))
            deep = inside(module, name) and not exercise and inside(module, name) != ["checks"]
            if hidden or deep or not public:
                wrong.append(f"{file.name}: {module}.{name}")
    assert not wrong


def test_public_names_exist():
    for path in [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/__init__.py")]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if path.name not in ("__main__.py", "bootstrap.py"):
            found = importlib.import_module(module)
            assert [name for name in getattr(found, "__all__", ()) if not hasattr(found, name)] == [], module


@pytest.mark.parametrize("module", FORMULAS)
def test_formulas_start_no_process_and_load_no_torch(module: str):
    """So each is there in well under a second: torch alone takes one to three."""
    code = (
        f"import sys, course_utils.{module}\n"
        "from multiprocessing import forkserver\n"
        "import psutil\n"
        "assert forkserver._forkserver._forkserver_pid is None and not psutil.Process().children(True)\n"
        "assert 'torch' not in sys.modules, 'loads torch'"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
