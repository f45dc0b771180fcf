"""Controls of the explorers, all alike: the label is whole, and a change counts once it is finished.

Text and numbers count when Enter is pressed or the field is left, sliders when they are let go; Tab goes from one to
the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ipywidgets as widgets


def view(widget: widgets.Widget) -> dict[str, dict[str, Any]]:
    """What a notebook needs to show a widget; ipywidgets 7 and 8 have no method for it in common."""
    shown = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": shown}


def _control(kind: type, label: str, width: int, **given: Any) -> Any:
    """Give the label its room, at least that of short ones so that rows align, and the control `width` pixels."""
    room = max(80, 8 * len(label))
    look = {"layout": {"width": f"{room + width}px"}, "style": {"description_width": f"{room}px"}}
    finished = {"continuous_update": False} if hasattr(kind, "continuous_update") else {}
    return kind(description=label, **given, **finished, **look)


def choice(label: str, options: Iterable[Any], value: Any = None, width: int = 200) -> widgets.Dropdown:
    """One of some options, each a value or a pair of text and value; without `value` the first."""
    start = {} if value is None else {"value": value}
    return _control(widgets.Dropdown, label, width, options=list(options), **start)


def slider(label: str, options: Iterable[Any], value: Any) -> widgets.SelectionSlider:
    """One of some options in a row, each a value or a pair of text and value."""
    return _control(widgets.SelectionSlider, label, 200, options=list(options), value=value)


def steps(label: str, value: int, low: int, high: int, width: int = 200) -> widgets.IntSlider:
    """A whole number between two others."""
    return _control(widgets.IntSlider, label, width, value=value, min=low, max=high)


def decimal(label: str, value: float, low: float, high: float, step: float | None = None) -> Any:
    """A number between two others, as a field, or with `step` as a slider."""
    given = {"value": value, "min": low, "max": high}
    if step is None:
        return _control(widgets.BoundedFloatText, label, 100, **given)
    return _control(widgets.FloatSlider, label, 200, **given, step=step)


def integer(label: str, value: int) -> widgets.IntText:
    """Any whole number: which ones can be is for the explorer to say."""
    return _control(widgets.IntText, label, 90, value=value)


def text(label: str, value: str) -> widgets.Text:
    """A line of text."""
    return _control(widgets.Text, label, 200, value=value)


def checkbox(label: str) -> widgets.Checkbox:
    """Yes or no."""
    return widgets.Checkbox(description=label, indent=False, layout={"width": f"{8 * len(label) + 40}px"})
