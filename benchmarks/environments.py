"""A virtual environment for each tool, made once under a cache folder, with the course's own build of torch."""

import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tools import Tool

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("COURSE_BENCH_ENVS", ROOT / ".bench"))
INDEX = "https://download.pytorch.org/whl/"
BASE = ("ipykernel", "numpy")  # beside torch and in the course's versions


def python_of(tool: Tool, base: tuple[str, ...] = BASE, removed: tuple[str, ...] = ()) -> Path:
    """The interpreter that has `tool`; its environment is made if it is not there, and rid of packages `removed`.

    Raises
    ------
    RuntimeError
        With the last lines of the installer, if the packages cannot be had.
    """
    if tool.packages is None:
        return Path(sys.executable)
    torch = version("torch")
    pins = [f"torch=={torch}", *(f"{name}=={version(name)}" for name in base)]
    wanted = json.dumps([sys.version, pins, tool.packages, *removed])
    name = "-".join(["torch", *(package.split("==")[0] for package in tool.packages)])
    folder = CACHE / f"{name}-{hashlib.sha1(wanted.encode()).hexdigest()[:8]}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python

    print(f"making an environment for {tool.name}", file=sys.stderr, flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    constraints = CACHE / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    build = torch.partition("+")[2]
    index = ["--extra-index-url", INDEX + build, "--retries", "1", "--timeout", "20"] if build else []
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install(*pip, "--no-deps", *index, pins[0])
    install(*pip, "-c", str(constraints), *pins[1:], *tool.packages, f"torch=={torch.partition('+')[0]}")
    if removed:
        install(*pip[:3], "uninstall", "--yes", "--quiet", *removed)
    (folder / "complete").touch()
    return python


def install(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError("pip: " + " / ".join(done.stderr.strip().splitlines()[-3:]))


def versions(python: Path, tool: Tool, base: tuple[str, ...] = BASE) -> dict[str, str]:
    """Versions of what is measured, asked of the environment itself."""
    names = ["torch", *base, *(package.split("==")[0] for package in tool.packages or ())]
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    return json.loads(subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout)
