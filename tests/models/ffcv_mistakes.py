"""Programs that use FFCV wrongly, or rightly in a way that fails without the fixes; `test_ffcv_fixes` runs them apart.

``python ffcv_mistakes.py FOLDER NAME ...`` runs the functions named, one after the other in one process, and prints a
line of JSON for each: what it returned, or its error.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import torch

if "unfixed" not in sys.argv:
    from lessons.ffcv_data_loading.ffcv import apply_fixes

    apply_fixes()

from ffcv import DatasetWriter, Loader
from ffcv.fields import FloatField, IntField, NDArrayField, RGBImageField
from ffcv.fields.decoders import CenterCropRGBImageDecoder, IntDecoder, SimpleRGBImageDecoder
from ffcv.loader import OrderOption
from ffcv.pipeline.operation import Operation
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage

FOLDER = Path(sys.argv[1])
SAMPLES = 24
PAGE = 1 << 21


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


def good_file(mode: str = "raw") -> str:
    path = FOLDER / f"good-{mode}.beton"
    if not path.exists():
        write(write_mode=mode)
        (FOLDER / "written.beton").rename(path)
    return str(path)


def loader(image=(), batch_size: int = 8, mode: str = "raw", **options) -> Loader:
    image = image or [SimpleRGBImageDecoder(), ToTensor(), ToTorchImage()]
    pipelines = {"image": image, "label": [IntDecoder(), ToTensor(), Squeeze(1)]}
    options = {"num_workers": 1, "drop_last": False} | options
    return Loader(good_file(mode), batch_size, pipelines=pipelines, **options)


class Own(Operation):
    """An operation as a learner writes one; `body` is its compiled part."""

    def __init__(self, body) -> None:
        super().__init__()
        self.body = body

    def generate_code(self):
        return self.body

    def declare_state_and_memory(self, state):
        return state, None


# ---- mistakes that made FFCV wait for ever ----


def image_without_channels():
    write(lambda: np.zeros((40, 40), np.uint8))


def sample_larger_than_a_page():
    write(lambda: np.zeros((1000, 1000, 3), np.uint8))


def dataset_that_raises():
    """The list of what is left to do is longer than a pipe holds, which must not hold up the end of the process."""

    def wrong():
        raise FileNotFoundError("n01440764_18.JPEG")

    write(wrong, length=100_000)


def writer_killed():
    write(lambda: os.kill(os.getpid(), signal.SIGKILL))


def disk_full():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE // 2, before[1]))
    try:
        write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def operation_that_does_not_compile():
    def body(images, _):
        return images.there_is_no_such_thing()

    list(loader([SimpleRGBImageDecoder(), Own(body), ToTensor()]))


def operation_that_fails_on_a_batch():
    def body(images, _):
        if len(images) < 8:
            raise ValueError("a short batch")
        return images

    list(loader([SimpleRGBImageDecoder(), ToTensor(), Own(body)], batch_size=9))


def compiled_operation_after_to_tensor():
    mean = np.zeros(3)
    loader([SimpleRGBImageDecoder(), ToTensor(), ToTorchImage(), NormalizeImage(mean, mean + 1, np.float32)])


def to_tensor_forgotten():
    list(loader([SimpleRGBImageDecoder(), ToTorchImage()]))


def next_after_the_end():
    batches = iter(loader())
    count = sum(1 for _ in batches)
    return [count, next(batches, "end"), next(batches, "end")]


def file_gone_while_it_is_read():
    path = FOLDER / "gone.beton"
    path.write_bytes(Path(good_file()).read_bytes())
    pipelines = {"image": [SimpleRGBImageDecoder(), ToTensor()], "label": None}
    lost = Loader(str(path), 8, num_workers=1, os_cache=False, pipelines=pipelines)
    path.unlink()
    list(lost)


def file_cut_short():
    path = FOLDER / "short.beton"
    path.write_bytes(Path(good_file()).read_bytes())
    pipelines = {"image": [SimpleRGBImageDecoder(), ToTensor()], "label": None}
    cut = Loader(str(path), 8, num_workers=1, os_cache=False, pipelines=pipelines)
    os.truncate(path, PAGE)
    list(cut)


# ---- what went wrong without a word ----


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


def pipeline_used_twice():
    decode = [CenterCropRGBImageDecoder((16, 16), 0.5), ToTensor(), ToTorchImage()]
    return [[*next(iter(loader(decode)))[0].shape] for _ in range(2)]


def more_workers_than_cores():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = sum(len(labels) for _, labels in loader(num_workers=1000))
    return [count, str(caught[0].message)]


def threads_of_torch():
    torch.set_num_threads(1)
    sum(len(labels) for _, labels in loader(num_workers=2))
    return torch.get_num_threads()


def bytes_of_numba_stay_writable():
    import numba

    held = numba.uint8[::1]
    loader()
    return held.mutable


# ---- what is right ----


def images_come_back():
    """Each image of value i, whatever the file's mode, cache and order; flipped all the same."""
    for mode, close in (("raw", 0), ("jpg", 2)):
        for os_cache in (True, False):
            for workers in (1, 2):
                flipped = [SimpleRGBImageDecoder(), RandomHorizontalFlip(1.0), ToTensor(), ToTorchImage()]
                options = {"order": OrderOption.QUASI_RANDOM, "seed": 3, "num_workers": workers}
                seen = []
                for images, labels in loader(flipped, mode=mode, os_cache=os_cache, **options):
                    difference = images.float() - labels[:, None, None, None]
                    assert difference.abs().max() <= close, (mode, difference.abs().max())
                    seen += labels.tolist()
                assert sorted(seen) == list(range(SAMPLES)) and seen != sorted(seen)
    return True


def other_fields_come_back():
    path = FOLDER / "fields.beton"

    class Numbers:
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int):
            return index / 4, np.full(3, index, np.int32)

    writer = DatasetWriter(str(path), {"x": FloatField(), "a": NDArrayField(np.dtype("i4"), (3,))}, num_workers=1)
    writer.from_indexed_dataset(Numbers())
    x, a = next(iter(Loader(str(path), SAMPLES, num_workers=1)))
    return [x.sum().item(), a.sum(0).tolist()]


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
        loader([SimpleRGBImageDecoder(), ToTorchImage()])
    except ValueError:
        return True


def main() -> None:
    for name in sys.argv[2:]:
        if name == "unfixed":
            continue
        start = time.perf_counter()
        try:
            answer = {"value": globals()[name]()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": name, "seconds": time.perf_counter() - start, **answer}), flush=True)


if __name__ == "__main__":
    main()
