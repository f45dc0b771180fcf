"""Which code is the learner's own."""

from __future__ import annotations

import os
import sysconfig

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
#: Folders of the course's own code.
PACKAGES = tuple(os.path.join(_ROOT, name) + os.sep for name in ("course_utils", "lessons"))
_PLACES = [sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "purelib", "platlib")]
_LIBRARIES = ("<frozen", *_PLACES, *PACKAGES)


def is_learner(filename: str) -> bool:
    """Whether a file is the learner's own, not Python's, an installed package's or the course's."""
    return not filename.startswith(_LIBRARIES) and "-packages" + os.sep not in filename
