"""The exercises on DeepSpeed: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

from collections import Counter

import pytest
import torch.distributed as dist
from conftest import missing
from exercise_cases import ExerciseTests

from course_utils import record
from course_utils.models import loss_of
from lessons.deepspeed import check as checks
from lessons.deepspeed.deepspeed_tools import missing as without

pytestmark = pytest.mark.guard(120)

ON_PAPER = ("choices",)
WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

# ------------------------------------------------------------------------------------------------ mended configurations

FIRST, SECOND = '"zero_optimization": {"stage": 2}', '"zero_optimization": {"stage": 1}'
CLIP_B = '"gradient_accumulation_steps": 2,\n        "gradient_clipping": 0.0'
THRESHOLD = '"stage3_param_persistence_threshold": 0'

WRONG["mended"] = {
    "form": ['return {"A": a, "B": b, "C": c}  ->  return [a, b, c]', '"B": b, "C": c}  ->  "B": b, "C": None}'],
    "refused": ['"gradient_accumulation_steps": 2  ->  "gradient_accumulation_steps": 1',
                {THRESHOLD: '"stage3_persistence": 0'}],
    "ignored": {FIRST: '"zero_optimisation": {"stage": 2}'},
    "stage": {FIRST: '"zero_optimization": {"stage": 1}'},
    "batch": {'"train_batch_size": 8': '"train_batch_size": 4',
              '"gradient_accumulation_steps": 2': '"gradient_accumulation_steps": 1'},
    "clipped": {CLIP_B: '"gradient_accumulation_steps": 2'},
    "losses": {CLIP_B: '"gradient_accumulation_steps": 2,\n    "gradient_clipping": 0.25'},
    "whole-parameters": {f", {THRESHOLD}": ""},
}
RIGHT["mended"] = {
    "whole model": {THRESHOLD: '"stage3_model_persistence_threshold": 0'},
    "one size less, no clipping as null": {
        '"train_batch_size": 8,\n': "", SECOND: '"zero_optimization": {"stage": 1, "reduce_bucket_size": 4000}',
    },
}

# ----------------------------------------------------------------------------------------------- one step by the engine

STEP, BACKWARD = "engine.step()", "engine.backward(loss)"
COUNTS = "Counter(entry.op for entry in ledger)"
FORCED = f"engine.set_gradient_accumulation_boundary(True)\n{BACKWARD}"

WRONG["train_step"] = {
    "form": {f", {COUNTS}": ""},
    "not-stepped": {f"            {STEP}\n": "", "    return total /": f"        {STEP}\nreturn total /"},
    "stepped-too-often": {BACKWARD: FORCED},
    "divided": {BACKWARD: "engine.backward(loss / len(micro_batches))"},
    "scaled-loss": {"loss.item()": "loss.item() / len(micro_batches)"},
    "losses": "total / len(micro_batches)  ->  loss.item()",
    "count": {COUNTS: "{'all_reduce': 2, 'all_gather': 1}"},
    "too-many-calls": {"total += loss.item()": "total += loss.item()\ndist.all_reduce(loss.detach())"},
}


def by_hand(engine, micro_batches):
    """The boundary is set by hand, and the engine steps once."""
    losses = []
    with record() as ledger:
        for place, (tokens, targets) in enumerate(micro_batches, 1):
            engine.set_gradient_accumulation_boundary(place == len(micro_batches))
            losses.append(loss_of(engine, tokens, targets))
            engine.backward(losses[-1])
        engine.step()
    counts: dict = {}
    for entry in ledger:
        counts[entry.op] = counts.get(entry.op, 0) + 1
    return sum(losses).detach() / len(losses), counts


def summed(engine, micro_batches):
    """The engine's own scaled losses, and backward by torch."""
    with record() as ledger:
        mean = 0.0
        for tokens, targets in micro_batches:
            loss = loss_of(engine, tokens, targets)
            loss.backward()
            engine.step()
            mean += loss.item() / len(micro_batches)
    return mean, dict(Counter(entry.op for entry in ledger))


RIGHT["train_step"] = {"boundary by hand": by_hand, "torch's backward": summed}

# ------------------------------------------------------------------------------------------------ FSDP2 to DeepSpeed

KEPT = 'zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}'
OFFLOAD = 'zero |= {"offload_optimizer": cpu, "offload_param": cpu}'
CLIPPING = '"gradient_clipping": setup["max_norm"] or 0.0,'

WRONG["to_deepspeed"] = {
    "form": "return config  ->  return None",
    "refused": '"stage": 3,  ->  "stage": 4,',
    "batch": '"gradient_accumulation_steps": setup["micro_batches"],  ->  "wall_clock_breakdown": False,',
    "stage": {'"stage": 3, "stage3': '"stage": 2, "stage3', KEPT: "pass"},
    "whole-parameters": ', "stage3_param_persistence_threshold": 0  ->  ',
    "offload": {OFFLOAD: 'zero["offload_optimizer"] = cpu'},
    "clipping": [{CLIPPING: ""}, {CLIPPING: '"gradient_clipping": 0.0,'}],
    "losses": {'"zero_optimization": zero,': '"zero_optimization": zero, "bf16": {"enabled": True},'},
    "gathers": [{KEPT: "pass"}, 'if setup["reshard_after_forward"]:  ->  if True:'],
}
RIGHT["to_deepspeed"] = {
    "whole batch": {'"gradient_accumulation_steps": setup["micro_batches"]':
                    '"train_batch_size": 2 * setup["micro_batch"] * setup["micro_batches"]'},
    "buckets and numbers": {
        '"stage3_param_persistence_threshold": 0}': '"stage3_param_persistence_threshold": 1, '
                                                    '"reduce_bucket_size": 5000}',
        '"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0':
        '"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1, "stage3_prefetch_bucket_size": 0',
    },
}

# ----------------------------------------------------------------------------------------------- a universal checkpoint

LOAD = "engine.load_checkpoint(folder, tag=universal)"
FLAG = ' | {"checkpoint": {"load_universal": True}}'
ONE_CONVERTS = "if dist.get_rank() == 0:"

WRONG["resume"] = {
    "form": "return engine  ->  return engine.module",
    "refused": [{LOAD: "engine.load_checkpoint(folder, tag=tag)", FLAG: ""}, {FLAG: ""}],
    "converted": {ONE_CONVERTS: "if True:"},
    "not-loaded": {LOAD: "pass"},
    "no-states": {LOAD: "engine.load_checkpoint(folder, tag=universal, load_optimizer_states=False)"},
    "losses": {"config | {": 'config | {"gradient_clipping": 0.25} | {'},
}


def by_latest(make_engine, convert, config, folder, tag):
    """Rank 0 converts to a name of its own; the engine is made afterwards, and the tag is read from `latest`."""
    if not dist.get_rank():
        convert(f"{folder}/{tag}", f"{folder}/whole")
    engine = make_engine({**config, "checkpoint": {"load_universal": True}})
    assert engine.load_checkpoint(folder)[0]
    return engine


RIGHT["resume"] = {
    "latest": by_latest,
    "by name": {LOAD: "loaded, _ = engine.load_checkpoint(load_dir=folder, tag=universal)\nassert loaded"},
}

# ------------------------------------------------------------------------------------------------ five situations

LETTERS = {1: "b", 2: "b", 3: "a", 4: "c", 5: "a"}

WRONG["choices"] = {
    "form": "5: \"a\"  ->  5: \"e\"",
    **{f"{n}-{wrong}": f'{n}: "{right}"  ->  {n}: "{wrong}"'
       for n, right in LETTERS.items() for wrong in "abcd" if wrong != right},
}
RIGHT["choices"] = {
    "one by one": {'return {1: "b", 2: "b",': 'return dict([(1, "b"), (2, "b")]) | {'},
    "capitals": {'2: "b"': '2: " B"'},
    "by position": 'return {1: "b", 2: "b", 3: "a", 4: "c", 5: "a"}  ->  return dict(enumerate("bbaca", 1))',
}


class TestDeepSpeed(ExerciseTests):
    checks = checks
    WRONG, RIGHT = WRONG, RIGHT

    @pytest.fixture(autouse=True)
    def deepspeed_where_it_is_needed(self, request: pytest.FixtureRequest):
        given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        names = {value if isinstance(value, str) else value.exercise for value in given.values()}
        if names - set(ON_PAPER) and without() and "_stand" not in request.node.name:
            missing("DeepSpeed: make deepspeed")

    def test_what_is_tried_stands_there(self):
        if without():
            missing("DeepSpeed: make deepspeed")
        said = checks.tried({"A": {"train_batch_size": 7}, "B": {"train_batch_size": 8}})
        assert "A: stops with " in said and "B: stage 0, 8 samples a step" in said

    def test_without_deepspeed_a_check_says_how_to_get_it(self, monkeypatch):
        monkeypatch.setattr(checks, "missing", lambda: "DeepSpeed is not installed. Run this.")
        for name in set(self.exercises()) - set(ON_PAPER):
            assert str(self.refusal(name, self.answer(name))).endswith("DeepSpeed is not installed. Run this.")
        for name in ON_PAPER:
            getattr(checks, name)(self.answer(name))
