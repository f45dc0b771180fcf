"""One call on the ranks, from the moment it is sent: output, replies, deaths, where the ranks stand (private)."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from multiprocessing.connection import wait

from . import errors, verify
from .by_rank import folds
from .channels import MARK
from .interrupts import Interrupts, held_back
from .likely_fault import likely_fault
from .output import Merger
from .processes import Worker, learner_line
from .status_line import TICK, Status
from .watch import can_go_on

_GRACE = 0.3  # seconds between the first failure and asking the others where they stand
_CONNECTION_GRACE = 1.0  # the same when the failure only says that another rank has gone
_ANSWER = 0.5  # seconds a rank has to say where it stands
_COMPARE = 0.05  # seconds between two looks at what the ranks have called, if they are compared
_DEAF = ("no answer", "starting")  # phases from which a rank does not come back when it is aborted
_RETURN = 1.5  # seconds an aborted rank has to come back before it is killed
_AGAIN = 0.3  # seconds in which a rank that was answered may ask again
_REST = 1 << 18  # bytes of output that are read from a rank that is stopped or has died


class Collector:
    """Waits for the replies of the ranks of one call."""

    def __init__(self, call, number: int, ranks: list[int], workers: dict[int, Worker], interrupts: Interrupts):
        self.call, self.number, self.ranks, self.workers = call, number, ranks, workers
        self.results: dict[int, bytes | None] = {}  # pickled
        self.communication: dict[int, dict] = {}  # of the ranks that have returned
        self.lost: set[int] = set()  # ranks that must not serve another call
        self.same_group = True  # whether the ranks' process group can serve the next call,
        self.settled = True  # and whether it can be ended: nothing is under way between the ranks
        self._failures: dict[int, dict] = {}
        self._pending = set(ranks)
        self._status = Status(call.show)
        self._merger = Merger(ranks, lambda item: None)
        for rank in ranks:
            if workers[rank].ran and not call.kind.keeps_names:  # what is left of an earlier call may have printed
                self._read_rest(rank)
        self._merger = Merger(ranks, self._status.show, call.by_rank)
        self._interrupts = interrupts
        self._stopping = False
        self._questions = 0
        self._deadline = 0.0
        self._examined: int | None = None  # the rank whose failure the learner looks at
        self._watch = call.watch or (verify.watch() if call.verify else None)
        files = {rank: verify.path(workers[rank].folder, number) for rank in ranks} if call.verify else {}
        self._verifier = verify.Verifier(files) if call.verify else None

    def wait(self) -> None:
        """Wait for all replies while showing what ranks print. Raises what the contract says."""
        interrupted, verdict = False, ""
        try:
            verdict = self._wait()
        except KeyboardInterrupt:
            interrupted, self._interrupts.count = True, 0
        if interrupted or self._pending or self._failures or self._differs():
            with held_back(strikes=not interrupted):
                standings, unfinished = self._where(), set(self._pending)
                self._differs()  # before ranks that are stopped clean up
                self._stop(standings)
            self._status.erase()
            if interrupted or any(failure.get("phase") == "quit" for failure in self._failures.values()):
                raise errors.Interrupted(errors.state_table(standings))
            if self._verifier and (mismatch := self._verifier.error()):
                raise mismatch
            if self._failures:
                raise self._first_cause(standings)
            raise self._hang(standings, unfinished, verdict)
        self._judge_group()
        self._end_output()
        self._warn()
        self._status.erase()

    def close(self) -> None:
        """Remove what the ranks have written down."""
        if self._verifier is not None:
            self._verifier.close()

    def _wait(self) -> str:
        """Until all have replied and printed what they had to, or must be stopped: the reason, if a watch says so."""
        now = time.monotonic()
        self._deadline, look = now + self.call.timeout, now + 2 * self._watch.look if self._watch else float("inf")
        while self._pending or any(self._merger.is_open(rank) for rank in self.ranks):
            now = time.monotonic()
            if self._differs():
                return ""
            if now >= look and self._pending and not self._failures:
                if verdict := self._look():
                    return verdict
                look = time.monotonic() + self._watch.look
            stop = min(self._deadline, self._patience()) if self._pending else now + _ANSWER
            if self._pending and now >= stop:
                return ""
            tick = _COMPARE if self._verifier else TICK
            if not self._listen(min(stop, now + tick, max(look, now)) - now) and not self._pending:
                return ""
            self._merger.flush()
            self._status.update(sorted(self._pending), self._merger.unended())
        return ""

    def _differs(self) -> bool:
        """Whether ranks have passed different things to an operation."""
        return self._verifier is not None and self._verifier.look(set(self.communication))

    def _patience(self) -> float:
        """Until when to wait for the others once a rank has failed."""
        if not self._failures:
            return float("inf")
        only_echoes = all(failure["connection"] for failure in self._failures.values())
        return min(f["seen"] for f in self._failures.values()) + (_CONNECTION_GRACE if only_echoes else _GRACE)

    # ---------------------------------------------------------------------------------------------------------- listen

    def _listen(self, timeout: float) -> bool:
        """Handle whatever arrives within ``timeout`` seconds; False if nothing did."""
        sources: dict = {}
        for rank in self.ranks:
            worker = self.workers[rank]
            if rank in self._pending:
                sources[worker.task] = sources[worker.process.sentinel] = rank
            if worker.output_open:
                sources[worker.output] = rank
        with self._interrupts.at_once(True):
            ready = wait(list(sources), max(timeout, 0))
        for source in ready:
            rank = sources[source]
            if source is self.workers[rank].output:
                self._read_output(rank)
        for source in ready:
            rank = sources[source]
            if source is self.workers[rank].task and rank in self._pending:
                self._read_reply(rank)
        for source in ready:
            rank = sources[source]
            if source == self.workers[rank].process.sentinel and rank in self._pending:
                self._note_death(rank)
        return bool(ready)

    def _read_output(self, rank: int) -> int:
        """Take what a rank has printed, 64 KiB at most; returns how many bytes."""
        worker = self.workers[rank]
        data = worker.read_output()
        if data:
            self._merger.feed(rank, data, self.number)
        else:
            worker.output_open = False
            self._merger.close(rank)
        return len(data)

    def _read_pipe(self, rank: int) -> None:
        """Take what is in the pipe of a rank; not more, should somebody go on writing."""
        worker, read = self.workers[rank], 0
        while worker.output_open and read < _REST and wait([worker.output], 0):
            read += self._read_output(rank)

    def _read_rest(self, rank: int) -> None:
        """Take what is left in the pipe of a rank."""
        self._read_pipe(rank)
        self._merger.close(rank)

    def _read_reply(self, rank: int) -> None:
        """Take a reply; a rank that asks may ask again before another does, so that answers belong together."""
        task, kind = self.workers[rank].task, "asks"
        while kind == "asks":
            try:
                kind, number, content, communication, files = task.recv()
                if kind == "asks":
                    task.send(self._answer(rank, *content, examines=communication))
                    if not task.poll(_AGAIN):
                        return
            except (EOFError, OSError):
                return  # it has died: its sentinel says how
        if number != self.number:
            return
        self._pending.discard(rank)
        if files is None:
            self.lost.add(rank)
        else:
            self.workers[rank].files = files
        if self._stopping:
            return
        if kind == "done":
            self.results[rank], self.communication[rank] = content, communication
        else:
            self._failures[rank] = content | {"seen": time.monotonic()}

    def _answer(self, rank: int, said: str, prompt: str, examines: bool) -> str | None:
        """What the learner answers to a rank, in the cell's own prompt; meanwhile no time-out runs. None: no answer.

        Of ranks that fail one is examined (``launch(..., post_mortem=True)``).
        """
        if self._stopping or examines and self._examined not in (None, rank):
            return None
        self._examined = rank if examines else self._examined
        self._read_pipe(rank)
        self._merger.flush(asks=rank)
        self._status.show(re.sub(f"{MARK.decode()}(.*?){MARK.decode()}", lambda file: errors.file_label(file[1]), said))
        began = time.monotonic()
        try:
            with self._interrupts.at_once(True):
                return input(prompt)
        except (EOFError, RuntimeError):  # also IPython's StdinNotImplementedError
            return None
        finally:
            waited = time.monotonic() - began
            self._deadline += waited
            self._status.stand_still(waited)
            for failure in self._failures.values():
                failure["seen"] += waited

    def _end_output(self) -> None:
        """Show what is left of the ranks' output, and then each rank's own if that is wanted."""
        for rank in self.ranks:
            self._merger.close(rank)
        self._merger.flush()
        if (shown := self._merger.by_rank) and any(shown.values()):
            self._status.show(folds(shown))

    def _note_death(self, rank: int) -> None:
        """A rank has died: keep what it said last, and how it ended."""
        worker = self.workers[rank]
        while worker.task.poll(0) and rank in self._pending:
            before = len(self._pending)
            self._read_reply(rank)
            if len(self._pending) == before:
                break
        self._read_rest(rank)
        worker.output_open = False
        if rank not in self._pending:
            return
        self._pending.discard(rank)
        self.lost.add(rank)
        if self._stopping:
            return
        worker.process.join(0.2)
        last, line = worker.last_operation(), worker.fatal_frame()
        code = worker.process.exitcode
        if line is None and code == -signal.SIGABRT and last and last["where"]:
            line = learner_line(*last["where"])
        self._failures[rank] = {
            "death": code, "connection": False, "time": 0.0, "seen": time.monotonic(),
            "last": last, "line": line, "said": self._merger.fatal.get(rank, ""),
        }

    # ------------------------------------------------------------------------------------------------- stand and stop

    def _ask(self, question: str, ranks: set[int]) -> dict[int, dict]:
        """Ask ranks and return the answers that come within a moment."""
        self._questions += 1
        asked = (self.number, self._questions)
        answers: dict[int, dict] = {}
        for rank in ranks:
            with contextlib.suppress(OSError):
                self.workers[rank].control.send((question, asked))
        deadline = time.monotonic() + _ANSWER
        for rank in sorted(ranks):
            with contextlib.suppress(OSError, EOFError):
                while rank not in answers and self.workers[rank].control.poll(max(0.0, deadline - time.monotonic())):
                    to, answer = self.workers[rank].control.recv()
                    if to == asked:  # not the late answer to an earlier one
                        answers[rank] = answer
        return answers

    def _standings(self) -> dict[int, dict]:
        """Where each rank stands: what those say that still run, and what is known of the others."""
        standings = self._ask("where", self._pending)
        for rank in self.ranks:
            if rank in self._failures:
                failure = self._failures[rank]
                standings[rank] = {"phase": "died" if "death" in failure else "failed"} | failure
                if failure["connection"]:  # it was waiting when another rank went
                    standings[rank]["waiting"] = failure["last"]
            elif rank in self.communication:
                standings[rank] = {"phase": "returned"} | self.communication[rank]
        for rank in set(range(self.call.world_size)).difference(self.ranks):
            standings[rank] = {"phase": "not in this cell", "last": None}
        return standings

    def _look(self) -> str:
        """What the call's watch says of where the ranks stand now."""
        standings = self._standings()
        for rank in self._pending.difference(standings):
            standings[rank] = {"phase": "no answer"}
        used = {rank: self.workers[rank].cpu_seconds() for rank in self._pending}
        return self._watch.verdict(standings, self._pending, used, time.monotonic())

    def _where(self) -> dict[int, dict]:
        """Where each rank stands, also of those that do not answer."""
        standings = self._standings()
        silent = self._pending.difference(standings)
        for rank in silent:  # it holds the interpreter lock: its fault handler can still tell the line
            self.workers[rank].report()
        if silent:
            time.sleep(0.1)
        for rank in silent:
            worker = self.workers[rank]
            standings[rank] = {"phase": "no answer", "last": worker.last_operation(), "line": worker.fatal_frame()}
        if self.call.hosts is not None:
            for rank, standing in standings.items():
                standing["host"] = self.call.hosts.name(rank)
        return dict(sorted(standings.items()))

    def _stop(self, standings: dict[int, dict]) -> None:
        """Bring the ranks back that still run; those that do not come are `lost`.

        A function's ranks are interrupted, so that they can clean up, and are lost all the same: whatever they were in
        the middle of is not left half done. Those of a cell are kept for their names, unless they were importing.
        """
        kept, parts = self.call.kind.keeps_names, [*self.communication.values(), *self._failures.values()]
        self.settled = not self._pending and all(part.get("settled") for part in parts)
        self.same_group = kept and self.settled and self.call.backend == "nccl"  # it ends with its processes
        for rank in self.ranks:
            self._read_rest(rank)
        self._end_output()
        self._stopping, interrupted = True, set(self._pending)
        self._merger = Merger(self.ranks, lambda item: None)  # what they print about being stopped is of no interest
        for rank in interrupted:
            with contextlib.suppress(OSError):
                self.workers[rank].control.send(("abort", self.number))
        deaf = {rank for rank in interrupted if standings[rank]["phase"] in _DEAF}
        deadline = time.monotonic() + (_RETURN if interrupted - deaf else 0)
        while self._pending - deaf and time.monotonic() < deadline:
            self._listen(deadline - time.monotonic())
        self.lost |= {r for r in interrupted if not kept or r in self._pending or standings[r].get("importing")}

    # ---------------------------------------------------------------------------------------------------------- judge

    def _hang(self, standings: dict[int, dict], unfinished: set[int], verdict: str) -> errors.HangError:
        """The error for ranks that do not finish."""
        rank, fault = likely_fault(standings)
        if self._verifier and (advice := self._verifier.advice(standings)):
            fault = f"{fault}\n{advice}"
        waits = all(standings[rank].get("waiting") for rank in unfinished)
        kind = verdict or ("stuck" if waits and not any(can_go_on(r, standings) for r in unfinished) else "slow")
        heads = {"stuck": "the ranks can never finish", "endless": "a rank computes without end"}
        head = heads.get(verdict, f"no result after {self.call.timeout:g} s")
        error = errors.HangError(rank, head, fault, errors.state_table(standings), kind)
        error.starting = any(standings[r]["phase"] == "starting" for r in unfinished)
        return error

    def _first_cause(self, standings: dict[int, dict]) -> errors.WorkerError:
        def order(item: tuple[int, dict]) -> tuple:
            return item[1]["connection"], "death" not in item[1], item[1]["time"], item[0]

        failure = min(self._failures.items(), key=order)[1]
        return errors.worker_error(failure, self._failures, standings)

    def _judge_group(self) -> None:
        """Have the group made anew if ranks called different things, left messages, made others or destroyed it."""
        parts = list(self.communication.values())
        self.same_group = all(part["same_group"] for part in parts)
        self.settled = all(part["settled"] for part in parts)
        if self.call.kind.keeps_names:
            return  # what a cell leaves under way, another may finish
        sent, received = sum(part["sent"] for part in parts), sum(part["received"] for part in parts)
        entries = [(key, entry) for part in parts for key, entry in part["latest"].items()]
        joined = {(key, entry["number"]): 0 for key, entry in entries}
        for key, entry in entries:
            joined[key, entry["number"]] += 1
        if sent != received or any(joined[key, entry["number"]] != len(entry["ranks"]) for key, entry in entries):
            self.same_group = self.settled = False

    def _warn(self) -> None:
        """Say which collective the ranks have called differently, if the library has not noticed it."""
        by_group: dict[str, dict[int, int]] = {}
        for rank, part in self.communication.items():
            for key, digest in part["digests"].items():
                by_group.setdefault(key, {})[rank] = digest
        for rank, part in sorted(self.communication.items()):
            if part["aliased"]:
                self._status.show(f"Warning: {part['aliased'].format(rank=rank)}: each has the value that came last.\n")
                break
        differ = [key for key, digests in by_group.items() if len(set(digests.values())) > 1]
        signatures = self._ask("signatures", set(self.ranks)) if differ else {}
        for key in differ:
            calls = {rank: signatures[rank].get(key, []) for rank in by_group[key] if rank in signatures}
            if text := errors.silent_difference(calls):
                self._status.show(f"Warning: {text}\n")
