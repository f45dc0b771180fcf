"""The figure that the README shows: times, memory and behaviour after failures at the largest measured world size."""

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402
from report import KINDS, after_failure, left_behind, number, seconds  # noqa: E402

OURS, OTHERS = "#0072B2", "#9A9A9A"  # Okabe and Ito's blue, and grey
SHADES = {"good": "#CFE3F1", "partly": "#FBE9C6", "bad": "#F3C6AE", "none": "#EEEEEE"}
PANELS = (
    ("first_cold_s", "first result, cold kernel", seconds),
    ("first_ready_s", "first result, when ready", seconds),
    ("warm_s", "next call", seconds),
    ("total_MB", "memory, all processes", lambda value: number(value, "MB")),
)
LEGEND = (
    "Time from the event to the prompt. Blue: rank and cause are named and the next call works. "
    "Yellow: the next call works.\nOrange: the prompt or the next call is lost, or processes are left."
)


def draw(result: dict, path: Path) -> None:
    """Write the figure as PNG."""
    ranks = str(max(result["ranks"]))
    tools = [(t["name"], t["ranks"][ranks]) for t in result["tools"].values() if ranks in t.get("ranks", {})][::-1]
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = plt.figure(figsize=(11, 0.8 * len(tools) + 3), layout="constrained")
        above, below = figure.subfigures(2, 1, height_ratios=[0.32 * len(tools) + 1.2, 0.5 * len(tools) + 1.2])
        dots(above, tools)
        matrix(below, tools)
        cores = result["machine"]["cores"]
        figure.suptitle(f"{ranks} ranks from a Jupyter notebook on {cores} CPU cores (measured)", fontweight="bold")
        figure.savefig(path, dpi=130, metadata={"Software": None})
        plt.close(figure)


def dots(figure, tools: list) -> None:
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for axis, (key, title, write) in zip(axes, PANELS, strict=True):
        known = [at[key] for _, at in tools if at.get(key)] or [1]
        left = min(known) / 3
        for y, (name, at) in enumerate(tools):
            value = at.get(key)
            ours = name.startswith("course_utils")
            color = OURS if ours else OTHERS
            axis.hlines(y, left, value or left, color=color, linewidth=1)
            axis.plot(value or left, y, "o" if value else "", color=color, markersize=8 if ours else 6)
            label = write(value) if value else "not measured"
            axis.text(value or left, y, "  " + label, va="center", fontweight="bold" if ours else "normal")
        axis.set_ylim(-0.6, len(tools) - 0.4)
        axis.set_xscale("log")
        axis.set_xlim(left, (max(known) / left) ** 1.5 * left)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("MB, log scale" if key.endswith("MB") else "s, log scale")
        axis.tick_params(axis="y", length=0)
        axis.set_yticks(range(len(tools)), [name for name, _ in tools])


def quality(kind: str, outcome: dict | None) -> str:
    if outcome is None:
        return "none"
    if outcome["gave_up_after_s"] or not outcome["next_call_works"]:
        return "bad"
    return "good" if kind == "interrupt" or (outcome["names_rank"] and outcome["names_cause"]) else "partly"


def matrix(figure, tools: list) -> None:
    axis = figure.subplots()
    for y, (_, at) in enumerate(tools):
        for x, kind in enumerate(KINDS):
            outcome = at.get("failures", {}).get(kind)
            back, said, following = after_failure(outcome)
            below = following if kind == "interrupt" else "\n".join(filter(None, [said, following]))
            back = back.replace("never (gave up after", "no prompt (").replace("( ", "(")
            box(axis, x, y, back, below, quality(kind, outcome))
        left = left_behind(at)
        shade = {"nothing": "good", "not measured": "none"}.get(left, "bad")
        box(axis, len(KINDS), y, left, "", shade)
    heads = [*KINDS.values(), "left 5 s after SIGKILL\nto the kernel"]
    axis.set_xlim(-0.5, len(heads) - 0.5)
    axis.set_ylim(-0.5, len(tools) - 0.5)
    axis.set_xticks(range(len(heads)), heads)
    axis.xaxis.tick_top()
    axis.set_yticks(range(len(tools)), [name for name, _ in tools])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    figure.supxlabel(LEGEND, fontsize=8)


def box(axis, x: int, y: int, line: str, below: str, shade: str) -> None:
    axis.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=SHADES[shade], linewidth=0))
    axis.text(x, y + (0.2 if below else 0), line, ha="center", va="center", fontsize=8.5)
    axis.text(x, y - 0.17, below, ha="center", va="center", fontsize=6.8, linespacing=1.05)
