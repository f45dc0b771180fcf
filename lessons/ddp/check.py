"""The exercises on data parallelism: what each rank must find, and the usual mistakes with their hints.

Models are in float64, so that ranks can be compared with one process to 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from course_utils import record
from course_utils.check import COMMON_HINTS, Case, close, exercise, show, whole_numbers
from course_utils.check.training import average, gradients_of, trained_parameters, weights_of
from course_utils.ranks import share

from . import answers

share("torch._dynamo")  # every optimizer imports it as it is made: a second on each rank

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

# --- a model and what one process makes of it

WIDTH, WORDS = 6, 8
SIZES = (4, 4, 2)  # samples of a rank in each step: the last batch is smaller
LAYERS = ("embedding", "frozen", "first", "branch", "last", "head")


class Words(nn.Module):
    """Embedding, four linear layers and a head; ``kind`` says whether a layer is ``frozen``, and the head ``tied``."""

    def __init__(self, seed: int, kind: str):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + seed)
            self.embedding = nn.Embedding(WORDS, WIDTH)
            for name in LAYERS[1:-1]:
                setattr(self, name, nn.Linear(WIDTH, WIDTH))
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            self.register_buffer("scale", 1 + torch.rand(WIDTH))
        self.frozen.requires_grad_("frozen" not in kind)
        if "tied" in kind:
            self.head.weight = self.embedding.weight
        self.double()

    def loss(self, words: Tensor, branch: bool) -> Tensor:
        x = torch.tanh(self.frozen(self.embedding(words[:, :-1]) * self.scale))
        x = torch.tanh(self.first(x))
        if branch:
            x = x + torch.tanh(self.branch(x))
        return F.cross_entropy(self.head(torch.tanh(self.last(x))).flatten(0, 1), words[:, 1:].flatten())


def batch(n: int, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(40 + n)
    words = torch.randint(WORDS, (n, len(SIZES), max(SIZES), 5), generator=generator)
    return words[rank, step, : SIZES[step]]


def takes_branch(n: int, rank: int, step: int, kind: str) -> bool:
    """Of ``branch``, one rank leaves it out in the first step, and another in the last."""
    return "branch" not in kind or step == 1 or rank != (step // 2 + 1) % n


@cache
def in_one_process(n: int, kind: str) -> list[dict[str, Tensor]]:
    """The mean gradient of each step, of rank 0's model and the batches of all ranks."""
    module, means = Words(0, kind), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(len(SIZES)):
        parts = []
        for rank in range(n):
            optimizer.zero_grad()
            module.loss(batch(n, rank, step), takes_branch(n, rank, step, kind)).backward()
            parts.append(gradients_of(module))
        means.append(average(parts))
        for name, gradient in means[-1].items():
            module.get_parameter(name).grad = gradient
        optimizer.step()
    return means


# --- exercises 1, 3 and 4: replicas

ERRORS = "NoneType|gradient"  # of which a case may be to blame
MODELS = [
    Case(2, "a plain model", ("",)),
    Case(2, "a frozen layer", ("frozen",), "frozen", ERRORS),
    Case(2, "tied weights", ("tied",), "tied", ERRORS),
    Case(2, "a branch that not every rank takes", ("branch",), "unused", ERRORS),
    Case(3, "all of that together", ("frozen tied branch",)),
    Case(1, "all of that together", ("frozen tied",)),
]


def in_buckets_of(cap: int, model: Case, **other: str) -> Case:
    return replace(model, name=f"{model.name}, buckets of {cap:,} bytes", args=(*model.args, cap), **other)


SMALL, LARGE = 340, 100_000  # bytes: some parameters are larger than the one, all fit into the other
PLAIN, FROZEN, TIED, BRANCH, *ALL_OF_THAT = MODELS
BUCKETS = [in_buckets_of(cap, PLAIN) for cap in (SMALL, 700, LARGE)]
BUCKETS += [in_buckets_of(SMALL, FROZEN), in_buckets_of(SMALL, TIED), in_buckets_of(LARGE, BRANCH)]
ORDER = in_buckets_of(SMALL, BRANCH, hint="order")
LAST_BUCKETS = [in_buckets_of(SMALL, model) for model in ALL_OF_THAT]


def replicas(note: Any, answer: Callable, kind: str, *cap: int) -> list[tuple]:
    """Train for three steps and compare with one process; return what this rank sent in each, if there are others.

    That is a ledger of the step and one of its backward, how often backward waited for an operation to end, and how
    many calls had been made when the last gradient arrived.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    module, root, arrivals, during = Words(rank, kind), Words(0, kind), [0], []
    wait, waits, gradients, sent = dist.Work.wait, [], [], []

    def counted(work: Any, *args: Any, **kwargs: Any) -> Any:
        waits.append(work)
        return wait(work, *args, **kwargs)

    for p in trained_parameters(module).values():
        p.register_post_accumulate_grad_hook(lambda _: arrivals.append(len(during)))
    parameters = list(module.parameters())
    with record() as everything:
        finish = answer(module, *cap)
        if not note.holds(callable(finish), "odd", "the function returned nothing that can be called."):
            return []
        start, scale = weights_of(module), module.scale.clone()
        kept = all(p is q for p, q in zip(parameters, module.parameters(), strict=False))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(len(SIZES)):
            optimizer.zero_grad()
            waits.clear()
            loss = module.loss(batch(n, rank, step), takes_branch(n, rank, step, kind))
            with record() as ledger:
                with record() as during, patch.object(dist.Work, "wait", counted):
                    loss.backward()
                finish()
            gradients.append(gradients_of(module))
            sent.append((ledger, during, len(waits), arrivals[-1]))
            optimizer.step()
    note.talks(everything, n)
    weights = weights_of(root)
    note.equal(start, weights, "before the first step the weight", "no-broadcast")
    note.equal(scale, root.scale, "the buffer `scale`", "no-broadcast")
    note.holds(kept, "value", "the module has other parameters than before; write into those that it had.")
    for step, mean in enumerate(in_one_process(n, kind)):
        near = all(close(gradients[step][name], right) for name, right in mean.items())
        key = "float32" if near else "leftover" if step else "value"
        note.equal(gradients[step], mean, f"step {step + 1}: the gradient", key)
    return sent if n > 1 else []


def right_bytes(note: Any, ledger: Any, trained: list) -> None:
    enough = sum(p.nbytes for p in trained)
    note.sent(ledger, {"all_reduce"}, carried=(enough, enough))


def right_buckets(note: Any, ledger: Any, trained: list, cap: int) -> None:
    """No more messages than buckets, and no larger ones."""
    right_bytes(note, ledger, trained)
    enough = max(len(answers.in_buckets(order, cap)) for order in (trained, trained[::-1]))
    note.sent(ledger, calls=enough, largest=max(cap, *(p.nbytes for p in trained)),
              too_many_calls="buckets", too_large="buckets")


@exercise("Exercise 1", cases=MODELS, explains=("leftover",),
          passed="equal to one process to 1e-12, and no byte more than the gradient.")
def data_parallel(note, answer, kind):
    trained = list(trained_parameters(Words(0, kind)).values())
    for ledger, *_ in replicas(note, answer, kind):
        right_bytes(note, ledger, trained)


SHARED = {  # hints of all three
    "leftover": "The first step is right, but a later one is not. What does the function keep from one to the next?",
    "unused": """It is right until a rank has no gradient for a parameter. The other ranks wait for that rank all the
        same: let it send zeros and take over the mean as well, or its weights drift away.""",
}
DIVIDED = "p.grad /= dist.get_world_size()"
SUMMED = "dist.all_reduce(p.grad)"
AVERAGED = f"{SUMMED}\n                {DIVIDED}"
ZEROS = "p.grad = torch.zeros_like(p)"

MISTAKES["data_parallel"] = {
    "no-broadcast": (COMMON_HINTS["no-broadcast"],
            ["dist.broadcast(tensor.detach(), src=0)  ->  pass",
             "(*module.parameters(), *module.buffers())  ->  module.parameters()",
             "(*module.parameters(),  ->  (*(p for p in module.parameters() if p.requires_grad),"]),
    "tied": (COMMON_HINTS["tied"], ["for p in module.parameters():  ->  "
             "for _, p in module.named_parameters(remove_duplicate=False):",
             f"{DIVIDED}  ->  for _, q in module.named_parameters(remove_duplicate=False):\n"
             "    p.grad /= dist.get_world_size() ** (p is q)"]),
    "sum": ("This is not the mean over the ranks: all_reduce sums, and the sum is divided by their number, once.",
            [f"{DIVIDED}  ->  pass", f"{DIVIDED}  ->  {DIVIDED} ** 2"]),
    "own-gradient": ("""This rank still has its own gradient: it was not averaged, or the mean was not written back into
        p.grad.""", "return finish  ->  return lambda: None"),
    "leftover": (SHARED["leftover"], "def finish():  ->  "
                 "done = []\n\ndef finish():\n    if done:\n        return\n    done.append(True)"),
    "frozen": (COMMON_HINTS["frozen"], {
        "if p.requires_grad:": "if True:", "if p.grad is None:": "if p.grad is None and p.requires_grad:"}),
    "unused": (SHARED["unused"], [f"{ZEROS}  ->  dist.all_reduce(torch.zeros_like(p))\ncontinue",
                                  f"{ZEROS}  ->  continue"]),
}
RIGHT["data_parallel"] = {
    "the mean by the library, a tied weight twice": {
        "(*module.parameters(), *module.buffers())": "module.state_dict().values()",
        AVERAGED: "dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)",
    },
    "one flat tensor": "for p in module.parameters():  ->  "
        "trained = [p for p in module.parameters() if p.requires_grad]\n"
        "flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])\n"
        "dist.all_reduce(flat)\n"
        "mean = flat / dist.get_world_size()\n"
        "for p, piece in zip(trained, mean.split([p.numel() for p in trained]), strict=True):\n"
        "    p.grad = piece.view_as(p)\nreturn\nfor p in module.parameters():",
}


@exercise("Exercise 3", cases=BUCKETS + LAST_BUCKETS, explains=("leftover",),
          passed="equal to one process to 1e-12, with one all-reduce a bucket.")
def bucketed(note, answer, kind, cap):
    trained = list(trained_parameters(Words(0, kind)).values())
    for ledger, *_ in replicas(note, answer, kind, cap):
        right_buckets(note, ledger, trained, cap)


TRAINED = "[p for p in module.parameters() if p.requires_grad]"
REDUCED = "[end() for end in [start_bucket(bucket) for bucket in buckets]]"
WRITTEN = "p.grad = piece.view_as(p)"
BOTH = {  # of bucketed and overlapped
    "mean": ("""This is not the mean over the ranks: divide the sum by the number of ranks, once, and write it back into
        p.grad, piece by piece in the order in which the flat tensor was filled.""",
            [" / dist.get_world_size()  ->  ", " / dist.get_world_size()  ->   / dist.get_world_size() ** 2",
             f"{WRITTEN}  ->  pass", {"in zip(bucket, ": "in zip(bucket[::-1], ",
                                      "split([p.numel() for p in bucket": "split([p.numel() for p in bucket[::-1]"}]),
    "buckets": ("""Fill one bucket up to bucket_bytes before you begin the next, and let its gradients travel in one
        flat tensor: more messages pay more latencies, and with one large one nothing can overlap.""",
            [f", bucket_bytes)  ->  , {cap})" for cap in ("1", "min(340, bucket_bytes)", "10**9")]),
    "unused": (SHARED["unused"], f"{WRITTEN}  ->  if p.grad is not None:\n    p.grad.copy_(piece.view_as(p))"),
}

MISTAKES["bucketed"] = BOTH | {
    "leftover": (SHARED["leftover"], {
        "(bucket: list[nn.Parameter])": "(bucket, kept={})",
        "flat = torch.cat(": "flat = kept[bucket[0]] = kept[bucket[0]] if bucket[0] in kept else torch.cat("}),
    "frozen": (COMMON_HINTS["frozen"], f"{TRAINED}  ->  list(module.parameters())"),
    "tied": (COMMON_HINTS["tied"], f"{TRAINED}  ->  "
             "[p for _, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]"),
}
RIGHT["bucketed"] = {
    "overlapped": f"return lambda: {REDUCED}  ->  return overlapped(module, bucket_bytes)",
    "filled in forward order": "trained[::-1]  ->  trained",
}


@exercise("Exercise 4", cases=[*BUCKETS, ORDER, *LAST_BUCKETS], explains=("leftover",),
          passed="each bucket starts during backward, and backward never waits.")
def overlapped(note, answer, kind, cap):
    trained = list(trained_parameters(Words(0, kind)).values())
    for ledger, during, waits, early in replicas(note, answer, kind, cap):
        right_buckets(note, ledger, trained, cap)
        if "branch" not in kind:
            started, late = during.count("all_reduce"), len(ledger) - len(during)
            what = f"{started} all-reduces start before backward returns, {late} after it."
            note.holds(late == 0, "after-backward", what)
            note.holds(waits == 0, "waits-in-hook", f"backward waits for {waits} operations.")
            what = f"when the last gradient arrives, {early} of {started} all-reduces have started."
            note.holds(early >= started - 1, "after-backward", what)


SEND = "request = dist.all_reduce(flat, async_op=True)"
HOOK = "p.register_post_accumulate_grad_hook(arrive)"
COMPLETE = "arrived.issuperset(buckets[len(under_way)])"

MISTAKES["overlapped"] = BOTH | {
    "too-early": ("""A hook ran before the gradient was there: Tensor.register_hook runs before p.grad is set,
        register_post_accumulate_grad_hook after it. And a bucket is ready only when all of its gradients are.""",
            [f"{HOOK}  ->  p.register_hook(lambda gradient, p=p: arrive(p))",
             "arrived.issuperset(  ->  arrived.intersection("]),
    "after-backward": ("""Not every all-reduce starts as soon as its bucket is complete, long before backward returns. A
        hook on every parameter can tell when the last gradient of a bucket is there.""",
            [f"{HOOK}  ->  pass", f"{COMPLETE}  ->  len(arrived) == len(trained)"]),
    "waits-in-hook": ("""Backward waits for the network: an all-reduce is finished inside a hook. Start it with
        async_op=True, and wait for it in finish.""", {SEND: "dist.all_reduce(flat)", "request.wait()": "pass"}),
    "leftover": (SHARED["leftover"], "under_way.clear()  ->  pass"),
    "order": ("""On a rank that has no gradient for a parameter, that bucket starts later than on other ranks, and
        all-reduces pair up by their order. Every rank has to start the buckets in the same order.""",
            {"arrived, under_way = set(), []": "arrived, under_way, begun = set(), [], set()",
            f"while len(under_way) < len(buckets) and {COMPLETE}:\n            "
            "under_way.append(start_bucket(buckets[len(under_way)]))":
                "for i, bucket in enumerate(buckets):\n    if i not in begun and arrived.issuperset(bucket):\n"
                "        begun.add(i)\n        under_way.append(start_bucket(bucket))",
            "in buckets[len(under_way) :]": "in [b for i, b in enumerate(buckets) if i not in begun]",
            "arrived.clear()": "arrived.clear()\nbegun.clear()"}),
}
RIGHT["overlapped"] = {
    "waits in threads, by futures": {
        "for end in under_way:\n            end()": "from threading import Thread\n\n"
        "threads = [Thread(target=end) for end in under_way]\nfor thread in threads:\n    thread.start()\n"
        "for thread in threads:\n    thread.join()",
        "request.wait()": "request.get_future().wait()",
    },
    "divided in the end, last started and first ended": {
        " / dist.get_world_size()": "", "flat.split(": "(flat / dist.get_world_size()).split(",
        "for end in under_way:": "for end in under_way[::-1]:",
    },
}

# --- exercise 2: buckets

LENGTHS = (3, 2, 1, 4, 1, 5, 2)
DOUBLE, SINGLE = torch.float64, torch.float32
LISTS = {  # elements of the parameters, their dtypes in turn, bytes of a bucket
    "float64": (LENGTHS, [DOUBLE], 48),
    "float32": (LENGTHS, [SINGLE], 24),
    "one parameter larger than a bucket": ((2, 9, 2, 3), [DOUBLE], 48),
    "a large parameter first": ((9, 2, 3), [DOUBLE], 48),
    "all in one bucket": ((3, 1), [DOUBLE], 32),
    "two dtypes": (LENGTHS, [DOUBLE, SINGLE], 48),
    "pieces of one flat tensor": (LENGTHS, [DOUBLE], 48, True),
}


@exercise("Exercise 2", passed=f"on {len(LISTS)} lists of parameters.", cases=[
    (0, f"{name}, elements {', '.join(map(str, lengths))}, buckets of {cap} bytes", lengths, dtypes, cap, *pieces)
    for name, (lengths, dtypes, cap, *pieces) in LISTS.items()
])
def in_buckets(note, answer, lengths, dtypes, cap, pieces=False):
    """Any full buckets; those of two dtypes may be open at the same time or one after the other."""
    tensors = [torch.zeros(length, dtype=dtypes[i % len(dtypes)]) for i, length in enumerate(lengths)]
    parameters = [nn.Parameter(tensor) for tensor in (torch.cat(tensors).split(lengths) if pieces else tensors)]
    place, given = {id(p): i for i, p in enumerate(parameters)}, list(parameters)
    got = answer(given, cap)
    lists = isinstance(got, list | tuple) and all(isinstance(bucket, list | tuple) for bucket in got)
    lists = lists and all(id(p) in place for bucket in got for p in bucket)
    if not note.holds(lists, "odd", f"the function returned {show(got)}, not lists of the parameters."):
        return
    what = f"the buckets have {' | '.join(', '.join(str(p.nbytes) for p in bucket) for bucket in got)} bytes."
    order = [place[id(p)] for bucket in got for p in bucket]
    note.holds(all(got), "large-alone", what)
    note.holds(sorted(order) == list(range(len(parameters))), "lost", what)
    note.holds(all(len({p.dtype for p in bucket}) < 2 for bucket in got), "dtype", what)
    for dtype in dtypes:
        mine = [i for i in order if parameters[i].dtype == dtype]
        note.holds(mine == sorted(mine), "order", what)
    sizes, most = [len(bucket) for bucket in got], len(answers.in_buckets(parameters, cap))
    fits = all(len(bucket) == 1 or sum(p.nbytes for p in bucket) <= cap for bucket in got)
    note.holds(fits, "too-large", what, ("sizes", sizes))
    note.holds(len(got) <= most or len(dtypes) > 1, "too-small", what, ("sizes", sizes))
    same = len(given) == len(parameters) and all(a is b for a, b in zip(given, parameters, strict=True))
    note.holds(same, "input-changed", f"it held {len(parameters)} parameters, now {len(given)}.")


SIZE = "sum(q.nbytes for q in bucket) + p.nbytes"

MISTAKES["in_buckets"] = {
    "elements": ("bucket_bytes counts bytes, not elements. An element takes 8 bytes in float64 and 4 in float32.",
            [f"{SIZE}  ->  sum(q.numel() for q in bucket) + p.numel()",
             f"{SIZE}  ->  8 * sum(q.numel() for q in [*bucket, p])"]),
    "storage": ("""It is right until parameters are pieces of one flat tensor. Count a parameter's own bytes, p.nbytes,
        not those of its storage.""", f"{SIZE}  ->  sum(q.untyped_storage().nbytes() for q in [*bucket, p])"),
    "large-alone": ("A parameter larger than bucket_bytes makes a bucket by itself, and no bucket is empty.",
            ["bucket = filling.get(p.dtype)  ->  "
            "bucket = filling.setdefault(p.dtype, [])\nif not buckets:\n    buckets.append(bucket)",
             "> bucket_bytes  ->  > bucket_bytes >= p.nbytes"]),
    "too-large": ("A bucket may hold at most bucket_bytes. Close it before it overflows, not after.",
            f"{SIZE} > bucket_bytes  ->  sum(q.nbytes for q in bucket) >= bucket_bytes"),
    "too-small": ("There was room left. The next parameter belongs in the bucket even if it fits exactly.",
            "> bucket_bytes  ->  >= bucket_bytes"),
    "lost": ("Every parameter has to be in one bucket, and in one only. What happens to the last bucket?",
            "return buckets  ->  return buckets[:-1]"),
    "order": ("Keep the parameters in the order in which the function was given them.",
            "in parameters:  ->  in sorted(parameters, key=lambda p: p.nbytes):"),
    "dtype": ("A flat tensor has one dtype. Keep a bucket open for each dtype, or at least begin a new one.",
            {"filling.get(p.dtype)": "filling.get(0)", "filling[p.dtype]": "filling[0]"}),
}


def one_bucket_at_a_time(parameters, bucket_bytes):
    buckets, room = [], 0
    for p in parameters:
        if not buckets or p.nbytes > room or p.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(p)
        room -= p.nbytes
    return buckets


RIGHT["in_buckets"] = {
    "a new bucket for another dtype": one_bucket_at_a_time,
    "tuples": "return buckets  ->  return tuple(map(tuple, buckets))",
}

# --- exercise 6: the sampler

EPOCHS = [  # samples, ranks, epoch, seed, done
    (12, 4, 3, 7, 0), (12, 4, 4, 7, 0), (10, 4, 3, 7, 0), (11, 3, 1, 2, 0), (3, 8, 2, 5, 0), (1, 3, 2, 5, 0),
    (1, 8, 2, 5, 0), (12, 4, 3, 7, 4), (12, 2, 3, 7, 8), (10, 4, 3, 7, 4), (10, 3, 3, 7, 8), (10, 4, 3, 7, 10),
]


@exercise("Exercise 6", passed=f"on {len(EPOCHS)} epochs, equal to DistributedSampler.", cases=[
    Case(0, f"{samples} samples, {ranks} ranks, epoch {epoch}, seed {seed}, done {done}",
         (samples, ranks, epoch, seed, done), "short" if samples < ranks else None)
    for samples, ranks, epoch, seed, done in EPOCHS
])
def epoch_indices(note, answer, samples, ranks, epoch, seed, done):
    """The solution says what is left of an epoch; of a whole one, DistributedSampler."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        results = [answer(samples, ranks, rank, epoch, seed, done) for rank in range(ranks)]
        same = torch.equal(before, torch.get_rng_state())
    note.holds(same, "global-generator", "the global generator was used.")
    got = [whole_numbers(result) if isinstance(result, list | tuple) else None for result in results]
    if not note.holds(None not in got, "odd", f"the function returned {show(results[0])}, not a list of indices."):
        return
    right = [answers.epoch_indices(samples, ranks, rank, epoch, seed, done) for rank in range(ranks)]
    if done == 0:
        samplers = [DistributedSampler(range(samples), ranks, rank, seed=seed) for rank in range(ranks)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        right = [list(sampler) for sampler in samplers]
    lines = [f"the indices of rank {rank} are wrong.\n  expected  {right[rank]}\n  got       {got[rank]}"
             for rank in range(ranks) if got[rank] != right[rank]]
    note.holds(not lines, "value", "".join(lines[:1]), ("indices", got))


SHUFFLED = "torch.randperm(samples, generator=generator).tolist()"
DEALT = "return left[rank::ranks]"
PADDED = """while missing > 0:
        left += order[:missing]
        missing -= samples"""

MISTAKES["epoch_indices"] = {
    "seed": ("""The order has to depend on both: the generator is seeded with seed + epoch. Without the epoch, as if
        set_epoch had been forgotten, it is the same in every epoch.""", ["seed + epoch  ->  seed",
             "seed + epoch  ->  epoch", f"{SHUFFLED}  ->  list(range(samples))"]),
    "rank-seed": ("""Each rank shuffles in its own way, so some samples come twice and others never. The ranks must
        agree on one order.""", ["seed + epoch  ->  seed + epoch + rank", "seed + epoch  ->  seed + rank"]),
    "global-generator": ("""The function uses or changes the global generator, which others use as well. Make a
        torch.Generator of your own and seed it.""",
            {"generator = torch.Generator().manual_seed(": "torch.manual_seed(",
             SHUFFLED: "torch.randperm(samples).tolist()"}),
    "dealt": ("""Ranks do not take blocks, nor all the same: DistributedSampler deals the samples out like cards. Rank r
        takes r, r + N, r + 2N, … of the order, so that what is done is always a beginning of it.""",
            [f"{DEALT}  ->  return left", f"{DEALT}  ->  return left[: len(left) // ranks]",
             f"{DEALT}  ->  return left[rank * len(left) // ranks : (rank + 1) * len(left) // ranks]"]),
    "rest": ("""Some ranks have fewer samples than others, and wait for ever at the end, or samples are missing because
        the rest was cut off. Fill up from the beginning of the epoch's order until N divides the number.""",
            ["while missing > 0:  ->  while False:",
             "missing = -len(left) % ranks  ->  missing, left = 0, left[: len(left) // ranks * ranks]",
             "+= order[:missing]  ->  += left[-1:] * missing"]),
    "short": ("It is right until there are fewer samples than ranks. The order then has to be repeated more than once.",
            ["while missing > 0:  ->  if True:", {PADDED: "left += (order * 3)[:missing]"}]),
    "per-rank": ("""`done` counts the samples of all ranks together, from the beginning of the epoch's order. Make that
        order first, cut there, and deal out what is left without another shuffle.""", ["order[done:]  ->  order[:]",
             {"order[done:]": "order[:]", DEALT: f"{DEALT}[done:]"},
             {"order[done:]": "order[:]", DEALT: f"{DEALT}[done // ranks :]"},
             {SHUFFLED: f"[done + i for i in {SHUFFLED.replace('samples', 'samples - done')}]", "[done:]": "[:]"}]),
    "resumed-uneven": ("""After resuming it is the rest that N has to divide, not the whole epoch, and the padding comes
        from the beginning of the epoch's order, not from that of the rest.""",
            [{"order[done:]": "order[:]", DEALT: "return left[done:][rank::ranks]"},
             "order[:missing]  ->  order[done:][:missing]"]),
}
RIGHT["epoch_indices"] = {
    "whole numbers of NumPy": f"{DEALT}  ->  import numpy as np\n\nreturn list(np.array(left)[rank::ranks])",
    "a cycle, a tuple": {PADDED: "from itertools import cycle, islice\n\nleft += islice(cycle(order), missing)",
                         DEALT: "return tuple(left[rank::ranks])"},
}

# --- exercise 5: accumulation

INPUTS, OUTPUTS = 5, 3  # of the net below


def regression_net() -> nn.Sequential:
    """A net of two layers in float64, the same with every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(INPUTS, 7), nn.Tanh(), nn.Linear(7, OUTPUTS)).double()


def batches_of(sizes: tuple[int, ...], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs (x, y) of so many samples."""
    generator = torch.Generator().manual_seed(seed)
    widths = INPUTS, OUTPUTS
    x, y = (torch.randn(sum(sizes), n, generator=generator, dtype=torch.float64).split(sizes) for n in widths)
    return list(zip(x, y, strict=True))


def loss_gradient(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Gradient of the mean loss over all samples of some batches, by name."""
    x, y = map(torch.cat, zip(*batches, strict=True))
    net.zero_grad()
    F.mse_loss(net(x), y).backward()
    return gradients_of(net)


class Passes:
    """The samples of the largest batch that goes through a module, and how many forwards at most wait for backward."""

    def __init__(self, module: nn.Module):
        self.largest, self.alive, self.open = 0, 0, set()
        module.register_forward_hook(self.forward)

    def forward(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        self.largest = max(self.largest, len(inputs[0]))
        if output.requires_grad:
            call = object()
            self.open.add(call)
            self.alive = max(self.alive, len(self.open))
            output.register_hook(lambda gradient: self.open.discard(call))


ROUNDS = 2  # how often the answer is called, with other samples each time


def micro_batches(n: int, *sizes: int, hint: str | None = None) -> Case:
    name = f"{len(sizes)} micro-batch{'es' * (len(sizes) > 1)} of {', '.join(map(str, sizes))} samples"
    return Case(n, name, sizes, hint)


@exercise("Exercise 5", passed="the gradient travels once, whatever the number of micro-batches.", cases=[
    micro_batches(2, 4, 4, 4), micro_batches(2, 4, 4, 2, hint="mean-of-means"),
    micro_batches(2, 4, hint="one-micro-batch"), micro_batches(3, 3, 3, 3, 1), micro_batches(1, 4, 4, 2),
])
def accumulate(note, answer, *sizes):
    n, net = dist.get_world_size(), regression_net()
    passes, model = Passes(net), DistributedDataParallel(net)
    dist.barrier()
    for i in range(ROUNDS):
        data = [batches_of(sizes, 900 + 10 * rank + i) for rank in range(n)]
        net.zero_grad()
        with record() as ledger:
            answer(model, data[dist.get_rank()])
        right = loss_gradient(regression_net(), [batch for own in data for batch in own])
        where = f"accumulation {i + 1} of {ROUNDS}: "
        note.equal(gradients_of(net), right, f"{where}the gradient")
        note.at_most("one-batch", passes.largest, max(sizes),
                     where + "the model saw {number} samples at once; a micro-batch has {most} at most.")
        note.at_most("one-batch", passes.alive, 1, where + "{number} micro-batches went forward and not yet back.")
        sent = [entry for entry in ledger if entry.op != "broadcast"]
        enough = sum(gradient.nbytes for gradient in right.values())
        every = len(sizes) > 1 and sum(entry.bytes for entry in sent) >= len(sizes) * enough
        if n > 1:
            note.sent(sent, carried=enough, too_many_bytes="every-micro-batch" if every else "too-many-bytes")


SCALED, LAST = " * len(x) / samples", "add(*batches[-1])"
WITHOUT = """with model.no_sync():
        for x, y in batches[:-1]:
            add(x, y)"""

MISTAKES["accumulate"] = {
    "every-micro-batch": ("""The gradient is all-reduced after each micro-batch: the result is right, but the traffic is
        wasted. In model.no_sync() backward only accumulates, if the forward pass stands inside, too; leave it for the
        last micro-batch.""", ["with model.no_sync():  ->  if True:",
             {WITHOUT: f"for x, y in batches[:-1]:\n    loss = F.mse_loss(model(x), y){SCALED}\n"
              "    with model.no_sync():\n        loss.backward()"}]),
    "never": ("""The ranks never talked to each other: each has the gradient of its own micro-batches. The last one has
        to run outside no_sync.""", f"{LAST}  ->  with model.no_sync():\n    {LAST}"),
    "not-scaled": ("backward adds up the gradients of all micro-batches, but the mean is asked for: scale each loss.",
            f"{SCALED}  ->  "),
    "mean-of-means": ("""The last micro-batch is smaller, so its samples count too much. Scale each loss by its share of
        the samples.""", f"{SCALED}  ->  / len(batches)"),
    "divided-twice": ("DDP already divides by the number of ranks.",
            "/ samples  ->  / samples / dist.get_world_size()"),
    "one-batch": ("""Several micro-batches are in memory at once, which accumulation is there to avoid. Send one through
        the model, and call backward for it before the next one goes forward.""",
            [{WITHOUT: "", LAST: "add(*map(torch.cat, zip(*batches, strict=True)))"},
             {WITHOUT: "", LAST: f"sum(F.mse_loss(model(x), y){SCALED} for x, y in batches).backward()"}]),
    "only-last": ("Only the last micro-batch is in the gradient. Which call throws away what was accumulated?",
            f"{LAST}  ->  model.zero_grad()\n{LAST}"),
    "one-micro-batch": ("With one micro-batch there is nothing to accumulate, and the function must work all the same.",
            "batches[:-1]  ->  [*batches[:-2], batches[-2]]"),
}
RIGHT["accumulate"] = {
    "past DDP, with as few bytes": {
        "model(x)": "model.module(x)", "/ samples": "/ samples / dist.get_world_size()",
        "with model.no_sync():": "if True:",
        LAST: f"{LAST}\nfor p in model.parameters():\n    dist.all_reduce(p.grad)",
    },
    "a flag in place of no_sync, a sum of squares": {
        f"F.mse_loss(model(x), y){SCALED}": "(model(x) - y).square().sum() / y.shape[1] / samples",
        "with model.no_sync():": "model.require_backward_grad_sync = False\nif True:",
        LAST: f"model.require_backward_grad_sync = True\n{LAST}",
    },
}

# --- exercise 7: uneven inputs


def uneven(*sizes: tuple[int, ...]) -> Case:
    names = " | ".join(", ".join(map(str, own)) or "none" for own in sizes)
    return Case(len(sizes), f"batches of {names} samples", sizes)


@cache
def weights_in_one_process(sizes: tuple) -> dict[str, Tensor]:
    """After an epoch that takes in each step the batches of all ranks."""
    net, data = regression_net(), [batches_of(own, 700 + rank) for rank, own in enumerate(sizes)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(map(len, sizes))):
        loss_gradient(net, [own[step] for own in data if step < len(own)])
        optimizer.step()
    return weights_of(net)


@exercise("Exercise 7", passed="every sample weighs the same, with one gradient a step.", cases=[
    uneven((4, 4, 4), (4, 4, 4)), uneven((4, 4, 4), (4,)), uneven((4, 4, 2), (4, 2, 1)), uneven((3,), (4, 2, 4)),
    uneven((4, 1), (), (3, 4, 4)), uneven((4, 2)),
])
def uneven_epoch(note, answer, *sizes):
    rank, n, module = dist.get_rank(), dist.get_world_size(), regression_net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with record() as ledger:
        answer(module, optimizer, batches_of(sizes[rank], 700 + rank))
    note.talks(ledger, n)
    weights = weights_of(module)
    note.holds(not any(bool(w.isnan().any()) for w in weights.values()), "no-samples", "the weights are nan.")
    note.equal(weights, weights_in_one_process(sizes), "after the epoch the weight")
    if n > 1:
        gradient, steps = sum(p.nbytes for p in module.parameters()), max(map(len, sizes))
        note.sent([entry for entry in ledger if entry.op != "all_reduce"], carried=gradient - 1)
        note.sent(ledger, carried=steps * (gradient + 16) + 16)


STEPS, MEAN, CLEARED = "dist.all_reduce(steps, op=dist.ReduceOp.MAX)", "flat[:-1] / flat[-1]", ZEROS
ONE_EACH = {"samples = len(x)": "samples = 1"}
ALL_AT_ONCE = """flat = torch.cat([*(p.grad.flatten() for p in parameters), count])
        dist.all_reduce(flat)
        mean = flat[:-1] / flat[-1]
        for p, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            p.grad = piece.view_as(p)"""

MISTAKES["uneven_epoch"] = {
    "mean-of-means": ("""Batches have different sizes, so the mean of the ranks' gradients gives the samples different
        weights. Add gradients of sums, and divide by the number of all samples.""", ONE_EACH),
    "divided-by-all": ("""In some steps not all ranks have a batch. Divide by what really took part: the samples, not
        the ranks.""", ONE_EACH | {MEAN: "flat[:-1] / dist.get_world_size()"}),
    "sum": ("The gradients are summed over the ranks or samples, but not divided.", [f"{MEAN}  ->  flat[:-1]",
             ONE_EACH | {MEAN: "flat[:-1]"}]),
    "no-samples": ("""Somewhere a mean is taken over no samples, and 0 / 0 is nan. Is there a step in which this rank,
        or every rank, has no batch?""", "range(int(steps))  ->  range(int(steps) + 1)"),
    "ranks-differ": ("""The ranks end with different weights. A rank that has no batch left must still take the step
        that the others take.""", "optimizer.step()  ->  if step < len(batches):\n    optimizer.step()"),
    "leftover": ("""The gradients of an earlier step are still in it. Clear them before each backward, also on ranks
        without a batch.""", [f"{CLEARED}  ->  {CLEARED} if step == 0 else p.grad",
             f"{CLEARED}  ->  {CLEARED} if step == 0 or step < len(batches) else p.grad"]),
    "stops-early": ("The epoch ends when the first rank has no batch left, and the samples of the others are lost.",
            "ReduceOp.MAX  ->  ReduceOp.MIN"),
    "hang": ("""A rank that has no batch left must go on taking part in the all-reduces until all ranks are done. How
        can it know when that is?""", f"{STEPS}  ->  pass"),
}


def asks_in_every_step_whether_anybody_goes_on(module, optimizer, batches):
    step = 0
    while True:
        x, y = batches[step] if step < len(batches) else (torch.empty(0, 5), torch.empty(0, 3))
        samples = torch.tensor(float(len(x)), dtype=torch.float64)
        dist.all_reduce(samples)
        if not samples:
            return
        module.zero_grad()
        (F.mse_loss(module(x.double()), y.double(), reduction="sum") / 3 / samples).backward()
        for p in module.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        step += 1


RIGHT["uneven_epoch"] = {
    "asks in every step whether anybody goes on": asks_in_every_step_whether_anybody_goes_on,
    "every parameter by itself": {
        ALL_AT_ONCE: "dist.all_reduce(count)\nfor p in parameters:\n    dist.all_reduce(p.grad)\n    p.grad /= count",
    },
}
