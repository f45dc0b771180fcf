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
# # Which TP × PP × CP × DP for this model on this cluster?
#
# Llama 3 405B was trained on 16,384 GPUs: eight shared each layer, sixteen shared the depth of the model, and 128
# copies of that shared the batch. Each GPU did 400 TFLOP/s (*recorded*, Grattafiori et al. 2024, table 4). Why these
# numbers and not 16 × 8 × 128, or 8 × 1 × 2,048? This lesson builds 3-D parallelism on real ranks, counts what each
# dimension sends, and ends with a planner that answers the question for clusters you do not have.
#
# **You will be able to**
# - *lay out* ranks in a mesh, and *say* for each rank which groups it is in and which link carries their traffic;
# - *train* one model with FSDP, tensor and pipeline parallelism at once, equal to one process, with clipping that is
#   right;
# - *count* what each group sends, and *choose* the order of a mesh by the bytes on the slow link;
# - *plan* memory and time of a layout, *refuse* those that cannot run, and *search* all the others;
# - *judge* such a plan: against published runs, a baseline that knows nothing, and two measurements of your own.
#
# **Before this:** [07 fsdp](07_fsdp.ipynb), [09 tensor parallelism](09_tensor_parallel.ipynb),
# [10 pipeline parallelism](10_pipeline_parallel.ipynb). **Time:** about 135 minutes to read, under a minute to run.

# %% [markdown]
# ## Ten predictions
#
# Write down an answer to each, however unsure. They come up again on the way, and the answers are at the end.
#
# 1. 256 GPUs in nodes of eight: PP 4, DP 8, TP 8, with neighbouring ranks in one tensor group. With whom does rank 100
#    average gradients: with its neighbours 101 and 99, or with ranks that are further away?
# 2. Which of the three groups of that rank stays inside a node?
# 3. FSDP and tensor parallelism on four ranks, two by two. Which ranks read the same text?
# 4. A weight of 256 × 64 is cut by tensor parallelism over two ranks and then by FSDP over two. What shape is left?
# 5. Four micro-batches go through a pipeline whose stages are sharded by FSDP. How many times is a block gathered in
#    a step?
# 6. Each pipeline stage clips by the norm of its own gradients. Does anything fail? Is anything wrong?
# 7. Two nodes with two GPUs each. Tensor parallelism inside the nodes and data parallelism between them, or the other
#    way round: which sends more bytes between the nodes, and does the answer depend on the batch?
# 8. A model of a billion parameters fits on each of eight GPUs, of which only pairs are joined by NVLink. Data ×
#    pipeline × tensor: 2 × 2 × 2 with FSDP, 4 × 1 × 2 with FSDP, or 4 × 1 × 2 without. Which is fastest?
# 9. What takes most of a step after computing in the run of a trillion parameters: tensor, pipeline or data traffic,
#    or the bubble?
# 10. A planner predicts ten published results with an error of 4 %. Is it good?

# %% [markdown]
# The first cell imports everything and names every parameter.

# %% tags=["parameters"]
import itertools
import logging
import math
import statistics
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate

from course_utils import device, fabric, launch, memory, pipeline, planner, plots, record, recorded
from course_utils.costs import bytes_sent
from course_utils.data import Windows
from course_utils.hardware import GPUS, LINKS
from course_utils.models import PUBLISHED, SeparateQKVAttention, build_gpt, next_token_loss
from course_utils.topology import two_level

world_size = 4  # of section 2: even and 4 or more, else 4; sections 3 and 4 take 8, 5 takes 4
whole_batch = 24  # windows of text in a step, a multiple of the replicas

# %% [markdown]
# ## 1. A mesh of ranks
#
# Three parallelisms, three reasons to talk:
#
# - **tensor parallelism** (TP): ranks that share each layer all-reduce activations, in every layer;
# - **pipeline parallelism** (PP): ranks that share the depth send activations to the next stage;
# - **data parallelism** (DP, or FSDP): ranks that hold the same part of the model reduce its gradients.
#
# A fourth, **context parallelism** (CP), divides each sequence: every rank has a part of the tokens, and attention
# gathers keys and values from the others. This lesson plans it (sections 7 to 11) and does not build it.
#
# Every rank takes part in all three, in a **group** for each. A **mesh** says which groups. It numbers the ranks by
# coordinates, like the digits of a number: the last dimension counts fastest. A group holds the ranks that differ in
# *one* coordinate only.


# %%
def coordinates(rank, sizes):
    """Where a rank stands in a mesh {dimension: size}; the last dimension counts fastest."""
    found = {}
    for name in reversed(sizes):
        rank, found[name] = divmod(rank, sizes[name])
    return {name: found[name] for name in sizes}


def group_of(rank, sizes, name):
    """The ranks that differ from `rank` along one dimension only: a step of `stride` apart."""
    names = list(sizes)
    stride = math.prod(sizes[other] for other in names[names.index(name) + 1 :])
    first = rank - coordinates(rank, sizes)[name] * stride
    return tuple(range(first, first + sizes[name] * stride, stride))


# %% [markdown]
# **Predict** (questions 1 and 2). 256 GPUs in 32 nodes of eight; TP 8 × PP 4 × DP 8, and the mesh is
# (pp, dp, tp), slowest dimension first. Where are the groups of rank 100?

# %%
cluster_sizes = {"pp": 4, "dp": 8, "tp": 8}
per_node, rank = 8, 100
print(f"rank {rank}:", coordinates(rank, cluster_sizes), f"on node {rank // per_node}")
for name in cluster_sizes:
    group = group_of(rank, cluster_sizes, name)
    nodes = len({member // per_node for member in group})
    print(f"  {name} group, over {nodes} node{'s' * (nodes > 1)}:", *group)

# %%
plots.mesh_grid(
    cluster_sizes, "modelled: 256 ranks as a mesh, in nodes of eight", per_node=per_node, rank=rank
)

# %% [markdown]
# *The figure: four panels, one for each pipeline stage, in each eight rows (replicas) of eight ranks. A row is a node.
# The tensor group of rank 100 fills its row, its data group is a column of its panel, and its pipeline group has the
# same place in every panel.*
#
# The fastest dimension lies in the node, because `torchrun` numbers the ranks of a node one after the other. The
# others have strides of 8 and 64, so all their members are on different nodes. That is all there is to "which group
# uses which link": **the order of the dimensions decides it.**
#
# `init_device_mesh` does this arithmetic in PyTorch. Does it agree? A *fake* process group (lesson 06) lets one
# process believe that it is rank 100 of 256. Then eight real ranks build a mesh of 2 × 2 × 2, each with real groups.


# %%
def torch_groups(sizes):
    """The ranks of this rank's groups, as PyTorch makes them."""
    mesh = init_device_mesh(device().type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {name: tuple(dist.get_process_group_ranks(mesh.get_group(name))) for name in sizes}


def pretend(rank, sizes):
    """The groups of one rank of a cluster that does not exist."""
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes.values()))
    try:
        return torch_groups(sizes)
    finally:
        dist.destroy_process_group()


# %%
backend = launch(dist.get_backend, world_size=8)[0]  # the same for all that follows
on_ranks = partial(launch, backend=backend)


def by_hand(rank, sizes):
    return {name: group_of(rank, sizes, name) for name in sizes}


found = launch(pretend, rank, cluster_sizes, world_size=1, init=False)[0]
assert found == by_hand(rank, cluster_sizes)
cube = {"pp": 2, "dp": 2, "tp": 2}
for rank, groups in enumerate(on_ranks(torch_groups, cube, world_size=8)):
    assert groups == by_hand(rank, cube)
    print(f"rank {rank}:", ", ".join(f"{name} {group}" for name, group in groups.items()))

# %% [markdown]
# ### Which link carries what
#
# How much is it? Take Megatron-LM's model of 76.1 billion parameters, which was trained with TP 8 and PP 4 on 1,024
# A100s (*recorded*, Narayanan et al. 2021, table 1; lesson 10). Here is a quarter of that run: 8 replicas instead of
# 32, with 448 of the 1,792 sequences of 2,048 tokens in a step. The letters: s tokens in a sequence, h the hidden size,
# L layers, Ψ parameters of the model; t, p and d are the sizes of the three groups. A GPU sends, in 2 bytes a number:
#
# - tensor: 8·s·h·(t − 1)/t numbers a layer and sequence (lesson 09) in its L/p layers, and 12 in place of 8 where
#   backward computes forward again, as that run did;
# - pipeline: s·h numbers for each sequence forward, and as many back (lesson 10);
# - data: 2(d − 1)/d times the gradients of its own Ψ/(t·p) parameters, once a step (lesson 04).
#
# **Predict** the order of the three.


# %%
def sent_by_a_gpu(config, sizes, batch, width=2):
    """Bytes that a GPU of a middle stage sends in a step of `batch` sequences, by dimension."""
    t, p, d = (sizes[name] for name in ("tp", "pp", "dp"))
    numbers = config.context * config.hidden * batch / d  # of one tensor of activations, in a step
    return {
        "tp": 8 * numbers * (t - 1) / t * config.layers / p * width,
        "pp": 2 * numbers * width if p > 1 else 0,
        "dp": 2 * (d - 1) / d * config.parameter_count / (t * p) * width,
    }


config, batch_size = PUBLISHED["Megatron 76.1B"], 448
sent = sent_by_a_gpu(config, cluster_sizes, batch_size)
near, far = LINKS["nvlink3"], LINKS["ib_hdr"]
for name, size in sent.items():
    seconds = [size / link.bandwidth for link in (near, far)]
    print(f"{name}: {size / 1e9:6.1f} GB,{seconds[0]:6.2f} s on {near.name},", end="")
    print(f"{seconds[1]:6.2f} s on one port of {far.name}")
print(f"tp with full recomputation, as in that run: {sent['tp'] * 12 / 8 / 1e9:.1f} GB")

# %% [markdown]
# Now the six orders of the three dimensions. A group that is not inside one node has to use the network, in which
# each GPU of a DGX A100 has a port of its own. The last column is the sum, as if nothing were hidden behind
# computing.

# %%
order_seconds = {}
for order in itertools.permutations(cluster_sizes):
    sizes = {name: cluster_sizes[name] for name in order}
    inside = {name: group_of(0, sizes, name)[-1] < per_node for name in order}
    links = {name: near if inside[name] else far for name in order}
    order_seconds[order] = sum(sent[name] / links[name].bandwidth for name in order)
    where = [name for name in order if inside[name]]
    print(f"({', '.join(order)}): inside a node {where}, {order_seconds[order]:5.2f} s of messages")
best = min(order_seconds, key=order_seconds.get)
assert best[-1] == "tp" and max(order_seconds.values()) > 5 * order_seconds[best]

# %% [markdown]
# With tensor parallelism on the fast end the messages of a step take little more than a second. With anything else
# there, ten. Whether pp or dp is slowest does not matter here: both cross nodes either way. (Megatron-LM puts pp
# slowest, Llama 3 dp.)
#
# > **Misconception.** "TP goes with NVLink because it is model parallelism." Pipeline parallelism is model parallelism
# > too, and sends the least of the three. It is the *bytes*, and that nothing can be computed meanwhile, that keep TP
# > in the node.

# %% [markdown]
# ## 2. Two dimensions: FSDP and tensor parallelism
#
# Now for real, with the course's small GPT. Its weights must be equal to those of one process at the end, so every
# parameter keeps the name that it has there. A `Stage` is a run of blocks of the model, with the embeddings if it is
# the first and the head if it is the last. One stage of one is the whole model. Queries, keys and values have a layer
# each (`SeparateQKVAttention`), as a plan for `parallelize_module` wants it (lesson 09). The logits are copied, because
# FSDP2 warns of a module that returns a view.


# %%
class Stage(nn.Module):
    """A stage of the GPT: tokens (b, T) or activations (b, T, C) in, (b, T, C) or logits out."""

    def __init__(self, config, number=0, of=1):
        super().__init__()
        model, cut = build_gpt(config), [config.layers * k // of for k in range(of + 1)]
        mine = range(cut[number], cut[number + 1])
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in mine})
        for block in self.blocks.values():
            block.attention = SeparateQKVAttention(block.attention)
        if number == 0:
            self.embedding, self.position = model.embedding, model.position
        if number == of - 1:
            self.norm, self.head = model.norm, model.head

    def forward(self, x):
        if hasattr(self, "embedding"):
            x = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)).clone() if hasattr(self, "head") else x


# %% [markdown]
# The plan is lesson 09's: every matrix is cut, attention has one f for its three layers, and the logits are gathered.


# %%
def plan_of(stage):
    """How tensor parallelism splits what a stage has."""
    ends = {
        "embedding": tp.RowwiseParallel(input_layouts=Replicate()),
        "head": tp.ColwiseParallel(output_layouts=Replicate()),
    }
    plan = {name: style for name, style in ends.items() if hasattr(stage, name)}
    once = tp.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    for i in stage.blocks:
        plan[f"blocks.{i}.attention"] = once
        plan |= {f"blocks.{i}.attention.{name}": tp.ColwiseParallel() for name in "qkv"}
        plan[f"blocks.{i}.attention.out"] = tp.RowwiseParallel()
        plan[f"blocks.{i}.mlp.up"] = tp.ColwiseParallel()
        plan[f"blocks.{i}.mlp.down"] = tp.RowwiseParallel()
    return plan


# %% [markdown]
# Now the two dimensions. First tensor parallelism cuts the layers over the mesh's `tp` ranks. Then FSDP shards what
# each of these has left over the `dp` ranks. `mesh["tp"]` is the part of the mesh that this rank sees along one
# dimension.
#
# **Predict** (question 3). On what must the text of a rank depend: on its coordinate in dp, in tp, or on both?


# %%
def split(stage, mesh, **options):
    """Tensor parallelism inside, FSDP around it; blocks are units, and so is the rest."""
    tp.parallelize_module(stage, mesh["tp"], plan_of(stage))
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh["dp"], **options)
    return fully_shard(stage, mesh=mesh["dp"])


def my_text(mesh, step, size=whole_batch):
    """This replica's windows of a step and their targets, both (size / replicas, T)."""
    whole = windows.batch(range(step * size, (step + 1) * size))
    replicas, mine = mesh["dp"].size(), mesh.get_local_rank("dp")
    return [part.chunk(replicas)[mine].to(device()) for part in whole]


# %% [markdown]
# `my_text` looks at the coordinate in dp only. The ranks of a tensor group read the same text, and each replica
# another.
#
# What does a rank hold of a weight? **Predict** (question 4) for `mlp.up`, 256 × 64, and for `mlp.down`, 64 × 256, on
# two by two ranks.

# %%
from course_utils.models import TransformerConfig

gpt = TransformerConfig(layers=4, hidden=64, heads=4, tied=False)
windows = Windows("train", gpt.context)


def shapes_of(names, sizes):
    mesh = init_device_mesh(device().type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    mine = dict(split(Stage(gpt).to(device()), mesh).named_parameters())
    return {name: (mine[name].placements, tuple(mine[name].to_local().shape)) for name in names}


names = ["blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight", "blocks.0.norm1.weight"]
square = {"dp": 2, "tp": 2}
for name, (placements, shape) in on_ranks(shapes_of, names, square, world_size=4)[0].items():
    print(f"{name:25} {placements}, {shape} on rank 0")

# %% [markdown]
# `up` is cut twice along its rows: in two halves of 128 for tensor parallelism, then each half in two of 64. PyTorch
# calls FSDP's cut *strided* (the first in the list, as dp is the first dimension), because the rows of a dp shard are
# not neighbours in the whole: rank 0 has rows 0 to 63, and the other rank with the first dp shard has 128 to 191. `sf`
# is the split factor, the number of tensor slices that were cut before.
# `down` is cut once along its columns and once along its rows. A norm is whole for tensor parallelism, so only FSDP has
# cut it.
#
# A weight is put together in the opposite order, FSDP's cut undone first. `full_tensor` does that. (It logs that two
# all-gathers are slower than one, which `quiet` turns off.)


# %%
def quiet():
    """No hints about speed, which does not matter here."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def weights_of(stage):
    """The parameters of a stage, each in one piece."""
    return {name: p.full_tensor().cpu() for name, p in stage.named_parameters()}


# %%
def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def no_clipping(parameters, mesh):
    return None


def train(step, stage, mesh, clip=no_clipping, steps=3):
    """Train; this rank's losses (None where it has no head), what `clip` found, the last ledger."""
    optimizer, losses, norms = sgd(stage.parameters()), [], []
    for number in range(steps):
        with record() as ledger:
            losses.append(step(*my_text(mesh, number)))
        norms.append(clip(list(stage.parameters()), mesh))
        optimizer.step()
        bytes_held = memory.held_memory(stage, optimizer).states
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "ledger": ledger, "held": bytes_held}


# %% [markdown]
# The reference is one process with the whole batch. `prove` checks losses, and every weight after three steps, to
# 1e-5 in float32. The loss of a step is the mean over the replicas.


# %%
def alone(limit=math.inf, steps=3):
    """One process: its losses, weights at the end, and gradient norms before clipping."""
    model, losses, norms = Stage(gpt).to(device()), [], []
    mesh = init_device_mesh(device().type, (1,), mesh_dim_names=("dp",))
    optimizer = sgd(model.parameters())
    for number in range(steps):
        x, y = my_text(mesh, number)
        loss = next_token_loss(model(x), y)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        bytes_held = memory.held_memory(model, optimizer).states
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return {"losses": losses, "weights": weights, "norms": norms, "held": bytes_held}


# %%
def apart(by_rank, reference):
    """Largest difference of a loss and of a weight between ranks and one process."""
    with_loss = [rank["losses"] for rank in by_rank if rank["losses"][0] is not None]
    means = [sum(losses) / len(losses) for losses in zip(*with_loss, strict=True)]
    loss = max(abs(a - b) for a, b in zip(means, reference["losses"], strict=True))
    seen = {name for rank in by_rank for name in rank["weights"]}
    assert seen == set(reference["weights"])
    weight = max(
        (tensor - reference["weights"][name]).abs().max().item()
        for rank in by_rank
        for name, tensor in rank["weights"].items()
    )
    return loss, weight


def prove(by_rank, reference):
    assert max(apart(by_rank, reference)) < 1e-5
    return "losses and weights after three steps equal to one process"


# %%
def two_dimensions(sizes):
    """Three steps of FSDP and tensor parallelism on this rank."""
    mesh = init_device_mesh(device().type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = split(Stage(gpt).to(device()), mesh)

    def step(x, y):
        loss = next_token_loss(model(x), y)
        loss.backward()
        return loss.item()

    quiet()
    return train(step, model, mesh) | {"weights": weights_of(model)}


reference = on_ranks(alone, world_size=1)[0]
even = world_size if world_size >= 4 and world_size % 2 == 0 else 4
plane = {"dp": even // 2, "tp": 2}
flat_run = on_ranks(two_dimensions, plane, world_size=even)
print("losses", *(f"{loss:.4f}" for loss in reference["losses"]))
print(f"{plane}: {prove(flat_run, reference)}")

# %% [markdown]
# The loop does not mention either dimension. What did each group send? The ledger knows the group of each message.


# %%
def sent_by(run):
    """Bytes that a rank sends by rings in its collectives, and in its messages, by group."""
    totals = {}
    for entry in run["ledger"]:
        if entry.op != "recv":
            size = bytes_sent(entry.op, len(entry.ranks), entry.bytes)
            totals[entry.group] = totals.get(entry.group, 0) + size
    return {name: totals[name] for name in sorted(totals)}


for name, size in sent_by(flat_run[0]).items():
    print(f"{name}: {size:11,.0f} bytes sent by rank 0 in a step")

# %% [markdown]
# Formulas for both, with b windows of s tokens in a replica and 4 bytes a number:
#
# - tensor: 4 all-reduces of b·s·h numbers in each layer, one for the embedding and one for the head, and the gather
#   of the logits;
# - FSDP (lesson 07): the units' weights gathered in forward and again in backward, the root's once, and gradients
#   reduce-scattered, of what tensor parallelism has left of the model.


# %%
def expected(config, sizes, size, stage=0, gathers=2):
    """Bytes that a rank of a stage sends in a step of `size` windows, by group, in float32."""
    p, d, t = (sizes.get(name, 1) for name in ("pp", "dp", "tp"))
    c, layers, first, last = config.hidden, config.layers / p, stage == 0, stage == p - 1
    tokens = size / d * config.context
    reduced = (4 * layers + first + last) * 2 * (t - 1) / t * tokens * c
    logits = last * (t - 1) / t * tokens * config.vocabulary
    # of a block: matrices and the biases of q, k, v (3c) and up (4c) are cut by tensor parallelism;
    # the biases of out and down (2c) and two norms (4c) are not
    block = (12 * c**2 + 7 * c) / t + 6 * c
    table = config.vocabulary * c / t
    rest = first * (table + config.context * c) + last * (table + 2 * c)
    sharded = (d - 1) / d * ((gathers + 1) * layers * block + 2 * rest)
    passed = tokens * c * ((not first) + (not last))
    sizes_of = {"mesh_dp": sharded, "mesh_pp": passed, "mesh_tp": reduced + logits}
    return {name: 4 * numbers for name, numbers in sizes_of.items()}


formula = expected(gpt, plane, whole_batch)
measured = sent_by(flat_run[0])
for name in measured:
    print(f"{name}: {measured[name]:11,.0f} bytes measured, {formula[name]:11,.0f} by formula")
    padded = name == "mesh_dp" and gpt.hidden % plane["dp"]  # rows that do not divide (lesson 07)
    assert math.isclose(measured[name], formula[name], rel_tol=0.05 if padded else 1e-9)

# %% [markdown]
# Equal. The two traffics grow with different things: tensor parallelism's with the text, FSDP's with the model. And
# they help each other. Tensor parallelism divides what FSDP has to gather by t; FSDP divides what the optimizer holds
# by d once more.
#
# ## 3. Three dimensions: a pipeline of sharded stages
#
# The third dimension is one more cut. Each rank builds the stage of its `pp` coordinate, splits it as before, and
# hands it to `torch.distributed.pipelining` (lesson 10) with its pipeline group. The batch of a replica goes through
# in micro-batches. The lines below are all that is new.


# %%
microbatches = 4  # of each replica


def pipelined(stage, mesh, schedule=pipelining.Schedule1F1B):
    """A step of the pipeline: replica's text in, its loss out on the last stage, else None."""
    number, of = mesh.get_local_rank("pp"), mesh["pp"].size()
    place = pipelining.PipelineStage(stage, number, of, device(), group=mesh.get_group("pp"))
    run = schedule(place, microbatches, loss_fn=next_token_loss)

    def step(x, y):
        losses = []
        ends = {"target": y, "losses": losses} if number == of - 1 else {}
        run.step(*([x] if number == 0 else []), **ends)
        return sum(loss.item() for loss in losses) / microbatches if losses else None

    return step


# %%
def mesh_of(sizes, order=None):
    """A mesh (pp, dp, tp); `order` has its dimensions from the slowest to the fastest."""
    order = order or ["pp", "dp", "tp"]
    grid = torch.arange(dist.get_world_size()).view([sizes[name] for name in order])
    axes = [order.index(name) for name in ("pp", "dp", "tp")]
    grid = grid.permute(axes).contiguous()
    return DeviceMesh(device().type, grid, mesh_dim_names=("pp", "dp", "tp"))


def three_dimensions(sizes, clip=no_clipping, order=None, steps=3, **options):
    """Steps of PP x FSDP x TP on this rank."""
    quiet()
    mesh = mesh_of(sizes, order)
    number = mesh.get_local_rank("pp")
    stage = split(Stage(gpt, number, sizes["pp"]).to(device()), mesh, **options)
    found = train(pipelined(stage, mesh), stage, mesh, clip, steps)
    return found | {"stage": number, "weights": weights_of(stage)}


# %% [markdown]
# Eight ranks, 2 × 2 × 2. The same three steps, the same text, the same comparison.

# %%
cube_run = on_ranks(three_dimensions, cube, world_size=8)
print(f"{cube}: {prove(cube_run, reference)}")
for rank, run in enumerate(cube_run):
    count = len(run["weights"])
    loss = "no head" if run["losses"][0] is None else f"loss {run['losses'][0]:.4f}"
    share = run["held"] / reference["held"]
    print(f"rank {rank}: stage {run['stage']}, a piece of {count} weights,", end="")
    print(f" {share:.1%} of the model's states, {loss}")

# %% [markdown]
# Two replicas have read different halves of the batch, so their losses differ. Their mean is that of one process. Each
# rank holds about an eighth of parameters, gradients and momenta between steps. Together it is a little more than one
# model: what tensor parallelism does not cut is there once on each tensor rank. Inside a step the gradients of a stage
# add up unsharded until the last micro-batch. That is the price of reducing them once.
#
# **Predict** (question 5): what does each group send now? A pipeline of four micro-batches, and stages that FSDP
# frees after every forward.

# %%
frees = cube_run
keeps = on_ranks(three_dimensions, cube, world_size=8, reshard_after_forward=False)
prove(keeps, reference)
for name, runs, gathers in (("freed", frees, microbatches + 1), ("kept", keeps, 1)):
    for stage in range(cube["pp"]):
        run = next(run for run in runs if run["stage"] == stage)
        formula = expected(gpt, cube, whole_batch, stage, gathers)
        measured = sent_by(run)
        assert measured == formula
        told = ", ".join(f"{group[5:]} {size:9,.0f}" for group, size in measured.items())
        counts = [
            sum(e.op == op and e.group == "mesh_dp" for e in run["ledger"])
            for op in ("all_gather", "reduce_scatter")
        ]
        print(f"{name:5} stage {stage}: {told} bytes; {counts[0]:2} gathers, {counts[1]} scatters")

# %% [markdown]
# Every byte as in the formulas. Three things to see:
#
# - **tensor** traffic is the largest by far, and each stage has its share of it. The micro-batches do not change it:
#   more messages, each smaller;
# - **pipeline** traffic is the smallest, b·s·h numbers each way. Both tensor ranks send the *same* activations to their
#   partners in the next stage. (Megatron-LM sends a t-th from each, and gathers it inside the node.)
# - **FSDP** gathers a freed block m + 1 times: two blocks and the rest of the stage make 2 · 5 + 1 = 11 gathers. The
#   first forward gathers it, each of the m forwards frees it, and whatever comes next gathers it again. A backward does
#   not free it: the stage sets `set_reshard_after_backward(False)` (PyTorch 2.13). So freeing does not even save memory
#   at the peak, when all blocks of the stage have been through a backward. With `reshard_after_forward=False` a block
#   is gathered once. Gradients are reduced once in either case, after the last micro-batch.
#
# > **Misconception.** "FSDP and pipelines do not go together." They do, but inside a step weights and gradients of a
# > stage are there whole, whatever the ZeRO stage. ZeRO-1 (lesson 06) needs the same memory there and sends the same
# > bytes, with less machinery. So it is the usual partner of a pipeline; DeepSpeed's pipeline engine refuses stages 2
# > and 3.
#
# Because every parameter has the name that it has in one process, a checkpoint is not bound to a layout: what
# `dcp.save` (lesson 07) writes from 2 × 2 × 2 ranks, `dcp.load` reads into any other mesh. (The tests of this lesson do
# it.)
#
# > **What changes on real GPUs.** Nothing in these cells but the sizes. All-gathers, tensor all-reduces and stage
# > messages run on streams and communicators of their own, so that one does not wait for another. Tensor all-reduces
# > stay in the way of computing, as in lesson 09.

# %% [markdown]
# ## 4. Clipping over three dimensions
#
# Clipping needs the norm of *all* gradients (lessons 07 and 09). Now their pieces lie along three dimensions: FSDP's
# shards, tensor parallelism's slices, and other layers on other stages. Five ways to get a norm. **Predict**
# (question 6) which are wrong, and in which direction.


# %%
def library(parameters, mesh):
    """PyTorch's function, for what this stage has."""
    try:
        return nn.utils.get_total_norm([p.grad for p in parameters]).full_tensor()
    except RuntimeError as error:
        return str(error).partition(", but got")[0]


def own_pieces(parameters, mesh):
    """Each rank its own pieces."""
    return torch.stack([p.grad.to_local().norm() for p in parameters]).norm()


def all_pieces(parameters, mesh):
    """The squares of all pieces of all ranks."""
    square = own_pieces(parameters, mesh) ** 2
    dist.all_reduce(square)
    return square.sqrt()


# %%
def own_stage(parameters, mesh):
    """Each stage its own gradients, their pieces put together."""
    return torch.stack([p.grad.norm().full_tensor() for p in parameters]).norm()


def all_stages(parameters, mesh):
    """The squares of all stages."""
    square = own_stage(parameters, mesh) ** 2
    dist.all_reduce(square, group=mesh.get_group("pp"))
    return square.sqrt()


# %%
ways = (library, own_pieces, all_pieces, own_stage, all_stages)


def try_norms(parameters, mesh):
    """In place of clipping: every norm, as text."""
    found = {norm_of.__name__: norm_of(parameters, mesh) for norm_of in ways}
    return {name: n if isinstance(n, str) else f"{n.item():.4f}" for name, n in found.items()}


runs = on_ranks(three_dimensions, cube, try_norms, world_size=8, steps=1)
print(f"one process: {reference['norms'][0]:.4f}")
for norm_of in ways:
    seen = [run["norms"][0][norm_of.__name__] for run in runs]
    print(f"{norm_of.__name__:10}:", *dict.fromkeys(seen))

# %% [markdown]
# - PyTorch's own function refuses. The matrices lie on the mesh (dp, tp), the norms' weights on (dp) alone, and it
#   wants to stack both. That is the good case: it says so. People then write their own.
# - **Own pieces**: eight different norms, all too small.
# - **All pieces**: too large. What tensor parallelism does not cut, such as norms, positions and the biases of
#   row-parallel layers, is there once on each tensor rank, and is counted twice.
# - **Own stage**: right within a stage, but each stage clips by another norm. This is what one gets by calling a
#   function that was written for one mesh, on each stage.
# - **All stages**: right. A DTensor knows what is a slice and what a copy; the stages are added by hand.
#
# None of the wrong ones fails. What becomes of the weights?


# %%
class Clip:
    """Scales gradients down to a limit, by the norm that `norm_of` finds; gives that norm."""

    def __init__(self, norm_of, limit=0.5):
        self.norm_of, self.limit = norm_of, limit

    def __call__(self, parameters, mesh):
        norm = self.norm_of(parameters, mesh).item()
        for p in parameters:
            p.grad.mul_(min(1.0, self.limit / norm))
        return norm


def clipped_runs(norms, sizes):
    return [three_dimensions(sizes, Clip(norm_of)) for norm_of in norms]


tried = (own_stage, all_stages)
clipped = on_ranks(alone, Clip(None).limit, world_size=1)[0]
by_norm = zip(*on_ranks(clipped_runs, tried, cube, world_size=8), strict=True)
for norm_of, runs in zip(tried, by_norm, strict=True):
    loss, weight = apart(runs, clipped)
    told = "equal to one process" if max(loss, weight) < 1e-5 else f"weights off by {weight:.4f}"
    print(f"{norm_of.__name__:10}: losses off by {loss:.4f}, {told}")
    assert (max(loss, weight) < 1e-5) == (norm_of is all_stages)

# %% [markdown]
# The losses of the wrong one are off by a percent. Nobody would see that in a curve.
#
# > **Misconception.** "`clip_grad_norm_` is parallel-safe." It is on the mesh that a rank's parameters share. It cannot
# > know of other pipeline stages, whose parameters are not on this rank at all.
#
# > **What changes on real GPUs.** Nothing in the arithmetic. The norm is a few small all-reduces, and `item()` makes
# > the CPU wait for the GPU once a step; large programs scale by a tensor that stays on the GPU.

# %% [markdown]
# ## 5. Two nodes: what may cross the slow link?
#
# The hybrid challenge. Two machines with two GPUs each, a PCIe bus inside and 10 Gb/s Ethernet between. There are four
# ranks, so two of the three parallelisms, one inside the machines and one across: six ways. **Predict** (question 7)
# their order by the bytes between the machines. Then read on.
#
# The same code runs them all. A dimension of size 1 does nothing, and `order` says which dimension is slow, across
# machines, and which is fast, inside. FSDP keeps its weights here (`reshard_after_forward=False`), as one would with a
# pipeline.


# %%
def two_of(slow, fast):
    """Sizes of a mesh of four, and its order."""
    sizes = {name: 2 if name in (slow, fast) else 1 for name in cube}
    return sizes, [name for name in sizes if sizes[name] == 1] + [slow, fast]


def challenge(cases):
    """Two steps of each case (slow, fast) on this rank: losses, and the ledger of the second."""
    found = {}
    for case in cases:
        sizes, order = two_of(*case)
        options = {"steps": 2, "reshard_after_forward": False}
        found[case] = three_dimensions(sizes, order=order, **options) | {"weights": {}}
    return found


# %%
def crossing(ledgers, per_node=2):
    """Bytes that all ranks send between nodes, collectives as rings."""
    total = 0
    for rank, ledger in enumerate(ledgers):
        for entry in ledger:
            n = len(entry.ranks)
            following = entry.ranks[(entry.ranks.index(rank) + 1) % n]
            to = entry.peer if entry.op in ("send", "recv") else following
            if entry.op != "recv" and to // per_node != rank // per_node:
                total += bytes_sent(entry.op, n, entry.bytes)
    return total


# %%
cases = list(itertools.permutations(cube, 2))
by_rank = on_ranks(challenge, cases, world_size=4)
slow_bytes = {}
for slow, fast in cases:
    runs = [rank[slow, fast] for rank in by_rank]
    with_loss = [run["losses"] for run in runs if run["losses"][0] is not None]
    for step, losses in enumerate(zip(*with_loss, strict=True)):
        assert abs(sum(losses) / len(losses) - reference["losses"][step]) < 1e-5
    size = slow_bytes[slow, fast] = crossing([run["ledger"] for run in runs])
    sizes, _ = two_of(slow, fast)
    by_formula = (expected(gpt, sizes, whole_batch, run["stage"], 1) for run in runs)
    assert size == sum(formula[f"mesh_{slow}"] for formula in by_formula)
    print(f"{slow} across, {fast} inside: {size:10,.0f} bytes between the machines in a step")

# %% [markdown]
# All six have the losses of one process. The bytes between the machines differ by a factor of 19.
#
# Why? Say that a step has N tokens in all, and look at the blocks alone, with L layers of 12h² parameters:
#
# | across | inside | numbers between the machines | grows with |
# |---|---|---|---|
# | PP | DP | 2·N·h: each token's activations once forward, once back | tokens |
# | PP | TP | 4·N·h: both tensor ranks send the same | tokens |
# | DP | TP or PP | 24·L·h²: gradients one way, weights the other | parameters |
# | TP | DP or PP | 8·N·h·L | tokens and layers |
#
# (Four bytes a number; what was counted has embeddings and head in it as well, 12 to 19 % more in the last two rows.)
#
# So the order depends on the batch (second half of question 7). Tensor parallelism across sends less than data
# parallelism across if 8·N·h·L < 24·L·h², that is **N < 3h**: three times as many tokens as the model is wide, in the
# whole batch. Here that is 192 tokens, three windows. For GPT-3 with h = 12,288 it is 18 sequences of 2,048, where a
# real batch has hundreds. And pipelines send less than data parallelism as long as N < 12·h·L.
#
# Bytes are not time. The same messages can be put on emulated links (lesson 03): every rank goes through its ledger
# and sends what stands there, collectives as rings. Computing takes no time here, and nothing hides behind it.


# %%
def ring(entry):
    """The messages of a collective of this rank as a ring, with as many bytes."""
    n, at = len(entry.ranks), entry.ranks.index(dist.get_rank())
    following, before = entry.ranks[(at + 1) % n], entry.ranks[at - 1]
    for _ in range((2 if entry.op == "all_reduce" else 1) * (n - 1)):
        piece, coming = (torch.empty(entry.bytes // n, dtype=torch.uint8) for _ in range(2))
        sent = dist.isend(piece, following)
        dist.recv(coming, before)
        sent.wait()


# %%
def replayed(ledgers, links):
    """Emulated seconds of what this rank's ledger lists."""
    pending = []
    with fabric.emulate(links) as clock:
        for entry in ledgers[dist.get_rank()]:
            message = torch.empty(entry.bytes, dtype=torch.uint8)
            if entry.op == "send":
                pending.append((dist.isend(message, entry.peer), message))
            elif entry.op == "recv":
                dist.recv(message, entry.peer)
            else:
                ring(entry)
        for work, _ in pending:
            work.wait()
    return clock.seconds


# %%
bus, ethernet = LINKS["pcie4"], LINKS["eth_10g"]
machines = two_level(
    2, 2, (bus.latency, 1 / bus.bandwidth), (ethernet.latency, 1 / ethernet.bandwidth), nics="node"
)
seconds = {}
for case in cases:
    ledgers = [rank[case]["ledger"] for rank in by_rank]
    emulated = launch(replayed, ledgers, machines, world_size=4, backend="gloo")
    seconds[case] = max(emulated)
    size, calls = slow_bytes[case] / 1e6, len(ledgers[0])
    print(
        f"{case[0]} across, {case[1]} inside: {size:5.2f} MB, rank 0 has {calls:3} operations,",
        end="",
    )
    print(f"{1e3 * seconds[case]:6.2f} ms emulated")
assert max(seconds, key=seconds.get)[0] == "tp" and min(seconds, key=seconds.get)[0] == "pp"

# %% [markdown]
# The order is nearly that of the bytes, and not quite. Tensor parallelism *inside* costs a millisecond too: it sends
# many small messages, four a layer and micro-batch forward and back, and each pays the latency of the bus. That is why
# "DP across, TP inside" takes longer here than "DP across, PP inside" with nearly as many bytes. In a large model
# messages are hundreds of times larger, and latency counts less.
#
# Pipeline across the slow link sends least and is fastest, as far as messages go. What it costs is not in this table:
# the bubble, (p − 1)/m of the ideal time (lesson 10). With two stages and four micro-batches that is a quarter.
#
# > **Misconception.** "Data parallelism goes across nodes, model parallelism inside." *Tensor* parallelism goes inside.
# > Which of the other two crosses the slower link depends on 12·h·L, the number of tokens, and the bubble.
#
# > **What changes on real GPUs.** Gradients travel behind backward, and stage messages behind other micro-batches, so
# > these two can hide in part. Tensor parallelism's messages are waited for.

# %% [markdown]
# ## 6. Three dimensions are not always best
#
# **Predict** (question 8). The UvA deep-learning notebooks train a model of about a billion parameters on one machine
# with eight A5000s of 24 GB, of which only pairs are joined by NVLink, with 128 sequences of 1,024 tokens in a step.
#
# <details><summary>What they report</summary>
#
# (*Recorded*, P. Lippe, [*Language modeling with 3D parallelism* and *Transformers with tensor
# parallelism*](https://github.com/phlippe/uvadlc_notebooks/tree/master/docs/tutorial_notebooks/scaling/JAX)):
#
# | data × pipeline × tensor | FSDP | time of a step | memory of a GPU |
# |---|---|---|---|
# | 2 × 2 × 2 | yes | 2.9 s | 8.5 GB |
# | 4 × 1 × 2 | yes | 2.6 s | not given |
# | 4 × 1 × 2 | no | 2.5 s | 14.5 GB |
#
# (The second row is called "pure tensor parallelism" there. The notebook that it comes from has a data axis of four.)
# </details>
#
# Three dimensions came last. The first two rows differ by the pipeline, which costs 0.3 s in place of two more
# replicas; the last two by FSDP alone, which costs 0.1 s. The fastest has one dimension less, no sharding, and most
# memory: 14.5 GB of 24, so memory was there to be used.
#
# Each dimension buys **memory** and costs **time**. TP costs all-reduces in every layer, PP a bubble, FSDP gathers.
# Data parallelism with a large batch is nearly free, and buys none. So the rule is: *every dimension has to pay for
# itself*. What memory buys may be a model that fits, a larger micro-batch, or not to compute anything twice. What that
# is worth, a planner can compute.

# %% [markdown]
# ## 7. The planner
#
# `course_utils.planner` takes a model, a cluster, a layout and a batch (in sequences), and gives the bytes on the
# fullest GPU and the seconds of a step. It numbers ranks with tp fastest and dp slowest. Its parts are what this course
# has counted, but at the speeds that others have measured:
#
# | part | from |
# |---|---|
# | compute | products by shape, attention by kernel and length, bytes of all else, the optimizer (lesson 05) |
# | tensor | four all-reduces in a layer, six with full recomputation (09) |
# | context, expert | keys and values gathered among the context ranks; tokens sent to their experts (11) |
# | pipeline | messages between stages that nothing hides (10) |
# | data | gradients and weights, as far as computing does not hide them, and what hiding costs (06, 07) |
# | bubble | (p − 1)/(v·m) of the work of a rank (10) |
# | memory | states by ZeRO stage (06), activations (05, 10), the loss, gathered weights, unreduced gradients |
#
# First a run that you know from section 1. `report()` prints the plan with everything that it assumes: read that part
# before you believe the rest. **Predict** what takes most of the time after computing.

# %%
run = next(run for run in recorded.MEGATRON_RUNS if run.model == "Megatron 76.1B")
model, machine, layout, batch = planner.plan_inputs(run)
made = planner.plan(model, machine, layout, batch)
print(made.report())
print(f"\n{made.tflops:.0f} TFLOP/s a GPU with what is computed again; published {run.tflops}")

# %% [markdown]
# *Exposed* is what communication adds to the step, *hidden* what it does beside computing. Hidden messages are not
# free: they take multiprocessors and memory bandwidth from what hides them. Measured on A100s and H100s, computing is
# 18.9 % slower on average while the GPU communicates (*recorded*, Lee et al. 2025, [arXiv
# 2507.03114](https://arxiv.org/abs/2507.03114)), and the planner adds that.
#
# A planner that one cannot check is an oracle. Four checks against what this course has counted: parameters and FLOPs
# against the formulas of the paper, tensor traffic against section 1 (with full recomputation the forward's two
# all-reduces come again: 12 instead of 8), and the bubble against a simulated schedule.

# %%
tokens, h, depth, vocabulary = batch * 2048, model.hidden, model.layers, model.vocabulary
assert model.parameter_count == 12 * depth * h**2 + (13 * depth + vocabulary + 2048 + 2) * h
paper = 96 * tokens * depth * h**2 * (1 + 2048 / (6 * h) + vocabulary / (16 * depth * h))
assert math.isclose(tokens * model.flops_per_token("full"), paper, rel_tol=1e-12)

nvlink = planner.CONSTANTS.nvlink * LINKS["nvlink3"].bandwidth
counted = sent_by_a_gpu(model, vars(layout), batch)["tp"] * 12 / 8 / nvlink
hops = layout.microbatches(batch) * depth / layout.pp * 6 * 14  # of rings of eight, in a step
print(f"tensor: {counted:.2f} s from bytes, {hops * planner.HOP['Ampere']:.2f} from hops;", end="")
print(f" {made.tensor:.2f} s planned, with the head")
counted += hops * planner.HOP["Ampere"]
assert counted < made.tensor < 1.1 * counted
assert math.isclose(planner.traffic(model, layout, batch)["tp"], sent["tp"] * 12 / 8)

schedule = pipeline.interleaved(layout.pp, layout.microbatches(batch), layout.virtual)
bubble = pipeline.simulate(schedule).period / pipeline.ideal_seconds(schedule) - 1
busy = made.compute + made.tensor
print(f"bubble: {bubble:.3f} of the work simulated, {made.bubble / busy:.3f} planned")
assert math.isclose(bubble, made.bubble / busy, rel_tol=0.1)

# %% [markdown]
# ### What makes real steps slower
#
# A GPU never reaches the data sheet, and how far it stays below depends on the shape of the work. **Predict**: how much
# slower per operation is the output product of an MLP when TP 8 cuts its inner dimension to an eighth?

# %%
card, share = GPUS["h100"], planner.CONSTANTS.matmul_hopper
stream, best = card.memory_bandwidth * planner.CONSTANTS.hbm, planner.best_product("h100") * share
print(f"best product: {best / share / 1e12:.0f} TFLOP/s, in training {best / 1e12:.0f}")
shapes = {"TP 1": (8192, 8192, 28672), "TP 8": (8192, 8192, 3584), "a small one": (512, 1024, 1024)}
for name, (rows, columns, inner) in shapes.items():
    seconds = planner.product_seconds(rows, columns, inner, card.sms, best, stream)
    reached = 2 * rows * columns * inner / seconds / 1e12
    print(f"{name:12} {rows} tokens, {inner:5} x {columns}: {reached:4.0f} TFLOP/s")
for length in (512, 2048, 8192, 131072):
    both = [planner.attention_rate("h100", kernel, length) for kernel in ("flash2", "flash3")]
    told = ", ".join(f"{rate * share / 1e12:.0f}" for rate in both)
    print(f"attention over {length:6} tokens: {told} TFLOP/s (FlashAttention-2, -3)")

# %% [markdown]
# A product is cut into tiles, and multiprocessors take them in waves: the last wave leaves some idle, and a small
# product does not fill one. A result is written when its tile is done, which counts beside a short inner dimension: a
# few percent with TP 8. Attention needs long sequences, since tiles on the diagonal are half masked.
#
# Two shares of the planner are **fitted**, to five published runs: what training reaches of the best product ever found
# on the GPU, on Ampere and on Hopper. The share of memory bandwidth is assumed. All else is measured by others, or
# counted. Here are the constants.

# %%
print(planner.CONSTANTS)
fitted = planner.fit(planner.fitted_runs())
print(f"fitted again: {fitted.matmul:.3f} and {fitted.matmul_hopper:.3f}, from")
for known in planner.fitted_runs():
    print("  ", known.name, "-", known.title)
assert round(fitted.matmul, 3) == planner.CONSTANTS.matmul
assert round(fitted.matmul_hopper, 3) == planner.CONSTANTS.matmul_hopper

# %% [markdown]
# Now all ten runs of Megatron-LM's table, from 1.7 to 1,008 billion parameters, of which only the fifth was fitted.
# **Predict** (question 9).

# %%
replays = planner.replay(recorded.MEGATRON_RUNS)
plots.layout_bars({each.name: each.plan for each in replays}, "modelled: a step of ten runs")

# %% [markdown]
# *The figure: a bar a run, stacked from compute, tensor, pipeline, data and bubble, with the seconds of a step and the
# TFLOP/s at its end. Compute is by far the largest part of every bar. The last run takes about a hundred seconds a
# step, and is the only one with a broad bar of bubble.*

# %%
print("share of a step     " + "".join(f"{part:>9}" for part in planner.PARTS))
for each in replays:
    shares = [seconds / each.plan.seconds for seconds in each.plan.parts().values()]
    print(
        f"{each.name:15} TP {each.plan.layout.tp}" + "".join(f"{share:9.1%}" for share in shares)
    )

# %% [markdown]
# The largest run is planned as plain 1F1B, which is an assumption: the script that was published later
# (`examples/sc21/run_table_1.sh`) interleaves four of the six runs with a pipeline, but not 39.1B and not this one. The
# paper says that all of them interleaved (section 5.1), and 128 layers on 64 stages allow two chunks. Both readings:


# %%
def with_chunks(run, virtual):
    """A published run with another number of chunks on each pipeline rank."""
    return replace(run, layout={**run.layout, "virtual": virtual})


readings = {}
for virtual, source in ((1, "script, plain 1F1B"), (2, "paper, two chunks")):
    (each,) = planner.replay([with_chunks(recorded.MEGATRON_RUNS[-1], virtual)])
    parts = {part: seconds / each.plan.seconds for part, seconds in each.plan.parts().items()}
    readings[virtual] = parts
    told = f"bubble {parts['bubble']:.1%}, tensor {parts['tensor']:.1%}"
    print(f"{source:20}: {told}, {each.plan.tflops:.0f} TFLOP/s of {each.run.tflops}")
assert readings[1]["bubble"] > 1.5 * readings[1]["tensor"]
assert 0.8 < readings[2]["bubble"] / readings[2]["tensor"] < 1.2

# %% [markdown]
# So question 9 has no single answer: as plain 1F1B the bubble comes first by far, interleaved by two it is as large as
# tensor traffic, and the two sources disagree. Either way data parallelism, which most people call *distributed
# training*, is nearly nothing here. As models grow wider, a layer's products grow with h² and its messages with h, so
# tensor parallelism's share falls from the first run with TP 8 to the last. The bubble does not fall by itself: 64
# stages, and a batch that cannot grow for ever.
#
# ### Memory
#
# Where does memory go, and which lever moves which part? The same model and GPUs, one lever at a time, and what it
# needs besides. b is the size of a micro-batch.

# %%
sharded = planner.Layout(tp=8, dp=128, zero=3, sequence_parallel=False)
levers = {
    "published, b = 2": layout,
    "sequence parallel": replace(layout, sequence_parallel=True),
    "ZeRO-1": replace(layout, zero=1),
    "no recomputation, b = 1": replace(layout, recompute="none", microbatch=1),
    "ZeRO-3, no pipeline, b = 1": sharded,
    "ZeRO-3, no pipeline, b = 14": replace(sharded, microbatch=14),
}
plans = {name: planner.plan(model, machine, lever, batch) for name, lever in levers.items()}
rows = {name: each.memory for name, each in plans.items()}
plots.memory_bars(rows, f"modelled: {model.name}, the fullest GPU")

# %% [markdown]
# *The figure: six stacked bars. The published layout has most in optimizer states, then activations, then parameters
# and gradients. Sequence parallelism shrinks the activations, ZeRO-1 the optimizer states. Without recomputation
# activations are the largest part. With ZeRO-3 and micro-batches of one almost nothing is left; with larger ones
# activations are nearly all there is.*

# %%
print(f"{'':27}   GB     s   exposed    hidden messages (s)")
for name, each in plans.items():
    hidden, exposed = sum(each.hidden.values()), each.seconds - each.compute - each.bubble
    print(f"{name:27}{each.memory.total / 1e9:5.0f}{each.seconds:6.1f}", end="")
    print(f"{exposed:10.1f}{hidden:10.1f}")
for name, lever in {"PP 2": {"pp": 2, "dp": 64}, "no recomputation": {"recompute": "none"}}.items():
    against = planner.reasons_against(model, machine, replace(layout, **lever), batch)
    print(f"{name}, b = 2:", *against)
times = {name: each.seconds for name, each in plans.items()}
assert times["no recomputation, b = 1"] < 0.85 * times["published, b = 2"]
assert times["ZeRO-3, no pipeline, b = 1"] == max(times.values())
assert times["ZeRO-3, no pipeline, b = 14"] < times["published, b = 2"]

# %% [markdown]
# Memory buys time. Sequence parallelism is the exception, which takes less of both; it was published after this run
# (lesson 09). Without recomputation the step is shorter by a quarter, for more memory. ZeRO-3 with micro-batches of one
# gathers all weights 28 times in a step, and is slowest. With one micro-batch of 14 it gathers them twice, and would be
# faster than the published layout.
#
# The loss is a part of its own. Backward begins with its log-softmax, the gradient of that, and the gradient of the
# logits: 12 bytes a logit, in fp32. Llama 3 has 128,256 of them for each token, so programs for long sequences take the
# loss in pieces (lesson 06).

# %%
llama8, eight = PUBLISHED["Llama 3 8B"], planner.cluster("DGX H100", 8)
long8 = replace(llama8, context=32768)
for pieces in (1, 16):
    one = planner.Layout(dp=8, zero=3, recompute="full", loss_pieces=pieces)
    against = planner.reasons_against(long8, eight, one, 8)
    told = against[0] if against else str(planner.plan(long8, eight, one, 8))
    loss = long8.kept_around(32768, pieces=pieces)
    print(f"loss in {pieces:2} pieces, {loss / 1e9:4.1f} GB for it: {told}")

# %% [markdown]
# ## 8. Layouts that cannot run
#
# Most layouts that one writes down are impossible. It is better to hear that from a planner than after an hour in a
# queue. Llama 3 70B has 80 layers, 64 heads and 8 key-value heads; there are 64 H100s, and a batch of 512. One of these
# layouts is legal; each of the others breaks one rule. **Predict** which.

# %%
llama = PUBLISHED["Llama 3 70B"]
sixty_four = planner.cluster("DGX H100", 64)
good = planner.Layout(tp=8, pp=4, dp=2, recompute="selective")  # what is cheap to compute again
odd_length = replace(llama, context=9000)
CASES = {
    "TP 8 x PP 4 x DP 2": (llama, good),
    "TP 8 x PP 4 x DP 4": (llama, replace(good, dp=4)),
    "TP 16 x PP 2 x DP 2": (llama, replace(good, tp=16, pp=2)),
    "TP 2 x PP 32 x DP 1": (llama, replace(good, tp=2, pp=32, dp=1)),
    "micro-batches of 3": (llama, replace(good, microbatch=3)),
    "2 chunks, no pipeline": (llama, replace(good, pp=1, dp=8, virtual=2)),
    "4 chunks, 2 micro-batches": (llama, replace(good, microbatch=128, virtual=4)),
    "9,000 tokens, CP 16": (odd_length, replace(good, tp=1, cp=16, dp=1)),
    "FSDP 64, no recomputation": (llama, planner.Layout(dp=64, zero=3, recompute="none")),
    "HSDP, 8 nodes as replicas": (llama, planner.Layout(dp=64, zero=3, replicas=8)),
    "ZeRO-4": (llama, replace(good, zero=4)),
}

# %%
for name, (case, one) in CASES.items():
    against = planner.reasons_against(case, sixty_four, one, 512)
    print(f"{name}:", "; ".join(against) or "legal")
    assert bool(against) == (one is not good)

# %% [markdown]
# The kinds: the **GPUs** that the degrees make; **heads** (and key-value heads, and the width of the MLP) that tensor
# ranks share; **layers** that stages share; a **batch** that replicas and micro-batches share; what **interleaving**
# needs; the **length** that context ranks share; **replicas** and **experts** that data ranks share; **values** that do
# not exist; and **memory**, which is looked at when all else is well. Two rules are those of Megatron-LM at that time.
# Most programs today get round the one for heads with copies of key-value heads (lesson 09), and other schedules also
# run other numbers of micro-batches (lesson 10).
#
# HSDP does not fit here, because eight GPUs cannot hold the states of 70B. The smaller model does, and its gathers stay
# in the node. A mixture of experts divides them among data ranks, and a shape of your own is a `TransformerConfig`:

# %%
ours = TransformerConfig(
    layers=32, heads=32, hidden=4096, context=8192, vocabulary=64000, tied=False,
    queries_per_key=4, mlp_ratio=3.5, gated=True, fused=True, name="our 7B",
)  # fmt: skip
kinds = {
    "FSDP": (ours, planner.Layout(dp=64, zero=3, recompute="selective")),
    "HSDP": (ours, planner.Layout(dp=64, zero=3, replicas=8, recompute="selective")),
    "EP 8": (PUBLISHED["Mixtral 8x7B"], planner.Layout(dp=64, zero=1, ep=8, recompute="full")),
}
own = planner.own_cluster("h100", 64, network=100e9)
for name, (case, one) in kinds.items():
    each = planner.plan(case, own, one, 64)
    print(f"{name}: {each}; data {each.data:.2f} s, experts {each.expert:.2f} s")
    kinds[name] = each
assert kinds["HSDP"].data < kinds["FSDP"].data

# %% [markdown]
# What is *not* refused: tensor parallelism over two nodes. It runs. Section 11 shows what it costs. What cannot be said
# at all: nodes of several kinds, and stages of several sizes.
#
# ### An erratum
#
# Table 4 of the Llama 3 paper lists three layouts of the 405B model. In the first version of the paper the third row
# reads: 16,384 GPUs, TP 8, CP 16, PP 16, DP 4 (*recorded*). Would you have noticed?

# %%
printed = recorded.LLAMA3_MISPRINT
against = planner.reasons_against(*planner.plan_inputs(printed))
print(*against)
for row in recorded.LLAMA3_RUNS:
    assert not planner.reasons_against(*planner.plan_inputs(row))
corrected = {"TP": 8, "CP": 16, "PP": 16, "DP": recorded.LLAMA3_RUNS[2].layout["dp"]}
print("the row as it was meant:", corrected, "makes", math.prod(corrected.values()), "GPUs")
assert len(against) == 1 and math.prod(corrected.values()) == printed.gpus

# %% [markdown]
# The degrees make half of the GPUs. With DP 8 they make all.
#
# ## 9. Held against published runs
#
# The course keeps a table of published runs as data, each with the place it was read in. The planner has seen five of
# them. All others are predictions: other models, GPUs, networks and programs.
#
# **Predict** (question 10): is an error of 4 % good?

# %%
published = planner.published_runs(role=("known", "held_out"))
replays = planner.replay(published)
sources = {run.title for run in published}
seen = sum(each.fitted for each in replays)
print(f"{len(published)} runs from {len(sources)} sources, {seen} of them fitted")
plots.errors_by_family(replays, "modelled against recorded: errors by family")

# %% [markdown]
# *The figure: a row of points for each family of runs, a point a run, predicted over published throughput less one,
# with a grey band of 15 % either way. Most points lie inside. A few of the data-parallel runs are far to the right.*

# %%
FAMILIES = {
    "fsdp": "data parallel, FSDP", "3d": "tensor, pipeline", "long_context": "long context",
}  # fmt: skip
found_scores = planner.scores(replays)
print(f"{'':22}runs  median    bias   best constant guess")
for family, name in {**FAMILIES, "all": "all"}.items():
    each = found_scores[family]
    print(f"{name:22}{each.runs:4}{each.median:8.1%}{each.bias:+8.1%}{each.guess:10.1%}")
    assert each.median < 0.15 and abs(each.bias) < 0.1 and each.median < each.guess
assert found_scores["all"].median < 0.12

# %% [markdown]
# *Median* is that of the errors' sizes, *bias* that of the errors with their sign. The last column is a **baseline**:
# the guess that all runs of the family reach one share of the peak, the share chosen with all of them in view. An error
# of 4 % alone says little (question 10), since published shares lie close together. What says something is the
# comparison: with the planner the median error is smaller in every family, though it has seen five runs and the guess
# all of them.
#
# How unseen are these rows? Nothing was fitted to them. But while the planner was written its errors were seen, and
# some things were changed after a look: attention reaches in training as much less of its published speed as products
# do; NVIDIA's recipes are taken to overlap tensor-parallel messages where a source is silent; Megatron-LM's distributed
# optimizer and torchtitan's recomputation were read again. Only a table that nobody has looked at is an exam. There is
# one: the H100 tables of llm-foundry, which were scored once, when all was finished.

# %%
exam = planner.replay(planner.published_runs(role="exam"))
for name, each in planner.scores(exam).items():
    told = f"median {each.median:.1%}, bias {each.bias:+.1%}, best constant guess {each.guess:.1%}"
    print(f"exam, {FAMILIES.get(name, name)}: {each.runs} runs, {told}")
    assert each.median < 0.15
assert planner.scores(exam)["all"].median < 0.06 and planner.scores(exam)["fsdp"].bias > -0.05
assert -0.15 < planner.scores(exam)["long_context"].bias < -0.1

# %% [markdown]
# Passed, with one mark below: the median is below 6 %, but its long sequences are predicted 12 % too slow, where the
# goal was a bias of at most 10 %. A likely reason is the attention kernel, whose speed on an H100 we found published
# nowhere, so that about half of its successor's was assumed. The constant guess does nearly as well on this table. It
# was chosen with the answers in view, though, and all these runs are of one program on one kind of GPU: what a constant
# cannot do is carry over to another.
#
# ### Where it fails

# %%
worst = sorted(replays, key=lambda each: -abs(each.error))[:10]
for each in worst:
    print(f"{each.name:44}{str(each.plan.layout):30}{each.error:+6.0%}  {each.run.title[:44]}")


def of_table(name):
    """Median error, with its sign, of the runs of a table."""
    return statistics.median(each.error for each in replays if each.run.table == name)


names = sorted({each.run.table for each in replays})
by_table = {name: of_table(name) for name in names}
print("median error of a table:", ", ".join(f"{name} {e:+.0%}" for name, e in by_table.items()))
assert by_table["megatron-zero3"] > 1 and abs(by_table["torchtitan-fsdp"]) < 0.05
assert by_table["torchtitan-cp"] > 0.15 > by_table["bloom-bf16"] > 0.1
many = [each for each in replays if each.run.table == "torchtitan-cp" and each.run.cp >= 4]
assert all(0.3 < each.error < 0.45 for each in many)

# %% [markdown]
# The largest errors are those of ZeRO-3 in 2021 (Narayanan et al. 2021, table 2). What did that table measure? In each
# step the weights are gathered twice and the gradients scattered once, three times 2Ψ bytes.

# %%
for run in recorded.ZERO3_RUNS[:3]:
    size = planner.plan_inputs(run)[0]
    flops = run.batch * run.length * size.flops_per_token("full")
    seconds = flops / (run.gpus * run.tflops * 1e12)
    moved = 3 * 2 * size.parameter_count / seconds
    print(f"{run.gpus:4} GPUs: {seconds:3.0f} s a step, {moved / 1e9:.0f} GB/s into each GPU")

# %% [markdown]
# From 768 to 1,536 GPUs the step does not become shorter at all, as if it waited for its messages, at 16 GB/s. The
# eight ports of a node bring 200 GB/s. The planner believes that 0.9 of this arrives, and that most hides behind
# computing. In that software of 2021 it did not; in FSDP of today it does: the median error of torchtitan's runs with
# it is below 5 %. Context parallelism in torchtitan of 2024 is slower than planned as well, the more the more ranks
# share a sequence, and BLOOM's runs on a narrow network are slower by an eighth. **A model is right about what it has
# in it.** It does not know software that does less than the hardware allows.
#
# Memory is held against published runs as well: the peaks of torchtitan, and runs that did not fit.

# %%
peaks = [each for each in replays if each.run.table == "torchtitan-fsdp"]
print("torchtitan, 8B with FSDP                published  planned (GiB)")
for each in peaks:
    kind = f"{each.run.gpus} GPUs, {each.run.precision}, compile {each.run.compile}"
    held = each.plan.memory.total / 2**30
    print(f"  {kind:38}{each.run.peak_gib:8.1f}{held:9.1f}{held / each.run.peak_gib - 1:+7.0%}")
    assert abs(held / each.run.peak_gib - 1) < 0.08
too_much = [each for each in replays if each.refused]
failed = planner.published_runs(role=("known", "held_out"), outcome="out_of_memory")
caught = [run for run in failed if planner.reasons_against(*planner.plan_inputs(run))]
print(f"of {len(replays)} runs that fitted the planner refuses {len(too_much)};")
print(f"of {len(failed)} that did not fit it refuses {len(caught)}")
assert len(too_much) < 0.05 * len(replays) and len(caught) > len(failed) / 2

# %% [markdown]
# Published peaks are what the allocator *reserved*, and eager programs reserve more than they use. The planner counts
# what is used, so leave it a tenth. It misses runs whose program kept more than the source says, such as a second copy
# of gradients.
#
# ### Before you believe a plan
#
# Measure. Two commands of nccl-tests give the two numbers of your network: `all_gather_perf -b 256M -e 256M -g 8` on
# one node, and the same with one GPU of each of several nodes; type in the column *busbw*. Then run 20 steps of two
# layouts that you can start today, and type in the seconds of a step. `fit` finds the two shares that explain them: of
# products, and of memory bandwidth. (The numbers here are invented: replace them.)

# %%
mine = planner.own_cluster(
    "h100", 16, network=200e9, busbw_node=340e9, busbw_network=21e9, name="my 16 H100s"
)
runs_of_mine = {  # what was run: seconds of a step
    planner.Layout(dp=16, zero=3, recompute="full"): 5.48,
    planner.Layout(tp=4, dp=4, zero=3, recompute="none", compiled=False): 5.91,
}
measured = [planner.Measured(llama8, mine, one, 64, s) for one, s in runs_of_mine.items()]
of_mine = planner.fit(measured, ("matmul_hopper", "hbm"))
print(f"matmul_hopper {of_mine.matmul_hopper:.3f} (was {planner.CONSTANTS.matmul_hopper}),", end="")
print(f" hbm {of_mine.hbm:.3f} (was {planner.CONSTANTS.hbm})")
for each in measured:
    before, after = (
        planner.plan(llama8, mine, each.layout, 64, constants).seconds
        for constants in (planner.CONSTANTS, of_mine)
    )
    print(f"  {each.layout}: measured {each.seconds:.2f} s, before {before:.2f}, after {after:.2f}")
    assert math.isclose(after, each.seconds, rel_tol=0.02)
assert 0.6 < of_mine.matmul_hopper < 0.75 and 0.6 < of_mine.hbm < 0.9

# %% [markdown]
# A share above 1, or one far from the old one, says that something else is going on in these runs: look for it before
# you plan with such a share.
#
# ## 10. All layouts
#
# A plan is a short sum, so one can try them all: every way to write the GPUs as a product, every micro-batch, every
# number of chunks, every ZeRO stage and kind of recomputation. Each of them is bf16 with gradients in bf16,
# FlashAttention-2 and fused element-wise operations, unless you say otherwise.

# %%
found = planner.search(llama, sixty_four, 512)
print(f"{llama.name} on 64 H100s: {len(found.plans):,} layouts can run,", end="")
print(f" with {len(found.best)} choices of degrees")
print("refused:", ", ".join(f"{count:,} for {reason}" for reason, count in found.refused.items()))


def show(search, places):
    for place in places:
        each = search.best[place - 1]
        one = each.layout
        kind = f"ZeRO-{one.zero}, recompute {one.recompute}"
        messages = each.seconds - each.compute - each.bubble
        print(f"{place:2}. {plots.layout_name(one)}, {kind}: {each.seconds:.1f} s", end="")
        print(f" ({messages:.1f} messages, {sum(each.hidden.values()):.1f} hidden)", end="")
        print(f", {each.memory.total / 1e9:.0f} GB")


show(found, (1, 2, 3, 4, 5, found.rank(planner.Layout(dp=64))))
print("the same without context parallelism:")
whole = planner.search(llama, sixty_four, 512, cp=1)
show(whole, range(1, 6))

# %%
plots.search_picture(
    found.best, f"modelled: {llama.name} on 64 H100s, 512 sequences", best=3, slowest=3.0,
    limit=sixty_four.card.memory_bytes, marked={"degrees of section 8": good},
)  # fmt: skip

# %% [markdown]
# *The figure: a point for the best plan of each choice of degrees, memory of the fullest GPU to the right and time of a
# step upwards, coloured by TP. The fastest have small TP and nearly full GPUs.*
#
# **A search always finds the weakest spot of its model.** The first list divides sequences of 8,192 tokens among
# context ranks, which section 9 has shown the planner to flatter, and few people would. So there is a second list,
# without context parallelism. It is the one to start from: TP 4 with a short pipeline and ZeRO-1, or with FSDP over 16.
# FSDP alone fits as well, but it has to compute each forward twice.
#
# ### How wide is the network?
#
# The answer turns on an assumption of the first line: a port of 400 Gb/s for every GPU. Many clusters have less, new
# ones have more. The same search on three networks, with 128 sequences in a step: who wins on each, and what becomes of
# the winner on the others?

# %%
networks = {g: planner.own_cluster("h100", 64, network=g * 1e9) for g in (800, 400, 50)}
winners = {}
for gigabits, width in networks.items():
    best = planner.search(llama, width, 128, cp=1).plans[0]
    winners.setdefault(best.layout, gigabits)
print("seconds of a step (hidden)".ljust(52) + "".join(f"{g:>8} Gb/s" for g in networks))
for one in winners:
    name = f"{plots.layout_name(one)}, ZeRO-{one.zero}, {one.recompute}"
    cells = [planner.plan(llama, width, one, 128) for width in networks.values()]
    told = "".join(f"{c.seconds:6.1f} ({sum(c.hidden.values()):4.1f})" for c in cells)
    print(f"{name:50}{told}")
    if one.zero == 3:
        assert cells[2].seconds > 3 * cells[1].seconds
assert len(winners) == 3

# %% [markdown]
# On the widest network TP 4 with FSDP over 16 wins. It hides its gathers, but the hiding costs, and on an eighth of the
# width, where eight GPUs share what one has in the middle column, its messages come out from behind the computing and
# the step takes more than three times as long. A pipeline sends activations, not weights, and hardly notices. The
# narrower the network, the fewer replicas. What is hidden is also the reserve: a layout that hides much is near the
# edge.
#
# The width of the network decides between these, and two runs of nccl-tests are worth more than the third digit of any
# plan.
#
# ### 70B at 8k and at 128k
#
# The question of many teams: Llama 3 70B on 64 H100s, a million tokens in a step, first with sequences of 8,192 tokens
# and then, to make the context long, of 131,072. Gradients are reduced in fp32, the loss is taken in pieces, and the
# attention kernel is the one for Hopper.

# %%
given = {"precision": "mixed, fp32 gradients", "loss_pieces": 16, "attention": "flash3"}
short = planner.search(llama, sixty_four, 128, cp=1, **given)
long = planner.search(replace(llama, context=131072), sixty_four, 8, **given)
for name, one in {"8k": short, "128k": long}.items():
    print(f"{name}: {len(one.plans):,} layouts can run")
    show(one, range(1, 1 + min(3, len(one.best))))
print(long.plans[0].report())
share = long.plans[0].seconds / short.plans[0].seconds
print(f"a million tokens take {share:.1f} times as long at 128k")
assert 2 < share < 3 and long.plans[0].layout.dp == 1 and short.plans[0].layout.pp > 1

# %% [markdown]
# At 8k the plan is that of the pipeline, with whole sequences. At 128k there are only eight sequences in a step, so
# data parallelism has nothing to divide, and context ranks take its place: all nodes share each sequence. Attention
# makes a token cost more than twice as much. Section 9 says how far to believe the second plan: torchtitan's runs with
# four and eight context ranks took 30 to 45 % longer than planned, so measure that one first.
#
# ### Published layouts in such a list
#
# Where in such a list are the layouts that people have published? The search is given what their software could do
# (ZeRO stage, recomputation, overlap, and context parallelism where they used it), and chooses all else.

# %%
chosen = [*recorded.MEGATRON_RUNS, *recorded.LLAMA3_RUNS]
places = [planner.place(run) for run in chosen]
for run, place in zip(chosen, places, strict=True):
    print(f"{run.name:32} place {place.rank:2} of {place.of:2},{place.behind:6.1%} behind the best")
within = sum(place.rank <= 5 for place in places)
print(f"within the first five: {within} of {len(chosen)}")
assert within >= 11 and all(place.rank <= 2 for place in places[-3:])
assert sum(place.behind > 0.1 for place in places) == 3

# %% [markdown]
# Most are within the first five, and Llama's are first or second. Places are brittle, as many layouts lie within a few
# percent of each other; the last column says more. Megatron-LM's rule was tensor parallelism first, up to a node, and
# for three of its models the planner thinks that less of it would have been faster by 10 % or more. Who is right cannot
# be known from the table, since nobody published the runs that were not made.

# %% [markdown]
# ## 11. Which layout? A guide
#
# Seven questions, in the order in which they should be asked. Each answer is a call of the planner, on a case where it
# matters. `weigh` prints time and memory of some layouts, ZeRO stage and recomputation, what takes most of the time
# beside computing, or why they cannot run. Gradients are reduced in bf16, and the network is that of a DGX.


# %%
def weigh(model, machine, batch, layouts):
    """Print and return seconds by name; None for a layout that cannot run."""
    seconds = {}
    print(f"{model.name}, {batch} sequences of {model.context:,}", end="")
    print(f" on {machine.gpus} GPUs of {machine.name}")
    for name, one in layouts.items():
        against = planner.reasons_against(model, machine, one, batch)
        if against:
            print(f"  {name:24} cannot run: {against[0]}")
            continue
        made = planner.plan(model, machine, one, batch)
        parts = {part: s for part, s in made.parts().items() if part != "compute"}
        most = max(parts, key=parts.get)
        share = parts[most] / made.seconds
        told = f"{most} {share:.0%}" if share > 0.005 else "nothing but computing"
        kind = f"ZeRO-{one.zero}, {one.recompute:9}"
        print(f"  {name:24}{made.seconds:7.1f} s,{made.memory.total / 1e9:4.0f} GB, {kind}: {told}")
        seconds[name] = made.seconds
    return seconds


Layout = planner.Layout
small, one_node = PUBLISHED["Megatron 1.7B"], planner.cluster("DGX A100", 8)

# %% [markdown]
# **1. Does a GPU hold the model's states and one micro-batch?** Then data parallelism, and nothing else. (Micro-batches
# of one here; a search also chooses their size and the ZeRO stage.)

# %%
told = weigh(small, one_node, 128, {
    "DP 8": Layout(dp=8, zero=0), "PP 8": Layout(pp=8, zero=0), "TP 8": Layout(tp=8, zero=0),
    "TP 2, PP 2, DP 2": Layout(tp=2, pp=2, dp=2),
})  # fmt: skip
assert min(told, key=told.get) == "DP 8"

# %% [markdown]
# **2. No, but all GPUs together do?** Divide the states: ZeRO-1, or FSDP if that is not enough. The bytes sent
# are the same or half as many again, and there is no new dimension.

# %%
told = weigh(PUBLISHED["Llama 3 8B"], planner.cluster("DGX H100", 8), 128, {
    "DDP": Layout(dp=8, zero=0, recompute="selective"),
    "ZeRO-1": Layout(dp=8, zero=1, recompute="selective"),
    "FSDP": Layout(dp=8, zero=3, recompute="selective"),
    "TP 8": Layout(tp=8, zero=0, recompute="selective"),
})  # fmt: skip
assert "DDP" not in told and told["FSDP"] < told["TP 8"]

# %% [markdown]
# **3. Activations of one sequence do not fit?** FSDP does not divide them. Either compute them again, or divide them
# too: a little tensor parallelism, inside the node. Here are two networks, and each has another answer.

# %%
gpt3, thousand = PUBLISHED["Megatron 174.6B"], planner.cluster("DGX A100", 1024)
narrow = planner.own_cluster("a100", 1024, network=50e9, name="A100s at 50 Gb/s")
cheaper = []
for case in ((gpt3, thousand, 1024), (gpt3, narrow, 1024)):
    gpus = case[1].gpus
    told = weigh(*case, {
        "FSDP": Layout(dp=gpus, zero=3, recompute="selective"),
        "FSDP, full recomputation": Layout(dp=gpus, zero=3, recompute="full"),
        "FSDP, TP 2": Layout(tp=2, dp=gpus // 2, zero=3, recompute="selective"),
        "FSDP, TP 8": Layout(tp=8, dp=gpus // 8, zero=3, recompute="selective"),
    })  # fmt: skip
    cheaper.append(min(told, key=told.get))
assert cheaper == ["FSDP, TP 2", "FSDP, full recomputation"]

# %% [markdown]
# **4. Does computing hide the gathers?** FSDP moves the weights for every micro-batch. Larger micro-batches are the
# first cure. Where the batch of a replica is used up, a pipeline moves activations instead of weights. (With the
# larger batch the two differ by a tenth, which is not much more than the planner's error.)

# %%
for size, most in ((1536, 12), (128, 1)):
    told = weigh(gpt3, thousand, size, {
        "FSDP, TP 8, b = 1": Layout(tp=8, dp=128, zero=3),
        f"FSDP, TP 8, b = {most}": Layout(tp=8, dp=128, zero=3, microbatch=most),
        "TP 8, PP 8, 4 chunks": Layout(tp=8, pp=8, dp=16, virtual=4),
    })  # fmt: skip
    assert (told["TP 8, PP 8, 4 chunks"] < told[f"FSDP, TP 8, b = {most}"]) == (size == 128)

# %% [markdown]
# **5. More tensor parallelism, or more stages?** Never tensor parallelism beyond the node. Inside it, only as much as
# memory and batch need: TP 4 and TP 8 are about equal here, and where chunks shrink the bubble the smaller one wins.

# %%
told = weigh(gpt3, thousand, 1536, {
    "TP 4, PP 16": Layout(tp=4, pp=16, dp=16), "TP 8, PP 8": Layout(tp=8, pp=8, dp=16),
    "TP 16, PP 4": Layout(tp=16, pp=4, dp=16), "TP 32, PP 2": Layout(tp=32, pp=2, dp=16),
    "TP 4, PP 16, 6 chunks": Layout(tp=4, pp=16, dp=16, virtual=6),
    "TP 8, PP 8, 4 chunks": Layout(tp=8, pp=8, dp=16, virtual=4),
})  # fmt: skip
assert told["TP 8, PP 8"] < told["TP 16, PP 4"] < told["TP 32, PP 2"]
assert told["TP 4, PP 16, 6 chunks"] < told["TP 8, PP 8, 4 chunks"]

# %% [markdown]
# **6. Are there micro-batches enough for the pipeline?** If m is not many times p, interleave, or take fewer stages.

# %%
for size in (1536, 128):
    told = weigh(gpt3, thousand, size, {
        "TP 8, PP 8": Layout(tp=8, pp=8, dp=16),
        "TP 8, PP 8, 4 chunks": Layout(tp=8, pp=8, dp=16, virtual=4),
        "TP 8, PP 2": Layout(tp=8, pp=2, dp=64),
    })  # fmt: skip
assert told["TP 8, PP 8, 4 chunks"] < 0.75 * told["TP 8, PP 8"]

# %% [markdown]
# **7. Are the sequences long?** With a fixed number of tokens in a step there are few of them, so few replicas and few
# micro-batches. Context parallelism divides a sequence, and the replicas come back as context ranks. (The last line
# interleaves and recomputes less, too.)

# %%
long = replace(PUBLISHED["Llama 3 405B"], context=131072)
told = weigh(long, planner.cluster("DGX H100", 16384), 128, {
    "CP 1, DP 128": Layout(tp=8, pp=16, dp=128),
    "CP 16, DP 8": Layout(tp=8, pp=16, cp=16, dp=8),
    "CP 16, DP 8, 8 chunks": Layout(
        tp=8, pp=16, cp=16, dp=8, virtual=8, recompute="selective"
    ),
})  # fmt: skip
assert told["CP 16, DP 8"] < 0.2 * told["CP 1, DP 128"]

# %% [markdown]
# | | question | yes | no | 70B on 64 H100s |
# |---|---|---|---|---|
# | 1 | do states and a micro-batch fit on a GPU? | DP | 2 | no: 1.13 TB |
# | 2 | do states fit on all, and a sequence's activations on one? | ZeRO-1, FSDP | 3 | only the states |
# | 3 | is recomputation cheaper than a little TP? | recompute | TP in the node | no: TP 4 |
# | 4 | does computing hide FSDP's gathers? | FSDP | PP with ZeRO-1 | mostly at 400 Gb/s, not at 50 |
# | 5 | would more TP leave the node? | PP for the rest | as much TP as needed | TP 4 |
# | 6 | m many times p? | stay | interleave, fewer stages | 128 for PP 4: stay |
# | 7 | long sequences, few of them? | CP for replicas | done | done |
#
# Now the question at the top: Llama 3 405B, 16,384 GPUs, 2,048 sequences. The published layout against its neighbours:

# %%
largest, machine = PUBLISHED["Llama 3 405B"], planner.cluster("DGX H100", 16384)
theirs = planner.plan_inputs(recorded.LLAMA3_RUNS[1])[2]  # 16,384 GPUs, 8,192 tokens
told = weigh(largest, machine, 2048, {
    "TP 8, PP 16, DP 128": theirs,
    "TP 16, PP 8, DP 128": replace(theirs, tp=16, pp=8),
    "TP 8, PP 32, DP 64": replace(theirs, pp=32, dp=64, virtual=4),
    "TP 8, PP 4, DP 512": replace(theirs, pp=4, dp=512),
    "TP 4, PP 16, DP 256": replace(theirs, tp=4, dp=256),
    "TP 8, DP 2048, FSDP": Layout(tp=8, dp=2048, zero=3),
})  # fmt: skip
assert told["TP 8, PP 16, DP 128"] < 0.5 * told["TP 8, DP 2048, FSDP"]

# %% [markdown]
# Each number of the published layout has a reason. TP is 8, because eight GPUs share a node and eight key-value heads
# do not divide further. Halving it doubles the replicas and leaves eight micro-batches for 16 stages. Megatron-LM's
# schedule, and so the planner, refuses that. Llama 3's own schedule would run it. But a rank would be done with its
# first chunk after eight micro-batches, while the first of them needs 16 stages to come back for the second chunk: at
# least half of each pass would be idle. PP 32 is too deep for 32 micro-batches. PP 4 does not fit: a stage's gradients
# alone, in fp32, take 50 GB. Without a pipeline there are 2,048 replicas of one sequence, which cannot hide their
# gathers. And when sequences become 16 times as long, CP 16 takes the place of 16 replicas.

# %% [markdown]
# ## 12. Try it
#
# The explorer shows any mesh: choose degrees, GPUs of a node and the order of the dimensions, and a rank. It says with
# whom this rank shares what, over which links, and how many bytes a step sends there.

# %%
from course_utils.widgets import mesh_explorer

explorer = mesh_explorer()
explorer

# %% [markdown]
# *The explorer: four degrees, the order of the dimensions, GPUs in a node, a rank, and below that a model, a machine
# and a batch. Then a table of this rank's groups, with the link and the bytes of each, and the mesh with the groups in
# colour. In a notebook that is not running it shows one setting: Llama 3 70B on 256 H100s.*
#
# Answer with it, each time from that setting:
#
# <details><summary>Choose the order pp, cp, tp, dp. What happens to the time of the tensor group?</summary>
#
# It lies over eight nodes now, and needs 24.1 s instead of 2.67 s for its 1.2 TB. The data group has moved into the
# node, and saves 133 ms.
# </details>
#
# <details><summary>Put 16 GPUs in a node. Does the data group gain?</summary>
#
# Two of its ranks are in each node now. But a ring is as fast as its slowest link, which is the network: still 150 ms.
# NCCL builds as many rings as a node has ports, each through all ranks; the planner assumes those, and the group gains.
# </details>
#
# <details><summary>How few sequences until the data group needs longer than the tensor group?</summary>
#
# 24: then it is 150 ms against 125 ms. With 32 it is 150 against 167. Tensor traffic grows with the batch, data
# traffic does not: section 5 in a large cluster.
# </details>
#
# ## Recap, with the numbers of this run

# %%
print(f"{plane} and {cube}: losses and weights as in one process")
rank_0 = sent_by(keeps[0])
print(
    "a rank of 2 x 2 x 2 sends", ", ".join(f"{k[5:]} {v:,.0f}" for k, v in rank_0.items()), "bytes"
)
ends = [min(slow_bytes.values()), max(slow_bytes.values())]
print(
    f"two machines: {ends[0]:,.0f} to {ends[1]:,.0f} bytes between them, by the order of the mesh"
)
total = found_scores["all"]
print(f"planner: {total.median:.1%} median error over {total.runs} runs that it was not fitted to,")
print(f"{total.guess:.1%} for the best constant guess,", end="")
print(f" {within} of {len(chosen)} published layouts within its first five")

# %% [markdown]
# - A mesh is arithmetic: the last dimension counts fastest, and is the one inside the node. Tensor parallelism belongs
#   there, because of its bytes and because nothing hides them.
# - FSDP, tensor and pipeline parallelism go together in a few lines, equal to one process in losses and weights. Cut
#   by tensor parallelism first, shard what is left, and hand the stage to the pipeline.
# - With a pipeline keep FSDP's weights for the step, or they are gathered m + 1 times.
# - The norm for clipping is over all dimensions: slices added, copies not, stages by hand.
# - Between two machines with two GPUs each a pipeline sends 2·N·h numbers, data parallelism 24·L·h², tensor
#   parallelism 8·N·h·L.
# - Each dimension buys memory and costs messages or a bubble. It has to pay for itself.
# - A planner is a sum of things counted before, at speeds that others have measured. It refuses what cannot run, found
#   an erratum, and ranks the rest. Judge it by rows that it has not seen, and against a guess that knows nothing. It is
#   wrong where software does not do what the hardware allows. What a layout hides is its reserve.
#
# <details><summary>Answers to the ten predictions</summary>
#
# 1. Further away: 68, 76, 84, 92, 108, 116 and 124, each on another node (section 1).
# 2. The tensor group alone (section 1).
# 3. Those of a tensor group; the two replicas read different text (section 2).
# 4. 64 × 64 (section 2).
# 5. Five times if it is freed after forward, once if it is kept (section 3).
# 6. Nothing fails, and the weights are wrong: each stage scales by another norm (section 4).
# 7. Tensor parallelism across sends eight times as much here. Below 3h tokens in a batch it would send less
#    (section 5).
# 8. On that machine 4 × 1 × 2 without FSDP, then with it, then 2 × 2 × 2 (section 6).
# 9. With plain 1F1B the bubble, with two chunks a rank the bubble and tensor traffic alike: the sources disagree on
#    which it was (section 7).
# 10. Not by itself: published shares of the peak lie close together, and a constant guess is not far off (section 9).
# </details>
#
# **What to take to work:** [scripts/train.py](../scripts/train.py) trains on any mesh of replicas × shards × tensor
# parallelism, with the same losses on each, and goes on from its checkpoints on another mesh.
# [Lesson 16](16_multi_node.ipynb) starts it under torchrun and Slurm.
#
# **Exercises:** [exercises/12_parallelism_3d](../exercises/12_parallelism_3d_exercises.ipynb). **Next:**
# [13 profiling](13_profiling.ipynb), which finds out where the time of a step goes.
#
# **Worth reading**
# - D. Narayanan et al., *Efficient large-scale language model training on GPU clusters using Megatron-LM*, 2021,
#   [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): the layouts of sections 7 and 9, and why.
# - A. Grattafiori et al., *The Llama 3 herd of models*, 2024, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783),
#   section 3.3: four dimensions on 16,384 GPUs.
# - W. Liang et al., *TorchTitan: one-stop PyTorch native solution for production ready LLM pre-training*, 2024,
#   [arXiv 2410.06511](https://arxiv.org/abs/2410.06511): the library calls of sections 2 and 3, grown up.
