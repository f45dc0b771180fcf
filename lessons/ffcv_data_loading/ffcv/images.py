"""A small set of images in the shape of ImageNet, made from a seed: folders, file names, JPEG files of many sizes.

Each image is a *dead leaves* scene: shapes of power-law sizes that hide one another, with noise of a 1/f spectrum as
their surface, which gives the statistics of photographs (Lee, Mumford and Huang, "Occlusion models for natural images",
IJCV 2001). On top lies the one object that makes the class. The mean of 2.7 bits a pixel at quality 90 lies between
the 1.6 and 2.9 of eight well-known photographs at this size, and the power of the spectrum falls as frequency ** -2.9,
theirs as ** -2.1 to ** -3.0: decoding costs what it costs for photographs.
"""

from __future__ import annotations

import colorsys
import io
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter
from torch.utils.data import Dataset

from . import user_cache

CLASSES = 10
QUALITY = 90  # of the JPEG files
_VERSION = 1  # of the images: what is in a user's cache is made again when it changes
_TILE = 640  # pixels a side of the noise that surfaces are cut from
_POINTS = (3, 4, 5, 6, 8)  # corners of the objects: a polygon and a star of each


def image_folder(count: int = 2000) -> Path:
    """Return the folder of an ImageNet-shaped set, made at the first call (a few seconds for 2,000 images).

    It holds ``train/<class>/<class>_<number>.JPEG``. Classes are named as ImageNet's are, n90000001 and on, numbers
    that ImageNet does not use, and have the same number of images, give or take one. Shorter sides are from 208 to 304
    pixels, longer ones up to 1.6 times as long.
    """
    final = user_cache.folder("images") / f"images-{count}-{CLASSES}-0-v{_VERSION}"
    if not final.exists():
        _make_set(final, count)
    return final


def _make_set(final: Path, count: int) -> None:
    """Make the set beside its place and move it there when it is complete."""
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=final.parent))

    def make(number: int) -> None:
        label = number % CLASSES
        name = f"n{90000001 + label}"
        path = partial / "train" / name / f"{name}_{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_image(label, number).save(path, "JPEG", quality=QUALITY)

    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # most of the work runs without Python's lock
            list(pool.map(make, range(count)))
        partial.chmod(0o755)
        partial.rename(final)
    except OSError:  # another process has made it meanwhile
        if not final.exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class ImageFolder(Dataset):
    """The images below `folder`, one folder a class, as ``torchvision.datasets.ImageFolder`` has them.

    Item i is `(image, label)`: an RGB image, through `transform` if there is one, and the place of its class among
    the sorted folder names. `paths` and `labels` are lists over all images in `folder`.
    """

    def __init__(self, folder: Path | str, transform: Callable | None = None) -> None:
        self.folder = Path(folder)
        self.classes = sorted(entry.name for entry in self.folder.iterdir() if entry.is_dir())
        files = {label: sorted((self.folder / name).iterdir()) for label, name in enumerate(self.classes)}
        self.paths = [path for some in files.values() for path in some]
        self.labels = [label for label, some in files.items() for _ in some]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int):
        with Image.open(self.paths[index]) as file:
            image = file.convert("RGB")
        return (image if self.transform is None else self.transform(image)), self.labels[index]

    def _sheet(self, numbers: list[int], width: int, height: int, columns: int) -> Image.Image:
        """Images side by side, each resized to `width` by `height`, row by row; without the transform."""
        sheet = Image.new("RGB", (columns * width, -(-len(numbers) // columns) * height))
        for place, number in enumerate(numbers):
            with Image.open(self.paths[number % len(self)]) as file:
                image = file.convert("RGB").resize((width, height))
            sheet.paste(image, (place % columns * width, place // columns * height))
        return sheet

    def contact_sheet(self) -> Image.Image:
        """Show eight images side by side, from the first class to the last, in 128 colours."""
        return self._sheet([i * len(self) // 8 for i in range(8)], 110, 88, 8).quantize(128)

    def large_photograph(self, number: int) -> bytes:
        """A JPEG file of 1200 x 960 pixels: 16 images side by side, others for each `number`."""
        stream, spread = io.BytesIO(), [7 * place for place in range(16 * number, 16 * number + 16)]
        self._sheet(spread, 300, 240, 4).save(stream, "JPEG", quality=QUALITY)
        return stream.getvalue()


def make_image(label: int, number: int) -> Image.Image:
    """Draw image `number` of a set, with the object of class `label`; the same arguments give the same pixels."""
    rng = np.random.default_rng([0, number])
    short = int(rng.integers(208, 305))
    long = int(short * rng.choice([1, 1.25, 4 / 3, 4 / 3, 1.5, 1.6]))
    width, height = (long, short) if rng.random() < 0.7 else (short, long)
    colours, surfaces = _scene(rng, width, height, label)

    rough = np.asarray(surfaces)
    shade = 3 * _cut(_noise(0.0), rng, height, width)  # as of a sensor
    for layer in (0, 1):
        shade += rough[..., layer] * _cut(_noise(0.9), rng, height, width)
    across, down = (np.linspace(*rng.uniform(0.7, 1.2, 2), n, dtype=np.float32) for n in (width, height))
    image = np.asarray(colours.filter(ImageFilter.BoxBlur(0.5)), np.float32)
    image += shade[..., None]
    image *= (across[None, :] * down[:, None])[..., None]
    np.clip(image, 0, 255, out=image)
    return Image.fromarray(image.astype(np.uint8))


def _scene(rng: np.random.Generator, width: int, height: int, label: int) -> tuple[Image.Image, Image.Image]:
    """Draw the colours, and how rough each surface is: the strength of two layers of noise."""
    count = 60  # leaves; in the mean 60% are ellipses, drawn with twelve corners, the others have four
    short = min(width, height)
    radii = np.sort(short * 0.035 / np.sqrt(rng.uniform(0.0025, 1, count)))[::-1]  # density falls as radius ** -3
    outlines = rng.uniform(-0.1, 1.1, (count, 1, 2)) * (width, height) + radii[:, None, None] * _leaves(rng, count)
    shapes = [points if rng.random() < 0.6 else points[::3] for points in outlines]
    value, saturation = rng.uniform((0.1, 0.0), (1.0, 0.45), (count + 1, 2)).T[..., None]
    paints = value * (1 - saturation * rng.random((count + 1, 3)))

    corners, star = _POINTS[label % 5], label // 5 % 2 == 1
    place, size = rng.uniform(0.35, 0.65, 2) * (width, height), short * rng.uniform(0.22, 0.4)
    shapes.append(place + size * _outline(corners, star, rng.uniform(0, 2 * math.pi)))
    hue = (label * 0.618 + rng.normal(0, 0.02)) % 1
    paints = np.vstack([paints, colorsys.hsv_to_rgb(hue, rng.uniform(0.6, 0.9), rng.uniform(0.6, 0.95))])

    rough = np.minimum(rng.gamma(1.5, 5, (count + 2, 2)), 40).astype(int).tolist()
    paints = (255 * paints).astype(int).tolist()
    colours = Image.new("RGB", (width, height), tuple(paints[0]))
    surfaces = Image.new("RGB", (width, height), (*rough[0], 0))
    on_colours, on_surfaces = ImageDraw.Draw(colours), ImageDraw.Draw(surfaces)
    for points, paint, strength in zip(shapes, paints[1:], rough[1:], strict=True):
        flat = points.ravel().tolist()
        on_colours.polygon(flat, fill=tuple(paint))
        on_surfaces.polygon(flat, fill=(*strength, 0))
    return colours, surfaces


def _leaves(rng: np.random.Generator, count: int) -> np.ndarray:
    """Ellipses of the longer half axis 1 in twelve corners each, (count, 12, 2)."""
    start, turn = rng.uniform(0, 2 * math.pi, (2, count, 1))
    angles = start + np.arange(12) * (math.pi / 6)
    x, y = np.cos(angles), rng.uniform(0.4, 1, (count, 1)) * np.sin(angles)
    return np.stack([x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)], axis=2)


def _outline(corners: int, star: bool, turn: float) -> np.ndarray:
    """Corners of a regular polygon of radius 1, or of the star with as many points."""
    steps = corners * (2 if star else 1)
    angles = turn + np.arange(steps) * (2 * math.pi / steps)
    radii = np.where(np.arange(steps) % 2 == 1, 0.45, 1.0) if star else np.ones(steps)
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def _cut(noise: np.ndarray, rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    top, left = rng.integers(0, (_TILE - height, _TILE - width))
    return noise[top : top + height, left : left + width]


@cache
def _noise(falling: float) -> np.ndarray:
    """Noise of mean 0 and standard deviation 1, float32 (_TILE, _TILE), amplitude ~ frequency ** -falling."""
    rng = np.random.default_rng(int(10 * falling))
    frequency = np.hypot(np.fft.fftfreq(_TILE)[:, None], np.fft.rfftfreq(_TILE)[None, :])
    frequency[0, 0] = 1
    spectrum = np.fft.rfft2(rng.standard_normal((_TILE, _TILE))) / frequency**falling
    spectrum[0, 0] = 0
    noise = np.fft.irfft2(spectrum, (_TILE, _TILE))
    return (noise / noise.std()).astype(np.float32)
