"""Traces: Meta's published figures on the recorded ones, calls matched among ranks, odd and damaged files."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import cloudpickle
import pytest
from conftest import ROOT

from course_utils.traces import (
    RECORDED,
    Event,
    Trace,
    aligned,
    breakdown,
    kind,
    last_to_arrive,
    load,
    matched,
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


def test_the_figures_are_those_of_meta_s_tool():
    for case, published in HTA.items():
        assert figures(part(*case)) == pytest.approx(published, abs=0.011), case


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


def test_a_kernel_belongs_to_the_step_that_launched_it():
    first, second = load("two_machines")[0].steps
    events = load("two_machines")[0].events
    [begin] = [e.start for e in events if e.name == f"ProfilerStep#{second}"]
    kernels = [e for e in events if e.category == "kernel"]
    assert any(e.start > begin for e in kernels if e.step == first), "the GPU is behind the CPU"
    assert all(e.start >= begin for e in kernels if e.step == second)


# ---------------------------------------------------------------------------------------------- the functions


def event(name: str, start: float, end: float, category: str = "kernel", step: int | None = 1) -> Event:
    return Event(name, category, start, end, 0, step, {})


def trace_of(*events: Event, rank: int = 0) -> Trace:
    return Trace(rank, 2, tuple(sorted(events, key=lambda e: e.start)))


def test_time_is_split_without_counting_anything_twice():
    trace = trace_of(
        event("gemm", 0, 10), event("gemm", 5, 12), event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 8, 20),
        event("Memcpy HtoD", 18, 25, "gpu_memcpy"), event("gemm", 30, 40), event("aten::mm", 0, 100, "cpu_op"),
    )
    assert breakdown(trace) == {
        "total": 40, "idle": 5, "compute": 22, "communication": 12, "overlap": 4, "exposed": 8,
    }
    assert spans(trace, "copy") == [(18, 25)]


def test_an_empty_trace_names_the_trap():
    with pytest.raises(ValueError, match="trace of rank 0 holds no events: .* on_trace_ready"):
        breakdown(trace_of())
    assert set(breakdown(trace_of(event("step", 0, 9, "user_annotation"))).values()) == {0.0}


def test_on_cpu_ranks_operators_compute_and_the_call_of_a_collective_does_not():
    kinds = {"aten::mm": "compute", "c10d::allreduce_": "other", "record_param_comms": "other"}
    assert {name: kind(event(name, 0, 1, "cpu_op"), False) for name in kinds} == kinds
    assert kind(event("gloo:all_reduce", 0, 1, "user_annotation"), False) == "communication"
    assert kind(event("nccl:all_reduce", 0, 1, "user_annotation"), True) == "other", "its kernel counts"


# ------------------------------------------------------------------------------------------------ process groups


def on_mesh(rank: int, starts: dict[int, float]) -> Trace:
    """A rank of HSDP 2 x TP 2 whose calls in tp begin at these times; they end 100 us after the last rank's begin."""
    events, ranks = [], [rank - rank % 2, rank - rank % 2 + 1]
    for number, own in starts.items():
        last = max(own, 5100.0 * (number + 1) if 3 in ranks else own)
        args = {"Process Group Name": str(ranks), "Process Group Ranks": str(ranks)}
        events.append(Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", own, last + 100, 7, 1, args))
    return Trace(rank, 4, tuple(events))


def slow_rank_3() -> list[Trace]:
    """Ten layers of 100 us, with an all-reduce over tp; rank 3 needs 5 ms more in each, so that rank 2 waits for it."""
    healthy = {n: 200.0 * n for n in range(10)}
    late = {n: 5100.0 * (n + 1) for n in range(10)}
    waiting = {n: 5100.0 * n + 100 for n in range(10)}
    return [on_mesh(rank, {2: waiting, 3: late}.get(rank, healthy)) for rank in range(4)]


def test_calls_are_matched_within_their_group_and_right_clocks_stay():
    ranks = slow_rank_3()
    rows = matched(ranks)
    assert len(rows) == 20, "ten of each of two groups"
    assert {tuple(place for place, event in enumerate(row) if event) for row in rows} == {(0, 1), (2, 3)}
    assert last_to_arrive(rows)[1] == [0, 0, 0, 50_000]
    assert aligned(ranks) == ranks
    elsewhere = [*ranks[:2], ranks[2], ranks[3].shifted(7e6)]
    assert last_to_arrive(matched(aligned(elsewhere)))[1] == [0, 0, 0, pytest.approx(50_000)]


def test_a_kernel_has_the_group_of_its_call(tmp_path: Path):
    group = {"Process Group Name": "3", "Process Group Ranks": "[0, 1, ..., 7]"}
    span = {"ph": "X", "ts": 1, "dur": 2, "pid": 1, "tid": 1}
    events = [span | {"name": "record_param_comms", "cat": "cpu_op", "args": {"External id": 9, **group}},
              span | {"name": "ncclDevKernel_AllReduce", "cat": "kernel", "args": {"External id": 9}}]  # fmt: skip
    told = {"rank": 1, "world_size": 16, "pg_config": [{"pg_name": "3", "ranks": [*range(8)]}]}
    (tmp_path / "x.json").write_text(json.dumps({"distributedInfo": told, "traceEvents": events}))
    assert list(numbered(load(tmp_path)[0])) == [(("3", tuple(range(8))), "ncclDevKernel_AllReduce", 0)]


# ------------------------------------------------------------------------------------------------ what is refused


#: A trace of 900 us, of which 300 compute and 200 communicate.
BOTH = [
    {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": place, "args": {}}
    for place, (name, cat, ts, dur) in enumerate((
        ("ProfilerStep#1", "user_annotation", 1000, 900), ("aten::mm", "cpu_op", 1100, 300),
        ("gloo:all_reduce", "user_annotation", 1500, 200),
    ))
]
GOOD = json.dumps({"distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": BOTH})
MM = {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 1, "dur": 2, "pid": 2, "tid": 0}

#: Traces that are odd, and right all the same.
READABLE = {
    "a control character in a name": GOOD.replace("aten::mm", "aten::mm\x01 in <string>\n"),
    "a list that was not closed, after a comma": json.dumps(BOTH)[:-1] + ",\n",
}


@pytest.mark.parametrize("text", READABLE.values(), ids=READABLE)
def test_odd_traces_give_the_right_figures(tmp_path: Path, text: str):
    (tmp_path / "rank-0.json").write_text(text, encoding="utf-8")
    [trace] = load(tmp_path)
    times = breakdown(trace)
    assert trace.rank == 0 and [times[name] for name in ("total", "compute", "communication", "idle")] == [
        600, 300, 200, 100,
    ]  # fmt: skip


#: Text of rank-0.json, and what is to be said of it.
DAMAGED = {
    "cut in a word": (GOOD[: GOOD.index("aten::mm") + 3], "rank-0.json ends early"),
    "a log": ("2026-11-28 step 1 loss 2.0", "rank-0.json is not a trace in Chrome's JSON format: it begins with '2026"),
    "two processes": (json.dumps({"traceEvents": [*BOTH, MM]}), "rank-0.json holds 2 processes"),
}


@pytest.mark.parametrize(("text", "says"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_trace_is_told_in_one_sentence(tmp_path: Path, text: str, says: str):
    (tmp_path / "rank-0.json").write_text(text)
    with pytest.raises(ValueError, match=says) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)
