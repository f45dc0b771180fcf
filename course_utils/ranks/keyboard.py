"""A rank's keyboard: ``breakpoint()``, ``input()`` and post-mortem debugging ask in the cell's own prompt (private).

A question goes over the connection for calls, which nobody else uses while a call runs. What pdb writes travels with
its next question: in what the rank prints it would wait for lines of other ranks.
"""

from __future__ import annotations

import bdb
import builtins
import contextlib
import io
import linecache
import os
import pdb
import sys
import threading

from .channels import MARK
from .learner_code import is_learner
from .standing import WORKER
from .state import state

_HELP = "(n: next line, p x: show x, c: go on, q: end the call, h: help)"


class _Keyboard(io.TextIOBase):
    """What pdb reads from and writes to."""

    def __init__(self) -> None:
        self.answered = False  # whether somebody can answer in the call that runs
        self._said: list[str] = []
        self._task = None
        self._examines = False  # whether it asks on behalf of a post-mortem
        self._greeted = 0  # the call in which a debugger has stopped before

    def install(self, task) -> None:
        """Ask over ``task`` what functions of this rank ask."""
        self._task = task
        builtins.input = self.input
        sys.breakpointhook = _stop_here
        pdb.Pdb = _Debugger  # where pdb.set_trace(), pdb.post_mortem() and dist.breakpoint() look

    def write(self, text: str) -> int:
        self._said.append(text)
        return len(text)

    def readline(self, _size: int = -1) -> str:
        answer = self._ask()
        return "" if answer is None else answer + "\n"

    def _ask(self) -> str | None:
        """What the learner types; None if the question is not put, or not answered."""
        with contextlib.suppress(Exception):  # the function may have put something else there
            sys.stdout.flush()
        said, newline, prompt = "".join(self._said).rpartition("\n")
        self._said.clear()
        state.asks = True
        try:
            self._task.send(("asks", state.call, (said + newline, prompt), self._examines, None))
            return self._task.recv()
        finally:
            state.asks = False

    def input(self, prompt: object = "", /) -> str:
        """Stands in for Python's ``input``."""
        self.require(EOFError, "input() gets no answer: pass what the function needs as an argument")
        self.write(f"[rank {state.rank}] {prompt}")
        if (answer := self._ask()) is None:
            raise EOFError("input() has got no answer")
        return answer

    def require(self, kind: type[Exception], what: str) -> None:
        """Refuse what needs an answer where nobody can give one, and outside the rank's main thread."""
        main = os.getpid() == state.pid and threading.current_thread() is threading.main_thread()
        if not (main and self.answered):
            raise kind(f"ranks have no keyboard here, so {what}")

    def greet(self) -> None:
        if self._greeted != state.call:
            self._greeted = state.call
            self.write(f"rank {state.rank} stops, and no time-out runs {_HELP}\n")

    def end(self) -> None:
        """The function has ended: print what pdb has said after its last question."""
        if text := "".join(self._said).strip():
            print(text)
        self._said.clear()

    def post_mortem(self, error: BaseException) -> None:
        """Let the learner look at the failed call as it stands, if somebody can."""
        if not self.answered or not isinstance(error, Exception) or isinstance(error, bdb.BdbQuit):
            return
        self._examines = True
        with contextlib.suppress(BaseException):  # an interrupt ends the debugger; the failure is told all the same
            self.write(f"rank {state.rank} failed: {type(error).__name__}: {error}\n")
            debugger = _Debugger()
            debugger.reset()
            debugger.interaction(None, error.__traceback__)
        self._examines = False


keyboard = _Keyboard()


def _stop_here(*_arguments, **_named) -> None:
    """Stands in for ``breakpoint``, also where Ray has named a debugger of its own; 0 switches it off, as in Python."""
    if os.environ.get("PYTHONBREAKPOINT") != "0":
        _Debugger().set_trace(sys._getframe(1))


class _Debugger(pdb.Pdb):
    """pdb in the cell's prompt; the launcher's frames are no part of what it shows and steps through."""

    def __init__(self, *_arguments, **_named):
        keyboard.require(RuntimeError, "breakpoint() cannot stop there: print or return what you look for")
        keyboard.greet()
        super().__init__(stdin=keyboard, stdout=keyboard, nosigint=True, readrc=False)
        self.prompt = f"(Pdb rank {state.rank}) "

    def canonic(self, filename: str) -> str:
        return filename  # a cell is no file

    def stop_here(self, frame) -> bool:
        if frame.f_code.co_filename != WORKER:
            return super().stop_here(frame)
        self.clear_all_breaks()  # the function has ended
        self.set_continue()
        return False

    def get_stack(self, f, t):
        """The learner's part of the stack, and in a post-mortem the learner's innermost frame."""
        stack, index = super().get_stack(f, t)
        outside = 1 + max((i for i, (frame, _) in enumerate(stack) if frame.f_code.co_filename == WORKER), default=-1)
        own = [i for i, (frame, _) in enumerate(stack) if t and is_learner(frame.f_code.co_filename)]
        return stack[outside:], max(own, default=index) - outside

    def format_stack_entry(self, frame_lineno, lprefix="\n-> ") -> str:
        frame, line = frame_lineno
        code, mark = frame.f_code, MARK.decode()  # the notebook knows which cell a file is
        text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        return f"{mark}{code.co_filename}{mark}, line {line}, in {code.co_name}{lprefix}{text}"
