"""The made images have ImageNet's layout, are the same each time, and cost what photographs cost to decode."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

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
