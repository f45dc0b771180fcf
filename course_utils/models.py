"""The small GPT that every parallelism of the course trains, and what it costs in parameters and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .ranks import share

__all__ = ["GPT", "GPTConfig", "PUBLISHED", "build", "flops_per_token", "parameters"]

share("torch._dynamo")  # who has models trains, and every optimizer imports it as it is made: a second on each rank


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a `GPT`.

    `tied` makes the output layer share the embedding's weight; `checkpoint` keeps only the input of each block for
    backward and computes the rest of the block a second time.
    """

    layers: int = 2
    heads: int = 4
    hidden: int = 64
    context: int = 64
    vocabulary: int = 128
    tied: bool = True
    checkpoint: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "hidden", "context", "vocabulary"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden must be a multiple of heads, got {self.hidden} and {self.heads}")


_SMALL = GPTConfig()


def _published() -> dict[str, GPTConfig]:
    gpt2 = {"": (12, 12, 768), " medium": (24, 16, 1024), " large": (36, 20, 1280), " XL": (48, 25, 1600)}
    gpt3 = {"6.7B": (32, 32, 4096), "13B": (40, 40, 5120), "175B": (96, 96, 12288)}
    megatron = {
        "1.7B": (24, 24, 2304), "3.6B": (30, 32, 3072), "7.5B": (36, 32, 4096), "18.4B": (40, 48, 6144),
        "39.1B": (48, 64, 8192), "76.1B": (60, 80, 10240), "145.6B": (80, 96, 12288), "310.1B": (96, 128, 16384),
        "529.6B": (105, 128, 20480), "1008B": (128, 160, 25600),
    }  # fmt: skip
    return {
        **{f"GPT-2{size}": GPTConfig(*shape, 1024, 50257) for size, shape in gpt2.items()},
        **{f"GPT-3 {size}": GPTConfig(*shape, 2048, 50257) for size, shape in gpt3.items()},
        **{f"Megatron {size}": GPTConfig(*shape, 2048, 51200) for size, shape in megatron.items()},
    }


#: Shapes that were trained, in the layout of `GPT`: GPT-2 (Radford et al. 2019, table 2; heads from the released
#: models), GPT-3 (Brown et al. 2020, table 2.1; three of its eight; the 13B row's width is printed as 5140 there,
#: which 40 heads do not divide) and Megatron-LM's own (Narayanan et al. 2021, table 1). All share one weight between
#: embedding and head. They are for counting, or for the meta device: `GPT(PUBLISHED["GPT-3 175B"])` needs 700 GB.
PUBLISHED = _published()


class Attention(nn.Module):
    """Causal self-attention with `heads` heads: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, C / heads)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each after a layer norm and added to its input: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(config.hidden), Attention(config)
        self.norm2, self.mlp = nn.LayerNorm(config.hidden), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer without dropout, in the layout of GPT-2 (Radford et al. 2019).

    Weights of linear layers and embeddings start normal with standard deviation 0.02, divided by sqrt(2 layers) where
    a layer adds to the residual stream; biases start at zero. They come from the global generator; `build` gives the
    same ones each time.
    """

    def __init__(self, config: GPTConfig = _SMALL) -> None:
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
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def build(config: GPTConfig = _SMALL, seed: int = 0, dtype: torch.dtype = torch.float32) -> GPT:
    """Return a `GPT` on the CPU with the weights that belong to `seed`, the same on every call and every rank.

    They are drawn in float32, then converted to `dtype`. The global generators are left as they were.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return GPT(config).to(dtype)


def parameters(config: GPTConfig) -> int:
    """Return the number of parameters of a `GPT`; a tied weight counts once.

    Each block has 12 C^2 + 13 C: 4 C^2 + 4 C in attention, 8 C^2 + 5 C in the MLP, 4 C in two layer norms. Around the
    blocks stand the embedding V C, the position T C, a layer norm 2 C, and V C of the head unless it is tied.
    """
    c = config.hidden
    around = (config.vocabulary * (1 if config.tied else 2) + config.context + 2) * c
    return config.layers * (12 * c**2 + 13 * c) + around


def flops_per_token(config: GPTConfig, backward: bool = True) -> int:
    """Return the FLOPs of matrix products for one token of a full context, a multiply-add counted as two.

    Forward: 2 for each of the 12 C^2 weights of a block and the V C of the head, and 4 T C a block for the scores and
    the mixing of attention (all T positions, as counters of FLOPs do, although the mask leaves half to use). Backward
    costs twice the forward. `config.checkpoint` adds the forward of the blocks, but for the last product of each,
    4 C^2 weights, whose output backward does not need. Embeddings, norms, GELU and softmax are left out. Without
    attention this is the 6 N of Kaplan et al. 2020 (https://arxiv.org/abs/2001.08361).
    """
    c = config.hidden
    attention = 4 * config.context * c
    forward = config.layers * (2 * 12 * c**2 + attention) + 2 * config.vocabulary * c
    if not backward:
        return forward
    again = config.layers * (2 * 8 * c**2 + attention) if config.checkpoint else 0
    return 3 * forward + again
