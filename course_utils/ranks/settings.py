"""What a function may set for the whole process of its rank: a rank on which something is left is not kept (private).

Under ``torchrun`` every program has processes of its own. Ranks that are kept must not let one function's settings
reach the next, and a fresh rank takes a tenth of a second.
"""

from __future__ import annotations

import builtins
import decimal
import gc
import logging
import multiprocessing
import random
import signal
import socket
import sys
import threading
import time
import warnings

import numpy
import numpy.random  # else each rank would import it by itself
import torch
import torch.distributed as dist

from ..torch_internals import count_modes

#: Functions that a learner may have replaced, to count calls for example.
_WATCHED = (
    (dist, dist.distributed_c10d.__all__), (dist.distributed_c10d, dist.distributed_c10d.__all__),
    (dist.Work, ("wait", "is_completed", "get_future")), (builtins, tuple(vars(builtins))),
)
_SMALL = 5e-324  # zero as soon as it is computed with, where denormal numbers are flushed
#: What keeps hooks for all modules and for all optimizers.
_HOOKS = [
    hooks
    for module in ("torch.nn.modules.module", "torch.optim.optimizer")
    for name, hooks in vars(sys.modules[module]).items()
    if name.startswith("_global_") and isinstance(hooks, dict)
]
#: Whole families of loggers, and within PyTorch the next level.
_LOGGERS = [logging.root] + [
    logging.getLogger(name) for name in logging.root.manager.loggerDict if "." not in name.removeprefix("torch.")
]
#: But for SIGCHLD, for which data loaders have a handler.
_SIGNALS = tuple(getattr(signal, f"SIG{name}") for name in "INT TERM ALRM VTALRM PROF HUP QUIT PIPE USR2".split())
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_HARMLESS_THREADS = ("tqdm._monitor",)  # watches progress bars, for the life of a process


def _own_handlers() -> list[str]:
    """Loggers with handlers that belong to no library; ``c10d-…`` are PyTorch's."""
    having = [name for name, logger in list(logging.root.manager.loggerDict.items()) if getattr(logger, "handlers", 0)]
    libraries = sys.modules.keys() - {"__main__"}
    return [name for name in having if name.partition(".")[0] not in libraries and not name.startswith("c10d-")]


def _values() -> list:
    """All that a function may have set."""
    cudnn, matmul, mkldnn = torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.mkldnn
    return [
        torch.get_float32_matmul_precision(), cudnn.benchmark, cudnn.enabled, cudnn.deterministic, cudnn.allow_tf32,
        matmul.allow_tf32, mkldnn.enabled, torch.get_deterministic_debug_mode(), _SMALL * 1.0 == 0.0,
        torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(), count_modes(),
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(),
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), [len(hooks) for hooks in _HOOKS],
        torch.multiprocessing.get_sharing_strategy(), vars(torch._tensor_str.PRINT_OPTS).copy(),
        numpy.geterr(), str(numpy.get_printoptions()), decimal.getcontext().prec,
        sys.getrecursionlimit(), sys.gettrace(), sys.getprofile(), list(sys.argv), sys.stdout, sys.stderr,
        gc.isenabled(), multiprocessing.get_start_method(allow_none=True), socket.getdefaulttimeout(),
        logging.root.manager.disable, list(logging.root.handlers), _own_handlers(), [each.level for each in _LOGGERS],
        [signal.getsignal(number) for number in _SIGNALS], [signal.getitimer(timer) for timer in _TIMERS],
        [id(vars(owner).get(name)) for owner, names in _WATCHED for name in names],
    ]


class Settings:
    """The settings of this process as they were when this was made."""

    def __init__(self) -> None:
        self._values, self._filters = _values(), list(warnings.filters)

    def are_left_alone(self) -> bool:
        """Whether all is as it was, and no thread is left; if not, this process should not be used again."""
        try:
            return _values() == self._values and _threads_have_ended()
        except RuntimeError:  # TF32 was set by PyTorch's newer names, and then it cannot be read by the older ones
            return False

    def put_filters_back(self) -> None:
        """Filters of warnings are put back, because libraries add some as they are imported."""
        warnings.filters[:] = self._filters
        warnings._filters_mutated()


def note_threads() -> None:
    """The threads that run now are the rank's own."""
    _own_threads.update(threading.enumerate())


_own_threads: set[threading.Thread] = set()


def extra_threads() -> list[threading.Thread]:
    """Threads that a function has started and that still run."""
    return [t for t in threading.enumerate() if t not in _own_threads and type(t).__module__ not in _HARMLESS_THREADS]


def _threads_have_ended() -> bool:
    """Whether no thread of a function's is left, or not for long: those of a data loader end a moment after it."""
    deadline = time.monotonic() + 0.1
    for thread in extra_threads():
        thread.join(max(0.0, deadline - time.monotonic()))
    return not extra_threads()


def seed(rank: int) -> None:
    """Different random numbers on every rank, the same each time."""
    random.seed(rank)
    numpy.random.seed(rank)
    (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(rank)
