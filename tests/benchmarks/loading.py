"""Measure ways to load the same 2,000 images: `DataLoader`, FFCV, six other libraries, and the steps between.

    python tests/benchmarks/loading.py [--quick] [--ways ffcv_raw,dataloader] [--rounds 3] [--store]

Ways take turns, each in a process of its own and, if it needs other packages, in an environment of its own, made once
under `.bench` (or COURSE_BENCH_ENVS). Prints tables and writes JSON; nothing is asserted. Give it a quiet machine.
"""

import argparse
import json
import os
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

from course_utils import ffcv_fixes
from course_utils.images import ImageFolder, image_folder

DOCS = environments.ROOT / "docs" / "loading.json"
BASE = ("numpy", "pillow")
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
    workers: tuple[int, ...] = (1, 2)
    base: tuple[str, ...] = BASE
    removed: tuple[str, ...] = ()
    note: str = ""


WAYS = [
    Way("dataloader", "DataLoader, PIL", "PIL", "JPEG files", "processes", workers=(0, 1, 2, 4)),
    Way("ffcv_raw", "FFCV, raw", "none", ".beton", "threads"),
    Way("ffcv_mixed", "FFCV, mixed", "TurboJPEG, half", ".beton", "threads"),
    Way("ffcv_jpeg", "FFCV, JPEG", "TurboJPEG", ".beton", "threads"),
    Way("webdataset", "WebDataset", "PIL", "tar files", "processes", ("webdataset==1.0.2",)),
    Way("litdata", "LitData", "PIL", "chunks", "processes", ("litdata==0.2.76",)),
    Way(
        "mosaicml_streaming", "MosaicML Streaming", "PIL", "MDS shards", "processes",
        ("mosaicml-streaming==0.13.0",), base=("pillow",), removed=("torchvision",),
        note="without torchvision, which it installs, and with it its part for torchvision's data sets",
    ),
    Way("grain", "Grain", "PIL", "JPEG files", "processes", ("grain==0.2.18",)),
    Way("spdl", "SPDL", "PIL", "JPEG files", "threads", ("spdl==0.8.0",), note="its threads, with PIL"),
    Way("dali", "DALI on CPU", "its own", "JPEG files", "threads", ("nvidia-dali-cuda130==2.4.0",)),
    Way("dataloader_cv2", "DataLoader, OpenCV", "OpenCV", "JPEG files", "processes"),
    Way("dataloader_raw", "DataLoader, OpenCV, pixels", "none", "mapped pixels", "processes"),
    Way("threads_jpeg", "threads, OpenCV", "OpenCV", "JPEG files", "threads"),
    Way("threads_raw", "threads, OpenCV, pixels", "none", "mapped pixels", "threads"),
    Way("ffcv_jpeg_python", "FFCV, JPEG, not compiled", "TurboJPEG", ".beton", "one thread", workers=(1,)),
    Way("ffcv_raw_python", "FFCV, raw, not compiled", "none", ".beton", "one thread", workers=(1,)),
]  # fmt: skip
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


def one_run(way: Way, python: Path, images: Path, data: Path, workers: int, seconds: float, **more: str) -> dict:
    """Seconds of one process's epochs, as `loading_ways` prints them."""
    command = [python, WAYS_FILE, way.key, images, data, workers, seconds]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | more
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, env=environment, cwd=data
    )
    if done.returncode:
        raise RuntimeError(" / ".join(done.stderr.strip().splitlines()[-2:])[-300:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def summary(runs: list[dict]) -> dict:
    """The fastest epoch, which other processes disturb least, the median, CPU time of an image over all processes."""
    speeds = [epoch["images"] / epoch["s"] for run in runs for epoch in run["epochs"]]
    cpu = [1e3 * epoch["cpu_s"] / epoch["images"] for run in runs for epoch in run["epochs"]]
    return {
        "images_per_s": max(speeds),
        "median": statistics.median(speeds),
        "epochs": len(speeds),
        "cpu_ms_per_image": statistics.median(cpu),
        "first_batch_s": statistics.median(run["first_s"] for run in runs),
    }


def give_up(row: dict, error: Exception) -> None:
    row["unavailable"] = str(error).replace(str(Path.home()), "~")
    say(f"{row['name']}: {row['unavailable']}")


def compile_times(images: Path, folder: Path) -> dict[str, float]:
    """Seconds to FFCV's first batch: never compiled before, compiled by an earlier process, without our fixes."""
    way = next(way for way in WAYS if way.key == "ffcv_raw")
    data = folder / "ffcv"
    with tempfile.TemporaryDirectory() as empty:
        runs = [
            one_run(way, Path(sys.executable), images, data, 2, 0.0, NUMBA_CACHE_DIR=empty)["first_s"] for _ in range(2)
        ]
    unfixed = one_run(way, Path(sys.executable), images, data, 2, 0.0, COURSE_BENCH_UNFIXED="1")["first_s"]
    return {"cold_s": runs[0], "next_process_s": runs[1], "without_fixes_s": unfixed}


def measure(args: argparse.Namespace) -> dict:
    folder = image_folder(count=args.images)
    images, work = folder / "train", environments.CACHE / "loading" / folder.name
    rows, pythons, runs = {}, {}, {}
    for way in args.ways:
        rows[way.key] = {"name": way.name, "decoder": way.decoder, "storage": way.storage}
        rows[way.key] |= {"workers_are": way.workers_are, "note": way.note, "by_workers": {}}
        data = work / way.key.partition("_")[0]
        data.mkdir(parents=True, exist_ok=True)
        try:
            if way.key.startswith("ffcv") and (reason := ffcv_fixes.missing()):
                raise RuntimeError(reason)
            python = environments.python_of(way, way.base, way.removed)
            rows[way.key]["versions"] = environments.versions(python, way, way.base)
            pythons[way.key] = python, data
        except (RuntimeError, subprocess.SubprocessError) as error:
            give_up(rows[way.key], error)
    end = time.monotonic() + 60 * args.minutes
    for number in range(args.rounds):
        for way in args.ways:
            for workers in (1,) if args.quick else way.workers:
                if way.key not in pythons or (number and time.monotonic() > end):
                    continue
                try:
                    run = one_run(way, pythons[way.key][0], images, pythons[way.key][1], workers, args.seconds)
                except (RuntimeError, subprocess.SubprocessError) as error:
                    give_up(rows[way.key], error)
                    del pythons[way.key]
                    continue
                runs.setdefault((way.key, workers), []).append(run)
                speed = [round(epoch["images"] / epoch["s"]) for epoch in run["epochs"]]
                say(f"round {number + 1}: {way.name}, {workers} workers: {speed} images/s")
    for (key, workers), found in runs.items():
        rows[key]["by_workers"][str(workers)] = summary(found)
    sample = map(ImageFolder(images).__getitem__, range(0, args.images, 50))
    pixels = [image.width * image.height for image, _ in sample]
    result = {
        "machine": {"cores": os.cpu_count(), "python": sys.version.split()[0], "torch": version("torch")},
        "quick": args.quick,
        "images": {"count": args.images, "mean_pixels": statistics.mean(pixels), "out": [224, 224], "batch": 64},
        "rounds": max(map(len, runs.values()), default=0),
        "seconds": args.seconds,
        "ways": rows,
    }
    if "ffcv_raw" in pythons and not args.quick:
        say("time to compile")
        result["compile"] = compile_times(images, work)
    return rounded(result)


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def best(row: dict) -> tuple[float, str]:
    """Most images a second over the numbers of workers, and that number."""
    return max((at["images_per_s"], workers) for workers, at in row["by_workers"].items())


def markdown(result: dict) -> str:
    rows = {key: row for key, row in result["ways"].items() if row["by_workers"]}
    lines = []
    for row in rows.values():
        at = row["by_workers"]
        cells = [f"{at[n]['images_per_s']:.0f}" if n in at else "" for n in ("0", "1", "2", "4")]
        speed, workers = best(row)
        lines.append([row["name"], row["decoder"], row["storage"], row["workers_are"], *cells])
        lines[-1].append(f"{at[workers]['cpu_ms_per_image']:.2f}")
    head = ["way", "decoder", "storage", "workers", "0", "1", "2", "4", "CPU ms an image"]
    text = ["Images a second (the fastest epoch), by number of workers\n\n" + table(head, lines)]
    for row in result["ways"].values():
        if "unavailable" in row:
            text.append(f"{row['name']} was not measured: {row['unavailable']}")
    if "dataloader" in rows:
        base, workers = best(rows["dataloader"])
        goals = [
            [row["name"], f"{best(row)[0] / base:.2f}", f"{GOALS[row['name']]:.0f}"]
            for row in rows.values()
            if row["name"] in GOALS
        ]
        head = f"Against DataLoader with its best number of workers, {workers}"
        text.append(head + "\n\n" + table(["", "times", "goal"], goals))
    for title, steps in STEPS.items():
        steps = [(name, reason, best(rows[key])[0]) for name, reason, key in steps if key in rows]
        before = [None, *(speed for *_, speed in steps)]
        lines = [
            [name, reason, f"{speed:.0f}", f"x {speed / last:.2f}" if last else ""]
            for (name, reason, speed), last in zip(steps, before, strict=False)
        ]
        text.append(f"From DataLoader to {title}\n\n" + table(["", "reason", "images/s", ""], lines))
    if "compile" in result:
        text.append(f"Seconds to FFCV's first batch: {result['compile']}")
    return "\n\n".join(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    keys = [way.key for way in WAYS]
    parser.add_argument("--quick", action="store_true", help="a smoke run: 200 images, one worker, one round")
    parser.add_argument("--ways", default=",".join(keys), help=f"comma-separated; of {', '.join(keys)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60, help="begin no further round after so many")
    parser.add_argument("--seconds", type=float, default=2, help="of epochs that are timed, in each process")
    parser.add_argument("--output", type=Path, default=environments.CACHE / "loading.json")
    parser.add_argument("--store", action="store_true", help="write docs/loading.json, which lesson 15 shows")
    parser.add_argument("--render", type=Path, help="measure nothing: tables from this JSON")
    args = parser.parse_args()
    if unknown := set(args.ways.split(",")) - set(keys):
        parser.error(f"unknown ways {sorted(unknown)}; allowed are {', '.join(keys)}")
    args.ways = [way for way in WAYS if way.key in args.ways.split(",")]
    args.images = 200 if args.quick else 2000
    if args.quick:
        args.rounds, args.seconds = 1, 0.1
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
