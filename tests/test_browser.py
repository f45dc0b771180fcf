"""A learner in JupyterLab: open a lesson, run all of it through the menu, move a widget, see its picture change."""

from __future__ import annotations

import dataclasses
import json
import os
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

WIDGETS = {
    "01": ["topology_explorer("],
    "02": ["collective_stepper("],
    "03": ["all_reduce_stepper(", "algorithm_chooser("],
    "05": ["cost_calculator("],
}
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


@pytest.fixture
def open_lesson(browser, lab: Lab) -> Iterator[Callable]:
    """Open a lesson by number and wait until its kernel answers, as a learner should."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})

    def open_(number: str):
        (lesson,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
        page = context.new_page()
        page.goto(lab.address(f"lab/tree/notebooks/{lesson.name}") + "&reset")
        page.wait_for_selector(".jp-NotebookPanel", timeout=90_000)
        page.wait_for_function(CONNECTED, timeout=90_000)
        return page

    yield open_
    context.close()


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("COURSE_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_all(page) -> None:
    """Choose Run › Run All Cells in the menu and wait for the last cell."""
    page.locator(".lm-MenuBar-itemLabel", has_text="Run").click()
    page.get_by_text("Run All Cells", exact=True).click()
    page.wait_for_function(f"({WAITING})() > 0", timeout=30_000)
    page.wait_for_function(f"({WAITING})() === 0", polling=500, timeout=300_000)


def assert_ran_without_errors(page) -> None:
    cells = [cell for cell in page.evaluate(CELLS) if "".join(cell["source"]).strip()]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    errors = [output["evalue"] for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert errors == []


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
    """The cell of the widget that `text` makes, once its picture is there, and the cell's first slider."""
    show_cell(page, text)
    cell = page.locator(".jp-Notebook-cell.jp-mod-active")
    cell.locator("img.widget-image").first.wait_for(state="visible", timeout=30_000)
    handle = cell.locator(".widget-slider .noUi-handle").first
    handle.scroll_into_view_if_needed()
    return cell, handle


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


def test_stored_widget_is_shown_before_anything_runs(open_lesson: Callable, screenshots: Path):
    page = open_lesson("02")
    cell, _ = widget(page, WIDGETS["02"][0])
    picture = cell.locator("img.widget-image").first
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
    page.screenshot(path=screenshots / "02_stored.png")


@pytest.mark.parametrize("number", [path.name[:2] for path in sorted((ROOT / "notebooks").glob("*.ipynb"))])
def test_lesson_runs_through_the_menu_and_its_widgets_move(open_lesson: Callable, screenshots: Path, number: str):
    page = open_lesson(number)
    run_all(page)
    assert_ran_without_errors(page)
    page.screenshot(path=screenshots / f"{number}.png")
    for text in WIDGETS.get(number, []):
        cell, handle = widget(page, text)
        before = shown(cell)
        page.screenshot(path=screenshots / f"{number}_{text.strip('(')}_before.png")
        handle.press("ArrowRight")
        waited_for(lambda cell=cell, before=before: shown(cell) != before, f"a change of {text}", 30)
        page.screenshot(path=screenshots / f"{number}_{text.strip('(')}_after.png")
