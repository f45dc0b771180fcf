"""Ranks of a cluster as a mesh of up to four dimensions: which share a group, and which share a node."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_utils.draw import charts
from course_utils.draw.style import CENTRED, FAINT, INK, RANK_COLORS, SMALL, WIDTH, new_figure, tint

from .planner import mesh_groups

#: By dimension of a mesh; what a group of it sends has the same colour in `figures`.
DIMENSION_COLORS = {"tp": RANK_COLORS[2], "cp": RANK_COLORS[4], "pp": RANK_COLORS[3], "dp": RANK_COLORS[1]}
_MOST, _FEW = 8, 4  # of a dimension that is drawn whole, of one where all four are larger than 1
_GAP = 1.4  # between panels, in cells
_WIDE = 40  # cells side by side

Place = tuple[float, float]


def dimension_color(name: str) -> str:
    """Return the colour of a dimension; one that has none of its own is grey."""
    return DIMENSION_COLORS.get(name, "#777777")


def short_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """Return ranks in words: the ends of an unbroken run, all of a few, else the first three and the last."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    shown = [str(rank) for rank in ranks]
    return ", ".join(shown if len(shown) <= most else [*shown[:3], "…", shown[-1]])


def mesh_grid(
    sizes: Mapping[str, int], title: str, *, per_node: int, rank: int, names_only: bool = False
) -> Figure:
    """Draw the ranks of a mesh in panels, nodes framed, with the groups of one rank in the colours of their dimensions.

    The last dimension runs along rows, the one before down columns, the others from panel to panel. Below stand the
    ranks of each coloured group, and over how many nodes they lie; with `names_only` only the dimensions.
    """
    found = mesh_groups(sizes)
    names = [name for name, size in sizes.items() if size > 1]
    groups = {name: next(group for group in found[name] if rank in group) for name in names}
    names = [""] * (4 - len(names)) + names
    grid = np.arange(math.prod(sizes.values())).reshape([sizes.get(name, 1) for name in names])
    most = (_FEW, _FEW, _FEW, _MOST) if names[0] else (_MOST,) * 4
    kept = [_kept(size, int(at), limit) for size, at, limit in
            zip(grid.shape, np.argwhere(grid == rank)[0], most, strict=True)]
    corners, wide, high = _corners(kept)
    cell = min(0.5, (WIDTH - 0.3) / (wide + 1.6), max(0.3, 5.4 / high))  # inches
    told = _tell(groups, rank, per_node, names_only)
    lines = min(1, len(told)) if names_only else len(told)
    size = (max(6.6, cell * (wide + 1.6) + 0.3), cell * (high + 0.5) + 0.5 + 0.22 * lines)
    figure, (ax,) = new_figure(size=size, title=fill(title, int(14 * size[0])))
    for panel, corner in corners:
        if None in panel:
            sign = "…" if panel[0] is not None else "⋮" if panel[1] is not None else ""
            ax.text(*corner, sign, fontsize=12, **CENTRED)
            continue
        _draw_panel(ax, grid, kept, panel, corner, (groups, rank, per_node, cell))
        label = ", ".join(f"{name} {k}" for name, k in zip(names[:2], panel, strict=True) if name)
        ax.text(corner[0] - 0.45, corner[1] - 0.68, label, va="bottom", fontweight="bold", fontsize=SMALL)
    look = {"fontsize": SMALL, "fontweight": "bold"}
    ax.text(-0.45, len(kept[2]) - 0.4, f"{names[3] or 'rank'} →", va="top", **look)
    if names[2]:
        ax.text(-0.68, 0, f"{names[2]}\n↓", ha="right", va="center", linespacing=1.1, **look)
    ax.set(xlim=(-1.9, wide - 0.3), ylim=(high - 0.4, -1.2), aspect="equal", anchor="NW")
    ax.axis("off")
    x, y = 4.0, -7.0
    for line, color in told:
        look = {"xycoords": "axes fraction", "va": "center"}
        if color:
            charts.beside(ax, "■", (0, 0), (x, y + 1), color=color, fontsize=12, **look)
        charts.beside(ax, line, (0, 0), (x + 14 if color else x, y), fontsize=9, **look)
        x, y = (x + 30 + 5.2 * len(line), y) if names_only else (x, y - 15.5)
    return figure


def _kept(count: int, at: int, most: int) -> list[int | None]:
    """Return the numbers up to `count`; if over `most`, the ends and `at`, beside it some more, None for the others."""
    if count <= most:
        return list(range(count))
    kept = {0, at, count - 1} if most == _FEW else {0, 1, *range(max(0, at - 1), min(count, at + 2)), count - 1}
    kept |= {k + 1 for k in kept if k + 2 in kept}
    edges = itertools.pairwise([*sorted(kept), count])
    return [x for a, b in edges for x in ([a] if b - a == 1 or b == count else [a, None])]


def _corners(kept: Sequence[Sequence[int | None]]) -> tuple[list[tuple[tuple, Place]], float, float]:
    """Return the place of the first cell of each panel, by its outer two numbers, and the size of all in cells."""
    outer, inner, rows, columns = kept
    if len(outer) == 1:
        lines = -(-len(inner) // max(1, int((_WIDE + _GAP) // (len(columns) + _GAP))))
        side = -(-len(inner) // lines)
        lines_of = [list(inner[k : k + side]) for k in range(0, len(inner), side)]
        table = [[(outer[0], j) for j in line] for line in lines_of]
    else:
        table = [[(i, j) for j in inner] for i in outer]
    corners, y, wide = [], 0.0, 0.0
    for line in table:
        x, skipped = 0.0, line[0][0] is None
        for panel in line:
            corners.append((panel, (x, y - 0.9 * skipped)))
            x += 1 if panel[1] is None else len(columns) + _GAP
        y += 0.5 if skipped else len(rows) + _GAP
        wide = max(wide, x - _GAP)
    return corners, wide, y - _GAP + 0.8


def _draw_panel(
    ax: Axes, grid: np.ndarray, kept: Sequence[Sequence[int | None]], panel: tuple[int, int], corner: Place,
    shown: tuple[Mapping[str, Sequence[int]], int, int, float],
) -> None:
    """Draw the ranks of one panel with the frames of their nodes."""
    groups, chosen, per_node, cell = shown
    places = {(x, y): None if None in (row, column) else int(grid[(*panel, row, column)])
              for y, row in enumerate(kept[2]) for x, column in enumerate(kept[3])}
    node = {place: None if rank is None else rank // per_node for place, rank in places.items()}
    room = 72 * cell / (0.62 * max(2, len(str(grid.size - 1))))  # points a digit
    font = min(9.0, max(5.5, 0.7 * room))
    cells, faces, edges, frames = [], [], [], []
    for (x, y), rank in places.items():
        left, top = corner[0] + x, corner[1] + y
        if rank is None:
            ax.text(left, top, "⋮" if kept[2][y] is None else "…", color="#666666", **CENTRED)
            continue
        color = next((dimension_color(name) for name, ranks in groups.items() if rank in ranks), None)
        color, face = (INK, INK) if rank == chosen else (color, tint(color)) if color else (FAINT, "white")
        cells.append(Rectangle((left - 0.42, top - 0.40), 0.84, 0.80))
        faces.append(face)
        edges.append(color)
        if font < 0.92 * room:
            text = ax.text(left, top, str(rank), ha="center", va="center_baseline", fontsize=font,
                           color="white" if rank == chosen else INK, fontweight="normal" if face == "white" else "bold")
            text.set_in_layout(False)  # inside a cell: the layout need not measure it
        for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            if node.get((x + dx, y + dy)) != node[x, y]:
                across, down = left + 0.5 * dx, top + 0.5 * dy
                frames.append([(across - 0.5 * abs(dy), down - 0.5 * abs(dx)),
                               (across + 0.5 * abs(dy), down + 0.5 * abs(dx))])
    ax.add_collection(PatchCollection(cells, facecolors=faces, edgecolors=edges, linewidths=0.8, zorder=2))
    ax.add_collection(LineCollection(frames, colors=INK, linewidths=1.1, capstyle="projecting", zorder=1.5))


def _tell(
    groups: Mapping[str, Sequence[int]], rank: int, per_node: int, names_only: bool
) -> list[tuple[str, str]]:
    """Return what stands below the panels, with its colours: what frames mean, then each group."""
    told = [(f"frame: a node of {per_node} ranks", ""), (f"rank {rank}", INK)]
    for name, ranks in groups.items():
        nodes = len({other // per_node for other in ranks})
        where = "all in one node" if nodes == 1 else f"over {nodes} nodes"
        words = name if names_only else f"{name}: ranks {short_ranks(ranks)}, {where}"
        told.append((words, dimension_color(name)))
    return told
