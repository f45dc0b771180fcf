"""The checks of ``gpu-check``, in the order in which they run: what says most of a machine first."""

from __future__ import annotations

from .runner import Check

__all__ = ["CHECKS"]


def _check(name: str, target: str, limit: float, what: str) -> Check:
    return Check(name, what, f"{__package__}.{target}", limit)


CHECKS: tuple[Check, ...] = (
    _check("machine", "machine:describe", 60, "What this machine is."),
    _check("collectives", "collectives:collectives", 90,
           "Every collective on one rank a GPU: results, and time of all-reduce over message size."),
    _check("ledger", "collectives:ledger", 60, "The ledger sees each operation with its bytes, also under NCCL."),
    _check("two_ranks_one_gpu", "collectives:two_ranks_one_gpu", 60, "NCCL refuses two ranks on one GPU."),
    _check("launcher", "launching:launcher", 100,
           "launch() with one rank a GPU: results, device, and what it refuses, names and survives."),
    _check("same_losses", "training:same_losses", 75,
           "The course's GPT learns the same under DDP and FSDP on the ranks as in one process on the CPU."),
    _check("copies", "speed:copies", 45, "Copies between pageable memory, pinned memory and GPUs."),
    _check("batches", "speed:batches", 45, "Steps that wait for the copy of a batch, and steps that need not."),
    _check("roofline", "speed:roofline", 45, "Arithmetic intensity and FLOP/s of additions and matrix products."),
    _check("layer_products", "speed:layer_products", 45,
           "Matrix products of a layer, by tokens at a time and by the ranks that share it."),
    _check("fp8_products", "speed:fp8_products", 60,
           "The same products in FP8 with scales, and the time of the conversion."),
    _check("attention", "speed:attention", 60, "Causal attention by length: FLOP/s and memory of each kernel."),
    _check("mfu_gpt", "training:mfu_gpt", 75, "Model FLOP/s of two sizes of the course's GPT on one device."),
    _check("train_program", "programs:train", 110, "scripts/train.py under torchrun: losses, MFU, going on."),
    _check("resume", "programs:resume", 120, "scripts/train.py stopped by SIGTERM goes on with the same losses."),
    _check("scripts", "programs:scripts", 110, "The other programs of scripts/ under torchrun."),
    _check("profiler_trace", "profiling:trace", 60, "A trace of the profiler, of training with communication."),
    _check("memory_snapshot", "profiling:memory", 45, "Allocated memory over a training step, from a snapshot."),
    _check("c_program", "programs:c_program", 75, "native/all_reduce.c on real NCCL, in both of its modes."),
    _check("tracer", "programs:tracer", 75, "native/trace_nccl.c sees the calls of the C program and of PyTorch."),
    *(
        _check(f"cells_{number}", f"lesson_cells:lesson_{number}", 60,
               f"The cells of lesson {number} that do something else, or something more, where there are GPUs.")
        for number in ("01", "02", "03", "04", "05", "06", "07", "10")
    ),
)
