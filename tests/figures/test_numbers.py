"""Numbers in the formats of deep learning: bits are torch's, words are right, and bad input is named."""

import math
import random
from fractions import Fraction

import pytest
import torch

from lessons.scaling_efficiency.number_formats import FORMATS, read_number, store

FP32, TF32, BF16, FP16, E5M2, E4M3 = FORMATS
SPECIAL = [0.0, -0.0, math.inf, -math.inf, 448.0, 464.0, 464.1, 57344.0, 61440.0, 65504.0, 65520.0, 3.4e38, 3.5e38]


def numbers(form, count: int = 150) -> list[float]:
    """Random numbers over the whole range of a format and beyond it at both ends, subnormals among them."""
    dice = random.Random(form.name)
    powers = [dice.randint(form.lowest_power - 3, form.bias + 3) for _ in range(count)]
    return [dice.choice((-1, 1)) * dice.uniform(1, 2) * 2.0**power for power in powers]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_bits_and_value_are_those_of_torch(form):
    integers = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
    for value in [*numbers(form), *SPECIAL]:
        stored, single = store(value, form), torch.tensor(value, dtype=torch.float64).float()
        if form is TF32:  # fp32 without its last 13 bits
            assert stored.bits == store(stored.value, FP32).bits[:19]
            half = 2.0 ** (max(math.frexp(single.item())[1] - 1, -126) - 11)
            assert math.isinf(stored.value) or abs(stored.value - single.item()) <= half
            continue
        kept = single.to(getattr(torch, form.dtype))
        bits = kept.view(integers[form.width]).item() % 2**form.width
        assert (stored.bits, stored.value) == (f"{bits:0{form.width}b}", kept.item())


@pytest.mark.parametrize(
    "text, form, verdict",
    [
        ("0.1", FP32, "relative error 1.5e-08"), ("1+2^-10", BF16, "relative error 9.8e-04"),
        ("70000", FP16, "overflows to inf: its largest is 65504"), ("465", E4M3, "saturates: its largest is 448"),
        ("1e-8", FP16, "underflows to 0: its smallest is 2^-24"), ("3*2^-24", FP16, "exact, subnormal"),
        ("-0", E5M2, "exact"), ("inf", FP16, "infinity"), ("nan", BF16, "not a number"),
        ("inf", E4M3, "saturates: it has no infinity"), ("1.00000000000000000001", FP32, "relative error 1.0e-20"),
    ],
)
def test_what_happened_is_said(text, form, verdict):
    assert store(read_number(text), form).verdict == verdict


def test_numbers_are_read_exactly_and_what_is_none_is_refused():
    read = {" -1e-8 ": Fraction(-1, 10**8), "1 + 2**-10": 1 + Fraction(1, 1024), "-(2-3)*4": 4, "-2^2": -4,
            "1/3": Fraction(1, 3), "\N{MINUS SIGN}3": -3, "-inf": -math.inf}
    assert {text: read_number(text) for text in read} == read
    assert store(read_number("-0.0"), E4M3).bits == "10000000"
    for text, complaint in (("1,5", "comma"), ("1/0", "divides by zero"), ("2^9^9^9^9", "float64"),
                            ("__import__('os')", "not a number"), ("1+", "not a number")):
        with pytest.raises(ValueError, match=complaint):
            read_number(text)
