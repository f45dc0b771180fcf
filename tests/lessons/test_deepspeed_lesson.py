"""Lesson 08 without DeepSpeed, and scripts/train.py with its engine."""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
from functools import partial
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, missing
from notebook_runs import run_notebook

from course_utils import launch
from course_utils.check import CheckFailed
from course_utils.programs import SCRIPTS, TEXT, read_log, run_program
from lessons.deepspeed import check, deepspeed_tools
from lessons.deepspeed.deepspeed_tools import check_config

pytestmark = pytest.mark.guard(240)
LESSON = ROOT / "notebooks" / "08_deepspeed.ipynb"
SMALL = ("--steps=4", "--layers=2", "--hidden=32", "--length=16", "--batch=8", "--warmup=2", "--log-every=1",
         "--clip=0.8")
ENGINE = ("--engine=deepspeed", f"--config={SCRIPTS / 'deepspeed.json'}", "--micro=2")


def test_lesson_runs_without_deepspeed(tmp_path):
    """All cells, with what was recorded: each result that the lesson asks for is there, and is marked."""
    parameters = {"use_deepspeed": False, "world_size": 3}
    run_notebook(LESSON, tmp_path / "out.ipynb", cwd=LESSON.parent, parameters=parameters)
    cells = [cell for cell in nbformat.read(tmp_path / "out.ipynb", 4).cells if cell.cell_type == "code"]
    text = "".join("".join(output.get("text", "") for output in cell.outputs) for cell in cells)
    assert "DeepSpeed is left out" in text and "(recorded: first run)" in text
    recorded = json.loads((ROOT / "course_utils" / "recordings" / "deepspeed_lesson.json").read_text())
    assert set(re.findall(r"\(recorded: (.+)\)", text)) == set(recorded)


def test_without_deepspeed_a_check_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(check, "missing", lambda: "DeepSpeed is not installed. Run this.")
    for judge in (check.mended, check.train_step, check.to_deepspeed, check.resume):
        with pytest.raises(CheckFailed, match=r"DeepSpeed is not installed\. Run this\."):
            judge(None)


def trained(out: Path, *flags: str) -> list[float]:
    """On a rank: run the program with the engine; return losses and norms, step by step."""
    sys.path.insert(0, str(SCRIPTS))  # as Python does for a program
    try:
        run_program(SCRIPTS / "train.py", f"--out={out}", f"--data={TEXT}", *SMALL, *ENGINE, *flags, silent=True)
    finally:
        sys.path.remove(str(SCRIPTS))
    return [line[name] for line in read_log(out) for name in ("loss", "norm")]


def test_engine_deepspeed_goes_on_with_the_same_losses(tmp_path):
    """That it trains as the other engine does is asserted by a cell of the lesson."""
    if deepspeed_tools.missing():
        missing(deepspeed_tools.missing())
    run = partial(launch, trained, tmp_path, world_size=2, backend="gloo", init=False)
    whole = run("--save-every=2")[0]
    assert len(whole) == 8
    (tmp_path / "latest").write_text("step-000000002")
    (tmp_path / "log.jsonl").unlink()
    assert run()[0] == whole[4:]


def test_engine_deepspeed_refuses_what_the_flags_say(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    configuration = runpy.run_path(str(SCRIPTS / "engine_deepspeed.py"))["configuration"]
    config = tmp_path / "config.json"
    config.write_text('{"gradient_clipping": 1.0}')
    args = argparse.Namespace(replicate=1, tp=1, compile=False, config=config, batch=8, micro=2, clip=1.0, bf16=False)
    with pytest.raises(SystemExit, match="must leave gradient_clipping to the flags of train.py"):
        configuration(args, 2)
    config.write_text('{"zero_optimization": {"stage": 1}}')
    assert check_config(configuration(args, 2), world_size=2) == []
    args.tp = 2
    with pytest.raises(SystemExit, match="without --replicate, --tp"):
        configuration(args, 2)
