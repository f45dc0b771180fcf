"""All lessons run on a machine with GPUs, with as many ranks on NCCL as there are GPUs for."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from conftest import ROOT

pytestmark = pytest.mark.guard(600)


@pytest.mark.parametrize("lesson", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_lesson_runs(lesson):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and PyTorch sees none here")
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        pytest.skip("needs the course's own environment (make dev): this Python cannot run notebooks")
    command = [sys.executable, "-m", "course_utils", "execute", str(lesson)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
