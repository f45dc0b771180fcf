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
        GPT's: GELU, LayerNorm, learnt positions, biases, and dropout unless `dropout` is False.
    fused : bool
        Whether the planner takes attention as one kernel that keeps no scores and skips what the causal mask hides
        (FlashAttention); otherwise scores are written and read, and counted, all of them.
    experts, experts_per_token, shared_experts : int
        MLPs of a layer among which a router chooses, those it chooses for a token, and those that every token goes
        through besides; 0 experts for a dense model. `mlp_ratio` is that of one expert.
    head_width : int
        Width of a head's queries and keys, and of its values; 0: ``hidden / heads``.
    latent : tuple of four int
        Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): rank of the queries (0: none), rank of
        keys and values, rotary width of queries and keys beside `head_width`, and width of a head's values. Or ().
    dense_layers : int
        Layers without experts in a mixture, whose MLP is `dense_ratio` times `hidden` wide. Where the planner counts
        "a layer" it takes the mean over all.
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
    head_width: int = 0
    latent: tuple[int, ...] = ()
    dense_layers: int = 0
    dense_ratio: float = 4
    dropout: bool = True
    name: str = field(default="a transformer", compare=False)

    def __post_init__(self) -> None:
        positive = ("layers", "heads", "hidden", "context", "vocabulary", "queries_per_key")
        for name in (*positive, "experts", "experts_per_token", "shared_experts", "head_width", "dense_layers"):
            value, least = getattr(self, name), int(name in positive)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        for name, of in (("hidden", "heads"), ("heads", "queries_per_key")):
            if getattr(self, name) % getattr(self, of) and not (name == "hidden" and self.head_width):
                got = f"{getattr(self, name)} and {getattr(self, of)}"
                raise ValueError(f"{name} must be a multiple of {of}, got {got}")
        if bool(self.experts) != bool(self.experts_per_token) or self.experts_per_token > self.experts:
            chosen = f"{self.experts_per_token} of {self.experts}"
            raise ValueError(f"a router chooses between 1 and all of the experts, got {chosen}")
        if self.latent and (len(self.latent) != 4 or not self.head_width):
            raise ValueError(f"latent attention takes four widths and head_width, got {self.latent}, {self.head_width}")
        if self.dense_layers > self.layers or self.dense_layers and not self.experts:
            raise ValueError(f"dense_layers are those of a mixture without experts, got {self.dense_layers}")
        if not min(self.mlp_ratio, self.dense_ratio) > 0:
            raise ValueError(f"mlp_ratio must be a number above 0, got {min(self.mlp_ratio, self.dense_ratio)!r}")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self) if each.compare))

    def require_gpt2_layers(self) -> None:
        """Raise `ValueError` unless the layers are GPT-2's: those that `models.GPT` builds and `memory` counts."""
        if self.gated or self.queries_per_key > 1 or self.mlp_ratio != 4 or self.experts or self.head_width:
            wanted = "gated=False, queries_per_key=1 and mlp_ratio=4"
            raise ValueError(f"{self.name} does not have GPT-2's layers, which have {wanted}")

    @cached_property
    def kv_heads(self) -> int:
        """Heads of keys, and of values."""
        return self.heads // self.queries_per_key

    @cached_property
    def query_width(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * ((self.head_width or self.hidden // self.heads) + (self.latent[2] if self.latent else 0))

    @cached_property
    def mixed_width(self) -> int:
        """Width of what attention mixes from the values, all heads."""
        return self.heads * (self.latent[3] if self.latent else self.head_width or self.hidden // self.heads)

    @cached_property
    def kv_width(self) -> int:
        """Width of keys, and of values; their mean where they differ."""
        return (self.query_width + self.mixed_width) // 2 if self.latent else self.mixed_width // self.queries_per_key

    @cached_property
    def ffn(self) -> int:
        """Inner width of the MLP."""
        return round(self.mlp_ratio * self.hidden)

    @cached_property
    def attention_shapes(self) -> tuple[tuple[int, int, str], ...]:
        """Matrices of attention: outputs, inputs, and which of them tensor parallelism divides ("" for neither)."""
        h, out = self.hidden, (self.hidden, self.mixed_width, "in")
        if not self.latent:
            return (self.query_width + 2 * self.kv_width, h, "out"), out
        rank, kv_rank, rotary, _ = self.latent
        queries = ((rank, h, ""), (self.query_width, rank, "out")) if rank else ((self.query_width, h, "out"),)
        both = self.heads * self.head_width + self.mixed_width
        return *queries, (kv_rank + rotary, h, ""), (both, kv_rank, "out"), out

    @cached_property
    def attention_weights(self) -> int:
        """Parameters of a layer's attention that are in matrix products."""
        return sum(outputs * inputs for outputs, inputs, _ in self.attention_shapes)

    @cached_property
    def mlp_weights(self) -> int:
        """Parameters of an MLP, or of one expert, that are in matrix products."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @cached_property
    def routed(self) -> float:
        """Share of the layers that have experts."""
        return 1 - self.dense_layers / self.layers if self.dense_layers else int(self.experts > 0)

    @cached_property
    def active_mlps(self) -> float:
        """MLPs of width `ffn` that a token goes through in a layer: one, or the experts chosen for it and the shared
        ones; of a dense layer among mixtures, as many as its MLP is wider."""
        if not self.experts:
            return 1
        wider = (1 - self.routed) * self.dense_ratio / self.mlp_ratio if self.dense_layers else 0
        return self.routed * (self.experts_per_token + self.shared_experts) + wider

    @cached_property
    def expert_parameters(self) -> float:
        """Parameters of a layer's experts, the shared ones left out: those that expert parallelism divides."""
        return self.routed * self.experts * self.mlp_weights

    @cached_property
    def layer_weights(self) -> float:
        """Parameters of a layer that a token is multiplied with; 12 C^2 in GPT-2's layers."""
        router = self.routed * self.experts * self.hidden
        return self.attention_weights + self.active_mlps * self.mlp_weights + router

    @cached_property
    def layer_parameters(self) -> float:
        """All parameters of a layer. In GPT-2's 12 C^2 + 13 C: 4 C^2 + 4 C in attention, 8 C^2 + 5 C in the MLP, 4 C in
        two layer norms."""
        h = self.hidden
        small = 2 * h + sum(self.latent[:2]) if self.gated else 4 * h + h + 2 * self.kv_width + h + self.ffn + h
        idle = self.routed * (self.experts - self.experts_per_token) * self.mlp_weights
        return self.layer_weights + idle + small

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
        return round(self.layers * self.layer_parameters) + self.embedding_parameters + head + norm

    @cached_property
    def attention_flops(self) -> int:
        """FLOPs of scores and mixing of a layer in forward, for each token."""
        return (1 if self.fused else 2) * self.context * (self.query_width + self.mixed_width)

    @cached_property
    def selective_flops(self) -> int:
        """FLOPs of what selective recomputation computes again in a layer, for each token."""
        return 0 if self.fused else self.attention_flops

    def flops_per_token(self, recompute: str | None = None, *, backward: bool = True) -> float:
        """Return the FLOPs of matrix products for one token of a full context, a multiply-add counted as two.

        Forward: 2 for each weight of the layers and the V C of the head, and 4 T C a layer for the scores and the
        mixing of attention (all T positions, as counters of FLOPs do, although the mask leaves half to use; with
        `fused` this half). Backward costs twice the forward, and what is computed again counts again. Embeddings,
        norms, GELU and softmax are left out. Without attention this is the 6 N of Kaplan et al. 2020
        (https://arxiv.org/abs/2001.08361); with full recomputation of GPT's layers, times B s tokens, it is
        96 B s l h^2 (1 + s/6h + V/16lh) of Narayanan et al. 2021, equation 3. `recompute` is one of `RECOMPUTE_KINDS`;
        by default what `models.GPT` does: nothing, or with `checkpoint` all but the last product of each block.
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

    def kept(
        self, tokens: float, recompute: str, tp: int = 1, sequence_parallel: bool = True, compiled: bool = True,
        fp8: bool = False, fused_norms: bool = False, gathered: bool = False,
    ) -> float:
        """Bytes that a layer keeps of `tokens` tokens for backward, on one of `tp` ranks.

        GPT: s b h (10 + 24/t + 5 a s / h t) of Korthikanti et al. 2022 (arXiv 2205.05198, equation 2), all divided by t
        with sequence parallelism; selective recomputation drops the last term. Llama, by the same counting in bf16:
        inputs and outputs of two norms (8 h), queries, keys, values and the output of attention, gate, up and their
        product (6 ffn), and unless attention is fused its probabilities (2 a s); selective recomputation drops the
        outputs of norms, the product and the probabilities. Full keeps the input. Half keeps the input, the outputs of
        attention and of every other product: queries, values, gate and the MLP's own. A token of a mixture of experts
        keeps what each of its experts does, and a copy of its vector for each.

        Without compilation Llama's norms, unless `fused_norms`, keep their input in fp32 and what they scale (12 h),
        SwiGLU its sigmoid's output (2 ffn), attention keys and values for each query head, and softmax is in fp32
        (4 a s). With `fp8` inputs of products are kept in fp8, beside what attention and activation keep. With
        `gathered` outputs of norms, divided by sequence parallelism, are kept as gathered for the next product, whole.
        """
        h, apart = self.hidden, tp if sequence_parallel else 1
        if recompute == "full":
            return tokens * 2 * h / apart
        copies = self.routed * 4 * h * self.experts_per_token
        outside, ffn = 2 * (self.query_width + self.mixed_width), self.active_mlps * self.ffn
        if recompute == "half":
            return tokens * (4 * h / apart + (outside + 2 * self.kv_width + 2 * ffn + copies) / tp)
        cheap, scores = recompute == "selective", self.heads * self.context
        if self.fused or cheap:
            scores = 0
        if self.gated:
            norms = (4 if cheap else 4 + 4 * (apart if gathered else 1)) * h + 4 * sum(self.latent[:3])
            split = outside + 4 * self.kv_width + (4 if cheap else 6) * ffn + copies + 2 * scores
            if not compiled:
                norms += 0 if cheap or fused_norms else 12 * h
                split += outside - 4 * self.kv_width + (0 if cheap else 2 * ffn) + 4 * scores
        else:
            norms, cheap = (10 if self.dropout else 8) * h, False
            split = outside + 4 * self.kv_width + 4 * ffn + (5 if self.dropout else 2) * scores
        if fp8:
            norms, split = norms - (0 if cheap else 2 * h), split + self.mixed_width - (0 if cheap else ffn)
        return tokens * (norms / apart + split / tp)

    def kept_around(
        self, tokens: float, tp: int = 1, sequence_parallel: bool = True, pieces: int = 1, logits: int = 0,
        compiled: bool = True,
    ) -> float:
        """Bytes of the last norm and the loss, which takes its tokens in `pieces`, one after the other.

        Logits are divided among `logits` ranks, `tp` by default. Of each 12 bytes while backward begins: log-softmax,
        the gradient of that, and its own, in fp32; uncompiled code holds the logit itself as well, in bf16. Where norms
        are divided along the sequence, the head's input and its gradient are gathered.
        """
        apart, each = tp if sequence_parallel else 1, (12 if compiled else 14) / (logits or tp) / pieces
        return tokens * (4 * self.hidden * (1 / apart + (apart > 1)) + each * self.vocabulary)

    def working(self, tokens: float, tp: int = 1) -> float:
        """Bytes of gradients of activations while backward is in the MLP."""
        return tokens * 2 * (2 * self.hidden + (2 if self.gated else 1) * self.active_mlps * self.ffn / tp)

    def traffic(
        self, tokens: float, tp: int = 1, sequence_parallel: bool = True, compiled: bool = True,
        fused_norms: bool = False,
    ) -> tuple[float, float]:
        """Bytes that a layer's element-wise operations read and write, in forward and in backward.

        Counted in elements of two bytes a token, matrix products left out, with dropout, bias and addition fused into
        one kernel. Forward: two norms read and write h (4 h); two additions read two and write one, dropout writes a
        mask of half the width (7 h); GELU reads and writes ffn, SwiGLU reads two and writes one. Backward: norms 6 h,
        dropout 5 h, additions 6 h; GELU 3 ffn, SwiGLU 5 ffn. Scores, if attention is not fused: written by the product
        and read by the next, read and written by softmax, and by dropout with its mask: 6.5 a s; backward 9 a s.
        Llama has no dropout, so that its scores pass 4 a s and 6 a s, but turns queries and keys: read and written once
        each way.

        Without compilation Llama's norms, unless `fused_norms`, run as six operations, which pass 16 h more; rotation
        goes to fp32 and back, 8 (h + kv) more; keys and values are copied for every query head, 2 h + 2 kv; SwiGLU
        takes two kernels, 2 ffn more; softmax goes to fp32 and back. Backward passes twice that. A token of a mixture
        of experts is copied to its experts and added up again.
        """
        apart, h = tp if sequence_parallel else 1, self.hidden
        if self.gated:
            turned, ffn = self.query_width + self.kv_width, self.active_mlps * self.ffn
            moved, scores = self.routed * 4 * h * self.experts_per_token, 0 if self.fused else self.heads * self.context
            forward, backward = 10 * h / apart + (2 * turned + 3 * ffn + moved) / tp, 12 * h / apart
            backward += (2 * turned + 5 * ffn + moved) / tp
            forward, backward = forward + 4 * scores / tp, backward + 6 * scores / tp
            if not compiled:
                copied = 2 * self.query_width + 2 * self.kv_width
                more = (0 if fused_norms else 2 * 16 * h / apart) + (8 * turned + copied + 2 * ffn + 6 * scores) / tp
                forward, backward = forward + more, backward + 2 * more
            return 2 * tokens * forward, 2 * tokens * backward
        scores = 0 if self.fused else self.heads * self.context
        forward = 11 * h / apart + (2 * self.ffn + 6.5 * scores) / tp
        backward = 17 * h / apart + (3 * self.ffn + 9 * scores) / tp
        return 2 * tokens * forward, 2 * tokens * backward

    def selective_traffic(self, tokens: float, tp: int = 1, sequence_parallel: bool = True) -> float:
        """Bytes that selective recomputation reads and writes."""
        scores = 0 if self.fused else (4 if self.gated else 6.5) * self.heads * self.context / tp
        cheap = 4 * self.hidden / (tp if sequence_parallel else 1) + 3 * self.active_mlps * self.ffn / tp
        return 2 * tokens * (scores + (cheap if self.fused or self.gated else 0))

    def loss_traffic(self, tokens: float, tp: int = 1) -> float:
        """Bytes that cross-entropy reads and writes: logits of two bytes to fp32, maximum, exponentials, gradient."""
        return tokens * self.vocabulary / tp * 32


def _llama(size: str, layers: int, hidden: int, heads: int, ffn: int) -> TransformerConfig:
    return TransformerConfig(
        layers, heads, hidden, 8192, 128256, tied=False, queries_per_key=heads // 8, mlp_ratio=ffn / hidden, gated=True,
        fused=True, name=f"Llama 3 {size}",
    )


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
    mpt = {
        "1B": (24, 16, 2048), "3B": (32, 20, 2560), "7B": (32, 32, 4096), "13B": (40, 40, 5120), "30B": (48, 56, 7168),
        "70B": (80, 64, 8192),
    }
    shapes = [
        *(TransformerConfig(*shape, 1024, 50257, name=f"GPT-2{size}") for size, shape in gpt2.items()),
        *(TransformerConfig(*shape, 2048, 50257, name=f"GPT-3 {size}") for size, shape in gpt3.items()),
        *(TransformerConfig(*shape, 2048, 51200, name=f"Megatron {size}") for size, shape in megatron.items()),
        *(TransformerConfig(*shape, 2048, 50368, fused=True, name=f"MPT {size}") for size, shape in mpt.items()),
        _mixture("Mixtral 8x7B", 32, 4096, 32, 8, 14336, 32000, 8, 2),
        _mixture("Mixtral 8x22B", 56, 6144, 48, 8, 16384, 32768, 8, 2),
        _mixture("DeepSeekMoE 16B", 28, 2048, 16, 16, 1408, 102400, 64, 6, 2),
        _llama("8B", 32, 4096, 32, 14336), _llama("70B", 80, 8192, 64, 28672), _llama("405B", 126, 16384, 128, 53248),
    ]
    return {shape.name: shape for shape in shapes}


#: Shapes that were trained: GPT-2 (Radford et al. 2019, table 2; heads from the released models), GPT-3 (Brown et al.
#: 2020, table 2.1; the 13B row's width is printed as 5140, which 40 heads do not divide), Megatron-LM's own (Narayanan
#: et al. 2021, table 1, and from table 2 the 174.6B: GPT-3 175B with a vocabulary that 8 divides), Llama 3 (table 3 of
#: arXiv 2407.21783; vocabulary from the released configuration), MPT (llm-foundry, scripts/train/benchmarking), and
#: mixtures by their released configurations (arXiv 2401.04088; arXiv 2401.06066, whose first layer is dense: left out).
#: GPTs share one weight between embedding and head. For counting, or for the meta device.
PUBLISHED: Mapping[str, TransformerConfig] = _published()
