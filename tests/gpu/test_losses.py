"""Train the course's GPT: the same losses as on the CPU, and how much of the device's peak it uses."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from .kit import Setting, data_sheet, measured, own_device, run_ranks

_STEPS, _PER_RANK = 5, 4
_OFF = 1e-3  # of losses near 4.8: GPU kernels add in another order


def _losses(model: nn.Module, device: torch.device, numbers: list[range]) -> list[float]:
    """Train one step on the windows with each of these numbers; return this rank's losses."""
    from course_utils.data import Windows
    from course_utils.models import loss_of

    optimizer, windows, found = torch.optim.SGD(model.parameters(), lr=0.5), Windows(), []
    for chosen in numbers:
        loss = loss_of(model, *windows.batch(chosen, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _on_ranks() -> dict[str, list[float]]:
    return {how: _mean_losses(how) for how in ("DDP", "FSDP")}


def _mean_losses(how: str) -> list[float]:
    """Losses of the ranks, which share each step's windows, in the mean."""
    from course_utils.models import build_gpt

    rank, n = dist.get_rank(), dist.get_world_size()
    device = own_device()
    model: nn.Module = build_gpt().to(device)
    if how == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    size = n * _PER_RANK
    mine = [range(s * size + rank * _PER_RANK, s * size + (rank + 1) * _PER_RANK) for s in range(_STEPS)]
    total = torch.tensor(_losses(model, device, mine), device=device)
    dist.all_reduce(total)
    return (total / n).tolist()


@pytest.mark.limit(75)
def test_same_losses(setting: Setting, facts: dict):
    """Losses of five steps in one process on the CPU, and under DDP and FSDP."""
    from course_utils.models import build_gpt

    found = run_ranks(_on_ranks, ranks=setting.ranks, backend=setting.backend, timeout=setting.choose(60, 200))[0]
    size = setting.ranks * _PER_RANK
    whole = [range(s * size, (s + 1) * size) for s in range(_STEPS)]
    facts["one process, CPU"] = _losses(build_gpt(), torch.device("cpu"), whole)
    for how, losses in found.items():
        facts[how] = losses
        off = max(abs(a - b) for a, b in zip(facts[how], facts["one process, CPU"], strict=True))
        facts[f"{how}: largest difference"] = off
        assert off < _OFF, f"{how}: losses differ by up to {off:.3g}, more than {_OFF:g}"


@pytest.mark.limit(75)
def test_mfu_gpt(setting: Setting, facts: dict):
    """Tokens and model FLOP/s of the GPT of the lessons and of a larger one, and their share of the peak."""
    from course_utils.transformer import TransformerConfig

    wide = {"layers": 12, "heads": 16, "hidden": 1024, "context": 1024, "vocabulary": 50304}
    sizes = {"the course's, fp32": (TransformerConfig(), 64, "fp32")}
    if setting.on_gpu:
        best = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        room = torch.cuda.get_device_properties(0).total_memory
        sizes["the course's, " + best] = TransformerConfig(), 64, best
        if room > 30e9:
            large, batch, name = TransformerConfig(**wide), 8, "12 layers of 1,024, " + best
        else:
            large, batch = TransformerConfig(**wide | {"hidden": 512, "heads": 8}), 2
            name = "12 layers of 512, " + best
        sizes[name] = large, batch, best
        sizes[name + ", checkpointed"] = replace(large, checkpoint=True), batch, best
    for name, given in sizes.items():
        facts[name] = _model_flops(*given, setting)


def _model_flops(config: Any, batch: int, precision: str, setting: Setting) -> dict[str, Any]:
    from course_utils.models import build_gpt, loss_of

    on_gpu, device = setting.on_gpu, setting.device
    warm_up, steps = setting.choose((5, 20), (1, 2))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    model = build_gpt(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    x, y = torch.randint(config.vocabulary, (2, batch, config.context), device=device)
    loss = torch.zeros(())
    for step in range(warm_up + steps):
        if step == warm_up:
            setting.wait()
            start = time.perf_counter()
        with torch.autocast(device.split(":")[0], dtype, enabled=precision != "fp32"):
            loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    setting.wait()
    seconds = (time.perf_counter() - start) / steps
    rate = batch * config.context / seconds
    how = f"mean of {steps} steps of forward, backward and AdamW after {warm_up}; batch {batch}, one device, no copies"
    counted = replace(config, checkpoint=False).flops_per_token()  # what is computed twice does not train the model
    achieved, text = rate * counted, "tokens_per_s x transformer.TransformerConfig.flops_per_token(), nothing repeated"
    found: dict[str, Any] = {
        "parameters": config.parameter_count, "last_loss": loss.item(), "step": measured(seconds, "s", how),
        "tokens_per_s": measured(rate, "1/s", how), "model_flops": measured(achieved / 1e12, "TFLOP/s", text),
    }
    if on_gpu:
        found["peak_memory"] = measured(torch.cuda.max_memory_allocated(), "bytes", "torch.cuda.max_memory_allocated()")
        del model, optimizer, loss
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        sheet = data_sheet(torch.cuda.get_device_name(0))
        if sheet and precision in sheet.flops:
            peak = sheet.flops[precision] / 1e12
            text = f"model_flops / {peak:g} TFLOP/s, {precision} on the {sheet.name}'s data sheet"
            found["mfu"] = measured(achieved / sheet.flops[precision], "1", text)
            if config.checkpoint:
                done = rate * config.flops_per_token()
                found["hfu"] = measured(done / sheet.flops[precision], "1", f"{text}; with what backward repeats")
    return found
