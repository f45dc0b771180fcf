"""Measure ways to load the same 2,000 images: `DataLoader`, FFCV, six other libraries, and the steps between.

    python benchmarks/loading.py [--quick] [--ways ffcv_raw,dataloader] [--rounds 9] [--store]

Each way has a process for each number of workers, and if it needs other packages an environment of its own, made once
under `.bench` (or COURSE_BENCH_ENVS). The processes live through the whole run and take turns of an epoch or a second,
in an order drawn anew for each round, so that a machine whose speed drifts is as slow for one as for the other: ways
are compared within a round. Prints tables and writes JSON; nothing is asserted. Give it a quiet machine.
"""

import argparse
import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import environments
from report import table

from lessons.ffcv_data_loading.ffcv import ImageFolder, image_folder, missing

DOCS = environments.ROOT / "docs" / "loading.json"
BASE = ("numpy", "pillow")
CORES = (1, 2)  # numbers of threads; processes also wait for each other, so more of them may help
WAYS_FILE = Path(__file__).with_name("loading_ways.py")


@dataclass(frozen=True)
class Way:
    """One way to load images: its `key` in `loading_ways`, what it needs beside torch, numbers of workers to try.

    `base`: packages in the course's own versions. `removed`: what does more harm than good there.
    """

    key: str
    name: str
    decoder: str
    storage: str
    workers_are: str
    packages: tuple[str, ...] | None = None
    workers: tuple[int, ...] = (1, 2, 4)
    base: tuple[str, ...] = BASE
    removed: tuple[str, ...] = ()
    note: str = ""


WAYS = [
    Way("dataloader", "DataLoader, PIL", "PIL", "JPEG files", "processes", workers=(0, 1, 2, 4)),
    Way("ffcv_raw", "FFCV, raw", "none", ".beton", "threads", workers=CORES),
    Way("ffcv_mixed", "FFCV, mixed", "TurboJPEG, half", ".beton", "threads", workers=CORES),
    Way("ffcv_jpeg", "FFCV, JPEG", "TurboJPEG", ".beton", "threads", workers=CORES),
    Way("webdataset", "WebDataset", "PIL", "tar files", "processes", ("webdataset==1.0.2",)),
    Way("litdata", "LitData", "PIL", "chunks", "processes", ("litdata==0.2.76",)),
    Way(
        "mosaicml_streaming", "MosaicML Streaming", "PIL", "MDS shards", "processes",
        ("mosaicml-streaming==0.13.0",), base=("pillow",), removed=("torchvision",),
        note="without torchvision, which it installs, and with it its part for torchvision's data sets",
    ),
    Way("grain", "Grain", "PIL", "JPEG files", "processes", ("grain==0.2.18",)),
    Way("spdl", "SPDL", "PIL", "JPEG files", "threads", ("spdl==0.8.0",), CORES, note="its threads, with PIL"),
    Way("dali", "DALI on CPU", "its own", "JPEG files", "threads", ("nvidia-dali-cuda130==2.4.0",), CORES),
    Way("dataloader_cv2", "DataLoader, OpenCV", "OpenCV", "JPEG files", "processes"),
    Way("dataloader_raw", "DataLoader, OpenCV, pixels", "none", "mapped pixels", "processes"),
    Way("threads_jpeg", "threads, OpenCV", "OpenCV", "JPEG files", "threads", workers=CORES),
    Way("threads_raw", "threads, OpenCV, pixels", "none", "mapped pixels", "threads", workers=CORES),
    Way("ffcv_jpeg_python", "FFCV, JPEG, not compiled", "TurboJPEG", ".beton", "one thread", workers=(1,)),
    Way("ffcv_raw_python", "FFCV, raw, not compiled", "none", ".beton", "one thread", workers=(1,)),
]
STEPS = {  # from DataLoader to FFCV, one change at a time
    "FFCV, JPEG": [
        ("DataLoader, PIL", "", "dataloader"),
        ("its decoder and resizing", "decoder", "dataloader_cv2"),
        ("threads, which write into the batch", "threads", "threads_jpeg"),
        ("FFCV: one file, a compiled loop", "storage, JIT", "ffcv_jpeg"),
    ],
    "FFCV, raw": [
        ("DataLoader, PIL", "", "dataloader"),
        ("its decoder and resizing", "decoder", "dataloader_cv2"),
        ("pixels in one mapped file", "storage", "dataloader_raw"),
        ("threads, which write into the batch", "threads", "threads_raw"),
        ("FFCV: a compiled loop", "JIT", "ffcv_raw"),
    ],
}
GOALS = {"FFCV, raw": 4.0, "FFCV, JPEG": 2.0}


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Running:
    """A process that waits for its turns; `first_s`: seconds from the made loader to its first batch."""

    def __init__(self, way: Way, python: Path, images: Path, data: Path, workers: int, **more: str) -> None:
        command = [str(part) for part in (python, WAYS_FILE, way.key, images, data, workers)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | more
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, cwd=data, env=environment
        )
        self.turns: list[dict] = []
        self.first_s = self._answer()["first_s"]

    def turn(self, seconds: float) -> float:
        """Run epochs for so many seconds; return images a second."""
        self.process.stdin.write(f"{seconds}\n".encode())
        self.process.stdin.flush()
        self.turns.append(self._answer())
        return self.turns[-1]["images"] / self.turns[-1]["s"]

    def _answer(self) -> dict:
        ready, _, _ = select.select([self.process.stdout], [], [], 180)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.close()
            self.errors.seek(0)
            last = " / ".join(self.errors.read().strip().splitlines()[-2:])[-300:]
            raise RuntimeError(last if ready else f"no answer within 180 s; {last}")
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def summary(self) -> dict:
        """Medians over the turns; CPU time of an image is that of all its processes."""
        speeds = [turn["images"] / turn["s"] for turn in self.turns]
        cpu = [1e3 * turn["cpu_s"] / turn["images"] for turn in self.turns]
        found = {"images_per_s": statistics.median(speeds), "cpu_ms_per_image": statistics.median(cpu)}
        return found | {"first_batch_s": self.first_s, "rounds": speeds}


def give_up(row: dict, error: Exception) -> None:
    row["unavailable"] = str(error).replace(str(Path.home()), "~")
    say(f"{row['name']}: {row['unavailable']}")


def compile_times(images: Path, folder: Path) -> dict[str, float]:
    """Seconds to FFCV's first batch: never compiled before, compiled by an earlier process, without our fixes."""
    way = next(way for way in WAYS if way.key == "ffcv_raw")

    def first(**more: str) -> float:
        run = Running(way, Path(sys.executable), images, folder / "ffcv", 2, **more)
        run.close()
        return run.first_s

    with tempfile.TemporaryDirectory() as empty:
        cold, again = first(NUMBA_CACHE_DIR=empty), first(NUMBA_CACHE_DIR=empty)
    return {"cold_s": cold, "next_process_s": again, "without_fixes_s": first(COURSE_BENCH_UNFIXED="1")}


def measure(args: argparse.Namespace) -> dict:
    folder = image_folder(count=args.images)
    images, work = folder / "train", environments.CACHE / "loading" / folder.name
    rows: dict[str, dict] = {}
    runs: dict[tuple[str, int], Running] = {}
    for way in args.ways:
        row = rows[way.key] = {"name": way.name, "decoder": way.decoder, "storage": way.storage}
        row |= {"workers_are": way.workers_are, "note": way.note, "by_workers": {}}
        data = work / way.key.partition("_")[0]
        data.mkdir(parents=True, exist_ok=True)
        try:
            if way.key.startswith("ffcv") and (reason := missing()):
                raise RuntimeError(reason)
            python = environments.python_of(way, way.base, way.removed)
            row["versions"] = environments.versions(python, way, way.base)
            for workers in (1,) if args.quick else way.workers:
                runs[way.key, workers] = Running(way, python, images, data, workers)
        except (RuntimeError, subprocess.SubprocessError) as error:
            give_up(row, error)
        say(f"{way.name} is ready")

    end, number = time.monotonic() + 60 * args.minutes, 0
    while number < args.rounds and (not number or time.monotonic() < end):
        number += 1
        say(f"round {number}")
        for key, run in random.Random(number).sample([*runs.items()], len(runs)):
            try:
                say(f"{key[0]}, {key[1]}: {run.turn(args.seconds):.0f} images/s")
            except RuntimeError as error:
                give_up(rows[key[0]], error)
                del runs[key]
    for (key, workers), run in runs.items():
        rows[key]["by_workers"][str(workers)] = run.summary()
        run.close()
    sample = map(ImageFolder(images).__getitem__, range(0, args.images, 50))
    pixels = [image.width * image.height for image, _ in sample]
    result = {
        "machine": {"cores": os.cpu_count(), "python": sys.version.split()[0], "torch": version("torch")},
        "quick": args.quick,
        "images": {"count": args.images, "mean_pixels": statistics.mean(pixels), "out": [224, 224], "batch": 64},
        "rounds": number,
        "seconds": args.seconds,
        "ways": rows,
    }
    if ("ffcv_raw", 2) in runs:
        say("time to compile")
        try:
            result["compile"] = compile_times(images, work)
        except RuntimeError as error:
            say(f"not measured: {error}")
    return rounded(result)


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def best(row: dict) -> str:
    """The number of workers with most images a second."""
    return max(row["by_workers"], key=lambda workers: row["by_workers"][workers]["images_per_s"])


def against(row: dict, base: dict) -> list[float]:
    """Times the speed of `base`, each with its best number of workers, round by round, in rising order."""
    pairs = (each["by_workers"][best(each)]["rounds"] for each in (row, base))
    return sorted(one / other for one, other in zip(*pairs, strict=True))


def shown(times: list[float]) -> list[str]:
    return [f"{statistics.median(times):.2f}", f"{times[0]:.2f} to {times[-1]:.2f}"]


def markdown(result: dict) -> str:
    rows = {key: row for key, row in result["ways"].items() if row["by_workers"]}
    lines = []
    for row in rows.values():
        at = row["by_workers"]
        cells = [f"{at[n]['images_per_s']:.0f}" if n in at else "" for n in ("0", "1", "2", "4")]
        lines.append([row["name"], row["decoder"], row["storage"], row["workers_are"], *cells])
        lines[-1].append(f"{at[best(row)]['cpu_ms_per_image']:.2f}")
    head = ["way", "decoder", "storage", "workers", "0", "1", "2", "4", "CPU ms an image"]
    text = [f"Images a second, by number of workers; medians of {result['rounds']} rounds\n\n" + table(head, lines)]
    for row in result["ways"].values():
        if "unavailable" in row:
            text.append(f"{row['name']} was not measured: {row['unavailable']}")
    if "dataloader" in rows:
        base = rows["dataloader"]
        goals = [
            [row["name"], *shown(against(row, base)), f"{GOALS[row['name']]:.0f}"]
            for row in rows.values()
            if row["name"] in GOALS
        ]
        head = f"Against DataLoader with its best number of workers, {best(base)}"
        text.append(head + "\n\n" + table(["", "times", "lowest and highest", "goal"], goals))
    for title, steps in STEPS.items():
        steps = [(name, reason, rows[key]) for name, reason, key in steps if key in rows]
        lines, before = [], None
        for name, reason, row in steps:
            times = ["x " + part for part in shown(against(row, before))] if before else ["", ""]
            lines.append([name, reason, f"{row['by_workers'][best(row)]['images_per_s']:.0f}", *times])
            before = row
        head = ["", "reason", "images/s", "", "lowest and highest"]
        text.append(f"From DataLoader to {title}\n\n" + table(head, lines))
    if "compile" in result:
        text.append(f"Seconds to FFCV's first batch: {result['compile']}")
    return "\n\n".join(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    keys = [way.key for way in WAYS]
    parser.add_argument("--quick", action="store_true", help="a smoke run: 200 images, one worker, one round")
    parser.add_argument("--ways", default=",".join(keys), help=f"comma-separated; of {', '.join(keys)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--minutes", type=float, default=60, help="begin no further round after so many")
    parser.add_argument("--seconds", type=float, default=1, help="at least, of each turn")
    parser.add_argument("--output", type=Path, default=environments.CACHE / "loading.json")
    parser.add_argument("--store", action="store_true", help="write docs/loading.json, which lesson 15 shows")
    parser.add_argument("--render", type=Path, help="measure nothing: tables from this JSON")
    args = parser.parse_args()
    if unknown := set(args.ways.split(",")) - set(keys):
        parser.error(f"unknown ways {sorted(unknown)}; allowed are {', '.join(keys)}")
    args.ways = [way for way in WAYS if way.key in args.ways.split(",")]
    args.images = 200 if args.quick else 2000
    if args.quick:
        args.rounds, args.seconds = 1, 0
    if args.store:
        args.output = DOCS
    return args


def main() -> None:
    args = arguments()
    begin = time.monotonic()
    result = json.loads(args.render.read_text()) if args.render else measure(args)
    print(markdown(result), flush=True)
    if not args.render:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        say(f"{args.output.name} written after {(time.monotonic() - begin) / 60:.1f} min")


if __name__ == "__main__":
    main()
