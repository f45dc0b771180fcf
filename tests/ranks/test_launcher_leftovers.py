"""Promises about what calls leave: forks of a rank, processes in sessions of their own, files; and how ranks end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import psutil
import pytest
import torch.distributed as dist
from calls import all_is_well
from kernels import Script, left_behind, marked

from course_utils import launch, shutdown
from course_utils.ranks import processes

pytestmark = pytest.mark.guard(60)


# --- a fork of a rank never goes on as the rank --------------------------------------------------------------------


def test_the_results_are_the_parents_when_a_forked_child_goes_on():
    def work():
        if os.fork() == 0:
            return "CHILD"
        time.sleep(0.2)
        return "parent"

    assert launch(work, world_size=2, timeout=80) == ["parent"] * 2
    all_is_well(2)


def test_what_a_child_prints_after_its_call_is_shown_in_no_later_one(tmp_path, capsys):
    def work():
        child = f"until test -e go; do sleep 0.05; done; echo ghost; touch {dist.get_rank()}"
        subprocess.Popen(child, shell=True, cwd=tmp_path)

    launch(work, world_size=2)
    (tmp_path / "go").touch()
    while len([*tmp_path.iterdir()]) < 3:
        time.sleep(0.05)
    launch(lambda: print("mine"), world_size=2)
    assert capsys.readouterr().out == "[ranks 0,1] mine\n"


# --- processes in a session of their own ---------------------------------------------------------------------------

CHILDREN = """
import os, subprocess, sys, time
from course_utils import launch

def children():
    own = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    code = "import subprocess as s; print(s.Popen(['sleep', '1000'], start_new_session=True, stdout=-3, stderr=-3).pid)"
    subprocess.run([sys.executable, "-c", code], start_new_session=True, capture_output=True)

launch(children, world_size=2)
print("there", flush=True)
"""


@pytest.mark.parametrize("end", ["normal", "SIGKILL"])
def test_children_in_sessions_of_their_own_end_with_the_notebook(end):
    with Script(CHILDREN + ("" if end == "normal" else "time.sleep(1000)")) as script:
        script.read("there")
        if end == "normal":
            script.finish()
        else:
            assert len([p for p in marked(script.mark) if p.name() == "sleep"]) >= 4
            os.kill(script.process.pid, signal.SIGKILL)
        assert not left_behind(script.mark, script.temporary)


# --- files ---------------------------------------------------------------------------------------------------------

LOADING = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from course_utils import HangError, WorkerError, launch, shutdown

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, i):
        time.sleep(0.001)
        return torch.ones(3)

def load(how):
    for i, batch in enumerate(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2)):
        if i == 5:
            print("loading", flush=True)
            if how == "hangs":
                time.sleep(1000)
            if how == "dies" and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

def count():
    return sum(len(batch) for batch in torch.utils.data.DataLoader(torch.ones(64, 2), batch_size=4, num_workers=2))

def left():
    folders = [folders + names for _, folders, names in os.walk(os.environ["TMPDIR"])]
    return [name for names in folders for name in names if "pymp" in name]
"""


def test_data_loaders_that_are_stopped_leave_no_files_and_others_work():
    with Script(
        LOADING
        + """
for how, timeout in (("hangs", 3), ("dies", 60)):
    try:
        launch(load, how, world_size=2, timeout=timeout)
    except WorkerError as error:
        print(type(error).__name__, flush=True)
    print("next", launch(count, world_size=2), left())
"""
    ) as script:
        out = script.finish()
        assert "HangError" in out and out.count("next [64, 64] []") == 2, out
        assert not left_behind(script.mark, script.temporary)


SMALL = "from course_utils import launch\nlaunch(print, world_size=2)\n"


def test_the_next_start_removes_what_a_killed_notebook_and_server_leave_and_nothing_of_a_living_one():
    with Script("""
import os, time
from course_utils import launch
server = launch(os.getppid, world_size=2)[0]
print("server", server, flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print("new ranks", launch(lambda: 7, world_size=3), flush=True)
time.sleep(1000)
""") as script:
        script.read("server ")
        server = int(script.read("\n"))
        with Script(SMALL, TMPDIR=str(script.temporary)) as other:
            other.finish()
        (script.folder / "go").touch()
        script.read("new ranks [7, 7, 7]")
        os.kill(script.process.pid, signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)
        os.kill(script.process.pid, signal.SIGKILL)
        while marked(script.mark):
            time.sleep(0.05)
        left = os.listdir(script.temporary)
        assert len(left) <= 1 and all(name.startswith("course-") for name in left), left
        with Script(SMALL, TMPDIR=str(script.temporary)) as after:
            after.finish()
            assert not left_behind(after.mark, script.temporary)


# --- interrupts and other threads while ranks end --------------------------------------------------------------------


def test_an_interrupt_of_shutdown_strikes_when_the_ranks_have_ended(monkeypatch):
    pids = launch(os.getpid, world_size=2)
    kill = processes.kill

    def interrupted(workers):
        os.kill(os.getpid(), signal.SIGINT)
        kill(workers)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(processes, "kill", interrupted)
        shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    all_is_well()


def test_shutdown_ends_the_call_of_another_thread(tmp_path):
    said = []

    def stay():
        (tmp_path / str(dist.get_rank())).touch()
        time.sleep(80)

    def call():
        try:
            launch(stay, world_size=2)
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.05)
    with pytest.raises(RuntimeError, match=r"another launch is running on the ranks; .* end it: shutdown\(\)"):
        launch(os.getpid)
    shutdown()
    thread.join()
    assert said == ["shutdown() has ended the ranks of this call"]
    all_is_well()
