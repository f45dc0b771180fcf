"""The bits explorer: its bits are torch's, its words are right, and bad input loses nothing."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from figures import Opened

from lessons.scaling_efficiency.explorer import _draw, bits_explorer
from lessons.scaling_efficiency.number_formats import FORMATS, read_number, store

FP32, TF32, BF16, FP16, E5M2, E4M3 = FORMATS
DTYPES = [form for form in FORMATS if form.dtype is not None]
formats = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
dtypes = pytest.mark.parametrize("form", DTYPES, ids=lambda form: form.name)
SPECIAL = [0.0, -0.0, math.inf, -math.inf, 448.0, 464.0, 464.1, 57344.0, 61440.0, 65504.0, 65520.0, 3.4e38, 3.5e38]


def numbers(form, count: int = 150) -> list[float]:
    """Random numbers over the whole range of a format and beyond it at both ends, subnormals among them."""
    dice = random.Random(form.name)
    powers = [dice.randint(form.lowest_power - 3, form.bias + 3) for _ in range(count)]
    return [dice.choice((-1, 1)) * dice.uniform(1, 2) * 2.0**power for power in powers]


def decode(bits: str, form) -> float:
    """The value of a bit pattern by the definition of the format, not by torch."""
    sign, exponent, fraction = bits[0], int(bits[1 : 1 + form.exponent], 2), int(bits[1 + form.exponent :], 2)
    top = exponent == 2**form.exponent - 1
    if top and form is E4M3 and fraction == 7 or top and form is not E4M3 and fraction:
        return math.nan
    if top and form is not E4M3:
        return math.inf * (-1) ** int(sign)
    hidden = 2**form.fraction if exponent else 0
    size = (hidden + fraction) * 2.0 ** (max(exponent, 1) - form.bias - form.fraction)
    return math.copysign(size, -int(sign))


def integers(form) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[form.dtype.itemsize]


@dtypes
def test_bits_are_those_of_torch(form):
    values = [*numbers(form), *SPECIAL]
    views = torch.tensor(values, dtype=torch.float64).float().to(form.dtype).view(integers(form)).tolist()
    assert [int(store(value, form).bits, 2) for value in values] == [view % 2**form.width for view in views]


@dtypes
def test_every_pattern_of_a_small_format_is_its_own(form):
    patterns = torch.arange(256) if form.width == 8 else torch.randint(2**form.width, (300,))
    values = patterns.to(torch.int64).to(integers(form)).view(form.dtype).double().tolist()
    for pattern, value in zip(patterns.tolist(), values, strict=True):
        stored = store(value, form)
        if math.isnan(value):
            assert math.isnan(stored.value) and math.isnan(decode(stored.bits, form))
        else:
            assert (int(stored.bits, 2), stored.value, stored.lost) == (pattern, value, False)


@formats
def test_bits_mean_the_value_shown(form):
    for value in [*numbers(form), *SPECIAL]:
        stored = store(value, form)
        assert len(stored.bits) == form.width == 1 + form.exponent + form.fraction
        assert math.copysign(1, decode(stored.bits, form)) == math.copysign(1, stored.value)
        assert decode(stored.bits, form) == stored.value
    assert math.isnan(decode(store(math.nan, form).bits, form))


def test_tf32_is_the_nearest_with_ten_bits_of_fraction():
    for value in numbers(TF32, 400):
        single = torch.tensor(value, dtype=torch.float64).float().item()
        if abs(single) >= 2.0**128 * (1 - 2.0**-12):
            assert store(value, TF32).value == math.copysign(math.inf, value)
            continue
        step = Fraction(2) ** (max(math.frexp(single)[1] - 1, -126) - 10)
        steps = abs(Fraction(single)) / step + Fraction(1, 2)
        assert store(value, TF32).value == math.copysign(float(steps.__floor__() * step), value)


@pytest.mark.parametrize("value", [1 + 2**-11, 1 + 3 * 2**-11, -(1 + 2**-11)])
def test_ties_of_tf32_go_away_from_zero(value):
    assert store(value, TF32).value == value + math.copysign(2**-11, value)
    assert store(value, FP16).value in (1.0, -1.0, 1 + 2**-9)  # ties to even


@formats
def test_ends_of_the_range(form):
    assert store(form.largest, form).verdict == "exact"
    smallest = store(2.0**form.lowest_power, form)
    assert (smallest.verdict, smallest.bits) == ("exact, subnormal", f"{1:0{form.width}b}")
    below = store(2.0 ** (form.lowest_power - 2), form)
    assert (below.value, below.lost) == (0, True)
    assert "underflows to 0" in below.verdict and f"2^{form.lowest_power}" in below.verdict
    beyond = store(form.largest * 1.2, form)
    assert beyond.lost and f"{form.largest:.6g}" in beyond.verdict
    assert ("saturates" in beyond.verdict) == (form is E4M3)
    assert (beyond.verdict.startswith("overflows to inf")) == (form is not E4M3)


@dtypes
def test_the_largest_number_is_that_of_torch(form):
    assert form.largest == torch.finfo(form.dtype).max
    assert 2.0**form.lowest_power == torch.finfo(form.dtype).smallest_normal * 2.0**-form.fraction


@pytest.mark.parametrize(
    "text, form, verdict",
    [
        ("0.1", FP32, "relative error 1.5e-08"), ("0.1", E4M3, "relative error 1.6 %"),
        ("1+2^-10", FP16, "exact"), ("1+2^-10", BF16, "relative error 9.8e-04"),
        ("65504", FP16, "exact"), ("70000", FP16, "overflows to inf: its largest is 65504"),
        ("-70000", FP16, "overflows to -inf: its largest is 65504"), ("65519", FP16, "relative error 2.3e-04"),
        ("464", E4M3, "relative error 3.4 %"), ("465", E4M3, "saturates: its largest is 448"),
        ("1e-8", FP16, "underflows to 0: its smallest is 2^-24"), ("3*2^-24", FP16, "exact, subnormal"),
        ("0", FP16, "exact"), ("-0", E5M2, "exact"), ("inf", FP16, "infinity"), ("nan", BF16, "not a number"),
        ("inf", E4M3, "saturates: it has no infinity"), ("1e300", FP32, "overflows to inf: its largest is 3.40282e+38"),
    ],
)
def test_what_happened_is_said(text, form, verdict):
    assert store(read_number(text), form).verdict == verdict


def test_error_is_that_against_what_was_written():
    assert store(read_number("1/3"), FP32).verdict == "relative error 3.0e-08"
    assert store(read_number("1.00000000000000000001"), FP32).verdict == "relative error 1.0e-20"


@pytest.mark.parametrize(
    "text, value",
    [
        ("0.1", Fraction(1, 10)), (" -1e-8 ", Fraction(-1, 10**8)), ("1/3", Fraction(1, 3)),
        ("2^-24", Fraction(1, 2**24)),
        ("1 + 2**-10", 1 + Fraction(1, 1024)), ("-(2-3)*4", 4), ("1_000", 1000), ("-2^2", -4), (".5", Fraction(1, 2)),
        ("\N{MINUS SIGN}3", -3), ("INF", math.inf), ("-inf", -math.inf), ("0e999", 0), ("1.7e308", Fraction("1.7e308")),
    ],
)
def test_numbers_are_read_exactly(text, value):
    assert read_number(text) == value


def test_the_sign_of_zero_is_read():
    assert math.copysign(1, read_number("-0")) == -1
    assert store(read_number("-0.0"), E4M3).bits == "10000000"
    assert store(read_number("0"), E4M3).bits == "00000000"


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("", "no number given"), ("  ", "no number given"), ("abc", "'abc' is not a number"), ("1 2", "not a number"),
        ("1,5", "comma"), ("1/0", "divides by zero"), ("1e999999999", "float64"), ("1e-999999999", "float64"),
        ("2^99999", "float64"), ("2^9^9^9^9", "float64"), ("2^0.5", "whole number"), ("1e-400", "float64"),
        ("True", "not a number"), ("__import__('os')", "not a number"), ("1" * 81, "80 characters"),
        ("1+", "not a number"),
        ("(" * 70, "not a number"), ("0x1p3", "not a number"), ("1j", "not a number"), ("0/0", "divides by zero"),
        ("0^-1", "divides by zero"), ("1;2", "not a number"), ("'1'", "not a number"), ("<b>", "not a number"),
    ],
)
def test_what_is_no_number_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_number(text)


class Explorer(Opened):
    def __init__(self):
        super().__init__(bits_explorer())
        self.buttons = {name: control for name, control in self.widget.controls.items() if control is not self.number}


@pytest.fixture(scope="module")
def explorer():
    return Explorer()


def test_a_picture_is_there_before_anything_is_written():
    fresh = Explorer()
    assert bytes(fresh.picture.value).startswith(b"\x89PNG")
    assert "0.1 is stored as" in fresh.status.value
    assert bytes(Explorer().picture.value) == bytes(fresh.picture.value)


def test_every_example_shows_a_picture_of_its_own(explorer):
    pictures = set()
    for text, button in explorer.buttons.items():
        button.click()
        assert explorer.number.value == text
        assert f"{text} is stored as" in explorer.status.value
        pictures.add(bytes(explorer.picture.value))
    assert len(pictures) == len(explorer.buttons) > 8


def test_examples_show_every_kind_of_loss(explorer):
    verdicts = [store(read_number(text), form).verdict for text in explorer.buttons for form in FORMATS]
    for word in (
        "exact",
        "relative error",
        "subnormal",
        "overflows to inf",
        "saturates",
        "underflows to 0",
        "infinity",
    ):
        assert any(word in verdict for verdict in verdicts), word


@pytest.mark.parametrize("text", ["x<y", "1,5", "", "1e400"])
def test_bad_input_is_named_and_the_picture_comes_back(explorer, text):
    explorer.number.value = "70000"
    picture = bytes(explorer.picture.value)
    explorer.number.value = text
    assert explorer.number.value == text  # stays to be mended
    assert bytes(explorer.picture.value) != picture and explorer.refuses
    assert "<y" not in explorer.status.value
    explorer.number.value = "70000"
    assert not explorer.refuses
    assert bytes(explorer.picture.value) == picture


def test_every_bit_is_drawn_in_the_colour_of_its_field():
    number = read_number("-1.9e-3")
    figure, words = _draw("-1.9e-3", number)
    (ax,) = figure.axes
    drawn = [text.get_text() for text in ax.texts if text.get_text() in ("0", "1")]
    assert "".join(drawn) == "".join(store(number, form).bits for form in FORMATS)
    boxes = [box for box in ax.patches if box.get_linestyle() in ("-", "solid")]
    assert len(boxes) == len(drawn)
    kinds = [kind for f in FORMATS for kind in "s" + "e" * f.exponent + "f" * f.fraction]
    assert len({(kind, box.get_edgecolor()) for kind, box in zip(kinds, boxes, strict=True)}) == 3
    assert len([box for box in ax.patches if box.get_linestyle() in (":", "dotted")]) == 13
    assert all(f"<b>{form.name}</b>" in words for form in FORMATS)


@pytest.mark.parametrize("text", ["-3e38", "-1e-39", "-1/3", "-1234.5678", "1e300"])
def test_no_words_lie_on_others_or_off_the_picture(text):
    figure, _ = _draw(text, read_number(text))
    figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in figure.axes[0].texts if len(t.get_text()) > 1]
    width, height = figure.bbox.size
    assert all(0 <= b.x0 and b.x1 <= width and 0 <= b.y0 and b.y1 <= height for b in boxes)
    for i, first in enumerate(boxes):
        assert not [second for second in boxes[:i] if first.shrunk(0.98, 0.8).overlaps(second.shrunk(0.98, 0.8))]
