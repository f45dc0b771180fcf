"""The memory calculator: what it says is what `memory.training_memory` says, and what cannot be is refused."""

import dataclasses

import pytest
from figures import Opened

from course_utils import hardware, memory, models
from course_utils.memory import Memory
from course_utils.units import decimal_bytes
from lessons.zero.explorer import judge, memory_calculator


@pytest.fixture
def calculator():
    return Opened(memory_calculator())


def test_it_says_what_the_formulas_say(calculator):
    calculator.model.value, calculator.ranks.value, calculator.stage.value = "GPT-3 13B", 64, 2
    calculator.batch.value, calculator.length.value = 4, 1024
    need = memory.training_memory(models.PUBLISHED["GPT-3 13B"], 4, length=1024, stage=2, ranks=64)
    assert f"<b>{decimal_bytes(need.total)} on each rank</b>" in calculator.status.value
    for part, size in need.parts().items():
        assert f"{part} {decimal_bytes(size)}" in calculator.status.value


def test_every_control_changes_what_is_shown(calculator):
    seen = {calculator.shown}
    for control, value in (
        (calculator.ranks, 16), (calculator.stage, 1),
        (calculator.gradient_copy, True), (calculator.precision, "fp32"), (calculator.optimizer, "sgd"),
        (calculator.length, 1024), (calculator.batch, 2), (calculator.checkpoint, True), (calculator.free, 0.5),
        (calculator.model, "GPT-2"), (calculator.model, "own shape"), (calculator.layers, 13), (calculator.heads, 6),
        (calculator.hidden, 384), (calculator.vocabulary, 1000),
    ):
        control.value = value
        assert calculator.shown not in seen, control.description
        assert not calculator.refuses
        seen.add(calculator.shown)
    assert all(picture.startswith(b"\x89PNG") for _, picture in seen)


def test_every_published_model_is_shown_with_its_shape(calculator):
    shapes = {name: config for name, config in models.PUBLISHED.items() if not config.gated}
    assert calculator.model.options == (*shapes, "own shape")  # Llama's layers are not those that the formulas count
    for model, config in shapes.items():
        calculator.model.value = model
        assert (calculator.layers.value, calculator.hidden.value) == (config.layers, config.hidden)
        assert calculator.layers.disabled and calculator.length.value <= config.context
        assert "on each rank" in calculator.status.value


def test_an_own_shape_starts_from_the_model_before(calculator):
    calculator.model.value, calculator.model.value = "GPT-2 XL", "own shape"
    assert (calculator.layers.value, calculator.heads.value, calculator.hidden.value) == (48, 25, 1600)
    assert not calculator.hidden.disabled
    calculator.length.value = 131_072
    need = memory.training_memory(models.TransformerConfig(48, 25, 1600, 131_072, 50257), 1, stage=3, ranks=8)
    assert decimal_bytes(need.total) in calculator.status.value


@pytest.mark.parametrize(("control", "value", "message"), [
    ("batch", 0, "batch must be an integer of at least 1, got 0"), ("batch", -3, "at least 1, got -3"),
    ("heads", 7, "hidden must be a multiple of heads"), ("layers", 0, "layers must be an integer of at least 1"),
    ("hidden", 32 * 10**13, "bytes a rank, more than any machine has"), ("vocabulary", -1, "vocabulary must be"),
])
def test_impossible_input_is_refused_and_the_picture_comes_back(calculator, control, value, message):
    calculator.model.value = "own shape"
    before = calculator.shown
    field = getattr(calculator, control)
    good, field.value = field.value, value
    assert message in calculator.status.value and calculator.refuses
    assert calculator.shown[1] != before[1]
    field.value = good
    assert calculator.shown == before


def test_a_sequence_longer_than_the_positions_of_a_model_is_refused(calculator):
    calculator.length.value = 4096
    assert "GPT-3 6.7B has 2,048 positions, no 4,096" in calculator.status.value
    calculator.model.value = "GPT-2"
    assert calculator.length.value == 1024 and "on each rank" in calculator.status.value


@pytest.mark.parametrize(("need", "free", "reason"), [
    (Memory(72e9), 0.1, "fits"), (Memory(72.1e9), 0.1, "tight"), (Memory(80e9), 0.0, "fits"),
    (Memory(80e9), 0.05, "tight"), (Memory(79e9, activations=2e9), 0.1, "activations"), (Memory(81e9), 0.0, "states"),
])
def test_what_fits_is_judged_against_the_memory_of_the_gpu(need, free, reason):
    verdict = judge(need, hardware.GPUS["h100"], free)
    assert verdict.reason == reason
    if reason in ("fits", "tight"):
        assert f"{decimal_bytes(need.total)} of 80 GB" in verdict.words
    else:
        assert verdict.words == "1 GB too much"


def test_each_gpu_is_told_once_with_the_reason(calculator):
    calculator.model.value = "GPT-3 13B"
    told, _ = calculator.status.value.split(" One change", 1)
    groups = told.split("<b>")[2:]
    names = [name for group in groups for name in group.split("</b>")[0].split(", ")]
    assert sorted(names) == sorted(gpu.name for gpu in hardware.GPUS.values())


def test_what_is_advised_makes_it_fit(calculator):
    calculator.model.value, calculator.batch.value = "GPT-3 13B", 8
    advice = calculator.status.value.split("One change that makes it fit on <b>")[1].split("</div>")[0]
    gpu = next(gpu for gpu in hardware.GPUS.values() if gpu.name == advice.split("</b>")[0])
    config, run = models.PUBLISHED["GPT-3 13B"], {"stage": 3, "ranks": 8, "precision": "mixed", "optimizer": "adam"}

    def fits(batch, config=config):
        return judge(memory.training_memory(config, batch, **run), gpu, 0.1).reason

    assert "checkpointing" in advice and "batch" in advice
    assert fits(8) != "fits" == fits(8, dataclasses.replace(config, checkpoint=True))
    batch = int(advice.split("batch ")[1].split(",")[0].rstrip("."))
    assert fits(batch) == "fits" != fits(2 * batch)


def test_views_into_the_buckets_are_advised_where_they_help(calculator):
    calculator.model.value, calculator.checkpoint.value = "GPT-3 13B", True
    calculator.stage.value, calculator.ranks.value, calculator.free.value = 1, 64, 0.0
    assert "gradients as views" not in calculator.status.value
    calculator.gradient_copy.value = True
    assert "gradients as views into the buckets" in calculator.status.value


def test_formulas_and_what_is_left_out_are_told(calculator):
    for word in ("memory.training_memory", "Rajbhandari", "Not counted", "1e9 bytes"):
        assert word in calculator.note.value


def test_it_says_when_nothing_fits_and_no_change_helps(calculator):
    calculator.model.value, calculator.ranks.value, calculator.stage.value = "Megatron 1008B", 1, 0
    assert "Fits on none of these GPUs." in calculator.status.value
    assert "No single change of one control makes it fit" in calculator.status.value
