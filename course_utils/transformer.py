"""The shape of a transformer in numbers: its parameters, FLOPs, kept activations, and bytes through memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .models import PUBLISHED

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
    )  # fmt: skip


def _llama(size: str, layers: int, hidden: int, heads: int, ffn: int) -> Model:
    return Model(f"Llama 3 {size}", layers, hidden, heads, 8, ffn, 128256, 8192, gated=True, tied=False, fused=True)


#: Megatron-LM's GPTs and GPT-3 from `models.PUBLISHED`, GPT-3 with Megatron's vocabulary of 51,200, which 8 divides.
#: Llama 3 from table 3 of arXiv 2407.21783; the vocabulary of 128,256 from the released models' configuration.
MODELS: Mapping[str, Model] = {
    **{name: _gpt(name, shape) for name, shape in PUBLISHED.items() if name.startswith("Megatron")},
    "GPT-3 175B": _gpt("GPT-3 175B", PUBLISHED["GPT-3 175B"], 51200),
    "Llama 3 8B": _llama("8B", 32, 4096, 32, 14336),
    "Llama 3 70B": _llama("70B", 80, 8192, 64, 28672),
    "Llama 3 405B": _llama("405B", 126, 16384, 128, 53248),
}
