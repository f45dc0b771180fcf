"""Figures and other rich objects shown by a rank, and the matplotlib backend that ranks use (private).

Set as ``MPLBACKEND=module://course_utils._display`` in ranks: ``plt.show()`` sends each open figure to the notebook.
"""

from __future__ import annotations

import base64
import io
import json
import os

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MARK = b"\x1e"  # starts a record that is not text; never printed by people


class FigureManager(FigureManagerBase):
    @classmethod
    def pyplot_show(cls, *, block=None) -> None:
        for manager in Gcf.get_all_fig_managers():
            display(manager.canvas.figure)
        Gcf.destroy_all()


class FigureCanvas(FigureCanvasAgg):
    manager_class = FigureManager


_FORMATS = {"text/html": "_repr_html_", "text/markdown": "_repr_markdown_", "image/svg+xml": "_repr_svg_",
            "image/png": "_repr_png_", "text/latex": "_repr_latex_"}  # fmt: skip


def bundle(value) -> dict[str, str]:
    """MIME bundle of one object, as Jupyter's display protocol has it."""
    data = {"text/plain": repr(value)}
    if isinstance(value, Figure):
        buffer = io.BytesIO()
        value.savefig(buffer, format="png", bbox_inches="tight")
        data["image/png"] = base64.b64encode(buffer.getvalue()).decode()
        return data
    for mime, method in _FORMATS.items():
        if callable(getattr(value, method, None)) and not isinstance(value, type):
            content = getattr(value, method)()
            if content is not None:
                data[mime] = base64.b64encode(content).decode() if isinstance(content, bytes) else content
    return data


def display(*values, **_ignored) -> None:
    """Show objects in the notebook, from a rank; stands in for IPython's ``display`` there."""
    import sys

    for value in values:
        sys.stdout.flush()
        record = MARK + b"D" + base64.b64encode(json.dumps(bundle(value)).encode()) + b"\n"
        view = memoryview(record)
        while view:
            view = view[os.write(1, view) :]
