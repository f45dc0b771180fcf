"""Make the virtual environment ``.venv``, or update the course: a script of the standard library alone.

It is run by ``make`` or as ``python3 course_utils/bootstrap.py --lab``, never imported, and keeps to the syntax of old
Pythons, because finding a Python that is new enough is part of its work.
"""

import argparse
import glob
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "course-setup.json")
OLDEST, NEWEST = (3, 11), (3, 14)  # the Pythons that the pinned packages support
RANGE = f"Python 3.{OLDEST[1]} to 3.{NEWEST[1]}"
FFCV_PYTHON = (3, 11)  # the newest that FFCV 1.0.2 can be compiled for
TORCH_INDEX = "https://download.pytorch.org/whl/"
GET_PIP = "https://bootstrap.pypa.io/get-pip.py"
NETWORK = """\
  Behind a proxy:    export https_proxy=http://HOST:PORT, or: pip config set global.proxy http://HOST:PORT
  Own certificate:   export PIP_CERT=/path/to/certificate.pem SSL_CERT_FILE=/path/to/certificate.pem
  Without a network: export PIP_NO_INDEX=1 PIP_FIND_LINKS=/folder/of/wheels (the README says how to fill it)
Then run the same command again."""


def say(text):
    print(f"[setup] {text}", flush=True)


def fail(text):
    sys.exit(f"\n[setup] {text}")


def run(*command, **options):
    return subprocess.run(command, check=False, **options).returncode == 0


def usable(python):
    """True if this interpreter runs, is of a supported version and can make virtual environments."""
    code = f"import ssl, sys, venv; sys.exit(not {OLDEST} <= sys.version_info[:2] <= {NEWEST})"
    return bool(python) and run(python, "-c", code, stderr=subprocess.DEVNULL)


def find_python(first=()):
    """The first suitable interpreter: of `first`, the one running this script, or others on PATH; else None."""
    names = [f"python3.{minor}" for minor in (13, 12, 11, 14)]
    places = [*map(shutil.which, first), sys.executable, *map(shutil.which, names)]
    return next(filter(usable, places), None)


def find_uv():
    """The ``uv`` on PATH, else one installed into the private environment ``.uv``, else None."""
    uv = shutil.which("uv") or os.path.join(ROOT, ".uv", "bin", "uv")
    if not os.path.exists(uv):
        say(f"no {RANGE} here; trying uv, which can fetch one")
        private = os.path.dirname(os.path.dirname(uv))
        if run(sys.executable, "-m", "venv", "--clear", private):
            run(os.path.join(private, "bin", "python"), "-m", "pip", "install", "--quiet", "uv")
    return uv if os.path.exists(uv) else None


def make_environment(old):
    """Create ``.venv`` with pip in it; if `old`, with the Python that FFCV needs where there is one."""
    python = find_python([f"python3.{FFCV_PYTHON[1]}"] if old and sys.version_info[:2] > FFCV_PYTHON else [])
    if python is None:
        uv, version = find_uv(), "3.11" if old else "3.12"
        if not uv or not run(uv, "venv", "--clear", "--seed", "--python", version, VENV):
            fail(
                f"The course needs {RANGE}; this one is {platform.python_version()}.\n"
                "  macOS:         brew install python@3.12, or the installer from python.org\n"
                "  Debian/Ubuntu: sudo apt install python3 python3-venv (from Debian 12, Ubuntu 24.04)\n"
                "  no admin rights: curl -LsSf https://astral.sh/uv/install.sh | sh, which can fetch a Python\n"
                "Then run the same command again, or name an interpreter: make setup PYTHON=/path/to/python3.12"
            )
        return
    say(f"making .venv with {python}")
    if run(python, "-c", "import ensurepip", stderr=subprocess.DEVNULL):
        if not run(python, "-m", "venv", "--clear", VENV):
            fail("python -m venv failed; its message is above.")
    elif not run(python, "-m", "venv", "--clear", "--without-pip", VENV) or not add_pip(python):
        fail("This Python comes without pip, and none could be fetched. Debian/Ubuntu: sudo apt install python3-venv")


def add_pip(python):
    """Put pip into ``.venv`` where ensurepip is missing (Debian without python3-venv)."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if run(python, "-m", "pip", "--python", PYTHON, "install", "--quiet", "pip", **quiet):
        return True
    for wheel in sorted(glob.glob("/usr/share/python-wheels/pip-*.whl")):
        if run(PYTHON, os.path.join(wheel, "pip"), "install", "--quiet", "pip", **quiet):
            return True
    say(f"this Python has no pip; fetching {GET_PIP}")
    try:
        with urllib.request.urlopen(GET_PIP, timeout=30) as answer, tempfile.NamedTemporaryFile(suffix=".py") as script:
            shutil.copyfileobj(answer, script)
            script.flush()
            return run(PYTHON, script.name, "--quiet")
    except OSError as error:
        say(str(error))
        return False


def has_gpu():
    smi = shutil.which("nvidia-smi") or "/usr/lib/wsl/lib/nvidia-smi"
    if not os.path.exists(smi):
        return False
    listing = subprocess.run([smi, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout
    return listing.startswith(b"GPU")


def install_torch(build, version):
    """Install the chosen build of torch alone, so that nothing else is looked up in PyTorch's own index.

    ``torch===V`` is the build of the ordinary index exactly: CUDA on Linux, the only one on macOS.
    """
    say(f"installing torch {version} ({build} build)")
    if not os.path.exists(STAMP) and build != "macOS":
        say("to download: " + ("about 300 MB in all, which take 1.3 GB on disk" if build == "cpu" else "several GB"))
    options = ["install", "--no-deps"]
    if build in ("cuda", "macOS"):
        options += ["torch===" + version]
    else:  # one quick try at PyTorch's index: a mirror or a folder of pip's own configuration may have it as well
        options += [f"torch=={version}+{build}", "--extra-index-url", TORCH_INDEX + build]
        options += ["--retries", "1", "--timeout", "20"]
    if not pip(*options):
        fail_without_index()
        fail(
            f"torch {version} ({build} build) could not be installed; pip's message is above.\n"
            f"  Try again when {TORCH_INDEX} can be reached, or take the build of your package index\n"
            "  (on Linux the CUDA one, several GB, which also works without a GPU): make setup TORCH=cuda"
        )


def fail_without_index():
    """Stop if not even a small package can be had, because then the network is at fault, not torch."""
    probe = "install --dry-run --no-deps --ignore-installed --retries 0 --timeout 10 cloudpickle"
    if not pip(*probe.split(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        proxies = [f"{name}={os.environ[name]}" for name in os.environ if name.lower() in ("https_proxy", "all_proxy")]
        fail(
            "No packages can be downloaded; pip's message is above. "
            + (f"The proxy is {', '.join(proxies)}.\n" if proxies else "No proxy is set.\n")
            + NETWORK
        )


def pip(*arguments, **options):
    return run(PYTHON, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=ROOT, **options)


def ffcv_needs():
    """What keeps FFCV from being compiled for ``.venv`` here, with what to do; None if nothing does."""
    if sys.platform != "linux":
        return "FFCV runs on Linux only; without it lesson 15 shows recorded results."
    code = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_path('include'))"
    answer = subprocess.run([PYTHON, "-c", code], stdout=subprocess.PIPE, check=True).stdout.decode()
    major, minor, headers = answer.strip().split(" ", 2)
    if (int(major), int(minor)) > FFCV_PYTHON:
        return (
            f"FFCV 1.0.2 needs Python 3.{FFCV_PYTHON[1]}, .venv has {major}.{minor}.\n"
            f"  With python3.{FFCV_PYTHON[1]} on PATH (your system's package, or uv python install): make clean ffcv"
        )
    lacking = [] if shutil.which("g++") else ["g++"]
    if not shutil.which("pkg-config"):
        lacking.append("pkg-config")
    for package, library in (("libopencv-dev", "opencv4"), ("libturbojpeg0-dev", "libturbojpeg")):
        if "pkg-config" in lacking or not run("pkg-config", "--exists", library, stderr=subprocess.DEVNULL):
            lacking.append(package)
    if not os.path.exists(os.path.join(headers, "Python.h")):
        lacking.append("python3-dev")
    if lacking:
        return (
            f"FFCV is compiled on this machine, and for that these packages are missing: {' '.join(lacking)}\n"
            f"  Debian/Ubuntu: sudo apt install {' '.join(lacking)} (about 800 MB with all they need), then: make ffcv"
        )
    return None


def read_stamp():
    try:
        with open(STAMP) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def write(content, *place):
    path = os.path.join(VENV, *place)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        json.dump(content, file)


def git(*arguments):
    """The names that a git command prints, each ended by a zero byte; None if it fails, and its message is shown."""
    done = subprocess.run(["git", "-C", ROOT, *arguments], stdout=subprocess.PIPE, check=False)
    return None if done.returncode else set(filter(None, done.stdout.decode(errors="replace").split("\0")))


def update():
    """Move a git clone to the newest version of its branch, or say why not; nothing that was changed here is lost."""
    if not os.path.exists(os.path.join(ROOT, ".git")) or not shutil.which("git"):
        fail(
            "This copy of the course was not made with git clone, or git is not installed, so it cannot be updated.\n"
            "Download the course again, move your folder work/ into the new one, and run make lab there:\n"
            "it keeps what you have changed and brings the rest up to date."
        )
    if git("rev-parse", "--abbrev-ref", "@{upstream}") is None:
        fail("There is nothing to update from: this clone is on no branch that follows another. Try: git switch main")
    if git("fetch", "--quiet") is None:
        fail("The newest version could not be fetched; git's message is above.\n" + NETWORK)
    if run("git", "-C", ROOT, "merge-base", "--is-ancestor", "@{upstream}", "HEAD"):
        return say("this is the newest version")
    if not run("git", "-C", ROOT, "merge-base", "--is-ancestor", "HEAD", "@{upstream}"):
        fail("This clone has commits of its own, so it was left as it is. To put them on top: git pull --rebase")
    incoming = git("diff", "--name-only", "--no-renames", "-z", "HEAD", "@{upstream}")
    changed = git("diff", "--name-only", "--no-renames", "-z", "HEAD")
    both = sorted(incoming & (changed | git("ls-files", "--others", "--exclude-standard", "-z")))
    if both:
        fail(
            "Nothing was updated, because these files have changed here and in the new version:\n"
            + "".join(f"  {name}\n" for name in both)
            + "To put yours aside (git stash pop brings them back):\n"
            + f"  git stash push --include-untracked -- {' '.join(map(shlex.quote, both))}\n"
            + "Then update again. Lessons can be changed in work/, where this does not happen."
        )
    if git("merge", "--ff-only", "--quiet", "@{upstream}") is None:
        fail("The new version could not be put in place; git's message is above.")
    say(f"updated: {len(incoming)} files of the course are new")


def main():
    parser = argparse.ArgumentParser(description="Make or update the course's virtual environment.")
    parser.add_argument("--torch", default="auto", help="auto, cpu, cuda, or a CUDA version such as cu126")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml to install as well")
    parser.add_argument("--extra-if-possible", action="append", default=[], help="the same; left out where it fails")
    parser.add_argument("--update", action="store_true", help="get the newest version of the course first, with git")
    parser.add_argument("--copy", action="store_true", help="then bring the learner's copy in work/ up to date")
    parser.add_argument("--lab", action="store_true", help="then open JupyterLab on the learner's copy in work/")
    arguments = parser.parse_args()
    if not re.match(r"(auto|cpu|cuda|cu\d+)$", arguments.torch):
        parser.error("TORCH must be auto, cpu, cuda, or a CUDA version such as cu126")
    if os.name == "nt":
        fail("The course runs on Linux and macOS. On Windows use WSL: wsl --install, then this inside it.")
    if (sys.platform, platform.machine()) == ("darwin", "x86_64"):
        fail("PyTorch has no builds for Intel Macs. On Apple silicon use an arm64 Python, not one under Rosetta.")

    os.environ.pop("PYTHONPATH", None)  # packages of another Python would come before those of .venv
    os.environ["DS_BUILD_OPS"] = "0"  # DeepSpeed without its C++ extensions, which take minutes to compile
    if arguments.update:
        update()
        others = [argument for argument in sys.argv[1:] if argument != "--update"]
        sys.exit(subprocess.call([sys.executable, os.path.abspath(__file__), *others, "--copy"]))  # the new version
    set_up(arguments)
    if arguments.lab or arguments.copy:
        os.execv(PYTHON, [PYTHON, "-m", "course_utils", "lab" if arguments.lab else "copy"])


def set_up(arguments):
    """Make ``.venv`` and install what is missing in it; does nothing where all is there."""
    with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as file:
        pyproject = file.read()
    done = read_stamp() if os.path.exists(PYTHON) else {}
    build = arguments.torch
    if sys.platform == "darwin":
        build = "macOS"
    elif build == "auto":
        build = done.get("torch") or ("cuda" if has_gpu() else "cpu")
    extras = sorted(set(done.get("extras", []) + arguments.extra + arguments.extra_if_possible))
    if "nccl" in extras and re.match(r"cu1[0-2]", build):
        say(f"without the extra nccl: it is for CUDA 13, and its files would replace those of torch's {build} build")
        extras.remove("nccl")
    wanted = {"root": ROOT, "pyproject": hashlib.sha256(pyproject.encode()).hexdigest(), "torch": build}
    wanted["extras"] = extras
    if done == wanted:
        return

    if not os.path.exists(PYTHON) or not run(PYTHON, "-m", "pip", "--version", stdout=subprocess.DEVNULL):
        make_environment("ffcv" in arguments.extra)
    if "ffcv" in extras and "ffcv" not in done.get("extras", []):
        needs = ffcv_needs()
        if needs and "ffcv" in arguments.extra:
            fail(needs)
        if needs:
            say("without FFCV: " + needs)
            extras.remove("ffcv")
            if done == wanted:
                return
    install_torch(build, re.search(r'"torch==([\d.]+)"', pyproject).group(1))
    say("installing JupyterLab and the rest, a minute or two")
    quiet = ["--quiet"] if build == "cpu" else []  # CUDA's libraries are gigabytes: show their progress
    while not pip("install", "--editable", "." + (f"[{','.join(extras)}]" if extras else ""), *quiet):
        optional = [extra for extra in extras if extra in set(arguments.extra_if_possible) - set(arguments.extra)]
        if not optional:
            fail_without_index()
            fail("The packages could not be installed; pip's message is above.")
        say(f"trying again without {optional[0]}")
        extras.remove(optional[0])
    # Lab asks for no news, and looks the same whether or not the authors' tools are installed.
    tools = ["@jupyter/nbgrader", "@jupyter-notebook/lab-extension", "jupyterlab-jupytext"]
    news = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
    write(news, "share", "jupyter", "lab", "settings", "overrides.json")
    write({"disabledExtensions": dict.fromkeys(tools, True)}, "etc", "jupyter", "labconfig", "page_config.json")
    for packages in glob.glob(os.path.join(VENV, "lib", "python3*", "site-packages")):
        shutil.copy(os.path.join(ROOT, "course_utils", "quick_import.py"), os.path.join(packages, "course_start.py"))
        with open(os.path.join(packages, "course_start.pth"), "w") as file:
            file.write("import course_start; course_start.install()\n")
    write(wanted, os.path.basename(STAMP))
    say("ready: make lab opens the course (without make: python3 course_utils/bootstrap.py --lab)")


if __name__ == "__main__":
    main()
