"""The exercises on ZeRO: what each rank must find, and the usual mistakes with their hints.

Models are in float64, so that ranks can be compared with one process to 1e-12. A model that is ``odd`` has no size
that 2 ranks can divide evenly.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_utils import record
from course_utils.check import Case, exercise, paper
from course_utils.check.training import average, gradients_of, trained_parameters, weights_of
from course_utils.memory import model_states, track

from . import answers

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

STEPS, SLACK = 3, 256  # SLACK: bytes of counters and scalars that nobody counts
ODD = {"odd": True, "frozen": True, "tied": True}
# Errors that a case is to blame for.
UNEVEN, FROZEN, TIED = "AssertionError|SIGABRT", "NoneType|require grad", "NoneType"

UNEVENLY = """This is right until the number of ranks does not divide the number of elements. All parts have the same
    size, rounded up, and no element is dropped."""

# --- a model and what one process makes of it


class Net(nn.Module):
    """Embedding, three linear layers and a head; in an odd one no size is even, and there is a single number more."""

    def __init__(self, seed: int, odd: bool = False, frozen: bool = False, tied: bool = False):
        super().__init__()
        words, width = (7, 5) if odd else (8, 6)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2000 + seed)
            self.embedding = nn.Embedding(words, width)
            self.frozen, self.first, self.last = (nn.Linear(width, width) for _ in range(3))
            self.head = nn.Linear(width, words, bias=False)
            self.gain = nn.Parameter(1 + torch.rand(1)) if odd else 1.0
        self.frozen.requires_grad_(not frozen)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()

    def loss(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.first(torch.tanh(self.frozen(self.embedding(words[:, :-1])))))
        return F.cross_entropy(self.head(torch.tanh(self.last(x)) * self.gain).flatten(0, 1), words[:, 1:].flatten())


def batches(n: int) -> list[Tensor]:
    """Of each rank for all steps, (STEPS, samples, length)."""
    generator = torch.Generator().manual_seed(60 + n)
    return [torch.randint(7, (STEPS, 4, 6), generator=generator) for _ in range(n)]


def started(words: Tensor, options: dict) -> Net:
    """A rank's module as it is before anything is sent; each has another seed."""
    return Net(int(words.flatten()[:9] @ 7 ** torch.arange(9)), **options)


def share(numel: int, n: int) -> int:
    return -(-numel // n)


def part(tensor: Tensor, rank: int, n: int) -> Tensor:
    """Part ``rank`` of the flat tensor, with zeros behind its end."""
    flat = tensor.detach().flatten()
    return F.pad(flat, (0, n * share(flat.numel(), n) - flat.numel())).chunk(n)[rank]


def parts(tensors: dict[str, Tensor], rank: int, n: int) -> dict[str, Tensor]:
    return {name: part(t, rank, n) for name, t in tensors.items()}


def own_gradients(module: Net, words: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    module.loss(words).backward()
    return gradients_of(module)


# --- exercise 2: ZeRO-1

OPTIMIZERS = {  # and how many states it keeps of each parameter
    "momentum": (lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9), 1),
    "Adam": (lambda parameters: torch.optim.Adam(parameters, lr=0.02), 2),
}
SHARD_CASES = [
    (2, "a plain model, momentum", "momentum", {}),
    (2, "a plain model, Adam", "Adam", {}),
    Case(2, "a frozen layer, Adam", ("Adam", {"frozen": True}), "frozen", FROZEN),
    Case(2, "an odd number of elements, momentum", ("momentum", {"odd": True}), "uneven", UNEVEN),
    Case(2, "tied weights, momentum", ("momentum", {"tied": True}), "tied", TIED),
    (3, "all of that together, Adam", "Adam", ODD),
    (1, "all of that together, Adam", "Adam", ODD),
]


@cache
def in_one_process(n: int, kind: str, options: tuple) -> list[dict[str, Tensor]]:
    """Weights at the start and after each step on all batches, from rank 0's seed."""
    data = batches(n)
    module = started(data[0], dict(options))
    optimizer, moments = OPTIMIZERS[kind][0](list(trained_parameters(module).values())), [weights_of(module)]
    for step in range(STEPS):
        for name, gradient in average([own_gradients(module, words[step]) for words in data]).items():
            module.get_parameter(name).grad = gradient
        optimizer.step()
        moments.append(weights_of(module))
    return moments


@exercise("Exercise 2", cases=SHARD_CASES, explains=("all-states",),
          passed="equal to one process to 1e-12, with 1/N of the optimizer's states on each rank.")
def shard_optimizer(note, answer, kind, options):
    rank, n, made = dist.get_rank(), dist.get_world_size(), []
    right, words = in_one_process(n, kind, tuple(options.items())), batches(n)[rank]
    module, (make, states) = started(words, options), OPTIMIZERS[kind]
    parameters, trained = list(module.parameters()), trained_parameters(module).values()
    size = sum(p.numel() for p in trained)
    one, own = 8 * share(size, n), 8 * size
    alone = sum(p.nbytes for p in (*parameters, *trained))

    def make_optimizer(given):
        made.append(make(given))
        return made[-1]

    step = answer(module, make_optimizer)
    if not note.holds(callable(step), "odd", "the function returned nothing that can be called."):
        return
    if not note.holds(len(made) == 1, "make-optimizer", f"make_optimizer was called {len(made)} times."):
        return
    note.equal(weights_of(module), right[0], "before the first step the weight", "no-broadcast")
    late = []
    for i, batch in enumerate(words):
        module.zero_grad()
        module.loss(batch).backward()
        for p in trained:
            dist.all_reduce(p.grad)
            p.grad /= n
        with track(module) as tracker:
            with record() as ledger:
                step()
            beside = note.settled(tracker, alone + (states + 2) * one + SLACK) - alone
        note.holds(len(made) == 1, "make-optimizer", f"{len(made)} optimizers have been made.")
        kept = all(p is q for p, q in zip(parameters, module.parameters(), strict=False))
        note.holds(kept, "value", "some parameters are not those that the module had.")
        note.equal(weights_of(module), right[i + 1], f"step {i + 1}: the weight")
        late.append((ledger, beside))
    held = sum(t.nbytes for s in made[0].state.values() for t in s.values() if isinstance(t, Tensor) and t.dim())
    note.holds(held > 0, "make-optimizer", "the optimizer that make_optimizer returned never stepped.")
    note.at_most("all-states", held, states * one, "the optimizer's states have {number} bytes; a share has {most}.")
    for ledger, beside in late:
        note.at_most("whole-copy", beside, (states + 2) * one + SLACK, "{number:.0f} bytes are alive beside the module "
                     "and its gradients; states, part and gradient have {most}.")
        if n > 1:
            note.sent(ledger, {"all_gather"}, calls=(1, 1), carried=(own, n * one))


MISTAKES["shard_optimizer"] = {
    "make-optimizer": ("""Call make_optimizer once, before the first step, with one tensor: this rank's part. The
        optimizer that it returns does all the stepping.""",
            ["make_optimizer([part])  ->  torch.optim.SGD([part], lr=0.2, momentum=0.9)",
             "optimizer = make_optimizer([part])  ->  make_optimizer([part])\n"
             "optimizer = torch.optim.SGD([part], lr=0.2, momentum=0.9)"]),
    "not-updated": ("No weight has moved. The optimizer steps the tensors that it was given, and reads their .grad.",
            "part.grad = join([p.grad for p in trained], n).chunk(n)[rank].clone()  ->  pass"),
    "not-gathered": ("""Some weights are right, and the others are still those from before the step. Has every part
        reached this rank?""",
            {"dist.all_gather_single(flat, part.detach())": "flat = join(trained, n)\n"
             "flat.chunk(n)[rank].copy_(part.detach())"}),
    "order": ("""The numbers are right, but in the wrong places: the pieces are put back in a different order from the
        one in which they were joined.""",
            "nn.utils.vector_to_parameters(flat, trained)  ->  "
            "nn.utils.vector_to_parameters(torch.cat(flat.chunk(n)[::-1]), trained)"),
    "averaged-again": ("The gradient already is the mean over the ranks. Here it is divided or summed once more.",
            ["join([p.grad for p in trained], n).chunk(n)[rank].clone()  ->  "
            "join([p.grad for p in trained], n).chunk(n)[rank].clone() / n",
             "join([p.grad for p in trained], n).chunk(n)[rank].clone()  ->  "
             "join([p.grad for p in trained], n).chunk(n)[rank].clone() * n"]),
    "all-states": ("The optimizer has states for all parameters: every rank keeps what all the others keep too.",
            {"make_optimizer([part])": "make_optimizer(trained)",
             "part.grad = join([p.grad for p in trained], n).chunk(n)[rank].clone()": "pass",
             "(flat, part.detach())": "(flat, join(trained, n).chunk(n)[rank].clone())"}),
    "whole-copy": ("""More stays alive than the module, its gradients, and this rank's part with its gradient and
        states. A slice is a view: as long as it lives, so does the tensor it was cut from.""",
            "join(trained, n).chunk(n)[rank].clone()  ->  join(trained, n).chunk(n)[rank]"),
    "uneven": (UNEVENLY, ["F.pad(flat, (0, -len(flat) % n))  ->  flat[: len(flat) // n * n]",
             "if p.requires_grad]  ->  if p.requires_grad]\nassert sum(p.numel() for p in trained) % n == 0"]),
}


def parameters_are_views_of_one_flat_tensor(module, make_optimizer):
    rank, n = dist.get_rank(), dist.get_world_size()
    for p in module.parameters():
        dist.broadcast(p.detach(), src=0)
    trained = [p for p in module.parameters() if p.requires_grad]
    numels = [p.numel() for p in trained]
    padding = -sum(numels) % n

    def flat_of(tensors):
        return F.pad(torch.cat([t.detach().flatten() for t in tensors]), (0, padding))

    flat = flat_of(trained)
    for p, piece in zip(trained, flat.split([*numels, padding]), strict=False):
        p.data = piece.view_as(p)
    part = nn.Parameter(flat.chunk(n)[rank])
    optimizer = make_optimizer([part])

    def step():
        part.grad = flat_of([p.grad for p in trained]).chunk(n)[rank].clone()
        optimizer.step()
        part.grad = None
        dist.all_gather(list(flat.chunk(n)), part.detach().clone())

    return step


RIGHT["shard_optimizer"] = {
    "parameters are views of one flat tensor": parameters_are_views_of_one_flat_tensor,
    "a part without nn.Parameter, a list, asynchronous": {
        "nn.Parameter(join(trained, n).chunk(n)[rank].clone())":
            "join(trained, n).chunk(n)[rank].clone().requires_grad_()",
        "dist.all_gather_single(flat, part.detach())":
            "dist.all_gather(list(flat.chunk(n)), part.detach(), async_op=True).wait()",
    },
}

# --- exercise 3: ZeRO-2

REDUCE_CASES = [
    (2, "a plain model", {}),
    Case(2, "a frozen layer", ({"frozen": True},), "frozen", FROZEN),
    Case(2, "tied weights", ({"tied": True},), "tied", TIED),
    Case(2, "odd numbers of elements", ({"odd": True},), "uneven", UNEVEN),
    (3, "all of that together", ODD),
    (1, "all of that together", ODD),
]
PASSES = (1, 1, 2)  # backward passes in each step


def least_alive(options: dict, batch: Tensor, passes: int) -> list[float]:
    """Bytes that are alive as each gradient arrives if every earlier one is gone at once, and after the last."""
    module, alive = Net(0, **options), []

    def arrive(p):
        alive.append(tracker.mark("").total)
        p.grad = None

    for p in trained_parameters(module).values():
        p.register_post_accumulate_grad_hook(arrive)
    with track(module) as tracker:
        for some in batch.chunk(passes):
            module.loss(some).backward()
        alive.append(tracker.mark("").total)
    return alive


@cache
def mean_gradients(n: int, step: int, passes: int, options: tuple) -> dict[str, Tensor]:
    """Of all ranks' batches in one process, summed over the backward passes of a step."""
    own = [own_gradients(Net(0, **dict(options)), b) for words in batches(n) for b in words[step].chunk(passes)]
    return average(own, n)


@exercise("Exercise 3", cases=REDUCE_CASES,
          passed="the mean gradient to 1e-12, and never more than one whole gradient in memory.")
def reduce_scatter_gradients(note, answer, options):
    rank, n = dist.get_rank(), dist.get_world_size()
    data, module, reduced = batches(n), Net(0, **options), set()
    trained = trained_parameters(module)
    size = {name: 8 * share(p.numel(), n) for name, p in trained.items()}
    enough, late, least = sum(size.values()), [], []

    def arrive(name):
        most = least.pop(0) + sum(size[other] for other in reduced) + 64
        reduced.add(name)
        if not late and (alive := note.settled(tracker, most)) > most:
            late.append(f"as the gradient of {name} arrives, {alive - most + 64:.0f} bytes more are alive than it and "
                        "the parts.")

    for name, p in trained.items():  # before the learner's hooks
        p.register_post_accumulate_grad_hook(lambda _, name=name: arrive(name))
    shards = answer(module)
    if not note.holds(isinstance(shards, dict), "odd", "the function returned no dictionary."):
        return
    for i, passes in enumerate(PASSES):
        for some in (shards, reduced, late):
            some.clear()
        module.zero_grad()
        batch = data[rank][i].clone()
        least[:] = least_alive(options, batch, passes)
        after = least[-1]
        with track(module) as tracker:
            with record() as ledger:
                for some in batch.chunk(passes):
                    module.loss(some).backward()
            alive = note.settled(tracker, after + enough + SLACK) - after
        note.talks(ledger, n)
        got = {name: shards.get(p) for name, p in trained.items()}
        missing = [name for name, shard in got.items() if not isinstance(shard, Tensor)]
        if not note.holds(not missing, "odd", f"there is no tensor for {', '.join(missing)}."):
            return
        right = parts(mean_gradients(n, i, passes, tuple(options.items())), rank, n)
        note.equal(got, right, f"step {i + 1}: the part")
        left = sum(p.grad.nbytes for p in trained.values() if p.grad is not None)
        note.holds(left == 0, "freed-late", f"after backward p.grad still holds {left} bytes.")
        if n > 1:
            whole = passes * sum(p.nbytes for p in trained.values())
            note.sent(ledger, {"reduce_scatter"}, carried=(whole, passes * n * enough), all_reduce="all-reduce")
        note.at_most("view", alive, enough + SLACK,
                     "{number:.0f} bytes stay alive after backward; the parts have {most}.")
        note.holds(not late, "freed-late", "".join(late))


MISTAKES["reduce_scatter_gradients"] = {
    "sum": ("The gradient is the mean over the ranks: their sum, divided by their number once.",
            ["join([p.grad], n) / n  ->  join([p.grad], n)", "join([p.grad], n) / n  ->  join([p.grad], n) / n**2"]),
    "own-gradient": ("This is cut out of this rank's own gradient, not out of the mean over the ranks.",
            "dist.reduce_scatter_single(shard, flat)  ->  dist.reduce_scatter_single(shard, flat)\n"
            "shard = flat.chunk(n)[dist.get_rank()].clone()"),
    "wrong-part": ("The mean is right, but this is a different part of it. Rank r keeps part r of the flat gradient.",
            ["join([p.grad], n) / n  ->  torch.cat((join([p.grad], n) / n).chunk(n)[::-1])",
             "join([p.grad], n) / n  ->  (join([p.grad], n) / n).view(-1, n).T.flatten()"]),
    "all-reduce": ("""The result is right, but an all-reduce brings the whole mean to every rank, which throws most of
        it away. It moves twice as much as a reduce-scatter.""",
            "dist.reduce_scatter_single(shard, flat)  ->  dist.all_reduce(flat)\n"
            "shard = flat.chunk(n)[dist.get_rank()].clone()"),
    "freed-late": ("""A whole gradient is still in memory when the next one arrives, or after backward: in p.grad, in a
        list or joined to one tensor. No more than one may be there at a time.""", ["p.grad = None  ->  p.grad.zero_()",
             {"n, shards = dist.get_world_size(), {}": "n, shards, waiting = dist.get_world_size(), {}, []",
              "def arrive(p):": "def late(p):\n"
              "    waiting.append((p, p.grad)); p.grad = None\n"
              "    if len(waiting) == 2:\n"
              "        for q, q.grad in waiting:\n"
              "            arrive(q)\n"
              "        waiting.clear()\n"
              "\n"
              "def arrive(p):",
              "hook(arrive)": "hook(late)"}]),
    "view": ("""The parts are right, but more than the parts stays alive. A slice is a view, and keeps what it was cut
        from.""",
            "dist.reduce_scatter_single(shard, flat)  ->  dist.reduce_scatter_single(shard, flat)\n"
            "shard = flat.chunk(n)[dist.get_rank()].copy_(shard)"),
    "accumulate": ("The gradients of two backward passes in one step have to add up, as they do in p.grad.",
            ["shards[p] = shards[p] + shard if p in shards else shard  ->  shards[p] = shard",
             "shards[p] = shards[p] + shard if p in shards else shard  ->  "
             "shards[p] = (shards[p] + shard) / 2 if p in shards else shard"]),
    "uneven": (UNEVENLY, "F.pad(flat, (0, -len(flat) % n))  ->  flat[: len(flat) // n * n]"),
}


def defaultdict_of_zeros(module):
    n, shards = dist.get_world_size(), defaultdict(lambda: 0)

    def arrive(p):
        parts = [F.pad(t, (0, -(-p.numel() // n) - len(t))) for t in p.grad.flatten().split(-(-p.numel() // n))]
        parts += [torch.zeros_like(parts[0])] * (n - len(parts))
        p.grad, shard = None, torch.empty_like(parts[0])
        dist.reduce_scatter(shard, parts, async_op=True).wait()
        shards[p] = shards[p] + shard / n

    for p in filter(lambda p: p.requires_grad, module.parameters()):
        p.register_post_accumulate_grad_hook(arrive)
    return shards


RIGHT["reduce_scatter_gradients"] = {
    "a defaultdict, a list of parts, the mean afterwards": defaultdict_of_zeros,
    "mean taken by the parts": {
        "join([p.grad], n) / n": "join([p.grad], n)",
        "shards[p] + shard if p in shards else shard": "(shards[p] + shard / n if p in shards else shard / n)",
    },
}

# --- exercise 4: ZeRO-3

USES = (0, 1, 2, 3)  # which weight each layer has
GATHER_CASES = [  # …, width, shape of a batch without its width, frozen weight, uses
    (2, "weights of 40 × 40", 40, (4,), None, USES),
    Case(2, "a frozen layer", (40, (4,), 1, USES), "frozen", FROZEN),
    Case(2, "x of three dimensions", (40, (2, 2), None, USES), "batch-dims"),
    Case(2, "tied weights", (40, (4,), None, (0, 1, 2, 1, 3)), "tied", TIED),
    Case(2, "weights of 39 × 39", (39, (4,), None, USES), "uneven", UNEVEN),
    (3, "all of that together", 40, (2, 2), 1, (0, 1, 2, 2, 3)),
    (1, "all of that together", 39, (2, 2), 1, (0, 1, 2, 2, 3)),
]


def matrices(width: int) -> list[Tensor]:
    """Weights (out, in) of four layers; the first and the last are not square."""
    generator = torch.Generator().manual_seed(width)
    shapes = ((width, width - 2), (width, width), (width, width), (width + 2, width))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) / width**0.5 for shape in shapes]


def stack(x: Tensor, weights, uses, layer=F.linear) -> Tensor:
    for i in uses:
        x = torch.tanh(layer(x, weights[i]))
    return x


@cache
def with_whole_weights(n: int, width: int, batch: tuple, frozen: int | None, uses: tuple) -> list[tuple]:
    """By step: inputs of the ranks, outputs, and mean gradients, in one process with whole weights."""
    generator = torch.Generator().manual_seed(width + n)
    data = [torch.randn(STEPS, *batch, width - 2, generator=generator, dtype=torch.float64) for _ in range(n)]
    weights = [w.requires_grad_(i != frozen) for i, w in enumerate(matrices(width))]
    trained, steps = [i for i in range(len(weights)) if i != frozen], []
    for step in range(STEPS):
        outputs = [stack(x[step], weights, uses) for x in data]
        own = [torch.autograd.grad(y.square().mean(), [weights[i] for i in trained]) for y in outputs]
        mean = {i: sum(gradients) / n for i, gradients in zip(trained, zip(*own, strict=True), strict=True)}
        steps.append(([x[step] for x in data], [y.detach() for y in outputs], mean))
        for i, gradient in mean.items():
            weights[i].data -= gradient
    return steps


@exercise("Exercise 4", cases=GATHER_CASES, passed="equal to one process to 1e-12, and no whole weight stays alive.")
def gathered_layer(note, answer, width, batch, frozen, uses):
    rank, n, whole = dist.get_rank(), dist.get_world_size(), matrices(width)
    shards = nn.ParameterList(nn.Parameter(part(w, rank, n).clone(), i != frozen) for i, w in enumerate(whole))
    layers = [(shard, tuple(w.shape)) for shard, w in zip(shards, whole, strict=True)]
    own, one = sum(shard.nbytes for shard in shards), min(w.nbytes for w in whole) if n > 1 else float("inf")
    size = [8 * n * share(w.numel(), n) for w in whole]
    trained = [i for i in uses if i != frozen]
    every, first = sum(size[i] for i in uses), sum(size[i] for i in uses[1:])  # the first input needs no gradient
    for x, outputs, mean in with_whole_weights(n, width, batch, frozen, uses):
        shards.zero_grad()
        with track(shards) as tracker:
            with record() as forward:
                y = stack(x[rank].clone(), layers, uses, lambda h, weight: answer(h, *weight))
            kept, output = note.settled(tracker, own + one) - own, y.detach().clone()
            with record() as backward:
                if y.requires_grad:
                    y.square().mean().backward()
            del y
            expected = own + sum(p.grad.nbytes for p in shards if p.grad is not None)
            left = note.settled(tracker, expected + one) - expected
        note.talks([*forward, *backward], n)
        note.equal(output, outputs[rank], "the output of the layers")
        got = {f"weight {i}": shards[i].grad for i in sorted(mean, reverse=True)}
        missing = [name for name, gradient in got.items() if gradient is None]
        key = "no-gradient" if f"weight {uses[-1]}" in missing else "input-gradient"
        if not note.holds(not missing, key, f"the shard of {', '.join(missing)} has no gradient."):
            return
        right = {f"weight {i}": part(mean[i], rank, n) for i in sorted(mean, reverse=True)}
        note.equal({k: v.clone() for k, v in got.items()}, right, "the gradient of the shard")
        with torch.no_grad():
            for p in shards:
                p -= 0 if p.grad is None else p.grad
        if n == 1:
            continue
        note.sent([*forward, *backward], {"all_gather", "reduce_scatter"}, all_reduce="all-reduce")
        note.holds(kept < one, "weight-kept",
                   f"{kept:.0f} bytes are alive after forward, besides the shards; one weight has {one}.")
        note.holds(left < one, "weight-kept", f"{left:.0f} bytes are alive after backward, besides the shards and "
                   f"their gradients; one weight has {one}.")
        kinds = {op: [e for e in backward if e.op == op] for op in ("all_gather", "reduce_scatter")}
        note.sent([e for e in forward if e.op == "all_gather"], carried=(every, every))
        again = {"not_distributed": "weight-kept", "too_few_bytes": "weight-kept"}
        note.sent(kinds["all_gather"], carried=(first, every), **again)
        note.sent(kinds["reduce_scatter"], carried=(sum(size[i] for i in set(trained)), sum(size[i] for i in trained)))


MISTAKES["gathered_layer"] = {
    "no-gradient": ("""After backward a shard has no gradient. Autograd does not look into collectives, so the layer has
        to define its own backward.""",
            {"return Gathered.apply(x, shard, shape)": "return x @ gather(shard, shape).T"}),
    "input-gradient": ("""The gradient of x is missing or wrong, so the layers before this one learn nothing or the
        wrong thing.""", ["return dy @ gather(shard, ctx.shape), part, None  ->  return None, part, None",
             "return dy @ gather(shard, ctx.shape), part, None  ->  "
             "return dy @ gather(shard, ctx.shape) / n, part, None"]),
    "order": ("""The output belongs to a weight whose elements are in the wrong places. Rank r has part r of the flat
        weight; only the joined parts get the shape, (out, in), and y = x Wᵀ, as in nn.Linear.""",
            ["return flat[  ->  flat = torch.cat(flat.chunk(dist.get_world_size())[::-1])\nreturn flat[",
             "flat[: shape[0] * shape[1]].view(shape)  ->  flat[: shape[0] * shape[1]].view(shape[::-1]).T"]),
    "sum": ("""The gradient of a shard is the mean over the ranks: the sum over the batches of all of them, divided by
        their number once.""", ["join([dw], n) / n  ->  join([dw], n)", "join([dw], n) / n  ->  join([dw], n) / n**2",
             "dist.reduce_scatter_single(part, join([dw], n) / n)  ->  "
             "part = (join([dw], n) / n).chunk(n)[dist.get_rank()].clone()"]),
    "weight-kept": ("""Something whole stays alive: a weight from forward to backward, so that backward need not gather
        it again, or a gradient after backward. A slice is a view, and keeps what it was cut from; an attribute or a
        list can keep a tensor too.""",
            [{"ctx.save_for_backward(x, shard)": "weight = gather(shard, shape)\n"
             "ctx.save_for_backward(x, shard, weight)",
             "return x @ gather(shard, shape).T": "return x @ weight.T",
             "(x, shard), n,": "(x, shard, weight), n,",
             "return dy @ gather(shard, ctx.shape), part, None": "return dy @ weight, part, None"},
             "dist.reduce_scatter_single(part, join([dw], n) / n)  ->  flat = join([dw], n) / n\n"
             "dist.reduce_scatter_single(part, flat)\n"
             "part = flat.chunk(n)[dist.get_rank()].copy_(part)"]),
    "all-reduce": ("""The result is right, but an all-reduce brings all of a tensor to every rank. It moves twice as
        much as a reduce-scatter or an all-gather.""",
            "dist.reduce_scatter_single(part, join([dw], n) / n)  ->  flat = join([dw], n) / n\n"
            "dist.all_reduce(flat)\n"
            "part = flat.chunk(n)[dist.get_rank()].clone()"),
    "batch-dims": ("""This is right until x has more than two dimensions. The gradient of the weight is a sum over all
        of them but the last.""", "dy.flatten(0, -2).T @ x.flatten(0, -2)  ->  dy.T @ x"),
    "uneven": (UNEVENLY, "join([dw], n) / n  ->  dw.flatten() / n"),
}


RIGHT["gathered_layer"] = {
    "kept by hand, a bare parameter gathered from its list of parts": {
        "ctx.save_for_backward(x, shard)": "ctx.kept = x, shard", "ctx.saved_tensors": "ctx.kept",
        "dist.all_gather_single(flat, shard.detach())": "dist.all_gather(list(flat.split(len(shard))), shard.detach())",
    },
    "einsum, and a list of parts": {
        "dy.flatten(0, -2).T @ x.flatten(0, -2)": "torch.einsum('...o,...i->oi', dy, x)",
        "reduce_scatter_single(part, join([dw], n) / n)": "reduce_scatter(part, list((join([dw], n) / n).chunk(n)))",
    },
}

# --- on paper

MISTAKES["state_bytes"] = {
    "stage-order": ("""Which part does stage 1 divide, and which one does each later stage add to it? The stages follow
        each other from the largest part to the parameters.""", ["(3, 2, 1)  ->  (1, 1, 1)", "(3, 2, 1)  ->  (4, 4, 4)",
             "stage >= first  ->  stage == first", "(3, 2, 1)  ->  (1, 2, 3)", "(3, 2, 1)  ->  (3, 1, 2)"]),
    "limits": ("""Being 4 or 8 times smaller is the limit for ever more ranks. With N of them, 1/N of what is divided is
        still there.""", ["ranks if  ->  float('inf') if",
             {"(ranks if stage >= first else 1)": "(1, 4, 8, ranks)[stage]"}]),
    "no-master": ("""In mixed precision the optimizer steps an fp32 copy of the weights, with 4 bytes per parameter. In
        fp32 the weights are their own master copy.""", ['master = 0 if precision == "fp32" else 4  ->  master = 0',
             'master = 0 if precision == "fp32" else 4  ->  master = 4']),
    "master-place": ("""The fp32 master weights are the optimizer's: counted with its states, and divided along with
        them from stage 1 on.""",
            [{"p * parameter,": "p * (parameter + master),", "(master + 4 * states)": "4 * states"},
             "o * (master + 4 * states)  ->  o * 4 * states + parameters / 1e9 * master"]),
    "gradients-half": ("""In plain 'mixed' precision gradients have 2 bytes, like the parameters. They have 4 where the
        name says so.""", ['2 if precision == "mixed" else 4  ->  parameter',
             '2 if precision == "mixed" else 4  ->  4']),
    "states-half": ("The optimizer's states are fp32 here, even where the parameters are bf16.",
            "4 * states  ->  parameter * states"),
    "one-state": ("""The number of states depends on the optimizer: Adam keeps two for each parameter, momentum one,
        plain SGD none.""", ['"adam": 2  ->  "adam": 1', "[optimizer]  ->  ['adam']"]),
    "bytes": ("The docstring asks for GB: 10⁹ bytes, and not 2³⁰.", ["1e9  ->  1", "1e9  ->  2**30"]),
}
MISTAKES["largest_model"] = {
    "parameters": ("""The docstring asks for layers of 12·width² parameters each. The embedding, vocabulary · width, is
        part of the model besides, and of its states.""", ["(free / each - embedding) // layer  ->  free / each",
             "free / each - embedding  ->  free / each"]),
    "round": ("Return a whole number of layers: one that fits only in part does not fit, and 0 if none does.",
            ["int((free / each - embedding) // layer)  ->  -int((embedding - free / each) // layer)",
             "int((free / each - embedding) // layer)  ->  (free / each - embedding) / layer",
             "max(0, int((free / each - embedding) // layer))  ->  int((free / each - embedding) // layer)"]),
    "reserve-ignored": ("On every GPU, reserved_gb is not free for model states. ZeRO does not divide activations.",
            ["gpu_gb - reserved_gb  ->  gpu_gb", "gpu_gb - reserved_gb  ->  gpu_gb - reserved_gb / ranks"]),
    "gib": ("1 GB = 10⁹ bytes, not 2³⁰.", "1e9  ->  2**30"),
    "pooled": ("""The memory of all GPUs is treated as one. But every GPU has its own reserve and its own gathered unit,
        and before stage 3 it holds all the parameters.""", ["ranks if stage >= first else 1  ->  ranks",
             {"ranks if stage >= first else 1": "1", "gpu_gb - reserved_gb": "ranks * gpu_gb - reserved_gb"}]),
    "not-cumulative": ("""Stage 0 divides nothing, 1 the optimizer's part, 2 the gradients' as well, 3 all three. What
        is divided does not vanish: with N ranks, 1/N of it is left.""", ["ranks if stage >= first else 1  ->  1",
             "ranks if stage >= first else 1  ->  1e18 if stage >= first else 1", "stage >= first  ->  stage == first",
             "(12, 1))  ->  (12, 0))"]),
    "no-gathered": ("""At stage 3, and there only, a unit is gathered while it is used. Its bytes have to be free, too:
        whole, on every rank.""", ["if stage == 3 else 0  ->  * 0",
             "if stage == 3 else 0  ->  / ranks if stage == 3 else 0", "if stage == 3 else 0  ->  "]),
    "no-gradient": ("""There must be room for the largest unit, which may be the embedding. In backward its whole
        gradient is there beside its gathered parameters, with 2 bytes for each of them as well.""",
            ["4 * max(  ->  2 * max(", "max(layer, embedding)  ->  layer"]),
}


def of_the_package(parameters, stage, ranks, precision, optimizer):
    memory = model_states(parameters, stage=stage, ranks=ranks, precision=precision, optimizer=optimizer)
    return memory.parameters / 1e9, memory.gradients / 1e9, memory.optimizer / 1e9


def searches_upwards(gpu_gb, reserved_gb, ranks, stage, width, vocabulary):
    layer, embedding, layers = 12 * width**2, vocabulary * width, 0
    size = of_the_package(1e9, stage, ranks, "mixed", "adam")
    room = (gpu_gb - reserved_gb) * 1e9 - (4 * max(layer, embedding) if stage == 3 else 0)
    while sum(size) * ((layers + 1) * layer + embedding) <= room:
        layers += 1
    return layers


RIGHT["state_bytes"] = {
    "an array": "return p * parameter, g * gradient, o * (master + 4 * states)  ->  "
                "return torch.tensor([p * parameter, g * gradient, o * (master + 4 * states)])",
    "of the package": of_the_package,
}
RIGHT["largest_model"] = {
    "searches upwards": searches_upwards,
    "a whole float": "max(0, int((free / each - embedding) // layer))  ->  "
                     "max(0.0, (free / each - embedding) // layer)",
}

state_bytes = paper(
    "Exercise 1", answers.state_bytes, MISTAKES["state_bytes"], cases=[
        (7.5e9, 1, 64, "fp32", "adam"), (7.5e9, 2, 64, "mixed", "momentum"), (7.5e9, 3, 64, "mixed", "adam"),
        (1.5e9, 0, 8, "fp32", "momentum"), (6.7e9, 2, 16, "mixed, fp32 gradients", "adam"),
        (1.3e10, 1, 4, "mixed", "sgd"), (3e8, 3, 2, "fp32", "adam"),
    ],
    units=["GB of parameters", "GB of gradients", "GB of the optimizer"],
)
largest_model = paper(
    "Exercise 5", answers.largest_model, MISTAKES["largest_model"], cases=[
        (80, 20, 64, 3, 4096, 128256), (80, 20, 64, 2, 4096, 128256), (80, 20, 64, 1, 4096, 128256),
        (80, 30, 16, 3, 8192, 128256), (24, 6, 8, 3, 2048, 128256), (16, 4, 4, 0, 1024, 50257),
        (180, 60, 256, 3, 16384, 128256), (16, 14, 2, 0, 4096, 128256),
    ],
    units=["layers"], tolerance=1e-9, allowed=lambda gpu_gb, reserved_gb, *_: gpu_gb > reserved_gb,
)
