"""Layers that ranks share, as lesson 09 builds them, beside one process: errors, what was sent, and what is kept."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from course_utils import memory
from course_utils.costs import TwoLevelCluster, all_reduce_seconds, bytes_sent
from course_utils.models import GPT, SeparateQKVAttention, build_gpt
from course_utils.ranks import Entry, Ledger, device, record, share
from course_utils.transformer import TransformerConfig

__all__ = [
    "Comparison", "LayerTrial", "adam", "compare", "compute_seconds", "exchange_seconds", "held_by_formula",
    "held_for_backward", "joined", "large", "operations", "parameters_of_rank", "rank_memory", "ring_bytes",
    "separate_qkv", "trial_table", "try_layer",
]

share("torch.distributed.tensor.parallel")  # what each rank would import for itself

TOLERANCE = 1e-5  # relative, in float32

Make = Callable[[nn.Module], nn.Module]
Step = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LayerTrial:
    """What one rank found with its part of a layer.

    Attributes
    ----------
    errors : dict of str to float
        Of "loss", "x" (the gradient of the input), and the gradient of each parameter: the largest difference from one
        process, as a share of the largest number there.
    forward, backward : Ledger
        What this rank sent.
    """

    errors: dict[str, float]
    forward: Ledger
    backward: Ledger

    @property
    def equal(self) -> bool:
        """Whether loss and all gradients are those of one process."""
        return max(self.errors.values()) < TOLERANCE


@dataclass(frozen=True)
class Comparison:
    """What one rank found in training its part of a model beside one process.

    Attributes
    ----------
    errors : dict of str to float
        Relative, of "logits" and "gradients" before the first update and of "losses"; absolute, of "weights" at the
        end.
    ledger, stepping : Ledger
        What this rank sent in forward and backward of the last step, and while the optimizer made it.
    """

    errors: dict[str, float]
    ledger: Ledger
    stepping: Ledger

    @property
    def said(self) -> str:
        """Each kind of numbers, and whether it is equal."""
        return ", ".join(f"{name} {'equal' if e < TOLERANCE else 'WRONG'}" for name, e in self.errors.items())

    @property
    def equal(self) -> bool:
        """Whether everything is as in one process."""
        return max(self.errors.values()) < TOLERANCE

    def same_as_one_process(self) -> str:
        """Say that everything is equal; raises `AssertionError` if anything is not."""
        if not self.equal:
            raise AssertionError(f"not as in one process: {self.said}")
        return f"equal to one process: {', '.join(self.errors)}"


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _off(tensor: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Largest difference, as a share of the largest number expected, or of `least` if that is larger."""
    scale = max(expected.detach().abs().max().item(), least)
    return (tensor - expected).detach().abs().max().item() / scale


def _gradients_as_weights(module: nn.Module) -> nn.Module:
    """A copy whose parameters have the gradients of the original as their values."""
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for p, original in zip(copied.parameters(), module.parameters(), strict=True):
            p.copy_(original.grad)
    return copied


def _gradient_errors(part: nn.Module, whole: nn.Module, make: Make) -> dict[str, float]:
    """By parameter of a rank's part, how far its gradient is off; what `make` takes of a gradient is what it should be.

    A gradient that is nothing but rounding, such as that of the bias of keys, is measured by larger ones.
    """
    expected = [_full(p.detach()) for p in make(_gradients_as_weights(whole)).parameters()]
    least = 0.01 * max(p.grad.abs().max().item() for p in whole.parameters())
    pairs = zip(part.named_parameters(), expected, strict=True)
    return {name: _off(_full(p.grad), gradient, least) for (name, p), gradient in pairs}


def try_layer(make: Make, whole: nn.Module, width: int, tokens: int = 12) -> LayerTrial:
    """On each rank: forward and backward of its part of a layer, beside the whole layer with the same input.

    Parameters
    ----------
    make : callable
        ``make(whole)`` -> this rank's part, which takes and returns (b, tokens, width) on every rank. It may change its
        argument, which is a copy.
    whole : module
    width, tokens : int
    """
    whole = copy.deepcopy(whole).to(device())
    part = make(copy.deepcopy(whole))
    x = torch.randn(2, tokens, width, generator=torch.Generator().manual_seed(1)).to(next(whole.parameters()))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected = whole(inputs[0]).square().mean()
    expected.backward()
    with record() as forward:
        loss = part(inputs[1]).square().mean()
    with record() as backward:
        loss.backward()
    errors = {"loss": _off(loss, expected), "x": _off(inputs[1].grad, inputs[0].grad)}
    return LayerTrial(errors | _gradient_errors(part, whole, make), forward, backward)


def trial_table(trials: Mapping[str, LayerTrial], weights: Iterable[str] = ()) -> str:
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
    """Say whether parts along the last dimension, or terms of a sum, make the whole tensor.

    Raises
    ------
    AssertionError
        If they make another one.
    """
    in_pieces = parts[0].shape[-1] * len(parts) == whole.shape[-1]
    torch.testing.assert_close(torch.cat([*parts], -1) if in_pieces else sum(parts), whole, rtol=1e-4, atol=1e-4)
    return "in pieces" if in_pieces else "a sum over ranks"


def separate_qkv(model: GPT) -> GPT:
    """Give each block layers of their own for queries, keys and values, with the same weights; return the model."""
    for block in model.blocks:
        if not isinstance(block.attention, SeparateQKVAttention):
            block.attention = SeparateQKVAttention(block.attention)
    return model


def adam(model: nn.Module) -> torch.optim.Adam:
    """Adam with an `eps` that keeps it from making steps of rounding errors, which differ with the number of ranks."""
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6, foreach=False)


def compare(
    make: Make, step: Step, text: Callable[[int], tuple[Tensor, Tensor]], config: TransformerConfig, steps: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """On each rank: train its part of a GPT beside the whole.

    Parameters
    ----------
    make : callable
        ``make(model)`` -> this rank's part of a GPT; it may change its argument. Logits may stay in pieces.
    step : callable
        ``step(part, x, y)`` runs forward and backward, and returns the loss.
    text : callable
        ``text(number)`` -> tokens and targets of a step, the same on every rank.
    config : TransformerConfig
    steps : int
    dtype : torch.dtype
    """
    alone = build_gpt(config, dtype=dtype).to(device())
    part, (x, y) = make(copy.deepcopy(alone)), text(0)
    with torch.no_grad():
        logits, expected = _full(part(x)), alone(x)
    if logits.shape != expected.shape:
        expected = expected.tensor_split(dist.get_world_size(), -1)[dist.get_rank()]
    errors = {"logits": _off(logits, expected), "gradients": 0.0, "losses": 0.0}
    optimizers = adam(part), adam(alone)
    for number in range(steps):
        x, y = text(number)
        loss = alone.loss(x, y)
        loss.backward()
        with record() as ledger:
            got = step(part, x, y)
        errors["losses"] = max(errors["losses"], _off(_full(got), loss))
        if number == 0:
            errors["gradients"] = max(_gradient_errors(part, alone, make).values())
        with record() as stepping:
            optimizers[0].step()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    pairs = zip(part.parameters(), make(alone).parameters(), strict=True)
    errors["weights"] = max((_full(p) - _full(q)).abs().max().item() for p, q in pairs)
    return Comparison(errors, ledger, stepping)


# --- what is sent


def large(ledger: Ledger, numbers: int, element_bytes: int = 4) -> list[Entry]:
    """Return the operations on exactly so many numbers: those on the activations of all tokens."""
    return [entry for entry in ledger if entry.bytes == element_bytes * numbers]


def ring_bytes(entries: Iterable[Entry]) -> float:
    """Return the bytes that a rank sends for these operations if each is a ring."""
    return sum(bytes_sent(entry.op, len(entry.ranks), entry.bytes) for entry in entries)


def operations(entries: Iterable[Entry]) -> str:
    """Return how many operations there are of each kind: ``"10 all_gather, 10 reduce_scatter"``."""
    return ", ".join(f"{k} {op}" for op, k in sorted(Counter(entry.op for entry in entries).items()))


# --- what is kept


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local = tensor.detach()
    return (local.to_local() if isinstance(local, DTensor) else local).untyped_storage()


def held_for_backward(make: Make, tokens: Tensor, config: TransformerConfig) -> float:
    """On each rank: what one layer keeps for backward, in numbers a token, as multiples of the hidden size.

    The difference between models of two layers and of one, each block of memory counted once, parameters apart.

    Parameters
    ----------
    make : callable
        ``make(model)`` -> this rank's part of a GPT.
    tokens : tensor
        (b, T), the same on every rank.
    config : TransformerConfig
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
    """Return what `held_for_backward` should find on one of t ranks, with gloo's kernels in float32.

    Parameters
    ----------
    kind : {"one process", "tensor parallel", "sequence parallel"}
    config : TransformerConfig
    t : int
    """
    norms, attention = 4 / config.hidden, config.heads / config.hidden  # statistics, and one number a head
    formulas = {
        "one process": 16 + norms + attention,
        "tensor parallel": 4 + norms + (12 + attention) / t,
        "sequence parallel": 2 + (14 + norms + attention) / t,
    }
    if kind not in formulas:
        raise ValueError(f"kind must be one of {', '.join(formulas)}, got {kind!r}")
    return formulas[kind]


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
