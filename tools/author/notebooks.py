"""Notebooks as data: made from percent text, run, brought to one normal form, compared."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from traitlets.config import Config

from .pages import alternative_text
from .rooms import read

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
STUB = 'raise NotImplementedError("Replace this line with your answer, then run the check below.")'
CLIENT = {"kernel_name": "python3", "record_timing": False, "extra_arguments": ["--IPKernelApp.log_level=40"]}
CHECK_CELL = re.compile(r"^check\.(\w+)\(", re.MULTILINE)


class NotebookFailed(RuntimeError):
    """A notebook did not run to its end; the message names notebook, cell and error."""


def from_text(text: str) -> NotebookNode:
    """Convert jupytext percent text to a notebook without outputs; cell ids come from the content."""
    import jupytext

    nb = nbformat.v4.new_notebook(cells=jupytext.reads(text, fmt="py:percent").cells)
    nb.nbformat_minor = 5
    nb.metadata.kernelspec = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    nb.metadata.language_info = {"name": "python"}
    return with_ids(nb)


@cache
def code_cells(source: Path) -> list[tuple[list[str], str]]:
    """The code cells of a lesson's or an exercise's text: their tags, and the code."""
    cells = from_text(read(source)).cells
    return [(cell.metadata.get("tags", []), cell.source) for cell in cells if cell.cell_type == "code"]


def with_ids(nb: NotebookNode) -> NotebookNode:
    """Give each cell the id that its content makes."""
    seen: Counter[str] = Counter()
    for cell in nb.cells:
        for key in ("lines_to_next_cell", "lines_to_end_of_cell_marker"):  # jupytext's notes on the layout of the text
            cell.metadata.pop(key, None)
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] += 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    return nb


def mark_exercises(nb: NotebookNode) -> NotebookNode:
    """Add nbgrader's metadata: cells with solution markers are for writing, cells that call ``check.…`` are graded."""
    solutions = 0
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        solution, check = "### BEGIN SOLUTION" in cell.source, CHECK_CELL.search(cell.source)
        if not solution and not check:
            continue
        solutions += solution
        kind = {"schema_version": 3, "task": False, "solution": solution, "grade": not solution, "locked": not solution}
        if solution:
            cell.metadata.nbgrader = kind | {"grade_id": f"answer_{solutions}"}
        else:
            cell.metadata.nbgrader = kind | {"grade_id": f"check_{check[1]}", "points": 1}
    return nb


def strip(nb: NotebookNode) -> NotebookNode:
    """Return the learner's copy of an exercise notebook: nbgrader's preprocessors take the solutions out."""
    from nbgrader.preprocessors import ClearHiddenTests, ClearSolutions

    nb = nbformat.from_dict(nb)
    for step in (ClearSolutions(code_stub={"python": STUB}), ClearHiddenTests()):
        nb, _ = step.preprocess(nb, {})
    return with_ids(nb)


def local_sockets(folder: str | os.PathLike) -> Config:
    """Configuration of one kernel whose sockets are files in ``folder``, where the system has such sockets.

    It also waits a minute, in place of four seconds, for what a cell has said when the machine is busy.

    Jupyter chooses ports that are free, and the kernel opens them a second later: by then a rank may have taken one.
    """
    config = Config(NotebookClient={"iopub_timeout": 60})
    if os.name != "nt":
        config.KernelManager.update(transport="ipc", connection_file=str(Path(folder, "kernel.json")))
    return config


async def execute(nb: NotebookNode, path: Path, timeout: int = 300) -> NotebookNode:
    """Run a notebook in place, in the folder of ``path``, with a fresh kernel; ``timeout`` in seconds a cell.

    Raises
    ------
    NotebookFailed
        Names the cell and its error.
    """
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nb.metadata.pop("widgets", None)
    os.environ["COURSE_STATUS"] = "0"  # a sign of life from ranks does not belong into stored outputs
    try:
        with tempfile.TemporaryDirectory() as folder:
            resources, config = {"metadata": {"path": str(path.parent)}}, local_sockets(folder)
            await NotebookClient(nb, timeout=timeout, resources=resources, config=config, **CLIENT).async_execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        started = [(n, cell) for n, cell in enumerate(nb.cells, 1) if cell.get("execution_count")]
        number, cell = started[-1] if started else (0, nbformat.v4.new_code_cell())
        what = f"{error.ename}: {error.evalue}" if isinstance(error, CellExecutionError) else str(error).splitlines()[0]
        code = "\n".join(f"    {line}" for line in cell.source.splitlines())
        raise NotebookFailed(f"{path}: cell {number} (In [{cell.execution_count}]) ends in {what}\n{code}") from None
    return nb


def unfinished(nb: NotebookNode) -> str:
    """Say why a notebook's outputs are not those of a run from top to bottom; empty if they are."""
    code = [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]
    if not all(cell.execution_count for cell in code):
        return "not executed from top to bottom"
    failed = any(output.output_type == "error" for cell in code for output in cell.outputs)
    return "a cell ends in an error" if failed else ""


def take_outputs(nb: NotebookNode, built: NotebookNode) -> bool:
    """Give ``nb`` the outputs of ``built`` if both have the same code, run without an error; return whether they do."""
    cells, others = ([cell for cell in each.cells if cell.cell_type == "code"] for each in (nb, built))
    ours, theirs = ([(cell.source, cell.metadata.get("tags")) for cell in each] for each in (cells, others))
    if ours != theirs or unfinished(built):
        return False
    for cell, other in zip(cells, others, strict=True):
        cell.outputs, cell.execution_count = other.outputs, other.execution_count
    return True


def normalise(nb: NotebookNode) -> NotebookNode:
    """Return the notebook in the one form that is committed: nothing in it depends on when or where it ran."""
    nb = nbformat.from_dict(nb)
    nb.metadata = {key: nb.metadata[key] for key in ("kernelspec", "language_info")}
    nb.metadata.language_info = {"name": "python"}
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    for cell in nb.cells:
        for key in ("collapsed", "execution", "papermill", "scrolled", "trusted"):
            cell.metadata.pop(key, None)
    ran = any(cell.execution_count for cell in code)
    for count, cell in enumerate((cell for cell in code if cell.source.strip()), 1):
        cell.execution_count = count if ran else None
        cell.outputs = list(_merged(cell.outputs))
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    for place, cell in enumerate(nb.cells):
        for output in cell.get("outputs", []):
            _stored(output, alternative_text(below(nb.cells, place)))
    return nb


def below(cells: list[NotebookNode], place: int) -> NotebookNode | None:
    """The cell below another, past folded code."""
    shown = (cell for cell in cells[place + 1 :] if not cell.metadata.get("jupyter", {}).get("source_hidden"))
    return next(shown, None)


def _merged(outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    """Join neighbouring stream chunks, stdout before stderr; what stands between rich outputs stays there."""
    streams: dict[str, NotebookNode] = {}
    for output in [*outputs, None]:
        if output is not None and output.output_type == "stream":
            held = streams.setdefault(output.name, nbformat.v4.new_output("stream", name=output.name, text=""))
            held.text += output.text
            continue
        yield from (streams.pop(name) for name in sorted(streams, reverse=True))
        if output is not None:
            yield output


def _stored(output: NotebookNode, words: str) -> None:
    """Keep of an output what a reader without a kernel can see: a picture with its description, no dead controls."""
    output.pop("transient", None)
    data = output.get("data", {})
    data.pop(WIDGET_VIEW, None)
    if "image/png" in data:
        shape = output.metadata.get("image/png", {})
        output.metadata["image/png"] = {**shape, "alt": words}


def differences(built: NotebookNode, text: NotebookNode) -> str:
    """Say how a built notebook differs from what its text gives, in one line; empty if it does not."""
    if len(built.cells) != len(text.cells):
        return f"{len(built.cells)} cells, the text has {len(text.cells)}"
    for number, (ours, theirs) in enumerate(zip(built.cells, text.cells, strict=True), 1):
        if any(ours.get(key) != theirs.get(key) for key in ("cell_type", "source", "metadata", "id")):
            return f"cell {number} is not what the text says"
    return ""


def leaks(nb: NotebookNode) -> list[str]:
    """Find what belongs to one machine in sources and outputs: paths, the host's name, addresses in memory."""
    places = r"/(?:root|work|home|tmp|usr/local|opt|private|var/folders|Users)/[\w./-]+|\b0x[0-9a-f]{8,}\b"
    names = [re.escape(name) for name in (platform.node(), os.environ.get("USER", "")) if len(name) > 4]
    pattern = re.compile("|".join([places, *(rf"\b{name}\b" for name in names)]))
    found = set()
    for number, cell in enumerate(nb.cells, 1):
        outputs = cell.get("outputs", [])
        data = [str(value) for o in outputs for mime, value in o.get("data", {}).items() if "image" not in mime]
        texts = [cell.source, *(o.get("text", "") for o in outputs), *data]
        found |= {f"cell {number}: {match[0]}" for text in texts for match in pattern.finditer(text)}
    return sorted(found)
