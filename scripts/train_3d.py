"""Train a GPT on a mesh of pipeline x data x tensor parallelism, as lesson 12 builds it, under torchrun.

    torchrun --standalone --nproc-per-node=8 scripts/train_3d.py --out run --data text.txt --pp 2 --tp 2

Data parallelism (FSDP) takes the ranks that are left. Called again with the same --out, it goes on from its newest
checkpoint, on any mesh. It ends with code 0 when all steps are done, with 75 when SIGTERM has stopped it and its
state is saved. The file imports PyTorch and NumPy, and nothing of the course.
"""

import argparse
import os
import shutil
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # stages hold other parameters: one key for each


def arguments(world_size: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for checkpoints; all hosts see it")
    add("--data", type=Path, required=True, help="any file; its bytes are the tokens")
    add("--pp", type=int, default=1, help="pipeline stages")
    add("--tp", type=int, default=1, help="ranks that share each layer")
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--length", type=int, default=64, help="tokens in a window")
    add("--steps", type=int, default=20, help="optimizer steps in all, also of earlier calls")
    add("--batch", type=int, default=16, help="windows in a step, over all replicas")
    add("--micro", type=int, default=4, help="micro-batches of a replica, at least --pp")
    add("--lr", type=float, default=1e-3)
    add("--clip", type=float, default=1.0, help="largest norm of all gradients together")
    add("--bf16", action="store_true", help="compute in bf16; weights and sums stay in fp32")
    add("--seed", type=int, default=0)
    add("--save-every", type=int, default=50, help="steps between two checkpoints")
    args = parser.parse_args()
    args.dp = world_size // (args.pp * args.tp)
    if args.pp * args.dp * args.tp != world_size:
        raise SystemExit(f"PP {args.pp} x TP {args.tp} does not divide {world_size} ranks")
    for name, of in (("heads", args.tp), ("hidden", args.heads), ("layers", args.pp), ("batch", args.dp * args.micro)):
        if getattr(args, name) % of:
            raise SystemExit(f"--{name} must be a multiple of {of} here: {getattr(args, name)}")
    if args.micro < args.pp:
        raise SystemExit(f"--micro must be at least PP {args.pp}: {args.micro}")
    return args


def connect(args: argparse.Namespace) -> tuple[torch.device, DeviceMesh]:
    """Join the process group; return this rank's device and the mesh, tensor ranks side by side."""
    device, backend = torch.device("cpu"), "gloo"
    if gpus := torch.cuda.device_count():  # all of this host, or only the rank's own
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    return device, init_device_mesh(device.type, (args.pp, args.dp, args.tp), mesh_dim_names=("pp", "dp", "tp"))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to its input: (B, T, C) -> (B, T, C)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_size))  # those of this tensor rank
        q, k, v = heads.transpose(1, 2).unbind(3)  # each (B, heads, T, head size)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stage(nn.Module):
    """Consecutive blocks; the first stage also has the embeddings, the last the head. Names are those of the whole."""

    def __init__(self, args: argparse.Namespace, number: int) -> None:
        super().__init__()
        each = args.layers // args.pp
        self.blocks = nn.ModuleDict()
        for i in range(number * each, (number + 1) * each):
            self.blocks[str(i)] = drawn(Block(args.hidden, args.heads), [args.seed, i])
        if number == 0:
            self.embedding = drawn(nn.Embedding(256, args.hidden), [args.seed, args.layers])
            self.position = drawn(nn.Embedding(args.length, args.hidden), [args.seed, args.layers + 1])
        if number == args.pp - 1:
            self.norm = nn.RMSNorm(args.hidden)
            self.head = drawn(nn.Linear(args.hidden, 256, bias=False), [args.seed, args.layers + 2])

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "embedding"):
            x = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def drawn(module: nn.Module, seed: list[int]) -> nn.Module:
    """Give a module weights from a generator of its own, so that they are the same on every mesh."""
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    for p in module.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02, generator=generator)
    return module


def build(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> Stage:
    """This rank's part of the model: its stage, cut by tensor parallelism, and what that left sharded by FSDP."""
    stage = Stage(args, mesh.get_local_rank("pp")).to(device)
    plan = {}
    for i in stage.blocks:
        plan |= {f"blocks.{i}.{name}": ColwiseParallel() for name in ("qkv", "up")}
        plan |= {f"blocks.{i}.{name}": RowwiseParallel() for name in ("out", "down")}
    if hasattr(stage, "embedding"):
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
    if hasattr(stage, "head"):
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    if args.tp > 1:
        parallelize_module(stage, mesh["tp"], plan)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    keep = {"reshard_after_forward": args.pp == 1}  # with a pipeline, gather once a step, not for each micro-batch
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy, **keep)
    return fully_shard(stage, mesh=mesh["dp"], mp_policy=policy)


def batch_of(args: argparse.Namespace, data: np.ndarray, step: int, replica: int) -> tuple[Tensor, Tensor]:
    """The windows of a step that are this replica's, and their targets: both (batch / replicas, length)."""
    share, windows = args.batch // args.dp, (len(data) - 1) // args.length
    first = step * args.batch + replica * share
    begins = [n % windows * args.length for n in range(first, first + share)]
    rows = torch.from_numpy(np.stack([data[b : b + args.length + 1] for b in begins]).astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def clip(stage: Stage, mesh: DeviceMesh, limit: float) -> Tensor:
    """Scale all gradients down to a norm of at most `limit`; return the norm of the whole model's."""
    gradients, cut = [], []
    for p in stage.parameters():
        (cut if p.device_mesh.ndim == 2 else gradients).append(p.grad.to_local())  # cut by TP too, or by FSDP alone
    square = torch.zeros((), device=mesh.device_type)
    for name, held in (("tp", cut), ("dp", gradients), ("pp", [])):  # what TP copies counts once
        square += sum(g.norm().square() for g in held)
        dist.all_reduce(square, group=mesh.get_group(name))
    norm = square.sqrt()
    for g in gradients + cut:
        g.mul_((limit / norm).clamp(max=1.0))
    return norm


def save(path: Path, stage: Stage, optimizer: torch.optim.Optimizer) -> None:
    """All ranks write their pieces; the folder gets its name when all are on the disk."""
    weights, moments = get_state_dict(stage, optimizer, options=FLAT)
    unfinished = path.with_suffix(".unfinished")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was cut short, perhaps on another mesh
    dist.barrier()
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        unfinished.rename(path)
    dist.barrier()


def load(path: Path, stage: Stage, optimizer: torch.optim.Optimizer) -> None:
    """Read what this rank needs from the pieces of any mesh."""
    weights, moments = get_state_dict(stage, optimizer, options=FLAT)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(stage, optimizer, model_state_dict=weights, optim_state_dict=moments, options=FLAT)


def train(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> bool:
    """Train until all steps are done or a rank gets SIGTERM; return whether all are done."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # logits are a view, which nobody changes in place
    stage = build(args, device, mesh)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=args.lr)
    place = PipelineStage(stage, mesh.get_local_rank("pp"), args.pp, device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(place, args.micro, loss_fn=loss_of)
    data = np.memmap(args.data, dtype=np.uint8, mode="r")
    done = max((int(path.name[5:]) for path in args.out.glob("step-*[0-9]")), default=0)
    if done:
        load(args.out / f"step-{done:06}", stage, optimizer)
    for step in range(done, args.steps):
        x, y = (part.to(device) for part in batch_of(args, data, step, mesh.get_local_rank("dp")))
        losses: list[Tensor] = []  # filled on the last stage only, one for each micro-batch
        schedule.step(*([x] if place.is_first else []), target=y, losses=losses, return_outputs=False)
        norm = clip(stage, mesh, args.clip)
        optimizer.step()
        optimizer.zero_grad()
        done, mean = step + 1, torch.stack(losses).mean().item() if losses else 0.0
        dist.all_reduce(both := torch.tensor([mean, len(signals)], device=device))  # all ranks stop at one step
        loss, stop = both.tolist()  # each replica's loss is there once for each tensor rank
        if dist.get_rank() == 0:
            print(f"step {done}  loss {loss / (args.dp * args.tp):.4f}  norm {norm.item():.4f}", flush=True)
        if stop or done == args.steps or done % args.save_every == 0:
            save(args.out / f"step-{done:06}", stage, optimizer)
        if stop:
            break
    return done >= args.steps


if __name__ == "__main__":
    ARGS = arguments(int(os.environ.get("WORLD_SIZE", 1)))
    FINISHED = train(ARGS, *connect(ARGS))
    dist.destroy_process_group()
    time.sleep(0.2)  # caches of DTensor keep gloo's threads alive: let them drop their last tensors,
    # or the end of the interpreter may abort (pytorch/pytorch#179291)
    raise SystemExit(0 if FINISHED else 75)  # 75: a temporary failure, in sysexits.h
