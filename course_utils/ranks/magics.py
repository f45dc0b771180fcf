"""``%%ranks`` runs a cell on every rank, in a namespace that lasts between cells; ``%ranks_reset`` starts it afresh."""

from __future__ import annotations

import atexit
import linecache
import re
import sys

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from . import errors, launcher
from .channels import CELL
from .labels import rank_label
from .pool import Call, Pool

__all__ = ["RankMagics"]

_USAGE = "%%ranks [0,2] [--world-size N] [--timeout S] [--post-mortem] [--by-rank]"


@magics_class
class RankMagics(Magics):
    """Cells on ranks. Their processes are apart from those of ``launch``, so that one does not disturb the other."""

    def __init__(self, shell):
        super().__init__(shell)
        self._pool = Pool()
        self._world_size: int | None = None
        self._backend = ""
        atexit.register(self._pool.close)

    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run the cell on every rank, or on some: ``%%ranks [0,2] --world-size 4 --timeout 60``.

        ``torch``, ``dist``, ``rank``, ``world_size`` and ``device`` (also ``device()``) are defined. Names last until
        ``%ranks_reset``. The value of the last expression is shown by rank, merged where it is equal. ``--post-mortem``
        and ``--by-rank`` are as with ``launch``.
        """
        ranks, world_size, timeout, flags = _arguments(line)
        if self._world_size is None or world_size not in (None, self._world_size):
            settled = launcher.settle(world_size, None)
            if self._world_size is not None:
                self._pool.close()
                print(f"{settled[0]} ranks instead of {self._world_size}: they start afresh, without earlier names")
            self._world_size, self._backend = settled
        ranks = list(range(self._world_size)) if ranks is None else ranks
        if not ranks or not all(0 <= rank < self._world_size for rank in ranks):
            raise UsageError(f"there are ranks 0 to {self._world_size - 1}, not {rank_label(ranks)}; {_USAGE}")
        name = f"cell [{self._number()}]"
        cell = "\n" + cell  # the magic's own line is the first that the learner counts
        linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
        try:
            compile(cell, name, "exec", dont_inherit=True)
        except SyntaxError as error:  # told here, once
            line = (error.text or "").strip()
            text = f"{error.msg}\n\n  {name}, line {error.lineno}\n      {line}"
            if line.startswith(("%", "!")):
                text += "\n\nMagics and shell commands work in the notebook only, not on ranks."
            if "await" in error.msg:
                text += "\n\nRanks have no event loop that runs: write asyncio.run(main()) there."
            raise errors.refusal(Exception, text, name="SyntaxError") from None
        call = Call(cell.encode(), self._world_size, self._backend, timeout, CELL, name, ranks, launcher.show, **flags)
        try:
            self._pool.run(call)
        except errors.WorkerError as error:
            unknown = re.fullmatch(r"NameError: name '(\w+)' is not defined.*", error.exception, re.DOTALL)
            if unknown and unknown[1] in self.shell.user_ns:
                here = f"{unknown[1]} stands in the notebook; live ranks know what %%ranks cells have defined."
                error.args = (f"{error}\n\n{here}",)
            raise

    def _number(self) -> int:
        """The number that the notebook shows beside the cell that runs."""
        numbers, frame = getattr(self.shell.compile, "_filename_map", {}), sys._getframe()
        while frame is not None and frame.f_code.co_filename not in numbers:
            frame = frame.f_back
        return self.shell.execution_count if frame is None else numbers[frame.f_code.co_filename]

    @line_magic
    def ranks_reset(self, line: str) -> None:
        """Stop the ranks of ``%%ranks`` cells; the next cell starts new ones, with empty namespaces."""
        if line.strip():
            raise UsageError("%ranks_reset takes no arguments; the next %%ranks cell may ask for another --world-size")
        there = bool(self._pool.workers)
        self._pool.stop()
        self._world_size = None
        done = "the ranks of %%ranks cells were stopped" if there else "no ranks to stop"
        print(f"{done}; the next cell starts new ones")


def _arguments(line: str) -> tuple[list[int] | None, int | None, float, dict[str, bool]]:
    ranks, world_size, timeout, flags = None, None, 60.0, {}
    words = line.replace("=", " ").replace(", ", ",").split()
    while words:
        word = words.pop(0)
        value = words[:1] if word.startswith("--") else []
        try:
            if word.startswith("["):
                ranks = sorted({int(part) for part in word.strip("[]").split(",") if part})
            elif word == "--world-size":
                world_size = int(words.pop(0))
            elif word == "--timeout":
                timeout = launcher.seconds(float(words.pop(0)))
            elif word in ("--post-mortem", "--by-rank"):
                flags[word[2:].replace("-", "_")] = True
            else:
                raise ValueError
        except (ValueError, IndexError):
            given = " ".join([word, *value])
            why = "is not understood" if "{" not in given else "names no variable of the notebook"
            raise UsageError(f"{given!r} {why}; {_USAGE}") from None
    return ranks, world_size, timeout, flags
