# Everything runs in .venv, which the first command makes. `make help` lists the commands.
PYTHON ?= python3
TORCH ?= auto
PY := .venv/bin/python
SETUP := @$(PYTHON) tools/setup.py --torch $(TORCH)
# A PYTHONPATH for other programs would put their packages before those of .venv.
unexport PYTHONPATH
# Tests start thousands of processes: none is to compile the course anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup lab update restore ffcv deepspeed ray dev site lesson quick lint test versions notebooks bench clean

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' Makefile

setup:  ## make the environment (TORCH=cpu, cuda or cu126 chooses the build of torch)
	$(SETUP)

lab:  ## open JupyterLab on work/, your copy of the course
	$(SETUP)
	@$(PY) -m tools lab

update:  ## get the newest version of the course; what you have changed in work/ stays
	$(SETUP) --update

restore:  ## give fresh lessons, all or L=02; changed ones are moved to work/saved/
	$(SETUP)
	@$(PY) -m tools restore $(L)

ffcv:  ## add FFCV for lesson 15 (Linux, Python 3.11), or say what it needs
	$(SETUP) --extra ffcv

deepspeed:  ## add DeepSpeed for lesson 08 (Linux)
	$(SETUP) --extra deepspeed

ray:  ## add Ray and submitit: ranks on a cluster, lesson 16 (Linux)
	$(SETUP) --extra ray

dev:  ## make the environment with all that authors and tests need
	$(SETUP) --extra test --extra site --extra nccl --extra deepspeed --extra ray --extra-if-possible ffcv

site:  ## build the course as a site, build/site/html/index.html, and as an ePub
	$(SETUP) --extra site
	$(PY) -m tools site

lesson: dev  ## build lesson L=04 and run what concerns it
	$(PY) -m tools lesson $(L)

quick: dev  ## run the tests that start no rank
	$(PY) -m pytest -q -n 2 --dist loadscope --quick

lint: dev  ## check style, and types in the package
	$(PY) -m ruff check
	$(PY) -m pyrefly check

test: dev  ## run every test
	$(PY) -m pytest -n 3 --dist loadscope --nbval --nbval-cell-timeout=300 --nbval-sanitize-with tests/sanitise.cfg --durations=40 tests notebooks solutions

versions: dev  ## run four lessons with the oldest and newest PyTorch, Python and widgets (needs uv; gigabytes)
	$(PY) -m pytest -v -rP --durations=0 tests/promises/versions.py

notebooks: dev  ## build notebooks, exercises and solutions from sources (what changed)
	$(PY) -m tools build

bench:  ## compare the launcher with other ways to start ranks (once a year)
	$(SETUP)
	$(PY) benchmarks/comparison.py

clean:  ## remove the environment and caches
	rm -rf .venv .uv *.egg-info .pytest_cache .ruff_cache
	find . -path ./work -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
