"""The result as Markdown tables: times and memory with ratios, behaviour after failures, and the targets."""

KINDS = {
    "error": "error on one rank",
    "death": "SIGKILL to one rank",
    "hang": "one rank skips a collective",
    "interrupt": "interrupt",
}


def targets(result: dict) -> list[dict]:
    """Each target with its limit, what was measured (None: not measured) and whether it is met."""
    course = result["tools"].get("course", {}).get("ranks", {})
    four = course.get("4") or next(iter(course.values()), {})
    own = result.get("own", {})
    others = [
        at["warm_s"]
        for key, tool in result["tools"].items()
        for ranks, at in tool.get("ranks", {}).items()
        if key != "course" and tool["keeps_workers"] and ranks == "4" and at.get("warm_s")
    ]
    warm = four.get("warm_s")
    failures = four.get("failures", {})
    left = [four[key]["left"] for key in ("kernel_killed_idle", "kernel_killed_busy") if key in four]
    rows = [
        ("first all-reduce, server ready", "s", "<=", 0.3, four.get("first_ready_s")),
        ("first all-reduce, cold kernel", "s", "<=", 2.0, four.get("first_cold_s")),
        ("warm call", "ms", "<=", 3.0, warm and warm * 1e3),
        ("warm call, times faster than the next best that keeps workers", "x", ">=", 3.0, ratio(min(others, default=None), warm)),
        ("memory that a rank adds (growth of PSS, all processes)", "MB", "<=", 20.0, four.get("added_per_rank_MB")),
        ("PSS of a rank (its share of the server's pages counted)", "MB", "<=", 20.0, four.get("pss_per_rank_MB")),
        (f"{own.get('many', {}).get('ranks', 32)} ranks from a cold kernel", "s", "<=", 6.0, own.get("many", {}).get("cold_s")),
        ("error on a rank reported", "s", "<=", 2.0, failures.get("error", {}).get("seconds")),
        ("death of a rank reported", "s", "<=", 2.0, failures.get("death", {}).get("seconds")),
        ("processes left 5 s after SIGKILL to the kernel", "", "<=", 0, max(left, default=None)),
        ("step of DDP with the ledger, against without", "x", "<=", 1.05, own.get("ledger", {}).get("ratio_watching")),
    ]  # fmt: skip
    return [
        {
            "target": name,
            "unit": unit,
            "sense": sense,
            "limit": limit,
            "measured": value,
            "met": met(sense, limit, value),
        }
        for name, unit, sense, limit, value in rows
    ]


def met(sense: str, limit: float, value: float | None) -> bool | None:
    return None if value is None else bool(value <= limit if sense == "<=" else value >= limit)


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None


def number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "–"
    digits = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}" + (f" {unit}" if unit else "")


def seconds(value: float | None) -> str:
    """A time with its unit, ms below 0.1 s."""
    if value is None:
        return "–"
    return number(value * 1e3, "ms") if value < 0.1 else number(value, "s")


def against(value: float | None, base: float | None) -> str:
    times = ratio(value, base)
    return seconds(value) + (f" ({number(times)}×)" if times and times != 1 else "")


def after_failure(outcome: dict | None) -> tuple[str, str]:
    """Two short phrases: when the prompt came back; what the message named and whether the next call works."""
    if outcome is None:
        return "–", ""
    if "unavailable" in outcome:
        return "not run", outcome["unavailable"]
    gave_up = outcome["gave_up_after_s"]
    back = seconds(outcome["seconds"]) if gave_up is None else f"never (gave up after {gave_up:.0f} s)"
    named = [word for word in ("rank", "cause") if outcome["names_" + word]]
    said = "names " + " and ".join(named) if named else "names neither rank nor cause"
    return back, f"{said}; next call {'works' if outcome['next_call_works'] else 'fails'}"


def left_behind(at: dict) -> str:
    counts = [at[key]["left"] for key in ("kernel_killed_idle", "kernel_killed_busy") if key in at]
    return "–" if not counts else "none" if not any(counts) else f"{max(counts)} processes"


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def markdown(result: dict) -> str:
    """The whole report."""
    parts = []
    for ranks in result["ranks"]:
        measured = {key: tool["ranks"].get(str(ranks), {}) for key, tool in result["tools"].items() if "ranks" in tool}
        base = measured.get("course", {})
        rows, failures = [], []
        for key, at in measured.items():
            name = result["tools"][key]["name"]
            times = [against(at.get(k), base.get(k)) for k in ("first_cold_s", "first_ready_s", "warm_s")]
            sizes = [number(at.get(k), "MB") for k in ("pss_per_rank_MB", "added_per_rank_MB", "total_MB")]
            rows.append([name, *times, *sizes])
            cells = ["; ".join(filter(None, after_failure(at.get("failures", {}).get(kind)))) for kind in KINDS]
            failures.append([name, *cells, left_behind(at)])
        head = ["tool", "first result, cold kernel", "first result, ready", "next call"]
        parts += [
            f"## {ranks} ranks",
            table([*head, "PSS of a rank", "added by a rank", "all processes"], rows),
            table(["tool", *KINDS.values(), "left 5 s after SIGKILL to the kernel"], failures),
        ]
    rows = [
        [t["target"], f"{t['sense'].replace('<=', '≤').replace('>=', '≥')} {number(t['limit'], t['unit'])}",
         number(t["measured"], t["unit"]), {True: "yes", False: "no", None: "not measured"}[t["met"]]]
        for t in result["targets"]
    ]  # fmt: skip
    parts += ["## Targets (4 ranks)", table(["target", "limit", "measured", "met"], rows)]
    notes = [f"- {t['name']} {version_of(t)}: {t['note']}" for t in result["tools"].values() if t.get("note")]
    notes += [
        f"- {t['name']}: not measured. {t['unavailable']}" for t in result["tools"].values() if "unavailable" in t
    ]
    notes += [
        f"- {tool['name']}, {ranks} ranks: {at['warm_calls_failed']} of the repeated calls failed"
        for tool in result["tools"].values()
        for ranks, at in tool.get("ranks", {}).items()
        if at.get("warm_calls_failed")
    ]
    notes += [
        f"- {tool['name']}, {ranks} ranks, {part}: {reason}"
        for tool in result["tools"].values()
        for ranks, at in tool.get("ranks", {}).items()
        for part, reason in at.get("unavailable", {}).items()
    ]
    if "own" in result and "ledger" in result["own"]:
        ledger, many = result["own"]["ledger"], result["own"]["many"]
        notes.append(
            f"- ledger, DDP on {ledger['ranks']} ranks: {number(ledger['ratio_watching'])}× while watching, "
            f"{number(ledger['ratio_recording'])}× while recording; {many['ranks']} ranks when the server is ready: "
            f"{seconds(many['ready_s'])}"
        )
    machine = result["machine"]
    parts.append(
        "\n".join(
            [f"Measured on {machine['cores']} cores, torch {machine['torch']}. (n×): times the course's.", *notes]
        )
    )
    return "\n\n".join(parts)


def version_of(tool: dict) -> str:
    own = {k: v for k, v in tool.get("versions", {}).items() if k not in ("torch", "ipykernel")}
    return " ".join(own.values())
