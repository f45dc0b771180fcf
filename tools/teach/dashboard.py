"""The dashboard's server: takes what learners tell, and shows it on one page to whoever knows its address."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import os
import secrets
import socket
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.template import Loader
from tornado.web import Application, HTTPError, RequestHandler

from tools import ROOT, write

from .classroom import Classroom, Refused

PAGES = Loader(str(Path(__file__).parent / "pages"))
POLICY = "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; base-uri 'none'; " \
    "form-action 'none'; frame-ancestors 'none'"
WIDE, HIGH = 640, 120  # of a picture of answers
SAVED = 5.0  # seconds between two savings


class Page(RequestHandler):
    """A page made of the file of that name; nothing on it is run or loaded that is not its own."""

    def initialize(self, room: Classroom, name: str = "", token: str = "") -> None:
        self.room, self.name, self.token = room, name, token

    def set_default_headers(self) -> None:
        self.nonce = secrets.token_urlsafe(12)
        self.set_header("Content-Security-Policy", POLICY.format(self.nonce))
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("Cache-Control", "no-store")

    def get(self) -> None:
        if not self.name:
            raise HTTPError(405)
        self.finish(PAGES.load(self.name).generate(nonce=self.nonce, address=self.token, room=self.room, **self.more()))

    def more(self) -> dict[str, Any]:
        """What else the page needs."""
        return {}

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        self.finish(f"{status_code} {self._reason}\n")


class Board(Page):
    """What changes on the instructor's page."""

    def more(self) -> dict[str, Any]:
        answers = []
        for about, said, right in self.room.answers():
            seen = right if self.room.shown.get(about) == 2 else None
            answers.append((about, said, right, picture(said, seen, self.room.questions[about])))
        return {"board": self.room.board(), "answers": answers, "joined": self.room.joined(), "shown": self.room.shown,
                "wide": WIDE, "high": HIGH}


class Told(Page):
    """What one notebook tells."""

    def post(self) -> None:
        given = self.request.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise HTTPError(403, reason="the part of the address after # is not that of this class")
        try:
            self.room.take(self.request.body)
        except Refused as error:
            raise HTTPError(400, reason=str(error)) from None


class Shown(Page):
    """What the instructor shows of a question."""

    def post(self) -> None:
        about, stage = self.get_body_argument("question", ""), self.get_body_argument("stage", "")
        if about not in self.room.questions or stage not in ("0", "1", "2"):
            raise HTTPError(400)
        self.room.shown[about] = int(stage)


def application(room: Classroom, token: str, secret: str, address: str = "") -> Application:
    """The server's pages: one for learners, and below a secret path those of the instructor."""
    return Application([
        ("/tell", Told, {"room": room, "token": token}),
        ("/", Page, {"room": room, "name": "join.html"}),
        (f"/{secret}/", Page, {"room": room, "name": "class.html", "token": address}),
        (f"/{secret}/board", Board, {"room": room, "name": "board.html"}),
        (f"/{secret}/show", Shown, {"room": room}),
    ], log_function=lambda handler: None)


def picture(said: list[Any], right: Any, choices: list[str] | None) -> dict[str, Any]:
    """What is drawn of answers: of words how many gave each, of numbers a dot for each on an axis."""
    if any(isinstance(value, str) for value in said):
        counts = Counter(map(str, said))
        rest = [text for text, _ in counts.most_common() if text not in (choices or ())]
        return {"bars": [(text, counts[text]) for text in [*(choices or ()), *rest]]}
    given = isinstance(right, int | float)
    least, most = min(known := [*said, right] if given else said), max(known)
    log = least > 0 and most / least > 30

    def place(value: float) -> float:
        share = math.log(value / least) / math.log(most / least) if log else (value - least) / ((most - least) or 1)
        return 20 + share * (WIDE - 40)

    columns = Counter(round(place(value) / 15) * 15 for value in said)
    step = min(14.0, (HIGH - 34) / max(columns.values()))
    dots = [(x, HIGH - 34 - step * i) for x, count in columns.items() for i in range(count)]
    return {"dots": dots, "at": place(right) if given else None, "least": least, "most": most, "log": log,
            "median": median(said)}


def serve(host: str, port: int, most: int, keep: Path | None, only: tuple[str, ...]) -> None:
    """Serve until Ctrl+C."""
    print("one moment: the exercises and their mistakes are read …", flush=True)
    os.umask(0o077)  # what is kept has names
    room, token, secret = Classroom(ROOT, most, only), secrets.token_hex(4), secrets.token_urlsafe(9)
    if keep and keep.exists():
        kept = json.loads(keep.read_text(encoding="utf-8"))
        token, secret, room.learners, room.shown = (kept[key] for key in ("token", "secret", "learners", "shown"))
    address = f"http://{host or own_address()}:{port}/#{token}"

    def save() -> None:
        try:
            if keep:
                write(keep, json.dumps({"token": token, "secret": secret, **room.kept()}, indent=1))
        except OSError as error:  # a full disk ends no class
            print(f"not kept: {error}", flush=True)

    async def run() -> None:
        server = HTTPServer(application(room, token, secret, address), max_body_size=4096, max_header_size=8192,
                            idle_connection_timeout=60, body_timeout=10)
        server.listen(port, host or None)
        print(f"For learners, in a cell:\n\n  from course_utils.classroom import join_class\n"
              f"  join_class(\"{address}\", name=\"…\")\n\nFor you, and to keep to yourself:\n\n"
              f"  http://{host or 'localhost'}:{port}/{secret}/\n\nCtrl+C ends it.", flush=True)
        while True:
            await asyncio.sleep(SAVED)
            save()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())
    save()


def own_address() -> str:
    """The address of this machine by which it would reach others; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]
    return "localhost"
