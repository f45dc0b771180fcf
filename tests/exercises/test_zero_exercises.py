"""The exercises on ZeRO: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercise_cases import ExerciseTests, hangs
from torch import nn

from course_utils.memory import model_states
from lessons.zero import check as zero

pytestmark = pytest.mark.guard(60)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

BEYOND_THE_LEDGER = "dist.group.WORLD._get_backend(torch.device('cpu')).allreduce"
CUT_OFF = "F.pad(flat, (0, -len(flat) % n))  ->  flat[: len(flat) // n * n]"

# ------------------------------------------------------------------------------------------------ bytes on paper


def of_the_package(parameters, stage, ranks, precision, optimizer):
    memory = model_states(parameters, stage=stage, ranks=ranks, precision=precision, optimizer=optimizer)
    return memory.parameters / 1e9, memory.gradients / 1e9, memory.optimizer / 1e9


GIGABYTES = "return p * parameter, g * gradient, o * (master + 4 * states)"
WRONG["state_bytes"] = {
    "number": f"{GIGABYTES}  ->  return sum([p * parameter, g * gradient, o * (master + 4 * states)])",
    "numbers": "states = {  ->  master = 2 if precision == 'mixed, fp32 gradients' else master\nstates = {",
    "typed": f"{GIGABYTES}  ->  return 30, 30, 60 / 64",
    "error": "(3, 2, 1))  ->  (3, 2))",
}
RIGHT["state_bytes"] = {
    "an array": f"{GIGABYTES}  ->  return torch.tensor([p * parameter, g * gradient, o * (master + 4 * states)])",
    "of the package": of_the_package,
}

# ------------------------------------------------------------------------------------------------ ZeRO-1

BROADCAST = "dist.broadcast(p.detach(), src=0)"
TRAINED = "trained = [p for p in module.parameters() if p.requires_grad]"
PART = "join(trained, n).chunk(n)[rank].clone()"
GRADIENT = "join([p.grad for p in trained], n).chunk(n)[rank].clone()"
MAKE = "make_optimizer([part])"
GATHER = "dist.all_gather_single(flat, part.detach())"
WRITE = "nn.utils.vector_to_parameters(flat, trained)"
MOMENTUM = "torch.optim.SGD({}, lr=0.2, momentum=0.9)"
HIDDEN = f"part.detach().copy_({PART})"
UNTIED = """for layer in module.modules():
    for name, p in list(layer.named_parameters(recurse=False)):
        setattr(layer, name, nn.Parameter(p.detach().clone(), p.requires_grad))"""
WRONG["shard_optimizer"] = {
    "all-states": {
        MAKE: "make_optimizer(trained)",
        f"part.grad = {GRADIENT}": "pass",
        GATHER: f"dist.all_gather_single(flat, {PART})",
    },
    "whole-parameters": {
        MAKE: "make_optimizer(trained[rank::n])",
        f"part.grad = {GRADIENT}": "pass",
        GATHER: "for i, p in enumerate(trained):\n    dist.broadcast(p.detach(), src=i % n)",
        WRITE: "pass",
    },
    "not-distributed": [
        {BROADCAST: "pass", GATHER: "flat = join(trained, n)"},
        {GATHER: f"flat.zero_().chunk(n)[rank].copy_(part.detach())\n{BEYOND_THE_LEDGER}([flat]).wait()"},
    ],
    "no-broadcast": [
        f"{BROADCAST}  ->  pass",
        "in module.parameters():  ->  in (p for p in module.parameters() if p.requires_grad):",
    ],
    "replaced": f"{WRITE}  ->  {WRITE}\n{UNTIED}",
    "step": "return step  ->  pass",
    "make-optimizer": [
        f"{MAKE}  ->  {MOMENTUM.format('[part]')}",
        f"optimizer = {MAKE}  ->  {MAKE}\noptimizer = {MOMENTUM.format('[part]')}",
    ],
    "new-optimizer": f"optimizer.step()  ->  {MAKE}.step()",
    "not-updated": f"part.grad = {GRADIENT}  ->  pass",
    "not-gathered": {GATHER: "flat = join(trained, n)\nflat.chunk(n)[rank].copy_(part.detach())"},
    "order": f"{WRITE}  ->  {WRITE.replace('flat', 'torch.cat(flat.chunk(n)[::-1])')}",
    "averaged-again": [f"{GRADIENT}  ->  {GRADIENT} / n", f"{GRADIENT}  ->  {GRADIENT} * n"],
    "whole-copy": [
        f"{PART}  ->  join(trained, n).chunk(n)[rank]",
        f"{WRITE}  ->  {WRITE}\nstep.weights = flat.numpy().copy()",
        {
            f"optimizer = {MAKE}": f"optimizer = {MAKE}\nhidden = {MOMENTUM.format('trained')}",
            "optimizer.step()": f"optimizer.step()\nhidden.step()\n{HIDDEN}",
        },
    ],
    "other-calls": f"{GATHER}  ->  flat.zero_().chunk(n)[rank].copy_(part.detach())\ndist.all_reduce(flat)",
    "too-many-calls": f"{GATHER}  ->  parts = [list(piece.tensor_split(2)) for piece in flat.chunk(n)]\n"
    "for i, half in enumerate(part.detach().tensor_split(2)):\n    dist.all_gather([p[i] for p in parts], half)",
    "too-many-bytes": f"{GATHER}  ->  both = part.new_empty(2 * len(flat))\n"
    "dist.all_gather_single(both, torch.cat([part.detach(), part.grad]))\nflat = both.view(n, 2, -1)[:, 0].flatten()",
    "uneven": [CUT_OFF, f"{TRAINED}  ->  {TRAINED}\nassert sum(p.numel() for p in trained) % n == 0"],
    "frozen": [
        f"{TRAINED}  ->  trained = list(module.parameters())",
        {
            TRAINED: "trained = list(module.parameters())",
            "[p.grad for p in trained]": "[torch.zeros_like(p) if p.grad is None else p.grad for p in trained]",
        },
    ],
    "tied": "for p in module.parameters() if  ->  for _, p in module.named_parameters(remove_duplicate=False) if",
    "leftover": f"{GRADIENT}  ->  {GRADIENT} + (0 if part.grad is None else part.grad)",
    "float32": {
        GATHER: "dist.all_gather_single(flat := flat.float(), part.detach().float())",
        WRITE: WRITE.replace("flat", "flat.double()"),
    },
    "only-two-ranks": f"{GATHER}  ->  {GATHER}\nflat[2 * len(part) :] = 0",
    "hang": hangs("return step  ->  return dist.barrier if rank else step"),
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


class CopiesNoWholeGradient:
    """Cuts the pieces of its part out of each parameter, and its gradient's, without joining them all."""

    def __init__(self, module, make_optimizer):
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        for p in module.parameters():
            dist.broadcast(p.detach(), src=0)
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.size = -(-sum(p.numel() for p in self.trained) // self.n)
        self.part = self.cut(self.trained).requires_grad_()
        self.optimizer = make_optimizer([self.part])

    def cut(self, tensors):
        own, start = tensors[0].new_zeros(self.size), -self.rank * self.size
        for tensor in tensors:
            first, end = max(start, 0), min(start + tensor.numel(), self.size)
            if first < end:
                own[first:end] = tensor.detach().flatten()[first - start : end - start]
            start += tensor.numel()
        return own

    def __call__(self):
        self.part.grad = self.cut([p.grad for p in self.trained])
        self.optimizer.step()
        parts = [torch.empty_like(self.part) for _ in range(self.n)]
        dist.all_gather(parts, self.part.detach(), async_op=True).wait()
        flat, start = torch.cat(parts), 0
        for p in self.trained:
            p.detach().copy_(flat[start : start + p.numel()].view_as(p))
            p.grad, start = None, start + p.numel()


RIGHT["shard_optimizer"] = {
    "parameters are views of one flat tensor": parameters_are_views_of_one_flat_tensor,
    "a class that copies no whole gradient": CopiesNoWholeGradient,
    "parameters in reverse order": f"{TRAINED}  ->  {TRAINED}[::-1]",
    "rank r has every n-th element": {
        PART: "join(trained, n)[rank::n].clone()",
        GRADIENT: "join([p.grad for p in trained], n)[rank::n].clone()",
        WRITE: WRITE.replace("flat", "flat.view(n, -1).T.flatten()"),
    },
    "a part without nn.Parameter, a list, asynchronous": {
        f"nn.Parameter({PART})": f"{PART}.requires_grad_()",
        GATHER: "dist.all_gather(list(flat.chunk(n)), part.detach(), async_op=True).wait()",
    },
}

# ------------------------------------------------------------------------------------------------ ZeRO-2

SCATTER = "dist.reduce_scatter_single(shard, flat)"
MEAN = "join([p.grad], n) / n"
STORE = "shards[p] = shards[p] + shard if p in shards else shard"
OWN = "flat.chunk(n)[dist.get_rank()]"


def queued(put, take, full="sum(q.requires_grad for q in module.parameters())"):
    """An edit: what ``put`` says waits in a list until there are ``full`` of them."""
    waiting = f"""def late(p):
    {put}
    if len(waiting) == {full}:
        for {take}
            arrive(q)
        waiting.clear()

def arrive(p):"""
    return {
        "n, shards = dist.get_world_size(), {}": "n, shards, waiting = dist.get_world_size(), {}, []",
        "def arrive(p):": waiting,
        "hook(arrive)": "hook(late)",
    }


HIDE, SHOW = "waiting.append((p, p.grad)); p.grad = None", "q, q.grad in waiting:"
WRONG["reduce_scatter_gradients"] = {
    "all-reduce": f"{SCATTER}  ->  dist.all_reduce(flat)\nshard = {OWN}.clone()",
    "other-calls": f"{SCATTER}  ->  "
    "for r, part in enumerate(flat.chunk(n)):\n    dist.reduce(part, dst=r)\n"
    f"shard = {OWN}.clone()",
    "not-distributed": f"{SCATTER}  ->  shard = {OWN}.clone()",
    "too-few-bytes": f"{SCATTER}  ->  dist.reduce_scatter_single(shard[:1].clone(), flat[:n].clone())\n"
    f"{BEYOND_THE_LEDGER}([flat]).wait()\nshard = {OWN}.clone()",
    "own-gradient": f"{SCATTER}  ->  {SCATTER}\nshard = {OWN}.clone()",
    "shards": ["return shards  ->  pass", {STORE: STORE.replace("shards[p] =", "shards[str(id(p))] =")}],
    "sum": f"{MEAN}  ->  join([p.grad], n)",
    "divided-twice": f"{MEAN}  ->  {MEAN}**2",
    "wrong-part": [
        f"{MEAN}  ->  torch.cat((join([p.grad], n) / n).chunk(n)[::-1])",
        f"{MEAN}  ->  (join([p.grad], n) / n).view(-1, n).T.flatten()",
    ],
    "whole": f"{SCATTER}  ->  dist.all_reduce(flat)\nshard = flat",
    "padding": "F.pad(flat, (0, -len(flat) % n))  ->  F.pad(flat, (0, -len(flat) % n), value=1.0)",
    "grads-kept": "p.grad = None  ->  p.grad.zero_()",
    "freed-late": [queued(HIDE, SHOW), queued(HIDE, SHOW, full="2")],
    "view": f"{SCATTER}  ->  {SCATTER}\nshard = {OWN}.copy_(shard)",
    "accumulate": [
        f"{STORE}  ->  shards[p] = shard",
        f"{STORE}  ->  {STORE.replace('shards[p] + shard', '(shards[p] + shard) / 2')}",
    ],
    "leftover": {
        "n, shards = dist.get_world_size(), {}": "n, shards, totals = dist.get_world_size(), {}, {}",
        STORE: "shards[p] = totals[p] = totals[p] + shard if p in totals else shard",
    },
    "uneven": CUT_OFF,
    "frozen": "if p.requires_grad:  ->  if True:",
    "tied": "for p in module.parameters():  ->  for _, p in module.named_parameters(remove_duplicate=False):",
    "float32": {MEAN: f"({MEAN}).float()", SCATTER: f"{SCATTER}\nshard = shard.double()"},
    "too-many-bytes": f"{SCATTER}  ->  {SCATTER}\n{SCATTER}",
    "value": {SCATTER: SCATTER.replace("flat)", "flat * 3)")},
    "only-two-ranks": f"{MEAN}  ->  join([p.grad], n) / min(n, 2)",
    "hang": hangs(f"{SCATTER}  ->  dist.barrier() if dist.get_rank() else {SCATTER}"),
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
    "waits for what it started": f"{SCATTER}  ->  "
    "request = dist.reduce_scatter_tensor(shard, flat, async_op=True)\nrequest.wait()",
    "mean taken by the parts": {MEAN: "join([p.grad], n)", STORE: STORE.replace("+ shard", "+ shard / n") + " / n"},
    "frees the gradient in the end": {"p.grad = None": "pass", STORE: f"{STORE}\np.grad = None"},
}

# ------------------------------------------------------------------------------------------------ ZeRO-3

SAVE = "ctx.save_for_backward(x, shard)"
FORWARD = "return x @ gather(shard, shape).T"
AGAIN = "return dy @ gather(shard, ctx.shape), part, None"
PRODUCT = "dy.flatten(0, -2).T @ x.flatten(0, -2)"
REDUCED = "join([dw], n) / n"
SCATTERED = f"dist.reduce_scatter_single(part, {REDUCED})"
APPLY = "return Gathered.apply(x, shard, shape)"
ALL_GATHER = "dist.all_gather_single(flat, shard.detach())"
GATHERED = "flat[: shape[0] * shape[1]].view(shape)"
WITHOUT_FUNCTION = {APPLY: "return x @ gather(shard, shape).T"}
WRONG["gathered_layer"] = {
    "weight-kept": [
        {
            SAVE: "weight = gather(shard, shape)\nctx.save_for_backward(x, shard, weight)",
            FORWARD: "return x @ weight.T",
            "(x, shard), n,": "(x, shard, weight), n,",
            AGAIN: "return dy @ weight, part, None",
        },
        {
            FORWARD: "weight = gather(shard, shape)\nctx.weight = weight.numpy().copy()\nreturn x @ weight.T",
            AGAIN: "return dy @ torch.from_numpy(ctx.weight), part, None",
        },
    ],
    "gradient-kept": f"{SCATTERED}  ->  flat = {REDUCED}\ndist.reduce_scatter_single(part, flat)\n"
    f"part = {OWN}.copy_(part)",
    "no-gradient": WITHOUT_FUNCTION,
    "not-distributed": WITHOUT_FUNCTION
    | {ALL_GATHER: "flat.zero_().chunk(dist.get_world_size())[dist.get_rank()].copy_(shard.detach())"},
    "not-gathered-again": f"{AGAIN}  ->  "
    "own = F.pad(shard, (0, (n - 1) * len(shard)))[: ctx.shape[0] * ctx.shape[1]]\n"
    "return dy @ own.view(ctx.shape), part, None",
    "input-gradient": [f"{AGAIN}  ->  return None, part, None", f"{AGAIN}  ->  {AGAIN.replace('),', ') / n,')}"],
    "order": [
        f"return {GATHERED}  ->  flat = torch.cat(flat.chunk(dist.get_world_size())[::-1])\nreturn {GATHERED}",
        f"return {GATHERED}  ->  flat = flat.view(dist.get_world_size(), -1).T.flatten()\nreturn {GATHERED}",
    ],
    "transposed": f"{GATHERED}  ->  {GATHERED.replace('(shape)', '(shape[::-1]).T')}",
    "sum": f"{REDUCED}  ->  join([dw], n)",
    "divided-twice": f"{REDUCED}  ->  {REDUCED}**2",
    "own-gradient": f"{SCATTERED}  ->  part = ({REDUCED}).chunk(n)[dist.get_rank()].clone()",
    "wrong-part": f"{REDUCED}  ->  ({REDUCED}).view(n, -1).roll(1, 0).flatten()",
    "all-reduce": f"{SCATTERED}  ->  flat = {REDUCED}\ndist.all_reduce(flat)\npart = {OWN}.clone()",
    "other-calls": f"{ALL_GATHER}  ->  for r, piece in enumerate(flat.chunk(dist.get_world_size())):\n"
    "    dist.broadcast(piece.copy_(shard.detach()), src=r)",
    "too-many-bytes": f"{AGAIN}  ->  gather(shard, ctx.shape)\n{AGAIN}",
    "too-few-bytes": [
        f"{ALL_GATHER}  ->  n, rank = dist.get_world_size(), dist.get_rank()\n"
        "dist.all_gather_single(flat[:n].clone(), shard.detach()[:1].clone())\n"
        f"flat.zero_().chunk(n)[rank].copy_(shard.detach())\n{BEYOND_THE_LEDGER}([flat]).wait()",
        f"{SCATTERED}  ->  flat = {REDUCED}\ndist.reduce_scatter_single(flat[:1].clone(), flat[:n].clone())\n"
        f"{BEYOND_THE_LEDGER}([flat]).wait()\npart = {OWN}.clone()",
    ],
    "batch-dims": f"{PRODUCT}  ->  dy.T @ x",
    "uneven": f"{REDUCED}  ->  dw.flatten() / n",
    "frozen": "if ctx.needs_input_grad[1]:  ->  if True:",
    "tied": f"{SCATTERED}  ->  {SCATTERED}\nshard.grad, part = part, None",
    "float32": {
        "shard.new_empty(dist.get_world_size() * len(shard))": "torch.empty(dist.get_world_size() * len(shard))",
        ALL_GATHER: "dist.all_gather_single(flat, shard.detach().float())",
        GATHERED: f"{GATHERED}.double()",
    },
    "only-two-ranks": f"{REDUCED}  ->  join([dw], n) / min(n, 2)",
    "hang": hangs(
        {
            SCATTERED: "dist.barrier()",
            AGAIN: f"if dist.get_rank() == 0:\n    return dy @ shard.new_zeros(ctx.shape), part, None\n{AGAIN}",
        }
    ),
}


def gathered(shard, shape):
    flat = shard.new_empty(dist.get_world_size() * len(shard))
    dist.all_gather_single(flat, shard.detach())
    return flat[: shape[0] * shape[1]].view(shape)


def scattered(gradient, numel):
    part, n = gradient.new_empty(numel), dist.get_world_size()
    dist.reduce_scatter_single(part, F.pad(gradient.flatten(), (0, n * numel - gradient.numel())) / n)
    return part


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, shape):
        ctx.numel = len(shard)
        return gathered(shard, shape)

    @staticmethod
    def backward(ctx, gradient):
        return scattered(gradient, ctx.numel), None


def hooks_on_what_autograd_saves(x, shard, shape):
    weight = Gather.apply(shard, shape)
    place = weight.data_ptr()

    def pack(t):
        return (t.shape, t.stride()) if t.data_ptr() == place else t

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else gathered(shard, shape).as_strided(*packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return F.linear(x, weight)


def forward_is_run_again(x, shard, shape):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x: F.linear(x, Gather.apply(shard, shape)), x, use_reentrant=False)


RIGHT["gathered_layer"] = {
    "hooks on what autograd saves": hooks_on_what_autograd_saves,
    "forward is run again": forward_is_run_again,
    "no gather for an x without gradient": f"{AGAIN}  ->  "
    "return dy @ gather(shard, ctx.shape) if ctx.needs_input_grad[0] else None, part, None",
    "einsum, and a list of parts": {
        PRODUCT: "torch.einsum('...o,...i->oi', dy, x)",
        SCATTERED: f"dist.reduce_scatter(part, list(({REDUCED}).chunk(n)))",
        ALL_GATHER: "dist.all_gather(list(flat.chunk(dist.get_world_size())), shard.detach())",
    },
}

# ------------------------------------------------------------------------------------------------ what fits

LAYERS = "return max(0, int((free / each - embedding) // layer))"
WRONG["largest_model"] = {
    "typed": f"{LAYERS}  ->  return 1147",
    "numbers": f"{LAYERS}  ->  return max(0, int((free // each - embedding) // layer - 1))",
    "number": f"{LAYERS}  ->  return None",
}


def searches_upwards(gpu_gb, reserved_gb, ranks, stage, width, vocabulary):
    layer, embedding, layers = 12 * width**2, vocabulary * width, 0
    size = of_the_package(1e9, stage, ranks, "mixed", "adam")
    room = (gpu_gb - reserved_gb) * 1e9 - (4 * max(layer, embedding) if stage == 3 else 0)
    while sum(size) * ((layers + 1) * layer + embedding) <= room:
        layers += 1
    return layers


RIGHT["largest_model"] = {
    "searches upwards": searches_upwards,
    "a whole float": f"{LAYERS}  ->  return max(0.0, (free / each - embedding) // layer)",
}


class TestZero(ExerciseTests):
    checks, WRONG, RIGHT = zero, WRONG, RIGHT

    def test_refusals_name_the_bytes_that_are_too_many(self):
        def text(exercise, hint, number=1):
            return str(self.refusal(exercise, self.wrong(exercise, hint, number)))

        start = "Exercise 2, 2 ranks, a plain model, momentum, rank 0: step 1: the optimizer's states have 1776 bytes"
        assert text("shard_optimizer", "all-states").startswith(f"{start}; a share has 888.")
        kept = text("gathered_layer", "weight-kept")
        assert re.search(r"\d+ bytes are alive after forward, .* one weight has 12160\.", kept)
        late = text("reduce_scatter_gradients", "freed-late", 2)
        assert re.search(r"step 1: as the gradient of last\.\w+ arrives, 192 bytes more are alive than it and", late)
