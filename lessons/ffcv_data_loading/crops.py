"""Which part of an image is cut out: a module that needs no library, for programs in other environments too."""

from __future__ import annotations

import math
import random


def crop_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Draw a part of an image, (left, top, right, bottom), as torchvision's RandomResizedCrop does.

    It has 8 to 100 % of the area, and sides of 3:4 to 4:3; after ten attempts that do not fit, a square. It is drawn
    by the generator of `random`.
    """
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    return 0, 0, side, side
