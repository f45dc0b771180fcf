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
# Eight A100s trained ResNet-50 on ImageNet for 16 epochs in 14.9 minutes (*recorded*, [FFCV's ImageNet
# runs](https://github.com/libffcv/ffcv-imagenet)). With 1,281,167 images an epoch that is about 23,000 per second,
# 2,900 for each GPU. Half of them were stored as JPEG and had to be decoded, and all had to be cropped, resized and
# copied. PyTorch's usual loader prepares only some hundreds per second on one core, so each of those GPUs would need
# many cores, or it would wait. This lesson finds out who waits and for what, and opens the file format with which the
# library FFCV shortens the waiting.
#
# **You will be able to**
# - *tell* from three measurements whether training waits for its data, and whether the loader computes or is waiting
#   too;
# - *make* decoding cheaper, or avoid it, and *choose* what to store;
# - *choose* an order and a cache for the memory that you have;
# - *load* with FFCV under DDP, and *prove* that no sample is lost;
# - *say* when FFCV is not the answer, and what is.
#
# **Before this:** [04 ddp](04_ddp.ipynb). **Time:** about 45 minutes to read the core, 85 with the deeper sections,
# under a minute to run.

# %% [markdown]
# First libraries and parameters, then what comes from the course.

# %% tags=["parameters"]
import io
import os
import random
import tempfile
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageOps
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, default_collate

world_size = 2  # ranks
count = 500  # images
gpu_rate = 2_900  # images/s of the GPU that is emulated where there is none
use_ffcv = True  # False: as if FFCV could not be used here

# %%
from course_utils import device, launch
from course_utils.predictions import predict, predictions
from lessons.ffcv_data_loading import figures, loader_records, loading, page_cache
from lessons.ffcv_data_loading.ffcv import (
    Beton,
    ImageFolder,
    apply_fixes,
    by_hand,
    image_folder,
    missing,
)
from lessons.ffcv_data_loading.loading import crop_box, measure

without = missing() if use_ffcv else "FFCV is left out, as use_ffcv says."
if without:
    print(without, "\nWhat needs FFCV below is recorded, not measured.")
else:
    apply_fixes()
    from ffcv.fields import IntField, RGBImageField, rgb_image
    from ffcv.fields.basics import IntDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToDevice, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    print("FFCV can be used: everything below is measured here, unless it says otherwise.")

# %% [markdown]
# ## 1. Who waits for whom?
#
# Our images are generated, and stored as ImageNet is: a folder for each class, JPEG files of many sizes. But ImageNet's
# have about twice as many pixels and four times the bytes, so we estimate that they take two to three times as long.

# %%
train = ImageFolder(image_folder(count=count) / "train")
print(f"{len(train)} images of {len(train.classes)} classes")
train.contact_sheet()

# %% [markdown]
# *The figure: eight scenes of overlapping shapes. The polygon or star in the middle shows the class.*
#
# Before an image can be trained on, it goes through a pipeline, here with the library PIL:
#
# ```text
# file --read--> bytes --decode--> pixels --crop, resize, flip--> 224 x 224 --copy--> batch on the GPU
# ```
#
# `crop_box` chooses a random part, as torchvision's `RandomResizedCrop` does. Pixels stay bytes until they are on the
# GPU, because as float32 they would be four times as much to copy.


# %%
def decode(data):
    return Image.open(io.BytesIO(data)).convert("RGB")


def cut_out(image, box, size=224):
    """Part of a PIL image, resized, and flipped half of the time: uint8 (size, size, 3)."""
    image = image.resize((size, size), Image.Resampling.BILINEAR, box)
    return torch.from_numpy(np.array(ImageOps.mirror(image) if random.random() < 0.5 else image))


def augment(image):
    return cut_out(image, crop_box(*image.size))


def copy(images):
    return torch.stack(images).to(device())


# %%
work = {"read": Path.read_bytes, "decode": decode, "augment": augment, "copy": copy}
parts = loading.costs_of_parts(work, train.paths[:128])
figures.time_shares({"one image": parts}, "measured: what PIL's pipeline does for one image")

# %% [markdown]
# *The figure: one bar, cut into shares of the time. Decoding and augmentation (crop, resize, flip) take about half
# each; reading a file that is already in memory, and copying, take little.*

# %% tags=["nbval-ignore-output"]
whole_time = sum(parts.values())  # seconds of a core
needs = gpu_rate * whole_time
print(f"one image {1e3 * whole_time:.2f} ms: {1 / whole_time:,.0f} images/s from one core")
print(f"cores for a GPU of {gpu_rate:,} images/s: {needs:.1f} with these images,")
print(f"{2 * needs:.0f} to {3 * needs:.0f} with images like ImageNet's (estimated)")

# %% [markdown]
# The GPUs of the opening had twelve threads each ([their
# configuration](https://github.com/libffcv/ffcv-imagenet/blob/main/rn50_configs/rn50_16_epochs.yaml)).
#
# Three measurements tell whether loading matters, for any training script:
#
# 1. the **loader alone**: take all its batches, and do nothing with them;
# 2. the **step alone**: train on one batch again and again;
# 3. **both**, and the time for which the step waits for its next batch.
#
# On a GPU the step trains a small network. Elsewhere the GPU is *emulated*: the step sleeps for as long as one at 2,900
# images/s would compute, because computing would take cores from the loader.


# %%
def channels_first(items):
    images, labels = default_collate(items)
    return images.permute(0, 3, 1, 2), labels


def usual_loader(data, workers, size=64):
    """PyTorch's loader in this process (0 workers) or in worker processes."""
    more = {"multiprocessing_context": "fork", "persistent_workers": True} if workers else {}
    more |= {"num_workers": workers, "collate_fn": channels_first}
    return DataLoader(data, size, shuffle=True, **more)


# %% [markdown]
# **Predict** for a loader of 900 images/s and a step of 2,700: how many images/s do you get if the loader works ahead,
# in processes of its own? And if the two take turns?

# %%
in_turns = predict("loader and step taking turns", unit="images/s")

# %%
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
step = loading.emulated_step(gpu_rate)
if device().type == "cuda":
    step = loading.training_step(loading.convnet().to(device()))
images = ImageFolder(image_folder(count=count) / "train", augment)
one_batch = next(iter(usual_loader(images, 0)))
step(*one_batch)
step_alone = measure([one_batch] * 8, step).rate
usual = {}
for name, workers in (("in turns", 0), (f"{cores} workers", cores)):
    loader = usual_loader(images, workers)
    usual[name] = measure(loader), measure(loader, step)

# %% tags=["nbval-ignore-output"]
print("            loader alone  step alone      both  step waits")
for name, (load, fed) in usual.items():
    row = f"{name:11}{load.rate:14,.0f}{step_alone:12,.0f}{fed.rate:10,.0f}"
    print(f"{row}{fed.waits:12.0%}")

# %% jupyter={"source_hidden": true}
in_turns.compare(1 / (1 / 900 + 1 / 2_700))

# %% [markdown]
# **Compare.** If the loader works ahead, the slower one sets the pace: 900, and the step waits for two thirds of the
# time. In turns the times add up: 1/900 + 1/2,700 s an image, so 675 images/s.
#
# With workers, *both* stays below the loader alone, because in so short an epoch the wait for the first batch counts.
# Measure longer ones.
#
# | what you see | what it means | what helps |
# |---|---|---|
# | both ≈ step alone, no waiting | the GPU is the bottleneck | nothing here: lessons 04 to 12 |
# | both ≈ loader alone | the loader is the bottleneck | sections 2 to 5 |
# | 1/both ≈ 1/loader + 1/step | they take turns | let the loader work ahead (`num_workers` of 1 or more) |
#
# > **What changes on real GPUs.** Python does not wait for the GPU, so stop the clock after `torch.cuda.synchronize()`.
# > And copying takes time: 256 images in fp32 are 154 MB. At the rates *recorded* on one H200 (`gpu-check`) they need
# > 20 ms from ordinary memory (7.5 GB/s), and 2.8 ms from *pinned* memory (55 GB/s), which the system does not move, so
# > the GPU can read it directly (`pin_memory=True`). With `non_blocking=True`, on a *stream* (a queue of work for the
# > GPU) of its own, the copy of the next batch runs during the step.

# %% [markdown]
# ## 2. Does the loader compute, or does it wait too?
#
# A loader is slow for one of two reasons, and each needs its own remedy. Either its cores compute all the time, or they
# are idle while it waits for a disk or the network. The rate does not show which, but the number of busy cores does. So
# we load the same images twice: from memory, and from an emulated store in which each read waits for 10 ms and needs no
# core.
#
# **Predict** for two cores: which of the two loaders gets faster with eight workers instead of two, and by how much?

# %%
loaders = ["the one that computes", "the one that waits", "both", "neither"]
faster = predict("faster with eight workers, on two cores", loaders)

# %%
warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
few = Subset(images, range(128))
kinds = {"computes": few, "waits": loading.SlowReads(few, seconds=0.01)}
speeds = {}
for name, data in kinds.items():
    for workers in (2, 8):
        speeds[name, workers] = measure(usual_loader(data, workers, size=8))

# %% tags=["nbval-ignore-output"]
print(f"{cores} cores here")
for (name, workers), speed in speeds.items():
    print(f"{name:9}{workers} workers {speed.rate:7,.0f} images/s {speed.busy:5.1f} cores busy")

# %% jupyter={"source_hidden": true}
faster.compare("the one that waits")

# %% [markdown]
# **Compare.** The one that waits, by up to four times, because eight reads wait at the same time. Six more workers do
# not help the computing loader, because no core is free for them. (These epochs are short, so they are slower than in
# section 1, and busy cores, counted in steps of 10 ms, can come out above two.)
#
# So if cores are idle while the step waits, start more reads at once (more workers or threads), and use fewer, larger
# files (section 12).
#
# > **Misconception.** "The loader is slow, so I set `num_workers` to 32." If workers compute, only the core time of
# > an image counts.

# %% [markdown]
# ## 3. Decode less
#
# Photographs are often several times as wide as the 224 pixels we need. JPEG stores each block of 8 by 8 pixels as 64
# waves, from coarse to fine, so a decoder that leaves out the fine ones gets the picture at a half, a quarter or an
# eighth of its width and height, without ever making the pixels that would be thrown away. In PIL this is `draft`.
#
# **Predict**: how many times as fast is it to decode at a quarter of the width and height?

# %%
quarter = predict("how many times as fast a quarter decodes")


# %%
def decode_part(data, part):
    image = Image.open(io.BytesIO(data))  # reads only the header
    image.draft("RGB", (image.width // part, image.height // part))
    return image.convert("RGB")


photos = [train.large_photograph(number) for number in range(8)]
decode_times = {p: loading.core_ms(partial(decode_part, part=p), photos) for p in (1, 2, 4, 8)}

# %% tags=["nbval-ignore-output"]
for p, milliseconds in decode_times.items():
    print(f"1/{p}: {milliseconds:5.1f} ms, {decode_times[1] / milliseconds:.1f} times as fast")

# %% tags=["nbval-ignore-output"] jupyter={"source_hidden": true}
quarter.compare(decode_times[1] / decode_times[4])

# %% [markdown]
# **Compare.** Far less than the sixteen that one sixteenth of the pixels suggests, because the bytes of all waves must
# be unpacked in any case. An eighth gains a little more at most.
#
# How much detail is lost on the way to 224 by 224 pixels?

# %% jupyter={"source_hidden": true}
large = decode(photos[0]).resize((224, 224))
for p in decode_times:
    small = decode_part(photos[0], p)
    away = np.abs(np.subtract(small.resize((224, 224)), large, dtype=int)).mean()
    print(f"1/{p}: {small.size}; resized to 224 x 224 it differs by {away:.1f} of 255 on average")
    assert away < 3 or p == 8

# %% [markdown]
# Little, as long as 224 pixels are left. For random crops, it is the *crop* that must keep 224, and it may be as small
# as a twelfth of the area:


# %%
def decode_and_augment(data, size=224):
    """As `decode` and `augment`, from no more pixels than the crop needs."""
    image = Image.open(io.BytesIO(data))
    width, height = image.size
    box = crop_box(width, height)
    shrink = min(box[2] - box[0], box[3] - box[1]) / size
    image.draft("RGB", (int(width / shrink), int(height / shrink)))
    kept = image.width / width  # 1, 1/2, 1/4 or 1/8
    return cut_out(image.convert("RGB"), [kept * side for side in box], size)


# %% tags=["nbval-ignore-output"]
random.seed(0)
cheap = loading.core_ms(decode_and_augment, photos * 2)
full = loading.core_ms(lambda data: augment(decode(data)), photos * 2)
print(f"large photographs: {full:.1f} ms each, with draft {cheap:.1f} ms")
times, least, most = loader_records.gain("dataloader_cv2")
print(f"OpenCV for PIL on our small images: x {times:.2f} ({least:.2f} to {most:.2f}; recorded)")

# %% [markdown]
# OpenCV in place of PIL, in the last line, helps as well, and GPUs can decode too (DALI, or `decode_jpeg` of
# torchvision with `device="cuda"`). Or one decodes once, and stores the pixels, as FFCV does.

# %% [markdown]
# ## 4. A file made to be read: `.beton`
#
# JPEG files are made to be small, and folders to be searched by name. **FFCV** (Leclerc et al. 2023) puts a data set
# into one file that is made to be read in any order, by many threads. Its writer takes any data set with `len` and
# `[i]`, and a **field** for each part of a sample. For the real ImageNet add `workers=16, page=8 << 20,
# max_resolution=256`.


# %%
def write_beton(source, path, mode="raw", workers=1, page=2 << 20, **options):
    """Write samples (RGB image, integer) to a .beton file with FFCV.

    `mode` is "raw", "jpg" or "proportion" (a mixture); `page` is in bytes, a power of 2 from 2 MiB.
    """
    image = RGBImageField(write_mode=mode, **options)
    writer = DatasetWriter(str(path), {"image": image, "label": IntField()}, page, workers)
    writer.from_indexed_dataset(source)


# %% [markdown]
# A small file first: 24 images of 192 by 192 pixels. It consists of numbers in fixed places, so NumPy can open it: a
# **header** of 24 bytes, a **descriptor** for each field, **metadata** with a record for each sample, **pages** of
# equal size for the images, and an **allocation table** with the place and size of each image.

# %%
folder = tempfile.TemporaryDirectory()
files = {name: Path(folder.name) / f"{name}.beton" for name in ("small", "raw", "mixed", "JPEG")}
some = Subset(train, range(0, count, count // 24))
small = [(ImageOps.fit(image, (192, 192)), label) for image, label in some][:24]
write = by_hand.write_beton if without else write_beton
write(small, files["small"])
file = Beton(files["small"])
figures.file_layout(file.segments(), "measured: a .beton file of 24 raw images, pages of 2 MiB")

# %% [markdown]
# *The figure: the file as one row. The first page holds header, fields and metadata, enlarged below. Two pages follow,
# with 18 and 6 images, and the table. White is unused space, as where the next image did not fit.*
#
# To find an image, look up its record, and cut the pixels out of the file:

# %%
print({name: int(file.header[name]) for name in file.header.dtype.names})
mode, width, height, pointer = file.samples["image"][5].tolist()
print(f"sample 5: mode {mode}, {width} x {height} pixels, from byte {pointer:,}")
pixels = np.memmap(files["small"], np.uint8, "r")[pointer : pointer + 3 * width * height]
assert np.array_equal(pixels.reshape(height, width, 3), small[5][0])
assert mode == by_hand.RAW and file.samples["label"][5] == small[5][1]

# %% [markdown]
# Any image is one contiguous piece at a known place: no directory to search, no file to open and, as mode 1 means plain
# pixels, nothing to decode. The price is unused space, and a file to which nothing can be added.

# %% [markdown]
# ## 5. Small or fast: what to store
#
# FFCV stores images as plain pixels (**raw**), as **JPEG** of quality 90, or as a mixture.
#
# **Predict**: how many times as large as the JPEG file is the raw one?

# %%
larger = predict("the raw file as a multiple of the JPEG file")

# %%
np.random.seed(0)  # which images of the mixture become JPEG
modes = {"raw": "raw", "mixed": "proportion", "JPEG": "jpg"}
for name, mode in modes.items():
    write(train, files[name], mode)
sizes = {name: files[name].stat().st_size / 1e6 for name in modes}
print(", ".join(f"{name} {size:.1f} MB" for name, size in sizes.items()))

# %% jupyter={"source_hidden": true}
assert 6 < sizes["raw"] / sizes["JPEG"] < 12
larger.compare(sizes["raw"] / sizes["JPEG"])

# %% [markdown]
# **Compare.** About eight times: of the 24 bits of a pixel JPEG keeps three.
#
# So why store raw? An FFCV loader gets a **pipeline** for each field, a list of operations of which the first decodes.
# This one does what PIL's did; `ToDevice` copies to the GPU.


# %%
def pipelines(size=224):
    """Operations for image and label: random resized crop, flip, and on to the device."""
    return {
        "image": [
            rgb_image.RandomResizedCropRGBImageDecoder((size, size)),
            RandomHorizontalFlip(),
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


# %%
if without:
    core_times = loader_records.core_times("dataloader", "ffcv_raw", "ffcv_mixed", "ffcv_jpeg")
else:
    core_times = {"DataLoader, PIL": usual[f"{cores} workers"][0].core_ms}
    for name in sizes:
        loader = ffcv_loader(files[name])
        measure(loader, epochs=1)  # compiles
        core_times[f"FFCV, {name}"] = measure(loader, epochs=3).core_ms

# %% tags=["nbval-ignore-output"]
print("recorded" if without else "measured")
print(f"                 core time of an image  cores for {gpu_rate:,} images/s")
for name, milliseconds in core_times.items():
    print(f"{name:17}{milliseconds:18.2f} ms{gpu_rate * milliseconds / 1e3:26.1f}")

# %% jupyter={"source_hidden": true}
assert core_times["FFCV, raw"] < core_times["FFCV, JPEG"] < core_times["DataLoader, PIL"]

# %% [markdown]
# We compare the time of a core, because it hardly changes when something else runs on the machine. Raw images need
# least, because nothing is decoded. FFCV's JPEG needs more, but still less than the usual loader. (Section 8 has the
# images per second.)
#
# Why store JPEG then? Because a file that is not in memory comes from a disk or over a network, where bytes count.
# *Recorded* in images/s (FFCV's benchmarks, a p3dn.24xlarge instance):
#
# | from | 256 px, raw | 512 px, raw | 512 px, JPEG |
# |---|---|---|---|
# | memory | 172,801 | | 31,278 |
# | network disk (EBS) | 6,870 | 1,956 | 16,631 |
#
# From memory raw is faster (its images are also smaller here); from this slow disk, JPEG of 512 pixels is eight times
# as fast as raw. One rule covers both lines: images/s are what the cores can prepare, or the disk's bandwidth divided
# by the bytes of an image, whichever is smaller.

# %% [markdown]
# ## 6. Which order, and how much memory?
#
# Training needs a new random order in each epoch, but a disk is fastest when pages are read in sequence. So FFCV offers
# three orders: **sequential**, **random**, and **quasi-random**, which takes samples at random from a few open pages,
# and opens another when one is used up.


# %%
rng, page_of = np.random.default_rng(0), Beton(files["raw"]).page_of - 1  # 0: the first with images
orders = {
    "sequential": np.arange(count),
    "quasi-random": page_cache.quasi_random(page_of, 16, rng),
    "random": rng.permutation(count),
}
accesses = {name: [*enumerate(page_of[order].tolist())] for name, order in orders.items()}
figures.page_accesses(accesses, "modelled: the page of each sample of an epoch, in three orders")

# %% [markdown]
# *The figure: samples of one epoch from left to right, page upwards. Sequential is a diagonal, quasi-random has
# horizontal dashes, with 16 pages open at a time, and random fills the panel.*
#
# Two caches can hold pages. The **page cache** of the operating system (`os_cache=True`, the default) keeps what was
# read while there is room, and drops what was used least recently. (Its pages have 4 kB; we count in pages of FFCV's
# file.) FFCV's own **process cache** (`os_cache=False`) reads whole pages three batches ahead, and keeps each until its
# last use in the epoch.
#
# **Predict**: there is memory for half of the file, and one epoch has been read. Which share of the next one's samples
# comes from the page cache, in random order? And in sequential order? (A sample counts if its page is in memory at that
# moment, even if it came with the sample before.)

# %%
from_cache = predict("from the page cache with a random order", unit="%")

# %%
labels, pages = np.array(train.labels), page_of.max() + 1
again = orders | {"quasi-random": page_cache.quasi_random(page_of, 16, rng)}
again["random"] = rng.permutation(count)
hits = {}
print("modelled, whole  classes in a  pages held by a  samples in the page cache, with room for")
print(f"pages of 2 MiB   batch of 8    process cache    20 %    50 %    80 %    all {pages} pages")
for name, order in orders.items():
    mixed = np.mean([len({*labels[order[i : i + 8]].tolist()}) for i in range(0, count, 8)])
    held = page_cache.pages_held(order, page_of, batch=8)
    rooms = [round(share * pages) for share in (0.2, 0.5, 0.8, 1)]
    hits[name] = [page_cache.share_from_memory([order, again[name]], page_of, n) for n in rooms]
    row = "".join(f"{share:8.0%}" for share in hits[name])
    print(f"{name:13}{mixed:11.1f}{held:17}      {row}")

# %% jupyter={"source_hidden": true}
assert 0.8 < hits["sequential"][0] == hits["sequential"][2] and hits["random"][1] < 0.5
from_cache.compare(round(100 * hits["random"][1]))

# %% [markdown]
# **Compare.** In random order, a little less than the share that fits. Sequential looks better, but its hits are
# neighbours on a page just read: each page comes from the disk again, because it was always dropped before its turn.
#
# If the raw file fits in memory, store raw pixels; if only the JPEG file does, store JPEG; both in random
# order. If neither fits, take quasi-random with the process cache: it mixes classes nearly as well as random, reads
# each page once, and holds little more than the pages of its window, whatever the size of the file. In random order the
# process cache would hold all of it.

# %% [markdown]
# ## 7. Two ranks, one file
#
# Under DDP (lesson 04) each rank trains on its own samples. With `distributed=True` an FFCV loader uses PyTorch's
# `DistributedSampler`: all N ranks make the same shuffle, from the seed and the number of the epoch, and rank r takes
# every N-th sample, beginning with number r. To show who gets what, the label in this file is the sample's *number*.


# %%
def rank_loader(path, seed, size=64):
    """This rank's loader, with one thread."""
    if without:
        return by_hand.PlainLoader(path, size, seed)
    return ffcv_loader(path, 1, distributed=True, seed=seed, pipelines=pipelines(size))


def train_rank(path, epochs, seed):
    """Train on this rank's share; samples of each epoch, and what it has of the file in memory."""
    loader, model = rank_loader(path, seed), DDP(loading.convnet().to(device()))
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(epochs):
        seen.append([])
        for pictures, numbers in loader:
            numbers = numbers.cpu()
            optimizer.zero_grad()
            target = torch.from_numpy(labels)[numbers].to(device())
            loading.image_loss(model, pictures.to(device()), target).backward()
            optimizer.step()
            seen[-1] += numbers.tolist()
    dist.barrier()  # all ranks have read the file and still hold it
    memory = page_cache.in_memory_of(path)
    dist.barrier()
    return seen, memory


# %%
seed, shared = 7, Path(folder.name) / "shared.beton"
write([(train[i][0], i) for i in range(count)], shared)
if not without:
    launch(apply_fixes, world_size=world_size)  # each rank imports FFCV
by_rank = launch(train_rank, shared, 2, seed, world_size=world_size, timeout=120)
for epoch in range(2):
    shares = [seen[epoch] for seen, _ in by_rank]
    for rank, share in enumerate(shares):
        sampler = DistributedSampler(range(count), world_size, rank, seed=seed)
        sampler.set_epoch(epoch)
        assert share == [*sampler]
    seen = {sample for share in shares for sample in share}
    print(f"epoch {epoch}: {[len(share) for share in shares]} samples by rank,", end=" ")
    print(f"{len(seen)} different; rank 0 starts {shares[0][:4]}")
    assert seen == {*range(count)}

# %% [markdown]
# No sample is lost. An FFCV loader counts its epochs itself, while `DistributedSampler` needs `set_epoch`.
#
# **Predict**: the two ranks shuffle with seeds of their own, 0 and 1. Which share of the samples does no rank see?
# Above, each rank read samples from almost every page of the file: was a page in memory once, or once for each rank?

# %%
unseen = predict("seen by no rank", unit="% of the samples")

# %%
found_in = ["each page once", "each page once per rank", "no page"]
pages_held = predict("what was in memory", found_in)

# %%
samplers = [DistributedSampler(range(count), world_size, r, seed=r) for r in range(world_size)]
seen = {sample for sampler in samplers for sample in sampler}
print(f"seeds by rank: {1 - len(seen) / count:.0%} of the samples are seen by no rank")

# %% tags=["nbval-ignore-output"]
memory, size = [found for _, found in by_rank], shared.stat().st_size
print(f"the file has {size / 1e6:.0f} MB")
for rank, (mapped, fair) in enumerate(memory):
    print(f"rank {rank}: {mapped / 1e6:.0f} MB of it in memory, its fair share {fair / 1e6:.0f} MB")

# %% jupyter={"source_hidden": true}
if all(mapped for mapped, _ in memory):
    assert 0.5 * size < sum(fair for _, fair in memory) < 1.05 * size
unseen.compare(round(100 * (1 - len(seen) / count)))
pages_held.compare("each page once")

# %% [markdown]
# **Compare.** In each epoch a quarter is seen by no rank, and no error says so: each of N ranks misses a sample with
# probability 1 − 1/N, all of them with (1 − 1/N)ᴺ, which is 37 % for many ranks. In memory each page is there once,
# because the page cache belongs to the machine: in the *fair share* a page of two processes counts half for each.
#
# The process cache, however, exists once per rank.

# %% [markdown]
# ## 8. When FFCV is not the answer
#
# FFCV has not been maintained since 2024. Its last release, 1.0.2, is source code that needs compilers and system
# libraries ([PyPI](https://pypi.org/project/ffcv/)), and imports `distutils`, which Python 3.12 no longer has. What
# else loads such images? *Recorded* on two cores:

# %%
ways = ["dataloader", "ffcv_raw", "ffcv_mixed", "ffcv_jpeg", "webdataset", "litdata"]
ways += ["mosaicml_streaming", "grain", "spdl", "dali"]
loader_records.bars(ways)

# %% [markdown]
# *The figure: a bar for each library. FFCV's raw file is far ahead, then come its mixture and its JPEG. DALI is about
# 1.2 times as fast as the usual loader, LitData and Grain are as fast as that, three are slower than it. (These factors
# are medians over rounds in which all took turns, not quotients of the bars.)*
#
# All but FFCV and DALI call PIL here, so the figure compares how they deliver images, not what they could do with
# another decoder, or with a remote store. Where to look:
#
# - data in an object store: [WebDataset](https://github.com/webdataset/webdataset),
#   [Streaming](https://docs.mosaicml.com/projects/streaming), [LitData](https://github.com/Lightning-AI/litdata), and
#   section 12;
# - text: section 13 needs no library;
# - decoding on the GPU: [DALI](https://docs.nvidia.com/deeplearning/dali/user-guide/docs/);
# - threads with decoders of their own: [SPDL](https://facebookresearch.github.io/spdl); JAX:
#   [Grain](https://google-grain.readthedocs.io);
# - data that change every day, or augmentations that must stay torchvision's: the usual loader, with section 3;
# - a step that does not wait: none of this.

# %% [markdown] tags=["deeper"]
# ## 9. A `.beton` file, to the last byte · deeper
#
# We know the format if a writer of our own makes the same file, byte for byte. Two rules decide where an image goes: a
# new page is opened when the next image does not fit, and each page is written whole. An image's record has 13 bytes
# without gaps; the label after it starts at a multiple of 8 bytes, as in a C struct.

# %% tags=["deeper"] jupyter={"source_hidden": true}
from course_utils.programs import folded

folded("A writer and a reader with NumPy", by_hand.write_beton, Beton)

# %% tags=["deeper"]
ours = Path(folder.name) / "ours.beton"
by_hand.write_beton(small, ours)
file = Beton(ours)
for field in file.fields:
    print(f"field {field['name'].decode()!r} of type {field['type']}")
for name, row in (("record of sample 5", file.samples[5]), ("its piece", file.table[5])):
    print(f"{name}:", dict(zip(row.dtype.names, row.tolist(), strict=True)))
if not without:
    assert ours.read_bytes() == files["small"].read_bytes()
    print(f"{ours.stat().st_size:,} bytes, all equal to those of FFCV's writer")

# %% [markdown] tags=["deeper"]
# In the other direction, FFCV's Loader reads our file and returns what our reader finds.

# %% tags=["deeper"]
if not without:
    image = [rgb_image.SimpleRGBImageDecoder(), ToTensor()]
    label = [IntDecoder(), ToTensor(), Squeeze(1)]
    plain = {"image": image, "label": label}
    (batch,) = Loader(str(ours), batch_size=24, num_workers=1, pipelines=plain)
    assert np.array_equal(batch[0], [file.image(i) for i in range(24)])
    assert np.array_equal(batch[1], file.samples["label"])
    print(f"{tuple(batch[0].shape)} pixels and 24 labels equal")

# %% [markdown] tags=["deeper"]
# > **Misconception.** "FFCV is fast because `.beton` is a fast binary format." It is a plain one, as you see. The gain
# > has four causes: what is stored in it, the library that decodes and resizes, threads that share one memory, and
# > compiled code (section 11).

# %% [markdown] tags=["deeper"]
# ## 10. Two caches, measured · deeper
#
# First the page cache, in a process of its own. The file is dropped from the cache, then read twice in random order.
# Linux counts the bytes that come from the disk, and the memory that is the process's *own*, to which mapped files do
# not belong. (If the temporary folder is in memory, nothing comes from a disk at all.)


# %% tags=["deeper"]
def through_page_cache(path, orders):
    """Read epochs of a mapped file: bytes from the disk in each, and own memory added by all."""
    page_cache.drop_from_cache(path)
    own, from_disk, file = page_cache.own_memory(), [], Beton(path)
    for order in orders:
        start = page_cache.bytes_from_disk()
        for number in order:
            file.image(number).max()
        from_disk.append(page_cache.bytes_from_disk() - start)
    return from_disk, page_cache.own_memory() - own


copied = Path(folder.name) / "copied.beton"  # no process has mapped it, so it can be dropped
copied.write_bytes(files["raw"].read_bytes())
twice = [orders["random"]] * 2
from_disk, own = launch(through_page_cache, copied, twice, world_size=1)[0]

# %% tags=["deeper", "nbval-ignore-output"]
print(f"the file has {copied.stat().st_size / 1e6:.0f} MB")
print("from the disk, by epoch:", *(f"{size / 1e6:.0f} MB" for size in from_disk))
print(f"own memory added: {own / 1e6:.0f} MB")

# %% [markdown] tags=["deeper"]
# The first epoch reads the file from the disk, but not all of its unused space. The second finds it in memory. None of
# it is the process's own, so the system can take it back at any moment.
#
# Now the process cache, with the parts of FFCV that fetch pages. It should take as many pages as the model of section 6
# says:

# %% tags=["deeper"]
if not without:
    from lessons.ffcv_data_loading.ffcv import read_through_process_cache
for name, order in orders.items():
    held = page_cache.pages_held(order, page_of, 8)
    print(f"{name:13}{held:3} pages of 2 MiB, {held * 2 * 2**20 / 1e6:4.0f} MB (modelled)", end="")
    if not without:
        slots, taken = read_through_process_cache(files["raw"], order, 8)
        print(f"; FFCV took {taken / 1e6:.0f} MB", end="")
        assert slots == held
    print()

# %% [markdown] tags=["deeper"]
# In random order the process cache holds the whole file, in memory that no other process can use. It is made for
# quasi-random. It asks for all its memory when the epoch starts, so a shortage shows at once. The page cache fails
# silently: it drops pages, and only the epoch takes longer. Watch the bytes that are read from the disk in the *second*
# epoch (`iostat`, or `read_bytes` in `/proc/<pid>/io`, as here). There should be none. Jobs on one machine share its
# page cache, so one job's data can push out the other's.
#
# How fast is it if only a part of the file is in memory? *Modelled*: the disk of section 5 feeds the eight A100s of the
# beginning with raw images of 256 pixels (169.8 GB) in random order.

# %% tags=["deeper"]
each = 169.8e9 / 1_281_167  # bytes of an image
disk = 6_870 * each  # bytes/s
print(f"the disk gave {disk / 1e9:.2f} GB/s")
for share in (0, 0.5, 0.7, 0.9, 1):
    rate = min(172_801, disk / each / (1 - share) if share < 1 else np.inf)
    print(f"{share:4.0%} in memory ({share * 169.8:5.1f} GB): {rate:9,.0f} images/s")
wanted = 16 * 1_281_167 / (14.9 * 60)
print(f"the eight A100s want {wanted:,.0f}: {1 - disk / each / wanted:.0%} in memory")

# %% [markdown] tags=["deeper"]
# So 70 % in memory is enough for them, because the disk has to deliver only the rest.
#
# The quasi-random order does not work with `distributed=True` (FFCV raises NotImplementedError). What works is to give
# each rank pages of its own with `indices=`. All ranks need equally many samples, or one runs out of batches while the
# others wait (lesson 04). The price: each rank sees the same part of the data in every epoch.
#
# With several machines, each of them needs the file. On one with eight GPUs and two processors, a rank should load on
# the cores next to its GPU, from the memory next to these: `torchrun --numa-binding=node` (torch 2.13).

# %% [markdown] tags=["deeper"]
# ## 11. Compiled, and in threads: where the factor comes from · deeper
#
# FFCV changes four things at once: the library that decodes and resizes, what is stored, threads in place of processes,
# and a loop that is compiled. The benchmark changes them one after the other.
#
# **Predict**: which change gains most?

# %% tags=["deeper"]
changes = ["OpenCV instead of PIL", "pixels instead of JPEG", "threads instead of processes"]
changes += ["FFCV's compiled loop"]
most = predict("gains most", changes)

# %% tags=["deeper"]
chain = ["dataloader", "dataloader_cv2", "dataloader_raw", "threads_raw", "ffcv_raw"]
gains = {}
print("recorded: median gain of nine rounds, with the best number of workers")
for change, base, way in zip(changes, chain[:-1], chain[1:], strict=True):
    gains[change], low, high = loader_records.gain(way, base)
    print(f"{change:28} x {gains[change]:.2f} ({low:.2f} to {high:.2f})")
for way in ("ffcv_raw", "ffcv_jpeg"):
    print(f"{loader_records.best_workers(way)[0]:28} x {loader_records.gain(way)[0]:.2f} at once")
loader_records.bars(chain)

# %% tags=["deeper"] jupyter={"source_hidden": true}
most.compare(max(gains, key=gains.get))

# %% [markdown] tags=["deeper"]
# **Compare.** Storing pixels gains most, the library comes second; threads and the compiled loop gain about a fifth
# each. With JPEG images the largest gain is lost.
#
# *The figure: five bars, each longer than the one before: the usual loader with PIL, then OpenCV, then pixels, then
# threads, then FFCV.*
#
# Why do threads help? In the usual build of Python a lock lets only one thread at a time run Python code, whatever the
# number of cores. Therefore the usual loader has worker *processes*, which must pass their batches to the training
# process. FFCV compiles its pipeline with **Numba**, a just-in-time compiler (**JIT**) for functions on arrays and
# numbers. Compiled code does not need the lock, so FFCV's threads run at the same time and write straight into the
# batch.

# %% tags=["deeper"]
if not without:
    loader, before = ffcv_loader(files["raw"]), loading.processes()
    measure(loader)
    assert loading.processes().keys() <= before.keys()
    print("FFCV starts no process: its workers are threads")

# %% tags=["deeper"]
print("recorded: what the compiled loop gains")
for workers in (1, 2):
    times, low, high = loader_records.gain("ffcv_raw", "threads_raw", workers)
    print(f"{workers} in parallel  x {times:.2f} ({low:.2f} to {high:.2f})")

# %% [markdown] tags=["deeper"]
# With one thread the compiled loop gains nothing, because most of the time goes into OpenCV's C++ code in both cases.
# With two it gains a sixth, which fits the lock: threads that run Python wait for each other. So compiling is not what
# makes FFCV's operations fast. It makes *yours* fast.
#
# ### An operation of your own
#
# An **operation** declares the shape and type of its result and the memory it needs for it, and returns a function that
# FFCV compiles. This one makes all images grey, pixel by pixel, which one avoids in plain Python. (77, 150 and 29 are
# 256 times the weights of red, green and blue in brightness, by ITU-R BT.601.)


# %% tags=["deeper"]
def to_gray(images, out):
    for i in range(len(images)):
        for y in range(images.shape[1]):
            for x in range(images.shape[2]):
                red, green, blue = images[i, y, x]
                out[i, y, x, :] = (77 * int(red) + 150 * int(green) + 29 * int(blue)) >> 8
    return out[: len(images)]


pixels = np.stack([image for image, _ in small[:1]])
python_ms = loading.core_ms(lambda _: to_gray(pixels, np.empty_like(pixels)), [0])
expected = (pixels.astype(int) @ [77, 150, 29]) >> 8
assert np.array_equal(to_gray(pixels, np.empty_like(pixels))[..., 0], expected)

# %% tags=["deeper"]
if not without:
    from dataclasses import replace

    from ffcv.pipeline.allocation_query import AllocationQuery
    from ffcv.pipeline.compiler import Compiler
    from ffcv.pipeline.operation import Operation

    class Gray(Operation):
        """Grey images: uint8 (b, h, w, 3) to the same."""

        def declare_state_and_memory(self, previous):  # memory of one image; FFCV adds the batch
            return replace(previous, jit_mode=True), AllocationQuery(previous.shape, previous.dtype)

        def generate_code(self):
            return to_gray

    gray = {"image": [rgb_image.SimpleRGBImageDecoder(), Gray(), ToTensor()], "label": None}
    gray_loader = Loader(str(files["small"]), batch_size=24, num_workers=1, pipelines=gray)
    first, later = (24 / measure(gray_loader, epochs=1).rate for _ in range(2))  # seconds
    assert all(np.array_equal(after[0, :, :, 1], expected[0]) for (after,) in gray_loader)
    compiled = Compiler.compile(to_gray)
    compiled_ms = loading.core_ms(lambda _: compiled(pixels, np.empty_like(pixels)), range(20))
    print("FFCV compiled the operation; equal to NumPy's")

# %% tags=["deeper", "nbval-ignore-output"]
print(f"an image of 192 x 192 pixels: Python {python_ms:.0f} ms")
if not without:
    print(f"compiled {compiled_ms:.2f} ms, {python_ms / compiled_ms:,.0f} times as fast")
    print(f"first epoch of 24 images {first:.2f} s, the second {later:.3f} s")
times = loader_records.compile_seconds()
print("recorded: seconds from the Loader to its first batch, two threads, raw file")
print(f"  FFCV on its own, in every process  {times['without_fixes_s']:5.1f}")
print(f"  the first time on a machine        {times['cold_s']:5.1f}")
print(f"  in the next process                {times['next_process_s']:5.1f}")

# %% [markdown] tags=["deeper"]
# The price is the first epoch, in which the operation is compiled. On its own FFCV compiles everything in each process,
# so eight ranks compile the same code eight times at once; `lessons.ffcv_data_loading.ffcv` keeps the compiled code in
# files. If the first step of a job seems to hang, it may be compiling.

# %% [markdown] tags=["deeper"]
# ## 12. Shards over a network · deeper
#
# An object store answers each request after some delay and then sends at some bandwidth: the α–β model of lesson 01,
# with a large α. Therefore one asks for few, large files. The simplest such file is a tar archive of a thousand samples
# or more, a **shard**, read from its beginning to its end; that is WebDataset's format. The store here is emulated: a
# folder, with a delay of 20 ms per request and 100 MB/s. We read 120 images of about 30 kB, first with a request for
# each, then as three shards.

# %% tags=["deeper"]
import tarfile

store_folder = Path(folder.name) / "store"
store_folder.mkdir()
mixed = np.random.default_rng(0).permutation(count)[:120]  # shuffled before it is written
for shard in range(3):
    with tarfile.open(store_folder / f"{shard}.tar", "w") as tar:
        for number in mixed[40 * shard : 40 * (shard + 1)]:
            tar.add(train.paths[number], f"{number:06}.jpg")


def stream(store, names):
    """Number and JPEG of each sample, shard after shard."""
    for name in names:
        with tarfile.open(fileobj=io.BytesIO(store.read(name))) as tar:
            for member in tar:
                yield int(Path(member.name).stem), tar.extractfile(member).read()


# %% tags=["deeper"]
single = loading.SlowStore(train.folder, wait=0.02, bandwidth=100e6)
one_by_one = {n: single.read(train.paths[n].relative_to(train.folder)) for n in mixed.tolist()}
sharded = loading.SlowStore(store_folder, wait=0.02, bandwidth=100e6)
from_shards = dict(stream(sharded, ["2.tar", "0.tar", "1.tar"]))
assert from_shards == one_by_one
for name, store in (("files", single), ("shards", sharded)):
    predicted = store.requests * 0.02 + store.bytes / 100e6
    print(f"{name:7}{store.requests:4} requests, predicted {predicted:.2f} s")

# %% tags=["deeper", "nbval-ignore-output"]
print(f"measured: files {single.seconds:.2f} s, shards {sharded.seconds:.2f} s")

# %% [markdown] tags=["deeper"]
# The shards have a few more bytes (tar pads each file), but need a fortieth of the requests. The price is the order:
# inside a shard samples come as they were written. So one shuffles the *order of the shards*, and passes the samples
# through a **buffer**: each one that arrives takes the place of a random one, which leaves. How well does that mix?


# %% tags=["deeper"]
def through_buffer(samples, size, rng):
    """The samples in another order, with `size` of them in memory."""
    buffer = []
    for sample in samples:
        buffer.append(sample)
        if len(buffer) > size:
            yield buffer.pop(rng.integers(size))
    rng.shuffle(buffer)
    yield from buffer


for written, arriving in (("by class", np.arange(count)), ("shuffled", rng.permutation(count))):
    for size in (1, 50, 200):
        order = [*through_buffer(arriving, size, np.random.default_rng(0))]
        assert sorted(order) == [*range(count)]
        mix = np.mean([len({*labels[order[i : i + 8]].tolist()}) for i in range(0, count, 8)])
        print(f"written {written}, buffer of {size:3}: {mix:.1f} classes in a batch of 8")

# %% [markdown] tags=["deeper"]
# A buffer mixes no more than it holds, so shuffle before you write the shards. Under DDP each rank, and each of its
# workers, takes shards of its own, so there must be at least as many shards as ranks × workers. Two libraries do all
# this, and more, such as a cache on a local disk:
#
# ```python
# shards = wds.WebDataset(urls, shardshuffle=8, nodesplitter=wds.split_by_node)
# shards.shuffle(200).to_tuple("jpg", "cls").map_tuple(decode_and_augment, int).batched(64)
# StreamingDataset(remote="s3://bucket/set", local="/nvme/set", batch_size=64, shuffle=True)
# ```
#
# Without `nodesplitter`, WebDataset raises a ValueError as soon as there are two ranks (1.0.2). With it, a rank gets
# every N-th shard, in each epoch the same ones. Where these hold unequal numbers of samples, one rank runs out of
# batches while the others wait.
#
# WebDataset reads tar files as they come. Streaming's shards have an index, so it can compute one global order: it
# promises the same samples in the same order on any number of GPUs, and to resume in the middle of an epoch from the
# number of samples ([its documentation](https://docs.mosaicml.com/projects/streaming)). The next section shows what
# such a promise takes.

# %% [markdown] tags=["deeper"]
# ## 13. Text: packing, shards, exact resume · deeper
#
# Data for language models look different. A token is two or four bytes and needs no decoding, and the whole set is one
# long array in a few files, read by `np.memmap` as in section 4. Three questions remain: how documents of all lengths
# fill rows of equal length, in which order rows come, and how a run goes on after a crash without losing or repeating
# any.
#
# ### Packing
#
# Each paragraph of the course's text, *Alice in Wonderland*, stands for a document, each byte for a token. A document
# has 175 tokens on average, and a row 256. **Predict**: if each document gets rows of its own, and padding fills them
# up, which share of the tokens is real?

# %% tags=["deeper"]
real = predict("real tokens", unit="%")

# %% tags=["deeper"]
from course_utils.programs import TEXT

END, length = 0, 256
documents = [[*part, END] for part in TEXT.read_bytes().split(b"\n\n") if part.strip()]
tokens = np.concatenate([np.array(document, np.uint16) for document in documents])
padded_rows = sum(-(-len(document) // length) for document in documents)
packed = tokens[: len(tokens) // length * length].reshape(-1, length)
print(f"{len(documents)} documents, {len(tokens):,} tokens")
print(f"padded: {padded_rows} rows, {len(tokens) / (padded_rows * length):.0%} of the tokens real")
print(f"packed: {len(packed)} rows, all real")

# %% tags=["deeper"] jupyter={"source_hidden": true}
real.compare(round(100 * len(tokens) / (padded_rows * length)))

# %% [markdown] tags=["deeper"]
# **Compare.** 54 %, less than 175 / 256 (68 %), because documents longer than a row take two rows or more.
#
# **Packing** puts documents one after the other, each followed by an end token, and cuts the result into rows. No token
# is wasted, but a row now holds pieces of several documents, and attention reaches from one into another. Therefore
# Llama 3 uses a **document mask** ([section 3.2 of its report](https://arxiv.org/abs/2407.21783)), which matters most
# for long rows. With the mask, a document in a packed row gets exactly what it would get alone:

# %% tags=["deeper"]
attention = torch.nn.functional.scaled_dot_product_attention
row = max(packed, key=lambda row: np.sum(row == END))  # the one with most documents
document = torch.from_numpy(np.cumsum(row == END) - (row == END))  # an end belongs to its document
causal = torch.ones(length, length).tril().bool()
mask = causal & (document[:, None] == document)
generator = torch.Generator().manual_seed(0)
q, k, v = torch.randn(3, 1, 1, length, 16, generator=generator).unbind()
together = attention(q, k, v, attn_mask=mask)
for number in document.unique():
    own = document == number
    alone = attention(q[:, :, own], k[:, :, own], v[:, :, own], is_causal=True)
    assert torch.allclose(together[:, :, own], alone, atol=1e-6)
kept = mask.sum() / causal.sum()
print(f"{document.max() + 1} documents in the row; the mask keeps {kept:.0%} of the pairs")

# %% [markdown] tags=["deeper"]
# In training one does not build the mask. FlashAttention's `varlen` functions take the documents' lengths instead,
# PyTorch's FlexAttention a function that says which pairs to keep, and both skip the rest.
#
# ### An order that needs no memory of the past
#
# To resume exactly, a run has to know which rows it has had. The simplest way is to make the order a *function*: seed
# and epoch give a permutation, and the number of samples since the beginning gives the place in it. Then the state of
# the loader is one number, and it does not depend on how many ranks there are. This is what
# [scripts/train.py](../scripts/train.py) does:

# %% tags=["deeper"]
from course_utils.programs import SCRIPTS, excerpt

print(excerpt(SCRIPTS / "train.py", "def order(windows", "permutation(windows)"))


def rows_of(step, rank, ranks, whole_batch, seed=0):
    """Numbers of the rows that a rank takes in a step; `whole_batch` is that of all ranks."""
    share, count = whole_batch // ranks, len(packed)
    begin = step * whole_batch + rank * share
    return [
        np.random.default_rng([seed, n // count]).permutation(count)[n % count].item()
        for n in range(begin, begin + share)
    ]


def run(steps, ranks):
    return [n for step in steps for rank in range(ranks) for n in rows_of(step, rank, ranks, 8)]


steps = len(packed) // 8 + 3  # into the second epoch
whole = run(range(steps), ranks=1)
assert sorted(whole[: len(packed)]) == [*range(len(packed))]
assert run(range(5), ranks=4) + run(range(5, steps), ranks=2) == whole
print("4 ranks, stopped after 5 steps, resumed on 2: the same rows in the same order as one rank")

# %% [markdown] tags=["deeper"]
# A loader with workers has read batches ahead when a checkpoint is written, so save the number of samples *trained
# on*, not read. Where the order is no function of a number (a shuffle buffer as in section 12, packing on the fly),
# the state has to hold the buffer too: torchdata's
# [`StatefulDataLoader`](https://github.com/meta-pytorch/data) collects such states from its workers, for each rank by
# itself, so it resumes on the same number of ranks.

# %% [markdown] tags=["deeper"]
# ## 14. Mistakes that make no noise · deeper
#
# Each of these mistakes runs without an error. **Predict** the first: of 500 samples in batches of 64, how many does an
# FFCV loader with default options give in an epoch?

# %% tags=["deeper"]
given = predict("samples in an epoch of 500, with default options")

# %% tags=["deeper"]
if not without:
    quick = {"image": None, "label": [IntDecoder(), ToTensor(), Squeeze(1)]}
    default = Loader(str(files["raw"]), batch_size=64, num_workers=1, pipelines=quick)
    kept = [batch for (batch,) in default]
    total = sum(map(len, kept))
    print(f"{total} of {count} samples in an epoch")

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert without or total == count // 64 * 64
given.compare(count // 64 * 64)

# %% [markdown] tags=["deeper"]
# **Compare.** 448: the last batch would not be full, and `drop_last` is True by default. So samples are lost in each
# epoch, and in validation some are never tested. Set `drop_last=False`.
#
# Three more:

# %% tags=["deeper"]
if not without:
    buffers = len({batch.data_ptr() for batch in kept})
    wrong = sum(not np.array_equal(b, labels[64 * i : 64 * i + 64]) for i, b in enumerate(kept))
    print(f"1. {len(kept)} batches share {buffers} buffers: {wrong} of those kept are overwritten")

    first = [next(iter(ffcv_loader(files["raw"], seed=3)))[0].clone() for _ in range(2)]
    print(f"2. the same seed twice, the same pixels: {torch.equal(*first)}")
    assert not torch.equal(*first)
    going, resumed = (ffcv_loader(files["raw"], seed=3, pipelines=quick) for _ in range(2))
    measure(going, epochs=1)
    assert not np.array_equal(resumed.next_traversal_order(), going.next_traversal_order())
    resumed.next_epoch = 1
    assert np.array_equal(resumed.next_traversal_order(), going.next_traversal_order())
    print("3. a loader that is made anew starts with the order of epoch 0")

# %% [markdown] tags=["deeper"]
# 1. A batch is a view of one of a few buffers, which the loader fills again. Use it at once, or `clone()` it.
# 2. `seed` is for the order only. Random crops and flips have other generators, one in each thread.
# 3. A run that is resumed repeats the orders it has already used. Set `loader.next_epoch = epoch` after loading a
#    checkpoint.
#
# Two more happen when the file is written: the writer decodes JPEG files and compresses them again with quality 90,
# whatever quality they had, and its mode `smart` stores plain pixels unless it gets a `smart_threshold`.
#
# Others hang for ever, unless something like `lessons.ffcv_data_loading.ffcv` turns them into errors. One is a grey
# image in the writer, which needs `convert("RGB")`. Another is a compiled operation after `ToTensor`:

# %% tags=["deeper"]
if not without:
    from ffcv.transforms import NormalizeImage

    from course_utils import expect_error
    from lessons.ffcv_data_loading.ffcv import FIXES

    normalise = NormalizeImage(np.full(3, 127.0), np.full(3, 64.0), np.float32)
    late = [rgb_image.CenterCropRGBImageDecoder((64, 64), 1), ToTensor(), normalise]
    with expect_error(ValueError):
        ffcv_loader(files["raw"], pipelines={"image": late, "label": None})
    print("\nWhat the course repairs in FFCV, and what happens without it:")
    for fix in FIXES:
        print(f"- {fix.why.splitlines()[0]}".replace("``", ""))

# %% [markdown]
# ## Recap, with the numbers of this run

# %% tags=["nbval-ignore-output"]
print(f"cores for {gpu_rate:,} images/s:")
for name, milliseconds in core_times.items():
    print(f"  {name:17}{gpu_rate * milliseconds / 1e3:.1f}")
print(f"a large photograph: {full:.1f} ms of a core, with draft {cheap:.1f} ms")

# %% [markdown]
# How your predictions came out:

# %% tags=["nbval-ignore-output"]
predictions()

# %% [markdown]
# - Measure the loader alone, the step alone, and both; the slower one sets the pace if the loader works ahead. The
#   number of busy cores shows whether the loader computes or waits.
# - Decode less (`draft`), with a faster library, or only once (raw).
# - Raw is fast from memory, JPEG from a slow disk. The order decides how many pages must be in memory.
# - All ranks shuffle with one seed and the number of the epoch. The page cache is shared by all ranks of a machine.
#
# **Now you can answer**
#
# 1. Your step waits for 60 % of the time, and the cores are idle. What do you change?
# 2. Photographs are 2,000 pixels wide, crops 224. What do you try first?
# 3. The raw file has 170 GB, the machine 128 GB. What do you store?
# 4. Which seed may differ between ranks, and which must not?
#
# <details><summary>Answers</summary>
#
# 1. More reads in flight, and fewer, larger files (sections 2 and 12).
# 2. `draft`, for the size of the crop (section 3).
# 3. JPEG, or a mixture that just fits: of the raw file, at least a quarter would come from the disk in each epoch
#    (sections 5, 6, 10).
# 4. That of augmentations may, that of the shuffle must not (section 7).
# </details>
#
# **What to take to work:** `measure` of `lessons.ffcv_data_loading.loading`, before anything else;
# `decode_and_augment`; and [scripts/train.py](../scripts/train.py), whose log says how long each rank waits for data.
#
# **Exercises:** [exercises/15_ffcv_data_loading](../exercises/15_ffcv_data_loading_exercises.ipynb). **Next:**
# [16 multi node](16_multi_node.ipynb), which leaves this machine.
#
# **Worth reading**
# - G. Leclerc, A. Ilyas, L. Engstrom, S. M. Park, H. Salman, A. Madry, *FFCV: accelerating training by removing data
#   bottlenecks*, 2023, [arXiv 2306.12517](https://arxiv.org/abs/2306.12517): the design, and what each part gains.
# - FFCV's [performance guide](https://docs.ffcv.io/performance_guide.html): which cache and order for which memory.
