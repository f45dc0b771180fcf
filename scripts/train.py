"""Train a GPT on any mesh of HSDP x TP, from one CPU rank to many GPUs; stop and go on at any time.

    torchrun --standalone --nproc-per-node=4 scripts/train.py --out run --data text.txt --steps 100

Called again with the same --out it goes on from the newest checkpoint, also on another mesh.
It ends with code 0 when all steps are done, with 75 when it was told to stop. See README.md.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import json
import math
import os
import resource
import shutil
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, parallel
from torch.profiler import ProfilerAction, profile, record_function, schedule
from torch.utils.checkpoint import checkpoint

PARTS = ("data", "wait", "forward", "backward", "optimizer", "checkpoint")
SAME = ("layers", "hidden", "heads", "vocabulary", "length", "seed", "tokens")  # in all calls
TOLD = ("steps", "batch", "lr", "warmup", "weight_decay", "betas", "clip", "dropout", "bf16")
COMPLETE = "step-" + 9 * "[0-9]"  # the name of a checkpoint, once all of it is on the disk


def arguments(world_size: int) -> argparse.Namespace:
    """Return the flags; end with one sentence where they do not fit each other or the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, switch = parser.add_argument, functools.partial(parser.add_argument, action="store_true")
    add("--out", type=Path, required=True, help="folder for checkpoints and log; hosts share it")
    add("--data", type=Path, required=True, help="token numbers in a row; or any text, its bytes")
    add("--token-type", default="uint8", choices=["uint8", "uint16", "uint32"], help="in --data")
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--hidden", type=int, default=128, help="width of the model")
    add("--heads", type=int, default=4, help="attention heads")
    add("--vocabulary", type=int, default=256, help="number of different tokens")
    add("--length", type=int, default=128, help="tokens in a window")
    add("--dropout", type=float, default=0.0, help="share of what a block adds that is dropped")
    add("--replicate", type=int, default=1, help="copies of the model in data parallelism (HSDP)")
    add("--shard", type=int, help="ranks that share one copy (FSDP); default: all that are left")
    add("--tp", type=int, default=1, help="ranks that share each layer (tensor parallelism)")
    add("--engine", default="fsdp", choices=["fsdp", "deepspeed"], help="what shards the model")
    add("--config", type=Path, help="JSON for the engine deepspeed: stage, buckets and offload")
    add("--steps", type=int, default=100, help="optimizer steps in all, also of earlier calls")
    add("--batch", type=int, default=16, help="windows in a step, over all ranks")
    add("--micro", type=int, default=1, help="micro-batches that a step accumulates")
    add("--lr", type=float, default=1e-3, help="highest learning rate")
    add("--warmup", type=int, default=10, help="steps in which the learning rate rises to --lr")
    add("--weight-decay", type=float, default=0.1, help="of AdamW, for matrices: not for norms")
    add("--betas", type=float, nargs=2, default=[0.9, 0.95], help="of AdamW")
    add("--clip", type=float, default=1.0, help="largest norm of all gradients together; inf: any")
    switch("--bf16", help="compute in bf16; weights, optimizer and sums over ranks stay in fp32")
    switch("--recompute", help="compute a block's activations again in backward")
    switch("--compile", help="compile each block with torch.compile")
    switch("--deterministic", help="only kernels that give the same bits each time")
    add("--seed", type=int, default=0, help="of weights, order of data and dropout")
    add("--save-every", type=int, default=50, help="steps between two checkpoints")
    add("--keep", type=int, default=2, help="newest checkpoints that stay")
    add("--log-every", type=int, default=10, help="steps between two lines of the log")
    add("--profile", type=Path, help="folder for traces of a few steps, one of each rank")
    add("--profile-steps", type=int, nargs=2, default=(3, 5), help="first and last, of this call's")
    add("--peak-tflops", type=float, default=math.nan, help="of one device, for MFU (H100: 989)")
    add("--timeout", type=float, default=600, help="seconds until a hanging collective is an error")
    add("--step-timeout", type=float, default=300, help="the same, from the third step on")
    args = parser.parse_args()
    args.signals, args.shard = [], args.shard or max(1, world_size // (args.replicate * args.tp))
    args.mesh = {"replicate": args.replicate, "shard": args.shard, "tp": args.tp}
    if math.prod(args.mesh.values()) != world_size:
        raise SystemExit(f"the mesh {args.mesh} does not multiply to {world_size} ranks")
    if min(args.batch, args.micro, args.save_every, args.log_every, args.keep) < 1:
        raise SystemExit("--batch, --micro, --save-every, --log-every and --keep must be 1 or more")
    if not 1 <= args.profile_steps[0] <= args.profile_steps[1]:
        raise SystemExit(f"--profile-steps must be FIRST and LAST from 1 on: {args.profile_steps}")
    for name, of in (("heads", args.tp), ("length", args.tp), ("vocabulary", args.tp),
                     ("hidden", args.heads), ("batch", args.replicate * args.shard * args.micro)):
        if getattr(args, name) % of:
            raise SystemExit(f"--{name} must be a multiple of {of} here: {getattr(args, name)}")
    return args


def connect(args: argparse.Namespace) -> tuple[torch.device, DeviceMesh]:
    """Join the process group; return this rank's device and the mesh (replicate, shard, tp)."""
    flight, owner = args.out / "flight", args.out / "world"
    earlier = flight / (owner.read_text() if owner.exists() else "earlier")
    for folder in (earlier, args.profile or args.out):
        folder.mkdir(parents=True, exist_ok=True)
    for file in flight.glob(f"*_{os.environ['RANK']}"):  # a restart keeps what there is
        file.rename(earlier / file.name)
    with contextlib.suppress(ImportError):  # beside this file, it can ask a rank that hangs
        importlib.import_module("where").listen(str(flight))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    seen, device = torch.cuda.device_count(), torch.device("cpu")  # all GPUs of the host, or one
    if seen:
        torch.cuda.set_device(device := torch.device("cuda", int(os.environ["LOCAL_RANK"]) % seen))
    torch.set_num_threads(1)  # the ranks of a host share its cores
    torch.use_deterministic_algorithms(args.deterministic)
    backend, timeout = "cpu:gloo,cuda:nccl" if seen else "gloo", timedelta(seconds=args.timeout)
    dist.init_process_group(backend, timeout=timeout, device_id=device if seen else None)
    mesh = init_device_mesh(device.type, (*args.mesh.values(),), mesh_dim_names=(*args.mesh,))
    for group in mesh.get_all_groups():  # they do not inherit the time-out
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    return device, mesh


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to its input: (B, T, C) -> (B, T, C)."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        width, linear = args.hidden, functools.partial(nn.Linear, bias=False)
        self.head_size, self.recompute = width // args.heads, args.recompute
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.dropout = nn.Dropout(args.dropout)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def run(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_size))  # a rank's, under TP
        q, k, v = heads.transpose(1, 2).unbind(3)  # each (B, heads, T, head size)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.recompute else self.run(x)


class GPT(nn.Module):
    """A decoder-only transformer with learnt positions and no biases."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.hidden)
        self.position = nn.Embedding(args.length, args.hidden)
        self.blocks = nn.Sequential(*(Block(args) for _ in range(args.layers)))
        self.norm = nn.RMSNorm(args.hidden)
        self.head = nn.Linear(args.hidden, args.vocabulary, bias=False)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of `windows` (B, T + 1) but their first tokens."""
        places = torch.arange(windows.shape[1] - 1, device=windows.device)
        x = self.embedding(windows[:, :-1]) + self.position(places)
        logits = self.head(self.norm(self.blocks(x)))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


# Tensor parallelism. Between the matrices that it splits, a rank holds T / tp of the positions.
SPLIT = {
    "embedding": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "position": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "blocks.*.norm[12]": parallel.SequenceParallel(),
    "blocks.*.qkv": parallel.ColwiseParallel(input_layouts=Shard(1)),  # rows: by head
    "blocks.*.out": parallel.RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.up": parallel.ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": parallel.RowwiseParallel(output_layouts=Shard(1)),
    "norm": parallel.SequenceParallel(),
    "head": parallel.ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}


@torch.no_grad()
def build(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> GPT:
    """Return the model, split over the mesh, with the weights that belong to the seed."""
    with torch.device("meta"):
        model = GPT(args)
    if args.tp > 1:
        parallel.parallelize_module(model, mesh["tp"], SPLIT)
    policy = MixedPrecisionPolicy(*[torch.bfloat16, torch.float32] if args.bf16 else [])
    data_mesh = mesh["replicate", "shard"] if args.replicate > 1 else mesh["shard"]
    for block in model.blocks:
        if args.compile:
            block.compile()
        fully_shard(block, mesh=data_mesh, mp_policy=policy)
    fully_shard(model, mesh=data_mesh, mp_policy=policy)
    model.to_empty(device=device)
    for number, (name, p) in enumerate(model.named_parameters()):  # whole: equal on every mesh
        whole = torch.ones(p.shape, device=device)
        if p.dim() > 1:
            generator = torch.Generator(device).manual_seed(args.seed * 1_000_003 + number)
            summed = 2 * args.layers if name.endswith(("out.weight", "down.weight")) else 1
            whole.normal_(0, 0.02 / summed**0.5, generator=generator)
        p.copy_(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None))
    return model


@functools.lru_cache(maxsize=2)
def order(windows: int, seed: int, epoch: int) -> np.ndarray:  # of the windows, in one epoch
    return np.random.default_rng([seed, epoch]).permutation(windows)


def read_windows(args: argparse.Namespace, tokens: np.ndarray, samples: range) -> Tensor:
    """Return the windows (B, T + 1) that are these samples, numbered from the run's beginning."""
    if not (count := (len(tokens) - 1) // args.length):
        raise SystemExit(f"--data holds {len(tokens)} tokens: less than a window")
    begins = [order(count, args.seed, n // count)[n % count] * args.length for n in samples]
    rows = np.stack([tokens[begin:begin + args.length + 1] for begin in begins])
    windows = torch.from_numpy(rows.astype(np.int64))
    if windows.max() >= args.vocabulary:
        raise SystemExit(f"--data holds token {windows.max()}, --vocabulary is {args.vocabulary}")
    return windows.pin_memory() if torch.cuda.is_available() else windows


def snapshot(model: GPT, optimizer: torch.optim.Optimizer, step: int, samples: int) -> dict:
    """Return all that a run goes on from, by name, so that ranks of any mesh find their pieces."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step, "samples": samples}


def publish(args: argparse.Namespace, writing: Future, partial: Path) -> None:
    """Wait until all ranks have written; name the folder, unless newer ranks took over OUT."""
    writing.result()
    if dist.get_rank() == 0:
        if (args.out / "world").read_text() != args.world:
            raise SystemExit(f"these ranks end: newer ones have started to write to {args.out}")
        partial.rename(args.out / partial.name[:14])
        os.fsync(folder := os.open(args.out, os.O_RDONLY))  # the files were on the disk before, and
        os.close(folder)  # now the folder's name is, too
        for old in sorted(args.out.glob(COMPLETE))[:-args.keep]:
            shutil.rmtree(old.rename(old.with_suffix(".old")))


def newest(args: argparse.Namespace, group: dist.ProcessGroup) -> Path | None:
    """Tidy OUT; return the newest whole checkpoint. All ranks must see it, and it must fit."""
    settings, rank, found = args.out / "settings.json", dist.get_rank(), [None, os.urandom(4).hex()]
    mine = {name: getattr(args, name) for name in (*SAME, *TOLD)}
    if rank == 0:
        found[0] = sorted(args.out.glob(COMPLETE), reverse=True)
        if not found[0]:
            settings.write_text(json.dumps(mine))
    dist.broadcast_object_list(found, group=group)
    paths, args.world = found
    if not (paths or [settings])[0].exists():
        raise SystemExit(f"rank {rank} does not see rank 0's files: share --out")
    theirs = json.loads(settings.read_text())
    changes = {n: f"{n} {theirs.get(n)} -> {of}" for n, of in mine.items() if of != theirs.get(n)}
    if changes.keys() & SAME:
        raise SystemExit(f"{args.out} holds another run: {', '.join(changes.values())}")
    dist.all_reduce(torch.zeros(1), group=group)  # all have read them
    if rank == 0:
        settings.write_text(json.dumps(mine))
        (args.out / "world").write_text(args.world)  # from now on, older worlds publish nothing
        for rest in (*args.out.glob("step-*.tmp"), *args.out.glob("step-*.old")):
            shutil.rmtree(rest, ignore_errors=True)
        if changes:
            print("changed since the last call:", ", ".join(changes.values()), flush=True)
    for number, path in enumerate(paths):
        said: list = [[]] * dist.get_world_size()  # of each rank, about its share of the files
        with contextlib.suppress(ImportError):
            mine = importlib.import_module("verify").damage(path, rank, len(said))
            dist.all_gather_object(said, mine, group=group)
        if not any(said):
            for bad in [] if rank else paths[:number]:
                bad.rename(f"{bad}.{args.world}.bad")
            return path
        if rank == 0:
            print(*sum(said, []), sep="\n", flush=True)
    if paths:
        raise SystemExit(f"no checkpoint in {args.out} is whole: take another --out to begin anew")


class Log:
    """What the steps since the last line took, by part, and their losses."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.moments, self.losses, self.since = device, [], [], time.perf_counter()

    def now(self) -> float | torch.cuda.Event:
        cuda = torch.cuda.Event(enable_timing=True) if self.device.type == "cuda" else None
        return torch.cuda.current_stream().record_event(cuda) if cuda else time.perf_counter()

    @contextlib.contextmanager
    def part(self, name: str):
        """Note when a part of the step begins and ends; on a GPU by events, which cost no wait."""
        with record_function(name):
            begin = self.now()
            yield
            self.moments.append((name, begin, self.now()))

    def write(self, args: argparse.Namespace, step: int, **more: float) -> None:
        """Gather what all ranks noted; rank 0 prints a line and adds it to OUT/log.jsonl."""
        on_gpu = self.device.type == "cuda"
        square = torch.ones(*[2048 if on_gpu else 256] * 2, device=self.device)
        for _ in range(3):
            with self.part("product"):
                square @ square
        if on_gpu:
            torch.cuda.synchronize()
        steps, ranks = len(self.losses), dist.get_world_size()
        seconds, outside = time.perf_counter() - self.since, []
        with contextlib.suppress(ImportError):  # beside this file: who is slow inside the steps
            outside = [] if on_gpu else importlib.import_module("stragglers").own_ms(seconds, steps)
        speed = steps * args.batch * args.length / seconds
        taken = [(n, a.elapsed_time(b) if on_gpu else 1e3 * (b - a)) for n, a, b in self.moments]
        row = [sum(t for n, t in taken if n == part) / steps for part in PARTS]
        row[1] *= steps  # there is one wait in a line
        rss = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # all that the process has
        row += [torch.cuda.max_memory_allocated() or rss, torch.cuda.max_memory_reserved() or rss]
        row += [min(t for n, t in taken if n == "product"), torch.stack(self.losses).mean().item()]
        table = torch.empty(ranks, len(row), dtype=torch.float64)
        dist.all_gather([*table], torch.tensor(row, dtype=torch.float64))
        mean, most = table.mean(0).tolist(), table.amax(0).tolist()
        wait, own = table[:, PARTS.index("wait")], table[:, -2]
        weights = args.hidden * (12 * args.layers * args.hidden + args.vocabulary)
        flops = 6 * weights + 12 * args.layers * args.hidden * args.length  # of a token
        record = {"step": step, "loss": mean[-1], **more, "tokens_per_s": speed,
                  "mfu": speed * flops / (args.peak_tflops * 1e12 * ranks),
                  "memory_gb": most[-4] / 1e9, "reserved_gb": most[-3] / 1e9,
                  "last": wait.argmin().item(), "last_by_ms": (wait.max() - wait.min()).item(),
                  "slowest": own.argmax().item(), "slowest_by": (own.max() / own.median()).item()}
        if dist.get_rank() == 0:
            print("  ".join(f"{name} {value:.5g}" for name, value in record.items()), flush=True)
            with (args.out / "log.jsonl").open("a") as file:
                lists = {"wait_ms": wait.tolist(), "product_ms": own.tolist(), "own_ms": outside}
                parts = dict(zip(PARTS, mean, strict=False))
                file.write(json.dumps({**record, "ms": parts, **lists}) + "\n")
        self.moments, self.losses, self.since = [], [], time.perf_counter()


def tracer(args: argparse.Namespace) -> profile:
    """Return a profiler; each rank writes its trace when the chosen steps, or the run, end."""
    trace, (first, last) = f"{args.profile}/rank-{dist.get_rank()}.json.gz", args.profile_steps
    chosen = schedule(wait=first - 1, warmup=1, active=last - first + 1, repeat=1)
    return profile(schedule=chosen if args.profile else lambda step: ProfilerAction.NONE,
                   on_trace_ready=lambda profiler: profiler.export_chrome_trace(trace))


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Rise evenly to --lr, then fall along a cosine to a tenth of it at the last step."""
    rise = min(1, (step + 1) / max(1, args.warmup))
    fall = max(0, step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * rise * (0.55 + 0.45 * math.cos(math.pi * fall))


def train(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> int:
    """Train until all steps are done or a rank gets SIGTERM; return the number of steps done."""
    rank, share = dist.get_rank(), args.batch // (args.replicate * args.shard)
    tokens = np.memmap(args.data, dtype=args.token_type, mode="r")
    model = build(args, device, mesh)
    groups = [[p for p in model.parameters() if (p.dim() > 1) == flag] for flag in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], fused=True)
    savers = dist.new_group(backend="gloo", timeout=timedelta(seconds=args.timeout))
    step, samples, args.tokens = 0, 0, len(tokens)
    if path := newest(args, savers):
        state = snapshot(model, optimizer, step, samples)
        dcp.load(state, checkpoint_id=path, process_group=savers)
        set_state_dict(model, optimizer,
                       model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step, samples = state["step"], state["samples"]
    log, profiler, skipped, ends = Log(device), tracer(args), 0, step >= args.steps
    background, reader = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    begin, writing = samples + rank // args.tp * share, background.submit(lambda: None)
    ahead = reader.submit(read_windows, args, tokens, range(begin, begin + share))
    gc.disable()  # all ranks would wait for a pause of one: they collect together, with the log
    profiler.start()
    while not ends:
        profiler.step()
        with log.part("data"):
            batch, begin = ahead.result().chunk(args.micro), begin + args.batch
            ahead = reader.submit(read_windows, args, tokens, range(begin, begin + share))
        lost = writing.exception() if writing.done() else None
        told = dist.all_reduce(flag := torch.tensor([len(args.signals), bool(lost)]), async_op=True)
        if step + 1 == args.steps or (step + 1) % args.log_every == 0:
            with log.part("wait"):  # for the log: who comes last? Other steps do not wait here
                told.wait()
        torch.manual_seed((args.seed * 1_000_003 + step) * dist.get_world_size() + rank)
        log.losses.append(torch.zeros((), device=device))
        for micro, windows in enumerate(batch):
            model.set_requires_all_reduce(micro == args.micro - 1)
            with parallel.loss_parallel() if args.tp > 1 else contextlib.nullcontext():
                with log.part("forward"):
                    loss = model(windows.to(device, non_blocking=True)) / args.micro
                with log.part("backward"):
                    loss.backward()
            log.losses[-1] += loss.detach().to_local() if args.tp > 1 else loss.detach()
        with log.part("optimizer"):
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor().item()
            skipped = 0 if math.isfinite(norm) else skipped + 1
            for group, decay in zip(optimizer.param_groups, (args.weight_decay, 0), strict=True):
                group.update(lr=learning_rate(args, step), betas=(*args.betas,), weight_decay=decay)
            if not skipped:
                optimizer.step()
            optimizer.zero_grad()
        if skipped == 4:
            raise SystemExit(f"no finite gradients in the last {skipped} steps, up to step {step}")
        step, samples = step + 1, samples + args.batch
        told.wait()
        for each in mesh.get_all_groups() if profiler.step_num == 2 else ():  # all are past step 1
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=args.step_timeout), each)
        if flag[1]:  # a save has failed: all ranks end, and say why
            dist.all_gather_object(said := [None] * dist.get_world_size(), lost and repr(lost))
            raise SystemExit(next(filter(None, said)))
        ends = flag[0].item() > 0 or step == args.steps
        if ends or step % args.save_every == 0:
            with log.part("checkpoint"):  # copies the state; it is written while the steps go on
                writing.result()
                partial = args.out / f"step-{step:09}.{args.world}.tmp"
                state = snapshot(model, optimizer, step, samples)
                written = dcp.async_save(state, checkpoint_id=partial, process_group=savers)
                writing = background.submit(publish, args, written, partial)
        if ends or step % args.log_every == 0:
            log.write(args, step, norm=norm, lr=group["lr"], skipped=skipped)
            gc.collect(1)
    profiler.stop()
    writing.result()
    return step


@record  # torchrun then tells the first rank that failed, and its traceback
def main() -> int:
    args = arguments(int(os.environ.get("WORLD_SIZE", 1)))
    signal.signal(signal.SIGTERM, lambda number, frame: args.signals.append(number))
    run = importlib.import_module("engine_deepspeed").train if args.engine == "deepspeed" else train
    try:
        step = run(args, *connect(args))
    except RuntimeError:  # NCCL writes by itself what hangs; gloo does not
        (args.out / f"flight/cpu_{os.environ['RANK']}").write_bytes(
            torch._C._distributed_c10d._dump_fr_trace())
        raise
    restarts = int(os.getenv("TORCHELASTIC_MAX_RESTARTS", 0)) and os.environ["LOCAL_RANK"] == "0"
    dist.all_reduce(told := torch.tensor(float(bool(args.signals))))  # all ranks, when a host joins
    if (early := step < args.steps) and restarts and told < dist.get_world_size():
        os.kill(os.getppid(), signal.SIGTERM)  # torchrun, which would start the ranks again
    dist.all_reduce(torch.zeros(1))
    if early and dist.get_rank() == 0:
        print(f"told to stop: checkpoint step-{step:09} is complete", flush=True)
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads drop their last tensors, or the end may abort: pytorch#179291
    return 75 if early else 0  # 75: a temporary failure, in sysexits.h


if __name__ == "__main__":
    raise SystemExit(main())
