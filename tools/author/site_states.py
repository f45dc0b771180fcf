"""Widgets on the site: some of their states are drawn when it is built; ``docs/site/_static/site.js`` shows them."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import importlib
import json
import re
import shutil
from pathlib import Path

import nbformat
from nbformat import NotebookNode

#: Widgets, with the control that moves on the site, and its values where it has no options.
MOVES = {
    "topology_explorer": "machine", "collective_stepper": "step", "algorithm_chooser": "size",
    "cost_calculator": "gpus", "memory_calculator": "stage", "schedule_explorer": "name",
    "context_explorer": "method", "mesh_explorer": "order", "bits_explorer": "number",
}
VALUES = {"bits_explorer": ["1", "0.1", "3.14159", "65504", "70000", "1e-8"]}
MOST = 4  # states of a widget, and the one that it opens with
BOX = (
    '<div class="states" data-name="{name}" data-label="{label}" data-at="{at}" data-states="{states}">'
    '<div class="told">{told}</div><p>On this page <em>{label}</em> can be changed. To use all controls, run the cell '
    "in JupyterLab.</p></div>"
)


def show_states(nb: NotebookNode, root: Path, folder: Path) -> None:
    """Draw states of the widgets of a notebook into ``folder``; their cells show one, and words about it."""
    from course_utils.draw.explorer import TO_USE

    folder.mkdir(exist_ok=True)
    for cell in nb.cells:
        for output in [*cell.get("outputs", [])]:
            if output.get("data", {}).get("text/plain") == TO_USE:
                name = next(name for name in MOVES if f"{name}(" in cell.source)
                drawn = _kept(root) / name
                if not drawn.exists():
                    _draw(name, root, drawn.with_suffix(".part"))
                    drawn.with_suffix(".part").replace(drawn)
                box = json.loads((drawn / "box.json").read_text(encoding="utf-8"))
                for picture in drawn.glob("*.png"):
                    shutil.copyfile(picture, folder / f"{name}-{picture.name}")
                output.data["image/png"] = base64.b64encode((drawn / f"{box['at']}.png").read_bytes()).decode()
                given = {**box, "states": html.escape(json.dumps(box["states"])), "told": box["states"][box["at"]][1]}
                cell.outputs.append(nbformat.v4.new_output("display_data", data={"text/html": BOX.format(**given)}))


@functools.cache
def _kept(root: Path) -> Path:
    """The folder of states that were drawn by the code as it stands now; those of older code are removed."""
    code = {*root.glob("course_utils/**/*.py"), *root.glob("lessons/**/*.py")} - {*root.glob("lessons/*/lesson.py")}
    files = [*sorted(code), root / "pyproject.toml", Path(__file__)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files))
    folder = root / "build" / "widgets" / digest.hexdigest()[:16]
    for other in {*folder.parent.glob("*")} - {folder}:
        shutil.rmtree(other, ignore_errors=True)
    return folder


def _draw(name: str, root: Path, folder: Path) -> None:
    """Write the pictures of a widget's states to ``folder``, and what its box says: ``box.json``."""
    module = next(path for path in root.glob("lessons/*/*.py") if f"\ndef {name}(" in path.read_text(encoding="utf-8"))
    widget = getattr(importlib.import_module(f"lessons.{module.parent.name}.{module.stem}"), name)()
    control = widget.controls[MOVES[name]]
    options = [each[1] if isinstance(each, tuple) else each for each in getattr(control, "options", ())]
    options = VALUES.get(name) or options or [*range(control.min, control.max + 1)]
    few = options[:: -(-len(options) // MOST)]
    values = [each for each in options if each in few or each == control.value]
    at = values.index(control.value) if control.value in values else 0
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    states = []
    for value in values:
        control.value = value
        words = re.sub(r"<br>", "<br/>", widget.status.value).replace("&nbsp;", "&#160;")  # as an ePub wants it
        (folder / f"{len(states)}.png").write_bytes(widget.picture.value)
        states.append((str(getattr(control, "label", value)), words))
    box = {"name": name, "label": control.description, "at": at, "states": states}
    (folder / "box.json").write_text(json.dumps(box), encoding="utf-8")
