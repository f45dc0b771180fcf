"""The small GPT that every parallelism of the course trains; its shape and costs are those of `transformer`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .ranks import share
from .transformer import PUBLISHED, TransformerConfig

__all__ = [
    "GPT", "PUBLISHED", "Block", "SeparateQKVAttention", "TransformerConfig", "build_gpt", "loss_of",
    "next_token_loss",
]

share("torch._dynamo")  # who has models trains, and every optimizer imports it as it is made: a second on each rank


_SMALL = TransformerConfig()


class Attention(nn.Module):
    """Causal self-attention with `heads` heads: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, C / heads)
        return self.out(mixed.transpose(1, 2).flatten(2))


class SeparateQKVAttention(nn.Module):
    """The same attention with queries, keys and values from layers of their own: (B, T, C) -> (B, T, C).

    Copies the weights of `joint`, whose last layer it takes over. A plan for tensor parallelism can split each of the
    three layers; the number of heads follows from the width that a rank has.
    """

    def __init__(self, joint: Attention) -> None:
        super().__init__()
        self.size, self.out = joint.out.in_features // joint.heads, joint.out
        layers = [nn.Linear(joint.qkv.in_features, joint.qkv.in_features).to(joint.qkv.weight) for _ in range(3)]
        with torch.no_grad():
            for layer, weight, bias in zip(layers, joint.qkv.weight.chunk(3), joint.qkv.bias.chunk(3), strict=True):
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
        self.q, self.k, self.v = layers

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads of this rank, T, size)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each after a layer norm and added to its input: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(config.hidden), Attention(config)
        self.norm2, self.mlp = nn.LayerNorm(config.hidden), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer without dropout, in the layout of GPT-2 (Radford et al. 2019).

    Weights of linear layers and embeddings start normal with standard deviation 0.02, divided by sqrt(2 layers) where
    a layer adds to the residual stream; biases start at zero. They come from the global generator; `build_gpt` gives
    the same ones each time. Raises `ValueError` for a shape that has not GPT-2's layers, such as Llama's.
    """

    def __init__(self, config: TransformerConfig = _SMALL) -> None:
        config.require_gpt2_layers()
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.position = nn.Embedding(config.context, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if residual else 0.02)
        self.tie()

    def tie(self) -> None:
        """Share the embedding's weight with the head, if `config.tied`; once more after `to_empty`, which unties it."""
        if self.config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, vocabulary) of the token after each of `tokens` (B, T), int64, T <= context."""
        length = tokens.shape[-1]
        if tokens.dim() != 2 or length > self.config.context:
            raise ValueError(f"tokens must be (B, T) with T up to {self.config.context}, got {tuple(tokens.shape)}")
        x = self.embedding(tokens) + self.position(torch.arange(length, device=tokens.device))
        again = self.config.checkpoint and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per token, of `targets` (B, T) after `tokens` (B, T)."""
        return next_token_loss(self(tokens), targets)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per token, of `targets` (B, T) under `logits` (B, T, vocabulary)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token; calls `model` itself, so that a wrapper sees the forward pass.

    `GPT.loss` is the same without a wrapper; around `DistributedDataParallel` it would go past it.
    """
    return next_token_loss(model(tokens), targets)


def build_gpt(config: TransformerConfig = _SMALL, seed: int = 0, dtype: torch.dtype = torch.float32) -> GPT:
    """Return a `GPT` on the CPU with the weights that belong to `seed`, the same on every call and every rank.

    They are drawn in float32, then converted to `dtype`. The global generators are left as they were.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return GPT(config).to(dtype)
