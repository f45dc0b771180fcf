"""Make the environment ``.venv``, or update the course: a script of the standard library alone.

``make`` runs it, or ``python3 tools/setup.py --lab``; it is never imported. It keeps to the syntax of old Pythons,
because finding one that is new enough is part of its work.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "course-setup.json")
OLDEST, NEWEST = (3, 11), (3, 14)  # the Pythons that the pinned packages support
TORCH_INDEX = "https://download.pytorch.org/whl/"
RANGE = f"Python 3.{OLDEST[1]} to 3.{NEWEST[1]}"
NO_PYTHON = f"""The course needs {RANGE}; this one is {platform.python_version()}.
  macOS:           brew install python@3.12, or the installer from python.org
  Debian, Ubuntu:  sudo apt install python3 python3-venv (from Debian 12, Ubuntu 24.04)
  no admin rights: curl -LsSf https://astral.sh/uv/install.sh | sh, which can fetch a Python
Then run the same command again, or name an interpreter: make setup PYTHON=/path/to/python3.12"""
NOT_INSTALLED = f"""Not all packages could be installed; the message above says why.
  Behind a proxy:    export https_proxy=http://HOST:PORT, or: pip config set global.proxy http://HOST:PORT
  Own certificate:   export PIP_CERT=/path/to/certificate.pem
  Without a network: export PIP_NO_INDEX=1 PIP_FIND_LINKS=/folder/of/wheels (docs/install.md says how to fill it)
  Only {TORCH_INDEX} out of reach: make setup TORCH=cuda (several GB; also works without a GPU)
Then run the same command again; what has been downloaded is kept."""
NOT_UPDATED = """Nothing was updated; git's message above says why.
  Files that you changed: git stash puts them aside. Lessons can be changed in work/, where this does not happen.
  No network, or a proxy: export https_proxy=http://HOST:PORT
  Not made by git clone:  download the course again, move your folder work/ into it, and run make lab there"""


def say(text):
    print(f"[setup] {text}", flush=True)


def fail(text):
    sys.exit(f"\n[setup] {text}")


def run(*command, **options):
    return subprocess.call(command, cwd=ROOT, **options) == 0


def usable(python):
    """True if this interpreter runs, is of a supported version and can make virtual environments."""
    code = f"import ensurepip, ssl, sys, venv; sys.exit(not {OLDEST} <= sys.version_info[:2] <= {NEWEST})"
    return bool(python) and run(python, "-c", code, stderr=subprocess.DEVNULL)


def get_uv():
    """Install uv into ``.uv``, for a machine whose Python cannot make the environment; None if that fails."""
    say(f"no {RANGE} with venv here; trying uv, which can fetch one")
    own = os.path.join(ROOT, ".uv", "bin", "")
    if not run(sys.executable, "-m", "venv", "--clear", ".uv", stdout=subprocess.DEVNULL):  # Debian: without ensurepip
        run(sys.executable, "-m", "venv", "--clear", "--without-pip", ".uv")
        try:
            script = urllib.request.urlretrieve("https://bootstrap.pypa.io/get-pip.py")[0]
            run(own + "python", script, "--quiet")
        except OSError as error:
            say(str(error))
    return own + "uv" if run(own + "python", "-m", "pip", "install", "--quiet", "uv") else None


def make_environment(wish):
    """Create ``.venv`` with pip in it and the Python ``wish`` if there is one; uv fetches one where there is none."""
    names = [*wish, sys.executable, *(f"python3.{minor}" for minor in (13, 12, 11, 14))]
    python = next(filter(usable, map(shutil.which, names)), None)
    say(f"making .venv with {python or 'a Python that uv finds'}")
    if python:
        made = run(python, "-m", "venv", "--clear", VENV)
    else:
        uv = shutil.which("uv") or get_uv()
        made = uv and run(uv, "venv", "--clear", "--seed", "--python", *(wish or ["3.12"]), VENV)
    if not made:
        fail(NO_PYTHON)


def installer():
    """The command that installs packages: uv's, unless there is none, or pip has a network of its own set up."""
    pip, uv = [PYTHON, "-m", "pip", "--disable-pip-version-check"], shutil.which("uv")
    settings = subprocess.run([*pip, "config", "list"], stdout=subprocess.PIPE, check=False).stdout
    if uv and not re.search(b"index|find-links|proxy|cert|trusted-host", settings):
        return [uv, "pip", "install", "--python", PYTHON]
    return [*pip, "install"]


def has_gpu():
    smi = shutil.which("nvidia-smi") or "/usr/lib/wsl/lib/nvidia-smi"
    return os.path.exists(smi) and subprocess.run([smi, "-L"], stdout=subprocess.PIPE).stdout.startswith(b"GPU")


def install(build, extras, optional):
    """Install torch alone, so that nothing else is looked up in its index, then the rest; return the extras it got."""
    with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as file:
        version = re.search(r'"torch==([\d.]+)"', file.read()).group(1)
    command = installer()
    size = "about 300 MB in all, which take 1.3 GB on disk" if build == "cpu" else "up to several GB"
    say(f"installing torch {version} ({build} build); to download: {size}")
    if build in ("cuda", "macOS"):  # the build of the ordinary index: CUDA on Linux, the only one on macOS
        choices = [[f"torch==={version}"]]
    else:  # a folder or a mirror may have it where PyTorch's index cannot be reached
        torch = f"torch=={version}+{build}"
        choices = [[torch, "--extra-index-url", TORCH_INDEX + build], [torch]]
    if not any(run(*command, "--no-deps", *choice) for choice in choices):
        fail(NOT_INSTALLED)
    say("installing JupyterLab and the rest: a minute or two without a sign")
    less = "-qq" if command[0] == PYTHON else "--quiet"  # pip: no warnings; uv is silent about errors with -qq
    quiet = [less] if build == "cpu" else []  # CUDA's libraries are gigabytes: show their progress
    while not run(*command, "--editable", "." + (f"[{','.join(extras)}]" if extras else ""), *quiet):
        if not optional & set(extras):
            fail(NOT_INSTALLED)
        say(f"trying again without {', '.join(optional)}")
        extras = [extra for extra in extras if extra not in optional]
    return extras


def ffcv_needs():
    """What keeps FFCV from being compiled for ``.venv`` here, with what to do; None if nothing does."""
    code = "import sys, sysconfig; print(sys.version_info[1], sysconfig.get_path('include'))"
    minor, headers = subprocess.check_output([PYTHON, "-c", code]).decode().strip().split(" ", 1)
    if sys.platform != "linux":
        return "FFCV runs on Linux only; without it lesson 15 shows recorded results."
    if int(minor) > 11:
        return f"FFCV 1.0.2 needs Python 3.11, .venv has 3.{minor}. With python3.11 on PATH: make clean ffcv"
    lacking = [program for program in ("g++", "pkg-config") if not shutil.which(program)]
    for package, library in (("libopencv-dev", "opencv4"), ("libturbojpeg0-dev", "libturbojpeg")):
        if "pkg-config" in lacking or not run("pkg-config", "--exists", library, stderr=subprocess.DEVNULL):
            lacking.append(package)
    lacking += [] if os.path.exists(os.path.join(headers, "Python.h")) else ["python3-dev"]
    return lacking and (
        f"FFCV is compiled on this machine, and for that these packages are missing: {' '.join(lacking)}\n"
        f"  Debian, Ubuntu: sudo apt install {' '.join(lacking)} (about 800 MB with all they need), then: make ffcv")


def settings():
    """Let JupyterLab ask for no news, and look the same whether or not the authors' tools are installed."""
    tools = ["@jupyter/nbgrader", "@jupyter-notebook/lab-extension", "jupyterlab-jupytext"]
    news = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
    write(news, "share", "jupyter", "lab", "settings", "overrides.json")
    write({"disabledExtensions": dict.fromkeys(tools, True)}, "etc", "jupyter", "labconfig", "page_config.json")


def write(content, *place):
    path = os.path.join(VENV, *place)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        json.dump(content, file)


def set_up(given):
    """Make ``.venv`` and install what is missing in it; does nothing where all is there."""
    done = {}
    if os.path.exists(PYTHON) and os.path.exists(STAMP):
        with open(STAMP) as file:
            done = json.load(file)
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        wanted = {"root": ROOT, "pyproject": hashlib.sha256(file.read()).hexdigest()}
    build = done.get("torch") or ("cuda" if has_gpu() else "cpu") if given.torch == "auto" else given.torch
    wanted["torch"] = "macOS" if sys.platform == "darwin" else build
    wanted["extras"] = sorted({*done.get("extras", []), *given.extra, *given.extra_if_possible})
    if "nccl" in wanted["extras"] and re.match("cu1[0-2]", build):
        say(f"without the extra nccl: it is for CUDA 13, and its files would replace those of torch's {build} build")
        wanted["extras"].remove("nccl")
    if done == wanted:
        return
    if not os.path.exists(PYTHON) or not run(PYTHON, "-m", "pip", "--version", stdout=subprocess.DEVNULL):
        say("the first time only: the course's environment, .venv, which takes 1 to 2 minutes on a fast line")
        make_environment(["python3.11"] if "ffcv" in given.extra else [])
    needs = ffcv_needs() if "ffcv" in wanted["extras"] and "ffcv" not in done.get("extras", []) else None
    if needs and "ffcv" in given.extra:
        fail(needs)
    if needs:
        say(f"without FFCV: {needs}")
        wanted["extras"].remove("ffcv")
    if done != wanted:
        wanted["extras"] = install(wanted["torch"], wanted["extras"], set(given.extra_if_possible) - set(given.extra))
        settings()
        write(wanted, os.path.basename(STAMP))
        say("ready: make lab opens the course (without make: python3 tools/setup.py --lab)")


def main():
    parser = argparse.ArgumentParser(description="Make or update the course's virtual environment.")
    parser.add_argument("--torch", default="auto", help="auto, cpu, cuda, or a CUDA version such as cu126")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml to install as well")
    parser.add_argument("--extra-if-possible", action="append", default=[], help="the same; left out where it fails")
    parser.add_argument("--update", action="store_true", help="get the newest version of the course first, with git")
    parser.add_argument("--copy", action="store_true", help="then bring the learner's copy in work/ up to date")
    parser.add_argument("--lab", action="store_true", help="then open JupyterLab on the learner's copy in work/")
    given = parser.parse_args()
    if not re.match(r"(auto|cpu|cuda|cu\d+)$", given.torch):
        parser.error("TORCH must be auto, cpu, cuda, or a CUDA version such as cu126")
    if os.name == "nt":
        fail("The course runs on Linux and macOS. On Windows use WSL: wsl --install, then this inside it.")
    if (sys.platform, platform.machine()) == ("darwin", "x86_64"):
        fail("PyTorch has no builds for Intel Macs. On Apple silicon use an arm64 Python, not one under Rosetta.")
    os.environ.pop("PYTHONPATH", None)  # packages of another Python would come before those of .venv
    # DeepSpeed without its C++ extensions, which take minutes to compile; a download that breaks off goes on.
    os.environ.update(DS_BUILD_OPS="0", PIP_RESUME_RETRIES="5")
    if given.update:
        if not run("git", "pull", "--quiet", "--ff-only", "--no-rebase"):
            fail(NOT_UPDATED)
        others = [argument for argument in sys.argv[1:] if argument != "--update"]
        os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), *others, "--copy"])  # the new version
    set_up(given)
    if given.lab or given.copy:
        os.chdir(ROOT)
        os.execv(PYTHON, [PYTHON, "-m", "tools", "lab" if given.lab else "copy"])


if __name__ == "__main__":
    main()
