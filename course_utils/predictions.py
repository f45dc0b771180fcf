"""Predictions that a reader commits to before a cell is run: a field for a number, or choices; and how far off it was.

In the learner's copy of the course the answers are kept, in ``work/predictions.json``; elsewhere while the
kernel lives. Whoever answers nothing loses nothing: every cell runs all the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any

__all__ = ["Prediction", "buttons", "keep", "kept", "learners_copy", "number", "predict", "predictions"]

_COPY = ".course.json"  # in the folder of a learner's copy
_FILE = "predictions.json"
_made: dict[str, Prediction] = {}  # in this notebook, in order


class Prediction:
    """What a reader expects; ``compare`` says what it is.

    Attributes
    ----------
    said : float, str or None
        The answer, or None as long as there is none.
    """

    def __init__(self, about: str, choices: Sequence[str], unit: str):
        self.about, self.choices, self.unit = about, list(choices), unit
        self.said: float | str | None = kept().get(about, {}).get("said")
        self.result: float | str | None = None

    def _ipython_display_(self) -> None:
        from IPython.display import display

        from .draw.controls import view

        words = f"Your prediction: {self._asked()}."  # for a reader without a kernel
        display(view(self.field()) | {"text/plain": words}, raw=True)

    def _asked(self) -> str:
        """What is asked for, in words."""
        of = f": {', '.join(self.choices[:-1])} or {self.choices[-1]}" if self.choices else ""
        return f"{self.about}{f', in {self.unit}' if self.unit else ''}{of}"

    def field(self) -> Any:
        """A widget that takes the answer: choices, or a field for a number."""
        import ipywidgets as widgets

        if self.choices:
            known = self.said if self.said in self.choices else None
            entry: Any = buttons(self.choices, known)
        else:
            known = "" if self.said is None else f"{self.said:g}"
            entry = widgets.Text(value=known, placeholder="a number", continuous_update=False)
        label = widgets.Label(f"Your prediction: {self.about}{f', in {self.unit}' if self.unit else ''}")
        told = widgets.Label("")

        def changed(change: dict[str, Any]) -> None:
            told.value = self.say(change["new"])

        entry.observe(changed, "value")
        return widgets.VBox([label, widgets.HBox([entry, told])])

    def say(self, value: Any) -> str:
        """Take an answer; returns what to tell the reader."""
        if not self.choices:
            if (value := number(text := str(value))) is None:
                return text.strip() and "Please enter a number, such as 12.5."
        self.said = value
        self._keep()
        return "noted"

    def compare(self, result: float | str) -> None:
        """Print what it is, and what the reader said."""
        self.result = float(result) if isinstance(result, Real) else result
        self._keep()
        print(self.gap())

    def gap(self) -> str:
        """One sentence: what it is, what was said, and how far apart they are."""
        unit = f" {self.unit}" if self.unit else ""
        if isinstance(self.result, str):
            fits = "as you said" if self.said == self.result else f"you said {self.said}"
            return f"{self.about}: {self.result}{'' if self.said is None else f' ({fits})'}."
        text = f"{self.about}: {self.result:.4g}{unit}"
        if not isinstance(self.said, float):
            return f"{text}."
        if self.result and self.said and self.said > 0 < self.result:
            times = max(self.said / self.result, self.result / self.said)
            way = "too much" if self.said > self.result else "too little"
            far = "that is close" if times < 1.1 else f"{times:.3g} times {way}"
        else:
            far = "that is it" if self.said == self.result else f"off by {abs(self.said - self.result):.4g}{unit}"
        return f"{text}; you said {self.said:g}{unit}, {far}."

    def _keep(self) -> None:
        from .classroom import tell

        if self.said is not None:
            tell(question=self.about, said=self.said, result=self.result)
            keep(self.about, {"said": self.said, "is": self.result, "unit": self.unit})


def buttons(choices: Sequence[str], chosen: str | None = None) -> Any:
    """A button for each choice. Tab and the space bar reach all; JupyterLab keeps the arrow keys of radio buttons."""
    import ipywidgets as widgets

    return widgets.ToggleButtons(options=choices, value=chosen, style={"button_width": "max-content"})


def number(text: str) -> float | None:
    """What somebody has typed as a number: blanks and commas between digits are left out; None for anything else."""
    try:
        return float(text.replace(" ", "").replace(",", ""))
    except ValueError:
        return None


def learners_copy() -> Path | None:
    """The folder of the learner's copy of the course in which the notebook runs, if it runs in one."""
    return next((folder for folder in (Path.cwd(), Path.cwd().parent) if (folder / _COPY).exists()), None)


def keep(about: str, answer: dict[str, Any]) -> None:
    """Keep an answer: in a learner's copy of the course, and nowhere else."""
    if copy := learners_copy():
        (copy / _FILE).write_text(json.dumps(kept() | {about: answer}, indent=1), encoding="utf-8")


def kept() -> dict[str, dict]:
    """The answers that are kept, by what they are about."""
    file = (learners_copy() or Path()) / _FILE
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() and learners_copy() else {}
    except ValueError:  # written by half
        return {}


def predict(about: str, choices: Sequence[str] = (), *, unit: str = "") -> Prediction:
    """Ask for a prediction, in a field below the cell: one of ``choices``, or without them a number in ``unit``.

    ``about`` names what is asked for in a few words, in this notebook and in the list at its end.

    Examples
    --------
    >>> sent = predict("bytes that each rank sends", unit="MB")
    >>> sent.compare(1.5)
    bytes that each rank sends: 1.5 MB.
    """
    _made[about] = made = Prediction(about, choices, unit)
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython():
        made._ipython_display_()
    return made


def predictions() -> None:
    """Print how the predictions of this notebook came out; in a class, ask how the lesson was."""
    from .classroom import survey

    told = [made.gap() for made in _made.values() if made.said is not None and made.result is not None]
    print("\n".join(told) or "You have committed to no prediction in this notebook.")
    survey()
