# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Is the GPU waiting for data, and how does FFCV fix that?
#
# Eight A100s trained ResNet-50 on ImageNet for 16 epochs in 14.9 minutes, with crops of 160 to 192 pixels (*recorded*,
# [FFCV's ImageNet runs](https://github.com/libffcv/ffcv-imagenet)). ImageNet's training set (ILSVRC 2012) has
# 1,281,167 images, so these GPUs took about 23,000 in each second, 2,900 each. Somebody had to read, decode, crop and
# copy them. Below, a core does that for several hundred images a second, in the usual way. Every GPU of that run
# would want several cores for itself, and would wait if it did not get them. This lesson finds out who waits, opens
# the file format that ends the waiting, and loads from it.
#
# **You will be able to**
# - *tell* from three measurements whether the data loader is the bottleneck, and which part of it;
# - *read and write* a `.beton` file with NumPy, and *choose* what to store in it by size and speed;
# - *choose* an order and a cache for the memory you have, from the pages that an epoch touches;
# - *build* an FFCV pipeline with an operation of your own, and *load* with it under DDP;
# - *say* when FFCV is not the answer, and what is.
#
# **Before this:** [04 ddp](04_ddp.ipynb). **Time:** about 130 minutes to read, one minute to run.

# %% [markdown]
# ## Ten predictions
#
# Write down an answer to each, however unsure. They come up again on the way, and the answers are at the end.
#
# 1. A loader gives 900 images/s, a training step could take 2,700. How many go through both, if they take turns? And
#    if the loader works ahead in another process?
# 2. Read the file, decode the JPEG, crop and resize, copy into the batch: what takes longest?
# 3. How large is a photograph of 300 by 250 pixels as plain pixels, and roughly how large as a JPEG file?
# 4. A file holds images in pages, ten to a page. A batch of 8 takes its images at random from 100 pages. How many
#    pages must be in memory to read an epoch with each page read once?
# 5. Memory for half of a data set, the least recently used part is dropped. How much of an epoch comes from memory, if
#    the order is sequential? If it is random?
# 6. Two ranks read the same file. How much memory does the second one add?
# 7. Why may an FFCV loader need ten seconds for its first batch and a hundredth of one for its second?
# 8. Python's lock lets one thread run at a time. How can FFCV load with threads?
# 9. Two ranks shuffle with seeds of their own, 0 and 1. Each takes every second sample of its order. Which share of
#    the samples does no rank see in an epoch?
# 10. An epoch has 800 samples, a batch 64. How many samples does a default FFCV loader give?

# %% [markdown]
# The first cell imports everything and names every parameter.

# %% tags=["parameters"]
import gc
import io
import json
import os
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, default_collate

from course_utils import device, expect_error, launch, plots
from course_utils.ffcv import FIXES, ImageFolder, apply_fixes, image_folder, missing

world_size = 2  # ranks
count = 800  # images of the set that this lesson uses
gpu_rate = 2_900  # images/s of the GPU that is emulated where there is none
use_ffcv = True  # False: as if FFCV could not be used here

# %% [markdown]
# FFCV is a package that few machines have. `missing` says whether it can be used here. If not, the cells
# that need it show what was recorded elsewhere, and say so. All others run for real. `apply_fixes` mends what goes
# wrong in its last release; section 10 comes back to that.

# %%
without = missing() if use_ffcv else "FFCV is left out, as use_ffcv says."
if without:
    print(without, "\nWhat needs FFCV below is recorded, not measured.")
    Operation = object
else:
    apply_fixes()
    from ffcv import transforms
    from ffcv.fields import IntField, RGBImageField, rgb_image
    from ffcv.fields.basics import IntDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.memory_managers import ProcessCacheManager
    from ffcv.pipeline.allocation_query import AllocationQuery
    from ffcv.pipeline.compiler import Compiler
    from ffcv.pipeline.operation import Operation
    from ffcv.pipeline.pipeline_spec import PipelineSpec
    from ffcv.reader import Reader
    from ffcv.transforms import Squeeze, ToDevice, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    print("FFCV can be used: everything below is measured here, unless it says otherwise.")

# %% [markdown]
# What is recorded was measured by `benchmarks/loading.py`, on the 2,000 images of which this lesson uses a part,
# and lies in `docs/loading.json`. The machine's speed drifts, so all ways to load took turns of a second or an epoch,
# in several rounds. What is shown are medians over the rounds. Sections 8 and 11 compare two ways within each round.

# %%
RECORDED = json.loads(Path("../docs/loading.json").read_text(encoding="utf-8"))


def best_workers(way):
    """The name of a recorded way with the number of workers best for it, and what was measured."""
    by_workers = way["by_workers"]
    workers = max(by_workers, key=lambda n: by_workers[n]["images_per_s"])
    return f"{way['name']}, {workers}", by_workers[workers]


def recorded(*ways):
    """Images/s that were recorded for ways to load, each with its best number of workers."""
    found = [RECORDED["ways"][way] for way in ways]
    for way in found:
        if not way["by_workers"]:
            print(f"{way['name']} was not measured: {way['unavailable']}")
    rows = dict(best_workers(way) for way in found if way["by_workers"])
    return {name: row["images_per_s"] for name, row in rows.items()}


# %%
def gain(way, base="dataloader"):
    """How many times as fast as `base` a way was: median, lowest, highest of the rounds."""
    one, other = (best_workers(RECORDED["ways"][key])[1]["rounds"] for key in (way, base))
    times = np.divide(one, other)
    return np.median(times), times.min(), times.max()


def recorded_bars(ways, strong=()):
    """Bars of images/s, each with how many times as fast as the first it is."""
    rates = recorded(*ways)
    times = [gain(way, ways[0])[0] for way in ways if RECORDED["ways"][way]["by_workers"]]
    title = f"recorded: {there}; behind each name the best number of workers"
    options = {"times": dict(zip(rates, times, strict=True)), "unit": "images/s"}
    strong = [name for name in rates if name.startswith(tuple(strong))] if strong else ()
    return plots.loader_bars(rates, title, [*rates][0], strong=strong, **options)


there = f"{RECORDED['images']['count']:,} images, {RECORDED['machine']['cores']} cores"
print(f"recorded: {len(RECORDED['ways'])} ways to load {there}, {RECORDED['rounds']} rounds")

# %% [markdown]
# ## 1. A small ImageNet
#
# The images are made from a seed, in the shape of ImageNet: one folder a class, JPEG files of many sizes. They compress
# like photographs, so a pixel costs about as much to decode. But an image of ImageNet has about twice the pixels and
# four times the bytes. What reads this folder reads the real one, two to three times as slowly (an estimate from these
# ratios).

# %%
train = ImageFolder(image_folder() / "train")
spread = np.linspace(0, len(train) - 1, count).astype(int).tolist()  # the same share of each class
subset = Subset(train, spread)
paths = [train.paths[i] for i in spread]
print(f"{len(train):,} images of {len(train.classes)} classes, of which this lesson uses {count}")
width, height = subset[0][0].size
print(f"the first: {paths[0].parent.name}/{paths[0].name}, {width} x {height} pixels")

sheet = Image.new("RGB", (8 * 110, 88))
for i in range(8):
    sheet.paste(subset[i * count // 8][0].resize((110, 88)), (110 * i, 0))
sheet.quantize(128)

# %% [markdown]
# *The figure: eight images side by side, scenes of overlapping shapes with a polygon or star of one colour in the
# middle, which is the class.*
#
# ## 2. Who waits for whom?
#
# An input pipeline for training reads a file, decodes it, takes a random part of the image, resizes that to 224 by
# 224, flips it half of the time, and copies it into a batch. This is the usual one, with the library PIL. Pixels stay
# bytes until they are on the GPU: as float32 they would be four times as many bytes to copy.


# %%
def crop_box(width, height):
    """A random box of 8 to 100 % of the area with sides of 3:4 to 4:3, as in ImageNet training."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    return 0, 0, side, side


def augment(image, size=224):
    """Random resized crop and flip of a PIL image: uint8 (size, size, 3)."""
    image = image.resize((size, size), Image.Resampling.BILINEAR, crop_box(*image.size))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image))


# %% [markdown]
# **Predict** (question 2) which part takes longest. One process does them one after the other, for 200 images.


# %%
def decode(data):
    return Image.open(io.BytesIO(data)).convert("RGB")


def costs_of_parts(paths):
    """Seconds an image takes in each part of the pipeline, in one process, a batch at a time."""
    work = {"read": Path.read_bytes, "decode": decode, "augment": augment}
    parts = dict.fromkeys([*work, "copy"], 0.0)
    for first in range(0, len(paths), 64):
        items = paths[first : first + 64]
        for name, part in work.items():
            start = time.perf_counter()
            items = [part(item) for item in items]
            parts[name] += (time.perf_counter() - start) / len(paths)
        start = time.perf_counter()
        torch.stack(items).to(device())
        parts["copy"] += (time.perf_counter() - start) / len(paths)
    return parts


costs_of_parts(paths[:200])  # from now on the files are in memory
parts = min((costs_of_parts(paths[:200]) for _ in range(2)), key=lambda parts: sum(parts.values()))
plots.time_shares({"one image": parts}, "measured: what PIL's pipeline does for one image")

# %% [markdown]
# *The figure: one bar for the time of one image, cut into shares. Decoding takes about half of it, cropping and
# resizing about the other half. To read a file that lies in memory already and to copy into the batch take little.*

# %% tags=["nbval-ignore-output"]
whole = sum(parts.values())
for name, seconds in parts.items():
    print(f"{name:8} {1e3 * seconds:6.2f} ms  {seconds / whole:4.0%}")
print(f"together {1e3 * whole:6.2f} ms: {1 / whole:,.0f} images/s from one core,")
print(f"so a GPU that takes {gpu_rate:,} images/s needs {gpu_rate * whole:.1f} cores for itself")

# %% [markdown]
# For ImageNet's larger images reckon with two to three times as many cores (section 1).
#
# Now the three measurements. They answer the question of the title for any training script:
#
# 1. the **loader alone**: go through it and do nothing with the batches, L images/s;
# 2. the **step alone**: train on one batch again and again, S images/s;
# 3. **both**, as in training, and the time for which the step waits for the next batch.
#
# The step trains a small network where there is a GPU. Elsewhere the GPU is *emulated*: the step waits for as long as
# one at 2,900 images/s would take, and needs no core for it. A step that computed on the CPU would take the cores that
# the loader needs.


# %%
def network():
    """Images (b, 3, h, w) as float32 to logits (b, 10)."""
    layers, channels = [], 3
    for width in (32, 64, 128):
        layers += [nn.Conv2d(channels, width, 5, stride=4 if channels == 3 else 2), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def loss_of(model, images, labels):
    """Cross-entropy of uint8 images (b, 3, h, w), made floats where the model is."""
    return nn.functional.cross_entropy(model(images.float() / 255), labels)


# %%
def make_step():
    """One step of training on a GPU, or of waiting for as long as an emulated one takes."""
    if device().type == "cpu":
        return lambda images, labels: time.sleep(len(images) / gpu_rate)
    model = network().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(images, labels):
        optimizer.zero_grad()
        loss_of(model, images.to(device()), labels.to(device())).backward()
        optimizer.step()
        torch.cuda.synchronize()

    return step


# %%
def epoch(loader, step=None):
    """Images of one epoch, its seconds, and the seconds for which the step waited for a batch."""
    seen, waited, start = 0, 0.0, time.perf_counter()
    asked, batches = start, iter(loader)  # to start a loader's workers is waiting, too
    while True:
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            return seen, time.perf_counter() - start, waited
        seen += len(batch[0])
        if step:
            step(*batch)
        asked = time.perf_counter()


def best(loader, step=None, epochs=2):
    """Images/s and the share of time spent waiting, of the fastest of some epochs."""
    seen, seconds, waited = min((epoch(loader, step) for _ in range(epochs)), key=lambda e: e[1])
    return seen / seconds, waited / seconds


# %%
def channels_first(items):
    """The batch from (image, label) pairs: images uint8 (b, 3, h, w), labels int64 (b,)."""
    images, labels = default_collate(items)
    return images.permute(0, 3, 1, 2), labels


def pil_loader(workers):
    """The usual loader, in this process (0 workers) or in worker processes."""
    data = Subset(ImageFolder(image_folder() / "train", augment), spread)
    more = {"multiprocessing_context": "fork", "persistent_workers": True} if workers else {}
    # a fork has the functions of the notebook; other ways to start workers would import them
    more |= {"num_workers": workers, "collate_fn": channels_first}
    return DataLoader(data, 64, shuffle=True, **more)


cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
step = make_step()
one_batch = next(iter(pil_loader(0)))
step(*one_batch)
alone = best([one_batch] * 12, step)[0]
loaders = {"in turns": pil_loader(0), f"{cores} workers": pil_loader(cores)}
found = {name: (best(loader)[0], *best(loader, step)) for name, loader in loaders.items()}

# %% [markdown]
# **Predict** (question 1) from L and S what comes out of both, in turns and with workers.

# %% tags=["nbval-ignore-output"]
print("            loader alone  step alone      both  predicted  step waits")
for name, (loading, both, waits) in found.items():
    predicted = 1 / (1 / loading + 1 / alone) if name == "in turns" else min(loading, alone)
    row = f"{name:11}{loading:14,.0f}{alone:12,.0f}{both:10,.0f}{predicted:11,.0f}{waits:12.0%}"
    print(row)
del loaders  # ends the worker processes

# %% [markdown]
# In turns the times add up: 1/both = 1/L + 1/S. With workers that prepare the next batch while the step runs, the
# slower of the two sets the pace: both = min(L, S). The step then waits whenever L < S, for the share 1 − L/S of the
# time. (In turns it always waits, for the share S/(L + S).)
#
# | what you see | what it means | what helps |
# |---|---|---|
# | both ≈ S, no waiting | the GPU is the bottleneck | nothing here: lessons 04 to 12 |
# | both ≈ L < S | the loader is the bottleneck | more cores (slow disk: workers), a cheaper pipeline, this lesson |
# | both below min(L, S) | the two disturb each other | see that the loader works ahead; leave a core to the step |
#
# > **Misconception.** "The loader is slow, so I set `num_workers` to 32." A worker is a process that wants a core. If
# > workers compute, those beyond the number of cores add memory and switching, and few images, if any. (Only if they
# > wait for a disk or the network do more workers than cores help.) What counts is the time that a core spends on one
# > image: that is why the costs of the parts come first.

# %%
usual = RECORDED["ways"]["dataloader"]["by_workers"]
print(f"recorded: DataLoader with PIL, {there}")
for workers, found_there in usual.items():
    print(f"  {workers} workers: {found_there['images_per_s']:6,.0f} images/s")

# %% [markdown]
# (0 workers: the training process loads by itself.) The second worker brings more than all further ones together.
#
# > **What changes on real GPUs.** The step runs beside Python, so stop the clock only after
# > `torch.cuda.synchronize()`. The copy to the GPU becomes a part of its own: `pin_memory=True` with
# > `non_blocking=True` lets it overlap, too. A quick test without any of this: train on one batch again and again. If
# > that is not faster, data is not the problem.

# %% [markdown]
# ## 3. A file made to be read: `.beton`
#
# JPEG files are made to be small, and 1.3 million of them in folders are made to be found by name. **FFCV** (Leclerc
# et al. 2023) puts a data set into one file that is made to be read at random, fast, by many threads. Let us open one
# before we use it.
#
# FFCV's writer takes anything with a length and an index, and one **field** for each part of a sample. This function
# writes the real ImageNet, too: `write_beton(ImageFolder("imagenet/train"), "train.beton", "jpg", workers=16, page=8 <<
# 20, max_resolution=256)`. The last limits the longer side of an image. Each image has to fit into a page. (The pages
# here are the smallest that FFCV allows, so that a small file has many. Its default is 8 MiB.)


# %%
def write_beton(source, path, mode="raw", workers=1, page=2 << 20, **options):
    """Write samples (RGB image, class number) to a .beton file with FFCV.

    `mode` is "raw", "jpg" or "proportion" (a mixture); `page` is in bytes, a power of 2 from 2 MiB.
    """
    image = RGBImageField(write_mode=mode, **options)
    writer = DatasetWriter(str(path), {"image": image, "label": IntField()}, page, workers)
    writer.from_indexed_dataset(source)


# %% [markdown]
# The first file is small: 24 images, cut to 192 by 192 pixels so that all are equally large, as plain pixels. One
# worker writes them, so they lie in the file in their order.


# %%
def middle(image, size=192):
    """The square in the middle of a PIL image."""
    left, top = (image.size[0] - size) // 2, (image.size[1] - size) // 2
    return image.crop((left, top, left + size, top + size))


folder = tempfile.TemporaryDirectory()
files = {name: Path(folder.name) / f"{name}.beton" for name in ("small", "hand", "again")}
small = [(middle(subset[i][0]), subset[i][1]) for i in range(0, count, count // 24)][:24]
if not without:
    write_beton(small, files["small"])
    print(f"{files['small'].stat().st_size:,} bytes for {24 * 3 * 192 * 192:,} bytes of pixels")

# %% [markdown]
# Every image has to be RGB. Real ImageNet has grey ones, which is why `ImageFolder` calls `convert("RGB")`. FFCV's
# writer would wait for ever if one of its processes met another kind; `course_utils.ffcv` makes that an error:

# %%
if not without:
    try:
        write_beton([*small[:17], (small[17][0].convert("L"), 0)], files["again"])
    except RuntimeError as error:
        print("RuntimeError:", str(error).splitlines()[0])
    assert not files["again"].exists()  # nothing half-written is left

# %% [markdown]
# ### What lies where
#
# A `.beton` file of version 2 has five parts, all numbers with the lowest byte first:
#
# 1. a **header** of 24 bytes;
# 2. a **field descriptor** of 1,041 bytes for each field: type, name, arguments;
# 3. the **metadata**: one record a sample, with the values of small fields and pointers to large ones;
# 4. the **pages**, all of one size, from a multiple of that size on. They hold what is large. No sample crosses from
#    one page to the next;
# 5. the **allocation table**: for each piece in the pages its sample, place and size.
#
# NumPy can say all this in structured types. An image's record is packed, 13 bytes. The label behind it is aligned to
# 8 bytes, as C would do.

# %%
HEADER = np.dtype(
    [("version", "<u2"), ("fields", "<u2"), ("page", "<u4"), ("samples", "<u8"), ("table", "<u8")]
)
FIELD = np.dtype([("type", "u1"), ("name", "S16"), ("arguments", "V1024")])
IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("pointer", "<u8")])
TYPES = {0: np.dtype("<f8"), 1: np.dtype("<i8"), 2: IMAGE}  # of fields: float, integer, image
PIECE = np.dtype([("sample", "<u8"), ("pointer", "<u8"), ("size", "<u8")])
JPEG, RAW = 0, 1  # modes of an image


def record_type(fields):
    """The type of a sample's record, from the field descriptors."""
    return np.dtype([(f["name"].decode(), TYPES[int(f["type"])]) for f in fields], align=True)


print("header", HEADER.itemsize, "bytes, descriptor", FIELD.itemsize, "image", IMAGE.itemsize)

# %% [markdown]
# With these types a reader is short. Nothing is read until it is asked for: `memmap` makes the file look like an
# array, and the system fetches the parts that are touched.


# %%
class Beton:
    """A .beton file with images and labels, opened with NumPy alone."""

    def __init__(self, path):
        self.bytes = np.memmap(path, np.uint8, "r")
        self.header = self.part(HEADER, 0)[0]
        self.fields = self.part(FIELD, HEADER.itemsize, self.header["fields"])
        self.record, self.start = record_type(self.fields), HEADER.itemsize + self.fields.nbytes
        self.samples = self.part(self.record, self.start, self.header["samples"])
        self.table = self.part(PIECE, self.header["table"], None)
        self.size = {piece["pointer"]: int(piece["size"]) for piece in self.table}

    def part(self, dtype, start, number=1):
        """Records of one type from byte `start` on; all up to the end for None."""
        end = None if number is None else int(start) + int(number) * dtype.itemsize
        return self.bytes[int(start) : end].view(dtype)

    def image(self, number):
        """Image of one sample: uint8 (height, width, 3)."""
        mode, width, height, pointer = self.samples["image"][number].tolist()
        data = self.bytes[pointer : pointer + self.size[pointer]]
        if mode == RAW:
            return data.reshape(height, width, 3)
        return np.asarray(decode(data.tobytes()))


# %% [markdown]
# The counterpart is a writer. It shows the two rules of the pages: a new one is opened when the next image does not
# fit, and each is written whole.


# %%
def up_to(position, page):
    """The next multiple of `page`."""
    return -(-position // page) * page


def as_bytes(image, mode):
    """A PIL image as a .beton file stores it: pixels, or a JPEG file of quality 90."""
    if mode == RAW:
        return np.asarray(image).tobytes()
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90)
    return stream.getvalue()


# %%
def write_by_hand(source, path, modes=(RAW,), page=2 << 20):
    """Write samples (RGB image, class number) with NumPy; images take turns in `modes`."""
    fields = np.array([(2, b"image", b""), (1, b"label", b"")], FIELD)
    samples, table = np.zeros(len(source), record_type(fields)), np.zeros(len(source), PIECE)
    heap = up_to(HEADER.itemsize + fields.nbytes + samples.nbytes, page)
    with open(path, "wb") as file:
        for i, (image, label) in enumerate(source):
            mode = modes[i % len(modes)]
            data = as_bytes(image, mode)
            assert len(data) <= page
            if heap % page + len(data) > page:  # does not fit: a new page
                heap = up_to(heap, page)
            samples[i] = (mode, *image.size, heap), label
            table[i] = i, heap, len(data)
            file.seek(heap)
            file.write(data)
            heap += len(data)
        end = up_to(heap, page)
        file.seek(end)
        file.write(table.tobytes())
        header = np.array((2, len(fields), page, len(source), end), HEADER)
        file.seek(0)
        file.write(header.tobytes() + fields.tobytes() + samples.tobytes())


# %% [markdown]
# Is it the same? Not only in what it says: byte for byte.

# %%
write_by_hand(small, files["hand"])
if not without:
    assert files["hand"].read_bytes() == files["small"].read_bytes()
    print(f"{files['hand'].stat().st_size:,} bytes, all equal to those of FFCV's writer")

# %% [markdown]
# Now open it.

# %%
file = Beton(files["hand" if without else "small"])
print({name: int(file.header[name]) for name in HEADER.names})
for f in file.fields:
    print(f"field {f['name'].decode()!r} of type {f['type']}")
print("sample 5: ", dict(zip(file.record.names, file.samples[5].tolist(), strict=True)))
print("its piece:", dict(zip(PIECE.names, file.table[5].tolist(), strict=True)))
image, label = small[5]
assert np.array_equal(file.image(5), np.asarray(image)) and file.samples[5]["label"] == label
Image.fromarray(file.image(5)).resize((96, 96)).quantize(128)

# %% [markdown]
# *The figure: the sixth image of the file, recovered from its bytes.* Mode 1 is raw: 192 · 192 · 3 = 110,592 bytes.
#
# All images and labels, compared with what FFCV returns:

# %%
if not without:
    pipelines = {
        "image": [rgb_image.SimpleRGBImageDecoder(), ToTensor()],
        "label": [IntDecoder(), ToTensor(), Squeeze(1)],
    }
    loader = Loader(str(files["small"]), batch_size=24, num_workers=1, pipelines=pipelines)
    (batch,) = loader
    assert np.array_equal(batch[0], [file.image(i) for i in range(24)])
    assert np.array_equal(batch[1], file.samples["label"])
    print(f"{tuple(batch[0].shape)} pixels and 24 labels equal to those of FFCV's Loader")

# %% [markdown]
# And drawn to scale:

# %%
segments = [("header", 0, HEADER.itemsize), ("fields", HEADER.itemsize, file.fields.nbytes)]
segments += [("metadata", file.start, file.samples.nbytes)]
segments += [("image", int(p["pointer"]), int(p["size"])) for p in file.table]
segments += [("allocation table", int(file.header["table"]), file.table.nbytes)]
plots.file_layout(segments, "measured: a .beton file of 24 raw images, pages of 2 MiB")

# %% [markdown]
# *The figure: the whole file as one row. The first page holds header, fields and metadata, a few thousand bytes, and
# is empty for the rest; below it that beginning is enlarged. Then follow two pages of images, 18 in the first and 6 in
# the second, with white space where the next image did not fit or there was none, and at the very end the allocation
# table.*
#
# What does this layout give? The metadata of all samples is small enough to keep in memory, so the place of any image
# is known without a search. Any image is one contiguous piece, without a directory to look it up in and a file to
# open. And images that share a page can be fetched together. The price is white space, and a file that cannot grow.
#
# > **Misconception.** "FFCV is fast because `.beton` is a fast binary format." It is a plain one, as you saw. What is
# > stored in it, the decoder, threads that share one memory and compiled code all have a part. The next sections take
# > these apart.

# %% [markdown]
# ## 4. Small or fast: what to store
#
# An image can be stored as plain pixels (**raw**), or as a JPEG file again, of quality 90 unless you say otherwise.
# FFCV also writes mixtures: `proportion` makes a random share of the images JPEG, `smart` those whose pixels take more
# than `smart_threshold` bytes (so its code says; its documentation says "times"; without a threshold it writes raw,
# and says nothing). Here are three files of the same images, each of its own size.
#
# **Predict** (question 3): how much larger is raw?

# %%
modes = {"raw": ("raw", (RAW,)), "mixed": ("proportion", (RAW, JPEG)), "JPEG": ("jpg", (JPEG,))}
np.random.seed(0)  # which images of the mixture become JPEG
for name, (mode, by_hand) in modes.items():
    files[name] = Path(folder.name) / f"{name}.beton"
    if without:
        write_by_hand(subset, files[name], by_hand)
    else:
        write_beton(subset, files[name], mode)

sizes = {"folder of JPEG files": sum(path.stat().st_size for path in paths)}
sizes |= {f".beton, {name}": files[name].stat().st_size for name in modes}
for name, size in sizes.items():
    print(f"{name:21}{size / 1e6:7.1f} MB{size / count / 1e3:8.1f} kB an image")
modes_of = np.bincount(Beton(files["mixed"]).samples["image"]["mode"])
print(f"in the mixed file {modes_of[JPEG]} images are JPEG and {modes_of[RAW]} raw")
if not without:
    write_beton(small, files["again"], "smart")
    stored = Beton(files["again"]).samples["image"]["mode"]
    print(f"'smart' without a threshold stored {np.sum(stored == JPEG)} of 24 images as JPEG")

# %% [markdown]
# Raw takes 8 to 10 times the bytes of JPEG, and no decoding. (The JPEG file is larger than the folder for its white
# space: a first page for the header, and a last one that is not full. In a large file that is nothing.) (The real
# ImageNet at 256 pixels: 22.0 GB as JPEG of quality 90, 169.8 GB raw, 7.7 times as much; *recorded*, FFCV's
# benchmarks.)
#
# Now the speed. An FFCV loader gets a **pipeline** for each field: a list of operations, the first of which decodes.
# This one does what PIL's did. `ToDevice` copies to the GPU, and without one within memory. FFCV changes the lists
# that it is given, so a function makes new ones for each loader.


# %%
def pipelines(size=224):
    """Operations for image and label: random resized crop, flip, and on to the device."""
    return {
        "image": [
            rgb_image.RandomResizedCropRGBImageDecoder((size, size)),
            transforms.RandomHorizontalFlip(),
            ToTensor(),
            ToDevice(device()),
            ToTorchImage(),
        ],
        "label": [IntDecoder(), ToTensor(), Squeeze(1), ToDevice(device())],
    }


def ffcv_loader(path, threads=cores, size=64, **options):
    """An FFCV loader in random order, with batches of `size`."""
    options = {"order": OrderOption.RANDOM, "drop_last": False, "pipelines": pipelines()} | options
    return Loader(str(path), batch_size=size, num_workers=threads, **options)


# %% [markdown]
# The rates below are of later epochs. **Predict** (question 7): on its own, FFCV needs many seconds for its first
# batch, and hardly any for the second. Why? (Section 8 answers. The line of first epochs shows little of it where
# the lesson has run before.)


# %%
def speeds():
    """Images/s of each file, of the loader alone and with the step; the share the step waits."""
    rates, first = {}, {}
    for name in modes:
        start = time.perf_counter()
        loader = ffcv_loader(files[name])
        epoch(loader)
        first[name] = time.perf_counter() - start
        rates[name] = best(loader, epochs=3)[0], *best(loader, step)
    return rates, first


first_epoch = {}
if without:
    rates = recorded("dataloader", "ffcv_raw", "ffcv_mixed", "ffcv_jpeg")
    loaded = {n: (r, min(r, alone), max(0, 1 - r / alone)) for n, r in rates.items()}  # section 2
    origin, more = "recorded", "modelled"
else:
    fast, first_epoch = speeds()
    loaded = {f"DataLoader, PIL, {name}": row for name, row in found.items()}
    loaded |= {f"FFCV, {name}, {cores} threads": row for name, row in fast.items()}
    origin = more = "measured"

# %% tags=["nbval-ignore-output"]
print(f"{origin} alone, {more} with step   alone  with step  step waits")
for name, (rate, both, waits) in loaded.items():
    print(f"{name:29}{rate:7,.0f}{both:11,.0f}{waits:12.0%}")
print("first epochs, s:", ", ".join(f"{n} {t:.1f}" for n, t in first_epoch.items()) or "not known")
alone_rates = {name: rate for name, (rate, *_) in loaded.items()}
usual = [name for name in loaded if not name.startswith("FFCV")][-1]
fast = [name for name in loaded if name.startswith("FFCV")]
title = f"{origin}: loaders alone, images/s"
plots.loader_bars(alone_rates, title, usual, strong=fast, unit="images/s")

# %% [markdown]
# *The figure: a bar for each loader. On a quiet machine FFCV with raw images is four to five times as fast as the usual
# loader with as many workers; JPEG is slower than raw, because it still decodes, and faster than the usual loader; the
# mixture is in between. On a busy machine all this may look different.*
#
# And with the step, as in training:

# %%
shares = {
    name: {"step": count / both * (1 - waits), "wait": count / both * waits}
    for name, (_, both, waits) in loaded.items()
}
plots.time_shares(shares, f"{more}: what an epoch of training spends its time on")

# %% [markdown]
# *The figure: for each loader one bar of the time of an epoch, divided into the step and waiting for data. With the
# usual loader most of it is waiting, on a quiet machine with FFCV and raw images the least.*
#
# That is the answer to the second half of the title. Whether it helps *you* depends on the first half: a step that did
# not wait before gets no faster.
#
# Why then would anyone store JPEG? Because a file that is not in memory comes through a disk or a network, and that
# counts bytes. *Recorded* (FFCV's benchmarks, images/s on a p3dn.24xlarge instance, at 256 pixels raw, at 512 raw and
# as JPEG of quality 90):
#
# | from | 256 px, raw | 512 px, raw | 512 px, JPEG |
# |---|---|---|---|
# | memory | 172,801 | | 31,278 |
# | network disk (EBS) | 6,870 | 1,956 | 16,631 |
#
# From memory the smaller raw images win by far. From a slow disk raw images of 512 pixels are eight times slower than
# the same images as JPEG. How many bytes a second did that disk give? The raw file of 256 pixels has 169.8 GB for
# 1,281,167 images:

# %%
disk = 6_870 * 169.8e9 / 1_281_167  # bytes/s
print(f"256 px raw from EBS: {disk / 1e9:.2f} GB/s")
print(f"it could bring {disk / (22.0e9 / 1_281_167):,.0f} images/s as 256 px JPEG")

# %% [markdown]
# So one formula chooses the mode, with the rate C at which the cores can decode and augment, the disk's bandwidth B,
# and b bytes an image. It is *modelled* here and in the exercises:
#
# $$\text{images/s} = \min(C,\ B / b) \text{ from the disk},\qquad C \text{ from memory}$$
#
# ## 5. In which order?
#
# Training wants a new random order in each epoch. A disk wants its pages one after the other. An **order** is a list
# of sample numbers, and a sample's pointer says in which page its image lies. So how many pages an order touches, and
# when, can be counted without any loader. FFCV has three:
#
# - **sequential**: as in the file;
# - **random**: any sample may come next;
# - **quasi-random**: choose some pages, take samples at random from these, and when a page is used up choose the next.
#   FFCV takes twice as many pages as a batch has samples.


# %%
def page_of_samples(path):
    """The page of each sample's image."""
    file = Beton(path)
    return (file.samples["image"]["pointer"] // file.header["page"]).astype(int)


def quasi_random(page_of, window, rng):
    """Samples at random from `window` pages at a time; a page is used up before the next opens."""
    left = {page: rng.permutation(np.flatnonzero(page_of == page)).tolist() for page in {*page_of}}
    closed, opened, order = rng.permutation([*left]).tolist(), [], []
    while closed or opened:
        while closed and len(opened) < window:
            opened.append(closed.pop())
        page = opened[rng.integers(len(opened))]
        order.append(left[page].pop())
        if not left[page]:
            opened.remove(page)
    return np.array(order)


# %%
batch_size, rng = 8, np.random.default_rng(0)
page_of = page_of_samples(files["raw"])
orders = {
    "sequential": np.arange(count),
    "quasi-random": quasi_random(page_of, 2 * batch_size, rng),
    "random": rng.permutation(count),
}
first_page = page_of.min()
accesses = {n: [*enumerate((page_of[order] - first_page).tolist())] for n, order in orders.items()}
plots.page_accesses(accesses, "modelled: the page of each sample of an epoch, in three orders")

# %% [markdown]
# *The figure: three panels, samples of one epoch from left to right, page upwards. Sequential is a diagonal.
# Quasi-random is a set of horizontal dashes: at any time 16 pages are open, each for a while. Random fills the whole
# panel.*
#
# Training needs batches that mix classes. A file written from a folder is sorted by class. How many classes does a
# batch of 8 have?

# %%
labels = Beton(files["raw"]).samples["label"]
for name, order in orders.items():
    assert sorted(order.tolist()) == list(range(count))  # each order is one epoch
    starts = range(0, count, batch_size)
    distinct = [len({*labels[order[i : i + batch_size]].tolist()}) for i in starts]
    print(f"{name:13}{np.mean(distinct):5.1f} classes in a batch of {batch_size}")

# %% [markdown]
# Quasi-random mixes classes nearly as well as random does, as long as the window holds many classes. Samples of one
# page still meet more often than others. Where that matters, write the file in random order:
# `from_indexed_dataset(source, shuffle_indices=True)`.
#
# ### How many pages must be in memory?
#
# Let each page be read once in an epoch, three batches before its first sample is needed, and stay until its last one
# is done. **Predict** (question 4) the largest number of pages that are in memory at the same time, for the three
# orders.


# %%
def pages_by_batch(order, page_of, size):
    """The set of pages that each batch needs."""
    return [{*page_of[order[i : i + size]].tolist()} for i in range(0, len(order), size)]


def pages_held(batches, ahead=3):
    """Most pages in memory at once, if each is read once, `ahead` batches before its first use."""
    first, last = {}, {}
    for number, pages in enumerate(batches):
        for page in pages:
            first.setdefault(page, number)
            last[page] = number
    return max(
        sum(first[page] - ahead <= number <= last[page] for page in first)
        for number in range(len(batches))
    )


# %%
print(f"raw file: {len({*page_of})} pages of 2 MiB with {count} images")
for size in (8, 64):
    wide = quasi_random(page_of, 2 * size, np.random.default_rng(1))
    for name, order in (orders | {"quasi-random": wide}).items():
        held = pages_held(pages_by_batch(order, page_of, size))
        print(f"batch {size:2}, {name:13}{held:4} pages, {held * 2 * 2**20 / 1e6:4.0f} MB")

# %% [markdown]
# Sequential needs the pages of four batches. Random needs all of the file: some page keeps one sample for the very
# end. Quasi-random needs its window and a few more. So sequential and quasi-random depend on the batch, not on the
# size of the file. With batches of 64 the window has 128 pages, more than this small file. For the real ImageNet, with
# pages of 8 MiB, FFCV's default, a window of 128 is 1.1 GB of 170.
#
# ## 6. Where do the pages live?
#
# FFCV has two ways to keep pages:
#
# - **page cache** (`os_cache=True`, the default). The file is mapped into memory, as our `Beton` does it. The system
#   reads what is touched, keeps it as long as there is room, and drops it when memory is needed for something else.
# - **process cache** (`os_cache=False`). FFCV reads whole pages by itself, into memory of its own, three batches
#   ahead, and forgets each page after its last use in the epoch. It knows the order, so it knows what is needed next,
#   which the system cannot know.
#
# First the page cache, in a process of its own. The file is dropped from the cache, then read twice in random order.
# The system counts the bytes that come from the disk, and the memory of the process: its *own*, and that of *files*
# which it has mapped. (Linux tells all this. If the temporary folder lies in memory, nothing comes from a disk at
# all.)


# %%
LINUX = Path("/proc/self/status").exists()


def linux_counts(path, *names):
    """Numbers by name from a file of Linux's process information, zeros where there is none."""
    lines = [line.split() for line in Path(path).read_text().splitlines()] if LINUX else []
    found = {line[0].rstrip(":"): line[1] for line in lines if len(line) > 1}
    return np.array([int(found.get(name, 0)) for name in names])


def memory():
    """Bytes of this process in memory: its own, and those of files that it has mapped."""
    return 1024 * linux_counts("/proc/self/status", "RssAnon", "RssFile")


# %%
def drop(path):
    """Ask the system to forget what it has cached of a file."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def through_page_cache(path, orders):
    """Read epochs of a mapped file: bytes from the disk in each, and memory added by all."""
    drop(path)
    before, from_disk = memory(), []
    data = Beton(path)
    for order in orders:
        start = linux_counts("/proc/self/io", "read_bytes")[0]
        for number in order:
            data.image(number).max()
        from_disk.append(linux_counts("/proc/self/io", "read_bytes")[0] - start)
    return from_disk, memory() - before


# %% tags=["nbval-ignore-output"]
gc.collect()  # loaders that still hold the file
order = orders["random"]
from_disk, added = launch(through_page_cache, files["raw"], [order, order], world_size=1)[0]
print(f"the file has {sizes['.beton, raw'] / 1e6:.0f} MB")
for number, size in enumerate(from_disk, 1) if LINUX else ():
    print(f"page cache, epoch {number}: {size / 1e6:4.0f} MB from the disk")
if LINUX:
    print(f"page cache: {added[0] / 1e6:4.0f} MB own memory, {added[1] / 1e6:4.0f} MB of files")

# %% [markdown]
# The first epoch reads the file from the disk, the second finds it in memory. None of it is memory of the process: the
# system can take it back at any moment without asking. (The memory of files is a little less than the file: nobody
# touches the white space.)
#
# Now FFCV's process cache, with the three orders. It runs without decoding and without compiling anything: these are
# the parts of a Loader that fetch pages. (`launch` keeps its processes, so they import FFCV once, here.) **Predict**
# from section 5 how much own memory each order needs.


# %%
def through_process_cache(path, order, size):
    """Read an epoch through FFCV's process cache: pages that it has room for, and memory added."""
    gc.collect()  # what an earlier call left
    manager = ProcessCacheManager(Reader(str(path)))
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    before, context = memory(), manager.schedule_epoch(batches)
    with context:
        for number in range(len(batches)):
            context.start_batch(number)  # waits until the pages of this batch are there
        return len(context.memory), memory() - before


# %%
if not without:
    launch(apply_fixes, world_size=world_size)
held = {n: pages_held(pages_by_batch(order, page_of, 8)) for n, order in orders.items()}
own = {}
for name, order in orders.items() if not without else ():
    slots, added = launch(through_process_cache, files["raw"], order, 8, world_size=1)[0]
    assert slots == held[name]
    own[name] = added[0]
who = "counted" if without else "counted, and made room for by FFCV"
print(f"pages in memory at the same time, {who}: {held}")

# %% tags=["nbval-ignore-output"]
for name, pages in held.items():
    measured = f"measured {own[name] / 1e6:4.0f} MB own memory" if own else ""
    print(f"process cache, {name:13}{pages * 2 * 2**20 / 1e6:4.0f} MB of pages;", measured)

# %% [markdown]
# Measured is what was counted. With the random order the process cache holds the whole file, and as memory that nobody
# else can use: the worst of both. It is made for quasi-random. Here is that pair in a Loader, with FFCV's own
# quasi-random order, which keeps the rule as ours does:

# %%
if not without:
    pair = {"os_cache": False, "order": OrderOption.QUASI_RANDOM, "seed": 0}
    loader = ffcv_loader(files["raw"], size=8, **pair)
    theirs = loader.next_traversal_order()
    assert sorted(theirs.tolist()) == list(range(count))
    got = torch.cat([batch_labels.cpu().clone() for _, batch_labels in loader])
    assert np.array_equal(np.bincount(got), np.bincount(labels))  # the whole set, shuffled
    need = pages_held(pages_by_batch(theirs, page_of, 8))
    print(f"FFCV's quasi-random order holds {need} pages at most, ours {held['quasi-random']}")

# %% [markdown]
# ## 7. A set that does not fit in memory
#
# Give the page cache less memory than the file has. When it is full, the part that was used least recently goes. This
# is modelled in ten lines: an epoch has been read before, then how many pages of the next come from the disk?
# **Predict** (question 5) for half of the memory.


# %%
def share_from_memory(epochs, page_of, room):
    """Share of the last epoch's samples whose page is in memory, with room for `room` pages."""
    cache = {}  # least recently used first
    for order in epochs:
        hits = 0
        for page in page_of[order].tolist():
            hits += page in cache
            cache.pop(page, None)
            cache[page] = None
            if len(cache) > room:
                del cache[next(iter(cache))]
    return hits / len(order)


pages = len({*page_of})
another = {n: rng.permutation(count) if n == "random" else order for n, order in orders.items()}
another["quasi-random"] = quasi_random(page_of, 16, rng)
rooms = (0.2, 0.5, 0.8, 1)  # shares of the file
print("modelled: a cache of whole pages, which drops what was used least recently")
print("memory, in shares of the file     " + "".join(f"{room:8.0%}" for room in rooms))
for name, order in orders.items():
    row = [share_from_memory([order, another[name]], page_of, round(r * pages)) for r in rooms]
    print(f"samples from memory, {name:13}" + "".join(f"{share:8.0%}" for share in row))
    missed = [round(count * (1 - share)) for share in row]
    print(f"pages from the disk, {name:13}" + "".join(f"{pages_read:8}" for pages_read in missed))

# %% [markdown]
# Random gets what is there: half of the memory, half of the samples. With 20 % of the memory it needs a page that is
# not there for four samples of five. Were whole pages of 2 MiB fetched for them, that would be 2 MiB for an image of a
# quarter of a MiB. (The system's own pages have 4 KiB, and it reads some ahead, so the page cache wastes less. FFCV's
# process cache never reads a page twice: it wants room for all, or fails.)
#
# The other two read each page about once, and find the rest of its samples in memory. Sequential gains nothing from
# more memory until everything fits: the page that it needs next is always the one dropped longest ago. Quasi-random
# opens pages in a new order, so with more memory some are still there.
#
# What does that do to the speed? *Modelled*, as if the disk of section 4 fed the eight A100s of the beginning: raw
# images of 256 pixels in random order, and a part of the file in memory. Each image that is not there takes its own
# bytes from the disk.

# %%
bytes_each = 169.8e9 / 1_281_167
for share in (0, 0.5, 0.7, 0.9, 1):
    rate = min(172_801, disk / bytes_each / (1 - share) if share < 1 else np.inf)
    print(f"{share:4.0%} in memory ({share * 169.8:5.1f} GB): {rate:9,.0f} images/s")
needed = 16 * 1_281_167 / (14.9 * 60)
print(f"the eight A100s want {needed:,.0f}: {1 - disk / bytes_each / needed:.0%} in memory")

# %% [markdown]
# A cache that holds nearly everything is far from one that holds everything. As JPEG that data set has 22 GB, which
# fits in the memory of most servers, and could even come from that disk, if the cores decode that fast. So the order
# of questions is: does it fit raw? Does it fit as JPEG? If neither, take the process cache with the quasi-random order
# (under DDP with the care of section 9).
#
# Now for real, with a small cap: a process that may add 100 MB to its own memory, and a file of 229 MB. FFCV's process
# cache asks for all the memory it will need when the epoch starts.


# %%
def with_cap(path, order, size, cap):
    """Read an epoch through the process cache in a process that may add `cap` bytes of memory."""
    import resource
    import threading

    threading.stack_size(2**18)  # twelve threads read pages; their stacks count too
    used = 1024 * linux_counts("/proc/self/status", "VmData")[0]
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(used) + cap, before[1]))
    try:
        slots, _ = through_process_cache(path, order, size)
        return f"read, through room for {slots} pages"
    except MemoryError:
        return "MemoryError: not enough memory for its pages"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        threading.stack_size(0)


# %%
for name, order in orders.items():
    if without:
        fits = held[name] * 2 * 2**20 < 100e6
        print(f"modelled: {name:13}", "fits" if fits else "does not fit")
    else:
        seen = launch(with_cap, files["raw"], order, 8, 100_000_000, world_size=1)[0]
        print(f"cap of 100 MB, {name:13}{seen}")
        assert seen.startswith("read") == (held[name] * 2 * 2**20 < 100e6)

# %% [markdown]
# > **What changes on real machines.** There the cap is the machine, or the container's or the job's limit, and the
# > page cache counts towards it. It gives way without an error, and only the epoch time tells. Watch the bytes that
# > are read from the disk in the *second* epoch (`iostat`, or `read_bytes` as above). They should be none. And several
# > jobs on one machine share its page cache: one job's data can push out the other's.

# %% [markdown]
# ## 8. Compiled, and in threads
#
# The usual build of Python runs one thread at a time, whatever the number of cores: its lock sees to that. Hence worker
# *processes* in the usual loader, each with a Python of its own, whose batches must be handed to the training process.
# FFCV's workers are threads. **Predict** (question 8) how many cores they keep busy.


# %%
def cores_busy(loader):
    """Seconds of all cores in this process for each second of an epoch."""
    before, start = time.process_time(), time.perf_counter()
    epoch(loader)
    return (time.process_time() - before) / (time.perf_counter() - start)


def children():
    """This process's child processes, by number."""
    return {child.pid: child for child in psutil.Process().children()}


if not without:
    loader, before = ffcv_loader(files["raw"]), children()
    epoch(loader)  # compiles
    busy = max(cores_busy(loader) for _ in range(3))
    assert children().keys() <= before.keys()
    print("FFCV starts no process: its workers are threads")

# %% tags=["nbval-ignore-output"]
if not without:
    print(f"FFCV, {cores} threads: {busy:.1f} cores busy in this process")
usual, before = pil_loader(cores), children()
print(f"DataLoader, {cores} workers: {cores_busy(usual):.1f}, the others in its processes")
new = [child for pid, child in children().items() if pid not in before]
if LINUX:  # elsewhere only an administrator may ask
    own_memory = [f"{child.memory_full_info().uss / 1e6:.0f} MB" for child in new]
    print("each worker has memory of its own:", *own_memory)
del usual

# %% [markdown]
# FFCV compiles its pipeline to machine code with **Numba**, a just-in-time compiler (**JIT**) for Python functions
# that work on arrays and numbers. Such code does not need the lock, and FFCV tells Numba to let go of it
# (`nogil=True`). So its threads run at the same time, and write straight into the batch of the training process.
#
# A worker process has its own copy of whatever Python touches. That grows with the number of workers, and with the
# lists of file names that a data set holds.
#
# ### Where does the factor come from?
#
# FFCV changes four things at once: the decoder, what is stored, threads for processes, and compiled code. Take them
# apart, in time of one core for each image, which depends less on how busy the machine is than images/s do:
#
# - the usual pipeline, with PIL;
# - the same with OpenCV, with which FFCV resizes, too (by plain means over areas, which PIL's pipeline weighs by a
#   triangle);
# - pixels from the raw file, read with our `Beton`, and resized with OpenCV;
# - FFCV with one thread, JPEG and raw;
# - FFCV with raw images and its loop not compiled, run as plain Python (what draws the crop stays compiled).


# %%
def core_time(loader, epochs=2):
    """Milliseconds of one core for each image, in the best of some epochs."""
    times = []
    for _ in range(epochs):
        start = time.process_time()
        seen, *_ = epoch(loader)
        times.append(1e3 * (time.process_time() - start) / seen)
    return min(times)


def cv2_augment(pixels, size=224):
    """As `augment`, of an array, with OpenCV."""
    left, top, right, bottom = crop_box(pixels.shape[1], pixels.shape[0])
    out = cv2.resize(pixels[top:bottom, left:right], (size, size), interpolation=cv2.INTER_AREA)
    return torch.from_numpy(np.ascontiguousarray(out[:, ::-1] if random.random() < 0.5 else out))


def cv2_decode(path):
    return cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR_RGB)


# %%
class WithCV2(Dataset):
    """The subset, from JPEG files or from a raw .beton file."""

    def __init__(self, beton=None):
        self.beton = Beton(beton) if beton else None

    def __len__(self):
        return count

    def __getitem__(self, i):
        pixels = self.beton.image(i) if self.beton else cv2_decode(paths[i])
        return cv2_augment(pixels), train.labels[spread[i]]


def in_turns(data):
    return DataLoader(data, 64, shuffle=True, collate_fn=channels_first)


# %%
ladder = {}
if without:
    print("recorded, with one worker")
    keys = ["dataloader", "dataloader_cv2", "dataloader_raw", "ffcv_jpeg", "ffcv_raw"]
    for key in [*keys, "ffcv_raw_python"]:
        way = RECORDED["ways"][key]
        ladder[way["name"]] = way["by_workers"]["1"]["cpu_ms_per_image"]
else:
    import cv2

    cv2.setNumThreads(1)
    ladder["PIL, JPEG files"] = core_time(pil_loader(0))
    ladder["OpenCV, JPEG files"] = core_time(in_turns(WithCV2()))
    ladder["OpenCV, raw .beton by NumPy"] = core_time(in_turns(WithCV2(files["raw"])))
    for name in ("JPEG", "raw"):
        ladder[f"FFCV, {name} .beton"] = core_time(ffcv_loader(files[name], threads=1))
    Compiler.set_enabled(False)
    ladder["FFCV, raw .beton, not compiled"] = core_time(ffcv_loader(files["raw"], threads=1))
    Compiler.set_enabled(True)

# %% tags=["nbval-ignore-output"]
for name, milliseconds in ladder.items():
    print(f"{name:31}{milliseconds:6.2f} ms of a core, {1e3 / milliseconds:6,.0f} images/s")

# %% [markdown]
# Read it from above. OpenCV's decoding and resizing save a good part. (Where photographs are several times as wide as
# the crop, there is a cheaper way: PIL's `draft` makes the decoder give half, a quarter or an eighth of the size.) Not
# to decode at all saves about half of what is left. FFCV on one core takes about as long as the same work by our NumPy
# reader; which of the two is ahead changes from run to run. Most of both is OpenCV's C++ code, so to compile the loop
# around it gains little on one core, as the line "not compiled" shows.
#
# The same with workers, step by step, each way in a process of its own and with its best number of workers:

# %%
chain = ["dataloader", "dataloader_cv2", "dataloader_raw", "threads_raw", "ffcv_raw"]
recorded_bars(chain, strong=["FFCV"])

# %% [markdown]
# *The figure: five bars, from the usual loader with PIL to one with OpenCV, then without decoding, then with threads
# in the place of processes, then FFCV.*
#
# How sure is each step? Compare neighbours round by round:

# %%
product = 1
reasons = ["decoder and resizing", "storage: pixels", "threads", "FFCV's compiled loop"]
for reason, base, way in zip(reasons, chain[:-1], chain[1:], strict=True):
    times, least, most = gain(way, base)
    product *= times
    print(f"{reason:21} x {times:.2f}, {least:.2f} to {most:.2f} in single rounds")
print(f"{'product of the four':21} x {product:.2f}")
for way in ("ffcv_raw", "ffcv_jpeg"):
    times, least, most = gain(way)
    name = f"{RECORDED['ways'][way]['name']}, at once"
    print(f"{name:21} x {times:.2f}, {least:.2f} to {most:.2f}")

# %% [markdown]
# What is stored is the largest step, the decoder the second; threads and the compiled loop gain a fifth each. All four
# are above 1 in every round, and their product is what FFCV gains at once. With JPEG images the largest step falls
# away: FFCV still has to decode, with about the library that OpenCV has, and gains less than twice.
#
# Threads for processes means that nobody hands batches from process to process. OpenCV gives Python's lock back while
# it works, so plain threads can do this part without compiling anything. Compiled code does not need the lock,
# whatever it does with arrays and numbers.
#
# Compiling is not what makes *its* operations fast. It makes *yours* fast.
#
# ### An operation of your own
#
# An **operation** declares what comes out of it, and the memory it wants for that, and returns the function that will
# be compiled. This one makes a share of the images grey. It loops over pixels, which no one would do in Python. (77,
# 150 and 29 are 256 times the weights of red, green and blue in brightness, by ITU-R BT.601.)


# %%
class RandomGray(Operation):
    """Make a share of the images grey: uint8 (b, h, w, 3) to the same."""

    def __init__(self, share):
        self.share = share

    def declare_state_and_memory(self, previous):  # memory of one image; FFCV adds the batch
        return replace(previous, jit_mode=True), AllocationQuery(previous.shape, previous.dtype)

    def generate_code(self):
        share, each = self.share, range if without else Compiler.get_iterator()

        def to_gray(images, out):
            for i in each(len(images)):
                gray = np.random.rand() < share
                for y in range(images.shape[1]):
                    for x in range(images.shape[2]):
                        red, green, blue = images[i, y, x]
                        light = (77 * int(red) + 150 * int(green) + 29 * int(blue)) >> 8
                        for c in range(3):
                            out[i, y, x, c] = light if gray else images[i, y, x, c]
            return out[: len(images)]

        to_gray.is_parallel = True  # images on all threads
        return to_gray


# %% [markdown]
# The function is Python, so it can be tried without FFCV, on one image. Then in a pipeline: once without it and once
# with it for all images. `CenterCropRGBImageDecoder` has no random part.

# %%
pixels = np.stack([np.asarray(middle(subset[0][0], 64))])
start = time.perf_counter()
python = RandomGray(1.0).generate_code()(pixels, np.empty_like(pixels))
python_time = (time.perf_counter() - start) / (64 * 64)
expected = (pixels.astype(int) @ [77, 150, 29]) >> 8
assert np.array_equal(python[..., 0], expected) and np.array_equal(python[..., 2], expected)


# %%
def centre(*operations):
    """Pipelines without chance: the middle of each image, then some operations."""
    decode_image = rgb_image.CenterCropRGBImageDecoder((224, 224), 0.9)
    return {"image": [decode_image, *operations, ToTensor()], "label": None}


if not without:
    in_order = {"order": OrderOption.SEQUENTIAL}
    plain = ffcv_loader(files["raw"], pipelines=centre(), **in_order)
    gray = ffcv_loader(files["raw"], pipelines=centre(RandomGray(1.0)), **in_order)
    for (before,), (after,) in zip(plain, gray, strict=True):
        light = (before.int() @ torch.tensor([77, 150, 29], dtype=torch.int32)) >> 8
        assert torch.equal(after, light.byte()[..., None].expand_as(after))
    print(f"{count} images grey, equal to NumPy's")

# %% tags=["nbval-ignore-output"]
print(f"Python: {1e9 * python_time:5.0f} ns a pixel")
if not without:
    fresh = ffcv_loader(files["small"], pipelines=centre(RandomGray(0.5)))
    for number in (1, 2):
        start = time.perf_counter()
        epoch(fresh)
        print(f"epoch {number} of 24 images: {time.perf_counter() - start:.2f} s")

    compiled = Compiler.compile(RandomGray(1.0).generate_code())
    many = np.random.default_rng(0).integers(0, 256, (64, 224, 224, 3), np.uint8)
    out = np.empty_like(many)
    compiled(many, out)  # compiles
    start = time.process_time()  # of all threads
    compiled(many, out)
    each = (time.process_time() - start) / (64 * 224**2)
    an_image = 1e3 * each * 224**2
    print(f"compiled: {1e9 * each:5.1f} ns of a core a pixel, {an_image:.2f} ms an image,")
    print(f"          {python_time / each:,.0f} times as fast")

# %% [markdown]
# The first epoch compiles this one operation, for a second or so, and the second shows what it costs from then on.
#
# The decoder and all other operations of FFCV are compiled once, too (question 7). On its own FFCV does it in each
# process and for each loader, at its first batch. `course_utils.ffcv` keeps the compiled code in files, so the next
# loader and the next process find it there:

# %%
times = RECORDED["compile"]
print("recorded once: seconds from the Loader to its first batch, two threads, raw file")
print(f"  FFCV on its own, in every process  {times['without_fixes_s']:5.1f}")
print(f"  the first time on a machine        {times['cold_s']:5.1f}")
print(f"  in the next process                {times['next_process_s']:5.1f}")

# %% [markdown]
# To keep the compiled code costs a second or two the first time, and saves nearly all of the wait every later time. On
# its own, FFCV on eight ranks would compile the same code eight times at once. Remember it when the first step of a job
# seems to hang.
#
# ## 9. Two ranks, one file
#
# Under DDP (lesson 04) each rank trains on its own samples. With `distributed=True` a loader asks `torch.distributed`
# for its rank and takes its share of the order, by PyTorch's `DistributedSampler`: all ranks make the same shuffle,
# from the same seed and the number of the epoch, and rank r takes every n-th sample from r on.
#
# To see which samples a rank gets, its loader tells their numbers. An operation that sets `with_indices` is given
# them.


# %%
class WhichSample(Operation):
    """The number that each sample has in the file, whatever the field: int64 (b, 1)."""

    def declare_state_and_memory(self, previous):
        whole = np.dtype("<i8")
        return replace(previous, shape=(1,), dtype=whole), AllocationQuery((1,), whole)

    def generate_code(self):
        def which(_, out, indices):
            out[: len(indices), 0] = indices
            return out[: len(indices)]

        which.with_indices = True
        return which


def numbered(size):
    """Image, label, and the sample's number, which is made in the place of a second label."""
    index = [IntDecoder(), WhichSample(), ToTensor(), Squeeze(1)]
    return pipelines(size) | {"index": PipelineSpec("label", transforms=index)}


# %% [markdown]
# Where FFCV is not there, a loader of ten lines stands in. It reads the same file with `Beton`, in the order of the
# same sampler.


# %%
class ByHand:
    """A loader of (image, label, number) from a raw file, without FFCV and without cropping."""

    def __init__(self, path, size, seed):
        self.file, self.size, self.next_epoch = Beton(path), size, 0
        self.sampler = DistributedSampler(range(len(self.file.samples)), seed=seed)

    def __iter__(self):
        self.sampler.set_epoch(self.next_epoch)
        self.next_epoch += 1
        for batch in torch.tensor([*self.sampler]).split(64):
            pixels = [self.file.image(i).copy()[: self.size, : self.size] for i in batch.tolist()]
            images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
            labels = torch.from_numpy(self.file.samples["label"][batch.numpy()])
            yield images.to(device()), labels.to(device()), batch


def rank_loader(path, seed, size=64):
    """This rank's loader, one thread."""
    if without:
        return ByHand(path, size, seed)
    apply_fixes()
    return ffcv_loader(path, 1, distributed=True, seed=seed, pipelines=numbered(size))


# %%
def in_memory_of(path):
    """Bytes of a mapped file that this process has, and its fair share of them."""
    smaps, rss, pss, inside = Path("/proc/self/smaps"), 0, 0, False
    for line in smaps.read_text().splitlines() if smaps.exists() else ():
        name, *values = line.split()
        if not name.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and name == "Rss:":
            rss += 1024 * int(values[0])
        elif inside and name == "Pss:":
            pss += 1024 * int(values[0])
    return rss, pss


# %%
def train_rank(path, epochs, seed):
    """Train on this rank's share; samples of each epoch, sum of the weights, the file in memory."""
    torch.manual_seed(0)
    loader, model = (
        rank_loader(path, seed),
        nn.parallel.DistributedDataParallel(network().to(device())),
    )
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for _ in range(epochs):
        seen.append([])
        for images, labels, index in loader:
            optimizer.zero_grad()
            loss_of(model, images, labels).backward()
            optimizer.step()
            seen[-1] += index.tolist()
    dist.barrier()  # all ranks have read the file and still hold it
    found = in_memory_of(path)
    dist.barrier()
    return seen, sum(p.double().sum() for p in model.parameters()).item(), found


# %%
seed = 7
shared = Path(folder.name) / "shared.beton"  # a copy, which no loader of this notebook has mapped
shared.write_bytes(files["raw"].read_bytes())
by_rank = launch(train_rank, shared, 3, seed, world_size=world_size, timeout=120)
epochs = list(zip(*(seen for seen, *_ in by_rank), strict=True))
for number, shares in enumerate(epochs):
    every = [sample for share in shares for sample in share]
    shuffle = torch.Generator().manual_seed(seed + number)
    whole = torch.randperm(count, generator=shuffle).tolist()
    whole += whole[: len(every) - count]  # filled up, so that all ranks have the same number
    assert {*every} == {*range(count)} and len(every) == -(-count // world_size) * world_size
    assert all(share == whole[rank::world_size] for rank, share in enumerate(shares))
    print(f"epoch {number}: {[len(share) for share in shares]} samples by rank,", end=" ")
    print(f"{len({*every})} different, {len(every) - count} twice; rank 0 starts {shares[0][:4]}")
assert epochs[0] != epochs[1]
assert len({weights for _, weights, _ in by_rank}) == 1  # the replicas are equal, as DDP promises

# %% [markdown]
# - Disjoint: no sample twice, but for those that fill up where the ranks do not divide the samples (lesson 04).
# - Complete: the union is the file.
# - Agreed: put together, the shares are one permutation that one process would have used. `seed` is the same on all
#   ranks, and 0 if none is given.
# - New in each epoch: an FFCV loader counts its epochs itself, where `DistributedSampler` wants `set_epoch`.
#
# The last one has a trap. A run that is resumed from a checkpoint starts to count at 0 and repeats the shuffles it
# had. Say `loader.next_epoch = epoch` after loading the checkpoint:

# %%
if not without:
    going, resumed = (ffcv_loader(files["small"], seed=seed, pipelines=centre()) for _ in range(2))
    epoch(going)
    assert not np.array_equal(resumed.next_traversal_order(), going.next_traversal_order())
    resumed.next_epoch = 1
    assert np.array_equal(resumed.next_traversal_order(), going.next_traversal_order())
    print("a new loader with next_epoch = 1 goes on with the order of epoch 1")

# %% [markdown]
# This resumes at the beginning of an epoch. To resume in the middle of one, the usual loader can be replaced by
# torchdata's [`StatefulDataLoader`](https://github.com/meta-pytorch/data), which saves its place with the checkpoint.
#
# **Predict** (question 9): what if each rank seeds its own shuffle, as one does for augmentations?


# %%
def share_of(rank, seed, epoch=0):
    sampler = DistributedSampler(range(count), world_size, rank, seed=seed)
    sampler.set_epoch(epoch)
    return [*sampler]


for name, seeds in (("the same seed", [7] * world_size), ("seeds by rank", range(world_size))):
    every = {sample for rank in range(world_size) for sample in share_of(rank, seeds[rank])}
    print(f"{name}: {len(every)} of {count} samples seen, {1 - len(every) / count:.0%} by no rank")
    assert (len(every) == count) == (name == "the same seed")

# %% [markdown]
# No error, no wrong loss. Each rank misses a sample with probability 1 − 1/n, so all n miss (1 − 1/n)ⁿ of them: a
# quarter for two ranks, and up to 37 % for many.
#
# ### One copy in memory
#
# In three epochs each rank has read its samples of three shuffles, with two ranks 7/8 of all samples each. **Predict**
# (question 6) how much of the machine's memory that takes. Linux counts for each process what it has of the file, and
# also its fair share of that: a page that two processes have counts half for each.

# %%
shares = [found for *_, found in by_rank]
size = shared.stat().st_size
if all(rss for rss, _ in shares):
    assert sum(rss for rss, _ in shares) > 1.2 * size
    assert 0.5 * size < sum(pss for _, pss in shares) < 1.05 * size
    print("The ranks together have more than the whole file in memory,")
    print("and the memory that this takes is no more than one file.")

# %% tags=["nbval-ignore-output"]
for rank, (rss, pss) in enumerate(shares):
    print(f"rank {rank}: {rss / 1e6:.0f} MB of the file, its fair share {pss / 1e6:.0f} MB")
print(f"together {sum(r for r, _ in shares) / 1e6:.0f} MB in", end=" ")
print(f"{sum(p for _, p in shares) / 1e6:.0f} MB of memory; the file has {size / 1e6:.0f} MB")

# %% [markdown]
# The page cache belongs to the machine, not to a process, so a second rank on the same machine adds next to nothing.
# Another machine needs a copy of the file, and memory for it. The process cache is memory of each process, so it is
# there once for each rank. This is why `os_cache=True` is the right choice whenever the file fits.
#
# ### Is it faster, too?
#
# All ranks load at the same time, one worker each: FFCV's thread, or a process of the usual loader.


# %%
def rank_rate(path, seed):
    """Images/s of this rank's share while all ranks load: FFCV's, and the usual loader's."""
    rates = []
    data = Subset(ImageFolder(image_folder() / "train", augment), spread)
    more = {"multiprocessing_context": "fork", "persistent_workers": True}
    more |= {"num_workers": 1, "collate_fn": channels_first}
    usual = DataLoader(data, 64, sampler=DistributedSampler(data), **more)
    for loader in (rank_loader(path, seed, 224), usual):
        epoch(loader)  # compiles, or starts the worker
        dist.barrier()
        seen, seconds, _ = epoch(loader)
        dist.barrier()
        rates.append(seen / seconds)
    return rates


if not without:
    rates = launch(rank_rate, shared, seed, world_size=world_size, timeout=120)
    with_ffcv, usual = map(sum, zip(*rates, strict=True))

# %% tags=["nbval-ignore-output"]
if not without:
    print(f"{world_size} ranks, images/s together: FFCV {with_ffcv:,.0f},", end=" ")
    print(f"the usual loader {usual:,.0f}; {with_ffcv / usual:.1f} times")

# %% [markdown]
# On a quiet machine the factor is about that of one process, which was recorded as four to five (section 8): ranks
# share the cores, and the file in memory.
#
# ### What `distributed=True` cannot do
#
# The quasi-random order does not work with it:

# %%
if not without:
    with expect_error(NotImplementedError):
        ffcv_loader(files["raw"], order=OrderOption.QUASI_RANDOM, distributed=True)

# %% [markdown]
# What does work is to give each rank some pages of its own with `indices=`, and the quasi-random order within them.
# All ranks must have the same number of samples, or one runs out of batches while the others wait for it (lesson 04).
# Then each rank sees the same part of the data in every epoch.

# %%
if not without:
    deal = [np.flatnonzero(page_of % world_size == rank) for rank in range(world_size)]
    same = min(map(len, deal))
    pair = {"os_cache": False, "order": OrderOption.QUASI_RANDOM, "size": 8}
    mine = [ffcv_loader(files["raw"], indices=part[:same].astype("u8"), **pair) for part in deal]
    taken = [loader.next_traversal_order().tolist() for loader in mine]
    assert all(len({*order}) == len(order) == same for order in taken)
    assert len({*sum(taken, [])}) == same * world_size
    print(f"{world_size} ranks with {same} samples each, none in common;", end=" ")
    print(f"{count - same * world_size} samples are left out")

# %% [markdown]
# > **What changes on real GPUs.** `ToDevice(device())` in the pipeline is the copy to this rank's GPU. It runs in the
# > loader's thread and on a stream of its own, so it overlaps with the step. Pixels travel as bytes and become floats
# > there. On a node with 8 GPUs and 96 cores give each loader 12 threads, not 96.

# %% [markdown]
# ## 10. Mistakes that make no noise
#
# Each of these runs without a word. **Predict** (question 10) the first one.

# %%
if not without:
    quick = {"image": None, "label": [IntDecoder(), ToTensor(), Squeeze(1)]}
    default = Loader(str(files["raw"]), batch_size=64, num_workers=1, pipelines=quick)
    kept = [labels for (labels,) in default]
    total = sum(map(len, kept))
    print(f"1. drop_last is True by default: {total} of {count} samples in an epoch")
    assert total == count // 64 * 64

    buffers = len({labels.data_ptr() for labels in kept})
    truth = Beton(files["raw"]).samples["label"]
    wrong = sum(not np.array_equal(k, truth[64 * i : 64 * (i + 1)]) for i, k in enumerate(kept))
    print(f"2. {len(kept)} batches share {buffers} buffers: {wrong} of those kept are overwritten")
    cloned = [labels.clone() for (labels,) in default]
    assert np.array_equal(torch.cat(cloned), truth[:total]) and wrong > 0

# %% [markdown]
# 1. The samples of the last batch are lost in each epoch. With a random order they are others each time. In validation
#    they are samples that are never tested: `drop_last=False`.
# 2. A batch is a view of one of five buffers, and the loader fills it again. Use it at once, or `clone()` it.


# %%
def pixels_of(seed):
    """The first batch of images with a seed for the order."""
    return next(iter(ffcv_loader(files["raw"], seed=seed)))[0].clone()


if not without:
    same = torch.equal(pixels_of(3), pixels_of(3))
    print(f"3. the same seed twice, the same pixels: {same}")
    assert not same

stored, original = Beton(files["JPEG"]).image(0), np.asarray(subset[0][0])
changed = np.abs(stored.astype(int) - original)
print(f"4. {np.mean(changed > 0):.0%} of the numbers of the JPEG file's first image are", end=" ")
print(f"not those of the source; they differ by {changed.max()} of 255 at most")
assert 0 < changed.max() < 26

# %% [markdown]
# 3. `seed` is for the order. Random crops and flips have generators of their own, one in each thread.
# 4. The writer does not copy JPEG files. It decodes each and compresses it again, with quality 90, whatever it had.
#    Here it had 90 already, so the numbers differ by little.
#
# And one from section 4: `smart` without a threshold stores plain pixels.
#
# Other mistakes hang for ever, without any message, unless something like `course_utils.ffcv` turns them into errors.
# One of them: an operation that is compiled, behind `ToTensor`.

# %%
if not without:
    normalise = transforms.NormalizeImage(np.full(3, 127.0), np.full(3, 64.0), np.float32)
    late = [rgb_image.CenterCropRGBImageDecoder((64, 64), 1), ToTensor(), normalise]
    with expect_error(ValueError):
        ffcv_loader(files["raw"], pipelines={"image": late, "label": None})

# %% [markdown]
# What `course_utils.ffcv` repairs in FFCV, and what happens without it:

# %%
for fix in [] if without else FIXES:
    print(f"- {fix.why.splitlines()[0]}".replace("``", ""))

# %% [markdown]
# ## 11. What else there is today
#
# FFCV has not been maintained since 2024. Its last release, 1.0.2, is source code that wants compilers and system
# libraries ([PyPI](https://pypi.org/project/ffcv/)). It imports `distutils`, which Python 3.12 no longer has. What
# else loads the same images, cropped to 224 pixels and flipped, on the same cores?

# %%
ways = ["dataloader", "ffcv_raw", "ffcv_mixed", "ffcv_jpeg", "webdataset", "litdata"]
ways += ["mosaicml_streaming", "grain", "spdl", "dali"]
recorded_bars(ways, strong=["FFCV"])

# %% [markdown]
# *The figure: a bar of images/s for each library. FFCV's raw file is far ahead, the mixture and the JPEG file follow.
# Of the others DALI, with a decoder of its own, is 14 to 18 % faster than the usual loader, two are about as fast, and
# three are slower.*
#
# What each did there, from the same record, with its best number of workers:

# %%
print(f"{'':22}{'decoder':16}{'stored as':11}{'workers':9}images/s  CPU ms each")
for way in map(RECORDED["ways"].get, ways):
    if way["by_workers"]:
        name, row = best_workers(way)
        print(f"{name:22}{way['decoder']:15} {way['storage']:11}{way['workers_are']:9}", end="")
        print(f"{row['images_per_s']:8,.0f}{row['cpu_ms_per_image']:13.2f}")
for way in map(RECORDED["ways"].get, ways):
    if way["note"]:
        print(f"{way['name']}: {way['note']}")

# %% [markdown]
# All but FFCV and DALI call the same PIL function here: the figure compares how they hand images on, not what they
# could do with another decoder. With OpenCV in its place each would probably gain, too, as the usual loader did in
# section 8; that was not measured.
#
# Where to look, by what you need:
#
# - data in shards that are streamed from an object store: [WebDataset](https://github.com/webdataset/webdataset),
#   [LitData](https://github.com/Lightning-AI/litdata), [MosaicML
#   Streaming](https://docs.mosaicml.com/projects/streaming);
# - an input pipeline beside JAX: [Grain](https://google-grain.readthedocs.io);
# - threads instead of processes, with your own functions: [SPDL](https://facebookresearch.github.io/spdl);
# - decoding on the GPU: [DALI](https://docs.nvidia.com/deeplearning/dali/user-guide/docs/).
#
# **When FFCV is not the answer:**
#
# - The step does not wait (section 2). Then no loader makes training faster.
# - The samples are text. Tokens are an array: `np.memmap` of one file of integers is a raw `.beton` without the
#   ceremony.
# - The data do not fit on a disk near the GPU, or change every day. A `.beton` file is written once, whole.
# - The samples are not images. FFCV has fields for arrays, bytes and JSON, but its speed is in its image code.
# - Your augmentations exist in torchvision only, and must stay exactly those. An FFCV pipeline has to be written anew.
# - Nobody in your team wants to look after a package that nobody looks after.
#
# And much of it can be had without the package, as section 8 shows: decode once, store what is needed, resize with a
# fast library, and do not hand batches between processes if you can help it.

# %% [markdown]
# ## Recap, with the numbers of this run

# %% tags=["nbval-ignore-output"]
print("the step waits:", *(f"{name} {w:.0%}" for name, (*_, w) in loaded.items()), sep="\n  ")
print("one core, ms an image:", *(f"{n} {t:.2f}" for n, t in ladder.items()), sep="\n  ")
print(
    f"raw {sizes['.beton, raw'] / 1e6:.0f} MB, JPEG {sizes['.beton, JPEG'] / 1e6:.0f} MB;", end=" "
)
print("pages held at batches of 8: " + ", ".join(f"{n} {h}" for n, h in held.items()))

# %% [markdown]
# - Measure the loader alone, the step alone, and both. Overlapped, the slower one sets the pace; the step waits for
#   the share 1 − L/S.
# - A `.beton` file is header, field descriptors, metadata, pages, allocation table. You wrote one that equals FFCV's
#   to the last byte.
# - Raw is fast from memory, JPEG from a disk. A better decoder and resizing, and not to decode at all, gain most.
# - An order is a list, and decides how many pages must be in memory: all for random, a window for quasi-random.
# - The page cache is shared by all ranks of a machine and gives way silently. The process cache is each rank's own,
#   knows the order, and fails loudly.
# - Compiled code lets threads run together, and lets you write operations with loops over pixels.
# - Under DDP all ranks shuffle with one seed, and the number of the epoch, and take every n-th sample.
# - Not the answer where nothing waits, where data are streamed, or where nobody can maintain it.
#
# <details><summary>Answers to the ten predictions</summary>
#
# 1. 675 in turns (1/(1/900 + 1/2700)); 900 if it works ahead (section 2).
# 2. Decoding and resizing, about half of the time each (section 2).
# 3. 225 kB as pixels; a tenth of that, more or less, as JPEG (section 4).
# 4. All hundred, or nearly (section 5).
# 5. Sequential: nothing of what the last epoch left, only what shares a page with the sample before. Random: half
#    (section 7).
# 6. Next to nothing: the page cache has one copy (section 9).
# 7. It compiles its pipeline (section 8).
# 8. Compiled code runs without the lock (section 8).
# 9. A quarter (section 9).
# 10. 768: the last 32 are dropped (section 10).
# </details>
#
# **Exercises:** [exercises/15_ffcv_data_loading](../exercises/15_ffcv_data_loading_exercises.ipynb). **Next:**
# [16 multi node](16_multi_node.ipynb), which leaves this machine.
#
# **Worth reading**
# - G. Leclerc, A. Ilyas, L. Engstrom, S. M. Park, H. Salman, A. Madry, *FFCV: accelerating training by removing data
#   bottlenecks*, 2023, [arXiv 2306.12517](https://arxiv.org/abs/2306.12517): the design, and what each part gains.
# - FFCV's [performance guide](https://docs.ffcv.io/performance_guide.html): which cache and order for which memory.
