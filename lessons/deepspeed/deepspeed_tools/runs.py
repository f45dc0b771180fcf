"""DeepSpeed on the ranks of `launch`: is it here, a clean start at each call, and results from elsewhere if not."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from course_utils.ranks import launch, share
from course_utils.recordings import FOLDER as RECORDINGS

__all__ = ["Runs", "missing", "prepare", "quiet"]

VERSION = "0.19.8"
HOW_TO_INSTALL = "In the course's folder: make deepspeed"
#: What the first engine of a process imports otherwise: four seconds on each rank.
LATE = ("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.superoffload", "deepspeed.runtime.pipe")
PRELOADED = ("deepspeed", "deepspeed.runtime.zero.stage3", *LATE)  # what ranks find imported


def missing() -> str | None:
    """Say in one sentence why DeepSpeed cannot be used here and what to do; None if it can be used."""
    if importlib.util.find_spec("deepspeed") is None:
        return f"DeepSpeed is not installed. {HOW_TO_INSTALL}"
    version = importlib.metadata.version("deepspeed")
    if version != VERSION:
        return f"DeepSpeed {version} is installed, the course is for {VERSION}. {HOW_TO_INSTALL}"
    return None


def prepare() -> None:
    """Get DeepSpeed ready on this rank; call it first in a function for `launch` that uses DeepSpeed.

    A rank is the same process at each call, so what DeepSpeed has kept of the last process group is forgotten, and it
    is told of the new one. It writes errors only, and compiles nothing.
    """
    import deepspeed
    import torch.distributed as dist

    from . import internals

    warnings.simplefilter("ignore")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    internals.forget()
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what is printed inside the block: some of DeepSpeed's parts print whatever the level of its log."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


class Runs:
    """Calls of `launch` by name, or what was recorded of them where DeepSpeed is missing; both are in `results`."""

    def __init__(self, file: str, recorded: bool):
        self.file, self.recorded = RECORDINGS / f"{file}.json", recorded
        self.results: dict[str, Any] = {}  # by name: for each rank what JSON makes of it
        self.known = json.loads(self.file.read_text(encoding="utf-8")) if recorded else {}

    def __call__(self, name: str, fn: Callable, *args: Any, world_size: int = 2, **options: Any) -> Any:
        """Run ``fn(*args)`` on ranks, after `prepare` if there is a process group; what each rank returns."""
        if self.recorded:
            print(f"(recorded: {name})")
            self.results[name] = self.known[name]
        else:
            first = (_prepared, fn) if options.get("init", True) else (fn,)
            results = launch(*first, *args, world_size=world_size, **options)
            self.results[name] = json.loads(json.dumps(results))
        return self.results[name]

    def save(self) -> None:
        """Write all results as the new recording: done by hand when the lesson or DeepSpeed's version changes."""
        text = json.dumps(self.results, indent=1, sort_keys=True)
        self.file.write_text(text + "\n", encoding="utf-8")


def _prepared(fn: Callable, *args: Any, **options: Any) -> Any:
    prepare()
    return fn(*args, **options)


def _preload() -> None:
    """Let ranks find DeepSpeed imported, which takes seconds; on a GPU each imports it for itself."""
    import torch

    if missing() is None and not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        share(*PRELOADED)


_preload()
