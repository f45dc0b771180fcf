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
from pathlib import Path

import torch

from course_utils import recordings
from course_utils.data import tokens
from course_utils.hardware import GPUS
from course_utils.models import GPT, build_gpt
from course_utils.models import PUBLISHED as PUBLISHED
from course_utils.programs import SCRIPTS
from course_utils.ranks import tells_place
from course_utils.recorded import gpu_check
from course_utils.transformer import TransformerConfig
from lessons.debugging_hangs.clinic import servers as servers
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

#: What others measured, by table: its source, its columns, and its rows.
MEASURED = recordings.load("serving")[0]
#: Shares of the data sheet's FLOP/s and bytes/s that one H200 reached in bf16 (`recorded.gpu_check`).
_RATES = {point["operation"]: point for point in gpu_check("roofline")["points"] if point["precision"] == "bf16"}
COMPUTING = _RATES["matmul 8192"]["rate"]["value"] * 1e12 / GPUS["h200"].flops["bf16"]
READING = _RATES["matrix x vector"]["memory"]["value"] * 1e9 / GPUS["h200"].memory_bandwidth


def cache_bytes(shape: TransformerConfig, element: float = 2) -> float:
    """Bytes that the KV cache has for one token, all layers; `element` bytes a number."""
    width = shape.latent[1] + shape.latent[2] if shape.latent else 2 * shape.kv_width
    return element * shape.layers * width


def all_reduces(shape: TransformerConfig, gpus: int, tokens: float) -> float:
    """Seconds of the two in each layer: one shot's 7 µs, and bytes at 80 % of NVLink, as lesson 12 plans."""
    sent = 2 * (gpus - 1) / gpus * tokens * 2 * shape.hidden
    return 2 * shape.layers * (7e-6 + sent / 360e9) * (gpus > 1)


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
    text, draw, made = tokens("valid").tolist(), random.Random(seed), []
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
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
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


def load(port: int, *flags: str) -> None:
    """Run scripts/load.py against the server, and print its table."""
    words = [sys.executable, str(SCRIPTS / "load.py"), f"http://127.0.0.1:{port}", *flags]
    print(subprocess.run(words, check=True, capture_output=True, text=True).stdout, end="")
