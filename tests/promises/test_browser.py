"""A learner in JupyterLab: lesson 00 runs through the menu, stored lessons fit, a widget moves, an answer stays.

JupyterLab is started once, as ``make lab`` does it, on a learner's copy of a copy of the course; what is stored, which
the learner's copy leaves out, lies beside it in ``stored/``. That all cells of all lessons run, nbval and papermill
show; that every widget moves, ``tests/figures/test_explorers.py``.
"""

from __future__ import annotations

import contextlib
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

from course_utils.doctor import chromium
from tools import learner

pytestmark = pytest.mark.guard(420)

FIRST, LESSON, EXERCISE = (
    "notebooks/00_start_here.ipynb", "notebooks/02_collectives.ipynb", "exercises/02_collectives_exercises.ipynb",
)
WIDEST = "stored/16_multi_node.ipynb"  # of tables
WITH_WIDGET, WIDGET = "stored/02_collectives.ipynb", "collective_stepper("
PARAMETERS = "import"  # the first code cell
ANSWER = "my_answer = 42"
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
OPEN = """async path => {
    await window.jupyterapp.commands.execute('docmanager:open', {path, factory: 'Notebook'});
}"""
CLOSE = """async path => {
    const panel = Array.from(window.jupyterapp.shell.widgets('main')).find(widget => widget.context?.path === path);
    await panel.sessionContext.shutdown();
    panel.dispose();
}"""
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


@dataclasses.dataclass
class Lab:
    """A running JupyterLab on a course: its process, what it wrote down about itself."""

    course: Path
    process: subprocess.Popen
    info: dict


def told_by(settings: Path) -> str:
    """What a server writes down about itself, or nothing as long as it has not ended writing."""
    text = "".join(file.read_text() for file in settings.glob("runtime/jpserver-*.json"))
    return text if text.rstrip().endswith("}") else ""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab as ``make lab`` starts it, with settings of its own; the lessons in ``stored/`` are signed."""
    course = tmp_path_factory.mktemp("lab") / "course"
    unwanted = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    folders = ("course_utils", "lessons", "tools", "notebooks", "exercises", "solutions", "scripts", "native", "docs")
    for folder in folders:
        shutil.copytree(ROOT / folder, course / folder, ignore=unwanted)
    shutil.copytree(course / "notebooks", course / "work" / "stored")
    settings = course.parent / "settings"
    folders = {f"JUPYTER_{name}_DIR": str(settings / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    folders |= {f"JUPYTERLAB_{name}_DIR": str(settings / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | folders
    trust = [sys.executable, "-m", "nbformat.sign", *map(str, (course / "work" / "stored").glob("*.ipynb"))]
    subprocess.run(trust, env=environment, check=True, stdout=subprocess.DEVNULL)
    dry_run = ["make", "--dry-run", "--no-print-directory", "lab"]
    recipe = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    serve = [sys.executable, *shlex.split(recipe.splitlines()[-1])[1:], "--no-browser", "--expose-app-in-browser"]
    with (course.parent / "log").open("w") as log:
        server = subprocess.Popen(serve, cwd=course, env=environment, stdout=log, stderr=log)
    try:
        yield Lab(course, server, json.loads(waited_for(lambda: told_by(settings), "JupyterLab's server", 120)))
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


@dataclasses.dataclass
class Browser:
    """The page of JupyterLab, and the errors that its console has shown since a notebook was opened."""

    page: object
    errors: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def opens(self, path: str) -> Iterator[None]:
        """A notebook of the learner's folder, with a kernel that answers."""
        self.errors.clear()
        self.page.evaluate(OPEN, path)
        self.page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden)", timeout=90_000)
        self.page.wait_for_function(CONNECTED, timeout=90_000)
        yield
        self.page.evaluate(CLOSE, path)


@pytest.fixture(scope="module")
def browser(lab: Lab) -> Iterator[Browser]:
    """At the address that ``make lab`` opens."""
    executable = chromium() or missing("Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chrome = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        shown = Browser(chrome.new_page(viewport={"width": 1280, "height": 900}))
        shown.page.on("console", lambda told: shown.errors.append(told.text) if told.type == "error" else None)
        # JupyterLab reports each question to a kernel that a notebook had open when it was closed.
        shown.page.on("pageerror", lambda error: None if "Canceled future for" in str(error)
                      else shown.errors.append(str(error)))
        shown.page.goto(f"{lab.info['url']}?token={lab.info['token']}")
        shown.page.wait_for_selector(".jp-NotebookPanel", timeout=90_000)
        yield shown
        chrome.close()


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


def run_cell(page, text: str) -> None:
    """Run the code cell that contains `text`, and wait for its end."""
    show_cell(page, text)
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-cell')")


def shown(cell) -> list[str]:
    """What the kernel has put into the widget: its texts and its pictures."""
    pictures = cell.locator("img.widget-image").evaluate_all("all => all.map(image => image.src)")
    return cell.locator(".widget-html-content").all_inner_texts() + pictures


def wide_outputs(page) -> dict[int, list[str]]:
    """What of the outputs is wider than its cell, by the number of the cell."""
    indices = page.evaluate(WITH_OUTPUTS)
    assert indices
    found = {index: waited_for(lambda index=index: page.evaluate(TOO_WIDE, index), f"the output of cell {index}", 90)
             for index in indices}
    return {index: each["wide"] for index, each in found.items() if each["wide"]}


def test_lab_is_for_this_machine_and_this_user_only(lab: Lab):
    def listening() -> set[str]:
        sockets = psutil.Process(lab.process.pid).net_connections()
        return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}

    # the kernel's table of sockets changes while it is read, and then one may be missing
    assert waited_for(listening, "a socket that JupyterLab listens at", 30) == {"127.0.0.1"}
    assert len(lab.info["token"]) >= 32
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{lab.info['url']}api/contents", timeout=90)


def test_lab_opens_on_the_first_lesson_and_changes_nothing_in_it(browser: Browser):
    page = browser.page
    assert page.locator(".lm-TabBar-tabLabel", has_text="00_start_here.ipynb").count()
    page.wait_for_selector("text=Python 3 (ipykernel) | Idle", timeout=90_000)
    page.wait_for_timeout(2_000)
    assert not page.locator(".jp-mod-dirty").count(), "marked as changed although nobody has changed it"
    assert browser.errors == []


def test_first_lesson_runs_through_the_menu(browser: Browser):
    page = browser.page
    with browser.opens(FIRST):
        assert page.evaluate(WITH_OUTPUTS) == [], "an answer stands below its question"
        page.locator(".lm-MenuBar-itemLabel", has_text="Run").click()
        page.get_by_text("Run All Cells", exact=True).click()
        page.wait_for_function(f"({WAITING})() > 0", timeout=90_000)
        page.wait_for_function(f"({WAITING})() === 0", polling=500, timeout=300_000)
        cells = [cell for cell in page.evaluate(CELLS) if "".join(cell["source"]).strip()]
        assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
        assert errors_in(cells) == [] and browser.errors == []


def test_no_output_is_wider_than_its_cell(browser: Browser):
    with browser.opens(WIDEST):
        assert wide_outputs(browser.page) == {} and browser.errors == []


def test_stored_widget_is_a_picture_until_its_cell_has_run_and_then_moves(browser: Browser):
    page = browser.page
    with browser.opens(WITH_WIDGET):
        assert wide_outputs(page) == {}
        show_cell(page, WIDGET)
        cell = page.locator(".jp-Notebook-cell.jp-mod-active")
        picture = cell.locator(".jp-OutputArea-output img").first
        picture.wait_for(state="visible", timeout=90_000)
        assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
        assert cell.locator(".jupyter-widgets").count() == 0, "controls that do nothing"
        for source in (PARAMETERS, f"import {WIDGET[:-1]}", WIDGET):
            run_cell(page, source)
        show_cell(page, WIDGET)
        cell.locator("img.widget-image").first.wait_for(state="visible", timeout=90_000)
        assert errors_in(page.evaluate(CELLS)) == []
        before, slider = shown(cell), cell.locator(".widget-slider .noUi-handle").first
        slider.scroll_into_view_if_needed()
        slider.press("ArrowRight")
        waited_for(lambda: shown(cell) != before, "a change of the widget", 90)
        assert browser.errors == []


def save(page) -> None:
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")


def edit_first_text(path: Path, text: str) -> None:
    """Change the first cell of a notebook of the course, as a new version of it would."""
    nb = json.loads(path.read_text(encoding="utf-8"))
    nb["cells"][0]["source"] = [text]
    path.write_text(json.dumps(nb), encoding="utf-8")


def test_answer_stays_while_the_lessons_around_it_change(lab: Lab, browser: Browser):
    """``make lab``, an answer, a new version of the course, and then what ``make lab`` does again."""
    course, page = lab.course, browser.page
    with browser.opens(EXERCISE):
        stub = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell", has_text="NotImplementedError").first
        stub.locator(".cm-content").click()
        page.keyboard.press("ControlOrMeta+A")
        page.keyboard.type(ANSWER)
        save(page)
        waited_for(lambda: ANSWER in (course / "work" / EXERCISE).read_text(), "the saved answer", 90)
    with browser.opens(LESSON):  # read and saved, not changed
        run_cell(page, PARAMETERS)
        waited_for(lambda: page.evaluate(CELLS)[0]["execution_count"], "the end of the cell", 120)
        save(page)
        waited_for(lambda: '"execution_count": 1,' in (course / "work" / LESSON).read_text(), "the saved run", 90)
    log = (course.parent / "log").read_text()
    assert f"new in {course / 'work'}: " in log
    assert "without encryption" not in log, "every start of a kernel warns on the terminal"
    edit_first_text(course / LESSON, "# Is this the new lesson?")
    edit_first_text(course / EXERCISE, "# New words for the exercises")
    assert learner.copy(course / "work", course) == [
        f"updated in {course / 'work'}: {LESSON}",
        f"{EXERCISE} is yours and stays; for its new version: make restore L={Path(EXERCISE).stem}",
    ]
    kept, new = ((course / "work" / name).read_text() for name in (EXERCISE, LESSON))
    assert ANSWER in kept and "New words" not in kept and "Is this the new lesson?" in new
