"""FFCV 1.0.2 as the course uses it: whether it is here, what ends its hangs, and a compile cache that lasts.

FFCV is not maintained any more, so what goes wrong in it stays. `apply_fixes` makes the repairs, which are for this
version only. None changes what a right program reads or writes.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from . import compile_cache, epoch, user_cache, writer

HOW_TO_INSTALL = "In the course's folder: make ffcv"


class Fix(NamedTuple):
    """One repair, and what goes wrong without it and why."""

    make: Callable[[], None]
    why: str


FIXES: list[Fix] = []


def _fix(make: Callable[[], None]) -> Callable[[], None]:
    """Register a function that makes a repair; its docstring says why."""
    FIXES.append(Fix(make, inspect.cleandoc(make.__doc__)))
    return make


@cache
def missing() -> str | None:
    """Say in one or two sentences why FFCV cannot be used here and what to do; None if it can be used."""
    if sys.platform != "linux":
        return "FFCV runs on Linux only."
    if sys.version_info >= (3, 12) and importlib.util.find_spec("ffcv") is None:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return f"FFCV 1.0.2 needs Python 3.11, this is {version}. {HOW_TO_INSTALL} says how to change it."
    lacking = [name for name in ("ffcv", "numba", "cv2", "PIL") if importlib.util.find_spec(name) is None]
    if lacking:
        return f"FFCV is not installed ({', '.join(lacking)} not found). {HOW_TO_INSTALL}"
    try:
        _import()
    except Exception as error:  # a shared library that was there when FFCV was compiled, most often
        return f"FFCV is installed but cannot be imported ({type(error).__name__}: {error}). {HOW_TO_INSTALL}"
    return None


@cache
def apply_fixes() -> None:
    """Import FFCV and repair it, once in a process. Call it where `ffcv` would be imported, and on every rank.

    Raises `ModuleNotFoundError` with the text of `missing` where FFCV cannot be used.
    """
    if reason := missing():
        raise ModuleNotFoundError(reason, name="ffcv")
    for fix in FIXES:
        fix.make()


def _import() -> None:
    """Import FFCV with a plain dictionary where it has a compiled one, which takes 4 s and is read from Python only."""
    import numba
    import numba.typed

    if (found := importlib.metadata.version("ffcv")) != "1.0.2":
        raise ImportError(f"the course is for FFCV 1.0.2, and this is {found}")
    if "NUMBA_CACHE_DIR" not in os.environ:
        numba.config.CACHE_DIR = str(user_cache.folder("numba"))
    if "ffcv" in sys.modules:
        return
    typed = numba.typed.Dict
    numba.typed.Dict = dict
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("ffcv")
    finally:
        numba.typed.Dict = typed


# ------------------------------------------------------------------------------------------------------------ writing


@_fix
def _writer_that_dies() -> None:
    """A process of the writer that dies leaves the others, and the notebook, waiting for ever.

    One bad image is enough, a sample larger than a page, a full disk, or the system's lack of memory. The writer only
    counts samples and never looks at its processes. Now the first failure ends all of them, the file that is not
    complete is removed, and the error says which sample it was. The progress bar goes.
    """
    from ffcv.writer import DatasetWriter

    DatasetWriter._write_common = writer.write


# ------------------------------------------------------------------------------------------------------------ reading


@_fix
def _error_in_the_pipeline() -> None:
    """An error in the thread that runs the pipeline ends that thread, and the loop waits for a batch for ever.

    It happens with any operation that Numba cannot compile or that fails on a batch. A loop that is left by ``break``
    leaves the thread behind with its buffers, a second ``next`` after the end waits for ever, and at the end of Python
    the thread can die in the middle of compiled code. Now an error is raised in the loop, the thread ends with it,
    and the end stays the end.
    """
    from ffcv.loader.epoch_iterator import EpochIterator
    from ffcv.loader.loader import Loader
    from ffcv.memory_managers.process_cache.schedule import ScheduleExecutor

    run, begin = EpochIterator.run, Loader.__iter__

    def start(self: EpochIterator) -> None:
        self.output_queue = epoch.Batches(self)
        epoch.running.add(self)
        threading.Thread.start(self)

    def run_and_tell(self: EpochIterator) -> None:
        try:
            run(self)
        except epoch.Closed:
            pass
        except BaseException as error:
            with contextlib.suppress(epoch.Closed):
                self.output_queue.put(epoch.Failure(error))

    def close(self: EpochIterator) -> None:
        if hasattr(self, "storage_state") and not self.terminate_event.is_set():  # else it has not begun, or is closed
            self.terminate_event.set()
            if isinstance(executor := getattr(self.memory_context, "executor", None), ScheduleExecutor):
                executor.loaded_queue.put(epoch.Closed())
            self.memory_context.__exit__(None, None, None)

    EpochIterator.start, EpochIterator.run, EpochIterator.close = start, run_and_tell, close
    Loader.__iter__ = lambda self: epoch.Epoch(begin(self))
    atexit.register(epoch.close_all)


@_fix
def _operations_out_of_order() -> None:
    """A compiled operation behind ``ToTensor`` makes the Loader's constructor loop for ever.

    The constructor sorts operations into stages, compiled and not by turns, and uses one set for the present and the
    next stage. Now both this and an operation on tensors before ``ToTensor``, which would fail later, are refused at
    once with the order that works.
    """
    from ffcv import transforms
    from ffcv.pipeline.graph import Graph, TransformNode

    on_tensors = tuple(
        getattr(transforms, name)
        for name in ("ToDevice", "ToTorchImage", "Convert", "Squeeze", "MixupToOneHot", "ModuleWrapper")
    )
    group = Graph.group_operations

    def check_and_group(self: Graph) -> list:
        for node in self.nodes:
            if isinstance(node, TransformNode):
                name = type(node.operation).__name__
                if node.is_jitted and isinstance(node.operation, on_tensors):
                    raise ValueError(f"{name} works on tensors: put ToTensor() before it in the pipeline")
                if node.is_jitted and node.parent.is_jitted is False:
                    raise ValueError(f"{name} works on NumPy arrays: put it before ToTensor() in the pipeline")
        return group(self)

    Graph.group_operations = check_and_group


@_fix
def _pipeline_used_twice() -> None:
    """A Loader takes the decoder out of the list of operations that it is given.

    A second Loader with the same list then silently decodes in another way. Now each Loader takes a copy.
    """
    from ffcv.pipeline import PipelineSpec

    begin, accept = PipelineSpec.__init__, PipelineSpec.accept_decoder

    def start(self, source, decoder=None, transforms=None) -> None:
        begin(self, source, decoder, None if transforms is None else list(transforms))

    def accept_once(self, decoder, output_name: str) -> None:
        accept(self, decoder, output_name)
        self.default_pipeline = False

    PipelineSpec.__init__, PipelineSpec.accept_decoder = start, accept_once


@_fix
def _threads_of_others() -> None:
    """A Loader sets the number of threads of all of PyTorch to its own, and fails with more workers than cores.

    A model then trains with as many threads as its loader has workers, and a rank with one thread gets more. Now the
    number is the loader's own, at most the number of cores, with a warning where more were asked for.
    """
    import numba
    from ffcv.pipeline.compiler import Compiler

    def set_num_threads(cls, n: int) -> None:
        most = numba.config.NUMBA_NUM_THREADS
        if n > most:
            warnings.warn(f"num_workers={n} is more than the {most} cores here: using {most}", stacklevel=3)
        cls.num_threads = min(n, most) if n >= 1 else most
        numba.set_num_threads(cls.num_threads)

    Compiler.set_num_threads = classmethod(set_num_threads)


# ---------------------------------------------------------------------------------------------------------- compiling


@_fix
def _types_changed_in_place() -> None:
    """FFCV makes a type of Numba's read-only by changing it, and Numba has one object for all equal types.

    Every array of bytes is then read-only, and what was compiled for them before is not found again. Now the type is
    one of its own.
    """
    from ffcv.memory_managers.os_cache import OSCacheManager
    from numba import types as nb

    state = nb.Tuple([nb.Array(nb.uint8, 1, "C", readonly=True), nb.uint64[::1], nb.uint64[::1]])
    OSCacheManager.state_type = property(lambda _: state)


@_fix
def _compiled_again_and_again() -> None:
    """Each Loader compiles each of its operations anew, 3 to 6 s, and so does each process.

    Numba can keep compiled code in files, but not of these functions: they call C functions by address, and hold other
    compiled functions, whose identity is random. Now C functions are called by name, and a function of FFCV is known
    by its code and by the values it holds: a second Loader compiles nothing, and the next process or rank loads the
    code from the course's cache (or from NUMBA_CACHE_DIR). What a notebook defines is compiled each time.
    """
    from ffcv.pipeline.compiler import Compiler
    from ffcv.transforms.utils import fast_crop
    from ffcv.traversal_order import quasi_random
    from numba import njit

    native = compile_cache.native_functions()

    def compile(cls, code: Callable, signature=None) -> Callable:
        if not cls.is_enabled:
            return code
        parallel = getattr(code, "is_parallel", False) and cls.num_threads > 1
        options = {"fastmath": True, "nogil": True, "error_model": "numpy", "parallel": parallel}
        return compile_cache.compiled(native.get(code, code), options)

    Compiler.compile = classmethod(compile)
    fast_crop.resize_crop = njit(inline="always")(native[importlib.import_module("ffcv.libffcv").resize_crop])
    quasi_random.generate_order_inner = compile_cache.compiled(quasi_random.generate_order_inner.py_func, {})
