"""What lesson 15 needs of FFCV: repairs of version 1.0.2, a compile cache that lasts, and a set of images to load.

See README.md beside this file: until when it is kept, and how to take it out.
"""

from __future__ import annotations

from . import by_hand
from .by_hand import Beton
from .fixes import FIXES, Fix, apply_fixes, missing
from .images import ImageFolder, image_folder
from .process_cache import read_through_process_cache

__all__ = [
    "FIXES", "Beton", "Fix", "ImageFolder", "apply_fixes", "by_hand", "image_folder", "missing",
    "read_through_process_cache",
]
