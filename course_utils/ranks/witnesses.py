"""What says later whether an operation has completed, where its Work does not, or keeps memory that it should not."""

from __future__ import annotations

import contextlib

__all__ = ["OnStream", "Silent", "witness"]


def witness(op: str, work, asynchronous: bool):
    """What says later whether an operation of gloo has completed, and holds no tensors but its own."""
    if op == "reduce_scatter":
        return Silent(not asynchronous)
    if op == "barrier":
        with contextlib.suppress(RuntimeError):  # a backend without futures
            return _Barrier(work)
    return work


class Silent:
    """In place of the Work of gloo's reduce-scatter, which keeps its tensors and never says that it has completed."""

    def __init__(self, synchronous: bool):
        self.synchronous = synchronous

    def is_completed(self) -> bool:
        return False


class _Barrier:
    """In place of the Work of gloo's barrier, which keeps the memory of operations that had just ended as it began."""

    def __init__(self, work):
        self.future = work.get_future()

    def get_future(self):
        return self.future

    def is_completed(self) -> bool:
        return self.future.done()


class OnStream:
    """In place of the Work that NCCL does not give for a synchronous operation, which it runs on the current stream."""

    def __init__(self, device):
        import torch

        self.event = torch.cuda.current_stream(device).record_event()

    def is_completed(self) -> bool:
        try:
            return self.event.query()
        except RuntimeError:  # the GPU does nothing more for this process
            return False
