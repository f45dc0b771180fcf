"""Questions about data parallelism, speed and memory: lessons 04 to 08, and 13."""

from __future__ import annotations

from .question import Question as Q

__all__ = ["QUESTIONS"]

DATA_PARALLELISM = (
    Q("a sum for a mean", "04.2", "{n} ranks train with SGD at a learning rate of {lr}, but the gradients are "
      "summed over the ranks, not averaged. With which rate would the mean take the same step?", {"n": (4, 8, 64),
      "lr": (0.1, 0.02)}, "lr * n", "(learning rate)",
      {"lr": "The sum is N times the mean, and SGD steps in proportion to the gradient.",
       "lr / n": "The sum is larger than the mean, so the steps are longer."},
      "N times the rate: training that diverges on more ranks often divides nowhere, or in one place only."),
    Q("the same with Adam", "04.2", "{n} ranks train with {opt}, and the gradients are summed over the ranks "
      "instead of averaged. What happens to the steps?", {"n": (4, 64), "opt": ("SGD", "Adam", "SGD with momentum")},
      "int(opt == 'Adam')", "",
      {"they become N times as long": "Adam divides by the root of the mean square, in which N cancels out. "
       "Clipping by norm would still notice.", "they hardly change": "This step goes with the gradient."},
      "Adam's step does not depend on the gradient's scale: a wrong factor hides until somebody clips, or takes SGD."),
    Q("buckets", "04.5", "Tensors of {a}, {b}, {c} and {d} MB get their gradients in this order. How many buckets "
      "of at most 25 MB do they fill, if a bucket is closed as soon as the next tensor does not fit?", {"a": (14, 16),
      "b": (8, 13), "c": (14, 16), "d": (4,)}, "len(a04.in_buckets([a04.nn.Parameter(a04.torch.empty(int(x * "
      "250000), device='meta')) for x in (a, b, c, d)], 25e6))", "buckets",
      {"math.ceil((a + b + c + d) / 25)": "A tensor is not cut in two, so buckets are not always full.",
       "4": "Several small tensors share a bucket."},
      "Buckets hold whole tensors in the order of backward; a large one has a bucket of its own."),
    Q("each micro-batch reduced", "04.8", "{k} micro-batches make a step, the gradients are {S} GB, and {n} ranks "
      "train with DDP without `no_sync`. How many GB does a rank send in a step?", {"k": (4, 16), "S": (2, 14),
      "n": (4, 8)}, "k * bytes_sent('all_reduce', n, S)", "GB",
      {"bytes_sent('all_reduce', n, S)": "Without `no_sync` each backward reduces, also where no optimizer step "
       "follows.", "k * S": "A ring all-reduce sends 2(N−1)/N · S each time."},
      "{k} times what is needed: only the last micro-batch has to send."),
    Q("losses of micro-batches", "04.8", "The loss of each of {k} micro-batches is a mean over its samples, and "
      "nothing is divided before the {k} backward calls. How many times too large is the gradient?",
      {"k": (4, 8, 32)}, "k", "times",
      {"1": "`backward` adds to `.grad`, so {k} means are added.", "1 / k": "Adding makes it larger, not smaller."},
      "Divide each loss by the number of micro-batches: DDP divides by ranks only."),
    Q("padded epoch", "04.9", "{s} samples, {n} ranks, and a sampler that gives all ranks equally many. How many "
      "samples are used twice in an epoch?", {"s": (1001, 1003, 50006), "n": (4, 8)},
      "n * len(a04.epoch_indices(s, n, 0, 0, 0)) - s", "samples",
      {"s % n": "So many are left over after whole rounds. The other ranks of the last round need one as well.",
       "0": "Equally many for all ranks does not come out even here."},
      "It pads to the next multiple of N. In training nobody notices; an evaluation counts these samples twice."),
    Q("mean of means", "04.11", "Rank 0 has {a} tokens with a mean loss of {x}, rank 1 has {b} tokens with a mean "
      "loss of {y}. What is the mean loss of all tokens?", {"a": (100, 1000), "b": (300, 4000), "x": (4.0,),
      "y": (2.0, 3.0)}, "(a * x + b * y) / (a + b)", "(loss)",
      {"(x + y) / 2": "The mean of the means counts a token of rank 0 more than one of rank 1.",
       "(a * y + b * x) / (a + b)": "Each mean is weighted by its own number of tokens."},
      "Reduce sums and counts, and divide once. DDP's mean of gradients has the same flaw."),
    Q("batch of a step", "08.3", "`train_batch_size` is {B}, a GPU takes {b} samples at a time, and there are {n} "
      "GPUs. How many micro-batches make a step?", {"B": (512, 2048), "b": (2, 4), "n": (16, 64)}, "B // (b * n)",
      "micro-batches",
      {"B // b": "The batch is divided among the {n} GPUs first.", "B // n": "A GPU takes {b} at a time."},
      "Batch = samples at a time · micro-batches · ranks of data parallelism."),
    Q("what overlap leaves", "05.11", "Backward takes {b} ms and fills {k} equal buckets one after the other. Each "
      "all-reduce takes {e} ms, and one runs at a time. How many ms after the end of backward does the last one end?",
      {"b": (40, 100), "k": (5, 10), "e": (2, 12)}, "scaling.bucket_schedule(k, e, b)[-1][1] - b", "ms",
      {"k * e": "All but the last bucket can start while backward goes on.", "0": "The last bucket is full only "
       "when backward ends, so it is never hidden."},
      "The last bucket always; and more where the all-reduces take longer than backward fills buckets."),
)
SCALING_AND_MFU = (
    Q("limit of a fixed batch", "05.2", "A step takes {a} ms on one rank and {b} ms on {n} ranks with the same "
      "batch. By Amdahl's law, how many times as fast can it become at most?", {"a": (1000, 800), "b": (160, 200),
      "n": (8, 16)}, "a05.amdahl_and_gustafson(a, b, n, 1000)[2]", "times",
      {"n": "With more ranks it goes on getting faster, until only the serial part is left.",
       "a / b": "This is what {n} ranks reach."},
      "1/s, where s = (t(N)/t(1) − 1/N) / (1 − 1/N) is the serial share."),
    Q("growing batch", "05.2", "{s} % of a step is serial, and {n} ranks each take a batch as large as the one rank "
      "did. By Gustafson's law, how many times as much work is done in the time of one step?", {"s": (5, 10),
      "n": (64, 1000)}, "a05.amdahl_and_gustafson(1, s / 100 + (1 - s / 100) / n, n, n)[3]", "times",
      {"1 / (s / 100 + (1 - s / 100) / n)": "That is Amdahl's law, for a fixed batch.",
       "n": "The serial part is not done N times."},
      "s + (1−s) N: the parallel work grows with the ranks, the serial part does not."),
    Q("how much faster", "05.1", "Tokens a second for each GPU: {recorded.ULTRASCALE_DP.tokens_per_gpu[0]} on 8 "
      "GPUs, {recorded.ULTRASCALE_DP.tokens_per_gpu[i]} on {recorded.ULTRASCALE_DP.gpus[i]} (recorded, Ultra-Scale "
      "Playbook). How many times as fast is the larger job?", {"i": (3, 4, 5)}, "recorded.ULTRASCALE_DP.gpus[i] / 8 "
      "* recorded.ULTRASCALE_DP.tokens_per_gpu[i] / recorded.ULTRASCALE_DP.tokens_per_gpu[0]", "times",
      {"recorded.ULTRASCALE_DP.gpus[i] / 8": "So it would be if each GPU kept its rate.",
       "answer * 8 / recorded.ULTRASCALE_DP.gpus[i]": "This is the rate of one GPU; there are more of them."},
      "GPUs times the rate of each: efficiency falls, and the job still becomes faster."),
    Q("one slow rank", "05.3", "{n} ranks take {t} ms for a step; one of them needs {d} ms more. By how many per "
      "cent do tokens a second fall?", {"n": (8, 64, 512), "t": (100, 200), "d": (25, 50)},
      "100 * (1 - t / scaling.slowest_step([[t]] * (n - 1) + [[t + d]]))", "%",
      {"100 * (1 - t / (t + d / n))": "The late milliseconds are not shared: all the others wait for them.",
       "100 * d / t": "That is how much longer a step takes; the rate falls by d / (t + d)."},
      "Each step ends with the slowest rank, however many others there are."),
    Q("tokens that hide the all-reduce", "05.4", "{n} GPUs of {f} TFLOP/s, a link of {g} GB/s each way, gradients "
      "of 2 bytes. How many tokens must a GPU have in a step so that computing (6 FLOPs a parameter and token) "
      "takes as long as the all-reduce?", {"n": (8, 64), "f": (400, 800), "g": (25, 50)},
      "(bytes_sent('all_reduce', n, 2) / (g * 1e9)) / (6 / (f * 1e12))", "tokens",
      {"(2 / (g * 1e9)) / (6 / (f * 1e12))": "A ring sends 2(N−1)/N of the gradients, not each once.",
       "3 * answer": "2 FLOPs are forward alone; backward has 4 more."},
      "The number of parameters cancels out: only tokens, FLOP/s and bytes a second count."),
    Q("a larger model", "05.4", "A model becomes {k} times as large; GPUs, tokens a GPU and links stay. What "
      "happens to the share of communication in data parallelism, without overlap?", {"k": (3, 10)},
      "int(bytes_sent('all_reduce', 8, 2 * k) / (6 * k) > 1.01 * bytes_sent('all_reduce', 8, 2) / 6)", "",
      {"it stays": "Computing and gradients both grow with the parameters.",
       "it grows, because gradients are larger": "The computing grows by the same factor.",
       "it shrinks, because computing grows faster": "The bytes grow by the same factor."},
      "Both are proportional to the parameters. What changes the share is the number of tokens for each GPU."),
    Q("lost in bf16", "05.5", "A weight of 1.0 in bf16 gets an update of +{u}. What is it afterwards?",
      {"u": (0.001, 0.003, 0.02)}, "formats.store(1 + u, formats.FORMATS[2]).value", "(stored)",
      {"1 + u": "bf16 has 8 significant bits: after 1 comes 1.0078125."},
      "The nearest of the numbers 1, 1.0078, 1.0156, …: small updates are lost, which is why "
      "fp32 master weights exist.", tolerance=0.0005),
    Q("what a format keeps", "05.12", "A gradient of {x} is stored in {name}. What is left of it?",
      {"x": (1e-9, 1e-3, 1e6), "name": ("bf16", "fp16")}, "(lambda v: 2 if v == float('inf') else int(v == "
      "0))(formats.store(x, formats.FORMATS[2 if name == 'bf16' else 3]).value)", "",
      {"about the same number": "fp16 goes from 6e-8 to 65,504 only.", "zero": "This format reaches that far down.",
       "infinity": "This format reaches that far up."},
      "bf16 has the range of fp32 with few digits; fp16 has more digits, and needs a loss scale."),
    Q("MFU", "05.6", "A model of {P} billion parameters trains at {r} tokens a second for each H100 (989.4 TFLOP/s "
      "dense). What is its MFU, attention left out?", {"P": (7, 8), "r": (8000, 9500)},
      "100 * a05.mfu_and_hfu(P * 1e9, r, 1, 989.4, 0)[0]", "%",
      {"answer / 3": "2 FLOPs a parameter are forward alone; with backward there are 6.",
       "answer / 2": "The larger peak on the data sheet counts sparsity.",
       "answer * 8 / 6": "With 8 FLOPs you count recomputation: that is HFU."},
      "6 · parameters · tokens a second, over the dense peak."),
    Q("MFU out of HFU", "05.6", "A paper reports {h} % of the peak and counts all of forward twice, because it "
      "recomputes everything. What is the MFU?", {"h": (44, 52, 60)},
      "h * a05.mfu_and_hfu(1e9, 1, 1, 1, 1)[0] / a05.mfu_and_hfu(1e9, 1, 1, 1, 1)[1]", "%",
      {"h": "That counts FLOPs which a model that fits would not need.", "h * 8 / 6": "MFU is the smaller one: it "
       "leaves out what is repeated.", "h * 2 / 3": "Of 8 FLOPs that are counted, 2 are repeated."},
      "6/8 of it: a parameter and token needs 6 FLOPs, and recomputation makes it 8."),
    Q("more GPUs, what price", "05.7", "A job goes from {n} to {m} GPUs, and its efficiency falls from {e} to {f}. "
      "By how many per cent does the whole run cost more?", {"n": (64, 128), "m": (256, 512), "e": (0.9,),
      "f": (0.75, 0.6)}, "100 * (a05.cost_of_run(1e12, 1e4, m, f, 0, 2)[1] / a05.cost_of_run(1e12, 1e4, n, e, 0, "
      "2)[1] - 1)", "%",
      {"0": "GPU hours grow when each GPU gets less done.", "100 * (e - f)": "The cost goes with 1/efficiency.",
       "100 * (m / n - 1)": "More GPUs need fewer hours."},
      "The ratio of the efficiencies: hours fall less than the GPUs grow."),
    Q("days of training", "05.6", "How many days do {n} H100 (989.4 TFLOP/s) take for {T} trillion tokens and {P} "
      "billion parameters at an MFU of {m} %?", {"n": (512, 1024), "T": (1, 2), "P": (8, 70), "m": (40,)},
      "6 * P * 1e9 * T * 1e12 / (n * GPUS['h100'].flops['bf16'] * m / 100) / 86400", "days",
      {"answer / 3": "2 FLOPs are forward alone; training takes 6 for each parameter and token.",
       "answer * m / 100": "No job reaches the peak: divide by the MFU too."},
      "6 · parameters · tokens over FLOP/s · MFU."),
    Q("top-k", "05.14", "Each of {n} ranks sends the largest {p} % of its fp32 gradients, with an index of 4 bytes "
      "each, by an all-gather. How many times fewer bytes is that than by a ring all-reduce of all?",
      {"n": (4, 8, 16), "p": (1, 2)}, "bytes_sent('all_reduce', n, 4) / bytes_sent('all_gather', n, n * 8 * p / 100)",
      "times fewer",
      {"100 / p": "Indices double it, and in an all-gather the parts of all ranks come to each rank.",
       "50 / p": "In an all-gather each rank gets what all the others chose: it grows with N."},
      "100 / (p N): the saving shrinks with every rank that joins."),
)
PROFILING = (
    Q("time in all-reduce", "13.4", "An all-reduce takes {a} ms once all are there. Rank {r} of {n} comes {d} ms "
      "late in each step. How many ms does the profile of rank {q} show for it?", {"a": (5, 8), "r": (2, 3),
      "n": (8,), "d": (40, 60), "q": (3, 5)}, "a + (0 if q == r else d)", "ms",
      {"a + (d if q == r else 0)": "The late rank waits for nobody; the others wait for it.",
       "a": "Whoever is in time waits in the call until the last one has come.", "d": "The transfer comes after it."},
      "The rank with the shortest all-reduce is the one that the others wait for."),
    Q("exposed", "13.3", "In a step the GPU computes from 0 to {c} ms, and an all-reduce runs from {s} to {e} ms. "
      "How many ms of it are exposed?", {"c": (80, 100), "s": (30, 60), "e": (90, 130)}, "max(0, e - max(c, s))",
      "ms",
      {"e - s": "What runs beside computing costs no time.", "min(c, e) - s": "That is the part which is hidden."},
      "Exposed is what runs while nothing is computed: the only part that a step gets longer by."),
)
MEMORY = (
    Q("states of Adam", "06.2", "{P} billion parameters are trained in mixed precision with Adam on one GPU. How "
      "many GB are parameters, gradients and the optimizer's states together?", {"P": (1.5, 7, 13)},
      "model_states(P * 1e9).total / 1e9", "GB",
      {"2 * P": "Those are the weights in 2 bytes. Training holds gradients, master weights and two moments too.",
       "4 * P": "Master weights and the two moments are missing: 12 bytes more for each parameter.",
       "12 * P": "Those are the optimizer's: weights and gradients come on top."},
      "16 bytes a parameter: 2 + 2 + 4 + 4 + 4."),
    Q("bytes by optimizer", "06.2", "How many bytes a parameter do model states take in {p} precision with {o}?",
      {"p": ("fp32", "mixed"), "o": ("sgd", "momentum", "adam")}, "model_states(1.0, precision=p, optimizer=o).total",
      "bytes",
      {"16": "Count the states: none with SGD, one with momentum, two with Adam.",
       "answer - 2 * OPTIMIZERS[o]": "States of the optimizer have 4 bytes each."},
      "Weights and gradients, master weights if mixed, and 4 bytes for each state."),
    Q("ZeRO stage", "06.3", "{P} billion parameters, mixed precision, Adam, {n} ranks, ZeRO stage {s}. How many GB "
      "of model states does a rank hold?", {"P": (7.5, 13), "n": (8, 64), "s": (1, 2, 3)},
      "sum(a06.state_bytes(P * 1e9, s, n, 'mixed', 'adam'))", "GB",
      {"16 * P": "That is without ZeRO.", "16 * P / n": "Only stage 3 divides everything.",
       "2 * P + 14 * P / n": "Stage {s} divides other parts: 1 the optimizer's, 2 the gradients too, 3 all."},
      "Of 2 + 2 + 12 bytes stage 1 divides the 12, stage 2 also the gradients, stage 3 all."),
    Q("what never shrinks", "06.3", "{P} billion parameters, mixed precision, Adam, ZeRO stage {s}, as many ranks "
      "as you like. How many GB does a rank hold at least?", {"P": (7, 30, 70), "s": (1, 2)},
      "model_states(P * 1e9, stage=s, ranks=10**9).total / 1e9", "GB",
      {"16 * P": "The optimizer's 12 bytes are divided.", "2 * s * P": "You swapped them: stage 1 keeps weights "
       "and gradients whole, stage 2 only the weights."},
      "4 bytes a parameter with stage 1, 2 with stage 2: where that does not fit, only stage 3 helps."),
    Q("traffic of a stage", "06.7", "How many times as many bytes as DDP does ZeRO stage {s} send in a step (one "
      "micro-batch, {n} ranks)?", {"s": (1, 2, 3), "n": (8, 64)}, "(bytes_sent('reduce_scatter', n, 1) + (1 if s < "
      "3 else 2) * bytes_sent('all_gather', n, 1)) / bytes_sent('all_reduce', n, 1)", "times",
      {"3": "3 Ψ against 2 Ψ: DDP's all-reduce counts two.", "2.5 - s / 2": "Stages 1 and 2 send a reduce-scatter "
       "and an all-gather, which is an all-reduce. Stage 3 gathers once more.", "n": "No byte is sent N times."},
      "Stages 1 and 2 as much as DDP, stage 3 half more: it gathers for forward and for backward."),
    Q("ranks that are enough", "06.8", "Model states of {P} billion parameters (mixed, Adam, stage 3) may take {G} "
      "GB of a GPU. How many ranks are needed?", {"P": (13, 70), "G": (20, 40)},
      "next(n for n in range(1, 10**4) if model_states(P * 1e9, stage=3, ranks=n).total <= G * 1e9)", "ranks",
      {"math.ceil(2 * P / G)": "That shares out the weights alone.",
       "math.ceil(4 * P / G)": "The optimizer's 12 bytes a parameter are missing."},
      "16 Ψ / G, rounded up; activations and gathered layers come on top.", tolerance=0.005),
    Q("what ZeRO does not divide", "06.10", "On one GPU a job would hold {S} GB of model states and {A} GB of "
      "activations. {n} ranks with stage 3 take the same batch each. How many GB does a rank hold, gathered layers "
      "left out?", {"S": (112, 208), "A": (20, 30), "n": (8, 16)}, "S / n + A", "GB",
      {"(S + A) / n": "Activations belong to a rank's own samples: ZeRO does not divide them.",
       "S + A": "Stage 3 divides the model states."},
      "States are divided, activations are not: recompute those, take fewer at a time, or cut the sequence."),
    Q("kept inputs", "06.10", "Llama 3 8B with full recomputation keeps only the input of each layer, in 2 bytes a "
      "number. How many GB are that for {t} tokens?", {"t": (8192, 32768)},
      "32 * PUBLISHED['Llama 3 8B'].kept(t, 'full') / 1e9", "GB",
      {"PUBLISHED['Llama 3 8B'].kept(t, 'full') / 1e9": "That is one layer; it has 32.",
       "32 * PUBLISHED['Llama 3 8B'].kept(t, 'none') / 1e9": "That is without recomputation."},
      "Layers · tokens · 4096 · 2 bytes."),
)
FSDP_AND_DEEPSPEED = (
    Q("all-gathers of a step", "07.2", "{L} blocks are wrapped by `fully_shard`, and the root too. How many "
      "all-gathers has a step of {k} micro-batches, by default?", {"L": (12, 32), "k": (2, 4)},
      "a07.fsdp_traffic(L, 1e6, 1e6, 8, 2, 2, k)[0]", "all-gathers",
      {"L + 1": "Blocks are gathered for forward and again for backward, in each micro-batch.",
       "2 * k * (L + 1)": "The root is not freed after forward, so it comes once.",
       "k * (L + 1)": "By default a block is freed after forward and comes again for backward."},
      "2 L + 1 for each micro-batch."),
    Q("bytes of FSDP", "07.2", "{P} billion parameters in blocks, bf16 gathered and reduced, {n} ranks, one "
      "micro-batch. How many GB does a rank send in a step by default, the root left out?", {"P": (7, 13),
      "n": (8, 64)}, "a07.fsdp_traffic(1, P * 1e9, 0, n, 2, 2, 1)[2]", "GB",
      {"answer / 1.5": "That is DDP. FSDP gathers a second time for backward."},
      "Two all-gathers and a reduce-scatter of 2 Ψ bytes each."),
    Q("gathered and kept", "07.8", "With `reshard_after_forward=False` blocks stay gathered from forward to "
      "backward. How many GB does a rank then send in a step ({P} billion parameters, 2 bytes, {n} ranks)?",
      {"P": (7, 13), "n": (8, 64)}, "bytes_sent('all_gather', n, 2 * P) + bytes_sent('reduce_scatter', n, 2 * P)",
      "GB",
      {"1.5 * answer": "That is the default, which gathers again for backward.",
       "answer / 2": "Gradients still have to be reduced."},
      "As many as DDP, for the memory of all gathered parameters: this is ZeRO-2."),
    Q("only the root wrapped", "07.3", "Somebody calls `fully_shard` on the model only, not on its {L} blocks ({P} "
      "billion parameters, bf16, {n} ranks). How many GB of gathered parameters does a rank hold in forward?",
      {"L": (32, 40), "P": (7, 13), "n": (8, 64)}, "2 * P", "GB",
      {"2 * P / n": "That is the shard. To compute, the unit is gathered whole, and here the unit is the model.",
       "2 * P / L": "That is a block: so it would be with each block wrapped."},
      "One unit is gathered at once. Nothing fails, but memory and overlap are those of no sharding of parameters."),
    Q("accumulate with FSDP", "07.11", "FSDP with {k} micro-batches a step, gradients reduced in the last one only "
      "({P} billion parameters, 2 bytes, {n} ranks, default resharding). How many GB does a rank send?", {"k": (4, 8),
      "P": (7, 13), "n": (8, 64)}, "a07.fsdp_traffic(1, P * 1e9, 0, n, 2, 2, k)[2]", "GB",
      {"a07.fsdp_traffic(1, P * 1e9, 0, n, 2, 2, 1)[2]": "Parameters are gathered again in every micro-batch.",
       "k * a07.fsdp_traffic(1, P * 1e9, 0, n, 2, 2, 1)[2]": "Gathers repeat, but gradients are reduced once."},
      "2 k all-gathers and one reduce-scatter: accumulation saves DDP's messages, and few of FSDP's."),
    Q("norm over shards", "07.12", "Two ranks hold shards of the gradients, with norms {a} and {b}. What is the "
      "norm of all gradients?", {"a": (3, 6), "b": (4, 8)}, "math.hypot(a, b)", "(norm)",
      {"a + b": "Norms do not add; their squares do.", "max(a, b)": "Both shards count.",
       "(a + b) / 2": "A mean of norms is no norm."},
      "Add the squares over the ranks, then take the root. Clipping each shard by itself changes the direction."),
    Q("HSDP", "07.9", "{S} GB of gradients on {m} nodes of 8 GPUs. HSDP shards in the node and replicates across. "
      "How many GB does a GPU send to other nodes for them?", {"S": (16, 32), "m": (2, 4)},
      "bytes_sent('all_reduce', m, S / 8)", "GB",
      {"bytes_sent('all_reduce', m, S)": "After the reduce-scatter in the node each GPU has an eighth to reduce "
       "across.", "bytes_sent('reduce_scatter', 8 * m, S)": "That is sharding over all the GPUs."},
      "An all-reduce of its shard with the {m - 1} others that have the same one. No parameter goes across."),
    Q("which engine", "08.6", "What do you take? {('70 billion parameters with tensor parallelism in the node, "
      "pipeline stages between nodes, and blocks that are compiled.', 'Two GPUs; the states fit neither there nor "
      "in the memory of the CPU, but on a fast disk; a slow step is acceptable.', '1.5 billion parameters on 8 GPUs "
      "of 16 GB (activations take 4 GB), 16 micro-batches a step, and a slow network.', '125 million parameters on "
      "4 GPUs of 24 GB in fp32, activations of 10 GB; the shortest step wins.')[k]}", {"k": (0, 1, 2, 3)}, "k", "",
      {"FSDP2": "It holds little and sends more than DDP, in each micro-batch: worth it where less does not fit, or "
       "where tensors are cut by others (DTensor) already.", "ZeRO-3 with NVMe offload":
       "The disk is the slowest place of all: only for what fits nowhere else.", "ZeRO-1":
       "It shards the optimizer's states and reduces once a step: right where those alone are too large.",
       "DDP": "Every GPU would hold all states, which here is more than there is."},
      "Count the bytes that must fit, then take what sends least."),
)

QUESTIONS = {
    "Data parallelism": DATA_PARALLELISM, "Scaling and MFU": SCALING_AND_MFU, "Profiling": PROFILING,
    "Memory": MEMORY, "FSDP and DeepSpeed": FSDP_AND_DEEPSPEED,
}
