"""What NCCL writes about itself with ``NCCL_DEBUG=INFO``: over what each pair of ranks talks, in which rings.

The logs are recorded, from public reports: issues 182 and 228 of github.com/NVIDIA/nccl-tests, 952, 1189 and 1412 of
github.com/NVIDIA/nccl. Host names, process numbers and addresses are replaced, lines are shortened, and most lines are
left out.
"""

from __future__ import annotations

import re

_HOP = re.compile(r"Channel (\d+)(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[\w+\] )?via (\S+)")
_PLACE = re.compile(r"Ring (\d+) : (\d+) -> (\d+) -> (\d+)")

#: How a log begins: two nodes with two A100 PCIe each, NCCL 2.19.3 (nccl-tests issue 182).
BEGINNING = """\
nodeB:20:20 [0] NCCL INFO Bootstrap : Using ibs65:192.0.2.2<0>
nodeB:20:20 [0] NCCL INFO NET/Plugin : No plugin found, using internal implementation
nodeB:20:20 [1] NCCL INFO cudaDriverVersion 12030
NCCL version 2.19.3+cuda12.3
nodeB:20:28 [1] NCCL INFO NCCL_IB_DISABLE set by environment to 0.
nodeB:20:28 [1] NCCL INFO NCCL_IB_HCA set to mlx5_0
nodeB:20:28 [1] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ibs65:192.0.2.2<0>
nodeB:20:28 [1] NCCL INFO Using network IB
nodeB:20:27 [0] NCCL INFO === System : maxBw 12.0 totalBw 12.0 ===
nodeB:20:27 [0] NCCL INFO CPU/0 (1/2/-1)
nodeB:20:27 [0] NCCL INFO + PCI[12.0] - GPU/3000 (0)
nodeB:20:27 [0] NCCL INFO + PCI[12.0] - NIC/3010
nodeB:20:28 [1] NCCL INFO Pattern 3, nChannels 1, bw 24.000000/12.000000, type LOC/PHB
nodeB:20:28 [1] NCCL INFO  0 : NET/0 GPU/1 NET/0"""

#: Connections of two nodes with two H20 each, NVLink inside, InfiniBand between (nccl issue 1189, April 2025).
CONNECTIONS = """\
nodeB:41:53 [1] NCCL INFO comm 0x5b0bc60 rank 3 nRanks 4 nNodes 2 localRanks 2 localRank 1 MNNVL 0
nodeA:24:35 [0] NCCL INFO Ring 06 : 2 -> 0 -> 1
nodeA:24:35 [0] NCCL INFO Ring 07 : 1 -> 0 -> 2
nodeA:25:36 [1] NCCL INFO Ring 06 : 0 -> 1 -> 3
nodeA:25:36 [1] NCCL INFO Ring 07 : 3 -> 1 -> 0
nodeA:24:35 [0] NCCL INFO Trees [0] 1/2/-1->0->-1 [1] -1/-1/-1->0->1 [4] 1/-1/-1->0->2
nodeA:24:35 [0] NCCL INFO P2P Chunksize set to 131072
nodeB:40:52 [0] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA
nodeB:41:53 [1] NCCL INFO Channel 04/0 : 1[1] -> 3[1] [receive] via NET/IB/2/GDRDMA
nodeB:41:53 [1] NCCL INFO Channel 06/0 : 1[1] -> 3[1] [receive] via NET/IB/2/GDRDMA
nodeB:41:53 [1] NCCL INFO Channel 05/0 : 3[1] -> 1[1] [send] via NET/IB/2/GDRDMA
nodeB:41:53 [1] NCCL INFO Channel 07/0 : 3[1] -> 1[1] [send] via NET/IB/2/GDRDMA
nodeB:41:53 [1] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
nodeA:25:36 [1] NCCL INFO Channel 05/0 : 1[1] -> 0[0] via P2P/CUMEM
nodeA:25:36 [1] NCCL INFO Channel 07/0 : 1[1] -> 0[0] via P2P/CUMEM
nodeB:40:52 [0] NCCL INFO threadThresholds 8/8/64 | 32/8/64 | 512 | 512
nodeB:41:53 [1] NCCL INFO 8 coll channels, 0 nvls channels, 8 p2p channels, 2 p2p channels per peer
nodeA:24:35 [0] NCCL INFO comm 0x5b41750 rank 0 nranks 4 cudaDev 0 busId 18000 - Init COMPLETE"""

#: Two lines about connections of each of four jobs.
LOGS = {
    "nccl 1189": """\
[1] NCCL INFO Channel 04/0 : 1[1] -> 3[1] [receive] via NET/IB/2/GDRDMA
[1] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM""",
    "nccl 952": """\
[7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3
[2] NCCL INFO Channel 00/0 : 10[2] -> 9[1] via P2P/IPC/read""",
    "nccl 1412": """\
[5] NCCL INFO Channel 03/0 : 5[5] -> 12[4] [send] via NET/IB/3
[7] NCCL INFO Channel 00/0 : 7[7] -> 6[6] via P2P/direct pointer/read""",
    "nccl-tests 228": """\
[7] NCCL INFO Channel 00 : 7[ca000] -> 6[c7000] via SHM/direct/direct
[1] NCCL INFO Channel 00 : 1[2a000] -> 0[27000] via SHM/direct/direct""",
}


def transports(log: str) -> dict[tuple[int, int, str], set[int]]:
    """Return what pairs of ranks talk over: (sender, receiver, transport) -> channels."""
    found: dict[tuple[int, int, str], set[int]] = {}
    for channel, sender, receiver, via in _HOP.findall(log):
        found.setdefault((int(sender), int(receiver), via), set()).add(int(channel))
    return found


def table(log: str) -> str:
    """Return `transports` as lines of text, a pair of ranks each."""
    rows = [f"{sender:4} -> {receiver}    {via:18}  {', '.join(map(str, sorted(channels)))}"
            for (sender, receiver, via), channels in sorted(transports(log).items())]
    return "\n".join(["from -> to   over                channels", *rows])


def network(log: str) -> str:
    """Return how nodes talk to each other, in words, and whether GPUs of a node talk through host memory."""
    ways = {via for _, _, via in transports(log)}
    between = "one node"
    for sign, says in (("NET/Socket", "TCP"), ("NET/IB", "RDMA from host memory")):
        if any(way.startswith(sign) for way in ways):
            between = says
    if any(way.startswith("NET/IB") and way.endswith("GDRDMA") for way in ways):
        between = "GPUDirect RDMA"
    return between + (", GPUs through host memory" if any("SHM" in way for way in ways) else "")


def ring_order(log: str, channel: int) -> list[int]:
    """Return the ranks of a channel's ring in order, from 0; each rank prints only its own place in the ring."""
    following: dict[int, int] = {}
    for number, before, here, after in _PLACE.findall(log):
        if int(number) == channel:
            following |= {int(before): int(here), int(here): int(after)}
    ends = set(following) - set(following.values())  # where a log with lines left out begins
    order = [min(ends, default=0)]
    while following.get(order[-1], order[0]) not in order:
        order.append(following[order[-1]])
    return order[order.index(0) :] + order[: order.index(0)]
