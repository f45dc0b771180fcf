"""What the cells of lesson 17 call: the model, requests at random, a server to talk to, and figures of others."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch

from course_utils.data import tokens
from course_utils.models import GPT, build_gpt
from course_utils.programs import SCRIPTS
from course_utils.ranks import tells_place
from course_utils.transformer import TransformerConfig
from lessons.long_context_and_experts.experts import DEEPEP_LOW_LATENCY as DEEPEP_LOW_LATENCY
from lessons.multi_node.hosts import hosts_available as hosts_available

from .engine import Request, Scheduler

#: DeepSeek-V3: 61 layers, the first three dense; attention keeps 512 + 64 numbers of a token in each (DeepSeek-AI 2024,
#: arXiv 2412.19437, section 4.2).
DEEPSEEK_V3 = TransformerConfig(
    61, 128, 7168, 4096, 129280, tied=False, mlp_ratio=2048 / 7168, gated=True, fused=True, experts=256,
    experts_per_token=8, shared_experts=1, head_width=128, latent=(1536, 512, 64, 128), dense_layers=3,
    dense_ratio=18432 / 7168, name="DeepSeek-V3",
)

#: Model, GPU, GPUs with tensor parallelism, tokens in and out, and output tokens a second of all GPUs: FP8, requests
#: without a pause, TensorRT-LLM 1.0 (commit 00f3768 of
#: https://github.com/NVIDIA/TensorRT-LLM/blob/main/docs/source/performance/perf-overview.md).
SERVED = tuple(
    (model, gpu, gpus, *map(int, lengths.split("/")), rate)
    for model, gpu, gpus, rates in (
        ("Llama 3 8B", "h200", 1, {"128/2048": 26221, "1000/1000": 17744, "2048/2048": 12194, "20000/2000": 1804}),
        ("Llama 3 70B", "h200", 1, {"128/2048": 4336, "1000/1000": 2909, "2048/2048": 2003, "20000/2000": 283}),
        ("Llama 3 70B", "h100", 2, {"128/2048": 6651, "1000/1000": 4205, "2048/2048": 3082, "20000/2000": 437}),
        ("Llama 3 405B", "h200", 8, {"128/2048": 5348, "1000/1000": 3330, "2048/2048": 2948, "20000/2000": 505}),
    )
    for lengths, rate in rates.items()
)

#: Draft model of T5-XXL, its million parameters, drafted tokens, share that is accepted, speed-up (Leviathan et al.
#: 2023, arXiv 2211.17192, table 2, translation, argmax and sampling; read in transcriptions).
SPECULATED = (
    ("T5-small, argmax", 77, 7, 0.75, 3.4), ("T5-base, argmax", 250, 7, 0.80, 2.8),
    ("T5-large, argmax", 800, 7, 0.82, 1.7), ("T5-small, sampling", 77, 7, 0.62, 2.6),
    ("T5-base, sampling", 250, 5, 0.68, 2.4), ("T5-large, sampling", 800, 3, 0.71, 1.4),
)


def cache_bytes(shape: TransformerConfig, element: float = 2) -> float:
    """Bytes that the KV cache has for one token, all layers; `element` bytes a number."""
    width = shape.latent[1] + shape.latent[2] if shape.latent else 2 * shape.kv_width
    return element * shape.layers * width


def serving_gpt(layers: int = 2) -> GPT:
    """The course's GPT with 12 heads in float64, its weights large, so that no two steps choose alike by accident."""
    model = build_gpt(TransformerConfig(layers, heads=12, hidden=96, context=128), dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.dim() == 2 else 1)
    return model.eval()


def alone(model: GPT, request: Request) -> list[int]:
    """What one process generates without a cache: the whole text again for each token."""
    text = list(request.prompt)
    with torch.no_grad():
        for _ in range(request.new):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text


def requests(count: int, longest: int = 12, shared: int = 0, seed: int = 0) -> list[Request]:
    """Requests with prompts out of Alice, of which the first `shared` tokens are the same, in lengths at random."""
    text, draw = tokens("valid").tolist(), random.Random(seed)
    made = []
    for name in range(count):
        start, length = draw.randrange(len(text) - longest), draw.randint(1, longest)
        made.append(Request(name, text[:shared] + text[start : start + length], draw.randint(1, longest)))
    return made


def storm(scheduler: Scheduler, count: int, seed: int = 0) -> dict[str, int]:
    """So many requests that come at random, some cancelled at random, their tokens at random; what happened."""
    draw, finished, cancelled = random.Random(seed), 0, 0
    arriving = requests(count, longest=20, shared=8, seed=seed)
    while arriving or scheduler.waiting or scheduler.running:
        for _ in range(min(draw.randint(0, 3), len(arriving))):
            scheduler.add(arriving.pop())
        if (alive := [*scheduler.running, *scheduler.waiting]) and draw.random() < 0.1:
            scheduler.cancel(draw.choice(alive).name)
            cancelled += 1
        batch = scheduler.plan()
        got = scheduler.advance(batch, [draw.randrange(128) for _ in batch])
        finished += sum(request.finished for request in got)
    return {"finished": finished, "cancelled": cancelled, "put back": scheduler.put_back}


@contextlib.contextmanager
def server(ranks: int, *flags: object) -> Iterator[tuple[int, subprocess.Popen]]:
    """Run scripts/serve.py under torchrun on CPU ranks; yield its port and torchrun, which is stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        ready = Path(folder, "port")
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words += [str(SCRIPTS / "serve.py"), f"--ready={ready}", "--port=0", *map(str, flags)]
        environment = {name: value for name, value in os.environ.items() if not tells_place(name)}
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": loopback}
        with Path(folder, "log").open("w") as log:
            process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        end = time.monotonic() + 90
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start:\n{Path(folder, 'log').read_text()[-3000:]}")
            time.sleep(0.1)
        try:
            yield int(ready.read_text()), process
        finally:
            process.terminate()
            process.wait()


def ask(port: int, timeout: float = 30, **question: object) -> tuple[int, list[dict]]:
    """Send a question to the server; return the status, and the lines of its answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", json.dumps(question).encode())
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, [json.loads(line) for line in answer]
    except urllib.error.HTTPError as refusal:
        return refusal.code, [json.loads(refusal.read())]


def load_test(port: int, readers: int, new: int = 24, at_once: int = 16) -> dict[str, list[float]]:
    """Let readers ask, so many of them at once; print how long they waited, and return the seconds by what for."""

    def read(name: int) -> dict[str, list[float]]:
        start, times = time.perf_counter(), []
        question = {"prompt": f"Alice was reader {name % 4}", "new": new}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", json.dumps(question).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            for line in map(json.loads, answer):
                times += [time.perf_counter()] if "token" in line else []
        gaps = [b - a for a, b in pairwise(times)]
        return {"first token": [times[0] - start], "between tokens": gaps, "whole answer": [times[-1] - start]}

    start = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(read, range(readers)))
    waited = {what: sorted(sum((one[what] for one in found), [])) for what in found[0]}
    print(f"{readers} readers, {readers * new / (time.perf_counter() - start):.0f} tokens/s")
    for what, seconds in waited.items():
        median, late = (1e3 * seconds[int(share * (len(seconds) - 1))] for share in (0.5, 0.95))
        print(f"{what:15} median {median:6.0f} ms, 95 of 100 within {late:6.0f} ms")
    return waited
