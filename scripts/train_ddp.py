"""Train the course's GPT with DistributedDataParallel: the training of lesson 04 as a program for torchrun.

    torchrun --standalone --nproc-per-node=2 scripts/train_ddp.py --steps 100 --checkpoint run.pt

A second call with the same checkpoint goes on where the first one ended: on as many ranks, or on any other number of
them that divides the samples of an epoch (2,016).
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from course_utils.data import Windows
from course_utils.models import build_gpt

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps in all, also of earlier calls")
    parser.add_argument("--batch", type=int, default=16, help="windows in a step, over all ranks")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches that a step accumulates")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate after the warm-up")
    parser.add_argument("--warmup", type=int, default=10, help="steps in which the rate rises from a tenth of --lr")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients together")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="of forward and backward")
    parser.add_argument("--compile", action="store_true", help="compile the model, cut where a bucket ends")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=int, default=5, help="steps between two lines of output")
    parser.add_argument("--checkpoint", type=Path, help="file to go on from, if it exists, and to write")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl if there are GPUs")
    return parser.parse_args()


def connect(backend: str | None) -> torch.device:
    """Join the process group and return this rank's device."""
    device, gpus = torch.device("cpu"), torch.cuda.device_count()  # all of this host, or only the rank's own
    backend = backend or ("nccl" if gpus else "gloo")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % max(1, gpus))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    return device


def samples(sampler: DistributedSampler, done: int) -> Iterator[int]:
    """Numbers of this rank's samples, epoch after epoch, once all ranks together have done so many."""
    first, skipped = divmod(done // dist.get_world_size(), len(sampler))
    for epoch in count(first):
        sampler.set_epoch(epoch)
        yield from islice(sampler, skipped if epoch == first else 0, None)


def batches(size: int, seed: int, done: int) -> DataLoader:
    """This rank's batches of windows without end. The rest of an epoch and the next one's begin share a batch."""
    windows = Windows("train")
    return DataLoader(windows, size, sampler=samples(DistributedSampler(windows, seed=seed), done))


def save(path: Path, parts: dict, step: int, done: int) -> None:
    """Rank 0 writes, and a crash leaves the old file whole; when any rank returns, the file is there."""
    if dist.get_rank() == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        fresh = path.with_suffix(".new")
        torch.save(states | {"step": step, "samples": done}, fresh)
        fresh.replace(path)
    dist.barrier()


def load(path: Path, parts: dict, device: torch.device) -> tuple[int, int]:
    """All ranks read. Returns how many steps and samples are done."""
    states = torch.load(path, map_location=device)
    for name, part in parts.items():
        part.load_state_dict(states[name])
    return states["step"], states["samples"]


def main() -> None:
    args = arguments()
    device = connect(args.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.batch % (ranks * args.micro):
        raise SystemExit(f"--batch must be a multiple of {ranks} ranks times {args.micro} micro-batches: {args.batch}")

    model = build_gpt(seed=args.seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=args.warmup)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    step = done = 0
    if args.checkpoint and args.checkpoint.exists():
        step, done = load(args.checkpoint, parts, device)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    forward = torch.compile(ddp) if args.compile else ddp

    dtype = PRECISIONS[args.precision]
    data = iter(batches(args.batch // (ranks * args.micro), args.seed, done))
    while step < args.steps:
        optimizer.zero_grad()
        mean = torch.zeros((), device=device)
        for micro in range(args.micro):
            x, y = (part.to(device) for part in next(data))
            with contextlib.nullcontext() if micro == args.micro - 1 else ddp.no_sync():
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    loss = F.cross_entropy(forward(x).flatten(0, 1), y.flatten()) / args.micro
                scaler.scale(loss).backward()
            mean += loss.detach()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:  # it falls where the step was skipped, on all ranks alike
            scheduler.step()
        step, done = step + 1, done + args.batch
        if step % args.report == 0:
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:4}  loss {mean.item() / ranks:.4f}", flush=True)
        if args.checkpoint and (step % args.save_every == 0 or step == args.steps):
            save(args.checkpoint, parts, step, done)

    dist.barrier()  # no rank leaves while another still talks to it
    del ddp, forward  # they hold the group, and must not be what ends it: with gloo that can hang (PyTorch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
