"""Cores of lessons with the oldest and the newest versions that hosts have: `make versions`.

Each environment is made anew, with some gigabytes to download where PyTorch's index has no build for the CPU
(UV_TORCH_BACKEND=cpu asks for it), so `make test` leaves this out. The lessons are opened as from a badge.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import missing
from test_hosted import add_kernel, copies, core, prepare, run

__all__ = ["copies"]  # a fixture
LESSONS = ("00", "02", "04", "14")
# Beside the course's oldest Python and torch, what was old on Colab in August 2026
# (https://github.com/googlecolab/backend-info/blob/a72407924822ea377410b69f0a290150bcb5c9c2/pip-freeze.txt).
OLDEST = """torch==2.10.0 cloudpickle==3.1.2 ipykernel==6.17.1 ipython==7.34.0 ipywidgets==7.7.1 jupyter-client==7.4.9
    matplotlib==3.10.0 numpy==2.1.3 pillow==11.3.0 psutil==5.9.5 pyyaml==6.0.3 traitlets==5.7.1"""
NEWEST = "torch cloudpickle ipykernel ipywidgets matplotlib numpy pillow psutil pyyaml"
VERSIONS = {"oldest": ("3.11", OLDEST), "newest": ("3.13", NEWEST)}

pytestmark = pytest.mark.guard(1800)


@pytest.fixture(scope="module", params=VERSIONS)
def environment(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """Its name, and a folder in which it is known as a kernel."""
    uv, (version, packages) = shutil.which("uv") or missing("uv: pip install uv"), VERSIONS[request.param]
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        python = Path(folder, "environment", "bin", "python")
        subprocess.run([uv, "venv", "--quiet", "--python", version, python.parents[1]], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *packages.split()], check=True)
        add_kernel(Path(folder), request.param, python)
        with pytest.MonkeyPatch.context() as patch:
            prepare(Path(folder), patch)
            yield request.param, Path(folder)


@pytest.mark.parametrize("lesson", LESSONS)
def test_core_runs(lesson: str, copies: Path, environment: tuple[str, Path]):
    kernel, folder = environment
    cells = [cell for cell in core(copies, lesson) if cell.cell_type == "code"]
    if kernel == "oldest":
        cells = [cell for cell in cells if "torchfrtrace" not in cell.source]  # that of 2.10 refuses gloo and barriers
    told = run(cells, kernel, folder)
    print(told[0])
