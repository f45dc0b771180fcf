"""What a function may set for the whole process of its rank: noted at first, put back after each function (private).

Under ``torchrun`` every program has processes of its own. Ranks that are kept must not let one function's settings
reach the next; a rank on which something cannot be put back is not kept.
"""

from __future__ import annotations

import builtins
import contextlib
import decimal
import gc
import json
import logging
import multiprocessing
import operator
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import numpy.random  # else each rank would import it by itself
import torch
import torch.distributed as dist

from ..torch_internals import count_modes
from .learner_code import is_learner

# Looking at an object writes to its memory, which ranks share until then: what follows names as little as will do.

#: Functions that a learner may replace, to be put back by name: where they stand, and which.
_PATCHED = (
    (dist, dist.distributed_c10d.__all__), (dist.distributed_c10d, dist.distributed_c10d.__all__),
    (dist.Work, ["wait", "is_completed", "get_future"]), (builtins, vars(builtins)),
)
#: Where a function that has been replaced is noticed, and its rank is not kept.
_WATCHED = (
    torch, torch.nn.functional, torch.nn.init, torch.random, torch.cuda, torch.Tensor, torch.optim.Optimizer,
    *(each for module in (torch.nn, torch.optim) for each in vars(module).values() if isinstance(each, type)),
    json, numpy, numpy.random, os, random, time,
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
_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
_SIGNALS = tuple(getattr(signal, f"SIG{name}") for name in "INT TERM ALRM VTALRM PROF HUP QUIT PIPE CHLD USR2".split())
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_HARMLESS_THREADS = ("tqdm._monitor",)  # watches progress bars, for the life of a process


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _process_limits() -> list:
    """What a process may lower for itself and, without root, never raise again."""
    return [os.getpriority(os.PRIO_PROCESS, 0), *(resource.getrlimit(limit) for limit in _LIMITS)]


def _flags() -> list:
    """What hardly any function sets: a rank on which it has changed is not kept."""
    cudnn, matmul, mkldnn = torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.mkldnn
    return [
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), cudnn.benchmark, cudnn.enabled,
        cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32, mkldnn.enabled, _SMALL * 1.0 == 0.0,
        torch.multiprocessing.get_sharing_strategy(), decimal.getcontext().prec, str(numpy.get_printoptions()),
        sys.get_int_max_str_digits(), list(sys.argv), _own_handlers(),
    ]


def _own_handlers() -> list[str]:
    """Loggers with handlers that belong to no library."""
    return [
        name for name, logger in list(logging.root.manager.loggerDict.items())
        if getattr(logger, "handlers", None) and (name == "__main__" or name.partition(".")[0] not in sys.modules)
    ]


def _functions(owner: Any) -> tuple[tuple, Callable]:
    """The functions of a module or class, and how to read them again."""
    found = {name: value for name, value in list(vars(owner).items()) if callable(value)}
    return tuple(found.values()), operator.itemgetter(*found, "__doc__")


def _is_replacement(function: Any) -> bool:
    """Whether a function is a learner's: PyTorch also wraps some of its own when they are first used."""
    if code := getattr(function, "__code__", None):
        return is_learner(code.co_filename)
    return not str(getattr(function, "__module__", "")).startswith("torch")


def _log_levels() -> list[int]:
    return [each.level for each in _LOGGERS]


def _set_log_levels(levels: list[int]) -> None:
    for each, level in zip(_LOGGERS, levels, strict=True):
        if each.level != level:
            each.setLevel(level)


def _set_filters(filters: list) -> None:
    warnings.filters[:] = filters
    warnings._filters_mutated()


#: Settings as pairs of functions: what is the value, make it so.
_VALUES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (numpy.geterr, lambda value: numpy.seterr(**value)),
    (_umask, os.umask),
    (lambda: multiprocessing.get_start_method(allow_none=True), lambda m: multiprocessing.set_start_method(m, True)),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.getswitchinterval, sys.setswitchinterval),
    (sys.gettrace, sys.settrace),
    (sys.getprofile, sys.setprofile),
    (lambda: sys.excepthook, lambda hook: setattr(sys, "excepthook", hook)),
    (lambda: threading.excepthook, lambda hook: setattr(threading, "excepthook", hook)),
    (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    (socket.getdefaulttimeout, socket.setdefaulttimeout),
    (lambda: list(warnings.filters), _set_filters),
    (lambda: list(logging.root.handlers), lambda handlers: logging.root.handlers.__setitem__(slice(None), handlers)),
    (lambda: logging.root.manager.disable, logging.disable),
    (_log_levels, _set_log_levels),
)


class Settings:
    """The settings of this process as they were when this was made."""

    def __init__(self) -> None:
        self._values = [read() for read, _ in _VALUES]
        self._limits, self._flags = _process_limits(), _flags()
        self._watched = [(owner, *_functions(owner)) for owner in _WATCHED]
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self._functions = []
        for owner, names in _PATCHED:
            functions = {name: vars(owner)[name] for name in names if callable(vars(owner).get(name))}
            self._functions.append((owner, functions, tuple(functions.values()), operator.itemgetter(*functions)))

    def can_be_put_back(self) -> bool:
        """Whether `put_back` would undo all that was changed; if not, this process should not be used again."""
        torch.set_default_device(None)  # a mode too, but one that has an end
        left = count_modes() > 0 or torch.is_inference_mode_enabled() or extra_threads()
        try:
            torch.get_float32_matmul_precision()
            same = (_process_limits(), _flags()) == (self._limits, self._flags)
        except RuntimeError:  # TF32 was set by PyTorch's newer names, and then it cannot be read by the older ones
            return False
        return same and not left and not self._replaced()

    def _replaced(self) -> bool:
        """Whether a function in PyTorch or the standard library is another one now."""
        for owner, before, read in self._watched:
            try:
                now = read(vars(owner))[:-1]
            except KeyError:  # one has been deleted
                return True
            changed = (new for old, new in zip(before, now, strict=True) if old is not new)
            if any(map(_is_replacement, changed)):
                return True
        return False

    def put_back(self) -> None:
        """Make all as it was."""
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        self._put_back_signals()
        self._put_back_functions()
        for (read, write), value in zip(_VALUES, self._values, strict=True):
            with contextlib.suppress(Exception):  # as it is, it does no harm
                if read() != value:
                    write(value)
        torch.set_printoptions(profile="default")
        for hooks in _HOOKS:
            hooks.clear()

    def _put_back_signals(self) -> None:
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                with contextlib.suppress(OSError):
                    signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _put_back_functions(self) -> None:
        for owner, functions, before, read in self._functions:
            with contextlib.suppress(KeyError):  # one has been deleted
                if read(vars(owner)) == before:
                    continue
            now = dict(vars(owner))
            for name, function in functions.items():
                if now.get(name) is not function:
                    setattr(owner, name, function)


def note_threads() -> None:
    """The threads that run now are the rank's own."""
    _own_threads.update(threading.enumerate())


_own_threads: set[threading.Thread] = set()


def extra_threads() -> list[threading.Thread]:
    """Threads that a function has started and that still run."""
    return [t for t in threading.enumerate() if t not in _own_threads and type(t).__module__ not in _HARMLESS_THREADS]


def seed(rank: int) -> None:
    """Different random numbers on every rank, the same each time."""
    random.seed(rank)
    numpy.random.seed(rank)
    (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(rank)
