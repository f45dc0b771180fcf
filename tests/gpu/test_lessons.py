"""Cells of lessons that do something else, or more, where there are GPUs; and whole lessons.

A cell's needs are found by name: the last statement before it that makes a name that it uses, and so on. Figures and
widgets are left out, because they need packages that a machine with GPUs may lack.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import io
import linecache
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

import pytest

from .kit import ROOT, Setting

#: Lesson -> texts that each stand in one cell only; the fewest ranks of the cell; texts of cells that must run before.
CELLS: dict[str, list[tuple[str, int, str]]] = {
    "gpu_interconnects": [
        ('torch.cuda.memory_stats()["segment.all.allocated"]', 1, ""), ("copy_rates(copied).items()", 1, ""),
        ("early = pinned[0].item()", 1, ""), ("roof = measured_roof(chip, sides)", 1, ""),
        ("seconds = time_messages(ping_pong, fitted)", 2, ""),
    ],
    "collectives": [("received = launch(hand_over, world_size=2)", 2, "")],
    "nccl": [
        (
            'done = c_programs.run(work / "all_reduce", mode)', 1,
            'c_programs.build("all_reduce.c", work / "all_reduce")',
        ),
        ('real = c_programs.run(built / "program"', 1, 'c_programs.build("trace_nccl.c"'),
    ],
    "ddp": [("launch(shared_statistics, torch.nn.SyncBatchNorm, world_size=world_size)", 1, "")],
    "scaling_efficiency": [("strong = [throughput(whole_batch // n, n) for n in counts]", 1, "")],
    "zero": [("here, there = (", 1, ""), ("on the GPU after a step: {here[1]:,} bytes", 1, "")],
    "fsdp": [("assert sharded.equal_states(loaded, saved) and off < 1e-5", 1, "")],
    "pipeline_parallel": [
        ("found = on_ranks(train, one_by_one, [whole], gpt, sizes, text, pace=pace)", 2, ""),
    ],
}
PICTURES = re.compile(r"(matplotlib|IPython|course_utils\.draw|lessons\.\w+\.(figures|explorer))(\.|$)")
NUMBERS = ("01", "02", "03", "04", "05", "06", "07", "10")  # of these lessons, in the names of the checks
LINES = 40  # last ones of what a cell prints that the report keeps


class NoPictures(ModuleType):
    """In place of a module of figures: whatever is called returns nothing."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, cls, is_package=True) if PICTURES.match(name) else None

    @classmethod
    def create_module(cls, spec: ModuleSpec) -> ModuleType:
        return cls(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


def _made(node: ast.AST) -> Iterator[str]:
    """The names that a statement makes, also inside of conditions, but neither in functions nor by counting."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        for child in node.body if isinstance(node, ast.For) else ast.iter_child_nodes(node):
            yield from _made(child)


def _used(node: ast.stmt) -> set[str]:
    """The names that a statement looks up in the module, in functions too: locals and parameters are none of them."""
    found, waiting = set(), [compile(ast.Module([node], []), "cell", "exec")]
    while waiting:
        code = waiting.pop()
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        found |= {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return found


def _cells(lesson: str) -> tuple[str, list[tuple[str, list[ast.stmt]]]]:
    """The lesson's file, and text and statements of its code cells; those with magics are left out."""
    path = ROOT / "lessons" / lesson / "lesson.py"
    text, cells = path.read_text(encoding="utf-8"), []
    for cell in re.finditer(r"^# %%(?! \[markdown\])[^\n]*\n(.*?)(?=^# %%|\Z)", text, re.MULTILINE | re.DOTALL):
        with contextlib.suppress(SyntaxError):
            above = text.count("\n", 0, cell.start(1))
            cells.append((cell[1], ast.parse("\n" * above + cell[1], str(path)).body))
    return str(path), cells


def statements(lesson: str, wanted: str, first: str = "") -> tuple[str, list[ast.stmt], list[ast.stmt]]:
    """The lesson's file, the statements before a cell that it needs, and the cell itself."""
    file, cells = _cells(lesson)
    having = [i for text in (wanted, first) if text for i, (body, _) in enumerate(cells) if text in body]
    assert len(having) == 1 + bool(first), f"lesson {lesson}: {wanted!r} or {first!r} does not stand in just one cell"
    place, cell = having[0], cells[having[0]][1]
    earlier = [(i, statement) for i, (_, body) in enumerate(cells[:place]) for statement in body]
    made = [set(_made(statement)) for _, statement in earlier]
    chosen = {at for at, (i, _) in enumerate(earlier) if i in having[1:]}
    waiting = [(name, len(earlier)) for statement in cell for name in _used(statement)]
    waiting += [(name, at) for at in chosen for name in _used(earlier[at][1])]
    while waiting:
        name, before = waiting.pop()
        at = next((at for at in range(before - 1, -1, -1) if name in made[at]), None)
        if at is not None and at not in chosen:
            chosen.add(at)
            later = isinstance(earlier[at][1], ast.FunctionDef | ast.ClassDef)  # looks names up when it is called
            waiting += [(used, len(earlier) if later else at) for used in _used(earlier[at][1])]
    return file, [earlier[at][1] for at in sorted(chosen)], cell


def _run_cell(lesson: str, wanted: str, first: str, setting: Setting) -> list[str]:
    """Run a cell with one rank for each GPU, and return the last lines that it prints."""
    file, before, cell = statements(lesson, wanted, first)
    linecache.checkcache(file)
    names: dict[str, Any] = {"__name__": "__main__"}  # so that functions go to ranks by value
    fixed = {"world_size": setting.ranks, "backend": setting.backend}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for statement in before:
            exec(compile(ast.Module([statement], []), file, "exec"), names)
            names |= {name: value for name, value in fixed.items() if name in _made(statement)}
        printed.seek(0)
        printed.truncate()
        exec(compile(ast.Module(cell, []), file, "exec"), names)
    return printed.getvalue().splitlines()[-LINES:]


@pytest.mark.limit(60)
@pytest.mark.parametrize("lesson", CELLS, ids=NUMBERS)
def test_cells(lesson: str, setting: Setting, facts: dict):
    """The cells of a lesson that do something else, or something more, where there are GPUs."""
    for package in ("cloudpickle", "numpy", "psutil"):
        pytest.importorskip(package)
    sys.meta_path.insert(0, NoPictures)  # this process runs nothing else
    facts["cells"] = []
    try:
        for wanted, ranks, first in CELLS[lesson]:
            found: dict[str, Any] = {"cell": wanted, "ranks": setting.ranks}
            facts["cells"].append(found)
            if setting.ranks < ranks:
                found["skipped"] = f"needs {ranks} GPUs, there is {setting.ranks}"
                continue
            try:
                found["printed"] = _run_cell(lesson, wanted, first, setting)
            except ModuleNotFoundError as error:
                found["skipped"] = f"needs {error.name}, which this Python does not have"
            except Exception as error:
                found["failed"] = f"{type(error).__name__}: {str(error)[:600]}"
    finally:
        if "course_utils.ranks.launcher" in sys.modules:
            sys.modules["course_utils.ranks.launcher"].shutdown()
    failed = [f"{found['cell']}: {found['failed']}" for found in facts["cells"] if "failed" in found]
    assert not failed, failed[0]
    if all("skipped" in found for found in facts["cells"]):
        pytest.skip(facts["cells"][0]["skipped"])


@pytest.mark.lessons
@pytest.mark.limit(600)
@pytest.mark.parametrize("lesson", sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")))
def test_lesson(lesson: str, setting: Setting, facts: dict):
    """A whole lesson, with as many ranks on NCCL as there are GPUs for."""
    setting.need_gpu("on the CPU the tests of the course run it")
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        pytest.skip("needs the course's own environment (make dev): this Python cannot run notebooks")
    command = [sys.executable, "-m", "course_utils", "execute", f"notebooks/{lesson}.ipynb"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, (done.stdout + done.stderr)[-600:]
