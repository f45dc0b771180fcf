# %% [markdown]
# # Exercises 15 · Is the GPU waiting for data, and how does FFCV fix that?
#
# Seven exercises on [15 Data loading with FFCV](../notebooks/15_ffcv_data_loading.ipynb). Only the fifth needs ranks,
# and none needs FFCV or a fast disk. All of them take about 160 minutes.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | the header of a `.beton` file, parsed | 2 of 5 | 20 |
# | 2 | one sample, and not a byte more | 3 of 5 | 25 |
# | 3 | a random order for a small memory | 4 of 5 | 30 |
# | 4 | the bottleneck of a training job | 3 of 5 | 25 |
# | 5 | shards for DDP, without duplicates | 3 of 5 | 25 |
# | 6 | rows of text that resume exactly | 3 of 5 | 20 |
# | 7 | an epoch of ImageNet on paper | 2 of 5 | 15 |
#
# 2 is built from 1; the others stand alone. *Follows* on each card names the section of the lesson to look things up
# in; that of 6 is in the lesson's deeper half.
#
# **If you do only these:** 4, 5 and 6.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/15_ffcv_data_loading_solutions.ipynb).
#
# **What a check does.** In Exercises 1 and 2 it hands you a file that counts the bytes you read. In 3 it takes any
# order with the properties asked for. In 4 the jobs run on a clock of their own, so that the answer is the same on a
# busy machine. In 5 it collects the batches of all ranks, and in 6 it asks for steps in any order. A call that does
# not end is stopped: after 20 seconds, on ranks after 5.

# %% tags=["parameters"]
import io

import numpy as np
import torch.distributed as dist

from course_utils import launch
from lessons.ffcv_data_loading import check, figures
from lessons.ffcv_data_loading.check import JOBS, STAGES, Job

WORLD_SIZE = 4  # ranks of the demonstration; the checks choose their own

# %% [markdown]
# ---
# ## Exercise 1 · The header
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 20 | 15, A file made to be read | 24 bytes, and 1041 for each field |
#
# A `.beton` file begins with 24 bytes, little endian and without gaps:
#
# | bytes | what |
# |---|---|
# | 2 | version, 2 today |
# | 2 | number of fields |
# | 4 | page size |
# | 8 | number of samples |
# | 8 | where the allocation table begins |
#
# A **descriptor** follows for each field: 1 byte with the type (1 is an integer, 2 an image), 16 bytes with the name,
# filled up with zeros, 1024 bytes with arguments. Parse them. `file` is open for reading in binary mode and has
# `read`, `seek` and `tell`. It counts what you read.


# %%
# {{read_header}}


# %%
check.read_header(read_header)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# After `file.seek(0)`, `file.read(24)` returns the first 24 bytes. `struct.unpack("<HHIQQ", …)` or
# `np.frombuffer(…, dtype)` make numbers of them.
# </details>
# <details><summary>Hint 2</summary>
#
# Now you know the number of fields: read 1041 bytes for each. A structured dtype takes a descriptor apart:
# `np.dtype([("type", "u1"), ("name", "S16"), ("arguments", "V1024")])`.
# </details>
# <details><summary>Hint 3</summary>
#
# NumPy leaves the zeros at the end of an `S16` out; with struct, `.rstrip(b"\0")` does. `.decode()` makes text.
# </details>
# <details><summary>What are the arguments for?</summary>
#
# A field may keep there what its decoder needs and what is the same for all samples, such as the shape of an array.
# Images and integers leave it empty.
# </details>

# %% [markdown]
# When your function passes, use it on a small file, the same to the last byte as FFCV writes it.

# %%
small = io.BytesIO(check.own_file())
header = read_header(small)
for key, value in header.items():
    print(f"{key:9} {value}")
first_page = header["page_size"]  # the pages begin at the next multiple of the page size
print(f"\n{(header['table'] - first_page) // header['page_size']} page with samples")
print(f"{len(small.getvalue()) - header['table']} bytes of allocation table, 24 a sample")

# %% [markdown]
# ---
# ## Exercise 2 · One sample
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 15, A file made to be read | header, descriptors, one row, the pixels |
#
# Behind the descriptors lies the **data table**, one row for each sample. A row is an *aligned* structure of its
# fields, in their order:
#
# | type | bytes | what |
# |---|---|---|
# | 0 | 8 | a float64 |
# | 1 | 8 | an int64 |
# | 2 | 13, packed | mode (1), width (2), height (2), pointer (8) |
#
# All images here have mode 1: raw pixels of 3 bytes, row by row, at `pointer`, which counts from the beginning of the
# file. Return one image and its label. There is one image field and one integer field, in any order, under any name;
# a float may stand between them.


# %%
# {{read_sample}}


# %%
check.read_sample(read_sample)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Make one dtype for a row: `np.dtype([…], align=True)`. The image's own dtype is packed, so without `align`.
# </details>
# <details><summary>Hint 2</summary>
#
# The data table begins at 24 + 1041 · fields. Row `index` begins `index` times the row's `itemsize` later.
# </details>
# <details><summary>Hint 3</summary>
#
# Numbers out of the row are NumPy's, of 2 bytes: `int(height) * int(width) * 3` does not overflow. The shape of the
# image is (height, width, 3).
# </details>
# <details><summary>And a JPEG?</summary>
#
# Its length is not in the row: it is the size in the allocation table, which FFCV sorts by address when it opens the
# file, and searches for every read.
# </details>

# %%
images = [read_sample(small, index) for index in range(3)]
for index, (image, label) in enumerate(images):
    print(f"sample {index}: image {image.shape}, first pixel {image[0, 0].tolist()}, label {label}")

# %% [markdown]
# ---
# ## Exercise 3 · A random order for a small memory
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 30 | 15, Which order, and how much memory? | the widest window that fits |
#
# The file does not fit in memory; `cap` of its pages do. Nobody should wait for the disk, so pages are loaded ahead: a
# page is **in memory** from `ahead` samples before the first of its samples that an epoch reads, to the last one. It is
# **open** from the first of these samples to the last. (The lesson counts what is ahead in batches, this exercise in
# samples.) If more pages are wanted than fit, one leaves early and is loaded again later.
#
# The lesson's **quasi-random** order has a fixed window of open pages and takes as much memory as that needs. Here the
# memory is given. Make an order that uses it well:
#
# - every sample once, and never more than `cap` pages in memory, those loaded ahead included. Then each page is loaded
#   once, and all accesses but the first to each page **hit**: they find their page in memory;
# - as random as a window allows: on average at least about as many pages are open as in the widest window that keeps to
#   `cap` with the same seed. Chance decides which pages are open together, which of them is next, and which of its
#   samples;
# - the same for the same seed, another one for another seed. Each epoch calls with its own.
#
# Pages may hold different numbers of samples, some numbers of pages may be missing, and neighbours may lie on different
# pages. `cap` is at least 1, and at least 2 if `ahead` is not 0; there may be fewer pages than that. `ahead` is less
# than the number of samples of the emptiest page: so one open page at a time always fits. You may begin with what the
# lesson calls, `page_cache.quasi_random`.
#
# **Predict**: with pages loaded ahead, is a window of `cap - 1` pages enough?


# %%
# {{quasi_random}}


# %%
check.quasi_random(quasi_random)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First the case `ahead = 0`, in which a window of `cap` pages is right. Does yours treat pages that hold different
# numbers of samples, and neighbours on different pages? Let one generator, made from the seed, draw everything.
# </details>
# <details><summary>Hint 2</summary>
#
# Then count. For a given order, find the first and the last place of each page, once for each page. In how many of
# these spans, each made longer by `ahead` at its beginning, does a step lie? The largest of these numbers must be at
# most `cap`.
# </details>
# <details><summary>Hint 3</summary>
#
# The window that fits depends on how often pages come to their end at nearly the same time, so on chance. Try windows
# from `cap` downwards, until the order fits.
# </details>
# <details><summary>Answer to the prediction</summary>
#
# For few seeds. When a page ends, its successor is in memory already, and several may end at about the same time. With
# 32 pages of 24 samples, of which 9 fit, loaded 12 samples ahead, the widest window is 7 or 6 pages for most seeds.
# </details>
# <details><summary>Is there a shorter way?</summary>
#
# Take some pages at a time from the shuffled pages, and shuffle all samples of such a group. With `ahead = 0` that is
# as good. But all pages of a group change at about the same time, and loading ahead needs room for nearly two groups.
# </details>
# <details><summary>Is there a better way?</summary>
#
# Open a page only when it could have been loaded: the pages open now, and those whose last sample is among the `ahead`
# samples read last (they were in memory when loading would begin), must be fewer than `cap`. In the case of the
# prediction this has 7.8 pages open on average, the widest window that fits 6.3. Where no page is open and none may be
# opened, this way is stuck, with `cap = 2` nearly always: then take the window for this seed.
# </details>
# <details><summary>What does FFCV do?</summary>
#
# It has a fixed window of 2 · batch_size pages and loads three batches ahead. Then its process cache counts, as you
# did, how many pages that needs, and takes as much memory.
# </details>

# %% [markdown]
# When your function passes, look at it. The hit rate is that of a memory for `cap` pages that loads a page when it is
# needed. When it is full, the page that is needed latest goes: no memory can do better, and only one that knows the
# order can do that. (FFCV's process cache knows it, but never lets a page go early: with too little memory it fails.)

# %%
pages, cap = np.repeat(np.arange(32), 24), 4
orders = {
    "sequential": np.arange(len(pages)),
    "quasi-random, mine": quasi_random(pages, cap, ahead=0, seed=0),
    "random": np.random.default_rng(0).permutation(len(pages)),
}
accesses = {name: pages[order].tolist() for name, order in orders.items()}
notes = {name: f"{check.hit_rate(read, cap):.0%} hits" for name, read in accesses.items()}
reads = {name: list(enumerate(read)) for name, read in accesses.items()}
figures.page_accesses(reads, "simulated: 32 pages, of which 4 fit in memory", notes=notes)

# %% [markdown]
# *The figure: three panels, page against sample in the order of reading. Sequential is a staircase. Quasi-random has
# short horizontal strokes, four at any time, at pages all over the file. Random is a cloud, and about one access in
# three hits. It would be one in eight in a memory that does not know what comes.*
#
# And with pages loaded ahead:

# %%
read = pages[quasi_random(pages, 9, ahead=12, seed=0)]
spans = [np.flatnonzero(read == page)[[0, -1]] for page in range(32)]
for name, ahead in (("open", 0), ("in memory", 12)):
    held = [sum(a - ahead <= step <= b for a, b in spans) for step in range(len(read))]
    print(f"9 pages fit: {np.mean(held):.1f} {name} on average, {max(held)} at most")

# %% [markdown]
# ---
# ## Exercise 4 · The bottleneck of a training job
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 15, Who waits for whom? | the stage, and the waiting within 2 points |
#
# A batch is read, decoded, augmented and copied, and then used in a training step. Three jobs are given, A, B and C.
# They run on a clock of their own: `job.clock()` is in seconds, and calling the stages moves it. It does not matter
# what else your machine does. Decoding and augmentation share the job's threads. In A, B and C the loader works in the
# background, some batches ahead of the step. The check has jobs of its own, too, some with the loader in the
# foreground: it works when it is asked for a batch.
#
# | | what it does |
# |---|---|
# | `job.batches(n)` | starts a loader, which compiles: an iterator over n batches |
# | `job.step(batch)` | one training step |
# | `job.alone(stage)` | one stage on one batch, in one thread, with nothing beside it |
# | `job.halved(stage)` | a new job in which one of `STAGES` takes half as long |
#
# The **bottleneck** is the stage which, twice as fast, makes the whole run fastest. A loader compiles its code before
# its first batch, which does not count: measure from some later batch of the same loader on.


# %%
# {{find_bottleneck}}


# %%
check.find_bottleneck(find_bottleneck)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write a function first that runs a job for some batches and returns the seconds after the first 20 of them. Call it
# with `job.halved(stage)` for each stage.
# </details>
# <details><summary>Hint 2</summary>
#
# `batches = job.batches(n)` and `next(batches)`: look at the clock before and after it. The sum of the differences is
# the waiting.
# </details>
# <details><summary>Hint 3</summary>
#
# The longest stage alone need not be the answer: the threads share the decoding, the disk works beside them, and the
# step beside all of them. With the loader in the foreground only the threads work at the same time.
# </details>
# <details><summary>How does one halve a stage of a real job?</summary>
#
# One takes it out, or makes it smaller: batches that stay in memory instead of read ones, raw images instead of JPEG,
# no augmentation, a model with half the layers. What changes the rate of the run is worth mending.
# </details>

# %%
for name, job in JOBS.items():
    stage, waiting = find_bottleneck(job)
    times = {}
    for part in STAGES:
        start = job.clock()
        job.alone(part)
        times[part] = f"{1e3 * (job.clock() - start):.3g} ms"
    print(f"job {name}, {job.threads} threads: {stage}, waits {waiting:.0f} %, alone {times}")

# %% [markdown]
# In all three jobs decoding takes longest in one thread, and only in A is it the bottleneck. In A it shares its threads
# with the augmentation; in B the step is slower than everything before it; C waits for its disk.

# %% [markdown]
# ---
# ## Exercise 5 · Shards for DDP
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 15, Two ranks, one file | each sample once, equal numbers of batches, no message |
#
# Each rank asks which samples are its own in this epoch. All ranks' batches together hold **each sample once**. All
# ranks have the same number of batches, because DDP waits for everyone in each step, and that number is as small as
# possible: a step takes up to `batch` samples on each rank. Batches may differ in size; none is empty. The order
# changes with the epoch and with the seed, and so does what a rank gets. There are at least as many samples as ranks,
# and `batch` is at least 2.


# %%
# {{shard}}


# %%
check.shard(shard)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# All ranks make the same shuffled list, from a generator with seed and epoch. Then each takes its part.
# </details>
# <details><summary>Hint 2</summary>
#
# The number of steps is count / (batch · n), rounded up. So there are steps · n batches in all.
# </details>
# <details><summary>Hint 3</summary>
#
# `np.array_split(order, k)` cuts into k parts whose sizes differ by one at most. Every n-th of them is yours.
# </details>
# <details><summary>What does DDP make of batches of different size?</summary>
#
# It averages the ranks' gradients with equal weights, so that a sample in a smaller batch counts a little more.
# Multiply the loss by batch size · n / samples of this step, and the gradient is that of the whole step again (lesson
# 04, section 2).
# </details>
# <details><summary>And FFCV?</summary>
#
# With `distributed=True` it uses PyTorch's DistributedSampler, which repeats a few samples until all ranks have the
# same number, and its Loader drops the last incomplete batch unless `drop_last=False`. For training that is fine. For
# an evaluation it is not: pass your own `indices`. The quasi-random order does not work with `distributed=True`. Each
# rank may get pages of its own with `indices`, but then it sees the same samples in every epoch; a new Loader for each
# epoch, with other pages, costs its compilation, unless `lessons.ffcv_data_loading.ffcv` has kept that.
# </details>

# %% [markdown]
# When your function passes, look at the sizes.


# %%
def sizes(count, batch):
    return [len(part) for part in shard(count, batch, epoch=0, seed=0)]


for count in (1000, 1030):
    for rank, row in enumerate(launch(sizes, count, 64, world_size=WORLD_SIZE, backend="gloo")):
        print(f"{count} samples, rank {rank}: batches of {row}")

# %% [markdown]
# ---
# ## Exercise 6 · Rows of text that resume exactly
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 20 | 15, Text: packing, shards, exact resume | any step, any number of ranks, no state |
#
# Documents of some lengths lie one after the other in an array of tokens, which is cut into **rows** of equal length;
# what is left at the end is dropped. A run takes rows one after the other, `batch` of them in a step, and needs to
# know two things of each: where it is, and which documents it has, so that attention does not look from one into
# another.
#
# - Epoch e goes through all rows in the order `np.random.default_rng([seed, e]).permutation(rows)`, and the next epoch
#   follows at once: a step may have rows of both.
# - In a step rank 0 takes the first `batch / ranks` rows, rank 1 the next ones, and so on.
# - A row is a list of **pieces** (document, first token, end), each counted within its document, `end` not included.
#   Documents without tokens have no piece.
#
# Nothing may be remembered between calls: a job that died is started again with the step alone, on as many ranks as
# are left. `batch` is a multiple of the ranks.


# %%
# {{text_rows}}


# %%
check.text_rows(text_rows)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Number the rows of the whole run: those of a step begin at step · batch, those of a rank rank · batch / ranks later.
# </details>
# <details><summary>Hint 2</summary>
#
# `divmod(number, rows)` gives the epoch of such a number, and the place in that epoch's order.
# </details>
# <details><summary>Hint 3</summary>
#
# Row r has the tokens from r · length to (r + 1) · length. With the first and the last token of each document in the
# whole array (`np.cumsum`), a piece is where the two ranges overlap, less the document's beginning.
# </details>
# <details><summary>Is it not slow to make a permutation for every row?</summary>
#
# It would be for billions of rows. [scripts/train.py](../scripts/train.py) keeps those of two epochs
# (`functools.lru_cache`); libraries make one shard by shard.
# </details>

# %% [markdown]
# When your function passes, stop a run and go on with half of the ranks:

# %%
documents = [5, 0, 9, 2, 14, 7, 3]
two = [text_rows(documents, 8, 4, step, r, 2, seed=0) for step in range(3) for r in range(2)]
one = [text_rows(documents, 8, 4, step, 0, 1, seed=0) for step in range(3)]
assert sum(two[:4], []) + one[2] == sum(one, [])
for row in one[0]:
    print(row)

# %% [markdown]
# ---
# ## Exercise 7 · An epoch of ImageNet on paper
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 15 | 15, Small or fast; Which order, and how much memory? | seconds within 1 % |
#
# ImageNet has 1,281,167 training images (Russakovsky et al., 2015). As raw pixels of at most 256 × 256 FFCV's file
# has 169.8 GB. FFCV's benchmark (docs/benchmarks.rst) loads it at 172,801 images/s from memory, and at 6,870 images/s
# from a network disk, which therefore gives 0.91 GB/s. FFCV's ResNet-50 on eight A100 makes 16 epochs in 14.9 minutes
# ([FFCV's ImageNet runs](https://github.com/libffcv/ffcv-imagenet), with smaller crops of larger images): take its mean
# of 22,930 images/s for the GPUs.
#
# Disk, CPU and GPUs work at the same time, on different batches. If the file fits in memory, the disk is read in the
# first epoch only. If it does not, every epoch reads all of it: assume that the page cache does not help then. How long
# do the first epoch and a later one take with 256 GB of memory for the file, how long with 128 GB, and what sets the
# pace of the later ones?


# %%
# {{imagenet_epoch}}


# %%
check.imagenet_epoch(imagenet_epoch)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Bring all three to images/s. How many images does the disk deliver, if an image has 169.8 GB / 1,281,167?
# </details>
# <details><summary>Hint 2</summary>
#
# The slowest of the three sets the pace of the first epoch. Later the disk counts only if the file does not fit.
# </details>
# <details><summary>What would you do with 128 GB?</summary>
#
# Store JPEG: FFCV's file of the same images has 22.0 GB at quality 90, which fits, and the CPU pays for the decoding.
# Or mix both, until the file just fits: raw saves CPU, JPEG saves memory.
# </details>

# %%
for memory in (256, 128):
    first, later, pace = imagenet_epoch(1_281_167, 169.8, memory, 0.91, 172_801, 22_930)
    print(f"{memory} GB: first epoch {first:.0f} s, later {later:.0f} s, set by the {pace}")
