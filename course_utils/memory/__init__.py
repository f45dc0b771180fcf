"""Bytes of training on one rank, by part: by formula, measured tensor by tensor, and on simulated clusters."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..lazy import attach
from ..transformer import TransformerConfig
from .parts import PARTS, Memory, Simulated

__all__ = [
    "OPTIMIZERS", "PARTS", "PRECISIONS", "Memory", "Precision", "Simulated", "Tracker", "activation_bytes",
    "held_memory", "model_states", "simulate", "track", "training_memory",
]

#: These load torch, which the formulas do without.
__getattr__, __dir__ = attach(__name__, {"tracking": ("Tracker", "held_memory", "track")})

_WRAPS = ("block", "layer", "model")


@dataclass(frozen=True)
class Precision:
    """Bytes per element of each kind of tensor; `master` is an extra copy of the weights that the optimizer steps."""

    parameter: int
    gradient: int
    master: int
    state: int
    activation: int


#: "mixed" is the ZeRO paper's: 16 bytes a parameter with Adam (Rajbhandari et al. 2020, section 3.1). "bf16 policy" is
#: FSDP2's `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`: it keeps fp32 shards and gathers, computes and reduces in
#: bf16; 16 bytes too, in other parts.
PRECISIONS = {
    "fp32": Precision(4, 4, 0, 4, 4),
    "mixed": Precision(2, 2, 4, 4, 2),
    "mixed, fp32 gradients": Precision(2, 4, 4, 4, 2),
    "bf16": Precision(2, 2, 0, 2, 2),
    "bf16 policy": Precision(4, 4, 0, 4, 2),
}

#: States that an optimizer keeps of each parameter.
OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}

_STAGES = (0, 1, 2, 3)


def _choose(table: dict, name: object, what: str):
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, table))}, got {name!r}")
    return table[name]


def _positive(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _check_stage(stage: object) -> None:
    if isinstance(stage, bool) or stage not in _STAGES:
        raise ValueError(f"stage must be 0 (DDP), 1, 2 or 3 (FSDP), got {stage!r}")


def model_states(
    parameters: float, *, stage: int = 0, ranks: int = 1, precision: str = "mixed", optimizer: str = "adam"
) -> Memory:
    """Return the bytes of model states on one rank under ZeRO (Rajbhandari et al. 2020, figure 1).

    Stage 1 divides the optimizer's share by the number of ranks, stage 2 the gradients too, stage 3 the parameters
    too. An uneven division gives some ranks a little more than this.

    Parameters
    ----------
    parameters : float
        Number of parameters of the whole model.
    stage : {0, 1, 2, 3}
        0 is plain data parallelism, 3 is FSDP's full sharding.
    ranks : int
        Ranks that share the states.
    precision, optimizer : str
        Names of `PRECISIONS` and `OPTIMIZERS`.
    """
    if isinstance(parameters, bool) or not isinstance(parameters, int | float) or not parameters > 0:
        raise ValueError(f"parameters must be a number above 0, got {parameters!r}")
    _check_stage(stage)
    _positive("ranks", ranks)
    width, states = _choose(PRECISIONS, precision, "precision"), _choose(OPTIMIZERS, optimizer, "optimizer")
    return Memory(
        parameters=parameters * width.parameter / (ranks if stage >= 3 else 1),
        gradients=parameters * width.gradient / (ranks if stage >= 2 else 1),
        optimizer=parameters * (width.master + states * width.state) / (ranks if stage >= 1 else 1),
    )


def activation_bytes(
    config: TransformerConfig, batch: int, length: int | None = None, *, precision: str = "fp32"
) -> float:
    """Return the bytes that a forward of `models.GPT` and its loss leave for backward, operation by operation.

    For each of the M = `batch` x `length` tokens a block keeps 16 C elements: the inputs of its two layer norms (2 C)
    and their outputs, which the linear layers after them need (2 C), queries, keys and values (3 C), the output of
    attention (C), and the input and output of GELU (8 C); besides a mean and a reciprocal deviation for each norm (4
    elements) and, in fp32, a log-sum-exp for each head. The fused attention keeps no T x T scores. With
    `config.checkpoint` a block keeps its input only (C); the state of the random generator, some kB a block that no
    operation sees, is left out. Around the blocks: the last norm and its output (2 C + 2), the log-probabilities of
    the loss (V), token, target and position as int64, and two numbers of the loss. On a GPU statistics of norms are
    fp32.

    Parameters
    ----------
    config : TransformerConfig
        Model; `config.checkpoint` is honoured.
    batch, length : int
        Sequences on this rank and tokens in each; by default the full context.
    precision : str
        Name of `PRECISIONS`; what counts is the width of its activations.
    """
    length = _check_run(config, batch, length)
    width = _choose(PRECISIONS, precision, "precision").activation
    tokens, around = batch * length, 2 * config.hidden + 2 + config.vocabulary
    blocks = config.layers * _block_activations(config, tokens, width, config.checkpoint)
    return blocks + tokens * (around * width + 16) + 8 * length + 2 * width


def _block_activations(config: TransformerConfig, tokens: int, width: int, checkpoint: bool) -> int:
    if checkpoint:
        return tokens * config.hidden * width
    return tokens * ((16 * config.hidden + 4) * width + 4 * config.heads)


def training_memory(
    config: TransformerConfig,
    batch: int,
    *,
    length: int | None = None,
    stage: int = 0,
    ranks: int = 1,
    precision: str = "mixed",
    optimizer: str = "adam",
    gradient_copy: bool = False,
) -> Memory:
    """Return the bytes of training `models.GPT` on one rank when the most is held.

    Model states are those of `model_states`, gradients in full, as if a second micro-batch were running. Activations
    and buffers are those of the moment with the largest sum: the loss, the head's backward, or backward of the
    last blocks (with the recomputed activations of one under `config.checkpoint`). Modelled as buffers are

    - gradients of activations;
    - stages 0 and 1: with `gradient_copy` buckets for all gradients, beside these;
    - stage 2: the gradients of one block or of what is around the blocks, and a flat copy to reduce;
    - stage 3: what FSDP2 holds with a unit for each block and one for the rest: the rest gathered throughout, a block
      and the next one ahead, unsharded gradients, and a flat copy to reduce.

    Gathered parameters and unsharded gradients have the width of activations. Not modelled: temporaries of the
    optimizer, workspaces of libraries, fragments of an allocator, what CUDA itself needs.

    Parameters
    ----------
    config : TransformerConfig
        Model; `config.checkpoint` is honoured.
    batch, length : int
        Sequences on this rank and tokens in each; by default the full context.
    stage, ranks, precision, optimizer
        As for `model_states`.
    gradient_copy : bool
        At stages 0 and 1, whether buckets are a second copy of the gradients, as DDP makes them by default. Otherwise
        gradients are views into them, as with ``gradient_as_bucket_view=True``.
    """
    length = _check_run(config, batch, length)
    parameters = config.parameter_count
    states = model_states(parameters, stage=stage, ranks=ranks, precision=precision, optimizer=optimizer)
    width, tokens, c = PRECISIONS[precision].activation, batch * length, config.hidden
    wide, logits, head = tokens * c * width, tokens * config.vocabulary * width, config.vocabulary * c * width
    unit = config.layer_parameters * width
    root = parameters * width - config.layers * unit
    kept = activation_bytes(config, batch, length, precision=precision)
    block = _block_activations(config, tokens, width, checkpoint=False)
    each = _block_activations(config, tokens, width, config.checkpoint)
    below = kept - logits - 2 * wide - each  # of the blocks below the last
    if stage != 3:
        copy = parameters * PRECISIONS[precision].gradient if gradient_copy else 0
        flat = 2 * max(unit, root) if stage == 2 else copy
        moments = [(kept, 2 * logits), *_in_block(below, 0, block, wide, 0)]
        return _at_peak(states, [(held, buffers + flat) for held, buffers in moments])
    square, position, two = c * c * width, config.context * c * width, min(config.layers, 2)
    moments = [  # activations and buffers; what is around the blocks, `root`, is gathered throughout
        (each, 2 * root + 2 * unit),  # first block gathered: shards arrive flat, then are copied apart
        (below, root + (1 + two) * unit),  # last block gathered, the flat copy of the one before not yet gone
        (kept, root + 2 * logits),  # loss, backward
        (kept - logits, root + head + unit + logits + wide),  # head, backward; the last block arrives
        *_in_block(below, root + head + two * unit, block, wide, square),  # and the one before gathered ahead
        (8 * length, root + 2 * head + position + unit + wide),  # embedding, backward
        (8 * length, 2 * root),  # gradients of what is around the blocks, and their flat copy
    ]
    if config.layers > 1:  # while the gradients of the last block are under way
        moments += _in_block(below - each, root + head + min(config.layers, 3) * unit, block, wide, square)
    return _at_peak(states, moments)


def _in_block(below: float, buffers: float, block: float, wide: float, square: float) -> list[tuple[float, float]]:
    """Return activations and buffers when the weights of down, up and qkv get their gradients."""
    left = ((0, 5, 4), (8, 6, 8), (14, 5, 12))  # freed, in C a token; gradients, in C a token and in C^2
    return [(below + block - f * wide, buffers + g * wide + s * square) for f, g, s in left]


def _at_peak(states: Memory, moments: list[tuple[float, float]]) -> Memory:
    held, buffers = max(moments, key=sum)
    return replace(states, activations=held, buffers=buffers)


#: Types of stored and of gathered parameters in `simulate`.
_SIMULATED = {
    "fp32": ("float32", "float32"), "bf16": ("bfloat16", "bfloat16"), "bf16 policy": ("float32", "bfloat16"),
}


def simulate(
    config: TransformerConfig,
    ranks: int,
    *,
    stage: int = 3,
    batch: int = 1,
    length: int | None = None,
    precision: str = "fp32",
    wrap: str = "block",
) -> Simulated:
    """Run one training step of a model on a cluster that does not exist, and return what rank 0 would hold.

    PyTorch's own code runs (the model, FSDP2, AdamW) on tensors without data and in a process group that sends
    nothing, so that a model of any size fits into the memory of a laptop. It runs on a worker process; the caller's
    process groups are left alone.

    Parameters
    ----------
    config : TransformerConfig
        Model; `config.checkpoint` is honoured.
    ranks : int
        Size of the fake process group.
    stage : {0, 3}
        3 shards with FSDP2; 0 keeps everything on every rank and averages gradients through buckets, as DDP does by
        default. Stages 1 and 2 have no PyTorch implementation that runs on fake tensors.
    batch, length : int
        Sequences on this rank and tokens in each; by default the full context.
    precision : {"fp32", "bf16", "bf16 policy"}
        See `PRECISIONS`; "bf16 policy" needs stage 3.
    wrap : {"block", "layer", "model"}
        What FSDP2 gathers at a time: each block; attention and MLP apart; everything at once.
    """
    length = _check_run(config, batch, length)
    _positive("ranks", ranks)
    if isinstance(stage, bool) or stage not in (0, 3):
        raise ValueError(f"stage must be 0 (as DDP) or 3 (FSDP2) in a simulation, got {stage!r}")
    stored, computed = _choose(_SIMULATED, precision, "precision")
    if stage == 0 and stored != computed:
        raise ValueError(f"precision {precision!r} is a policy of FSDP2: stage 0 takes 'fp32' and 'bf16' only")
    _choose(dict.fromkeys(_WRAPS), wrap, "wrap")
    arguments = (config, ranks, stage, batch, length, stored, computed, wrap)
    from ..ranks import launch, on_a_rank
    from . import simulation

    if on_a_rank():
        return simulation.step(*arguments)
    return launch(simulation.step_apart, *arguments, world_size=1, backend="gloo", timeout=300)[0]


def _check_run(config: object, batch: object, length: object) -> int:
    """Refuse what cannot be run and return the number of tokens in a sequence."""
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"config must be a models.TransformerConfig, got {type(config).__name__}")
    config.require_gpt2_layers()
    _positive("batch", batch)
    if length is None:
        return config.context
    _positive("length", length)
    if length > config.context:
        raise ValueError(f"length must be at most the context of the model, {config.context}, got {length}")
    return length
