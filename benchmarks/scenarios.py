"""What is measured of one tool at one number of ranks; each scenario has a kernel of its own and hard limits."""

import re
import socket
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from kernel import Cell, Kernel, kernel

from tools import Setting, Tool

SETUP_LIMIT = 120.0  # s, for starting engines and the like
CALL_LIMIT = 45.0  # s, for a call that should simply work
TOOL_LIMIT = 60  # s, the limit that each tool is given for a collective, where it has one
AFTER_KILL = 5.0  # s after which processes count as left behind
SETTLE = 0.5  # s, for ranks that have just said where they are to get into the collective
MEGA = 1e6

CAUSE = {
    "error": r"ValueError: bad batch",
    "death": r"SIGKILL|[Ss]ignal 9\b|exit ?code\W{0,8}-9\b",
    "hang": r"all_?reduce",
    "interrupt": r"KeyboardInterrupt|Interrupted|signal: 2",
}
ON_SLEEP = ("death", "interrupt")  # done to ranks of which one sleeps and the others wait for it
WORKLOAD_OF = {"error": "error", "death": "asleep", "hang": "hang", "interrupt": "asleep"}
NAMED = r"(?i)(?<!\[)\b(?:local_)?(?:rank|process|engine|worker)[\s:=#]{0,12}(\d+)\b(?![,-]\d)|\[(\d+):\w+\]"
FIRST_CAUSE = r"(?is)(?:root|first) cause.{0,200}?\brank[\s:]{0,12}(\d+)"


@dataclass(frozen=True)
class Effort:
    """How much to measure: repeats of a first result (fewer after `repeat_seconds`), warm calls, limits in seconds.

    `reading_pause` stands between set-up and first call when the tool is to be ready, in seconds.
    """

    repeats: int = 5
    repeat_seconds: float = 15.0
    warm_calls: int = 200
    warm_seconds: float = 8.0
    hang_limit: int = 10
    give_up: float = 35.0
    reading_pause: float = 2.0


QUICK = Effort(repeats=1, warm_calls=20, warm_seconds=1.0, hang_limit=2, give_up=20.0, reading_pause=0.3)


def setting(ranks: int, limit: int = TOOL_LIMIT) -> Setting:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Setting(ranks, limit, probe.getsockname()[1])


def right(cell: Cell, ranks: int) -> bool:
    """Whether a call of `allreduce` ended and showed the sum of 1..ranks."""
    return cell.ended and not cell.failed and f"{ranks * (ranks + 1) / 2}" in cell.text


def must(cell: Cell, what: str, ranks: int = 0) -> Cell:
    if not cell.ended or cell.failed or (ranks and not right(cell, ranks)):
        raise RuntimeError(f"{what}: {cell.text.strip()[-300:] or f'no answer after {cell.seconds:.0f} s'}")
    return cell


def first_result_cold(tool: Tool, python: Path, ranks: int) -> float:
    """Seconds from an idle, empty kernel to the result: imports, starting and the first all-reduce."""
    s = setting(ranks)
    with kernel(python) as k:
        return must(k.run(*tool.setup(s), tool.call("allreduce", s), limit=SETUP_LIMIT), "first result", ranks).seconds


def ready(k: Kernel, tool: Tool, s: Setting, effort: Effort) -> None:
    must(k.run(*tool.setup(s), limit=SETUP_LIMIT), "set-up")
    time.sleep(effort.reading_pause)


def first_result_ready(tool: Tool, python: Path, ranks: int, effort: Effort) -> float:
    """Seconds to the first result once all that can be done before it has been done."""
    s = setting(ranks)
    with kernel(python) as k:
        ready(k, tool, s, effort)
        return must(k.run(tool.call("allreduce", s), limit=CALL_LIMIT), "first result", ranks).seconds


def warm_calls(tool: Tool, python: Path, ranks: int, effort: Effort) -> dict:
    """Median time of further calls, taken in the kernel; memory of a rank; then the idle kernel is killed."""
    s = setting(ranks)
    with kernel(python) as k:
        ready(k, tool, s, effort)
        must(k.run(tool.call("allreduce", s), limit=CALL_LIMIT), "first result", ranks)
        must(k.run(tool.call("memory", s), limit=CALL_LIMIT), "memory", ranks)
        memory = [list(map(float, mark[2:])) for mark in k.wait_for_marks("memory", range(ranks), 5).values()]
        loop = (
            "%env COURSE_BENCH_LOOP=1\n"
            "import time as _time\n"
            f"_times, _failed, _end = [], 0, _time.perf_counter() + {effort.warm_seconds}\n"
            f"while len(_times) + _failed < 3 or (len(_times) < {effort.warm_calls} and _time.perf_counter() < _end):\n"
            "    _start = _time.perf_counter()\n"
            f"    try:\n        {tool.timed('allreduce', s)}\n"
            "    except Exception:\n        _failed += 1\n        continue\n"
            "    _times.append(_time.perf_counter() - _start)\n"
            "open('times.txt', 'w').write(' '.join(map(str, [_failed, *_times])));"
        )
        must(k.run(loop, limit=effort.warm_seconds + 4 * CALL_LIMIT), "further calls")
        failed, *times = map(float, (k.marks.parent / "times.txt").read_text().split())
        left = killed(k)
    return {
        "warm_s": statistics.median(times) if times else None,
        "warm_calls": len(times),
        "warm_calls_failed": int(failed),
        "pss_per_rank_MB": statistics.mean(pss for pss, _ in memory) * 1024 / MEGA,
        "private_per_rank_MB": statistics.mean(private for _, private in memory) * 1024 / MEGA,
        "kernel_killed_idle": left,
    }


def killed(k: Kernel) -> dict:
    """SIGKILL the kernel; what is still there `AFTER_KILL` seconds later."""
    k.kill()
    begin = time.monotonic()
    while (left := k.processes()) and time.monotonic() - begin < AFTER_KILL:
        time.sleep(0.1)
    return {"left": len(left), "seconds": None if left else time.monotonic() - begin}


def kernel_killed(tool: Tool, python: Path, ranks: int, effort: Effort) -> dict:
    """Memory of all processes together; then the kernel gets SIGKILL in the middle of a call."""
    s = setting(ranks)
    with kernel(python) as k:
        empty = total_pss(k)
        ready(k, tool, s, effort)
        without_ranks = empty if tool.starts_ranks_in_setup else total_pss(k)
        k.start(tool.call("asleep", s))
        k.wait_for_marks("asleep", range(ranks), CALL_LIMIT)
        time.sleep(SETTLE)
        total = total_pss(k)
        return {
            "kernel_killed_busy": killed(k),
            "added_per_rank_MB": (total - without_ranks) / ranks / MEGA,
            "total_MB": (total - empty) / MEGA,
        }


def total_pss(k: Kernel) -> int:
    """Proportional set size of the kernel and everything it started, in bytes."""
    total = 0
    for process in k.processes():
        try:
            total += process.memory_full_info().pss
        except (psutil.Error, AttributeError):
            continue
    return total


def failure(kind: str, tool: Tool, python: Path, ranks: int, effort: Effort) -> dict:
    """An error on one rank, SIGKILL to it, a collective that it skips, or an interrupt of the kernel; what follows.

    Times count from the event. If the prompt has not come back after `give_up` seconds the kernel is interrupted, as a
    person would do, before the next call is tried.
    """
    s = setting(ranks, effort.hang_limit if kind == "hang" else TOOL_LIMIT)
    odd = ranks // 2
    with kernel(python) as k:
        ready(k, tool, s, effort)
        must(k.run(tool.call("allreduce", s), limit=CALL_LIMIT), "the call before the event", ranks)
        request = k.start(tool.call(WORKLOAD_OF[kind], s))
        marks = k.wait_for_marks(WORKLOAD_OF[kind], range(ranks) if kind in ON_SLEEP else [odd], CALL_LIMIT)
        event = float(marks[odd][0])
        if kind in ON_SLEEP:
            time.sleep(SETTLE)
            event = time.time()
            psutil.Process(int(marks[odd][1])).kill() if kind == "death" else k.interrupt()
        cell = k.wait(request, effort.give_up)
        if not cell.ended:
            k.interrupt()
        back = cell.ended or k.wait(request, 10).ended
        following = k.run(tool.call("allreduce", s), limit=effort.give_up) if back else None
    return {
        "seconds": cell.at - event if cell.ended else None,
        "gave_up_after_s": None if cell.ended else effort.give_up,
        "back_at_all": back,
        "names_rank": names(kind, cell.text, odd, ranks),
        "names_cause": bool(re.search(CAUSE[kind], cell.text)),
        "next_call_works": following is not None and right(following, ranks),
        "next_call_s": following.seconds if following else None,
        "text": cell.text.strip(),
    }


def names(kind: str, text: str, rank: int, ranks: int) -> bool:
    """Whether `text` singles out `rank`: as the root cause, else as the first rank named alone.

    Of a hang it must say what the rank did: every rank may time out, and the first to do so is chance.
    """
    if kind == "hang":
        return bool(re.search(rf"(?i)\brank {rank} (?:called|never|did not|failed to|skipped|is missing)", text))
    cause = re.search(FIRST_CAUSE, text)
    if cause:
        return int(cause.group(1)) == rank
    named = (int(one or other) for one, other in re.findall(NAMED, text))
    return next((n for n in named if n < ranks), None) == rank
