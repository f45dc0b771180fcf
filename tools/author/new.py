"""The room of a new lesson: short texts, an exercise and its check, which build and pass as they are."""

from __future__ import annotations

import re
from pathlib import Path

from tools import ToolError

from .rooms import texts

# In each text NUMBER, TOPIC and WORDS stand for "17", "symmetric_memory" and "symmetric memory".
INIT = '''\
"""Lesson NUMBER: What does WORDS change?"""
'''
LESSON = '''\
# %% [markdown]
# # What does WORDS change?
#
# Begin with what goes wrong without it. Say in three sentences what the reader is going to measure.
#
# **You will be able to**
# - *say* what each rank sends, and what it keeps;
# - *measure* it on real ranks;
# - *decide* when it is worth its price.
#
# **Before this:** [02 collectives](02_collectives.ipynb). **Time:** about 5 minutes to read, under a minute to run.

# %% [markdown]
# Imports and parameters:

# %% tags=["parameters"]
import torch
import torch.distributed as dist

from course_utils import launch, record
from course_utils.predictions import predict, predictions

world_size = 4  # ranks, 2 or more

# %% [markdown]
# ## 1. What a rank sends
#
# One idea a section. Here each rank adds up a number with all others.
#
# **Predict**: four ranks hold 1, 2, 3 and 4. What does rank 0 hold afterwards?

# %%
held = predict("rank 0 holds")


# %%
def total():
    """Return the sum over the ranks, and the bytes that this rank has sent."""
    x = torch.tensor([dist.get_rank() + 1.0])
    with record() as ledger:
        dist.all_reduce(x)
    return x.item(), ledger.bytes_sent()


sums, sent = zip(*launch(total, world_size=world_size), strict=True)
print("held, by rank:", sums)
print(f"sent by rank 0: {sent[0]:g} bytes (modelled, for a ring)")

# %% jupyter={"source_hidden": true}
assert set(sums) == {world_size * (world_size + 1) / 2}
held.compare(sums[0])

# %% [markdown]
# **Compare.** One to three sentences that answer, and say why.
#
# Explain what was measured, and where another number of ranks would change it.

# %% [markdown]
# ## Recap
#
# - What stays, in three sentences.

# %%
predictions()

# %% [markdown]
# **Exercises:** [exercises/NUMBER_TOPIC](../exercises/NUMBER_TOPIC_exercises.ipynb).
#
# **Worth reading**
# - PyTorch, [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html): what each collective promises.
# - Sergeev and Del Balso, *Horovod*, 2018, [arXiv 1802.05799](https://arxiv.org/abs/1802.05799): why the ring.
'''
EXERCISES = '''\
# %% [markdown]
# # Exercises NUMBER · What does WORDS change?
#
# One exercise on [NUMBER WORDS](../notebooks/NUMBER_TOPIC.ipynb). All of them take about 10 minutes.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | a mean over ranks | 1 of 5 | 10 |

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/NUMBER_TOPIC_solutions.ipynb).

# %% tags=["parameters"]
import torch
import torch.distributed as dist

from lessons.TOPIC import check

# %% [markdown]
# ---
# ## Exercise 1 · A mean over ranks
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 1 of 5 | 10 | NUMBER, What a rank sends | equal to one process to 1e-12 |
#
# Each rank has a tensor of the same shape. Return the mean of them all, on every rank.


# %%
# {{mean_of_ranks}}


# %%
check.mean_of_ranks(mean_of_ranks)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What do you know once you have the sum?
# </details>
# <details><summary>Hint 2</summary>
#
# `all_reduce` writes into the tensor that it is given.
# </details>
# <details><summary>Hint 3</summary>
#
# Reduce a copy, and divide it by `dist.get_world_size()`.
# </details>
'''
ANSWERS = '''\
"""The solutions of the exercises of lesson NUMBER; what stands between the marks is what a learner writes."""

import torch
import torch.distributed as dist


def mean_of_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of `x` over the ranks, on every rank; `x` stays as it is."""
    ### BEGIN SOLUTION
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
    ### END SOLUTION
'''
CHECK = '''\
"""The exercise of lesson NUMBER: what each rank must find, and the usual mistakes with their hints."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from course_utils import record
from course_utils.check import exercise

__all__ = ["MISTAKES", "RIGHT", "mean_of_ranks"]

MISTAKES: dict[str, dict[str, tuple]] = {
    "mean_of_ranks": {
        "sum": ("This is the sum over the ranks, not the mean.", "total / dist.get_world_size()  ->  total"),
        "own": ("This is what the rank had before: nothing has come from the others.",
                "dist.all_reduce(total)  ->  total *= dist.get_world_size()"),
        "changed": ("The tensor that the function was given is to stay as it is.", "x.clone()  ->  x"),
    },
}
RIGHT: dict[str, dict[str, Any]] = {
    "mean_of_ranks": {
        "divided first": {
            "x.clone()": "x / dist.get_world_size()",
            "return total / dist.get_world_size()": "return total",
        },
        "gathered": {
            "total = x.clone()": "parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]",
            "dist.all_reduce(total)": "dist.all_gather(parts, x)",
            "total / dist.get_world_size()": "torch.stack(parts).mean(0)",
        },
    },
}


@exercise("Exercise 1", passed="equal to one process to 1e-12.", cases=[(2, "two ranks"), (3, "three ranks")])
def mean_of_ranks(note, answer):
    rank, n = dist.get_rank(), dist.get_world_size()
    given = [torch.arange(4.0, dtype=torch.float64) + 10 * r**2 for r in range(n)]
    x = given[rank].clone()
    with record() as ledger:
        got = answer(x)
    note.equal(got, sum(given) / n, "the mean")
    note.holds(torch.equal(x, given[rank]), "changed", "the tensor given to the function has changed.")
    note.talks(ledger, n)
'''
FILES = {"__init__.py": INIT, "lesson.py": LESSON, "exercises.py": EXERCISES, "answers.py": ANSWERS, "check.py": CHECK}


def new(number: str, topic: str, root: Path) -> Path:
    """Make the room of a new lesson, and return its folder."""
    if not re.fullmatch(r"\d\d", number) or not re.fullmatch(r"[a-z][a-z0-9_]*", topic):
        raise ToolError("a lesson has a number of two digits and a topic in small letters, as in new 17 slow_links")
    room = root / "lessons" / topic
    taken = [name for name in texts(root) if name.startswith(f"{number}_")]
    if taken or room.exists():
        raise ToolError(f"there is a lesson {taken[0] if taken else topic} already")
    room.mkdir(parents=True)
    for name, text in FILES.items():
        text = text.replace("NUMBER", number).replace("TOPIC", topic).replace("WORDS", topic.replace("_", " "))
        (room / name).write_text(text, encoding="utf-8")
    return room
