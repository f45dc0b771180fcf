"""Questions about dividing a model, a sequence and a cluster: lessons 09 to 12."""

from __future__ import annotations

from .question import Question as Q

__all__ = ["QUESTIONS"]

TENSOR_PARALLELISM = (
    Q("all-reduces of a layer", "09.6", "How many all-reduces of activations do {L} transformer layers need with "
      "tensor parallelism, in forward and backward, without sequence parallelism?", {"L": (32, 48, 80)}, "4 * L",
      "all-reduces",
      {"2 * L": "That is forward: one after attention, one after the MLP. Backward has as many.",
       "8 * L": "Column and row parallelism come in pairs: between the two matrices nothing is sent.",
       "L": "Attention and MLP each have one, in each direction."},
      "Two in forward and two in backward, all of them on the way of the next product: hard to hide."),
    Q("bytes of a layer", "09.6", "Tensor parallelism over {t} GPUs: a micro-batch of {b} × {s} tokens, width {h}, "
      "2 bytes. How many MB does a GPU send for one layer, forward and backward?", {"t": (2, 8), "b": (1, 4),
      "s": (4096,), "h": (4096, 8192)}, "a09.tp_traffic(b, s, h, t, 2, 900, 'GB/s', 2, 400)[0]", "MB",
      {"answer / 2": "That is forward alone.", "answer / 4": "That is one of the four all-reduces.",
       "4 * b * s * h * 2 / 1e6": "An all-reduce sends 2(t−1)/t of its tensor."},
      "Four all-reduces of the activations: it grows with the tokens, not with the parameters.", tolerance=0.01),
    Q("which link", "09.9", "A layer's tensor-parallel messages take {a} ms over NVLink, {x} GB/s with both "
      "directions added. How many ms do they take over a network of {g} Gb/s, bytes only?", {"a": (1, 2),
      "x": (900, 1800), "g": (200, 400)}, "a * a09.tp_traffic(1, 4096, 4096, 8, 2, g, 'Gb/s', 1, 400)[1] / "
      "a09.tp_traffic(1, 4096, 4096, 8, 2, x, 'GB/s', 2, 400)[1]", "ms",
      {"a * x / g": "NVLink is in bytes and counts both directions; the network is in bits, each way.",
       "a * x / g * 8": "Of NVLink one direction counts: half of what is printed.",
       "a * x / 2 / g": "Networks are given in bits: an eighth of it in bytes."},
      "(x / 2) / (g / 8): so tensor parallelism stays in the node."),
    Q("more tokens", "09.6", "The micro-batch of a GPU is doubled. What happens to the bytes that a rank sends in a "
      "step {how}?", {"how": ("for tensor parallelism", "for data parallelism")}, "(lambda a, b: int(b / a < "
      "1.5))(*(a12.traffic(32, 4096, 4096, 7e9, 4, 1, 8, batch, 1)[1 if 'tensor' in how else 3] for batch in (64, "
      "128)))", "",
      {"they double": "Data parallelism sends gradients once a step, whatever the number of tokens.",
       "they stay": "Tensor parallelism sends activations, and there are twice as many."},
      "Tensor parallelism sends activations, data parallelism gradients: longer batches hide only the latter."),
    Q("what stays whole", "09.8", "Tensor parallelism over {t} ranks without sequence parallelism: how many numbers "
      "a token does a GPT layer keep for backward on each rank, as a multiple of the width?", {"t": (2, 4, 8)},
      "tensor.held_by_formula('tensor parallel', PUBLISHED['GPT-3 175B'], t)", "times the width",
      {"16 / t": "Norms and the inputs of the layers before the cut are whole on each rank: 4 of the 16.",
       "16": "What lies between the two matrices of a pair is divided."},
      "4 + 12/t. Sequence parallelism divides the 4 too, for the same bytes: a gather and a scatter."),
    Q("few key-value heads", "09.12", "A model has {a} query heads and {k} key-value heads. How many key-value "
      "heads does each of {t} tensor ranks hold?", {"a": (32, 64), "k": (8, 4), "t": (4, 8, 16)}, "max(1, k // t)",
      "heads",
      {"k / t": "A head is not cut: with more ranks than heads, several ranks hold a copy.",
       "a // t": "Those are the query heads.", "k": "Ranks share them out as long as there are enough."},
      "K/t, at least one: beyond K ranks the heads are copied, and their gradients have to be added up."),
)
PIPELINES = (
    Q("bubble", "10.3", "GPipe with {p} stages and {m} micro-batches. Which share of all the time does a rank idle?",
      {"p": (4, 8), "m": (8, 16, 32)}, "a10.bubble('GPipe', p, m, 1, 1)[0]", "%",
      {"100 * (p - 1) / m": "That is idle time against time that is computed. Of all the time it is (p−1)/(m+p−1).",
       "100 / p": "The more micro-batches, the smaller the bubble.", "100 * (p - 1) / p":
       "So it is with one micro-batch."},
      "(p−1)/(m+p−1)."),
    Q("micro-batches that are enough", "10.3", "How many micro-batches do {p} stages need at least for a bubble of "
      "at most {x} % of all the time (1F1B)?", {"p": (4, 8, 16), "x": (10, 20)},
      "next(m for m in range(1, 10**4) if a10.bubble('1F1B', p, m, 1, 1)[0] <= x)", "micro-batches",
      {"100 * (p - 1) // x": "That is for (p−1)/m. The pipeline's own p−1 steps count in the time, too.",
       "p": "With as many micro-batches as stages nearly half of the time is bubble."},
      "m ≥ (p−1)(1−x)/x: some nine times the stages for 10 %.", tolerance=0.005),
    Q("what 1F1B changes", "10.4", "{p} stages, {m} micro-batches: GPipe is replaced by 1F1B. What changes?",
      {"p": (4, 8), "m": (16, 32)}, "(lambda g, f: 0 if g[0] == f[0] and f[1] < g[1] else 1)(a10.bubble('GPipe', p, "
      "m, 1, 1), a10.bubble('1F1B', p, m, 1, 1))", "",
      {"activations held, not the bubble": "Backward starts as soon as it can, so fewer micro-batches are in "
       "flight. The ends are as long as before.", "the bubble, not the activations": "Filling and draining take p−1 "
       "steps in both.", "both": "Filling and draining take p−1 steps in both.", "neither":
       "A rank of GPipe holds all m micro-batches at once."},
      "At most p micro-batches are in flight instead of m, at the same bubble."),
    Q("activations of 1F1B", "10.4", "{p} stages, {m} micro-batches, and the layers of a rank keep {g} GB of one "
      "micro-batch. How many GB does rank 0 hold at most with 1F1B?", {"p": (4, 8), "m": (16, 32), "g": (0.5, 2)},
      "a10.bubble('1F1B', p, m, 1, g)[1]", "GB",
      {"m * g": "That is GPipe, which holds all of them.", "g": "Rank 0 starts p micro-batches before the first one "
       "comes back.", "m * g / p": "It is p in flight, not m/p."},
      "p micro-batches, on the first rank; the last holds one."),
    Q("interleaving", "10.7", "{p} ranks with {v} stages each (interleaved 1F1B) and {m} micro-batches. Which share "
      "of all the time is bubble?", {"p": (4, 8), "v": (2, 4), "m": (8, 16)},
      "a10.bubble('interleaved', p, m, v, 1)[0]", "%",
      {"a10.bubble('1F1B', p, m, 1, 1)[0]": "That is one stage a rank. With v stages filling takes steps that are v "
       "times shorter.", "a10.bubble('1F1B', p, m, 1, 1)[0] / v": "Nearly: of all the time it is (p−1)/(v m + p−1)."},
      "(p−1)/(v m + p−1), for v times as many messages."),
    Q("zero-bubble", "10.7", "Forward, gradient of the input and gradient of the weights take 1 ms each. How many "
      "ms does each of {p} ranks idle in a step with ZB-H1?", {"p": (4, 8)},
      "schedules.simulate(schedules.zero_bubble_h1(p, 3 * p)).period - 9 * p", "ms",
      {"3 * (p - 1)": "That is 1F1B: forward and both parts of backward.", "0": "That is ZB-H2, for nearly twice "
       "the activations.", "2 * (p - 1)": "W is not left out of 1F1B's (p−1)(F + I + W) but subtracted."},
      "(p−1)(F + I − W): gradients of weights can wait, so they fill the gaps."),
    Q("slowest stage", "10.14", "Layers take {a}, 1, 1, 1, 1 and {b} ms. They are cut into {s} stages of neighbors "
      "as well as possible. How many ms does the slowest stage take?", {"a": (1, 2), "b": (2, 3), "s": (2, 3)},
      "(lambda c, sizes: max(sum(c[sum(sizes[:i]):sum(sizes[:i + 1])]) for i in range(s)))([a, 1, 1, 1, 1, b], "
      "a10.balance([a, 1, 1, 1, 1, b], s))", "ms",
      {"(a + b + 4) / s": "Layers are not cut, so stages are not always equal."},
      "The slowest stage sets the pace of all: embedding and head make the ends heavy."),
    Q("message of a pipeline", "10.10", "A pipeline passes micro-batches of {b} × {s} tokens, width {h}, 2 bytes. "
      "How many MB go over one cut between stages for a micro-batch, forward and backward together?", {"b": (1, 2),
      "s": (4096, 8192), "h": (4096, 8192)}, "1e3 * a12.traffic(32, h, s, 1e9, 1, 2, 1, b, b)[2]", "MB",
      {"b * s * h * 2 / 1e6": "The gradient comes back, as large as the activation.",
       "4 * b * s * h * 2 / 1e6": "An activation forward and its gradient back: two messages."},
      "An activation and its gradient, whatever the layers of a stage: the fewest of all cuts.", tolerance=0.01),
    Q("tensor or pipeline", "10.10", "Where do fewer bytes leave a GPU: {L} layers cut by tensor parallelism over "
      "{t} GPUs, or into {t} pipeline stages ({s} tokens, width 8192)?", {"L": (32, 80), "t": (4, 8), "s": (4096,)},
      "(lambda tensor, pipe: int(tensor < pipe))(a12.traffic(L, 8192, s, 1e9, t, 1, 1, 1, 1)[1], a12.traffic(L, "
      "8192, s, 1e9, 1, t, 1, 1, 1)[2])", "",
      {"pipeline": "Tensor parallelism sends four all-reduces in each layer.",
       "tensor parallelism": "A pipeline sends one activation and one gradient at a cut, for any number of layers."},
      "A pipeline, by far: it can cross nodes. Its price is the bubble."),
)
LONG_SEQUENCES = (
    Q("bytes of ring attention", "11.3", "Ring attention in forward over {n} ranks, {t} tokens on each, keys and "
      "values of width {w}, 2 bytes. How many MB does a rank send in one layer?", {"n": (4, 8), "t": (8192, 16384),
      "w": (1024, 4096)}, "context.ring_bytes(t, w, n)[0] / 1e6", "MB",
      {"answer / 2": "Keys and values both travel.", "n * 2 * t * w * 2 / 1e6": "The last hop would bring them "
       "home: N−1 hops are enough.", "context.ring_bytes(t, w, n)[1] / 1e6": "That is backward."},
      "(N−1) times its keys and values.", tolerance=0.01),
    Q("the busiest rank", "11.4", "A causal sequence of {T} tokens is cut into {n} runs, one a rank. How many times "
      "as many pairs as the mean does the last rank compute?", {"T": (65536,), "n": (4, 8, 16)},
      "context.pairs_per_rank(T, n, 'contiguous')[-1] * n / sum(context.pairs_per_rank(T, n, 'contiguous'))", "times",
      {"n": "The other ranks compute, too; the first one least.", "1": "A late token sees more than an early one."},
      "(2N−1)/N, nearly twice: all wait for it. With zig-zag every rank has the same."),
    Q("zig-zag", "11.4", "A sequence is cut into {2 * n} runs, numbered from 0, for {n} ranks in zig-zag order. "
      "Rank {r} holds run {r} and which other?", {"n": (4, 8), "r": (0, 1, 3)}, "int(a11.zigzag(2 * n, n)[r][1])",
      "(run)",
      {"r + n": "That pairs early runs with middle ones: later ranks still have more to do.",
       "r + 1": "Two neighbors are both early, or both late.", "2 * n - r": "Runs are numbered from 0."},
      "2N − 1 − r: an early run and a late one together have the same number of pairs on every rank."),
    Q("does the ring hide", "11.5", "A rank computes {f} TFLOP/s and sends {g} GB/s, bf16, {q} queries to a key, no "
      "mask. How many tokens must a rank hold so that ring attention hides its messages?", {"f": (400, 800),
      "g": (25, 450), "q": (4, 8)}, "context.overlap_tokens(f * 1e12, g * 1e9, q)", "tokens",
      {"q * answer": "With grouped queries less is sent for the same computing.",
       "2 * answer": "Half of the pairs is computed under a causal mask only."},
      "FLOP/s over bytes a second and queries a key: computing grows with the tokens' square, messages linearly."),
    Q("Ulysses or ring", "11.6", "{n} ranks with {t} tokens each; queries of width {w}, keys and values of width "
      "{k}. Which sends fewer bytes in forward?", {"n": (4, 16), "t": (4096,), "w": (4096, 8192), "k": (512, 4096)},
      "int(context.ring_bytes(t, k, n)[0] < context.ulysses_bytes(t, w, k, n)[0])", "",
      {"Ulysses": "It sends queries and outputs too, of width {w}: with few key-value heads and few ranks the ring "
       "sends less.", "ring attention": "The ring passes keys and values on N−1 times."},
      "Ulysses sends about 2 (w + k) numbers a token for any N, the ring 2 k (N−1)."),
)
EXPERTS = (
    Q("capacity", "11.9", "{t} tokens choose {k} of {e} experts each, capacity factor {c}. How many copies of "
      "tokens does an expert take at most?", {"t": (4096, 8192), "k": (2, 8), "e": (64, 256), "c": (1.25, 1.5)},
      "experts.capacity(t, e, k, c)", "copies",
      {"answer / k": "Each token makes {k} copies.", "experts.capacity(t, e, k, 1)": "That is without the factor."},
      "Factor · tokens · k / experts: what is above is dropped, and what is below is padding."),
    Q("dispatch", "11.7", "A rank has {t} tokens of {b} bytes; each goes to {k} experts, chosen evenly over {n} "
      "ranks. How many MB does it send to others in dispatch?", {"t": (4096,), "b": (7168, 8192), "k": (2, 8),
      "n": (8, 64)}, "experts.dispatch_bytes(t, k, b, n) / 1e6", "MB",
      {"answer / k": "A copy goes to each of the {k} experts.", "t * k * b / 1e6": "One copy in N stays."},
      "Tokens · k · bytes · (N−1)/N, by an all-to-all, and as much again to combine.", tolerance=0.01),
    Q("memory of experts", "11.7", "A mixture has {e} experts in a layer, of which a token uses {k}. How many times "
      "as many parameters do its MLPs have as one token uses?", {"e": (16, 64, 256), "k": (2, 8)},
      "(lambda c: c.expert_parameters / (c.active_mlps * c.mlp_weights))(TransformerConfig(experts=e, "
      "experts_per_token=min(k, e)))", "times",
      {"e": "A token goes through {k} of them.", "e / k / k": "You divided by {k} twice."},
      "E/k: memory and all-to-alls buy parameters that cost no FLOPs."),
)
LAYOUTS = (
    Q("micro-batches of a replica", "12.10", "A batch of {B} sequences on {g} GPUs, tensor {t} × pipeline {p}, "
      "micro-batches of one sequence. How many micro-batches go through each pipeline in a step?", {"B": (512, 1024),
      "g": (128, 256), "t": (8,), "p": (4, 8)}, "B / (g / (t * p))", "micro-batches",
      {"B / g": "Tensor and pipeline ranks work on the same sequences.", "B": "The replicas share the batch.",
       "B / p": "It is the data ranks that share the batch."},
      "Batch over replicas; with more GPUs and the same batch it falls, and the bubble grows."),
    Q("neighbor in a group", "12.1", "Ranks are numbered with tp = {t} fastest, then dp = {d}, then pp = {p}. Which "
      "is the next rank after rank {r} in its data-parallel group?", {"t": (2, 4), "d": (4,), "p": (2,), "r": (0, 1)},
      "next(group for group in a12.mesh_groups({'pp': p, 'dp': d, 'tp': t})['dp'] if r in group)[1]", "(number)",
      {"r + 1": "That is its tensor-parallel neighbor.", "r + t * d": "That is the same place of the next pipeline "
       "stage.", "r + d": "Between data ranks lie the {t} tensor ranks."},
      "r + tp: what varies fastest are neighbors, and should be what talks most."),
    Q("states under three dimensions", "12.16", "{P} billion parameters, mixed precision, Adam: tensor {t} × "
      "pipeline {p}, ZeRO-1 over {d} data ranks. How many GB of model states does a GPU hold?", {"P": (70, 175),
      "t": (8,), "p": (4, 8), "d": (8, 16)}, "model_states(P * 1e9 / (t * p), stage=1, ranks=d).total / 1e9", "GB",
      {"16 * P / (t * p * d)": "ZeRO-1 divides the optimizer's 12 bytes only.",
       "16 * P / (t * p)": "The optimizer's states are divided among the data ranks.",
       "model_states(P * 1e9, stage=1, ranks=t * p * d).total / 1e9": "They divide the parameters themselves."},
      "(4 + 12/d) bytes for each of its Ψ/(t p) parameters."),
    Q("who sends most", "12.2", "{L} layers of width {h}, {P} billion parameters, sequences of 4096, tp {t} × pp "
      "{p} × dp 8, a batch of {B}, micro-batches of one. For which dimension does a GPU send most?", {"L": (80,),
      "h": (8192,), "P": (70,), "t": (1, 8), "p": (1, 4), "B": (16, 1024)}, "(lambda sent: "
      "sent.index(max(sent)))(list(a12.traffic(L, h, 4096, P * 1e9, t, p, 8, B, 1)[1:]))", "",
      {"tensor": "It sends four all-reduces a layer and micro-batch, if there are tensor ranks at all.",
       "pipeline": "It sends one activation and one gradient for each micro-batch.",
       "data": "It sends all gradients of the rank, but once a step only."},
      "Compare tokens · layers (tensor), tokens (pipeline) and parameters (data)."),
    Q("order of ranks", "12.2", "In a step a rank sends {a} GB for tensor, {b} GB for pipeline and {c} GB for data "
      "parallelism to its next rank, 4 × 4 × 4 ranks on nodes of 8 GPUs. Which dimension should be outermost, "
      "furthest apart?", {"a": (40, 5), "b": (1, 30), "c": (8,)}, "('tp', 'pp', 'dp').index(a12.node_order({'tp': "
      "4, 'pp': 4, 'dp': 4}, {'tp': a, 'pp': b, 'dp': c}, 8)[0])", "",
      {"tensor": "It would send its {a} GB between nodes.", "pipeline": "It would send its {b} GB between nodes.",
       "data": "It would send its {c} GB between nodes."},
      "What sends least goes furthest: here it sends {min(a, b, c)} GB."),
    Q("norm with copies", "12.5", "Two tensor ranks hold parts of the weights' gradients with norms {a} and {b}, "
      "and both have the same gradient of a norm layer, of norm {c}. What is the norm of the whole model's "
      "gradients?", {"a": (3, 4), "b": (4, 6), "c": (12, 5)}, "math.sqrt(a**2 + b**2 + c**2)", "(norm)",
      {"math.sqrt(a**2 + b**2 + 2 * c**2)": "A sum over all ranks counts the copied gradient twice.",
       "a + b + c": "Add squares, then take the root."},
      "Count what is copied once: divide its square by the number of copies before the sum."),
    Q("why not", "12.8", "Llama 3 70B (64 heads, 8 key-value heads, 80 layers) on {(64, 128, 128)[k]} GPUs with "
      "(tensor, pipeline, data) = {((8, 4, 4), (16, 2, 4), (8, 2, 8))[k]}, micro-batches of one sequence, a batch "
      "of {(64, 64, 60)[k]}. What speaks against it?", {"k": (0, 1, 2)}, "('gpus', 'heads', "
      "'batch').index(*a12.why_not(PUBLISHED['Llama 3 70B'], planner.cluster('DGX H100', (64, 128, 128)[k]), "
      "planner.Layout(*((8, 4, 4), (16, 2, 4), (8, 2, 8))[k]), (64, 64, 60)[k]))", "",
      {"the number of GPUs": "Multiply the degrees: they make as many as there are.",
       "the key-value heads": "Here the tensor ranks divide them.", "the batch": "Here the data ranks divide it."},
      "Multiply the degrees, divide heads, layers and batch: checks that come before any estimate of time."),
)

QUESTIONS = {
    "Tensor parallelism": TENSOR_PARALLELISM, "Pipelines": PIPELINES, "Long sequences": LONG_SEQUENCES,
    "Experts": EXPERTS, "Layouts": LAYOUTS,
}
