"""Functions, arguments and results on their way between the notebook and its ranks (private)."""

from __future__ import annotations

import functools
import importlib
import io
import sys
import types

import cloudpickle

from . import errors
from .learner_code import is_learner


class _Pickler(cloudpickle.Pickler):
    """Also sends modules of a class of their own, such as ``torch.ops``, and cached functions."""

    def reducer_override(self, obj):
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType and (name := _importable(obj)):
            return _imported, (name,)
        if isinstance(obj, functools._lru_cache_wrapper) and not _has_name(obj):
            return _cached, (obj.cache_parameters(),), obj.__wrapped__, None, None, _fill_cached
        return super().reducer_override(obj)


def _has_name(function) -> bool:
    """Whether a rank can import this function."""
    found = sys.modules.get(function.__module__) if function.__module__ != "__main__" else None
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _importable(module: types.ModuleType) -> str:
    """The name by which a rank finds this module, itself or as an attribute of another; empty if there is none."""
    name = module.__name__
    try:
        return name if sys.modules.get(name) is module or _imported(name) is module else ""
    except (ImportError, AttributeError, ValueError):
        return ""


def _imported(name: str) -> types.ModuleType:
    parent, _, attribute = name.rpartition(".")
    return sys.modules.get(name) or getattr(importlib.import_module(parent), attribute, None) or (
        importlib.import_module(name))


def _cached(parameters: dict):
    """A function may call itself by its name, so that the wrapper must be there before the function in it."""

    def call(*args, **kwargs):
        return call.function(*args, **kwargs)

    return functools.lru_cache(**parameters)(call)


def _fill_cached(cached, function) -> None:
    cached.__wrapped__.function = function
    functools.update_wrapper(cached, function)


def _dumps(value) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def pack_call(fn, args: tuple, kwargs: dict) -> bytes:
    """Pickle a call by value. Raises TypeError that names what cannot be sent."""
    try:
        return _dumps((fn, args, kwargs))
    except Exception as error:
        culprit, compiled = _culprit(fn, args, kwargs)
        cure = "compile it inside the function" if compiled else (
            "import or create such objects inside the function instead of outside")
        raise errors.refusal(
            TypeError,
            f"launch cannot send {culprit} to the ranks: {_first_line(error)}\nRanks are other processes: {cure}.",
        ) from None


def _culprit(fn, args: tuple, kwargs: dict, seen: tuple = ()) -> tuple[str, bool]:
    """Name the first part of the call that cannot be pickled by itself, also in functions of the learner that it calls.

    And say whether it is a function that ``torch.compile`` has made.
    """
    parts = [(f"argument {i + 1}", value) for i, value in enumerate(args)]
    parts += [(f"argument {name}=", value) for name, value in kwargs.items()]
    if isinstance(fn, types.FunctionType):
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False)
        parts += [(f"variable {name!r} used in {fn.__name__}", cell.cell_contents) for name, cell in cells]
        parts += [
            (f"variable {name!r} used in {fn.__name__}", fn.__globals__[name])
            for name in fn.__code__.co_names
            if name in fn.__globals__
        ]
    for name, value in parts:
        try:
            _dumps(value)
        except Exception:
            own = isinstance(value, types.FunctionType) and is_learner(value.__code__.co_filename)
            if own and value not in seen:
                return _culprit(value, (), {}, (*seen, value))
            return f"{name} ({type(value).__name__})", hasattr(value, "_torchdynamo_orig_callable")
    return f"the function {getattr(fn, '__name__', fn)!r}", False


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class _ResultPickler(_Pickler):
    """Tensors travel as plain bytes: detached from devices, without the storage they are a view of."""

    def reducer_override(self, obj):
        import torch

        if type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.layout is torch.strided and not obj.is_meta:
            if obj.is_quantized:
                return super().reducer_override(obj)
            data = obj.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
            raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
            is_parameter = isinstance(obj, torch.nn.Parameter)
            return _rebuild_tensor, (raw, obj.dtype, tuple(obj.shape), obj.requires_grad, is_parameter)
        return super().reducer_override(obj)


def _rebuild_tensor(raw: bytes, dtype, shape: tuple, requires_grad: bool, is_parameter: bool):
    import torch

    tensor = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    tensor = tensor.reshape(shape)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def pack_result(value) -> bytes:
    """Pickle a rank's result. Raises TypeError that says what cannot come back."""
    buffer = io.BytesIO()
    try:
        _ResultPickler(buffer).dump(value)
    except Exception as error:
        kind = type(value).__name__
        raise errors.refusal(
            TypeError,
            f"the result, a {kind}, cannot be sent back to the notebook: {_first_line(error)}. "
            "Return numbers, text, tensors, or lists and dictionaries of them.",
        ) from None
    return buffer.getvalue()
