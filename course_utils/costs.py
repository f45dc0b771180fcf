"""What a collective costs: the bytes each rank must move, and the time that takes.

Sizes follow nccl-tests: S is the tensor for all-reduce, broadcast and reduce, the whole output for all-gather, the
whole input for reduce-scatter and all-to-all, and all pieces together for gather and scatter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .units import format_bytes

__all__ = [
    "ALL_REDUCE_ALGORITHMS", "COLLECTIVES", "TwoLevelCluster", "algbw", "all_reduce_bytes", "all_reduce_seconds",
    "all_reduce_steps", "bootstrap_alpha_beta", "busbw", "busbw_factor", "bytes_sent", "cluster_of", "fit_alpha_beta",
    "flat_cluster", "format_bytes",
]

#: Names that `bytes_sent` knows.
COLLECTIVES = (
    "broadcast", "reduce", "all_reduce", "gather", "scatter", "all_gather", "reduce_scatter", "all_to_all",
)

#: Ways to make an all-reduce that `all_reduce_seconds` knows.
ALL_REDUCE_ALGORITHMS = (
    "root", "ring", "tree", "recursive_doubling", "halving_doubling", "hierarchical", "double_tree", "in_network",
)


def busbw_factor(op: str, n: int) -> float:
    """Bytes that the busiest of `n` ranks must move one way, as a multiple of S.

    2(n-1)/n for all-reduce, 1 for broadcast, reduce, send and recv, (n-1)/n for the others (NVIDIA nccl-tests,
    doc/PERFORMANCE.md; for gather and scatter the root's share, by the same reasoning).
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if op in ("send", "recv"):
        return 1.0
    if op not in COLLECTIVES:
        raise ValueError(f"unknown operation {op!r}; choose one of {', '.join(COLLECTIVES)}, send, recv")
    if n == 1:
        return 0.0
    return {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "reduce": 1.0}.get(op, (n - 1) / n)


def bytes_sent(op: str, n: int, size: float) -> float:
    """Bytes the busiest of `n` ranks must move one way, at least, for message size `size` in bytes.

    The symmetric collectives reach it on every rank at once by a ring; for broadcast, reduce, gather and scatter the
    busiest rank is the root.
    """
    return busbw_factor(op, n) * size


def algbw(size: float, seconds: float) -> float:
    """Algorithm bandwidth S/t in bytes per second: how fast the caller's data gets done."""
    return size / seconds


def busbw(op: str, n: int, size: float, seconds: float) -> float:
    """Bus bandwidth in bytes per second: `algbw` times `busbw_factor`, to be compared with a link's speed."""
    return algbw(size, seconds) * busbw_factor(op, n)


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit t = alpha + beta * S by least squares on the relative error, so that small and large sizes count alike.

    Returns alpha in seconds and beta in seconds per byte, neither negative, from at least two different sizes in bytes.
    """
    s, t = np.asarray(sizes, float), np.asarray(seconds, float)
    if s.shape != t.shape or s.ndim != 1 or len(np.unique(s)) < 2:
        raise ValueError("sizes and seconds must have one length, with at least two different sizes")
    if not (t > 0).all():
        raise ValueError("seconds must be positive")
    columns = np.stack([1 / t, s / t], axis=1)
    alpha, beta = np.linalg.lstsq(columns, np.ones_like(t), rcond=None)[0]
    if alpha < 0 or beta < 0:  # then the best non-negative fit has one term only
        single = [columns[:, i].sum() / (columns[:, i] ** 2).sum() for i in (0, 1)]
        worst = [((columns[:, i] * single[i] - 1) ** 2).sum() for i in (0, 1)]
        alpha, beta = (single[0], 0.0) if worst[0] <= worst[1] else (0.0, single[1])
    return float(alpha), float(beta)


def bootstrap_alpha_beta(
    sizes: Sequence[float], seconds: Sequence[float], resamples: int = 500, seed: int = 0
) -> np.ndarray:
    """Fit alpha and beta again on points drawn with replacement: how far the fit depends on the points there are.

    Returns an array of shape (resamples, 2), alpha in seconds and beta in seconds per byte; its percentiles are
    confidence intervals (Efron 1979, Bootstrap methods: another look at the jackknife). Arguments as for
    `fit_alpha_beta`; a draw with one size only is drawn again.
    """
    fit_alpha_beta(sizes, seconds)  # refuses what cannot be fitted
    s, t = np.asarray(sizes, float), np.asarray(seconds, float)
    random, fits = np.random.default_rng(seed), []
    while len(fits) < resamples:
        drawn = random.integers(len(s), size=len(s))
        if len(np.unique(s[drawn])) > 1:
            fits.append(fit_alpha_beta(s[drawn], t[drawn]))
    return np.array(fits).reshape(-1, 2)


@dataclass(frozen=True)
class TwoLevelCluster:
    """Ranks on equal nodes, numbered node by node, with the cost alpha + beta * S of one message between two of them.

    A rank sends one message at a time and receives one at a time, both at once; alpha does not keep the port busy;
    adding costs nothing.

    Parameters
    ----------
    nodes, per_node : int
        Nodes, and ranks in each.
    intra, inter : (float, float)
        Alpha in seconds and beta in seconds per byte, in a node and between nodes. `inter` is not needed for one node.
    sharing : float
        By what factor beta of `inter` grows while all ranks of a node send across: 1 where each has its own NIC,
        `per_node` where all share one.
    """

    nodes: int
    per_node: int
    intra: tuple[float, float]
    inter: tuple[float, float] | None = None
    sharing: float = 1.0

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.per_node < 1:
            raise ValueError(f"nodes and per_node must be at least 1, got {self.nodes} and {self.per_node}")
        if self.nodes > 1 and self.inter is None:
            raise ValueError("a cluster of several nodes needs inter=(alpha, beta)")

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


def flat_cluster(n: int, alpha: float, beta: float) -> TwoLevelCluster:
    """Return `n` ranks of which each two are equally far apart."""
    return TwoLevelCluster(1, n, (alpha, beta))


def cluster_of(topology) -> TwoLevelCluster:
    """Return the two-level view of a `topology.Topology`: its slowest pair in the first node and between the first two.

    Raises `ValueError` where GPUs are not numbered node by node, or nodes do not have equally many.
    """
    nodes = [topology.devices[gpu].node for gpu in topology.gpus]
    count = len(set(nodes))
    per_node = len(nodes) // count if count else 0
    first = [nodes[i * per_node] for i in range(count)]
    if not nodes or nodes != [node for node in first for _ in range(per_node)]:
        raise ValueError(f"{topology.name} needs equally many GPUs in each node, numbered node by node; nodes: {nodes}")

    def worst(paths) -> tuple[float, float]:
        return max((p.latency for p in paths), default=0.0), max((1 / p.bandwidth for p in paths), default=0.0)

    mates = [(a, b) for a in range(per_node) for b in range(per_node) if a != b]
    intra = worst([topology.path(a, b) for a, b in mates])
    if count == 1:
        return TwoLevelCluster(1, per_node, intra)
    across = [topology.path(r, r + per_node) for r in range(per_node)]
    inter = worst(across)
    users = Counter((a, b) for p in across for a, b in zip(p.devices, p.devices[1:], strict=False))
    slowest = {}
    for p in across:
        for link, a, b in zip(p.links, p.devices, p.devices[1:], strict=False):
            slowest[a, b] = max(slowest.get((a, b), 0.0), 1 / link.bandwidth)
    busiest = max(users[ends] * slowest[ends] for ends in users)
    return TwoLevelCluster(count, per_node, intra, inter, sharing=max(1.0, busiest / inter[1]))


def _log2(n: int) -> int:
    return (n - 1).bit_length()


def _fold(n: int) -> tuple[int, bool]:
    """Return the greatest power of two up to `n`, and whether ranks are left over that fold into the others."""
    power = 1 << (n.bit_length() - 1)
    return power, power < n


def _known(algorithm: str) -> None:
    if algorithm not in ALL_REDUCE_ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}; choose one of {', '.join(ALL_REDUCE_ALGORITHMS)}")


def all_reduce_steps(algorithm: str, n: int | TwoLevelCluster) -> int:
    """Messages one after the other in an all-reduce of `n` ranks; for hierarchical `n` may be a `TwoLevelCluster`.

    root: 2(n-1), one at a time at the root. ring: 2(n-1). tree: 2*ceil(log2 n). recursive_doubling: log2 n, and
    halving_doubling: 2*log2 n, with two more where n is not a power of two. hierarchical: 2(p-1) in the node and
    2(N-1) between N nodes. double_tree: 2*ceil(log2 n), the way of one block up and down. in_network: 1, to the
    switch and back.
    """
    _known(algorithm)
    nodes, per_node = (n.nodes, n.per_node) if isinstance(n, TwoLevelCluster) else (1, n)
    n = nodes * per_node
    if n < 2:
        return 0
    power, folded = _fold(n)
    return {
        "root": 2 * (n - 1),
        "ring": 2 * (n - 1),
        "tree": 2 * _log2(n),
        "recursive_doubling": _log2(power) + 2 * folded,
        "halving_doubling": 2 * _log2(power) + 2 * folded,
        "hierarchical": 2 * (per_node - 1) + 2 * (nodes - 1),
        "double_tree": 2 * _log2(n),
        "in_network": 1,
    }[algorithm]


def all_reduce_bytes(algorithm: str, n: int | TwoLevelCluster, size: float) -> float:
    """Bytes that the busiest of `n` ranks sends in an all-reduce of `size` bytes.

    ring, hierarchical, halving_doubling: 2(n-1)/n * S, the least without help from the network (Patarasuk and Yuan
    2009, Bandwidth optimal all-reduce algorithms for clusters of workstations); root: (n-1)S; tree: ceil(log2 n) * S;
    recursive_doubling: log2 n * S; double_tree: at most 2S; in_network: S. Where n is not a power of two, the doubling
    algorithms work on the power below and send S more.
    """
    _known(algorithm)
    n = n.ranks if isinstance(n, TwoLevelCluster) else n
    if n < 2:
        return 0.0
    power, folded = _fold(n)
    factor = {
        "root": n - 1,
        "ring": 2 * (n - 1) / n,
        "tree": _log2(n),
        "recursive_doubling": _log2(power) + folded,
        "halving_doubling": 2 * (power - 1) / power + folded,
        "hierarchical": 2 * (n - 1) / n,
        "double_tree": min(2, n - 1),
        "in_network": 1,
    }[algorithm]
    return factor * size


def all_reduce_seconds(algorithm: str, size: float, cluster: TwoLevelCluster) -> float:
    """Modelled seconds of an all-reduce of `size` bytes, under the port model of `TwoLevelCluster`.

    Below, a and b are alpha and beta in the node, A and B between nodes, p ranks on each of N nodes, n = N*p; on a
    flat cluster only a and b are left.

    - root: every rank sends S to rank 0, which sends the sum back. The messages overlap but for rank 0's port:
      2a + 2(n-1)bS. Messages from other nodes come through the NIC of its node, beside those of its own node; the
      slower of the two counts: max(a + (p-1)bS, A + (n-p)BS), twice.
    - ring: 2(n-1) steps of S/n, (a + bS/n) each. On several nodes the slower of two limits: the link between two
      nodes sends all 2(n-1) pieces, A + 2(n-1)BS/n; and one piece travels twice round, but for two hops, with 2N hops
      between nodes and the others in them.
    - tree: binomial tree, a reduce to rank 0 and a broadcast from it, whole S in each message: 2*ceil(log2 n)*(a + bS),
      less if n is not a power of two, since the last branches are shorter. Near ranks are added first, so that one
      message crosses between two nodes: 2*ceil(log2 p)*(a + bS) + 2*ceil(log2 N)*(A + BS) for p a power of two.
    - recursive_doubling: log2 n exchanges of S with partner r xor 1, 2, 4, ...; the ones from p up are between nodes.
    - halving_doubling: the same partners, with S/2, S/4, ... and back (Rabenseifner 2004, Optimization of collective
      reduction operations): 2*log2(n)*a + 2(n-1)/n*bS; the short messages go between the nodes. Both doubling
      algorithms first fold the ranks above a power of two into the others, and give them the result at the end: at
      most 2(A + BS) more.
    - hierarchical: ring reduce-scatter in the node, ring all-reduce of the pieces between the nodes, by all ranks of
      a node at once, ring all-gather in the node: 2(p-1)(a + bS/p) + 2(N-1)(A + BS/n).
    - double_tree: two binary trees, each for half of S, in which every rank is a leaf once (Sanders, Speck and
      Traeff 2009, Two-tree algorithms for full bandwidth broadcast, reduction and scan). Assumes blocks so many and
      so cheap that they all follow the first without a gap, which no finite block reaches:
      2(ceil(log2 p)*a + ceil(log2 N)*A) + 2S*max(b, B).
    - in_network: the switch adds (SHARP, NVLS). Each rank sends S once and receives S once, at the same time:
      A + BS. NVLS itself moves (n+1)/n of it, because each rank fetches and spreads its share (nccl-tests issue 239).

    While all ranks of a node send across, B is multiplied by `cluster.sharing` (doubling, hierarchical).
    """
    _known(algorithm)
    if size < 0:
        raise ValueError(f"size must not be negative, got {size}")
    return float(_SECONDS[algorithm](size, cluster)) if cluster.ranks > 1 else 0.0


def _levels(cluster: TwoLevelCluster, shared: bool = False) -> tuple[float, float, float, float]:
    """Return alpha and beta in the node and between nodes; those of the only level twice."""
    a, b = cluster.intra
    if cluster.nodes == 1:
        return a, b, a, b
    far, slow = cluster.inter
    slow *= cluster.sharing if shared else 1.0
    return (far, slow, far, slow) if cluster.per_node == 1 else (a, b, far, slow)


def _root(size: float, cluster: TwoLevelCluster) -> float:
    a, b, far, slow = _levels(cluster)
    p, n = cluster.per_node, cluster.ranks
    own = a + (p - 1) * b * size if p > 1 else 0.0
    others = far + (n - p) * slow * size if n > p else 0.0
    return 2 * max(own, others)


def _ring(size: float, cluster: TwoLevelCluster) -> float:
    a, b, far, slow = _levels(cluster)
    p, n, steps = cluster.per_node, cluster.ranks, 2 * (cluster.ranks - 1)
    inside, busy = a + b * size / n, slow * size / n
    if cluster.nodes == 1:
        return steps * inside
    crossings = 2 * cluster.nodes - max(0, 3 - p)  # two rounds but for two neighbouring hops
    spare = steps - (crossings - 1) * p - 1
    travel = crossings * (far + busy) + (crossings - 1) * (p - 1) * inside + spare * max(inside, busy)
    return max(far + steps * busy, travel)


def _tree(size: float, cluster: TwoLevelCluster) -> float:
    a, b, far, slow = _levels(cluster)
    return 2 * (_log2(cluster.per_node) * (a + b * size) + _log2(cluster.nodes) * (far + slow * size))


def _exchanges(cluster: TwoLevelCluster) -> list[bool]:
    """For each distance 1, 2, 4, ... of the doubling algorithms: do any partners sit in different nodes?"""
    power, _ = _fold(cluster.ranks)
    distances = [1 << k for k in range(_log2(power))]
    return [cluster.nodes > 1 and cluster.per_node % (2 * d) != 0 for d in distances]


def _recursive_doubling(size: float, cluster: TwoLevelCluster) -> float:
    a, b, far, slow = _levels(cluster, shared=True)
    crossing = _exchanges(cluster)
    near = len(crossing) - sum(crossing)
    folds = 2 * _fold(cluster.ranks)[1]
    return near * (a + b * size) + (sum(crossing) + folds) * (far + slow * size)


def _halving_doubling(size: float, cluster: TwoLevelCluster) -> float:
    a, b, far, slow = _levels(cluster, shared=True)
    folds = 2 * _fold(cluster.ranks)[1]
    halves = [size / 2 ** (k + 1) for k in range(len(_exchanges(cluster)))]
    exchanges = zip(halves, _exchanges(cluster), strict=True)
    return folds * (far + slow * size) + 2 * sum(far + slow * s if cross else a + b * s for s, cross in exchanges)


def _hierarchical(size: float, cluster: TwoLevelCluster) -> float:
    a, b, far, slow = _levels(cluster, shared=True)
    inside = 2 * (cluster.per_node - 1) * (a + b * size / cluster.per_node)
    return inside + 2 * (cluster.nodes - 1) * (far + slow * size / cluster.ranks)


def _double_tree(size: float, cluster: TwoLevelCluster) -> float:
    a, b, far, slow = _levels(cluster)
    hops = _log2(cluster.per_node) * a + _log2(cluster.nodes) * far
    return 2 * hops + all_reduce_bytes("double_tree", cluster.ranks, size) * max(b, slow)


def _in_network(size: float, cluster: TwoLevelCluster) -> float:
    a, b, far, slow = _levels(cluster)
    return max(a, far) + max(b, slow) * size


_SECONDS = {
    "root": _root, "ring": _ring, "tree": _tree, "recursive_doubling": _recursive_doubling,
    "halving_doubling": _halving_doubling, "hierarchical": _hierarchical, "double_tree": _double_tree,
    "in_network": _in_network,
}
