"""The exercises of lesson 17: what each answer must find, and the usual mistakes with their hints."""

from __future__ import annotations

import random
from collections import Counter, namedtuple
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from course_utils import record
from course_utils.check import Case, Exercise, checked, exercise, paper
from course_utils.check.compare import values
from course_utils.check.program import hints_of
from course_utils.models import PUBLISHED
from lessons.debugging_hangs.clinic import servers
from lessons.debugging_hangs.clinic_check import ward
from lessons.parallelism_3d.planner import CONSTANTS, StepModel, best_product, cluster
from lessons.parallelism_3d.planner.held import CONTEXT, GROUP

from . import answers
from .helpers import READING

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

MISTAKES["cache_plan"] = {
    "keys-only": ("This is half of the cache: there are keys and values.", "2 * layers  ->  layers"),
    "heads": ("The KV heads end before the GPUs do. Where GPUs share a head, each has a copy of its cache.",
            "min(gpus, kv_heads)  ->  gpus"),
    "not-divided": ("The heads of the cache are divided among the GPUs, as those of the model are.",
            "token * length / min(gpus, kv_heads)  ->  token * length"),
    "weights": ("Each GPU has only its part of the weights.", "weights / gpus  ->  weights"),
    "all-memory": ("The weights are in the memory, too.", "(memory - weights / gpus)  ->  memory"),
    "binary": ("GB are 10⁹ bytes here.", "(memory - weights / gpus) * 1e9  ->  (memory - weights / gpus) * 2**30"),
}
RIGHT["cache_plan"] = {
    "in GB": "int(room // sequence)  ->  int(room / 1e9 / (sequence / 1e9) + 1e-9)",
    "heads on a GPU": "token * length / min(gpus, kv_heads)  ->  token * length / kv_heads * max(1, kv_heads / gpus)",
}
cache_plan = paper(
    "Exercise 1", answers.cache_plan, MISTAKES["cache_plan"],
    cases=[(80, 8, 128, 2, 141, 8, 80, 8192), (80, 8, 128, 2, 141, 16, 80, 131072), (32, 8, 128, 1, 16, 1, 80, 4096),
           (126, 8, 128, 2, 405, 8, 141, 32768)],
    units=["kB", "GB", "sequences"], tolerance=0.001,
    allowed=lambda layers, heads, size, element, weights, gpus, memory, length: weights < 0.9 * gpus * memory,
)


@exercise("Exercise 2", passed="equal to one process to 1e-12, and what is sent does not grow with the tokens.", cases=[
    (2, "9 tokens", 9, 1.0), (3, "14 tokens", 14, 1.0), (2, "large scores", 9, 3000.0),
    Case(4, "2 tokens on 4 ranks", (2, 1.0), "empty-rank", "amax|max"), (1, "5 tokens", 5, 1.0),
], explained={r"amax\(\): Expected reduction dim": "empty-rank", r"max\(\): Expected reduction dim": "empty-rank"})
def split_step(note, answer, tokens, scale):
    heads, size, n = 3, 8, dist.get_world_size()
    q, (k, v) = scale * values(heads, size, seed=1).double(), values(2, tokens, heads, size, seed=2).double()
    weights = torch.softmax(torch.einsum("hd,thd->ht", q, k) * size**-0.5, 1)
    own = k[dist.get_rank() :: n].clone(), v[dist.get_rank() :: n].clone()
    with record() as ledger:
        got = answer(q.clone(), *own)
    note.equal(got, torch.einsum("ht,thd->hd", weights, v), "the output")
    note.talks(ledger, n)
    if n > 1:
        note.sent(ledger, sent=n * heads * (size + 2) * 8, too_many_bytes="cache-sent")


MERGE = "return (factor * o).sum(0) / (factor * sums).sum(0)"
MISTAKES["split_step"] = {
    "own": ("This is attention to the tokens of this rank only.",
            f"{MERGE}  ->  return own[:, :size] / own[:, size:-1]"),
    "mean": ("""The outputs of the ranks were averaged. A rank whose keys fit the query better has a larger sum, and
        counts for more.""", f"{MERGE}  ->  return (o / sums).nan_to_num().sum(0) / len(o)"),
    "sum-weighted": ("""Each sum l is relative to the rank's own maximum, and so is each output: before they are added,
        all must have the same one.""", f"{MERGE}  ->  return o.sum(0) / sums.sum(0)"),
    "overflow": ("""The scores are too large for exp. Subtract a maximum first; the merged result does not depend on
        it.""", {"torch.exp(scores - m)": "torch.exp(scores)", "exp(m - m.amax(0))": "exp(0 * m.nan_to_num(0, 0, 0))"}),
    "scale": ("The scores are not divided by the square root of the head's size.", " * size**-0.5  ->  "),
    "empty-rank": ("""A rank may have no token yet, as after a short prompt. Its share must count for nothing: no
        maximum, a sum of 0, and no NaN.""", {"if len(k):": "if True:"}),
    "cache-sent": ("""More travels than outputs, sums and maxima. Keys and values stay where they are; what moves does
        not grow with the tokens.""",
            {"heads, size = q.shape": "heads, size = q.shape\n"
             "dist.all_gather_object([None] * dist.get_world_size(), (k, v))"}),
}
RIGHT["split_step"] = {
    "two all-reduces": {
        "parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]\n    dist.all_gather(parts, own)\n"
        "    o, sums, m = torch.stack(parts).split([size, 1, 1], -1)\n"
        "    factor = torch.exp(m - m.amax(0))": "m = own[:, -1:].clone()\ndist.all_reduce(m, dist.ReduceOp.MAX)\n"
        "both = own[:, :-1] * torch.exp(own[:, -1:] - m)\ndist.all_reduce(both)",
        MERGE: "return both[:, :-1] / both[:, -1:]",
    },
    "max": "m.amax(0)  ->  m.max(0).values",
}


@exercise("Exercise 3", passed=": 1,500 events at random, no block lost, shared by mistake, or overwritten.", cases=[
    (0, "one request", 1, False), (0, "several requests", 5, False), (0, "requests that fork", 6, True),
])
def update_tables(note, answer, names, forks):
    draw, texts, store = random.Random(names), {}, {}
    cache = SimpleNamespace(count=10, size=3, tables={}, lengths={}, users=[0] * 10, free=[*range(10)])
    for event in range(500):
        name, others = f"r{draw.randrange(names)}", [f"r{i}" for i in range(names) if f"r{i}" not in texts]
        known = name in texts
        what = draw.choice(["append"] * 12 + ["end"] * known + ["fork", "fork"] * (forks and known and others != []))
        call = (what, name, *others[:1]) if what == "fork" else (what, name)
        before, said = len(cache.free), f"event {event}, {' '.join(call)}: "
        cache.lengths = {name: len(text) for name, text in texts.items()}
        got = answer(cache, *call)
        if what == "end":
            texts.pop(name)
        elif what == "fork":
            texts[others[0]] = list(texts[name])
        elif got == "full":
            if not note.holds(before == 0, "not-full", f"{said}it is said to be full, and {before} blocks are free."):
                return
        else:
            texts.setdefault(name, []).append(event)
        if not tables_hold(note, cache, {n: len(t) for n, t in texts.items()}, said):
            return
        if what != "append" or got == "full":
            continue
        last = cache.tables[name][-1]
        if not note.holds(cache.users[last] == 1, "shared-write", f"{said}block {last} has {cache.users[last]} users."):
            return
        if got is not None:
            store.update({(got[1], place): store.get((got[0], place)) for place in range(cache.size)})
        store[last, (len(texts[name]) - 1) % cache.size] = event
        for one, text in texts.items():
            found = [store.get((cache.tables[one][i // cache.size], i % cache.size)) for i in range(len(text))]
            if not note.holds(found == text, "not-copied", f"{said}{one} reads {found[-3:]}, and wrote {text[-3:]}."):
                return


def tables_hold(note: Any, cache: SimpleNamespace, lengths: dict[str, int], said: str) -> bool:
    """Whether tables, users and free blocks agree with each other and with the lengths of the requests."""
    tables = {name: table for name, table in cache.tables.items() if table or lengths.get(name)}
    used = Counter(block for table in tables.values() for block in table)
    need = {name: -(-length // cache.size) for name, length in lengths.items()}
    have = {name: len(table) for name, table in tables.items()}
    users, idle = [used[b] for b in range(cache.count)], [b for b in range(cache.count) if not used[b]]
    return (
        note.holds(have == need, "length", f"{said}the tables have {have} blocks; {need} are needed.")
        and note.holds({*idle} <= {*cache.free}, "lost", f"{said}free are {sorted(cache.free)}, not {idle}.")
        and note.holds(sorted(cache.free) == idle, "given-twice", f"{said}free are {sorted(cache.free)}, not {idle}.")
        and note.holds(list(cache.users) == users, "users", f"{said}users are {cache.users}, not {users}.")
    )


FREED = "free[:] = [block for block in range(cache.count) if users[block] == 0]"
MISTAKES["update_tables"] = {
    "lost": ("A block that nobody uses is not among the free ones: it is lost for ever.", f"{FREED}  ->  pass"),
    "given-twice": ("A block is free although a request still uses it, or stands twice among the free ones.",
            ["users[block] -= 1  ->  users[block] = 0", "free[:] =  ->  free +="]),
    "users": ("The tables are right, but the number of users of a block is not that of the tables it stands in.",
            ["users[free[-1]] = 1  ->  users[free[-1]] += 2", "users[block] += 1  ->  pass"]),
    "shared-write": ("The new token goes into a block that another request reads: after a fork the last has two users.",
            "== 0 or users[table[-1]] > 1  ->  == 0"),
    "not-copied": ("A request reads what it has not written. Return (from, to), the old block and the new one.",
            ["copied = (table.pop(), free[-1])  ->  table.pop()", "table.pop(), free[-1]  ->  free[-1], table.pop()"]),
    "length": ("A table needs as many blocks as hold the request's tokens, and no more.",
            [{"length % cache.size == 0 or": "True or", "length % cache.size > 0": "False"},
             "list(cache.tables[name])  ->  []"]),
    "not-full": ("It is full only when a block is needed and none is free.",
            "if not free:  ->  if len(free) < 2:"),
}
RIGHT["update_tables"] = {
    "the oldest first": {"free[-1]] = 1": "free[0]] = 1", "free[-1])": "free[0])", "free.pop()": "free.pop(0)"},
    "enumerated": f"{FREED}  ->  cache.free = [block for block, number in enumerate(users) if number < 1]",
}


#: A request: its name, tokens that are left to compute, tokens in the cache, and blocks that it has.
Job = namedtuple("Job", "name left done blocks", defaults=(0, 0))
A, B, C = Job("A", 1, 7, 2), Job("B", 30, 8, 2), Job("C", 1, 8, 2)
W, X, Y, Z = Job("W", 20), Job("X", 3), Job("Y", 2), Job("Z", 2, 6, 2)


@exercise("Exercise 4", passed=": decodes first, prompts in pieces, nobody overtakes, no block promised twice.", cases=[
    (0, "two decodes and a prompt", [A, B, C], [], 16, 8, 9, 4), (0, "a prompt that waits", [A], [W, X], 16, 8, 9, 4),
    (0, "a small budget", [A, B, C], [W], 2, 8, 9, 4), (0, "at most three requests", [A, C], [X, Y], 16, 3, 9, 4),
    (0, "few blocks", [A, C, B], [X], 16, 8, 2, 4), (0, "no block", [A, C], [X], 16, 8, 0, 4),
    (0, "one block for two who wait", [A], [X, Y], 16, 8, 1, 4),
    (0, "no block, but for the second", [A], [X, Z], 16, 8, 0, 4),
])
def plan(note, answer, running, waiting, budget, most, free, size):
    right = answers.plan(running, waiting, budget, most, free, size)
    got = answer(list(running), list(waiting), budget, most, free, size)
    got = [tuple(pair) for pair in got] if isinstance(got, list | tuple) else got
    pairs = isinstance(got, list) and all(len(pair) == 2 for pair in got)
    if note.holds(pairs, "odd", f"the function returned {got!r}."):
        note.holds(got == right, "value", f"the step is wrong.\n  expected  {right}\n  got       {got}", ("", got))


MISTAKES["plan"] = {
    "prompts-first": ("Those who decode need one token each, and come before any prompt, whoever runs for longer.",
            ["decoding + prefilling + waiting  ->  prefilling + decoding + waiting",
             "decoding + prefilling + waiting  ->  running + waiting"]),
    "whole-prompts": ("A prompt that is longer than what is left of the budget is cut; its rest comes later.",
            "if count < 1:  ->  if count < min(request.left, 12):"),
    "budget": ("The step computes more tokens than its budget.", "budget - count, places  ->  budget, places"),
    "most": ("More requests run than there may.", "places - new  ->  places"),
    "promised": ("A free block was promised to two requests.", "free -= max  ->  max"),
    "own-room": ("The last block of a request may have room left; a token that fits there needs no new one.",
            "(request.blocks + free) * size - request.done  ->  free * size"),
    "overtaken": ("Who waits in front comes first. If the first finds no room, those behind it wait as well.",
            {"if new and (count < 1 or places < 1):\n            break": "if new and places < 1:\n    break"}),
}
RIGHT["plan"] = {
    "sorted": "decoding + prefilling + waiting  ->  sorted(running, key=lambda r: r.left > 1) + waiting",
    "tuples": "return batch  ->  return tuple(batch)",
}


#: Of a GPU: GB of its memory, GB/s, TFLOP/s, GB/s of its link, and µs of an all-reduce without bytes.
Machine = namedtuple("Machine", "memory reads tflops link latency")


def machine_of(name: str) -> Machine:
    """Eight GPUs of a node as lesson 12 plans with them: memory beside its reserve, products, and the share of a link
    that large collectives reach. Of lesson 17 are the share of bytes/s that one H200 reached, and one shot's 7 µs."""
    node = cluster(name, 8)
    memory, (_, per_byte) = node.card.memory_bytes - CONTEXT - GROUP, node.intra
    flops = StepModel(CHAT, node, CONSTANTS).clock * best_product(node.gpu)
    reads, link = READING * node.card.memory_bandwidth, CONSTANTS.nvlink / per_byte
    return Machine(round(memory / 1e9, 1), round(reads / 1e9), round(flops / 1e12), round(link / 1e9), 7)


CHAT, LARGE = PUBLISHED["Llama 3 8B"], PUBLISHED["Llama 3 70B"]
H100 = machine_of("DGX H100")
PCIE = H100._replace(link=50, latency=34)  # lesson 12's share of PCIe 5; a ring of four has six hops of 5.7 µs
SITUATIONS = [(CHAT, PCIE, 500, 50), (LARGE, H100, 500, 50), (LARGE, H100, 2000, 20)]

MISTAKES["deployment"] = {
    "no-messages": ("The all-reduces are missing: two in each layer, each with its latency.",
            "if t > 1 else 0  ->  * 0"),
    "latency-only": ("The messages have bytes too: b · hidden numbers of two bytes, in a ring.",
            "machine.latency * 1e-6 + message  ->  machine.latency * 1e-6"),
    "no-latency": ("The rate is too high: does each of the 2 · layers all-reduces cost its latency?",
            "machine.latency * 1e-6 + message  ->  message"),
    "no-limit": ("Some step is longer than the limit.", "step <= limit / 1e3 and  ->  "),
    "one-copy": ("Eight GPUs hold 8 / t copies of the model, and all of them serve.",
            "8 // t * b / step  ->  b / step"),
    "no-cache-read": ("A step reads the whole cache of its sequences, not only the weights.",
            "(weights + b * cache)  ->  weights"),
    "added": ("Reading and computing go on at the same time: the longer of the two counts.",
            "max(reading, computing)  ->  reading + computing"),
    "no-computing": ("With many sequences FLOP/s are the limit: 2 for each weight and sequence.",
            "max(reading, computing)  ->  reading"),
}
RIGHT["deployment"] = {
    "the largest batch first": "for b in range(1, int((machine.memory * 1e9 - weights) // cache) + 1):  ->  "
    "for b in range(int((machine.memory * 1e9 - weights) // cache), 0, -1):",
    "a maximum": {"if t > 1 else 0": "* (t > 1)"},
}
deployment = paper(
    "Exercise 5", answers.deployment, MISTAKES["deployment"],
    cases=[*SITUATIONS, (CHAT, H100, 2000, 25), (LARGE, PCIE, 500, 100)],
    units=["GPU(s) a copy", "tokens/s"], tolerance=0.002,
)

MISTAKES["three_patients"] = {
    "missing": ("Return an entry for each of the three patients.", "        1: (  ->          4: ("),
    "form": ("An entry is the number of a patient and a pair: its cause, and the edit as a dictionary.",
            '1: ("own clock",  ->  1: ('),
    "name": ("The names of causes are those of clinic.list_causes().", '"own clock"  ->  "a clock"'),
    "diagnosis": ("Ask for the evidence that is named below, and compare it with what this cause would show.",
            ['"own clock"  ->  "own choice"', '"block given away"  ->  "sums of a batch"']),
    "cure-form": ("Old texts of an edit must stand in the program once. Copy them from the program as it is shown.",
            '"came, answers ="  ->  "came, answer ="'),
    "cure": ("What the ranks say after the change stands below. Is it the same as before?", [
            "all_reduce(count, op=dist.ReduceOp.MIN)  ->  all_reduce(count, op=dist.ReduceOp.MAX)",
            "if not any(  ->  if any("]),
    "own-numbers": ("Another machine has room for other numbers of blocks. The cure must hold for all of them.",
            '"broadcast(count, src=0)": "all_reduce(count, op=dist.ReduceOp.MIN)"  ->  "[6, 5][dist.get_rank()]": "5"'),
}
RIGHT["three_patients"] = {
    "the latest clock": "dist.broadcast(clock, src=0)  ->  dist.all_reduce(clock, op=dist.ReduceOp.MAX)",
    "block 0 stays": 'if not any(block in table for table in"\n            " tables.values()):  ->  if block != 0:',
}


@checked
def three_patients(fn):
    """Check ``fn()``: number of each patient -> its cause, and the edit that heals it."""
    run, clinic = Exercise("Exercise 6", hints_of(MISTAKES["three_patients"])), servers.clinic()
    count = ward(run, fn, clinic, (1, 2, 3))
    run.case, edit = "patient 2", {**fn()[2][-1], "[6, 5]": "[7, 4]"}
    try:
        healed = clinic.run(servers.CASES[1], {"edit": edit}).is_healthy("4 blocks filled")
    except ValueError:  # the edit has replaced the numbers
        healed = False
    run.require(healed, "own-numbers", "with room for 7 and 4 blocks the cure does not heal.")
    run.passed(f": {count} causes found, and {count} servers healed, each by a run.")
