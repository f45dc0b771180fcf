"""The learner's copy of the course: a folder with the lessons, without outputs, where no change is ever lost."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

__all__ = ["CourseError", "copy", "lab", "restore", "run_command"]

ROOT = Path(__file__).resolve().parent.parent
# What lessons consist of, and what they reach by relative paths.
PATTERNS = (
    *(f"{folder}/[0-9][0-9]_*.ipynb" for folder in ("notebooks", "exercises", "solutions")),
    "scripts/**/*", "native/*", "docs/*.json",
)
MANIFEST = ".course.json"
FIRST = "notebooks/00_start_here.ipynb"


class CourseError(Exception):
    """Something about the learner's copy that the message explains."""


def _course(root: Path) -> dict[str, Path]:
    """Every file that learners get a copy of, by its name relative to the course."""
    paths = [path for pattern in PATTERNS for path in sorted(root.glob(pattern))]
    paths = [path for path in paths if path.is_file() and path.name[0] != "." and path.suffix != ".pyc"]
    if not paths:
        raise CourseError(f"{root} holds no lessons")
    return {path.relative_to(root).as_posix(): path for path in paths}


def _fresh(path: Path) -> bytes:
    """Return what a learner gets of a file.

    A notebook loses its outputs, and gets what JupyterLab would write into it when it is opened, so that opening it
    changes nothing.
    """
    from ipykernel.ipkernel import IPythonKernel

    data = path.read_bytes()
    if path.suffix != ".ipynb":
        return data
    try:
        nb = json.loads(data)
        nb["metadata"].pop("widgets", None)
        nb["metadata"]["language_info"] = IPythonKernel.language_info
        for cell in nb["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"], cell["execution_count"] = [], None
    except (ValueError, KeyError, TypeError):
        raise CourseError(f"{path} is not a notebook any more; get it again: git checkout HEAD -- {path}") from None
    return (json.dumps(nb, ensure_ascii=False, indent=1) + "\n").encode()


def _version(data: bytes) -> str:
    """Hash what somebody wrote: of a notebook the text of its cells, because opening and running it changes the rest.

    Empty cells do not count either: JupyterLab adds one when the last cell is run.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError):
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(data)["cells"]]
        data = json.dumps([cell for cell in cells if cell[1].strip()]).encode()
    return hashlib.sha256(data).hexdigest()


def _version_of(path: Path) -> str | None:
    return _version(path.read_bytes()) if path.exists() else None


def _read_manifest(folder: Path) -> dict[str, str]:
    """Of each file, the version that the learner has got of it or been told of."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {name: of["version"] if isinstance(of, dict) else of for name, of in manifest.items()}  # once a dict
    except (OSError, ValueError, KeyError, AttributeError):
        return {}  # none yet, or unreadable: then every file that differs counts as the learner's


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_bytes(data)
    os.replace(half, path)
    if path.suffix == ".ipynb":
        _trust(data)


def _trust(data: bytes) -> None:
    """Sign a notebook of the course, so that JupyterLab shows all of its outputs once it has been run and saved."""
    import nbformat
    from jupyter_core.paths import jupyter_data_dir
    from nbformat.sign import NotebookNotary

    with contextlib.suppress(OSError, sqlite3.Error):  # without a signature it is only shown as not trusted
        Path(jupyter_data_dir()).mkdir(parents=True, exist_ok=True, mode=0o700)
        NotebookNotary(data_dir=jupyter_data_dir()).sign(nbformat.reads(data.decode(), as_version=4))


def _opened(folder: Path, root: Path) -> Path:
    """The absolute path of a folder for a copy, made if needed."""
    folder, root = folder.expanduser().resolve(), root.resolve()
    if root.is_relative_to(folder) or any(folder.is_relative_to(root / pattern.split("/")[0]) for pattern in PATTERNS):
        raise CourseError(f"{folder} holds the course itself; choose another folder, such as {root / 'work'}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CourseError(
            f"{folder} cannot be written to ({error.strerror}); choose a folder of yours:\n"
            f"  {sys.executable} -m course_utils lab ~/course"
        ) from None
    return folder


def _drop(folder: Path, gone: dict[str, str]) -> list[str]:
    """Remove copies of what the course no longer has; changed ones stay. Returns sentences."""
    said = []
    for name, version in sorted(gone.items()):
        if (has := _version_of(folder / name)) == version:
            (folder / name).unlink()
            said.append(f"removed, because the course no longer has it: {name}")
        elif has:
            said.append(f"{name} is no longer part of the course; your copy, which you have changed, stays")
    return said


def copy(folder: Path, root: Path = ROOT) -> list[str]:
    """Bring a learner's copy of the course up to date; what the learner has changed stays as it is.

    A file that is missing is copied. One that the course has changed since replaces a copy without changes; where the
    copy has changes, it is said once that there is a new version. Outputs and execution counts are not changes.

    Parameters
    ----------
    folder : Path
        Made if needed.

    Returns
    -------
    list of str
        Sentences that say what was done.

    Raises
    ------
    CourseError
        The folder cannot be written to, or is the course itself.
    """
    folder = _opened(folder, root)
    manifest = _read_manifest(folder)
    course = {name: _fresh(path) for name, path in _course(root).items()}
    said = _drop(folder, {name: version for name, version in manifest.items() if name not in course})
    versions = {name: _version(data) for name, data in course.items()}
    written: dict[str, list[str]] = {"new": [], "updated": []}
    for name, version in versions.items():
        has, known = _version_of(folder / name), manifest.get(name)
        if has is None or has != version and has == known:
            _write(folder / name, course[name])
            written["updated" if has else "new"].append(name)
        elif version not in (has, known):
            which = Path(name).stem if name.endswith(".ipynb") else name
            said.append(f"{name} is yours and stays; for its new version: make restore L={which}")
    _write(folder / MANIFEST, json.dumps(versions, indent=1).encode())
    return [_listed(f"{what} in {folder}", names) for what, names in written.items() if names] + said


def _listed(what: str, names: list[str]) -> str:
    return f"{what}: " + (", ".join(names) if len(names) <= 5 else f"{len(names)} files")


def restore(folder: Path, names: Sequence[str] = (), root: Path = ROOT) -> list[str]:
    """Give a learner fresh lessons; changed ones are moved to ``saved/`` in the folder of the copy.

    Parameters
    ----------
    folder : Path
        The learner's copy.
    names : sequence of str
        Such as ``02``, ``02_collectives`` or ``exercises/02_collectives_exercises.ipynb``; default: everything.

    Returns
    -------
    list of str
        Sentences that say what was done.

    Raises
    ------
    CourseError
        There is no such lesson, or the folder cannot be written to.
    """
    folder = _opened(folder, root)
    manifest, course = _read_manifest(folder), _course(root)
    saved = folder / "saved" / time.strftime("%Y-%m-%d_%H-%M-%S")
    while saved.exists():
        saved = saved.with_name(saved.name + "_2")
    kept, fresh = [], _named(course, names)
    for name in fresh:
        data = _fresh(course[name])
        if _version_of(folder / name) not in (None, manifest.get(name), _version(data)):
            (saved / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, saved / name)
            kept.append(name)
        _write(folder / name, data)
        manifest[name] = _version(data)
    _write(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    yours = [_listed(f"yours are in {saved}", kept)] if kept else ["none of them was changed, so nothing was put aside"]
    return [_listed(f"fresh in {folder}", fresh), *yours]


def _named(course: dict[str, Path], names: Sequence[str]) -> list[str]:
    """The files of the course that ``names`` stand for."""
    found: list[str] = [] if names else [*course]
    for given in names:
        wanted = given.removeprefix("./").removesuffix(".ipynb")
        wanted = wanted.zfill(2) if wanted.isdigit() else wanted
        fits = [name for name in course if re.match(re.escape(wanted) + r"(?![^_.])", name.split("/")[-1])]
        fits = fits or [name for name in course if name in (given, wanted + ".ipynb")]
        if not fits:
            numbers = sorted({name.split("/")[1][:2] for name in course if name.endswith(".ipynb")})
            raise CourseError(f"the course has no lesson {given}; it has {', '.join(numbers)}")
        found += [name for name in fits if name not in found]
    return found


def lab(folder: Path, arguments: Sequence[str] = (), root: Path = ROOT) -> NoReturn:
    """Bring the learner's copy up to date and become JupyterLab on it, with ``arguments`` as on its command line."""
    import zmq

    if importlib.util.find_spec("jupyterlab") is None:
        raise CourseError(f"JupyterLab is not installed for {sys.executable}; make lab installs it")
    folder = _opened(folder, root)
    for name in ("PYTHONPATH", "PYTHONHOME"):  # the packages of another Python would come before those of the course
        if os.environ.pop(name, None):
            print(f"{name} is ignored: the course has an environment of its own")
    _keep_settings_in(folder / ".jupyter")
    print("\n".join(copy(folder, root)), flush=True)
    command = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", f"--ServerApp.root_dir={folder}"]
    command += [f"--LabApp.default_url=/lab/tree/{FIRST}"]
    if zmq.has("curve"):
        command += ["--KernelManager.transport_encryption=auto"]  # or else each kernel warns that it has none
    if os.geteuid() == 0:
        command += ["--allow-root"]
    os.execv(sys.executable, [*command, *arguments])


def _keep_settings_in(place: Path) -> None:
    """Where Jupyter's folders in the user's home cannot be written to, let them be in ``place``."""
    from jupyter_core import paths

    folders = {
        "JUPYTER_CONFIG_DIR": paths.jupyter_config_dir(),
        "JUPYTER_DATA_DIR": paths.jupyter_data_dir(),
        "JUPYTER_RUNTIME_DIR": paths.jupyter_runtime_dir(),
        "IPYTHONDIR": os.environ.get("IPYTHONDIR", Path.home() / ".ipython"),
        "MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", Path.home() / ".config" / "matplotlib"),
    }
    closed = []
    for name, path in folders.items():
        try:
            Path(path).mkdir(parents=True, exist_ok=True, mode=0o700)
            tempfile.TemporaryFile(dir=path).close()
        except OSError:
            os.environ[name] = str(place / name.lower())
            Path(os.environ[name]).mkdir(parents=True, exist_ok=True, mode=0o700)
            closed.append(str(path))
    if closed:
        print(f"{', '.join(closed)} cannot be written to; settings go to {place}")


def run_command(command: str, folder: Path, further: Sequence[str]) -> list[str]:
    """Run ``lab``, ``copy`` or ``restore`` as the command line says; return what went wrong, in sentences."""
    try:
        if command == "lab":
            lab(folder, further)
        said = copy(folder) if command == "copy" else restore(folder, further)
    except CourseError as error:
        return [str(error)]
    except OSError as error:
        return [f"{error.filename}: {error.strerror}"]
    print("\n".join(said or [f"{folder} is up to date"]))
    return []
