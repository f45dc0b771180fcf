"""``scripts/busbw.py`` under torchrun: a line for each size, columns that belong together, bad sizes refused."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from course_utils import launch
from course_utils.costs import algbw, busbw
from course_utils.programs import SCRIPTS, run_program, torchrun

pytestmark = pytest.mark.guard(120)


@pytest.mark.parametrize("n", [1, 3])
def test_columns_belong_together(n: int):
    said = torchrun("busbw.py", "--smallest", 4096, "--largest", 70000, "--calls", 2, ranks=n)
    head, names, *rows = said.splitlines()
    assert head == f"{n} ranks, gloo" and names.split() == ["bytes", "µs", "S/t", "GB/s", "busbw", "GB/s"]
    assert [int(row.split()[0]) for row in rows] == [4096, 4 * 4096, 16 * 4096]
    for row in rows:
        size, us, rate, bus = map(float, row.split())
        assert rate == pytest.approx(algbw(size, us * 1e-6) / 1e9, rel=0.02, abs=0.001)
        assert bus == pytest.approx(busbw("all_reduce", n, size, us * 1e-6) / 1e9, rel=0.02, abs=0.001)


def reductions(program: str) -> list[tuple[str, int]]:
    """On a rank: run busbw.py; return operation and size of its all-reduces."""
    seen, usual = [], dist.all_reduce

    def noted(x, op=dist.ReduceOp.SUM):
        seen.append((str(op), x.nbytes))
        return usual(x, op=op)

    dist.all_reduce = noted
    try:
        run_program(program, "--smallest", "64", "--largest", "64", "--calls", "4", silent=True)
    finally:
        dist.all_reduce = usual
    return seen


def test_it_times_sums_which_nvswitches_add():
    (found, *_) = launch(reductions, str(SCRIPTS / "busbw.py"), world_size=2, init=False)
    sums = ("RedOpType.SUM", 64)
    assert found == [sums] * 9 + [("RedOpType.MAX", 4), sums]  # to warm up and timed; the slowest rank; the check


def test_bad_sizes_are_refused():
    with pytest.raises(RuntimeError, match="4 <= smallest <= largest"):
        torchrun("busbw.py", "--smallest", 8, "--largest", 4, ranks=1)
