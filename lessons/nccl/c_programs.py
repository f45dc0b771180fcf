"""The C programs of ``native/``: where NCCL and the CUDA runtime are, how to compile, how to quote the source."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[2] / "native"
_SHARED = ("-shared", "-fPIC", "-Wl,-Bsymbolic")
_WARNINGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror")


class MissingToolError(RuntimeError):
    """A compiler or a library is not here; the message says what to install."""


@dataclass(frozen=True)
class Toolkit:
    """Folders of NCCL (``nccl``) and of the CUDA runtime (``cuda``), each with ``include`` and ``lib``."""

    nccl: Path
    cuda: Path
    runtime: str  # the runtime's file name, such as libcudart.so.13


def find_nccl() -> Toolkit:
    """Find NCCL's and CUDA's headers and libraries among the Python packages, or raise `MissingToolError`."""
    if sys.platform != "linux":
        raise MissingToolError("NCCL exists for Linux only.")
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    for cuda in sorted(packages.glob("c*"), reverse=True):
        runtimes = sorted((cuda / "lib").glob("libcudart.so.*"))
        headers = [cuda / "include" / name for name in ("cuda_runtime.h", "crt/host_config.h", "nv/target")]
        headers.append(packages / "nccl" / "include" / "nccl.h")
        if runtimes and all(header.exists() for header in headers):
            return Toolkit(packages / "nccl", cuda, runtimes[0].name)
    raise MissingToolError(
        "NCCL's headers are not installed here. In the course's folder, with this Python:  pip install -e '.[nccl]'"
    )


def find_compiler() -> str:
    """Name a C compiler: ``$CC``, else gcc, else cc; raise `MissingToolError` where there is none."""
    for name in (os.environ.get("CC"), "gcc", "cc"):
        if name and shutil.which(name):
            return name
    raise MissingToolError("There is no C compiler here: install gcc (Debian and Ubuntu: sudo apt install gcc).")


def toolkit_or_none() -> Toolkit | None:
    """Return what `find_nccl` finds; without it, or without a compiler, say what is missing and return None."""
    try:
        find_compiler()
        return find_nccl()
    except MissingToolError as error:
        print(error, "Until then the cells below only show code.", sep="\n")
        return None


def command(source: str, target: Path | str, toolkit: Toolkit, compiler: str = "gcc") -> list[str]:
    """Return the command that compiles `source`, a file of ``native/`` or a path, into `target`.

    A target with ``.so`` in its name becomes a shared library, under its own name for the loader; any other a
    program linked against NCCL and the CUDA runtime, which it remembers where to find.
    """
    target = Path(target)
    headers = [part for folder in (toolkit.nccl, toolkit.cuda) for part in ("-isystem", f"{folder}/include")]
    done = [compiler, *_WARNINGS, *headers, str(NATIVE / source), "-o", str(target)]
    if ".so" in target.name:
        version = ["-Wl,--default-symver"] if "cudart" in target.name else []  # as the real runtime has them
        return [*done, *_SHARED, f"-Wl,-soname,{target.name}", *version]
    libraries = {toolkit.nccl / "lib": "libnccl.so.2", toolkit.cuda / "lib": toolkit.runtime}
    linked = [part for folder, name in libraries.items() for part in (f"-L{folder}", f"-l:{name}")]
    return [*done, *linked, "-Wl,--enable-new-dtags,-rpath," + ":".join(map(str, libraries))]


def build(source: str, target: Path | str, toolkit: Toolkit | None = None) -> Path:
    """Compile `source` into `target` (see `command`), making its folder; return the target.

    Raises `MissingToolError` without a compiler or NCCL, and `RuntimeError` with the compiler's message if it has one.
    """
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    call = command(source, target, toolkit or find_nccl(), find_compiler())
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(source).name} does not compile:\n{done.stderr}")
    return Path(target)


def excerpt(source: str, *names: str) -> str:
    """Return C functions, structures and macros of ``native/source`` by name, with the comment above each."""
    text = (NATIVE / source).read_text()
    found = []
    for name in names:
        starts = (
            rf"#define {name}\b(?:.*\\\n)*.*|typedef struct {{(?:\n .*)*\n}} {name};|\S.*\b{name}\(.*(?:\n.*)*?\n}}"
        )
        match = re.search(rf"^(?://.*\n)*(?:{starts})$", text, re.MULTILINE)
        if match is None:
            raise ValueError(f"{source} has no {name}")
        found.append(match.group())
    return "\n\n".join(found)


def show(source: str, *names: str):
    """Return an `excerpt` as Markdown that a notebook shows in colours."""
    from IPython.display import Markdown

    return Markdown(f"```c\n{excerpt(source, *names)}\n```")


def shown_command(source: str, target: str, toolkit: Toolkit) -> str:
    """Return `command` as it is read best: in lines, with names in place of this machine's folders."""
    line = " ".join(command(source, target, toolkit))
    for path, name in {toolkit.nccl: "$NCCL", toolkit.cuda: "$CUDA", NATIVE: "native"}.items():
        line = line.replace(str(path), name)
    return re.sub(r" (?=-isystem|native|-o|-L|-Wl)", " \\\n    ", line)


def run(program: Path | str, *arguments: object, **environment: object) -> subprocess.CompletedProcess:
    """Run a program with arguments, and with variables beside those of this process; its output comes as text."""
    env = os.environ | {name: str(value) for name, value in environment.items()}
    call = [str(part) for part in (program, *arguments)]
    return subprocess.run(call, capture_output=True, text=True, env=env, timeout=60)


def build_stand_ins(folder: Path, toolkit: Toolkit) -> None:
    """Compile the libraries that stand in for NCCL and the CUDA runtime into `folder`."""
    build("stand_in_nccl.c", folder / "libnccl.so.2", toolkit)
    build("stand_in_cuda.c", folder / toolkit.runtime, toolkit)


def run_on_stand_ins(
    program: Path, folder: Path, gpus: int, *arguments: object, **environment: object
) -> subprocess.CompletedProcess:
    """`run` a program with the stand-ins of `folder` in place of NCCL and CUDA, on `gpus` pretended GPUs."""
    places = {"LD_LIBRARY_PATH": folder, "TMPDIR": folder, "STAND_IN_GPUS": gpus}
    return run(program, *arguments, **places | environment)
