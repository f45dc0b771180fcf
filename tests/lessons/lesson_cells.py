"""What a lesson's text defines, for tests of it outside the notebook."""

from __future__ import annotations

import ast
from typing import Any

from conftest import ROOT

KEPT = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def definitions(number: str, **given: Any) -> dict:
    """What the first code cell and every import and definition of a lesson give, by name; no other line is run.

    `given` stands for what other lines of the lesson would have made.
    """
    from tools.author.notebooks import code_cells  # here, for ranks import this module too
    from tools.author.rooms import texts

    source = next(path for name, path in texts(ROOT).items() if name.startswith(f"{number}_"))
    names: dict = {"__name__": "__main__", **given}  # so that ranks get the definitions themselves
    for tags, code in code_cells(source):
        found = ast.parse(code).body
        if "parameters" not in tags:
            found = [node for node in found if isinstance(node, KEPT)]
        exec(compile(ast.Module(found, []), str(source), "exec"), names)
    return names
