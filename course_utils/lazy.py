"""Names of a package that are imported only when they are asked for, because that costs seconds or starts a process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["attach"]


def attach(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package that has names out of modules which load later.

    Parameters
    ----------
    package : str
        The package's ``__name__``.
    homes : dict of str to sequence of str
        Module inside the package -> names that are to be had from the package itself.

    Examples
    --------
    ``__getattr__, __dir__ = attach(__name__, {"tracking": ["Tracker", "track"]})``
    """
    modules = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return find, names
