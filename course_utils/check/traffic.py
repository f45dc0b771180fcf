"""What ledgers say about an answer: bytes as sent, calls, links between nodes, steps; and one audit of them all."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..costs import bytes_sent

__all__ = ["Limit", "by_node", "calls", "counted", "crosses", "fault", "message_steps", "sent"]

Limit = float | tuple[float | None, float | None]  # at most; or at least and at most, None for no limit

_ROUNDING = 0.5  # bytes: 2(N-1)/N of a size need not be whole


def calls(ledger: Iterable[Any]) -> list[Any]:
    """The entries of a ledger that carry data: all but barriers."""
    return [entry for entry in ledger if entry.op != "barrier"]


def counted(ledger: Iterable[Any]) -> str:
    """The calls of a ledger in words, such as ``2 all_reduce, 1 send``."""
    used = Counter(entry.op for entry in calls(ledger))
    return ", ".join(f"{count} {op}" for op, count in sorted(used.items())) or "nothing"


def sent(ledger: Iterable[Any]) -> float:
    """Bytes that a rank sends: of messages those sent, of a collective what `costs.bytes_sent` says for its ranks."""
    return sum(
        bytes_sent(entry.op, len(entry.ranks) or 1, entry.bytes) for entry in calls(ledger) if entry.op != "recv"
    )


def crosses(entry: Any, rank: int, per_node: int) -> bool:
    """Whether an entry of ``rank`` involves ranks of several nodes of ``per_node`` ranks each."""
    ends = entry.ranks if entry.is_collective else [r for r in (rank, entry.peer) if r is not None]
    return len({r // per_node for r in ends}) > 1


def by_node(ledger: Iterable[Any], rank: int, per_node: int) -> tuple[list[Any], list[Any]]:
    """The entries of ``rank`` that stay inside its node, and those between nodes."""
    entries = list(ledger)
    return [e for e in entries if not crosses(e, rank, per_node)], [e for e in entries if crosses(e, rank, per_node)]


def fault(
    ledger: Iterable[Any],
    ops: Collection[str] | None = None,
    *,
    calls: Limit | Mapping[str, Limit] | None = None,
    sent: Limit | None = None,
    carried: Limit | None = None,
    largest: float | None = None,
    **keys: str,
) -> tuple[str, str]:
    """What is wrong first with the calls of a rank: the key of its hint, and a sentence; two empty texts if nothing is.

    A limit is a number, at most that many; or a pair (at least, at most), in which None stands for no limit. Whoever
    gives the lower limits too refuses answers that get their numbers past the ledger.

    Parameters
    ----------
    ledger : iterable of Entry
        A rank's ledger, or some of its entries: a phase, or those between nodes (`crosses`).
    ops : collection of str, optional
        Operations that may be used, such as ``{"send", "recv"}``; by default all.
    calls : limit, or dict of operation to limit
        Number of calls, of all or of each kind; of messages both ends count, so say ``{"send": 1, "recv": 1}``.
    sent : limit
        Bytes that this rank sends: of messages those it sends, not those it receives; of a collective
        ``costs.bytes_sent(op, ranks, size)``, which does not depend on the way the same is done: an all-reduce of S
        bytes and a reduce-scatter and an all-gather of S bytes together both send 2(N-1)/N · S.
    carried : limit
        The sum of the sizes as `record()` shows them, without what is received point to point.
    largest : float
        Bytes that one call carries at most.
    **keys : str
        Which hint a finding gets, if not that of its own name: ``all_reduce="all-reduce"``,
        ``too_few_bytes="weight-kept"``. Findings, in the order in which they are looked for: *other-calls*, or the name
        of such an operation if it has a key (their order decides between several); *object* (calls for objects; only
        with a key); *not-distributed* (nothing at all where a lower limit asks for something); *too-large*;
        *too-many-calls*; *too-many-bytes*; *too-few-calls*; *too-few-bytes*.
    """
    findings = ("too_", "not_", "other_")  # names of operations keep their underscores
    named = {key.replace("_", "-") if key.startswith(findings) else key: hint for key, hint in keys.items()}
    key, what = next(_findings(ledger, ops, named, calls, sent, carried, largest), ("", ""))
    return named.get(key, key), what


def _findings(
    ledger: Iterable[Any],
    ops: Collection[str] | None,
    named: Mapping[str, str],
    number: Limit | Mapping[str, Limit] | None,
    sent_bytes: Limit | None,
    carried: Limit | None,
    largest: float | None,
) -> Iterator[tuple[str, str]]:
    entries = calls(ledger)
    others = {e.op for e in entries} - set(ops) if ops is not None else set()
    for op in sorted(others, key=lambda op: list(named).index(op) if op in named else len(named)):
        yield (op if op in named else "other-calls"), f"the ledger shows {counted(entries)}."
    if "object" in named and any("_object" in entry.call_site for entry in entries):
        yield "object", "the ledger shows a call for objects, which go through pickle."
    numbers = [(None, number)] if not isinstance(number, Mapping) else list(number.items())
    lower = [*(limit for _, limit in numbers), sent_bytes, carried]
    if not entries and any((_range(limit)[0] or 0) > 0 for limit in lower):
        yield "not-distributed", "the ledger of this rank is empty."
    biggest = max((entry.bytes for entry in entries), default=0)
    if largest is not None and biggest > largest + _ROUNDING:
        yield "too-large", f"a call carries {biggest} bytes; {largest:.0f} are enough."
    amounts = [
        (sum(op in (None, entry.op) for entry in entries), limit, "calls", f" of {op}" if op else " in all", 0)
        for op, limit in numbers
    ]
    amounts.append((sent(entries), sent_bytes, "bytes", " are sent", _ROUNDING))
    size = sum(entry.bytes for entry in entries if entry.op != "recv")
    amounts.append((size, carried, "bytes", " are carried", _ROUNDING))
    for got, limit, unit, verb, slack in amounts:
        most = _range(limit)[1]
        if most is not None and got > most + slack:
            need = {0: "none is needed", 1: "1 is enough"}.get(most, f"{most:.0f} are enough")
            count = f"{got:.0f} {unit if got != 1 else unit[:-1]}"
            yield f"too-many-{unit}", f"{count}{verb}; {need}."
    for got, limit, unit, verb, slack in amounts:
        least = _range(limit)[0]
        if least is not None and got < least - slack:
            yield f"too-few-{unit}", f"{got:.0f} {unit}{verb}; it takes at least {least:.0f}."


def _range(limit: Limit | None) -> tuple[float | None, float | None]:
    return limit if isinstance(limit, tuple) else (None, limit)


def message_steps(ledgers: Sequence[Any]) -> int:
    """Number of steps that the point-to-point messages of all ranks need.

    In one step a rank sends at most one message and receives at most one, and it can pass on only what came in an
    earlier step. Computed from the order of the calls on each rank, not from time: a send waits for the receives before
    it on the same rank that were waited for before it, unless all ranks are at a receive; then the sends behind it must
    have been started with it.

    Parameters
    ----------
    ledgers : sequence of Ledger
        One per rank.
    """
    left = [deque(_by_wait(list(ledger))) for ledger in ledgers]
    sent, received = [0] * len(left), [0] * len(left)  # the step of each rank's last message out and in
    under_way: dict[tuple[int, int], deque[int]] = {}

    def send(rank: int, peer: int) -> None:
        sent[rank] = 1 + max(sent[rank], received[rank])
        under_way.setdefault((rank, peer), deque()).append(sent[rank])

    def advance(rank: int, calls: deque) -> bool:
        """Follow one rank up to a receive whose message nobody has sent yet; whether it got on at all."""
        before = len(calls)
        while calls:
            if calls[0].op == "send":
                send(rank, calls[0].peer)
            else:
                sources = range(len(left)) if calls[0].peer is None else [calls[0].peer]
                arriving = [under_way[s, rank] for s in sources if under_way.get((s, rank))]
                if not arriving:
                    break
                received[rank] = max(received[rank] + 1, min(arriving, key=lambda queue: queue[0]).popleft())
            calls.popleft()
        return len(calls) < before

    moved = True
    while moved:
        moved = any([advance(rank, calls) for rank, calls in enumerate(left)])
        if not moved:
            for rank, calls in enumerate(left):
                started = next((call for call in calls if call.op == "send"), None)
                if started is not None:
                    send(rank, started.peer)
                    calls.remove(started)
                    moved = True
    return max(sent + received)


def _by_wait(entries: list[Any]) -> list[Any]:
    """The messages of a rank, a receive where it was waited for and not where it was posted.

    Under gloo a message has completed when its ``wait`` returns; the ledger notes that as the rank issues its next
    call, after the start of this call. So a receive was waited for before a call if its end comes before the start of
    the call after that one. A call in another thread did not wait for a receive that ended after its start. Without an
    end, a receive stays where it was posted.
    """
    bounds = [entry.start for entry in entries[1:]] + [entries[-1].end if entries else None]
    place = list(range(len(entries)))

    def waits_for(call: int, receive: Any) -> bool:
        bound = bounds[call] if entries[call].thread == receive.thread else entries[call].start
        return bound is None or receive.end <= bound

    for i, entry in enumerate(entries):
        if entry.op == "recv" and entry.end is not None:
            later = (j for j in range(i + 1, len(entries)) if waits_for(j, entry))
            place[i] = next(later, len(entries)) - 0.5
    order = sorted(range(len(entries)), key=place.__getitem__)
    return [entries[i] for i in order if entries[i].op in ("send", "recv")]
