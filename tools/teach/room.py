"""What a room of people needs of one machine that all of them share, and what of the course is real on it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from course_utils.doctor import machine

#: GB that somebody needs (docs/teaching.md, "Shared machines"): JupyterLab; an open lesson that runs, that has run,
#: whose ranks have ended; what a lesson saves where all ranks have one hash seed.
LAB, RUNS, HAS_RUN, ENDED, SEED = 0.07, 1.45, 0.85, 0.7, 0.15
SLOWEST, CORES = 107, 2  # seconds that the slowest lesson takes, on so many cores (docs/instructor.md)


def needs(people: int, memory: float, cores: int) -> tuple[bool, list[str]]:
    """Whether ``memory`` in GB holds ``people`` with one open lesson each, and sentences about memory and cores."""
    one, three, peak = LAB + HAS_RUN, LAB + HAS_RUN + 2 * ENDED, LAB + RUNS
    told = [f"memory: {memory:.0f} GB. {people} people need {people * one:.0f} GB with one open lesson each, "
            f"{people * peak:.0f} GB while all run it, {people * three:.0f} GB with three open lessons each"]
    if memory < people * three:
        told.append(f"memory: PYTHONHASHSEED=0 for JupyterLab saves {3 * SEED * people:.0f} GB of the last; closing a "
                    "lesson (Kernel, Shut Down Kernel) saves the most")
    told.append(f"memory: it holds {memory // peak:.0f} people who all run a lesson, {memory // three:.0f} with three")
    slow = SLOWEST * max(1.0, CORES * people / cores)
    told.append(f"cores: {cores}. When all {people} choose Run All Cells at once, the slowest lesson takes up to "
                f"{slow / 60:.0f} min; alone {SLOWEST} s. Let them begin in turns, or two share a notebook")
    return memory >= people * one, told


def room(people: int) -> int:
    """Print what this machine is for so many people; the exit status is 1 where it is too small."""
    found, limit = machine(), Path("/sys/fs/cgroup/memory.max")
    memory = found["memory"]
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        memory = min(memory, int(text))  # of the container
    fits, told = needs(people, memory / 1e9, found["cores"])
    shared = shutil.disk_usage("/dev/shm").total if os.path.exists("/dev/shm") else 0
    told += [f"/dev/shm: {shared / 1e9:.2f} GB, for all loaders; a container has 0.07 without --shm-size",
             f"disk: {shutil.disk_usage('.').free / 1e9:.0f} GB free; the environment takes 1.3 GB, each copy 3 MB",
             f"hosts: {found['hosts'][1]}"]
    print(*told, "", *(f"{kind}: {sentence}" for kind in ("real", "emulated") for sentence in found[kind]), sep="\n")
    if not fits:
        print(f"\nThis machine is too small for {people} people.")
    return not fits
