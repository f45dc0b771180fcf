# %% [markdown]
# # Exercises 04 · Can you train on N ranks as if there were one?
#
# Seven exercises on [04 DDP](../notebooks/04_ddp.ipynb). In five you write what `DistributedDataParallel` and the
# loop around it do; in two you cut up parameters and samples, without ranks. All of them take about 220 minutes.
#
# **If you do only these:** 1, 5 and 7.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | equal replicas and mean gradients | 2 of 5 | 20 |
# | 2 | buckets of parameters | 2 of 5 | 15 |
# | 3 | one all-reduce a bucket | 3 of 5 | 35 |
# | 4 | all-reduces that overlap with backward | 5 of 5 | 55 |
# | 5 | accumulation with the fewest bytes | 2 of 5 | 15 |
# | 6 | a sampler that can resume | 3 of 5 | 35 |
# | 7 | an epoch with uneven inputs | 4 of 5 | 45 |
#
# 3 is built from 1 and 2, and 4 from 3. The others stand alone. *Follows* on each card names the section of the
# lesson to look things up in.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/04_ddp_solutions.ipynb).
#
# **What a check does.** In exercises 1, 3 and 4 it trains a small model in float64 for some steps on real ranks, and
# the same model on all batches in one process. Gradients have to agree to 12 digits. The model is a difficult one:
# each rank starts from another **seed**, a layer is **frozen**, two layers share a **tied** weight, a **branch** is
# not taken by every rank, and the last batch is smaller. The check says which of these it was testing. Then it reads
# the **ledger** of each rank: which operations, how many bytes, and what had started when backward returned. Exercises
# 5 and 7 are compared with one process in the same way; 2 and 6 are checked without ranks.
#
# **How to look inside.** Run your function yourself, with prints, before you check it:
#
# ```python
# from course_utils import record
#
# def look():
#     torch.manual_seed(dist.get_rank())
#     module = nn.Linear(3, 1)
#     finish = data_parallel(module)
#     module(torch.ones(2, 3) * dist.get_rank()).sum().backward()
#     with record() as ledger:
#         finish()
#     return module.weight.grad, ledger
#
# for gradient, ledger in launch(look, world_size=2, backend="gloo"):
#     print(gradient, ledger, sep="\n")
# ```

# %% tags=["parameters"]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_utils import launch
from lessons.ddp import check

WORLD_SIZE = 2  # ranks of the demonstration; the checks choose their own

# %% [markdown]
# Before you write, see what a tied weight, a frozen layer and a layer that was not used look like from outside.
# Predict how many parameters the model below has, and which of them have a gradient after backward.


# %%
def look_at_gradients():
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abcde"})
    model["b"].weight = model["a"].weight  # tied
    model["c"].requires_grad_(False)  # frozen
    x = torch.ones(1, 2)
    for name in "abcd":  # e is not used
        x = model[name](x)
    x.sum().backward()
    return {name: p.grad is not None for name, p in model.named_parameters()}


launch(look_at_gradients, world_size=WORLD_SIZE, backend="gloo")[0]

# %% [markdown]
# Five layers and four parameters: `parameters()` names a tied weight once. The frozen and the unused one have no
# gradient at all, which is not the same as a gradient of zeros.

# %% [markdown]
# ---
# ## Exercise 1 · Equal replicas and mean gradients
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 20 | 04, The same start; after backward | no more bytes in a step than the gradient has |
#
# Data parallelism asks for two things. All ranks start with the same weights and buffers, and all take each step with
# the same gradient, the mean over the ranks. Then they stay equal without sending a weight again.
#
# Your function gets a module that every rank made from another seed. It does what has to be done once, and returns a
# function that does what has to be done after each backward.


# %%
# {{data_parallel}}


# %%
check.data_parallel(data_parallel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which numbers belong to the model, but are not parameters? Which parameters are not trained, and yet have to be
# equal on all ranks?
# </details>
# <details><summary>Hint 2</summary>
#
# A collective needs every rank. If one of them has no gradient for a parameter, it must still take part, with zeros.
# </details>
# <details><summary>Hint 3</summary>
#
# `dist.broadcast(tensor.detach(), src=0)` writes into a parameter without autograd noticing.
# `dist.all_reduce(p.grad)` sums in place; divide by `dist.get_world_size()` afterwards.
# </details>
# <details><summary>Why zeros, and not a mean over those ranks that have a gradient?</summary>
#
# Because one process with all batches would do so too. The loss is the mean over all samples, and for samples that do
# not use the layer its derivative is zero.
# </details>

# %% [markdown]
# ---
# ## Exercise 2 · Buckets of parameters
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 15 | 04, Flat buckets | as few buckets as the order allows |
#
# An all-reduce for each parameter pays the latency each time. Parameters therefore travel in **buckets**. The
# lesson's buckets, like DDP's, are closed once they have reached a size. Fill yours so that they never exceed it: a
# bucket is closed when the next parameter does not fit any more. A parameter larger than a whole bucket gets one of
# its own. A flat tensor has one dtype, so a bucket has one as well.


# %%
# {{in_buckets}}


# %%
check.in_buckets(in_buckets)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Keep one bucket open and look at the next parameter: does it still fit? Bytes are `p.nbytes`.
# </details>
# <details><summary>Hint 2</summary>
#
# A bucket in which nothing is yet takes any parameter, however large. Two dtypes need two open buckets.
# </details>
# <details><summary>Hint 3</summary>
#
# A dictionary `filling` from dtype to its open bucket is enough. If you add a new bucket to the result when you
# open it, you cannot forget the last one.
# </details>

# %% [markdown]
# ---
# ## Exercise 3 · One all-reduce a bucket
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 35 | 04, Flat buckets; exercises 1 and 2 | one all-reduce a bucket, no byte more |
#
# Now the gradients of a bucket travel in one flat tensor. Take the trained parameters in reverse order: backward
# reaches the last layer first, which will help in Exercise 4.
#
# `start_bucket` serves both exercises, and only `bucketed` is checked. It **starts** an all-reduce with
# `async_op=True`, and returns a function that waits for it and writes the means back.


# %%
# {{start_bucket}}


# {{bucketed}}


# %%
check.bucketed(bucketed)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `data_parallel(module)` already makes the replicas equal; you need not use what it returns. The buckets are the
# same in every step: make them once.
# </details>
# <details><summary>Hint 2</summary>
#
# Flat: `torch.cat` of all `g.flatten()`, with zeros where a parameter has no gradient. Back: `flat.split` with the
# list of the numbers of elements, and `view_as(p)`.
# </details>
# <details><summary>Hint 3</summary>
#
# Divide before the all-reduce or after it, once. If you divide in `end`, divide before you split. The views of `flat`
# can themselves become the `p.grad`: this is what `gradient_as_bucket_view=True` saves in DDP.
# </details>

# %% [markdown]
# ---
# ## Exercise 4 · All-reduces that overlap with backward
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 5 of 5 | 55 | 04, While backward goes on; exercise 3 | each bucket starts when it is complete; no wait in backward |
#
# Backward reaches the first layer last. By then the gradients of the last layers have been ready for some time, and
# their all-reduce could be under way. A hook on each parameter,
#
# ```python
# p.register_post_accumulate_grad_hook(arrived)  # calls arrived(p) as soon as p.grad is there
# ```
#
# tells when. The check does not look at a clock. It looks at what has started when the last gradient arrives, and
# whether backward ever waits.
#
# Think of two ranks of which one does not use some layer: on that rank the bucket of this layer is never complete.
# When does it have to start there, and what about the buckets behind it?


# %%
# {{overlapped}}


# %%
check.overlapped(overlapped)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three things have to be remembered during a step: which gradients have arrived, which buckets have started, and
# what to call to finish them. All three begin anew with the next step.
# </details>
# <details><summary>Hint 2</summary>
#
# Collectives pair by order: the third all-reduce of rank 0 adds to the third of rank 1. All ranks must start the
# buckets in the same order, although their gradients may arrive in different ones. So a complete bucket waits for
# those before it.
# </details>
# <details><summary>Hint 3</summary>
#
# When a gradient arrives: while the next bucket not yet started is complete, start it. In `finish`: start the rest in
# order, call all the functions that `start_bucket` returned, and clear what you remembered.
# </details>
# <details><summary>How does DDP know in time that a parameter is not used?</summary>
#
# It does not, unless you ask. By default it waits for all parameters and raises an error in the next forward pass
# if one was missing. With `find_unused_parameters=True` it walks back from the outputs at the end of each forward
# pass, and counts the parameters that it does not find as arrived.
# </details>

# %% [markdown]
# ---
# ## Exercise 5 · Accumulation with the fewest bytes
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 15 | 04, Accumulation | the gradient travels once |
#
# A batch does not fit into memory, and is cut into **micro-batches** whose gradients add up. `model` is wrapped in
# `DistributedDataParallel`, which all-reduces in every backward. The loss of some samples is
# `F.mse_loss(model(x), y)`, a mean. Leave in the gradients what one backward over all samples of all ranks would put
# there.


# %%
# {{accumulate}}


# %%
check.accumulate(accumulate)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `backward` adds to what is in `p.grad`. What is a sum of means, and what has to be done to each of them so that
# the sum is the mean over all samples?
# </details>
# <details><summary>Hint 2</summary>
#
# `with model.no_sync():` holds back the all-reduce. Which of the micro-batches must not be inside?
# </details>
# <details><summary>Hint 3</summary>
#
# Scale each loss by `len(x) / samples`. DDP decides at the end of **forward** whether the next backward will
# all-reduce, so both calls belong inside.
# </details>

# %% [markdown]
# ---
# ## Exercise 6 · A sampler that can resume
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 35 | 04, The sampler, and seeds | equal to `DistributedSampler`; resumes on other numbers of ranks |
#
# Rebuild the order in which `DistributedSampler` deals out samples, and teach it to go on in the middle of an epoch:
#
# 1. The **order** of an epoch is `torch.randperm(samples)` from a generator of its own, seeded with `seed + epoch`.
# 2. The first `done` samples of the order have been used, by all ranks together. They are left out.
# 3. The rest is **padded** with samples from the beginning of the epoch's order until the number of ranks divides
#    it. If the order is too short for that, it is repeated.
# 4. Rank r takes the elements r, r + N, r + 2N, … of it.
#
# A checkpoint that stores `epoch`, `seed` and `done` can then be resumed on any number of ranks. (The sampler of the
# lesson pads the whole epoch. It gives ranks different numbers of samples if the new N does not divide `done`.)


# %%
# {{epoch_indices}}


# %%
check.epoch_indices(epoch_indices)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Follow the four steps literally, with lists. `torch.Generator().manual_seed(…)` returns the generator.
# </details>
# <details><summary>Hint 2</summary>
#
# The number of samples to add is `-len(left) % ranks`: 10 samples on 4 ranks need 2 more.
# </details>
# <details><summary>Hint 3</summary>
#
# `left[rank::ranks]` deals out. With 3 samples and 8 ranks, 5 have to be added, and the order has 3: add in a loop,
# or cut a sufficiently long repetition of the order.
# </details>
# <details><summary>What does the padding do to an evaluation?</summary>
#
# Some samples count twice. For a metric that has to be exact, drop the duplicates after gathering, or give the ranks
# different numbers of samples and weigh them, as in the next exercise.
# </details>

# %% [markdown]
# ---
# ## Exercise 7 · An epoch with uneven inputs
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 45 | 04, Uneven data | in each step the gradient and two more numbers (16 bytes) at most |
#
# Documents have different lengths, files different numbers of rows: in the end one rank has 3 batches, another 1, a
# third none, and their sizes differ too. `join()` keeps DDP from hanging, but samples then do not count equally: it
# averages the ranks' means, and divides by the number of all ranks, or of those that are left.
#
# Let every sample of a step weigh the same. In step i, all ranks that have a batch number i contribute it, and the
# gradient is that of the mean loss over **all samples** in these batches. All ranks take the step. The loss of a
# batch is `F.mse_loss(module(x), y)`, a mean.


# %%
# {{uneven_epoch}}


# %%
check.uneven_epoch(uneven_epoch)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many steps does the epoch have? No rank knows, but one small all-reduce tells all of them.
# </details>
# <details><summary>Hint 2</summary>
#
# Means cannot be added, sums can: the gradient of the **sum** over the samples, and the number of samples. A rank
# without a batch adds zero to both.
# </details>
# <details><summary>Hint 3</summary>
#
# `len(x) * loss` is the sum. Put the number of samples behind the flat gradient, all-reduce once, and divide by the
# last element. Then every rank takes the step, with or without a batch.
# </details>
# <details><summary>Does it matter, for a last batch that is a little smaller?</summary>
#
# Once in an epoch, hardly. With sequences of very different lengths, in every step: the loss of a language model is a
# mean over tokens, and a rank with short sequences would weigh each of its tokens more.
# </details>
