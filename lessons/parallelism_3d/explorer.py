"""Choose degrees of parallelism and their order; see which ranks share a group, and what it sends over which links."""

from __future__ import annotations

import html
import itertools
import math
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from course_utils.draw.charts import duration
from course_utils.draw.controls import choice, integer, steps
from course_utils.draw.explorer import Explorer
from course_utils.transformer import PUBLISHED
from course_utils.units import decimal_bytes

from .mesh_pictures import dimension_color, mesh_grid, short_ranks
from .planner import (
    CLUSTERS,
    RECOMPUTE,
    GpuCluster,
    Layout,
    cluster,
    mesh_groups,
    reasons_against,
    traffic,
)

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
    """Return the number of ranks; refuse numbers below 1, too many ranks, and ranks that do not fill nodes."""
    for name, value in {**degrees, "GPUs in a node": per_node}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    ranks, product = math.prod(degrees.values()), " x ".join(f"{name} {n:,}" for name, n in degrees.items())
    if ranks > _MOST:
        raise ValueError(f"{product} makes {ranks:,} ranks; the explorer takes up to {_MOST:,}")
    if ranks > per_node and ranks % per_node:
        raise ValueError(f"{product} makes {ranks:,} ranks, which do not fill nodes of {per_node}")
    return ranks


def _where(group: Group) -> str:
    if group.inside:
        return "in one node"
    each = len(group.ranks) / group.nodes
    return f"on {group.nodes} nodes" + (f", {each:g} on each" if each > 1 else "")


def _table(groups: list[Group], machine: GpuCluster, sent: dict[str, float] | None) -> str:
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
        rows.append(row + ([decimal_bytes(sent[name]), duration(sent[name] * per_byte)] if sent else []))

    def line(cells: list[str], kind: str) -> str:
        opening = f"<{kind} style='text-align: left; padding: 0 14px 0 0; line-height: 1.6; white-space: nowrap'>"
        return f"<tr>{''.join(f'{opening}{cell}</{kind}>' for cell in cells)}</tr>"

    return f"<table>{line(heads, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _orders() -> list[tuple[str, tuple[str, ...]]]:
    """Return every order of the dimensions, slowest first, those of known frameworks at the top."""
    every = [*_KNOWN, *(order for order in itertools.permutations(_DIMENSIONS) if order not in _KNOWN)]
    return [(", ".join(order) + (f": {_KNOWN[order]}" if order in _KNOWN else ""), order) for order in every]


def _describe(groups: list[Group], node: GpuCluster, layout: Layout, model: str, batch: int) -> str:
    """Return what each group sends, or why the model cannot run so."""
    shape = PUBLISHED[model]
    against = reasons_against(shape, node, layout, batch)
    if not against:
        return _table(groups, node, traffic(shape, layout, batch))
    refused = html.escape(f"{model} cannot run so: {'; '.join(against)}.")
    return f"<p><b>{refused}</b></p>{_table(groups, node, None)}"


def _render(
    order: tuple[str, ...], per_node: int, rank: int, model: str, machine: str, batch: int, microbatch: int,
    recompute: str, **degrees: int,
) -> tuple[Figure, str]:
    sizes = {name: degrees[name] for name in order}
    ranks = _check(sizes, per_node)
    mesh = " x ".join(f"{name} {n}" for name, n in sizes.items() if n > 1) or "one"
    title = f"modelled: {ranks:,} ranks as {mesh}, rank {rank} and its groups"
    figure = mesh_grid(sizes, title, per_node=per_node, rank=rank, names_only=True)
    node = replace(cluster(machine, 8), gpus=ranks, per_node=per_node)
    zero = 1 if sizes["dp"] * sizes["cp"] > 1 else 0
    layout = Layout(**sizes, microbatch=microbatch, zero=zero, recompute=recompute)
    return figure, _describe(groups_of(rank, sizes, per_node), node, layout, model, batch)


def mesh_explorer() -> Explorer:
    """See which ranks share a group in up to four dimensions, over which links, and what a step sends over each."""
    degrees = {name: integer(name, n) for name, n in zip(_DIMENSIONS, (8, 1, 4, 8), strict=True)}
    order, per_node = choice("order", _orders(), ("pp", "dp", "cp", "tp"), 260), integer("GPUs in a node", 8)
    rank = steps("rank", 77, 0, 255, 480)

    def adapt(_: str | None) -> None:
        rank.max = _check({name: degrees[name].value for name in order.value}, per_node.value) - 1

    rows = [
        degrees,
        {"order": order, "per_node": per_node},
        {"rank": rank},
        {"model": choice("model", PUBLISHED, "Llama 3 70B"), "machine": choice("machine", CLUSTERS, "DGX H100")},
        {
            "batch": integer("sequences", 512), "microbatch": integer("micro-batch", 1),
            "recompute": choice("recompute", RECOMPUTE, "none", 120),
        },
    ]
    return Explorer(rows, _render, adapt, _NOTE)
