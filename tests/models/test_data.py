"""The text: plain ASCII, split by position, cut into windows that follow one another."""

from __future__ import annotations

import cloudpickle
import pytest
import torch
from conftest import ROOT
from torch.utils.data import DataLoader

from course_utils.data import Windows, tokens

TEXT = ROOT / "course_utils" / "text" / "alice.txt"


def decode(codes: torch.Tensor) -> str:
    return bytes(codes.tolist()).decode("ascii")


def test_the_two_splits_are_the_whole_text():
    train, valid = tokens("train"), tokens("valid")
    assert decode(train) + decode(valid) == TEXT.read_bytes().decode("ascii")
    assert decode(train).startswith("CHAPTER I. Down")
    assert len(train) / (len(train) + len(valid)) == pytest.approx(0.9, abs=1e-4)


def test_tokens_are_codes_that_an_embedding_takes():
    train = tokens()
    assert train.dtype == torch.int64 and train.dim() == 1
    assert 0 <= train.min() and train.max() < 128


def test_the_text_has_the_size_and_look_of_a_lesson():
    text = TEXT.read_text(encoding="ascii")
    assert 140_000 <= len(text) <= 300_000
    assert "\r" not in text and "\n\n\n" not in text and not text.startswith("\n")
    assert all(line == line.strip() for line in text.splitlines())


def test_no_one_can_spoil_the_text_for_others():
    tokens().zero_()
    Windows()[0][0].zero_()
    assert decode(tokens()[:16]) == "CHAPTER I. Down "
    assert decode(Windows()[0][0][:16]) == "CHAPTER I. Down "


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("context", [1, 7, 64])
def test_windows_follow_one_another(split, context):
    windows, text = Windows(split, context, length=50), tokens(split)
    items = list(windows)
    assert len(items) == len(windows) == 50
    assert all(x.shape == y.shape == (context,) and x.dtype == y.dtype == torch.int64 for x, y in items)
    assert torch.equal(torch.cat([x for x, _ in items]), text[: 50 * context])
    assert torch.equal(torch.cat([y for _, y in items]), text[1 : 50 * context + 1])


@pytest.mark.parametrize("context", [1, 64, 14_336])
def test_as_many_windows_as_the_text_gives(context):
    windows, text = Windows("valid", context), tokens("valid")
    assert len(windows) == (len(text) - 1) // context
    x, y = windows[len(windows) - 1]
    assert torch.equal(windows[-1][0], x)
    assert torch.equal(y, text[(len(windows) - 1) * context + 1 : len(windows) * context + 1])


def test_a_batch_has_the_windows_with_the_numbers_given():
    windows = Windows(context=8)
    x, y = windows.batch(number for number in (5, 0, -1))
    assert x.shape == y.shape == (3, 8)
    for row, number in enumerate((5, 0, len(windows) - 1)):
        assert torch.equal(x[row], windows[number][0]) and torch.equal(y[row], windows[number][1])
    assert windows.batch([0], "meta")[0].is_meta


def test_loaders_make_batches_of_them():
    loader = DataLoader(Windows(length=6), batch_size=4)
    shapes = [(x.shape, y.shape) for x, y in loader]
    assert shapes == [((4, 64), (4, 64)), ((2, 64), (2, 64))]


def test_sending_them_to_a_rank_is_cheap():
    sent = cloudpickle.dumps(Windows("valid", 32))
    assert len(sent) < 1000
    assert torch.equal(cloudpickle.loads(sent)[3][1], Windows("valid", 32)[3][1])


@pytest.mark.parametrize("index", [5, -6])
def test_there_is_nothing_past_the_end(index):
    with pytest.raises(IndexError, match="below 5"):
        Windows(length=5)[index]


@pytest.mark.parametrize(
    "wrong, named",
    [({"split": "test"}, "train, valid"), ({"context": 0}, "at least 1"), ({"length": 0}, "1 to 2016"),
     ({"length": 2017}, "1 to 2016"), ({"split": "valid", "context": 14_337}, "below 14337")],
)
def test_what_the_text_cannot_give_is_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        Windows(**wrong)
