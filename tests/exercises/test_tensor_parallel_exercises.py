"""The exercises on tensor parallelism: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercise_cases import ExerciseTests, hangs

from course_utils.check.compare import listed
from course_utils.check.edits import edited_function
from lessons.tensor_parallel import check as tensor_parallel

pytestmark = pytest.mark.guard(60)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

RANK, RANKS = "dist.get_rank()", "dist.get_world_size()"
G = "with_backward(summed, lambda dy: dy)"
F_BACKWARD = "x.view_as(x), summed)"
HOOK = "x.register_hook(summed)\n"
G_BACKWARD = "lambda dy: dy  ->  summed"  # g sums the gradient as well
G_MEAN = f"{G}  ->  with_backward(lambda x: summed(x) / {RANKS}, lambda dy: dy)"
F_MEAN = f"{F_BACKWARD}  ->  x.view_as(x), lambda dy: summed(dy) / {RANKS})"
G_REDUCES_TWICE = f"lambda dy: dy  ->  lambda dy: summed(dy) / {RANKS}"
G_GATHERS = {
    f"return {G}(x)": f"""def gathered_sum(y):
    parts = [torch.empty_like(y) for _ in range({RANKS})]
    dist.all_gather(parts, y.contiguous())
    return sum(parts)

return with_backward(gathered_sum, lambda dy: dy)(x)"""
}
BEYOND_THE_LEDGER = "dist.group.WORLD._get_backend(torch.device('cpu')).allreduce([y]).wait()"
CONJUGATES = {"g-backward": G_BACKWARD, "average": [G_MEAN, F_MEAN], "other-calls": G_GATHERS}

# ------------------------------------------------------------------------------------------------ MLP

MLP = "g(F.linear(inner, down)) + down_bias"
INNER = "inner = F.gelu(F.linear(f(x), up, up_bias))"
WRONG["column_row_mlp"] = CONJUGATES | {
    "no-f": "F.linear(f(x)  ->  F.linear(x",
    "no-g": f"{MLP}  ->  F.linear(inner, down, down_bias)",
    "not-distributed": {"f(x), up,": "x, up,", MLP: "F.linear(inner, down, down_bias)"},
    "bias": f"{MLP}  ->  g(F.linear(inner, down, down_bias))",
    "bias-gradient": [
        f"{MLP}  ->  g(F.linear(inner, down, None if {RANK} else down_bias))",
        f"{MLP}  ->  g(F.linear(inner, down, down_bias / {RANKS}))",
    ],
    "weights-reduced": "f(x), up, up_bias  ->  f(x), f(up), f(up_bias)",
    "residual": {INNER: HOOK + INNER.replace("f(x)", "x")},
    "no-gradient": "f(x), up, up_bias  ->  f(x), up.detach(), up_bias",
    "too-many-calls": [
        f"{INNER}  ->  {INNER}\nm = inner.shape[-1]\nbefore = m * {RANK}\n"
        f"inner = g(F.pad(inner, (before, m * {RANKS} - m - before)))[..., before : before + m]",
        f"{F_BACKWARD}  ->  x.view_as(x), lambda dy: summed(summed(dy)) / {RANKS})",
    ],
    "too-few-bytes": {"dist.all_reduce(y)": f"{BEYOND_THE_LEDGER}\ndist.all_reduce(y[:1].clone())"},
    "float32": f"{MLP}  ->  g(F.linear(inner, down).float()).double() + down_bias",
    "shape": f"{MLP}  ->  g(inner)",
    "value": 'up, up_bias))  ->  up, up_bias), approximate="tanh")',
    "only-two-ranks": f"{F_BACKWARD}  ->  x.view_as(x), lambda dy: summed(dy) * 2 / {RANKS})",
    "hang": hangs(f"f(x), up,  ->  (f(x) if {RANK} else x), up,"),
    "input-changed": f"return {MLP}  ->  x.data.mul_(2)\nreturn {MLP}",
}


def distributed_tensors(x, up, up_bias, down, down_bias):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def laid_out(tensor, placement):
        return DTensor.from_local(tensor, mesh, [placement], run_check=False)

    x = laid_out(x, Replicate())
    inner = F.gelu(x @ laid_out(up, Shard(0)).T + laid_out(up_bias, Shard(0)))
    y = inner @ laid_out(down, Shard(1)).T
    assert y.placements == (Partial(),)
    return y.redistribute(mesh, [Replicate()]).to_local() + down_bias


RIGHT["column_row_mlp"] = {
    "a hook for f, detach for g": {
        f"return with_backward(lambda x: {F_BACKWARD}(x)": f"x = x.view_as(x)\n{HOOK}return x",
        f"{G}(x)": "x + (summed(x) - x).detach()",
    },
    "summed in place": f"return {MLP}  ->  y = F.linear(inner, down)\ndist.all_reduce(y)\nreturn y + down_bias",
    "the bias added in place": f"{MLP}  ->  g(F.linear(inner, down)).add(down_bias)",
    "DTensor": distributed_tensors,
}

# ------------------------------------------------------------------------------------------------ attention

PRODUCTS = "(F.linear(x, blocks[some].flatten(0, 1)).unflatten(-1, (-1, d)) for some in rows)"
USED = "(mine // (heads // kv_heads)).unique(return_inverse=True)"
OWN_KV_HEADS = f"torch.arange(kv_heads).tensor_split({RANKS})[{RANK}]"
WRONG["head_attention"] = CONJUGATES | {
    "no-f": ", f(x)  ->  , x",
    "no-g": "return g(  ->  return (",
    "chunked": {
        PRODUCTS: f"(part.unflatten(-1, (-1, d)) for part in F.linear(x, qkv.chunk({RANKS})[{RANK}]).chunk(3, -1))"
    },
    "not-causal": ", is_causal=True  ->  ",
    "scale": "is_causal=True  ->  is_causal=True, scale=len(out) ** -0.5",
    "residual": {"blocks, x = ": HOOK + "blocks, x = ", ", f(x)": ", x"},
    "grouped": {
        PRODUCTS: f"(F.linear(x, w.chunk({RANKS})[{RANK}]).unflatten(-1, (len(mine), -1)) for w in qkv.chunk(3))",
        "k[:, :, serve], v[:, :, serve]": "k, v",
    },
    "kv-order": [
        f"{USED}  ->  {OWN_KV_HEADS}.repeat(heads // kv_heads).unique(return_inverse=True)",
        f"{USED}  ->  (mine % kv_heads).unique(return_inverse=True)",
    ],
    "shared": [
        f"{USED}  ->  {OWN_KV_HEADS}.repeat_interleave(heads // kv_heads).unique(return_inverse=True)",
        {
            "used, serve = ": "each = max(1, kv_heads // dist.get_world_size())\nused, serve = ",
            USED: "(mine[0] // (heads // kv_heads) + torch.arange(len(mine)) * each // len(mine))"
            ".unique(return_inverse=True)",
        },
    ],
    "all-work": {
        "q, k, v = (F": "every = F.linear(x, qkv).unflatten(-1, (-1, d))\nq, k, v = (F",
        PRODUCTS: "(every[:, :, some] for some in rows)",
    },
    "too-many-calls": {", f(x)": ", x", "F.linear(x, blocks": "F.linear(f(x), blocks"},
    "no-gradient": "qkv.unflatten  ->  qkv.detach().unflatten",
    "float32": "columns))  ->  columns).float()).double()",
    "value": "[:, mine].flatten(1)  ->  [:, mine.flip(0)].flatten(1)",
}


def by_matrix_products(x, qkv, out, heads, kv_heads):
    rank, t = dist.get_rank(), dist.get_world_size()
    d, group = len(qkv) // (heads + 2 * kv_heads), heads // kv_heads
    branch, length, y = x.view_as(x), x.shape[1], 0

    def add_up(gradient):
        whole = gradient.clone()
        dist.all_reduce(whole)
        return whole

    branch.register_hook(add_up)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    for head in range(rank * heads // t, (rank + 1) * heads // t):
        places = (head, heads + head // group, heads + kv_heads + head // group)
        q, k, v = (branch @ qkv[place * d : (place + 1) * d].T for place in places)
        scores = (q @ k.transpose(1, 2) / d**0.5).masked_fill(later, -torch.inf)
        y = y + scores.softmax(-1) @ v @ out[:, head * d : (head + 1) * d].T
    dist.all_reduce(y)
    return y


RIGHT["head_attention"] = {
    "matrix products, head by head": by_matrix_products,
    "k and v once for each q head": {
        f"used, serve = {USED}": "used = mine // (heads // kv_heads)",
        "k[:, :, serve], v[:, :, serve]": "k, v",
    },
    "one product for q, k and v": {
        PRODUCTS: "F.linear(x, torch.cat([blocks[some].flatten(0, 1) for some in rows]))"
        ".unflatten(-1, (-1, d)).split([*map(len, rows)], 2)"
    },
}

# ------------------------------------------------------------------------------------------------ loss

LARGEST = "largest = logits.detach().amax(1)"
MAXIMUM = "dist.all_reduce(largest, op=dist.ReduceOp.MAX)"
SUMS = "g(torch.stack([shifted.exp().sum(1), target]))"
LOSS = "(total.log() - target).mean()"
READ = "read = shifted.gather(1, torch.where(here, local, 0)[:, None]).squeeze(1)"
TARGET = "target = torch.where(here, read, 0)"
GATHERED_LOGITS = f"""def every(part):
    parts = [torch.empty_like(part) for _ in range({RANKS})]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, 1)

own = slice(first, first + logits.shape[1])
return F.cross_entropy(with_backward(every, lambda dy: dy[:, own])(logits), targets)
{LARGEST}"""
WRONG["vocab_parallel_loss"] = {
    "overflow": [
        f"{LARGEST}  ->  largest = logits.new_zeros(len(logits))",
        {"detach().amax(1)": "detach().mean(1)", MAXIMUM: "dist.all_reduce(largest, op=dist.ReduceOp.AVG)"},
    ],
    "local-max": f"{MAXIMUM}  ->  pass",
    "outside": {"torch.where(here, local, 0)": "(local % logits.shape[1])", TARGET: "target = read"},
    "border": [
        "local >= 0  ->  local > 0",
        {
            "local < logits.shape[1]": "local <= logits.shape[1]",
            "local, 0)[": "local.clamp(max=logits.shape[1] - 1), 0)[",
        },
    ],
    "mean": ".mean()  ->  .sum()",
    "average": [
        f"{SUMS}  ->  {SUMS} / {RANKS}",
        f"lambda dy: dy  ->  lambda dy: dy / {RANKS}",
    ],
    "local-softmax": [
        f"{SUMS}  ->  shifted.exp().sum(1), g(target)",
        f"return {LOSS}  ->  own = shifted.exp().sum(1).log()\n"
        "return (own + (total.log() - own).detach() - target).mean()",
    ],
    "not-distributed": f"{LARGEST}  ->  "
    f"return F.cross_entropy(logits, (targets - first).clamp(0, logits.shape[1] - 1))\n{LARGEST}",
    "uneven": f"targets - first  ->  targets - {RANK} * logits.shape[1]",
    "no-gradient": "shifted = logits -  ->  shifted = logits.detach() -",
    "g-backward": G_BACKWARD,
    "target-gradient": ", target]))  ->  , target.detach()]))",
    "max-gradient": {
        LARGEST: "def most(x):\n    x = x.clone()\n    dist.all_reduce(x, op=dist.ReduceOp.MAX)\n    return x\n\n"
        "largest = with_backward(most, lambda dy: dy)(logits.amax(1))",
        MAXIMUM: "",
    },
    "upstream": f"return {LOSS}  ->  return with_backward(torch.clone, torch.ones_like)({LOSS})",
    "value": f"return {LOSS}  ->  return with_backward(torch.clone, torch.neg)({LOSS})",
    "input-changed": "shifted = logits - largest[:, None]  ->  logits.data -= largest[:, None]\nshifted = logits",
    "float32": f"{SUMS}  ->  g(torch.stack([shifted.exp().sum(1), target]).float()).double()",
    "gathered": f"{LARGEST}  ->  {GATHERED_LOGITS}",
    "too-many-bytes": G_REDUCES_TWICE,
    "too-few-bytes": {
        "dist.all_reduce(y)": BEYOND_THE_LEDGER,
        MAXIMUM: BEYOND_THE_LEDGER.replace("[y]", "[largest], dist.ReduceOp.MAX") + "\ndist.all_reduce(torch.zeros(1))",
    },
    "too-many-calls": f"{SUMS}  ->  g(shifted.exp().sum(1)), g(target)",
    "shape": ".mean()  ->  ",
    "hang": hangs(f"{SUMS}  ->  {SUMS.replace('g(', f'(g if {RANK} else torch.clone)(', 1)}"),
}


class LossByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, first):
        top = logits.amax(1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        powers, local = (logits - top[:, None]).exp(), targets - first
        hit = torch.zeros_like(logits)
        rows = ((local >= 0) & (local < logits.shape[1])).nonzero().flatten()
        hit[rows, local[rows]] = 1
        total, target = sums = torch.stack([powers.sum(1), (logits * hit).sum(1)])
        dist.all_reduce(sums)
        ctx.save_for_backward((powers / total[:, None] - hit) / len(targets))
        return (total.log() + top - target).mean()

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0], None, None


def loss_by_hand(logits, targets, first):
    return LossByHand.apply(logits, targets, first)


def merged_logarithms(logits, targets, first):
    own = logits.logsumexp(1)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.detach())
    total = torch.stack(parts).logsumexp(0)
    local = targets - first
    here = (local >= 0) & (local < logits.shape[1])
    target = (logits * F.one_hot(torch.where(here, local, 0), logits.shape[1])).sum(1) * here
    whole = target.detach().clone()
    dist.all_reduce(whole)
    share = ((own - total).exp().detach() * (own - own.detach())) - (target - target.detach())
    return (total - whole + share).mean()


RIGHT["vocab_parallel_loss"] = {
    "backward by hand": loss_by_hand,
    "logarithms of the shards, gathered and merged": merged_logarithms,
    "one-hot, asynchronous maximum": {
        MAXIMUM: "work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)\nlocal = targets - first\n"
        "here = (local >= 0) & (local < logits.shape[1])\n"
        "hot = F.one_hot(torch.where(here, local, 0), logits.shape[1]) * here[:, None]\nwork.wait()",
        f"{READ}\n    {TARGET}": "target = (shifted * hot).sum(1)",
    },
    "the maximum added again": {"read = shifted": "read = logits", "total.log()": "total.log() + largest"},
    "a number too small to matter in the logarithm": "total.log()  ->  (total + 1e-14).log()",
}

# ------------------------------------------------------------------------------------------------ paper problem

WRONG["tp_traffic"] = {
    "typed": "size = 4  ->  b, s, h, t, element_bytes, bandwidth = 1, 2048, 12288, 8, 2, 900\n"
    'unit, directions, tflops = "GB/s", 2, 400\nsize = 4',
    "number": "return size / 1e6, moving * 1e3, moving / (moving + computing)  ->  return size / 1e6",
    "numbers": "24 * b * s * h**2  ->  12 * b * s * h**2",
}
RIGHT["tp_traffic"] = {
    "NumPy": "return size / 1e6, moving * 1e3, moving / (moving + computing)  ->  import numpy as np\n\n"
    "return np.array([size / 1e6, moving * 1e3, moving / (moving + computing)])",
    "everything in bits": {
        'bandwidth * 1e9 / directions / (8 if unit == "Gb/s" else 1)': "bandwidth * 1e9 / directions * "
        '(1 if unit == "Gb/s" else 8)',
        "moving = size": "moving = 8 * size",
    },
}

# ------------------------------------------------------------------------------------------------ sequence parallel

IN, OUT = "with_backward(gathered, scattered)", "with_backward(scattered, gathered)"
OWN = f".chunk({RANKS})[{RANK}]"
NORM = "F.rms_norm(x, x.shape[-1:], f(gain))"
WRONG["sequence_parallel_norm"] = {
    "no-gather": {f"{IN}({NORM})": f"f({NORM})", f"{OUT}(y)": "g(y)"},
    "no-scatter": f"{OUT}(y)  ->  y{OWN}",
    "whole": f"{OUT}(y)  ->  g(y)",
    "wrong-part": f"{OUT}(y)  ->  {OUT}(y.roll(len(x), 0))",
    "eps": "f(gain))  ->  f(gain), 1e-6)",
    "gather-backward": f"{IN}  ->  with_backward(gathered, lambda dy: dy{OWN})",
    "scatter-backward": {
        f"return {OUT}": "def alone(dy):\n    whole = torch.zeros_like(y)\n"
        f"    whole{OWN}.copy_(dy)\n    return whole\n\nreturn with_backward(scattered, alone)"
    },
    "norm-gradient": ["f(gain)  ->  gain", F_MEAN],
    "average": [
        f"{OUT}(y)  ->  {OUT}(y) / {RANKS}",
        f"{OUT}  ->  with_backward(scattered, lambda dy: gathered(dy) / {RANKS})",
    ],
    "no-gradient": f"{IN}  ->  gathered",
    "all-reduce": [
        f"{OUT}  ->  with_backward(lambda y: summed(y){OWN}.clone(), gathered)",
        f"{IN}  ->  with_backward(gathered, lambda dy: summed(dy){OWN}.clone())",
    ],
    "whole-norm": f"{IN}({NORM})  ->  F.rms_norm({IN}(x), x.shape[-1:], f(gain))",
    "too-many-bytes": "tokens =  ->  gathered(x.detach())\ntokens =",
    "too-few-bytes": {
        "dist.reduce_scatter_single(part, x.contiguous())": "y = x.contiguous().clone()\n"
        f"{BEYOND_THE_LEDGER}\npart = y{OWN}.clone()"
    },
    "float32": f"{OUT}  ->  with_backward(lambda y: scattered(y.float()).double(), gathered)",
    "not-distributed": {f"{IN}({NORM})": "F.rms_norm(x, x.shape[-1:], gain)", f"{OUT}(y)": "y"},
}
RIGHT["sequence_parallel_norm"] = {
    "lists of parts, a hook for the gain": {
        "whole = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])\n"
        "    dist.all_gather_single(whole, x.contiguous())\n    return whole": "parts = [torch.empty_like(x) for _ in "
        f"range({RANKS})]\ndist.all_gather(parts, x.contiguous())\nreturn torch.cat(parts)",
        "dist.reduce_scatter_single(part, x.contiguous())": "dist.reduce_scatter(part, "
        f"[piece.contiguous() for piece in x.chunk({RANKS})])",
        "tokens =": "gain = gain.view_as(gain)\ngain.register_hook(summed)\ntokens =",
        "f(gain)": "gain",
    },
    "a broadcast from each rank": {
        "dist.all_gather_single(whole, x.contiguous())": f"whole{OWN}.copy_(x)\n"
        f"for r, part in enumerate(whole.chunk({RANKS})):\n    dist.broadcast(part, src=r)"
    },
    "all-to-all, summed here": {
        "dist.reduce_scatter_single(part, x.contiguous())\n    return part": "pieces = torch.empty_like(x)\n"
        "dist.all_to_all_single(pieces, x.contiguous())\n"
        "return pieces.unflatten(0, (dist.get_world_size(), len(part))).sum(0)",
    },
    "gradients of the gain gathered": {
        "f(gain)": "with_backward(torch.clone, lambda dy: gathered(dy[None]).sum(0))(gain)"
    },
    "torch.distributed.nn, whose gradient is one scatter from each rank": {
        f"{IN}({NORM})": "torch.cat(all_gather(F.rms_norm(x, x.shape[-1:], f(gain))))",
        "tokens =": "from torch.distributed.nn.functional import all_gather\n\ntokens =",
    },
    "asynchronous gather": {
        "dist.all_gather_single(whole, x.contiguous())": "dist.all_gather_single(whole, x.contiguous(), "
        "async_op=True).wait()"
    },
}


class TestTensorParallelism(ExerciseTests):
    checks = tensor_parallel
    WRONG, RIGHT = WRONG, RIGHT

    @pytest.mark.parametrize("n", [2, 4])
    def test_slips_of_the_loss_differ_from_the_right_one(self, n):
        logits = torch.randn(7, 14, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        shards, starts = logits.tensor_split(n, 1), tensor_parallel._starts(14, n)
        arguments = list(shards), torch.tensor([*starts, *range(13, 13 - 7 + n, -1)]), starts
        slips = tensor_parallel._LOSS_SLIPS["y"]
        right = F.cross_entropy(logits, arguments[1])
        self.differ(tensor_parallel._loss_of_all, slips, arguments, ("y", "logits"), right)

    def differ(self, program, slips, arguments, names, right):
        """The program for all ranks is right, and each edit changes the output or a gradient on some rank."""
        results = program(*arguments)
        assert all(torch.allclose(result["y"], right) for result in results)
        for key, some in slips.items():
            for slip in listed(some):
                wrong = edited_function(program, slip)(*arguments)
                pairs = [(a[name], b[name]) for a, b in zip(wrong, results, strict=True) for name in names]
                assert not all(torch.allclose(a, b) for a, b in pairs), (key, slip)

    def test_refusals_name_gradient_rank_and_bytes(self):
        def text(exercise, hint):
            return str(self.refusal(exercise, self.wrong(exercise, hint)))

        missing = text("column_row_mlp", "no-f")
        assert missing.startswith("Exercise 1, 2 ranks, an MLP, rank 0: the gradient of x is wrong.")
        assert re.search(r"rank 0: 240 bytes are sent; 120 are enough\.", text("vocab_parallel_loss", "gathered"))
