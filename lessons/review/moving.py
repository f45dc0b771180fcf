"""Questions about ranks, collectives, links and NCCL: lessons 00 to 03."""

from __future__ import annotations

from .question import Question as Q

__all__ = ["QUESTIONS"]

RANKS = (
    Q("a list in the notebook", "00.3", "A list in the notebook has {k} entries. `launch` runs a function on {n} "
      "ranks that appends one entry to it. How many entries has it in the notebook afterwards?", {"k": (2, 3, 5),
      "n": (4, 6)}, "k", "entries",
      {"k + n": "Ranks are processes: each has appended to a copy of its own.", "k + 1":
       "Not even one: the list was copied to the ranks, and no copy comes back."},
      "A rank is a process with its own memory; only what the function returns comes back."),
    Q("ranks on few cores", "00.4", "{n} ranks that only compute run on {c} CPU cores, one thread each. How many "
      "times as fast as one rank are they together, at best?", {"n": (8, 12, 16), "c": (2, 3)}, "min(n, c)", "times",
      {"n": "Ranks share the cores: where there are more ranks than cores, they take turns.",
       "n / c": "This is how many ranks share a core."},
      "Computing needs a core for each rank: two cores compute twice as fast as one, whatever the program does."),
    Q("sum of the ranks", "00.5", "Each of {n} ranks holds its rank number plus one, and all call `all_reduce`. "
      "What does rank {r} hold?", {"n": (4, 6, 8), "r": (1, 2)}, "n * (n + 1) / 2", "(sum)",
      {"r + 1": "The result is written into the tensor of every rank, not of rank 0 only.",
       "(n + 1) / 2": "The default operation is the sum; a mean has to be asked for.",
       "n * (n - 1) / 2": "You added the rank numbers; each rank holds one more."},
      "All-reduce leaves the sum of all tensors on every rank."),
    Q("who waits", "00.6", "Of {n} ranks, {who} the all-reduce; the rest return. How many ranks wait?",
      {"n": (4, 8, 16), "who": ("only rank 0 calls", "all but the last rank call")}, "1 if 'only' in who else n - 1",
      "ranks",
      {"n": "A rank that has returned does not wait, and never notices anything.",
       "n - 1 if 'only' in who else 1": "Those who wait are the ranks that made the call."},
      "Whoever calls a collective waits until all ranks of its group have called it."),
)
COLLECTIVES = (
    Q("which collective", "02.2", "Which collective moves what is needed, and no more? {('Every rank has a gradient "
      "of the whole model and needs the sum of all.', 'Every rank has a gradient of the whole model and needs its "
      "own part of the sum.', 'Every rank has its own part of the weights and needs all parts.', 'Rank 0 has the "
      "weights, and all ranks shall begin with them.', 'Every rank has tokens for experts on each of the other "
      "ranks.')[k]}", {"k": (0, 1, 2, 3, 4)}, "k", "",
      {"all_reduce": "This gives every rank the whole sum: more than is needed, or nothing is to be added at all.",
       "reduce_scatter": "This adds, and leaves each rank one part of the sum.",
       "all_gather": "This joins the parts of all ranks on every rank. It adds nothing.",
       "broadcast": "This copies the tensor of one rank to all others.", "all_to_all":
       "This gives each rank another piece of what every rank has. It adds nothing."},
      "Ask three things: what a rank holds before, what it needs afterwards, and whether something is added."),
    Q("ring all-reduce, bytes", "02.3", "A ring all-reduce of {S} MB on {n} ranks: how many MB does each rank send?",
      {"S": (120, 400, 1000), "n": (4, 8, 16)}, "bytes_sent('all_reduce', n, S)", "MB",
      {"S * (n - 1) / n": "This is the reduce-scatter alone. The all-gather sends as much again.",
       "S": "A rank sends 2(N−1) pieces of S/N: nearly twice S.", "2 * (n - 1) * S": "Each of the 2(N−1) messages "
       "is a piece of S/N, not the whole tensor.", "2 * (n - 1) / n * S / n": "You divided by N twice: it sends "
       "2(N−1) pieces of S/N.", "2 * S": "This is the limit for very many ranks."},
      "2(N−1)/N · S: a reduce-scatter and an all-gather of (N−1)/N · S each."),
    Q("more ranks, same gradient", "02.3", "The gradient stays {S} GB while the ranks grow from {n} to {m}. What "
      "happens to the bytes that each rank sends in a ring all-reduce?", {"S": (2, 14), "n": (8, 16),
      "m": (256, 1024)}, "0 if bytes_sent('all_reduce', m, S) < 1.2 * bytes_sent('all_reduce', n, S) else 1", "",
      {"they hardly change": "2(N−1)/N lies between 1 and 2 for any N.",
       "they grow in proportion to the ranks": "So it is if all goes through one root. In a ring 2(N−1) pieces of "
       "S/N are sent: N cancels out.", "they fall, because each piece is smaller": "There are as many more pieces."},
      "At most 2 S for any N. What grows with N is the number of steps, and with it the latency."),
    Q("all through rank 0", "02.3", "Rank 0 receives the gradients of all {n} ranks, {S} GB each, adds them, and "
      "sends the sum to each of the others. How many GB does it send?", {"S": (2, 14), "n": (4, 8, 16)},
      "all_reduce_bytes('root', n, S)", "GB",
      {"bytes_sent('all_reduce', n, S)": "This is the ring's figure, where all ranks share the work.",
       "n * S": "It does not send to itself.", "2 * (n - 1) * S": "It receives as much, the other way."},
      "(N−1) S through the link of one rank, which is why nobody does it."),
    Q("all-gather of shards", "02.3", "{n} ranks hold a shard of {s} MB each. How many MB does a rank receive in an "
      "all-gather?", {"n": (4, 8, 16), "s": (25, 100)}, "bytes_sent('all_gather', n, n * s)", "MB",
      {"n * s": "Its own shard is there already.", "s": "It needs the shards of all the others.",
       "2 * (n - 1) * s": "Factor 2 belongs to all-reduce, which gathers after it has reduced.",
       "s * (n - 1) / n": "(N−1)/N goes with the whole tensor; you took it of one shard."},
      "(N−1) shards, which is (N−1)/N of the whole tensor."),
    Q("twice what is needed", "02.3", "Each of {n} ranks needs only its own part of a summed gradient of {S} GB. "
      "How many times as many bytes as a reduce-scatter does an all-reduce send?", {"n": (4, 8, 64), "S": (2, 14)},
      "bytes_sent('all_reduce', n, S) / bytes_sent('reduce_scatter', n, S)", "times",
      {"n": "Both send pieces of S/N; the all-reduce sends twice as many.", "1": "An all-reduce is a "
       "reduce-scatter and then an all-gather."},
      "Twice. The all-gather is the half that ZeRO puts off until the parameters are needed."),
    Q("steps of the ring", "02.4", "How many messages does each of {n} ranks send, one after the other, in a ring "
      "all-reduce?", {"n": (4, 8, 16, 32)}, "all_reduce_steps('ring', n)", "messages",
      {"n - 1": "After N−1 steps each rank has one complete piece. The pieces still have to go round.",
       "n": "A piece needs N−1 hops to pass all others, and it goes round twice.", "2 * n":
       "The last hop of a round would bring a piece to where it is known already."},
      "2(N−1): N−1 steps that add, and N−1 that copy."),
    Q("milliseconds of an all-reduce", "02.5", "{P} billion gradients of 2 bytes on {n} ranks, links of {G} Gb/s "
      "each way. How many ms does a ring all-reduce take at least?", {"P": (1, 7, 13), "n": (8, 64), "G": (100, 400)},
      "a02.gradient_all_reduce_seconds(P * 1e9, 2, n, G) * 1e3", "ms",
      {"answer / 8": "Links are given in bits: {G} Gb/s are {G / 8} GB/s.", "answer / 2":
       "That is half of it: one round, or one byte for each gradient.", "2 * answer": "Gradients have 2 bytes here."},
      "2(N−1)/N · 2 Ψ bytes, over the bytes a second of one direction.", tolerance=0.01),
    Q("bus bandwidth", "02.5", "An all-reduce of {S} GB on {n} GPUs takes {t} ms. What is its bus bandwidth?",
      {"S": (1, 2), "n": (4, 8), "t": (8, 12.5)}, "a02.bandwidths('all_reduce', n, S * 1e9, t / 1e3)[1]", "GB/s",
      {"a02.bandwidths('all_reduce', n, S * 1e9, t / 1e3)[0]": "This is the algorithm bandwidth S/t, which falls "
       "with more ranks although no link is slower.", "answer / 2": "(N−1)/N is for an all-gather."},
      "S/t · 2(N−1)/N: what each link carries, to be compared with the data sheet.", tolerance=0.01),
    Q("many small all-reduces", "02.5", "{k} tensors of {s} kB are reduced by a ring of {n} ranks, one by one, at "
      "10 µs a step and 100 GB/s. How many times as long does it take as flattened into one?", {"k": (10, 100),
      "s": (8, 64), "n": (4, 8)}, "k * all_reduce_seconds('ring', s * 1e3, flat_cluster(n, 1e-5, 1e-11)) / "
      "all_reduce_seconds('ring', k * s * 1e3, flat_cluster(n, 1e-5, 1e-11))", "times",
      {"1": "The bytes are the same, but each call pays 2(N−1) latencies."},
      "Up to {k} times: small messages cost their latency, hence buckets.", tolerance=0.1),
    Q("a ring of sends", "02.6", "On a ring of 4 ranks each sends a large tensor to the right by calls that wait "
      "for the receiver: {how}. What happens?",
      {"how": ("all send, then receive from the left", "even ranks send first", "all start both, then wait")},
      "int('then receive' not in how)", "",
      {"they wait for each other": "Somebody receives while its neighbor sends, so every message gets through.",
       "it works": "Every rank waits until its neighbor receives, and none gets that far."},
      "A circle in which all send first never moves. Break it by parity, or start both before you wait."),
)
LINKS = (
    Q("both directions", "01.1", "A data sheet says {x} GB/s of NVLink for a GPU. How many ms do {S} GB take from "
      "this GPU to another at least?", {"x": (600, 900, 1800), "S": (9, 18)},
      "a02.all_gather_seconds(S * 1e9, 2, x) * 1e3", "ms",
      {"S / x * 1e3": "Data sheets of NVLink add both directions; a message goes one way.",
       "S * 8 / x * 1e3": "NVLink is given in bytes; networks are given in bits."},
      "Half of the printed figure is what one direction carries.", tolerance=0.01),
    Q("ridge", "01.7", "A data sheet prints {p} TFLOP/s for bf16 with sparsity, and {b} TB/s of memory. How many "
      "FLOP a byte must a dense product have so that memory no longer limits it?", {"p": (624, 1979, 4500),
      "b": (2, 3.35, 8)}, "a01.roofline_point(p, True, b * 1e3, 1, 1, 1)[0]", "FLOP a byte",
      {"2 * answer": "The printed figure counts products with zeros, which are skipped. Dense, it is half."},
      "Dense FLOP/s over bytes a second: the ridge of the roofline."),
    Q("intensity of a thin product", "01.7", "{b} rows times a weight of {k} × {k}, all in bf16. How many FLOP a "
      "byte is that?", {"b": (8, 16, 64), "k": (8192, 16384)}, "a01.roofline_point(989, False, 3350, b, k, k)[1]",
      "FLOP a byte",
      {"2 * b": "Each weight has two bytes: 2 · {b} FLOP for 2 bytes.", "k / 3": "That is a square product. Here "
       "the weight is read for {b} rows only."},
      "Nearly as many as rows: a weight of 2 bytes is read once and used in {b} multiply-adds."),
    Q("bound by what", "01.7", "An H100 multiplies {b} rows by a weight of 8192 × 8192 in bf16. What limits it?",
      {"b": (2, 32, 2048, 8192)}, "int(a01.roofline_point(989, False, 3350, b, 8192, 8192)[1] > "
      "a01.roofline_point(989, False, 3350, 1, 1, 1)[0])", "",
      {"memory": "With {b} rows each weight is used often enough: above the ridge of 295 FLOP a byte.",
       "arithmetic": "With {b} rows a weight that was read is used too few times: below the ridge of 295."},
      "Compare the FLOP a byte, {a01.roofline_point(989, False, 3350, b, 8192, 8192)[1]}, with the ridge of 295."),
    Q("where latency is half", "01.3", "A link takes {LINKS[k].latency * 1e6} µs for a message of no length and "
      "carries {LINKS[k].bandwidth / 1e9} GB/s. At which size do latency and bytes cost the same?",
      {"k": ("nvlink4", "pcie4", "pcie5", "ib_ndr")}, "LINKS[k].latency * LINKS[k].bandwidth / 1e3", "kB",
      {"answer / 8": "The bandwidth is in bytes already."},
      "S = α · bandwidth. Smaller messages pay mostly latency, so joining them is nearly free."),
    Q("slowest link", "01.5", "A path has three links, of {a}, {b} and {c} GB/s. How many GB/s does a long message "
      "get?", {"a": (450, 300), "b": (63, 31.5), "c": (50, 25)}, "a01.widest_path([('gpu', 'switch', a), ('switch', "
      "'card', b), ('card', 'net', c)], 'gpu', 'net')[0]", "GB/s",
      {"1 / (1 / a + 1 / b + 1 / c)": "The links of a path work at the same time, on different parts of the message.",
       "(a + b + c) / 3": "Nothing passes a link faster than it carries."},
      "The slowest link decides, so find it before you buy a faster one."),
    Q("gradients between nodes", "01.8", "Gradients of {P} billion parameters, 2 bytes each, are reduced by a ring "
      "over {m} nodes of 8 GPUs. A node has {p} ports of {g} Gb/s. How many ms at least?", {"P": (1, 7), "m": (2, 4),
      "p": (2, 8), "g": (200, 400)}, "a01.gradient_seconds(P * 1e9, m, 8, 900, p, g)[1] * 1e3", "ms",
      {"a01.gradient_seconds(P * 1e9, m, 8, 900, p, g)[0] * 1e3": "That is the time inside one node. This ring "
       "passes the ports, its slowest links.",
       "2 * (m - 1) / m * 2 * P / (p * g / 8) * 1e3": "N in 2(N−1)/N counts ranks, not nodes."},
      "2(N−1)/N · 2 Ψ over what all ports of a node carry together.", tolerance=0.01),
)
NCCL = (
    Q("steps of a tree", "03.2", "A tree all-reduce of {n} ranks: how many messages one after the other?",
      {"n": (8, 16, 64, 512)}, "all_reduce_steps('tree', n)", "messages",
      {"math.log2(n)": "The sum has to come down again.", "2 * (n - 1)": "That is the ring.",
       "n - 1": "Subtrees are added at the same time: it is the depth that counts."},
      "2 · log₂ N: up to the root, and down."),
    Q("ring or tree", "03.3", "An all-reduce of {s} MB on {n} ranks, 10 µs a message, links of 400 Gb/s. Which is "
      "faster?", {"s": (0.01, 0.1, 100, 1000), "n": (8, 64)},
      "('ring', 'tree').index(a03.pick_algorithm(s * 1e6, n, 10, 400)[0])", "",
      {"a ring": "At this size latency decides, and a ring has 2(N−1) of them.", "a tree":
       "At this size bytes decide, and a tree sends the whole tensor at each level."},
      "A ring sends the fewest bytes, a tree takes fewer steps: small tensors and many ranks want the tree."),
    Q("steps on two levels", "03.4", "A hierarchical all-reduce (rings in the node, between nodes, and in the node "
      "again) on {m} nodes of {p} GPUs: how many steps?", {"m": (4, 16, 32), "p": (4, 8)},
      "all_reduce_steps('hierarchical', TwoLevelCluster(m, p, (1e-6, 1e-11), (1e-5, 1e-10)))", "steps",
      {"2 * (m * p - 1)": "That is one flat ring through all ranks.",
       "(p - 1) + 2 * (m - 1)": "The node is needed twice: a reduce-scatter before, an all-gather after."},
      "2(p−1) in the node and 2(N−1) between the nodes, in place of 2(Np−1)."),
    Q("one card for the node", "03.11", "All {p} GPUs of a node share one network card, instead of one each. By "
      "which factor does the part between {m} nodes of a hierarchical all-reduce take longer (bytes only)?",
      {"p": (4, 8), "m": (2, 16)}, "all_reduce_seconds('hierarchical', 1e9, TwoLevelCluster(m, p, (0, 0), (0, "
      "1e-10), sharing=p)) / all_reduce_seconds('hierarchical', 1e9, TwoLevelCluster(m, p, (0, 0), (0, 1e-10)))",
      "times",
      {"1": "All GPUs of a node send their piece across at once, through this one card.",
       "m": "Each node has a card of its own; the GPUs of a node share it."},
      "Each of {p} GPUs sends 1/{p} of the tensor across, all of them at the same time."),
    Q("when the switch adds", "03.5", "{n} GPUs reduce {S} GB, and the switch adds (SHARP, NVLS). How many GB does "
      "each GPU send at least?", {"n": (8, 16, 64), "S": (2, 6)}, "all_reduce_bytes('in_network', n, S)", "GB",
      {"bytes_sent('all_reduce', n, S)": "That is the ring, where the GPUs add and pass on.",
       "S / n": "Each GPU contributes a whole tensor.", "2 * S": "Up and down are different directions of the link."},
      "S: it goes up once, and the sum comes down once. That is nearly half of what a ring sends."),
    Q("protocol by size", "03.6", "8 A100 with NVLink reduce {s} MB. Which protocol does NCCL's tuner take?",
      {"s": (0.01, 0.5, 8, 16, 256, 1024)},
      "('LL', 'LL128', 'Simple').index(tuner.choose(s * 1e6, tuner.MACHINES['8 x A100'])[1])", "",
      {"LL": "LL gives half of the bandwidth away for flags beside the data: for small messages only.",
       "LL128": "LL128 keeps most of the bandwidth at a low latency: here from 4 to 32 MiB.",
       "Simple": "Simple has the full bandwidth and the slowest synchronization: for large messages only."},
      "The shortest modelled time wins: LL below 4 MiB, LL128 below 32 MiB, Simple above."),
    Q("algorithm on H200", "03.6", "8 H200 with NVSwitch reduce {s} MB. Which algorithm does NCCL's tuner take?",
      {"s": (0.05, 0.5, 16, 1024)}, "('ring', 'nvls').index(tuner.choose(s * 1e6, tuner.MACHINES['8 x H200'])[0])",
      "",
      {"ring": "At this size bytes decide, and where the switch adds (NVLS) a GPU sends about half as many.",
       "NVLS": "NVLS has a latency of 25 µs in the tuner's table: a small message is through the ring by then."},
      "NVLS from 2 MiB on, and below it a ring with LL (modelled)."),
)

QUESTIONS = {
    "Ranks": RANKS, "Collectives": COLLECTIVES, "Links": LINKS, "NCCL": NCCL,
}
