"""What NCCL writes about itself with ``NCCL_DEBUG=INFO``: over what each pair of ranks talks, in which rings.

The logs are recorded, from public reports: issues 182 and 228 of github.com/NVIDIA/nccl-tests, 952, 1189 and 1412 of
github.com/NVIDIA/nccl. Host names, process numbers and addresses are replaced, lines are shortened, and most lines are
left out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

_HOP = re.compile(r"Channel (\d+)(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[\w+\] )?via (\S+)")
_PLACE = re.compile(r"Ring (\d+) : (\d+) -> (\d+) -> (\d+)")

_RECORDED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
#: How a log begins: two nodes with two A100 PCIe each, NCCL 2.19.3 (nccl-tests issue 182).
BEGINNING = "\n".join(_RECORDED["beginning"])
#: Connections of two nodes with two H20 each, NVLink inside, InfiniBand between (nccl issue 1189, April 2025).
CONNECTIONS = "\n".join(_RECORDED["connections"])
#: Two lines about connections of each of four jobs.
LOGS = {issue: "\n".join(lines) for issue, lines in _RECORDED["by_issue"].items()}


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
