"""Questions about hangs, data, several hosts, serving and runs that go wrong: lessons 14 to 17, and 19."""

from __future__ import annotations

from .question import Question as Q

__all__ = ["QUESTIONS"]

HANGS = (
    Q("hang: the cause", "14.8", '"{hangs.CASES[p].complaint}" What is the cause? Every rank runs this: '
      "`{hangs.source_of(hangs.CASES[p])[0].strip()}`", {"p": (0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 13)}, "0", "",
      "{hangs.CASES[q % 15].cause: 'That would be: ' + hangs.CAUSES[hangs.CASES[q % 15].cause].sentence for q in "
      "(p, p + 3, p + 7, p + 11)}",
      "{hangs.CASES[p].why[0].upper() + hangs.CASES[p].why[1:]}"),
    Q("hang: the rule", "14.5", '"{hangs.CASES[p].complaint}" It was found that {hangs.CASES[p].why} Which rule '
      "avoids this?", {"p": (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 13)}, "0", "",
      "{hangs.CASES[q].rule: 'This avoids something else: ' + hangs.CAUSES[hangs.CASES[q].cause].sentence for q in "
      "(p, (p + 4) % 15, (p + 8) % 15)}",
      "{hangs.CASES[p].rule[0].upper() + hangs.CASES[p].rule[1:]}"),
    Q("flight records", "14.3", "{hangs.CAUSES[c].sentence} Do the flight records of the ranks (which collective, "
      "which number, which group) differ?",
      {"c": ("one rank only", "order of groups", "different roots", "unused parameters")},
      "int(hangs.CAUSES[c].shows['record'] == 'alike')", "",
      {"they differ": "All ranks call the same collectives in the same groups; reduction, root and missing "
       "gradients are not in the record.", "they are alike": "Ranks have called different collectives, or a "
       "different number of them, or in other groups."},
      "Records tell who called what and how often, not with which root, reduction or values."),
    Q("watchdog log", "14.7", "A job of 4 ranks ended with time-outs: {('ranks 0, 1 and 3 in ALLREDUCE number 812', "
      "'ranks 0, 1 and 2 in ALLREDUCE number 812, rank 3 in ALLGATHER number 811', 'ranks 0 to 3 in ALLREDUCE "
      "number 812, of equal sizes')[k]}. Where do you look first?", {"k": (0, 1, 2)}, "('silent', 'out of step', "
      "'alike').index(watchdog.conclusion([watchdog.Waiting(r, n, op, group='0') for r, n, op in (((0, 812, "
      "'ALLREDUCE'), (1, 812, 'ALLREDUCE'), (3, 812, 'ALLREDUCE')), ((0, 812, 'ALLREDUCE'), (1, 812, 'ALLREDUCE'), "
      "(2, 812, 'ALLREDUCE'), (3, 811, 'ALLGATHER')), tuple((r, 812, 'ALLREDUCE') for r in range(4)))[k]], 4)[0])",
      "",
      {"at the rank that says nothing": "Every rank has reported.",
       "at the programs, which took different ways": "All that report wait in the same call.",
       "below the program: links, GPUs, a kernel that does not end": "Not all ranks wait in the same call."},
      "Who is silent, who is elsewhere, or all alike: three different kinds of fault."),
    Q("the round that one rank adds", "14.5", "{s} batches on {n} ranks, the first ranks take one more where it "
      "does not come out even, and each batch has an all-reduce. In which all-reduce of the epoch, counted from 1, "
      "do ranks wait in vain?", {"s": (7, 10, 101), "n": (3, 4)}, "s // n + 1", "(number)",
      {"s // n": "All ranks have that one.", "s": "Batches are shared out: each rank has s/N."},
      "The first one that some ranks do not call. Count batches on all ranks before the epoch."),
)
DATA_LOADING = (
    Q("who sets the pace", "15.1", "A loader gives {r} images/s and a step takes {g}. With the loader working "
      "ahead, which share of its time does the step wait?", {"r": (900, 1200), "g": (2400, 3000)},
      "100 * (1 - a15.imagenet_epoch(1, 1, 9, 1, r, g)[1] ** -1 / g)", "%",
      {"100 * r / g": "That is the share in which it computes.",
       "100 * (1 - 1 / (1 / r + 1 / g) / g)": "So it is if loading and computing come one after the other."},
      "1 − r/g: the slower of the two sets the pace."),
    Q("more workers", "15.2", "Decoding takes {c} ms of a core for each image, and reading {w} ms of waiting for a "
      "disk. How many images/s do {n} workers give on {k} cores, at best?", {"c": (4, 5), "w": (4, 45), "n": (4, 8),
      "k": (2,)}, "min(n / (c + w), k / c) * 1e3", "images/s",
      {"n / (c + w) * 1e3": "Workers that compute need a core each.", "k / c * 1e3": "That is the limit of the "
       "cores. So few workers wait most of the time.", "n / c * 1e3": "They also wait for the disk."},
      "Workers help while they wait; once the cores are busy, more of them change nothing."),
    Q("later epochs", "15.6", "The 1.28 million images of ImageNet in a file of {G} GB; {M} GB of memory are free; "
      "the disk gives {d} GB/s, the CPU loads {c} images/s from memory, the GPUs train on {g}. What sets the pace "
      "of the second epoch?", {"G": (170, 340), "M": (200,), "d": (0.5, 2), "c": (3000, 16000), "g": (8000,)},
      "('disk', 'cpu', 'gpu').index(a15.imagenet_epoch(1281167, G, M, d, c, g)[2])", "",
      {"the disk": "The file fits into memory after the first epoch, or the disk is not the slowest here.",
       "the CPU": "It loads faster than another part.", "the GPUs": "They have to wait for a slower part: which?"},
      "After the first epoch a file that fits is read from memory; one that does not fit, from disk each time."),
)
SEVERAL_HOSTS = (
    Q("what leaves a host", "16.2", "A flat ring all-reduce of {S} MB over {m} hosts of {p} ranks, numbered host by "
      "host. How many MB leave each host?", {"S": (100, 480), "m": (2, 3), "p": (2, 4)},
      "bytes_sent('all_reduce', m * p, S)", "MB",
      {"p * bytes_sent('all_reduce', m * p, S)": "Only one rank of a host has its neighbor on another host.",
       "bytes_sent('all_reduce', m, S)": "That is the hierarchical one."},
      "2(N−1)/N · S with all N ranks: what one rank sends."),
    Q("what leaves by hosts", "16.2", "The same all-reduce of {S} MB on {m} hosts of {p} ranks, hierarchical. How "
      "many MB leave each host?", {"S": (100, 480), "m": (2, 3), "p": (4, 8)}, "bytes_sent('all_reduce', m, S)", "MB",
      {"answer / p": "That is one rank's part; each of the {p} ranks sends one.",
       "bytes_sent('all_reduce', m * p, S)": "That is the flat ring."},
      "An all-reduce among H hosts, 2(H−1)/H · S, however many ranks they have."),
    Q("numbered in turn", "16.9", "{p} ranks on each of {m} hosts are numbered in turn, host after host, so that "
      "every neighbor in the ring is on another host. How many MB leave a host in a flat ring all-reduce of {S} MB?",
      {"S": (100, 480), "m": (2,), "p": (2, 4)}, "p * bytes_sent('all_reduce', m * p, S)", "MB",
      {"bytes_sent('all_reduce', m * p, S)": "Now every hop crosses, so all ranks of a host send across.",
       "bytes_sent('all_reduce', m, S)": "That is the hierarchical one."},
      "All that its ranks send: the numbering alone makes it {p} times as much."),
    Q("which GPU", "16.3", "Rank {r} runs under torchrun on nodes of {p} GPUs, numbered node by node. Which GPU of "
      "its node does it take?", {"r": (5, 11, 13), "p": (4, 8)}, "r % p", "(number)",
      {"r": "That is RANK, and there may be no such GPU on this node. LOCAL_RANK counts within the node.",
       "r // p": "That is its node."},
      "LOCAL_RANK; `cuda:RANK` works on the first node only."),
    Q("steps done twice", "16.5", "A job saves after every {k} steps and dies in step {s}, counted from 1. How many "
      "steps that were complete does it compute again?", {"k": (5, 50), "s": (139, 1009)}, "(s - 1) % k", "steps",
      {"k": "That is the most that can be lost, not what is lost here.", "s % k": "Step {s} itself was not complete.",
       "s": "It goes on after the last checkpoint."},
      "Half an interval in the mean."),
    Q("how often to save", "16.13", "{h} hosts, each fails once in {d} days; a save takes {s} minutes. How many "
      "minutes should lie between two saves, by Young's formula?", {"h": (16, 100, 400), "d": (100, 365),
      "s": (2, 4)}, "a16.checkpoint_plan(h, d, s, 10)[1]", "minutes",
      {"math.sqrt(2 * s * d * 24 * 60)": "The job fails when any of its hosts does: {h} times as often.",
       "a16.checkpoint_plan(h, d, s, 10)[0]": "That is the time between failures."},
      "The root of 2 · time to save · time between failures of the job."),
    Q("more hosts, more saves", "16.13", "A job goes to {f} times as many hosts of the same kind. By which factor "
      "does the best interval between saves shrink?", {"f": (4, 16, 100)},
      "a16.checkpoint_plan(10, 100, 2, 10)[1] / a16.checkpoint_plan(10 * f, 100, 2, 10)[1]", "times",
      {"f": "It goes with the root of the time between failures.", "1": "More hosts fail more often."},
      "The root of {f}."),
    Q("fewer hosts, same batch", "16.5", "A job with micro-batches of {b} and {a} of them a step runs on {n} ranks. "
      "It starts again on {m}. How many micro-batches a step keep the batch as it was?", {"b": (2, 4), "a": (4, 8),
      "n": (16,), "m": (8, 4)}, "a * n / m", "micro-batches",
      {"a": "Then the batch, and what the learning rate was tuned for, shrinks with the ranks.",
       "a * m / n": "Fewer ranks have to do more each."},
      "Batch = samples · micro-batches · ranks: elastic training changes one factor, you change another."),
    Q("network: the cause", "16.8", '"{network.CASES[p].complaint}" What the two hosts say: '
      "`{chr(10).join(network.CASES[p].recorded)}` What is the cause?", {"p": (0, 1, 2, 3, 4, 5, 6, 7)}, "0", "",
      "{network.CASES[q].cause: 'That would be: ' + network.CAUSES[network.CASES[q].cause].sentence for q in (p, "
      "(p + 2) % 8, (p + 3) % 8, (p + 5) % 8)}",
      "Because {network.CASES[p].why} Remember: {network.CASES[p].rule}"),
    Q("seldom synchronized", "16.11", "Two hosts train for {H} steps on their own and then average {S} GB of "
      "weights by a ring between them, instead of reducing gradients of the same size in each step. How many GB "
      "does a host send for each step, in the mean?", {"S": (2, 14), "H": (20, 50)},
      "bytes_sent('all_reduce', 2, S) / H", "GB",
      {"bytes_sent('all_reduce', 2, S)": "That is what one exchange sends; there is one for {H} steps.",
       "S / H / 2": "With two hosts an all-reduce sends S: half in each round."},
      "An H-th: this is why local SGD and DiLoCo bear slow links, if the drift between exchanges is borne."),
)
SERVING = (
    Q("one reader", "17.1", "{m} in bf16 on an {GPUS[g].name} ({GPUS[g].memory_bandwidth / 1e12} TB/s). How many "
      "tokens a second does one reader get at most, the cache left out?", {"m": ("Llama 3 8B",),
      "g": ("a100", "h100", "h200")}, "GPUS[g].memory_bandwidth / (2 * PUBLISHED[m].parameter_count)",
      "tokens a second",
      {"GPUS[g].flops['bf16'] / (2 * PUBLISHED[m].parameter_count)": "FLOP/s allow that much, but each step has to "
       "read all weights.", "2 * answer": "A weight has two bytes."},
      "Bytes a second over bytes of weights: decode waits for memory, so a batch is nearly free."),
    Q("cache of a token", "17.2", "How many kB does {m} ({PUBLISHED[m].layers} layers, {PUBLISHED[m].kv_heads} "
      "key-value heads of {PUBLISHED[m].hidden // PUBLISHED[m].heads} numbers, 2 bytes) keep in the cache for a "
      "token?", {"m": ("Llama 3 8B", "Llama 3 70B", "Llama 3 405B")}, "serving.cache_bytes(PUBLISHED[m]) / 1e3", "kB",
      {"answer / 2": "Keys and values are both kept.",
       "answer * PUBLISHED[m].queries_per_key": "With grouped queries only the key-value heads are kept.",
       "serving.cache_bytes(PUBLISHED[m]) / 1e3 / PUBLISHED[m].layers": "Each layer has its own."},
      "2 · layers · key-value heads · width of a head · bytes."),
    Q("sequences that fit", "17.2", "A model has {w} GB of weights and {c} kB of cache a token, on {n} GPUs of 80 "
      "GB with 8 key-value heads (tensor parallel). How many sequences of {T} tokens fit?", {"w": (16, 140),
      "c": (131.072, 327.68), "n": (4, 8), "T": (8192, 32768)},
      "a17.cache_plan(1, 8, c * 1e3 / 32, 2, w, n, 80, T)[2]", "sequences",
      {"answer // n": "GPUs share the heads of the cache as they share the weights.",
       "int(80 * n * 1e9 // (c * 1e3 * T))": "The weights take their part first."},
      "(Memory − weights / t) over the cache of a sequence / t: more GPUs, more readers.", tolerance=0.005),
    Q("latency of small messages", "17.3", "One reader's token takes {w} ms on one GPU. With tensor parallelism "
      "over 8, each of {L} layers has two all-reduces of {u} µs. How many times as fast is it?", {"w": (40, 42),
      "L": (80,), "u": (7, 34)}, "w / (w / 8 + 2 * L * u / 1e3)", "times",
      {"8": "The messages cost their latency, and no faster memory shortens them.",
       "w / (w / 8 + L * u / 1e3)": "One all-reduce after attention and one after the MLP."},
      "The more GPUs, the more of the time is latency: hence one-shot all-reduces."),
    Q("one shot", "17.3", "How many times as many bytes as in a ring does a rank of {n} send in a one-shot "
      "all-reduce, where each sends its whole tensor to all others?", {"n": (4, 8, 16)},
      "(n - 1) / bytes_sent('all_reduce', n, 1)", "times",
      {"n - 1": "The ring does not send S but 2(N−1)/N · S.", "n": "Not to itself, and the ring sends nearly 2 S."},
      "N/2: for small messages, where one round in place of 2(N−1) counts more than bytes."),
    Q("blocks", "17.5", "Blocks hold {b} tokens. Two requests of {n} tokens begin with the same {s} tokens. How "
      "many blocks do both take together, with a prefix cache?", {"b": (16,), "n": (100, 200), "s": (50, 90)},
      "2 * math.ceil(n / b) - s // b", "blocks",
      {"2 * math.ceil(n / b)": "Full blocks of the common beginning are shared.",
       "2 * math.ceil(n / b) - math.ceil(s / b)": "The block in which they part is not full of common tokens, so it "
       "is not shared.", "math.ceil((2 * n - s) / b)": "Each request ends with a block of its own."},
      "Only full blocks of a common prefix are shared."),
    Q("speculation", "17.10", "A small model drafts {g} tokens, and each is accepted with probability {a}. How many "
      "tokens does a step of the large model give in the mean?", {"g": (3, 5, 7), "a": (0.6, 0.8)},
      "sum(a**i for i in range(g + 1))", "tokens",
      {"g * a": "After the first refusal all later drafts are lost; and one token comes from the large model itself.",
       "sum(a**i for i in range(1, g + 1))": "The step itself always gives one token.",
       "g + 1": "So it is if all are accepted."},
      "1 + α + … + α^γ: long drafts pay only where nearly all are accepted."),
)
SILENT_FAULTS = (
    Q("copies of a piece", "19.2", "{n} ranks are replicas of {t} tensor-parallel ranks each, numbered replica by "
      "replica. On how many ranks, rank 0 included, must the piece of a matrix be the same as on rank 0?",
      {"n": (8, 16), "t": (2, 4)}, "sum(a19.draw_weights({'w': (9,)}, {'w'}, 0, r // t, r % t)['w'].equal("
      "a19.draw_weights({'w': (9,)}, {'w'}, 0, 0, 0)['w']) for r in range(n))", "ranks",
      {"n": "That holds for what each rank has whole. Then all would train the same piece.",
       "1": "Rank 0 of each other replica holds the same piece.", "t": "Within a replica all pieces must differ."},
      "N/t: the seed of a piece depends on the place among the tensor-parallel ranks, and on nothing else."),
    Q("mean of the ranks' means", "19.3", "Rank 0 has {a} tokens that count, rank 1 has {b}. Each divides the sum of "
      "its losses by its own tokens, and DDP averages gradients. How many times as much as a token of rank 1 does one "
      "of rank 0 count?", {"a": (32, 64), "b": (128, 256)}, "b / a", "times",
      {"a / b": "Fewer tokens share the same weight.", "1": "So it is if both divide by the tokens of all ranks."},
      "Each rank counts as much as the other, so its tokens share one half."),
    Q("divisor under DDP", "19.3", "Of {n} ranks one has {a} tokens that count, each of the others {b}. By which "
      "number does every rank divide the sum of its losses, so that all tokens count alike under DDP?", {"n": (4, 8),
      "a": (40, 80), "b": (120, 200)}, "(a + (n - 1) * b) / n", "tokens",
      {"n * answer": "DDP divides by the number of ranks, too.", "a": "Each rank its own: that is a mean of means.",
       "b": "Each rank its own: that is a mean of means."},
      "The tokens of all ranks over the number of ranks, because DDP's mean divides by that number."),
    Q("a loss that is level", "19.4", "A job was resumed, and its loss is level. {('The norm of the weights stands "
      "still, that of the gradient grows from step to step', 'The norm of the weights stands still, that of the "
      "gradient is as before', 'The norm of the weights changes, and is another on each rank')[k]}. The cause?",
      {"k": (0, 1, 2)}, "k", "",
      {"the optimizer holds other tensors than the model": "Then its `zero_grad` does not reach the model, whose "
       "gradients add up, and no weight moves.", "the learning rate is 0": "Then no weight moves, but gradients are "
       "still cleared.", "gradients are not averaged": "Then weights move, on each rank by its own gradients."},
      "|w| tells whether weights move, |g| whether gradients are cleared, ranks whether they share them."),
    Q("one slow GPU of many", "19.6", "Of {n} GPUs one is slow, so that a step takes {s} s and {d} s more. As if how "
      "many GPUs were switched off?", {"n": (384, 1024), "s": (40, 105), "d": (6, 10)}, "n * (1 - s / (s + d))", "GPUs",
      {"1": "All the others wait for it in every step.", "n * d / s": "That is by how much a step takes longer."},
      "The rate falls by d / (s + d), on all GPUs."),
    Q("where the slow host is", "19.6", "One of {h} hosts is slow, {k} are spare. {k} are left out at each restart, "
      "until the rate is right; then their group is halved. How many restarts are needed at most?", {"h": (48, 64),
      "k": (3, 8)}, "math.ceil(h / k) + math.ceil(math.log2(k))", "restarts",
      {"math.ceil(h / k)": "That finds the group.", "math.ceil(math.log2(h))": "Half the job must be spare."},
      "h/k groups, then log₂ k halvings. A measurement of each host before the start needs none."),
)

QUESTIONS = {
    "Hangs": HANGS, "Data loading": DATA_LOADING, "Several hosts": SEVERAL_HOSTS, "Serving": SERVING,
    "Silent faults": SILENT_FAULTS,
}
