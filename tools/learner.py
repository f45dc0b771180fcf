"""The learner's copy of the course: a folder with the lessons, without outputs, where no change is ever lost."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools import ROOT, ToolError, write

# What lessons consist of, and what they reach by relative paths.
PATTERNS = ("notebooks/[0-9]*.ipynb", "exercises/[0-9]*.ipynb", "solutions/[0-9]*.ipynb", "scripts/**/*", "native/*",
            "docs/*.json")
MANIFEST = ".course.json"  # of each file, the version that the learner has got or been told of


def copy(folder: Path, root: Path = ROOT) -> list[str]:
    """Bring a learner's copy up to date, and return sentences that say what was done.

    A file that is missing is copied. A new version replaces a copy without changes; where the learner has changed it,
    it is said once that there is one. Outputs and execution counts are not changes.
    """
    folder, manifest, course = _opened(folder, root)
    written, stay = {"new": [], "updated": []}, []
    for name, data in course.items():
        version, has, known = _version(data), _version_of(folder / name), manifest.get(name)
        if has is None or has != version and has == known:
            write(folder / name, data)
            written["updated" if has else "new"].append(name)
        elif version not in (has, known):
            stay.append(f"{name} is yours and stays; for its new version: make restore L={Path(name).stem}")
    for name in manifest.keys() - course.keys():
        if _version_of(folder / name) == manifest[name]:
            (folder / name).unlink()  # the course no longer has it, and nobody has changed it
    write(folder / MANIFEST, json.dumps({name: _version(data) for name, data in course.items()}, indent=1))
    return [_listed(f"{what} in {folder}", names) for what, names in written.items() if names] + stay


def restore(folder: Path, names: Sequence[str] = (), root: Path = ROOT) -> list[str]:
    """Give fresh lessons, all or those named as ``02`` or ``02_collectives``; changed ones are moved to ``saved/``."""
    folder, manifest, course = _opened(folder, root)
    saved, kept = folder / "saved" / time.strftime("%Y-%m-%d_%H-%M-%S"), []
    while saved.exists():
        saved = saved.with_name(f"{saved.name}_2")
    for name in {name for given in names for name in _named(course, given)} if names else course:
        if _version_of(folder / name) in (manifest.get(name), _version(course[name])):
            (folder / name).unlink()
        elif (folder / name).exists():
            (saved / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, saved / name)
            kept.append(name)
    yours = _listed(f"yours are in {saved}", kept) if kept else "none of them was changed, so nothing was put aside"
    return [*copy(folder, root), yours]


def lab(folder: Path, arguments: Sequence[str] = ()) -> int:
    """Bring the copy up to date and become JupyterLab on it, with ``arguments`` as on its command line."""
    import zmq

    print(*copy(folder), "JupyterLab opens in your browser, or open the address below; Ctrl+C twice ends it", sep="\n",
          flush=True)
    folder = folder.expanduser().resolve()
    for name in ("PYTHONPATH", "PYTHONHOME"):  # packages of another Python would come before those of the course
        os.environ.pop(name, None)
    if not os.access(Path.home(), os.W_OK):
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
            os.environ.setdefault(name, str(folder / ".jupyter" / name.lower()))
    command = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", f"--ServerApp.root_dir={folder}",
               "--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb", "--log-level=WARN",
               "--LabApp.log_level=WARN"]
    if zmq.has("curve"):
        command.append("--KernelManager.transport_encryption=auto")  # or else each kernel warns that it has none
    if os.geteuid() == 0:
        command.append("--allow-root")
    os.execv(sys.executable, [*command, *arguments])


def _opened(folder: Path, root: Path) -> tuple[Path, dict[str, str], dict[str, bytes]]:
    """The folder, made if needed, its manifest, and what learners get of each file of the course."""
    folder, root = folder.expanduser().resolve(), root.resolve()
    if root.is_relative_to(folder) or any(folder.is_relative_to(root / pattern.split("/")[0]) for pattern in PATTERNS):
        raise ToolError(f"{folder} holds the course itself; choose another folder, such as {root / 'work'}")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ToolError(f"{folder} cannot be written to; choose a folder of yours, as in python -m tools lab ~/course")
    manifest = {}
    with contextlib.suppress(OSError, ValueError, TypeError):  # else every file that differs counts as the learner's
        manifest = {**json.loads((folder / MANIFEST).read_bytes())}
    paths = [path for pattern in PATTERNS for path in sorted(root.glob(pattern)) if path.is_file()]
    paths = [path for path in paths if path.name[0] != "." and path.suffix != ".pyc"]
    return folder, manifest, {path.relative_to(root).as_posix(): _fresh(path) for path in paths}


def _fresh(path: Path) -> bytes:
    """A file as learners get it: a notebook without outputs, and with what JupyterLab writes when it is opened."""
    from ipykernel.ipkernel import IPythonKernel

    if path.suffix != ".ipynb":
        return path.read_bytes()
    nb = json.loads(path.read_bytes())
    nb["metadata"].pop("widgets", None)
    nb["metadata"]["language_info"] = IPythonKernel.language_info
    for cell in nb["cells"]:
        cell |= {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
    return (json.dumps(nb, ensure_ascii=False, indent=1) + "\n").encode()


def _version(data: bytes) -> str:
    """Hash what somebody wrote: of a notebook the text of its cells that are not empty, as running changes the rest."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(data)["cells"]]
        data = json.dumps([cell for cell in cells if cell[1].strip()]).encode()
    return hashlib.sha256(data).hexdigest()


def _version_of(path: Path) -> str | None:
    return _version(path.read_bytes()) if path.exists() else None


def _listed(what: str, names: list[str]) -> str:
    return f"{what}: " + (", ".join(names) if len(names) <= 5 else f"{len(names)} files")


def _named(course: dict[str, bytes], given: str) -> list[str]:
    """The files of the course that a name stands for: its whole lesson, or one file."""
    wanted = Path(given).name.removesuffix(".ipynb")
    wanted = wanted.zfill(2) if wanted.isdigit() else wanted
    fits = [name for name in course if re.match(re.escape(wanted) + r"(?![^_.])", Path(name).name)]
    if not fits:
        numbers = sorted({Path(name).name[:2] for name in course if name.endswith(".ipynb")})
        raise ToolError(f"the course has no lesson {given}; it has {', '.join(numbers)}")
    return fits


def add(commands: argparse._SubParsersAction) -> None:
    """Add ``lab``, ``copy``, ``restore`` and ``doctor``."""
    from course_utils.doctor import doctor

    opened = commands.add_parser("lab", help="open JupyterLab on the learner's copy; its own options can follow")
    opened.set_defaults(run=lambda given: lab(given.folder, given.further), passes_on=True)
    copied = commands.add_parser("copy", help="bring the learner's copy up to date; what was changed stays")
    copied.set_defaults(run=lambda given: print(*copy(given.folder) or [f"{given.folder} is up to date"], sep="\n"))
    fresh = commands.add_parser("restore", help="give fresh lessons, moving changed ones to saved/ in the copy")
    fresh.set_defaults(run=lambda given: print(*restore(given.folder, given.names), sep="\n"))
    fresh.add_argument("names", nargs="*", help="such as 02 or 02_collectives; default: all")
    for command, name in ((opened, "folder"), (copied, "folder"), (fresh, "--folder")):
        command.add_argument(name, type=Path, default=ROOT / "work", help="the learner's copy (%(default)s)",
                             **({} if command is fresh else {"nargs": "?"}))
    looked = commands.add_parser("doctor", help="report on this machine and start two ranks")
    looked.add_argument("--room", type=int, metavar="N", help="say instead what N people need who share this machine")
    looked.set_defaults(run=lambda given: _room(given.room) if given.room else not doctor())


def _room(people: int) -> int:
    from .teach.room import room

    return room(people)
