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

from lessons.ffcv_data_loading.ffcv.images import QUALITY, ImageFolder, image_folder, make_image

pytestmark = pytest.mark.guard(60)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images"), count=32, classes=3)


def test_folders_and_names_are_those_of_imagenet(small: Path):
    classes = ["n90000001", "n90000002", "n90000003"]
    for split in ("train", "val"):
        assert sorted(path.name for path in (small / split).iterdir()) == classes
    assert [len([*(small / "train" / name).iterdir()]) for name in classes] == [11, 11, 10]
    assert (small / "train" / "n90000002" / "n90000002_1.JPEG").is_file()
    assert [path.name for path in sorted((small / "val").rglob("*.JPEG"))] == [
        f"ILSVRC2012_val_{number:08d}.JPEG" for number in (1, 2, 3)
    ]
    assert {path.name for path in small.parent.iterdir()} == {small.name, f".{small.name}.lock"}


def test_files_are_the_images_of_the_seed(small: Path):
    with Image.open(small / "train" / "n90000002" / "n90000002_4.JPEG") as file:
        assert file.format == "JPEG" and file.mode == "RGB"
        wanted = io.BytesIO()
        make_image(1, 4).save(wanted, "JPEG", quality=QUALITY)
        assert np.array_equal(file, Image.open(wanted))


def test_sizes_vary_around_256():
    sizes = np.array([make_image(0, number).size for number in range(60)])
    short, long = sizes.min(1), sizes.max(1)
    assert short.min() >= 208 and short.max() <= 304 and 246 <= short.mean() <= 266
    assert (long <= 1.6 * short).all() and len({tuple(size) for size in sizes}) > 50
    assert 0.5 < (sizes[:, 0] >= sizes[:, 1]).mean() < 1


def bits_a_pixel(image: Image.Image) -> float:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return 8 * len(file.getvalue()) / (image.width * image.height)


def test_images_compress_as_a_photograph_does():
    photograph = Image.open(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg").convert("RGB")
    half = photograph.resize((256, 300))
    made = [bits_a_pixel(make_image(number % 10, number)) for number in range(40)]
    assert np.mean(made) == pytest.approx(bits_a_pixel(half), rel=0.2)
    assert 1.5 < min(made) < max(made) < 5


def test_classes_can_be_told_apart_by_the_hue_in_the_middle():
    def hue(label: int, number: int) -> complex:
        image = make_image(label, number).convert("HSV")
        middle = np.asarray(image, float)[image.height // 3 : -image.height // 3, image.width // 3 : -image.width // 3]
        return (middle[..., 1] ** 4 * np.exp(2j * np.pi * middle[..., 0] / 255)).sum()

    wanted = np.exp(2j * np.pi * np.arange(10) * 0.618)
    guesses = [np.abs(np.angle(hue(number % 10, number) / wanted)).argmin() for number in range(60)]
    assert np.mean(np.array(guesses) == np.arange(60) % 10) > 0.7


def test_image_folder_reads_as_torchvision_does(small: Path):
    data = ImageFolder(small / "train")
    assert (len(data), data.classes) == (32, ["n90000001", "n90000002", "n90000003"])
    assert data.labels == [0] * 11 + [1] * 11 + [2] * 10
    image, label = data[12]
    assert (image.mode, label) == ("RGB", 1) and image.size == Image.open(data.paths[12]).size
    assert ImageFolder(small / "val", lambda image: image.mode)[2] == ("RGB", 2)


def test_folder_without_classes_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="one folder a class"):
        ImageFolder(tmp_path)


def test_set_is_made_once_even_by_two_processes(tmp_path: Path):
    code = (
        "import sys; from lessons.ffcv_data_loading.ffcv import image_folder as f\n"
        "print(f(sys.argv[1], 40, 4).stat().st_ino)"
    )
    command = [sys.executable, "-c", code, tmp_path]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    inodes = {child.communicate(timeout=150)[0] for child in both}
    assert len(inodes) == 1 and inodes == {f"{image_folder(tmp_path, 40, 4).stat().st_ino}\n"}
    assert not [*tmp_path.glob(".partial*")]


def test_failure_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from lessons.ffcv_data_loading.ffcv import images

    monkeypatch.setattr(images, "make_image", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        image_folder(tmp_path, 10, 1)
    assert [path.name for path in tmp_path.iterdir()] == [".images-10-1-0-v1.lock"]


def test_cache_is_below_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert image_folder(count=10, classes=1).is_relative_to(tmp_path / "distributed-deep-learning-course")


@pytest.mark.parametrize(
    ("options", "says"),
    [({"classes": 0}, "classes must be"), ({"count": 5}, "one image a class"), ({"seed": -1}, "seed must not")],
)
def test_bad_numbers_are_refused(options: dict, says: str):
    with pytest.raises(ValueError, match=says):
        image_folder(**options)
