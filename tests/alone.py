"""A plugin for runs with several workers: what failed beside other tests runs once more, with the machine for itself.

Tests that start processes may fail on a machine that is too busy for their limits. Such a failure is told at the end of
the run and has to be mended, but does not fail the run. One that comes again does, and so do more than a few.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST = 3  # tests that may run again; where more fail, something is broken
NBVAL = ("--nbval", "--nbval-cell-timeout", "--nbval-sanitize-with")  # options that the second run needs too


class Alone:
    """Registered where the workers are directed from."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.failed: dict[str, None] = {}  # in the order in which they failed
        self.again: dict[str, bool] = {}  # whether they passed alone

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = None

    @pytest.hookimpl(trylast=True)  # after the workers have ended
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            return
        # a cell of a notebook needs those before it
        chosen = list(dict.fromkeys(name.partition("::")[0] if ".ipynb::" in name else name for name in self.failed))
        if not 0 < len(chosen) <= MOST:
            return
        self.again = {name: self._passes(name) for name in chosen}
        if all(self.again.values()):
            session.exitstatus = pytest.ExitCode.OK

    def _passes(self, name: str) -> bool:
        given = [word for word in self.config.invocation_params.args if str(word).startswith((*NBVAL, "--thorough"))]
        for place, word in enumerate(self.config.invocation_params.args):  # an option's value in a word of its own
            if word in NBVAL[1:]:
                given.insert(given.index(word) + 1, self.config.invocation_params.args[place + 1])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, given), name]
        return subprocess.run(command, cwd=self.config.invocation_params.dir).returncode == 0

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.again:
            terminalreporter.section("failed beside others, run once more alone")
            for name, passed in self.again.items():
                terminalreporter.line(f"{'passes' if passed else 'FAILS'} alone: {name}")
