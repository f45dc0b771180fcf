"""The network clinic of lesson 16: eight programs on two hosts, each with a fault that somebody has reported.

``clinic()`` opens it. Everything is run for real on emulated hosts: the programs, the evidence, the cures.
"""

from __future__ import annotations

from typing import Any

from course_utils.ranks import share
from lessons.debugging_hangs.clinic._cases import LIMIT, Case, Cause, Symptom
from lessons.debugging_hangs.clinic._wards import Clinic
from lessons.multi_node.hosts import conditions_of, hosts_available, side_by_side

from ._network_cures import CURES, check_cure, cured
from ._network_evidence import EVIDENCE
from ._network_programs import meet_as_torchrun, save_and_resume, train
from ._network_runs import HOSTS, Work, run_program

# What a patient and scripts/train.py import, and what their optimizers do: not on each of their ranks.
share("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp")

CAUSES = {
    "gloo takes the loopback": Cause(
        "No interface is named, and a host's own name stands for a loopback address, so that gloo offers that address.",
        {"interface": "not set", "own name": "the loopback", "store": "connected"},
    ),
    "no such interface": Cause(
        "GLOO_SOCKET_IFNAME names an interface that the host does not have.", {"interface": "not there"},
    ),
    "nobody hosts the store": Cause(
        "No agent recognizes itself in the rendezvous endpoint, so each leaves it to another to host the store.",
        {"listens": "nobody", "own name": "the loopback"},
    ),
    "wrong address": Cause(
        "MASTER_ADDR is a host on which rank 0 does not run.", {"listens": "node0", "store": "refused"},
    ),
    "firewall drops the port": Cause(
        "A firewall drops what comes to the port where the ranks meet.",
        {"store": "timed out", "other port": "connected"},
    ),
    "firewall opens only the port": Cause(
        "Firewalls let the port through where the ranks meet, and no other.",
        {"store": "connected", "other port": "timed out"},
    ),
    "interface down": Cause(
        "The interface of a host is down: a cable, a switch or a driver.", {"link": "down"},
    ),
    "no shared disk": Cause(
        "Each host writes its part of a checkpoint to a disk of its own.", {"checkpoint": "two folders"},
    ),
    "unknown name": Cause(
        "A host does not know the name in MASTER_ADDR.", {"store": "unknown name"},
    ),
    "port taken": Cause(
        "Another program on the first host already uses the port where the ranks meet.",
        {"interface": "there", "checkpoint": "none", "listens": "node0", "store": "connected",
         "other port": "connected"},
    ),
}

_USUAL = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
_HEALTHY = {
    "interface": "there", "own name": "its own address", "link": "up", "checkpoint": "none", "listens": "node0",
    "store": "connected", "other port": "connected",
}
_WAITED = "DistStoreError: Timed out after 3 seconds waiting for clients. 1/2 clients joined."
_LATE = "DistNetworkError: The client socket has timed out after 2000ms while trying to connect to "


def _case(fault: str | None, **parts: Any) -> Case:
    settings = _USUAL | parts.pop("settings", {})
    facts = _HEALTHY | parts.pop("facts", {})
    return Case(settings=settings, facts=facts, conditions=conditions_of(fault, HOSTS), **parts)


CASES = (
    _case(
        "port closed", program=train, result=3.0, cause="firewall drops the port",
        complaint="The second node cannot join: it times out, and the first one says that a client is missing.",
        facts={"store": "timed out"}, usual=("open_ports",),
        why="the firewall of node0 drops what comes to MASTER_PORT. Nothing refuses the connection, so node1 waits.",
        rule="a connection that is dropped times out; one where nobody listens is refused at once.",
        thread="https://github.com/sgl-project/sglang/issues/3794",
        report="two nodes of SGLang answered ping, but NCCL did not get through; it worked once the firewall was off.",
        recorded=(_WAITED, _LATE + "(node0, 29500)."),
    ),
    _case(
        "wrong name", program=train, result=3.0, cause="gloo takes the loopback",
        complaint="The ranks have found each other, but the first collective group cannot be made.",
        settings={"GLOO_SOCKET_IFNAME": None}, usual=("environment", "hosts_file"),
        facts={"interface": "not set", "own name": "the loopback"},
        why="each host takes its own name for 127.0.1.1, as Debian and Ubuntu write it into /etc/hosts, so gloo told "
            "the other rank to connect to 127.0.1.1. There, that is the other host itself.",
        rule="a remote address that begins with 127 means: name the interface (GLOO_SOCKET_IFNAME).",
        thread="https://github.com/aws-samples/aws-do-eks/pull/50",
        report="ranks of vLLM on two nodes fell back to 127.0.0.1, because the host's name led to no outside address.",
        recorded=("RuntimeError: Gloo connectFullMesh failed with [pair.cc] timed out connecting: SO_ERROR: Connection "
                  "refused, remote=[127.0.1.1]:(a port)", "(says nothing)"),
    ),
    _case(
        "wrong interface", program=train, result=3.0, cause="no such interface",
        complaint="Our job script worked on the old cluster. On the new nodes every rank stops at once.",
        settings={"GLOO_SOCKET_IFNAME": "ib0"}, usual=("environment",), facts={"interface": "not there"},
        why="GLOO_SOCKET_IFNAME is ib0, and these hosts have lo and eth0 only.",
        rule="an error on every rank, at once and alike, is about settings rather than about the way between hosts.",
        thread="https://github.com/aws-samples/aws-do-eks/pull/51",
        report="GLOO_SOCKET_IFNAME was given NCCL's exclusion list ^lo,docker; gloo knows whole names only, and all "
               "pods crashed.",
        recorded=("RuntimeError: [device.cc] ifa != nullptr. Unable to find address for: ib0",) * 2,
    ),
    _case(
        "wrong name", program=meet_as_torchrun, result=3.0, cause="nobody hosts the store",
        complaint="torchrun on both nodes, the same command, the right address, no firewall: both time out.",
        settings={"MASTER_ADDR": None, "MASTER_PORT": None, "RDZV_ENDPOINT": "10.0.0.1:29500"},
        usual=("environment", "hosts_file"),
        facts={"own name": "the loopback", "listens": "nobody", "store": "refused"},
        why="the endpoint is 10.0.0.1, and node0 looks up its own name, finds 127.0.1.1, and takes itself for another "
            "host. So node0 waits for a store as node1 does, and nobody hosts it.",
        rule="if both time out at the same address, look on that host whether anything listens there.",
        thread="https://github.com/pytorch/pytorch/issues/79388",
        report="torchrun with the first node's IP as endpoint timed out on both nodes after 60 s.",
        recorded=("RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for "
                  f"details. Caused by {_LATE}(10.0.0.1, 29500).",) * 2,
    ),
    _case(
        "only one port open", program=train, result=3.0, cause="firewall opens only the port",
        complaint="The administrator opened our port between the nodes. Since then there is no error any more, and "
                  "nothing else either.",
        facts={"other port": "timed out"}, usual=("open_ports",), limit=3.0,
        why="the ranks meet at MASTER_PORT, and then gloo connects each to each on ports that the system chooses, "
            "which the firewalls drop.",
        rule="MASTER_PORT is only where ranks meet. The data go over other ports, and firewalls between ranks must let "
             "these through as well.",
        thread="https://github.com/pytorch/gloo/issues/54",
        report="gloo's ports are random; the advice of one of its authors was: no firewall between the machines.",
        recorded=("(says nothing in 3 s)",) * 2,
    ),
    _case(
        None, program=save_and_resume, result=6.0, cause="no shared disk",
        complaint="Training and saving work on two nodes. After a restart, the checkpoint cannot be loaded.",
        settings={"CHECKPOINT": "checkpoint"}, usual=("folder",), facts={"checkpoint": "two folders"},
        why="every host saved its own shards into a folder on its own disk, and only node0 has the .metadata file. "
            "Saving cannot notice that.",
        rule="after the first save, list the folder on every node: it must show the same files.",
        thread="https://github.com/huggingface/accelerate/issues/3010",
        report="a sharded state saved on two nodes could not be loaded, because .metadata was on one node only.",
        recorded=("CheckpointException: CheckpointException on rank 1 … AssertionError: metadata is None; global "
                  "metadata read failed: [Errno 2] No such file or directory: 'checkpoint/.metadata'; rank local "
                  "metadata read failed: [Errno 2] No such file or directory: 'checkpoint/__1.metadata'",) * 2,
    ),
    _case(
        None, program=train, result=3.0, cause="wrong address",
        complaint="The job script is that of last week, only the nodes are others. Now both ranks time out.",
        settings={"MASTER_ADDR": "node1"}, usual=("environment",), facts={"store": "refused"},
        why="MASTER_ADDR is node1, but rank 0, which hosts the store, runs on node0.",
        rule="MASTER_ADDR is where rank 0 runs, and not merely a host of the job.",
        thread="https://github.com/pytorch/pytorch/issues/46800",
        report="a scheduler placed the store's process on one node while the address given was that of another; both "
               "timed out after 300 s.",
        recorded=(_LATE + "(node1, 29500).",) * 2,
    ),
    _case(
        "cable pulled", program=train, result=3.0, cause="interface down",
        complaint="Yesterday the same job ran on the same two nodes. Nobody has changed anything.",
        facts={"link": "down", "store": "network is unreachable", "other port": "network is unreachable"},
        usual=("link",),
        why="the interface of node1 is down.",
        rule="'Network is unreachable' comes from the host that says it: it has no interface that leads there.",
        thread="https://github.com/pytorch/pytorch/issues/58431",
        report="training on several nodes stuck in init_process_group; it was the connection of an instance.",
        recorded=(_WAITED, "DistNetworkError: The client socket has failed to connect to any network address of "
                           "(node0, 29500). (errno: 101 - Network is unreachable)."),
    ),
)


def _run(case: Case, cure: dict[str, Any] | None) -> Symptom:
    work = Work(case.settings, case.conditions)
    return run_program(case.program, cured(work, cure), LIMIT) if cure else run_program(case.program, work, case.limit)


def clinic() -> Clinic:
    """Open the clinic: eight patients on two hosts, none of whom has been looked at."""
    def available() -> tuple[bool, str]:
        return hosts_available()[0], "it needs two hosts"  # why there is one only, the lesson has said

    return Clinic(CASES, CAUSES, EVIDENCE, CURES, _run, check_cure, available, side_by_side)
