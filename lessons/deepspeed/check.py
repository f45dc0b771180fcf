"""The exercises on DeepSpeed: a small GPT is trained with the real library on ranks, and what it did is read.

Where DeepSpeed is not installed, those that need it say how to get it; the one on paper works all the same.
"""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_utils import launch, record
from course_utils.check import BACKEND, CheckFailed, Exercise, checked, exercise
from course_utils.check.compare import close, number, show
from course_utils.check.program import hints_of
from course_utils.models import loss_of

from . import answers
from .deepspeed_tools import missing
from .engines import (
    SAMPLES,
    STEPS,
    fsdp2_training,
    held,
    losses_of_one,
    make_engine,
    make_model,
    mean_of_ranks,
    own_words,
    to_universal,
    train,
    values_of,
)

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

NEAR = 4e-6  # how far losses in float32 may be from those of one process
PATIENCE = 20  # seconds that ranks may need between two calls
THRESHOLD = '"stage3_param_persistence_threshold": 0'
REFUSED = "Read the message: DeepSpeed has said which of its rules the configuration breaks."
WHOLE = "It is stage 3, and yet parameters stay whole. There is a size below which it does not cut them."


def needs_deepspeed(check: Callable) -> Callable:
    """Decorate a check that says how to get DeepSpeed where there is none."""

    @functools.wraps(check)
    def judge(fn: Callable) -> None:
        if sentence := missing():
            raise CheckFailed(sentence, "missing")
        check(fn)

    judge.missing = missing  # type: ignore[attr-defined]
    return judge


def started(note: Any, config: Any) -> Any:
    """DeepSpeed's engine of a configuration; None, and a note, if it refuses it."""
    try:
        return make_engine(config)
    except Exception as error:
        said = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
        note.holds(False, "refused", f"DeepSpeed stops: {said[:200]}.")
        return None


# --- exercise 1: mended configurations

ORDERS = {"A": (2, 4, "shared states"), "B": (1, 2, "DDP's losses"), "C": (3, 4, "shared parameters")}


def trained(engine: Any) -> dict[str, Any]:
    """What an engine does on all ranks, and holds on this one."""
    micro, samples = engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()
    losses = mean_of_ranks(train(engine, own_words(), micro)) if samples == SAMPLES else torch.zeros(0)
    facts = {"stage": engine.zero_optimization_stage(), "micro": micro, "samples": samples, "losses": losses}
    return facts | held(engine)


def each_tried(configs: dict[str, dict]) -> dict[str, Any]:
    """On a rank: what DeepSpeed makes of each configuration, or why it stops."""
    found: dict[str, Any] = {}
    for name, config in configs.items():
        try:
            found[name] = trained(make_engine(config))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).strip()}"
    return found


def tried(configs: dict[str, dict]) -> str:
    """Say what DeepSpeed makes of configurations for Exercise 1, on 2 ranks."""
    if sentence := missing():
        raise CheckFailed(sentence, "missing")
    lines = [f"one process: losses {shown(losses_of_one())}"]
    for name, got in launch(each_tried, configs, world_size=2, backend=BACKEND, timeout=120)[0].items():
        if isinstance(got, str):
            lines.append(f"{name}: stops with {got}")
            continue
        lines += [f"{name}: stage {got['stage']}, {got['samples']} samples a step, losses {shown(got['losses'])}",
                  f"   on each rank {got['states']:,} bytes of Adam's states, {got['whole']:,} of whole parameters"]
    return "\n".join(lines)


def shown(losses: Tensor) -> str:
    return ", ".join(f"{loss:.5f}" for loss in losses.tolist())


@needs_deepspeed
@exercise(
    "Exercise 1", tolerance=NEAR, timeout=PATIENCE,
    passed=": all three train on 2 ranks, losses are those of one process, states are shared.",
    cases=[(2, f"configuration {name}, {goal}", name, *order) for name, (*order, goal) in ORDERS.items()],
)
def mended(note, answer, name, stage, micro):
    configs = answer()
    form = isinstance(configs, dict) and set(configs) == set(ORDERS)
    form = form and all(isinstance(config, dict) for config in configs.values())
    if not note.holds(form, "form", f"the function returned {show(configs)}."):
        return
    if not (engine := started(note, configs[name])):
        return
    got, whole = trained(engine), sum(p.numel() for p in make_model().parameters())
    what = f"it trains at stage {got['stage']}, with {got['states']:,} bytes of the optimizer's states on each rank; "
    what += f"the states of the whole model have {8 * whole:,}."
    note.holds(got["stage"] == stage, "stage" if got["stage"] else "ignored", what)
    sizes = got["micro"], got["samples"]
    what = f"samples of a micro-batch, and of a step, are {sizes}; they should be {micro, SAMPLES}."
    if note.holds(sizes == (micro, SAMPLES), "batch", what):
        note.equal(got["losses"], losses_of_one(), "the row of losses")
    what = f"{got['whole']:,} of {4 * whole:,} bytes of parameters stay whole on each rank between steps."
    note.holds(stage < 3 or not got["whole"], "whole-parameters", what)


CLIPPING_B = '"gradient_accumulation_steps": 2,\n        "gradient_clipping": 0.0'
SECOND = '"zero_optimization": {"stage": 1}'

MISTAKES["mended"] = {
    "clipped": ("""These are exactly the losses with gradients clipped to norm 1.0. What does DeepSpeed do if the
        configuration says nothing about it?""", {CLIPPING_B: '"gradient_accumulation_steps": 2'}),
    "value": ("No key of a configuration here should change what is computed. Undo what was not needed.",
            {CLIPPING_B: CLIPPING_B.replace("0.0", "0.25")}),
    "form": ('Return a dictionary with the keys "A", "B" and "C" and a configuration, also a dictionary, for each.',
            'return {"A": a, "B": b, "C": c}  ->  return [a, b, c]'),
    "refused": (REFUSED, '"gradient_accumulation_steps": 2  ->  "gradient_accumulation_steps": 1'),
    "ignored": ("""DeepSpeed trains without ZeRO, and has not complained. It does not complain about a key at the top
        that it does not know.""", '"zero_optimization": {"stage": 2}  ->  "zero_optimisation": {"stage": 2}'),
    "stage": ("This is another stage than the one that was asked for.", '{"stage": 2}  ->  {"stage": 1}'),
    "batch": ("""The size of the micro-batch and the 8 samples of a step are part of what was asked for: leave them as
        they were meant.""",
            {'"train_batch_size": 8': '"train_batch_size": 4',
             '"gradient_accumulation_steps": 2': '"gradient_accumulation_steps": 1'}),
    "whole-parameters": (WHOLE, {f", {THRESHOLD}": ""}),
}
RIGHT["mended"] = {
    "whole model": {THRESHOLD: '"stage3_model_persistence_threshold": 0'},
    "one size less, a bucket of its own": {
        '"train_batch_size": 8,\n': "", SECOND: '"zero_optimization": {"stage": 1, "reduce_bucket_size": 4000}',
    },
}

# --- exercise 2: one step by the engine


@needs_deepspeed
@exercise("Exercise 2", tolerance=NEAR, timeout=PATIENCE,
          cases=[(2, "1 micro-batch a step", 1), (2, "4 micro-batches a step", 4)],
          passed=": the losses of one process; a reduction per micro-batch, and one all-gather.")
def train_step(note, answer, count):
    engine, losses = make_engine({
        "train_micro_batch_size_per_gpu": SAMPLES // 2 // count, "gradient_accumulation_steps": count,
        "gradient_clipping": 0.0, "zero_optimization": {"stage": 2},
    }), []
    for step, batch in enumerate(own_words(), 1):
        with record() as ledger:
            got = answer(engine, [(part[:, :-1], part[:, 1:]) for part in batch.chunk(count)])
        form = isinstance(got, tuple) and len(got) == 2 and number(got[0]) is not None and isinstance(got[1], Mapping)
        note.holds(form, "form", f"the function returned {show(got)}.")
        steps = engine.global_steps
        note.holds(steps == step, "steps", f"after {step} calls there were {steps} optimizer steps.")
        note.sent(ledger, calls=count + 2)
        right, loss, counts = dict(Counter(entry.op for entry in ledger)), *(got if form else (math.nan, {}))
        note.holds(dict(counts) == right, "count", f"the ledger has the calls {right}, the answer {dict(counts)}.")
        losses.append(float(loss))
    note.equal(mean_of_ranks(losses), losses_of_one(), "the row of losses")


BACKWARD, COUNTS = "engine.backward(loss)", "Counter(entry.op for entry in ledger)"

MISTAKES["train_step"] = {
    "divided": ("The gradients are too small by the number of micro-batches. Who divides the loss by it already?",
            {BACKWARD: "engine.backward(loss / len(micro_batches))"}),
    "scaled-loss": ("The loss that is returned is too small by the number of micro-batches, the training is right.",
            "loss.item()  ->  loss.item() / len(micro_batches)"),
    "value": ("Return the mean over all micro-batches of this rank, and train on each of them once.",
            "total / len(micro_batches)  ->  loss.item()"),
    "form": ("""Return two things: the mean loss as a number, and a dictionary from the name of an operation to its
        number of calls.""", {f", {COUNTS}": ""}),
    "steps": ("""One call is one update of the weights, after the last micro-batch. The engine counts the calls of its
        step, and acts on the last of each step's micro-batches.""",
            [{"            engine.step()\n": "", "    return total /": "        engine.step()\nreturn total /"},
             {BACKWARD: f"engine.set_gradient_accumulation_boundary(True)\n{BACKWARD}"}]),
    "count": ("Count everything that is sent from the first forward to the last step, and nothing else.",
            {COUNTS: "{'all_reduce': 2, 'all_gather': 1}"}),
    "too-many-calls": ("""The step is right, but it communicates more than DeepSpeed does by itself, and nothing else is
        needed.""", "total += loss.item()  ->  total += loss.item()\ndist.all_reduce(loss.detach())"),
}


def boundary_by_hand(engine, micro_batches):
    losses = []
    with record() as ledger:
        for place, (tokens, targets) in enumerate(micro_batches, 1):
            engine.set_gradient_accumulation_boundary(place == len(micro_batches))
            losses.append(loss_of(engine, tokens, targets))
            engine.backward(losses[-1])
        engine.step()
    return sum(losses).detach() / len(losses), dict(Counter(entry.op for entry in ledger))


RIGHT["train_step"] = {"boundary by hand": boundary_by_hand, "torch's backward": {BACKWARD: "loss.backward()"}}

# --- exercise 3: FSDP2 to DeepSpeed

PLAIN = {"reshard_after_forward": True, "cpu_offload": False, "max_norm": None, "micro_batch": 4, "micro_batches": 1}
KEPT = {"reshard_after_forward": False, "max_norm": 0.5, "micro_batch": 2, "micro_batches": 2}


def gathered(ledger: Any) -> int:
    return sum(entry.bytes for entry in ledger if entry.op == "all_gather")


@needs_deepspeed
@exercise("Exercise 3", tolerance=NEAR, timeout=PATIENCE, cases=[
    (2, "set-up: as it comes", PLAIN),
    (2, "set-up: weights kept for backward, clipped, 2 micro-batches", PLAIN | KEPT),
    (2, "set-up: offloaded", PLAIN | {"cpu_offload": True}),
], passed=": three set-ups, each with FSDP2's losses, bytes of parameters and gathers.")
def to_deepspeed(note, answer, setup):
    config, model = answer(dict(setup)), make_model()
    if not note.holds(isinstance(config, dict), "odd", f"the function returned {show(config)}."):
        return
    with record() as by_fsdp2:
        right = fsdp2_training(model, own_words(), setup)
    if not (engine := started(note, config)):
        return
    sizes = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    wanted = setup["micro_batch"], setup["micro_batches"]
    what = f"samples of a micro-batch, and micro-batches of a step, are {sizes}; they should be {wanted}."
    if not note.holds(sizes == wanted, "batch", what):
        return
    with record() as ledger:
        losses = train(engine, own_words(), setup["micro_batch"])
    own, bound = held(engine), sum(p.to_local().nbytes for p in model.parameters())
    own = own["whole"] + own["shards"]
    key = "whole-parameters" if engine.zero_optimization_stage() == 3 else "stage"
    note.holds(own <= 1.05 * bound, key, f"between two steps a rank holds {own:,} bytes of parameters, not {bound:,}.")
    cpu = [one is not None and one.device == "cpu"
           for one in (engine.zero_offload_optimizer(), engine.zero_offload_param())]
    what = f"whether the optimizer's states, and the parameters, lie in the CPU's memory: {cpu}."
    note.holds(cpu == [setup["cpu_offload"]] * 2, "offload", what)
    other = (engine.gradient_clipping() or None) != setup["max_norm"]
    note.equal(mean_of_ranks(losses), mean_of_ranks(right), "the row of losses", "clipping" if other else "value")
    what = f"{gathered(ledger):,} bytes of parameters are gathered in {STEPS} steps, by FSDP2 {gathered(by_fsdp2):,}."
    note.holds(0.75 < gathered(ledger) / gathered(by_fsdp2) < 1.33, "gathers", what)


LIVE = 'zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}'
ACCUMULATION = '"gradient_accumulation_steps": setup["micro_batches"]'
CLIPPING = '"gradient_clipping": setup["max_norm"] or 0.0,'

MISTAKES["to_deepspeed"] = {
    "clipping": ("""The gradients are clipped in another way. Look at what DeepSpeed does if you say nothing, and if you
        say 0.0.""", [{CLIPPING: ""}, {CLIPPING: '"gradient_clipping": 0.0,'}]),
    "refused": (REFUSED, '"stage": 3,  ->  "stage": 4,'),
    "batch": ("FSDP2's loop splits into micro-batches by itself. DeepSpeed has to be told both of the numbers.",
            {f"{ACCUMULATION},": ""}),
    "stage": ("FSDP2 holds only a part of each parameter between two steps. There is one stage that does so, too.",
            {'"stage": 3, "stage3': '"stage": 2, "stage3', LIVE: "pass"}),
    "whole-parameters": (WHOLE, {f", {THRESHOLD}": ""}),
    "offload": ("""CPUOffloadPolicy moves both the parameters and the optimizer's states, and only where it is asked
        for.""", 'zero |= {"offload_optimizer": cpu, "offload_param": cpu}  ->  zero["offload_optimizer"] = cpu'),
    "gathers": ("""The losses are right, but the weights are gathered another number of times. FSDP2 gathers them twice
        in each micro-batch if it lets them go after forward, and once if it keeps them.""", [{LIVE: "pass"},
             'if setup["reshard_after_forward"]:  ->  if True:']),
    "value": ("Apart from clipping and batch, no key of the configuration should change what is computed.",),
}
RIGHT["to_deepspeed"] = {
    "whole batch": {ACCUMULATION: '"train_batch_size": 2 * setup["micro_batch"] * setup["micro_batches"]'},
    "buckets and numbers": {
        f"{THRESHOLD}}}": '"stage3_param_persistence_threshold": 1, "reduce_bucket_size": 5000}',
        LIVE: LIVE.replace(": 0", ": 1").replace("}", ', "stage3_prefetch_bucket_size": 0}'),
    },
}

# --- exercise 4: a universal checkpoint

SAVED = 2  # steps before the checkpoint
TAG = f"step{SAVED}"


def config_for(ranks: int) -> dict[str, Any]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10**6}
    return {"train_micro_batch_size_per_gpu": 6 // ranks, "gradient_clipping": 0.0, "zero_optimization": zero}


def save(folder: str) -> dict[str, list[Tensor]]:
    """On one of 3 ranks: train and save; the values in the checkpoint."""
    engine = make_engine(config_for(3))
    train(engine, own_words(6)[:SAVED], 2)
    engine.save_checkpoint(folder, tag=TAG)
    return values_of(engine)


@functools.cache
def checkpoint() -> tuple[tempfile.TemporaryDirectory, dict[str, list[Tensor]]]:
    """A folder with what 3 ranks have saved, and the values in it."""
    folder = tempfile.TemporaryDirectory()
    return folder, launch(save, folder.name, world_size=3, backend=BACKEND, timeout=120)[0]


def resumed(unused: Tensor, fn: Callable, folder: str) -> Any:
    """On a rank: load by the learner's function, and train on; conversions, values and losses, or what is no engine."""
    import deepspeed

    converted = []

    def convert(source: Any, target: Any) -> None:
        converted.append(str(target))
        if dist.get_rank() == 0:  # a second rank that converts is counted, and not let in between
            to_universal(str(source), str(target))

    engine = fn(make_engine, convert, config_for(dist.get_world_size()), folder, TAG)
    if not isinstance(engine, deepspeed.DeepSpeedEngine):
        return show(engine)
    return len(converted), values_of(engine), mean_of_ranks(train(engine, own_words(6)[SAVED:], 3))


@needs_deepspeed
@checked
def resume(fn: Callable) -> None:
    """The weights and Adam's states are those that 3 ranks have saved, and training goes on with them."""
    run = Exercise("Exercise 4", hints_of(MISTAKES["resume"]), PATIENCE, explained={"world[ _]size": "refused"})
    source, saved = checkpoint()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source.name, folder, dirs_exist_ok=True)
        outcomes = run.run(resumed, [torch.zeros(0)] * 2, fn, folder, case="saved by 3")
    for rank, outcome in run.each(outcomes):
        got = outcome.result
        run.require(isinstance(got, tuple), "form", f"the function returned {got}.")
        conversions, values, losses = got
        run.require(conversions == (rank == 0), "converted", f"convert was called {conversions} times.")
        for name, (weight, *states) in saved.items():
            same = torch.equal(values[name][0], weight)
            run.require(same, "not-loaded", f"the weight {name} is not the one that was saved.")
            same = len(values[name]) == 3 and all(map(torch.equal, values[name][1:], states))
            run.require(same, "no-states", f"Adam's states of {name} are not those that were saved.")
        right = losses_of_one(6)[SAVED:]
        what = f"the losses after it are {shown(losses)}; those of one process are {shown(right)}."
        run.require(close(losses, right), "losses", what)
    run.passed(": 2 ranks go on with the weights and the states of Adam that 3 ranks saved.")


LOAD, FLAG = "engine.load_checkpoint(folder, tag=universal)", ' | {"checkpoint": {"load_universal": True}}'

MISTAKES["resume"] = {
    "form": ("Return the engine that make_engine gave you.", "return engine  ->  return engine.module"),
    "refused": ("""DeepSpeed takes the folder for a checkpoint of its own kind, which fits only as many ranks as have
        saved it. It loads a universal one only if the folder is converted and the configuration says so.""",
            [{LOAD: "engine.load_checkpoint(folder, tag=tag)", FLAG: ""}, {FLAG: ""}]),
    "converted": ("One rank converts, rank 0, once: ranks that write into one folder together destroy it.",
            "if dist.get_rank() == 0:  ->  if True:"),
    "not-loaded": ("""The engine still has the weights that the model began with, or others that are not in the
        checkpoint.""", {LOAD: "pass"}),
    "no-states": ("""The weights are right. Adam's states have to come back as well, or training goes on as if Adam had
        just started.""", {LOAD: LOAD.replace(")", ", load_optimizer_states=False)")}),
    "losses": ("What was loaded is right, but training goes on differently. Change nothing else in the configuration.",
            'config | {  ->  config | {"gradient_clipping": 0.25} | {'),
}


def by_latest(make_engine, convert, config, folder, tag):
    if not dist.get_rank():
        convert(f"{folder}/{tag}", f"{folder}/whole")
    engine = make_engine({**config, "checkpoint": {"load_universal": True}})
    assert engine.load_checkpoint(folder)[0]
    return engine


RIGHT["resume"] = {
    "to a name of its own, and read from latest": by_latest,
    "by name": {LOAD: "loaded, _ = engine.load_checkpoint(load_dir=folder, tag=universal)\nassert loaded"},
}

# --- exercise 5: five situations


@exercise("Exercise 5", cases=[(0, f"situation {number}", number) for number in range(1, 6)],
          passed=": five situations, five choices, each for its reason.")
def choices(note, answer, situation):
    got = answer()
    letters = {key: str(one).strip().lower() for key, one in got.items()} if isinstance(got, dict) else {}
    form = set(letters) == set(range(1, 6)) and {*letters.values()} <= {*"abcd"}
    if note.holds(form, "form", f"the function returned {str(got)[:80]}."):
        letter = letters[situation]
        note.holds(letter == answers.choices()[situation], str(situation), f"not {letter}.")


WHY_NOT = {
    "1": """When a layer computes, its weights are whole with ZeRO and FSDP2 alike: the layer itself must fit. Tensor
        and pipeline parallelism divide the computation, but DDP beside them copies what a rank holds, with states;
        and DeepSpeed's own pipeline refuses stages 2 and 3.""",
    "2": """Add up the bytes of the states: even shared they do not fit into the two GPUs, nor into the CPU's memory,
        where CPUOffloadPolicy ends.""",
    "3": """Compute the bytes of the states, 16 · 1.5 billion, and count what travels in a step of 16 micro-batches:
        stage 2 reduces after each, as in Exercise 2, and FSDP2 in its default gathers the weights in each.""",
    "4": """It has to fit another number of ranks, without a conversion that reads and writes all states, and without
        all of them passing through one rank: the time until training goes on counts.""",
    "5": """Compute the bytes: 16 · 125 million = 2 GB and 10 GB of activations fit in 24 GB. Memory is not short, and
        whatever is sharded has to be gathered again, while DDP's reduction overlaps with backward.""",
}
MISTAKES["choices"] = {
    "form": ('Return a letter from "a" to "d" for each of the numbers 1 to 5.', '5: "a"  ->  5: "e"'),
    **{key: (hint, [f'{key}: "{answers.choices()[int(key)]}"  ->  {key}: "{letter}"' for letter in
                    sorted({*"abcd"} - {answers.choices()[int(key)]})]) for key, hint in WHY_NOT.items()},
}
RIGHT["choices"] = {
    "capitals": '2: "b"  ->  2: " B"',
    "by position": 'return {1: "b", 2: "b", 3: "a", 4: "c", 5: "a"}  ->  return dict(enumerate("bbaca", 1))',
}
