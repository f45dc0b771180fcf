"""Measure what lessons 10 and 12 wait for: a simulated schedule, and the search of all layouts of a cluster.

    python benchmarks/planner.py [--quick] [--output FILE]

Prints a table with the goals beside; nothing is asserted.
"""

from common import main, median, table

from course_utils.transformer import PUBLISHED
from lessons.parallelism_3d import planner
from lessons.pipeline_parallel import pipeline

GOALS = {"schedule_s": 1.0, "search_s": {1024: 2.0, 16384: 20.0}}


def schedules(ranks: int, microbatches: int, repeats: int) -> list[dict]:
    """Make and simulate every schedule but the naive one."""
    rows = []
    for name, make in pipeline.SCHEDULES.items():
        if name != "naive":
            seconds = median(lambda make=make: pipeline.simulate(make(ranks, microbatches)), repeats)
            rows.append({"name": name, "ranks": ranks, "microbatches": microbatches, "s": seconds})
    return rows


def searches(sizes: list[int], repeats: int) -> list[dict]:
    """Plan all layouts of these numbers of GPUs, with a sequence for each GPU."""
    cases = [(*case, sizes[0]) for case in (("Llama 3 70B", "DGX H100"), ("GPT-3 175B", "DGX A100"))]
    cases += [("Llama 3 405B", "DGX H100", gpus) for gpus in sizes[1:]]
    rows = []
    for model, machine, gpus in cases:
        arguments = PUBLISHED[model], planner.cluster(machine, gpus), gpus
        seconds = median(lambda arguments=arguments: planner.search(*arguments), repeats)
        found = planner.search(*arguments)
        refused = sum(found.refused.values())
        rows.append({"model": model, "gpus": gpus, "legal": len(found.plans), "refused": refused, "s": seconds})
    return rows


def measure(quick: bool) -> dict:
    ranks, microbatches, sizes, repeats = (4, 8, [64], 1) if quick else (64, 512, [1024, 16384], 5)
    made, found = schedules(ranks, microbatches, repeats), searches(sizes, repeats)
    return {"quick": quick, "schedules": made, "searches": found}


def markdown(result: dict) -> str:
    """What was measured, with the goals."""
    simulated = [
        [row["name"], f"{row['ranks']} × {row['microbatches']}", f"{row['s']:.2f} s",
         f"below {GOALS['schedule_s']:.0f} s"]
        for row in result["schedules"]
    ]
    searched = [
        [row["model"], *(str(row[key]) for key in ("gpus", "legal", "refused")), f"{row['s']:.2f} s",
         f"below {GOALS['search_s'].get(row['gpus'], 2.0):.0f} s"]
        for row in result["searches"]
    ]
    return "\n\n".join([
        "## A schedule, made and simulated (median)",
        table(["schedule", "stages × micro-batches", "taken", "goal"], simulated),
        "## All layouts of a cluster, planned and ranked (median)",
        table(["model", "GPUs", "legal", "refused", "taken", "goal"], searched),
        "A smoke run." if result["quick"] else "On one core.",
    ])


if __name__ == "__main__":
    main(measure, markdown)
