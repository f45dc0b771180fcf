"""How NCCL chooses algorithm and protocol, rebuilt: a latency and a bandwidth for each pair, the shortest time wins.

After src/graph/tuning.cc of NCCL 2.28.7 (https://github.com/NVIDIA/nccl/blob/v2.28.7-1/src/graph/tuning.cc), for
all-reduce with ring, tree and, on one node of Hopper or Blackwell GPUs with NVSwitch, NVLS. Left out: CollNet, PAT,
NVLSTree, the slower tree pattern of some machines, and the network's own latency, which its plugin may report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from course_utils.costs import busbw_factor
from course_utils.recorded import A100_LATENCY, OTHER_A100_ALL_REDUCE, Table

__all__ = [
    "CORRECTIONS", "MACHINES", "PUBLISHED", "Choice", "Correction", "Machine", "TunerConstants", "bandwidth", "choose",
    "corrected", "errors", "estimate", "latency", "nvls_busbw", "predict", "switch_points",
]

Choice = tuple[str, str]  #: algorithm and protocol, such as ("ring", "LL128")

_PROTOCOLS = ("LL", "LL128", "Simple")


@dataclass(frozen=True)
class Machine:
    """What the model must know of the machine; rates in bytes per second."""

    nodes: int
    gpus_per_node: int
    link: str  # "nvlink" or "pcie": how the GPUs of a node are joined
    bandwidth: float  # that NCCL counts on for one GPU in one direction: NVLinks times the rate in its topo.h
    network: float = 0.0  # all network cards of a node together, in one direction; not used with one node
    generation: str = "ampere"  # or "hopper", "blackwell"
    channels: int = 12  # rings that NCCL builds side by side; some limits are per channel
    nvls: bool = False  # whether the switch can add (third NVSwitch generation and later)

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


#: Links of one GPU times the rate NCCL assumes for each (topo.h: 20.0, 20.6 and 40.1 GB/s).
MACHINES = {
    "8 x A100": Machine(1, 8, "nvlink", 12 * 20.0e9),
    "8 x H100": Machine(1, 8, "nvlink", 18 * 20.6e9, generation="hopper", channels=18, nvls=True),
    "8 x H200": Machine(1, 8, "nvlink", 18 * 20.6e9, generation="hopper", channels=18, nvls=True),
    "8 x B200": Machine(1, 8, "nvlink", 18 * 40.1e9, generation="blackwell", channels=18, nvls=True),
}


def _us(*values: float) -> dict[str, float]:
    return {p: v * 1e-6 for p, v in zip(_PROTOCOLS, values, strict=True)}


@dataclass(frozen=True)
class TunerConstants:
    """NCCL's constants for latency: seconds, by algorithm and protocol, per hop also by kind of link."""

    base: dict[str, dict[str, float]]
    hop: dict[str, dict[str, dict[str, float]]]
    nvls: float = 25e-6
    launch: float = 0.0  # seconds for each GPU of the machine, not one of NCCL's


#: NCCL's own constants, before they are corrected.
PUBLISHED = TunerConstants(
    base={"tree": _us(6.8, 14.0, 8.4), "ring": _us(6.6, 14.0, 8.4)},
    hop={
        "nvlink": {"tree": _us(0.6, 1.25, 4.0), "ring": _us(0.6, 1.9, 3.4)},
        "pcie": {"tree": _us(1.0, 1.9, 4.0), "ring": _us(1.0, 2.5, 5.7)},
        "network": {"tree": _us(5.0, 8.5, 14.0), "ring": _us(2.7, 4.0, 14.0)},
    },
)

# GB/s by generation and by one, two, or more nodes. Several nodes: LL depends on the CPU, here Intel's values.
_LL_MOST = {"ampere": 87.7, "hopper": 141.0, "blackwell": 282.0}
_LL_MOST_NODES = {2: 39.0, 3: 20.4}
_RING_LL128_CHANNEL = {"ampere": (20, 20, 20), "hopper": (36.7,) * 3, "blackwell": (40,) * 3}
_TREE_LL128_CHANNEL = {"ampere": (20, 20, 20), "hopper": (36.7, 36.7, 29.0), "blackwell": (55.6, 31.67, 20.0)}
_TREE_CHANNEL = {"ampere": (24.0, 23.6, 17.8), "hopper": (38.7, 41.4, 36.0), "blackwell": (70.0, 42.8, 24.0)}
_NVLS_EFFICIENCY, _NVLS_CHANNELS = {"hopper": 0.85, "blackwell": 0.74}, {"hopper": 16, "blackwell": 24}
# Share of the tree's bandwidth by size, from 64 B in powers of two; 1 above the last.
_TREE_SHARE = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (
        1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1,
    ),
    "Simple": (
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9,
        0.9,
    ),
}


def _choices(machine: Machine) -> list[Choice]:
    """LL128 needs NVLink; NVLS one node whose switch can add."""
    protocols = _PROTOCOLS if machine.link == "nvlink" else ("LL", "Simple")
    pairs = [(a, p) for a in ("ring", "tree") for p in protocols]
    return [*pairs, ("nvls", "Simple")] if machine.nvls and machine.nodes == 1 else pairs


def latency(choice: Choice, machine: Machine, constants: TunerConstants = PUBLISHED) -> float:
    """Seconds that do not depend on the size: a base, and the hops one after the other.

    Ring: 2(n-1) hops, 2(N-1) of them between N nodes. Tree: up and down a chain of the node's GPUs and a binary tree of
    the nodes, 2((n/N - 1) + log2 N) hops. NVLS: one constant. A hop inside a node lasts at least as long as the CPU
    needs to serve the network, 1 us, three times that with Simple.
    """
    algorithm, protocol = choice
    n, nodes = machine.ranks, machine.nodes
    start = constants.launch * n
    if algorithm == "nvls":
        return start + constants.nvls
    near = constants.hop[machine.link][algorithm][protocol]
    far = constants.hop["network"][algorithm][protocol]
    start += constants.base[algorithm][protocol]
    if algorithm == "tree":
        return start + 2 * ((machine.gpus_per_node - 1) * near + (nodes.bit_length() - 1) * far)
    crossing = 2 * (nodes - 1)
    if nodes > 1:
        near = max(near, 3e-6 if protocol == "Simple" else 1e-6)
    return start + (2 * (n - 1) - crossing) * near + crossing * far


def bandwidth(choice: Choice, machine: Machine) -> float:
    """Bytes of the caller's data per second, for messages so large that the latency does not count.

    What the link gives, times what the protocol and the algorithm make of it, limited by what the GPU's threads can
    do, times n/(2(n-1)) for ring and NVLS and 1/2 for the tree. This is the figure NCCL compares with. That of NVLS
    is more than the links give (see `nvls_busbw`), so `estimate` does not use it.
    """
    algorithm, protocol = choice
    n, nodes, generation = machine.ranks, machine.nodes, machine.generation
    step = min(nodes, 3) - 1
    link = machine.bandwidth if nodes == 1 else min(machine.bandwidth, machine.network)
    share = n / (2 * (n - 1))
    if algorithm == "nvls":
        channels = _NVLS_CHANNELS[generation]
        return 2 * link * _NVLS_EFFICIENCY[generation] * (channels - 1) / channels * share
    ll_most = 1e9 * (_LL_MOST[generation] if nodes == 1 else _LL_MOST_NODES[min(nodes, 3)])
    if algorithm == "ring":
        if protocol == "LL":
            link = min(link / 2, ll_most)
        elif protocol == "LL128":
            factor = 0.7 if machine.gpus_per_node < 2 else 0.92
            link = min(factor * link, 1e9 * machine.channels * _RING_LL128_CHANNEL[generation][step])
        return link * share
    link = min(0.92 * link, 1e9 * machine.channels * _TREE_CHANNEL[generation][step])
    if protocol == "LL":
        link = min(link / 3.8, ll_most)
    elif protocol == "LL128":
        factor = 7 / 9 if nodes == 1 else 120 / 128
        link = min(factor * link, 1e9 * machine.channels * _TREE_LL128_CHANNEL[generation][step])
    return link / 2


def predict(size: float, machine: Machine, constants: TunerConstants = PUBLISHED) -> dict[Choice, float]:
    """Return NCCL's own seconds for an all-reduce of `size` bytes by each algorithm and protocol the machine has.

    They are made for comparing. As a forecast the one of NVLS is too short; `estimate` corrects it.
    """
    times = {}
    for choice in _choices(machine):
        algorithm, protocol = choice
        rate, start = bandwidth(choice, machine), latency(choice, machine, constants)
        if algorithm == "tree":
            at = max(0, (int(size) >> 6).bit_length() - 1)
            rate *= _TREE_SHARE[protocol][at] if at < len(_TREE_SHARE[protocol]) else 1
        small = size / (machine.channels * machine.ranks) < 64
        if choice == ("ring", "Simple") and machine.nodes > 1 and not small:
            start *= 1.4
        times[choice] = start + size / rate
    return times


def choose(size: float, machine: Machine) -> Choice:
    """Return the algorithm and protocol that NCCL takes: the shortest time by its own constants."""
    times = predict(size, machine)
    return min(times, key=times.get)


def switch_points(machine: Machine) -> dict[int, Choice]:
    """Of the powers of two from 1 KiB to 16 GiB, those from which NCCL takes another pair, and the pair."""
    taken: dict[int, Choice] = {}
    for size in (2**k for k in range(10, 35)):
        if not taken or choose(size, machine) != [*taken.values()][-1]:
            taken[size] = choose(size, machine)
    return taken


def estimate(size: float, machine: Machine, constants: TunerConstants = PUBLISHED) -> float:
    """Return the seconds, by `constants`, of what NCCL chooses by its own: its choice does not know of corrections.

    NVLS takes at least its latency and S at the rate of `nvls_busbw`, which follows from the bytes on the wire.
    """
    choice = choose(size, machine)
    if choice[0] == "nvls":
        wire = nvls_busbw(machine) / busbw_factor("all_reduce", machine.ranks)
        return latency(choice, machine, constants) + size / wire
    return predict(size, machine, constants)[choice]


def errors(table: Table, machine: Machine, constants: TunerConstants = PUBLISHED) -> np.ndarray:
    """Return the relative error of the estimated time at each size of `table`: positive where the model is too slow."""
    return np.array([estimate(s, machine, constants) / t - 1 for s, t in zip(table.sizes, table.seconds, strict=True)])


def nvls_busbw(machine: Machine) -> float:
    """Bus bandwidth of a large all-reduce by NVLS, from the bytes on the wire, in bytes per second.

    Each GPU sends S to the switch and S/n of results to spread: S(n+1)/n in all (nccl-tests issue 239), at the link's
    rate times the efficiency in tuning.cc. NCCL's own figure, `bandwidth`, only has to win where NVLS wins: with 8
    GPUs it would put 20 % more bytes on a link than this rate leaves. Both can be above the data sheet's rate of the
    link, because bus bandwidth counts the bytes of a ring.
    """
    n = machine.ranks
    rate = machine.bandwidth * _NVLS_EFFICIENCY[machine.generation] * n / (n + 1)
    return rate * busbw_factor("all_reduce", n)


def _launch(constants: TunerConstants) -> TunerConstants:
    """Fit base + launch * n to A100_LATENCY, after taking away the 2(n-1) hops of LL on NVLink that it contains."""
    gpus = np.array(list(A100_LATENCY))
    hops = 2 * (gpus - 1) * constants.hop["nvlink"]["ring"]["LL"]
    launch, base = np.polyfit(gpus, np.array(list(A100_LATENCY.values())) - hops, 1)
    shift = float(base) - constants.base["ring"]["LL"]
    moved = {a: {p: t + shift for p, t in of.items()} for a, of in constants.base.items()}
    return replace(constants, base=moved, launch=float(launch))


def _loaded_hops(constants: TunerConstants) -> TunerConstants:
    """Set each protocol's ring hop on NVLink to the median of what the other machines leave for it."""
    machine = MACHINES["8 x A100"]
    left: dict[str, list[float]] = {p: [] for p in _PROTOCOLS}
    for table in OTHER_A100_ALL_REDUCE:
        for size, seconds in zip(table.sizes, table.seconds, strict=True):
            choice = choose(size, machine)
            rest = seconds - size / bandwidth(choice, machine) - latency(choice, machine, constants)
            hop = constants.hop["nvlink"][choice[0]][choice[1]]
            left[choice[1]].append(hop + rest / (2 * (machine.ranks - 1)))
    ring = {p: max(constants.hop["nvlink"]["ring"][p], float(np.median(hops))) for p, hops in left.items()}
    nvlink = {**constants.hop["nvlink"], "ring": ring}
    return replace(constants, hop={**constants.hop, "nvlink": nvlink})


class Correction(NamedTuple):
    """One reason why a measured call takes longer than the published constants say."""

    name: str
    apply: Callable[[TunerConstants], TunerConstants]


#: In the order in which `corrected` applies them. None of them has seen `recorded.A100_ALL_REDUCE`. The second is what
#: other machines take beyond the first, so that both together give the same times as the second alone.
CORRECTIONS = (
    # with -g 8 one thread starts the kernel of every GPU in turn; NCCL's constants suppose one process per GPU.
    # nccl-tests issue 123: a ring of few bytes in a DGX A100, 10 us with 2 GPUs to 33.7 us with 8
    Correction("one thread launches", _launch),
    # a hop forwards a slice of the message and waits for flags or a fence; the constant is that of an empty one.
    # Two other nodes of 8 A100 under the same command, recorded.OTHER_A100_ALL_REDUCE
    Correction("hops under load", _loaded_hops),
)


def corrected(steps: int = len(CORRECTIONS)) -> TunerConstants:
    """Return the published constants with the first `steps` of `CORRECTIONS`, for nccl-tests with -g 8 on 8 A100."""
    constants = PUBLISHED
    for correction in CORRECTIONS[:steps]:
        constants = correction.apply(constants)
    return constants
