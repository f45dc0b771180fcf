"""The pages to print are what the lessons' stored outputs give, say what the formulas say, and fit on one sheet."""

from __future__ import annotations

import re
import runpy
import subprocess

import pytest
from conftest import ROOT, missing

from course_utils.costs import COLLECTIVES, bytes_sent
from course_utils.doctor import chromium

SHEETS = ROOT / "docs" / "sheets"
BUILD = runpy.run_path(str(SHEETS / "build.py"))
PAGES = ["collectives", "hangs"]


@pytest.mark.parametrize("name", PAGES)
def test_page_is_built_from_the_lessons_as_they_are(name: str):
    stored = (SHEETS / f"{name}.html").read_text(encoding="utf-8")
    assert stored == BUILD[name](), "python docs/sheets/build.py"


def test_bytes_are_those_of_the_formulas():
    least = {name: bytes_ for name, _, bytes_, *_ in BUILD["COLLECTIVES"]}
    assert set(least) == set(COLLECTIVES)
    for name, formula in least.items():
        factor = {"2(N−1)/N · S": 2 * 7 / 8, "(N−1)/N · S": 7 / 8, "S": 1.0}[formula]
        assert bytes_sent(name, 8, 1.0) == factor, name


@pytest.mark.parametrize("name", PAGES)
def test_page_is_whole_and_pictures_have_words(name: str):
    text = (SHEETS / f"{name}.html").read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text)  # nothing is fetched
    assert len(re.findall(r'<img alt="[^"]{30,}"', text)) == text.count("<img") == (8 if name == "collectives" else 0)


@pytest.mark.parametrize("name", PAGES)
def test_page_prints_on_one_sheet(name: str, tmp_path):
    browser = chromium() or missing("Chromium")
    printed = tmp_path / "page.pdf"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--no-pdf-header-footer", f"--print-to-pdf={printed}", (SHEETS / f"{name}.html").as_uri()]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes())) == 1
