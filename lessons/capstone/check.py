"""The parts of lesson 18: what each answer must find, on the job of the notebook's seed, and the usual mistakes."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import os
import re
import resource
import runpy
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.run import get_args_parser

from course_utils import WorkerError, launch, record
from course_utils.check import Exercise, checked, exercise
from course_utils.check.program import hints_of
from course_utils.programs import SCRIPTS, TEXT, run_program
from course_utils.ranks import HangError
from lessons.parallelism_3d import planner

from . import faults
from .helpers import Counts, Seen, counts_of, host_of, quietly, run_text, same, undisturbed
from .job import MARGIN, SEED, Letter, cluster, free_gb, gpu_hours, job

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

# --- part 1: a plan


@checked
def plan_run(fn: Callable, seed: int = SEED) -> None:
    """Check ``fn(letter) -> (layout, GPU hours, free GB)`` on the letters of this seed and of the next two."""
    run = Exercise("Exercise 1", hints_of(MISTAKES["plan_run"]))
    for each in (seed, seed + 1, seed + 2):
        letter = job(each).letter
        run.case = f"the letter of seed {each}"
        plan = plan_of(run, fn, letter)
        if each == seed:
            points = 20 * min(1, job(seed).best.seconds / plan.seconds)
    print(f"Exercise 1 passed: three plans within their budgets: {points:.1f} of 20 points.")


def plan_of(run: Exercise, fn: Callable, letter: Letter) -> planner.Plan:
    """The plan that the function has chosen for a letter; refuses a wrong one."""
    got = run.call(fn, letter)
    form = isinstance(got, tuple) and len(got) == 3 and isinstance(got[0], planner.Layout)
    run.require(form, "form", f"the function returned {str(got)[:100]}.")
    layout, hours, free = got
    machine, sequences = cluster(letter), letter.tokens_of_step // letter.model.context
    if layout.gpus != machine.gpus:
        key = "lent" if layout.gpus == letter.nodes * letter.per_node else "form"
        run.refuse(key, f"the layout has {layout.gpus} GPUs, and {machine.gpus} compute.")
    against = planner.reasons_against(letter.model, machine, layout, sequences)
    run.require(not against, "cannot-run", f"{layout} cannot run: {'; '.join(against)}.")
    run.require(layout.cp == 1, "context", f"the layout is {layout}.")
    plan = planner.plan(letter.model, machine, layout, sequences)
    right, least = free_gb(letter, plan), MARGIN * machine.card.memory_bytes / 1e9
    what = f"{right:.1f} GB stay free on the fullest GPU, {least:.1f} are asked for, and {free:.1f} were returned."
    run.require(right >= least - 0.05 and abs(free - right) < 0.05, "memory", what)
    right = gpu_hours(letter, plan)
    what = f"{layout} takes {right:,.0f} GPU hours on this cluster, and {hours:,.0f} were returned."
    run.require(abs(hours / right - 1) < 0.005, "hours", what)
    what = f"{layout} takes {right:,.0f} GPU hours, and {letter.gpu_hours:,.0f} may be spent."
    run.require(right <= letter.gpu_hours, "budget", what)
    return plan


MISTAKES["plan_run"] = {
    "form": ("Return a tuple: a planner.Layout for the GPUs that compute, GPU hours, and GB.",
            "return plan.layout,  ->  return str(plan.layout),"),
    "lent": ("Nodes that are lent do not compute for this job, and nobody reserves them for it.",
            "(letter.nodes - letter.lent_nodes)  ->  letter.nodes"),
    "memory": ("""The memory that the planner counts is not all: there is its reserve, and what others hold on the GPU.
        A plan at the limit often does not run (lesson 12, section 17), so a tenth of the memory has to stay free.""",
            ["+ letter.held_gb * 1e9  ->  + 0 * letter.held_gb",
             "plan.memory.total + plan.reserve  ->  plan.memory.total",
             "if free >= 0.1 * machine.card.memory_bytes:  ->  if free >= 0:"]),
    "hours": ("""Is the network that of each GPU? The ports of a node are shared by its GPUs. And hours are those of
        all GPUs that compute.""",
            ["* letter.ports / letter.per_node  ->  * letter.per_node / letter.per_node",
             "plan.seconds * gpus / 3600  ->  plan.seconds / 3600"]),
    "context": ("""Plans with context parallelism are less reliable (lesson 12, section 19), and these sequences are
        short. Search with cp=1.""", "cp=1).plans:  ->  cp=2).plans:"),
    "cannot-run": ("`planner.reasons_against` says what forbids a layout, before anything else is computed.", ),
    "budget": ("It runs, but there are faster layouts: what takes most of the step besides computing?", ),
}
RIGHT["plan_run"] = {
    "level 1": ", cp=1).plans:  ->  , cp=1, tp=1, pp=1).plans:",
    "level 2": ", cp=1).plans:  ->  , cp=1, pp=1).plans:",
}

# --- part 2: a start on two hosts

ORDER = {  # of scripts/train.py
    "layers": 2, "hidden": 64, "heads": 4, "vocabulary": 256, "length": 32, "batch": 8, "steps": 2,
}
LINK = "100mbit"


def _flags(words: list[str]) -> argparse.Namespace:
    """What the parser of torchrun, or that of train.py for four ranks, makes of words; ValueError is its refusal."""
    arguments = runpy.run_path(str(SCRIPTS / "train.py"), run_name="script")["arguments"]
    said, before, sys.argv = io.StringIO(), sys.argv, words
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return get_args_parser().parse_args() if words[0] == "torchrun" else arguments(4)
    except SystemExit as end:
        sentence = end.code if isinstance(end.code, str) else said.getvalue().strip().split("\n")[-1]
        raise ValueError(sentence) from None
    finally:
        sys.argv = before


def _run_train(flags: tuple[str, ...], out: str) -> Any:
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # two reductions are slow
    with record() as ledger:
        run_program(SCRIPTS / "train.py", *flags, f"--out={out}", f"--data={TEXT}", silent=True)
    return ledger


@cache
def started(flags: tuple[str, ...]) -> Counts:
    """Counts of a run of train.py on two hosts."""
    with tempfile.TemporaryDirectory() as out:
        return counts_of(launch(_run_train, flags, out, world_size=4, hosts=2, link=LINK, init=False))


LEAST = 1.202e6  # bytes over the cable of two copies in two shards, by the ledger; a test holds it


@checked
def start(fn: Callable) -> None:
    """Check ``fn(program, out, data) -> str``: a command line for two hosts of two ranks, whose program then runs."""
    run = Exercise("Exercise 2", hints_of(MISTAKES["start"]))
    left = counted_start(run, fn)
    print(f"Exercise 2 passed: {left:,.0f} bytes of collectives left a host,", end=" ")
    print(f"the fewest are {LEAST / 1e6:.3f} MB: {15 * min(1, LEAST / left):.1f} of 15 points.")


def counted_start(run: Exercise, fn: Callable) -> float:
    """Bytes over the cable with the flags of a command line; refuses one that cannot work, or sends too much."""
    try:
        left = started(read_start(run, run.call(fn, str(SCRIPTS / "train.py"), "run", str(TEXT)))).cable_bytes
    except WorkerError as error:
        run.refuse("flags", f"train.py ends with {error.exception[:300]}.")
    run.require(left < 1.1 * LEAST, "crosses", f"{left:,.0f} bytes left a host.")
    return left


def read_start(run: Exercise, command: Any) -> tuple[str, ...]:
    """The flags of train.py in a command line for two hosts; refuses one that would not start, or not as ordered."""
    line = command.replace("\\\n", " ").strip() if isinstance(command, str) else ""
    form = line.startswith("torchrun ") and "\n" not in line
    run.require(form, "form", f"the function returned {command!r}.")
    try:
        agent, other = (_flags(shlex.split(line.replace("{host}", host))) for host in "01")
        script = Path(agent.training_script)
        right = script.exists() and script.samefile(SCRIPTS / "train.py")
        run.require(right, "form", f"torchrun takes {str(script)!r} for the program, and that is not train.py.")
        own = _flags(["train.py", *agent.training_script_args])
    except ValueError as error:
        run.refuse("flags", f"this does not start: {error}.")
    run.require(own.data.is_file(), "flags", f"there is no file --data={own.data}.")
    two = agent.nnodes in ("2", "2:2") and agent.nproc_per_node == "2" and not agent.standalone
    run.require(two, "two-hosts", f"torchrun gets --nnodes={agent.nnodes} --nproc-per-node={agent.nproc_per_node}.")
    numbers, static = (agent.node_rank, other.node_rank), agent.rdzv_backend == "static"
    address = agent.rdzv_endpoint or (agent.master_addr if static else "")
    place = "node0" + r":\d+" * bool(agent.rdzv_endpoint) if static else r"node[01](:\d+)?"
    named = re.fullmatch(place, address) and (agent.rdzv_backend == "c10d" or static and numbers == (0, 1))
    alike = vars(agent) == vars(other) | {"node_rank": agent.node_rank}
    said = f"the hosts meet at {address!r} with --rdzv-backend={agent.rdzv_backend}, --node-rank={numbers}"
    run.require(bool(named) and alike, "meet", f"{said}{'' if alike else ', and get other words'}.")
    wrong = {name: getattr(own, name) for name, value in ORDER.items() if getattr(own, name) != value}
    run.require(not wrong, "order", f"train.py gets {wrong}; ordered is {ORDER}.")
    mesh = f"replicate {own.replicate} x shard {own.shard} x tp {own.tp}"
    run.require(own.shard * own.tp >= 2, "states", f"the mesh {mesh} leaves all states on each rank.")
    run.require(own.shard * own.tp == 2, "crosses", f"in the mesh {mesh} one copy lies on both hosts.")
    return tuple(agent.training_script_args)


MISTAKES["start"] = {
    "form": ("Return one text in one line. It begins with torchrun and its flags, then come the program and its own.",
            "{program} --out  ->  {program}.old --out"),
    "flags": ("A flag that a program does not know, or a value that it does not take, ends it. `--help` lists them.",
            ["--batch=8  ->  --batch-size=8", "--replicate=2  ->  --replicate=3", "--data={data}  ->  --data=alice"]),
    "two-hosts": ("Two hosts of two ranks: an agent is told how many hosts there are, and how many ranks its own has.",
            ["--nnodes=2  ->  --nnodes=1:2", "--nproc-per-node=2  ->  --nproc-per-node=4"]),
    "meet": ("""Both hosts get the same words, so the place where they meet is the name of one of them. `localhost` is
        another host on each (lesson 16, section 3).""",
            ["node0:29500  ->  localhost:29500",
             "--rdzv-id=18  ->  --rdzv-id={host}",
             "--rdzv-backend=c10d --rdzv-endpoint=node0:29500 --rdzv-id=18  ->  --master-addr=node0 --node-rank=0"]),
    "order": ("Model, batch and steps are those of the order.",
            ["--batch=8  ->  --batch=16", "--layers=2  ->  --layers=2 --vocabulary=512"]),
    "states": ("A rank has room for half of the states. Data parallelism alone leaves all on each rank (lesson 06).",
            "--replicate=2  ->  --replicate=4"),
    "crosses": ("""Weights are gathered and gradients reduced over the cable. Let one copy lie inside a host, so that
        only the sum of gradients crosses (lesson 07, HSDP; lesson 16, section 10).""", "--replicate=2  ->  --shard=4"),
}
RIGHT["start"] = {
    "numbered hosts": "--rdzv-backend=c10d --rdzv-endpoint=node0:29500 --rdzv-id=18  ->  "
    "--node-rank={host} --master-addr=node0 --master-port=29500",
    "restarts": "--nnodes=2  ->  --nnodes=2:2 --max-restarts=3",
}

# --- part 3: three things that are wrong


@checked
def repairs(fn: Callable, seed: int = SEED) -> None:
    """Check ``fn() -> {kind: (cause, edits)}`` on the program of a seed, by running what the edits make of it."""
    run = Exercise("Exercise 3", hints_of(MISTAKES["repairs"]))
    given = form_of_repairs(run, fn)
    text, right, done = faults.broken(seed), faults.drawn(seed), ""
    for kind in faults.KINDS:
        run.case = kind
        run.require(kind in given, "missing", f"there is no answer for {kind!r}.{done}")
        cause, edits = given[kind]
        run.require(cause in faults.FAULTS[kind], "name", f"{cause!r} is none of {', '.join(faults.FAULTS[kind])}.")
        run.require(cause == right[kind].cause, "cause", f"it is not {cause!r}.")
        try:
            text, replaced = faults.mended(text, edits), sum(map(len, edits))
        except (AttributeError, TypeError, ValueError) as error:
            run.refuse("edit", f"the edits do not fit: {error}.")
        run.require(replaced < len(text) / 4, "edit", f"the edits replace {replaced} characters, more than a cause.")
        done += f" The cause of {kind!r} is right."
    run.case = "the program with all edits"
    judge(run, text)
    causes = ", ".join(cause for cause, _ in given.values())
    print(f"Exercise 3 passed: {causes}; mended, it is the training of one process, and sends no more.")


def form_of_repairs(run: Exercise, fn: Callable) -> dict[str, tuple]:
    """What the function returns, if it has the form that is asked for."""
    given = run.call(fn)
    form = isinstance(given, dict) and all(isinstance(one, tuple) and len(one) == 2 for one in given.values())
    run.require(form, "form", f"the function returned {str(given)[:100]}.")
    return {kind: given[kind] for kind in faults.KINDS if kind in given}


def judge(run: Exercise, text: str) -> None:
    """Refuse a program that hangs, is wrong, or does more than the one that was meant; broadcasting a start is free."""
    try:
        seen = run_text(text)
    except HangError as error:
        run.refuse("hangs", f"it hangs.\n\n{error}")
    except Exception as error:  # noqa: BLE001  of the edited text
        run.refuse("edit", f"it does not run: {type(error).__name__}: {str(error)[:500]}.")
    meant = undisturbed()
    if wrong := same(seen, meant):
        run.refuse("wrong", f"{wrong}.")
    without = [[entry for entry in ledger if entry.op != "broadcast"] for ledger in seen.ledgers]
    ours, theirs = counts_of(meant.ledgers), counts_of(without)
    for name in ("calls", "sent", "messages", "cable_bytes"):
        got, most = getattr(theirs, name), getattr(ours, name)
        run.require(got <= most, "more", f"{name.replace('_', ' ')}: {got:,.0f}, and {most:,.0f} are enough.")
    got, most = max(ledger.bytes("broadcast") for ledger in seen.ledgers), 4 * faults.program.CONFIG.parameter_count
    run.require(got <= most, "more", f"{got:,.0f} bytes are broadcast, and one set of weights has {most:,.0f}.")
    more = f"the ranks compute {seen.windows} windows, and {meant.windows} are enough."
    run.require(max(seen.windows) <= max(meant.windows), "more", more)


SILENT, SLOW = '{chosen: "gradients"}', '{log: ""}'
MISTAKES["repairs"] = {
    "form": ("Return a dictionary with a tuple for each kind: the cause, and a dictionary of edits.",
            '"hang": ("a step skipped on one rank", {skipped + "        ": ""}),  ->  "hang": "a step skipped",'),
    "missing": ("There are three: a hang, a silent one, and a slow one.", '"slow": (  ->  "slower": ('),
    "name": ("The names of causes are the keys of `faults.FAULTS`, by kind.", '"gradients left out"  ->  "a fault"'),
    "cause": ("""Look at the run, not only at the text: who waits where, whose numbers differ, who sends or computes
        more.""", '"gradients left out"  ->  "another start"'),
    "edit": ("An old text stands in the broken program once, and the new one is put there as it is.",
            [f'{SLOW}  ->  {{"no such text": ""}}', f'{SLOW}  ->  {{log: "            nothing()\\n"}}']),
    "hangs": ("""The ranks still wait for each other. All call the same collectives in the same order; of two neighbors
        that pass something on, one must send, or begin to, while the other receives.""",
            'skipped + "        ": ""  ->  "if 10 in mine": "if 42 in mine"'),
    "wrong": ("""Losses or weights are not those of one process. If the ranks differ from each other, something is not
        shared; if they agree, all of them do the same wrong thing.""",
            f'{SILENT}  ->  {{chosen: "gradients[:-1]"}}'),
    "more": ("The result is right, and the program still does more than it has to.",
            f'{SLOW}  ->  {{log: log.replace("seen,", "seen[:1],")}}'),
}
RIGHT["repairs"] = {
    "another list": f'{SILENT}  ->  {{chosen: "list(gradients)"}}',
    "a step of the right size": {'log: ""': 'log: "            pass\\n"'},
}

# --- part 4: fewer bytes and messages


def gradients_of(rank: int) -> list[torch.Tensor]:
    """Of sizes that nothing divides, one with numbers that fp16 cannot hold."""
    draw = torch.Generator().manual_seed(rank)
    sizes = ((48, 48), (7,), (128, 48), (1,), (33, 5))
    return [torch.randn(size, generator=draw) * (1e5 if size == (7,) else 1.0) for size in sizes]


@exercise("Exercise 4", passed="the mean to 1 %, {said}.", tolerance=0.01, cases=[
    (4, "two hosts of two"), (6, "three hosts of two"), (2, "one host"),
])
def exchange(note, answer):
    rank, n = dist.get_rank(), dist.get_world_size()
    given = [gradients_of(r) for r in range(n)]
    mine = [gradient.clone() for gradient in given[rank]]
    inside, across = faults.program.make_groups()
    before = [gradient.data_ptr() for gradient in mine]
    with record() as ledger:
        answer(mine, inside, across)
    note.holds([gradient.data_ptr() for gradient in mine] == before, "not-in-place", "a gradient lies elsewhere now.")
    for number, parts in enumerate(zip(*given, strict=True)):
        right, scale = torch.stack(parts).mean(0), torch.stack(parts).abs().max()
        note.equal(mine[number] / scale, right / scale, f"gradient {number}")
    note.talks(ledger, n)
    size, hosts = 4 * sum(gradient.numel() for gradient in mine), -(-n // 2)
    alike = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all"}
    note.sent(ledger, alike, calls=(None, 6), other_calls="alike", too_many_calls="calls")
    dist.all_reduce(left := torch.tensor(ledger.bytes_sent(between=[host_of(r) for r in range(n)]) / hosts / size))
    flat, share = (2 * (n - 1) / n if hosts > 1 else 0), f"{float(left):.2f} S leave each host"
    crosses = any(len({host_of(r) for r in entry.ranks}) > 1 for entry in ledger)
    note.holds(hosts == 1 or float(left) > 0.1 and crosses, "alike", f"{share}, and not every rank takes part in that.")
    note.at_most("bytes", float(left), 1.01 * flat, f"{share}, and {flat:.2f} S with one flat ring.")
    return f"{len(ledger)} call{'s' * (len(ledger) > 1)}, {share}"


def one_bucket(gradients, inside, across):
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


AGREE, BACK = "dist.all_reduce(narrow, group=across)", "gradient.copy_(part.view_as(gradient))"
MISTAKES["exchange"] = {
    "sum": ("This is the sum over the ranks, not the mean.", "/ dist.get_world_size()  ->  "),
    "host-mean": ("The mean is over all ranks, not over those of a host.", "/ dist.get_world_size()  ->  / local"),
    "own-host": ("This is what the ranks of one host have: nothing has come from the others.", f"{AGREE}  ->  pass"),
    "fp16": ("""fp16 ends at 65,504, and a gradient may be larger. bf16 has the range of float32, and two to
        three digits.""", "piece.bfloat16()  ->  piece.half()"),
    "not-in-place": ("The optimizer holds these tensors: write the mean into them.",
            f"{BACK}  ->  gradient.data = part.view_as(gradient)"),
    "calls": ("Each call costs its latency. Put the gradients into one flat tensor, as the buckets of lesson 04 do.",
            {"local = inside.size()": "local = inside.size()\n"
             "for gradient in gradients:\n    dist.all_reduce(gradient.clone(), group=inside)"}),
    "alike": ("""Collectives in which all ranks take part are asked for. A leader, or a store, carries for all what each
        could have carried in part.""",
            f"{AGREE}  ->  dist.reduce(narrow, group=across, group_dst=0)\n"
            "dist.broadcast(narrow, group=across, group_src=0)"),
    "bytes": ("""More leaves a host than with one all-reduce of all. Only the sum of a host has to cross, and each of
        its ranks can send a part of it (lesson 16, section 2).""",
            f"{AGREE}  ->  {AGREE}; dist.all_reduce(padded.clone(), group=across)"),
}
RIGHT["exchange"] = {"level 1": one_bucket, "level 2": "piece.bfloat16()  ->  piece.clone()"}

# --- part 5: a host dies


def _life(checkpoint: Callable, folder: str, lost: int | None, before: int, torn: bool) -> tuple:
    """On a rank: train; the ranks of host `lost` die before a step, or who saves in the middle of its second save."""
    rank = dist.get_rank()

    def at_step(step: int) -> None:
        if lost is not None and rank * 2 // dist.get_world_size() == lost and step >= before:
            os.kill(os.getpid(), signal.SIGKILL)

    def saving(folder: str, *given: Any) -> Any:
        if not torn or not given or given[0] <= faults.program.EVERY:
            return checkpoint(folder, *given)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which kills who writes more than so much into a file
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        size, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, most))
        try:
            return checkpoint(folder, *given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    return faults.program.train(checkpoint=saving, folder=folder, at_step=at_step)


def _eight_and_ten(checkpoint: Callable, folder: str) -> Any:
    """On a rank: of two saves, which are slow, the steps of the one that is found."""
    save = torch.save
    with patch.object(torch, "save", lambda *given, **named: time.sleep(0.3) or save(*given, **named)):
        for step in (8, 10):
            checkpoint(folder, step, {"model": {"weight": torch.ones(3)}, "optimizer": {"state": {}}})
        return (checkpoint(folder) or [None])[0]


def lives(checkpoint: Callable, ranks: int, lost: int | None, before: int = 99, torn: bool = False) -> Seen | None:
    """Train until a host dies, and on with the ranks of the other one; what the second run did."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            quietly(_life, checkpoint, folder, lost, before, torn, ranks=ranks)
            if torn:
                return None
        except WorkerError as error:
            if isinstance(error, HangError) or lost is None and not torn:
                raise  # else it is as it was to be
        found = quietly(_life, checkpoint, folder, None, 99, False, ranks=ranks // 2)
        return Seen(*map(list, zip(*found, strict=True)), [], [])


@checked
def checkpoint(fn: Callable, seed: int = SEED) -> None:
    """Check ``fn(folder, step, state)``: with it, training goes on with half of the ranks as if nobody had died."""
    before = job(seed).dies_before
    again = before - min(survive(Exercise("Exercise 5", hints_of(MISTAKES["checkpoint"])), fn, before).losses[0])
    print(f"Exercise 5 passed: steps computed twice: {again}, and the losses of a run that nobody disturbs.")


def survive(run: Exercise, fn: Callable, before: int) -> Seen:
    """What the second run did after host 1 died before a step; refuses a function that does not save, or find."""
    every, steps, meant = faults.program.EVERY, faults.STEPS, undisturbed()
    for run.case, first, arguments in (
        ("steps 8 and 10 are saved", 10, None),
        ("all steps are done, and it is started again", steps, (2, None)),
        ("a rank dies in the middle of its second save", every, (2, None, 99, True)),
        (f"host 1 dies before step {before}", before // every * every, (4, 1, before)),
    ):
        try:
            if arguments is None:
                with tempfile.TemporaryDirectory() as folder:
                    newest = quietly(_eight_and_ten, fn, folder, ranks=2)
                key = "steps" if len({*newest}) == 1 else "early"
                run.require(newest == [10, 10], key, f"the ranks find {newest}, and not [10, 10].")
                continue
            seen = lives(fn, *arguments)
        except HangError as error:
            run.refuse("hang", f"it hangs.\n\n{error}")
        except WorkerError as error:
            key = "torn" if "middle" in run.case else "error"
            stub = "NotImplementedError" in error.exception
            run.refuse("empty" if stub else key, f"it ends with {error.exception[:300]}.")
        if seen is None:
            print("The check could not kill in the middle of your save, and has not judged it.")
            continue
        done, right = [*seen.losses[0]], [*range(first, steps)]
        run.require(done == right, "steps", f"the second start did steps {done}, and not {right}.")
        wrong = same(seen, replace(meant, losses=[{step: meant.losses[0][step] for step in right}]))
        run.require(not wrong, "state", f"{wrong}.")
    return seen


WRITE = 'os.replace(partial, Path(folder, f"step-{step:06}.pt"))'
MISTAKES["checkpoint"] = {
    "torn": ("""Half of a file cannot be read. Write under another name, and rename when all is there: what has the name
        of a checkpoint is then whole (lesson 04, section 18).""",
            {'Path(folder, f"partial-{step}")': 'Path(folder, f"step-{step:06}.pt")', WRITE: "pass"}),
    "steps": ("""The second start goes on with the next step: `step` is the number of steps that are done when it is
        saved, and the newest checkpoint counts. Sorted as texts, "10" stands before "8".""",
            ['f"step-{step:06}.pt"  ->  f"step-{step}.pt"',
             "saved[-1]  ->  saved[0]",
             "torch.save((step, state), partial)  ->  torch.save((step - 1, state), partial)",
             "return torch.load(saved[-1]) if saved else None  ->  return None"]),
    "early": ("A rank looked before the file was there. All wait until the one that writes is done.",
            "dist.barrier()  ->  pass"),
    "state": ("""What goes on is not what was saved. Weights and optimizer belong together, and both change while the
        next steps go on.""",
            'torch.save((step, state), partial)  ->  torch.save((step, state | {"model": {n: 0 * t for n, t in '
            'state["model"].items()}}), partial)'),
    "hang": ("All ranks call the function, also those that write nothing.",
            {"dist.barrier()": "dist.get_rank() == 0 and dist.barrier()"}),
}
RIGHT["checkpoint"] = {
    "one name, always replaced": 'f"step-{step:06}.pt"  ->  "step-newest.pt"',
    "each rank for itself": {"if dist.get_rank() == 0:": "if True:", '-{step}"': '-{dist.get_rank()}"'},
}

# --- part 6: the report

ADVICE = re.compile(r"^\W*Recommendation\W+(do not start|start)\b(\W+\w\S*){3}", re.MULTILINE | re.IGNORECASE)
UNKNOWN = re.compile(r"^\W*Not known\W+\w", re.MULTILINE | re.IGNORECASE)
SCALED = re.compile(r"(?<![\w.,])\d\s*(%|percent|thousand|million|billion)")
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
STORED = json.loads((Path(__file__).parent / "results" / "reference_level_3.json").read_text("utf-8"))["facts"]


@checked
def report(fn: Callable, facts: Mapping[str, Any] = STORED) -> None:
    """Check ``fn(facts) -> str`` on the facts of a job, and on those of one that costs more than its budget."""
    run = Exercise("Exercise 6", hints_of(MISTAKES["report"]))
    dearer = {name: fact if isinstance(fact, str) or name == "budget" else (round(1.7 * fact[0], 3), *fact[1:])
              for name, fact in facts.items()}
    for run.case, given in (("your facts", facts), ("1.7 times your facts, with your budget", dearer)):
        key, sentence = page_fault(run.call(fn, dict(given)), given)
        run.require(not key, key or "form", sentence)
    print("Exercise 6 passed: facts, each with its unit and how it is known, and what to do about them.")


def page_fault(page: Any, facts: Mapping[str, Any]) -> tuple[str, str]:
    """Key of the hint, and a sentence, for what a page lacks or invents; two empty texts if nothing."""
    if not isinstance(page, str):
        return "form", f"the function returned {type(page).__name__}."
    lines, words = page.splitlines(), len(page.split())
    if len(lines) > 60 or words > 500:
        return "long", f"the page has {len(lines)} lines and {words} words."
    for name, fact in facts.items():
        number, unit, known = (None, fact, "") if isinstance(fact, str) else fact
        told = [line for line in lines if number is None or stands(number, numbers(line, facts))]
        text = f"{name}: {unit!r}" if number is None else f"{name}: {number:g} {unit}"
        if not told or number is None and unit not in page:
            return "missing", f"{text} is not in the page."
        if number is not None and not any(re.search(rf"(?<![a-zA-Z]){unit}(?![a-zA-Z])", line) for line in told):
            return "unit", f"{text} stands without {unit!r}."
        if not any(known in line for line in told):
            return "label", f"{text} does not say {known!r}."
    allowed = [fact[0] for fact in facts.values() if not isinstance(fact, str)]
    for found in numbers(page, facts):
        if not (abs(found) < 10 and found == int(found) or stands(found, allowed)):
            return "invented", f"{found:g} stands in the page, and is none of the facts."
    if scaled := SCALED.search(page):
        return "invented", f"{scaled[0]!r} stands in the page, and is none of the facts."
    if not UNKNOWN.search(page):
        return "unknown", "no line begins with *Not known:*."
    if not (advice := ADVICE.search(page)):
        return "advice", "no line begins with *Recommendation: start* or *Recommendation: do not start* and says why."
    if "cost" in facts and (facts["cost"][0] <= facts["budget"][0]) != (advice[1].lower() == "start"):
        return "advice", f"{advice[1]!r} is said where the cost is {facts['cost'][0]:g} GPU hours."
    return "", ""


def stands(number: float, others: list[float]) -> bool:
    return any(math.isclose(number, other, rel_tol=0.01) for other in others)


def numbers(text: str, facts: dict[str, Any]) -> list[float]:
    """Numbers of a text, without those in names and in facts that are texts."""
    for words in [*facts, *(fact for fact in facts.values() if isinstance(fact, str))]:
        text = re.sub(rf"(?<![\w.,]){re.escape(words)}(?!\w|[.,]\d)", "", text)  # not a part of a number
    return [float(found.replace(",", "")) for found in NUMBER.findall(text)]


ROW = 'lines.append(f"| {name} | {number:,.6g} {unit} | {known} |")'
MISTAKES["report"] = {
    "form": ("Return one text.", r'return "\n".join(lines)  ->  return lines'),
    "long": ("A page has at most 60 lines and 500 words. What does the customer have to decide?",
            r'return "\n".join(lines)  ->  return "\n".join(60 * lines)'),
    "missing": ("Each fact is in the page, numbers to 1 %.", "in facts.items():  ->  in list(facts.items())[:3]:"),
    "unit": ("A number without its unit says nothing.", " {unit} | {known}  ->  | {known}"),
    "label": ("""The reader has to know whether a figure was measured, counted or modelled, on the line where it
        stands.""", "{unit} | {known} |  ->  {unit} | |"),
    "unknown": ("What was not measured belongs into the page, too: a line that begins with *Not known:*.",
            "Not known:  ->  All is known:"),
    "advice": ("""A customer has to decide. The line *Recommendation:* says what to do and why, and depends on whether
        the cost is within the budget.""",
            ["Recommendation:  ->  Good bye:", "if dear else  ->  if False else", "if dear  ->  if not dear"]),
    "invented": ("Each figure comes from the facts. What follows from them you may say in words, or leave out.",
            ["assumes that nothing does.  ->  assumes that 37 % do.", "that nothing does.  ->  that 3 million do."]),
}
RIGHT["report"] = {
    "a list": f"{ROW}  ->  " + 'lines.append(f"- {name}: {number:,.5g} {unit}, {known}")',
    "more digits": "{number:,.6g}  ->  {number:,.6f}",
}
