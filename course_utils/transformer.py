"""Transformers in numbers: published shapes, parameters, FLOPs, kept activations, and bytes through memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

__all__ = [
    "MODELS", "PUBLISHED", "RECOMPUTE", "GPTConfig", "Model", "flops_per_token", "parameters",
]

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


def _published() -> dict[str, GPTConfig]:
    gpt2 = {"": (12, 12, 768), " medium": (24, 16, 1024), " large": (36, 20, 1280), " XL": (48, 25, 1600)}
    gpt3 = {"6.7B": (32, 32, 4096), "13B": (40, 40, 5120), "175B": (96, 96, 12288)}
    megatron = {
        "1.7B": (24, 24, 2304), "3.6B": (30, 32, 3072), "7.5B": (36, 32, 4096), "18.4B": (40, 48, 6144),
        "39.1B": (48, 64, 8192), "76.1B": (60, 80, 10240), "145.6B": (80, 96, 12288), "310.1B": (96, 128, 16384),
        "529.6B": (105, 128, 20480), "1008B": (128, 160, 25600),
    }
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


#: What backward computes again, of what a layer's forward did.
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Model:
    """Shape of a decoder-only transformer.

    Attributes
    ----------
    layers, hidden, heads, kv_heads, ffn, vocabulary : int
        `kv_heads` is fewer than `heads` with grouped queries; `ffn` is the inner width of the MLP.
    length : int
        Tokens in a sequence.
    gated : bool
        Llama's layers: SwiGLU (three matrices in the MLP), RMSNorm, rotary positions, no biases, no dropout. Otherwise
        GPT's: GELU, LayerNorm, learnt positions, biases, dropout.
    tied : bool
        Whether the head shares the embedding's weight.
    fused : bool
        Whether attention is one kernel that keeps no scores and skips what the causal mask hides (FlashAttention);
        otherwise scores are written and read, all of them.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    length: int
    gated: bool = False
    tied: bool = True
    fused: bool = False

    @cached_property
    def kv_width(self) -> int:
        """Width of keys, and of values."""
        return self.kv_heads * self.hidden // self.heads

    @cached_property
    def layer_weights(self) -> int:
        """Parameters of a layer that are in matrix products."""
        h = self.hidden
        return 2 * h * h + 2 * h * self.kv_width + (3 if self.gated else 2) * h * self.ffn

    @cached_property
    def layer_parameters(self) -> int:
        """All parameters of a layer."""
        h = self.hidden
        small = 2 * h if self.gated else 4 * h + h + 2 * self.kv_width + h + self.ffn + h
        return self.layer_weights + small

    @cached_property
    def embedding_parameters(self) -> int:
        """Embedding of tokens, and of positions where they are learnt."""
        return (self.vocabulary + (0 if self.gated else self.length)) * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model. For GPT 12 l h^2 (1 + 13/12h + (V + s)/12lh) of Narayanan et al. 2021, and 2h of the
        last norm, which that leaves out."""
        head = 0 if self.tied else self.vocabulary * self.hidden
        norm = self.hidden if self.gated else 2 * self.hidden
        return self.layers * self.layer_parameters + self.embedding_parameters + head + norm

    def attention_flops(self) -> float:
        """FLOPs of scores and mixing of a layer in forward, for each token."""
        return (2 if self.fused else 4) * self.length * self.hidden

    def layer_flops(self) -> float:
        """FLOPs of a layer in forward, for each token; backward takes twice as many."""
        return 2 * self.layer_weights + self.attention_flops()

    def selective_flops(self) -> float:
        """FLOPs of what selective recomputation computes again, for each token."""
        return 0.0 if self.fused else self.attention_flops()

    def flops(self, tokens: int, recompute: str = "none") -> float:
        """FLOPs of matrix products in a step of `tokens` tokens.

        Every product counts once in forward and twice in backward; what is computed again counts again. With full
        recomputation and without fused attention this is 96 B s l h^2 (1 + s/6h + V/16lh) of Narayanan et al. 2021,
        equation 3. Fused attention counts the half of the scores that the mask leaves.
        """
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}")
        again = {"full": self.layer_flops(), "selective": self.selective_flops(), "none": 0}[recompute]
        return tokens * (self.layers * (3 * self.layer_flops() + again) + 6 * self.hidden * self.vocabulary)

    def kept(self, tokens: float, recompute: str, tp: int = 1, sequence_parallel: bool = True) -> float:
        """Bytes that a layer keeps of `tokens` tokens for backward, on one of `tp` ranks.

        GPT: s b h (10 + 24/t + 5 a s / h t) of Korthikanti et al. 2022 (arXiv 2205.05198, equation 2), all divided by t
        with sequence parallelism; selective recomputation drops the last term. Llama, by the same counting in bf16:
        inputs and outputs of two norms (8 h), queries, keys, values and the output of attention, gate, up and their
        product (6 ffn); selective recomputation drops the outputs of norms and the product. Full keeps the input.
        """
        h, apart = self.hidden, tp if sequence_parallel else 1
        if recompute == "full":
            return tokens * 2 * h / apart
        if self.gated:
            cheap = recompute == "selective"
            split = 4 * h + 4 * self.kv_width + (4 if cheap else 6) * self.ffn
            return tokens * ((4 if cheap else 8) * h / apart + split / tp)
        scores = 0 if self.fused or recompute == "selective" else 5 * self.heads * self.length
        split = 4 * h + 4 * self.kv_width + 4 * self.ffn
        return tokens * (10 * h / apart + (split + scores) / tp)

    def kept_around(self, tokens: float, tp: int = 1, sequence_parallel: bool = True) -> float:
        """Bytes of the last norm and the loss, with logits in fp32 and their gradient."""
        apart = tp if sequence_parallel else 1
        return tokens * (4 * self.hidden / apart + 8 * self.vocabulary / tp)

    def working(self, tokens: float, tp: int = 1) -> float:
        """Bytes of gradients of activations while backward is in the MLP."""
        return tokens * 2 * (2 * self.hidden + (2 if self.gated else 1) * self.ffn / tp)

    def traffic(self, tokens: float, tp: int = 1, sequence_parallel: bool = True) -> tuple[float, float]:
        """Bytes that a layer's element-wise operations read and write, in forward and in backward.

        Counted in elements of two bytes a token, matrix products left out, with dropout, bias and addition fused into
        one kernel. Forward: two norms read and write h (4 h); two additions read two and write one, dropout writes a
        mask of half the width (7 h); GELU reads and writes ffn, SwiGLU reads two and writes one. Backward: norms 6 h,
        dropout 5 h, additions 6 h; GELU 3 ffn, SwiGLU 5 ffn. Scores, if attention is not fused: written by the product
        and read by the next, read and written by softmax, and by dropout with its mask: 6.5 a s; backward 9 a s.
        """
        apart, h = tp if sequence_parallel else 1, self.hidden
        scores = 0 if self.fused else self.heads * self.length
        forward = 11 * h / apart + ((3 if self.gated else 2) * self.ffn + 6.5 * scores) / tp
        backward = 17 * h / apart + ((5 if self.gated else 3) * self.ffn + 9 * scores) / tp
        return 2 * tokens * forward, 2 * tokens * backward

    def selective_traffic(self, tokens: float, tp: int = 1, sequence_parallel: bool = True) -> float:
        """Bytes that selective recomputation reads and writes."""
        if self.fused:
            apart = tp if sequence_parallel else 1
            return 2 * tokens * (4 * self.hidden / apart + 3 * self.ffn / tp)
        return 2 * tokens * 6.5 * self.heads * self.length / tp

    def loss_traffic(self, tokens: float, tp: int = 1) -> float:
        """Bytes that cross-entropy reads and writes: logits of two bytes to fp32, maximum, exponentials, gradient."""
        return tokens * self.vocabulary / tp * 32


def _gpt(name: str, shape, vocabulary: int | None = None) -> Model:
    return Model(
        name, shape.layers, shape.hidden, shape.heads, shape.heads, 4 * shape.hidden, vocabulary or shape.vocabulary,
        shape.context,
    )


def _llama(size: str, layers: int, hidden: int, heads: int, ffn: int) -> Model:
    return Model(f"Llama 3 {size}", layers, hidden, heads, 8, ffn, 128256, 8192, gated=True, tied=False, fused=True)


#: Megatron-LM's GPTs and GPT-3 from `PUBLISHED`, GPT-3 with Megatron's vocabulary of 51,200, which 8 divides.
#: Llama 3 from table 3 of arXiv 2407.21783; the vocabulary of 128,256 from the released models' configuration.
MODELS: Mapping[str, Model] = {
    **{name: _gpt(name, shape) for name, shape in PUBLISHED.items() if name.startswith("Megatron")},
    "GPT-3 175B": _gpt("GPT-3 175B", PUBLISHED["GPT-3 175B"], 51200),
    "Llama 3 8B": _llama("8B", 32, 4096, 32, 14336),
    "Llama 3 70B": _llama("70B", 80, 8192, 64, 28672),
    "Llama 3 405B": _llama("405B", 126, 16384, 128, 53248),
}
