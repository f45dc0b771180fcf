"""Serve one model on all ranks, its layers divided by tensor parallelism: a loopback HTTP endpoint that streams tokens.

    torchrun --standalone --nproc-per-node=2 scripts/serve.py --port 8000
    curl -N localhost:8000/generate -d '{"prompt": "Alice was", "new": 16}'

An answer is one JSON object a line: {"name": …}, then {"token": …} for each token, and {"done": true, …} at the end. An
answer without its last line is not whole; {"error": …} says why. POST /cancel {"name": …} ends a request, and so does a
client that hangs up. GET /health tells who runs and waits, and which blocks are free. Refused at the door: what is no
JSON, no ASCII or has no tokens (400), what is too long (413), what finds the queue full or the server stopping (503).

Rank 0 listens. In each step it tells the others who has come and gone; every rank then runs the same scheduler, and
takes the tokens that rank 0 has chosen. On SIGTERM or Ctrl-C it takes nobody new, and finishes what runs within --grace
seconds. If a rank dies, the others end with code 1, and each client gets an error.

It serves the course's GPT with random weights, or those of --weights: put your model where `load` is. The engine is
lessons/serving/engine.py, as lesson 17 explains it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import torch.distributed as dist

from course_utils.models import TransformerConfig, build_gpt
from lessons.serving.engine import Engine, Request

HEARTBEAT = 0.5  # seconds between two words to the other ranks while nobody asks anything
BODY = 65_536  # bytes of a question, at most


class Refused(Exception):
    """A question that is not taken: the status, and what is wrong with it."""


class Desk:
    """What rank 0's HTTP threads and its engine tell each other."""

    def __init__(self, args: argparse.Namespace, room: int) -> None:
        self.args, self.room, self.lock, self.names = args, room, threading.Lock(), 0
        self.arrived: queue.Queue[tuple[str, object]] = queue.Queue()  # ("add", request) or ("cancel", name)
        self.answers: dict[int, queue.Queue] = {}  # of requests that are not finished
        self.stopping, self.health = False, {}

    def ask(self, body: bytes) -> tuple[int, queue.Queue]:
        """Take a question, or refuse it; its name, and where its answer comes."""
        question = parse(body)
        prompt, new = question.get("prompt"), question.get("new", 16)
        if not isinstance(prompt, str) or not prompt or not prompt.isascii():
            raise Refused(400, "'prompt' must be ASCII text of at least one character")
        if type(new) is not int or new < 1:
            raise Refused(400, f"'new' must be a whole number of at least 1, got {new!r}")
        if len(prompt) + new > self.room:
            raise Refused(413, f"there is room for {self.room} tokens, and {len(prompt)} + {new} are asked for")
        with self.lock:
            if self.stopping:
                raise Refused(503, "the server is stopping")
            if len(self.answers) >= self.args.queue:
                raise Refused(503, f"{self.args.queue} requests are running or waiting; try again later")
            self.names += 1
            self.answers[self.names] = queue.Queue()
            self.arrived.put(("add", (self.names, [*prompt.encode()], new)))
            return self.names, self.answers[self.names]

    def end(self, name: int, last: dict) -> None:
        if answer := self.answers.pop(name, None):
            answer.put(last)


def parse(body: bytes) -> dict:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(question := json.loads(body), dict):
            return question
    raise Refused(400, 'a question is a JSON object, such as {"prompt": "Alice", "new": 16}')


class Handler(BaseHTTPRequestHandler):
    desk: Desk
    timeout = 30  # seconds for a client that neither sends nor reads

    def do_GET(self) -> None:
        self.reply(200, self.desk.health) if self.path == "/health" else self.reply(404, {"error": "GET /health"})

    def do_POST(self) -> None:
        try:
            size = self.headers.get("Content-Length", "")
            if not size.isdecimal() or len(size) > 9 or int(size) > BODY:
                raise Refused(413, f"Content-Length must be given, and at most {BODY}")
            body = self.rfile.read(int(size))
            if self.path == "/generate":
                self.stream(*self.desk.ask(body))
            elif self.path == "/cancel":
                if type(name := parse(body).get("name")) is not int:
                    raise Refused(400, "'name' must be the number that the answer began with")
                self.desk.arrived.put(("cancel", name))
                self.reply(200, {})
            else:
                raise Refused(404, "POST /generate or /cancel")
        except Refused as refused:
            status, error = refused.args
            self.reply(status, {"error": error})

    def stream(self, name: int, answer: queue.Queue) -> None:
        self.send_response(200)
        self.end_headers()
        line: dict = {"name": name}
        try:
            while True:
                self.wfile.write(json.dumps(line).encode() + b"\n")
                if "done" in line or "error" in line:
                    return
                line = self.next_line(answer)
        except OSError:  # the client has hung up
            self.desk.arrived.put(("cancel", name))

    def next_line(self, answer: queue.Queue) -> dict:
        """The next line for the client, who may hang up while it waits."""
        while True:
            try:
                return answer.get(timeout=HEARTBEAT)
            except queue.Empty:
                readable, _, _ = select.select([self.connection], [], [], 0)
                if readable and not self.connection.recv(1, socket.MSG_PEEK):
                    raise ConnectionResetError from None

    def reply(self, status: int, line: dict) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(line).encode() + b"\n")

    def log_message(self, *_: object) -> None: ...


def load(weights: str | None, device: torch.device) -> torch.nn.Module:
    """The model that is served, whole; each rank keeps its part."""
    model = build_gpt(TransformerConfig(heads=12, hidden=96, context=256))
    if weights:
        model.load_state_dict(torch.load(weights, weights_only=True))
    return model.to(device).eval()


def news(desk: Desk | None, engine: Engine) -> dict:
    """Who has come and gone since the last step, the same on every rank."""
    told: list = [None]
    if desk:
        busy, came = bool(engine.scheduler.running or engine.scheduler.waiting), []
        with contextlib.suppress(queue.Empty):
            came.append(desk.arrived.get(not busy, HEARTBEAT))
            while True:
                came.append(desk.arrived.get_nowait())
        told = [{"came": came, "stop": desk.stopping and not desk.answers}]
    dist.broadcast_object_list(told, 0)
    return told[0]


def work(engine: Engine, desk: Desk | None) -> None:
    """Step until rank 0 says stop."""
    scheduler = engine.scheduler
    while not (told := news(desk, engine))["stop"]:
        for kind, what in told["came"]:
            if kind == "add":
                engine.add(Request(*what))
            else:
                scheduler.cancel(what)
                if desk:
                    desk.end(what, {"error": "cancelled"})
        got = engine.step()
        if desk:
            for request in got:
                if answer := desk.answers.get(request.name):
                    answer.put({"token": chr(request.tokens[-1])})
                if request.finished:
                    desk.end(request.name, {"done": True, "tokens": request.new})
            blocks = scheduler.blocks
            desk.health = {"running": len(scheduler.running), "waiting": len(scheduler.waiting), "steps": engine.steps,
                           "blocks": len(blocks.users), "free": len(blocks.free), "put_back": scheduler.put_back}


def listen_for_signals(desk: Desk | None, grace: float) -> None:
    """On SIGTERM or SIGINT stop, also while the main thread waits for a rank that is gone."""
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    if desk:
        desk.stopping = True
    time.sleep(grace)
    give_up(desk, f"the server was told to stop, and {grace:g} s were not enough")


def give_up(desk: Desk | None, error: str) -> None:
    """Tell those who wait, and end this process, whatever its main thread waits for."""
    if desk:
        desk.stopping = True
        for name in list(desk.answers):
            desk.end(name, {"error": error})
        time.sleep(1)  # for the threads that write it
    os._exit(1)


def main(args: argparse.Namespace) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # before any other thread is there
    device, gpu = torch.device("cpu"), torch.cuda.is_available()
    if gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=60))
    engine, desk = Engine(load(args.weights, device), args.blocks, args.block_size, args.budget, args.most), None
    if dist.get_rank() == 0:
        desk = Desk(args, min(engine.context, args.blocks * args.block_size))
        ThreadingHTTPServer.request_queue_size, Handler.desk = 128, desk
        http = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
        threading.Thread(target=http.serve_forever, daemon=True).start()
    threading.Thread(target=listen_for_signals, args=(desk, args.grace), daemon=True).start()
    if desk:
        print(f"serving on http://127.0.0.1:{http.server_port} with {dist.get_world_size()} ranks", flush=True)
        if args.ready:
            Path(args.ready + "~").write_text(str(http.server_port))
            Path(args.ready + "~").rename(args.ready)
    try:
        work(engine, desk)
    except Exception as error:  # a rank is gone, or this one has failed
        print(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        give_up(desk, "the server has failed; what has come so far is not the whole answer")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--ready", default="", help="a file that gets the port once the server listens")
    parser.add_argument("--weights", help="a state dict of the model")
    parser.add_argument("--blocks", type=int, default=256, help="in the cache of each rank")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block")
    parser.add_argument("--budget", type=int, default=64, help="tokens in a step, at most")
    parser.add_argument("--most", type=int, default=16, help="requests in a step, at most")
    parser.add_argument("--queue", type=int, default=64, help="requests that run or wait, at most")
    parser.add_argument("--grace", type=float, default=20, help="seconds to finish in after a stop; torchrun gives 30")
    main(parser.parse_args())
