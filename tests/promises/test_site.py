"""The site: built without a warning, whole without a network, its answers folded, fit for phones and screen readers."""

from __future__ import annotations

import dataclasses
import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT, missing

from course_utils.doctor import chromium

pytestmark = pytest.mark.guard(900)

AXE = "axe-core@4.14.1"
AXED = ("index", "notebooks/00_start_here", "exercises/02_collectives_exercises", "solutions/02_collectives_solutions",
        "reference/launch", "scripts/where", "docs/install")  # a page of each kind
ADDRESSES = {"repository": "https://github.com/someone/course", "site": "https://someone.github.io/course"}
# A cell with a field asks, and may print what it asks about.
ANSWERED = """() => Array.from(document.querySelectorAll('.alert')).filter(box => box.innerText.startsWith('Predict'))
    .flatMap(box => {
        const seen = [];
        for (let node = box.nextElementSibling; node && node.tagName !== 'DETAILS'; node = node.nextElementSibling)
            seen.push(...Array.from(node.querySelectorAll('.cell_output')).filter(output => output.checkVisibility())
                .map(output => output.innerText.trim()).filter(text => !text.includes('Your prediction')));
        return seen;
    })"""
LOOK = """() => {
    document.querySelectorAll('details').forEach(fold => fold.open = true);
    const images = Array.from(document.images), texts = document.querySelector('main').innerText;
    return {
        links: Array.from(document.querySelectorAll('a[href]'), link => link.href),
        names: Array.from(document.querySelectorAll('[id]'), node => node.id),
        'no words': images.filter(image => !image.alt.trim()).map(image => image.src),
        'no picture': images.filter(image => image.complete && !image.naturalWidth).map(image => image.src),
        'raw formulas': texts.match(/\\$\\$|\\\\frac|\\\\text/g) || [],
        titles: Array.from(document.querySelectorAll('h1')).filter(title => title.checkVisibility()).length - 1,
        'too wide': Math.max(0, document.documentElement.scrollWidth - document.documentElement.clientWidth) || [],
    };
}"""
RUN_AXE = """() => {
    document.getAnimations().forEach(each => each.finish());  // folds that were opened fade in
    return axe.run({resultTypes: ['violations']}).then(found => found.violations
        .filter(each => ['serious', 'critical'].includes(each.impact))
        .map(each => [each.id, each.nodes.length, each.nodes[0].html.slice(0, 160)]));
}"""


@dataclasses.dataclass
class Page:
    """What the browser found on one page: what is in view below a question, the rest, requests, what axe minds."""

    answered: list[str]
    found: dict
    requests: list[str]
    minded: list


@pytest.fixture(scope="module")
def thorough(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--thorough")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, thorough: bool) -> Path:
    """The folder of the site, built as `make site` does it, the ePub only with --thorough: a warning is an error."""
    if not all(map(find_spec, ("latex2mathml", "myst_nb", "sphinx_book_theme"))):
        missing("the extra `site` (make site)")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "tools", "site", "--out", out, *([] if thorough else ["--no-epub"])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site / "html"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator:
    executable = chromium() or missing("Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chrome = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        yield chrome
        chrome.close()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The script of axe-core, from npm; None where there is no npm, or it reaches no registry."""
    folder = tmp_path_factory.mktemp("axe")
    try:
        subprocess.run(["npm", "install", "--silent", "--prefix", folder, AXE], check=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return None
    return folder / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="module")
def pages(site: Path, address: str, browser, axe: Path | None) -> dict[str, Page]:
    """Pages on a phone, every second one in the dark theme: texts, and one of each other kind; axe looks at some."""
    page, found, requests = browser.new_page(viewport={"width": 390, "height": 800}), {}, []
    page.on("request", lambda request: requests.append(request.url))
    files = [file.relative_to(site / "html").as_posix() for file in sorted((site / "html").rglob("*.html"))]
    files = [file for file in files if file.removesuffix(".html") in AXED
             or file.startswith(("notebooks/", "docs/"))]
    for number, file in enumerate(files):
        requests.clear()
        page.emulate_media(color_scheme=["light", "dark"][number % 2])
        page.goto(address + file)
        answered, seen = page.evaluate(ANSWERED), page.evaluate(LOOK)
        looked = axe and file.removesuffix(".html") in AXED
        if looked:
            page.add_script_tag(path=axe)
        found[page.url] = Page(answered, seen, [*requests], page.evaluate(RUN_AXE) if looked else [])
    page.close()
    return found


def test_nothing_is_asked_of_another_host(pages: dict[str, Page], address: str):
    asked = {request for page in pages.values() for request in page.requests}
    assert len(asked) > len(pages)
    assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]


def test_pages_have_one_title_words_for_pictures_and_room_on_a_phone(pages: dict[str, Page]):
    wrong = {url: {key: found for key, found in page.found.items() if found and key not in ("links", "names")}
             for url, page in pages.items()}
    assert not {url: found for url, found in wrong.items() if found}


def test_no_answer_is_in_view(pages: dict[str, Page]):
    assert not {url: page.answered for url, page in pages.items() if page.answered}


def test_no_link_is_dead(pages: dict[str, Page], address: str, site: Path):
    dead = set()
    for url, page in pages.items():
        for link in page.found["links"]:
            whole, _, name = link.partition("#")
            there = whole in pages or (site / "html" / unquote(urlsplit(whole).path)[1:]).is_file()
            named = not name or whole not in pages or unquote(name) in pages[whole].found["names"]
            here = urlsplit(whole).hostname in ("127.0.0.1", "localhost")
            dead |= {(url, link)} if here and not (whole.startswith(address) and there and named) else set()
    assert not dead


def test_axe_minds_nothing_serious(pages: dict[str, Page], axe: Path | None):
    if axe is None:
        pytest.skip(f"needs npm and its registry, for {AXE}")
    assert not {url: page.minded for url, page in pages.items() if page.minded}


def test_widget_shows_the_state_that_is_chosen(browser, address: str):
    page = browser.new_page()
    page.goto(f"{address}notebooks/06_zero.html")
    box, picture = page.locator(".states"), page.locator(".cell_output:has(.states) img")
    told, before = box.locator(".told").inner_text(), picture.get_attribute("src")
    box.locator("select").select_option(index=0)
    assert box.locator(".told").inner_text() != told and picture.get_attribute("src") != before
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
    page.close()


def test_search_finds_the_lesson(browser, address: str):
    page = browser.new_page()
    page.goto(f"{address}search.html?q=reduce_scatter")
    page.locator("#search-results li a[href*='notebooks/02_collectives']").first.wait_for(timeout=90_000)
    page.close()


def test_ebook_is_well_formed(site: Path, thorough: bool):
    if not thorough:
        pytest.skip("--thorough builds the ePub too")
    from xml.etree import ElementTree
    from zipfile import ZipFile

    with ZipFile(next((site / "epub").glob("*.epub"))) as book:
        texts = [name for name in book.namelist() if name.endswith((".xhtml", ".opf", ".ncx"))]
        assert any(ElementTree.fromstring(book.read(name)).find(".//{*}math") is not None for name in texts)


def test_addresses_add_a_sitemap_and_preview_cards(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from sphinx.cmd.build import build_main

    monkeypatch.setattr("tools.author.site.settings", lambda root: ADDRESSES)
    some = "include_patterns=index.md,notebooks/00_start_here.ipynb"
    build_main(["-Q", "-D", some, str(site / "source"), str(tmp_path)])
    assert f"{ADDRESSES['site']}/notebooks/00_start_here.html" in (tmp_path / "sitemap.xml").read_text()
    lesson = (tmp_path / "notebooks" / "00_start_here.html").read_text()
    assert 'property="og:image"' in lesson and ADDRESSES["repository"] in lesson
