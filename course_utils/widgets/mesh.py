"""Choose degrees of parallelism and their order; see which ranks share a group, and what it sends over which links."""

from __future__ import annotations

import html
import itertools
import math
from dataclasses import dataclass, replace

import ipywidgets as widgets

from ..planner import CLUSTERS, MODELS, RECOMPUTE, Cluster, Layout, cluster, legal, mesh_groups, traffic
from ..plots import dimension_color, mesh_grid, short_ranks
from ..units import decimal_bytes
from ._explorer import Explorer, Picture

__all__ = ["Group", "groups_of", "mesh_explorer"]

_DIMENSIONS = ("tp", "cp", "pp", "dp")
_KNOWN = {("dp", "pp", "cp", "tp"): "as Llama 3", ("pp", "dp", "cp", "tp"): "as Megatron-LM"}
_MOST = 65_536  # ranks
_SENT = {
    "tp": "sums of activations", "cp": "keys and values", "pp": "activations, their gradients",
    "dp": "gradients, new parameters",
}
_NOTE = (
    "Modelled by <code>planner.traffic</code>: what a GPU in the middle of the pipeline sends in a step, all in bf16, "
    "with sequence parallelism and a divided optimizer (ZeRO-1). Time: these bytes at the data sheet's speed of the "
    "slowest link in the group, in one direction, nothing else on the way; how much of it computing hides, "
    "<code>planner.plan</code> knows. With context parallelism gradients are summed over the cp ranks too, counted "
    "under dp. 1 GB is 1e9 bytes."
)


@dataclass(frozen=True)
class Group:
    """The group of a rank in one dimension: its ranks, and over how many nodes they lie."""

    dimension: str
    ranks: tuple[int, ...]
    nodes: int

    @property
    def inside(self) -> bool:
        return self.nodes == 1


def groups_of(rank: int, sizes: dict[str, int], per_node: int) -> list[Group]:
    """Return the groups of `rank` in a mesh of `sizes`, slowest dimension first, with `per_node` ranks on each node."""
    found = []
    for name, groups in mesh_groups(sizes).items():
        ranks = next(group for group in groups if rank in group)
        found.append(Group(name, ranks, len({other // per_node for other in ranks})))
    return found


def _check(degrees: dict[str, int], per_node: int) -> int:
    """Return the number of ranks.

    Raises
    ------
    ValueError
        A number is below 1, there are too many ranks, or they do not fill nodes.
    """
    for name, value in {**degrees, "GPUs in a node": per_node}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    ranks, product = math.prod(degrees.values()), " x ".join(f"{name} {n:,}" for name, n in degrees.items())
    if ranks > _MOST:
        raise ValueError(f"{product} makes {ranks:,} ranks; the explorer takes up to {_MOST:,}")
    if ranks > per_node and ranks % per_node:
        raise ValueError(f"{product} makes {ranks:,} ranks, which do not fill nodes of {per_node}")
    return ranks


def _seconds(value: float) -> str:
    unit, scale = ("s", 1) if value >= 1 else ("ms", 1e3) if value >= 1e-3 else ("µs", 1e6)
    return f"{value * scale:.3g} {unit}"


def _where(group: Group) -> str:
    if group.inside:
        return "in one node"
    each = len(group.ranks) / group.nodes
    return f"on {group.nodes} nodes" + (f", {each:g} on each" if each > 1 else "")


def _table(groups: list[Group], machine: Cluster, sent: dict[str, float] | None) -> str:
    """Return the groups as an HTML table, with bytes and times where the layout can run."""
    heads = ["", "ranks", "where", "link, one way", "sends", *(["in a step", "at least"] if sent else [])]
    rows = []
    for group in groups:
        name = group.dimension
        square = f"<span style='color: {dimension_color(name)}'>■</span> <b>{name}</b>"
        if len(group.ranks) == 1:
            rows.append([square, f"{group.ranks[0]} alone", *[""] * (len(heads) - 2)])
            continue
        _, per_byte = machine.intra if group.inside else machine.inter
        link = f"{'NVLink' if group.inside else 'network'}, {1e-9 / per_byte:.3g} GB/s"
        row = [square, short_ranks(group.ranks, 5), _where(group), link, _SENT[name]]
        rows.append(row + ([decimal_bytes(sent[name]), _seconds(sent[name] * per_byte)] if sent else []))

    def line(cells: list[str], kind: str) -> str:
        opening = f"<{kind} style='text-align: left; padding: 0 14px 0 0; line-height: 1.6; white-space: nowrap'>"
        return f"<tr>{''.join(f'{opening}{cell}</{kind}>' for cell in cells)}</tr>"

    return f"<table>{line(heads, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _orders() -> list[tuple[str, tuple[str, ...]]]:
    """Return every order of the dimensions, slowest first, those of known frameworks at the top."""
    every = [*_KNOWN, *(order for order in itertools.permutations(_DIMENSIONS) if order not in _KNOWN)]
    return [(", ".join(order) + (f": {_KNOWN[order]}" if order in _KNOWN else ""), order) for order in every]


def mesh_explorer() -> widgets.Widget:
    """See which ranks share a group in up to four dimensions, over which links, and what a step sends over each.

    Groups are those of `planner.mesh_groups`, which numbers ranks as torch's ``init_device_mesh`` does: the last
    dimension of the order fastest. What cannot be is refused, and the picture stays.
    """

    def look(width: int, label: int = 90) -> dict:
        return {"layout": {"width": f"{width}px"}, "style": {"description_width": f"{label}px"}}

    def number(value: int, name: str, width: int = 150, label: int = 70) -> widgets.IntText:
        return widgets.IntText(value=value, description=name, continuous_update=False, **look(width, label))

    rank = widgets.IntSlider(77, 0, 255, description="rank", continuous_update=False, **look(560))
    degrees = {name: number(n, name) for name, n in zip(_DIMENSIONS, (8, 1, 4, 8), strict=True)}
    order = widgets.Dropdown(options=_orders(), value=("pp", "dp", "cp", "tp"), description="order", **look(330))
    per_node = number(8, "GPUs in a node", 190, 110)
    machine = widgets.Dropdown(options=list(CLUSTERS), value="DGX H100", description="machine", **look(230))
    model = widgets.Dropdown(options=list(MODELS), value="Llama 3 70B", description="model", **look(330))
    again = widgets.Dropdown(options=list(RECOMPUTE), value="none", description="recompute", **look(230))
    batch, microbatch = number(512, "sequences", 160, 90), number(1, "micro-batch", 160, 90)
    status, picture = widgets.HTML(), Picture()
    shown = {"title": ""}

    def describe(sizes: dict[str, int], ranks: int) -> str:
        node = replace(cluster(machine.value, 8), gpus=ranks, per_node=per_node.value)
        layout = Layout(**sizes, microbatch=microbatch.value, zero=1 if sizes["dp"] * sizes["cp"] > 1 else 0,
                        recompute=again.value)
        shape = MODELS[model.value]
        reasons = legal(shape, node, layout, batch.value)
        groups = groups_of(rank.value, sizes, per_node.value)
        if reasons:
            refused = html.escape(f"{model.value} cannot run so: {'; '.join(reasons)}.")
            return f"<p><b>{refused}</b></p>{_table(groups, node, None)}"
        return _table(groups, node, traffic(shape, layout, batch.value))

    def draw(_=None) -> None:
        sizes = {name: degrees[name].value for name in order.value}
        try:
            ranks = _check(sizes, per_node.value)
        except ValueError as error:
            status.value = f"<p><b>{html.escape(str(error))}.</b> The picture still shows {shown['title']}.</p>"
            return
        if rank.max != ranks - 1:
            rank.unobserve(draw, "value")
            rank.max = ranks - 1  # which moves the rank into the mesh
            rank.observe(draw, "value")
        mesh = " x ".join(f"{name} {n}" for name, n in sizes.items() if n > 1) or "one"
        shown["title"] = f"{ranks:,} ranks as {mesh}, rank {rank.value}"
        title = f"modelled: {shown['title']} and its groups"
        status.value = describe(sizes, ranks)
        picture.show(mesh_grid(sizes, title, per_node=per_node.value, rank=rank.value, names_only=True))

    controls = [rank, *degrees.values(), order, per_node, machine, model, batch, microbatch, again]
    for control in controls:
        control.observe(draw, "value")
    draw()
    rows = [list(degrees.values()), [order, per_node], [rank], [model, machine], [batch, microbatch, again]]
    return Explorer(rows, status, picture, _NOTE)
