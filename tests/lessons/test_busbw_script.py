"""``scripts/busbw.py`` under torchrun: a line for each size, columns that belong together, bad sizes refused."""

from __future__ import annotations

import pytest

from course_utils.costs import algbw, busbw
from course_utils.programs import torchrun

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


def test_bad_sizes_are_refused():
    with pytest.raises(RuntimeError, match="4 <= smallest <= largest"):
        torchrun("busbw.py", "--smallest", 8, "--largest", 4, ranks=1)
