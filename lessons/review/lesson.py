# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What do you still know?
#
# What was understood once is gone in a month, unless somebody asks again. This notebook asks: more than a hundred
# questions of all lessons, each with other numbers every time, and thirty that an interviewer would ask aloud. What you
# got wrong comes again soon, what you knew comes again later. No ranks are started.
#
# **You will be able to**
# - *find* what you have forgotten, topic by topic;
# - *compute* bytes, seconds and memory on paper, and *name* the usual wrong answers;
# - *explain* the main ideas of the course aloud, in an interview of 45 minutes.
#
# **Before this:** the lessons that you want to be asked about; each question names its lesson and section. **Time:**
# about 5 minutes to read, under half a minute to run. Ten questions take some fifteen minutes.

# %% [markdown]
# ## How it works
#
# Take paper. Write a number into the field and press *Enter*, or press one of the options. *Tab* goes from one to the
# next; the space bar presses a button and opens a fold. Your first answer counts. A well-known wrong answer is told
# from others: you learn what it would be the answer to. Then try again, or open the fold *Answer*.
#
# A question that you answered well comes again after 1 day, then after 3, 7, 21 and 60 days; one that you did not, in
# the next run. Results are kept in `work/predictions.json`, beside your predictions, and nowhere else.

# %% tags=["parameters"]
from lessons.review.ask import QUESTIONS, SPOKEN, interview, review, say_aloud
from lessons.review.progress import progress

until = "19"  # the last lesson that you have read
seed = 1  # another number: other questions first, with other numbers in them

# %% [markdown]
# ## 1. Ten questions
#
# Those that are due come first, then new ones, of all topics in turn. Run the cell again for ten more.

# %%
review(10, until=until, seed=seed)

# %% [markdown]
# ## 2. One topic, or one lesson
#
# Before an exam or a meeting you may want to be asked about one thing only. These are the topics:

# %%
for topic, rows in QUESTIONS.items():
    lessons = sorted({row.place[:2] for row in rows})
    print(f"{topic:20} {len(rows):2} questions, lessons {', '.join(lessons)}")

# %% [markdown]
# Change the topic, or write `lesson="06"` in its place.

# %%
review(5, topic="Memory", seed=seed)

# %% [markdown]
# ## 3. Aloud
#
# Speak, to somebody or to the wall, for three minutes, and open the fold only then. Mark yourself: whoever listens
# wants to hear most of these points, with numbers, and what the idea costs.

# %%
print(", ".join(SPOKEN))
say_aloud(3, until=until, seed=seed)

# %% [markdown]
# ## 4. A mock interview
#
# Six questions of six topics in 45 minutes. The clock runs from your click and stops nobody. Better with two:
# one asks, listens for the points, and asks once more *why*.

# %%
interview(seed=seed)

# %% [markdown]
# ## 5. Where you stand
#
# For each lesson: cells that have run, predictions that you made, checks that your answers passed. It is read from the
# notebooks in your copy as they were last saved, so save first (*File → Save All*). The table is kept in
# `work/progress.txt`. Nothing is sent anywhere.

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## Recap
#
# - Ask yourself before you read again: an answer that you had to find stays longer than one that you have read.
# - Wrong answers have causes: a factor of two, bits for bytes, N divided out twice. Know yours.
# - `docs/paths.md` in the course's folder has plans for some weeks, with hours and reviews.
#
# **Worth reading**
# - J. Dunlosky and others, *Improving Students' Learning With Effective Learning Techniques*, 2013,
#   [doi 10.1177/1529100612453266](https://doi.org/10.1177/1529100612453266): being asked, and with days between, came
#   out best of ten techniques.
# - N. J. Cepeda and others, *Spacing Effects in Learning*, 2008,
#   [doi 10.1111/j.1467-9280.2008.02209.x](https://doi.org/10.1111/j.1467-9280.2008.02209.x): how long the gaps should
#   be.
