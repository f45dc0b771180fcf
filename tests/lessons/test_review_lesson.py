"""The review: every question's formula gives what was computed by hand, or by another function, at drawn numbers."""

from __future__ import annotations

import itertools
import json
import math
import random
from datetime import date, timedelta

import pytest

from lessons.debugging_hangs.answers import diagnoses_and_cures
from lessons.multi_node import answers as multi_node
from lessons.review import ask
from lessons.review.ask import QUESTIONS, SPOKEN, Box
from lessons.review.progress import progress
from lessons.review.question import Asked, Question, place_of
from tools.author.minutes import sections

ROWS = {row.key: row for rows in QUESTIONS.values() for row in rows}
#: Drawn numbers, and what the answer is: by hand, from a lesson's text or table, or by another of its functions.
KNOWN = {
    "a list in the notebook": ({"k": 3, "n": 6}, 3),
    "ranks on few cores": ({"n": 12, "c": 3}, 3),
    "sum of the ranks": ({"n": 6, "r": 2}, 1 + 2 + 3 + 4 + 5 + 6),
    "who waits": ({"n": 8, "who": "all but the last rank call"}, 7),
    "which collective": ({"k": 1}, "reduce_scatter"),
    "ring all-reduce, bytes": ({"S": 400, "n": 8}, 14 * 50),
    "more ranks, same gradient": ({"S": 14, "n": 8, "m": 1024}, "they hardly change"),
    "all through rank 0": ({"S": 14, "n": 8}, 98),  # lesson 02: 98 GB against 24.5
    "all-gather of shards": ({"n": 8, "s": 100}, 700),
    "twice what is needed": ({"n": 64, "S": 2}, 2),
    "steps of the ring": ({"n": 16}, 15 + 15),
    "milliseconds of an all-reduce": ({"P": 1, "n": 8, "G": 400}, 1.75 * 2 / 50 * 1e3),
    "bus bandwidth": ({"S": 1, "n": 4, "t": 8}, 125 * 1.5),
    "many small all-reduces": ({"k": 100, "s": 8, "n": 4}, 100 * 6 * (10 + 0.02) / (6 * (10 + 2))),
    "a ring of sends": ({"how": "all send, then receive from the left"}, "they wait for each other"),
    "both directions": ({"x": 900, "S": 9}, 20),
    "ridge": ({"p": 1979, "b": 3.35}, 295.4),  # GPUS["h100"].ridge()
    "intensity of a thin product": ({"b": 16, "k": 8192}, 16 * 2 * 8192**2 / (2 * (8192**2 + 2 * 16 * 8192))),
    "bound by what": ({"b": 32}, "memory"),
    "where latency is half": ({"k": "pcie5"}, 5.7 * 63),
    "slowest link": ({"a": 450, "b": 63, "c": 25}, 25),
    "gradients between nodes": ({"P": 1, "m": 2, "p": 8, "g": 400}, 2 * 15 / 16 * 2 / (8 * 50) * 1e3),
    "steps of a tree": ({"n": 64}, 6 + 6),
    "ring or tree": ({"s": 0.1, "n": 64}, "a tree"),  # 12 against 126 latencies
    "steps on two levels": ({"m": 4, "p": 8}, 7 + 6 + 7),
    "one card for the node": ({"p": 8, "m": 16}, 8),
    "when the switch adds": ({"n": 64, "S": 6}, 6),
    "protocol by size": ({"s": 0.5}, "LL"),
    "algorithm on H200": ({"s": 1024}, "NVLS"),  # recorded: NVLS above 1 MiB
    "a sum for a mean": ({"n": 64, "lr": 0.1}, 6.4),
    "the same with Adam": ({"n": 4, "opt": "Adam"}, "they hardly change"),
    "buckets": ({"a": 16, "b": 13, "c": 14, "d": 4}, 3),
    "each micro-batch reduced": ({"k": 4, "S": 2, "n": 4}, 4 * 3),
    "losses of micro-batches": ({"k": 32}, 32),
    "padded epoch": ({"s": 1003, "n": 8}, 126 * 8 - 1003),
    "mean of means": ({"a": 100, "b": 300, "x": 4.0, "y": 2.0}, 2.5),
    "batch of a step": ({"B": 512, "b": 4, "n": 16}, 8),
    "what overlap leaves": ({"b": 40, "k": 5, "e": 12}, 8 + 5 * 12 - 40),
    "limit of a fixed batch": ({"a": 800, "b": 200, "n": 8}, 7),  # s = (1/4 - 1/8) / (7/8) = 1/7
    "growing batch": ({"s": 5, "n": 1000}, 0.05 + 0.95 * 1000),
    "how much faster": ({"i": 5}, 32 * 15700 / 40150),
    "one slow rank": ({"n": 512, "t": 100, "d": 25}, 20),
    "tokens that hide the all-reduce": ({"n": 8, "f": 400, "g": 50}, 1.75 * 2 / 50e9 * 400e12 / 6),
    "a larger model": ({"k": 10}, "it stays"),
    "lost in bf16": ({"u": 0.02}, 1 + 3 / 128),
    "what a format keeps": ({"x": 1e6, "name": "fp16"}, "infinity"),
    "MFU": ({"P": 7, "r": 8000}, 100 * 336e12 / 989.4e12),
    "MFU out of HFU": ({"h": 60}, 45),
    "more GPUs, what price": ({"n": 64, "m": 512, "e": 0.9, "f": 0.6}, 50),
    "days of training": ({"n": 512, "T": 1, "P": 8, "m": 40}, 48e21 / (512 * 989.4e12 * 0.4) / 86400),
    "top-k": ({"n": 4, "p": 1}, 25),  # lesson 05: 25 times fewer, not 100
    "time in all-reduce": ({"a": 5, "r": 3, "n": 8, "d": 40, "q": 3}, 5),
    "exposed": ({"c": 80, "s": 30, "e": 90}, 10),
    "states of Adam": ({"P": 7}, 112),
    "bytes by optimizer": ({"p": "mixed", "o": "momentum"}, 2 + 2 + 4 + 4),
    "ZeRO stage": ({"P": 7.5, "n": 64, "s": 2}, 16.6),  # the ZeRO paper, figure 1
    "what never shrinks": ({"P": 7, "s": 1}, 28),
    "traffic of a stage": ({"s": 3, "n": 8}, 1.5),
    "ranks that are enough": ({"P": 70, "G": 40}, 28),
    "what ZeRO does not divide": ({"S": 112, "A": 20, "n": 8}, 34),
    "kept inputs": ({"t": 32768}, 8.59),
    "all-gathers of a step": ({"L": 12, "k": 4}, 4 * 25),
    "bytes of FSDP": ({"P": 7, "n": 8}, 7 / 8 * 3 * 14),
    "gathered and kept": ({"P": 7, "n": 8}, 7 / 8 * 2 * 14),
    "only the root wrapped": ({"L": 32, "P": 13, "n": 8}, 26),
    "accumulate with FSDP": ({"k": 4, "P": 7, "n": 8}, 7 / 8 * (8 + 1) * 14),
    "norm over shards": ({"a": 3, "b": 4}, 5),
    "HSDP": ({"S": 32, "m": 4}, 1.5 * 4),
    "which engine": ({"k": 1}, "ZeRO-3 with NVMe offload"),
    "all-reduces of a layer": ({"L": 80}, 320),
    "bytes of a layer": ({"t": 8, "b": 1, "s": 4096, "h": 8192}, 4 * 1.75 * 4096 * 8192 * 2 / 1e6),
    "which link": ({"a": 1, "x": 900, "g": 400}, 9),
    "more tokens": ({"how": "for tensor parallelism"}, "they double"),
    "what stays whole": ({"t": 4}, 7),
    "few key-value heads": ({"a": 32, "k": 4, "t": 16}, 1),
    "bubble": ({"p": 4, "m": 8}, 100 * 3 / 11),
    "micro-batches that are enough": ({"p": 8, "x": 10}, 63),
    "what 1F1B changes": ({"p": 4, "m": 16}, "activations held, not the bubble"),
    "activations of 1F1B": ({"p": 8, "m": 32, "g": 2}, 16),
    "interleaving": ({"p": 4, "v": 2, "m": 8}, 100 * 3 / 19),
    "zero-bubble": ({"p": 8}, 7),
    "slowest stage": ({"a": 2, "b": 3, "s": 2}, 5),
    "message of a pipeline": ({"b": 2, "s": 4096, "h": 8192}, 2 * 2 * 4096 * 8192 * 2 / 1e6),
    "tensor or pipeline": ({"L": 32, "t": 8, "s": 4096}, "pipeline"),
    "bytes of ring attention": ({"n": 4, "t": 8192, "w": 1024}, 3 * 2 * 8192 * 1024 * 2 / 1e6),
    "the busiest rank": ({"T": 65536, "n": 8}, 15 / 8),
    "zig-zag": ({"n": 4, "r": 1}, 6),
    "does the ring hide": ({"f": 400, "g": 25, "q": 8}, 2000),
    "Ulysses or ring": ({"n": 16, "t": 4096, "w": 4096, "k": 4096}, "Ulysses"),
    "capacity": ({"t": 4096, "k": 8, "e": 256, "c": 1.5}, 192),
    "dispatch": ({"t": 4096, "b": 8192, "k": 2, "n": 8}, 4096 * 2 * 8192 * 7 / 8 / 1e6),
    "memory of experts": ({"e": 256, "k": 8}, 32),
    "micro-batches of a replica": ({"B": 512, "g": 256, "t": 8, "p": 8}, 128),
    "neighbor in a group": ({"t": 2, "d": 4, "p": 2, "r": 1}, 3),
    "states under three dimensions": ({"P": 70, "t": 8, "p": 4, "d": 8}, 70 / 32 * (4 + 12 / 8)),
    "who sends most": ({"L": 80, "h": 8192, "P": 70, "t": 1, "p": 4, "B": 16}, "data"),
    "order of ranks": ({"a": 5, "b": 30, "c": 8}, "tensor"),
    "norm with copies": ({"a": 3, "b": 4, "c": 12}, 13),
    "why not": ({"k": 2}, "the batch"),
    "hang: the cause": ({"p": 5}, diagnoses_and_cures()[6][0]),
    "hang: the rule": ({"p": 1}, "all ranks gather, one writes."),
    "flight records": ({"c": "different roots"}, "they are alike"),
    "watchdog log": ({"k": 0}, "at the rank that says nothing"),
    "the round that one rank adds": ({"s": 7, "n": 3}, 3),  # patient 3 of the clinic: collective #3
    "who sets the pace": ({"r": 900, "g": 2400}, 62.5),
    "more workers": ({"c": 5, "w": 45, "n": 4, "k": 2}, 80),
    "later epochs": ({"G": 340, "M": 200, "d": 0.5, "c": 16000, "g": 8000}, "the disk"),
    "what leaves a host": ({"S": 100, "m": 2, "p": 2}, 150),  # lesson 16: 1.5 S
    "what leaves by hosts": ({"S": 480, "m": 3, "p": 8}, 640),
    "numbered in turn": ({"S": 100, "m": 2, "p": 2}, 300),  # lesson 16: 3 S
    "which GPU": ({"r": 13, "p": 8}, 5),
    "steps done twice": ({"k": 50, "s": 1009}, 8),
    "how often to save": ({"h": 100, "d": 100, "s": 2}, math.sqrt(4 * 1440)),
    "more hosts, more saves": ({"f": 100}, 10),  # lesson 16: by 10
    "fewer hosts, same batch": ({"b": 2, "a": 4, "n": 16, "m": 4}, 16),
    "network: the cause": ({"p": 2}, multi_node.diagnoses_and_cures()[3][0]),
    "seldom synchronized": ({"S": 14, "H": 20}, 0.7),
    "one reader": ({"m": "Llama 3 8B", "g": "h200"}, 4800 / 16.06),  # lesson 17: about 300
    "cache of a token": ({"m": "Llama 3 8B"}, 2 * 32 * 1024 * 2 / 1e3),
    "sequences that fit": ({"w": 16, "c": 131.072, "n": 4, "T": 8192}, 304e9 // (131072 * 8192)),
    "latency of small messages": ({"w": 40, "L": 80, "u": 34}, 40 / (5 + 5.44)),
    "one shot": ({"n": 8}, 4),  # lesson 17: four times
    "blocks": ({"b": 16, "n": 100, "s": 50}, 3 + 4 + 4),
    "speculation": ({"g": 3, "a": 0.8}, (1 - 0.8**4) / (1 - 0.8)),
    "copies of a piece": ({"n": 16, "t": 4}, 4),
    "mean of the ranks' means": ({"a": 64, "b": 256}, (1 / 2 / 64) / (1 / 2 / 256)),
    "divisor under DDP": ({"n": 4, "a": 40, "b": 120}, 100),
    "a loss that is level": ({"k": 0}, "the optimizer holds other tensors than the model"),  # day 3
    "one slow GPU of many": ({"n": 384, "s": 105, "d": 6}, 384 * 6 / 111),
    "where the slow host is": ({"h": 48, "k": 3}, 18),  # lesson 19: 16 and two more
}


def draws(row: Question) -> list[dict]:
    """Every case that can be drawn."""
    return [dict(zip(row.draw, values, strict=True)) for values in itertools.product(*row.draw.values())]


@pytest.mark.parametrize("key", ROWS)
def test_formula_of_the_question(key: str):
    draws, expected = KNOWN[key]
    asked = Asked(ROWS[key], draws)
    right, told = asked.judge(expected)
    assert right, f"{asked.text} {asked.answer}, not {expected}"
    assert told == asked.why and "{" not in asked.text + asked.why


@pytest.mark.parametrize("key", ROWS)
def test_question_with_any_draw(key: str):
    """It has one answer, which counts as right, and mistakes that are told apart from it in some of its draws."""
    row, seen = ROWS[key], set()
    for values in draws(row)[::3] + draws(row)[-1:]:
        asked = Asked(row, values)
        assert asked.judge(asked.answer)[0]
        assert asked.choices or math.isfinite(asked.answer) and len(asked.mistakes) >= 1
        for value, told in asked.mistakes:
            right, said = asked.judge(value)
            seen |= {told} if not right else set()
            assert right or said in dict((text, 0) for _, text in asked.mistakes) and said
    assert seen


def test_there_are_enough_questions_and_each_names_a_section_of_a_lesson():
    spoken = [row for rows in SPOKEN.values() for row in rows]
    assert len(ROWS) == sum(map(len, QUESTIONS.values())) >= 120 and len({row.key for row in spoken}) >= 30
    assert not ROWS.keys() & {row.key for row in spoken} and ROWS.keys() == KNOWN.keys()
    places = {tuple(row.place.split(".")) for row in [*ROWS.values(), *spoken]}
    for lesson in {lesson for lesson, _ in places}:
        numbers = {f"{section.number}" for section in sections(lesson)}
        assert {section for named, section in places if named == lesson} <= numbers
    assert place_of("03.4") == "lesson 03 nccl, section 4"


def test_what_was_wrong_comes_again_and_what_was_right_later(tmp_path, monkeypatch, capsys):
    (tmp_path / ".course.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    first, second, third = (row.key for row in ask._chosen(QUESTIONS, 3, "", "", "17", 1))

    def answer(key: str, right: bool) -> str:
        box = Box(ROWS[key], ROWS[key].drawn(random.Random(0)))
        other = next((value for value in box.choices if value != box.asked.answer), -1)
        return box.say(box.asked.answer if right else other)

    assert answer(first, True).startswith("<b>Right.") and answer(second, False).startswith("<b>Not yet.")
    assert [row.key for row in ask._chosen(QUESTIONS, 2, "", "", "17", 1)] == [second, third]

    def days_later(days: int):
        class Later(date):
            @classmethod
            def today(cls):
                return date.today() + timedelta(days)
        monkeypatch.setattr(ask, "date", Later)

    days_later(1)
    assert {row.key for row in ask._chosen(QUESTIONS, 2, "", "", "17", 1)} == {first, second}
    answer(first, True)
    assert ask.known([ROWS[first], ROWS[second]]) == 1
    kept = json.loads((tmp_path / "predictions.json").read_text())[f"review: {first}"]
    assert (kept["right"], kept["times"]) == (2, 2) and kept["said"] == kept["is"]
    with pytest.raises(ValueError, match="there are Ranks"):
        ask.review(topic="ranks")
    capsys.readouterr()


def test_progress_is_read_from_saved_notebooks(tmp_path, monkeypatch, capsys):
    def notebook(path: str, *cells: tuple):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        cells = [{"cell_type": "code", "source": [source], "execution_count": count,
                  "outputs": [{"output_type": "stream", "text": [text]}]} for source, count, text in cells]
        (tmp_path / path).write_text(json.dumps({"cells": cells}))

    progress()
    assert "make lab" in capsys.readouterr().out
    (tmp_path / ".course.json").write_text("{}")
    (tmp_path / "predictions.json").write_text('{"bytes": {"said": 1}}')
    notebook("notebooks/02_x.ipynb", ("a = predict(\n    \"bytes\")", 1, ""), ("b = predict(\"more\")", None, ""))
    notebook("exercises/02_x_exercises.ipynb", ("check.f(f)", 1, "Exercise 1 passed on 2 ranks: yes."),
             ("check.g(g)", 2, "no"))
    monkeypatch.chdir(tmp_path)
    progress()
    text = capsys.readouterr().out
    assert [row.split() for row in text.splitlines()][1] == "02 x 1 of 2 1 of 2 1 of 2".split()
    assert (tmp_path / "progress.txt").read_text() == text
