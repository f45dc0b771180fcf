"""Why ranks do not finish, as far as it can be told from where they stand (private)."""

from __future__ import annotations

from .errors import entries_apart, groups_apart, line_text, operation_text
from .labels import rank_label

__all__ = ["likely_fault"]


def likely_fault(standings: dict[int, dict]) -> tuple[int, str]:
    """The rank to blame, and one sentence that names the likely reason why the ranks do not finish."""
    if fault := _group_fault(standings):
        return fault
    waiting = {rank: s["waiting"] for rank, s in standings.items() if s.get("waiting")}
    collectives = {rank: e for rank, e in waiting.items() if e["op"] not in ("send", "recv")}
    if collectives:
        return _collective_fault(standings, collectives)
    if waiting:
        return _message_fault(standings, waiting)
    if any(s.get("meeting") for s in standings.values()):
        return _meeting_fault(standings)
    busy = [rank for rank, s in standings.items() if s["phase"] != "returned"]
    who = rank_label(busy)
    verb = "is" if len(busy) == 1 else "are"
    doing = "; ".join(dict.fromkeys(_doing(standings[rank]) for rank in busy))
    doing = doing if len(busy) == 1 else _plural(doing)
    return busy[0], f"{who} {verb} still busy, and no rank waits for another: {doing}."


def _group_fault(standings: dict[int, dict]) -> tuple[int, str] | None:
    """Ranks that make a group which others make differently, or not at all."""
    made = {rank: s["made"] for rank, s in standings.items() if "made" in s}
    meeting = [rank for rank, s in standings.items() if s.get("meets") and made.get(rank)]
    if (fault := groups_apart(made)) or not meeting:
        return fault
    number = max(len(made[rank]) for rank in meeting)
    missing = [rank for rank in made if len(made[rank]) < number]
    if not missing:
        return None
    here = [rank for rank in meeting if len(made[rank]) == number]
    doing = "; ".join(dict.fromkeys(_doing(standings[rank]) for rank in missing))
    who = f"{rank_label(here)} {'waits' if len(here) == 1 else 'wait'} in {made[here[0]][-1]}, group number {number}"
    return missing[0], f"{who}; {rank_label(missing)} never made it ({_plural(doing) if len(missing) > 1 else doing})."


def _meeting_fault(standings: dict[int, dict]) -> tuple[int, str]:
    """Ranks on several hosts that do not reach each other: to blame is the first that does not reach the store."""
    doing: dict[tuple[str, str], list[int]] = {}
    for rank, standing in standings.items():
        doing.setdefault((standing.get("meeting") or "does not", standing["host"]), []).append(rank)
    parts = []
    for (what, host), ranks in doing.items():
        verb, rest = what.split(" ", 1)
        verb = {"waits": "wait", "connects": "connect", "does": "do"}[verb] if len(ranks) > 1 else verb
        parts.append(f"{rank_label(ranks)} on {host} {verb} {rest}")
    met = [rank for rank, s in standings.items() if s.get("meeting", "").endswith("other ranks")]
    if len(met) == len(standings):
        return min(met), f"The ranks have met at their store, but do not reach each other: {'; '.join(parts)}."
    connecting = [rank for rank, s in standings.items() if s.get("meeting", "").startswith("connects")]
    first = min(set(connecting) - set(met) or connecting or standings)
    return first, f"The ranks do not reach each other to make a process group: {'; '.join(parts)}."


def _doing(standing: dict) -> str:
    if standing.get("waiting"):
        return f"it waits in {operation_text(standing['waiting'])}"
    ended = {
        "returned": "it has returned from the function",
        "failed": "it has failed",
        "died": "it has died",
        "not in this cell": "the cell does not run on it",
    }
    if standing["phase"] in ended:
        return ended[standing["phase"]]
    if standing["phase"] == "starting":
        return "it is still starting" + (f", in {standing['calls']}" if standing.get("calls") else "")
    if where := line_text(standing.get("line")):
        return f"it is at {where}"
    return "it gives no answer" if standing["phase"] == "no answer" else "it is in code that is not the notebook's"


def _collective_fault(standings: dict[int, dict], waiting: dict[int, dict]) -> tuple[int, str]:
    first = min(waiting.values(), key=lambda entry: (len(entry["ranks"]), entry["number"]))
    key, number, op = first["key"], first["number"], first["op"]
    name = f"{op} number {number}"
    waiting = {r: entry for r, entry in waiting.items() if entry["key"] == key}
    last = {r: standings[r].get("latest", {}).get(key) for r in first["ranks"] if r in standings}
    missing = [r for r, entry in last.items() if entry is None or entry["number"] < number]
    here = {r: waiting.get(r, entry) for r, entry in last.items() if r not in missing}
    here = {r: entry for r, entry in here.items() if entry["number"] == number}
    apart = entries_apart(here)
    if apart and apart.field == "op":
        text = "; ".join(f"{rank_label(ranks)} called {call}" for call, ranks in apart.ranks.items())
        return apart.odd, f"The ranks disagree on collective number {number} of the {first['group']} group: {text}."
    if missing:
        reasons = {_doing(standings[r]): r for r in reversed(missing)}
        why = [f"rank {r}: {reason}" for reason, r in list(reasons.items())[-3:]]
        if len(reasons) == 1:
            why = [_plural(reason) if len(missing) > 1 else reason for reason in reasons]
        who = f"{rank_label(list(waiting))} {'waits' if len(waiting) == 1 else 'wait'}"
        return missing[0], f"{who} in {name}; {rank_label(missing)} never joined it ({'; '.join(why)})."
    if apart:
        return apart.odd, f"The ranks call {name} with different {apart.by_rank()}."
    if op == "all_to_all":
        fault = f"All ranks joined {name}, and it is not done: a rank sends to another what that one does not expect."
        return min(waiting), f"{fault} With verify=True launch says which."
    return min(waiting), f"All ranks joined {name}, and it is not done: look for an earlier mismatch, or a slow link."


def _plural(sentence: str) -> str:
    words = {"it has": "they have", "it is": "they are", "it waits": "they wait", "it gives": "they give"}
    return next((sentence.replace(one, many, 1) for one, many in words.items() if sentence.startswith(one)), sentence)


def _message_fault(standings: dict[int, dict], waiting: dict[int, dict]) -> tuple[int, str]:
    ring, rank = [], next(iter(waiting))
    while rank in waiting and rank not in ring and waiting[rank]["peer"] is not None:
        ring.append(rank)
        rank = waiting[rank]["peer"]
    if rank in ring:
        ring = ring[ring.index(rank) :]
        operations = {waiting[r]["op"] for r in ring}
        chain = " → ".join(f"rank {r}" for r in [*ring, ring[0]])
        reason = "the order of their calls differs"
        tags = {waiting[r]["stream"][2] for r in ring if waiting[r].get("stream")}
        if len(tags) > 1 and len(operations) == 2 and len(ring) == 2:
            reason = f"their tags differ: {' and '.join(map(str, sorted(tags)))}"
        if len(operations) == 1:
            reason = (
                "each sends first and none receives" if "send" in operations else "each receives first and none sends"
            )
        return min(ring), f"The ranks wait for each other in a circle ({chain}): {reason}."
    rank, entry = next(((r, e) for r, e in waiting.items() if e["peer"] not in waiting), next(iter(waiting.items())))
    peer, what = entry["peer"], operation_text(entry)
    if peer is None or peer not in standings:
        return rank, f"rank {rank} waits in {what}, and no message comes."
    verb = "receives" if entry["op"] == "send" else "sends"
    return peer, f"rank {rank} waits in {what}, but rank {peer} never {verb} it ({_doing(standings[peer])})."
