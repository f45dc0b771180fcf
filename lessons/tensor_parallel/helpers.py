"""Layers that ranks share, as lesson 09 builds them, beside one process: errors, what was sent, and what is kept."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from course_utils import memory
from course_utils.beside import TOLERANCE, Comparison, Trial, beside, full, train_beside
from course_utils.costs import TwoLevelCluster, all_reduce_seconds
from course_utils.models import GPT, SeparateQKVAttention, build_gpt
from course_utils.ranks import Entry, Ledger, device, share
from course_utils.transformer import TransformerConfig

__all__ = [
    "compare", "compute_seconds", "exchange_seconds", "held_by_formula", "held_for_backward", "joined", "large",
    "operations", "parameters_of_rank", "rank_memory", "ring_bytes", "separate_qkv", "trial_table", "try_layer",
]

share("torch.distributed.tensor.parallel")  # what each rank would import for itself

Make = Callable[[nn.Module], nn.Module]
Step = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _part_of(make: Make, whole: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `make` takes of the whole module if its parameters have these values, by name."""
    copied = copy.deepcopy(whole)
    for name, p in copied.named_parameters():
        p.data = values[name].to(p)
    return {name: full(p) for name, p in make(copied).named_parameters()}


def try_layer(make: Make, whole: nn.Module, width: int) -> Trial:
    """On each rank: its part ``make(whole)`` of a layer, beside the whole layer with the same (2, 12, width)."""
    whole = copy.deepcopy(whole).to(device())
    part, x = make(copy.deepcopy(whole)), torch.randn(2, 12, width, generator=torch.Generator().manual_seed(1))

    def gradients() -> dict[str, tuple[Tensor, Tensor]]:
        right = _part_of(make, whole, {name: p.grad for name, p in whole.named_parameters()})
        return {name: (p.grad, right[name]) for name, p in part.named_parameters()}

    return beside(whole, part, [x], loss=lambda y: y.square().mean(), gradients=gradients, relative=True)


def trial_table(trials: Mapping[str, Trial], weights: Iterable[str] = ()) -> str:
    """Return a row for each trial: its all-reduces each way; the loss, and gradients of x and of `weights`."""
    names = ["loss", "x", *(f"{name}.weight" for name in weights)]
    heads = ["loss", "grad. of x", *(f"of {name}" for name in weights)]
    rows = [f"{'':18}{'all-reduces':^14}" + "".join(f"{head:>12}" for head in heads)]
    for name, trial in trials.items():
        said = ["right" if trial.errors[k] < TOLERANCE else f"off {trial.errors[k]:.0%}" for k in names]
        calls = f"{trial.forward.count('all_reduce')} + {trial.backward.count('all_reduce')}"
        rows.append(f"{name:18}{calls:^14}" + "".join(f"{word:>12}" for word in said))
    return "\n".join(rows)


def joined(parts: Sequence[Tensor], whole: Tensor) -> str:
    """Say whether parts along the last dimension, or terms of a sum, make the whole tensor; one of them they must."""
    in_pieces = parts[0].shape[-1] * len(parts) == whole.shape[-1]
    torch.testing.assert_close(torch.cat([*parts], -1) if in_pieces else sum(parts), whole, rtol=1e-4, atol=1e-4)
    return "in pieces" if in_pieces else "a sum over ranks"


def separate_qkv(model: GPT) -> GPT:
    """Give each block's attention one layer each for queries, keys and values, with the same weights."""
    for block in model.blocks:
        block.attention = SeparateQKVAttention(block.attention)
    return model


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Adam:
    """With an `eps` that keeps it from making steps of rounding errors, which differ with the number of ranks."""
    return torch.optim.Adam(parameters, lr=1e-3, eps=1e-6, foreach=False)


def compare(
    make: Make, step: Step, text: Callable[[int], tuple[Tensor, Tensor]], config: TransformerConfig
) -> Comparison:
    """On each rank: train its part ``make(model)`` of a GPT with ``step(part, x, y)``, beside the whole."""
    alone = build_gpt(config).to(device())
    part, (x, _) = make(copy.deepcopy(alone)), text(0)
    with torch.no_grad():
        logits, expected = full(part(x)), alone(x)
    if logits.shape != expected.shape:
        expected = expected.tensor_split(dist.get_world_size(), -1)[dist.get_rank()]
    off = ((logits - expected).abs().max() / expected.abs().max()).item()
    run = train_beside(
        part, partial(step, part), alone, text, 2, optimizer=_adam, part_of=partial(_part_of, make, alone),
        relative=("losses", "gradients"),
    )
    errors = {name: run.errors[name] for name in ("gradients", "losses", "weights")}  # in the order in which they arise
    return replace(run, errors={"logits": off, **errors})


# --- what is sent


def large(ledger: Ledger, numbers: int) -> list[Entry]:
    """Return the operations on exactly so many numbers of 4 bytes: those on the activations of all tokens."""
    return [entry for entry in ledger if entry.bytes == 4 * numbers]


def ring_bytes(entries: Iterable[Entry]) -> float:
    """Return the bytes that a rank sends for these operations if each is a ring."""
    return Ledger([*entries]).bytes_sent()


def operations(entries: Iterable[Entry]) -> str:
    """Return how many operations there are of each kind: ``"10 all_gather, 10 reduce_scatter"``."""
    return ", ".join(f"{k} {op}" for op, k in sorted(Counter(entry.op for entry in entries).items()))


# --- what is kept


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local = tensor.detach()
    return (local.to_local() if isinstance(local, DTensor) else local).untyped_storage()


def held_for_backward(make: Make, tokens: Tensor, config: TransformerConfig) -> float:
    """On each rank: numbers a token that one layer keeps for backward, as multiples of the hidden size.

    The difference between models of two layers and of one, each block of memory counted once, parameters apart.
    """
    held = []
    for layers in (1, 2):
        part = make(build_gpt(replace(config, layers=layers)).to(device()))
        own, found = {_storage(p).data_ptr() for p in part.parameters()}, {}

        def note(tensor: Tensor, own: set = own, found: dict = found) -> Tensor:
            storage = _storage(tensor)
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logits = part(tokens)  # held until the bytes are counted, and with it all that was kept
        held.append(sum(found.values()))
        del logits
    return (held[1] - held[0]) / (4 * tokens.numel() * config.hidden)


def held_by_formula(kind: str, config: TransformerConfig, t: int) -> float:
    """Return what `held_for_backward` should find on one of t ranks, with gloo's kernels in float32."""
    norms, attention = 4 / config.hidden, config.heads / config.hidden  # statistics, and one number a head
    return {
        "one process": 16 + norms + attention,
        "tensor parallel": 4 + norms + (12 + attention) / t,
        "sequence parallel": 2 + (14 + norms + attention) / t,
    }[kind]


def parameters_of_rank(config: TransformerConfig, t: int) -> float:
    """Return the parameters on one of t ranks: norms, positions and biases of row-parallel layers are not split."""
    h = config.hidden
    block = (12 * h**2 + 7 * h) / t + 6 * h
    return config.layers * block + config.vocabulary * h / t + (config.context + 2) * h


def rank_memory(config: TransformerConfig, t: int, sequences: int, sequence_parallel: bool = False) -> memory.Memory:
    """Return model states and activations of the blocks on one of t ranks, in mixed precision with Adam.

    A layer keeps 16 h numbers of 2 bytes a token, of which 12 h are split, and 14 h with sequence parallelism; norms'
    statistics and attention's row sums are left out.
    """
    split = 14 if sequence_parallel else 12
    tokens = sequences * config.context
    kept = (16 - split + split / t) * config.hidden * tokens * config.layers
    return replace(memory.model_states(parameters_of_rank(config, t)), activations=2 * kept)


# --- what it costs


def compute_seconds(config: TransformerConfig, t: int, tokens: float, rate: float) -> float:
    """Return the seconds of forward and backward of one layer on one of t ranks, at `rate` FLOP/s.

    72 h² FLOPs a token for the matrices and 12 s h for attention, s tokens in a sequence.
    """
    h = config.hidden
    return tokens * (72 * h**2 + 12 * config.context * h) / t / rate


def exchange_seconds(config: TransformerConfig, tokens: float, cluster: TwoLevelCluster) -> float:
    """Return the seconds of the four all-reduces of one layer, 2 bytes a number, not overlapped."""
    way = "ring" if cluster.nodes == 1 else "hierarchical"
    return 4 * all_reduce_seconds(way, 2 * tokens * config.hidden, cluster)
