"""The figure that the README shows: times, memory and behaviour after failures, on the largest measured world size."""

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402
from report import KINDS, after_failure, left_behind, number, seconds  # noqa: E402

OURS, OTHERS = "#0072B2", "#9A9A9A"  # Okabe and Ito's blue, and grey
SHADES = {"good": "#CFE3F1", "partly": "#FBE9C6", "bad": "#F3C6AE"}  # light blue, yellow, vermillion
PANELS = (
    ("first_cold_s", "first result,\ncold kernel", seconds),
    ("first_ready_s", "first result,\nwhen ready", seconds),
    ("warm_s", "next call", seconds),
    ("total_MB", "memory of all\nprocesses", lambda value: number(value, "MB")),
)


def draw(result: dict, path: Path) -> None:
    """Write the figure as PNG."""
    ranks = str(max(result["ranks"]))
    tools = [(t["name"], t["ranks"][ranks]) for t in result["tools"].values() if ranks in t.get("ranks", {})]
    tools = tools[::-1]
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        height = 0.52 * len(tools)
        figure = plt.figure(figsize=(11, 2 * height + 2.6), layout="constrained")
        above, below = figure.subfigures(2, 1, height_ratios=[height + 1.1, height + 1.0])
        bars(above, tools)
        matrix(below, tools)
        figure.suptitle(
            f"Starting {ranks} ranks from a notebook, {result['machine']['cores']} cores", fontweight="bold"
        )
        figure.savefig(path, dpi=150, metadata={"Software": None})
        plt.close(figure)


def bars(figure, tools: list) -> None:
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for axis, (key, title, write) in zip(axes, PANELS, strict=True):
        values = [at.get(key) for _, at in tools]
        known = [value for value in values if value]
        left = min(known, default=1) / 3
        for y, (name, _) in enumerate(tools):
            if values[y] is None:
                axis.text(left, y, " not measured", va="center", color="#555555")
                continue
            ours = name.startswith("course_utils")
            axis.barh(y, values[y] - left, left=left, height=0.62, color=OURS if ours else OTHERS)
            axis.text(values[y], y, " " + write(values[y]), va="center", fontweight="bold" if ours else "normal")
        axis.set_xscale("log")
        axis.set_xlim(left, max(known, default=1) * 8)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("MB (log scale)" if key.endswith("MB") else "seconds (log scale)")
        axis.tick_params(axis="y", length=0)
        axis.set_yticks(range(len(tools)), [name for name, _ in tools])


def quality(outcome: dict | None, kind: str) -> str:
    if not outcome or "unavailable" in outcome or outcome["gave_up_after_s"] or not outcome["next_call_works"]:
        return "bad"
    named = kind == "interrupt" or (outcome["names_rank"] and outcome["names_cause"])
    return "good" if named else "partly"


def matrix(figure, tools: list) -> None:
    axis = figure.subplots()
    heads = [*KINDS.values(), "SIGKILL to the kernel"]
    for y, (_, at) in enumerate(tools):
        for x, kind in enumerate(KINDS):
            outcome = at.get("failures", {}).get(kind)
            back, said = after_failure(outcome)
            if kind == "interrupt" and outcome and "next_call_works" in outcome:
                said = said.partition("; ")[2]
            cell(
                axis, x, y, back.replace(" (gave up after", ", gave up after").rstrip(")"), said, quality(outcome, kind)
            )
        left = left_behind(at)
        cell(
            axis,
            len(KINDS),
            y,
            f"{left} left" if left != "none" else "nothing left",
            "",
            "good" if left == "none" else "bad",
        )
    axis.set_xlim(-0.5, len(heads) - 0.5)
    axis.set_ylim(-0.5, len(tools) - 0.5)
    axis.set_xticks(range(len(heads)), heads)
    axis.xaxis.tick_top()
    axis.set_yticks(range(len(tools)), [name for name, _ in tools])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    figure.supxlabel(
        "seconds from the event to the prompt; blue: rank and cause named, next call works; "
        "yellow: next call works; orange: prompt or next call lost, or processes left",
        fontsize=8,
    )


def cell(axis, x: int, y: int, line: str, below: str, shade: str) -> None:
    axis.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=SHADES[shade], linewidth=0))
    axis.text(x, y + (0.17 if below else 0), line, ha="center", va="center", fontsize=8.5)
    if below:
        axis.text(
            x,
            y - 0.2,
            below.replace("names neither rank nor cause", "names nothing"),
            ha="center",
            va="center",
            fontsize=6.8,
        )
