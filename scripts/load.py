"""Load a server of `serve.py` with more and more clients, and say how long they wait. Plain Python.

    python scripts/load.py http://localhost:8000 --clients 1,4,16 --answers 40

A client asks, reads its answer to the end, and asks again. Each row of the table is one number of clients: how their
answers ended, the tokens a second of all, and milliseconds until the first token and between two tokens, the median and
what 95 of 100 stay within. With --limit it also says how many whole answers began within so many milliseconds.

An answer is whole, refused at the door, told (it ends with an error, which says why), or lost: it ends without a word.
The program ends with code 1 if an answer was lost.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

ENDINGS = ("whole", "refused", "told", "lost")


def read_answer(address: str, question: dict, timeout: float) -> tuple[str, float, list[float]]:
    """Ask, and read to the end: how the answer ended, when it was asked for, and when each of its tokens came."""
    begun, times, ending = time.perf_counter(), [], "lost"
    request = urllib.request.Request(f"{address}/generate", json.dumps(question).encode())
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            for line in map(json.loads, answer):
                times += [time.perf_counter()] if "token" in line else []
                ending = "whole" if "done" in line else "told" if "error" in line else "lost"
    except urllib.error.HTTPError:
        ending = "refused"
    except (OSError, http.client.HTTPException, ValueError):
        ending = "lost"
    return ending, begun, times


def share(values: list[float], part: float) -> float:
    """Milliseconds within which so large a part of the values lies."""
    return 1e3 * sorted(values)[int(part * (len(values) - 1))] if values else float("nan")


def measure(args: argparse.Namespace, clients: int) -> str:
    """Let so many clients ask; a row of the table."""

    def client(name: int) -> tuple[str, float, list[float]]:
        question = {"prompt": f"{args.prompt} {name % 4}", "new": args.new}
        return read_answer(args.address, question, args.timeout)

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(client, range(args.answers)))
    seconds, ended = time.perf_counter() - start, Counter(ending for ending, _, _ in answers)
    first = [times[0] - begun for _, begun, times in answers if times]
    gaps = [b - a for *_, times in answers for a, b in pairwise(times)]
    rate = sum(len(times) for *_, times in answers) / seconds
    row = f"{clients:7}" + "".join(f"{ended[ending]:{len(ending) + 2}}" for ending in ENDINGS) + f"{rate:10.0f}"
    row += f"{share(first, 0.5):12.0f}{share(first, 0.95):6.0f}{share(gaps, 0.5):15.1f}{share(gaps, 0.95):7.1f}"
    if args.limit:
        whole = [times[0] - begun for ending, begun, times in answers if times and ending == "whole"]
        row += f"{sum(wait <= args.limit / 1e3 for wait in whole):12}"
    return row


def main(args: argparse.Namespace) -> int:
    try:
        urllib.request.urlopen(f"{args.address}/health", timeout=10).close()
    except (OSError, ValueError) as error:
        sys.exit(f"no server answers at {args.address}, given as http://HOST:PORT: {error}")
    head = "clients" + "".join(f"  {ending}" for ending in ENDINGS) + f"{'tokens/s':>10}"
    head += f"{'first ms':>12}{'95 %':>6}{'between ms':>15}{'95 %':>7}"
    print(head + (f"  in {args.limit:g} ms" if args.limit else ""), flush=True)
    lost = 0
    for clients in args.clients:
        row = measure(args, clients)
        print(row, flush=True)
        lost += int(row.split()[4])
    return int(lost > 0)


def number(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"a whole number from 1 to 100000 is needed, got {text!r}")
    return int(text)


def numbers(text: str) -> list[int]:
    return [number(part) for part in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", type=lambda text: text.rstrip("/"), help="of the server: http://localhost:8000")
    parser.add_argument("--clients", type=numbers, default=[1, 4, 16], help="that ask at the same time, row by row")
    parser.add_argument("--answers", type=number, default=40, help="that all clients of a row ask for, together")
    parser.add_argument("--new", type=number, default=24, help="tokens of an answer")
    parser.add_argument("--prompt", default="Alice was reader", help="a number from 0 to 3 follows it")
    parser.add_argument("--limit", type=float, help="milliseconds until the first token that count as in time")
    parser.add_argument("--timeout", type=float, default=60, help="seconds without a byte, then an answer is lost")
    sys.exit(main(parser.parse_args()))
