"""What a lesson's text defines, for tests of it outside the notebook."""

from __future__ import annotations

import ast
import re
from typing import Any

from conftest import ROOT


def definitions(number: str, **given: Any) -> dict:
    """What the first code cell and every definition of a lesson give, by name; no other line is run.

    `given` stands for what other lines of the lesson would have made.
    """
    (source,) = (path for path in (ROOT / "sources").glob(f"{number}_*.py") if not path.stem.endswith("_exercises"))
    parts = re.split(r"^# %%(.*)$", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
    names: dict = {"__name__": "__main__", **given}  # so that ranks get the definitions themselves
    for head, code in zip(parts[1::2], parts[2::2], strict=True):
        if "[markdown]" in head:
            continue
        found = ast.parse(code.strip()).body
        if "parameters" not in head:
            found = [node for node in found if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        exec(compile(ast.Module(found, []), str(source), "exec"), names)
    return names
