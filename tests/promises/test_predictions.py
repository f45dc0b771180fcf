"""Predictions are open: nothing in view answers them, readers may commit to an answer, and it is compared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT

from course_utils.predictions import predict, predictions
from tools.author.pages import boxed
from tools.author.predictions import in_view

TEXT = """\
# %% [markdown]
# Something. **Predict.** How many?
{more}
# %%
{shown}

# %% jupyter={{"source_hidden": true}}
assert count == 3

# %% [markdown]
# {below} Three, because it is so.
"""


def lesson(shown: str = "print(count)", below: str = "**Compare.**", more: str = "") -> list[str]:
    return in_view(TEXT.format(shown=shown, below=below, more=more))


@pytest.mark.parametrize("path", sorted(ROOT.glob("lessons/*/lesson.py")), ids=lambda path: path.parent.name)
def test_no_answer_is_in_view_before_its_cell_has_run(path: Path):
    assert in_view(path.read_text("utf-8")) == []


def test_no_two_predictions_of_the_course_are_about_the_same_words():
    """Answers are kept under these words, for all lessons in one file."""
    texts = [path.read_text("utf-8") for path in ROOT.glob("lessons/*/lesson.py")]
    about = [words for text in texts for words in re.findall(r'predict\(\s*"([^"]+)"', text)]
    assert len(about) > 100 and len(about) == len(set(about))


def test_what_gives_an_answer_away_is_told():
    assert lesson() == []
    for given, said in (
        ({"shown": "assert count == 3"}, "assert"), ({"shown": "with expect_error():\n    count()"}, "expect_error"),
        ({"below": "Three."}, "Compare"), ({"more": "#\n# Or is it three?\n"}, "follows"),
    ):
        (fault,) = lesson(**given)
        assert said in fault


def test_the_answer_and_its_caption_are_folded_and_what_follows_is_not():
    text = boxed("**Compare.** Three.\n\n*The figure: three bars.*\n\nThe next sentence.")
    fold, _, rest = text.partition("</details>")
    assert ">Compare</summary>\n\nThree.\n\n*The figure: three bars.*" in fold and rest == "\n\nThe next sentence."


def test_answers_are_compared_and_kept_in_a_learners_copy_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "MB.\n" in _said(predict("bytes sent", unit="MB"), 21, capsys)
    assert not [*tmp_path.iterdir()]
    (tmp_path / ".course.json").write_text("{}")
    sent, fate = predict("bytes sent", unit="MB"), predict("the call", ["an error", "a hang"])
    assert sent.say("many") != sent.say("98") == fate.say("a hang")
    assert _said(sent, 21, capsys) == "bytes sent: 21 MB; you said 98 MB, 4.67 times too much.\n"
    assert _said(fate, "an error", capsys) == "the call: an error (you said a hang).\n"
    assert json.loads((tmp_path / "predictions.json").read_text())["bytes sent"]["said"] == 98
    assert predict("bytes sent", unit="MB").said == 98  # in the next kernel
    sent.say("21.5")
    assert _said(sent, 21, capsys).endswith("that is close.\n")
    predictions()
    assert "the call" in capsys.readouterr().out


def _said(made, result, capsys) -> str:
    made.compare(result)
    return capsys.readouterr().out


def test_a_prediction_shows_a_field_or_choices_and_words_where_there_are_no_widgets(monkeypatch):
    import IPython
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: shown.append(data))
    monkeypatch.setattr(IPython, "get_ipython", lambda: True)
    for made, kind in ((predict("a number", unit="s"), "Text"), (predict("a choice", ["x", "y"]), "ToggleButtons")):
        label, row = made.field().children
        field, told = row.children
        assert type(field).__name__ == kind and made.about in label.value
        field.value = "12" if kind == "Text" else "y"
        assert made.said == (12.0 if kind == "Text" else "y") and told.value == "noted"
    assert all("application/vnd.jupyter.widget-view+json" in data for data in shown)
    words = ["Your prediction: a number, in s.", "Your prediction: a choice: x or y."]
    assert [data["text/plain"] for data in shown] == words
