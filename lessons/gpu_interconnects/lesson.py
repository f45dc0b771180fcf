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
# the time in which a network port of 400 Gb/s delivers one, they could do 39,576. So a GPU that trains together with
# others can easily spend its time waiting. To prevent that, you have to know the path of the data, and the slowest
# link on it. This lesson finds both, first on paper and then by measuring.
#
# **You will be able to**
# - *read* the figures of a data sheet, and see which factor each of them hides;
# - *find* the path between two GPUs and its slowest link, from `nvidia-smi topo -m`;
# - *measure* latency and bandwidth, say how sure you are, and *predict* the time of a message you have not sent yet;
# - *place* an operation on a roofline: is arithmetic, memory or a link its limit?
#
# **Before this:** [00 start_here](00_start_here.ipynb). **Time:** about 45 minutes to read the core, 85 with the
# deeper sections, under a minute to run.

# %% [markdown]
# The first cell imports PyTorch and names every parameter; the second imports from the course. `LINKS` and `GPUS`
# hold figures of data sheets, each with its source, and counted as section 1 says; for links between CPUs, `LINKS` has
# what NCCL assumes.

# %% tags=["parameters"]
import torch
import torch.distributed as dist

world_size = 4  # ranks whose pairs are measured, 2 or more
fitted = [2**k for k in range(10, 23, 2)]  # message sizes to fit: 1 KiB to 4 MiB
unseen = [3 * 2**k for k in range(10, 20, 3)]  # and to predict before measuring: 3 KiB to 1.5 MiB
copied = 2**26  # bytes copied where memory is measured: 64 MiB
sides = [32, 128, 512]  # of the matrices on the roofline

# %%
from course_utils import launch
from course_utils.costs import bytes_sent, format_bytes
from course_utils.hardware import GPUS, LINKS, growth, rungs
from course_utils.predictions import predict, predictions
from course_utils.programs import SCRIPTS, folded, run_program
from course_utils.recorded import gpu_check
from course_utils.topology import cluster, from_matrix, this_machine
from lessons.gpu_interconnects import figures
from lessons.gpu_interconnects.explorer import topology_explorer
from lessons.gpu_interconnects.link_measurements import fit_line, measured_roof, time_messages
from lessons.gpu_interconnects.topology_pictures import topology_picture

h100 = GPUS["h100"]

# %% [markdown]
# ## 1. Three habits of data sheets
#
# A GPU is a crowd of small processors, the **streaming multiprocessors** (SMs), around one large memory. Each SM has
# **CUDA cores** for general arithmetic and **tensor cores**, which only multiply and add small matrices, but do
# nearly all of the arithmetic of training. The memory, **HBM** (high-bandwidth memory), sits beside the chip in the
# same package. Everything else is reached by links:
#
# ```text
#  ┌─ H100 ────────────────────────────────┐
#  │ 132 SMs, each with 4 tensor cores and │
#  │ 128 CUDA cores; 50 MB of cache        │── NVLink ──▶ other GPUs of the node
#  │    ▲                                  │
#  │    ▼                                  │── PCIe ──┬─▶ CPU and its memory
#  │ HBM, 80 GB                            │          └─▶ network card ── network ──▶ other nodes
#  └───────────────────────────────────────┘
# ```
#
# How fast is each part? Data sheets prefer large numbers. Here are three figures of a node with eight H100s. (An
# operation, or FLOP, is one multiplication or one addition of floating-point numbers.)
#
# - tensor cores: 1,979 TFLOP/s in bf16 (numbers of 16 bits), "with sparsity";
# - NVLink: 900 GB/s for each GPU;
# - network: eight ports of 400 Gb/s, one for each GPU.
#
# **Predict**: how long does one GPU need, at least, for 1,979 · 10¹² operations on ordinary matrices? How long for a
# copy of 45 GB to its neighbour, and to a GPU of another node?

# %%
copying = predict("45 GB by NVLink take at least", unit="s")

# %%
seconds = {
    "1,979e12 operations": 1979e12 / h100.flops["bf16"],
    "45 GB by NVLink": 45e9 / LINKS[h100.nvlink].bandwidth,
    "45 GB by one 400G port": 45e9 / LINKS["ib_ndr"].bandwidth,
}
for what, least in seconds.items():
    print(f"{what:24}{least:5.2f} s at least")

# %% jupyter={"source_hidden": true}
copying.compare(seconds["45 GB by NVLink"])

# %% [markdown]
# **Compare.** Two seconds, a tenth of one, and nearly one. None is what dividing by the figure gives, because each
# figure hides a factor:
#
# - **Sparsity.** If two of every four neighbouring weights are zero, the hardware skips them, but the 1,979 TFLOP/s
#   count the skipped operations too. Ordinary, **dense** matrices get 989 TFLOP/s. All FLOP/s in this course are
#   dense.
# - **Direction.** NVLink and PCIe are **full duplex**: data flows both ways at once, each way at full rate, and data
#   sheets give the sum. A copy has one direction, so it gets 450 of the 900 GB/s.
# - **Bits and ports.** Networks count bits. One port of 400 Gb/s carries 50 G*B*/s. All eight ports of a node
#   together carry 400 GB/s, which looks nearly the same.
#
# GB are 10⁹ bytes; GiB, which memory is often counted in, are 2³⁰, which is 7.4 % more.
#
# > **Misconception.** "Two H100s exchange 900 GB/s, so a copy runs at 900 GB/s." *Recorded:* a copy between two H100s
# > reached 376 of 450 GB/s ([Bekman, ml-engineering,
# > network](https://github.com/stas00/ml-engineering/blob/master/network/README.md)).

# %% [markdown]
# ## 2. The ladder, and who climbs it
#
# | link | what it joins | to know |
# |---|---|---|
# | **NVLink** | GPU and GPU | several links per GPU, used together: 4 (P100) to 18 (H100, B200) |
# | **NVSwitch** | all GPUs of a node | each reaches every other at the full rate of its NVLinks |
# | **PCIe** | GPU, CPU, network card, disk | 16 parallel lanes; each generation about twice as fast |
# | **InfiniBand** | nodes | EDR, HDR, NDR, XDR: 100 to 800 Gb/s per port |
# | **Ethernet** | nodes, and everything else | 10 to 400 Gb/s here; 800 exist |

# %%
speeds, kinds = rungs()
figures.ladder(speeds, "recorded: NVLink per GPU, PCIe x16, networks per port", kinds)

# %% [markdown]
# *The figure: bars on a logarithmic axis from 1.25 GB/s (10G Ethernet) to 8 TB/s (HBM of a B200), one colour for each
# kind. NVLink 2 to 5, PCIe 6 and InfiniBand XDR lie between 100 GB/s and 1 TB/s; all other links are below.*
#
# The HBM of an H100 is 2,680 times as fast as 10G Ethernet, so the wrong link can make a program slower by orders of
# magnitude. And since 2016 computing has become faster by more than links and memory have:

# %%
names, factors = growth()
grown = {what: round(values[-1] / values[0]) for what, values in factors.items()}
assert [*grown.values()] == [106, 11, 11, 11, 4]
figures.generations(names, factors, "recorded: growth since the P100 (data sheets)")

# %% [markdown]
# *The figure: six GPUs, oldest first, logarithmic. Arithmetic ends at 106 times the P100's; memory size, memory
# bandwidth and NVLink end together at 11 times, PCIe at 4 times. A B200 could do PCIe 6, but it is sold in machines
# with PCIe 5.*
#
# Arithmetic grew more than nine times as much as anything that moves data. (The first step is so large because the
# P100 had no tensor cores.) A link of B bytes per second brings B/2 numbers of 16 bits per second. How many
# operations could an H100 do while one number arrives?

# %%
ways = {
    "its own HBM": h100.memory_bandwidth,
    "a GPU next to it, by NVLink": LINKS[h100.nvlink].bandwidth,
    "the CPU's memory, by PCIe": LINKS[h100.pcie].bandwidth,
    "another node, by one 400G port": LINKS["ib_ndr"].bandwidth,
}
for way, speed in ways.items():
    print(f"one number from {way:32}{h100.flops['bf16'] / (speed / 2):8,.0f} operations")

# %% [markdown]
# <small>Sources of sections 1 and 2: Bekman, as above; NVIDIA, [Ampere
# Architecture In-Depth](https://developer.nvidia.com/blog/nvidia-ampere-architecture-in-depth/) (P100, V100) and
# [Hopper Architecture In-Depth](https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/); the data
# sheets that `GPUS[...].source` and `LINKS[...].source` name.</small>

# %% [markdown]
# ## 3. Two numbers for a link: α and β
#
# Bandwidth says how fast bytes flow once they flow. **Latency** is the time until then, in which software prepares
# the message, work starts on a GPU, and switches pass it on. The usual model of a message of S bytes has one number
# for each:
#
# $$t(S) = \alpha + \beta S, \qquad \beta = 1/B$$
#
# α, in seconds, is the time of an empty message, and B is the bandwidth. A message of αB bytes spends half of its
# time on latency, and therefore gets half of the bandwidth. Below that size latency rules, above it bandwidth. NCCL
# assumes these α in the method that it uses for large messages:

# %%
for key in ("nvlink4", "pcie5", "ib_ndr"):
    link = LINKS[key]
    half = format_bytes(link.latency * link.bandwidth)
    numbers = f"α {link.latency * 1e6:4.1f} µs, B {link.bandwidth / 1e9:3.0f} GB/s"
    print(f"{link.name:15}{numbers}, half of it at αB = {half}")

# %% [markdown]
# A megabyte is thus a *small* message for NVLink. (For small ones NCCL has methods with a smaller α and less
# bandwidth: lesson 03.)
#
# <small>Source of α (*recorded*): NCCL,
# [src/graph/tuning.cc](https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc).</small>

# %% [markdown]
# ## 4. Which links does this machine have?
#
# The next cell asks the driver about GPUs and their links, and the operating system about CPUs and network cards.

# %% tags=["nbval-ignore-output"]
here = this_machine()
print(here.source)
topology_picture(here)

# %% [markdown]
# *The figure: your machine. Boxes are devices, lines are links, with their kind, and their bandwidth where it is
# known. In the version that came with the course there is no GPU.*
#
# Where there are NVIDIA GPUs, `nvidia-smi topo -m` prints how every GPU reaches every other, as a matrix. Here is a
# *recorded* one, of a workstation with five GPUs ([club-3090, issue
# 46](https://github.com/noonghunna/club-3090/issues/46)):

# %%
five = from_matrix("""
        GPU0    GPU1    GPU2    GPU3    GPU4    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      SYS     SYS     SYS     SYS     8-15,24-31      1               N/A
GPU1    SYS      X      PHB     NODE    NODE    0-7,16-23       0               N/A
GPU2    SYS     PHB      X      NODE    NODE    0-7,16-23       0               N/A
GPU3    SYS     NODE    NODE     X      PHB     0-7,16-23       0               N/A
GPU4    SYS     NODE    NODE    PHB      X      0-7,16-23       0               N/A
""")

# %% [markdown]
# Each code names the way between two devices. The table goes from near to far. A **NUMA node** is not a machine but a
# group of cores with the memory near them, usually one CPU. A **host bridge** is where PCIe meets the CPU.
#
# | code | the way between the two | limited by |
# |---|---|---|
# | `NV#` | # NVLinks together; `NV18` is all 18 of an H100 | NVLink |
# | `PIX`, `PXB` | one PCIe switch, or several | PCIe; the CPU is not on the way |
# | `PHB`, `NODE` | a host bridge, or several of one NUMA node | PCIe, and the ways inside the CPU |
# | `SYS` | the link between two NUMA nodes, usually two CPUs | that link, which others use too |
#
# **Predict**: two of the five GPUs are to train together. Which two would you take, and which one would you avoid?

# %%
avoided = predict("the GPU to avoid", [f"GPU{i}" for i in range(5)])

# %%
for a, b in [(1, 2), (0, 1)]:
    print(" → ".join(five.path(a, b).devices))
topology_picture(five)

# %% jupyter={"source_hidden": true}
avoided.compare("GPU0")

# %% [markdown]
# **Compare.** GPU1 and GPU2 say `PHB` to each other, and so do GPU3 and GPU4. They are the nearest pairs. Avoid GPU0:
# its row says `SYS` four times, so whatever it exchanges crosses from CPU to CPU.
#
# *The figure: GPU0 alone on one CPU, the other four on the other; a line joins the CPUs. CPU0 is NUMA node 1, because
# the picture numbers CPUs in the order of their GPUs.*
#
# No entry says `NV#`, so there is no NVLink. The matrix only names links; look up or measure how *fast* they are.
# (Section 15 reads more from it.)

# %% [markdown]
# ## 5. The path, and its slowest link
#
# Data that crosses several links streams through all of them at once, like water through pipes in a row. So a
# **path** is as fast as its slowest link, the **bottleneck**. A DGX H100 has eight GPUs on an NVSwitch, and a network
# card (NIC) beside each. Here are two such nodes, with the latencies of section 3:

# %%
two = cluster("dgx h100", 2)
inside, across = two.path(0, 1), two.path(0, 8)
print(inside, across, sep="\n")
topology_picture(two, path=across)

# %% [markdown]
# *The figure: two nodes side by side, a network switch above both. The highlighted path goes from GPU 0 up by PCIe to
# its network card and the switch, and down in the other node. The links to the switch are marked as the slowest;
# NVLink is not on the way. The 22 GB/s between the CPUs are NCCL's assumption, not a data sheet's.*
#
# Inside the node all GPUs are equally near, which is what the NVSwitch is for. To the other node the bottleneck is
# the network port.
#
# **Predict**: how many times longer does 1 GiB take to the other node than inside the node? And 4 KiB?

# %%
longer = predict("1 GiB takes longer to the other node", unit="times")

# %%
print("message      in the node   across nodes")
for size in (4096, 2**20, 2**30):
    near, far = inside.seconds(size), across.seconds(size)
    print(f"{format_bytes(size):9}{near * 1e6:12.1f} µs{far * 1e6:12.1f} µs", end="")
    print(f"{far / near:8.1f} times")

# %% jupyter={"source_hidden": true}
longer.compare(across.seconds(2**30) / inside.seconds(2**30))

# %% [markdown]
# **Compare.** *Modelled*, from the data sheets: large messages take nine times as long, the ratio of the bandwidths.
# Small ones take four times as long, the ratio of the latencies, because bandwidth hardly counts for them.
#
# So ask first which
# messages cross between nodes; if they are small, look at latency. Choose machines, GPUs and sizes yourself:

# %%
explorer = topology_explorer()
explorer

# %% [markdown]
# *The widget: a machine, two of its devices and a message size; below, the picture with the path, its bottleneck and
# the time. In a notebook that is not running it shows its first choice.*
#
# <details><summary>What is there to find?</summary>
#
# Between two cloud machines with a T4 each, a large message takes 450 times as long as in a DGX H100: a network of 8
# Gb/s has 1 GB/s. In the PCIe workstation there is no NVLink, and the slots of the GPUs are the bottleneck. In a
# GB200 NVL72 rack all 72 GPUs are equally near, at 900 GB/s.
# </details>

# %% [markdown]
# ## 6. Measure: a message between two processes
#
# A data sheet gives the upper limit. What is reached has to be measured, and for that two ranks play **ping-pong**.
# Rank 0 sends S bytes, rank 1 sends them back, and half of the round trip is the time of one message. We do not time
# one way, because two clocks need not agree, and because a `send` that has returned does not prove that the message
# has arrived: gloo's returns when the other side takes it, NCCL's when it is queued or buffered.


# %%
def ping_pong(buffer):
    """Send a buffer from rank 0 to rank 1 and back."""
    if dist.get_rank() == 0:
        dist.send(buffer, dst=1)
        dist.recv(buffer, src=1)
    else:
        dist.recv(buffer, src=0)
        dist.send(buffer, dst=0)


# %% [markdown]
# One measurement proves little: other programs run too, and they can only make a message slower. So `time_messages`
# plays many rounds, with all sizes in turn so that a slow moment hits all alike, and returns the lower quartile for
# each size: a quarter of its rounds were faster.
#
# **Predict**: a message of 4 KiB has four times the bytes of one of 1 KiB. Does it take four times as long? And 4 MiB
# against 1 MiB?

# %%
fourfold = predict("4 KiB against 1 KiB", unit="times as long")

# %% tags=["nbval-ignore-output"]
seconds = time_messages(ping_pong, fitted)
for size, took in zip(fitted, seconds, strict=True):
    print(f"{format_bytes(size):>8}{took * 1e3:9.3f} ms{size / took / 1e9:8.2f} GB/s")

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
took = dict(zip(fitted, seconds, strict=True))
fourfold.compare(took[4096] / took[1024])

# %% [markdown]
# **Compare.** Small messages take about the same time whatever their size: α. For large ones every byte adds time, β,
# so 4 MiB take roughly four times as long as 1 MiB: less by the share of α, more where they no longer fit into a cache.
#
# `fit_line`
# fits both numbers to all sizes at once, by the *relative* error, so that small and large messages count alike. To show
# how sure we can be, it also fits many random draws of the points, with replacement (the **bootstrap**). The more these
# fits disagree, the less we know.

# %% tags=["nbval-ignore-output"]
line = fit_line(fitted, seconds)
print(line)

# %% [markdown]
# A model is judged by its predictions. So let it predict the times of new sizes, and measure them afterwards.
#
# **Predict**: how far off is it, typically: 2 %, 20 %, or a factor of 2?

# %%
off = predict("the line is off by", unit="%")

# %% tags=["nbval-ignore-output"]
predicted = [line.seconds(size) for size in unseen]  # before anything is sent
measured = time_messages(ping_pong, unseen)
for size, p, m in zip(unseen, predicted, measured, strict=True):
    said = f"predicted {p * 1e3:7.3f} ms, measured {m * 1e3:7.3f} ms"
    print(f"{format_bytes(size):>8}  {said}, off by {abs(p / m - 1):.0%}")
title = "measured: one message between two processes, and α + βS"
figures.latency_fit(fitted, seconds, line.fits, (unseen, measured), title=title)

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
errors = sorted(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))
off.compare(100 * errors[len(errors) // 2])

# %% [markdown]
# **Compare.** Of the three answers 20 % is usually the nearest.
#
# *The figure: time over size, both logarithmic. Dots are the fitted points, diamonds the sizes that were predicted
# first. The line is flat on the left, where α rules, and rises on the right, where βS does; the band around it holds
# 95 % of the bootstrap's fits.*
#
# If all diamonds lie on one side of the line, the two runs met
# different conditions: another program, or the two processes on other cores. A line is a good model, but not a perfect
# one, because a message that fits into a cache has another β, and libraries switch methods at some size. The band does
# not include that. It says how far the *points* move the line, not whether a line is the right shape.
#
# > **What changes on real GPUs.** α is a few microseconds inside NCCL, but what you measure from Python is more. On one
# > H200 a call took 23 to 29 µs with a single rank, which sends nothing (*recorded*, `gpu-check`). B is most of what
# > the data sheet says (section 17). Each of NCCL's methods needs its own line, again good but not perfect (lesson 03).

# %% jupyter={"source_hidden": true}
calls = gpu_check("collectives")["all_reduce"]["value"]
assert (round(1e6 * min(calls)), round(1e6 * max(calls))) == (23, 29)

# %% [markdown]
# ## 7. The roofline: who waits for whom?
#
# A link is slow only compared with what the GPU could compute meanwhile. The **arithmetic intensity** I of a
# computation is its FLOP per byte moved between memory and chip. Bytes come at the memory's bandwidth, and each
# brings work of I FLOP, so (Williams, Waterman, Patterson 2009)
#
# $$\text{FLOP/s} \le \min(\text{peak},\; I \times \text{memory bandwidth})$$
#
# Both limits meet at the **ridge**, I = peak ÷ bandwidth. Left of it memory is the limit, right of it arithmetic.
#
# **Predict**: an H100 does 66.9 TFLOP/s in fp32 on its CUDA cores, and its HBM has 3.35 TB/s. What share of the peak
# does `c = a + b` reach, on long vectors? Each addition reads two numbers of 4 bytes and writes one.

# %%
adding = predict("of the peak, adding reaches", unit="%")

# %%
intensity = 1 / (3 * 4)
reached = intensity * h100.memory_bandwidth
print(f"c = a + b: {intensity:.3f} FLOP/byte, at most {reached / 1e12:.2f} TFLOP/s,", end=" ")
print(f"{reached / h100.flops['fp32']:.1%} of the peak")
print(f"ridges: {h100.ridge('fp32'):.0f} FLOP/byte in fp32, {h100.ridge('bf16'):.0f} in bf16")

# %% jupyter={"source_hidden": true}
adding.compare(100 * reached / h100.flops["fp32"])

# %% [markdown]
# **Compare.** 0.4 %: twelve bytes for one operation. The CUDA cores wait, so faster ones would not help. What helps is
# to do more with each byte while it is on the chip.
#
# That is why computations are *fused* into one, and why products of large matrices suit GPUs: n³ work on n² numbers.
# Where is the roof of your machine? `measured_roof` times additions and products, on the GPU if there is one,
# otherwise on one core:

# %% tags=["nbval-ignore-output"]
chip = "cuda" if torch.cuda.is_available() else "cpu"
roof = measured_roof(chip, sides)
for name, (intensity, rate) in roof.points.items():
    print(f"{name:16}{intensity:8.3f} FLOP/byte{rate / 1e9:10.1f} GFLOP/s")
title = f"measured: {'the GPU' if chip == 'cuda' else 'one core'} of this machine, fp32"
figures.roofline(roof.peak, roof.bandwidth, roof.points, title)

# %% [markdown]
# *The figure: the slope on the left is memory, the flat roof arithmetic; each goes through the best point of its
# kind. Addition and matrix × vector lie on the left. Larger products lie further right, and the best of them is on
# the roof.*
#
# Small products stay below the roof although they lie right of the ridge, because starting a computation costs time
# too: the α of arithmetic. Compare the ridge in the figure with the H100's, 20 in fp32 and 295 in bf16: the further
# right a ridge lies, the more computations wait for memory.
#
# A **link** has a roofline too. Put its bandwidth in the place of the memory's and count the bytes sent: with one
# 400G port an H100 needs 989.4 · 10¹² ÷ (50 · 10⁹) = 19,788 operations for each byte it sends, or it waits.

# %% [markdown]
# ## 8. What it costs training: one all-reduce
#
# Sixteen H100s train a model of 7 billion parameters, each on its own data. (Their optimizer states are sharded, as
# in lesson 06, or they would not fit.) After each backward pass they average their gradients, 14 GB in bf16. As
# lesson 02 shows, the busiest of N GPUs has to *send* at least 2(N−1)/N of that, as long as only GPUs add. (Where
# switches add, it is about half.)
#
# A step has 8,192 tokens on each GPU, and a token costs 6 operations for each parameter: 2 forward and 4 backward. We
# take 430 TFLOP/s per GPU, as Llama 3 reached on 8,192 H100s (*recorded*, [Llama Team
# 2024](https://arxiv.org/abs/2407.21783), table 4), and let communication begin only after computing has ended.
#
# **Predict**: what share of the step is waiting, if each GPU's only way to the others is NVLink? One 400G port? 10G
# Ethernet?

# %%
waited = predict("of the step is waiting, with one 400G port", unit="%")

# %%
sent = bytes_sent("all_reduce", 16, 2 * 7e9)
computing = 6 * 7e9 * 8192 / 430e12
print(f"computing {computing:.2f} s, {sent / 1e9:.2f} GB to send")
waits = {key: sent / LINKS[key].bandwidth for key in ("nvlink4", "ib_ndr", "eth_10g")}
for key, waiting in waits.items():
    share = waiting / (waiting + computing)
    print(f"{LINKS[key].name:15}{waiting:8.3f} s, {share:.0%} of the step")

# %% jupyter={"source_hidden": true}
waited.compare(100 * waits["ib_ndr"] / (waits["ib_ndr"] + computing))

# %% [markdown]
# **Compare.** On NVLink waiting takes 7 % of the step, over one 400G port each two fifths, and over 10G Ethernet nearly
# all.
#
# But an NVSwitch of a DGX H100 joins only eight GPUs. Put the sixteen into the two DGX H100 of section 5, where every
# path between the nodes has a 400G port as its bottleneck. The usual all-reduce lays **rings** through all GPUs: each
# GPU passes data to the next one, and each ring leaves a node once.
#
# ```text
#    ┌─ node 0: 8 GPUs, NVLink ─┐  port  ┌─ node 1: 8 GPUs, NVLink ─┐
# ┌─▶│ GPU → GPU → … → GPU      ├───────▶│ GPU → GPU → … → GPU      ├─┐  one of eight rings,
# │  └──────────────────────────┘        └──────────────────────────┘ │  each with an eighth of the data
# └──────────────────────── port ─────────────────────────────────────┘  and a port of its own
# ```
#
# **Predict**: is the all-reduce as slow as over one port each, or nearly as fast as on NVLink alone?

# %%
paces = ["as slow as over one port each", "halfway between", "nearly as fast as on NVLink"]
pace = predict("the all-reduce on two DGX H100", paces)

# %%
out_of_a_node = 8 * LINKS["ib_ndr"].bandwidth  # eight rings, each through a port of its own
waiting = sent / min(out_of_a_node, LINKS["nvlink4"].bandwidth)
print(f"two DGX H100: {waiting:.3f} s, {waiting / (waiting + computing):.0%} of the step")
shown = {"NVLink 4": waits["nvlink4"], "one NDR port": waits["ib_ndr"], "two DGX H100": waiting}
steps = {name: {"compute": computing, "all_reduce": wait} for name, wait in shown.items()}
figures.step_split(steps, "modelled: a step of 7 billion parameters on 16 H100s, nothing overlaps")

# %% jupyter={"source_hidden": true}
pace.compare(paces[2])

# %% [markdown]
# **Compare.** Nearly as fast as on NVLink. In each ring only one of a node's eight GPUs sends to the other node. So a
# whole *node* sends out only as many bytes as one GPU sends, and spreads them over eight ports.
#
# *The figure: three bars, computing and then the all-reduce. Over one port each the all-reduce is two fifths of the
# bar; on two DGX H100 it is as short as on NVLink.*
#
# The bottleneck of a path is thus
# half of the question. The other half is **how many bytes cross it, and how many links like it share them**.
# *Recorded* on four nodes of eight H200: in such rings each GPU sent 364.7 GB/s, seven times what a 400G port carries
# (Bekman, as above).
#
# These estimates use bandwidth alone. For 14 GB that is fair; for a thousand small tensors α decides.

# %% [markdown]
# ## 9. What to take to work
#
# On a machine that you do not know, look at three things. `nvidia-smi topo -m` says which links there are. The data
# sheets, read as in section 1, say what they could do. And [scripts/links.py](../scripts/links.py) measures what they
# do: every pair of ranks plays ping-pong, and the slowest pair is named. Compare that pair with the matrix. Pairs
# without a common rank play at the same time, so those that cross one link share it; with `--alone` one pair plays at
# a time, and you see what a link gives to a single pair. The program needs only PyTorch, and uses one GPU per rank if
# there are GPUs. In a terminal: `torchrun --standalone --nproc-per-node=8 scripts/links.py`; `run_program` does the
# same with the CPU ranks of this notebook:

# %%
folded("scripts/links.py", SCRIPTS / "links.py")

# %% tags=["nbval-ignore-output"]
links = [SCRIPTS / "links.py", "--large", 2**20]
codes = launch(run_program, *links, world_size=world_size, init=False)

# %% [markdown]
# Here all pairs talk through the memory of one machine, so they differ only by noise, of which a busy machine has a
# lot. With eight GPUs on PCIe you would see blocks of fast and slow pairs, as in the matrix of section 4; with an
# NVSwitch, no blocks.

# %% [markdown] tags=["deeper"]
# ## 10. Inside an H100: where the peak comes from · deeper
#
# The peak follows from counting: units × multiply-adds per tick × 2 × ticks per second, because a multiply-add is two
# operations. A tensor core of the H100 does 512 multiply-adds per tick in bf16, at 1.83 GHz. A CUDA core does one per
# tick in fp32, at 1.98 GHz. Half the bits give twice the rate, from tf32 (fp32 cut short for tensor cores) to bf16 to
# fp8. The last column is for matrices that have been pruned: the smaller two of every four neighbours are set to
# zero, so the model is no longer the same.
#
# <small>Sources: Bekman, [ml-engineering,
# accelerators](https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md) (multiply-adds and
# tensor clock); Lockwood, [H100](https://glennklockwood.com/garden/processors/h100) (both clocks).</small>

# %% tags=["deeper"]
counted = {"bf16": h100.sms * 4 * 512 * 2 * 1.83e9, "fp32": h100.sms * 128 * 2 * 1.98e9}
print(f"H100, TFLOP/s {'dense':>12}{'counted':>10}   with 2:4 sparsity")
for precision, rate in h100.flops.items():
    by_hand = f"{counted[precision] / 1e12:.1f}" if precision in counted else "-"
    sparse = h100.sparse_factor if precision in ("tf32", "fp16", "bf16", "fp8") else None
    second = f"{sparse * rate / 1e12:.1f}" if sparse else "-"
    print(f"{precision:14}{rate / 1e12:12.1f}{by_hand:>10}{second:>20}")

# %% [markdown] tags=["deeper"]
# ## 11. To a GPU of another node: fewer stops · deeper
#
# With ordinary network sockets the operating system copies each message into its own memory and splits it, and a CPU
# is busy all the while. **RDMA** (remote direct memory access) lets the network card read and write the memory of a
# process directly, so the CPU only gives the order. InfiniBand has it; on Ethernet it is mostly called RoCE, on AWS
# EFA. **GPUDirect** does the same for the memory of a GPU:
#
# | | who reads and writes GPU memory directly | what it avoids |
# |---|---|---|
# | GPUDirect **P2P** | another GPU, over NVLink or PCIe | a copy through the CPU's memory |
# | GPUDirect **RDMA** | a network card, over PCIe | a copy through the CPU's memory, on both nodes |
# | GPUDirect **Storage** | a disk or a storage network | a **bounce buffer**, a stop in the CPU's memory |
# | GPUDirect **async** | nobody new: the GPU tells the card when to start | the CPU's part in each message |
#
# **Predict**: without GPUDirect, 1 GB goes from the GPU to its CPU's memory, over the network to the other CPU's, and
# up to the other GPU, one after the other. How many times longer does that take than with all three parts at once?

# %% tags=["deeper"]
stops = predict("one after the other", unit="times as long")

# %% tags=["deeper"]
way = [LINKS["pcie5"].bandwidth, LINKS["ib_ndr"].bandwidth, LINKS["pcie5"].bandwidth]
staged, direct = sum(1e9 / speed for speed in way), 1e9 / min(way)
print(f"one after the other {staged * 1e3:.1f} ms, at once {direct * 1e3:.1f} ms", end=": ")
print(f"{staged / direct:.1f} times")

# %% jupyter={"source_hidden": true} tags=["deeper"]
stops.compare(staged / direct)

# %% [markdown] tags=["deeper"]
# **Compare.** 2.6 times: the network's part is the longest, and both copies over PCIe come on top of it.
#
# Libraries can also send in pieces, so that the three copies overlap, but the memory of both CPUs is then still
# written and read for every byte.
#
# <small>Sources: NVIDIA, [GPUDirect RDMA](https://docs.nvidia.com/cuda/gpudirect-rdma/), [GPUDirect Storage Design
# Guide](https://docs.nvidia.com/gpudirect-storage/design-guide/), [PeerDirect
# Async](https://docs.nvidia.com/doca/sdk/NVIDIA+PeerDirect).</small>

# %% [markdown] tags=["deeper"]
# ## 12. Pinned memory, and copies that have not ended · deeper
#
# The operating system may move a page of memory at any time. A device that copies by itself must be sure that the
# page stays, so it needs **pinned** (page-locked) memory. From ordinary, **pageable** memory the driver first copies
# into a pinned buffer of its own. From pinned memory the copy is direct, and only then can it run while the CPU goes
# on (`non_blocking=True`).
#
# > **Misconception.** "Pin everything just before the copy." Pinning is a copy too: `x.pin_memory().to("cuda",
# > non_blocking=True)` can be up to twice as slow as `x.to("cuda")`. Pin *once*, for buffers that are used again; a
# > data loader's `pin_memory=True` pins in a thread beside the training.
#
# A copy that runs while the CPU goes on has a price: its two buffers are not yours until it has ended. The same holds
# for messages between ranks, where it can be shown on every machine. `isend` and `irecv` return a request at once,
# and until `wait()` returns, what is received may not be read and what is sent may not be overwritten.
#
# **Predict**: rank 0 sends ones. Rank 1 receives into zeros, looks before it waits, and again afterwards. Then rank 0
# sends ones a second time, but writes twos into its buffer before it waits, say the next batch. What does rank 1 see,
# three times?

# %% tags=["deeper"]
sights = ["ones, ones, ones", "zeros, ones, ones", "zeros, ones, twos"]
sight = predict("rank 1 sees", sights)


# %% tags=["deeper"]
def too_early():
    x = torch.zeros(4)
    if dist.get_rank() == 0:
        x.fill_(1.0)
        dist.barrier()  # waits for all ranks: until rank 1 has looked
        dist.send(x, dst=1)
        request = dist.isend(x, dst=1)
        x.fill_(2.0)  # a fault: the message has not ended
        dist.barrier()
        request.wait()
        return None
    request = dist.irecv(x, src=0)
    seen = [x.tolist()]  # a fault: the message has not ended
    dist.barrier()
    request.wait()
    seen.append(x.tolist())
    dist.barrier()
    dist.recv(x, src=0)
    return [*seen, x.tolist()]


seen = launch(too_early, world_size=2, backend="gloo")[1]
print(*seen)

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert seen == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
sight.compare(sights[2])

# %% [markdown] tags=["deeper"]
# **Compare.** Zeros, ones, twos: two wrong numbers, and no error. (The barriers make the faults strike each time.
# Without them they strike now and then, which is worse.)
#
# On a GPU `non_blocking=True` returns no request, and the cure is to wait
# for the **stream**, the queue in which a GPU does its work:
#
# | `non_blocking=True` | the fault | the cure |
# |---|---|---|
# | GPU to pinned memory | the CPU reads too early | `torch.cuda.synchronize()`, or an event, before reading |
# | pinned memory to GPU | the CPU overwrites too early | an event before writing; two buffers in turn |
#
# From *pageable* memory the second cannot happen, because the driver takes its own copy first. The next cell shows
# both **on a GPU only**. It queues work in front of the copies, so that they end late: expect 0 and then 1 from the
# first, and 2 from the second.

# %% tags=["deeper", "nbval-ignore-output"]
if torch.cuda.is_available():
    there, pinned = torch.ones(1000, device="cuda"), torch.zeros(1000, pin_memory=True)
    busy = torch.ones(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(10):
        torch.mm(busy, busy)  # the stream has something to do
    pinned.copy_(there, non_blocking=True)
    early = pinned[0].item()
    torch.cuda.synchronize()
    print("GPU to pinned: read at once", early, "and after synchronize", pinned[0].item())
    for _ in range(10):
        torch.mm(busy, busy)
    there.copy_(pinned, non_blocking=True)
    pinned.fill_(2.0)  # a fault: the copy has not begun
    print("pinned to GPU: ones were sent, the GPU got", there[0].item())
else:
    print("no GPU here, so this is not shown")

# %% [markdown] tags=["deeper"]
# <small>Source: Moens, [A guide on good usage of non_blocking and
# pin_memory()](https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html).</small>

# %% [markdown] tags=["deeper"]
# ## 13. Unified or explicit memory · deeper
#
# With **explicit** memory you say what is where and copy it, as with PyTorch's `.to("cuda")`. With **unified**
# (managed) memory CPU and GPU use the same pointer, and pages move to whoever touches them, which is convenient but
# makes each first touch a page fault. *Recorded* on a GTX 1080, 2.147 GB of managed memory: a kernel that fetches its
# pages on demand takes 386.6 ms; one that finds them fetched ahead takes 13.3 ms
# ([pascal-um-benchmark](https://github.com/parallelArchitect/pascal-um-benchmark)). The fetch itself is not in the
# 13.3 ms. It still goes over PCIe 3, but once and without faults.

# %% tags=["deeper"]
on_demand, fetched_ahead = 386.6e-3, 13.3e-3  # recorded
fetch = 2.147e9 / LINKS["pcie3"].bandwidth  # modelled, at the speed of the data sheet
print(f"the kernel alone: {on_demand / fetched_ahead:.0f} times faster;", end=" ")
print(f"with the fetch: {on_demand / (fetch + fetched_ahead):.1f} times, at best")

# %% [markdown] tags=["deeper"]
# A coherent link, over which CPU and GPU read each other's memory without copies of pages, narrows the gap:
# NVLink-C2C joins Grace and Hopper with 450 GB/s each way, seven times PCIe 5 (NVIDIA, Hopper page).

# %% [markdown] tags=["deeper"]
# ## 14. Memory that is there already: pools · deeper
#
# Memory has to be found, mapped and, for a network card that reads it by itself, registered there before a byte
# moves. Doing that for every message can cost more than the message.
#
# **Predict**: 64 MiB are filled, in fresh memory each time or in the same memory again. How many times faster is the
# second?

# %% tags=["deeper"]
faster = predict("the same memory again is faster", unit="times")

# %% tags=["deeper", "nbval-ignore-output"]
from lessons.gpu_interconnects.link_measurements import best_seconds

same = torch.empty(copied // 4)
again = best_seconds(lambda: same.fill_(1.0))
fresh = best_seconds(lambda: torch.empty(copied // 4).fill_(1.0))
print(f"measured: fresh {fresh * 1e3:.1f} ms, again {again * 1e3:.1f} ms,", end=" ")
print(f"{fresh / again:.1f} times as fast")

# %% jupyter={"source_hidden": true} tags=["deeper", "nbval-ignore-output"]
faster.compare(fresh / again)

# %% [markdown] tags=["deeper"]
# **Compare.** Fresh memory is only promised, not there. At the first touch of each page the operating system has to
# find one and clear it, which takes longer than filling it.
#
# So libraries keep a **pool** of buffers that nobody uses at the moment, and hand them out again:


# %% tags=["deeper"]
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


pool = Pool()
for _step in range(100):
    buffers = [pool.take(size) for size in (1024, 4096, 4096)]  # say, three gradient buckets
    for buffer in buffers:
        pool.give_back(buffer)
print(f"300 buffers taken, {pool.allocated} allocated")

# %% [markdown] tags=["deeper"]
# Freeing GPU memory can make the CPU wait for the GPU, so PyTorch keeps such a pool, its **caching allocator**
# ([CUDA semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management)). Memory of a deleted
# tensor goes back to the pool and not to the driver, which is one reason why `nvidia-smi` shows more in use than your
# tensors need. Where there is a GPU, the next cell watches it:

# %% tags=["deeper", "nbval-ignore-output"]
if torch.cuda.is_available():
    torch.cuda.init()
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    for _step in range(100):
        torch.empty(copied, dtype=torch.uint8, device="cuda")  # deleted at once
    calls = torch.cuda.memory_stats()["segment.all.allocated"] - before
    print(f"100 tensors made, memory taken from the GPU {calls} times")
else:
    print("no GPU here: the pool above is the idea")

# %% [markdown] tags=["deeper"]
# ## 15. Which core and which card belong to a GPU? · deeper
#
# In section 4 the cores of GPU0 are 8–15 and 24–31, on NUMA node 1, and a process that feeds it should run there. How
# much does the wrong CPU cost? *Recorded* for a P100 on PCIe 3, from pinned memory: 12.15 GB/s when process and
# memory sit on its CPU, 3.78 GB/s when both sit on the other one ([gearshifft, pull request
# 82](https://github.com/mpicbg-scicomp/gearshifft/pull/82)). That is less than a third of the speed. One line in a
# start script avoids it, with `numactl` or the launcher's binding options.
#
# Network cards are in the matrix too. Here is an excerpt of a DGX-2's ([nccl-tests, issue
# 78](https://github.com/NVIDIA/nccl-tests/issues/78)):

# %% tags=["deeper"]
dgx_2 = """
        GPU0    GPU2    GPU4    mlx5_0  mlx5_1  mlx5_2  mlx5_4
GPU0     X      NV6     NV6     PIX     PXB     NODE    SYS
GPU2    NV6      X      NV6     PXB     PIX     NODE    SYS
GPU4    NV6     NV6      X      NODE    NODE    PIX     SYS
"""

# %% [markdown] tags=["deeper"]
# **Predict**: which card should GPU2 use?

# %% tags=["deeper"]
card_of_2 = predict("the card for GPU2", ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_4"])

# %% tags=["deeper"]
machine = from_matrix(dgx_2, gpu="v100")
for gpu, card in (("GPU2", "mlx5_0"), ("GPU2", "mlx5_1"), ("GPU2", "mlx5_4")):
    print(" → ".join(machine.path(gpu, card).devices))

# %% jupyter={"source_hidden": true} tags=["deeper"]
card_of_2.compare("mlx5_1")

# %% [markdown] tags=["deeper"]
# **Compare.** The nearest one: `mlx5_1`, as `mlx5_0` for GPU0 and `mlx5_2` for GPU4.
#
# With `PIX`, data goes from GPU to card through one PCIe switch and
# never meets the CPU. NCCL reads the same facts and chooses by the same order; lesson 03 shows its log. (On a DGX
# H100 a GPU and its own card can also say `PXB`.)
#
# On AMD GPUs `rocm-smi --showtopo` prints such a matrix, with `XGMI` in the place of NVLink. A node of eight MI300X
# has no switch for it, but a link between each two GPUs, 64 GB/s one way (*recorded*, Bekman, as above). So a pair
# gets 64 GB/s, and only a job on all eight gets 448 GB/s out of each.
#
# The matrix says what the wires allow. In a virtual machine, or where I/O virtualization (IOMMU) or PCIe access
# control (ACS) is switched on, traffic between two PCIe devices may go through the CPU all the same, and then it is
# slow or hangs
# ([NCCL's troubleshooting](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html)).

# %% [markdown] tags=["deeper"]
# ## 16. The network above the node · deeper
#
# So far one switch joined all nodes. A switch has only so many ports, so larger networks have two levels or three:
# **leaf** switches for the nodes, **spine** switches above them.
#
# ```text
#                  spine                  in fact several switches
#               ╱         ╲               trunks: many cables each
#          leaf 0         leaf 1
#         ╱ │  │ ╲       ╱ │  │ ╲         a cable for each network card
# nodes  0  1  2  3     4  5  6  7
# ```
#
# If a leaf has less bandwidth upwards than its nodes have together, the network is **oversubscribed**, and the slow
# link of a job is there and not at the node. *Recorded* for Llama 3's cluster of 24,000 GPUs: full bandwidth inside a
# pod of 3,072 GPUs, a seventh of it between pods (Llama Team 2024, section 3.3.1).
#
# The eight rings of section 8 now run through eight DGX H100, once in the order of the nodes and once mixed: 0, 4, 1,
# 5, 2, 6, 3, 7. The network has full bandwidth, or is oversubscribed 7:1. `most_shared` finds the link that limits a
# step of the rings, and how many messages share it.

# %% tags=["deeper"]
from course_utils.topology import leaf_spine, most_shared

flat, port = cluster("dgx h100", 8), LINKS["ib_ndr"].bandwidth
orders = {"in order": [0, 1, 2, 3, 4, 5, 6, 7], "mixed": [0, 4, 1, 5, 2, 6, 3, 7]}


def rings(order):
    """A step of eight rings: each GPU of a node to the GPU of the same number in the next node."""
    following = order[1:] + order[:1]
    return [(8 * a + r, 8 * b + r) for a, b in zip(order, following, strict=True) for r in range(8)]


def show(name, network):
    for order, nodes in orders.items():
        link, users = most_shared(network, rings(nodes))
        slower = users * port / link.bandwidth
        print(f"{name:6}{order:9}{slower:5.2f} times, {users:2} on one {link.kind}")


# %% [markdown] tags=["deeper"]
# **Predict**: how many times slower does a step get at 7:1, in each of the two orders?

# %% tags=["deeper"]
mixed = predict("at 7:1 the mixed order is slower", unit="times")

# %% tags=["deeper"]
show("full", leaf_spine(flat, leaves=2))
show("7:1", leaf_spine(flat, leaves=2, oversubscription=7))

# %% jupyter={"source_hidden": true} tags=["deeper"]
link, users = most_shared(leaf_spine(flat, leaves=2, oversubscription=7), rings(orders["mixed"]))
mixed.compare(users * port / link.bandwidth)

# %% [markdown] tags=["deeper"]
# **Compare.** In order, only two hops of each ring cross the spine, one from each leaf, so eight messages share a trunk
# of 32/7 ports. Mixed, every hop crosses, so all 32 messages of a leaf share it.
#
# The bytes are the same and so are the nodes,
# but the order of ranks is worth a factor of four. That is why a scheduler such as Slurm can be told the topology
# ([topology guide](https://slurm.schedmd.com/topology.html)): it then places a job below as few leaves as it can.
#
# **Rails** are another design: card r of *every* node is on leaf r, so there are eight leaves.
#
# **Predict**: what happens to the rings then, and what to a message from GPU 0 to GPU 1 of another node, by GPU 0's
# card?

# %% tags=["deeper"]
crossings = ["both", "only the rings", "only that message", "neither"]
crossing = predict("what crosses the spine", crossings)

# %% tags=["deeper"]
railed = leaf_spine(flat, leaves=8, oversubscription=7, rails=True)
show("rails", railed)
print(" → ".join(railed.path("node0.NIC0", "node1.NIC1").devices))

# %% jupyter={"source_hidden": true} tags=["deeper"]
crossing.compare("only that message")

# %% [markdown] tags=["deeper"]
# **Compare.** The rings stay on their rails and never meet the spine, in whatever order. The message from card 0 to
# card 1 has to cross it.
#
# It is better to hand it to GPU 1 of its own node by NVLink first, and let it leave on rail 1. NCCL does so and calls
# it PXN ([NVIDIA, Doubling all2all
# performance](https://developer.nvidia.com/blog/doubling-all2all-performance-with-nvidia-collective-communication-library-2-12/)).
#
# In fact a flow of data takes one of several spine switches. Two flows that are given the same one halve each other's
# speed while other links are idle, so networks spread flows or route adaptively.

# %% [markdown] tags=["deeper"]
# ## 17. Copies in memory, to and from a GPU · deeper
#
# A copy of S bytes reads S and writes S. Benchmarks of memory usually count both, so a copy of 10 GB in a second is
# then "20 GB/s": say which of the two you mean. The next cell counts the bytes copied. Without a GPU it measures host
# memory only.

# %% tags=["deeper", "nbval-ignore-output"]
from lessons.gpu_interconnects.link_measurements import copy_rates

for name, rate in copy_rates(copied).items():
    print(f"measured: {name:16}{rate / 1e9:8.1f} GB/s copied")

# %% [markdown] tags=["deeper"]
# What others measured, beside the data sheet (*recorded*: Bekman, as above):

# %% tags=["deeper"]
recorded = {"pcie5": ("CPU to H100, pinned", 55.4e9), "nvlink3": ("A100 to A100", 274e9),
            "nvlink4": ("H100 to H100", 376e9)}  # fmt: skip
for key, (what, rate) in recorded.items():
    share = rate / LINKS[key].bandwidth
    print(f"{what:20}{LINKS[key].name:12}{rate / 1e9:6.1f} GB/s, {share:.0%} of the data sheet")

# %% [markdown] tags=["deeper"]
# If you measure 40 %, ask first whether the data sheet adds up both directions, or reading and writing.
#
# How large must a copy be? *Recorded* on one H200, which hangs on PCIe 5, by this course's `gpu-check`:

# %% tags=["deeper"]
copies = gpu_check("copies")
for way in ("pageable to device", "pinned to device", "within the device"):
    rates = zip(copies[way]["at"], copies[way]["value"], strict=True)
    cells = (f"{format_bytes(size)} {rate:.1f}" for size, rate in rates)
    print(f"{way:19}", "  ".join(cells), "GB/s")

# %% [markdown] tags=["deeper"]
# Up to 64 KiB all ways are slow, because starting the copy takes longer than the bytes (α again). Large ones from
# pinned memory reach the 55 GB/s of the table above. From pageable memory at most 12 GB/s arrive, because the driver
# first copies the bytes into pinned memory of its own. Within the GPU 1,981 GB/s are copied, which is 3,962 GB/s read
# and written, 83 % of the 4.8 TB/s on the data sheet.

# %% [markdown] tags=["deeper"]
# ## 18. A transformer's layer on the H100's roof · deeper
#
# *Modelled:* a linear layer with 4,096 × 16,384 weights in bf16, applied to T tokens. It does 2 · T · 4096 · 16384
# operations, and moves at least the weights, the T inputs and the T outputs.
#
# **Predict**: a chat bot that writes one answer has T = 1 at each step, training has thousands. From how many tokens on
# is arithmetic the limit?

# %% tags=["deeper"]
from_tokens = predict("arithmetic is the limit from", unit="tokens")


# %% tags=["deeper"]
def layer(tokens, inputs=4096, outputs=16384):
    """Arithmetic intensity of the layer, and the FLOP/s that an H100 reaches there at most."""
    moved = 2 * (inputs * outputs + tokens * inputs + tokens * outputs)
    intensity = 2 * tokens * inputs * outputs / moved
    return intensity, min(h100.flops["bf16"], intensity * h100.memory_bandwidth)


placed = {f"T = {tokens}": layer(tokens) for tokens in (1, 16, 128, 8192)}
enough = next(tokens for tokens in range(1, 8192) if layer(tokens)[0] >= h100.ridge())
print(f"T = 1: at most {layer(1)[1] / h100.flops['bf16']:.1%} of the peak;", end=" ")
print(f"limited by arithmetic from T = {enough} on")
title = "modelled: a linear layer on T tokens, H100, bf16, dense"
figures.roofline(h100.flops["bf16"], h100.memory_bandwidth, placed, title, modelled=True)

# %% jupyter={"source_hidden": true} tags=["deeper"]
from_tokens.compare(enough)

# %% [markdown] tags=["deeper"]
# **Compare.** From about three hundred. One token at a time reads 134 MB of weights for two operations on each.
#
# *The figure: hollow points on the H100's roof. T = 1 is far down the slope, T = 16 and 128 higher up on it, T =
# 8,192 on the flat part.*
#
# A training step has enough tokens, and the
# two products of its backward pass have the same size, so they lie at a similar place. How much of the roof is
# reached? *Recorded:* 794.5 TFLOP/s by the best matrix product in bf16 (Bekman, ml-engineering, accelerators), 80 %
# of the peak, and 430 by the training of section 8, 43 %.
#
# Here are operations of all kinds, *recorded* on one H200 (`gpu-check`), whose memory is faster than the H100's:

# %% tags=["deeper"]
h200 = GPUS["h200"]
drawn = ["add", "matrix x vector", *(f"matmul {side}" for side in (256, 1024, 2048, 8192))]
placed = {
    point["operation"]: (point["flop_per_byte"], 1e12 * point["rate"]["value"])
    for point in gpu_check("roofline")["points"]
    if point["precision"] == "bf16" and point["operation"] in drawn
}  # fmt: skip
for name, (intensity, rate) in placed.items():
    share = rate / min(h200.flops["bf16"], intensity * h200.memory_bandwidth)
    print(f"{name:16}{rate / 1e12:8.1f} TFLOP/s, {share:.0%} of the roof")
title = "recorded: one H200 in bf16, under the roof of its data sheet"
figures.roofline(h200.flops["bf16"], h200.memory_bandwidth, placed, title)

# %% [markdown] tags=["deeper"]
# *The figure: addition and matrix × vector near the slope. Of the products only that of 8,192 × 8,192 is near the flat
# part. The smaller a product, the further below the roof it lies.*
#
# A product of 256 × 256 reaches less than 1 % of the roof at its intensity, because starting it takes longer than
# computing it. So the roof is a limit, and whether it is reached is a question of size.

# %% [markdown]
# ## Recap, with the numbers of this run

# %% tags=["nbval-ignore-output"]
print(line)
print(f"roof {roof.peak / 1e9:.0f} GFLOP/s, ridge at {roof.ridge:.1f} FLOP/byte")
print(f"unseen sizes: off by {min(errors):.0%} to {max(errors):.0%}")

# %% [markdown]
# How your predictions came out:

# %%
predictions()

# %% [markdown]
# - Before you compare figures: dense, one direction, bytes, per GPU.
# - From P100 to B200 arithmetic grew 106 times, memory and NVLink 11 times, PCIe 4 times: moving data is often the
#   limit.
# - t = α + βS. Below αB bytes latency rules. Fit both, state the uncertainty, check on sizes you did not fit.
# - A path is as fast as its slowest link. Then count the bytes that cross it, and the links that share them.
# - Intensity against the ridge says who waits: arithmetic, memory, or a link.
#
# **Now you can answer**
#
# 1. A vendor offers "two nodes with 400 GB/s between them". What do you ask?
# 2. A thousand messages of 4 KiB are slow. Would a network with twice the bandwidth help?
# 3. `topo -m` says `SYS` between the two GPUs of your job. What does their traffic cross?
# 4. A faster GPU with the same memory: which of your operations gain?
#
# <details><summary>Answers</summary>
#
# 1. One direction or both, and how many ports that is together (section 1).
# 2. Hardly: below αB bytes latency rules (section 3).
# 3. The link between two NUMA nodes, usually two CPUs (section 4).
# 4. Those right of the ridge (section 7).
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
