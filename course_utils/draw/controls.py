"""Controls of the explorers, all alike: the label is whole, and a change counts once it is finished.

Text and numbers count when Enter is pressed or the field is left, sliders when they are let go; Tab goes from one to
the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ipywidgets as widgets

__all__ = ["checkbox", "choice", "decimal", "integer", "slider", "steps", "text"]


def _look(label: str, width: int) -> dict[str, dict[str, str]]:
    """Give the label its room, at least that of short ones so that rows align, and the control `width` pixels."""
    room = max(80, 8 * len(label))
    return {"layout": {"width": f"{room + width}px"}, "style": {"description_width": f"{room}px"}}


def choice(label: str, options: Iterable[Any], value: Any = None, width: int = 200) -> widgets.Dropdown:
    """One of some options, each a value or a pair of text and value; without `value` the first."""
    options = list(options)
    start = {} if value is None else {"value": value}
    return widgets.Dropdown(options=options, description=label, **start, **_look(label, width))


def slider(label: str, options: Iterable[Any], value: Any, width: int = 200) -> widgets.SelectionSlider:
    """One of some options in a row, each a value or a pair of text and value."""
    return widgets.SelectionSlider(
        options=list(options), value=value, description=label, continuous_update=False, **_look(label, width)
    )


def steps(label: str, value: int, low: int, high: int, width: int = 200) -> widgets.IntSlider:
    """A whole number between two others."""
    return widgets.IntSlider(value, low, high, description=label, continuous_update=False, **_look(label, width))


def decimal(label: str, value: float, low: float, high: float, step: float | None = None, width: int = 100) -> Any:
    """A number between two others, as a field, or with `step` as a slider."""
    given = {"value": value, "min": low, "max": high, "description": label, "continuous_update": False}
    if step is None:
        return widgets.BoundedFloatText(**given, **_look(label, width))
    return widgets.FloatSlider(**given, step=step, **_look(label, width + 100))


def integer(label: str, value: int, width: int = 90) -> widgets.IntText:
    """Any whole number: which ones can be is for the explorer to say."""
    return widgets.IntText(value=value, description=label, continuous_update=False, **_look(label, width))


def text(label: str, value: str, width: int = 200) -> widgets.Text:
    """A line of text."""
    return widgets.Text(value, description=label, continuous_update=False, **_look(label, width))


def checkbox(label: str, value: bool = False) -> widgets.Checkbox:
    """Yes or no."""
    return widgets.Checkbox(value=value, description=label, indent=False, layout={"width": f"{8 * len(label) + 40}px"})
