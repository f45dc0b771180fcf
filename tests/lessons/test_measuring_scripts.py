"""Programs of ``scripts/`` that measure, on the ranks of `launch`: columns that belong together."""

from __future__ import annotations

import contextlib
import io
import runpy
from itertools import combinations

import pytest

from course_utils import launch
from course_utils.costs import algbw, busbw
from course_utils.programs import SCRIPTS, run_program
from course_utils.transformer import TransformerConfig

pytestmark = pytest.mark.guard(120)


def on_a_rank(script: str, *flags: object) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run_program(SCRIPTS / script, *map(str, flags))
    return said.getvalue()


def printed(script: str, *flags: object, ranks: int) -> list[str]:
    """The lines that a program prints on rank 0."""
    said, *others = launch(on_a_rank, script, *flags, world_size=ranks, backend="gloo", init=False)
    assert not any(others), "one rank speaks for all"
    return said.splitlines()


def test_busbw_has_columns_that_belong_together():
    head, names, *rows = printed("busbw.py", "--smallest", 4096, "--largest", 70000, "--calls", 2, ranks=3)
    assert head == "3 ranks, gloo" and names.split() == ["bytes", "µs", "S/t", "GB/s", "busbw", "GB/s"]
    assert [int(row.split()[0]) for row in rows] == [4096, 4 * 4096, 16 * 4096]
    for row in rows:
        size, us, rate, bus = map(float, row.split())
        assert rate == pytest.approx(algbw(size, us * 1e-6) / 1e9, rel=0.02, abs=0.001)
        assert bus == pytest.approx(busbw("all_reduce", 3, size, us * 1e-6) / 1e9, rel=0.02, abs=0.001)


def test_links_has_a_figure_for_every_pair_and_names_the_slowest():
    head, names, *rows, last = printed("links.py", "--large", 65536, "--rounds", 3, ranks=3)
    assert head == "3 ranks, gloo, pairs in parallel" and names.split() == ["GB/s", "rank", "1", "rank", "2"]
    assert rows[2].split() == ["µs", "rank", "1", "rank", "2"]
    large, small = ([float(x) for row in part for x in row.split()[2:]] for part in (rows[:2], rows[3:]))
    assert len(large) == len(small) == 3 and all(x > 0 for x in large + small)
    pairs = dict(zip(("0 and 1", "0 and 2", "1 and 2"), large, strict=True))
    slowest = next(pair for pair in pairs if f"slowest: ranks {pair}, " in last)
    assert pairs[slowest] == min(large)


@pytest.mark.parametrize("n", [2, 5, 64])
def test_each_pair_of_links_plays_once_and_no_rank_twice_in_a_turn(n: int):
    turns = runpy.run_path(str(SCRIPTS / "links.py"))["turns"]
    parallel, alone = turns(n, False), turns(n, True)
    every = [*combinations(range(n), 2)]
    assert sorted(sum(parallel, [])) == every and sum(alone, []) == every
    assert all(len({*sum(pairs, ())}) == 2 * len(pairs) for pairs in parallel)
    assert len(parallel) == (n if n % 2 else n - 1) and len(alone) == n * (n - 1) // 2


def test_scaling_curve_has_columns_that_belong_together():
    flags = "--strong", "--bf16", "--recompute", "--batch", 6
    said = printed("scaling_curve.py", "--steps", 2, "--peak-tflops", 0.1, *flags, ranks=2)
    head, *rows = [line.split() for line in said]
    assert head == ["ranks", "tokens/s", "efficiency", "waits", "MFU"]
    assert [int(row[0]) for row in rows] == [1, 2]
    first = float(rows[0][1].replace(",", ""))
    for n, rate, efficiency, waits, mfu in rows:
        per_rank = float(rate.replace(",", "")) / int(n)
        assert float(efficiency.rstrip("%")) == pytest.approx(100 * per_rank / first, abs=1)
        flops = TransformerConfig().flops_per_token("none")
        assert float(mfu.rstrip("%")) == pytest.approx(100 * per_rank * flops / 0.1e12, rel=0.02, abs=0.1)
        assert 0 <= float(waits.rstrip("%")) < 100
