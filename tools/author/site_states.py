"""Widgets on the site: some of their states are drawn when it is built; ``docs/site/_static/site.js`` shows them."""

from __future__ import annotations

import base64
import html
import importlib
import json
import re
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
MOST = 6  # states of a widget
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
                picture, box = _states(cell.source, root, folder)
                output.data["image/png"] = base64.b64encode(picture).decode()
                cell.outputs.append(nbformat.v4.new_output("display_data", data={"text/html": box}))


def _states(code: str, root: Path, folder: Path) -> tuple[bytes, str]:
    """Return the picture of the state that a widget opens with, and the HTML below it, which knows all states."""
    name = next(name for name in MOVES if f"{name}(" in code)
    module = next(path for path in root.glob("lessons/*/*.py") if f"\ndef {name}(" in path.read_text(encoding="utf-8"))
    widget = getattr(importlib.import_module(f"lessons.{module.parent.name}.{module.stem}"), name)()
    control = widget.controls[MOVES[name]]
    options = [each[1] if isinstance(each, tuple) else each for each in getattr(control, "options", ())]
    options = VALUES.get(name) or options or [*range(control.min, control.max + 1)]
    few = options[:: -(-len(options) // MOST)]
    values = [each for each in options if each in few or each == control.value]
    at = values.index(control.value) if control.value in values else 0
    states, pictures = [], []
    for value in values:
        control.value = value
        words = re.sub(r"<br>", "<br/>", widget.status.value).replace("&nbsp;", "&#160;")  # as an ePub wants it
        states.append((str(getattr(control, "label", value)), words))
        pictures.append(widget.picture.value)
        (folder / f"{name}-{len(states) - 1}.png").write_bytes(widget.picture.value)
    given = {"name": name, "label": control.description, "at": at, "states": html.escape(json.dumps(states))}
    return pictures[at], BOX.format(told=states[at][1], **given)
