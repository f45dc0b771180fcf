"""The kernel that a hand-in runs in: ipykernel's own, which also runs checks that the hand-in's cells cannot reach.

Started as ``python -m course_utils.grading.kernel -f FILE`` by :mod:`.session`. A check does not pass through IPython:
its code runs here, with the names that it imports taken before the hand-in's first cell.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp

from .likeness import of_value

_TORCH = ("allclose", "equal", "isclose")  # what checks compare with
_AGAIN = ("hang", "slow", "endless", "not-started", "odd")  # refusals behind which there may be a busy machine
_CONSTANTS = (bool, bytes, float, int, str, tuple, type(None))


class Guard:
    """What checks rest on, as it was before the hand-in: functions of the course and of Python, IPython's hooks."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        names = [name for name in sys.modules if name.partition(".")[0] == "course_utils"]
        self._modules = {name: sys.modules[name] for name in names}
        self._modules |= {module.__name__: module for module in (builtins, math, torch)}
        self._before = dict(self._parts())

    def changed(self) -> list[str]:
        """Names of what is no longer the same."""
        gone = [name for name, module in self._modules.items() if sys.modules.get(name) is not module]
        now = dict(self._parts())
        return gone + [name for name, parts in self._before.items() if not _same(parts, now.get(name))]

    def _parts(self) -> Iterator[tuple[str, tuple]]:
        """Names, and the objects that must stay identical."""
        for module_name, module in self._modules.items():
            for name, value in list(vars(module).items()):
                yield from _parts_of(module, f"{module_name}.{name}", name, value)
        shell = self._shell
        yield "IPython's exception handlers", tuple(shell.custom_exceptions)
        yield "IPython's transformers", (*shell.ast_transformers, *shell.input_transformers_post)


def _parts_of(module: ModuleType, path: str, name: str, value: Any) -> Iterator[tuple[str, tuple]]:
    own = module.__name__.partition(".")[0] == "course_utils"
    if module.__name__ == "torch" and name not in _TORCH or module is builtins and name in ("input", "_"):
        return  # ipykernel and IPython set those two
    if isinstance(value, FunctionType):
        yield path, _inside(value)
    elif isinstance(value, BuiltinFunctionType) or isinstance(value, type) and not own:
        yield path, (value,)
    elif isinstance(value, type):
        yield path, (value,)
        for key, member in list(vars(value).items()):
            function = getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                yield f"{path}.{key}", (member, *_inside(function))
            elif isinstance(member, property):
                yield f"{path}.{key}", (member,)
    elif "checks" in module.__name__ and isinstance(value, _CONSTANTS) and not name.startswith("__"):
        yield path, (value,)


def _inside(function: FunctionType) -> tuple:
    """A function, the one that it wraps, and what they do."""
    inner = inspect.unwrap(function)
    return (
        function,
        function.__code__,
        function.__defaults__,
        function.__kwdefaults__,
        inner.__code__,
        inner.__defaults__,
    )


def _same(before: tuple, now: tuple | None) -> bool:
    return now is not None and len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


class GradingKernel(IPythonKernel):
    """Runs cells as ipykernel does. A request with ``grading`` in its metadata is for `prepare` or `check` instead."""

    async def do_execute(
        self, code, silent, store_history=True, user_expressions=None, allow_stdin=False, *,
        cell_meta=None, cell_id=None,
    ) -> dict[str, Any]:
        task = dict((cell_meta or {}).get("grading") or {})
        if not task:
            return await super().do_execute(
                code, silent, store_history, user_expressions, allow_stdin, cell_meta=cell_meta, cell_id=cell_id
            )
        try:
            found = {"prepare": self.prepare, "check": self.check}[task.pop("task")](code, **task)
        except BaseException:
            found = {"error": traceback.format_exc()}
        return {"status": "ok", "execution_count": 0, "payload": [], "user_expressions": {}, "grading": found}

    def prepare(self, code: str, patience: float) -> dict[str, Any]:
        """Import what checks need by running ``code``, give answers ``patience`` times the usual seconds, and note all.

        A module beside the notebook can be imported from here on, but only if no other has its name.
        """
        self._names: dict[str, Any] = {}
        exec(code, self._names)
        self._names.pop("__builtins__")
        course = importlib.import_module("course_utils")
        for name in course.__all__:
            getattr(course, name)
        for module in (value for value in self._names.values() if isinstance(value, ModuleType)):
            for function in (value for value in vars(module).values() if isinstance(value, FunctionType)):
                _allow(function, patience)
        self._guard = Guard(self.shell)
        sys.path.append(os.getcwd())
        return {}

    def check(self, code: str, answers: list[str]) -> dict[str, Any]:
        """Run a check's code on the answers of the hand-in.

        Returns
        -------
        dict
            ``passed``; for a refusal ``hint``, ``message`` and ``slow`` (whether a busy machine may be behind it);
            ``changed``: what the hand-in has changed of the checks; ``replaced``: names of the checks that it uses for
            its own things; ``digests``: of the answers named, see :mod:`.likeness`.
        """
        own = self.shell.user_ns
        verdict: dict[str, Any] = {"passed": False, "hint": "", "message": "", "slow": False}
        verdict["replaced"] = [name for name, value in self._names.items() if own.get(name, value) is not value]
        verdict["digests"] = {name: of_value(own.get(name)) for name in answers}
        changed = self._guard.changed()
        if not changed:
            try:
                exec(compile(code, "<check>", "exec"), {**own, **self._names})
                verdict["passed"] = True
            except BaseException as error:
                verdict |= _described(error)
            changed = self._guard.changed()
        verdict["changed"] = changed
        verdict["passed"] &= not changed
        return verdict


def _allow(function: FunctionType, patience: float) -> None:
    """Make the default of a check's parameter ``timeout`` longer."""
    function = inspect.unwrap(function)
    parameters = inspect.signature(function).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    if isinstance(defaults.get("timeout"), (int, float)) and len(defaults) == len(function.__defaults__ or ()):
        defaults["timeout"] *= patience
        function.__defaults__ = tuple(defaults.values())


def _described(error: BaseException) -> dict[str, Any]:
    from course_utils import HangError, WorkerError

    chain, each = [], error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    hint = getattr(error, "hint", "")
    slow = hint in _AGAIN or isinstance(error, (HangError, WorkerError, KeyboardInterrupt))
    if hint:
        message = str(error)
    else:
        message = "".join(traceback.format_exception(error, limit=-2)).strip()
    return {"hint": hint, "message": message, "slow": slow or any(isinstance(each, HangError) for each in chain)}


if __name__ == "__main__":
    IPKernelApp.launch_instance(kernel_class=GradingKernel)
