"""Usual wrong answers to the exercises on tensor parallelism, each with the hint that it must be given."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercise_cases import Mutant, register_of

MUTANTS: list[Mutant] = []
mutant = register_of(MUTANTS)

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX


def _reduced(x, op=SUM):
    y = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, op=op)
    return y


class _Both(torch.autograd.Function):
    """Reduced with one operation each way; None is the identity."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_op = backward
        return x.view_as(x) if forward is None else _reduced(x, forward)

    @staticmethod
    def backward(ctx, dy):
        return dy if ctx.backward_op is None else _reduced(dy, ctx.backward_op), None, None


def _f(x, op=SUM):
    return _Both.apply(x, None, op)


def _g(x, op=SUM, back=None):
    return _Both.apply(x, op, back)


class _GatheredSum(torch.autograd.Function):
    """g, by an all-gather of the terms."""

    @staticmethod
    def forward(ctx, y):
        parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, y.contiguous())
        return sum(parts)

    @staticmethod
    def backward(ctx, dy):
        return dy


def _same(x):
    return x


def _me():
    return dist.get_rank(), dist.get_world_size()


# ------------------------------------------------------------------------------------------------ MLP


def _mlp(x, up, up_bias, down, down_bias, f=_f, g=_g, add=lambda y, bias: y + bias, weight=_same, middle=_same):
    """The right way, with one thing that can be made wrong."""
    inner = middle(F.gelu(F.linear(f(x), weight(up), weight(up_bias))))
    return add(g(F.linear(inner, weight(down))), down_bias)


@mutant("column_row_mlp", "no-f")
def f_forgotten(*args):
    return _mlp(*args, f=_same)


@mutant("column_row_mlp", "no-g")
def g_forgotten(*args):
    return _mlp(*args, g=_same)


@mutant("column_row_mlp", "not-distributed")
def both_forgotten(*args):
    return _mlp(*args, f=_same, g=_same)


@mutant("column_row_mlp", "g-backward")
def gradient_reduced_in_g(*args):
    return _mlp(*args, g=lambda y: _g(y, back=SUM))


@mutant("column_row_mlp", "average")
def output_averaged(*args):
    return _mlp(*args, g=lambda y: _g(y, AVG))


@mutant("column_row_mlp", "average")
def output_and_bias_averaged(x, up, up_bias, down, down_bias):
    return _g(F.linear(F.gelu(F.linear(_f(x), up, up_bias)), down, down_bias), AVG)


@mutant("column_row_mlp", "average")
def gradient_of_x_averaged(*args):
    return _mlp(*args, f=lambda x: _f(x, AVG))


@mutant("column_row_mlp", "bias")
def bias_added_on_every_rank(x, up, up_bias, down, down_bias):
    return _g(F.linear(F.gelu(F.linear(_f(x), up, up_bias)), down, down_bias))


@mutant("column_row_mlp", "bias-gradient")
def bias_added_on_rank_0(x, up, up_bias, down, down_bias):
    bias = None if dist.get_rank() else down_bias
    return _g(F.linear(F.gelu(F.linear(_f(x), up, up_bias)), down, bias))


@mutant("column_row_mlp", "bias-gradient")
def a_share_of_the_bias_on_every_rank(x, up, up_bias, down, down_bias):
    return _g(F.linear(F.gelu(F.linear(_f(x), up, up_bias)), down, down_bias / dist.get_world_size()))


@mutant("column_row_mlp", "weights-reduced")
def gradients_of_weights_reduced(*args):
    return _mlp(*args, weight=_f)


@mutant("column_row_mlp", "residual")
def hook_on_x_itself(x, up, up_bias, down, down_bias):
    x.register_hook(_reduced)
    return _mlp(x, up, up_bias, down, down_bias, f=_same)


@mutant("column_row_mlp", "no-gradient")
def no_history(*args):
    return _mlp(*args, g=lambda y: _reduced(y) + 0 * args[4])


@mutant("column_row_mlp", "no-gradient")
def weights_detached(*args):
    return _mlp(*args, weight=torch.Tensor.detach)


@mutant("column_row_mlp", "other-calls")
def terms_gathered(*args):
    return _mlp(*args, g=_GatheredSum.apply)


@mutant("column_row_mlp", "too-many-calls")
def all_reduce_behind_both_layers(*args):
    def middle(inner):
        width = torch.tensor([inner.shape[-1]])
        widths = [torch.zeros_like(width) for _ in range(dist.get_world_size())]
        widths[dist.get_rank()] = width
        counts = _reduced(torch.cat(widths)).tolist()
        before, behind = sum(counts[: dist.get_rank()]), sum(counts[dist.get_rank() + 1 :])
        return _g(F.pad(inner, (before, behind)))[..., before : before + counts[dist.get_rank()]]

    return _mlp(*args, middle=middle)


@mutant("column_row_mlp", "too-many-calls")
def x_reduced_in_backward_twice(*args):
    return _mlp(*args, f=lambda x: _f(_f(x, AVG)))


@mutant("column_row_mlp", "float32")
def sum_in_float32(*args):
    return _mlp(*args, g=lambda y: _g(y.float()).double())


@mutant("column_row_mlp", "shape")
def own_inner_features(x, up, up_bias, down, down_bias):
    return _g(F.gelu(F.linear(_f(x), up, up_bias)))


@mutant("column_row_mlp", "only-two-ranks")
def half_of_the_gradient(*args):
    return _mlp(*args, f=lambda x: _Half.apply(x))


class _Half(torch.autograd.Function):
    """Adds the gradient of one other rank."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return _reduced(dy) * 2 / dist.get_world_size()


@mutant("column_row_mlp", "hang", hangs=True)
def rank_0_does_not_reduce_its_gradient(*args):
    return _mlp(*args, f=_f if dist.get_rank() else _same)


@mutant("column_row_mlp", "input-changed")
def x_changed(x, *weights):
    y = _mlp(x, *weights)
    x.data.mul_(2)
    return y


# ------------------------------------------------------------------------------------------------ attention


def _heads(heads, kv_heads):
    rank, t = _me()
    mine = torch.arange(heads).chunk(t)[rank]
    return mine, mine // (heads // kv_heads)


def _attention(
    x, qkv, out, heads, kv_heads, f=_f, g=_g, choose=_heads, causal=True, scale=None, copies=1, weight=_same,
    columns=None,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    d = len(qkv) // (heads + 2 * kv_heads)
    mine, used = choose(heads, kv_heads)
    blocks = weight(qkv).unflatten(0, (-1, d))
    x = [f(x)] * 3 if copies == 1 else [f(x) for _ in range(3)]
    rows = (mine, heads + used, heads + kv_heads + used)
    q, k, v = (
        F.linear(y, blocks[some].flatten(0, 1)).unflatten(-1, (-1, d)).transpose(1, 2)
        for y, some in zip(x, rows, strict=True)
    )
    scale = scale and scale(d, heads)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2).flatten(2)
    own = weight(out).unflatten(1, (-1, d))[:, mine if columns is None else columns].flatten(1)
    return g(F.linear(mixed, own))


@mutant("head_attention", "no-f")
def attention_without_f(*args):
    return _attention(*args, f=_same)


@mutant("head_attention", "no-g")
def attention_without_g(*args):
    return _attention(*args, g=_same)


@mutant("head_attention", "g-backward")
def attention_with_gradient_reduced_in_g(*args):
    return _attention(*args, g=lambda y: _g(y, back=SUM))


@mutant("head_attention", "average")
def attention_averaged(*args):
    return _attention(*args, g=lambda y: _g(y, AVG))


@mutant("head_attention", "average")
def attention_gradient_averaged(*args):
    return _attention(*args, f=lambda x: _f(x, AVG))


@mutant("head_attention", "chunked")
def joint_weight_chunked(x, qkv, out, heads, kv_heads):
    rank, t = _me()
    d = len(qkv) // (heads + 2 * kv_heads)
    parts = F.linear(_f(x), qkv.chunk(t)[rank]).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (-1, d)).transpose(1, 2) for part in parts)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return _g(F.linear(mixed, out.chunk(t, 1)[rank]))


@mutant("head_attention", "not-causal")
def all_tokens_seen(*args):
    return _attention(*args, causal=False)


@mutant("head_attention", "scale")
def scaled_by_the_whole_width(*args):
    return _attention(*args, scale=lambda d, heads: (d * heads) ** -0.5)


@mutant("head_attention", "scale")
def not_scaled(*args):
    return _attention(*args, scale=lambda d, heads: 1.0)


@mutant("head_attention", "residual")
def attention_with_a_hook_on_x(x, *rest):
    x.register_hook(_reduced)
    return _attention(x, *rest, f=_same)


@mutant("head_attention", "grouped")
def three_equal_parts(x, qkv, out, heads, kv_heads):
    rank, t = _me()
    x = _f(x)
    parts = [F.linear(x, w.chunk(t)[rank]) for w in qkv.chunk(3)]
    q, k, v = (part.unflatten(-1, (heads // t, -1)).transpose(1, 2) for part in parts)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return _g(F.linear(mixed, out.chunk(t, 1)[rank]))


@mutant("head_attention", "kv-order")
def kv_heads_tiled(*args):
    def choose(heads, kv_heads):
        rank, t = _me()
        mine = torch.arange(heads).chunk(t)[rank]
        return mine, torch.arange(kv_heads).chunk(t)[rank].repeat(heads // kv_heads)

    return _attention(*args, choose=choose)


@mutant("head_attention", "kv-order")
def kv_heads_counted_round(*args):
    def choose(heads, kv_heads):
        rank, t = _me()
        mine = torch.arange(heads).chunk(t)[rank]
        return mine, mine % kv_heads

    return _attention(*args, choose=choose)


@mutant("head_attention", "shared")
def kv_heads_dealt_out(*args):
    def choose(heads, kv_heads):
        rank, t = _me()
        own = torch.arange(kv_heads).chunk(t)[rank]
        return torch.arange(heads).chunk(t)[rank], own.repeat_interleave(heads // kv_heads)

    return _attention(*args, choose=choose)


@mutant("head_attention", "all-work")
def all_heads_computed(x, qkv, out, heads, kv_heads):
    rank, t = _me()
    d = len(qkv) // (heads + 2 * kv_heads)
    parts = F.linear(_f(x), qkv).unflatten(-1, (-1, d)).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
    q, k, v = (part.repeat_interleave(heads // part.shape[1], 1) for part in parts)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    own = mixed.chunk(t, 1)[rank].transpose(1, 2).flatten(2)
    return _g(F.linear(own, out.chunk(t, 1)[rank]))


@mutant("head_attention", "too-many-calls")
def f_for_each_of_q_k_v(*args):
    return _attention(*args, copies=3)


@mutant("head_attention", "other-calls")
def outputs_gathered(*args):
    return _attention(*args, g=_GatheredSum.apply)


@mutant("head_attention", "no-gradient")
def attention_weights_detached(*args):
    return _attention(*args, weight=torch.Tensor.detach)


@mutant("head_attention", "float32")
def attention_summed_in_float32(*args):
    return _attention(*args, g=lambda y: _g(y.float()).double())


@mutant("head_attention", "value")
def columns_of_the_other_rank(*args):
    rank, t = _me()
    return _attention(*args, columns=torch.arange(args[3]).chunk(t)[(rank + 1) % t])


# ------------------------------------------------------------------------------------------------ loss


def _top(logits, targets=None):
    return _reduced(logits.detach().amax(1), MAX)


def _read(shifted, targets, first):
    local = targets - first
    here = (local >= 0) & (local < shifted.shape[1])
    return torch.where(here, shifted.gather(1, torch.where(here, local, 0)[:, None]).squeeze(1), 0)


def _loss(logits, targets, first, top=_top, read=_read, both=_g, finish=torch.mean, first_of=None):
    """The right way, with one thing that can be made wrong."""
    first = first if first_of is None else first_of(logits)
    shifted = logits - top(logits)[:, None]
    total, target = both(torch.stack([shifted.exp().sum(1), read(shifted, targets, first)]))
    return finish(total.log() - target)


def _apart(total=_g, target=_g):
    """In place of one sum over the ranks, one of the exponentials and one of the targets."""
    return lambda pair: (total(pair[0]), target(pair[1]))


def _nothing(logits):
    return logits.new_zeros(len(logits))


@mutant("vocab_parallel_loss", "overflow")
def no_maximum(*args):
    return _loss(*args, top=_nothing)


@mutant("vocab_parallel_loss", "overflow")
def maxima_summed(*args):
    return _loss(*args, top=lambda logits: _reduced(logits.detach().amax(1)))


@mutant("vocab_parallel_loss", "local-max")
def own_maximum(*args):
    return _loss(*args, top=lambda logits: logits.detach().amax(1))


@mutant("vocab_parallel_loss", "local-max")
def own_maximum_added_again(logits, targets, first):
    top = logits.detach().amax(1)
    total = _g((logits - top[:, None]).exp().sum(1))
    return (total.log() + top - _g(_read(logits, targets, first))).mean()


def _unmasked(index):
    def read(shifted, targets, first):
        return shifted.gather(1, index(targets - first, shifted.shape[1])[:, None]).squeeze(1)

    return read


@mutant("vocab_parallel_loss", "outside")
def target_clamped(*args):
    return _loss(*args, read=_unmasked(lambda i, width: i.clamp(0, width - 1)))


@mutant("vocab_parallel_loss", "outside")
def target_counted_round(*args):
    return _loss(*args, read=_unmasked(lambda i, width: i % width))


@mutant("vocab_parallel_loss", "outside")
def word_0_read_instead(logits, targets, first):
    top = _top(logits)
    total = _g((logits - top[:, None]).exp().sum(1)).log() + top
    read = _unmasked(lambda i, width: torch.where((i < 0) | (i >= width), 0, i))
    return (total - _g(read(logits, targets, first))).mean()


@mutant("vocab_parallel_loss", "mean")
def summed_over_tokens(*args):
    return _loss(*args, finish=torch.sum)


@mutant("vocab_parallel_loss", "average")
def sum_averaged(*args):
    return _loss(*args, both=_apart(total=lambda y: _g(y, AVG)))


@mutant("vocab_parallel_loss", "average")
def target_averaged(*args):
    return _loss(*args, both=_apart(target=lambda y: _g(y, AVG)))


@mutant("vocab_parallel_loss", "average")
def both_averaged(*args):
    return _loss(*args, both=lambda pair: _g(pair, AVG))


@mutant("vocab_parallel_loss", "local-softmax")
def sum_of_the_shard(*args):
    return _loss(*args, top=_nothing, both=_apart(total=_same))


@mutant("vocab_parallel_loss", "not-distributed")
def loss_of_the_shard(logits, targets, first):
    return F.cross_entropy(logits, (targets - first).clamp(0, logits.shape[1] - 1))


@mutant("vocab_parallel_loss", "uneven")
def first_from_the_width(*args):
    return _loss(*args, first_of=lambda logits: dist.get_rank() * logits.shape[1])


@mutant("vocab_parallel_loss", "no-gradient")
def loss_without_history(*args):
    return _loss(*args, both=_reduced)


@mutant("vocab_parallel_loss", "g-backward")
def loss_reduced_in_backward(*args):
    return _loss(*args, both=lambda pair: _g(pair, back=SUM))


@mutant("vocab_parallel_loss", "target-gradient")
def target_without_history(*args):
    return _loss(*args, both=_apart(target=_reduced))


@mutant("vocab_parallel_loss", "max-gradient")
def maximum_with_history(*args):
    return _loss(*args, top=lambda logits: _g(logits.amax(1), MAX))


class _ByHand(torch.autograd.Function):
    """The loss with a backward of its own."""

    @staticmethod
    def forward(ctx, logits, targets, first, gradient, change):
        shifted = logits - _top(logits)[:, None]
        if change:
            logits.copy_(shifted)
        total = _reduced(shifted.exp().sum(1))
        local = targets - first
        here = ((local >= 0) & (local < logits.shape[1])).double()
        hit = F.one_hot(local.clamp(0, logits.shape[1] - 1), logits.shape[1]) * here[:, None]
        ctx.save_for_backward(shifted, total, hit)
        ctx.gradient = gradient
        return (total.log() - _reduced((shifted * hit).sum(1))).mean()

    @staticmethod
    def backward(ctx, dy):
        return ctx.gradient(*ctx.saved_tensors, dy), None, None, None, None


def _softmax_minus_hit(shifted, total, hit, dy):
    return dy * (shifted.exp() / total[:, None] - hit) / len(hit)


@mutant("vocab_parallel_loss", "upstream")
def incoming_gradient_ignored(*args):
    return _ByHand.apply(*args, lambda *saved: _softmax_minus_hit(*saved[:3], 1.0), False)


@mutant("vocab_parallel_loss", "average")
def gradient_divided_by_the_ranks(*args):
    return _ByHand.apply(*args, lambda *saved: _softmax_minus_hit(*saved) / dist.get_world_size(), False)


@mutant("vocab_parallel_loss", "local-softmax")
def gradient_with_softmax_of_the_shard(*args):
    def gradient(shifted, total, hit, dy):
        return dy * (shifted.softmax(1) - hit) / len(hit)

    return _ByHand.apply(*args, gradient, False)


@mutant("vocab_parallel_loss", "value")
def gradient_with_the_other_sign(*args):
    return _ByHand.apply(*args, lambda *saved: -_softmax_minus_hit(*saved), False)


@mutant("vocab_parallel_loss", "input-changed")
def logits_changed(*args):
    return _ByHand.apply(args[0].detach().requires_grad_(), *args[1:], _softmax_minus_hit, True)


@mutant("vocab_parallel_loss", "float32")
def loss_in_float32(*args):
    return _loss(*args, both=lambda pair: _g(pair.float()).double())


@mutant("vocab_parallel_loss", "gathered")
def logits_gathered(logits, targets, first):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            ctx.width = logits.shape[1]
            parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, logits.contiguous())
            return torch.cat(parts, 1)

        @staticmethod
        def backward(ctx, dy):
            return dy[:, first : first + ctx.width]

    return F.cross_entropy(Gather.apply(logits), targets)


@mutant("vocab_parallel_loss", "gathered")
def logits_gathered_by_a_sum(logits, targets, first):
    end = _reduced(torch.tensor(first + logits.shape[1]), MAX).item()
    return F.cross_entropy(_g(F.pad(logits, (first, end - first - logits.shape[1]))), targets)


@mutant("vocab_parallel_loss", "too-many-bytes")
def reduced_in_backward_as_well(*args):
    return _loss(*args, both=lambda pair: _g(pair, back=AVG))


@mutant("vocab_parallel_loss", "too-many-calls")
def three_messages(*args):
    return _loss(*args, both=_apart())


@mutant("vocab_parallel_loss", "shape")
def loss_of_each_token(*args):
    return _loss(*args, finish=_same)


@mutant("vocab_parallel_loss", "hang", hangs=True)
def rank_0_does_not_sum(*args):
    return _loss(*args, both=_g if dist.get_rank() else _same)


# ------------------------------------------------------------------------------------------------ embedding


def _embedding(
    tokens, weight, first, g=_g, low=0, high=0, index=lambda local, here, v: torch.where(here, local, 0),
    mask=lambda here, rows: torch.where(here[..., None], rows, 0), first_of=None, look=None,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    local, v = tokens - (first if first_of is None else first_of(weight)), len(weight)
    here = (local >= low) & (local < v - high)
    rows = (look or (lambda index: F.embedding(index, weight)))(index(local, here, v))
    return g(mask(here, rows))


@mutant("vocab_parallel_embedding", "no-g")
def rows_not_summed(tokens, weight, first):
    dist.barrier()
    return _embedding(tokens, weight, first, g=_same)


@mutant("vocab_parallel_embedding", "not-distributed")
def own_rows_only(*args):
    return _embedding(*args, g=_same)


@mutant("vocab_parallel_embedding", "average")
def rows_averaged(*args):
    return _embedding(*args, g=lambda y: _g(y, AVG))


@mutant("vocab_parallel_embedding", "outside")
def rows_not_masked(*args):
    return _embedding(*args, mask=lambda here, rows: rows)


@mutant("vocab_parallel_embedding", "outside")
def tokens_clamped(*args):
    return _embedding(*args, index=lambda local, here, v: local.clamp(0, v - 1), mask=lambda here, rows: rows)


@mutant("vocab_parallel_embedding", "outside")
def tokens_counted_round(*args):
    return _embedding(*args, index=lambda local, here, v: local % v, mask=lambda here, rows: rows)


@mutant("vocab_parallel_embedding", "border")
def first_word_left_out(*args):
    return _embedding(*args, low=1)


@mutant("vocab_parallel_embedding", "border")
def last_word_left_out(*args):
    return _embedding(*args, high=1)


@mutant("vocab_parallel_embedding", "uneven")
def first_from_the_length(*args):
    return _embedding(*args, first_of=lambda weight: dist.get_rank() * len(weight))


@mutant("vocab_parallel_embedding", "empty-shard", hangs=True)
def ranks_without_tokens_leave(tokens, weight, first):
    local = tokens - first
    if not ((local >= 0) & (local < len(weight))).any():
        return weight.new_zeros(*tokens.shape, weight.shape[1])
    return _embedding(tokens, weight, first)


@mutant("vocab_parallel_embedding", "g-backward")
def embedding_reduced_in_backward(*args):
    return _embedding(*args, g=lambda y: _g(y, back=SUM))


@mutant("vocab_parallel_embedding", "mask-gradient")
def masked_behind_the_back_of_autograd(*args):
    def mask(here, rows):
        rows.data[~here] = 0
        return rows

    return _embedding(*args, mask=mask)


class _LookUp(torch.autograd.Function):
    """Rows by index; the gradient is assigned instead of added."""

    @staticmethod
    def forward(ctx, weight, index):
        ctx.save_for_backward(weight, index)
        return weight[index]

    @staticmethod
    def backward(ctx, dy):
        weight, index = ctx.saved_tensors
        gradient = torch.zeros_like(weight)
        for row, part in zip(index.flatten().tolist(), dy.flatten(0, -2), strict=True):
            if part.any():
                gradient[row] = part
        return gradient, None


@mutant("vocab_parallel_embedding", "repeated")
def gradient_assigned(*args):
    return _embedding(*args, look=lambda index: _LookUp.apply(args[1], index))


@mutant("vocab_parallel_embedding", "no-gradient")
def rows_without_history(*args):
    return _embedding(*args, g=_reduced)


@mutant("vocab_parallel_embedding", "other-calls")
def rows_gathered(*args):
    return _embedding(*args, g=_GatheredSum.apply)


@mutant("vocab_parallel_embedding", "too-many-calls")
def gradient_averaged_in_backward(*args):
    return _embedding(*args, g=lambda y: _g(y, back=AVG))


@mutant("vocab_parallel_embedding", "float32")
def rows_in_float32(*args):
    return _embedding(*args, g=lambda y: _g(y.float()).double())


@mutant("vocab_parallel_embedding", "value")
def rows_of_the_wrong_tokens(*args):
    return _embedding(*args, index=lambda local, here, v: torch.where(here, v - 1 - local, 0))


# ------------------------------------------------------------------------------------------------ price of a layer


def _price(
    b, s, h, t, element_bytes, bandwidth, unit, directions, tflops, sent=lambda t: 8 * (t - 1) / t, element=None,
    rate=None, gpus=None, passes=3, scores=4, mega=1e6, milli=1e3, share=lambda a, c: a / (a + c),
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    size = sent(t) * b * s * h * (element or element_bytes)
    moving = size / (rate or bandwidth * 1e9 / directions / {"Gb/s": 8, "GB/s": 1}[unit])
    computing = passes * b * s * h * (24 * h + scores * s) / ((gpus or t) * tflops * 1e12)
    return size / mega, moving * milli, share(moving, computing)


@mutant("tp_traffic", "half")
def forward_only(*case):
    return _price(*case, sent=lambda t: 4 * (t - 1) / t)


@mutant("tp_traffic", "quarter")
def forward_only_and_once(*case):
    return _price(*case, sent=lambda t: 2 * (t - 1) / t)


@mutant("tp_traffic", "factor")
def share_forgotten(*case):
    return _price(*case, sent=lambda t: 8)


@mutant("tp_traffic", "all-ranks")
def all_ranks_together(*case):
    return _price(*case, sent=lambda t: 8 * (t - 1))


@mutant("tp_traffic", "half")
def elements_for_bytes(*case):
    return _price(*case, element=1)


@mutant("tp_traffic", "megabytes")
def bytes_for_megabytes(*case):
    return _price(*case, mega=1)


@mutant("tp_traffic", "megabytes")
def mib_for_mb(*case):
    return _price(*case, mega=2**20)


@mutant("tp_traffic", "bits")
def bits_taken_for_bytes(*case):
    return _price(*case, rate=case[5] * 1e9 / case[7])


@mutant("tp_traffic", "bits")
def bytes_taken_for_bits(*case):
    return _price(*case, rate=case[5] * 1e9 / case[7] / 8)


@mutant("tp_traffic", "directions")
def both_directions(*case):
    return _price(*case, rate=case[5] * 1e9 / (8 if case[6] == "Gb/s" else 1))


@mutant("tp_traffic", "milliseconds")
def seconds(*case):
    return _price(*case, milli=1)


@mutant("tp_traffic", "compute-whole")
def every_gpu_computes_all(*case):
    return _price(*case, gpus=1)


@mutant("tp_traffic", "compute-forward")
def computation_of_forward(*case):
    return _price(*case, passes=1)


@mutant("tp_traffic", "scores")
def no_scores(*case):
    return _price(*case, scores=0)


@mutant("tp_traffic", "ratio")
def communication_over_computation(*case):
    return _price(*case, share=lambda a, c: a / c)


@mutant("tp_traffic", "percent")
def per_cent(*case):
    return _price(*case, share=lambda a, c: 100 * a / (a + c))


@mutant("tp_traffic", "number")
def megabytes_only(*case):
    return _price(*case)[0]


@mutant("tp_traffic", "typed")
def typed_price(*case):
    return _price(1, 2048, 12288, 8, 2, 900, "GB/s", 2, 400)


# ------------------------------------------------------------------------------------------------ sequence parallel


def _gathered(x):
    whole = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    dist.all_gather_single(whole, x.detach().contiguous())
    return whole


def _scattered(x, op=SUM):
    part = x.new_empty(len(x) // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_single(part, x.detach().contiguous(), op=op)
    return part


def _own(x):
    return x.chunk(dist.get_world_size())[dist.get_rank()]


class _Turn(torch.autograd.Function):
    """One function in forward, another in backward."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.back = backward
        return forward(x.detach()).clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.back(dy).clone(), None, None


def _gather(x, forward=_gathered, back=_scattered):
    return _Turn.apply(x, forward, back)


def _scatter(x, forward=_scattered, back=_gathered):
    return _Turn.apply(x, forward, back)


def _sequence(x, gain, up, down, gather=_gather, scatter=_scatter, f=_f):
    """The right way, with one thing that can be made wrong."""
    normed = F.rms_norm(x, x.shape[-1:], f(gain))
    return scatter(F.linear(F.gelu(F.linear(gather(normed), up)), down))


@mutant("sequence_parallel_norm", "no-gather")
def own_tokens_only(*args):
    return _sequence(*args, gather=_f, scatter=_g)


@mutant("sequence_parallel_norm", "no-scatter")
def own_part_not_summed(*args):
    return _sequence(*args, scatter=_own)


@mutant("sequence_parallel_norm", "whole")
def sum_of_all_tokens(*args):
    return _sequence(*args, scatter=_g)


@mutant("sequence_parallel_norm", "wrong-part")
def tokens_of_the_next_rank(*args):
    def forward(x):
        return _scattered(torch.cat([*x.chunk(dist.get_world_size())[1:], x.chunk(dist.get_world_size())[0]]))

    return _sequence(*args, scatter=lambda x: _scatter(x, forward))


def _padded(dy):
    whole = dy.new_zeros(dist.get_world_size() * len(dy), *dy.shape[1:])
    _own(whole).copy_(dy)
    return whole


@mutant("sequence_parallel_norm", "scatter-backward")
def gradient_of_own_tokens(*args):
    return _sequence(*args, scatter=lambda x: _scatter(x, back=_padded))


@mutant("sequence_parallel_norm", "gather-backward")
def gradient_cut_not_summed(*args):
    return _sequence(*args, gather=lambda x: _gather(x, back=_own))


@mutant("sequence_parallel_norm", "norm-gradient")
def gain_of_own_tokens(*args):
    return _sequence(*args, f=_same)


@mutant("sequence_parallel_norm", "average")
def output_scattered_as_a_mean(*args):
    return _sequence(*args, scatter=lambda x: _scatter(x, lambda y: _scattered(y) / dist.get_world_size()))


@mutant("sequence_parallel_norm", "average")
def gradient_gathered_as_a_mean(*args):
    return _sequence(*args, scatter=lambda x: _scatter(x, back=lambda dy: _gathered(dy) / dist.get_world_size()))


@mutant("sequence_parallel_norm", "no-gradient")
def gather_without_history(*args):
    return _sequence(*args, gather=_gathered)


@mutant("sequence_parallel_norm", "all-reduce")
def all_reduced_and_cut(*args):
    return _sequence(*args, scatter=lambda x: _scatter(x, lambda y: _own(_reduced(y))))


@mutant("sequence_parallel_norm", "all-reduce")
def gradient_all_reduced_and_cut(*args):
    return _sequence(*args, gather=lambda x: _gather(x, back=lambda dy: _own(_reduced(dy))))


@mutant("sequence_parallel_norm", "too-many-bytes")
def gathered_before_the_norm_and_behind(*args):
    def gather(normed):
        _gathered(normed)
        return _gather(normed)

    return _sequence(*args, gather=gather)


@mutant("sequence_parallel_norm", "float32")
def scattered_in_float32(*args):
    return _sequence(*args, scatter=lambda x: _scatter(x, lambda y: _scattered(y.float()).double()))


@mutant("sequence_parallel_norm", "not-distributed")
def tokens_alone(*args):
    return _sequence(*args, gather=_same, scatter=_same, f=_same)
