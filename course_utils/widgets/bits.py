"""Write a number; see the bits that each floating-point format of deep learning keeps of it, and what is lost."""

from __future__ import annotations

import ast
import html
import math
import operator
import re
from dataclasses import dataclass
from fractions import Fraction

import ipywidgets as widgets
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..plots._style import FAINT, INK, new_figure, readable, tint
from ._common import Explorer, Picture

__all__ = ["FORMATS", "Format", "Stored", "bits_explorer", "read_number", "store"]

_EXAMPLES = ("0.1", "1/3", "1+2^-10", "1+2^-8", "1000.5", "65504", "70000", "3e38", "1e-5", "1e-8", "-0", "inf", "nan")
_COLORS = {"sign": "#D55E00", "exponent": "#0072B2", "fraction": "#00805D"}
_NOTE = (
    "fp32 is rounded from the number, the others from fp32, as a cast in torch does: to the nearest, ties to even. "
    "tf32 is no dtype: it is fp32 without the last 13 bits (dotted), here with ties away from zero, as PTX's "
    "cvt.rna.tf32.f32 rounds."
)
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@dataclass(frozen=True)
class Format:
    """A floating-point format: one sign bit, then `exponent` and `fraction` bits."""

    name: str
    exponent: int
    fraction: int
    dtype: torch.dtype | None

    @property
    def width(self) -> int:
        return 1 + self.exponent + self.fraction

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return (2 - 2.0**-self.fraction) * 2.0**self.bias if self.dtype is None else torch.finfo(self.dtype).max

    @property
    def lowest_power(self) -> int:
        """The exponent of the smallest number above zero, a subnormal power of two."""
        return 1 - self.bias - self.fraction


FORMATS = (
    Format("fp32", 8, 23, torch.float32),
    Format("tf32", 8, 10, None),
    Format("bf16", 8, 7, torch.bfloat16),
    Format("fp16", 5, 10, torch.float16),
    Format("fp8 e5m2", 5, 2, torch.float8_e5m2),
    Format("fp8 e4m3", 4, 3, torch.float8_e4m3fn),
)


@dataclass(frozen=True)
class Stored:
    """What a format keeps of a number: its bits, their value, what happened in words; `lost`: more than rounded."""

    bits: str
    value: float
    verdict: str
    lost: bool = False


def _encode(value: float, form: Format) -> tuple[str, float]:
    """Return bits and value of `value` in `form`. tf32 adds half a unit of its last place, then drops 13 bits."""
    single = torch.tensor([value], dtype=torch.float64).float()
    if form.dtype is None:
        pattern = single.view(torch.int32)
        kept = single if math.isnan(value) else (pattern + 0x1000 & -0x2000).view(torch.float32)
        return f"{kept.view(torch.int32).item() >> 13 & 0x7FFFF:019b}", kept.item()
    kept = single.to(form.dtype)
    pattern = kept.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[form.dtype.itemsize]).item()
    return f"{pattern & (1 << form.width) - 1:0{form.width}b}", kept.item()


def store(number: float | Fraction, form: Format) -> Stored:
    """Return what `form` keeps of `number`. An error is relative to `number` itself, exactly."""
    value = float(number)
    bits, kept = _encode(value, form)
    if math.isnan(value):
        return Stored(bits, kept, "not a number")
    if math.isinf(value) and math.isinf(kept):
        return Stored(bits, kept, "infinity")
    half_a_step = 2.0 ** (math.frexp(form.largest)[1] - 2 - form.fraction)
    if not math.isfinite(kept) or abs(value) > form.largest + half_a_step:
        how = f"overflows to {kept:g}" if not math.isfinite(kept) else "saturates"
        why = "it has no infinity" if math.isinf(value) else f"its largest is {form.largest:.6g}"
        return Stored(bits, kept, f"{how}: {why}", True)
    exact = Fraction(number)
    if kept == 0 and exact:
        return Stored(bits, kept, f"underflows to 0: its smallest is 2^{form.lowest_power}", True)
    error = float(abs(Fraction(kept) / exact - 1)) if exact else 0.0
    shown = f"{100 * error:.2g} %" if error >= 1e-3 else f"{error:.1e}"
    subnormal = ", subnormal" if kept and "1" not in bits[1 : 1 + form.exponent] else ""
    return Stored(bits, kept, (f"relative error {shown}" if error else "exact") + subnormal)


def _evaluate(node: ast.AST, source: str) -> Fraction:
    """Return the exact value of a sum, product or power of numbers as they stand in `source`."""
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            text = ast.get_source_segment(source, node)
            if isinstance(node.value, int):
                return Fraction(node.value)
            if math.isinf(node.value) or not node.value and re.search("[1-9]", re.split("[eE]", text)[0]):
                raise OverflowError
            return Fraction(text)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            value = _evaluate(node.operand, source)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(op=ast.Pow()):
            base, power = _evaluate(node.left, source), _evaluate(node.right, source)
            if power.denominator != 1:
                raise ValueError("a power must be a whole number")
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(power) * bits > 20_000:
                raise OverflowError
            return base ** int(power)
        case ast.BinOp() if type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](_evaluate(node.left, source), _evaluate(node.right, source))
    raise SyntaxError


def read_number(text: str) -> float | Fraction:
    """Return the number that `text` writes: a `Fraction`, or a float for -0, inf and nan.

    Raises
    ------
    ValueError
        If it is no number, or one that float64 cannot hold; the message says how to write one.
    """
    source = text.strip().replace("^", "**").replace("\N{MINUS SIGN}", "-")
    how = "write one such as 0.1, -1e-8, 1/3, 1+2^-10, inf or nan"
    if not source:
        raise ValueError(f"no number given; {how}")
    if len(source) > 80:
        raise ValueError("more than 80 characters; write a shorter number")
    if re.fullmatch(r"[+-]?(inf|infinity|nan)", source, re.IGNORECASE):
        return float(source)
    if re.search(r"\d,\d", source):
        raise ValueError(f"{text.strip()!r} has a comma; write the decimal point as . and leave out commas")
    try:
        exact = _evaluate(ast.parse(source, mode="eval").body, source)
        value = float(exact)
        if exact and not value:
            raise OverflowError
    except ZeroDivisionError:
        raise ValueError(f"{text.strip()!r} divides by zero; write inf or nan if you mean them") from None
    except OverflowError:
        raise ValueError(f"{text.strip()!r} does not fit float64; stay between 5e-324 and 1.7e308") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text.strip()!r} is not a number; {how}") from None
    return -0.0 if not exact and source.startswith("-") else exact


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
                fontweight="bold" if bit == "1" else "normal", family="monospace")  # fmt: skip
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
            color="#A33B00" if stored.lost else INK)  # fmt: skip


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


def bits_explorer() -> widgets.Widget:
    """Write a number, or press an example; see its sign, exponent and fraction bits in fp32, tf32, bf16, fp16 and fp8.

    Beside the bits stand the value stored and its relative error, or that the number overflows, saturates or
    underflows. fp8 is e5m2 and e4m3 as torch has them; out of range, a cast to e4m3 saturates since torch 2.12
    (https://github.com/pytorch/pytorch/pull/178817).
    """
    box = widgets.Text("0.1", description="number", continuous_update=False)
    buttons = [widgets.Button(description=text, layout={"width": "auto"}) for text in _EXAMPLES]
    status, picture = widgets.HTML(), Picture()
    shown = {}

    def draw(_=None) -> None:
        try:
            number = read_number(box.value)
        except ValueError as error:
            status.value = f"<p><b>{html.escape(str(error))}.</b> The picture still shows {shown['text']}.</p>"
            return
        text = " ".join(box.value.split())
        figure, status.value = _draw(text, number)
        picture.show(figure)
        shown["text"] = html.escape(text)

    def press(button: widgets.Button) -> None:
        box.value = button.description

    for button in buttons:
        button.on_click(press)
    box.observe(draw, "value")
    draw()
    return Explorer([[box], buttons], status, picture)
