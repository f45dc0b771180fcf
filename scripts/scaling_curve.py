"""How well does data parallelism scale here? One job of N ranks measures steps on 1, 2, 4 … N of them.

    torchrun --standalone --nproc-per-node=8 scripts/scaling_curve.py --bf16 --peak-tflops 989

Rank 0 prints a line for each number of ranks: tokens/s, efficiency against one rank, the share of a step that waits
for messages (a step against one without them), and MFU. Put your own model into `build` and your own batch into `run`.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_utils.models import TransformerConfig, build_gpt, loss_of


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=12, help="windows of each rank; with --strong, of all ranks")
    parser.add_argument("--strong", action="store_true", help="divide the batch among the ranks")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="tokens of a window")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16 by autocast")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each kind, after three that are not")
    parser.add_argument("--peak-tflops", type=float, help="of one device, for MFU (H100 in bf16: 989)")
    args = parser.parse_args()
    args.config = TransformerConfig(
        layers=args.layers, hidden=args.hidden, context=args.length, checkpoint=args.recompute
    )
    return args


def connect() -> torch.device:
    """Join the process group, with NCCL if there are GPUs; return this rank's device."""
    device, backend = torch.device("cpu"), "gloo"
    if gpus := torch.cuda.device_count():  # all of this host, or only the rank's own
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    return device


def step_times(
    train: Callable[[bool], None], args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device
) -> list[float]:
    """Median seconds of a step with messages and of one without, which take turns; the slowest rank ends a step."""
    taken = []
    for _ in range(3 + args.steps):
        for messages in (True, False):
            dist.barrier(group=group)
            begin = time.perf_counter()
            train(messages)
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - begin)
    seconds = torch.tensor(taken, device=device).view(-1, 2)[3:]
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return seconds.median(0).values.tolist()


def build(args: argparse.Namespace) -> nn.Module:
    return build_gpt(args.config)


def run(args: argparse.Namespace, n: int, group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Seconds of a step on n ranks, and of one without messages."""
    model = DistributedDataParallel(
        build(args).to(device), process_group=group, device_ids=[device.index] if device.type == "cuda" else None
    )
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(
        args.config.vocabulary, (args.batch // n if args.strong else args.batch, args.length + 1), device=device
    )

    def train(messages: bool) -> None:
        with contextlib.nullcontext() if messages else model.no_sync():
            with torch.autocast(device.type, torch.bfloat16, args.bf16):
                loss = loss_of(model, tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step_times(train, args, group, device)  # without messages, weights drift apart


def main() -> None:
    args = arguments()
    device = connect()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    counts = [2**k for k in range(world_size.bit_length()) if 2**k < world_size] + [world_size]
    if args.strong and any(args.batch % n for n in counts):
        raise SystemExit(f"--batch must be a multiple of {counts} with --strong, got {args.batch}")
    if rank == 0:
        print(f"{'ranks':>5} {'tokens/s':>12} {'efficiency':>10} {'waits':>6} {'MFU':>6}", flush=True)
    alone = None
    for n in counts:
        group = dist.new_group(range(n))  # the other ranks make it, too, and wait at the barrier
        if rank < n:
            step, quiet = run(args, n, group, device)
            rate = args.batch * args.length * (1 if args.strong else n) / step
            alone = alone or rate
            flops = rate * args.config.flops_per_token("none")  # what is recomputed does not count
            mfu = f"{flops / (args.peak_tflops * 1e12 * n):.1%}" if args.peak_tflops else "-"
            if rank == 0:
                waits = max(0.0, 1 - quiet / step)
                print(f"{n:5} {rate:12,.0f} {rate / alone / n:10.0%} {waits:6.0%} {mfu:>6}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
