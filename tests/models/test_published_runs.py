"""Published training runs are complete, agree with themselves, and their exam is apart."""

from __future__ import annotations

import dataclasses

from course_utils import recorded
from course_utils.hardware import GPUS
from lessons.parallelism_3d.planner import published_runs
from lessons.parallelism_3d.planner.published import PublishedRun

ALL = published_runs(outcome=None)
RAN = published_runs()
#: Recomputed share against the printed one where the source itself rounds otherwise: Llama 3's 400 of 989 is 40 %.
ROUNDED_OTHERWISE = {"llama-3-2"}


def off(run: PublishedRun) -> list[str]:
    """What of a row does not agree with the rest of it."""
    found = []

    def check(name: str, one: float, other: float, within: float) -> None:
        if abs(one / other - 1) > within:
            found.append(f"{name}: {one:g} and {other:g}")

    check("world", run.tp * run.pp * run.cp * run.dp, run.gpus, 0)
    if run.accumulation is not None:
        check("batch", run.dp * run.microbatch * run.accumulation, run.batch, 0)
    flops = run.flops_per_token(bool(run.counts_recompute))
    if run.outcome == "ran" and run.tflops and run.counts_attention:
        check("TFLOP/s", run.rate * flops / 1e12, run.tflops, 0.01)
    if run.step_seconds and run.tokens_per_gpu:
        check("seconds", run.step_seconds, run.batch * run.length / run.tokens_per_gpu / run.gpus, 0.005)
    peak = run.peak_tflops or GPUS[run.gpu].flops["bf16"] / 1e12
    if run.mfu and run.tokens_per_gpu and run.counts_attention and run.id not in ROUNDED_OTHERWISE:
        check("MFU", run.tokens_per_gpu * run.flops_per_token() / 1e12 / peak, run.mfu, 0.012)
    share = run.hfu if run.counts_recompute else run.mfu
    if share and run.tflops and run.id not in ROUNDED_OTHERWISE:
        check("share of peak", run.tflops / peak, share, 0.006 / share)
    if run.parameters:
        at = dataclasses.replace(run.model, context=2048)  # learnt positions are parameters
        check("parameters", at.parameter_count, run.parameters, 0.03)
    return found


def test_rows_agree_with_themselves():
    assert {run.id: bad for run in ALL if (bad := off(run))} == {}


def test_the_exam_is_one_repository_and_nothing_else_is_on_its_gpus():
    exam = published_runs(role="exam")
    assert {run.role for run in ALL} == {"known", "held_out", "exam"} and len(exam) == 68
    assert {(run.title, run.gpu) for run in exam} == {("MosaicML, llm-foundry, MPT Training Benchmarks", "h100")}
    assert not [run for run in RAN if run.title == exam[0].title and run.gpu == "h100" and run.role != "exam"]


def test_runs_that_lessons_name_are_the_same():
    tables = {
        "megatron-weak": recorded.MEGATRON_RUNS, "megatron-strong": recorded.PTD_RUNS,
        "megatron-zero3": recorded.ZERO3_RUNS, "llama-3": recorded.LLAMA3_RUNS,
    }  # fmt: skip
    for table, rows in tables.items():
        for run, row in zip(published_runs(table=table), rows, strict=True):
            assert run.model.name == row.model
            for name in ("gpus", "batch", "length", "tflops"):
                assert getattr(run, name) == getattr(row, name), (run.id, name)
            for name in ("tp", "pp", "cp", "dp", "microbatch", "virtual", "zero"):
                assert getattr(run, name) == row.layout.get(name, 1), (run.id, name)
