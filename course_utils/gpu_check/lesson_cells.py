"""Run single cells of the lessons as they stand in ``sources/``, with what they need from the cells before them.

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
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

from ..authoring.rooms import texts
from ..programs import ROOT
from .setting import CheckError, Setting, Skip

__all__ = ["CELLS", "Cell", "statements"]

@dataclass(frozen=True)
class Cell:
    """A cell of a lesson, found by a text that stands in it and in no other.

    Attributes
    ----------
    text : str
    ranks : int
        The fewest with which it makes sense.
    after : tuple of str
        Texts of cells that must have run, though they make no name that it uses: they compile a program, say.
    """

    text: str
    ranks: int = 1
    after: tuple[str, ...] = ()


_COMPILED = 'c_programs.build("all_reduce.c", work / "all_reduce")'
_TRACER = 'c_programs.build("trace_nccl.c"'

#: Lesson -> its cells that do something else, or more, where there are GPUs.
CELLS: dict[str, tuple[Cell, ...]] = {
    "01": (
        Cell('torch.cuda.memory_stats()["segment.all.allocated"]'), Cell("copy_rates(copied).items()"),
        Cell("early = pinned[0].item()"), Cell("roof = measured_roof(chip, sides)"),
        Cell("seconds = time_messages(ping_pong, fitted)", 2),
    ),
    "02": (Cell("received = launch(hand_over, world_size=2)", 2),),
    "03": (
        Cell('done = c_programs.run(work / "all_reduce", mode)', after=(_COMPILED,)),
        Cell('real = c_programs.run(built / "program"', after=(_TRACER,)),
    ),
    "04": (Cell("launch(shared_statistics, torch.nn.SyncBatchNorm, world_size=world_size)"),),
    "05": (Cell("strong = [throughput(whole_batch // n, n) for n in counts]"),),
    "06": (Cell("here, there = ("), Cell("on the GPU after a step: {here[1]:,} bytes")),
    "07": (Cell('assert off == 0 or n < world_size or backend != "gloo"'),),
    "10": (Cell("found = on_ranks(train, one_by_one, [whole], gpt, sizes, text, pace=pace)", 2),),
}
_LEFT_OUT = ("course_utils.plots", "course_utils.widgets", "matplotlib", "IPython")
_OUTPUT = 40  # last lines of what a cell prints that the report keeps


def _source(number: str) -> tuple[str, list[tuple[int, ast.Module, str]]]:
    """The lesson's file, and its code cells: line of the beginning, tree, text. Cells with magics are left out."""
    path = next(path for name, path in texts(ROOT).items() if name.startswith(number))
    text, cells = path.read_text(encoding="utf-8"), []
    heads = [*re.finditer(r"^# %%(.*)$", text, re.MULTILINE)]
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        body = text[head.end() : following.start() if following else len(text)]
        if "[markdown]" not in head[1]:
            with contextlib.suppress(SyntaxError):
                before = text.count("\n", 0, head.end())
                cells.append((before, ast.parse("\n" * before + body, str(path)), body))
    return str(path), cells


def _made(node: ast.AST) -> Iterator[str]:
    """The names that a statement makes, also inside of conditions, but neither in functions nor by counting."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.For):
        for child in node.body:
            yield from _made(child)
    elif not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        for child in ast.iter_child_nodes(node):
            yield from _made(child)


def _used(node: ast.stmt) -> set[str]:
    """The names that a statement looks up in the module, in functions too: locals and parameters are none of them."""
    found, waiting = set(), [compile(ast.Module([node], []), "cell", "exec")]
    while waiting:
        code = waiting.pop()
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        found |= {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return found


def statements(number: str, wanted: Cell) -> tuple[str, list[ast.stmt], list[ast.stmt]]:
    """The lesson's file, the statements before the cell that it needs, and the cell itself.

    Raises
    ------
    ValueError
        If one of the texts does not stand in exactly one cell.
    """
    file, cells = _source(number)
    having = []
    for text in (wanted.text, *wanted.after):
        places = [i for i, (_, _, body) in enumerate(cells) if text in body]
        if len(places) != 1:
            raise ValueError(f"lesson {number} has {len(places)} cells with {text!r}")
        having += places
    owner = [i for i, (_, tree, _) in enumerate(cells[: having[0]]) for _ in tree.body]
    earlier = [statement for _, tree, _ in cells[: having[0]] for statement in tree.body]
    made = [set(_made(statement)) for statement in earlier]
    cell = cells[having[0]][1].body
    chosen = {i for i, place in enumerate(owner) if place in having[1:]}
    waiting = [(name, len(earlier)) for statement in cell for name in _used(statement)]
    waiting += [(name, i) for i in chosen for name in _used(earlier[i])]
    while waiting:
        name, before = waiting.pop()
        place = next((i for i in range(before - 1, -1, -1) if name in made[i]), None)
        if place is None or place in chosen:
            continue
        chosen.add(place)
        later = isinstance(earlier[place], ast.FunctionDef | ast.ClassDef)  # looks its names up when it is called
        waiting += [(used, len(earlier) if later else place) for used in _used(earlier[place])]
    return file, [earlier[i] for i in sorted(chosen)], cell


def _picture(*args: object, **kwargs: object) -> None:
    """In place of a figure."""


class _NoPictures:
    def __getattr__(self, name: str) -> Any:
        return _picture


def _execute(statement: ast.stmt, file: str, names: dict[str, Any]) -> None:
    if isinstance(statement, ast.ImportFrom):
        module = statement.module or ""
        for alias in statement.names:
            whole = f"{module}.{alias.name}"
            if any(f"{m}.".startswith(f"{out}.") for m in (module, whole) for out in _LEFT_OUT):
                made = _NoPictures() if whole in _LEFT_OUT else _picture
                names[alias.asname or alias.name] = made
            else:
                single = ast.ImportFrom(statement.module, [alias], statement.level)
                exec(compile(ast.Module([ast.copy_location(single, statement)], []), file, "exec"), names)
        return
    if isinstance(statement, ast.Import) and statement.names[0].name.split(".")[0] in _LEFT_OUT:
        names[statement.names[0].asname or statement.names[0].name.split(".")[0]] = _NoPictures()
        return
    exec(compile(ast.Module([statement], []), file, "exec"), names)


def _run_cell(number: str, wanted: Cell, setting: Setting) -> list[str]:
    """Run a cell with one rank for each GPU, and return the last lines that it prints."""
    file, before, cell = statements(number, wanted)
    linecache.checkcache(file)
    names: dict[str, Any] = {"__name__": "__main__"}  # so that functions go to ranks by value
    fixed = {"world_size": setting.ranks, "backend": setting.backend}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for statement in before:
            _execute(statement, file, names)
            names |= {name: value for name, value in fixed.items() if name in _made(statement)}
        printed.seek(0)
        printed.truncate()
        for statement in cell:
            _execute(statement, file, names)
    return printed.getvalue().splitlines()[-_OUTPUT:]


def _lesson(number: str, setting: Setting) -> dict[str, Any]:
    """Run all cells of a lesson's list; each is reported, also when another one fails."""
    facts, failed = {"cells": []}, []
    try:
        for cell in CELLS[number]:
            found: dict[str, Any] = {"cell": cell.text, "ranks": setting.ranks}
            if setting.ranks < cell.ranks:
                found["skipped"] = f"needs {cell.ranks} GPUs, there is {setting.ranks}"
            else:
                try:
                    found["printed"] = _run_cell(number, cell, setting)
                except ModuleNotFoundError as error:
                    if str(error.name).startswith("course_utils"):
                        raise
                    found["skipped"] = f"needs {error.name}, which this Python does not have"
                except Exception as error:
                    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                    found["failed"] = f"{type(error).__name__}: {' | '.join(lines[:5])[:600]}"
                    failed.append(f"{cell.text}: {found['failed']}")
            facts["cells"].append(found)
    finally:
        if "course_utils.ranks.launcher" in sys.modules:
            sys.modules["course_utils.ranks.launcher"].shutdown()
    if failed:
        raise CheckError(failed[0], facts)
    if all("skipped" in found for found in facts["cells"]):
        raise Skip("; ".join(dict.fromkeys(found["skipped"] for found in facts["cells"])))
    return facts


lesson_01, lesson_02, lesson_03, lesson_04, lesson_05, lesson_06, lesson_07, lesson_10 = (
    partial(_lesson, number) for number in CELLS
)
