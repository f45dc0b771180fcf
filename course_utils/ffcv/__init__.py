"""What lesson 15 needs of FFCV: repairs of version 1.0.2, a compile cache that lasts, and a set of images to load.

See README.md beside this file: until when it is kept, and how to take it out.
"""

from __future__ import annotations

from .fixes import FIXES, Fix, apply_fixes, missing
from .images import ImageFolder, image_folder

__all__ = ["FIXES", "Fix", "ImageFolder", "apply_fixes", "image_folder", "missing"]
