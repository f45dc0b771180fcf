"""Write a number; see the bits that each floating-point format of deep learning keeps of it, and what is lost."""

from __future__ import annotations

import html
import math
from fractions import Fraction

import ipywidgets as widgets
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_utils.draw.controls import text
from course_utils.draw.explorer import Explorer
from course_utils.draw.style import FAINT, INK, new_figure, readable, tint

from .number_formats import FORMATS, Format, Stored, read_number, store

_EXAMPLES = ("0.1", "1/3", "1+2^-10", "1+2^-8", "1000.5", "65504", "70000", "3e38", "1e-5", "1e-8", "-0", "inf", "nan")
_COLORS = {"sign": "#D55E00", "exponent": "#0072B2", "fraction": "#00805D"}
_NOTE = (
    "fp32 is rounded from the number, the others from fp32, as a cast in torch does: to the nearest, ties to even. "
    "tf32 is no dtype: it is fp32 without the last 13 bits (dotted), here with ties away from zero, as PTX's "
    "cvt.rna.tf32.f32 rounds."
)


def _formula(stored: Stored, form: Format) -> str:
    """Return how the value follows from the bits, for mathtext."""
    if not math.isfinite(stored.value) or not stored.value:
        return "exponent bits all 0" if not stored.value else ""
    exponent = int(stored.bits[1 : 1 + form.exponent], 2)
    power = max(exponent, 1) - form.bias
    return rf"${stored.value / 2.0**power:.9g} \times 2^{{{power}}}$"


def _draw_row(ax: Axes, y: float, form: Format, stored: Stored) -> None:
    """Draw the bits of one format with the border of exponent and fraction at x = 0."""
    kinds = ["sign"] + ["exponent"] * form.exponent + ["fraction"] * form.fraction
    for index, (bit, kind) in enumerate(zip(stored.bits, kinds, strict=True)):
        x = index - 1 - form.exponent + {"sign": -0.6, "exponent": -0.3, "fraction": 0}[kind]
        color = _COLORS[kind]
        face = color if bit == "1" else tint(tint(color))
        ax.add_patch(
            Rectangle((x + 0.06, y - 0.4), 0.88, 0.8, facecolor=face, edgecolor=color, linewidth=0.8, snap=False)
        )
        ax.text(x + 0.5, y - 0.02, bit, ha="center", va="center", color="white" if bit == "1" else INK,
                fontweight="bold" if bit == "1" else "normal", family="monospace")
    if form.dtype is None:
        for x in range(form.fraction, 23):
            ax.add_patch(
                Rectangle((x + 0.06, y - 0.4), 0.88, 0.8, fill=False, edgecolor=FAINT, linestyle=":", snap=False)
            )
    ax.text(-13.6, y, form.name, va="center", fontweight="bold", fontsize=11)
    note = _formula(stored, form)
    ax.text(23.8, y - 0.22, f"{stored.value:.11g}", va="center", fontweight="bold")
    ax.text(34.0, y - 0.22, note, va="center", color="#555555")
    ax.text(23.8, y + 0.24, stored.verdict, va="center", fontsize=8.5, fontweight="bold" if stored.lost else "normal",
            color="#A33B00" if stored.lost else INK)


def _draw(text: str, number: float | Fraction) -> tuple[Figure, str]:
    """Return the picture of a number in every format, and what it shows in words."""
    kept = {form: store(number, form) for form in FORMATS}
    figure, (ax,) = new_figure(1, 1, size=(11.4, 4.3))
    for row, (form, stored) in enumerate(kept.items()):
        _draw_row(ax, 1.25 * row, form, stored)
    heads = {"sign": (-10.4, "sign"), "exponent": (-4.2, "exponent: range"), "fraction": (11.5, "fraction: precision")}
    for kind, (x, label) in heads.items():
        ax.text(x, -0.75, label, ha="center", color=readable(_COLORS[kind]), fontweight="bold")
    ax.text(23.8, -0.75, "stored value", color=INK, fontweight="bold")
    ax.set(xlim=(-13.8, 43), ylim=(1.25 * len(FORMATS) - 0.6, -1.3), title=f"{text} in {len(FORMATS)} formats")
    ax.axis("off")
    words = "; ".join(f"<b>{form.name}</b> {stored.value:.12g} ({stored.verdict})" for form, stored in kept.items())
    return figure, f"{html.escape(text)} is stored as: {words}.<br><small>{_NOTE}</small>"


def _render(number: str) -> tuple[Figure, str]:
    return _draw(" ".join(number.split()), read_number(number))


def bits_explorer() -> Explorer:
    """Write a number, or press an example; see its sign, exponent and fraction bits in fp32, tf32, bf16, fp16 and fp8.

    Beside the bits stand the value stored and its relative error, or that the number overflows, saturates or
    underflows. fp8 is e5m2 and e4m3 as torch has them; out of range, a cast to e4m3 saturates since torch 2.12
    (https://github.com/pytorch/pytorch/pull/178817).
    """
    number = text("number", "0.1")
    examples = {example: widgets.Button(description=example, layout={"width": "auto"}) for example in _EXAMPLES}

    def press(button: widgets.Button) -> None:
        number.value = button.description

    for button in examples.values():
        button.on_click(press)
    return Explorer([{"number": number}, examples], _render)
