"""``scripts/links.py`` under torchrun: a figure for each pair, the slowest one named, bad options refused."""

from __future__ import annotations

import runpy
from itertools import combinations

import pytest

from course_utils.programs import SCRIPTS, torchrun

pytestmark = pytest.mark.guard(120)


def test_every_pair_has_a_figure_and_the_slowest_is_named():
    said = torchrun("links.py", "--large", 65536, "--rounds", 3, ranks=3, gpus=False)
    head, names, *rows, last = said.splitlines()
    assert head == "3 ranks, gloo, pairs in parallel" and names.split() == ["GB/s", "rank", "1", "rank", "2"]
    assert rows[2].split() == ["µs", "rank", "1", "rank", "2"]
    large, small = ([float(x) for row in part for x in row.split()[2:]] for part in (rows[:2], rows[3:]))
    assert len(large) == len(small) == 3 and all(x > 0 for x in large + small)
    pairs = dict(zip(("0 and 1", "0 and 2", "1 and 2"), large, strict=True))
    slowest = next(pair for pair in pairs if f"slowest: ranks {pair}, " in last)
    assert pairs[slowest] == min(large)


def test_bad_sizes_are_refused():
    with pytest.raises(RuntimeError, match="1 <= small < large"):
        torchrun("links.py", "--small", 8, "--large", 8, ranks=1, gpus=False)


def test_one_rank_has_no_pair():
    assert torchrun("links.py", "--alone", ranks=1, gpus=False).startswith("1 ranks, gloo, one pair at a time\n")


@pytest.mark.parametrize("n", [2, 3, 5, 8, 64])
def test_each_pair_plays_once_and_no_rank_twice_in_a_turn(n: int):
    turns = runpy.run_path(str(SCRIPTS / "links.py"))["turns"]
    parallel, alone = turns(n, False), turns(n, True)
    every = [*combinations(range(n), 2)]
    assert sorted(sum(parallel, [])) == every and sum(alone, []) == every
    assert all(len({*sum(pairs, ())}) == 2 * len(pairs) for pairs in parallel)
    assert len(parallel) == (n if n % 2 else n - 1) and len(alone) == n * (n - 1) // 2
