"""Which code is the learner's own."""

from __future__ import annotations

import os
import sysconfig

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_PLACES = {sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")} | {_PACKAGE}
_LIBRARIES = ("<frozen", *(place + os.sep for place in _PLACES))


def is_learner(filename: str) -> bool:
    """Whether a file is the learner's own, not Python's, an installed package's or the course's."""
    return not filename.startswith(_LIBRARIES) and "-packages" + os.sep not in filename
