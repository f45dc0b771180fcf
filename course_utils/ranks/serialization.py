"""Functions, arguments and results on their way between the notebook and its ranks (private)."""

from __future__ import annotations

import io
import types

import cloudpickle

from . import errors


def pack_call(fn, args: tuple, kwargs: dict) -> bytes:
    """Pickle a call by value. Raises TypeError that names what cannot be sent."""
    try:
        return cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise errors.refusal(
            TypeError,
            f"launch cannot send {_culprit(fn, args, kwargs)} to the ranks: {_first_line(error)}\n"
            "Ranks are other processes: import or create such objects inside the function instead of outside.",
        ) from None


def _culprit(fn, args: tuple, kwargs: dict, seen: tuple = ()) -> str:
    """Name the first part of the call that cannot be pickled by itself, also in functions that it calls."""
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
            cloudpickle.dumps(value)
        except Exception:
            if isinstance(value, types.FunctionType) and value not in seen:
                return _culprit(value, (), {}, (*seen, value))
            return f"{name} ({type(value).__name__})"
    return f"the function {getattr(fn, '__name__', fn)!r}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class _ResultPickler(cloudpickle.Pickler):
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
