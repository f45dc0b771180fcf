"""Programs that use FFCV wrongly, or rightly in a way that fails without the fixes; `test_ffcv_fixes` runs them apart.

``python ffcv_mistakes.py FOLDER EXPRESSION ...`` evaluates expressions one after the other in one process, and prints a
line of JSON for each: its value, or its error.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    from lessons.ffcv_data_loading.ffcv import apply_fixes

    apply_fixes()

from ffcv import DatasetWriter, Loader
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
from ffcv.loader import OrderOption
from ffcv.pipeline.operation import Operation
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage

FOLDER = Path(sys.argv[1])
SAMPLES = 24
PAGE = 1 << 21
DECODE = SimpleRGBImageDecoder
NORMALISE = NormalizeImage(np.zeros(3), np.ones(3), np.float32)


class Pictures:
    """Images of one size, sample i of value i all over; `wrong` is called instead for sample 17."""

    def __init__(self, wrong=None, length: int = SAMPLES) -> None:
        self.wrong, self.length = wrong, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        if self.wrong and index == 17:
            return self.wrong(), 17
        return np.full((40, 40, 3), index, np.uint8), index


def write(wrong=None, length: int = SAMPLES, **options) -> None:
    """Write a file that may fail, look at what is left behind, then raise."""
    path, shared = FOLDER / "written.beton", {*Path("/dev/shm").iterdir()}
    fields = {"image": RGBImageField(**options), "label": IntField()}
    try:
        writer = DatasetWriter(str(path), fields, page_size=PAGE, num_workers=2)
        writer.from_indexed_dataset(Pictures(wrong, length), chunksize=4)
    except RuntimeError:
        assert not path.exists(), "the incomplete file is still there"
        assert {*Path("/dev/shm").iterdir()} <= shared, "shared memory is still there"
        raise


def not_found():
    raise FileNotFoundError("n01440764_18.JPEG")


def good_file(mode: str = "raw") -> str:
    path = FOLDER / f"good-{mode}.beton"
    if not path.exists():
        write(write_mode=mode)
        (FOLDER / "written.beton").rename(path)
    return str(path)


def loader(image=(), batch_size: int = 8, mode: str = "raw", path: str = "", **options) -> Loader:
    image = image or [DECODE(), ToTensor(), ToTorchImage()]
    pipelines = {"image": image, "label": [IntDecoder(), ToTensor(), Squeeze(1)]}
    options = {"num_workers": 1, "drop_last": False} | options
    return Loader(path or good_file(mode), batch_size, pipelines=pipelines, **options)


class Own(Operation):
    """An operation as a learner writes one; `body` is its compiled part."""

    def __init__(self, body) -> None:
        super().__init__()
        self.body = body

    def generate_code(self):
        return self.body

    def declare_state_and_memory(self, state):
        return state, None


def does_not_compile(images, _):
    return images.there_is_no_such_thing()


def loop_left_by_break():
    for os_cache in (True, False):
        for _ in loader(batch_size=1, os_cache=os_cache):
            break
    limit = time.monotonic() + 10
    while (left := threads_of_ffcv()) and time.monotonic() < limit:
        time.sleep(0.05)
    return left


def threads_of_ffcv() -> list[str]:
    return [type(thread).__name__ for thread in threading.enumerate() if type(thread).__module__.startswith("ffcv.")]


def images_come_back():
    """Each image of value i, whatever the file's mode, cache and order; flipped all the same."""
    for mode, close in (("raw", 0), ("jpg", 2)):
        for os_cache in (True, False):
            for workers in (1, 2):
                flipped = [DECODE(), RandomHorizontalFlip(1.0), ToTensor(), ToTorchImage()]
                options = {"order": OrderOption.QUASI_RANDOM, "seed": 3, "num_workers": workers}
                seen = []
                for images, labels in loader(flipped, mode=mode, os_cache=os_cache, **options):
                    difference = images.float() - labels[:, None, None, None]
                    assert difference.abs().max() <= close, (mode, difference.abs().max())
                    seen += labels.tolist()
                assert sorted(seen) == list(range(SAMPLES)) and seen != sorted(seen)
    return True


def nothing_is_compiled_again():
    """Count what Numba compiles, in a process that finds the code of an earlier one, and for a second Loader."""
    from numba.core import event

    good_file()
    with event.install_recorder("numba:compile") as first:
        images_come_back()
    with event.install_recorder("numba:compile") as second:
        images_come_back()
    return [len(first.buffer), len(second.buffer)]


def leaves_quietly():
    """End the process with a loop under way and a Loader that could not be made."""
    global under_way
    under_way = iter(loader(batch_size=1))
    next(under_way)
    try:
        loader([DECODE(), ToTorchImage()])
    except ValueError:
        return True


def main() -> None:
    for expression in sys.argv[2:]:
        try:
            answer = {"value": eval(expression)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"program": expression, **answer}), flush=True)


if __name__ == "__main__":
    main()
