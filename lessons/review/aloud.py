"""Questions to be answered aloud, as in an interview, by topic, with what a strong answer has."""

from __future__ import annotations

from .question import Spoken as S

__all__ = ["QUESTIONS"]

ALL_REDUCE = (
    S("all-reduce and when", "02.2", "When do you need an all-reduce, and when only a part of it?", (
      "All-reduce: every rank needs the whole sum, such as the mean gradient of DDP, or the partial products of "
      "tensor parallelism.",
      "It is a reduce-scatter and an all-gather. If each rank needs its own part only (ZeRO, sequence "
      "parallelism), the first half is enough.",
      "Parameters that come back are an all-gather; tokens for experts an all-to-all; one rank's weights a "
      "broadcast.",
      "All ranks of the group must call it, in the same order, with the same size: else it hangs or is wrong in "
      "silence.")),
    S("ring all-reduce", "02.4", "Explain ring all-reduce at the board. Why does its cost hardly depend on the "
      "number of ranks?", (
      "The tensor is cut into N pieces. In N−1 steps each rank sends a piece to the right and adds what comes; "
      "then each has one complete piece.",
      "In N−1 more steps the complete pieces go round and are copied.",
      "Each rank sends 2(N−1) pieces of S/N: 2(N−1)/N · S, below 2 S. No way without help from the network sends "
      "less.",
      "Its latency grows with N: 2(N−1) steps. So small tensors and many ranks want a tree, or two levels.")),
    S("tree, hierarchy, switch", "03.4", "Your all-reduce goes over many nodes. What else than a flat ring is "
      "there, and what does each gain?", (
      "Tree: 2 log N steps instead of 2(N−1), for more bytes in a simple one; two trees at once win the bandwidth "
      "back.",
      "Two levels: reduce-scatter in the node, all-reduce of the pieces between nodes, all-gather in the node: "
      "fewer steps on the slow link, and all network cards at work.",
      "The switch adds (SHARP, NVLS): each GPU sends S once, about half of a ring's bytes.",
      "NCCL chooses by size and shape with a model of latency and bandwidth; check its log before you believe it.")),
)
DATA_OR_MODEL_PARALLELISM = (
    S("data or model parallelism", "12.10", "When is data parallelism enough, and when do you divide the model?", (
      "Data parallelism as long as the states of a step fit, with ZeRO or FSDP if they fit only when shared: it is "
      "the simplest, and needs no change of the model.",
      "Divide the model when a layer or its activations do not fit, or when the batch would be larger than what "
      "still pays.",
      "Each way has its link: tensor in the node, pipeline between nodes, data over what is left, context for long "
      "sequences, experts by all-to-all.",
      "State the numbers: 16 bytes a parameter with Adam, activations by tokens, what each dimension sends in a "
      "step.")),
    S("the batch as a limit", "05.10", "Why not train on a thousand GPUs by data parallelism alone?", (
      "The batch grows with the ranks; beyond the noise scale more samples in a step hardly improve it.",
      "With a fixed batch each GPU has fewer tokens, so the all-reduce is no longer hidden: the bytes stay, the "
      "computing shrinks.",
      "Latency of the ring grows with the ranks, and so does the chance of a slow or dead one.",
      "So dimensions are added: the same GPUs with fewer replicas.")),
    S("replicas that differ", "04.3", "How do you know that your data-parallel ranks train the same model on "
      "different data?", (
      "The same start: broadcast or equal seeds; after some steps compare a checksum of the weights over the ranks.",
      "Different data: a sampler by rank, and another order in each epoch (`set_epoch`).",
      "The mean of the gradients is the gradient of the large batch only if ranks have equally many samples or "
      "weigh them.",
      "Buffers, tied or unused parameters and random choices are the usual ways to drift apart without an error.")),
)
BUCKETS_AND_OVERLAP = (
    S("bucketing", "04.5", "Why does DDP put gradients into buckets? What happens if they are too small, or too "
      "large?", (
      "Hundreds of small all-reduces pay a latency each; a flat bucket pays it once.",
      "Too small: latency. Too large: the first one is full late, and one bucket for all hides nothing.",
      "They are filled in about the reverse order of forward, because this is the order in which gradients come; "
      "DDP learns it in the first step.",
      "A parameter without a gradient keeps its bucket from filling: find_unused_parameters, at a price, or no "
      "such parameters.")),
    S("overlap", "04.6", "How is communication hidden behind backward, and how do you see whether it works?", (
      "Hooks tell when a gradient is complete; a full bucket starts an asynchronous all-reduce on another stream "
      "while backward goes on.",
      "The last bucket is always exposed; more is exposed where the all-reduces together take longer than backward.",
      "In a trace: kernels of NCCL beside those of compute, and the exposed part as what no compute runs beside.",
      "Communication kernels take SMs and memory bandwidth, so what is hidden still slows computing a little.")),
    S("FSDP's overlap", "07.4", "What does FSDP overlap, and what can spoil it?", (
      "The all-gather of the next block runs while this one computes; gradients are reduced and scattered behind "
      "the backward of the block before.",
      "It takes units of a block's size: with the root wrapped only, everything is gathered at once.",
      "Prefetching costs memory: two blocks are whole at a time. CPU synchronizations, such as `.item()`, stop the "
      "run ahead.",
      "With few tokens a GPU, or a slow network, computing is too short to hide the gathers: HSDP, more "
      "accumulation, or larger micro-batches.")),
)
ZERO = (
    S("how ZeRO saves memory", "06.3", "How does ZeRO save memory, and what does each stage cost?", (
      "Data-parallel ranks hold the same states; each could hold a part. Mixed precision with Adam: 2 + 2 + 12 "
      "bytes a parameter.",
      "Stage 1 divides the optimizer's 12, stage 2 the gradients too, stage 3 also the parameters.",
      "Stages 1 and 2 send as much as DDP: reduce-scatter and all-gather are an all-reduce. Stage 3 sends half "
      "more, for the second gather.",
      "Activations are not divided.")),
    S("does it fit", "06.8", "Seventy billion parameters on 64 GPUs of 80 GB: does it fit? Talk me through it.", (
      "16 bytes a parameter are 1,120 GB, over 64 ranks 17.5 GB with stage 3. Stage 1 would leave 280 GB of "
      "weights and gradients on each rank: impossible.",
      "Add gathered layers, gradients in flight, activations by tokens and layers, logits (vocabulary times "
      "tokens), and some GB for CUDA and NCCL.",
      "If activations are too many: recomputation, smaller micro-batches, sequence or tensor parallelism.",
      "Then the time: bytes of stage 3 against the link, tokens a GPU.")),
    S("offload", "06.14", "When does offloading to the CPU's memory or to a disk make sense?", (
      "If nothing else fits: a step becomes slower by the bytes over PCIe, and by the optimizer on the CPU.",
      "The optimizer's states go first: they are used once a step, so accumulation shares the price.",
      "Parameters have to come in each forward and backward.",
      "More GPUs, recomputation or a smaller optimizer often cost less: compute it.")),
)
HANGS = (
    S("NCCL hangs", "14.6", "A job with 512 GPUs has stopped making progress. What do you do in the first ten "
      "minutes?", (
      "Keep it alive and collect: stacks of all ranks, flight records, the last log lines, before anybody kills it.",
      "Find who is not in the collective that the others wait in: the rank that is silent or elsewhere is the one "
      "to look at, not those who wait.",
      "Same call everywhere: look below the program, at links, GPUs, kernels. Different calls: ranks took "
      "different ways. One silent: dead, in Python, or in a kernel.",
      "Then the cause: a branch on a local value, uneven data, an error caught on one rank, groups in another "
      "order.")),
    S("deadlock without an error", "14.1", "Why does a missing collective hang instead of failing, and why is the "
      "place of the hang misleading?", (
      "A collective waits for all ranks of its group; nobody can know whether one is late or never comes.",
      "Under NCCL the call returns at once and the GPU waits, so Python stands in a later line, where a result is "
      "needed.",
      "Ranks that made one call too few match it with the next call of the others: sizes then differ, or results "
      "are wrong in silence.",
      "Only a time-out ends it: the watchdog's, half an hour or ten minutes later, in a sub-group perhaps with "
      "another limit.")),
    S("wrong without a hang", "14.8", "Which mistakes of distributed programs make no noise at all?", (
      "Different reductions or the wrong divisor: a mean of means, a sum for a mean, hidden by Adam.",
      "Parameters that DDP never reduces, or an optimizer that holds other tensors than the model.",
      "The same seed where data or dropout should differ, or different ones where ranks must agree.",
      "Guards: compare with one process on the same batch, a checksum of the weights over the ranks, values "
      "against known bounds.")),
    S("tools for hangs", "14.3", "Which tools for hangs do you know, and what does each not see?", (
      "Stacks (py-spy): where Python stands; equal stacks say nothing about which call the GPU is in.",
      "The flight recorder: which collective, number and group on each rank; not the reduction or the values.",
      "`TORCH_DISTRIBUTED_DEBUG=DETAIL` compares calls before they run, and slows; a monitored barrier names who "
      "is absent.",
      "NCCL's log and counters: links, transports, errors of the network.")),
)
FSDP_DDP_DEEPSPEED = (
    S("FSDP against DDP", "07.1", "FSDP or DDP: what decides?", (
      "Memory: DDP holds 16 bytes a parameter on each rank, FSDP 16/N and a block or two gathered.",
      "Bytes: 3 Ψ against 2 Ψ, and with accumulation FSDP gathers again in each micro-batch, while DDP sends once.",
      "If it fits with room, DDP is simpler and often as fast; between them is ZeRO-1, or FSDP without resharding.",
      "Compute both from parameters, tokens and the link, then measure.")),
    S("FSDP or DeepSpeed", "08.6", "A team asks whether to take FSDP2 or DeepSpeed. What do you ask back?", (
      "Do you cut tensors already (TP, `DTensor`), and do you compile? Then FSDP2: it composes with both.",
      "Do you need NVMe offload, or a configuration that trainers such as Hugging Face's know? DeepSpeed has these.",
      "How do you restart on other numbers of ranks? DCP reshards while it loads; DeepSpeed converts to a "
      "universal checkpoint.",
      "Both do the same on the wire for the same stage: the difference is not the number of bytes.")),
    S("checkpoints of sharded models", "07.5", "How do you save and load a model that no rank can hold?", (
      "Each rank writes its shards, with one list of what lies where (`.metadata`); loading reads what the new "
      "rank needs, so the number of ranks may change.",
      "All ranks take part: a gather for rank 0 alone hangs, and needs the whole model in one memory.",
      "On a shared disk, or the parts lie on several nodes and cannot be loaded. Verify before you delete the one "
      "before.",
      "Save asynchronously from a copy; also optimizer, step, data position and random states.")),
)
TENSOR_OR_PIPELINE = (
    S("TP against PP", "10.10", "Tensor or pipeline parallelism: what does each send, and where do you put it?", (
      "Tensor: four all-reduces of all activations in each layer, in the way of the next product. It needs NVLink: "
      "inside a node.",
      "Pipeline: one activation and one gradient at each cut for a micro-batch, little enough for the network; but "
      "a bubble of (p−1)/(m+p−1).",
      "Tensor parallelism divides activations too (with sequence parallelism all of them), and one reader's "
      "latency in serving. Pipelines divide layers and need many micro-batches.",
      "Usual: tp up to the node, then pp between nodes, the rest data parallel.")),
    S("Megatron's pair", "09.3", "Why does Megatron cut the first matrix of an MLP by columns and the second by "
      "rows?", (
      "By columns each rank computes its part of the inner vector, and GELU is element-wise: no exchange between "
      "the two.",
      "By rows each rank then has a partial sum of the output: one all-reduce in forward.",
      "In backward the input's gradient is a partial sum: one all-reduce there. These are f and g.",
      "Rows first would need a sum before GELU. Attention is cut by heads in the same manner.")),
    S("shrink the bubble", "10.7", "How do you make the bubble of a pipeline smaller, and what does each way cost?", (
      "More micro-batches: a larger batch, or smaller and less efficient products.",
      "Interleaving, v stages a rank: v times less, for v times as many messages.",
      "Zero-bubble: gradients of weights fill the gaps; ZB-H2 needs nearly twice the activations.",
      "1F1B does not shrink it: it limits activations to p micro-batches. Balance the stages: the slowest sets "
      "the pace.")),
)
MFU_AND_SPEED = (
    S("what MFU is", "05.6", "What is MFU, how do you compute it, and what is a good value?", (
      "6 · parameters · tokens a second (and attention for long sequences), over the dense peak of all GPUs.",
      "It leaves out recomputation; HFU counts it. Do not take the peak with sparsity.",
      "About 40 to 50 % is what large dense runs publish: 38 to 43 % for Llama 3 405B, 43 to 52 % of an A100 for "
      "Megatron-LM, which counts recomputation.",
      "It compares set-ups on the same hardware; tokens a second and a dollar decide.")),
    S("a slow job", "13.1", "A training runs at 20 % MFU. How do you find out why?", (
      "Watch one line a step: data, forward, backward, communication, optimizer, and each rank's, not the mean.",
      "Waiting for data? Does the CPU keep ahead of the GPU? What is exposed communication in the trace? Is one "
      "rank late?",
      "The rank with the shortest all-reduce is the slow one; the others' long ones are waiting.",
      "Mend in the order of the costs, and measure before and after, with the same losses.")),
    S("speed-up of 1.9", "05.2", "Two GPUs train 1.9 times as fast as one. Is that good, and what do you expect "
      "of 256?", (
      "For two it is 95 %; the cost rises by 5 % for nearly half of the time.",
      "Strong scaling ends at 1/s (Amdahl); with a batch that grows it goes on (Gustafson), but a larger batch is "
      "not always worth as much.",
      "What grows with N: latency of rings, slow links between nodes, stragglers, failures. Bytes a rank hardly "
      "grow.",
      "So do not extrapolate two points: measure a node, two nodes, and model the links.")),
)
FAILURES_AND_ELASTIC_TRAINING = (
    S("elastic training", "16.5", "What does elastic training do when a node dies, and what does it not do for "
      "you?", (
      "The agents notice, stop the ranks, meet anew with those who are left, number them again, and start the "
      "program from its beginning.",
      "The program has to load its newest checkpoint: state in memory is gone, steps since then are computed again.",
      "The world size changes: keep the batch by accumulation, shards by a checkpoint that reshards, and the "
      "data's order by what was consumed.",
      "It does not notice a rank that is merely slow or silent: time-outs and a gate before the start do.")),
    S("when to save", "16.13", "How often should a large job save?", (
      "Young: the root of 2 · time to save · time between failures of the job, which falls with the number of "
      "hosts.",
      "A hundred times the hosts: ten times as often. What is lost: half an interval, the restart, and the saves "
      "themselves.",
      "Asynchronous saves make the price of one small, so save more often.",
      "Test the restart: exit codes, SIGTERM before the end of a batch job, a damaged newest checkpoint.")),
    S("two hosts do not meet", "16.8", "A job on two nodes does not start: init times out. How do you tell the "
      "causes apart?", (
      "Does anything listen at MASTER_ADDR and MASTER_PORT, on the node of rank 0? Refused: nobody. Timed out: a "
      "firewall. Unreachable: no interface or route.",
      "Met but no group: the interface for data (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), a name that resolves to "
      "loopback, other ports that are closed.",
      "All ranks at once and alike: a setting. One host only: this host.",
      "Then NCCL_DEBUG=INFO: which network it took, and whether it fell back to sockets.")),
)
NETWORKS_AND_SERVING = (
    S("a number on a data sheet", "01.1", "A data sheet says 900 GB/s of NVLink and 400 Gb/s of network a GPU. "
      "What do your gradients see?", (
      "900 counts both directions: 450 one way. 400 Gb/s are 50 GB/s: nine times less.",
      "A collective's bus bandwidth is compared with these; a ring reaches some 80 % of NVLink (recorded, H200).",
      "The path counts, with its slowest link: PCIe, the socket's link, a shared network card.",
      "Small messages see latency, not bandwidth.")),
    S("serving on several GPUs", "17.3", "Why serve a model that fits on one GPU with tensor parallelism, and "
      "what limits it?", (
      "Decode is bound by memory: each GPU reads 1/t of the weights, so a token comes sooner; and there is more "
      "room for the cache of more readers.",
      "Two all-reduces a layer, tiny: they cost their latency, which no faster memory shortens. So one-shot "
      "all-reduces and CUDA graphs.",
      "Beyond the key-value heads the cache is copied: split the sequence, or take replicas.",
      "Replicas give more tokens a second of all, if one copy fits and latency is good enough.")),
)

QUESTIONS = {
    "All-reduce": ALL_REDUCE, "Data or model parallelism": DATA_OR_MODEL_PARALLELISM,
    "Buckets and overlap": BUCKETS_AND_OVERLAP, "ZeRO": ZERO, "Hangs": HANGS,
    "FSDP, DDP, DeepSpeed": FSDP_DDP_DEEPSPEED, "Tensor or pipeline": TENSOR_OR_PIPELINE,
    "MFU and speed": MFU_AND_SPEED, "Failures and elastic training": FAILURES_AND_ELASTIC_TRAINING,
    "Networks and serving": NETWORKS_AND_SERVING,
}
