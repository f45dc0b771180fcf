"""Promises of `run_on_hosts`: command lines as typed on each host, failures at a line of output, nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time

import psutil
import pytest
from calls import ended
from conftest import missing
from kernels import Script, left_behind, marked

from course_utils import recordings
from lessons.multi_node.hosts import commands, hosts_available, run_on_hosts, transcript

pytestmark = pytest.mark.guard(60)

COUNT = "i=0; while test $i -lt {}; do i=$((i + 1)); echo step $i; sleep 0.05; done"


@pytest.fixture(autouse=True, scope="module")
def real_hosts():
    there, sentence = hosts_available()
    if not there:
        missing(sentence)


@pytest.fixture
def started():
    """Processes that a command has started and left; the ranks of `launch` on warm hosts are not among them."""
    def processes() -> set[int]:
        ours = psutil.Process().children(recursive=True)
        return {p.pid for p in ours if any("host_names" in a for a in p.cmdline())}

    before = processes()
    return lambda: processes() - before


def test_a_command_line_runs_on_each_host_as_typed_there():
    look = "echo $(hostname) {host} $(ip -br -4 address show eth0); echo ${PWD##*/}"
    run = run_on_hosts(f"{look}; echo $MORE >&2; exit {{host}}", env={"MORE": "given"})
    words = [one.output.split() for one in run]
    assert [[*w[:2], w[4], *w[5:]] for w in words] == [
        [f"node{h}", f"{h}", f"10.0.0.{h + 1}/24", os.path.basename(os.getcwd()), "given"] for h in range(2)
    ]
    assert run.exit_codes == [0, 1] and [one.host for one in run] == [0, 1] and not run.recorded


# --- what happens to hosts -----------------------------------------------------------------------------------------


def test_a_killed_host_loses_all_its_processes_at_once_and_may_start_again():
    beside = f"setsid sh -c 'while true; do echo beside; sleep 0.05; done' & {COUNT.format(40)}; kill $!"
    run = run_on_hosts(["sleep 0.1; echo up; " + COUNT.format(60), beside],
                       when=[(r"node1 \| step 5$", "kill node1"), ("ended with exit code 137", "start node1")])
    lines = run.lines("node1")
    killed = lines.index("-- node1 killed: SIGKILL to all its processes")
    end = lines.index("-- node1 ended with exit code 137")  # up to here, what was written before is still read
    assert "node1 | beside" in lines[:killed] and killed < end and lines[end + 1] == "-- node1 started"
    assert run.exit_codes == [0, 0] and lines.count("node1 | step 1") == 2


# --- what is refused, and what goes wrong --------------------------------------------------------------------------


def test_past_its_time_the_last_lines_of_each_host_are_shown_and_all_ends(started):
    with pytest.raises(RuntimeError) as caught:
        run_on_hosts(["echo here; sleep 1000", "sleep 1000"], timeout=4)
    assert str(caught.value) == (
        "no end within 4 seconds. The last lines of each host:\n\nnode0 | here\n\nnode1 | (it has printed nothing)"
    )
    assert not started()


def names(mark: str) -> list[str]:
    found = []
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            found.append(process.name())
    return found


SCRIPT = """
from lessons.multi_node.hosts import run_on_hosts
print("begun", flush=True)
run_on_hosts("setsid sleep 1000 & sleep 1000")
"""


def test_nothing_is_left_when_the_notebook_is_killed():
    with Script(SCRIPT) as script:
        script.read("begun")
        deadline = time.monotonic() + 20
        while names(script.mark).count("sleep") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = [p.pid for p in marked(script.mark)]
        assert len(pids) > 8
        os.kill(script.process.pid, signal.SIGKILL)
        # The fork server ends when it has imported torch, which takes a busy machine a while.
        assert ended(pids, 40) and not left_behind(script.mark, script.temporary)


# --- what is shown and stored --------------------------------------------------------------------------------------


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(recordings, "FOLDER", tmp_path)
    return tmp_path


def test_a_result_is_stored_and_shown_where_hosts_cannot_be_emulated(folder, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_RECORD", "1")
    run = run_on_hosts("echo at node0:41234 in {host}; exit {host}", recorded="example")
    assert json.loads((folder / "example.json").read_text())["made_with"].startswith("torch 2")
    monkeypatch.setattr(commands, "_available", lambda: (False, "there is no Linux."))
    again = run_on_hosts("echo", recorded="example")
    assert again.exit_codes == run.exit_codes == [0, 1] and again.recorded.startswith("torch 2")
    assert sorted(again.lines("at")) == ["node0 | at node0:PORT in 0", "node1 | at node0:PORT in 1"]
    assert repr(again).startswith("recorded with torch 2")
    again.show("in 1")
    assert capsys.readouterr().out.splitlines()[1:] == ["node1 | at node0:PORT in 1"]


RECORDINGS = {path.stem: path.read_text() for path in sorted(recordings.FOLDER.glob("*.json"))}


@pytest.mark.parametrize("name", RECORDINGS)
def test_recordings_hold_nothing_of_one_machine(name):
    assert not re.search(r"/(?:tmp|root|home|work|usr)/|0x[0-9a-f]{6}", RECORDINGS[name])


@pytest.mark.parametrize("name", [name for name, text in RECORDINGS.items() if '"exit_codes"' in text])
def test_recordings_of_commands_say_what_they_were_made_with(name):
    assert not re.search(r"\d\d:\d\d:\d\d", RECORDINGS[name])
    assert transcript.load(name).recorded.startswith("torch 2")
