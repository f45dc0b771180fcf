# %% [markdown]
# # The loss falls. Is the run all right?
#
# A team at Hugging Face trained SmolLM3, a model of three billion parameters, on 384 GPUs. For two days throughput was
# stable, the loss fell as expected, and nothing in the logs pointed to a problem. Then, after a trillion tokens,
# evaluations showed that an older model, about half as large, had been better at the same point. The team found one
# line at fault and started again from zero ([The Smol Training
# Playbook](https://huggingface.co/spaces/HuggingFaceTB/smol-training-playbook), 2025).
#
# This lesson tells five days of a small team that trains small models. The team is invented, its faults are real: each
# was reported in public by people who trained something larger, and each happens again here, on your ranks. A day
# begins with a page of the log. You say what you believe is wrong, and a cell tests it.
#
# **You will be able to**
# - *say* what a log cannot tell, and *write down* a hypothesis before you touch anything;
# - *test* a hypothesis about a run in one cell, with a number that would be different if you were wrong;
# - *recognize* five faults of distributed training that raise no error;
# - *choose* the few lines that your own log should have from the first step.
#
# **Before this:** [04 ddp](04_ddp.ipynb), [09 tensor parallel](09_tensor_parallel.ipynb),
# [13 profiling](13_profiling.ipynb). **Time:** about 45 minutes to read, under a minute to run.

# %% tags=["parameters"]
import math
from statistics import median

import torch
import torch.distributed as dist

from course_utils import attempt, launch
from course_utils.draw.panels import loss_curves
from course_utils.predictions import predict, predictions
from course_utils.programs import folded
from lessons.a_run_that_went_wrong import runs
from lessons.a_run_that_went_wrong.runs import PAD, held_out, spread, token_sum

world_size = 2  # ranks of the team's runs: 2, 3 or 4
steps = 60  # of a day

# %% [markdown]
# ## 1. How to read the pages
#
# A page has a configuration and a log. The log has the loss, averaged over all ranks, the norm of the gradient |g| and
# the norm of the weights |w|, both as rank 0 sees them. The model is the small GPT of the course, with 12 heads.
#
# Below each page you choose a **hypothesis**, a sentence about the cause. It is worth something only if you can say
# what you would see if it were true, and what you would see if it were not. Then a cell looks at exactly that, with
# three functions:
#
# | function | on every rank it gives |
# |---|---|
# | `spread(tensor)` | how far a tensor differs between ranks, 0 if it is the same on all |
# | `held_out(model)` | the loss on text that nobody trains on |
# | `token_sum(model, x, y)` | the sum of the losses of all tokens that count |
#
# ## 2. Day 1: two copies of a program
#
# The model will not fit on one GPU, so the first day begins with tensor parallelism (lesson 09). Each rank draws its
# own pieces of every matrix, because nobody has room for the whole. Embeddings and norms are whole on each rank.
#
# ```
# tensor parallel: all ranks    text: the same on all ranks    seed: 1    AdamW, lr 3e-3
# ```
#
# Two of the team have started it, from copies of the program that differ in one line. One of the two has a fault from
# the first step on. Both authors are sure of their copy.
#
# **Predict**: read both logs. Which copy has the fault?

# %%
day_1 = {}
for copy in "AB":
    day_1[copy] = launch(runs.day_1, copy, steps, world_size=world_size)[0][1]
    print(f"copy {copy}")
    day_1[copy].show()

which = predict("by the log, the fault is in", ["A", "B", "it cannot be told"])

# %%
curves = {f"copy {copy}": (range(steps), log.losses) for copy, log in day_1.items()}
loss_curves(curves, "the first day, twice (measured)", wide=["copy A"])

# %% jupyter={"source_hidden": true}
apart = [abs(a - b) for a, b in zip(day_1["A"].losses, day_1["B"].losses, strict=True)]
assert max(apart) < 0.3
print(f"losses differ by {median(apart):.2f} in the middle, {max(apart):.2f} at most")
which.compare("it cannot be told")

# %% [markdown]
# **Compare.** It cannot be told. The curves differ by hundredths, now in favor of one copy and now of the other.
#
# *The figure: the losses of both copies over 60 steps, almost one curve: from 4.9 down to 3.2 within 20 steps, then
# level, with the same small waves, because both read the same text.*
#
# So look at what must hold, whatever the loss is. Under tensor parallelism all ranks have the same text, what is whole
# is the same on all of them, and pieces are different. In copy A the third was false at the start: all of its ranks
# have drawn their pieces with seed 1.
#
# **Predict**: what are the pieces of copy A after 60 steps of training?

# %%
choices = ["as different as in B", "nearly equal", "equal"]
pieces = predict("pieces of copy A after training", choices)


# %%
def compare_ranks(copy):
    """How far ranks differ: in a batch, in a tensor that each has whole, in a piece; and a loss."""
    model, _ = runs.day_1(copy, steps)
    x, _ = runs.batch(0, alike=True)
    piece = model.blocks[0].mlp.own.up.weight  # this rank's part of a matrix
    return {
        "text: ranks differ by": spread(x),
        "embeddings: ranks differ by": spread(model.embedding.weight),
        "pieces: ranks differ by": spread(piece),
        "held-out loss": held_out(model),
    }


ranks_of = {copy: launch(compare_ranks, copy, world_size=world_size)[0] for copy in "AB"}
print(f"{'copy':28}{'A':>8}{'B':>8}")
for name in ranks_of["A"]:
    print(f"{name:28}{ranks_of['A'][name]:8.3f}{ranks_of['B'][name]:8.3f}")

# %% jupyter={"source_hidden": true}
a, b = ranks_of["A"], ranks_of["B"]
assert a["pieces: ranks differ by"] < 1e-5 and b["pieces: ranks differ by"] > 0.05
assert abs(a["held-out loss"] - b["held-out loss"]) < 0.2
pieces.compare("equal" if a["pieces: ranks differ by"] < 1e-5 else "nearly equal")

# %% [markdown]
# **Compare.** They are equal, and training never makes them different. Ranks with equal pieces compute equal outputs,
# so they get equal gradients and take equal steps.
#
# All ranks compute the same heads and the same features of the MLP, and an all-reduce adds them up. So the job pays for
# N pieces and trains one. This is the line in which the copies differ:
#
# ```python
# torch.manual_seed(1)                    # copy A, before each rank draws its pieces
# torch.manual_seed(1 + dist.get_rank())  # copy B
# ```
#
# This was the fault of SmolLM3: all tensor-parallel ranks had the same seed. It was found by elimination. The older
# model had been trained without tensor parallelism, so the team trained a model of 1.7 billion parameters both ways.
# With tensor parallelism its loss was higher and its scores were lower. The cure is one line: the seed plus the rank's
# place in its tensor-parallel group. It was found within a day, once somebody had noticed the gap.
#
# Our run is too short to show the gap: on text that nobody trains on, both copies are about equally good. So do not
# judge an initialization by a short run. Test it by a number that must not be 0. What is whole needs the opposite, the
# same seed on all ranks. On a mesh both rules hold at once, which is exercise 1.
#
# ## 3. Day 2: documents instead of windows
#
# The next model fits on one GPU, so ranks are data parallel from here on. The text is now cut at the ends of documents,
# so sequences have different lengths, and what follows an end is padding, which does not count. Sequences are sorted by
# length and dealt out to the ranks in that order, and each rank computes two micro-batches. Before such a change goes
# live, one step of all ranks is compared with one process that has the whole batch: once with new weights, and once
# with weights that have learnt for 40 steps.
#
# ```
# data parallel: all ranks    micro-batches: 2    padding: ignored by the loss    gradients: averaged over ranks
# ```
#
# **Predict**: with new weights the losses agree, after 40 steps they do not. What is your hypothesis?

# %%
day_2 = {}
for learnt in (0, 40):
    day_2[learnt] = launch(runs.beside_one_process, runs.as_found, learnt, world_size=world_size)[0]
    loss, right, _ = day_2[learnt]
    print(f"after {learnt:2} steps: loss of the ranks {loss:.2f}, of one process {right:.2f}")

causes = ["weights differ", "a rank has other text", "rounding", "tokens do not count alike"]
hypothesis_2 = predict("the losses of day 2 differ, because", causes)


# %%
def tests_of_day_2(learnt):
    """One number for each hypothesis."""
    model, (x, y) = runs.trained(learnt), runs.documents(learnt)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weights = max(spread(p) for p in model.parameters())
    with torch.no_grad():
        whole = token_sum(model, x, y)
        sum_of_ranks = runs.summed(token_sum(model, x.chunk(ranks)[rank], y.chunk(ranks)[rank]))
    counts = [int((part != PAD).sum()) for part in y.chunk(ranks)]
    return weights, (sum_of_ranks / whole).item(), counts


weights, ratio, counts = launch(tests_of_day_2, 40, world_size=world_size)[0]
print(f"weights differ by {weights}")
print(f"sum of the losses of all tokens, ranks over one process: {ratio:.6f}")
print(f"tokens that count on each rank: {counts}")
for learnt, (*_, off) in day_2.items():
    print(f"gradient after {learnt:2} steps: off by {off:.0%}")

# %% jupyter={"source_hidden": true}
assert weights == 0 and abs(ratio - 1) < 1e-5 and min(counts) < max(counts) / 2
assert all(off > 0.2 for *_, off in day_2.values())
hypothesis_2.compare("tokens do not count alike")

# %% [markdown]
# **Compare.** Tokens do not count alike. Weights are the same. So is the sum over all tokens to six digits, so ranks
# have the right text, and rounding is too small to explain hundredths. What is left is how the sum is divided.
#
# The program took the mean of each micro-batch, then the mean of these means. This gives a token of a short document
# more weight than one of a long document (lesson 04, section 11). Look at the gradient with new weights: it is off by a
# quarter, while the losses agree to two digits, since a model that has learnt nothing is equally bad at all tokens. So
# compare gradients, not losses.
#
# In October 2024 Unsloth [reported](https://unsloth.ai/blog/gradient) that with gradient accumulation losses came out
# higher than with the whole batch. Hugging Face's trainer had the fault, too, and was [mended within a
# day](https://huggingface.co/blog/gradient_accumulation): divide by the tokens of all micro-batches together.
#
# **Predict**: each rank now divides by the tokens of all its micro-batches. Is the step of several ranks right?

# %%
first_fix = predict("with one denominator for each rank, a step is", ["right", "still off"])

# %%
three_ways = (runs.as_found, runs.of_the_rank, runs.of_all_ranks)
for divisor in three_ways:
    loss, right, off = launch(runs.beside_one_process, divisor, 40, world_size=world_size)[0]
    day_2[divisor.__name__] = off
    print(f"{divisor.__name__:13} loss {loss:.2f} for {right:.2f}, gradient off by {off:.0%}")

folded("The step, and what each of the three divides by", runs.one_step, *three_ways)

# %% jupyter={"source_hidden": true}
assert day_2["of_all_ranks"] < 1e-5 < 0.2 < day_2["of_the_rank"]
first_fix.compare("still off")

# %% [markdown]
# **Compare.** Still off, by about as much: now the mean of the ranks' means is taken. The number of tokens has to be
# that of all ranks.
#
# Two days after the announcement somebody [said so](https://github.com/huggingface/transformers/issues/34242), and an
# option for it [followed](https://github.com/huggingface/transformers/pull/34373), `average_tokens_across_devices`. So
# look for a mean of means at every level, micro-batches and ranks. Exercise 2 is a step that is right at both.
#
# ## 4. Day 3: a host died
#
# In the night a host died in the middle of the run. The job came back from its checkpoint with a flag that saves
# memory while it loads. In the morning the page looks like this.
#
# ```
# data parallel: all ranks    text: windows    resumed at step 30    AdamW, lr 3e-3, from the checkpoint
# ```
#
# Nobody was alarmed, because the loss had been nearly level before, too.
#
# **Predict**: look at all three columns, before and after step 30. What is your hypothesis?


# %%
def log_of_day_3():
    return runs.day_3(steps)[2]


launch(log_of_day_3, world_size=world_size)[0].show(every=5)
causes = ["the learning rate is 0", "ranks have drifted apart", "weights get no update"]
hypothesis_3 = predict("day 3, after step 30", causes)


# %%
def tests_of_day_3():
    model, optimizer, log = runs.day_3(steps)
    before = [p.detach().clone() for p in model.parameters()]
    runs.data_parallel(model, optimizer, log, range(steps, steps + 1))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {
        "learning rate": optimizer.param_groups[0]["lr"],
        "difference between ranks": max(spread(p) for p in model.parameters()),
        "weights moved by": runs.norm_of(map(torch.sub, model.parameters(), before)),
        "parameters of the model": len(before),
        "of these in the optimizer": sum(id(p) in held for p in model.parameters()),
    }


day_3 = launch(tests_of_day_3, world_size=world_size)[0]
for name, value in day_3.items():
    print(f"{name:25} {value}")

folded("The program of day 3: stop and resume", runs.day_3)

# %% jupyter={"source_hidden": true}
assert day_3["weights moved by"] == day_3["of these in the optimizer"] == 0 < day_3["learning rate"]
assert day_3["difference between ranks"] == 0
hypothesis_3.compare("weights get no update")

# %% [markdown]
# **Compare.** Weights get no update, because the optimizer holds none of them. It takes its steps on tensors that no
# model uses.
#
# The page has two signs. The norm of the weights stands still to the last digit, and the norm of the gradient grows
# from line to line, because `optimizer.zero_grad()` clears the gradients of *its* tensors, so those of the model add
# up. The program is in the fold below the numbers.
#
# `load_state_dict(…, assign=True)` puts the tensors of the file into the model in place of its own. The optimizer was
# built a line earlier and keeps the old ones. PyTorch's docstring says that it must be built afterwards. Other calls
# replace parameters as well: `fully_shard`, and under it a first forward
# ([pytorch#149205](https://github.com/pytorch/pytorch/issues/149205); lesson 07, section 16, shows both). Even
# PyTorch's recipe for resuming once gave the optimizer the parameters of another model
# ([tutorials#1430](https://github.com/pytorch/tutorials/issues/1430)). So do not rely on the order of lines. Assert
# before the first step what has to be true: the optimizer holds each parameter that should learn, as the last two
# numbers of the test count it.
#
# ## 5. Day 4: less memory
#
# The next model has the same parameters and twice the depth: each block is used twice. So there are more activations,
# and they are computed again in backward (lesson 05). The embeddings are frozen, and rank 0 writes the checkpoints.
#
# ```
# data parallel: all ranks    blocks: 2, each used twice    activation checkpointing: on    embeddings: frozen
# ```
#
# Something is wrong here, too. One of the three hypotheses below is excluded by the page. For the other two, say first
# what `spread` would give.
#
# **Predict**: what is your hypothesis?


# %%
def log_and_evaluation():
    model, log = runs.day_4(steps)
    return log, held_out(model)


day_4 = launch(log_and_evaluation, world_size=world_size)
day_4[0][0].show()
causes = ["weights get no update", "all ranks have one text", "ranks have drifted apart"]
hypothesis_4 = predict("day 4", causes)


# %%
def tests_of_day_4(reentrant=True):
    """Tensors, those that have moved, whether texts differ, and tensors that differ."""
    (model, _), (start, _) = runs.day_4(steps, reentrant), runs.day_4(0, reentrant)
    pairs = [*zip(model.parameters(), start.parameters(), strict=True)]
    moved = sum(not torch.equal(now, then) for now, then in pairs)
    apart = [spread(p) for p in model.parameters() if spread(p)]
    return len(pairs), moved, spread(runs.batch(0)[0]) > 0, len(apart), max(apart, default=0.0)


every, moved, other_text, tensors, largest = launch(tests_of_day_4, world_size=world_size)[0]
print(f"{moved} of {every} tensors have moved; ranks have different texts: {other_text}")
print(f"{tensors} tensors differ between ranks, by up to {largest:.2f}")
for rank, (_, evaluated) in enumerate(day_4):
    print(f"held-out loss of rank {rank}: {evaluated:.3f}")

# %% jupyter={"source_hidden": true}
assert moved == 27 and other_text and tensors == 24 and largest > 0.05
assert len({evaluated for _, evaluated in day_4}) == world_size
hypothesis_4.compare("ranks have drifted apart")

# %% [markdown]
# **Compare.** Ranks have drifted apart, in all 24 tensors of the blocks. There are now as many models as ranks.
#
# The page excluded the first hypothesis, since |w| moves; the two frozen embeddings are the tensors that did not. But
# it does not show the drift: each rank trains *something*, and the mean of their losses looks like a loss. The
# checkpoint, however, depends on the rank that writes it, as the last lines show.
#
# Of what is new since day 3, one thing should change memory and nothing else: activation checkpointing. There are two
# variants of it, and the run used the one that is called *reentrant*. The next cell tries two repairs: the same day
# with the other variant, and the weights of rank 0 sent to all others while the cause stays.


# %%
def repaired():
    """How far ranks differ: after a broadcast, and after one more step."""
    model, log = runs.day_4(steps)
    for p in model.parameters():
        dist.broadcast(p.detach(), src=0)
    after_broadcast = max(spread(p) for p in model.parameters())
    runs.data_parallel(model, runs.adam(model), log, range(steps, steps + 1))
    return after_broadcast, max(spread(p) for p in model.parameters())


*_, without, by = launch(tests_of_day_4, reentrant=False, world_size=world_size)[0]
print(f"reentrant False: {without} tensors differ between ranks, by up to {by:.2f}")
after_broadcast, a_step_later = launch(repaired, world_size=world_size)[0]
print(f"after a broadcast {after_broadcast}, after one more step {a_step_later:.4f}")
assert without == 0 == after_broadcast < a_step_later

# %% [markdown]
# With the other variant nothing drifts. After a broadcast ranks are equal, but a step later they differ again. Why?
#
# DDP averages a gradient when it is complete, and it takes a gradient as complete when backward first adds to it
# (lesson 04). Here each block is used twice, so backward adds twice, first for the second use. The reentrant variant
# starts a backward pass of its own for each use. When all second uses are done, DDP has a gradient for every trained
# parameter, because the embeddings are frozen. It averages them and ends the step. What the first uses add afterwards
# stays on each rank. With trained embeddings DDP would still wait for those, and notice:

# %% tags=["nbval-ignore-output"]
with attempt():
    launch(runs.day_4, 1, frozen=False, world_size=world_size)

# %% [markdown]
# This is the error that people [know](https://github.com/huggingface/peft/issues/313). The silent case was reported in
# 2024, with LoRA, where nearly everything is frozen, and several passes in one loss
# ([pytorch#121594](https://github.com/pytorch/pytorch/issues/121594), open when we read it). DDP's
# [documentation](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html) calls
# both unsupported. The cure is `use_reentrant=False`.
#
# Drift has other causes, too. On March 24, 2022, BLOOM's team found that gradients were not clipped on all of the four
# tensor-parallel ranks of a group, so the weights of layer norms, which should be copies, were not. The loss did not
# suffer, since each rank had learnt with its own, but no checkpoint could be merged. Four days later they repaired the
# live weights, and found after four steps that something else made them drift again
# ([chronicles](https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles.md)). So
# repair the state, look for the cause, and check again a few steps later.
#
# ## 6. Day 5: five percent
#
# The last page is not of our team. These lines are from BLOOM's log of April 28, 2022, on 48 nodes of 8 GPUs
# (*recorded*). It stayed so. Nothing had been restarted, and a benchmark of the network found all nodes equal.
#
# ```
# batch: 2,048 sequences of 2,048 tokens, always    checkpoint: 40 s, once in 100 steps
# ```
#
# Four hypotheses are near: a slow GPU, a slow loader, longer documents, checkpoints.
#
# **Predict**: which of them does the page leave?

# %%
print("    step  seconds    loss   |g|  TFLOP/s of a GPU")
for step, seconds, loss, norm, rate in runs.BLOOM:
    print(f"{step:8}{seconds:9.2f}{loss:8.3f}{norm:6.3f}{rate:9.2f}")

left = ["a slow GPU only", "a slow GPU or a slow loader", "all four"]
hypothesis_5 = predict("the page of BLOOM leaves", left)

# %%
(_, usual, *_, before), (_, longer, *_, after) = runs.BLOOM[0], runs.BLOOM[-1]
lost = 1 - after / before
print(f"{longer - usual:.1f} s more for each step; a checkpoint in 100 steps: {40 / 100} s a step")
print(f"{lost:.1%} of 384 GPUs: as if {384 * lost:.0f} of them were switched off")

# %% jupyter={"source_hidden": true}
assert 5 < longer - usual < 7
hypothesis_5.compare("a slow GPU or a slow loader")

# %% [markdown]
# **Compare.** A slow GPU or a slow loader. Checkpoints cost less in the mean and come seldom, and all sequences have
# one length.
#
# It was one slow GPU: after its replacement the rate came back. The page could not tell it from a slow loader, because
# in a synchronous job a slow rank makes all others wait, so the step becomes longer on every rank, whatever the cause
# is and wherever it sits. What tells ranks apart is each one's **own** time, without collectives (lessons 05 and 13).
# Here rank 2 of four computes its forward pass six times:

# %% tags=["nbval-ignore-output"]
measured = launch(runs.day_5, 8, slow=2, times=6, world_size=4)
for rank, times in enumerate(measured):
    own, whole = (median(column) for column in zip(*times[2:], strict=True))
    print(f"rank {rank}: own {own:4.1f} ms of a step of {whole:4.1f} ms")

# %% [markdown]
# All ranks have the same step, and only rank 2 has a long time of its own.
#
# At BLOOM it was a weekend, and those who had a tool to measure each GPU were away until Monday. There were three spare
# nodes. So the plan was to leave out three of the 48 nodes at each restart, until the rate was right, and then to
# search for the one among the three.
#
# **Predict**: how many restarts does this need at most?

# %%
restarts = predict("to find one node of 48, three left out at a time", unit="restarts at most")


# %%
def restarts_at_most(nodes, spare):
    """Leave out `spare` nodes at each restart; then halve the group that was to blame."""
    groups = math.ceil(nodes / spare)
    return groups + math.ceil(math.log2(spare))


print(f"{restarts_at_most(48, 3)} at most; with 24 spare nodes {restarts_at_most(48, 24)}")

# %% jupyter={"source_hidden": true}
restarts.compare(restarts_at_most(48, 3))

# %% [markdown]
# **Compare.** Up to 16 to find the three, and two more to find the one.
#
# A gate that measures every host before the training needs none (lesson 16, section 16). SmolLM3's team had one, and
# replaced two GPUs that slowed down. In another test of theirs the all-reduce fell from 350 to 100 GB/s beyond 14
# nodes, because of one GPU that was too hot (*recorded*, the playbook).
#
# ## 7. Which line would have told?
#
# | day | the loss | what told | costs |
# |---|---|---|---|
# | 1: equal pieces | falls | `spread(piece)` is 0 | once, at the start |
# | 2: mean of means | falls, off by hundredths | the gradient of one process | once, before the start |
# | 3: not held | level | \|w\| stands still; the optimizer holds 0 of 28 | once, after each start |
# | 4: drift | falls | `spread(weights)` is not 0 | two small all-reduces, every hundred steps |
# | 5: slow GPU | falls | each rank's own time | one number a rank and step |
#
# In none of them did the loss tell the cause, and in four it did not even tell that there was one.
#
# Numbers that *must* be equal, or must not be, are worth more than numbers that should be good, because they need no
# baseline. Where you have only the other kind, you need a run to compare with: SmolLM3's team had the checkpoints of an
# older model, and BLOOM's had a rate that had stood at 147 to 149 for weeks.
#
# A second rule is about people: write the hypothesis down before the test, as you did here. The team of OPT-175B took
# 148 pages of notes, with about 90 restarts of the run that succeeded in the end
# ([Meta](https://github.com/facebookresearch/metaseq/blob/main/projects/OPT/chronicles/final_update.md), 2022).
#
# Should a run start again when a fault is found? SmolLM3's did, because a wrong start cannot be mended while it goes
# on. BLOOM's went on, because its copies could be made equal again.
#
# ## Recap, with the numbers of this run

# %%
for copy in "AB":
    print(f"day 1, copy {copy}: pieces differ by {ranks_of[copy]['pieces: ranks differ by']:.2f}")
for way in ("as_found", "of_the_rank", "of_all_ranks"):
    print(f"day 2, {way}: gradient off by {day_2[way]:.0%}")
print(f"day 3: {day_3['of these in the optimizer']} of {day_3['parameters of the model']} held")
print(f"day 4: {tensors} tensors differ between ranks")
print(f"day 5: {lost:.1%} slower by one GPU (recorded)")

# %% [markdown]
# How your predictions came out:

# %%
predictions()

# %% [markdown]
# - A loss that falls says that something learns. It does not say what, nor on how many ranks, nor how well it could.
# - A hypothesis is a sentence and a number that would be different if the sentence were false.
# - Pieces must differ, copies must not. Each parameter that should learn is held. Tokens count alike on all ranks.
# - Compare one step with one process, by its gradient, with weights that have learnt something.
# - In a synchronous job everybody is as slow as the slowest. Ask for each rank's own time.
#
# **Now you can answer**
#
# 1. All ranks have equal weights, and the norm of the weights does not change. Which day is it?
# 2. You mend the seed of day 1 in a run that is half done. What happens?
# 3. A check of the sum of all weights on each rank finds no difference. Are the replicas equal?
#
# <details><summary>Answers</summary>
#
# 1. Day 3: the optimizer holds other tensors.
# 2. Nothing. Pieces that are equal stay equal, whatever seed is set from then on. It takes new weights, so a new start
#    (section 2).
# 3. Not necessarily: sums can agree by chance, or because numbers have changed places. Compare numbers one by one, or a
#    checksum that depends on the place (exercise 3).
# </details>
#
# **Exercises:** [exercises/19_a_run_that_went_wrong](../exercises/19_a_run_that_went_wrong_exercises.ipynb). **Next:**
# [20 review](20_review.ipynb).
#
# **Worth reading**
# - Hugging Face, [The Smol Training Playbook](https://huggingface.co/spaces/HuggingFaceTB/smol-training-playbook),
#   2025, the chapter on the training marathon: four mysteries, in the order in which they came.
# - BigScience, [chronicles of
#   BLOOM](https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles.md), 2022: a log
#   with what was believed at each moment.
# - Meta, [chronicles of OPT-175B](https://github.com/facebookresearch/metaseq/tree/main/projects/OPT/chronicles), 2021.
