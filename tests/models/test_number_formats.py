"""fp8 and fp4 with scales: what each format keeps is the nearest number it has."""

from __future__ import annotations

import torch

from lessons.scaling_efficiency.number_formats import BLOCK_FORMATS, in_fp8

MXFP8, MXFP4, NVFP4 = BLOCK_FORMATS
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_every_number_of_fp4_is_kept_and_ties_go_to_the_even_one():
    numbers = torch.tensor([*FP4, *(-n for n in FP4)] * 2)
    assert (MXFP4.keep(numbers) == numbers).all()
    between = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 0.26] + 22 * [0.0])
    assert MXFP4.keep(between)[1:10].tolist() == [0, 1, 1, 2, 2, 4, 4, -4, 0.5]


def test_a_block_does_not_depend_on_the_size_of_its_numbers_nor_on_other_blocks():
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    for form in (MXFP8, MXFP4):
        assert torch.equal(form.keep(x * 2.0**-30), form.keep(x) * 2.0**-30)
        large = torch.cat([x[:, :32] * 2.0**20, x[:, 32:]], dim=1)
        assert torch.equal(form.keep(large)[:, 32:], form.keep(x)[:, 32:])


def test_nvfp4_scales_the_largest_of_a_block_to_the_end_of_the_range():
    x = torch.linspace(-1, 1, 32)
    assert abs(NVFP4.keep(x)[0] + 1) < 0.05  # as near as the scale in e4m3 comes
    x = torch.randn(1, 4096, generator=torch.Generator().manual_seed(3))
    assert (NVFP4.keep(x) - x).norm() < (MXFP4.keep(x) - x).norm()


def test_fp8_with_a_scale_is_as_good_for_small_tensors_as_for_large_ones():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    for factor in (1e-8, 1.0, 1e8):
        y = factor * x
        kept = in_fp8(y, y.abs().max() / 448)
        assert (kept - y).norm() < 0.04 * y.norm()
    assert (in_fp8(1e-8 * x) == 0).all() and in_fp8(torch.tensor(1e6)) == 448
