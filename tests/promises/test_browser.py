"""A learner in JupyterLab: every lesson is shown as stored, lesson 00 runs through the menu, every widget moves.

JupyterLab is started as ``make lab`` does it, on a learner's copy of a copy of the course; what is stored, which the
learner's copy leaves out, lies beside it in ``stored/``. That all cells of all lessons run, nbval and papermill show;
``--thorough`` runs every lesson through the menu as well.
"""

from __future__ import annotations

import contextlib
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

from course_utils.doctor import chromium
from tools import learner

pytestmark = pytest.mark.guard(420)

LESSONS = {path.name[:2]: path for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
SHORTEST = "00"
STORED = ("00", "03", "11", "16")  # the widest tables, the most pictures; the others with --thorough
PARAMETERS = "import"  # the first code cell
ONE = ("02", "collective_stepper(")  # the others with --thorough
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


def widgets() -> list[tuple[str, str]]:
    """Number of a lesson and the call of a widget, for every widget that a lesson imports."""
    found = []
    for number, lesson in LESSONS.items():
        cells = json.loads(lesson.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        names = re.findall(r"^from lessons\.\w+\.(?:explorer|stepper) import (.*)$", code, re.MULTILINE)
        found += [(number, f"{name}(") for several in names for name in several.split(", ")]
    return found


WIDGETS = widgets()
assert ONE in WIDGETS


@dataclasses.dataclass
class Lab:
    """A running JupyterLab: its process, what it wrote down about itself, and its page, once a notebook is opened."""

    process: subprocess.Popen
    info: dict
    page: object = None
    errors: list[str] = dataclasses.field(default_factory=list)

    def address(self, path: str) -> str:
        return f"{self.info['url']}{path}?token={self.info['token']}"


def told_by(settings: Path) -> str:
    """What a server writes down about itself, or nothing as long as it has not ended writing."""
    text = "".join(file.read_text() for file in settings.glob("runtime/jpserver-*.json"))
    return text if text.rstrip().endswith("}") else ""


@contextlib.contextmanager
def serving(course: Path) -> Iterator[Lab]:
    """JupyterLab as ``make lab`` starts it in a course, with settings of its own; its log is beside the course."""
    settings = course.parent / "settings"
    folders = {f"JUPYTER_{name}_DIR": str(settings / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    folders |= {f"JUPYTERLAB_{name}_DIR": str(settings / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | folders
    dry_run = ["make", "--dry-run", "--no-print-directory", "lab"]
    recipe = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    serve = [sys.executable, *shlex.split(recipe.splitlines()[-1])[1:], "--no-browser", "--expose-app-in-browser"]
    with (course.parent / "log").open("w") as log:
        server = subprocess.Popen(serve, cwd=course, env=environment, stdout=log, stderr=log)
    try:
        yield Lab(server, json.loads(waited_for(lambda: told_by(settings), "JupyterLab's server", 120)))
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def copied_course(place: Path, *names: str) -> Path:
    """A copy of the course, or of the notebooks with these numbers in it."""
    unwanted = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    folders = ("course_utils", "lessons", "tools", "notebooks", "exercises", "solutions", "scripts", "native", "docs")
    for folder in folders:
        shutil.copytree(ROOT / folder, place / folder, ignore=unwanted)
    for path in place.glob("*/*.ipynb"):
        if names and not path.name.startswith(names):
            path.unlink()
    return place


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on the whole course, with the lessons as they are stored in ``stored/``, which are signed."""
    course = copied_course(tmp_path_factory.mktemp("lab") / "course")
    shutil.copytree(course / "notebooks", course / "work" / "stored")
    trust = [sys.executable, "-m", "nbformat.sign", *map(str, (course / "work" / "stored").glob("*.ipynb"))]
    data = {"JUPYTER_DATA_DIR": str(course.parent / "settings" / "data")}
    subprocess.run(trust, env=os.environ | data, check=True, stdout=subprocess.DEVNULL)
    with serving(course) as server:
        yield server


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


@contextlib.contextmanager
def open_notebook(browser, lab: Lab, path: str) -> Iterator[Opened]:
    """A notebook of the learner's folder, in the page of its JupyterLab, with a kernel that answers."""
    lab.errors.clear()
    if lab.page is None:
        lab.page = browser.new_page(viewport={"width": 1280, "height": 900})
        lab.page.on("console", lambda message: lab.errors.append(message.text) if message.type == "error" else None)
        # JupyterLab reports each question to a kernel that a notebook had open when it was closed.
        lab.page.on("pageerror", lambda error: None if "Canceled future for" in str(error)
                    else lab.errors.append(str(error)))
        lab.page.goto(lab.address(f"lab/tree/{path}") + "&reset")
    else:
        lab.page.evaluate(OPEN, path)
    lab.page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden)", timeout=90_000)
    lab.page.wait_for_function(CONNECTED, timeout=90_000)
    yield Opened(path.rsplit("/", 1)[-1][:2], lab.page, lab.errors)
    lab.page.evaluate(CLOSE, path)


@pytest.fixture(scope="module")
def opened(request: pytest.FixtureRequest, browser, lab: Lab) -> Iterator[Opened]:
    """The lesson with the number of the parameter, as stored. Its tests share the page."""
    with open_notebook(browser, lab, f"stored/{LESSONS[request.param].name}") as page:
        yield page


@pytest.fixture(scope="module")
def copied(request: pytest.FixtureRequest, browser, lab: Lab) -> Iterator[Opened]:
    """The lesson with the number of the parameter, as a learner gets it."""
    with open_notebook(browser, lab, f"notebooks/{LESSONS[request.param].name}") as page:
        yield page


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("COURSE_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function.__name__.startswith("test_lesson_runs_through_the_menu"):
        numbers = LESSONS if metafunc.config.getoption("thorough") else [SHORTEST]
        metafunc.parametrize("copied", numbers, indirect=True)
    if metafunc.function.__name__.startswith("test_stored_lesson"):
        numbers = LESSONS if metafunc.config.getoption("thorough") else STORED
        metafunc.parametrize("opened", numbers, indirect=True)
    if {"opened", "text"} <= {*metafunc.fixturenames}:
        some = WIDGETS if metafunc.config.getoption("thorough") else [ONE]
        metafunc.parametrize(("opened", "text"), some, indirect=["opened"], scope="module")


def run_all(page) -> None:
    """Choose Run › Run All Cells in the menu and wait for the last cell."""
    page.locator(".lm-MenuBar-itemLabel", has_text="Run").click()
    page.get_by_text("Run All Cells", exact=True).click()
    page.wait_for_function(f"({WAITING})() > 0", timeout=90_000)
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
    cell.locator("img.widget-image").first.wait_for(state="visible", timeout=90_000)
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
    def listening() -> set[str]:
        sockets = psutil.Process(lab.process.pid).net_connections()
        return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}

    # the kernel's table of sockets changes while it is read, and then one may be missing
    assert waited_for(listening, "a socket that JupyterLab listens at", 30) == {"127.0.0.1"}
    assert len(lab.info["token"]) >= 32
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{lab.info['url']}api/contents", timeout=90)


def test_lab_opens_on_the_first_lesson_and_changes_nothing_in_it(browser, lab: Lab):
    page = browser.new_page()
    page.goto(lab.address(""))
    page.wait_for_selector(".jp-NotebookPanel", timeout=90_000)
    assert page.locator(".lm-TabBar-tabLabel", has_text="00_start_here.ipynb").count()
    page.wait_for_selector("text=Python 3 (ipykernel) | Idle", timeout=90_000)
    page.wait_for_timeout(2_000)
    assert not page.locator(".jp-mod-dirty").count(), "marked as changed although nobody has changed it"
    page.close()


def test_stored_lesson_is_shown_without_errors_and_no_output_is_wider_than_its_cell(opened: Opened, screenshots: Path):
    page = opened.page
    assert errors_in(page.evaluate(CELLS)) == []
    indices = page.evaluate(WITH_OUTPUTS)
    assert indices
    wide = {}
    for index in indices:
        found = waited_for(lambda index=index: page.evaluate(TOO_WIDE, index), f"the output of cell {index}", 90)
        if found["wide"]:
            wide[index] = found["wide"]
    page.screenshot(path=screenshots / f"{opened.number}_stored.png")
    assert wide == {}
    assert opened.errors == []


def test_stored_widget_is_a_picture_until_its_cell_runs(opened: Opened, text: str, screenshots: Path):
    show_cell(opened.page, text)
    cell = opened.page.locator(".jp-Notebook-cell.jp-mod-active")
    picture = cell.locator(".jp-OutputArea-output img").first
    picture.wait_for(state="visible", timeout=90_000)
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
    assert cell.locator(".jupyter-widgets").count() == 0, "controls that do nothing"
    opened.page.screenshot(path=screenshots / f"{opened.number}_{text.strip('(')}_stored.png")


def test_widget_moves_once_its_cell_has_run(opened: Opened, text: str, screenshots: Path):
    page = opened.page
    for source in (PARAMETERS, f"import {text[:-1]}", text):
        run_cell(page, source)
    assert errors_in(page.evaluate(CELLS)) == []
    cell = widget(page, text)
    before = shown(cell)
    page.screenshot(path=screenshots / f"{opened.number}_{text.strip('(')}_before.png")
    move(cell)
    waited_for(lambda: shown(cell) != before, f"a change of {text}", 90)
    page.screenshot(path=screenshots / f"{opened.number}_{text.strip('(')}_after.png")
    assert opened.errors == []


def test_lesson_runs_through_the_menu(copied: Opened, screenshots: Path):
    assert copied.page.evaluate(WITH_OUTPUTS) == [], "an answer stands below its question"
    run_all(copied.page)
    cells = [cell for cell in copied.page.evaluate(CELLS) if "".join(cell["source"]).strip()]
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(min(counts), min(counts) + len(cells)))
    assert errors_in(cells) == [] and copied.errors == []
    copied.page.screenshot(path=screenshots / f"{copied.number}.png")


EXERCISE, LESSON = "exercises/02_collectives_exercises.ipynb", "notebooks/02_collectives.ipynb"
ANSWER = "my_answer = 42"


def save(page) -> None:
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")


def edit_first_text(path: Path, text: str) -> None:
    """Change the first cell of a notebook of the course, as a new version of it would."""
    nb = json.loads(path.read_text(encoding="utf-8"))
    nb["cells"][0]["source"] = [text]
    path.write_text(json.dumps(nb), encoding="utf-8")


def test_answer_stays_while_the_lessons_around_it_change(browser, tmp_path: Path, screenshots: Path):
    """``make lab``, an answer, a new version of the course, ``make lab`` again."""
    course = copied_course(tmp_path / "course", "00", "02")
    with serving(course) as first:
        with open_notebook(browser, first, EXERCISE) as opened:
            stub = opened.page.locator(".jp-CodeCell", has_text="NotImplementedError").first.locator(".cm-content")
            stub.click()
            opened.page.keyboard.press("ControlOrMeta+A")
            opened.page.keyboard.type(ANSWER)
            save(opened.page)
            waited_for(lambda: ANSWER in (course / "work" / EXERCISE).read_text(), "the saved answer", 90)
        with open_notebook(browser, first, LESSON) as opened:  # read and saved, not changed
            run_cell(opened.page, PARAMETERS)
            waited_for(lambda: opened.page.evaluate(CELLS)[0]["execution_count"], "the end of the cell", 120)
            save(opened.page)
            waited_for(lambda: '"execution_count": 1,' in (course / "work" / LESSON).read_text(), "the saved run", 90)
    log = (tmp_path / "log").read_text()
    assert f"new in {course / 'work'}: " in log
    assert "without encryption" not in log, "every start of a kernel warns on the terminal"
    edit_first_text(course / LESSON, "# Is this the new lesson?")
    edit_first_text(course / EXERCISE, "# New words for the exercises")

    with serving(course) as second:
        log = (tmp_path / "log").read_text()
        assert f"updated in {course / 'work'}: {LESSON}\n" in log
        assert f"{EXERCISE} is yours and stays; for its new version: make restore L={Path(EXERCISE).stem}\n" in log
        for path, there, absent in (
            (EXERCISE, ANSWER, "New words for the exercises"),
            (LESSON, "Is this the new lesson?", ANSWER),
        ):
            with open_notebook(browser, second, path) as opened:
                opened.page.locator(".jp-Cell", has_text=there).first.wait_for(state="visible", timeout=90_000)
                assert not opened.page.locator(".jp-Cell", has_text=absent).count()
                opened.page.screenshot(path=screenshots / f"work_{Path(path).stem}.png")
                assert opened.errors == []
    assert learner.copy(course / "work", course) == []  # it is told once
