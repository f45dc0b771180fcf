"""A virtual environment for each tool, made once under a cache folder, with the course's own torch build."""

import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tools import TOOLS, Tool

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("COURSE_BENCH_ENVS", ROOT / ".bench"))


def python_of(tool: Tool) -> Path:
    """The interpreter that has `tool`; its environment is made if it is not there.

    Raises
    ------
    RuntimeError
        With the last lines of the installer, if the packages cannot be had.
    """
    if tool.packages is None:
        return Path(sys.executable)
    pins = [f"torch=={version('torch')}", f"ipykernel=={version('ipykernel')}", f"numpy=={version('numpy')}"]
    wanted = {"python": sys.version, "packages": [*pins, *tool.packages]}
    name = "-".join(["torch", *(p.split("==")[0] for p in tool.packages)])
    folder = CACHE / f"{name}-{hashlib.sha1(json.dumps(wanted).encode()).hexdigest()[:8]}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    CACHE.mkdir(parents=True, exist_ok=True)
    constraints = CACHE / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    print(f"making an environment for {tool.name} …", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(constraints)]
    if version("torch").endswith("+cpu"):
        install += ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    for packages in (pins, list(tool.packages)):
        if packages:
            done = subprocess.run([*install, *packages], capture_output=True, text=True, timeout=1800)
            if done.returncode:
                raise RuntimeError("pip: " + " / ".join(done.stderr.strip().splitlines()[-3:]))
    (folder / "complete").touch()
    return python


def versions(python: Path, tool: Tool) -> dict[str, str]:
    """Versions of what is measured, asked of the environment itself."""
    names = ["torch", "ipykernel", *(p.split("==")[0] for p in tool.packages or ())]
    code = f"import json,importlib.metadata as m;print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    return json.loads(subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout)


def all_tools() -> dict[str, Tool]:
    return TOOLS
