"""The page on the architecture shows the package as it is."""

from __future__ import annotations

import sys

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "docs"))
import architecture  # noqa: E402


def test_the_page_lists_every_part_and_what_it_uses():
    assert architecture.PAGE.read_text(encoding="utf-8") == architecture.page(), "python docs/architecture.py"


def test_the_picture_is_the_one_that_the_imports_give(monkeypatch: pytest.MonkeyPatch, tmp_path):
    shown = {line for line in architecture.PICTURE.read_text().splitlines() if line.lstrip().startswith("<!--")}
    monkeypatch.setattr(architecture, "PICTURE", tmp_path / "picture.svg")
    architecture.draw()
    assert {line for line in (tmp_path / "picture.svg").read_text().splitlines() if "<!--" in line} == shown


def test_no_part_imports_in_a_circle():
    uses = architecture.arrows()
    assert max(architecture.levels(uses).values()) < 7
    with pytest.raises(ValueError, match="circle: a -> b -> a"):
        architecture.levels({"a": {"b"}, "b": {"a"}})
