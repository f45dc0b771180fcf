"""The made images have ImageNet's layout, are the same each time, and cost what photographs cost to decode."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

from lessons.ffcv_data_loading.ffcv import images
from lessons.ffcv_data_loading.ffcv.images import QUALITY, ImageFolder, image_folder, make_image

pytestmark = pytest.mark.guard(60)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "distributed-deep-learning-course" / "images"


def test_a_set_has_imagenets_folders_and_the_images_of_its_numbers(cache: Path):
    folder = image_folder(count=32)
    data = ImageFolder(folder / "train")
    assert folder.parent == cache and data.classes == [f"n900000{n:02}" for n in range(1, 11)]
    assert data.labels == sorted(n % 10 for n in range(32)) and len(data) == 32
    wanted = io.BytesIO()
    make_image(1, 21).save(wanted, "JPEG", quality=QUALITY)
    assert (folder / "train" / "n90000002" / "n90000002_21.JPEG").read_bytes() == wanted.getvalue()
    image, label = data[5]
    assert (image.mode, label) == ("RGB", 1) and image.size == Image.open(data.paths[5]).size
    assert ImageFolder(folder / "train", lambda image: image.mode)[5] == ("RGB", 1)


def test_sizes_vary_around_256():
    sizes = np.array([make_image(0, number).size for number in range(60)])
    short, long = sizes.min(1), sizes.max(1)
    assert short.min() >= 208 and short.max() <= 304 and 246 <= short.mean() <= 266
    assert (long <= 1.6 * short).all() and 0.5 < (sizes[:, 0] >= sizes[:, 1]).mean() < 1


def bits_a_pixel(image: Image.Image) -> float:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return 8 * len(file.getvalue()) / (image.width * image.height)


def test_images_compress_as_a_photograph_does():
    photograph = Image.open(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg").convert("RGB")
    made = [bits_a_pixel(make_image(number % 10, number)) for number in range(40)]
    assert np.mean(made) == pytest.approx(bits_a_pixel(photograph.resize((256, 300))), rel=0.2)
    assert 1.5 < min(made) < max(made) < 5


def test_a_set_is_whole_even_if_two_processes_make_it(cache: Path):
    code = "from lessons.ffcv_data_loading.ffcv import image_folder as f; print(f(40).stat().st_ino)"
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {child.communicate(timeout=150)[0] for child in both} == {f"{image_folder(40).stat().st_ino}\n"}
    assert [path.name for path in cache.iterdir()] == ["images-40-10-0-v1"]


def test_a_failure_leaves_nothing_half_made(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images, "make_image", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        image_folder(10)
    assert not [*cache.iterdir()]
