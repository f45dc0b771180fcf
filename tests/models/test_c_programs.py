"""The C programs compile without a warning; they do what they say, on stand-ins for the GPU and for NCCL.

The stand-ins (native/stand_in_*.c) have NCCL's and CUDA's functions over ordinary memory, and make any one of
them fail on demand. So every line of the lesson's program runs here, its error paths too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from conftest import missing

from lessons.nccl import c_programs

pytestmark = pytest.mark.guard(120)

CLIENT = r"""
#include <nccl.h>
#include <stdio.h>
int client(void) {  // two ranks, one of every call; prints what rank 1 has in the end
    ncclComm_t c[2];
    int a[2][4], sum[2][4], all[2][8], part[2][2], got = 0, token = 7;
    double top[2] = {1.5, 2.5};
    if (ncclCommInitAll(c, 2, NULL) != ncclSuccess) return 1;
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < 4; k++) a[r][k] = (r ? 10 : 1) * (k + 1);
#define BOTH(call)                                                                         \
    do {                                                                                   \
        ncclGroupStart();                                                                  \
        for (int r = 0; r < 2; r++) call;                                                  \
        if (ncclGroupEnd() != ncclSuccess) return 1;                                       \
    } while (0)
    BOTH(ncclAllReduce(a[r], sum[r], 4, ncclInt32, ncclSum, c[r], NULL));
    BOTH(ncclBroadcast(a[r], a[r], 4, ncclInt32, 1, c[r], NULL));
    BOTH(ncclReduce(&top[r], &top[r], 1, ncclFloat64, ncclMax, 1, c[r], NULL));
    BOTH(ncclAllGather(sum[r], all[r], 4, ncclInt32, c[r], NULL));
    BOTH(ncclReduceScatter(sum[r], part[r], 2, ncclInt32, ncclProd, c[r], NULL));
    ncclGroupStart();
    ncclSend(&token, 1, ncclInt32, 1, c[0], NULL);
    ncclRecv(&got, 1, ncclInt32, 0, c[1], NULL);
    if (ncclGroupEnd() != ncclSuccess) return 1;
    if (ncclAllReduce(a[0], a[0], 4, ncclFloat16, ncclSum, c[0], NULL) != ncclInvalidArgument) return 1;
    printf("sum %d bcast %d reduce %g gather %d scatter %d got %d\n", sum[1][3], a[0][3], top[1], all[1][7],
           part[1][1], got);
    ncclCommDestroy(c[0]);
    ncclCommAbort(c[1]);
    return 0;
}
"""
CLIENT_SAYS = "sum 44 bcast 40 reduce 2.5 gather 44 scatter 1936 got 7\n"
CLIENT_TRACE = """\
#0 ncclCommInitAll ranks=2 result=ok
#2   ncclAllReduce count=4 type=int32 bytes=16 op=sum comm=c0 rank=0/2 stream=default result=ok
#3   ncclAllReduce count=4 type=int32 bytes=16 op=sum comm=c1 rank=1/2 stream=default result=ok
#6   ncclBroadcast count=4 type=int32 bytes=16 root=1 comm=c0 rank=0/2 stream=default result=ok
#7   ncclBroadcast count=4 type=int32 bytes=16 root=1 comm=c1 rank=1/2 stream=default result=ok
#10   ncclReduce count=1 type=float64 bytes=8 op=max root=1 comm=c0 rank=0/2 stream=default result=ok
#11   ncclReduce count=1 type=float64 bytes=8 op=max root=1 comm=c1 rank=1/2 stream=default result=ok
#14   ncclAllGather count=4 type=int32 bytes=16 comm=c0 rank=0/2 stream=default result=ok
#15   ncclAllGather count=4 type=int32 bytes=16 comm=c1 rank=1/2 stream=default result=ok
#18   ncclReduceScatter count=2 type=int32 bytes=8 op=prod comm=c0 rank=0/2 stream=default result=ok
#19   ncclReduceScatter count=2 type=int32 bytes=8 op=prod comm=c1 rank=1/2 stream=default result=ok
#22   ncclSend count=1 type=int32 bytes=4 peer=1 comm=c0 rank=0/2 stream=default result=ok
#23   ncclRecv count=1 type=int32 bytes=4 peer=0 comm=c1 rank=1/2 stream=default result=ok
#25 ncclAllReduce count=4 type=float16 bytes=8 op=sum comm=c0 rank=0/2 stream=default result=error 4
#26 ncclCommDestroy comm=c0 rank=0/2 result=ok
#27 ncclCommAbort comm=c1 rank=1/2 result=ok
"""
FAULTS = {  # the call that fails, and which of its calls in each process
    "one-process": {
        "cudaSetDevice": "12", "cudaStreamCreateWithFlags": "12", "cudaEventCreate": "12", "cudaMalloc": "12",
        "cudaMemcpyAsync": "134", "ncclGroupStart": "15", "ncclAllReduce": "15", "ncclGroupEnd": "15",
        "cudaEventRecord": "12", "cudaEventElapsedTime": "1", "ncclCommInitAll": "1", "ncclCommGetAsyncError": "2",
        "cudaStreamQuery": ["2", "hang"],
    },
    "per-gpu": {
        "cudaSetDevice": "1", "cudaStreamCreateWithFlags": "1", "cudaEventCreate": "1", "cudaMalloc": "1",
        "cudaMemcpyAsync": "12", "cudaEventRecord": "12", "ncclGroupStart": "15", "ncclAllReduce": "15",
        "ncclGroupEnd": "15", "ncclGetUniqueId": "1", "ncclCommInitRankConfig": "1", "ncclCommGetAsyncError": "2",
        "cudaStreamQuery": ["2", "hang"],
    },
}
SAYS = {
    "ncclAllReduce": "each: stand-in: CUDA error",
    "ncclGroupEnd": "group: stand-in: system error",
    "ncclCommGetAsyncError": "communicator: stand-in: remote error",
    "cudaStreamQuery:2": "stream: stand-in: a fault on demand",
    "cudaStreamQuery:hang": "time-out: another rank is late or gone",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything compiled, warnings being errors."""
    folder = tmp_path_factory.mktemp("native")
    try:
        toolkit, _ = c_programs.find_nccl(), c_programs.find_compiler()
    except c_programs.MissingToolError as error:
        missing(str(error))
    (folder / "library.c").write_text(CLIENT)
    c_programs.build_stand_ins(folder / "stand_in", toolkit)
    c_programs.build("trace_nccl.c", folder / "libtrace_nccl.so")
    c_programs.build("all_reduce.c", folder / "all_reduce")
    c_programs.build(folder / "library.c", folder / "libclient.so")
    return folder


def on_stand_ins(folder: Path, tmp_path: Path, program: Path | str, *arguments: object, gpus=2, **environment: object):
    return c_programs.run_on_stand_ins(program, folder / "stand_in", gpus, *arguments, TMPDIR=tmp_path, **environment)


def without_times(trace: str) -> str:
    return re.sub(r" us=[\d.]+$", "", trace, flags=re.MULTILINE)


@pytest.mark.parametrize("mode", ["one-process", "per-gpu"])
def test_all_reduce_adds_on_stand_ins(folder: Path, tmp_path: Path, mode: str):
    for gpus in (1, 2, 5):
        done = on_stand_ins(folder, tmp_path, folder / "all_reduce", mode, 1001, gpus=gpus)
        assert (done.returncode, done.stderr) == (0, "")
        timing, verdict = done.stdout.splitlines()
        assert re.fullmatch(r"[\d.]+ us   algbw [\d.]+ GB/s   busbw [\d.]+ GB/s", timing)
        assert verdict == f"{mode}: 1001 floats on {gpus} GPUs, every sum as expected"


@pytest.mark.parametrize("mode", FAULTS)
def test_all_reduce_cleans_up_after_a_fault_in_any_call(folder: Path, tmp_path: Path, mode: str):
    for call, number in [(call, number) for call, numbers in FAULTS[mode].items() for number in numbers]:
        fault = f"{call}:{number}"
        done = on_stand_ins(folder, tmp_path, folder / "all_reduce", mode, 100, 0.2, STAND_IN_FAIL=fault)
        assert done.returncode == 1, fault
        assert SAYS.get(fault, SAYS.get(call, call + "(")) in done.stderr, fault
        assert "left behind" not in done.stderr, fault
        assert "every sum" not in done.stdout, fault
        assert not list(tmp_path.iterdir()), fault


def test_trace_has_every_call_in_python_and_leaves_the_results_alone(folder: Path, tmp_path: Path):
    script = (
        "import ctypes, sys\n"
        "ctypes.CDLL(sys.argv[1] + '/stand_in/libnccl.so.2')\n"  # RTLD_LOCAL, as torch's libraries are
        "sys.exit(ctypes.CDLL(sys.argv[1] + '/libclient.so').client())"
    )
    done = on_stand_ins(folder, tmp_path, sys.executable, "-c", script, folder, LD_PRELOAD=folder / "libtrace_nccl.so")
    assert (done.returncode, done.stdout) == (0, CLIENT_SAYS)
    calls = [line for line in without_times(done.stderr).splitlines() if "ncclGroup" not in line]
    assert calls == CLIENT_TRACE.splitlines()
    assert re.findall(r" us=\d+\.\d$", done.stderr, re.MULTILINE) == re.findall(r" us=.*", done.stderr)


def test_missing_tools_are_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(c_programs.MissingToolError, match="sudo apt install gcc"):
        c_programs.find_compiler()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    what = r"pip install -e '.\[nccl\]'" if sys.platform == "linux" else "Linux only"
    with pytest.raises(c_programs.MissingToolError, match=what):
        c_programs.find_nccl()
