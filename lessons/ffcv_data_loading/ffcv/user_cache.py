"""Where the course keeps what is made once and used by many notebooks: a folder below the user's cache (private)."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

_NAME = "distributed-deep-learning-course"


def folder(name: str) -> Path:
    """Return the folder `name` of the course's cache, made if needed; below the temporary folder if home is closed."""
    home = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    places = [Path(os.environ.get("XDG_CACHE_HOME") or home), Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"]
    for place in places:
        with contextlib.suppress(OSError):
            (place / _NAME / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            if os.access(place / _NAME / name, os.W_OK):
                return place / _NAME / name
    raise PermissionError(f"neither {places[0]} nor {places[1]} can be written; set XDG_CACHE_HOME to one that can")
