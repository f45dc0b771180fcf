"""Which rank do the others wait for, and which one computes slowly? From the log of train.py.

    python stragglers.py run/log.jsonl
"""

import json
import sys
from pathlib import Path
from statistics import median


def report(lines: list[dict]) -> list[str]:
    """Return a line for each rank: how often it was last, what that cost the others, its own speed.

    A rank that comes last waits least: what the others waited longer, they waited for it.
    """
    ranks = range(len(lines[0]["wait_ms"]))
    last = [min(ranks, key=line["wait_ms"].__getitem__) for line in lines]
    cost = [max(line["wait_ms"]) - min(line["wait_ms"]) for line in lines]
    own = [median(line["product_ms"][rank] for line in lines) for rank in ranks]
    found = []
    for rank in ranks:
        share = last.count(rank) / len(lines)
        ms = sum(c for c, who in zip(cost, last, strict=True) if who == rank) / len(lines)
        slower = own[rank] / median(own)
        found.append(f"rank {rank}: last in {share:4.0%}, costs {ms:.2f} ms a step, product x {slower:.2f}")
    return found


if __name__ == "__main__":
    print(*report([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]), sep="\n")
