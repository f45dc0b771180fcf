"""Whoever makes a mistake with FFCV gets a clear error soon, right programs get what they wrote, compiled once.

The programs, `ffcv_mistakes`, run in a process of their own. A program that waits for ever is killed at its time
limit and counts as a failure; the next one gets a new process.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, missing

from course_utils import launch
from lessons.ffcv_data_loading.ffcv import fixes

pytestmark = pytest.mark.guard(600)

LIMIT = 240  # seconds for a program; most need one, the first to compile a hundred on a busy machine
ENDS = {  # what FFCV waits for ever in, or (the last) reads wrongly: the error that says what to do
    "image_without_channels": "RuntimeError: writing failed at sample 17: IndexError.*image.convert.'RGB'.",
    "sample_larger_than_a_page": "RuntimeError: .* at sample 17: .*3000000 but page size is 2097152.*page_size=",
    "dataset_that_raises": "RuntimeError: writing failed at sample 17: FileNotFoundError: n01440764_18.JPEG",
    "writer_killed": "RuntimeError: writing failed: a process of the writer was killed by signal 9 .no memory left",
    "disk_full": "RuntimeError: writing failed .*File too large",
    "operation_that_does_not_compile": "RuntimeError: FFCV failed in Own: TypingError.*there_is_no_such_thing",
    "operation_that_fails_on_a_batch": "RuntimeError: FFCV failed in Own: ValueError: a short batch",
    "compiled_operation_after_to_tensor": "ValueError: NormalizeImage works on NumPy arrays: put it before ToTensor",
    "to_tensor_forgotten": "ValueError: ToTorchImage works on tensors: put ToTensor.. before it",
    "file_gone_while_it_is_read": "RuntimeError: FFCV failed in the pipeline: FileNotFoundError.*gone.beton",
    # byte 2097152 or 4194304: pages are read side by side
    "file_cut_short": "RuntimeError: FFCV failed in the pipeline: OSError: no page .* can be read at byte [24]",
}
RETURNS = {  # what went wrong silently, and what is right
    "next_after_the_end": [3, "end", "end"],
    "loop_left_by_break": [],
    "pipeline_used_twice": [[8, 3, 16, 16]] * 2,
    "threads_of_torch": 1,
    "bytes_of_numba_stay_writable": True,
    "images_come_back": True,
    "other_fields_come_back": [69.0, [276] * 3],
    "nothing_is_compiled_again": [0, 0],
}


def run(folder: Path, *names: str) -> Iterator[dict]:
    """Yield what each program says. One that does not end is killed, and those after it run in another process."""
    names = list(names)
    while names:
        command = [sys.executable, ROOT / "tests" / "models" / "ffcv_mistakes.py", folder, *names]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1, env=environment,
            start_new_session=True,
        )
        with child, selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            try:
                while names and selector.select(LIMIT) and (line := child.stdout.readline()):
                    names.pop(0)
                    yield json.loads(line)
                if names:  # it hangs or has died
                    yield {"name": names.pop(0), "error": f"no answer within {LIMIT} s, exit code {child.poll()}"}
                    child.kill()
                else:
                    errors = child.communicate(timeout=LIMIT)[1]
                    yield {"name": "end", "value": [child.returncode, errors]}
            finally:
                child.kill()


@pytest.fixture(scope="module")
def here() -> None:
    if reason := fixes.missing():
        missing(f"FFCV ({reason})")


@pytest.fixture(scope="module")
def answers(here, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("ffcv")
    said = run(folder, *ENDS, *RETURNS, "more_workers_than_cores", "leaves_quietly")
    return {answer["name"]: answer for answer in said}


@pytest.mark.parametrize("name", ENDS)
def test_what_would_hang_ends_with_a_clear_error(answers: dict, name: str):
    assert re.search(ENDS[name], answers[name].get("error", "no error").split("\n\nIn the writer")[0], re.DOTALL)


@pytest.mark.parametrize("name", RETURNS)
def test_programs_get_what_they_should(answers: dict, name: str):
    assert answers[name].get("value", answers[name]) == RETURNS[name]


def test_more_workers_than_cores_warn_and_work(answers: dict):
    count, warning = answers["more_workers_than_cores"]["value"]
    assert count == 24
    assert warning.startswith("num_workers=1000 is more than the ")


def test_process_ends_quietly_in_the_middle_of_a_loop(answers: dict):
    assert answers["leaves_quietly"]["value"] is True
    assert answers["end"]["value"] == [0, ""]


def test_next_process_compiles_nothing(answers: dict, tmp_path: Path):
    assert next(run(tmp_path, "nothing_is_compiled_again"))["value"] == [0, 0]


def test_ranks_share_the_samples_and_the_compiled_code(answers: dict, tmp_path: Path):
    assert next(run(tmp_path, "good_file"))["value"]

    def shard(path: str) -> tuple:
        import torch.distributed as dist

        from lessons.ffcv_data_loading.ffcv import fixes

        fixes.apply_fixes()
        from ffcv import Loader
        from ffcv.fields.decoders import IntDecoder
        from ffcv.loader import OrderOption
        from ffcv.transforms import ToTensor
        from numba.core import event

        pipelines = {"image": None, "label": [IntDecoder(), ToTensor()]}
        options = {"num_workers": 1, "order": OrderOption.RANDOM, "distributed": True, "seed": 1}
        with event.install_recorder("numba:compile") as compiled:
            loader = Loader(path, 4, pipelines=pipelines, drop_last=False, **options)
            epochs = [[label for (batch,) in loader for label in batch.ravel().tolist()] for _ in range(2)]
        dist.barrier()
        return epochs, len(compiled.buffer)

    path = str(next(tmp_path.glob("good-*.beton")))
    launch(shard, path, world_size=3)
    by_rank, compiled = zip(*launch(shard, path, world_size=3), strict=True)
    for shares in zip(*by_rank, strict=True):
        assert sorted(sum(shares, [])) == list(range(24))
    assert by_rank[0][0] != by_rank[0][1]
    assert compiled == (0, 0, 0)


def test_fixes_are_made_once(here):
    code = (
        "from lessons.ffcv_data_loading.ffcv import fixes as f\n"
        "print([len(f.apply_fixes()), len(f.apply_fixes()), len(f.FIXES)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=True)
    first, second, known = json.loads(done.stdout)
    assert (first, second) == (known, 0)


def test_fix_is_left_out_where_its_line_is_not(here):
    code = (
        "import ffcv.writer as w; from lessons.ffcv_data_loading.ffcv import fixes as f\n"
        "def mended(self, *job): pass\n"
        "w.DatasetWriter._write_common = mended\n"
        "print('writer_that_dies' in f.apply_fixes(), w.DatasetWriter._write_common is mended)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch):
    """`missing` asked afresh, on a machine that is told to be another."""
    fixes.missing.cache_clear()
    yield monkeypatch
    fixes.missing.cache_clear()


def test_other_systems_are_told_that_ffcv_is_for_linux(ask):
    ask.setattr(sys, "platform", "darwin")
    assert fixes.missing() == "FFCV runs on Linux only."
    with pytest.raises(ModuleNotFoundError, match="Linux only"):
        fixes.apply_fixes()


@pytest.mark.parametrize(("version", "says"), [((3, 11, 9), "not installed"), ((3, 13, 1), "needs Python 3.11")])
def test_what_is_missing_comes_with_the_command(ask, version: tuple, says: str):
    ask.setattr(sys, "platform", "linux")
    ask.setattr(sys, "version_info", version)
    ask.setattr(fixes.importlib.util, "find_spec", lambda name: None)
    assert says in fixes.missing()
    assert "make ffcv" in fixes.missing()


def test_an_import_that_fails_is_quoted(ask):
    def fail() -> None:
        raise ImportError("libturbojpeg.so.0: cannot open shared object file")

    ask.setattr(sys, "platform", "linux")
    ask.setattr(sys, "version_info", (3, 11, 9))
    ask.setattr(fixes.importlib.util, "find_spec", lambda name: name)
    ask.setattr(fixes, "_import", fail)
    assert "libturbojpeg.so.0" in fixes.missing()
