"""``scripts/scaling_curve.py`` under torchrun: a line for each number of ranks, columns that belong together."""

from __future__ import annotations

import pytest

from course_utils.programs import torchrun
from course_utils.transformer import TransformerConfig

pytestmark = pytest.mark.guard(120)


@pytest.mark.parametrize("flags", [(), ("--strong", "--bf16", "--recompute", "--batch", 6)], ids=["weak", "strong"])
def test_columns_belong_together(flags: tuple):
    said = torchrun("scaling_curve.py", "--steps", 2, "--peak-tflops", 0.1, *flags, ranks=3, gpus=False)
    head, *rows = [line.split() for line in said.splitlines()]
    assert head == ["ranks", "tokens/s", "efficiency", "waits", "MFU"]
    assert [int(row[0]) for row in rows] == [1, 2, 3]
    first = float(rows[0][1].replace(",", ""))
    assert rows[0][2] == "100%"
    for n, rate, efficiency, waits, mfu in rows:
        per_rank = float(rate.replace(",", "")) / int(n)
        assert float(efficiency.rstrip("%")) == pytest.approx(100 * per_rank / first, abs=1)
        flops = TransformerConfig().flops_per_token("none")
        assert float(mfu.rstrip("%")) == pytest.approx(100 * per_rank * flops / 0.1e12, rel=0.02, abs=0.1)
        assert 0 <= float(waits.rstrip("%")) < 100


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(RuntimeError, match=r"--batch must be a multiple of \[1, 2\] with --strong, got 3"):
        torchrun("scaling_curve.py", "--strong", "--batch", 3, ranks=2, gpus=False)


def test_without_a_peak_there_is_no_mfu():
    said = torchrun("scaling_curve.py", "--steps", 1, "--batch", 1, ranks=1, gpus=False)
    assert said.splitlines()[1].split()[-1] == "-"
