"""Tells ranks that can never finish from ranks that are slow, by where they stand and not by the clock (private)."""

from __future__ import annotations

from dataclasses import dataclass, field

_SAME = ("op", "peer")  # of one collective on all its ranks
_RESTING = 0.05  # processor time of a rank at rest, as a share of the time: it is asked now and then where it stands


@dataclass
class Watch:
    """Limits for one call that do not depend on how busy the machine is, in seconds.

    Ranks count as stuck after ``idle``, in which all of them wait in a communication, no operation begins and hardly
    any processor time is used. Where it can be proven that no rank can go on, it is told at once.
    """

    idle: float
    computing: float  # processor time after which a rank counts as endless
    look: float = 0.5  # between two looks at where the ranks stand
    _before: dict | None = field(default=None, repr=False)
    _since: float = 0.0
    _used: float = 0.0
    _began: dict[int, float] = field(default_factory=dict, repr=False)

    def verdict(self, standings: dict[int, dict], pending: set[int], used: dict[int, float], now: float) -> str:
        """``"stuck"``, ``"endless"`` or nothing yet, of where all ranks stand, of those that have not returned
        (``pending``), and of the processor time that these have ``used``; ``now`` is a steady clock's.
        """
        for rank in pending:
            if standings[rank]["phase"] != "starting":
                self._began.setdefault(rank, used[rank])
        if any(used[rank] - began > self.computing for rank, began in self._began.items() if rank in pending):
            return "endless"
        if not pending or not all(_waits(standings[rank]) for rank in pending):
            self._before = None
            return ""
        stands = {rank: (rank in pending, standing.get("begun")) for rank, standing in standings.items()}
        if stands != self._before:
            self._before, self._since, self._used = stands, now, sum(used.values())
            return ""
        if not any(can_go_on(rank, standings) for rank in pending):
            return "stuck"
        resting = sum(used.values()) - self._used < _RESTING * (now - self._since) * len(pending)
        return "stuck" if resting and now - self._since >= self.idle else ""


def _waits(standing: dict) -> bool:
    return standing["phase"] == "running" and (standing.get("waiting") is not None or standing.get("meets", False))


def can_go_on(rank: int, standings: dict[int, dict]) -> bool:
    """Whether a rank that waits may still be released, as far as can be told: only a No is certain."""
    standing = standings[rank]
    if standing.get("meets") or standing.get("threads") or not standing.get("held"):
        return True
    return any(_can_complete(rank, entry, standings) for entry in standing["unfinished"])


def _can_complete(rank: int, entry: dict, standings: dict[int, dict]) -> bool:
    if entry["op"] in ("send", "recv"):
        return _is_answered(rank, entry, standings)
    for other in entry["ranks"]:
        last = standings.get(other, {}).get("latest", {}).get(entry["key"])
        if last is None or last["number"] < entry["number"]:
            return False
        if last["number"] == entry["number"] and any(last[what] != entry[what] for what in _SAME):
            return False
    return True


def _is_answered(rank: int, entry: dict, standings: dict[int, dict]) -> bool:
    """Whether the other side of a message has begun; of a receive from any rank, whether any send is left for it."""
    group, peer, tag = entry["stream"]
    if entry["op"] == "send" and peer is None:  # to a rank that does not exist
        return True
    other = "recv" if entry["op"] == "send" else "send"
    peers = entry["ranks"] if peer is None else [peer]
    begun = {p: standings.get(p, {}).get("streams", {}) for p in peers}
    if entry["op"] == "send" and begun[peer].get((other, group, None, tag)):
        return True
    count = sum(streams.get((other, group, rank, tag), 0) for streams in begun.values())
    return count >= entry["place"]
