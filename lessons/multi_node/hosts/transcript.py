"""What command lines on hosts have printed: shown, searched, and stored for machines without hosts (private)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version

from course_utils import recordings

_SHOWN, _BEGINNING, _WIDTH = 60, 24, 118  # lines and characters that a notebook shows

# PyTorch's marks of time and process: "W0101 12:00:00.000000 77 torch/…]", "[W101 12:00:00.0 …]", "2026-01-01_12:00:00"
_TIME = re.compile(r"^(\[?[EWIF])\d{3,4} \d\d:\d\d:\d\d\.\d+ +(?:\d+ )?")
_DATE = re.compile(r"\b\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d\b")
_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[^\n]*\r(?!\n)")
_PATH = re.compile(r"(?<![\w.:/])/(?!(?:dev|proc|sys|etc)/)(?:[\w.@+~-]+/)+([\w.@+~-]+)")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
_NATIVE = re.compile(  # not shown: native stacks, and that PyTorch asked for the name of an address in vain
    r"^(?:\[rank\d+\]:? ?)?(?:frame #\d+: |<omitting python frames>|Exception raised from )"
    r"|The hostname of the client socket cannot be retrieved"
)
_PORT = re.compile(r"(?<=[\w\]]:)(?:3[2-9]|[45]\d|60)\d{3}\b|(?<=, )(?:3[2-9]|[45]\d|60)\d{3}(?=\))")


def clean(line: str) -> str:
    """A line of output without colors, times, process numbers of its beginning, and folders of this machine."""
    return _ADDRESS.sub("0x…", _PATH.sub(r"…/\1", _DATE.sub("…", _TIME.sub(r"\1 ", _CONTROL.sub("", line))))).rstrip()


@dataclass
class Finished:
    """What one host's command line has come to: its exit code as a shell shows it (137: SIGKILL), what it printed."""

    host: int
    exit_code: int
    output: str


class Transcript(list):
    """The hosts' results, index = host; shown as the lines of all hosts in the order in which they came.

    ``recorded`` is empty for what has just run; else it says what the stored result was measured with.
    """

    def __init__(self, said: list[tuple[str, str]], exit_codes: list[int], recorded: str = ""):
        """``said`` has pairs of a host's name, or nothing for what happened to a host, and a line."""
        super().__init__(
            Finished(host, code, "".join(f"{text}\n" for name, text in said if name == f"node{host}"))
            for host, code in enumerate(exit_codes)
        )
        self.said, self.exit_codes, self.recorded = said, exit_codes, recorded

    def lines(self, pattern: str = "") -> list[str]:
        """The lines in which a regular expression is found, as ``node1 | step 5``, or ``-- node1 killed``."""
        return [line for line in map(label, self.said) if re.search(pattern, line)]

    def numbers(self, pattern: str) -> list[tuple[float, ...]]:
        """What the groups of a regular expression match, as numbers: a tuple for each line in which it is found."""
        found = (re.search(pattern, line) for line in self.lines())
        return [tuple(map(float, one.groups())) for one in found if one]

    def show(self, pattern: str = "") -> None:
        """Print the lines in which a regular expression is found; a recorded result is labelled as such."""
        print("\n".join([*self._head(), *map(_cut, self.lines(pattern))]))

    def _head(self) -> list[str]:
        return [f"recorded with {self.recorded}"] if self.recorded else []

    def __repr__(self) -> str:
        rows = [label(one) for one in self.said if not _NATIVE.search(one[1])]
        if len(rows) > _SHOWN:
            ending = _SHOWN - _BEGINNING
            left_out = f"   … {len(rows) - _SHOWN} lines left out; .lines(pattern) finds them …"
            rows = [*rows[:_BEGINNING], left_out, *rows[-ending:]]
        return "\n".join([*self._head(), *map(_cut, rows)])


def _cut(row: str) -> str:
    return row if len(row) <= _WIDTH else row[: _WIDTH - 2] + " …"


def label(one: tuple[str, str]) -> str:
    """A line with the host that it comes from."""
    host, text = one
    return f"{host} | {text}" if host else f"-- {text}"


def store(name: str, result: Transcript) -> None:
    """Store a result below a name, with what belongs to one machine or run taken out."""
    said = [[host, _PORT.sub("PORT", text)] for host, text in result.said if not _NATIVE.search(text)]
    made_with = f"torch {version('torch').partition('+')[0]} on {len(result)} emulated hosts"
    recordings.save(name, {"exit_codes": result.exit_codes, "said": said}, made_with)


def load(name: str) -> Transcript | None:
    """The stored result of a name, if there is one."""
    try:
        content, made_with = recordings.load(name)
    except FileNotFoundError:
        return None
    return Transcript([(host, text) for host, text in content["said"]], content["exit_codes"], made_with)
