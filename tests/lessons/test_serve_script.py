"""scripts/serve.py under torchrun: what it answers, whom it refuses, and that nothing is lost without a word.

Also scripts/load.py, its other side.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
import torch

from course_utils.models import GPT, TransformerConfig, build_gpt
from course_utils.programs import SCRIPTS
from lessons.serving.engine import Request
from lessons.serving.helpers import alone, ask, server

pytestmark = pytest.mark.guard(240)
BLOCKS = ("--blocks=64", "--block-size=4")


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


def loaded(port: int, *flags: str) -> tuple[int, list[int]]:
    """The code of scripts/load.py; of its last row how answers ended, and those in time."""
    words = [sys.executable, str(SCRIPTS / "load.py"), f"http://127.0.0.1:{port}", *flags]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90)
    _, *ended = done.stdout.splitlines()[-1].split()
    assert len(done.stdout.splitlines()) == 1 + len(flags[0].split(","))
    return done.returncode, [int(count) for count in (*ended[:4], ended[-1])]


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


def test_answers_are_whole_bad_questions_are_refused_with_the_reason_and_a_stop_lets_readers_finish(weights):
    path, model = weights
    with server(2, *BLOCKS, f"--weights={path}", "--queue=3") as (port, process):
        status, (name, *tokens, last) = ask(port, prompt="Alice was", new=20)
        text = "".join(line["token"] for line in tokens)
        assert status == 200 and name == {"name": 1} and last == {"done": True, "tokens": 20}
        assert [*text.encode()] == alone(model, Request(0, [*b"Alice was"], 20))[9:]
        for question, refused, reason in (
            ({"prompt": "a" * 246, "new": 11}, 413, "room for 256 tokens, and 246 + 11"),
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
        with reader(port, prompt="Alice", new=250) as (client, _):
            process.send_signal(signal.SIGTERM)
            until(lambda: "stopping" in str(ask(port, prompt="late")))
            assert rest(client)[-1] == {"done": True, "tokens": 250}
            process.wait(30)


def test_under_load_no_block_and_no_answer_is_lost_and_readers_are_told_when_a_rank_dies():
    """Some clients cancel, some hang up. When a rank dies, the others end too."""
    draw, endings = random.Random(0), []

    def one(name: int) -> None:
        with reader(port, prompt="Alice " * draw.randint(1, 5), new=draw.randint(60, 120)) as (client, number):
            if name % 3 == 1:
                return  # hangs up
            if name % 3 == 2:
                body = json.dumps({"name": number}).encode()
                urllib.request.urlopen(f"http://127.0.0.1:{port}/cancel", body, timeout=30).close()
            endings.append(rest(client)[-1])

    with server(2, *BLOCKS, "--most=4") as (port, process):
        ask(port, prompt="first", new=1)
        threads = [threading.Thread(target=one, args=(name,)) for name in range(2, 32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(endings) == 20 and all(line.get("done") or line.get("error") == "cancelled" for line in endings)
        until(lambda: idle(port))
        assert loaded(port, "--clients=2,12", "--answers=12", "--new=6", "--limit=60000") == (0, [12, 0, 0, 0, 12])
        until(lambda: idle(port))

        ranks = {p.environ().get("RANK"): p for p in psutil.Process(process.pid).children(recursive=True)}
        with reader(port, prompt="Alice", new=250) as (client, _):
            ranks["1"].kill()
            lines = rest(client)
        assert not any("done" in line for line in lines) and "not the whole answer" in lines[-1]["error"]
        assert process.wait(60) != 0
        assert not any(one.is_running() for one in ranks.values())


def test_load_says_how_answers_ended_and_fails_if_one_is_lost():
    endings = [b'{"done": true}\n', b'{"error": "stopped"}\n', b"", None]  # None: refused

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            ending = endings.pop()
            self.send_response(200 if ending is not None else 503)
            self.end_headers()
            self.wfile.write(b'{"name": 1}\n{"token": "a"}\n' + (ending or b""))

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Server) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        assert loaded(http.server_port, "--clients=1", "--answers=4", "--limit=60000") == (1, [1, 1, 1, 1, 1])
        http.shutdown()
