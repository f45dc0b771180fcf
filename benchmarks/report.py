"""The result as Markdown tables: times and memory with ratios, behaviour after failures, and the targets."""

KINDS = {
    "error": "error on one rank",
    "death": "SIGKILL to one rank",
    "hang": "one rank skips a collective",
    "interrupt": "interrupt",
}
KERNEL_KILLED = ("kernel_killed_idle", "kernel_killed_busy")


def targets(result: dict) -> list[dict]:
    """Each target with its limit, what was measured (None: not measured) and whether it is met."""
    ranks = str(max(result["ranks"]))
    at = {key: tool["ranks"][ranks] for key, tool in result["tools"].items() if ranks in tool.get("ranks", {})}
    ours = at.pop("course", {})
    kept = [m["warm_s"] for key, m in at.items() if result["tools"][key]["keeps_workers"] and m.get("warm_s")]
    warm = ours.get("warm_s")
    left = [ours[key]["left"] for key in KERNEL_KILLED if key in ours]
    failures, own = ours.get("failures", {}), result.get("own", {})
    empty = own.get("warm", {}).get("empty_s")
    many, ledger = own.get("many", {}), own.get("ledger", {})
    rows = [
        ("first all-reduce, server ready", "s", 0.3, ours.get("first_ready_s")),
        ("first all-reduce, cold kernel", "s", 2.0, ours.get("first_cold_s")),
        ("warm call of an empty function", "ms", 3.0, empty and empty * 1e3),
        ("warm call with a small all-reduce", "ms", 3.0, warm and warm * 1e3),
        ("warm call, against the next best that keeps workers", "x", -3.0, ratio(min(kept, default=None), warm)),
        ("memory that a rank adds: growth of PSS, all processes", "MB", 20.0, ours.get("added_per_rank_MB")),
        ("PSS of a rank, with its share of the server's pages", "MB", 20.0, ours.get("pss_per_rank_MB")),
        (f"{many.get('ranks', 32)} ranks from a cold kernel", "s", 6.0, many.get("cold_s")),
        ("error on a rank reported", "s", 2.0, failures.get("error", {}).get("seconds")),
        ("death of a rank reported", "s", 2.0, failures.get("death", {}).get("seconds")),
        ("processes left 5 s after SIGKILL to the kernel", "", 0.0, max(left, default=None)),
        ("step of DDP with the ledger, against without", "x", 1.05, ledger.get("ratio_watching")),
    ]
    return [
        {
            "target": name,
            "unit": unit,
            "sense": "at most" if limit >= 0 else "at least",
            "limit": abs(limit),
            "measured": value,
            "met": None if value is None else bool(value <= limit if limit >= 0 else value >= -limit),
        }
        for name, unit, limit, value in rows
    ]


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None


def number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "–"
    digits = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {unit}".strip()


def seconds(value: float | None) -> str:
    """A time with its unit, ms below 0.1 s."""
    return number(value * 1e3, "ms") if value is not None and value < 0.1 else number(value, "s")


def against(value: float | None, base: float | None) -> str:
    times = ratio(value, base)
    return seconds(value) + (f" ({number(times)}×)" if times and times != 1 else "")


def after_failure(outcome: dict | None) -> tuple[str, str, str]:
    """When the prompt came back, what the message named, and whether the next call works."""
    if outcome is None:
        return "not measured", "", ""
    gave_up = outcome["gave_up_after_s"]
    back = seconds(outcome["seconds"]) if gave_up is None else f"never (gave up after {gave_up:.0f} s)"
    named = [word for word in ("rank", "cause") if outcome["names_" + word]]
    said = "names " + " and ".join(named) if named else "names nothing"
    return back, said, "next call " + ("works" if outcome["next_call_works"] else "fails")


def left_behind(at: dict) -> str:
    counts = [at[key]["left"] for key in KERNEL_KILLED if key in at]
    if not counts:
        return "not measured"
    return "nothing" if not any(counts) else "1 process" if max(counts) == 1 else f"{max(counts)} processes"


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def markdown(result: dict) -> str:
    """The whole report."""
    parts = [part for ranks in result["ranks"] for part in tables(result, ranks)]
    rows = [
        [
            target["target"],
            f"{target['sense']} {number(target['limit'], target['unit'])}",
            number(target["measured"], target["unit"]),
            {True: "yes", False: "no", None: "not measured"}[target["met"]],
        ]
        for target in result["targets"]
    ]
    parts += ["## Targets", table(["target", "limit", "measured", "met"], rows)]
    machine = result["machine"]
    head = f"Measured on {machine['cores']} cores, torch {machine['torch']}. In brackets: times this course's figure."
    return "\n\n".join([*parts, "\n".join([head, *notes(result)])])


def tables(result: dict, ranks: int) -> list[str]:
    """Heading and two tables for one world size."""
    measured = {key: tool["ranks"].get(str(ranks), {}) for key, tool in result["tools"].items() if "ranks" in tool}
    base = measured.get("course", {})
    costs, failures = [], []
    for key, at in measured.items():
        name = result["tools"][key]["name"]
        times = [against(at.get(k), base.get(k)) for k in ("first_cold_s", "first_ready_s", "warm_s")]
        sizes = [number(at.get(k), "MB") for k in ("pss_per_rank_MB", "added_per_rank_MB", "total_MB")]
        costs.append([name, *times, *sizes])
        after = ["; ".join(filter(None, after_failure(at.get("failures", {}).get(kind)))) for kind in KINDS]
        failures.append([name, *after, left_behind(at)])
    times = ["first result, cold kernel", "first result, ready", "next call"]
    sizes = ["PSS of a rank", "added by a rank", "all processes"]
    return [
        f"## {ranks} ranks",
        table(["tool", *times, *sizes], costs),
        table(["tool", *KINDS.values(), "left 5 s after SIGKILL to the kernel"], failures),
    ]


def notes(result: dict) -> list[str]:
    """What a reader of the tables must know: how a tool was used, and what could not be measured and why."""
    lines = []
    for tool in result["tools"].values():
        version = " ".join(v for k, v in tool.get("versions", {}).items() if k not in ("torch", "ipykernel"))
        name = f"- {tool['name']} {version}".rstrip()
        lines += [f"{name}: {tool['note']}"] if tool["note"] else []
        lines += [f"{name}: not measured: {tool['unavailable']}"] if "unavailable" in tool else []
        for ranks, at in tool.get("ranks", {}).items():
            if at.get("warm_calls_failed"):
                calls = at["warm_calls"] + at["warm_calls_failed"]
                lines.append(f"{name}, {ranks} ranks: {at['warm_calls_failed']} of {calls} repeated calls failed")
            for part, reasons in at.get("failed_attempts", {}).items():
                lines.append(f"{name}, {ranks} ranks, {part}: measured after {len(reasons)} attempts that failed")
            lines += [f"{name}, {ranks} ranks, {part}: {why}" for part, why in at.get("unavailable", {}).items()]
    own = result.get("own", {})
    if "warm" in own:
        empty, whole, inside = (
            number(own["warm"][key] * 1e3, "ms") for key in ("empty_s", "with_all_reduce_s", "all_reduce_s")
        )
        lines.append(
            f"- warm call on {own['warm']['ranks']} ranks: {empty} empty, {whole} with an all-reduce of {inside}"
        )
    if "ledger" in own:
        watching, recording = (number(own["ledger"][key]) for key in ("ratio_watching", "ratio_recording"))
        lines.append(f"- ledger, DDP on {own['ledger']['ranks']} ranks: {watching}× watching, {recording}× recording")
    if "many" in own:
        lines.append(f"- {own['many']['ranks']} ranks when the server is ready: {seconds(own['many']['ready_s'])}")
    return lines + [f"- this course, {part}: {why}" for part, why in own.get("unavailable", {}).items()]
