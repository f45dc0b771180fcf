"""Copies, arithmetic and attention on one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch

from .kit import REPEATS, Setting, data_sheet, measured, seconds


@pytest.mark.limit(45)
def test_copies(setting: Setting, facts: dict):
    """Bytes copied a second, by where from and where to, and by size."""
    on_gpu, device = setting.on_gpu, setting.device
    sizes = [2**k for k in setting.choose((12, 16, 20, 24, 28), (12, 16, 20))]
    most = sizes[-1]
    there, other = (torch.empty(most, dtype=torch.uint8, device=device) for _ in range(2))
    pageable = torch.ones(most, dtype=torch.uint8)
    ways = {"pageable to device": (there, pageable), "device to pageable": (pageable, there)}
    ways["within the device"] = other, there
    if on_gpu:
        pinned = torch.ones(most, dtype=torch.uint8, pin_memory=True)
        ways |= {"pinned to device": (there, pinned), "device to pinned": (pinned, there)}
        if torch.cuda.device_count() > 1:
            ways["GPU 0 to GPU 1"] = torch.empty(most, dtype=torch.uint8, device="cuda:1"), there
    for name, (target, source) in ways.items():
        target.copy_(source)
        rates = []
        for size in sizes:
            to, of = target[:size], source[:size]
            rates.append(size / min(seconds(lambda to=to, of=of: to.copy_(of, non_blocking=True), on_gpu)) / 1e9)
        how = f"bytes copied / seconds of the fastest of {REPEATS} copies, {setting.clock}"
        facts[name] = measured(rates, "GB/s", how, sizes, "bytes")
    assert torch.equal(there.cpu(), torch.ones(most, dtype=torch.uint8)), "a copy arrived changed"
    if on_gpu:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_stats()["segment.all.allocated"]
        for _ in range(100):
            torch.empty(most, dtype=torch.uint8, device=device)
        facts["segments_for_100_tensors"] = torch.cuda.memory_stats()["segment.all.allocated"] - before


@pytest.mark.limit(45)
def test_batches(setting: Setting, facts: dict):
    """Seconds of a step that first copies its batch to the GPU, and of one that computes while the next batch comes."""
    setting.need_gpu("copies go on beside computing only there")
    pageable = torch.ones(256, 3, 224, 224)
    pinned, side = pageable.pin_memory(), torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def step(batch: torch.Tensor | None) -> None:
        if batch is not None:
            batch.mul_(2)
        for _ in range(50):
            torch.mm(a, a)

    def fetch() -> torch.Tensor:
        with torch.cuda.stream(side):
            return pinned.to("cuda", non_blocking=True)

    def ahead(count: int) -> None:
        coming = fetch()
        for _ in range(count):
            torch.cuda.current_stream().wait_stream(side)
            batch = coming
            batch.record_stream(torch.cuda.current_stream())  # its memory is not given away before the step has read it
            coming = fetch()
            step(batch)

    def in_turn(count: int, source: torch.Tensor | None) -> None:
        for _ in range(count):
            step(None if source is None else source.to("cuda", non_blocking=True))

    ways: dict[str, Callable[[int], None]] = {
        "no copy": lambda count: in_turn(count, None),
        "pageable, in turn": lambda count: in_turn(count, pageable),
        "pinned, in turn": lambda count: in_turn(count, pinned),
        "pinned, one batch ahead": ahead,
    }
    facts["batch_bytes"] = pinned.nbytes
    for name, run in ways.items():
        run(3)
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(30)
        torch.cuda.synchronize()
        how = "mean of 30 steps after 3: copy of 256 images in fp32, 50 products of 4096 x 4096 in bf16, perf_counter"
        facts[name] = measured((time.perf_counter() - start) / 30, "s", how)


@pytest.mark.limit(45)
def test_roofline(setting: Setting, facts: dict):
    """Operations with their FLOP per byte and FLOP/s, by precision, and what the data sheet says of the GPU."""
    on_gpu = setting.on_gpu
    precisions = {"fp32": torch.float32}
    if on_gpu:
        precisions |= {"tf32": torch.float32} if torch.cuda.get_device_capability(0) >= (8, 0) else {}
        precisions |= {"fp16": torch.float16}
        precisions |= {"bf16": torch.bfloat16} if torch.cuda.is_bf16_supported(including_emulation=False) else {}
    facts["points"] = []
    for precision, dtype in precisions.items():
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        facts["points"] += _points(precision, dtype, setting)
    if on_gpu and (sheet := data_sheet(torch.cuda.get_device_name(0))):
        peaks = {name: rate / 1e12 for name, rate in sheet.flops.items() if name in precisions}
        facts["data_sheet"] = {"gpu": sheet.name, "source": sheet.source, "tflops": peaks,
                               "memory_gb_per_s": sheet.memory_bandwidth / 1e9}


def _points(precision: str, dtype: torch.dtype, setting: Setting) -> list[dict[str, Any]]:
    """Addition, matrix x vector, and square products; each input is read once, each output written once."""
    device, width = setting.device, dtype.itemsize
    new = {"device": device, "dtype": dtype}
    count, found = setting.choose(2**27, 2**20), []

    def add(name: str, work: float, moved: float, call: Callable[[], object]) -> None:
        best = min(seconds(call, setting.on_gpu))
        how = f"FLOP counted by formula / seconds of the fastest of {REPEATS}, {setting.clock}"
        found.append({
            "precision": precision, "operation": name, "flop_per_byte": work / moved,
            "rate": measured(work / best / 1e12, "TFLOP/s", how),
            "memory": measured(moved / best / 1e9, "GB/s", how.replace("FLOP", "bytes")),
        })

    if precision != "tf32":  # it is a way to multiply matrices only
        x, y, out = (torch.ones(count, **new) for _ in range(3))
        add("add", count, 3 * width * count, lambda: torch.add(x, y, out=out))
        del x, y, out
        side = setting.choose(8192, 512)
        a, v = torch.randn(side, side, **new), torch.randn(side, **new)
        add("matrix x vector", 2 * side**2, width * (side**2 + 2 * side), lambda: torch.mv(a, v))
        del a, v
    for side in setting.choose((256, 512, 1024, 2048, 4096, 8192), (64, 256)):
        a, b, c = (torch.randn(side, side, **new) for _ in range(3))
        call = lambda a=a, b=b, c=c: torch.mm(a, b, out=c)  # noqa: E731
        add(f"matmul {side}", 2 * side**3, 3 * width * side**2, call)
    return found


@pytest.mark.limit(45)
def test_layer_products(setting: Setting, facts: dict):
    """Products of one MLP matrix of Llama 3 70B, in bf16: by tokens at a time, and by the ranks that share it."""
    found, new = [], {"device": setting.device, "dtype": torch.bfloat16}
    for rows, depth, columns in _layer_shapes(setting):
        a, b, c = torch.randn(rows, depth, **new), torch.randn(depth, columns, **new), torch.empty(rows, columns, **new)
        typical = median(seconds(lambda a=a, b=b, c=c: torch.mm(a, b, out=c), setting.on_gpu))
        how = f"2 x rows x inner x columns / seconds of the median of {REPEATS} products, {setting.clock}"
        rate = measured(2 * rows * depth * columns / typical / 1e12, "TFLOP/s", how)
        found.append({"rows": rows, "inner": depth, "columns": columns, "rate": rate})
    facts |= {"precision": "bf16", "products": found, "without_pause": _without_pause(columns, setting)}


def _layer_shapes(setting: Setting) -> list[tuple[int, int, int]]:
    """Rows (tokens), inner dimension and columns of each product of `layer_products`."""
    hidden, inner = setting.choose((8192, 28672), (64, 256))
    tokens = setting.choose((128, 512, 2048, 4096, 8192), (16, 64))
    shapes = [(rows, inner) for rows in tokens] + [(tokens[-1], inner // tp) for tp in (2, 4, 8)]
    return [(rows, depth, hidden) for rows, depth in shapes]


@pytest.mark.limit(60)
def test_fp8_products(setting: Setting, facts: dict):
    """The products of `layer_products` in FP8 (e4m3), with a scale a tensor or a row, and what it takes to convert."""
    multiply = getattr(torch.nn.functional, "scaled_mm", None)
    if multiply is None:
        pytest.skip("needs torch.nn.functional.scaled_mm, which came with PyTorch 2.10")
    if setting.on_gpu and torch.cuda.get_device_capability(0) < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9: Ada, Hopper or later")
    on_gpu = setting.on_gpu
    facts["products"] = []
    text = f"seconds of the median of {REPEATS}, {setting.clock}"
    convert, e4m3 = torch.compile(_to_fp8, dynamic=True, disable=not on_gpu), torch.float8_e4m3fn
    recipes = torch.nn.functional.ScalingType
    ways = {"a scale a tensor": (recipes.TensorWise, False), "the same, fast sums": (recipes.TensorWise, True),
            "a scale a row": (recipes.RowWise, True)}
    for rows, inner, columns in _layer_shapes(setting):
        new = {"device": setting.device, "dtype": torch.bfloat16}
        a, b = torch.randn(rows, inner, **new), torch.randn(columns, inner, **new)
        each = {"rows": rows, "inner": inner, "columns": columns, "rate": {}}
        facts["products"].append(each)
        whole = torch.mm(a, b.t())
        for name, (recipe, fast) in ways.items():
            if not on_gpu and (fast or recipe != recipes.TensorWise):
                continue
            across = None if recipe == recipes.TensorWise else 1
            (a8, scale_a), (b8, scale_b) = convert(a, across), convert(b, across)
            scales = scale_a, recipe, scale_b if across is None else scale_b.t(), recipe
            call = lambda a8=a8, b8=b8, of=scales, fast=fast: multiply(a8, b8.t(), *of, use_fast_accum=fast)  # noqa: E731
            typical = median(seconds(call, on_gpu))
            how = f"2 x rows x inner x columns / {text}"
            each["rate"][name] = measured(2 * rows * inner * columns / typical / 1e12, "TFLOP/s", how)
            off = ((call() - whole).float().norm() / whole.float().norm()).item()
            # Half a step of three bits of fraction is 3.6 % of random numbers.
            assert a8.dtype == e4m3 and off < 0.06, f"{name}: the product is off by {off:.3f}"
            each.setdefault("relative_error", off)
        typical = median(seconds(lambda a=a: convert(a, None), on_gpu))
        each["convert"] = measured(typical, "s", f"rows x inner from bf16, with its largest value; {text}")
        del a, b, whole


def _to_fp8(x: torch.Tensor, across: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in e4m3, and the scale to multiply it by: one number, or one a row."""
    most = x.abs().amax() if across is None else x.abs().amax(across, keepdim=True)
    scale = most.float() / torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _without_pause(side: int, setting: Setting) -> dict[str, Any]:
    """The rate of one square product over and over: as a GPU gets hot and reaches its power, its clock falls."""
    a, b, c = (torch.randn(side, side, device=setting.device, dtype=torch.bfloat16) for _ in range(3))
    calls, rounds = setting.choose((100, 25), (2, 3))
    rates, at = [], []
    torch.mm(a, b, out=c)
    setting.wait()
    begin = before = time.perf_counter()
    for _ in range(rounds):
        for _ in range(calls):
            torch.mm(a, b, out=c)
        setting.wait()
        now = time.perf_counter()
        rates.append(calls * 2 * side**3 / (now - before) / 1e12)
        at.append(round(now - begin, 3))
        before = now
    how = f"{calls} products of {side} x {side} in bf16 in a row / seconds, time.perf_counter, without a pause"
    return measured(rates, "TFLOP/s", how, at, "s")


@pytest.mark.limit(60)
def test_attention(setting: Setting, facts: dict):
    """Causal attention in bf16, heads of 128: FLOP/s and peak memory by length, by the kernel that computes it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads, tokens = setting.choose((32, 16384), (2, 256))
    kernels = {"scores in memory": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
    if setting.on_gpu:
        kernels["cudnn"] = SDPBackend.CUDNN_ATTENTION
    facts |= {"heads": heads, "head_size": 128, "tokens": tokens}
    for name, kernel in kernels.items():
        lengths = setting.choose((512, 1024, 2048, 4096, 8192, 16384), (64, 128))
        if name == "scores in memory":
            lengths = lengths[:4]
        try:
            with sdpa_kernel(kernel):
                facts[name] = _attention([*lengths], heads, tokens, setting)
        except RuntimeError as error:  # not for this GPU
            facts[name] = {"refused": str(error).splitlines()[0][:200]}


def _attention(lengths: list[int], heads: int, tokens: int, setting: Setting) -> dict[str, Any]:
    forward, both, memory = [], [], []
    for length in lengths:
        shape = (tokens // length, heads, length, 128)
        q, k, v, grad = (
            torch.randn(shape, device=setting.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)
        )
        call = lambda q=q, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731

        def step(call=call, inputs=(q, k, v), grad=grad) -> None:
            torch.autograd.grad(call(), inputs, grad)

        if setting.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with torch.no_grad():
            alone = median(seconds(call, setting.on_gpu))
        work = 4 * length**2 / 2 * 128 * heads * (tokens // length)
        forward.append(work / alone / 1e12)
        both.append(3.5 * work / median(seconds(step, setting.on_gpu)) / 1e12)
        if setting.on_gpu:
            memory.append(torch.cuda.max_memory_allocated() - before)
    runs = f"seconds of the median of {REPEATS}"
    how = f"2 products of T x T x 128 a head, half of them masked, / {runs}, {setting.clock}"
    found = {"forward": measured(forward, "TFLOP/s", how, lengths, "tokens")}
    how = f"3.5 times the operations of forward / {runs} runs of both, {setting.clock}"
    found["forward and backward"] = measured(both, "TFLOP/s", how, lengths, "tokens")
    if memory:
        how = "torch.cuda.max_memory_allocated() above q, k, v and the gradient of the output"
        found["memory"] = measured(memory, "bytes", how, lengths, "tokens")
    return found
