"""Traces: Meta's published figures on the recorded ones, and a late rank found in live ones."""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from course_utils import launch
from course_utils.traces import (
    RECORDED,
    Event,
    Trace,
    aligned,
    breakdown,
    ending_together,
    kind,
    last_to_arrive,
    length,
    load,
    matched,
    merge,
    numbered,
    spans,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

FOLDER = ROOT / "course_utils" / "traces" / "recorded"
#: Run, its trace, whether the last step counts -> idle, compute, other busy time in % of all, overlap in % of
#: communication. HTA 0.5.0 with pandas 2.3.3 on the published files, with its defaults (no rounding for host_bound;
#: see below) or include_last_profiler_step; of runs that are cut to their first steps, on the recorded files.
HTA = {
    ("host_bound", 0, False): (77.23, 17.66, 5.10, 14.76),
    ("host_bound", 0, True): (76.16, 17.51, 6.33, 15.61),
    ("imbalance", 0, False): (53.56, 17.71, 28.74, 11.81),
    ("imbalance", 1, False): (54.72, 22.57, 22.72, 20.05),
    ("imbalance", 0, True): (55.21, 17.20, 27.59, 14.95),
    ("imbalance", 1, True): (52.89, 22.09, 25.02, 19.93),
    ("tiny_all_reduces", 0, False): (44.71, 36.45, 18.84, 0.0),
    ("tiny_all_reduces", 0, True): (46.65, 35.17, 18.17, 0.0),
    ("two_machines", 0, False): (22.67, 60.40, 16.92, 40.31),
    ("two_machines", 1, False): (19.50, 54.56, 25.94, 62.98),
    ("two_machines", 0, True): (20.75, 60.83, 18.43, 41.10),
    ("two_machines", 1, True): (12.74, 62.54, 24.72, 66.24),
}


def figures(trace: Trace) -> tuple[float, ...]:
    times = breakdown(trace)
    shares = {name: 100 * value / times["total"] for name, value in times.items()}
    other = 100 - shares["idle"] - shares["compute"]
    return shares["idle"], shares["compute"], other, 100 * times["overlap"] / times["communication"]


def part(run: str, number: int, last: bool) -> Trace:
    trace = load(run)[number]
    return trace if last else trace.of_steps(trace.steps[:-1])


@pytest.mark.parametrize(("case", "published"), HTA.items())
def test_the_figures_are_those_of_meta_s_tool(case: tuple[str, int, bool], published: tuple[float, ...]):
    assert figures(part(*case)) == pytest.approx(published, abs=0.011)


def inwards(trace: Trace) -> Trace:
    """As HTA reads times with fractions: starts up, ends down, to whole microseconds."""
    rounded = (e._replace(start=math.ceil(e.start), end=math.floor(e.end)) for e in trace.events)
    return replace(trace, events=tuple(rounded))


@pytest.mark.parametrize(
    ("last", "published"), [(False, (77.78, 17.26, 4.97, 14.31)), (True, (76.68, 17.11, 6.21, 15.14))]
)
def test_rounding_makes_the_difference_to_its_defaults(last: bool, published: tuple[float, ...]):
    """The only recorded trace with fractions of a microsecond, in kernels of a few microseconds."""
    assert figures(inwards(part("host_bound", 0, last))) == pytest.approx(published, abs=0.011)
    assert figures(part("host_bound", 0, last))[-1] - published[-1] == pytest.approx(0.46, abs=0.015)


def test_the_recorded_traces_are_small_and_name_nobody():
    files = sorted(FOLDER.glob("*.json.gz"))
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_000_000
    assert {path.name.rsplit("-", 1)[0] for path in files} == set(RECORDED)
    notice = (FOLDER / "NOTICE").read_text()
    assert "f4d0062c382f42bd8a74838bcdad1916c7d5d2da" in notice and "MIT License" in notice
    for path in files:
        raw = json.loads(gzip.decompress(path.read_bytes()))
        assert set(raw) == {"distributedInfo", "gpu", "source", "traceEvents"}
        assert set(raw["distributedInfo"]) == {"backend", "rank", "world_size"}
        private = r"/(home|tmp|data|usr|mnt|root)/|\.(com|net|py|cpp)\b|user(?!_annotation)|@|twshared"
        assert not re.search(private, json.dumps(raw["traceEvents"]))


def test_a_step_has_what_it_launched():
    trace = load("tiny_all_reduces")[0]
    for step in trace.steps:
        calls = numbered(trace.of_steps([step])).values()
        assert len(calls) == 404 and {call.name for call in calls} == {"ncclKernel_AllReduce_RING_LL_Sum_float"}


def test_a_kernel_belongs_to_the_step_that_launched_it():
    first, second = load("two_machines")[0].steps
    events = load("two_machines")[0].events
    [begin] = [e.start for e in events if e.name == f"ProfilerStep#{second}"]
    kernels = [e for e in events if e.category == "kernel"]
    assert any(e.start > begin for e in kernels if e.step == first), "the GPU is behind the CPU"
    assert all(e.start >= begin for e in kernels if e.step == second)


def test_the_rank_that_computes_longer_comes_last():
    """Of a sampled trace: only what ends together can be one collective."""
    ranks = load("imbalance")
    rows = ending_together(ranks, within=1000)
    assert len(rows) == 5
    assert all(second.start > first.start for first, second in rows)
    times = [breakdown(trace) for trace in ranks]
    assert times[1]["compute"] > 1.25 * times[0]["compute"]
    assert last_to_arrive(rows)[0] == [0, 5]
    assert len(matched(ranks)) == 10, "by their numbers, calls that have nothing to do with each other would match"


def test_two_machines_differ_in_the_copies_of_a_step():
    a100, v100 = (trace.of_steps([1009]) for trace in load("two_machines"))
    assert ("A100" in a100.gpu, "V100" in v100.gpu) == (True, True)
    copies = [sum(e.name == "cudaMemcpyAsync" for e in trace.events) for trace in (a100, v100)]
    assert copies == [38, 802]


# ---------------------------------------------------------------------------------------------- the functions


def event(name: str, start: float, end: float, category: str = "kernel", step: int | None = 1) -> Event:
    return Event(name, category, start, end, 0, step, {})


def trace_of(*events: Event, rank: int = 0) -> Trace:
    return Trace(rank, 2, tuple(sorted(events, key=lambda e: e.start)))


def test_intervals_merge():
    assert merge([(5, 6), (0, 2), (1, 3), (3, 4), (0, 1)]) == [(0, 4), (5, 6)]
    assert merge([(0, 10), (1, 2)]) == [(0, 10)]
    assert merge([]) == [] and length([(0, 4), (5, 6)]) == 5
    assert last_to_arrive([]) == ([], [])


def test_time_is_split_without_counting_anything_twice():
    trace = trace_of(
        event("gemm", 0, 10), event("gemm", 5, 12), event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 8, 20),
        event("Memcpy HtoD", 18, 25, "gpu_memcpy"), event("gemm", 30, 40), event("aten::mm", 0, 100, "cpu_op"),
    )
    assert breakdown(trace) == {
        "total": 40, "idle": 5, "compute": 22, "communication": 12, "overlap": 4, "exposed": 8,
    }
    assert spans(trace, "copy") == [(18, 25)]


def test_an_empty_trace_has_no_time():
    assert set(breakdown(trace_of()).values()) == {0.0}


def test_on_cpu_ranks_operators_compute_and_the_call_of_a_collective_does_not():
    kinds = {"aten::mm": "compute", "c10d::allreduce_": "other", "record_param_comms": "other"}
    assert {name: kind(event(name, 0, 1, "cpu_op"), False) for name in kinds} == kinds
    assert kind(event("gloo:all_reduce", 0, 1, "user_annotation"), False) == "communication"
    assert kind(event("nccl:all_reduce", 0, 1, "user_annotation"), True) == "other", "its kernel counts"


def test_clocks_that_differ_are_put_right():
    fast, slow = load("two_machines")[0], load("two_machines")[0].shifted(5e6)
    assert all(b.start - a.start == pytest.approx(5e6) for a, b in matched([fast, slow]))
    assert all(b.start == pytest.approx(a.start, abs=1e-3) for a, b in matched(aligned([fast, slow])))


# ------------------------------------------------------------------------------------------------- live traces


def train(folder: str, late: int, steps: int = 3) -> None:
    """Each step: the late rank multiplies matrices once all others are at their gradients."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)  # a bucket for each layer
    square = torch.randn(512, 512)

    def save(profiler) -> None:
        profiler.export_chrome_trace(f"{folder}/rank{rank}.json.gz")

    plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=save) as profiler:
        for step in range(1 + steps):
            loss = model(torch.randn(8, 64)).sum()
            if rank == late:
                store.wait([f"{step} {other}" for other in range(world_size) if other != late])
                for _ in range(20):
                    square @ square
            store.set(f"{step} {rank}", "")
            loss.backward()
            profiler.step()


def most(values: list[float]) -> int:
    """The rank with the largest value."""
    return values.index(max(values))


@pytest.mark.guard(120)
@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_is_named_and_the_others_wait(tmp_path: Path, late: int):
    launch(train, str(tmp_path), late, world_size=3)
    ranks = load(tmp_path)
    assert [trace.rank for trace in ranks] == [0, 1, 2] and all(trace.steps == [1, 2, 3] for trace in ranks)
    rows = matched(ranks)
    assert len(rows) == len(numbered(ranks[0])) >= 6
    assert most(last_to_arrive(rows)[1]) == late
    times = [breakdown(trace) for trace in ranks]
    assert most([-part["exposed"] for part in times]) == late, "the late rank waits least"
    assert most([part["compute"] for part in times]) == late
    elsewhere = [ranks[0], ranks[1].shifted(3e6), ranks[2]]  # another host's clock, three seconds fast
    assert most(last_to_arrive(matched(elsewhere))[1]) == 1
    assert most(last_to_arrive(matched(aligned(elsewhere)))[1]) == late


def export_at_the_end(folder: str, steps: int) -> None:
    plan = schedule(wait=1, warmup=1, active=2)  # and from the beginning again
    with profile(activities=[ProfilerActivity.CPU], schedule=plan) as profiler:
        for _ in range(steps):
            dist.all_reduce(torch.ones(4))
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{dist.get_rank()}.json")


@pytest.mark.parametrize(("steps", "recorded"), [(4, [2, 3]), (5, []), (6, [6])])
def test_what_is_exported_at_the_end_is_where_the_schedule_stands(tmp_path: Path, steps: int, recorded: list[int]):
    launch(export_at_the_end, str(tmp_path), steps, world_size=2)
    assert [trace.steps for trace in load(tmp_path)] == [recorded, recorded]
    assert [bool(trace.events) for trace in load(tmp_path)] == [bool(recorded)] * 2


def test_without_step_there_is_no_file(tmp_path: Path):
    """https://github.com/pytorch/pytorch/issues/91682"""

    def save(profiler) -> None:
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))

    plan = schedule(wait=1, warmup=1, active=2, repeat=1)
    for steps in (0, 4):
        with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=save) as profiler:
            for step in range(4):
                torch.ones(4)
                if step < steps:
                    profiler.step()
        assert (tmp_path / "trace.json").exists() == bool(steps)


# ------------------------------------------------------------------------------------------------ what is refused


def test_refusals_say_what_there_is(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no trace at hta; recorded ones are host_bound, "):
        load("hta")
    with pytest.raises(FileNotFoundError, match="no trace at "):
        load(tmp_path)
    for text in ("not json", "[1", '{"a": 1}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match="x.json is not a trace"):
            load(tmp_path / "x.json")
