"""Measure peak memory and step of ZeRO-3: lesson 06's own version and FSDP2, against DistributedDataParallel.

    python benchmarks/memory.py [--quick] [--output FILE]

All versions take turns in one run, on the small GPT of the lessons and on a larger one. Prints a table for each;
nothing is asserted about time or memory.
"""

import ast
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from common import main, table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from course_utils import launch
from course_utils.memory import PARTS, held_memory, track
from course_utils.models import TransformerConfig, build_gpt

ROOT = Path(__file__).resolve().parents[1]
LESSON = ROOT / "lessons" / "zero" / "lesson.py"
MODELS = {"small": TransformerConfig(), "larger": TransformerConfig(layers=4, heads=8, hidden=256)}
WARM_UP = 3  # steps


def from_lesson(name: str) -> Callable:
    """The function or class `name` of the lesson, run with its imports, definitions and plain constants alone."""
    sys.path.append(str(ROOT))
    from tools.author.notebooks import code_cells

    code = "\n".join(code for _, code in code_cells(LESSON))
    kinds, calls = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom), (ast.Call, ast.Name)
    body = []
    for node in ast.parse(code).body:
        constant = isinstance(node, ast.Assign) and not any(isinstance(x, calls) for x in ast.walk(node.value))
        if isinstance(node, kinds) or constant:
            body.append(node)
    names: dict = {"__name__": "__main__"}  # so that ranks get the definitions themselves
    exec(compile(ast.Module(body, []), LESSON.name, "exec"), names)
    return names[name]


def adam(weights) -> torch.optim.Adam:
    return torch.optim.Adam(weights, lr=1e-3)


def ways(config: TransformerConfig, zero3: type[nn.Module]) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
    """On a rank: model and optimizer of each version, all with the same weights."""
    ddp = DistributedDataParallel(build_gpt(config), gradient_as_bucket_view=True)
    own = zero3(build_gpt(config), adam)
    fsdp, mesh = build_gpt(config), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*fsdp.blocks, fsdp):
        fully_shard(part, mesh=mesh)
    return {"DistributedDataParallel": (ddp, adam(ddp.parameters())), "Zero3": (own, own.optimizer),
            "FSDP2": (fsdp, adam(fsdp.parameters()))}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """Forward, backward and update; the loss of this rank."""
    loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    model.step() if hasattr(model, "step") else optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def take_turns(config: TransformerConfig, zero3: type[nn.Module], batch: int, repeats: int) -> dict:
    """On a rank, by version: seconds of every step, losses, the parts of one more step's peak and of what it leaves."""
    versions, seed = ways(config, zero3), torch.Generator().manual_seed(dist.get_rank())
    found: dict = {name: {"seconds": [], "losses": []} for name in versions}
    x = torch.randint(0, config.vocabulary, (batch, config.context + 1), generator=seed)
    for _ in range(WARM_UP + repeats):
        for name, version in versions.items():
            dist.barrier()
            start = time.perf_counter()
            found[name]["losses"].append(step(*version, x))
            found[name]["seconds"].append(time.perf_counter() - start)
    for name, version in versions.items():
        with track(*version) as tracker:
            step(*version, x)
        found[name] |= {"peak": tracker.peak.parts(), "held": held_memory(*version).parts()}
    return found


def measure_model(config: TransformerConfig, zero3: type[nn.Module], ranks: int, batch: int, repeats: int) -> dict:
    """Median step by version, each step counted at its slowest rank; the peak is that of the rank with the largest."""
    by_rank = launch(take_turns, config, zero3, batch, repeats, world_size=ranks, backend="gloo", timeout=600)
    first, rows = by_rank[0]["DistributedDataParallel"]["losses"][:WARM_UP], {}
    for name in by_rank[0]:
        off = max(abs(a - b) for a, b in zip(by_rank[0][name]["losses"], first, strict=False))
        if off > 1e-4:
            raise AssertionError(f"{name} has other losses than DDP: off by {off:.1g}")
        turns = zip(*(rank[name]["seconds"][WARM_UP:] for rank in by_rank), strict=True)
        rows[name] = {"seconds": [max(turn) for turn in turns]}
        for key in ("peak", "held"):
            rows[name][key] = max((rank[name][key] for rank in by_rank), key=lambda parts: sum(parts.values()))
    base, fsdp = sum(rows["DistributedDataParallel"]["peak"].values()), rows["FSDP2"]["seconds"]
    for row in rows.values():
        seconds = row.pop("seconds")
        ratios = sorted(mine / theirs for mine, theirs in zip(seconds, fsdp, strict=True))
        peak = sum(row["peak"].values())
        row |= {"peak_bytes": peak, "peak_ratio": peak / base, "step_s": statistics.median(seconds),
                "step_ratio": statistics.median(ratios),
                "quartiles": [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]]}
    return {"config": dataclasses.asdict(config), "parameters": config.parameter_count, "versions": rows}


def measure(quick: bool) -> dict:
    ranks, batch, repeats = (2, 1, 3) if quick else (4, 2, 30)
    zero3 = from_lesson("Zero3")
    found = {name: measure_model(config, zero3, ranks, batch, repeats) for name, config in MODELS.items()}
    return {"torch": torch.__version__, "ranks": ranks, "windows_per_rank": batch, "repeats": repeats, "models": found}


def markdown(result: dict) -> str:
    """What was measured, a table for each model."""
    parts = []
    for name, model in result["models"].items():
        rows = [
            [version, f"{sum(row['held'].values()) / 1e3:,.0f} kB", f"{row['peak_bytes'] / 1e3:,.0f} kB",
             f"{row['peak_ratio']:.2f}×", ", ".join(f"{part} {row['peak'][part] / 1e3:,.0f}" for part in PARTS),
             f"{row['step_s'] * 1e3:.1f} ms",
             f"{row['step_ratio']:.2f}× ({row['quartiles'][0]:.2f} to {row['quartiles'][1]:.2f})"]
            for version, row in model["versions"].items()
        ]
        head = ["version", "between steps", "peak of a rank", "against DDP", "parts at the peak, kB", "step (median)"]
        head.append("against FSDP2 (quartiles)")
        title = f"## ZeRO-3 on {result['ranks']} ranks, {name} GPT of {model['parameters']:,} parameters"
        parts += [title, table(head, rows)]
    note = (
        f"Adam in fp32, {result['windows_per_rank']} windows of {TransformerConfig().context} tokens a rank; "
        f"DDP's gradients are views into its buckets. {result['repeats']} steps each, in turns, at the slowest rank; "
        f"bytes are of one more step, at the rank with the most. Zero3's gathered units count as parameters, FSDP2's "
        f"as buffers. torch {result['torch']}."
    )
    return "\n\n".join([*parts, note])


if __name__ == "__main__":
    main(measure, markdown)
