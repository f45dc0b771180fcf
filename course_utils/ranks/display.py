"""Figures and other rich objects shown by a rank (private)."""

from __future__ import annotations

import base64
import io
import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

from .channels import MARK

_FORMATS = {"text/html": "_repr_html_", "text/markdown": "_repr_markdown_", "image/svg+xml": "_repr_svg_",
            "image/png": "_repr_png_", "text/latex": "_repr_latex_"}
_DISPLAY_MODULE = "IPython.core.display_functions"


def bundle(value) -> dict[str, str]:
    """MIME bundle of one object, as Jupyter's display protocol has it."""
    data = {"text/plain": repr(value)}
    if "matplotlib.figure" in sys.modules and isinstance(value, sys.modules["matplotlib.figure"].Figure):
        buffer = io.BytesIO()
        value.savefig(buffer, format="png", bbox_inches="tight")
        data["image/png"] = base64.b64encode(buffer.getvalue()).decode()
        return data
    for mime, method in _FORMATS.items():
        if callable(getattr(value, method, None)) and not isinstance(value, type):
            content = getattr(value, method)()
            content = content[0] if isinstance(content, tuple) else content  # data and metadata
            if content is not None:
                data[mime] = base64.b64encode(content).decode() if isinstance(content, bytes) else content
    return data


def display(*values, **_ignored) -> None:
    """Show objects in the notebook, from a rank; stands in for IPython's ``display`` there."""
    for value in values:
        sys.stdout.flush()
        record = memoryview(MARK + b"D" + base64.b64encode(json.dumps(bundle(value)).encode()) + b"\n")
        while record:
            record = record[os.write(1, record) :]


class _Finder(MetaPathFinder):
    """Puts our ``display`` in the place of IPython's when a rank imports it: there is no shell to show things in."""

    def find_spec(self, name, path=None, target=None):
        if name != _DISPLAY_MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module) -> None:
            run(module)
            module.display = display

        spec.loader.exec_module = exec_module
        return spec


def replace_ipython_display() -> None:
    sys.meta_path.insert(0, _Finder())
