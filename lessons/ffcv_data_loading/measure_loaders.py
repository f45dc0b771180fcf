"""Measure ways to load the same 2,000 images: `DataLoader`, FFCV, six other libraries, and the steps between.

    python lessons/ffcv_data_loading/measure_loaders.py [--quick] [--ways ffcv_raw,dataloader] [--output FILE]

A way that needs other packages has an environment of its own, made once under `.bench` (or COURSE_BENCH_ENVS). In each
round all ways run once with each number of workers, for an epoch and a second more, in an order drawn anew, so that a
machine whose speed drifts is as slow for one as for the other: ways are compared within a round. Writes
docs/loading.json, which lesson 15 shows. Give it a quiet machine.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # not this folder, whose ffcv would hide the library
CACHE = Path(os.environ.get("COURSE_BENCH_ENVS", ROOT / ".bench"))
WAYS_FILE = Path(__file__).with_name("loader_ways.py")

from lessons.ffcv_data_loading.ffcv import ImageFolder, image_folder, missing  # noqa: E402
from lessons.ffcv_data_loading.loader_records import FILE  # noqa: E402


@dataclass(frozen=True)
class Way:
    """One way to load images: its `key` in `loader_ways`, what it needs beside torch, numbers of workers to try."""

    key: str
    name: str
    workers: tuple[int, ...]
    package: str = ""
    base: tuple[str, ...] = ("numpy", "pillow")  # packages in the course's own versions
    removed: str = ""  # what the package installs, and what does more harm than good here


PROCESSES, THREADS = (1, 2, 4), (1, 2)  # numbers to try; processes also wait for each other, so more may help
WAYS = [
    Way("dataloader", "DataLoader, PIL", (0, *PROCESSES)),
    Way("ffcv_raw", "FFCV, raw", THREADS),
    Way("ffcv_mixed", "FFCV, mixed", THREADS),
    Way("ffcv_jpeg", "FFCV, JPEG", THREADS),
    Way("webdataset", "WebDataset", PROCESSES, "webdataset==1.0.2"),
    Way("litdata", "LitData", PROCESSES, "litdata==0.2.76"),
    Way(
        "mosaicml_streaming", "MosaicML Streaming", PROCESSES, "mosaicml-streaming==0.13.0", base=("pillow",),
        removed="torchvision",
    ),
    Way("grain", "Grain", PROCESSES, "grain==0.2.18"),
    Way("spdl", "SPDL", THREADS, "spdl==0.8.0"),
    Way("dali", "DALI on CPU", THREADS, "nvidia-dali-cuda130==2.4.0"),
    Way("dataloader_cv2", "DataLoader, OpenCV", PROCESSES),
    Way("dataloader_raw", "DataLoader, OpenCV, pixels", PROCESSES),
    Way("threads_raw", "threads, OpenCV, pixels", THREADS),
]


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def run(way: Way, python: Path, images: Path, data: Path, workers: int, seconds: float, **more: str) -> dict:
    """Run a way once in a process of its own, which says what `loader_ways` prints."""
    command = [str(part) for part in (python, "-P", WAYS_FILE, way.key, images, data, workers, seconds)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | more
    data.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, cwd=data, env=environment, timeout=300)
    if done.returncode:
        raise RuntimeError(" / ".join(done.stderr.strip().splitlines()[-2:])[-300:])
    return json.loads(done.stdout)


def python_of(way: Way) -> Path:
    """The interpreter with a way's packages; its environment is made if it is not there."""
    if not way.package:
        return Path(sys.executable)
    torch, build = version("torch"), version("torch").partition("+")[2]
    python = CACHE / f"torch-{torch}-{way.package}" / "bin" / "python"
    complete = python.parents[1] / "complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(python.parents[1])], check=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        index = ["--extra-index-url", f"https://download.pytorch.org/whl/{build}"] if build else []
        pins = [f"{name}=={version(name)}" for name in way.base]
        subprocess.run([*pip, "install", *index, f"torch=={torch}", *pins, way.package], check=True, timeout=1800)
        if way.removed:
            subprocess.run([*pip, "uninstall", "--yes", way.removed], check=True)
        complete.touch()
    return python


def compile_times(images: Path, folder: Path) -> dict[str, float]:
    """Seconds to FFCV's first batch: never compiled before, compiled by an earlier process, without our fixes."""
    way = next(way for way in WAYS if way.key == "ffcv_raw")

    def first(**more: str) -> float:
        return run(way, Path(sys.executable), images, folder / "ffcv", 2, 0, **more)["first_s"]

    with tempfile.TemporaryDirectory() as empty:
        cold, again = first(NUMBA_CACHE_DIR=empty), first(NUMBA_CACHE_DIR=empty)
    return {"cold_s": cold, "next_process_s": again, "without_fixes_s": first(COURSE_BENCH_UNFIXED="1")}


def measure(args: argparse.Namespace) -> dict:
    folder = image_folder(count=args.images)
    images, work = folder / "train", CACHE / "loading" / folder.name
    rows = {way.key: {"name": way.name, "by_workers": {}} for way in args.ways}
    todo = [(way, workers) for way in args.ways for workers in ((1,) if args.quick else way.workers)]
    runs: dict[tuple[str, int], list[dict]] = {}
    for number in range(1, args.rounds + 1):
        for way, workers in random.Random(number).sample(todo, len(todo)):
            row = rows[way.key]
            if "unavailable" in row:
                continue
            try:
                if way.key.startswith("ffcv") and (reason := missing()):
                    raise RuntimeError(reason)
                one = run(way, python_of(way), images, work / way.key.partition("_")[0], workers, args.seconds)
                runs.setdefault((way.key, workers), []).append(one)
                say(f"round {number}, {way.name}, {workers}: {one['images'] / one['s']:.0f} images/s")
            except (RuntimeError, subprocess.SubprocessError) as error:
                row["unavailable"] = str(error).replace(str(Path.home()), "~")
                say(f"{way.name}: {row['unavailable']}")
    for (key, workers), found in runs.items():
        speeds = [one["images"] / one["s"] for one in found]
        first = statistics.median(one["first_s"] for one in found)
        measured = {"images_per_s": statistics.median(speeds), "first_batch_s": first, "rounds": speeds}
        rows[key]["by_workers"][str(workers)] = measured
    sample = map(ImageFolder(images).__getitem__, range(0, args.images, 50))
    pixels = [image.width * image.height for image, _ in sample]
    result = {
        "machine": {"cores": os.cpu_count(), "python": sys.version.split()[0], "torch": version("torch")},
        "quick": args.quick,
        "images": {"count": args.images, "mean_pixels": statistics.mean(pixels), "out": [224, 224], "batch": 64},
        "rounds": args.rounds,
        "seconds": args.seconds,
        "ways": rows,
    }
    if ("ffcv_raw", 2) in runs:
        say("time to compile")
        try:
            result["compile"] = compile_times(images, work)
        except RuntimeError as error:
            say(f"not measured: {error}")
    return json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.4g}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: 200 images, one worker, one round")
    parser.add_argument("--ways", default=",".join(way.key for way in WAYS), help="comma-separated")
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    args.ways = [way for way in WAYS if way.key in args.ways.split(",")]
    args.images, args.rounds, args.seconds = (200, 1, 0) if args.quick else (2000, 9, 1)
    args.output.write_text(json.dumps(measure(args), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
