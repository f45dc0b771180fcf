"""Promises about much output: it defeats neither time-out nor interrupt, and what is shown of it stays readable."""

from __future__ import annotations

import re
import sys

import cloudpickle
import pytest
import torch.distributed as dist
from calls import all_is_well, screen

from course_utils import HangError, launch
from course_utils.ranks.channels import MARK
from course_utils.ranks.output import Merger

pytestmark = pytest.mark.guard(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

def flood():
    while True:
        print("a line of some length " * 5)


def test_a_rank_that_writes_without_end_is_stopped_at_the_time_out(capsys):
    """The stop button: see `test_launcher_kernel.py`."""
    with pytest.raises(HangError):
        launch(flood, world_size=1, timeout=1)
    assert len(capsys.readouterr().out) < 10_000_000
    all_is_well(2)
    assert capsys.readouterr().out == ""


def test_a_rank_that_writes_while_another_fails_does_not_hide_the_failure():
    def work():
        if dist.get_rank() == 0:
            flood()
        raise ValueError("the cause")

    with pytest.raises(Exception, match="ValueError: the cause"):
        launch(work, world_size=2)
    all_is_well(2)


# --- what is shown -------------------------------------------------------------------------------------------------

NOTE = r"\b(\d[\d,_ ]*)\s+(?:more |other |further )?"


def number(text: str) -> int:
    return int(re.sub(r"\D", "", text))


def test_a_very_long_line_is_cut_with_a_note_how_much_is_missing(capsys):
    size = 2_000_000

    def work():
        sys.stdout.write("x" * size)
        print("|")
        print("next line")

    launch(work, world_size=1, timeout=80)
    first, *rest = capsys.readouterr().out.splitlines()
    assert rest == ["[rank 0] next line"]
    shown = len(re.search("x+", first)[0])
    assert 1000 <= shown <= 20_000
    note = first.partition("x" * shown)[2]
    assert abs(shown + number(re.search(NOTE + "(?:characters|more)", note)[1]) - size) <= 1, note


def test_of_very_many_lines_beginning_and_end_are_shown_and_how_many_lie_between(capsys):
    count = 100_000

    def work():
        for begin in range(0, count, 1000):
            sys.stdout.write("".join(f"line {i} {'y' * 60}\n" for i in range(begin, begin + 1000)))
        print("the end")

    launch(work, world_size=1, timeout=60)
    out = capsys.readouterr().out.splitlines()
    assert len(out) < 30_000
    numbers = [int(m[1]) for line in out if (m := re.match(r"\[rank 0\] line (\d+) y{60}$", line))]
    assert numbers[:500] == list(range(500)) and numbers[-1] == count - 1 and out[-1] == "[rank 0] the end"
    assert numbers == sorted(numbers)
    notes = [line for line in out if not re.match(r"\[rank 0\] (line \d+ y{60}|the end)$", line)]
    assert len(notes) == 1, notes
    assert number(re.search(NOTE + "lines", notes[0])[1]) + len(numbers) == count
    gap = next(i for i, (a, b) in enumerate(zip(numbers, numbers[1:], strict=False)) if b != a + 1)
    assert out.index(notes[0]) == gap + 1


def test_progress_bars_with_positions_are_one_clean_line_each(capsys):
    def work():
        from tqdm import tqdm

        rank = dist.get_rank()
        with tqdm(total=20, position=rank, desc=f"bar {rank}", mininterval=0) as bar:
            for _ in range(20):
                bar.update()
        print("after")

    launch(work, world_size=4)
    captured = capsys.readouterr()
    shown = [line for line in screen(captured.out + captured.err) if line]
    assert len(shown) == 5, shown
    for rank in range(4):
        assert len([line for line in shown if re.match(rf"\[rank {rank}\] bar {rank}: 100%.*20/20", line)]) == 1, shown
    assert any(line.endswith("] after") for line in shown) and "\x1b[A" not in captured.out


def test_bars_of_one_name_are_one_line_which_names_the_slowest():
    shown, rates = [], ("40.00it/s", "50.00it/s", " 2.00s/it", "30.00it/s")
    merger = Merger([0, 1, 2, 3], shown.append)
    for rank, rate in enumerate(rates):
        merger.feed(rank, f"\repoch:  67%|██▋ | 2/3 [00:01<00:01, {rate}]".encode(), 1)
    assert merger.unended() == ("ranks 0-3, slowest 2", "epoch:  67%|██▋ | 2/3 [00:01<00:01,  2.00s/it]")
    for rank, rate in enumerate(rates):
        merger.feed(rank, f"\repoch: 100%|████| 3/3 [00:01<00:00, {rate}]\n".encode() + MARK + b"E1\n", 1)
    merger.flush()
    assert shown == ["[ranks 0-3, slowest 2] epoch: 100%|████| 3/3 [00:01<00:00,  2.00s/it]\n"]
