"""What a Mac does not have is not needed: here it is hidden from the course, whose ranks and messages stay the same.

No Mac has run this: its gloo, its fork and its limits are not tried.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.guard(300), pytest.mark.skipif(sys.platform != "linux", reason="hides what Linux has")]

#: Python runs it first, in ranks too: the course's sources see a system called darwin, and no /proc.
HIDE = """
import os, select, signal, socket, time
from importlib.machinery import SourceFileLoader

for module, names in (
    (os, "memfd_create pidfd_open posix_fadvise sched_getaffinity sched_setaffinity setns setresuid unshare"),
    (select, "epoll"), (signal, "sigtimedwait sigwaitinfo"), (socket, "AF_NETLINK TCP_INFO"),
    (time, "pthread_getcpuclockid"),
):
    for name in names.split():
        module.__dict__.pop(name, None)

read, bind = SourceFileLoader.get_data, socket.socket.bind

def hidden(self, path):
    data = read(self, path)
    if path.startswith({root!r}) and path.endswith(".py") and "site-packages" not in path:
        for old, new in ((b"sys.platform", b"'darwin'"), (b'"lo0"', b'"lo"'), (b'"/proc', b'"/hidden')):
            data = data.replace(old, new)
    return data

def compiled(self, name):
    path = self.get_filename(name)
    return self.source_to_code(self.get_data(path), path)

def short(self, address):
    assert not isinstance(address, (str, bytes)) or len(address) < 104, "longer than a Mac takes it"
    bind(self, address)

SourceFileLoader.get_data, SourceFileLoader.get_code, socket.socket.bind = hidden, compiled, short
"""

PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist
from course_utils import HangError, WorkerError, launch, record
from course_utils.check.limits import Endless, limited
from course_utils.doctor import doctor
from course_utils.programs import examine

class Scale:
    def __init__(self, by):
        self.by = by

def summed(scale):
    with record() as ledger:
        x = torch.full((4,), scale.by * dist.get_rank())
        dist.all_reduce(x)
    return scale, x[0].item(), [entry.op for entry in ledger]

def hangs():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))

def dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))

def endless():
    while True:
        pass

results = launch(summed, Scale(2.0), world_size=3)
assert [(scale.by, *rest) for scale, *rest in results] == [(2.0, 6.0, ["all_reduce"])] * 3
for function, error in ((hangs, HangError), (dies, WorkerError)):
    try:
        launch(function, world_size=2, timeout=3)
    except error as told:
        print(told)
launch(summed, Scale(1.0), world_size=4, hosts=2)
try:
    limited(endless, limit=0.5)
except Endless:
    print("endless")
print(examine(os.getpid()))
assert doctor()
sys.path.insert(0, "scripts")
import where
sys.argv = ["where.py", str(os.getpid())]
where.main()
"""


def test_what_a_mac_lacks_ends_no_call_and_is_said_in_sentences(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(HIDE.replace("{root!r}", repr(str(ROOT))))
    (tmp_path / "program.py").write_text(PROGRAM)
    with tempfile.TemporaryDirectory(prefix="this-makes-it-as-long-as-on-a-Mac---", dir="/tmp") as folder:
        assert len(folder) == 49
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TMPDIR": folder}
        done = subprocess.run([sys.executable, tmp_path / "program.py"], cwd=ROOT, env=environment, text=True,
                              capture_output=True)
    said = done.stdout
    assert done.stderr.splitlines()[-1].startswith("ranks are found on Linux only"), said + done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"rank 1\b.*returned", said) and "SIGKILL" in said and "endless" in said
    assert "2 hosts are not emulated: emulated hosts need the network namespaces of Linux" in said
    assert "where.py needs Linux. What follows was recorded with torch" in said and "look at rank 1" in said
    assert "2 ranks, one all_reduce: [3.0, 3.0]" in said
