"""Compile FFCV's functions once: for all Loaders of a process, and for later processes (see `fixes`)."""

from __future__ import annotations

import ctypes
import hashlib
import types
import weakref
from collections.abc import Callable

import numpy as np


def native_functions() -> dict[Callable, Callable]:
    """FFCV's wrappers of C functions, with the same calling them by a name that LLVM knows."""
    import llvmlite.binding
    from ffcv import libffcv
    from numba import types as nb

    def external(name: str, *arguments):
        address = ctypes.cast(getattr(libffcv.lib, name), ctypes.c_void_p).value
        llvmlite.binding.add_symbol(f"ffcv_{name}", address)
        return nb.ExternalFunction(f"ffcv_{name}", nb.int32(*arguments))

    u4, u8 = nb.uint32, nb.uint64
    symbols = {
        "ctypes_imdecode": external("imdecode", u8, u8, u4, u4, u8, *[u4] * 8),
        "ctypes_memcopy": external("my_memcpy", u8, u8, u8),
        "ctypes_resize": external("resize", *[nb.int64] * 11),
    }

    def renamed(function: Callable) -> Callable:
        scope = {**function.__globals__, **symbols}
        copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
        copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
        return copy

    return {function: renamed(function) for function in (libffcv.imdecode, libffcv.memcpy, libffcv.resize_crop)}


_known: dict[str, object] = {}
_identities: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def compiled(code: Callable, options: dict) -> Callable:
    """Compile, or return what the same function was compiled to; functions from elsewhere are not looked up."""
    from numba import njit
    from numba.core.caching import FunctionCache

    class Cache(FunctionCache):
        def _index_key(self, sig, codegen):
            return sig, codegen.magic_tuple(), identity

    try:
        identity = hashlib.sha256(repr((_identity(code), sorted(options.items()))).encode()).hexdigest()
    except TypeError:
        return njit(**options)(code)
    if identity not in _known:
        _known[identity] = dispatcher = njit(**options)(code)
        dispatcher._cache = Cache(code)
        _identities[dispatcher] = identity
    return _known[identity]


def _identity(value) -> object:
    """What makes two values the same in every process; TypeError for what has no such thing."""
    if isinstance(value, types.FunctionType):
        if value.__module__.partition(".")[0] != "ffcv":
            raise TypeError
        cells = [_identity(cell.cell_contents) for cell in value.__closure__ or ()]
        return value.__module__, value.__qualname__, value.__code__.co_code, cells, value.__defaults__
    if isinstance(value, type | types.BuiltinFunctionType):
        return value.__module__, value.__qualname__
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape, value.tobytes()
    if value is None or isinstance(value, int | float | str | bytes):
        return type(value).__name__, value
    if isinstance(value, tuple):
        return tuple(_identity(part) for part in value)
    return "compiled", _identities[value]
