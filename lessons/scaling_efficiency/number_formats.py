"""Floating-point formats of deep learning, and what each makes of a number."""

from __future__ import annotations

import ast
import math
import operator
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCK_FORMATS", "BlockFormat", "FORMATS", "Format", "Stored", "in_fp8", "read_number", "store"]

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@dataclass(frozen=True)
class Format:
    """A floating-point format: one sign bit, then `exponent` and `fraction` bits."""

    name: str
    exponent: int
    fraction: int
    dtype: str | None  # its name in torch

    @property
    def width(self) -> int:
        return 1 + self.exponent + self.fraction

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def largest(self) -> float:
        """The largest finite number; e4m3fn, which has no infinity, goes on to 448."""
        return 448.0 if self.dtype == "float8_e4m3fn" else (2 - 2.0**-self.fraction) * 2.0**self.bias

    @property
    def lowest_power(self) -> int:
        """The exponent of the smallest number above zero, a subnormal power of two."""
        return 1 - self.bias - self.fraction


FORMATS = (
    Format("fp32", 8, 23, "float32"),
    Format("tf32", 8, 10, None),
    Format("bf16", 8, 7, "bfloat16"),
    Format("fp16", 5, 10, "float16"),
    Format("fp8 e5m2", 5, 2, "float8_e5m2"),
    Format("fp8 e4m3", 4, 3, "float8_e4m3fn"),
)


_FP8_LARGEST = FORMATS[-1].largest


def in_fp8(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """What e4m3 keeps of x divided by `scale`, which is kept beside it; values that are too large saturate."""
    import torch

    return (x / scale).clamp(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn).float() * scale


def _in_fp4(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest number of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6; ties go to the one with an even last bit."""
    step = 2 ** (x.abs().log2().floor().clamp(0, 2) - 1)  # one bit of fraction
    return ((x / step).round() * step).clamp(-6, 6)


@dataclass(frozen=True)
class BlockFormat:
    """Elements of 4 or 8 bits that share one scale of 8 bits in each block.

    Scales are "e8m0", powers of two, by the largest element of the block, rounded down, as the OCP Microscaling Formats
    specification 1.0 does; or "e4m3", with one more scale in fp32 for the whole tensor, as NVFP4 does.
    """

    name: str
    element: str  # "e4m3", fp8, or "e2m1", fp4
    block: int  # elements that share a scale, next to each other in a row
    scale: str

    @property
    def bits(self) -> float:
        """Bits of an element with its part of the scale."""
        return {"e4m3": 8, "e2m1": 4}[self.element] + 8 / self.block

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """What the format keeps of x, in float32, of the same shape. Raises ValueError if blocks do not fill a row."""
        import torch

        if x.shape[-1] % self.block:
            raise ValueError(f"rows must be a multiple of {self.block} elements for {self.name}, got {x.shape[-1]}")
        rows = x.float().reshape(-1, self.block)
        largest = rows.abs().amax(1, keepdim=True)
        top = {"e4m3": _FP8_LARGEST, "e2m1": 6.0}[self.element]
        if self.scale == "e8m0":
            power = torch.floor(torch.log2(largest)) - math.floor(math.log2(top))
            scale = torch.exp2(power.clamp(-127, 127))
        else:
            whole = largest.max() / (top * _FP8_LARGEST)
            scale = in_fp8(largest / top, whole)
        scale = torch.where(scale > 0, scale, 1.0)
        kept = in_fp8(rows, scale) if self.element == "e4m3" else _in_fp4(rows / scale) * scale
        return kept.view(x.shape)


#: Formats with a scale for each block, as NVIDIA's Blackwell multiplies them.
BLOCK_FORMATS = (
    BlockFormat("MXFP8", "e4m3", 32, "e8m0"), BlockFormat("MXFP4", "e2m1", 32, "e8m0"),
    BlockFormat("NVFP4", "e2m1", 16, "e4m3"),
)  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """What a format keeps of a number: its bits, their value, what happened in words; `lost`: more than rounded."""

    bits: str
    value: float
    verdict: str
    lost: bool = False


def _encode(value: float, form: Format) -> tuple[str, float]:
    """Return bits and value of `value` in `form`. tf32 adds half a unit of its last place, then drops 13 bits."""
    import torch

    single = torch.tensor([value], dtype=torch.float64).float()
    if form.dtype is None:
        pattern = single.view(torch.int32)
        kept = single if math.isnan(value) else (pattern + 0x1000 & -0x2000).view(torch.float32)
        return f"{kept.view(torch.int32).item() >> 13 & 0x7FFFF:019b}", kept.item()
    kept = single.to(getattr(torch, form.dtype))
    pattern = kept.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[kept.dtype.itemsize]).item()
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
        case ast.Constant(value=int() | float()):
            text = ast.get_source_segment(source, node)
            if math.isinf(node.value) or not node.value and re.search("[1-9]", re.split("[eE]", text)[0]):
                raise OverflowError
            return Fraction(text)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return (-1 if isinstance(node.op, ast.USub) else 1) * _evaluate(node.operand, source)
        case ast.BinOp(op=ast.Pow()):
            base, power = _evaluate(node.left, source), _evaluate(node.right, source)
            if power.denominator != 1:
                raise ValueError
            if abs(power) * max(base.numerator.bit_length(), base.denominator.bit_length()) > 20_000:
                raise OverflowError
            return base ** int(power)
        case ast.BinOp() if type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](_evaluate(node.left, source), _evaluate(node.right, source))
    raise SyntaxError


def read_number(text: str) -> float | Fraction:
    """Return the number that `text` writes: a `Fraction`, or a float for -0, inf and nan."""
    source = text.strip().replace("^", "**").replace("\N{MINUS SIGN}", "-")
    how = "write one such as 0.1, -1e-8, 1/3, 1+2^-10, inf or nan"
    if not source:
        raise ValueError(f"no number given; {how}")
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
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text.strip()!r} is not a number; {how}") from None
    return -0.0 if not exact and source.startswith("-") else exact
