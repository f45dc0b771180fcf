# %% [markdown]
# # Exercises 18 · Can you take a job from a model and a budget to a report?
#
# Six parts of one job, explained in [18 capstone](../notebooks/18_capstone.ipynb). Each part is an exercise with a
# check and a product, and you can stop after any of them. All of them take about 305 minutes. **If you do only
# these:** 1, 3 and 4.
#
# | | you hand in | difficulty | minutes |
# |---|---|---|---|
# | 1 | a plan: layout, cost, free memory | 3 of 5 | 50 |
# | 2 | a command line for two hosts | 3 of 5 | 45 |
# | 3 | three causes and the edits that mend the program | 4 of 5 | 60 |
# | 4 | an exchange that sends less | 4 of 5 | 55 |
# | 5 | a checkpoint that survives | 3 of 5 | 50 |
# | 6 | a page for the customer | 2 of 5 | 45 |

# %% [markdown]
# **How to work.** Set your seed. Then replace the `raise NotImplementedError` line, run the cell, run the check below
# it. The hints fold open one by one; solutions, for seed 52, are in [the solutions
# notebook](../solutions/18_capstone_solutions.ipynb).
#
# **What a check does.** It judges what your answer does on the job of your seed: on the planner (1), on real ranks (2
# to 5), and in the text (6). Nothing is timed. Parts 3 to 5 run anywhere. Part 2 runs on emulated hosts where the
# computer has them, and else on one host, with the same points.

# %% tags=["parameters"]
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from course_utils import attempt
from course_utils.programs import SCRIPTS, TEXT
from lessons.capstone import check, faults, helpers, results
from lessons.capstone.job import SEED, job
from lessons.multi_node.hosts import hosts_available, run_on_hosts
from lessons.parallelism_3d import planner

seed = SEED  # yours: a number that your instructor gives you, or any other

# %% [markdown]
# ---
# ## Exercise 1 · A plan for a letter
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 50 | 12, sections 7 to 10, 17 and 19 | within the GPU hours, a tenth of the memory free |
#
# A customer writes which model, on which cluster, with which budget:

# %%
letter = job(seed).letter
print(letter)

# %% [markdown]
# Choose a layout for lesson 12's planner, and say what the whole training costs and how much memory stays free. Believe
# the planner's memory, but not to the last byte: of what CUDA reports of a GPU, a tenth must stay free beside
# everything that is held there, the planner's reserve included. No context parallelism.
#
# A letter has a trap, one line that is easily misread. The check asks for the letters of your seed and of the next two,
# which have different ones, so write a function that reads letters. Its fields are `model`, `gpu`, `nodes`,
# `lent_nodes` (of these), `per_node`, `ports` of a node with `port_gbit` each, `held_gb`, `tokens_of_step`, `tokens`
# and `gpu_hours`; the model has its length as `model.context`, and 1 GB is 10⁹ bytes. Return the layout, the GPU
# hours of the training, and the GB that stay free on the fullest GPU.
#
# **Product:** a plan that you would sign. **Points:** the fastest such step, divided by yours.


# %%
# {{plan_run}}


# %%
check.plan_run(plan_run, seed)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Whose ports, whose nodes, whose memory? `planner.own_cluster` takes the network of *each GPU*, in bits per second, and
# a batch counts sequences.
# </details>
# <details><summary>Hint 2</summary>
#
# `planner.search(model, machine, sequences, cp=1).plans` has all plans that can run, fastest first. What is held on a
# GPU is `plan.memory.total`, `plan.reserve`, and what the letter says; `machine.card.memory_bytes` is what there is.
# </details>
# <details><summary>Hint 3</summary>
#
# Take the first plan that leaves enough. GPU hours are steps · seconds of a step · GPUs that compute / 3600.
# </details>

# %% [markdown]
# ---
# ## Exercise 2 · A start on two hosts
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 45 | 16, sections 2, 3 and 10; 07 on HSDP | half of the states on a rank; fewest bytes over the cable |
#
# Before the cluster is there, you rehearse with a small model on two hosts, `node0` and `node1`, with two ranks each
# and a slow cable between them. The order is for `scripts/train.py`:

# %%
print(check.ORDER, check.LINK)

# %% [markdown]
# Write the command line that is typed on both hosts, beginning with `torchrun`. Both get it word for word, but for
# `{host}`, which stands for 0 and 1. You are given the paths of the program, of a folder, and of the text. A rank has
# room for half of the states, no more. Choose the mesh so that as few bytes as possible leave a host. The check has the
# line read by torchrun's own parser and by that of `train.py`, runs `train.py` with your flags on two hosts, and counts
# what collectives send over the cable.
#
# **Product:** a command line. **Points:** the fewest bytes, divided by yours.


# %%
# {{start}}


# %%
check.start(start)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Where do the agents meet? The place must mean the same on both hosts. `python scripts/train.py --help` lists its
# flags; the mesh is `--replicate` times `--shard` times `--tp`.
# </details>
# <details><summary>Hint 2</summary>
#
# Neighbors in rank share a host, and the last dimension of the mesh has neighbors. What should lie inside a host: the
# copies, or the shards of one copy?
# </details>
# <details><summary>Hint 3</summary>
#
# Two copies, each in two shards (HSDP): weights are gathered inside a host, and only gradients are summed across.
# </details>

# %% [markdown]
# Now type it, on emulated hosts, with real agents.

# %% tags=["nbval-ignore-output"]
emulated, sentence = hosts_available()
with tempfile.TemporaryDirectory() as folder:
    command = start(str(SCRIPTS / "train.py"), f"{folder}/run", str(TEXT)) + " --log-every=1"
    if emulated:
        run_on_hosts(command).show(r"\| step \d")
    else:
        print(f"Not shown here. {sentence}.")

# %% [markdown]
# ---
# ## Exercise 3 · Three things that are wrong
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 60 | 14, sections 2 to 5; 04, sections 2, 3, 8, 9 | equal to one process, no byte or message more |
#
# The program of the lesson, as it was left to you. It hangs. Behind the hang it is wrong, and it does more than it has
# to. The names of the causes are in `faults.FAULTS`.

# %%
text = faults.broken(seed)
print(text[text.index("def mean_gradients") :])

# %% tags=["nbval-ignore-output"]
with attempt():
    print(helpers.run_text(text))

# %% [markdown]
# Work here, in as many cells as you like. `helpers.run_text(text, verify=True)` compares the calls of all ranks
# (lesson 14), `faults.mended(text, edits)` gives the text with your edits, and `helpers.undisturbed()` is the table of
# a program without faults, so you know which numbers you want. A run has `losses`, `evaluated`, `weights`, `ledgers`,
# and `windows` by rank; count `(entry.op, entry.group)` in a ledger to see which calls are missing, or too many.

# %% tags=["nbval-ignore-output"]
print(helpers.undisturbed())

# %% [markdown]
# Then write down what you have found. An edit is an old text and a new one. The old text must stand in the broken
# program exactly once; spaces count. Some lines differ from the program of the lesson without harm, so a diff does not
# tell you the three: find the causes from the tables. Where two causes fit a table, the line in it decides.
#
# **Product:** a program that is right, and a list of what was wrong. **Points:** 5 for each cause, 15 for the program.


# %%
# {{repairs}}


# %%
check.repairs(repairs, seed)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First the hang. The table says which ranks wait in which call, and which never came. What did these do instead? Look
# for a line that only some ranks run, or run in another order.
# </details>
# <details><summary>Hint 2</summary>
#
# With the hang mended, put both tables side by side. Do the ranks differ from each other in their weights? Then
# something that all need has not been exchanged, or did not start alike. If they agree and are wrong, ask what each
# gradient is a mean of, and when. Compare `weights[0]` of both runs, not only the norm: where all are equal, the number
# that is reported is wrong. A small difference is a fault as well.
# </details>
# <details><summary>Hint 3</summary>
#
# With the numbers right, compare `calls`, `MB sent` and `windows computed`. More calls with the same bytes are
# barriers; twice the bytes with the same calls are wider numbers; both are something that is sent for nothing.
# </details>

# %% [markdown]
# ---
# ## Exercise 4 · Fewer bytes, fewer messages
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 55 | 16, section 2; 04, sections 5 and 15 | at most 6 calls, no more than a flat ring over the cable |
#
# The program exchanges each gradient by itself, and sends more over the cable than one flat ring would. Write an
# exchange that gives the mean over all ranks, in place, for any list of gradients: each gradient to 1 % of its own
# largest number, on two or three hosts with two ranks, by collectives in which all ranks take part. `inside` are the
# ranks of this host, `across` those with this rank's place on all hosts.
#
# **Product:** a function that `train(exchange=…)` takes. **Points:** modelled seconds of the reference, divided by
# yours, on the cable of your seed.


# %%
# {{exchange}}


# %%
check.exchange(exchange)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `torch.cat` of all gradients, flattened, is one tensor; `split` and `view_as` take it apart again.
# </details>
# <details><summary>Hint 2</summary>
#
# Reduce-scatter inside, all-reduce across, all-gather inside. The length must be divisible by the ranks of a host, so
# put zeros at the end.
# </details>
# <details><summary>Hint 3</summary>
#
# bf16 keeps a number to 0.4 %, which is less than the 1 % that is allowed. Only what crosses the cable has to be
# narrow. On many hosts a sum in bf16 loses more with each addition; that is why sums of gradients often stay in fp32.
# </details>

# %%
cable = job(seed).cable
for name, fn in (("as found", faults.program.mean_gradients), ("yours", exchange)):
    counted = results.exchange_counts(fn)
    sent = f"{counted.cable_bytes / 1e3:4.0f} kB over the cable, {counted.messages:2} messages"
    print(f"{name:9}{sent}: {1e3 * counted.seconds(cable):.1f} ms (modelled)")

# %% [markdown]
# ---
# ## Exercise 5 · A host dies
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 50 | 16, sections 5, 7 and 13; 04, section 18 | on with half of the ranks, at most one step twice |
#
# The ranks of host 1 are killed in the middle of a run, and host 0 goes on alone. The program calls
# `checkpoint(folder)` as it starts, and `checkpoint(folder, step, state)` on all ranks after every second step, where
# `step` is the number of steps that are done. Write this function. The check kills for real, and once in the middle of
# a save, so that a part of a file lies there.
#
# **Product:** a function that `train(checkpoint=…)` takes. **Points:** each step computed twice without need costs
# points.


# %%
# {{checkpoint}}


# %%
check.checkpoint(checkpoint, seed)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# All ranks have the same state, so one of them can write. (In a sharded plan each has a part.) The others wait:
# else a host may die while the file is not there yet.
# </details>
# <details><summary>Hint 2</summary>
#
# A name must not exist before all of the file is there. `os.replace` renames at one stroke. (Against a loss of power
# `os.fsync` comes before it, else the name may reach the disk before the numbers do. Here processes die.)
# </details>
# <details><summary>Hint 3</summary>
#
# Save `(step, state)` with `torch.save` into a file with another name. Rename it to one with the step in it, with
# leading zeros, and let the start take the last of the sorted names.
# </details>

# %% [markdown]
# ---
# ## Exercise 6 · The report
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 45 | 12, section 17; 05 | at most 60 lines and 500 words; no figure that is not a fact |
#
# The next cell runs all your answers on the job of your seed and collects the facts. A part without an answer, or
# refused by its check, gets no points, and a sentence says so.

# %%
answers = {fn.__name__: fn for fn in (plan_run, start, repairs, exchange, checkpoint)}
facts = results.facts_of(seed, answers)
for name, fact in facts.items():
    print(f"{name}: {fact}")

# %% [markdown]
# Write the page for the customer, as a function of such facts. Each fact is a text, or a number with its unit and how
# it is known. Put every fact into the page; on the line of a number stand its unit and the word *counted*, *measured*
# or *modelled*; the budget is *given*. Other figures do not belong there; small whole numbers may count things. What
# follows from the facts you say in words: what you do not know, on a line that begins with *Not known:*, and what the
# customer should do and why, on one that begins with *Recommendation: start* or *Recommendation: do not start*. It
# depends on `facts["cost"]` and `facts["budget"]`, which are there if part 1 was done.
#
# **Product:** a page of Markdown. **Points:** all, or none.


# %%
# {{report}}


# %%
check.report(report, facts)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A loop over `facts.items()`; `isinstance(fact, str)` tells texts from numbers.
# </details>
# <details><summary>Hint 2</summary>
#
# A table has a line for each fact: what, figure, how it is known.
# </details>
# <details><summary>Hint 3</summary>
#
# `f"{number:,.6g}"` keeps six digits of any number.
# </details>

# %% [markdown]
# The page, the points, and the certificate. `out="my_name.json"` writes it into a file, which
# `results.verify` reads; a folder of such files makes the table of a class.

# %%
page = report(facts)
made = results.certificate(facts, page, name="your name")
print(made["points"], f"in all {made['total']}, digest {made['digest'][:12]}", sep="\n")

# %%
print(page)
print(results.table())

# %% [markdown]
# You will find the lesson here: [18 capstone](../notebooks/18_capstone.ipynb).
