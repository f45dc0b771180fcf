"""A machine or cluster drawn from its graph: one row per kind of device, links by kind and speed, a path on top."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from course_utils.draw import charts
from course_utils.draw.style import CENTRED, INK, SMALL, naming, new_figure, rank_color, tint
from course_utils.topology import Link, Path, Topology

_COLORS = {
    "NVLink": "#009E73", "node": "#009E73", "PCIe": "#0072B2", "bus": "#0072B2", "InfiniBand": "#A6568A",
    "network": "#A6568A", "Ethernet": "#A6568A",
}
_SLOW = "#D55E00"  # the bottleneck
_FILL = {"cpu": "#E6E6E6", "pcie": "#DCE9F3", "nic": "#F6E8F0", "switch": "#F6E8F0", "nvswitch": "#D8EEE6"}
_ROWS = ("switch", "nic", "hub", "cpu", "pcie", "pcie below", "gpu", "nvswitch")  # from the top
_ASIDE = {"fontsize": 8, "color": "#666666"}
_MOST = 16  # GPUs of one node that fit


def _color(link: Link) -> str:
    return _COLORS.get(link.kind.split()[0].partition("-")[0], "#777777")


def _width(link: Link, slowest: float) -> float:
    """Line width in points: half a point more for each doubling from the slowest link of the picture."""
    return 1.2 if math.isnan(link.bandwidth) else min(7.0, 1.2 + 0.55 * math.log2(link.bandwidth / slowest))


def _speed(link: Link) -> str:
    return f"{link.kind}: " + ("speed unknown" if math.isnan(link.bandwidth) else f"{link.bandwidth / 1e9:.4g} GB/s")


class _Scene:
    """What is drawn, and where: column `x` and row `y` of each device, `edges` of each node.

    Of several nodes, those where the path ends are drawn, or the first and the last; of many GPUs in one node, the
    first seven, the last, and the path's. `hidden` counts the GPUs left out of each node, `skipped` the nodes.
    """

    def __init__(self, topology: Topology, path: Path | None) -> None:
        self.topology, self.devices = topology, topology.devices
        self.near: dict[str, set[str]] = {name: set() for name in self.devices}
        for link in topology.links:
            self.near[link.a].add(link.b)
            self.near[link.b].add(link.a)
        on_path = path.devices if path else ()
        node_of = {name: device.node for name, device in self.devices.items() if not self.is_bar(name)}
        nodes = sorted(set(node_of.values()))
        ends = [node_of[name] for name in (*on_path[:1], *on_path[-1:]) if name in node_of]
        shown = sorted(list(dict.fromkeys([*ends, nodes[0], nodes[-1]]))[:2])
        gpus = {node: [gpu for gpu in topology.gpus if node_of[gpu] == node] for node in shown}
        spare = {node: [gpu for gpu in own[7:-1] if gpu not in on_path] if len(own) > _MOST else []
                 for node, own in gpus.items()}
        self.hidden, self.skipped = {node: len(own) for node, own in spare.items()}, len(nodes) - len(shown)
        gone = {name for name, node in node_of.items() if node not in shown or name in spare[node]}
        for name in self.devices:  # what serves only such GPUs goes with them
            served = {other for other in self.near[name] if self.kind(other) == "gpu"}
            if self.kind(name) in ("nic", "pcie", "nvswitch") and served and served <= gone:
                gone.add(name)
        self.names = [name for name in self.devices if name not in gone]
        rows = {name: self.row(name) for name in self.names}
        used = [row for row in _ROWS if row in rows.values()]
        self.y = {name: -float(used.index(row)) for name, row in rows.items()}
        self.x: dict[str, float] = {}
        self.edges: dict[int, tuple[float, float]] = {}
        left = 0.0
        for node in shown:
            right = self.place_node(node, left)
            self.edges[node] = left, right
            left = right + (1.9 if self.skipped or self.hidden[node] else 0.7)
        for name in self.names:  # bars and hubs are in the middle of what they join
            if name not in self.x:
                columns = [self.x[other] for other in self.near[name] if other in self.x]
                self.x[name] = sum(columns) / len(columns) if columns else 0.0
        self.width = max(right for _, right in self.edges.values())
        self.narrow = self.width > 13  # whether boxes have room for less than usual
        self.several = len(self.edges) > 1 or self.skipped > 0

    def kind(self, name: str) -> str:
        return self.devices[name].kind

    def is_bar(self, name: str) -> bool:
        return self.kind(name) in ("switch", "nvswitch")

    def row(self, name: str) -> str:
        kind, around = self.kind(name), {self.kind(other) for other in self.near[name]}
        if kind == "cpu" and around == {"cpu"} and len(self.near[name]) > 2:
            return "hub"
        if kind == "pcie" and "pcie" in around and "cpu" not in around:
            return "pcie below"
        return "cpu" if kind == "memory" else kind

    def place_node(self, node: int, left: float) -> float:
        """Give the devices of `node` columns from `left` on; return where the node ends.

        Below a CPU or PCIe switch come the switches it leads to, then its own GPUs, with its cards in their columns.
        """
        members = [name for name in self.names if self.devices[name].node == node and not self.is_bar(name)]
        members = [name for name in members if self.row(name) != "hub"]
        shared = {name for name in members if self.kind(name) == "nic" and len(self.near[name] & set(members)) > 1}

        def place(name: str, start: float) -> float:
            self.x[name] = end = start
            below = [o for o in members if o in self.near[name] and o not in self.x and o not in shared]
            kinds = {"gpu": ("nic",), "nic": ()}.get(self.kind(name), ("pcie", "gpu", "nic"))
            own = {kind: [other for other in below if self.kind(other) == kind] for kind in kinds}
            for bridge in own.pop("pcie", ()):
                end = place(bridge, end)
            wide = max(map(len, own.values()), default=0)
            for devices in own.values():
                for i, other in enumerate(devices):
                    place(other, end + i + (wide - len(devices)) / 2)
            end = max(end + wide, start + 1)
            self.x[name] = (start + end - 1) / 2
            return end

        for kind in ("cpu", "pcie", "gpu", "nic", "memory"):
            for name in members:
                if self.kind(name) == kind and name not in self.x and name not in shared:
                    left = place(name, left)
        return left

    def span(self, bar: str) -> tuple[float, float]:
        columns = [self.x[other] for other in self.near[bar] if other in self.x and other in self.names]
        return min(columns, default=0.0), max(columns, default=0.0)

    def ends(self, link: Link) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return where the line of `link` starts and ends: straight down to a switch that is drawn as a bar."""
        (xa, ya), (xb, yb) = ((self.x[name], self.y[name]) for name in (link.a, link.b))
        return (xb if self.is_bar(link.a) else xa, ya), (xa if self.is_bar(link.b) else xb, yb)


def _draw_link(ax: Axes, scene: _Scene, link: Link, **style) -> tuple[float, float]:
    """Draw `link`, bent where it joins two devices of one row; return its middle."""
    (xa, ya), (xb, yb) = scene.ends(link)
    if ya != yb or scene.kind(link.a) == "cpu":
        ax.plot([xa, xb], [ya, yb], solid_capstyle="butt", **style)
        return (xa + xb) / 2, (ya + yb) / 2
    bend = 0.45 / abs(xb - xa) ** 0.5
    start, end = sorted(((xa, ya), (xb, yb)))
    curve = FancyArrowPatch(
        start, end, arrowstyle="-", connectionstyle=f"arc3,rad={bend}", shrinkA=0, shrinkB=0, **style
    )
    ax.add_patch(curve)
    return (xa + xb) / 2, ya - bend * abs(xb - xa) / 2


def _draw_device(ax: Axes, scene: _Scene, name: str, faint: bool) -> None:
    device, x, y = scene.devices[name], scene.x[name], scene.y[name]
    left, right = scene.span(name) if scene.is_bar(name) else (x, x)
    fill, text, edge = to_rgb(_FILL.get(device.kind, "white")), name.partition(".")[2] or name, "#888888"
    if device.kind == "gpu":
        rank = scene.topology.gpus.index(name)
        fill, edge = tint(rank_color(rank)), rank_color(rank)
        text += f"\n{'r.' if scene.narrow or rank >= 100 else 'rank'} {rank}" if scene.several else ""
    elif device.kind in ("cpu", "nic") and device.detail:
        text += "\n" + device.detail.replace(", ", "\n")
    text = {"nvswitch": "NVSwitch", "switch": "network switch"}.get(device.kind, text)
    if faint:
        fill, edge = [0.6 + 0.4 * channel for channel in fill], "#CCCCCC"
    tall = 0.22 + 0.1 * (1 + text.count("\n"))
    box = FancyBboxPatch((left - 0.4, y - tall / 2), right - left + 0.8, tall, linewidth=1, zorder=4,
                         boxstyle="round,pad=0,rounding_size=0.06", facecolor=fill, edgecolor=edge)
    ax.add_patch(box)
    ax.text((left + right) / 2, y, text, fontsize=6.8 if scene.narrow else 7.5, zorder=5, linespacing=1.05,
            color="#707070" if faint else INK, **CENTRED)


def topology_picture(topology: Topology, path: Path | None = None) -> Figure:
    """Draw a machine or cluster, and `path` through it with its slowest link marked.

    A line's colour tells the kind of link, its width the bandwidth. GPUs have the colour of their rank. Nodes beyond
    two and GPUs beyond 16 in a node are counted, not drawn; those of the path are always drawn.
    """
    scene = _Scene(topology, path)
    on_path, path_links = (set(path.devices), list(path.links)) if path else (set(), [])
    rows = 1 - min(scene.y.values())
    figure, (ax,) = new_figure(size=(max(5.5, 2.9 + 0.66 * scene.width), 0.7 + 0.74 * rows))
    drawn = [link for link in topology.links if {link.a, link.b} <= set(scene.names)]
    slowest = min((link.bandwidth for link in drawn if not math.isnan(link.bandwidth)), default=1.0)
    labels: dict[str, tuple[str, list[float]]] = {}
    for link in drawn:
        faint = bool(path) and link not in path_links
        _, y = _draw_link(ax, scene, link, color=_color(link), linewidth=_width(link, slowest), zorder=2,
                          alpha=0.3 if faint else 1)
        text = _speed(link).replace(": ", ":\n") if scene.narrow else _speed(link)
        labels.setdefault(text, (_color(link), []))[1].append(y)
    for link in path_links:
        slow = link.bandwidth == path.bandwidth or math.isnan(link.bandwidth)
        at = _draw_link(ax, scene, link, color=_SLOW if slow else INK, linewidth=_width(link, slowest) + 1.2, zorder=3)
        if link == path.bottleneck:
            level = scene.y[link.a] == scene.y[link.b]
            text, offset = "unknown speed" if math.isnan(link.bandwidth) else "slowest", (0, 8) if level else (-9, 0)
            charts.beside(ax, text, at, offset, ha="center" if level else "right", va="center", fontsize=8,
                          zorder=6, **naming(_SLOW))
    for name in scene.names:
        _draw_device(ax, scene, name, bool(path) and name not in on_path)
    _frame(ax, scene)
    _label_kinds(ax, labels, scene.width)
    ax.set(xlim=(-1.4, scene.width + (1.5 if scene.narrow else 2.8)), ylim=(0.6 - rows, 0.45))
    ax.axis("off")
    ends = f": {path.devices[0]} → {path.devices[-1]}" if path else ""
    ax.set_title(topology.name + ends + (" (r.: rank)" if scene.several and scene.narrow else ""))
    return figure


def _frame(ax: Axes, scene: _Scene) -> None:
    """Draw a box around each node, and say what is left out."""
    inside = [scene.y[name] for name in scene.names if not scene.is_bar(name)]
    top, bottom = max(inside) + 0.32, min(inside) - 0.32
    for node, (left, right) in scene.edges.items():
        if scene.several:
            ax.add_patch(FancyBboxPatch((left - 0.78, bottom), right - left + 0.33, top - bottom, zorder=0, linewidth=0,
                                        boxstyle="round,pad=0,rounding_size=0.1", facecolor="#F2F2F2"))
            ax.text(left - 0.6, (top + bottom) / 2, f"node {node}", rotation=90, zorder=1, **CENTRED, **_ASIDE)
        if scene.hidden[node]:
            row = min(scene.y[name] for name in scene.names if scene.kind(name) == "gpu")
            ax.text(right - 0.45, row, f"{scene.hidden[node]} more", va="center", **_ASIDE)
    if scene.skipped:
        (_, right), (left, _) = scene.edges.values()
        ax.text((right + left - 1) / 2, (top + bottom) / 2, f"…\n{scene.skipped} more\nnodes", **CENTRED, **_ASIDE)


def _label_kinds(ax: Axes, labels: dict[str, tuple[str, list[float]]], width: float) -> None:
    """Write each kind of link at the right beside a piece of its line, level with the others, or moved apart."""
    last = math.inf
    for text, (color, ys) in sorted(labels.items(), key=lambda item: -sum(item[1][1]) / len(item[1][1])):
        last = min(sum(ys) / len(ys), last - 0.3 * (1 + text.count("\n")))
        ax.plot([width - 0.45, width - 0.15], [last, last], color=color, linewidth=3, solid_capstyle="butt")
        ax.text(width - 0.05, last, text, va="center", fontsize=SMALL, **naming(color))
