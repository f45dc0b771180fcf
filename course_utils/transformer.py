"""Transformers in numbers: published shapes, parameters, FLOPs, kept activations, and bytes through memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

__all__ = ["PUBLISHED", "RECOMPUTE", "RECOMPUTE_KINDS", "TransformerConfig"]

#: What backward computes again, of what a layer's forward did.
RECOMPUTE = ("none", "selective", "full")
#: The same and torchtitan's per-op policy: attention and every other matrix product are kept, all else comes again.
RECOMPUTE_KINDS = (*RECOMPUTE, "half")


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a decoder-only transformer, and what follows from it.

    `models.GPT` builds every shape that has GPT-2's layers, which all defaults give.

    Attributes
    ----------
    layers, heads, hidden : int
        `hidden` is the width C of the residual stream, a multiple of `heads`.
    context : int
        Tokens in a sequence, T.
    vocabulary : int
    tied : bool
        Whether the head shares the embedding's weight.
    checkpoint : bool
        Whether `models.GPT` keeps only the input of each block for backward and computes the rest of the block a second
        time. The planner's layouts say this themselves (`recompute`).
    queries_per_key : int
        Query heads that share a key-value head: more than 1 with grouped queries.
    mlp_ratio : float
        Inner width of the MLP as a multiple of `hidden`.
    gated : bool
        Llama's layers: SwiGLU (three matrices in the MLP), RMSNorm, rotary positions, no biases, no dropout. Otherwise
        GPT's: GELU, LayerNorm, learnt positions, biases, dropout.
    fused : bool
        Whether the planner takes attention as one kernel that keeps no scores and skips what the causal mask hides
        (FlashAttention); otherwise scores are written and read, and counted, all of them.
    experts, experts_per_token, shared_experts : int
        MLPs of a layer among which a router chooses, those it chooses for a token, and those that every token goes
        through besides; 0 experts for a dense model. `mlp_ratio` is that of one expert.
    name : str
        For messages and figures; equal shapes are equal whatever their names.

    Raises
    ------
    ValueError
        A number is too small or no integer, or does not divide as it must.
    """

    layers: int = 2
    heads: int = 4
    hidden: int = 64
    context: int = 64
    vocabulary: int = 128
    tied: bool = True
    checkpoint: bool = False
    queries_per_key: int = 1
    mlp_ratio: float = 4
    gated: bool = False
    fused: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    name: str = field(default="a transformer", compare=False)

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "hidden", "context", "vocabulary", "queries_per_key"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        for name, of in (("hidden", "heads"), ("heads", "queries_per_key")):
            if getattr(self, name) % getattr(self, of):
                got = f"{getattr(self, name)} and {getattr(self, of)}"
                raise ValueError(f"{name} must be a multiple of {of}, got {got}")
        for name in ("experts", "experts_per_token", "shared_experts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
        if bool(self.experts) != bool(self.experts_per_token) or self.experts_per_token > self.experts:
            chosen = f"{self.experts_per_token} of {self.experts}"
            raise ValueError(f"a router chooses between 1 and all of the experts, got {chosen}")
        if not self.mlp_ratio > 0:
            raise ValueError(f"mlp_ratio must be a number above 0, got {self.mlp_ratio!r}")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self) if each.compare))

    def require_gpt2_layers(self) -> None:
        """Raise `ValueError` unless the layers are GPT-2's: those that `models.GPT` builds and `memory` counts."""
        if self.gated or self.queries_per_key > 1 or self.mlp_ratio != 4 or self.experts:
            wanted = "gated=False, queries_per_key=1 and mlp_ratio=4"
            raise ValueError(f"{self.name} does not have GPT-2's layers, which have {wanted}")

    @cached_property
    def kv_heads(self) -> int:
        """Heads of keys, and of values."""
        return self.heads // self.queries_per_key

    @cached_property
    def kv_width(self) -> int:
        """Width of keys, and of values."""
        return self.hidden // self.queries_per_key

    @cached_property
    def ffn(self) -> int:
        """Inner width of the MLP."""
        return round(self.mlp_ratio * self.hidden)

    @cached_property
    def attention_weights(self) -> int:
        """Parameters of a layer's attention that are in matrix products."""
        return 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_width

    @cached_property
    def mlp_weights(self) -> int:
        """Parameters of an MLP, or of one expert, that are in matrix products."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @cached_property
    def active_mlps(self) -> int:
        """MLPs that a token goes through in a layer: one, or the experts chosen for it and the shared ones."""
        return self.experts_per_token + self.shared_experts if self.experts else 1

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of a layer's experts, the shared ones left out: those that expert parallelism divides."""
        return self.experts * self.mlp_weights

    @cached_property
    def layer_weights(self) -> int:
        """Parameters of a layer that a token is multiplied with; 12 C^2 in GPT-2's layers."""
        return self.attention_weights + self.active_mlps * self.mlp_weights + self.experts * self.hidden

    @cached_property
    def layer_parameters(self) -> int:
        """All parameters of a layer. In GPT-2's 12 C^2 + 13 C: 4 C^2 + 4 C in attention, 8 C^2 + 5 C in the MLP, 4 C in
        two layer norms."""
        h = self.hidden
        small = 2 * h if self.gated else 4 * h + h + 2 * self.kv_width + h + self.ffn + h
        mlps = self.experts + self.shared_experts if self.experts else 1
        return self.attention_weights + mlps * self.mlp_weights + self.experts * self.hidden + small

    @cached_property
    def embedding_parameters(self) -> int:
        """Embedding of tokens, V C, and of positions where they are learnt, T C."""
        return (self.vocabulary + (0 if self.gated else self.context)) * self.hidden

    @cached_property
    def parameter_count(self) -> int:
        """Parameters of the model; a tied weight counts once.

        The layers, the embeddings, the last norm, and V C of the head unless it is tied. For GPT this is
        12 l h^2 (1 + 13/12h + (V + s)/12lh) of Narayanan et al. 2021, and 2h of the last norm, which that leaves out.
        """
        head = 0 if self.tied else self.vocabulary * self.hidden
        norm = self.hidden if self.gated else 2 * self.hidden
        return self.layers * self.layer_parameters + self.embedding_parameters + head + norm

    @cached_property
    def attention_flops(self) -> int:
        """FLOPs of scores and mixing of a layer in forward, for each token."""
        return (2 if self.fused else 4) * self.context * self.hidden

    @cached_property
    def selective_flops(self) -> int:
        """FLOPs of what selective recomputation computes again in a layer, for each token."""
        return 0 if self.fused else self.attention_flops

    def flops_per_token(self, recompute: str | None = None, *, backward: bool = True) -> int:
        """Return the FLOPs of matrix products for one token of a full context, a multiply-add counted as two.

        Forward: 2 for each weight of the layers and the V C of the head, and 4 T C a layer for the scores and the
        mixing of attention (all T positions, as counters of FLOPs do, although the mask leaves half to use; with
        `fused` this half). Backward costs twice the forward, and what is computed again counts again. Embeddings,
        norms, GELU and softmax are left out. Without attention this is the 6 N of Kaplan et al. 2020
        (https://arxiv.org/abs/2001.08361); with full recomputation of GPT's layers, times B s tokens, it is
        96 B s l h^2 (1 + s/6h + V/16lh) of Narayanan et al. 2021, equation 3.

        Parameters
        ----------
        recompute : {"none", "selective", "full", "half"}, optional
            What backward computes again of each layer. By default what `models.GPT` does: nothing, or with `checkpoint`
            the forward of the blocks, but for the last product of each, whose output backward does not need.
        backward : bool
            Whether backward is counted.
        """
        layer, last_product = 2 * self.layer_weights + self.attention_flops, 2 * self.ffn * self.hidden
        again = {
            "none": 0, "selective": self.selective_flops, "full": layer, "half": self.layer_weights,
            None: layer - last_product if self.checkpoint else 0,
        }  # fmt: skip
        if recompute not in again:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE_KINDS)}, got {recompute!r}")
        forward = self.layers * layer + 2 * self.hidden * self.vocabulary
        return 3 * forward + self.layers * again[recompute] if backward else forward

    def kept(self, tokens: float, recompute: str, tp: int = 1, sequence_parallel: bool = True) -> float:
        """Bytes that a layer keeps of `tokens` tokens for backward, on one of `tp` ranks.

        GPT: s b h (10 + 24/t + 5 a s / h t) of Korthikanti et al. 2022 (arXiv 2205.05198, equation 2), all divided by t
        with sequence parallelism; selective recomputation drops the last term. Llama, by the same counting in bf16:
        inputs and outputs of two norms (8 h), queries, keys, values and the output of attention, gate, up and their
        product (6 ffn); selective recomputation drops the outputs of norms and the product. Full keeps the input. Half
        keeps the input, the outputs of attention and of every other product: queries, values, gate and the MLP's own.
        A token of a mixture of experts keeps what each of its experts does, and a copy of its vector for each.
        """
        h, apart = self.hidden, tp if sequence_parallel else 1
        if recompute == "full":
            return tokens * 2 * h / apart
        copies = 4 * h * self.experts_per_token
        if recompute == "half":
            ffn = self.active_mlps * self.ffn
            return tokens * (4 * h / apart + (4 * h + 2 * self.kv_width + 2 * ffn + copies) / tp)
        if self.gated:
            cheap = recompute == "selective"
            ffn = self.active_mlps * self.ffn
            split = 4 * h + 4 * self.kv_width + (4 if cheap else 6) * ffn + copies
            return tokens * ((4 if cheap else 8) * h / apart + split / tp)
        scores = 0 if self.fused or recompute == "selective" else 5 * self.heads * self.context
        split = 4 * h + 4 * self.kv_width + 4 * self.ffn
        return tokens * (10 * h / apart + (split + scores) / tp)

    def kept_around(self, tokens: float, tp: int = 1, sequence_parallel: bool = True, pieces: int = 1) -> float:
        """Bytes of the last norm and the loss, which takes its tokens in so many pieces, one after the other.

        Of a logit 12 bytes while backward begins: its log-softmax, the gradient of that, and its own, all in fp32.
        """
        apart = tp if sequence_parallel else 1
        return tokens * (4 * self.hidden / apart + 12 * self.vocabulary / tp / pieces)

    def working(self, tokens: float, tp: int = 1) -> float:
        """Bytes of gradients of activations while backward is in the MLP."""
        return tokens * 2 * (2 * self.hidden + (2 if self.gated else 1) * self.active_mlps * self.ffn / tp)

    def traffic(
        self, tokens: float, tp: int = 1, sequence_parallel: bool = True, compiled: bool = True
    ) -> tuple[float, float]:
        """Bytes that a layer's element-wise operations read and write, in forward and in backward.

        Counted in elements of two bytes a token, matrix products left out, with dropout, bias and addition fused into
        one kernel. Forward: two norms read and write h (4 h); two additions read two and write one, dropout writes a
        mask of half the width (7 h); GELU reads and writes ffn, SwiGLU reads two and writes one. Backward: norms 6 h,
        dropout 5 h, additions 6 h; GELU 3 ffn, SwiGLU 5 ffn. Scores, if attention is not fused: written by the product
        and read by the next, read and written by softmax, and by dropout with its mask: 6.5 a s; backward 9 a s.
        Llama has no dropout, but turns queries and keys: read and written once each way.

        Without compilation Llama's norms run as six operations, partly in fp32, which pass 16 h more; rotation goes to
        fp32 and back, 8 (h + kv) more; keys and values are copied for every query head, 2 h + 2 kv; SwiGLU takes two
        kernels, 2 ffn more. Backward passes twice that. A token of a mixture of experts is copied to its experts and
        added up again.
        """
        apart, h = tp if sequence_parallel else 1, self.hidden
        if self.gated:
            turned, ffn = h + self.kv_width, self.active_mlps * self.ffn
            moved = 4 * h * self.experts_per_token
            forward, backward = 10 * h / apart + (2 * turned + 3 * ffn + moved) / tp, 12 * h / apart
            backward += (2 * turned + 5 * ffn + moved) / tp
            if not compiled:
                more = 2 * 16 * h / apart + (8 * turned + 2 * h + 2 * self.kv_width + 2 * ffn) / tp
                forward, backward = forward + more, backward + 2 * more
            return 2 * tokens * forward, 2 * tokens * backward
        scores = 0 if self.fused else self.heads * self.context
        forward = 11 * h / apart + (2 * self.ffn + 6.5 * scores) / tp
        backward = 17 * h / apart + (3 * self.ffn + 9 * scores) / tp
        return 2 * tokens * forward, 2 * tokens * backward

    def selective_traffic(self, tokens: float, tp: int = 1, sequence_parallel: bool = True) -> float:
        """Bytes that selective recomputation reads and writes."""
        if self.fused:
            apart = tp if sequence_parallel else 1
            return 2 * tokens * (4 * self.hidden / apart + 3 * self.active_mlps * self.ffn / tp)
        return 2 * tokens * 6.5 * self.heads * self.context / tp

    def loss_traffic(self, tokens: float, tp: int = 1) -> float:
        """Bytes that cross-entropy reads and writes: logits of two bytes to fp32, maximum, exponentials, gradient."""
        return tokens * self.vocabulary / tp * 32


def _gpt(name: str, layers: int, heads: int, hidden: int, context: int, vocabulary: int) -> TransformerConfig:
    return TransformerConfig(layers, heads, hidden, context, vocabulary, name=name)


def _llama(size: str, layers: int, hidden: int, heads: int, ffn: int) -> TransformerConfig:
    return TransformerConfig(
        layers, heads, hidden, 8192, 128256, tied=False, queries_per_key=heads // 8, mlp_ratio=ffn / hidden, gated=True,
        fused=True, name=f"Llama 3 {size}",
    )


def _mpt(size: str, layers: int, heads: int, hidden: int) -> TransformerConfig:
    return TransformerConfig(layers, heads, hidden, 2048, 50368, fused=True, name=f"MPT {size}")


def _mixture(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, experts: int,
    chosen: int, shared: int = 0,
) -> TransformerConfig:
    return TransformerConfig(
        layers, heads, hidden, 4096, vocabulary, tied=False, queries_per_key=heads // kv_heads, mlp_ratio=ffn / hidden,
        gated=True, fused=True, experts=experts, experts_per_token=chosen, shared_experts=shared, name=name,
    )


def _published() -> dict[str, TransformerConfig]:
    gpt2 = {"": (12, 12, 768), " medium": (24, 16, 1024), " large": (36, 20, 1280), " XL": (48, 25, 1600)}
    gpt3 = {"6.7B": (32, 32, 4096), "13B": (40, 40, 5120), "175B": (96, 96, 12288)}
    megatron = {
        "1.7B": (24, 24, 2304), "3.6B": (30, 32, 3072), "7.5B": (36, 32, 4096), "18.4B": (40, 48, 6144),
        "39.1B": (48, 64, 8192), "76.1B": (60, 80, 10240), "145.6B": (80, 96, 12288), "174.6B": (96, 96, 12288),
        "310.1B": (96, 128, 16384), "529.6B": (105, 128, 20480), "1008B": (128, 160, 25600),
    }
    shapes = [
        *(_gpt(f"GPT-2{size}", *shape, 1024, 50257) for size, shape in gpt2.items()),
        *(_gpt(f"GPT-3 {size}", *shape, 2048, 50257) for size, shape in gpt3.items()),
        *(_gpt(f"Megatron {size}", *shape, 2048, 51200) for size, shape in megatron.items()),
        _mpt("1B", 24, 16, 2048), _mpt("3B", 32, 20, 2560), _mpt("7B", 32, 32, 4096), _mpt("13B", 40, 40, 5120),
        _mpt("30B", 48, 56, 7168), _mpt("70B", 80, 64, 8192),
        _mixture("Mixtral 8x7B", 32, 4096, 32, 8, 14336, 32000, 8, 2),
        _mixture("Mixtral 8x22B", 56, 6144, 48, 8, 16384, 32768, 8, 2),
        _mixture("DeepSeekMoE 16B", 28, 2048, 16, 16, 1408, 102400, 64, 6, 2),
        _llama("8B", 32, 4096, 32, 14336), _llama("70B", 80, 8192, 64, 28672), _llama("405B", 126, 16384, 128, 53248),
    ]
    return {shape.name: shape for shape in shapes}


#: Shapes that were trained: GPT-2 (Radford et al. 2019, table 2; heads from the released models), GPT-3 (Brown et al.
#: 2020, table 2.1; three of its eight; the 13B row's width is printed as 5140 there, which 40 heads do not divide),
#: Megatron-LM's own (Narayanan et al. 2021, table 1, and from table 2 the 174.6B: GPT-3 175B with a vocabulary that 8
#: divides), and Llama 3 (table 3 of arXiv 2407.21783; its vocabulary from the released models' configuration). GPTs
#: share one weight between embedding and head. They are for counting, or for the meta device:
#: `GPT(PUBLISHED["GPT-3 175B"])` needs 700 GB. MPT's are those of llm-foundry's benchmarks (scripts/train/benchmarking
#: in https://github.com/mosaicml/llm-foundry), the mixtures those of the released configurations (Jiang et al. 2024,
#: arXiv 2401.04088; Dai et al. 2024, arXiv 2401.06066, whose first layer is dense, which is left out here).
PUBLISHED: Mapping[str, TransformerConfig] = _published()
