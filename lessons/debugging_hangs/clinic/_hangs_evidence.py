"""Evidence of the hang clinic: each kind runs the program once more, in the way that it needs (private)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from itertools import pairwise, takewhile

from ._cases import Case, Evidence, Finding, Symptom
from ._hangs_lines import SAME_WAY
from ._hangs_runs import Trace, absent, compared, stopped, traced


def source_of(case: Case) -> tuple[str, str, int]:
    """Source, name and number of ranks of a patient's program."""
    return inspect.getsource(case.program), case.program.__name__, case.conditions


def _stacks(case: Case, symptom: Callable[[], Symptom]) -> Finding:
    rows, places = [], []
    for rank, row in enumerate(symptom().log):
        found = re.search(r"patient\.py, line (\d+): (.*)", row)
        if found:
            rows.append(f"rank {rank} stands in line {found[1]}: {found[2]}")
        else:
            rows.append(f"rank {rank} has ended")
        places.append(f"rank {rank} line {found[1]}" if found else f"rank {rank} ended")
    return Finding("\n".join(rows), {"stands": ", ".join(places)})


def _record(case: Case, symptom: Callable[[], Symptom]) -> Finding:
    traces = stopped(*source_of(case))
    rows = [f"rank {rank}: {', '.join(trace.calls) or 'no collective'}" for rank, trace in enumerate(traces)]
    alike = len({trace.calls for trace in traces}) == 1
    record = ("alike" if traces[0].calls else "no collective") if alike else "different"
    return Finding("\n".join(rows), {"record": record})


def _prints(case: Case, symptom: Callable[[], Symptom]) -> Finding:
    source, *how = source_of(case)
    ways = [trace.way for trace in stopped(source, *how)]
    lines = [way["lines"] for way in ways]
    shared = len([*takewhile(lambda alike: len(set(alike)) == 1, zip(*lines, strict=False))])  # lines run alike
    if 0 < shared < min(map(len, lines)):
        line = lines[0][shared - 1]  # the last one before the ranks part
        where = f"line {line}, {source.splitlines()[line - 1].strip()}"
        then = [next((f"line {b}" for a, b in pairwise(own[shared - 1:]) if a == line), "stays there") for own in lines]
        rows = [f"The ranks part at: {where}", *(f"rank {rank}: then {text}" for rank, text in enumerate(then))]
    else:
        rows = [SAME_WAY]
    rows += [f"rank {rank} has caught {way['caught']}" for rank, way in enumerate(ways) if way["caught"]]
    return Finding("\n".join(rows))


def _fingerprint(case: Case, symptom: Callable[[], Symptom]) -> Finding:
    ways = [trace.way["values"] for trace in stopped(*source_of(case))]
    names = [name for name in ways[0] if all(name in way for way in ways)]
    rows = [f"{name}: {', '.join(f'rank {rank} {way[name]}' for rank, way in enumerate(ways))}" for name in names]
    differ = [name for name in names if len({way[name] for way in ways}) > 1]
    return Finding("\n".join(rows) or "no tensors", {"values": ", ".join(differ) or "none"})


def _barrier(case: Case, symptom: Callable[[], Symptom]) -> Finding:
    text, ranks = absent(*source_of(case))
    return Finding(text, {"absent": ranks})


def _words(traces: tuple[Trace, ...]) -> str:
    return "\n".join(f"rank {rank}: {trace.said or 'finished'}" for rank, trace in enumerate(traces))


def _time_outs(case: Case, symptom: Callable[[], Symptom]) -> Finding:
    return Finding(_words(traced(*source_of(case))))


_KINDS = (("Detected mismatch", "a mismatch"), ("Error: Global rank", "another error"),
          ("monitoredBarrier", "a rank that does not come"), ("Timed out", "a time-out"), ("closed", "a time-out"))


def _detail(case: Case, symptom: Callable[[], Symptom]) -> Finding:
    text = _words(traced(*source_of(case), detail=True))
    if "has died" in text:  # with DETAIL, PyTorch 2.13 crashes on gloo as soon as DDP is made
        return Finding(text)
    return Finding(text, {"detail": next((kind for sign, kind in _KINDS if sign in text), "nothing")})


def _verify(case: Case, symptom: Callable[[], Symptom]) -> Finding:
    text = compared(*source_of(case))
    return Finding(text or "nothing differs", {"differs": text or "nothing"})


#: A cause has a few facts more than the evidence shows in so many words: what kind of difference it is, and on what the
#: ranks part.
EVIDENCE = {
    "stacks": Evidence("where each rank stands (py-spy dump on each)", 3, _stacks,
                       {"stands": "the line in which each rank stands"}),
    "verify": Evidence("the course's launcher compares all calls: launch(..., verify=True)", 4, _verify,
                       {"differs": "what differs first", "kind": "the kind of difference"}),
    "monitored barrier": Evidence("a monitored barrier at each barrier and at the end of the program", 4, _barrier,
                                  {"absent": "ranks that do not come"}),
    "flight record": Evidence("the collectives that each rank has called, in order (on by default)", 5, _record,
                              {"record": "the records of the ranks"}),
    "fingerprint": Evidence("a checksum of each tensor, on each rank, when it ends or waits", 5, _fingerprint,
                            {"values": "tensors that are not equal on all ranks"}),
    "prints": Evidence("another run with a print behind every line", 6, _prints,
                       {"on": "what the ranks part on"}),
    "detail": Evidence("another run with TORCH_DISTRIBUTED_DEBUG=DETAIL", 8, _detail,
                       {"detail": "what DETAIL reports"}),
    "time-outs": Evidence("what each rank says once its wait is over", 10, _time_outs),
}
