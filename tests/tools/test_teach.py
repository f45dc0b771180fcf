"""An instructor's tools: the dashboard of a class, slides, the answer key, what a room needs."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import pytest
from conftest import ROOT, missing
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port

from course_utils import classroom
from course_utils.check import CheckFailed
from course_utils.doctor import chromium
from course_utils.predictions import predict
from lessons.collectives import check
from tools import ToolError
from tools.teach import key, slides
from tools.teach import room as rooms
from tools.teach.classroom import Classroom
from tools.teach.dashboard import application

TOKEN, SECRET = "t0ken", "secret"
NONSENSE = (  # what is no check and no prediction of the course, as bytes
    b"", b"{", b"[" * 4000, b"null", b'{"who": 1}', b"\xff\xfe", b'{"who": "W", "name": "N", "x": 1}',
    *(f'{{"who": "W", "name": "N", {more}}}'.encode() for more in (
        '"check": "collectives.no_such", "hint": ""', '"check": "collectives.bandwidths"', '"check": 3, "hint": ""',
        '"question": "no such", "said": 1', '"question": "sent by each of 4 ranks", "said": NaN',
        '"question": "sent by each of 4 ranks", "said": 1, "result": "x"',
        '"question": "sent by each of 4 ranks", "said": 1e999', '"question": "sent by each of 4 ranks", "said": "x"',
        '"question": "the pace", "said": "<script>"', '"question": "the pace", "said": ["right"]',
        f'"question": "the pace", "said": "{"y" * 200}"')),
    b'{"who": "W", "name": "' + b"n" * 100 + b'"}', b'{"name": "' + b"n" * 9000 + b'"}',
)
#: Of each slide, with all of it shown: kinds of its blocks, the smallest letters in pixels, what is out of the slide.
SEEN = """() => [...document.querySelectorAll(".slides section section")].map((slide) => {
  const {h, v} = Reveal.getIndices(slide), scale = Reveal.getScale();
  Reveal.slide(h, v, 99);
  const {top, left} = document.querySelector(".slides").getBoundingClientRect();
  const parts = [...slide.querySelectorAll("*")].filter((part) => part.getBoundingClientRect().width);
  const words = parts.filter((part) => !part.children.length && part.textContent.trim());
  return {kinds: [...slide.querySelectorAll(".block")].map((block) => block.classList[1]),
    letters: Math.min(99, ...words.map((part) => parseFloat(getComputedStyle(part).fontSize))),
    over: parts.filter((part) => { const box = part.getBoundingClientRect();
      return box.bottom > top + 720 * scale + 1 || box.right > left + 1280 * scale + 1; }).length};
})"""


@pytest.fixture(scope="module")
def room() -> Classroom:
    return Classroom(ROOT, 32, ("02",))


@pytest.fixture
def port(room: Classroom):
    """The port of a dashboard that runs in a thread."""
    room.learners, room.shown = {}, {}
    loop, (socket, number) = asyncio.new_event_loop(), bind_unused_port()

    async def start() -> None:
        HTTPServer(application(room, TOKEN, SECRET), max_body_size=4096).add_socket(socket)

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield number
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    socket.close()


def asked(port: int, path: str, body: bytes | str | None = None, token: str = TOKEN) -> tuple[int, str]:
    """Status and text of what the server answers; status 400 where it hangs up on what is too long."""
    with_it = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        kind = {"Content-Type": "application/x-www-form-urlencoded"} if path.endswith("/show") else {}
        with_it.request("GET" if body is None else "POST", path, body, {"Authorization": f"Bearer {token}", **kind})
        answer = with_it.getresponse()
        return answer.status, answer.read().decode()
    except ConnectionError:
        return 400, ""
    finally:
        with_it.close()


def test_thirty_learners_are_shown_and_two_with_nonsense_hurt_nobody(port: int, room: Classroom):
    def learner(number: int) -> set[int]:
        who = f"{number:032x}"
        if number >= 28:
            told = [text.replace(b"W", who.encode()) for text in NONSENSE]
        else:
            told = [json.dumps({"who": who, "name": f"<b>N{number}</b>\ud800\u202e", **what}) for what in (
                {}, {"check": "collectives.ring_shift", "hint": "empty"},
                *[{"check": "collectives.ring_shift", "hint": "deadlock" if number % 2 else "hang"}] * (number % 3),
                {"check": "collectives.ring_shift", "hint": ""}, {"check": "collectives.ring_shift", "hint": "value"},
                {"question": "sent by each of 4 ranks", "said": number + 1, "result": 1.5},
                {"question": "first to come back from send", "said": "none", "result": "<i>"})]
        return {asked(port, "/tell", text)[0] for text in told}

    with ThreadPoolExecutor(30) as pool:
        statuses = [*pool.map(learner, range(30))]
    assert statuses == [{200}] * 28 + [{400}] * 2
    (row,) = room.board()
    assert (row["passed"], row["of"], row["title"]) == (28, 28, "02 ring shift")
    assert row["times"] == 14 and row["hint"] == room.hints["collectives.ring_shift"][row["usual"]]
    assert [tries for tries, _ in row["tries"].values()].count(1) == 10
    status, page = asked(port, f"/{SECRET}/board")
    assert status == 200 and page.count("&lt;b&gt;N") == 28 and "<b>" not in page and "28 of 28 have answered" in page
    assert "<circle" not in page and "1.5" not in page and "<i>" not in page  # nothing is shown before it is revealed
    for stage, dots in ((1, 28), (2, 28), (0, 0)):
        form = f"question=sent by each of 4 ranks&stage={stage}".replace(" ", "+")
        assert asked(port, f"/{SECRET}/show", form)[0] == 200
        page = asked(port, f"/{SECRET}/board")[1]
        assert page.count("<circle") == dots and ("it is 1.5" in page) == (stage == 2)
    room.shown["first to come back from send"] = 2
    page = asked(port, f"/{SECRET}/board")[1]
    assert '<meter max="28" value="28">' in page and "<i>" not in page


def test_who_has_not_the_token_or_the_path_or_a_place_is_refused(port: int, room: Classroom):
    told = [json.dumps({"who": f"{number:032x}", "name": ""}) for number in range(33)]
    assert asked(port, "/tell", told[0], token="other")[0] == asked(port, "/tell", told[0], token="ä")[0] == 403
    assert asked(port, "/other/board")[0] == asked(port, "/board")[0] == 404 and not room.learners
    assert [asked(port, "/tell", text)[0] for text in told] == [200] * 32 + [400]
    assert all(asked(port, path)[0] == 200 for path in ("/", f"/{SECRET}/"))
    assert asked(port, f"/{SECRET}/show", "question=x&stage=1")[0] == 400
    assert asked(port, "/tell")[0] == asked(port, f"/{SECRET}/show")[0] == 405


def test_a_learner_joins_by_a_line_until_the_end(port: int, room: Classroom, tmp_path, monkeypatch, capsys):
    def right(a: float, b: float) -> float:
        raise NotImplementedError("Replace this line")

    def told(*what: str) -> None:
        """Wait for what threads tell."""
        for _ in range(500):
            (own,) = room.learners.values()
            if all(text in json.dumps(own) for text in what):
                return
            threading.Event().wait(0.02)
        raise AssertionError(own)

    monkeypatch.setattr(classroom, "_SECONDS", 60)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".course.json").write_text("{}")
    classroom.join_class(f"http://127.0.0.1:{port}/#other", "Ada")
    classroom.join_class("http://127.0.0.1:9/#t", "Ada")
    assert capsys.readouterr().out.count("Cells run all the same.") == 2 and not room.learners
    monkeypatch.setenv("COURSE_CLASS", f"http://127.0.0.1:{port}/#{TOKEN}")
    classroom.join_class(name="Ada")
    assert capsys.readouterr().out == "You have joined the class, Ada.\n"
    predict("sent by each of 4 ranks", unit="GB").say("1.5")
    check.bandwidths(check.bandwidths.formula)
    told('{"": 1}')
    with pytest.raises(CheckFailed):
        check.bandwidths(lambda *args: (1.0, 2.0, 3.0))
    told('"Ada"', '[1.5, null]', '{"collectives.bandwidths": {"": 1}}')
    monkeypatch.setenv("JPY_SESSION_NAME", "/work/notebooks/02_collectives.ipynb")
    pace, learnt, _ = classroom.survey()
    pace.value, learnt.value = "right", "<i>" + 200 * "x"
    told('"02 the pace": ["right", null]', '"02 one thing learnt": ["<i>xxx')
    classroom.join_class(hours=0)
    assert classroom.survey() == []
    predict("sent by each of 4 ranks", unit="GB").say("2")
    with pytest.raises(CheckFailed):
        check.all_gather_seconds(right)
    threading.Event().wait(0.1)
    assert "all_gather" not in json.dumps(room.learners) and "2.0" not in json.dumps(room.learners)


def test_key_has_solutions_and_the_mistakes_seen_most_first(tmp_path: Path):
    graded = {"rows": [{"notebook": "02_collectives", "checks": [
        {"name": "check_ring_shift", "passed": passed, "hint": hint} for passed, hint in (
            (True, ""), (False, "value"), (False, "empty"), (False, ""))]}]}
    told = {"learners": {"w": {"name": "Ada", "said": {}, "checks": {"collectives.ring_shift": {"hang": 2, "": 1}}}}}
    for name, data in (("grades", graded), ("class", told)):
        (tmp_path / name).write_text(json.dumps(data))
    text = key.write(ROOT, "02", tmp_path, [tmp_path / "grades", tmp_path / "class"]).read_text()
    (part,) = re.findall(r"`check.ring_shift`: 2 have passed\..*?(?=\n## |\Z)", text, re.DOTALL)
    rows = re.findall(r"^\| (\d*) \| ([\w-]+) \| .+ \|$", part, re.MULTILINE)
    assert rows[:2] == [("2", "hang"), ("1", "value")] and len(rows) >= 7 and "empty" not in dict(rows)
    assert "def ring_shift" in part and "SOLUTION" not in text
    assert "**Exercise" not in text and text.count("```python") == 6
    with pytest.raises(ToolError, match="no exercises"):
        key.write(ROOT, "00", tmp_path)


def test_room_is_told_what_the_guide_says():
    """The figures are those of docs/teaching.md and docs/instructor.md."""
    guide, day = ((ROOT / "docs" / name).read_text() for name in ("teaching.md", "instructor.md"))
    fits, told = rooms.needs(30, 64, 16)
    assert fits and "70 GB with three open lessons" in told[0] and "about 70 GB" in guide
    for figure in (rooms.RUNS, rooms.HAS_RUN, rooms.ENDED):
        assert f"| {figure:g} GB |" in guide
    assert f"{rooms.LAB:g} GB" in guide and f"{rooms.SEED:g} GB" in guide and f"to {rooms.SLOWEST} s on 2 cores" in day
    assert not rooms.needs(30, 24, 2)[0]


def test_slides_ask_first_and_stay_on_their_slides(tmp_path: Path):
    from playwright.sync_api import sync_playwright

    executable = chromium() or missing("Chromium")
    (deck,) = slides.write(ROOT, "02", tmp_path)
    text = deck.read_text(encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1280, "height": 720}, offline=True).new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(deck.as_uri())
        page.wait_for_function("window.Reveal && Reveal.isReady()")
        seen = page.evaluate(SEEN)
        browser.close()
    assert [url for url in asked if not url.startswith("data:")] == [deck.as_uri()]
    assert len(seen) > 40 and not [slide for slide in seen if slide["over"] or slide["letters"] < 15]
    asks = [at for at, slide in enumerate(seen) if "ask" in slide["kinds"]]
    assert len(asks) >= 6 and all(seen[at]["kinds"][-1] == "ask" for at in asks)
    assert all("answer" not in seen[at]["kinds"][seen[at]["kinds"].index("ask"):] for at in asks)
    assert "sent.compare(" not in text and ">Compare<" not in text  # folded code, and the fold itself
