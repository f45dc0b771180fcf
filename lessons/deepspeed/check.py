"""Checks of the exercises on DeepSpeed: a small GPT is trained with the real library on ranks, and what it did is read.

Each takes the learner's function; it prints one line if that passes, and raises :class:`CheckFailed` with a hint if
not. Where DeepSpeed is not installed, those that need it say how to get it; the one on paper works all the same.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course_utils.check import BACKEND, CheckFailed, Exercise, checked, load_hints, number, show

from .deepspeed_tools import missing
from .engines import (
    SAMPLES,
    STEPS,
    by_rank,
    fsdp2_training,
    held,
    losses_of_one,
    make_engine,
    make_model,
    mean,
    model_size,
    near,
    shown,
    to_universal,
    train,
    values_of,
    words_of,
)

__all__ = [
    "HINTS", "choices", "fsdp2_training", "mended", "resume", "to_deepspeed", "train_step", "tried",
]

HINTS = load_hints(__file__)


def _exercise(title: str, name: str, **options: Any) -> Exercise:
    """The run of a check that needs DeepSpeed; refused in one sentence where there is none."""
    if sentence := missing():
        raise CheckFailed(f"{title}: {sentence}", "missing")
    return Exercise(title, HINTS[name], 20, **options)


# ------------------------------------------------------------------------------------------------ mended configurations

_ORDERS = {"A": (2, 4, "shared states"), "B": (1, 2, "DDP's losses"), "C": (3, 4, "shared parameters")}


def _try(words: Tensor, configs: dict[str, dict]) -> dict[str, dict]:
    """What DeepSpeed makes of each configuration, on a rank."""
    found = {}
    for name, config in configs.items():
        try:
            engine = make_engine(config)
        except Exception as error:
            found[name] = {"refused": f"{type(error).__name__}: {str(error).strip()}"}
            continue
        micro, samples = engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()
        losses = train(engine, words, micro) if samples == SAMPLES else []
        facts = {"refused": "", "stage": engine.zero_optimization_stage(), "micro": micro, "samples": samples}
        found[name] = facts | {"losses": losses} | held(engine)
    return found


def tried(configs: dict[str, dict]) -> str:
    """Say what DeepSpeed makes of configurations for Exercise 1, on 2 ranks."""
    outcomes = _exercise("Exercise 1", "mended").run(_try, by_rank(words_of(), 2), configs)
    lines = [f"one process: losses {shown(losses_of_one())}"]
    for name, got in outcomes[0].result.items():
        if got["refused"]:
            lines.append(f"{name}: stops with {got['refused']}")
            continue
        losses = mean([outcome.result[name]["losses"] for outcome in outcomes])
        lines += [f"{name}: stage {got['stage']}, {got['samples']} samples a step, losses {shown(losses)}",
                  f"   on each rank {got['states']:,} bytes of Adam's states, {got['whole']:,} of whole parameters"]
    return "\n".join(lines)


@checked
def mended(fn: Callable) -> None:
    """Check ``fn() -> {"A": config, "B": config, "C": config}``, each of which trains as its order says."""
    exercise = _exercise("Exercise 1", "mended")
    configs = exercise.call(fn)
    form = isinstance(configs, dict) and set(configs) == set(_ORDERS)
    form = form and all(isinstance(config, dict) for config in configs.values())
    exercise.require(form, "form", f"the function returned {show(configs)}.")
    results = [outcome.result for outcome in exercise.run(_try, by_rank(words_of(), 2), configs)]
    for name, order in _ORDERS.items():
        exercise.case = f"configuration {name}, {order[2]}"
        _ordered(exercise, [result[name] for result in results], *order[:2])
    print("Exercise 1 passed: all three train on 2 ranks, losses are those of one process, states are shared.")


def _ordered(exercise: Exercise, results: list[dict], stage: int, micro: int) -> None:
    """Refuse what a configuration has become on the ranks, unless it is what was ordered."""
    got = results[0]
    refused = got["refused"].split("\n")[0]
    exercise.require(not refused, "refused", f"DeepSpeed stops: {refused[:200]}.")
    if got["stage"] != stage:
        key = "ignored" if got["stage"] == 0 else "stage"
        what = f"it trains at stage {got['stage']}, with {got['states']:,} bytes of the optimizer's states on each rank"
        exercise.refuse(key, f"{what}; the states of the whole model have {8 * model_size():,}.")
    sizes = (got["micro"], got["samples"])
    if sizes != (micro, SAMPLES):
        exercise.differs("batch", "samples of a micro-batch, and of a step, are wrong.", (micro, SAMPLES), sizes)
    losses, right = mean([result["losses"] for result in results]), losses_of_one()
    if not near(losses, right):
        key = "clipped" if near(losses, losses_of_one(clip=1.0)) else "losses"
        exercise.differs(key, "the losses are not those of one process.", shown(right), shown(losses))
    if stage == 3 and got["whole"]:
        what = f"{got['whole']:,} of {4 * model_size():,} bytes of parameters stay whole on each rank between steps."
        exercise.refuse("whole-parameters", what)


# ----------------------------------------------------------------------------------------------- one step by the engine


def _stepped(words: Tensor, fn: Callable, count: int) -> list[dict]:
    """Steps of the learner's on a rank, each of ``count`` micro-batches, at stage 2."""
    from course_utils import record

    engine = make_engine({
        "train_micro_batch_size_per_gpu": len(words[0]) // count, "gradient_accumulation_steps": count,
        "gradient_clipping": 0.0, "zero_optimization": {"stage": 2},
    })
    found = []
    for batch in words:
        parts = [(part[:, :-1], part[:, 1:]) for part in batch.chunk(count)]
        with record() as ledger:
            got = fn(engine, parts)
        found.append({"got": got, "ledger": ledger, "steps": engine.global_steps})
    return found


@checked
def train_step(fn: Callable) -> None:
    """Check ``fn(engine, micro_batches) -> (mean loss, {operation: calls})``, one optimizer step at stage 2."""
    exercise = _exercise("Exercise 2", "train_step")
    for count in (1, 4):
        case = f"{count} micro-batch{'es' * (count > 1)} a step"
        outcomes = exercise.run(_stepped, by_rank(words_of(), 2), fn, count, case=case)
        for _, outcome in exercise.each(outcomes):
            for step, done in enumerate(outcome.result):
                _one_step(exercise, done, step, count)
        losses = mean([[float(done["got"][0]) for done in outcome.result] for outcome in outcomes])
        if not near(losses, losses_of_one()):
            small = near(losses, losses_of_one(factor=1 / count))
            key = "scaled-loss" if near([count * loss for loss in losses], losses_of_one()) else "losses"
            key = "divided" if small else key
            exercise.differs(key, "the losses are not those of one process.", shown(losses_of_one()), shown(losses))
    print("Exercise 2 passed: the losses of one process; a reduction per micro-batch, and one all-gather.")


def _one_step(exercise: Exercise, done: dict, step: int, count: int) -> None:
    """Refuse a step that is none, an answer of another form, a wrong count, and calls that DeepSpeed does not need."""
    got = done["got"]
    form = isinstance(got, tuple) and len(got) == 2 and number(got[0]) is not None and isinstance(got[1], Mapping)
    exercise.require(form, "form", f"the function returned {show(got)}.")
    if done["steps"] != step + 1:
        key = "not-stepped" if done["steps"] < step + 1 else "stepped-too-often"
        exercise.differs(key, f"optimizer steps after {step + 1} calls.", step + 1, done["steps"])
    exercise.audit(done["ledger"], calls=count + 2)
    right = dict(Counter(entry.op for entry in done["ledger"]))
    if dict(got[1]) != right:
        exercise.differs("count", "the calls are not those of the ledger.", right, dict(got[1]))


# ------------------------------------------------------------------------------------------------ FSDP2 to DeepSpeed

_PLAIN = {"reshard_after_forward": True, "cpu_offload": False, "max_norm": None, "micro_batch": 4, "micro_batches": 1}
_SETUPS = {
    "as it comes": _PLAIN,
    "weights kept for backward, clipped, 2 micro-batches":
        _PLAIN | {"reshard_after_forward": False, "max_norm": 0.5, "micro_batch": 2, "micro_batches": 2},
    "offloaded": _PLAIN | {"cpu_offload": True},
}  # fmt: skip


def _by_fsdp2(words: list[Tensor]) -> list[dict[str, Any]]:
    """What FSDP2 does on a rank, for each set-up."""
    import torch.distributed as dist

    from course_utils import record

    found = []
    for setup in _SETUPS.values():
        model = make_model()
        with record() as ledger:
            losses = fsdp2_training(model, words[dist.get_rank()], setup)
        held = sum(p.to_local().nbytes for p in model.parameters())  # pyrefly: ignore
        found.append({"losses": losses, "held": held, "gathered": _gathered(ledger)})
    return found


@cache
def _fsdp2() -> list[list[dict[str, Any]]]:
    """What FSDP2 does, by rank and set-up."""
    from course_utils import launch

    return launch(_by_fsdp2, by_rank(words_of(), 2), world_size=2, backend=BACKEND, timeout=120)


def _by_deepspeed(words: Tensor, configs: list[dict]) -> list[dict[str, Any]]:
    """What DeepSpeed does on a rank, for the configuration of each set-up."""
    from course_utils import record

    found = []
    for setup, config in zip(_SETUPS.values(), configs, strict=True):
        try:
            engine = make_engine(config)
        except Exception as error:
            found.append({"refused": f"{type(error).__name__}: {str(error).strip()}"})
            continue
        offload = [engine.zero_offload_optimizer(), engine.zero_offload_param()]
        own = {
            "refused": "", "sizes": (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()),
            "stage": engine.zero_optimization_stage(), "clip": engine.gradient_clipping() or None,
            "cpu": [one is not None and one.device == "cpu" for one in offload],
        }
        if own["sizes"] == (setup["micro_batch"], setup["micro_batches"]):
            with record() as ledger:
                own["losses"] = train(engine, words, setup["micro_batch"])
            own |= held(engine) | {"gathered": _gathered(ledger)}
        found.append(own)
    return found


def _gathered(ledger: Any) -> int:
    return sum(entry.bytes for entry in ledger if entry.op == "all_gather")


@checked
def to_deepspeed(fn: Callable) -> None:
    """Check ``fn(setup) -> config``: what DeepSpeed does with it is what FSDP2 does with the set-up."""
    exercise = _exercise("Exercise 3", "to_deepspeed")
    configs = []
    for exercise.case, setup in _SETUPS.items():
        configs.append(exercise.call(fn, dict(setup)))
        exercise.require(isinstance(configs[-1], dict), "form", f"the function returned {show(configs[-1])}.")
    outcomes = exercise.run(_by_deepspeed, by_rank(words_of(), 2), configs)
    for place, (name, setup) in enumerate(_SETUPS.items()):
        exercise.case = f"set-up: {name}"
        both = ([row[place] for row in rows] for rows in (_fsdp2(), [outcome.result for outcome in outcomes]))
        _translated(exercise, *both, setup)
    print("Exercise 3 passed: three set-ups, each with FSDP2's losses, bytes of parameters and gathers.")


def _translated(exercise: Exercise, by_fsdp2: list[dict], by_deepspeed: list[dict], setup: dict) -> None:
    """Refuse a configuration with which DeepSpeed does not do on the ranks what FSDP2 does."""
    fsdp2, got = by_fsdp2[0], by_deepspeed[0]
    refused = got["refused"].split("\n")[0]
    exercise.require(not refused, "refused", f"DeepSpeed stops: {refused[:200]}.")
    sizes = (setup["micro_batch"], setup["micro_batches"])
    if got["sizes"] != sizes:
        exercise.differs("batch", "samples of a micro-batch, and micro-batches of a step, are wrong.",
                         sizes, got["sizes"])
    held = got["whole"] + got["shards"]
    if held > fsdp2["held"] * 1.05:
        key = "stage" if got["stage"] != 3 else "whole-parameters"
        exercise.differs(key, "bytes of parameters between two steps.", f"{fsdp2['held']:,}", f"{held:,}")
    if got["cpu"] != [setup["cpu_offload"]] * 2:
        exercise.differs("offload", "whether the optimizer's states, and the parameters, lie in the CPU's memory.",
                         [setup["cpu_offload"]] * 2, got["cpu"])
    losses, right = (mean([row["losses"] for row in rows]) for rows in (by_deepspeed, by_fsdp2))
    if not near(losses, right):
        key = "clipping" if got["clip"] != setup["max_norm"] else "losses"
        exercise.differs(key, "the losses are not FSDP2's.", shown(right), shown(losses))
    if not 0.75 < got["gathered"] / fsdp2["gathered"] < 1.33:
        exercise.differs("gathers", f"bytes of parameters gathered in {STEPS} steps.",
                         f"{fsdp2['gathered']:,}", f"{got['gathered']:,}")


# ----------------------------------------------------------------------------------------------- a universal checkpoint

_SAVED = 2  # steps before the checkpoint
_Z3 = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10**6}
_TAG = "step2"


def _config(ranks: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 6 // ranks, "gradient_clipping": 0.0, "zero_optimization": dict(_Z3),
    }


def _save(words: list[Tensor], folder: str) -> dict[str, tuple]:
    import torch.distributed as dist

    engine = make_engine(_config(dist.get_world_size()))
    train(engine, words[dist.get_rank()], 2)
    engine.save_checkpoint(folder, tag=_TAG)
    return values_of(engine)


@cache
def _checkpoint() -> tuple[dict[str, bytes], dict[str, tuple]]:
    """Files of a checkpoint that 3 ranks have written, by their paths, and the values in it."""
    from course_utils import launch

    with tempfile.TemporaryDirectory() as folder:
        words = by_rank(words_of(samples=6)[:_SAVED], 3)
        values = launch(_save, words, folder, world_size=3, backend=BACKEND, timeout=120)[0]
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}, values


def _resumed(words: Tensor, fn: Callable, folder: str) -> dict[str, Any]:
    """Load on a rank by the learner's function, and train on."""
    import deepspeed
    import torch.distributed as dist

    converted = []

    def convert(source: Any, target: Any) -> None:
        converted.append(str(target))
        if dist.get_rank() == 0:  # a second rank that converts is counted, and not let in between
            to_universal(str(source), str(target))

    engine = fn(make_engine, convert, _config(dist.get_world_size()), folder, _TAG)
    if not isinstance(engine, deepspeed.DeepSpeedEngine):
        return {"engine": show(engine)}
    values = values_of(engine)
    losses = train(engine, words[_SAVED:], 3)
    return {"engine": "", "converted": len(converted), "values": values, "losses": losses}


@checked
def resume(fn: Callable) -> None:
    """Check ``fn(make_engine, convert, config, folder, tag) -> engine``: 3 ranks' checkpoint goes on with 2."""
    refused = {"DP world size": "refused", "world_size": "refused"}
    exercise = _exercise("Exercise 4", "resume", explained=refused)
    files, saved = _checkpoint()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        outcomes = exercise.run(_resumed, by_rank(words_of(samples=6), 2), fn, folder, case="saved by 3")
    for rank, outcome in exercise.each(outcomes):
        got = outcome.result
        exercise.require(not got["engine"], "form", f"the function returned {got['engine']}.")
        exercise.require(got["converted"] == (rank == 0), "converted", f"convert was called {got['converted']} times.")
        _same_values(exercise, got["values"], saved)
    losses, right = mean([outcome.result["losses"] for outcome in outcomes]), losses_of_one(6)[_SAVED:]
    if not near(losses, right):
        exercise.differs("losses", "the losses after it are not those of one process.", shown(right), shown(losses))
    print("Exercise 4 passed: 2 ranks go on with the weights and the states of Adam that 3 ranks saved.")


def _same_values(exercise: Exercise, got: dict[str, tuple], saved: dict[str, tuple]) -> None:
    for name, (right, right_states) in saved.items():
        weight, states = got[name]
        exercise.require(torch.equal(weight, right), "not-loaded", f"the weight {name} is not the one that was saved.")
        same = states is not None and all(map(torch.equal, states, right_states))
        exercise.require(same, "no-states", f"Adam's states of {name} are not those that were saved.")


# ------------------------------------------------------------------------------------------------ five situations

_CHOICES = {1: "b", 2: "b", 3: "a", 4: "c", 5: "a"}


@checked
def choices(fn: Callable) -> None:
    """Check ``fn() -> {situation: letter}``."""
    exercise = Exercise("Exercise 5", HINTS["choices"])
    got = exercise.call(fn)
    letters = {key: str(one).strip().lower() for key, one in got.items()} if isinstance(got, dict) else {}
    form = set(letters) == set(_CHOICES) and {*letters.values()} <= {*"abcd"}
    exercise.require(form, "form", f"the function returned {str(got)[:80]}.")
    for situation, right in _CHOICES.items():
        exercise.case = f"situation {situation}"
        letter = letters[situation]
        exercise.require(letter == right, f"{situation}-{letter}", f"not {letter}.")
    print("Exercise 5 passed: five situations, five choices, each for its reason.")
