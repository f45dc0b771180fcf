"""Choose message size, nodes and links; see what each all-reduce would take."""

from __future__ import annotations

from matplotlib.figure import Figure

from course_utils.costs import (
    ALL_REDUCE_ALGORITHMS,
    TwoLevelCluster,
    all_reduce_seconds,
    flat_cluster,
)
from course_utils.draw import charts
from course_utils.draw.bars import name_rows
from course_utils.draw.controls import checkbox, choice, slider
from course_utils.draw.explorer import Explorer
from course_utils.draw.style import new_figure
from course_utils.hardware import LINKS
from course_utils.units import format_bytes

from .figures import algorithm_color, draw_crossover, spoken

_SIZES = tuple(2**k for k in range(8, 35))


def _draw(cluster: TwoLevelCluster, size: int, algorithms: list[str]) -> tuple[Figure, str]:
    """Return the picture for one setting, and what it shows in words."""
    times = {name: all_reduce_seconds(name, size, cluster) for name in algorithms}
    ranked = sorted(times, key=times.get)
    figure, (left, right) = new_figure(1, 2, size=(11.4, 4.0), gridspec_kw={"width_ratios": [1, 1.35]})
    start = times[ranked[0]] / 2
    for y, name in enumerate(ranked):
        look = {"color": algorithm_color(name), "linewidth": 5 if y == 0 else 2, "solid_capstyle": "butt"}
        left.plot([start, times[name]], [y, y], **look)
        left.plot([times[name]], [y], "o", color=algorithm_color(name), markersize=9 if y == 0 else 6)
        charts.beside(left, charts.duration(times[name]), (times[name], y), (9, 0), va="center",
                      fontweight="bold" if y == 0 else "normal")
    left.set(xscale="log", xlim=(start, times[ranked[-1]] * 3), xlabel="time, logarithmic",
             title=f"modelled: all-reduce of {format_bytes(size)}")
    left.minorticks_off()
    left.set_xticks([])
    name_rows(left, map(spoken, ranked))
    spans = draw_crossover(right, cluster, algorithms, _SIZES, "modelled, over size; dots: the fastest changes")
    right.axvline(size, color="#DDDDDD", linewidth=4, zorder=0)
    first, second = ranked[:2]
    by_size = ", ".join(f"{spoken(name)} up to {format_bytes(end)}" for name, _, end in spans)
    return figure, (
        f"{cluster.nodes} x {cluster.per_node} ranks, {format_bytes(size)}: {spoken(first)} is fastest with "
        f"{charts.duration(times[first])}, then {spoken(second)} with {charts.duration(times[second])}. "
        f"Fastest by size: {by_size}."
    )


def _render(size: int, nodes: int, gpus: int, near: str, far: str, adds: bool) -> tuple[Figure, str]:
    if nodes * gpus == 1:
        raise ValueError("one rank has nothing to reduce; choose more nodes or GPUs")
    intra, inter = ((LINKS[key].latency, 1 / LINKS[key].bandwidth) for key in (near, far))
    cluster = TwoLevelCluster(nodes, gpus, intra, inter) if nodes > 1 else flat_cluster(gpus, *intra)
    # not the root: the model lets any number of messages arrive there at once
    left_out = {"root"} if adds else {"root", "in_network"}
    return _draw(cluster, size, [name for name in ALL_REDUCE_ALGORITHMS if name not in left_out])


def algorithm_chooser() -> Explorer:
    """Compare the times of all-reduce algorithms on links of your choice, modelled by `costs.all_reduce_seconds`.

    Each GPU has a port of its own to the network. One node has no network: the second link is not used.
    """
    inside = [(link.name, key) for key, link in LINKS.items() if key.startswith(("nvlink", "pcie"))]
    between = [(link.name, key) for key, link in LINKS.items() if key.startswith(("ib_", "eth_"))]
    size = slider("size S", [(format_bytes(size), size) for size in _SIZES], 2**20)
    nodes, gpus = slider("nodes", [2**k for k in range(11)], 2), slider("GPUs each", [1, 2, 4, 8, 16, 32, 72], 4)
    near, far = choice("in a node", inside, "nvlink4"), choice("between", between, "ib_ndr")
    adds = checkbox("switches add (NVLS, SHARP)")

    def adapt(_: str | None) -> None:
        far.disabled = nodes.value == 1

    rows = [{"size": size, "nodes": nodes, "gpus": gpus}, {"near": near, "far": far, "adds": adds}]
    return Explorer(rows, _render, adapt)
