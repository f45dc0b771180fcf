"""The network clinic of lesson 16: eight programs on two hosts, each with a fault that somebody has reported.

``clinic()`` opens it. Everything is run for real on emulated hosts: the programs, the evidence, the cures.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from course_utils.ranks import share
from lessons.debugging_hangs.clinic._cases import LIMIT, Case, Cause, Symptom
from lessons.debugging_hangs.clinic._wards import Clinic
from lessons.multi_node.hosts import conditions_of, hosts_available, side_by_side

from . import _network_programs
from ._network_cures import CURES, check_cure, cured
from ._network_evidence import EVIDENCE
from ._network_runs import HOSTS, Work, run_program

# What a patient and scripts/train.py import, and what their optimizers do: not on each of their ranks.
share("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp")

_USUAL = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
_HEALTHY = {
    "interface": "there", "own name": "its own address", "link": "up", "checkpoint": "none", "listens": "node0",
    "store": "connected", "other port": "connected",
}


def _case(
    program: str, usual: Sequence[str], recorded: str | Sequence[str], fault: str | None = None,
    settings: Mapping[str, str] = {}, unset: Sequence[str] = (), facts: Mapping[str, str] = {}, **parts: Any,
) -> Case:
    said = (recorded,) * HOSTS if isinstance(recorded, str) else tuple(recorded)
    return Case(
        program=getattr(_network_programs, program), settings={**_USUAL, **settings, **dict.fromkeys(unset)},
        facts={**_HEALTHY, **facts}, usual=tuple(usual), recorded=said, conditions=conditions_of(fault, HOSTS), **parts,
    )


_FOUND = tomllib.loads(Path(__file__).with_name("network.toml").read_text(encoding="utf-8"))
CAUSES = {name: Cause(**cause) for name, cause in _FOUND["causes"].items()}
CASES = tuple(_case(**patient) for patient in _FOUND["patients"])


def _run(case: Case, cure: dict[str, Any] | None) -> Symptom:
    work = Work(case.settings, case.conditions)
    return run_program(case.program, cured(work, cure), LIMIT) if cure else run_program(case.program, work, case.limit)


def clinic() -> Clinic:
    """Open the clinic: eight patients on two hosts, none of whom has been looked at."""
    def available() -> tuple[bool, str]:
        return hosts_available()[0], "it needs two hosts"  # why there is one only, the lesson has said

    return Clinic(CASES, CAUSES, EVIDENCE, CURES, _run, check_cure, available, side_by_side)
