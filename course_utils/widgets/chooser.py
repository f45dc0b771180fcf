"""Choose message size, nodes and links; see what each all-reduce would take."""

from __future__ import annotations

import ipywidgets as widgets
from matplotlib.figure import Figure

from ..costs import ALL_REDUCE_ALGORITHMS, Cluster, all_reduce_seconds, flat
from ..hardware import LINKS
from ..plots import algorithm_color, draw_crossover, new_figure, spoken
from ..units import format_bytes
from ._explorer import Explorer, Picture

__all__ = ["algorithm_chooser"]

_SIZES = tuple(2**k for k in range(8, 35))


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _draw(cluster: Cluster, size: int, algorithms: list[str]) -> tuple[Figure, str]:
    """Return the picture for one setting, and what it shows in words."""
    times = {name: all_reduce_seconds(name, size, cluster) for name in algorithms}
    ranked = sorted(times, key=times.get)
    figure, (left, right) = new_figure(1, 2, size=(11.4, 4.0), gridspec_kw={"width_ratios": [1, 1.35]})
    start = times[ranked[0]] / 2
    for y, name in enumerate(ranked):
        look = {"color": algorithm_color(name), "linewidth": 5 if y == 0 else 2, "solid_capstyle": "butt"}
        left.plot([start, times[name]], [y, y], **look)
        left.plot([times[name]], [y], "o", color=algorithm_color(name), markersize=9 if y == 0 else 6)
        left.annotate(_time(times[name]), (times[name], y), (9, 0), textcoords="offset points", va="center",
                      fontweight="bold" if y == 0 else "normal")
    left.set(xscale="log", xlim=(start, times[ranked[-1]] * 3), ylim=(len(ranked) - 0.4, -0.6),
             title=f"modelled: all-reduce of {format_bytes(size)}", xlabel="time, logarithmic")
    left.minorticks_off()
    left.set_xticks([])
    left.set_yticks(range(len(ranked)), [spoken(name) for name in ranked])
    left.tick_params(axis="y", length=0)
    spans = draw_crossover(right, cluster, algorithms, _SIZES, "modelled, over size; dots: the fastest changes")
    right.axvline(size, color="#DDDDDD", linewidth=4, zorder=0)
    first, second = ranked[:2]
    words = (
        f"{cluster.nodes} x {cluster.per_node} ranks, {format_bytes(size)}: {spoken(first)} is fastest with "
        f"{_time(times[first])}, then {spoken(second)} with {_time(times[second])}. Fastest by size: "
    )
    return figure, words + ", ".join(f"{spoken(name)} up to {format_bytes(end)}" for name, _, end in spans) + "."


def algorithm_chooser() -> widgets.Widget:
    """Compare the times of all-reduce algorithms on links of your choice, modelled by `costs.all_reduce_seconds`.

    Each GPU has a port of its own to the network. One node has no network: the second link is not used.
    """
    inside = [(link.name, key) for key, link in LINKS.items() if key.startswith(("nvlink", "pcie"))]
    between = [(link.name, key) for key, link in LINKS.items() if key.startswith(("ib_", "eth_"))]
    options = [(format_bytes(size), size) for size in _SIZES]
    size = widgets.SelectionSlider(options=options, value=2**20, description="size S", continuous_update=False)
    nodes = widgets.SelectionSlider(
        options=[2**k for k in range(11)], value=2, description="nodes", continuous_update=False
    )
    gpus = widgets.SelectionSlider(
        options=[1, 2, 4, 8, 16, 32, 72], value=4, description="GPUs each", continuous_update=False
    )
    near = widgets.Dropdown(options=inside, value="nvlink4", description="in a node")
    far = widgets.Dropdown(options=between, value="ib_ndr", description="between")
    adds = widgets.Checkbox(value=False, description="switches add (NVLS, SHARP)", indent=False)
    status, picture = widgets.HTML(), Picture()

    def draw(_=None) -> None:
        intra, inter = ((LINKS[key].latency, 1 / LINKS[key].bandwidth) for key in (near.value, far.value))
        cluster = Cluster(nodes.value, gpus.value, intra, inter) if nodes.value > 1 else flat(gpus.value, *intra)
        far.disabled = nodes.value == 1
        if cluster.ranks == 1:
            words = "<b>One rank has nothing to reduce; choose more nodes or GPUs.</b> The picture is the last one."
            status.value = f"<p>{words}</p>"
            picture.fade()
            return
        algorithms = [name for name in ALL_REDUCE_ALGORITHMS if adds.value or name != "in_network"]
        figure, status.value = _draw(cluster, size.value, algorithms)
        picture.show(figure)

    for control in (size, nodes, gpus, near, far, adds):
        control.observe(draw, "value")
    draw()
    return Explorer([[size, nodes, gpus], [near, far, adds]], status, picture)
