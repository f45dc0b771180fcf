"""The text: plain ASCII, split by position, cut into windows that follow one another."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import ROOT

from course_utils.data import Windows, tokens

TEXT = ROOT / "course_utils" / "text" / "alice.txt"


def decode(codes: torch.Tensor) -> str:
    return bytes(codes.tolist()).decode("ascii")


def test_the_two_splits_are_the_whole_text():
    train, valid = tokens("train"), tokens("valid")
    assert decode(train) + decode(valid) == TEXT.read_bytes().decode("ascii")
    assert decode(train).startswith("CHAPTER I. Down")
    assert len(train) / (len(train) + len(valid)) == pytest.approx(0.9, abs=1e-4)


def test_windows_follow_one_another():
    for split, context in itertools.product(("train", "valid"), (1, 64)):
        windows, text = Windows(split, context, length=50), tokens(split)
        items = list(windows)
        assert len(items) == len(windows) == 50
        assert all(x.shape == y.shape == (context,) and x.dtype == y.dtype == torch.int64 for x, y in items)
        assert torch.equal(torch.cat([x for x, _ in items]), text[: 50 * context])
        assert torch.equal(torch.cat([y for _, y in items]), text[1 : 50 * context + 1])


def test_a_batch_has_the_windows_with_the_numbers_given():
    windows = Windows(context=8)
    x, y = windows.batch(number for number in (5, 0, -1))
    assert x.shape == y.shape == (3, 8)
    for row, number in enumerate((5, 0, len(windows) - 1)):
        assert torch.equal(x[row], windows[number][0]) and torch.equal(y[row], windows[number][1])
    assert windows.batch([0], "meta")[0].is_meta
