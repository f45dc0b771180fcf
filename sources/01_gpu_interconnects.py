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
# # How fast can data move, and where is the slow link?
#
# In the time in which an H100's own memory delivers one 16-bit number, its tensor cores could do 591 operations. In
# the time in which a 400G network port delivers one, 39,576. Distributed training is the art of not waiting, and it
# begins with knowing which way the data goes and what each part of the way costs.
#
# **You will be able to**
# - *read* a data sheet: dense or sparse, one direction or both, bits or bytes;
# - *draw* a machine from `nvidia-smi topo -m`, and *find* the path and the slowest link between two of its GPUs;
# - *measure* latency and bandwidth, say how sure you are, and *predict* the time of a message you have not sent yet;
# - *place* an operation on a roofline: is arithmetic, memory or a link its limit?
#
# **Before this:** [00 start_here](00_start_here.ipynb). **Time:** about 95 minutes to read, under a minute to run.

# %% [markdown]
# ## Nine predictions
#
# Write down an answer to each, however unsure. They come up again on the way, and the answers are at the end.
#
# 1. A data sheet promises 1,979 TFLOP/s in bf16 for the H100. At most how many can your dense matrices get?
# 2. From P100 (2016) to B200 (2024), which grew most: 16-bit arithmetic, memory bandwidth, NVLink or PCIe? How much?
# 3. "NVLink: 900 GB/s." How long does a copy of 90 GB from one H100 to another take, at least?
# 4. A node has eight network ports of 400G. What does each GPU get, in GB/s, and how many times slower is that than
#    its NVLink?
# 5. `nvidia-smi topo -m` says `PHB` for one pair of GPUs and `SYS` for another. Which pair would you rather train on?
# 6. A message of 1 KiB from one process to another takes a certain time. And a message of 4 KiB?
# 7. You have measured eight message sizes and fitted a straight line. How wrong is it on sizes in between: 2 %, 20 %,
#    or a factor of 2?
# 8. An H100 does 66.9 TFLOP/s in fp32. How many of them does `c = a + b` on long vectors reach?
# 9. A model of 7 billion parameters averages its bf16 gradients among 16 GPUs, each in a machine of its own. How
#    long, at least, over one 400G port each, if only the GPUs add? And over 10G Ethernet?

# %% [markdown]
# The first cell imports everything and names every parameter.

# %% tags=["parameters"]
import itertools
import time

import numpy as np
import torch
import torch.distributed as dist

from course_utils import device, launch
from course_utils.costs import bootstrap_alpha_beta, bytes_sent, fit_alpha_beta, format_bytes
from course_utils.hardware import GPUS, LINKS
from course_utils.plots import generations, ladder, latency_fit, roofline, topology_picture
from course_utils.recorded import ACHIEVABLE_MATMUL
from course_utils.topology import cluster, from_matrix, reference, this_machine
from course_utils.widgets import topology_explorer

world_size = 4  # ranks whose pairs are measured, 2 or more
fitted = [2**k for k in range(10, 25, 2)]  # message sizes to fit: 1 KiB to 16 MiB
unseen = [3 * 2**k for k in range(10, 23, 3)]  # and to predict before measuring: 3 KiB to 12 MiB
copied = 2**26  # bytes copied where memory is measured: 64 MiB
sides = [64, 128, 256, 512, 1024]  # of the matrices on the roofline

# %% [markdown]
# ## 1. Inside a GPU
#
# A GPU is a crowd of small processors, the **streaming multiprocessors** (SMs), around one large memory. An H100 in
# its fastest module (SXM) has 132 SMs. Each has 128 **CUDA cores**, which do one fp32 multiply-add per clock tick,
# and four **tensor cores**, which do nothing but multiply small matrices and add. All SMs share 50 MB of cache and 80
# GB of **HBM** (high-bandwidth memory), which sits beside the chip in the same package.
#
# <small>Source: NVIDIA, [Hopper Architecture
# In-Depth](https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/).</small>
#
# An operation here is a multiplication or an addition of floating-point numbers. A multiply-add is two of them. So
# the peak follows from counting: units × multiply-adds per tick × 2 × ticks per second. A tensor core of the H100
# does 512 multiply-adds per tick in bf16, at 1.83 GHz; the CUDA cores reach 1.98 GHz.
#
# <small>Sources: Bekman, [ml-engineering,
# accelerators](https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md) (multiply-adds and
# tensor clock); Lockwood, [H100](https://glennklockwood.com/garden/processors/h100) (both clocks).</small>

# %%
h100 = GPUS["h100"]
tensor_peak = h100.sms * 4 * 512 * 2 * 1.83e9
cuda_peak = h100.sms * 128 * 2 * 1.98e9
for name, counted, sheet in [
    ("tensor cores, bf16", tensor_peak, h100.flops["bf16"]),
    ("CUDA cores, fp32", cuda_peak, h100.flops["fp32"]),
]:
    print(f"{name}: counted {counted / 1e12:6.1f} TFLOP/s, data sheet {sheet / 1e12:6.1f}")
    assert abs(counted / sheet - 1) < 1e-3

# %% [markdown]
# Nearly all arithmetic of a GPU is in the tensor cores, and there half the bits give twice the rate, from tf32 (fp32
# cut short for them) to bf16 to fp8. Lesson 05 takes these formats apart. The data sheet has a second column, though.
#
# **Predict** (question 1). Which column is yours?

# %%
sparse = [p for p in h100.flops if p in ("tf32", "fp16", "bf16", "fp8")]
print(f"H100 SXM, TFLOP/s {'dense':>12}   with 2:4 sparsity")
for precision, rate in h100.flops.items():
    second = f"{h100.sparse_factor * rate / 1e12:17.1f}" if precision in sparse else f"{'-':>17}"
    print(f"{precision:18}{rate / 1e12:12.1f}{second}")
assert round(h100.sparse_factor * h100.flops["bf16"] / 1e12) == 1979

# %% [markdown]
# > **Misconception.** "An H100 does 1,979 TFLOP/s in bf16." It does 989. The other figure counts **2:4 sparsity**: if
# > at least two of every four neighbouring weights are zero, the hardware skips them, and the data sheet counts the
# > skipped ones too.
#
# The next cell makes a matrix sparse in this way and counts what is left to multiply.

# %%
weights = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
fours = weights.view(-1, 4)
kept = torch.zeros_like(fours).scatter(1, fours.abs().topk(2).indices, 1.0)  # the larger two
pruned = (fours * kept).view_as(weights)
left = pruned.count_nonzero().item() / weights.numel()
print(f"multiplications left to do: {left:.0%}; the peak that counts them all: × {1 / left:.0f}")
assert left == 0.5 and not torch.equal(pruned, weights)

# %% [markdown]
# The result is that of *another* matrix. Unless you prune your model in this way, the dense column is yours. All
# FLOP/s in this course are dense.
#
# ### Generations
#
# Now compare like with like: the largest module of each generation, dense, one direction, bytes.
#
# **Predict** (question 2). Which line climbs fastest?

# %%
line = [GPUS[key] for key in ("p100", "v100", "a100", "h100", "h200", "b200")]
print("           SMs  fp16 TFLOP/s  memory GB  GB/s  NVLink GB/s  PCIe GB/s")
for gpu in line:
    print(
        f"{gpu.name} {gpu.year}{gpu.sms:5}{gpu.flops['fp16'] / 1e12:14.1f}"
        f"{gpu.memory_bytes / 1e9:11.0f}{gpu.memory_bandwidth / 1e9:6.0f}"
        f"{LINKS[gpu.nvlink].bandwidth / 1e9:13.0f}{LINKS[gpu.pcie].bandwidth / 1e9:11.1f}"
    )

# %%
figures = {
    "16-bit arithmetic": [gpu.flops["fp16"] for gpu in line],
    "memory size": [gpu.memory_bytes for gpu in line],
    "memory bandwidth": [gpu.memory_bandwidth for gpu in line],
    "NVLink": [LINKS[gpu.nvlink].bandwidth for gpu in line],
    "PCIe": [LINKS[gpu.pcie].bandwidth for gpu in line],
}
growth = {name: values[-1] / values[0] for name, values in figures.items()}
assert [round(factor) for factor in growth.values()] == [106, 11, 11, 11, 4]
assert growth["16-bit arithmetic"] > 9 * max(growth["memory bandwidth"], growth["NVLink"])
names = [f"{gpu.name}\n{gpu.year}" for gpu in line]
generations(names, figures, "recorded: growth since the P100 (data sheets)")

# %% [markdown]
# *The figure: six GPUs from left to right, oldest first, logarithmic. Arithmetic ends at 106 times the P100's; memory
# size, memory bandwidth and NVLink end together at 11 times, PCIe at 4 times: a B200 could do PCIe 6, but the machines
# it is sold in run PCIe 5.*
#
# Arithmetic grew more than nine times as much as anything that moves data. (The first step is so large because the
# P100 had no tensor cores yet.) In the time in which one byte arrives, a GPU of today can compute far more than one
# of 2016: that is why this course is about communication.
#
# <small>Sources: NVIDIA, [Ampere Architecture
# In-Depth](https://developer.nvidia.com/blog/nvidia-ampere-architecture-in-depth/) (P100, V100), and the data sheets
# that `GPUS[...].source` and `LINKS[...].source` name.</small>
#
# How much more? A link of B bytes per second brings B/2 numbers of 16 bits per second; in the time of one, the GPU
# could do FLOP/s ÷ (B/2) operations. This holds for a stream of numbers. The first one takes longer: section 3.

# %%
ways = {
    "its own HBM": h100.memory_bandwidth,
    "a GPU next to it, by NVLink": LINKS[h100.nvlink].bandwidth,
    "the CPU's memory, by PCIe": LINKS[h100.pcie].bandwidth,
    "another node, by one 400G port": LINKS["ib_ndr"].bandwidth,
}
waiting = {way: h100.flops["bf16"] / (speed / 2) for way, speed in ways.items()}
for way, operations in waiting.items():
    print(f"one number from {way:32}{operations:8,.0f} operations")
assert [round(n) for n in waiting.values()] == [591, 4397, 31410, 39576]

# %% [markdown]
# ## 2. The ladder of bandwidths
#
# | rung | what it joins | to know |
# |---|---|---|
# | **HBM** | the GPU and its memory | the only way that is not a link to somebody else |
# | **NVLink** | GPU and GPU | several links a GPU, used together: 4 (P100), 6 (V100), 12 (A100), 18 (H100, B200) |
# | **NVSwitch** | all GPUs of a node | every GPU reaches every other at the full rate of its NVLinks |
# | **PCIe** | GPU, CPU, network card, disk | 16 lanes, each generation about twice as fast |
# | **InfiniBand** | nodes | network with RDMA (section 3); EDR, HDR, NDR, XDR: 100 to 800 Gb/s a port of four lanes |
# | **Ethernet** | nodes, and everything else | 10 to 800 Gb/s; with RDMA mostly RoCE; on AWS it is EFA |
#
# <small>Sources for this table and the figure: Bekman, [ml-engineering,
# network](https://github.com/stas00/ml-engineering/blob/master/network/README.md); NVIDIA's Ampere and Hopper pages,
# as above.</small>

# %%
kinds = {"nvlink": "NVLink", "pcie": "PCIe", "ib_": "InfiniBand", "eth_": "Ethernet"}
rungs, groups = {}, {}
for key, link in LINKS.items():
    kind = next((kind for start, kind in kinds.items() if key.startswith(start)), None)
    if kind and key != "nvlink_c2c":
        rungs[link.name], groups[link.name] = link.bandwidth, kind
for key in ("p100", "a100", "h100", "b200"):
    rungs[f"HBM ({GPUS[key].name})"] = GPUS[key].memory_bandwidth
    groups[f"HBM ({GPUS[key].name})"] = "HBM"
ladder(rungs, "recorded: NVLink per GPU, PCIe x16, networks per port", groups)

# %% [markdown]
# *The figure: bars on a logarithmic axis from 1.25 GB/s (10G Ethernet) to 8 TB/s (HBM of a B200), one colour for each
# kind. NVLink 2 to 5, PCIe 6 and InfiniBand XDR lie between 100 GB/s and 1 TB/s; all other links are below. (Memory
# has no directions: HBM's figure counts what is read and written together.)*
#
# The bars are drawn in one unit, on one footing. Data sheets are not. Three habits of theirs cost a factor:
#
# - **Direction.** NVLink and PCIe are **full duplex**: both directions at once, each at full rate. Data sheets like
#   the sum. A copy has one direction. An all-reduce sends and receives, but what it *sends* has to fit through one.
# - **Bits.** Networks count bits, memory and NVLink bytes. NDR is 400 G*bit*/s.
# - **Ports.** A DGX H100 has eight such ports for training, one for each GPU; "400 GB/s" is all of them.
#
# **Predict** (questions 3 and 4), then run.

# %%
one_way = 900e9 / 2
assert one_way == LINKS["nvlink4"].bandwidth
port = 400e9 / 8
assert port == LINKS["ib_ndr"].bandwidth and 8 * port == 400e9
print(f"90 GB over NVLink 4: {90e9 / one_way:.2f} s, not {90e9 / 900e9:.2f} s")
print(f"one 400G port: {port / 1e9:.0f} GB/s, {one_way / port:.0f} times slower than NVLink 4")
print(f"80 GB are {80e9 / 2**30:.1f} GiB")

# %% [markdown]
# > **Misconception.** "Two H100s exchange 900 GB/s, so a copy runs at 900 GB/s." It is the sum of both directions.
# > *Recorded:* NVIDIA's own test between two H100s showed 380 GB/s one way and 749 GB/s both ways at once ([NCCL
# > issue 1264](https://github.com/NVIDIA/nccl/issues/1264)).
#
# > **Misconception.** "GB and GiB are the same." GB is 10⁹ bytes, GiB is 2³⁰, 7.4 % more. Bandwidths are in GB/s.
#
# How long do 14 GB take on each rung, the bf16 gradients of a model of 7 billion parameters?

# %%
gradients = 7e9 * 2
for name in ["HBM (H100)", "NVLink 4", "PCIe 5 x16", "InfiniBand NDR", "Ethernet 10G"]:
    print(f"{name:16}{gradients / rungs[name] * 1e3:10,.0f} ms")
assert gradients / rungs["Ethernet 10G"] > 2600 * gradients / rungs["HBM (H100)"]

# %% [markdown]
# A factor of 2,680 from top to bottom. A program that takes the wrong rung is not a little slower.

# %% [markdown]
# ## 3. What happens before the first byte arrives
#
# ### Latency
#
# Bandwidth says how fast bytes flow once they flow. **Latency** is the time until then: software that prepares the
# message, a kernel that starts, switches on the way. The usual model has two numbers:
#
# $$t(S) = \alpha + \beta S, \qquad \beta = 1/B$$
#
# α in seconds is the time of an empty message, B the bandwidth. A message of αB bytes takes twice α: half of its time
# is latency, and it gets half of the bandwidth. Below that size, latency rules; above, bandwidth. NCCL, NVIDIA's
# library for communication between GPUs, has its own α for each kind of link: what one step of a ring costs with
# large messages.

# %%
print("                     alpha    bandwidth   half speed at     speed of 4 KiB")
for key in ("nvlink4", "pcie5", "ib_ndr"):
    link = LINKS[key]
    half = link.latency * link.bandwidth
    small = 4096 / (link.latency + 4096 / link.bandwidth)
    print(
        f"{link.name:17}{link.latency * 1e6:6.1f} us{link.bandwidth / 1e9:8.0f} GB/s"
        f"{format_bytes(half):>16}{small / 1e9:14.2f} GB/s"
    )
    assert abs(half / (link.latency + half / link.bandwidth) / link.bandwidth - 0.5) < 1e-9

# %% [markdown]
# Seven times the bandwidth of PCIe, and at 4 KiB NVLink is only 1.7 times as fast: its 450 GB/s never come into play.
# For small messages ask for latency, not for bandwidth. (NCCL sends them in other ways, with a smaller α and less
# bandwidth. Lesson 03 shows them.)
#
# <small>Source of α (*recorded*): NCCL,
# [src/graph/tuning.cc](https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc).</small>
#
# Some latency no engineering removes. Nothing is faster than light: 0.3 metres in a nanosecond.

# %%
light = 299_792_458  # metres per second
for metres in (1, 30, 1000):
    print(f"{metres:5} m: at least {metres / light * 1e9:7.1f} ns")
assert 30 / light < 0.01 * LINKS["ib_ndr"].latency

# %% [markdown]
# Across a machine hall that is less than a hundredth of NCCL's 14 µs. So the rest can be worked on, and the following
# techniques do.
#
# ### RDMA and GPUDirect: fewer stops
#
# With ordinary network sockets, the operating system copies each message into its own memory, splits it, and a CPU is
# busy all the while. **RDMA** (remote direct memory access) lets the network card read and write the memory of a
# process directly; the CPU only gives the order. **GPUDirect** does the same for the memory of a GPU:
#
# | | who reads and writes GPU memory directly | what it avoids |
# |---|---|---|
# | GPUDirect **P2P** | another GPU, over NVLink or PCIe | a copy through the CPU's memory |
# | GPUDirect **RDMA** | a network card, over PCIe | a copy through the CPU's memory, on both nodes |
# | GPUDirect **Storage** | a disk or a storage network | a **bounce buffer**: a stopover in the CPU's memory |
# | GPUDirect **async** | nobody new: the GPU tells the network card when to start | the CPU's part in each message |
#
# <small>Sources: NVIDIA, [GPUDirect RDMA](https://docs.nvidia.com/cuda/gpudirect-rdma/), [GPUDirect Storage Design
# Guide](https://docs.nvidia.com/gpudirect-storage/design-guide/), [PeerDirect and PeerDirect
# Async](https://docs.nvidia.com/doca/sdk/NVIDIA+PeerDirect).</small>
#
# What does a stop cost? *Modelled:* 1 GB from a GPU to a GPU of another node. Without GPUDirect it goes from the GPU
# to the CPU's memory, over the network, and up to the GPU, one after the other. With it, all parts of the way work at
# once, and the slowest sets the pace.

# %%
way = [LINKS["pcie5"].bandwidth, LINKS["ib_ndr"].bandwidth, LINKS["pcie5"].bandwidth]
staged = sum(1e9 / speed for speed in way)
direct = 1e9 / min(way)
print(f"three copies, one after the other: {staged * 1e3:.1f} ms")
print(f"at the pace of the slowest part:   {direct * 1e3:.1f} ms")
assert round(staged / direct, 1) == 2.6

# %% [markdown]
# <details><summary>Can the staged way not work in pieces, so that its three copies overlap?</summary>
#
# Yes, and libraries do so: while the second piece leaves the GPU, the first is on the network. The time then comes
# close to the direct way's for large messages. The CPU's memory still carries every byte twice, and small messages,
# which are one piece, still stop twice.
# </details>
#
# ### Pinned memory
#
# The operating system may move or swap out a page of memory at any time. A device that copies by itself (DMA) must be
# sure that it does not, so it needs **pinned** (page-locked) memory. From ordinary, **pageable** memory the driver
# first copies into a pinned buffer of its own, piece by piece, and only then to the GPU. From pinned memory the copy
# is direct, and only then can it run while the CPU goes on (`non_blocking=True`).
#
# > **Misconception.** "Pin everything just before the copy." Pinning is a copy too: `x.pin_memory().to("cuda",
# > non_blocking=True)` can be up to twice as slow as `x.to("cuda")`. Pin *once*, for buffers that are used again; a
# > data loader's `pin_memory=True` pins in a thread beside the training.
#
# The other direction has a trap: `x.to("cpu", non_blocking=True)` can return before the data is there. If you read the
# result without a `torch.cuda.synchronize()`, you may read wrong numbers, and no error says so.
#
# <small>Source: Moens, [A guide on good usage of non_blocking and
# pin_memory()](https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html).</small>
#
# ### Unified or explicit memory
#
# With **explicit** memory you say what is where and copy it. With **unified** (managed) memory CPU and GPU use the
# same pointer, and pages move to whoever touches them. That is convenient, and each first touch is a page fault.
# *Recorded* on a GTX 1080, 2.147 GB of managed memory: a kernel that fetches its pages on demand takes 386.6 ms; one
# that finds them fetched ahead takes 13.3 ms
# ([pascal-um-benchmark](https://github.com/parallelArchitect/pascal-um-benchmark)). The fetch itself is not in the
# 13.3 ms. It still goes over PCIe 3, once and without faults.

# %%
on_demand, fetched_ahead = 386.6e-3, 13.3e-3  # recorded
fetch = 2.147e9 / LINKS["pcie3"].bandwidth  # modelled, at the speed of the data sheet
print(f"the kernel alone: {on_demand / fetched_ahead:.0f} times faster")
gain = on_demand / (fetch + fetched_ahead)
print(f"with a fetch of {fetch * 1e3:.0f} ms: {gain:.1f} times, at best")
assert round(gain, 1) == 2.6

# %% [markdown]
# PyTorch's tensors live in explicit memory: `.to("cuda")` is a copy. Chips in which CPU and GPU share a coherent link
# narrow the gap: Grace and Hopper are joined by NVLink-C2C, 450 GB/s each way, seven times PCIe 5 (NVIDIA, Hopper
# page).
#
# ### Use buffers again
#
# Memory has to be found, mapped and, for RDMA, registered with the network card before a byte moves. Doing that for
# every message can cost more than the message. The cure is the same everywhere: allocate once, use again.
#
# **Predict.** Filling 64 MiB: fresh memory each time, or the same memory again. Which is faster?


# %%
def best_of(times, action):
    """Seconds of the fastest of several runs, after one that does not count."""
    action()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# %% tags=["nbval-ignore-output"]
same = torch.empty(copied // 4)
again = best_of(5, lambda: same.fill_(1.0))
fresh = best_of(5, lambda: torch.empty(copied // 4).fill_(1.0))
print(f"measured: {format_bytes(copied)} in fresh memory {fresh * 1e3:6.1f} ms")
print(f"          the same memory again {again * 1e3:10.1f} ms, {fresh / again:.1f} times faster")

# %% [markdown]
# Fresh memory is only promised, not there: at the first touch of each page the operating system has to find one and
# clear it. A **pool** keeps buffers that nobody uses at the moment and hands them out again. It takes ten lines.


# %%
class Pool:
    def __init__(self):
        self.idle, self.allocated = {}, 0

    def take(self, size):
        if self.idle.get(size):
            return self.idle[size].pop()
        self.allocated += 1
        return torch.empty(size, dtype=torch.uint8)

    def give_back(self, buffer):
        self.idle.setdefault(buffer.numel(), []).append(buffer)


pool, taken = Pool(), 0
for _step in range(100):
    buffers = [pool.take(size) for size in (1024, 4096, 4096)]  # say, three gradient buckets
    taken += len(buffers)
    for buffer in buffers:
        pool.give_back(buffer)
print(f"{taken} buffers taken, {pool.allocated} allocated")
assert (taken, pool.allocated) == (300, 3)

# %% [markdown]
# > **What changes on real GPUs.** Freeing GPU memory can make the CPU wait for the GPU. So PyTorch keeps a pool, its
# > **caching allocator**: memory of a deleted tensor goes back to the pool, not to the driver. That is
# > one reason why `nvidia-smi` shows more in use than your tensors need.
#
# <small>Source: PyTorch, [CUDA semantics, memory
# management](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management).</small>
#
# The next cell watches the allocator where there is a GPU.

# %% tags=["nbval-ignore-output"]
if torch.cuda.is_available():
    torch.cuda.init()
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    for _step in range(100):
        torch.empty(copied, dtype=torch.uint8, device="cuda")  # deleted at once
    calls = torch.cuda.memory_stats()["segment.all.allocated"] - before
    print(f"100 tensors made, {calls} taken from the GPU")
    kept, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    print(f"in the pool {kept / 1e6:.0f} MB, in tensors {used / 1e6:.0f} MB")
else:
    print("no GPU here: the pool above is the idea")

# %% [markdown]
# ## 4. Which links does this machine have?
#
# Enough of data sheets. The next cell asks the machine: the driver for GPUs and their links, the operating system for
# CPUs, their **NUMA nodes** (the memory that is near some of the cores) and network cards.

# %% tags=["nbval-ignore-output"]
here = this_machine()
print(here.source)
for one in here.devices.values():
    print(f"  {one.kind:8} {one.name}")
for link in here.links:
    print(f"  {link.a} - {link.b}: {link.kind}")

# %% tags=["nbval-ignore-output"]
topology_picture(here)

# %% [markdown]
# *The figure: your machine. Boxes are devices, lines are links, with their kind and bandwidth where it is known. In
# the version that came with the course there is no GPU.*
#
# ### Read `nvidia-smi topo -m`
#
# On a machine with NVIDIA GPUs one command prints how every GPU reaches every other, and every network card. Here is
# a recorded one: a workstation with five GPUs ([club-3090, issue
# 46](https://github.com/noonghunna/club-3090/issues/46)).

# %%
workstation = """
        GPU0    GPU1    GPU2    GPU3    GPU4    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      SYS     SYS     SYS     SYS     8-15,24-31      1               N/A
GPU1    SYS      X      PHB     NODE    NODE    0-7,16-23       0               N/A
GPU2    SYS     PHB      X      NODE    NODE    0-7,16-23       0               N/A
GPU3    SYS     NODE    NODE     X      PHB     0-7,16-23       0               N/A
GPU4    SYS     NODE    NODE    PHB      X      0-7,16-23       0               N/A
"""
five = from_matrix(workstation)
assert len(five.gpus) == 5
topology_picture(five)

# %% [markdown]
# *The figure: GPU0 hangs alone on one CPU, the other four on the other; a line joins the CPUs. How fast the links are
# the matrix does not say. CPUs are numbered in the order of the GPUs in the matrix: CPU0 is NUMA node 1.*
#
# The codes, from near to far, as the command's own legend explains them:
#
# | code | the way between the two | limited by |
# |---|---|---|
# | `NV#` | # NVLinks together | NVLink; `NV18` is all 18 links of an H100 |
# | `PIX` | at most one PCIe bridge (switch) | PCIe; the CPU is not on the way |
# | `PXB` | several PCIe bridges, but no host bridge | PCIe; the CPU is not on the way |
# | `PHB` | a PCIe host bridge, where PCIe meets the CPU | PCIe, and what the CPU does with it |
# | `NODE` | several host bridges of one NUMA node | PCIe, and the ways inside the CPU |
# | `SYS` | the link between two NUMA nodes, usually two CPUs (UPI, Infinity Fabric) | that link, which others use too |
#
# Now line by line. GPU0 says `SYS` four times: whatever it exchanges crosses from CPU to CPU. Its cores are 8–15 and
# 24–31, on NUMA node 1; a process that feeds it should run there. GPU1 and GPU2 say `PHB` to each other and `NODE` to
# GPU3 and GPU4: same CPU, another host bridge. Nobody says `NV#`, so there is no NVLink, nor `PIX` or
# `PXB`: no two of the GPUs meet at a PCIe switch.
#
# On AMD GPUs `rocm-smi --showtopo` prints such a matrix. What NVLink is here is `XGMI` there (Infinity Fabric). A node
# of eight MI300X has no switch for it: each GPU has a link of its own to each of the other seven, 64 GB/s one way
# (*recorded*, stas00/ml-engineering, network/README.md). So a pair gets 64 GB/s, and only a job that uses all eight
# GPUs gets 448 GB/s out of each.
#
# **Predict** (question 5). Two of the five for a training on two GPUs: which?

# %%
for a, b in [(1, 2), (3, 4), (0, 1)]:
    print(" → ".join(five.path(a, b).devices))
assert [len(five.path(a, b).links) for a, b in ((1, 2), (3, 4), (0, 1))] == [2, 2, 3]

# %% [markdown]
# GPU1 and GPU2, or GPU3 and GPU4. With GPU0 in the job, everything also crosses the link between the CPUs. The matrix
# does not say how fast that is, nor how fast anything is: it names the kinds of links, and you look up or measure.
#
# How much does the wrong CPU cost? *Recorded* for a P100 on PCIe 3, from pinned memory: 12.15 GB/s to the GPU when
# process and memory sit on its CPU, 3.78 GB/s when both sit on the other one ([gearshifft, pull request
# 82](https://github.com/mpicbg-scicomp/gearshifft/pull/82)).

# %%
near, far = 12150.7e6, 3783.4e6  # recorded
whole = LINKS["pcie3"].bandwidth
print(f"near {near / whole:.0%} of PCIe 3, far {far / whole:.0%}")
assert round(near / far, 1) == 3.2

# %% [markdown]
# A third of the speed, from one line in a start script. `numactl` or the launcher's binding options set it.
#
# Network cards are in the matrix too. The next one is an excerpt of a DGX-2 with 16 V100 GPUs ([nccl-tests, issue
# 78](https://github.com/NVIDIA/nccl-tests/issues/78)): three GPUs, four of the cards. Which card should each GPU use?
# The nearest: with `PIX`, GPUDirect RDMA goes through one PCIe switch and never meets the CPU.

# %%
dgx_2 = """
        GPU0    GPU2    GPU4    mlx5_0  mlx5_1  mlx5_2  mlx5_4
GPU0     X      NV6     NV6     PIX     PXB     NODE    SYS
GPU2    NV6      X      NV6     PXB     PIX     NODE    SYS
GPU4    NV6     NV6      X      NODE    NODE    PIX     SYS
"""
header, *rows = [row.split() for row in dgx_2.strip().splitlines()]
distance = ["PIX", "PXB", "PHB", "NODE", "SYS"]
machine = from_matrix(dgx_2, gpu="v100")
nearest = {}
for gpu, *codes in rows:
    cards = {c: distance.index(k) for c, k in zip(header, codes, strict=True) if "mlx" in c}
    nearest[gpu] = min(cards, key=cards.get)
    for card in (nearest[gpu], max(cards, key=cards.get)):
        print(f"{distance[cards[card]]:5}", " → ".join(machine.path(gpu, card).devices))
assert nearest == {"GPU0": "mlx5_0", "GPU2": "mlx5_1", "GPU4": "mlx5_2"}

# %% [markdown]
# NCCL reads the same facts from the system and chooses by the same order; lesson 03 shows its log. If a job is slow
# between nodes, this matrix is the first thing to look at. But it says only what the wires allow. In a virtual machine,
# or where I/O virtualization (IOMMU) or PCIe access control (ACS) is switched on, traffic between two PCIe devices may
# go through the CPU all the same, and then it is slow or hangs
# ([NCCL's troubleshooting](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html)).

# %% [markdown]
# ## 5. A DGX H100, and a cluster of them
#
# Eight H100 joined by NVSwitches (four chips, drawn as one); two CPUs; eight network ports of 400 Gb/s for training,
# one beside each GPU. The next cell draws it from data; `.source` says where the data come from.

# %%
node = reference("dgx h100")
assert len(node.gpus) == 8
print(node.source)
topology_picture(node, path=node.path(0, 7))

# %% [markdown]
# *The figure, from top to bottom: network cards, CPUs, PCIe switches, GPUs, the NVSwitch. Each GPU has a PCIe switch
# with a network card of its own (`nvidia-smi` prints `PIX` for such a pair, on a DGX also `PXB`). The path from GPU 0
# to GPU 7 is highlighted: down to the NVSwitch and up again.*
#
# A **path** is a list of links. Its bandwidth is that of its slowest link, the **bottleneck**; its time for S bytes
# is the latency plus S through the bottleneck.
#
# **Predict.** Which GPUs of the node are closest to GPU 0?

# %%
for peer in (1, 4, 7):
    way = node.path(0, peer)
    print(f"GPU 0 to GPU {peer}: {way}")
    assert way.bottleneck.bandwidth == LINKS["nvlink4"].bandwidth

# %% [markdown]
# All of them, equally: that is what the switch is for. Now two nodes, joined by InfiniBand NDR.

# %%
two = cluster("dgx h100", 2)
across = two.path(0, 8)
print(across)
assert across.bottleneck.bandwidth == LINKS["ib_ndr"].bandwidth
topology_picture(two, path=across)

# %% [markdown]
# *The figure: two nodes side by side, a network switch above both. The highlighted path goes up from GPU 0 by PCIe to
# its network card and the switch, and down in the other node. The link to the switch is marked as the slowest; NVLink
# is not on the way.*
#
# What does that mean for messages of different sizes? *Modelled*, from the data sheets:

# %%
inside = two.path(0, 1)
print("message      in the node   across nodes   slower by")
for size in (4096, 2**20, 2**30):
    near, far = inside.seconds(size), across.seconds(size)
    print(
        f"{format_bytes(size):9}{near * 1e6:12.1f} us{far * 1e6:12.1f} us{far / near:10.1f} times"
    )
assert round(across.latency / inside.latency, 1) == 4.1
assert round(across.seconds(2**30) / inside.seconds(2**30), 1) == 9.0

# %% [markdown]
# Large messages: nine times, the ratio of the bandwidths. Small ones: the ratio of the latencies. Whatever you design
# for a cluster, ask first which messages cross between nodes.
#
# One switch is enough for a few nodes. Larger networks have two or three levels: *leaf* switches for the nodes, *spine*
# switches above them. If a leaf has less bandwidth upwards than its nodes have together, the network is
# **oversubscribed**, and the slow link of a large job is there, not at the node. *Recorded* for Llama 3's cluster of
# 24,000 GPUs: full bandwidth inside a pod of 3,072 GPUs, a seventh of it between pods ([Llama Team
# 2024](https://arxiv.org/abs/2407.21783), section 3.3.1). Two flows that share a link also halve each other's speed,
# even while other links are idle. That is why such networks spread flows or route adaptively.
#
# <details><summary>GPU 0 has something for GPU 9, on the other node. Its own card or GPU 1's card?</summary>
#
# In the model both ways have the same bottleneck. In a *rail-optimised* cluster the cards number r of all nodes are
# on the same switch. There it is better to hand the data to GPU 1 by NVLink first and let it cross on rail 1; NCCL
# does so and calls it PXN ([NVIDIA, Doubling all2all
# performance](https://developer.nvidia.com/blog/doubling-all2all-performance-with-nvidia-collective-communication-library-2-12/)).
# </details>
#
# Choose machines, GPUs and sizes yourself:

# %%
explorer = topology_explorer()
explorer

# %% [markdown]
# *The widget: a machine, two of its GPUs and a message size; below, the picture with the path, its bottleneck and the
# time. In a notebook that is not running it shows its first choice.*
#
# Things to look for: the same message in a DGX H100 and between two cloud machines with a T4 each; the bottleneck in
# the PCIe workstation; the furthest pair in a GB200 NVL72 rack of 72 GPUs.
#
# <details><summary>What is there to find?</summary>
#
# From T4 to T4 a large message takes 450 times as long: 1 GB/s (a network of 8 Gb/s) against 450. In the workstation
# there is no NVLink: the slots of the GPUs, PCIe 4, are the bottleneck. In the rack no pair is further than another:
# each gets 900 GB/s. The next cell asserts all three.
# </details>

# %%
inside, clouds = reference("dgx h100").path(0, 7), reference("2 x t4").path(0, 1)
assert inside.bandwidth / clouds.bandwidth == 450
assert reference("pcie workstation").path(0, 1).bottleneck.kind == "PCIe 4 x16"
assert {reference("gb200 nvl72").path(0, peer).bandwidth for peer in range(1, 72)} == {900e9}

# %% [markdown]
# ## 6. Measure
#
# Data sheets say what cannot be exceeded. What is reached, one has to measure.
#
# ### Memory to memory
#
# A copy reads S bytes and writes S bytes. **Predict**, for this machine: how many GB/s?

# %% tags=["nbval-ignore-output"]
source, target = torch.ones(copied // 4), torch.empty(copied // 4)
seconds = best_of(10, lambda: target.copy_(source))
memory_speed = 2 * copied / seconds
print(f"measured: {format_bytes(copied)} copied in {seconds * 1e3:.1f} ms")
print(f"{copied / seconds / 1e9:.1f} GB/s copied, {memory_speed / 1e9:.1f} GB/s read and written")

# %% [markdown]
# Say which of the two you mean. Benchmarks of memory usually count both ways; a copy "at 10 GB/s" moves 20.
#
# ### Process to process
#
# Two ranks play **ping-pong**: rank 0 sends S bytes, rank 1 sends them back. Half of the round trip is the time of
# one message. Why not time one way? The two clocks need not agree, and a `send` may return before the message has
# arrived.
#
# One measurement proves little: other programs run too, and they can only make a message slower. So the function
# plays many rounds, takes all sizes in turn so that a slow moment hits all alike, and returns for each size the time
# that a quarter of its rounds stay below. Each timed exchange follows one that is not timed: after it, both ranks are
# at the same line.


# %%
def ping_pong(sizes, rounds=40):
    """Seconds of one message of each size, ranks 0 and 1: the first quartile of all rounds."""
    rank, times = dist.get_rank(), {size: [] for size in sizes}
    buffers = {size: torch.zeros(size, dtype=torch.uint8, device=device()) for size in sizes}
    plays = itertools.product(range(rounds), buffers.items(), (False, True))
    for _, (size, buffer), timed in plays:
        start = time.perf_counter()
        if rank == 0:
            dist.send(buffer, dst=1)
            dist.recv(buffer, src=1)
        else:
            dist.recv(buffer, src=0)
            dist.send(buffer, dst=0)
        if buffer.is_cuda:
            torch.cuda.synchronize()
        if timed:
            times[size].append((time.perf_counter() - start) / 2)
    return [float(np.percentile(times[size], 25)) for size in sizes]


# %% [markdown]
# **Predict** (question 6). Four times the bytes: four times the time?

# %% tags=["nbval-ignore-output"]
seconds = launch(ping_pong, fitted, world_size=2)[0]
for size, took in zip(fitted, seconds, strict=True):
    print(f"{format_bytes(size):>8}{took * 1e3:9.3f} ms{size / took / 1e9:8.2f} GB/s")

# %% [markdown]
# Small messages take about the same time, whatever their size: that is α. Large ones take time in proportion: that
# is β.
# The cell fits both numbers to all sizes at once, on the *relative* error, so that small and large messages count
# alike.
#
# How sure can we be? The **bootstrap** draws the eight points again and again, with replacement, and fits each time.
# Where the fits disagree, we know little.

# %% tags=["nbval-ignore-output"]
alpha, beta = fit_alpha_beta(fitted, seconds)
fits = bootstrap_alpha_beta(fitted, seconds)
low, high = np.percentile(fits, [2.5, 97.5], axis=0)
with np.errstate(divide="ignore"):  # beta may be 0 in a draw of small sizes
    slow, fast = 1e-9 / high[1], 1e-9 / low[1]
small, large = low[0] * 1e6, high[0] * 1e6
print(f"alpha    {alpha * 1e6:7.0f} us,   95 % interval {small:.0f} to {large:.0f} us")
print(f"1 / beta {1e-9 / beta:7.2f} GB/s, 95 % interval {slow:.2f} to {fast:.2f} GB/s")
assert low[0] <= high[0] and low[1] <= high[1]

# %% [markdown]
# A model is worth what it predicts. So: sizes that were not measured, first the prediction, then the measurement.
#
# **Predict** (question 7). The median error, in per cent?

# %% tags=["nbval-ignore-output"]
predicted = [alpha + beta * size for size in unseen]  # before anything is sent
measured = launch(ping_pong, unseen, world_size=2)[0]
errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
for size, p, m in zip(unseen, predicted, measured, strict=True):
    print(f"{format_bytes(size):>8}  predicted {p * 1e3:7.3f} ms  measured {m * 1e3:7.3f} ms")
print(f"median error {np.median(errors):.0%}, largest {max(errors):.0%}")

# %% tags=["nbval-ignore-output"]
latency_fit(
    fitted,
    seconds,
    fits,
    (unseen, measured),
    title="measured: one message between two processes, and α + βS",
)

# %% [markdown]
# *The figure: time over size, both logarithmic. Dots are the fitted points, diamonds the sizes that were predicted
# first. The line is flat on the left, where α rules, and rises on the right, where βS does; the band around it holds
# 95 % of the bootstrap's fits.*
#
# If all diamonds lie on one side of the line, the machine may have been busier in one of the two runs, or the line has
# the wrong shape: measuring both again tells which. At best two numbers describe four orders of magnitude of message
# sizes. They do not describe them perfectly: β is not the same for a message that fits into a cache and for one that
# does not, and libraries switch their method at some size. The band knows nothing of that: it says how far the *points*
# pull the line about, not whether a line is the right shape. Lesson 03 meets the same in NCCL, where one line per
# protocol is needed.
#
# > **What changes on real GPUs.** NCCL's own α is a few microseconds (section 3). What you measure from Python is
# > more: each call also has to start a kernel. B is most of the data sheet's figure: *To and from a GPU*, below,
# > shows how much. A line is as good a model there, and no better.
#
# ### All pairs
#
# The pairs of a machine need not be equal. The next cell measures each pair of ranks, one at a time, with 1 MiB. On a
# machine with several GPUs its table shows the topology.


# %%
def all_pairs(size, rounds=20):
    """GB/s between each pair of ranks, one pair at a time; on every rank, of its own pairs."""
    rank, n = dist.get_rank(), dist.get_world_size()
    buffer = torch.zeros(size, dtype=torch.uint8, device=device())
    speeds = [float("nan")] * n
    for a, b in itertools.combinations(range(n), 2):
        dist.barrier()
        if rank not in (a, b):
            continue
        times, peer = [], a + b - rank
        for _ in range(rounds + 1):
            start = time.perf_counter()
            for turn in (a, b):
                dist.send(buffer, dst=peer) if rank == turn else dist.recv(buffer, src=peer)
            if buffer.is_cuda:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / 2)
        speeds[peer] = size / float(np.percentile(times[1:], 25)) / 1e9
    return speeds


# %% tags=["nbval-ignore-output"]
table = launch(all_pairs, 2**20, world_size=world_size)
print("measured, GB/s" + "".join(f"{f'rank {r}':>9}" for r in range(world_size)))
for rank, speeds in enumerate(table):
    print(f"rank {rank:9}" + "".join(f"{'-' if v != v else f'{v:.2f}':>9}" for v in speeds))

# %% [markdown]
# Each pair stands there twice, by the clock of either rank. Without GPUs all pairs are alike, but for noise:
# processes on one machine talk through its memory. With eight GPUs and PCIe you would see blocks; with an NVSwitch
# again none.
#
# ### To and from a GPU
#
# Where there is a GPU, this cell measures copies from pageable and pinned memory, and between two GPUs. Otherwise it
# prints what others recorded.


# %% tags=["nbval-ignore-output"]
def gpu_copy(target, source):
    def action():
        target.copy_(source, non_blocking=True)
        for index in {x.get_device() for x in (target, source) if x.is_cuda}:
            torch.cuda.synchronize(index)

    return copied / best_of(10, action) / 1e9


if torch.cuda.is_available():
    there = torch.empty(copied, dtype=torch.uint8, device="cuda:0")
    pageable, pinned = (torch.ones(copied, dtype=torch.uint8, pin_memory=p) for p in (False, True))
    print(f"measured: pageable to GPU {gpu_copy(there, pageable):8.1f} GB/s")
    print(f"          pinned to GPU {gpu_copy(there, pinned):10.1f} GB/s")
    print(f"          GPU to pinned {gpu_copy(pinned, there):10.1f} GB/s")
    print(f"          within the GPU {gpu_copy(torch.empty_like(there), there):9.1f} GB/s")
    if torch.cuda.device_count() > 1:
        print(f"          GPU 0 to GPU 1 {gpu_copy(there.to('cuda:1'), there):9.1f} GB/s")
else:
    print("recorded: CPU to H100 over PCIe 5, pinned        55.4 of  63 GB/s")
    print("          A100 to A100 over NVLink 3            274   of 300 GB/s")
    print("          H100 to H100 over NVLink 4            376   of 450 GB/s")
    print("(Bekman, ml-engineering, network; no GPU here)")

# %% [markdown]
# The three recorded ones reached 84 to 91 % of the data sheet. If you measure 40 %, ask first whether the data sheet
# adds up both directions, or reading and writing: a copy within the GPU does both.

# %%
recorded = {"pcie5": 55.4, "nvlink3": 274, "nvlink4": 376}
share = {key: rate * 1e9 / LINKS[key].bandwidth for key, rate in recorded.items()}
print(", ".join(f"{LINKS[key].name} {part:.0%}" for key, part in share.items()))
assert 0.83 < min(share.values()) and max(share.values()) < 0.92

# %% [markdown]
# ## 7. The roofline
#
# A link is slow only compared to what the GPU could do meanwhile. That comparison has a picture. The **arithmetic
# intensity** I of an operation is its FLOP per byte moved between memory and chip. Then (Williams, Waterman,
# Patterson 2009):
#
# $$\text{FLOP/s} \le \min(\text{peak},\; I \times \text{memory bandwidth})$$
#
# Both limits meet at the **ridge point**, I = peak ÷ bandwidth. To the left of it memory is the limit, to the right
# arithmetic.
#
# **Predict** (question 8), then run. To add two fp32 vectors is one operation for each element; two are read, one is
# written, 4 bytes each.

# %%
for precision in ("fp32", "bf16"):
    print(f"ridge of the H100 in {precision}: {h100.ridge(precision):.0f} FLOP/byte")
intensity = 1 / (3 * 4)
reached = min(h100.flops["fp32"], intensity * h100.memory_bandwidth)
print(f"c = a + b: {intensity:.3f} FLOP/byte, at most {reached / 1e12:.2f} TFLOP/s")
print(f"that is {reached / h100.flops['fp32']:.1%} of the fp32 peak")
assert round(h100.ridge("bf16")) == 295 and reached < 0.005 * h100.flops["fp32"]

# %% [markdown]
# No cleverness in the addition helps: the adders wait. What helps is to do more with each byte while it is on the
# chip. That is why kernels are *fused*, and why matrix products are what GPUs like: n³ work on n² data.
#
# ### This machine's roof
#
# The next function lists operations with their FLOP and the bytes that must move at least: each input read once, each
# output written once. It uses the GPU where there is one.


# %%
def operations(on):
    """Yield name, FLOP, bytes and a call, in fp32."""
    count = 2**27 if on == "cuda" else 2**23  # more than fits into a cache
    x, y, out = (torch.ones(count, device=on) for _ in range(3))
    yield "add", x.numel(), 3 * 4 * x.numel(), lambda: torch.add(x, y, out=out)
    square, vector, product = (torch.ones(*n, device=on) for n in ((4096, 4096), (4096,), (4096,)))
    work = 2 * square.numel(), 4 * square.numel()
    yield "matrix × vector", *work, lambda: torch.mv(square, vector, out=product)
    for side in [*sides, 8192] if on == "cuda" else sides:
        a, b, c = (torch.ones(side, side, device=on) for _ in range(3))
        work = 2 * side**3, 3 * 4 * side**2
        yield f"matmul {side}", *work, lambda a=a, b=b, c=c: torch.mm(a, b, out=c)


def measure(on):
    """Measure all: name to (intensity, FLOP/s), and the most bytes per second that any moved."""
    wait = torch.cuda.synchronize if on == "cuda" else lambda: None
    points, speed = {}, 0.0
    for name, work, moved, call in operations(on):
        seconds = best_of(10, lambda call=call: (call(), wait()))
        points[name] = work / moved, work / seconds
        speed = max(speed, moved / seconds) if "matmul" not in name else speed
    return points, speed


# %% [markdown]
# **Predict.** A matrix product of side n does 2n³ operations on 3n² numbers of b bytes, so I = 2n / 3b. From which
# side on is it limited by arithmetic, if the ridge is at 10 FLOP/byte and b = 4?

# %%
for name, work, moved, _ in operations("cpu"):
    if name.startswith("matmul"):
        side = int(name.split()[1])
        assert abs(work / moved - 2 * side / (3 * 4)) < 1e-9
ridge, width = 10, 4
print(f"side {3 * width * ridge / 2:.0f} and above")

# %% tags=["nbval-ignore-output"]
chip = "cuda" if torch.cuda.is_available() else "cpu"
points, best_speed = measure(chip)
best_rate = max(rate for _, rate in points.values())
for name, (intensity, rate) in points.items():
    print(f"{name:16}{intensity:8.3f} FLOP/byte{rate / 1e9:10.1f} GFLOP/s")
print(f"roof {best_rate / 1e9:.0f} GFLOP/s, memory {best_speed / 1e9:.1f} GB/s")
ridge = best_rate / best_speed
print(f"ridge {ridge:.1f} FLOP/byte: a matmul of side {6 * ridge:.0f} in fp32")
shown = {name: points[name] for name in points if name not in ("matmul 128", "matmul 512")}
roofline(best_rate, best_speed, shown, f"measured: this machine's {chip.upper()}, fp32")

# %% [markdown]
# *The figure: the slope on the left is memory, the flat roof arithmetic; both are drawn through the best that this
# machine showed. Addition and matrix × vector lie on the left. Products of growing side move to the right and up,
# until they reach the roof.*
#
# Small products stay below the roof although they lie right of the ridge: starting the operation costs time too. It
# is the α of arithmetic.
#
# ### An H100's roof, and a layer on it
#
# *Modelled:* one linear layer of a transformer, 4,096 × 16,384 weights in bf16, applied to T tokens. It does 2 · T ·
# 4096 · 16384 operations and moves, at least, the weights, the T inputs and the T outputs.
#
# **Predict.** A chat bot that writes one answer has T = 1 at each step. Training has thousands. Where are they?

# %%
d, f = 4096, 16384


def layer(tokens):
    """Arithmetic intensity of the layer, and the most that an H100 reaches there, in FLOP/s."""
    intensity = 2 * tokens * d * f / (2 * (d * f + tokens * d + tokens * f))
    return intensity, min(h100.flops["bf16"], intensity * h100.memory_bandwidth)


tokens = [1, 16, 128, 8192]
for count in tokens:
    intensity, rate = layer(count)
    print(f"T = {count:5}{intensity:8.0f} FLOP/byte{rate / 1e12:8.1f} TFLOP/s at most")
enough = next(t for t in range(1, 8192) if layer(t)[0] >= h100.ridge())
print(f"limited by arithmetic from T = {enough} on")
assert enough == 325 and layer(1)[1] < 0.005 * h100.flops["bf16"]

# %%
placed = {f"T = {count}": layer(count) for count in tokens}
placed["c = a + b"] = (2 / 6 / 2, 2 / 6 / 2 * h100.memory_bandwidth)  # bf16: 1 FLOP, 6 bytes
title = "modelled: a linear layer on T tokens, H100, bf16, dense"
roofline(h100.flops["bf16"], h100.memory_bandwidth, placed, title, modelled=True)

# %% [markdown]
# *The figure: hollow points on the H100's roof. The addition and T = 1 are far down the slope, T = 16 and 128 higher
# up on it, T = 8,192 on the flat part.*
#
# One token at a time uses less than half a per cent of the arithmetic: 134 MB of weights are read for two operations
# on each. A training step has enough tokens. Its backward pass has two products of the same size for each one of the
# forward pass, so it lies at a similar place.
#
# How much of the roof is reached? *Recorded:* the best matrix product on an H100 in bf16 ran at 794.5 TFLOP/s
# (Bekman, ml-engineering, accelerators), and the training of Llama 3 405B at 380 to 430 TFLOP/s per GPU (Llama Team
# 2024, table 4).

# %%
for what, rate in {
    "best matrix product": ACHIEVABLE_MATMUL["h100"],
    "Llama 3, 8,192 GPUs": 430e12,
}.items():
    print(f"{what:20} {rate / h100.flops['bf16']:.0%} of 989 TFLOP/s")

# %% [markdown]
# > **What changes on real GPUs.** Peak and memory are both faster, but not by the same factor: compare this
# > machine's ridge, in fp32, with the H100's 20 in fp32 and 295 in bf16, where the tensor cores work. The further
# > right it lies, the more operations wait for memory.
#
# A link has a roofline too. Put its bandwidth in place of the memory's, and count the bytes sent: an H100 behind a
# 400G port needs 19,788 operations for each byte it sends, or it waits.

# %%
for key in ("nvlink4", "ib_ndr", "eth_10g"):
    ridge = h100.flops["bf16"] / LINKS[key].bandwidth
    print(f"{LINKS[key].name:15}{ridge:10,.0f} FLOP for each byte sent")
assert round(h100.flops["bf16"] / LINKS["ib_ndr"].bandwidth) == 19788

# %% [markdown]
# ## 8. What it means for training: one all-reduce on each rung
#
# Sixteen H100 train a model of 7 billion parameters, each on data of its own (their optimizer states are sharded, as
# in lesson 06, or they would not fit). After every backward pass they average their gradients, 14 GB in bf16. Lesson 02
# shows that the busiest GPU must *send* at least 2(N−1)/N of that, as long as only GPUs add: switches that add need
# about half (lesson 03, which builds algorithms that reach the bound).
#
# **Predict** (question 9): how long on each rung, if it is the only way from each GPU to all others?

# %%
n, gradients = 16, 7e9 * 2
sent = bytes_sent("all_reduce", n, gradients)
assert sent == 26.25e9
at_least = {key: sent / LINKS[key].bandwidth for key in ("nvlink4", "pcie5", "ib_ndr", "eth_10g")}
for key, seconds in at_least.items():
    print(f"{LINKS[key].name:15}{seconds:8.3f} s at least, if only GPUs add")

# %% [markdown]
# Is that much? Compare it with the arithmetic. A token costs 2 operations for each parameter forward (one
# multiply-add) and twice as many backward: 6 in all. Say 8,192 tokens on each GPU and step, at the 430 TFLOP/s above.

# %%
computing = 6 * 7e9 * 8192 / 430e12
print(f"computing one step: {computing:.2f} s")
shares = {key: seconds / (seconds + computing) for key, seconds in at_least.items()}
for key, share_waiting in shares.items():
    print(f"then all-reduce over {LINKS[key].name:15}{share_waiting:5.0%} of the step is waiting")
assert round(shares["ib_ndr"], 1) == 0.4 and shares["nvlink4"] < 0.07

# %% [markdown]
# On NVLink it is a matter of 7 %. Over one 400G port each, two fifths of the time goes to waiting, unless
# communication overlaps with computing (lesson 04). Over 10G Ethernet this model should not be trained in this way
# at all.
#
# Now put the sixteen into the two DGX H100 of section 5. The bottleneck between the nodes is still a 400G port. But
# no GPU has to send its 26 GB through one: most neighbours are reached by NVLink. The usual way lays **rings**
# through all GPUs, each ring with a part of the data, so that each leaves a node once (lesson 03). Then a whole
# *node* sends as much as one GPU did, and spreads it over its eight ports.
#
# **Predict.** How long with rings: 0.5 s as before, or nearly as on NVLink?

# %%
ports = 8 * LINKS["ib_ndr"].bandwidth
pace = min(ports, LINKS["nvlink4"].bandwidth)
rings = sent / pace
print(f"two DGX H100, by rings: {rings:.3f} s at least, 0.525 s divided by {0.525 / rings:.0f}")
print(f"{rings / at_least['nvlink4'] - 1:.1%} more than on NVLink alone")
assert pace == ports and round(rings, 3) == 0.066 and round(at_least["ib_ndr"], 3) == 0.525

# %% [markdown]
# Nearly as on NVLink. *Recorded* on four nodes of eight H200: in such rings each GPU sent 364.7 GB/s, seven times
# what a 400G port carries (Bekman, ml-engineering, network). So the bottleneck of a path is half of the question.
# The other half is how many bytes cross it, and how many links like it share them.
#
# These estimates used bandwidth alone, and no α. For 14 GB that is fair; for a thousand small tensors it is not.

# %% [markdown]
# ## Recap, with the numbers of this run

# %% tags=["nbval-ignore-output"]
print(f"memory copy: {memory_speed / 1e9:.1f} GB/s read and written")
print(f"a buffer used again: {fresh / again:.1f} times faster than fresh memory")
print(f"process to process: alpha {alpha * 1e6:.0f} us, bandwidth {1e-9 / beta:.2f} GB/s")
print(f"unseen sizes predicted with a median error of {np.median(errors):.0%}")
print(f"roofline: {best_rate / 1e9:.0f} GFLOP/s, ridge at {best_rate / best_speed:.1f} FLOP/byte")

# %% [markdown]
# - From P100 to B200 arithmetic grew 106 times, memory and NVLink 11 times, PCIe 4 times: data movement is the limit.
# - Before you compare: dense, one direction, bytes, per GPU.
# - A path is as fast as its slowest link. `nvidia-smi topo -m` names the links: `NV#` is near, `SYS` is far.
# - For many GPUs, count also the bytes that cross the slowest link, and the links that share them.
# - t = α + S/B. Below αB bytes latency rules. Fit both, state the uncertainty, check on sizes you did not fit.
# - Intensity against the ridge says who waits: arithmetic, memory, or a link.
#
# <details><summary>Answers to the nine predictions</summary>
#
# 1. 989: the other figure counts zeros that are skipped (section 1).
# 2. 16-bit arithmetic, 106 times; memory bandwidth and NVLink 11 times, PCIe 4 times (section 1).
# 3. 0.2 s: a copy has one direction, 450 GB/s (section 2).
# 4. 50 GB/s, nine times slower (section 2).
# 5. `PHB`: same CPU. `SYS` crosses between CPUs (section 4).
# 6. Nearly the same time: both are latency. This run's times are in section 6.
# 7. It depends on the machine and on what else runs; this run's error is printed above. A line is a good model here
#    and not a perfect one (section 6).
# 8. 0.28, or 0.4 %: one operation for 12 bytes (section 7).
# 9. 0.525 s and 21 s (section 8). In two nodes of eight, with eight ports each, 0.066 s.
# </details>
#
# **Exercises:** [exercises/01_gpu_interconnects](../exercises/01_gpu_interconnects_exercises.ipynb). **Next:** [02
# collectives](02_collectives.ipynb): what ranks say to each other, and how many bytes that takes.
#
# **Worth reading**
# - S. Bekman, *Machine Learning Engineering*, chapters on network and accelerators, 2023–,
#   [github.com/stas00/ml-engineering](https://github.com/stas00/ml-engineering): measured figures, and the traps
#   behind data sheets.
# - J. Austin et al., *How to Think About GPUs*, 2025,
#   [jax-ml.github.io/scaling-book/gpus](https://jax-ml.github.io/scaling-book/gpus/): from the SM to the cluster,
#   with rooflines for links.
# - S. Williams, A. Waterman, D. Patterson, *Roofline: an insightful visual performance model for multicore
#   architectures*, 2009, [doi.org/10.1145/1498765.1498785](https://doi.org/10.1145/1498765.1498785).
