"""The loop of train.py with DeepSpeed's engine instead of FSDP2: train.py --engine deepspeed --config deepspeed.json.

Stage, buckets and offload come from the JSON file; batch, precision, clipping and learning rate from train.py's flags.
"""

import argparse
import collections
import importlib
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

program = importlib.import_module("train")  # the file beside this one: model, data and log are its own
FROM_FLAGS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
              "gradient_clipping", "bf16", "fp16", "optimizer", "scheduler")


def configuration(args: argparse.Namespace, ranks: int) -> dict:
    """Return DeepSpeed's configuration; end with one sentence where file and flags would both say something."""
    if args.replicate * args.tp > 1 or args.compile:
        raise SystemExit("--engine deepspeed goes without --replicate, --tp and --compile")
    config = json.loads(args.config.read_text()) if args.config else {"zero_optimization": {"stage": 2}}
    if twice := [key for key in FROM_FLAGS if key in config]:
        raise SystemExit(f"{args.config} must leave {', '.join(twice)} to the flags of train.py")
    return config | {
        "train_micro_batch_size_per_gpu": args.batch // ranks // args.micro,
        "gradient_accumulation_steps": args.micro,
        "gradient_clipping": args.clip if math.isfinite(args.clip) else 0.0,
        "bf16": {"enabled": args.bf16},
        "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,
    }


@torch.no_grad()
def whole_model(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> torch.nn.Module:
    """Return the model that train.py shards, with the same weights, whole: DeepSpeed shards it by itself."""
    model = program.GPT(args).to(device)
    for p, shard in zip(model.parameters(), program.build(args, device, mesh).parameters(), strict=True):
        p.copy_(shard.full_tensor())
    return model


def engine_for(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh):
    """Return DeepSpeed's engine around model and optimizer."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if device.type == "cpu":  # no C++ extension: DeepSpeed would compile its own all-reduce, for minutes
        deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)
    deepspeed.utils.logger.setLevel("ERROR")
    backend = "gloo" if device.type == "cpu" else "nccl"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    model = whole_model(args, device, mesh)
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == matrices],
               "weight_decay": args.weight_decay * matrices} for matrices in (True, False)]
    optimizer = torch.optim.AdamW(groups, betas=(*args.betas,))
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config=configuration(args, dist.get_world_size()), dist_init_required=False
    )[0]


def train(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> int:
    """Train until all steps are done or a rank gets SIGTERM; return the number of steps done."""
    engine = engine_for(args, device, mesh)
    tokens, rank = np.memmap(args.data, dtype=args.token_type, mode="r"), dist.get_rank()
    share, step, samples, log = args.batch // dist.get_world_size(), 0, 0, program.Log(device)
    if Path(args.out, "latest").exists():
        _, state = engine.load_checkpoint(args.out)
        step, samples = state["step"], state["samples"]
    profiler, ends = program.tracer(args), step >= args.steps
    reader, begin = ThreadPoolExecutor(1), samples + rank * share
    ahead = reader.submit(program.read_windows, args, tokens, range(begin, begin + share))
    profiler.start()
    while not ends:
        profiler.step()
        with log.part("data"):
            batch, begin = ahead.result().chunk(args.micro), begin + args.batch
            ahead = reader.submit(program.read_windows, args, tokens, range(begin, begin + share))
        told = dist.all_reduce(flag := torch.tensor(len(args.signals)), async_op=True)
        if step + 1 == args.steps or (step + 1) % args.log_every == 0:
            with log.part("wait"):
                told.wait()
        torch.manual_seed((args.seed * 1_000_003 + step) * dist.get_world_size() + rank)
        log.losses.append(torch.zeros((), device=device))
        for group in engine.optimizer.param_groups:
            group["lr"] = rate = program.learning_rate(args, step)
        for windows in batch:
            with log.part("forward"):
                loss = engine(windows.to(device, non_blocking=True))
            with log.part("backward"):
                engine.backward(loss)  # divides by the micro-batches itself
            log.losses[-1] += loss.detach().float() / args.micro
            with log.part("optimizer"):
                engine.step()  # clips and updates after the last one
        step, samples, norm = step + 1, samples + args.batch, float(engine.get_global_grad_norm() or math.nan)
        if args.clip and not math.isfinite(norm):
            raise SystemExit(f"no finite gradients in step {step}")
        told.wait()
        ends = flag.item() > 0 or step == args.steps
        if ends or step % args.save_every == 0:
            with log.part("checkpoint"):
                engine.save_checkpoint(args.out, f"step-{step:09}", {"step": step, "samples": samples})
        if ends or step % args.log_every == 0:
            log.write(args, step, norm=norm, lr=rate, skipped=0)
    profiler.stop()
    engine.destroy()  # its hooks end before Python does
    return step
