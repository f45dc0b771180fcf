"""What lesson 17 says of serving, and no cell of it asserts."""

from __future__ import annotations

import random
import sys

import cloudpickle
import pytest
from lesson_cells import definitions

from course_utils import launch
from course_utils.hardware import GPUS
from course_utils.models import PUBLISHED
from lessons.serving.engine import Blocks, Engine, Scheduler
from lessons.serving.helpers import (
    DEEPSEEK_V3,
    MEASURED,
    READING,
    all_reduces,
    alone,
    cache_bytes,
    requests,
    servers,
    serving_gpt,
    storm,
)

pytestmark = pytest.mark.guard(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


def test_what_a_token_leaves_behind_is_what_was_published():
    """Kilobytes in bf16 (DeepSeek-AI 2025, Insights into DeepSeek-V3, arXiv 2505.09343, table 1)."""
    assert [cache_bytes(shape) for shape in (DEEPSEEK_V3, PUBLISHED["Llama 3 405B"])] == [70_272, 516_096]
    assert DEEPSEEK_V3.parameter_count == pytest.approx(671e9, rel=1e-3)


@pytest.mark.parametrize(("count", "size"), [(30, 4), (60, 3), (200, 1)])
def test_no_block_is_lost_however_many_there_are(count: int, size: int):
    blocks = Blocks(max(count, 48 // size), size)
    happened = storm(Scheduler(blocks, budget=16, most=8), 1000, seed=count + size)
    assert happened["finished"] + happened["cancelled"] == 1000
    assert sorted(blocks.free) == [*range(len(blocks.users))] and not any(blocks.users)
    assert all(blocks.block_of[prefix] == block for block, prefix in blocks.prefix_of.items())
    assert len(blocks.block_of) == len(blocks.prefix_of)


def test_a_step_keeps_its_limits_and_decodes_come_first():
    draw, scheduler = random.Random(0), Scheduler(Blocks(40, 4), budget=12, most=5)
    for request in requests(60, longest=30):
        scheduler.add(request)
    while scheduler.waiting or scheduler.running:
        decoding = {request.name for request in scheduler.running if request.left == 1}
        batch = scheduler.plan()
        assert sum(count for _, count in batch) <= 12 and 0 < len(batch) <= 5
        planned = [request.name for request, _ in batch]
        left = decoding & {request.name for request in scheduler.running}
        assert set(planned[: len(left)]) == left
        assert all(len(request.table) * 4 >= request.done + count for request, count in batch)
        scheduler.advance(batch, [draw.randrange(128) for _ in batch])


def serve_at_random(model, count, seed):
    """Requests that come and are cancelled between steps, with few blocks; those that were finished."""
    engine, draw, asked = Engine(model, blocks=14, budget=11, most=6), random.Random(seed), requests(count, 14, 8, seed)
    for request in asked:
        engine.add(request)
        for _ in range(draw.randint(0, 2)):
            engine.step()
        if draw.random() < 0.2:
            engine.scheduler.cancel(draw.randrange(count))
    engine.run()
    assert len(engine.scheduler.blocks.free) == 14
    return engine.scheduler.put_back, [request for request in asked if request.finished]


def test_every_text_is_the_one_that_a_request_gets_alone():
    model = serving_gpt()
    put_back, finished = launch(serve_at_random, model, 25, 3, world_size=3)[0]
    assert put_back > 0 and len(finished) > 12
    assert all(request.tokens == alone(model, request) for request in finished)


def test_predicted_throughput_is_off_by_what_the_text_says():
    full_load = definitions("17")["at_full_load"]
    errors = {gpus: [] for gpus in (1, 2, 8)}
    for name, gpu, gpus, prompt, new, published in MEASURED["full load"]["rows"]:
        errors[gpus].append(full_load(PUBLISHED[name], GPUS[gpu], gpus, prompt, new)[1] / published)
    assert min(errors[1] + errors[2]) > 0.75 and max(errors[1] + errors[2]) < 1.34
    assert 1.15 < min(errors[8]) and max(errors[8]) < 1.65
    assert round(1e3 * all_reduces(PUBLISHED["Llama 3 70B"], 8, 2000)) == 27  # of the 73 ms of section 8


@pytest.mark.parametrize(("every", "gain"), [(3, 16.5), (6, 1)])
def test_continuous_batching_gains_only_where_places_are_taken(every: int, gain: float):
    lesson, medians = definitions("17"), []
    for kind in (lesson["Static"], Scheduler):
        waits = lesson["simulate"](kind(Blocks(200, 4), 64, most=8), every=every)[1]
        medians.append(1 + waits[len(waits) // 2])
    assert medians[0] / medians[1] == gain


def test_two_copies_begin_more_prompts_than_all_gpus_together():
    eight_gpus = definitions("17")["eight_gpus"]
    eight_gpus.__globals__.update(large=PUBLISHED["Llama 3 70B"], h100=GPUS["h100"])
    (whole, messages, _), (copies, *_) = eight_gpus(1, 8), eight_gpus(1, 4)
    assert [round(1e3 * whole), round(1e3 * messages), round(1 / whole), round(2 / copies)] == [73, 27, 14, 17]


def test_published_tokens_over_the_batch_lie_near_the_curve_as_the_figure_shows():
    step_times, (one, hundred, most) = definitions("17")["step_times"], MEASURED["batches"]["rows"]
    for batch, published in (one, hundred):
        _, reading = step_times(PUBLISHED["Llama 3 8B"], GPUS["h200"], batch, 1500)
        assert published == pytest.approx(batch * READING / reading, rel=0.1)
    assert most[1] < hundred[1]


def test_the_evidence_of_the_three_servers_shows_what_diagnoses_are_judged_by():
    for patient, case in zip(servers.clinic(), servers.CASES, strict=True):
        found = {}
        for name in servers.EVIDENCE:
            found |= patient.ask(name).facts
        assert found and found.items() <= case.facts.items()
        for cause in servers.CAUSES.keys() - {case.cause}:
            assert "speaks against it" in str(patient.diagnose(cause))
