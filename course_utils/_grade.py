"""Run the checks of one submitted exercise notebook, whatever it does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from ._notebooks import CLIENT

__all__ = ["grade_notebook"]


async def grade_notebook(path: Path, submission: str, original: Path, timeout: int, limit: int) -> dict[str, Any]:
    """Run a submission with the original's check cells and report which passed; see :func:`workshop.grade`."""
    checks = {cell.metadata.nbgrader.grade_id: cell for cell in _cells(original) if _is_check(cell)}
    passed: set[str] = set()
    try:
        note = await _run(_with_original_checks(path, original, checks), path, passed, timeout, limit)
    except Exception as error:  # not a notebook, for example: the row says so, the others go on
        note = f"{type(error).__name__}: {error}".splitlines()[0]
    failed = [name for name in checks if name not in passed]
    row = {"submission": submission, "notebook": original.stem, "passed": len(checks) - len(failed)}
    return row | {"total": len(checks), "failed": " ".join(failed), "note": note}


def _cells(path: Path) -> list:
    return nbformat.read(path, as_version=4).cells


def _is_check(cell) -> bool:
    return cell.cell_type == "code" and bool(cell.metadata.get("nbgrader", {}).get("grade"))


def _with_original_checks(path: Path, original: Path, checks: dict[str, Any]):
    """Return the submission with every check cell as in the original, missing ones at the end."""
    lines = [line for cell in _cells(original) for line in cell.source.splitlines()]
    imports = [line for line in lines if line.startswith("from course_utils.checks")]
    nb = nbformat.read(path, as_version=4)
    missing = dict(checks)
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if _is_check(cell):
            kept = missing.pop(cell.metadata.nbgrader.grade_id, None)
            cell.source = "\n".join([*imports, kept.source]) if kept else ""
    nb.cells += [cell | {"source": "\n".join([*imports, cell.source])} for cell in missing.values()]
    return nb


async def _run(nb, path: Path, passed: set[str], timeout: int, limit: int) -> str:
    """Run all cells, errors or not, and collect the checks that pass; end the kernel at the limit. Returns a note."""

    def executed(cell, cell_index: int, execute_reply: dict) -> None:
        if _is_check(cell) and execute_reply["content"]["status"] == "ok":
            passed.add(cell.metadata.nbgrader.grade_id)

    stopped = {"ename": "TimeoutError", "evalue": f"interrupted after {timeout} s", "traceback": []}
    client = NotebookClient(
        nb, timeout=timeout, interrupt_on_timeout=True, error_on_timeout=stopped, allow_errors=True,
        shutdown_kernel="immediate", on_cell_executed=executed,
        resources={"metadata": {"path": str(path.parent)}}, **CLIENT,
    )  # fmt: skip
    deadline = asyncio.timeout(limit)
    try:
        async with deadline:
            await client.async_execute()
    except (TimeoutError, DeadKernelError):  # nbclient takes a cancelled cell for a dead kernel
        return f"ended after {limit} s" if deadline.expired() else "its kernel died"
    return ""
