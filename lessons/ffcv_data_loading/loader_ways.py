"""Ways to load the same images for training; each runs in an environment that has its packages.

    python loader_ways.py NAME IMAGES DATA WORKERS SECONDS

runs one epoch, then epochs until so many seconds have passed, at least one, and prints a line of JSON: seconds to the
first batch of all, and images and seconds of the later epochs. IMAGES is a folder of JPEG files, one folder a class;
DATA one for files in the way's own format, made at the first call. All ways do the same: shuffle, decode, cut out a
random part, resize it to 224 x 224, flip half of them, and collate batches of 64 as bytes, channels last in memory.
"""

import io
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))

from lessons.ffcv_data_loading.crops import crop_box  # noqa: E402

SIZE, BATCH = 224, 64
Epoch = Callable[[], Iterator]


def files(images: Path) -> list[tuple[str, int]]:
    classes = sorted(images.iterdir())
    return [(str(path), label) for label, folder in enumerate(classes) for path in sorted(folder.iterdir())]


def with_pil(file) -> np.ndarray:
    """Decode and augment one image, from a path or an open file."""
    from PIL import Image

    image = Image.open(file).convert("RGB")
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=crop_box(*image.size))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


def with_cv2(path) -> np.ndarray:
    """The same with the decoder and the resizing that FFCV uses."""
    import cv2

    return from_pixels(cv2.imread(path, cv2.IMREAD_COLOR_RGB))


def from_pixels(pixels: np.ndarray) -> np.ndarray:
    import cv2

    left, top, right, bottom = crop_box(pixels.shape[1], pixels.shape[0])
    image = cv2.resize(pixels[top:bottom, left:right], (SIZE, SIZE), interpolation=cv2.INTER_AREA)
    return image[:, ::-1] if random.random() < 0.5 else image


def collate(samples: list):
    import torch

    images = torch.from_numpy(np.stack([image for image, _ in samples])).permute(0, 3, 1, 2)
    return images, torch.tensor([label for _, label in samples])


def one_thread_each() -> None:
    import torch

    torch.set_num_threads(1)
    try:
        import cv2

        cv2.setNumThreads(1)
    except ImportError:
        pass


# ---- torch.utils.data.DataLoader, and step by step towards FFCV ----


class Images:
    """A data set of a list of samples, anything with a label, and what makes an image of one."""

    def __init__(self, samples: list, make: Callable) -> None:
        self.samples, self.make = samples, make

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        sample, label = self.samples[index]
        return self.make(sample), label


def loaded(dataset: Images, workers: int) -> Epoch:
    from torch.utils.data import DataLoader

    options = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": collate}
    loader = DataLoader(dataset, BATCH, shuffle=True, drop_last=True, worker_init_fn=seed_worker, **options)
    return lambda: iter(loader)


def seed_worker(_: int) -> None:
    import torch

    random.seed(torch.initial_seed())
    one_thread_each()


def threaded(dataset: Images, workers: int) -> Epoch:
    """Threads that put images straight into one of few batches, which are made three ahead, as by FFCV."""
    import queue
    import threading

    import torch

    memory = itertools.cycle(np.empty((6, BATCH, SIZE, SIZE, 3), np.uint8))  # 3 ready, and those at work

    def fill(place: np.ndarray, index: int) -> int:
        place[...], label = dataset[index]
        return label

    def epoch() -> Iterator:
        order = torch.randperm(len(dataset)).tolist()
        ready: queue.Queue = queue.Queue(3)

        def work() -> None:
            with ThreadPoolExecutor(workers) as pool:
                for start in range(0, len(order) - BATCH + 1, BATCH):
                    images = next(memory)
                    labels = list(pool.map(fill, images, order[start : start + BATCH]))
                    ready.put((torch.from_numpy(images).permute(0, 3, 1, 2), torch.tensor(labels)))
            ready.put(None)

        threading.Thread(target=work, daemon=True).start()
        return iter(ready.get, None)

    return epoch


def raw_pixels(images: Path, data: Path) -> list:
    """All images decoded, in one file that is mapped into memory."""
    from lessons.ffcv_data_loading.ffcv import Beton, ImageFolder, by_hand

    if not (data / "raw.beton").exists():
        by_hand.write_beton(ImageFolder(images), data / "new")
        (data / "new").rename(data / "raw.beton")
    file = Beton(data / "raw.beton")
    return [(file.image(i), label) for i, label in enumerate(file.samples["label"].tolist())]


# ---- FFCV ----


def ffcv(mode: str) -> Callable[[Path, Path, int], Epoch]:
    def way(images: Path, data: Path, workers: int) -> Epoch:
        from lessons.ffcv_data_loading.ffcv import apply_fixes

        if "COURSE_BENCH_UNFIXED" not in os.environ:
            apply_fixes()
        from ffcv import DatasetWriter, Loader
        from ffcv.fields import IntField, RGBImageField
        from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
        from ffcv.loader import OrderOption
        from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage

        from lessons.ffcv_data_loading.ffcv import ImageFolder

        file = data / f"{mode}.beton"
        if not file.exists():
            fields = {"image": RGBImageField(write_mode=mode), "label": IntField()}
            DatasetWriter(str(data / "new"), fields, num_workers=2).from_indexed_dataset(ImageFolder(images))
            (data / "new").rename(file)
        decoder = RandomResizedCropRGBImageDecoder((SIZE, SIZE))
        pipelines = {
            "image": [decoder, RandomHorizontalFlip(), ToTensor(), ToTorchImage()],
            "label": [IntDecoder(), ToTensor(), Squeeze(1)],
        }
        loader = Loader(str(file), BATCH, num_workers=workers, order=OrderOption.RANDOM, pipelines=pipelines)
        return lambda: iter(loader)

    return way


# ---- other libraries ----


def webdataset(images: Path, data: Path, workers: int) -> Epoch:
    import webdataset as wds
    from torch.utils.data import DataLoader

    if not (data / "complete").exists():
        samples = files(images)
        random.Random(0).shuffle(samples)
        for shard in range(8):
            with wds.TarWriter(str(data / f"{shard}.tar")) as out:
                for number, (path, label) in enumerate(samples[shard::8]):
                    out.write({"__key__": f"{shard}-{number}", "jpg": Path(path).read_bytes(), "cls": label})
        (data / "complete").touch()
    shards = [str(data / f"{shard}.tar") for shard in range(8)]
    dataset = wds.WebDataset(shards, shardshuffle=8, empty_check=False).shuffle(200).to_tuple("jpg", "cls")
    dataset = dataset.map(lambda sample: (with_pil(io.BytesIO(sample[0])), int(sample[1])))
    dataset = dataset.batched(BATCH, collation_fn=collate, partial=True)
    options = {"num_workers": workers, "persistent_workers": workers > 0, "worker_init_fn": seed_worker}
    loader = DataLoader(dataset, batch_size=None, **options)
    return lambda: iter(loader)


def bytes_of(sample: tuple[str, int]) -> dict:
    path, label = sample
    return {"image": Path(path).read_bytes(), "label": label}


def decode_and_collate(samples: list[dict]):
    return collate([(with_pil(io.BytesIO(sample["image"])), int(sample["label"])) for sample in samples])


def litdata(images: Path, data: Path, workers: int) -> Epoch:
    import litdata as ld

    folder = data / "chunks"
    if not (data / "complete").exists():
        ld.optimize(fn=bytes_of, inputs=files(images), output_dir=str(folder), chunk_bytes="16MB", num_workers=1)
        (data / "complete").touch()

    dataset = ld.StreamingDataset(str(folder), shuffle=True, drop_last=True)
    options = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": decode_and_collate}
    loader = ld.StreamingDataLoader(dataset, batch_size=BATCH, drop_last=True, **options)
    return lambda: iter(loader)


def mosaicml_streaming(images: Path, data: Path, workers: int) -> Epoch:
    sys.modules["streaming.vision"] = ModuleType("streaming.vision")  # else torchvision, which is not needed here
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    folder = data / "shards"
    if not (data / "complete").exists():
        with MDSWriter(out=str(folder), columns={"image": "bytes", "label": "int"}, size_limit=1 << 23) as out:
            for sample in files(images):
                out.write(bytes_of(sample))
        (data / "complete").touch()

    dataset = StreamingDataset(local=str(folder), batch_size=BATCH, shuffle=True)
    options = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": decode_and_collate}
    loader = DataLoader(dataset, BATCH, drop_last=True, worker_init_fn=seed_worker, **options)
    return lambda: iter(loader)


def grain(images: Path, data: Path, workers: int) -> Epoch:
    import grain

    samples = files(images)
    dataset = grain.MapDataset.source(samples).seed(0).shuffle()
    dataset = dataset.map(lambda sample: (with_pil(sample[0]), sample[1])).batch(BATCH, drop_remainder=True)
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=3)
    dataset = dataset.repeat().to_iter_dataset(reading)
    batches = iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers)))

    def epoch() -> Iterator:
        return itertools.islice(batches, len(samples) // BATCH)  # its processes live through all epochs

    return epoch


def spdl(images: Path, data: Path, workers: int) -> Epoch:
    from spdl.pipeline import PipelineBuilder

    samples = files(images)

    def epoch() -> Iterator:
        random.shuffle(samples)
        builder = PipelineBuilder().add_source(samples)
        builder = builder.pipe(lambda sample: (with_pil(sample[0]), sample[1]), concurrency=workers)
        builder = builder.aggregate(BATCH, drop_last=True).pipe(collate).add_sink(3)
        pipeline = builder.build(num_threads=workers)
        with pipeline.auto_stop():
            yield from pipeline

    return epoch


def dali(images: Path, data: Path, workers: int) -> Epoch:
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=BATCH, num_threads=workers, device_id=None)
    def pipeline():
        jpegs, labels = fn.readers.file(file_root=str(images), random_shuffle=True, initial_fill=2000)
        ratio = {"random_area": [0.08, 1.0], "random_aspect_ratio": [3 / 4, 4 / 3]}
        pictures = fn.decoders.image_random_crop(jpegs, device="cpu", **ratio)
        pictures = fn.resize(pictures, resize_x=SIZE, resize_y=SIZE)
        return fn.flip(pictures, horizontal=fn.random.coin_flip()), labels

    running = pipeline()
    running.build()

    def epoch() -> Iterator:
        for _ in range(len(files(images)) // BATCH):
            pictures, labels = running.run()
            yield pictures.as_array(), labels.as_array()

    return epoch


WAYS = {
    "dataloader": lambda images, data, workers: loaded(Images(files(images), with_pil), workers),
    "dataloader_cv2": lambda images, data, workers: loaded(Images(files(images), with_cv2), workers),
    "dataloader_raw": lambda images, data, workers: loaded(Images(raw_pixels(images, data), from_pixels), workers),
    "threads_raw": lambda images, data, workers: threaded(Images(raw_pixels(images, data), from_pixels), workers),
    "ffcv_raw": ffcv("raw"), "ffcv_mixed": ffcv("proportion"), "ffcv_jpeg": ffcv("jpg"),
    "webdataset": webdataset, "litdata": litdata, "mosaicml_streaming": mosaicml_streaming, "grain": grain,
    "spdl": spdl, "dali": dali,
}


def main() -> None:
    name, images, data, workers, seconds = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    one_thread_each()
    epoch = WAYS[name](Path(images), Path(data), int(workers))
    ready, first = time.perf_counter(), None
    for batch, _ in epoch():  # warms up
        if first is None:
            first = time.perf_counter() - ready
            assert math.prod(batch.shape) == BATCH * SIZE * SIZE * 3 and str(batch.dtype).endswith("uint8")
    count, start = 0, time.perf_counter()
    while not count or time.perf_counter() < start + float(seconds):
        count += sum(len(labels) for _, labels in epoch())
    print(json.dumps({"first_s": first, "images": count, "s": time.perf_counter() - start}), file=answers, flush=True)


if __name__ == "__main__":
    main()
