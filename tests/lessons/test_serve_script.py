"""scripts/serve.py under torchrun: what it answers, whom it refuses, and that nothing is lost without a word."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from course_utils.models import GPT, TransformerConfig, build_gpt
from lessons.serving.engine import Request
from lessons.serving.helpers import alone, ask, load_test, server

pytestmark = pytest.mark.guard(240)
BLOCKS = ("--blocks=40", "--block-size=4")


def health(port: int) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
        return json.loads(answer.read())


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def idle(port: int) -> bool:
    now = health(port)
    return now["running"] == now["waiting"] == 0 and now["free"] == now["blocks"]


@contextlib.contextmanager
def reader(port: int, **question: object) -> Iterator[tuple[socket.socket, int]]:
    """A client that has read the first token of its answer, and the answer's name."""
    body = json.dumps(question).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"POST /generate HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        seen = b""
        while b'"token"' not in seen:
            assert (more := client.recv(1)), seen
            seen += more
        yield client, int(re.search(rb'"name": (\d+)', seen)[1])


def rest(client: socket.socket) -> list[dict]:
    """The whole lines that still come."""
    text = b"".join(iter(lambda: client.recv(4096), b""))
    return [json.loads(line) for line in text.splitlines() if line.startswith(b"{") and line.endswith(b"}")]


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> tuple[Path, GPT]:
    """A model that does not repeat itself."""
    model = build_gpt(TransformerConfig(heads=12, hidden=96, context=256))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.dim() == 2 else 1)
    path = tmp_path_factory.mktemp("weights") / "model.pt"
    torch.save(model.state_dict(), path)
    return path, model.eval()


def test_answers_are_whole_and_bad_questions_are_refused_with_the_reason(weights):
    path, model = weights
    with server(2, *BLOCKS, f"--weights={path}", "--queue=3") as (port, _):
        status, (name, *tokens, last) = ask(port, prompt="Alice was", new=20)
        text = "".join(line["token"] for line in tokens)
        assert status == 200 and name == {"name": 1} and last == {"done": True, "tokens": 20}
        assert [*text.encode()] == alone(model, Request(0, [*b"Alice was"], 20))[9:]
        for question, refused, reason in (
            ({"prompt": "a" * 150, "new": 11}, 413, "room for 160 tokens, and 150 + 11"),
            ({"prompt": ""}, 400, "at least one character"), ({"prompt": "é"}, 400, "ASCII"), ({}, 400, "'prompt'"),
            ({"prompt": "a", "new": 0}, 400, "at least 1"), ({"prompt": "a", "new": True}, 400, "whole number"),
            ({"prompt": "a" * 70_000}, 413, "at most 65536"),
        ):
            status, (line,) = ask(port, **question)
            assert status == refused and reason in line["error"], (question, status, line)
        with reader(port, prompt="a", new=150), reader(port, prompt="b", new=150), reader(port, prompt="c", new=150):
            status, (line,) = ask(port, prompt="d")
            assert status == 503 and "try again" in line["error"]
        until(lambda: idle(port))  # all three have hung up


def test_under_load_with_cancellations_and_clients_that_hang_up_no_block_and_no_answer_is_lost():
    draw, endings = random.Random(0), []

    def one(name: int) -> None:
        with reader(port, prompt="Alice " * draw.randint(1, 5), new=draw.randint(60, 120)) as (client, number):
            if name % 3 == 1:
                return  # hangs up
            if name % 3 == 2:
                body = json.dumps({"name": number}).encode()
                urllib.request.urlopen(f"http://127.0.0.1:{port}/cancel", body, timeout=30).close()
            endings.append(rest(client)[-1])

    with server(2, *BLOCKS, "--most=4") as (port, _):
        ask(port, prompt="first", new=1)
        threads = [threading.Thread(target=one, args=(name,)) for name in range(2, 32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(endings) == 20 and all(line.get("done") or line.get("error") == "cancelled" for line in endings)
        until(lambda: idle(port))
        waited = load_test(port, readers=12, new=6)
        assert [len(times) for times in waited.values()] == [12, 60, 12]
        until(lambda: idle(port))


def test_a_stop_lets_readers_finish_and_takes_nobody_new():
    with server(2) as (port, process), reader(port, prompt="Alice", new=250) as (client, _):
        process.send_signal(signal.SIGTERM)
        until(lambda: "stopping" in str(ask(port, prompt="late")))
        assert rest(client)[-1] == {"done": True, "tokens": 250}
        process.wait(30)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_when_a_rank_dies_the_others_end_and_its_readers_are_told(rank: str):
    with server(2) as (port, process), reader(port, prompt="Alice", new=250) as (client, _):
        ranks = {p.environ().get("RANK"): p for p in psutil.Process(process.pid).children(recursive=True)}
        ranks[rank].kill()
        lines = rest(client)
        assert not any("done" in line for line in lines)
        if rank == "1":
            assert "not the whole answer" in lines[-1]["error"]
        assert process.wait(60) != 0
        assert not any(one.is_running() for one in ranks.values())
