"""A learner in JupyterLab: every lesson is shown as stored, lesson 00 runs through the menu, every widget moves.

That all cells of all lessons run, nbval and papermill show; ``--thorough`` runs every lesson through the menu as well.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, missing

from course_utils.workshop import chromium

pytestmark = pytest.mark.guard(420)

LESSONS = {path.name[:2]: path for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
SHORTEST = "00"
PARAMETERS = "import"  # the first code cell: the only one that a widget needs before its own
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGUMENTS += ["--disable-component-update", "--disable-sync"]
PANEL = "const panel = window.jupyterapp.shell.currentWidget;"
CONNECTED = f"""async () => {{
    if (!window.jupyterapp) return false;
    await window.jupyterapp.restored;
    {PANEL}
    if (!panel?.sessionContext) return false;
    await panel.context.ready;
    await panel.sessionContext.ready;
    const kernel = panel.sessionContext.session?.kernel;
    if (!kernel || kernel.connectionStatus !== 'connected') return false;
    await kernel.requestKernelInfo();
    return kernel.status === 'idle';
}}"""
CELLS = f"""() => {{
    {PANEL}
    return Array.from(panel.content.model.cells).filter(cell => cell.type === 'code').map(cell => cell.toJSON());
}}"""
WAITING = f"""() => {{
    {PANEL}
    return Array.from(panel.content.model.cells)
        .filter(cell => cell.type === 'code' && cell.sharedModel.source.trim() && cell.executionCount === null).length;
}}"""
WITH_OUTPUTS = f"""() => {{
    {PANEL}
    return Array.from(panel.content.model.cells).flatMap((cell, i) => cell.outputs?.length ? [i] : []);
}}"""
TOO_WIDE = f"""async (index) => {{
    {PANEL}
    await panel.content.scrollToItem(index, 'start');
    const cell = panel.content.widgets[index].node;
    const outputs = Array.from(cell.querySelectorAll('.jp-OutputArea-output'));
    if (!cell.isConnected || !outputs.some(output => output.getBoundingClientRect().height > 0)) return null;
    const edge = cell.getBoundingClientRect().right + 1;
    const inside = outputs.flatMap(output => [output, ...output.querySelectorAll('pre, img, table, .jp-RenderedHTML')]);
    const wide = inside.filter(node => node.scrollWidth > node.clientWidth + 1 && node.clientWidth > 0
            || node.getBoundingClientRect().right > edge)
        .map(node => `${{node.tagName}} of ${{node.scrollWidth}} px, ${{node.clientWidth}} px of it seen: `
            + node.textContent.slice(0, 80));
    return {{wide}};
}}"""


def widgets() -> list[tuple[str, str]]:
    """Number of a lesson and the call of a widget, for every widget that a lesson imports."""
    found = []
    for number, lesson in LESSONS.items():
        cells = json.loads(lesson.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        for names in re.findall(r"^from course_utils\.widgets import (?:\(([^)]*)\)|(.*))$", code, re.MULTILINE):
            found += [(number, f"{name}(") for name in re.findall(r"\w+", "".join(names))]
    return found


WIDGETS = widgets()


@dataclasses.dataclass
class Lab:
    """A running JupyterLab: its process, and what it wrote down about itself."""

    process: subprocess.Popen
    info: dict

    def address(self, path: str) -> str:
        return f"{self.info['url']}{path}?token={self.info['token']}"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab as ``make lab`` starts it, on copies of the lessons and with settings of its own."""
    root = tmp_path_factory.mktemp("lab")
    for folder in ("notebooks", "scripts"):
        shutil.copytree(ROOT / folder, root / folder)
    folders = {f"JUPYTER_{name}_DIR": str(root / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    folders |= {f"JUPYTERLAB_{name}_DIR": str(root / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | folders
    dry_run = ["make", "--dry-run", "--no-print-directory", "lab"]
    recipe = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    trust, serve = ([sys.executable, *shlex.split(line)[1:]] for line in recipe.splitlines()[-2:])
    trust[3:] = map(str, (root / "notebooks").glob("*.ipynb"))
    subprocess.run(trust, env=environment, check=True, stdout=subprocess.DEVNULL)
    serve += ["--no-browser", "--expose-app-in-browser"]
    with (root / "log").open("w") as log:
        server = subprocess.Popen(serve, cwd=root, env=environment, stdout=log, stderr=log)
    try:
        files = waited_for(lambda: [*(root / "runtime").glob("jpserver-*.json")], "JupyterLab's server", 60)
        yield Lab(server, json.loads(files[0].read_text()))
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def waited_for(look: Callable, what: str, seconds: float):
    """The first true answer of `look`."""
    end = time.monotonic() + seconds
    while not (answer := look()):
        assert time.monotonic() < end, f"{what} did not come within {seconds} s"
        time.sleep(0.2)
    return answer


@pytest.fixture(scope="module")
def browser():
    executable = chromium() or missing("Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chrome = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield chrome
        chrome.close()


@dataclasses.dataclass
class Opened:
    """A lesson in the browser, and the errors that its console has shown since."""

    number: str
    page: object
    errors: list[str]


@pytest.fixture(scope="module")
def opened(request: pytest.FixtureRequest, browser, lab: Lab) -> Iterator[Opened]:
    """The lesson with the number of the parameter, as stored, with a kernel that answers. Its tests share the page."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page, errors = context.new_page(), []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(lab.address(f"lab/tree/notebooks/{LESSONS[request.param].name}") + "&reset")
    page.wait_for_selector(".jp-NotebookPanel", timeout=90_000)
    page.wait_for_function(CONNECTED, timeout=90_000)
    yield Opened(request.param, page, errors)
    page.evaluate(f"() => {{ {PANEL} return panel.sessionContext.shutdown(); }}")
    context.close()


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("COURSE_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function.__name__.startswith("test_lesson_runs_through_the_menu"):
        numbers = LESSONS if metafunc.config.getoption("thorough") else [SHORTEST]
        metafunc.parametrize("opened", numbers, indirect=True)


def run_all(page) -> None:
    """Choose Run › Run All Cells in the menu and wait for the last cell."""
    page.locator(".lm-MenuBar-itemLabel", has_text="Run").click()
    page.get_by_text("Run All Cells", exact=True).click()
    page.wait_for_function(f"({WAITING})() > 0", timeout=30_000)
    page.wait_for_function(f"({WAITING})() === 0", polling=500, timeout=300_000)


def errors_in(cells: list[dict]) -> list[str]:
    return [output["evalue"] for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]


def show_cell(page, text: str) -> None:
    """Scroll to the code cell that contains `text`."""
    page.evaluate(
        f"""async (text) => {{
            {PANEL}
            const cells = Array.from(panel.content.model.cells);
            const index = cells.findIndex(cell => cell.type === 'code' && cell.sharedModel.source.includes(text));
            panel.content.activeCellIndex = index;
            await panel.content.scrollToItem(index, 'start');
        }}""",
        text,
    )


def widget(page, text: str):
    """The cell of the widget that `text` makes, once its picture is there."""
    show_cell(page, text)
    cell = page.locator(".jp-Notebook-cell.jp-mod-active")
    cell.locator("img.widget-image").first.wait_for(state="visible", timeout=30_000)
    return cell


def move(cell) -> None:
    """Move the first slider of the widget one step, or press the last button of one that has no slider."""
    sliders = cell.locator(".widget-slider .noUi-handle")
    if sliders.count():
        sliders.first.scroll_into_view_if_needed()
        sliders.first.press("ArrowRight")
    else:
        cell.locator(".widget-button").last.click()


def run_cell(page, text: str) -> None:
    """Run the code cell that contains `text`, and wait for its end."""
    show_cell(page, text)
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-cell')")


def shown(cell) -> list[str]:
    """What the kernel has put into the widget: its texts and its pictures."""
    pictures = cell.locator("img.widget-image").evaluate_all("all => all.map(image => image.src)")
    return cell.locator(".widget-html-content").all_inner_texts() + pictures


def test_lab_is_for_this_machine_and_this_user_only(lab: Lab):
    sockets = psutil.Process(lab.process.pid).net_connections()
    assert {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    assert len(lab.info["token"]) >= 32
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{lab.info['url']}api/contents", timeout=30)


def test_lab_opens_on_the_first_lesson(browser, lab: Lab):
    page = browser.new_page()
    page.goto(lab.address(""))
    page.wait_for_selector(".jp-NotebookPanel", timeout=90_000)
    assert page.locator(".lm-TabBar-tabLabel", has_text="00_start_here.ipynb").count()
    page.close()


@pytest.mark.parametrize("opened", LESSONS, indirect=True)
def test_stored_lesson_is_shown_without_errors_and_no_output_is_wider_than_its_cell(opened: Opened, screenshots: Path):
    page = opened.page
    assert errors_in(page.evaluate(CELLS)) == []
    indices = page.evaluate(WITH_OUTPUTS)
    assert indices
    wide = {}
    for index in indices:
        found = waited_for(lambda index=index: page.evaluate(TOO_WIDE, index), f"the output of cell {index}", 30)
        if found["wide"]:
            wide[index] = found["wide"]
    page.screenshot(path=screenshots / f"{opened.number}_stored.png")
    assert wide == {}
    assert opened.errors == []


@pytest.mark.parametrize(("opened", "text"), WIDGETS, indirect=["opened"], scope="module")
def test_stored_widget_is_shown_before_anything_runs(opened: Opened, text: str, screenshots: Path):
    cell = widget(opened.page, text)
    picture = cell.locator("img.widget-image").first
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
    opened.page.screenshot(path=screenshots / f"{opened.number}_{text.strip('(')}_stored.png")


@pytest.mark.parametrize(("opened", "text"), WIDGETS, indirect=["opened"], scope="module")
def test_widget_moves_once_its_cell_has_run(opened: Opened, text: str, screenshots: Path):
    page = opened.page
    for source in (PARAMETERS, text):
        run_cell(page, source)
    assert errors_in(page.evaluate(CELLS)) == []
    cell = widget(page, text)
    before = shown(cell)
    page.screenshot(path=screenshots / f"{opened.number}_{text.strip('(')}_before.png")
    move(cell)
    waited_for(lambda: shown(cell) != before, f"a change of {text}", 30)
    page.screenshot(path=screenshots / f"{opened.number}_{text.strip('(')}_after.png")
    assert opened.errors == []


def test_lesson_runs_through_the_menu(opened: Opened, screenshots: Path):
    run_all(opened.page)
    cells = [cell for cell in opened.page.evaluate(CELLS) if "".join(cell["source"]).strip()]
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(min(counts), min(counts) + len(cells)))
    assert errors_in(cells) == [] and opened.errors == []
    opened.page.screenshot(path=screenshots / f"{opened.number}.png")
